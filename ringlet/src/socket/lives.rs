//! How long connections to a service lately lived, in messages: from that follows when its next one is to be moved.
//!
//! To move a connection costs as much as the ring saves in some dozens of messages. Where connections mostly end before that, moving
//! them is paid for nothing; where they live long, every message that is waited for first is lost. What can be known is how earlier ones
//! did: here, those to the same address (as `connect` names it, or as the listener is bound). Each side delays itself alone, by what it has
//! seen. A connection that lives long where others die young is moved later by so many messages, and no more (`LATEST`).
//!
//! A server that forks for each connection learns in its children. So the table is shared by the family, until a process changes its user.
//! It holds hints: whatever somebody writes there, a connection waits for `LATEST` messages at most.

use crate::plain::P32;
use ringlet_core::sync::{AtomicU64, Ordering};
use ringlet_linux::map;
use ringlet_linux::sys::{self, Sys};

/// What moving costs, in messages of which each is so much dearer through the kernel.
const COST: u32 = 64;
/// Lives shorter than these are counted together; longer ones too.
const CLASSES: [u32; 4] = [8, 16, 32, 64];
/// And what a life of such a class is reckoned as.
const USUAL: [u32; 4] = [6, 12, 24, 48];
const LATEST: u32 = CLASSES[CLASSES.len() - 1];
/// Of a service that is not known, so many are thought to have lived long.
const BELIEVED: u32 = 8;
/// When so many are counted, each counts half.
const REMEMBERED: u32 = 32;
/// Once that has happened, one end in so many is noted: a word that each of several processes writes at each end costs more than the rest of
/// what an end costs.
const NOTED_ONE_IN: u64 = 4;
/// Its product has each bit of a clock in its upper half.
const SPREAD: u64 = 0x9e37_79b9_7f4a_7c15;

/// A page. A service has one of two places.
const SERVICE_COUNT: usize = 512;
const SIDE_SEED: [u64; 2] = [0xcbf2_9ce4_8422_2325, 0x9ae1_6a3b_2f90_404f];

/// Which service this is, for those who connect to it (`accepting`: for those who accept). Never 0.
pub fn service(address: &[u8], accepting: bool) -> u32 {
    let hash = address.iter().fold(SIDE_SEED[accepting as usize], |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    });
    ((hash ^ hash >> 32) as u32).max(1)
}

/// How many connections of a service lived how long: a count for each class, the last for those that outlived all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Lives([u32; CLASSES.len() + 1]);

impl Lives {
    const UNKNOWN: Lives = Lives([0, 0, 0, 0, BELIEVED]);

    /// In a word, beside the service's tag.
    fn to_word(self, tag: u64) -> u64 {
        self.0.iter().zip(0..).fold(tag << TAG_SHIFT, |word, (count, place)| {
            word | u64::from(*count) << (place * COUNT_BITS)
        })
    }

    fn from_word(word: u64) -> Lives {
        let mut lives = Lives([0; CLASSES.len() + 1]);
        for (count, place) in lives.0.iter_mut().zip(0..) {
            *count = (word >> (place * COUNT_BITS)) as u32 & ((1 << COUNT_BITS) - 1);
        }
        lives
    }

    fn count(&self) -> u32 {
        self.0.iter().sum()
    }

    /// One more has come to its end.
    fn with(mut self, messages: u32) -> Lives {
        if self.count() >= REMEMBERED {
            self.0.iter_mut().for_each(|count| *count /= 2);
        }
        let class = CLASSES.iter().position(|limit| messages < *limit).unwrap_or(CLASSES.len());
        self.0[class] += 1;
        self
    }

    /// After how many messages a connection is best moved, if they all live like these; `soonest` or later.
    fn best(self, soonest: u32) -> u32 {
        // Until it is moved a connection loses its messages, and then what moving costs; or, if it ends before, only these.
        let cost = |after: u32| {
            let of_class = |class: usize| match CLASSES.get(class) {
                Some(limit) if *limit <= after => USUAL[class],
                _ => after + COST,
            };
            self.0.iter().zip(0..).map(|(count, class)| count * of_class(class)).sum::<u32>()
        };
        let later = CLASSES.into_iter().filter(|after| *after > soonest);
        core::iter::once(soonest).chain(later).min_by_key(|after| cost(*after)).unwrap_or(soonest)
    }
}

const COUNT_BITS: u32 = 8;
const TAG_SHIFT: u32 = COUNT_BITS * (CLASSES.len() as u32 + 1);

fn tag_of(service: u32) -> u64 {
    u64::from(service >> 8).max(1)
}

pub struct Services {
    lives: &'static [AtomicU64],
    /// Private: the age (`family`), plus one, in which the process took leave of the others.
    parted: &'static [P32],
}

impl Services {
    pub fn map() -> Sys<Services> {
        Ok(Services { lives: map::family_table(SERVICE_COUNT)?, parted: map::private_table(1)? })
    }

    fn places(&self, service: u32) -> [&'static AtomicU64; 2] {
        let at = service as usize % SERVICE_COUNT;
        [&self.lives[at], &self.lives[at ^ 1]]
    }

    fn find(&self, service: u32) -> Option<(&'static AtomicU64, u64)> {
        let known = |place: &'static AtomicU64| (place, place.load(Ordering::Relaxed));
        let tag = tag_of(service);
        self.places(service).map(known).into_iter().find(|(_, word)| word >> TAG_SHIFT == tag)
    }

    /// After how many messages a connection to this service is to be moved, `soonest` or later.
    pub fn move_after(&self, service: u32, soonest: u32) -> u32 {
        // (As early as possible, whatever it costs.)
        if service == 0 || soonest == 0 || soonest >= LATEST {
            return soonest;
        }
        match self.find(service) {
            Some((_, word)) => Lives::from_word(word).best(soonest),
            None => soonest,
        }
    }

