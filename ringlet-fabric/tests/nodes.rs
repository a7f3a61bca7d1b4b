//! Nodes with several transports, endpoints that are replaced, and nodes that sleep.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Write as _};
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;

use fastrand::Rng;
use ringlet_fabric::memory::{Chaos, MemoryRail};
use ringlet_fabric::rail::Rail;
use ringlet_fabric::{Control, Memory, Node, Number, Progress, Told, Write};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

const STEPS: usize = 400_000;

fn rails(folder: &Path, name: &str, count: usize, chaos: Option<Chaos>) -> Vec<Box<dyn Rail>> {
    let rail = |nth| {
        let chaos = chaos.map(|chaos| Chaos { seed: chaos.seed + nth as u64, ..chaos });
        let rail = MemoryRail::new(folder, &format!("{name}-{nth}"), chaos).unwrap();
        Box::new(rail) as Box<dyn Rail>
    };
    (0..count).map(rail).collect()
}

/// Two ends of a transport, by the place of their node.
struct Pair {
    at: [(usize, Number); 2],
    controls: [VecDeque<Control>; 2],
    sent: [u32; 2],
    heard: [u32; 2],
    tag: u32,
}

impl Pair {
    fn open(nodes: &mut [Node], at: [usize; 2], tag: u32) -> Pair {
        Pair {
            at: at.map(|node| (node, nodes[node].open().unwrap())),
            controls: Default::default(),
            sent: [0; 2],
            heard: [0; 2],
            tag,
        }
    }

    fn is_done(&self, nodes: &mut [Node]) -> bool {
        let is_idle = |(node, number): (usize, Number)| nodes[node].transport(number).is_idle();
        self.at.map(is_idle) == [true; 2]
            && self.sent[0] == self.heard[1]
            && self.sent[1] == self.heard[0]
    }
}

/// One turn of a node: each frame is the next of its transport.
fn turn(nodes: &mut [Node], node: usize, pairs: &mut [Pair]) {
    nodes[node].poll(&mut |number, told| {
        let at = (node, number);
        let pair = pairs.iter_mut().find(|pair| pair.at.contains(&at)).expect("a transport");
        let end = usize::from(pair.at[1] == at);
        match told {
            Told::Control(control) => pair.controls[1 - end].push_back(control),
            Told::Frame(bytes) => {
                let words = [pair.tag, pair.heard[end]].map(u32::to_le_bytes).concat();
                assert_eq!(bytes, words, "another's, or in disorder");
                pair.heard[end] += 1;
            }
            Told::Ended(error) => panic!("{error}"),
            _ => {}
        }
    });
}

#[test]
fn transports_that_share_rails_do_not_meet() {
    for seed in 1..12 {
        let mut random = Rng::with_seed(seed);
        let folder = tempfile::tempdir().unwrap();
        let mut nodes: Vec<_> = ["a", "b", "c"]
            .iter()
            .zip(0..)
            .map(|(name, nth)| {
                let chaos = Chaos { seed: seed * 100 + nth * 10, fails_one_in: 2000 };
                Node::new(rails(folder.path(), name, 2, Some(chaos)))
            })
            .collect();
        let mut pairs = vec![
            Pair::open(&mut nodes, [0, 1], 1),
            Pair::open(&mut nodes, [0, 2], 2),
            Pair::open(&mut nodes, [1, 2], 3),
            Pair::open(&mut nodes, [0, 1], 4),
        ];
        let (mut step, mut tag) = (0, 4);
        loop {
            step += 1;
            assert!(step < STEPS, "by seed {seed} it does not come to an end");
            let works = step < 6000;
            let nth = random.usize(..pairs.len());
            let Pair { at, controls, sent, tag: mine, .. } = &mut pairs[nth];
            let end = random.usize(..2);
            let (node, number) = at[end];
            if works
                && nodes[node]
                    .transport(number)
                    .frame(&[*mine, sent[end]].map(u32::to_le_bytes).concat(), false)
                    .is_ok()
            {
                sent[end] += 1;
            }
            if let Some(control) = controls[end].pop_front() {
                nodes[node].control(number, control);
            }
            if random.u32(..50) == 0 {
                nodes[node].try_again(number);
            }
            turn(&mut nodes, node, &mut pairs);
            if works && random.u32(..300) == 0 {
                // What is under way of it is nobody's, though its number may be given again.
                let at = pairs.swap_remove(nth).at;
                at.iter().for_each(|(node, number)| nodes[*node].close(*number));
                tag += 1;
                pairs.push(Pair::open(&mut nodes, at.map(|(node, _)| node), tag));
            }
            if !works && pairs.iter().all(|pair| pair.is_done(&mut nodes)) {
                break;
            }
        }
        assert!(tag > 8 && pairs.iter().all(|pair| pair.heard != [0; 2]), "by seed {seed}");
    }
}

