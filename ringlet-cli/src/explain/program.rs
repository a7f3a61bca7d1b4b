//! Why a process shows no page.

use std::fs;
use std::io::ErrorKind;
use std::path::Path;

use crate::processes;
use crate::program::{self, Reach};
use crate::run::LIBRARY_NAME;
use crate::table::printable;

/// A statement, and what can be done.
pub struct Why {
    pub code: &'static str,
    pub sentence: String,
    pub advice: Option<String>,
}

fn why(code: &'static str, sentence: impl Into<String>, advice: &str) -> Why {
    let advice = (!advice.is_empty()).then(|| advice.to_owned());
    Why { code, sentence: sentence.into(), advice }
}

/// Why is the process not among those that ringlet can see?
pub fn why_unseen(pid: u32) -> Why {
    let file = |name: &str| format!("/proc/{pid}/{name}");
    let maps = match fs::read(file("maps")) {
        Ok(maps) => maps,
        Err(error) if error.kind() == ErrorKind::PermissionDenied => {
            return why(
                "no-permission",
                "It is another user's process, or one that lets nobody look into it.",
                "Ask as its user, or as root.",
            );
        }
        Err(_) => return why("gone", "There is no such process (any more).", ""),
    };
    if contains(&maps, LIBRARY_NAME) {
        return why(
            "nothing-yet",
            "It runs under ringlet, and has made no socket yet that ringlet follows (or had no memory or descriptor to show it).",
            "",
        );
    }
    match program::inspect(Path::new(&file("exe")), &[]) {
        Reach::ChildrenOnly(reason) | Reach::Unreached(reason) => {
            return why(
                "unreachable",
                format!("ringlet can't reach this program: {reason}."),
                "Use a build that is linked dynamically with glibc for this machine, and gains no privileges when it starts.",
            );
        }
        Reach::Reached => {}
    }
    if gained_privileges(pid) {
        return why(
            "privileges",
            "It gained privileges when it started (set-user-ID, set-group-ID or file capabilities), and then the loader preloads nothing.",
            "Let a service manager start it with the privileges that it needs.",
        );
    }
    let environment = fs::read(file("environ")).unwrap_or_default();
    let preloads =
        |value: &[u8]| value.starts_with(b"LD_PRELOAD=") && contains(value, LIBRARY_NAME);
    if environment.split(|byte| *byte == 0).any(preloads) {
        return why(
            "not-loaded",
            "It was started with ringlet's library in LD_PRELOAD, but its loader did not load it.",
            "See that the library can be read where the process lives (another root directory, user or container).",
        );
    }
    if let Some((parent, program)) = wrapped_ancestor(pid) {
        return why(
            "environment",
            format!(
                "{}/{parent}, from which it descends, runs under ringlet, but the environment was cleaned on the way: LD_PRELOAD is not in it.",
                printable(&program)
            ),
            "Let LD_PRELOAD and RINGLET_* through, or start this program itself with `ringlet run`.",
        );
    }
    why(
        "not-run",
        format!("It was not started by `ringlet run`{}.", started(pid)),
        "Start it again with `ringlet run`: a running program can't be wrapped.",
    )
}

fn contains(bytes: &[u8], text: &str) -> bool {
    bytes.windows(text.len()).any(|window| window == text.as_bytes())
}

/// AT_SECURE in its auxiliary vector: pairs of words, native.
fn gained_privileges(pid: u32) -> bool {
    const AT_SECURE: usize = 23;
    let vector = fs::read(format!("/proc/{pid}/auxv")).unwrap_or_default();
    let words: Vec<usize> = vector
        .chunks_exact(size_of::<usize>())
        .map(|word| usize::from_ne_bytes(word.try_into().expect("a word")))
        .collect();
    words.chunks_exact(2).any(|pair| pair[0] == AT_SECURE && pair[1] != 0)
}

fn wrapped_ancestor(pid: u32) -> Option<(u32, String)> {
    let mut pid = processes::parent_of(pid)?;
    while pid > 1 {
        let maps = fs::read(format!("/proc/{pid}/maps")).unwrap_or_default();
        if contains(&maps, LIBRARY_NAME) {
            return Some((pid, processes::program_of(pid)));
        }
        pid = processes::parent_of(pid)?;
    }
    None
}

/// By what it was started, as far as that helps to find the place.
fn started(pid: u32) -> String {
    match processes::parent_of(pid).map(|parent| (processes::program_of(parent), parent)) {
        Some((program, parent)) if !program.is_empty() => {
            format!(", but by {}/{parent}", printable(&program))
        }
        _ => String::new(),
    }
}
