//! What the machine itself allows: the way of a cache line, a copy, and a sleep with a wake.

use std::hint::{black_box, spin_loop};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use nix::sys::eventfd::{EfdFlags, EventFd};
use ringlet_core::sync::{AtomicU32, Ordering};

use super::place::pin;
use super::spec::{Figure, Spec, Unit, Work, size_name};
use super::stats::median;

const BATCHES: usize = 32;

pub fn measure(spec: &Spec) -> Result<Vec<Figure>> {
    let Work::Limits { cpus } = spec.work else { return Ok(Vec::new()) };
    let budget = Duration::from_millis(spec.budget_ms);
    let mut figures = vec![];
    if let Some(cpus) = cpus {
        let half = best(cache_line(cpus, budget)?, f64::min)?;
        figures.push(figure("cache line, half", half, Unit::Nanoseconds));
        let half = median(sleep_and_wake(cpus, budget)?).context("no batches")?;
        figures.push(figure("eventfd, half", half, Unit::Nanoseconds));
    }
    for size in [64 << 10, 4 << 20] {
        let what = format!("memcpy, {} blocks", size_name(size));
        figures.push(figure(&what, best(copy(size, budget), f64::max)?, Unit::BytesPerSecond));
    }
    Ok(figures)
}

/// A limit is what is possible: in the other batches somebody else had the core, or the other one's cache.
pub fn best(batches: Vec<f64>, better: fn(f64, f64) -> f64) -> Result<f64> {
    batches.into_iter().reduce(better).context("no batches")
}

pub fn figure(what: &str, value: f64, unit: Unit) -> Figure {
    Figure { what: what.into(), value, unit, tails: None, path: "-".into() }
}

/// A line of its own, so that nothing else moves with it.
#[repr(align(128))]
struct Line(AtomicU32);

/// Two threads count in turn on one line.
pub fn cache_line(cpus: (usize, usize), budget: Duration) -> Result<Vec<f64>> {
    let line = Line(AtomicU32::new(0));
    there_and_back(cpus, budget, &line, &line)
}

/// Each on a line of its own, as who passes messages does.
pub fn line_each_way(cpus: (usize, usize), budget: Duration) -> Result<Vec<f64>> {
    let (there, back) = (Line(AtomicU32::new(0)), Line(AtomicU32::new(0)));
    there_and_back(cpus, budget, &there, &back)
}

fn there_and_back(
    cpus: (usize, usize),
    budget: Duration,
    there: &Line,
    back: &Line,
) -> Result<Vec<f64>> {
    let await_turn = |line: &Line, turn: u32| {
        // ORDER: Acquire; pairs with the Release of the other thread's store to `line`, as a message would be passed.
        while line.0.load(Ordering::Acquire) != turn {
            spin_loop();
        }
    };
    ping_pong(
        cpus,
        budget,
        |turn| {
            there.0.store(turn, Ordering::Release);
            await_turn(back, turn + 1);
            Ok(())
        },
        |turn| {
            await_turn(there, turn);
            back.0.store(turn + 1, Ordering::Release);
            Ok(())
        },
    )
}

/// Two threads wake each other by a write and sleep in a read.
fn sleep_and_wake(cpus: (usize, usize), budget: Duration) -> Result<Vec<f64>> {
    let there = EventFd::from_value_and_flags(0, EfdFlags::EFD_CLOEXEC)?;
    let back = EventFd::from_value_and_flags(0, EfdFlags::EFD_CLOEXEC)?;
    ping_pong(
        cpus,
        budget,
        |_| {
            there.write(1)?;
            back.read()?;
            Ok(())
        },
        |_| {
            there.read()?;
            back.write(1)?;
            Ok(())
        },
    )
}

/// Runs both sides on their cores, first a probe and then for the budget; half a round trip in nanoseconds for each
/// batch. Each side is given odd, growing turns.
pub fn ping_pong(
    cpus: (usize, usize),
    budget: Duration,
    mut near: impl FnMut(u32) -> Result<()>,
    mut far: impl FnMut(u32) -> Result<()> + Send,
) -> Result<Vec<f64>> {
    pin(&[cpus.0])?;
    const PROBE: usize = 1000;
    let mut turn = 1;
    let mut run = |batches: usize, trips: usize| -> Result<Vec<f64>> {
        let first = turn;
        turn += (2 * batches * trips) as u32;
        std::thread::scope(|scope| {
            let far = &mut far;
            let far_side = scope.spawn(move || {
                // Unpinned it would still answer, only slower; so answer and report afterwards.
                let pinned = pin(&[cpus.1]);
                for trip in 0..batches * trips {
                    far(first + 2 * trip as u32)?;
                }
                pinned
            });
            let mut halves = Vec::with_capacity(batches);
            for batch in 0..batches {
                let start = Instant::now();
                for trip in 0..trips {
                    near(first + 2 * (batch * trips + trip) as u32)?;
                }
                halves.push(start.elapsed().as_nanos() as f64 / (2 * trips) as f64);
            }
            far_side.join().expect("the far side does not panic")?;
            Ok(halves)
        })
    };
    let half = median(run(BATCHES, PROBE / BATCHES)?).context("no batches")?;
    let trips = (budget.as_nanos() as f64 / (2.0 * half * BATCHES as f64)) as usize;
    run(BATCHES, trips.clamp(10, 1 << 20))
}

/// Bytes per second of each batch.
pub fn copy(size: usize, budget: Duration) -> Vec<f64> {
    let from = vec![7u8; size];
    let mut to = vec![0u8; size];
    let mut batch = || {
        let (mut copied, start) = (0u64, Instant::now());
        while copied == 0 || start.elapsed() < budget / BATCHES as u32 {
            black_box(&mut to).copy_from_slice(black_box(&from));
            copied += size as u64;
        }
        copied as f64 / start.elapsed().as_secs_f64()
    };
    (0..BATCHES).map(|_| batch()).collect()
}
