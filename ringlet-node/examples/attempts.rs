//! Very many real connections, and whoever shows their ends to a node service that runs: each end that is introduced must be given the one end that
//! it is connected to, and whatever else comes nobody. `tests/node/attempts.py` makes the namespaces and starts this in the client's.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::fs::File;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddrV4, TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::str::FromStr;

use ringlet::handshake::ROOM_BYTES;
use ringlet::interconnect::node::{APART, COME, GREETING, MET, Message, STATUS};
use ringlet::reasons::Reason;
use ringlet_linux::{fd, meet};
use rustix::net::{AddressFamily, SocketType, sockopt};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

const AT_ONCE: usize = 60;
const PATIENCE_NS: u64 = 120_000_000_000;
/// From so few ports, that the same addresses come again and again.
const PORTS: [u16; 100] = {
    let mut ports = [0; 100];
    let mut at = 0;
    while at < ports.len() {
        ports[at] = 21_000 + at as u16;
        at += 1;
    }
    ports
};

struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % limit
    }
}

/// What is to become of who shows an end.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Fate {
    /// It meets this one.
    Meets(usize),
    /// It waits for who never comes, or is replaced by another.
    Nobody,
    Apart(Reason),
}

struct Visit {
    shown: usize,
    accepting: bool,
    fate: Fate,
    channel: Option<OwnedFd>,
}

struct Place {
    service: CString,
    client: File,
    host: File,
    listener: TcpListener,
    proxy: TcpListener,
    /// The server as the client sees it on the bridge, and by the host's published port; the proxy.
    plain: SocketAddrV4,
    published: SocketAddrV4,
    proxied: SocketAddrV4,
}

/// Sockets that are held, and who is to show them.
#[derive(Default)]
struct Batch {
    sockets: Vec<OwnedFd>,
    visits: Vec<Visit>,
}

impl Batch {
    fn hold(&mut self, socket: impl Into<OwnedFd>) -> usize {
        self.sockets.push(socket.into());
        self.sockets.len() - 1
    }

    fn visit(&mut self, shown: usize, accepting: bool, fate: Fate) -> usize {
        self.visits.push(Visit { shown, accepting, fate, channel: None });
        self.visits.len() - 1
    }

    /// Both ends of one connection come, and meet.
    fn both(&mut self, near: usize, far: usize) {
        let next = self.visits.len();
        self.visit(near, false, Fate::Meets(next + 1));
        self.visit(far, true, Fate::Meets(next));
    }
}

fn connect(to: SocketAddrV4, from: Option<u16>) -> rustix::io::Result<TcpStream> {
    let socket = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None)?;
    // So that what is closed leaves its addresses to the next one at once.
    sockopt::set_socket_linger(&socket, Some(std::time::Duration::ZERO))?;
    if let Some(port) = from {
        sockopt::set_socket_reuseaddr(&socket, true)?;
        rustix::net::bind(&socket, &SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, port))?;
    }
    rustix::net::connect(&socket, &to)?;
    Ok(socket.into())
}

fn enter(namespace: &File) {
    move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network)).unwrap();
}

fn relay(from: &mut TcpStream, to: &mut TcpStream) {
    let mut bytes = [0; 64];
    let len = from.read(&mut bytes).unwrap();
    to.write_all(&bytes[..len]).unwrap();
}

impl Place {
    fn accept(&self) -> TcpStream {
        let (accepted, _) = self.listener.accept().unwrap();
        sockopt::set_socket_linger(&accepted, Some(std::time::Duration::ZERO)).unwrap();
        accepted
    }

