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
            "warn" | "fail" | "unknown" => {
                assert!(!each["fix"].as_str().unwrap().is_empty(), "{each}")
            }
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

/// Programs that say nothing in time may be slow, or wrong: that is what is said, and nothing else.
#[test]
fn what_takes_too_long_could_not_be_told() {
    let place = tempfile::tempdir().unwrap();
    let (source, library) = (place.path().join("slow.c"), place.path().join("libslow.so"));
    let slow = "#include <unistd.h>\n__attribute__((constructor)) static void wait(void) { for (;;) pause(); }\n";
    std::fs::write(&source, slow).unwrap();
    let mut compiler = std::process::Command::new("cc");
    let built = compiler.args(["-shared", "-fPIC", "-o"]).args([&library, &source]).status();
    assert!(built.unwrap().success());
    let mut doctor = ringlet(&["doctor", "--json", "--patience", "1"]);
    doctor.env("RINGLET_LIBRARY", &library);
    let output = doctor.output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let connection = check(&report, "connection");
    assert_eq!((&connection["status"], &report["ok"]), (&"unknown".into(), &false.into()));
    let found = connection["found"].as_str().unwrap();
    assert!(found.starts_with("could not be told: the server says nothing"), "{found}");
}

/// Also where nobody reads, or there is no room, the command ends by itself.
#[test]
fn output_that_cannot_be_written_is_a_failure() {
    let full = || std::fs::File::options().write(true).open("/dev/full").unwrap();
    for words in [&["config"][..], &["config", "--json"], &["ss", "--pid", "1"], &["doctor"]] {
        let mut command = ringlet(words);
        let output = command.env("RINGLET_LIBRARY", "/no/library").stdout(full()).output().unwrap();
        let (_, said) = text(&output);
        assert_eq!((output.status.code(), said.lines().count()), (Some(1), 1), "{words:?}: {said}");
    }
    let status = ringlet(&["explain", "0"]).stderr(full()).status().unwrap();
    assert_eq!(status.code(), Some(1));
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
