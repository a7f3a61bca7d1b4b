//! Which module of this crate and of `ringlet` uses which, read from the sources: a cycle is one knot, in which nothing can be understood, tested or replaced
//! alone.

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
    let of_tests = found.iter().flat_map(|(parent, source)| {
        let declared = source.split("#[cfg(test)]\nmod ").skip(1);
        declared.filter_map(move |rest| {
            let (name, _) = rest.split_once(';')?;
            let parts = [&parent[..], name].into_iter().filter(|part| !part.is_empty());
            Some(parts.collect::<Vec<_>>().join("::"))
        })
    });
    for name in of_tests.collect::<Vec<_>>() {
        assert!(found.remove(&name).is_some(), "{name} is declared, and not there");
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

/// What its `use` lines name, and whether others see that under this module's name (`pub use`); and the source without them.
fn uses(source: &str) -> (Vec<(bool, String)>, String) {
    let (mut found, mut rest) = (Vec::new(), String::new());
    let mut at = 0;
    for (start, _) in source.match_indices("use ") {
        let line = source[..start].rsplit('\n').next().unwrap().trim_start();
        let (true, Some((tree, _))) =
            (["", "pub ", "pub(super) "].contains(&line), source[start + 4..].split_once(';'))
        else {
            continue;
        };
        // What it is called here does not matter; the comma or brace behind that does.
        let mut renamed = false;
        let words = tree.split_whitespace().map(|word| {
            let name = std::mem::replace(&mut renamed, word == "as");
            let is_name = |c: char| c.is_alphanumeric() || c == '_';
            if name || word == "as" { word.trim_start_matches(is_name) } else { word }
        });
        let tree = words.collect::<String>();
        found.extend(spread(&tree).into_iter().map(|path| (!line.is_empty(), path)));
        rest += &source[at..start];
        at = start + 4 + source[start + 4..].find(';').unwrap();
    }
    (found, rest + &source[at..])
}

/// All paths in code that begin with one of these names.
fn paths(code: &str, starts: impl Iterator<Item = String>) -> Vec<String> {
    let is_part = |c: char| c.is_alphanumeric() || c == '_' || c == ':';
    let mut found = Vec::new();
    for start in starts.map(|name| name + "::") {
        for at in code.match_indices(&start).map(|(at, _)| at) {
            if !code[..at].ends_with(is_part) {
                let end = code[at..].find(|c| !is_part(c)).map_or(code.len(), |n| at + n);
                found.push(code[at..end].trim_end_matches(':').into());
            }
        }
    }
    found
}

fn last(path: &str) -> String {
    path.trim_end_matches("::self").rsplit("::").next().unwrap().into()
}

struct Modules {
    sources: BTreeMap<String, String>,
    /// Of each module: what it only passes on, by its name there.
    exports: BTreeMap<String, BTreeMap<String, String>>,
}

impl Modules {
    fn read() -> Modules {
        let sources = sources();
        let exports = |source: &String| {
            let passed_on = uses(source).0.into_iter().filter(|(public, _)| *public);
            passed_on.map(|(_, path)| (last(&path), path)).collect::<BTreeMap<_, _>>()
        };
        let exports = sources.iter().map(|(name, source)| (name.clone(), exports(source)));
        Modules { exports: exports.collect(), sources }
    }

    fn children(&self, of: &str) -> Vec<String> {
        let within = if of.is_empty() { String::new() } else { format!("{of}::") };
        let below = self.sources.keys().filter_map(|name| name.strip_prefix(&within));
        below.filter(|rest| !rest.is_empty() && !rest.contains("::")).map(String::from).collect()
    }

    /// The module in which that lies which a path named in `here` leads to.
    fn resolve(&self, path: &str, here: &str) -> Option<String> {
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
            child if self.children(here).iter().any(|name| name == child) => {}
            _ => return None,
        }
        let mut item = None;
        place.extend(parts);
        while !self.sources.contains_key(&place.join("::")) {
            item = Some(place.pop()?);
        }
        let module = place.join("::");
        let passed_on = item.and_then(|item| self.exports[&module].get(item));
        passed_on.and_then(|path| self.resolve(path, &module)).or(Some(module))
    }

    fn arrows(&self) -> BTreeMap<String, BTreeSet<String>> {
        let used = |(name, source): (&String, &String)| {
            let (used, code) = uses(source);
            let known: BTreeMap<_, _> = used.iter().map(|(_, path)| (last(path), path)).collect();
            let starts = known.keys().cloned().chain(self.children(name));
            let named = paths(&code, starts.chain(["crate", "super"].map(String::from)));
            let named = named.into_iter().map(|path| match path.split_once("::") {
                Some((start, rest)) if known.contains_key(start) => {
                    format!("{}::{rest}", known[start].trim_end_matches("::self"))
                }
                _ => path,
            });
            let used = used.iter().filter(|(public, _)| !public).map(|(_, path)| path.clone());
            let modules = used.chain(named).filter_map(|path| self.resolve(&path, name));
            (name.clone(), modules.filter(|other| other != name).collect())
        };
        self.sources.iter().map(used).collect()
    }
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
    let arrows = Modules::read().arrows();
    let uses = |a: &str, b: &str| assert!(arrows[a].contains(b), "{a} uses {b}, which is not seen");
    uses("socket::transfer::send", "socket::table");
    // A parent its child; and what one module passes on, another has.
    uses("socket", "socket::table");
    uses("socket::process", "socket::epoll::life");
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
