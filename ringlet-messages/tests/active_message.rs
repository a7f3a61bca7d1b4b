//! Active Messages between processes that share this one's address space (each a `Process` of its own).

use parking_lot::Mutex;
use ringlet_messages::active_message::*;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, Ordering};
use std::time::{Duration, Instant};

const TAG: Tag = 4711;
const LIMIT: Duration = Duration::from_secs(240);

/// Status, handler and arguments of a message that came back.
type Came = (Status, u8, Vec<u32>);

/// A process with one endpoint, and what came back to it.
struct Node {
    endpoint: Arc<Endpoint>,
    bundle: Bundle,
    returned: Arc<Mutex<Vec<Came>>>,
    process: Process,
}

impl Node {
    fn new() -> Node {
        let process = Process::start().unwrap();
        let bundle = process.bundle().unwrap();
        let endpoint = bundle.endpoint().unwrap();
        endpoint.set_tag(TAG).unwrap();
        let returned = Arc::new(Mutex::new(Vec::new()));
        let list = returned.clone();
        let note = move |_: &Endpoint, what: &Undeliverable| {
            list.lock().push((what.status(), what.handler(), what.arguments().to_vec()));
        };
        endpoint.set_error_handler(Arc::new(note)).unwrap();
        Node { endpoint, bundle, returned, process }
    }

    fn knows(&self, peer: &Node) -> usize {
        self.endpoint.map_any(peer.endpoint.name(), TAG).unwrap()
    }

    fn on(&self, index: u8, handler: impl Fn(&Incoming) + Send + Sync + 'static) {
        self.endpoint.set_handler(index, Arc::new(handler)).unwrap();
    }
}

/// Polls all of them until it is so.
fn until(nodes: &[&Node], done: impl Fn() -> bool) {
    let start = Instant::now();
    while !done() {
        for node in nodes {
            node.bundle.poll().unwrap();
        }
        assert!(start.elapsed() < LIMIT, "not within {LIMIT:?}");
    }
}

/// A server that polls until it is told to stop.
fn serve(node: Node) -> (Arc<AtomicBool>, std::thread::JoinHandle<Node>) {
    let stop = Arc::new(AtomicBool::new(false));
    let told = stop.clone();
    let thread = std::thread::spawn(move || {
        while !told.load(Ordering::Relaxed) {
            node.bundle.wait(Duration::from_millis(20), &[]).unwrap();
            node.bundle.poll().unwrap();
        }
        node
    });
    (stop, thread)
}

#[test]
fn arguments_and_bytes_of_every_size_arrive() {
    let (a, b) = (Node::new(), Node::new());
    let mut memory = vec![0u8; 3 * BUFFER_BYTES];
    // SAFETY: the memory outlives the nodes' polls, and is read only between them.
    unsafe { b.endpoint.set_segment(memory.as_mut_ptr(), memory.len()).unwrap() };
    b.on(1, |message| {
        let (place, len) = message.place();
        // SAFETY: where the message's bytes are.
        let bytes = unsafe { std::slice::from_raw_parts(place, len) };
        message.reply(2, message.arguments(), Payload::Medium(bytes)).unwrap();
    });
    let got = Arc::new(Mutex::new(Vec::new()));
    let list = got.clone();
    a.on(2, move |message| {
        list.lock().push((message.arguments().to_vec(), message.bytes().to_vec()));
    });
    let peer = a.knows(&b);
    let (stop, server) = serve(b);
    for len in [0, 1, 31, 32, 33, 95, 96, 97, 4096, BUFFER_BYTES - 1, BUFFER_BYTES] {
        for count in [0, 1, 8, 9, 16] {
            let arguments: Vec<u32> = (0..count).map(|n| n * 7 + len as u32).collect();
            let bytes: Vec<u8> = (0..len).map(|at| (at * 31 + count as usize) as u8).collect();
            for bulk in [false, true] {
                let offset = BUFFER_BYTES as u64 + 5;
                let payload = match bulk {
                    false => Payload::Medium(&bytes),
                    true => Payload::Bulk { offset, bytes: &bytes },
                };
                a.endpoint.request(peer, 1, &arguments, payload).unwrap();
                until(&[&a], || !got.lock().is_empty());
                assert_eq!(got.lock().pop(), Some((arguments.clone(), bytes.clone())));
            }
        }
    }
    assert_eq!(a.endpoint.request(peer, 1, &[0; 17], Payload::None), Err(Error::BadArgument));
    let large = vec![0; BUFFER_BYTES + 1];
    let payload = Payload::Medium(&large);
    assert_eq!(a.endpoint.request(peer, 1, &[], payload), Err(Error::BadArgument));
    stop.store(true, Ordering::Relaxed);
    drop(server.join().unwrap());
    assert_eq!(*a.returned.lock(), []);
}

