//! An end of a channel, or of a locked pair, as who carries it to another host has it: the peer of a program here, which waits for nothing.

use super::channel::{Channel, Receiver, Receives, Sender, Sends};
use super::service::Prepared;
use super::welcome::Welcome;
use super::{Connection, Error, Kind, Locked, Options, Timeout, hosts};
use crate::guarded::Guarded;
use ringlet::handshake;
use ringlet_linux::meet;
use ringlet_linux::sys::Errno;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::time::Duration;

const NOW: Timeout = Some(Duration::ZERO);
/// In a ring of so many bytes any message finds room.
const FOR_ALL_MESSAGES: usize = 512 << 10;

/// What a service says of its connections.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Offer {
    pub kind: u32,
    pub slot_count: u64,
    pub ring_bytes: u64,
}

/// A socket to a program here, at which a connection begins.
pub struct Beginning(pub(crate) Guarded);

pub enum Joined {
    NotYet(Beginning),
    Here(Offer, Box<Port>),
}

pub struct Port {
    sender: Option<Sender>,
    receiver: Option<Receiver>,
    locked: Option<Locked>,
    bytes: bool,
}

impl Beginning {
    pub fn new(socket: OwnedFd) -> Beginning {
        Beginning(Guarded::of_node(socket))
    }

    pub fn socket(&self) -> &OwnedFd {
        &self.0
    }

    /// The service is here: what it gives us, once it has.
    pub fn join(self) -> Result<Joined, Error> {
        let mut bytes = [0; handshake::ROOM_BYTES];
        let received = match meet::receive_named(self.0.as_raw_fd(), &mut bytes) {
            Err(Errno::EAGAIN) => return Ok(Joined::NotYet(self)),
            done => done?,
        };
        if received.len == 0 {
            return Err(Error::Refused);
        }
        let welcome = Welcome::parse(&bytes[..received.len])?;
        let offer = Offer {
            kind: welcome.kind,
            slot_count: welcome.slot_count,
            ring_bytes: welcome.ring_bytes,
        };
        let options = offer.options()?;
        let port = Port::new(options.join(self.0, welcome, received)?, options.kind)?;
        Ok(Joined::Here(offer, Box::new(port)))
    }

    /// The caller is here: it gets what the service offers there.
    pub fn welcome(self, offer: Offer) -> Result<Port, Error> {
        let mut options = offer.options()?;
        options.ring_bytes = options.ring_bytes.min(FOR_ALL_MESSAGES);
        let geometry = options.geometry()?;
        let connection = options.welcome(self.0, Prepared::new(geometry)?, geometry)?;
        let connection = connection.ok_or(Error::PeerDied)?;
        Port::new(connection, options.kind)
    }
}

impl Offer {
    fn options(&self) -> Result<Options, Error> {
        let kinds = [Kind::Bytes, Kind::Messages, Kind::Locked, Kind::ActiveMessages];
        let kind = kinds.into_iter().find(|kind| *kind as u32 == self.kind);
        let size = |size: u64| usize::try_from(size).map_err(|_| Error::PeerCorrupt);
        let options = Options {
            slot_count: size(self.slot_count)?,
            ring_bytes: size(self.ring_bytes)?,
            spin_us: 0,
            ..Options::new(kind.ok_or(Error::OtherKind)?)
        };
        options.geometry()?;
        if !hosts::is_small(&options) {
            return Err(Error::PeerCorrupt);
        }
        Ok(options)
    }
}

impl Port {
    fn new(connection: Connection, kind: Kind) -> Result<Port, Error> {
        let bytes = kind == Kind::Bytes;
        let port = match connection {
            Connection::Channel(Channel { sender, receiver }) => {
                Port { sender: Some(sender), receiver: Some(receiver), locked: None, bytes }
            }
            Connection::Locked(locked) => {
                Port { sender: None, receiver: None, locked: Some(locked), bytes }
            }
            _ => return Err(Error::OtherKind),
        };
        port.hold()?;
        Ok(port)
    }

    /// WHY: a page that can't be had would be a signal, and the end of all that is carried.
    fn hold(&self) -> Result<(), Error> {
        let area = match (&self.sender, &self.locked) {
            (Some(sender), _) => sender.mapping(),
            (_, Some(locked)) => locked.mapping(),
            _ => return Ok(()),
        };
        Ok(ringlet_linux::map::hold(area, 0, area.len())?)
    }

    /// The next message, if `send` takes it. False if there is none, or it is not taken. (Of a locked pair there is none in our turn, but it may
    /// have ended.)
    pub fn pass(
        &mut self,
        send: impl FnOnce(&mut dyn FnMut(usize, &mut [u8]), usize) -> bool,
    ) -> Result<bool, Error> {
        match (&mut self.receiver, &mut self.locked) {
            (Some(receiver), _) => pass(receiver, send),
            (_, Some(locked)) if locked.is_our_turn() => locked.left().map(|()| false),
            (_, Some(locked)) => pass(locked, send),
            _ => Ok(false),
        }
    }

