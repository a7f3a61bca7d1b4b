//! A connection whose ends share no memory. Each has a segment of its own, in which a relay plays the peer: what the end publishes is taken as
//! parcels, which somebody brings to the other end's relay, each once and in order; that one puts them where the peer would have written. So both
//! ends are what they always are.
//!
//! A parcel: how many replies its end has taken, how many requests it has served (8 bytes each), then slots: the queue (1), the used part of a
//! body, and what is in its buffer. Those two numbers are put before and behind the slots, since
//!
//! - a reply is there before the credit of its request: that is looked at first, and goes with all that was published before it;
//! - whoever serves a request has the buffer of its reply back: that credit is looked at last, so it is as new as each request with which it goes.

use super::connection::slot;
use super::layout::{BUFFER_BYTES, INLINE_BYTES};
use super::memory::{Memory, Queue};
use super::message::{ARGUMENTS, BODY_BYTES, Body, HEAD_BYTES, Kind, RETURNED};

const CREDITS_BYTES: usize = 16;
/// Room for any one slot.
pub const PARCEL_MIN_BYTES: usize = CREDITS_BYTES + 1 + BODY_BYTES + BUFFER_BYTES;
/// Messages taken by an end that its peer need not be told of, unless there is more to say.
const OWED: u64 = 16;

#[derive(Default)]
pub struct Relay {
    /// Messages of each queue that were taken from our end, and put there.
    taken: [u64; 2],
    put: [u64; 2],
    /// The credits that the other end has; and so many requests it has served, as far as it has said, or answered.
    told: [u64; 2],
    served: u64,
}

impl Relay {
    /// Makes a parcel of what our end has published, as far as there is room, and returns its length: 0 if there is nothing. Few messages that it
    /// has only taken are no reason for one, unless the other end is to know `all`.
    pub fn take<M: Memory>(&mut self, memory: &M, all: bool, to: &mut [u8]) -> usize {
        let served = memory.credit(Queue::Request);
        let mut used = CREDITS_BYTES;
        let mut is_full = false;
        for queue in [Queue::Reply, Queue::Request] {
            let taken = &mut self.taken[queue as usize];
            while memory.stamp(queue, slot::<M>(*taken)) == *taken + 1 {
                let Some(len) = take_slot(memory, queue, *taken, &mut to[used..]) else {
                    is_full = true;
                    break;
                };
                *taken += 1;
                used += len;
            }
        }
        let [told_served, told_answered] = self.told;
        let served = if is_full { told_served } else { served };
        let answered = memory.credit(Queue::Reply);
        let owed = (served - told_served).max(answered - told_answered);
        if used == CREDITS_BYTES && (owed == 0 || owed <= OWED && !all) {
            return 0;
        }
        to[..8].copy_from_slice(&answered.to_le_bytes());
        to[8..CREDITS_BYTES].copy_from_slice(&served.to_le_bytes());
        self.told = [served, answered];
        used
    }

    /// Puts a parcel of the other end's. `None` for what no sane peer sends.
    pub fn put<M: Memory>(&mut self, memory: &M, parcel: &[u8]) -> Option<()> {
        let (answered, rest) = parcel.split_first_chunk()?;
        let (served, mut rest) = rest.split_first_chunk()?;
        memory.give_credit(Queue::Reply, u64::from_le_bytes(*answered));
        while let [queue, slots @ ..] = rest {
            let queue =
                [Queue::Request, Queue::Reply].into_iter().find(|each| *each as u8 == *queue)?;
            let put = &mut self.put[queue as usize];
            // (One more than there is room for: a request may be answered, and the next one here, before its own credit is given.)
            if *put > memory.credit(queue).saturating_add(M::DEPTH as u64) {
                return None;
            }
            let (word, behind) = put_slot(memory, queue, *put, slots)?;
            (*put, rest) = (*put + 1, behind);
            // What is answered has left its buffer: its credit needs no parcel of its own.
            if queue == Queue::Reply {
                self.served = self.served.max(word.saturating_add(1));
            }
        }
        self.served = self.served.max(u64::from_le_bytes(*served));
        memory.give_credit(Queue::Request, self.served);
        Some(())
    }
}

/// How much of a body is used, and how much is in its buffer, if it is a message that can be brought over. (One whose bytes are stored is not.)
fn shape<M: Memory>(head: &[u8; HEAD_BYTES]) -> Option<(usize, usize)> {
    let [kind, count, _, extra, len @ ..] = *head.first_chunk::<8>()?;
    let (len, count) = (u32::from_le_bytes(len) as usize, count as usize);
    let used = HEAD_BYTES + 4 * count;
    let kinds = [Kind::Short, Kind::Medium, Kind::Bulk, Kind::Get];
    match kinds.into_iter().find(|each| *each as u8 == kind & !RETURNED)? {
        _ if count > ARGUMENTS || len > BUFFER_BYTES => None,
        _ if kind & RETURNED != 0 => Some((used, 0)),
        Kind::Short if len != 0 => None,
        Kind::Get => Some((used, 0)),
        _ if len + 4 * count <= INLINE_BYTES => Some((used + len, 0)),
        _ if usize::from(extra) < M::DEPTH => Some((used, len)),
        _ => None,
    }
}

/// `None` if there is no room.
fn take_slot<M: Memory>(memory: &M, queue: Queue, position: u64, to: &mut [u8]) -> Option<usize> {
    let mut body: Body = [0; BODY_BYTES];
    memory.read(queue, slot::<M>(position), &mut body);
    let (used, buffered) = shape::<M>(body.first_chunk()?)?;
    let (first, rest) = to.split_first_mut()?;
    let (head, rest) = rest.split_at_mut_checked(used)?;
    let bytes = rest.get_mut(..buffered)?;
    *first = queue as u8;
    head.copy_from_slice(&body[..used]);
    if buffered > 0 {
        // SAFETY: `bytes` is valid for its length.
        unsafe { memory.read_buffer(queue, body[3] as usize, bytes.as_mut_ptr(), buffered) };
    }
    Some(1 + used + buffered)
}

/// Its word (`encode`), and what is behind it.
fn put_slot<'a, M: Memory>(
    memory: &M,
    queue: Queue,
    position: u64,
    from: &'a [u8],
) -> Option<(u64, &'a [u8])> {
    let head: &[u8; HEAD_BYTES] = from.first_chunk()?;
    let (used, buffered) = shape::<M>(head)?;
    let (body, rest) = from.split_at_checked(used)?;
    let (bytes, rest) = rest.split_at_checked(buffered)?;
    if buffered > 0 {
        memory.write_buffer(queue, head[3] as usize, bytes);
    }
    memory.write(queue, slot::<M>(position), body);
    memory.publish(queue, slot::<M>(position), position + 1);
    let (_, word) = head.split_first_chunk::<8>()?;
    Some((u64::from_le_bytes(*word.first_chunk()?), rest))
}
