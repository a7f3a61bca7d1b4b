//! Programs on several hosts, each with its keeper: what one writes all receive, in one order; and who dies, whenever, harms what is his.

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use common::{Cluster, Faults, PATIENCE, settle, until};
use ringlet_reflect::{Host, Permission, Receiver, Region, Status, Transmitter, Use, Wait};
use rustix::mm::{MapFlags, ProtFlags, mmap};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType, connect, recv, recvmsg, send, socket_with,
};

const ALONE: Use = Use { shared: true, loopback: false };

fn region(host: &Host, key: u64, bytes: usize) -> Region {
    host.allocate(key, bytes, &Permission::default()).unwrap()
}

/// To write and to read.
fn both(host: &Host, key: u64, bytes: usize) -> (Transmitter, Receiver) {
    let region = region(host, key, bytes);
    (region.transmit(Use::default()).unwrap(), region.receive(Use::default()).unwrap())
}

fn word(receiver: &Receiver, at: usize) -> u64 {
    receiver.words()[at].load(Ordering::Acquire)
}

fn store(transmitter: &Transmitter, at: usize, value: u64) {
    transmitter.put(at * 8, &value.to_ne_bytes()).unwrap();
}

#[test]
fn who_looks_from_outside_sees_what_his_host_receives_and_who_waits() {
    let cluster = Cluster::new(2);
    let (writes, receives, looks) = (cluster.host(0), cluster.host(1), cluster.host(1));
    let how = Permission { coherent: false, ..Permission::default() };
    let [region, theirs] = [&writes, &receives].map(|host| host.allocate(7, 9999, &how).unwrap());
    let transmitter = region.transmit(Use::default()).unwrap();
    assert_eq!(looks.sampler(region.id(), 9).err(), Some(Status::BadRegion), "nobody receives it");
    let receiver = theirs.receive(Use::default()).unwrap();
    let mut sampler = looks.sampler(region.id(), 9).unwrap();
    transmitter.put(4096, &[1]).unwrap();
    until("what was written", || receiver.words()[512].load(Ordering::Acquire) != 0);
    assert_eq!(sampler.look().map(|sample| (sample.changed, sample.pages)), Ok((1, 3)));
    let locks = writes.locks(1, 2, 0o600, true).unwrap();
    let waits = std::thread::spawn(move || {
        let theirs = receives.locks(1, 2, 0o600, false).unwrap();
        theirs.acquire(0, Wait::UpTo(PATIENCE))
    });
    let is_waited = || looks.state().unwrap().sets.iter().any(|set| set.waited == [0]);
    until("a lock to be waited for", is_waited);
    locks.release(0).unwrap();
    waits.join().unwrap().unwrap();
}

#[test]
fn what_is_written_on_one_host_is_received_on_all() {
    let cluster = Cluster::new(2);
    let hosts = [cluster.host(0), cluster.host(1)];
    let regions = [0, 1].map(|host: usize| region(&hosts[host], 7, 5000));
    assert_eq!(regions[0].id(), regions[1].id());
    let transmitter = regions[0].transmit(Use::default()).unwrap();
    let receivers = [0, 1].map(|host: usize| regions[host].receive(Use::default()).unwrap());
    for (at, length) in
        [(0, 1), (1, 7), (3, 4), (5, 8), (7, 100), (4090, 12), (8191, 1), (8192, 0), (0, 8192)]
    {
        let bytes: Vec<u8> = (0..length).map(|n| (n * 7 + at) as u8 | 1).collect();
        transmitter.put(at, &bytes).unwrap();
        for receiver in &receivers {
            let mut got = vec![0; length];
            until("what was written", || {
                receiver.get(at, &mut got).unwrap();
                got == bytes
            });
        }
    }
    assert_eq!(transmitter.put(8190, &[1, 2, 3]), Err(Status::BadParameter));
    assert_eq!(transmitter.notify(8190, 3), Err(Status::BadParameter));
    let large = region(&hosts[0], 8, 4 << 20);
    let (to, from) = (large.transmit(Use::default()).unwrap(), both(&hosts[1], 8, 4 << 20).1);
    let bytes: Vec<u8> = (0..4usize << 20).map(|at| ((at * 31) >> 7) as u8).collect();
    to.put(0, &bytes).unwrap();
    let mut got = vec![0; bytes.len()];
    until("all of it", || {
        from.get(0, &mut got).unwrap();
        got == bytes
    });
}

/// What each receiver saw one after the other of one word, to which all write values that come once: there is an order that all of it fits.
fn is_one_order(histories: &[Vec<u64>]) -> bool {
    let mut behind: BTreeMap<u64, BTreeSet<u64>> = BTreeMap::new();
    let mut before: BTreeMap<u64, usize> = BTreeMap::new();
    for history in histories {
        for value in history {
            before.entry(*value).or_default();
        }
        for pair in history.windows(2) {
            if behind.entry(pair[0]).or_default().insert(pair[1]) {
                *before.entry(pair[1]).or_default() += 1;
            }
        }
    }
    let mut free: Vec<u64> =
        before.iter().filter(|each| *each.1 == 0).map(|each| *each.0).collect();
    let mut placed = 0;
    while let Some(value) = free.pop() {
        placed += 1;
        for next in behind.get(&value).into_iter().flatten() {
            let count = before.get_mut(next).unwrap();
            *count -= 1;
            if *count == 0 {
                free.push(*next);
            }
        }
    }
    placed == before.len()
}

#[test]
fn the_checker_of_orders_finds_two() {
    assert!(is_one_order(&[vec![1, 2, 3, 5], vec![2, 4, 5], vec![1, 4]]));
    assert!(!is_one_order(&[vec![1, 2, 3], vec![3, 1]]));
    assert!(!is_one_order(&[vec![1, 2], vec![2, 3], vec![3, 1]]));
}

/// Writers on each host, receivers on each host; frames are lost meanwhile.
fn all_see_one_order(hosts: usize, lost: u32) {
    const EACH: u64 = 3000;
    let cluster = Cluster::new(hosts);
    cluster.faults.lost.store(lost, Ordering::Relaxed);
    let written = AtomicU64::new(0);
    let writers = 2 * hosts as u64;
    // (The region is not coherent: who comes late is not shown what was written before.)
    let all_receive = Barrier::new(3 * hosts);
    let histories: Vec<Vec<u64>> = std::thread::scope(|scope| {
        for writer in 0..writers {
            let host = cluster.host(writer as usize % hosts);
            let (written, all_receive) = (&written, &all_receive);
            scope.spawn(move || {
                let to = region(&host, 1, 8192).transmit(Use::default()).unwrap();
                all_receive.wait();
                for count in 1..=EACH {
                    store(&to, 5, count << 8 | writer);
                    store(&to, 600 + writer as usize, count);
                }
                settle(&host);
                written.fetch_add(1, Ordering::Release);
                until("the others", || written.load(Ordering::Acquire) == writers);
            });
        }
        let receivers = (0..hosts).map(|number| {
            let (cluster, written, all_receive) = (&cluster, &written, &all_receive);
            scope.spawn(move || {
                let host = cluster.host(number);
                let from = region(&host, 1, 8192).receive(Use::default()).unwrap();
                all_receive.wait();
                let mut history = vec![];
                loop {
                    let is_over = written.load(Ordering::Acquire) == writers;
                    let now = word(&from, 5);
                    if now != 0 && history.last() != Some(&now) {
                        // (What a writer wrote behind that was not there before it.)
                        let behind = word(&from, 600 + (now & 0xff) as usize);
                        assert!(behind + 1 >= now >> 8, "{behind} {now:x}");
                        history.push(now);
                    }
                    if is_over {
                        (0..writers as usize)
                            .for_each(|each| assert_eq!(word(&from, 600 + each), EACH));
                        return history;
                    }
                    std::hint::spin_loop();
                }
            })
        });
        let receivers: Vec<_> = receivers.collect();
        receivers.into_iter().map(|receiver| receiver.join().unwrap()).collect()
    });
    assert!(is_one_order(&histories));
    assert!(histories.iter().all(|history| history.last() == histories[0].last()));
}

