//! The hostile peer of `tests/hostile` has an encoding of its own, in Python, so that it can write what no end of ours would. Where it
//! no longer writes to the words that an end reads, its attacks hit nothing, and pass: so its numbers are compared with the layout.
#![cfg(not(loom))]

use ringlet_core::layout::{
    CONTROL_OFFSET, Control, Credit, FLAG_BITS, FLAG_CONTROL, FLAG_DATA, FLAG_REWIND, INLINE_BYTES,
    LEN_BITS, LINE_BYTES, PUBLISHED, RINGS_BY_NAME, ReadyBoard, Receiver, SEGMENT_MAGIC, SHUT_READ,
    SHUT_UNREAD, SLOT_COUNT, SLOTS_OFFSET, Sender, VERSION, WANT_BYTE, WANT_EVENT, WANT_READY,
};
use ringlet_core::wait::HOW_BITS;
use std::mem::offset_of;

/// What `names = values` says of `name`, where it stands at the beginning of a line.
fn said<'a>(python: &'a str, name: &str) -> &'a str {
    for line in python.lines() {
        let Some((names, values)) = line.split_once(" = ") else { continue };
        let values = values.split('#').next().unwrap_or(values);
        if names == name {
            return values.trim();
        }
        let place = names.split(", ").position(|one| one == name);
        if let Some(value) = place.and_then(|place| values.split(", ").nth(place)) {
            return value.trim();
        }
    }
    panic!("tests/hostile/protocol.py says nothing of {name}")
}

#[test]
fn the_hostile_peer_writes_to_the_words_that_are_read() {
    let python = include_str!("../../tests/hostile/protocol.py");
    let magic = SEGMENT_MAGIC.to_le_bytes().escape_ascii().to_string();
    assert_eq!(said(python, "SEGMENT_MAGIC"), format!("int.from_bytes(b\"{magic}\", \"little\")"));

    let (receiver, sender) = (offset_of!(Control, receiver), offset_of!(Control, sender));
    for (name, value) in [
        ("CREDIT_SLOTS", offset_of!(Control, credit) + offset_of!(Credit, slots)),
        ("CREDIT_DATA", offset_of!(Control, credit) + offset_of!(Credit, data)),
        ("WANT_DATA", receiver + offset_of!(Receiver, want_data)),
        ("ROOM_GRANTED", receiver + offset_of!(Receiver, room_granted)),
        ("STATE", receiver + offset_of!(Receiver, state)),
        ("USED", receiver + offset_of!(Receiver, used)),
        ("KEEP_OUT", receiver + offset_of!(Receiver, keep_out)),
        ("DRAINING", receiver + offset_of!(Receiver, draining)),
        ("TAKING", receiver + offset_of!(Receiver, taking)),
        ("CHANGES", receiver + offset_of!(Receiver, changes)),
        ("DELIVERED", receiver + offset_of!(Receiver, delivered)),
        ("HELD", receiver + offset_of!(Receiver, held)),
        ("PARTED", receiver + offset_of!(Receiver, parted)),
        ("BELLS_PUT", receiver + offset_of!(Receiver, bells_put)),
        ("LANE", receiver + offset_of!(Receiver, lane)),
        ("WANT_ROOM", sender + offset_of!(Sender, want_room)),
        ("DATA_GRANTED", sender + offset_of!(Sender, data_granted)),
        ("SHUT", sender + offset_of!(Sender, shut)),
        ("WORKING", sender + offset_of!(Sender, working)),
        ("ANSWERED", sender + offset_of!(Sender, answered)),
        ("ATTACHED", sender + offset_of!(Sender, attached)),
        ("CUTTING", sender + offset_of!(Sender, cutting)),
        ("FLUSHES", sender + offset_of!(Sender, flushes)),
        ("RINGS", sender + offset_of!(Sender, rings)),
        ("EVENTS", sender + offset_of!(Sender, events)),
        ("HOLD", sender + offset_of!(Sender, hold)),
        ("PARTING", sender + offset_of!(Sender, parting)),
        ("ECHO", sender + offset_of!(Sender, echo)),
        ("BELLS", sender + offset_of!(Sender, bells)),
        ("SHUT_AT", sender + offset_of!(Sender, shut_at)),
        ("KERNEL_AT", sender + offset_of!(Sender, kernel_at)),
        ("WRITTEN", sender + offset_of!(Sender, written)),
        ("WANT_EVENT", WANT_EVENT as usize),
        ("RINGS_BY_NAME", RINGS_BY_NAME as usize),
        ("SHUT_READ", SHUT_READ as usize),
        ("SHUT_UNREAD", SHUT_UNREAD as usize),
        ("WANT_BYTE", WANT_BYTE as usize),
        ("WANT_READY", WANT_READY as usize),
        ("HOW_BITS", HOW_BITS as usize),
        ("SLOT_COUNT", SLOT_COUNT),
        ("LINE_BYTES", LINE_BYTES),
        ("INLINE_BYTES", INLINE_BYTES),
        ("CONTROL_OFFSET", CONTROL_OFFSET),
        ("CONTROL_BYTES", size_of::<Control>()),
        ("SLOTS_OFFSET", SLOTS_OFFSET),
        ("LEN_BITS", LEN_BITS as usize),
        ("FLAG_BITS", FLAG_BITS as usize),
        ("DATA", FLAG_DATA as usize),
        ("REWIND", FLAG_REWIND as usize),
        ("CONTROL", FLAG_CONTROL as usize),
    ] {
        assert_eq!(said(python, name), value.to_string(), "{name}");
    }
    let harness = include_str!("../../tests/harness.py");
    assert_eq!(said(harness, "VERSION"), VERSION.to_string());
    assert_eq!(said(python, "BOARDS_BYTES"), format!("32 * {}", size_of::<ReadyBoard>()));
    assert_eq!(said(python, "PUBLISHED"), format!("1 << {}", PUBLISHED.trailing_zeros()));
}
