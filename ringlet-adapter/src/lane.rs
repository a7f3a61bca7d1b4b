//! One end of a connection whose other end is at another node: a half, whose operations go there as frames, each behind the bytes that it needs.

use crate::adapter::Serve;
use crate::half::{Half, Operation, Rings, Segment, Way};
use crate::link::Progress;
use crate::trunk::{Inbox, LaneName, State, Trunk};
use crate::wire;
use ringlet_core::mapped::Mapped;
use ringlet_fabric::{FRAME_BYTES, Memory, NotTaken, Write};
use rustix::fd::BorrowedFd;
use std::cell::RefCell;
use std::collections::VecDeque;
use std::io;
use std::rc::Rc;

/// So many operations wait for room among the frames before no more records are found.
const WAITING_MOST: usize = 64;
/// What one pass takes.
const TAKEN_MOST: usize = 256;

const _: () = assert!(4 + wire::FRAME_MOST_BYTES <= FRAME_BYTES);

/// Rings of the lane's program, and what it rings to wake the lane: an eventfd, of this lane's alone.
pub trait WakesOne: Rings {
    fn eventfd(&self) -> BorrowedFd<'_>;
}

pub struct Lane<R> {
    half: Half,
    pub rings: R,
    trunk: Trunk,
    name: LaneName,
    inbox: Rc<RefCell<Inbox>>,
    ours: Memory,
    /// The other half was told which is ours.
    is_known: bool,
    out: Out,
    ended: bool,
    /// What was awaited when it was last asked whether it hangs.
    awaited: [Option<u32>; 3],
}

/// What is to be sent.
#[derive(Default)]
struct Out {
    operations: VecDeque<Operation>,
    /// The bytes of the first one are written.
    is_written: bool,
    frame: Vec<u8>,
}

impl Way for Out {
    fn has_room(&self) -> bool {
        self.operations.len() < WAITING_MOST
    }

    fn send(&mut self, operation: Operation) {
        self.operations.push_back(operation);
    }
}

impl<R: WakesOne> Lane<R> {
    /// `free` (which must not use the trunk) is called when nothing writes to the segment any more, nor reads from it: that may be after the lane is gone.
    /// Its memory must be held, all of it, before: what comes is written there by the fabric.
    ///
    /// # Safety
    /// The segment stays mapped until then.
    #[allow(unsafe_code)]
    pub unsafe fn new(
        trunk: &Trunk,
        name: LaneName,
        end: usize,
        segment: Segment,
        rings: R,
        free: Box<dyn FnOnce()>,
    ) -> io::Result<Lane<R>> {
        let state = &mut *trunk.state();
        let bytes = segment.geometry.segment_bytes();
        let at = segment.area.base();
        // SAFETY: as the caller says; `free` is kept until it is withdrawn.
        let ours = unsafe { state.node.register(name.0, at, bytes)? };
        state.memories.insert((name.0, ours), free);
        let inbox = state.inboxes.entry(name).or_default().clone();
        Ok(Lane {
            half: Half::new(end, segment),
            rings,
            trunk: trunk.clone(),
            name,
            inbox,
            ours,
            is_known: false,
            out: Out::default(),
            ended: false,
            awaited: [None; 3],
        })
    }

    /// Its process is gone.
    pub fn gone(&mut self) {
        self.half.gone();
    }

    /// Has the other half owed the same answer since this was last asked? Our program waits for it, with a call that must not block. Who has a clock
    /// asks so seldom that an honest half has answered, and gives up the lane then.
    pub fn hangs(&mut self) -> bool {
        let awaited = self.half.awaited();
        let before = std::mem::replace(&mut self.awaited, awaited);
        awaited.iter().zip(before).any(|(now, before)| now.is_some() && *now == before)
    }

    /// What has come from the other half, as long as there is room for the answers.
    fn receive(&mut self, inbox: &mut Inbox) -> bool {
        let mut count = 0;
        while count < TAKEN_MOST
            && self.out.has_room()
            && let Some(operation) = inbox.operations.pop_front()
        {
            // (The bytes are there: their frame needed them.)
            self.half.take(operation, |_, _, _| {}, &mut self.out, &mut self.rings);
            count += 1;
        }
        self.half.settle(&mut self.out, &mut self.rings);
        count > 0
    }