#[test]
fn two_hosts_see_one_order() {
    all_see_one_order(2, 0);
}

#[test]
fn four_hosts_see_one_order_where_frames_are_lost() {
    all_see_one_order(4, 20);
}

#[test]
fn without_loopback_a_host_does_not_see_what_it_writes() {
    let cluster = Cluster::new(2);
    let hosts = [cluster.host(0), cluster.host(1)];
    let regions = [0, 1].map(|host: usize| region(&hosts[host], 1, 4096));
    let second = region(&cluster.host(0), 1, 4096);
    let quiet = regions[0].transmit(ALONE).unwrap();
    // (Of a host all say alike; another one says for itself.)
    assert_eq!(second.transmit(Use::default()).err(), Some(Status::OtherLoopback));
    let loud = regions[1].transmit(Use::default()).unwrap();
    let from = [0, 1].map(|host: usize| regions[host].receive(Use::default()).unwrap());
    store(&quiet, 0, 1);
    settle(&hosts[0]);
    store(&loud, 1, 2);
    until("it to be seen", || from.iter().all(|from| word(from, 1) == 2));
    assert_eq!([word(&from[0], 0), word(&from[1], 0)], [0, 1]);
}

#[test]
fn what_is_for_one_host_is_seen_there_alone() {
    let cluster = Cluster::new(3);
    let hosts = [0, 1, 2].map(|host| cluster.host(host));
    let regions = [0, 1, 2].map(|host: usize| region(&hosts[host], 1, 4096));
    let from = [0, 1, 2].map(|host: usize| regions[host].receive(Use::default()).unwrap());
    assert_eq!(regions[0].transmit_to("nowhere", true).err(), Some(Status::BadHost));
    assert_eq!(regions[0].transmit_to(cluster.name(0), true).err(), Some(Status::ToItself));
    let to = regions[0].transmit_to(cluster.name(2), true).unwrap();
    assert_eq!(regions[0].transmit(Use::default()).err(), Some(Status::TransmitAttached));
    store(&to, 0, 1);
    settle(&hosts[0]);
    let all = regions[1].transmit(Use::default()).unwrap();
    store(&all, 1, 2);
    until("it to be seen", || from.iter().all(|from| word(from, 1) == 2));
    assert_eq!([0, 1, 2].map(|host: usize| word(&from[host], 0)), [0, 0, 1]);
    drop(to);
    let to = regions[0].transmit(Use::default()).unwrap();
    store(&to, 0, 3);
    until("all to see it", || from.iter().all(|from| word(from, 0) == 3));
}

/// What fills it can't go on: what was filled before is there, and so is what is written behind.
#[test]
fn what_is_filled_piece_by_piece_is_received_as_far_as_it_was() {
    const BYTES: usize = 64 << 10;
    let cluster = Cluster::new(2);
    let (one, other) = (cluster.host(0), cluster.host(1));
    let (to, from) = (both(&one, 1, BYTES).0, both(&other, 1, BYTES).1);
    assert!(!to.is_memory());
    let fill = |most: usize, value: u8| {
        let mut pieces = 0;
        let done = to.fill(8, BYTES - 16, |at, length, to| {
            assert_eq!(at, pieces);
            pieces += length;
            // SAFETY: so many bytes may be written there.
            unsafe { to.write_bytes(value, length) };
            at + length <= most
        });
        (done, pieces)
    };
    assert_eq!(fill(BYTES, 1), (Ok(()), BYTES - 16));
    let (refused, tried) = fill(BYTES / 2, 2);
    assert_eq!(refused, Err(Status::BadAddress));
    store(&to, 0, 3);
    until("what is behind it", || word(&from, 0) == 3);
    let mut bytes = vec![0; BYTES];
    from.get(0, &mut bytes).unwrap();
    let filled = 8 + bytes[8..].iter().take_while(|byte| **byte == 2).count();
    assert!(filled > 8 && filled < 8 + tried, "{filled} of {tried}");
    assert!(bytes[filled..BYTES - 8].iter().all(|byte| *byte == 1));
    assert_eq!(bytes[BYTES - 8..], [0; 8]);
}

/// What is written for a host that has gone is nobody's: each check says so, and not only the first one.
#[test]
fn what_is_for_a_host_that_has_gone_is_an_error() {
    let mut cluster = Cluster::of_mortals(3, 3);
    let host = cluster.host(0);
    let to = region(&host, 1, 4096).transmit_to(cluster.name(2), true).unwrap();
    store(&to, 0, 1);
    settle(&host);
    cluster.kill(2);
    cluster.await_hosts(0, 2);
    for count in 2..5 {
        let errors = host.errors(0).unwrap();
        store(&to, 0, count);
        assert_eq!(host.check_errors(0, errors), Err(Status::ChannelError));
    }
    drop(to);
    let errors = host.errors(0).unwrap();
    assert_eq!(host.check_errors(0, errors), Ok(errors));
}

