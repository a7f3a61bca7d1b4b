//! Programs that are ports: frames written and held where they lie, room that is waited for, and a descriptor that tells.

use std::os::fd::AsFd;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use ringlet_ethernet::frame::{HEAD_BYTES, HEADER_BYTES, MESSAGE_MOST};
use ringlet_ethernet::room::{Room, Rules};
use ringlet_ethernet::{Mac, Options, Policy, Port, Queue, Refused};
use rustix::event::{PollFd, PollFlags, poll};

/// Only a fault meets it.
const LIMIT: Duration = Duration::from_secs(60);
const BROADCAST: Mac = Mac([0xff; 6]);

fn mac(number: u8) -> Mac {
    Mac([2, 0, 0, 0, 0, number])
}

fn ports(folder: &Path, count: u8) -> Vec<(Port, Queue)> {
    Room::create(folder, "net", Rules { addresses: Policy::Static, storm: 0, bridge: false }, None)
        .unwrap();
    let room = Room::open(folder, "net").unwrap();
    let open = |number| {
        let options = Options::new(format!("port{number}"), mac(number));
        let (port, queues) = Port::open(room.clone(), options, |_| ()).unwrap();
        (port, queues.into_iter().next().unwrap())
    };
    let mut ports: Vec<_> = (0..count).map(open).collect();
    for (at, (_, queue)) in ports.iter_mut().enumerate() {
        let began = Instant::now();
        for other in (0..count).filter(|other| usize::from(*other) != at) {
            while queue.reserve(mac(other), HEAD_BYTES).err() == Some(Refused::NoPort) {
                assert!(began.elapsed() < LIMIT, "ports do not meet");
                thread::sleep(Duration::from_millis(1));
            }
        }
    }
    ports
}

/// A message with these bytes, in place.
fn put(queue: &mut Queue, from: u8, to: Mac, payload: &[u8]) -> Result<(), Refused> {
    put_quietly(queue, from, to, payload)?;
    queue.flush();
    Ok(())
}

fn put_quietly(queue: &mut Queue, from: u8, to: Mac, payload: &[u8]) -> Result<(), Refused> {
    let mut place = queue.reserve(to, HEAD_BYTES + payload.len())?;
    place.write(HEADER_BYTES, &to.0);
    place.write(HEADER_BYTES + 6, &mac(from).0);
    place.write(HEADER_BYTES + 12, &[0x88, 0xb5]);
    place.write(HEAD_BYTES, payload);
    place.send_quietly()
}

fn has_told(queue: &Queue, timeout: Duration) -> bool {
    let mut fds = [PollFd::from_borrowed_fd(queue.as_fd(), PollFlags::IN)];
    poll(&mut fds, Some(&timeout.try_into().unwrap())).unwrap() > 0
}

/// Sleeps by the descriptor until there is something.
fn sleep(queue: &mut Queue) {
    if !queue.arm() {
        assert!(has_told(queue, LIMIT), "nothing comes");
    }
}

#[test]
fn who_is_told_finds_what_came_and_what_is_held_stays() {
    let folder = tempfile::tempdir().unwrap();
    let mut ports = ports(folder.path(), 2);
    let (_, mut other) = ports.pop().unwrap();
    let (_, mut one) = ports.pop().unwrap();
    // More than the ring has slots for, and of every kind of size: held, then released.
    const COUNT: usize = 20_000;
    let size = |number: usize| [8, 32, 33, 1000, 60_000][number % 5];
    let sender = thread::spawn(move || {
        for number in 0..COUNT {
            let mut payload = vec![number as u8; size(number)];
            payload[..8].copy_from_slice(&number.to_le_bytes());
            // (The receiver sleeps by its descriptor: it is woken for the last of several, or when there is no room for more.)
            while let Err(refused) = put_quietly(&mut one, 0, mac(1), &payload) {
                assert_eq!(refused, Refused::Full);
                sleep(&mut one);
                one.begin();
            }
            if number % 7 == 0 {
                one.flush();
            }
        }
        one.flush();
        one
    });
    let mut next = 0;
    while next < COUNT {
        other.begin();
        let mut held = Vec::new();
        let any = other.hold(64, |arrived| {
            held.push((arrived.pointer().wrapping_add(HEAD_BYTES), arrived.len - HEAD_BYTES));
            Ok(())
        });
        // (In this process: what was taken lies in memory that stays mapped until it is released.)
        for (at, len) in held {
            // SAFETY: held, and its sender writes no more.
            let bytes = unsafe { std::slice::from_raw_parts(at, len) };
            assert_eq!((len, &bytes[..8]), (size(next), &next.to_le_bytes()[..]));
            assert!(bytes[8..].iter().all(|byte| *byte == next as u8), "{next} was written over");
            next += 1;
        }
        if !any {
            sleep(&mut other);
        }
    }
    sender.join().unwrap();
    other.release();
    other.begin();
    // (Behind the sender's end it is told of that.)
    assert!(!other.hold(1, |_| panic!("more than was sent")));
}

fn take(queue: &mut Queue) -> Vec<Vec<u8>> {
    let mut found = Vec::new();
    while found.is_empty() {
        queue.begin();
        queue.receive(64, |arrived| {
            let mut bytes = vec![0; arrived.len];
            arrived.copy_to(&mut bytes);
            assert_eq!(bytes[..HEADER_BYTES], [0; HEADER_BYTES]);
            found.push(bytes[HEAD_BYTES..].to_vec());
            Ok(())
        });
        if found.is_empty() {
            sleep(queue);
        }
    }
    found
}