#[test]
fn what_is_not_let_in_comes_back() {
    let (a, b) = (Node::new(), Node::new());
    let mut memory = vec![0u8; 100];
    // SAFETY: as above.
    unsafe { b.endpoint.set_segment(memory.as_mut_ptr(), memory.len()).unwrap() };
    b.on(1, |message| message.reply(9, &[6], Payload::None).unwrap());
    let peer = a.knows(&b);
    let stranger = a.endpoint.map_any(b.endpoint.name(), TAG + 1).unwrap();
    let bulk = |offset, bytes| Payload::Bulk { offset, bytes };
    let request = |index, handler, number, payload| {
        a.endpoint.try_request(index, handler, &[number], payload)
    };
    until(&[&a, &b], || request(peer, 1, 1, Payload::None).is_ok());
    request(stranger, 1, 2, Payload::None).unwrap();
    request(peer, 7, 3, Payload::None).unwrap();
    request(peer, 0, 3, Payload::None).unwrap();
    request(peer, 1, 4, bulk(101, &[1])).unwrap();
    request(peer, 1, 5, bulk(99, &[1, 2])).unwrap();
    request(12345, 1, 6, Payload::None).unwrap();
    until(&[&a, &b], || a.returned.lock().len() == 6 && b.returned.lock().len() == 1);
    let mut all = a.returned.lock().clone();
    all.sort_by_key(|each| (each.2[0], u8::MAX - each.1));
    let expected = [
        (Status::BadTag, 1, 2),
        (Status::BadHandler, 7, 3),
        (Status::BadHandler, 0, 3),
        (Status::BadOffset, 1, 4),
        (Status::BadLength, 1, 5),
        (Status::BadEntry, 1, 6),
    ];
    assert_eq!(all, expected.map(|(status, handler, number)| (status, handler, vec![number])));
    // The reply, for which there is no handler, went back to who replied.
    assert_eq!(*b.returned.lock(), [(Status::BadHandler, 9, vec![6])]);
    // A freed endpoint is one that does not exist, now and for who asks later.
    let name = b.endpoint.name();
    b.endpoint.free().unwrap();
    a.returned.lock().clear();
    until(&[&a, &b], || {
        let _ = request(peer, 1, 7, Payload::None);
        !a.returned.lock().is_empty()
    });
    assert_eq!(a.returned.lock()[0].0, Status::BadEndpoint);
    let c = Node::new();
    let index = c.endpoint.map_any(name, TAG).unwrap();
    until(&[&c], || {
        let _ = c.endpoint.try_request(index, 1, &[], Payload::None);
        !c.returned.lock().is_empty()
    });
    assert_eq!(c.returned.lock()[0].0, Status::BadEndpoint);
    assert_eq!(b.endpoint.tag(), Err(Error::Freed));
}

