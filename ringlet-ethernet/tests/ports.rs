//! Ports of one network in one process, each queue a thread: what each is sent comes once, in order, and to nobody else, while ports come and die.

#[allow(dead_code)] // (It has what tests of several processes need.)
mod member;

use std::collections::HashMap;
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use member::{BROADCAST, LIMIT, serve, until};
use ringlet_ethernet::frame::{HEAD_BYTES, HEADER_BYTES, MESSAGE_MOST};
use ringlet_ethernet::port::{Event, Options, Port, Queue};
use ringlet_ethernet::room::{Room, Rules};
use ringlet_ethernet::{Mac, Policy};

const RING_BYTES: usize = 2 << 20;

fn room(folder: &Path, addresses: Policy) -> Room {
    Room::create(folder, "net", Rules { addresses, storm: 0, bridge: false }, None).unwrap();
    Room::open(folder, "net").unwrap()
}

fn mac(number: u8) -> Mac {
    Mac([2, 0, 0, 0, 0, number])
}

fn message(to: Mac, from: Mac, payload: &[u8]) -> Vec<u8> {
    [&[0; HEADER_BYTES][..], &to.0, &from.0, &[0x88, 0xb5], payload].concat()
}

fn open(room: &Room, number: u8, queues: u16) -> (Port, Vec<Queue>, Arc<AtomicU64>) {
    let others = Arc::new(AtomicU64::new(0));
    let seen = Arc::clone(&others);
    let options =
        Options { name: format!("port{number}"), mac: mac(number), queues, ring_bytes: RING_BYTES };
    let (port, queues) = Port::open(room.clone(), options, move |event| {
        if let Event::Ports(count) = event {
            seen.store(count as u64, Ordering::SeqCst);
        }
    })
    .unwrap();
    (port, queues, others)
}

/// A port whose threads say what they receive, and send what they are told.
struct Actor {
    port: Port,
    orders: Vec<(Sender<Vec<u8>>, UnixStream)>,
    heard: Receiver<Vec<u8>>,
    others: Arc<AtomicU64>,
    threads: Vec<thread::JoinHandle<()>>,
}

impl Actor {
    fn new(room: &Room, number: u8, queues: u16) -> Actor {
        let (port, queues, others) = open(room, number, queues);
        let (says, heard) = channel();
        let (mut orders, mut threads) = (Vec::new(), Vec::new());
        for queue in queues {
            let (order, told) = channel();
            let (rings, bell) = UnixStream::pair().unwrap();
            bell.set_nonblocking(true).unwrap();
            let says = says.clone();
            orders.push((order, rings));
            threads.push(thread::spawn(move || {
                serve(queue, &told, &bell, |bytes| _ = says.send(bytes))
            }));
        }
        Actor { port, orders, heard, others, threads }
    }

    fn send(&self, queue: usize, message: Vec<u8>) {
        let (order, bell) = &self.orders[queue];
        order.send(message).unwrap();
        (&*bell).write_all(&[0]).unwrap();
    }

    fn meets(&self, count: u64) {
        until("others", || self.others.load(Ordering::SeqCst) == count);
    }

    fn end(self) {
        self.port.end();
        self.threads.into_iter().for_each(|thread| thread.join().unwrap());
    }
}

fn numbers(actor: &Actor, count: usize) -> HashMap<Mac, Vec<u64>> {
    let mut found: HashMap<Mac, Vec<u64>> = HashMap::new();
    for _ in 0..count {
        let bytes = actor.heard.recv_timeout(LIMIT).expect("a frame was lost");
        let from = Mac(bytes[HEADER_BYTES + 6..HEADER_BYTES + 12].try_into().unwrap());
        let number = u64::from_le_bytes(bytes[HEAD_BYTES..HEAD_BYTES + 8].try_into().unwrap());
        found.entry(from).or_default().push(number);
    }
    found
}

