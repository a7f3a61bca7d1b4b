//! Looks at processes that may keep us waiting: what is read of one may be locked for as long as it likes.

use std::collections::HashSet;
use std::sync::mpsc::{Sender, channel};
use std::thread::Builder;
use std::time::{Duration, Instant};

use anyhow::Context;

/// After so long the next process is looked at beside the one that keeps us waiting.
const BESIDE: Duration = Duration::from_millis(50);
/// How long the last ones are waited for.
const LAST: Duration = Duration::from_secs(3);

/// Looks at each process. None for one that was given up: its thread is left behind, and ends with us.
pub fn each<R: Send + 'static>(
    pids: impl IntoIterator<Item = u32>,
    look: fn(u32) -> R,
) -> Vec<(u32, Option<R>)> {
    let (answer, answers) = channel();
    let (mut done, mut awaited) = (Vec::new(), HashSet::new());
    let mut await_until = |until: Instant, awaited: &mut HashSet<u32>, pid: Option<u32>| {
        while pid.map_or(!awaited.is_empty(), |pid| awaited.contains(&pid)) {
            let left = until.saturating_duration_since(Instant::now());
            let Ok((which, found)) = answers.recv_timeout(left) else { return false };
            awaited.remove(&which);
            done.push((which, Some(found)));
        }
        true
    };
    let mut worker = None;
    let mut here = Vec::new();
    for pid in pids {
        worker = worker.or_else(|| begin(look, answer.clone()));
        if worker.as_ref().is_some_and(|ask: &Sender<u32>| ask.send(pid).is_ok()) {
            awaited.insert(pid);
            if !await_until(Instant::now() + BESIDE, &mut awaited, Some(pid)) {
                worker = None;
            }
        } else {
            // No thread is to be had.
            here.push((pid, Some(look(pid))));
        }
    }
    await_until(Instant::now() + LAST, &mut awaited, None);
    done.extend(here);
    done.extend(awaited.into_iter().map(|pid| (pid, None)));
    done
}

pub const LATE: &str = "it keeps whoever reads of it waiting";

pub fn one<R: Send + 'static>(pid: u32, look: fn(u32) -> R) -> anyhow::Result<R> {
    let found = each([pid], look).into_iter().next().and_then(|(_, found)| found);
    found.with_context(|| format!("process {pid}: {LATE}"))
}

/// A thread that looks at processes one by one.
fn begin<R: Send + 'static>(look: fn(u32) -> R, answer: Sender<(u32, R)>) -> Option<Sender<u32>> {
    let (ask, asked) = channel();
    let work = move || {
        for pid in asked {
            let _ = answer.send((pid, look(pid)));
        }
    };
    Builder::new().spawn(work).ok().map(|_| ask)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_keeps_us_waiting_is_left_behind() {
        let look = |pid: u32| {
            if pid % 10 == 3 {
                loop {
                    std::thread::park();
                }
            }
            pid * 2
        };
        let mut found = each(0..40, look);
        found.sort_unstable();
        let expected = (0..40).map(|pid| (pid, (pid % 10 != 3).then_some(pid * 2)));
        assert_eq!(found, expected.collect::<Vec<_>>());
    }
}
