//! A connection's ring in one memory, and over a mirror: two segments, and an adapter that keeps them in step, by a link, or by what carries between two
//! hosts; and beside them the kernel's TCP with the same to do. Nobody sleeps.
//!
//! A mirror keeps three processors busy. Where there are two, one thread is both ends, and the adapter has the other processor: a message goes from one
//! to the other and back on its way from end to end.

#![allow(unsafe_code)]

use std::hint::spin_loop;
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::task::Poll;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, ensure};
use ringlet_adapter::{
    Bells, Both, Lane, Link, Progress, Rings, Segment, Serve, Server, Wakes, WakesOne,
};
use ringlet_core::layout::{Geometry, WANT_EVENT};
use ringlet_core::memory::{Buffer, Buffers};
use ringlet_core::mirror::Asks;
use ringlet_core::ring::{Next, Rx, SegmentRing, Tx};
use ringlet_linux::{fd, map};
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use super::limits::{best, figure, ping_pong};
use super::machine;
use super::place::pin;
use super::spec::{Figure, Spec, Unit, Work, size_name};
use ringlet_adapter::join_hosts;

const SMALL_BYTES: usize = 8;
const LARGE_BYTES: usize = 64 << 10;
const RING_BYTES: usize = 1 << 20;
const MANY: usize = 1000;
const RUNS: u32 = 8;
const TRIPS: u32 = 1000;

pub fn measure(spec: &Spec) -> Result<Vec<Figure>> {
    let Work::Mirror { cpus } = spec.work else { return Ok(Vec::new()) };
    let budget = Duration::from_millis(spec.budget_ms) / 2;
    let small = size_name(SMALL_BYTES);
    let half = |what: &str, halves: Vec<f64>| -> Result<Figure> {
        let what = format!("{what}, {small}, half");
        Ok(figure(&what, best(halves, f64::min)?, Unit::Nanoseconds))
    };
    let stream = |what: &str, rates: Vec<f64>| -> Result<Figure> {
        Ok(figure(&format!("{what}, one way"), best(rates, f64::max)?, Unit::BytesPerSecond))
    };
    let [one, other] = ends_of(segment()?, segment()?, true);
    let halves = apart(cpus, budget, one, other)?;
    let [mut one, mut other] = ends_of(segment()?, segment()?, true);
    let rates = stream_apart(cpus, budget, &mut one, &mut other)?;
    let mut figures = vec![half("one memory", halves)?];
    figures.push(half("kernel TCP", tcp_apart(cpus, budget)?)?);
    for between in Between::BOTH {
        let halves = between.over(cpus, 1, |all| {
            let [near, far] = single(all);
            match third_core(cpus) {
                Some(third) => apart((cpus.0, third), budget, near, far),
                None => together(budget, near, far),
            }
        })?;
        figures.push(half(between.name(), halves)?);
    }
    figures.push(stream("one memory", rates)?);
    figures.push(stream("kernel TCP", tcp_stream(cpus, budget)?)?);
    for between in Between::BOTH {
        let rates = between.over(cpus, 1, |all| {
            let [mut near, mut far] = single(all);
            match third_core(cpus) {
                Some(third) => stream_apart((cpus.0, third), budget, &mut near, &mut far),
                None => stream_together(budget, &mut near, &mut far),
            }
        })?;
        figures.push(stream(between.name(), rates)?);
    }
    let many = |what: &str, rate: f64| {
        figure(&format!("{what}, {small}, {MANY} connections"), rate, Unit::PerSecond)
    };
    figures.push(many("kernel TCP", tcp_messages(cpus, budget)?));
    for between in Between::BOTH {
        let rate = between.over(cpus, MANY, |all| Ok(messages(budget, &all)))?;
        figures.push(many(between.name(), rate));
    }
    Ok(figures)
}

/// Besides these.
fn third_core(cpus: (usize, usize)) -> Option<usize> {
    machine::allowed_cpus().ok()?.into_iter().find(|cpu| *cpu != cpus.0 && *cpu != cpus.1)
}

/// It is never unmapped.
fn segment() -> Result<Segment> {
    let geometry = Geometry::new(RING_BYTES).expect("a legal size");
    let bytes = geometry.segment_bytes();
    let mapped = map::sealed_memfd(c"ringlet-bench", bytes, 0)
        .and_then(|memfd| map::map_shared(memfd, bytes, true));
    let area = mapped.map_err(|error| anyhow!("no memory for a segment: {error:?}"))?;
    Ok(Segment { area, geometry })
}

/// One end, in a line of its own.
#[repr(align(128))]
struct End {
    tx: Tx,
    rx: Rx,
    outgoing: SegmentRing,
    incoming: SegmentRing,
    /// What wakes the adapter.
    bell: i32,
}

