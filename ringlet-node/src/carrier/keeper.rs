//! The keeper: the service can start no process any more when it serves, and end none. One keeps carriers going, another what carries to other hosts
//! (`crate::fabric`), a third one what reflects memory (`crate::reflect`).

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, ensure};
use ringlet_linux::sys::Errno;
use ringlet_linux::{fd, meet};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use super::{Kill, Started, WORD_BYTES};
use crate::{sandbox, slice};

/// How it, and what it starts, are called: `ringlet node keep WORD`, `ringlet node WORD`.
pub const KEEP: &str = "keep";
pub const CARRY: &str = "carry";
pub const FABRIC: &str = "fabric";
pub const REFLECT: &str = "reflect";
/// A process that died is followed by the next one after so long, and the first one comes in so long.
const PAUSE_NS: u64 = 1_000_000_000;
const PATIENCE_NS: u64 = 20_000_000_000;
/// Who has not answered by so many looks, which are a second apart or more, hangs: less than its programs wait for it. (Looks, and not seconds: a machine
/// that stood still takes one.)
const LOOKS_MOST: u32 = 4;

/// A keeper, and the process that it has started last.
pub struct Kept {
    keeper: OwnedFd,
    process: Option<(OwnedFd, u32)>,
    /// Looks since it was asked something that it has not answered.
    unanswered: Option<u32>,
}

/// What is to be done about that process.
#[derive(PartialEq, Eq, Debug)]
pub enum Look {
    Fine,
    /// It is to be asked.
    Ask,
    /// It hangs, and is being ended.
    Hangs(u32),
}

/// What became of that process.
#[derive(PartialEq, Eq, Debug)]
pub enum Word {
    None,
    Started(u32),
    KeeperLost,
}

impl Kept {
    /// Starts the keeper, before the service gives up the right to.
    pub fn start(word: &str) -> anyhow::Result<Kept> {
        let (ours, _keeper) = start_ours(&[KEEP, word])?;
        let mut kept = Kept::by(ours);
        let mut fds = [fd::pollfd { fd: kept.keeper(), events: libc::POLLIN, revents: 0 }];
        let _ = fd::poll(&mut fds, Some(PATIENCE_NS), None);
        kept.hear();
        ensure!(kept.process.is_some(), "`ringlet node {word}` can't be started");
        Ok(kept)
    }

    pub fn by(keeper: OwnedFd) -> Kept {
        Kept { keeper, process: None, unanswered: None }
    }

    pub fn keeper(&self) -> i32 {
        self.keeper.as_raw_fd()
    }

    pub fn process(&self) -> Option<i32> {
        self.process.as_ref().map(|(socket, _)| socket.as_raw_fd())
    }

    pub fn pid(&self) -> Option<u32> {
        self.process.as_ref().map(|(_, pid)| *pid)
    }

    /// The process has gone, or is no longer to be heard: then it is ended.
    pub fn forget(&mut self) {
        self.kill();
        (self.process, self.unanswered) = (None, None);
    }

    fn kill(&self) {
        let pid = self.pid().and_then(|pid| serde_json::to_vec(&Kill { pid }).ok());
        // (A keeper that does not read has others to be ended first.)
        pid.map(|pid| meet::send(self.keeper(), &pid, &[]));
    }

    pub fn answered(&mut self) {
        self.unanswered = None;
    }

    /// Does it go on? Asked once a second at most, while it has something to do.
    pub fn look(&mut self) -> Look {
        let Some(pid) = self.pid() else { return Look::Fine };
        let looks = self.unanswered.map_or(0, |looks| looks + 1);
        self.unanswered = Some(looks);
        match looks {
            0 => Look::Ask,
            LOOKS_MOST => {
                self.kill();
                Look::Hangs(pid)
            }
            _ => Look::Fine,
        }
    }

    /// The keeper says something: there is another process.
    pub fn hear(&mut self) -> Word {
        let mut bytes = [0; WORD_BYTES];
        let (len, mut fds) = match meet::receive(self.keeper(), &mut bytes) {
            Err(Errno::EAGAIN) => return Word::None,
            Ok((len @ 1.., fds)) => (len, fds),
            _ => return Word::KeeperLost,
        };
        let started = serde_json::from_slice::<Started>(&bytes[..len]);
        let Ok(started) = started else { return Word::None };
        let Some(socket) = fds.take(0) else { return Word::None };
        // SAFETY: the kernel has just given it to us.
        let socket = unsafe { OwnedFd::from_raw_fd(socket) };
        (self.process, self.unanswered) = (Some((socket, started.pid)), None);
        Word::Started(started.pid)
    }
}

/// One of this program's own processes, whose standard input is the other end of a socket of ours.
fn start_ours(words: &[&str]) -> anyhow::Result<(OwnedFd, Child)> {
    let pair = meet::pair().map_err(|error| std::io::Error::from_raw_os_error(error.0))?;
    // SAFETY: made just now, ours alone.
    let [ours, theirs] = pair.map(|fd| unsafe { OwnedFd::from_raw_fd(fd) });
    let mut command = Command::new("/proc/self/exe");
    // (What ends the service by its terminal is not to end what is carried.)
    command
        .process_group(0)
        .arg("node")
        .args(words)
        .env_clear()
        .stdin(theirs)
        .stdout(Stdio::null());
    Ok((ours, command.spawn().context("a process for what is carried can't be started")?))
}