    /// Gives to the transport what it takes.
    fn send(
        &mut self,
        state: &mut State,
        theirs: Option<Memory>,
        sent: &mut bool,
    ) -> Result<(), NotTaken> {
        let transport = state.transport(self.name);
        if !self.is_known {
            self.out.write(self.name, |to| wire::write_segment(self.ours, to));
            transport.frame(&self.out.frame, false)?;
            (self.is_known, *sent) = (true, true);
        }
        while let Some(operation) = self.out.operations.front() {
            let mut needs = false;
            if let Operation::Record(piece) = operation
                && piece.len > 0
            {
                let Some(to) = theirs else { break };
                let at = self.half.outgoing().data_offset() + piece.place;
                if !self.out.is_written {
                    let write =
                        Write { from: self.ours, at, bytes: piece.len, to, offset: at as u64 };
                    transport.write(write)?;
                    (self.out.is_written, *sent) = (true, true);
                }
                needs = true;
            }
            let operation = operation.clone();
            self.out.write(self.name, |to| wire::write(&operation, to));
            transport.frame(&self.out.frame, needs)?;
            self.out.operations.pop_front();
            (self.out.is_written, *sent) = (false, true);
        }
        Ok(())
    }
}

impl Out {
    fn write(&mut self, (_, lane): LaneName, write: impl FnOnce(&mut Vec<u8>)) {
        self.frame.clear();
        self.frame.extend(lane.to_le_bytes());
        write(&mut self.frame);
    }
}

impl<R: WakesOne> Serve for Lane<R> {
    fn pass(&mut self, rouse: &mut Vec<usize>) -> Progress {
        let progress = if self.half.begin() { self.pass_now(rouse) } else { Progress::Failed };
        self.half.leave();
        progress
    }

    fn arm(&mut self) -> bool {
        self.half.arm();
        true
    }

    fn disarm(&mut self) {
        self.half.disarm();
    }

    fn is_owed(&self) -> bool {
        self.half.is_owed()
    }

    fn overdue(&mut self) {
        self.half.overdue();
    }

    fn descriptors(&self, tell: &mut dyn FnMut(BorrowedFd<'_>)) {
        tell(self.rings.eventfd());
    }
}

impl<R: WakesOne> Lane<R> {
    fn pass_now(&mut self, rouse: &mut Vec<usize>) -> Progress {
        let (trunk, inbox) = (self.trunk.clone(), self.inbox.clone());
        let (state, inbox) = (&mut *trunk.state(), &mut *inbox.borrow_mut());
        if inbox.failed {
            return Progress::Failed;
        }
        let mut busy = self.receive(inbox);
        if self.out.has_room() {
            busy |= self.half.pass(&mut self.out, &mut self.rings);
        }
        let mut sent = false;
        let waits = inbox.waits_for_room;
        match if waits { Ok(()) } else { self.send(state, inbox.theirs, &mut sent) } {
            Ok(()) => {}
            Err(NotTaken::Full) => state.wait_for_room(self.name, inbox),
            Err(_) => return Progress::Failed,
        }
        if sent {
            busy = true;
            rouse.extend(state.at);
        }
        match () {
            _ if self.half.has_failed() => Progress::Failed,
            _ if self.half.has_parted()
                && self.half.other_parts()
                && self.out.operations.is_empty() =>
            {
                self.half.end();
                self.ended = true;
                Progress::Ended
            }
            _ if busy => Progress::Busy,
            _ => Progress::Idle,
        }
    }
}

impl<R> Drop for Lane<R> {
    /// One that has not ended fails at the other node too. The trunk is to be roused afterwards.
    fn drop(&mut self) {
        let state = &mut *self.trunk.state();
        state.inboxes.remove(&self.name);
        let failed = self.inbox.borrow().failed;
        if !state.memories.contains_key(&(self.name.0, self.ours)) {
            // The transport is closed.
            return;
        }
        let transport = state.transport(self.name);
        if !self.ended && !failed {
            self.out.write(self.name, |to| wire::write(&Operation::Failed, to));
            // (If there is no room for that, the other end is told by what happens to the kernel's connection.)
            let _ = transport.frame(&self.out.frame, false);
        }
        transport.withdraw(self.ours);
    }
}