/// A host that comes while others write: it sees all that was ever written, and what comes in its order.
#[test]
fn who_comes_late_sees_all_of_what_is_coherent() {
    const BYTES: usize = 4 << 20;
    let mut cluster = Cluster::with_room(4, 3);
    let hosts = [0, 1, 2].map(|host| cluster.host(host));
    let (to, from) = both(&hosts[0], 1, BYTES);
    let bytes: Vec<u8> = (0..BYTES / 2).map(|at| (at / 7) as u8).collect();
    to.put(BYTES / 4, &bytes).unwrap();
    let how = Permission { coherent: false, ..Permission::default() };
    let apart = hosts[0].allocate(2, 4096, &how).unwrap();
    let apart = (apart.transmit(Use::default()).unwrap(), apart.receive(Use::default()).unwrap());
    store(&apart.0, 0, 7);
    let locks = hosts[1].locks(9, 3, 0o600, true).unwrap();
    settle(&hosts[0]);
    let (is_over, hosts) = (AtomicBool::new(false), &hosts);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let (to, mut count) = (both(&hosts[1], 1, BYTES).0, 0u64);
            while !is_over.load(Ordering::Relaxed) {
                count += 1;
                store(&to, 1, count);
                to.put(BYTES / 4 + (count as usize * 97) % (BYTES / 2), &[count as u8]).unwrap();
                store(&to, BYTES / 8 - 1, count);
            }
            settle(&hosts[1]);
        });
        cluster.start(3);
        cluster.await_hosts(3, 4);
        let late = cluster.host(3);
        assert_eq!(
            late.state().unwrap().cluster.unwrap().view,
            hosts[0].state().unwrap().cluster.unwrap().view
        );
        let (sent, seen) = both(&late, 1, BYTES);
        for _ in 0..20_000 {
            let second = word(&seen, BYTES / 8 - 1);
            assert!(second > 0 && word(&seen, 1) >= second);
        }
        let theirs = late.locks(9, 3, 0o600, false).unwrap();
        assert_eq!(theirs.acquire(0, Wait::No), Err(Status::Busy), "its creator has it");
        locks.release(0).unwrap();
        theirs.acquire(0, Wait::No).unwrap();
        let apart_late = late.allocate(2, 4096, &how).unwrap().receive(Use::default()).unwrap();
        assert_eq!(word(&apart_late, 0), 0, "from now on only");
        store(&apart.0, 1, 8);
        until("what is written now", || word(&apart_late, 1) == 8);
        is_over.store(true, Ordering::Relaxed);
        store(&sent, 2, 99);
        settle(&late);
        until("the last word", || {
            word(&from, 2) == 99 && word(&seen, 1) == word(&seen, BYTES / 8 - 1)
        });
        settle(&hosts[1]);
        let all = |receiver: &Receiver| {
            let mut all = vec![0; BYTES];
            receiver.get(0, &mut all).unwrap();
            all
        };
        until("the same everywhere", || all(&from) == all(&seen));
    });
}

/// Whoever tells a late-comer of a region: all that was written to all, also what is not seen where it was written, and nothing that was for one host.
#[test]
fn who_comes_late_sees_what_its_teller_does_not() {
    let mut cluster = Cluster::with_room(3, 2);
    let hosts = [0, 1, 0, 1].map(|host| cluster.host(host));
    let regions = [0, 1, 2, 3].map(|each: usize| region(&hosts[each], 1, 8192));
    let from = [0, 1].map(|host: usize| regions[host].receive(Use::default()).unwrap());
    let quiet = [0, 1].map(|host: usize| regions[host].transmit(ALONE).unwrap());
    let to_other = [0, 1]
        .map(|host: usize| regions[2 + host].transmit_to(cluster.name(1 - host), true).unwrap());
    for host in [0, 1] {
        store(&quiet[host], host, 7);
        store(&to_other[host], 10 + host, 8);
        store(&quiet[host], 600 + host, 9);
    }
    hosts.iter().for_each(settle);
    assert_eq!([word(&from[0], 0), word(&from[0], 1), word(&from[0], 11)], [0, 7, 8]);
    assert_eq!([word(&from[1], 0), word(&from[1], 1), word(&from[1], 10)], [7, 0, 8]);
    cluster.start(2);
    cluster.await_hosts(2, 3);
    let late = both(&cluster.host(2), 1, 8192).1;
    let seen = [0, 1, 600, 601, 10, 11].map(|at| word(&late, at));
    assert_eq!(seen, [7, 7, 9, 9, 0, 0]);
}

/// A host that comes again and again while others ask and write, so that who tells it what there is may be before or behind it in the order: it knows what
/// they know, and each act is done once there.
#[test]
fn who_comes_while_others_ask_knows_what_they_know() {
    let mut cluster = Cluster::with_room(3, 2);
    let hosts = [0, 1].map(|host| cluster.host(host));
    let to = [0, 1].map(|host: usize| both(&hosts[host], 1, 64 << 10).0);
    let (paths, is_over) = ([0, 1].map(|host| cluster.path(host)), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let is_over = Over(&is_over);
        for (number, to) in to.iter().enumerate() {
            for thread in 0..4 {
                let (path, is_over) = (&paths[number], is_over.0);
                scope.spawn(move || {
                    let key = 100 + (4 * number + thread) as u64;
                    while !is_over.load(Ordering::Relaxed) {
                        // (Where each view takes its time, since the machine is busy, an answer may come too late.)
                        let asked = Host::at(path)
                            .and_then(|host| host.allocate(key, 4096, &Permission::default()));
                        assert!(matches!(asked, Ok(_) | Err(Status::Timeout)), "{:?}", asked.err());
                    }
                });
            }
            let is_over = is_over.0;
            scope.spawn(move || {
                let bytes = vec![1; 64 << 10];
                while !is_over.load(Ordering::Relaxed) {
                    let put = to.put(0, &bytes);
                    assert!(matches!(put, Ok(()) | Err(Status::Timeout)), "{put:?}");
                }
            });
        }
        for round in 0..20 {
            cluster.start(2);
            cluster.await_hosts(2, 3);
            let late = cluster.host(2);
            let ids = [&late, &hosts[0]].map(|host| region(host, 10 + round, 4096));
            assert_eq!(ids[0].id(), ids[1].id(), "{round}");
            drop((ids, late));
            cluster.kill(2);
        }
    });
}

/// Nothing is taken that nobody will pass on.
#[test]
fn who_writes_behind_the_end_of_his_keeper_is_told_at_once() {
    let mut cluster = Cluster::new(2);
    let host = cluster.host(0);
    let (to, _from) = both(&host, 1, 4096);
    store(&to, 0, 1);
    settle(&host);
    cluster.kill(0);
    let gone = Err(Status::NotInitialised);
    assert_eq!(to.put(0, &[2; 8]), gone);
    let mut pieces = 0;
    let filled = to.fill(0, 8, |_, _, _| {
        pieces += 1;
        true
    });
    assert_eq!((filled, pieces), (gone, 0));
    assert_eq!((host.errors(0).err(), host.check_errors(0, 0).err()), (gone.err(), gone.err()));
}

/// Others are to end, also where this one fails.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn a_lock_is_had_by_one_of_all_hosts() {
    const EACH: u64 = 60;
    let cluster = Cluster::new(3);
    std::thread::scope(|scope| {
        for number in 0..6 {
            let host = cluster.host(number % 3);
            scope.spawn(move || {
                let (to, from) = both(&host, 1, 4096);
                let locks = host.locks(1, 2, 0o600, false).unwrap();
                for _ in 0..EACH {
                    locks.acquire(1, Wait::UpTo(PATIENCE)).unwrap();
                    assert!(locks.holds_any());
                    assert_eq!(locks.acquire(1, Wait::No), Err(Status::HeldByUs));
                    // (What the last holder wrote under it is here.)
                    let (one, other) = (word(&from, 0), word(&from, 511));
                    assert_eq!(one, other);
                    store(&to, 0, one + 1);
                    store(&to, 511, one + 1);
                    locks.release(1).unwrap();
                    assert_eq!(locks.release(1), Err(Status::NotHeld));
                }
                // (Until all have done.)
                until("all", || word(&from, 0) == 6 * EACH);
            });
        }
    });
    let host = cluster.host(0);
    let locks = host.locks(1, 2, 0o600, true).unwrap();
    let theirs = cluster.host(1).locks(1, 2, 0o600, false).unwrap();
    assert_eq!(theirs.acquire(0, Wait::No), Err(Status::Busy));
    assert_eq!(theirs.acquire(0, Wait::UpTo(Duration::from_millis(1))), Err(Status::Busy));
    locks.release(0).unwrap();
    // (Who has given up has it not.)
    locks.acquire(0, Wait::No).unwrap();
    // Dropped, its locks are another one's, who waits asleep.
    let waits = std::thread::spawn(move || theirs.acquire(0, Wait::UpTo(PATIENCE)));
    drop(locks);
    waits.join().unwrap().unwrap();
}

