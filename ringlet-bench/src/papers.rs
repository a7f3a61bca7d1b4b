//! `ringlet bench papers`: the figures of Memory Channel's paper, and of ETHOM's, beside what is measured here.
//!
//! The papers' values are those that their texts state. In Memory Channel's, FDDI stands for what the kernel's TCP is here, and Memory Channel for
//! ringlet; in ETHOM's, Gigabit Ethernet for veth, and ETHOS for a driver in user space over veth.

mod ethom;
mod figure;

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, Result, ensure};
use plotters::style::RGBColor;
use serde::Serialize;

use figure::{Found, Row, inverse, row, times};

use crate::bench::hierarchy::{BANDWIDTH, LATENCY, OVERHEAD, SIZES, name};
use crate::bench::machine::Machine;
use crate::bench::spec::{Unit, three_digits};
use crate::bench::{self, Paper, PapersArgs};
use crate::compare::{self, Compared, KERNEL, RINGLET, Spread};
use crate::plot::{self, BLUE, Bar, Curve, GREEN, GREY, MEMORY_SIZE, ORANGE, Panel, Picture};
use ringlet_programs::table;

const PVM: &str = include_str!("../../tests/compare/pvm.toml");
const PROGRAM: &str = include_str!("../../tests/compare/pvm.c");
const ROUNDS: u32 = 5;

const FIGURE_1: &str = "Figure 1: memory and messages";
const FIGURE_5: &str = "Figure 5: one way, 32 B";
const OVERHEADS: &str = "Write-and-run: what the sender of 32 B pays";
const FIGURE_6: &str = "Figure 6: an application of PVM's";

#[derive(Serialize)]
struct Report {
    machine: Machine,
    notes: Vec<String>,
    figures: Vec<Row>,
    /// The raw data.
    rows: Vec<bench::Row>,
    programs: Vec<Compared>,
}

