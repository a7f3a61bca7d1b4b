//! Many connections of which one has something at a time; and many that are idle while who has them waits by the millisecond.
//!
//! Each process tells its own processor time, before and after, by `CLOCK_PROCESS_CPUTIME_ID`; the server is asked for it by a message. That
//! clock counts all threads, the library's and those that have ended too, by the nanosecond, and the asking thread's up to now.
//! getrusage(2) has the same account by the microsecond. `/proc/PID/task/*/schedstat`, read by another process, lacks threads that have ended,
//! and what a running one took since the last tick.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::select::{FdSet, select};
use nix::sys::time::{TimeVal, TimeValLike};
use nix::time::{ClockId, clock_gettime};

use super::machine::{self, processor_time_of};
use super::spec::{Among, Family, Figure, Order, Pause, Said, Spec, Unit, Work};
use super::stats::Recorder;
use super::talk::{BUFFER_BYTES, pause, say};
use super::trips::{IDLE_TRIPS, SETTLE_MAX, path_name};
use super::wire::{Listener, Wire, dial_for_messages, read_now, write_all_waiting};

const MESSAGE: usize = 8;
/// What every byte of a message says: send it back; send how much processor time you have taken; wait in vain for as long as a figure
/// takes, and send how much that took, and how many turns it was.
const ECHO: u8 = 1;
const TELL: u8 = 2;
const WAIT: u8 = 3;
/// Sent by a server to a connection that it has accepted.
const WELCOME: u8 = 7;
/// For an answer to a datagram.
const PATIENCE: Duration = Duration::from_secs(5);
/// Nothing happens for so long, and then in so many turns, before a wait in vain is measured.
const CALM: Duration = Duration::from_millis(200);
const CALM_TURNS: u32 = 40;
/// Datagrams under way at once, fewer than any receive buffer holds.
const WINDOW: usize = 64;
/// As servers have it, more or less.
const EVENTS: usize = 512;

pub fn serve(spec: &Spec) -> Result<()> {
    let (by, connections) = asked(spec)?;
    machine::have_descriptors_for(connections)?;
    if spec.family == Family::Udp {
        serve_datagrams(by)
    } else {
        serve_wires(spec, by, connections)
    }
}

fn asked(spec: &Spec) -> Result<(Among, usize)> {
    match spec.work {
        Work::Many { by, connections, .. } | Work::Idle { by, connections } => {
            Ok((by, connections))
        }
        _ => bail!("this is not of many connections"),
    }
}

fn serve_wires(spec: &Spec, by: Among, connections: usize) -> Result<()> {
    let (listener, address) = Listener::bind(spec.family).context("cannot listen")?;
    say(&Said::Listening { address })?;
    serve_on(&listener, spec, by, connections)
}

pub fn serve_on(listener: &Listener, spec: &Spec, by: Among, connections: usize) -> Result<()> {
    let accept = |index: usize| -> Result<Wire> {
        let wire = listener.accept_for_messages(true);
        let wire = wire.with_context(|| format!("connection {} of {connections}", index + 1))?;
        write_all_waiting(&wire, &[WELCOME])?;
        Ok(wire)
    };
    let wires = (0..connections).map(accept).collect::<Result<Vec<Wire>>>()?;
    let mut waiter = Waiter::among(by, &wires)?;
    let mut buffer = vec![0; BUFFER_BYTES];
    let mut ready = Vec::new();
    loop {
        waiter.wait(None, &mut ready)?;
        let mut bored = None;
        for wire in ready.drain(..).map(|index| &wires[index]) {
            while let Some(count) = read_now(wire, &mut buffer)? {
                match answer(&mut buffer[..count])? {
                    Answer::End => return Ok(()),
                    Answer::Send => write_all_waiting(wire, &buffer[..count])?,
                    Answer::Wait => bored = Some(wire),
                }
                // (An edge is not told again of what is left.)
                if by != Among::Edge {
                    break;
                }
            }
        }
        if let Some(wire) = bored {
            let taken = wait_in_vain(&mut waiter, Duration::from_millis(spec.budget_ms))?;
            write_all_waiting(wire, &taken.map(u64::to_le_bytes).concat())?;
        }
    }
}

