//! How far figures lie apart, and how sure a ratio is.

use serde::Serialize;

use crate::bench::stats::median;

/// Of one contender's rounds.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct Spread {
    pub median: f64,
    pub least: f64,
    pub most: f64,
}

impl Spread {
    pub fn of(values: &[f64]) -> Option<Spread> {
        Some(Spread {
            median: median(values.iter().copied())?,
            least: values.iter().copied().fold(f64::INFINITY, f64::min),
            most: values.iter().copied().fold(f64::NEG_INFINITY, f64::max),
        })
    }
}

/// The median of ratios of the same rounds, and where it lies with at least 95 % confidence: between two of the ratios, since nothing is known of
/// how they are distributed but that each is as likely above the true median as below. (W. Thompson, Annals of Mathematical Statistics 7, 1936.)
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct Ratio {
    pub median: f64,
    /// None of fewer rounds than can give so much confidence, which are six.
    pub low: Option<f64>,
    pub high: Option<f64>,
}

const DOUBT_MOST: f64 = 0.05;

impl Ratio {
    pub fn of(ratios: &[f64]) -> Option<Ratio> {
        let median = median(ratios.iter().copied())?;
        let mut sorted = ratios.to_vec();
        sorted.sort_by(f64::total_cmp);
        let inside = outside_each_way(sorted.len()).checked_sub(1);
        let low = inside.map(|first| sorted[first]);
        let high = inside.map(|first| sorted[sorted.len() - 1 - first]);
        Some(Ratio { median, low, high })
    }
}

/// The most that so many tosses of a coin may leave out at either end, plus one: at most that many heads, or tails, are as unlikely as half the doubt.
fn outside_each_way(tosses: usize) -> usize {
    let mut probability = 0.5f64.powi(tosses as i32);
    let mut sum = 0.0;
    for heads in 0..tosses {
        sum += probability;
        if 2.0 * sum > DOUBT_MOST {
            return heads;
        }
        probability *= (tosses - heads) as f64 / (heads + 1) as f64;
    }
    0
}

/// How many of a contender's runs gave how much, from its least to its most: two states show as two hills.
pub fn strip(values: &[f64]) -> Option<String> {
    const BINS: usize = 12;
    const RUNS_LEAST: usize = 10;
    const LEVELS: [char; 8] = [
        '\u{2581}', '\u{2582}', '\u{2583}', '\u{2584}', '\u{2585}', '\u{2586}', '\u{2587}',
        '\u{2588}',
    ];
    let Spread { least, most, .. } = Spread::of(values)?;
    if values.len() < RUNS_LEAST || most <= least {
        return None;
    }
    let mut bins = [0usize; BINS];
    for value in values {
        let place = (value - least) / (most - least) * BINS as f64;
        bins[(place as usize).min(BINS - 1)] += 1;
    }
    let fullest = bins.iter().copied().max().unwrap_or(1).max(1);
    let shown = bins.iter().map(|&count| match count {
        0 => ' ',
        _ => LEVELS[(count * LEVELS.len()).div_ceil(fullest) - 1],
    });
    Some(shown.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interval_is_as_sure_as_it_says() {
        assert_eq!(Ratio::of(&[]), None);
        let few = [2.0, 4.0, 3.0, 5.0, 1.0];
        assert_eq!(Ratio::of(&few), Some(Ratio { median: 3.0, low: None, high: None }));
        // As tables of the binomial distribution have it.
        let known =
            [(5, 0), (6, 1), (8, 1), (9, 2), (12, 3), (15, 4), (20, 6), (30, 10), (1000, 469)];
        for (rounds, first) in known {
            let ratios: Vec<f64> = (1..=rounds).rev().map(f64::from).collect();
            let ratio = Ratio::of(&ratios).unwrap();
            let expected =
                (first != 0).then_some((f64::from(first), f64::from(rounds + 1 - first)));
            assert_eq!(ratio.low.zip(ratio.high), expected, "{rounds}");
        }
    }

    #[test]
    fn strips_show_two_states() {
        assert_eq!(strip(&[1.0; 9]), None);
        assert_eq!(strip(&[1.0; 30]), None);
        let mut values = vec![10.0; 20];
        values.extend([80.0; 10]);
        assert_eq!(strip(&values).unwrap(), "\u{2588}          \u{2584}");
    }

    #[test]
    fn spreads() {
        assert_eq!(Spread::of(&[]), None);
        let spread = Spread::of(&[3.0, 1.0, 2.0]).unwrap();
        assert_eq!((spread.least, spread.median, spread.most), (1.0, 2.0, 3.0));
    }
}
