//! What a case is, and what it is written with: two sides that keep step over a control channel, a
//! connection between them, and a transcript.
//!
//! A transcript must be the same in every run, so a case brings the connection into a known state
//! first (`sync`, `until_unread`, `until_mask`) and records what it sees then, never on the way.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::{Duration, Instant};

use crate::sys::{self, Errno, Fd, R};

/// No wait inside a case is longer than this; the driver's limit for a whole case is its own. (Only a fault is ever waited for so long:
/// the machine may have other work.)
pub const PATIENCE: Duration = Duration::from_secs(60);
/// The same in milliseconds.
pub const PATIENCE_MS: i32 = PATIENCE.as_millis() as i32;

/// Round trips before a connection's path is asked for, and before the suite gives up on the ring.
const TRIPS_AT_LEAST: u32 = 64;
const TRIPS_AT_MOST: u32 = 5000;
/// From here on round trips are a millisecond apart: what is being waited for is not traffic.
const TRIPS_IN_HASTE: u32 = 1000;

pub const RING: i32 = 3;

/// The descriptor of the control channel.
pub const CONTROL: Fd = 200;

// ---- cases ----

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Family {
    V4,
    V6,
    /// An IPv6 listener reached over IPv4.
    MappedServer,
    /// An IPv4 listener reached from an IPv6 socket.
    MappedClient,
    /// Unix streams; a listener's name is a number.
    Unix,
    /// Unix sequenced packets.
    Packets,
}

impl Family {
    pub const ALL: &[Family] = &[
        Family::V4,
        Family::V6,
        Family::MappedServer,
        Family::MappedClient,
        Family::Unix,
        Family::Packets,
    ];

    pub fn suffix(self) -> &'static str {
        match self {
            Family::V4 => "",
            Family::V6 => "@v6",
            Family::MappedServer => "@mapped-server",
            Family::MappedClient => "@mapped-client",
            Family::Unix => "@unix",
            Family::Packets => "@seqpacket",
        }
    }

    /// Where a server listens, and how a client reaches it; none for Unix.
    fn server(self) -> Option<IpAddr> {
        match self {
            Family::V4 | Family::MappedClient => Some(Ipv4Addr::LOCALHOST.into()),
            Family::V6 => Some(Ipv6Addr::LOCALHOST.into()),
            Family::MappedServer => Some(Ipv6Addr::UNSPECIFIED.into()),
            Family::Unix | Family::Packets => None,
        }
    }

    fn target(self) -> Option<IpAddr> {
        match self {
            Family::V4 | Family::MappedServer => Some(Ipv4Addr::LOCALHOST.into()),
            Family::V6 => Some(Ipv6Addr::LOCALHOST.into()),
            Family::MappedClient => Some(Ipv4Addr::LOCALHOST.to_ipv6_mapped().into()),
            Family::Unix | Family::Packets => None,
        }
    }

    /// Type of its sockets.
    pub fn socket_type(self) -> i32 {
        if self == Family::Packets { libc::SOCK_SEQPACKET } else { libc::SOCK_STREAM }
    }
}

/// Where the connections of a case must be after their warming up, if both sides have the library.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Path {
    Ring,
    /// Wherever the library wants them, or the case makes no warmed connection.
    Any,
}

#[derive(Clone, Copy)]
pub enum Run {
    /// Client, then server.
    Pair(fn(&mut Side), fn(&mut Side)),
    /// One process with both ends.
    Solo(fn(&mut Side)),
}

/// A line that the kernel writes, the line that ringlet writes in its place (empty: none), and what
/// a user is told about it.
#[derive(Clone, Copy)]
pub struct Difference {
    pub kernel: &'static str,
    pub ringlet: &'static str,
    pub sentence: &'static str,
}

#[derive(Clone, Copy)]
pub struct Case {
    pub name: &'static str,
    pub goal: &'static str,
    pub run: Run,
    pub path: Path,
    pub families: &'static [Family],
    /// Also run with the library on the client's side only, and on the server's side only.
    pub each_side: bool,
    pub differences: &'static [Difference],
    /// Not run where paths change by chance: bytes may lie unread when the connection goes to a stranger, and then they must be on
    /// one path (`processes/exec_unread_on_both`).
    pub steady: bool,
}

