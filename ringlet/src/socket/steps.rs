//! The socket layer step by step: both ends of a connection as two processes of their own (`worlds`), over a connection of the kernel's, in one
//! thread. So what one end does can happen at each step of what the other is doing, and a process can die at each of its own.
//!
//! Every byte tells its place in its direction. What is known of a direction is how much was sent, how much a send that is under way has
//! tried, and how much was received.

#![allow(unsafe_code)]

use super::again::{self, Fresh, Over};
use super::meet::attach_with;
use super::memory as socket_memory;
use super::table::{self, Kind, Receiving, Sending, Socket, Stage, tables};
use super::transfer::{self, events, shut, wait};
use super::{
    budget, carrier, context, doorbells, epoll, jumps, keep_on_kernel, moving, patience, pin,
    process, release,
};
use crate::config::Config;
use crate::interconnect::mirrored::{self, Linked};
use crate::interconnect::{node, sever};
use crate::reasons::Reason;
use crate::stack::tests::{amid, deeper};
use crate::worlds;
use ringlet_core::bells;
use ringlet_core::layout::{Control, Geometry, NOT_SHUT, SLOTS_OFFSET};
use ringlet_core::memory::{Area, Buffer, Buffers};
use ringlet_core::mirror::Answers;
use ringlet_core::sync::{AtomicU64, Ordering};
use ringlet_linux::sys::{self, Errno, Sys};
use ringlet_linux::{fd, map, meet, tcp};
use std::cell::Cell;
use std::rc::Rc;
use std::sync::Mutex;

const STREAMS: [Kind; 2] = [Kind::Tcp, Kind::UnixStream];
const KINDS: [Kind; 3] = [Kind::Tcp, Kind::UnixStream, Kind::Packets];
/// Calls until what must come has come.
const CALLS_MOST: usize = 20_000;
/// How long something that must come is waited for: as good as for ever.
const PATIENCE_NS: u64 = 20_000_000_000;
const NOW: i32 = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;

/// One end, and the process that has it.
struct Side {
    world: usize,
    fd: i32,
    /// Bytes sent, and sent or tried, and received.
    sent: Cell<u64>,
    tried: Cell<u64>,
    got: Cell<u64>,
    /// No more will be sent; nothing more will be received.
    ended: Cell<bool>,
    gone: Cell<bool>,
    /// It was told of a reset.
    reset: Cell<bool>,
    /// It sleeps until a byte wakes it.
    asleep: Cell<bool>,
}

struct Pair {
    kind: Kind,
    sides: [Side; 2],
}

fn byte(from: usize, place: u64) -> u8 {
    (place ^ place >> 8) as u8 ^ if from == 0 { 0x55 } else { 0 }
}

/// Two processes, for the connections that follow.
fn two_worlds() -> [usize; 2] {
    [0; 2].map(|_| {
        let world = worlds::fresh();
        start(world);
        world
    })
}

fn start(world: usize) {
    // What the tables of one are taken from is the test process's.
    static ONE: Mutex<()> = Mutex::new(());
    let _one = ONE.lock().unwrap_or_else(|held| held.into_inner());
    worlds::within(world, || {
        let mut config = Config::default();
        (config.ring_bytes, config.spin_us) = (64 << 10, 0);
        super::start(config).expect("memory for tables");
        assert!(map::share());
    });
}

/// A connection of the kernel's.
fn connection(kind: Kind) -> [i32; 2] {
    let mut fds = [0; 2];
    let ok = |done: i32| {
        assert!(done >= 0, "{}", std::io::Error::last_os_error());
        done
    };
    // SAFETY: plain calls of the kernel's, with memory of this frame.
    unsafe {
        match kind {
            Kind::Tcp => {
                let listener = ok(libc::socket(libc::AF_INET, libc::SOCK_STREAM, 0));
                let mut name: libc::sockaddr_in = core::mem::zeroed();
                name.sin_family = libc::AF_INET as u16;
                name.sin_addr.s_addr = u32::from_ne_bytes([127, 0, 0, 1]);
                let mut len = size_of_val(&name) as u32;
                let at = (&raw mut name).cast();
                ok(libc::bind(listener, at, len));
                ok(libc::listen(listener, 1));
                ok(libc::getsockname(listener, at, &mut len));
                fds[0] = ok(libc::socket(libc::AF_INET, libc::SOCK_STREAM, 0));
                ok(libc::connect(fds[0], at, len));
                fds[1] =
                    ok(libc::accept4(listener, core::ptr::null_mut(), core::ptr::null_mut(), 0));
                sys::close(listener);
            }
            kind => {
                let kind = match kind {
                    Kind::Packets => libc::SOCK_SEQPACKET,
                    _ => libc::SOCK_STREAM,
                };
                ok(libc::socketpair(libc::AF_UNIX, kind, 0, fds.as_mut_ptr()));
            }
        }
    }
    fds
}

impl Side {
    fn new(world: usize, fd: i32, kind: Kind) -> Side {
        worlds::within(world, || {
            tables().unwrap().follow(fd, kind).expect("room in the tables");
        });
        Side {
            world,
            fd,
            sent: Cell::new(0),
            tried: Cell::new(0),
            got: Cell::new(0),
            ended: Cell::new(false),
            gone: Cell::new(false),
            reset: Cell::new(false),
            asleep: Cell::new(false),
        }
    }

    /// Its process makes a call (and so does not sleep).
    fn with<T>(&self, act: impl FnOnce(&'static Socket) -> T) -> T {
        self.asleep.set(false);
        worlds::within(self.world, || act(table::socket(self.fd).expect("a socket of ours")))
    }

    fn attach(&self, accepting: bool, segment: Option<i32>) -> i32 {
        self.with(|socket| {
            socket.side.set(accepting as u32);
            let segment = attach_with(socket, segment);
            assert_eq!(socket.stage(), Stage::Attached);
            segment
        })
    }

    fn is_in_ring(&self) -> bool {
        self.with(|socket| {
            socket.end().sending() == Sending::Ring && socket.end().receiving() == Receiving::Ring
        })
    }

    /// The kernel shows it as readable, as to one who sleeps there. (TCP may wait for company: Nagle.)
    fn would_wake(&self) -> bool {
        let mut fds = [fd::pollfd { fd: self.fd, events: libc::POLLIN, revents: 0 }];
        fd::poll(&mut fds, Some(PATIENCE_NS), None) == Ok(1)
    }
}

impl Pair {
    fn new(worlds: [usize; 2], kind: Kind) -> Rc<Pair> {
        let fds = connection(kind);
        let sides = [0, 1].map(|side| Side::new(worlds[side], fds[side], kind));
        let segment = sides[1].attach(true, None);
        sides[0].attach(false, Some(segment));
        sys::close(segment);
        let pair = Rc::new(Pair { kind, sides });
        pair.enter_ring();
        pair
    }

    fn enter_ring(&self) {
        for _ in 0..CALLS_MOST {
            if self.sides.iter().all(Side::is_in_ring) {
                return;
            }
            for side in [0, 1] {
                let _ = self.send(side, 1);
                let _ = self.receive(1 - side, 100);
            }
        }
        panic!("the connection does not enter the ring");
    }

    fn note(&self, side: usize, error: Errno) {
        let broken = [Errno::EPIPE, Errno::ECONNRESET, Errno::EBADF].contains(&error);
        assert!(broken || error == Errno::EAGAIN, "error {}", error.0);
        // (Whose sends fail after his own end is told of nothing.)
        let told =
            error == Errno::ECONNRESET || error == Errno::EPIPE && !self.sides[side].ended.get();
        self.sides[side].reset.set(self.sides[side].reset.get() || told);
    }

    fn send(&self, from: usize, len: u64) -> Sys<usize> {
        let side = &self.sides[from];
        let start = side.sent.get();
        let bytes: Vec<u8> = (start..start + len).map(|place| byte(from, place)).collect();
        side.tried.set(start + len);
        let done = side.with(|socket| {
            let list = [Buffer { base: bytes.as_ptr().cast_mut(), len: bytes.len() }];
            // SAFETY: only read from.
            transfer::send(socket, &mut unsafe { Buffers::new(&list) }, NOW)
        });
        match done {
            Ok(sent) => side.sent.set(start + sent as u64),
            Err(error) => self.note(from, error),
        }
        side.tried.set(side.sent.get());
        done
    }

