//! Many ports at once, of several processes: all meet, a broadcast comes to each once, unicast to the one that it is for; half of them are killed at
//! any moment, the others go on, and new ones come. 64 ports; `RINGLET_PORTS=512` is as many as a network takes (`make ports`).

mod member;

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Instant;

use member::{BROADCAST, Member, mac, until};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use ringlet_ethernet::room::Rules;
use ringlet_ethernet::{Policy, Room};

const FOLDER: &str = "RINGLET_CROWD";
/// Rounds of frames between which ports die, or come.
const ROUNDS: usize = 3;
const FRAMES: usize = 40;

/// In a process of its own: opens ports, and does what is said on its standard input, a line each.
#[test]
#[ignore = "is run by the other one"]
fn some_of_them() {
    let Ok(folder) = std::env::var(FOLDER) else { return };
    let room = Room::open(Path::new(&folder), "net").unwrap();
    let mut members = HashMap::new();
    for line in std::io::stdin().lines() {
        let line = line.unwrap();
        let words: Vec<&str> = line.split(' ').collect();
        let number = |at: usize| words[at].parse::<u64>().unwrap();
        match words[0] {
            "come" => {
                for port in number(1)..number(2) {
                    members.insert(port, Member::new(&room, port as u16));
                }
                println!("@come");
            }
            "meet" => {
                members.values().for_each(|member| member.meets(number(1) as usize));
                println!("@met");
            }
            // From one, to one, or to all if that is 0.
            "send" => {
                let to = if number(2) == 0 { BROADCAST } else { mac(number(2) as u16) };
                let member = &members[&number(1)];
                member.send(to, member.mac, number(3));
            }
            // How many were heard, in all; then by each which, and how often.
            "heard" => {
                let heard: u64 = members.values().map(|member| member.heard().len() as u64).sum();
                println!("@{heard}");
            }
            "forget" => {
                for member in members.values() {
                    let mut counts = HashMap::<u64, usize>::new();
                    for heard in member.heard().drain(..) {
                        assert!([BROADCAST, member.mac].contains(&heard.to), "{heard:?}");
                        *counts.entry(heard.number).or_default() += 1;
                    }
                    let mut counts: Vec<(u64, usize)> = counts.into_iter().collect();
                    counts.sort_unstable();
                    let texts = counts.iter().map(|(number, count)| format!("{number}x{count}"));
                    println!("@{} {}", member.mac, texts.collect::<Vec<_>>().join(" "));
                }
                println!("@all");
            }
            other => panic!("{other}"),
        }
    }
}

/// A process with some of the ports.
struct Part {
    child: Child,
    says: ChildStdin,
    heard: BufReader<ChildStdout>,
    ports: std::ops::Range<u64>,
}

impl Part {
    fn new(folder: &Path, ports: std::ops::Range<u64>) -> Part {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["some_of_them", "--exact", "--ignored", "--nocapture"])
            .env(FOLDER, folder)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (says, heard) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let mut part = Part { child, says, heard: BufReader::new(heard), ports };
        part.say(&format!("come {} {}", part.ports.start, part.ports.end));
        part
    }

    fn say(&mut self, line: &str) {
        writeln!(self.says, "{line}").unwrap();
    }

    /// The next answer. (Beside it the harness writes what it has to say.)
    fn hear(&mut self) -> String {
        let mut line = String::new();
        loop {
            line.clear();
            assert!(
                self.heard.read_line(&mut line).unwrap() > 0,
                "a process with ports has failed"
            );
            if let Some((_, said)) = line.trim_end().split_once('@') {
                return said.to_owned();
            }
        }
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// (xorshift)
struct Random(u64);

impl Random {
    fn below(&mut self, most: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % most as u64) as usize
    }
}

struct Crowd {
    folder: tempfile::TempDir,
    parts: Vec<Part>,
    random: Random,
    number: u64,
}

impl Crowd {
    fn meet(&mut self) {
        let others = self.ports().len() - 1;
        self.parts.iter_mut().for_each(|part| part.say(&format!("meet {others}")));
        self.parts.iter_mut().for_each(|part| assert_eq!(part.hear(), "met"));
        let room = Room::open(self.folder.path(), "net").unwrap();
        assert_eq!(room.ports().unwrap().len(), others + 1);
    }

    fn ports(&self) -> Vec<u64> {
        self.parts.iter().flat_map(|part| part.ports.clone()).collect()
    }

