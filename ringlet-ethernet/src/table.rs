//! Which port an address is behind: learned from what comes from it, aged, moved, and guarded against who would take another's.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use crate::frame::Mac;

/// From where frames may come.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Policy {
    /// An address is behind whoever of one user's ports used it last (bonds move theirs, too); another user's does not get it.
    Moving,
    /// It stays with the port that used it first, until that one leaves or has not used it for long.
    Locked,
    /// A port has the one address with which it came; behind another host those that were there first stay, as if they were locked.
    Static,
}

/// An address that has not been used for so long is forgotten (as a Linux bridge does).
pub const AGE_MS: u64 = 300_000;
/// Of one port: more stand behind no bridge, but in frames of one who wants the table to be full.
pub const OF_ONE_PORT: usize = 4096;
/// A port that has as many is looked through so often, for those that are forgotten.
const SWEEP_MS: u64 = 1000;

/// A port, as others know it; never used twice, however many come and go.
pub type Key = u64;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Source {
    /// As it was known.
    Known,
    /// Known from now on, or somewhere else.
    Learned,
    /// It may come, but is not kept: there are too many.
    Unlearned,
    /// It is another port's.
    Refused,
}

struct Entry {
    port: Key,
    used_ms: u64,
    /// It came with its port, and does not age.
    is_own: bool,
}

struct Port {
    /// `None`: nobody knows, so it is nobody else's either.
    user: Option<u32>,
    own: Mac,
    /// Other ports are behind it, of another host.
    is_far: bool,
    addresses: usize,
    swept_ms: u64,
}

pub struct Table {
    policy: Policy,
    entries: HashMap<Mac, Entry>,
    ports: HashMap<Key, Port>,
}

impl Table {
    pub fn new(policy: Policy) -> Table {
        Table { policy, entries: HashMap::new(), ports: HashMap::new() }
    }

    /// A port has come, with an address. False if that is another one's, who may not be robbed of it: then nothing has changed.
    pub fn join(
        &mut self,
        key: Key,
        user: Option<u32>,
        own: Mac,
        is_far: bool,
        now_ms: u64,
    ) -> bool {
        let holder = self.entries.get(&own).filter(|entry| !is_old(entry, now_ms));
        if holder.is_some_and(|entry| entry.is_own || !self.may_take(entry, user))
            || self.is_reserved(own, key, user)
        {
            return false;
        }
        self.ports.insert(key, Port { user, own, is_far, addresses: 0, swept_ms: now_ms });
        self.put(own, Entry { port: key, used_ms: now_ms, is_own: true });
        true
    }

    /// A port has gone, and all that was behind it.
    pub fn leave(&mut self, key: Key) {
        self.ports.remove(&key);
        self.entries.retain(|_, entry| entry.port != key);
    }

    /// A frame has come from this address, by this port.
    pub fn source(&mut self, mac: Mac, key: Key, now_ms: u64) -> Source {
        let Some(port) = self.ports.get(&key) else { return Source::Refused };
        let user = port.user;
        let known = self.entries.get_mut(&mac).filter(|entry| !is_old(entry, now_ms));
        match known {
            Some(entry) if entry.port == key => {
                entry.used_ms = now_ms;
                return Source::Known;
            }
            Some(entry) => {
                let entry = Entry { ..*entry };
                if !self.may_take(&entry, user) {
                    return Source::Refused;
                }
            }
            None if self.policy == Policy::Static && !port.is_far => return Source::Refused,
            None => {}
        }
        if self.is_reserved(mac, key, user) {
            return Source::Refused;
        }
        if self.is_full(key, now_ms) {
            return if self.policy == Policy::Moving { Source::Unlearned } else { Source::Refused };
        }
        self.put(mac, Entry { port: key, used_ms: now_ms, is_own: false });
        Source::Learned
    }

    pub fn find(&self, mac: Mac, now_ms: u64) -> Option<Key> {
        self.entries.get(&mac).filter(|entry| !is_old(entry, now_ms)).map(|entry| entry.port)
    }

    /// Has this port as many addresses as it may, of which none is forgotten?
    fn is_full(&mut self, key: Key, now_ms: u64) -> bool {
        let Some(port) = self.ports.get_mut(&key) else { return true };
        if port.addresses >= OF_ONE_PORT && now_ms.saturating_sub(port.swept_ms) >= SWEEP_MS {
            port.swept_ms = now_ms;
            self.entries.retain(|_, entry| {
                let is_kept = entry.port != key || !is_old(entry, now_ms);
                port.addresses -= usize::from(!is_kept);
                is_kept
            });
        }
        port.addresses >= OF_ONE_PORT
    }

