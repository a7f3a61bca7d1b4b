//! What came of a comparison: a table, JSON, a picture.

use std::path::Path;

use anyhow::Result;
use serde::Serialize;

use super::comparison::Comparison;
use super::play::{Contender, Outcome};
use super::spread::{Ratio, Spread, strip};
use crate::bench::machine::Machine;
use crate::bench::spec::{Unit, three_digits};
use crate::bench::stats::times_better;

/// One contender's part of one round.
pub struct Run {
    pub round: usize,
    pub contender: usize,
    pub outcome: Result<Outcome>,
}

#[derive(Serialize)]
pub struct Report {
    pub machine: Machine,
    pub results: Vec<Compared>,
    pub skipped: Vec<String>,
}

/// A comparison, and what came of it.
#[derive(Serialize)]
pub struct Compared {
    comparison: Comparison,
    rows: Vec<Row>,
    runs: Vec<Ran>,
    problems: Vec<String>,
}

/// One figure by one contender.
#[derive(Serialize)]
struct Row {
    figure: String,
    unit: String,
    contender: String,
    rounds: usize,
    value: Spread,
    /// Of ten runs or more, how often which figures came.
    strip: Option<String>,
    /// How many times better than the kernel in the same round; None for the kernel itself.
    ratio: Option<Ratio>,
    at_least: Option<f64>,
    aim: Option<f64>,
    /// Processor time of both programs, for each request, each unit of a rate, or the run; and as a multiple of the kernel's.
    cpu_seconds: Spread,
    cpu_for_each: String,
    cpu_ratio: Option<Ratio>,
    /// In every run, and in the run with the fewest ends. None where it is not expected: on the kernel, or where one end runs there.
    moved: Option<bool>,
    moved_ends: usize,
}

/// The raw data.
#[derive(Serialize)]
struct Ran {
    round: usize,
    contender: String,
    #[serde(flatten)]
    outcome: Option<Outcome>,
    error: Option<String>,
}

const KERNEL: usize = 0;
/// The column that shows how often which figures came.
const RUNS: usize = 5;

/// `unmoved`: whose connections did not move, and why.
pub fn judge(
    comparison: &Comparison,
    contenders: &[Contender],
    runs: Vec<Run>,
    unmoved: &[(usize, String)],
) -> Compared {
    let of = |round: usize, which: usize| {
        let run = runs.iter().find(|run| run.round == round && run.contender == which)?;
        run.outcome.as_ref().ok()
    };
    let rounds = 1 + runs.iter().map(|run| run.round).max().unwrap_or(0);
    let mut rows = Vec::new();
    for (index, figure) in comparison.figure.iter().enumerate() {
        // A rate counts operations as well.
        let rate_of =
            figure.unit.strip_suffix("/s").map(|of| if of == "1" { "operation" } else { of });
        let cost = |outcome: &Outcome| {
            let cpu = outcome.client_cpu_seconds + outcome.server_cpu_seconds;
            match (outcome.requests, rate_of) {
                (Some(requests), _) => cpu / requests,
                (None, Some(_)) => cpu / (outcome.figures[index] * outcome.client_seconds),
                (None, None) => cpu,
            }
        };
        let cpu_for_each = match (&comparison.requests, rate_of) {
            (Some(_), _) => "request",
            (None, Some(of)) => of,
            (None, None) => "run",
        };
        for (which, contender) in contenders.iter().enumerate() {
            let outcomes: Vec<&Outcome> =
                (0..rounds).filter_map(|round| of(round, which)).collect();
            let values: Vec<f64> = outcomes.iter().map(|outcome| outcome.figures[index]).collect();
            let costs: Vec<f64> = outcomes.iter().map(|outcome| cost(outcome)).collect();
            let (Some(value), Some(cpu_seconds)) = (Spread::of(&values), Spread::of(&costs)) else {
                continue;
            };
            let ratios = |better: &dyn Fn(&Outcome, &Outcome) -> Option<f64>| {
                let pairs = (0..rounds).filter_map(|round| of(round, which).zip(of(round, KERNEL)));
                // Of rounds that no ratio can judge, such as nothing in no time, none is left out silently.
                let each: Option<Vec<f64>> =
                    pairs.map(|(ours, theirs)| better(ours, theirs)).collect();
                Ratio::of(&each?).filter(|_| which != KERNEL)
            };
            let higher = !figure.lower_is_better;
            let moved_ends = outcomes.iter().map(|outcome| outcome.moved_ends).min().unwrap_or(0);
            rows.push(Row {
                figure: figure.name.clone(),
                unit: figure.unit.clone(),
                contender: contender.name.clone(),
                rounds: outcomes.len(),
                value,
                strip: strip(&values),
                ratio: ratios(&|ours, theirs| {
                    times_better(ours.figures[index], theirs.figures[index], higher)
                }),
                at_least: figure.at_least,
                aim: figure.aim,
                cpu_seconds,
                cpu_for_each: cpu_for_each.to_owned(),
                cpu_ratio: ratios(&|ours, theirs| times_better(cost(ours), cost(theirs), true)),
                moved: (contender.server && contender.client).then_some(moved_ends > 0),
                moved_ends,
            });
        }
    }
    let name = |which: usize| format!("{}, {}", comparison.name, contenders[which].name);
    let failed = runs.iter().filter_map(|run| {
        let error = run.outcome.as_ref().err()?;
        Some(format!("{}: {error:#}", name(run.contender)))
    });
    let unmoved = unmoved.iter().map(|(which, why)| {
        format!("{}: no connection came into shared memory: {why}", name(*which))
    });
    let problems = failed.chain(unmoved).collect();
    let ran = runs.into_iter().map(|run| {
        let contender = contenders[run.contender].name.clone();
        let (outcome, error) = match run.outcome {
            Ok(outcome) => (Some(outcome), None),
            Err(error) => (None, Some(format!("{error:#}"))),
        };
        Ran { round: run.round, contender, outcome, error }
    });
    Compared { comparison: comparison.clone(), rows, runs: ran.collect(), problems }
}

