//! A server, a keeper and readers in one process; and readers that mean no good.

use std::path::{Path, PathBuf};
use std::sync::Once;
use std::sync::mpsc::channel;
use std::time::Duration;

use ringlet_reflect::keeper::{self, keep};
use ringlet_reflect::{Host, VARIABLE};

use super::{Flags, Reader, Session};
use crate::file::tests::{GATE, MOVED};
use crate::layout::{
    Op, Request, SLOT_BYTES, SLOTS, answer_at, answered, load, next, number_at, publish, random,
    read_at, written_at,
};
use crate::{Options, Said, serve};

const PATIENCE: Duration = Duration::from_secs(30);
const BYTES: usize = 3 * SLOT_BYTES + 1000;

extern "C" fn clean_up() {
    let _ = std::fs::remove_dir_all(place());
}

fn place() -> PathBuf {
    std::env::temp_dir().join(format!("ringlet-disk-{}", std::process::id()))
}

/// This process's, with its keeper, until it ends.
fn folder() -> PathBuf {
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

fn pattern() -> Vec<u8> {
    (0..BYTES).map(|at| (at / 7 * 31) as u8).collect()
}

/// A disk of that name, which is served as long as the process is there.
fn served(name: &'static str, read_only: bool) -> PathBuf {
    let path = folder().join(name);
    std::fs::write(&path, pattern()).unwrap();
    let (ready, is_ready) = channel();
    let file = path.clone();
    std::thread::spawn(move || {
        let options = Options { name, path: &file, read_only, mode: 0o600 };
        let find = || Ok(Host::find()?);
        serve(&options, find, |said| {
            assert!(matches!(said, Said::Ready));
            ready.send(()).unwrap();
        })
        .unwrap();
    });
    is_ready.recv().unwrap();
    path
}

fn open(name: &str) -> Reader {
    Reader::open(name, None, PATIENCE).unwrap()
}

fn read(reader: &Reader) -> Vec<u8> {
    let mut all = vec![0; BYTES];
    reader.read(0, &mut all).unwrap();
    all
}

#[test]
fn what_is_written_is_read() {
    let path = served("written", false);
    let (one, other) = (open("written"), open("written"));
    assert_eq!((one.bytes(), one.is_read_only()), (BYTES as u64, false));
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
fn a_name_is_served_once_and_a_file_too() {
    let path = served("once", false);
    let again = |name, path: &Path, read_only| {
        let options = Options { name, path, read_only, mode: 0o600 };
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
    let no = |op, offset, length| (Request { op, flags: 0, offset, length }, libc::EINVAL);
    let writes = |op| (Request { op, flags: u32::MAX, offset: 0, length: 8 }, libc::EPERM);
    for (request, errno) in [
        no(Op::Read, bytes, 1),
        no(Op::Read, 0, SLOT_BYTES as u64 + 1),
        no(Op::Read, u64::MAX, u64::MAX),
        no(Op::Read, 1 << 63, 8),
        no(Op::Read, 0, u64::MAX),
        no(Op::Write, bytes - 1, 2),
        writes(Op::Write),
        writes(Op::Trim),
        writes(Op::Zero),
    ] {
        assert_eq!(liar.asks(1, &request), Err(errno), "{request:?}");
    }
    // The largest one stays in its slot.
    let before = load(&liar.session.read, read_at(2));
    let most = Request { op: Op::Read, flags: 0, offset: 1, length: SLOT_BYTES as u64 };
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
            0 => 1 + roll() % 5,
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
    let again = |boot| crate::layout::Facts { boot, ..reader.facts.clone() };
    let boot = reader.facts.boot;
    let write = |durable| reader.write(0, b"x", Flags { durable, ..Flags::default() }).unwrap();
    write(true);
    assert_eq!(reader.why_another(&again(boot + 1)), None);
    write(false);
    assert_eq!(reader.why_another(&again(boot)), None);
    assert!(reader.why_another(&again(boot + 1)).unwrap().contains("not flushed"));
    reader.flush().unwrap();
    assert_eq!(reader.why_another(&again(boot + 1)), None);
    let other = crate::layout::Facts { bytes: 1, ..reader.facts.clone() };
    assert!(reader.why_another(&other).unwrap().contains("another one"));
}

/// What one asks for who goes meanwhile is done before another one is let in, and not behind what that writes.
#[test]
fn no_write_comes_late() {
    const AT: u64 = 4711;
    let path = served("late", false);
    let other = open("late");
    let (mut slow, _) = Session::open("late", None).unwrap();
    *GATE.lock().unwrap() = (Some(AT), false);
    slow.written.put(written_at(0), b"first").unwrap();
    let request = Request { op: Op::Write, flags: 0, offset: AT, length: 5 };
    request.write(&slow.requests, slow.seat, 0).unwrap();
    let slot = slow.slots.get_mut().unwrap().last_mut().unwrap();
    assert_eq!(slot.slot, 0);
    publish(&slow.requests, number_at(slow.seat, 0), next(slot.number)).unwrap();
    drop(MOVED.wait_while(GATE.lock().unwrap(), |gate| !gate.1).unwrap());
    drop(slow);
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
    *GATE.lock().unwrap() = (None, false);
    MOVED.notify_all();
    assert!(!is_early, "it was let in");
    is_done.recv_timeout(PATIENCE).unwrap();
    assert_eq!(std::fs::read(path).unwrap()[AT as usize - 1..][..7], *b".second");
}
