//! What the two halves of a lane say, as bytes: the kind, then its fields, little-endian. What does not read as one is none.

use crate::half::{Back, Operation};
use ringlet_core::course::{Credit, Piece};
use ringlet_core::layout::LINE_BYTES;
use ringlet_core::mirror::{ReceiverLine, SenderLine};
use ringlet_fabric::Memory;

/// The longest one.
pub const FRAME_MOST_BYTES: usize = 1 + LINE_BYTES + 8;

pub enum Frame {
    /// Which memory the half's segment is. The first of all.
    Segment(Memory),
    Operation(Operation),
    /// A message of a pipe's.
    Plain(Vec<u8>),
}

const SEGMENT: u8 = 0;
const RECORD: u8 = 1;
const LINE: u8 = 2;
const DONE: u8 = 3;
const BACK: u8 = 4;
const BACK_WITH_CREDIT: u8 = 5;
const RING: u8 = 6;
const RUNG: u8 = 7;
const SILENT: u8 = 8;
const FAILED: u8 = 9;
const PLAIN: u8 = 10;

/// Appends it.
pub fn write_segment(Memory(number): Memory, to: &mut Vec<u8>) {
    to.push(SEGMENT);
    put_small(to, [number]);
}

pub fn write_plain(message: &[u8], to: &mut Vec<u8>) {
    to.push(PLAIN);
    to.extend(message);
}

pub fn write(operation: &Operation, to: &mut Vec<u8>) {
    match operation {
        Operation::Record(piece) => {
            to.push(RECORD);
            put_large(to, [piece.header]);
            to.extend(piece.body);
        }
        Operation::Line { said, echo } => {
            let SenderLine { shut, working, answered, attached, cutting, .. } = *said;
            let SenderLine { flushes, rings, events, hold, parting, .. } = *said;
            to.push(LINE);
            put_small(to, [shut, working, answered, attached, cutting]);
            put_small(to, [flushes, rings, events, hold, parting, *echo]);
            put_large(to, [said.shut_at, said.kernel_at, said.written]);
        }
        Operation::Done => to.push(DONE),
        Operation::Back(Back { first, credit, last }) => {
            to.push(if credit.is_some() { BACK_WITH_CREDIT } else { BACK });
            put_small(to, [first.keep_out, first.draining]);
            put_small(to, [last.state, last.changes]);
            put_large(to, [last.used]);
            if let Some(Credit { slots, data, looks }) = *credit {
                put_large(to, [slots, data]);
                to.push(looks.into());
            }
        }
        Operation::Ring => to.push(RING),
        Operation::Rung { went } => to.extend([RUNG, u8::from(*went)]),
        Operation::Silent { hold } => {
            to.push(SILENT);
            put_small(to, [*hold]);
        }
        Operation::Failed => to.push(FAILED),
    }
}

/// The one that these bytes are, all of them.
pub fn read(mut from: &[u8]) -> Option<Frame> {
    let from = &mut from;
    let operation = match *from.split_off_first()? {
        SEGMENT => {
            let [number] = small(from)?;
            return from.is_empty().then_some(Frame::Segment(Memory(number)));
        }
        RECORD => {
            let [header] = large(from)?;
            let body = from.split_off(..LINE_BYTES - 8)?.try_into().ok()?;
            // (What else there is of it, who gets it finds.)
            let (position, slot, place, len, mark) = (0, 0, 0, 0, None);
            Operation::Record(Piece { position, slot, header, body, place, len, mark })
        }
        LINE => {
            let [shut, working, answered, attached, cutting] = small(from)?;
            let [flushes, rings, events, hold, parting, echo] = small(from)?;
            let [shut_at, kernel_at, written] = large(from)?;
            let said = SenderLine {
                shut,
                working,
                answered,
                attached,
                cutting,
                flushes,
                rings,
                events,
                hold,
                parting,
                shut_at,
                kernel_at,
                written,
            };
            Operation::Line { said, echo }
        }
        PLAIN => return Some(Frame::Plain(from.to_vec())),
        DONE => Operation::Done,
        kind @ (BACK | BACK_WITH_CREDIT) => {
            let [keep_out, draining] = small(from)?;
            let [state, changes] = small(from)?;
            let [used] = large(from)?;
            let first = ReceiverLine { keep_out, draining, ..Default::default() };
            let last = ReceiverLine { state, changes, used, ..first };
            let credit = if kind == BACK_WITH_CREDIT {
                let [slots, data] = large(from)?;
                Some(Credit { slots, data, looks: flag(from)? })
            } else {
                None
            };
            Operation::Back(Back { first, credit, last })
        }
        RING => Operation::Ring,
        RUNG => Operation::Rung { went: flag(from)? },
        SILENT => {
            let [hold] = small(from)?;
            Operation::Silent { hold }
        }
        FAILED => Operation::Failed,
        _ => return None,
    };
    from.is_empty().then_some(Frame::Operation(operation))
}

