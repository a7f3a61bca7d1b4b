//! How two programs find each other: a service's name, credentials, and a segment for each connection.
//!
//! (`welcome`: what the service says first.)

use super::announcer::Announcer;
use super::bell::{Bell, Deadline};
use super::channel::{Channel, Link};
use super::segment::{Mapping, make_segment, map_segment, own};
use super::welcome::{Welcome, accept, open_service};
use super::{Error, Kind, Locked, Options, Region, Sender, Timeout};
use crate::guarded::{Guarded, close_sent};
use ringlet::handshake;
use ringlet_core::layout::LaneGeometry;
use ringlet_linux::sys::Errno;
use ringlet_linux::{apart, fd, meet};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

/// Somebody who looks for a service that is not there yet looks again after so long, doubled up to the second figure.
const LOOK_AGAIN_NS: u64 = 100_000;
const LOOK_AGAIN_MAX_NS: u64 = 10_000_000;

/// Waits until a descriptor is readable.
fn await_input(fd: BorrowedFd, deadline: &mut Deadline) -> Result<(), Error> {
    let left = deadline.left()?;
    let mut fds = [fd::pollfd { fd: fd.as_raw_fd(), events: libc::POLLIN, revents: 0 }];
    fd::poll(&mut fds, left, None)?;
    Ok(())
}

/// A service under a name, which is free again when the listener is dropped or its process is gone. (A mailbox is a service of
/// its own: see [`Mailbox`](super::Mailbox).)
pub struct Listener {
    socket: Guarded,
    options: Options,
    geometry: LaneGeometry,
}

/// A connection, as its service's kind says.
pub enum Connection {
    Channel(Channel),
    Locked(Locked),
    Sender(Sender),
    Region(Region),
}

impl Listener {
    /// Fails with EADDRINUSE when there is a service of that name in this network namespace.
    pub fn bind(name: &str, options: Options) -> Result<Listener, Error> {
        if options.kind == Kind::Mailbox {
            return Err(Error::OtherKind);
        }
        let options = options.of_service();
        let geometry = options.geometry()?;
        Ok(Listener { socket: open_service(name)?, options, geometry })
    }

    /// The next connection. Whoever is not admitted is turned away without a word.
    pub fn accept(&self, timeout: Timeout) -> Result<Connection, Error> {
        let mut deadline = Deadline::new(timeout);
        loop {
            let socket = match accept(&self.socket, self.options.peers) {
                Err(Error::System(Errno::EAGAIN)) => {
                    await_input(self.socket.as_fd(), &mut deadline)?;
                    continue;
                }
                done => done?,
            };
            let (memfd, mapping) = make_segment(2 * self.geometry.lane_bytes())?;
            let [room, theirs] = meet::pair()?.map(own);
            let fds = [memfd.as_raw_fd(), theirs.as_raw_fd()];
            // Or it has gone again.
            let sent = Welcome::new(&self.options, 0).send(&socket, &fds);
            close_sent(theirs, &socket);
            if sent.is_ok() {
                let room = Guarded::new(room);
                return Ok(self.options.connection(socket, room, mapping, self.geometry, 1));
            }
        }
    }

    /// Readable when somebody has come.
    pub fn descriptor(&self) -> i32 {
        self.socket.as_raw_fd()
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Options {
    fn connection(
        &self,
        data: Guarded,
        room: Guarded,
        mapping: Mapping,
        geometry: LaneGeometry,
        side: usize,
    ) -> Connection {
        let (data, room) = (Bell::new(data), Some(Bell::new(room)));
        let link = Link { data, room, mapping, side, spin_us: self.spin_us };
        match self.kind {
            Kind::Locked => Connection::Locked(Locked::new(link, geometry)),
            Kind::Region => Connection::Region(Region::new(link, geometry)),
            _ => Connection::Channel(Channel::new(link, geometry, self)),
        }
    }
}

/// Connects to a service, waiting for it to be opened if need be. Of `options` its sizes are not used.
pub fn connect(name: &str, options: Options, timeout: Timeout) -> Result<Connection, Error> {
    let mut deadline = Deadline::new(timeout);
    let mut pause = LOOK_AGAIN_NS;
    let socket = loop {
        match meet::visit(name.as_bytes()) {
            Ok(socket) => break Guarded::new(own(socket)),
            Err(Errno::ECONNREFUSED | Errno::EAGAIN) => {
                let left = deadline.left()?.unwrap_or(pause);
                fd::poll(&mut [], Some(pause.min(left)), None)?;
                pause = (pause * 2).min(LOOK_AGAIN_MAX_NS);
            }
            Err(errno) => return Err(errno.into()),
        }
    };
    options.peers.admit(&socket)?;
    let mut bytes = [0; handshake::ROOM_BYTES];
    let (n, mut fds) = loop {
        match meet::receive(socket.as_raw_fd(), &mut bytes) {
            Err(Errno::EAGAIN) => await_input(socket.as_fd(), &mut deadline)?,
            done => break done?,
        }
    };
    // Turned away, or the service has just gone.
    if n == 0 {
        return Err(Error::Refused);
    }
    let welcome = Welcome::parse(&bytes[..n])?;
    if welcome.kind != options.kind as u32 {
        return Err(Error::OtherKind);
    }
    let geometry = welcome.geometry().ok_or(Error::PeerCorrupt)?;
    if options.kind == Kind::Mailbox {
        let mapping = map_segment(fds.take(0), geometry.lane_bytes(), true)?;
        let announcer = Announcer::new(fds.take(1), fds.take(2), welcome.lane)?;
        let data = Bell::new(socket);
        let link = Link { data, room: None, mapping, side: 0, spin_us: options.spin_us };
        return Ok(Connection::Sender(Sender::of_mailbox(link, geometry, announcer)));
    }
    let mapping = map_segment(fds.take(0), 2 * geometry.lane_bytes(), true)?;
    let room = fds.take(1).ok_or(Error::PeerCorrupt)?;
    // Anything else could block whoever rings or closes it.
    if !meet::is_ours_in_kind(room) {
        apart::close_foreign(room, fds.user);
        return Err(Error::PeerCorrupt);
    }
    let room = Guarded::shared(own(room), &socket);
    Ok(options.connection(socket, room, mapping, geometry, 0))
}

impl Connection {
    /// The channel of a service of bytes or messages.
    pub fn channel(self) -> Result<Channel, Error> {
        match self {
            Connection::Channel(channel) => Ok(channel),
            _ => Err(Error::OtherKind),
        }
    }

    pub fn locked(self) -> Result<Locked, Error> {
        match self {
            Connection::Locked(locked) => Ok(locked),
            _ => Err(Error::OtherKind),
        }
    }

    pub fn region(self) -> Result<Region, Error> {
        match self {
            Connection::Region(region) => Ok(region),
            _ => Err(Error::OtherKind),
        }
    }

    /// The way into a mailbox.
    pub fn sender(self) -> Result<Sender, Error> {
        match self {
            Connection::Sender(sender) => Ok(sender),
            _ => Err(Error::OtherKind),
        }
    }
}
