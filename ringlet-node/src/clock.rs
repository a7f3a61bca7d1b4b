//! Time as this process has had it. Who measures by the machine's clock how long others take to answer finds, after it stood still itself (a stopped process, a
//! machine that was suspended or swapped), that all of them hang. So a wait that was longer than it was meant to be counts as next to none.

use std::sync::Mutex;
use std::sync::PoisonError;
use std::time::{Duration, Instant};

/// Of a thread that has other work, or waits for a processor.
const SLACK: Duration = Duration::from_millis(500);

/// Since it began.
pub type Moment = Duration;

pub struct Clock(Mutex<(Instant, Moment)>);

impl Clock {
    pub fn new() -> Clock {
        Clock(Mutex::new((Instant::now(), Moment::ZERO)))
    }

    /// Its one thread has waited, for no longer than so long unless it stood still.
    pub fn waited(&self, patience: Duration) {
        self.passed(Instant::now(), patience);
    }

    fn passed(&self, now: Instant, patience: Duration) {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (before, moment) = *state;
        let time = now.duration_since(before);
        *state = (now, moment + if time > patience + SLACK { SLACK } else { time });
    }

    pub fn now(&self) -> Moment {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).1
    }

    pub fn since(&self, moment: Moment) -> Duration {
        self.now().saturating_sub(moment)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pause_is_no_time() {
        let clock = Clock::new();
        let (began, second) = (Instant::now(), Duration::from_secs(1));
        for turn in 1..=10 {
            clock.passed(began + turn * second, second);
        }
        let before = clock.now();
        assert!(before >= 9 * second && before < 11 * second);
        clock.passed(began + 3600 * second, second);
        assert_eq!(clock.since(before), SLACK);
    }
}
