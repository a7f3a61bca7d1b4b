//! Pictures: curves over message size, side by side.

use std::fs::{self, File};
use std::io::BufWriter;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail};
use plotters::coord::Shift;
use plotters::prelude::*;
pub use plotters::style::RGBColor;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use crate::bench::spec::{Unit, size_name};

/// In pixels, twice what a page shows, so that small print is sharp. (The height is of two panels, side by side.)
const WIDTH: u32 = 3200;
const HEIGHT: u32 = 1600;
const BAR_HEIGHT: u32 = 84;
/// Okabe and Ito's colours, which colour-blind people can tell apart.
pub const GREY: RGBColor = RGBColor(0x56, 0x5b, 0x66);
pub const ORANGE: RGBColor = RGBColor(0xe6, 0x9f, 0x00);
pub const BLUE: RGBColor = RGBColor(0x00, 0x72, 0xb2);
pub const GREEN: RGBColor = RGBColor(0x00, 0x9e, 0x73);
pub const RED: RGBColor = RGBColor(0xd5, 0x5e, 0x00);
pub const INK: RGBColor = RGBColor(0x22, 0x26, 0x2e);
const FAINT: RGBColor = RGBColor(0x8a, 0x90, 0x9c);
const GRID: RGBColor = RGBColor(0xe4, 0xe7, 0xec);

pub const MESSAGE_SIZE: &str = "message size";
pub const MEMORY_SIZE: &str = "size of the memory";

pub struct Picture {
    pub title: String,
    pub subtitle: String,
    pub panels: Vec<Panel>,
}

