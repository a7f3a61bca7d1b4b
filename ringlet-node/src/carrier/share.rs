//! The carrier as the service knows it: what it carries, and for whom.
//!
//! A pair counts as its connecting end's until that has gone, then as the other's: so nobody can use up the share of who merely accepts.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use ringlet_linux::meet;
use ringlet_linux::sys::Errno;

use super::keeper::{Kept, Look, Word};
use super::{Order, Pair, WORD_BYTES};
use crate::apart::From;
use crate::policy::Limits;

/// Words that are taken of a carrier at a time.
const WORDS_AT_ONCE: usize = 64;

pub struct Carriers {
    pub kept: Kept,
    /// By their numbers; and which end each counts for.
    pairs: HashMap<u64, ([From; 2], usize)>,
    of_users: HashMap<Option<u32>, usize>,
    of_pods: HashMap<From, usize>,
    next: u64,
    lost: u64,
}

/// What became of the carrier.
#[derive(PartialEq, Eq, Debug)]
pub enum News {
    None,
    Started(u32),
    /// It has died, with so many pairs.
    Lost(u32, usize),
    KeeperLost,
}

impl Carriers {
    pub fn new(kept: Kept) -> Carriers {
        Carriers {
            kept,
            pairs: HashMap::new(),
            of_users: HashMap::new(),
            of_pods: HashMap::new(),
            next: 0,
            lost: 0,
        }
    }

    /// How many are carried, and how often a carrier was lost.
    pub fn counts(&self) -> (usize, u64) {
        (self.pairs.len(), self.lost)
    }

    /// May one more be, by these two (the connecting one first)?
    pub fn may(&self, ends: [&From; 2], limits: &Limits) -> bool {
        let count = |from: &From| {
            let of_user = self.of_users.get(&from.user).copied().unwrap_or(0);
            (of_user, self.of_pods.get(from).copied().unwrap_or(0))
        };
        self.pairs.len() < limits.carried
            && ends.into_iter().all(|from| {
                let (of_user, of_pod) = count(&short(from));
                of_user < limits.carried_of_a_user && of_pod < limits.carried_of_a_pod
            })
    }

    /// Hands the lifelines of two ends over (the connecting one's first).
    pub fn carry(
        &mut self,
        ends: [&From; 2],
        lifelines: [i32; 2],
        ring_bytes: u64,
    ) -> Result<(), Errno> {
        let carrier = self.kept.process().ok_or(Errno::ENOENT)?;
        let ends = ends.map(short);
        let number = self.next;
        let order = Order::Carry(Pair { number, ends: ends.clone(), ring_bytes });
        let order = serde_json::to_vec(&order).map_err(|_| Errno::EINVAL)?;
        meet::send(carrier, &order, &lifelines)?;
        self.next += 1;
        self.count(&ends[0], true);
        self.pairs.insert(number, (ends, 0));
        Ok(())
    }

    /// Asks the carrier, if it carries anything, whether it goes on. Its pid, if it hangs.
    pub fn hangs(&mut self) -> Option<u32> {
        match if self.pairs.is_empty() { Look::Fine } else { self.kept.look() } {
            Look::Fine => None,
            Look::Hangs(pid) => Some(pid),
            Look::Ask => {
                let (carrier, ask) = (self.kept.process()?, serde_json::to_vec(&Order::Ask).ok()?);
                // (If there is no room it does not read, which is no answer.)
                let _ = meet::send(carrier, &ask, &[]);
                None
            }
        }
    }

    fn count(&mut self, from: &From, more: bool) {
        let change = |count: &mut usize| {
            *count = if more { *count + 1 } else { count.saturating_sub(1) };
            *count > 0
        };
        if !change(self.of_users.entry(from.user).or_default()) {
            self.of_users.remove(&from.user);
        }
        if !change(self.of_pods.entry(from.clone()).or_default()) {
            self.of_pods.remove(from);
        }
    }

    /// The keeper says something: there is another carrier.
    pub fn hear_keeper(&mut self) -> News {
        match self.kept.hear() {
            Word::None => News::None,
            Word::KeeperLost => News::KeeperLost,
            Word::Started(pid) => {
                self.forget();
                News::Started(pid)
            }
        }
    }