pub const fn pair(
    name: &'static str,
    goal: &'static str,
    client: fn(&mut Side),
    server: fn(&mut Side),
) -> Case {
    Case {
        name,
        goal,
        run: Run::Pair(client, server),
        path: Path::Ring,
        families: &[Family::V4, Family::Unix],
        each_side: false,
        differences: &[],
        steady: false,
    }
}

pub const fn solo(name: &'static str, goal: &'static str, run: fn(&mut Side)) -> Case {
    let mut case = pair(name, goal, run, run);
    case.run = Run::Solo(run);
    case
}

impl Case {
    pub const fn any_path(mut self) -> Case {
        self.path = Path::Any;
        self
    }

    /// All that carry streams.
    pub const fn all_families(mut self) -> Case {
        self.families = Family::ALL.split_at(5).0;
        self
    }

    /// Also over packets: of each message, all is received at once.
    pub const fn packets_too(mut self) -> Case {
        self.families = match self.families.len() {
            1 => &[Family::Unix, Family::Packets],
            2 => &[Family::V4, Family::Unix, Family::Packets],
            _ => Family::ALL,
        };
        self
    }

    pub const fn packets_only(mut self) -> Case {
        self.families = &[Family::Packets];
        self
    }

    pub const fn steady(mut self) -> Case {
        self.steady = true;
        self
    }

    /// About what Unix streams do not have, or have otherwise.
    pub const fn internet_only(mut self) -> Case {
        self.families = &[Family::V4];
        self
    }

    pub const fn all_internet_families(mut self) -> Case {
        self.families = Family::ALL.split_at(4).0;
        self
    }

    pub const fn unix_only(mut self) -> Case {
        self.families = &[Family::Unix];
        self
    }

    pub const fn each_side(mut self) -> Case {
        self.each_side = true;
        self
    }

    pub const fn differs(mut self, differences: &'static [Difference]) -> Case {
        self.differences = differences;
        self
    }
}

// ---- the transcript ----

/// How the lines of forked processes begin.
pub const BY_A_CHILD: &str = "(child) ";

/// Adds a line.
pub fn say(line: impl AsRef<str>) {
    let whose = if sys::is_forked() { BY_A_CHILD } else { "" };
    write_down(format!("{whose}{}\n", line.as_ref()));
}

/// A line for people, which is not compared.
pub fn remark(line: impl AsRef<str>) {
    write_down(format!("#{}\n", line.as_ref()));
}

/// One write: lines of forked processes and of a killed one stay whole.
fn write_down(line: String) {
    sys::write(1, line.as_bytes()).expect("the transcript can be written");
}

/// How a result is written down.
pub trait Show {
    fn show(&self) -> String;
}

macro_rules! show_as_displayed {
    ($($ty:ty)*) => { $(impl Show for $ty { fn show(&self) -> String { self.to_string() } })* };
}
show_as_displayed! { usize i32 u32 i64 u64 u8 bool String &str Errno isize }

impl Show for () {
    fn show(&self) -> String {
        "ok".into()
    }
}

impl Show for Vec<u8> {
    fn show(&self) -> String {
        brief(self)
    }
}

impl<T: Show> Show for Option<T> {
    fn show(&self) -> String {
        self.as_ref().map_or("none".into(), Show::show)
    }
}

impl<T: Show> Show for R<T> {
    fn show(&self) -> String {
        self.as_ref().map_or_else(Errno::to_string, Show::show)
    }
}

/// Records `what = result`.
pub fn record<T: Show>(what: impl AsRef<str>, result: T) {
    say(format!("{} = {}", what.as_ref(), result.show()));
}

/// Short data as text, long data as a length and a checksum.
pub fn brief(data: &[u8]) -> String {
    if data.len() <= 64 {
        format!("{} {:?}", data.len(), data.escape_ascii().to_string())
    } else {
        format!("{} bytes, sum {:016x}", data.len(), checksum(data))
    }
}