pub struct Panel {
    pub title: String,
    /// What the curves are drawn over: sizes in bytes, or a count.
    pub x: &'static str,
    pub unit: Unit,
    pub curves: Vec<Curve>,
    /// A line across, with its name.
    pub limit: Option<(&'static str, f64)>,
}

/// Size (or count) and value in the panel's unit, by growing size.
pub struct Curve {
    pub name: String,
    pub colour: RGBColor,
    pub points: Vec<(f64, f64)>,
}

/// The name of a picture, as an argument.
pub fn file(text: &str) -> Result<PathBuf, String> {
    let path = PathBuf::from(text);
    match path.extension().and_then(|extension| extension.to_str()) {
        Some("svg" | "png") => Ok(path),
        _ => Err("a picture ends in .svg or .png".into()),
    }
}

/// A ratio to what is 1, and where it lies.
pub struct Bar {
    pub name: String,
    pub value: f64,
    pub low: f64,
    pub high: f64,
}

pub fn draw(path: &Path, picture: &Picture) -> Result<()> {
    paint(path, HEIGHT * picture.panels.len().div_ceil(2) as u32, Drawing::Curves(picture))
}

/// Ratios from one line down: above 1 to the right.
pub fn draw_bars(path: &Path, title: &str, subtitle: &str, bars: &[Bar]) -> Result<()> {
    anyhow::ensure!(!bars.is_empty(), "there is no ratio to draw");
    let height = 340 + BAR_HEIGHT * bars.len() as u32;
    paint(path, height, Drawing::Bars { title, subtitle, bars })
}

enum Drawing<'a> {
    Curves(&'a Picture),
    Bars { title: &'a str, subtitle: &'a str, bars: &'a [Bar] },
}

impl Drawing<'_> {
    fn on<T: DrawingBackend>(&self, area: DrawingArea<T, Shift>) -> Drawn<T> {
        match *self {
            Drawing::Curves(picture) => draw_on(area, picture),
            Drawing::Bars { title, subtitle, bars } => draw_bars_on(area, title, subtitle, bars),
        }
    }
}

fn paint(path: &Path, height: u32, drawing: Drawing) -> Result<()> {
    // The pictures look the same on machines without any font.
    let font = epaint_default_fonts::UBUNTU_LIGHT;
    plotters::style::register_font("sans-serif", FontStyle::Normal, font)
        .map_err(|_| anyhow!("the built-in font is broken"))?;
    match path.extension().and_then(|extension| extension.to_str()) {
        Some("svg") => {
            let mut text = String::new();
            let area = SVGBackend::with_string(&mut text, (WIDTH, height)).into_drawing_area();
            drawing.on(area).map_err(|error| anyhow!("{error}"))?;
            let shown = format!(r#"width="{}" height="{}""#, WIDTH / 2, height / 2);
            let drawn = format!(r#"width="{WIDTH}" height="{height}""#);
            fs::write(path, text.replacen(&drawn, &shown, 1))
        }
        Some("png") => {
            let mut pixels = vec![0; (WIDTH * height * 3) as usize];
            let area = BitMapBackend::with_buffer(&mut pixels, (WIDTH, height)).into_drawing_area();
            drawing.on(area).map_err(|error| anyhow!("{error}"))?;
            write_png(path, height, &pixels)
        }
        _ => bail!("pictures are .svg or .png"),
    }
    .with_context(|| format!("cannot write {}", path.display()))
}

fn write_png(path: &Path, height: u32, pixels: &[u8]) -> std::io::Result<()> {
    let mut encoder = png::Encoder::new(BufWriter::new(File::create(path)?), WIDTH, height);
    encoder.set_color(png::ColorType::Rgb);
    encoder.set_depth(png::BitDepth::Eight);
    let mut writer = encoder.write_header()?;
    writer.write_image_data(pixels)?;
    Ok(writer.finish()?)
}

type Drawn<T> = std::result::Result<(), DrawingAreaErrorKind<<T as DrawingBackend>::ErrorType>>;

fn draw_on<T: DrawingBackend>(area: DrawingArea<T, Shift>, picture: &Picture) -> Drawn<T> {
    area.fill(&WHITE)?;
    area.draw(&Text::new(picture.title.as_str(), (80, 44), text(68, INK)))?;
    area.draw(&Text::new(picture.subtitle.as_str(), (80, 128), text(38, FAINT)))?;
    let (_, body) = area.split_vertically(196);
    let count = picture.panels.len();
    for (part, panel) in
        body.split_evenly((count.div_ceil(2), count.min(2))).iter().zip(&picture.panels)
    {
        draw_panel(part, panel)?;
    }
    area.present()
}

fn draw_bars_on<T: DrawingBackend>(
    area: DrawingArea<T, Shift>,
    title: &str,
    subtitle: &str,
    bars: &[Bar],
) -> Drawn<T> {
    area.fill(&WHITE)?;
    area.draw(&Text::new(title, (80, 44), text(68, INK)))?;
    area.draw(&Text::new(subtitle, (80, 128), text(38, FAINT)))?;
    let (_, body) = area.split_vertically(196);
    let (low, high) = bounds(bars.iter().flat_map(|bar| [bar.low, bar.high, 1.0]));
    let (low, high) = (low / 1.3, high * 1.6);
    let rows = bars.len() as f64;
    let mut chart = ChartBuilder::on(&body)
        .margin_right(72)
        .margin_bottom(32)
        .x_label_area_size(72)
        .y_label_area_size(900)
        .build_cartesian_2d((low..high).log_scale(), 0.0..rows)?;
    chart
        .configure_mesh()
        .disable_y_mesh()
        .disable_y_axis()
        .y_labels(0)
        .bold_line_style(GRID.stroke_width(2))
        .light_line_style(TRANSPARENT)
        .axis_style(FAINT.stroke_width(2))
        .x_label_formatter(&|&value| format!("{value}"))
        .label_style(text(36, INK))
        .draw()?;
    for (row, bar) in bars.iter().enumerate() {
        let middle = rows - row as f64 - 0.5;
        let colour = if bar.value < 1.0 { RED } else { BLUE };
        let ends = [(1.0, middle - 0.3), (bar.value, middle + 0.3)];
        let range = [(bar.low, middle), (bar.high, middle)];
        chart.draw_series([Rectangle::new(ends, colour.filled())])?;
        chart.draw_series(LineSeries::new(range, INK.stroke_width(5)))?;
        let value = crate::bench::spec::three_digits(bar.value);
        let beside = Pos::new(HPos::Left, VPos::Center);
        let at = (bar.high.max(1.0) * 1.05, middle);
        chart.draw_series([Text::new(value, at, text(40, INK).pos(beside))])?;
        let (_, y) = chart.backend_coord(&(1.0, middle));
        let name = text(40, INK).pos(Pos::new(HPos::Right, VPos::Center));
        area.draw(&Text::new(bar.name.as_str(), (860, y), name))?;
    }
    let one = [(1.0, 0.0), (1.0, rows)];
    chart.draw_series(LineSeries::new(one, INK.stroke_width(3)))?;
    area.present()
}

fn text(size: i32, colour: RGBColor) -> TextStyle<'static> {
    ("sans-serif", size).into_font().color(&colour)
}

fn draw_panel<T: DrawingBackend>(area: &DrawingArea<T, Shift>, panel: &Panel) -> Drawn<T> {
    let points = || panel.curves.iter().flat_map(|curve| &curve.points);
    let (low_x, high_x) = bounds(points().map(|point| point.0));
    let values = points().map(|point| point.1).chain(panel.limit.map(|limit| limit.1));
    let (low_y, high_y) = bounds(values);
    // Whole decades, so that both ends of the axis carry a number.
    let decade = |exponent: f64| 10f64.powf(exponent);
    let (low_y, high_y) = (low_y.log10().floor(), high_y.log10().ceil());
    let decades: Vec<f64> = (low_y as i32..=high_y as i32).map(|e| decade(e.into())).collect();
    let sizes = (0..=30).step_by(3).map(|bit| (1u64 << bit) as f64);
    let sizes: Vec<f64> = sizes.filter(|size| (low_x..=high_x).contains(size)).collect();

    // Times grow with the size, rates as well, but from the other corner.
    let time = panel.unit == Unit::Nanoseconds;
    let legend =
        if time { SeriesLabelPosition::UpperLeft } else { SeriesLabelPosition::LowerRight };

    let mut chart = ChartBuilder::on(area)
        .margin_left(48)
        .margin_right(72)
        .margin_bottom(32)
        .caption(&panel.title, text(50, INK))
        .x_label_area_size(116)
        .y_label_area_size(184)
        .build_cartesian_2d(
            (low_x * 0.8..high_x * 1.25).log_scale().with_key_points(sizes),
            (decade(low_y)..decade(high_y)).log_scale().with_key_points(decades),
        )?;
    chart
        .configure_mesh()
        .bold_line_style(GRID.stroke_width(2))
        .light_line_style(TRANSPARENT)
        .axis_style(FAINT.stroke_width(2))
        .x_label_formatter(&|&size| match panel.x {
            MESSAGE_SIZE | MEMORY_SIZE => size_name(size.round() as usize),
            _ => size.round().to_string(),
        })
        .y_label_formatter(&|&value| short(panel.unit, value))
        .label_style(text(36, INK))
        .x_desc(panel.x)
        .axis_desc_style(text(36, FAINT))
        .draw()?;

    if let Some((name, value)) = panel.limit {
        let ends = [(low_x * 0.8, value), (high_x * 1.25, value)];
        chart.draw_series(DashedLineSeries::new(ends, 16, 12, FAINT.stroke_width(3)))?;
        let (x, side) = if time { (high_x * 1.2, HPos::Right) } else { (low_x, HPos::Left) };
        let place = Pos::new(side, VPos::Bottom);
        let label = format!("{name}, {}", panel.unit.show(value));
        let above = value * decade((high_y - low_y) * 0.008);
        let style = text(36, FAINT).pos(place);
        chart.draw_series([Text::new(label, (x, above), style)])?;
    }
    for curve in &panel.curves {
        let colour = curve.colour;
        chart
            .draw_series(LineSeries::new(curve.points.iter().copied(), colour.stroke_width(6)))?
            .label(curve.name.as_str())
            .legend(move |(x, y)| Rectangle::new([(x, y - 4), (x + 52, y + 4)], colour.filled()));
        let dots = curve.points.iter().map(|&point| Circle::new(point, 8, colour.filled()));
        chart.draw_series(dots)?;
    }
    chart
        .configure_series_labels()
        .position(legend)
        .label_font(text(40, INK))
        .legend_area_size(72)
        .margin(36)
        .background_style(WHITE.mix(0.85))
        .draw()?;
    Ok(())
}

/// `10 us`, `1 GB/s`: for decades, without digits that say nothing.
fn short(unit: Unit, value: f64) -> String {
    let shown = unit.show(value);
    match shown.split_once(' ') {
        Some((number, suffix)) if number.contains('.') => {
            format!("{} {suffix}", number.trim_end_matches('0').trim_end_matches('.'))
        }
        _ => shown,
    }
}

fn bounds(values: impl Iterator<Item = f64>) -> (f64, f64) {
    values.fold((f64::MAX, f64::MIN), |(low, high), value| (low.min(value), high.max(value)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decades_are_short() {
        assert_eq!(short(Unit::Nanoseconds, 100.0), "100 ns");
        assert_eq!(short(Unit::Nanoseconds, 10_000.0), "10 us");
        assert_eq!(short(Unit::BytesPerSecond, 1e9), "1 GB/s");
    }
}
