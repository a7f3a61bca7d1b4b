//! Processes that share a connection by fork, of which one is killed where it hurts.
#![cfg(target_arch = "x86_64")]

mod library;

use std::path::Path;
use std::process::Command;

#[test]
fn what_a_killed_process_sent_again_its_child_does_not_send_once_more() {
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join("sibling");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs/sibling.c");
    let mut compiler = Command::new("cc");
    compiler.args(["-O1", "-Wall", "-o"]).arg(&program).arg(source);
    assert!(compiler.status().unwrap().success());
    let mut command = Command::new(program);
    command.env("LD_PRELOAD", library::build()).env_remove("RINGLET_UNFORGIVING");
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
}
