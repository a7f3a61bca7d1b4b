//! What is had of an end that is carried, for whoever has its half (`ringlet_adapter`): what its half asks for is done by threads apart.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::task::Poll;
use std::time::Duration;

use ringlet_adapter::{Bells, Memory, Rings, Wakes, WakesOne};
use ringlet_linux::bell::{self, Address};
use ringlet_linux::{fd, tcp};

use crate::apart::{Apart, From};
use crate::clock::{Clock, Moment};
use crate::service;

/// What is done apart for longer hangs: the link is given up.
const HANGS_AFTER: Duration = Duration::from_secs(1);

pub struct End {
    pub from: From,
    /// Whose words say whether its program has severed itself; and which end it is.
    memory: Arc<Memory>,
    nth: usize,
    /// Its connection, from when it has come until it has parted. Only threads apart let go of it.
    socket: Option<Arc<OwnedFd>>,
    /// What rings its home context's bell.
    rope: Option<Rope>,
    /// Its last process is gone; and as many bytes that lie unread on its connection, or less, are doorbells.
    pub gone: bool,
    bells: u64,
    /// A byte on its connection; the close of that.
    rings: Option<Doing>,
    parts: Option<Doing>,
    /// Rings when something apart is done. No tenant has it.
    eventfd: Arc<OwnedFd>,
    apart: Arc<Apart>,
    clock: Arc<Clock>,
}

/// A socket of a program's by which to reach its own bell, and where that is. It rings without waiting (`ringlet_linux::bell`); but there may be anything
/// in its queue, so that only threads apart close it.
struct Rope {
    socket: OwnedFd,
    address: Address,
}

impl Rope {
    fn ring(&self) -> bool {
        bell::ring_by(self.socket.as_raw_fd(), &self.address)
    }
}

/// What an end brings: its connection, and perhaps its rope.
pub struct Brought {
    pub socket: OwnedFd,
    rope: Option<Rope>,
}

impl Brought {
    /// `None`, and nothing is taken, if it is something else.
    pub fn of(shown: &mut Vec<OwnedFd>, address: Address) -> Option<Brought> {
        let is_rope = |socket: &OwnedFd| bell::is_one(socket.as_raw_fd());
        let sound = match &shown[..] {
            [socket] => service::is_tcp(socket.as_raw_fd()),
            [socket, rope] => service::is_tcp(socket.as_raw_fd()) && is_rope(rope),
            _ => false,
        };
        let mut all = shown.drain(..if sound { shown.len() } else { 0 });
        let socket = all.next()?;
        Some(Brought { socket, rope: all.next().map(|socket| Rope { socket, address }) })
    }

    /// To be closed.
    pub fn all(self) -> Vec<OwnedFd> {
        std::iter::once(self.socket).chain(self.rope.map(|rope| rope.socket)).collect()
    }
}

/// Asked of another thread, since when, and what came of it.
#[derive(Clone)]
pub struct Doing {
    since: Moment,
    clock: Arc<Clock>,
    stage: Arc<AtomicU32>,
}

/// Whoever takes it from here decides: the thread begins it, or who has asked gives it up, and then it is never done.
const NOT_YET: u32 = 0;
const RUNNING: u32 = 1;
const GIVEN_UP: u32 = 2;
const FAILED: u32 = 3;
const DONE: u32 = 4;

impl Doing {
    fn poll(&self) -> Poll<bool> {
        // ORDER: Acquire; pairs with `End::apart`.
        match self.stage.load(Ordering::Acquire) {
            NOT_YET | RUNNING => Poll::Pending,
            stage => Poll::Ready(stage == DONE),
        }
    }

    /// The first of both that asks has it.
    fn claim(stage: &AtomicU32, to: u32) -> bool {
        // ORDER: Relaxed; which of the two comes first is all that it says.
        stage.compare_exchange(NOT_YET, to, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }

    /// Nobody needs it any more. False while it is being done: it may yet take effect, however long that takes.
    pub fn give_up(&self) -> bool {
        Doing::claim(&self.stage, GIVEN_UP) || self.poll().is_ready()
    }

    pub fn hangs(&self) -> bool {
        self.poll().is_pending() && self.clock.since(self.since) > HANGS_AFTER
    }
}

impl End {
    pub fn new(
        from: From,
        (memory, nth): (Arc<Memory>, usize),
        eventfd: Arc<OwnedFd>,
        apart: Arc<Apart>,
        clock: Arc<Clock>,
    ) -> End {
        End {
            from,
            memory,
            nth,
            socket: None,
            rope: None,
            gone: false,
            bells: 0,
            rings: None,
            parts: None,
            eventfd,
            apart,
            clock,
        }
    }

    pub fn come(&mut self, brought: Brought) {
        self.socket = Some(Arc::new(brought.socket));
        self.rope = brought.rope;
    }

