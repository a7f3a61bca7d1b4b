//! A server, a keeper and readers in one process; and readers that mean no good.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, MutexGuard, Once};
use std::time::Duration;

use ringlet_reflect::keeper::{self, keep};
use ringlet_reflect::{Host, Permission, Use, VARIABLE, Wait};

use super::streams::has_stream;
use super::{Flags, Reader, Session, locked};
use crate::file::tests::{GATE, MOVED};
use crate::layout::{
    Offer, Op, Part, READERS, Request, SLOT_BYTES, SLOTS, answer_at, answered, load, next,
    number_at, publish, random, read_at, written_at,
};
use crate::server::tests::{CUT_OFF, DAWDLES};
use crate::{Extent, Options, Said, serve};

pub const PATIENCE: Duration = Duration::from_secs(30);
pub const BYTES: usize = 3 * SLOT_BYTES + 1000;

extern "C" fn clean_up() {
    let _ = std::fs::remove_dir_all(place());
}

fn place() -> PathBuf {
    std::env::temp_dir().join(format!("ringlet-disk-{}", std::process::id()))
}

/// This process's, with its keeper, until it ends.
pub fn folder() -> PathBuf {
    static BEGUN: Once = Once::new();
    let folder = place();
    BEGUN.call_once(|| {
        std::fs::create_dir_all(&folder).unwrap();
        // SAFETY: a function that may be called at the end.
        #[allow(unsafe_code)]
        unsafe {
            libc::atexit(clean_up);
        }
        let (path, (ready, is_ready)) = (folder.join("socket"), channel());
        // SAFETY: tests look for a keeper behind this call only.
        #[allow(unsafe_code)]
        unsafe {
            std::env::set_var(VARIABLE, &path);
        }
        std::thread::spawn(move || {
            let options =
                keeper::Options { path: Some(&path), stays: true, ..keeper::Options::default() };
            keep(&options, || ready.send(()).unwrap()).unwrap();
        });
        is_ready.recv().unwrap();
    });
    folder
}

/// Readers of a disk whose streams go another way than its server says.
pub static WAYS: Mutex<Vec<(&str, SocketAddr)>> = Mutex::new(Vec::new());

pub fn by_another_way(name: &str, offer: Option<Offer>) -> Option<Offer> {
    let way = locked(&WAYS).iter().find(|way| way.0 == name).map(|way| way.1);
    offer.map(|offer| Offer { address: way.unwrap_or(offer.address), ..offer })
}

pub fn pattern() -> Vec<u8> {
    (0..BYTES).map(|at| (at / 7 * 31) as u8).collect()
}

/// A disk of that name, which is served as long as the process is there.
fn served(name: &'static str, read_only: bool) -> PathBuf {
    served_at(name, folder().join(name), read_only)
}

fn served_at(name: &'static str, path: PathBuf, read_only: bool) -> PathBuf {
    served_by(name, path, read_only, None)
}

pub const NEAR: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0);

pub fn served_by(
    name: &'static str,
    path: PathBuf,
    read_only: bool,
    direct: Option<SocketAddr>,
) -> PathBuf {
    folder();
    std::fs::write(&path, pattern()).unwrap();
    let (ready, is_ready) = channel();
    let file = path.clone();
    std::thread::spawn(move || {
        let options = Options { name, path: &file, read_only, mode: 0o600, direct };
        let find = || Ok(Host::find()?);
        serve(&options, find, |said| {
            if matches!(said, Said::Ready) {
                let _ = ready.send(());
            }
        })
        .unwrap();
    });
    is_ready.recv().unwrap();
    path
}

pub fn open(name: &str) -> Reader {
    Reader::open(name, None, PATIENCE).unwrap()
}

pub fn read(reader: &Reader) -> Vec<u8> {
    let mut all = vec![0; BYTES];
    reader.read(0, &mut all).unwrap();
    all
}