    fn took(&self, to: usize, bytes: &[u8]) {
        let got = self.sides[to].got.get();
        let from = 1 - to;
        for (place, found) in (got..).zip(bytes) {
            assert_eq!(*found, byte(from, place), "the byte at {place}");
        }
        let got = got + bytes.len() as u64;
        assert!(got <= self.sides[from].tried.get(), "more than was sent");
        self.sides[to].got.set(got);
    }

    fn receive(&self, to: usize, len: usize) -> Sys<usize> {
        // (A packet is taken whole.)
        let len = if self.kind == Kind::Packets { 30_000 } else { len };
        let mut bytes = vec![0u8; len];
        let done = self.sides[to].with(|socket| {
            let list = [Buffer { base: bytes.as_mut_ptr(), len }];
            // SAFETY: written to only while it is borrowed here.
            transfer::receive(socket, &mut unsafe { Buffers::new(&list) }, NOW)
        });
        match done {
            Ok(0) => {
                let peer = &self.sides[1 - to];
                assert!(peer.ended.get() || peer.gone.get(), "an end that nobody made");
                if !self.sides[to].reset.get() {
                    self.has_all(to);
                }
            }
            Ok(n) => self.took(to, &bytes[..n]),
            Err(error) => self.note(to, error),
        }
        done
    }

    /// What a stranger reads from the kernel's connection.
    fn receive_around(&self, to: usize) -> Sys<usize> {
        let mut bytes = [0u8; 100];
        // SAFETY: memory of this frame.
        let n =
            unsafe { libc::recv(self.sides[to].fd, bytes.as_mut_ptr().cast(), bytes.len(), NOW) };
        match n {
            0.. => {
                self.took(to, &bytes[..n as usize]);
                Ok(n as usize)
            }
            _ => Err(Errno(std::io::Error::last_os_error().raw_os_error().unwrap())),
        }
    }

    /// For whoever looks for a fault.
    fn show(&self) {
        for side in self.sides.iter().filter(|side| !side.gone.get()) {
            worlds::within(side.world, || {
                let socket = table::socket(side.fd).unwrap();
                let end = socket.end();
                eprintln!(
                    "sending {:?}, receiving {:?}: {} sent, {} received; ended {}, reset {}, asleep {}; in the kernel {:?}, in the ring {}, wish {}",
                    end.sending(),
                    end.receiving(),
                    side.sent.get(),
                    side.got.get(),
                    side.ended.get(),
                    side.reset.get(),
                    side.asleep.get(),
                    ringlet_linux::tcp::unread(side.fd),
                    socket.incoming().is_some_and(|ring| end.rx.has_bytes(&ring)),
                    socket.incoming().unwrap().control().data_wish().granted_by_sender(),
                );
            });
        }
    }

    fn has_all(&self, to: usize) {
        let (got, sent) = (self.sides[to].got.get(), self.sides[1 - to].sent.get());
        assert!(got >= sent, "{got} of {sent} bytes, and then the end");
    }

    fn look(&self, side: usize) -> i16 {
        let events = libc::POLLIN | libc::POLLOUT | libc::POLLRDHUP;
        self.sides[side].with(|socket| events::poll_mask(socket, events, false, 0))
    }

    /// Asks to be woken by a byte. False if there is something to be done already.
    fn falls_asleep(&self, side: usize) -> bool {
        self.sides[side].with(|socket| wait::want_bytes(socket, true, false));
        let asleep = self.look(side) & !libc::POLLOUT == 0;
        self.sides[side].asleep.set(asleep);
        asleep
    }

    /// Nobody sleeps beside what came for him. (Between calls.)
    fn sleepers_were_woken(&self) {
        for side in [0, 1] {
            let (here, peer) = (&self.sides[side], &self.sides[1 - side]);
            let due = peer.sent.get() > here.got.get() || peer.ended.get() || peer.gone.get();
            if here.asleep.get() && !here.gone.get() && due {
                let woken = here.would_wake();
                if !woken {
                    self.show();
                }
                assert!(woken, "side {side} sleeps on");
            }
        }
    }

    fn shut(&self, side: usize) {
        self.sides[side].with(|socket| {
            assert!(shut::before(socket, libc::SHUT_WR));
            let done = shut::shut_down(socket, libc::SHUT_WR);
            assert!(done.is_ok() || done == Err(Errno::ENOTCONN), "{done:?}");
        });
        self.sides[side].ended.set(true);
    }

    fn leave(&self, side: usize, reason: Reason) {
        self.sides[side].with(|socket| keep_on_kernel(socket, reason));
    }

    fn close(&self, side: usize) {
        let end = &self.sides[side];
        end.ended.set(true);
        end.gone.set(true);
        worlds::within(end.world, || {
            let known = table::lookup(end.fd).expect("a socket of ours");
            assert!(process::before_close(end.fd, known));
        });
        sys::close(end.fd);
    }

    /// Its process dies: the kernel closes its descriptor, and it says and does nothing any more.
    fn die(&self, side: usize) {
        let end = &self.sides[side];
        let socket = end.with(|socket| socket);
        end.gone.set(true);
        sys::close(end.fd);
        worlds::within(end.world, || {
            let tables = tables().unwrap();
            tables.clear(end.fd);
            socket.set_stage(Stage::Closing);
            release::clean_up_as(socket, true, false);
        });
    }

    /// All that was sent to this side arrives, while the other side goes on with its calls, if it is there.
    fn drain(&self, to: usize) {
        let from = 1 - to;
        for _ in 0..CALLS_MOST {
            if self.sides[to].got.get() >= self.sides[from].sent.get() {
                return;
            }
            match self.receive(to, 30_000) {
                Ok(0) => return,
                Err(Errno::ECONNRESET) => return,
                _ => {}
            }
            if !self.sides[from].gone.get() {
                self.look(from);
            }
        }
        panic!("what was sent does not come");
    }

    /// The other side has ended: that is seen, behind all bytes.
    fn meets_the_end(&self, side: usize) {
        for _ in 0..CALLS_MOST {
            match self.receive(side, 30_000) {
                Ok(0) | Err(Errno::ECONNRESET) => return,
                _ => {}
            }
        }
        panic!("no end comes");
    }

    fn has_reset(&self) -> bool {
        self.sides.iter().any(|side| side.reset.get())
    }

