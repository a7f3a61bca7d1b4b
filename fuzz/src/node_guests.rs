//! The node service, and guests that say, show and leave what they like, when they like. What must hold: it goes on; whoever was introduced holds one
//! end of a connection, and the other one the other; and with all guests gone nobody is left.

use ringlet::interconnect::node::{APART, COME, GREETING, MET, Message, STATUS};
use ringlet_linux::{fd, meet, proof};
use ringlet_node::notes::{ACCEPTED, CONNECTED, Note, Notes, Pair};
use ringlet_node::policy::Policy;
use ringlet_node::{Listener, Service};
use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::CString;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::rc::Rc;
use std::time::Duration;

const GUESTS: usize = 6;
const AT_ONCE: usize = 4;
const POLICY: &str = "[limits]\nguests = 5\nguests_of_a_user = 4\nvisits_of_a_user = 1000000000\n";

/// As the kernel's program notes: who comes twice with one pair is nobody.
#[derive(Default)]
struct Seen {
    notes: HashMap<u64, Note>,
    pairs: HashMap<Pair, u64>,
}

#[derive(Clone, Default)]
struct Shared(Rc<RefCell<Seen>>);

impl Notes for Shared {
    fn of(&self, cookie: u64) -> Option<Note> {
        self.0.borrow().notes.get(&cookie).copied()
    }
    fn with(&self, pair: Pair) -> Option<u64> {
        self.0.borrow().pairs.get(&pair).copied()
    }
}

impl Shared {
    fn begin(&self, cookie: u64, pair: Pair, side: u32) {
        let mut seen = self.0.borrow_mut();
        seen.notes.insert(cookie, Note { pair, side, ..Note::default() });
        seen.pairs.entry(pair).and_modify(|known| *known = 0).or_insert(cookie);
    }
}

struct Stage {
    service: Service<Shared>,
    path: CString,
    seen: Shared,
    /// Two ends each; and what is none.
    sockets: Vec<TcpStream>,
    others: Vec<OwnedFd>,
    guests: [Guest; GUESTS],
    met: Vec<(Shown, OwnedFd)>,
}

#[derive(Default)]
struct Guest {
    visit: Option<OwnedFd>,
    /// What it showed first, and what it said of it.
    shown: Option<Shown>,
}

/// A cookie, and whether it was accepted.
type Shown = (u64, bool);

thread_local! {
    static STAGE: RefCell<Option<Stage>> = const { RefCell::new(None) };
}

