//! Many links, one thread that serves them, and two threads at the ends of each, which sleep whenever there is nothing for them: every byte
//! arrives, and nobody sleeps on. End 0 is woken by its wishes, end 1 by its context. The same where the two ends are at two nodes.

#[path = "../../ringlet-core/tests/segment/mod.rs"]
mod segment;

use ringlet_adapter::{
    Adapter, Bells, Event, Lane, Link, Progress, Rings as OneRings, Segment as Memory, Serve,
    Server, Trunk, Wakes, WakesOne,
};
use ringlet_core::layout::WANT_EVENT;
use ringlet_core::mirror::Asks;
use ringlet_core::ring::{Next, Rx, SegmentRing, Tx};
use ringlet_core::wait;
use ringlet_fabric::memory::{Chaos, MemoryRail};
use ringlet_fabric::rail::Rail;
use ringlet_fabric::{Control, Node};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use segment::{Segment, with_buffers};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, mpsc};
use std::task::Poll;
use std::thread;
use std::time::Duration;

const RING_BYTES: usize = 1 << 16;
/// More than the others need, by far.
const CHANGES_MOST: u64 = 1 << 32;

fn bell() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap()
}

fn ring(bell: &OwnedFd) {
    rustix::io::write(bell, &1u64.to_ne_bytes()).unwrap();
}

/// What wakes the link, its ends, and whether end 1's context sleeps.
struct Ropes {
    link: OwnedFd,
    ends: [OwnedFd; 2],
    context: AtomicU64,
    parted: AtomicUsize,
}

struct Rings {
    ropes: Arc<Ropes>,
    rung: u64,
}

impl Bells for Rings {
    fn published(&mut self, end: usize) {
        if end == 1
            && let Some(value) = wait::armed(&self.ropes.context, self.rung)
        {
            self.rung = value;
            self.event(1);
        }
    }
    fn event(&mut self, end: usize) -> bool {
        ring(&self.ropes.ends[end]);
        true
    }
    fn byte(&mut self, _to: usize) -> Poll<bool> {
        unreachable!("nobody asks for a byte")
    }
    fn part(&mut self, _end: usize) -> Poll<()> {
        self.ropes.parted.fetch_add(1, SeqCst);
        Poll::Ready(())
    }
}

impl Wakes for Rings {
    fn eventfd(&self) -> BorrowedFd<'_> {
        self.ropes.link.as_fd()
    }
}

/// A program: one thread at one end.
struct Program {
    end: usize,
    tx: Tx,
    rx: Rx,
    outgoing: SegmentRing,
    incoming: SegmentRing,
    ropes: Arc<Ropes>,
    sent: u64,
    got: u64,
    random: u64,
}

impl Program {
    fn new(end: usize, segment: &Segment, ropes: Arc<Ropes>, random: u64) -> Program {
        Program {
            end,
            tx: Tx::default(),
            rx: Rx::default(),
            outgoing: segment.ring(end),
            incoming: segment.ring(1 - end),
            ropes,
            sent: 0,
            got: 0,
            random,
        }
    }

    fn below(&mut self, n: u64) -> u64 {
        self.random =
            self.random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.random >> 33) % n
    }

    fn wake_link(&self) {
        if self.outgoing.control().data_wish().granted_by_sender() & WANT_EVENT != 0 {
            ring(&self.ropes.link);
        }
    }

    /// Some bytes, if there is room.
    fn send(&mut self, upto: u64) -> bool {
        let most = 1 << self.below(16);
        let n = (1 + self.below(most)).min(upto - self.sent);
        let mut bytes: Vec<u8> = (self.sent..self.sent + n).map(|at| (at % 251) as u8).collect();
        let pushed = with_buffers(&mut bytes, &[], |from| self.tx.push(&self.outgoing, from));
        self.sent += pushed as u64;
        if pushed > 0 {
            self.wake_link();
        }
        pushed > 0
    }

    fn receive(&mut self) -> bool {
        let mut bytes = vec![0; 1 << self.below(16)];
        match with_buffers(&mut bytes, &[], |to| self.rx.pop(&self.incoming, to)) {
            Next::Bytes(n, look) => {
                for byte in &bytes[..n] {
                    assert_eq!(*byte, (self.got % 251) as u8);
                    self.got += 1;
                }
                if look
                    && self.incoming.control().room_wish().granted_by_receiver() & WANT_EVENT != 0
                {
                    ring(&self.ropes.link);
                }
                true
            }
            Next::Empty => false,
            other => panic!("{other:?}"),
        }
    }

    fn sleep(&mut self, for_room: bool) {
        if for_room {
            self.outgoing.control().room_wish().want(WANT_EVENT);
        }
        match self.end {
            0 => self.incoming.control().data_wish().want(WANT_EVENT),
            _ => wait::arm(&self.ropes.context),
        }
        let ready = self.rx.ready(&self.incoming) || for_room && self.tx.writable(&self.outgoing);
        let bell = &self.ropes.ends[self.end];
        if !ready {
            poll(&mut [PollFd::new(bell, PollFlags::IN)], None).unwrap();
        }
        if self.end == 1 {
            wait::disarm(&self.ropes.context);
        }
        let _ = rustix::io::read(bell, &mut [0u8; 8]);
    }

    /// Sends so much and receives as much; the accepting end never sends more than it has received. Then it closes.
    fn run(mut self, bytes: u64) {
        while self.got < bytes || self.sent < bytes {
            let upto = if self.end == 0 { bytes } else { self.got };
            let sent = self.sent < upto && self.below(3) > 0 && self.send(upto);
            let got = self.receive();
            if !sent && !got {
                self.sleep(self.sent < upto);
            }
        }
        self.outgoing.control().ask_parting();
        self.wake_link();
        while !self.outgoing.control().has_parted() {
            thread::yield_now();
        }
    }
}