#[test]
fn peers_store_into_a_shared_segment_by_themselves() {
    let (a, b) = (Node::new(), Node::new());
    let base = b.endpoint.allocate_segment(1000).unwrap();
    let base = AtomicPtr::new(base);
    let stored = Arc::new(AtomicU32::new(0));
    let count = stored.clone();
    b.on(1, move |message| {
        assert_eq!(message.stored(), Some((500, 300)));
        count.fetch_add(1, Ordering::Relaxed);
    });
    let peer = a.knows(&b);
    let stranger = a.endpoint.map_any(b.endpoint.name(), TAG + 1).unwrap();
    let store = |index, offset, bytes: &[u8]| {
        let payload = Payload::Bulk { offset, bytes };
        until(&[&a, &b], || a.endpoint.try_request(index, 1, &[], payload).is_ok());
    };
    let byte_at = |at: usize| {
        // SAFETY: within the segment, which nobody writes to at the moment.
        unsafe { base.load(Ordering::Relaxed).add(at).read_volatile() }
    };
    // Until the segment has come, bytes travel in messages; then they are there before any poll of the receiver.
    let start = Instant::now();
    for round in (1..=u8::MAX).cycle() {
        let before = stored.load(Ordering::Relaxed);
        store(peer, 500, &[round; 300]);
        let at_once = byte_at(500) == round && stored.load(Ordering::Relaxed) == before;
        until(&[&a, &b], || stored.load(Ordering::Relaxed) > before);
        assert!(byte_at(500) == round && byte_at(799) == round);
        if at_once {
            break;
        }
        assert!(start.elapsed() < LIMIT);
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(byte_at(499) == 0 && byte_at(800) == 0);
    store(peer, 900, &[1; 101]);
    store(peer, 1001, &[1; 300]);
    until(&[&a, &b], || a.returned.lock().len() == 2);
    // Another segment, of which the sender has not heard when it stores.
    b.endpoint.allocate_segment(2000).unwrap();
    store(peer, 500, &[7; 300]);
    store(stranger, 500, &[8; 300]);
    until(&[&a, &b], || a.returned.lock().len() == 3);
    let statuses: Vec<Status> = a.returned.lock().iter().map(|each| each.0).collect();
    assert_eq!(statuses, [Status::BadLength, Status::BadOffset, Status::BadTag]);
}

#[test]
fn the_end_of_a_process_returns_what_it_did_not_take() {
    let (a, b) = (Node::new(), Node::new());
    let served = Arc::new(AtomicU32::new(0));
    let count = served.clone();
    b.on(1, move |_| {
        count.fetch_add(1, Ordering::Relaxed);
    });
    let peer = a.knows(&b);
    until(&[&a, &b], || a.endpoint.try_request(peer, 1, &[0], Payload::None).is_ok());
    until(&[&a, &b], || served.load(Ordering::Relaxed) == 1);
    for number in 1..=40 {
        a.endpoint.try_request(peer, 1, &[number], Payload::None).unwrap();
    }
    drop(b);
    a.endpoint.request(peer, 1, &[41], Payload::None).unwrap();
    until(&[&a], || a.returned.lock().len() == 41);
    let mut numbers: Vec<u32> = a.returned.lock().iter().map(|each| each.2[0]).collect();
    numbers.sort();
    assert_eq!(numbers, (1..=41).collect::<Vec<_>>());
    // Its endpoint was freed first.
    let is_end = |status| matches!(status, Status::Unreachable | Status::BadEndpoint);
    assert!(a.returned.lock().iter().all(|each| is_end(each.0)));
    // And at once from now on, also by another number.
    let name = a.endpoint.translation(peer).unwrap().unwrap().0;
    let again = a.endpoint.map_any(name, TAG).unwrap();
    a.returned.lock().clear();
    a.endpoint.try_request(again, 1, &[], Payload::None).unwrap();
    assert_eq!(a.returned.lock().len(), 1);
}

#[test]
fn crossing_floods_with_replies_end() {
    const COUNT: u32 = 30_000;
    let run = |node: &Node, peer: usize, got: &AtomicU32| {
        for number in 0..COUNT {
            let bytes = [number as u8; 100];
            let payload = match number % 3 {
                0 => Payload::None,
                1 => Payload::Medium(&bytes[..8]),
                _ => Payload::Medium(&bytes),
            };
            node.endpoint.request(peer, 1, &[number], payload).unwrap();
        }
        let start = Instant::now();
        while got.load(Ordering::Relaxed) < 2 * COUNT {
            node.bundle.wait(LIMIT, &[]).unwrap();
            node.bundle.poll().unwrap();
            assert!(start.elapsed() < LIMIT);
        }
    };
    let nodes = [Node::new(), Node::new()];
    let counts = [(); 2].map(|()| Arc::new(AtomicU32::new(0)));
    for (node, count) in nodes.iter().zip(&counts) {
        let (next, requests, replies) = (AtomicU32::new(0), count.clone(), count.clone());
        node.on(1, move |message| {
            // In order, from one peer.
            assert_eq!(message.arguments()[0], next.fetch_add(1, Ordering::Relaxed));
            requests.fetch_add(1, Ordering::Relaxed);
            message.reply(2, message.arguments(), Payload::None).unwrap();
            assert_eq!(message.reply(2, &[], Payload::None), Err(Error::InHandler));
            let endpoint = message.endpoint();
            assert_eq!(endpoint.request(0, 1, &[], Payload::None), Err(Error::InHandler));
        });
        node.on(2, move |message| {
            replies.fetch_add(1, Ordering::Relaxed);
            assert_eq!(message.reply(2, &[], Payload::None), Err(Error::InHandler));
        });
    }
    let peers = [nodes[0].knows(&nodes[1]), nodes[1].knows(&nodes[0])];
    std::thread::scope(|scope| {
        for ((node, peer), count) in nodes.iter().zip(peers).zip(&counts) {
            scope.spawn(move || run(node, peer, count));
        }
    });
    assert!(nodes.iter().all(|node| node.returned.lock().is_empty()));
}

#[test]
fn an_endpoint_may_be_its_own_peer_and_move() {
    let node = Node::new();
    let count = Arc::new(AtomicU32::new(0));
    let counter = count.clone();
    node.on(1, move |_| {
        counter.fetch_add(1, Ordering::Relaxed);
    });
    let peer = node.knows(&node);
    until(&[&node], || node.endpoint.try_request(peer, 1, &[], Payload::None).is_ok());
    until(&[&node], || count.load(Ordering::Relaxed) == 1);
    let other = node.process.bundle().unwrap();
    node.bundle.move_endpoint(&node.endpoint, &other).unwrap();
    assert_eq!(node.bundle.move_endpoint(&node.endpoint, &other), Err(Error::BadArgument));
    node.endpoint.request(peer, 1, &[], Payload::None).unwrap();
    let start = Instant::now();
    while count.load(Ordering::Relaxed) < 2 {
        assert_eq!(node.bundle.poll(), Ok(0));
        other.poll().unwrap();
        assert!(start.elapsed() < LIMIT);
    }
    other.move_endpoint(&node.endpoint, &node.bundle).unwrap();
    until(&[&node], || node.endpoint.try_request(peer, 1, &[], Payload::None).is_ok());
    until(&[&node], || count.load(Ordering::Relaxed) == 3);
}

#[test]
fn many_senders_are_all_heard_while_the_receiver_sleeps() {
    const SENDERS: usize = 12;
    const EACH: u32 = 300;
    let (server, count) = (Node::new(), Arc::new(AtomicU32::new(0)));
    let counter = count.clone();
    server.on(1, move |_| {
        counter.fetch_add(1, Ordering::Relaxed);
    });
    let name = server.endpoint.name();
    std::thread::scope(|scope| {
        for sender in 0..SENDERS {
            scope.spawn(move || {
                let node = Node::new();
                let peer = node.endpoint.map_any(name, TAG).unwrap();
                for number in 0..EACH {
                    node.endpoint.request(peer, 1, &[number], Payload::None).unwrap();
                    if (number as usize + sender).is_multiple_of(50) {
                        std::thread::sleep(Duration::from_millis(2));
                    }
                }
                // What was sent is delivered though the sender is gone.
                assert!(node.returned.lock().is_empty());
            });
        }
        let start = Instant::now();
        while count.load(Ordering::Relaxed) < SENDERS as u32 * EACH {
            server.bundle.wait(LIMIT, &[]).unwrap();
            server.bundle.poll().unwrap();
            assert!(start.elapsed() < LIMIT);
        }
    });
}

/// Whoever says whatever at the rendezvous harms nobody else.
#[test]
fn noise_at_the_rendezvous_is_ended() {
    use ringlet_core::active::layout::{BELLS_BYTES, SEGMENT_BYTES};
    use ringlet_linux::{map, meet, sys};
    use std::os::fd::{FromRawFd, OwnedFd};

    let (a, b) = (Node::new(), Node::new());
    let name = b.endpoint.name().to_bytes();
    let hex: String = name[..16].iter().map(|byte| format!("{byte:02x}")).collect();
    let rendezvous = format!("ringlet-am/{hex}");
    // A true peer that is there all the while.
    let served = Arc::new(AtomicU32::new(0));
    let count = served.clone();
    b.on(1, move |_| {
        count.fetch_add(1, Ordering::Relaxed);
    });
    let peer = a.knows(&b);
    until(&[&a, &b], || a.endpoint.try_request(peer, 1, &[], Payload::None).is_ok());
    let memory = |bytes| map::sealed_memfd(c"noise", bytes, 0).unwrap();
    let passed = [memory(4096), memory(BELLS_BYTES), memory(SEGMENT_BYTES)];
    let mut dice = 12345u64;
    let mut roll = |sides: u64| {
        dice = dice.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (dice >> 33) % sides
    };
    let (mut ended, start) = (0, Instant::now());
    for _ in 0..300 {
        let Ok(socket) = meet::look_named(rendezvous.as_bytes()) else { continue };
        // SAFETY: made just now.
        let _socket = unsafe { OwnedFd::from_raw_fd(socket) };
        for step in 0..6 {
            // A note as it is due, most times (kind, status, numbers, endpoint, name), after a greeting.
            let mut note = [0u8; 60];
            note[0] = if step == 0 && roll(4) != 0 { 1 } else { roll(8) as u8 };
            note[4] = roll(3) as u8;
            (8..28).for_each(|at| note[at] = if roll(2) == 0 { 0 } else { roll(3) as u8 });
            note[28..].copy_from_slice(&name);
            note[28] ^= roll(8) as u8 / 7;
            let len = if roll(20) == 0 { roll(60) as usize } else { 60 };
            let which = passed[if step == 0 { 1 } else { roll(3) as usize }];
            let fds = if roll(5) == 0 { &[][..] } else { &[which][..] };
            // No descriptor is taken before it is known from whom.
            let mut sent = meet::send(socket, &note[..len], fds);
            while sent == Err(sys::Errno::EPERM) && start.elapsed() < LIMIT {
                std::thread::yield_now();
                sent = meet::send(socket, &note[..len], fds);
            }
            if sent.is_err() {
                ended += 1;
                break;
            }
            if roll(10) == 0 {
                std::thread::sleep(Duration::from_micros(300));
            }
        }
        b.bundle.poll().unwrap();
    }
    assert!(ended > 0);
    passed.into_iter().for_each(sys::close);
    // It serves its true peers as ever, the old one and a new one.
    let before = served.load(Ordering::Relaxed);
    a.endpoint.request(peer, 1, &[], Payload::None).unwrap();
    until(&[&a, &b], || served.load(Ordering::Relaxed) > before);
    let c = Node::new();
    let peer = c.knows(&b);
    until(&[&b, &c], || c.endpoint.try_request(peer, 1, &[], Payload::None).is_ok());
    until(&[&b, &c], || served.load(Ordering::Relaxed) > before + 1);
    assert!(a.returned.lock().is_empty() && c.returned.lock().is_empty());
}
