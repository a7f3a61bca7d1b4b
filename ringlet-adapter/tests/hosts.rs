//! Lanes between two nodes in one process, step by step: who has no room sleeps, who sleeps is woken, and who owes an answer is found out.

#[path = "../../ringlet-core/tests/segment/mod.rs"]
mod segment;

use ringlet_adapter::{
    Failed, Hosts, Lane, PIPE_BYTES, PIPE_MESSAGES, Pipe, Progress, Rings, Segment as Memory,
    Serve, WakesOne,
};
use ringlet_core::mirror::Asks;
use ringlet_core::ring::{Next, Rx, Tx};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use segment::{Segment, with_buffers};
use std::collections::BTreeSet;
use std::task::Poll;

const RING_BYTES: usize = 1 << 16;
/// Only a fault meets it.
const STEPS_MOST: usize = 1_000_000;
/// Places among what is served: trunks stand behind the lanes.
const TRUNKS: usize = 1000;

struct Silent(OwnedFd);

impl Silent {
    fn new() -> Silent {
        Silent(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap())
    }
}

impl Rings for Silent {
    fn published(&mut self) {}
    fn event(&mut self) -> bool {
        true
    }
    fn byte(&mut self) -> Poll<bool> {
        Poll::Ready(true)
    }
    fn part(&mut self) -> Poll<()> {
        Poll::Ready(())
    }
}

impl WakesOne for Silent {
    fn eventfd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// What a `Server` does, but that nothing is passed over again which has nothing to do, and that no descriptor is looked at.
struct Steps {
    hosts: Hosts,
    /// Of connection n those at 2n and 2n + 1. (`None`: it has none, or its lane has ended.)
    lanes: Vec<Option<Lane<Silent>>>,
    awake: BTreeSet<usize>,
    _folder: tempfile::TempDir,
    segments: Vec<Segment>,
}

impl Steps {
    fn new(connections: usize) -> Steps {
        let folder = tempfile::tempdir().unwrap();
        let mut hosts = Hosts::new(folder.path(), None).unwrap();
        hosts.are_served_at([TRUNKS, TRUNKS + 1]);
        let segments: Vec<_> = (0..2 * connections).map(|_| Segment::new(RING_BYTES)).collect();
        let lanes = Vec::new();
        let mut steps = Steps { hosts, lanes, awake: BTreeSet::new(), _folder: folder, segments };
        steps.awake.extend([TRUNKS, TRUNKS + 1]);
        steps
    }

    fn add(&mut self, at: usize) {
        let (number, end) = ((at / 2) as u32, at % 2);
        let Steps { hosts, lanes, segments, .. } = self;
        let memory = Memory { area: segments[at].area(), geometry: segments[at].geometry };
        let (trunk, name) = (&hosts.trunks()[end], hosts.name(end, number));
        // SAFETY: segments stay until the end.
        let lane = unsafe { Lane::new(trunk, name, end, memory, Silent::new(), Box::new(|| ())) };
        trunk.is_lane_at(name, at);
        lanes.resize_with(lanes.len().max(at + 1), || None);
        lanes[at] = Some(lane.unwrap());
        self.awake.insert(at);
    }

    fn served(&mut self, at: usize) -> &mut dyn Serve {
        match at.checked_sub(TRUNKS) {
            None => self.lanes[at].as_mut().unwrap(),
            // (A handle.)
            Some(end) => Box::leak(Box::new(self.hosts.trunks()[end].clone())),
        }
    }

    /// Until everything sleeps.
    fn until_all_sleep(&mut self) {
        let mut last = 0;
        for _ in 0..STEPS_MOST {
            // (In turn.)
            let next = self.awake.range(last + 1..).next().or(self.awake.first());
            let Some(at) = next.copied() else { return };
            self.awake.remove(&at);
            last = at;
            let mut rouse = Vec::new();
            let served = self.served(at);
            served.disarm();
            let mut goes_on = served.pass(&mut rouse) == Progress::Busy || !served.arm();
            goes_on = goes_on || served.pass(&mut rouse) != Progress::Idle;
            if goes_on {
                self.awake.insert(at);
            }
            self.awake.extend(rouse);
        }
        panic!("{:?} don't sleep", self.awake);
    }

