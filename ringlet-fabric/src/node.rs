//! The rails of this node, and its transports to others, which share them.

use std::io;
use std::os::fd::BorrowedFd;

use ringlet_linux::sys;

use crate::control::Control;
use crate::rail::{Event, Rail};
use crate::transport::{Told, Transport};
use crate::wire::{Header, NUMBERS, Notice, Token};
use crate::writes::Memory;

/// A transport of a node.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Number(u16);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Progress {
    Idle,
    Busy,
}

/// A rail that has told nothing for so many polls is polled in one of so many: mostly what is carried goes by few, and a poll costs as much as a message.
const QUIET_POLLS: u32 = 64;
const QUIET_POLLED: u32 = 8;

/// Rails have the same places in all nodes: the first of each reach one another, and so on.
pub struct Node {
    rails: Vec<Box<dyn Rail>>,
    /// Those that have said that they are broken, as a whole.
    broken: Vec<bool>,
    /// Polls since each has told something.
    quiet: Vec<u32>,
    transports: Vec<Option<Box<Transport>>>,
    open: Vec<Number>,
    /// Where the search for a free number begins: one is used again as late as can be, for there may be late notices of it.
    next: usize,
}

impl Node {
    pub fn new(rails: Vec<Box<dyn Rail>>) -> Node {
        let broken = vec![false; rails.len()];
        let quiet = vec![0; rails.len()];
        Node { rails, broken, quiet, transports: Vec::new(), open: Vec::new(), next: 0 }
    }

    /// Begins a transport to another node. `None`: there are too many.
    pub fn open(&mut self) -> Option<Number> {
        self.transports.resize_with(NUMBERS, || None);
        let free = |number: &usize| self.transports[*number].is_none();
        let number = (0..NUMBERS).map(|nth| (self.next + nth) % NUMBERS).find(free)?;
        let mut key = [0; 4];
        if !sys::random(&mut key) {
            return None;
        }
        self.next = number + 1;
        let key = u32::from_ne_bytes(key);
        let transport = Transport::new(number as u16, key, self.rails.len());
        self.transports[number] = Some(Box::new(transport));
        self.open.push(Number(number as u16));
        self.open.last().copied()
    }

    /// Ends a transport. Once this returns nothing is written to its memory, nor taken from it.
    pub fn close(&mut self, number: Number) {
        self.open.retain(|open| *open != number);
        if let Some(mut transport) = self.slot(number).take() {
            transport.withdraw_all(&mut self.rails);
        }
    }

    fn slot(&mut self, number: Number) -> &mut Option<Box<Transport>> {
        &mut self.transports[usize::from(number.0)]
    }

    /// Panics when it is closed: numbers are this node's own.
    pub fn transport(&mut self, number: Number) -> &mut Transport {
        self.slot(number).as_mut().expect("a transport that is open")
    }

    /// Of all transports together (`Transport::kept_bytes`).
    pub fn kept_bytes(&self) -> usize {
        self.transports.iter().flatten().map(|transport| transport.kept_bytes()).sum()
    }

    fn both(&mut self, number: Number) -> (&mut [Box<dyn Rail>], &mut Transport) {
        let transport = self.transports[usize::from(number.0)].as_mut();
        (&mut self.rails, transport.expect("a transport that is open"))
    }

    /// Lets the other node write to this memory, and `Transport::write` take from it. The other node knows it by the same number.
    ///
    /// # Safety
    /// It stays mapped until it is told as withdrawn, or the transport has ended or is closed; and it is shared memory, which others change at any time.
    pub unsafe fn register(
        &mut self,
        number: Number,
        at: *mut u8,
        bytes: usize,
    ) -> io::Result<Memory> {
        let (rails, transport) = self.both(number);
        // SAFETY: our own contract says of these bytes what `register` asks for: mapped for as long, and shared.
        unsafe { transport.register(rails, at, bytes, false) }
    }

    /// Memory that `Transport::write` may take from, and the other node can't write to: several transports may have the same.
    ///
    /// # Safety
    /// It stays mapped until it is told as withdrawn, or the transport has ended or is closed.
    pub unsafe fn register_source(
        &mut self,
        number: Number,
        at: *mut u8,
        bytes: usize,
    ) -> io::Result<Memory> {
        let (rails, transport) = self.both(number);
        // SAFETY: our own contract says of these bytes what `register` asks for: mapped for as long.
        unsafe { transport.register(rails, at, bytes, true) }
    }

    /// What the other node's transport has told as `Told::Control`.
    pub fn control(&mut self, number: Number, control: Control) {
        let (rails, transport) = self.both(number);
        transport.control(rails, control);
    }

    /// Tries rails again that are given up: now and then, by whoever has a clock.
    pub fn try_again(&mut self, number: Number) {
        let (rails, transport) = self.both(number);
        transport.try_again(rails);
    }

