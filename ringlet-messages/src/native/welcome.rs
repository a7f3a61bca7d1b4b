//! What a service says to whoever has come and is admitted. The service speaks first, with a fresh segment and what else belongs to a connection of its kind:
//! so it never waits for anybody.

use super::segment::own;
use super::{Error, Options, Peers};
use crate::guarded::Guarded;
use ringlet::handshake::{self, Frame, Misfit, Protocol};
use ringlet_core::layout::LaneGeometry;
use ringlet_linux::meet;
use ringlet_linux::sys::Errno;
use std::os::fd::{AsRawFd, OwnedFd};

const WELCOME: u16 = 1;

/// What a service says of a connection.
#[derive(Clone, Copy)]
pub(super) struct Welcome {
    pub kind: u32,
    /// A mailbox's: which lane, which bit.
    pub lane: u32,
    pub slot_count: u64,
    pub ring_bytes: u64,
}

impl Welcome {
    pub fn new(options: &Options, lane: u32) -> Welcome {
        Welcome {
            kind: options.kind as u32,
            lane,
            slot_count: options.slot_count as u64,
            ring_bytes: options.ring_bytes as u64,
        }
    }

    pub fn send(self, to: &OwnedFd, fds: &[i32]) -> Result<(), Error> {
        let frame = Frame::new(Protocol::Native, WELCOME)
            .u32(self.kind)
            .u32(self.lane)
            .u64(self.slot_count)
            .u64(self.ring_bytes);
        Ok(meet::send(to.as_raw_fd(), frame.as_bytes(), fds)?)
    }

    pub fn parse(packet: &[u8]) -> Result<Welcome, Error> {
        let parsed = handshake::read(packet, Protocol::Native, |kind, fields| {
            let welcome = Welcome {
                kind: fields.u32()?,
                lane: fields.u32()?,
                slot_count: fields.u64()?,
                ring_bytes: fields.u64()?,
            };
            (kind == WELCOME).then_some(welcome)
        });
        parsed.map_err(|misfit| match misfit {
            Misfit::OtherVersion => Error::OtherVersion,
            Misfit::Nonsense => Error::OtherKind,
        })
    }

    pub fn geometry(&self) -> Option<LaneGeometry> {
        let (slots, bytes) = (usize::try_from(self.slot_count), usize::try_from(self.ring_bytes));
        LaneGeometry::new(slots.ok()?, bytes.ok()?)
    }
}

impl Peers {
    /// May we deal with whoever is at the other end?
    pub(super) fn admit(self, socket: &OwnedFd) -> Result<(), Error> {
        let uid = meet::credentials(socket.as_raw_fd())?.uid;
        let admitted = self == Peers::Any || uid == 0 || meet::is_our_user(uid);
        if admitted { Ok(()) } else { Err(Error::Refused) }
    }
}

/// The next of those who have come and are admitted.
pub(super) fn accept(service: &OwnedFd, peers: Peers) -> Result<Guarded, Error> {
    loop {
        let socket = Guarded::new(own(meet::accept_in_sight(service.as_raw_fd())?));
        if peers.admit(&socket).is_ok() {
            return Ok(socket);
        }
    }
}

/// (A colon is in the names of what is offered to other hosts.)
pub(super) fn open_service(name: &str) -> Result<Guarded, Error> {
    if name.contains(':') {
        return Err(Error::System(Errno::EINVAL));
    }
    Ok(Guarded::new(own(meet::serve(name.as_bytes())?)))
}
