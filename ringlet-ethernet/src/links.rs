//! The kernel's network devices, asked for and changed by its own messages (rtnetlink).

use std::cell::Cell;

use anyhow::{Context, Result};
use netlink_packet_core::{
    NLM_F_ACK, NLM_F_REQUEST, NetlinkHeader, NetlinkMessage, NetlinkPayload,
};
use netlink_packet_route::RouteNetlinkMessage::{self, GetLink, NewLink};
use netlink_packet_route::link::{LinkAttribute, LinkMessage, Stats64};
use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_ROUTE};

/// Of the network namespace in which it was made.
pub struct Links {
    socket: Socket,
    asked: Cell<u32>,
}

/// By what a device is told from another one, which has its number by now. (KERNEL: who makes one may choose that.)
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Identity {
    pub index: u32,
    name: String,
    address: Vec<u8>,
    /// The bridge that it is on.
    controller: u32,
}

/// What the kernel says of a device.
#[derive(Debug)]
pub struct Link {
    pub is: Identity,
    pub stats: Stats64,
    /// Of a veth, its other end: its index, and the number here of the namespace where that is, if that is another one.
    other: Option<u32>,
    namespace: Option<i32>,
}

impl Links {
    pub fn open() -> Result<Links> {
        let socket = socket()?;
        // KERNEL: it answers before a request returns. So nothing is waited for.
        socket.set_non_blocking(true)?;
        Ok(Links { socket, asked: Cell::new(0) })
    }

    pub fn look(&self, name: &str) -> Result<Link> {
        self.find(named(name)).with_context(|| format!("there is no device {name}"))
    }

    /// Is it still the device that it was?
    pub fn is_there(&self, is: &Identity) -> bool {
        let mut link = LinkMessage::default();
        link.header.index = is.index;
        match self.find(link) {
            Ok(found) => found.is == *is,
            // (What the kernel could not say is no end.)
            Err(error) => errno(&error) != Some(libc::ENODEV),
        }
    }

    fn find(&self, asked: LinkMessage) -> Result<Link> {
        let answers = self.ask(GetLink(asked), 0)?;
        let link = answers.into_iter().find_map(|answer| match answer {
            NewLink(link) => Some(link),
            _ => None,
        });
        let link = link.context("the kernel says nothing of it")?;
        let mut is = Identity { index: link.header.index, ..Default::default() };
        let (mut stats, mut other, mut namespace) = (None, None, None);
        for attribute in link.attributes {
            match attribute {
                LinkAttribute::IfName(name) => is.name = name,
                LinkAttribute::Address(address) => is.address = address,
                LinkAttribute::Controller(index) => is.controller = index,
                LinkAttribute::Stats64(found) => stats = Some(found),
                LinkAttribute::Link(index) => other = Some(index),
                LinkAttribute::LinkNetNsId(number) => namespace = Some(number),
                _ => {}
            }
        }
        let stats = stats.context("no counts")?;
        Ok(Link { is, stats, other, namespace })
    }

    /// Is there no device of this name, or one whose other end's namespace has ended? The kernel removes that one later.
    pub fn is_going(&self, name: &str) -> bool {
        let Ok(link) = self.look(name) else { return true };
        let (Some(other), Some(namespace)) = (link.other, link.namespace) else { return false };
        // KERNEL: a namespace that has ended has no number any more, or none by which anything is found there (get_net_ns_by_id).
        let mut there = LinkMessage::default();
        there.header.index = other;
        there.attributes.push(LinkAttribute::IfNetnsId(namespace));
        let is_none = |error: anyhow::Error| errno(&error) == Some(libc::EINVAL);
        namespace < 0 || self.ask(GetLink(there), 0).err().is_some_and(is_none)
    }

    /// What the kernel answers.
    pub fn ask(&self, what: RouteNetlinkMessage, flags: u16) -> Result<Vec<RouteNetlinkMessage>> {
        let number = self.asked.get().wrapping_add(1);
        self.asked.set(number);
        let bytes = message(what, flags | NLM_F_REQUEST | NLM_F_ACK, number);
        self.socket.send_to(&bytes, &SocketAddr::new(0, 0), 0)?;
        let mut answers = Vec::new();
        loop {
            let (bytes, _) = self.socket.recv_from_full().context("the kernel has not answered")?;
            let mut rest = &bytes[..];
            while !rest.is_empty() {
                let answer = NetlinkMessage::<RouteNetlinkMessage>::deserialize(rest)?;
                rest = rest.get(answer.header.length.next_multiple_of(4) as usize..).unwrap_or(&[]);
                // (What is left of a request that failed is no answer to this one.)
                if answer.header.sequence_number != number {
                    continue;
                }
                match answer.payload {
                    NetlinkPayload::Error(error) if error.code.is_none() => return Ok(answers),
                    NetlinkPayload::Error(error) => return Err(error.to_io().into()),
                    NetlinkPayload::InnerMessage(inner) => answers.push(inner),
                    _ => {}
                }
            }
        }
    }
}

fn errno(error: &anyhow::Error) -> Option<i32> {
    error.downcast_ref::<std::io::Error>().and_then(std::io::Error::raw_os_error)
}

pub fn socket() -> Result<Socket> {
    Socket::new(NETLINK_ROUTE).context("the kernel can't be asked for devices")
}

pub fn named(name: &str) -> LinkMessage {
    let mut link = LinkMessage::default();
    link.attributes.push(LinkAttribute::IfName(name.to_owned()));
    link
}

pub fn message(what: RouteNetlinkMessage, flags: u16, number: u32) -> Vec<u8> {
    let mut header = NetlinkHeader::default();
    header.flags = flags;
    header.sequence_number = number;
    let mut message = NetlinkMessage::new(header, NetlinkPayload::from(what));
    message.finalize();
    let mut bytes = vec![0; message.buffer_len()];
    message.serialize(&mut bytes);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_of_another_request_is_no_answer() {
        let links = Links::open().unwrap();
        let lo = links.look("lo").unwrap().is;
        let left = message(GetLink(named("lo")), NLM_F_REQUEST | NLM_F_ACK, u32::MAX);
        links.socket.send_to(&left, &SocketAddr::new(0, 0), 0).unwrap();
        let none = links.look("nowhere").unwrap_err();
        assert_eq!(
            none.downcast_ref::<std::io::Error>().unwrap().raw_os_error(),
            Some(libc::ENODEV)
        );
        assert!(links.look("lo").unwrap().is == lo && links.is_there(&lo));
    }
}
