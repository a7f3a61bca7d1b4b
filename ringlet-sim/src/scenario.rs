//! A whole run: a cluster, what it does, and what goes wrong.

use std::io::Write;

use rand::seq::IndexedRandom;
use rand::{RngExt, SeedableRng};
use rand_pcg::Pcg64Mcg;

use ringlet_core::layout::INLINE_BYTES;

use crate::cluster::{Cluster, Outcome};
use crate::faults::Faults;
use crate::ledger::Ledger;
use crate::profile::{Profile, RingSizes, SHIPPED};
use crate::rings::{Pattern, Rings, Traffic};

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
        let nodes = rng.random_range(2..=9);
        profile.faults = Faults::drawn(&mut rng, nodes);
        let patterns = [Pattern::PingPong, Pattern::Stream, Pattern::AllToAll];
        let traffic = Traffic {
            pattern: *patterns.choose(&mut rng).expect("there are some"),
            nodes,
            messages: rng.random_range(1..60),
            sleep: rng.random(),
            mtu_bytes: *[64, 1500, 16384].choose(&mut rng).expect("there are some"),
            copy: true,
            look_again: true,
            mailbox: rng.random(),
        };
        Scenario { profile, traffic, size: 1 << rng.random_range(0..14), mixed: true }
    }

    /// Runs it. The same seed, the same outcome; `trace` gets a line for everything that happens.
    pub fn run(&self, seed: u64, trace: Option<Box<dyn Write>>) -> Outcome {
        let nodes = self.traffic.nodes;
        // What a queue takes in one message.
        let most = if self.traffic.mailbox { self.profile.ring.data_bytes / 4 } else { usize::MAX };
        let ledger = Ledger::new(nodes, seed, self.size.min(most.max(INLINE_BYTES)), self.mixed);
        let traffic = self.traffic.clone();
        let make = move |node| Rings::new(traffic.clone(), node);
        let mut cluster = Cluster::new(self.profile.clone(), ledger, nodes, seed, make);
        if let Some(trace) = trace {
            cluster.trace_to(trace);
        }
        cluster.run()
    }
}