    /// Whatever has happened: what was sent comes, in both directions, and then the ends.
    fn finish(&self) {
        for side in [0, 1] {
            if !self.sides[side].gone.get() {
                self.drain(side);
            }
        }
        let resets = self.has_reset();
        for side in [0, 1] {
            if !self.sides[side].gone.get() {
                let peer = &self.sides[1 - side];
                if !resets && !peer.gone.get() && !peer.ended.get() {
                    assert_eq!(self.receive(side, 1), Err(Errno::EAGAIN), "more than was sent");
                }
                self.close(side);
                if !self.sides[1 - side].gone.get() {
                    self.meets_the_end(1 - side);
                }
            }
        }
    }
}

const RECORD: u64 = 5;

/// An end that can't go on has bytes that it will never send: its peer is told so, behind what there is.
#[test]
fn who_tears_a_connection_off_leaves_no_orderly_end() {
    let worlds = two_worlds();
    for kind in KINDS {
        let pair = Pair::new(worlds, kind);
        pair.send(0, RECORD).unwrap();
        pair.sides[0].with(patience::miscounted);
        // (Of packets, the error comes first: `packets::error_first`.)
        if kind == Kind::Packets {
            assert_eq!(pair.receive(1, 1), Err(Errno::ECONNRESET));
        }
        pair.drain(1);
        assert_eq!(pair.sides[1].got.get(), pair.sides[0].sent.get());
        if kind != Kind::Packets {
            assert_eq!(pair.receive(1, 1), Err(Errno::ECONNRESET), "{kind:?}");
        }
        for side in [0, 1] {
            pair.close(side);
        }
    }
}

/// A receiver leaves the ring behind each byte; what it has not read is sent again, by the sender's next call or when it is woken, and is
/// all that the kernel's connection carries.
#[test]
fn a_receiver_leaves_at_each_byte() {
    let worlds = two_worlds();
    for kind in STREAMS {
        for (around, asleep) in [(false, false), (true, false), (true, true)] {
            for read in 0..=6 * RECORD {
                let pair = Pair::new(worlds, kind);
                for _ in 0..6 {
                    assert_eq!(pair.send(0, RECORD), Ok(RECORD as usize));
                }
                for _ in 0..read {
                    assert_eq!(pair.receive(1, 1), Ok(1));
                }
                let slept = asleep && pair.falls_asleep(0);
                pair.leave(1, if around { Reason::Exec } else { Reason::Option });
                let unread = pair.sides[1].got.get() < pair.sides[0].sent.get();
                if slept && around && unread {
                    assert!(
                        pair.sides[0].would_wake(),
                        "who has something to send again sleeps on"
                    );
                }
                pair.look(0);
                assert_eq!(pair.send(0, RECORD), Ok(RECORD as usize));
                if around {
                    while pair.receive_around(1).is_ok() {}
                    pair.has_all(1);
                }
                pair.drain(1);
                pair.finish();
            }
        }
    }
}

/// A sender leaves the ring behind each byte.
#[test]
fn a_sender_leaves_at_each_byte() {
    let worlds = two_worlds();
    for kind in KINDS {
        for before in 0..20 {
            for asleep in [false, true] {
                let pair = Pair::new(worlds, kind);
                let slept = asleep && pair.falls_asleep(1);
                if before > 0 {
                    assert_eq!(pair.send(0, before), Ok(before as usize));
                    assert!(!slept || pair.sides[1].would_wake(), "a sleeper is not woken");
                }
                pair.leave(0, Reason::Option);
                assert_eq!(pair.send(0, 3), Ok(3));
                assert!(!slept || pair.sides[1].would_wake(), "a sleeper is not woken");
                pair.drain(1);
                assert_eq!(pair.send(1, 3), Ok(3));
                pair.drain(0);
                pair.finish();
            }
        }
    }
}

/// One end closes, shuts or dies behind each call of an exchange.
#[test]
fn an_end_comes_behind_each_call() {
    let worlds = two_worlds();
    let calls: [fn(&Pair); 7] = [
        |pair| _ = pair.send(0, 30),
        |pair| _ = pair.receive(1, 10),
        |pair| _ = pair.send(1, 40),
        |pair| _ = pair.falls_asleep(0),
        |pair| _ = pair.send(1, 8),
        |pair| _ = pair.receive(0, 100),
        |pair| _ = pair.receive(1, 100),
    ];
    let ends: [fn(&Pair, usize); 3] = [Pair::close, Pair::shut, Pair::die];
    for kind in KINDS {
        for (behind, side) in (0..=calls.len()).flat_map(|behind| [(behind, 0), (behind, 1)]) {
            for end in ends {
                let pair = Pair::new(worlds, kind);
                for call in &calls[..behind] {
                    call(&pair);
                }
                end(&pair, side);
                pair.drain(1 - side);
                pair.meets_the_end(1 - side);
                assert_ne!(pair.look(1 - side) & libc::POLLIN, 0, "poll does not tell of the end");
                pair.finish();
            }
        }
    }
}

type Act = (&'static str, fn(&Pair, usize));

const ACTS: [Act; 8] = [
    ("send", |pair, side| _ = pair.send(side, 30)),
    ("fill", |pair, side| _ = (0..10).try_for_each(|_| pair.send(side, 20_000).map(drop))),
    ("receive", |pair, side| _ = pair.receive(side, 50)),
    ("sleep", |pair, side| _ = pair.falls_asleep(side)),
    ("leave", |pair, side| pair.leave(side, Reason::Option)),
    ("shut", Pair::shut),
    ("close", Pair::close),
    ("die", Pair::die),
];

/// At each step of each act of one end, the other does each of its own.
#[test]
fn the_peer_acts_at_each_step() {
    let worlds = two_worlds();
    let (mut ran, mut resets) = (0, 0);
    for kind in KINDS {
        for (name, act) in ACTS {
            for (other, event) in ACTS {
                for step in 1.. {
                    let pair = Pair::new(worlds, kind);
                    assert_eq!((pair.send(0, 20), pair.send(1, 20)), (Ok(20), Ok(20)));
                    let at = pair.clone();
                    worlds::at_step(step, move || event(&at, 1));
                    act(&pair, 0);
                    let over = worlds::nothing_more();
                    if over {
                        event(&pair, 1);
                    }
                    pair.sleepers_were_woken();
                    eprintln!("{kind:?}: {name}, and {other} at step {step}");
                    pair.finish();
                    ran += 1;
                    resets += pair.has_reset() as u32;
                    if over {
                        break;
                    }
                }
            }
        }
    }
    // (Of ends with bytes unread, and of waits for a peer that is in the middle of something.)
    assert!(resets * 4 < ran, "{resets} of {ran} runs with a reset");
}

/// An accepting end has got its segment, and then who carries dies: the other one, which was to get its own by the answer, never comes, and says
/// nothing. Both go on in the kernel.
#[test]
fn a_peer_that_was_never_to_come_is_not_waited_for() {
    let worlds = two_worlds();
    for called in [false, true] {
        let [near, far] = connection(Kind::Tcp);
        let sides = [Side::new(worlds[0], near, Kind::Tcp), Side::new(worlds[1], far, Kind::Tcp)];
        let pair = Pair { kind: Kind::Tcp, sides };
        sys::close(pair.sides[0].attach(true, None));
        let [lifeline, channel] = [0; 2].map(|_| meet::pair().unwrap());
        sys::close(lifeline[1]);
        if called {
            assert_eq!(pair.receive(0, 1), Err(Errno::EAGAIN));
        }
        pair.sides[0].with(|socket| {
            socket.end().mirrored.set(mirrored::HAS_ADAPTER);
            socket.lifeline.set(lifeline[0] as u32);
            socket.channel.set(channel[0] as u32);
            keep_on_kernel(socket, Reason::NoPeer);
        });
        for (from, to) in [(0, 1), (1, 0)] {
            let bytes: Vec<u8> = (0..30).map(|place| byte(from, place)).collect();
            assert_eq!(tcp::send_from(pair.sides[from].fd, &bytes, NOW), Ok(30), "{called}");
            pair.sides[from].tried.set(30);
            assert!(pair.sides[to].would_wake());
            assert_eq!(pair.receive_around(to), Ok(30), "{called}, from {from}");
        }
        (0..2).for_each(|side| pair.close(side));
        sys::close(channel[1]);
    }
}

/// Drops, or lets pass again, what comes for this socket from the network.
fn border(fd: i32, passes: bool) {
    let mut drop_all = libc::sock_filter { code: 6, jt: 0, jf: 0, k: 0 };
    let filter = libc::sock_fprog { len: 1, filter: &raw mut drop_all };
    let option = if passes { libc::SO_DETACH_FILTER } else { libc::SO_ATTACH_FILTER };
    let len = size_of_val(&filter) as u32;
    // SAFETY: a program of one instruction, of this frame.
    let set =
        unsafe { libc::setsockopt(fd, libc::SOL_SOCKET, option, (&raw const filter).cast(), len) };
    assert_eq!(set, 0);
}

/// A border that passes no packets any more holds up also who polls before each send; and who was held up comes to the ring again.
#[test]
fn a_poll_does_not_stand_for_a_look_at_the_border() {
    let pair = Pair::new(two_worlds(), Kind::Tcp);
    pair.sides.iter().for_each(|side| {
        side.with(|socket| socket.introduced.set(node::INTRODUCED));
    });
    let turns_until = |done: &dyn Fn() -> bool, what: &str| {
        let until = sys::now_ns() + PATIENCE_NS;
        while !done() {
            assert!(sys::now_ns() < until, "{what}");
            std::thread::sleep(std::time::Duration::from_millis(1));
            for side in [0, 1] {
                // (Its term is over.)
                pair.sides[side].with(|socket| {
                    socket.lease_due_ns.set(socket.lease_due_ns.get().min(1));
                });
                pair.look(side);
                let _ = pair.send(side, 1);
                let _ = pair.receive(1 - side, 1000);
            }
        }
    };
    let asked = |side: &Side| side.with(|socket| socket.lease_due_ns.get() != 0);
    turns_until(&|| pair.sides.iter().all(asked), "nobody asks");
    let all = |passes| pair.sides.iter().for_each(|side| border(side.fd, passes));
    let lapsed = |side: &Side| side.with(|socket| socket.end().sending() == Sending::Kernel);
    all(false);
    turns_until(&|| pair.sides.iter().all(lapsed), "they send on where nothing passes");
    all(true);
    // They come back when that time is over, and not before.
    let stays_out = |until_ns: u64| {
        pair.sides.iter().for_each(|side| {
            side.with(|socket| {
                assert_eq!(socket.end().lapses.get(), 1);
                socket.end().lapsed_until_ns.set(until_ns);
            });
        });
    };
    let passes = |side: &Side| side.with(tcp_passes);
    stays_out(u64::MAX);
    turns_until(&|| pair.sides.iter().all(passes), "the border passes nothing again");
    for _ in 0..100 {
        for side in [0, 1] {
            let _ = pair.send(side, 1);
            let _ = pair.receive(1 - side, 1000);
        }
        assert!(!pair.sides.iter().any(Side::is_in_ring), "they are back at once");
    }
    stays_out(0);
    turns_until(&|| pair.sides.iter().all(Side::is_in_ring), "they do not come back");
    pair.finish();
}

/// Was something acknowledged since its lease lapsed?
fn tcp_passes(socket: &Socket) -> bool {
    let acked = socket.end().lapsed.get() - 1;
    ringlet_linux::tcp::counts(socket.fd()).is_ok_and(|now| !now.unanswered && now.acked != acked)
}

/// Two ends that an adapter of no delay keeps in step, and what ends with it.
fn mirrored_pair() -> (Rc<Pair>, [i32; 2]) {
    let pair = Pair::new(two_worlds(), Kind::Tcp);
    let channel = meet::pair().unwrap();
    let lifelines = [0; 2].map(|_| meet::pair().unwrap());
    for (at, side) in pair.sides.iter().enumerate() {
        side.with(|socket| {
            socket.end().mirrored.set(mirrored::HAS_ADAPTER);
            socket.lifeline.set(lifelines[at][0] as u32);
            socket.channel.set(channel[at] as u32);
        });
    }
    (pair, lifelines.map(|line| line[1]))
}

/// Both ends have gone back to the kernel, and each gets a segment of another carrier, of no delay, in the place of the old one: if one carrier, or both,
/// have died; and if an end has severed itself from one that lives, for what the other end says or since it does not answer.
#[test]
fn what_was_carried_is_carried_again() {
    for dead in [[true, true], [true, false], [false, true], [false, false]] {
        is_carried_again(dead);
    }
}

fn is_carried_again(dead: [bool; 2]) {
    let (pair, adapter) = mirrored_pair();
    for side in &pair.sides {
        side.with(|socket| socket.introduced.set(node::INTRODUCED | node::CARRIED));
    }
    // (Some stands unread in the ring, and some was received.)
    for (side, sends, takes) in [(0, 300, 100), (1, 50, 50)] {
        assert_eq!(pair.send(side, sends), Ok(sends as usize));
        assert_eq!(pair.receive(1 - side, takes), Ok(takes));
    }
    let over = |side: &Side| side.with(again::is_over_now);
    assert!(pair.sides.iter().all(|side| over(side) != Over::Yes), "it lives");
    for side in 0..2 {
        if dead[side] {
            sys::close(adapter[side]);
        }
    }
    if dead == [false, false] {
        assert!(pair.sides[0].with(sever::sever));
    }
    // (What comes by the kernel has the other end listen.)
    for side in (0..2).filter(|side| dead[*side] || !dead[1 - side] && *side == 0) {
        pair.look(side);
        assert_eq!(pair.send(side, 20), Ok(20));
    }
    let until_both = |done: &dyn Fn(usize) -> bool| {
        let until = sys::now_ns() + PATIENCE_NS;
        while !(0..2).all(done) {
            assert!(sys::now_ns() < until, "they are not done with it, {dead:?}");
            for side in [0, 1] {
                pair.look(side);
                let _ = pair.receive(side, 7);
            }
        }
    };
    // All is in the kernel, and whose carrier lives is not over with it: two are never to have the connection.
    until_both(&|side| {
        let over = over(&pair.sides[side]);
        assert!(dead[side] || over != Over::Yes, "{dead:?}");
        pair.sides[side].with(|socket| {
            let end = socket.end();
            let sends = matches!(end.sending(), Sending::Kernel | Sending::KernelForGood);
            sends && end.receiving() == Receiving::Kernel && (over == Over::Yes || !dead[side])
        })
    });
    (0..2).filter(|side| !dead[*side]).for_each(|side| sys::close(adapter[side]));
    until_both(&|side| over(&pair.sides[side]) == Over::Yes);
    assert!(pair.sides.iter().all(|side| side.with(|socket| socket.comes_again.is())));
    let bytes = 64 << 10;
    let geometry = Geometry::new(bytes).unwrap();
    let memory = map::sealed_memfd(c"anew", geometry.segment_bytes(), libc::F_SEAL_SEAL).unwrap();
    let channel = meet::pair().unwrap();
    let lifelines = [0; 2].map(|_| meet::pair().unwrap());
    let change = |at: usize| {
        let area = map::map_segment(memory, geometry.segment_bytes()).unwrap();
        socket_memory::hold_first(area, geometry).unwrap();
        let (lifeline, ring_bytes) =
            (fd::duplicate_high(lifelines[at][0], 0).unwrap(), bytes as u64);
        let linked =
            Linked { lifeline, segment: -1, ring_bytes, ticket: [0; 2], bell: 0, adapter: 1 };
        pair.sides[at].with(|socket| {
            let tables = tables().unwrap();
            budget::reserve(tables, geometry.segment_bytes()).unwrap();
            socket.meeting.set(fd::duplicate_high(channel[at], 0).unwrap() as u32);
            let before = socket.segment().unwrap().0.base();
            let changed = again::change(tables, socket, Fresh { area, geometry, linked, home: 0 });
            assert_eq!(socket.segment().unwrap().0.base(), before, "it lies elsewhere");
            if changed.is_ok() {
                assert_eq!((socket.end().barred.get(), socket.epoch.get()), (0, 1));
                assert!(!socket.comes_again.is() && !socket.meets_anew());
                // (Nobody answers as a carrier does: what follows is about rings that the two share.)
                socket.end().mirrored.set(0);
            }
            changed
        })
    };
    // Not while a thread may be in between a word that it changes and takes back.
    pair.sides[0].with(|socket| socket.end().ringers.begin());
    assert!(change(0).is_err());
    pair.sides[0].with(|socket| socket.end().ringers.end());
    // The one that has changed is no worse than before beside one that has not.
    assert_eq!(change(0), Ok(()));
    for (from, to) in [(0, 1), (1, 0)] {
        assert_eq!(pair.send(from, 20), Ok(20));
        assert!(pair.sides[to].would_wake());
        assert_eq!(pair.receive(to, 20), Ok(20));
        assert!(!pair.sides[from].is_in_ring());
    }
    assert_eq!(change(1), Ok(()));
    // Who slept in the kernel while it was changed hears of what comes by the ring.
    assert!(pair.falls_asleep(0));
    pair.enter_ring();
    for round in 0..2000 {
        for side in [0, 1] {
            let _ = pair.send(side, 1 + round % 3000);
            pair.sleepers_were_woken();
            let _ = pair.receive(1 - side, 5000);
        }
    }
    assert!(pair.sides.iter().all(Side::is_in_ring));
    pair.finish();
    channel.into_iter().chain(lifelines.into_iter().flatten()).for_each(sys::close);
    sys::close(memory);
}

/// What is the kernel's for good does not come again, since before its carrier has died or behind that.
#[test]
fn what_has_ended_or_is_barred_is_not_carried_again() {
    for why in 0..4 {
        let (pair, adapter) = mirrored_pair();
        if why == 3 {
            pair.sides[0].with(|socket| {
                let _held = socket.end().send_lock.take();
                pin::keep_out(socket, socket.end(), Reason::Miscounted);
            });
        }
        adapter.into_iter().for_each(sys::close);
        pair.look(0);
        let over = || pair.sides[0].with(again::is_over_now);
        assert_eq!(over() == Over::Never, why == 3);
        match why {
            0 => pair.shut(0),
            1 => pair.leave(0, Reason::Exec),
            2 => pair.sides[0].with(|socket| socket.end().given.set(1)),
            _ => {}
        }
        assert_eq!(over(), Over::Never, "{why}");
    }
}

/// Nor for a look whether the adapter lives.
#[test]
fn news_of_the_kernel_do_not_stand_for_a_look_at_the_adapter() {
    let (pair, adapter) = mirrored_pair();
    assert_eq!(pair.send(0, 1), Ok(1));
    assert!(pair.sides[0].is_in_ring());
    adapter.into_iter().for_each(sys::close);
    pair.sides[0].with(|socket| {
        // (Its millisecond is over.)
        socket.sender_asked.set(0);
        doorbells::kernel_tells(socket, libc::POLLIN as u32);
    });
    assert_eq!(pair.send(0, 1), Ok(1));
    let sending = pair.sides[0].with(|socket| socket.end().sending());
    assert_ne!(sending, Sending::Ring, "it sends on where nobody carries");
    pair.finish();
}

/// A set that waits for edges tells of what the kernel brings for a ring whose adapter is dead: no mark stands there that says so.
#[test]
fn an_edge_is_told_of_what_follows_a_dead_adapter() {
    let (pair, adapter) = mirrored_pair();
    let side = &pair.sides[1];
    let epfd = fd::epoll_create().unwrap();
    let (readable, edges) = (libc::EPOLLIN as u32, libc::EPOLLET as u32);
    let set = side.with(|socket| {
        epoll::created(epfd);
        let set = epoll::set_of(epfd).unwrap();
        let event = fd::epoll_event { events: readable | edges, u64: 7 };
        epoll::control(set, libc::EPOLL_CTL_ADD, side.fd, socket, Some(event)).unwrap();
        set
    });
    let told = || {
        let mut out = [fd::epoll_event { events: 0, u64: 0 }; 4];
        side.with(|_| epoll::wait(epoll::Visit::of(set), &mut out, Some(0), None)).unwrap() > 0
    };
    let takes_all = || while pair.receive(1, 100).is_ok() {};
    assert_eq!(pair.send(0, 5), Ok(5));
    assert!(told());
    takes_all();
    assert!(!told());
    adapter.into_iter().for_each(sys::close);
    assert_eq!(pair.look(0) & libc::POLLIN, 0);
    assert_eq!(pair.send(0, 82), Ok(82));
    assert!(side.would_wake());
    assert!(told(), "82 bytes are never told of");
    takes_all();
    pair.has_all(1);
    assert!(!told());
    side.with(|_| epoll::closed(set));
    sys::close(epfd);
    pair.finish();
}

/// In the middle of what an adapter stands still.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Amid {
    Nothing,
    Pass,
    /// It is on the connection, and that is noted nowhere.
    BytePut,
    ByteNotPut,
}

/// Another mapping of the memory that this one is of.
#[allow(unsafe_code)]
fn mapped_twice(area: Area) -> Area {
    // SAFETY: KERNEL: of a shared mapping, one of length 0 is doubled.
    let base = unsafe { libc::mremap(area.base().cast(), 0, area.len(), libc::MREMAP_MAYMOVE) };
    assert_ne!(base, libc::MAP_FAILED);
    // SAFETY: a whole mapping of ours.
    unsafe { Area::new(base.cast(), area.len()) }
}

/// A mirrored pair in which side 0 needs an answer of an adapter that stands still, and then the adapter goes on: it writes what it likes.
fn beside_an_adapter_that_stands_still(way: u32, amid: Amid) -> bool {
    let (pair, adapter) = mirrored_pair();
    assert_eq!((pair.send(0, 5), pair.send(1, 7)), (Ok(5), Ok(7)));
    let words = |side: &Side, look: &dyn Fn(&Control) -> bool| {
        side.with(|socket| look(socket.outgoing().unwrap().control()))
    };
    // As a carrier that is at work for both.
    for side in &pair.sides {
        match amid {
            Amid::Nothing => {}
            Amid::Pass => assert!(words(side, &Control::begin_pass)),
            Amid::ByteNotPut => assert!(words(side, &Control::begin_byte)),
            Amid::BytePut => {
                assert!(words(side, &Control::begin_byte) && tcp::ring_byte(side.fd));
                side.with(|socket| {
                    bells::count(&socket.outgoing().unwrap().control().sender.bells);
                });
            }
        }
    }
    let written_to = pair
        .sides
        .each_ref()
        .map(|side| side.with(|socket| mapped_twice(socket.segment().unwrap().0)));
    match way {
        // Until the rest is to wait in the kernel.
        0 => {
            for _ in 0..CALLS_MOST {
                if pair.sides[0].with(|socket| socket.end().sending()) != Sending::Ring {
                    break;
                }
                let _ = pair.send(0, 30_000);
            }
        }
        1 => pair.leave(0, Reason::Option),
        _ => pair.shut(0),
    }
    if amid == Amid::ByteNotPut {
        let has_ended = pair.sides[0].with(|socket| socket.end().ended.get() != 0);
        adapter.into_iter().for_each(sys::close);
        return !has_ended;
    }
    for side in &pair.sides {
        let heard = side.with(sever::sever);
        assert!(heard, "{way}, {amid:?}");
    }
    let begins = words(&pair.sides[0], &|words| words.begin_pass() && words.begin_byte());
    assert!(!begins, "it may go on, {way}, {amid:?}");
    if amid != Amid::Nothing {
        for (at, area) in (0..).zip(written_to) {
            let before = pair.sides[at].with(|socket| socket.segment().unwrap().0);
            (0..area.len())
                .step_by(8)
                .for_each(|at| area.at::<AtomicU64>(at).store(!0, Ordering::Relaxed));
            assert_ne!(before.at::<AtomicU64>(0).load(Ordering::Relaxed), !0, "{way}, {amid:?}");
        }
    }
    if way != 2 {
        let _ = pair.send(0, 9);
    }
    (0..2).for_each(|side| pair.drain(side));
    (0..2).for_each(|side| pair.has_all(side));
    assert!(!pair.has_reset(), "{way}, {amid:?}");
    pair.finish();
    adapter.into_iter().for_each(sys::close);
    true
}

/// An adapter stands still, and may go on: who needs its answer severs itself, loses nothing, and hears nothing of it any more. So it is in the middle of
/// what the adapter does for it, too.
#[test]
fn an_adapter_that_stands_still_costs_no_connection() {
    for way in 0..3 {
        for amid in [Amid::Nothing, Amid::Pass, Amid::BytePut] {
            assert!(beside_an_adapter_that_stands_still(way, amid));
        }
    }
}

/// Two threads that hold one lock each wait for what stands still: one of them copies the segment, and both go on.
#[test]
fn who_waits_for_what_stands_still_holds_up_nobody() {
    let (pair, adapter) = mirrored_pair();
    let side = &pair.sides[0];
    let (world, fd) = (side.world, side.fd);
    assert!(side.with(|socket| socket.outgoing().unwrap().control().begin_pass()));
    let both = std::sync::Barrier::new(2);
    let severs = |sends: bool| {
        worlds::within(world, || {
            let socket = table::socket(fd).expect("a socket of ours");
            let end = socket.end();
            let lock = if sends { &end.send_lock } else { &end.receive_lock };
            let _held = lock.take().unwrap();
            both.wait();
            sever::sever(socket)
        })
    };
    std::thread::scope(|scope| {
        let severs = &severs;
        let threads = [true, false].map(|sends| scope.spawn(move || severs(sends)));
        assert!(threads.into_iter().all(|thread| thread.join().unwrap()));
    });
    adapter.into_iter().for_each(sys::close);
}

/// A handler has left a thread's wait for what stands still, while that thread has a lock: it is at work then, and nobody takes the segment away from under it.
#[test]
#[allow(unsafe_code)]
fn who_has_jumped_out_of_that_wait_does_not_stand_still() {
    thread_local! {
        static GO_OVER: Cell<Option<&'static dyn Fn()>> = const { Cell::new(None) };
        static LEFT: Cell<bool> = const { Cell::new(false) };
    }
    extern "C" fn handler(_: i32) {
        if let Some(go_over) = GO_OVER.take() {
            LEFT.set(true);
            go_over();
        }
    }
    // SAFETY: zero is a valid action; no other test uses this signal.
    unsafe {
        let mut action: libc::sigaction = core::mem::zeroed();
        action.sa_sigaction = handler as extern "C" fn(i32) as usize;
        assert_eq!(libc::sigaction(libc::SIGUSR2, &action, core::ptr::null_mut()), 0);
    }
    let (pair, adapter) = mirrored_pair();
    let side = &pair.sides[0];
    let (world, fd) = (side.world, side.fd);
    assert!(side.with(|socket| socket.outgoing().unwrap().control().begin_pass()));
    let (tell_thread, thread) = std::sync::mpsc::channel();
    let (has_left, goes_on) = (&std::sync::Barrier::new(2), &std::sync::Barrier::new(2));
    let waits = move || {
        worlds::within(world, || {
            let end = table::socket(fd).expect("a socket of ours").end();
            amid(
                |go_over| {
                    // SAFETY: taken, or put away, before this ends.
                    let go_over =
                        unsafe { core::mem::transmute::<&dyn Fn(), &'static dyn Fn()>(go_over) };
                    GO_OVER.set(Some(go_over));
                    let _held = end.receive_lock.take().unwrap();
                    tell_thread.send(sys::gettid()).unwrap();
                    while !LEFT.get() {
                        sever::sever(table::socket(fd).unwrap());
                    }
                },
                || {
                    has_left.wait();
                    goes_on.wait();
                },
            );
        })
    };
    let severed = std::thread::scope(|scope| {
        side.with(|socket| {
            let end = socket.end();
            let words = socket.outgoing().unwrap();
            // For this it has stood still, in vain.
            assert!(words.control().begin_byte());
            scope.spawn(waits);
            let thread = thread.recv().unwrap();
            let _ = sever::sever(socket);
            let sending = end.send_lock.take();
            words.control().end_byte();
            // SAFETY: no memory is passed.
            unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), thread, libc::SIGUSR2) };
            has_left.wait();
            drop(sending);
            end.unanswered.set(0);
            let severed = sever::sever(socket);
            goes_on.wait();
            severed
        })
    });
    assert!(!severed, "it is at work, perhaps");
    side.with(|socket| socket.end().unanswered.set(0));
    assert!(side.with(sever::sever), "nobody is at work any more");
    adapter.into_iter().for_each(sys::close);
}

