//! What another node says, or whoever sends to our rails: nothing of it is a panic, a hang, or memory without bound. The transport goes on, or ends with
//! an error that names it, and then all memory is withdrawn.

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex};

use fastrand::Rng;
use ringlet_fabric::rail::{Event, Grant, MESSAGE_BYTES, Peer, Rail, Refused, Region};
use ringlet_fabric::{
    Control, Error, Granted, MEMORIES, Memory, Node, Number, Receipt, Told, Write,
};

/// What the rails do is the test's.
#[derive(Default)]
struct Wire {
    /// What comes next.
    messages: VecDeque<Vec<u8>>,
    notices: VecDeque<u32>,
    /// What went.
    sent: VecDeque<Vec<u8>>,
    written: VecDeque<(u32, u64)>,
    registered: BTreeMap<u32, usize>,
    refuses: bool,
    next: u32,
}

/// A rail whose other end is hostile.
struct HostileRail(Arc<Mutex<Wire>>, OwnedFd);

impl Rail for HostileRail {
    fn name(&self) -> &[u8] {
        b"hostile"
    }
    fn reach(&mut self, name: &[u8]) -> io::Result<Peer> {
        if name.len() > 100 { Err(io::ErrorKind::InvalidInput.into()) } else { Ok(Peer(0)) }
    }
    fn forget(&mut self, _: Peer) {}
    unsafe fn register(&mut self, _: *mut u8, bytes: usize) -> io::Result<(Region, Grant)> {
        let mut wire = self.0.lock().unwrap();
        if wire.refuses {
            return Err(io::ErrorKind::OutOfMemory.into());
        }
        wire.next += 1;
        let number = wire.next;
        wire.registered.insert(number, bytes);
        Ok((Region(number), Grant::default()))
    }
    unsafe fn register_source(&mut self, at: *mut u8, bytes: usize) -> io::Result<Region> {
        // SAFETY: only its size is of use.
        unsafe { self.register(at, bytes) }.map(|(region, _)| region)
    }
    fn withdraw(&mut self, region: Region) {
        assert!(self.0.lock().unwrap().registered.remove(&region.0).is_some(), "withdrawn twice");
    }
    fn write(
        &mut self,
        _: Peer,
        from: Region,
        at: usize,
        bytes: usize,
        _: Grant,
        _: u64,
        notice: u32,
        token: u64,
    ) -> Result<(), Refused> {
        let mut wire = self.0.lock().unwrap();
        assert!(at + bytes <= wire.registered[&from.0]);
        wire.written.push_back((notice, token));
        Ok(())
    }
    fn send(&mut self, _: Peer, message: &[u8], _: u64) -> Result<(), Refused> {
        assert!(message.len() <= MESSAGE_BYTES);
        let mut wire = self.0.lock().unwrap();
        if wire.sent.len() >= 64 {
            return Err(Refused::Full);
        }
        wire.sent.push_back(message.to_vec());
        Ok(())
    }
    fn poll(&mut self, tell: &mut dyn FnMut(Event<'_>)) {
        let mut wire = self.0.lock().unwrap();
        let (messages, notices) =
            (std::mem::take(&mut wire.messages), std::mem::take(&mut wire.notices));
        drop(wire);
        messages.iter().for_each(|message| tell(Event::Message(message)));
        notices.into_iter().for_each(|notice| tell(Event::Noticed { notice }));
    }
    fn fd(&self) -> BorrowedFd<'_> {
        self.1.as_fd()
    }
    fn may_sleep(&mut self) -> bool {
        true
    }
}

/// A node of ours with two rails, and what its transport has said.
struct Victim {
    node: Node,
    number: Number,
    wires: [Arc<Mutex<Wire>>; 2],
    memory: Box<[u8; 4096]>,
    hello: (u16, u32),
    said: Vec<Control>,
    frames: Vec<Vec<u8>>,
    ended: Option<Error>,
    is_up: bool,
}

