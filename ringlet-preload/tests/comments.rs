//! What `ORDER` comments name: each memory ordering but Relaxed has a partner, and that partner is in the code. And how wide comments are.

mod specification;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use specification::{code, read, root};

const TAGS: [&str; 4] = ["ORDER:", "SAFETY:", "KERNEL:", "WHY:"];
const ORDERINGS: [&str; 5] = ["Acquire", "Release", "AcqRel", "SeqCst", "fence"];
const DEFINES: [&str; 9] =
    ["fn", "struct", "enum", "trait", "const", "static", "type", "mod", "macro_rules!"];

/// Characters of a line with a comment alone.
const COMMENT_WIDTH: usize = 160;

struct Source {
    path: PathBuf,
    lines: Vec<String>,
    /// Of the code, without comments.
    words: BTreeSet<String>,
    defined: BTreeSet<String>,
    /// What stands in an item: each word of its first line, with what is defined there.
    owned: BTreeSet<(String, String)>,
}

fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|word| !word.is_empty())
}

impl Source {
    fn new(path: &Path) -> Source {
        let lines: Vec<_> = read(path).lines().map(String::from).collect();
        let (mut seen, mut defined, mut owned) =
            (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
        let mut item = String::new();
        for line in &lines {
            let code = match line.trim_start() {
                comment if comment.starts_with("//") => continue,
                code => code.split(" //").next().unwrap_or_default(),
            };
            if line.starts_with(char::is_alphabetic) {
                let owns =
                    words(code).any(|word| ["impl", "struct", "enum", "trait"].contains(&word));
                item = if owns { code.into() } else { String::new() };
            }
            seen.extend(words(code).map(String::from));
            let parts: Vec<_> = code.split_whitespace().collect();
            let items = parts.windows(2).filter(|pair| DEFINES.contains(&pair[0]));
            let fields = parts.iter().filter_map(|part| part.strip_suffix(':'));
            let names = items.filter_map(|pair| words(pair[1]).next());
            for name in names.chain(fields.filter_map(|field| words(field).last())) {
                defined.insert(name.to_string());
                owned.extend(words(&item).map(|owner| (owner.to_string(), name.to_string())));
            }
        }
        Source { path: path.to_path_buf(), lines, words: seen, defined, owned }
    }

    /// Is this the file of the module, or one of its folder?
    fn is_of_module(&self, name: &str) -> bool {
        let path = self.path.strip_prefix(root()).unwrap().with_extension("");
        path.components().any(|part| part.as_os_str() == name)
    }

    /// Each comment with that tag: its line, and its text up to the next tag or the comment's end.
    fn comments(&self, tag: &str) -> Vec<(usize, String)> {
        let mut found = Vec::new();
        for (at, line) in self.lines.iter().enumerate() {
            let Some((_, first)) = line.split_once(&format!("// {tag}")) else { continue };
            let rest = self.lines[at + 1..].iter().map_while(|line| {
                let text = line.trim_start().strip_prefix("//")?.trim();
                (!TAGS.iter().any(|tag| text.starts_with(tag))).then_some(text)
            });
            let text = std::iter::once(first.trim()).chain(rest).collect::<Vec<_>>().join(" ");
            found.push((at + 1, text));
        }
        found
    }
}

fn sources() -> Vec<Source> {
    fn collect(folder: &Path, found: &mut Vec<Source>) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            if path.is_dir() && name != "target" && !name.starts_with('.') {
                collect(&path, found);
            } else if name.ends_with(".rs") && name != "comments.rs" {
                found.push(Source::new(&path));
            }
        }
    }
    let mut found = Vec::new();
    collect(&root(), &mut found);
    found
}

/// `name` stands in the code of the same file, `module::name` is defined in that module, `Type::name` in that type.
fn exists(sources: &[Source], here: &Source, name: &str) -> bool {
    let parts: Vec<_> = words(name).collect();
    match parts[..] {
        [.., owner, last] if owner.starts_with(char::is_lowercase) => {
            sources.iter().any(|each| each.is_of_module(owner) && each.defined.contains(last))
        }
        [.., owner, last] => {
            let wanted = (owner.to_string(), last.to_string());
            sources.iter().any(|each| each.owned.contains(&wanted))
        }
        [name] => here.words.contains(name),
        [] => false,
    }
}

#[test]
fn each_ordering_names_a_partner_that_exists() {
    let sources = sources();
    let (mut checked, mut wrong) = (0, Vec::new());
    for source in &sources {
        for (line, text) in source.comments("ORDER:") {
            let names: Vec<_> = code(&text).collect();
            let alone = names.is_empty() && words(&text).any(|word| ORDERINGS.contains(&word));
            let unknown = |name: &&&str| !exists(&sources, source, name);
            let unknown: Vec<_> = names.iter().filter(unknown).collect();
            let says = names.is_empty() && !alone && !text.contains("Relaxed");
            if alone || says || !unknown.is_empty() {
                let path = source.path.strip_prefix(root()).unwrap().display();
                wrong.push(format!("{path}:{line}: {unknown:?} of: {text}"));
            }
            checked += 1;
        }
    }
    assert!(checked > 0, "no comment names an ordering");
    assert!(wrong.is_empty(), "no partner, or none of that name:\n{}", wrong.join("\n"));
}

#[test]
fn no_comment_is_wider_than_a_screen() {
    let is_wide =
        |line: &String| line.trim_start().starts_with("//") && line.chars().count() > COMMENT_WIDTH;
    let sources = sources();
    let wide: Vec<_> = sources
        .iter()
        .flat_map(|source| source.lines.iter().zip(1..).map(move |(line, at)| (source, line, at)))
        .filter(|(_, line, _)| is_wide(line))
        .map(|(source, _, at)| format!("{}:{at}", source.path.display()))
        .collect();
    assert!(wide.is_empty(), "wider than {COMMENT_WIDTH}:\n{}", wide.join("\n"));
}