#[test]
fn threads_of_one_process_wait_for_one_lock() {
    let cluster = Cluster::new(2);
    let (host, other) = (cluster.host(0), cluster.host(1));
    let theirs = other.locks(1, 1, 0o600, true).unwrap();
    let locks = host.locks(1, 1, 0o600, false).unwrap();
    std::thread::scope(|scope| {
        let threads: Vec<_> =
            (0..3).map(|_| scope.spawn(|| locks.acquire(0, Wait::UpTo(PATIENCE)))).collect();
        until("one to wait", || host.state().is_ok());
        theirs.release(0).unwrap();
        let mut ends: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        ends.sort_by_key(Result::is_err);
        assert_eq!(ends, [Ok(()), Err(Status::HeldByUs), Err(Status::HeldByUs)]);
    });
}

#[test]
fn who_sleeps_for_a_page_is_woken_by_another_host() {
    let cluster = Cluster::new(2);
    let (one, other) = (cluster.host(0), cluster.host(1));
    let (to, from) = both(&one, 1, 3 * 4096);
    let (back, there) = both(&other, 1, 3 * 4096);
    let mut watch = there.watch(4096).unwrap();
    let mut answers = from.watch(2 * 4096).unwrap();
    store(&to, 0, 1);
    settle(&one);
    assert!(!watch.has_changed(), "that was another page");
    let asked = std::thread::spawn(move || {
        for number in 1..=500 {
            while word(&there, 512) != number {
                assert!(watch.wait(Some(PATIENCE)));
            }
            store(&back, 1024, number);
        }
    });
    for number in 1..=500 {
        store(&to, 512, number);
        while word(&from, 1024) != number {
            assert!(answers.wait(Some(PATIENCE)));
        }
    }
    asked.join().unwrap();
    let bell = answers.descriptor().unwrap().try_clone_to_owned().unwrap();
    store(&to, 1025, 1);
    let mut fds = [rustix::event::PollFd::new(&bell, rustix::event::PollFlags::IN)];
    let time = rustix::event::Timespec { tv_sec: 60, tv_nsec: 0 };
    assert_eq!(rustix::event::poll(&mut fds, Some(&time)).unwrap(), 1);
    assert!(answers.has_changed());
}

/// Two of three go on without the third, which says so; and comes back as another one.
#[test]
fn a_minority_stops_and_says_so() {
    let mut cluster = Cluster::of_mortals(3, 3);
    let hosts = [0, 1, 2].map(|host| cluster.host(host));
    let ends = [0, 1, 2].map(|host: usize| both(&hosts[host], 1, 4096));
    let locks = hosts[2].locks(1, 2, 0o600, true).unwrap();
    let theirs = hosts[0].locks(1, 2, 0o600, false).unwrap();
    assert_eq!(theirs.acquire(0, Wait::No), Err(Status::Busy));
    store(&ends[2].0, 0, 1);
    let errors = hosts[2].errors(0).unwrap();
    assert_eq!(hosts[2].check_errors(0, errors), Ok(errors));
    let known = [0, 2].map(|host: usize| hosts[host].cluster().unwrap());
    cluster.cut_off(&[2]);
    // The one that is cut off.
    let changed = hosts[2].wait_event(&known[1], PATIENCE).unwrap();
    assert!(changed.stopped.is_some());
    assert_eq!(ends[2].0.put(0, &[1]), Err(Status::Stopped));
    assert_eq!(hosts[2].check_errors(0, errors), Err(Status::ChannelError));
    assert!(hosts[2].errors(0).unwrap() > errors);
    assert_eq!(locks.acquire(1, Wait::UpTo(PATIENCE)), Err(Status::Stopped));
    assert_eq!(hosts[2].allocate(9, 1, &Permission::default()).err(), Some(Status::Stopped));
    locks.release(0).unwrap();
    assert_eq!(hosts[2].cluster().unwrap().hosts.len(), 3);
    // The others.
    let changed = hosts[0].wait_event(&known[0], PATIENCE).unwrap();
    assert_eq!((changed.hosts.len(), changed.stopped), (2, None));
    store(&ends[0].0, 1, 5);
    until("the other one", || word(&ends[1].1, 1) == 5);
    theirs.acquire(0, Wait::UpTo(PATIENCE)).unwrap();
    assert_eq!(word(&ends[2].1, 1), 0);
    // It learns that it was declared dead.
    cluster.mend();
    cluster.ended(2).unwrap_err();
    assert_eq!(hosts[2].state().err(), Some(Status::NotInitialised));
    cluster.start(2);
    cluster.await_hosts(2, 3);
    let changed = hosts[0].wait_event(&changed_of(&hosts[0], 2), PATIENCE).unwrap();
    assert_eq!(changed.hosts.len(), 3);
    let (to, from) = both(&cluster.host(2), 1, 4096);
    assert_eq!(word(&from, 1), 5);
    store(&to, 2, 6);
    until("what it writes now", || word(&ends[0].1, 2) == 6);
}

/// A program that has written more than goes is answered where nothing goes on; and what it gives back is given back behind what it has written.
#[test]
fn who_is_stopped_in_the_middle_of_writing_is_answered() {
    assert!((0..20).any(|_| is_answered_where_all_has_stopped()), "none goes on where it was");
}

/// False: one was declared dead at the end, since the others had found each other before.
fn is_answered_where_all_has_stopped() -> bool {
    let mut cluster = Cluster::of_mortals(3, 3);
    cluster.may_end = true;
    let hosts = [0, 1, 2].map(|host| cluster.host(host));
    let ends = [0, 1].map(|host: usize| both(&hosts[host], 1, 8192));
    let locks = hosts[0].locks(1, 2, 0o600, true).unwrap();
    let theirs = hosts[1].locks(1, 2, 0o600, false).unwrap();
    [0, 1, 2].iter().for_each(|host| cluster.cut_off(&[*host]));
    let mut last = 0;
    let stopped = (1..u64::MAX).find_map(|value| {
        let words = [value; 512].map(u64::to_ne_bytes);
        let put = ends[0].0.put(0, words.as_flattened());
        last = if put.is_ok() { value } else { last };
        put.err()
    });
    assert_eq!(stopped, Some(Status::Stopped));
    assert!(last > 100, "it has not written more than goes");
    assert!(hosts[0].cluster().unwrap().stopped.is_some());
    assert_eq!(locks.acquire(1, Wait::No), Err(Status::Stopped));
    locks.release(0).unwrap();
    cluster.mend();
    let goes_on = |host: &Host| {
        until("it to go on, or to end", || {
            !host.cluster().is_ok_and(|cluster| cluster.stopped.is_some())
        });
        host.cluster().is_ok()
    };
    if !hosts[..2].iter().all(goes_on) {
        return false;
    }
    theirs.acquire(0, Wait::UpTo(PATIENCE)).unwrap();
    assert_eq!(word(&ends[1].1, 0), last);
    locks.acquire(1, Wait::UpTo(PATIENCE)).unwrap();
    true
}