/// Of a segment each, or of the first alone.
fn ends_of(one: Segment, other: Segment, in_one: bool) -> [End; 2] {
    let segments = [one, if in_one { one } else { other }];
    [0, 1].map(|nth: usize| {
        let Segment { area, geometry } = segments[nth];
        End {
            tx: Tx::default(),
            rx: Rx::default(),
            outgoing: SegmentRing::new(area, geometry, nth),
            incoming: SegmentRing::new(area, geometry, 1 - nth),
            bell: -1,
        }
    })
}

impl End {
    /// As much as there is room for.
    fn push(&self, bytes: &mut [u8]) -> usize {
        let list = [Buffer { base: bytes.as_mut_ptr(), len: bytes.len() }];
        // SAFETY: valid for its length, and borrowed.
        let pushed = self.tx.push(&self.outgoing, &mut unsafe { Buffers::new(&list) });
        if pushed > 0 && self.outgoing.control().data_wish().granted_by_sender() & WANT_EVENT != 0 {
            fd::ring(self.bell);
        }
        pushed
    }

    fn pop(&self, bytes: &mut [u8]) -> usize {
        let list = [Buffer { base: bytes.as_mut_ptr(), len: bytes.len() }];
        // SAFETY: valid for its length, and borrowed for writing.
        match self.rx.pop(&self.incoming, &mut unsafe { Buffers::new(&list) }) {
            Next::Bytes(n, looks) => {
                if looks
                    && self.incoming.control().room_wish().granted_by_receiver() & WANT_EVENT != 0
                {
                    fd::ring(self.bell);
                }
                n
            }
            _ => 0,
        }
    }

    fn send(&self, bytes: &mut [u8]) {
        let mut sent = 0;
        while sent < bytes.len() {
            match self.push(&mut bytes[sent..]) {
                0 => spin_loop(),
                n => sent += n,
            }
        }
    }

    fn receive(&self, bytes: &mut [u8]) {
        let mut got = 0;
        while got < bytes.len() {
            match self.pop(&mut bytes[got..]) {
                0 => spin_loop(),
                n => got += n,
            }
        }
    }
}

fn apart(cpus: (usize, usize), budget: Duration, near: End, far: End) -> Result<Vec<f64>> {
    let (mut here, mut there) = ([1; SMALL_BYTES], [0; SMALL_BYTES]);
    ping_pong(
        cpus,
        budget,
        |_| {
            near.send(&mut here);
            near.receive(&mut here);
            Ok(())
        },
        |_| {
            far.receive(&mut there);
            far.send(&mut there);
            Ok(())
        },
    )
}

fn together(budget: Duration, near: End, far: End) -> Result<Vec<f64>> {
    let (mut halves, begun) = (Vec::new(), Instant::now());
    let mut bytes = [1; SMALL_BYTES];
    while halves.is_empty() || begun.elapsed() < budget {
        let start = Instant::now();
        for _ in 0..TRIPS {
            for (from, to) in [(&near, &far), (&far, &near)] {
                from.send(&mut bytes);
                to.receive(&mut bytes);
            }
        }
        halves.push(start.elapsed().as_nanos() as f64 / f64::from(2 * TRIPS));
    }
    Ok(halves)
}

fn rates(budget: Duration, mut send: impl FnMut() -> usize) -> Vec<f64> {
    let run = |_| {
        let (start, mut sent) = (Instant::now(), 0);
        while sent == 0 || start.elapsed() < budget / RUNS {
            sent += send();
        }
        sent as f64 / start.elapsed().as_secs_f64()
    };
    (0..RUNS).map(run).collect()
}

fn stream_apart(
    cpus: (usize, usize),
    budget: Duration,
    near: &mut End,
    far: &mut End,
) -> Result<Vec<f64>> {
    pin(&[cpus.0])?;
    std::thread::scope(|scope| {
        let receiving = scope.spawn(move || {
            let pinned = pin(&[cpus.1]);
            let mut bytes = vec![1; LARGE_BYTES];
            while bytes[0] != 0 {
                far.receive(&mut bytes);
            }
            pinned
        });
        let mut bytes = vec![1; LARGE_BYTES];
        let rates = rates(budget, || {
            near.send(&mut bytes);
            LARGE_BYTES
        });
        near.send(&mut vec![0; LARGE_BYTES]);
        receiving.join().expect("receiving does not panic")?;
        Ok(rates)
    })
}

fn stream_together(budget: Duration, near: &mut End, far: &mut End) -> Result<Vec<f64>> {
    let mut bytes = vec![1; LARGE_BYTES];
    let mut to = vec![0; LARGE_BYTES];
    Ok(rates(budget, || {
        near.push(&mut bytes);
        far.pop(&mut to)
    }))
}

/// Nobody sleeps but the adapter.
struct Awake(OwnedFd);

