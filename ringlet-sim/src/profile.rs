//! What an interconnect and its hosts cost, as a file says it.

use std::collections::BTreeMap;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::faults::Faults;
use crate::topology::Topology;

/// A parameter file. Times are microseconds, rates million bytes a second; a rate of 0 is no limit.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    pub about: String,
    pub topology: Topology,
    pub node: NodeCosts,
    pub adapter: Adapter,
    pub link: Link,
    #[serde(default)]
    pub ring: RingSizes,
    /// Protocol stacks to compare with.
    #[serde(default)]
    pub stacks: BTreeMap<String, Stack>,
    #[serde(default)]
    pub faults: Faults,
}

#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct NodeCosts {
    /// A call's own work, in the sender and in the receiver.
    pub call_us: f64,
    /// Looking at one local word.
    pub look_us: f64,
    /// Copying within the node's memory: the receiver's copy.
    pub copy_mb_s: f64,
    /// What arrives holds the receiver's bus at this rate; its copies wait meanwhile, and the other way round.
    pub bus_mb_s: f64,
    /// Entering the kernel, or coming back from a sleep in it.
    pub kernel_us: f64,
    /// From the adapter's interrupt to the kernel's wake-up of a thread.
    pub interrupt_us: f64,
}

#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Adapter {
    /// Stores of the processor to remote memory, the reading of what is sent included.
    pub store_mb_s: f64,
    /// What the adapter passes, either way.
    pub mb_s: f64,
    /// A store's way through both adapters, without the links.
    pub latency_us: f64,
    /// Bytes of a packet, and of the smaller kind if there is one.
    pub packet_bytes: usize,
    pub small_packet_bytes: usize,
    /// What a packet (with its answer) takes on a link beyond its bytes.
    pub header_bytes: usize,
    /// Packets under way for which no answer has come (stream buffers).
    pub outstanding: usize,
    /// Packets between two nodes arrive in order, even under errors. Otherwise a sender waits for the answers to its data
    /// before it publishes.
    pub ordered: bool,
    /// Stores of so many bytes or more are the adapter's own work (DMA), after `dma_setup_us`, at `dma_mb_s`; 0: never.
    #[serde(default)]
    pub dma_from_bytes: usize,
    #[serde(default)]
    pub dma_setup_us: f64,
    #[serde(default)]
    pub dma_mb_s: f64,
    /// Without an answer for so long a packet is sent again, so many times; then its target counts as unreachable.
    pub timeout_us: f64,
    pub retries: u32,
    /// What makes it reliable; each may be turned off, to see that it is missed.
    #[serde(default = "yes")]
    pub retry: bool,
    #[serde(default = "yes")]
    pub crc: bool,
    #[serde(default = "yes")]
    pub sequence: bool,
    #[serde(default = "yes")]
    pub barrier: bool,
}

fn yes() -> bool {
    true
}

#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Link {
    pub mb_s: f64,
    /// From node to node, and through a switch.
    pub hop_us: f64,
    pub switch_us: f64,
    /// What a switch passes, all its ports together.
    #[serde(default)]
    pub switch_mb_s: f64,
}

/// Each direction between two nodes. Powers of two.
#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct RingSizes {
    pub slots: usize,
    pub hot_slots: usize,
    pub data_bytes: usize,
    pub hot_data_bytes: usize,
}

impl Default for RingSizes {
    fn default() -> RingSizes {
        use ringlet_core::layout::*;
        RingSizes {
            slots: SLOT_COUNT,
            hot_slots: HOT_SLOT_COUNT,
            data_bytes: RING_MIN_BYTES,
            hot_data_bytes: HOT_DATA_BYTES as usize,
        }
    }
}

impl RingSizes {
    /// For many peers: a few inline records each.
    pub fn small() -> RingSizes {
        RingSizes { slots: 8, hot_slots: 4, data_bytes: 256, hot_data_bytes: 256 }
    }

    /// These, or small ones if each of so many nodes would need more than 64 MiB to hear all others.
    pub fn for_nodes(self, nodes: usize) -> RingSizes {
        if crate::memory::Block::memory_bytes(self, nodes) <= 64 << 20 {
            self
        } else {
            RingSizes::small()
        }
    }
}

/// A protocol stack in the kernel, for comparison; it runs none of ringlet's code.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Stack {
    pub mtu_bytes: usize,
    pub header_bytes: usize,
    pub link_mb_s: f64,
    /// For each packet: the sender's and the receiver's processor, and the way in between.
    pub send_us: f64,
    pub receive_us: f64,
    pub latency_us: f64,
    /// For each message, in the receiver: waking it up.
    pub wake_us: f64,
    /// Copies of each byte, either side, at this rate.
    pub copy_mb_s: f64,
    pub send_copies: f64,
    pub receive_copies: f64,
}

macro_rules! shipped {
    ($($name:literal),*) => {
        /// The profiles that come with the program: name and text.
        pub const SHIPPED: &[(&str, &str)] =
            &[$(($name, include_str!(concat!("../profiles/", $name, ".toml")))),*];
    };
}
shipped!("scilan", "smile", "memory-channel", "modern");

impl Profile {
    pub fn shipped(name: &str) -> Option<Profile> {
        let (_, text) = SHIPPED.iter().find(|(known, _)| *known == name)?;
        Some(text.parse().expect("a shipped profile is valid"))
    }
}

impl FromStr for Profile {
    type Err = String;

    fn from_str(text: &str) -> Result<Profile, String> {
        let profile: Profile = toml::from_str(text).map_err(|error| error.to_string())?;
        profile.check()?;
        Ok(profile)
    }
}

impl Profile {
    /// Can all nodes have one memory, whose writes they see in one order?
    pub fn reflects(&self) -> bool {
        matches!(self.topology, Topology::Hub(_)) && self.adapter.ordered
    }

    pub fn check(&self) -> Result<(), String> {
        let RingSizes { slots, hot_slots, data_bytes, hot_data_bytes } = self.ring;
        let sizes = [slots, hot_slots, data_bytes, hot_data_bytes];
        let adapter = &self.adapter;
        let probabilities = self.faults.probabilities();
        let rules = [
            (sizes.iter().all(|n| n.is_power_of_two()), "ring sizes are powers of two"),
            (
                hot_slots >= 4 && hot_slots * 2 <= slots && slots <= 1 << 16,
                "slots: 4 <= hot-slots <= slots/2",
            ),
            (
                (256..=1 << 26).contains(&data_bytes)
                    && (64..=data_bytes).contains(&hot_data_bytes),
                "data_bytes is 256 at least, and hot_data_bytes 64 to data_bytes",
            ),
            (
                (1..=adapter.packet_bytes).contains(&adapter.small_packet_bytes)
                    && adapter.packet_bytes <= 64,
                "packets have 1 to 64 bytes",
            ),
            (adapter.outstanding > 0, "outstanding is 1 at least"),
            (
                probabilities.iter().all(|p| (0.0..1.0).contains(p)),
                "probabilities are 0 to below 1",
            ),
        ];
        match rules.iter().find(|(holds, _)| !holds) {
            None => Ok(()),
            Some((_, rule)) => Err((*rule).into()),
        }
    }
}
