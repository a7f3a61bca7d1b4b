//! A whole run: a cluster, what it does, and what goes wrong.

use std::io::Write;

use rand::seq::IndexedRandom;
use rand::{RngExt, SeedableRng};
use rand_pcg::Pcg64Mcg;

use ringlet_core::layout::{INLINE_BYTES, MESSAGE_MAX_BYTES};

use crate::active::{self, Active};
use crate::cluster::{Cluster, Outcome, Program};
use crate::faults::Faults;
use crate::ledger::Ledger;
use crate::profile::{Profile, RingSizes, SHIPPED};
use crate::reflected::Reflected;
use crate::rings::{Carrier, Pattern, Rings, Traffic};

/// Of an Active Message.
const LONGEST_BYTES: usize = 64 << 10;
/// More nodes than so many have small connections.
const MANY: usize = 64;

#[derive(Clone, Debug)]
pub struct Scenario {
    pub profile: Profile,
    pub traffic: Traffic,
    /// Of each message; `mixed` are from one byte to this.
    pub size: usize,
    pub mixed: bool,
}

impl Scenario {
    /// Any cluster, any traffic and any faults, as the seed has it.
    pub fn drawn(seed: u64) -> Scenario {
        let mut rng = Pcg64Mcg::seed_from_u64(!seed);
        let (name, _) = SHIPPED.choose(&mut rng).expect("some are shipped");
        let mut profile = Profile::shipped(name).expect("it is");
        let topologies = ["ring", "switch:2", "switch:3", "torus", "hub", "hub:1"];
        let topology = topologies.choose(&mut rng).expect("there are some");
        profile.topology = topology.parse().expect("these are valid");
        if rng.random() {
            profile.ring = RingSizes::small();
        }
        if rng.random() {
            profile.adapter.dma_from_bytes = 256;
        }
        let nodes = rng.random_range(2..=9);
        let bits = rng.random_range(0..17);
        profile.faults = Faults::drawn(&mut rng, nodes);
        let patterns = [Pattern::PingPong, Pattern::Stream, Pattern::AllToAll];
        let pattern = *patterns.choose(&mut rng).expect("there are some");
        let carriers = [
            Carrier::Bytes,
            Carrier::Moving,
            Carrier::Messages,
            Carrier::Active { mailbox: false },
            Carrier::Active { mailbox: true },
            Carrier::Reflected,
            Carrier::Locked,
        ];
        let fits = |carrier: &&Carrier| match carrier {
            Carrier::Reflected => profile.reflects(),
            Carrier::Locked => pattern == Pattern::PingPong,
            _ => true,
        };
        let fitting: Vec<_> = carriers.iter().filter(fits).collect();
        let traffic = Traffic {
            pattern,
            carrier: **fitting.choose(&mut rng).expect("there are some"),
            nodes,
            messages: rng.random_range(if bits < 12 { 1..60 } else { 1..10 }),
            sleep: rng.random(),
            mtu_bytes: *[64, 1500, 16384].choose(&mut rng).expect("there are some"),
            ..Traffic::default()
        };
        Scenario { profile, traffic, size: 1 << bits, mixed: true }
    }

    /// Bytes that fit in one message; longer ones are cut to it.
    pub fn longest(&self) -> usize {
        let data_bytes = self.profile.ring.data_bytes;
        match self.traffic.carrier {
            Carrier::Active { .. } if self.traffic.nodes > MANY => 64,
            Carrier::Active { .. } => LONGEST_BYTES,
            Carrier::Messages => (data_bytes / 4).clamp(INLINE_BYTES, MESSAGE_MAX_BYTES),
            Carrier::Locked => data_bytes.clamp(INLINE_BYTES, MESSAGE_MAX_BYTES),
            Carrier::Reflected => size_of::<u64>(),
            Carrier::Bytes | Carrier::Moving => usize::MAX,
        }
    }

    /// Runs it. The same seed, the same outcome; `trace` gets a line for everything that happens.
    pub fn run(&self, seed: u64, trace: Option<Box<dyn Write>>) -> Outcome {
        let nodes = self.traffic.nodes;
        let traffic = self.traffic.clone();
        if traffic.carrier == Carrier::Reflected {
            let make = move |node| Reflected::new(&traffic, node);
            return self.run_with(RingSizes::small(), seed, make, trace);
        }
        if !traffic.is_active() {
            let make = move |node| Rings::new(traffic.clone(), node);
            return self.run_with(self.profile.ring, seed, make, trace);
        }
        // A connection's memory grows with the depth and with what is stored at once.
        let longest = self.size.min(self.longest());
        if nodes > MANY {
            let sizes = active::sizes(active::SHALLOW, longest);
            let make = move |node| Active::<{ active::SHALLOW }>::new(traffic.clone(), node);
            return self.run_with(sizes, seed, make, trace);
        }
        let sizes = active::sizes(active::DEEP, longest);
        let make = move |node| Active::<{ active::DEEP }>::new(traffic.clone(), node);
        self.run_with(sizes, seed, make, trace)
    }

    fn run_with<P: Program>(
        &self,
        sizes: RingSizes,
        seed: u64,
        make: impl Fn(usize) -> P + 'static,
        trace: Option<Box<dyn Write>>,
    ) -> Outcome {
        let nodes = self.traffic.nodes;
        let lanes = if self.traffic.is_active() { 2 } else { 1 };
        let size = self.size.min(self.longest());
        let ledger = Ledger::new(nodes, lanes, seed, size, self.mixed);
        let profile = Profile { ring: sizes, ..self.profile.clone() };
        let mut cluster = Cluster::new(profile, ledger, nodes, seed, make);
        if let Some(trace) = trace {
            cluster.trace_to(trace);
        }
        cluster.run()
    }
}
