//! A cluster on virtual time: the rings and handshakes of `ringlet-core`, unmodified, over an interconnect whose stores are
//! packets. Everything is drawn from one seed and happens in one order, so a run can be repeated exactly.

mod active;
mod carried;
mod cluster;
mod faults;
mod ledger;
mod memory;
mod moving;
mod ordered;
pub mod papers;
mod profile;
mod reflected;
mod rings;
mod scenario;
mod stacks;
mod topology;

pub use carried::{Carried, CarriedOutcome, CarriedStats, Disorder, Promise};
pub use cluster::{Outcome, Stats};
pub use faults::Faults;
pub use ledger::Violation;
pub use ordered::{History, Ordered, OrderedOutcome, OrderedStats, Planted, Seen, Trouble};
pub use profile::{Profile, RingSizes, SHIPPED, Stack};
pub use rings::{Carrier, Pattern, Traffic};
pub use scenario::Scenario;
pub use topology::Topology;

/// Virtual time, in picoseconds.
pub type Time = u64;

pub fn from_us(us: f64) -> Time {
    (us * 1e6).round() as Time
}

pub fn to_us(time: Time) -> f64 {
    time as f64 / 1e6
}

/// What `bytes` take at `mb_s` million bytes a second; nothing at a rate of 0, which stands for "no limit".
pub fn transfer(bytes: usize, mb_s: f64) -> Time {
    if mb_s == 0.0 { 0 } else { from_us(bytes as f64 / mb_s) }
}
