//! The cases, by topic. To add one, add an entry to its topic's table.

mod around;
mod close;
mod data;
mod datagrams;
mod descriptors;
mod nonblocking;
mod paths;
mod processes;
mod programs;
mod rare;
mod readiness;
mod seqpacket;
mod signals;
mod threads;
mod timeouts;
mod unix;

use crate::case::Case;

pub fn all() -> impl Iterator<Item = &'static Case> {
    [
        around::CASES,
        data::CASES,
        datagrams::CASES,
        paths::CASES,
        nonblocking::CASES,
        timeouts::CASES,
        signals::CASES,
        close::CASES,
        readiness::CASES,
        descriptors::CASES,
        processes::CASES,
        programs::CASES,
        rare::CASES,
        seqpacket::CASES,
        threads::CASES,
        unix::CASES,
    ]
    .into_iter()
    .flatten()
}
