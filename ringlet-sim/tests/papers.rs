//! What the papers say of the shape of their figures must come out whatever the exact costs.

use ringlet_sim::papers::{Figure, figures};

fn figure<'a>(figures: &'a [Figure], start: &str) -> &'a Figure {
    figures.iter().find(|figure| figure.name.starts_with(start)).unwrap()
}

fn curve<'a>(figure: &'a Figure, name: &str) -> &'a [(usize, f64)] {
    &figure.curves.iter().find(|curve| curve.name == name).unwrap().points
}

fn simulated(figures: &[Figure], what: &str) -> f64 {
    let mut rows = figures.iter().flat_map(|figure| &figure.rows);
    rows.find(|row| row.what == what).unwrap().simulated
}

#[test]
fn the_figures_have_the_papers_shape() {
    let all = figures();
    // SCILAN §4.2: the two copies share the receiver's bus, X = Xt * Xr / (Xt + Xr), and it comes near.
    let rate = simulated(&all, "SCILAN, large");
    assert!((0.9 * 21.8..=21.8).contains(&rate), "{rate}");
    // §4.5: without the receiver's copy the MTU matters, with it it does not.
    let with_copy = simulated(&all, "with copy: MTU 16K over MTU 1500");
    let without = simulated(&all, "nocopy: MTU 16K over MTU 1500");
    assert!(with_copy < 1.1 && without > 1.2, "{with_copy} {without}");
    // §4.6: ahead of every other at all sizes; table 3: polling, interrupts, stacks.
    let throughput = figure(&all, "Figure 9");
    let scilan = curve(throughput, "SCILAN");
    for other in throughput.curves.iter().filter(|curve| curve.name != "SCILAN") {
        assert!(scilan.iter().zip(&other.points).all(|(ours, theirs)| ours.1 > theirs.1));
    }
    let [polling, interrupt, ethernet] =
        ["SCILAN polling", "SCILAN interrupt", "100baseT"].map(|what| simulated(&all, what));
    assert!(polling < interrupt / 5.0 && interrupt < ethernet, "{polling} {interrupt} {ethernet}");
    // SMiLE §4: looking at all endpoints takes a time that grows with them, remote enqueue does not.
    let polling = figure(&all, "Figure 6");
    let growth = |name| {
        let points = curve(polling, name);
        points[points.len() - 1].1 - points[0].1
    };
    assert!(growth("looking at each") > 10.0 && growth("remote enqueue").abs() < 1.0);
    // Memory Channel: below 5 us, to one and to all, and in order whatever goes wrong.
    assert!(simulated(&all, "direct, 32 bytes") < 5.0);
    assert!(simulated(&all, "a write to all of 8 nodes, its writer too, at most") < 5.0);
    assert_eq!(simulated(&all, "20 runs with faults: a node saw another order, at most"), 0.0);
}