impl Victim {
    fn new() -> Victim {
        let wires: [Arc<Mutex<Wire>>; 2] = Default::default();
        let rails = wires.iter().map(|wire| {
            let fd = std::fs::File::open("/dev/null").unwrap().into();
            Box::new(HostileRail(wire.clone(), fd)) as Box<dyn Rail>
        });
        let mut node = Node::new(rails.collect());
        let number = node.open().unwrap();
        let mut victim = Victim {
            node,
            number,
            wires,
            memory: Box::new([0; 4096]),
            hello: (0, 0),
            said: Vec::new(),
            frames: Vec::new(),
            ended: None,
            is_up: false,
        };
        victim.poll();
        let Some(Control::Hello { number, key, rails: 2 }) = victim.said.first() else {
            panic!("{:?}", victim.said)
        };
        victim.hello = (*number, *key);
        victim
    }

    /// One with which both rails are in use, memory is registered, and something is under way.
    fn in_use() -> Victim {
        let mut victim = Victim::new();
        victim.control(Control::Hello { number: 5, key: 99, rails: 2 });
        victim.register();
        let granted = Granted { memory: Memory(0), key: 1, base: 0 };
        victim.control(Control::Registered { memory: Memory(0), bytes: 4096, rails: vec![] });
        for rail in 0..2 {
            let (name, grants) = (b"x".to_vec(), vec![granted]);
            victim.control(Control::Try { rail, epoch: 1, name, grants });
            victim.control(Control::Heard { rail, epoch: 1 });
            let probe = victim.message(3, 1, [0, first(), first()], &[]);
            victim.wires[rail].lock().unwrap().messages.push_back(probe);
        }
        victim.poll();
        victim.poll();
        assert!(victim.is_up && victim.node.transport(victim.number).is_up(1));
        for nth in 0..4 {
            let transport = victim.node.transport(victim.number);
            let (from, to) = (Memory(0), Memory(0));
            transport.write(Write { from, at: 0, bytes: 100, to, offset: nth }).unwrap();
            transport.frame(b"hello", true).unwrap();
            victim.poll();
        }
        victim
    }

    fn register(&mut self) {
        // SAFETY: no rail writes to it.
        let result = unsafe { self.node.register(self.number, self.memory.as_mut_ptr(), 4096) };
        assert!(result.is_ok() || self.node.transport(self.number).frame(b"", false).is_err());
    }

    fn message(&self, kind: u16, epoch: u16, words: [u32; 3], frames: &[u8]) -> Vec<u8> {
        let (number, key) = self.hello;
        let mut bytes = (number | kind << 10).to_le_bytes().to_vec();
        bytes.extend(epoch.to_le_bytes());
        bytes.extend(key.to_le_bytes());
        words.iter().for_each(|word| bytes.extend(word.to_le_bytes()));
        bytes.extend(frames);
        bytes
    }

    fn control(&mut self, control: Control) {
        self.node.control(self.number, control);
    }

    fn poll(&mut self) {
        let Victim { node, said, frames, ended, is_up, .. } = self;
        node.poll(&mut |_, told| match told {
            Told::Control(control) => said.push(control),
            Told::Frame(bytes) => frames.push(bytes.to_vec()),
            Told::Ended(error) => assert!(ended.replace(error).is_none(), "ended twice"),
            Told::Up => *is_up = true,
            Told::Down => *is_up = false,
            Told::Withdrawn(_) => {}
        });
    }

    /// What happens to a message.
    fn after(mut self, rail: usize, message: Vec<u8>) -> (Vec<Vec<u8>>, Option<Error>) {
        self.wires[rail].lock().unwrap().messages.push_back(message);
        self.poll();
        self.poll();
        self.check();
        (self.frames, self.ended)
    }

    /// What happens to something that is said.
    fn told(mut self, control: Control) -> Option<Error> {
        self.control(control);
        self.poll();
        self.poll();
        self.check();
        self.ended
    }

    fn check(&self) {
        let granted = self.wires.iter().map(|wire| wire.lock().unwrap().registered.len());
        assert!(self.ended.is_none() || granted.sum::<usize>() == 0, "memory is still granted");
    }
}

/// The number of the first message and of the first write.
fn first() -> u32 {
    u32::MAX - 20
}

