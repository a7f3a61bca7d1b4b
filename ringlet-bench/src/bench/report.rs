//! From raw figures to rows, and rows to a table or JSON.

use anstyle::{AnsiColor, Style};
use serde::Serialize;

use super::machine::Machine;
use super::spec::{Figure, Unit, three_digits};
use super::stats::{Tails, median, times_better};

/// What ratios are taken against.
pub const BASELINE: &str = "tcp";
pub const UDP_BASELINE: &str = "udp";
/// Where it is not about one kind of socket.
pub const KERNEL_BASELINE: &str = "kernel";
pub const ETHERNET_BASELINE: &str = "veth";

/// What the others are compared with.
fn is_baseline(transport: &str) -> bool {
    [BASELINE, UDP_BASELINE, KERNEL_BASELINE, ETHERNET_BASELINE].contains(&transport)
}

/// One contender's outcome in one round of one case.
pub struct Sample {
    pub case: usize,
    pub contender: usize,
    pub round: u32,
    pub outcome: Result<Vec<Figure>, String>,
}

/// The names of a case, as rows carry them.
pub struct Heading {
    pub case: &'static str,
    pub title: String,
    pub contenders: Vec<&'static str>,
}

#[derive(Serialize)]
pub struct Report {
    pub machine: Machine,
    /// The command line that made it.
    pub command: Vec<String>,
    pub notes: Vec<String>,
    pub rows: Vec<Row>,
}

#[derive(Serialize)]
pub struct Row {
    pub case: &'static str,
    pub title: String,
    pub what: String,
    pub transport: &'static str,
    pub path: String,
    pub unit: Option<Unit>,
    /// Over the rounds, as are the tails.
    pub median: Option<f64>,
    pub p50_ns: Option<f64>,
    pub p99_ns: Option<f64>,
    pub p999_ns: Option<f64>,
    /// How many times better than kernel TCP, judged within each round; the median of those.
    pub ratio_to_tcp: Option<f64>,
    pub rounds: Vec<RoundFigure>,
    pub error: Option<String>,
}

/// The raw data.
#[derive(Serialize)]
pub struct RoundFigure {
    pub round: u32,
    pub value: f64,
    pub tails: Option<Tails>,
    pub path: String,
    pub ratio_to_tcp: Option<f64>,
}

pub fn rows(headings: &[Heading], samples: &[Sample]) -> Vec<Row> {
    let mut rows = Vec::new();
    for (case, heading) in headings.iter().enumerate() {
        let samples: Vec<&Sample> = samples.iter().filter(|sample| sample.case == case).collect();
        let mut whats: Vec<&str> = Vec::new();
        for figure in samples.iter().filter_map(|s| s.outcome.as_ref().ok()).flatten() {
            if !whats.contains(&figure.what.as_str()) {
                whats.push(&figure.what);
            }
        }
        for what in &whats {
            for contender in 0..heading.contenders.len() {
                rows.extend(row(heading, &samples, what, contender));
            }
        }
        rows.extend((0..heading.contenders.len()).filter_map(|c| failed(heading, &samples, c)));
    }
    rows
}

fn row(heading: &Heading, samples: &[&Sample], what: &str, contender: usize) -> Option<Row> {
    let figure_of = |sample: &Sample| -> Option<Figure> {
        sample.outcome.as_ref().ok()?.iter().find(|figure| figure.what == what).cloned()
    };
    let baseline = heading.contenders.iter().position(|&label| is_baseline(label));
    let mut unit = None;
    let rounds: Vec<RoundFigure> = samples
        .iter()
        .filter(|sample| sample.contender == contender)
        .filter_map(|sample| {
            let figure = figure_of(sample)?;
            unit = Some(figure.unit);
            let theirs = samples
                .iter()
                .filter(|other| Some(other.contender) == baseline && other.round == sample.round)
                .find_map(|other| figure_of(other));
            Some(RoundFigure {
                round: sample.round,
                value: figure.value,
                tails: figure.tails,
                path: figure.path,
                // What a kernel socket weighs is not in its process, so weights don't compare; nor do mere numbers.
                ratio_to_tcp: theirs
                    .filter(|_| !matches!(figure.unit, Unit::Bytes | Unit::Number))
                    .and_then(|theirs| {
                        let higher = figure.unit.higher_is_better();
                        times_better(figure.value, theirs.value, higher)
                    }),
            })
        })
        .collect();
    let mut paths: Vec<&str> = Vec::new();
    for round in &rounds {
        if !paths.contains(&round.path.as_str()) {
            paths.push(&round.path);
        }
    }
    let tail =
        |of: fn(&Tails) -> f64| median(rounds.iter().filter_map(|r| r.tails.as_ref()).map(of));
    Some(Row {
        case: heading.case,
        title: heading.title.clone(),
        what: what.into(),
        transport: heading.contenders[contender],
        path: paths.join(", "),
        unit: Some(unit?),
        median: median(rounds.iter().map(|round| round.value)),
        p50_ns: tail(|tails| tails.p50_ns),
        p99_ns: tail(|tails| tails.p99_ns),
        p999_ns: tail(|tails| tails.p999_ns),
        ratio_to_tcp: median(rounds.iter().filter_map(|round| round.ratio_to_tcp)),
        rounds,
        error: None,
    })
}

/// A failure is a row too.
fn failed(heading: &Heading, samples: &[&Sample], contender: usize) -> Option<Row> {
    let sample = samples.iter().find(|s| s.contender == contender && s.outcome.is_err())?;
    let error = sample.outcome.as_ref().err()?;
    Some(Row {
        case: heading.case,
        title: heading.title.clone(),
        what: String::new(),
        transport: heading.contenders[contender],
        path: String::new(),
        unit: None,
        median: None,
        p50_ns: None,
        p99_ns: None,
        p999_ns: None,
        ratio_to_tcp: None,
        rounds: Vec::new(),
        error: Some(format!("failed in round {}: {error}", sample.round + 1)),
    })
}

