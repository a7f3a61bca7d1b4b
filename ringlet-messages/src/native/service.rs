//! How two programs find each other: a service's name, credentials, and a segment for each connection.
//!
//! (`welcome`: what the service says first.)

use super::announcer::Announcer;
use super::bell::{Bell, Deadline, Process};
use super::channel::{Channel, Link};
use super::segment::{Mapping, make_segment, map_segment, own};
use super::welcome::{Welcome, accept, open_service};
use super::{Error, Kind, Locked, Options, Peers, Region, Sender, Timeout, hosts};
use crate::guarded::{Guarded, close_sent};
use ringlet::handshake;
use ringlet_core::layout::LaneGeometry;
use ringlet_linux::meet::Received;
use ringlet_linux::sys::Errno;
use ringlet_linux::{apart, fd, meet};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::Duration;

/// Somebody who looks for a service that is not there yet looks again after so long, doubled up to the second figure.
const LOOK_AGAIN_NS: u64 = 100_000;
const LOOK_AGAIN_MAX_NS: u64 = 10_000_000;

/// For whom no descriptor is free is looked at again after so long.
const CROWDED_NS: u64 = 10_000_000;

/// A service under a name, which is free again when the listener is dropped or its process is gone. (A mailbox is a service of
/// its own: see [`Mailbox`](super::Mailbox).)
pub struct Listener {
    /// Where others come; or the node service, for one that is offered to other hosts.
    socket: Guarded,
    options: Options,
    geometry: LaneGeometry,
    is_offered: bool,
}

/// How long the node service may take to answer.
const OFFERED_IN: Duration = Duration::from_secs(10);

/// A connection, as its service's kind says.
pub enum Connection {
    Channel(Channel),
    Locked(Locked),
    Sender(Sender),
    Region(Region),
}

impl Listener {
    /// Fails with EADDRINUSE when there is a service of that name in this network namespace.
    ///
    /// A name that begins with a colon is offered by way of the node service (`ringlet node`), to all on this host and on others of the cluster whom its
    /// policy admits: `:orders` of the node `b` is called as `b:orders`. Who may come is then for that policy to say, and `peers` says nothing. It is of
    /// channels or locked pairs, with rings of at most 1 MiB and 4,096 messages. It fails with EADDRINUSE if this user offers one of that name already,
    /// and with `Unreachable` where there is no such service; so does `accept` once that has ended: bind it anew.
    pub fn bind(name: &str, options: Options) -> Result<Listener, Error> {
        if options.kind == Kind::Mailbox {
            return Err(Error::OtherKind);
        }
        let options = options.of_service();
        let geometry = options.geometry()?;
        let offered = hosts::offered(name);
        let socket = match offered {
            Some(_) if options.kind == Kind::Region => return Err(Error::OtherKind),
            Some(_) if !hosts::is_small(&options) => {
                return Err(Error::System(Errno::EINVAL));
            }
            Some(service) => {
                hosts::offer(service, &hosts::node()?, &mut Deadline::new(Some(OFFERED_IN)))?
            }
            None => open_service(name)?,
        };
        Ok(Listener { socket, options, geometry, is_offered: offered.is_some() })
    }

    fn comes(&self) -> Result<(Guarded, Option<String>), Error> {
        match self.is_offered {
            true => hosts::comes(&self.socket).map(|(socket, node)| (socket, Some(node))),
            false => accept(&self.socket, self.options.peers).map(|socket| (socket, None)),
        }
    }

    /// The next connection. Whoever is not admitted is turned away without a word; for whom no descriptor is free, waits;
    /// where none is in all the time of this call, it fails with EMFILE or ENFILE.
    pub fn accept(&self, timeout: Timeout) -> Result<Connection, Error> {
        self.accept_from(timeout).map(|(connection, _)| connection)
    }

