//! A parallel program: the processes that `ringlet am-run` has started together.

use super::state::raw;
use ringlet_linux::fd::{self, pollfd};
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// What the launcher tells each process: its number, how many there are, and the descriptor by which it is reached.
pub const RANK_ENVIRONMENT: &str = "RINGLET_AM_RANK";
pub const SIZE_ENVIRONMENT: &str = "RINGLET_AM_SIZE";
pub const DESCRIPTOR_ENVIRONMENT: &str = "RINGLET_AM_FD";

/// Bytes of one process in a `gather`, at most.
pub const GATHER_MAX_BYTES: usize = 1 << 20;
/// How long a process polls its own bundle only, and then between two looks.
const BUSY: Duration = Duration::from_micros(200);
const LOOK_NS: u64 = 1_000_000;

/// This process's place among them.
pub struct Job {
    rank: usize,
    size: usize,
    /// `None` in a job of one, which nobody has launched.
    launcher: Option<UnixStream>,
}

impl Job {
    /// A process that was not launched is a job of one.
    pub fn from_environment() -> io::Result<Job> {
        let variable = |name| std::env::var(name).ok();
        let Some(descriptor) = variable(DESCRIPTOR_ENVIRONMENT) else {
            return Ok(Job { rank: 0, size: 1, launcher: None });
        };
        let bad = || io::Error::new(io::ErrorKind::InvalidInput, "not what ringlet am-run sets");
        let number = |text: Option<String>| text?.parse::<usize>().ok();
        let rank = number(variable(RANK_ENVIRONMENT)).ok_or_else(bad)?;
        let size = number(variable(SIZE_ENVIRONMENT)).ok_or_else(bad)?;
        let descriptor = number(Some(descriptor)).ok_or_else(bad)? as i32;
        if rank >= size || !fd::is_open(descriptor) {
            return Err(bad());
        }
        let copy = fd::duplicate_high(descriptor, fd::HIDDEN_FROM).map_err(|_| bad())?;
        let launcher = UnixStream::from(super::state::own(copy));
        Ok(Job { rank, size, launcher: Some(launcher) })
    }

    pub fn rank(&self) -> usize {
        self.rank
    }

    pub fn size(&self) -> usize {
        self.size
    }

    /// Everybody's bytes, by rank, once everybody has called this. `meanwhile` polls.
    pub fn gather(&self, bytes: &[u8], mut meanwhile: impl FnMut()) -> io::Result<Vec<Vec<u8>>> {
        let Some(mut launcher) = self.launcher.as_ref() else {
            return Ok(vec![bytes.to_vec()]);
        };
        if bytes.len() > GATHER_MAX_BYTES {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        launcher.write_all(&(bytes.len() as u32).to_le_bytes())?;
        launcher.write_all(bytes)?;
        let socket = OwnedFd::from(launcher.try_clone()?);
        let start = Instant::now();
        loop {
            meanwhile();
            let mut fds = [pollfd { fd: raw(&socket), events: libc::POLLIN, revents: 0 }];
            let limit = if start.elapsed() < BUSY { 0 } else { LOOK_NS };
            if fd::poll(&mut fds, Some(limit), None) == Ok(1) {
                break;
            }
        }
        (0..self.size).map(|_| read_part(&mut launcher)).collect()
    }
}

/// A length and as many bytes, as either side sends them.
pub fn read_part(from: &mut impl Read) -> io::Result<Vec<u8>> {
    let mut len = [0; 4];
    from.read_exact(&mut len)?;
    let len = u32::from_le_bytes(len) as usize;
    if len > GATHER_MAX_BYTES {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut bytes = vec![0; len];
    from.read_exact(&mut bytes)?;
    Ok(bytes)
}