#[test]
fn each_error_has_its_name() {
    let start = [first(), first(), first()];
    let frames = |words: [u32; 3], frames: &[u8]| {
        let victim = Victim::in_use();
        let message = victim.message(1, 1, words, frames);
        victim.after(0, message)
    };
    assert_eq!(frames(start, b"\x02\x00hi"), (vec![b"hi".to_vec()], None));
    let error = |words, bytes: &[u8]| frames(words, bytes).1.expect("an error");
    for bytes in
        [&b"\x01"[..], b"\x03\x00hi", b"\xff\x7f", b"\x01\x04", b"\x00\x80\0\0\0", b"\x02\x80"]
    {
        assert_eq!(error(start, bytes), Error::Frame, "{bytes:?}");
    }
    assert_eq!(error([first().wrapping_add(128), first(), first()], b""), Error::Sequence(107));
    let far = first().wrapping_add(5);
    assert_eq!(error([first(), far, first()], b""), Error::Acknowledgement(far));
    assert_eq!(error([first(), first(), far], b""), Error::Arrival(far));
    let needs = [&b"\x00\x80"[..], &first().wrapping_add(4097).to_le_bytes()].concat();
    assert!(matches!(error(start, &needs), Error::Needs(_)));
    let victim = Victim::in_use();
    let message = victim.message(9, 1, start, b"");
    assert_eq!(victim.after(0, message).1, Some(Error::Kind));
    // None of these is ours.
    for (change, by) in [(0, 1), (2, 1), (4, 1), (7, 0x80)] {
        let victim = Victim::in_use();
        let mut message = victim.message(1, 1, start, b"\x02\x00hi");
        message[change] ^= by;
        assert_eq!(victim.after(1, message), (vec![], None));
    }
    let mut victim = Victim::in_use();
    let number = u32::from(victim.hello.0) << 22;
    let far = (first() as u16).wrapping_add(4096);
    victim.wires[0].lock().unwrap().notices.push_back(number | 1 << 16 | u32::from(far));
    victim.poll();
    victim.poll();
    assert_eq!(victim.ended, Some(Error::Notice(far)));
    victim.check();
}

#[test]
fn each_lie_beside_the_rails_has_its_name() {
    let receipt = |arrived: u32, beyond: &[u16]| Receipt { arrived, beyond: beyond.to_vec() };
    let name = || b"y".to_vec();
    let left = |receipt| Control::Left { rail: 0, epoch: 1, receipt };
    let fine = [
        left(receipt(first(), &[])),
        left(receipt(first().wrapping_add(4), &[])),
        left(receipt(first().wrapping_add(1), &[1, 2])),
        Control::Withdrawing { memory: Memory(0) },
        Control::Registered { memory: Memory(1), bytes: 0, rails: vec![] },
    ];
    for control in fine {
        assert_eq!(Victim::in_use().told(control.clone()), None, "{control:?}");
    }
    let granted = Granted { memory: Memory(1), key: 0, base: 0 };
    let lies = [
        Control::Hello { number: 1, key: 1, rails: 1 },
        Control::Try { rail: 0, epoch: 1, name: name(), grants: vec![] },
        Control::Try { rail: 0, epoch: 2, name: name(), grants: vec![] },
        Control::Try { rail: usize::MAX, epoch: 1, name: name(), grants: vec![] },
        Control::Heard { rail: 1, epoch: 1 },
        Control::Heard { rail: 2, epoch: 1 },
        left(receipt(first().wrapping_add(5), &[])),
        left(receipt(first(), &[4])),
        left(receipt(first(), &[u16::MAX])),
        left(receipt(first().wrapping_sub(9), &[u16::MAX])),
        Control::Left { rail: 0, epoch: 2, receipt: receipt(first(), &[]) },
        Control::Left { rail: 7, epoch: 1, receipt: receipt(first(), &[]) },
        Control::Registered { memory: Memory(2), bytes: 1, rails: vec![] },
        Control::Registered { memory: Memory(1), bytes: 1, rails: vec![(2, granted)] },
        Control::Withdrawing { memory: Memory(1) },
        Control::Free { memory: Memory(0) },
        Control::Free { memory: Memory(9) },
    ];
    for control in lies {
        assert!(Victim::in_use().told(control.clone()).is_some(), "{control:?}");
    }
    let nobody = Control::Heard { rail: 0, epoch: 1 };
    assert_eq!(Victim::new().told(nobody), Some(Error::Hello));
    let beyond = Control::Hello { number: 1024, key: 1, rails: 1 };
    assert_eq!(Victim::new().told(beyond), Some(Error::Hello));
}