/// FNV-1a.
pub fn checksum(data: &[u8]) -> u64 {
    let step = |sum: u64, byte: &u8| (sum ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
    data.iter().fold(0xcbf2_9ce4_8422_2325, step)
}

/// A reproducible sequence of numbers (xorshift).
pub struct Sequence(u64);

impl Sequence {
    pub fn new(seed: u64) -> Self {
        Sequence(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 16) as usize % limit
    }
}

/// Bytes that differ with seed and place, so that lost, doubled and swapped ones show.
pub fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut numbers = Sequence::new(seed);
    (0..len).map(|_| numbers.below(256) as u8).collect()
}

/// Waits until `ready`; says so if that never comes, which no other transcript does.
pub fn until(what: &str, mut ready: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !ready() {
        if Instant::now() > end {
            return say(format!("{what}: never"));
        }
        std::thread::sleep(Duration::from_micros(200));
    }
}

pub fn pause(milliseconds: u64) {
    std::thread::sleep(Duration::from_millis(milliseconds));
}

/// Waits until a thread sleeps, which is as near as one can see to "is blocked in its call". No
/// transcript depends on it: the cases that use it come out the same if the call is not yet there.
pub fn until_asleep(pid: i32, tid: i32) {
    falls_asleep(pid, tid, 3);
}

/// Does a thread sleep, or come to that within so many seconds?
pub fn falls_asleep(pid: i32, tid: i32, seconds: u64) -> bool {
    let mut quiet = 0;
    let end = Instant::now() + Duration::from_secs(seconds);
    while quiet < 5 && Instant::now() < end {
        pause(2);
        quiet = if is_asleep(pid, tid) { quiet + 1 } else { 0 };
    }
    quiet == 5
}

fn is_asleep(pid: i32, tid: i32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/task/{tid}/stat"));
    stat.is_ok_and(|s| s.rsplit(") ").next().is_some_and(|s| s.starts_with('S')))
}

/// Do these threads of ours sleep, most of the time that they are not kept waiting for a processor? (One that comes back from each sleep at once
/// runs for as long; and who sleeps only while another has its lock sleeps no longer than that one runs.)
pub fn sleep_together(tids: &[i32]) -> bool {
    let (before, since) = (tids.iter().map(|tid| spent(*tid)).collect::<Vec<_>>(), Instant::now());
    loop {
        pause(50);
        let spent = tids.iter().zip(&before).map(|(tid, before)| {
            let now = spent(*tid);
            (now.0 - before.0, now.1 - before.1)
        });
        let (ran, queued): (Vec<u64>, Vec<u64>) = spent.unzip();
        let passed = since.elapsed().as_nanos() as u64;
        let asleep =
            ran.iter().zip(&queued).map(|(ran, queued)| passed.saturating_sub(ran + queued));
        let (ran, asleep) = (ran.iter().sum::<u64>(), asleep.min().unwrap_or(0));
        if ran + asleep >= WATCHED_NS || passed >= WATCHED_MOST_NS {
            return ran < asleep;
        }
    }
}

const WATCHED_NS: u64 = 200_000_000;
const WATCHED_MOST_NS: u64 = 60_000_000_000;

/// For how long a thread of ours has run, and has waited for a processor, in nanoseconds.
fn spent(tid: i32) -> (u64, u64) {
    let text = std::fs::read_to_string(format!("/proc/self/task/{tid}/schedstat"));
    let text = text.expect("schedstat (CONFIG_SCHED_INFO)");
    let mut fields = text.split_whitespace().map(|field| field.parse().expect("a number"));
    (fields.next().expect("run"), fields.next().expect("queued"))
}

