//! Services beyond the network namespace: by way of the node service, which has one here and knows the others.
//!
//! Who offers a service to all that the node service's policy admits gives it a name that begins with a colon. Others call it by the name of the node
//! before that: `:orders` of the node `b` is `b:orders`, on each node and in each network namespace.

use super::bell::Deadline;
use super::segment::own;
use super::{Error, Options};
use crate::guarded::Guarded;
use ringlet::config::{AbsolutePath, Config, Origin};
use ringlet::handshake;
use ringlet::interconnect::node::{
    self, APART, Ask, CALL, GREETING, HERE, MET, Message, NAME, OFFER,
};
use ringlet::reasons::Reason;
use ringlet_linux::sys::Errno;
use ringlet_linux::{apart, fd, meet};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;

/// Who calls a service that is not there (yet) calls again after so long, doubled up to the second figure.
const CALL_AGAIN_NS: u64 = 10_000_000;
const CALL_AGAIN_MAX_NS: u64 = 1_000_000_000;

/// Who carries holds all of a ring.
const RING_MAX_BYTES: usize = 1 << 20;
const SLOT_MAX_COUNT: usize = 4096;

/// May a service of such sizes be offered?
pub(super) fn is_small(options: &Options) -> bool {
    options.ring_bytes <= RING_MAX_BYTES && options.slot_count <= SLOT_MAX_COUNT
}

/// The service in the name of one that is offered to other hosts.
pub(crate) fn offered(name: &str) -> Option<&str> {
    name.strip_prefix(':')
}

/// Is it the name of a service of a node's?
pub(crate) fn is_of_node(name: &str) -> bool {
    name.find(':').is_some_and(|at| at > 0)
}

/// Where the node service is (a long path has its room).
pub(crate) type Node = Option<Box<AbsolutePath>>;

/// Where `RINGLET_NODE` says, as for sockets. (For the program's own threads only: it may change its environment.)
pub(crate) fn node() -> Result<Node, Error> {
    let mut config = Config::default();
    if let Some(path) = std::env::var_os("RINGLET_NODE") {
        let set = config.set(b"node", path.as_bytes(), Origin::Environment);
        set.map_err(|_| Error::System(Errno::EINVAL))?;
    }
    Ok(config.node.map(Box::new))
}

/// Offers a service. Who calls it comes by the socket that this returns (`comes`), whose end is the service's.
pub(crate) fn offer(service: &str, at: &Node, deadline: &mut Deadline) -> Result<Guarded, Error> {
    let line = visit(at)?;
    ask(&line, OFFER, service, deadline)?;
    match answer(&line, deadline)? {
        (None, None) => Ok(line),
        // (By its name it is one of this user's already.)
        (_, Some(Reason::BadPeer)) => Err(Error::System(Errno::EADDRINUSE)),
        _ => Err(Error::Unreachable),
    }
}

/// The node of this host, by which others call its services.
pub(crate) fn own_node(deadline: &mut Deadline) -> Result<String, Error> {
    let line = visit(&node()?)?;
    ask(&line, NAME, HERE, deadline)?;
    loop {
        match packet(&line) {
            Err(Error::System(Errno::EAGAIN)) => deadline.await_input(&line)?,
            Err(error) => return Err(error),
            Ok((bytes, _)) => {
                let said = Ask::read(&bytes).ok().filter(|said| said.kind == NAME);
                let name = said.and_then(|said| said.text().map(str::to_owned));
                return name.ok_or(Error::Unreachable);
            }
        }
    }
}

/// Who has come for what was offered, and from which node, as the service has it; EAGAIN if nobody has.
pub(crate) fn comes(line: &Guarded) -> Result<(Guarded, String), Error> {
    let (bytes, socket) = packet(line)?;
    let called = Ask::read(&bytes).ok().filter(|called| called.kind == CALL);
    let called = called.ok_or(Error::Unreachable)?;
    // (There was no descriptor free for it here.)
    let socket = socket.ok_or(Error::System(Errno::EMFILE))?;
    Ok((socket, called.text().ok_or(Error::Unreachable)?.to_owned()))
}

