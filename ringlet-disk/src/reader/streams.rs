//! Tests of streams (`direct`): the reader and the server as they are, and between them whoever breaks, holds up, and lies.

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use super::tests::{BYTES, NEAR, PATIENCE, Slow, WAYS, folder, open, pattern, read, served_by};
use super::{Flags, Reader, SLOT_BYTES, SLOTS, Session, Turn, locked};
use crate::direct::{Asked, HELLO_BYTES, Head, Hello, WELCOME_BYTES, welcome};
use crate::file::tests::writes;
use crate::layout::{Offer, Op, READERS, Request, answer, answer_of_zeros, next};

fn session(reader: &Reader) -> Arc<Session> {
    locked(&reader.session).session.clone().unwrap()
}

pub fn has_stream(reader: &Reader) -> bool {
    session(reader).asks.has_stream()
}

fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < PATIENCE, "it is not so that {what}");
        thread::sleep(Duration::from_millis(1));
    }
}

/// Where a stream breaks: behind so many bytes one way, or the other.
#[derive(Clone, Copy, Debug)]
struct Cut {
    up: usize,
    down: usize,
}

const WHOLE: Cut = Cut { up: usize::MAX, down: usize::MAX };

/// What went through one stream.
#[derive(Default)]
struct Went {
    up: Vec<u8>,
    down: Vec<u8>,
}

/// Between a disk's readers and its server.
struct Relay {
    /// Of the streams to come; behind them all are whole.
    cuts: Mutex<VecDeque<Cut>>,
    went: Mutex<Vec<Arc<Mutex<Went>>>>,
}

impl Relay {
    /// For readers that are opened from now on.
    fn of(name: &'static str) -> Arc<Relay> {
        let (way, there) = (TcpListener::bind(NEAR).unwrap(), offered(name));
        locked(&WAYS).push((name, way.local_addr().unwrap()));
        let relay = Arc::new(Relay { cuts: Mutex::default(), went: Mutex::default() });
        let relays = relay.clone();
        thread::spawn(move || {
            for stream in way.incoming() {
                let (reader, server) = (stream.unwrap(), TcpStream::connect(there).unwrap());
                let cut = locked(&relays.cuts).pop_front().unwrap_or(WHOLE);
                let went = Arc::<Mutex<Went>>::default();
                locked(&relays.went).push(went.clone());
                let (from, to) = (reader.try_clone().unwrap(), server.try_clone().unwrap());
                let noted = went.clone();
                thread::spawn(move || {
                    carry(&from, &to, cut.up, |bytes| locked(&noted).up.extend(bytes));
                });
                thread::spawn(move || {
                    carry(&server, &reader, cut.down, |bytes| locked(&went).down.extend(bytes));
                });
            }
        });
        relay
    }
}

fn offer_of(name: &str) -> Offer {
    session(&open(name)).asks.offer().unwrap()
}

fn offered(name: &str) -> SocketAddr {
    offer_of(name).address
}

fn carry(mut from: &TcpStream, mut to: &TcpStream, mut most: usize, note: impl Fn(&[u8])) {
    let mut bytes = [0; 4096];
    while most > 0 {
        let room = bytes.len().min(most);
        let Ok(got @ 1..) = from.read(&mut bytes[..room]) else { break };
        note(&bytes[..got]);
        if to.write_all(&bytes[..got]).is_err() {
            break;
        }
        most -= got;
    }
    let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
}

/// Each kind of request, some at a time; what is read is as the model has it.
fn script(reader: &Reader, model: &mut [u8], round: u8) {
    let mut write = |at: usize, length: usize, durable| {
        let bytes: Vec<u8> = (0..length).map(|byte| (byte as u8) ^ round).collect();
        reader.write(at as u64, &bytes, Flags { durable, ..Flags::default() }).unwrap();
        model[at..at + length].copy_from_slice(&bytes);
    };
    write(100, 300, false);
    write(1000, 20_000, true);
    reader.flush().unwrap();
    reader.zero(50_000, 700, Flags::default()).unwrap();
    model[50_000..50_700].fill(0);
    let mut found = vec![0; 30_000];
    reader.read(90, &mut found).unwrap();
    assert!(found == model[90..][..found.len()], "other bytes");
    let extents = reader.extents(0, 60_000).unwrap();
    assert!((1..=60_000).contains(&extents.iter().map(|extent| extent.length).sum::<u64>()));
    // Several at a time.
    let mut turns = VecDeque::new();
    for at in 0..6 {
        let mut turn = loop {
            match reader.turn(&mut None).unwrap() {
                Some(turn) => break turn,
                // (A stream is ready, and waits for what was asked before.)
                None => finish(turns.drain(..), model),
            }
        };
        let offset = 200_000 + at * 5000;
        let (op, length) = if at % 2 == 0 { (Op::Write, 4000) } else { (Op::Read, 4500) };
        turn.prepare(op, Flags::default(), offset as u64, length as u64);
        if op == Op::Write {
            turn.fill_from(&vec![round ^ at as u8; length]);
            model[offset..offset + length].fill(round ^ at as u8);
        }
        turn.ask();
        turns.push_back((turn, op, offset, length));
    }
    finish(turns.drain(..), model);
}

