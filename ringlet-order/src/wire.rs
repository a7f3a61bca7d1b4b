//! Frames between nodes, and what is kept, as bytes. What comes is hostile: each length is checked before it is used, and a fault has a name.

use crate::ballot::{Acceptor, Ballot};
use crate::log::Entry;
use crate::{FRAME_BYTES, Life, PAYLOAD_BYTES};

const VERSION: u8 = 1;
/// The most members that a view has, and the longest name of one: a list of them fits in a frame.
pub const MEMBERS: usize = 100;
pub const NAME_BYTES: usize = 255;
/// Of an entry, but its payload.
const ENTRY_BYTES: usize = 1 + 8 + 4;
/// Before the first entry.
const HEAD_BYTES: usize = 1 + 1 + 8 + 8 + 8 + 4;

pub type Fault = &'static str;

/// No view, place in the order or ballot is beyond it: what is added to one never overflows.
const BEYOND: u64 = 1 << 62;

/// A member of a view: whether it begins there, knowing nothing; and how many of its own were delivered before.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Seat {
    pub life: Life,
    pub joins: bool,
    pub count: u64,
}

/// A view, as it is decided on: `start` is the last place in the order before it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Change {
    pub number: u64,
    pub start: u64,
    pub members: Vec<Seat>,
}

impl Change {
    pub fn place(&self, life: &Life) -> Option<usize> {
        self.members.iter().position(|member| member.life == *life)
    }

    pub fn place_of_node(&self, node: &str) -> Option<usize> {
        self.members.iter().position(|member| member.life.node == node)
    }
}

/// What each tells the others at times, and when there is something new.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Status {
    /// It belongs to that view.
    pub member: bool,
    pub leaving: bool,
    /// Something has come out of turn: send again what is behind `received` or `taken`.
    pub gap: bool,
    /// All that it has delivered.
    pub received: u64,
    /// The hub: the last place that is given; what all have delivered; the last number of who hears this that has a place.
    pub last: u64,
    pub stable: u64,
    pub taken: u64,
}

/// Several payloads, each with its origin and number; read once before, so all are whole.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Entries<'a>(Bytes<'a>);

#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Frame<'a> {
    Status(Status),
    /// Of who sends it; numbers from the first entry's on without a gap.
    Submit {
        received: u64,
        entries: Entries<'a>,
    },
    /// The hub's: `first` is the first one's place.
    Ordered {
        stable: u64,
        first: u64,
        entries: Entries<'a>,
    },
    Prepare {
        ballot: Ballot,
    },
    /// `have`: all of the view's order up to there; none if it was lost.
    Promise {
        ballot: Ballot,
        have: Option<u64>,
        leaving: bool,
        accepted: Option<(Ballot, Change)>,
    },
    /// To another ballot.
    Promised {
        ballot: Ballot,
    },
    /// What is behind `have` is wanted.
    Fetch {
        ballot: Ballot,
        have: u64,
    },
    Level {
        ballot: Ballot,
        first: u64,
        entries: Entries<'a>,
    },
    Propose {
        ballot: Ballot,
        change: Change,
    },
    Accepted {
        ballot: Ballot,
    },
    /// The frame's view is this one's number.
    Decided(Change),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Bytes<'a>(&'a [u8]);

impl<'a> Bytes<'a> {
    fn take(&mut self, bytes: usize) -> Result<&'a [u8], Fault> {
        let (taken, rest) = self.0.split_at_checked(bytes).ok_or("a frame that is cut off")?;
        self.0 = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Fault> {
        Ok(self.take(N)?.try_into().expect("so many were taken"))
    }

    fn u8(&mut self) -> Result<u8, Fault> {
        Ok(self.array::<1>()?[0])
    }

