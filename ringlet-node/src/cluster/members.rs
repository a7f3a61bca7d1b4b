//! `[cluster]` of node.toml: which nodes there are, where each listens, and which addresses belong to it; or at least where some of them are found.
//!
//! In an *open* cluster, one with a list `join`, each node of its authority is a member, and members tell each other of others. What they tell is a hint
//! where to dial. Which addresses belong to a node that is known that way only, its own certificate says, and where its session comes from.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;

use anyhow::{Context, ensure};
use ipnet::IpNet;
use serde::Deserialize;

use super::identity;
use crate::fabric::RailSettings;
use crate::reflect;

/// More nodes than that are not tried to be known by each other.
pub const MOST: usize = 256;

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
    #[serde(default)]
    pub nodes: Vec<Member>,
    /// Where some of the nodes are found, which know the others; empty for the first node. Without it the cluster is of the nodes above.
    pub join: Option<Vec<Address>>,
    /// Nodes that are no members any more, whatever they hold.
    #[serde(default)]
    pub banned: Vec<String>,
    /// The hosts have reflective memory in common.
    pub reflect: Option<reflect::Settings>,
}

#[derive(Deserialize, Debug, Clone)]
#[serde(deny_unknown_fields)]
pub struct Member {
    pub name: String,
    pub address: Address,
    /// Of its containers, besides that address.
    #[serde(default)]
    pub subnets: Vec<IpNet>,
}

/// Where a node listens: `10.0.0.2:7471`; a name with a port, which has A or AAAA records (`b.example:7471`); or a service, whose SRV records have the port
/// (`_ringlet._tcp.b.example`).
#[derive(Deserialize, Debug, Clone, PartialEq, Eq)]
#[serde(try_from = "String")]
pub enum Address {
    Fixed(SocketAddr),
    Host { name: String, port: u16 },
    Service(String),
}

impl TryFrom<String> for Address {
    type Error = anyhow::Error;

    fn try_from(text: String) -> anyhow::Result<Address> {
        if let Ok(address) = text.parse() {
            return Ok(Address::Fixed(address));
        }
        let label = |label: &str| {
            (1..=63).contains(&label.len())
                && label.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(&byte))
        };
        let is_name = |name: &str| {
            let name = name.strip_suffix('.').unwrap_or(name);
            name.len() <= 253 && name.split('.').all(label)
        };
        // (An address that is written wrongly is no name.)
        let is_host = |name: &str| {
            let last = name.trim_end_matches('.').rsplit('.').next().unwrap_or_default();
            is_name(name) && !last.bytes().all(|byte| byte.is_ascii_digit())
        };
        match text.rsplit_once(':') {
            Some((name, port)) if is_host(name) => {
                let port = port.parse().ok().filter(|port| *port != 0);
                let port = port.with_context(|| format!("{text}: not a port"))?;
                Ok(Address::Host { name: name.to_owned(), port })
            }
            None if text.starts_with('_') && is_name(&text) => Ok(Address::Service(text)),
            _ => {
                anyhow::bail!("{text} is no address and port, name and port, or _service._tcp.name")
            }
        }
    }
}

impl Address {
    /// Without looking a name up.
    pub fn fixed(&self) -> Vec<SocketAddr> {
        match self {
            Address::Fixed(address) => vec![*address],
            _ => Vec::new(),
        }
    }
}

impl From<SocketAddr> for Address {
    fn from(address: SocketAddr) -> Address {
        Address::Fixed(address)
    }
}

impl fmt::Display for Address {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Address::Fixed(address) => address.fmt(to),
            Address::Host { name, port } => write!(to, "{name}:{port}"),
            Address::Service(name) => name.fmt(to),
        }
    }
}

