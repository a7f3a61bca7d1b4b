//! The Active Messages protocol: random traffic between two ends of a segment, deaths, and a peer that scribbles.
#![cfg(not(loom))]

use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use ringlet_core::active::layout::{BUFFER_BYTES, DEPTH, SEGMENT_BYTES, SLOTS_OFFSET};
use ringlet_core::active::message::GET_WORDS;
use ringlet_core::active::relay::{PARCEL_MIN_BYTES, Relay};
use ringlet_core::active::*;
use ringlet_core::memory::Area;
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::cell::{Cell, RefCell};
use std::collections::HashMap;

struct Segment(*mut u8);

impl Segment {
    fn layout() -> Layout {
        Layout::from_size_align(SEGMENT_BYTES, 4096).unwrap()
    }
    fn new() -> Segment {
        // SAFETY: the layout is not empty.
        let base = unsafe { alloc_zeroed(Segment::layout()) };
        assert!(!base.is_null());
        Segment(base)
    }
    fn area(&self) -> Area {
        // SAFETY: allocated for so many bytes, page-aligned; dropped last.
        unsafe { Area::new(self.0, SEGMENT_BYTES) }
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        // SAFETY: allocated with the same layout.
        unsafe { dealloc(self.0, Segment::layout()) };
    }
}

const TAG: Tag = 77;
const MEMORY: usize = 3 * BUFFER_BYTES;

/// What became of a message; its first argument is its number.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Fate {
    Delivered,
    Returned(Status),
}

/// What is known of a message that was sent.
#[derive(Clone, Copy)]
struct Sent {
    head: Head,
    /// Why it must come back, if it must.
    bad: Option<Status>,
    reply: bool,
}

#[derive(Default)]
struct World {
    sent: RefCell<HashMap<u32, Sent>>,
    fates: RefCell<HashMap<u32, Fate>>,
    next: Cell<u32>,
    /// Which request each reply that is under way answers.
    answers: RefCell<HashMap<u32, u32>>,
}

impl World {
    fn fate(&self, number: u32, fate: Fate) {
        let twice = self.fates.borrow_mut().insert(number, fate);
        assert_eq!(twice, None, "message {number} met two fates, now {fate:?}");
    }

    /// When all is completed: delivered, or back if it could not be.
    fn each_has_its_fate(&self) {
        for (number, sent) in self.sent.borrow().iter() {
            let expected = sent.bad.map_or(Fate::Delivered, Fate::Returned);
            assert_eq!(self.fates.borrow().get(number), Some(&expected), "message {number}");
        }
    }

    fn make(&self, plan: &Plan, reply: bool) -> (Head, Vec<u8>) {
        let number = self.next.get();
        self.next.set(number + 1);
        let mut words = vec![number; 1 + plan.words as usize % ARGUMENTS];
        words.iter_mut().skip(1).for_each(|word| *word = plan.words as u32);
        let kind = match plan.kind % 5 {
            0 => Kind::Short,
            1 => Kind::Medium,
            2 => Kind::Bulk,
            3 => Kind::Stored,
            _ => Kind::Get,
        };
        let len = if kind == Kind::Short {
            0
        } else {
            plan.len as usize * plan.len as usize % (BUFFER_BYTES + 1)
        };
        let mut head = Head {
            kind,
            handler: 3,
            arguments: Arguments::new(&words).unwrap(),
            tag: TAG,
            len,
            offset: plan.offset as u64,
        };
        let bulk = matches!(kind, Kind::Bulk | Kind::Stored | Kind::Get);
        let is_get = kind == Kind::Get;
        let bad = match plan.wrong {
            0 if !reply => {
                head.tag = TAG + 1;
                Some(Status::BadTag)
            }
            1 => {
                head.handler = if is_get { 0 } else { 9 };
                Some(Status::BadHandler)
            }
            _ if is_get && (reply || words.len() < GET_WORDS) => Some(Status::BadArguments),
            2 if bulk => {
                head.offset = MEMORY as u64 + 1;
                Some(Status::BadOffset)
            }
            3 if bulk && len > 0 => {
                head.offset = (MEMORY - len + 1) as u64;
                Some(Status::BadLength)
            }
            _ => None,
        };
        self.sent.borrow_mut().insert(number, Sent { head, bad, reply });
        let bytes = if matches!(kind, Kind::Stored | Kind::Get) {
            Vec::new()
        } else {
            pattern(number, len)
        };
        (head, bytes)
    }
}