fn any_number(random: &mut Rng, near: &[u32]) -> u32 {
    match random.u32(..8) {
        0 => random.u32(..),
        _ => random.choice(near).unwrap().wrapping_add(random.u32(..12)).wrapping_sub(2),
    }
}

fn any_control(random: &mut Rng) -> Control {
    let near = [0, first()];
    let rail = if random.u32(..20) == 0 { random.usize(..) } else { random.usize(..2) };
    let epoch = random.u16(..4);
    let memory = Memory(random.u32(..6));
    let mut grants = || {
        let one = |random: &mut Rng| Granted { memory, key: random.u64(..), base: random.u64(..) };
        (0..random.usize(..3)).map(|_| one(random)).collect::<Vec<_>>()
    };
    let list = grants();
    match random.u32(..14) {
        0 => {
            Control::Hello { number: random.u16(..), key: random.u32(..), rails: random.usize(..4) }
        }
        1..=3 => {
            let name = vec![b'n'; random.usize(..102)];
            Control::Try { rail, epoch, name, grants: list }
        }
        4..=5 => Control::Heard { rail, epoch },
        6..=8 => {
            let arrived = any_number(random, &near);
            let beyond = (0..random.usize(..4)).map(|_| random.u16(..6)).collect();
            Control::Left { rail, epoch, receipt: Receipt { arrived, beyond } }
        }
        9..=10 => {
            let rails = list.into_iter().map(|granted| (rail, granted)).collect();
            Control::Registered { memory, bytes: random.u64(..8192), rails }
        }
        11 => Control::Withdrawing { memory },
        _ => Control::Free { memory },
    }
}

fn any_message(random: &mut Rng, victim: &Victim) -> Vec<u8> {
    let near = [first(), 0, first().wrapping_add(128)];
    // Mostly what might be, so that much of it goes on.
    let words = [4, 2, 2].map(|most| match random.u32(..40) {
        0 => any_number(random, &near),
        _ => first().wrapping_add(random.u32(..most)),
    });
    let mut frames = Vec::new();
    for _ in 0..random.usize(..5) {
        let most = if random.u32(..30) > 0 { 8 } else { 1200 };
        let n = random.usize(..most);
        let needs = random.u32(..4) == 0;
        frames.extend((n as u16 | (needs as u16) << 15).to_le_bytes());
        if needs {
            frames.extend(any_number(random, &near).to_le_bytes());
        }
        frames.extend(std::iter::repeat_n(0, n));
    }
    frames.truncate(MESSAGE_BYTES - 20);
    let kind = if random.u32(..50) == 0 { random.u16(..64) } else { random.u16(1..4) };
    let mut message = victim.message(kind, random.u16(..3), words, &frames);
    if random.u32(..10) == 0 {
        let nth = random.usize(..message.len());
        message[nth] = random.u8(..);
    }
    if random.u32(..8) == 0 {
        message.truncate(random.usize(..=message.len()));
    }
    message
}

