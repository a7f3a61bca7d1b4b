//! `ringlet config`: the value in force, where it came from, and what is wrong and where.

mod support;

use std::fs;

use support::{json, ringlet, text};

#[test]
fn each_value_tells_where_it_came_from() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("ringlet.conf");
    fs::write(&file, "spin_us = 1\nmove_after = 2\nring_bytes = 2M\n").unwrap();
    let mut command = ringlet(&["config", "--json", "--ring-bytes", "4M"]);
    command.env_remove("RINGLET_CONFIG").env("XDG_CONFIG_HOME", directory.path());
    let report = json(command.env("RINGLET_MOVE_AFTER", "3").env("RINGLET_RING_BYTES", "1M"));
    let of = |name: &str| {
        let settings = report["settings"].as_array().unwrap();
        let setting = settings.iter().find(|each| each["name"] == name).unwrap();
        [&setting["value"], &setting["origin"]].map(|each| each.as_str().unwrap().to_owned())
    };
    assert_eq!(of("enabled"), ["on", "default"]);
    assert_eq!(of("spin_us"), ["1", "file"]);
    assert_eq!(of("move_after"), ["3", "environment"]);
    assert_eq!(of("ring_bytes"), ["4M", "flag"]);
    assert_eq!(report["file"].as_str(), file.to_str());
    assert_eq!(report["problems"].as_array().unwrap().len(), 0);

    let other = directory.path().join("other.conf");
    fs::write(&other, "spin_us = 9\n").unwrap();
    let report = json(&mut ringlet(&["config", "--json", "--config", other.to_str().unwrap()]));
    assert_eq!(report["file"].as_str(), other.to_str());
}

#[test]
fn errors_name_the_line_or_variable_and_fail() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("ringlet.conf");
    fs::write(&file, "# fine\nspin_us = 1\nturn = 2\nonly = nowhere\n").unwrap();
    let mut command = ringlet(&["config"]);
    let output = command.env("RINGLET_CONFIG", &file).env("RINGLET_TURN", "9").output().unwrap();
    let (out, err) = text(&output);
    assert_eq!(output.status.code(), Some(1));
    let file = file.display();
    assert_eq!(
        err,
        format!(
            "ringlet: {file}:3: there is no such key\n\
             ringlet: {file}:4: only: rule 1 is not like 127.0.0.1, 127.0.0.1:6379, [::1]:6379 or :6379\n\
             ringlet: RINGLET_TURN: there is no such variable\n"
        )
    );
    let line = out.lines().find(|line| line.starts_with("spin_us")).unwrap();
    let words: Vec<&str> = line.split_ascii_whitespace().take(4).collect();
    assert_eq!(words, ["spin_us", "1", "file", "microseconds"]);
}

#[test]
fn a_file_that_was_asked_for_must_be_there() {
    let output = ringlet(&["config"]).env("RINGLET_CONFIG", "/no/file").output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(text(&output).1, "ringlet: /no/file: the file does not exist\n");
}