fn pattern(number: u32, len: usize) -> Vec<u8> {
    (0..len).map(|at| (number as usize * 31 + at * 7 + at / 251) as u8).collect()
}

struct End<'a> {
    world: &'a World,
    connection: Connection,
    memory: SegmentMemory,
    bytes: RefCell<Vec<u8>>,
    scratch: RefCell<Vec<u8>>,
    /// What handlers of requests do next.
    replies: RefCell<Vec<Plan>>,
}

impl<'a> End<'a> {
    fn new(world: &'a World, segment: &Segment, end: usize) -> End<'a> {
        End {
            world,
            connection: Connection::default(),
            memory: SegmentMemory::new(segment.area(), end),
            bytes: RefCell::new(vec![0; MEMORY]),
            scratch: RefCell::new(vec![0; BUFFER_BYTES]),
            replies: RefCell::default(),
        }
    }

    fn send(&self, plan: &Plan) -> bool {
        if !self.connection.has_room(&self.memory) {
            assert_eq!(self.connection.outstanding(), DEPTH as u64);
            return false;
        }
        let (head, bytes) = self.world.make(plan, false);
        let sent = self.connection.request(&self.memory, &Message { head, bytes: &bytes });
        assert_eq!(sent, Ok(()));
        assert!(self.connection.outstanding() <= DEPTH as u64);
        true
    }

    fn deliver(&self, queue: Queue) -> bool {
        let delivered = self.connection.deliver(&self.memory, queue, self);
        assert_ne!(delivered, Delivered::Corrupt);
        assert!(self.connection.outstanding() <= DEPTH as u64);
        delivered == Delivered::One
    }

    fn drain(&self) -> bool {
        let mut any = false;
        while self.deliver(Queue::Reply) | self.deliver(Queue::Request) {
            any = true;
        }
        any
    }
}

// SAFETY: `place` returns places in vectors that are long enough for what the gate admits, and live as long as the end.
unsafe impl Host<SegmentMemory> for End<'_> {
    fn gate(&self) -> Gate {
        Gate { tag: TAG, segment: MEMORY, generation: 0, handlers: [1 << 3, 0, 0, 0] }
    }

    fn place(&self, head: &Head) -> *mut u8 {
        match head.kind {
            Kind::Bulk | Kind::Stored | Kind::Get => {
                // SAFETY: the gate admits only what lies in the segment.
                unsafe { self.bytes.borrow_mut().as_mut_ptr().add(head.place() as usize) }
            }
            _ => self.scratch.borrow_mut().as_mut_ptr(),
        }
    }

    fn run(&self, call: &Call<SegmentMemory>) {
        let number = call.head().arguments.words()[0];
        let sent = self.world.sent.borrow()[&number];
        assert_eq!(sent.bad, None);
        assert_eq!(sent.reply, call.is_reply());
        let tag = if sent.reply { call.head().tag } else { TAG };
        assert_eq!(Head { tag, ..sent.head }, *call.head());
        if matches!(sent.head.kind, Kind::Medium | Kind::Bulk) {
            // SAFETY: where `place` said, for the message's length.
            let bytes = unsafe { std::slice::from_raw_parts(call.place(), sent.head.len) };
            assert_eq!(bytes, pattern(number, sent.head.len));
        }
        self.world.fate(number, Fate::Delivered);
        if call.is_reply() {
            let request = self.world.answers.borrow_mut().remove(&number).unwrap();
            assert_eq!(self.world.fates.borrow()[&request], Fate::Delivered);
            let (head, bytes) = (sent.head, []);
            assert_eq!(call.reply(&Message { head, bytes: &bytes }), Err(NoReply::InReply));
            return;
        }
        if let Some(plan) = self.replies.borrow_mut().pop() {
            let (head, bytes) = self.world.make(&plan, true);
            self.world.answers.borrow_mut().insert(head.arguments.words()[0], number);
            assert_eq!(call.reply(&Message { head, bytes: &bytes }), Ok(()));
            assert_eq!(call.reply(&Message { head, bytes: &bytes }), Err(NoReply::Twice));
        }
    }

