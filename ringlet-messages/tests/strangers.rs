//! Descriptors that nobody can close in time, from whoever can reach a service of the native library or of Active Messages: nobody waits for them.
//! (In a process of its own: another user's thread is one of its threads.)

use ringlet_core::layout::LANE_MAX_COUNT;
use ringlet_linux::{apart, map, meet, proof};
use ringlet_messages::active_message::Process;
use ringlet_messages::native::*;
use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::mpsc;
use std::time::Duration;

/// For what may not wait; a thread that hangs for good is found by it.
const HUNG: Duration = Duration::from_secs(60);
const SOON: Timeout = Some(HUNG);
const NOBODY: u32 = 65_534;

/// One whose last close waits for an hour: its far end, which is kept, takes nothing.
fn lingering() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (far, _) = listener.accept().unwrap();
    near.set_nonblocking(true).unwrap();
    while near.write(&[0; 1 << 16]).is_ok() {}
    let linger = libc::linger { l_onoff: 1, l_linger: 3600 };
    // SAFETY: a struct linger and its size.
    let set = unsafe {
        let (value, len) = ((&raw const linger).cast(), size_of::<libc::linger>() as u32);
        libc::setsockopt(near.as_raw_fd(), libc::SOL_SOCKET, libc::SO_LINGER, value, len)
    };
    assert_eq!(set, 0);
    (near, far)
}

/// Puts one into the queue at the other end, if that takes any; the last reference then lies there.
fn put_into(socket: i32) -> TcpStream {
    let (near, far) = lingering();
    match meet::send(socket, &[1], &[near.as_raw_fd()]) {
        Ok(()) => drop(near),
        // It is still ours, and nobody closes it.
        Err(_) => std::mem::forget(near),
    }
    far
}

fn own(fd: i32) -> OwnedFd {
    // SAFETY: made just now.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

/// Runs in a thread of another user, if we may have one (a thread's user is its own to the kernel).
fn as_somebody_else<T: Send + 'static>(act: impl FnOnce() -> T + Send + 'static) -> T {
    let acting = std::thread::spawn(|| {
        // SAFETY: no memory is passed.
        unsafe { libc::syscall(libc::SYS_setresuid, NOBODY, NOBODY, NOBODY) };
        act()
    });
    acting.join().unwrap()
}

/// Does not wait for ever, or fails.
fn returns<T: Send + 'static>(what: &str, act: impl FnOnce() -> T + Send + 'static) -> T {
    let (done, wait) = mpsc::channel();
    std::thread::spawn(move || done.send(act()));
    wait.recv_timeout(HUNG).unwrap_or_else(|_| panic!("{what} waits for a stranger"))
}

fn name(of: &str) -> String {
    format!("strangers-{}-{of}", std::process::id())
}

/// Who comes to a service leaves something in its queue, and goes.
fn leave_at(service: &'static str) -> TcpStream {
    as_somebody_else(move || {
        let visitor = own(meet::visit(name(service).as_bytes()).unwrap());
        put_into(visitor.as_raw_fd())
    })
}

#[test]
fn a_service_turns_strangers_away() {
    for kind in [Kind::Messages, Kind::Mailbox] {
        let service = if kind == Kind::Mailbox { "turned-mailbox" } else { "turned" };
        let options = Options::new(kind);
        let mut kept = Vec::new();
        if kind == Kind::Mailbox {
            let mut mailbox = Mailbox::bind(&name(service), options).unwrap();
            kept.push(leave_at(service));
            let sending = std::thread::spawn(move || {
                let mut sender = connect(&name(service), options, SOON).unwrap().sender().unwrap();
                sender.send(b"x", SOON).unwrap();
            });
            returns("a mailbox", move || mailbox.receive(&mut [0; 1], SOON).unwrap());
            sending.join().unwrap();
        } else {
            let listener = Listener::bind(&name(service), options).unwrap();
            kept.push(leave_at(service));
            let coming =
                std::thread::spawn(move || connect(&name(service), options, SOON).unwrap());
            let listener = returns("accept", move || {
                drop(listener.accept(SOON).unwrap());
                listener
            });
            drop(coming.join().unwrap());
            kept.push(leave_at(service));
            returns("the end of a service", move || drop(listener));
        }
    }
}

/// Another user's senders get no more than half of a mailbox, however many come; the others still find a place.
#[test]
fn one_user_does_not_take_all_lanes() {
    // SAFETY: no memory is passed.
    if unsafe { libc::geteuid() } != 0 {
        eprintln!("skipped: only root can be another user");
        return;
    }
    let options = Options {
        peers: Peers::Any,
        ring_bytes: 4096,
        slot_count: 64,
        ..Options::new(Kind::Mailbox)
    };
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: a struct of limits.
    unsafe {
        libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit);
        limit.rlim_cur = limit.rlim_max;
        libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit);
    }
    let mut mailbox = Mailbox::bind(&name("lanes"), options).unwrap();
    let come = move || connect(&name("lanes"), options, SOON);
    let taking = std::thread::spawn(move || {
        as_somebody_else(move || {
            let mut held = Vec::new();
            while held.len() <= LANE_MAX_COUNT
                && let Ok(connection) = come()
            {
                held.push(connection);
            }
            held
        })
    });
    while !taking.is_finished() {
        let _ = mailbox.receive(&mut [0; 1], Some(Duration::from_millis(1)));
    }
    let held = taking.join().unwrap();
    assert_eq!(held.len(), LANE_MAX_COUNT / 2);
    let sending = std::thread::spawn(move || {
        let mut sender = come().unwrap().sender().unwrap();
        sender.send(b"x", SOON).unwrap();
    });
    returns("a mailbox", move || mailbox.receive(&mut [0; 1], SOON).unwrap());
    sending.join().unwrap();
}