fn put_small<const N: usize>(to: &mut Vec<u8>, words: [u32; N]) {
    words.iter().for_each(|word| to.extend(word.to_le_bytes()));
}

fn put_large<const N: usize>(to: &mut Vec<u8>, words: [u64; N]) {
    words.iter().for_each(|word| to.extend(word.to_le_bytes()));
}

fn small<const N: usize>(from: &mut &[u8]) -> Option<[u32; N]> {
    let bytes = from.split_off(..4 * N)?;
    Some(std::array::from_fn(|nth| u32::from_le_bytes(bytes.as_chunks().0[nth])))
}

fn large<const N: usize>(from: &mut &[u8]) -> Option<[u64; N]> {
    let bytes = from.split_off(..8 * N)?;
    Some(std::array::from_fn(|nth| u64::from_le_bytes(bytes.as_chunks().0[nth])))
}

fn flag(from: &mut &[u8]) -> Option<bool> {
    match *from.split_off_first()? {
        0 => Some(false),
        1 => Some(true),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Whatever reads as one is written as it was; of what is written nothing can be missing, nor be more.
        #[test]
        fn what_is_written_is_read(kind in 0..12u8, bytes in proptest::collection::vec(any::<u8>(), 0..FRAME_MOST_BYTES)) {
            let packet = [&[kind], &bytes[..]].concat();
            for n in 0..=packet.len() {
                let mut written = Vec::new();
                match read(&packet[..n]) {
                    Some(Frame::Operation(operation)) => write(&operation, &mut written),
                    Some(Frame::Segment(memory)) => write_segment(memory, &mut written),
                    Some(Frame::Plain(message)) => write_plain(&message, &mut written),
                    None => continue,
                }
                prop_assert_eq!(&written, &packet[..n]);
                prop_assert!(written.len() <= FRAME_MOST_BYTES);
            }
        }
    }

    #[test]
    fn each_kind_is_read() {
        let piece = Piece {
            position: 0,
            slot: 0,
            header: 7,
            body: [8; LINE_BYTES - 8],
            place: 0,
            len: 0,
            mark: None,
        };
        let said = SenderLine { shut: 1, working: 2, parting: 3, written: 4, ..Default::default() };
        let first = ReceiverLine { keep_out: 1, draining: 2, ..Default::default() };
        let last = ReceiverLine { state: 3, changes: 4, used: 5, ..first };
        let credit = Some(Credit { slots: 6, data: 7, looks: true });
        for operation in [
            Operation::Record(piece),
            Operation::Line { said, echo: 9 },
            Operation::Done,
            Operation::Back(Back { first, credit, last }),
            Operation::Back(Back { first, credit: None, last }),
            Operation::Ring,
            Operation::Rung { went: true },
            Operation::Silent { hold: 11 },
            Operation::Failed,
        ] {
            let mut written = Vec::new();
            write(&operation, &mut written);
            let Some(Frame::Operation(found)) = read(&written) else { panic!("{operation:?}") };
            assert_eq!(format!("{found:?}"), format!("{operation:?}"));
            assert!(read(&written[..written.len() - 1]).is_none());
        }
    }
}