/// Who waits for what was written before his host came is told that it is cut off, and not left to wait; and has not attached.
#[test]
fn who_waits_for_contents_as_his_host_is_cut_off_is_told() {
    const BYTES: usize = 16 << 20;
    let mut cluster = Cluster::of_mortals(4, 3);
    cluster.may_end = true;
    let to = both(&cluster.host(0), 1, BYTES).0;
    to.put(0, &vec![1; BYTES]).unwrap();
    settle(&cluster.host(0));
    // (Each piece that is lost is asked for again behind a while.)
    cluster.faults.lost.store(100, Ordering::Relaxed);
    cluster.start(3);
    cluster.await_hosts(3, 4);
    let late = cluster.host(3);
    let region = region(&late, 1, BYTES);
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| region.receive(Use::default()).map(drop));
        let host = cluster.host(3);
        let is_attached = || {
            let state = host.state().unwrap();
            let seen = state.regions.iter().any(|region| region.receive.contains(&late.member()));
            assert!(state.cluster.unwrap().filling == 1 && !waits.is_finished());
            seen
        };
        until("it to wait", is_attached);
        cluster.cut_off(&[3]);
        assert_eq!(waits.join().unwrap(), Err(Status::Stopped));
    });
    assert_eq!(region.receive(Use::default()).err(), Some(Status::Stopped));
}

/// A cluster of so many hosts, as it was known.
fn changed_of(host: &Host, _hosts: usize) -> ringlet_reflect::Cluster {
    let mut known = host.cluster().unwrap();
    if known.hosts.len() == 3 {
        known = ringlet_reflect::Cluster::default();
    }
    known
}

/// Who asks in the moment in which the others are lost is told that this host has stopped, and not left to wait; and has not got behind its back what it was
/// told it can't have.
#[test]
fn who_asks_as_the_others_are_lost_is_told_and_has_nothing() {
    let mut cluster = Cluster::of_mortals(3, 3);
    cluster.may_end = true;
    let hosts = [0, 1, 2].map(|host| cluster.host(host));
    let locks = [0, 1, 2].map(|host: usize| hosts[host].locks(1, 2, 0o600, false).unwrap());
    [0, 1, 2].iter().for_each(|host| cluster.cut_off(&[*host]));
    let asked: Vec<_> = std::thread::scope(|scope| {
        let ask = |locks| {
            scope.spawn(move || ringlet_reflect::Locks::acquire(locks, 0, Wait::UpTo(PATIENCE)))
        };
        let asked = [0, 1, 2].map(|host: usize| ask(&locks[host]));
        asked.into_iter().map(|asked| asked.join().unwrap()).collect()
    });
    // (The hub's is the next of the order at once.)
    assert_eq!(
        asked.iter().filter(|asked| **asked == Err(Status::Stopped)).count(),
        2,
        "{asked:?}"
    );
    assert_eq!(asked.iter().filter(|asked| asked.is_ok()).count(), 1, "{asked:?}");
    cluster.mend();
    // (The holder is the first to give back.)
    let mut order = [0, 1, 2];
    order.sort_by_key(|host: &usize| asked[*host].is_err());
    let mut on = 0;
    for host in order {
        until("it to go on, or to end", || {
            !hosts[host].cluster().is_ok_and(|cluster| cluster.stopped.is_some())
        });
        // (One of them may have been declared dead.)
        let released = locks[host].release(0);
        if released == Err(Status::NotInitialised) {
            continue;
        }
        on += 1;
        assert_eq!(released, asked[host].map_err(|_| Status::NotHeld));
        locks[host].acquire(0, Wait::UpTo(PATIENCE)).unwrap();
        locks[host].release(0).unwrap();
    }
    assert!(on >= 2);
}

/// Who is told that he has not attached a region, and gives it back, has it no more: also where he is attached behind his back meanwhile.
#[test]
fn who_is_refused_as_the_others_are_lost_can_give_back() {
    let mut cluster = Cluster::of_mortals(3, 3);
    cluster.may_end = true;
    let hosts = [0, 1, 2].map(|host| cluster.host(host));
    let regions = [0, 1, 2].map(|host: usize| region(&hosts[host], 1, 4096));
    [0, 1, 2].iter().for_each(|host| cluster.cut_off(&[*host]));
    std::thread::scope(|scope| {
        for region in regions {
            // (The hub's is the next of the order at once.)
            scope.spawn(move || drop(region.transmit(Use::default())));
        }
    });
    for host in &hosts {
        until("it to say so", || host.cluster().unwrap().stopped.is_some());
    }
    cluster.mend();
    let mut on = 0;
    for host in &hosts {
        until("it to go on, or to end", || {
            !host.cluster().is_ok_and(|cluster| cluster.stopped.is_some())
        });
        // (One of them may have been declared dead.)
        match host.allocate(1, 4096, &Permission::default()) {
            Ok(_) => on += 1,
            Err(status) => assert_eq!(status, Status::NotInitialised),
        }
    }
    assert!(on >= 2);
}

/// Where nobody can reach anybody all stop, and go on where they were.
#[test]
fn those_who_lost_each_other_go_on_together() {
    let mut cluster = Cluster::of_mortals(3, 3);
    cluster.may_end = true;
    let hosts = [0, 1, 2].map(|host| cluster.host(host));
    let ends = [0, 1, 2].map(|host: usize| both(&hosts[host], 1, 4096));
    store(&ends[1].0, 0, 1);
    settle(&hosts[1]);
    [0, 1, 2].iter().for_each(|host| cluster.cut_off(&[*host]));
    for host in &hosts {
        until("it to say so", || host.cluster().unwrap().stopped.is_some());
    }
    // (What is given back meanwhile is given back.)
    drop(ends);
    cluster.mend();
    // (Two may have found each other before the third one: then it is declared dead.)
    let mut on = Vec::new();
    for host in &hosts {
        until("it to go on, or to end", || {
            !host.cluster().is_ok_and(|cluster| cluster.stopped.is_some())
        });
        if host.cluster().is_ok() {
            on.push(host);
        }
    }
    assert!(on.len() >= 2);
    let ends: Vec<_> = on.iter().map(|host| both(host, 1, 4096)).collect();
    for (number, end) in ends.iter().enumerate() {
        store(&end.0, number, 7);
    }
    for (_, from) in &ends {
        until("all", || (0..on.len()).all(|number| word(from, number) == 7));
    }
}

