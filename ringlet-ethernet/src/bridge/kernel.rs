//! The kernel's bridge, in a network namespace of our own, and what each device on it may send.
//!
//! The bridge learns nothing: each device has the one address with which it came, which is entered for it, so that no frame for it goes anywhere else.
//! What is for nobody here goes to the uplink alone. Rules at each device's end see to its address, and to how much it sends to all; they count too.
//!
//! KERNEL: who has CAP_NET_ADMIN where a device is may make devices here as well, by the number that the kernel has there for the namespace of its other
//! end (IFLA_TARGET_NETNSID). So rules of the bridge's own pass nothing from or to what we have not put on it, nor from or to the bridge itself.
//! A device that is made on one of ours (a VLAN device) goes past those. So what they pass is marked, and nothing else leaves any of ours.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::io::Write;
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd, OwnedFd};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use netlink_packet_core::{
    NLM_F_ACK, NLM_F_CREATE, NLM_F_EXCL, NLM_F_REPLACE, NLM_F_REQUEST, NetlinkMessage,
    NetlinkPayload,
};
use netlink_packet_route::AddressFamily;
use netlink_packet_route::RouteNetlinkMessage::{self, DelLink, NewLink, NewNeighbour};
use netlink_packet_route::link::{
    InfoBridge, InfoBridgePort, InfoData, InfoKind, InfoPortData, InfoPortKind, InfoVeth,
    LinkAttribute, LinkFlags, LinkInfo, LinkMessage, Stats64,
};
use netlink_packet_route::neighbour::{
    NeighbourAttribute, NeighbourFlags, NeighbourMessage, NeighbourState,
};
use netlink_sys::Socket;
use ringlet_linux::{apart, meet, sys};
use ringlet_messages::guarded::Guarded;
use serde::Deserialize;

use crate::frame::{ETHERNET_BYTES, Mac};
use crate::links::{Identity, Links, message, named, socket};
use crate::wire::Device;

/// The bridge, and the TAP device that is its port of the network.
const BRIDGE: &str = "bridge";
pub const UPLINK: &str = "uplink";
/// Of rules: what the bridge passes.
const TABLE: &str = "passed";
/// Longer packets than any device's: a tag, or two, is on top of them.
const MTU: u32 = 65_535;
/// Frames for the groups of link-local protocols pass as others do, but for pauses, which no bridge may pass.
const GROUPS: u16 = 0xfffd;
/// RTNLGRP_LINK.
const LINKS: u32 = 1;
/// Of what the kernel tells.
const TOLD_AT_ONCE: u32 = 1024;
/// What a device may send to all at once is what it may send in this part of a second.
const BURSTS_A_SECOND: u64 = 10;
const BURST_LEAST: u64 = 8;

/// What was dropped of one device's.
#[derive(Clone, Copy, Default)]
pub struct Drops {
    pub source: u64,
    pub storm: u64,
    /// Of both, as the device has counted them.
    pub bytes: u64,
}

pub struct Kernel {
    links: Links,
    /// Ours.
    namespace: OwnedFd,
    bridge: u32,
    storm: u64,
    /// `None`: this kernel, or this `nft`, has no rules for what leaves a device (5.16).
    passed: Option<Passed>,
}

/// What the bridge's rules write to a frame that they pass, and without which nothing leaves a device. KERNEL: a device that somebody has made on one of
/// ours may keep what he has written there. It is too long to be found by trying. (The lowest bits choose a queue.)
#[derive(Clone, Copy)]
struct Passed {
    mark: u32,
    priority: u32,
}

impl Passed {
    fn random() -> Result<Passed> {
        let mut bytes = [0; 8];
        ensure!(sys::random(&mut bytes), "the kernel has no random bytes yet");
        let [mark, priority] =
            [0, 4].map(|at| u32::from_ne_bytes([0, 1, 2, 3].map(|n| bytes[at + n])));
        Ok(Passed { mark, priority: priority << 4 })
    }

