//! Loads, by how much memory they are of: one behind the other, many at once, and in a row.

use std::hint::black_box;
use std::time::{Duration, Instant};

use anyhow::Result;

use super::limits::{best, figure};
use super::place::pin;
use super::spec::{Figure, Spec, Unit, size_name};

/// From within a first cache to beyond a last one.
pub const SIZES: [usize; 8] =
    [4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20];
pub const LATENCY: &str = "each waits for the last";
pub const OVERHEAD: &str = "each by itself";
pub const BANDWIDTH: &str = "in a row";
const LINE_BYTES: usize = 64;
const WORDS: usize = LINE_BYTES / size_of::<u64>();
const BATCHES: u32 = 16;
/// At most so many loads, or lines, between two looks at the clock.
const AT_ONCE: usize = 4096;

#[derive(Clone, Copy)]
#[repr(align(64))]
struct Line([u64; WORDS]);

pub fn name(size: usize, what: &str) -> String {
    format!("{}, {what}", size_name(size))
}

pub fn measure(spec: &Spec, cpu: usize) -> Result<Vec<Figure>> {
    pin(&[cpu])?;
    let budget = Duration::from_millis(spec.budget_ms) / 4;
    let mut figures = Vec::new();
    for size in SIZES {
        let order = shuffled(size / LINE_BYTES);
        let mut lines = vec![Line([0; WORDS]); order.len()];
        // One circle through all of them, in that order.
        for (from, to) in order.iter().zip(order.iter().cycle().skip(1)) {
            lines[*from as usize].0[0] = u64::from(*to);
        }
        let (mut at, mut sum) = (0, 0u64);
        let latency = each(budget, AT_ONCE, |count| {
            (0..count).for_each(|_| at = lines[at as usize].0[0]);
        });
        let row = AT_ONCE.min(lines.len());
        // (Both are powers of two.)
        let rows = || (0..lines.len()).step_by(row).map(|first| first..first + row).cycle();
        let mut next = rows();
        let overhead = each(budget, row, |_| {
            let line = |number: &u32| lines[*number as usize].0[1];
            let row = next.next().expect("there are rows");
            sum = order[row].iter().map(line).fold(sum, u64::wrapping_add);
        });
        let (mut next, mut sums) = (rows(), [0u64; WORDS]);
        let line = each(budget, row, |_| {
            for line in &lines[next.next().expect("there are rows")] {
                for (sum, word) in sums.iter_mut().zip(line.0) {
                    *sum = sum.wrapping_add(word);
                }
            }
        });
        black_box((at, sum, sums));
        figures.push(figure(&name(size, LATENCY), latency, Unit::Nanoseconds));
        figures.push(figure(&name(size, OVERHEAD), overhead, Unit::Nanoseconds));
        let bandwidth = LINE_BYTES as f64 / line * 1e9;
        figures.push(figure(&name(size, BANDWIDTH), bandwidth, Unit::BytesPerSecond));
    }
    Ok(figures)
}

/// The numbers below `count` in an order that no prefetcher guesses, the same each time (Fisher and Yates, by a xorshift of Marsaglia's).
fn shuffled(count: usize) -> Vec<u32> {
    let mut order: Vec<u32> = (0..count as u32).collect();
    let mut random = 88_172_645_463_325_252u64;
    for last in (1..count).rev() {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        order.swap(last, (random % (last as u64 + 1)) as usize);
    }
    order
}

/// Nanoseconds of one of so many that are done at once, in the batch that was least disturbed.
fn each(budget: Duration, at_once: usize, mut act: impl FnMut(usize)) -> f64 {
    let batch = |_| {
        let (start, mut acts) = (Instant::now(), 0);
        while acts == 0 || start.elapsed() < budget / BATCHES {
            act(at_once);
            acts += at_once;
        }
        start.elapsed().as_nanos() as f64 / acts as f64
    };
    best((0..BATCHES).map(batch).collect(), f64::min).expect("there are batches")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_circle_goes_through_every_line() {
        let order = shuffled(1000);
        let mut sorted = order.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, (0..1000).collect::<Vec<u32>>());
        assert!(order.windows(2).filter(|two| two[0].abs_diff(two[1]) == 1).count() < 20);
    }
}