#[test]
fn an_endpoint_is_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let mut nodes = ["a", "b"].map(|name| Node::new(rails(folder.path(), name, 1, None)));
    let mut pairs = [Pair::open(&mut nodes, [0, 1], 1)];
    for round in 0..20u32 {
        for step in 0.. {
            assert!(step < STEPS, "round {round}");
            let Pair { at, sent, .. } = &mut pairs[0];
            let ((node, number), end) = (at[step % 2], step % 2);
            if sent[end] < 100 * (round + 1) {
                let words = [1, sent[end]].map(u32::to_le_bytes).concat();
                sent[end] += nodes[node].transport(number).frame(&words, false).is_ok() as u32;
            } else if pairs[0].is_done(&mut nodes) {
                break;
            } else if step % 50 == 0 {
                nodes[node].try_again(number);
            }
            let Pair { controls, .. } = &mut pairs[0];
            while let Some(control) = controls[end].pop_front() {
                nodes[node].control(number, control);
            }
            turn(&mut nodes, node, &mut pairs);
            // In the middle.
            if step == 60 {
                let rail = MemoryRail::new(folder.path(), &format!("new-{round}"), None).unwrap();
                nodes[round as usize % 2].replace(0, Box::new(rail));
            }
        }
    }
    assert_eq!(pairs[0].heard, [2000; 2]);
}

/// One end in a thread of its own, which sleeps whenever it may. The first one asks.
fn sleeper(folder: &Path, name: &'static str, wire: UnixStream, rounds: u32) -> (u32, u32) {
    let mut node = Node::new(rails(folder, name, 2, None));
    let number = node.open().unwrap();
    let bytes = vec![0u8; 1 << 16].leak();
    // SAFETY: it is never freed, and not looked at but through the pointer.
    let memory = unsafe { node.register(number, bytes.as_mut_ptr(), bytes.len()) }.unwrap();
    let mut to = wire.try_clone().unwrap();
    wire.set_nonblocking(true).unwrap();
    let mut from = BufReader::new(wire);
    let mut line = Vec::new();
    let (mut said, mut heard, mut slept, mut due) = (0u32, 0u32, 0, u32::from(name == "a"));
    let mut turns = 0u64;
    while heard < rounds || !node.transport(number).is_idle() {
        turns += 1;
        assert!(turns < 1 << 32, "{name} goes on and on, at {heard}");
        if due > 0 && said < rounds {
            due -= 1;
            let write = Write { from: memory, at: 0, bytes: 5000, to: Memory(0), offset: 9000 };
            node.transport(number).write(write).unwrap();
            node.transport(number).frame(&said.to_le_bytes(), true).unwrap();
            said += 1;
        }
        let progress = node.poll(&mut |_, told| match told {
            Told::Control(control) => {
                writeln!(to, "{}", serde_json::to_string(&control).unwrap()).unwrap()
            }
            Told::Frame(bytes) => {
                assert_eq!(bytes, heard.to_le_bytes());
                (heard, due) = (heard + 1, due + 1);
            }
            Told::Ended(error) => panic!("{error}"),
            _ => {}
        });
        match from.read_until(b'\n', &mut line) {
            Ok(0) => break,
            Ok(_) if line.ends_with(b"\n") => {
                node.control(number, serde_json::from_slice(&line).unwrap());
                line.clear();
                continue;
            }
            _ => {}
        }
        if progress == Progress::Busy || due > 0 && said < rounds || !node.may_sleep() {
            continue;
        }
        let mut fds: Vec<_> =
            node.fds().map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
        fds.push(PollFd::from_borrowed_fd(from.get_ref().as_fd(), PollFlags::IN));
        let limit = Timespec { tv_sec: 20, tv_nsec: 0 };
        assert!(poll(&mut fds, Some(&limit)).unwrap() > 0, "{name} was not woken, at {heard}");
        slept += 1;
    }
    (heard, slept)
}

