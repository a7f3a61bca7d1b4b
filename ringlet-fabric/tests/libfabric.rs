//! Rails on libfabric, over the providers that need no hardware; or over another, which `RINGLET_TEST_RAILS` names with a local address.

use std::io::{BufRead, BufReader, Read as _, Write as _};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use ringlet_fabric::libfabric::{Libfabric, providers};
use ringlet_fabric::rail::{Event, Grant, MESSAGE_BYTES, Peer, Rail, Refused, Region};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

/// (`udp;ofi_rxd` has no descriptor to sleep on, `shm` does not leave the host; `sockets`, which libfabric has given up,
/// stops now and then: one run of twenty.)
const PROVIDERS: [&str; 2] = ["tcp", "net"];
const LOCAL: &str = "127.0.0.1";

/// What is tested: each provider, with the address where.
fn tested() -> Vec<(String, String)> {
    match std::env::var("RINGLET_TEST_RAILS") {
        Ok(named) => {
            let (provider, local) = named.split_once(' ').expect("a provider and an address");
            vec![(provider.into(), local.into())]
        }
        Err(_) => PROVIDERS.map(|provider| (provider.into(), LOCAL.into())).into(),
    }
}
/// Against hanging only.
const LIMIT: Duration = Duration::from_secs(60);
const MEMORY_BYTES: usize = 1 << 20;

/// A rail, its memory, and what it has told.
struct End {
    rail: Libfabric,
    memory: Shared,
    granted: Option<(Region, Grant)>,
    done: Vec<u64>,
    failed: Vec<u64>,
    notices: Vec<u32>,
    messages: Vec<Vec<u8>>,
    broken: bool,
}

impl End {
    fn open(provider: &str, local: &str) -> End {
        let rail = Libfabric::open(provider, Some(local)).unwrap();
        let mut end = End {
            rail,
            memory: Shared::new(),
            granted: None,
            done: Vec::new(),
            failed: Vec::new(),
            notices: Vec::new(),
            messages: Vec::new(),
            broken: false,
        };
        // SAFETY: it stays until the end is dropped: the rail, which is dropped first, lets go of it.
        end.granted =
            Some(unsafe { end.rail.register(end.memory.as_mut_ptr(), MEMORY_BYTES) }.unwrap());
        end
    }

    fn region(&self) -> Region {
        self.granted.unwrap().0
    }

    fn grant(&self) -> Grant {
        self.granted.unwrap().1
    }

    fn poll(&mut self) {
        self.rail.poll(&mut |event| match event {
            Event::Done { token } => self.done.push(token),
            Event::Failed { token, .. } => self.failed.push(token),
            Event::Noticed { notice } => self.notices.push(notice),
            Event::Message(message) => self.messages.push(message.to_vec()),
            Event::Broken(_) => self.broken = true,
        });
    }

    fn told(&self) -> usize {
        self.done.len() + self.failed.len()
    }

    fn send(&mut self, to: Peer, message: &[u8], token: u64) -> bool {
        taken(self.rail.send(to, message, token))
    }

    fn write(&mut self, to: Peer, at: usize, bytes: usize, grant: Grant, notice: u32) -> bool {
        let from = self.region();
        taken(self.rail.write(to, from, at, bytes, grant, at as u64, notice, notice.into()))
    }
}

/// Memory that can be mapped twice, as a rail's must be.
struct Shared(*mut u8);

// SAFETY: owned.
unsafe impl Send for Shared {}

impl Shared {
    fn new() -> Shared {
        let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        // SAFETY: new memory.
        let at = unsafe { mmap_anonymous(std::ptr::null_mut(), MEMORY_BYTES, access, flags) };
        Shared(at.unwrap().cast())
    }
}

impl std::ops::Deref for Shared {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: mapped. Others write there while nobody looks: what is looked at is what has been noticed, or withdrawn.
        unsafe { std::slice::from_raw_parts(self.0, MEMORY_BYTES) }
    }
}

impl std::ops::DerefMut for Shared {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts_mut(self.0, MEMORY_BYTES) }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // SAFETY: nobody has it any more.
        unsafe { munmap(self.0.cast(), MEMORY_BYTES) }.unwrap();
    }
}

impl Drop for End {
    fn drop(&mut self) {
        if let Some((region, _)) = self.granted.take() {
            self.rail.withdraw(region);
        }
    }
}

