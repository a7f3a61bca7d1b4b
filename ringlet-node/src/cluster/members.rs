//! `[cluster]` of node.toml: which nodes there are, where each listens, and which addresses belong to it.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

use anyhow::{Context, ensure};
use ipnet::IpNet;
use serde::Deserialize;

use super::identity;
use crate::fabric::RailSettings;

/// More nodes than that are not tried to be known by each other.
const MOST: usize = 256;

#[derive(Deserialize, Debug, Clone)]
#[serde(deny_unknown_fields)]
pub struct Settings {
    /// This node's name, as its certificate has it.
    pub node: String,
    /// Where other nodes find it.
    pub listen: SocketAddr,
    /// Its key and certificates.
    #[serde(default = "identity::directory")]
    pub directory: PathBuf,
    /// What connections to them are carried on, the same ones in the same order in all nodes; if none are named, those of this host that beat TCP.
    #[serde(default)]
    pub rails: Vec<RailSettings>,
    /// The other nodes. (If this one is among them it is passed over, so that all may have one list.)
    pub nodes: Vec<Member>,
}

#[derive(Deserialize, Debug, Clone)]
#[serde(deny_unknown_fields)]
pub struct Member {
    pub name: String,
    pub address: SocketAddr,
    /// Of its containers, besides that address.
    #[serde(default)]
    pub subnets: Vec<IpNet>,
}

impl Settings {
    /// What serde can't see.
    pub fn check(&mut self) -> anyhow::Result<()> {
        identity::check_name(&self.node)?;
        self.nodes.retain(|member| member.name != self.node);
        ensure!(self.nodes.len() <= MOST, "more than {MOST} nodes");
        for (at, member) in self.nodes.iter().enumerate() {
            identity::check_name(&member.name)?;
            let (before, shown) = (&self.nodes[..at], &member.name);
            ensure!(
                before.iter().all(|other| other.name != *shown),
                "the node {shown} is listed twice"
            );
            let twice = |other: &&Member| {
                other.address == member.address
                    || other.subnets.iter().any(|net| member.subnets.contains(net))
            };
            if let Some(other) = before.iter().find(twice) {
                Err(anyhow::anyhow!("{} and {shown} have the same address or subnet", other.name))
                    .context("an address belongs to one node")?;
            }
        }
        Ok(())
    }

    /// The node to which an address belongs: by its own, or else by the narrowest of the subnets. None of an address that is nobody's.
    pub fn node_of(&self, address: IpAddr) -> Option<&Member> {
        // (An IPv4 connection of an IPv6 socket.)
        let address = address.to_canonical();
        if let Some(member) = self.nodes.iter().find(|member| member.address.ip() == address) {
            return Some(member);
        }
        let nets = self
            .nodes
            .iter()
            .flat_map(|member| member.subnets.iter().map(move |net| (net, member)));
        nets.filter(|(net, _)| net.contains(&address))
            .max_by_key(|(net, _)| net.prefix_len())
            .map(|(_, member)| member)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(text: &str) -> anyhow::Result<Settings> {
        let mut settings: Settings = toml::from_str(text)?;
        settings.check()?;
        Ok(settings)
    }

    const HEAD: &str = "node = 'a'\nlisten = '0.0.0.0:7471'\n";

    #[test]
    fn an_address_belongs_to_the_narrowest_and_an_unknown_one_to_nobody() {
        let nodes = [
            "{name = 'a', address = '10.0.0.1:7471'}",
            "{name = 'b', address = '10.0.0.2:7471', subnets = ['10.1.0.0/16', 'fd00::/64']}",
            "{name = 'c', address = '10.0.0.3:7471', subnets = ['10.1.7.0/24']}",
        ];
        let text = format!("{HEAD}nodes = [{}]", nodes.join(", "));
        let settings = settings(&text).unwrap();
        assert_eq!(settings.nodes.len(), 2, "this node is no other one");
        let node = |address: &str| {
            settings.node_of(address.parse().unwrap()).map(|member| member.name.as_str())
        };
        for (address, owner) in [
            ("10.0.0.2", Some("b")),
            ("10.1.2.3", Some("b")),
            ("10.1.7.3", Some("c")),
            ("::ffff:10.1.7.3", Some("c")),
            ("fd00::9", Some("b")),
            ("10.0.0.1", None),
            ("192.0.2.1", None),
            ("fd01::9", None),
        ] {
            assert_eq!(node(address), owner, "{address}");
        }
    }

    #[test]
    fn what_is_wrong_is_said() {
        for wrong in [
            "[{name = 'B_', address = '10.0.0.2:1'}]",
            "[{name = 'b', address = '10.0.0.2'}]",
            "[{name = 'b', address = '10.0.0.2:1', subnets = ['10.0.0.0/33']}]",
            "[{name = 'b', address = '10.0.0.2:1'}, {name = 'b', address = '10.0.0.3:1'}]",
            "[{name = 'b', address = '10.0.0.2:1'}, {name = 'c', address = '10.0.0.2:1'}]",
            "[{name = 'b', addres = '10.0.0.2:1'}]",
        ] {
            assert!(settings(&format!("{HEAD}nodes = {wrong}")).is_err(), "{wrong}");
        }
        assert!(settings(&format!("{HEAD}nodes = []")).is_ok());
    }
}
