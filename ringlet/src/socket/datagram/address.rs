//! Addresses as the tables of lanes keep them.

use crate::plain::P64;
use ringlet_linux::tcp::Address;

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

/// Spreads addresses over a table's buckets.
pub fn hash(address: &Address) -> usize {
    let [low, high] = halves(&address.ip);
    let mixed = (low ^ high.rotate_left(17) ^ u64::from(address.port) << 40)
        .wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed >> 32) as usize
}
