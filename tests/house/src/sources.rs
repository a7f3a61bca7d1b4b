//! The product's sources as their compiler sees them: from each crate's root along `mod`, without tests.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use syn::{Attribute, Item, Meta};

pub struct Module {
    /// Without the crate's name; the root's is empty.
    pub name: String,
    pub path: PathBuf,
    pub text: String,
    pub items: Vec<Item>,
}

pub struct Crate {
    pub name: String,
    pub modules: BTreeMap<String, Module>,
}

/// Those of the workspace that are shipped: not conformance, and not this one.
pub fn crates(root: &Path) -> Result<Vec<Crate>> {
    let mut crates = Vec::new();
    let folders = fs::read_dir(root)?.collect::<Result<Vec<_>, _>>()?;
    for folder in folders.into_iter().map(|entry| entry.path()) {
        let name = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let roots = ["lib.rs", "main.rs"].map(|file| folder.join("src").join(file));
        let roots: Vec<_> = roots.into_iter().filter(|path| path.exists()).collect();
        if !name.starts_with("ringlet") || roots.is_empty() {
            continue;
        }
        let mut modules = BTreeMap::new();
        for path in roots {
            let within = path.parent().context("a folder")?.to_owned();
            read(&path, &within, String::new(), &mut modules)?;
        }
        crates.push(Crate { name, modules });
    }
    crates.sort_by(|one, other| one.name.cmp(&other.name));
    Ok(crates)
}

/// A module's file, and those of its children, which lie in the folder `within`.
fn read(
    path: &Path,
    within: &Path,
    name: String,
    modules: &mut BTreeMap<String, Module>,
) -> Result<()> {
    let text = fs::read_to_string(path)?;
    let parsed = syn::parse_file(&text).with_context(|| path.display().to_string())?;
    let items: Vec<Item> = parsed.items.into_iter().filter(|item| !is_test(item)).collect();
    for item in &items {
        let Item::Mod(child) = item else { continue };
        if child.content.is_some() {
            continue;
        }
        let called = child.ident.to_string();
        let named = child.attrs.iter().find_map(given_path);
        let beside = [within.join(format!("{called}.rs")), within.join(&called).join("mod.rs")];
        let path = match named {
            Some(named) => path.parent().context("a folder")?.join(named),
            None => beside
                .into_iter()
                .find(|path| path.exists())
                .with_context(|| format!("{}: no file of mod {called}", path.display()))?,
        };
        let full = if name.is_empty() { called.clone() } else { format!("{name}::{called}") };
        read(&path, &within.join(&called), full, modules)?;
    }
    // (A crate of a library and a program has two roots, which are one here.)
    match modules.get_mut(&name) {
        Some(root) => root.items.extend(items),
        None => {
            _ = modules.insert(name.clone(), Module { name, path: path.to_owned(), text, items })
        }
    }
    Ok(())
}

fn given_path(attribute: &Attribute) -> Option<String> {
    let Meta::NameValue(pair) = &attribute.meta else { return None };
    match &pair.value {
        syn::Expr::Lit(syn::ExprLit { lit: syn::Lit::Str(path), .. })
            if pair.path.is_ident("path") =>
        {
            Some(path.value())
        }
        _ => None,
    }
}

/// Is it compiled for tests, or models, only?
fn is_test(item: &Item) -> bool {
    let attributes = match item {
        Item::Mod(item) => &item.attrs,
        Item::Fn(item) => &item.attrs,
        Item::Impl(item) => &item.attrs,
        Item::Use(item) => &item.attrs,
        Item::Struct(item) => &item.attrs,
        Item::Static(item) => &item.attrs,
        _ => return false,
    };
    attributes.iter().any(|attribute| {
        attribute.path().is_ident("cfg")
            && matches!(&attribute.meta, Meta::List(list) if ["test", "loom", "fuzzing"].contains(&&*list.tokens.to_string()))
    })
}
