//! The other nodes, each at a place of its own: those of `[cluster]` first, then those that were learned of. A place that a listed node has is its
//! for good; one that was learned of loses it to another when there is no room and it is not there: first one that others have said, of those who have
//! said most.

use std::cmp::Reverse;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use ipnet::IpNet;

use super::Outbox;
use super::members::{Address, MOST, Member};
use super::peers::{Peer as Known, State};

/// Where a node that was learned of may be: what it has said itself, or where it was reached, and what others say.
const ADDRESSES: usize = 4;
/// A node that is not there keeps its place for so long against others of who has said as many: what a member says has no more dialled than that.
const KEPT: Duration = Duration::from_secs(5);

pub struct Node {
    pub name: Arc<str>,
    /// As `[cluster]` has it; of no other is it known.
    pub listed: Option<Address>,
    pub subnets: Vec<IpNet>,
    /// Where it listens, as far as that is known.
    pub addresses: Vec<SocketAddr>,
    /// By which its session came: a proof, which what others say of it is not.
    reached: Option<IpAddr>,
    /// The place of the node that says that it is one, until it has said so itself.
    said_by: Option<usize>,
    pub peer: Known,
    pub out: Outbox,
}

impl Node {
    fn new(name: Arc<str>, listed: Option<Address>, subnets: Vec<IpNet>) -> Node {
        let addresses = listed.as_ref().map(Address::fixed).unwrap_or_default();
        Node {
            name,
            listed,
            subnets,
            addresses,
            reached: None,
            said_by: None,
            peer: Known::new(),
            out: Outbox::default(),
        }
    }

    pub fn listed(member: &Member) -> Node {
        Node::new(member.name.as_str().into(), Some(member.address.clone()), member.subnets.clone())
    }

    /// What it has proved of itself at the beginning of a session: the address that it came by, and its certificate's subnets.
    pub fn proved(&mut self, from: IpAddr, subnets: Vec<IpNet>) {
        if self.listed.is_none() {
            (self.reached, self.subnets) = (Some(from.to_canonical()), subnets);
        }
    }

    /// It listens there, as it has said itself.
    pub fn says(&mut self, address: SocketAddr) {
        self.said_by = None;
        if self.listed.is_none() {
            self.addresses.retain(|known| *known != address);
            self.addresses.insert(0, address);
            self.addresses.truncate(ADDRESSES);
        }
    }

    /// It does as others say.
    fn is_said_to_be(&mut self, address: SocketAddr) {
        let is_wanted = self.listed.is_none() && self.peer.session().is_none();
        if is_wanted && !self.addresses.contains(&address) {
            self.addresses.truncate(ADDRESSES - 1);
            // (Behind what it said itself.)
            self.addresses.insert(1.min(self.addresses.len()), address);
        }
    }

    fn own(&self) -> impl Iterator<Item = IpAddr> {
        let said = self.listed.iter().flat_map(|_| &self.addresses).map(SocketAddr::ip);
        let proved = self.peer.session().and(self.reached);
        said.chain(proved)
    }

    fn nets(&self) -> &[IpNet] {
        match self.listed.is_some() || self.peer.session().is_some() {
            true => &self.subnets,
            false => &[],
        }
    }
}

/// The node to which an address belongs: by its own, as far as they are known, or else by the narrowest of the subnets. None of an address that is
/// nobody's.
pub fn node_of(nodes: &[Node], address: IpAddr) -> Option<&Node> {
    // (An IPv4 connection of an IPv6 socket.)
    let address = address.to_canonical();
    // (The list is the operator's own word.)
    let listed_first = || nodes.iter().filter(|node| node.listed.is_some());
    let learned = || nodes.iter().filter(|node| node.listed.is_none());
    let all = || listed_first().chain(learned());
    if let Some(node) = all().find(|node| node.own().any(|own| own == address)) {
        return Some(node);
    }
    let nets = all().flat_map(|node| node.nets().iter().map(move |net| (net, node)));
    let mut narrowest: Option<(&IpNet, &Node)> = None;
    for (net, node) in nets.filter(|(net, _)| net.contains(&address)) {
        if narrowest.is_none_or(|(known, _)| known.prefix_len() < net.prefix_len()) {
            narrowest = Some((net, node));
        }
    }
    narrowest.map(|(_, node)| node)
}