#[test]
fn what_is_written_is_read() {
    let path = served("written", false);
    let (one, other) = (open("written"), open("written"));
    assert_eq!((one.source().bytes(), one.source().is_read_only()), (BYTES as u64, false));
    let mut model = pattern();
    assert_eq!(read(&one), model);
    let bytes = vec![7; 2 * SLOT_BYTES + 3];
    one.write(500, &bytes, Flags { durable: true, ..Flags::default() }).unwrap();
    model[500..500 + bytes.len()].fill(7);
    other.zero(0, 300, Flags { may_trim: true, ..Flags::default() }).unwrap();
    model[..300].fill(0);
    other.flush().unwrap();
    assert_eq!((read(&one), read(&other)), (model.clone(), model.clone()));
    assert_eq!(std::fs::read(path).unwrap(), model);
    for (offset, length) in [(BYTES as u64, 1), (u64::MAX, 1), (u64::MAX, 2)] {
        assert_eq!(one.read(offset, &mut vec![0; length]), Err(libc::EINVAL));
        assert_eq!(one.write(offset, &vec![1; length], Flags::default()), Err(libc::EINVAL));
        assert_eq!(one.trim(offset, length as u64, Flags::default()), Err(libc::EINVAL));
    }
    assert_eq!(read(&other), model);
}

#[test]
fn who_dies_while_it_is_let_in_keeps_nobody_waiting() {
    served("left", false);
    let host = Host::find().unwrap();
    let locks = host.locks(Part::Announcement.key("left"), 1 + READERS, 0o600, false).unwrap();
    locks.acquire(1, Wait::No).unwrap();
    let requests = super::allocate(&host, "left", Part::Requests, host.user()).unwrap();
    let requests = requests.transmit(Use::default()).unwrap();
    *DAWDLES.lock().unwrap() = Some("left");
    Request::hello(&requests, 0, &host.state().unwrap().host, random()).unwrap();
    while DAWDLES.lock().unwrap().is_some() {
        std::thread::yield_now();
    }
    drop((locks, requests, host));
    open("left").read(0, &mut [0; 8]).unwrap();
}

#[test]
fn a_name_is_served_once_and_a_file_too() {
    let path = served("once", false);
    let again = |name, path: &Path, read_only| {
        let options = Options { name, path, read_only, mode: 0o600, direct: None };
        let error = serve(&options, || Ok(Host::find()?), |_| panic!("it is served"));
        format!("{:#}", error.unwrap_err())
    };
    assert!(again("twice", &path, true).contains("served already, or another"));
    let other = path.with_extension("other");
    std::fs::write(&other, "x").unwrap();
    assert!(again("once", &other, false).contains("a disk once is served already"));
    let none = Reader::open("none", None, PATIENCE).err().unwrap();
    assert!(format!("{none:#}").contains("no disk none is served"));
}

/// A reader that says what it likes: what it asks for in a slot is answered, or nothing is.
struct Liar {
    session: Session,
    number: u64,
}

impl Liar {
    fn asks(&mut self, slot: usize, request: &Request) -> Result<(), i32> {
        request.write(&self.session.requests, self.session.seat, slot).unwrap();
        self.says(slot)
    }

    fn says(&mut self, slot: usize) -> Result<(), i32> {
        self.number = next(self.number);
        publish(&self.session.requests, number_at(self.session.seat, slot), self.number).unwrap();
        let began = std::time::Instant::now();
        loop {
            if let Some(done) = answered(load(&self.session.read, answer_at(slot)), self.number) {
                return done;
            }
            assert!(began.elapsed() < PATIENCE, "no answer");
            std::thread::yield_now();
        }
    }
}

