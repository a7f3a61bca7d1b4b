//! Which of a sleeper's many connections hold something new, so that its work grows with those and not with all that it has (the SMiLE paper's remote
//! enqueue).
//!
//! A receiver that looks at a connection no more (`watch::Rest`) wishes for its bit on the *ready board* (`WANT_READY`). The board is the
//! receiver's, a bit for each of its connections, in words of three levels:
//!
//! ```text
//! sender                                   receiver
//!   publish, see the wish                    take the top's bits, then the middle's, then the lane words' (RMW, SeqCst)
//!   set the lane's bit, then the middle's,   look at those connections
//!   then the top's; grant the wish (RMW)     arm, look at the top again
//!   look at the interrupt flag (`wait`)      nothing there: sleep
//! ```
//!
//! The wish is granted behind the bits: a sender that stops before has taken nothing from the next one, and behind it the bits stand.
//!
//! Whoever may write here can hide another's bit, or set one in vain. So a context has one board for peers that could as well kill its owner, and
//! another one for each stranger's process, which is heard there about its own connections only and no longer than it is honest
//! ([`Board::collect_from_stranger`]). A stranger does not see the interrupt flag: the board says whether its owner is awake ([`Awake`]).

use crate::layout::BOARD_LANE_COUNT;
#[cfg(not(loom))]
use crate::layout::ReadyBoard;
#[cfg(loom)]
use crate::sync::fence;
use crate::sync::{AtomicU64, Ordering};

const BITS: usize = 64;
/// What an honest stranger may leave: bits of connections that were closed since, and words whose bits were taken with earlier ones.
pub const VAIN_MOST: usize = 1024;

/// The words of a board.
#[derive(Clone, Copy)]
pub struct Board<'a> {
    pub top: &'a AtomicU64,
    /// Bit i of word j: a bit is set in lane word 64 j + i.
    pub middle: &'a [AtomicU64],
    /// Bit i of word j: lane 64 j + i.
    pub lanes: &'a [AtomicU64],
}

#[cfg(not(loom))]
impl<'a> From<&'a ReadyBoard> for Board<'a> {
    fn from(board: &'a ReadyBoard) -> Board<'a> {
        Board { top: &board.top, middle: &board.middle, lanes: &board.lanes }
    }
}

impl Board<'_> {
    /// There is something new for `lane`, which its owner has named. After the record was published, before the look at its interrupt flag.
    pub fn announce(self, lane: usize) {
        let lane = lane % (self.lanes.len() * BITS);
        let word = lane / BITS;
        // Each level in its turn, also behind a bit that stands: who has set that may have been stopped before it came to the next level.
        set(&self.lanes[word], lane);
        set(&self.middle[word / BITS], word);
        set(self.top, word / BITS);
    }

    /// Has anything been announced?
    #[inline(always)]
    pub fn announced(self) -> bool {
        // ORDER: SeqCst; before going to sleep it follows the fence of `wait::arm`, and then pairs with `set` and `wait::armed`: of the
        // announcement and the arming, one is seen by the other side.
        self.top.load(Ordering::SeqCst) != 0
    }

    /// The same from a stranger, who may set whatever he likes: `found` says whether it was his to say. Returns how many bits and words were for nothing;
    /// after `VAIN_MOST` of them it ends, and what is left of the pieces that it has begun is lost: then all that rests has to be looked at.
    pub fn collect_from_stranger(self, mut found: impl FnMut(usize) -> bool) -> usize {
        let mut vain = 0;
        for group in bits(self.top, self.middle.len()) {
            let mut words = 0;
            for word in bits(&self.middle[group], BITS) {
                words += 1;
                let word = group * BITS + word;
                let mut empty = true;
                for bit in bits(&self.lanes[word], BITS) {
                    empty = false;
                    vain += usize::from(!found(word * BITS + bit));
                }
                // (A sender that is late with the upper levels leaves one, too.)
                vain += usize::from(empty);
                if vain > VAIN_MOST {
                    return vain;
                }
            }
            vain += usize::from(words == 0);
        }
        vain
    }

    /// Takes what was announced.
    pub fn collect(self, mut found: impl FnMut(usize)) {
        for group in bits(self.top, self.middle.len()) {
            let words = self.lanes.len() - (group * BITS).min(self.lanes.len());
            for word in bits(&self.middle[group], words.min(BITS)) {
                let word = group * BITS + word;
                for bit in bits(&self.lanes[word], BITS) {
                    found(word * BITS + bit);
                }
            }
        }
    }
}

/// Whether the owner of a board is awake, and will look there before it sleeps: bit 0; above it a count of sleeps. Whoever does not find it awake rings.
///
/// ```text
/// about to sleep                        awake again, nobody else asleep          sender
///   count me among the sleepers           read the word                            set the bits
///   count the sleep, then clear bit 0     look for other sleepers                  look at the word:
///   look at the top again                 set bit 0, if nothing was counted since  not awake: ring
/// ```
#[derive(Clone, Copy)]
pub struct Awake<'a>(pub &'a AtomicU64);

const IS_AWAKE: u64 = 1;
const SLEEP: u64 = 2;

