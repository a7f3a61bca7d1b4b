//! The profiles that are shipped, and what the specification says of their keys.

use std::collections::BTreeSet;

use ringlet_sim::{Profile, SHIPPED};

fn keys(prefix: &str, value: &toml::Value, found: &mut BTreeSet<String>) {
    let toml::Value::Table(table) = value else {
        found.insert(prefix.into());
        return;
    };
    for (key, value) in table {
        let key = if prefix == "stacks" { "NAME" } else { key.as_str() };
        let dot = if prefix.is_empty() { "" } else { "." };
        keys(&format!("{prefix}{dot}{key}"), value, found);
    }
}

#[test]
fn the_specification_names_each_key() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../SPECIFICATION.md");
    let text = std::fs::read_to_string(path).unwrap();
    let (_, rest) = text.split_once("<!-- parameters -->").unwrap();
    let (table, _) = rest.split_once("<!-- /parameters -->").unwrap();
    let cells = table.lines().skip(3).filter_map(|line| line.split('|').nth(1));
    let told = cells.flat_map(|cell| cell.split('`').skip(1).step_by(2)).map(String::from);
    let mut known = BTreeSet::new();
    for (name, _) in SHIPPED {
        let profile = Profile::shipped(name).unwrap();
        keys("", &toml::Value::try_from(&profile).unwrap(), &mut known);
    }
    assert_eq!(told.collect::<BTreeSet<_>>(), known);
}

#[test]
fn a_profile_that_makes_no_sense_is_refused() {
    let (_, text) = SHIPPED[0];
    assert!(text.parse::<Profile>().is_ok());
    for (from, to) in [
        ("topology = \"ring\"", "topology = \"mesh\""),
        ("packet_bytes = 64", "packet_bytes = 65"),
        ("outstanding = 16", "outstanding = 0"),
        ("[link]", "[link]\nwidth = 3"),
        ("[link]", "[faults]\nlost = 1.5\n[link]"),
        ("[link]", "[ring]\nslots = 100\n[link]"),
    ] {
        let changed = text.replacen(from, to, 1);
        assert_ne!(changed, text);
        assert!(changed.parse::<Profile>().is_err(), "{to}");
    }
}