    fn attempt(
        &self,
        batch: &mut Batch,
        random: &mut Random,
        kinds: &mut BTreeMap<&'static str, u64>,
    ) {
        let to = [self.plain, self.published][random.below(2)];
        let kind = random.below(8);
        if kind == 7 {
            return self.through_proxy(batch, random, kinds);
        }
        // (A port may be taken, by another of this batch.)
        let reused = random.below(2) == 0;
        let from = reused.then(|| PORTS[random.below(PORTS.len())]);
        let Ok(near) = connect(to, from) else {
            return *kinds.entry("port taken").or_default() += 1;
        };
        let far = self.accept();
        let (near, far) = (batch.hold(near), batch.hold(far));
        let kind = match kind {
            0..=2 => {
                batch.both(near, far);
                if reused { "both, from a port that comes again" } else { "both" }
            }
            3 => {
                let accepting = random.below(2) == 0;
                batch.visit(if accepting { far } else { near }, accepting, Fate::Nobody);
                "one alone"
            }
            4 => {
                // One is a liar: the other one waits in vain.
                let liar = random.below(2);
                for (at, (shown, accepting)) in [(near, false), (far, true)].into_iter().enumerate()
                {
                    let lies = at == liar;
                    let fate = if lies { Fate::Apart(Reason::BadPeer) } else { Fate::Nobody };
                    batch.visit(shown, accepting ^ lies, fate);
                }
                "a liar"
            }
            5 => {
                // Each of them again and again: who shows its end later takes the place of who did before.
                for (shown, accepting) in [(near, false), (near, false), (near, false)] {
                    batch.visit(shown, accepting, Fate::Nobody);
                }
                "the same end thrice"
            }
            _ => {
                let listening = self.listener.try_clone().unwrap();
                let datagrams = std::net::UdpSocket::bind("0.0.0.0:0").unwrap();
                let unconnected =
                    rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
                for (other, reason) in [
                    (batch.hold(listening), Reason::NoNote),
                    (batch.hold(datagrams), Reason::BadPeer),
                    (batch.hold(unconnected), Reason::NoNote),
                ] {
                    batch.visit(other, random.below(2) == 0, Fate::Apart(reason));
                }
                "what is no end"
            }
        };
        *kinds.entry(kind).or_default() += 1;
    }

    /// The same bytes at both ends, of two connections.
    fn through_proxy(
        &self,
        batch: &mut Batch,
        random: &mut Random,
        kinds: &mut BTreeMap<&'static str, u64>,
    ) {
        let mut near = connect(self.proxied, None).unwrap();
        let (mut inward, _) = self.proxy.accept().unwrap();
        sockopt::set_socket_linger(&inward, Some(std::time::Duration::ZERO)).unwrap();
        enter(&self.host);
        let mut onward = connect(self.plain, None).unwrap();
        enter(&self.client);
        let mut far = self.accept();
        let text = format!("{}", random.below(1 << 30));
        near.write_all(text.as_bytes()).unwrap();
        relay(&mut inward, &mut onward);
        let mut bytes = vec![0; text.len()];
        far.read_exact(&mut bytes).unwrap();
        far.write_all(&bytes).unwrap();
        relay(&mut onward, &mut inward);
        near.read_exact(&mut bytes).unwrap();
        assert_eq!(bytes, text.as_bytes());
        let [near, inward, onward, far] =
            [near, inward, onward, far].map(|socket| batch.hold(socket));
        let kind = match random.below(3) {
            // The proxy is a program like others: each hop meets by itself.
            0 => {
                batch.both(near, inward);
                batch.both(onward, far);
                "a proxy that comes too"
            }
            _ => {
                batch.visit(near, false, Fate::Nobody);
                batch.visit(far, true, Fate::Nobody);
                "a proxy"
            }
        };
        *kinds.entry(kind).or_default() += 1;
    }

    fn come(&self, message: Message, shown: &[i32]) -> OwnedFd {
        let visit = meet::look_at_path(&self.service).unwrap();
        // SAFETY: made just now, ours alone.
        let visit = unsafe { OwnedFd::from_raw_fd(visit) };
        let (greeting, _) = hear(&visit).unwrap();
        assert_eq!(greeting.kind, GREETING, "{greeting:?}");
        meet::send(visit.as_raw_fd(), message.frame().as_bytes(), shown).unwrap();
        visit
    }

