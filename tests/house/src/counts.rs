//! The counts. Each gives what is to be mended, one line for each offender.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use anyhow::Result;
use syn::spanned::Spanned;
use syn::visit::{self, Visit};
use syn::{Item, Visibility};

use crate::cycles;
use crate::sources::{Crate, Module};

/// Of a product's file.
const LINES_MOST: usize = 700;
/// Of a function.
const BRANCHES_MOST: usize = 20;
/// Of a line of the architecture's documents.
const LETTERS_MOST: usize = 120;
/// Of a sentence.
const WORDS_MOST: usize = 30;
const DOCUMENTS: [&str; 11] = [
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
];
/// Structures of `ringlet` that several modules write.
const SHARED: [&str; 3] = ["End", "Socket", "Watch"];
/// Types that each have one meaning.
const ONE_MEANING: [&str; 10] =
    ["Carrier", "Fabric", "Lane", "Link", "End", "State", "Settings", "Way", "Place", "Word"];
/// Words of this house, of which the field has another one.
const COINED: &[&str] = &[
    "asked",
    "elder",
    "harvest",
    "orphan",
    "untold",
    "worlds",
    "lives",
    "hall",
    "apart",
    "told",
    "heed",
    "card",
    "rope",
    "gate",
    "jumps",
    "lease",
    "sides",
    "half",
    "trunk",
    "course",
    "strand",
    "room",
    "span",
    "far",
    "keeper",
    "post",
    "rendezvous",
    "family",
    "judge",
    "bar",
    "comer",
    "bury",
    "way",
    "words",
    "keep",
    "pin",
    "News",
    "Wish",
    "tap",
    "view",
    "adapter",
    "pipe",
    "cut",
];

pub struct Count {
    pub name: &'static str,
    /// What to read, and to do.
    pub why: &'static str,
    pub found: Vec<String>,
}

pub fn all(root: &Path, crates: &[Crate]) -> Result<Vec<Count>> {
    let modules: Vec<(&Crate, &Module)> =
        crates.iter().flat_map(|of| of.modules.values().map(move |module| (of, module))).collect();
    let place = |module: &Module| {
        module.path.strip_prefix(root).unwrap_or(&module.path).display().to_string()
    };
    let arrows: Vec<_> = crates.iter().map(|of| (of, cycles::arrows(of))).collect();
    let count = |name, why, found| Count { name, why, found };
    let each = |find: &dyn Fn(&Module) -> Vec<(usize, String)>| {
        let lines = |module: &Module| {
            let place = place(module);
            find(module).into_iter().map(move |(line, what)| format!("{place}:{line}: {what}"))
        };
        modules.iter().flat_map(|(_, module)| lines(module).collect::<Vec<_>>()).collect()
    };
    Ok(vec![
        count(
            "public fields",
            "a lock owns what it guards: make the field private, and reach it through its guard",
            each(&public_fields),
        ),
        count(
            "folders both ways",
            "a folder is a floor: arrows run down only",
            arrows
                .iter()
                .filter(|(of, _)| of.name == "ringlet")
                .flat_map(|(_, arrows)| cycles::folders(arrows))
                .map(|(one, other)| format!("ringlet/src: {one} and {other}"))
                .collect(),
        ),
        count(
            "modules in cycles",
            "move what both need to a third module, or pass it as an argument",
            arrows
                .iter()
                .flat_map(|(of, arrows)| {
                    let knots = cycles::knots(arrows).into_iter().flatten();
                    knots.map(move |(module, uses)| format!("{}: {module} uses {uses}", of.name))
                })
                .collect(),
        ),
        count(
            "long files",
            "a file has one idea: over 700 lines, with its tests, it has several",
            each(&|module| {
                let lines = module.text.lines().count();
                if lines > LINES_MOST { vec![(1, format!("{lines} lines"))] } else { Vec::new() }
            }),
        ),
        count(
            "branching functions",
            "over 20 branches: name its steps, or make a table of them",
            each(&branching),
        ),
        count(
            "coined words",
            "modules and types have the term that an engineer would search for",
            coined(crates),
        ),
        count(
            "types of one name",
            "one name has one meaning in the workspace",
            of_one_name(&modules, &place),
        ),
        count(
            "SAFETY by reference",
            "say what the callee requires, and why it holds here",
            each(&|module| {
                let is_poor = |line: &str| {
                    line.contains("SAFETY:")
                        && (line.contains("as above") || line.contains("passed on"))
                };
                let lines = module.text.lines().zip(1..).filter(|(line, _)| is_poor(line));
                lines.map(|(line, number)| (number, line.trim().to_owned())).collect()
            }),
        ),
        count(
            "long sentences",
            "a sentence of a document has 30 words at most, and a subject",
            long_sentences(root)?,
        ),
        count(
            "long lines of ARCHITECTURE",
            "a paragraph's lines have 120 letters at most",
            long_lines(root)?,
        ),
    ])
}

