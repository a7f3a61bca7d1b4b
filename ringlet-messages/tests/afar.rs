//! Endpoints that are offered, and found, by way of a node service: one of this test's, which has all meet whom they ask for.

use parking_lot::Mutex;
use ringlet::handshake::ROOM_BYTES;
use ringlet::interconnect::node::{APART, Ask, CALL, GREETING, HERE, MET, Message};
use ringlet::reasons::Reason;
use ringlet_linux::{fd, meet};
use ringlet_messages::active_message::*;
use ringlet_messages::native::{self, Channel, Kind, Listener, Options, Receives, Sends, connect};
use std::collections::HashMap;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

const TAG: Tag = 4711;
const LIMIT: Duration = Duration::from_secs(240);
const PATIENCE: native::Timeout = Some(LIMIT);

/// What it knows: who offers, by a line to them.
type Offers = Arc<Mutex<HashMap<String, OwnedFd>>>;

fn own(fd: i32) -> OwnedFd {
    // SAFETY: made just now, ours alone.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

fn say(to: &OwnedFd, kind: u16, reason: Reason, fds: &[i32]) {
    let said = Message { kind, reason: reason as u32, ..Message::default() };
    let _ = meet::send(to.as_raw_fd(), said.frame().as_bytes(), fds);
}

/// Whose line is closed offers nothing any more.
fn has_gone(line: &OwnedFd) -> bool {
    fd::pending(line.as_raw_fd(), libc::POLLRDHUP) & libc::POLLRDHUP != 0
}

/// One who has come, who asks once.
fn attend(guest: OwnedFd, offers: &Offers) {
    say(&guest, GREETING, Reason::None, &[]);
    let mut bytes = [0; ROOM_BYTES];
    let start = Instant::now();
    let asked = loop {
        match meet::receive(guest.as_raw_fd(), &mut bytes) {
            Ok((len @ 1.., _)) => break Ask::read(&bytes[..len]).unwrap(),
            Ok(_) => return,
            Err(_) => std::thread::sleep(Duration::from_millis(1)),
        }
        assert!(start.elapsed() < LIMIT);
    };
    let name = asked.text().unwrap().to_owned();
    let mut offers = offers.lock();
    offers.retain(|_, line| !has_gone(line));
    if asked.kind != CALL && offers.contains_key(&name) {
        return say(&guest, APART, Reason::BadPeer, &[]);
    }
    if asked.kind != CALL {
        say(&guest, MET, Reason::None, &[]);
        offers.insert(name, guest);
        return;
    }
    // (Who calls by another node's name comes from there.)
    let (node, name) = name.split_once(':').unwrap();
    match offers.get(name) {
        Some(line) => {
            let [one, other] = meet::pair().unwrap().map(own);
            let called = Ask::new(CALL, if node == "localhost" { HERE } else { node }).unwrap();
            let _ = meet::send(line.as_raw_fd(), called.frame().as_bytes(), &[one.as_raw_fd()]);
            say(&guest, MET, Reason::None, &[other.as_raw_fd()]);
        }
        None => say(&guest, APART, Reason::NoPeer, &[]),
    }
}

fn listen(path: &Path) -> OwnedFd {
    // SAFETY: zero is a valid sockaddr_un; a name and its length.
    unsafe {
        let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC;
        let socket = own(libc::socket(libc::AF_UNIX, kind, 0));
        let mut name: libc::sockaddr_un = std::mem::zeroed();
        name.sun_family = libc::AF_UNIX as _;
        for (to, byte) in name.sun_path.iter_mut().zip(path.as_os_str().as_bytes()) {
            *to = *byte as _;
        }
        let len = size_of_val(&name) as u32;
        assert_eq!(libc::bind(socket.as_raw_fd(), (&raw const name).cast(), len), 0);
        assert_eq!(libc::listen(socket.as_raw_fd(), 100), 0);
        socket
    }
}

/// The service of all tests here, which they find by RINGLET_NODE.
fn service() -> &'static Offers {
    static OFFERS: OnceLock<Offers> = OnceLock::new();
    OFFERS.get_or_init(|| {
        let path: PathBuf =
            std::env::temp_dir().join(format!("ringlet-afar-{}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        let listener = listen(&path);
        // SAFETY: before any of the tests goes on, and none reads another variable meanwhile.
        unsafe { std::env::set_var("RINGLET_NODE", &path) };
        let offers = Offers::default();
        let ours = offers.clone();
        std::thread::spawn(move || {
            loop {
                match meet::accept(listener.as_raw_fd()) {
                    Ok(guest) => attend(own(guest), &ours),
                    Err(_) => std::thread::sleep(Duration::from_millis(1)),
                }
            }
        });
        offers
    })
}

/// A process with one endpoint, and what came back to it: status, handler, first argument, whether it was a reply.
type Came = (Status, u8, Option<u32>, bool);

struct Node {
    endpoint: Arc<Endpoint>,
    bundle: Bundle,
    returned: Arc<Mutex<Vec<Came>>>,
    process: Process,
}

impl Node {
    fn new() -> Node {
        service();
        let process = Process::start().unwrap();
        let bundle = process.bundle().unwrap();
        let endpoint = bundle.endpoint().unwrap();
        endpoint.set_tag(TAG).unwrap();
        let returned = Arc::new(Mutex::new(Vec::new()));
        let list = returned.clone();
        let note = move |_: &Endpoint, what: &Undeliverable| {
            let first = what.arguments().first().copied();
            list.lock().push((what.status(), what.handler(), first, what.is_reply()));
        };
        endpoint.set_error_handler(Arc::new(note)).unwrap();
        Node { endpoint, bundle, returned, process }
    }

    fn offers(name: &str) -> Node {
        let node = Node::new();
        node.endpoint.offer(&format!(":{name}")).unwrap();
        node
    }

    fn finds(&self, name: &str) -> usize {
        let found = self.endpoint.find(&format!("localhost:{name}"), PATIENCE).unwrap();
        self.endpoint.map_any(found, TAG).unwrap()
    }

    fn on(&self, index: u8, handler: impl Fn(&Incoming) + Send + Sync + 'static) {
        self.endpoint.set_handler(index, Arc::new(handler)).unwrap();
    }
}

fn bump(count: &AtomicU32) {
    count.fetch_add(1, Ordering::Relaxed);
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

/// A server that sleeps when it has nothing to do.
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
    let (a, b) = (Node::new(), Node::offers("sizes"));
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
    let peer = a.finds("sizes");
    let (stop, server) = serve(b);
    for sleeps in [false, true] {
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
                    while sleeps && got.lock().is_empty() {
                        assert!(a.bundle.wait(LIMIT, &[]).unwrap());
                        a.bundle.poll().unwrap();
                    }
                    until(&[&a], || !got.lock().is_empty());
                    assert_eq!(got.lock().pop(), Some((arguments.clone(), bytes.clone())));
                }
            }
        }
    }
    stop.store(true, Ordering::Relaxed);
    drop(server.join().unwrap());
    assert_eq!(*a.returned.lock(), []);
}

