//! A receiver that leaves the ring for the kernel without waiting for its peer (`leaving`), while the sender goes back by itself at any
//! moment (`Mark::Back`): every order of steps of a small model. The sender is one thread that sends and goes back, and another that
//! rings (it waits for room, or was told to wake somebody); each of their steps is one access to what both processes share. What is
//! written to the kernel's connection arrives later.
#![cfg(not(loom))]

use std::collections::{HashSet, VecDeque};

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Closed {
    Open,
    /// The receiver leaves the ring.
    GoBack,
    /// The sender's answer: what is unread is sent again.
    Again,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Record {
    Byte(u8),
    /// The stream goes on in the kernel, behind so many doorbells.
    Back(u8),
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
    AwaitRingersToMark,
    CountedIn,
    /// Found that the receiver has not left.
    MayMark,
    /// Has done what it could; counts itself out, and then answers a receiver that has left.
    CountOut(bool),
    Answer,
    AwaitRingersToReturn,
    /// Sends again what was not read, from this record on.
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
    Decide,
    /// Throws away doorbells, until so many were.
    Discard(u8),
    OnKernel,
}

/// Rules of the protocol, each of which can be broken to see that it is needed.
#[derive(Clone, Copy)]
struct Rules {
    ringers_count_themselves: bool,
    markers_count_themselves: bool,
    markers_look_first: bool,
    receiver_awaits_both: bool,
    receiver_follows_marks: bool,
    receiver_counts_doorbells: bool,
    sender_awaits_ringers: bool,
    only_one_answers: bool,
}

const RIGHT: Rules = Rules {
    ringers_count_themselves: true,
    markers_count_themselves: true,
    markers_look_first: true,
    receiver_awaits_both: true,
    receiver_follows_marks: true,
    receiver_counts_doorbells: true,
    sender_awaits_ringers: true,
    only_one_answers: true,
};

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct World {
    closed: Closed,
    /// Published and not released. What `used` says once the receiver has left.
    ring: VecDeque<Record>,
    /// The stream's bytes, and doorbells (`None`): on their way, and arrived.
    wire: VecDeque<Option<u8>>,
    kernel: VecDeque<Option<u8>>,
    /// Threads that ring or go back, as the peer sees them (`Sender::working`), and those that ring, as we do (`End::ringers`).
    ringing: u8,
    ringers: u8,
    /// Doorbells written, and thrown away.
    bells: u8,
    discarded: u8,
    sent: u8,
    doorbells: u8,
    sending: Sending,
    send: Send,
    bell: Ring,
    receive: Receive,
    /// How often the receiver may still begin to leave, and whether it then stays if it can.
    leaves: u8,
    reads_on: bool,
    got: u8,
}

const BYTES: u8 = 3;
const DOORBELLS: u8 = 2;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Move {
    Send,
    /// The sender goes back by itself.
    GoBack,
    /// The sender looks at the ring while it has nothing to send: it slept and was woken.
    LookAround,
    Bell,
    Arrive,
    Receive,
    Leave,
    /// The receiver finds the sender at work for long, and takes its word back instead of waiting.
    TakeBack,
}

const MOVES: [Move; 8] = [
    Move::Send,
    Move::GoBack,
    Move::LookAround,
    Move::Bell,
    Move::Arrive,
    Move::Receive,
    Move::Leave,
    Move::TakeBack,
];

impl World {
    fn new(reads_on: bool) -> World {
        World {
            closed: Closed::Open,
            ring: VecDeque::new(),
            wire: VecDeque::new(),
            kernel: VecDeque::new(),
            ringing: 0,
            ringers: 0,
            bells: 0,
            discarded: 0,
            sent: 0,
            doorbells: 0,
            sending: Sending::Ring,
            send: Send::Idle,
            bell: Ring::Idle,
            receive: Receive::InRing,
            leaves: 2,
            reads_on,
            got: 0,
        }
    }

    /// The world after the move; `None` if it can't be made.
    fn after(&self, next: Move, rules: Rules) -> Option<Result<World, &'static str>> {
        let mut world = self.clone();
        let made = match next {
            Move::Send => world.send(rules),
            Move::GoBack => world.go_back(),
            Move::LookAround => world.look_around(),
            Move::Bell => world.ring_bell(rules),
            Move::Arrive => world.arrive(),
            Move::Receive => return world.receive(rules).map(|result| result.map(|()| world)),
            Move::Leave => world.leave(),
            Move::TakeBack => world.take_back(),
        };
        made.then_some(Ok(world))
    }

    fn send(&mut self, rules: Rules) -> bool {
        let waits = rules.sender_awaits_ringers && self.ringers > 0;
        let counted = rules.markers_count_themselves as u8;
        match self.send {
            Send::Idle if self.sent == BYTES => return false,
            Send::Idle => match self.sending {
                Sending::Ring if self.closed != Closed::Open => self.send = Send::Answer,
                Sending::Ring => {
                    self.ring.push_back(Record::Byte(self.sent));
                    self.sent += 1;
                    self.send = Send::Published;
                }
                Sending::Kernel => {
                    self.wire.push_back(Some(self.sent));
                    self.sent += 1;
                }
                Sending::Returning => unreachable!("it ends before the call does"),
            },
            Send::Published if self.closed != Closed::Open => self.send = Send::Answer,
            Send::Published => self.send = Send::Idle,
            Send::AwaitRingersToMark | Send::AwaitRingersToReturn if waits => return false,
            Send::AwaitRingersToMark => {
                self.ringing += counted;
                self.send = Send::CountedIn;
            }
            Send::CountedIn if rules.markers_look_first && self.closed != Closed::Open => {
                self.send = Send::CountOut(false);
            }
            Send::CountedIn => self.send = Send::MayMark,
            Send::MayMark => {
                self.ring.push_back(Record::Back(self.bells));
                self.send = Send::CountOut(true);
            }
            Send::CountOut(marked) => {
                self.ringing -= counted;
                if marked {
                    self.send = Send::Idle;
                } else {
                    self.sending = Sending::Ring;
                    self.send = Send::Answer;
                }
            }
            Send::Answer if self.closed == Closed::GoBack || !rules.only_one_answers => {
                self.closed = Closed::Again;
                self.sending = Sending::Returning;
                self.send = Send::AwaitRingersToReturn;
            }
            // The receiver has taken it back.
            Send::Answer => self.send = Send::Idle,
            Send::AwaitRingersToReturn => self.send = Send::Again(0),
            Send::Again(at) => match self.ring.get(at as usize) {
                Some(&record) => {
                    if let Record::Byte(byte) = record {
                        self.wire.push_back(Some(byte));
                    }
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

    fn go_back(&mut self) -> bool {
        let can = self.send == Send::Idle && self.sending == Sending::Ring;
        if can {
            self.sending = Sending::Kernel;
            self.send = Send::AwaitRingersToMark;
        }
        can
    }

    fn look_around(&mut self) -> bool {
        let left = self.closed != Closed::Open;
        let can = self.send == Send::Idle && self.sending == Sending::Ring && left;
        if can {
            self.send = Send::Answer;
        }
        can
    }

    fn ring_bell(&mut self, rules: Rules) -> bool {
        let counted = rules.ringers_count_themselves as u8;
        match self.bell {
            Ring::Idle if self.doorbells == DOORBELLS => return false,
            Ring::Idle => {
                self.doorbells += 1;
                self.ringing += counted;
                self.ringers += counted;
                self.bell = Ring::CountedIn;
            }
            Ring::CountedIn => {
                let doorbell = self.sending == Sending::Ring && self.closed == Closed::Open;
                self.bell = if doorbell { Ring::Allowed } else { Ring::Written };
            }
            Ring::Allowed => {
                self.wire.push_back(None);
                self.bells += 1;
                self.bell = Ring::Written;
            }
            Ring::Written => {
                self.ringing -= counted;
                self.ringers -= counted;
                self.bell = Ring::Idle;
            }
        }
        true
    }

    fn arrive(&mut self) -> bool {
        let next = self.wire.pop_front();
        self.kernel.extend(next);
        next.is_some()
    }

    fn receive(&mut self, rules: Rules) -> Option<Result<(), &'static str>> {
        match self.receive {
            Receive::InRing => match self.ring.pop_front() {
                Some(Record::Byte(byte)) => return Some(self.deliver(byte)),
                Some(Record::Back(bells)) => self.receive = Receive::Discard(bells),
                None if self.kernel.front() == Some(&None) => {
                    self.kernel.pop_front();
                    self.discarded += 1;
                }
                None => return None,
            },
            Receive::AwaitRinging if rules.receiver_awaits_both && self.ringing > 0 => return None,
            Receive::AwaitRinging => self.receive = Receive::Decide,
            Receive::Decide => {
                let marked = self.ring.iter().any(|record| matches!(record, Record::Back(_)));
                let open = self.closed == Closed::GoBack || !rules.only_one_answers;
                if marked && rules.receiver_follows_marks {
                    // The sender has gone first, and sends nothing again.
                    self.receive = Receive::InRing;
                } else if self.reads_on && !self.ring.is_empty() && open {
                    self.closed = Closed::Open;
                    self.receive = Receive::InRing;
                } else {
                    let arrived = self.discarded + self.kernel.len() as u8;
                    let counts = rules.receiver_counts_doorbells;
                    self.receive = Receive::Discard(if counts { self.bells } else { arrived });
                }
            }
            Receive::Discard(until) if self.discarded == until => self.receive = Receive::OnKernel,
            Receive::Discard(_) => match self.kernel.pop_front()? {
                None => self.discarded += 1,
                Some(_) => return Some(Err("a byte of the stream thrown away")),
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
        let can = self.receive == Receive::InRing && self.closed == Closed::Open && self.leaves > 0;
        if can {
            self.leaves -= 1;
            self.closed = Closed::GoBack;
            self.receive = Receive::AwaitRinging;
        }
        can
    }

    fn take_back(&mut self) -> bool {
        let waits = self.receive == Receive::AwaitRinging && self.ringing > 0;
        let can = waits && self.reads_on && self.closed == Closed::GoBack;
        if can {
            self.closed = Closed::Open;
            self.receive = Receive::InRing;
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
    let mut next = vec![World::new(false), World::new(true)];
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
fn nothing_is_lost_when_both_ends_leave() {
    let worlds = explore(RIGHT).unwrap_or_else(|error| panic!("{error}"));
    assert!(worlds > 5000, "only {worlds} worlds: the model has lost its moves");
}

#[test]
fn every_rule_is_needed() {
    let broken = [
        Rules { ringers_count_themselves: false, ..RIGHT },
        Rules { markers_count_themselves: false, ..RIGHT },
        Rules { markers_look_first: false, ..RIGHT },
        Rules { receiver_awaits_both: false, ..RIGHT },
        Rules { receiver_follows_marks: false, ..RIGHT },
        Rules { receiver_counts_doorbells: false, ..RIGHT },
        Rules { sender_awaits_ringers: false, ..RIGHT },
        Rules { only_one_answers: false, ..RIGHT },
    ];
    for (number, rules) in broken.into_iter().enumerate() {
        assert!(explore(rules).is_err(), "breaking rule {number} changes nothing");
    }
}