    /// A connection has come to its end. One that was never used says nothing.
    pub fn note_end(&self, service: u32, messages: u32) {
        if service == 0 || messages == 0 {
            return;
        }
        let settled = |(_, word)| Lives::from_word(word).count() >= REMEMBERED / 2;
        // By chance: children that end after one connection each have counted none.
        let by_chance = || sys::ticks().wrapping_mul(SPREAD) >> 32 & (NOTED_ONE_IN - 1) != 0;
        if !(self.find(service).is_some_and(settled) && by_chance()) {
            self.note(service, messages);
        }
    }

    fn note(&self, service: u32, messages: u32) {
        let (place, word) = self.find(service).unwrap_or_else(|| {
            let [one, other] = self.places(service);
            let free = one.load(Ordering::Relaxed) == 0 || other.load(Ordering::Relaxed) != 0;
            let place = if free { one } else { other };
            (place, Lives::UNKNOWN.to_word(0))
        });
        let lives = Lives::from_word(word).with(messages);
        // ORDER: Relaxed: a hint, in one word. (One of two at the same time may be missed.)
        place.store(lives.to_word(tag_of(service)), Ordering::Relaxed);
    }

    /// The process is about to change its user: what it has learnt stays with the family, and from here on it learns for itself.
    pub fn part(&self, age: u32) {
        // Some programs change their user for each request.
        if self.parted[0].get() != age + 1 && map::map_anew(self.lives).is_ok() {
            self.parted[0].set(age + 1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SOONEST: u32 = 4;

    fn after(lives: impl IntoIterator<Item = u32>) -> u32 {
        lives.into_iter().fold(Lives::UNKNOWN, Lives::with).best(SOONEST)
    }

    fn services() -> Services {
        Services::map().unwrap()
    }

    #[test]
    fn moved_soon_where_nothing_is_known_or_they_live_long() {
        assert_eq!(after([]), SOONEST);
        assert_eq!(after([1000; 50]), SOONEST);
        assert_eq!(after([10]), SOONEST, "one tells little");
        assert_eq!(services().move_after(service(b"x", true), SOONEST), SOONEST);
    }

    #[test]
    fn where_they_die_young_one_that_does_is_not_moved() {
        for life in [5, 10, 20, 40] {
            for count in [50, 1000] {
                let after = after(vec![life; count]);
                assert!(after > life && after <= LATEST, "{count} of {life}: {after}");
            }
        }
        // Some in between live long.
        let mixed = (0..1000).map(|n| if n % 10 == 0 { 100_000 } else { 11 });
        assert_eq!(after(mixed), 16);
    }

    #[test]
    fn soon_again_once_they_live_long_again() {
        let changed = std::iter::repeat_n(10, 1000).chain(std::iter::repeat_n(500, 40));
        assert_eq!(after(changed), SOONEST);
    }

    #[test]
    fn as_early_as_possible_is_not_delayed_nor_what_is_asked_for_shortened() {
        let services = services();
        let name = service(b"127.0.0.1:80", false);
        (0..20).for_each(|_| services.note(name, 20));
        assert_eq!(
            [0, 1, 4, 32, 33, 64, 1000].map(|soonest| services.move_after(name, soonest)),
            [0, 32, 32, 32, 33, 64, 1000]
        );
        assert_eq!(services.move_after(service(b"127.0.0.1:80", true), 4), 4, "of the other side");
        assert_eq!(services.move_after(0, 4), 4);
    }

    #[test]
    fn what_a_child_learns_its_parent_knows_unless_it_has_changed_its_user() {
        let services = services();
        let name = service(b"listener", true);
        for (parts, knows) in [(true, false), (false, true)] {
            // SAFETY: the child writes to the table and ends.
            #[allow(unsafe_code)]
            unsafe {
                let child = libc::fork();
                if child == 0 {
                    if parts {
                        services.part(1);
                    }
                    (0..20).for_each(|_| services.note(name, 10));
                    libc::_exit(0);
                }
                libc::waitpid(child, std::ptr::null_mut(), 0);
            }
            assert_eq!(services.move_after(name, SOONEST) > SOONEST, knows);
        }
    }

    #[test]
    fn a_new_service_takes_the_place_of_an_old_one() {
        let services = services();
        let names = [1, 2, 3].map(|n: u32| n << 9 | 1);
        for name in names {
            (0..20).for_each(|_| services.note(name, 10));
            assert_eq!(services.move_after(name, SOONEST), 16);
        }
        assert_eq!(services.move_after(names[0], SOONEST), SOONEST);
        assert_eq!(services.move_after(names[1], SOONEST), 16);
    }

    proptest! {
        /// Whatever is in the table.
        #[test]
        fn no_word_delays_for_long(word: u64, soonest in 0u32..200, life: u32) {
            let lives = Lives::from_word(word);
            let after = lives.best(soonest);
            prop_assert!(after >= soonest && after <= soonest.max(LATEST));
            let next = lives.with(life);
            prop_assert_eq!(Lives::from_word(next.to_word(7)), next);
        }

        #[test]
        fn words_hold_what_is_counted(lives in proptest::collection::vec(1u32..200, 0..300)) {
            let counted = lives.into_iter().fold(Lives::UNKNOWN, Lives::with);
            prop_assert_eq!(Lives::from_word(counted.to_word(0xff_ffff)), counted);
            prop_assert_eq!(counted.to_word(0xab_cdef) >> TAG_SHIFT, 0xab_cdef);
        }
    }
}