/// More than the channel holds, both ways at once, and a reply to each: none waits for the other.
#[test]
fn crossing_floods_of_bulk_with_replies_end() {
    const COUNT: u32 = 300;
    let nodes = [Node::new(), Node::offers("floods")];
    let mut memory = [(); 2].map(|()| vec![0u8; COUNT as usize * BUFFER_BYTES]);
    let mine: Vec<u8> =
        (0..COUNT as usize * BUFFER_BYTES).map(|at| (at / 7 + at / 65521) as u8).collect();
    let counts = Arc::new([const { AtomicU32::new(0) }; 2]);
    let names: Arc<Mutex<Option<Name>>> = Arc::default();
    for (at, node) in nodes.iter().enumerate() {
        // SAFETY: as above.
        unsafe { node.endpoint.set_segment(memory[at].as_mut_ptr(), memory[at].len()).unwrap() };
        node.on(1, |message| {
            let words = message.arguments();
            message.reply(2, words, Payload::Medium(&[words[0] as u8; 5000])).unwrap();
        });
        let counts = counts.clone();
        node.on(2, move |message| {
            assert_eq!(message.bytes(), [message.arguments()[0] as u8; 5000]);
            counts[at].fetch_add(1, Ordering::Relaxed);
        });
        let source = names.clone();
        node.on(3, move |message| *source.lock() = Some(message.source()));
    }
    let peer = nodes[0].finds("floods");
    nodes[0].endpoint.request(peer, 3, &[], Payload::None).unwrap();
    until(&[&nodes[0], &nodes[1]], || names.lock().is_some());
    // Who was found sends to who has found it.
    let back = nodes[1].endpoint.map_any(names.lock().unwrap(), TAG).unwrap();
    std::thread::scope(|scope| {
        for (at, peer) in [peer, back].into_iter().enumerate() {
            let (node, mine, counts) = (&nodes[at], &mine, &counts);
            scope.spawn(move || {
                for number in 0..COUNT {
                    let offset = number as usize * BUFFER_BYTES;
                    let bytes = &mine[offset..offset + BUFFER_BYTES];
                    let payload = Payload::Bulk { offset: offset as u64, bytes };
                    node.endpoint.request(peer, 1, &[number], payload).unwrap();
                }
                // (The other one's requests are served as well.)
                let all = || counts.iter().all(|count| count.load(Ordering::Relaxed) == COUNT);
                until(&[node], all);
            });
        }
    });
    for (at, node) in nodes.iter().enumerate() {
        assert_eq!(*node.returned.lock(), []);
        assert!(memory[at] == mine, "bytes of {at}");
    }
}

