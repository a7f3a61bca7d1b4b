//! How an endpoint's requests are sent.

use super::lane::{Lane, Mapping, Stage, Way};
use super::message::{Error, Payload};
use super::name::Name;
use super::state::{Command, Endpoint, Guard, Shared, State, Undelivered, own, raw};
use ringlet_core::active::layout::{MAGIC, SEGMENT_BYTES};
use ringlet_core::active::{Kind, Message, Returned, Status};
use ringlet_linux::{map, sys};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Tries of a request that finds no room, before it sleeps.
const SPINS: u32 = 256;
const YIELDS: u32 = 4;

/// Polls for a request to oneself, which completes within the call: its handler has run, and that of its reply.
const OWN_POLLS: u32 = 1 << 20;

enum Attempt {
    Done,
    /// On this connection, to the endpoint itself.
    Own(Arc<Lane>),
    /// No room on this connection yet, or it is only being made.
    Wait(Arc<Lane>),
}

/// Runs the handlers of what was sent to oneself.
#[cold]
fn complete(guard: &Guard, shared: &Shared, lane: &Lane) -> Result<(), Error> {
    for _ in 0..OWN_POLLS {
        if lane.connection.idle(&lane.memory) || lane.has_ended() {
            break;
        }
        guard.poll(shared)?;
    }
    Ok(())
}

impl Endpoint {
    /// Sends a request, and polls. Waits while there is no room, polling, until the process is interrupted (`NotSent` then). One to the endpoint itself
    /// is handled, and its reply, before this returns.
    #[inline]
    pub fn request(
        &self,
        index: usize,
        handler: u8,
        arguments: &[u32],
        payload: Payload,
    ) -> Result<(), Error> {
        self.send(index, payload.message(handler, arguments)?)
    }

    fn send(&self, index: usize, mut message: Message) -> Result<(), Error> {
        let mut tries = 0;
        loop {
            let (guard, bundle) = self.enter()?;
            guard.outside()?;
            let attempt = self.attempt(&guard, index, &mut message)?;
            let polled = guard.poll(&self.shared)?;
            let lane = match attempt {
                Attempt::Done => return Ok(()),
                Attempt::Own(lane) => return complete(&guard, &self.shared, &lane),
                Attempt::Wait(lane) => lane,
            };
            drop(guard);
            if self.shared.interrupted.load(Ordering::Relaxed) {
                return Err(Error::NotSent);
            }
            // A receiver that is awake makes room in less time than a sleep takes.
            if tries < SPINS {
                tries += 1;
                std::hint::spin_loop();
            } else if tries < SPINS + YIELDS {
                tries += 1;
                sys::sched_yield();
            } else if polled == 0 {
                bundle.wait(&self.shared, u64::MAX, |guard, sleeping| {
                    guard.pending(&self.shared) || lane.accepts(sleeping)
                });
            }
        }
    }

    /// Sends a request if it need not wait.
    pub fn try_request(
        &self,
        index: usize,
        handler: u8,
        arguments: &[u32],
        payload: Payload,
    ) -> Result<(), Error> {
        let mut message = payload.message(handler, arguments)?;
        let (guard, _) = self.enter()?;
        guard.outside()?;
        let attempt = self.attempt(&guard, index, &mut message)?;
        guard.poll(&self.shared)?;
        match attempt {
            Attempt::Done => Ok(()),
            Attempt::Own(lane) => complete(&guard, &self.shared, &lane),
            Attempt::Wait(_) => Err(Error::NotSent),
        }
    }

    /// Need a request to this number not wait now?
    pub fn can_send(&self, index: usize) -> Result<bool, Error> {
        self.with(|state| state.can_send(index, false))
    }