impl Settings {
    /// What serde can't see.
    pub fn check(&mut self) -> anyhow::Result<()> {
        identity::check_name(&self.node)?;
        self.nodes.retain(|member| member.name != self.node);
        ensure!(self.nodes.len() <= MOST, "more than {MOST} nodes");
        let seeds = self.join.as_ref().map_or(0, Vec::len);
        ensure!(seeds <= MOST, "more than {MOST} addresses in `join`");
        for name in &self.banned {
            identity::check_name(name)?;
            let is_listed = self.nodes.iter().any(|member| member.name == *name);
            ensure!(!is_listed, "the node {name} is listed, and banned");
        }
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
        if let Some(reflect) = &mut self.reflect {
            let others = self.nodes.iter().map(|member| member.name.as_str());
            reflect.check(others.chain([self.node.as_str()]), self.join.is_some())?;
        }
        Ok(())
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
    fn what_is_wrong_is_said() {
        for wrong in [
            "[{name = 'B_', address = '10.0.0.2:1'}]",
            "[{name = 'b', address = '10.0.0.2'}]",
            "[{name = 'b', address = '10.0.0.2:1', subnets = ['10.0.0.0/33']}]",
            "[{name = 'b', address = '10.0.0.2:1'}, {name = 'b', address = '10.0.0.3:1'}]",
            "[{name = 'b', address = '10.0.0.2:1'}, {name = 'c', address = '10.0.0.2:1'}]",
            "[{name = 'b', addres = '10.0.0.2:1'}]",
            "[{name = 'b', address = '10.0.0.300:1'}]",
            "[{name = 'b', address = 'b.example'}]",
            "[{name = 'b', address = 'b.example:0'}]",
            "[{name = 'b', address = 'b..example:1'}]",
            "[{name = 'b', address = '_ringlet._tcp.b.example:1:2'}]",
            "[{name = 'b', address = 'b.example:1'}, {name = 'c', address = 'b.example:1'}]",
        ] {
            assert!(settings(&format!("{HEAD}nodes = {wrong}")).is_err(), "{wrong}");
        }
        for wrong in [
            "join = ['10.0.0.2']",
            "join = '10.0.0.2:7471'",
            "join = []\n[reflect]",
            "[reflect]\nfounders = ['b', 'b']",
            "[reflect]\nfounders = ['B_']",
            "nodes = [{name = 'b', address = '10.0.0.2:1'}]\n[reflect]\nfounders = ['b', 'c']",
            "[reflect]\nall_mb = 0",
            "[reflect]\nbeat_ms = 1000",
            "[reflect]\nfounder = ['b']",
            "banned = ['B_']",
            "banned = ['b']\nnodes = [{name = 'b', address = '10.0.0.2:1'}]",
        ] {
            assert!(settings(&format!("{HEAD}{wrong}")).is_err(), "{wrong}");
        }
        for right in [
            "",
            "nodes = []",
            "join = []\nbanned = ['b']",
            "join = []\n[reflect]\nfounders = ['b']",
            "nodes = [{name = 'b', address = '10.0.0.2:1'}]\n[reflect]\nfounders = ['b']",
            "[reflect]\nbeat_ms = 1000\nsilent_ms = 4000\nsocket = '/run/x'",
            "join = ['10.0.0.2:7471', '_x._tcp.y.z']",
        ] {
            assert!(settings(&format!("{HEAD}{right}")).is_ok(), "{right}");
        }
        let nodes = "[{name = 'a', address = '10.0.0.1:1'}, {name = 'b', address = '10.0.0.2:1'}]";
        let settings = settings(&format!("{HEAD}nodes = {nodes}")).unwrap();
        assert_eq!(settings.nodes.len(), 1, "this node is no other one");
    }

    #[test]
    fn without_names_all_nodes_are_founders_in_an_order_that_is_the_same_in_all() {
        let nodes =
            ["c", "a", "b"].map(|name| format!("{{name = '{name}', address = '{name}.x:1'}}"));
        for own in ["a", "b", "c"] {
            let text = format!(
                "node = '{own}'\nlisten = '0.0.0.0:1'\nnodes = [{}]\n[reflect]",
                nodes.join(", ")
            );
            let founders = settings(&text).unwrap().reflect.unwrap().founders;
            assert_eq!(founders, ["a", "b", "c"], "{own}");
        }
    }

    #[test]
    fn a_node_is_listed_by_its_address_its_name_or_its_service() {
        let nodes = ["[fd00::2]:7471", "b.example:7471", "_ringlet._tcp.c.example."];
        for (text, is_fixed) in nodes.into_iter().zip([true, false, false]) {
            let address = Address::try_from(text.to_owned()).unwrap();
            assert_eq!(address.to_string(), text);
            assert_eq!(matches!(address, Address::Fixed(_)), is_fixed);
        }
    }
}
