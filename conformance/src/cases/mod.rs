//! The cases, by topic. To add one, add an entry to its topic's table.

mod data;

use crate::case::Case;

pub fn all() -> impl Iterator<Item = &'static Case> {
    [data::CASES].into_iter().flatten()
}
