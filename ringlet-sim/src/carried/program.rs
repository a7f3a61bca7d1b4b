//! A program at one end of a connection: it sends and receives as it likes, and sleeps whenever there is nothing for it. Each byte follows from its place.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;

use rand::{RngExt, SeedableRng};
use rand_pcg::Pcg64Mcg;
use ringlet_adapter::{Rings, Segment, WakesOne};
use ringlet_core::layout::{Geometry, WANT_EVENT};
use ringlet_core::memory::{Area, Buffer, Buffers};
use ringlet_core::mirror::Asks;
use ringlet_core::ring::{Next, Rx, SegmentRing, Tx};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};

use crate::memory::Memory;

const RING_BYTES: usize = 64 << 10;
/// What is written to memory that was handed back.
const CANARY: u8 = 0xc5;
const STEPS_AT_ONCE: u32 = 4;

/// What a program asks of its lane, or waits for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Step {
    Again,
    Sleeps,
    /// It is done, and waits for its lane to say that all is delivered.
    Parts,
    Over,
}

/// How a lane rings its program.
pub struct Bell {
    /// Programs that were rung, of all.
    pub rung: Rc<RefCell<Vec<(usize, usize)>>>,
    pub whose: (usize, usize),
    /// Nobody sleeps on it.
    pub fd: Arc<OwnedFd>,
}

impl Rings for Bell {
    fn published(&mut self) {}
    fn event(&mut self) -> bool {
        self.rung.borrow_mut().push(self.whose);
        true
    }
    /// (No program asks for one.)
    fn byte(&mut self) -> Poll<bool> {
        Poll::Ready(false)
    }
    fn part(&mut self) -> Poll<()> {
        Poll::Ready(())
    }
}

impl WakesOne for Bell {
    fn eventfd(&self) -> BorrowedFd<'_> {
        (*self.fd).as_fd()
    }
}

pub struct Program {
    memory: Memory,
    geometry: Geometry,
    /// Of the connection, and the direction in which it sends.
    seed: u64,
    end: usize,
    tx: Tx,
    rx: Rx,
    pub sent: u64,
    pub got: u64,
    bytes: u64,
    parts: bool,
    pub sleeps: bool,
    rng: Pcg64Mcg,
    /// No transport has the segment (any more).
    pub freed: Rc<Cell<bool>>,
}

fn byte(seed: u64, direction: usize, at: u64) -> u8 {
    let word = (at ^ seed << 20 ^ (direction as u64) << 60).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (word >> 56) as u8
}

/// Calls `f` with these bytes as a list of buffers.
fn with_buffers<R>(bytes: &mut [u8], f: impl FnOnce(&mut Buffers) -> R) -> R {
    let list = [Buffer { base: bytes.as_mut_ptr(), len: bytes.len() }];
    // SAFETY: valid for its length, and borrowed for the call.
    f(&mut unsafe { Buffers::new(&list) })
}

impl Program {
    /// It sends so many bytes, and receives as many.
    pub fn new(seed: u64, end: usize, bytes: u64) -> Program {
        let geometry = Geometry::new(RING_BYTES).expect("a legal size");
        Program {
            memory: Memory::new(geometry.segment_bytes()),
            geometry,
            seed,
            end,
            tx: Tx::default(),
            rx: Rx::default(),
            sent: 0,
            got: 0,
            bytes,
            parts: false,
            sleeps: false,
            rng: Pcg64Mcg::seed_from_u64(seed * 2 + end as u64),
            freed: Rc::new(Cell::new(false)),
        }
    }

    fn area(&mut self) -> Area {
        self.memory.area(self.geometry.segment_bytes())
    }

    pub fn segment(&mut self) -> Segment {
        Segment { area: self.area(), geometry: self.geometry }
    }

    fn rings(&mut self) -> (SegmentRing, SegmentRing) {
        let (area, geometry) = (self.area(), self.geometry);
        let ring = |direction| SegmentRing::new(area, geometry, direction);
        (ring(self.end), ring(1 - self.end))
    }

