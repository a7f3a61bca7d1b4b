//! Shows a disk, of this host or another one, to whatever speaks NBD (https://github.com/NetworkBlockDevice/nbd, doc/proto.md), at a Unix socket.
//!
//! WHY not a server with a plugin: there each request has a thread, which sleeps for its answer. Here a connection's requests are made as they come, many
//! at a time, and what is answered meanwhile goes back at once, straight from where the disk's server has put it (`connection`).
#![deny(unsafe_code)]

mod connection;
mod handshake;

use std::io;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use ringlet_disk::{READERS, Reader, Source};

/// Connections at a time, with those that are not beyond their greeting yet.
const CONNECTIONS: usize = 2 * READERS;
/// Where there is no descriptor, or thread, for another one it is tried again so soon.
const RETRY: Duration = Duration::from_millis(100);

/// A disk that is shown.
pub struct Export<'a> {
    source: Source,
    /// One that no connection has just now.
    idle: Mutex<Option<Reader>>,
    connections: AtomicUsize,
    say: &'a (dyn Fn(&str) + Sync),
}

impl Export<'_> {
    /// With a seat for one connection.
    fn reader(&self) -> anyhow::Result<Reader> {
        let idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner).take();
        idle.map_or_else(|| self.source.open(), Ok)
    }

    fn give_back(&self, reader: Reader) {
        *self.idle.lock().unwrap_or_else(PoisonError::into_inner) = Some(reader);
    }

    fn meet(&self, stream: &UnixStream) -> io::Result<()> {
        if let Some(reader) = handshake::handshake(stream, self)? {
            let done = connection::serve(stream, &reader, self.say);
            self.give_back(reader);
            done?;
        }
        Ok(())
    }
}

/// Shows a disk to all that connect, each with a seat of its own, for ever; `say` is told what they can only be told a number of.
pub fn serve(listener: &UnixListener, disk: Reader, say: &(dyn Fn(&str) + Sync)) -> ! {
    let (source, connections) = (disk.source(), AtomicUsize::new(0));
    let export = Export { source, idle: Mutex::new(Some(disk)), connections, say };
    thread::scope(|scope| {
        loop {
            let Ok((stream, _)) = listener.accept() else {
                thread::sleep(RETRY);
                continue;
            };
            // ORDER: Relaxed: a count.
            if export.connections.fetch_add(1, Ordering::Relaxed) >= CONNECTIONS {
                export.connections.fetch_sub(1, Ordering::Relaxed);
                continue;
            }
            let export = &export;
            let meets = move || {
                // (What a client does wrong ends its connection.)
                let _ = export.meet(&stream);
                export.connections.fetch_sub(1, Ordering::Relaxed);
            };
            if thread::Builder::new().spawn_scoped(scope, meets).is_err() {
                export.connections.fetch_sub(1, Ordering::Relaxed);
            }
        }
    })
}