#[test]
fn what_is_not_let_in_comes_back() {
    let (a, b) = (Node::new(), Node::offers("refusals"));
    let mut memory = vec![0u8; 100];
    // SAFETY: as above.
    unsafe { b.endpoint.set_segment(memory.as_mut_ptr(), memory.len()).unwrap() };
    b.on(1, |message| message.reply(9, message.arguments(), Payload::Medium(&[1; 500])).unwrap());
    let found = a.endpoint.find("localhost:refusals", PATIENCE).unwrap();
    let wrong = a.endpoint.map_any(found, TAG + 1).unwrap();
    let peer = a.endpoint.map_any(found, TAG).unwrap();
    let bulk = |offset| Payload::Bulk { offset, bytes: &[7; 60] };
    for (to, handler, payload, status) in [
        (wrong, 1, Payload::None, Status::BadTag),
        (wrong, 1, Payload::Medium(&[3; 3000]), Status::BadTag),
        (peer, 2, Payload::None, Status::BadHandler),
        (peer, 1, bulk(101), Status::BadOffset),
        (peer, 1, bulk(41), Status::BadLength),
    ] {
        a.endpoint.request(to, handler, &[5], payload).unwrap();
        until(&[&a, &b], || !a.returned.lock().is_empty());
        assert_eq!(*a.returned.lock(), [(status, handler, Some(5), false)]);
        a.returned.lock().clear();
    }
    // A reply that is refused comes back to who replied.
    a.endpoint.request(peer, 1, &[6], Payload::None).unwrap();
    until(&[&a, &b], || !b.returned.lock().is_empty());
    assert_eq!(*b.returned.lock(), [(Status::BadHandler, 9, Some(6), true)]);
    assert_eq!(memory, [0; 100]);
}

