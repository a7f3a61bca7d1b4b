//! Streams by random scripts, without a fuzzer (see fuzz/README.md). `RINGLET_FUZZ_SECONDS` keeps on for so long.

#[path = "../../fuzz/src/disk_stream.rs"]
mod disk_stream;

use std::cell::Cell;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use proptest::test_runner::TestRunner;

/// (Scripts by which nothing is reached prove nothing.)
#[test]
fn a_stream_gets_what_a_model_has_whatever_it_says() {
    let more = std::env::var("RINGLET_FUZZ_SECONDS").ok().and_then(|seconds| seconds.parse().ok());
    let until = Instant::now() + Duration::from_secs(more.unwrap_or(0));
    let script = prop::collection::vec(any::<u8>(), 0..600);
    let (mut scripts, reached) = (0, Cell::new(0));
    loop {
        // (A script that hangs is not to hang for each shorter one.)
        let config = ProptestConfig {
            failure_persistence: None,
            max_shrink_iters: 0,
            ..ProptestConfig::with_cases(128)
        };
        scripts += config.cases;
        let outcome = TestRunner::new(config).run(&script, |script| {
            reached.set(reached.get() + disk_stream::run(&script));
            Ok(())
        });
        outcome.unwrap_or_else(|error| panic!("{error}"));
        if Instant::now() >= until {
            break;
        }
    }
    println!("{scripts} scripts, {} requests as they ought to be", reached.get());
    assert!(reached.get() > 0);
}
