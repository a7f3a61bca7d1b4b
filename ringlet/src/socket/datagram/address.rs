//! Addresses as the tables of lanes keep them.

use crate::plain::P64;
use ringlet_linux::tcp::Address;

#[inline]
pub fn halves(ip: &[u8; 16]) -> [u64; 2] {
    let mut words = [0; 2];
    for (word, bytes) in words.iter_mut().zip(ip.chunks_exact(8)) {
        *word = bytes.iter().rev().fold(0, |sum, byte| sum << 8 | u64::from(*byte));
    }
    words
}

pub fn whole(words: &[P64; 2]) -> [u8; 16] {
    let mut ip = [0; 16];
    ip[..8].copy_from_slice(&words[0].get().to_le_bytes());
    ip[8..].copy_from_slice(&words[1].get().to_le_bytes());
    ip
}

/// Spreads addresses over a table's buckets (multiplicative hashing, D. Knuth, The Art of Computer Programming, 6.4): each bit of the product is of those
/// factors' bits that are no higher, so its upper ones are taken.
#[inline]
pub fn hash(address: &Address) -> usize {
    const FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;
    let [low, high] = halves(&address.ip);
    let ip = (low ^ high.rotate_left(17)).wrapping_mul(FACTOR) >> 32;
    ((ip ^ u64::from(address.port)).wrapping_mul(FACTOR) >> 48) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ports of one address, in a row and as they come, and addresses in a row.
    #[test]
    fn neighbours_are_in_different_buckets() {
        const BUCKETS: usize = 32;
        let at = |host: u8, port: u16| {
            let mut ip = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 127, 0, 0, 1];
            ip[15] = host;
            Address { ip, port }
        };
        let ports = (0..1024).map(|n| at(1, 40_000 + n)).collect::<Vec<_>>();
        let scattered = (0..1024u32).map(|n| at(1, (n * 40_503 % 65_536) as u16)).collect();
        let even = (0..1024).map(|n| at(1, 32_768 + 2 * n)).collect();
        let hosts = (0..1024u16).map(|n| at(n as u8, 53 + n / 256)).collect();
        for these in [ports, scattered, even, hosts] {
            let mut counts = [0; BUCKETS];
            these.iter().for_each(|address| counts[hash(address) % BUCKETS] += 1);
            assert!(counts.iter().all(|count| (8..=72).contains(count)), "{counts:?}");
        }
    }
}