#[test]
fn anything_may_be_said() {
    let mut random = Rng::with_seed(11);
    let (mut ends, mut kinds, mut delivered) = (0, HashSet::new(), 0);
    for round in 0..12_000 {
        let mut victim = if random.u32(..8) == 0 { Victim::new() } else { Victim::in_use() };
        for _ in 0..random.usize(1..60) {
            match random.u32(..10) {
                0 if random.bool() => victim.control(any_control(&mut random)),
                // What was sent comes back, as it is or a little changed, and as if to us.
                1..=2 => {
                    let wire = &victim.wires[random.usize(..2)];
                    let sent = wire.lock().unwrap().sent.pop_front();
                    if let Some(mut message) = sent {
                        message[..2].copy_from_slice(&(victim.hello.0 | 1 << 10).to_le_bytes());
                        message[4..8].copy_from_slice(&victim.hello.1.to_le_bytes());
                        let nth = random.usize(8..message.len());
                        message[nth] ^= 1 << random.u32(..12).min(7);
                        wire.lock().unwrap().messages.push_back(message);
                    }
                }
                3 => {
                    let notice = u32::from(victim.hello.0) << 22
                        | random.u32(..3) << 16
                        | any_number(&mut random, &[first()]) & 0xffff;
                    let notice = if random.u32(..9) == 0 { random.u32(..) } else { notice };
                    victim.wires[random.usize(..2)].lock().unwrap().notices.push_back(notice);
                }
                4 => {
                    let transport = victim.node.transport(victim.number);
                    let _ = transport.frame(&[7; 500], random.bool());
                    let (from, to) = (Memory(0), Memory(random.u32(..3)));
                    let offset = random.u64(..5000);
                    let _ = transport.write(Write { from, at: 9, bytes: 99, to, offset });
                }
                5 => match random.u32(..4) {
                    0 => victim.register(),
                    1 => victim.node.transport(victim.number).withdraw(Memory(0)),
                    2 => victim.node.try_again(victim.number),
                    _ => victim.node.give_up(victim.number, random.usize(..2)),
                },
                _ => {
                    let message = any_message(&mut random, &victim);
                    victim.wires[random.usize(..2)].lock().unwrap().messages.push_back(message);
                }
            }
            if random.bool() {
                victim.poll();
            }
        }
        victim.poll();
        victim.poll();
        victim.check();
        delivered += victim.frames.len();
        if let Some(error) = &victim.ended {
            ends += 1;
            kinds.insert(std::mem::discriminant(error));
        }
        victim.node.close(victim.number);
        let granted = victim.wires.iter().map(|wire| wire.lock().unwrap().registered.len());
        assert_eq!(granted.sum::<usize>(), 0, "round {round}: memory of a closed transport");
    }
    println!("{ends} ended, by {} kinds of errors; {delivered} frames", kinds.len());
    assert!(ends > 3000 && ends < 11_000 && kinds.len() == 10 && delivered > 500);
}

/// An acknowledgement may be lost with its rail, though the message that it was for came by another.
#[test]
fn what_a_rail_may_have_lost_is_acknowledged_again() {
    let mut victim = Victim::in_use();
    // Nothing of its own is under way any more, with which it could go.
    let all = first().wrapping_add(4);
    let message = victim.message(1, 1, [first(), all, all], b"\x02\x00hi");
    victim.wires[1].lock().unwrap().messages.push_back(message);
    let acknowledges = |victim: &Victim, rail: usize| {
        let sent = std::mem::take(&mut victim.wires[rail].lock().unwrap().sent);
        let next = first().wrapping_add(1).to_le_bytes();
        sent.iter().any(|message| message[12..16] == next)
    };
    // (It waits for a while for something with which it can go.)
    (0..100).for_each(|_| victim.poll());
    assert!(acknowledges(&victim, 0));
    (0..100).for_each(|_| victim.poll());
    assert!(!acknowledges(&victim, 0) && !acknowledges(&victim, 1), "it is told again and again");
    victim.node.give_up(victim.number, 0);
    (0..4).for_each(|_| victim.poll());
    assert!(!acknowledges(&victim, 0) && acknowledges(&victim, 1));
}

/// A rail that swallows all is found out by what stays the oldest, and what went there goes by another.
#[test]
fn a_silent_rail_can_be_given_up() {
    let mut victim = Victim::in_use();
    let number = victim.number;
    let oldest = |victim: &mut Victim| victim.node.transport(number).oldest();
    assert_eq!(oldest(&mut victim), [Some((0, first())); 2]);
    victim.wires[1].lock().unwrap().sent.clear();
    victim.node.give_up(number, 0);
    victim.poll();
    // The writes wait for the other end's answer.
    assert_eq!(oldest(&mut victim), [Some((1, first())), Some((0, first()))]);
    let receipt = Receipt { arrived: first(), beyond: vec![2] };
    let before = victim.wires[1].lock().unwrap().written.len();
    victim.control(Control::Left { rail: 0, epoch: 1, receipt });
    victim.poll();
    assert_eq!(oldest(&mut victim), [Some((1, first())); 2]);
    // Of four writes two were under way there, if rails have the same load; and one of them had arrived.
    let wires = &victim.wires;
    let [there, here] = [0, 1].map(|rail| wires[rail].lock().unwrap().written.clone());
    let arrived = there.iter().filter(|(notice, _)| *notice as u16 == first() as u16 + 2).count();
    assert_eq!((there.len(), arrived), (2, 1));
    assert_eq!(here.len() - before, there.len() - arrived);
}

