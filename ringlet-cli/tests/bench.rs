//! `ringlet bench` end to end on the kernel's own transports, and of Active Messages: the shape of what it reports, never a time. That connections
//! of `--only many` and `idle` move, tests/control shows.

use std::fs;
use std::process::{Command, Output, Stdio};

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

/// In rounds of their own grounds, which are gone afterwards; where there can be none, that is told.
#[test]
fn what_is_carried_is_told_or_what_is_missing() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ringlet"));
    command.args(["bench", "--quick", "--only", "carried", "--rounds", "2", "--json", "-"]);
    if let Some(library) = std::env::var_os("TESTED_LIBRARY") {
        command.env("RINGLET_LIBRARY", library);
    }
    let output = ended(command);
    let rows = rows(&output.stdout);
    let errors: Vec<&str> = rows.iter().filter_map(|row| row["error"].as_str()).collect();
    if !rustix::process::geteuid().is_root() {
        assert!(
            errors.len() == 3 && errors.iter().all(|why| why.contains("only root")),
            "{rows:?}"
        );
        return;
    }
    // (What a machine lacks, its node service says; and where there is no library to test.)
    let lacks = ["CAP_BPF", "cgroup2", "libringlet_preload.so"];
    if errors.iter().any(|why| lacks.iter().any(|lack| why.contains(lack))) {
        assert!(!output.status.success());
        return;
    }
    assert!(output.status.success(), "{errors:?}");
    let cpu = |whose: &str, of: u32| format!("CPU of the {whose} for each, {of}");
    let mut expected = Vec::new();
    for (of, plural) in [(1, ""), (8, "s")] {
        expected.push(format!("round trips, {of} connection{plural}"));
        expected.extend(
            ["server", "client", "services", "ends and services"].map(|whose| cpu(whose, of)),
        );
    }
    expected.push("64 KiB writes, one way".into());
    let told: Vec<&str> = rows.iter().map(|row| row["what"].as_str().unwrap()).collect();
    let transports = ["veth", "isolated", "two hosts"];
    let each = expected.iter().flat_map(|what| [what.as_str(); 3]);
    assert_eq!(told, each.collect::<Vec<_>>());
    for (index, row) in rows.iter().enumerate() {
        assert_eq!(row["transport"], transports[index % 3]);
        assert_eq!(row["rounds"].as_array().unwrap().len(), 2);
        let is_kernels = index % 3 == 0;
        assert_eq!(row["path"] == "kernel", is_kernels, "{row}");
        // (What is not carried yet costs the services nothing.)
        let of_services = row["what"].as_str().unwrap().contains("the services");
        assert!(of_services || row["median"].as_f64().unwrap() > 0.0, "{row}");
    }
}

/// By a shell that limits descriptors first (as ulimit says it) and then becomes the command.
fn limited(ulimit: &str, arguments: &[&str]) -> Output {
    let mut command = Command::new("sh");
    command.args(["-c", &format!("ulimit {ulimit} && exec \"$0\" \"$@\"")]);
    command.arg(env!("CARGO_BIN_EXE_ringlet")).args(["bench", "--quick", "--json", "-"]);
    command.args(arguments);
    ended(command)
}

/// It leaves nothing behind.
fn ended(mut command: Command) -> Output {
    let place = tempfile::tempdir().unwrap();
    command.env("TMPDIR", place.path()).stdin(Stdio::null());
    let started = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let pid = started.id();
    let output = started.wait_with_output().unwrap();
    let ours = format!("\"parent\":{pid},");
    let processes = fs::read_dir("/proc").unwrap().flatten();
    let commands = processes.filter_map(|each| fs::read(each.path().join("cmdline")).ok());
    let commands = commands.map(|words| String::from_utf8_lossy(&words).into_owned());
    assert_eq!(commands.filter(|words| words.contains(&ours)).collect::<Vec<_>>(), [""; 0]);
    assert_eq!(fs::read_dir(place.path()).unwrap().count(), 0, "files are left");
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    let unified = mounts.lines().find(|line| line.split(' ').nth(2) == Some("cgroup2"));
    let top = unified.and_then(|line| line.split(' ').nth(1)).unwrap_or("/sys/fs/cgroup");
    let groups = fs::read_dir(top).into_iter().flatten().flatten();
    let name = format!("ringlet-bench-{pid}");
    let left = groups.filter(|each| each.file_name().to_string_lossy().starts_with(&name));
    assert_eq!(left.count(), 0, "a control group is left");
    output
}

