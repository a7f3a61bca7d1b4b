//! `ringlet compare` with programs that make no connection: what it reads and tells, what it says of what goes wrong, and that nothing is left
//! behind. (That connections move under it, tests/control shows.)

mod support;

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::Duration;

use serde_json::Value;
use support::{harmless_library, ringlet, text};

const SERVER: &str = "sh -c 'echo $$ >>PIDS; touch {dir}/ready; sleep 1000 & echo $! >>PIDS; wait'";
const READY: &str = "{dir}/ready";

fn compare(arguments: &[&str]) -> Command {
    let mut command = ringlet(&["compare", "--rounds", "3"]);
    command.env("RINGLET_LIBRARY", harmless_library()).args(arguments);
    command
}

/// What it complains of, when it fails.
fn complaint(arguments: &[&str]) -> String {
    let output = compare(arguments).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    text(&output).1
}

fn await_that(mut holds: impl FnMut() -> bool) {
    // Only a fault waits so long.
    for _ in 0..6000 {
        if holds() {
            return;
        }
        sleep(Duration::from_millis(10));
    }
    panic!("waited for a minute");
}

/// The processes that wrote their numbers there, of which none may be left.
fn all_have_ended(pids: &Path) -> usize {
    let pids = fs::read_to_string(pids).unwrap();
    for pid in pids.lines() {
        assert!(!Path::new("/proc").join(pid).exists(), "{pid} is left");
    }
    pids.lines().count()
}

#[test]
fn a_report_takes_the_place_of_a_report_only() {
    let place = tempfile::tempdir().unwrap();
    let [file, report] = ["file.toml", "report.json"].map(|name| place.path().join(name));
    let server = SERVER.replace("PIDS", "/dev/null");
    let text = format!(
        "[[comparison]]\nname = \"one\"\nserver = {server:?}\nready = \"{READY}\"\nclient = \"true\"\nmoves = false\n"
    );
    fs::write(&file, &text).unwrap();
    let write_to = |target: &Path| {
        let [file, target] = [file.as_path(), target].map(|path| path.to_str().unwrap());
        compare(&[file, "--json", target]).output().unwrap()
    };
    let refused = write_to(&file);
    assert!(!refused.status.success());
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(said.contains("no report of ringlet's"), "{said}");
    assert_eq!(fs::read_to_string(&file).unwrap(), text, "it stays as it is");
    for other in ["{}", "[1, 2]", "no JSON"] {
        fs::write(&report, other).unwrap();
        assert!(!write_to(&report).status.success());
        assert_eq!(fs::read_to_string(&report).unwrap(), other);
    }
    fs::write(&report, "").unwrap();
    for _ in 0..2 {
        let written = write_to(&report);
        let told: Value = serde_json::from_str(&fs::read_to_string(&report).unwrap()).unwrap();
        assert!(told["results"].is_array(), "{written:?}");
    }
}

#[test]
fn every_run_is_in_the_json_and_nothing_is_left() {
    let place = tempfile::tempdir().unwrap();
    let pids = place.path().join("pids");
    let file = place.path().join("file.toml");
    let server = SERVER.replace("PIDS", pids.to_str().unwrap());
    let text = format!(
        r#"
        server = {server:?}
        ready = "{READY}"
        moves = false
        [[comparison]]
        name = "one"
        build = ["sh -c 'echo 7 >{{build}}/seven'"]
        client = "sh -c 'echo rate 1; echo rate $(cat {{build}}/seven),654.5; echo 20 done'"
        requests = '([0-9]+) done'
        figure = [
            {{ name = "rate", pattern = 'rate ([0-9.,]+)', unit = "1/s", at_least = 3 }},
            {{ name = "requests", pattern = "requests" }},
            {{ name = "cpu", pattern = "cpu" }},
        ]
        [[comparison]]
        name = "two"
        client = "true"
        [[comparison]]
        name = "three"
        needs = ["/no/such/program"]
        packages = "nothing"
        client = "true"
        "#
    );
    fs::write(&file, text).unwrap();
    let picture = place.path().join("ratios.svg");
    let mut command = compare(&[file.to_str().unwrap(), "--json", "-"]);
    let output = command.arg("--plot").arg(&picture).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stderr).contains("apt-get install nothing"));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let results = report["results"].as_array().unwrap();
    assert_eq!(results.len(), 2);
    let rows = results[0]["rows"].as_array().unwrap();
    let shown: Vec<_> = rows
        .iter()
        .map(|row| (row["figure"].as_str().unwrap(), row["contender"].as_str().unwrap()))
        .collect();
    let expected = ["rate", "requests", "cpu"].map(|name| [(name, "kernel"), (name, "ringlet")]);
    assert_eq!(shown, expected.concat());
    for row in rows {
        assert_eq!((&row["rounds"], &row["cpu_for_each"]), (&3.into(), &"request".into()));
        assert!(row["cpu_seconds"]["median"].as_f64().unwrap() > 0.0);
        assert_eq!(row["ratio"].is_null(), row["contender"] == "kernel");
    }
    for value in ["least", "median", "most"] {
        assert_eq!(rows[0]["value"][value], 7654.5);
    }
    assert_eq!(rows[1]["ratio"]["median"], 1.0);
    assert_eq!(rows[1]["at_least"], 3.0);
    let runs = results[0]["runs"].as_array().unwrap();
    let order: Vec<_> = runs.iter().map(|run| run["contender"].as_str().unwrap()).collect();
    assert_eq!(order, ["kernel", "ringlet", "ringlet", "kernel", "kernel", "ringlet"]);
    assert!(runs.iter().all(|run| run["requests"] == 20.0 && run["error"].is_null()));
    assert_eq!(results[1]["rows"][0]["figure"], "time");
    assert!(fs::read_to_string(&picture).unwrap().contains("one: rate"));
    assert_eq!(all_have_ended(&pids), 2 * 2 * 2 * 3);
}

