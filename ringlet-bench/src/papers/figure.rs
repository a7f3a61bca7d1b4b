//! A figure's values, here and in the paper.

use serde::Serialize;

use crate::bench::{self, spec::Unit};
use crate::compare::{Compared, Spread};

/// One value of a figure's.
#[derive(Serialize)]
pub struct Row {
    pub figure: &'static str,
    pub what: String,
    pub unit: Unit,
    /// None where it can't be measured here.
    pub here: Option<Spread>,
    /// How many times better than the kernel, or in Figure 6 than one task alone.
    pub times: Option<f64>,
    pub paper: &'static str,
    /// The same in the paper: than FDDI, or than one node.
    pub paper_times: Option<f64>,
    pub place: &'static str,
}

/// What was measured, by its names.
pub struct Found {
    pub rows: Vec<bench::Row>,
    pub programs: Vec<Compared>,
}

impl Found {
    pub fn row(&self, case: &str, what: &str, transport: &str) -> Option<Spread> {
        let is =
            |row: &&bench::Row| row.case == case && row.what == what && row.transport == transport;
        let row = self.rows.iter().find(is)?;
        Spread::of(&row.rounds.iter().map(|round| round.value).collect::<Vec<f64>>())
    }

    /// Of both contenders.
    pub fn pair(&self, case: &str, what: &str) -> [Option<Spread>; 2] {
        ["tcp", "ringlet"].map(|transport| self.row(case, what, transport))
    }

    pub fn program(&self, name: &str, figure: &str, by: &str) -> Option<Spread> {
        self.programs.iter().find(|program| program.name() == name)?.figure(figure, by)
    }

    /// Half a round trip, in nanoseconds, of what makes so many a second.
    pub fn half(&self, name: &str, by: &str) -> Option<Spread> {
        Some(inverse(self.program(name, "32 B", by)?, 0.5e9))
    }
}

/// Of a rate, the time of one.
pub fn inverse(rate: Spread, of: f64) -> Spread {
    Spread { median: of / rate.median, least: of / rate.most, most: of / rate.least }
}

/// How many times less `ours` is.
pub fn times(theirs: Option<Spread>, ours: Option<Spread>) -> Option<f64> {
    let ratio = theirs?.median / ours?.median;
    ratio.is_finite().then_some(ratio)
}

pub fn row(figure: &'static str, what: impl Into<String>, unit: Unit, here: Option<Spread>) -> Row {
    Row {
        figure,
        what: what.into(),
        unit,
        here,
        times: None,
        paper: "",
        paper_times: None,
        place: "",
    }
}

impl Row {
    pub fn paper(self, paper: &'static str, place: &'static str) -> Row {
        Row { paper, place, ..self }
    }

    pub fn times(self, times: Option<f64>) -> Row {
        Row { times, ..self }
    }

    pub fn paper_times(self, times: f64) -> Row {
        Row { paper_times: Some(times), ..self }
    }
}
