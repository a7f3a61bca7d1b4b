//! Which module of a crate uses which: a cycle is one knot, in which nothing can be understood, tested or replaced alone.

use std::collections::{BTreeMap, BTreeSet};

use syn::visit::{self, Visit};
use syn::{Item, UseTree, Visibility};

use crate::sources::{Crate, Module};

type Path = Vec<String>;

/// What a module names.
#[derive(Default)]
struct Names {
    /// What it uses, by the name that this has there; and whether it passes that on.
    uses: BTreeMap<String, (Path, bool)>,
    paths: Vec<Path>,
}

impl<'ast> Visit<'ast> for Names {
    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        let passes_on = !matches!(item.vis, Visibility::Inherited);
        flatten(&item.tree, &mut Vec::new(), &mut |name, path| {
            self.uses.insert(name, (path, passes_on));
        });
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        if path.segments.len() > 1 {
            self.paths.push(path.segments.iter().map(|part| part.ident.to_string()).collect());
        }
        visit::visit_path(self, path);
    }

    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        // (Of one that is written here and only for tests nothing counts.)
        if !item.attrs.iter().any(|attribute| attribute.path().is_ident("cfg")) {
            visit::visit_item_mod(self, item);
        }
    }
}

fn flatten(tree: &UseTree, before: &mut Path, found: &mut impl FnMut(String, Path)) {
    let mut at = |name: String, called: String, before: &Path| {
        let mut path = before.clone();
        if name != "self" {
            path.push(name);
        }
        let called =
            if called == "self" { path.last().cloned().unwrap_or_default() } else { called };
        found(called, path);
    };
    match tree {
        UseTree::Path(part) => {
            before.push(part.ident.to_string());
            flatten(&part.tree, before, found);
            before.pop();
        }
        UseTree::Name(name) => at(name.ident.to_string(), name.ident.to_string(), before),
        UseTree::Rename(name) => at(name.ident.to_string(), name.rename.to_string(), before),
        UseTree::Glob(_) => at("self".into(), format!("* of {before:?}"), before),
        UseTree::Group(group) => {
            group.items.iter().for_each(|tree| flatten(tree, before, found));
        }
    }
}

struct AllNames<'a> {
    modules: &'a BTreeMap<String, Module>,
    names: BTreeMap<&'a str, Names>,
}

impl AllNames<'_> {
    /// The module in which that lies which a path named in `here` leads to.
    fn resolve(&self, path: &[String], here: &str, depth: usize) -> Option<String> {
        let mut place: Vec<&str> = here.split("::").filter(|part| !part.is_empty()).collect();
        let mut parts = path.iter().map(String::as_str).peekable();
        match *parts.peek()? {
            "crate" => {
                place.clear();
                parts.next();
            }
            "self" => _ = parts.next(),
            "super" => {
                while parts.next_if_eq(&"super").is_some() {
                    place.pop()?;
                }
            }
            first => {
                let child = if here.is_empty() { first.into() } else { format!("{here}::{first}") };
                if !self.modules.contains_key(&child) {
                    let (used, _) = self.names.get(here)?.uses.get(first)?;
                    // (A name that leads to itself is another crate's.)
                    if depth > 8 || used.first().is_some_and(|name| name == first) {
                        return None;
                    }
                    let whole: Path =
                        used.iter().cloned().chain(parts.skip(1).map(Into::into)).collect();
                    return self.resolve(&whole, here, depth + 1);
                }
            }
        }
        place.extend(parts);
        let mut item = None;
        while !self.modules.contains_key(&place.join("::")) {
            item = Some(place.pop()?);
        }
        let module = place.join("::");
        let passed_on = item.and_then(|item| self.names[&*module].uses.get(item));
        match passed_on {
            Some((path, true)) if depth <= 8 => {
                self.resolve(path, &module, depth + 1).or(Some(module))
            }
            _ => Some(module),
        }
    }
}

pub type Arrows = BTreeMap<String, BTreeSet<String>>;

