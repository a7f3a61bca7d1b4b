//! Frames between nodes, and what is kept, as bytes. What comes is hostile: each length is checked before it is used, and a fault has a name.

use crate::api::{FRAME_BYTES, Life, PAYLOAD_BYTES};
use crate::ballot::{Acceptor, Ballot};
use crate::log::Entry;
use crate::parcel::Parcel;
use crate::view::{Change, Seat};

/// Of frames: nodes whose users say other things to each other hear nothing of each other. And of what is kept.
pub const VERSION: u8 = 2;
const KEPT_VERSION: u8 = 1;
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
    /// The hub's: `first` is the first one's place. (Payloads of who hears it are left out: it has them.)
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
pub fn put_entry(to: &mut Parcel, origin: u8, number: u64, payload: &bytes::Bytes) -> bool {
    const { assert!(HEAD_BYTES + ENTRY_BYTES + PAYLOAD_BYTES <= FRAME_BYTES) };
    let fits = to.len() + ENTRY_BYTES + payload.len() <= FRAME_BYTES;
    if fits {
        to.put(&[origin]);
        to.put(&number.to_le_bytes());
        to.put(&(payload.len() as u32).to_le_bytes());
        to.put_payload(payload);
    }
    fits
}

/// Adds as many of them as there is room for: how many. `but`: without the payloads of this origin.
pub fn put_entries<'a>(
    to: &mut Parcel,
    entries: impl Iterator<Item = &'a Entry>,
    but: Option<u8>,
) -> u64 {
    let none = bytes::Bytes::new();
    let put = |entry: &&Entry| {
        let payload = if but == Some(entry.origin) { &none } else { &entry.payload };
        put_entry(to, entry.origin, entry.number, payload)
    };
    entries.take_while(put).count() as u64
}

/// What is kept: of which run it is, and what it must not forget.
pub fn write_kept(incarnation: u64, acceptor: &Acceptor) -> Vec<u8> {
    let mut to = vec![KEPT_VERSION];
    to.extend(incarnation.to_le_bytes());
    put_change(&mut to, &acceptor.view);
    to.extend(acceptor.promised.to_le_bytes());
    put_accepted(&mut to, &acceptor.accepted);
    to
}

