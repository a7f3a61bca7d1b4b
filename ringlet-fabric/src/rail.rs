//! What carries between hosts, and nothing of what it means.
//!
//! A `Rail` is one endpoint on one network. It promises little, as real fabrics do: a message or a write that is taken either is done
//! once or fails, and what is done is done in any order. Only `Event::Noticed` says that a write has arrived; `Event::Done` says that its
//! memory, or that of a message, may be used again. (A message can be lost behind that, without another word: with a connection that ends.)

use std::io;
use std::os::fd::BorrowedFd;

/// The most that a message has.
pub const MESSAGE_BYTES: usize = 8192;

/// Another node's endpoint, as this rail numbers it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Peer(pub u32);

/// Memory of ours, as this rail numbers it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Region(pub u32);

/// What another node needs in order to write to a region: to be passed to it. Offsets count from `base`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Grant {
    pub key: u64,
    pub base: u64,
}

#[derive(Debug)]
pub enum Refused {
    /// There is no room now: poll, and try again.
    Full,
    /// The rail, or the way to this peer, does not work (any more).
    Failed(io::Error),
}

/// What `Rail::poll` tells. `token` is what was given with the write or the message.
pub enum Event<'a> {
    Done {
        token: u64,
    },
    Failed {
        token: u64,
        error: io::Error,
    },
    /// A write of another node's has arrived, all of it.
    Noticed {
        notice: u32,
    },
    Message(&'a [u8]),
    /// The rail as a whole has failed.
    Broken(io::Error),
}

/// (It may be opened and closed, which can take long, by another thread than uses it.)
pub trait Rail: Send {
    /// By which other nodes reach us: to be passed to them.
    fn name(&self) -> &[u8];
    /// Does only what members of the cluster send reach its provider? If not, whoever reaches its address has the provider's own care for strangers to break.
    fn is_guarded(&self) -> bool {
        true
    }
    /// Makes an endpoint of this name (hostile input) a peer. It need not be there yet.
    fn reach(&mut self, name: &[u8]) -> io::Result<Peer>;
    fn forget(&mut self, peer: Peer);
    /// Other nodes may write to this memory from now on, who have its grant; and `write` may take from it.
    ///
    /// # Safety
    /// It stays mapped until `withdraw` returns; and it is shared memory, which others change at any time.
    unsafe fn register(&mut self, at: *mut u8, bytes: usize) -> io::Result<(Region, Grant)>;
    /// Memory that `write` may take from, and no other node may write to.
    ///
    /// # Safety
    /// It stays mapped until `withdraw` returns.
    unsafe fn register_source(&mut self, at: *mut u8, bytes: usize) -> io::Result<Region>;
    /// Nothing is written to it any more, nor taken from it, once this returns.
    fn withdraw(&mut self, region: Region);
    /// Writes `bytes` from `at` in a region of ours to `offset` in what was granted, with a notice there.
    #[allow(clippy::too_many_arguments)]
    fn write(
        &mut self,
        to: Peer,
        from: Region,
        at: usize,
        bytes: usize,
        grant: Grant,
        offset: u64,
        notice: u32,
        token: u64,
    ) -> Result<(), Refused>;
    /// A message of `MESSAGE_BYTES` at most, copied before this returns.
    fn send(&mut self, to: Peer, message: &[u8], token: u64) -> Result<(), Refused>;
    /// Does a `poll` that finds nothing make system calls?
    fn is_dear(&self) -> bool {
        false
    }
    /// Makes progress, and tells what has come of it, within bounds. Never waits.
    fn poll(&mut self, tell: &mut dyn FnMut(Event<'_>));
    /// Is readable when `poll` has something to do; may be slept on after `may_sleep`.
    fn fd(&self) -> BorrowedFd<'_>;
    /// False: there is something to be polled first.
    fn may_sleep(&mut self) -> bool;
}
