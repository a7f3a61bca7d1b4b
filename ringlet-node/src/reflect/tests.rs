//! Networks of two nodes, whose services are played.

use super::kept::Kept;
use super::network::Rails;
use super::*;
use crate::cluster::Session;
use crate::fabric::{
    BROKEN, ENDED, JOINED, LOG, PACKET_BYTES, PASS, PASSED, RailSettings, in_pieces, packet, read,
};
use ringlet_linux::meet;
use ringlet_linux::sys::Errno;
use ringlet_reflect::network::{Batch, Event, FRAME_BYTES, Life, Network, Parcel};
use std::collections::VecDeque;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

/// Only a fault meets it.
const PATIENCE: Duration = Duration::from_secs(60);

/// A process, and its service's end.
struct Side {
    name: &'static str,
    rails: Rails,
    service: OwnedFd,
    came: Vec<Vec<u8>>,
    changes: Vec<(bool, Life)>,
    log: Vec<String>,
    broken: usize,
    active: u32,
    waiting: VecDeque<Vec<u8>>,
}

fn place(test: &str) -> std::path::PathBuf {
    std::env::temp_dir().join(format!("ringlet-{test}-{}", std::process::id()))
}

fn settings(folder: &Path, chaos: Option<(u64, u32)>) -> Vec<RailSettings> {
    let more = chaos.map_or(String::new(), |(seed, fails)| {
        format!(", \"seed\": {seed}, \"fails_one_in\": {fails}")
    });
    let rail = |at: &str| {
        let folder = folder.join(at);
        std::fs::create_dir_all(&folder).unwrap();
        let text = format!("{{\"provider\": \"memory\", \"folder\": {folder:?}{more}}}");
        serde_json::from_str(&text).unwrap()
    };
    vec![rail("0"), rail("1")]
}

impl Side {
    fn new(name: &'static str, folder: &Path, rails: Vec<RailSettings>) -> Side {
        // SAFETY: made just now, ours alone.
        let [ours, service] = meet::pair().unwrap().map(|fd| unsafe { OwnedFd::from_raw_fd(fd) });
        let kept = folder.join(name);
        let ends = Box::new(|| panic!("the service has gone"));
        let kept = Kept::open(&kept).unwrap();
        let begun = kept.begin().unwrap();
        let rails = Rails::new(ours, kept, begun, name.into(), rails, RailSettings::open, ends);
        Side {
            name,
            rails: rails.unwrap(),
            service,
            came: Vec::new(),
            changes: Vec::new(),
            log: Vec::new(),
            broken: 0,
            active: 0,
            waiting: VecDeque::new(),
        }
    }

    fn tell(&mut self, kind: u8, session: Session, body: &[u8]) {
        self.waiting.push_back(packet(kind, session, body));
    }

    fn turn(&mut self) {
        while let Some(packet) = self.waiting.front() {
            if meet::send(self.service.as_raw_fd(), packet, &[]) == Err(Errno::EAGAIN) {
                break;
            }
            self.waiting.pop_front();
        }
        let Side { rails, came, changes, active, .. } = self;
        rails.poll(&mut |event| match event {
            Event::Up(life) => changes.push((true, life)),
            Event::Down(life) => changes.push((false, life)),
            Event::Frame(_, frame) => came.push(frame.to_vec()),
            Event::Rails { active: mask, number: 2 } => *active = mask,
            Event::Rails { .. } => panic!("other rails"),
        });
    }

    fn is_up(&self) -> bool {
        self.changes.last().is_some_and(|(is_up, _)| *is_up)
    }
}

/// Two of them; what each passes comes to the other one, in the session that there is.
struct Two {
    sides: [Side; 2],
    session: Session,
    folder: std::path::PathBuf,
    rails: Vec<RailSettings>,
    /// What each has passed, if it is held up.
    held: Option<[Vec<Vec<u8>>; 2]>,
}

impl Drop for Two {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

impl Two {
    fn new(test: &str, chaos: Option<(u64, u32)>) -> Two {
        Two::by(test, settings(&place(test), chaos))
    }

    fn by(test: &str, rails: Vec<RailSettings>) -> Two {
        let folder = place(test);
        let sides = ["a", "b"].map(|name| Side::new(name, &folder, rails.clone()));
        Two::of(sides, folder, rails)
    }

