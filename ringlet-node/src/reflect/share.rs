//! The process as the service knows it.

use std::path::PathBuf;

use super::Orders;
use crate::carrier::keeper::Kept;
use crate::cluster::members::Settings;
use crate::fabric::share::{Carries, Side};

pub struct Reflect {
    pub side: Side,
    socket: PathBuf,
    founders: Vec<String>,
}

impl Reflect {
    /// `socket`: where programs find it, unless the settings say otherwise.
    pub fn new(
        kept: Kept,
        cluster: &Settings,
        settings: &super::Settings,
        socket: PathBuf,
    ) -> Reflect {
        let socket = settings.socket.clone().unwrap_or(socket);
        let orders = Orders {
            node: cluster.node.clone(),
            rails: cluster.rails.clone(),
            directory: cluster.directory.clone(),
            socket: socket.clone(),
            founders: settings.founders.clone(),
            all_mb: settings.all_mb,
            received_mb: settings.received_mb,
            beat_ms: settings.beat_ms,
            silent_ms: settings.silent_ms,
        };
        let side = Side::new(kept, Carries::Reflection, &orders);
        Reflect { side, socket, founders: settings.founders.clone() }
    }

    pub fn status(&self) -> serde_json::Value {
        serde_json::json!({
            "pid": self.side.pid(), "lost": self.side.lost(), "nodes": self.side.nodes(), "socket": self.socket,
            "founders": self.founders,
        })
    }
}
