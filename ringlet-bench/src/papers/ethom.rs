//! ETHOM's Figures 5, 6, 9 and 10: messages by TCP and by TIPC over an Ethernet of message queues (here `ringlet eth`), over Ethernet frames in
//! sockets (ETHOS; here such a driver for a TAP device), and over the kernel's own (Gigabit Ethernet; here veth).

use std::path::Path;

use anyhow::{Result, ensure};

use super::figure::{Found, Row, row, times};
use crate::bench::ethom::{ETHOS, OURS, TCP, TCP_SIZES, TIPC, TIPC_SIZES, half, has_tipc, rate};
use crate::bench::machine::Machine;
use crate::bench::spec::{Over, Unit, size_name};
use crate::bench::{self};
use crate::compare::Spread;
use crate::plot::{self, BLUE, Curve, GREEN, GREY, INK, MESSAGE_SIZE, ORANGE, Panel, Picture, RED};

const VETH: &str = "veth";
const FIGURE_5: &str = "ETHOM, Figure 5: half a round trip, TCP";
const FIGURE_6: &str = "ETHOM, Figure 6: bytes a second, TCP";
const FIGURE_9: &str = "ETHOM, Figure 9: half a round trip, TIPC";
const FIGURE_10: &str = "ETHOM, Figure 10: bytes a second, TIPC";

const LATENCY: &str = "3.1 \"Latency\"";
const BANDWIDTH: &str = "3.2 \"Bandwidth\"";
const BY_TIPC: &str = "3.4 \"TIPC Benchmarks\"";

/// A value that the paper's text states, at this size of message: in nanoseconds, or in bytes a second.
struct Stated {
    who: &'static str,
    colour: plotters::style::RGBColor,
    size: usize,
    value: f64,
}

const fn stated(
    who: &'static str,
    colour: plotters::style::RGBColor,
    size: usize,
    value: f64,
) -> Stated {
    Stated { who, colour, size, value }
}

const MIB: usize = 1 << 20;
/// (1.5, 3 and 5 Gbit/s.)
const STATED_6: [Stated; 3] = [
    stated("paper: ETHOM on SCI, at most", GREEN, MIB, 1.5e9 / 8.0),
    stated("paper: ETHOM on DX, at most", RED, MIB, 3e9 / 8.0),
    stated("paper: ETHOS on InfiniBand, at most", INK, MIB, 5e9 / 8.0),
];
const STATED_9: [Stated; 3] = [
    stated("paper: ETHOM on SCI", GREEN, 1, 19e3),
    stated("paper: ETHOM on DX", RED, 1, 14e3),
    stated("paper: ETHOS on InfiniBand", INK, 1, 20e3),
];
/// ("Clearly below 500 Mb/s".)
const STATED_10: [Stated; 1] =
    [stated("paper: Gigabit Ethernet, less than", INK, 64 << 10, 500e6 / 8.0)];

/// What was measured; and what could not be, and why.
pub fn measure(rounds: u32, quick: bool) -> Result<(Vec<bench::Row>, Vec<String>)> {
    let mut notes = Vec::new();
    if !rustix::process::geteuid().is_root() {
        notes.push("ETHOM's figures need network namespaces, which only root makes".into());
        return Ok((Vec::new(), notes));
    }
    let mut overs = vec![Over::Tcp];
    if has_tipc() {
        overs.push(Over::Tipc);
    } else {
        notes.push("this kernel has no TIPC: ETHOM's Figures 9 and 10 are not measured".into());
    }
    Ok((bench::of_ethom(rounds, quick, &overs)?, notes))
}