    fn flag(&mut self) -> Result<bool, Fault> {
        match self.u8()? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err("a flag that is neither"),
        }
    }

    fn u64(&mut self) -> Result<u64, Fault> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    fn number(&mut self) -> Result<u64, Fault> {
        Some(self.u64()?).filter(|&number| number < BEYOND).ok_or("a number beyond all")
    }

    fn option<T>(
        &mut self,
        read: impl FnOnce(&mut Self) -> Result<T, Fault>,
    ) -> Result<Option<T>, Fault> {
        self.flag()?.then(|| read(self)).transpose()
    }

    fn life(&mut self) -> Result<Life, Fault> {
        let bytes = self.u8()? as usize;
        let node = str::from_utf8(self.take(bytes)?).map_err(|_| "a name that is no text")?;
        Ok(Life { node: node.into(), incarnation: self.u64()? })
    }

    fn change(&mut self) -> Result<Change, Fault> {
        let (number, start, count) = (self.number()?, self.number()?, self.u8()? as usize);
        if count == 0 || count > MEMBERS {
            return Err("a view of none, or of too many");
        }
        let mut change = Change { number, start, members: Vec::with_capacity(count) };
        for _ in 0..count {
            let member = Seat { life: self.life()?, joins: self.flag()?, count: self.number()? };
            if change.place_of_node(&member.life.node).is_some() {
                return Err("a view that has a node twice");
            }
            change.members.push(member);
        }
        Ok(change)
    }

    fn accepted(&mut self) -> Result<Option<(Ballot, Change)>, Fault> {
        self.option(|bytes| Ok((bytes.number()?, bytes.change()?)))
    }

    fn entry(&mut self) -> Result<(u8, u64, &'a [u8]), Fault> {
        let (origin, number) = (self.u8()?, self.number()?);
        let bytes = u32::from_le_bytes(self.array()?) as usize;
        if bytes > PAYLOAD_BYTES {
            return Err("a payload that is too long");
        }
        Ok((origin, number, self.take(bytes)?))
    }

    /// All that is left.
    fn entries(&mut self) -> Result<Entries<'a>, Fault> {
        let entries = Entries(*self);
        while !self.0.is_empty() {
            self.entry()?;
        }
        Ok(entries)
    }

    fn end(self) -> Result<(), Fault> {
        if self.0.is_empty() { Ok(()) } else { Err("a frame that is too long") }
    }
}