/// What is sent quietly comes before what is sent loudly behind it, however many they are.
#[test]
fn what_is_sent_quietly_keeps_its_place() {
    let folder = tempfile::tempdir().unwrap();
    let mut ports = ports(folder.path(), 2);
    let [(_one, one), (_other, other)] = &mut ports[..] else { panic!("two ports") };
    let mut next = 0u32;
    // (So many find room wherever the ring is.)
    for count in [1, 2, 8, 16, 16, 16, 16] {
        for number in 0..count {
            // (Loudly, and not by the call that flushes: for all, which is copied.)
            if number == count - 1 {
                let frame = [&[0; HEADER_BYTES][..], &BROADCAST.0, &mac(0).0, &[0x88, 0xb5]];
                one.send(&[&frame.concat()[..], &(next + number).to_le_bytes()].concat());
            } else {
                put_quietly(one, 0, mac(1), &(next + number).to_le_bytes()).unwrap();
            }
        }
        let end = next + count;
        while next < end {
            for came in take(other) {
                assert_eq!(came, next.to_le_bytes());
                next += 1;
            }
        }
    }
}

#[test]
fn a_place_is_the_receivers_or_is_for_all() {
    let folder = tempfile::tempdir().unwrap();
    let mut ports = ports(folder.path(), 3);
    let (one, others) = ports.split_first_mut().unwrap();
    // To all, to one, to nobody who is known.
    for (to, who) in [(BROADCAST, &[0, 1][..]), (mac(2), &[1]), (mac(1), &[0]), (mac(77), &[0, 1])]
    {
        put(&mut one.1, 0, to, &[to.0[5]; 20]).unwrap();
        for at in who {
            assert_eq!(take(&mut others[*at].1), [[to.0[5]; 20]], "{to} at {at}");
        }
    }
    let queue = &mut one.1;
    for len in [HEAD_BYTES - 1, MESSAGE_MOST + 1] {
        assert_eq!(queue.reserve(mac(1), len).err(), Some(Refused::Length));
    }
    // More than was asked for is not sent; what is sent, or forgotten, is not there any more.
    let _ = queue.reserve(mac(1), 100).unwrap().keep();
    assert_eq!(queue.send_place(101), Err(Refused::Length));
    assert_eq!(queue.send_place(100), Err(Refused::NoPort));
    // A queue that is full is one port's; others get what is for them, and who waits for it is told of room.
    let mut sent = 0;
    while put(queue, 0, mac(1), &[7; 1000]).is_ok() {
        sent += 1;
    }
    assert_eq!(put(queue, 0, mac(1), &[7; 1000]), Err(Refused::Full));
    put(queue, 0, mac(2), &[8; 20]).unwrap();
    assert_eq!(take(&mut others[1].1), [[8; 20]]);
    assert_eq!(put(queue, 0, mac(1), &[7; 1000]), Err(Refused::Full));
    // (It may be told of what is over; not for ever.)
    let is_quiet = |queue: &mut Queue| {
        queue.begin();
        !queue.arm() && !has_told(queue, Duration::from_millis(20))
    };
    assert!((0..5).any(|_| is_quiet(queue)), "room that is none");
    while sent > 0 {
        sent -= take(&mut others[0].1).len();
    }
    assert!(has_told(queue, LIMIT), "room is not told of");
    queue.begin();
    put(queue, 0, mac(1), &[7; 1000]).unwrap();
    // Who is over is told; what is reserved for one that goes is lost, and nothing else.
    let _ = queue.reserve(mac(2), 100).unwrap().keep();
    drop(ports.pop());
    let (one, _) = ports.split_first_mut().unwrap();
    let began = Instant::now();
    while one.0.others() > 1 {
        assert!(began.elapsed() < LIMIT, "a port that has gone");
        thread::sleep(Duration::from_millis(1));
    }
    one.1.begin();
    assert_eq!(one.1.send_place(100), Err(Refused::NoPort));
    assert!((0..5).any(|_| {
        one.1.begin();
        !one.1.wait_for(0, Some(Duration::ZERO)).unwrap()
    }));
    one.0.ender().end();
    assert!(one.1.wait_for(0, Some(LIMIT)).unwrap() && one.1.is_over());
}

/// One of several that has no room is waited for; one that takes nothing is so once, and holds up nobody from then on.
#[test]
fn one_of_several_is_waited_for_while_it_takes_something() {
    let folder = tempfile::tempdir().unwrap();
    let mut ports = ports(folder.path(), 3);
    let (one, others) = ports.split_first_mut().unwrap();
    let queue = &mut one.1;
    let offers = |queue: &mut Queue, to: u8| {
        let head = [&[0; HEADER_BYTES][..], &mac(to).0, &mac(0).0, &[0x88, 0xb5]].concat();
        queue.begin();
        queue.offer(&[&head[..], &[to; 1000]].concat())
    };
    // As a device does: what has no room is offered again.
    let fill = |queue: &mut Queue| {
        // (Nobody else was sent to lately.)
        thread::sleep(Duration::from_millis(1100));
        (0..).take_while(|_| offers(queue, 1)).count()
    };
    let drain = |other: &mut Queue, mut sent: usize| {
        while sent > 0 {
            sent -= take(other).len();
        }
    };
    for _ in 0..2 {
        let sent = fill(queue);
        drain(&mut others[0].1, sent);
        assert!(offers(queue, 1));
        drain(&mut others[0].1, 1);
    }
    let sent = fill(queue);
    let began = Instant::now();
    while !offers(queue, 1) {
        assert!(began.elapsed() < LIMIT, "it is waited for without an end");
        queue.wait_for(0, Some(LIMIT)).unwrap();
    }
    for _ in 0..100 {
        assert!(offers(queue, 1) && offers(queue, 2));
        assert_eq!(take(&mut others[1].1), [[2; 1000]]);
    }
    drain(&mut others[0].1, sent);
    assert!(offers(queue, 1));
    drain(&mut others[0].1, 1);
    fill(queue);
}