/// More connections than descriptors are allowed at first.
#[test]
fn many_connections_are_told_with_the_processor_time_of_each_end() {
    let arguments = ["--only", "many", "--connections", "1,70", "--transport", "tcp"];
    let output = limited("-Sn 64", &[arguments.as_slice(), &["--rounds", "2"]].concat());
    assert!(output.status.success(), "{output:?}");
    let rows = rows(&output.stdout);
    let mut rows = rows.iter();
    for (case, kind, transport) in [
        ("many-epoll", "connection", "tcp"),
        ("many-edge", "connection", "tcp"),
        ("many-poll", "connection", "tcp"),
        ("many-select", "connection", "tcp"),
        ("many-turns", "connection", "tcp"),
        ("many-bursts", "connection", "tcp"),
        ("many-udp", "sender", "udp"),
        ("many-udp-turns", "sender", "udp"),
        ("many-udp-bursts", "sender", "udp"),
    ] {
        for count in [1, 70] {
            let plural = if count == 1 { "" } else { "s" };
            let rate = rows.next().unwrap();
            assert_eq!(rate["what"], format!("round trips, {count} {kind}{plural}"), "{rate}");
            assert_eq!(rate["unit"], "per_second");
            let server = rows.next().unwrap();
            assert_eq!(server["what"], format!("CPU of the server for each, {count}"), "{server}");
            let client = rows.next().unwrap();
            assert_eq!(client["what"], format!("CPU of the client for each, {count}"), "{client}");
            for row in [rate, server, client] {
                assert_eq!((&row["case"], &row["transport"]), (&case.into(), &transport.into()));
                assert_eq!((&row["path"], &row["ratio_to_tcp"]), (&"kernel".into(), &1.0.into()));
                assert_eq!(row["rounds"].as_array().unwrap().len(), 2);
            }
            for round in 0..2 {
                let value = |row: &Value| row["rounds"][round]["value"].as_f64().unwrap();
                assert!(rate["rounds"][round]["tails"]["count"].as_f64().unwrap() >= 1.0);
                // Of one thread, which can't have had more than all of a processor.
                for cpu in [server, client] {
                    assert_eq!(cpu["unit"], "nanoseconds");
                    let share = value(cpu) * value(rate) / 1e9;
                    assert!(share > 0.0 && share < 1.1, "{share}: {cpu} {rate}");
                }
            }
        }
    }
    assert!(rows.next().is_none());
}

#[test]
fn waits_beside_idle_connections_are_told() {
    let arguments = ["--only", "idle", "--connections", "3,70", "--transport", "tcp,unix"];
    let output = limited("-Sn 64", &arguments);
    assert!(output.status.success(), "{output:?}");
    let rows = rows(&output.stdout);
    let mut expected = Vec::new();
    for case in ["idle-epoll", "idle-poll", "idle-select"] {
        for what in ["3 idle, CPU of a turn", "70 idle, CPU of a turn"] {
            expected.extend(["tcp", "unix"].map(|transport| (case, what, transport)));
        }
    }
    let text = |row: &Value, key: &str| row[key].as_str().unwrap_or("none").to_owned();
    let told =
        rows.iter().map(|row| (text(row, "case"), text(row, "what"), text(row, "transport")));
    let told: Vec<_> = told.collect();
    let told: Vec<(&str, &str, &str)> = told.iter().map(|(a, b, c)| (&**a, &**b, &**c)).collect();
    assert_eq!(told, expected);
    for row in &rows {
        assert_eq!(row["unit"], "nanoseconds");
        assert!(row["median"].as_f64().unwrap() > 0.0, "{row}");
    }
}

#[test]
fn too_few_descriptors_are_told_and_what_there_are_enough_for_is_measured() {
    let arguments = ["--only", "many,idle", "--connections", "20,40", "--transport", "tcp"];
    let output = limited("-n 90", &arguments);
    assert!(!output.status.success());
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let rows = rows(&output.stdout);
    let (failed, measured): (Vec<_>, Vec<_>) =
        rows.iter().partition(|row| row["error"].is_string());
    // Each way once by 20 and once by 40.
    assert_eq!((failed.len(), measured.len()), (9 + 3, 9 * 3 + 3), "{said}");
    let why = "40 connections need 104 descriptors, and RLIMIT_NOFILE allows 90";
    assert!(failed.iter().all(|row| row["error"].as_str().unwrap().contains(why)), "{failed:?}");
    assert!(measured.iter().all(|row| row["what"].as_str().unwrap().contains("20")), "{said}");
    assert!(said.contains(why), "{said}");
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