    /// Until all has come that is under way. (Here rails wake nobody.)
    fn relay(&mut self) {
        for _ in 0..STEPS_MOST {
            let mut rouse = Vec::new();
            let down = self.hosts.relay(&mut rouse).unwrap().is_some();
            let rests = rouse.is_empty() && !down && !self.is_rung();
            if rests && self.awake.is_empty() {
                return;
            }
            self.awake.extend(rouse);
            self.awake.extend([TRUNKS, TRUNKS + 1]);
            self.until_all_sleep();
        }
        panic!("the rails don't rest");
    }

    /// Is a trunk to be woken by its descriptors?
    fn is_rung(&self) -> bool {
        let mut rung = false;
        for trunk in self.hosts.trunks() {
            trunk.descriptors(&mut |fd| {
                let mut fds = [PollFd::from_borrowed_fd(fd, PollFlags::IN)];
                rung |= poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap() > 0;
            });
        }
        rung
    }
}

/// More than a transport has room for.
#[test]
fn lanes_without_room_sleep_until_there_is_some() {
    const CONNECTIONS: usize = 30;
    const RECORDS: u64 = 1000;
    let mut steps = Steps::new(CONNECTIONS);
    for nth in 0..CONNECTIONS {
        let tx = Tx::default();
        let ring = steps.segments[2 * nth].ring(0);
        for number in 0..RECORDS {
            let mut bytes = number.to_le_bytes();
            assert_eq!(with_buffers(&mut bytes, &[], |from| tx.push(&ring, from)), 8);
        }
        steps.add(2 * nth);
        steps.add(2 * nth + 1);
    }
    // No rail works yet, so nothing is taken from the transports.
    steps.until_all_sleep();
    steps.relay();
    for nth in 0..CONNECTIONS {
        let (rx, ring) = (Rx::default(), steps.segments[2 * nth + 1].ring(0));
        for number in 0..RECORDS {
            let mut bytes = [0; 8];
            let next = with_buffers(&mut bytes, &[], |to| rx.pop(&ring, to));
            assert!(matches!(next, Next::Bytes(8, _)), "{next:?} is {number} of {nth}");
            assert_eq!(u64::from_le_bytes(bytes), number);
        }
    }
}

#[test]
fn a_trunk_that_sleeps_is_rung_by_its_rails() {
    let mut steps = Steps::new(1);
    steps.relay();
    assert!(steps.hosts.are_joined());
    steps.add(0);
    steps.add(1);
    steps.relay();
    assert!(!steps.is_rung());
    let (tx, ring) = (Tx::default(), steps.segments[0].ring(0));
    with_buffers(&mut [1; 8], &[], |from| tx.push(&ring, from));
    // Of the others, one is only woken by what comes over a rail.
    steps.awake.insert(0);
    steps.until_all_sleep();
    assert!(steps.is_rung());
}

#[test]
fn a_half_that_owes_an_answer_is_found_out() {
    let mut steps = Steps::new(1);
    steps.hosts.trunks()[1].expect(steps.hosts.name(1, 0));
    steps.add(0);
    steps.relay();
    let words = steps.segments[0].ring(0);
    let hangs = |steps: &mut Steps| steps.lanes[0].as_mut().unwrap().hangs();
    let asked = words.control().ask_delivery();
    steps.awake.insert(0);
    steps.relay();
    assert!(!hangs(&mut steps), "it is asked for the first time");
    assert!(hangs(&mut steps) && !words.control().is_delivered(asked));
    // Then the other half comes, and answers.
    steps.add(1);
    steps.relay();
    assert!(!hangs(&mut steps) && words.control().is_delivered(asked));
}

/// Who has room for no word more says it when there is some: nobody else tells the other end.
#[test]
fn a_pipe_that_goes_where_there_is_no_room_fails_at_the_other_node() {
    let folder = tempfile::tempdir().unwrap();
    let mut hosts = Hosts::new(folder.path(), None).unwrap();
    let pipe = |hosts: &Hosts, end, lane| Pipe::new(&hosts.trunks()[end], hosts.name(end, lane));
    let mut other = pipe(&hosts, 1, 0);
    for _ in 0..STEPS_MOST {
        step(&mut hosts);
        if hosts.are_joined() {
            break;
        }
    }
    let (mut one, mut full) = (pipe(&hosts, 0, 0), pipe(&hosts, 0, 1));
    assert_eq!(one.send(b"last"), Ok(true));
    // (Of frames as short as that one is.)
    while full.send(b"") == Ok(true) {}
    drop(one);
    let mut heard = Vec::new();
    for _ in 0..STEPS_MOST {
        step(&mut hosts);
        match other.receive() {
            Ok(message) => heard.extend(message),
            Err(Failed) => return assert_eq!(heard, [b"last"]),
        }
    }
    panic!("it waits for ever");
}

/// Two ends of a pipe between nodes that don't know each other yet.
fn pipes() -> (tempfile::TempDir, Hosts, [Pipe; 2]) {
    let folder = tempfile::tempdir().unwrap();
    let hosts = Hosts::new(folder.path(), None).unwrap();
    let pipe = |end| Pipe::new(&hosts.trunks()[end], hosts.name(end, 0));
    let pipes = [pipe(0), pipe(1)];
    (folder, hosts, pipes)
}

/// Both send more than there is room for, never further ahead than the other one has taken.
#[test]
fn messages_of_a_pipe_wait_for_room_and_come_in_order() {
    const MESSAGES: u32 = 20_000;
    let (_folder, mut hosts, mut pipes) = pipes();
    let (mut sent, mut taken, mut waited) = ([0u32; 2], [0u32; 2], false);
    for _ in 0..STEPS_MOST {
        for (end, pipe) in pipes.iter_mut().enumerate() {
            while sent[end] < MESSAGES && sent[end] - taken[1 - end] < PIPE_MESSAGES as u32 {
                // (Long ones too.)
                let mut message = sent[end].to_le_bytes().to_vec();
                message.resize(if sent[end] % 3 == 0 { PIPE_BYTES } else { 4 }, 7);
                if !pipe.send(&message).unwrap() {
                    waited = true;
                    break;
                }
                sent[end] += 1;
            }
        }
        step(&mut hosts);
        for (end, pipe) in pipes.iter_mut().enumerate() {
            while let Some(message) = pipe.receive().unwrap() {
                assert_eq!(message[..4], taken[end].to_le_bytes(), "of {end}");
                taken[end] += 1;
            }
        }
        if taken == [MESSAGES; 2] {
            return assert!(waited, "there was always room");
        }
    }
    panic!("{taken:?} of {sent:?} have come");
}

/// What came before is there still.
#[test]
fn a_pipe_that_is_too_far_ahead_fails_behind_what_was_taken() {
    let (_folder, mut hosts, [mut one, mut other]) = pipes();
    let mut sent = 0;
    for _ in 0..STEPS_MOST {
        while sent <= PIPE_MESSAGES && one.send(&sent.to_le_bytes()).unwrap() {
            sent += 1;
        }
        step(&mut hosts);
        if hosts.are_joined() && sent > PIPE_MESSAGES {
            break;
        }
    }
    (0..1000).for_each(|_| step(&mut hosts));
    for number in 0..PIPE_MESSAGES {
        assert_eq!(other.receive(), Ok(Some(number.to_le_bytes().to_vec())));
    }
    assert_eq!(other.receive(), Err(Failed));
}

/// Who waits for room on it, too.
#[test]
fn a_pipe_fails_with_its_way() {
    let (_folder, hosts, [mut one, _other]) = pipes();
    while one.send(b"").unwrap() {}
    let mut rouse = Vec::new();
    let ((number, lane), trunk) = (one.name(), &hosts.trunks()[0]);
    trunk.is_lane_at((number, lane), 5);
    trunk.close(number, &mut rouse);
    assert_eq!(rouse, [5]);
    assert_eq!((one.send(b""), one.receive()), (Err(Failed), Err(Failed)));
}

fn step(hosts: &mut Hosts) {
    let mut rouse = Vec::new();
    hosts.relay(&mut rouse).unwrap();
    for trunk in hosts.trunks() {
        trunk.clone().pass(&mut rouse);
    }
}