impl Rings for Awake {
    fn published(&mut self) {}
    fn event(&mut self) -> bool {
        true
    }
    fn byte(&mut self) -> Poll<bool> {
        Poll::Ready(false)
    }
    fn part(&mut self) -> Poll<()> {
        Poll::Ready(())
    }
}

impl WakesOne for Awake {
    fn eventfd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Bells for Awake {
    fn published(&mut self, _end: usize) {}
    fn event(&mut self, _end: usize) -> bool {
        true
    }
    fn byte(&mut self, _to: usize) -> Poll<bool> {
        Poll::Ready(false)
    }
    fn part(&mut self, _end: usize) -> Poll<()> {
        Poll::Ready(())
    }
}

impl Wakes for Awake {
    fn eventfd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// What keeps two segments in step.
#[derive(Clone, Copy)]
enum Between {
    Link,
    /// Two lanes, of two nodes in one process, over quiet rails in memory.
    Lanes,
}

impl Between {
    const BOTH: [Between; 2] = [Between::Link, Between::Lanes];

    fn name(self) -> &'static str {
        match self {
            Between::Link => "over a mirror",
            Between::Lanes => "over two lanes",
        }
    }

    /// The adapter has the second core.
    fn over<M>(
        self,
        cpus: (usize, usize),
        connections: usize,
        measure: impl FnOnce(Vec<[End; 2]>) -> Result<M>,
    ) -> Result<M> {
        let (mut served, mut all, mut words) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..connections {
            let segments = [segment()?, segment()?];
            let fds = [eventfd()?, eventfd()?];
            // (A link has but one.)
            let bells = match self {
                Between::Link => [fds[0].as_raw_fd(); 2],
                Between::Lanes => [fds[0].as_raw_fd(), fds[1].as_raw_fd()],
            };
            let [one, other] = ends_of(segments[0], segments[1], false);
            words.extend([(one.outgoing, bells[0]), (other.outgoing, bells[1])]);
            all.push([End { bell: bells[0], ..one }, End { bell: bells[1], ..other }]);
            served.push((segments, fds));
        }
        pin(&[cpus.0])?;
        std::thread::scope(|scope| {
            let adapting = scope.spawn(move || -> Result<()> {
                pin(&[cpus.1])?;
                self.serve(served)
            });
            let measured = measure(all);
            for (ring, bell) in words {
                ring.control().ask_parting();
                fd::ring(bell);
            }
            let adapted = adapting.join();
            ensure!(adapted.is_ok_and(|adapted| adapted.is_ok()), "the adapter has failed");
            measured
        })
    }

