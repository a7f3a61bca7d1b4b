//! The measuring child: an ordinary socket program with a clock.

use std::io::{Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::resource::{UsageWho, getrusage};
use ringlet_core::view::{PATH_KERNEL, PATH_MOVING, PATH_RING};

use super::carried;
use super::child::pause;
use super::datagrams;
use super::many;
use super::messages;
use super::server::{Order, OrderKind};
use super::spec::{Family, Figure, Pause, Spec, Unit, Waiting, Work, size_name};
use super::stats::{Recorder, median};
use super::symbol;
use super::wire::{Wire, dial, dial_for_messages, read_now, write_all_waiting};

/// Round trips before any figure is taken, wrapped or not.
const WARM_TRIPS: u64 = 128;
/// How long a connection between two wrapped ends may take to reach the ring; then it is measured where it is.
pub const SETTLE_MAX: Duration = Duration::from_secs(1);
/// Round trips that make an idle connection one that has lived (and, wrapped, has been moved).
pub const IDLE_TRIPS: usize = 32;
const SMALL: usize = 8;

pub fn measure(spec: &Spec, address: &str) -> Result<Vec<Figure>> {
    let family = spec.family;
    let budget = Duration::from_millis(spec.budget_ms);
    match &spec.work {
        Work::Latency { sizes } => {
            let mut trip = Blocking::new(dial_for_messages(family, address, false)?);
            settle(&mut trip, spec.ring_expected)?;
            pause(Pause::Ready)?;
            let mut figures = Vec::new();
            for &size in sizes {
                trip.resize(size);
                figures.push(half_round_trip(&mut trip, budget, size_name(size))?);
            }
            Ok(figures)
        }
        Work::Events { by } => {
            let mut trip = Evented::new(dial_for_messages(family, address, true)?, *by)?;
            settle(&mut trip, spec.ring_expected)?;
            pause(Pause::Ready)?;
            Ok(vec![half_round_trip(&mut trip, budget, size_name(SMALL))?])
        }
        Work::Stream { size } => {
            let mut trip = Blocking::new(dial_for_messages(family, address, false)?);
            settle(&mut trip, spec.ring_expected)?;
            pause(Pause::Ready)?;
            Ok(vec![stream(trip.wire, *size, budget)?])
        }
        Work::Datagrams { sizes } => datagrams::measure(spec, address, sizes),
        Work::Carried { .. } => carried::measure(spec, address),
        Work::Pair => {
            let mut trip = Blocking::new(dial_for_messages(family, address, false)?);
            settle(&mut trip, spec.ring_expected)?;
            pause(Pause::Ready)?;
            Ok(vec![trips_per_second(&mut trip, budget)?])
        }
        Work::Trips { size, pause_us } => {
            let mut trip = Blocking::new(dial_for_messages(family, address, false)?);
            trip.resize(*size);
            settle(&mut trip, spec.ring_expected)?;
            pause(Pause::Ready)?;
            Ok(vec![timed_trips(&mut trip, Duration::from_micros(*pause_us), budget)?])
        }
        Work::Connect | Work::Accept => {
            pause(Pause::Ready)?;
            connections_per_second(family, address, budget, spec.work == Work::Connect)
        }
        Work::Scale { idle } => scale(spec, address, *idle, budget),
        Work::Many { .. } | Work::Idle { .. } => many::measure(spec, address),
        Work::Messages { peers } => messages::measure(spec, address, peers),
        Work::Asleep => {
            let mut trip = Blocking::new(dial_for_messages(family, address, false)?);
            settle(&mut trip, spec.ring_expected)?;
            pause(Pause::Ready)?;
            asleep(trip, budget)
        }
        Work::Ucx
        | Work::Hierarchy { .. }
        | Work::Limits { .. }
        | Work::Native { .. }
        | Work::Reflect { .. }
        | Work::Ethernet { .. }
        | Work::Ethom { .. }
        | Work::Ports { .. }
        | Work::Mirror { .. }
        | Work::HandOver { .. }
        | Work::Cost { .. } => bail!("this needs no peer"),
    }
}

/// Which way the bytes of this connection go, by ringlet's own word.
pub fn path_name(connection: BorrowedFd<'_>) -> &'static str {
    match symbol::path(connection) {
        None | Some(PATH_KERNEL) => "kernel",
        Some(PATH_MOVING) => "moving",
        Some(PATH_RING) => "ring",
        Some(_) => "?",
    }
}

/// A way to send a message and get it back.
pub trait RoundTrip {
    /// Says that `count` round trips follow.
    fn announce(&mut self, count: u64) -> Result<()>;
    fn once(&mut self) -> Result<()>;
    fn path(&self) -> &'static str;
}

pub struct Blocking {
    pub wire: Wire,
    message: Vec<u8>,
}

impl Blocking {
    pub fn new(wire: Wire) -> Blocking {
        Blocking { wire, message: vec![7; SMALL] }
    }

    fn resize(&mut self, size: usize) {
        self.message = vec![7; size];
    }
}

impl RoundTrip for Blocking {
    fn announce(&mut self, count: u64) -> Result<()> {
        let order = Order { kind: OrderKind::Echo, size: self.message.len() as u64, count };
        Ok(self.wire.write_all(&order.encode())?)
    }

    fn once(&mut self) -> Result<()> {
        self.wire.write_all(&self.message)?;
        Ok(self.wire.read_exact(&mut self.message)?)
    }

    fn path(&self) -> &'static str {
        path_name(self.wire.as_fd())
    }
}

/// One non-blocking wire in an event loop that looks at nothing but what its set reports.
struct Evented {
    wire: Wire,
    /// None: wait by poll.
    set: Option<Epoll>,
}

const TOKEN: u64 = u64::MAX;

impl Evented {
    fn new(wire: Wire, by: Waiting) -> Result<Evented> {
        let set = match by {
            Waiting::Poll => None,
            Waiting::Epoll => {
                let set = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
                set.add(&wire, EpollEvent::new(EpollFlags::EPOLLIN, TOKEN))?;
                Some(set)
            }
        };
        Ok(Evented { wire, set })
    }

    fn wait(&self) -> Result<()> {
        match &self.set {
            Some(set) => {
                let mut events = [EpollEvent::empty(); 64];
                let count = set.wait(&mut events, EpollTimeout::NONE)?;
                if count != 1 || events[0].data() != TOKEN {
                    bail!("epoll reported {count} descriptors, of which one is due");
                }
            }
            None => {
                let mut fds = [PollFd::new(self.wire.as_fd(), PollFlags::POLLIN)];
                poll(&mut fds, PollTimeout::NONE)?;
            }
        }
        Ok(())
    }
}

impl RoundTrip for Evented {
    fn announce(&mut self, _count: u64) -> Result<()> {
        Ok(())
    }

    fn once(&mut self) -> Result<()> {
        write_all_waiting(&self.wire, &[7; SMALL])?;
        let mut reply = [0; SMALL];
        let mut have = 0;
        while have < SMALL {
            self.wait()?;
            match read_now(&self.wire, &mut reply[have..])? {
                Some(0) => bail!("the server closed the connection"),
                Some(count) => have += count,
                None => {}
            }
        }
        Ok(())
    }

    fn path(&self) -> &'static str {
        path_name(self.wire.as_fd())
    }
}

