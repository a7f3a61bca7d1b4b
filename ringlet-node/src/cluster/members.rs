//! `[cluster]` of node.toml: which nodes there are, where each listens, and which addresses belong to it.

use std::fmt;
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

    /// The nodes' own addresses, as far as they are known without looking names up.
    pub fn addresses(&self) -> Vec<Vec<SocketAddr>> {
        let of = |member: &Member| match member.address {
            Address::Fixed(address) => vec![address],
            _ => Vec::new(),
        };
        self.nodes.iter().map(of).collect()
    }

    /// The node to which an address belongs: by its own, of which these are known, or else by the narrowest of the subnets. None of an address that is
    /// nobody's.
    pub fn node_of(&self, address: IpAddr, own: &[Vec<SocketAddr>]) -> Option<&Member> {
        // (An IPv4 connection of an IPv6 socket.)
        let address = address.to_canonical();
        let is = |own: &Vec<SocketAddr>| own.iter().any(|own| own.ip() == address);
        if let Some(place) = own.iter().position(is) {
            return self.nodes.get(place);
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
            let own = settings.addresses();
            settings.node_of(address.parse().unwrap(), &own).map(|member| member.name.as_str())
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
            "[{name = 'b', address = '10.0.0.300:1'}]",
            "[{name = 'b', address = 'b.example'}]",
            "[{name = 'b', address = 'b.example:0'}]",
            "[{name = 'b', address = 'b..example:1'}]",
            "[{name = 'b', address = '_ringlet._tcp.b.example:1:2'}]",
            "[{name = 'b', address = 'b.example:1'}, {name = 'c', address = 'b.example:1'}]",
        ] {
            assert!(settings(&format!("{HEAD}nodes = {wrong}")).is_err(), "{wrong}");
        }
        assert!(settings(&format!("{HEAD}nodes = []")).is_ok());
    }

    #[test]
    fn a_node_is_listed_by_its_address_its_name_or_its_service() {
        let nodes = ["[fd00::2]:7471", "b.example:7471", "_ringlet._tcp.c.example."];
        for (text, is_fixed) in nodes.into_iter().zip([true, false, false]) {
            let address = Address::try_from(text.to_owned()).unwrap();
            assert_eq!(address.to_string(), text);
            assert_eq!(matches!(address, Address::Fixed(_)), is_fixed);
        }
        // (What was found of a name is that node's.)
        let text = format!("{HEAD}nodes = [{{name = 'b', address = 'b.example:7471'}}]");
        let settings = settings(&text).unwrap();
        let (ip, found) =
            ("10.0.0.2".parse().unwrap(), vec![vec!["10.0.0.2:7471".parse().unwrap()]]);
        assert!(settings.node_of(ip, &settings.addresses()).is_none());
        assert_eq!(settings.node_of(ip, &found).map(|member| &member.name[..]), Some("b"));
    }
}