#[test]
fn frames_come_once_in_order_and_to_nobody_else() {
    let folder = tempfile::tempdir().unwrap();
    let room = room(folder.path(), Policy::Static);
    let actors: Vec<Actor> = (0..4).map(|number| Actor::new(&room, number, 1)).collect();
    actors.iter().for_each(|actor| actor.meets(3));
    // (So few that no queue is full, though nobody looks before all is sent: none goes back to its first slot, behind which there may be less room.)
    const EACH: u64 = 60;
    for number in 0..EACH {
        for (from, actor) in actors.iter().enumerate() {
            let to = if number % 2 == 0 { BROADCAST } else { mac((from as u8 + 1) % 4) };
            actor.send(0, message(to, mac(from as u8), &number.to_le_bytes()));
        }
    }
    for (at, actor) in actors.iter().enumerate() {
        // Each other's broadcasts, and all that one has sent.
        let found = numbers(actor, (EACH / 2 * 3 + EACH / 2) as usize);
        for from in (0..4u8).filter(|from| *from != at as u8) {
            let whole = at as u8 == (from + 1) % 4;
            let expected: Vec<u64> = (0..EACH).filter(|number| whole || number % 2 == 0).collect();
            assert_eq!(found[&mac(from)], expected, "from {from} to {at}");
        }
        assert!(actor.heard.try_recv().is_err(), "more than was sent");
    }
    actors.into_iter().for_each(Actor::end);
}

#[test]
fn the_only_other_port_is_waited_for() {
    let folder = tempfile::tempdir().unwrap();
    let room = room(folder.path(), Policy::Moving);
    let (one, other) = (Actor::new(&room, 1, 2), Actor::new(&room, 2, 3));
    one.meets(1);
    other.meets(1);
    // Much more than there is room for; none is lost, and the longest pass.
    const EACH: u64 = 500;
    for number in 0..EACH {
        for queue in 0..2 {
            let mut payload = vec![queue as u8; MESSAGE_MOST - HEAD_BYTES];
            payload[..8].copy_from_slice(&number.to_le_bytes());
            one.send(queue, message(mac(2), mac(1 + 16 * queue as u8), &payload));
        }
    }
    let found = numbers(&other, 2 * EACH as usize);
    for from in [1, 17] {
        assert_eq!(found[&mac(from)], (0..EACH).collect::<Vec<_>>());
    }
    one.end();
    other.end();
}

/// A network that is removed under its ports, and made again, is one: whoever was there, and whoever comes then.
#[test]
fn a_network_that_was_made_again_is_one() {
    let folder = tempfile::tempdir().unwrap();
    let before = room(folder.path(), Policy::Moving);
    let mut actors = vec![Actor::new(&before, 1, 1), Actor::new(&before, 2, 1)];
    actors.iter().for_each(|actor| actor.meets(1));
    std::fs::remove_dir_all(folder.path().join("net")).unwrap();
    actors.push(Actor::new(&room(folder.path(), Policy::Moving), 3, 1));
    actors.iter().for_each(|actor| actor.meets(2));
    until("their sockets", || before.ports().unwrap().len() == 3);
    for (nth, from) in actors.iter().enumerate() {
        let payload = [&(nth as u64).to_le_bytes()[..], &[0; 50]].concat();
        from.send(0, message(BROADCAST, mac(nth as u8 + 1), &payload));
    }
    for actor in &actors {
        assert_eq!(numbers(actor, 2).len(), 2);
    }
    actors.into_iter().for_each(Actor::end);
    assert!(before.ports().unwrap().is_empty());
}

