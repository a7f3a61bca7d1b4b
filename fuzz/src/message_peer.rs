//! Our end of message queues and of a pair of locked buffers, and a mailbox's receiver, while the peer writes what it likes, where it
//! likes: as `ring_peer`, whose segment, scribbles and scripts serve here too.

use crate::ring_peer::{BLANK, IN, OUT, Script, Watched, outside, own_parts, scribble};
use crate::segment::{Segment, with_buffers};
use ringlet_core::layout::*;
use ringlet_core::locked::{self, Locked};
use ringlet_core::mailbox::{Inbox, announce};
use ringlet_core::queue::{self, Message, Next, Rx, Tx};
use ringlet_core::sync::Ordering;
use std::cell::Cell;

struct Side<'a> {
    out: Watched<'a>,
    inward: Watched<'a>,
    tx: Tx,
    rx: Rx,
    locked: Locked,
}

impl<'a> Side<'a> {
    fn new(segment: &'a Segment, out: usize, mischief: &'a Cell<u64>) -> Side<'a> {
        Side {
            out: Watched::new(segment, out, mischief),
            inward: Watched::new(segment, 1 - out, mischief),
            tx: Tx::default(),
            rx: Rx::default(),
            locked: if out == OUT { Locked::client() } else { Locked::server() },
        }
    }

    fn operate(&mut self, which: usize, script: &mut Script) {
        self.out.start();
        self.inward.start();
        match which {
            0 | 1 => self.push(script),
            2 | 3 => self.receive(script),
            4 => self.reserve(script),
            5 => {
                self.tx.drained(&self.out);
                self.tx.outstanding(&self.out);
                self.rx.published_after(&self.inward, script.number(4));
            }
            6 => self.ask(script),
            _ => self.answer(script),
        }
    }

    fn push(&mut self, script: &mut Script) {
        let (len, cuts) = (script.size(), script.cuts());
        let mut data = vec![BLANK; len];
        let writable = self.tx.writable(&self.out);
        let sent = with_buffers(&mut data, &cuts, |from| self.tx.push(&self.out, from));
        let fits = len <= queue::max_bytes(&self.out);
        assert!(sent.is_ok() || !writable || !fits, "a liar's queue stays full, ours has room");
        assert!(sent.is_err() || fits);
        assert!(data.iter().all(|&byte| byte == BLANK), "a send wrote to the program's buffer");
    }

    fn reserve(&mut self, script: &mut Script) {
        let len = script.size();
        let Ok(place) = self.tx.reserve(&self.out, len) else { return };
        assert!(place.room() >= len);
        let sent = script.below(3, len + 1);
        // SAFETY: the vector is valid for its length.
        unsafe { place.write(&self.out, 0, vec![BLANK; sent].as_ptr(), sent) };
        if script.below(1, 4) > 0 {
            self.tx.commit(&self.out, place, sent);
        }
    }

    fn receive(&mut self, script: &mut Script) {
        if let Next::Message(message) = self.rx.peek(&self.inward) {
            assert!(message.len() <= queue::max_bytes(&self.inward));
            self.look_at(&message, script);
            if script.below(1, 4) > 0 {
                self.rx.release(&self.inward, message);
            }
        }
    }

    fn look_at(&self, message: &Message, script: &mut Script) {
        let (room, cuts) = (script.size(), script.cuts());
        let mut data = vec![BLANK; room];
        let n = with_buffers(&mut data, &cuts, |to| message.copy_to(&self.inward, to));
        assert_eq!(n, message.len().min(room));
        assert!(data[n..].iter().all(|&byte| byte == BLANK), "more was written than claimed");
    }

    fn ask(&mut self, script: &mut Script) {
        let len = script.size();
        let Ok(place) = self.locked.reserve(&self.out, len) else {
            return assert!(!self.locked.our_turn() || len > locked::max_bytes(&self.out));
        };
        // SAFETY: the vector is valid for its length.
        unsafe { place.write(&self.out, 0, vec![BLANK; len].as_ptr(), len) };
        self.locked.commit(&self.out, place, len);
    }

    fn answer(&mut self, script: &mut Script) {
        if let Next::Message(message) = self.locked.peek(&self.inward) {
            assert!(message.len() <= locked::max_bytes(&self.inward));
            self.look_at(&message, script);
            self.locked.take_turn(&message);
        }
    }
}

/// A list of lanes that says anything: no lane that is not there is looked at, none twice, and one that has something is found
/// by the time that each had its turn.
fn poll_mailbox(inbox: &mut Inbox, script: &mut Script) {
    let ready = Ready::default();
    let lanes = 1 + script.below(2, LANE_MAX_COUNT);
    ready.summary.store(script.number(8), Ordering::Relaxed);
    ready.words.iter().for_each(|word| word.store(script.number(8), Ordering::Relaxed));
    announce(&ready, script.number(2) as usize);
    let busy = script.below(2, lanes);
    let found = (0..lanes).any(|_| {
        let mut looks = 0;
        let found = inbox.poll([&ready], lanes, |lane| {
            looks += 1;
            assert!(lane < lanes && looks <= lanes + 1);
            lane == busy
        });
        assert!(found.is_none_or(|lane| lane == busy));
        found.is_some()
    });
    assert!(found);
}

pub fn run(script: &[u8]) {
    let mut script = Script(script);
    let segment = Segment::new(RING_MIN_BYTES << script.below(1, 3));
    let mischief = Cell::new(0);
    let (mut we, mut peer) =
        (Side::new(&segment, OUT, &mischief), Side::new(&segment, IN, &mischief));
    let own = own_parts(&segment);
    let mut inbox = Inbox::default();
    while !script.0.is_empty() {
        let what = script.below(1, 256);
        match what >> 5 {
            0 | 1 => scribble(&segment, &mut script),
            2 | 3 => peer.operate(what % 8, &mut script),
            4 => {
                mischief.set(script.number(4));
                we.operate(what % 8, &mut script);
                mischief.set(0);
            }
            5 => {
                let before = outside(&segment, &own);
                we.operate(what % 8, &mut script);
                assert!(before == outside(&segment, &own), "wrote to what is not ours");
            }
            6 if what % 32 == 0 => poll_mailbox(&mut inbox, &mut script),
            _ => we.operate(what % 8, &mut script),
        }
    }
}