    fn of(sides: [Side; 2], folder: std::path::PathBuf, rails: Vec<RailSettings>) -> Two {
        let mut two = Two { sides, session: [1; 16], folder, rails, held: None };
        two.join();
        two.until("both to be up", |two| two.sides.iter().all(Side::is_up));
        two
    }

    fn join(&mut self) {
        let session = self.session;
        let [a, b] = &mut self.sides;
        a.tell(JOINED, session, b"b");
        b.tell(JOINED, session, b"a");
    }

    fn end(&mut self) {
        let session = self.session;
        self.sides.iter_mut().for_each(|side| side.tell(ENDED, session, &[]));
        self.session[0] += 1;
    }

    /// That process dies, and the next one is there, in the session that goes on.
    fn replace(&mut self, at: usize) {
        let (name, other) = (self.sides[at].name, self.sides[1 - at].name);
        let aside = format!("{name}-aside");
        // (It has to be dead, as another one begins.)
        self.sides[at] = Side::new(aside.leak(), &self.folder, self.rails.clone());
        self.sides[at] = Side::new(name, &self.folder, self.rails.clone());
        self.sides[at].tell(JOINED, self.session, other.as_bytes());
    }

    fn turn(&mut self) {
        let mut bytes = vec![0; PACKET_BYTES];
        for at in 0..2 {
            self.sides[at].turn();
            while let Ok((len, _)) = meet::receive(self.sides[at].service.as_raw_fd(), &mut bytes) {
                match read(&bytes[..len]) {
                    Some((PASS, session, message)) if session == self.session => {
                        match &mut self.held {
                            Some(held) => held[at].push(message.to_vec()),
                            None => self.sides[1 - at].tell(PASSED, session, message),
                        }
                    }
                    Some((BROKEN, ..)) => self.sides[at].broken += 1,
                    Some((LOG, _, text)) => {
                        self.sides[at].log.push(String::from_utf8_lossy(text).into());
                    }
                    _ => {}
                }
            }
        }
    }

    fn until(&mut self, what: &str, mut is: impl FnMut(&mut Two) -> bool) {
        let began = Instant::now();
        while !is(self) {
            assert!(
                began.elapsed() < PATIENCE,
                "{what}: {:?}",
                self.sides.each_ref().map(|s| &s.log)
            );
            self.turn();
        }
    }

    fn life(&self, at: usize) -> Life {
        self.sides[at].rails.me().clone()
    }

    /// Sends these both ways, each again until it is taken; all come, in order, each once.
    fn exchange(&mut self, frames: &[Vec<u8>]) {
        let (lives, mut sent) = ([self.life(0), self.life(1)], [0; 2]);
        self.sides.iter_mut().for_each(|side| side.came.clear());
        self.until("all frames to come", |two| {
            for at in 0..2 {
                let rails = &mut two.sides[at].rails;
                // (Each second one as a keeper has it.)
                while let Some(frame) = frames.get(sent[at])
                    && rails.send(
                        &lives[1 - at],
                        &match sent[at] % 2 {
                            0 => frame.clone().into(),
                            _ => around(rails, frame),
                        },
                    )
                {
                    sent[at] += 1;
                }
            }
            two.sides.iter().all(|side| side.came.len() == frames.len())
        });
        for side in &self.sides {
            assert!(side.came == frames, "{}: other frames came", side.name);
        }
    }
}

/// As a frame with a payload that lies where rails take it from.
fn around(rails: &Rails, frame: &[u8]) -> Parcel {
    let mut batch = Batch::new(rails.arena());
    let (before, rest) = frame.split_at(frame.len().min(39));
    let (payload, behind) = rest.split_at(rest.len().saturating_sub(5));
    batch.put(payload);
    let payload = batch.freeze();
    Parcel::around(before, &payload, behind)
}

/// Of all sizes, each with bytes of its own.
fn frames(count: usize, seed: u64) -> Vec<Vec<u8>> {
    let mut state = seed;
    let mut next = || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize
    };
    let edges = [0, 1, 1000, 1015, 1016, 1024, 1025, 8192, FRAME_BYTES - 1, FRAME_BYTES];
    let mut all: Vec<Vec<u8>> = Vec::new();
    for nth in 0..count {
        let bytes = match edges.get(nth) {
            Some(edge) => *edge,
            None if next() % 2 == 0 => next() % 200,
            None => next() % (FRAME_BYTES + 1),
        };
        all.push((0..bytes).map(|at| (at.wrapping_mul(31) ^ nth) as u8).collect());
    }
    all
}