fn taken(result: Result<(), Refused>) -> bool {
    match result {
        Ok(()) => true,
        Err(Refused::Full) => false,
        Err(Refused::Failed(error)) => panic!("{error}"),
    }
}

/// Polls both until it is so.
fn until(ends: [&mut End; 2], what: &str, mut is_so: impl FnMut(&mut End, &mut End) -> bool) {
    let (limit, [a, b]) = (Instant::now() + LIMIT, ends);
    while !is_so(a, b) {
        assert!(Instant::now() < limit, "{what}: not within {LIMIT:?}");
        a.poll();
        b.poll();
    }
}

fn pair(provider: &str, local: &str) -> (End, End, Peer, Peer) {
    let (mut a, mut b) = (End::open(provider, local), End::open(provider, local));
    let to_b = a.rail.reach(b.rail.name()).unwrap();
    let to_a = b.rail.reach(a.rail.name()).unwrap();
    (a, b, to_b, to_a)
}

fn message(number: usize) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(number as u64);
    let bytes =
        if number.is_multiple_of(7) { MESSAGE_BYTES } else { random.usize(8..MESSAGE_BYTES) };
    let mut message = (number as u64).to_le_bytes().to_vec();
    message.extend((message.len()..bytes).map(|_| random.u8(..)));
    message
}

/// All that came, in any order, is what was sent, each once.
fn check(messages: &[Vec<u8>], count: usize) {
    let mut numbers: Vec<_> = messages
        .iter()
        .map(|bytes| {
            let number = u64::from_le_bytes(*bytes.first_chunk().unwrap()) as usize;
            assert!(*bytes == message(number), "message {number}");
            number
        })
        .collect();
    numbers.sort_unstable();
    assert_eq!(numbers, (0..count).collect::<Vec<_>>());
}

#[test]
fn messages_go_both_ways() {
    const COUNT: usize = 2000;
    for (provider, local) in &tested() {
        let (mut a, mut b, to_b, to_a) = pair(provider, local);
        let mut sent = [0; 2];
        until([&mut a, &mut b], provider, |a, b| {
            while sent[0] < COUNT && a.send(to_b, &message(sent[0]), sent[0] as u64) {
                sent[0] += 1;
            }
            while sent[1] < COUNT && b.send(to_a, &message(sent[1]), sent[1] as u64) {
                sent[1] += 1;
            }
            [a, b].iter().all(|end| end.messages.len() == COUNT && end.told() == COUNT)
        });
        check(&a.messages, COUNT);
        check(&b.messages, COUNT);
        assert!(a.failed.is_empty() && b.failed.is_empty() && !a.broken && !b.broken);
    }
}

/// After the notice all bytes are there; what is around them is not touched.
#[test]
fn a_write_is_whole_at_its_notice() {
    const BYTES: usize = 1_000_000;
    for (provider, local) in &tested() {
        let (mut a, mut b, to_b, _) = pair(provider, local);
        let mut random = fastrand::Rng::with_seed(3);
        a.memory.fill_with(|| random.u8(..));
        let grant = b.grant();
        let mut sent = false;
        until([&mut a, &mut b], provider, |a, b| {
            sent = sent || a.write(to_b, 1000, BYTES, grant, 0xdead_beef);
            !b.notices.is_empty() && a.told() == 1
        });
        assert_eq!(
            (b.notices.as_slice(), a.done.as_slice()),
            (&[0xdead_beef][..], &[0xdead_beef][..])
        );
        assert!(b.memory[1000..][..BYTES] == a.memory[1000..][..BYTES]);
        assert!(b.memory[..1000].iter().chain(&b.memory[1000 + BYTES..]).all(|&byte| byte == 0));
    }
}

/// A sender that never polls is refused at some time; polled, all is done.
#[test]
fn full_and_back() {
    for (provider, local) in &tested() {
        let (mut a, mut b, to_b, _) = pair(provider, local);
        let grant = b.grant();
        let mut first = false;
        until([&mut a, &mut b], provider, |a, b| {
            first = first || a.write(to_b, 0, 64, grant, 0);
            first && b.notices == [0]
        });
        let mut sent = 1;
        while a.write(to_b, sent as usize * 64 % MEMORY_BYTES, 64, grant, sent) {
            sent += 1;
            assert!(sent < 100_000, "{provider}: never full");
        }
        assert!(sent > 16, "{provider}: full after {sent}");
        let more = sent + 5000;
        until([&mut a, &mut b], provider, |a, b| {
            while sent < more && a.write(to_b, sent as usize * 64 % MEMORY_BYTES, 64, grant, sent) {
                sent += 1;
            }
            b.notices.len() == more as usize && a.done.len() == more as usize
        });
        b.notices.sort_unstable();
        assert_eq!(b.notices, (0..more).collect::<Vec<_>>());
    }
}

