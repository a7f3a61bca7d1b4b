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

#[test]
fn a_seed_repeats_itself() {
    let run = |seed| Carried::drawn(seed).run(seed, None);
    for seed in 0..20 {
        let (one, again) = (run(seed), run(seed));
        assert_eq!((one.trace, one.stats), (again.trace, again.stats), "seed {seed}");
        assert_ne!(one.trace, run(seed + 1).trace, "seed {seed}");
    }
}

/// What is found when rails don't keep what they promise, on some seeds.
#[test]
fn broken_promises_are_found_out() {
    let found = |broken| {
        let wrong = |seed| {
            let mut carried = Carried { bytes: 1 << 17, rails: 2, ..Carried::drawn(seed) };
            let Disorder { late, fails, .. } = &mut carried.disorder;
            (*late, *fails) = (late.max(0.1), fails.max(0.005));
            carried.disorder.broken = broken;
            carried.run(seed, None).wrong
        };
        (0..40).filter_map(wrong).collect::<Vec<_>>()
    };
    assert_eq!(found(None), Vec::<String>::new());
    for promise in [Promise::Notice, Promise::Withdrawal] {
        let told = found(Some(promise));
        let is_it =
            |wrong: &String| wrong.contains("than was sent") || wrong.contains("handed back");
        assert!(told.iter().any(is_it), "{promise:?}: {told:?}");
    }
}

#[test]
fn a_large_cluster_loses_nothing() {
    let mut carried = Carried::drawn(1);
    (carried.nodes, carried.rails, carried.connections, carried.bytes) = (512, 2, 1, 4096);
    let Disorder { dead_nodes, lost_sessions, fails, late, late_us, .. } = &mut carried.disorder;
    (*dead_nodes, *lost_sessions, *fails, *late, *late_us) = (10, 10, 0.002, 0.2, 50.0);
    let outcome = carried.run(1, None);
    let CarriedStats { arrived, back, died, kernel, .. } = outcome.stats;
    assert_eq!(outcome.wrong, None);
    assert_eq!(arrived + back + died + kernel, 512, "{:?}", outcome.stats);
    assert!(arrived > 400 && died > 0, "{:?}", outcome.stats);
}