#[cfg(test)]
#[test]
fn who_spins_does_not_sleep() {
    use std::sync::atomic::{AtomicBool, Ordering};
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let (tell, hear) = std::sync::mpsc::channel();
        let (go, wait) = std::sync::mpsc::channel::<()>();
        let (over, other) = (&over, tell.clone());
        scope.spawn(move || {
            tell.send(crate::sys::thread_id()).unwrap();
            while !over.load(Ordering::Relaxed) {
                std::thread::yield_now();
            }
        });
        let spins = hear.recv().unwrap();
        scope.spawn(move || {
            other.send(crate::sys::thread_id()).unwrap();
            let _ = wait.recv();
        });
        let sleeps = hear.recv().unwrap();
        assert!(!sleep_together(&[spins]) && !sleep_together(&[spins, sleeps]));
        assert!(sleep_together(&[sleeps]));
        over.store(true, Ordering::Relaxed);
        drop(go);
    });
}

// ---- a connection's end ----

/// Every event that a program can ask for.
pub const ALL_EVENTS: u32 = (libc::EPOLLIN
    | libc::EPOLLPRI
    | libc::EPOLLOUT
    | libc::EPOLLRDHUP
    | libc::EPOLLRDNORM
    | libc::EPOLLRDBAND
    | libc::EPOLLWRNORM
    | libc::EPOLLWRBAND) as u32;

pub const IN: u32 = libc::EPOLLIN as u32;
pub const OUT: u32 = libc::EPOLLOUT as u32;
pub const HUP: u32 = libc::EPOLLHUP as u32;
pub const ERR: u32 = libc::EPOLLERR as u32;
pub const RDHUP: u32 = libc::EPOLLRDHUP as u32;
pub const PRI: u32 = libc::EPOLLPRI as u32;

/// One end of a connection. The plain methods record what they did; those named `until_` wait.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct End(pub Fd);

impl End {
    pub fn send(self, data: &[u8]) {
        self.send_with(data, 0);
    }

    pub fn send_with(self, data: &[u8], flags: i32) {
        record(format!("send {}", brief(data)), sys::send(self.0, data, flags));
    }

    pub fn write(self, data: &[u8]) {
        record(format!("write {}", brief(data)), sys::write(self.0, data));
    }

    pub fn recv(self, len: usize) {
        self.recv_with(len, 0);
    }

    pub fn recv_with(self, len: usize, flags: i32) {
        record(format!("recv {len}"), recv(self, len, flags));
    }

    pub fn read(self, len: usize) {
        let mut buf = vec![0; len];
        let got = sys::read(self.0, &mut buf);
        record(format!("read {len}"), got.map(|n| buf[..n].to_vec()));
    }

    /// Receives exactly `len` bytes, however they come, and records only the whole.
    pub fn recv_exact(self, len: usize) {
        let got = recv_exact(self, len);
        record(format!("recv all {len}"), got);
    }

    /// Receives until the stream ends, and records the bytes and the end.
    pub fn recv_to_end(self) {
        let (data, end) = recv_to_end(self);
        say(format!("recv to the end = {}, then {}", brief(&data), end.show()));
    }

    /// Sends all of it, however many calls that takes.
    pub fn send_all(self, data: &[u8]) {
        record(format!("send all of {}", data.len()), send_all(self, data));
    }

    pub fn shutdown(self, how: i32) {
        let name = ["RD", "WR", "RDWR"].get(how as usize).copied().unwrap_or("nonsense");
        record(format!("shutdown {name}"), sys::shutdown(self.0, how));
    }

    pub fn close(self) {
        record("close", sys::close(self.0));
    }

    pub fn set_nonblocking(self, on: bool) {
        let flags = sys::fcntl(self.0, libc::F_GETFL, 0).expect("F_GETFL");
        let flags = if on { flags | libc::O_NONBLOCK } else { flags & !libc::O_NONBLOCK };
        sys::fcntl(self.0, libc::F_SETFL, flags).expect("F_SETFL");
    }

    pub fn error(self) {
        record("SO_ERROR", so_error(self));
    }

    pub fn unread(self) {
        record("FIONREAD", sys::ioctl(self.0, libc::FIONREAD, -1));
    }

    /// What `poll` says now.
    pub fn mask(self) {
        record("poll", sys::event_names(mask_of(self)));
    }

