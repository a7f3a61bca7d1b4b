//! Two ends that may not share memory are carried: each gets a segment of its own, and a process of the service's, the *carrier*, copies between both, as
//! the adapter of a mirrored connection does (`ringlet_adapter`).
//!
//! ```text
//!   service --------- keeper          starts a carrier, and another one when that has died; hears of it if it hangs, and nothing of guests
//!      |                 |
//!      |  pair: two      v
//!      |  lifelines   carrier ------- one end's lifeline      (the other ends of both came to the ends with MET)
//!      |------------>         ------- the other end's
//!       <------------
//!        gone, over
//! ```
//!
//! While it carries something it is asked now and then whether it still goes on, and answers.
//!
//! A carrier has nothing that its tenants could take hold of but memory: they ring it by messages over their lifelines, and it rings them by bytes on
//! their kernel's connection, which is done apart, as the close of that is. It waits for nobody. Who has one call of the carrier's hang, or holds up
//! the other end, ends the link: both ends go on in the kernel, as if the carrier had died.

pub(crate) mod earlier;
pub(crate) mod ends;
pub mod keeper;
mod process;
pub(crate) mod share;

pub use process::carry;
pub use share::Carriers;

use serde::{Deserialize, Serialize};

use crate::apart::From;

/// What the service says to a carrier.
#[derive(Serialize, Deserialize)]
enum Order {
    /// With the lifelines of both ends, the connecting one's first.
    Carry(Pair),
    /// To be answered.
    Ask,
}

#[derive(Serialize, Deserialize)]
struct Pair {
    number: u64,
    ends: [From; 2],
    /// The largest ring that it may have.
    ring_bytes: u64,
}

/// What a carrier says of a pair: its connecting end has gone; both have, and nothing is left of it. And that it was asked.
#[derive(Serialize, Deserialize, Clone, Copy, PartialEq, Eq, Debug)]
enum Word {
    Gone(u64),
    Over(u64),
    Answer,
}

/// What the keeper says of a carrier, with the socket to it.
#[derive(Serialize, Deserialize)]
struct Started {
    pid: u32,
}

/// What is said to the keeper: this process hangs, or is no longer heard.
#[derive(Serialize, Deserialize)]
struct Kill {
    pid: u32,
}

/// Room for each of them.
const WORD_BYTES: usize = 512;
