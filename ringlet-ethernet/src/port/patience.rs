//! How long a port that has no room is waited for, where there are others: their frames stand behind it in what the thread reads.

/// At a time, and in all before some is earned again.
const MOST_MS: u64 = 50;
/// So many milliseconds in which the thread waited for nobody earn one, for all ports together.
const SHARE: u64 = 4;
/// The same for one of them, so that it leaves something to the others.
const SHARE_OF_ONE: u64 = 2 * SHARE;

struct Budget {
    left_ms: u64,
    since_ms: u64,
}

impl Budget {
    const NEW: Budget = Budget { left_ms: MOST_MS, since_ms: 0 };

    /// `free_ms`: the time in which nobody was waited for.
    fn earn(&mut self, free_ms: u64, share: u64) {
        let earned = free_ms.saturating_sub(self.since_ms) / share;
        self.since_ms += earned * share;
        self.left_ms = (self.left_ms + earned).min(MOST_MS);
    }
}

/// Of one other port.
pub(super) struct Patience {
    budget: Budget,
    /// It has taken so many messages when it was waited for in vain. While it takes no more it is not waited for.
    stuck: Option<u64>,
}

impl Default for Patience {
    fn default() -> Patience {
        Patience { budget: Budget::NEW, stuck: None }
    }
}

/// Of one thread, for all ports that it sends to.
pub(super) struct Waits {
    budget: Budget,
    began_ms: Option<u64>,
    waited_ms: u64,
}

impl Default for Waits {
    fn default() -> Waits {
        Waits { budget: Budget::NEW, began_ms: None, waited_ms: 0 }
    }
}

impl Waits {
    /// Until when a port is waited for; `None`: it is not. `taken`: messages by the port; `alone`: nobody else was sent to lately.
    pub fn begin(
        &mut self,
        port: &mut Patience,
        now_ms: u64,
        taken: u64,
        alone: bool,
    ) -> Option<u64> {
        if port.stuck.is_some_and(|before| before == taken) {
            return None;
        }
        port.stuck = None;
        let free_ms = now_ms.saturating_sub(self.waited_ms);
        self.budget.earn(free_ms, SHARE);
        port.budget.earn(free_ms, SHARE_OF_ONE);
        let most = match alone {
            true => MOST_MS,
            false => self.budget.left_ms.min(port.budget.left_ms),
        };
        let until = (most > 0).then_some(now_ms + most);
        self.began_ms = until.map(|_| now_ms);
        until
    }

    /// The wait for this port is over: there was room, or it was in vain.
    pub fn end(&mut self, port: &mut Patience, now_ms: u64, stuck: Option<u64>) {
        let waited = self.end_of_none(now_ms);
        port.budget.left_ms = port.budget.left_ms.saturating_sub(waited);
        port.stuck = stuck;
    }

    /// The same, of a port that has gone, or whose frame was given up; how long it was.
    pub fn end_of_none(&mut self, now_ms: u64) -> u64 {
        let waited = self.began_ms.take().map_or(0, |began| now_ms.saturating_sub(began));
        self.waited_ms += waited;
        self.budget.left_ms = self.budget.left_ms.saturating_sub(waited);
        waited
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: u64 = 10_000;

    /// How long each of so many ports was waited for that take a message every so many milliseconds, and give way at the last moment, or don't.
    fn waited(ports: usize, every: u64) -> Vec<u64> {
        let mut all: Vec<(Patience, u64)> = (0..ports).map(|_| Default::default()).collect();
        let (mut waits, mut now) = (Waits::default(), 0);
        while now < ALL {
            for (port, waited) in &mut all {
                if let Some(until) = waits.begin(port, now, now / every, false) {
                    let gives = now / every != until / every;
                    *waited += until - now;
                    now = until;
                    waits.end(port, now, (!gives).then_some(now / every));
                }
            }
            now += 1;
        }
        all.into_iter().map(|(_, waited)| waited).collect()
    }

    /// However many do as little as it takes, they hold others up for a part of the time; who does nothing, once.
    #[test]
    fn others_lose_a_part_of_the_time_at_most() {
        for ports in [1, 2, 5, 8, 100] {
            for every in [1, 40] {
                let waited = waited(ports, every);
                let sum: u64 = waited.iter().sum();
                assert!((MOST_MS..=ALL / SHARE + MOST_MS).contains(&sum), "{ports}: {sum}");
                let most = ALL / SHARE_OF_ONE + MOST_MS;
                assert!(waited.iter().all(|one| *one <= most), "{ports}: {waited:?}");
            }
            assert!(waited(ports, u64::MAX).iter().all(|one| *one <= MOST_MS));
        }
    }

    /// Where nobody else is sent to, it is waited for each time.
    #[test]
    fn who_is_alone_is_waited_for() {
        let (mut waits, mut port) = (Waits::default(), Patience::default());
        for round in 1..100 {
            let now = round * 2 * MOST_MS;
            assert_eq!(waits.begin(&mut port, now, round, true), Some(now + MOST_MS));
            waits.end(&mut port, now + MOST_MS, None);
        }
    }

    /// A wait that a port's coming or going ended has taken its time, too.
    #[test]
    fn what_is_cut_short_counts() {
        let (mut waits, mut now, mut waited) = (Waits::default(), 0, 0);
        while now < ALL {
            if let Some(until) = waits.begin(&mut Patience::default(), now, 0, false) {
                waited += until - now;
                now = until;
                waits.end_of_none(now);
            }
            now += 1;
        }
        assert!((MOST_MS..=ALL / SHARE + MOST_MS).contains(&waited), "{waited}");
    }
}