    /// Waits until `poll` says at least `bits`, then records all that it says.
    pub fn until_mask(self, bits: u32) {
        self.wait_mask(bits);
        self.mask();
    }

    pub fn wait_mask(self, bits: u32) {
        until(&sys::event_names(bits), || mask_of(self) & bits == bits);
    }

    /// Waits until at least `len` bytes can be read.
    pub fn until_unread(self, len: usize) {
        until("unread bytes", || {
            sys::ioctl(self.0, libc::FIONREAD, -1).is_ok_and(|unread| unread as usize >= len)
        });
    }
}

pub fn mask_of(end: End) -> u32 {
    match sys::poll(&[(end.0, ALL_EVENTS as i16)], 0) {
        Ok((_, masks)) => masks[0],
        Err(_) => 0,
    }
}

pub fn so_error(end: End) -> String {
    match sys::getsockopt(end.0, libc::SOL_SOCKET, libc::SO_ERROR) {
        Ok(0) => "0".into(),
        Ok(code) => Errno(code).to_string(),
        Err(e) => format!("fails with {e}"),
    }
}

pub fn recv(end: End, len: usize, flags: i32) -> R<Vec<u8>> {
    let mut buf = vec![0; len];
    let got = sys::recv(end.0, &mut buf, flags)?;
    buf.truncate(got);
    Ok(buf)
}

/// Waits for what a non-blocking call was refused for.
fn wait_for(end: End, events: u32) {
    if sys::poll(&[(end.0, events as i16)], PATIENCE_MS).is_ok_and(|(ready, _)| ready == 0) {
        say("readiness after EAGAIN: never");
    }
}

pub fn recv_exact(end: End, len: usize) -> R<Vec<u8>> {
    let mut buf = vec![0; len];
    let mut done = 0;
    while done < len {
        match sys::recv(end.0, &mut buf[done..], 0) {
            Ok(0) => break,
            Ok(n) => done += n,
            Err(Errno(libc::EAGAIN)) => wait_for(end, IN),
            Err(Errno(libc::EINTR)) => {}
            Err(e) => return Err(e),
        }
    }
    buf.truncate(done);
    Ok(buf)
}

pub fn recv_to_end(end: End) -> (Vec<u8>, R<usize>) {
    let (mut all, mut buf) = (Vec::new(), vec![0; 64 << 10]);
    loop {
        match sys::recv(end.0, &mut buf, 0) {
            Ok(0) => return (all, Ok(0)),
            Ok(n) => all.extend_from_slice(&buf[..n]),
            Err(Errno(libc::EAGAIN)) => wait_for(end, IN),
            Err(e) => return (all, Err(e)),
        }
    }
}

pub fn send_all(end: End, data: &[u8]) -> R<usize> {
    let mut done = 0;
    while done < data.len() {
        match sys::send(end.0, &data[done..], libc::MSG_NOSIGNAL) {
            Ok(n) => done += n,
            Err(Errno(libc::EAGAIN)) => wait_for(end, OUT),
            Err(Errno(libc::EINTR)) => {}
            Err(e) => return Err(e),
        }
    }
    Ok(done)
}

/// Sends until not one byte more fits, and stays that way; returns all that was sent.
pub fn fill(end: End) -> Vec<u8> {
    let chunk = pattern(77, 16 << 10);
    let mut sent = Vec::new();
    let mut refused = 0;
    // KERNEL: a full sender may find room again 200 ms later, and where round trips were slow some half a second later: a second of refusals
    // is full (notes/room_in_a_full_connection.py).
    while refused < 50 {
        let got = [chunk.len(), 1].map(|len| {
            let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
            let n = sys::send(end.0, &chunk[..len], flags).unwrap_or_default();
            sent.extend_from_slice(&chunk[..n]);
            n
        });
        if got == [0, 0] {
            refused += 1;
            pause(20);
        } else {
            refused = 0;
        }
    }
    sent
}

// ---- sides ----

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Role {
    Client,
    Server,
    Solo,
}

impl Role {
    pub const ALL: &[Role] = &[Role::Client, Role::Server, Role::Solo];