    /// Gives a message to the program; how many bytes of it, of a stream, there was room for. `WouldBlock` if there is none.
    pub fn send(&mut self, message: &[u8]) -> Result<usize, Error> {
        match (&mut self.sender, &mut self.locked) {
            (Some(sender), _) => sender.send(message, NOW),
            (_, Some(locked)) => locked.send(message, NOW),
            _ => Err(Error::Closed),
        }
    }

    /// Is a message cut where it likes?
    pub fn is_stream(&self) -> bool {
        self.bytes
    }

    /// Does an end of it end both ways?
    pub fn is_locked(&self) -> bool {
        self.locked.is_some()
    }

    /// The other end sends no more; or reads no more. The program is told.
    pub fn shut(&mut self) {
        self.sender = None;
        self.locked = None;
    }

    pub fn close(&mut self) {
        self.receiver = None;
    }

    /// The other end has died, or what carries to it: so it looks to the program.
    pub fn abandon(&mut self) {
        self.sender.take().into_iter().for_each(Sender::abandon);
        self.receiver.take().into_iter().for_each(Receiver::abandon);
        self.locked.take().into_iter().for_each(Locked::abandon);
    }

    /// Does the program read no more?
    pub fn is_closed(&self) -> bool {
        self.sender.as_ref().is_some_and(Sender::is_closed)
    }

    /// Has the program gone?
    pub fn is_alone(&self) -> bool {
        let Port { sender, receiver, locked, .. } = self;
        receiver.as_ref().is_some_and(Receiver::is_alone)
            || sender.as_ref().is_some_and(Sender::is_alone)
            || locked.as_ref().is_some_and(Locked::is_alone)
    }

    /// Asks to be woken by what comes, and by room, as they are wanted. True if there is none of it yet.
    pub fn arm(&mut self, for_data: bool, for_room: bool) -> bool {
        let Port { sender, receiver, locked, .. } = self;
        let receives = receiver.as_mut().filter(|_| for_data);
        let locked = locked.as_mut().filter(|locked| for_data && !locked.is_our_turn());
        receives.is_none_or(Receiver::arm)
            && locked.is_none_or(Locked::arm)
            && (!for_room || sender.as_mut().is_none_or(Sender::arm))
    }

    /// Takes what has woken.
    pub(crate) fn drain(&self) {
        self.receiver.iter().for_each(Receiver::drain);
    }

    /// What wakes.
    pub fn descriptors(&self, tell: &mut dyn FnMut(BorrowedFd<'_>)) {
        // SAFETY: theirs, for this call.
        #[allow(unsafe_code)]
        let mut tell = |fd: i32| tell(unsafe { BorrowedFd::borrow_raw(fd) });
        if let Some(receiver) = &self.receiver {
            tell(receiver.descriptor());
        }
        if let Some(sender) = &self.sender {
            tell(sender.descriptor());
        }
        if let Some(locked) = &self.locked {
            tell(locked.descriptor());
        }
    }
}

fn pass(
    from: &mut impl Receives,
    send: impl FnOnce(&mut dyn FnMut(usize, &mut [u8]), usize) -> bool,
) -> Result<bool, Error> {
    let message = match from.peek(NOW) {
        Err(Error::WouldBlock) => return Ok(false),
        done => done?,
    };
    let len = message.len();
    let sent = send(&mut |at, to| message.read(at, to), len);
    if sent {
        message.release();
    }
    Ok(sent)
}

#[cfg(test)]
mod tests {
    use super::super::Listener;
    use super::super::segment::own;
    use super::*;

    #[test]
    fn what_is_offered_to_other_hosts_is_of_small_rings() {
        for (ring_bytes, slot_count, is_small) in
            [(1 << 20, 4096, true), (2 << 20, 4096, false), (1 << 20, 8192, false)]
        {
            let [ours, _theirs] = meet::pair().unwrap().map(own);
            let kind = Kind::Messages;
            let offer = Offer {
                kind: kind as u32,
                slot_count: slot_count as u64,
                ring_bytes: ring_bytes as u64,
            };
            let welcomed = Beginning::new(ours).welcome(offer);
            assert_eq!(welcomed.err(), (!is_small).then_some(Error::PeerCorrupt));
            if !is_small {
                let options = Options { slot_count, ring_bytes, ..Options::new(kind) };
                let bound = Listener::bind(":orders", options);
                assert_eq!(bound.err(), Some(Error::System(Errno::EINVAL)));
            }
        }
    }
}