pub fn figures(found: &Found) -> Vec<Row> {
    [
        table(found, (FIGURE_5, TCP, &[1, 8 << 10, 256 << 10]), half, Unit::Nanoseconds),
        table(found, (FIGURE_6, TCP, &[64, 1 << 10, 8 << 10, MIB]), rate, Unit::BytesPerSecond),
        table(found, (FIGURE_9, TIPC, &[1, 4 << 10, 64 << 10]), half, Unit::Nanoseconds),
        table(found, (FIGURE_10, TIPC, &[64, 4 << 10, 64 << 10]), rate, Unit::BytesPerSecond),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// Of some sizes: the kernel's, ours as often as good as that, and as often as good as ETHOS.
fn table(
    found: &Found,
    (figure, case, sizes): (&'static str, &str, &[usize]),
    name: fn(usize) -> String,
    unit: Unit,
) -> Vec<Row> {
    let mut rows = Vec::new();
    for size in sizes {
        let of = |transport: &str| found.row(case, &name(*size), transport);
        let better = |theirs: Option<Spread>, ours: Option<Spread>| match unit {
            Unit::Nanoseconds => times(theirs, ours),
            _ => times(ours, theirs),
        };
        let (veth, ours, ethos) = (of(VETH), of(OURS), of(ETHOS));
        let row =
            |what: &str, here| row(figure, format!("{}, {what}", size_name(*size)), unit, here);
        let mut three = [
            row(VETH, veth),
            row(OURS, ours).times(better(veth, ours)),
            row("ringlet eth, beside ETHOS", ours).times(better(ethos, ours)),
        ];
        say(figure, *size, &mut three);
        rows.extend(three);
    }
    rows
}

/// What the paper says of Gigabit Ethernet, of ETHOM beside that, and of ETHOM beside ETHOS.
fn say(figure: &str, size: usize, [ethernet, ethom, beside_ethos]: &mut [Row; 3]) {
    let is = |row: &mut Row, paper, times, place| {
        (row.paper, row.paper_times, row.place) = (paper, times, place);
    };
    match (figure, size) {
        (FIGURE_5, 1) => {
            is(ethom, "a factor of two and above", Some(2.0), LATENCY);
            is(beside_ethos, "about 10 us, or 30%, less", Some(1.0 / 0.7), LATENCY);
        }
        (FIGURE_5, 0x40000) => is(beside_ethos, "about 15 us less", None, LATENCY),
        (FIGURE_6, 1024) => is(ethom, "twofold, up to 1 KB", Some(2.0), BANDWIDTH),
        (FIGURE_6, 8192) => is(beside_ethos, "50% more, up to 8 KB", Some(1.5), BANDWIDTH),
        (FIGURE_6, MIB) => is(ethom, "1.5 Gb/s by SCI, 3 Gb/s by DX", None, BANDWIDTH),
        (FIGURE_9, 1) => {
            is(ethom, "19 us by SCI, 14 us by DX; a factor of 2 to 3", Some(2.5), BY_TIPC);
            is(beside_ethos, "10 to 20 us less, below 8 KB", None, BY_TIPC);
        }
        (FIGURE_9, 4096) => is(ethom, "up to a factor of 4", Some(4.0), BY_TIPC),
        (FIGURE_10, 64) => is(ethernet, "best for small messages", None, BY_TIPC),
        (FIGURE_10, 0x10000) => {
            is(ethernet, "clearly below 500 Mb/s", None, BY_TIPC);
            is(ethom, "DX: a severe decrease from 8 KB on", None, BY_TIPC);
        }
        _ => {}
    }
}

/// All four in one picture.
pub fn draw(path: &Path, found: &Found, machine: &Machine) -> Result<()> {
    let panels: Vec<Panel> = [
        (FIGURE_5, TCP, &TCP_SIZES[..], half as fn(usize) -> String, &[][..]),
        (FIGURE_6, TCP, &TCP_SIZES, rate, &STATED_6),
        (FIGURE_9, TIPC, &TIPC_SIZES, half, &STATED_9),
        (FIGURE_10, TIPC, &TIPC_SIZES, rate, &STATED_10),
    ]
    .into_iter()
    .map(|(title, case, sizes, name, paper)| {
        let ours = [(VETH, GREY), (OURS, BLUE), (ETHOS, ORANGE)].map(|(transport, colour)| {
            let point = |size: &usize| {
                Some((*size as f64, found.row(case, &name(*size), transport)?.median))
            };
            Curve {
                name: transport.into(),
                colour,
                points: sizes.iter().filter_map(point).collect(),
            }
        });
        let theirs = paper.iter().map(|of| Curve {
            name: of.who.into(),
            colour: of.colour,
            points: vec![(of.size as f64, of.value)],
        });
        let is_latency = [FIGURE_5, FIGURE_9].contains(&title);
        Panel {
            title: title.into(),
            x: MESSAGE_SIZE,
            unit: if is_latency { Unit::Nanoseconds } else { Unit::BytesPerSecond },
            curves: ours
                .into_iter()
                .filter(|curve| !curve.points.is_empty())
                .chain(theirs)
                .collect(),
            limit: None,
        }
    })
    .filter(|panel| panel.curves.iter().any(|curve| curve.points.len() > 1))
    .collect();
    ensure!(!panels.is_empty(), "there is nothing to draw of ETHOM's");
    let subtitle = format!(
        "{}; dots: what the paper's text says, of SCI and DX in 2009",
        machine.headline().replace('\n', ", ")
    );
    plot::draw(
        path,
        &Picture { title: "ETHOM's figures, and ringlet eth".into(), subtitle, panels },
    )
}