#[test]
fn what_was_said_before_an_end_arrives_and_the_rest_comes_back() {
    let (a, b) = (Node::new(), Node::offers("ends"));
    let peer = a.finds("ends");
    let came = Arc::new(AtomicU32::new(0));
    let count = came.clone();
    b.on(1, move |_| bump(&count));
    // More than the channel holds; then it goes.
    for number in 0..60 {
        a.endpoint.request(peer, 1, &[number], Payload::Medium(&[1; BUFFER_BYTES])).unwrap();
    }
    let a_goes = std::thread::spawn(move || {
        let Node { endpoint, bundle, process, returned } = a;
        drop((endpoint, bundle, process));
        returned
    });
    until(&[&b], || came.load(Ordering::Relaxed) == 60);
    assert_eq!(*a_goes.join().unwrap().lock(), []);
    // An endpoint that is freed: what it has not taken comes back, and so does what is sent then.
    let c = Node::new();
    let peer = c.finds("ends");
    c.endpoint.request(peer, 1, &[1], Payload::None).unwrap();
    b.endpoint.free().unwrap();
    until(&[&c], || c.returned.lock().len() == 1);
    c.endpoint.request(peer, 1, &[2], Payload::None).unwrap();
    until(&[&c], || c.returned.lock().len() == 2);
    let expected = [1, 2].map(|number| (Status::BadEndpoint, 1, Some(number), false));
    assert_eq!(*c.returned.lock(), expected);
    assert_eq!(came.load(Ordering::Relaxed), 60);
}

fn raw(name: &str) -> Channel {
    raw_from("localhost", name)
}

fn raw_from(node: &str, name: &str) -> Channel {
    let options = Options::new(Kind::ActiveMessages);
    connect(&format!("{node}:{name}"), options, PATIENCE).unwrap().channel().unwrap()
}

/// What a peer says, or that it goes, harms nobody else; what was for it comes back.
#[test]
fn strangers_end_their_own_lane() {
    let (a, b) = (Node::new(), Node::offers("strangers"));
    let names: Arc<Mutex<Vec<Name>>> = Arc::default();
    let list = names.clone();
    b.on(1, move |message| {
        list.lock().push(message.source());
        message.reply(2, &[], Payload::None).unwrap();
    });
    let replies = Arc::new(AtomicU32::new(0));
    let count = replies.clone();
    a.on(2, move |_| bump(&count));
    let peer = a.finds("strangers");
    // A parcel: no credits; a short request, with the tag, to handler 1.
    let mut sane = vec![1];
    sane.extend([0; 16]);
    sane.extend([0, 1, 0, 1, 0, 0, 0, 0, 0]);
    sane.extend(TAG.to_le_bytes());
    sane.extend([0; 8]);
    let bad = [&[][..], &[0], &[1], &[2], &[9; 40], &[1; 16], &[1; 18], &[1; 60], &sane[..30]];
    for (round, bytes) in bad.iter().enumerate() {
        let mut stranger = raw("strangers");
        stranger.sender.send(&sane, PATIENCE).unwrap();
        until(&[&a, &b], || names.lock().len() == 1);
        let back = b.endpoint.map_any(names.lock().pop().unwrap(), TAG).unwrap();
        b.endpoint.request(back, 7, &[round as u32], Payload::None).unwrap();
        if !bytes.is_empty() {
            stranger.sender.send(bytes, PATIENCE).unwrap();
        }
        // (Of the empty one: it goes.)
        let held = (!bytes.is_empty()).then_some(stranger);
        until(&[&b], || !b.returned.lock().is_empty());
        // (Its reply too is not known to have been taken.)
        let returned = std::mem::take(&mut *b.returned.lock());
        assert!(returned.contains(&(Status::Unreachable, 7, Some(round as u32), false)));
        drop(held);
        a.endpoint.request(peer, 1, &[], Payload::None).unwrap();
        until(&[&a, &b], || replies.load(Ordering::Relaxed) == round as u32 + 1);
        names.lock().clear();
    }
    // It says more at once than may be under way.
    let mut stranger = raw("strangers");
    for _ in 0..100 {
        stranger.sender.send(&sane, PATIENCE).unwrap();
    }
    let stranger = Mutex::new(stranger);
    until(&[&b], || {
        let came = stranger.lock().receiver.receive(&mut [0; 1000], Some(Duration::ZERO));
        came == Err(native::Error::Closed)
    });
    assert_eq!(*a.returned.lock(), []);
}

