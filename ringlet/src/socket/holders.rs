//! Who holds an end, so that a process that was killed is not counted for ever.
//!
//! An end counts them. Beside the count is noted who they are: a bit for each one's place in a table that the family shares, where its
//! number is. Whoever has to know whether it is alone (at a last close above all) asks the kernel about those that are noted, and counts the dead
//! no more. A process that is not noted (there was no place; it was forked around libc) is counted only: if it is killed, what it shared
//! is never again somebody's alone.
//!
//! Nothing here may take a living holder for dead. So a count comes before its bit and goes behind it; bits of the dead are taken away by a swap of
//! the whole word, in which forks are counted too; and where numbers may mean something else (another pid namespace) nobody is dead.

use crate::plain::P32;
use crate::thread;
use ringlet_core::sync::{AtomicU32, AtomicU64, Ordering};
use ringlet_linux::map;
use ringlet_linux::sys::{self, Sys};

/// A page, which can be mapped anew alone. As many of its words are used as `Held::noted` has bits for.
const TABLE_COUNT: usize = 1024;
const PLACE_COUNT: u32 = 48;
/// In the bits above, forks are counted, so that a place which another process has got meanwhile is told.
const ONE_FORK: u64 = 1 << PLACE_COUNT;
/// A child that is being made: its number is not known yet.
const UNBORN: u32 = u32::MAX;
/// Where all places were those of the living, one fork in so many looks for the dead again.
const SWEEP_ONE_IN: u32 = 16;

/// Of an end: how many processes of the family hold it, and which.
#[derive(Default)]
pub struct Held {
    count: AtomicU32,
    noted: AtomicU64,
}

impl Held {
    /// For another connection, which is ours alone.
    pub fn begin(&self) {
        self.count.store(1, Ordering::Relaxed);
        self.noted.store(0, Ordering::Relaxed);
    }

    /// (The dead may be among them: see `Holders::is_alone`.)
    #[inline(always)]
    pub fn count(&self) -> u32 {
        // ORDER: Acquire; pairs with `share`.
        self.count.load(Ordering::Acquire)
    }

    /// One process more holds the end. These are noted.
    pub fn share(&self, bits: u64) {
        // ORDER: AcqRel, the note behind the count; pairs with `Holders::forget` and `count`.
        self.count.fetch_add(1, Ordering::AcqRel);
        if bits != 0 {
            let note = |noted: u64| Some((noted | bits).wrapping_add(ONE_FORK));
            let _ = self.noted.fetch_update(Ordering::AcqRel, Ordering::Relaxed, note);
        }
    }

    /// Was this place, plus one, noted?
    pub fn is_noted(&self, place: u32) -> bool {
        self.noted.load(Ordering::Relaxed) & bit(place) != 0
    }

    /// One less. (Who is killed in between stays counted.)
    fn leave(&self, bits: u64) -> bool {
        if self.noted.load(Ordering::Relaxed) & bits != 0 {
            // ORDER: AcqRel, before the count; pairs with `Holders::forget`.
            self.noted.fetch_and(!bits, Ordering::AcqRel);
        }
        self.count.fetch_sub(1, Ordering::AcqRel) == 1
    }
}

pub struct Holders {
    /// Numbers of processes (`thread::owner_of`), 0 for a free place. Nobody gives up his own: it is free some time after he is dead.
    places: &'static [AtomicU32],
    own: &'static [Own],
}

/// Private.
#[derive(Default)]
pub struct Own {
    /// Our place, plus one.
    place: P32,
    /// We share ends with processes that have another table: nobody is noted, or asked for, any more.
    none: P32,
    /// When the dead were looked for last, there were none.
    crowded: P32,
    /// The age (`family`), plus one, in which we took leave of the others.
    parted: P32,
}

// SAFETY: atomics only; zero is a process without a place.
#[allow(unsafe_code)]
unsafe impl map::Zeroed for Own {}

/// Of a place, plus one.
fn bit(place: u32) -> u64 {
    place.checked_sub(1).map_or(0, |place| 1 << place)
}

impl Holders {
    pub fn map() -> Sys<Holders> {
        Ok(Holders { places: map::family_table(TABLE_COUNT)?, own: map::private_table(1)? })
    }

