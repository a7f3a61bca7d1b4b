//! A back end of vhost-user, whose guest writes what it likes into its rings, and whose front end says what it likes. What must hold: it goes on;
//! the next guest, which does as it ought to, is served; and its frames are not others'.

use std::cell::RefCell;
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use ringlet_ethernet::frame::HEADER_BYTES;
use ringlet_ethernet::room::{Room, Rules};
use ringlet_ethernet::vhost as back_end;
use ringlet_ethernet::{Mac, Options, Policy, Port, Queue};
use vhost::VhostBackend;
use vhost::vhost_user::VhostUserFrontend;
use vm_memory::{Bytes, GuestAddress};

use crate::guest::*;

const OURS: Mac = Mac([2, 0, 0, 0, 0, 1]);
const GUESTS: Mac = Mac([2, 0, 0, 0, 0, 2]);
const PLAIN: [u8; 10] = [0; 10];
const ALL: u64 = VERSION_1 | EVENT_IDX | INDIRECT | MERGES | OFFLOADS;

struct Stage {
    path: PathBuf,
    port: Port,
    queue: Queue,
}

thread_local! {
    static STAGE: RefCell<Option<Stage>> = const { RefCell::new(None) };
}

impl Stage {
    fn new() -> Stage {
        let folder = std::env::temp_dir().join(format!("ringlet-vhost-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&folder);
        Room::create(
            &folder,
            "net",
            Rules { addresses: Policy::Static, storm: 0, bridge: false },
            None,
        )
        .unwrap();
        let room = Room::open(&folder, "net").unwrap();
        let path = folder.join("guest.sock");
        let settings = back_end::Settings { socket: path.clone(), mac: Some(GUESTS), watch_us: 0 };
        let ((ready, is_ready), theirs) = (channel(), room.clone());
        // (Until the process ends.)
        std::thread::spawn(move || {
            back_end::serve(&settings, theirs, channel(), move |_| ready.send(()).unwrap(), |_| ())
        });
        is_ready.recv().unwrap();
        let (port, queues) = Port::open(room, Options::new("test", OURS), |_| ()).unwrap();
        Stage { path, port, queue: queues.into_iter().next().unwrap() }
    }

    fn meets(&self, others: usize) {
        let began = Instant::now();
        while self.port.others() != others {
            assert!(began.elapsed() < LIMIT, "{others} others: {}", self.port.others());
            std::thread::sleep(Duration::from_micros(100));
        }
    }

    /// Takes what has come; how many of them are a guest's that does as it ought to.
    fn take(&mut self) -> usize {
        let mut sound = 0;
        self.queue.begin();
        self.queue.receive(64, |arrived| {
            // (Its own address only, by the network's rule.)
            assert_eq!(arrived.head.source(), GUESTS);
            sound += usize::from(arrived.len == HEADER_BYTES + 77);
            Ok(())
        });
        sound
    }

    fn send(&mut self, bytes: usize) -> bool {
        self.queue.begin();
        let Ok(mut place) = self.queue.reserve(GUESTS, HEADER_BYTES + 14 + bytes) else {
            return false;
        };
        place.write(HEADER_BYTES, &[GUESTS.0, OURS.0].concat());
        place.send().is_ok()
    }

    fn play(&mut self, mut script: Script) -> usize {
        if script.below(4) == 0 {
            let mut stream = UnixStream::connect(&self.path).unwrap();
            for _ in 0..script.below(4) + 1 {
                let (request, len) = (script.number(1) % 45, script.below(48));
                let head = [request as u32, 1, len as u32].map(u32::to_le_bytes);
                let _ = stream.write_all(&[head.as_flattened(), script.bytes(len)].concat());
            }
        }
        let features =
            [ALL, VERSION_1 | INDIRECT, 0, VERSION_1 | MERGES | EVENT_IDX][script.below(4)];
        let mut guest = Guest::start(&self.path, features, script.below(8) as u16, 2048);
        let began = Instant::now();
        while !self.send(8) {
            assert!(began.elapsed() < LIMIT, "a guest does not come");
            std::thread::sleep(Duration::from_micros(100));
        }
        let mut came = 0;
        while !script.0.is_empty() {
            let ring = script.below(2);
            let (avail, used) = (guest.rings[ring].avail, guest.rings[ring].used);
            match script.below(12) {
                0..3 => {
                    let at = [3 << 20, 1 << 20, 0x10000, script.number(3), script.number(8)];
                    let at = at[script.below(5)];
                    let len =
                        [script.number(1), script.number(2), script.number(4)][script.below(3)];
                    let (flags, next) = (script.below(8) as u16, script.below(80) as u16);
                    guest.describe(ring, script.below(64) as u16, at, len as u32, flags, next);
                }
                3..6 => {
                    let times = if script.below(16) == 0 { 300 } else { 1 };
                    let head = (script.number(1) as u16).wrapping_mul(times);
                    guest.publish(ring, head);
                    guest.rings[ring].kick.write(1).unwrap();
                }
                6 => {
                    let at = [avail, used, 0x10000, 3 << 20][script.below(4)] + script.number(1);
                    let len = script.below(32);
                    let _ = guest.memory.write_slice(script.bytes(len), GuestAddress(at));
                }
                7 => {
                    let frame = [&OURS.0[..], &GUESTS.0, &[0x88, 0xb5], &[7; 63]].concat();
                    let mut header = PLAIN;
                    let len = script.below(2) * 10;
                    header[..len].copy_from_slice(&[script.bytes(len), &PLAIN].concat()[..len]);
                    guest.post(&header, &frame, 4 + script.below(100));
                }
                8 => _ = self.send(script.number(2) as usize),
                9 => {
                    guest.used(ring, Duration::from_micros(200));
                }
                10 if script.below(8) == 0 => {
                    let _ = guest.front.set_vring_enable(ring, script.below(2) == 0);
                    let _ = guest.front.get_vring_base(ring);
                }
                _ => came += self.take(),
            }
        }
        // (What is on its way has a moment.)
        std::thread::sleep(Duration::from_micros(200));
        came += self.take();
        drop(guest);
        self.meets(0);
        while self.queue.hold(64, |_| Ok(())) {}
        self.queue.begin();
        let mut guest = Guest::start(&self.path, ALL, 8, 2048);
        // (What was sent to the one before it, of whom our queue had not heard yet that it has gone, is lost.)
        let (began, mut tries, mut came_last) = (Instant::now(), 0, None);
        while came_last.is_none() {
            assert!(began.elapsed() < LIMIT, "the next guest does not come");
            tries += 1;
            self.send(100 + tries);
            came_last = guest.receive(Duration::from_millis(20));
        }
        while came_last.is_some_and(|(_, frame)| frame.len() != 114 + tries) {
            came_last = guest.receive(LIMIT);
        }
        let frame = [&OURS.0[..], &GUESTS.0, &[0x88, 0xb5], &[7; 63]].concat();
        guest.send(&PLAIN, &frame, 1000);
        while self.take() == 0 {
            assert!(began.elapsed() < LIMIT, "a frame of the next guest's is lost");
        }
        drop(guest);
        self.meets(0);
        came
    }
}

struct Script<'a>(&'a [u8]);

impl<'a> Script<'a> {
    fn bytes(&mut self, len: usize) -> &'a [u8] {
        let (first, rest) = self.0.split_at(len.min(self.0.len()));
        self.0 = rest;
        first
    }

    fn number(&mut self, bytes: usize) -> u64 {
        self.bytes(bytes).iter().fold(0, |number, &byte| number << 8 | u64::from(byte))
    }

    fn below(&mut self, limit: usize) -> usize {
        self.number(1) as usize % limit
    }
}

/// How many frames of the guest that does as it likes came.
pub fn run(script: &[u8]) -> usize {
    STAGE.with_borrow_mut(|stage| stage.get_or_insert_with(Stage::new).play(Script(script)))
}
