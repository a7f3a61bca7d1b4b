//! What a network card does for its driver, for who has no such card: segments that are still to be cut (TSO, USO) are cut, and checksums that are
//! still to be written are written. Between ports they pass whole; this is for a port's program, or a guest, that takes plain frames only.

use crate::counters::Dropped;
use crate::frame::{
    ETHERNET_BYTES, GSO_ECN, GSO_NONE, GSO_TCP4, GSO_TCP6, GSO_UDP, HEADER_BYTES, Head,
    NEEDS_CHECKSUM,
};

/// The least that is left of the least MTU (68) behind headers of 20 bytes each: shorter segments would make a storm of one message.
const SEGMENT_LEAST: usize = 28;
const TAG_BYTES: usize = 4;
const TCP: u8 = 6;
const UDP: u8 = 17;
const FIN_AND_PUSH: u8 = 1 | 8;
const CWR: u8 = 0x80;

/// Is this message a frame as it goes over a wire?
pub fn is_plain(head: &Head) -> bool {
    head.0[0] & NEEDS_CHECKSUM == 0 && head.0[1] == GSO_NONE
}

/// Hands on the plain messages that this one stands for, in order; each has a header of zeros. What the headers of IP and TCP or UDP do not bear out
/// is malformed, and then nothing is handed on.
pub fn plain(message: &[u8], mut each: impl FnMut(&[u8])) -> Result<(), Dropped> {
    let head = message.first_chunk().map(|head| Head(*head));
    let head = head.filter(|head| head.is_sound(message.len())).ok_or(Dropped::Malformed)?;
    let (header, frame) = message.split_at(HEADER_BYTES);
    let word = |at: usize| usize::from(u16::from_le_bytes([header[at], header[at + 1]]));
    let (segment, start, offset) = (word(4), word(6), word(8));
    let mut out = vec![0; HEADER_BYTES];
    if head.0[1] == GSO_NONE {
        out.extend_from_slice(frame);
        if head.0[0] & NEEDS_CHECKSUM != 0 {
            let frame = &mut out[HEADER_BYTES..];
            // (The sum of the pseudo header is there already.)
            let all = not_zero(checksum(0, &frame[start..]));
            put(frame, start + offset, all);
        }
        each(&out);
        return Ok(());
    }
    let layers = Layers::find(&head, frame, start).ok_or(Dropped::Malformed)?;
    let longest = frame.len().min(layers.payload + segment) - layers.network;
    if segment < SEGMENT_LEAST || longest > usize::from(u16::MAX) {
        return Err(Dropped::Malformed);
    }
    let payload = &frame[layers.payload..];
    let pieces = payload.chunks(segment).count();
    for (number, piece) in payload.chunks(segment).enumerate() {
        out.truncate(HEADER_BYTES);
        out.extend_from_slice(&frame[..layers.payload]);
        out.extend_from_slice(piece);
        layers.write(&mut out[HEADER_BYTES..], number, number * segment, number + 1 == pieces);
        each(&out);
    }
    Ok(())
}

/// Where what begins.
struct Layers {
    network: usize,
    transport: usize,
    payload: usize,
    is_six: bool,
    protocol: u8,
}

impl Layers {
    fn find(head: &Head, frame: &[u8], transport: usize) -> Option<Layers> {
        let mut network = ETHERNET_BYTES;
        // (A tag, or two.)
        for _ in 0..2 {
            if let [0x81, 0] | [0x88, 0xa8] = frame.get(network - 2..network)? {
                network += TAG_BYTES;
            }
        }
        let kind = head.0[1] & !GSO_ECN;
        let first = *frame.get(network)?;
        let (is_six, least) = match (first >> 4, kind) {
            (4, GSO_TCP4 | GSO_UDP) => (false, usize::from(first & 15) * 4),
            (6, GSO_TCP6 | GSO_UDP) => (true, 40),
            _ => return None,
        };
        if least < 20 || network + least > transport || !is_six && network + least != transport {
            return None;
        }
        let protocol = if kind == GSO_UDP { UDP } else { TCP };
        let bytes = match protocol {
            UDP => 8,
            _ => usize::from(*frame.get(transport + 12)? >> 4) * 4,
        };
        let payload = transport + bytes;
        let fits = payload < frame.len() && (protocol == UDP || bytes >= 20);
        fits.then_some(Layers { network, transport, payload, is_six, protocol })
    }

