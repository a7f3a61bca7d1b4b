//! The library as it is now, or that which TESTED_LIBRARY names. Cargo does not build it for tests, since nothing can link with it.

use std::path::PathBuf;
use std::process::Command;

pub fn build() -> PathBuf {
    if let Some(named) = std::env::var_os("TESTED_LIBRARY") {
        return named.into();
    }
    // TARGET/PROFILE/deps/TEST
    let us = std::env::current_exe().unwrap();
    let profile = us.ancestors().nth(2).unwrap();
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["build", "--quiet", "--package", "ringlet-preload", "--target-dir"]);
    cargo.arg(profile.parent().unwrap());
    if !cfg!(debug_assertions) {
        cargo.arg("--release");
    }
    let status = cargo.current_dir(env!("CARGO_MANIFEST_DIR")).status().unwrap();
    assert!(status.success(), "the library cannot be built");
    profile.join("libringlet_preload.so")
}