fn own(fd: i32) -> OwnedFd {
    // SAFETY: made just now, ours alone.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

impl Stage {
    fn new() -> Stage {
        let name = format!("ringlet-guests-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let _ = std::fs::remove_file(&path);
        let kind = rustix::net::SocketType::SEQPACKET;
        let flags = rustix::net::SocketFlags::NONBLOCK;
        let family = rustix::net::AddressFamily::UNIX;
        let socket = rustix::net::socket_with(family, kind, flags, None).unwrap();
        let address = rustix::net::SocketAddrUnix::new(&path).unwrap();
        rustix::net::bind(&socket, &address).unwrap();
        rustix::net::listen(&socket, 64).unwrap();
        let seen = Shared::default();
        let listeners = vec![Listener { socket, label: None }];
        let policy = Policy::parse(POLICY).unwrap();
        let service = Service::new(policy, seen.clone(), listeners).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut sockets = Vec::new();
        for _ in 0..3 {
            sockets.push(TcpStream::connect(listener.local_addr().unwrap()).unwrap());
            sockets.push(listener.accept().unwrap().0);
        }
        let bell = own(fd::eventfd().unwrap());
        let others = vec![bell, std::fs::File::open("/dev/null").unwrap().into(), listener.into()];
        let path = CString::new(path.as_os_str().as_bytes()).unwrap();
        let (guests, met) = (Default::default(), Vec::new());
        Stage { service, path, seen, sockets, others, guests, met }
    }

    fn cookie(&self, socket: usize) -> u64 {
        proof::cookie(self.sockets[socket].as_raw_fd()).unwrap()
    }

    fn say(&mut self, at: usize, script: &mut Script) {
        let guest = &self.guests[at];
        let Some(visit) = &guest.visit else { return };
        let socket = script.below(self.sockets.len());
        let shown = self.sockets[socket].as_raw_fd();
        let lies = script.below(4) == 0;
        let (mut kind, mut fds) = (COME, vec![shown]);
        let mut accepting = (socket as u32 % 2) ^ u32::from(lies);
        let honest = script.below(4) > 0;
        if !honest {
            let kinds = [COME, STATUS, GREETING, MET, APART, script.number(2) as u16];
            (kind, accepting) = (kinds[script.below(kinds.len())], script.number(1) as u32);
            let other = self.others[script.below(self.others.len())].as_raw_fd();
            fds = match script.below(5) {
                0 => vec![],
                1 => vec![other],
                2 => vec![other, shown],
                3 => vec![shown, other, other, shown],
                _ => fds,
            };
        }
        let flags = script.number(1) as u32;
        let message = Message { kind, accepting, flags, ..Message::default() };
        let mut bytes = message.frame().as_bytes().to_vec();
        match if honest { 3 } else { script.below(4) } {
            0 => bytes = script.0[..script.below(200).min(script.0.len())].to_vec(),
            1 => bytes.truncate(script.below(bytes.len())),
            2 => {
                let at = script.below(bytes.len());
                bytes[at] ^= script.number(1) as u8;
            }
            _ => {}
        }
        let sent = meet::send(visit.as_raw_fd(), &bytes, &fds).is_ok();
        let said = Message::read(&bytes).ok().filter(|said| said.kind == COME);
        if let (true, Some(said), true, None) =
            (sent, said, fds.first() == Some(&shown), self.guests[at].shown)
        {
            self.guests[at].shown = Some((self.cookie(socket), said.accepting != 0));
        }
    }

    /// What it is told; whom it meets is judged at the end.
    fn hear(&mut self, at: usize) {
        let Some(visit) = &self.guests[at].visit else { return };
        let mut bytes = vec![0; 1 << 16];
        let Ok((len, mut fds)) = meet::receive(visit.as_raw_fd(), &mut bytes) else { return };
        match Message::read(&bytes[..len]) {
            Ok(message) if message.kind == MET => {
                let shown = self.guests[at].shown.expect("introduced for nothing");
                self.met.push((shown, fds.take(0).map(own).expect("met nobody")));
            }
            Ok(message) => assert!([GREETING, APART].contains(&message.kind)),
            Err(_) if len == 0 => self.guests[at] = Guest::default(),
            Err(_) => assert_eq!(bytes[0], b'{'),
        }
    }

    /// Who has the other end of each channel?
    fn judge(&mut self) -> usize {
        let (met, mut pairs) = (std::mem::take(&mut self.met), 0);
        for (at, (one, near)) in met.iter().enumerate() {
            if meet::send(near.as_raw_fd(), &[at as u8], &[]).is_err() {
                continue;
            }
            for (two, far) in &met {
                let mut from = [0; 1];
                if !meet::receive(far.as_raw_fd(), &mut from).is_ok_and(|(len, _)| len == 1) {
                    continue;
                }
                assert_eq!(from, [at as u8]);
                let [near, far] = [one, two].map(|shown| self.seen.of(shown.0).unwrap());
                assert_eq!(near.pair, far.pair.mirrored(), "strangers were introduced");
                assert_eq!(near.side + far.side, CONNECTED + ACCEPTED);
                let is_said = |note: Note, said| (note.side == ACCEPTED) == said;
                assert!(is_said(near, one.1) && is_said(far, two.1), "a liar was introduced");
                pairs += 1;
            }
        }
        pairs
    }

    fn play(&mut self, script: &mut Script) -> usize {
        *self.seen.0.borrow_mut() = Seen::default();
        for near in [0, 2, 4] {
            let pair = Pair { sends: script.below(5) as u32, expects: script.below(5) as u32 };
            self.seen.begin(self.cookie(near), pair, CONNECTED);
            if script.below(8) > 0 {
                self.seen.begin(self.cookie(near + 1), pair.mirrored(), ACCEPTED);
            }
        }
        while !script.0.is_empty() {
            let at = script.below(GUESTS);
            match script.below(16) {
                0 => self.guests[at] = Guest::default(),
                1..4 if self.guests[at].visit.is_none() => {
                    self.guests[at].visit = meet::look_at_path(&self.path).ok().map(own);
                }
                4..7 => self.hear(at),
                7..11 => self.say(at, script),
                _ => self.service.turn(Some(Duration::ZERO)).unwrap(),
            }
            let (here, waiting) = self.service.guests();
            assert!(here <= AT_ONCE && waiting <= here);
        }
        for _ in 0..4 {
            (0..GUESTS).for_each(|at| self.hear(at));
            self.service.turn(Some(Duration::ZERO)).unwrap();
        }
        let met = self.judge();
        self.guests.fill_with(Guest::default);
        for _ in 0..4 * GUESTS {
            self.service.turn(Some(Duration::ZERO)).unwrap();
        }
        assert_eq!(self.service.guests(), (0, 0), "who has gone is still here");
        met
    }
}

struct Script<'a>(&'a [u8]);

impl Script<'_> {
    fn number(&mut self, bytes: usize) -> u64 {
        let (first, rest) = self.0.split_at(bytes.min(self.0.len()));
        self.0 = rest;
        first.iter().fold(0, |number, &byte| number << 8 | u64::from(byte))
    }

    fn below(&mut self, limit: usize) -> usize {
        self.number(1) as usize % limit
    }
}

/// How many ends were introduced.
pub fn run(script: &[u8]) -> usize {
    STAGE.with_borrow_mut(|stage| stage.get_or_insert_with(Stage::new).play(&mut Script(script)))
}