#[test]
fn ports_that_come_and_go_at_once_are_known_to_all_who_stay() {
    let folder = tempfile::tempdir().unwrap();
    let room = room(folder.path(), Policy::Moving);
    let stays: Vec<Actor> = (0..2).map(|number| Actor::new(&room, number, 1)).collect();
    for round in 0..10u64 {
        let comers: Vec<_> = (2..8)
            .map(|number| {
                let room = room.clone();
                thread::spawn(move || Actor::new(&room, number, 1 + u16::from(number) % 3))
            })
            .collect();
        let comers: Vec<Actor> = comers.into_iter().map(|comer| comer.join().unwrap()).collect();
        stays.iter().chain(&comers).for_each(|actor| actor.meets(7));
        comers[0].send(0, message(BROADCAST, mac(2), &round.to_le_bytes()));
        for actor in &stays {
            assert_eq!(numbers(actor, 1)[&mac(2)], [round]);
        }
        comers.into_iter().for_each(Actor::end);
        stays.iter().for_each(|actor| actor.meets(1));
    }
    assert_eq!(room.ports().unwrap().len(), 2);
    stays.into_iter().for_each(Actor::end);
    assert!(room.ports().unwrap().is_empty());
}

#[test]
fn whoever_sleeps_is_woken() {
    let folder = tempfile::tempdir().unwrap();
    let room = room(folder.path(), Policy::Moving);
    let (one, mut ones, there) = open(&room, 1, 1);
    let (other, others, _) = open(&room, 2, 1);
    let is_over = Arc::new(AtomicBool::new(false));
    let echo = {
        let (is_over, mut queue) = (Arc::clone(&is_over), others.into_iter().next().unwrap());
        thread::spawn(move || {
            while !is_over.load(Ordering::SeqCst) && !queue.is_over() {
                queue.begin();
                let mut came = Vec::new();
                queue.receive(64, |arrived| {
                    let mut bytes = vec![0; arrived.len];
                    arrived.copy_to(&mut bytes);
                    came.push(bytes[HEAD_BYTES..].to_vec());
                    Ok(())
                });
                came.iter().for_each(|payload| queue.send(&message(mac(1), mac(2), payload)));
                if came.is_empty() {
                    queue.wait(0, || false).unwrap();
                }
            }
        })
    };
    until("the other", || there.load(Ordering::SeqCst) == 1);
    let queue = &mut ones[0];
    for number in 0..5000u64 {
        queue.begin();
        queue.send(&message(mac(2), mac(1), &number.to_le_bytes()));
        let mut back = None;
        while back.is_none() {
            queue.begin();
            queue.receive(64, |arrived| {
                let mut bytes = vec![0; arrived.len];
                arrived.copy_to(&mut bytes);
                back = Some(u64::from_le_bytes(bytes[HEAD_BYTES..].try_into().unwrap()));
                Ok(())
            });
            if back.is_none() {
                queue.wait(if number % 2 == 0 { 0 } else { 50 }, || false).unwrap();
            }
        }
        assert_eq!(back, Some(number));
    }
    is_over.store(true, Ordering::SeqCst);
    other.end();
    echo.join().unwrap();
    assert!(one.totals().slept > 0 && one.totals().rang > 0);
}

#[test]
fn whoever_never_waits_hears_too() {
    let folder = tempfile::tempdir().unwrap();
    let room = room(folder.path(), Policy::Moving);
    let (_one, mut ones, _) = open(&room, 1, 1);
    let (_other, mut others, there) = open(&room, 2, 1);
    until("the other", || there.load(Ordering::SeqCst) == 1);
    let look = |queue: &mut Queue| {
        queue.begin();
        queue.receive(64, |_| Ok(()))
    };
    for _ in 0..20 {
        // (So long that the strand is not looked at any more, and rings.)
        (0..1000).for_each(|_| assert!(!look(&mut others[0])));
        ones[0].begin();
        ones[0].send(&message(mac(2), mac(1), &[0; 8]));
        until("a frame", || look(&mut others[0]));
    }
}