fn finish(turns: impl Iterator<Item = (Turn, Op, usize, usize)>, model: &[u8]) {
    let mut is_told = false;
    for (mut turn, op, offset, length) in turns {
        if !std::mem::replace(&mut is_told, true) {
            turn.tell();
        }
        assert_eq!(turn.wait().unwrap(), Ok(()));
        if op == Op::Read {
            // SAFETY: a slot has so many bytes; nobody writes there any more.
            #[allow(unsafe_code)]
            let found = unsafe { std::slice::from_raw_parts(turn.bytes(), length) };
            assert!(found == &model[offset..offset + length], "other bytes");
        }
        turn.finish();
    }
}

const WRITTEN: [u64; 5] = [100, 1000, 200_000, 210_000, 220_000];

/// Before, in, and behind each message.
fn cuts(went: &Went) -> Vec<Cut> {
    let (mut up, mut down) = (vec![0, 20, HELLO_BYTES], vec![0, 5, WELCOME_BYTES]);
    let add = |all: &mut Vec<usize>, head: usize, rest: usize| {
        let at = *all.last().unwrap();
        all.extend([at + head / 2, at + head]);
        if rest > 0 {
            all.extend([at + head + rest / 2, at + head + rest]);
        }
    };
    while *up.last().unwrap() < went.up.len() {
        let asked = Asked::read(&went.up[*up.last().unwrap()..]).unwrap();
        add(&mut up, asked.bytes().len(), asked.payload() as usize);
    }
    while *down.last().unwrap() < went.down.len() {
        let head = Head::read(&went.down[*down.last().unwrap()..]).unwrap();
        add(&mut down, head.bytes().len(), head.length);
    }
    let up = up.into_iter().map(|up| Cut { up, ..WHOLE });
    up.chain(down.into_iter().map(|down| Cut { down, ..WHOLE })).collect()
}

/// Wherever a stream breaks, and the next one again, each write is done once, and what is read is right.
#[test]
fn whatever_breaks_each_write_is_done_once() {
    let path = served_by("broken", folder().join("broken"), false, Some(NEAR));
    let relay = Relay::of("broken");
    let mut model = pattern();
    let all = {
        let reader = open("broken");
        script(&reader, &mut model, 1);
        assert!(has_stream(&reader));
        cuts(&locked(&locked(&relay.went)[0]))
    };
    assert!(all.len() > 60, "{} places to break", all.len());
    let mut count = 1;
    for (number, cut) in all.iter().enumerate() {
        // (The next one as soon as it is there, in the middle, or not.)
        let again = all[(number * 7 + 3) % all.len()];
        let again = [again, Cut { up: 0, down: 0 }, Cut { up: HELLO_BYTES + 9, ..WHOLE }, WHOLE];
        *locked(&relay.cuts) = [*cut, again[number % 4], again[number / 4 % 4]].into();
        let reader = open("broken");
        for round in 0..2_u8 {
            script(&reader, &mut model, round.wrapping_add(2 * number as u8));
            count += 1;
        }
        assert!(std::fs::read(&path).unwrap() == model, "{cut:?}: other bytes in the file");
        for at in WRITTEN {
            let done = writes(reader.known.facts.file, at);
            assert_eq!(done, count, "{cut:?}, {again:?}: at {at} other writes than were asked for");
        }
        // In the end there is a whole one again.
        until("there is a stream", || {
            assert!(read(&reader) == model, "{cut:?}: other bytes");
            has_stream(&reader)
        });
    }
}

