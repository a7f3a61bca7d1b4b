//! Processes that a spawn function has started, on this host or others: they come by themselves (`active_message::invitation`). What it has started
//! here are children of ours, since the program that called it has become us.

use std::net::{IpAddr, TcpListener};
use std::os::fd::{FromRawFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::Sender;
use std::thread;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::Pid;
use ringlet_messages::active_message::invitation::{Place, Secret, admit, greet, secret_from_text};

use crate::job::Event;

/// The secret of the job, in our environment.
pub const SECRET_ENVIRONMENT: &str = "RINGLET_AM_SECRET";
/// Strangers, and processes of the job, of whom we wait to hear who they are.
const NEW_MOST: usize = 256;
const LOOK: Duration = Duration::from_millis(10);

pub struct Arrivals {
    listener: TcpListener,
    secret: Secret,
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
        let (listener, secret, new) =
            (self.listener.try_clone()?, self.secret, Arc::new(AtomicUsize::new(0)));
        let comes = to.clone();
        thread::spawn(move || {
            while let Ok((socket, from)) = listener.accept() {
                // (The next ones wait in the kernel's queue. Who says nothing has its place for seconds only: `greet`.)
                while new.load(Ordering::Relaxed) >= NEW_MOST {
                    thread::sleep(LOOK);
                }
                new.fetch_add(1, Ordering::Relaxed);
                let (to, new) = (comes.clone(), new.clone());
                thread::spawn(move || {
                    if let Ok((socket, wanted)) = greet(socket, &secret) {
                        let _ = to.send(Event::Came(Comer { socket, wanted, from: from.ip() }));
                    }
                    new.fetch_sub(1, Ordering::Relaxed);
                });
            }
        });
        let to = to.clone();
        thread::spawn(move || {
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
        });
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