pub fn arrows(of: &Crate) -> Arrows {
    let names = of.modules.iter().map(|(name, module)| {
        let mut names = Names::default();
        let own = |item: &&Item| !matches!(item, Item::Mod(child) if child.content.is_none());
        module.items.iter().filter(own).for_each(|item| names.visit_item(item));
        (&**name, names)
    });
    let all = AllNames { modules: &of.modules, names: names.collect() };
    let used = |name: &String| {
        let names = &all.names[&**name];
        let uses = names.uses.values().filter(|(_, passes_on)| !passes_on).map(|(path, _)| path);
        let paths = uses.chain(&names.paths);
        let modules = paths.filter_map(|path| all.resolve(path, name, 0));
        (name.clone(), modules.filter(|other| other != name).collect())
    };
    of.modules.keys().map(used).collect()
}

fn reached(from: &str, arrows: &Arrows) -> BTreeSet<String> {
    let (mut found, mut next) = (BTreeSet::new(), vec![from.to_owned()]);
    while let Some(name) = next.pop() {
        next.extend(arrows[&name].iter().filter(|other| found.insert((*other).clone())).cloned());
    }
    found
}

/// Modules that use each other, directly or not: each with what it uses of its knot.
pub fn knots(arrows: &Arrows) -> BTreeSet<Vec<(String, String)>> {
    let reach: BTreeMap<_, _> =
        arrows.keys().map(|name| (name.clone(), reached(name, arrows))).collect();
    let in_one = arrows.keys().filter(|name| reach[*name].contains(*name));
    in_one
        .map(|name| {
            let knot = reach[name].iter().filter(|other| reach[*other].contains(name));
            let uses = |of: &String| {
                let uses = arrows[of].iter().filter(|other| reach[*other].contains(of));
                (of.clone(), uses.cloned().collect::<Vec<_>>().join(", "))
            };
            knot.map(uses).collect()
        })
        .collect()
}

/// Folders under `src` that use each other both ways.
pub fn folders(arrows: &Arrows) -> BTreeSet<(String, String)> {
    let folder = |name: &str| name.split("::").next().unwrap_or_default().to_owned();
    let between: BTreeSet<(String, String)> = arrows
        .iter()
        .flat_map(|(from, to)| to.iter().map(move |to| (folder(from), folder(to))))
        .filter(|(from, to)| from != to && !from.is_empty() && !to.is_empty())
        .collect();
    between
        .iter()
        .filter(|(from, to)| from < to && between.contains(&(to.clone(), from.clone())))
        .cloned()
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A crate of these modules' texts.
    fn of(texts: &[(&str, &str)]) -> Crate {
        let module = |(name, text): &(&str, &str)| {
            let items = syn::parse_file(text).unwrap().items;
            let (name, path, text) = (name.to_string(), name.into(), text.to_string());
            (name.clone(), Module { name, path, text, items })
        };
        Crate { name: "one".into(), modules: texts.iter().map(module).collect() }
    }

    fn knotted(texts: &[(&str, &str)]) -> Vec<Vec<String>> {
        let knots = knots(&arrows(&of(texts)));
        let names = |knot: Vec<(String, String)>| knot.into_iter().map(|(name, _)| name);
        knots.into_iter().map(|knot| names(knot).collect()).collect()
    }

    #[test]
    fn a_cycle_is_seen_however_it_is_written() {
        let a_uses_b = ("a", "use crate::b::{self, thing as other}; fn f() { b::g() }");
        let none = vec![] as Vec<Vec<String>>;
        let both = vec![vec!["a".to_string(), "b".to_string()]];
        let root = ("", "mod a; mod b;");
        assert_eq!(knotted(&[root, a_uses_b, ("b", "fn g() {}")]), none);
        for b in ["use super::a::f;", "fn g() { crate::a::f() }", "struct S(super::a::T);"] {
            assert_eq!(knotted(&[root, a_uses_b, ("b", b)]), both, "{b}");
        }
        // What the root passes on lies where it was made.
        let root = ("", "mod a; mod b; pub use a::f;");
        assert_eq!(knotted(&[root, a_uses_b, ("b", "use crate::f;")]), both);
    }

    #[test]
    fn folders_both_ways_are_seen() {
        let found = folders(&arrows(&of(&[
            ("", "mod up; mod down;"),
            ("up", "mod one;"),
            ("up::one", "use crate::down::two::g; fn f() {}"),
            ("down", "mod two;"),
            ("down::two", "fn g() { crate::up::one::f() }"),
        ])));
        assert_eq!(found.into_iter().collect::<Vec<_>>(), [("down".into(), "up".into())]);
    }
}
