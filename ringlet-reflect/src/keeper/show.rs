//! What a keeper shows of itself.

use std::collections::BTreeSet;

use ringlet_core::sync::Ordering;

use super::Keeper;
use super::cluster::Cluster as Clustered;
use super::transfer::{Filling, Standing};
use crate::protocol::{
    ANSWER_BYTES, Cluster, ClusterState, LockState, MemberState, RegionState, State, page,
};
use crate::registry::{LockEntry, Member, RegionEntry};

/// What one answer shows of each kind.
const SHOWN: usize = 400;

impl Keeper {
    pub(super) fn told(&self) -> Cluster {
        let word = |at: usize| self.page.1.word(at).load(Ordering::Relaxed);
        let (hosts, stopped) = match &self.cluster {
            None => (vec![self.name.clone()], None),
            Some(cluster) => {
                let hosts = self.registry.hosts.values().map(|(name, _)| name.clone());
                (hosts.collect(), cluster.stopped.clone())
            }
        };
        let (rails, active) = (word(page::RAILS), word(page::ACTIVE));
        Cluster { hosts, rails, active, stopped, event: word(page::EVENTS) }
    }

    fn cluster_state(&self, cluster: &Clustered) -> ClusterState {
        let members = cluster.view.iter().flat_map(|view| &view.members);
        let hosts: Vec<String> = members.map(|life| life.node.clone()).collect();
        let word = |rail: usize| self.page.1.word(rail).load(Ordering::Relaxed);
        let rails = self.page.1.word(page::RAILS).load(Ordering::Relaxed) as usize;
        let (submitted, settled) = cluster.counts();
        let filling = cluster.inbox.filling.values();
        let regions = self.registry.regions.values();
        ClusterState {
            view: cluster.view.as_ref().map_or(0, |view| view.number),
            hub: hosts.first().cloned().unwrap_or_default(),
            hosts,
            incarnation: cluster.me.incarnation,
            stopped: cluster.stopped.clone(),
            is_inside: matches!(cluster.standing, Standing::Inside),
            delivered: cluster.delivered,
            submitted,
            settled,
            filling: filling.len() as u32,
            filled_bytes: filling.clone().map(Filling::progress).sum(),
            filling_bytes: filling.map(Filling::bytes).sum(),
            needed: regions.clone().filter(|region| region.is_needed_of(cluster.host)).count()
                as u32,
            incomplete: regions.filter(|region| region.incomplete).count() as u32,
            hands_over: cluster.hands_over.is_some() && cluster.leaves.is_none(),
            unheard: cluster
                .barred
                .iter()
                .map(|(life, why)| (life.node.clone(), (*why).to_owned()))
                .take(SHOWN)
                .collect(),
            errors: (0..rails).map(word).collect(),
        }
    }

    /// (Who asks and has nothing is not counted.)
    pub(super) fn state(&self, asks: u32) -> State {
        let registry = &self.registry;
        let has = registry.has(asks);
        let (members, regions, sets) = (&registry.members, &registry.regions, &registry.sets);
        let host = |host: u32| registry.hosts.get(&host).map(|(name, _)| name.clone());
        let member = |(member, who): (&u32, &Member)| MemberState {
            host: host(who.host),
            member: *member,
            pid: who.pid,
            uid: who.uid,
        };
        let in_cluster = self.cluster.is_some();
        let names = |hosts: &BTreeSet<u32>| match in_cluster {
            true => hosts.iter().filter_map(|each| host(*each)).take(SHOWN).collect(),
            false => Vec::new(),
        };
        let filling = |id: &u32| {
            let inbox = self.cluster.as_ref().map(|cluster| &cluster.inbox);
            inbox.and_then(|inbox| inbox.filling.get(id)).map(Filling::progress)
        };
        let region = |(id, region): (&u32, &RegionEntry)| {
            let users = &region.entry.users;
            RegionState {
                id: *id,
                key: region.entry.key,
                bytes: region.bytes,
                mode: region.entry.mode,
                owner: region.entry.owner,
                coherent: region.coherent,
                users: users.keys().copied().take(SHOWN).collect(),
                transmit: users
                    .iter()
                    .filter(|(_, each)| each.transmits)
                    .map(|(member, _)| *member)
                    .take(SHOWN)
                    .collect(),
                receive: users
                    .iter()
                    .filter(|(_, each)| each.receives)
                    .map(|(member, _)| *member)
                    .take(SHOWN)
                    .collect(),
                watched: self.memories.get(id).map_or(0, |memory| memory.watched),
                holders: names(&region.holders),
                filling: names(&region.filling),
                filled_bytes: filling(id),
                incomplete: region.incomplete,
            }
        };
        let set = |(id, set): (&u32, &LockEntry)| {
            let holder = |lock: usize| match in_cluster {
                true => set.held.get(&(lock as u32)).map(|held| held.holder),
                false => self.words.get(id)?.lock(lock).holder(),
            };
            let is_waited = |lock: &u32| match in_cluster {
                true => set.held.get(lock).is_some_and(|held| !held.waiting.is_empty()),
                false => {
                    self.words.get(id).is_some_and(|words| words.lock(*lock as usize).is_waited())
                }
            };
            let held = (0..set.count).filter_map(|lock| Some((lock as u32, holder(lock)?)));
            let waited = (0..set.count as u32).filter(is_waited);
            LockState {
                id: *id,
                key: set.entry.key,
                count: set.count,
                mode: set.entry.mode,
                owner: set.entry.owner,
                users: set.entry.users.keys().copied().take(SHOWN).collect(),
                held: held.take(SHOWN).collect(),
                waited: waited.take(SHOWN).collect(),
            }
        };
        let mut state = State {
            host: self.name.clone(),
            allocated: regions.values().map(|region| region.bytes).sum(),
            allocated_most: registry.bounds.limits.all,
            received_most: registry.bounds.limits.received,
            members: members
                .iter()
                .filter(|(member, _)| has || **member != asks)
                .map(member)
                .take(SHOWN)
                .collect(),
            regions: regions.iter().map(region).take(SHOWN).collect(),
            sets: sets.iter().map(set).take(SHOWN).collect(),
            cluster: self.cluster.as_ref().map(|cluster| self.cluster_state(cluster)),
            is_cut: members.len().max(regions.len()).max(sets.len()) > SHOWN,
        };
        // (The lists of users may still make it too long.)
        while serde_json::to_vec(&state).is_ok_and(|text| text.len() > ANSWER_BYTES) {
            let half = |length: usize| length / 2;
            state.members.truncate(half(state.members.len()));
            state.regions.truncate(half(state.regions.len()));
            state.sets.truncate(half(state.sets.len()));
            state.is_cut = true;
        }
        state
    }
}