    /// Everybody comes, in any order; then, what becomes of them.
    fn play(&self, mut batch: Batch, random: &mut Random, told: &mut BTreeMap<&'static str, u64>) {
        let mut order: Vec<usize> = (0..batch.visits.len()).collect();
        for at in (1..order.len()).rev() {
            order.swap(at, random.below(at + 1));
        }
        let mut guests: Vec<Option<OwnedFd>> = order.iter().map(|_| None).collect();
        for at in order {
            let visit = &batch.visits[at];
            let accepting = u32::from(visit.accepting);
            let message = Message { kind: COME, accepting, ..Message::default() };
            let shown = batch.sockets[visit.shown].as_raw_fd();
            guests[at] = Some(self.come(message, &[shown]));
        }
        for (visit, guest) in batch.visits.iter_mut().zip(&guests) {
            let guest = guest.as_ref().unwrap();
            match visit.fate {
                Fate::Nobody => continue,
                Fate::Apart(reason) => {
                    let (message, _) = hear(guest).expect("no answer");
                    assert_eq!((message.kind, message.reason), (APART, reason as u32));
                    *told.entry(reason.code()).or_default() += 1;
                }
                Fate::Meets(_) => {
                    let (message, channel) = hear(guest).expect("no answer");
                    assert_eq!(message.kind, MET, "not introduced: {message:?}");
                    visit.channel = channel;
                    *told.entry("met").or_default() += 1;
                }
            }
        }
        // When it has answered this one, it has heard all who came before.
        let status = self.come(Message { kind: STATUS, ..Message::default() }, &[]);
        let mut fds = [fd::pollfd { fd: status.as_raw_fd(), events: libc::POLLIN, revents: 0 }];
        assert_eq!(fd::poll(&mut fds, Some(PATIENCE_NS), None), Ok(1));
        for (visit, guest) in batch.visits.iter().zip(&guests) {
            if visit.fate == Fate::Nobody {
                let mut bytes = [0; ROOM_BYTES];
                let said = meet::take(guest.as_ref().unwrap().as_raw_fd(), &mut bytes);
                // (Who was replaced has ended.)
                assert!(said.is_err() || said.is_ok_and(|said| said.len == 0), "a wrong match");
                *told.entry("nobody").or_default() += 1;
            }
        }
        let channel =
            |at: usize| batch.visits[at].channel.as_ref().expect("no channel").as_raw_fd();
        let met = |at: usize| matches!(batch.visits[at].fate, Fate::Meets(_));
        for at in (0..batch.visits.len()).filter(|at| met(*at)) {
            meet::send(channel(at), &(at as u64).to_le_bytes(), &[]).unwrap();
        }
        for (at, visit) in batch.visits.iter().enumerate() {
            let Fate::Meets(other) = visit.fate else { continue };
            let mut from = [0; 8];
            let (len, _) = meet::receive(channel(at), &mut from).unwrap();
            assert_eq!((len, u64::from_le_bytes(from)), (8, other as u64), "a wrong match");
        }
    }
}

/// The next message, and what came with it.
fn hear(visit: &OwnedFd) -> Option<(Message, Option<OwnedFd>)> {
    let mut fds = [fd::pollfd { fd: visit.as_raw_fd(), events: libc::POLLIN, revents: 0 }];
    assert_eq!(fd::poll(&mut fds, Some(PATIENCE_NS), None), Ok(1), "the service says nothing");
    let mut bytes = [0; ROOM_BYTES];
    let (len, mut fds) = meet::receive(visit.as_raw_fd(), &mut bytes).ok()?;
    // SAFETY: received just now, ours alone.
    let channel = fds.take(0).map(|fd| unsafe { OwnedFd::from_raw_fd(fd) });
    Some((Message::read(&bytes[..len]).ok()?, channel))
}

fn argument<T: FromStr>(name: &str) -> T {
    let mut arguments = std::env::args();
    let value = arguments.find(|each| each == name).and_then(|_| arguments.next());
    value.and_then(|text| text.parse().ok()).unwrap_or_else(|| panic!("{name} VALUE is missing"))
}

fn main() {
    let namespace = |name: &str| File::open(argument::<String>(name)).unwrap();
    let (client, host) = (File::open("/proc/thread-self/ns/net").unwrap(), namespace("--host"));
    let (plain, published, proxied) =
        (argument("--plain"), argument("--published"), argument("--proxied"));
    enter(&namespace("--server"));
    let listener = TcpListener::bind(plain).unwrap();
    enter(&host);
    let proxy = TcpListener::bind(proxied).unwrap();
    enter(&client);
    let service = CString::new(argument::<String>("--service")).unwrap();
    let place = Place { service, client, host, listener, proxy, plain, published, proxied };
    let (attempts, mut random) = (argument::<u64>("--attempts"), Random(argument("--seed")));
    let (mut kinds, mut told) = (BTreeMap::new(), BTreeMap::new());
    let mut done = 0;
    while done < attempts {
        if done > 0 && done % 60_000 == 0 {
            eprintln!("{done} ...");
        }
        let mut batch = Batch::default();
        for _ in 0..AT_ONCE {
            place.attempt(&mut batch, &mut random, &mut kinds);
        }
        place.play(batch, &mut random, &mut told);
        done += AT_ONCE as u64;
    }
    println!("{done} attempts: {kinds:?}");
    println!("{} visits: {told:?}", told.values().sum::<u64>());
    println!("no wrong match");
}