/// Who has torn one of its two bells off has gone.
#[test]
fn a_bell_that_is_torn_off_ends_the_lane() {
    let b = Node::offers("bells");
    for by_sender in [true, false] {
        let stranger = raw("bells");
        until(&[&b], || b.bundle.connections() == 1);
        let bell = match by_sender {
            true => stranger.sender.descriptor(),
            false => stranger.receiver.descriptor(),
        };
        // SAFETY: a descriptor of ours.
        assert_eq!(unsafe { libc::shutdown(bell, libc::SHUT_RDWR) }, 0);
        until(&[&b], || b.bundle.connections() == 0);
    }
}

#[test]
fn names_and_kinds() {
    let (a, b) = (Node::new(), Node::offers("taken"));
    let node = |error| Err(Error::Node(error));
    assert_eq!(a.endpoint.offer("taken"), Err(Error::BadArgument));
    assert_eq!(a.endpoint.find(":taken", PATIENCE), Err(Error::BadArgument));
    let in_use = a.endpoint.offer(":taken").unwrap_err();
    let Error::Node(in_use) = in_use else { panic!("{in_use:?}") };
    assert_eq!(in_use.errno(), libc::EADDRINUSE);
    let none = a.endpoint.find("localhost:none", Some(Duration::from_millis(30)));
    assert_eq!(none, node(native::Error::TimedOut).map(|()| unreachable!()));
    let channel = connect("localhost:taken", Options::new(Kind::Messages), PATIENCE);
    assert!(matches!(channel, Err(native::Error::OtherKind)));
    let listener = Listener::bind(":channel", Options::new(Kind::Messages)).unwrap();
    let server =
        std::thread::spawn(move || listener.accept_from(PATIENCE).map(|(_, node)| node).ok());
    let other = a.endpoint.find("localhost:channel", PATIENCE).unwrap_err();
    assert_eq!(other, Error::Node(native::Error::OtherKind));
    assert_eq!(server.join().unwrap(), Some(Some(HERE.to_owned())));
    // A name is this endpoint's alone.
    let found = a.endpoint.find("localhost:taken", PATIENCE).unwrap();
    let other = a.bundle.endpoint().unwrap();
    let index = other.map_any(found, TAG).unwrap();
    let came = Arc::new(AtomicU32::new(0));
    let count = came.clone();
    let note = move |_: &Endpoint, what: &Undeliverable| {
        count.fetch_add(what.status() as u32, Ordering::Relaxed);
    };
    other.set_error_handler(Arc::new(note)).unwrap();
    other.request(index, 1, &[], Payload::None).unwrap();
    until(&[&a, &b], || came.load(Ordering::Relaxed) == Status::Unreachable as u32);
}

fn more_files() {
    // SAFETY: a struct that is read and written.
    unsafe {
        let mut limit = std::mem::zeroed::<libc::rlimit>();
        libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit);
        limit.rlim_cur = limit.rlim_max;
        assert_eq!(libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit), 0);
    }
}

/// So many are taken, for whom those go who are not known; and one more when one of them has gone.
#[test]
fn no_more_find_a_process_than_it_can_keep() {
    // SAFETY: a struct that is read and written.
    unsafe {
        let mut limit = std::mem::zeroed();
        assert_eq!(libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit), 0);
        limit.rlim_cur = limit.rlim_max;
        assert_eq!(libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit), 0);
    }
    let (a, b, served) = (Node::new(), Node::offers("many"), Arc::new(AtomicU32::new(0)));
    let count = served.clone();
    b.on(1, move |_| bump(&count));
    let strangers: Vec<Channel> = (0..300).map(|_| raw("many")).collect();
    until(&[&b], || b.bundle.connections() == 256);
    for known in 1..=255 {
        a.endpoint.request(a.finds("many"), 1, &[], Payload::None).unwrap();
        until(&[&a, &b], || served.load(Ordering::Relaxed) == known);
    }
    let last = Node::new();
    last.endpoint.request(last.finds("many"), 1, &[], Payload::None).unwrap();
    until(&[&b, &last], || served.load(Ordering::Relaxed) == 256);
    let options = Options::new(Kind::ActiveMessages);
    let more = || connect("localhost:many", options, PATIENCE).map(drop);
    assert_eq!(more(), Err(native::Error::Refused));
    drop(last);
    until(&[&b], || more().is_ok());
    assert_eq!(a.returned.lock().len(), 0);
    drop(strangers);
}