    /// A device's chain.
    fn chain(self, device: &str) -> String {
        let Passed { mark, priority } = self;
        format!(
            "chain passed {{
                type filter hook egress device {device} priority 0; policy drop;
                meta mark {mark:#x} meta priority {priority:#x} accept
            }}"
        )
    }
}

impl Kernel {
    /// This thread, and those that it begins, are in a new network namespace, with a bridge, from now on. Of each device so many frames a second to all
    /// are taken; 0: any number.
    pub fn enter(storm: u64) -> Result<Kernel> {
        // SAFETY: it changes what this thread's system calls mean, and no memory.
        #[allow(unsafe_code)]
        let done = unsafe { libc::unshare(libc::CLONE_NEWNET) };
        ensure!(
            done == 0,
            "a network namespace can't be made without CAP_SYS_ADMIN ({}): run as root",
            std::io::Error::last_os_error()
        );
        // The bridge has no addresses, speaks to nobody, and no rules for IP look at what it passes. (What this kernel does not have needs no setting.)
        let _ = fs::write("/proc/sys/net/ipv6/conf/default/disable_ipv6", "1");
        for of in ["iptables", "ip6tables", "arptables"] {
            let _ = fs::write(format!("/proc/sys/net/bridge/bridge-nf-call-{of}"), "0");
        }
        let namespace = fs::File::open("/proc/thread-self/ns/net")?.into();
        let mut kernel =
            Kernel { links: Links::open()?, namespace, bridge: 0, storm, passed: None };
        let mut bridge = named(BRIDGE);
        bridge.header.flags = LinkFlags::Up;
        bridge.header.change_mask = LinkFlags::Up;
        // (Who joins a group says so to us no more than to any port.)
        let data = InfoData::Bridge(vec![InfoBridge::MulticastSnooping(false)]);
        let info = vec![LinkInfo::Kind(InfoKind::Bridge), LinkInfo::Data(data)];
        bridge.attributes.push(LinkAttribute::LinkInfo(info));
        kernel
            .links
            .ask(NewLink(bridge), NLM_F_CREATE | NLM_F_EXCL)
            .context("this kernel has no bridge (`modprobe bridge`)")?;
        kernel.bridge = kernel.links.look(BRIDGE)?.is.index;
        let passed = Passed::random()?;
        let chain = passed.chain("lo");
        let probe = format!("table netdev probe {{\n{chain}\n}}\ndelete table netdev probe");
        kernel.passed = nft(&probe).ok().map(|()| passed);
        let accept = kernel.accept();
        nft(&format!(
            "table bridge {TABLE} {{
                set ports {{ type iface_index; }}
                set senders {{ type iface_index . ether_addr; }}
                chain forward {{
                    type filter hook forward priority 0; policy drop;
                    oif @ports iif . ether saddr @senders {accept}
                }}
                chain input {{ type filter hook input priority 0; policy drop; }}
                chain output {{ type filter hook output priority 0; policy drop; }}
            }}"
        ))
        .context("the command `nft` (package nftables) says what a device may send")?;
        Ok(kernel)
    }

    /// The rules' word for what passes.
    fn accept(&self) -> String {
        let marks = |Passed { mark, priority }| {
            format!("meta mark set {mark:#x} meta priority set {priority:#x} accept")
        };
        self.passed.map_or("accept".into(), marks)
    }

    /// What is sent by this socket passes as what the rules pass.
    pub fn admit_ours(&self, socket: &OwnedFd) -> Result<()> {
        if let Some(Passed { mark, priority }) = self.passed {
            for (option, value) in [(libc::SO_MARK, mark), (libc::SO_PRIORITY, priority)] {
                // SAFETY: a number, and its size.
                #[allow(unsafe_code)]
                let done = unsafe {
                    libc::setsockopt(
                        socket.as_raw_fd(),
                        libc::SOL_SOCKET,
                        option,
                        (&raw const value).cast(),
                        size_of::<u32>() as u32,
                    )
                };
                ensure!(done == 0, "setsockopt: {}", std::io::Error::last_os_error());
            }
        }
        Ok(())
    }

    /// The TAP device of this name, made by this process, is the way to whoever is not on the bridge.
    pub fn uplink(&self) -> Result<u32> {
        let index = self.links.look(UPLINK)?.is.index;
        let accept = self.accept();
        let chain = self.passed.map_or_else(String::new, |passed| passed.chain(UPLINK));
        nft(&format!(
            "add element bridge {TABLE} ports {{ {index} }}
            add rule bridge {TABLE} forward iif {index} oif @ports {accept}
            table netdev {UPLINK} {{
                {chain}
            }}"
        ))?;
        self.enslave(index, true)?;
        Ok(index)
    }

    /// Makes a device by somebody else's socket, where that was opened; its other end is here. KERNEL: of a request to which no address is given, who has
    /// opened the socket needs CAP_NET_ADMIN there and here, and so do we (__netlink_ns_capable, rtnl_get_peer_net). So nobody gets a device by us that he
    /// could not have made. (With an address only we would need it.)
    pub fn make(&self, theirs: &Socket, device: &Device, number: u64) -> Result<u32> {
        let name = end(number);
        let mut peer = named(&name);
        peer.attributes.push(LinkAttribute::Mtu(MTU));
        peer.attributes.push(LinkAttribute::NetNsFd(self.namespace.as_raw_fd()));
        let mut link = named(&device.name);
        link.header.flags = LinkFlags::Up;
        link.header.change_mask = LinkFlags::Up;
        let veth = InfoData::Veth(InfoVeth::Peer(peer));
        link.attributes.extend([
            LinkAttribute::Mtu(device.mtu.into()),
            LinkAttribute::Address(device.mac.0.to_vec()),
            LinkAttribute::LinkInfo(vec![LinkInfo::Kind(InfoKind::Veth), LinkInfo::Data(veth)]),
        ]);
        let flags = NLM_F_REQUEST | NLM_F_ACK | NLM_F_CREATE | NLM_F_EXCL;
        // (It may be full, and its owner may have what is answered.)
        theirs.send(&message(NewLink(link), flags, 0), libc::MSG_DONTWAIT)?;
        Ok(self.links.look(&name).context("the kernel has made no such device")?.is.index)
    }

    /// The device is on the bridge, and sends what it may; it has no carrier yet.
    pub fn join(&self, index: u32, mac: Mac, number: u64) -> Result<Identity> {
        let name = end(number);
        let storm = match self.storm {
            0 => String::new(),
            rate => {
                let burst = (rate / BURSTS_A_SECOND).max(BURST_LEAST);
                format!(
                    "ether daddr & 01:00:00:00:00:00 != 00:00:00:00:00:00 limit rate over {rate}/second burst {burst} packets counter name storm drop"
                )
            }
        };
        let passed = self.passed.map_or_else(String::new, |passed| passed.chain(&name));
        nft(&format!(
            "table netdev {name} {{
                counter source {{}}
                counter storm {{}}
                chain sent {{
                    type filter hook ingress device {name} priority 0
                    ether saddr != {mac} counter name source drop
                    {storm}
                }}
                {passed}
            }}
            add element bridge {TABLE} ports {{ {index} }}
            add element bridge {TABLE} senders {{ {index} . {mac} }}"
        ))?;
        self.enslave(index, false)?;
        let mut entry = NeighbourMessage::default();
        entry.header.family = AddressFamily::Bridge;
        entry.header.ifindex = index;
        entry.header.state = NeighbourState::Noarp;
        // (It does not move, whoever sends from it.)
        entry.header.flags = NeighbourFlags::Controller | NeighbourFlags::Sticky;
        entry.attributes.push(NeighbourAttribute::LinkLayerAddress(mac.0.to_vec()));
        self.links.ask(NewNeighbour(entry), NLM_F_CREATE | NLM_F_REPLACE)?;
        let is = self.links.look(&name)?.is;
        ensure!(is.index == index, "the device was taken by another one as it was made");
        Ok(is)
    }

    fn enslave(&self, index: u32, is_uplink: bool) -> Result<()> {
        let mut link = LinkMessage::default();
        link.header.index = index;
        link.attributes.push(LinkAttribute::Controller(self.bridge));
        self.links.ask(NewLink(link), 0)?;
        let mut link = LinkMessage::default();
        link.header.index = index;
        if is_uplink {
            link.header.flags = LinkFlags::Up;
            link.header.change_mask = LinkFlags::Up;
        }
        let port = vec![
            InfoBridgePort::Learning(false),
            InfoBridgePort::UnicastFlood(is_uplink),
            InfoBridgePort::GroupFwdMask(GROUPS),
        ];
        link.attributes.push(LinkAttribute::LinkInfo(vec![
            LinkInfo::PortKind(InfoPortKind::Bridge),
            LinkInfo::PortData(InfoPortData::BridgePort(port)),
        ]));
        self.links.ask(NewLink(link), 0).map(drop)
    }

    /// Its device has a carrier, or not.
    pub fn set_carrier(&self, index: u32, on: bool) -> Result<()> {
        let mut link = LinkMessage::default();
        link.header.index = index;
        link.header.flags = if on { LinkFlags::Up } else { LinkFlags::empty() };
        link.header.change_mask = LinkFlags::Up;
        self.links.ask(NewLink(link), 0).map(drop)
    }

    /// The device is no more, at either end.
    pub fn remove(&self, index: u32) {
        let mut link = LinkMessage::default();
        link.header.index = index;
        let _ = self.links.ask(DelLink(link), 0);
    }

    /// Nor what it may send.
    pub fn forget(&self, index: u32, mac: Mac, number: u64) {
        let _ = nft(&format!(
            "delete element bridge {TABLE} senders {{ {index} . {mac} }}
            delete element bridge {TABLE} ports {{ {index} }}
            delete table netdev {}",
            end(number)
        ));
    }

    /// The bridge, and with it the ways between all devices.
    pub fn end(&self) {
        let mut link = LinkMessage::default();
        link.header.index = self.bridge;
        let _ = self.links.ask(DelLink(link), 0);
    }

    /// What a device has sent is what its end here has received.
    pub fn stats(&self, number: u64) -> Result<Stats64> {
        Ok(self.links.look(&end(number))?.stats)
    }

    pub fn is_there(&self, is: &Identity) -> bool {
        self.links.is_there(is)
    }

    /// Becomes readable when a device has changed, or is no more.
    pub fn watch(&self) -> Result<Socket> {
        let mut watched = socket()?;
        // KERNEL: nothing is told to a socket without an address.
        watched.bind_auto()?;
        watched.add_membership(LINKS)?;
        watched.set_non_blocking(true)?;
        Ok(watched)
    }
}