    fn may_take(&self, entry: &Entry, user: Option<u32>) -> bool {
        self.ports.get(&entry.port).is_some_and(|port| self.are_one(port.user, user))
    }

    fn are_one(&self, holder: Option<u32>, user: Option<u32>) -> bool {
        self.policy == Policy::Moving && holder.is_some() && holder == user
    }

    /// Has one of another user's come with this address? It may have moved to one of that user's, which then left, or have aged there.
    fn is_reserved(&self, mac: Mac, by: Key, user: Option<u32>) -> bool {
        let others = self.ports.iter().filter(|(key, _)| **key != by);
        let mut owners = others.filter(|(_, port)| port.own == mac);
        owners.any(|(_, port)| !self.are_one(port.user, user))
    }

    fn put(&mut self, mac: Mac, entry: Entry) {
        if let Some(port) = self.ports.get_mut(&entry.port) {
            port.addresses += 1;
        }
        let before = self.entries.insert(mac, entry);
        if let Some(port) = before.and_then(|before| self.ports.get_mut(&before.port)) {
            port.addresses -= 1;
        }
    }
}

fn is_old(entry: &Entry, now_ms: u64) -> bool {
    !entry.is_own && now_ms.saturating_sub(entry.used_ms) > AGE_MS
}

/// So many frames a second, and as many at once: what goes to all is bounded, whoever sends it.
pub struct Bucket {
    rate: u64,
    /// In thousandths of a frame.
    left: u64,
    at_ms: u64,
}

impl Bucket {
    /// 0: without a bound.
    pub fn new(rate: u64, now_ms: u64) -> Bucket {
        Bucket { rate, left: rate * 1000, at_ms: now_ms }
    }

    /// With so many at first, at most.
    pub fn beginning_with(self, first: u64) -> Bucket {
        Bucket { left: self.left.min(first * 1000), ..self }
    }

