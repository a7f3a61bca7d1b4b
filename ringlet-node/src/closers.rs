//! Closing what guests have handed over. KERNEL: whoever closes a descriptor last waits for what that costs (a socket that lingers, a file of a FUSE
//! daemon), as long as its owner likes. So each user's are closed by a thread of that user's own, one after the other.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};
use std::thread;
use std::time::Duration;

/// Users whose descriptors are being closed at a time, and descriptors of one that may wait for that.
const USERS: usize = 256;
const OF_ONE: usize = 256;
/// A thread with nothing to do ends.
const IDLE: Duration = Duration::from_secs(10);
const STACK_BYTES: usize = 64 << 10;

#[derive(Default)]
pub struct Closers {
    users: HashMap<Option<u32>, SyncSender<OwnedFd>>,
}

impl Closers {
    /// Closes it, apart. Gives it back if too many wait already, of this user or of all.
    pub fn close(&mut self, user: Option<u32>, mut fd: OwnedFd) -> Result<(), OwnedFd> {
        // (A thread that has ended meanwhile gives it back once.)
        for _ in 0..2 {
            let Some(closer) = self.closer(user) else { return Err(fd) };
            match closer.try_send(fd) {
                Ok(()) => return Ok(()),
                Err(TrySendError::Full(back)) => return Err(back),
                Err(TrySendError::Disconnected(back)) => fd = back,
            }
            self.users.remove(&user);
        }
        Err(fd)
    }

    fn closer(&mut self, user: Option<u32>) -> Option<&SyncSender<OwnedFd>> {
        if !self.users.contains_key(&user) {
            if self.users.len() >= USERS {
                return None;
            }
            let (to, from) = sync_channel(OF_ONE);
            let close_each = move || {
                while let Ok(fd) = from.recv_timeout(IDLE) {
                    drop::<OwnedFd>(fd);
                }
            };
            thread::Builder::new()
                .name("closer".to_owned())
                .stack_size(STACK_BYTES)
                .spawn(close_each)
                .ok()?;
            self.users.insert(user, to);
        }
        self.users.get(&user)
    }

    /// Forgets those users of whom nothing was closed for a while.
    pub fn forget_the_idle(&mut self) {
        // (What is sent here is nothing: a thread that has ended takes none.)
        self.users.retain(|_, closer| closer_lives(closer));
    }
}

fn closer_lives(closer: &SyncSender<OwnedFd>) -> bool {
    let null = std::fs::File::open("/dev/null").map(OwnedFd::from);
    null.is_ok_and(|null| !matches!(closer.try_send(null), Err(TrySendError::Disconnected(_))))
}