#[test]
fn a_reader_that_lies_gets_nothing_and_harms_nobody() {
    let path = served("lied", true);
    let honest = open("lied");
    let (session, _) = Session::open("lied", None).unwrap();
    let mut liar = Liar { session, number: random() };
    let bytes = BYTES as u64;
    let no = |op, offset, length| (Request { op, flags: 0, offset, length, over: 0 }, libc::EINVAL);
    let writes = |op| (Request { op, flags: u32::MAX, offset: 0, length: 8, over: 0 }, libc::EPERM);
    for (request, errno) in [
        no(Op::Read, bytes, 1),
        no(Op::Read, 0, SLOT_BYTES as u64 + 1),
        no(Op::Read, u64::MAX, u64::MAX),
        no(Op::Read, 1 << 63, 8),
        no(Op::Read, 0, u64::MAX),
        no(Op::Write, bytes - 1, 2),
        no(Op::Extents, 0, 0),
        no(Op::Extents, bytes, 1),
        no(Op::Extents, 1, u64::MAX),
        writes(Op::Write),
        writes(Op::Trim),
        writes(Op::Zero),
    ] {
        assert_eq!(liar.asks(1, &request), Err(errno), "{request:?}");
    }
    // The largest one stays in its slot.
    let before = load(&liar.session.read, read_at(2));
    let most = Request { op: Op::Read, flags: 0, offset: 1, length: SLOT_BYTES as u64, over: 0 };
    assert_eq!(liar.asks(1, &most), Ok(()));
    assert_eq!(load(&liar.session.read, read_at(2)), before);
    // Words that are no request, in all slots at a time, in any order.
    let mut dice = 1_u64;
    let mut roll = || {
        dice ^= dice << 13;
        dice ^= dice >> 7;
        dice ^= dice << 17;
        dice
    };
    for _ in 0..20_000 {
        let (seat, slot) = (liar.session.seat, roll() as usize % SLOTS);
        let at = 4096 * (1 + seat) + slot * 64 + (roll() as usize % 3) * 8;
        let word = match roll() % 4 {
            // (No greeting, which would give the seat to another one.)
            0 => 1 + roll() % 6,
            1 => roll() % (2 * bytes),
            2 => roll(),
            _ => roll() | 1 << 31,
        };
        let is_greeting = at.is_multiple_of(64) && word as u32 == 0;
        liar.session.requests.put(at, &word.to_ne_bytes()).unwrap();
        if roll() % 8 == 0 && !is_greeting {
            publish(&liar.session.requests, number_at(seat, slot), roll()).unwrap();
        }
    }
    assert_eq!(read(&honest), pattern());
    assert_eq!(std::fs::read(path).unwrap(), pattern());
    // And greetings: the last one of its seat has it.
    let fresh = Session::open("lied", None).unwrap().0;
    for _ in 0..50 {
        publish(&liar.session.requests, number_at(fresh.seat, 0), roll()).unwrap();
    }
    drop((fresh, liar));
    assert_eq!((read(&open("lied")), read(&honest)), (pattern(), pattern()));
}

#[test]
fn what_was_not_flushed_is_not_taken_for_written_when_the_host_has_begun_again() {
    served("lost", false);
    let reader = open("lost");
    let again = |boot| crate::layout::Facts { boot, ..reader.known.facts.clone() };
    let boot = reader.known.facts.boot;
    let lost = |boot| reader.known.why_another(&again(boot));
    let write = |durable| reader.write(0, b"x", Flags { durable, ..Flags::default() }).unwrap();
    write(true);
    assert_eq!(lost(boot + 1), None);
    // (From then on it is that one, also for what is written there.)
    write(false);
    assert_eq!(lost(boot + 1), None);
    assert!(lost(boot).unwrap().contains("not flushed"));
    reader.flush().unwrap();
    assert_eq!(lost(boot), None);
    let other = crate::layout::Facts { bytes: 1, ..reader.known.facts.clone() };
    assert!(reader.known.why_another(&other).unwrap().contains("another one"));
}

/// Who is told that something is written may flush by another reader, and is told that too before the first one is looked at again.
#[test]
fn what_is_answered_counts_before_anybody_is_told() {
    served("counts", false);
    let one = open("counts");
    let again = |boot| crate::layout::Facts { boot, ..one.known.facts.clone() };
    let boot = one.known.facts.boot;
    let mut turn = one.turn(&mut None).unwrap().unwrap();
    turn.prepare(Op::Write, Flags::default(), 0, 1);
    turn.fill_from(b"x");
    turn.ask();
    turn.tell();
    let began = std::time::Instant::now();
    while turn.answer().is_none() {
        assert!(began.elapsed() < PATIENCE, "no answer");
        std::thread::yield_now();
    }
    assert!(one.known.why_another(&again(boot + 1)).is_some());
    one.source().open().unwrap().flush().unwrap();
    assert_eq!(one.known.why_another(&again(boot + 1)), None);
    turn.finish();
    assert_eq!(one.known.why_another(&again(boot + 1)), None);
}

