//! The ways to other nodes: what comes there goes to the lanes that it is for.

use crate::adapter::Serve;
use crate::half::Operation;
use crate::link::Progress;
use crate::wire;
use ringlet_fabric::{Control, Error, Memory, Node, NotTaken, Number, Told, Transport};
use rustix::fd::BorrowedFd;
use std::cell::{RefCell, RefMut};
use std::collections::{HashMap, VecDeque};
use std::rc::Rc;

/// Plain messages that may wait at either end of a pipe.
pub const PIPE_MESSAGES: usize = 1024;
/// What waits for a lane's turn: more than an honest one sends.
const WAITING_MOST: usize = 4096;

/// Which transport, and which lane there: both nodes know it by the same number, upon which their services agree.
pub type LaneName = (Number, u32);

/// What the owner of the transports is to do, or to know.
#[derive(Debug)]
pub enum Event {
    /// To be passed to the other node.
    Control(Control),
    Up,
    /// No rail works. What is under way waits until one does, or the transport is closed.
    Down,
    /// By the other node's fault.
    Ended(Error),
}

#[derive(Default)]
pub(crate) struct Inbox {
    /// The lane's place among what is served.
    pub at: Option<usize>,
    /// The other half's segment.
    pub theirs: Option<Memory>,
    pub operations: VecDeque<Operation>,
    /// What has come for a pipe.
    pub plain: VecDeque<Vec<u8>>,
    pub failed: bool,
    /// It is roused when the transport has room.
    pub waits_for_room: bool,
}

pub(crate) struct State {
    pub node: Node,
    pub inboxes: HashMap<LaneName, Rc<RefCell<Inbox>>>,
    /// What transports may still use.
    pub memories: HashMap<(Number, Memory), Box<dyn FnOnce()>>,
    events: Vec<(Number, Event)>,
    /// Lanes that wait for room, by their transport.
    waiting: HashMap<Number, Vec<u32>>,
    /// Pipes that are gone, for which there was no room to say that they have failed.
    failing: Vec<LaneName>,
    /// Our place among what is served.
    pub at: Option<usize>,
    /// The rails are armed. To poll them would disarm them.
    sleeps: bool,
}

/// This node's transports, which its lanes share.
#[derive(Clone)]
pub struct Trunk(Rc<RefCell<State>>);

impl Trunk {
    pub fn new(node: Node) -> Trunk {
        Trunk(Rc::new(RefCell::new(State {
            node,
            inboxes: HashMap::new(),
            memories: HashMap::new(),
            events: Vec::new(),
            waiting: HashMap::new(),
            failing: Vec::new(),
            at: None,
            sleeps: false,
        })))
    }

    /// Where it is served, so that lanes can rouse it.
    pub fn is_served_at(&self, at: usize) {
        self.state().at = Some(at);
    }

    /// Where this lane is served, so that what comes can rouse it.
    pub fn is_lane_at(&self, name: LaneName, at: usize) {
        if let Some(inbox) = self.state().inboxes.get(&name) {
            inbox.borrow_mut().at = Some(at);
        }
    }

    /// Of its node only what belongs to its owner is to be used: opening and controlling transports, and their rails. It is to be roused afterwards.
    pub fn with_node<T>(&self, with: impl FnOnce(&mut Node) -> T) -> T {
        with(&mut self.state().node)
    }

    /// This lane is agreed upon: what comes for it is kept until it is there.
    pub fn expect(&self, name: LaneName) {
        self.state().inboxes.entry(name).or_default();
    }

    /// There will be no such lane.
    pub fn forget(&self, name: LaneName) {
        self.state().inboxes.remove(&name);
    }

    /// What there is for the owner, since the last time.
    pub fn events(&self) -> Vec<(Number, Event)> {
        std::mem::take(&mut self.state().events)
    }

    /// Memory that is taken by what is under way, or waits for a lane's turn. It has a bound, by how many there are of both.
    pub fn kept_bytes(&self) -> usize {
        let state = self.state();
        let waiting = |inbox: &Rc<RefCell<Inbox>>| {
            let inbox = inbox.borrow();
            let plain: usize = inbox.plain.iter().map(Vec::capacity).sum();
            inbox.operations.capacity() * size_of::<Operation>() + plain
        };
        state.node.kept_bytes() + state.inboxes.values().map(waiting).sum::<usize>()
    }

