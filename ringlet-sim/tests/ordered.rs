//! The one order of many clusters by seed: all nodes see one, whatever fails; and what is planted is found out.

use ringlet_sim::*;

/// `SEEDS=0..5000` for more than the few that the ordinary test takes.
fn seeds() -> std::ops::Range<u64> {
    let Ok(text) = std::env::var("SEEDS") else { return 0..150 };
    let (first, last) = text.split_once("..").expect("SEEDS=FIRST..LAST");
    first.parse().unwrap()..last.parse().unwrap()
}

#[test]
fn every_seed_has_one_order() {
    let mut total = OrderedStats::default();
    for seed in seeds() {
        let outcome = Ordered::drawn(seed).run(seed, None);
        assert_eq!(outcome.wrong, None, "seed {seed}: {:?}", Ordered::drawn(seed));
        total.add(&outcome.stats);
    }
    println!("{total:?}");
    // Else the trouble was none.
    let OrderedStats {
        empty_views,
        unseen,
        lost,
        doubled,
        late,
        deaths,
        stopped,
        excluded,
        left,
        ..
    } = total;
    let counts = [empty_views, unseen, lost, doubled, late, deaths, stopped, excluded, left];
    assert!(counts.iter().all(|count| *count > 0), "{total:?}");
}

#[test]
fn a_seed_repeats_itself() {
    let run = |seed| Ordered::drawn(seed).run(seed, None);
    for seed in 0..10 {
        let (one, again) = (run(seed), run(seed));
        assert_eq!((one.trace, one.stats), (again.trace, again.stats), "seed {seed}");
        assert_ne!(one.trace, run(seed + 1).trace, "seed {seed}");
    }
}

/// Where something is left out of the protocol, or done that is not in it: what is found on some seeds.
#[test]
fn what_is_planted_is_found_out() {
    let found = |planted| {
        (0..60u64).filter_map(move |seed| {
            let mut ordered = Ordered::drawn(seed);
            let trouble = &mut ordered.trouble;
            (trouble.deaths, trouble.partitions) =
                (trouble.deaths.max(3), trouble.partitions.max(2));
            (trouble.late, trouble.late_us) = (trouble.late.max(0.2), trouble.late_us.max(5000.0));
            trouble.planted = planted;
            ordered.nodes = ordered.nodes.min(6);
            ordered.founders = ordered.founders.min(ordered.nodes);
            ordered.run(seed, None).wrong
        })
    };
    assert_eq!(found(None).next(), None);
    let told = [
        (Planted::Swaps, "and others"),
        (Planted::Skips, "behind"),
        (Planted::Doubles, "behind"),
        (Planted::ForgetsPromises, "in another view"),
        (Planted::AnyHalf, "in another view"),
        (Planted::SameRun, "comes from view"),
        (Planted::NoFence, "has submitted"),
        (Planted::Boasts, "says that all have"),
        (Planted::Loses, "has submitted"),
        (Planted::Apart, "in no view"),
    ];
    for (planted, text) in told {
        assert!(found(Some(planted)).any(|wrong| wrong.contains(text)), "{planted:?}");
    }
}
