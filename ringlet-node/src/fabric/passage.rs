//! A channel of the native library's between a program here and one on another host: here we are the peer, there the other process is.
//!
//! What the program sends is read where it lies, and goes to the other process in pieces, by a pipe; that one gives it to its program as one message.
//! So many pieces are on their way at most (`AHEAD_MOST`) as the other process has not said it has taken; one takes none while its program has no
//! room. Who closes, or dies, does so there too, behind all that it has sent. What our program does not read holds up nothing that is said about the other way.

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;

use ringlet_adapter::{Failed, PIPE_BYTES, PIPE_MESSAGES, Pipe, Progress, Serve};
use ringlet_core::layout::MESSAGE_MAX_BYTES;
use ringlet_messages::native::Error;
use ringlet_messages::native::carried::Port;

/// What is said in a pipe: the first piece of a message of that length, and those behind it; how many pieces were taken; that no more is sent; that no more
/// is read.
const FIRST: u8 = 1;
const MORE: u8 = 2;
const TAKEN: u8 = 3;
const SHUT: u8 = 4;
const CLOSED: u8 = 5;

const HEAD_BYTES: usize = 5;
const PIECE_BYTES: usize = PIPE_BYTES - HEAD_BYTES;
/// (What else is said is taken at once.)
const AHEAD_MOST: usize = PIPE_MESSAGES / 2;
const TAKEN_AT_ONCE: usize = 32;
/// Pieces of each way that one pass takes.
const PASS_MOST: usize = 128;

pub struct Passage {
    port: Port,
    pipe: Pipe,
    /// The other process is known to have its end.
    begun: bool,
    ahead: usize,
    taken: usize,
    /// Nothing else comes: that is said, though it be little.
    owes: bool,
    /// A message on its way there, and how much of it has gone; one that is coming, and of how many bytes.
    leaving: Option<(Vec<u8>, usize)>,
    coming: Option<(Vec<u8>, usize)>,
    /// What has come behind one that is here.
    behind: VecDeque<Vec<u8>>,
    /// One that is here, and how much of it our program has.
    here: Option<(Vec<u8>, usize)>,
    /// What we have said, and what the other process has: no more is sent, no more is read.
    said: Ends,
    heard: Ends,
    died: bool,
    frame: Vec<u8>,
}

#[derive(Default)]
struct Ends {
    shut: bool,
    closed: bool,
}

impl Passage {
    pub fn new(port: Port, pipe: Pipe, begun: bool) -> Passage {
        Passage {
            port,
            pipe,
            begun,
            ahead: 0,
            taken: 0,
            owes: false,
            leaving: None,
            coming: None,
            behind: VecDeque::new(),
            here: None,
            said: Ends::default(),
            heard: Ends::default(),
            died: false,
            frame: Vec::new(),
        }
    }

    pub fn has_begun(&self) -> bool {
        self.begun
    }

    /// From now on what is sent to the other process comes.
    pub fn begin(&mut self) {
        self.begun = true;
    }

    /// Did it go? (If there is no room, we are roused when there is; that the pipe has failed is heard behind what has come by it.)
    fn say(&mut self, kind: u8, number: usize, bytes: &[u8]) -> bool {
        self.frame.clear();
        self.frame.push(kind);
        self.frame.extend((number as u32).to_le_bytes());
        self.frame.extend(bytes);
        self.pipe.send(&self.frame).unwrap_or(false)
    }

    /// What has come, and of what is for our program as much as it takes.
    fn receive(&mut self) -> Result<bool, Error> {
        let mut busy = false;
        for _ in 0..PASS_MOST {
            if self.died {
                break;
            }
            match self.pipe.receive() {
                Ok(Some(message)) => self.hear(message).ok_or(Error::PeerCorrupt)?,
                Ok(None) => break,
                Err(Failed) => self.died = true,
            }
            busy = true;
        }
        for _ in 0..PASS_MOST {
            busy |= self.give()?;
            if self.here.is_some() {
                break;
            }
            let Some(piece) = self.behind.pop_front() else { break };
            self.take(&piece).ok_or(Error::PeerCorrupt)?;
            busy = true;
        }
        Ok(busy)
    }

    /// `None` for what no sane node sends.
    fn hear(&mut self, message: Vec<u8>) -> Option<()> {
        let (kind, number, _) = read(&message)?;
        match kind {
            TAKEN => self.ahead = self.ahead.checked_sub(number)?,
            CLOSED => {
                self.port.close();
                (self.heard.closed, self.leaving) = (true, None);
            }
            // (And that no more is sent.)
            _ if self.behind.len() > AHEAD_MOST => return None,
            _ => self.behind.push_back(message),
        }
        Some(())
    }

    /// The same, of what is for our program.
    fn take(&mut self, message: &[u8]) -> Option<()> {
        let (kind, number, bytes) = read(message)?;
        match (kind, self.coming.take()) {
            (FIRST, None) if number <= MESSAGE_MAX_BYTES && !self.heard.shut => {
                self.grow(Vec::with_capacity(number), number, bytes)?;
            }
            (MORE, Some((coming, all))) if !bytes.is_empty() => self.grow(coming, all, bytes)?,
            (SHUT, None) => {
                self.heard.closed |= self.port.is_locked();
                self.port.shut();
                self.heard.shut = true;
            }
            _ => return None,
        }
        Some(())
    }

