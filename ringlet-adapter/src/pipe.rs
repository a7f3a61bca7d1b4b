//! What is no connection may go between two nodes too: messages, as they are given, in order, each once.

use crate::trunk::{Inbox, LaneName, Trunk};
use crate::wire;
use ringlet_fabric::{FRAME_BYTES, NotTaken};
use std::cell::RefCell;
use std::rc::Rc;

/// A lane of plain messages. Who sends may not be more than `PIPE_MESSAGES` ahead of what the other end has said that it has taken, by messages
/// of its own: a lane of more has failed.
pub struct Pipe {
    trunk: Trunk,
    name: LaneName,
    inbox: Rc<RefCell<Inbox>>,
    ended: bool,
    frame: Vec<u8>,
}

/// The longest message.
pub const PIPE_BYTES: usize = FRAME_BYTES - 4 - 1;

/// The other end has gone, or can't be reached any more. For good.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Failed;

impl Pipe {
    /// Both nodes' ends have this name (`Trunk::expect`).
    pub fn new(trunk: &Trunk, name: LaneName) -> Pipe {
        let inbox = trunk.state().inboxes.entry(name).or_default().clone();
        Pipe { trunk: trunk.clone(), name, inbox, ended: false, frame: Vec::new() }
    }

    pub fn name(&self) -> LaneName {
        self.name
    }

    /// False if there is no room: it is roused when there is some. The trunk is to be roused after what was sent (`trunk_at`).
    pub fn send(&mut self, message: &[u8]) -> Result<bool, Failed> {
        let (state, inbox) = (&mut *self.trunk.state(), &mut *self.inbox.borrow_mut());
        if inbox.failed {
            return Err(Failed);
        }
        if inbox.waits_for_room {
            return Ok(false);
        }
        self.frame.clear();
        self.frame.extend(self.name.1.to_le_bytes());
        wire::write_plain(message, &mut self.frame);
        match state.transport(self.name).frame(&self.frame, false) {
            Ok(()) => Ok(true),
            Err(NotTaken::Full) => {
                state.wait_for_room(self.name, inbox);
                Ok(false)
            }
            Err(_) => Err(Failed),
        }
    }

    /// Where the trunk is served.
    pub fn trunk_at(&self) -> Option<usize> {
        self.trunk.state().at
    }

    /// The next message that has come. Those that came before the end failed are there still.
    pub fn receive(&mut self) -> Result<Option<Vec<u8>>, Failed> {
        let mut inbox = self.inbox.borrow_mut();
        match inbox.plain.pop_front() {
            // (Of a half's operations the other end sends one alone, that it has failed.)
            None if inbox.failed || !inbox.operations.is_empty() => Err(Failed),
            message => Ok(message),
        }
    }

    /// Both ends have said all: it goes without a word.
    pub fn ended(&mut self) {
        self.ended = true;
    }
}

impl Drop for Pipe {
    /// One that has not ended fails at the other node too.
    fn drop(&mut self) {
        let state = &mut *self.trunk.state();
        state.inboxes.remove(&self.name);
        let failed = self.inbox.borrow().failed;
        if !self.ended && !failed {
            state.fail(self.name);
        }
    }
}
