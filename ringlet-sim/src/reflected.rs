//! A lock in reflected memory (Memory Channel): each node has a word that all nodes see, and all see all words change in one
//! order. Hence who sees its own wish come back from the hub has seen all wishes before it.
//!
//! The lower number goes first (Burns and Lamport's one-bit algorithm): a node that finds a lower one's wish takes its own back.

use ringlet_core::sync::Ordering::Relaxed;

use crate::cluster::{Context, Program, Step};
use crate::from_us;
use crate::rings::{Pattern, Traffic};

const FREE: u64 = 1;
const WANTED: u64 = 2;
/// Above them a word has the number of the change, so that each is seen.
const STATE_BITS: u32 = 2;

#[derive(PartialEq, Eq)]
enum At {
    Joining,
    Outside,
    Waiting,
    Inside,
}

/// The program of a node.
pub struct Reflected {
    at: At,
    /// What our word is, once it has come back.
    word: u64,
    left: u32,
    /// Who takes part.
    open: Vec<bool>,
    look_again: bool,
}

impl Reflected {
    pub fn new(traffic: &Traffic, node: usize) -> Reflected {
        let wants = node == 0 || traffic.pattern == Pattern::AllToAll;
        Reflected {
            at: At::Joining,
            word: 0,
            left: if wants { traffic.messages } else { 0 },
            open: vec![true; traffic.nodes],
            look_again: traffic.look_again,
        }
    }

    fn write(&mut self, cx: &Context, state: u64) {
        self.word = ((self.word >> STATE_BITS) + 1) << STATE_BITS | state;
        cx.node.reflect(self.word);
    }

    /// Do those of `others` that take part not want it? Of a node that has joined and not been heard of, nothing is known.
    fn free(&self, cx: &Context, mut others: impl Iterator<Item = usize>) -> bool {
        let free = |word: u64| word & ((1 << STATE_BITS) - 1) == FREE;
        others.all(|node| !self.open[node] || free(cx.node.reflected(node).load(Relaxed)))
    }
}

impl Program for Reflected {
    fn step(&mut self, cx: &mut Context) -> Step {
        let (here, nodes) = (cx.node.id, self.open.len());
        // One look: the words that have not changed are in the cache.
        cx.node.work(from_us(cx.profile.node.look_us));
        match self.at {
            At::Joining => {
                self.write(cx, FREE);
                self.at = At::Outside;
            }
            At::Outside => {
                let known =
                    |node: usize| !self.open[node] || cx.node.reflected(node).load(Relaxed) != 0;
                if self.left == 0 || !(0..nodes).all(known) || !self.free(cx, 0..here) {
                    return Step::Poll;
                }
                self.write(cx, WANTED);
                self.at = At::Waiting;
            }
            At::Waiting
                if self.look_again && cx.node.reflected(here).load(Relaxed) != self.word =>
            {
                return Step::Poll;
            }
            At::Waiting if !self.free(cx, 0..here) => {
                self.write(cx, FREE);
                self.at = At::Outside;
            }
            At::Waiting if !self.free(cx, here + 1..nodes) => return Step::Poll,
            At::Waiting => {
                cx.ledger.locked(here);
                self.at = At::Inside;
            }
            At::Inside => {
                cx.ledger.unlocked(here);
                self.left -= 1;
                self.write(cx, FREE);
                self.at = At::Outside;
            }
        }
        Step::Again
    }

    fn lost(&mut self, _: &mut Context, peer: usize) {
        self.open[peer] = false;
    }

    /// It has no memory of us.
    fn reconnected(&mut self, cx: &mut Context, peer: usize) {
        self.open[peer] = true;
        if self.at != At::Joining {
            cx.node.reflect(self.word);
        }
    }

    fn planned(&self) -> u64 {
        u64::from(self.left)
    }
}
