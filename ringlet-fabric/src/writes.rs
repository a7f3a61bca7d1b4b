//! Writes: what was given and is not acknowledged, and what has arrived. They have no order among themselves.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::wire::{FIRST, WRITES, ahead};

/// Memory that one of both nodes has registered, by its number there. Numbers are not used again.
#[derive(Serialize, Deserialize, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Memory(pub u32);

/// A write, which can be done again as long as it stands here.
#[derive(Clone, Copy, Debug)]
pub struct Write {
    pub from: Memory,
    pub at: usize,
    pub bytes: usize,
    pub to: Memory,
    pub offset: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum State {
    ToDo,
    /// This way.
    Under(usize),
    Arrived,
}

pub struct Writes {
    /// The number of the first one.
    first: u32,
    list: VecDeque<(Write, State)>,
    /// None before this one is to be done.
    looked: usize,
}

impl Writes {
    pub fn new() -> Writes {
        Writes { first: FIRST, list: VecDeque::new(), looked: 0 }
    }

    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// The number of the next one.
    pub fn next(&self) -> u32 {
        self.first.wrapping_add(self.list.len() as u32)
    }

    /// All before this one have arrived.
    pub fn first(&self) -> u32 {
        self.first
    }

    pub fn kept_bytes(&self) -> usize {
        self.list.capacity() * size_of::<(Write, State)>()
    }

    /// By which rail the first one went, and its number.
    pub fn oldest(&self) -> Option<(usize, u32)> {
        match self.list.front()? {
            (_, State::Under(way)) => Some((*way, self.first)),
            _ => None,
        }
    }

    pub fn has_room(&self) -> bool {
        self.list.len() < WRITES
    }

    /// False: there is no room.
    pub fn push(&mut self, write: Write) -> bool {
        let fits = self.has_room();
        if fits {
            self.list.push_back((write, State::ToDo));
        }
        fits
    }

    /// The first one that is to be done, with its number.
    pub fn unsent(&mut self) -> Option<(u32, Write, &mut State)> {
        while self.list.get(self.looked).is_some_and(|(_, state)| *state != State::ToDo) {
            self.looked += 1;
        }
        let number = self.first.wrapping_add(self.looked as u32);
        let (write, state) = self.list.get_mut(self.looked)?;
        Some((number, *write, state))
    }

    /// Is one of these to be done, or under way?
    pub fn any(&self, is: impl Fn(&Write) -> bool) -> bool {
        self.list.iter().any(|(write, state)| *state != State::Arrived && is(write))
    }

    /// All before this one have arrived. `tell`: of each that is acknowledged by that.
    pub fn acknowledge(
        &mut self,
        number: u32,
        mut tell: impl FnMut(&Write, State),
    ) -> Result<(), Error> {
        let Some(n) = ahead(number, self.first) else { return Ok(()) };
        // What is to be done has not arrived.
        if n > self.list.len() || self.list.range(..n).any(|(_, state)| *state == State::ToDo) {
            return Err(Error::Arrival(number));
        }
        self.list.drain(..n).for_each(|(write, state)| tell(&write, state));
        self.first = number;
        self.looked = self.looked.saturating_sub(n);
        Ok(())
    }

    /// This way is given up on both sides. Of what was under way there, all but this has arrived: it is to be done again.
    pub fn leave(&mut self, way: usize, receipt: &Receipt) -> Result<(), Error> {
        for beyond in &receipt.beyond {
            let number = receipt.arrived.wrapping_add(u32::from(*beyond));
            let Some(nth) = ahead(number, self.first) else { continue };
            match self.list.get_mut(nth) {
                Some((_, state)) if *state != State::ToDo => *state = State::Arrived,
                _ => return Err(Error::Arrival(number)),
            }
        }
        for (_, state) in self.list.iter_mut().filter(|(_, state)| *state == State::Under(way)) {
            *state = State::ToDo;
        }
        self.looked = 0;
        Ok(())
    }
}

/// Which writes have arrived: all before one, and some behind it, by their distance.
#[derive(Serialize, Deserialize, Clone, PartialEq, Eq, Debug)]
pub struct Receipt {
    pub arrived: u32,
    pub beyond: Vec<u16>,
}

/// The writes of the other node's that have arrived here.
pub struct Arrived {
    next: u32,
    /// By number: those behind `next`.
    beyond: Box<[u64; WRITES / 64]>,
}

impl Arrived {
    pub fn new() -> Arrived {
        Arrived { next: FIRST, beyond: Box::new([0; WRITES / 64]) }
    }

    /// The first that has not arrived.
    pub fn next(&self) -> u32 {
        self.next
    }

    fn place(number: u32) -> (usize, u64) {
        let bit = number as usize % WRITES;
        (bit / 64, 1 << (bit % 64))
    }

    /// A write whose number ends so has arrived. Was one before it missing?
    pub fn note(&mut self, end: u16) -> Result<(), Error> {
        let distance = end.wrapping_sub(self.next as u16);
        if usize::from(distance) >= WRITES {
            // One that is told again, or none.
            let is_known = usize::from(distance.wrapping_neg()) <= WRITES;
            return if is_known { Ok(()) } else { Err(Error::Notice(end)) };
        }
        let (word, bit) = Arrived::place(self.next.wrapping_add(distance.into()));
        self.beyond[word] |= bit;
        loop {
            let (word, bit) = Arrived::place(self.next);
            if self.beyond[word] & bit == 0 {
                return Ok(());
            }
            self.beyond[word] &= !bit;
            self.next = self.next.wrapping_add(1);
        }
    }

    pub fn receipt(&self) -> Receipt {
        let is_here = |distance: &u16| {
            let (word, bit) = Arrived::place(self.next.wrapping_add(u32::from(*distance)));
            self.beyond[word] & bit != 0
        };
        Receipt { arrived: self.next, beyond: (0..WRITES as u16).filter(is_here).collect() }
    }
}