    fn returned(&self, returned: &Returned) {
        let number = returned.head.arguments.words()[0];
        let sent = self.world.sent.borrow()[&number];
        let tag = if returned.reply { returned.head.tag } else { sent.head.tag };
        assert_eq!((sent.reply, Head { tag, ..sent.head }), (returned.reply, returned.head));
        if returned.status != Status::Unreachable {
            assert_eq!(sent.bad, Some(returned.status));
        }
        self.world.fate(number, Fate::Returned(returned.status));
    }
}

#[derive(Clone, Debug)]
struct Plan {
    kind: u8,
    words: u8,
    len: u16,
    offset: u16,
    wrong: u8,
}

#[derive(Clone, Debug)]
enum Step {
    Send(usize, Plan),
    Burst(usize, u8, Plan),
    Deliver(usize, bool),
    Drain(usize),
    Reply(usize, Plan),
}

fn plan() -> impl Strategy<Value = Plan> {
    let len = prop_oneof![0u16..12, 0u16..300];
    (any::<u8>(), any::<u8>(), len, any::<u16>(), 0u8..30)
        .prop_map(|(kind, words, len, offset, wrong)| Plan { kind, words, len, offset, wrong })
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0usize..2, plan()).prop_map(|(end, plan)| Step::Send(end, plan)),
        1 => (0usize..2, any::<u8>(), plan()).prop_map(|(end, n, plan)| Step::Burst(end, n, plan)),
        4 => (0usize..2, any::<bool>()).prop_map(|(end, which)| Step::Deliver(end, which)),
        1 => (0usize..2).prop_map(Step::Drain),
        4 => (0usize..2, plan()).prop_map(|(end, plan)| Step::Reply(end, plan)),
    ]
}

fn take(ends: &[End; 2], step: &Step) {
    match step {
        Step::Send(end, plan) => drop(ends[*end].send(plan)),
        Step::Burst(end, n, plan) => {
            let sent = (0..*n).take_while(|_| ends[*end].send(plan)).count();
            assert!(sent <= DEPTH);
        }
        Step::Deliver(end, reply) => {
            ends[*end].deliver(if *reply { Queue::Reply } else { Queue::Request });
        }
        Step::Drain(end) => drop(ends[*end].drain()),
        Step::Reply(end, plan) => ends[*end].replies.borrow_mut().push(plan.clone()),
    }
}

fn config() -> ProptestConfig {
    ProptestConfig { failure_persistence: None, cases: 300, ..ProptestConfig::default() }
}

/// Each message is delivered once or comes back once; all is completed when both have looked.
#[test]
fn each_message_has_one_fate() {
    let steps = proptest::collection::vec(step(), 0..400);
    let outcome = TestRunner::new(config()).run(&steps, |steps| {
        let (world, segment) = (World::default(), Segment::new());
        let ends = [End::new(&world, &segment, 0), End::new(&world, &segment, 1)];
        steps.iter().for_each(|step| take(&ends, step));
        while ends[0].drain() | ends[1].drain() {}
        for end in &ends {
            assert!(end.connection.idle(&end.memory));
        }
        world.each_has_its_fate();
        Ok(())
    });
    outcome.unwrap_or_else(|error| panic!("{error}"));
}

