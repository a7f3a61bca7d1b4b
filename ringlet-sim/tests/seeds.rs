//! Many seeds, each another cluster, other traffic and other faults; and what must be found when something is left out.

use ringlet_sim::*;

/// `SEEDS=0..5000` for more than the few that the ordinary test takes.
fn seeds() -> std::ops::Range<u64> {
    let Ok(text) = std::env::var("SEEDS") else { return 0..200 };
    let (first, last) = text.split_once("..").expect("SEEDS=FIRST..LAST");
    first.parse().unwrap()..last.parse().unwrap()
}

#[test]
fn no_seed_loses_anything() {
    let mut total = Stats::default();
    for seed in seeds() {
        let outcome = Scenario::drawn(seed).run(seed, None);
        assert_eq!(outcome.violation, None, "seed {seed}");
        total.messages += outcome.stats.messages;
        total.retries += outcome.stats.retries;
        total.returned += outcome.stats.returned;
        total.interrupts += outcome.stats.interrupts;
    }
    // Else the faults were none.
    assert!(total.retries > 0 && total.returned > 0 && total.interrupts > 0, "{total:?}");
}

/// Two nodes on SCI that sleep, with something left out: the violations of some seeds.
fn violations(size: usize, change: impl Fn(&mut Profile, &mut Traffic)) -> Vec<Violation> {
    let one = |seed| {
        let mut profile = Profile::shipped("scilan").unwrap();
        profile.ring =
            RingSizes { slots: 16, hot_slots: 4, data_bytes: 4096, hot_data_bytes: 1024 };
        let mut traffic = Traffic {
            pattern: Pattern::Stream,
            nodes: 2,
            messages: 200,
            sleep: true,
            ..Traffic::default()
        };
        change(&mut profile, &mut traffic);
        Scenario { profile, traffic, size, mixed: true }.run(seed, None).violation
    };
    (0..30).filter_map(one).collect()
}

/// Each way to carry messages, without faults: all of them arrive, and each request's reply.
#[test]
fn everything_arrives() {
    let carriers = [
        Carrier::Bytes,
        Carrier::Moving,
        Carrier::Messages,
        Carrier::Active { mailbox: false },
        Carrier::Active { mailbox: true },
        Carrier::Locked,
    ];
    for (pattern, pairs) in [(Pattern::PingPong, 6), (Pattern::Stream, 3), (Pattern::AllToAll, 30)]
    {
        for (carrier, sleep) in carriers.into_iter().flat_map(|each| [(each, false), (each, true)])
        {
            if carrier == Carrier::Locked && pattern != Pattern::PingPong {
                continue;
            }
            let profile = Profile::shipped("smile").unwrap();
            let (nodes, messages) = (6, 50);
            let traffic =
                Traffic { pattern, carrier, nodes, messages, sleep, ..Traffic::default() };
            // Of a ping-pong the answers are counted as a direction of their own already.
            let replied = matches!(carrier, Carrier::Active { .. }) && pattern != Pattern::PingPong;
            let expected = if replied { 2 * pairs * 50 } else { pairs * 50 };
            // Only a mailbox interrupts those who wait for Active Messages.
            let interrupted = sleep && carrier != Carrier::Active { mailbox: false };
            let scenario = Scenario { profile, traffic, size: 5000, mixed: true };
            let outcome = scenario.run(1, None);
            let about = format!("{:?}", scenario.traffic);
            assert_eq!(outcome.violation, None, "{about}");
            assert_eq!(outcome.stats.messages, expected, "{about}");
            assert_eq!(outcome.stats.interrupts > 0, interrupted, "{about}");
        }
    }
}

