//! What a sender to a mailbox does behind each message.

use super::Error;
use super::bell::Bell;
use super::segment::{Mapping, map_segment};
use ringlet_core::layout::{LANE_MAX_COUNT, PAGE_BYTES};
use ringlet_core::mailbox::announce;
use ringlet_core::wait;
use ringlet_linux::meet::Fds;
use std::cell::Cell;

/// What a sender does after it has published.
pub(super) struct Announcer {
    ready: Mapping,
    flag: Mapping,
    lane: usize,
    /// The value of the flag for which we rang last.
    rung: Cell<u64>,
}

impl Announcer {
    /// From what the mailbox sent, of the descriptors behind the first one; checked.
    pub fn new(fds: &mut Fds, lane: u32) -> Result<Announcer, Error> {
        if lane as usize >= LANE_MAX_COUNT {
            return Err(Error::PeerCorrupt);
        }
        Ok(Announcer {
            ready: map_segment(fds.take(1), PAGE_BYTES, true)?,
            flag: map_segment(fds.take(2), PAGE_BYTES, false)?,
            lane: lane as usize,
            rung: Cell::new(0),
        })
    }

    /// True if the receiver slept, and was rung for.
    #[inline]
    pub fn published(&self, bell: &Bell) -> bool {
        announce(self.ready.0.at(0), self.lane);
        let armed = wait::armed(self.flag.0.at(0), self.rung.get());
        if let Some(value) = armed {
            self.rung.set(value);
            bell.ring();
        }
        armed.is_some()
    }
}