/// A way that holds what is sent, until its sender has gone and somebody says so.
fn held(name: &'static str, most: usize) -> (Sender<()>, Receiver<()>) {
    let (way, there) = (TcpListener::bind(NEAR).unwrap(), offered(name));
    locked(&WAYS).push((name, way.local_addr().unwrap()));
    let (go, goes) = channel();
    let (ended, has_ended) = channel();
    thread::spawn(move || {
        let (mut reader, _) = way.accept().unwrap();
        // (There is no other one.)
        drop(way);
        let mut server = TcpStream::connect(there).unwrap();
        let (mut hello, mut bytes) = ([0; HELLO_BYTES], vec![0; most]);
        reader.read_exact(&mut hello).unwrap();
        server.write_all(&hello).unwrap();
        let mut said = [0; WELCOME_BYTES];
        server.read_exact(&mut said).unwrap();
        reader.write_all(&said).unwrap();
        reader.read_exact(&mut bytes).unwrap();
        drop(reader);
        goes.recv().unwrap();
        let _ = server.write_all(&bytes);
        // (Until it has ended it, or has answered.)
        server.set_read_timeout(Some(PATIENCE)).unwrap();
        let _ = server.read(&mut bytes);
        ended.send(()).unwrap();
    });
    (go, has_ended)
}

/// What was on its way by a stream that its reader has left is not done when it comes.
#[test]
fn what_comes_late_by_a_stream_is_not_done() {
    const AT: u64 = 777;
    let path = served_by("later", folder().join("later"), false, Some(NEAR));
    let other = open("later");
    let (go, has_ended) = held("later", 32 + 5);
    let reader = open("later");
    reader.write(AT, b"first", Flags::default()).unwrap();
    other.write(AT, b"other", Flags::default()).unwrap();
    go.send(()).unwrap();
    has_ended.recv_timeout(PATIENCE).unwrap();
    assert_eq!(std::fs::read(path).unwrap()[AT as usize..][..5], *b"other");
    assert_eq!(writes(reader.known.facts.file, AT), 2);
    let mut found = [0; 5];
    reader.read(AT, &mut found).unwrap();
    assert_eq!(found, *b"other");
}

/// A server that lies: what is read is right all the same, by the regions.
#[test]
fn a_stream_that_lies_is_left() {
    served_by("lying", folder().join("lying"), false, Some(NEAR));
    let way = TcpListener::bind(NEAR).unwrap();
    let offer = offer_of("lying");
    locked(&WAYS).push(("lying", way.local_addr().unwrap()));
    type Lie = fn(&Asked) -> Vec<u8>;
    let lies: [Lie; 9] = [
        |_| vec![0xff; 64],
        |asked| {
            Head { slot: SLOTS, word: answer(asked.number, Ok(())), length: 8 }.bytes().to_vec()
        },
        |asked| {
            let slot = (asked.slot + 1) % SLOTS;
            Head { slot, word: answer(asked.number, Ok(())), length: 0 }.bytes().to_vec()
        },
        |asked| {
            let word = answer(next(asked.number), Ok(()));
            Head { slot: asked.slot, word, length: 0 }.bytes().to_vec()
        },
        |asked| {
            let (slot, word) = (asked.slot, answer(asked.number, Ok(())));
            let length = asked.request.length as usize - 1;
            [&Head { slot, word, length }.bytes()[..], &vec![7; length]].concat()
        },
        |asked| {
            let (slot, word) = (asked.slot, answer(asked.number, Ok(())));
            Head { slot, word, length: usize::MAX >> 8 }.bytes().to_vec()
        },
        |asked| {
            let (slot, word) = (asked.slot, answer_of_zeros(asked.number));
            Head { slot, word, length: 9 }.bytes().to_vec()
        },
        |asked| {
            let (slot, word) = (asked.slot, answer(asked.number, Err(libc::EIO)));
            Head { slot, word, length: SLOT_BYTES + 1 }.bytes().to_vec()
        },
        // Half of it, and no more.
        |asked| {
            let (slot, word) = (asked.slot, answer(asked.number, Ok(())));
            let length = asked.request.length as usize;
            [&Head { slot, word, length }.bytes()[..], &vec![7; length / 2]].concat()
        },
    ];
    thread::spawn(move || {
        for lie in lies.iter().cycle() {
            let (mut stream, _) = way.accept().unwrap();
            let (mut hello, mut asked) = ([0; HELLO_BYTES], [0; 32]);
            let said = stream
                .read_exact(&mut hello)
                .and_then(|()| stream.write_all(&welcome(offer.welcome)))
                .and_then(|()| stream.read_exact(&mut asked));
            if said.is_ok() {
                let _ = stream.write_all(&lie(&Asked::read(&asked).unwrap()));
                let _ = stream.shutdown(Shutdown::Write);
                let _ = stream.read(&mut hello);
            }
        }
    });
    let mut had = 0;
    for _ in 0..9 {
        let reader = open("lying");
        had += usize::from(session(&reader).asks.is_ready());
        let mut found = vec![0; 5000];
        reader.read(3000, &mut found).unwrap();
        assert_eq!(found, pattern()[3000..8000]);
    }
    assert_eq!(had, 9, "there was no stream");
}

