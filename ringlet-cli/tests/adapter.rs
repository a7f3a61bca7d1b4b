//! `ringlet adapter` beside programs that give it what makes who uses it wait, or come without end: it goes on serving others.

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};

use ringlet::handshake::ROOM_BYTES;
use ringlet::interconnect::introduction::{GREETING, JOIN, LINK, LINKED, Message, name};
use ringlet_core::layout::{Geometry, WANT_EVENT};
use ringlet_core::mirror::Asks;
use ringlet_core::ring::SegmentRing;
use ringlet_linux::meet::{self, Fds};
use ringlet_linux::{fd, map, sys, tcp};

const RING_BYTES: usize = 1 << 16;
const PAGE_BYTES: usize = 4096;
const COMERS: usize = 500;
/// Only a fault meets it.
const PATIENCE_NS: u64 = 100_000_000_000;

static COUNT: AtomicU64 = AtomicU64::new(1);

struct Adapter {
    number: u64,
    child: Child,
}

impl Adapter {
    fn start() -> Adapter {
        let nth = COUNT.fetch_add(1, Ordering::Relaxed);
        let number = 3 << 62 | u64::from(std::process::id()) << 16 | nth;
        let mut command = Command::new(env!("CARGO_BIN_EXE_ringlet"));
        command.args(["adapter", "--number", &number.to_string()]).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "ready\n");
        Adapter { number, child }
    }

    /// A lifeline, greeted.
    fn come(&self) -> i32 {
        let lifeline = meet::look_named(&name(self.number)).unwrap();
        meet::admit_descriptors(lifeline, true);
        assert_eq!(hear(lifeline).0.kind, GREETING);
        lifeline
    }

    fn ask(&self, request: Message, fds: &[i32]) -> (i32, Message, Fds) {
        let lifeline = self.come();
        let request = Message { ring_bytes: RING_BYTES as u64, ..request };
        meet::send(lifeline, request.frame().as_bytes(), fds).unwrap();
        let (linked, fds) = hear(lifeline);
        assert_eq!(linked.kind, LINKED);
        (lifeline, linked, fds)
    }

    fn serves_another(&self) {
        let (near, _far) = UnixStream::pair().unwrap();
        let request = Message { kind: LINK, ..Message::default() };
        meet::part(self.ask(request, &[near.as_raw_fd()]).0);
    }

    fn descriptors(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/fd", self.child.id())).unwrap().count()
    }
}

impl Drop for Adapter {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn hear(lifeline: i32) -> (Message, Fds) {
    let ear = fd::pollfd { fd: lifeline, events: libc::POLLIN, revents: 0 };
    fd::poll(&mut [ear], Some(PATIENCE_NS), None).unwrap();
    let mut bytes = [0; ROOM_BYTES];
    let taken = meet::take(lifeline, &mut bytes).expect("the adapter answers");
    (Message::read(&bytes[..taken.len]).unwrap(), taken.fds)
}

#[test]
fn a_full_bell_delays_no_other() {
    let adapter = Adapter::start();
    let (near, far) = UnixStream::pair().unwrap();
    let bell = fd::eventfd().unwrap();
    let page = map::sealed_memfd(c"page", PAGE_BYTES, 0).unwrap();
    map::seal_readers(page).unwrap();
    let request = Message { kind: LINK, process: 1, context: 1, ..Message::default() };
    let (_ours, linked, _) = adapter.ask(request, &[near.as_raw_fd(), bell, page]);
    // Once it was looked at, it is made one that waits, and filled.
    fd::ring_by(bell, u64::MAX - 1);
    assert_eq!(unblocked(bell), 0);
    let request = Message { kind: JOIN, ticket: linked.ticket, ..Message::default() };
    let (_theirs, _, mut fds) = adapter.ask(request, &[far.as_raw_fd()]);
    let geometry = Geometry::new(RING_BYTES).unwrap();
    let area = map::map_shared(fds.take(0).unwrap(), geometry.segment_bytes(), true).unwrap();
    let words = SegmentRing::new(area, geometry, 0);
    let words = words.control();
    words.ask_event();
    // (Else it is awake.)
    if words.data_wish().granted_by_sender() & WANT_EVENT != 0 {
        fd::ring(fds.take(1).unwrap());
    }
    adapter.serves_another();
}

/// Takes O_NONBLOCK off.
#[allow(unsafe_code)]
fn unblocked(fd: i32) -> i32 {
    // SAFETY: no memory is passed.
    unsafe { libc::fcntl(fd, libc::F_SETFL, 0) }
}

#[test]
fn a_lingering_connection_of_a_dead_program_delays_no_other() {
    let adapter = Adapter::start();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let far = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (mut near, _) = listener.accept().unwrap();
    tcp::set_linger(near.as_raw_fd(), [1, 30_000]);
    near.set_nonblocking(true).unwrap();
    while near.write(&[0; 1 << 16]).is_ok() {}
    let request = Message { kind: LINK, ..Message::default() };
    let (ours, linked, _) = adapter.ask(request, &[near.as_raw_fd()]);
    let request = Message { kind: JOIN, ticket: linked.ticket, ..Message::default() };
    let (_theirs, ..) = adapter.ask(request, &[far.as_raw_fd()]);
    // As if its program were killed: the adapter closes it last.
    let held = adapter.descriptors();
    drop(near);
    meet::part(ours);
    adapter.serves_another();
    until(|| adapter.descriptors() < held);
}

#[test]
fn who_comes_again_and_again_costs_nothing() {
    let adapter = Adapter::start();
    adapter.serves_another();
    let before = adapter.descriptors();
    for _ in 0..COMERS {
        meet::part(adapter.come());
    }
    adapter.serves_another();
    until(|| adapter.descriptors() <= before + 8);
}

fn until(condition: impl Fn() -> bool) {
    let end = sys::now_ns() + PATIENCE_NS;
    while !condition() {
        assert!(sys::now_ns() < end);
        sys::sched_yield();
    }
}