    /// Does something apart hang?
    pub fn hangs(&self) -> bool {
        let doing = [&self.rings, &self.parts].into_iter().flatten();
        doing.into_iter().any(Doing::hangs)
    }

    /// A byte that is being put on its connection. Its program is to count what goes there, and so must not hear that its half has ended before that is
    /// given up, or done.
    pub fn ringing(&self) -> Option<Doing> {
        self.rings.clone()
    }

    fn apart(&self, job: impl FnOnce() -> bool + Send + 'static) -> Doing {
        let stage = Arc::new(AtomicU32::new(NOT_YET));
        let (since, clock) = (self.clock.now(), self.clock.clone());
        let doing = Doing { since, clock, stage: stage.clone() };
        let eventfd = self.eventfd.clone();
        let job = move || {
            if Doing::claim(&stage, RUNNING) {
                let went = job();
                // ORDER: Release; pairs with `Doing::poll`.
                stage.store(if went { DONE } else { FAILED }, Ordering::Release);
                fd::ring(eventfd.as_raw_fd());
            }
        };
        self.apart.run(self.from.clone(), Box::new(job));
        doing
    }
}

impl Rings for End {
    // (It says by wishes how it is to be woken.)
    fn published(&mut self) {}

    fn event(&mut self) -> bool {
        self.rope.as_ref().is_some_and(Rope::ring)
    }

    fn byte(&mut self) -> Poll<bool> {
        if self.rings.is_none() {
            let Some(socket) = self.socket.clone() else { return Poll::Ready(false) };
            let (memory, nth) = (self.memory.clone(), self.nth);
            let ring = move || {
                let went = memory.ring_byte(nth, socket.as_raw_fd());
                drop(socket);
                went
            };
            self.rings = Some(self.apart(ring));
        }
        let went = self.rings.as_ref().map_or(Poll::Ready(false), Doing::poll);
        if went.is_ready() {
            self.rings = None;
        }
        went
    }

    fn take_bells(&mut self, most: u64) {
        self.bells = most;
    }

    fn part(&mut self) -> Poll<()> {
        if let Some(socket) = self.socket.take() {
            let (gone, bells) = (self.gone, self.bells);
            self.parts = Some(self.apart(move || let_go(socket, gone, bells)));
        }
        self.parts.as_ref().map_or(Poll::Ready(()), |doing| doing.poll().map(drop))
    }
}

impl WakesOne for End {
    fn eventfd(&self) -> BorrowedFd<'_> {
        self.eventfd.as_fd()
    }
}

impl Drop for End {
    fn drop(&mut self) {
        if let Some(rope) = self.rope.take() {
            self.apart.close(self.from.clone(), vec![rope.socket]);
        }
        if let Some(socket) = self.socket.take() {
            let gone = self.gone;
            self.apart.run(self.from.clone(), Box::new(move || _ = let_go(socket, gone, 0)));
        }
    }
}

/// KERNEL: who closes last waits, if the program had it so (SO_LINGER); a program that is killed does not. Who closes with a byte unread resets the
/// connection, and what is not yet sent there is lost: doorbells that nobody is left to read are taken.
fn let_go(socket: Arc<OwnedFd>, gone: bool, bells: u64) -> bool {
    let fd = socket.as_raw_fd();
    if gone && matches!(tcp::linger(fd), Ok([1, seconds]) if seconds > 0) {
        tcp::set_linger(fd, [0, 0]);
    }
    let mut left = tcp::unread(fd).unwrap_or(0);
    while (1..=bells).contains(&(left as u64)) {
        match tcp::receive_into(fd, &mut [0; 64], libc::MSG_DONTWAIT) {
            Ok(taken @ 1..) => left = left.saturating_sub(taken),
            _ => break,
        }
    }
    drop(socket);
    true
}

/// The two of a link, with one eventfd (0 connects, 1 accepts).
pub struct Ends {
    pub ends: [End; 2],
    pub memory: [Arc<Memory>; 2],
}

impl Ends {
    pub fn new(
        from: [From; 2],
        memory: [Memory; 2],
        eventfd: OwnedFd,
        (apart, clock): (&Arc<Apart>, &Arc<Clock>),
    ) -> Ends {
        let (eventfd, memory) = (Arc::new(eventfd), memory.map(Arc::new));
        let mut nth = 0..;
        let ends = from.map(|from| {
            let nth: usize = nth.next().unwrap_or_default();
            let memory = (memory[nth].clone(), nth);
            End::new(from, memory, eventfd.clone(), apart.clone(), clock.clone())
        });
        Ends { ends, memory }
    }

    pub fn hangs(&self) -> bool {
        self.ends.iter().any(End::hangs)
    }
}

impl Bells for Ends {
    fn published(&mut self, end: usize) {
        self.ends[end].published();
    }

