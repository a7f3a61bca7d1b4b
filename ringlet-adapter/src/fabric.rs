//! Writes on their way, by chance: as over a fabric that keeps no order. Each is of whole lines, is delayed, and may be repeated as long as what it
//! has written may still stand there. What must be behind something else waits until that is done, as a card waits for a completion.

use crate::link::Flow;
use ringlet_core::course::{Credit, Piece};
use ringlet_core::layout::LINE_BYTES;
use ringlet_core::mirror::ReceiverLine;

pub(crate) struct Fabric {
    random: Random,
    /// By the end that sends.
    ways: [Way; 2],
}

#[derive(Default)]
struct Way {
    flights: Vec<Flight>,
    back: Option<(Back, Stage)>,
    /// News of the receiver's that were sent on their way, and those that have arrived.
    backs: u64,
    backs_done: u64,
    /// Looks at the receiver's words.
    looked: u64,
}

struct Flight {
    piece: Piece,
    /// Stretches of the data that are not written.
    data: Vec<(usize, usize)>,
    put: bool,
}

/// News of the receiver's: its words, of which two come before the credit.
pub(crate) struct Back {
    pub first: ReceiverLine,
    pub credit: Option<Credit>,
    pub last: ReceiverLine,
}

#[derive(Clone, Copy)]
enum Stage {
    First,
    Credit,
    Last,
}

/// xorshift64*.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, n: usize) -> usize {
        (((self.next() >> 32) * n as u64) >> 32) as usize
    }

    fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }
}

impl Fabric {
    pub fn new(seed: u64) -> Fabric {
        // (Any seed but one is a state.)
        let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        random.next();
        Fabric { random, ways: Default::default() }
    }

    pub fn send(&mut self, sender: usize, piece: Piece) {
        let mut data = Vec::new();
        let mut at = 0;
        while at < piece.len {
            let most = if self.random.one_in(2) { 4 } else { 128 };
            let lines = 1 + self.random.below(most);
            let n = (lines * LINE_BYTES).min(piece.len - at);
            data.push((at, n));
            at += n;
        }
        self.ways[sender].flights.push(Flight { piece, data, put: false });
    }

    /// Some of the writes that are on their way. Was a record put in its place; and is something still to be done?
    pub fn pass_records(&mut self, sender: usize, flow: &mut Flow) -> (bool, bool) {
        let Fabric { random, ways } = self;
        let flights = &mut ways[sender].flights;
        let before = flights.len();
        let mut put = false;
        if before == 0 || random.one_in(4) {
            return (false, flights.iter().any(|flight| !flight.put));
        }
        for _ in 0..random.below(2 * before + 2) {
            let flight = &mut flights[random.below(before)];
            if !flight.data.is_empty() {
                let nth = random.below(flight.data.len());
                let (at, n) = flight.data[nth];
                flow.copy_data(flight.piece.place + at, n);
                // (Else it is written again.)
                if !random.one_in(8) {
                    flight.data.swap_remove(nth);
                }
            } else if !flight.put {
                flow.put(&flight.piece);
                (flight.put, put) = (true, true);
            } else if random.one_in(4) {
                // Once more, all of it.
                flow.copy_data(flight.piece.place, flight.piece.len);
                flight.piece.put(&flow.to);
            }
        }
        (put, flights.iter().any(|flight| !flight.put))
    }

    /// May news of the receiver's be sent on their way?
    pub fn takes_back(&self, sender: usize) -> bool {
        self.ways[sender].back.is_none()
    }

    /// Does the next of their writes. `None`: there are none; else, was it a credit behind which a sender that waits is looked for?
    pub fn pass_back(
        &mut self,
        sender: usize,
        flow: &mut Flow,
        news: Option<Back>,
    ) -> Option<bool> {
        let Fabric { random, ways } = self;
        let way = &mut ways[sender];
        if way.back.is_none() {
            way.looked += 1;
            way.backs += news.is_some() as u64;
            way.back = news.map(|back| (back, Stage::First));
        }
        let (back, stage) = way.back.as_mut()?;
        if random.one_in(2) {
            return Some(false);
        }
        let again = random.one_in(8);
        let looks =
            matches!(stage, Stage::Credit) && back.credit.is_some_and(|credit| credit.looks);
        match stage {
            Stage::First => flow.put_first(back),
            Stage::Credit => {
                // What it gives back may be written by the sender from then on: it is not repeated any more.
                if let Some(credit) = back.credit {
                    way.flights.retain(|flight| flight.piece.position >= credit.slots);
                }
                flow.put_credit(back);
            }
            Stage::Last => flow.put_last(back),
        }
        match (again, &stage) {
            (true, _) => {}
            (_, Stage::First) => *stage = Stage::Credit,
            (_, Stage::Credit) => *stage = Stage::Last,
            (_, Stage::Last) => {
                way.back = None;
                way.backs_done += 1;
            }
        }
        Some(looks)
    }

    /// What this end says as a receiver is read again from here on (`is_behind`).
    pub fn backs(&self, receiver: usize) -> (u64, u64) {
        let way = &self.ways[1 - receiver];
        (way.looked, way.backs)
    }

    /// Have all records of this end's before this one arrived, and what it has said as a receiver?
    pub fn is_behind(&mut self, end: usize, upto: u64, (looked, backs): (u64, u64)) -> bool {
        let missing = |flight: &Flight| !flight.put && flight.piece.position < upto;
        let other = &self.ways[1 - end];
        let arrived = other.looked > looked && (other.back.is_none() || other.backs_done > backs);
        arrived && !self.ways[end].flights.iter().any(missing) && !self.random.one_in(3)
    }
}
