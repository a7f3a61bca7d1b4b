//! Who waits for whom. Two meet if each holds a socket, the pairs of numbers with which these began mirror each other, one of them connected and
//! the other accepted, there is no third socket with such a pair, and the policy allows it.

use std::collections::HashMap;

use ringlet::reasons::Reason;

use crate::notes::{ACCEPTED, CONNECTED, Note, Notes, Pair};

/// What becomes of one who has shown a socket.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// The far end has not come yet.
    Wait,
    /// It has: this guest.
    With(u64),
    /// It never will.
    Apart(Reason),
}

/// Who waits: by its socket's cookie, the guest.
#[derive(Default)]
pub struct Hall {
    waiting: HashMap<u64, u64>,
    /// By how their connections began: who waits for an end on another host, and on which.
    seeking: HashMap<Pair, (u64, String)>,
}

impl Hall {
    pub fn len(&self) -> usize {
        self.waiting.len()
    }

    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// A guest shows the socket of this cookie, which it says that it accepted or not. The far end's guest, if it waits, is not taken out yet. The other
    /// is a guest who waited with the same socket, and does no more.
    pub fn come(
        &mut self,
        notes: &impl Notes,
        guest: u64,
        cookie: u64,
        accepting: bool,
    ) -> (Verdict, Option<u64>) {
        let far = match far_end(notes, cookie, accepting) {
            Ok(far) => far,
            Err(reason) => return (Verdict::Apart(reason), None),
        };
        match self.waiting.get(&far) {
            Some(far) => (Verdict::With(*far), None),
            None => (Verdict::Wait, self.waiting.insert(cookie, guest)),
        }
    }

    /// A guest whose far end is on no socket of this host waits for one on that node. The other is a guest who did so with the same socket.
    pub fn seek(&mut self, guest: u64, note: &Note, node: &str) -> Option<u64> {
        self.seeking.insert(note.pair, (guest, node.to_owned())).map(|(replaced, _)| replaced)
    }

    /// Does the guest with this pair wait for an end on that node?
    pub fn seeks_at(&self, pair: Pair, node: &str) -> bool {
        self.seeking.get(&pair).is_some_and(|(_, on)| on == node)
    }

    /// The guest who waits for this end of that node's, and for no other.
    pub fn sought(&self, notes: &impl Notes, node: &str, pair: Pair) -> Option<u64> {
        let (guest, on) = self.seeking.get(&pair.mirrored())?;
        // (A pair that came twice meanwhile, here, is nobody's.)
        let alone = notes.with(pair.mirrored()).is_some_and(|cookie| cookie != 0);
        (on == node && alone && notes.with(pair).is_none()).then_some(*guest)
    }

    pub fn seek_no_more(&mut self, pair: Pair, guest: u64) {
        if self.seeking.get(&pair).is_some_and(|(seeking, _)| *seeking == guest) {
            self.seeking.remove(&pair);
        }
    }

    /// A guest who waited with this socket has gone, or has met somebody.
    pub fn leave(&mut self, cookie: u64, guest: u64) {
        if self.waiting.get(&cookie) == Some(&guest) {
            self.waiting.remove(&cookie);
        }
    }
}

/// The socket at the far end of this one.
fn far_end(notes: &impl Notes, cookie: u64, accepting: bool) -> Result<u64, Reason> {
    let near = notes.of(cookie).ok_or(Reason::NoNote)?;
    // (It may have been forgotten, and its place in the other map be another's.)
    let is = |note: &Note, cookie| notes.with(note.pair) == Some(cookie);
    if (near.side == ACCEPTED) != accepting {
        return Err(Reason::BadPeer);
    }
    let far_cookie = match notes.with(near.pair.mirrored()) {
        None | Some(0) => return Err(Reason::NoMirror),
        Some(far) if far == cookie => return Err(Reason::NoMirror),
        Some(far) => far,
    };
    let far = notes.of(far_cookie).ok_or(Reason::NoNote)?;
    let sides = [near.side, far.side];
    let opposite = sides == [CONNECTED, ACCEPTED] || sides == [ACCEPTED, CONNECTED];
    let mirrored = far.pair == near.pair.mirrored();
    // A pair that came twice is nobody's.
    let alone = is(&near, cookie) && is(&far, far_cookie);
    if opposite && mirrored && alone { Ok(far_cookie) } else { Err(Reason::NoMirror) }
}