const BOLD: Style = Style::new().bold();
const DIM: Style = Style::new().dimmed();
const RED: Style = AnsiColor::Red.on_default();

/// For people; styled, so print it where styles are dropped when nobody would see them.
pub fn table(report: &Report, shown: impl Fn(&Row) -> bool) -> String {
    let rows: Vec<&Row> = report.rows.iter().filter(|row| shown(row)).collect();
    let width = |least: usize, cell: fn(&Row) -> usize| {
        rows.iter().map(|row| cell(row)).max().unwrap_or(0).max(least)
    };
    let widths = [
        width(16, |row| row.what.len() + INDENT.len()),
        width(9, |row| row.transport.len()),
        width(6, |row| row.path.len()),
    ];
    let line = |cells: [&str; 3], numbers: [&str; 4]| {
        let mut text = String::new();
        for (cell, width) in cells.into_iter().zip(widths) {
            text += &format!("{cell:<width$}  ");
        }
        text += &numbers.map(|number| format!("{number:>9}")).join("  ");
        text
    };

    let mut lines = vec![report.machine.headline(), String::new()];
    let header = line(["", "transport", "path"], ["median", "p99", "p99.9", "vs kernel"]);
    lines.push(format!("{DIM}{header}{DIM:#}"));
    let (mut title, mut what) = ("", "");
    for row in rows {
        if row.title != title {
            (title, what) = (&row.title, "");
            lines.push(format!("{BOLD}{title}{BOLD:#}"));
        }
        let label = if row.what == what { "" } else { &row.what };
        what = &row.what;
        let label = format!("{INDENT}{label}");
        if let Some(error) = &row.error {
            let (label, transport) = (widths[0], widths[1]);
            let start = format!("{:label$}  {:transport$}  ", "", row.transport);
            lines.push(format!("{start}{RED}{error}{RED:#}"));
            continue;
        }
        let time = |ns: Option<f64>| ns.map_or("-".into(), |ns| Unit::Nanoseconds.show(ns));
        let value = match (row.unit, row.median) {
            (Some(unit), Some(median)) => unit.show(median),
            _ => "-".into(),
        };
        let ratio = match row.ratio_to_tcp {
            Some(ratio) if !is_baseline(row.transport) => format!("{}x", three_digits(ratio)),
            _ => "-".into(),
        };
        let numbers = [&*value, &time(row.p99_ns), &time(row.p999_ns), &ratio];
        lines.push(line([&label, row.transport, &row.path], numbers));
    }
    let rounds = report.rows.iter().map(|row| row.rounds.len()).max().unwrap_or(0);
    let plural = if rounds == 1 { "" } else { "s" };
    lines.push(String::new());
    lines.push(format!(
        "{DIM}Medians of {rounds} round{plural}. vs kernel: how many times better than kernel TCP (or UDP) in the \
         same round.\npath: where the bytes really went. p99, p99.9: single operations; for rates, \
         the time of one connection or round trip.{DIM:#}"
    ));
    lines.extend(report.notes.iter().map(|note| format!("note: {note}")));
    lines.join("\n") + "\n"
}

const INDENT: &str = "  ";

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(contender: usize, round: u32, value: f64) -> Sample {
        let figure = Figure {
            what: "8 B".into(),
            value,
            unit: Unit::Nanoseconds,
            tails: None,
            path: if contender == 1 { "ring" } else { "kernel" }.into(),
        };
        Sample { case: 0, contender, round, outcome: Ok(vec![figure]) }
    }

    fn heading() -> Heading {
        Heading { case: "latency", title: "latency".into(), contenders: vec!["tcp", "ringlet"] }
    }

    #[test]
    fn ratios_are_judged_within_a_round() {
        // The machine slows down threefold in the second round: medians of columns would mix the rounds up.
        let samples = [
            sample(0, 0, 100.0),
            sample(1, 0, 10.0),
            sample(0, 1, 300.0),
            sample(1, 1, 30.0),
            sample(0, 2, 100.0),
        ];
        let rows = rows(&[heading()], &samples);
        assert_eq!(rows.len(), 2);
        assert_eq!((rows[0].transport, rows[0].median), ("tcp", Some(100.0)));
        assert_eq!((rows[1].transport, rows[1].median), ("ringlet", Some(20.0)));
        assert_eq!(rows[1].ratio_to_tcp, Some(10.0));
        assert_eq!(rows[1].path, "ring");
        assert_eq!(rows[1].rounds.len(), 2);
    }

    #[test]
    fn a_failure_is_a_row() {
        let failure =
            Sample { case: 0, contender: 1, round: 1, outcome: Err("it hung".to_string()) };
        let rows = rows(&[heading()], &[sample(0, 0, 1.0), sample(1, 0, 1.0), failure]);
        assert_eq!(rows.len(), 3);
        assert_eq!(rows[1].rounds.len(), 1);
        assert_eq!(rows[2].transport, "ringlet");
        assert_eq!(rows[2].error.as_deref(), Some("failed in round 2: it hung"));
    }

    #[test]
    fn paths_that_changed_between_rounds_are_all_named() {
        let mut late = sample(1, 1, 1.0);
        late.outcome.as_mut().unwrap()[0].path = "kernel".into();
        let rows = rows(&[heading()], &[sample(1, 0, 1.0), late]);
        assert_eq!(rows[0].path, "ring, kernel");
        assert_eq!(rows[0].ratio_to_tcp, None);
    }
}