#[test]
fn who_sleeps_is_woken() {
    const ROUNDS: u32 = 3000;
    let folder = tempfile::tempdir().unwrap();
    let (one, two) = UnixStream::pair().unwrap();
    let path = folder.path();
    let results = std::thread::scope(|scope| {
        let other = scope.spawn(|| sleeper(path, "b", two, ROUNDS));
        [sleeper(path, "a", one, ROUNDS), other.join().unwrap()]
    });
    assert_eq!(results.map(|(heard, _)| heard), [ROUNDS; 2]);
    assert!(results.iter().any(|(_, slept)| *slept > 0), "nobody slept");
}

/// The same between processes, which have nothing in common but a folder.
#[test]
fn processes_reach_each_other() {
    const ROUNDS: u32 = 3000;
    const FOLDER: &str = "RINGLET_FABRIC_TEST_FOLDER";
    if let Some(folder) = std::env::var_os(FOLDER) {
        let folder = Path::new(&folder);
        let wire = UnixStream::connect(folder.join("control")).unwrap();
        assert_eq!(sleeper(folder, "b", wire, ROUNDS).0, ROUNDS);
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let listener = UnixListener::bind(folder.path().join("control")).unwrap();
    let mut other = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "processes_reach_each_other"])
        .env(FOLDER, folder.path())
        .spawn()
        .unwrap();
    let mut fds = [PollFd::new(&listener, PollFlags::IN)];
    let limit = Timespec { tv_sec: 60, tv_nsec: 0 };
    assert_eq!(poll(&mut fds, Some(&limit)).unwrap(), 1, "it does not come");
    let (wire, _) = listener.accept().unwrap();
    assert_eq!(sleeper(folder.path(), "a", wire, ROUNDS).0, ROUNDS);
    assert!(other.wait().unwrap().success());
}

/// Two nodes that have nothing to do say nothing, and sleep.
#[test]
fn an_idle_pair_costs_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let mut nodes = ["a", "b"].map(|name| Node::new(rails(folder.path(), name, 2, None)));
    let mut pairs = [Pair::open(&mut nodes, [0, 1], 1)];
    for step in 0..400 {
        let Pair { at, controls, sent, .. } = &mut pairs[0];
        let ((node, number), end) = (at[step % 2], step % 2);
        if step < 100 {
            let words = [1, sent[end]].map(u32::to_le_bytes).concat();
            nodes[node].transport(number).frame(&words, false).unwrap();
            sent[end] += 1;
        }
        while let Some(control) = controls[end].pop_front() {
            nodes[node].control(number, control);
        }
        turn(&mut nodes, node, &mut pairs);
    }
    assert!(pairs[0].is_done(&mut nodes));
    for _ in 0..100 {
        for node in &mut nodes {
            assert!(node.may_sleep());
            assert_eq!(node.poll(&mut |_, told| panic!("{told:?}")), Progress::Idle);
        }
    }
}