/// Who has met another one has been met: what that one sends from then on comes.
#[test]
fn who_has_come_is_sent_to() {
    let folder = tempfile::tempdir().unwrap();
    let room = room(folder.path(), Policy::Moving);
    let (_one, mut ones, _) = open(&room, 1, 1);
    for round in 0..500u64 {
        let (_other, mut others, there) = open(&room, 2 + (round % 100) as u8, 1);
        until("the other", || there.load(Ordering::SeqCst) == 1);
        ones[0].begin();
        ones[0].send(&message(BROADCAST, mac(1), &round.to_le_bytes()));
        until("a frame", || {
            others[0].begin();
            others[0].receive(1, |_| Ok(()))
        });
    }
}

/// However many queues a port has, and so strands to each other: it is one.
#[test]
fn a_storm_is_a_port_s_and_not_a_queue_s() {
    const RATE: u64 = 100;
    let folder = tempfile::tempdir().unwrap();
    let rules = Rules { addresses: Policy::Moving, storm: RATE, bridge: false };
    Room::create(folder.path(), "net", rules, None).unwrap();
    let room = Room::open(folder.path(), "net").unwrap();
    let began = Instant::now();
    let (one, other) = (Actor::new(&room, 1, 8), Actor::new(&room, 2, 1));
    one.meets(1);
    other.meets(1);
    let lost = || other.port.totals().dropped["too many to all ports"];
    // (Some of its strands may come later than the first.)
    let early = || one.port.totals().dropped["no other port"];
    let mut sent = 0;
    until("a storm", || {
        for queue in 0..8 {
            (0..RATE).for_each(|_| one.send(queue, message(BROADCAST, mac(1), &[0; 8])));
        }
        sent += 8 * RATE;
        until("all", || other.port.totals().received + lost() + early() == sent);
        lost() > 7 * RATE
    });
    let most = RATE * (2 + began.elapsed().as_secs());
    assert!(other.port.totals().received <= most, "{:?}", other.port.totals());
    one.end();
    other.end();
}

/// Who asks for the end of a port hears of it when all of it has gone, also what its owner has with `tell`: the device.
#[test]
fn an_end_is_told_behind_it() {
    struct Slow(Arc<AtomicBool>);
    impl Drop for Slow {
        fn drop(&mut self) {
            thread::sleep(Duration::from_millis(300));
            self.0.store(true, Ordering::SeqCst);
        }
    }
    let folder = tempfile::tempdir().unwrap();
    let room = room(folder.path(), Policy::Moving);
    let (has_gone, (ends, ended)) = (Arc::new(AtomicBool::new(false)), channel());
    let held = Slow(Arc::clone(&has_gone));
    let options = Options { name: "port".into(), mac: mac(1), queues: 1, ring_bytes: RING_BYTES };
    let opened = Port::open(room.clone(), options, move |event| {
        let _device = &held;
        if matches!(event, Event::End) {
            ends.send(()).unwrap();
        }
    });
    let (port, queues) = opened.unwrap();
    let id = room.ports().unwrap()[0];
    let waits = thread::spawn(move || {
        room.end(id).unwrap();
        has_gone.load(Ordering::SeqCst)
    });
    ended.recv_timeout(LIMIT).unwrap();
    drop((port, queues));
    assert!(waits.join().unwrap(), "it was told before");
}

#[test]
fn what_can_t_be_a_port_is_said() {
    let folder = tempfile::tempdir().unwrap();
    let room = room(folder.path(), Policy::Moving);
    let good = Options { name: "port".into(), mac: mac(1), queues: 1, ring_bytes: RING_BYTES };
    let says = |options: Options, what: &str| {
        let error = Port::open(room.clone(), options, |_| ()).err().expect("it is opened");
        assert!(format!("{error:#}").contains(what), "{error:#}");
    };
    says(Options { queues: 17, ..good.clone() }, "1 to 16 queues");
    says(Options { name: "a\nb".into(), ..good.clone() }, "control characters");
    for ring_bytes in [1 << 20, 3 << 20, 16 << 20] {
        says(Options { ring_bytes, ..good.clone() }, "a power of two");
    }
}