    pub fn name(self) -> &'static str {
        match self {
            Role::Client => "client",
            Role::Server => "server",
            Role::Solo => "solo",
        }
    }
}

/// One process of a case.
pub struct Side {
    role: Role,
    family: Family,
    wants: Path,
    control: Fd,
    steps: i64,
    listener: Option<(Fd, u32)>,
}

/// What a `sync` says: below every value that cases tell, and counted to find sides out of step.
const STEP: i64 = i64::MIN;

impl Side {
    /// `control` is a Unix socket to the other side.
    pub fn new(role: Role, family: Family, wants: Path, control: Fd) -> Side {
        Side { role, family, wants, control, steps: STEP, listener: None }
    }

    pub fn is_client(&self) -> bool {
        self.role == Role::Client
    }

    /// Waits for the other side to come to the same point.
    pub fn sync(&mut self) {
        self.steps += 1;
        self.tell(self.steps);
        assert_eq!(self.hear(), self.steps, "the sides are in step");
    }

    /// Ends the case: waits until the other side is also through, or gone. What a program leaves
    /// open would otherwise be closed at a moment that the other side can't know.
    pub fn leave(self) {
        let mut message = [0; size_of::<i64>()];
        if sys::shutdown(self.control, libc::SHUT_WR).is_ok() {
            while matches!(sys::read(self.control, &mut message), Ok(1..)) {}
        }
    }

    pub fn tell(&mut self, value: i64) {
        let sent = sys::send(self.control, &value.to_le_bytes(), libc::MSG_NOSIGNAL);
        assert_eq!(sent, Ok(size_of::<i64>()), "the other side can be told");
    }

    /// Has the other side told something, or left?
    pub fn is_told(&self) -> bool {
        sys::poll(&[(self.control, libc::POLLIN)], 0).is_ok_and(|(count, _)| count > 0)
    }

    pub fn hear(&mut self) -> i64 {
        let mut message = [0; size_of::<i64>()];
        let mut done = 0;
        while done < message.len() {
            match sys::read(self.control, &mut message[done..]) {
                Ok(0) => panic!("the other side has left"),
                Ok(n) => done += n,
                Err(Errno(libc::EINTR)) => {}
                Err(e) => panic!("the other side can't be heard: {e}"),
            }
        }
        i64::from_le_bytes(message)
    }

    /// Must the case's sockets get to the ring?
    pub fn wants_ring(&self) -> bool {
        self.wants == Path::Ring
    }

    pub fn family(&self) -> Family {
        self.family
    }

    /// Where a server of this case's family is bound.
    pub fn address(&self) -> IpAddr {
        self.family.server().expect("an internet family")
    }

    /// Becomes, by `before`, this side of the case anew; returns only what went wrong.
    pub fn start_anew(&self, before: &[&str], name: &str) -> Errno {
        sys::dup2(self.control, 0).expect("dup2");
        let program = std::env::current_exe().expect("our own name");
        let program = program.to_str().expect("a name");
        let family = format!("{:?}", self.family);
        let words =
            [program, "case", name, "--role", self.role.name(), "--family", family.as_str()];
        sys::exec(&[before, &words].concat())
    }

    /// A step that a child has taken with its copy of the side.
    pub fn step(&mut self) {
        self.steps += 1;
    }

    /// This side's listening socket, made at its first use.
    pub fn listener(&mut self) -> (Fd, u32) {
        if let Some(listener) = self.listener {
            return listener;
        }
        let ip = self.family.server();
        let kind = self.family.socket_type() | libc::SOCK_CLOEXEC;
        let fd = sys::socket(ip.map_or(libc::AF_UNIX, family_of), kind).expect("socket");
        let port = match ip {
            Some(ip) => {
                sys::bind(fd, SocketAddr::new(ip, 0)).expect("bind");
                let addr = sys::getsockname(fd).expect("getsockname");
                u32::from(addr.expect("an internet address").port())
            }
            None => sys::bind_to_a_number(fd).expect("bind"),
        };
        sys::listen(fd, 128).expect("listen");
        *self.listener.insert((fd, port))
    }

