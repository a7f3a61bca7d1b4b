//! What carries a connection to an endpoint with which no memory is shared: a channel of the native library's, by which relays
//! (`ringlet_core::active::relay`) keep the two ends' segments in step. To whoever carries it between two hosts it is a channel of messages like
//! any other.
//!
//! Whoever holds it carries at once what there is, both ways, and waits for nothing: the program's threads when they send and poll, the service
//! thread when the channel's bells ring. What finds no room stays where it was published: so there is always a place for a reply, and what comes is
//! always taken.

use crate::native::Error;
use crate::native::carried::Port;
use parking_lot::Mutex;
use ringlet_core::active::relay::PARCEL_MIN_BYTES;
use ringlet_core::active::{Relay, SegmentMemory, Status};
use std::os::fd::{AsRawFd, BorrowedFd};

/// What is said by a channel's messages: a parcel of the relay's; why the connection ends, behind all else.
const PARCEL: u8 = 1;
const END: u8 = 2;
/// Messages that are taken, and parcels sent, at once. (More are not under way, unless the peer toys with us.)
const AT_ONCE: usize = 256;

pub struct Wire(Mutex<State>);

struct State {
    /// None after the end.
    port: Option<Port>,
    relay: Relay,
    /// A message that finds no room, and its length; one that has come.
    leaving: Box<[u8]>,
    len: usize,
    coming: Vec<u8>,
}

impl Wire {
    pub fn new(port: Port) -> Wire {
        let leaving = vec![0; 1 + PARCEL_MIN_BYTES].into();
        let (relay, coming) = (Relay::default(), Vec::new());
        Wire(Mutex::new(State { port: Some(port), relay, leaving, len: 0, coming }))
    }

    /// Carries what there is; `all`: also credits that could wait. An error is the end, and why.
    pub fn carry(&self, peer: &SegmentMemory, all: bool) -> Result<(), Status> {
        let state = &mut *self.0.lock();
        let done = state.receive(peer).and_then(|()| match state.send(peer, all) {
            // (It may have said why.)
            Err(status) => state.receive(peer).and(Err(status)),
            Ok(_) => Ok(()),
        });
        if done.is_err() {
            state.port = None;
        }
        done
    }

    /// From now on the channel's bells ring for what comes. False if something is there.
    pub fn arm(&self) -> bool {
        let state = &mut *self.0.lock();
        let for_room = state.len > 0;
        state.port.as_mut().is_some_and(|port| port.arm(true, for_room))
    }

    /// A bell has rung.
    pub fn rang(&self) {
        if let Some(port) = &self.0.lock().port {
            port.drain();
        }
    }

    /// The peer has said something.
    pub fn has_heard(&self) -> bool {
        !self.0.lock().coming.is_empty()
    }

    /// Nothing is said any more.
    pub fn drop_all(&self) {
        self.0.lock().port = None;
    }

    /// Says all that is to be said, and why it ends. False if there is no room for that yet.
    pub fn hang_up(&self, peer: &SegmentMemory, status: Status) -> bool {
        let state = &mut *self.0.lock();
        if state.send(peer, true) == Ok(false) {
            return false;
        }
        let said = state.port.as_mut().map(|port| port.send(&[END, status as u8]));
        if let (Some(Err(Error::WouldBlock)), Some(port)) = (said, &mut state.port) {
            port.arm(false, true);
            return false;
        }
        state.port = None;
        true
    }

    /// The bells.
    pub fn descriptors(&self) -> Vec<i32> {
        let mut found = Vec::new();
        let mut tell = |fd: BorrowedFd| found.push(fd.as_raw_fd());
        if let Some(port) = &self.0.lock().port {
            port.descriptors(&mut tell);
        }
        found
    }
}

impl State {
    fn receive(&mut self, peer: &SegmentMemory) -> Result<(), Status> {
        let State { port: Some(port), relay, coming, .. } = self else { return Ok(()) };
        for _ in 0..AT_ONCE {
            let there = port.pass(|read, len| {
                coming.resize(len, 0);
                read(0, coming);
                true
            });
            match (there, &coming[..]) {
                (Ok(false), _) => break,
                (Ok(true), [PARCEL, parcel @ ..]) => {
                    relay.put(peer, parcel).ok_or(Status::Unreachable)?;
                }
                (Ok(true), [END, status]) => {
                    return Err(Status::from_u8(*status).unwrap_or(Status::Unreachable));
                }
                _ => return Err(Status::Unreachable),
            }
        }
        Ok(())
    }

    /// Has all gone? If not, a bell rings when there is room.
    fn send(&mut self, peer: &SegmentMemory, all: bool) -> Result<bool, Status> {
        let State { port: Some(port), relay, leaving, len, .. } = self else { return Ok(true) };
        for _ in 0..AT_ONCE {
            if *len == 0 {
                match relay.take(peer, all, &mut leaving[1..]) {
                    0 => return Ok(true),
                    taken => (*len, leaving[0]) = (1 + taken, PARCEL),
                }
            }
            match port.send(&leaving[..*len]) {
                Ok(_) => *len = 0,
                Err(Error::WouldBlock) if port.arm(false, true) => return Ok(false),
                // (There is room by now, or the end is heard of next.)
                Err(Error::WouldBlock) => {}
                Err(_) => return Err(Status::Unreachable),
            }
        }
        Ok(false)
    }
}