    /// Of a place, plus one.
    fn at(&self, place: u32) -> &'static AtomicU32 {
        &self.places[place as usize - 1]
    }

    fn claim(&self, number: u32) -> u32 {
        let free = |place: &u32| {
            let word = self.at(*place);
            // ORDER: AcqRel; pairs with `sweep`: the last owner is no longer noted.
            word.load(Ordering::Relaxed) == 0
                && word.compare_exchange(0, number, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        };
        if self.own[0].none.is() { 0 } else { (1..=PLACE_COUNT).find(free).unwrap_or(0) }
    }

    /// Our place: we get one when we first share something. (`process` is our number, and not that of a vfork child in which we are: that one
    /// is soon over, where the ends that it shares are ours.)
    fn mine(&self, process: u32) -> u32 {
        let place = &self.own[0].place;
        if !place.is() {
            place.set(self.claim(thread::owner_of(process as i32)));
        }
        place.get()
    }

    /// Before a fork of this process: the bits to be noted at each end that the child will hold too (`share`), and the child's place, plus one.
    pub fn before_fork<'a>(
        &self,
        process: u32,
        fork: u32,
        all: impl Iterator<Item = &'a Held>,
    ) -> (u64, u32) {
        let mine = self.mine(process);
        let mut child = self.claim(UNBORN);
        let own = &self.own[0];
        let again = !own.crowded.is() || fork.is_multiple_of(SWEEP_ONE_IN);
        if child == 0 && again && !own.none.is() {
            self.sweep(all);
            child = self.claim(UNBORN);
            own.crowded.set((child == 0) as u32);
        }
        (bit(mine) | bit(child), child)
    }

    /// Frees the places of the dead. (An end that only others know keeps their bits, and names who gets the place next as well: then
    /// the dead one stays counted.)
    fn sweep<'a>(&self, all: impl Iterator<Item = &'a Held>) {
        let mut dead = [0; PLACE_COUNT as usize];
        for (word, dead) in self.places.iter().zip(&mut dead) {
            let number = word.load(Ordering::Relaxed);
            *dead = if is_over(number) { number } else { 0 };
        }
        for held in all {
            self.forget(held, |at, number| number != 0 && number == dead[at]);
        }
        for (word, dead) in self.places.iter().zip(dead).filter(|(_, dead)| *dead != 0) {
            // ORDER: AcqRel; pairs with `claim`.
            let _ = word.compare_exchange(dead, 0, Ordering::AcqRel, Ordering::Relaxed);
        }
    }

    /// In the parent, where it is told: the number of the child. (Else the child tells it, when it asks for others.)
    pub fn born(&self, place: u32, child: i32) {
        if place != 0 {
            self.tell(place, thread::owner_of(child));
        }
    }

    fn tell(&self, place: u32, number: u32) -> bool {
        // ORDER: Relaxed: a number alone.
        let (order, word) = (Ordering::Relaxed, self.at(place));
        let told = word.compare_exchange(UNBORN, number, order, order);
        told.is_ok() || told == Err(number)
    }

    /// There is no child, for whom these are counted.
    pub fn unborn<'a>(&self, place: u32, counted: impl Iterator<Item = &'a Held>) {
        for held in counted {
            held.leave(bit(place));
        }
        if place != 0 {
            // ORDER: Release; pairs with `claim`.
            self.at(place).store(0, Ordering::Release);
        }
    }

    /// In a child, as which its parent has noted this place. False: that was another child, of which this one is a copy, made around libc.
    pub fn begin(&self, place: u32, process: u32) -> bool {
        // (The first of a pid namespace has another number for its parent.)
        let is_ours =
            place == 0 || process == 1 || self.tell(place, thread::owner_of(process as i32));
        self.own[0].place.set(if is_ours { place } else { 0 });
        is_ours
    }

    /// This process holds the end again, or has got it by a fork that nobody counted.
    pub fn join(&self, process: u32, held: &Held) {
        held.share(bit(self.mine(process)));
    }

    /// A child that is at no place yet, since it has looked at nothing, holds it no more. True: nobody does.
    pub fn leave_at(&self, place: u32, held: &Held) -> bool {
        held.leave(bit(place))
    }

    /// This process holds it no more. True: nobody does.
    pub fn leave(&self, held: &Held) -> bool {
        held.leave(bit(self.own[0].place.get()))
    }

    /// Does no other living process hold it?
    pub fn is_alone(&self, held: &Held) -> bool {
        held.count() <= 1 || self.forget_dead(held) && held.count() <= 1
    }

    #[cold]
    fn forget_dead(&self, held: &Held) -> bool {
        let own = &self.own[0];
        // (Who has another number for those who made us may have others for the rest as well.)
        own.place.is()
            && !own.none.is()
            && self.tell(own.place.get(), thread::owner_of(sys::getpid()))
            && self.forget(held, |_, number| is_over(number))
    }

    fn forget(&self, held: &Held, is_dead: impl Fn(usize, u32) -> bool) -> bool {
        // ORDER: Acquire, before the number; pairs with `share`: if another process gets the place meanwhile, the word is another one once it is noted.
        let noted = held.noted.load(Ordering::Acquire);
        let is_dead = |at: &u32| {
            let others = bit(*at + 1) & !bit(self.own[0].place.get());
            noted & others != 0 && is_dead(*at as usize, self.at(*at + 1).load(Ordering::Acquire))
        };
        let dead = (0..PLACE_COUNT).filter(is_dead).fold(0, |dead, at| dead | bit(at + 1));
        // ORDER: AcqRel; pairs with `share`: whose bit was there was counted.
        let gone = dead != 0
            && held
                .noted
                .compare_exchange(noted, noted & !dead, Ordering::AcqRel, Ordering::Relaxed)
                .is_ok();
        if gone {
            held.count.fetch_sub(dead.count_ones(), Ordering::AcqRel);
        }
        gone
    }

    /// The process is about to change its user: what it notes from here on is its own. `shares`: it holds ends still that others know.
    pub fn part(&self, age: u32, shares: bool) {
        let own = &self.own[0];
        if own.parted.get() != age + 1 {
            own.none.set((shares || map::map_anew(self.places).is_err()) as u32);
            own.place.set(0);
            own.parted.set(age + 1);
        }
    }
}

fn is_over(number: u32) -> bool {
    !matches!(number, 0 | UNBORN) && thread::is_over(number)
}