    /// Makes one segment's headers of the whole's.
    fn write(&self, frame: &mut [u8], number: usize, before: usize, is_last: bool) {
        let (network, transport) = (self.network, self.transport);
        let length = frame.len() - network;
        if self.is_six {
            put(frame, network + 4, (length - 40) as u16);
        } else {
            put(frame, network + 2, length as u16);
            let id = get(frame, network + 4).wrapping_add(number as u16);
            put(frame, network + 4, id);
            put(frame, network + 10, 0);
            let sum = checksum(0, &frame[network..transport]);
            put(frame, network + 10, sum);
        }
        let at = if self.protocol == UDP {
            let bytes = frame.len() - transport;
            put(frame, transport + 4, bytes as u16);
            transport + 6
        } else {
            let place = transport + 4;
            let sequence = frame[place..place + 4].try_into().map_or(0, u32::from_be_bytes);
            let sequence = sequence.wrapping_add(before as u32);
            frame[place..place + 4].copy_from_slice(&sequence.to_be_bytes());
            let flags = &mut frame[transport + 13];
            *flags &= if is_last { 0xff } else { !FIN_AND_PUSH };
            *flags &= if number == 0 { 0xff } else { !CWR };
            transport + 16
        };
        put(frame, at, 0);
        let addresses = match self.is_six {
            true => &frame[network + 8..network + 40],
            false => &frame[network + 12..network + 20],
        };
        let pseudo = sum(u64::from(self.protocol) + (frame.len() - transport) as u64, addresses);
        let all = not_zero(checksum(pseudo, &frame[transport..]));
        put(frame, at, all);
    }
}

fn get(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}

fn put(bytes: &mut [u8], at: usize, word: u16) {
    bytes[at..at + 2].copy_from_slice(&word.to_be_bytes());
}

fn sum(before: u64, bytes: &[u8]) -> u64 {
    let (pairs, rest) = bytes.as_chunks::<2>();
    let all: u64 = pairs.iter().map(|pair| u64::from(u16::from_be_bytes(*pair))).sum();
    before + all + rest.first().map_or(0, |byte| u64::from(*byte) << 8)
}

/// The Internet's (RFC 1071).
fn checksum(before: u64, bytes: &[u8]) -> u16 {
    let mut all = sum(before, bytes);
    while all > 0xffff {
        all = (all & 0xffff) + (all >> 16);
    }
    !(all as u16)
}

