//! How much address space connections may take from the program.

use super::table::Tables;
use crate::reasons::Reason;
use ringlet_core::sync::{AtomicU64, Ordering};
use ringlet_linux::sys;

/// Takes `bytes` of address space for a segment, if ringlet may: a share of what the process may have at all, and what leaves the program
/// as much again.
pub fn reserve(tables: &Tables, bytes: usize) -> Result<(), Reason> {
    let bytes = bytes as u64;
    let may = |sum| {
        let limit = sys::address_space_limit();
        let left = || limit.saturating_sub(sys::address_space_used());
        sum <= tables.config.memory_limit_bytes
            && (limit == u64::MAX || sum <= limit / 4 && bytes <= left() / 2)
    };
    if take(&tables.process().shared_bytes, bytes, may) { Ok(()) } else { Err(Reason::NoMemory) }
}

/// So much of it is not used any more.
pub fn release(tables: &Tables, bytes: usize) {
    tables.process().shared_bytes.fetch_sub(bytes as u64, Ordering::Relaxed);
}

/// Counts `bytes` more, if the sum `may` be so. Threads do so at once: it is counted before it is looked at.
fn take(count: &AtomicU64, bytes: u64, may: impl FnOnce(u64) -> bool) -> bool {
    let sum = count.fetch_add(bytes, Ordering::Relaxed).saturating_add(bytes);
    let taken = may(sum);
    if !taken {
        count.fetch_sub(bytes, Ordering::Relaxed);
    }
    taken
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_lose_no_count() {
        let (count, all) = (AtomicU64::new(0), std::sync::Barrier::new(4));
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    all.wait();
                    for _ in 0..1_000_000 {
                        assert!(take(&count, 3, |_| true) && !take(&count, 5, |_| false));
                        count.fetch_sub(3, Ordering::Relaxed);
                    }
                });
            }
        });
        assert_eq!(count.into_inner(), 0);
    }
}