pub fn read_kept(kept: &[u8]) -> Result<(u64, Acceptor), Fault> {
    let mut bytes = Bytes(kept);
    if bytes.u8()? != KEPT_VERSION {
        return Err("another version");
    }
    let incarnation = bytes.u64()?;
    let acceptor =
        Acceptor { view: bytes.change()?, promised: bytes.number()?, accepted: bytes.accepted()? };
    bytes.end()?;
    Ok((incarnation, acceptor))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn number() -> impl Strategy<Value = u64> {
        prop_oneof![0..1000u64, 0..BEYOND]
    }

    fn life() -> impl Strategy<Value = Life> {
        ("[a-zé]{0,120}", any::<u64>()).prop_map(|(node, incarnation)| Life { node, incarnation })
    }

    fn change() -> impl Strategy<Value = Change> {
        let seat = (life(), any::<bool>(), number()).prop_map(|(life, joins, count)| Seat {
            life,
            joins,
            count,
        });
        (number(), number(), prop::collection::vec(seat, 1..6)).prop_map(
            |(number, start, mut members)| {
                (0..members.len())
                    .for_each(|at| members[at].life.node.insert_str(0, &at.to_string()));
                Change { number, start, members }
            },
        )
    }

    /// Those without entries.
    fn frame() -> impl Strategy<Value = Frame<'static>> {
        let status = (any::<[bool; 3]>(), [number(), number(), number(), number()]);
        prop_oneof![
            status.prop_map(|([member, leaving, gap], [received, last, stable, taken])| {
                Frame::Status(Status { member, leaving, gap, received, last, stable, taken })
            }),
            number().prop_map(|ballot| Frame::Prepare { ballot }),
            (
                number(),
                prop::option::of(number()),
                any::<bool>(),
                prop::option::of((number(), change()))
            )
                .prop_map(|(ballot, have, leaving, accepted)| Frame::Promise {
                    ballot,
                    have,
                    leaving,
                    accepted
                }),
            number().prop_map(|ballot| Frame::Promised { ballot }),
            (number(), number()).prop_map(|(ballot, have)| Frame::Fetch { ballot, have }),
            (number(), change()).prop_map(|(ballot, change)| Frame::Propose { ballot, change }),
            number().prop_map(|ballot| Frame::Accepted { ballot }),
            change().prop_map(Frame::Decided),
        ]
    }

    proptest! {
        #[test]
        fn a_frame_is_read_as_it_was_written(view in number(), frame in frame()) {
            let bytes = write(view, &frame);
            prop_assert!(bytes.len() <= FRAME_BYTES);
            prop_assert_eq!(read(&bytes), Ok((view, frame)));
            // Cut off or with something behind it, it is none.
            for end in 0..bytes.len() {
                prop_assert!(read(&bytes[..end]).is_err());
            }
            prop_assert!(read(&[&bytes[..], &[0]].concat()).is_err());
        }

        #[test]
        fn entries_are_read_as_they_were_written(
            kind in 0..3, view in number(), word in number(), first in number(),
            entries in prop::collection::vec((any::<u8>(), number(), prop::collection::vec(any::<u8>(), 0..40)), 0..20),
        ) {
            let entries_of = |read: Result<(u64, Frame<'_>), Fault>| match read.unwrap() {
                (of, Frame::Submit { received, entries }) => (of, received, first, entries.map(owned).collect::<Vec<_>>()),
                (of, Frame::Ordered { stable, first, entries }) => (of, stable, first, entries.map(owned).collect()),
                (of, Frame::Level { ballot, first, entries }) => (of, ballot, first, entries.map(owned).collect()),
                other => panic!("{other:?}"),
            };
            let entry = NO_ENTRIES;
            let mut frame = Parcel::from(write(view, &match kind {
                0 => Frame::Submit { received: word, entries: entry },
                1 => Frame::Ordered { stable: word, first, entries: entry },
                _ => Frame::Level { ballot: word, first, entries: entry },
            }));
            for (origin, number, payload) in &entries {
                prop_assert!(put_entry(&mut frame, *origin, *number, &payload.clone().into()));
            }
            prop_assert_eq!(entries_of(read(&frame.to_vec())), (view, word, first, entries));
        }

        #[test]
        fn what_is_kept_is_read_as_it_was_written(
            incarnation: u64, view in change(), promised in number(), accepted in prop::option::of((number(), change())),
        ) {
            let acceptor = Acceptor { view, promised, accepted };
            let kept = write_kept(incarnation, &acceptor);
            prop_assert_eq!(read_kept(&kept), Ok((incarnation, acceptor)));
            for end in 0..kept.len() {
                prop_assert!(read_kept(&kept[..end]).is_err());
            }
        }

        #[test]
        fn whatever_comes_is_read_or_refused(mut bytes in prop::collection::vec(any::<u8>(), 0..300), kind in 0..12u8) {
            if bytes.len() > 1 {
                (bytes[0], bytes[1]) = (VERSION, kind);
            }
            if let Ok((view, frame)) = read(&bytes) {
                // What is understood is one thing only.
                prop_assert_eq!(write(view, &frame), bytes);
            }
        }
    }

    fn owned((origin, number, payload): (u8, u64, &[u8])) -> (u8, u64, Vec<u8>) {
        (origin, number, payload.to_vec())
    }

    #[test]
    fn a_frame_takes_the_longest_payload_and_no_longer_one() {
        let frame = || {
            let ordered = Frame::Ordered { stable: 0, first: 1, entries: NO_ENTRIES };
            Parcel::from(write(1, &ordered))
        };
        let payload = |bytes: usize| vec![7; bytes].into();
        let mut full = frame();
        assert!(put_entry(&mut full, 0, 1, &payload(PAYLOAD_BYTES)));
        assert!(!put_entry(&mut full, 0, 2, &payload(PAYLOAD_BYTES)));
        assert!(read(&full.to_vec()).is_ok());
        let mut long = frame();
        assert!(put_entry(&mut long, 0, 1, &payload(PAYLOAD_BYTES + 1)));
        assert_eq!(read(&long.to_vec()), Err("a payload that is too long"));
        assert_eq!(read(&[0; FRAME_BYTES + 1]), Err("a frame that is too long"));
    }

    #[test]
    fn faults_have_names() {
        let seat = |node: &str| Seat {
            life: Life { node: node.into(), incarnation: 1 },
            joins: false,
            count: 0,
        };
        let decided =
            |members: Vec<Seat>| write(1, &Frame::Decided(Change { number: 1, start: 0, members }));
        let many = (0..=MEMBERS).map(|node| seat(&node.to_string())).collect();
        assert_eq!(read(&decided(vec![])), Err("a view of none, or of too many"));
        assert_eq!(read(&decided(many)), Err("a view of none, or of too many"));
        assert_eq!(read(&decided(vec![seat("a"), seat("a")])), Err("a view that has a node twice"));
        let mut frame = decided(vec![seat("a")]);
        let name = frame.len() - 18;
        assert_eq!(frame[name], b'a');
        frame[name] = 0xff;
        assert_eq!(read(&frame), Err("a name that is no text"));
        let joins = frame.len() - 9;
        (frame[name], frame[joins]) = (b'a', 2);
        assert_eq!(read(&frame), Err("a flag that is neither"));
        assert_eq!(read(&write(BEYOND, &Frame::Prepare { ballot: 1 })), Err("a number beyond all"));
        assert_eq!(read(&[VERSION, 99, 0, 0, 0, 0, 0, 0, 0, 0]), Err("a frame of no known kind"));
        assert_eq!(read(&[VERSION + 1]), Err("another version"));
        // The longest list of the longest names fits in a frame.
        let long = |at: usize| seat(&format!("{at:0>255}"));
        let change = Change { number: 1, start: 0, members: (0..MEMBERS).map(long).collect() };
        let promise = Frame::Promise {
            ballot: 1,
            have: Some(1),
            leaving: false,
            accepted: Some((1, change)),
        };
        assert!(read(&write(1, &promise)).is_ok());
    }
}