fn public_fields(module: &Module) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    if !module.path.to_string_lossy().contains("/ringlet/src/") {
        return found;
    }
    for item in &module.items {
        let Item::Struct(of) = item else { continue };
        let name = of.ident.to_string();
        if SHARED.contains(&&*name) {
            for field in &of.fields {
                let called = field.ident.as_ref().map(ToString::to_string).unwrap_or_default();
                if !matches!(field.vis, Visibility::Inherited) {
                    found.push((field.span().start().line, format!("{name}.{called}")));
                }
            }
        }
    }
    found
}

/// Of one function, or closure's owner.
#[derive(Default)]
struct Branches {
    count: usize,
    found: Vec<(usize, String)>,
}

impl Branches {
    fn of(&mut self, name: &syn::Ident, line: usize, block: &syn::Block) {
        let before = std::mem::take(&mut self.count);
        self.visit_block(block);
        if self.count > BRANCHES_MOST {
            self.found.push((line, format!("{name} has {} branches", self.count)));
        }
        self.count = before;
    }
}

impl<'ast> Visit<'ast> for Branches {
    fn visit_item_fn(&mut self, item: &'ast syn::ItemFn) {
        self.of(&item.sig.ident, item.span().start().line, &item.block);
    }
    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        self.of(&item.sig.ident, item.span().start().line, &item.block);
    }
    fn visit_expr_if(&mut self, expr: &'ast syn::ExprIf) {
        self.count += 1;
        visit::visit_expr_if(self, expr);
    }
    fn visit_expr_match(&mut self, expr: &'ast syn::ExprMatch) {
        self.count += expr.arms.len().saturating_sub(1);
        visit::visit_expr_match(self, expr);
    }
    fn visit_expr_while(&mut self, expr: &'ast syn::ExprWhile) {
        self.count += 1;
        visit::visit_expr_while(self, expr);
    }
    fn visit_expr_for_loop(&mut self, expr: &'ast syn::ExprForLoop) {
        self.count += 1;
        visit::visit_expr_for_loop(self, expr);
    }
    fn visit_local_init(&mut self, init: &'ast syn::LocalInit) {
        self.count += usize::from(init.diverge.is_some());
        visit::visit_local_init(self, init);
    }
    fn visit_bin_op(&mut self, op: &'ast syn::BinOp) {
        self.count += usize::from(matches!(op, syn::BinOp::And(_) | syn::BinOp::Or(_)));
    }
}

fn branching(module: &Module) -> Vec<(usize, String)> {
    let mut branches = Branches::default();
    let own = |item: &&Item| !matches!(item, Item::Mod(_));
    module.items.iter().filter(own).for_each(|item| branches.visit_item(item));
    branches.found
}

fn types(module: &Module) -> impl Iterator<Item = (usize, String)> + '_ {
    module.items.iter().filter_map(|item| {
        let ident = match item {
            Item::Struct(item) => &item.ident,
            Item::Enum(item) => &item.ident,
            Item::Trait(item) => &item.ident,
            Item::Union(item) => &item.ident,
            _ => return None,
        };
        Some((ident.span().start().line, ident.to_string()))
    })
}

/// Words in the names of modules and types.
fn coined(crates: &[Crate]) -> Vec<String> {
    let mut found = BTreeMap::<&str, BTreeSet<String>>::new();
    for of in crates {
        for module in of.modules.values() {
            let last = module.name.rsplit("::").next().unwrap_or_default();
            let parts: BTreeSet<&str> = last.split('_').collect();
            let names = types(module).map(|(_, name)| name).collect::<Vec<_>>();
            for word in COINED {
                let capital = word[..1].to_uppercase() + &word[1..];
                if parts.contains(word) {
                    found.entry(word).or_default().insert(format!("{}::{}", of.name, module.name));
                }
                for name in names.iter().filter(|name| **name == capital) {
                    let at = format!("{}::{}::{name}", of.name, module.name);
                    found.entry(word).or_default().insert(at);
                }
            }
        }
    }
    let places = |(word, places): (&str, BTreeSet<String>)| {
        places.into_iter().map(|at| format!("{word}: {at}")).collect::<Vec<_>>()
    };
    found.into_iter().flat_map(places).collect()
}