/// Round trips until the connection is on the ring, or has had its time.
pub fn settle(trip: &mut impl RoundTrip, ring_expected: bool) -> Result<()> {
    let start = Instant::now();
    loop {
        trip.announce(WARM_TRIPS)?;
        for _ in 0..WARM_TRIPS {
            trip.once().context("warming up")?;
        }
        if !ring_expected || trip.path() == "ring" || start.elapsed() >= SETTLE_MAX {
            return Ok(());
        }
    }
}

/// Counts its trips.
struct Counted<T> {
    trip: T,
    count: u64,
}

impl<T: RoundTrip> RoundTrip for Counted<T> {
    fn announce(&mut self, count: u64) -> Result<()> {
        self.trip.announce(count)
    }

    fn once(&mut self) -> Result<()> {
        self.count += 1;
        self.trip.once()
    }

    fn path(&self) -> &'static str {
        self.trip.path()
    }
}

/// Half a round trip, and how often we slept for each.
pub fn asleep(trip: impl RoundTrip, budget: Duration) -> Result<Vec<Figure>> {
    let sleeps =
        || getrusage(UsageWho::RUSAGE_SELF).map(|usage| usage.voluntary_context_switches());
    let mut trip = Counted { trip, count: 0 };
    let before = sleeps()?;
    let half = half_round_trip(&mut trip, budget, size_name(SMALL))?;
    let value = (sleeps()? - before) as f64 / trip.count as f64;
    let slept = Figure {
        what: "sleeps of one end in a round trip".into(),
        value,
        unit: Unit::Number,
        tails: None,
        path: half.path.clone(),
    };
    Ok(vec![half, slept])
}