#[test]
fn a_dead_link_matters_only_where_there_is_no_other_way() {
    for (topology, reroutes) in [("ring", false), ("hub", false), ("hub:1", true), ("torus", true)]
    {
        let mut profile = Profile::shipped("modern").unwrap();
        profile.topology = topology.parse().unwrap();
        profile.faults = faults("dead_links=1,within_us=1");
        let traffic =
            Traffic { pattern: Pattern::AllToAll, nodes: 9, messages: 20, ..Traffic::default() };
        let outcome = Scenario { profile, traffic, size: 64, mixed: true }.run(0, None);
        assert_eq!(outcome.violation, None, "{topology}");
        assert_eq!(outcome.stats.returned == 0, reroutes, "{topology}: {:?}", outcome.stats);
    }
}

fn faults(text: &str) -> Faults {
    text.parse().unwrap()
}

const ALL: &str = "lost=0.02,corrupt=0.02,unanswered=0.02,late=0.05,late_us=300";

#[test]
fn nothing_is_missed_when_nothing_is_left_out() {
    let found = violations(1024, |profile, _| profile.faults = faults(ALL));
    assert_eq!(found, []);
}

#[test]
fn without_retry_messages_are_lost() {
    let found = violations(32, |profile, traffic| {
        traffic.sleep = false;
        profile.faults = faults("lost=0.02");
        profile.adapter.retry = false;
    });
    assert!(found.iter().any(|found| matches!(found, Violation::Lost { .. })), "{found:?}");
}

#[test]
fn without_crc_messages_are_damaged() {
    let found = violations(1024, |profile, _| {
        profile.faults = faults("corrupt=0.01");
        profile.adapter.crc = false;
    });
    assert!(found.iter().any(|found| matches!(found, Violation::Damaged { .. })), "{found:?}");
}

#[test]
fn without_sequence_numbers_an_old_packet_overwrites_a_new_one() {
    let found = violations(1024, |profile, _| {
        profile.faults = faults(ALL);
        profile.adapter.sequence = false;
    });
    assert!(found.iter().any(|found| matches!(found, Violation::Damaged { .. })), "{found:?}");
}

#[test]
fn without_barriers_a_record_is_seen_before_its_bytes() {
    let found = violations(1024, |profile, _| {
        profile.faults = faults("late=0.05");
        profile.adapter.barrier = false;
    });
    assert!(found.iter().any(|found| matches!(found, Violation::Damaged { .. })), "{found:?}");
}

/// Small messages, whose bytes lie beside the word that announces them: only marks are left to be overtaken.
#[test]
fn without_barriers_a_kernel_byte_overtakes_the_mark_that_tells_its_meaning() {
    for text in ["", "late=0.1,late_us=300", ALL] {
        let run = |barrier| {
            violations(32, |profile, traffic| {
                traffic.carrier = Carrier::Moving;
                profile.faults = faults(text);
                profile.adapter.barrier = barrier;
            })
        };
        assert_eq!(run(true), [], "{text}");
        assert_eq!(run(false).is_empty(), text.is_empty(), "{text}");
    }
}

#[test]
fn active_messages_need_all_that_as_well() {
    type Change = fn(&mut Profile);
    let left_out: [(&str, Change); 4] = [
        ("lost=0.02", |profile| profile.adapter.retry = false),
        ("corrupt=0.02", |profile| profile.adapter.crc = false),
        (ALL, |profile| profile.adapter.sequence = false),
        ("late=0.2", |profile| profile.adapter.barrier = false),
    ];
    for (text, change) in left_out {
        let run = |change: Option<Change>| {
            violations(1024, |profile, traffic| {
                traffic.carrier = Carrier::Active { mailbox: true };
                profile.faults = faults(text);
                if let Some(change) = change {
                    change(profile);
                }
            })
        };
        assert_ne!(run(Some(change)), [], "{text}");
        assert_eq!(run(None), [], "{text}");
    }
}