/// Strangers push out neither who has sent what the program has not polled for yet, nor, from another node, who has sent nothing.
#[test]
fn strangers_push_out_their_own() {
    more_files();
    let (a, b, served) = (Node::new(), Node::offers("flooded"), Arc::new(AtomicU32::new(0)));
    let count = served.clone();
    b.on(1, move |_| bump(&count));
    let (speaks, silent) = (a.finds("flooded"), Node::new());
    a.endpoint.request(speaks, 1, &[], Payload::None).unwrap();
    let mut strangers: Vec<Channel> = (0..600).map(|_| raw("flooded")).collect();
    until(&[&a, &b], || served.load(Ordering::Relaxed) == 1);
    let found = silent.finds("flooded");
    strangers.truncate(400);
    strangers.extend((0..600).map(|_| raw_from("elsewhere", "flooded")));
    silent.endpoint.request(found, 1, &[], Payload::None).unwrap();
    until(&[&b, &silent], || served.load(Ordering::Relaxed) == 2);
    assert_eq!(a.returned.lock().len() + silent.returned.lock().len(), 0);
}

#[test]
fn a_name_is_free_when_its_endpoint_is() {
    let a = Node::offers("again");
    for round in 0..10 {
        let (next, last) = (a.bundle.endpoint().unwrap(), format!("again {round} 19"));
        for number in 0..20 {
            assert_eq!(next.offer(&format!(":again {round} {number}")), Ok(()));
        }
        next.free().unwrap();
        assert!(service().lock().get(&last).is_none_or(has_gone), "{last} is still offered");
        assert_eq!(a.endpoint.offer(&format!(":{last}")), Ok(()));
    }
}

/// The node service ends, and is there again: so is what is offered.
#[test]
fn an_offer_is_renewed() {
    let (a, b) = (Node::new(), Node::offers("renewed"));
    let served = Arc::new(AtomicU32::new(0));
    let count = served.clone();
    b.on(1, move |_| bump(&count));
    for round in 1..3 {
        let peer = a.finds("renewed");
        a.endpoint.request(peer, 1, &[], Payload::None).unwrap();
        until(&[&a, &b], || served.load(Ordering::Relaxed) == round);
        drop(service().lock().remove("renewed"));
    }
    let peer = a.finds("renewed");
    b.endpoint.free().unwrap();
    a.endpoint.request(peer, 1, &[], Payload::None).unwrap();
    until(&[&a], || !a.returned.lock().is_empty());
}

/// The same, where the program has another node service in its environment by now: it may be about to write there.
#[test]
fn an_offer_is_renewed_where_it_was_made() {
    const CHANGES: &str = "RINGLET_TEST_CHANGES";
    if std::env::var_os(CHANGES).is_none() {
        // A process of its own, since the others' environment is not to be changed.
        let mut own = std::process::Command::new(std::env::current_exe().unwrap());
        own.args(["--exact", "an_offer_is_renewed_where_it_was_made"]).env(CHANGES, "1");
        let done = own.output().unwrap();
        return assert!(done.status.success(), "{done:?}");
    }
    let _offers = Node::offers("there");
    // SAFETY: no other test runs in this process, and nobody but the service thread would look.
    unsafe { std::env::set_var("RINGLET_NODE", "/nowhere") };
    drop(service().lock().remove("there"));
    let start = Instant::now();
    while !service().lock().contains_key("there") {
        assert!(start.elapsed() < LIMIT);
        std::thread::sleep(Duration::from_millis(1));
    }
}
