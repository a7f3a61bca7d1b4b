//! The rail in memory keeps what a rail promises, and with chaos not more.

use std::collections::HashSet;
use std::fs::File;
use std::os::unix::fs::FileExt;

use fastrand::Rng;
use ringlet_fabric::memory::{Chaos, MemoryRail};
use ringlet_fabric::rail::{Event, Grant, MESSAGE_BYTES, Peer, Rail, Refused, Region};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

const BYTES: usize = 1 << 18;

struct Pair {
    folder: tempfile::TempDir,
    from: MemoryRail,
    to: MemoryRail,
    peer: Peer,
    source: Vec<u8>,
    target: Vec<u8>,
    region: Region,
    granted: (Region, Grant),
}

fn pair(chaos: Option<Chaos>) -> Pair {
    let folder = tempfile::tempdir().unwrap();
    let mut to = MemoryRail::new(folder.path(), "to", chaos).unwrap();
    let mut from = MemoryRail::new(folder.path(), "from", chaos).unwrap();
    let peer = from.reach(to.name()).unwrap();
    let mut source: Vec<u8> = (0..BYTES).map(|nth| (nth % 251) as u8).collect();
    let mut target = vec![0u8; BYTES];
    // SAFETY: both live as long as the rails (`Pair`), and are changed by nothing else meanwhile.
    let (region, granted) = unsafe {
        (
            from.register_source(source.as_mut_ptr(), BYTES).unwrap(),
            to.register(target.as_mut_ptr(), BYTES).unwrap(),
        )
    };
    Pair { folder, from, to, peer, source, target, region, granted }
}

