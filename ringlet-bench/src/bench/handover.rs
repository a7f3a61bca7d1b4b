//! Two processes wake each other in turn, by nothing but a futex or an eventfd: what no hand-over between sleepers can be faster than.

#![allow(unsafe_code)]

use std::ptr;

use anyhow::{Result, bail};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::prctl;
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::waitpid;
use nix::unistd::{ForkResult, Pid, fork};
use ringlet_core::sync::{AtomicU32, Ordering};
use rustix::io::Errno;
use rustix::thread::futex;

use super::place::pin;
use super::spec::By;
use super::trips::RoundTrip;

pub struct HandOver {
    way: Way,
    turn: u32,
    far: Pid,
}

enum Way {
    /// Counted up by each in turn.
    Futex(&'static AtomicU32),
    Eventfd {
        there: EventFd,
        back: EventFd,
    },
}

impl Way {
    fn new(by: By) -> Result<Way> {
        let event = || EventFd::from_value_and_flags(0, EfdFlags::EFD_CLOEXEC);
        Ok(match by {
            By::Futex => Way::Futex(shared_word()?),
            By::Eventfd => Way::Eventfd { there: event()?, back: event()? },
        })
    }

    fn near(&self, turn: u32) -> Result<()> {
        match self {
            Way::Futex(word) => {
                tell(word, turn)?;
                await_turn(word, turn + 1)
            }
            Way::Eventfd { there, back } => {
                there.write(1)?;
                Ok(back.read().map(drop)?)
            }
        }
    }

    fn far(&self, turn: u32) -> Result<()> {
        match self {
            Way::Futex(word) => {
                await_turn(word, turn)?;
                tell(word, turn + 1)
            }
            Way::Eventfd { there, back } => {
                there.read()?;
                Ok(back.write(1).map(drop)?)
            }
        }
    }
}

fn tell(word: &AtomicU32, turn: u32) -> Result<()> {
    // ORDER: Release; pairs with `await_turn` of the other process, as a message would be passed.
    word.store(turn, Ordering::Release);
    futex::wake(word, futex::Flags::empty(), 1)?;
    Ok(())
}

fn await_turn(word: &AtomicU32, turn: u32) -> Result<()> {
    loop {
        // ORDER: Acquire; pairs with `tell` of the other process.
        let now = word.load(Ordering::Acquire);
        if now == turn {
            return Ok(());
        }
        match futex::wait(word, futex::Flags::empty(), now, None) {
            Ok(()) | Err(Errno::AGAIN | Errno::INTR) => {}
            Err(error) => bail!("futex: {error}"),
        }
    }
}

/// In memory that a fork shares; never unmapped.
fn shared_word() -> Result<&'static AtomicU32> {
    // SAFETY: new memory.
    let memory = unsafe {
        libc::mmap(
            ptr::null_mut(),
            size_of::<AtomicU32>(),
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED | libc::MAP_ANONYMOUS,
            -1,
            0,
        )
    };
    if memory == libc::MAP_FAILED {
        bail!("mmap: {}", std::io::Error::last_os_error());
    }
    // SAFETY: a page of zeroes that stays, and in which nothing else lies.
    Ok(unsafe { &*memory.cast() })
}

impl HandOver {
    /// The far end is a process of its own, which ends with us.
    pub fn new(by: By, cpus: Option<(usize, usize)>) -> Result<HandOver> {
        let way = Way::new(by)?;
        // SAFETY: no other thread runs here.
        if let ForkResult::Parent { child } = unsafe { fork() }? {
            let near = HandOver { way, turn: 1, far: child };
            if let Some((cpu, _)) = cpus {
                pin(&[cpu])?;
            }
            return Ok(near);
        }
        let serve = || -> Result<()> {
            prctl::set_pdeathsig(Signal::SIGKILL)?;
            if let Some((_, cpu)) = cpus {
                pin(&[cpu])?;
            }
            let mut turn = 1u32;
            loop {
                way.far(turn)?;
                turn = turn.wrapping_add(2);
            }
        };
        let _ = serve();
        // SAFETY: ends at once, and runs nothing that the parent has registered.
        unsafe { libc::_exit(1) }
    }
}

impl RoundTrip for HandOver {
    fn announce(&mut self, _count: u64) -> Result<()> {
        Ok(())
    }

    fn once(&mut self) -> Result<()> {
        self.way.near(self.turn)?;
        self.turn = self.turn.wrapping_add(2);
        Ok(())
    }

    fn path(&self) -> &'static str {
        "-"
    }
}

impl Drop for HandOver {
    fn drop(&mut self) {
        // It can be waited for once, and that is here.
        let _ = kill(self.far, Signal::SIGKILL);
        let _ = waitpid(self.far, None);
    }
}