#[test]
fn garbage_is_not_a_name() {
    for (provider, local) in &tested() {
        let mut end = End::open(provider, local);
        let name = end.rail.name().to_vec();
        for bytes in 0..300 {
            if bytes != name.len() {
                assert!(end.rail.reach(&vec![2; bytes]).is_err(), "{provider}: {bytes} bytes");
            }
        }
        let with = |at: usize, bytes: &[u8]| {
            let mut name = name.clone();
            name[at..][..bytes.len()].copy_from_slice(bytes);
            name
        };
        assert!(end.rail.reach(&with(0, &[10, 0])).is_err(), "another family");
        assert!(end.rail.reach(&with(0, &[255, 255])).is_err(), "no family");
        assert!(end.rail.reach(&with(2, &[0, 0])).is_err(), "no port");
        assert!(end.rail.reach(&with(4, &[0, 0, 0, 0])).is_err(), "no address");
        assert!(end.rail.reach(&with(4, &[224, 0, 0, 1])).is_err(), "a group's address");
        assert!(end.rail.reach(&name).is_ok());
        assert!(end.rail.reach(&name).is_err(), "another session's endpoint");
        assert!(end.rail.reach(&with(name.len() - 1, &[!name[name.len() - 1]])).is_err());
        let nobody = Peer(4_000_000);
        assert!(matches!(end.rail.send(nobody, b"x", 0), Err(Refused::Failed(_))));
    }
}

/// Nothing lands once `withdraw` has returned, however much was under way; and the writer is told, of each once.
#[test]
fn nothing_lands_in_what_is_withdrawn() {
    for (provider, local) in &tested() {
        let (mut a, mut b, to_b, _) = pair(provider, local);
        a.memory.fill(7);
        let grant = b.grant();
        let mut sent = 0;
        // One of them has landed in part, if a poll ends so (those of a thread's making may not).
        let mut polls = 0;
        until([&mut a, &mut b], provider, |a, b| {
            while sent < 64 && a.write(to_b, 0, MEMORY_BYTES, grant, sent) {
                sent += 1;
            }
            polls += 1;
            let landed = |at: usize| {
                // SAFETY: within; somebody may write there now.
                unsafe { b.memory.0.add(at).read_volatile() == 7 }
            };
            sent > 1 && (landed(0) && !landed(MEMORY_BYTES - 1) || polls > 1000)
        });
        b.rail.withdraw(b.region());
        b.granted = None;
        let told = b.notices.len();
        b.memory.fill(9);
        // The writer is told: of those that were under way, or of what comes next.
        let mut is_refused = false;
        until([&mut a, &mut b], provider, |a, _| {
            let from = a.region();
            match a.rail.write(to_b, from, 0, 64, grant, 0, 1, 1) {
                Ok(()) => sent += 1,
                Err(Refused::Full) => (),
                Err(Refused::Failed(_)) => is_refused = true,
            }
            is_refused || a.broken || !a.failed.is_empty()
        });
        until([&mut a, &mut b], provider, |a, _| a.broken || a.told() == sent as usize);
        assert!(b.memory.iter().all(|&byte| byte == 9), "{provider}: written later");
        // What landed before may be noticed later.
        assert!(b.notices.len() <= sent as usize && b.notices.len() >= told);
        assert!(!b.broken, "{provider}: a stranger's write broke the rail");
    }
}

