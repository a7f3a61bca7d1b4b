//! Reflective memory of several hosts: in each host a process of the service's is its keeper (`ringlet_reflect::keeper`), and speaks to those of
//! other hosts by rails of its own.
//!
//! ```text
//!   share.rs     the process as the service knows it
//!   process.rs   the process
//!   network.rs   what carries frames between keepers: rails, and one transport to each of them
//!   frames.rs    frames of keepers in those of a transport
//!   kept.rs      what a keeper has to know in its next run
//! ```
//!
//! The processes agree upon transports by what they pass through their services' sessions. It says of which run of which process it is, and for
//! which: so a session outlives a process, and what was said to the one before, or of the transport before, is nobody's.

mod frames;
mod kept;
mod network;
mod process;
pub(crate) mod share;
#[cfg(test)]
mod tests;

pub use process::reflect;

use std::path::PathBuf;

use anyhow::ensure;
use ringlet_fabric::Control;
use serde::{Deserialize, Serialize};

use crate::cluster::identity;
use crate::fabric::RailSettings;

/// `[cluster.reflect]` of node.toml. Founders, limits and times are the same in all nodes.
#[derive(Deserialize, Debug, Clone)]
#[serde(deny_unknown_fields, default)]
pub struct Settings {
    /// Nodes of which more than half begin a cluster together (the first one counts more where they are even); all nodes, if none are named.
    pub founders: Vec<String>,
    /// Megabytes of all regions, in the whole cluster; and of those that are received on this host.
    pub all_mb: u64,
    pub received_mb: u64,
    /// So often a node says that it is there; and one of which nothing was heard for so long is dead.
    pub beat_ms: u64,
    pub silent_ms: u64,
    /// Where programs find it; beside the service's socket, if it is not said.
    pub socket: Option<PathBuf>,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            founders: Vec::new(),
            all_mb: 1024,
            received_mb: 1024,
            beat_ms: 250,
            silent_ms: 3000,
            socket: None,
        }
    }
}

impl Settings {
    /// `nodes`: of the list, with this one.
    pub fn check<'a>(
        &mut self,
        nodes: impl Iterator<Item = &'a str> + Clone,
        is_open: bool,
    ) -> anyhow::Result<()> {
        if self.founders.is_empty() {
            ensure!(!is_open, "[cluster.reflect] with `join`: founders have to be named");
            self.founders = nodes.clone().map(str::to_owned).collect();
            // (The first one decides where half of them are there: it has to be the same one in all nodes.)
            self.founders.sort();
        }
        for (at, name) in self.founders.iter().enumerate() {
            identity::check_name(name)?;
            ensure!(!self.founders[..at].contains(name), "the founder {name} is named twice");
            // (Nobody would ever find more than half of them.)
            let is_node = is_open || nodes.clone().any(|node| node == name);
            ensure!(is_node, "the founder {name} is none of the nodes");
        }
        ensure!(
            (1..=1 << 30).contains(&self.all_mb) && (1..=1 << 30).contains(&self.received_mb),
            "a limit is out of range"
        );
        ensure!(
            (10..=60_000).contains(&self.beat_ms)
                && (100..=600_000).contains(&self.silent_ms)
                && self.silent_ms >= 4 * self.beat_ms,
            "beat_ms is out of range, or silent_ms (four beats at least)"
        );
        Ok(())
    }
}

/// What the process is told first.
#[derive(Serialize, Deserialize)]
struct Orders {
    node: String,
    rails: Vec<RailSettings>,
    directory: PathBuf,
    socket: PathBuf,
    founders: Vec<String>,
    all_mb: u64,
    received_mb: u64,
    beat_ms: u64,
    silent_ms: u64,
}

/// A transport of a process's, or its next one: later ones are greater.
#[derive(Serialize, Deserialize, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
struct Attempt {
    /// The process's run.
    incarnation: u64,
    number: u64,
}

/// What two processes pass to each other.
#[derive(Serialize, Deserialize)]
struct Passed {
    from: Attempt,
    /// What is for another one is nobody's.
    to: Attempt,
    what: What,
}

#[derive(Serialize, Deserialize)]
enum What {
    /// From now on it is this attempt. (To whomever.)
    Hello,
    Control(Control),
}
