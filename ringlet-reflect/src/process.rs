//! Which process this is, without a system call: a child by fork is another one.

use std::sync::OnceLock;

use ringlet_core::sync::{AtomicU32, Ordering};
use ringlet_linux::map;
use ringlet_linux::sys::Sys;

use crate::PAGE_BYTES;

/// This process's number, in memory that a child finds empty.
static PROCESS: OnceLock<&'static AtomicU32> = OnceLock::new();

/// A process that has what its children by fork have a copy of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Process(u32);

impl Process {
    pub fn this() -> Sys<Process> {
        let word = match PROCESS.get() {
            Some(word) => word,
            None => {
                let page = map::wiped_table::<AtomicU32>(PAGE_BYTES / size_of::<AtomicU32>())?;
                PROCESS.get_or_init(|| &page[0])
            }
        };
        let process = std::process::id();
        // ORDER: Relaxed: written by this process alone.
        word.store(process, Ordering::Relaxed);
        Ok(Process(process))
    }

    #[inline]
    pub fn is_this(self) -> bool {
        PROCESS.get().map(|word| word.load(Ordering::Relaxed)) == Some(self.0)
    }
}