/// What those of a host that is dead had is the others'.
#[test]
fn a_host_that_dies_gives_all_back() {
    let mut cluster = Cluster::of_mortals(3, 3);
    let hosts = [0, 1, 2].map(|host| cluster.host(host));
    let locks = [0, 1, 2].map(|host: usize| hosts[host].locks(1, 3, 0o600, false).unwrap());
    locks[0].acquire(0, Wait::No).unwrap();
    let gone = region(&hosts[0], 77, 4096);
    let (to, from) = (both(&hosts[1], 1, 4096), both(&hosts[2], 1, 4096));
    // (It is the hub, too.)
    cluster.kill(0);
    store(&to.0, 0, 1);
    locks[1].acquire(0, Wait::UpTo(PATIENCE)).unwrap();
    assert_eq!(locks[2].acquire(0, Wait::No), Err(Status::Busy));
    until("it to be seen", || word(&from.1, 0) == 1);
    let state = hosts[1].state().unwrap();
    assert!(state.regions.iter().all(|region| region.key != 77));
    assert_eq!(state.cluster.unwrap().hosts, [cluster.name(1), cluster.name(2)]);
    assert_eq!(locks[0].acquire(1, Wait::No), Err(Status::NotInitialised));
    assert_eq!(gone.transmit(Use::default()).err(), Some(Status::NotInitialised));
    cluster.start(0);
    cluster.await_hosts(1, 3);
    cluster.await_hosts(0, 3);
    let back = both(&cluster.host(0), 1, 4096);
    assert_eq!(word(&back.1, 0), 1);
}

#[test]
fn a_host_leaves_in_order() {
    let mut cluster = Cluster::new(3);
    let hosts = [cluster.host(1), cluster.host(2)];
    let (to, from) = (both(&hosts[0], 1, 4096), both(&hosts[1], 1, 4096));
    cluster.leave(0);
    cluster.await_hosts(1, 2);
    store(&to.0, 0, 1);
    until("it to be seen", || word(&from.1, 0) == 1);
    cluster.leave(1);
    cluster.await_hosts(2, 1);
    store(&from.0, 0, 2);
    until("it to be seen", || word(&from.1, 0) == 2);
}

/// What its programs had written is everybody's, hub or not; behind that they are told that nothing goes on.
#[test]
fn who_leaves_takes_nothing_with_him() {
    const BYTES: usize = 4 << 20;
    for leaver in [0, 1, 2] {
        let mut cluster = Cluster::new(3);
        let (host, other) = (cluster.host(leaver), cluster.host((leaver + 1) % 3));
        let (to, from) = (both(&host, 1, BYTES).0, both(&other, 1, BYTES).1);
        (1..=3).for_each(|value| to.put(0, &vec![value; BYTES]).unwrap());
        cluster.leave(leaver);
        assert!(to.put(0, &[9]).is_err());
        until("all that he has written", || word(&from, BYTES / 8 - 1) == u64::MAX / 255 * 3);
        let mut all = vec![0; BYTES];
        from.get(0, &mut all).unwrap();
        assert!(all.iter().all(|byte| *byte == 3));
    }
}

/// Programs of two hosts that have a region of so many bytes, all of which was written before the second host came, which is given none of it yet.
fn begin_to_fill(cluster: &mut Cluster, bytes: usize) -> [(Host, Region); 2] {
    let host = cluster.host(0);
    let held = region(&host, 1, bytes);
    let all: Vec<u8> = (0..bytes).map(|at| (at / 4096) as u8 | 1).collect();
    held.transmit(Use::default()).unwrap().put(0, &all).unwrap();
    settle(&host);
    cluster.faults.keeps_contents_back.store(true, Ordering::Relaxed);
    cluster.start(1);
    cluster.await_hosts(1, 2);
    let late = cluster.host(1);
    let theirs = region(&late, 1, bytes);
    [(host, held), (late, theirs)]
}

fn is_as_filled(receiver: &Receiver) -> bool {
    let mut all = vec![0; receiver.len()];
    receiver.get(0, &mut all).unwrap();
    all.iter().enumerate().all(|(at, byte)| *byte == (at / 4096) as u8 | 1)
}

fn contents(host: &Host) -> (u32, u32, u32) {
    let cluster = host.state().unwrap().cluster.unwrap();
    (cluster.filling, cluster.needed, cluster.incomplete)
}

/// Each host is started anew in its turn, while the one before it lacks contents still: none of them is lost.
#[test]
fn who_leaves_stays_until_the_others_have_what_he_has() {
    const BYTES: usize = 8 << 20;
    let mut cluster = Cluster::with_room(2, 1);
    let [(host, held), (late, theirs)] = begin_to_fill(&mut cluster, BYTES);
    until("it to be known", || [contents(&host), contents(&late)] == [(0, 1, 0), (1, 0, 0)]);
    let state = late.state().unwrap();
    let (names, of) = ([cluster.name(0), cluster.name(1)], &state.regions[0]);
    assert_eq!(
        (&of.holders[..], &of.filling[..]),
        (&[names[0].into()][..], &[names[1].into()][..])
    );
    cluster.begin_to_leave(0);
    let leaves = |host: &Host| host.state().unwrap().cluster.unwrap().hands_over;
    until("it to wait for the other one", || leaves(&host));
    // (Its programs go on meanwhile.)
    let locks = host.locks(3, 1, 0o600, false).unwrap();
    locks.acquire(0, Wait::No).unwrap();
    cluster.faults.keeps_contents_back.store(false, Ordering::Relaxed);
    cluster.ended(0).unwrap();
    assert_eq!(held.receive(Use::default()).err(), Some(Status::NotInitialised));
    assert!(is_as_filled(&theirs.receive(Use::default()).unwrap()));
    assert_eq!(contents(&late), (0, 0, 0));
}

/// A region that is made and written while a host is about to come, which does not know of the cluster yet: it is none that has it.
#[test]
fn who_comes_while_a_region_is_made_lacks_it() {
    const BYTES: usize = 1 << 20;
    let mut cluster = Cluster::with_room(2, 1);
    let host = cluster.host(0);
    let Faults { keeps_contents_back, keeps_state_back, .. } = &*cluster.faults.clone();
    for fault in [keeps_contents_back, keeps_state_back] {
        fault.store(true, Ordering::Relaxed);
    }
    cluster.start(1);
    cluster.await_hosts(0, 2);
    let held = region(&host, 1, BYTES);
    let all: Vec<u8> = (0..BYTES).map(|at| (at / 4096) as u8 | 1).collect();
    held.transmit(Use::default()).unwrap().put(0, &all).unwrap();
    settle(&host);
    assert_eq!(contents(&host), (0, 1, 0));
    keeps_state_back.store(false, Ordering::Relaxed);
    cluster.await_hosts(1, 2);
    let late = cluster.host(1);
    let theirs = region(&late, 1, BYTES);
    // (What is made from now on it has from its beginning on.)
    let second = region(&host, 2, 4096);
    until("both to have it", || {
        host.state().unwrap().regions.iter().any(|it| it.id == second.id() && it.holders.len() == 2)
    });
    cluster.begin_to_leave(0);
    until("it to wait for the other one", || host.state().unwrap().cluster.unwrap().hands_over);
    keeps_contents_back.store(false, Ordering::Relaxed);
    cluster.ended(0).unwrap();
    assert!(is_as_filled(&theirs.receive(Use::default()).unwrap()));
    assert_eq!(contents(&late), (0, 0, 0));
}