/// Two ends with a segment each, and what is on its way from either relay to the other one.
struct Apart<'a> {
    ends: [End<'a>; 2],
    relays: [Relay; 2],
    peers: [SegmentMemory; 2],
    under_way: [Vec<Vec<u8>>; 2],
}

impl Apart<'_> {
    fn take(&mut self, end: usize, all: bool, room: usize) -> bool {
        let mut parcel = vec![0; PARCEL_MIN_BYTES + room];
        let len = self.relays[end].take(&self.peers[end], all, &mut parcel);
        parcel.truncate(len);
        self.under_way[end].extend((len > 0).then_some(parcel));
        len > 0
    }

    fn put(&mut self, end: usize) -> bool {
        let any = !self.under_way[1 - end].is_empty();
        if any {
            let parcel = self.under_way[1 - end].remove(0);
            self.relays[end].put(&self.peers[end], &parcel).expect("a sane parcel");
        }
        any
    }
}

/// The same as `each_message_has_one_fate`, of ends that share no memory.
#[test]
fn each_message_has_one_fate_by_relays() {
    let how = (0usize..2, 0u8..4, any::<u16>(), step());
    let outcome = TestRunner::new(config()).run(&proptest::collection::vec(how, 0..500), |steps| {
        let (world, segments) = (World::default(), [Segment::new(), Segment::new()]);
        let mut apart = Apart {
            ends: [0, 1].map(|end| End::new(&world, &segments[end], 0)),
            relays: Default::default(),
            peers: [0, 1].map(|end| SegmentMemory::new(segments[end].area(), 1)),
            under_way: Default::default(),
        };
        for (end, what, room, step) in steps {
            match (what, step) {
                (0, _) => drop(apart.take(end, room & 1 == 0, room.into())),
                (1, _) => drop(apart.put(end)),
                // (Nothing can be stored there.)
                (_, Step::Send(_, plan) | Step::Burst(_, _, plan) | Step::Reply(_, plan))
                    if plan.kind % 5 == 3 => {}
                (_, step) => take(&apart.ends, &step),
            }
        }
        let mut busy = true;
        while busy {
            busy = false;
            for end in 0..2 {
                busy |= apart.ends[end].drain();
                busy |= apart.take(end, false, 0) | apart.put(end);
            }
        }
        // Few credits are said only to who asks.
        for end in 0..2 {
            apart.take(end, true, 0);
            while apart.put(1 - end) {}
        }
        for end in &apart.ends {
            assert!(end.connection.idle(&end.memory));
        }
        world.each_has_its_fate();
        Ok(())
    });
    outcome.unwrap_or_else(|error| panic!("{error}"));
}

/// A segment, where something happens behind the look of that number.
struct Interrupted<'a> {
    memory: SegmentMemory,
    looks: Cell<usize>,
    act: &'a dyn Fn(),
}

impl Interrupted<'_> {
    fn looked<T>(&self, found: T) -> T {
        self.looks.set(self.looks.get().wrapping_sub(1));
        if self.looks.get() == 0 {
            (self.act)();
        }
        found
    }
}

impl Memory for Interrupted<'_> {
    fn stamp(&self, queue: Queue, slot: usize) -> u64 {
        self.looked(self.memory.stamp(queue, slot))
    }
    fn credit(&self, queue: Queue) -> u64 {
        self.looked(self.memory.credit(queue))
    }
    fn read(&self, queue: Queue, slot: usize, to: &mut [u8]) {
        self.memory.read(queue, slot, to);
    }
    unsafe fn read_buffer(&self, queue: Queue, buffer: usize, to: *mut u8, n: usize) {
        // SAFETY: passed on to the caller.
        unsafe { self.memory.read_buffer(queue, buffer, to, n) };
    }
    fn written(&self, queue: Queue, slot: usize, to: &mut [u8]) {
        self.memory.written(queue, slot, to);
    }
    fn write(&self, queue: Queue, slot: usize, bytes: &[u8]) {
        self.memory.write(queue, slot, bytes);
    }
    fn write_buffer(&self, queue: Queue, buffer: usize, bytes: &[u8]) {
        self.memory.write_buffer(queue, buffer, bytes);
    }
    fn publish(&self, queue: Queue, slot: usize, stamp: u64) {
        self.memory.publish(queue, slot, stamp);
    }
    fn give_credit(&self, queue: Queue, taken: u64) {
        self.memory.give_credit(queue, taken);
    }
}