/// Half a round trip. Batches take turns: one is timed as a whole (a clock costs as much as a cache line's way), which
/// gives the figure, their median; in the next each round trip is timed by itself, which gives the tails.
pub fn half_round_trip(
    trip: &mut impl RoundTrip,
    budget: Duration,
    what: String,
) -> Result<Figure> {
    const BATCHES: u64 = 32;
    // Doubling until it shows on the clock also warms the caches for this size.
    let mut probe = 2;
    let each = loop {
        let spent = timed(trip, probe)?;
        if spent >= budget / 8 || probe >= 1 << 20 {
            break spent.as_secs_f64() / probe as f64;
        }
        probe *= 2;
    };
    let trips = ((budget.as_secs_f64() / 2.0 / each) as u64).clamp(8, 1 << 22);
    let batch = trips.div_ceil(BATCHES);
    let batches = trips / batch;

    let mut halves = Vec::with_capacity(BATCHES as usize);
    let mut recorder = Recorder::new();
    trip.announce(2 * batch * batches)?;
    for _ in 0..batches {
        let mut start = Instant::now();
        for _ in 0..batch {
            trip.once()?;
        }
        halves.push(start.elapsed().as_nanos() as f64 / (2 * batch) as f64);
        start = Instant::now();
        for _ in 0..batch {
            trip.once()?;
            let now = Instant::now();
            recorder.record(now - start);
            start = now;
        }
    }
    Ok(Figure {
        what,
        value: median(halves).context("no batch was timed")?,
        unit: Unit::Nanoseconds,
        tails: recorder.tails(0.5),
        path: trip.path().into(),
    })
}

fn timed(trip: &mut impl RoundTrip, count: u64) -> Result<Duration> {
    trip.announce(count)?;
    let start = Instant::now();
    for _ in 0..count {
        trip.once()?;
    }
    Ok(start.elapsed())
}

/// One way in chunks, each answered by one byte. The next chunk is under way before the last one's answer is awaited,
/// so the stream never runs dry.
pub fn stream(mut wire: Wire, size: usize, budget: Duration) -> Result<Figure> {
    let count = ((4 << 20) / size).clamp(16, 16 << 10);
    let order = Order { kind: OrderKind::Sink, size: size as u64, count: count as u64 }.encode();
    let message = vec![7; size];
    let mut answer = [0];
    let send_chunk = |mut wire: &Wire| -> Result<()> {
        wire.write_all(&order)?;
        for _ in 0..count {
            wire.write_all(&message)?;
        }
        Ok(())
    };
    send_chunk(&wire)?;
    wire.read_exact(&mut answer)?;

    let start = Instant::now();
    let mut chunks = 1u64;
    send_chunk(&wire)?;
    while start.elapsed() < budget {
        send_chunk(&wire)?;
        chunks += 1;
        wire.read_exact(&mut answer)?;
    }
    wire.read_exact(&mut answer)?;
    let messages_per_second = (chunks * count as u64) as f64 / start.elapsed().as_secs_f64();
    // What counts is bytes for large messages and messages for small ones.
    let large = size >= 4096;
    Ok(Figure {
        what: format!("{} writes", size_name(size)),
        value: if large { messages_per_second * size as f64 } else { messages_per_second },
        unit: if large { Unit::BytesPerSecond } else { Unit::PerSecond },
        tails: None,
        path: path_name(wire.as_fd()).into(),
    })
}

fn trips_per_second(trip: &mut impl RoundTrip, budget: Duration) -> Result<Figure> {
    const BATCH: u64 = 32;
    let mut trips = 0;
    let start = Instant::now();
    while start.elapsed() < budget {
        trip.announce(BATCH)?;
        for _ in 0..BATCH {
            trip.once()?;
        }
        trips += BATCH;
    }
    Ok(Figure {
        what: "round trips".into(),
        value: trips as f64 / start.elapsed().as_secs_f64(),
        unit: Unit::PerSecond,
        tails: None,
        path: trip.path().into(),
    })
}