    fn grow(&mut self, mut coming: Vec<u8>, all: usize, bytes: &[u8]) -> Option<()> {
        coming.extend(bytes);
        self.taken += 1;
        match coming.len() {
            len if len == all => self.here = Some((coming, 0)),
            len if len < all => self.coming = Some((coming, all)),
            _ => return None,
        }
        Some(())
    }

    /// Gives our program what is here for it. Was there room?
    fn give(&mut self) -> Result<bool, Error> {
        let Some((message, given)) = &mut self.here else { return Ok(false) };
        loop {
            match self.port.send(&message[*given..]) {
                Ok(more) => *given += more,
                Err(Error::WouldBlock) => return Ok(false),
                // It reads no more: what comes for it is nobody's. (What one that has died had sent goes first.)
                Err(Error::Closed | Error::PeerDied) => *given = message.len(),
                Err(error) => return Err(error),
            }
            if *given >= message.len() || !self.port.is_stream() {
                self.here = None;
                return Ok(true);
            }
        }
    }

    /// What our program sends, as long as the other process takes it.
    fn send(&mut self) -> Result<bool, Error> {
        let mut busy = false;
        if (self.taken >= TAKEN_AT_ONCE || self.owes) && self.say(TAKEN, self.taken, &[]) {
            (self.taken, self.owes, busy) = (0, false, true);
        }
        if self.port.is_closed() && !self.said.closed && !self.heard.shut {
            self.said.closed = self.say(CLOSED, 0, &[]);
            busy |= self.said.closed;
        }
        let mut count = 0;
        while count < PASS_MOST && self.ahead < AHEAD_MOST && !self.said.shut && !self.heard.closed
        {
            if self.leaving.is_none() {
                match self.next() {
                    Ok(true) => {}
                    Ok(false) => break,
                    Err(Error::Closed) => {
                        self.said.shut = self.say(SHUT, 0, &[]);
                        self.said.closed |= self.said.shut && self.port.is_locked();
                        return Ok(busy | self.said.shut);
                    }
                    Err(error) => return Err(error),
                }
            }
            let Some((message, gone)) = self.leaving.take() else { break };
            let upto = message.len().min(gone + PIECE_BYTES);
            let (kind, number) = if gone == 0 { (FIRST, message.len()) } else { (MORE, 0) };
            if !self.say(kind, number, &message[gone..upto]) {
                self.leaving = Some((message, gone));
                break;
            }
            if upto < message.len() {
                self.leaving = Some((message, upto));
            }
            (self.ahead, count, busy) = (self.ahead + 1, count + 1, true);
        }
        Ok(busy)
    }

    /// The next message of our program's is to leave.
    fn next(&mut self) -> Result<bool, Error> {
        let leaving = &mut self.leaving;
        self.port.pass(|read, len| {
            let mut message = vec![0; len];
            read(0, &mut message);
            *leaving = Some((message, 0));
            true
        })
    }

    fn step(&mut self) -> Result<Progress, Error> {
        let mut busy = self.receive()?;
        if self.died && self.here.is_none() && self.behind.is_empty() {
            return Err(Error::PeerDied);
        }
        if self.begun && !self.died {
            busy |= self.send()?;
        }
        let out = self.said.shut || self.heard.closed;
        let inward = self.said.closed || self.heard.shut && self.here.is_none();
        Ok(match () {
            () if out && inward && !self.died => Progress::Ended,
            () if busy => Progress::Busy,
            () => Progress::Idle,
        })
    }
}

/// Kind, number, and bytes.
fn read(message: &[u8]) -> Option<(u8, usize, &[u8])> {
    let (kind, rest) = message.split_first()?;
    let (number, bytes) = rest.split_first_chunk()?;
    Some((*kind, u32::from_le_bytes(*number) as usize, bytes))
}

impl Drop for Passage {
    /// To a program that has not ended it is as if the other one had died.
    fn drop(&mut self) {
        self.port.abandon();
    }
}

impl Serve for Passage {
    fn pass(&mut self, rouse: &mut Vec<usize>) -> Progress {
        let progress = self.step().unwrap_or(Progress::Failed);
        if progress == Progress::Ended {
            self.pipe.ended();
        }
        if progress != Progress::Idle {
            rouse.extend(self.pipe.trunk_at());
        }
        progress
    }

    fn arm(&mut self) -> bool {
        // What is owed is said before we sleep; or when there is room.
        if self.taken > 0 && self.begun && !self.died && !self.owes {
            self.owes = true;
            return false;
        }
        if self.died {
            return self.here.is_some() && self.port.arm(false, true);
        }
        let over = self.said.shut || self.heard.closed;
        let sends = self.begun && self.leaving.is_none() && self.ahead < AHEAD_MOST && !over;
        // What a program that has gone had sent goes first; of one that has nothing to send, nobody else hears that.
        if self.port.is_alone() && (sends || over) {
            self.died |= over;
            return false;
        }
        self.port.arm(sends, self.here.is_some())
    }

    fn disarm(&mut self) {}

    fn is_owed(&self) -> bool {
        false
    }

    fn descriptors(&self, tell: &mut dyn FnMut(BorrowedFd<'_>)) {
        self.port.descriptors(tell);
    }
}
