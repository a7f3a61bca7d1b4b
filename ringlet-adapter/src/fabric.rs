//! What lies between two halves, by chance: operations take their time, and the bytes of a record come in any order, and repeatedly, as over a fabric
//! that keeps none.

use ringlet_core::layout::LINE_BYTES;

/// xorshift64*.
pub(crate) struct Fabric(u64);

impl Fabric {
    pub fn new(seed: u64) -> Fabric {
        // (Any seed but one is a state.)
        let mut fabric = Fabric(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        fabric.next();
        fabric
    }

    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, n: usize) -> usize {
        (((self.next() >> 32) * n as u64) >> 32) as usize
    }

    /// Does the next operation arrive now?
    pub fn arrives(&mut self) -> bool {
        self.below(3) > 0
    }

    /// Writes so many bytes from `place` on, in pieces of whole lines.
    pub fn bring(&mut self, place: usize, bytes: usize, write: impl Fn(usize, usize)) {
        let mut pieces = Vec::new();
        let mut at = 0;
        while at < bytes {
            let most = if self.below(2) == 0 { 4 } else { 128 };
            let n = ((1 + self.below(most)) * LINE_BYTES).min(bytes - at);
            pieces.push((place + at, n));
            at += n;
        }
        while !pieces.is_empty() {
            let nth = self.below(pieces.len());
            let (at, n) = pieces[nth];
            write(at, n);
            // (Else it is written again.)
            if self.below(8) > 0 {
                pieces.swap_remove(nth);
            }
        }
    }
}
