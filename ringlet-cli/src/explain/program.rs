//! Why a process shows no page. Its file is not opened: the kernel has noted what it started, and the file may be any by now.

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, ErrorKind, Read};
use std::path::Path;

use ringlet_programs::patience;
use ringlet_programs::preload::LIBRARY_NAME;
use ringlet_programs::processes;

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
pub fn why_unseen(pid: u32) -> anyhow::Result<Why> {
    patience::one(pid, look)
}

fn look(pid: u32) -> Why {
    let directory = processes::directory(pid);
    let mapped = match Mapped::by(&directory) {
        Ok(mapped) => mapped,
        Err(error) if error.kind() == ErrorKind::PermissionDenied => {
            return why(
                "no-permission",
                "It is another user's process, or one that lets nobody look into it.",
                "Ask as its user, or as root.",
            );
        }
        Err(_) => return why("gone", "There is no such process (any more).", ""),
    };
    if mapped.preloaded {
        return why(
            "nothing-yet",
            "It runs under ringlet, and has made no socket yet that ringlet follows (or had no memory or descriptor to show it).",
            "",
        );
    }
    let start = Start::of(&directory);
    if let Some(reason) = start.unreachable(&mapped) {
        return why(
            "unreachable",
            format!("ringlet can't reach this program: {reason}."),
            "Use a build that is linked dynamically with glibc for this machine, and gains no privileges when it starts.",
        );
    }
    if start.secure {
        return why(
            "privileges",
            "It gained privileges when it started (set-user-ID, set-group-ID or file capabilities), and then the loader preloads nothing.",
            "Let a service manager start it with the privileges that it needs.",
        );
    }
    if asks_for_library(&directory) {
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
                "{}, from which it descends, runs under ringlet, but the environment was cleaned on the way: LD_PRELOAD is not in it.",
                processes::name(&program, parent)
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

/// What is mapped in a process.
#[derive(Default)]
struct Mapped {
    anything: bool,
    preloaded: bool,
    /// The dynamic loader of glibc, and of musl.
    glibc: bool,
    musl: bool,
}

impl Mapped {
    fn by(directory: &Path) -> io::Result<Mapped> {
        let mut maps = BufReader::new(File::open(directory.join("maps"))?);
        let (mut line, mut found) = (Vec::new(), Mapped::default());
        while maps.read_until(b'\n', &mut line)? > 0 {
            let name = line.trim_ascii_end().rsplit(|byte| *byte == b'/').next().unwrap_or(&[]);
            found.anything = true;
            found.preloaded |= contains(name, LIBRARY_NAME);
            found.glibc |= name.starts_with(b"ld-linux") || name.starts_with(b"ld-2.");
            found.musl |= name.starts_with(b"ld-musl");
            line.clear();
        }
        Ok(found)
    }
}

/// What the kernel told it when it started: its auxiliary vector, pairs of words as wide as the program's.
struct Start {
    is_64_bit: bool,
    loader: bool,
    secure: bool,
}

impl Start {
    fn of(directory: &Path) -> Start {
        let vector = fs::read(directory.join("auxv")).unwrap_or_default();
        let wide = pairs(&vector, 8);
        let is_64_bit = vector.is_empty() || value(&wide, libc::AT_PAGESZ) != 0;
        let words = if is_64_bit { wide } else { pairs(&vector, 4) };
        Start {
            is_64_bit,
            loader: vector.is_empty() || value(&words, libc::AT_BASE) != 0,
            secure: value(&words, libc::AT_SECURE) != 0,
        }
    }

    fn unreachable(&self, mapped: &Mapped) -> Option<String> {
        let machine = std::env::consts::ARCH;
        Some(match self {
            Start { is_64_bit: false, .. } => {
                format!("it is a 32-bit program, while ringlet was built for {machine}")
            }
            Start { loader: false, .. } => "it is statically linked".to_owned(),
            _ if mapped.musl => "it is linked with musl, while ringlet needs glibc".to_owned(),
            _ if mapped.anything && !mapped.glibc => "its loader is not glibc's".to_owned(),
            _ => return None,
        })
    }
}

fn pairs(vector: &[u8], width: usize) -> Vec<(u64, u64)> {
    let word = |bytes: &[u8]| {
        let mut word = [0; 8];
        word[..width].copy_from_slice(bytes);
        u64::from_le_bytes(word)
    };
    vector
        .chunks_exact(2 * width)
        .map(|pair| (word(&pair[..width]), word(&pair[width..])))
        .collect()
}

fn value(pairs: &[(u64, u64)], name: u64) -> u64 {
    pairs.iter().find(|(each, _)| *each == name).map_or(0, |(_, value)| *value)
}

/// Does its environment ask for the library?
fn asks_for_library(directory: &Path) -> bool {
    let mut environment = Vec::new();
    let read = File::open(directory.join("environ"))
        .and_then(|file| file.take(ENVIRONMENT_MAX_BYTES).read_to_end(&mut environment));
    let preloads =
        |value: &[u8]| value.starts_with(b"LD_PRELOAD=") && contains(value, LIBRARY_NAME);
    read.is_ok() && environment.split(|byte| *byte == 0).any(preloads)
}

/// The kernel starts no program with more.
const ENVIRONMENT_MAX_BYTES: u64 = 6 << 20;
/// Beyond what any program descends from.
const ANCESTORS_MAX: usize = 256;

fn wrapped_ancestor(pid: u32) -> Option<(u32, String)> {
    let parent = |pid: &u32| processes::parent_of(*pid).filter(|parent| *parent > 1);
    let ancestors = std::iter::successors(parent(&pid), parent).take(ANCESTORS_MAX);
    let is_wrapped =
        |pid: &u32| Mapped::by(&processes::directory(*pid)).is_ok_and(|mapped| mapped.preloaded);
    ancestors.into_iter().find(is_wrapped).map(|pid| (pid, processes::program_of(pid)))
}

/// By what it was started, as far as that helps to find the place.
fn started(pid: u32) -> String {
    match processes::parent_of(pid).map(|parent| (processes::program_of(parent), parent)) {
        Some((program, parent)) if !program.is_empty() => {
            format!(", but by {}", processes::name(&program, parent))
        }
        _ => String::new(),
    }
}
