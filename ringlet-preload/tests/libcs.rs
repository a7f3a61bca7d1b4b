//! The same library serves programs of glibc and of musl: one that is built for each has its connection moved, and behaves as it does
//! without us. Where there is no musl (Debian: musl-tools), its test says so and is skipped.

mod library;

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::Command;

/// `moves.c` as this compiler makes it; `None`: there is no such compiler.
fn program(compiler: &str) -> Option<PathBuf> {
    let to = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("moves-{compiler}"));
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs/moves.c");
    let mut command = Command::new(compiler);
    command.args(["-O1", "-Wall", "-o"]).arg(&to).arg(source).args(["-lpthread", "-ldl"]);
    match command.status() {
        Ok(status) => assert!(status.success(), "{compiler} cannot build it"),
        Err(error) if error.kind() == ErrorKind::NotFound => return None,
        Err(error) => panic!("{compiler}: {error}"),
    }
    Some(to)
}

fn moves(program: &Path) {
    let trips = |command: &mut Command| {
        let output = command.output().unwrap();
        let said = String::from_utf8(output.stdout).unwrap();
        let errors = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success(), "{said}{errors}");
        said.trim().parse::<i32>().unwrap()
    };
    assert_eq!(trips(&mut Command::new(program)), -1, "moved without the library");
    let moved = trips(Command::new(program).env("LD_PRELOAD", library::build()));
    assert!(moved >= 0, "not moved");
}

#[test]
fn a_program_of_glibc_has_its_connection_moved() {
    moves(&program("cc").expect("the linker that Rust uses is a C compiler"));
}

#[test]
fn a_program_of_musl_has_its_connection_moved() {
    match program("musl-gcc") {
        Some(program) => moves(&program),
        None => eprintln!("SKIPPED: no musl-gcc on this machine (Debian: musl-tools)"),
    }
}
