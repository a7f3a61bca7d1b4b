//! A receiver that leaves the ring for the kernel without waiting for its peer (`GO_BACK`, `GONE_BACK`): every order of steps of a
//! small model. The sender is one thread that sends and another that rings (it waits for room, or was told to wake somebody); each
//! of their steps is one access to what both processes share.
#![cfg(not(loom))]

use std::collections::{HashSet, VecDeque};

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Closed {
    Open,
    /// The receiver reads the ring no more, and takes doorbells off the kernel's connection.
    GoBack,
    /// It has taken the last one: from now on it takes kernel bytes for data.
    GoneBack,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Sending {
    Ring,
    Returning,
    Kernel,
}

/// Where the sending thread is in its program.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Send {
    Idle,
    /// Has published a byte; will look whether the receiver has left.
    Published,
    /// Has said that it leaves the ring; waits for our own doorbells to be written.
    AwaitRingers,
    AwaitGoneBack,
    /// Sends again what was not read, from this position on.
    Again(u8),
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Ring {
    Idle,
    CountedIn,
    /// Found that a byte is a doorbell still.
    Allowed,
    Written,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Receive {
    InRing,
    AwaitRinging,
    Drain,
    OnKernel,
}

/// Rules of the protocol, each of which can be broken to see that it is needed.
#[derive(Clone, Copy)]
struct Rules {
    ringers_count_themselves: bool,
    receiver_awaits_ringers: bool,
    sender_awaits_gone_back: bool,
    sender_awaits_ringers: bool,
}

const RIGHT: Rules = Rules {
    ringers_count_themselves: true,
    receiver_awaits_ringers: true,
    sender_awaits_gone_back: true,
    sender_awaits_ringers: true,
};

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct World {
    closed: Closed,
    /// Published and not released: positions of the stream. What `used` says once the receiver has left.
    ring: VecDeque<u8>,
    /// The stream's bytes, and doorbells (`None`).
    kernel: VecDeque<Option<u8>>,
    /// Doorbells being written, as the peer sees it, and as we do.
    ringing: u8,
    sent: u8,
    doorbells: u8,
    sending: Sending,
    send: Send,
    bell: Ring,
    receive: Receive,
    got: u8,
}

const BYTES: u8 = 3;
const DOORBELLS: u8 = 2;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Move {
    Send,
    /// The sender looks at the ring while it has nothing to send: it slept and was woken.
    LookAround,
    Bell,
    Receive,
    Leave,
}

const MOVES: [Move; 5] = [Move::Send, Move::LookAround, Move::Bell, Move::Receive, Move::Leave];

impl World {
    fn new() -> World {
        World {
            closed: Closed::Open,
            ring: VecDeque::new(),
            kernel: VecDeque::new(),
            ringing: 0,
            sent: 0,
            doorbells: 0,
            sending: Sending::Ring,
            send: Send::Idle,
            bell: Ring::Idle,
            receive: Receive::InRing,
            got: 0,
        }
    }

    /// The world after the move; `None` if it can't be made.
    fn after(&self, next: Move, rules: Rules) -> Option<Result<World, &'static str>> {
        let mut world = self.clone();
        let made = match next {
            Move::Send => world.send(rules),
            Move::LookAround => world.look_around(),
            Move::Bell => world.ring_bell(rules),
            Move::Receive => return world.receive(rules).map(|result| result.map(|()| world)),
            Move::Leave => world.leave(),
        };
        made.then_some(Ok(world))
    }

    fn send(&mut self, rules: Rules) -> bool {
        match self.send {
            Send::Idle if self.sent == BYTES => return false,
            Send::Idle => match self.sending {
                Sending::Ring if self.closed != Closed::Open => self.begin_return(),
                Sending::Ring => {
                    self.ring.push_back(self.sent);
                    self.sent += 1;
                    self.send = Send::Published;
                }
                Sending::Kernel => {
                    self.kernel.push_back(Some(self.sent));
                    self.sent += 1;
                }
                Sending::Returning => unreachable!("it ends before the call does"),
            },
            Send::Published if self.closed != Closed::Open => self.begin_return(),
            Send::Published => self.send = Send::Idle,
            Send::AwaitRingers if rules.sender_awaits_ringers && self.ringing > 0 => return false,
            Send::AwaitRingers => self.send = Send::AwaitGoneBack,
            Send::AwaitGoneBack
                if rules.sender_awaits_gone_back && self.closed != Closed::GoneBack =>
            {
                return false;
            }
            Send::AwaitGoneBack => self.send = Send::Again(0),
            Send::Again(at) => match self.ring.get(at as usize) {
                Some(&byte) => {
                    self.kernel.push_back(Some(byte));
                    self.send = Send::Again(at + 1);
                }
                None => {
                    self.sending = Sending::Kernel;
                    self.send = Send::Idle;
                }
            },
        }
        true
    }

    fn begin_return(&mut self) {
        self.sending = Sending::Returning;
        self.send = Send::AwaitRingers;
    }

    fn look_around(&mut self) -> bool {
        let left = self.closed != Closed::Open;
        let can = self.send == Send::Idle && self.sending == Sending::Ring && left;
        if can {
            self.begin_return();
        }
        can
    }

    fn ring_bell(&mut self, rules: Rules) -> bool {
        match self.bell {
            Ring::Idle if self.doorbells == DOORBELLS => return false,
            Ring::Idle => {
                self.doorbells += 1;
                self.ringing += rules.ringers_count_themselves as u8;
                self.bell = Ring::CountedIn;
            }
            Ring::CountedIn => {
                let doorbell = self.sending == Sending::Ring && self.closed == Closed::Open;
                self.bell = if doorbell { Ring::Allowed } else { Ring::Written };
            }
            Ring::Allowed => {
                self.kernel.push_back(None);
                self.bell = Ring::Written;
            }
            Ring::Written => {
                self.ringing -= rules.ringers_count_themselves as u8;
                self.bell = Ring::Idle;
            }
        }
        true
    }

    fn receive(&mut self, rules: Rules) -> Option<Result<(), &'static str>> {
        match self.receive {
            Receive::InRing => {
                let byte = self.ring.pop_front()?;
                return Some(self.deliver(byte));
            }
            Receive::AwaitRinging if rules.receiver_awaits_ringers && self.ringing > 0 => {
                return None;
            }
            Receive::AwaitRinging => self.receive = Receive::Drain,
            Receive::Drain => match self.kernel.pop_front() {
                None => {
                    self.closed = Closed::GoneBack;
                    self.receive = Receive::OnKernel;
                }
                Some(None) => {}
                Some(Some(_)) => return Some(Err("a byte of the stream thrown away")),
            },
            Receive::OnKernel => {
                return Some(match self.kernel.pop_front()? {
                    Some(byte) => self.deliver(byte),
                    None => Err("a doorbell read as a byte of the stream"),
                });
            }
        }
        Some(Ok(()))
    }

    fn leave(&mut self) -> bool {
        let can = self.receive == Receive::InRing;
        if can {
            self.closed = Closed::GoBack;
            self.receive = Receive::AwaitRinging;
        }
        can
    }

    fn deliver(&mut self, byte: u8) -> Result<(), &'static str> {
        if byte != self.got {
            return Err("a byte lost, doubled or out of order");
        }
        self.got += 1;
        Ok(())
    }
}

