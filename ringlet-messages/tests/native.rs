//! The native library, both ends in one process: what it carries, how it waits, what it says when an end goes. (Two processes, their
//! deaths and system calls: tests/native.)

use ringlet_core::record::RingMemory;
use ringlet_messages::native::*;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::Duration;

const SOON: Timeout = Some(Duration::from_secs(120));
const NOW: Timeout = Some(Duration::ZERO);

/// A name of its own for each test.
fn name() -> String {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    format!("test-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed))
}

fn options(kind: Kind) -> Options {
    Options { ring_bytes: 64 << 10, slot_count: 64, ..Options::new(kind) }
}

/// Both ends: the connecting one, and the service's.
fn ends(options: Options) -> (Connection, Connection) {
    let name = name();
    let listener = Listener::bind(&name, options).unwrap();
    thread::scope(|scope| {
        let connecting = scope.spawn(|| connect(&name, options, SOON).unwrap());
        let accepted = listener.accept(SOON).unwrap();
        (connecting.join().unwrap(), accepted)
    })
}

fn channels(options: Options) -> (Channel, Channel) {
    let (near, far) = ends(options);
    (near.channel().unwrap(), far.channel().unwrap())
}

/// Message `number` of `len` bytes.
fn content(number: usize, len: usize) -> Vec<u8> {
    (0..len).map(|at| (number * 7 + at) as u8).collect()
}

/// Without spinning every wait is a sleep and a wake.
fn with_and_without_spinning(kind: Kind, test: impl Fn(Options)) {
    for spin_us in [0, 50] {
        test(Options { spin_us, ..options(kind) });
    }
}

#[test]
fn messages_keep_their_boundaries() {
    with_and_without_spinning(Kind::Messages, |options| {
        let (mut near, mut far) = channels(options);
        let lens = [0, 1, 56, 57, 4000, 16 << 10, 3, 0];
        let sending = thread::spawn(move || {
            for number in 0..2000 {
                let data = content(number, lens[number % lens.len()]);
                assert_eq!(near.sender.send(&data, SOON), Ok(data.len()));
            }
            // The answer, so that this end stays until all is received.
            near.receiver.peek(SOON).unwrap().release();
            assert_eq!(near.sender.send(&vec![0; 100_000], SOON), Err(Error::TooLong));
        });
        let mut buffer = vec![0; 16 << 10];
        for number in 0..2000 {
            let n = far.receiver.receive(&mut buffer, SOON).unwrap();
            assert_eq!(buffer[..n], content(number, lens[number % lens.len()]));
        }
        far.sender.send(b"", SOON).unwrap();
        sending.join().unwrap();
        assert_eq!(far.receiver.receive(&mut buffer, SOON), Err(Error::Closed));
    });
}

#[test]
fn bytes_are_a_stream() {
    with_and_without_spinning(Kind::Bytes, |options| {
        let (mut near, mut far) = channels(options);
        let all = content(0, 3_000_000);
        let sent = all.clone();
        let sending = thread::spawn(move || {
            let (mut at, mut piece) = (0, 1);
            while at < sent.len() {
                let end = (at + piece).min(sent.len());
                at += near.sender.send(&sent[at..end], SOON).unwrap();
                piece = (piece * 3 + 1) % 100_000;
            }
        });
        let (mut got, mut room) = (Vec::new(), 1);
        loop {
            let mut buffer = vec![0; room];
            match far.receiver.receive(&mut buffer, SOON) {
                Ok(n) => got.extend_from_slice(&buffer[..n]),
                Err(error) => {
                    assert_eq!(error, Error::Closed);
                    break;
                }
            }
            room = (room * 5 + 1) % 70_000 + 1;
        }
        assert!(got == all);
        sending.join().unwrap();
    });
}

/// The peer changes a record of which a part was received: there is no rest of it, and not one of nearly 2^64 bytes.
#[test]
fn what_was_received_in_part_is_not_made_shorter() {
    for len in [0u64, 5, 30] {
        let (mut near, mut far) = channels(options(Kind::Bytes));
        assert_eq!(near.sender.send(&[1; 40], SOON), Ok(40));
        assert_eq!(far.receiver.receive(&mut [0; 30], SOON), Ok(30));
        near.sender.out().header(0).fetch_sub(40 - len, Ordering::SeqCst);
        assert_eq!(far.receiver.peek(NOW).map(|rest| rest.len()), Err(Error::PeerCorrupt));
        assert_eq!(far.receiver.receive(&mut [0; 100], NOW), Err(Error::PeerCorrupt));
    }
}

#[test]
fn in_place() {
    let (mut near, mut far) = channels(options(Kind::Messages));
    let mut slot = near.sender.reserve(5000, SOON).unwrap();
    assert!(slot.bytes().len() >= 5000);
    slot.write(0, b"in ");
    for (byte, value) in slot.bytes()[3..].iter().zip(b"place") {
        byte.store(*value, Ordering::Relaxed);
    }
    slot.commit(8).unwrap();
    // Reserved, and thought better of: nothing is sent.
    let _ = near.sender.reserve(100, SOON).unwrap();
    near.sender.send(b"next", SOON).unwrap();
    let message = far.receiver.peek(SOON).unwrap();
    let seen: Vec<u8> = message.bytes().iter().map(|byte| byte.load(Ordering::Relaxed)).collect();
    assert_eq!(seen, b"in place");
    let _ = message;
    // It was only looked at.
    assert_eq!(far.receiver.peek(SOON).unwrap().to_vec(), b"in place");
    assert!(!near.sender.is_drained());
    far.receiver.peek(SOON).unwrap().release();
    assert_eq!(far.receiver.receive(&mut [0; 3], SOON), Err(Error::BufferTooSmall));
    assert_eq!(far.receiver.receive(&mut [0; 4], SOON), Ok(4));
    assert!(near.sender.is_drained());
}

#[test]
fn a_call_waits_as_long_as_it_was_told() {
    for spin_us in [0, 50] {
        let (mut near, mut far) = channels(Options { spin_us, ..options(Kind::Messages) });
        assert_eq!(far.receiver.receive(&mut [], NOW), Err(Error::WouldBlock));
        let short = Some(Duration::from_millis(20));
        assert_eq!(far.receiver.receive(&mut [], short), Err(Error::TimedOut));
        let mut sent = 0;
        while near.sender.send(&[0; 8], NOW).is_ok() {
            sent += 1;
        }
        assert!((6..64).contains(&sent), "{sent}");
        assert_eq!(near.sender.send(&[0; 8], short), Err(Error::TimedOut));
        for _ in 0..sent {
            assert_eq!(far.receiver.receive(&mut [0; 8], NOW), Ok(8));
        }
        assert_eq!(near.sender.send(&[0; 8], NOW), Ok(8));
    }
}

fn is_readable(fd: i32, timeout_ms: i32) -> bool {
    let mut fds = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    // SAFETY: one descriptor.
    unsafe { libc::poll(&mut fds, 1, timeout_ms) == 1 }
}

/// Armed, a descriptor becomes readable when there is something; otherwise nothing is put on it.
#[test]
fn descriptors_are_rung_when_armed() {
    let (mut near, mut far) = channels(options(Kind::Messages));
    let bell = far.receiver.descriptor();
    near.sender.send(b"unasked", NOW).unwrap();
    assert!(!is_readable(bell, 0), "rung though nobody sleeps");
    assert!(!far.receiver.arm(), "there is something");
    far.receiver.receive(&mut [0; 7], NOW).unwrap();
    for _ in 0..100 {
        // What came while nothing was asked for, and the doorbell of the last round, are taken off by it.
        assert!(far.receiver.arm());
        assert!(!is_readable(bell, 0));
        near.sender.send(b"asked", NOW).unwrap();
        assert!(is_readable(bell, 20_000));
        near.sender.send(b"more", NOW).unwrap();
        assert_eq!(far.receiver.receive(&mut [0; 5], NOW), Ok(5));
        assert_eq!(far.receiver.receive(&mut [0; 5], NOW), Ok(4));
    }
    // Room, likewise.
    while near.sender.send(&[0; 8], NOW).is_ok() {}
    assert!(near.sender.arm());
    assert!(!is_readable(near.sender.descriptor(), 0));
    while far.receiver.receive(&mut [0; 8], NOW).is_ok() {}
    assert!(is_readable(near.sender.descriptor(), 20_000));
    assert!(near.sender.send(&[0; 8], NOW).is_ok());
}

#[test]
fn an_end_that_goes_is_told() {
    let (mut near, far) = channels(options(Kind::Messages));
    let Channel { mut sender, receiver } = far;
    sender.send(b"last words", NOW).unwrap();
    drop(sender);
    assert_eq!(near.receiver.receive(&mut [0; 10], NOW), Ok(10));
    assert_eq!(near.receiver.receive(&mut [0; 10], SOON), Err(Error::Closed));
    // The other way still works, until its reader goes too.
    near.sender.send(b"still there?", NOW).unwrap();
    assert!(!near.sender.is_drained());
    drop(receiver);
    assert_eq!(near.sender.send(b"hello?", SOON), Err(Error::Closed));

    // One that sleeps is woken by it.
    let (mut near, far) = channels(Options { spin_us: 0, ..options(Kind::Bytes) });
    let waiting = thread::spawn(move || near.receiver.receive(&mut [0; 1], SOON));
    thread::sleep(Duration::from_millis(20));
    drop(far);
    assert_eq!(waiting.join().unwrap(), Err(Error::Closed));
}

#[test]
fn locked_buffers() {
    for spin_us in [0, 50] {
        let (near, far) = ends(Options { spin_us, ..options(Kind::Locked) });
        let (mut client, mut server) = (near.locked().unwrap(), far.locked().unwrap());
        assert!(client.is_our_turn() && !server.is_our_turn());
        assert_eq!(server.send(b"unasked", NOW), Err(Error::NotOurTurn));
        assert_eq!(client.receive(&mut [], NOW), Err(Error::NotOurTurn));
        let serving = thread::spawn(move || {
            for _ in 0..500 {
                server
                    .serve(SOON, |question, answer| {
                        for (to, from) in answer.iter().zip(question) {
                            to.store(!from.load(Ordering::Relaxed), Ordering::Relaxed);
                        }
                        question.len()
                    })
                    .unwrap();
            }
            assert_eq!(server.peek(SOON).err(), Some(Error::Closed));
        });
        let mut answer = vec![0; 5000];
        for round in 0..500 {
            let question = content(round, round * 10);
            let n = client.call(&question, &mut answer, SOON).unwrap();
            assert!(answer[..n].iter().zip(&question).all(|(answer, asked)| *answer == !asked));
            assert_eq!(n, question.len());
        }
        drop(client);
        serving.join().unwrap();
    }
}

#[test]
fn regions() {
    with_and_without_spinning(Kind::Region, |options| {
        let (near, far) = ends(options);
        let (mut near, mut far) = (near.region().unwrap(), far.region().unwrap());
        let size = near.part_bytes();
        assert_eq!((size, far.part_bytes()), (options.ring_bytes, options.ring_bytes));
        assert_eq!((near.wait(NOW), near.check()), (Err(Error::WouldBlock), Ok(())));
        assert_eq!(near.wait(Some(Duration::from_millis(20))), Err(Error::TimedOut));
        // Each end has a part of its own, to its last byte and no further.
        assert_eq!(near.put(size - 3, b"abc"), Ok(()));
        assert_eq!(far.put(size - 3, b"xyz"), Ok(()));
        for at in [size - 2, size, size + 1, usize::MAX] {
            assert_eq!(near.put(at, b"abc"), Err(Error::TooLong));
            assert_eq!(near.get(at, &mut [0; 3]), Err(Error::TooLong));
        }
        let (mut here, mut there) = ([0; 3], [0; 3]);
        near.get(size - 3, &mut here).unwrap();
        far.get(size - 3, &mut there).unwrap();
        assert_eq!((&here, &there), (b"xyz", b"abc"));
        assert_eq!(far.local()[size / 8 - 1].load(Ordering::Relaxed).to_le_bytes()[5..], there);
        // Whoever hears a ring sees what was stored before.
        let serving = thread::spawn(move || {
            for number in 1..=3000 {
                far.wait(SOON).unwrap();
                let asked = far.local()[number as usize % 7].load(Ordering::Relaxed);
                assert_eq!(asked, number);
                far.remote()[0].store(!asked, Ordering::Relaxed);
                far.ring().unwrap();
            }
            assert_eq!(far.wait(SOON), Err(Error::Closed));
            assert_eq!((far.ring(), far.check()), (Err(Error::Closed), Err(Error::Closed)));
        });
        for number in 1..=3000 {
            near.remote()[number as usize % 7].store(number, Ordering::Relaxed);
            near.ring().unwrap();
            assert_eq!(near.wait(SOON), Ok(1));
            assert_eq!(near.local()[0].load(Ordering::Relaxed), !number);
        }
        drop(near);
        serving.join().unwrap();
    });
}

#[test]
fn a_region_driven_by_its_descriptor() {
    let (near, far) = ends(options(Kind::Region));
    let (mut near, mut far) = (near.region().unwrap(), far.region().unwrap());
    near.ring().unwrap();
    assert!(!is_readable(far.descriptor(), 0), "rung though nobody sleeps");
    assert!(!far.arm(), "it was rung");
    near.ring().unwrap();
    assert_eq!(far.wait(NOW), Ok(2));
    for _ in 0..100 {
        assert!(far.arm());
        assert!(!is_readable(far.descriptor(), 0));
        near.ring().unwrap();
        assert!(is_readable(far.descriptor(), 20_000));
        assert_eq!(far.wait(NOW), Ok(1));
    }
    assert!(far.arm());
    near.ring().unwrap();
    drop(near);
    assert!(is_readable(far.descriptor(), 20_000));
    // What was rung before the end is heard.
    assert_eq!(far.wait(NOW), Ok(1));
    assert_eq!(far.wait(NOW), Err(Error::Closed));
}

#[test]
fn a_mailbox_of_many_senders() {
    with_and_without_spinning(Kind::Mailbox, |options| {
        const SENDERS: usize = 20;
        const EACH: usize = 300;
        let name = name();
        let mut mailbox = Mailbox::bind(&name, options).unwrap();
        let threads: Vec<_> = (0..SENDERS)
            .map(|who| {
                let name = name.clone();
                thread::spawn(move || {
                    let mut sender = connect(&name, options, SOON).unwrap().sender().unwrap();
                    for number in 0..EACH {
                        let text = [who as u32, number as u32].map(u32::to_ne_bytes);
                        sender.send(text.as_flattened(), SOON).unwrap();
                    }
                })
            })
            .collect();
        let (mut next, mut ids) = ([0; SENDERS], [None; SENDERS]);
        for _ in 0..SENDERS * EACH {
            let message = mailbox.peek(SOON).unwrap();
            let data = message.to_vec();
            message.release();
            let sender = mailbox.last_sender();
            let word = |at| u32::from_ne_bytes(data[at..at + 4].try_into().unwrap()) as usize;
            let (who, number) = (word(0), word(4));
            assert_eq!(number, next[who], "in each sender's order");
            next[who] += 1;
            assert_eq!(*ids[who].get_or_insert(sender), sender);
        }
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(mailbox.peek(Some(Duration::from_millis(50))).err(), Some(Error::TimedOut));
        assert_eq!(mailbox.senders(), 0, "those who left are forgotten");
    });
}

#[test]
fn a_mailbox_driven_by_its_descriptor() {
    let (name, options) = (name(), options(Kind::Mailbox));
    let mut mailbox = Mailbox::bind(&name, options).unwrap();
    assert!(mailbox.arm());
    let theirs = name.clone();
    let sending = thread::spawn(move || {
        let mut sender = connect(&theirs, options, SOON).unwrap().sender().unwrap();
        for _ in 0..50 {
            sender.send(b"one by one", SOON).unwrap();
            thread::sleep(Duration::from_millis(1));
        }
        // Closed when the mailbox is dropped.
        while sender.send(b"more", SOON).is_ok() {
            thread::sleep(Duration::from_millis(1));
        }
    });
    let mut got = 0;
    while got < 50 {
        while mailbox.receive(&mut [0; 10], NOW).is_ok() {
            got += 1;
        }
        if mailbox.arm() {
            assert!(is_readable(mailbox.descriptor(), 20_000));
        }
    }
    drop(mailbox);
    sending.join().unwrap();
}

#[test]
fn names_kinds_and_users() {
    let name = name();
    let messages = options(Kind::Messages);
    assert_eq!(connect(&name, messages, NOW).err(), Some(Error::WouldBlock));
    let short = Some(Duration::from_millis(5));
    assert_eq!(connect(&name, messages, short).err(), Some(Error::TimedOut));
    let listener = Listener::bind(&name, messages).unwrap();
    let taken = Listener::bind(&name, messages).err();
    assert_eq!(taken.map(Error::errno), Some(libc::EADDRINUSE));
    assert_eq!(listener.accept(NOW).err(), Some(Error::WouldBlock));
    let theirs = name.clone();
    let wrong = thread::spawn(move || connect(&theirs, options(Kind::Bytes), SOON).err());
    drop(listener.accept(SOON).unwrap());
    assert_eq!(wrong.join().unwrap(), Some(Error::OtherKind));
    drop(listener);
    // Free again.
    drop(Listener::bind(&name, messages).unwrap());
    for bad in ["", &"x".repeat(200)] {
        assert_eq!(Listener::bind(bad, messages).err().map(Error::errno), Some(libc::EINVAL));
    }
    let odd = Options { slot_count: 65, ..messages };
    assert_eq!(Listener::bind(&name, odd).err().map(Error::errno), Some(libc::EINVAL));
}
