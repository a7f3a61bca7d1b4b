//! `ringlet sim papers`: simulated and published figures side by side.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Args;
use ringlet_bench::plot::RGBColor;
use ringlet_sim::papers::{Axis, Curve, Figure, Row, figures};

use ringlet_bench::bench::spec::{Unit, three_digits};
use ringlet_bench::plot::{self, BLUE, GREEN, GREY, ORANGE, Panel, Picture, RED};
use ringlet_programs::table;

/// What the papers measured, simulated, beside the values that their texts state
#[derive(Args, Debug)]
pub struct PapersArgs {
    /// Draw each figure into this directory, as an .svg
    #[arg(long, value_name = "DIR")]
    plot: Option<PathBuf>,
}

const COLOURS: [RGBColor; 5] = [BLUE, ORANGE, GREEN, RED, GREY];

pub fn run(args: &PapersArgs) -> Result<ExitCode> {
    let figures = figures();
    let header = ["", "simulated", "paper", "difference", "where the paper says so"];
    let mut rows = Vec::new();
    let mut notes: Vec<&str> = Vec::new();
    for figure in &figures {
        let title = format!("{}, {}", figure.paper, figure.name);
        rows.push([title, String::new(), String::new(), String::new(), String::new()]);
        if figure.rows.is_empty() {
            let none = "curves only: the text states no value".to_string();
            rows.push([
                format!("  {none}"),
                String::new(),
                String::new(),
                String::new(),
                String::new(),
            ]);
        }
        rows.extend(figure.rows.iter().map(|row| cells(row, &mut notes)));
    }
    table::print(header.map(String::from), rows);
    println!();
    for (number, note) in notes.iter().enumerate() {
        println!("[{}] {note}", number + 1);
    }
    if let Some(folder) = &args.plot {
        std::fs::create_dir_all(folder)
            .with_context(|| format!("cannot make {}", folder.display()))?;
        for figure in &figures {
            draw(folder, figure)?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn cells<'a>(row: &Row, notes: &mut Vec<&'a str>) -> [String; 5]
where
    'static: 'a,
{
    let note = match row.why {
        "" => String::new(),
        why => {
            let known = notes.iter().position(|&note| note == why);
            let number = known.unwrap_or_else(|| {
                notes.push(why);
                notes.len() - 1
            });
            format!(" [{}]", number + 1)
        }
    };
    let value = |value: f64| format!("{} {}", three_digits(value), row.unit);
    let difference = match row.bound {
        true => "a bound".to_string(),
        false => format!("{:+.0} %", (row.simulated / row.paper - 1.0) * 100.0),
    };
    [
        format!("  {}", row.what),
        value(row.simulated),
        value(row.paper),
        difference,
        format!("{}{note}", row.place),
    ]
}

/// `SCILAN, Figure 7: copy` becomes `scilan-figure-7.svg`.
fn file_name(figure: &Figure) -> String {
    let (number, _) = figure.name.split_once(':').unwrap_or((figure.name, ""));
    let name = format!("{} {number}", figure.paper).to_lowercase();
    name.split_whitespace().collect::<Vec<_>>().join("-") + ".svg"
}

fn draw(folder: &Path, figure: &Figure) -> Result<()> {
    let (unit, scale, title) = match figure.axis {
        Axis::Microseconds => (Unit::Nanoseconds, 1e3, "Time"),
        Axis::MegabytesPerSecond => (Unit::BytesPerSecond, 1e6, "Throughput"),
    };
    let curve = |(Curve { name, points }, colour): (&Curve, RGBColor)| plot::Curve {
        name: name.clone(),
        colour,
        points: points.iter().map(|&(size, value)| (size as f64, value * scale)).collect(),
    };
    let panel = Panel {
        title: title.into(),
        x: figure.x,
        unit,
        curves: figure.curves.iter().zip(COLOURS).map(curve).collect(),
        limit: None,
    };
    let picture = Picture {
        title: format!("{}, {}", figure.paper, figure.name),
        subtitle: "simulated: ringlet's rings, with costs that the paper states".into(),
        panels: vec![panel],
    };
    plot::draw(&folder.join(file_name(figure)), &picture)
}