fn rounds(pair: &mut Pair, most: usize, mut tell: impl FnMut(usize, Event<'_>) -> bool) -> bool {
    (0..most).any(|_| {
        let mut ends = false;
        pair.from.poll(&mut |event| ends |= tell(0, event));
        pair.to.poll(&mut |event| ends |= tell(1, event));
        ends
    })
}

#[test]
fn each_message_and_write_is_done_once() {
    for seed in 0..20 {
        let chaos = (seed > 0).then_some(Chaos { seed, fails_one_in: 0 });
        let mut pair = pair(chaos);
        let (mut sent, mut got, mut noticed, mut done) = (0u32, HashSet::new(), 0, HashSet::new());
        for nth in 0..200u32 {
            let message = nth.to_le_bytes();
            match pair.from.send(pair.peer, &message, nth.into()) {
                Ok(()) => sent += 1,
                Err(Refused::Full) => panic!("full at {nth}"),
                Err(Refused::Failed(error)) => panic!("{error}"),
            }
        }
        // As many pieces of the source as there are: a part of each end is left out.
        let n = BYTES / 4;
        for nth in 0..4usize {
            let (at, token) = (nth * n, 1000 + nth as u64);
            let grant = pair.granted.1;
            let Pair { from, peer, region, .. } = &mut pair;
            from.write(*peer, *region, at, n - 7, grant, at as u64, nth as u32, token).unwrap();
        }
        let ends = rounds(&mut pair, 100_000, |_, event| {
            match event {
                Event::Message(bytes) => {
                    assert!(got.insert(u32::from_le_bytes(bytes.try_into().unwrap())), "twice");
                }
                Event::Noticed { .. } => noticed += 1,
                Event::Done { token } => assert!(done.insert(token), "done twice"),
                Event::Failed { error, .. } | Event::Broken(error) => panic!("{error}"),
            }
            got.len() as u32 == sent && noticed == 4 && done.len() == 204
        });
        assert!(ends, "seed {seed}: {} messages, {noticed} writes, {} done", got.len(), done.len());
        for (nth, byte) in pair.target.iter().enumerate() {
            let expected = if nth % n < n - 7 { pair.source[nth] } else { 0 };
            assert_eq!(*byte, expected, "at {nth}");
        }
        // It is quiet now: what is written anew stays.
        pair.target.fill(0xee);
        rounds(&mut pair, 1000, |_, _| false);
        assert!(pair.target.iter().all(|byte| *byte == 0xee));
    }
}

/// Of a source nothing is granted, and whoever guesses what its grant would be writes nowhere.
#[test]
fn nobody_writes_to_a_source() {
    for seed in 0..5 {
        let mut pair = pair((seed > 0).then_some(Chaos { seed, fails_one_in: 0 }));
        let at = pair.target.as_mut_ptr();
        // SAFETY: as in `pair`.
        let Region(key) = unsafe { pair.to.register_source(at, BYTES) }.unwrap();
        let guessed = Grant { key: key.into(), base: at as u64 };
        pair.from.write(pair.peer, pair.region, 0, BYTES / 2, guessed, 0, 7, 1).unwrap();
        let mut failed = false;
        rounds(&mut pair, 10_000, |_, event| {
            failed |= matches!(event, Event::Failed { .. } | Event::Broken(_));
            assert!(!matches!(event, Event::Noticed { .. }));
            failed
        });
        assert!(failed && pair.target.iter().all(|byte| *byte == 0));
    }
}

#[test]
fn who_has_sent_all_may_sleep_and_who_was_refused_tries_again() {
    let mut pair = pair(None);
    let send = |from: &mut MemoryRail| from.send(pair.peer, &[7; MESSAGE_BYTES], 0);
    // (Two thirds of what there is room for.)
    for _ in 0..80 {
        send(&mut pair.from).unwrap();
    }
    pair.from.poll(&mut |_| ());
    assert!(pair.from.may_sleep(), "all of it is on its way");
    let mut sent = 80;
    while send(&mut pair.from).is_ok() {
        sent += 1;
    }
    assert!(sent < 140);
    pair.from.poll(&mut |_| ());
    assert!(!pair.from.may_sleep(), "it would not hear of room");
    let mut came = 0;
    for _ in 0..10 {
        pair.to.poll(&mut |event| came += usize::from(matches!(event, Event::Message(_))));
    }
    assert_eq!(came, sent);
    assert!(!pair.from.may_sleep(), "there is room by now");
    send(&mut pair.from).unwrap();
    pair.from.poll(&mut |_| ());
    assert!(pair.from.may_sleep());
}

#[test]
fn what_is_withdrawn_is_not_written() {
    for seed in 0..20 {
        let mut pair = pair((seed > 0).then_some(Chaos { seed, fails_one_in: 0 }));
        let grant = pair.granted.1;
        pair.from.write(pair.peer, pair.region, 0, BYTES, grant, 0, 7, 1).unwrap();
        // (Without chaos it would be done by then.)
        rounds(&mut pair, (seed > 0) as usize, |_, _| false);
        pair.to.withdraw(pair.granted.0);
        pair.target.fill(0xee);
        let mut failed = false;
        rounds(&mut pair, 10_000, |_, event| {
            failed |= matches!(event, Event::Failed { .. } | Event::Broken(_));
            assert!(!matches!(event, Event::Noticed { .. }));
            false
        });
        assert!(failed, "seed {seed}");
        assert!(pair.target.iter().all(|byte| *byte == 0xee), "seed {seed}");
    }
}

/// The hazard that the transport must master: a write that failed lands when its memory is used again.
#[test]
fn a_write_that_failed_may_land_late() {
    let mut late = 0;
    for seed in 1..60 {
        let mut pair = pair(Some(Chaos { seed, fails_one_in: 0 }));
        let grant = pair.granted.1;
        pair.from.write(pair.peer, pair.region, 0, 4096, grant, 0, 7, 1).unwrap();
        pair.to.poll(&mut |_| {});
        pair.from.fail(10);
        let refused = pair.from.write(pair.peer, pair.region, 0, 1, grant, 0, 8, 2);
        assert!(matches!(refused, Err(Refused::Failed(_))));
        let failed =
            |end, event: Event<'_>| end == 0 && matches!(event, Event::Failed { token: 1, .. });
        assert!(rounds(&mut pair, 20, failed), "nobody says so");
        pair.target.fill(0xee);
        rounds(&mut pair, 3000, |_, _| false);
        late += pair.target.iter().any(|byte| *byte != 0xee) as u32;
        assert!(pair.from.send(pair.peer, b"again", 3).is_ok(), "it did not come back");
    }
    assert!(late > 5, "{late} late writes");
}

#[test]
fn names_of_strangers_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let mut rail = MemoryRail::new(folder.path(), "one", None).unwrap();
    for name in [&b""[..], b"../one", b"a/b", b"\0", &[b'a'; 65], &[0xff; 3]] {
        assert!(rail.reach(name).is_err());
    }
    let nobody = rail.reach(b"nobody").unwrap();
    assert!(matches!(rail.send(nobody, b"", 0), Err(Refused::Failed(_))));
    std::fs::write(folder.path().join("short"), "no endpoint").unwrap();
    let short = rail.reach(b"short").unwrap();
    assert!(matches!(rail.send(short, b"", 0), Err(Refused::Failed(_))));
}