    fn event(&mut self, end: usize) -> bool {
        self.ends[end].event()
    }

    fn byte(&mut self, to: usize) -> Poll<bool> {
        self.ends[1 - to].byte()
    }

    fn take_bells(&mut self, end: usize, most: u64) {
        self.ends[end].take_bells(most);
    }

    fn part(&mut self, end: usize) -> Poll<()> {
        self.ends[end].part()
    }
}

impl Wakes for Ends {
    fn eventfd(&self) -> BorrowedFd<'_> {
        self.ends[0].eventfd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringlet_core::layout::Geometry;
    use ringlet_core::mirror::Asks;
    use std::io::{ErrorKind, Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::FromRawFd;
    use std::time::Instant;

    fn from(user: u32) -> From {
        From { user: Some(user), pod: None }
    }

    fn connection() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (near, listener.accept().unwrap().0)
    }

    fn ends(sockets: [TcpStream; 2], apart: &Arc<Apart>) -> Ends {
        let geometry = Geometry::new(1 << 16).unwrap();
        // SAFETY: made just now, ours alone.
        let eventfd = unsafe { OwnedFd::from_raw_fd(fd::eventfd().unwrap()) };
        let memory = [0, 1].map(|_| Memory::make(geometry).unwrap());
        let clock = Arc::new(Clock::new());
        let mut ends = Ends::new([from(1), from(2)], memory, eventfd, (apart, &clock));
        for (end, socket) in ends.ends.iter_mut().zip(sockets) {
            end.come(Brought { socket: socket.into(), rope: None });
        }
        ends
    }