/// While another thread forks no copy is put in place: the child would go on with the segment, beside its parent with the copy. Behind the fork it is.
#[test]
fn no_copy_is_put_in_place_amid_a_fork() {
    let (pair, adapter) = mirrored_pair();
    let side = &pair.sides[0];
    let world = side.world;
    assert!(side.with(|socket| socket.outgoing().unwrap().control().begin_pass()));
    let step = &std::sync::Barrier::new(2);
    let (amid, behind) = std::thread::scope(|scope| {
        scope.spawn(move || {
            worlds::within(world, || {
                let gate = &tables().unwrap().process().gate;
                gate.shut();
                step.wait();
                step.wait();
                gate.open(false);
                step.wait();
            })
        });
        step.wait();
        let amid = side.with(sever::sever);
        step.wait();
        step.wait();
        side.with(|socket| socket.end().unanswered.set(0));
        (amid, side.with(sever::sever))
    });
    assert_eq!((amid, behind), (false, true));
    adapter.into_iter().for_each(sys::close);
}

/// From now on this thread is refused a call where this argument of it has this value.
#[allow(unsafe_code)]
fn refuse(call: libc::c_long, argument: u32, value: i32, error: i32) {
    let of = |code, jt, jf, k| libc::sock_filter { code, jt, jf, k };
    let (load, equal, answer) = (0x20, 0x15, 0x06);
    let mut filter = [
        of(load, 0, 0, 0),
        of(equal, 0, 3, call as u32),
        of(load, 0, 0, 16 + 8 * argument),
        of(equal, 0, 1, value as u32),
        of(answer, 0, 0, libc::SECCOMP_RET_ERRNO | error as u32),
        of(answer, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: the program is there for the call.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        assert_eq!(libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &program), 0);
    }
}