pub fn place_of(nodes: &[Node], name: &str) -> Option<usize> {
    nodes.iter().position(|node| *node.name == *name)
}

/// May who is at that address say that a node listens there? Not where we would dial ourselves, or what none but us and our neighbours should reach: of
/// such addresses only who is at one himself may speak. (Private ones are what clusters have.)
pub fn may_say(listens: SocketAddr, who: IpAddr) -> bool {
    let (listens, port, who) = (listens.ip().to_canonical(), listens.port(), who.to_canonical());
    let is_local = |ip: IpAddr| match ip {
        IpAddr::V4(ip) => ip.is_link_local(),
        IpAddr::V6(ip) => ip.is_unicast_link_local(),
    };
    let is_one = match listens {
        IpAddr::V4(ip) => !ip.is_broadcast() && ip.octets()[0] != 0,
        IpAddr::V6(ip) => !ip.is_unspecified(),
    };
    is_one
        && port != 0
        && !listens.is_multicast()
        && (!listens.is_loopback() || who.is_loopback())
        && (!is_local(listens) || is_local(who) || who.is_loopback())
}

/// What became of a name that was heard.
#[derive(PartialEq, Eq, Debug)]
pub enum Learned {
    New(usize),
    Known(usize),
    /// As many as can be are there.
    Full,
}

