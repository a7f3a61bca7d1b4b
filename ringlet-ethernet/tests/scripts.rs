//! Another port's messages, and guests, by random scripts, without a fuzzer (see fuzz/README.md). `RINGLET_FUZZ_SECONDS` keeps on for so long.

#[path = "../../fuzz/src/eth_frames.rs"]
mod eth_frames;
mod guest;
#[path = "../../fuzz/src/vhost_guest.rs"]
mod vhost_guest;

use std::cell::Cell;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use proptest::test_runner::TestRunner;

#[test]
fn frames_are_such_as_a_kernel_takes() {
    run_scripts(eth_frames::run, 256);
}

#[test]
fn a_back_end_survives_its_guests() {
    run_scripts(vhost_guest::run, 64);
}

/// (Scripts by which nothing is reached prove nothing.)
fn run_scripts(run: fn(&[u8]) -> usize, cases: u32) {
    let more = std::env::var("RINGLET_FUZZ_SECONDS").ok().and_then(|seconds| seconds.parse().ok());
    let until = Instant::now() + Duration::from_secs(more.unwrap_or(0));
    let script = prop::collection::vec(any::<u8>(), 0..1500);
    let (mut scripts, reached) = (0, Cell::new(0));
    loop {
        // (A script that hangs is not to hang for each shorter one.)
        let config = ProptestConfig {
            failure_persistence: None,
            cases,
            max_shrink_iters: 0,
            ..ProptestConfig::default()
        };
        scripts += cases;
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
