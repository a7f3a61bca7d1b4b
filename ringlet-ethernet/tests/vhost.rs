//! A guest's rings as a port: frames pass both ways whatever its driver takes; what waits for buffers is not lost; a guest that breaks its rings,
//! one that goes, and a back end that is begun anew, leave everybody else well.

mod guest;

use std::path::{Path, PathBuf};
use std::sync::mpsc::{Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use ::vhost::VhostBackend;
use guest::*;
use ringlet_ethernet::device::End;
use ringlet_ethernet::frame::{HEAD_BYTES, HEADER_BYTES, MESSAGE_MOST};
use ringlet_ethernet::room::{Room, Rules};
use ringlet_ethernet::{Mac, Options, Policy, Port, Queue, vhost};
use vm_memory::{Bytes, GuestAddress};
use vmm_sys_util::eventfd::EventFd;

const OURS: Mac = Mac([2, 0, 0, 0, 0, 1]);
const GUESTS: Mac = Mac([2, 0, 0, 0, 0, 2]);
const PLAIN: [u8; 10] = [0; 10];
const ALL: u64 = VERSION_1 | EVENT_IDX | INDIRECT | MERGES | OFFLOADS;

struct Back {
    ends: Sender<End>,
    thread: Option<JoinHandle<anyhow::Result<()>>>,
    path: PathBuf,
    told: std::sync::mpsc::Receiver<String>,
}

impl Back {
    fn begin(room: &Room, folder: &Path) -> Back {
        let path = folder.join("guest.sock");
        let settings = vhost::Settings { socket: path.clone(), mac: Some(GUESTS), watch_us: 50 };
        let ((ends, end), (ready, is_ready), (tells, told)) = (channel(), channel(), channel());
        let (ends, room, ending) = (ends.clone(), room.clone(), (ends, end));
        let thread = thread::spawn(move || {
            let tell = std::sync::Mutex::new(tells);
            let tell = move |what| _ = tell.lock().unwrap().send(what);
            vhost::serve(&settings, room, ending, move |mac| ready.send(mac).unwrap(), tell)
        });
        assert_eq!(is_ready.recv_timeout(LIMIT).unwrap(), GUESTS);
        Back { ends, thread: Some(thread), path, told }
    }
}

impl Back {
    fn end(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        self.ends.send(End::Asked).unwrap();
        let began = Instant::now();
        while !thread.is_finished() {
            assert!(began.elapsed() < LIMIT || thread::panicking(), "it does not end");
            thread::sleep(Duration::from_millis(1));
        }
        let ended = thread.join().unwrap();
        assert!(thread::panicking() || ended.is_ok(), "{ended:?}");
        assert!(!self.path.exists(), "its socket stays");
    }
}

impl Drop for Back {
    fn drop(&mut self) {
        self.end();
    }
}

struct Stage {
    back: Back,
    room: Room,
    port: Port,
    queue: Queue,
    folder: tempfile::TempDir,
}

impl Stage {
    fn new() -> Stage {
        let folder = tempfile::tempdir().unwrap();
        Room::create(
            folder.path(),
            "net",
            Rules { addresses: Policy::Static, storm: 0, bridge: false },
            None,
        )
        .unwrap();
        let room = Room::open(folder.path(), "net").unwrap();
        let back = Back::begin(&room, folder.path());
        let (port, queues) = Port::open(room.clone(), Options::new("test", OURS), |_| ()).unwrap();
        let queue = queues.into_iter().next().unwrap();
        Stage { back, room, port, queue, folder }
    }

    fn guest(&mut self, features: u64, buffers: u16, bytes: usize) -> Guest {
        let mut guest = Guest::start(&self.back.path, features, buffers, bytes);
        self.meets(1);
        // (Which has met us, too, once it has something of ours. What was sent to the one before, of whom our queue had not heard yet that it
        // has gone, is lost; what is sent once something came is not.)
        let (began, mut tries, mut came) = (Instant::now(), 0, None);
        while buffers > 0 && came.is_none() {
            assert!(began.elapsed() < LIMIT, "no frame");
            tries += 1;
            self.send(&PLAIN, &frame(GUESTS, OURS, 8, tries));
            came = guest.receive(Duration::from_millis(20));
        }
        while came.is_some_and(|(_, came)| came != frame(GUESTS, OURS, 8, tries)) {
            came = guest.receive(LIMIT);
        }
        guest
    }

    fn meets(&mut self, others: usize) {
        let began = Instant::now();
        while self.port.others() != others {
            assert!(began.elapsed() < LIMIT, "{others} others: {}", self.port.others());
            thread::sleep(Duration::from_millis(1));
        }
    }

    fn send(&mut self, header: &[u8; 10], frame: &[u8]) {
        let began = Instant::now();
        loop {
            self.queue.begin();
            if let Ok(mut place) = self.queue.reserve(GUESTS, HEADER_BYTES + frame.len()) {
                place.write(0, header);
                place.write(HEADER_BYTES, frame);
                return place.send().unwrap();
            }
            assert!(began.elapsed() < LIMIT, "no room");
            self.queue.wait_for(0, Some(Duration::from_millis(10))).unwrap();
        }
    }

    fn receive(&mut self) -> Vec<u8> {
        let (began, mut found) = (Instant::now(), None);
        while found.is_none() {
            assert!(began.elapsed() < LIMIT, "no frame came");
            self.queue.begin();
            self.queue.receive(1, |arrived| {
                let mut bytes = vec![0; arrived.len];
                arrived.copy_to(&mut bytes);
                found = Some(bytes);
                Ok(())
            });
            if found.is_none() {
                self.queue.wait_for(0, Some(LIMIT)).unwrap();
            }
        }
        found.unwrap()
    }

    /// It is well: a frame goes each way.
    fn passes(&mut self, guest: &mut Guest) {
        let back = frame(GUESTS, OURS, 200, 8);
        self.send(&PLAIN, &back);
        assert_eq!(guest.receive(LIMIT).expect("no frame").1, back);
        let there = frame(OURS, GUESTS, 100, 7);
        guest.send(&PLAIN, &there, 4096);
        assert_eq!(self.receive()[HEADER_BYTES..], there);
    }
}

fn frame(to: Mac, from: Mac, payload: usize, number: u64) -> Vec<u8> {
    let mut bytes = vec![number as u8; payload];
    bytes[..8].copy_from_slice(&number.to_le_bytes());
    [&to.0[..], &from.0, &[0x88, 0xb5], &bytes].concat()
}

#[test]
fn frames_pass_both_ways_whatever_the_driver_takes() {
    let mut stage = Stage::new();
    let longest = MESSAGE_MOST - HEAD_BYTES;
    for (features, buffers, bytes, most) in [
        (ALL, SIZE, 2048, longest),
        (VERSION_1 | MERGES, SIZE, 1536, longest),
        (VERSION_1 | EVENT_IDX, 8, 2048, 2048 - 26),
        (0, 4, 70_000, longest),
    ] {
        let mut guest = stage.guest(features, buffers, bytes);
        for (number, size) in [8, 46, 1500, 2022, 9000, longest].into_iter().enumerate() {
            for piece in [26, 1000, 100_000] {
                let there = frame(OURS, GUESTS, size, number as u64);
                if there.len().div_ceil(piece) < usize::from(SIZE) {
                    guest.send(&PLAIN, &there, piece);
                    assert_eq!(stage.receive(), [&PLAIN[..], &there].concat());
                }
            }
            if size <= most {
                let back = frame(GUESTS, OURS, size, number as u64);
                stage.send(&PLAIN, &back);
                let (header, came) = guest.receive(LIMIT).expect("no frame");
                assert_eq!(header[..10], PLAIN);
                assert!(came == back, "{size} B came otherwise");
            }
        }
        drop(guest);
        stage.meets(0);
    }
}

#[test]
fn what_finds_no_buffers_waits_and_what_none_holds_is_dropped() {
    let mut stage = Stage::new();
    let mut guest = stage.guest(VERSION_1 | MERGES, 3, 2048);
    // Too long for all of its ring: never. For three buffers: in time.
    stage.send(&PLAIN, &frame(GUESTS, OURS, 1000, 0));
    let (sizes, count) = ([8, 5900, 3000, 1500, 6000], 300);
    for number in 0..count {
        stage.send(&PLAIN, &frame(GUESTS, OURS, sizes[number as usize % 5], number));
    }
    assert_eq!(guest.receive(LIMIT).unwrap().1.len(), 1014);
    for number in 0..count {
        let (_, came) = guest.receive(LIMIT).unwrap_or_else(|| panic!("{number} is lost"));
        assert!(came == frame(GUESTS, OURS, sizes[number as usize % 5], number), "{number}");
    }
    drop(guest);
    stage.meets(0);
    // Without merging what is longer than a buffer is dropped, and the next one comes.
    let mut guest = stage.guest(VERSION_1, 3, 2048);
    for (size, number) in [(3000, 1), (100, 2), (60_000, 3), (200, 4)] {
        stage.send(&PLAIN, &frame(GUESTS, OURS, size, number));
    }
    for (size, number) in [(100, 2), (200, 4)] {
        assert_eq!(guest.receive(LIMIT).unwrap().1, frame(GUESTS, OURS, size, number));
    }
}

/// A segment of TCP that is still to be cut, of zeros but for its headers.
fn segment(payload: usize) -> ([u8; 10], Vec<u8>) {
    let mut bytes =
        [&GUESTS.0[..], &OURS.0, &[8, 0, 0x45, 0, 0, 0, 0, 7, 0, 0, 64, 6, 0, 0]].concat();
    bytes.extend([10, 7, 0, 1, 10, 7, 0, 2, 0, 1, 0, 2]);
    bytes.extend([0, 0, 0, 0, 0, 0, 0, 0, 0x50, 0x18, 1, 0, 0, 0, 0, 0]);
    bytes.resize(54 + payload, 9);
    let [low, high] = 1448u16.to_le_bytes();
    ([1, 1, 54, 0, low, high, 34, 0, 16, 0], bytes)
}

#[test]
fn segments_pass_whole_or_are_cut_for_a_driver_that_takes_none() {
    let mut stage = Stage::new();
    let (header, whole) = segment(20_000);
    let mut guest = stage.guest(ALL, SIZE, 2048);
    stage.send(&header, &whole);
    let (came, bytes) = guest.receive(LIMIT).unwrap();
    assert_eq!((&came[..10], &bytes), (&header[..], &whole));
    let (mut turned, header) = (whole.clone(), header);
    turned[..6].copy_from_slice(&OURS.0);
    turned[6..12].copy_from_slice(&GUESTS.0);
    guest.send(&header, &turned, 2048);
    assert_eq!(stage.receive(), [&header[..], &turned].concat());
    drop(guest);
    stage.meets(0);
    let mut guest = stage.guest(VERSION_1, 5, 2048);
    stage.send(&header, &whole);
    // (And what comes behind it stays behind it.)
    stage.send(&PLAIN, &frame(GUESTS, OURS, 100, 5));
    let mut payload = 0;
    while payload < 20_000 {
        let (header, bytes) = guest.receive(LIMIT).unwrap();
        assert_eq!(header[..10], PLAIN);
        assert_eq!(bytes[38..42], (payload as u32).to_be_bytes());
        assert!(bytes.len() == 54 + 1448 || payload + bytes.len() - 54 == 20_000);
        payload += bytes.len() - 54;
    }
    assert_eq!(guest.receive(LIMIT).unwrap().1, frame(GUESTS, OURS, 100, 5));
}

type Describe = fn(&mut Guest, u64);

#[test]
fn what_no_driver_writes_hurts_nobody_else() {
    let mut stage = Stage::new();
    let far = u64::MAX - 8;
    // Chains of which none is a frame: each is given back, and the next frame goes.
    let odd: [(&str, Describe); 6] = [
        ("outside", |guest, far| guest.describe(FROM_GUEST, 5, far, 100, 0, 0)),
        ("over the end", |guest, _| guest.describe(FROM_GUEST, 5, (4 << 20) - 30, 100, 0, 0)),
        ("short", |guest, _| guest.describe(FROM_GUEST, 5, 3 << 20, 13, 0, 0)),
        ("too long", |guest, _| guest.describe(FROM_GUEST, 5, 0, u32::MAX, 0, 0)),
        ("a circle", |guest, _| guest.describe(FROM_GUEST, 5, 3 << 20, 8, 1, 5)),
        ("an indirect table outside", |guest, far| guest.describe(FROM_GUEST, 5, far, 32, 4, 0)),
    ];
    let mut guest = stage.guest(ALL, SIZE, 2048);
    for (what, describe) in odd {
        describe(&mut guest, far);
        guest.publish(FROM_GUEST, 5);
        guest.kick(FROM_GUEST);
        assert!(guest.used(FROM_GUEST, LIMIT).is_some(), "{what}: it is not given back");
        stage.passes(&mut guest);
    }
    // Headers that no kernel takes.
    for header in [[1, 1, 0, 0, 0, 0, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0, 255, 255, 16, 0], [0x80; 10]]
    {
        guest.send(&header, &frame(OURS, GUESTS, 100, 1), 4096);
    }
    stage.passes(&mut guest);
    // Buffers that are none.
    drop(guest);
    stage.meets(0);
    let mut guest = stage.guest(VERSION_1, 0, 2048);
    for at in [far, (4 << 20) - 10] {
        guest.describe(TO_GUEST, 0, at, 2048, 2, 0);
        guest.publish(TO_GUEST, 0);
        guest.kick(TO_GUEST);
        stage.send(&PLAIN, &frame(GUESTS, OURS, 100, 1));
        assert_eq!(guest.used(TO_GUEST, LIMIT), Some((0, 0)), "a buffer that is none");
    }
    guest.give(1);
    guest.kick(TO_GUEST);
    stage.passes(&mut guest);
    drop(guest);
    stage.meets(0);
    // A ring that is none any more: the connection ends, it is said why, and the next guest comes.
    for ring in [TO_GUEST, FROM_GUEST] {
        let mut guest = stage.guest(ALL, SIZE, 2048);
        stage.passes(&mut guest);
        let at = GuestAddress(guest.rings[ring].avail + 2);
        let beyond = guest.rings[ring].given.wrapping_add(1000);
        guest.memory.store(beyond, at, std::sync::atomic::Ordering::SeqCst).unwrap();
        guest.rings[ring].kick.write(1).unwrap();
        stage.send(&PLAIN, &frame(GUESTS, OURS, 100, 1));
        stage.meets(0);
        let said = stage.back.told.recv_timeout(LIMIT).unwrap();
        assert!(said.contains("the guest's ring is not one"), "{said}");
    }
    let mut guest = stage.guest(ALL, SIZE, 2048);
    stage.passes(&mut guest);
}

#[test]
fn guests_that_go_and_back_ends_that_begin_anew() {
    let mut stage = Stage::new();
    let mut guest = stage.guest(ALL, SIZE, 2048);
    stage.passes(&mut guest);
    // Its driver goes, and comes back: as in a reboot.
    guest.stop();
    stage.meets(0);
    drop(guest);
    // The back end ends; another one goes on with the rings where they are.
    let mut guest = stage.guest(ALL, SIZE, 2048);
    stage.passes(&mut guest);
    for _ in 0..3 {
        stage.back.end();
        stage.meets(0);
        stage.back = Back::begin(&stage.room, stage.folder.path());
        guest.connect_again(&stage.back.path);
        stage.meets(1);
        stage.passes(&mut guest);
    }
}

#[test]
fn descriptors_that_stick_hold_up_nobody() {
    let mut stage = Stage::new();
    // By one that is full, and is waited for, the guest is told of what it sent.
    let mut guest = stage.guest(ALL, SIZE, 2048);
    let full = EventFd::new(0).unwrap();
    full.write(u64::MAX - 1).unwrap();
    guest.front.set_vring_call(FROM_GUEST, &full).unwrap();
    for number in 0..3 {
        let there = frame(OURS, GUESTS, 100, number);
        guest.post(&PLAIN, &there, 4096);
        let began = Instant::now();
        while guest.used(FROM_GUEST, Duration::from_millis(1)).is_none() {
            assert!(began.elapsed() < LIMIT, "a frame is not taken");
        }
        assert_eq!(stage.receive()[HEADER_BYTES..], there);
    }
    drop(guest);
    stage.meets(0);
    // One that tells of more than there is, as one that was put in another's place may, does not leave a guest that nobody serves.
    let mut guest = stage.guest(ALL, SIZE, 2048);
    stage.passes(&mut guest);
    guest.front.set_vring_kick(FROM_GUEST, &EventFd::new(0).unwrap()).unwrap();
    // (What answers is behind that.)
    guest.front.get_features().unwrap();
    guest.rings[FROM_GUEST].kick.write(1).unwrap();
    stage.meets(0);
    let mut guest = stage.guest(ALL, SIZE, 2048);
    stage.passes(&mut guest);
}
