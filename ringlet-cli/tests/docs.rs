//! Completions and manual pages know every subcommand, and the manual every key of the configuration.

mod support;

use std::fs;

use ringlet::config::KEYS;
use support::{ringlet, text};

const SUBCOMMANDS: [&str; 8] =
    ["run", "ss", "doctor", "bench", "compare", "config", "completion", "man"];

#[test]
fn every_shell_completes_every_subcommand() {
    for shell in ["bash", "zsh", "fish"] {
        let (script, _) = text(&ringlet(&["completion", shell]).output().unwrap());
        for subcommand in SUBCOMMANDS {
            assert!(script.contains(subcommand), "{shell}: {subcommand}");
        }
        assert!(script.contains("spin-us") && !script.contains("probe-"), "{shell}");
    }
}

#[test]
fn the_manual_has_a_page_for_each_subcommand_and_every_key() {
    let directory = tempfile::tempdir().unwrap();
    let pages = directory.path().join("man1");
    assert!(ringlet(&["man", pages.to_str().unwrap()]).status().unwrap().success());
    for subcommand in SUBCOMMANDS {
        let page = fs::read_to_string(pages.join(format!("ringlet-{subcommand}.1"))).unwrap();
        assert!(page.contains(&format!(".TH ringlet-{subcommand} 1")), "{page}");
    }
    let page = fs::read_to_string(pages.join("ringlet.1")).unwrap();
    for key in &KEYS {
        assert!(page.contains(key.name) && page.contains(key.environment), "{}", key.name);
    }
    assert_eq!(text(&ringlet(&["man"]).output().unwrap()).0, page);
}

#[test]
fn the_version_is_told() {
    let (out, _) = text(&ringlet(&["--version"]).output().unwrap());
    assert_eq!(out.trim(), format!("ringlet {}", env!("CARGO_PKG_VERSION")));
}