    /// Does some of what it can. `wake`: there is something for its lane, which sleeps.
    pub fn step(&mut self, wake: &mut bool) -> Result<Step, String> {
        let (outgoing, incoming) = self.rings();
        for _ in 0..STEPS_AT_ONCE {
            let sent = self.rng.random_range(0..3) > 0 && self.send(&outgoing);
            let got = self.receive(&incoming, wake)?;
            if sent {
                *wake |= outgoing.control().data_wish().granted_by_sender() & WANT_EVENT != 0;
            }
            if self.is_done() {
                if !std::mem::replace(&mut self.parts, true) {
                    outgoing.control().ask_parting();
                    *wake |= outgoing.control().data_wish().granted_by_sender() & WANT_EVENT != 0;
                }
                let over = outgoing.control().has_parted();
                return Ok(if over { Step::Over } else { Step::Parts });
            }
            if !sent && !got {
                let for_room = self.sent < self.bytes;
                if for_room {
                    outgoing.control().room_wish().want(WANT_EVENT);
                }
                incoming.control().data_wish().want(WANT_EVENT);
                let ready = self.rx.ready(&incoming) || for_room && self.tx.writable(&outgoing);
                self.sleeps = !ready;
                return Ok(if ready { Step::Again } else { Step::Sleeps });
            }
        }
        Ok(Step::Again)
    }

    pub fn is_done(&self) -> bool {
        self.sent == self.bytes && self.got == self.bytes
    }

    fn send(&mut self, to: &SegmentRing) -> bool {
        let most = 1 << self.rng.random_range(0..15);
        let n = self.rng.random_range(1..=most).min(self.bytes - self.sent);
        if n == 0 {
            return false;
        }
        let mut bytes: Vec<u8> =
            (self.sent..self.sent + n).map(|at| byte(self.seed, self.end, at)).collect();
        let pushed = with_buffers(&mut bytes, |from| self.tx.push(to, from));
        self.sent += pushed as u64;
        pushed > 0
    }

    fn receive(&mut self, from: &SegmentRing, wake: &mut bool) -> Result<bool, String> {
        let mut bytes = vec![0; 1 << self.rng.random_range(0..15)];
        match with_buffers(&mut bytes, |to| self.rx.pop(from, to)) {
            Next::Bytes(n, look) => {
                let is = |at: u64| byte(self.seed, 1 - self.end, at);
                if let Some(at) = (0..n).find(|at| bytes[*at] != is(self.got + *at as u64)) {
                    return Err(format!(
                        "byte {} is another one than was sent",
                        self.got + at as u64
                    ));
                }
                self.got += n as u64;
                if look {
                    let how = from.control().room_wish().granted_by_receiver();
                    *wake |= how & WANT_EVENT != 0;
                }
                Ok(true)
            }
            Next::Empty => Ok(false),
            other => Err(format!("the ring is corrupt: {other:?}")),
        }
    }

    /// The connection is the kernel's again: takes what is left here.
    pub fn drain(&mut self) -> Result<(), String> {
        let (_, incoming) = self.rings();
        while self.receive(&incoming, &mut false)? {}
        Ok(())
    }

    /// All that the other end has not taken is sent again, if this end still has it.
    pub fn send_again(&mut self, taken: u64) -> Result<(), String> {
        let (outgoing, _) = self.rings();
        self.tx.take_credit(&outgoing);
        let kept = self.tx.outstanding_bytes(&outgoing) as u64;
        let sent = self.sent;
        if taken > sent {
            return Err(format!("{taken} bytes have come, of {sent}"));
        }
        let mut at = sent - kept;
        if taken < at {
            return Err(format!("{taken} bytes have come, and those before {at} are given up"));
        }
        let mut bytes = vec![0; RING_BYTES];
        while at < sent {
            let oldest = self.tx.oldest(&outgoing, 0, &mut bytes);
            let n = oldest.len() as u64;
            let is_right =
                |(nth, found): (usize, &u8)| *found == byte(self.seed, self.end, at + nth as u64);
            if n == 0 || !oldest.iter().enumerate().all(is_right) {
                return Err(format!("what is to be sent again from byte {at} on is not there"));
            }
            at += n;
            if !self.tx.pass_oldest(&outgoing) {
                return Err(format!("nothing stands behind byte {at}"));
            }
        }
        Ok(())
    }

    /// Nobody has this memory any more.
    pub fn bury(&mut self) {
        let area = self.area();
        // SAFETY: all of it is ours.
        unsafe { area.base().write_bytes(CANARY, area.len()) };
    }

    pub fn is_buried(&mut self) -> bool {
        let area = self.area();
        // SAFETY: all of it is ours, and all who might write to it are on this thread.
        let bytes = unsafe { std::slice::from_raw_parts(area.base(), area.len()) };
        bytes.iter().all(|byte| *byte == CANARY)
    }
}