#[test]
fn frames_of_all_sizes_come_in_order_both_ways() {
    let mut two = Two::new("sizes", None);
    two.exchange(&frames(2000, 1));
    let (one, other) = (two.life(0), two.life(1));
    assert!(!two.sides[0].rails.send(&other, &vec![0; FRAME_BYTES + 1].into()));
    assert!(!two.sides[0].rails.send(&one, &vec![7].into()), "to itself");
    let another = Life { incarnation: other.incarnation + 1, ..other };
    assert!(!two.sides[0].rails.send(&another, &vec![7].into()), "to a run that is not there");
}

#[test]
fn the_same_over_rails_in_disorder_that_fail() {
    for seed in 1..=3 {
        let mut two = Two::new(&format!("disorder-{seed}"), Some((seed, 20_000)));
        two.exchange(&frames(600, seed));
        assert!(two.sides.iter().all(|side| side.changes.len() == 1), "it was down");
    }
}

#[test]
fn the_same_over_libfabric() {
    let rail = r#"{"provider": "tcp;ofi_rxm", "address": "127.0.0.1"}"#;
    let rails = vec![serde_json::from_str(rail).unwrap(); 2];
    let mut two = Two::by("libfabric", rails);
    two.exchange(&frames(600, 11));
}

#[test]
fn who_takes_nothing_is_not_waited_for_and_what_was_taken_comes() {
    let mut two = Two::new("flood", None);
    let (to, frame) = (two.life(1), Parcel::from(vec![7; FRAME_BYTES]));
    let mut taken = 0;
    while two.sides[0].rails.send(&to, &frame) {
        taken += 1;
        assert!(taken < 1000, "it keeps everything");
    }
    assert!(taken >= 16, "{taken}");
    two.until("what was taken", |two| two.sides[1].came.len() == taken);
    two.exchange(&frames(50, 3));
}

#[test]
fn a_session_that_ends_is_a_way_less_and_its_successor_one_more() {
    let mut two = Two::new("session", None);
    let life = two.life(1);
    two.end();
    two.until("both to be down", |two| !two.sides.iter().any(Side::is_up));
    assert!(!two.sides[0].rails.send(&life, &vec![7].into()));
    two.join();
    two.until("both to be up", |two| two.sides.iter().all(Side::is_up));
    assert_eq!(two.sides[0].changes.last(), Some(&(true, life.clone())), "the same run");
    two.exchange(&frames(40, 5));
}

/// What bids farewell behind the end of its service's session is heard; who has another session with that node hears the other way's end first.
#[test]
fn a_way_lingers_behind_its_session() {
    let mut two = Two::new("lingers", None);
    let lives = [two.life(0), two.life(1)];
    for _ in 0..3 {
        two.end();
        two.exchange(&frames(40, 5));
        two.join();
        let told = [1, 0].map(|at: usize| [(false, lives[at].clone()), (true, lives[at].clone())]);
        two.until("the next way", |two| {
            (0..2).all(|at| two.sides[at].changes.ends_with(&told[at]))
        });
        two.exchange(&frames(40, 5));
        two.sides.iter_mut().for_each(|side| side.changes.clear());
    }
}

#[test]
fn the_next_process_is_another_life_in_the_same_session() {
    let mut two = Two::new("process", None);
    for nth in 0..4 {
        let at = nth % 2;
        let before = two.life(at);
        // (Something is under way.)
        let frame = Parcel::from(vec![1; FRAME_BYTES]);
        for _ in 0..5 {
            two.sides[1 - at].rails.send(&before, &frame);
        }
        two.replace(at);
        let after = two.life(at);
        assert!(after > before);
        let told = [(false, before), (true, after)];
        two.until("the next one to be up", |two| two.sides[1 - at].changes.ends_with(&told));
        two.until("the other one to be up there", |two| two.sides[at].is_up());
        two.exchange(&frames(40, 7));
    }
}

