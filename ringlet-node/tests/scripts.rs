//! Guests and policies by random scripts, without a fuzzer (see fuzz/README.md). `RINGLET_FUZZ_SECONDS` keeps on for so long.

#[path = "../../fuzz/src/node_guests.rs"]
mod node_guests;
#[path = "../../fuzz/src/node_policy.rs"]
mod node_policy;

use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use std::cell::Cell;
use std::time::{Duration, Instant};

#[test]
fn the_service_survives_its_guests() {
    run_scripts(node_guests::run);
}

#[test]
fn a_policy_is_read_or_refused() {
    run_scripts(node_policy::run);
}

/// (Scripts by which nothing is reached prove nothing.)
fn run_scripts(run: fn(&[u8]) -> usize) {
    let more = std::env::var("RINGLET_FUZZ_SECONDS").ok().and_then(|seconds| seconds.parse().ok());
    let until = Instant::now() + Duration::from_secs(more.unwrap_or(0));
    let script = proptest::collection::vec(any::<u8>(), 0..1500);
    let (mut scripts, reached) = (0, Cell::new(0));
    loop {
        let config = ProptestConfig { failure_persistence: None, ..ProptestConfig::default() };
        scripts += config.cases;
        let outcome = TestRunner::new(config).run(&script, |script| {
            reached.set(reached.get() + run(&script));
            Ok(())
        });
        outcome.unwrap_or_else(|error| panic!("{error}"));
        if Instant::now() >= until {
            break;
        }
    }
    println!("{scripts} scripts, {} times at the end", reached.get());
    assert!(reached.get() > 0);
}
