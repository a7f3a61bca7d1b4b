//! What travels: a virtio_net_hdr and an Ethernet frame behind it, as a TAP device gives and takes them. One that stands for many segments
//! (TSO, USO) is passed whole.

use std::fmt;
use std::str::FromStr;

use anyhow::{Error, bail, ensure};
use ringlet_linux::sys;
use serde::{Deserialize, Serialize};

/// struct virtio_net_hdr, without a count of buffers.
pub const HEADER_BYTES: usize = 10;
pub const ETHERNET_BYTES: usize = 14;
/// What is looked at of a message, and so copied first.
pub const HEAD_BYTES: usize = HEADER_BYTES + ETHERNET_BYTES;
pub const MTU_LEAST: u16 = 68;
/// The kernel's, for a TAP.
pub const MTU_MOST: u16 = 65_521;
/// A segment that the kernel has still to cut is of 64 KiB at most; then there are a VLAN's tag, or two.
pub const MESSAGE_MOST: usize = HEADER_BYTES + ETHERNET_BYTES + 8 + (64 << 10);

pub const NEEDS_CHECKSUM: u8 = 1;
pub const DATA_VALID: u8 = 2;
pub const GSO_NONE: u8 = 0;
pub const GSO_TCP4: u8 = 1;
pub const GSO_TCP6: u8 = 4;
pub const GSO_UDP: u8 = 5;
pub const GSO_ECN: u8 = 0x80;

#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct Mac(pub [u8; 6]);

impl Mac {
    /// Broadcast is one of them.
    pub fn is_multicast(self) -> bool {
        self.0[0] & 1 != 0
    }

    /// As cards have it, of a filter of 64 bits: several groups have the same. Broadcast has none.
    pub(crate) fn group(self) -> u64 {
        let bytes = self.0.iter().fold(0, |sum, byte| sum << 8 | u64::from(*byte));
        let bit = bytes.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 58;
        if self == Mac([0xff; 6]) { 0 } else { 1 << bit }
    }

    /// May a frame come from there?
    pub fn is_station(self) -> bool {
        !self.is_multicast() && self != Mac::default()
    }

    /// One at random.
    pub fn random() -> Result<Mac, Error> {
        let mut bits = [0; 8];
        ensure!(sys::random(&mut bits), "the kernel has no random bytes yet");
        Ok(Mac::local(u64::from_ne_bytes(bits)))
    }

    /// One that nobody else has given to a card, of these bits.
    pub fn local(bits: u64) -> Mac {
        let [a, b, c, d, e, f, ..] = bits.to_le_bytes();
        Mac([a & 0xfc | 2, b, c, d, e, f])
    }
}

impl fmt::Display for Mac {
    fn fmt(&self, to: &mut fmt::Formatter) -> fmt::Result {
        let [a, b, c, d, e, f] = self.0;
        write!(to, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{f:02x}")
    }
}

impl fmt::Debug for Mac {
    fn fmt(&self, to: &mut fmt::Formatter) -> fmt::Result {
        fmt::Display::fmt(self, to)
    }
}

impl FromStr for Mac {
    type Err = Error;

    fn from_str(text: &str) -> Result<Mac, Error> {
        let mut mac = Mac::default();
        let mut parts = text.split(':');
        for byte in &mut mac.0 {
            let pair = parts.next().filter(|part| {
                part.len() == 2 && part.bytes().all(|digit| digit.is_ascii_hexdigit())
            });
            let Some(pair) = pair else {
                bail!("an address is six pairs of hexadecimal digits, like 02:00:00:00:00:01")
            };
            *byte = u8::from_str_radix(pair, 16)?;
        }
        ensure!(parts.next().is_none(), "an address has six pairs of digits, no more");
        ensure!(
            mac.is_station(),
            "{mac} is no device's address: the first byte must be even, and not all are 0"
        );
        Ok(mac)
    }
}

impl Serialize for Mac {
    fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Mac {
    fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Mac, D::Error> {
        String::deserialize(from)?.parse().map_err(serde::de::Error::custom)
    }
}

/// The beginning of a message, copied from where its sender can change it.
#[derive(Clone, Copy)]
pub struct Head(pub [u8; HEAD_BYTES]);

impl Head {
    pub fn destination(&self) -> Mac {
        self.mac(HEADER_BYTES)
    }