/// While a parcel is made its end takes a reply, serves a request with a reply, and sends a request: with that goes the first one's credit, and no
/// credit of what was served goes before its reply.
#[test]
fn a_relay_keeps_the_order_of_an_end_that_goes_on_meanwhile() {
    let plan = Plan { kind: 0, words: 0, len: 0, offset: 0, wrong: 29 };
    let (mut with_request, mut with_credit) = (0, 0);
    for looks in 1..9 {
        let (world, segments) = (World::default(), [Segment::new(), Segment::new()]);
        let mut apart = Apart {
            ends: [0, 1].map(|end| End::new(&world, &segments[end], 0)),
            relays: Default::default(),
            peers: [0, 1].map(|end| SegmentMemory::new(segments[end].area(), 1)),
            under_way: Default::default(),
        };
        assert!(apart.ends[0].send(&plan) && apart.take(0, true, 0) && apart.put(1));
        apart.ends.iter().for_each(|end| end.replies.borrow_mut().push(plan.clone()));
        assert!(apart.ends[1].drain() && apart.ends[1].send(&plan));
        assert!(apart.take(1, true, 0) && apart.put(0));
        let act = || assert!(apart.ends[0].drain() && apart.ends[0].send(&plan));
        let memory = Interrupted { memory: apart.peers[0], looks: Cell::new(looks), act: &act };
        let mut parcel = vec![0; PARCEL_MIN_BYTES];
        let len = apart.relays[0].take(&memory, true, &mut parcel);
        if len == 0 {
            continue;
        }
        let credit = |at: usize| u64::from_le_bytes(parcel[at..at + 8].try_into().unwrap());
        // (Each slot is a head with one argument.)
        let has = |queue: Queue| parcel[16..len].chunks(29).any(|slot| slot[0] == queue as u8);
        let [answered, served] = [0, 8].map(credit);
        assert!(answered == 1 || !has(Queue::Request), "{looks}");
        assert!(served == 0 || has(Queue::Reply), "{looks}");
        with_request += u32::from(has(Queue::Request));
        with_credit += u32::from(served == 1);
    }
    assert!(with_request > 0 && with_credit == 0, "{with_request} {with_credit}");
}

/// A parcel that is cut, or has nonsense in it, is refused, or is of messages that do no harm; more than may be under way are refused.
#[test]
fn a_relay_survives_what_comes() {
    let (world, segments) = (World::default(), [Segment::new(), Segment::new()]);
    let sends = End::new(&world, &segments[0], 0);
    let plan = Plan { kind: 1, words: 3, len: 40, offset: 0, wrong: 29 };
    assert!(sends.send(&plan) && sends.send(&Plan { len: 5, ..plan.clone() }));
    let mut parcel = vec![0; 2 * PARCEL_MIN_BYTES];
    let peer = SegmentMemory::new(segments[0].area(), 1);
    let len = Relay::default().take(&peer, false, &mut parcel);
    parcel.truncate(len);
    let put =
        |parcel: &[u8]| Relay::default().put(&SegmentMemory::new(segments[1].area(), 1), parcel);
    assert_eq!(put(&parcel), Some(()));
    let whole = [16, len];
    let first = 16 + 1 + 24 + 4 * 4 + 1600;
    for cut in 0..len {
        assert_eq!(put(&parcel[..cut]).is_some(), whole.contains(&cut) || cut == first, "{cut}");
    }
    for (at, value) in [(16, 2), (17, 4), (17, 9), (18, 17), (20, 64), (23, 1), (17, 1)] {
        let mut bad = parcel.clone();
        bad[at] = value;
        assert_eq!(put(&bad), None, "{at} {value}");
    }
    let mut relay = Relay::default();
    let memory = SegmentMemory::new(segments[1].area(), 1);
    let times = (0..100).take_while(|_| relay.put(&memory, &parcel).is_some()).count();
    assert_eq!(2 * times, DEPTH);
    let random = proptest::collection::vec(any::<u8>(), 0..300);
    let outcome = TestRunner::new(config()).run(&random, |mut bytes| {
        bytes.iter_mut().skip(16).for_each(|byte| *byte %= 8);
        let _ = put(&bytes);
        let end = End::new(&world, &segments[1], 0);
        end.connection.ready(&end.memory);
        Ok(())
    });
    outcome.unwrap_or_else(|error| panic!("{error}"));
}