/// A device's other end, which is here. (No number is used twice. 14 digits are 15 bytes with the letter, which is what a name takes.)
fn end(number: u64) -> String {
    format!("p{number}")
}

/// What is told by `watch`: which devices are no more, as far as it was not lost.
pub fn gone(watched: &Socket) -> HashSet<u32> {
    let mut gone = HashSet::new();
    for _ in 0..TOLD_AT_ONCE {
        let bytes = match watched.recv_from_full() {
            Ok((bytes, _)) => bytes,
            Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => continue,
            Err(_) => break,
        };
        let told = NetlinkMessage::<RouteNetlinkMessage>::deserialize(&bytes);
        // (Of a device that leaves a bridge the bridge says so.)
        if let Ok(NetlinkPayload::InnerMessage(DelLink(link))) = told.map(|told| told.payload)
            && link.header.interface_family == AddressFamily::Unspec
        {
            gone.insert(link.header.index);
        }
    }
    gone
}

/// A socket that somebody has sent, if the kernel can be asked for devices by it; and where that is.
pub fn admit(socket: OwnedFd, with: &Guarded) -> Result<(Socket, u64)> {
    let is = |option, value: i32| {
        ringlet_linux::tcp::int_option(socket.as_raw_fd(), libc::SOL_SOCKET, option) == Ok(value)
    };
    if !is(libc::SO_DOMAIN, libc::AF_NETLINK) || !is(libc::SO_PROTOCOL, libc::NETLINK_ROUTE) {
        // (Who closes it may have to wait.)
        let user = meet::credentials(with.as_raw_fd()).map_or(apart::SOMEBODY, |who| who.uid);
        apart::close_foreign(socket.into_raw_fd(), user);
        bail!("what came is no socket for devices");
    }
    /// KERNEL: for who has CAP_NET_ADMIN there.
    const SIOCGSKNS: libc::Ioctl = 0x894c;
    // SAFETY: it takes nothing, and returns a descriptor, which nobody else has.
    #[allow(unsafe_code)]
    let namespace = unsafe {
        let namespace = libc::ioctl(socket.as_raw_fd(), SIOCGSKNS);
        ensure!(namespace >= 0, "no right to make devices there");
        OwnedFd::from_raw_fd(namespace)
    };
    let namespace = rustix::fs::fstat(namespace)?.st_ino;
    // SAFETY: a socket, ours alone from here on.
    #[allow(unsafe_code)]
    let socket = unsafe { Socket::from_raw_fd(socket.into_raw_fd()) };
    Ok((socket, namespace))
}