/// A writer withdraws what it writes from, to a peer that takes nothing.
#[test]
fn nothing_is_taken_from_what_is_withdrawn() {
    for (provider, local) in &tested() {
        let (mut a, mut b, to_b, _) = pair(provider, local);
        let grant = b.grant();
        let mut first = false;
        until([&mut a, &mut b], provider, |a, b| {
            first = first || a.write(to_b, 0, 64, grant, 0);
            first && b.notices == [0]
        });
        let mut sent = 1;
        while sent < 100 && a.write(to_b, 0, MEMORY_BYTES, grant, sent) {
            sent += 1;
        }
        a.rail.withdraw(a.region());
        a.granted = None;
        a.memory.fill(0xee);
        until([&mut a, &mut b], provider, |a, _| a.told() == sent as usize);
        for _ in 0..1000 {
            b.poll();
        }
        assert!(b.memory.iter().all(|&byte| byte == 0), "{provider}: taken later");
    }
}

#[test]
fn what_is_missing_is_said() {
    let error = Libfabric::open("carrier-pigeon", Some(LOCAL)).err().unwrap().to_string();
    assert!(error.contains("\"carrier-pigeon\"") && error.contains("\"tcp"), "{error}");
    let error = Libfabric::open("tcp\0", None).err().unwrap();
    assert_eq!(error.kind(), std::io::ErrorKind::InvalidInput);
    let error = Libfabric::open("udp;ofi_rxd", Some(LOCAL)).err().unwrap().to_string();
    assert!(error.contains("nothing to sleep on"), "{error}");
    assert!(Libfabric::open("tcp;ofi_rxm", Some(LOCAL)).unwrap().is_guarded());
    let all = providers().unwrap();
    let is_local = |known: &&ringlet_fabric::libfabric::Provider| {
        known.address == Some(Ipv4Addr::LOCALHOST.into())
    };
    assert!(all.iter().filter(is_local).any(|known| known.provider.starts_with("tcp")), "{all:?}");
}

/// Each end sleeps until there is something for it.
#[test]
fn ends_sleep() {
    const COUNT: u64 = 1000;
    for (provider, local) in &tested() {
        let (mut a, mut b, to_b, to_a) = pair(provider, local);
        // What the other sent is sent back, one more; who sends the last ones is done when they have left.
        let play = |end: &mut End, peer: Peer, mut next: Option<u64>| {
            let mut sent = 0;
            let mut last = 0;
            while last + 1 < COUNT || next.is_some() || end.told() < sent {
                if let Some(number) = next
                    && end.send(peer, &number.to_le_bytes(), number)
                {
                    (sent, next) = (sent + 1, None);
                    last = last.max(number);
                }
                end.poll();
                while let Some(message) = end.messages.pop() {
                    last = u64::from_le_bytes(*message.first_chunk().unwrap());
                    next = (last < COUNT).then_some(last + 1);
                }
                // (What is refused is tried again after a while.)
                let is_over = last + 1 >= COUNT && next.is_none() && end.told() == sent;
                if !is_over && end.rail.may_sleep() {
                    let most = if next.is_some() { Duration::from_millis(1) } else { LIMIT };
                    let most = Timespec::try_from(most).unwrap();
                    let fds = &mut [PollFd::from_borrowed_fd(end.rail.fd(), PollFlags::IN)];
                    let is_awake = poll(fds, Some(&most)).unwrap() == 1;
                    assert!(is_awake || next.is_some(), "{provider}: slept at {last}");
                }
            }
        };
        std::thread::scope(|scope| {
            scope.spawn(|| play(&mut b, to_a, None));
            play(&mut a, to_b, Some(0));
        });
    }
}

/// Over the sixth version of IP.
#[test]
fn six_is_as_four() {
    let mut end = End::open("tcp", "::1");
    assert!(end.rail.reach(End::open("tcp", LOCAL).rail.name()).is_err());
    let partner = Partner::start(&[], "tcp", "::1", end.rail.name());
    converse(&mut end, &partner);
    partner.end();
}

/// Two network namespaces with a wire between them; removed when dropped.
struct Namespaces([String; 2]);

impl Namespaces {
    const ADDRESSES: [&str; 2] = ["10.91.0.1", "10.91.0.2"];

    fn new() -> Namespaces {
        let all = Namespaces(["a", "b"].map(|end| format!("rail-{end}-{}", std::process::id())));
        for name in &all.0 {
            ip(&["netns", "add", name]);
        }
        let [a, b] = &all.0;
        ip(&[
            "link", "add", "eth0", "netns", a, "type", "veth", "peer", "name", "eth0", "netns", b,
        ]);
        for (name, address) in all.0.iter().zip(Namespaces::ADDRESSES) {
            ip(&["-n", name, "address", "add", &format!("{address}/24"), "dev", "eth0"]);
            ip(&["-n", name, "link", "set", "eth0", "up"]);
            // (Who has said the secret late is passed on by a connection of the gate's own to its address.)
            ip(&["-n", name, "link", "set", "lo", "up"]);
        }
        all
    }
}