#[test]
fn both_processes_die_at_once() {
    let mut two = Two::new("both", None);
    for _ in 0..3 {
        (0..2).for_each(|at| two.replace(at));
        let lives = [two.life(0), two.life(1)];
        two.until("both to be up", |two| {
            (0..2).all(|at| two.sides[at].changes.last() == Some(&(true, lives[1 - at].clone())))
        });
        two.exchange(&frames(40, 7));
    }
}

#[test]
fn which_rails_carry_is_told() {
    let mut two = Two::new("rails", None);
    two.until("both rails to carry", |two| two.sides.iter().all(|side| side.active == 3));
}

/// Each has just begun when it hears that the other one does, and their looks are half of `TRY_AGAIN` apart.
#[test]
fn two_that_begin_anew_by_turns_meet() {
    let folder = place("turns");
    let rails = settings(&folder, None);
    let a = Side::new("a", &folder, rails.clone());
    std::thread::sleep(Duration::from_millis(500));
    let b = Side::new("b", &folder, rails.clone());
    let mut two = Two::of([a, b], folder, rails);
    let session = two.session;
    let attempts = [0, 1].map(|at| Attempt { incarnation: two.life(at).incarnation, number: 1 });
    two.held = Some([Vec::new(), Vec::new()]);
    for at in 0..2 {
        let what = What::Control(Control::Free { memory: ringlet_fabric::Memory(9) });
        let lie = Passed { from: attempts[1 - at], to: attempts[at], what };
        let lie = serde_json::to_vec(&lie).unwrap();
        in_pieces(&lie).for_each(|piece| two.sides[at].tell(PASSED, session, &piece));
    }
    two.until("both to be down", |two| !two.sides.iter().any(Side::is_up));
    two.until("both to begin anew", |two| {
        let held = two.held.as_ref().unwrap();
        held.iter().all(|all| all.iter().any(|one| String::from_utf8_lossy(one).contains("Hello")))
    });
    for (at, held) in two.held.take().unwrap().into_iter().enumerate() {
        held.iter().for_each(|piece| two.sides[1 - at].tell(PASSED, session, piece));
    }
    two.until("both to be up again", |two| two.sides.iter().all(Side::is_up));
    two.exchange(&frames(40, 13));
}

/// What no sane keeper's process says there, and passes.
#[test]
fn a_hostile_process_harms_its_own_way_only() {
    let mut two = Two::new("hostile", None);
    let incarnations = [0, 1].map(|at| two.life(at).incarnation);
    let attempt = |number| Attempt { incarnation: incarnations[1], number };
    let to = Attempt { incarnation: incarnations[0], number: 1 };
    let passed = |from, what| serde_json::to_vec(&Passed { from, to, what }).unwrap();
    // Messages that are none, or too long.
    for (message, broken) in [(b"nonsense".to_vec(), 1), (vec![b' '; 2 << 20], 2)] {
        for piece in in_pieces(&message) {
            let session = two.session;
            two.sides[0].tell(PASSED, session, &piece);
        }
        two.until("it to be said", |two| two.sides[0].broken >= broken);
    }
    // Of another attempt, or of one before: nobody's.
    let control = || What::Control(Control::Free { memory: ringlet_fabric::Memory(9) });
    for message in [passed(attempt(7), control()), passed(attempt(0), What::Hello)] {
        let session = two.session;
        in_pieces(&message).for_each(|piece| two.sides[0].tell(PASSED, session, &piece));
    }
    two.exchange(&frames(40, 9));
    assert_eq!(two.sides[0].changes.len(), 1);
    // A control that is a lie ends the transport, and both begin anew.
    let message = passed(attempt(1), control());
    let session = two.session;
    in_pieces(&message).for_each(|piece| two.sides[0].tell(PASSED, session, &piece));
    two.until("a transport less", |two| two.sides[0].changes.len() >= 2);
    two.until("both to be up again", |two| {
        two.sides.iter().all(|side| side.is_up() && side.changes.len() >= 3)
    });
    assert!(
        two.sides[0].log.iter().any(|text| text.contains("b is given up")),
        "{:?}",
        two.sides[0].log
    );
    two.exchange(&frames(40, 9));
}
