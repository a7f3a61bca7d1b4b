//! How an end comes to an adapter (`ringlet adapter`), by a Unix socket with a name of the adapter's number.
//!
//! ```text
//!   accepting end              adapter               connecting end
//!                      <-- greeting
//!   link: its connection,
//!   its bell           -->
//!                      <-- linked: a segment, the adapter's bell, a ticket
//!   answer: the ticket ----------------------------> (`socket::meet`)
//!                              greeting -->
//!                                                    join: the ticket, its connection, its bell
//!                              linked: a segment, the adapter's bell -->
//! ```
//!
//! An adapter that the node service has for two ends that it carries (`interconnect::node`) gives each such a socket by way of the service, says by its
//! greeting how large a ring may be, and needs no ticket: the two sockets are a pair. As its process it says a number by chance, by which a program tells it
//! from others. A message over that socket is its bell. It rings an end by a socket
//! that reaches the bell of the end's home context (`ringlet_linux::bell`), and without one by bytes.
//!
//! That socket stays, one for each end. Its end tells the adapter that the end's last process is gone, and the end that the adapter is.

use crate::handshake::{self, Frame, Misfit, Protocol};
use ringlet_linux::bell::Address;

pub const GREETING: u16 = 1;
pub const LINK: u16 = 2;
pub const JOIN: u16 = 3;
pub const LINKED: u16 = 4;
/// Between the ends: see `socket::channel`. To an adapter of one of two hosts: the other end has said so, and nothing is to be delivered any more.
pub const ORPHAN: u16 = 5;

/// All messages: which it is, ring size (of a greeting, the most that there may be; 0 for any), the ticket, and the sender's doorbell (process,
/// context; 0 for none), and what opens the sender's bell. With a request come a descriptor of the connection and those of the doorbell (eventfd, page; or
/// for who carries the socket that rings it), with its answer that of the segment, and those.
#[derive(Default, Clone, Copy, PartialEq, Eq, Debug)]
pub struct Message {
    pub kind: u16,
    pub ring_bytes: u64,
    pub ticket: [u64; 2],
    pub process: u64,
    pub context: u32,
    pub bell: Address,
}

impl Message {
    pub fn frame(&self) -> Frame {
        Frame::new(Protocol::Adapter, self.kind)
            .u64(self.ring_bytes)
            .u64(self.ticket[0])
            .u64(self.ticket[1])
            .u64(self.process)
            .u32(self.context)
            .u64(self.bell.name)
            .u64(self.bell.token[0])
            .u64(self.bell.token[1])
    }

    pub fn read(packet: &[u8]) -> Result<Message, Misfit> {
        handshake::read(packet, Protocol::Adapter, |kind, fields| {
            Some(Message {
                kind,
                ring_bytes: fields.u64()?,
                ticket: [fields.u64()?, fields.u64()?],
                process: fields.u64()?,
                context: fields.u32()?,
                bell: Address { name: fields.u64()?, token: [fields.u64()?, fields.u64()?] },
            })
        })
    }
}

const PREFIX: &[u8] = b"ringlet1-adapter/";
pub const NAME_BYTES: usize = PREFIX.len() + 16;

/// The abstract name of an adapter.
pub fn name(number: u64) -> [u8; NAME_BYTES] {
    let digits =
        (0..16).map(|place| b"0123456789abcdef"[(number >> (60 - 4 * place) & 15) as usize]);
    let mut name = [0; NAME_BYTES];
    name.iter_mut().zip(PREFIX.iter().copied().chain(digits)).for_each(|(to, byte)| *to = byte);
    name
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_said_is_heard() {
        let bell = Address { name: 6, token: [7, 8] };
        let (kind, ring_bytes, ticket) = (JOIN, 1 << 20, [2, 3]);
        let message = Message { kind, ring_bytes, ticket, process: 4, context: 5, bell };
        assert_eq!(Message::read(message.frame().as_bytes()), Ok(message));
    }

    #[test]
    fn adapters_have_names_of_their_own() {
        assert_eq!(&name(0x1f), b"ringlet1-adapter/000000000000001f");
        assert_ne!(name(1), name(1 << 60));
    }
}