impl Awake<'_> {
    /// The caller is about to sleep, and is counted among the sleepers. Look at the board once more afterwards.
    pub fn sleeps(self) {
        // ORDER: SeqCst, both; the first pairs with `wakes`: who has read the word before changes it no more. The second pairs with `asleep`: of the
        // announcement and the sleep, one is seen by the other side.
        self.0.fetch_add(SLEEP, Ordering::SeqCst);
        self.0.fetch_and(!IS_AWAKE, Ordering::SeqCst);
        #[cfg(loom)]
        fence(Ordering::SeqCst);
    }

    /// The caller sleeps no more, and will look before it does again: says so if nobody else sleeps.
    pub fn wakes(self, others_sleep: impl FnOnce() -> bool) {
        // ORDER: SeqCst, before the look at the others; pairs with `sleeps`: who is not counted yet counts its sleep behind this, or clears the bit.
        let word = self.0.load(Ordering::SeqCst);
        if word & IS_AWAKE == 0 && !others_sleep() {
            let order = (Ordering::SeqCst, Ordering::Relaxed);
            let _ = self.0.compare_exchange(word, word | IS_AWAKE, order.0, order.1);
        }
    }

    /// For a sender, behind its announcement: something to ring for, if the owner sleeps and was not yet rung for that; `rung`: for what it was last.
    pub fn asleep(self, rung: u64) -> Option<u64> {
        #[cfg(loom)]
        fence(Ordering::SeqCst);
        // ORDER: SeqCst; pairs with `sleeps`.
        let word = self.0.load(Ordering::SeqCst);
        // (Another number than what nobody has rung for.)
        let sleep = word | IS_AWAKE;
        (word & IS_AWAKE == 0 && sleep != rung).then_some(sleep)
    }
}

fn set(word: &AtomicU64, bit: usize) {
    let bit = 1 << (bit % BITS);
    // ORDER: SeqCst, both; pairs with `bits`: if we see the bit stand, it is taken behind this look, and then what is below it.
    #[cfg(loom)]
    fence(Ordering::SeqCst); // which alone is sequentially consistent there
    if word.load(Ordering::SeqCst) & bit == 0 {
        word.fetch_or(bit, Ordering::SeqCst);
    }
}

/// Takes the first `most` bits of a word: their numbers.
fn bits(word: &AtomicU64, most: usize) -> impl Iterator<Item = usize> + use<> {
    // ORDER: SeqCst; pairs with `set`. What was published before a bit was set is seen behind this.
    let mut left = word.swap(0, Ordering::SeqCst);
    #[cfg(loom)]
    fence(Ordering::SeqCst);
    core::iter::from_fn(move || {
        let bit = left.trailing_zeros() as usize;
        // (Those beyond are nobody's.)
        (bit < most).then(|| left &= left - 1).map(|()| bit)
    })
}

const _: () =
    assert!(BOARD_LANE_COUNT.is_multiple_of(BITS * BITS) && BOARD_LANE_COUNT <= BITS * BITS * BITS);

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    fn board() -> (AtomicU64, Vec<AtomicU64>, Vec<AtomicU64>) {
        let words = |count: usize| (0..count).map(|_| AtomicU64::new(0)).collect();
        (AtomicU64::new(0), words(BOARD_LANE_COUNT / BITS / BITS), words(BOARD_LANE_COUNT / BITS))
    }

    #[test]
    fn what_is_announced_is_collected_once() {
        let (top, middle, lanes) = board();
        let board = Board { top: &top, middle: &middle, lanes: &lanes };
        let mut state = 1u64;
        for round in 0..200 {
            let mut announced = BTreeSet::new();
            for _ in 0..round {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                let lane = (state >> 33) as usize % BOARD_LANE_COUNT;
                board.announce(lane);
                announced.insert(lane);
            }
            assert_eq!(board.announced(), !announced.is_empty());
            let mut found = Vec::new();
            board.collect(|lane| found.push(lane));
            assert_eq!(found, announced.into_iter().collect::<Vec<_>>());
            assert!(!board.announced());
        }
    }

    /// Whatever peers write, and whichever lane one names: no place outside, and no more than there are.
    #[test]
    fn whatever_is_written_there_has_an_end() {
        let (top, middle, lanes) = board();
        let board = Board { top: &top, middle: &middle, lanes: &lanes };
        for lane in [usize::MAX, BOARD_LANE_COUNT, u64::MAX as usize / 3] {
            board.announce(lane);
        }
        for word in middle.iter().chain(&lanes).chain([&top]) {
            word.store(u64::MAX, Ordering::Relaxed);
        }
        let mut found = Vec::new();
        board.collect(|lane| found.push(lane));
        assert!(found.into_iter().eq(0..BOARD_LANE_COUNT));
    }

    /// What is honest is taken whole; who sets what is not his, or upper bits for nothing, is found out by a bounded number of looks.
    #[test]
    fn a_stranger_is_heard_as_long_as_he_is_honest() {
        let (top, middle, lanes) = board();
        let board = Board { top: &top, middle: &middle, lanes: &lanes };
        (0..BOARD_LANE_COUNT).for_each(|lane| board.announce(lane));
        let mut found = 0;
        let vain = board.collect_from_stranger(|_| {
            found += 1;
            true
        });
        assert_eq!((found, vain), (BOARD_LANE_COUNT, 0));
        assert!(!board.announced());
        (0..BOARD_LANE_COUNT).for_each(|lane| board.announce(lane));
        found = 0;
        let vain = board.collect_from_stranger(|lane| {
            found += 1;
            lane.is_multiple_of(2)
        });
        assert!(
            vain > VAIN_MOST && found <= 2 * vain && vain <= VAIN_MOST + BITS + 1,
            "{found}, {vain}"
        );
        // Upper bits over nothing.
        for (middle, expected) in [(0, BOARD_LANE_COUNT / BITS / BITS), (u64::MAX, VAIN_MOST)] {
            let (top, words, lanes) = self::board();
            words.iter().for_each(|word| word.store(middle, Ordering::Relaxed));
            top.store(u64::MAX, Ordering::Relaxed);
            let board = Board { top: &top, middle: &words, lanes: &lanes };
            let vain = board.collect_from_stranger(|_| panic!("nothing was announced"));
            assert_eq!(vain, expected);
        }
    }
}
