//! Disks of one host that are read and written from others, as Memory Channel had them: over reflective memory, straight into what the reader
//! receives.
//!
//! ```text
//!                                requests (all readers')
//!   Reader ── transmits ──> what it writes ──> received ── Server ── the file
//!          <── received ──  what it reads  <── transmits
//! ```
//!
//! A *server* has a file or a block device open, and announces it in a region of its name. Who wants it, a *reader*, takes one of the disk's locks,
//! which is its seat for as long as it lives, and says so; the server makes it two regions, of a few slots each, for what it reads and what it
//! writes. From then on a request is some words, and its answer one; the file's bytes are read into the region that the reader receives. Locks tell
//! both sides of a death.
//!
//! Between hosts both may have a stream besides, by which requests and bytes go without the regions (`direct`).
//!
//! What the regions hold, and what a stream says, is hostile input to the server: each request is copied once, checked, and done as checked.
#![deny(unsafe_code)]

mod direct;
mod file;
mod layout;
mod list;
mod reader;
mod server;
mod wait;

use std::sync::{Mutex, MutexGuard, PoisonError};

pub use file::Extent;
pub use layout::{NAME_MOST, Op, READERS, SLOT_BYTES, SLOTS};
pub use list::{Listed, list};
pub use reader::{Again, Answers, Flags, Reader, Source, Turn};
pub use server::{Options, Said, serve};
pub use wait::Watcher;

fn locked<T: ?Sized>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}