#[test]
fn who_sleeps_is_woken() {
    let mut pair = pair(None);
    for round in 0..100u64 {
        assert!(pair.to.may_sleep(), "round {round}");
        pair.from.send(pair.peer, b"wake", round).unwrap();
        let limit = Timespec { tv_sec: 20, tv_nsec: 0 };
        let mut fds = [PollFd::from_borrowed_fd(pair.to.fd(), PollFlags::IN)];
        assert_eq!(poll(&mut fds, Some(&limit)).unwrap(), 1, "round {round}: nobody rang");
        let mut got = 0;
        pair.to.poll(&mut |event| got += matches!(event, Event::Message(b"wake")) as u32);
        assert_eq!(got, 1);
        pair.from.poll(&mut |_| {});
        let mut fds = [PollFd::from_borrowed_fd(pair.to.fd(), PollFlags::IN)];
        let none = Timespec { tv_sec: 0, tv_nsec: 0 };
        assert_eq!(poll(&mut fds, Some(&none)).unwrap(), 0, "round {round}: it rings on");
    }
}

/// Whoever may write to the folder may write anything into an endpoint: it is garbage, no more.
#[test]
fn an_endpoint_is_scribbled_at() {
    for seed in 0..40 {
        let mut random = Rng::with_seed(seed);
        let mut pair = pair((seed % 2 == 1).then_some(Chaos { seed, fails_one_in: 50 }));
        let path = pair.folder.path();
        let files =
            ["from", "to"].map(|name| File::options().write(true).open(path.join(name)).unwrap());
        for _ in 0..2000 {
            // The head, or what lies at the beginning of the first lane.
            let most = if random.bool() { 512 } else { 80 << 10 };
            let bytes: Vec<_> = (0..random.usize(..16)).map(|_| random.u8(..)).collect();
            random.choice(&files).unwrap().write_at(&bytes, random.u64(..most)).unwrap();
            let _ = pair.from.send(pair.peer, &bytes, 1);
            let grant = Grant { base: random.u64(..), ..pair.granted.1 };
            let grant = if random.bool() { grant } else { pair.granted.1 };
            let _ = pair.from.write(pair.peer, pair.region, 0, 4000, grant, 5, 7, 1);
            pair.from.may_sleep();
            pair.to.may_sleep();
            rounds(&mut pair, 1, |_, _| false);
        }
    }
}

/// Who rings has said so before, and rings later: another one's ring was read for his. What nobody waits for any more ends no sleep for long.
#[test]
fn a_ring_that_comes_late_is_not_heard_for_ever() {
    let pair = pair(None);
    let Pair { folder, mut to, .. } = pair;
    let bell = File::options().write(true).open(folder.path().join("to.bell")).unwrap();
    let ring = || rustix::io::write(&bell, &[1]).unwrap();
    let rings = |rail: &MemoryRail| {
        let fd = rail.fd();
        let mut fds = [PollFd::new(&fd, PollFlags::IN)];
        poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap() > 0
    };
    ring();
    let mut sleeps = 0;
    while rings(&to) {
        assert!(sleeps < 1000, "it never sleeps");
        assert!(to.may_sleep());
        to.poll(&mut |_| {});
        sleeps += 1;
    }
}