/// What is held, and what is read of it where holes need not come; whichever file system it is on, and in memory.
#[test]
fn holes_are_told_and_not_sent() {
    const HOLE: usize = 2 * SLOT_BYTES;
    let in_memory = Path::new("/dev/shm").join(format!("ringlet-sparse-{}", std::process::id()));
    for (name, path) in [("sparse", folder().join("sparse")), ("sparse-memory", in_memory)] {
        served_at(name, path.clone(), false);
        let reader = open(name);
        reader.zero(0, HOLE as u64, Flags { may_trim: true, ..Flags::default() }).unwrap();
        reader.flush().unwrap();
        let extent = |length: usize, is_hole| Extent { length: length as u64, is_hole };
        let all = [extent(HOLE, true), extent(BYTES - HOLE, false)];
        assert_eq!(reader.extents(0, BYTES as u64).unwrap(), all, "{name}");
        let some = [extent(5, true), extent(7, false)];
        assert_eq!(reader.extents(HOLE as u64 - 5, 12).unwrap(), some, "{name}");
        for (offset, length) in [(0, 0), (0, BYTES as u64 + 1), (u64::MAX, 2)] {
            assert_eq!(reader.extents(offset, length), Err(libc::EINVAL), "{name}");
        }
        assert!(!reader.known.has_unflushed(), "{name}: to look is no write");
        let asked = |sparse, offset: usize| {
            let mut turn = reader.turn(&mut None).unwrap().unwrap();
            let flags = Flags { sparse, ..Flags::default() };
            turn.prepare(Op::Read, flags, offset as u64, SLOT_BYTES as u64);
            turn.ask();
            turn.tell();
            let began = std::time::Instant::now();
            while turn.answer().is_none() {
                assert!(began.elapsed() < PATIENCE, "no answer");
                std::thread::yield_now();
            }
            // SAFETY: a slot has so many bytes; nobody writes there any more.
            #[allow(unsafe_code)]
            let bytes = unsafe { std::slice::from_raw_parts(turn.bytes(), SLOT_BYTES) }.to_vec();
            let is_hole = turn.is_hole();
            turn.finish();
            (is_hole, bytes)
        };
        // (All are asked for in one slot, whose bytes stay where none come.)
        let data = pattern()[HOLE..HOLE + SLOT_BYTES].to_vec();
        assert!(asked(true, HOLE) == (false, data.clone()), "{name}");
        assert!(asked(true, SLOT_BYTES) == (true, data), "{name}");
        assert!(asked(false, SLOT_BYTES) == (false, vec![0; SLOT_BYTES]), "{name}");
        let (is_hole, bytes) = asked(true, HOLE - 1);
        assert!(!is_hole && bytes[0] == 0 && bytes[1..] == pattern()[HOLE..][..SLOT_BYTES - 1]);
        std::fs::remove_file(path).unwrap();
    }
}

/// A write that begins there waits from now on, as if the device took its time. One at a time.
pub struct Slow {
    _turn: MutexGuard<'static, ()>,
}

impl Slow {
    pub fn at(offset: u64) -> Slow {
        Slow::first_at(offset, usize::MAX)
    }

    /// So many of them.
    pub fn first_at(offset: u64, most: usize) -> Slow {
        static TURN: Mutex<()> = Mutex::new(());
        let _turn = locked(&TURN);
        *GATE.lock().unwrap() = (Some(offset), 0, most);
        Slow { _turn }
    }

    pub fn await_one(&self) {
        drop(MOVED.wait_while(GATE.lock().unwrap(), |gate| gate.1 == 0).unwrap());
    }
}

impl Drop for Slow {
    fn drop(&mut self) {
        *locked(&GATE) = (None, 0, 0);
        MOVED.notify_all();
    }
}