    #[inline]
    fn attempt(
        &self,
        guard: &Guard,
        index: usize,
        message: &mut Message,
    ) -> Result<Attempt, Error> {
        let state = self.state(guard).ok_or(Error::Freed)?;
        let table = state.translations.borrow();
        let Some(Some(translation)) = table.get(index) else {
            self.give_back(guard, message, Status::BadEntry, None);
            return Ok(Attempt::Done);
        };
        let mut cached = translation.lane.borrow_mut();
        let lane = match &*cached {
            Some(lane) => lane,
            None => match self.connect(guard, state, translation.name) {
                Ok(lane) => cached.insert(lane),
                Err(status) => {
                    self.give_back(guard, message, status, Some(translation.name));
                    return Ok(Attempt::Done);
                }
            },
        };
        match lane.stage() {
            Stage::Open => {
                message.head.tag = translation.tag;
                // Not stored for a request that will wait.
                let has_room = || lane.connection.has_room(&lane.memory);
                let stored;
                let message = if message.head.kind == Kind::Bulk && has_room() {
                    stored = self.shared.stored(lane, *message);
                    &stored
                } else {
                    message
                };
                if lane.connection.request(&lane.memory, message).is_err() {
                    return Ok(Attempt::Wait(lane.clone()));
                }
                state.statistics.borrow_mut().requests.count(&message.head);
                lane.notify();
                if translation.own {
                    return Ok(Attempt::Own(lane.clone()));
                }
                // (By a lane that is not watched the poll that follows does not come.)
                if lane.wire().is_some() && lane.has_ended() {
                    // ORDER: Relaxed; our own note, taken under the same lock.
                    guard.bundle.news.store(true, Ordering::Relaxed);
                }
                Ok(Attempt::Done)
            }
            Stage::Opening => Ok(Attempt::Wait(lane.clone())),
            Stage::Ended(status) => {
                self.give_back(guard, message, status, Some(translation.name));
                *cached = None;
                Ok(Attempt::Done)
            }
        }
    }

    /// The connection to a peer: one that is there, or a new one.
    #[cold]
    fn connect(&self, guard: &Guard, state: &State, peer: Name) -> Result<Arc<Lane>, Status> {
        if let Some(status) = state.gone.borrow().get(&peer) {
            return Err(*status);
        }
        if let Some(lanes) = state.lanes.borrow().get(&peer)
            && let Some(lane) = lanes.iter().find(|lane| !matches!(lane.stage(), Stage::Ended(_)))
        {
            return Ok(lane.clone());
        }
        let endpoints = guard.inner.endpoints.borrow();
        let this = endpoints.iter().find(|each| std::ptr::eq(&***each, self));
        let this = this.ok_or(Status::BadEndpoint)?;
        let lane = self.shared.connect(this, peer).ok_or(Status::Congestion)?;
        if !guard.attach(this, &lane) {
            lane.end(Status::Congestion);
            return Err(Status::Congestion);
        }
        state.know(&lane);
        Ok(lane)
    }

    #[cold]
    fn give_back(&self, guard: &Guard, message: &Message, status: Status, peer: Option<Name>) {
        let endpoints = guard.inner.endpoints.borrow();
        if let Some(this) = endpoints.iter().find(|each| std::ptr::eq(&***each, self)) {
            let returned = Returned { status, reply: false, head: message.head };
            let what = Undelivered { returned, peer };
            guard.inner.returned.borrow_mut().push_back((this.clone(), what));
        }
    }
}

impl Shared {
    /// Begins a connection; its lane opens, or ends, later.
    fn connect(&self, endpoint: &Arc<Endpoint>, peer: Name) -> Option<Arc<Lane>> {
        let segment = own(map::sealed_memfd(c"ringlet-am", SEGMENT_BYTES, 0).ok()?);
        let mapping = Mapping::of_rings(raw(&segment), SEGMENT_BYTES)?;
        let lane = Arc::new(Lane::new(self.lane_id(), peer, mapping, 0));
        lane.memory.head().magic.store(MAGIC, Ordering::Relaxed);
        let (endpoint, joined) = (endpoint.clone(), lane.clone());
        self.command(Command::Connect { endpoint, lane: joined, segment, since_ns: sys::now_ns() });
        Some(lane)
    }

    /// The message with its bytes in the peer's segment already, if that is possible.
    fn stored<'a>(&self, lane: &Arc<Lane>, message: Message<'a>) -> Message<'a> {
        let tag = message.head.tag;
        match lane.store(message.head.offset, message.bytes) {
            Way::Stored(generation) => {
                Message { head: message.head.stored(generation), bytes: &[] }
            }
            Way::Ask => {
                self.command(Command::Ask { lane: lane.id, tag });
                message
            }
            Way::Message => message,
        }
    }
}