/// There is no memory for the copy, or a filter forbids a step of it: then the segment stays as it is, and the connection ends with an error, unless the
/// step can be done without.
#[test]
fn where_no_copy_can_be_made_the_connection_ends_with_an_error() {
    let anonymous = libc::MAP_SHARED | libc::MAP_ANONYMOUS;
    let in_place = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
    for (call, argument, value, error, severs) in [
        (libc::SYS_mmap, 3, anonymous, libc::ENOMEM, false),
        (libc::SYS_mremap, 3, in_place, libc::ENOMEM, false),
        (libc::SYS_mremap, 3, in_place, libc::EPERM, false),
        // To have pages there beforehand.
        (libc::SYS_madvise, 2, 22, libc::ENOMEM, false),
        (libc::SYS_madvise, 2, 22, libc::EPERM, true),
        (libc::SYS_madvise, 2, 23, libc::ENOMEM, false),
        (libc::SYS_madvise, 2, 23, libc::EPERM, true),
    ] {
        // (The filter is this thread's.)
        let run = move || {
            let (pair, adapter) = mirrored_pair();
            assert_eq!((pair.send(0, 5), pair.send(1, 7)), (Ok(5), Ok(7)));
            let side = &pair.sides[0];
            assert!(side.with(|socket| socket.outgoing().unwrap().control().begin_pass()));
            let other = side.with(|socket| mapped_twice(socket.segment().unwrap().0));
            refuse(call, argument, value, error);
            assert_eq!(side.with(sever::sever), severs, "{call}, {error}");
            let is_same = side.with(|socket| {
                let at = SLOTS_OFFSET - 8;
                other.at::<AtomicU64>(at).store(!0, Ordering::Relaxed);
                let area = socket.segment().unwrap().0;
                area.at::<AtomicU64>(at).load(Ordering::Relaxed) == !0
            });
            assert_eq!(is_same, !severs, "{call}, {error}");
            pair.leave(0, Reason::Option);
            let has_ended = side.with(|socket| socket.end().ended.get() != 0);
            assert_eq!(has_ended, !severs, "{call}, {error}");
            adapter.into_iter().for_each(sys::close);
        };
        std::thread::spawn(run).join().unwrap();
    }
}

