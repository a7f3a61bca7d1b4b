//! A way to another host by the node services, which carry channels of the native library's between them, by whatever fabric they have: one
//! channel for each direction, of whole frames. Who may is for the policy of both to say; from which node one comes is their word.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use ringlet_messages::native::{
    Channel, Error, Kind, Listener, Options, Receives, Sends, Timeout, connect,
};

use crate::frame::MESSAGE_MOST;

const NOW: Timeout = Some(Duration::ZERO);
/// What one direction holds: as much as is carried at most.
const RING_BYTES: usize = 1 << 20;

fn options() -> Options {
    Options { ring_bytes: RING_BYTES, ..Options::new(Kind::Messages) }
}

pub fn listen(network: &str) -> Result<Listener, Error> {
    Listener::bind(&format!(":ethernet.{network}"), options())
}

pub fn call(node: &str, network: &str, timeout: Timeout) -> Result<Channel, Error> {
    connect(&format!("{node}:ethernet.{network}"), options(), timeout)?.channel()
}

pub struct Carried {
    /// Of us, which is the first message; and of the other host (`far::Spans`).
    number: u64,
    their_number: Option<u64>,
    /// The one that we have called, by which we send; and the one by which that node has called us.
    out: Option<Channel>,
    inward: Option<Channel>,
    /// Why it could not be called.
    failed: Option<Error>,
}

impl Carried {
    pub fn new(number: u64) -> Carried {
        Carried { number, their_number: None, out: None, inward: None, failed: None }
    }

    pub fn called(&mut self, channel: Result<Channel, Error>) {
        match channel {
            Ok(mut channel) => {
                // (Who is not told has gone, as is found out soon.)
                let _ = channel.sender.send(&self.number.to_le_bytes(), NOW);
                self.out = Some(channel);
            }
            Err(error) => self.failed = Some(error),
        }
    }

    pub fn came(&mut self, channel: Channel) {
        (self.inward, self.their_number) = (Some(channel), None);
    }

    /// Is it to be called?
    pub fn is_apart(&self) -> bool {
        self.out.is_none()
    }

    /// Of the other host, if it is there.
    pub fn span(&self) -> Option<u64> {
        self.their_number.filter(|_| self.out.is_some() && self.inward.is_some())
    }

    pub fn why(&self) -> Option<String> {
        let says = match (&self.out, &self.inward, self.failed) {
            _ if self.span().is_some() => return None,
            (Some(_), Some(_), _) => "it has not said yet who it is",
            (Some(_), None, _) => "it has not called us: is this node among its peers?",
            (None, _, Some(Error::Refused)) => {
                "the policy of its node service, or of ours, refuses it"
            }
            (None, _, Some(Error::Unreachable)) => {
                "there is no node service here, or none of that name"
            }
            (None, ..) => "it does not answer",
        };
        Some(says.to_owned())
    }

    /// Is there room for any message?
    pub fn is_free(&mut self) -> bool {
        let Some(out) = &mut self.out else { return true };
        match out.sender.reserve(MESSAGE_MOST, NOW).map(drop) {
            Err(Error::WouldBlock) => false,
            Ok(()) => true,
            Err(_) => {
                self.out = None;
                true
            }
        }
    }

    /// Sends a message. (`is_free` was true.)
    pub fn send(&mut self, message: &[u8]) {
        if let Some(out) = &mut self.out
            && out.sender.send(message, NOW).is_err()
        {
            self.out = None;
        }
    }

    /// The next message. False: there is none yet.
    pub fn receive(&mut self, to: &mut Vec<u8>) -> bool {
        // (Nobody sends by the one that we have called; but it tells of its end.)
        if self.out.as_mut().is_some_and(|out| next(out, to).is_err()) {
            self.out = None;
        }
        match self.inward.as_mut().map(|inward| next(inward, to)) {
            None | Some(Ok(false)) => false,
            Some(Ok(true)) => {
                // (No frame is so short.)
                if let Ok(number) = to[..].try_into() {
                    self.their_number = Some(u64::from_le_bytes(number));
                    to.clear();
                }
                true
            }
            Some(Err(_)) => {
                self.inward = None;
                false
            }
        }
    }

    pub fn is_readable(&mut self) -> bool {
        let is_ready = |channel: &mut Channel| {
            let peeked = channel.receiver.peek(NOW).map(drop);
            peeked != Err(Error::WouldBlock)
        };
        self.out.as_mut().is_some_and(is_ready) || self.inward.as_mut().is_some_and(is_ready)
    }

    /// Asks to be woken by what comes; and by room, if that is waited for. False if there is some already.
    pub fn arm(&mut self, for_room: bool) -> bool {
        let is_armed = |channel: &mut Channel| channel.receiver.arm();
        self.out.as_mut().is_none_or(is_armed)
            && self.inward.as_mut().is_none_or(is_armed)
            && (!for_room || self.out.as_mut().is_none_or(|out| out.sender.arm()))
    }

    /// What wakes.
    pub fn descriptors<'a>(&'a self, tell: &mut dyn FnMut(BorrowedFd<'a>)) {
        for channel in [&self.out, &self.inward].into_iter().flatten() {
            tell(channel.receiver.as_fd());
        }
        if let Some(out) = &self.out {
            tell(out.sender.as_fd());
        }
    }
}

fn next(from: &mut Channel, to: &mut Vec<u8>) -> Result<bool, Error> {
    let message = match from.receiver.peek(NOW) {
        Err(Error::WouldBlock) => return Ok(false),
        done => done?,
    };
    // (What is no frame is found out behind this.)
    to.resize(message.len(), 0);
    message.read(0, to);
    message.release();
    Ok(true)
}
