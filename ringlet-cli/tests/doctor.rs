//! `ringlet doctor` where the library is missing or is none: what it says, and that it ends.

mod support;

use std::path::Path;

use serde_json::Value;
use support::{harmless_library, json, ringlet, text};

fn check<'r>(report: &'r Value, name: &str) -> &'r Value {
    let checks = report["checks"].as_array().unwrap();
    checks.iter().find(|each| each["name"] == name).unwrap_or_else(|| panic!("{name}: {report}"))
}

#[test]
fn the_report_has_a_fix_for_whatever_is_not_ok() {
    let report = json(ringlet(&["doctor", "--json"]).env("RINGLET_LIBRARY", "/no/library"));
    for name in ["kernel", "shared memory", "fork", "eventfd", "epoll", "descriptors", "mappings"] {
        check(&report, name);
    }
    for each in report["checks"].as_array().unwrap() {
        assert!(!each["found"].as_str().unwrap().is_empty(), "{each}");
        match each["status"].as_str().unwrap() {
            "ok" => assert!(each["fix"].is_null(), "{each}"),
            "warn" | "fail" => assert!(!each["fix"].as_str().unwrap().is_empty(), "{each}"),
            other => panic!("{other}"),
        }
    }
    assert_eq!(check(&report, "library")["status"], "fail");
    assert_eq!(check(&report, "connection")["status"], "fail");
    assert_eq!(report["ok"], false);
}

/// The C library is loadable but is not ringlet: the two programs start, talk, and say so.
#[test]
fn a_library_that_is_not_ringlet_moves_nothing() {
    let report = json(ringlet(&["doctor", "--json"]).env("RINGLET_LIBRARY", harmless_library()));
    let connection = check(&report, "connection");
    assert_eq!(connection["status"], "fail");
    assert!(connection["found"].as_str().unwrap().contains("not loaded"), "{connection}");
}

#[test]
fn errors_of_the_configuration_fail_and_text_says_what_json_says() {
    let mut command = ringlet(&["doctor"]);
    command.env("RINGLET_LIBRARY", "/no/library").env("RINGLET_PEERS", "friends");
    let output = command.output().unwrap();
    let (out, _) = text(&output);
    assert_eq!(output.status.code(), Some(1));
    let line = out.lines().find(|line| line.contains("configuration")).unwrap();
    assert!(line.starts_with("fail") && line.contains("RINGLET_PEERS"), "{line}");
}

/// With the library beside the command, as the workspace builds it, all must be well.
#[test]
fn a_real_connection_is_moved_and_seen() {
    let library = Path::new(env!("CARGO_BIN_EXE_ringlet")).with_file_name("libringlet_preload.so");
    if !library.is_file() {
        eprintln!("skipped: {} is not built", library.display());
        return;
    }
    // Whatever excludes the user's connections must not concern the proof.
    let mut command = ringlet(&["doctor", "--json"]);
    let report = json(command.env("RINGLET_LIBRARY", &library).env("RINGLET_EXCEPT", "*"));
    assert_eq!(check(&report, "connection")["status"], "ok", "{report}");
    assert_eq!(check(&report, "ss")["status"], "ok", "{report}");
    assert_eq!(report["ok"], true, "{report}");
}
