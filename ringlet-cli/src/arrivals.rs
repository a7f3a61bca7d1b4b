//! Processes that a spawn function has started, on this host or others: they come by themselves (`active_message::invitation`). What it has started
//! here are children of ours, since the program that called it has become us.

use std::collections::VecDeque;
use std::io::ErrorKind;
use std::net::{IpAddr, TcpListener, TcpStream};
use std::os::fd::{FromRawFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::Sender;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::Pid;
use ringlet_messages::active_message::invitation::{
    GREETING_BYTES, GREETING_LIMIT, Place, Secret, admit, greet, secret_from_text,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::RecvFlags;

use crate::job::{Event, thread};

/// The secret of the job, in our environment.
pub const SECRET_ENVIRONMENT: &str = "RINGLET_AM_SECRET";
/// Strangers, and processes of the job, of whom we wait to hear who they are.
const NEW_MOST: usize = 256;
const LOOK: Timespec = Timespec { tv_sec: 0, tv_nsec: 10_000_000 };

pub struct Arrivals {
    listener: TcpListener,
    secret: Secret,
}

/// One that has not said yet who it is.
struct New {
    socket: TcpStream,
    from: IpAddr,
    since: Instant,
}

impl New {
    /// So much of it.
    fn said(&self) -> Option<usize> {
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        match rustix::net::recv(&self.socket, &mut [0; GREETING_BYTES], flags) {
            Ok((1.., said)) => Some(said.min(GREETING_BYTES)),
            Err(Errno::AGAIN) => Some(0),
            _ => None,
        }
    }
}

/// One that has come.
pub struct Comer {
    socket: UnixStream,
    wanted: Option<usize>,
    from: IpAddr,
}

impl Arrivals {
    /// By the library: the descriptor of a listener, and the secret.
    #[allow(unsafe_code)]
    pub fn new(descriptor: RawFd) -> anyhow::Result<Arrivals> {
        let text = std::env::var(SECRET_ENVIRONMENT).context("this option is the library's")?;
        // SAFETY: no other thread runs yet.
        unsafe { std::env::remove_var(SECRET_ENVIRONMENT) };
        let secret = secret_from_text(&text).context("no secret")?;
        ensure!(descriptor > 2, "no listener");
        // SAFETY: the library has opened it for us.
        let listener = unsafe { TcpListener::from_raw_fd(descriptor) };
        listener.local_addr().context("no listener")?;
        rustix::io::fcntl_setfd(&listener, rustix::io::FdFlags::CLOEXEC)?;
        Ok(Arrivals { listener, secret })
    }

    /// Hears who comes, and of the ends of our children.
    pub fn begin(&self, to: &Sender<Event>) -> anyhow::Result<()> {
        let (listener, secret, comes) = (self.listener.try_clone()?, self.secret, to.clone());
        listener.set_nonblocking(true)?;
        thread(move || {
            let mut new: VecDeque<New> = VecDeque::new();
            loop {
                let pause = (!new.is_empty()).then_some(LOOK);
                let _ = poll(&mut [PollFd::new(&listener, PollFlags::IN)], pause.as_ref());
                match listener.accept() {
                    Ok((socket, from)) => {
                        // WHY the one who has been silent longest: a process of the job says at once who it is, so that strangers, be they
                        // many, can't keep it out.
                        if new.len() >= NEW_MOST {
                            new.pop_front();
                        }
                        new.push_back(New { socket, from: from.ip(), since: Instant::now() });
                    }
                    Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                    // Nobody else is to come.
                    Err(error) if error.kind() == ErrorKind::InvalidInput => break,
                    // (No descriptor is free: one will be.)
                    Err(_) => thread::sleep(Duration::from_millis(10)),
                }
                for _ in 0..new.len() {
                    let Some(each) = new.pop_front() else { break };
                    match each.said() {
                        Some(GREETING_BYTES) => {
                            if let Ok((socket, wanted)) = greet(each.socket, &secret) {
                                let _ = comes.send(Event::Came(Comer {
                                    socket,
                                    wanted,
                                    from: each.from,
                                }));
                            }
                        }
                        // (None: it has gone.)
                        Some(_) if each.since.elapsed() < GREETING_LIMIT => new.push_back(each),
                        _ => {}
                    }
                }
            }
        })?;
        let to = to.clone();
        thread(move || {
            loop {
                let ended = match waitpid(Pid::from_raw(-1), None) {
                    Ok(WaitStatus::Exited(_, code)) => Event::Child(code as u8),
                    Ok(WaitStatus::Signaled(_, signal, _)) => Event::Child(128 + signal as u8),
                    Ok(_) | Err(nix::errno::Errno::EINTR) => continue,
                    Err(_) => Event::NoChild,
                };
                let is_last = matches!(ended, Event::NoChild);
                if to.send(ended).is_err() || is_last {
                    break;
                }
            }
        })?;
        Ok(())
    }

    /// Nobody else is to come.
    fn close(&self) {
        // KERNEL: who accepts from it is woken.
        let _ = rustix::net::shutdown(&self.listener, rustix::net::Shutdown::Read);
    }

    /// All have come: gives each its place, in the order of their ranks. Those of one host are neighbours unless they want otherwise.
    pub fn seat(&self, mut comers: Vec<Comer>) -> anyhow::Result<Vec<UnixStream>> {
        self.close();
        let size = comers.len();
        match comers.iter().filter(|comer| comer.wanted.is_some()).count() {
            0 => comers.sort_by_key(|comer| comer.from),
            all if all == size => comers.sort_by_key(|comer| comer.wanted),
            _ => bail!(
                "some of the processes want a rank (WORKER_RANK, AMUDP_SPMDSetProc), and others do not"
            ),
        }
        let environment: Vec<u8> = std::env::vars_os()
            .flat_map(|(name, value)| [name.as_bytes(), b"=", value.as_bytes(), b"\0"].concat())
            .collect();
        let mut seated = Vec::new();
        for (rank, mut comer) in comers.into_iter().enumerate() {
            let is_right = comer.wanted.is_none_or(|wanted| wanted == rank);
            ensure!(is_right, "the ranks that the processes want are not 0 to {}", size - 1);
            let place = Place { rank, size, environment: environment.clone() };
            admit(&mut comer.socket, &place).context("a process has gone before the job began")?;
            seated.push(comer.socket);
        }
        Ok(seated)
    }
}

/// Our children: what the spawn function has started here, a client of ssh for example.
pub fn signal_children(signal: Signal) {
    let Ok(tasks) = std::fs::read_dir("/proc/self/task") else { return };
    for task in tasks.flatten() {
        let children = std::fs::read_to_string(task.path().join("children")).unwrap_or_default();
        for pid in children.split_whitespace().filter_map(|pid| pid.parse().ok()) {
            let _ = kill(Pid::from_raw(pid), signal);
        }
    }
}