/// As many as there is time for, with a pause before each.
fn timed_trips(trip: &mut Blocking, pause: Duration, budget: Duration) -> Result<Figure> {
    const BATCH: u64 = 16;
    let mut recorder = Recorder::new();
    let mut trips = 0;
    let start = Instant::now();
    while start.elapsed() < budget {
        trip.announce(BATCH)?;
        for _ in 0..BATCH {
            if !pause.is_zero() {
                thread::sleep(pause);
            }
            let began = Instant::now();
            trip.once()?;
            recorder.record(began.elapsed());
        }
        trips += BATCH;
    }
    let size = size_name(trip.message.len());
    let what = match pause.as_micros() {
        0 => size,
        us => format!("{size} and {us} us of thought"),
    };
    Ok(Figure {
        what,
        value: trips as f64 / start.elapsed().as_secs_f64(),
        unit: Unit::PerSecond,
        tails: recorder.tails(1.0),
        path: trip.path().into(),
    })
}

fn connections_per_second(
    family: Family,
    address: &str,
    budget: Duration,
    request: bool,
) -> Result<Vec<Figure>> {
    let mut recorder = Recorder::new();
    let mut byte = [7];
    let mut count = 0;
    let mut path = "kernel";
    let start = Instant::now();
    while start.elapsed() < budget {
        let began = Instant::now();
        let mut wire = dial(family, address)?;
        if request {
            wire.write_all(&byte)?;
            wire.read_exact(&mut byte)?;
        } else if wire.read(&mut byte)? != 0 {
            bail!("a server that only accepts sent something");
        }
        path = path_name(wire.as_fd());
        drop(wire);
        recorder.record(began.elapsed());
        count += 1;
    }
    Ok(vec![Figure {
        what: if request { "1 B each way" } else { "accept, close" }.into(),
        value: f64::from(count) / start.elapsed().as_secs_f64(),
        unit: Unit::PerSecond,
        tails: recorder.tails(1.0),
        path: path.into(),
    }])
}

fn scale(spec: &Spec, address: &str, idle: usize, budget: Duration) -> Result<Vec<Figure>> {
    let mut busy = Evented::new(dial_for_messages(spec.family, address, true)?, Waiting::Epoll)?;
    settle(&mut busy, spec.ring_expected)?;
    pause(Pause::Ready)?;
    let alone = half_round_trip(&mut busy, budget, "8 B, alone".into())?;
    pause(Pause::Few)?;

    let set = busy.set.as_ref().context("made to wait by epoll")?;
    let mut others = Vec::with_capacity(idle);
    for index in 0..idle {
        let wire = dial_for_messages(spec.family, address, true)
            .with_context(|| format!("connection {} of {idle}", index + 1))?;
        set.add(&wire, EpollEvent::new(EpollFlags::EPOLLIN, index as u64))?;
        others.push(wire);
        // The answer proves that the server has accepted it, so its backlog can't overflow.
        exchange_with_all(set, &others[index..], index)?;
    }
    for _ in 1..IDLE_TRIPS {
        exchange_with_all(set, &others, 0)?;
    }
    pause(Pause::Many { idle })?;

    let what = format!("8 B, beside {idle} idle");
    let mut beside = half_round_trip(&mut busy, budget, what)?;
    let on_ring = others.iter().filter(|wire| path_name(wire.as_fd()) == "ring").count();
    if spec.ring_expected && on_ring < idle {
        beside.path = format!("{} ({on_ring}/{idle})", beside.path);
    }
    Ok(vec![alone, beside])
}

/// One message to each of `wires`, and all the answers. `first` is the token of the first.
fn exchange_with_all(set: &Epoll, wires: &[Wire], first: usize) -> Result<()> {
    for wire in wires {
        write_all_waiting(wire, &[7; SMALL])?;
    }
    let mut due = wires.len() * SMALL;
    let mut events = [EpollEvent::empty(); 64];
    let mut buffer = [0; 4096];
    while due > 0 {
        let count = set.wait(&mut events, EpollTimeout::NONE)?;
        for event in &events[..count] {
            let wire = (event.data() as usize)
                .checked_sub(first)
                .and_then(|index| wires.get(index))
                .context("epoll reported a connection that is not due")?;
            match read_now(wire, &mut buffer)? {
                Some(0) => bail!("the server closed a connection"),
                Some(count) => {
                    due = due.checked_sub(count).context("more came back than was sent")?;
                }
                None => {}
            }
        }
    }
    Ok(())
}
