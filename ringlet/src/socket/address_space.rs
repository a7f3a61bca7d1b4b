//! RLIMIT_AS of a program that sets it while it runs (vsftpd, 200 MB for each session): it means its own memory, and ours would be taken from that. So the
//! kernel is given as much more as we have mapped and may map, and the program is told what it has asked for.

use super::table::tables;
use ringlet_core::sync::{AtomicU64, Ordering};
use ringlet_linux::sys;

/// Soft and hard, in bytes; `u64::MAX` is none.
pub type Limits = [u64; 2];

/// More than our tables take.
const TABLES_BYTES: u64 = 224 << 20;

/// What the program has set last in this process, and what the kernel was given for it. (Where that has something else, they say nothing.)
static ASKED: [AtomicU64; 2] = [const { AtomicU64::new(0) }; 2];
static GIVEN: [AtomicU64; 2] = [const { AtomicU64::new(0) }; 2];

fn read(words: &[AtomicU64; 2]) -> Limits {
    [0, 1].map(|n| words[n].load(Ordering::Relaxed))
}

/// What the kernel is to be given for these: `None` as they are.
pub fn widened(asked: Limits) -> Option<Limits> {
    if tables().is_none() || asked[0] > asked[1] {
        return None;
    }
    let now = sys::limits(libc::RLIMIT_AS);
    let mut given = asked.map(widen);
    // What the program may do, it may: a hard limit can't be raised.
    if asked[1] <= now[1] {
        given[1] = given[1].min(now[1]);
    }
    given[0] = given[0].min(given[1]);
    (given != asked).then_some(given)
}

/// A quarter of the limit is for connections (`budget`).
fn widen(asked: u64) -> u64 {
    match asked.checked_add(TABLES_BYTES) {
        Some(bytes) if asked != u64::MAX => bytes.saturating_add(bytes / 3).min(u64::MAX - 1),
        _ => asked,
    }
}

/// The kernel has taken them.
pub fn were_given(asked: Limits, given: Limits) {
    for n in [0, 1] {
        ASKED[n].store(asked[n], Ordering::Relaxed);
        GIVEN[n].store(given[n], Ordering::Relaxed);
    }
}

/// What the program has asked for where the kernel has these.
pub fn told(kernel: Limits) -> Limits {
    if kernel == read(&GIVEN) { read(&ASKED) } else { kernel }
}

/// The next program is to begin with the soft limit that was asked for. (The hard one could not be raised again, if it does not begin.)
pub fn before_exec() {
    let given = read(&GIVEN);
    if given == read(&ASKED) {
        return;
    }
    let now = sys::limits(libc::RLIMIT_AS);
    if now == given {
        sys::set_limits(libc::RLIMIT_AS, [told(now)[0], now[1]]);
    }
}

pub fn after_failed_exec() {
    let given = read(&GIVEN);
    if given != read(&ASKED) && sys::limits(libc::RLIMIT_AS) == [read(&ASKED)[0], given[1]] {
        sys::set_limits(libc::RLIMIT_AS, given);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_gets_room_for_ours_and_none_stays_none() {
        assert_eq!(widen(u64::MAX), u64::MAX);
        assert_eq!(widen(u64::MAX - 1), u64::MAX - 1);
        assert_eq!(
            widen(u64::MAX / 2),
            u64::MAX / 2 + TABLES_BYTES + (u64::MAX / 2 + TABLES_BYTES) / 3
        );
        let given = widen(200 << 20);
        assert!(given - given / 4 >= (200 << 20) + TABLES_BYTES);
    }
}
