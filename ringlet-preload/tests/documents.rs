//! The documents against what they speak of: the table of calls against the symbols of the library, the reason codes
//! against the code, links and the names that they quote against the files.

mod library;
mod specification;

use std::collections::BTreeSet;

use object::{Object, ObjectSymbol};
use ringlet::reasons::Reason;
use specification::{SPECIFICATION, code, names, read, root, table};

const DOCUMENTS: [&str; 12] = [
    "README.md",
    "ARCHITECTURE.md",
    "SPECIFICATION.md",
    "REVIEW.md",
    "HACKING.md",
    "CHANGELOG.md",
    "tests/README.md",
    "conformance/README.md",
    "deploy/README.md",
    "fuzz/README.md",
    "ringlet-node/THREATS.md",
    "notes/README.md",
];
/// Exported, but no call of libc's.
const OURS: [&str; 1] = ["ringlet_path"];

/// The functions that the library puts in front of libc's.
fn exported() -> BTreeSet<String> {
    let bytes = std::fs::read(library::build()).unwrap();
    let file = object::File::parse(&*bytes).unwrap();
    let symbols = file.dynamic_symbols().filter(|symbol| symbol.is_definition());
    symbols.map(|symbol| symbol.name().unwrap().to_string()).collect()
}

#[test]
fn the_table_of_calls_is_what_the_library_exports() {
    let seen = names(&table("calls that the library sees"));
    let unseen = names(&table("calls that it does not see"));
    let exported: BTreeSet<_> =
        exported().into_iter().filter(|name| !OURS.contains(&name.as_str())).collect();
    let missing: Vec<_> = exported.difference(&seen).collect();
    assert!(missing.is_empty(), "exported, but not in the table: {missing:?}");
    let absent: Vec<_> = seen.difference(&exported).collect();
    assert!(absent.is_empty(), "in the table, but not exported: {absent:?}");
    let both: Vec<_> = seen.intersection(&unseen).collect();
    assert!(both.is_empty(), "in both tables: {both:?}");
}

#[test]
fn each_call_and_option_has_one_of_the_treatments() {
    let treatments = names(&table("treatments"));
    for name in ["calls that the library sees", "calls that it does not see", "options"] {
        for row in table(name) {
            let [_, treatment, _] = &row[..] else { panic!("not three columns: {row:?}") };
            assert!(treatments.contains(treatment), "unknown treatment: {row:?}");
        }
    }
}

#[test]
fn the_reason_codes_are_those_of_the_code() {
    let told = table("reasons").into_iter().map(|row| {
        let code = code(&row[0]).next().unwrap_or_default().to_string();
        (code, row[1].clone())
    });
    let known = Reason::ALL.iter().map(|reason| (reason.code().into(), reason.sentence().into()));
    let (told, known): (BTreeSet<_>, BTreeSet<(String, String)>) =
        (told.collect(), known.collect());
    assert_eq!(told, known);
}

/// All that a folder's `.rs` files say.
fn sources(folder: &str) -> String {
    let mut said = String::new();
    let mut folders = vec![root().join(folder)];
    while let Some(folder) = folders.pop() {
        for path in std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
            match path.extension() {
                _ if path.is_dir() => folders.push(path),
                Some(extension) if extension == "rs" => said += &read(&path),
                _ => {}
            }
        }
    }
    said
}

/// By the library, and by a scene of tests/control/reasons.py; or by another test that it names, which looks at the code.
#[test]
fn each_reason_is_raised_and_provoked() {
    let declared = read(&root().join("ringlet/src/reasons.rs"));
    let (declared, _) = declared.split_once("impl From<Errno>").unwrap();
    let library = sources("ringlet/src").replace(declared, "")
        + &sources("ringlet-agent/src")
        + &sources("ringlet-node/src")
        + &sources("ringlet-preload/src");
    let scenes = read(&root().join("tests/control/reasons.py"));
    for reason in Reason::ALL {
        assert!(has_word(&library, &format!("Reason::{reason:?}")), "{reason:?} is never raised");
        let code = format!("\"{}\"", reason.code());
        let line = scenes.lines().find_map(|line| line.trim().strip_prefix(&format!("{code}: ")));
        let line = line.unwrap_or_else(|| panic!("no scene provokes {code}"));
        if let Some(other) = line.strip_prefix('"') {
            let file = root().join(other.trim_end_matches("\","));
            assert!(read(&file).contains(&code), "{} has no {code}", file.display());
        }
    }
}

#[test]
fn the_conformance_cases_that_are_named_exist() {
    let folder = root().join("conformance/src/cases");
    let sources = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let (mut cases, mut topics) = (BTreeSet::new(), BTreeSet::new());
    for path in sources {
        topics.insert(path.file_stem().unwrap().to_string_lossy().into_owned());
        cases.extend(read(&path).split('"').skip(1).step_by(2).map(String::from));
    }
    let mut named = 0;
    for document in ["README.md", "ARCHITECTURE.md", "REVIEW.md", "HACKING.md", SPECIFICATION] {
        for token in code(&read(&root().join(document))).filter(|token| !token.contains('.')) {
            let topic = token.split_once('/').map(|(topic, _)| topic);
            if topic.is_some_and(|topic| topics.contains(topic)) {
                assert!(cases.contains(token), "{document}: there is no case {token}");
                named += 1;
            }
        }
    }
    assert!(named > 0, "the documents name no case");
}

/// `[text](target)`.
fn links(text: &str) -> impl Iterator<Item = (&str, &str)> {
    text.split("](").zip(text.split("](").skip(1)).filter_map(|(before, after)| {
        let (_, text) = before.rsplit_once('[')?;
        let (target, _) = after.split_once(')')?;
        Some((text, target))
    })
}

/// As GitHub makes them.
fn anchors(text: &str) -> BTreeSet<String> {
    let headings = text.lines().filter(|line| line.starts_with('#'));
    headings
        .map(|line| {
            let heading = line.trim_start_matches('#').trim().to_lowercase();
            let kept = heading.chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c));
            kept.map(|c| if c == ' ' { '-' } else { c }).collect()
        })
        .collect()
}

fn has_word(text: &str, word: &str) -> bool {
    let part_of_word = |c: char| c.is_alphanumeric() || c == '_';
    text.match_indices(word).any(|(at, _)| {
        !text[..at].ends_with(part_of_word) && !text[at + word.len()..].starts_with(part_of_word)
    })
}

/// A link leads to a file, and to a heading if it names one; a link whose text is code leads to a file that has it.
#[test]
fn links_lead_to_what_they_name() {
    let mut checked = 0;
    for document in DOCUMENTS {
        let path = root().join(document);
        let text = read(&path);
        for (shown, target) in links(&text).filter(|(_, target)| !target.contains("://")) {
            let (file, anchor) = target.split_once('#').unwrap_or((target, ""));
            let file =
                if file.is_empty() { path.clone() } else { path.parent().unwrap().join(file) };
            assert!(file.exists(), "{document}: [{shown}]({target}) leads nowhere");
            if !anchor.is_empty() {
                let known = anchors(&read(&file)).contains(anchor);
                assert!(known, "{document}: {target} has no such heading");
            }
            for name in code(shown).filter(|_| file.is_file()) {
                assert!(has_word(&read(&file), name), "{document}: {target} has no {name}");
            }
            checked += 1;
        }
    }
    assert!(checked > 0, "the documents have no links");
}
