//! How long a port that has no room is waited for, where there are others: their frames stand behind it in what the thread reads.

/// At a time, and in all before some is earned again.
const MOST_MS: u64 = 50;
/// Where others are sent to as well, so many milliseconds earn one.
const SHARE: u64 = 4;

/// Of one other port.
pub(super) struct Patience {
    left_ms: u64,
    since_ms: u64,
    /// It has taken so many messages when it was waited for in vain. While it takes no more it is not waited for.
    stuck: Option<u64>,
}

impl Default for Patience {
    fn default() -> Patience {
        Patience { left_ms: MOST_MS, since_ms: 0, stuck: None }
    }
}

impl Patience {
    /// Until when it is waited for; `None`: it is not. `taken`: messages by the port; `alone`: nobody else was sent to lately.
    pub fn begin(&mut self, now_ms: u64, taken: u64, alone: bool) -> Option<u64> {
        if self.stuck.is_some_and(|before| before == taken) {
            return None;
        }
        let earned = if alone { MOST_MS } else { now_ms.saturating_sub(self.since_ms) / SHARE };
        if earned > 0 {
            (self.left_ms, self.since_ms) = ((self.left_ms + earned).min(MOST_MS), now_ms);
        }
        self.stuck = None;
        (self.left_ms > 0).then_some(now_ms + self.left_ms)
    }

    /// The wait until then is over: there was room, or it was in vain.
    pub fn end(&mut self, now_ms: u64, until_ms: u64, stuck: Option<u64>) {
        (self.left_ms, self.since_ms) = (until_ms.saturating_sub(now_ms), now_ms);
        self.stuck = stuck;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Who does as little as it takes holds others up for a part of the time; who does nothing, once.
    #[test]
    fn others_lose_a_part_of_the_time_at_most() {
        const ALL: u64 = 10_000;
        for (every, most) in
            [(1, ALL / SHARE + MOST_MS), (40, ALL / SHARE + MOST_MS), (u64::MAX, MOST_MS)]
        {
            let (mut port, mut now, mut waited) = (Patience::default(), 0, 0);
            while now < ALL {
                match port.begin(now, now / every, false) {
                    None => now += 1,
                    Some(until) => {
                        // (It gives way at the last moment; or not.)
                        let gives = now / every != until / every;
                        waited += until - now;
                        now = until;
                        port.end(now, until, (!gives).then_some(now / every));
                    }
                }
            }
            assert!((MOST_MS..=most).contains(&waited), "{every}: {waited}");
        }
        // Where nobody else is sent to, it is waited for each time.
        let mut port = Patience::default();
        for round in 1..100 {
            let now = round * 1000;
            assert_eq!(port.begin(now, round, true), Some(now + MOST_MS));
            port.end(now + MOST_MS, now + MOST_MS, None);
            assert_eq!(port.begin(now + MOST_MS, round, true), Some(now + 2 * MOST_MS));
        }
    }
}
