//! What was decided, and why: a line for each to stderr, the last ones for `ringlet node status`.

use std::collections::{BTreeMap, VecDeque};
use std::io::Write as _;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde::Serialize;

/// Lines in a second: more are counted only, so that a flood of guests is none of lines.
const LINES: u32 = 200;
const KEPT: usize = 64;

#[derive(Serialize, Clone)]
pub struct Decision {
    pub when: u64,
    /// `met`, or the code of the reason why not.
    pub outcome: &'static str,
    pub about: String,
}

pub struct Journal {
    counts: BTreeMap<&'static str, u64>,
    last: VecDeque<Decision>,
    second: Instant,
    lines: u32,
    untold: u64,
    quiet: bool,
}

impl Journal {
    pub fn new(quiet: bool) -> Journal {
        Journal {
            counts: BTreeMap::new(),
            last: VecDeque::new(),
            second: Instant::now(),
            lines: 0,
            untold: 0,
            quiet,
        }
    }

    pub fn note(&mut self, outcome: &'static str, about: impl FnOnce() -> String) {
        *self.counts.entry(outcome).or_default() += 1;
        if self.second.elapsed() >= Duration::from_secs(1) {
            self.second = Instant::now();
            self.lines = 0;
            let untold = std::mem::take(&mut self.untold);
            if untold > 0 && !self.quiet {
                say(&format!("{untold} more decisions"));
            }
        }
        self.lines = self.lines.saturating_add(1);
        if self.lines > LINES {
            self.untold += 1;
            return;
        }
        let when = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let decision = Decision { when, outcome, about: about() };
        if !self.quiet {
            say(&format!("{outcome}: {}", decision.about));
        }
        if self.last.len() == KEPT {
            self.last.pop_front();
        }
        self.last.push_back(decision);
    }

    pub fn counts(&self) -> &BTreeMap<&'static str, u64> {
        &self.counts
    }

    pub fn last(&self) -> impl Iterator<Item = &Decision> {
        self.last.iter()
    }
}

/// (Who does not listen is none of our business.)
pub fn say(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}
