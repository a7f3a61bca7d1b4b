//! What goes wrong, as a list of words, or as a seed says.

use std::fmt;
use std::str::FromStr;

use rand::RngExt;
use rand_pcg::Pcg64Mcg;
use serde::{Deserialize, Serialize};

/// Probabilities are for each transmission of a packet; numbers of links and nodes for the run, at times drawn from
/// `within_us`.
#[derive(Clone, Copy, PartialEq, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Faults {
    /// The packet vanishes; its CRC is wrong; its answer vanishes; it is late by up to `late_us`.
    pub lost: f64,
    pub corrupt: f64,
    pub unanswered: f64,
    pub late: f64,
    pub late_us: f64,
    pub dead_links: usize,
    pub dead_nodes: usize,
    /// Dead nodes come back after so long; 0: never.
    pub restart_us: f64,
    pub slow_nodes: usize,
    /// By how much slow nodes are slower.
    pub slowness: f64,
    pub within_us: f64,
}

impl Default for Faults {
    fn default() -> Faults {
        Faults {
            lost: 0.0,
            corrupt: 0.0,
            unanswered: 0.0,
            late: 0.0,
            late_us: 100.0,
            dead_links: 0,
            dead_nodes: 0,
            restart_us: 0.0,
            slow_nodes: 0,
            slowness: 10.0,
            within_us: 1000.0,
        }
    }
}

impl Faults {
    pub fn probabilities(&self) -> [f64; 4] {
        [self.lost, self.corrupt, self.unanswered, self.late]
    }

    /// Some of everything: which faults, and how bad, is drawn as well, since rare combinations find what a mixture of all
    /// hides.
    pub fn drawn(rng: &mut Pcg64Mcg, nodes: usize) -> Faults {
        let rate = |rng: &mut Pcg64Mcg| {
            if rng.random() { 10f64.powf(rng.random_range(-4.0..-0.7)) } else { 0.0 }
        };
        let few =
            |rng: &mut Pcg64Mcg| if rng.random() { rng.random_range(0..=nodes / 4 + 1) } else { 0 };
        Faults {
            lost: rate(rng),
            corrupt: rate(rng),
            unanswered: rate(rng),
            late: rate(rng),
            late_us: rng.random_range(1.0..500.0),
            dead_links: few(rng),
            dead_nodes: few(rng),
            restart_us: if rng.random() { rng.random_range(100.0..3000.0) } else { 0.0 },
            slow_nodes: few(rng),
            slowness: rng.random_range(1.0..30.0),
            within_us: rng.random_range(50.0..5000.0),
        }
    }
}

impl FromStr for Faults {
    type Err = String;

    /// `lost=0.01,dead_nodes=2`: the names of a parameter file.
    fn from_str(text: &str) -> Result<Faults, String> {
        let faults: Faults = toml::from_str(&text.replace(',', "\n")).map_err(|e| e.to_string())?;
        if faults.probabilities().iter().any(|p| !(0.0..1.0).contains(p)) {
            return Err("probabilities are 0 to below 1".into());
        }
        Ok(faults)
    }
}

impl fmt::Display for Faults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "lost={},corrupt={},unanswered={},late={},late_us={},dead_links={},dead_nodes={},restart_us={},slow_nodes={},slowness={},within_us={}",
            self.lost,
            self.corrupt,
            self.unanswered,
            self.late,
            self.late_us,
            self.dead_links,
            self.dead_nodes,
            self.restart_us,
            self.slow_nodes,
            self.slowness,
            self.within_us
        )
    }
}
