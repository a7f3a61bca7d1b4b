//! An ordered stream of frames over messages that come in any order, or twice. Each side keeps what the other may still ask for.

use std::collections::VecDeque;

use crate::error::Error;
use crate::rail::MESSAGE_BYTES;
use crate::wire::{
    FIRST, FRAME_BYTES, HEADER_BYTES, WINDOW, WRITES, ahead, first_frame, frame_room, push_frame,
};
use crate::writes::Arrived;

/// A message that is not acknowledged.
pub struct Message {
    /// Room for the header, and frames.
    pub bytes: Vec<u8>,
    /// By which it was sent last. `None`: it is to be sent.
    way: Option<usize>,
    /// It was sent, so it may have arrived: it stays as it is.
    sealed: bool,
}

impl Message {
    pub fn go(&mut self, way: usize) {
        (self.way, self.sealed) = (Some(way), true);
    }
}

/// What is to be sent, and what was.
pub struct Outbox {
    /// The number of the first message.
    first: u32,
    messages: VecDeque<Message>,
    /// All before this one are on their way.
    looked: usize,
    spare: Vec<Vec<u8>>,
}

impl Outbox {
    pub fn new() -> Outbox {
        Outbox { first: FIRST, messages: VecDeque::new(), looked: 0, spare: Vec::new() }
    }

    pub fn is_empty(&self) -> bool {
        self.messages.is_empty()
    }

    pub fn has_room(&self) -> bool {
        self.messages.len() < WINDOW
    }

    pub fn kept_bytes(&self) -> usize {
        let spare: usize = self.spare.iter().map(Vec::capacity).sum();
        spare + self.messages.iter().map(|message| message.bytes.capacity()).sum::<usize>()
    }

    /// By which rail the first one went, and its number.
    pub fn oldest(&self) -> Option<(usize, u32)> {
        Some((self.messages.front()?.way?, self.first))
    }

    /// False: there is no room.
    pub fn push(&mut self, frame: &[u8], needs: Option<u32>) -> bool {
        assert!(frame.len() <= FRAME_BYTES, "a frame of {} bytes", frame.len());
        let room = frame_room(frame.len(), needs.is_some());
        let open =
            |message: &Message| !message.sealed && message.bytes.len() + room <= MESSAGE_BYTES;
        if !self.messages.back().is_some_and(open) {
            if !self.has_room() {
                return false;
            }
            let mut bytes = self.spare.pop().unwrap_or_else(|| Vec::with_capacity(MESSAGE_BYTES));
            bytes.resize(HEADER_BYTES, 0);
            self.messages.push_back(Message { bytes, way: None, sealed: false });
        }
        if let Some(last) = self.messages.back_mut() {
            push_frame(&mut last.bytes, frame, needs);
        }
        true
    }

    /// The first message that is to be sent, and its number.
    pub fn unsent(&mut self) -> Option<(u32, &mut Message)> {
        while self.messages.get(self.looked).is_some_and(|message| message.way.is_some()) {
            self.looked += 1;
        }
        let number = self.first.wrapping_add(self.looked as u32);
        Some((number, self.messages.get_mut(self.looked)?))
    }

    /// What went this way is to be sent again.
    pub fn leave(&mut self, way: usize) {
        for message in self.messages.iter_mut().filter(|message| message.way == Some(way)) {
            message.way = None;
        }
        self.looked = 0;
    }

    /// The other end has delivered all before this one.
    pub fn acknowledge(&mut self, number: u32) -> Result<(), Error> {
        let Some(n) = ahead(number, self.first) else { return Ok(()) };
        if n > self.messages.len() || n > 0 && !self.messages[n - 1].sealed {
            return Err(Error::Acknowledgement(number));
        }
        for message in self.messages.drain(..n) {
            if self.spare.len() < WINDOW / 4 {
                let mut bytes = message.bytes;
                bytes.clear();
                self.spare.push(bytes);
            }
        }
        self.first = number;
        self.looked = self.looked.saturating_sub(n);
        Ok(())
    }
}

/// What has come.
pub struct Inbox {
    /// The number of the first message that is not delivered, all of it.
    next: u32,
    /// The frames of that message and of those behind it.
    window: VecDeque<Option<Vec<u8>>>,
    /// Bytes of the first one that are delivered.
    used: usize,
}

impl Inbox {
    pub fn new() -> Inbox {
        Inbox { next: FIRST, window: VecDeque::new(), used: 0 }
    }

    pub fn next(&self) -> u32 {
        self.next
    }

    pub fn kept_bytes(&self) -> usize {
        self.window.iter().flatten().map(Vec::capacity).sum()
    }

    /// Takes the frames of a message, and delivers what can be delivered by that.
    pub fn take(
        &mut self,
        number: u32,
        frames: &[u8],
        arrived: &Arrived,
        deliver: &mut dyn FnMut(&[u8]),
    ) -> Result<(), Error> {
        // Else it was delivered before.
        let Some(place) = ahead(number, self.next) else { return Ok(()) };
        if place >= WINDOW {
            return Err(Error::Sequence(number));
        }
        if self.window.get(place).is_some_and(Option::is_some) {
            return Ok(());
        }
        let mut used = 0;
        if place == 0 {
            used = pass(frames, arrived, deliver)?;
            if used == frames.len() {
                self.go_on();
                return self.advance(arrived, deliver);
            }
            self.used = used;
        }
        if self.window.len() <= place {
            self.window.resize(place + 1, None);
        }
        debug_assert!(place == 0 || used == 0);
        self.window[place] = Some(frames.into());
        Ok(())
    }

    /// Delivers what can be delivered: a message has come, or a write.
    pub fn advance(
        &mut self,
        arrived: &Arrived,
        deliver: &mut dyn FnMut(&[u8]),
    ) -> Result<(), Error> {
        while let Some(Some(frames)) = self.window.front() {
            self.used += pass(&frames[self.used..], arrived, deliver)?;
            if self.used < frames.len() {
                break;
            }
            self.go_on();
        }
        Ok(())
    }

    fn go_on(&mut self) {
        self.window.pop_front();
        self.next = self.next.wrapping_add(1);
        self.used = 0;
    }
}

/// Delivers frames up to the first that needs writes that have not arrived; says how many bytes that is.
fn pass(frames: &[u8], arrived: &Arrived, deliver: &mut dyn FnMut(&[u8])) -> Result<usize, Error> {
    let mut used = 0;
    while used < frames.len() {
        let frame = first_frame(&frames[used..]).ok_or(Error::Frame)?;
        if let Some(needs) = frame.needs
            && let Some(missing @ 1..) = ahead(needs, arrived.next())
        {
            if missing > WRITES {
                return Err(Error::Needs(needs));
            }
            break;
        }
        deliver(frame.bytes);
        used += frame.room;
    }
    Ok(used)
}