/// What the keeper does, until the service has gone. (A carrier that lives goes on with what it carries.)
pub fn keep(word: &str) -> anyhow::Result<()> {
    let service = by_whom_it_was_started();
    slice::shorten();
    // (What reflects marks its socket, and gives the right to that up.)
    sandbox::give_up_rights_but_marking(word == REFLECT)?;
    loop {
        // (There may be too many processes just now.)
        let Ok((ours, mut carrier)) = start_ours(&[word]) else {
            if await_service(&service, None, Some(PAUSE_NS)) == Heard::Gone {
                return Ok(());
            }
            continue;
        };
        let started = serde_json::to_vec(&Started { pid: carrier.id() })?;
        if meet::send(service.as_raw_fd(), &started, &[ours.as_raw_fd()]).is_err() {
            return Ok(());
        }
        drop(ours);
        let process = Pid::from_raw(carrier.id() as i32)
            .and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok())
            .context("pidfd_open")?;
        loop {
            match await_service(&service, Some(&process), None) {
                Heard::Gone => return Ok(()),
                Heard::Nothing => break,
                // (It is not waited for yet, so that its number is no other's.)
                Heard::Kill(pid) if pid == carrier.id() => {
                    pidfd_send_signal(&process, Signal::KILL).context("pidfd_send_signal")?;
                }
                Heard::Kill(_) => {}
            }
        }
        carrier.wait()?;
        if await_service(&service, None, Some(PAUSE_NS)) == Heard::Gone {
            return Ok(());
        }
    }
}

#[derive(PartialEq, Eq, Debug)]
enum Heard {
    /// The process has ended, or the time is over.
    Nothing,
    Gone,
    Kill(u32),
}

/// Waits until the service says something or has gone, or this process has ended, or the time is over.
fn await_service(service: &OwnedFd, process: Option<&OwnedFd>, patience_ns: Option<u64>) -> Heard {
    let pollfd = |fd: i32| fd::pollfd { fd, events: libc::POLLIN, revents: 0 };
    let process = process.map_or(-1, |process| process.as_fd().as_raw_fd());
    let mut fds = [pollfd(service.as_raw_fd()), pollfd(process)];
    let _ = fd::poll(&mut fds, patience_ns, None);
    if fds[0].revents == 0 {
        return Heard::Nothing;
    }
    let mut bytes = [0; WORD_BYTES];
    match meet::receive(service.as_raw_fd(), &mut bytes) {
        Ok((len @ 1.., _)) => serde_json::from_slice(&bytes[..len])
            .map_or(Heard::Kill(0), |Kill { pid }| Heard::Kill(pid)),
        _ => Heard::Gone,
    }
}

/// The socket to who has started this process. Nothing else of its is kept open, and nothing of it is handed on.
pub(crate) fn by_whom_it_was_started() -> OwnedFd {
    // SAFETY: nobody has opened anything yet but who has started us.
    unsafe { libc::syscall(libc::SYS_close_range, 3, u32::MAX, 0) };
    // (The service reads its policy again by it, which a service manager may send to all of the service's processes.)
    // SAFETY: no handler.
    unsafe { libc::signal(libc::SIGHUP, libc::SIG_IGN) };
    // SAFETY: standard input is ours, and nobody reads it.
    let socket = unsafe { fd::duplicate_high(0, 3).map(|fd| OwnedFd::from_raw_fd(fd)) };
    if let (Ok(socket), Ok(null)) = (socket, File::open("/dev/null")) {
        fd::replace(0, null.as_raw_fd());
        return socket;
    }
    std::process::exit(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_does_not_answer_hangs_and_who_does_goes_on() {
        // SAFETY: made just now, ours alone.
        let pair = || meet::pair().unwrap().map(|fd| unsafe { OwnedFd::from_raw_fd(fd) });
        let ([ours, keeper], [to, _process]) = (pair(), pair());
        let mut kept = Kept::by(ours);
        assert_eq!(kept.look(), Look::Fine, "nobody is there");
        let started = serde_json::to_vec(&Started { pid: 7 }).unwrap();
        meet::send(keeper.as_raw_fd(), &started, &[to.as_raw_fd()]).unwrap();
        assert_eq!(kept.hear(), Word::Started(7));
        for _ in 0..2 {
            assert_eq!(kept.look(), Look::Ask);
            for _ in 1..LOOKS_MOST {
                assert_eq!(kept.look(), Look::Fine);
            }
            kept.answered();
        }
        assert_eq!(kept.look(), Look::Ask);
        (1..LOOKS_MOST).for_each(|_| assert_eq!(kept.look(), Look::Fine));
        assert_eq!(await_service(&keeper, None, Some(0)), Heard::Nothing);
        assert_eq!(kept.look(), Look::Hangs(7));
        assert_eq!(await_service(&keeper, None, None), Heard::Kill(7));
        assert_eq!(kept.look(), Look::Fine, "said once");
        kept.forget();
        assert_eq!(await_service(&keeper, None, None), Heard::Kill(7));
        drop(kept);
        assert_eq!(await_service(&keeper, None, None), Heard::Gone);
    }
}