    pub fn takes(&mut self, now_ms: u64) -> bool {
        if self.rate == 0 {
            return true;
        }
        let passed = now_ms.saturating_sub(self.at_ms).min(1000);
        self.at_ms = self.at_ms.max(now_ms);
        self.left = (self.left + passed * self.rate).min(self.rate * 1000);
        let takes = self.left >= 1000;
        self.left -= if takes { 1000 } else { 0 };
        takes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[derive(Clone, Debug)]
    enum Act {
        Join { key: Key, user: Option<u32>, mac: u8, is_far: bool },
        Leave(Key),
        From { key: Key, mac: u8 },
        Pass(u64),
    }

    fn act() -> impl Strategy<Value = Act> {
        prop_oneof![
            1 => (0..4u64, prop::option::of(0..2u32), 0..6u8, any::<bool>())
                .prop_map(|(key, user, mac, is_far)| Act::Join { key, user, mac, is_far }),
            1 => (0..4u64).prop_map(Act::Leave),
            8 => (0..4u64, 0..6u8).prop_map(|(key, mac)| Act::From { key, mac }),
            1 => (0..2 * AGE_MS).prop_map(Act::Pass),
        ]
    }

    fn mac(number: u8) -> Mac {
        Mac([2, 0, 0, 0, 0, number])
    }

    /// Where each address was seen last, in a list that is looked through for each question.
    #[derive(Default)]
    struct Plain {
        users: HashMap<Key, (Option<u32>, bool)>,
        own: HashMap<Key, u8>,
        /// Address, port, when, and whether it came with it.
        seen: Vec<(u8, Key, u64, bool)>,
    }

    impl Plain {
        fn holder(&self, mac: u8, now: u64) -> Option<(Key, bool)> {
            let (_, key, at, own) = self.seen.iter().rev().find(|seen| seen.0 == mac)?;
            (*own || now - at <= AGE_MS).then_some((*key, *own))
        }

        /// (What was behind another port before does not come back when this one leaves.)
        fn put(&mut self, mac: u8, key: Key, now: u64, own: bool) {
            self.seen.retain(|seen| seen.0 != mac);
            self.seen.push((mac, key, now, own));
        }

        fn may(&self, policy: Policy, holder: Key, user: Option<u32>) -> bool {
            let (theirs, _) = self.users[&holder];
            policy == Policy::Moving && theirs == user && theirs.is_some()
        }

        /// What each port came with stays its own, and its user's.
        fn is_free(&self, policy: Policy, mac: u8, by: Key, user: Option<u32>) -> bool {
            let mut owners = self.own.iter().filter(|(key, own)| **key != by && **own == mac);
            owners.all(|(key, _)| self.may(policy, *key, user))
        }
    }

    fn play(policy: Policy, acts: &[Act]) {
        let (mut table, mut plain, mut now) = (Table::new(policy), Plain::default(), 0);
        for act in acts {
            match *act {
                Act::Join { key, user, mac: number, is_far } => {
                    if plain.users.contains_key(&key) {
                        continue;
                    }
                    let holder = plain.holder(number, now);
                    let joins = plain.is_free(policy, number, key, user)
                        && holder
                            .is_none_or(|(holder, own)| !own && plain.may(policy, holder, user));
                    assert_eq!(table.join(key, user, mac(number), is_far, now), joins, "{act:?}");
                    if joins {
                        plain.users.insert(key, (user, is_far));
                        plain.own.insert(key, number);
                        plain.put(number, key, now, true);
                    }
                }
                Act::Leave(key) => {
                    table.leave(key);
                    plain.users.remove(&key);
                    plain.own.remove(&key);
                    plain.seen.retain(|seen| seen.1 != key);
                }
                Act::From { key, mac: number } => {
                    let expected = match (plain.users.get(&key), plain.holder(number, now)) {
                        (None, _) => Source::Refused,
                        (_, Some(holder)) if holder.0 == key => Source::Known,
                        (Some((user, _)), Some(holder)) if !plain.may(policy, holder.0, *user) => {
                            Source::Refused
                        }
                        (Some((user, _)), _) if !plain.is_free(policy, number, key, *user) => {
                            Source::Refused
                        }
                        (Some((_, false)), None) if policy == Policy::Static => Source::Refused,
                        _ => Source::Learned,
                    };
                    assert_eq!(table.source(mac(number), key, now), expected, "{act:?}");
                    let holder = plain.holder(number, now);
                    let own = expected == Source::Known && holder.is_some_and(|holder| holder.1);
                    if expected != Source::Refused {
                        plain.put(number, key, now, own);
                    }
                }
                Act::Pass(ms) => now += ms,
            }
            for number in 0..6 {
                let held = plain.holder(number, now).map(|holder| holder.0);
                assert_eq!(table.find(mac(number), now), held, "{number} after {act:?}");
            }
            for (key, port) in &table.ports {
                let count = table.entries.values().filter(|entry| entry.port == *key).count();
                assert_eq!(port.addresses, count);
            }
        }
    }

    proptest! {
        #[test]
        fn a_table_is_as_a_plain_list(acts in prop::collection::vec(act(), 0..200), which in 0..3usize) {
            play([Policy::Moving, Policy::Locked, Policy::Static][which], &acts);
        }
    }

    #[test]
    fn who_uses_all_addresses_fills_its_own_share_only() {
        for (policy, expected) in [
            (Policy::Moving, Source::Unlearned),
            (Policy::Locked, Source::Refused),
            (Policy::Static, Source::Refused),
        ] {
            let mut table = Table::new(policy);
            let joins = |table: &mut Table, key| {
                table.join(u64::from(key), Some(0), mac(key), policy == Policy::Static, 0)
            };
            assert!(joins(&mut table, 1) && joins(&mut table, 2));
            let many = |number: usize| Mac([6, 0, 0, 0, (number >> 8) as u8, number as u8]);
            (1..OF_ONE_PORT)
                .for_each(|number| assert_eq!(table.source(many(number), 1, 0), Source::Learned));
            assert_eq!(table.source(many(OF_ONE_PORT), 1, 0), expected);
            assert_eq!(table.source(many(OF_ONE_PORT), 1, AGE_MS), expected);
            // (Those that are forgotten are in nobody's way.)
            let later = AGE_MS + SWEEP_MS;
            for number in 0..2 * OF_ONE_PORT {
                let learned = number + 1 < OF_ONE_PORT;
                let expected = if learned { Source::Learned } else { expected };
                assert_eq!(table.source(many(OF_ONE_PORT + number), 1, later), expected);
            }
            assert_eq!(table.source(mac(3), 2, 0), Source::Learned);
        }
    }

    #[test]
    fn a_storm_is_bounded_and_ends() {
        let mut bucket = Bucket::new(100, 0);
        assert_eq!((0..1000).filter(|_| bucket.takes(0)).count(), 100);
        assert_eq!((0..1000).filter(|ms| bucket.takes(*ms)).count(), 99);
        assert_eq!((0..1000).filter(|_| bucket.takes(60_000)).count(), 100);
        assert!((0..100_000).all(|_| Bucket::new(0, 0).takes(0)));
    }
}