    /// This transport is given up: its lanes fail, and once this returns nothing is written to their segments.
    pub fn close(&self, number: Number, rouse: &mut Vec<usize>) {
        let state = &mut *self.state();
        state.node.close(number);
        state.waiting.remove(&number);
        state.failing.retain(|(of, _)| *of != number);
        for ((of, _), inbox) in &state.inboxes {
            if *of == number {
                let mut inbox = inbox.borrow_mut();
                inbox.failed = true;
                rouse.extend(inbox.at);
            }
        }
        let of = |key: &(Number, Memory)| key.0 == number;
        let free: Vec<_> = state.memories.keys().copied().filter(of).collect();
        free.iter().filter_map(|key| state.memories.remove(key)).for_each(|free| free());
    }

    pub(crate) fn state(&self) -> RefMut<'_, State> {
        self.0.borrow_mut()
    }
}

impl State {
    pub fn transport(&mut self, (number, _): LaneName) -> &mut Transport {
        self.node.transport(number)
    }

    /// Its transport takes no more now.
    pub fn wait_for_room(&mut self, name: LaneName, inbox: &mut Inbox) {
        inbox.waits_for_room = true;
        self.waiting.entry(name.0).or_default().push(name.1);
    }

    /// The other node's end of this pipe fails, as soon as there is room to say so: nothing else tells of it.
    pub fn fail(&mut self, name: LaneName) {
        let mut frame = name.1.to_le_bytes().to_vec();
        wire::write(&Operation::Failed, &mut frame);
        if self.transport(name).frame(&frame, false) == Err(NotTaken::Full) {
            self.failing.push(name);
        }
    }

    /// Lanes that waited for room go on where there is some.
    fn give_room(&mut self, rouse: &mut Vec<usize>) {
        std::mem::take(&mut self.failing).into_iter().for_each(|name| self.fail(name));
        let State { node, inboxes, waiting, .. } = self;
        waiting.retain(|number, lanes| {
            if !node.transport(*number).has_room() {
                return true;
            }
            for lane in lanes {
                if let Some(inbox) = inboxes.get(&(*number, *lane)) {
                    let mut inbox = inbox.borrow_mut();
                    inbox.waits_for_room = false;
                    rouse.extend(inbox.at);
                }
            }
            false
        });
    }
}

/// What a frame of this lane has, behind its number.
fn deliver(inbox: &mut Inbox, frame: &[u8]) {
    match wire::read(frame) {
        Some(wire::Frame::Segment(memory)) if inbox.theirs.is_none() => {
            inbox.theirs = Some(memory);
        }
        Some(wire::Frame::Operation(operation)) if inbox.operations.len() < WAITING_MOST => {
            inbox.operations.push_back(operation);
        }
        Some(wire::Frame::Plain(message)) if inbox.plain.len() < PIPE_MESSAGES => {
            inbox.plain.push_back(message);
        }
        _ => inbox.failed = true,
    }
}

impl Serve for Trunk {
    fn pass(&mut self, rouse: &mut Vec<usize>) -> Progress {
        let state = &mut *self.state();
        if state.sleeps {
            return Progress::Idle;
        }
        let State { node, inboxes, memories, events, .. } = state;
        let progress = node.poll(&mut |number, told| match told {
            Told::Frame(frame) => {
                let Some((lane, frame)) = frame.split_first_chunk() else { return };
                // (Of one that has ended here, something may still be under way.)
                if let Some(inbox) = inboxes.get(&(number, u32::from_le_bytes(*lane))) {
                    let inbox = &mut *inbox.borrow_mut();
                    deliver(inbox, frame);
                    rouse.extend(inbox.at);
                }
            }
            Told::Withdrawn(memory) => {
                if let Some(free) = memories.remove(&(number, memory)) {
                    free();
                }
            }
            Told::Control(control) => events.push((number, Event::Control(control))),
            Told::Up => events.push((number, Event::Up)),
            Told::Down => events.push((number, Event::Down)),
            Told::Ended(error) => events.push((number, Event::Ended(error))),
        });
        match progress {
            ringlet_fabric::Progress::Busy => {
                state.give_room(rouse);
                Progress::Busy
            }
            ringlet_fabric::Progress::Idle => Progress::Idle,
        }
    }

    fn arm(&mut self) -> bool {
        let state = &mut *self.state();
        state.sleeps = state.node.may_doze();
        state.sleeps
    }

    fn disarm(&mut self) {
        self.state().sleeps = false;
    }

    /// Acknowledgements wait for something that carries them, but not for long.
    fn is_owed(&self) -> bool {
        self.state().node.owes()
    }

    fn overdue(&mut self) {
        self.state().node.acknowledge();
    }

    fn is_dear(&self) -> bool {
        self.state().node.is_dear()
    }

    fn descriptors(&self, tell: &mut dyn FnMut(BorrowedFd<'_>)) {
        self.state().node.fds().for_each(tell);
    }
}
