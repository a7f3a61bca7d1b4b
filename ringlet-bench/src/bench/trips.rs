//! Round trips and streams, whoever makes them: how they are warmed, counted and timed.

use std::io::{Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use nix::sys::resource::{UsageWho, getrusage};
use ringlet_core::view::{PATH_KERNEL, PATH_MOVING, PATH_RING};

use super::orders::{Order, OrderKind};
use super::spec::{Figure, Unit, size_name};
use super::stats::{Recorder, median};
use super::symbol;
use super::wire::Wire;

/// Round trips before any figure is taken, wrapped or not.
const WARM_TRIPS: u64 = 128;
/// How long a connection between two wrapped ends may take to reach the ring; then it is measured where it is.
pub const SETTLE_MAX: Duration = Duration::from_secs(1);
/// Round trips that make an idle connection one that has lived (and, wrapped, has been moved).
pub const IDLE_TRIPS: usize = 32;
pub const SMALL: usize = 8;

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
    pub message: Vec<u8>,
}

impl Blocking {
    pub fn new(wire: Wire) -> Blocking {
        Blocking { wire, message: vec![7; SMALL] }
    }

    pub fn resize(&mut self, size: usize) {
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
    let mut recorder = Recorder::start();
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