/// A node of this name is a member, as it has proved; or as the node at a place says, and where it listens.
pub fn learn(nodes: &mut Vec<Node>, name: &str, said: Option<(usize, SocketAddr)>) -> Learned {
    if let Some(place) = place_of(nodes, name) {
        if let Some((_, address)) = said {
            nodes[place].is_said_to_be(address);
        }
        return Learned::Known(place);
    }
    let mut node = Node::new(name.into(), None, Vec::new());
    if let Some((by, address)) = said {
        node.said_by = Some(by);
        node.addresses.push(address);
    }
    if nodes.len() < MOST {
        nodes.push(node);
        return Learned::New(nodes.len() - 1);
    }
    let gone = |node: &&mut Node| node.listed.is_none() && node.peer.state() != State::Joined;
    // (So who says much takes no places of others: of those who have proved that they are nodes, and of those whom others say.)
    let mut said = [0; MOST];
    nodes.iter().filter_map(|node| node.said_by).for_each(|by| said[by] += 1);
    let share = |node: &Node| node.said_by.map_or(0, |by| said[by]);
    let others = nodes.iter_mut().enumerate().filter(|(_, node)| gone(node));
    match others.max_by_key(|(_, other)| (share(other), Reverse(other.peer.since()))) {
        Some((place, old)) if share(old) > share(&node) || old.peer.since().elapsed() >= KEPT => {
            *old = node;
            Learned::New(place)
        }
        _ => Learned::Full,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listed(listed: &[(&str, &str, &[&str])]) -> Vec<Node> {
        let node = |(name, address, nets): &(&str, &str, &[&str])| {
            let subnets = nets.iter().map(|net| net.parse().unwrap()).collect();
            let address = Address::try_from((*address).to_owned()).unwrap();
            Node::listed(&Member { name: (*name).to_owned(), address, subnets })
        };
        listed.iter().map(node).collect()
    }

    fn owner<'a>(nodes: &'a [Node], address: &str) -> Option<&'a str> {
        node_of(nodes, address.parse().unwrap()).map(|node| &*node.name)
    }

    #[test]
    fn an_address_belongs_to_the_narrowest_and_an_unknown_one_to_nobody() {
        let mut nodes = listed(&[
            ("b", "10.0.0.2:7471", &["10.1.0.0/16", "fd00::/64"]),
            ("c", "10.0.0.3:7471", &["10.1.7.0/24"]),
            ("d", "d.example:7471", &[]),
        ]);
        for (address, expected) in [
            ("10.0.0.2", Some("b")),
            ("10.1.2.3", Some("b")),
            ("10.1.7.3", Some("c")),
            ("::ffff:10.1.7.3", Some("c")),
            ("fd00::9", Some("b")),
            ("10.0.0.1", None),
            ("192.0.2.1", None),
            ("fd01::9", None),
        ] {
            assert_eq!(owner(&nodes, address), expected, "{address}");
        }
        // (What was found of a name is that node's.)
        nodes[2].addresses = vec!["10.0.0.4:7471".parse().unwrap()];
        assert_eq!(owner(&nodes, "10.0.0.4"), Some("d"));
    }

    #[test]
    fn what_others_say_of_a_node_gives_it_no_address() {
        let mut nodes = listed(&[("b", "10.0.0.2:7471", &["10.1.0.0/16"])]);
        let said = Some((0, "10.0.0.9:7471".parse().unwrap()));
        assert_eq!(learn(&mut nodes, "z", said), Learned::New(1));
        assert_eq!(owner(&nodes, "10.0.0.9"), None, "nobody has reached it there");
        nodes[1].peer.join(1, [1; 16]);
        nodes[1].proved("::ffff:10.0.0.7".parse().unwrap(), vec!["10.1.2.0/24".parse().unwrap()]);
        assert_eq!(owner(&nodes, "10.0.0.9"), None);
        assert_eq!(owner(&nodes, "10.0.0.7"), Some("z"));
        assert_eq!(owner(&nodes, "10.1.2.3"), Some("z"), "its certificate says so");
        // It can't be another's, which the list has; and what it had is over with its session.
        nodes[1].proved("10.0.0.2".parse().unwrap(), Vec::new());
        assert_eq!(owner(&nodes, "10.0.0.2"), Some("b"));
        nodes[1].proved("10.0.0.7".parse().unwrap(), vec!["10.1.2.0/24".parse().unwrap()]);
        nodes[1].peer.end(State::Left, "");
        assert_eq!((owner(&nodes, "10.0.0.7"), owner(&nodes, "10.1.2.3")), (None, Some("b")));
        // Of a listed one nothing is learned.
        assert_eq!(learn(&mut nodes, "b", said), Learned::Known(0));
        nodes[0].proved("10.0.0.7".parse().unwrap(), vec!["10.2.0.0/16".parse().unwrap()]);
        assert_eq!((owner(&nodes, "10.0.0.7"), owner(&nodes, "10.2.0.1")), (None, None));
    }

    #[test]
    fn of_addresses_of_this_host_alone_none_but_this_host_speaks() {
        let may =
            |listens: &str, who: &str| may_say(listens.parse().unwrap(), who.parse().unwrap());
        for listens in ["10.0.0.9:7471", "192.0.2.9:1", "[fd00::9]:7471"] {
            assert!(may(listens, "10.0.0.2"), "{listens}");
        }
        for listens in ["127.0.0.1:22", "127.9.9.9:80", "[::1]:22", "[::ffff:127.0.0.1]:22"] {
            assert!(!may(listens, "10.0.0.2"), "{listens}");
            assert!(may(listens, "::ffff:127.0.0.3"), "{listens}");
        }
        for listens in ["169.254.169.254:80", "[fe80::1]:80"] {
            assert!(!may(listens, "10.0.0.2") && may(listens, "fe80::7"), "{listens}");
        }
        let never = ["0.0.0.0:80", "[::]:80", "224.0.0.1:80", "[ff02::1]:80", "10.0.0.9:0"];
        for listens in never.into_iter().chain(["255.255.255.255:80"]) {
            assert!(!may(listens, "127.0.0.1") && !may(listens, "10.0.0.2"), "{listens}");
        }
    }

    #[test]
    fn where_a_node_says_that_it_is_stays_whatever_others_say() {
        let (mut nodes, own) = (Vec::new(), "10.0.0.1:7471".parse().unwrap());
        assert_eq!(learn(&mut nodes, "z", None), Learned::New(0));
        nodes[0].says(own);
        for port in 1..100 {
            let said = SocketAddr::new("10.0.0.9".parse().unwrap(), port);
            assert_eq!(learn(&mut nodes, "z", Some((1, said))), Learned::Known(0));
            assert_eq!((nodes[0].addresses[0], nodes[0].addresses[1]), (own, said));
            assert!(nodes[0].addresses.len() <= ADDRESSES);
        }
        nodes[0].peer.join(1, [1; 16]);
        let before = nodes[0].addresses.clone();
        learn(&mut nodes, "z", Some((1, "10.0.0.8:1".parse().unwrap())));
        assert_eq!(nodes[0].addresses, before, "it is there");
    }

    fn is_said(nodes: &mut Vec<Node>, by: usize, name: &str) -> Learned {
        learn(nodes, name, Some((by, "10.0.0.9:7471".parse().unwrap())))
    }

    fn long_ago(nodes: &mut [Node]) {
        nodes.iter_mut().for_each(|node| node.peer.was_so(2 * KEPT));
    }

    #[test]
    fn who_has_long_been_gone_makes_room_and_who_is_there_does_not() {
        let mut nodes = listed(&[("b", "10.0.0.2:7471", &[])]);
        for number in 1..MOST {
            assert_eq!(learn(&mut nodes, &format!("n{number}"), None), Learned::New(number));
        }
        assert_eq!(learn(&mut nodes, "next", None), Learned::Full, "they have just been there");
        long_ago(&mut nodes);
        nodes[1].peer.join(1, [1; 16]);
        assert_eq!(learn(&mut nodes, "next", None), Learned::New(2));
        for (place, node) in nodes.iter_mut().enumerate().skip(2) {
            node.peer.join(1, [place as u8; 16]);
        }
        long_ago(&mut nodes);
        assert_eq!(learn(&mut nodes, "last", None), Learned::Full);
        assert_eq!(learn(&mut nodes, "next", None), Learned::Known(2));
    }

    #[test]
    fn who_says_that_there_are_many_takes_no_places_of_others() {
        let mut nodes = Vec::new();
        for name in ["liar", "honest", "gone"] {
            learn(&mut nodes, name, None);
        }
        long_ago(&mut nodes);
        nodes[0].peer.join(1, [1; 16]);
        nodes[1].peer.join(1, [2; 16]);
        let lies = |nodes: &mut Vec<Node>, from: usize| {
            let lie = |number| is_said(nodes, 0, &format!("n{number}"));
            (from..from + 2 * MOST).map(lie).filter(|new| matches!(new, Learned::New(_))).count()
        };
        assert_eq!(lies(&mut nodes, 0), MOST - 3);
        assert_eq!(lies(&mut nodes, 1000), 0, "each would be dialled");
        // Whom another one says has a place at once, and who says so itself; and both keep it.
        for (name, by) in [("true", Some(1)), ("itself", None)] {
            let new = match by {
                Some(by) => is_said(&mut nodes, by, name),
                None => learn(&mut nodes, name, None),
            };
            assert!(matches!(new, Learned::New(_)), "{name}");
        }
        long_ago(&mut nodes);
        assert_eq!(lies(&mut nodes, 2000), MOST - 5);
        for name in ["liar", "honest", "gone", "true", "itself"] {
            assert!(place_of(&nodes, name).is_some(), "{name} is forgotten");
        }
        // One of those proves that it is there.
        let place = place_of(&nodes, "true").unwrap();
        nodes[place].says("10.0.0.5:7471".parse().unwrap());
        assert_eq!(nodes[place].said_by, None);
    }
}