    pub fn target(&self, port: u32) -> SocketAddr {
        let ip = self.family.target().expect("an internet family");
        SocketAddr::new(ip, u16::try_from(port).expect("a port"))
    }

    pub fn dial(&self, port: u32) -> End {
        let Some(ip) = self.family.target() else {
            let fd = sys::socket(libc::AF_UNIX, self.family.socket_type()).expect("socket");
            sys::connect_to_a_number(fd, port).expect("connect");
            return End(fd);
        };
        let fd = sys::socket(family_of(ip), libc::SOCK_STREAM).expect("socket");
        sys::connect(fd, self.target(port)).expect("connect");
        End(fd)
    }

    /// A connection between the two sides that has carried nothing yet.
    pub fn fresh(&mut self) -> End {
        if self.is_client() {
            let port = self.hear() as u32;
            self.dial(port)
        } else {
            let (listener, port) = self.listener();
            self.tell(i64::from(port));
            End(sys::accept(listener).expect("accept"))
        }
    }

    /// A connection that ringlet has moved to the ring, if it will.
    pub fn moved(&mut self) -> End {
        let end = self.fresh();
        self.warm(end);
        end
    }

    /// Exchanges small messages until the connection is on the ring at both ends, or until it is
    /// clear that it never will be. Each message tells where the connection is at its sender.
    pub fn warm(&mut self, end: End) {
        warm_as(end, self.is_client());
        // Not a step: a child may do this with its copy of the side.
        self.tell(0);
        self.hear();
        self.tell_path(end);
    }

    /// Says where a warmed connection is, for the driver.
    pub fn tell_path(&self, end: End) {
        if self.wants == Path::Ring {
            remark(format!("path {}", sys::ringlet_path(end.0)));
        }
    }

    /// Both ends of a connection in this one process, and warmed.
    pub fn both_ends(&mut self) -> (End, End) {
        let (listener, port) = self.listener();
        let near = self.dial(port);
        let far = End(sys::accept(listener).expect("accept"));
        let mut trips = 0;
        while !warmed(trips, sys::ringlet_path(near.0), sys::ringlet_path(far.0)) {
            ask(near, trips, 0);
            serve(far);
            answer_of(near);
            trips += 1;
        }
        self.tell_path(near);
        self.tell_path(far);
        (near, far)
    }
}

/// One side of the warming up: the one that asks, or the one that answers.
pub fn warm_as(end: End, asks: bool) {
    if !asks {
        while serve(end) {}
        return;
    }
    let mut trips = 0;
    loop {
        ask(end, trips, 0);
        let (theirs, _) = answer_of(end);
        trips += 1;
        if warmed(trips, sys::ringlet_path(end.0), theirs) {
            break;
        }
    }
    ask(end, trips, 1);
}

fn family_of(ip: IpAddr) -> i32 {
    if ip.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 }
}

fn warmed(trips: u32, mine: i32, theirs: i32) -> bool {
    // Where paths change by chance, none lasts.
    let restless = std::env::var_os("RINGLET_UNFORGIVING").is_some();
    let settled = (mine == RING && theirs == RING) || mine == 0 || theirs == 0 || restless;
    trips >= TRIPS_AT_MOST || (trips >= TRIPS_AT_LEAST && settled)
}

fn ask(end: End, trips: u32, last: u8) {
    if trips > TRIPS_IN_HASTE {
        pause(1);
    }
    send_all(end, &[sys::ringlet_path(end.0) as u8, last]).expect("a request can be sent");
}

fn answer_of(end: End) -> (i32, bool) {
    let message = recv_exact(end, 2).expect("a message can be received");
    assert_eq!(message.len(), 2, "the connection ended while it was warmed up");
    (i32::from(message[0]), message[1] == 1)
}

/// Answers one request; false after the last one.
fn serve(end: End) -> bool {
    let (_, last) = answer_of(end);
    if !last {
        ask(end, 0, 0);
    }
    !last
}