impl Compared {
    pub fn name(&self) -> &str {
        &self.comparison.name
    }

    /// One of its figures by one contender.
    pub fn figure(&self, figure: &str, contender: &str) -> Option<Spread> {
        let is = |row: &&Row| row.figure == figure && row.contender == contender;
        self.rows.iter().find(is).map(|row| row.value)
    }

    pub fn problems(&self) -> &[String] {
        &self.problems
    }
}

impl Report {
    pub fn problems(&self) -> Vec<&str> {
        self.results.iter().flat_map(|result| &result.problems).map(String::as_str).collect()
    }

    fn rows(&self) -> impl Iterator<Item = (&Comparison, &Row)> {
        self.results
            .iter()
            .flat_map(|result| result.rows.iter().map(move |row| (&result.comparison, row)))
    }

    pub fn print(&self) {
        if self.rows().next().is_none() {
            return;
        }
        println!("{}\n", self.machine.headline());
        let header = "Comparison|Figure|By|Median|Range|Runs|Ratio|95 %|Wanted|CPU|CPU ratio|Moved";
        // Few runs are no distribution.
        let strips = self.rows().any(|(_, row)| row.strip.is_some());
        let shown = |column: usize| column != RUNS || strips;
        let header = header.split('|').map(str::to_owned);
        let keep = |cells: Vec<String>| -> Vec<String> {
            let kept = cells.into_iter().enumerate().filter(|(column, _)| shown(*column));
            kept.map(|(_, cell)| cell).collect()
        };
        let header = keep(header.collect());
        let rows = self.rows().map(|(comparison, row)| keep(row.cells(&comparison.name)));
        ringlet_programs::table::print::<Vec<String>>(header, rows);
        let rounds = self.rows().map(|(_, row)| row.rounds).min().unwrap_or(0);
        let plural = if rounds == 1 { "" } else { "s" };
        println!(
            "\nRatio: how many times better than the kernel in the same round, the median of {rounds} round{plural}; and where it lies with \
             95 % confidence (of six rounds or more).\n\
             CPU: processor time of both programs, for each request where their number is known, else for each unit of a rate, else for \
             the run; and as a multiple of the kernel's.\n\
             Moved: ends of connections that came into shared memory, in the run with the fewest."
        );
    }

    pub fn has_ratios(&self) -> bool {
        self.rows().any(|(_, row)| row.ratio.is_some())
    }

    /// The ratios.
    pub fn draw(&self, path: &Path) -> Result<()> {
        let many =
            self.rows().any(|(_, row)| row.contender != "kernel" && row.contender != "ringlet");
        let bars = self.rows().filter_map(|(comparison, row)| {
            let ratio = row.ratio?;
            let by = if many { format!(", {}", row.contender) } else { String::new() };
            Some(crate::plot::Bar {
                name: format!("{}: {}{by}", comparison.name, row.figure),
                value: ratio.median,
                low: ratio.low.unwrap_or(ratio.median),
                high: ratio.high.unwrap_or(ratio.median),
            })
        });
        let title = "The same programs over ringlet; kernel sockets are 1";
        let subtitle = self.machine.headline().replace('\n', ", ");
        crate::plot::draw_bars(path, title, &subtitle, &bars.collect::<Vec<_>>())
    }
}

impl Row {
    fn cells(&self, comparison: &str) -> Vec<String> {
        let none = || "-".to_owned();
        let ratio = |ratio: &Option<Ratio>| ratio.map_or_else(none, |it| three_digits(it.median));
        let range = self.ratio.and_then(|ratio| Some((ratio.low?, ratio.high?)));
        let to = |low: f64, high: f64| format!("{} to {}", three_digits(low), three_digits(high));
        let wanted = match (self.ratio, self.at_least) {
            (Some(ratio), Some(least)) => {
                let wanted = self.aim.map_or_else(|| three_digits(least), |aim| to(least, aim));
                let below = if ratio.median < least { ", below" } else { "" };
                format!("{wanted}{below}")
            }
            _ => none(),
        };
        vec![
            comparison.to_owned(),
            self.figure.clone(),
            self.contender.clone(),
            self.show(self.value.median),
            format!("{} to {}", self.show(self.value.least), self.show(self.value.most)),
            self.strip.clone().unwrap_or_else(none),
            ratio(&self.ratio),
            range.map_or_else(none, |(low, high)| to(low, high)),
            wanted,
            Unit::Nanoseconds.show(self.cpu_seconds.median * 1e9),
            ratio(&self.cpu_ratio),
            self.moved.map_or_else(none, |_| self.moved_ends.to_string()),
        ]
    }

    fn show(&self, value: f64) -> String {
        match self.unit.as_str() {
            "" => three_digits(value),
            "1/s" => Unit::PerSecond.show(value),
            "B/s" => Unit::BytesPerSecond.show(value),
            "s" => Unit::Nanoseconds.show(value * 1e9),
            unit => format!("{} {unit}", three_digits(value)),
        }
    }
}
