//! The cases, by topic. To add one, add an entry to its topic's table.

mod close;
mod data;
mod nonblocking;
mod readiness;
mod signals;
mod timeouts;

use crate::case::Case;

pub fn all() -> impl Iterator<Item = &'static Case> {
    [
        close::CASES,
        data::CASES,
        nonblocking::CASES,
        readiness::CASES,
        timeouts::CASES,
        signals::CASES,
    ]
    .into_iter()
    .flatten()
}