/// All senders' by one socket; until its parent ends it, since UDP tells no end.
fn serve_datagrams(by: Among) -> Result<()> {
    let socket = [UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))?];
    let take = |buffer: &mut [u8]| -> Result<Option<(usize, SocketAddr)>> {
        match socket[0].recv_from(buffer) {
            Ok(taken) => Ok(Some(taken)),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(error) => Err(error.into()),
        }
    };
    socket[0].set_nonblocking(true)?;
    let mut waiter = Waiter::among(by, &socket)?;
    say(&Said::Listening { address: socket[0].local_addr()?.to_string() })?;
    let mut buffer = vec![0; BUFFER_BYTES];
    let mut ready = Vec::new();
    loop {
        waiter.wait(None, &mut ready)?;
        for _ in ready.drain(..) {
            while let Some((count, from)) = take(&mut buffer)? {
                // (Of a stranger's nothing comes.)
                if let Ok(Answer::Send) = answer(&mut buffer[..count]) {
                    drop(socket[0].send_to(&buffer[..count], from));
                }
                if by != Among::Edge {
                    break;
                }
            }
        }
    }
}

enum Answer {
    End,
    Send,
    Wait,
}

/// Makes an answer of a message.
fn answer(message: &mut [u8]) -> Result<Answer> {
    match message.first() {
        None => return Ok(Answer::End),
        Some(&ECHO) => {}
        Some(&TELL) => {
            ensure!(message.len() == MESSAGE, "an order of {} bytes", message.len());
            message.copy_from_slice(&processor_time()?.to_le_bytes());
        }
        Some(&WAIT) => return Ok(Answer::Wait),
        Some(other) => bail!("{other} is no order"),
    }
    Ok(Answer::Send)
}

/// Turns of a loop with a timer, beside connections of which none has anything: processor time and number.
fn wait_in_vain(waiter: &mut Waiter, time: Duration) -> Result<[u64; 2]> {
    let mut ready = Vec::new();
    let mut turn = || -> Result<()> {
        waiter.wait(Some(1), &mut ready)?;
        ensure!(ready.is_empty(), "{} idle connections are told to be ready", ready.len());
        Ok(())
    };
    thread::sleep(CALM);
    for _ in 0..CALM_TURNS {
        turn()?;
    }
    let mut turns = 0;
    let (before, start) = (processor_time()?, Instant::now());
    while turns == 0 || start.elapsed() < time {
        turn()?;
        turns += 1;
    }
    Ok([processor_time()? - before, turns])
}

/// A way to wait for any of many.
enum Waiter<'a> {
    Epoll { set: Epoll, events: Vec<EpollEvent> },
    Poll(Vec<PollFd<'a>>),
    Select { these: Vec<BorrowedFd<'a>>, set: FdSet<'a>, end: i32 },
}