/// One that writes there, and goes while that is done.
fn goes_while_it_writes(name: &str, at: u64, slow: &Slow) {
    let (mut goes, _) = Session::open(name, None).unwrap();
    goes.written.put(written_at(0), b"first").unwrap();
    let request = Request { op: Op::Write, flags: 0, offset: at, length: 5, over: 0 };
    request.write(&goes.requests, goes.seat, 0).unwrap();
    let slot = goes.slots.get_mut().unwrap().last_mut().unwrap();
    assert_eq!(slot.slot, 0);
    publish(&goes.requests, number_at(goes.seat, 0), next(slot.number)).unwrap();
    slow.await_one();
}

/// What one asks for who goes meanwhile is done before another one is let in, and not behind what that writes.
#[test]
fn no_write_comes_late() {
    const AT: u64 = 4711;
    let path = served("late", false);
    let other = open("late");
    let slow = Slow::at(AT);
    goes_while_it_writes("late", AT, &slow);
    let (done, is_done) = channel();
    std::thread::spawn(move || {
        let next = open("late");
        // (Beginning elsewhere, it passes.)
        next.write(AT - 1, b".second", Flags::default()).unwrap();
        done.send(()).unwrap();
    });
    // (Who is there already is served; nobody is let in. If somebody were, it would have written by then.)
    other.read(0, &mut [0; 7]).unwrap();
    let is_early = is_done.recv_timeout(Duration::from_secs(1)).is_ok();
    drop(slow);
    assert!(!is_early, "it was let in");
    is_done.recv_timeout(PATIENCE).unwrap();
    assert_eq!(std::fs::read(path).unwrap()[AT as usize - 1..][..7], *b".second");
}

/// Somebody asks to be let in and gives up, and the next one has his seat: that one is let in, once.
#[test]
fn who_gives_up_at_the_door_is_in_nobody_s_way() {
    const AT: u64 = 1147;
    served("door", false);
    let other = open("door");
    let slow = Slow::at(AT);
    goes_while_it_writes("door", AT, &slow);
    // (Between two of its reads the server has looked at each seat.)
    let all_are_seen = || (0..2).for_each(|_| other.read(0, &mut [0; 7]).unwrap());
    let (host, how) =
        (Host::find().unwrap(), Permission { coherent: false, ..Permission::default() });
    let locks = host.locks(Part::Announcement.key("door"), 1 + READERS, 0o600, false).unwrap();
    let seat = (0..READERS).find(|seat| locks.acquire(1 + seat, Wait::No).is_ok()).unwrap();
    let requests = host.allocate(Part::Requests.key("door"), Part::Requests.bytes(), &how).unwrap();
    let (says, sees) =
        (requests.transmit(Use::default()).unwrap(), requests.receive(Use::default()).unwrap());
    let number = random();
    Request::hello(&says, seat, &host.state().unwrap().host, number).unwrap();
    all_are_seen();
    drop(locks);
    let next = std::thread::spawn(|| open("door"));
    let began = std::time::Instant::now();
    while load(&sees, number_at(seat, 0)) == number {
        assert!(began.elapsed() < PATIENCE, "nobody asks");
        std::thread::yield_now();
    }
    all_are_seen();
    drop(slow);
    assert_eq!(read(&next.join().unwrap()).len(), BYTES);
}

/// A disk in memory, all of which one has made zeros, which takes its time: others are served meanwhile.
#[test]
fn who_makes_much_zeros_keeps_nobody_waiting() {
    const AT: u64 = 7;
    let path = Path::new("/dev/shm").join(format!("ringlet-disk-{}", std::process::id()));
    served_at("zeros", path.clone(), false);
    std::fs::remove_file(path).unwrap();
    let (one, other) = (open("zeros"), open("zeros"));
    let slow = Slow::at(AT);
    let zeros = std::thread::spawn(move || one.zero(AT, 2 * SLOT_BYTES as u64, Flags::default()));
    slow.await_one();
    let (done, is_done) = channel();
    let reads = std::thread::spawn(move || {
        other.read(0, &mut [0; 7]).unwrap();
        done.send(()).unwrap();
    });
    let is_served = is_done.recv_timeout(Duration::from_secs(5)).is_ok();
    drop(slow);
    assert!(is_served, "it waits");
    reads.join().unwrap();
    zeros.join().unwrap().unwrap();
}

