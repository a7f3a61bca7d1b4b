//! A peer that scribbles over the segment: random scripts, without a fuzzer (see fuzz/README.md).
//! `RINGLET_FUZZ_SECONDS` keeps on for so long.
#![cfg(not(loom))]

#[path = "../../fuzz/src/message_peer.rs"]
mod message_peer;
#[path = "../../fuzz/src/ring_peer.rs"]
mod ring_peer;
mod segment;

use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use std::time::{Duration, Instant};

#[test]
fn survives_a_hostile_peer() {
    run_scripts(ring_peer::run);
}

#[test]
fn messages_survive_a_hostile_peer() {
    run_scripts(message_peer::run);
}

fn run_scripts(run: fn(&[u8])) {
    let more = std::env::var("RINGLET_FUZZ_SECONDS").ok().and_then(|seconds| seconds.parse().ok());
    let until = Instant::now() + Duration::from_secs(more.unwrap_or(0));
    let script = proptest::collection::vec(any::<u8>(), 0..3000);
    let mut scripts = 0;
    loop {
        let config = ProptestConfig { failure_persistence: None, ..ProptestConfig::default() };
        scripts += config.cases;
        let outcome = TestRunner::new(config).run(&script, |script| {
            run(&script);
            Ok(())
        });
        outcome.unwrap_or_else(|error| panic!("{error}"));
        if Instant::now() >= until {
            break;
        }
    }
    println!("{scripts} scripts");
}
