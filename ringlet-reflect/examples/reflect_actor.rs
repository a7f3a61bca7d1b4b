//! A program on a host of a cluster, for tests; what it is to do comes a line at a time, and it says that line again when it is done.
//!
//! `reflect_actor write SLOT SLOTS` writes 1, 2, .. to its word, and looks at all of them; `count` adds to one word, under a lock of the cluster's.
//!
//! Who looks takes what stays the same between two looks: as each word only grows, those were there at one moment. So of any two of those, of
//! whichever hosts, one is the earlier one if all hosts had one order of writes.

use std::io::{BufRead, Write, stdin, stdout};
use std::sync::atomic::Ordering;
use std::sync::mpsc::{TryRecvError, channel};
use std::time::Duration;

use ringlet_reflect::{Host, Permission, Receiver, Status, Use, Wait};

const KEY: u64 = 0x7100;
const BYTES: usize = 8 << 10;
const KEPT: usize = 4000;
/// The word that is counted in, far from the others.
const COUNTER: usize = 512;

type Words = Vec<u64>;

fn words(from: &Receiver, slots: usize) -> Words {
    from.words()[..slots].iter().map(|word| word.load(Ordering::Acquire)).collect()
}

fn look(from: &Receiver, slots: usize, seen: &mut Vec<Words>) {
    let found = words(from, slots);
    if found != words(from, slots) || seen.last() == Some(&found) {
        return;
    }
    if seen.len() == KEPT {
        // (Each second one is enough, of all the time that there was.)
        let mut nth = 0;
        seen.retain(|_| {
            nth += 1;
            nth % 2 == 0
        });
    }
    seen.push(found);
}

fn shown(words: &[u64]) -> String {
    words.iter().map(u64::to_string).collect::<Vec<_>>().join(" ")
}

/// What a call came to.
fn code(done: Result<(), Status>) -> String {
    done.map_or_else(|status| status.code().to_string(), |()| "0".to_owned())
}

fn main() -> Result<(), Status> {
    let argv: Vec<String> = std::env::args().collect();
    let number = |at: usize| argv.get(at).and_then(|word| word.parse::<usize>().ok());
    let (Some(slot), Some(slots)) = (number(2), number(3)) else {
        return Err(Status::BadParameter);
    };
    let counts = argv[1] == "count";
    let host = Host::open()?;
    let region = host.allocate(KEY, BYTES, &Permission::default())?;
    let (to, from) = (region.transmit(Use::default())?, region.receive(Use::default())?);
    let locks = host.locks(KEY, 1, 0o600, false)?;
    let (said, hears) = channel();
    std::thread::spawn(move || {
        for line in stdin().lock().lines().map_while(Result::ok) {
            if said.send(line).is_err() {
                return;
            }
        }
    });
    let say = |line: &str| {
        println!("{line}");
        let _ = stdout().flush();
    };
    let (mut writes, mut seen, mut own) = (false, Vec::new(), words(&from, slots)[slot]);
    say("ready");
    loop {
        let line = match hears.try_recv() {
            Ok(line) => line,
            Err(TryRecvError::Disconnected) => return Ok(()),
            Err(TryRecvError::Empty) if !writes => {
                look(&from, slots, &mut seen);
                std::thread::sleep(Duration::from_millis(2));
                continue;
            }
            Err(TryRecvError::Empty) if counts => {
                locks.acquire(0, Wait::Forever)?;
                // (What its last holder has written is before the lock in the order, and so is here.)
                let count = from.words()[COUNTER].load(Ordering::Acquire) + 1;
                to.put(COUNTER * 8, &count.to_le_bytes())?;
                locks.release(0)?;
                own += 1;
                continue;
            }
            Err(TryRecvError::Empty) => {
                own += 1;
                to.put(slot * 8, &own.to_le_bytes())?;
                look(&from, slots, &mut seen);
                continue;
            }
        };
        match line.as_str() {
            "go" => writes = true,
            "stop" => writes = false,
            // Until all have what was written.
            "settle" => drop(host.check_errors(0, host.errors(0)?)?),
            "show" => seen.iter().for_each(|words| say(&shown(words))),
            "words" => say(&shown(&words(&from, slots))),
            "counter" => {
                let count = from.words()[COUNTER].load(Ordering::Acquire);
                say(&shown(&[count, own]));
            }
            "hosts" => say(&host.cluster()?.hosts.join(" ")),
            "rails" => say(&host.cluster()?.active.to_string()),
            "lock" => say(&code(locks.acquire(0, Wait::Forever))),
            "try" => say(&code(locks.acquire(0, Wait::No))),
            "unlock" => say(&code(locks.release(0))),
            "end" => return Ok(()),
            _ => return Err(Status::BadParameter),
        }
        say(&line);
    }
}
