//! Ways to libc's functions that lead around a preloaded library.

use libc::{RTLD_DEEPBIND, RTLD_LAZY, RTLD_NOW};
use tempfile::TempDir;

use crate::case::*;
use crate::rare;
use crate::sys;

const LINE: &[u8] = b"a line";

/// How the library finds what it calls: at the first call, at the start, or there without a table of jumps.
const LINKED: [&str; 3] = ["-Wl,-z,lazy", "-Wl,-z,relro,-z,now", "-fno-plt -Wl,-z,relro,-z,now"];
const FUNCTIONS: [&str; 5] = ["by_call", "by_pointer", "by_name", "by_next", "by_handle"];

const NEIGHBOURS: [&str; 2] = ["by_neighbour", "by_call"];

/// The library, built in a directory of its own; none where there is no compiler.
fn library(side: &mut Side, linked: &str) -> Option<(TempDir, String)> {
    let place = TempDir::new().expect("a directory");
    let path = |name: &str| place.path().join(name).to_str().expect("a name").to_string();
    let (source, library) = (path("around.c"), path("around.so"));
    std::fs::write(&source, include_str!("../around.c")).expect("the source is written");
    let command = format!("cc -shared -fPIC -O1 {linked} -o {library} {source} 2>/dev/null");
    let built = sys::system(&command) == 0;
    side.tell(i64::from(built));
    if !built {
        skipped();
    }
    built.then_some((place, library))
}

/// The other side of `library`.
fn is_there(side: &mut Side) -> bool {
    let built = side.hear() != 0;
    if !built {
        skipped();
    }
    built
}

fn skipped() {
    say("skipped: no compiler here (cc)");
}

/// Asks each of these functions, and hears the answer.
fn ask(end: End, functions: &[&str]) {
    for _ in functions {
        end.send(LINE);
        end.recv_exact(LINE.len());
    }
}

fn answer(end: End, library: usize, functions: &[&str]) {
    for function in functions {
        end.until_unread(LINE.len());
        record(function, rare::call(library, function, end.0));
    }
}

pub const CASES: &[Case] = &[
    pair(
        "around/by_handle",
        "libc's functions, looked up by a handle of libc.so.6 and by version, see the connection's bytes",
        |a| {
            let end = a.moved();
            for _ in 0..2 {
                end.send(LINE);
                end.recv_exact(LINE.len());
            }
            a.sync();
        },
        |b| {
            let end = b.moved();
            let libc = rare::load("libc.so.6", RTLD_LAZY);
            for version in [None, Some(rare::OLDEST_VERSION)] {
                end.until_unread(LINE.len());
                record("poll", rare::poll_by_handle(libc, version, end.0));
                record("recv", rare::recv_by_handle(libc, version, end.0, 100));
                record("send", rare::send_by_handle(libc, version, end.0, LINE));
            }
            b.sync();
        },
    ),
    pair(
        "around/deep_library",
        "a library that is loaded with RTLD_DEEPBIND uses a connection, however it was linked",
        |a| {
            for _ in LINKED {
                if is_there(a) {
                    let end = a.moved();
                    ask(end, &FUNCTIONS);
                    end.close();
                }
            }
        },
        |b| {
            for linked in LINKED {
                if let Some((_place, path)) = library(b, linked) {
                    let library = rare::load(&path, RTLD_LAZY | RTLD_DEEPBIND);
                    let end = b.moved();
                    answer(end, library, &FUNCTIONS);
                    end.close();
                }
            }
        },
    ),
    pair(
        "around/deep_neighbour",
        "a library that is found by the search path of the one that loads it, with RTLD_DEEPBIND, uses a connection",
        |a| {
            if is_there(a) {
                let end = a.moved();
                ask(end, &NEIGHBOURS);
            }
        },
        |b| {
            if let Some((place, path)) = library(b, "-Wl,-z,lazy '-Wl,-rpath,$ORIGIN'") {
                std::fs::copy(&path, place.path().join("neighbour.so")).expect("a copy");
                let library = rare::load(&path, RTLD_NOW);
                let loaded = rare::call(library, "loads_neighbour", -1);
                record("loads_neighbour", loaded);
                let end = b.moved();
                answer(end, library, &NEIGHBOURS);
            }
        },
    )
    // As `around/deep_constructor`.
    .steady(),
    pair(
        "around/library",
        "a library that is loaded as most are uses a connection",
        |a| {
            if is_there(a) {
                let end = a.moved();
                ask(end, &FUNCTIONS);
            }
        },
        |b| {
            if let Some((_place, path)) = library(b, LINKED[0]) {
                let library = rare::load(&path, RTLD_NOW);
                let end = b.moved();
                answer(end, library, &FUNCTIONS);
            }
        },
    ),
    pair(
        "around/deep_constructor",
        "the constructor of a library that is loaded with RTLD_DEEPBIND uses a moved connection, and its functions another one",
        |a| {
            if is_there(a) {
                let end = a.moved();
                end.send(LINE);
                end.recv_exact(LINE.len());
                let other = a.moved();
                ask(other, &FUNCTIONS);
            }
        },
        |b| {
            if let Some((_place, path)) = library(b, LINKED[0]) {
                let end = b.moved();
                end.until_unread(LINE.len());
                rare::set_environment("AROUND_FD", &end.0.to_string());
                let library = rare::load(&path, RTLD_NOW | RTLD_DEEPBIND);
                record("by_constructor", rare::call(library, "by_constructor", end.0));
                let other = b.moved();
                answer(other, library, &FUNCTIONS);
            }
        },
    )
    // A sender that has just gone back to the kernel can't send again what stands in the ring: an error, told in SPECIFICATION.md.
    .steady(),
    pair(
        "around/second_libc",
        "a library with a libc of its own (dlmopen) uses a moved connection, and one that is made later",
        |a| {
            if is_there(a) {
                let end = a.moved();
                // (As in `around/deep_constructor`, which has bytes there: nothing may stand in the ring.)
                a.sync();
                ask(end, &FUNCTIONS);
                let later = a.fresh();
                ask(later, &FUNCTIONS);
            }
        },
        |b| {
            if let Some((_place, path)) = library(b, LINKED[0]) {
                let end = b.moved();
                let library = rare::load_apart(&path, RTLD_NOW);
                b.sync();
                answer(end, library, &FUNCTIONS);
                let later = b.fresh();
                answer(later, library, &FUNCTIONS);
            }
        },
    ),
];
