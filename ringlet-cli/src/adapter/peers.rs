//! Who comes to the adapter, and stays.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use ringlet::handshake::ROOM_BYTES;
use ringlet::interconnect::introduction::{GREETING, Message};
use ringlet_adapter::Progress;
use ringlet_linux::meet;
use ringlet_linux::sys::{self, Errno};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use super::borrowed;
use super::link::{Adapter, Links, Place};

/// Who has come and not yet asked for anything: so many at most, for so long.
const STRANGERS_MOST: usize = 1024;
const ASK_IN: Duration = Duration::from_secs(5);
/// Who comes while the others wait.
const ACCEPTED_AT_ONCE: usize = 64;
const LISTENER: u32 = 0;

enum Peer {
    /// It has been greeted, and says nothing yet; since when, and its pid.
    Greeted(i32, Instant, i32),
    /// An end's lifeline.
    Linked(i32, Place),
    /// Its link is over, and its lifeline is still open there.
    Parted(i32),
    /// A program's process, and its pid.
    Program(OwnedFd, i32),
}

pub struct Peers {
    listener: i32,
    peers: HashMap<u32, Peer>,
    /// How many there may be.
    most: usize,
    next: u32,
    forgotten: Instant,
}

impl Peers {
    /// No more than so many.
    pub fn new(listener: i32, most: usize, adapter: &mut Adapter) -> anyhow::Result<Peers> {
        adapter.watch(borrowed(listener), LISTENER)?;
        let peers = HashMap::new();
        Ok(Peers { listener, peers, most, next: LISTENER + 1, forgotten: Instant::now() })
    }

    pub fn is_empty(&self) -> bool {
        self.peers.is_empty()
    }

    pub fn ready(&mut self, token: u32, adapter: &mut Adapter, links: &mut Links) {
        match self.peers.remove(&token) {
            None if token == LISTENER => self.accept(adapter),
            None => {}
            Some(Peer::Greeted(lifeline, since, pid)) => {
                let mut bytes = [0; ROOM_BYTES];
                let next = match meet::take(lifeline, &mut bytes) {
                    Err(Errno::EAGAIN) => Some(Peer::Greeted(lifeline, since, pid)),
                    // `ringlet run` has become the program.
                    Ok(taken) if taken.caller.is_none() => {
                        self.watch(pid, adapter);
                        None
                    }
                    Ok(mut taken) if taken.caller.is_some() && !taken.fds.truncated => {
                        Message::read(&bytes[..taken.len])
                            .ok()
                            .and_then(|asked| links.request(adapter, &asked, &mut taken.fds))
                            .map(|(place, answer, fds)| {
                                // (Who does not get it goes, and that is heard.)
                                let _ = meet::send(lifeline, answer.frame().as_bytes(), &fds);
                                Peer::Linked(lifeline, place)
                            })
                    }
                    _ => None,
                };
                match next {
                    Some(peer) => drop(self.peers.insert(token, peer)),
                    None => part(lifeline, adapter),
                }
            }
            // Nothing is said any more: it has gone.
            Some(Peer::Linked(lifeline, place)) => {
                part(lifeline, adapter);
                links.gone(adapter, place);
            }
            Some(Peer::Parted(lifeline)) => part(lifeline, adapter),
            Some(Peer::Program(process, _)) => drop(adapter.unwatch(&process)),
        }
    }

    /// What serves these ends is over. If it can't go on, it is so for them as if we had died.
    pub fn end(&mut self, ends: &[Place], progress: Progress, adapter: &mut Adapter) {
        self.peers.retain(|_, peer| {
            let Peer::Linked(lifeline, place) = *peer else { return true };
            let ends = ends.contains(&place);
            if ends {
                *peer = Peer::Parted(lifeline);
            }
            let broken = ends && progress == Progress::Failed;
            if broken {
                part(lifeline, adapter);
            }
            !broken
        });
    }

    /// Now and then.
    pub fn forget_the_silent(&mut self, adapter: &mut Adapter) {
        if self.forgotten.elapsed() < ASK_IN {
            return;
        }
        self.forgotten = Instant::now();
        self.peers.retain(|_, peer| match *peer {
            Peer::Greeted(lifeline, since, _) if since.elapsed() > ASK_IN => {
                part(lifeline, adapter);
                false
            }
            _ => true,
        });
    }

    /// Strangers are refused before anything that they say is looked at.
    fn accept(&mut self, adapter: &mut Adapter) {
        let mut strangers =
            self.peers.values().filter(|peer| matches!(peer, Peer::Greeted(..))).count();
        for _ in 0..ACCEPTED_AT_ONCE {
            let Ok(came) = meet::accept_in_sight(self.listener) else { return };
            let who = meet::credentials(came)
                .ok()
                .filter(|who| who.uid == sys::geteuid() || who.uid == 0)
                .filter(|_| strangers < STRANGERS_MOST && self.peers.len() < self.most);
            let greeting = Message { kind: GREETING, ..Message::default() };
            let greeted = who.is_some()
                && admit(came)
                && meet::send(came, greeting.frame().as_bytes(), &[]).is_ok()
                && adapter.watch(borrowed(came), self.next).is_ok();
            match who {
                Some(who) if greeted => {
                    strangers += 1;
                    self.add(Peer::Greeted(came, Instant::now(), who.pid));
                }
                _ => meet::part(came),
            }
        }
    }

    fn add(&mut self, peer: Peer) {
        self.peers.insert(self.next, peer);
        while self.next == LISTENER || self.peers.contains_key(&self.next) {
            self.next = self.next.wrapping_add(1);
        }
    }

    /// Notes the program's process, until it ends.
    fn watch(&mut self, pid: i32, adapter: &mut Adapter) {
        let known = |peer: &Peer| matches!(peer, Peer::Program(_, other) if *other == pid);
        if !self.peers.values().any(known)
            && let Some(process) = Pid::from_raw(pid)
            && let Ok(process) = pidfd_open(process, PidfdFlags::empty())
            && adapter.watch(process.as_fd(), self.next).is_ok()
        {
            self.add(Peer::Program(process, pid));
        }
    }
}

fn part(lifeline: i32, adapter: &mut Adapter) {
    let _ = adapter.unwatch(borrowed(lifeline));
    meet::part(lifeline);
}

/// (An older kernel lets descriptors through in any case.)
fn admit(came: i32) -> bool {
    meet::admit_descriptors(came, true);
    true
}
