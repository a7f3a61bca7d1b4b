//! What people set up: limits, the library, the configuration.

use std::fs;

use rustix::process::{Resource, getrlimit};

use super::Check;
use ringlet_programs::preload;
use ringlet_programs::program::{self, Reach};
use ringlet_programs::settings::{Flags, Settings};

/// Room for a program's own descriptors, which many keep below 1024, and ringlet's above them.
const DESCRIPTORS_WANTED: u64 = 4096;
/// The kernel's own default.
const MAPPINGS_WANTED: u64 = 65_530;

pub fn checks() -> Vec<Check> {
    let mut checks = vec![descriptors(), mappings(), library()];
    checks.extend(configuration());
    checks
}

fn descriptors() -> Check {
    let name = "descriptors";
    match getrlimit(Resource::Nofile).current {
        Some(limit) if limit < DESCRIPTORS_WANTED => Check::warn(
            name,
            format!("at most {limit} per process, of which ringlet needs some of its own"),
            "Raise the limit (`ulimit -n 65536`, or LimitNOFILE= of a systemd service) for programs with many connections.",
        ),
        Some(limit) => Check::ok(name, format!("at most {limit} per process")),
        None => Check::ok(name, "without limit"),
    }
}

fn mappings() -> Check {
    let name = "mappings";
    let text = fs::read_to_string("/proc/sys/vm/max_map_count").unwrap_or_default();
    match text.trim().parse::<u64>() {
        Ok(limit) if limit < MAPPINGS_WANTED => Check::warn(
            name,
            format!("at most {limit} per process, and each moved connection takes at least one"),
            format!("Raise it: `sysctl vm.max_map_count={MAPPINGS_WANTED}`."),
        ),
        Ok(limit) => Check::ok(name, format!("at most {limit} per process")),
        Err(_) => Check::warn(
            name,
            "/proc/sys/vm/max_map_count cannot be read",
            "Make sure that each process may have more mappings than connections.",
        ),
    }
}

fn library() -> Check {
    let name = "library";
    let path = match preload::library() {
        Ok(path) => path,
        Err(error) => {
            return Check::fail(name, format!("{error:#}"), "Build or install ringlet completely.");
        }
    };
    let found = path.display().to_string();
    if let Reach::Unreached(why) = program::inspect(&path, &[]) {
        return Check::fail(name, format!("{found}: {why}"), "Build ringlet for this machine.");
    }
    match preload::preload_list(&path, None) {
        Ok(_) => Check::ok(name, found),
        Err(error) => Check::fail(name, found, format!("{error:#}.")),
    }
}

fn configuration() -> Vec<Check> {
    let name = "configuration";
    let Settings { config, file, problems } =
        Settings::load(std::env::vars_os().collect(), &Flags::default());
    let mut checks: Vec<Check> = problems
        .into_iter()
        .map(|problem| {
            Check::fail(name, problem, "Correct it; `ringlet config` shows what is in force.")
        })
        .collect();
    if !config.enabled {
        checks.push(Check::warn(
            name,
            "enabled is off, so that no connection is moved",
            "Set enabled = on where `ringlet config` says that off came from.",
        ));
    }
    // A ring for each direction.
    if config.memory_limit_bytes < 2 * config.ring_bytes {
        checks.push(Check::warn(
            name,
            "memory_limit_bytes has no room for the two rings of one connection",
            "Raise memory_limit_bytes or lower ring_bytes.",
        ));
    }
    if checks.is_empty() {
        let from = file.map_or("no file".to_owned(), |file| file.display().to_string());
        checks.push(Check::ok(name, from));
    }
    checks
}
