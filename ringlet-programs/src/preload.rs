//! How a program comes to load the library: where that lies, and what the program's environment must say.

use std::env;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail, ensure};

use crate::settings::{Environment, LIBRARY_ENVIRONMENT, set_variable};

pub const LIBRARY_NAME: &str = "libringlet_preload.so";
const PRELOAD_ENVIRONMENT: &str = "LD_PRELOAD";
const SANITIZER_ENVIRONMENT: &str = "ASAN_OPTIONS";
/// GCC's address sanitizer wants its library before all others, or else this.
const SANITIZER_MAY_COME_LATER: &str = "verify_asan_link_order";

pub fn library() -> anyhow::Result<PathBuf> {
    beside(LIBRARY_NAME, LIBRARY_ENVIRONMENT)
}

/// A library of ours: named by the environment, beside the command (as built), or where `make install` puts it.
pub fn beside(name: &str, variable: &str) -> anyhow::Result<PathBuf> {
    if let Some(path) = env::var_os(variable).filter(|path| !path.is_empty()) {
        let path = std::path::absolute(path)?;
        ensure!(path.is_file(), "{variable} names {}, which is no file", path.display());
        return Ok(path);
    }
    let command =
        env::current_exe().context("cannot tell where the ringlet command itself lies")?;
    let beside = command.parent().unwrap_or(Path::new("/"));
    let installed = beside.parent().unwrap_or(beside).join("lib/ringlet");
    for directory in [beside, &installed] {
        let path = directory.join(name);
        if path.is_file() {
            return Ok(path);
        }
    }
    bail!(
        "{name} is neither in {} nor in {}; build it with `make build`, or name it in {variable}",
        beside.display(),
        installed.display()
    )
}

fn variable(environment: &Environment, name: &str) -> Option<OsString> {
    environment.iter().find(|(each, _)| each == name).map(|(_, value)| value.clone())
}

/// Has programs that are started with this environment load the library.
pub fn preload(environment: &mut Environment, library: &Path) -> anyhow::Result<()> {
    let present = variable(environment, PRELOAD_ENVIRONMENT);
    let list = preload_list(library, present.as_deref())?;
    set_variable(environment, PRELOAD_ENVIRONMENT, list);
    if let Some(options) = sanitizer_options(variable(environment, SANITIZER_ENVIRONMENT)) {
        set_variable(environment, SANITIZER_ENVIRONMENT, options);
    }
    Ok(())
}

/// Has them not load it.
pub fn unload(environment: &mut Environment) {
    if let Some(present) = variable(environment, PRELOAD_ENVIRONMENT).filter(|it| !it.is_empty()) {
        set_variable(environment, PRELOAD_ENVIRONMENT, without_ours(&present));
    }
}

/// What LD_PRELOAD must say: the library, then what is there.
pub fn preload_list(library: &Path, present: Option<&OsStr>) -> anyhow::Result<OsString> {
    ensure!(
        !library.as_os_str().as_bytes().iter().any(is_preload_separator),
        "LD_PRELOAD cannot hold a path with a blank or a colon, such as {}; move the library, or name a copy of it in \
         {LIBRARY_ENVIRONMENT}",
        library.display()
    );
    let others = without_ours(present.unwrap_or_default());
    // The environment may name it as it likes.
    let others = others.as_bytes().split(is_preload_separator);
    let others =
        others.filter(|other| !other.is_empty() && *other != library.as_os_str().as_bytes());
    let list: Vec<&[u8]> = [library.as_os_str().as_bytes()].into_iter().chain(others).collect();
    Ok(OsString::from_vec(list.join(&b':')))
}

/// For this program, or one that it starts: the address sanitizer's options, unless they say already what we would have them say.
fn sanitizer_options(present: Option<OsString>) -> Option<OsString> {
    let present = present.unwrap_or_default();
    let named = SANITIZER_MAY_COME_LATER.as_bytes();
    if present.as_bytes().windows(named.len()).any(|word| word == named) {
        return None;
    }
    let mut options = OsString::from(format!("{SANITIZER_MAY_COME_LATER}=0"));
    if !present.is_empty() {
        options.push(":");
        options.push(present);
    }
    Some(options)
}

/// What is preloaded but is no copy of our library: two copies would interpose upon each other.
fn without_ours(present: &OsStr) -> OsString {
    let is_other = |path: &&[u8]| {
        Path::new(OsStr::from_bytes(path)).file_name() != Some(OsStr::new(LIBRARY_NAME))
    };
    let list: Vec<&[u8]> =
        present.as_bytes().split(is_preload_separator).filter(is_other).collect();
    OsString::from_vec(list.join(&b':'))
}

fn is_preload_separator(byte: &u8) -> bool {
    matches!(byte, b' ' | b':')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sanitizers_are_told_once_that_they_come_later() {
        let options = |present: &str| sanitizer_options(Some(present.into()));
        assert_eq!(sanitizer_options(None), Some("verify_asan_link_order=0".into()));
        assert_eq!(
            options("detect_leaks=0"),
            Some("verify_asan_link_order=0:detect_leaks=0".into())
        );
        assert_eq!(options("a=1:verify_asan_link_order=1"), None);
    }

    #[test]
    fn what_was_preloaded_stays_and_we_are_not_repeated() {
        let list = |present| {
            preload_list(Path::new("/new/libringlet_preload.so"), Some(OsStr::new(present)))
                .unwrap()
        };
        assert_eq!(list(""), "/new/libringlet_preload.so");
        assert_eq!(list("/a.so /b.so:c.so"), "/new/libringlet_preload.so:/a.so:/b.so:c.so");
        assert_eq!(
            list("/a.so:/new/libringlet_preload.so:/old/libringlet_preload.so"),
            "/new/libringlet_preload.so:/a.so"
        );
        assert!(preload_list(Path::new("/with blank/x.so"), None).is_err());
    }
}