/// A probe may be lost without a word: what is tried for long is given up, and tried anew.
#[test]
fn a_probe_may_be_lost() {
    let mut victim = Victim::in_use();
    let number = victim.number;
    let left = |epoch| Control::Left {
        rail: 0,
        epoch,
        receipt: Receipt { arrived: first(), beyond: vec![] },
    };
    let tried = |epoch| Control::Try { rail: 0, epoch, name: b"x".to_vec(), grants: vec![] };
    victim.node.give_up(number, 0);
    victim.control(left(1));
    for epoch in 2..5 {
        victim.node.try_again(number);
        // Theirs has come, or not; ours has not.
        if epoch > 2 {
            let probe = victim.message(3, epoch, [0, first(), first()], &[]);
            victim.wires[0].lock().unwrap().messages.push_back(probe);
        }
        victim.control(tried(epoch));
        let gives_up =
            |said: &Control| matches!(said, Control::Left { epoch: at, .. } if *at == epoch);
        for nth in 0.. {
            assert!(nth < 100, "it is tried for ever");
            victim.poll();
            if victim.said.iter().any(gives_up) {
                break;
            }
            victim.node.try_again(number);
        }
        victim.control(left(epoch));
    }
    victim.node.try_again(number);
    victim.control(tried(5));
    let probe = victim.message(3, 5, [0, first(), first()], &[]);
    victim.wires[0].lock().unwrap().messages.push_back(probe);
    victim.control(Control::Heard { rail: 0, epoch: 5 });
    victim.poll();
    // One that carries is not given up by being tried.
    (0..100).for_each(|_| {
        victim.node.try_again(number);
        victim.poll();
    });
    assert!(victim.ended.is_none() && victim.node.transport(number).is_up(0));
}

/// A rail that does not take memory is given up if another does; else all stay as they are, without that memory.
#[test]
fn a_rail_that_takes_no_memory_is_given_up() {
    let mut victim = Victim::in_use();
    victim.wires[0].lock().unwrap().refuses = true;
    victim.register();
    victim.poll();
    let number = victim.number;
    assert!(!victim.node.transport(number).is_up(0) && victim.node.transport(number).is_up(1));
    victim.wires[1].lock().unwrap().refuses = true;
    // SAFETY: no rail writes to it.
    let result = unsafe { victim.node.register(number, victim.memory.as_mut_ptr(), 4096) };
    assert!(result.is_err());
    victim.poll();
    assert!(victim.node.transport(number).is_up(1));
    // Nor is it begun anew, as long as it does not.
    let receipt = Receipt { arrived: first(), beyond: vec![] };
    victim.control(Control::Left { rail: 0, epoch: 1, receipt });
    victim.said.clear();
    victim.node.try_again(number);
    victim.poll();
    assert_eq!(victim.said, []);
    let registered =
        |victim: &Victim, rail: usize| victim.wires[rail].lock().unwrap().registered.len();
    assert_eq!((registered(&victim, 0), registered(&victim, 1)), (0, 2));
    victim.wires[0].lock().unwrap().refuses = false;
    victim.node.try_again(number);
    victim.poll();
    assert!(matches!(&victim.said[..], [Control::Try { rail: 0, epoch: 2, .. }]));
    assert_eq!(registered(&victim, 0), 2);
}

/// However much comes, what is kept of it is bounded.
#[test]
fn a_flood_is_bounded() {
    let mut victim = Victim::in_use();
    // All but the first of a window, again and again: nothing is delivered, nothing ends.
    for round in 0..20 {
        for nth in 1..128u32 {
            let number = first().wrapping_add(nth);
            let message = victim.message(1, 1, [number, first(), first()], b"\x02\x00hi");
            victim.wires[round % 2].lock().unwrap().messages.push_back(message);
        }
        victim.poll();
        assert!(victim.frames.is_empty() && victim.ended.is_none());
    }
    for nth in 1..MEMORIES as u32 {
        victim.control(Control::Registered { memory: Memory(nth), bytes: 1, rails: vec![] });
    }
    victim.poll();
    assert_eq!(victim.ended, None);
    let one_more = Memory(MEMORIES as u32);
    let control = Control::Registered { memory: one_more, bytes: 1, rails: vec![] };
    assert!(matches!(victim.told(control), Some(Error::Memory(..))));
}