impl<'a> Waiter<'a> {
    fn among(by: Among, these: &'a [impl AsFd]) -> Result<Waiter<'a>> {
        let these: Vec<BorrowedFd> = these.iter().map(AsFd::as_fd).collect();
        Ok(match by {
            Among::Epoll | Among::Edge => {
                let edge =
                    if by == Among::Edge { EpollFlags::EPOLLET } else { EpollFlags::empty() };
                let set = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
                for (index, each) in these.iter().enumerate() {
                    set.add(each, EpollEvent::new(EpollFlags::EPOLLIN | edge, index as u64))?;
                }
                Waiter::Epoll { set, events: vec![EpollEvent::empty(); EVENTS] }
            }
            Among::Poll => {
                let entry = |each| PollFd::new(each, PollFlags::POLLIN);
                Waiter::Poll(these.into_iter().map(entry).collect())
            }
            Among::Select => {
                let mut set = FdSet::new();
                let mut end = 0;
                for each in &these {
                    let fd = each.as_raw_fd();
                    ensure!((fd as usize) < libc::FD_SETSIZE, "select has no room for number {fd}");
                    set.insert(*each);
                    end = end.max(fd + 1);
                }
                Waiter::Select { these, set, end }
            }
        })
    }

    /// Adds to `ready` who has something, by its place; nobody after so many milliseconds.
    fn wait(&mut self, limit: Option<u16>, ready: &mut Vec<usize>) -> Result<()> {
        match self {
            Waiter::Epoll { set, events } => {
                let count = set.wait(events, limit.map_or(EpollTimeout::NONE, Into::into))?;
                ready.extend(events[..count].iter().map(|event| event.data() as usize));
            }
            Waiter::Poll(fds) => {
                let count = poll(fds, limit.map_or(PollTimeout::NONE, Into::into))?;
                let has = |fd: &PollFd| fd.any().unwrap_or(true);
                let those = fds.iter().enumerate().filter(|(_, fd)| has(fd));
                // Behind the last one a server looks at no more.
                ready.extend(those.take(count as usize).map(|(index, _)| index));
            }
            Waiter::Select { these, set, end } => {
                let mut left = *set;
                let mut time = TimeVal::milliseconds(limit.unwrap_or(0).into());
                let time = limit.is_some().then_some(&mut time);
                let count = select(*end, &mut left, None, None, time)?;
                let those = these.iter().enumerate().filter(|(_, each)| left.contains(**each));
                ready.extend(those.take(count as usize).map(|(index, _)| index));
            }
        }
        Ok(())
    }
}

pub fn measure(spec: &Spec, address: &str) -> Result<Vec<Figure>> {
    let (_, connections) = asked(spec)?;
    machine::have_descriptors_for(connections)?;
    let mut wires = Vec::with_capacity(connections);
    for index in 0..connections {
        let wire = connect(spec.family, address)
            .with_context(|| format!("connection {} of {connections}", index + 1))?;
        wires.push(wire);
    }
    have_lived(&wires, spec.ring_expected).context("warming up")?;
    pause(Pause::Ready)?;
    match spec.work {
        Work::Many { order, .. } => {
            many(&wires, order, spec.family, Duration::from_millis(spec.budget_ms), None)
        }
        _ => idle(&wires),
    }
}

pub fn connect(family: Family, address: &str) -> Result<Wire> {
    if family == Family::Udp {
        let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))?;
        socket.connect(address)?;
        socket.set_read_timeout(Some(PATIENCE))?;
        return Ok(OwnedFd::from(socket).into());
    }
    let mut wire = dial_for_messages(family, address, false)?;
    // It has been accepted, so that no backlog can overflow.
    wire.read_exact(&mut [0]).context("no welcome")?;
    Ok(wire)
}

/// One message there and its answer.
fn trip<const BYTES: usize>(wire: &Wire, order: u8) -> Result<[u8; BYTES]> {
    ask(wire, order)?;
    answered(wire)
}

fn ask(mut wire: &Wire, order: u8) -> Result<()> {
    Ok(wire.write_all(&[order; MESSAGE])?)
}

fn answered<const BYTES: usize>(mut wire: &Wire) -> Result<[u8; BYTES]> {
    let mut answer = [0; BYTES];
    wire.read_exact(&mut answer).context("no answer")?;
    Ok(answer)
}

pub fn have_lived(wires: &[Wire], ring_expected: bool) -> Result<()> {
    // Several at once: a server that looks at all of them each time does so for several.
    let together = |wires: &[Wire]| -> Result<()> {
        wires.iter().try_for_each(|wire| ask(wire, ECHO))?;
        wires.iter().try_for_each(|wire| answered::<MESSAGE>(wire).map(drop))
    };
    let once = || wires.chunks(WINDOW).try_for_each(together);
    for _ in 0..IDLE_TRIPS {
        once()?;
    }
    let start = Instant::now();
    while ring_expected && path(wires) != "ring" && start.elapsed() < SETTLE_MAX {
        once()?;
    }
    Ok(())
}