/// A byte that the adapter may yet put would be taken for one of the program's: the connection ends with an error.
#[test]
fn a_byte_that_may_yet_come_ends_the_connection() {
    assert!(!beside_an_adapter_that_stands_still(1, Amid::ByteNotPut));
}

/// A handler has left a receive, a send and a wait in their midst by a long jump: the next ones go on, and a set has all that is in it.
#[test]
fn calls_that_were_left_by_a_jump_stop_none() {
    let pair = Pair::new(two_worlds(), Kind::Tcp);
    let side = &pair.sides[1];
    let epfd = fd::epoll_create().unwrap();
    let set = side.with(|socket| {
        epoll::created(epfd);
        let set = epoll::set_of(epfd).unwrap();
        let event = fd::epoll_event { events: libc::EPOLLIN as u32, u64: 7 };
        epoll::control(set, libc::EPOLL_CTL_ADD, side.fd, socket, Some(event)).unwrap();
        set
    });
    let told = || {
        let mut out = [fd::epoll_event { events: 0, u64: 0 }; 4];
        side.with(|_| epoll::wait(epoll::Visit::of(set), &mut out, Some(0), None))
    };
    assert_eq!(told(), Ok(0));
    side.with(|socket| {
        deeper::<6144, _>(|| {
            std::mem::forget(socket.end().receive_lock.take());
            std::mem::forget(socket.end().send_lock.take());
            epoll::leave_amid(set);
        });
    });
    assert_eq!(pair.send(0, 5), Ok(5));
    assert_eq!(told(), Ok(1));
    assert_eq!(pair.receive(1, 100), Ok(5));
    assert_eq!(pair.send(1, 3), Ok(3));
    assert_eq!(told(), Ok(0));
    side.with(|_| epoll::closed(set));
    sys::close(epfd);
    pair.finish();
}

/// A handler arms a registration anew amid a look at its set, which has passed it: who goes to sleep then is not without it.
#[test]
fn what_a_handler_has_armed_anew_is_looked_at_before_a_sleep() {
    let pair = Pair::new(two_worlds(), Kind::Tcp);
    let side = &pair.sides[1];
    let epfd = fd::epoll_create().unwrap();
    assert_eq!(pair.send(0, 5), Ok(5));
    side.with(|socket| {
        epoll::created(epfd);
        let set = epoll::set_of(epfd).unwrap();
        let events = (libc::EPOLLIN | libc::EPOLLONESHOT) as u32;
        let change = |how| {
            let event = fd::epoll_event { events, u64: 7 };
            epoll::control(set, how, side.fd, socket, Some(event)).unwrap();
        };
        change(libc::EPOLL_CTL_ADD);
        let mut out = [fd::epoll_event { events: 0, u64: 0 }; 4];
        assert_eq!(epoll::wait(epoll::Visit::of(set), &mut out, Some(0), None), Ok(1));
        assert!(!epoll::ready(set));
        epoll::amid(set, || change(libc::EPOLL_CTL_MOD));
        assert!(epoll::ready(set));
        assert_eq!(epoll::wait(epoll::Visit::of(set), &mut out, Some(0), None), Ok(1));
        assert!(!epoll::ready(set));
        epoll::closed(set);
    });
    sys::close(epfd);
    assert_eq!(pair.receive(1, 100), Ok(5));
    pair.finish();
}

