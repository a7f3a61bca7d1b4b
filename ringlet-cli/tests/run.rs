//! `ringlet run` must be invisible: the program's own pid, status, signals and descriptors, and env(1)'s exit codes.

mod support;

use std::fs;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use support::{harmless_library, ringlet, text};

fn run(arguments: &[&str]) -> Command {
    let mut command = ringlet(&["run"]);
    command.env("RINGLET_LIBRARY", harmless_library()).args(arguments);
    command
}

fn output(arguments: &[&str]) -> (Option<i32>, String, String) {
    let output = run(arguments).output().unwrap();
    let (out, err) = text(&output);
    (output.status.code(), out, err)
}

/// A program of the system, by its name.
fn program(name: &str) -> PathBuf {
    let path = std::env::var_os("PATH").unwrap();
    std::env::split_paths(&path).map(|each| each.join(name)).find(|each| each.is_file()).unwrap()
}

/// Makes a program. Another process writes it: what this one has open for writing a child of another test's may have too until it runs its own
/// program, and nobody can run it meanwhile (ETXTBSY).
fn install(path: &Path, bytes: &[u8]) {
    let mut command = Command::new("install");
    command.args(["-m", "755", "/dev/stdin"]).arg(path).stdin(Stdio::piped());
    let mut child = command.spawn().unwrap();
    child.stdin.take().unwrap().write_all(bytes).unwrap();
    assert!(child.wait().unwrap().success());
}

#[test]
fn status_and_signals_are_the_programs_own() {
    assert_eq!(output(&["true"]), (Some(0), String::new(), String::new()));
    assert_eq!(output(&["--", "sh", "-c", "exit 7"]).0, Some(7));
    let killed = run(&["sh", "-c", "kill -TERM $$"]).status().unwrap();
    assert_eq!(killed.signal(), Some(15));
}

#[test]
fn what_cannot_run_has_the_exit_codes_of_env() {
    let (code, _, err) = output(&["no-such-program"]);
    assert_eq!((code, &*err), (Some(127), "ringlet: no-such-program: no such program\n"));
    let (code, _, err) = output(&["/etc/passwd"]);
    assert_eq!((code, &*err), (Some(126), "ringlet: /etc/passwd: not an executable file\n"));
    assert_eq!(output(&["/"]).0, Some(126));
    assert_eq!(output(&["--no-such-flag", "true"]).0, Some(125));
    assert_eq!(output(&["--spin-us", "1001", "true"]).0, Some(125));
    assert_eq!(output(&[]).0, Some(125));
    let gone = run(&["true"]).env("RINGLET_LIBRARY", "/no/library").output().unwrap();
    assert_eq!(gone.status.code(), Some(125));
    assert!(text(&gone).1.contains("/no/library"));
}

/// As execvp(3) has it: without `#!`, the shell's.
#[test]
fn a_script_without_a_first_line_is_the_shells() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("script");
    install(&path, b"echo \"$1\"; exit 5\n");
    let expected = (Some(5), "one two\n".into(), String::new());
    assert_eq!(output(&[path.to_str().unwrap(), "one two"]), expected);
}

#[test]
fn the_program_takes_the_place_of_the_command() {
    let child = run(&["sh", "-c", "echo $$"]).stdout(Stdio::piped()).spawn().unwrap();
    let pid = child.id();
    assert_eq!(text(&child.wait_with_output().unwrap()).0.trim(), pid.to_string());
}

#[test]
fn flags_and_library_reach_the_program() {
    let library = harmless_library().display().to_string();
    let show = ["sh", "-c", "echo \"$RINGLET_SPIN_US|$RINGLET_ONLY|$LD_PRELOAD\""];
    let (_, out, err) = output(&[&["--no-spin", "--only", ":1,[::1]:2", "--"], &show[..]].concat());
    assert_eq!(out, format!("0|:1,[::1]:2|{library}\n"));
    assert_eq!(err, "");
    let (_, out, _) = output(&["-q", "--config", "x", "sh", "-c", "echo $RINGLET_CONFIG"]);
    assert_eq!(out.trim(), std::env::current_dir().unwrap().join("x").to_str().unwrap());
    // What is there stays; ours is not repeated.
    for present in ["libm.so.6", &format!("libm.so.6:{library}"), &format!("{library} libm.so.6")] {
        let output = run(&show).env("LD_PRELOAD", present).output().unwrap();
        assert_eq!(text(&output).0, format!("||{library}:libm.so.6\n"));
    }
}

#[test]
fn errors_of_the_configuration_are_told_unless_quiet() {
    let told = |quiet: &[&str]| {
        let output =
            run(&[quiet, &["true"]].concat()).env("RINGLET_SPIN_US", "x").output().unwrap();
        assert_eq!(output.status.code(), Some(0));
        text(&output).1
    };
    assert_eq!(told(&[]), "ringlet: RINGLET_SPIN_US: spin_us: must be a whole number\n");
    assert_eq!(told(&["--quiet"]), "");
}

/// Whatever the parent set up must be found by the program as if ringlet had never been there: ignored signals, blocked
/// signals, closed descriptors.
#[test]
fn signals_and_descriptors_are_inherited_untouched() {
    let shell = |with_ringlet: bool| {
        let words = if with_ringlet { "\"$0\" run --" } else { "" };
        let script = format!(
            "trap '' PIPE HUP; exec 0<&- 2<&-; exec {words} sh -c 'grep \"^Sig[^Q]\" /proc/self/status; ls /proc/self/fd'"
        );
        let mut command = Command::new("sh");
        command.args(["-c", &script, env!("CARGO_BIN_EXE_ringlet")]);
        command.env("RINGLET_CONFIG", "/dev/null").env("RINGLET_LIBRARY", harmless_library());
        let (out, _) = text(&command.output().unwrap());
        assert!(out.contains("SigIgn:"), "{out}");
        out
    };
    assert_eq!(shell(true), shell(false));
}