/// A socket to a service of a node's, waiting for it to be offered if need be.
pub(crate) fn call(name: &str, deadline: &mut Deadline) -> Result<Guarded, Error> {
    let (at, mut pause) = (node()?, CALL_AGAIN_NS);
    loop {
        let line = visit(&at)?;
        ask(&line, CALL, name, deadline)?;
        match answer(&line, deadline)? {
            (Some(socket), _) => return Ok(socket),
            (_, Some(Reason::Refused)) => return Err(Error::Refused),
            (_, Some(Reason::BadPeer)) => return Err(Error::Unreachable),
            _ => {}
        }
        let left = deadline.left()?.unwrap_or(pause);
        fd::poll(&mut [], Some(pause.min(left)), None)?;
        pause = (pause * 2).min(CALL_AGAIN_MAX_NS);
    }
}

fn visit(at: &Node) -> Result<Guarded, Error> {
    let line = node::visit(at.as_deref())?.ok_or(Error::Unreachable)?;
    Ok(Guarded::new(own(line)))
}

fn ask(line: &Guarded, kind: u16, name: &str, deadline: &mut Deadline) -> Result<(), Error> {
    let asked = Ask::new(kind, name).ok_or(Error::System(Errno(libc::ENAMETOOLONG)))?;
    let greeted = |bytes: &[u8]| Message::read(bytes).is_ok_and(|said| said.kind == GREETING);
    let mut bytes = [0; handshake::ROOM_BYTES];
    let len = loop {
        match meet::receive(line.as_raw_fd(), &mut bytes) {
            Err(Errno::EAGAIN) => deadline.await_input(line)?,
            Ok((len, _)) => break len,
            Err(_) => return Err(Error::Unreachable),
        }
    };
    if !greeted(&bytes[..len]) {
        return Err(Error::Unreachable);
    }
    Ok(meet::send(line.as_raw_fd(), asked.frame().as_bytes(), &[])?)
}

/// A socket, if there is one; a reason, if they stay apart.
type Answer = (Option<Guarded>, Option<Reason>);

fn answer(line: &Guarded, deadline: &mut Deadline) -> Result<Answer, Error> {
    loop {
        match heard(line) {
            Err(Error::System(Errno::EAGAIN)) => deadline.await_input(line)?,
            done => return done,
        }
    }
}

fn heard(line: &Guarded) -> Result<Answer, Error> {
    let (bytes, socket) = packet(line)?;
    let said = Message::read(&bytes).map_err(|_| Error::Unreachable)?;
    match (said.kind, socket) {
        (MET, socket) => Ok((socket, None)),
        (APART, None) => Ok((None, Some(Reason::from_u32(said.reason).unwrap_or(Reason::NoPeer)))),
        (_, Some(_)) => Err(Error::PeerCorrupt),
        _ => Err(Error::Unreachable),
    }
}

/// The next thing that the service says, and the socket that is with it.
fn packet(line: &Guarded) -> Result<(Vec<u8>, Option<Guarded>), Error> {
    let mut bytes = vec![0; handshake::ROOM_BYTES];
    let (len, mut fds) = match meet::receive(line.as_raw_fd(), &mut bytes) {
        Err(Errno::EAGAIN) => return Err(Error::System(Errno::EAGAIN)),
        Ok((len @ 1.., fds)) => (len, fds),
        _ => return Err(Error::Unreachable),
    };
    bytes.truncate(len);
    let user = fds.user;
    match fds.take(0) {
        Some(other) if !meet::is_ours_in_kind(other) => {
            apart::close_foreign(other, user);
            Err(Error::PeerCorrupt)
        }
        socket => Ok((bytes, socket.map(|socket| Guarded::of_node(own(socket))))),
    }
}