#[test]
fn a_connection_ends_though_its_peer_has_left_something() {
    let options = Options { peers: Peers::Any, ..Options::new(Kind::Messages) };
    let listener = Listener::bind(&name("left"), options).unwrap();
    let visitor = own(meet::visit(name("left").as_bytes()).unwrap());
    let connection = listener.accept(SOON).unwrap();
    let (_, mut fds) = meet::receive(visitor.as_raw_fd(), &mut [0; 64]).unwrap();
    let room = own(fds.take(1).unwrap());
    let _kept = [put_into(visitor.as_raw_fd()), put_into(room.as_raw_fd())];
    returns("the end of a connection", move || drop(connection));
}

#[test]
fn an_impostor_is_left_at_once() {
    let service = own(as_somebody_else(|| meet::serve(name("impostor").as_bytes()).unwrap()));
    let (done, wait) = mpsc::channel();
    let options = Options::new(Kind::Messages);
    std::thread::spawn(move || {
        let socket = meet::visit(name("impostor").as_bytes()).unwrap();
        let caller = own(loop {
            if let Ok(came) = meet::accept(service.as_raw_fd()) {
                break came;
            }
        });
        let far = put_into(caller.as_raw_fd());
        done.send((far, socket, service)).unwrap();
    });
    let (_far, socket, service) = wait.recv_timeout(HUNG).unwrap();
    // As `connect` goes, which we can't hold between its steps.
    returns("a visitor", move || meet::part(socket));
    // It speaks as a service, with a wrong thing for everything.
    let answering = std::thread::spawn(move || {
        let caller = own(loop {
            if let Ok(came) = meet::accept(service.as_raw_fd()) {
                break came;
            }
        });
        let (near, far) = lingering();
        // The frame's head (ringlet/src/handshake.rs), then kind, lane, slots, bytes.
        let mut welcome = b"rnglmeet".to_vec();
        welcome.extend(ringlet_core::layout::VERSION.to_le_bytes());
        welcome.extend([3, 0, 1, 0]);
        welcome.extend((Kind::Messages as u32).to_le_bytes());
        welcome.extend([0; 4]);
        welcome.extend(1024u64.to_le_bytes());
        welcome.extend((1u64 << 20).to_le_bytes());
        meet::send(caller.as_raw_fd(), &welcome, &[near.as_raw_fd(), near.as_raw_fd()]).unwrap();
        // Whoever closes it last: here it is a thread that nobody waits for.
        std::thread::spawn(move || drop(near));
        far
    });
    let options = Options { peers: Peers::Any, ..options };
    let connected = returns("connect", move || connect(&name("impostor"), options, SOON).err());
    assert_eq!(connected, Some(Error::PeerCorrupt));
    answering.join().unwrap();
}

#[test]
fn active_messages_turn_strangers_away() {
    let node = || {
        let process = Process::start().unwrap();
        let bundle = process.bundle().unwrap();
        let endpoint = bundle.endpoint().unwrap();
        (process, bundle, endpoint)
    };
    let (a, b) = (node(), node());
    let bytes = b.2.name().to_bytes();
    let hex: String = bytes[..16].iter().map(|byte| format!("{byte:02x}")).collect();
    let _kept = as_somebody_else(move || {
        let visitor = own(meet::look_named(format!("ringlet-am/{hex}").as_bytes()).unwrap());
        put_into(visitor.as_raw_fd())
    });
    returns("the service", move || drop(b));
    drop(a);
}

/// The kernel's numbers of sockets, which no others get.
fn still_open(sockets: &[(i32, u64)]) -> usize {
    sockets.iter().filter(|(fd, cookie)| proof::cookie(*fd) == Ok(*cookie)).count()
}

#[test]
fn memory_is_closed_at_once() {
    // More than there may be closers.
    for _ in 0..100 {
        let [ours, theirs] = meet::pair().unwrap();
        let memory = own(map::sealed_memfd(c"left", 4096, 0).unwrap());
        meet::send(theirs, &[1; 40], &[memory.as_raw_fd()]).unwrap();
        drop(own(theirs));
        let left = [(ours, proof::cookie(ours).unwrap())];
        meet::part(ours);
        assert_eq!(still_open(&left), 0);
    }
}

#[test]
fn what_can_not_be_closed_is_closed_later() {
    let (left, far): (Vec<_>, Vec<_>) = as_somebody_else(|| {
        let leave = || {
            let [ours, theirs] = meet::pair().unwrap();
            let far = put_into(theirs);
            drop(own(theirs));
            ((ours, proof::cookie(ours).unwrap()), far)
        };
        // More than may hang.
        (0..40).map(|_| leave()).unzip()
    });
    let sockets = left.clone();
    returns("who parts", move || sockets.into_iter().for_each(|(socket, _)| meet::part(socket)));
    assert!(still_open(&left) >= 32, "they hang");
    drop(far);
    for _ in 0..6000 {
        apart::go_on();
        if still_open(&left) == 0 {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("{} are open for ever", still_open(&left));
}
