//! `ringlet sim`: runs that repeat themselves, and profiles that must fail.

mod support;

use std::fs;

use support::{json, ringlet, text};

const RUN: [&str; 11] = [
    "sim",
    "run",
    "scilan",
    "--workload",
    "stream",
    "--size",
    "40",
    "--messages",
    "300",
    "--faults",
    "lost=0.02",
];

#[test]
fn a_seed_repeats_itself_and_another_differs() {
    let run = |seed: &str| json(ringlet(&RUN).args(["--json", "--seed", seed]));
    let [one, again, other] = ["1", "1", "2"].map(run);
    assert_eq!(one, again);
    assert_ne!(one["trace"], other["trace"]);
    assert_eq!(one["messages"], 300);
    assert!(one["retries"].as_u64().unwrap() > 0);
    assert!(one["violation"].is_null());
}

#[test]
fn a_profile_without_retries_loses_messages_and_says_so() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("mine.toml");
    let (profile, _) = text(&ringlet(&["sim", "profile", "scilan"]).output().unwrap());
    for (retry, code) in [("true", 0), ("false", 1)] {
        fs::write(&file, profile.replacen("[adapter]", &format!("[adapter]\nretry = {retry}"), 1))
            .unwrap();
        let mut arguments = RUN;
        arguments[2] = file.to_str().unwrap();
        let output = ringlet(&arguments).output().unwrap();
        assert_eq!(output.status.code(), Some(code), "{output:?}");
        assert_eq!(text(&output).0.contains("WRONG: message"), retry == "false", "{output:?}");
    }
}

#[test]
fn seeds_have_a_trace_that_tells_all() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("trace");
    let output = ringlet(&["sim", "seeds", "5", "--trace"]).arg(&file).output().unwrap();
    let (out, err) = text(&output);
    assert!(output.status.success() && out.starts_with("trace "), "{out} {err}");
    assert!(fs::read_to_string(&file).unwrap().lines().any(|line| line.contains("Deliver")));
    let output = ringlet(&["sim", "seeds", "5..9", "--trace"]).arg(&file).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
}

#[test]
fn what_makes_no_sense_is_refused() {
    for arguments in [
        &["sim", "run", "nothing"][..],
        &["sim", "run", "scilan", "--topology", "mesh"],
        &["sim", "run", "scilan", "--faults", "lost=2"],
        &["sim", "run", "scilan", "--faults", "rain=1"],
        &["sim", "run", "scilan", "--seed", "3..3"],
        &["sim", "run", "scilan", "--workload", "am-store", "--size", "1M"],
        &["sim", "run", "scilan", "--nodes", "513"],
        &["sim", "run", "scilan", "--workload", "reflect"],
    ] {
        let output = ringlet(arguments).output().unwrap();
        assert!(!output.status.success() && !output.stderr.is_empty(), "{arguments:?}");
    }
}
