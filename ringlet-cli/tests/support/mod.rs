//! Runs the command apart from whatever configuration this machine or user has.

use std::path::PathBuf;
use std::process::{Command, Output};

/// The command, without any setting of ringlet's in its environment.
pub fn ringlet(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ringlet"));
    for (name, _) in std::env::vars_os() {
        if name.as_encoded_bytes().starts_with(b"RINGLET_") || name == "LD_PRELOAD" {
            command.env_remove(name);
        }
    }
    command.env("RINGLET_CONFIG", "/dev/null").args(arguments);
    command
}

/// A library that can be preloaded anywhere without harm: the C library, where this very process has it from.
#[allow(dead_code)]
pub fn harmless_library() -> PathBuf {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let paths = maps.lines().filter_map(|line| line.split_ascii_whitespace().nth(5));
    paths.map(PathBuf::from).find(|path| path.ends_with("libc.so.6")).unwrap()
}

#[allow(dead_code)]
pub fn text(output: &Output) -> (String, String) {
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    (text(&output.stdout), text(&output.stderr))
}

#[allow(dead_code)]
pub fn json(command: &mut Command) -> serde_json::Value {
    let output = command.output().unwrap();
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"))
}
