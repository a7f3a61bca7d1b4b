//! A program on a host of a cluster, for tests; what it is to do comes a line at a time, and it says that line again when it is done.
//!
//! `reflect_actor write SLOT SLOTS` writes 1, 2, .. to its word, and looks at all of them; `count` adds to one word, under a lock of the cluster's.
//!
//! Who looks takes what stays the same between two looks: as each word only grows, those were there at one moment. So of any two of those, of
//! whichever hosts, one is the earlier one if all hosts had one order of writes.

use std::hint::black_box;
use std::io::{BufRead, Write, stdin, stdout};
use std::sync::atomic::Ordering;
use std::sync::mpsc::{TryRecvError, channel};
use std::time::{Duration, Instant};

use ringlet_reflect::{Host, Permission, Receiver, Status, Transmitter, Use, Wait};

const KEY: u64 = 0x7100;
const BYTES: usize = 256 << 10;
const KEPT: usize = 4000;
/// The word that is counted in, far from the others; two of those who measure; and where they write what is long.
const COUNTER: usize = 512;
const PING: usize = 640;
const PONG: usize = 768;
const LONG: usize = 128 << 10;
const CHUNK_BYTES: usize = 32 << 10;
/// Of so many trips the best time is told.
const BATCH: u64 = 50;

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

fn until(from: &Receiver, word: usize, value: u64) {
    while from.words()[word].load(Ordering::Acquire) != value {
        std::hint::spin_loop();
    }
}

/// There and back so often, of one word; the shortest way there of a batch, in nanoseconds.
fn ping(to: &Transmitter, from: &Receiver, trips: u64) -> Result<u64, Status> {
    let (mut best, mut since) = (u64::MAX, Instant::now());
    for trip in 1..=trips {
        to.put(PING * 8, &trip.to_le_bytes())?;
        until(from, PONG, trip);
        if trip.is_multiple_of(BATCH) {
            best = best.min(since.elapsed().as_nanos() as u64 / BATCH / 2);
            since = Instant::now();
        }
    }
    Ok(best)
}

fn pong(to: &Transmitter, from: &Receiver, trips: u64) -> Result<(), Status> {
    for trip in 1..=trips {
        until(from, PING, trip);
        to.put(PONG * 8, &trip.to_le_bytes())?;
    }
    Ok(())
}

/// Megabytes a second until the other one has all of it, and of a copy in memory.
fn stream(to: &Transmitter, from: &Receiver, megabytes: usize) -> Result<[u64; 2], Status> {
    let (chunk, mut copied) = (vec![7; CHUNK_BYTES], vec![0; BYTES - LONG]);
    let chunks = (megabytes << 20) / CHUNK_BYTES;
    let places = (BYTES - LONG) / CHUNK_BYTES;
    let rate = |since: Instant| {
        ((chunks * CHUNK_BYTES) as f64 / 1e6 / since.elapsed().as_secs_f64()) as u64
    };
    let since = Instant::now();
    for nth in 0..chunks {
        to.put(LONG + nth % places * CHUNK_BYTES, &chunk)?;
    }
    to.put(PING * 8, &1u64.to_le_bytes())?;
    until(from, PONG, 1);
    let there = rate(since);
    let since = Instant::now();
    for nth in 0..chunks {
        copied[nth % places * CHUNK_BYTES..][..CHUNK_BYTES].copy_from_slice(black_box(&chunk));
    }
    black_box(&copied);
    Ok([there, rate(since)])
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
            "ping" => say(&ping(&to, &from, 20 * BATCH)?.to_string()),
            "pong" => pong(&to, &from, 20 * BATCH)?,
            "stream" => say(&shown(&stream(&to, &from, 256)?)),
            // (Its other end, and what both words begin from.)
            "sink" => pong(&to, &from, 1)?,
            "clear" => [PING, PONG].into_iter().try_for_each(|word| to.put(word * 8, &[0; 8]))?,
            "end" => return Ok(()),
            _ => return Err(Status::BadParameter),
        }
        say(&line);
    }
}