/// Where they go, or most of them. (A datagram socket that has been idle receives by a lane that it does not watch, and says that it is moving.)
fn path(wires: &[Wire]) -> String {
    let mut paths: Vec<(&str, usize)> = Vec::new();
    for path in wires.iter().map(|wire| path_name(wire.as_fd())) {
        match paths.iter_mut().find(|(name, _)| *name == path) {
            Some((_, times)) => *times += 1,
            None => paths.push((path, 1)),
        }
    }
    match paths.iter().max_by_key(|(_, times)| *times) {
        Some((name, times)) if *times == wires.len() => (*name).into(),
        Some((name, _)) => format!("mostly {name}"),
        None => "-".into(),
    }
}

/// Round trips in some order, each with its time (of a burst from its begin), and what they took of both processes, and of these beside them.
pub fn many(
    wires: &[Wire],
    order: Order,
    family: Family,
    budget: Duration,
    beside: Option<&[u32]>,
) -> Result<Vec<Figure>> {
    let server_time = || trip(&wires[0], TELL).map(u64::from_le_bytes);
    let mut turns = Turns { order, random: Random::new(), next: 0 };
    let mut recorder = Recorder::start();
    let mut trips = 0u64;
    let server_before = server_time()?;
    let services_time = || beside.map(processor_time_of);
    let services_before = services_time();
    let (before, start) = (processor_time()?, Instant::now());
    let mut last = start;
    while trips == 0 || last - start < budget {
        let these = &wires[turns.next(wires.len())];
        these.iter().try_for_each(|wire| ask(wire, ECHO))?;
        let began = last;
        for wire in these {
            ensure!(answered(wire)? == [ECHO; MESSAGE], "another answer than what was sent");
            last = Instant::now();
            recorder.record(last - began);
            trips += 1;
        }
    }
    let client = processor_time()? - before;
    let services = services_time();
    let server = server_time()? - server_before;
    let path = path(wires);
    let of = wires.len();
    let each = |whose: &str, time: u64| Figure {
        what: format!("CPU of the {whose} for each, {of}"),
        value: time as f64 / trips as f64,
        unit: Unit::Nanoseconds,
        tails: None,
        path: path.clone(),
    };
    let kind = if family == Family::Udp { "sender" } else { "connection" };
    let plural = if of == 1 { "" } else { "s" };
    let rate = Figure {
        what: format!("round trips, {of} {kind}{plural}"),
        value: trips as f64 / (last - start).as_secs_f64(),
        unit: Unit::PerSecond,
        tails: recorder.tails(1.0),
        path: path.clone(),
    };
    let mut figures = vec![rate, each("server", server), each("client", client)];
    if let (Some(before), Some(after)) = (services_before, services) {
        let services = after.saturating_sub(before);
        figures.push(each("services", services));
        figures.push(each("ends and services", server + client + services));
    }
    Ok(figures)
}

/// What the server says that its turns took.
fn idle(wires: &[Wire]) -> Result<Vec<Figure>> {
    let taken: [u8; 2 * MESSAGE] = trip(&wires[0], WAIT)?;
    let (time, turns) = taken.split_at(MESSAGE);
    let [time, turns] = [time, turns].map(|word| word.try_into().map(u64::from_le_bytes));
    Ok(vec![Figure {
        what: format!("{} idle, CPU of a turn", wires.len()),
        value: time? as f64 / turns? as f64,
        unit: Unit::Nanoseconds,
        tails: None,
        path: path(wires),
    }])
}

/// Of all threads of this process.
fn processor_time() -> Result<u64> {
    let time = clock_gettime(ClockId::CLOCK_PROCESS_CPUTIME_ID)?;
    Ok(Duration::from(time).as_nanos() as u64)
}

/// Who has the next messages.
struct Turns {
    order: Order,
    random: Random,
    next: usize,
}