#[test]
fn a_servers_processor_time_is_told_for_each_request() {
    let place = tempfile::tempdir().unwrap();
    let file = place.path().join("file.toml");
    let text = r#"
        server = "sh -c 'touch {dir}/ready; while :; do :; done'"
        ready = "{dir}/ready"
        moves = false
        [[comparison]]
        name = "of each"
        client = "sh -c 'sleep 0.2; echo 40 done'"
        requests = '([0-9]+) done'
        figure = [{ name = "server", pattern = "server-cpu" }]
        [[comparison]]
        name = "of all"
        client = "sleep 0.2"
        figure = [{ name = "figure", pattern = "server-cpu" }]
    "#;
    fs::write(&file, text).unwrap();
    let output = compare(&[file.to_str().unwrap(), "--json", "-"]).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let results = report["results"].as_array().unwrap();
    for (result, name, requests) in
        [(&results[0], "server", 40.0), (&results[1], "server-cpu", 1.0)]
    {
        for run in result["runs"].as_array().unwrap() {
            let server = run["server_cpu_seconds"].as_f64().unwrap();
            assert!(server > 0.0, "{run}");
            let figure = run["figures"][0].as_f64().unwrap();
            assert!((figure - server / requests).abs() < figure * 1e-9, "{run}");
        }
        for row in result["rows"].as_array().unwrap() {
            assert_eq!((&row["figure"], &row["unit"]), (&name.into(), &"s".into()));
        }
        // (A server's whole processor is what both take.)
        assert!(result["rows"][1]["ratio"]["median"].as_f64().unwrap() > 0.0, "{result}");
    }
}

#[test]
fn what_goes_wrong_is_told() {
    let server = SERVER.replace("PIDS", "/dev/null");
    let with_server = |client: &str, more: &[&str]| {
        let words = ["--server", &server, "--ready", READY, "--client", client];
        complaint(&[words.as_slice(), more].concat())
    };
    let failed = with_server("sh -c 'echo why; exit 3'", &[]);
    assert!(failed.contains("kernel: the client (sh -c ") && failed.contains("status: 3: why"));
    let unmatched = with_server("echo nothing", &["--figure", "rate ([0-9]+)"]);
    assert!(unmatched.contains("rate ([0-9]+) matches nothing") && unmatched.contains(": nothing"));
    let no_number = with_server("echo rate: much", &["--figure", "rate: (.*)"]);
    assert!(no_number.contains("finds much, no number"), "{no_number}");
    let unmoved = with_server("true", &[]);
    assert!(unmoved.contains("ringlet: no connection came into shared memory: "), "{unmoved}");
    let endless = with_server("sleep 1000", &["--limit", "1"]);
    assert!(endless.contains("not done within 1 s"), "{endless}");

    let never_ready = |server: &str, within: &str| {
        complaint(&["--client", "true", "--server", server, "--ready-within", within])
    };
    let deaf = never_ready("sh -c 'sleep 1000' {port}", "1");
    assert!(deaf.contains("not ready within 1 s: nobody listens on port "), "{deaf}");
    let broken = never_ready("sh -c 'echo why >&2; exit 4' {port}", "600");
    assert!(broken.contains("status: 4 before it was ready: why"), "{broken}");
    let gone = never_ready("true {port}", "600");
    assert!(gone.contains("status: 0 before it was ready"), "{gone}");
    assert!(complaint(&["--client", "/no/such/program"]).contains("cannot start /no/such"));
    assert!(complaint(&["--client", "true", "--figure", "rate"]).contains("no group"));
    assert!(complaint(&["/no/such/file"]).contains("cannot read /no/such/file"));
}

#[test]
fn fewer_rounds_than_three_compare_nothing() {
    let output = ringlet(&["compare", "--rounds", "2", "--client", "true"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output).1.contains("3..=1000"));
}

#[test]
fn who_stops_it_finds_nothing_left() {
    let place = tempfile::tempdir().unwrap();
    let pids = place.path().join("pids");
    let server = SERVER.replace("PIDS", pids.to_str().unwrap());
    let client = format!("sh -c 'echo $$ >>{}; exec sleep 1000'", pids.display());
    let mut command = compare(&["--server", &server, "--ready", READY, "--client", &client]);
    let started = command.env("TMPDIR", place.path()).stderr(Stdio::piped()).spawn().unwrap();
    let count = || fs::read_to_string(&pids).unwrap_or_default().lines().count();
    await_that(|| count() == 3);
    let pid = nix::unistd::Pid::from_raw(started.id() as i32);
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGINT).unwrap();
    let output = started.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{output:?}");
    assert!(text(&output).1.contains("stopped"));
    assert_eq!(all_have_ended(&pids), 3);
    let left: Vec<_> =
        fs::read_dir(place.path()).unwrap().map(|each| each.unwrap().path()).collect();
    assert_eq!(left, [pids]);
}
