//! A connection's ring in one memory, and over a mirror: two segments, and an adapter that keeps them in step. Nobody sleeps.
//!
//! A mirror keeps three processors busy. Where there are two, one thread is both ends, and the adapter has the other processor: a message goes from one
//! to the other and back on its way from end to end.

#![allow(unsafe_code)]

use std::hint::spin_loop;
use std::task::Poll;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, ensure};
use ringlet_adapter::{Adapter, Bells, Link, Segment, Wakes};
use ringlet_core::layout::{Geometry, WANT_EVENT};
use ringlet_core::memory::{Buffer, Buffers};
use ringlet_core::mirror::Asks;
use ringlet_core::ring::{Next, Rx, SegmentRing, Tx};
use ringlet_linux::{fd, map};
use rustix::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};

use super::limits::{best, figure, ping_pong};
use super::machine;
use super::place::pin;
use super::spec::{Figure, Spec, Unit, Work, size_name};

const SMALL_BYTES: usize = 8;
const LARGE_BYTES: usize = 64 << 10;
const RING_BYTES: usize = 1 << 20;
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
    Ok(vec![
        half("one memory", halves)?,
        half(
            "over a mirror",
            over_a_mirror(cpus, |ends| match third_core(cpus) {
                Some(third) => apart((cpus.0, third), budget, ends.0, ends.1),
                None => together(budget, ends.0, ends.1),
            })?,
        )?,
        stream("one memory", rates)?,
        stream(
            "over a mirror",
            over_a_mirror(cpus, |mut ends| match third_core(cpus) {
                Some(third) => stream_apart((cpus.0, third), budget, &mut ends.0, &mut ends.1),
                None => stream_together(budget, &mut ends.0, &mut ends.1),
            })?,
        )?,
    ])
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
        // SAFETY: as above.
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
struct Rings(OwnedFd);

impl Bells for Rings {
    fn published(&mut self, _end: usize) {}
    fn event(&mut self, _end: usize) {}
    fn byte(&mut self, _to: usize) -> Poll<bool> {
        Poll::Ready(false)
    }
    fn part(&mut self, _end: usize) -> Poll<()> {
        Poll::Ready(())
    }
}

impl Wakes for Rings {
    fn eventfd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// The adapter has the second core.
fn over_a_mirror(
    cpus: (usize, usize),
    measure: impl FnOnce((End, End)) -> Result<Vec<f64>>,
) -> Result<Vec<f64>> {
    let segments = [segment()?, segment()?];
    let bell = fd::eventfd().map_err(|error| anyhow!("no eventfd: {error:?}"))?;
    // SAFETY: just made, and ours.
    let rings = Rings(unsafe { OwnedFd::from_raw_fd(bell) });
    let [one, other] = ends_of(segments[0], segments[1], false).map(|end| End { bell, ..end });
    let words = [one.outgoing, other.outgoing];
    pin(&[cpus.0])?;
    std::thread::scope(|scope| {
        let adapting = scope.spawn(move || -> Result<()> {
            pin(&[cpus.1])?;
            let mut adapter = Adapter::new()?;
            adapter.add(Link::new(None, segments), rings)?;
            let (mut ready, mut over) = (Vec::new(), Vec::new());
            while over.is_empty() {
                adapter.turn(None, &mut ready, &mut over)?;
            }
            Ok(())
        });
        let measured = measure((one, other));
        for ring in words {
            ring.control().ask_parting();
        }
        fd::ring(bell);
        let adapted = adapting.join();
        ensure!(adapted.is_ok_and(|adapted| adapted.is_ok()), "the adapter has failed");
        measured
    })
}