/// A handler that has interrupted a thread at work in a set forks: what peers say on the ready board the parent finds, though the child goes on with that
/// work too; and it looks at all that is in the set.
#[test]
fn a_fork_amid_the_work_in_a_set_takes_nothing_from_the_parent() {
    const LANE: usize = 77;
    let pair = Pair::new(two_worlds(), Kind::Tcp);
    let side = &pair.sides[1];
    let epfd = fd::epoll_create().unwrap();
    side.with(|socket| {
        epoll::created(epfd);
        let set = epoll::set_of(epfd).unwrap();
        let event = fd::epoll_event { events: libc::EPOLLIN as u32, u64: 7 };
        epoll::control(set, libc::EPOLL_CTL_ADD, side.fd, socket, Some(event)).unwrap();
        let mut out = [event; 4];
        assert_eq!(epoll::wait(epoll::Visit::of(set), &mut out, Some(0), None), Ok(0));
        let (mut found, mut status) = (Vec::new(), 0);
        epoll::at_work(set, |board| {
            board.announce(LANE);
            assert!(!epoll::looks_at_all(set));
            process::before_fork();
            // SAFETY: the child makes no call of libc's that another thread could be in the midst of.
            let child = unsafe { libc::fork() };
            if child == 0 {
                process::after_fork_in_child();
                board.collect(|_| {});
                // SAFETY: it ends without any of this process's handlers.
                unsafe { libc::_exit(0) };
            }
            process::after_fork_in_parent();
            process::forked(child);
            // SAFETY: a word of this frame.
            assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
            board.collect(|lane| found.push(lane));
        });
        assert_eq!((status, found), (0, vec![LANE]));
        assert!(epoll::looks_at_all(set));
        assert_eq!(epoll::wait(epoll::Visit::of(set), &mut out, Some(0), None), Ok(0));
        epoll::closed(set);
    });
    sys::close(epfd);
    pair.finish();
}

/// A set looks where the peer of a connection runs, in a page that goes with its last connection: a close by another thread waits for that.
#[test]
fn a_close_waits_for_a_look_where_the_peer_runs() {
    /// Long enough for a close that does not wait; who is slower passes.
    const CLOSES: std::time::Duration = std::time::Duration::from_millis(300);
    let pair = Pair::new(two_worlds(), Kind::Tcp);
    let ([peer, side], epfd) = (&pair.sides, fd::epoll_create().unwrap());
    let card = peer.with(|_| {
        let context = context::of_thread().unwrap();
        context::tell_processor(context);
        context::card(context).unwrap()
    });
    let set = side.with(|socket| {
        let given = [card.eventfd, card.page_memfd].map(|fd| fd::duplicate_high(fd, fd).unwrap());
        let bell = context::keep(sys::getpid(), card.process, card.context, given, None);
        socket.bell.set(bell.unwrap());
        epoll::created(epfd);
        let set = epoll::set_of(epfd).unwrap();
        let event = fd::epoll_event { events: libc::EPOLLIN as u32, u64: 7 };
        epoll::control(set, libc::EPOLL_CTL_ADD, side.fd, socket, Some(event)).unwrap();
        set
    });
    let (tell, hear) = std::sync::mpsc::channel();
    let (tell, hear) = (tell, Rc::new(hear));
    let (world, fd, closed) = (side.world, side.fd, hear.clone());
    worlds::at_step(1, move || {
        std::thread::spawn(move || {
            worlds::within(world, || process::before_close(fd, table::lookup(fd).unwrap()));
            sys::close(fd);
            tell.send(()).unwrap();
        });
        assert!(closed.recv_timeout(CLOSES).is_err(), "closed amid the look");
    });
    assert!(side.with(|_| epoll::latest_processor(set)).is_some());
    assert!(!worlds::nothing_more());
    hear.recv().unwrap();
    worlds::within(world, || {
        assert_eq!(epoll::latest_processor(set), None);
        epoll::closed(set);
    });
    sys::close(epfd);
    side.gone.set(true);
    pair.finish();
}

/// A wait of the kernel's alone in a set that was closed meanwhile is not counted out of the next set of its entry, also where it was left by a long jump.
#[test]
fn a_wait_in_a_closed_set_is_not_counted_out_of_the_next_one() {
    let [world, _] = two_worlds();
    worlds::within(world, || {
        let made = || {
            let epfd = fd::epoll_create().unwrap();
            epoll::created(epfd);
            (epoll::Visit::of(epoll::set_of(epfd).unwrap()), epfd)
        };
        let ends = |(set, epfd): (epoll::Visit, i32)| {
            tables().unwrap().clear(epfd);
            epoll::closed(set.index());
            sys::close(epfd);
        };
        for jumps in [false, true] {
            let first = made();
            if jumps {
                deeper::<{ 200 << 10 }, _>(|| assert!(epoll::begin_native(first.0)));
            } else {
                assert!(epoll::begin_native(first.0));
            }
            ends(first);
            let second = made();
            assert_eq!(second.0.index(), first.0.index());
            assert!(!second.0.has_natives());
            std::thread::spawn(move || {
                worlds::within(world, || assert!(epoll::begin_native(second.0)));
            })
            .join()
            .unwrap();
            if jumps {
                jumps::look_back();
            } else {
                epoll::end_native(first.0);
            }
            assert!(second.0.has_natives(), "of another wait");
            assert!(!epoll::begin_native(first.0));
            ends(second);
        }
    });
}

/// A handler closes a connection at which the set looks that it has interrupted: what is looked at stays, until the set's next wait.
#[test]
fn what_a_set_looks_at_stays_when_a_handler_closes_it() {
    let pair = Pair::new(two_worlds(), Kind::Tcp);
    let (side, epfd) = (&pair.sides[1], fd::epoll_create().unwrap());
    side.with(|socket| {
        epoll::created(epfd);
        let set = epoll::set_of(epfd).unwrap();
        let event = fd::epoll_event { events: libc::EPOLLIN as u32, u64: 7 };
        epoll::control(set, libc::EPOLL_CTL_ADD, side.fd, socket, Some(event)).unwrap();
        epoll::at_work(set, |_| {
            assert!(process::before_close(side.fd, table::lookup(side.fd).unwrap()));
            assert!(socket.incoming().is_some(), "unmapped amid the look");
        });
        sys::close(side.fd);
        let mut out = [event; 4];
        assert_eq!(epoll::wait(epoll::Visit::of(set), &mut out, Some(0), None), Ok(0));
        assert!(socket.incoming().is_none() && socket.stage() == Stage::Free);
        epoll::closed(set);
    });
    sys::close(epfd);
    side.gone.set(true);
    pair.finish();
}

/// A handler has gone over to another coroutine amid a wait, which goes on later: the other one's waits and closes leave its count. One that was left by a
/// long jump is counted out, from however deep.
#[test]
fn a_wait_is_counted_out_when_it_was_left_and_not_for_a_coroutine() {
    let pair = Pair::new(two_worlds(), Kind::Tcp);
    pair.sides[1].with(|socket| {
        let waiting = || {
            socket.sleepers.fetch_add(1, Ordering::SeqCst);
            jumps::waits(socket, false);
        };
        let sleepers = || socket.sleepers.load(Ordering::SeqCst);
        amid(
            |go_over| {
                waiting();
                go_over();
                assert_eq!(sleepers(), 1);
                jumps::waits_no_more(socket, false);
                socket.sleepers.fetch_sub(1, Ordering::SeqCst);
            },
            jumps::look_back,
        );
        deeper::<{ 200 << 10 }, _>(waiting);
        assert_eq!(sleepers(), 1);
        jumps::look_back();
        assert_eq!(sleepers(), 0);
    });
    pair.finish();
}

/// Who has severed itself ends in order by the kernel: the peer, whose adapter lives and has not told of that, takes it for no death, though the ring
/// holds what was not read.
#[test]
fn who_has_severed_itself_ends_in_order() {
    let (pair, adapter) = mirrored_pair();
    assert_eq!(pair.send(1, 7), Ok(7));
    pair.shut(0);
    pair.sides[1].with(|socket| {
        let words = socket.incoming().unwrap();
        words.control().sender.shut.store(NOT_SHUT, Ordering::Relaxed);
    });
    assert!(pair.sides[1].would_wake());
    assert_eq!(pair.look(1) & (libc::POLLERR | libc::POLLHUP), 0, "it was a death");
    assert_eq!(pair.send(1, 9), Ok(9));
    pair.drain(0);
    pair.meets_the_end(1);
    assert!(!pair.has_reset());
    pair.finish();
    adapter.into_iter().for_each(sys::close);
}