/// Nobody who has all of it is left: each host says so, to who asks for it then, to who waits for it, and to who checks.
#[test]
fn contents_that_nobody_has_any_more_are_missed_on_every_host() {
    const BYTES: usize = 1 << 20;
    let mut cluster = Cluster::of_mortals(3, 3);
    let first = region(&cluster.host(0), 1, BYTES);
    first.transmit(Use::default()).unwrap().put(0, &vec![1; BYTES]).unwrap();
    settle(&cluster.host(0));
    cluster.faults.keeps_contents_back.store(true, Ordering::Relaxed);
    for host in [1, 2] {
        cluster.kill(host);
        cluster.start(host);
        cluster.await_hosts(host, 3);
    }
    let late = [1, 2].map(|host| cluster.host(host));
    let regions = [0, 1].map(|host: usize| region(&late[host], 1, BYTES));
    let errors = [0, 1].map(|host: usize| late[host].errors(0).unwrap());
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| regions[0].receive(Use::default()).map(drop));
        let receives = || late[0].state().unwrap().regions[0].receive.contains(&late[0].member());
        until("it to wait", receives);
        cluster.kill(0);
        assert_eq!(waits.join().unwrap(), Err(Status::Incomplete));
    });
    for (host, errors) in late.iter().zip(errors) {
        until("it to be known", || contents(host).2 == 1);
        assert!(host.errors(0).unwrap() > errors);
        assert_eq!(host.check_errors(0, errors), Err(Status::ChannelError));
        let now = host.errors(0).unwrap();
        assert_eq!(host.check_errors(0, now), Err(Status::Incomplete), "as long as it is used");
    }
    for region in &regions {
        assert_eq!(region.receive(Use::default()).err(), Some(Status::Incomplete));
        assert_eq!(region.transmit(Use::default()).err(), Some(Status::Incomplete));
    }
    cluster.faults.keeps_contents_back.store(false, Ordering::Relaxed);
    drop(regions);
    let (to, from) = (both(&late[0], 1, BYTES), both(&late[1], 1, BYTES));
    store(&to.0, 0, 5);
    until("it to be seen", || word(&from.1, 0) == 5);
    late.iter().for_each(settle);
}

/// While one thread waits for what was written before his host came, others of his process ask as ever.
#[test]
fn who_waits_for_contents_holds_up_no_other_thread() {
    const BYTES: usize = 1 << 20;
    let mut cluster = Cluster::with_room(2, 1);
    let [(_host, _held), (late, region)] = begin_to_fill(&mut cluster, BYTES);
    let from = std::thread::scope(|scope| {
        let waits = scope.spawn(|| region.receive(Use::default()));
        let locks = late.locks(7, 1, 0o600, false).unwrap();
        for _ in 0..100 {
            locks.acquire(0, Wait::No).unwrap();
            locks.release(0).unwrap();
            settle(&late);
        }
        assert!(!waits.is_finished());
        cluster.faults.keeps_contents_back.store(false, Ordering::Relaxed);
        waits.join().unwrap().unwrap()
    });
    assert!(is_as_filled(&from));
}

#[test]
fn a_keeper_of_another_version_is_named() {
    let mut cluster = Cluster::with_room(2, 1);
    cluster.faults.is_of_another_version.store(true, Ordering::Relaxed);
    cluster.start(1);
    let host = cluster.host(0);
    let expected = vec![(cluster.name(1).to_owned(), "another version".to_owned())];
    let unheard = || host.state().unwrap().cluster.unwrap().unheard;
    until("it to be known", || unheard() == expected);
    assert_eq!(contents(&host), (0, 0, 0));
}

#[test]
fn rails_are_told_of() {
    let cluster = Cluster::new(2);
    let host = cluster.host(0);
    let known = host.cluster().unwrap();
    assert_eq!((known.rails, known.active, host.errors(1)), (1, 1, Err(Status::BadRail)));
    assert_eq!(host.wait_event(&known, Duration::from_millis(1)), Err(Status::Timeout));
    cluster.rails(0b10);
    let changed = host.wait_event(&known, PATIENCE).unwrap();
    assert_eq!((changed.rails, changed.active, host.errors(1)), (2, 0b10, Ok(0)));
}

#[test]
fn each_refusal_has_its_status() {
    let cluster = Cluster::new(2);
    let (one, other) = (cluster.host(0), cluster.host(1));
    let how = Permission::default();
    assert_eq!(one.allocate(1, 0, &how).err(), Some(Status::BadSize));
    assert_eq!(one.allocate(1, 65 << 20, &how).err(), Some(Status::Full));
    let region = one.allocate(1, 4096, &how).unwrap();
    assert_eq!(one.allocate(1, 4096, &how).err(), Some(Status::Prior));
    assert_eq!(other.allocate(1, 4097, &how).err(), Some(Status::BadSize));
    let theirs = other.allocate(1, 4096, &how).unwrap();
    // Sharing is of a host: another one has it as it likes.
    let alone = region.receive(Use { shared: false, ..Use::default() }).unwrap();
    let second = cluster.host(0).allocate(1, 4096, &how).unwrap();
    assert_eq!(second.receive(Use::default()).err(), Some(Status::NonShared));
    drop(theirs.receive(Use::default()).unwrap());
    drop(alone);
    // What one host receives is none of another one's.
    let large = [&one, &other].map(|host| host.allocate(2, 31 << 20, &how).unwrap());
    let received = large[0].receive(Use::default()).unwrap();
    let more = [&one, &other].map(|host| host.allocate(3, 2 << 20, &how).unwrap());
    assert_eq!(more[0].receive(Use::default()).err(), Some(Status::ReceiveFull));
    drop(more[1].receive(Use::default()).unwrap());
    drop(received);
    assert_eq!(one.bury("nobody"), Err(Status::BadHost));
    let locks = one.locks(1, 3, 0o600, true).unwrap();
    assert_eq!(locks.acquire(0, Wait::No), Err(Status::HeldByUs));
    assert_eq!(locks.acquire(3, Wait::No), Err(Status::BadLock));
    assert_eq!(other.locks(1, 3, 0o600, true).err(), Some(Status::Exists));
}

/// A program that says hello by itself, and has its log to write to as it likes.
struct Stranger {
    socket: OwnedFd,
    log: *mut u8,
}

/// Where marks of records are in it, one for each 32 bytes, and where records are.
const MARKS: usize = 4096;
const RING: usize = MARKS + (1 << 20) / 32 * 8;
const LOG_BYTES: usize = RING + (1 << 20);