/// Builds a statically linked program, if this machine can.
fn static_program(directory: &Path) -> Option<PathBuf> {
    let (source, path) = (directory.join("static.c"), directory.join("static"));
    fs::write(&source, "#include <stdlib.h>\n#include <stdio.h>\nint main(void) { puts(getenv(\"LD_PRELOAD\") ? \"preload\" : \"bare\"); return 3; }\n").unwrap();
    let built = Command::new("cc").arg("-static").arg("-o").arg(&path).arg(&source).output();
    if built.is_ok_and(|output| output.status.success()) {
        return Some(path);
    }
    eprintln!("skipped: cc -static does not work here");
    None
}

#[test]
fn a_static_program_runs_as_it_is_and_its_children_are_reached() {
    let directory = tempfile::tempdir().unwrap();
    let Some(path) = static_program(directory.path()) else { return };
    let path = path.to_str().unwrap();
    let sentence = |name: &str| {
        format!(
            "ringlet: {name} runs on the kernel's TCP, out of ringlet's reach: it is statically linked.\n"
        )
    };
    assert_eq!(output(&[path]), (Some(3), "preload\n".into(), sentence(path)));
    assert_eq!(output(&["-q", path]), (Some(3), "preload\n".into(), String::new()));

    // The same behind a script, and behind env.
    let script = directory.path().join("script");
    install(&script, format!("#!/usr/bin/env -S {path} x\n").as_bytes());
    let script = script.to_str().unwrap();
    assert_eq!(output(&[script]), (Some(3), "preload\n".into(), sentence(script)));
    assert_eq!(output(&["env", "A=1", path]).2, sentence("env"));
}

/// A program of another libc's, made from one of glibc's by changing the loader's name to one that isn't there.
#[test]
fn a_program_of_another_libc_is_not_preloaded() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("musl");
    let mut bytes = fs::read(program("true")).unwrap();
    let at = bytes.windows(9).position(|window| window == b"/ld-linux").expect("a loader");
    bytes[at..at + 9].copy_from_slice(b"/ld-other");
    install(&path, &bytes);
    let (code, _, err) = output(&[path.to_str().unwrap()]);
    assert_eq!(code, Some(127));
    assert!(err.contains("is neither glibc's nor musl's"), "{err}");
    assert!(err.contains("its interpreter is missing"), "{err}");
}

#[test]
fn a_program_that_gains_privileges_is_not_preloaded() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("setuid");
    install(&path, &fs::read(program("env")).unwrap());
    if chown(&path, Some(65534), None).is_err() {
        eprintln!("skipped: only root can make another user's set-user-ID program");
        return;
    }
    fs::set_permissions(&path, fs::Permissions::from_mode(0o4755)).unwrap();
    // Nor by the ringlet program that starts it.
    let mut command = run(&[path.to_str().unwrap()]);
    let output = command.env("LD_PRELOAD", "/x/libringlet_preload.so:libm.so.6").output().unwrap();
    let ((out, err), code) = (text(&output), output.status.code());
    if err.is_empty() {
        eprintln!("skipped: {} ignores set-user-ID", directory.path().display());
        return;
    }
    assert_eq!(code, Some(0));
    assert!(err.contains("it is set-user-ID"), "{err}");
    let is_ours =
        |line: &str| line.starts_with("LD_PRELOAD=") && line.contains("libringlet_preload");
    assert!(!out.lines().any(is_ours), "{out}");
}

#[test]
fn a_program_of_another_architecture_is_told_apart() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("foreign");
    let mut bytes = fs::read(program("true")).unwrap();
    // e_machine: IBM Z, in the wrong byte order, so that no emulator takes it.
    bytes[18..20].copy_from_slice(&22u16.to_le_bytes());
    install(&path, &bytes);
    let (code, _, err) = output(&[path.to_str().unwrap()]);
    assert_eq!(code, Some(126), "{err}");
    assert!(err.contains("64-bit program for IBM Z"), "{err}");
}

/// The adapter, which other programs may need for longer, keeps open nothing that the program has from its parent.
#[test]
fn an_adapter_keeps_nothing_of_its_programs() {
    let (mut read, write) = std::io::pipe().unwrap();
    let seed = std::process::id().to_string();
    let script = "exec \"$@\" 9>&2 2>/dev/null";
    let program = ["sh", "-c", "exec 9>&-; exec cat"];
    let mut command = run(&["sh", "-c", script, "sh", env!("CARGO_BIN_EXE_ringlet")]);
    command.args(["run", "--mirror", &seed, "--"]).args(program);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(write);
    let mut child = command.spawn().unwrap();
    drop(command);
    let (mut input, mut output) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
    input.write_all(b"?").unwrap();
    output.read_exact(&mut [0]).unwrap();
    // The program has closed its own, and is there still.
    let mut ready = [PollFd::new(read.as_fd(), PollFlags::POLLIN)];
    let ended = poll(&mut ready, PollTimeout::ZERO).unwrap();
    drop(input);
    assert!(child.wait().unwrap().success());
    assert_eq!(ended, 1);
    assert_eq!(read.read(&mut [0]).unwrap(), 0);
}