impl Turns {
    /// Of so many: those at these places, at once.
    fn next(&mut self, all: usize) -> Range<usize> {
        let first = match self.order {
            Order::Random => self.random.below(all),
            _ => self.next,
        };
        let most = if self.order == Order::Bursts { WINDOW } else { 1 };
        let end = all.min(first + most);
        self.next = if end == all { 0 } else { end };
        first..end
    }
}

/// The same order for all who take part: xorshift64 (G. Marsaglia, Journal of Statistical Software 8, 2003).
struct Random(u64);

impl Random {
    fn new() -> Random {
        Random(88_172_645_463_325_252)
    }

    fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % end as u64) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

    const WAYS: [Among; 4] = [Among::Epoll, Among::Edge, Among::Poll, Among::Select];

    #[test]
    fn each_way_tells_who_has_something() {
        let pairs: Vec<_> = (0..40).map(|_| UnixStream::pair().unwrap()).collect();
        let (near, far): (Vec<_>, Vec<_>) = pairs.into_iter().unzip();
        for by in WAYS {
            let mut waiter = Waiter::among(by, &near).unwrap();
            let mut look = |limit| {
                let mut ready = Vec::new();
                waiter.wait(limit, &mut ready).unwrap();
                ready.sort_unstable();
                ready
            };
            assert_eq!(look(Some(1)), [0; 0], "{by:?}");
            for index in [17, 3] {
                (&far[index]).write_all(&[1]).unwrap();
            }
            assert_eq!(look(None), [3, 17], "{by:?}");
            let again: &[usize] = if by == Among::Edge { &[] } else { &[3, 17] };
            assert_eq!(look(Some(1)), again, "{by:?}");
            for index in [3, 17] {
                (&near[index]).read_exact(&mut [0]).unwrap();
            }
            assert_eq!(look(Some(1)), [0; 0], "{by:?}");
        }
    }

    #[test]
    fn a_wait_in_vain_takes_time_and_suffers_no_message() {
        let (near, far) = UnixStream::pair().unwrap();
        let near = [near];
        for by in WAYS {
            let mut waiter = Waiter::among(by, &near).unwrap();
            let [time, turns] = wait_in_vain(&mut waiter, Duration::from_millis(5)).unwrap();
            assert!(time > 0 && turns > 0, "{by:?}");
        }
        (&far).write_all(&[1]).unwrap();
        for by in WAYS {
            let mut waiter = Waiter::among(by, &near).unwrap();
            assert!(wait_in_vain(&mut waiter, Duration::ZERO).is_err(), "{by:?}");
        }
    }

    #[test]
    fn orders_are_answered() {
        let mut message = [ECHO; MESSAGE];
        assert!(matches!(answer(&mut message).unwrap(), Answer::Send));
        assert_eq!(message, [ECHO; MESSAGE]);
        let told = || {
            let mut message = [TELL; MESSAGE];
            assert!(matches!(answer(&mut message).unwrap(), Answer::Send));
            u64::from_le_bytes(message)
        };
        let before = told();
        let between = processor_time().unwrap();
        assert!(before > 0 && (before..=told()).contains(&between));
        assert!(matches!(answer(&mut [WAIT; MESSAGE]).unwrap(), Answer::Wait));
        assert!(matches!(answer(&mut []).unwrap(), Answer::End));
        assert!(answer(&mut [0]).is_err() && answer(&mut [TELL; 3]).is_err());
    }

    #[test]
    fn every_connection_has_its_turn() {
        for (order, fewest, most) in
            [(Order::Random, 16, 256), (Order::Turns, 64, 64), (Order::Bursts, 64, 64)]
        {
            let mut turns = Turns { order, random: Random::new(), next: 0 };
            let mut times = [0; 500];
            let mut count = 0;
            while count < times.len() * 64 {
                let these = turns.next(times.len());
                assert!((1..=WINDOW).contains(&these.len()), "{order:?}: {these:?}");
                count += these.len();
                times[these].iter_mut().for_each(|times| *times += 1);
            }
            let fair = |times: &i32| (fewest..=most).contains(times);
            assert!(times.iter().all(fair), "{order:?}: {times:?}");
        }
    }
}