/// Who has the port of a server that has gone, and knows nothing of it, is no server.
#[test]
fn who_does_not_know_the_welcome_is_not_asked() {
    served_by("posing", folder().join("posing"), false, Some(NEAR));
    let way = TcpListener::bind(NEAR).unwrap();
    let offer = offer_of("posing");
    locked(&WAYS).push(("posing", way.local_addr().unwrap()));
    let (heard, hears) = channel();
    thread::spawn(move || {
        for bit in 0.. {
            let (mut stream, _) = way.accept().unwrap();
            let mut said = welcome(offer.welcome);
            said[bit / 8 % WELCOME_BYTES] ^= 1 << (bit % 8);
            let _ = stream.read_exact(&mut [0; HELLO_BYTES]);
            let _ = stream.write_all(&said);
            let mut more = Vec::new();
            let _ = stream.read_to_end(&mut more);
            heard.send(more.len()).unwrap();
        }
    });
    for _ in 0..16 {
        let reader = open("posing");
        assert!(!session(&reader).asks.is_ready());
        let mut found = vec![0; 100];
        reader.read(0, &mut found).unwrap();
        assert_eq!(found, pattern()[..100]);
        drop(reader);
        assert_eq!(hears.recv_timeout(PATIENCE), Ok(0));
    }
}

