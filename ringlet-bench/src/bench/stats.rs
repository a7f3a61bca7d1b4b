//! Medians, tails and ratios.

use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};

/// Longest time that a histogram tells apart from longer ones.
const TIME_MAX_NS: u64 = 100_000_000_000;

/// The distribution of single operations within one round, in nanoseconds.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct Tails {
    pub count: u64,
    pub p50_ns: f64,
    pub p99_ns: f64,
    pub p999_ns: f64,
    pub max_ns: f64,
}

/// Collects single operations; allocated before the clock starts.
pub struct Recorder(Histogram<u64>);

impl Recorder {
    pub fn start() -> Recorder {
        Recorder(Histogram::new_with_bounds(1, TIME_MAX_NS, 3).expect("constant, valid bounds"))
    }

    pub fn record(&mut self, time: std::time::Duration) {
        self.0.saturating_record(time.as_nanos().min(TIME_MAX_NS.into()) as u64);
    }

    /// `share` of each operation: 0.5 makes half round trips of round trips.
    pub fn tails(&self, share: f64) -> Option<Tails> {
        let at = |quantile| self.0.value_at_quantile(quantile) as f64 * share;
        (!self.0.is_empty()).then(|| Tails {
            count: self.0.len(),
            p50_ns: at(0.5),
            p99_ns: at(0.99),
            p999_ns: at(0.999),
            max_ns: self.0.max() as f64 * share,
        })
    }
}

pub fn median(values: impl IntoIterator<Item = f64>) -> Option<f64> {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => None,
        n if n % 2 == 1 => Some(values[middle]),
        _ => Some((values[middle - 1] + values[middle]) / 2.0),
    }
}

/// How many times better `ours` is than `theirs`: above 1 we win, whichever way the unit counts.
/// None if one of them is zero, which a ratio can't judge.
pub fn times_better(ours: f64, theirs: f64, higher_is_better: bool) -> Option<f64> {
    let ratio = if higher_is_better { ours / theirs } else { theirs / ours };
    (ratio.is_finite() && ratio > 0.0).then_some(ratio)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn medians() {
        assert_eq!(median([]), None);
        assert_eq!(median([3.0]), Some(3.0));
        assert_eq!(median([9.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median([4.0, 1.0, 2.0, 100.0]), Some(3.0));
    }

    #[test]
    fn ratios_say_how_often_better() {
        assert_eq!(times_better(1.0, 20.0, false), Some(20.0));
        assert_eq!(times_better(20.0, 5.0, true), Some(4.0));
        assert_eq!(times_better(0.0, 5.0, false), None);
        assert_eq!(times_better(5.0, 0.0, true), None);
        assert_eq!(times_better(0.0, 0.0, true), None);
    }

    #[test]
    fn tails_of_a_known_distribution() {
        let mut recorder = Recorder::start();
        assert_eq!(recorder.tails(1.0), None);
        for ns in 1..=1000 {
            recorder.record(Duration::from_nanos(ns));
        }
        recorder.record(Duration::from_secs(1000));
        let tails = recorder.tails(0.5).unwrap();
        assert_eq!(tails.count, 1001);
        assert_eq!((tails.p50_ns, tails.p99_ns, tails.p999_ns), (250.5, 495.5, 500.0));
        // Three digits of the 100 s at which the histogram ends.
        assert!((tails.max_ns - 50e9).abs() < 0.1e9, "{}", tails.max_ns);
    }
}