    fn until(mut done: impl FnMut() -> bool) {
        let until = Instant::now() + Duration::from_secs(60);
        while !done() {
            assert!(Instant::now() < until, "it does not come");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn a_byte_goes_to_the_other_end_and_what_has_parted_is_closed() {
        let apart = Arc::new(Apart::new().unwrap());
        let (near, mut far) = connection();
        let mut ends = ends([near, far.try_clone().unwrap()], &apart);
        let mut went = Poll::Pending;
        until(|| {
            went = ends.byte(1);
            went.is_ready()
        });
        assert_eq!(went, Poll::Ready(true));
        let mut byte = [1];
        far.read_exact(&mut byte).unwrap();
        assert_eq!(byte, [0]);
        until(|| ends.part(0).is_ready());
        assert_eq!(far.read(&mut byte).unwrap(), 0, "its end has come");
        assert_eq!(ends.byte(1), Poll::Ready(false), "there is nothing to ring by");
        assert!(ends.part(0).is_ready() && !ends.hangs());
    }

    #[test]
    fn who_has_a_bell_is_rung_by_it_while_it_takes_a_ring() {
        let apart = Arc::new(Apart::new().unwrap());
        // SAFETY: made just now, ours alone.
        let own = |fd| unsafe { OwnedFd::from_raw_fd(fd) };
        let ends = || {
            let (near, far) = connection();
            ends([near, far], &apart)
        };
        assert!(!ends().event(0), "it has none");
        let address = Address::random().unwrap();
        let sleeper = own(bell::make(&address).unwrap().0);
        let rope = || own(bell::reach(&address).unwrap());
        let come = |shown: Vec<OwnedFd>, address| {
            let mut shown = shown;
            let brought = Brought::of(&mut shown, address);
            assert_eq!(shown.is_empty(), brought.is_some(), "what is not taken is left");
            brought
        };
        for (token, hears) in [([0; 2], false), (address.token, true)] {
            let address = Address { token, ..address };
            let mut ends = ends();
            ends.ends[1].come(come(vec![connection().0.into(), rope()], address).unwrap());
            ends.event(1);
            assert_eq!(fd::pending(sleeper.as_raw_fd(), libc::POLLIN) != 0, hears);
            bell::drain(sleeper.as_raw_fd());
        }
        let mut all = ends();
        all.ends[1].come(come(vec![connection().0.into(), rope()], address).unwrap());
        assert!((0..100).any(|_| !all.event(1)), "its queue is full");
        bell::drain(sleeper.as_raw_fd());
        assert!(all.event(1));
        // One that reaches somebody else, who would take it for ours, reaches the bell all the same.
        let (other, daemon) = std::os::unix::net::UnixDatagram::pair().unwrap();
        let mut all = ends();
        bell::drain(sleeper.as_raw_fd());
        all.ends[1].come(come(vec![connection().0.into(), other.into()], address).unwrap());
        assert!(all.event(1) && fd::pending(sleeper.as_raw_fd(), libc::POLLIN) != 0);
        assert_eq!(fd::pending(daemon.as_raw_fd(), libc::POLLIN), 0);
        let stream = || OwnedFd::from(std::os::unix::net::UnixStream::pair().unwrap().0);
        for shown in [
            vec![stream()],
            vec![rope()],
            vec![connection().0.into(), stream()],
            vec![connection().0.into(), connection().0.into()],
            vec![rope(), connection().0.into()],
            vec![connection().0.into(), rope(), rope()],
        ] {
            assert!(come(shown, address).is_none());
        }
    }

    #[test]
    fn a_connection_is_not_closed_with_a_doorbell_unread() {
        let apart = Arc::new(Apart::new().unwrap());
        for (bells, kind) in [(1, None), (0, Some(ErrorKind::ConnectionReset))] {
            let (near, mut far) = connection();
            far.write_all(&[0]).unwrap();
            until(|| tcp::unread(near.as_raw_fd()) == Ok(1));
            let mut ends = ends([near, far.try_clone().unwrap()], &apart);
            ends.take_bells(0, bells);
            until(|| ends.part(0).is_ready());
            assert_eq!(far.read(&mut [0]).err().map(|error| error.kind()), kind, "{bells}");
        }
    }

    #[test]
    fn no_byte_is_put_for_who_has_severed_itself() {
        let apart = Arc::new(Apart::new().unwrap());
        let (near, far) = connection();
        let mut ends = ends([near, far.try_clone().unwrap()], &apart);
        ends.memory[0].outgoing(0).sever();
        let mut went = Poll::Pending;
        until(|| {
            went = ends.byte(1);
            went.is_ready()
        });
        assert_eq!((went, tcp::unread(far.as_raw_fd())), (Poll::Ready(false), Ok(0)));
        assert!(ends.memory[0].outgoing(0).has_let_go());
    }

    #[test]
    fn a_byte_that_was_given_up_is_never_put() {
        let apart = Arc::new(Apart::new().unwrap());
        // All threads that this one may have, and then its byte waits.
        let (go, wait) = std::sync::mpsc::channel::<()>();
        let wait = Arc::new(std::sync::Mutex::new(wait));
        for _ in 0..1024 {
            let wait = wait.clone();
            apart.run(from(1), Box::new(move || drop(wait.lock().map(|wait| wait.recv()))));
        }
        let (near, far) = connection();
        let mut ends = ends([near, far.try_clone().unwrap()], &apart);
        assert!(ends.byte(1).is_pending());
        let ringing = ends.ends[0].ringing().unwrap();
        assert!(ringing.give_up() && ringing.give_up(), "nobody has begun it");
        drop(go);
        until(|| apart.is_idle());
        assert_eq!(ends.byte(1), Poll::Ready(false));
        // (On one host what was sent has come.)
        assert_eq!(tcp::unread(far.as_raw_fd()), Ok(0), "it was put all the same");
    }

    #[test]
    fn what_is_being_done_is_waited_for() {
        let apart = Arc::new(Apart::new().unwrap());
        let (near, far) = connection();
        let ends = ends([near, far], &apart);
        let (begun, begins) = std::sync::mpsc::channel();
        let (go, wait) = std::sync::mpsc::channel::<()>();
        let job = move || begun.send(()).is_ok() && wait.recv().is_err();
        let doing = ends.ends[0].apart(job);
        begins.recv_timeout(Duration::from_secs(60)).unwrap();
        until(|| {
            ends.ends[0].clock.waited(Duration::ZERO);
            doing.hangs()
        });
        assert!(!doing.give_up(), "it may take effect yet");
        drop(go);
        until(|| doing.give_up());
        assert_eq!(doing.poll(), Poll::Ready(true));
    }

    #[test]
    fn a_close_that_hangs_holds_up_nobody_else() {
        let apart = Arc::new(Apart::new().unwrap());
        let (mut near, far) = connection();
        near.set_nonblocking(true).unwrap();
        let full = std::iter::repeat_with(|| near.write(&[7; 1 << 16]));
        let full = full.flat_map(|written| written.err()).next().unwrap();
        assert_eq!(full.kind(), ErrorKind::WouldBlock);
        tcp::set_linger(near.as_raw_fd(), [1, 3600]);
        let mut hanging = ends([near, far.try_clone().unwrap()], &apart);
        assert!(hanging.part(0).is_pending());
        until(|| {
            hanging.ends[0].clock.waited(Duration::ZERO);
            hanging.hangs()
        });
        assert!(hanging.part(0).is_pending());
        let (near, mut far_of_other) = connection();
        let mut other = ends([near, far_of_other.try_clone().unwrap()], &apart);
        until(|| other.byte(1) == Poll::Ready(true));
        far_of_other.read_exact(&mut [0]).unwrap();
        assert!(!other.hangs());
        // (And it ends when its peer has.)
        far.shutdown(std::net::Shutdown::Both).unwrap();
        drop((hanging, far));
    }
}
