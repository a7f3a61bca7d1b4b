//! Shows a disk, of this host or another one, to whatever speaks NBD (https://github.com/NetworkBlockDevice/nbd, doc/proto.md), at a Unix socket.
//!
//! WHY not a server with a plugin: there each request has a thread, which sleeps for its answer. Here a connection's requests are made as they come, many
//! at a time, and what is answered meanwhile goes back at once, straight from where the disk's server has put it (`connection`).
#![deny(unsafe_code)]

mod connection;
mod handshake;
mod wire;

use std::collections::VecDeque;
use std::io;
use std::net::Shutdown;
use std::os::fd::AsRawFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::ensure;
use ringlet_disk::{READERS, Reader, Source};
use ringlet_linux::{meet, sys};

use crate::wire::Agreed;

/// Connections at a time, with those that are not beyond their greeting yet: where there are as many, one of those makes way.
const CONNECTIONS: usize = 2 * READERS;
/// It has so long for that.
const MAKES_WAY: Duration = Duration::from_millis(100);
/// Where there is no descriptor, or thread, for another one it is tried again so soon.
const RETRY: Duration = Duration::from_millis(100);

/// Whether those that have gone have no requests any more is looked at so often.
const LOOK_AGAIN: Duration = Duration::from_millis(1);

/// A disk that is shown.
pub struct Export<'a> {
    source: Source,
    /// One that no connection has just now.
    idle: Mutex<Option<Reader>>,
    /// Those that have a reader; and those that have not yet, the oldest one first.
    served: Mutex<Vec<Arc<UnixStream>>>,
    greeted: Mutex<VecDeque<Arc<UnixStream>>>,
    connections: AtomicUsize,
    say: &'a (dyn Fn(&str) + Sync),
}

fn locked<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Export<'_> {
    /// With a seat for one connection, until it is given back.
    ///
    /// WHY it waits: a client that comes behind one that has gone, maybe one that was killed, may go by what is on the disk. What that one had asked for
    /// must not come later.
    fn reader(&self, stream: &Arc<UnixStream>) -> anyhow::Result<Reader> {
        let user = user(stream);
        loop {
            let mut served = locked(&self.served);
            if !served.iter().any(|other| has_gone(other)) {
                let is_trusted = user == Some(0) || user == Some(sys::geteuid());
                let held = served.iter().filter(|other| self::user(other) == user).count();
                ensure!(
                    is_trusted || has_share(held, served.len()),
                    "its user has as many connections as it may"
                );
                served.push(stream.clone());
                break;
            }
            drop(served);
            ensure!(!has_gone(stream), "it has gone");
            thread::sleep(LOOK_AGAIN);
        }
        let opened = || {
            ensure!(!has_gone(stream), "it has gone");
            let idle = locked(&self.idle).take();
            idle.map_or_else(|| self.source.open(), Ok)
        };
        let opened = opened().inspect_err(|_| self.forget(stream))?;
        self.is_met(stream);
        Ok(opened)
    }

    fn forget(&self, stream: &Arc<UnixStream>) {
        locked(&self.served).retain(|other| !Arc::ptr_eq(other, stream));
    }

    fn is_met(&self, stream: &Arc<UnixStream>) {
        locked(&self.greeted).retain(|other| !Arc::ptr_eq(other, stream));
    }

    /// A place for one more connection, if there is one.
    fn place(&self, stream: &Arc<UnixStream>) -> bool {
        // ORDER: Relaxed: a count, to which this thread alone adds.
        let is_full = || self.connections.load(Ordering::Relaxed) >= CONNECTIONS;
        if is_full() {
            // (Whoever says nothing would keep everybody else out; and who has something to say has said it soon.)
            let mut greeted = locked(&self.greeted);
            let users: Vec<_> = greeted.iter().map(|each| user(each)).collect();
            if let Some(met) = makes_way(&users).and_then(|at| greeted.remove(at)) {
                let _ = met.shutdown(Shutdown::Both);
            }
            drop(greeted);
            let began = Instant::now();
            while is_full() && began.elapsed() < MAKES_WAY {
                thread::sleep(LOOK_AGAIN);
            }
        }
        let has_place = !is_full();
        if has_place {
            self.connections.fetch_add(1, Ordering::Relaxed);
            locked(&self.greeted).push_back(stream.clone());
        }
        has_place
    }

    fn end(&self, stream: &Arc<UnixStream>) {
        self.is_met(stream);
        self.connections.fetch_sub(1, Ordering::Relaxed);
    }

    fn meet(&self, stream: &Arc<UnixStream>) -> io::Result<()> {
        let serve = |(reader, agreed): (Reader, Agreed)| {
            let done = connection::serve(stream, &reader, agreed, self.say);
            let before = locked(&self.idle).replace(reader);
            drop(before);
            done
        };
        let met = handshake::handshake(stream, &self.source, || self.reader(stream));
        let done = met.and_then(|reader| reader.map_or(Ok(()), serve));
        self.forget(stream);
        done
    }
}

