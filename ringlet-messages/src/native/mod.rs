//! The native library: channels for programs that can change their code.
//!
//! One program opens a service under a name ([`Listener`]), others connect to it ([`connect`]); each connection is a shared segment of
//! its own, made by the service and checked by both. What lies in it depends on the service's [`Kind`]:
//!
//! - [`Kind::Bytes`], [`Kind::Messages`]: a [`Channel`] with a [`Sender`] and a [`Receiver`], which may go to two threads;
//! - [`Kind::Locked`]: a [`Locked`] pair of buffers for strict question and answer;
//! - [`Kind::Region`]: a [`Region`], plain memory into which each end stores for the other to read;
//! - [`Kind::Mailbox`]: one [`Mailbox`], to which up to 1,024 connected [`Sender`]s write, each in its own lane.
//!
//! While both ends are awake nothing enters the kernel. An end that has to wait watches shared memory for a while, then arms its
//! interrupt flag and sleeps on a descriptor, which the other end rings only when it finds the flag armed. Descriptor-driven programs
//! do the same by themselves: `arm`, and if it says so wait until the `descriptor` is readable.
//!
//! Messages are written and read in place or copied. What lies in shared memory may be changed by the peer at any time, so it is
//! never lent as `&[u8]`: a [`Slot`] and a [`Message`] give a slice of atomic bytes, which may change but do no harm, or copy.
//!
//! All handles belong to the process that made them: a child by fork must not use or drop its copies. Each call is made by one
//! thread at a time on one handle, as `&mut self` says.

mod announcer;
pub(crate) mod bell;
#[doc(hidden)]
pub mod carried;
mod channel;
pub(crate) mod hosts;
mod locked;
mod mailbox;
mod region;
mod segment;
mod service;
mod welcome;

pub use channel::{Channel, Message, Receiver, Receives, Sender, Sends, Slot};
pub use locked::Locked;
pub use mailbox::{Mailbox, SenderId};
pub use region::Region;
pub use ringlet_core::layout::LANE_MAX_COUNT as SENDER_MAX_COUNT;
pub use service::{Connection, Listener, connect};

use ringlet_core::layout::{LANE_SLOT_MIN_COUNT, LaneGeometry};
use ringlet_core::queue::Refused;
use ringlet_linux::sys::Errno;
use std::time::Duration;

/// What flows through a service's connections.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum Kind {
    /// A stream of bytes each way: what was sent in one piece may be received in several.
    Bytes = 1,
    /// A queue of messages each way.
    Messages = 2,
    /// One buffer each way, for ends that take turns.
    Locked = 3,
    /// Queues of messages of many senders to one receiver.
    Mailbox = 4,
    /// Memory into which each end stores for the other, with doorbells.
    Region = 5,
    /// What carries Active Messages to other hosts: messages, to no program but by [`active_message`](crate::active_message).
    #[doc(hidden)]
    ActiveMessages = 6,
}

/// Who may connect to a service, and to whose service.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Peers {
    /// Processes of our own user, and root's.
    #[default]
    SameUser,
    /// Everybody in this network namespace. The two ends of a channel share a socket, and each descriptor that came may be one that its last
    /// close waits for: whoever is at the other end can hold up the end of this process for as long as he lives (no call of it).
    Any,
}

/// What a service offers and what a connection asks for. `kind` must agree; the sizes are the service's, `peers` and `spin_us` each end's
/// own.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Options {
    pub kind: Kind,
    pub peers: Peers,
    /// Messages that one direction holds at most, a power of two from 16 to 65,536. (It surely holds an eighth of them, at most 30,
    /// of up to 56 bytes, since the first slots are used again and again while the receiver keeps up.) A region has none.
    pub slot_count: usize,
    /// Bytes that one direction holds, a power of two from 4 KiB to 64 MiB. A message may take a quarter of it, at most 131,008.
    /// Of a region each end's part.
    pub ring_bytes: usize,
    /// How long a waiting call watches shared memory before it sleeps, in microseconds.
    pub spin_us: u64,
}

impl Options {
    pub fn new(kind: Kind) -> Options {
        Options {
            kind,
            peers: Peers::default(),
            slot_count: 1024,
            ring_bytes: 1 << 20,
            spin_us: ringlet::config::Config::default().spin_us,
        }
    }

    fn geometry(&self) -> Result<LaneGeometry, Error> {
        LaneGeometry::new(self.slot_count, self.ring_bytes).ok_or(Error::System(Errno::EINVAL))
    }

    /// With the sizes that its service uses.
    fn of_service(self) -> Options {
        match self.kind {
            Kind::Region => Options { slot_count: LANE_SLOT_MIN_COUNT, ..self },
            _ => self,
        }
    }
}

/// How long a call may wait; `None` for ever, zero not at all.
pub type Timeout = Option<Duration>;

/// Why a call did nothing. It can be made again later unless the text says otherwise.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Error {
    /// Nothing there, or no room, and the call was not to wait.
    WouldBlock,
    /// Nothing there, or no room, in all that time.
    TimedOut,
    /// A signal handler ran.
    Interrupted,
    /// The other end has closed, and all that it sent has been received. For good.
    Closed,
    /// The other end is gone without closing, and all that it sent has been received. For good.
    PeerDied,
    /// The other end wrote what no ringlet writes. For good: close, and connect again.
    PeerCorrupt,
    /// The message is longer than the channel takes.
    TooLong,
    /// The message that is next is longer than the buffer. It stays.
    BufferTooSmall,
    /// It is the other end's turn.
    NotOurTurn,
    /// The name belongs to, or a connection came from, a user that `Peers` does not admit, or the node service's policy.
    Refused,
    /// There is no node service here, or none of that name.
    Unreachable,
    /// What answers to that name is a service of another kind, or none of ours.
    OtherKind,
    /// What answers to that name is of another version of ringlet.
    OtherVersion,
    /// The kernel's.
    System(Errno),
}

impl Error {
    /// As an error number.
    pub fn errno(self) -> i32 {
        match self {
            Error::WouldBlock => libc::EAGAIN,
            Error::TimedOut => libc::ETIMEDOUT,
            Error::Interrupted => libc::EINTR,
            Error::Closed => libc::EPIPE,
            Error::PeerDied => libc::ECONNRESET,
            Error::PeerCorrupt => libc::EPROTO,
            Error::TooLong => libc::EMSGSIZE,
            Error::BufferTooSmall => libc::ENOBUFS,
            Error::NotOurTurn => libc::EBUSY,
            Error::Refused => libc::EACCES,
            Error::Unreachable => libc::EHOSTUNREACH,
            Error::OtherKind => libc::EPROTOTYPE,
            Error::OtherVersion => libc::EPROTONOSUPPORT,
            Error::System(errno) => errno.0,
        }
    }
}

impl std::fmt::Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        std::io::Error::from_raw_os_error(self.errno()).fmt(f)
    }
}

impl std::error::Error for Error {}

impl From<Errno> for Error {
    fn from(errno: Errno) -> Error {
        match errno {
            Errno::EINTR => Error::Interrupted,
            errno => Error::System(errno),
        }
    }
}

impl From<Refused> for Error {
    fn from(refused: Refused) -> Error {
        match refused {
            Refused::Full => Error::WouldBlock,
            Refused::TooLong => Error::TooLong,
        }
    }
}
