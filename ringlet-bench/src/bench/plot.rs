//! The picture: latency and throughput over message size, in the manner of NetPIPE.

use std::path::Path;

use anyhow::{Result, bail};
use plotters::style::RGBColor;

use super::machine::Machine;
use super::report::Row;
use super::spec::{Unit, parse_size};
use crate::plot::{BLUE, Curve, GREY, MESSAGE_SIZE, ORANGE, Panel, Picture};

const PALETTE: [(&str, RGBColor); 3] = [("tcp", GREY), ("unix", ORANGE), ("ringlet", BLUE)];

pub fn draw(path: &Path, rows: &[Row], machine: &Machine) -> Result<()> {
    let title = rows.iter().find(|row| row.case == "latency").map_or("", |row| &row.title);
    let picture = Picture {
        title: "One unmodified program over each transport".into(),
        subtitle: format!("{}; {title}", machine.headline().replace('\n', ", ")),
        panels: panels(rows)?,
    };
    crate::plot::draw(path, &picture)
}

fn panels(rows: &[Row]) -> Result<Vec<Panel>> {
    let curves = |figure: fn(f64, f64) -> f64| -> Vec<Curve> {
        let curve = |&(name, colour): &(&'static str, RGBColor)| {
            let points: Vec<(f64, f64)> = rows
                .iter()
                .filter(|row| row.case == "latency" && row.transport == name)
                .filter_map(|row| Some((parse_size(&row.what).ok()? as f64, row.median?)))
                .map(|(size, half_ns)| (size, figure(size, half_ns)))
                .collect();
            (!points.is_empty()).then_some(Curve { name: name.into(), colour, points })
        };
        PALETTE.iter().filter_map(curve).collect()
    };
    let limit = |name: &'static str, start: &str| {
        let row = rows.iter().find(|row| row.case == "limits" && row.what.starts_with(start))?;
        Some((name, row.median?))
    };
    let latency = curves(|_, half_ns| half_ns);
    if latency.is_empty() {
        bail!("there is no latency to draw");
    }
    Ok(vec![
        Panel {
            title: "Latency, half a round trip".into(),
            x: MESSAGE_SIZE,
            unit: Unit::Nanoseconds,
            curves: latency,
            limit: limit("the bare cache line", "cache line"),
        },
        Panel {
            title: "Throughput, ping-pong".into(),
            x: MESSAGE_SIZE,
            unit: Unit::BytesPerSecond,
            curves: curves(|size, half_ns| size / half_ns * 1e9),
            limit: limit("memcpy, 64 KiB blocks", "memcpy, 64 KiB"),
        },
    ])
}
