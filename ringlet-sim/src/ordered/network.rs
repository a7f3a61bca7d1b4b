//! The network between nodes: who can reach whom, and what becomes of a frame on its way.

use rand::RngExt;
use ringlet_order::Life;

use super::{Cluster, Event, Planted, SILENT_US, Seen};
use crate::from_us;

/// The shortest and the longest way of a frame that is not late.
const WAY_US: std::ops::Range<f64> = 2.0..60.0;
/// The network tells of ways that begin or end within so long.
pub(super) const TOLD_US: f64 = 3000.0;

impl Cluster {
    /// The network tells one of the other, if both are there.
    pub(super) fn meet(&mut self, node: usize, other: usize, earliest_us: f64) {
        let told = from_us(earliest_us) + self.up_to(TOLD_US);
        let ways = [(node, other), (other, node)]
            .iter()
            .any(|way| self.cut.get(way).is_some_and(|cuts| *cuts > 0));
        if let (Some(run), Some(of)) = (&self.nodes[node].run, &self.nodes[other].run)
            && node != other
            && !ways
        {
            let event = Event::Up(node, run.life.incarnation, of.life.clone());
            self.at(self.now + told, event);
        }
    }

    pub(super) fn part(&mut self, node: usize, other: Life) {
        let told = self.up_to(TOLD_US);
        if let Some(run) = &self.nodes[node].run {
            let event = Event::Down(node, run.life.incarnation, other);
            self.at(self.now + told, event);
        }
    }

    pub(super) fn cut(&mut self, from: &[usize], to: &[usize], cut: bool) {
        let tells = self.rng.random::<bool>();
        for (from, to) in from.iter().flat_map(|from| to.iter().map(move |to| (*from, *to))) {
            let cuts = self.cut.entry((from, to)).or_default();
            *cuts = if cut { *cuts + 1 } else { cuts.saturating_sub(1) };
            let healed = *cuts == 0;
            for (one, other) in [(from, to), (to, from)] {
                if cut && tells {
                    if let Some(run) = &self.nodes[other].run {
                        let life = run.life.clone();
                        self.part(one, life);
                    }
                } else if healed && !cut {
                    self.meet(one, other, 0.0);
                }
            }
        }
    }

    pub(super) fn send(&mut self, node: usize, from: Life, to: Life, mut frame: Vec<u8>) {
        let trouble = self.ordered.trouble;
        let other = self.by_name[&to.node];
        self.stats.frames += 1;
        if self.cut.get(&(node, other)).is_some_and(|cuts| *cuts > 0) {
            self.stats.lost += 1;
            return;
        }
        match trouble.planted {
            // (Behind version, kind, the view's number and flags is what it has received.)
            Some(Planted::Boasts) if frame[1] == 0 && from.node == "n01" => {
                let received = u64::from_le_bytes(frame[13..21].try_into().expect("8 bytes"));
                let more = self.history.seen.iter().rev().find_map(|(_, seen)| match seen {
                    Seen::Delivered { sequence, .. } => Some(*sequence),
                    _ => None,
                });
                frame[13..21]
                    .copy_from_slice(&more.unwrap_or_default().max(received).to_le_bytes());
            }
            _ => {}
        }
        let calm = self.calm.is_some();
        if [3, 8, 10].contains(&frame[1]) && !calm && self.rng.random_bool(trouble.amid) {
            self.amid(node);
        }
        let copies = if !calm && self.rng.random_bool(trouble.doubled) { 2 } else { 1 };
        self.stats.doubled += copies - 1;
        for _ in 0..copies {
            if !calm && self.rng.random_bool(trouble.lost) {
                self.stats.lost += 1;
                continue;
            }
            let mut way = from_us(self.rng.random_range(WAY_US));
            if !calm && self.rng.random_bool(trouble.late) {
                self.stats.late += 1;
                way += self.up_to(trouble.late_us);
            }
            self.at(
                self.now + way,
                Event::Frame(other, to.incarnation, from.clone(), frame.clone()),
            );
        }
    }

    /// In the middle of a change of views.
    pub(super) fn amid(&mut self, node: usize) {
        let within = from_us(self.ordered.trouble.within_us);
        let soon = self.now + self.up_to(WAY_US.end * 2.0);
        if self.rng.random() {
            let steps = self.rng.random_range(0..8);
            if let Some(run) = &mut self.nodes[node].run {
                run.fuse = run.fuse.or(Some(steps));
            }
        } else if soon < within {
            let others: Vec<_> = (0..self.nodes.len()).filter(|other| *other != node).collect();
            let until = (soon + self.up_to(6.0 * SILENT_US)).min(within);
            for (from, to) in [(vec![node], others.clone()), (others, vec![node])] {
                self.at(soon, Event::Cut(from.clone(), to.clone()));
                self.at(until, Event::Heals(from, to));
            }
        }
    }
}