/// Sends a frame out of a device, if it takes one.
pub fn send(socket: &OwnedFd, index: u32, frame: &[u8]) {
    // SAFETY: zeros are an address.
    #[allow(unsafe_code)]
    let mut to: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    to.sll_family = libc::AF_PACKET as u16;
    to.sll_ifindex = index as i32;
    // SAFETY: a frame and its length, an address and its size.
    #[allow(unsafe_code)]
    let _ = unsafe {
        libc::sendto(
            socket.as_raw_fd(),
            frame.as_ptr().cast(),
            frame.len(),
            libc::MSG_DONTWAIT,
            (&raw const to).cast(),
            size_of::<libc::sockaddr_ll>() as u32,
        )
    };
}

#[derive(Deserialize)]
struct Listed {
    nftables: Vec<HashMap<String, serde_json::Value>>,
}

#[derive(Deserialize)]
struct Counter {
    table: String,
    name: String,
    packets: u64,
    /// KERNEL: without the Ethernet header, behind which a frame is where these rules see it.
    bytes: u64,
}

/// What was dropped, by the devices' numbers.
pub fn drops() -> Result<HashMap<u64, Drops>> {
    let said = run_nft(&["-j", "list", "counters", "netdev"], "")?;
    let listed: Listed = serde_json::from_slice(&said)?;
    let mut drops = HashMap::<u64, Drops>::new();
    for value in listed.nftables.into_iter().filter_map(|mut each| each.remove("counter")) {
        let Counter { table, name, packets, bytes } = serde_json::from_value(value)?;
        let number = table.strip_prefix('p').and_then(|number| number.parse().ok());
        let of = drops.entry(number.context("a table of somebody else's")?).or_default();
        of.bytes += bytes + packets * ETHERNET_BYTES as u64;
        match &*name {
            "source" => of.source = packets,
            _ => of.storm = packets,
        }
    }
    Ok(drops)
}

fn nft(script: &str) -> Result<()> {
    run_nft(&["-f", "-"], script).map(drop)
}

fn run_nft(words: &[&str], script: &str) -> Result<Vec<u8>> {
    let mut child = Command::new("nft")
        .args(words)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .context("nft can't be run")?;
    child.stdin.take().context("a pipe")?.write_all(script.as_bytes())?;
    let done = child.wait_with_output()?;
    ensure!(done.status.success(), "nft: {}", String::from_utf8_lossy(&done.stderr).trim());
    Ok(done.stdout)
}