/// Who connects and is no reader gets nothing, and a reader that says what it likes harms nobody else.
#[test]
fn who_lies_by_a_stream_harms_nobody() {
    let path = served_by("preyed", folder().join("preyed"), true, Some(NEAR));
    let honest = open("preyed");
    read(&honest);
    let liar = open("preyed");
    read(&liar);
    let (own, offer) = (session(&liar), session(&honest).asks.offer().unwrap());
    let hello = |seat, admitted, stream| Hello { token: offer.token, seat, admitted, stream };
    let right = hello(own.seat, own.asks.admitted(), 1000);
    // What comes back: so many bytes, or all, to who says no more.
    let hears = |bytes: &[u8], most: Option<u64>| {
        let mut stream = TcpStream::connect(offer.address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let _ = stream.write_all(bytes);
        if most.is_none() {
            let _ = stream.shutdown(Shutdown::Write);
        }
        let mut got = Vec::new();
        let _ = stream.take(most.unwrap_or(u64::MAX)).read_to_end(&mut got);
        got
    };
    let says = |bytes: &[u8]| hears(bytes, None);
    // Those that are not let in.
    let mut wrong = right.bytes();
    wrong[8 + 15] ^= 0x80;
    let is_there = session(&honest);
    for bytes in [
        wrong.to_vec(),
        vec![0; HELLO_BYTES],
        right.bytes()[..HELLO_BYTES - 1].to_vec(),
        b"GET / HTTP/1.1\r\nHost: somebody\r\n\r\n                ".to_vec(),
        hello(READERS - 1, own.asks.admitted(), 1000).bytes().to_vec(),
        hello(READERS, own.asks.admitted(), 1000).bytes().to_vec(),
        hello(own.seat, own.asks.admitted() + 1, 1000).bytes().to_vec(),
        hello(is_there.seat, own.asks.admitted(), 1000).bytes().to_vec(),
        hello(own.seat, own.asks.admitted(), 0).bytes().to_vec(),
    ] {
        assert_eq!(says(&bytes), b"", "{bytes:?} is let in");
    }
    assert!(has_stream(&honest));
    // One that is let in, and asks for what it may not.
    let request = |op, offset, length| Request { op, flags: u32::MAX, offset, length, over: 0 };
    let asked = |slot, request| Asked { slot, number: 5, request }.bytes().to_vec();
    let bytes = BYTES as u64;
    let mut stream = 1000;
    let mut talks = |words: &[u8], most| {
        stream += 1;
        let hello = hello(own.seat, own.asks.admitted(), stream).bytes();
        let got = hears(&[&hello[..], words].concat(), most);
        assert_eq!(got[..WELCOME_BYTES], welcome(offer.welcome));
        got[WELCOME_BYTES..].to_vec()
    };
    for (request, payload, errno) in [
        (request(Op::Read, bytes, 1), 0, libc::EINVAL),
        (request(Op::Read, u64::MAX, u64::MAX), 0, libc::EINVAL),
        (request(Op::Read, 0, SLOT_BYTES as u64 + 1), 0, libc::EINVAL),
        (request(Op::Extents, 1, u64::MAX), 0, libc::EINVAL),
        (request(Op::Hello, 0, 0), 0, libc::EINVAL),
        (request(Op::Write, 0, 9), 9, libc::EPERM),
        (request(Op::Zero, 0, 9), 0, libc::EPERM),
    ] {
        let got =
            talks(&[asked(3, request), vec![1; payload]].concat(), Some(WELCOME_BYTES as u64 + 16));
        let head = Head { slot: 3, word: answer(5, Err(errno)), length: 0 };
        assert_eq!(Head::read(&got), Some(head), "{request:?}");
    }
    // What can't be understood ends it.
    for words in [
        asked(SLOTS, request(Op::Read, 0, 1)),
        asked(0, request(Op::Write, 0, SLOT_BYTES as u64 + 1)),
        asked(0, request(Op::Write, 0, u64::MAX)),
        vec![7; 32],
        asked(0, request(Op::Read, 0, 1))[..31].to_vec(),
        [asked(0, request(Op::Write, 0, 100)), vec![0; 99]].concat(),
    ] {
        assert_eq!(talks(&words, None), b"", "{words:?}");
    }
    // An older one does not come back.
    assert_eq!(says(&hello(own.seat, own.asks.admitted(), 999).bytes()), b"");
    // Many that say nothing, and one that takes nothing of what it asks for, are in nobody's way.
    let silent: Vec<_> = (0..3 * READERS)
        .map(|at| {
            let mut stream = TcpStream::connect(offer.address).unwrap();
            stream.write_all(&right.bytes()[..at % HELLO_BYTES]).unwrap();
            stream
        })
        .collect();
    let mut deaf = TcpStream::connect(offer.address).unwrap();
    deaf.write_all(&hello(own.seat, own.asks.admitted(), 5000).bytes()).unwrap();
    deaf.set_nonblocking(true).unwrap();
    for _ in 0..2000 {
        let whole = asked(1, request(Op::Read, 0, SLOT_BYTES as u64));
        if deaf.write(&whole).is_err() {
            break;
        }
    }
    assert_eq!(read(&honest), pattern());
    let late = open("preyed");
    assert_eq!(read(&late), pattern());
    assert!(has_stream(&honest) && has_stream(&late));
    drop((silent, deaf));
    assert_eq!(std::fs::read(path).unwrap(), pattern());
}

/// A way from readers to the server of that disk that can be cut once. (Those that come behind that pass.)
fn way(name: &'static str) -> Sender<()> {
    let (way, there) = (TcpListener::bind(NEAR).unwrap(), offered(name));
    locked(&WAYS).push((name, way.local_addr().unwrap()));
    let (cut, cuts) = channel::<()>();
    let all = Arc::new(Mutex::new(Vec::<TcpStream>::new()));
    let known = all.clone();
    thread::spawn(move || {
        if cuts.recv().is_ok() {
            locked(&known).iter().for_each(|stream| _ = stream.shutdown(Shutdown::Both));
        }
    });
    thread::spawn(move || {
        for reader in way.incoming().flatten() {
            let Ok(server) = TcpStream::connect(there) else { continue };
            let copies = [&reader, &server].map(|stream| stream.try_clone().unwrap());
            locked(&all).extend([&reader, &server].map(|stream| stream.try_clone().unwrap()));
            let [from, to] = copies;
            thread::spawn(move || carry(&from, &to, usize::MAX, |_| ()));
            thread::spawn(move || carry(&server, &reader, usize::MAX, |_| ()));
        }
    });
    cut
}

/// A write that still is in the device when its stream breaks is done once, and told when it is done: also where the next stream comes meanwhile.
#[test]
fn what_is_in_the_device_is_waited_for_behind_the_next_stream() {
    const AT: u64 = 333;
    for (name, reconnects) in [("stays", false), ("reconnects", true)] {
        let path = served_by(name, folder().join(name), false, Some(NEAR));
        let other = open(name);
        let cut = way(name);
        let reader = Arc::new(open(name));
        reader.read(0, &mut [0; 1]).unwrap();
        assert!(has_stream(&reader));
        let slow = Slow::first_at(AT, 1);
        let (done, is_done) = channel();
        let writes_it = reader.clone();
        let writer = thread::spawn(move || {
            writes_it.write(AT, b"first", Flags::default()).unwrap();
            done.send(()).unwrap();
        });
        slow.await_one();
        cut.send(()).unwrap();
        for _ in 0..if reconnects { 3 } else { 0 } {
            let asks = reader.clone();
            thread::sleep(Duration::from_millis(100));
            thread::spawn(move || asks.read(0, &mut [0; 1]));
        }
        let told = is_done.recv_timeout(Duration::from_millis(500));
        assert!(told.is_err(), "{name}: told while it is in the device");
        drop(slow);
        writer.join().unwrap();
        other.write(AT, b"other", Flags::default()).unwrap();
        assert_eq!(&std::fs::read(&path).unwrap()[AT as usize..][..5], b"other", "{name}");
        assert_eq!(writes(reader.known.facts.file, AT), 2, "{name}: each is done once");
    }
}

/// Streams of two break while the device takes its time with what they have written: their reads, and other readers, don't wait for that.
#[test]
fn a_slow_write_of_a_stream_that_breaks_holds_up_no_reads() {
    const AT: u64 = 555;
    served_by("blip", folder().join("blip"), false, Some(NEAR));
    let cut = way("blip");
    let two = [0; 2].map(|_| Arc::new(open("blip")));
    for each in &two {
        each.read(0, &mut [0; 1]).unwrap();
        assert!(has_stream(each));
    }
    locked(&WAYS).retain(|way| way.0 != "blip");
    locked(&WAYS).push(("blip", "127.0.0.1:1".parse().unwrap()));
    let third = Arc::new(open("blip"));
    assert!(!has_stream(&third));
    let slow = Slow::at(AT);
    let writers = two
        .clone()
        .map(|each| thread::spawn(move || each.write(AT, b"first", Flags::default()).unwrap()));
    until("both write", || writes(third.known.facts.file, AT) == 2);
    cut.send(()).unwrap();
    let (done, is_done) = channel();
    let readers = two.iter().cycle().take(30).chain([&third]);
    for each in readers {
        let (each, done) = (each.clone(), done.clone());
        thread::spawn(move || {
            each.read(0, &mut [0; 100]).unwrap();
            let _ = done.send(());
        });
    }
    for answered in 0..31 {
        let read = is_done.recv_timeout(Duration::from_secs(20));
        assert!(read.is_ok(), "{answered} of 31 reads are answered beside the writes");
    }
    drop(slow);
    writers.into_iter().for_each(|writer| writer.join().unwrap());
}

/// A stream that stands ready waits for what is asked by the regions, and holds nothing else up for that.
#[test]
fn a_ready_stream_holds_up_no_reads() {
    const AT: u64 = 444;
    served_by("ready", folder().join("ready"), false, Some(NEAR));
    let relay = Relay::of("ready");
    *locked(&relay.cuts) = [Cut { up: 0, down: 0 }, Cut { up: 0, down: 0 }].into();
    let reader = Arc::new(open("ready"));
    assert!(!has_stream(&reader));
    let slow = Slow::at(AT);
    let writes_it = reader.clone();
    let writer = thread::spawn(move || writes_it.write(AT, b"first", Flags::default()).unwrap());
    slow.await_one();
    let (done, is_done) = channel();
    let asks = reader.clone();
    thread::spawn(move || {
        for _ in 0..100 {
            asks.read(0, &mut [0; 1]).unwrap();
            let _ = done.send(());
            thread::sleep(Duration::from_millis(1));
        }
    });
    for answered in 0..100 {
        let read = is_done.recv_timeout(Duration::from_secs(20));
        assert!(read.is_ok(), "{answered} of 100 reads are answered beside the write");
    }
    drop(slow);
    writer.join().unwrap();
}

/// A reader's seat is given back, and its connection stays, as of a host that is frozen: the server ends it.
#[test]
fn a_connection_ends_with_its_seat() {
    served_by("frozen", folder().join("frozen"), false, Some(NEAR));
    let frozen = open("frozen");
    let (address, hello) = frozen.stream_hello().unwrap();
    let mut stream = TcpStream::connect(address).unwrap();
    stream.write_all(&hello).unwrap();
    stream.read_exact(&mut [0; WELCOME_BYTES]).unwrap();
    drop(frozen);
    let next = open("frozen");
    next.read(0, &mut [0; 9]).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    assert!(matches!(stream.read(&mut [0; 9]), Ok(0)), "it stays");
}