/// One end dies at any step: the other delivers what had arrived, gets the rest back, and misses nothing.
#[test]
fn a_death_loses_nothing_of_the_survivor() {
    let steps = (proptest::collection::vec(step(), 0..200), 0usize..2);
    let outcome = TestRunner::new(config()).run(&steps, |(steps, survivor)| {
        let (world, segment) = (World::default(), Segment::new());
        let ends = [End::new(&world, &segment, 0), End::new(&world, &segment, 1)];
        steps.iter().for_each(|step| take(&ends, step));
        let end = &ends[survivor];
        end.drain();
        let taken_by_the_dead: Vec<u32> = world.fates.borrow().keys().copied().collect();
        end.connection.undelivered(&end.memory, Status::Unreachable, |returned| {
            let number = returned.head.arguments.words()[0];
            assert!(!taken_by_the_dead.contains(&number), "{number} was delivered and came back");
            end.returned(&returned);
        });
        assert_eq!(end.connection.outstanding(), 0);
        let again = Cell::new(0);
        end.connection.undelivered(&end.memory, Status::Unreachable, |returned| {
            again.set(again.get() + (!returned.reply) as u32);
        });
        assert_eq!(again.get(), 0);
        // What has no fate was sent by the dead end after its last look, or is a refusal on its way to it.
        let ours = |sent: &Sent| sent.bad.is_none();
        let lost = world
            .sent
            .borrow()
            .iter()
            .filter(|(number, sent)| ours(sent) && !world.fates.borrow().contains_key(number))
            .count();
        assert_eq!(lost, 0);
        Ok(())
    });
    outcome.unwrap_or_else(|error| panic!("{error}"));
}

/// Who was never answered says that an answer comes back: the error handler is not told.
#[test]
fn nothing_comes_back_that_was_not_sent() {
    let (world, segment) = (World::default(), Segment::new());
    let [end, other] = [0, 1].map(|end| End::new(&world, &segment, end));
    // (Refused for its tag: that is no answer of the program's.)
    assert!(other.send(&Plan { kind: 0, words: 0, len: 0, offset: 0, wrong: 0 }));
    assert_eq!(end.connection.deliver(&end.memory, Queue::Request, &end), Delivered::One);
    let stamp = 1u64;
    let head = [u64::from_le_bytes([0x81, 1, 3, Status::BadHandler as u8, 0, 0, 0, 0]), 0, 0, 7];
    let mut slot = [0; 32];
    slot.as_chunks_mut().0.iter_mut().zip(head).for_each(|(to, word)| *to = word.to_le_bytes());
    other.memory.write(Queue::Request, stamp as usize, &slot);
    other.memory.publish(Queue::Request, stamp as usize, stamp + 1);
    assert_eq!(end.connection.deliver(&end.memory, Queue::Request, &end), Delivered::Corrupt);
}