/// Who owes no more than an acknowledgement may sleep for a while, and it goes when it is asked for.
#[test]
fn an_acknowledgement_waits_for_who_dozes() {
    let folder = tempfile::tempdir().unwrap();
    let mut nodes = ["a", "b"].map(|name| Node::new(rails(folder.path(), name, 1, None)));
    let mut pairs = [Pair::open(&mut nodes, [0, 1], 1)];
    for step in 0..400 {
        let Pair { at, controls, .. } = &mut pairs[0];
        let ((node, number), end) = (at[step % 2], step % 2);
        while let Some(control) = controls[end].pop_front() {
            nodes[node].control(number, control);
        }
        turn(&mut nodes, node, &mut pairs);
    }
    let number = pairs[0].at[0].1;
    nodes[0].transport(number).frame(&[1, 0].map(u32::to_le_bytes).concat(), false).unwrap();
    turn(&mut nodes, 0, &mut pairs);
    // (A rail that was quiet is not looked at in each turn.)
    for _ in 0..20 {
        if pairs[0].heard[1] == 0 {
            turn(&mut nodes, 1, &mut pairs);
        }
    }
    assert_eq!(pairs[0].heard[1], 1);
    assert!(nodes[1].owes() && !nodes[1].may_sleep() && nodes[1].may_doze());
    assert!(!nodes[0].transport(number).is_idle());
    nodes[1].acknowledge();
    turn(&mut nodes, 1, &mut pairs);
    assert!(!nodes[1].owes() && nodes[1].may_sleep());
    (0..20).for_each(|_| turn(&mut nodes, 0, &mut pairs));
    assert!(nodes[0].transport(number).is_idle());
}

/// Memory is withdrawn when what is under way to it has arrived, without anything else being said.
#[test]
fn memory_is_withdrawn_when_its_writes_have_arrived() {
    let folder = tempfile::tempdir().unwrap();
    let mut nodes = ["a", "b"].map(|name| Node::new(rails(folder.path(), name, 1, None)));
    let numbers = nodes.each_mut().map(|node| node.open().unwrap());
    let mut bytes = [vec![7u8; 10_000], vec![0u8; 10_000]];
    for (nth, node) in nodes.iter_mut().enumerate() {
        let at = bytes[nth].as_mut_ptr();
        // SAFETY: it is kept until all transports are closed.
        unsafe { node.register(numbers[nth], at, 10_000) }.unwrap();
    }
    let mut controls: [VecDeque<Control>; 2] = Default::default();
    let mut withdrawn = [false; 2];
    let mut step = |nodes: &mut [Node; 2], node: usize, withdrawn: &mut [bool; 2]| {
        while let Some(control) = controls[node].pop_front() {
            nodes[node].control(numbers[node], control);
        }
        nodes[node].poll(&mut |_, told| match told {
            Told::Control(control) => controls[1 - node].push_back(control),
            Told::Withdrawn(Memory(0)) => withdrawn[node] = true,
            Told::Up => {}
            other => panic!("{other:?}"),
        });
    };
    (0..20).for_each(|nth| step(&mut nodes, nth % 2, &mut withdrawn));
    let write = Write { from: Memory(0), at: 0, bytes: 10_000, to: Memory(0), offset: 0 };
    nodes[0].transport(numbers[0]).write(write).unwrap();
    nodes
        .iter_mut()
        .zip(numbers)
        .for_each(|(node, number)| node.transport(number).withdraw(Memory(0)));
    // It is said that it is withdrawn, before it is known that the write has arrived.
    step(&mut nodes, 0, &mut withdrawn);
    assert_eq!(withdrawn, [false; 2]);
    (0..400).for_each(|nth| step(&mut nodes, 1 - nth % 2, &mut withdrawn));
    assert_eq!(withdrawn, [true; 2]);
    assert_eq!(bytes[0], bytes[1]);
    let again = nodes[0].transport(numbers[0]).write(write);
    assert_eq!(again, Err(ringlet_fabric::NotTaken::Gone));
    nodes.iter_mut().zip(numbers).for_each(|(node, number)| node.close(number));
}
