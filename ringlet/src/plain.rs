//! Words that are only ever relaxed: behind a lock, or hints. Atomic so that tables of them can be shared. (And one kind that is not.)

use ringlet_core::sync::Ordering::{AcqRel, Acquire, Relaxed, Release};
use ringlet_core::sync::{AtomicU32, AtomicU64};

#[derive(Default)]
#[repr(transparent)]
pub struct P32(AtomicU32);

impl P32 {
    pub const fn new(value: u32) -> P32 {
        P32(AtomicU32::new(value))
    }
    #[inline(always)]
    pub fn get(&self) -> u32 {
        self.0.load(Relaxed)
    }
    #[inline(always)]
    pub fn set(&self, value: u32) {
        self.0.store(value, Relaxed);
    }
    /// Not one atomic step: for words with one writer, or counts that may miss one.
    #[inline(always)]
    pub fn add(&self, value: u32) -> u32 {
        let sum = self.get().wrapping_add(value);
        self.set(sum);
        sum
    }
    pub fn is(&self) -> bool {
        self.get() != 0
    }
    /// One atomic step, for what several threads may want to take.
    pub fn swap(&self, value: u32) -> u32 {
        self.0.swap(value, ringlet_core::sync::Ordering::AcqRel)
    }
    /// The same, from one value only: true for whoever has taken it.
    pub fn change(&self, from: u32, to: u32) -> bool {
        self.0.compare_exchange(from, to, AcqRel, Relaxed).is_ok()
    }
}

/// Is there something that was told, and that nobody has looked for since? Whoever looks, and finds nothing, says so by the number that stood here
/// before: what is told meanwhile changes it, and is not missed. (Taken back before the look, it would be missed by all who ask during that.)
#[derive(Default)]
#[repr(transparent)]
pub struct News(AtomicU32);

impl News {
    #[inline(always)]
    pub fn is(&self) -> bool {
        self.number() & 1 != 0
    }
    /// Odd if there is something.
    #[inline(always)]
    pub fn number(&self) -> u32 {
        self.0.load(Relaxed)
    }
    pub fn tell(&self) {
        let _ = self.0.fetch_update(AcqRel, Relaxed, |number| Some(number.wrapping_add(2) | 1));
    }
    /// A look that began when this number stood here has found nothing.
    pub fn nothing_since(&self, number: u32) {
        if number & 1 != 0 {
            let _ = self.0.compare_exchange(number, number & !1, AcqRel, Relaxed);
        }
    }
    pub fn reset(&self) {
        self.0.store(0, Relaxed);
    }
}

/// An index by which threads without a common lock find something, or 0.
#[derive(Default)]
#[repr(transparent)]
pub struct Published(AtomicU32);

impl Published {
    #[inline(always)]
    pub fn get(&self) -> u32 {
        // ORDER: Acquire; pairs with `set` and `swap`: what is found by it is there.
        self.0.load(Acquire)
    }
    #[inline(always)]
    pub fn set(&self, value: u32) {
        // ORDER: Release; pairs with `get`.
        self.0.store(value, Release);
    }
    #[inline(always)]
    pub fn is(&self) -> bool {
        self.get() != 0
    }
    /// One atomic step, for what several threads may want to take.
    pub fn swap(&self, value: u32) -> u32 {
        // ORDER: AcqRel; pairs with `get` and with itself.
        self.0.swap(value, AcqRel)
    }
}

#[derive(Default)]
#[repr(transparent)]
pub struct P64(AtomicU64);

impl P64 {
    pub const fn new(value: u64) -> P64 {
        P64(AtomicU64::new(value))
    }
    #[inline(always)]
    pub fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }
    #[inline(always)]
    pub fn set(&self, value: u64) {
        self.0.store(value, Relaxed);
    }
    #[inline(always)]
    pub fn add(&self, value: u64) -> u64 {
        let sum = self.get().wrapping_add(value);
        self.set(sum);
        sum
    }
}

/// An index handed out from a zeroed table: first those given back, then fresh ones.
///
/// The list of free ones is a stack threaded through `next`, its head tagged against reuse between look and swap.
#[derive(Default)]
pub struct FreeList {
    head: AtomicU64,
    fresh: AtomicU32,
}

impl FreeList {
    /// An index in `1..limit`, or `None` when all are taken. Lock-free, so that a signal handler or a killed process can't
    /// leave it stuck.
    pub fn take(&self, limit: u32, next: impl Fn(u32) -> u32) -> Option<u32> {
        // ORDER: Acquire pairs with the Release in `give`: the link is visible with the index.
        let mut head = self.head.load(ringlet_core::sync::Ordering::Acquire);
        while head as u32 != 0 {
            let tagged = (head >> 32).wrapping_add(1) << 32 | next(head as u32) as u64;
            match self.head.compare_exchange(
                head,
                tagged,
                ringlet_core::sync::Ordering::AcqRel,
                ringlet_core::sync::Ordering::Acquire,
            ) {
                Ok(_) => return Some(head as u32),
                Err(now) => head = now,
            }
        }
        let fresh = self.fresh.fetch_add(1, Relaxed) + 1;
        if fresh >= limit {
            self.fresh.fetch_sub(1, Relaxed);
            return None;
        }
        Some(fresh)
    }

    pub fn give(&self, index: u32, set_next: impl Fn(u32, u32)) {
        let mut head = self.head.load(Relaxed);
        loop {
            set_next(index, head as u32);
            let tagged = (head >> 32).wrapping_add(1) << 32 | index as u64;
            // ORDER: Release; pairs with the Acquire in `take`.
            match self.head.compare_exchange(
                head,
                tagged,
                ringlet_core::sync::Ordering::AcqRel,
                Relaxed,
            ) {
                Ok(_) => return,
                Err(now) => head = now,
            }
        }
    }

    /// One more than the highest index ever handed out.
    pub fn end(&self) -> u32 {
        self.fresh.load(Relaxed) + 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_told_during_a_look_is_news_behind_it() {
        let news = News::default();
        news.tell();
        let look = news.number();
        assert!(news.is(), "for others, too, as long as the look is under way");
        news.tell();
        news.nothing_since(look);
        assert!(news.is());
        let looks = [news.number(), news.number()];
        news.nothing_since(looks[0]);
        assert!(!news.is());
        news.tell();
        news.nothing_since(looks[1]);
        assert!(news.is(), "a number does not come again");
    }
}