/// Whatever the peer writes wherever, whenever: no access outside, no endless work, no claim of more than was sent.
#[test]
fn survives_a_hostile_peer() {
    struct Victim<'a> {
        connection: Connection,
        memory: SegmentMemory,
        scribbles: RefCell<std::vec::IntoIter<(u32, u64)>>,
        segment: &'a Segment,
        bytes: RefCell<Vec<u8>>,
    }
    impl Victim<'_> {
        fn scribble(&self) {
            let Some((at, value)) = self.scribbles.borrow_mut().next() else { return };
            // Mostly where it hurts: control words and the first slots' heads, with values that nearly make sense.
            let place = match at % 4 {
                0 => at as usize / 4 % SLOTS_OFFSET / 8 * 8,
                1 => {
                    SLOTS_OFFSET + at as usize / 4 % (4 * DEPTH) * 128 + (at >> 16) as usize % 4 * 8
                }
                2 => SLOTS_OFFSET + at as usize / 4 % (4 * DEPTH * 128) / 8 * 8,
                _ => at as usize % SEGMENT_BYTES / 8 * 8,
            };
            let value = if value & 1 == 0 { value >> 1 & 0x7f } else { value };
            // SAFETY: eight readable bytes; the place is checked.
            assert!(unsafe { self.segment.area().write(place, (&raw const value).cast(), 8) });
        }
    }
    // SAFETY: as for `End`.
    unsafe impl Host<SegmentMemory> for Victim<'_> {
        fn gate(&self) -> Gate {
            self.scribble();
            Gate { tag: TAG_ANY, segment: MEMORY, generation: 0, handlers: [u64::MAX; 4] }
        }
        fn place(&self, head: &Head) -> *mut u8 {
            self.scribble();
            assert!(head.len <= BUFFER_BYTES || head.kind == Kind::Stored);
            let at = if matches!(head.kind, Kind::Bulk | Kind::Stored | Kind::Get) {
                head.place() as usize
            } else {
                0
            };
            assert!(at + head.len.min(BUFFER_BYTES) <= MEMORY + BUFFER_BYTES && at <= MEMORY);
            // SAFETY: within the vector.
            unsafe { self.bytes.borrow_mut().as_mut_ptr().add(at) }
        }
        fn run(&self, call: &Call<SegmentMemory>) {
            self.scribble();
            let head = Head { kind: Kind::Medium, len: 500, ..*call.head() };
            let _ = call.reply(&Message { head, bytes: &[1; 500] });
        }
        fn returned(&self, _: &Returned) {}
    }
    const TAG_ANY: Tag = Tag::MAX;

    let script = (
        proptest::collection::vec((any::<u32>(), any::<u64>()), 0..600),
        proptest::collection::vec(0u8..4, 0..300),
    );
    let outcome = TestRunner::new(config()).run(&script, |(scribbles, steps)| {
        let segment = Segment::new();
        let victim = Victim {
            connection: Connection::default(),
            memory: SegmentMemory::new(segment.area(), 0),
            scribbles: RefCell::new(scribbles.into_iter()),
            segment: &segment,
            bytes: RefCell::new(vec![0; MEMORY + BUFFER_BYTES]),
        };
        for step in steps {
            (0..3).for_each(|_| victim.scribble());
            let (connection, memory) = (&victim.connection, &victim.memory);
            match step {
                0 => drop(connection.deliver(memory, Queue::Request, &victim)),
                1 => drop(connection.deliver(memory, Queue::Reply, &victim)),
                _ => {
                    let len = if step == 2 { 8 } else { 3000 };
                    let head = Head {
                        kind: Kind::Medium,
                        handler: 1,
                        arguments: Arguments::NONE,
                        tag: 0,
                        len,
                        offset: 0,
                    };
                    let _ = connection.request(memory, &Message { head, bytes: &vec![1; len] });
                }
            }
            assert!(connection.outstanding() <= DEPTH as u64);
        }
        let count = Cell::new(0);
        victim.connection.undelivered(&victim.memory, Status::Unreachable, |_| {
            count.set(count.get() + 1);
        });
        assert!(count.get() <= 2 * DEPTH);
        Ok(())
    });
    outcome.unwrap_or_else(|error| panic!("{error}"));
}