    /// Frames of random ports to all, or to one: each is heard once by whom it is for, and by nobody else. `amid` is done between them.
    fn speak(&mut self, mut amid: impl FnMut(&mut Random)) {
        let ports = self.ports();
        let mut expected: HashMap<u64, Vec<u64>> = HashMap::new();
        for nth in 0..FRAMES {
            let from = ports[self.random.below(ports.len())];
            let others: Vec<u64> = ports.iter().copied().filter(|port| *port != from).collect();
            let to = others[self.random.below(others.len())];
            let (said, to) = if nth % 2 == 0 { (0, &others[..]) } else { (to, &[to][..]) };
            self.number += 1;
            for port in to {
                expected.entry(*port).or_default().push(self.number);
            }
            let sender = self.parts.iter_mut().find(|part| part.ports.contains(&from)).unwrap();
            sender.say(&format!("send {from} {said} {}", self.number));
            amid(&mut self.random);
        }
        for part in &mut self.parts {
            let all = part.ports.clone().map(|port| expected.get(&port).map_or(0, Vec::len));
            let all: usize = all.sum();
            until("what was sent", || {
                part.say("heard");
                let heard: usize = part.hear().parse().unwrap();
                assert!(heard <= all, "{heard} frames came of {all}");
                heard == all
            });
            part.say("forget");
            loop {
                let line = part.hear();
                let Some((port, heard)) = line.split_once(' ') else { break };
                let is_it = |number: &u64| mac(*number as u16).to_string() == port;
                let number = part.ports.clone().find(is_it).unwrap();
                let once = expected.get(&number).into_iter().flatten();
                let once: Vec<String> = once.map(|number| format!("{number}x1")).collect();
                assert_eq!(heard, once.join(" "), "port {number}");
            }
        }
    }
}

/// What these take, in MiB: their shares of the memory, and the tables by which they reach it.
fn memory(parts: &[Part]) -> [u64; 2] {
    let sum = |file: &str, key: &str| {
        let of = |part: &Part| {
            let text = std::fs::read_to_string(format!("/proc/{}/{file}", part.child.id()));
            let text = text.unwrap_or_default();
            let line = text.lines().find_map(|line| line.strip_prefix(key)).unwrap_or("0");
            line.split_whitespace().next().and_then(|kib| kib.parse::<u64>().ok()).unwrap_or(0)
        };
        parts.iter().map(of).sum::<u64>() / 1024
    };
    [sum("smaps_rollup", "Pss:"), sum("status", "VmPTE:")]
}

#[test]
fn a_crowd_meets_speaks_dies_and_comes_again() {
    let of = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let ports = of("RINGLET_PORTS").unwrap_or(64);
    let seed = of("SEED").unwrap_or_else(|| std::process::id().into()).max(1);
    println!("SEED={seed}");
    // A socket for each pair, and a few for each port: as few processes as may have so many descriptors.
    let (_, most) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    let needs = |processes: u64| ports / processes * (ports + 16) + 256;
    let processes = [8, 16, 32, 64].into_iter().find(|processes| needs(*processes) <= most);
    let processes = processes.expect("so many descriptors (`ulimit -Hn`)");
    setrlimit(Resource::RLIMIT_NOFILE, needs(processes), most).unwrap();
    let each = ports / processes;
    let folder = tempfile::tempdir().unwrap();
    let rules = Rules { addresses: Policy::Moving, storm: 0, bridge: false };
    Room::create(folder.path(), "net", rules, None).unwrap();
    let range = |nth: u64| 1 + nth * each..1 + (nth + 1) * each;
    let began = Instant::now();
    let parts = (0..processes).map(|nth| Part::new(folder.path(), range(nth))).collect();
    let mut crowd = Crowd { folder, parts, random: Random(seed), number: 0 };
    crowd.parts.iter_mut().for_each(|part| assert_eq!(part.hear(), "come"));
    crowd.meet();
    let met = began.elapsed();
    let [bytes, tables] = memory(&crowd.parts);
    println!(
        "{ports} ports of {processes} processes have met in {met:.1?}; they take {bytes} MiB, and {tables} of page tables"
    );
    for _ in 0..ROUNDS {
        crowd.speak(|_| ());
        // Half of them die while the others speak, and go on.
        let half = crowd.parts.len() / 2;
        let mut doomed = crowd.parts.split_off(half);
        let mut left = FRAMES;
        crowd.speak(|random| {
            left -= 1;
            if !doomed.is_empty() && (left < doomed.len() || random.below(FRAMES / half / 2) == 0) {
                doomed.pop();
            }
        });
        assert!(doomed.is_empty());
        crowd.meet();
        crowd.speak(|_| ());
        let folder = crowd.folder.path().to_owned();
        let new = processes / 2..processes;
        crowd.parts.extend(new.map(|nth| Part::new(&folder, range(nth))));
        crowd.parts[half..].iter_mut().for_each(|part| assert_eq!(part.hear(), "come"));
        crowd.meet();
    }
    let [bytes, tables] = memory(&crowd.parts);
    println!("in the end, after {:.1?}, {bytes} MiB, and {tables} of page tables", began.elapsed());
}