    /// The same; and, of a service that is offered by way of the node service, the node of who has called it (`localhost` for this host). That is the node
    /// services' word, not the caller's.
    pub fn accept_from(&self, timeout: Timeout) -> Result<(Connection, Option<String>), Error> {
        let mut deadline = Deadline::new(timeout);
        loop {
            if fd::pending(self.descriptor(), libc::POLLIN) == 0 {
                deadline.await_input(&self.socket)?;
                continue;
            }
            // What it takes comes first: who is taken in for whom it is not there could only be turned away.
            let came = Prepared::new(self.geometry).and_then(|mut prepared| {
                prepared.spare = None;
                self.comes().map(|came| (prepared, came))
            });
            let (prepared, (socket, node)) = match came {
                Err(Error::System(Errno::EAGAIN)) => continue,
                // (Who has come stays readable, so that it could not be waited for otherwise.)
                Err(lacks @ Error::System(Errno::EMFILE | Errno::ENFILE)) => {
                    let left = deadline.left().map_err(|_| lacks)?;
                    let pause = left.map_or(CROWDED_NS, |left| left.min(CROWDED_NS));
                    fd::poll(&mut [], Some(pause), None)?;
                    continue;
                }
                done => done?,
            };
            // Or it has gone again.
            if let Some(connection) = self.options.welcome(socket, prepared, self.geometry)? {
                return Ok((connection, node));
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

/// What whoever comes is given.
pub(super) struct Prepared {
    memfd: OwnedFd,
    mapping: Mapping,
    room: OwnedFd,
    theirs: OwnedFd,
    /// The number that his own socket will have.
    spare: Option<OwnedFd>,
}

impl Prepared {
    pub fn new(geometry: LaneGeometry) -> Result<Prepared, Error> {
        let (memfd, mapping) = make_segment(2 * geometry.lane_bytes())?;
        let [room, theirs] = meet::pair()?.map(own);
        let spare = Some(memfd.try_clone().map_err(|_| Error::System(Errno::EMFILE))?);
        Ok(Prepared { memfd, mapping, room, theirs, spare })
    }
}

impl Options {
    /// Gives it to who has come. `None` if he has gone.
    pub(super) fn welcome(
        &self,
        socket: Guarded,
        prepared: Prepared,
        geometry: LaneGeometry,
    ) -> Result<Option<Connection>, Error> {
        let Prepared { memfd, mapping, room, theirs, .. } = prepared;
        let fds = [memfd.as_raw_fd(), theirs.as_raw_fd()];
        let sent = Welcome::new(self, 0).send(&socket, &fds);
        close_sent(theirs, &socket);
        drop(memfd);
        let room = Guarded::new(room);
        if sent.is_err() {
            return Ok(None);
        }
        let process = Process::that_connected(&socket)?;
        Ok(Some(self.connection((socket, room), process, mapping, geometry, 1)))
    }

    fn connection(
        &self,
        (data, room): (Guarded, Guarded),
        process: Process,
        mapping: Mapping,
        geometry: LaneGeometry,
        side: usize,
    ) -> Connection {
        let (data, room) = (Bell::new(data, process.clone()), Some(Bell::new(room, process)));
        let link = Link { data, room, mapping, side, spin_us: self.spin_us };
        match self.kind {
            Kind::Locked => Connection::Locked(Locked::new(link, geometry)),
            Kind::Region => Connection::Region(Region::new(link, geometry)),
            _ => Connection::Channel(Channel::new(link, geometry, self)),
        }
    }
}

/// Connects to a service, waiting for it to be opened if need be. Of `options` its sizes are not used. `NODE:SERVICE` is one that is offered on that node
/// (`Listener::bind`): a channel or a locked pair, which the node services carry between two hosts, or introduce on one.
pub fn connect(name: &str, options: Options, timeout: Timeout) -> Result<Connection, Error> {
    let mut deadline = Deadline::new(timeout);
    let socket = match hosts::is_of_node(name) {
        true if matches!(options.kind, Kind::Mailbox | Kind::Region) => {
            return Err(Error::OtherKind);
        }
        true => hosts::call(name, &mut deadline)?,
        false if hosts::offered(name).is_some() => return Err(Error::System(Errno::EINVAL)),
        false => look(name, options.peers, &mut deadline)?,
    };
    let mut bytes = [0; handshake::ROOM_BYTES];
    let received = loop {
        match meet::receive_named(socket.as_raw_fd(), &mut bytes) {
            Err(Errno::EAGAIN) => deadline.await_input(&socket)?,
            done => break done?,
        }
    };
    // Turned away, or the service has just gone.
    if received.len == 0 {
        return Err(Error::Refused);
    }
    let welcome = Welcome::parse(&bytes[..received.len])?;
    if welcome.kind != options.kind as u32 {
        return Err(Error::OtherKind);
    }
    options.join(socket, welcome, received)
}

/// A socket to a service of this network namespace.
fn look(name: &str, peers: Peers, deadline: &mut Deadline) -> Result<Guarded, Error> {
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
    peers.admit(&socket)?;
    Ok(socket)
}

impl Options {
    /// What a service has said, and given.
    pub(super) fn join(
        &self,
        socket: Guarded,
        welcome: Welcome,
        received: Received,
    ) -> Result<Connection, Error> {
        let Received { caller, mut fds, .. } = received;
        let geometry = welcome.geometry().ok_or(Error::PeerCorrupt)?;
        // KERNEL: no number was free here for one of them. (Nor was there room for more than a service sends.)
        if fds.truncated && fds.count < meet::MAX_FDS {
            return Err(Error::System(Errno::EMFILE));
        }
        // Who speaks is who will serve: the one that has opened the service may have forked it.
        let process = || Process::new(caller.map_or(Ok(None), |caller| meet::process_of(&caller)));
        if self.kind == Kind::Mailbox {
            let mapping = map_segment(fds.take(0), geometry.lane_bytes(), true)?;
            let announcer = Announcer::new(&mut fds, welcome.lane)?;
            let data = Bell::new(socket, process()?);
            let link = Link { data, room: None, mapping, side: 0, spin_us: self.spin_us };
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
        Ok(self.connection((socket, room), process()?, mapping, geometry, 0))
    }
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
