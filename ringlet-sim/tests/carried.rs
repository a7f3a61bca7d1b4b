//! What carries between hosts, on many clusters by seed: no byte is lost, doubled, damaged or out of order, and both ends agree on what goes back.

use ringlet_sim::*;

/// `SEEDS=0..5000` for more than the few that the ordinary test takes.
fn seeds() -> std::ops::Range<u64> {
    let Ok(text) = std::env::var("SEEDS") else { return 0..100 };
    let (first, last) = text.split_once("..").expect("SEEDS=FIRST..LAST");
    first.parse().unwrap()..last.parse().unwrap()
}

#[test]
fn no_seed_loses_anything() {
    let mut total = CarriedStats::default();
    for seed in seeds() {
        let outcome = Carried::drawn(seed).run(seed, None);
        assert_eq!(outcome.wrong, None, "seed {seed}");
        total.arrived += outcome.stats.arrived;
        total.back += outcome.stats.back;
        total.died += outcome.stats.died;
        total.late += outcome.stats.late;
        total.repeated += outcome.stats.repeated;
        total.failures += outcome.stats.failures;
    }
    println!("{total:?}");
    // Else the disorder was none.
    let CarriedStats { arrived, back, died, late, repeated, failures, .. } = total;
    assert!([arrived, back, died, late, repeated, failures].iter().all(|n| *n > 0), "{total:?}");
}