/// A program comes to a direction that has entered the ring only when the peer has gone, and the kernel has reset for a doorbell: what came by the
/// kernel is counted as it was, behind a FIN or not, whoever has taken the error, and no doorbell is taken for a byte.
#[test]
fn a_direction_is_met_behind_its_end() {
    let worlds = two_worlds();
    for n in 0..24 {
        let (before, rung, orderly, taken) = (n / 12 * 5, n & 1 > 0, n & 2 > 0, n / 4 % 3);
        let [near, far] = connection(Kind::Tcp);
        let sides = [Side::new(worlds[0], near, Kind::Tcp), Side::new(worlds[1], far, Kind::Tcp)];
        let pair = Pair { kind: Kind::Tcp, sides };
        let bytes: Vec<u8> = (0..before).map(|place| byte(1, place)).collect();
        assert_eq!(tcp::send_from(far, &bytes, NOW), Ok(bytes.len()));
        [&pair.sides[1].sent, &pair.sides[1].tried].iter().for_each(|count| count.set(before));
        let segment = pair.sides[1].attach(true, None);
        pair.sides[0].attach(false, Some(segment));
        sys::close(segment);
        if before > 0 {
            assert!(pair.sides[0].would_wake());
            assert_eq!(pair.receive(0, 100), Ok(before as usize));
        }
        for from in [0, 1] {
            let to = 1 - from;
            let wants = || pair.sides[to].with(|socket| wait::want_bytes(socket, true, false));
            let in_ring =
                || pair.sides[from].with(|socket| socket.end().sending()) == Sending::Ring;
            for _ in 0..CALLS_MOST {
                let was = in_ring();
                (rung || to == 1).then(wants);
                assert_eq!(pair.send(from, 3), Ok(3));
                if to == 1 {
                    let _ = pair.receive(1, 100);
                }
                if was {
                    break;
                }
            }
            assert!(in_ring());
        }
        assert_eq!(pair.sides[0].with(|socket| socket.end().receiving()), Receiving::Kernel);
        match orderly {
            true => pair.close(1),
            false => pair.die(1),
        }
        assert!(!orderly || tcp::ring_byte(near));
        assert!(pair.sides[0].would_wake());
        assert_eq!(tcp::unread(near), Ok(rung as usize));
        match taken {
            0 => {}
            1 => drop(pair.look(0)),
            _ => drop(tcp::take_error(near)),
        }
        pair.drain(0);
        pair.has_all(0);
        pair.meets_the_end(0);
        pair.close(0);
    }
}

/// A process ends, or executes another program, with a doorbell unread: the kernel does not reset what it has not yet sent.
#[test]
fn what_the_kernel_has_not_sent_outlives_its_process_and_an_unread_doorbell() {
    let worlds = two_worlds();
    let ends: [fn(); 2] = [process::at_exit, process::before_exec];
    for (ends, goes_back) in ends.into_iter().flat_map(|ends| [(ends, false), (ends, true)]) {
        let pair = Pair::new(worlds, Kind::Tcp);
        let (peer, side) = (&pair.sides[0], &pair.sides[1]);
        side.with(|socket| moving::send_back(socket, Reason::Option));
        while pair.send(1, 60_000).is_ok() {}
        assert!(tcp::unsent(side.fd) > 0);
        side.with(|socket| wait::want_bytes(socket, true, false));
        assert_eq!(pair.send(0, 3), Ok(3));
        assert_eq!(pair.receive(1, 100), Ok(3));
        assert_eq!(tcp::unread(side.fd), Ok(1), "a doorbell");
        if goes_back {
            peer.with(|socket| moving::send_back(socket, Reason::Option));
        }
        worlds::within(side.world, ends);
        pair.die(1);
        pair.drain(0);
        pair.has_all(0);
        assert_eq!(pair.receive(0, 1), Ok(0));
        pair.close(0);
    }
}

/// What stands in the place of a socket that another program must not get is of its kind.
#[test]
fn another_of_its_kind() {
    let world = worlds::fresh();
    start(world);
    let of = |domain, socket_type| {
        let fd = fd::unconnected(domain, socket_type).unwrap();
        let option = |fd, option| ringlet_linux::tcp::int_option(fd, libc::SOL_SOCKET, option);
        worlds::within(world, || {
            let kind = carrier::kind(domain, socket_type, 0).unwrap();
            let socket = tables().unwrap().follow(fd, kind).unwrap();
            socket.family.set(domain as u32);
            let other = carrier::unconnected(socket).unwrap();
            assert_eq!(option(other, libc::SO_TYPE), Ok(socket_type));
            sys::close(other);
        });
    };
    of(libc::AF_INET, libc::SOCK_STREAM);
    of(libc::AF_INET6, libc::SOCK_DGRAM);
    of(libc::AF_UNIX, libc::SOCK_STREAM);
    of(libc::AF_UNIX, libc::SOCK_SEQPACKET);
}

/// splitmix64
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((x ^ x >> 31) % limit as u64) as usize
    }
}

/// Another thread takes what a sleeper was rung for, and the doorbell with it, behind a way back to the kernel: what comes by the ring again rings.
#[test]
fn a_sleeper_is_rung_again_behind_a_way_back() {
    let worlds = two_worlds();
    for kind in KINDS {
        let pair = Pair::new(worlds, kind);
        assert!(pair.falls_asleep(1));
        let side = &pair.sides[1];
        side.with(|socket| socket.sleepers.fetch_add(1, Ordering::SeqCst));
        assert_eq!(pair.send(0, 3), Ok(3));
        assert!(side.would_wake());
        assert_eq!(pair.receive(1, 3), Ok(3));
        pair.sides[0].with(|socket| {
            let (end, ring) = (socket.end(), socket.outgoing().unwrap());
            let _held = end.send_lock.take().unwrap();
            moving::go_back(socket, end, &ring, Sending::Kernel, Reason::Unforgiving);
        });
        side.with(|socket| {
            let (end, ring) = (socket.end(), socket.incoming().unwrap());
            let _held = end.receive_lock.take().unwrap();
            assert_eq!(moving::settle(socket, end, &ring), Ok(()));
            assert_eq!(end.receiving(), Receiving::Kernel);
        });
        // (It was told of a byte that is not there any more, and sleeps on.)
        assert_eq!(ringlet_linux::tcp::unread(side.fd), Ok(0));
        side.asleep.set(true);
        assert_eq!(pair.send(0, 3), Ok(3));
        assert!(pair.sides[0].with(|socket| socket.end().sending() == Sending::Ring));
        pair.sleepers_were_woken();
        side.with(|socket| socket.sleepers.fetch_sub(1, Ordering::SeqCst));
        assert_eq!(pair.receive(1, 3), Ok(3));
        pair.finish();
    }
}

/// Acts of both ends at random, each perhaps with one of the other end's at a random step of it; and an end.
#[test]
fn random_scripts() {
    let worlds = two_worlds();
    let begin = std::time::Instant::now();
    let seeds = match std::env::var("SEED") {
        Ok(seed) => seed.parse().map(|seed: u64| seed..seed + 1).expect("a number"),
        Err(_) => 0..200,
    };
    for seed in seeds {
        let mut random = Random(seed);
        let pair = Pair::new(worlds, KINDS[random.below(3)]);
        eprintln!("seed {seed}, {:?} at {:?}", pair.kind, begin.elapsed());
        for _ in 0..random.below(60) {
            if pair.sides.iter().any(|side| side.gone.get()) {
                break;
            }
            // Mostly of those that leave all open.
            let mut draw = || match random.below(12) {
                0 => ACTS[4 + random.below(4)],
                _ => ACTS[random.below(4)],
            };
            let ((name, act), (other, event)) = (draw(), draw());
            let side = random.below(2);
            eprintln!("  {name} by {side}, and {other}");
            let may = |side: usize, name| !pair.sides[side].ended.get() || name != "shut";
            if random.below(2) == 0 && may(1 - side, other) {
                let at = pair.clone();
                worlds::at_step(1 + random.below(20) as u64, move || event(&at, 1 - side));
            }
            if may(side, name) {
                act(&pair, side);
            }
            worlds::nothing_more();
            pair.sleepers_were_woken();
        }
        pair.finish();
    }
}