    /// Gives up a rail that is believed to carry nothing any more, though it does not say so (`Transport::oldest`).
    pub fn give_up(&mut self, number: Number, rail: usize) {
        self.transport(number).note_failure(rail, None);
    }

    /// Puts another endpoint in the place of one that is broken, which is the answer. All transports give it up, and may try the new one.
    pub fn replace(&mut self, place: usize, rail: Box<dyn Rail>) -> Box<dyn Rail> {
        for transport in self.transports.iter_mut().flatten() {
            transport.leave_endpoint(&mut self.rails, place);
        }
        self.broken[place] = false;
        self.quiet[place] = 0;
        std::mem::replace(&mut self.rails[place], rail)
    }

    /// Is this one broken, so that it is to be replaced?
    pub fn is_broken(&self, place: usize) -> bool {
        self.broken[place]
    }

    /// Sends what was given, and takes what has come. Never waits.
    pub fn poll(&mut self, tell: &mut dyn FnMut(Number, Told<'_>)) -> Progress {
        let Node { rails, broken, quiet, transports, open, .. } = self;
        let mut busy = false;
        // A rail that is nearly full has room for each in its turn.
        if open.len() > 1 {
            open.rotate_left(1);
        }
        for number in open.iter().copied() {
            if let Some(transport) = find(transports, number.0) {
                busy |= transport.work(rails, &mut |told| tell(number, told));
            }
        }
        for (place, rail) in rails.iter_mut().enumerate() {
            quiet[place] = quiet[place].wrapping_add(1);
            if quiet[place] > QUIET_POLLS && !quiet[place].is_multiple_of(QUIET_POLLED) {
                continue;
            }
            rail.poll(&mut |event| {
                (busy, quiet[place]) = (true, 0);
                broken[place] |= matches!(event, Event::Broken(_));
                take(place, event, transports, tell);
            });
        }
        if busy { Progress::Busy } else { Progress::Idle }
    }

    /// Each is readable when there is something to be polled; they may be slept on after `may_sleep`.
    pub fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.rails.iter().map(|rail| rail.fd())
    }

    /// Does a poll that finds nothing make system calls, by whichever rail? (Of several, those that tell nothing are polled rarely.)
    pub fn is_dear(&self) -> bool {
        !self.rails.is_empty() && self.rails.iter().all(|rail| rail.is_dear())
    }

    /// False: there is something to be polled first.
    pub fn may_sleep(&mut self) -> bool {
        !self.owes() && self.may_doze()
    }

    /// The same for who wakes by himself before long if this node `owes` something then, and has it `acknowledge`.
    pub fn may_doze(&mut self) -> bool {
        let Node { transports, open, .. } = self;
        let works = |number: &Number| find(transports, number.0).is_some_and(|t| t.has_work_now());
        // (Who is woken polls them all.)
        self.quiet.fill(0);
        !open.iter().any(works) && self.rails.iter_mut().all(|rail| rail.may_sleep())
    }

    /// Are there acknowledgements that wait for something that carries them?
    pub fn owes(&self) -> bool {
        let owes = |number: &Number| {
            self.transports[usize::from(number.0)].as_ref().is_some_and(|t| t.owes())
        };
        self.open.iter().any(owes)
    }

    /// They go with the next poll.
    pub fn acknowledge(&mut self) {
        self.transports.iter_mut().flatten().for_each(|transport| transport.acknowledge());
    }
}

fn find(transports: &mut [Option<Box<Transport>>], number: u16) -> Option<&mut Transport> {
    transports.get_mut(usize::from(number))?.as_deref_mut()
}

/// To whom it belongs, if anybody.
fn take(
    rail: usize,
    event: Event<'_>,
    transports: &mut [Option<Box<Transport>>],
    tell: &mut dyn FnMut(Number, Told<'_>),
) {
    match event {
        Event::Message(message) => {
            if let Some(header) = Header::read(message)
                && let Some(transport) = find(transports, header.number)
            {
                let tell = &mut |told: Told<'_>| tell(Number(header.number), told);
                transport.take_message(rail, header, message, tell);
            }
        }
        Event::Noticed { notice } => {
            let notice = Notice::unpack(notice);
            if let Some(transport) = find(transports, notice.number) {
                let tell = &mut |told: Told<'_>| tell(Number(notice.number), told);
                transport.take_notice(rail, notice, tell);
            }
        }
        Event::Failed { token, .. } => {
            let Token { number, epoch } = Token::unpack(token);
            if let Some(transport) = find(transports, number) {
                transport.note_failure(rail, Some(epoch));
            }
        }
        Event::Broken(_) => {
            for transport in transports.iter_mut().flatten() {
                transport.note_failure(rail, None);
            }
        }
        // What was sent is done with when the other end says so.
        Event::Done { .. } => {}
    }
}
