//! How an end comes to the node service (`ringlet node`), which introduces it to a far end that it can't see: one in another network namespace of
//! this host.
//!
//! ```text
//!   either end                     node service                      the other end
//!   (comes)            -->
//!                      <-- greeting
//!   come: its connection -->
//!                                  notes the pair of sequence numbers with which it began, and
//!                                  lets go of it; waits until the mirrored one has come too
//!                                  asks its policy                 <-- come: its connection
//!                      <-- met: a channel                met: a channel -->
//!   what follows goes over that channel, as over a rendezvous (`socket::meet`); the service is out of it
//! ```
//!
//! Two that its policy does not let share memory may be *carried*: each is given a lifeline too, to a process of the service's that is their adapter
//! (`interconnect::introduction`), for this connection alone.
//!
//! Holding the connection is the proof of owning it. Nobody hands it over before the service has greeted, which shows that it is awake: while a
//! copy lies in its queue, a close does not reach the peer.

use crate::config::AbsolutePath;
use crate::handshake::{self, Frame, Misfit, Protocol};
use crate::plain::P64;
use ringlet_linux::meet;
use ringlet_linux::service::{self, Kind};
use ringlet_linux::sys::{self, Errno, Sys};

pub const GREETING: u16 = 1;
pub const COME: u16 = 2;
pub const MET: u16 = 3;
pub const APART: u16 = 4;
/// What `ringlet node status` asks; the answer is no frame but a text (JSON).
pub const STATUS: u16 = 5;
/// Of the native library (`Ask`): who calls a service of a node's, and who offers one. A call is answered by MET with a socket, or by APART; an offer by MET
/// without one, and then for each who calls by CALL, which says from which node, with a socket.
pub const CALL: u16 = 6;
pub const OFFER: u16 = 7;
/// Which node is this? Answered by the same, with its name.
pub const NAME: u16 = 8;

/// `Message::flags` of MET, and `Socket::introduced`: it was introduced; both ends are of one user of the host; the policy lets each ring the
/// other by its eventfd, with which it could also make it wait; they share no memory, and a second descriptor is the lifeline to who carries between them;
/// they are on two hosts, where each has a carrier of its own, and a third descriptor is the ends' channel (`socket::channel`), since the first ends with
/// the carriers.
pub const INTRODUCED: u32 = 1;
pub const SAME_USER: u32 = 2;
pub const TRUSTED: u32 = 4;
pub const CARRIED: u32 = 8;
pub const FAR: u32 = 16;

/// All messages: which it is; of COME, whether we accepted the connection; of MET, flags, and the service's number of the process at the other end; of
/// APART, the `Reason`.
#[derive(Default, Clone, Copy, PartialEq, Eq, Debug)]
pub struct Message {
    pub kind: u16,
    pub accepting: u32,
    pub flags: u32,
    pub stranger: u32,
    pub reason: u32,
}

impl Message {
    pub fn frame(&self) -> Frame {
        Frame::new(Protocol::Node, self.kind)
            .u32(self.accepting)
            .u32(self.flags)
            .u32(self.stranger)
            .u32(self.reason)
    }

    pub fn read(packet: &[u8]) -> Result<Message, Misfit> {
        handshake::read(packet, Protocol::Node, |kind, fields| {
            Some(Message {
                kind,
                accepting: fields.u32()?,
                flags: fields.u32()?,
                stranger: fields.u32()?,
                reason: fields.u32()?,
            })
        })
    }
}

pub const ASKED_BYTES: usize = 96;

/// The node of who calls from this host.
pub const HERE: &str = "localhost";

/// CALL, by NODE:SERVICE, OFFER, by SERVICE alone, and NAME, by HERE; or, from the service, CALL and NAME by NODE alone. The name, and zeros
/// behind it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ask {
    pub kind: u16,
    pub name: [u8; ASKED_BYTES],
}

impl Ask {
    /// `None` if the name is too long.
    pub fn new(kind: u16, name: &str) -> Option<Ask> {
        let mut asked = Ask { kind, name: [0; ASKED_BYTES] };
        asked.name.get_mut(..name.len())?.copy_from_slice(name.as_bytes());
        Some(asked)
    }

    pub fn frame(&self) -> Frame {
        Frame::new(Protocol::Node, self.kind).put(&self.name)
    }

    pub fn read(packet: &[u8]) -> Result<Ask, Misfit> {
        let asked = |kind, fields: &mut handshake::Fields| {
            matches!(kind, CALL | OFFER | NAME).then_some(Ask { kind, name: fields.array()? })
        };
        handshake::read(packet, Protocol::Node, asked)
    }

    /// `None` for what is no name.
    pub fn text(&self) -> Option<&str> {
        let len = self.name.iter().position(|byte| *byte == 0).unwrap_or(ASKED_BYTES);
        let (name, rest) = self.name.split_at(len);
        let plain = !name.is_empty() && rest.iter().all(|byte| *byte == 0);
        core::str::from_utf8(name).ok().filter(|_| plain)
    }
}

/// How long is remembered whether there is a service.
const REMEMBERED_NS: u64 = 5_000_000_000;

/// Until when what was found is believed; its lowest bit says that there was one.
static FOUND: P64 = P64::new(0);

/// Does anybody listen there, as far as we know? One system call, and the next one five seconds later at the earliest.
pub fn is_there(path: Option<&AbsolutePath>) -> bool {
    let Some(path) = path else { return false };
    let (found, now) = (FOUND.get(), sys::now_ns());
    if now < found {
        return found & 1 != 0;
    }
    remember(sys::exists(path.as_c_str()))
}

fn remember(there: bool) -> bool {
    FOUND.set((sys::now_ns() + REMEMBERED_NS) & !1 | u64::from(there));
    there
}

/// Comes to the service. `None`: there is none, or who is there is not believed to be it.
pub fn visit(path: Option<&AbsolutePath>) -> Sys<Option<i32>> {
    let Some(path) = path else { return Ok(None) };
    match service::visit(path.as_c_str(), Kind::Node) {
        Ok(visited) if service::is_believed(&visited) => Ok(Some(visited.socket)),
        Ok(visited) => {
            meet::part(visited.socket);
            remember(false);
            Ok(None)
        }
        Err(error @ (Errno::EAGAIN | Errno::EMFILE | Errno::ENFILE | Errno::ENOMEM)) => Err(error),
        Err(_) => {
            remember(false);
            Ok(None)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_said_is_heard() {
        let message =
            Message { kind: MET, accepting: 1, flags: TRUSTED, stranger: 4_000_000_000, reason: 9 };
        assert_eq!(Message::read(message.frame().as_bytes()), Ok(message));
    }

    #[test]
    fn what_is_asked_is_heard() {
        for name in ["b:orders", &"x".repeat(ASKED_BYTES)] {
            let asked = Ask::new(CALL, name).unwrap();
            assert_eq!(Ask::read(asked.frame().as_bytes()), Ok(asked));
            assert_eq!(asked.text(), Some(name));
        }
        assert_eq!(Ask::new(CALL, &"x".repeat(ASKED_BYTES + 1)), None);
        let mut odd = Ask::new(OFFER, "a").unwrap();
        odd.name[2] = 1;
        assert_eq!(odd.text(), None);
        assert_eq!(Ask::new(OFFER, "").unwrap().text(), None);
    }
}