impl Drop for Namespaces {
    fn drop(&mut self) {
        for name in &self.0 {
            let _ = Command::new("ip").args(["netns", "del", name]).status();
        }
    }
}

fn ip(words: &[&str]) {
    assert!(Command::new("ip").args(words).status().unwrap().success(), "ip {words:?}");
}

#[test]
fn between_namespaces() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: only root makes network namespaces");
        return;
    }
    let namespaces = Namespaces::new();
    // This thread's: the sockets and threads that it makes are there.
    let own = std::fs::File::open(format!("/run/netns/{}", namespaces.0[0])).unwrap();
    let kind = Some(rustix::thread::LinkNameSpaceType::Network);
    rustix::thread::move_into_link_name_space(own.as_fd(), kind).unwrap();
    let [here, there] = Namespaces::ADDRESSES;
    for provider in PROVIDERS {
        let mut end = End::open(provider, here);
        let enter = ["ip", "netns", "exec", &namespaces.0[1]];
        let partner = Partner::start(&enter, provider, there, end.rail.name());
        converse(&mut end, &partner);
        partner.end();
    }
}

/// Another process with a rail: this program, as `partner`.
struct Partner {
    process: Child,
    input: ChildStdin,
    /// Is open for as long as it may print.
    _output: BufReader<ChildStdout>,
    name: Vec<u8>,
    grant: Grant,
}

impl Partner {
    /// `enter`: what makes it run elsewhere.
    fn start(enter: &[&str], provider: &str, local: &str, name: &[u8]) -> Partner {
        Partner::with(enter, format!("{provider} {local} {}", hex(name)))
    }

    /// One that writes all of its memory into what is granted, over and over.
    fn that_writes(provider: &str, local: &str, end: &End) -> Partner {
        let Grant { key, base } = end.grant();
        Partner::with(&[], format!("{provider} {local} {} {key} {base}", hex(end.rail.name())))
    }

    fn with(enter: &[&str], told: String) -> Partner {
        let own = std::env::current_exe().unwrap();
        let own = own.to_str().unwrap();
        let words: Vec<_> =
            enter.iter().copied().chain([own, "--exact", "partner", "--nocapture"]).collect();
        let mut process = Command::new(words[0])
            .args(&words[1..])
            .env("RINGLET_TEST_PARTNER", told)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let input = process.stdin.take().unwrap();
        let mut output = BufReader::new(process.stdout.take().unwrap());
        let told = output
            .by_ref()
            .lines()
            .map(|line| line.unwrap())
            .find_map(|line| line.split_once("partner: ").map(|(_, told)| told.to_owned()))
            .expect("a partner");
        let words: Vec<_> = told.split(' ').collect();
        let grant = Grant { key: words[1].parse().unwrap(), base: words[2].parse().unwrap() };
        Partner { process, input, _output: output, name: unhex(words[0]), grant }
    }

    fn kill(mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }

    fn end(mut self) {
        self.input.write_all(b"end\n").unwrap();
        drop(self.input);
        assert!(self.process.wait().unwrap().success());
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> Vec<u8> {
    (0..text.len() / 2).map(|at| u8::from_str_radix(&text[2 * at..][..2], 16).unwrap()).collect()
}

/// Sends back each message, until its input ends.
#[test]
fn partner() {
    let Ok(told) = std::env::var("RINGLET_TEST_PARTNER") else { return };
    let words: Vec<_> = told.split(' ').collect();
    let mut end = End::open(words[0], words[1]);
    let peer = end.rail.reach(&unhex(words[2])).unwrap();
    let grant = end.grant();
    println!("partner: {} {} {}", hex(end.rail.name()), grant.key, grant.base);
    let is_over = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let over = is_over.clone();
    std::thread::spawn(move || {
        let _ = std::io::stdin().read_line(&mut String::new());
        over.store(true, std::sync::atomic::Ordering::Relaxed);
    });
    let limit = Instant::now() + 2 * LIMIT;
    let mut back = Vec::new();
    let granted = words
        .get(4)
        .map(|base| Grant { key: words[3].parse().unwrap(), base: base.parse().unwrap() });
    while !is_over.load(std::sync::atomic::Ordering::Relaxed) && Instant::now() < limit {
        end.poll();
        if let Some(granted) = granted {
            let from = end.region();
            let _ = end.rail.write(peer, from, 0, MEMORY_BYTES, granted, 0, 0, 0);
        }
        back.append(&mut end.messages);
        while let Some(message) = back.pop() {
            match end.rail.send(peer, &message, 0) {
                Ok(()) => (),
                Err(Refused::Full) => {
                    back.push(message);
                    break;
                }
                Err(Refused::Failed(_)) => break,
            }
        }
    }
}

/// What a partner sends back of messages, and of a large write.
fn converse(end: &mut End, partner: &Partner) -> Peer {
    const COUNT: usize = 500;
    let peer = end.rail.reach(&partner.name).unwrap();
    let limit = Instant::now() + LIMIT;
    let (mut sent, mut is_written) = (0, false);
    while end.messages.len() < COUNT || end.told() <= COUNT {
        assert!(Instant::now() < limit, "{} of {COUNT} came back", end.messages.len());
        while sent < COUNT && end.send(peer, &message(sent), 1 + sent as u64) {
            sent += 1;
        }
        is_written = is_written || end.write(peer, 0, 1_000_000, partner.grant, 0);
        end.poll();
    }
    check(&end.messages, COUNT);
    assert!(end.failed.is_empty() && !end.broken);
    peer
}

#[test]
fn between_processes() {
    for (provider, local) in &tested() {
        let mut end = End::open(provider, local);
        let partner = Partner::start(&[], provider, local, end.rail.name());
        converse(&mut end, &partner);
        partner.end();
    }
}

/// The other process is killed with much under way: each is told of, what comes next is refused at last; and the rail works with others.
#[test]
fn a_partner_is_killed() {
    for (provider, local) in &tested() {
        let mut end = End::open(provider, local);
        let partner = Partner::start(&[], provider, local, end.rail.name());
        let peer = converse(&mut end, &partner);
        let (grant, before) = (partner.grant, end.told());
        // Stopped, so that it takes no more.
        let process = rustix::process::Pid::from_child(&partner.process);
        rustix::process::kill_process(process, rustix::process::Signal::STOP).unwrap();
        let mut taken = 0;
        while taken < 64 && end.write(peer, 0, MEMORY_BYTES, grant, 0) {
            taken += 1;
        }
        partner.kill();
        let limit = Instant::now() + LIMIT;
        while !end.broken && end.told() < before + taken {
            let told = end.told() - before;
            assert!(Instant::now() < limit, "{provider}: {told} of {taken} are told of");
            end.poll();
        }
        assert_eq!(end.told(), before + taken, "{provider}");
        // (A device takes all by itself, though its process stands still.)
        let by_itself = provider.starts_with("verbs");
        assert!(by_itself || !end.failed.is_empty(), "{provider}: a dead peer has taken all");
        let mut is_refused = false;
        let failed = end.failed.len();
        while !end.broken && !is_refused && end.failed.len() == failed {
            assert!(Instant::now() < limit, "{provider}: a dead peer is not refused");
            let from = end.region();
            match end.rail.write(peer, from, 0, 64, grant, 0, 0, 0) {
                Ok(()) | Err(Refused::Full) => (),
                Err(Refused::Failed(_)) => is_refused = true,
            }
            end.poll();
        }
        end.rail.forget(peer);
        assert!(!end.broken, "{provider}: the death of a peer broke the rail");
        (end.messages, end.done, end.failed) = Default::default();
        let other = Partner::start(&[], provider, local, end.rail.name());
        converse(&mut end, &other);
        other.end();
    }
}

/// One that writes to `end`, with some of that on its way, after so many polls.
fn a_writer(end: &mut End, provider: &str, local: &str, polls: usize) -> Partner {
    let partner = Partner::that_writes(provider, local, end);
    let limit = Instant::now() + LIMIT;
    end.notices.clear();
    while end.notices.len() < 3 {
        assert!(Instant::now() < limit, "{provider}: nothing is written");
        end.poll();
    }
    (0..polls).for_each(|_| end.poll());
    partner
}

/// Half of a write is there, and the other half never comes: its writer is dead, or forgotten.
#[test]
fn who_writes_ends_in_the_midst_of_it() {
    for (provider, local) in &tested() {
        let mut end = End::open(provider, local);
        for round in 0..8 {
            let partner = a_writer(&mut end, provider, local, 7 * round);
            if round % 2 == 0 {
                let peer = end.rail.reach(&partner.name).unwrap();
                end.send(peer, &message(0), 0);
                end.poll();
                end.rail.forget(peer);
                (0..100).for_each(|_| end.poll());
            }
            partner.kill();
            (0..1000).for_each(|_| end.poll());
            assert!(!end.broken, "{provider}: the death of a peer broke the rail");
        }
        (end.messages, end.done, end.failed) = Default::default();
        let other = Partner::start(&[], provider, local, end.rail.name());
        converse(&mut end, &other);
        other.end();
    }
}

/// A provider ended the process then, in most runs of so many rounds.
#[test]
fn closes_as_another_writes() {
    for (provider, local) in &tested() {
        for round in 0..8 {
            let mut end = End::open(provider, local);
            let partner = a_writer(&mut end, provider, local, 7 * round);
            drop(end);
            partner.kill();
        }
    }
}

/// A connection of this process to where a peer says that it is.
#[test]
fn what_a_peer_says_is_its_shuts_nobody_elses() {
    let listener = TcpListener::bind((LOCAL, 0)).unwrap();
    let at = listener.local_addr().unwrap();
    for provider in PROVIDERS {
        let mut others = TcpStream::connect(at).unwrap();
        let (mut other, _) = listener.accept().unwrap();
        let mut end = End::open(provider, "127.0.0.2");
        let mut name = end.rail.name().to_vec();
        name[2..4].copy_from_slice(&at.port().to_be_bytes());
        name[4..8].copy_from_slice(&[127, 0, 0, 1]);
        end.rail.reach(&name).unwrap();
        drop(end);
        other.write_all(&[7]).unwrap();
        others.read_exact(&mut [0]).unwrap();
    }
}

/// Whoever can open a connection to where an endpoint listens, and has not been told its name: the provider sees nothing of what he says.
#[test]
fn strangers_are_not_let_in() {
    let told = |provider: &str, end: &End| {
        // (Devices have connections of their own.)
        PROVIDERS.contains(&provider).then(|| {
            let name = end.rail.name();
            let port = u16::from_be_bytes([name[2], name[3]]);
            (Ipv4Addr::new(name[4], name[5], name[6], name[7]), port)
        })
    };
    for (provider, local) in &tested() {
        let (mut a, mut b) = (End::open(provider, local), End::open(provider, local));
        let Some(at) = told(provider, &b) else { continue };
        // Another one's secret, and none.
        for said in [a.rail.name().to_vec(), vec![3; 16], vec![0; 4096]] {
            let mut stranger = TcpStream::connect(at).unwrap();
            stranger.set_nonblocking(true).unwrap();
            stranger.write_all(&said).unwrap();
            until([&mut a, &mut b], "the stranger is sent away", |_, _| {
                match stranger.read(&mut [0]) {
                    Ok(0) => true,
                    Ok(_) => panic!("{provider}: a stranger is answered"),
                    Err(error) => error.kind() != std::io::ErrorKind::WouldBlock,
                }
            });
        }
        // As any program with this library, which speaks as the provider does.
        let mut wrong = b.rail.name().to_vec();
        *wrong.last_mut().unwrap() ^= 1;
        let to_b = a.rail.reach(&wrong).unwrap();
        let began = Instant::now();
        let mut is_over = false;
        until([&mut a, &mut b], "the peer is given up", |a, _| {
            is_over |= match a.rail.send(to_b, b"x", 1) {
                Ok(()) | Err(Refused::Full) => !a.failed.is_empty(),
                Err(Refused::Failed(_)) => true,
            };
            is_over || began.elapsed() > LIMIT / 2
        });
        assert!(is_over && b.messages.is_empty() && !b.broken, "{provider}: a stranger is let in");
        a.rail.forget(to_b);
        // And one who knows it.
        let mut c = End::open(provider, local);
        let to_b = c.rail.reach(b.rail.name()).unwrap();
        until([&mut c, &mut b], "a message of who was told", |c, b| {
            b.messages.iter().any(|message| message == b"y") || {
                let _ = c.rail.send(to_b, b"y", 2);
                false
            }
        });
    }
}