pub fn run(args: &PapersArgs) -> Result<ExitCode> {
    let rounds = args.rounds.unwrap_or(if args.quick { 1 } else { ROUNDS });
    let wants = |paper| args.only.is_none_or(|only| only == paper);
    let machine = Machine::look()?;
    let (mut rows, mut programs, mut notes) = (Vec::new(), Vec::new(), Vec::new());
    if wants(Paper::MemoryChannel) {
        rows = bench::of_memory_channel(rounds, args.quick)?;
        let folder = tempfile::tempdir()?;
        fs::write(folder.path().join("pvm.c"), PROGRAM)?;
        (programs, notes) = compare::of_text(PVM, folder.path(), rounds)?;
        // (Each says the same.)
        notes.truncate(1);
    }
    if wants(Paper::Ethom) {
        let (theirs, why) = ethom::measure(rounds, args.quick)?;
        rows.extend(theirs);
        notes.extend(why);
    }
    let failures: Vec<&str> = rows.iter().filter_map(|row| row.error.as_deref()).collect();
    let problems = programs.iter().flat_map(|each| each.problems()).map(String::as_str);
    let failures: Vec<String> = failures.into_iter().chain(problems).map(str::to_owned).collect();
    let found = Found { rows, programs };
    let mut figures = Vec::new();
    if wants(Paper::MemoryChannel) {
        figures.extend(
            [figure_1, figure_5, overheads, figure_6].iter().flat_map(|figure| figure(&found)),
        );
    }
    if wants(Paper::Ethom) {
        figures.extend(ethom::figures(&found));
    }
    if let Some(folder) = &args.plot {
        fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
        if wants(Paper::MemoryChannel) {
            draw(folder, &found, &figures, &machine)?;
        }
        if found.rows.iter().any(|row| row.case == bench::ethom::TCP && row.error.is_none()) {
            ethom::draw(&folder.join("ethom-figures.svg"), &found, &machine)?;
        }
    }
    let failed = !failures.is_empty();
    notes.extend(failures);
    let Found { rows, programs } = found;
    let report = Report { machine, notes, figures, rows, programs };
    let to_stdout = args.json.as_ref().is_some_and(|path| path.as_os_str() == "-");
    let json = serde_json::to_string_pretty(&report)? + "\n";
    if let Some(path) = args.json.as_ref().filter(|_| !to_stdout) {
        fs::write(path, &json).with_context(|| format!("cannot write {}", path.display()))?;
    }
    if to_stdout {
        std::io::stdout().write_all(json.as_bytes())?;
    } else {
        print(&report, rounds);
    }
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// Latency, overhead and bandwidth of loads, and of messages.
fn figure_1(found: &Found) -> Vec<Row> {
    let row = |what: String, unit, here| row(FIGURE_1, what, unit, here);
    let mut rows = Vec::new();
    for size in SIZES {
        for (what, unit) in [
            (LATENCY, Unit::Nanoseconds),
            (OVERHEAD, Unit::Nanoseconds),
            (BANDWIDTH, Unit::BytesPerSecond),
        ] {
            let name = name(size, what);
            let here = found.row("hierarchy", &name, "machine");
            let load = row(format!("loads of {name}"), unit, here);
            let last = size == SIZES[SIZES.len() - 1];
            rows.push(match what {
                LATENCY if last => load.paper("250 ns (registers: 3)", MEMORY),
                OVERHEAD if last => load.paper("250 ns (registers: 1)", MEMORY),
                BANDWIDTH if last => load.paper("300 MB/s (registers: 20,000)", MEMORY),
                _ => load,
            });
        }
    }
    let time = Unit::Nanoseconds;
    let [tcp, ringlet] = found.pair("latency", "32 B");
    rows.push(row("kernel TCP, 32 B one way".into(), time, tcp).paper("over 250 us", FDDI));
    rows.push(row("ringlet, 32 B one way".into(), time, ringlet).times(times(tcp, ringlet)));
    let [tcp, ringlet] =
        found.pair("small", "32 B writes").map(|rate| rate.map(|rate| inverse(rate, 1e9)));
    rows.push(row("kernel TCP, each of 32 B".into(), time, tcp).paper("250 us", FDDI));
    rows.push(row("ringlet, each of 32 B".into(), time, ringlet).times(times(tcp, ringlet)));
    let [tcp, ringlet] = found.pair("stream", "64 KiB writes");
    let rate = Unit::BytesPerSecond;
    rows.push(row("kernel TCP, in a row".into(), rate, tcp).paper("10 MB/s", FDDI));
    rows.push(row("ringlet, in a row".into(), rate, ringlet).times(times(ringlet, tcp)));
    rows
}

const MEMORY: &str = "\"Standard-network performance\": shared memory of one node";
const FDDI: &str = "\"Standard-network performance\": TCP over FDDI";
const MESSAGES: &str = "\"Process-to-process message passing\"";
const WRITE_AND_RUN: &str = "\"Write-and-run message overhead\"";
const APPLICATION: &str = "\"Application performance\": 2 processors in each of 1 or 2 nodes";

fn figure_5(found: &Found) -> Vec<Row> {
    let row = |what: &str, here| row(FIGURE_5, what, Unit::Nanoseconds, here);
    let mut rows = Vec::new();
    for (name, what) in
        [("PVM", "direct route"), ("PVM, through the daemon", "route through the daemon")]
    {
        let [kernel, ringlet] = [KERNEL, RINGLET].map(|by| found.half(name, by));
        let direct = name == "PVM";
        let theirs = row(&format!("PVM over the kernel, {what}"), kernel);
        let ours = row(&format!("PVM over ringlet, {what}"), ringlet).times(times(kernel, ringlet));
        rows.push(if direct { theirs.paper("about 500 us", MESSAGES) } else { theirs });
        rows.push(if direct {
            ours.paper("20 us (15 without recovery)", MESSAGES).paper_times(25.0)
        } else {
            ours
        });
    }
    rows.push(row("HPF", None).paper("20 us (15 without recovery)", MESSAGES).paper_times(25.0));
    let [tcp, ringlet] = found.pair("latency", "32 B");
    let reflected = found.row("reflect", "store to load, half", "reflect");
    let line = found.row("reflect", "cache line, half", "reflect");
    rows.push(row("direct: sockets over kernel TCP", tcp).paper("375 us", WRITE_AND_RUN));
    rows.push(row("direct: sockets over ringlet", ringlet).times(times(tcp, ringlet)));
    rows.push(
        row("direct: reflective memory", reflected)
            .times(times(tcp, reflected))
            .paper("4.5 us", WRITE_AND_RUN)
            .paper_times(83.0),
    );
    rows.push(
        row("direct: the bare cache line", line)
            .times(times(tcp, line))
            .paper("0.9 us (SMP, a fifth)", MESSAGES)
            .paper_times(5.0 * 83.0),
    );
    rows
}

fn overheads(found: &Found) -> Vec<Row> {
    let row = |what: &str, here| row(OVERHEADS, what, Unit::Nanoseconds, here);
    let [tcp, ringlet] =
        found.pair("small", "32 B writes").map(|rate| rate.map(|rate| inverse(rate, 1e9)));
    let reflect = |what: &str| found.row("reflect", what, "reflect");
    let run = reflect("32 B stored, and run");
    vec![
        row("kernel TCP, a write", tcp).paper("375 us", WRITE_AND_RUN),
        row("ringlet, a write", ringlet).times(times(tcp, ringlet)),
        row("plain memory, stores", reflect("32 B, plain memory")),
        row("reflective memory, written and run", run)
            .times(times(tcp, run))
            .paper("150 ns", WRITE_AND_RUN)
            .paper_times(2500.0),
    ]
}

fn figure_6(found: &Found) -> Vec<Row> {
    let row = |what: &str, here| row(FIGURE_6, what, Unit::Nanoseconds, here);
    // In nanoseconds, as all times here are.
    let of = |name: &str, figure: &str, by: &str| {
        let Spread { median, least, most } = found.program(name, figure, by)?;
        Some(Spread { median: median * 1e9, least: least * 1e9, most: most * 1e9 })
    };
    let (alone, two) = ("PVM, molecules, one task", "PVM, molecules, two tasks");
    let mut rows = Vec::new();
    for (figure, what, fddi, channel, node) in [
        ("run", "run time", 0.5, 122.0 / 65.0, ["122 s", "about 244 s", "65 s"]),
        ("processors", "processor time", 0.25, 1.0, ["244 s", "about 976 s", "almost 244 s"]),
    ] {
        let base = of(alone, figure, KERNEL);
        let [kernel, ringlet] = [KERNEL, RINGLET].map(|by| of(two, figure, by));
        rows.push(row(&format!("{what}, one task"), base).paper(node[0], APPLICATION));
        rows.push(
            row(&format!("{what}, two over the kernel"), kernel)
                .times(times(base, kernel))
                .paper(node[1], APPLICATION)
                .paper_times(fddi),
        );
        rows.push(
            row(&format!("{what}, two over ringlet"), ringlet)
                .times(times(base, ringlet))
                .paper(node[2], APPLICATION)
                .paper_times(channel),
        );
    }
    rows
}

fn print(report: &Report, rounds: u32) {
    println!("{}\n", report.machine.headline());
    let header = ["", "here", "range", "times", "paper", "times", "where the paper says so"];
    let mut rows: Vec<[String; 7]> = Vec::new();
    let mut figure = "";
    for row in &report.figures {
        if row.figure != figure {
            figure = row.figure;
            rows.push([figure, "", "", "", "", "", ""].map(String::from));
        }
        let ratio =
            |times: Option<f64>| times.map_or(String::new(), |n| format!("{}x", three_digits(n)));
        let here = row.here.map_or("not measured".into(), |here| row.unit.show(here.median));
        let range = row.here.map_or(String::new(), |here| {
            format!("{} to {}", row.unit.show(here.least), row.unit.show(here.most))
        });
        rows.push([
            format!("  {}", row.what),
            here,
            range,
            ratio(row.times),
            row.paper.into(),
            ratio(row.paper_times),
            row.place.into(),
        ]);
    }
    table::print(header.map(String::from), rows);
    println!(
        "\nMedians of {rounds} by turns. Times: how many times better than kernel TCP (PVM: than PVM over the kernel), in the paper than FDDI; in \
         Figure 6 than one task, or node, alone. \
         In ETHOM's: than veth, or as it says; in the paper than Gigabit Ethernet, or ETHOS.\n\
         Here all is on one machine, where PVM's tasks talk by Unix sockets, and a task is one \
         processor; in the paper PVM was a library of its own for Memory Channel."
    );
    for note in &report.notes {
        println!("note: {note}");
    }
}

fn draw(folder: &Path, found: &Found, figures: &[Row], machine: &Machine) -> Result<()> {
    let subtitle = machine.headline().replace('\n', ", ");
    let path = |number: &str| folder.join(format!("memory-channel-{number}.svg"));
    let loads = |what: &'static str, label: &str, colour| {
        let point = |size: &usize| {
            let load = found.row("hierarchy", &name(*size, what), "machine")?;
            Some((*size as f64, load.median))
        };
        Curve { name: label.into(), colour, points: SIZES.iter().filter_map(point).collect() }
    };
    // A message is of no size of memory: a level across.
    let across = |label: &str, colour: RGBColor, value: Option<Spread>| {
        let value = value?.median;
        let points = SIZES.iter().map(|size| (*size as f64, value)).collect();
        Some(Curve { name: label.into(), colour, points })
    };
    let [tcp, ringlet] = found.pair("latency", "32 B");
    let [tcp_stream, ringlet_stream] = found.pair("stream", "64 KiB writes");
    let panel = |title: &str, unit, curves: Vec<Option<Curve>>| Panel {
        title: title.into(),
        x: MEMORY_SIZE,
        unit,
        curves: curves.into_iter().flatten().filter(|curve| !curve.points.is_empty()).collect(),
        limit: None,
    };
    let picture = Picture {
        title: FIGURE_1.into(),
        subtitle: subtitle.clone(),
        panels: vec![
            panel(
                "Time of a load, and of 32 B one way",
                Unit::Nanoseconds,
                vec![
                    Some(loads(LATENCY, "loads, each waits for the last", GREEN)),
                    Some(loads(OVERHEAD, "loads, each by itself", ORANGE)),
                    across("ringlet", BLUE, ringlet),
                    across("kernel TCP", GREY, tcp),
                ],
            ),
            panel(
                "Bandwidth",
                Unit::BytesPerSecond,
                vec![
                    Some(loads(BANDWIDTH, "loads in a row", GREEN)),
                    across("ringlet", BLUE, ringlet_stream),
                    across("kernel TCP", GREY, tcp_stream),
                ],
            ),
        ],
    };
    ensure!(
        picture.panels.iter().all(|panel| !panel.curves.is_empty()),
        "there is nothing to draw"
    );
    plot::draw(&path("figure-1"), &picture)?;
    for (file, chosen, than) in [
        (
            "figure-5",
            vec![FIGURE_5, OVERHEADS],
            "times better than over the kernel; in the paper, than FDDI",
        ),
        (
            "figure-6",
            vec![FIGURE_6],
            "times better than one task alone; in the paper, than one node",
        ),
    ] {
        let mut bars = Vec::new();
        for row in figures.iter().filter(|row| chosen.contains(&row.figure)) {
            let bar = |name: String, value: f64| Bar { name, value, low: value, high: value };
            bars.extend(row.times.map(|times| bar(row.what.clone(), times)));
            bars.extend(row.paper_times.map(|times| bar(format!("paper: {}", row.what), times)));
        }
        plot::draw_bars(&path(file), chosen[0], &format!("{than}; {subtitle}"), &bars)?;
    }
    Ok(())
}