/// The client's.
fn user(stream: &UnixStream) -> Option<u32> {
    meet::credentials(stream.as_raw_fd()).ok().map(|who| who.uid)
}

/// Of those who have not said all yet, the oldest one first, the oldest of the user who has most: so nobody drives others out by coming again and again.
fn makes_way(users: &[Option<u32>]) -> Option<usize> {
    let count = |user: &Option<u32>| users.iter().filter(|other| *other == user).count();
    let most = users.iter().rev().max_by_key(|user| count(user))?;
    users.iter().position(|user| user == most)
}

/// Whoever is silent keeps a seat: another user gets no more of them than it leaves to all others.
fn has_share(held: usize, all: usize) -> bool {
    held < READERS.saturating_sub(all)
}

/// Has it been closed by who had it?
fn has_gone(stream: &UnixStream) -> bool {
    let mut look = libc::pollfd { fd: stream.as_raw_fd(), events: 0, revents: 0 };
    // SAFETY: one that is there for this call.
    #[allow(unsafe_code)]
    let found = unsafe { libc::poll(&raw mut look, 1, 0) };
    found == 1 && look.revents & libc::POLLHUP != 0
}

/// Shows a disk to all that connect, each with a seat of its own, for ever; `say` is told what they can only be told a number of.
pub fn serve(listener: &UnixListener, disk: Reader, say: &(dyn Fn(&str) + Sync)) -> ! {
    let (source, connections) = (disk.source(), AtomicUsize::new(0));
    let (idle, served, greeted) = (Mutex::new(Some(disk)), Mutex::default(), Mutex::default());
    let export = Export { source, idle, served, greeted, connections, say };
    // WHY: what a client passes would be closed by us, which can take as long as it likes.
    meet::admit_descriptors(listener.as_raw_fd(), false);
    thread::scope(|scope| {
        loop {
            let Ok((stream, _)) = listener.accept() else {
                thread::sleep(RETRY);
                continue;
            };
            let (export, stream) = (&export, Arc::new(stream));
            if !export.place(&stream) {
                continue;
            }
            let met = stream.clone();
            let meets = move || {
                // (What a client does wrong ends its connection.)
                let _ = export.meet(&met);
                export.end(&met);
            };
            if thread::Builder::new().spawn_scoped(scope, meets).is_err() {
                export.end(&stream);
            }
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One comes again and again while another one is being greeted.
    #[test]
    fn who_comes_again_and_again_drives_out_nobody_else() {
        let mut greeted = vec![Some(1), Some(2), Some(2), Some(3)];
        for _ in 0..1000 {
            let at = makes_way(&greeted).unwrap();
            assert_eq!(greeted.remove(at), Some(2));
            greeted.push(Some(2));
        }
        assert_eq!((makes_way(&[Some(1), Some(2)]), makes_way(&[])), (Some(0), None));
    }

    /// However many users take all that they get, another one gets a seat.
    #[test]
    fn one_user_leaves_seats_to_others() {
        let takes = |all: usize| (0..).find(|held| !has_share(*held, all + held)).unwrap();
        let (mut all, mut took) = (0, Vec::new());
        for _ in 0..4 {
            took.push(takes(all));
            all += took.last().unwrap();
        }
        assert_eq!(took[0], READERS / 2);
        assert!(took.iter().all(|took| *took > 0) && all < READERS, "{took:?}");
    }
}