/// The words of a link that is not to rest are changed all the time, by its first end.
fn run(links: usize, seed: Option<u64>, bytes: u64, restless: usize) {
    let segments: Vec<[Segment; 2]> = (0..links + restless)
        .map(|_| [Segment::new(RING_BYTES), Segment::new(RING_BYTES)])
        .collect();
    let ropes: Vec<_> = (0..links + restless)
        .map(|_| {
            Arc::new(Ropes {
                link: bell(),
                ends: [bell(), bell()],
                context: AtomicU64::new(0),
                parted: AtomicUsize::new(0),
            })
        })
        .collect();
    let mut adapter = Adapter::new().unwrap();
    for (nth, (segments, ropes)) in segments.iter().zip(&ropes).enumerate() {
        let ends = [0, 1].map(|end: usize| Memory {
            area: segments[end].area(),
            geometry: segments[end].geometry,
        });
        let seed = seed.map(|seed| seed + nth as u64);
        adapter.add(Link::new(seed, ends), Rings { ropes: ropes.clone(), rung: 0 }).unwrap();
    }
    let all_served = &AtomicBool::new(false);
    thread::scope(|scope| {
        for segments in &segments[links..] {
            let ring = segments[0].ring(0);
            scope.spawn(move || {
                for _ in 0..CHANGES_MOST {
                    if all_served.load(SeqCst) {
                        return;
                    }
                    ring.control().sender.working.fetch_add(1, SeqCst);
                }
            });
        }
        for (nth, (segments, ropes)) in segments[..links].iter().zip(&ropes).enumerate() {
            for end in [0, 1] {
                let random = seed.unwrap_or(0) << 16 | (2 * nth + end) as u64;
                let program = Program::new(end, &segments[end], ropes.clone(), random);
                scope.spawn(move || program.run(bytes));
            }
        }
        let (mut left, mut ready, mut over) = (links, Vec::new(), Vec::new());
        while left > 0 {
            adapter.turn(None, &mut ready, &mut over).unwrap();
            for (at, how) in over.drain(..) {
                assert_eq!(how, Progress::Ended);
                assert_eq!(adapter.remove(at).unwrap().ropes.parted.load(SeqCst), 2);
                left -= 1;
            }
        }
        all_served.store(true, SeqCst);
    });
}

/// One end's rings.
struct One(Rings, usize);

impl OneRings for One {
    fn published(&mut self) {
        self.0.published(self.1);
    }
    fn event(&mut self) -> bool {
        self.0.event(self.1)
    }
    fn byte(&mut self) -> Poll<bool> {
        self.0.byte(self.1)
    }
    fn part(&mut self) -> Poll<()> {
        self.0.part(self.1)
    }
}

impl WakesOne for One {
    fn eventfd(&self) -> BorrowedFd<'_> {
        self.0.eventfd()
    }
}

/// One of two nodes.
struct Place<'a> {
    end: usize,
    folder: &'a Path,
    chaos: Option<Chaos>,
    segments: Vec<Memory>,
    ropes: Vec<Arc<Ropes>>,
    /// What the other one's transport has to say, and ours to it, with what wakes each.
    told: mpsc::Receiver<Control>,
    tell: mpsc::Sender<Control>,
    bells: &'a [OwnedFd; 2],
    /// Lanes of either that have ended.
    ended: &'a AtomicUsize,
    /// Segments that no transport uses any more.
    freed: Arc<AtomicUsize>,
}

const RAILS: usize = 2;
const BELL: u32 = 7;