fn of_one_name(modules: &[(&Crate, &Module)], place: &dyn Fn(&Module) -> String) -> Vec<String> {
    let mut found = BTreeMap::<String, Vec<String>>::new();
    for (_, module) in modules {
        for (line, name) in types(module) {
            if ONE_MEANING.contains(&&*name) {
                found.entry(name).or_default().push(format!("{}:{line}", place(module)));
            }
        }
    }
    let several = found.into_iter().filter(|(_, places)| places.len() > 1);
    several
        .flat_map(|(name, places)| places.into_iter().map(move |at| format!("{name}: {at}")))
        .collect()
}

/// Of paragraphs and lists: what is in tables and code is none.
fn sentences(text: &str) -> Vec<(usize, String)> {
    let (mut found, mut paragraph, mut begins, mut is_code) = (Vec::new(), String::new(), 0, false);
    let mut end = |paragraph: &mut String, begins: usize| {
        // (A link's text is read, and its address is not.)
        let mut prose = String::new();
        let mut rest = &*std::mem::take(paragraph);
        while let Some((before, behind)) = rest.split_once("](") {
            prose += before;
            rest = behind.split_once(')').map_or("", |(_, rest)| rest);
        }
        prose += rest;
        let mut sentence = Vec::new();
        for word in prose.split_whitespace() {
            sentence.push(word);
            if word.trim_end_matches([')', '*', '"', '`']).ends_with(['.', '!', '?', ':', ';']) {
                found.push((begins, std::mem::take(&mut sentence).join(" ")));
            }
        }
        found.push((begins, sentence.join(" ")));
    };
    for (line, number) in text.lines().zip(1..) {
        let trimmed = line.trim_start();
        is_code ^= trimmed.starts_with("```");
        let is_prose =
            !is_code && !trimmed.starts_with(['|', '#', '`']) && !line.starts_with("    ");
        let is_item =
            trimmed.starts_with("- ") || trimmed.starts_with(|c: char| c.is_ascii_digit());
        if trimmed.is_empty() || !is_prose || is_item {
            end(&mut paragraph, begins);
        }
        if is_prose {
            if paragraph.is_empty() {
                begins = number;
            }
            paragraph += line;
            paragraph.push(' ');
        }
    }
    end(&mut paragraph, begins);
    found
}

fn long_sentences(root: &Path) -> Result<Vec<String>> {
    let mut found = Vec::new();
    for name in DOCUMENTS {
        let text = fs::read_to_string(root.join(name))?;
        let long = sentences(&text).into_iter().filter_map(|(line, sentence)| {
            let words = sentence.split_whitespace().count();
            (words > WORDS_MOST).then(|| format!("{name}:{line}: {words} words: {sentence}"))
        });
        found.extend(long);
    }
    Ok(found)
}

fn long_lines(root: &Path) -> Result<Vec<String>> {
    let text = fs::read_to_string(root.join("ARCHITECTURE.md"))?;
    // (A table's row is one line.)
    let is_long = |line: &str| !line.starts_with('|') && line.chars().count() > LETTERS_MOST;
    let lines = text.lines().zip(1..).filter(|(line, _)| is_long(line));
    Ok(lines.map(|(_, number)| format!("ARCHITECTURE.md:{number}")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sentences_are_those_that_are_read() {
        let text = "# A title that is none. Not this.\nOne [two](a/long.path) three.\nFour\nfive.\n\n| a | table. |\n\n- An item\n  goes on. It ends.\n\n    code is none.\n\n```\nnor this.\n```\n";
        let found: Vec<_> =
            sentences(text).into_iter().filter(|(_, said)| !said.is_empty()).collect();
        let said =
            [(2, "One [two three."), (2, "Four five."), (8, "- An item goes on."), (8, "It ends.")];
        assert_eq!(found, said.map(|(line, said)| (line, said.to_owned())));
    }

    #[test]
    fn branches_are_counted() {
        let conditions = "if a && b { return 1; }".repeat(BRANCHES_MOST / 2);
        for (more, expected) in [("", 0), ("for x in y {}", 1)] {
            let text = format!("impl S {{ fn f() -> u8 {{ {conditions} {more} 0 }} }}");
            let items = syn::parse_file(&text).unwrap().items;
            let module = Module { name: String::new(), path: "s.rs".into(), text, items };
            assert_eq!(branching(&module).len(), expected, "{more}");
        }
    }
}