    pub fn source(&self) -> Mac {
        self.mac(HEADER_BYTES + 6)
    }

    fn mac(&self, at: usize) -> Mac {
        let mut mac = Mac::default();
        mac.0.copy_from_slice(&self.0[at..at + 6]);
        mac
    }

    /// Does the header say what can be, of a message of so many bytes? (The kernel looks at it, too; another port's program may not.)
    pub fn is_sound(&self, message_bytes: usize) -> bool {
        let frame = message_bytes.saturating_sub(HEADER_BYTES);
        let [flags, kind, ..] = self.0;
        let word = |at: usize| usize::from(u16::from_le_bytes([self.0[at], self.0[at + 1]]));
        let (head, segment, start, offset) = (word(2), word(4), word(6), word(8));
        let summed = flags & NEEDS_CHECKSUM != 0;
        let known = flags & !(NEEDS_CHECKSUM | DATA_VALID) == 0;
        let sum_fits = !summed || start >= ETHERNET_BYTES && start + offset + 2 <= frame;
        let cut_fits = match kind & !GSO_ECN {
            GSO_NONE => kind == GSO_NONE,
            GSO_TCP4 | GSO_TCP6 => summed && segment > 0 && head <= frame,
            GSO_UDP => kind & GSO_ECN == 0 && summed && segment > 0 && head <= frame,
            _ => false,
        };
        (HEAD_BYTES..=MESSAGE_MOST).contains(&message_bytes) && known && sum_fits && cut_fits
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head(header: [u8; HEADER_BYTES]) -> Head {
        let mut bytes = [0; HEAD_BYTES];
        bytes[..HEADER_BYTES].copy_from_slice(&header);
        Head(bytes)
    }

    #[test]
    fn headers_that_no_kernel_writes_are_refused() {
        let plain = [0; HEADER_BYTES];
        let cut = [1, GSO_TCP4, 54, 0, 100, 0, 34, 0, 16, 0];
        for sound in
            [plain, cut, [2, 0, 0, 0, 0, 0, 0, 0, 0, 0], [1, GSO_UDP, 42, 0, 9, 0, 34, 0, 6, 0]]
        {
            assert!(head(sound).is_sound(HEADER_BYTES + 1500), "{sound:?}");
        }
        let change = |at: usize, value: u8| {
            let mut header = cut;
            header[at] = value;
            header
        };
        for broken in [
            change(0, 0),             // cut, but without a checksum
            change(0, 5),             // a flag that there is not
            change(1, 3),             // the kernel fragments no UDP for us
            change(1, 2),             // no kind at all
            change(1, GSO_UDP | 128), // ECN is TCP's
            change(4, 0),             // segments of nothing
            change(3, 6),             // a head behind the end
            change(7, 6),             // a sum behind the end
            change(9, 6),
            change(6, 13), // within Ethernet's header
            [0, 128, 0, 0, 0, 0, 0, 0, 0, 0],
        ] {
            assert!(!head(broken).is_sound(HEADER_BYTES + 1500), "{broken:?}");
        }
        assert!(!head(plain).is_sound(HEAD_BYTES - 1));
        assert!(!head(plain).is_sound(MESSAGE_MOST + 1));
    }

    #[test]
    fn addresses_read_back_as_written() {
        let mac: Mac = "02:00:5e:0a:ff:01".parse().unwrap();
        assert_eq!(mac.to_string(), "02:00:5e:0a:ff:01");
        for wrong in [
            "",
            "02:00:5e:0a:ff",
            "02:00:5e:0a:ff:01:02",
            "01:00:5e:00:00:01",
            "00:00:00:00:00:00",
            "2:0:0:0:0:1",
            "+2:00:00:00:00:01",
        ] {
            assert!(wrong.parse::<Mac>().is_err(), "{wrong}");
        }
        assert!(
            (0..1000)
                .all(|bits: u64| Mac::local(bits.wrapping_mul(0x9e37_79b9_7f4a_7c15)).is_station())
        );
    }
}