/// Every order of steps: how many worlds there are, or what went wrong in the first bad one.
fn explore(rules: Rules) -> Result<usize, &'static str> {
    let mut known = HashSet::new();
    let mut next = vec![World::new()];
    while let Some(world) = next.pop() {
        if !known.insert(world.clone()) {
            continue;
        }
        let before = next.len();
        for world in MOVES.iter().filter_map(|&step| world.after(step, rules)) {
            next.push(world?);
        }
        if next.len() == before && world.got < BYTES {
            return Err("a byte that is never delivered");
        }
    }
    Ok(known.len())
}

#[test]
fn nothing_is_lost_when_the_receiver_leaves() {
    let worlds = explore(RIGHT).unwrap_or_else(|error| panic!("{error}"));
    assert!(worlds > 500, "only {worlds} worlds: the model has lost its moves");
}

#[test]
fn every_rule_is_needed() {
    let broken = [
        Rules { ringers_count_themselves: false, ..RIGHT },
        Rules { receiver_awaits_ringers: false, ..RIGHT },
        Rules { sender_awaits_gone_back: false, ..RIGHT },
    ];
    for (number, rules) in broken.into_iter().enumerate() {
        assert!(explore(rules).is_err(), "breaking rule {number} changes nothing");
    }
    // The receiver waits for them too; the sender's own wait is for the other way back, where the receiver does not.
    assert!(explore(Rules { sender_awaits_ringers: false, ..RIGHT }).is_ok());
}
