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

/// The median of ratios of the same rounds, and where it lies with 95 % confidence: by resampling, since nothing is known of how the figures
/// are distributed. (B. Efron, Bootstrap Methods, Annals of Statistics 7, 1979.)
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct Ratio {
    pub median: f64,
    /// None of fewer than five rounds.
    pub low: Option<f64>,
    pub high: Option<f64>,
}

const RESAMPLES: usize = 10_000;
const ROUNDS_LEAST: usize = 5;

impl Ratio {
    pub fn of(ratios: &[f64]) -> Option<Ratio> {
        let median_of = median(ratios.iter().copied())?;
        if ratios.len() < ROUNDS_LEAST {
            return Some(Ratio { median: median_of, low: None, high: None });
        }
        // The same figures give the same interval.
        let mut chance = fastrand::Rng::with_seed(1);
        let mut medians: Vec<f64> = (0..RESAMPLES)
            .filter_map(|_| median(ratios.iter().map(|_| ratios[chance.usize(..ratios.len())])))
            .collect();
        medians.sort_by(f64::total_cmp);
        let at = |share: f64| medians.get((medians.len() as f64 * share) as usize).copied();
        Some(Ratio { median: median_of, low: at(0.025), high: at(0.975) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interval_holds_the_median_and_is_narrow_where_figures_agree() {
        assert_eq!(Ratio::of(&[]), None);
        assert_eq!(Ratio::of(&[2.0, 4.0]), Some(Ratio { median: 3.0, low: None, high: None }));
        let same = Ratio::of(&[2.0; 9]).unwrap();
        assert_eq!((same.low, same.high), (Some(2.0), Some(2.0)));
        let ratios: Vec<f64> = (1..=21).map(f64::from).collect();
        let wide = Ratio::of(&ratios).unwrap();
        let (low, high) = (wide.low.unwrap(), wide.high.unwrap());
        assert!(wide.median == 11.0 && (5.0..9.0).contains(&low) && (13.0..17.0).contains(&high));
    }

    #[test]
    fn spreads() {
        assert_eq!(Spread::of(&[]), None);
        let spread = Spread::of(&[3.0, 1.0, 2.0]).unwrap();
        assert_eq!((spread.least, spread.median, spread.most), (1.0, 2.0, 3.0));
    }
}
