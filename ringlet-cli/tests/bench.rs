//! `ringlet bench` end to end on the kernel's own transports, and of Active Messages: the shape of what it reports, never a time.

use std::fs;
use std::process::{Command, Output};

use serde_json::Value;

fn bench(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ringlet"));
    command.args(["bench", "--quick", "--only", "latency"]).args(arguments);
    command.output().expect("the command starts")
}

fn rows(json: &[u8]) -> Vec<Value> {
    let report: Value = serde_json::from_slice(json).expect("JSON");
    for key in ["processor", "kernel", "version", "date"] {
        assert!(report["machine"][key].as_str().is_some_and(|text| !text.is_empty()), "{key}");
    }
    report["rows"].as_array().expect("rows").clone()
}

#[test]
fn every_round_of_every_transport_is_in_the_json() {
    let arguments =
        ["--transport", "tcp,unix", "--pin", "none", "--sizes", "8,4K", "--rounds", "2"];
    let output = bench(&[arguments.as_slice(), &["--json", "-"]].concat());
    let table = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{table}");
    assert!(table.contains("vs kernel") && table.contains("4 KiB"), "{table}");

    let rows = rows(&output.stdout);
    let names: Vec<(&str, &str)> = rows
        .iter()
        .map(|row| (row["what"].as_str().unwrap(), row["transport"].as_str().unwrap()))
        .collect();
    assert_eq!(names, [("8 B", "tcp"), ("8 B", "unix"), ("4 KiB", "tcp"), ("4 KiB", "unix")]);
    for row in &rows {
        assert_eq!(row["case"], "latency");
        assert_eq!(row["path"], "kernel");
        assert_eq!(row["unit"], "nanoseconds");
        assert!(row["error"].is_null());
        assert!(row["median"].as_f64().unwrap() > 0.0);
        assert!(row["ratio_to_tcp"].as_f64().unwrap() > 0.0);
        let rounds = row["rounds"].as_array().unwrap();
        assert_eq!(rounds.len(), 2);
        for (index, round) in rounds.iter().enumerate() {
            assert_eq!(round["round"], index);
            assert!(round["value"].as_f64().unwrap() > 0.0);
            let tail = |name: &str| round["tails"][name].as_f64().unwrap();
            assert!(tail("count") > 0.0);
            assert!(tail("p50_ns") <= tail("p99_ns") && tail("p99_ns") <= tail("p999_ns"));
            assert!(tail("p999_ns") <= tail("max_ns"));
        }
    }
    for row in rows.iter().filter(|row| row["transport"] == "tcp") {
        assert_eq!(row["ratio_to_tcp"], 1.0);
    }
}

/// Of as many peers as the translation table is made for too, which are more than it has room for at first.
#[test]
fn active_messages_are_measured() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ringlet"));
    let arguments = ["bench", "--quick", "--only", "messages", "--rounds", "1", "--json", "-"];
    let output = command.args(arguments).output().expect("the command starts");
    let rows = rows(&output.stdout);
    let ours: Vec<&Value> = rows.iter().filter(|row| row["transport"] == "ringlet").collect();
    assert!(ours.iter().any(|row| row["what"] == "empty poll, 300 peers"), "{rows:?}");
    assert!(ours.iter().all(|row| row["error"].is_null()), "{rows:?}");
}

/// A library that can't be had must not look like a measurement.
#[test]
fn a_transport_that_fails_is_a_row_with_its_error() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ringlet"));
    command
        .args(["bench", "--quick", "--only", "latency", "--pin", "none", "--sizes", "8"])
        .args(["--transport", "tcp,ringlet", "--json", "-"])
        .env("RINGLET_LIBRARY", "/nonexistent/libringlet_preload.so");
    let output = command.output().expect("the command starts");
    assert!(!output.status.success());
    let rows = rows(&output.stdout);
    let error_of = |transport: &str| {
        let row = rows.iter().find(|row| row["transport"] == transport).expect(transport);
        row["error"].as_str().map(str::to_owned)
    };
    assert_eq!(error_of("tcp"), None);
    assert!(error_of("ringlet").unwrap().contains("/nonexistent"));
    assert!(error_of("ringlet, no spin").unwrap().contains("/nonexistent"));
}

#[test]
fn pictures_are_drawn_without_the_systems_fonts() {
    let directory = std::env::temp_dir().join(format!("ringlet-bench-test-{}", std::process::id()));
    fs::create_dir(&directory).expect("a directory of our own");
    for (name, start) in [("a.svg", b"<svg".as_slice()), ("a.png", b"\x89PNG")] {
        let path = directory.join(name);
        let output = bench(&[
            "--transport",
            "tcp,unix",
            "--pin",
            "none",
            "--sizes",
            "8,64,1K",
            "--plot",
            path.to_str().unwrap(),
        ]);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let drawn = fs::read(&path).expect("a picture");
        assert!(drawn.starts_with(start), "{name}");
        if name == "a.svg" {
            let text = String::from_utf8(drawn).unwrap();
            assert!(text.contains("1 KiB") || text.contains("512 B"), "{text}");
        }
    }
    fs::remove_dir_all(&directory).expect("it is still there");
}