/// Another session begins once the seat of the one before is free: until then what that asked for may be done.
#[test]
fn a_seat_is_given_back_before_the_next_is_taken() {
    served("seat", false);
    let reader = Arc::new(open("seat"));
    let host = Host::find().unwrap();
    let locks = host.locks(Part::Announcement.key("seat"), 1 + READERS, 0o600, false).unwrap();
    for _ in 0..20 {
        read(&reader);
        let session = locked(&reader.session).session.clone().unwrap();
        let (seat, member) = (session.seat, session.host.member());
        assert_eq!(locks.holder(1 + seat), Ok(Some(member)));
        reader.lose(&session);
        let last = std::thread::spawn(move || drop(session));
        while locked(&reader.session).before.strong_count() > 0 {}
        assert_ne!(locks.holder(1 + seat), Ok(Some(member)));
        last.join().unwrap();
    }
}

/// What could not be read, or answered, where the server's host is cut off is neither an error nor a wait for ever: the server begins anew, and is
/// asked again.
#[test]
fn what_could_not_be_answered_is_asked_again() {
    served("unsaid", false);
    // (Whose patience ends never, which no moment is.)
    let reader = Arc::new(Reader::open("unsaid", None, Duration::MAX).unwrap());
    let generation = || locked(&reader.session).session.as_ref().unwrap().generation;
    let acts: [fn(&Reader); 2] =
        [|reader| assert_eq!(read(reader), pattern()), |reader| reader.flush().unwrap()];
    for act in acts {
        let before = generation();
        *CUT_OFF.lock().unwrap() = Some("unsaid");
        let ((done, is_done), asks) = (channel(), reader.clone());
        std::thread::spawn(move || {
            act(&asks);
            done.send(()).unwrap();
        });
        is_done.recv_timeout(PATIENCE).expect("no answer");
        assert_ne!(generation(), before);
    }
}

/// Each operation, at the edges, by a stream.
#[test]
fn by_a_stream_it_is_the_same() {
    let path = served_by("stream", folder().join("stream"), false, Some(NEAR));
    let (one, other) = (open("stream"), open("stream"));
    let mut model = pattern();
    assert_eq!(read(&one), model);
    assert!(has_stream(&one));
    let bytes = vec![7; 2 * SLOT_BYTES + 3];
    one.write(500, &bytes, Flags { durable: true, ..Flags::default() }).unwrap();
    model[500..500 + bytes.len()].fill(7);
    other.zero(0, 300, Flags { may_trim: true, ..Flags::default() }).unwrap();
    model[..300].fill(0);
    other.flush().unwrap();
    other.trim(700, 0, Flags::default()).unwrap();
    assert_eq!((read(&one), read(&other)), (model.clone(), model.clone()));
    assert_eq!(std::fs::read(path).unwrap(), model);
    let extents = one.extents(0, BYTES as u64).unwrap();
    assert_eq!(extents.iter().map(|extent| extent.length).sum::<u64>(), BYTES as u64);
    let end = BYTES as u64;
    assert_eq!(one.read(end, &mut [0]), Err(libc::EINVAL));
    assert_eq!(one.write(end - 1, b"ab", Flags::default()), Err(libc::EINVAL));
    assert_eq!(one.extents(end, 1), Err(libc::EINVAL));
    assert!(has_stream(&one) && has_stream(&other));
}

/// Many threads by one stream, each of which finds what it wrote.
#[test]
fn many_ask_by_one_stream() {
    served_by("threads", folder().join("threads"), false, Some(NEAR));
    let reader = open("threads");
    std::thread::scope(|scope| {
        for thread in 0..2 * SLOTS as u64 {
            let reader = &reader;
            scope.spawn(move || {
                for round in 0..50_u8 {
                    let (bytes, mut found) = ([round ^ thread as u8; 9000], [0; 9000]);
                    let at = thread * 9000;
                    reader.write(at, &bytes, Flags::default()).unwrap();
                    reader.read(at, &mut found).unwrap();
                    assert_eq!(found, bytes);
                }
            });
        }
    });
    assert!(has_stream(&reader));
}
