//! A locked buffer (the ORL paper's §4.1) for strict request and response: two ends that take turns, and one buffer for each.
//!
//! The paper's two semaphores are one count of turns here: even ones are the client's, odd ones the server's. Who has the turn
//! writes its message into its own buffer and publishes it with the turn's number; with that the turn is the other's. Since the
//! answer says that the question was read, there are no credits, and always the same lines: a short message costs one.
//!
//! A buffer is a direction's first slot, and its data ring from the beginning for what does not fit there.

use crate::layout::*;
use crate::queue::{Message, Next, Refused, Reserved};
use crate::record::{PlainU64, RingMemory, header_word, look, write_word};

/// The longest message that a buffer holds.
pub fn max_bytes<M: RingMemory>(memory: &M) -> usize {
    memory.ring_bytes().clamp(INLINE_BYTES, MESSAGE_MAX_BYTES)
}

/// One end. Hand it its own direction's memory to send and the other's to receive.
pub struct Locked {
    turn: PlainU64,
    parity: u64,
}

impl Locked {
    pub fn client() -> Locked {
        Locked { turn: PlainU64::default(), parity: 0 }
    }

    pub fn server() -> Locked {
        Locked { turn: PlainU64::default(), parity: 1 }
    }

    /// Is it our turn to send?
    #[inline(always)]
    pub fn our_turn(&self) -> bool {
        self.turn.get() & 1 == self.parity
    }

    /// Our buffer, for a message of up to `len` bytes; refused as `Full` while the turn is the other's.
    #[inline(always)]
    pub fn reserve<M: RingMemory>(&self, ours: &M, len: usize) -> Result<Reserved, Refused> {
        if len > max_bytes(ours) {
            return Err(Refused::TooLong);
        }
        if !self.our_turn() {
            return Err(Refused::Full);
        }
        let inline = len <= INLINE_BYTES;
        Ok(Reserved {
            slot: 0,
            data: (!inline).then_some(0),
            room: if inline { INLINE_BYTES } else { len },
        })
    }

    /// Sends the first `len` bytes of what was reserved, and the turn with it. Panics when so many were not reserved, or when it
    /// is not our turn.
    #[inline(always)]
    pub fn commit<M: RingMemory>(&self, ours: &M, reserved: Reserved, len: usize) {
        assert!(len <= reserved.room && self.our_turn());
        let turn = self.turn.get();
        self.turn.set(turn + 1);
        let mut flags = 0;
        if reserved.data.is_some() && len > 0 {
            flags = FLAG_DATA;
            write_word(ours, 0, 8, 0);
        }
        ours.publish(0, header_word(turn, flags, len));
    }

    /// Is the other's message there? The cheapest look, for spinning.
    #[inline(always)]
    pub fn ready<M: RingMemory>(&self, theirs: &M) -> bool {
        !matches!(self.peek(theirs), Next::Empty)
    }

    /// The other's message, left where it is.
    #[inline(always)]
    pub fn peek<M: RingMemory>(&self, theirs: &M) -> Next {
        if self.our_turn() {
            return Next::Empty;
        }
        match look(theirs, 0, self.turn.get(), max_bytes(theirs)) {
            Ok(None) => Next::Empty,
            Ok(Some(record)) if !record.is_control() => Next::Message(Message(record)),
            _ => Next::Corrupt,
        }
    }

    /// Takes the turn. The message stays readable in place until our next one is sent: to answer is to release.
    #[inline(always)]
    pub fn take_turn(&self, message: &Message) {
        debug_assert!(message.0.position == self.turn.get());
        self.turn.set(message.0.position + 1);
    }
}