    /// Until all ends have parted.
    fn serve(self, connections: Vec<([Segment; 2], [OwnedFd; 2])>) -> Result<()> {
        let mut server = Server::<Box<dyn Serve>>::new()?;
        let mut hosts = match self {
            Between::Link => None,
            Between::Lanes => Some(join_hosts(0, &mut server, |trunk| Box::new(trunk))?),
        };
        let mut left = 0;
        for (number, (segments, fds)) in (0..).zip(connections) {
            let [first, second] = fds.map(Awake);
            let Some(hosts) = &hosts else {
                server.serve(Box::new(Both { link: Link::new(None, segments), bells: first }))?;
                left += 1;
                continue;
            };
            for (end, rings) in [first, second].into_iter().enumerate() {
                let (trunk, name) = (&hosts.trunks()[end], hosts.name(end, number));
                // SAFETY: segments are never unmapped.
                let lane =
                    unsafe { Lane::new(trunk, name, end, segments[end], rings, Box::new(|| ())) };
                trunk.is_lane_at(name, server.serve(Box::new(lane?))?);
                left += 1;
            }
        }
        let (mut ready, mut over, mut rouse) = (Vec::new(), Vec::new(), Vec::new());
        while left > 0 {
            server.turn(None, &mut ready, &mut over)?;
            for (at, how) in over.drain(..) {
                ensure!(how == Progress::Ended, "an end can't go on");
                drop(server.leave(at));
                left -= 1;
            }
            if let Some(hosts) = &mut hosts {
                hosts.relay(&mut rouse)?;
                rouse.drain(..).for_each(|at| server.rouse(at));
            }
        }
        Ok(())
    }
}

fn eventfd() -> Result<OwnedFd> {
    let fd = fd::eventfd().map_err(|error| anyhow!("no eventfd: {error:?}"))?;
    // SAFETY: just made, and ours.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Connections of the kernel's, within this process.
fn tcp(connections: usize) -> Result<Vec<[TcpStream; 2]>> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let pair = |_| -> Result<[TcpStream; 2]> {
        let near = TcpStream::connect(listener.local_addr()?)?;
        let far = listener.accept()?.0;
        for end in [&near, &far] {
            end.set_nodelay(true)?;
            end.set_nonblocking(true)?;
        }
        Ok([near, far])
    };
    (0..connections).map(pair).collect()
}

/// How much it was; 0 if there is nothing now, or no room.
fn now(moved: io::Result<usize>) -> Result<usize> {
    match moved {
        Ok(n) => Ok(n),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(0),
        Err(error) => Err(error.into()),
    }
}

/// All of it, by calls that each move some.
fn all(bytes: usize, mut some: impl FnMut(usize) -> io::Result<usize>) -> Result<()> {
    let mut done = 0;
    while done < bytes {
        done += now(some(done))?;
    }
    Ok(())
}

fn tcp_apart(cpus: (usize, usize), budget: Duration) -> Result<Vec<f64>> {
    let [near, far] = single(tcp(1)?);
    let (mut here, mut there) = ([1; SMALL_BYTES], [0; SMALL_BYTES]);
    ping_pong(
        cpus,
        budget,
        |_| {
            all(SMALL_BYTES, |at| (&near).write(&here[at..]))?;
            all(SMALL_BYTES, |at| (&near).read(&mut here[at..]))
        },
        |_| {
            all(SMALL_BYTES, |at| (&far).read(&mut there[at..]))?;
            all(SMALL_BYTES, |at| (&far).write(&there[at..]))
        },
    )
}

fn tcp_stream(cpus: (usize, usize), budget: Duration) -> Result<Vec<f64>> {
    let [near, far] = single(tcp(1)?);
    pin(&[cpus.0])?;
    std::thread::scope(|scope| {
        let receiving = scope.spawn(move || -> Result<()> {
            pin(&[cpus.1])?;
            let mut bytes = vec![1; LARGE_BYTES];
            while bytes[0] != 0 {
                all(LARGE_BYTES, |at| (&far).read(&mut bytes[at..]))?;
            }
            Ok(())
        });
        let mut failed = Ok(());
        let bytes = vec![1; LARGE_BYTES];
        let rates = rates(budget, || {
            let sent = all(LARGE_BYTES, |at| (&near).write(&bytes[at..]));
            failed = std::mem::replace(&mut failed, Ok(())).and(sent);
            LARGE_BYTES
        });
        failed?;
        let last = vec![0; LARGE_BYTES];
        all(LARGE_BYTES, |at| (&near).write(&last[at..]))?;
        receiving.join().expect("receiving does not panic")?;
        Ok(rates)
    })
}

/// As `messages`, with a core for the senders and one for the receivers.
fn tcp_messages(cpus: (usize, usize), budget: Duration) -> Result<f64> {
    let connections = tcp(MANY)?;
    let sent = AtomicUsize::new(usize::MAX);
    pin(&[cpus.0])?;
    std::thread::scope(|scope| {
        let (connections, sent) = (&connections, &sent);
        let receiving = scope.spawn(move || -> Result<()> {
            pin(&[cpus.1])?;
            let (mut bytes, mut got) = ([0; SMALL_BYTES], 0);
            while got < sent.load(Relaxed) {
                for [_, far] in connections {
                    got += now((&*far).read(&mut bytes))?;
                }
            }
            Ok(())
        });
        let (start, mut all) = (Instant::now(), 0);
        let sending = (|| -> Result<()> {
            while start.elapsed() < budget {
                for [near, _] in connections {
                    all += now((&*near).write(&[1; SMALL_BYTES]))?;
                }
            }
            Ok(())
        })();
        sent.store(all, Relaxed);
        receiving.join().expect("receiving does not panic")?;
        sending?;
        Ok((all / SMALL_BYTES) as f64 / start.elapsed().as_secs_f64())
    })
}

/// One connection.
fn single<T>(mut all: Vec<[T; 2]>) -> [T; 2] {
    all.swap_remove(0)
}

/// Small messages in a second, over many connections in turn: of all that were sent, until the last one has come. (What waits in between is much more than
/// what comes in one part of the time, so no part of it is a rate.)
fn messages(budget: Duration, all: &[[End; 2]]) -> f64 {
    let mut bytes = [1; SMALL_BYTES];
    // (One each, first: the adapter begins to serve them.)
    for [near, _] in all {
        near.send(&mut bytes);
    }
    for [_, far] in all {
        far.receive(&mut bytes);
    }
    let (start, mut sent, mut got) = (Instant::now(), 0, 0);
    while sent == 0 || got < sent {
        let sends = start.elapsed() < budget;
        for [near, far] in all {
            if sends {
                sent += near.push(&mut bytes);
            }
            loop {
                match far.pop(&mut bytes) {
                    0 => break,
                    n => got += n,
                }
            }
        }
    }
    (got / SMALL_BYTES) as f64 / start.elapsed().as_secs_f64()
}