impl<'a> Iterator for Entries<'a> {
    type Item = (u8, u64, &'a [u8]);

    fn next(&mut self) -> Option<Self::Item> {
        self.0.entry().ok()
    }
}

/// The view's number, and what it says of it.
pub fn read(frame: &[u8]) -> Result<(u64, Frame<'_>), Fault> {
    if frame.len() > FRAME_BYTES {
        return Err("a frame that is too long");
    }
    let mut bytes = Bytes(frame);
    if bytes.u8()? != VERSION {
        return Err("another version");
    }
    let kind = bytes.u8()?;
    let view = bytes.number()?;
    let read = match kind {
        0 => Frame::Status(Status {
            member: bytes.flag()?,
            leaving: bytes.flag()?,
            gap: bytes.flag()?,
            received: bytes.number()?,
            last: bytes.number()?,
            stable: bytes.number()?,
            taken: bytes.number()?,
        }),
        1 => Frame::Submit { received: bytes.number()?, entries: bytes.entries()? },
        2 => Frame::Ordered {
            stable: bytes.number()?,
            first: bytes.number()?,
            entries: bytes.entries()?,
        },
        3 => Frame::Prepare { ballot: bytes.number()? },
        4 => Frame::Promise {
            ballot: bytes.number()?,
            have: bytes.option(|bytes| bytes.number())?,
            leaving: bytes.flag()?,
            accepted: bytes.accepted()?,
        },
        5 => Frame::Promised { ballot: bytes.number()? },
        6 => Frame::Fetch { ballot: bytes.number()?, have: bytes.number()? },
        7 => Frame::Level {
            ballot: bytes.number()?,
            first: bytes.number()?,
            entries: bytes.entries()?,
        },
        8 => Frame::Propose { ballot: bytes.number()?, change: bytes.change()? },
        9 => Frame::Accepted { ballot: bytes.number()? },
        10 => Frame::Decided(bytes.change()?),
        _ => return Err("a frame of no known kind"),
    };
    bytes.end()?;
    Ok((view, read))
}

fn put_life(to: &mut Vec<u8>, life: &Life) {
    to.push(life.node.len() as u8);
    to.extend(life.node.as_bytes());
    to.extend(life.incarnation.to_le_bytes());
}

fn put_change(to: &mut Vec<u8>, change: &Change) {
    to.extend(change.number.to_le_bytes());
    to.extend(change.start.to_le_bytes());
    to.push(change.members.len() as u8);
    for member in &change.members {
        put_life(to, &member.life);
        to.push(member.joins as u8);
        to.extend(member.count.to_le_bytes());
    }
}

fn put_accepted(to: &mut Vec<u8>, accepted: &Option<(Ballot, Change)>) {
    to.push(accepted.is_some() as u8);
    if let Some((ballot, change)) = accepted {
        to.extend(ballot.to_le_bytes());
        put_change(to, change);
    }
}

/// Of a frame without entries; those with entries begin so.
pub fn write(view: u64, frame: &Frame) -> Vec<u8> {
    let mut to = vec![VERSION, 0];
    to.extend(view.to_le_bytes());
    let mut words = |kind: u8, words: &[u64]| {
        to[1] = kind;
        words.iter().for_each(|word| to.extend(word.to_le_bytes()));
    };
    match frame {
        Frame::Status(status) => {
            to.extend([status.member, status.leaving, status.gap].map(u8::from));
            for word in [status.received, status.last, status.stable, status.taken] {
                to.extend(word.to_le_bytes());
            }
        }
        Frame::Submit { received, entries } => {
            words(1, &[*received]);
            to.extend(entries.0.0);
        }
        Frame::Ordered { stable, first, entries } => {
            words(2, &[*stable, *first]);
            to.extend(entries.0.0);
        }
        Frame::Prepare { ballot } => words(3, &[*ballot]),
        Frame::Promise { ballot, have, leaving, accepted } => {
            words(4, &[*ballot]);
            to.push(have.is_some() as u8);
            to.extend(have.iter().flat_map(|have| have.to_le_bytes()));
            to.push(*leaving as u8);
            put_accepted(&mut to, accepted);
        }
        Frame::Promised { ballot } => words(5, &[*ballot]),
        Frame::Fetch { ballot, have } => words(6, &[*ballot, *have]),
        Frame::Level { ballot, first, entries } => {
            words(7, &[*ballot, *first]);
            to.extend(entries.0.0);
        }
        Frame::Propose { ballot, change } => {
            words(8, &[*ballot]);
            put_change(&mut to, change);
        }
        Frame::Accepted { ballot } => words(9, &[*ballot]),
        Frame::Decided(change) => {
            to[1] = 10;
            put_change(&mut to, change);
        }
    }
    to
}

/// None, for `write` of a frame to which `put_entry` adds some.
pub const NO_ENTRIES: Entries<'static> = Entries(Bytes(&[]));

/// Adds it if there is room. (For any payload there is, in a frame that has none yet.)
pub fn put_entry(to: &mut Vec<u8>, origin: u8, number: u64, payload: &[u8]) -> bool {
    const { assert!(HEAD_BYTES + ENTRY_BYTES + PAYLOAD_BYTES <= FRAME_BYTES) };
    let fits = to.len() + ENTRY_BYTES + payload.len() <= FRAME_BYTES;
    if fits {
        to.reserve(ENTRY_BYTES + payload.len());
        to.push(origin);
        to.extend(number.to_le_bytes());
        to.extend((payload.len() as u32).to_le_bytes());
        to.extend(payload);
    }
    fits
}

/// Adds as many of them as there is room for: how many.
pub fn put_entries<'a>(to: &mut Vec<u8>, entries: impl Iterator<Item = &'a Entry>) -> u64 {
    entries.take_while(|entry| put_entry(to, entry.origin, entry.number, &entry.payload)).count()
        as u64
}

/// What is kept: of which run it is, and what it must not forget.
pub fn write_kept(incarnation: u64, acceptor: &Acceptor) -> Vec<u8> {
    let mut to = vec![VERSION];
    to.extend(incarnation.to_le_bytes());
    put_change(&mut to, &acceptor.view);
    to.extend(acceptor.promised.to_le_bytes());
    put_accepted(&mut to, &acceptor.accepted);
    to
}

pub fn read_kept(kept: &[u8]) -> Result<(u64, Acceptor), Fault> {
    let mut bytes = Bytes(kept);
    if bytes.u8()? != VERSION {
        return Err("another version");
    }
    let incarnation = bytes.u64()?;
    let acceptor =
        Acceptor { view: bytes.change()?, promised: bytes.number()?, accepted: bytes.accepted()? };
    bytes.end()?;
    Ok((incarnation, acceptor))
}