impl Place<'_> {
    fn serve(self) {
        let Place { end, ended, .. } = self;
        let rails = (0..RAILS).map(|nth| -> Box<dyn Rail> {
            let chaos = self
                .chaos
                .map(|chaos| Chaos { seed: chaos.seed * 4 + 2 * nth as u64 + end as u64, ..chaos });
            let name = format!("node{end}rail{nth}");
            Box::new(MemoryRail::new(self.folder, &name, chaos).unwrap())
        });
        let mut node = Node::new(rails.collect());
        let number = node.open().unwrap();
        let trunk = Trunk::new(node);
        let mut server = Server::<Box<dyn Serve>>::new().unwrap();
        server.watch(&self.bells[end], BELL).unwrap();
        let trunk_at = server.serve(Box::new(trunk.clone())).unwrap();
        trunk.is_served_at(trunk_at);
        for (nth, (segment, ropes)) in self.segments.iter().zip(&self.ropes).enumerate() {
            let rings = One(Rings { ropes: ropes.clone(), rung: 0 }, end);
            let freed = self.freed.clone();
            let free = Box::new(move || {
                freed.fetch_add(1, SeqCst);
            });
            let memory = *segment;
            // SAFETY: segments stay until the end.
            let lane = unsafe { Lane::new(&trunk, (number, nth as u32), end, memory, rings, free) };
            let at = server.serve(Box::new(lane.unwrap())).unwrap();
            trunk.is_lane_at((number, nth as u32), at);
        }
        let all = 2 * self.segments.len();
        let (mut ready, mut over, mut turns) = (Vec::new(), Vec::new(), 0u64);
        while ended.load(SeqCst) < all || self.freed.load(SeqCst) < all {
            server.turn(Some(Duration::from_millis(5)), &mut ready, &mut over).unwrap();
            if !std::mem::take(&mut ready).is_empty() {
                let _ = rustix::io::read(&self.bells[end], &mut [0u8; 8]);
            }
            for control in self.told.try_iter() {
                trunk.with_node(|node| node.control(number, control));
                server.rouse(trunk_at);
            }
            for (_, event) in trunk.events() {
                match event {
                    Event::Control(control) => {
                        // (The other one may have ended.)
                        let _ = self.tell.send(control);
                        ring(&self.bells[1 - end]);
                    }
                    Event::Ended(error) => panic!("{error}"),
                    Event::Up | Event::Down => {}
                }
            }
            for (at, how) in over.drain(..) {
                assert_eq!(how, Progress::Ended);
                drop(server.leave(at));
                ended.fetch_add(1, SeqCst);
            }
            turns += 1;
            // (Else nothing wakes a trunk but what is for it.)
            if self.chaos.is_some() && turns.is_multiple_of(50) {
                trunk.with_node(|node| node.try_again(number));
                server.rouse(trunk_at);
            }
        }
    }
}

/// The ends of each link are at two nodes, each of which has a thread.
fn run_at_two_nodes(links: usize, chaos: Option<Chaos>, bytes: u64) {
    let folder = tempfile::tempdir().unwrap();
    let segments: Vec<_> = (0..links).map(|_| [(); 2].map(|()| Segment::new(RING_BYTES))).collect();
    let ropes = || {
        Arc::new(Ropes {
            link: bell(),
            ends: [bell(), bell()],
            context: AtomicU64::new(0),
            parted: AtomicUsize::new(0),
        })
    };
    let ropes: Vec<_> = (0..links).map(|_| [ropes(), ropes()]).collect();
    let (ended, freed) = (AtomicUsize::new(0), Arc::new(AtomicUsize::new(0)));
    let bells = [bell(), bell()];
    let ((to_first, first), (to_second, second)) = (mpsc::channel(), mpsc::channel());
    thread::scope(|scope| {
        for (end, told, tell) in [(0, first, to_second), (1, second, to_first)] {
            let place = Place {
                end,
                folder: folder.path(),
                chaos,
                segments: segments
                    .iter()
                    .map(|segments| &segments[end])
                    .map(|segment| Memory { area: segment.area(), geometry: segment.geometry })
                    .collect(),
                ropes: ropes.iter().map(|ropes: &[Arc<Ropes>; 2]| ropes[end].clone()).collect(),
                told,
                tell,
                bells: &bells,
                ended: &ended,
                freed: freed.clone(),
            };
            scope.spawn(move || place.serve());
        }
        for (nth, (segments, ropes)) in segments.iter().zip(&ropes).enumerate() {
            for end in [0, 1] {
                let random = chaos.map_or(0, |chaos| chaos.seed) << 16 | (2 * nth + end) as u64;
                let program = Program::new(end, &segments[end], ropes[end].clone(), random);
                scope.spawn(move || program.run(bytes));
            }
        }
    });
}

#[test]
fn one_link_between_two_nodes() {
    run_at_two_nodes(1, None, 4 << 20);
}

#[test]
fn many_links_between_two_nodes() {
    run_at_two_nodes(12, None, 1 << 18);
}

#[test]
fn links_over_rails_that_fail() {
    for seed in 1..=20 {
        run_at_two_nodes(3, Some(Chaos { seed, fails_one_in: 2000 }), 100_000);
    }
}

#[test]
fn one_link_copied_at_once() {
    run(1, None, 4 << 20, 0);
}

#[test]
fn many_links_copied_at_once() {
    run(12, None, 1 << 18, 0);
}

#[test]
fn links_over_an_unordered_fabric() {
    for seed in 0..10 {
        run(3, Some(seed * 100), 100_000, 0);
    }
}

#[test]
fn one_that_never_rests_holds_up_no_other() {
    run(2, None, 1 << 18, 1);
}