#[test]
fn without_a_second_look_a_wake_up_is_lost() {
    // One node is so slow that the other answers between its look and its sleep.
    let found = violations(32, |profile, traffic| {
        profile.faults = faults("slow_nodes=1,slowness=30");
        (profile.node.look_us, profile.node.kernel_us, profile.node.interrupt_us) = (1.0, 1.0, 1.0);
        traffic.pattern = Pattern::PingPong;
        traffic.look_again = false;
    });
    assert!(found.iter().any(|found| matches!(found, Violation::Stuck { .. })), "{found:?}");
}

#[test]
fn a_seed_repeats_itself() {
    let trace = |seed| Scenario::drawn(seed).run(seed, None).trace;
    for seed in 0..20 {
        assert_eq!(trace(seed), trace(seed), "seed {seed}");
        assert_ne!(trace(seed), trace(seed + 1), "seed {seed}");
    }
}

/// The lock that a hub's order makes, on nodes of which some are slow: the violations of some seeds.
fn lock(nodes: usize, text: &str, change: impl Fn(&mut Profile, &mut Traffic)) -> Vec<Violation> {
    let one = |seed| {
        let mut profile = Profile::shipped("memory-channel").unwrap();
        profile.faults = faults(text);
        let mut traffic = Traffic {
            pattern: Pattern::AllToAll,
            carrier: Carrier::Reflected,
            nodes,
            messages: 40,
            ..Traffic::default()
        };
        change(&mut profile, &mut traffic);
        let outcome = Scenario { profile, traffic, size: 8, mixed: false }.run(seed, None);
        assert!(outcome.violation.is_some() || outcome.stats.messages >= 40, "{:?}", outcome.stats);
        outcome.violation
    };
    (0..30).filter_map(one).collect()
}

#[test]
fn all_nodes_see_what_a_hub_reflects_in_one_order() {
    const DEATHS: &str =
        "lost=0.05,late=0.1,dead_nodes=3,restart_us=700,dead_links=1,within_us=3000";
    for (nodes, text) in
        [(2, ""), (8, ""), (8, ALL), (8, DEATHS), (9, "dead_links=2,dead_nodes=2,lost=0.01")]
    {
        assert_eq!(lock(nodes, text, |_, _| {}), [], "{nodes} {text}");
    }
    let order = "sees another write than number";
    let alone = "hold the lock at once";
    type Change = fn(&mut Profile, &mut Traffic);
    let left_out: [(&str, Change, &str); 4] = [
        ("late=0.1", |profile, _| profile.adapter.ordered = false, order),
        ("lost=0.05", |profile, _| profile.adapter.ordered = false, order),
        ("corrupt=0.05", |profile, _| profile.adapter.crc = false, order),
        ("", |_, traffic| traffic.look_again = false, alone),
    ];
    for (text, change, told) in left_out {
        let found = lock(8, text, change);
        assert!(found.iter().any(|found| found.to_string().contains(told)), "{text}: {found:?}");
    }
}

/// All to all, on more nodes than have deep connections: the same seed, the same run, down to the last event.
#[test]
fn a_large_cluster_repeats_itself() {
    let run = |seed, text| {
        let mut profile = Profile::shipped("modern").unwrap();
        profile.topology = Topology::Torus;
        profile.faults = faults(text);
        let (pattern, carrier) = (Pattern::AllToAll, Carrier::Active { mailbox: true });
        let traffic = Traffic { pattern, carrier, nodes: 100, messages: 1, ..Traffic::default() };
        Scenario { profile, traffic, size: 8, mixed: false }.run(seed, None)
    };
    for text in ["", "lost=0.01,late=0.01,dead_nodes=3,within_us=5"] {
        let [one, again, other] = [1, 1, 2].map(|seed| run(seed, text));
        assert_eq!(one.violation, None, "{text}");
        assert_eq!((one.trace, &one.stats), (again.trace, &again.stats), "{text}");
        if text.is_empty() {
            // Each request has a reply.
            assert_eq!(one.stats.messages, 2 * 100 * 99);
        } else {
            assert_ne!(one.trace, other.trace);
        }
    }
}