/// 0 says, in UDP, that there is none; both are the same number.
fn not_zero(checksum: u16) -> u16 {
    if checksum == 0 { 0xffff } else { checksum }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A message of TCP or UDP that stands for several; from addresses that say which.
    fn whole(is_six: bool, kind: u8, tags: usize, segment: u16, payload: &[u8]) -> Vec<u8> {
        let mut frame = vec![2; 12];
        for _ in 0..tags {
            frame.extend([0x81, 0, 0, 7]);
        }
        frame.extend(if is_six { [0x86, 0xdd] } else { [8, 0] });
        if is_six {
            frame.extend([0x60, 0, 0, 0, 0, 0, if kind == GSO_UDP { UDP } else { TCP }, 64]);
            frame.extend([9; 32]);
        } else {
            frame.extend([0x45, 0, 0, 0, 0xff, 0xff, 0x40, 0, 64]);
            frame.extend([if kind == GSO_UDP { UDP } else { TCP }, 0, 0, 10, 7, 0, 1, 10, 7, 0, 2]);
        }
        let start = frame.len();
        if kind == GSO_UDP {
            frame.extend([0, 1, 0, 2, 0, 0, 0, 0]);
        } else {
            // (Twelve bytes of options; FIN, PSH, ACK and CWR.)
            frame.extend([
                0, 1, 0, 2, 0xff, 0xff, 0xff, 0, 0, 0, 0, 1, 0x80, 0x99, 1, 1, 0, 0, 0, 0,
            ]);
            frame.extend([1; 12]);
        }
        frame.extend(payload);
        let offset: u16 = if kind == GSO_UDP { 6 } else { 16 };
        let mut message = vec![NEEDS_CHECKSUM, kind, 0, 0];
        [segment, start as u16, offset].iter().for_each(|word| message.extend(word.to_le_bytes()));
        [message, frame].concat()
    }

    /// The ones' complement sum of a segment with its pseudo header, one byte at a time: 0xffff where the checksum is right.
    fn adds_up(frame: &[u8], network: usize, transport: usize, protocol: u8) -> bool {
        let is_six = frame[network] >> 4 == 6;
        let addresses = if is_six { 8..40 } else { 12..20 };
        let length = ((frame.len() - transport) as u16).to_be_bytes();
        let pseudo = [&frame[network..][addresses], &[0, protocol], &length].concat();
        let all = pseudo.iter().enumerate().chain(frame[transport..].iter().enumerate());
        let mut sum: u32 =
            all.map(|(at, byte)| u32::from(*byte) << if at % 2 == 0 { 8 } else { 0 }).sum();
        while sum > 0xffff {
            sum = (sum >> 16) + (sum & 0xffff);
        }
        sum == 0xffff
    }

    proptest! {
        #[test]
        fn segments_together_are_the_whole(
            is_six: bool,
            is_udp: bool,
            tags in 0..3usize,
            segment in 28..9000u16,
            payload in prop::collection::vec(any::<u8>(), 1..20_000),
        ) {
            let kind = if is_udp { GSO_UDP } else if is_six { GSO_TCP6 } else { GSO_TCP4 };
            let message = whole(is_six, kind, tags, segment, &payload);
            let (network, mut found, mut number) = (14 + 4 * tags, Vec::new(), 0);
            let transport = network + if is_six { 40 } else { 20 };
            let behind = transport + if is_udp { 8 } else { 32 };
            let count = payload.len().div_ceil(usize::from(segment));
            plain(&message, |message| {
                let (header, frame) = message.split_at(HEADER_BYTES);
                assert_eq!(header, [0; HEADER_BYTES]);
                assert!(adds_up(frame, network, transport, if is_udp { UDP } else { TCP }));
                assert!(frame.len() - behind == usize::from(segment) || number + 1 == count);
                if is_six {
                    assert_eq!(usize::from(get(frame, network + 4)), frame.len() - transport);
                } else {
                    assert_eq!(usize::from(get(frame, network + 2)), frame.len() - network);
                    assert_eq!(get(frame, network + 4), 0xffffu16.wrapping_add(number as u16));
                    assert_eq!(checksum(0, &frame[network..transport]), 0);
                }
                if is_udp {
                    assert_eq!(usize::from(get(frame, transport + 4)), frame.len() - transport);
                } else {
                    let sequence: [u8; 4] = frame[transport + 4..transport + 8].try_into().unwrap();
                    let expected = 0xffff_ff00u32.wrapping_add(found.len() as u32);
                    assert_eq!(u32::from_be_bytes(sequence), expected);
                    let flags = 0x10
                        | if number == 0 { CWR } else { 0 }
                        | if number + 1 == count { FIN_AND_PUSH } else { 0 };
                    assert_eq!(frame[transport + 13], flags);
                }
                found.extend_from_slice(&frame[behind..]);
                number += 1;
            }).unwrap();
            prop_assert_eq!(found, payload);
            prop_assert_eq!(number, count);
        }

        #[test]
        fn whatever_is_said_nothing_is_worse_than_malformed(
            header in prop::array::uniform10(any::<u8>()),
            kind in prop::sample::select(&[GSO_NONE, GSO_TCP4, GSO_TCP6, GSO_UDP][..]),
            start in 0..80u16,
            mut frame in prop::collection::vec(any::<u8>(), 0..3000),
            is_six: bool,
        ) {
            let mut header = header;
            (header[0], header[1], header[7]) = (NEEDS_CHECKSUM, kind, 0);
            header[6..8].copy_from_slice(&start.to_le_bytes());
            if let Some(first) = frame.get_mut(14) {
                *first = if is_six { 0x60 } else { 0x45 };
            }
            let mut bytes = 0;
            let _ = plain(&[&header[..], &frame].concat(), |message| bytes += message.len());
            // (A segment has 28 bytes at least, and headers of 200 at most.)
            prop_assert!(bytes <= (frame.len() / SEGMENT_LEAST + 1) * (200 + SEGMENT_LEAST));
        }
    }

    #[test]
    fn a_checksum_is_written_and_other_frames_are_left() {
        let mut message = whole(false, GSO_UDP, 0, 0, b"odd");
        (message[1], message[4]) = (GSO_NONE, 0);
        let (network, transport) = (HEADER_BYTES + 14, HEADER_BYTES + 34);
        put(&mut message, transport + 4, 11);
        let pseudo = sum(u64::from(UDP) + 11, &message[network + 12..network + 20]);
        put(&mut message, transport + 6, !checksum(pseudo, &[]));
        let mut found = Vec::new();
        plain(&message, |message| found.push(message.to_vec())).unwrap();
        assert_eq!(found.len(), 1);
        assert!(adds_up(&found[0][HEADER_BYTES..], 14, 34, UDP));
        // Plain already.
        let before = found.remove(0);
        plain(&before, |message| found.push(message.to_vec())).unwrap();
        assert_eq!(found, [before]);
    }

    #[test]
    fn what_headers_do_not_bear_out_is_malformed() {
        let message = whole(false, GSO_TCP4, 0, 100, &[7; 1000]);
        let change = |at: usize, value: u8| {
            let mut message = message.clone();
            message[at] = value;
            plain(&message, |_| panic!("handed on"))
        };
        for (at, value) in [
            (4, 27),                        // segments that are too short
            (1, GSO_TCP6),                  // another protocol than it says
            (6, 33),                        // not where TCP begins
            (HEADER_BYTES + 14, 0x44),      // a short header of IP
            (HEADER_BYTES + 14, 0x46),      // a longer one
            (HEADER_BYTES + 34 + 12, 0x40), // a short header of TCP
        ] {
            assert_eq!(change(at, value), Err(Dropped::Malformed), "{at}: {value}");
        }
        // No payload.
        let message = whole(true, GSO_TCP6, 0, 100, &[]);
        assert_eq!(plain(&message, |_| panic!("handed on")), Err(Dropped::Malformed));
    }
}
