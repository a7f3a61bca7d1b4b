//! How both sides wait: they watch for as long as that lately paid, and nobody else wants the processor; then they sleep.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::sync::{Once, OnceLock};
use std::time::Duration;

use ringlet::waiting::spin;
use ringlet_reflect::Watch;

/// For so long at most.
const WATCH_US: u64 = 50;
/// Who sleeps looks again so often, whether others are there.
pub const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// How many threads want to run is told there.
fn load() -> Option<i32> {
    static LOAD: OnceLock<Option<File>> = OnceLock::new();
    LOAD.get_or_init(|| File::open("/proc/loadavg").ok()).as_ref().map(AsRawFd::as_raw_fd)
}

/// What is there by the time that the page has changed, or that it took too long.
pub fn wait<T>(page: &mut Watch, mut look: impl FnMut() -> Option<T>) -> Option<T> {
    static BEGUN: Once = Once::new();
    BEGUN.call_once(|| spin::start(spin::Outside { load, tell: |_, _, _| {} }));
    let mut found = look();
    if found.is_some() {
        return found;
    }
    spin::watch(WATCH_US, || None, keeping(&mut found, &mut look));
    if found.is_some() {
        return found;
    }
    // (What was written since the last sleep ends this one at once.)
    if page.wait(Some(LOOK_AGAIN)) {
        spin::woken(0);
    }
    look()
}

/// It may be asked again behind a yes: what was taken is kept.
fn keeping<T>(found: &mut Option<T>, mut look: impl FnMut() -> Option<T>) -> impl FnMut() -> bool {
    move || {
        if found.is_none() {
            *found = look();
        }
        found.is_some()
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn what_was_taken_is_kept() {
        let (mut queue, mut found) = (vec![2, 1], None);
        let mut is_there = super::keeping(&mut found, || queue.pop());
        assert!(is_there() && is_there());
        drop(is_there);
        assert_eq!((found, queue), (Some(1), vec![2]));
    }
}