    /// The carrier says something. (It may have been taken over by a tenant: what it says counts for what it carries, and nothing else.)
    pub fn hear_carrier(&mut self) -> News {
        let (Some(carrier), Some(pid)) = (self.kept.process(), self.kept.pid()) else {
            return News::None;
        };
        for _ in 0..WORDS_AT_ONCE {
            let mut bytes = [0; WORD_BYTES];
            let len = match meet::receive(carrier, &mut bytes) {
                Err(Errno::EAGAIN) => break,
                Ok((len @ 1.., _)) => len,
                _ => {
                    self.lost += 1;
                    self.kept.forget();
                    return News::Lost(pid, self.forget());
                }
            };
            match serde_json::from_slice(&bytes[..len]) {
                Ok(super::Word::Gone(number)) => self.gone(number),
                Ok(super::Word::Over(number)) => self.over(number),
                Ok(super::Word::Answer) => self.kept.answered(),
                Err(_) => {}
            }
        }
        News::None
    }

    fn gone(&mut self, number: u64) {
        let Some((ends, of @ 0)) = self.pairs.get_mut(&number) else { return };
        *of = 1;
        let ends = ends.clone();
        self.count(&ends[0], false);
        self.count(&ends[1], true);
    }

    fn over(&mut self, number: u64) {
        if let Some((ends, of)) = self.pairs.remove(&number) {
            self.count(&ends[of], false);
        }
    }

    fn forget(&mut self) -> usize {
        let pairs = self.pairs.len();
        self.pairs.clear();
        self.of_users.clear();
        self.of_pods.clear();
        pairs
    }
}

/// A pod by a number that stands for its name, which may be long.
fn short(from: &From) -> From {
    let number = |pod: &String| {
        let mut hasher = DefaultHasher::new();
        pod.hash(&mut hasher);
        format!("{:016x}", hasher.finish())
    };
    From { user: from.user, pod: from.pod.as_ref().map(number) }
}

#[cfg(test)]
mod tests {
    use super::super::Word;
    use super::*;
    use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

    fn from(user: u32, pod: &str) -> From {
        From { user: Some(user), pod: Some(pod.to_owned()) }
    }

    #[test]
    fn a_pair_counts_for_who_connects_and_then_for_who_is_left() {
        // SAFETY: made just now, ours alone.
        let own = |fd| unsafe { OwnedFd::from_raw_fd(fd) };
        let [keeper, theirs] = meet::pair().unwrap().map(own);
        let mut carriers = Carriers::new(Kept::by(keeper));
        let limits =
            Limits { carried: 3, carried_of_a_user: 2, carried_of_a_pod: 1, ..Limits::default() };
        let (one, two, server) = (from(1, "/a"), from(1, "/b"), from(2, "/s"));
        assert_eq!(
            carriers.carry([&one, &server], [0, 0], 1),
            Err(Errno::ENOENT),
            "nobody carries"
        );
        let [ours, carrier] = meet::pair().unwrap().map(own);
        meet::send(theirs.as_raw_fd(), b"{\"pid\":7}", &[ours.as_raw_fd()]).unwrap();
        assert_eq!(carriers.hear_keeper(), News::Started(7));
        let [line, _other] = meet::pair().unwrap().map(own);
        let lines = [line.as_raw_fd(); 2];
        assert!(carriers.may([&one, &server], &limits));
        carriers.carry([&one, &server], lines, 1).unwrap();
        assert!(!carriers.may([&one, &server], &limits), "one of a pod");
        assert!(carriers.may([&two, &server], &limits), "who accepts is not charged");
        carriers.carry([&two, &server], lines, 1).unwrap();
        assert!(!carriers.may([&from(1, "/c"), &server], &limits), "two of a user");
        let say = |word: Word| {
            let word = serde_json::to_vec(&word).unwrap();
            meet::send(carrier.as_raw_fd(), &word, &[]).unwrap();
        };
        [Word::Gone(0), Word::Gone(0), Word::Gone(99), Word::Over(98)].into_iter().for_each(say);
        meet::send(carrier.as_raw_fd(), b"nonsense", &[]).unwrap();
        assert_eq!(carriers.hear_carrier(), News::None);
        assert!(carriers.may([&one, &from(3, "/t")], &limits));
        assert!(!carriers.may([&one, &server], &limits), "who is left holds it");
        say(Word::Over(0));
        say(Word::Over(0));
        carriers.hear_carrier();
        assert!(carriers.may([&one, &server], &limits));
        assert_eq!(carriers.counts(), (1, 0));
        drop(carrier);
        assert_eq!(carriers.hear_carrier(), News::Lost(7, 1));
        assert!(carriers.kept.process().is_none() && carriers.counts() == (0, 1));
    }
}
