//! Which module of this crate and of `ringlet` uses which, read from the sources: a cycle is one knot, in which nothing can be understood, tested or replaced alone.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// Name of each module, and its source without comments and tests.
fn sources() -> BTreeMap<String, String> {
    fn walk(folder: &Path, within: &[String], found: &mut BTreeMap<String, String>) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let stem = path.file_stem().unwrap().to_string_lossy().into_owned();
            let mut name = within.to_vec();
            if path.is_dir() {
                name.push(stem);
                walk(&path, &name, found);
                continue;
            }
            if !["mod", "lib"].contains(&&stem[..]) {
                name.push(stem);
            }
            let source = std::fs::read_to_string(&path).unwrap();
            let source = source.split("#[cfg(test)]\nmod tests").next().unwrap();
            let lines = source.lines().map(|line| line.split("//").next().unwrap());
            found.insert(name.join("::"), lines.collect::<Vec<_>>().join("\n"));
        }
    }
    let mut found = BTreeMap::new();
    let ours = Path::new(env!("CARGO_MANIFEST_DIR"));
    for folder in [ours.join("src"), ours.join("../ringlet/src")] {
        walk(&folder, &[], &mut found);
    }
    found
}

/// `a::{b, c::{d}}` as `a::b` and `a::c::d`.
fn spread(tree: &str) -> Vec<String> {
    let Some((before, rest)) = tree.split_once('{') else { return vec![tree.into()] };
    let inner = &rest[..rest.rfind('}').unwrap()];
    let (mut depth, mut parts) = (0, vec![String::new()]);
    for c in inner.chars() {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                parts.push(String::new());
                continue;
            }
            _ => {}
        }
        parts.last_mut().unwrap().push(c);
    }
    let parts = parts.iter().filter(|part| !part.is_empty());
    parts.flat_map(|part| spread(&format!("{before}{part}"))).collect()
}

/// All paths that a source names, from `crate`, `super` or `self` on.
fn paths(source: &str) -> Vec<String> {
    let mut found = Vec::new();
    for (at, _) in source.match_indices("use ") {
        let line = source[..at].rsplit('\n').next().unwrap();
        let (true, Some((tree, _))) = (
            ["", "pub ", "pub(super) "].contains(&line.trim_start()),
            source[at + 4..].split_once(';'),
        ) else {
            continue;
        };
        // What it is called here does not matter; the comma or brace behind that does.
        let mut renamed = false;
        let words = tree.split_whitespace().map(|word| {
            let name = std::mem::replace(&mut renamed, word == "as");
            let is_name = |c: char| c.is_alphanumeric() || c == '_';
            if name || word == "as" { word.trim_start_matches(is_name) } else { word }
        });
        found.extend(spread(&words.collect::<String>()));
    }
    for start in ["crate::", "super::"] {
        let begins = |at: &usize| !source[..*at].ends_with("super::");
        for at in source.match_indices(start).map(|(at, _)| at).filter(begins) {
            let is_path = |c: char| c.is_alphanumeric() || c == '_' || c == ':';
            let end = source[at..].find(|c| !is_path(c)).map_or(source.len(), |n| at + n);
            found.push(source[at..end].trim_end_matches(':').into());
        }
    }
    found
}

/// The module that a path named in `here` lies in.
fn resolve(path: &str, here: &str, modules: &BTreeMap<String, String>) -> Option<String> {
    let mut place: Vec<&str> = here.split("::").filter(|part| !part.is_empty()).collect();
    let mut parts = path.split("::").peekable();
    match *parts.peek()? {
        "crate" | "ringlet" => {
            place.clear();
            parts.next();
        }
        "self" => drop(parts.next()),
        "super" => {
            while parts.next_if(|part| *part == "super").is_some() {
                place.pop()?;
            }
        }
        _ => return None,
    }
    place.extend(parts);
    while !modules.contains_key(&place.join("::")) {
        place.pop()?;
    }
    Some(place.join("::"))
}

fn arrows() -> BTreeMap<String, BTreeSet<String>> {
    let modules = sources();
    let used = |(name, source): (&String, &String)| {
        let named = paths(source).into_iter().filter_map(|path| resolve(&path, name, &modules));
        (name.clone(), named.filter(|other| other != name).collect())
    };
    modules.iter().map(used).collect()
}

fn reached(from: &str, arrows: &BTreeMap<String, BTreeSet<String>>) -> BTreeSet<String> {
    let (mut found, mut next) = (BTreeSet::new(), vec![from.to_string()]);
    while let Some(name) = next.pop() {
        next.extend(arrows[&name].iter().filter(|other| found.insert((*other).clone())).cloned());
    }
    found
}

#[test]
fn modules_use_each_other_in_no_circle() {
    let arrows = arrows();
    assert!(arrows["socket::transfer::send"].contains("socket::table"), "the sources are not understood");
    let reach: BTreeMap<_, _> =
        arrows.keys().map(|name| (name.clone(), reached(name, &arrows))).collect();
    let mut knots = BTreeSet::new();
    for name in arrows.keys().filter(|name| reach[*name].contains(*name)) {
        let with: Vec<_> =
            reach[name].iter().filter(|other| reach[*other].contains(name)).cloned().collect();
        knots.insert(with);
    }
    assert_eq!(knots, BTreeSet::new());
}

/// Which kind of kernel socket it serves only a carrier asks, and nobody who moves bytes or waits for them.
#[test]
fn only_carriers_ask_for_the_kind_of_a_socket() {
    const MAY: &[&str] = &["socket::carrier", "socket::table"];
    const QUESTIONS: &[&str] = &[
        "is_unix",
        "is_packets",
        "is_datagram",
        "Kind::Tcp",
        "Kind::UnixStream",
        "Kind::Packets",
        "Kind::Datagrams",
    ];
    let may = |name: &str| MAY.contains(&name) || name.starts_with("socket::carrier::");
    let sources = sources();
    let asks = |(name, source): &(&String, &String)| {
        name.starts_with("socket")
            && !may(name)
            && QUESTIONS.iter().any(|asked| source.contains(asked))
    };
    let found: Vec<_> = sources.iter().filter(asks).map(|(name, _)| name).collect();
    assert!(found.is_empty(), "{found:?}");
    let agent = Path::new(env!("CARGO_MANIFEST_DIR")).join("../ringlet-agent/src");
    for entry in std::fs::read_dir(agent).unwrap() {
        let path = entry.unwrap().path();
        let source = std::fs::read_to_string(&path).unwrap();
        let asked = QUESTIONS.iter().find(|asked| source.contains(**asked));
        assert_eq!(asked, None, "{path:?}");
    }
}
