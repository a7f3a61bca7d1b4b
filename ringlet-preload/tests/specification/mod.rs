//! The tables of SPECIFICATION.md.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

#[allow(dead_code)]
pub const SPECIFICATION: &str = "SPECIFICATION.md";

pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_path_buf()
}

pub fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The rows of the table between `<!-- name -->` and `<!-- /name -->`, as cells.
#[allow(dead_code)]
pub fn table(name: &str) -> Vec<Vec<String>> {
    let text = read(&root().join(SPECIFICATION));
    let (_, rest) = text.split_once(&format!("<!-- {name} -->")).expect(name);
    let (part, _) = rest.split_once(&format!("<!-- /{name} -->")).expect(name);
    let cells = |line: &str| -> Vec<String> {
        line.trim_matches('|').split('|').map(|cell| cell.trim().to_string()).collect()
    };
    // The first row names the columns, the second is a line.
    let rows: Vec<_> =
        part.lines().filter(|line| line.starts_with('|')).skip(2).map(cells).collect();
    assert!(!rows.is_empty(), "no table {name}");
    rows
}

/// What stands between backquotes.
pub fn code(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2)
}

/// The names in the first column; each may stand there once.
#[allow(dead_code)]
pub fn names(table: &[Vec<String>]) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for name in table.iter().flat_map(|row| code(&row[0])) {
        assert!(found.insert(name.to_string()), "{name} stands twice in the table");
    }
    found
}