impl Stranger {
    fn new(path: &Path) -> Stranger {
        let kind = SocketType::SEQPACKET;
        let socket = socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).unwrap();
        connect(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
        let stranger = Stranger { socket, log: std::ptr::null_mut() };
        send(&stranger.socket, br#"{"Hello":{"version":4}}"#, SendFlags::NOSIGNAL).unwrap();
        let (mut bytes, mut room) = ([0; 1024], [MaybeUninit::uninit(); 256]);
        let mut control = RecvAncillaryBuffer::new(&mut room);
        let mut pieces = [IoSliceMut::new(&mut bytes)];
        recvmsg(&stranger.socket, &mut pieces, &mut control, RecvFlags::CMSG_CLOEXEC).unwrap();
        let given = control.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(fds) => Some(fds.collect::<Vec<_>>()),
            _ => None,
        });
        let given = given.unwrap();
        let (all, shared) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        // SAFETY: the log, anywhere.
        let log = unsafe { mmap(std::ptr::null_mut(), LOG_BYTES, all, shared, &given[1], 0) };
        // (The bell is rung once: it is heard whenever it looks.)
        rustix::io::write(&given[2], &1u64.to_ne_bytes()).unwrap();
        Stranger { log: log.unwrap().cast(), ..stranger }
    }

    fn ask(&self, text: &str) -> String {
        let mut bytes = vec![0; 1 << 16];
        if send(&self.socket, text.as_bytes(), SendFlags::NOSIGNAL).is_err() {
            return String::new();
        }
        let length = recv(&self.socket, &mut bytes[..], RecvFlags::empty()).map_or(0, |got| got.0);
        String::from_utf8_lossy(&bytes[..length]).into_owned()
    }

    /// Its number of a region that it may write to.
    fn transmits(&self) -> u32 {
        let said = self.ask(
            r#"{"Allocate":{"key":1,"bytes":4096,"how":{"mode":384,"coherent":true,"rail":0}}}"#,
        );
        let number = said.split("\"id\":").nth(1).unwrap();
        let id = number.split(',').next().unwrap().parse().unwrap();
        let attach = format!(
            r#"{{"Attach":{{"id":{id},"direction":"Transmit","how":{{"shared":true,"loopback":true}}}}}}"#
        );
        assert!(self.ask(&attach).contains("Memory"));
        id
    }

    fn word(&self, at: usize) -> &AtomicU64 {
        assert!(at.is_multiple_of(8) && at < LOG_BYTES);
        // SAFETY: within the log, which is mapped until the process ends.
        unsafe { &*self.log.add(at).cast() }
    }

    /// A record of 8 bytes, whole or not.
    fn record(&self, nth: usize, region: u32, place: u64, value: u64, is_whole: bool) {
        let at = RING + 32 * nth;
        self.word(at).store(u64::from(region) | 8 << 32, Ordering::Relaxed);
        self.word(at + 8).store(place, Ordering::Relaxed);
        self.word(at + 16).store(value, Ordering::Relaxed);
        if is_whole {
            self.word(MARKS + 8 * nth).store(1 << 63 | 32, Ordering::Release);
        }
    }
}

#[test]
fn whatever_a_program_writes_into_its_log_harms_nobody_else() {
    let cluster = Cluster::new(2);
    let (one, other) = (cluster.host(0), cluster.host(1));
    let (to, from) = (both(&one, 1, 4096).0, both(&other, 1, 4096).1);
    let hidden = region(&one, 2, 4096);
    let theirs =
        (hidden.transmit(Use::default()).unwrap(), hidden.receive(Use::default()).unwrap());
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    for round in 0..60u64 {
        let stranger = Stranger::new(&cluster.path(0));
        let id = stranger.transmits();
        // What it may write; what it may not: behind the end, far behind it, in a region that is not its own, and in none.
        let tail = |records: u64| stranger.word(192).store(32 * records, Ordering::Release);
        for (at, (region, place)) in
            [(id, 8), (id, 4089), (id, u64::MAX - 3), (hidden.id(), 8), (9999, 0)]
                .into_iter()
                .enumerate()
        {
            stranger.record(at, region, place, round + 1, true);
        }
        tail(5);
        assert!(stranger.ask(r#""Settle""#).contains("Done"));
        assert_eq!([word(&from, 1), word(&from, 511), word(&theirs.1, 1)], [round + 1, 0, 0]);
        // Anything, anywhere.
        for _ in 0..300 {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            let at = if random & 1 == 0 {
                random as usize >> 8
            } else {
                MARKS + (random as usize >> 8) % 512
            };
            let value = if random & 2 == 0 { random } else { 1 << 63 | (random >> 40) };
            stranger.word(at % LOG_BYTES / 8 * 8).store(value, Ordering::Release);
        }
        // (It is answered, or out, or waits for what it never wrote.)
        let _ = send(&stranger.socket, br#""Settle""#, SendFlags::NOSIGNAL);
        store(&to, 2, round);
        settle(&one);
        until("the others' to go on", || word(&from, 2) == round);
        drop(stranger.socket);
    }
    until("all of them to be gone", || one.state().unwrap().members.len() == 2);
    store(&theirs.0, 0, 1);
    settle(&one);
}

#[test]
fn of_what_the_dead_wrote_there_is_a_prefix() {
    let cluster = Cluster::new(2);
    let (one, other) = (cluster.host(0), cluster.host(1));
    let (to, from) = (both(&one, 1, 4096).0, both(&other, 1, 4096).1);
    for round in 1..40u64 {
        let stranger = Stranger::new(&cluster.path(0));
        let (id, whole) = (stranger.transmits(), round % 5);
        for at in 0..5 {
            stranger.record(at as usize, id, 8 * at, round, at != whole);
        }
        stranger.word(192).store(5 * 32, Ordering::Release);
        drop(stranger.socket);
        until("its end", || one.state().unwrap().members.len() == 2);
        settle(&one);
        let seen: Vec<bool> = (0..5).map(|at| word(&from, at) == round).collect();
        assert_eq!(seen, (0..5).map(|at| at < whole).collect::<Vec<_>>());
        (0..5).for_each(|at| store(&to, at, 0));
        settle(&one);
    }
}

/// One that writes without end, and one that asks without end, beside one that does neither.
#[test]
fn nobody_starves_beside_those_who_want_all() {
    let cluster = Cluster::new(2);
    let (one, other) = (cluster.host(0), cluster.host(1));
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let host = cluster.host(0);
                let to = region(&host, 5, 1 << 20).transmit(Use::default()).unwrap();
                let bytes = vec![7; 1 << 20];
                while !is_over.load(Ordering::Relaxed) {
                    to.put(0, &bytes).unwrap();
                }
            });
            scope.spawn(|| {
                let host = cluster.host(0);
                while !is_over.load(Ordering::Relaxed) {
                    host.locks(5, 1, 0o600, false).unwrap();
                }
            });
        }
        let (to, from) = (both(&one, 1, 4096).0, both(&other, 1, 4096).1);
        for count in 1..=30 {
            store(&to, 0, count);
            until("it to be seen", || word(&from, 0) == count);
        }
        is_over.store(true, Ordering::Relaxed);
    });
}
