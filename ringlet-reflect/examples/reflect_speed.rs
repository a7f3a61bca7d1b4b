//! How fast reflective memory of two hosts is, and a connection between them: one end of what tests/node/reflect_speed.py measures.
//!
//! `reflect_speed answer ADDRESS`, `reflect_speed ask ADDRESS TRIPS`: a word of eight bytes there and back, by a connection.
//! `reflect_speed memory`: what it is to do comes a line at a time, and it says what came of that.

use std::hint::black_box;
use std::io::{self, BufRead, Read, Write, stdin, stdout};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::Ordering;
use std::sync::mpsc::{channel, sync_channel};
use std::time::{Duration, Instant};

use ringlet_reflect::{Host, PAGE_BYTES, Permission, Receiver, Status, Transmitter, Use};

const KEY: u64 = 0x7200;
/// Where pages are that are pinged by, each with one word; behind them what is long.
const PING: usize = 0;
const PONG: usize = PAGE_BYTES;
const LONG: usize = 2 * PAGE_BYTES;
const REGION_BYTES: usize = 8 << 20;
/// Each of a copy's ends: more than there is cache.
const COPY_BYTES: usize = 64 << 20;
const CHUNK_BYTES: usize = 64 << 10;
/// Trips before those that count.
const WARMING: usize = 200;

/// Nanoseconds there, half of a round: median, and the hundredth part that took longest begins where.
fn told(mut rounds: Vec<u64>) -> String {
    let mut counted = rounds.split_off(WARMING.min(rounds.len() / 2));
    counted.sort_unstable();
    let at = |part: usize| counted[(counted.len() - 1) * part / 100] / 2;
    format!("{} {}", at(50), at(99))
}

fn rounds(trips: usize, mut trip: impl FnMut() -> io::Result<()>) -> io::Result<Vec<u64>> {
    (0..trips)
        .map(|_| {
            let since = Instant::now();
            trip().map(|()| since.elapsed().as_nanos() as u64)
        })
        .collect()
}

fn failed(status: Status) -> io::Error {
    io::Error::other(status.about())
}

struct Memory {
    to: Transmitter,
    from: Receiver,
}

/// Waits for a word by watching it, or asleep.
struct Waiter<'a> {
    from: &'a Receiver,
    at: usize,
    watch: Option<ringlet_reflect::Watch>,
}

impl Waiter<'_> {
    fn value(&self) -> u64 {
        self.from.words()[self.at / 8].load(Ordering::Acquire)
    }

    fn until(&mut self, value: u64) {
        while self.value() != value {
            match &mut self.watch {
                Some(watch) => drop(watch.wait(Some(Duration::from_secs(1)))),
                None => std::hint::spin_loop(),
            }
        }
    }
}

impl Memory {
    fn open() -> Result<Memory, Status> {
        let host = Host::open()?;
        let region = host.allocate(KEY, REGION_BYTES, &Permission::default())?;
        Ok(Memory { to: region.transmit(Use::default())?, from: region.receive(Use::default())? })
    }

    fn waiter(&self, at: usize, sleeps: bool) -> Result<Waiter<'_>, Status> {
        let watch = if sleeps { Some(self.from.watch(at)?) } else { None };
        Ok(Waiter { from: &self.from, at, watch })
    }

    fn put(&self, at: usize, value: u64) -> io::Result<()> {
        self.to.put(at, &value.to_le_bytes()).map_err(failed)
    }

    fn ping(&self, trips: usize, sleeps: bool) -> io::Result<Vec<u64>> {
        let mut waiter = self.waiter(PONG, sleeps).map_err(failed)?;
        let mut value = waiter.value();
        rounds(trips, || {
            value += 1;
            self.put(PING, value)?;
            waiter.until(value);
            Ok(())
        })
    }

    fn pong(&self, trips: usize, sleeps: bool) -> io::Result<()> {
        let mut waiter = self.waiter(PING, sleeps).map_err(failed)?;
        let mut answered = self.waiter(PONG, true).map_err(failed)?;
        let value = answered.value();
        (1..=trips as u64).try_for_each(|trip| {
            waiter.until(value + trip);
            self.put(PONG, value + trip)
        })?;
        // (From which the next time begins.)
        answered.until(value + trips as u64);
        Ok(())
    }

    /// Bytes from `source`, over and over, until the other one has seen that all are there.
    fn stream(&self, source: &[u8], bytes: usize) -> io::Result<f64> {
        let mut waiter = self.waiter(PONG, true).map_err(failed)?;
        let value = waiter.value() + 1;
        let places = (REGION_BYTES - LONG) / CHUNK_BYTES;
        let since = Instant::now();
        for (nth, chunk) in
            source.chunks_exact(CHUNK_BYTES).cycle().take(bytes / CHUNK_BYTES).enumerate()
        {
            self.to.put(LONG + nth % places * CHUNK_BYTES, chunk).map_err(failed)?;
        }
        self.put(PING, value)?;
        waiter.until(value);
        Ok(bytes as f64 / 1e6 / since.elapsed().as_secs_f64())
    }

    /// Of what was received.
    fn digest(&self) -> u64 {
        let words = &self.from.words()[LONG / 8..];
        words.iter().fold(0, |digest: u64, word| {
            (digest.rotate_left(5) ^ word.load(Ordering::Acquire))
                .wrapping_mul(0x9e37_79b9_7f4a_7c15)
        })
    }
}

/// Megabytes a second of copies, one thread's, from memory to memory.
fn copies(source: &[u8], to: &mut [u8], bytes: usize) -> f64 {
    let since = Instant::now();
    let pairs = || source.chunks_exact(CHUNK_BYTES).zip(0..);
    for (chunk, nth) in pairs().cycle().take(bytes / CHUNK_BYTES) {
        to[nth * CHUNK_BYTES..][..CHUNK_BYTES].copy_from_slice(black_box(chunk));
    }
    black_box(to);
    bytes as f64 / 1e6 / since.elapsed().as_secs_f64()
}

/// Megabytes a second of the same copies as a stream's, in as many threads as that has processes, and nothing else: what this machine has for it at best.
fn chain(source: &[u8], bytes: usize) -> f64 {
    const CHUNKS: usize = 1 << 4;
    let chunks = || (0..CHUNKS).map(|_| vec![1u8; CHUNK_BYTES]).collect::<Vec<_>>();
    let region = || vec![1u8; REGION_BYTES];
    let way = || {
        let ((full, come), (empty, free)) = (sync_channel::<Vec<u8>>(CHUNKS), channel());
        chunks().into_iter().for_each(|chunk| empty.send(chunk).expect("its end is here"));
        (full, come, empty, free)
    };
    let place = |nth: usize| (nth % (REGION_BYTES / CHUNK_BYTES) * CHUNK_BYTES, nth % CHUNKS);
    let ((log, logged, read, room), (lane, passed, taken, left)) = (way(), way());
    let (mut batches, mut ring, mut frames) = (chunks(), chunks(), chunks());
    let (mut here, mut there) = (region(), region());
    let since = Instant::now();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            for (nth, chunk) in logged.into_iter().enumerate() {
                let (at, slot) = place(nth);
                batches[slot].copy_from_slice(&chunk);
                let _ = read.send(chunk);
                here[at..][..CHUNK_BYTES].copy_from_slice(&batches[slot]);
                let Ok(mut out): Result<Vec<u8>, _> = left.recv() else { return };
                out.copy_from_slice(&batches[slot]);
                let _ = lane.send(out);
            }
            black_box(here);
        });
        scope.spawn(move || {
            for (nth, chunk) in passed.into_iter().enumerate() {
                let (at, slot) = place(nth);
                ring[slot].copy_from_slice(&chunk);
                let _ = taken.send(chunk);
                frames[slot].copy_from_slice(&ring[slot]);
                there[at..][..CHUNK_BYTES].copy_from_slice(&frames[slot]);
            }
            black_box(there);
        });
        for chunk in source.chunks_exact(CHUNK_BYTES).cycle().take(bytes / CHUNK_BYTES) {
            let Ok(mut out) = room.recv() else { return };
            out.copy_from_slice(chunk);
            let _ = log.send(out);
        }
        drop(log);
    });
    bytes as f64 / 1e6 / since.elapsed().as_secs_f64()
}

fn by_memory() -> io::Result<()> {
    let memory = Memory::open().map_err(failed)?;
    let source: Vec<u8> =
        (0..COPY_BYTES as u64 / 8).flat_map(|word| (word * 0x1_0000_0001).to_le_bytes()).collect();
    let mut copied = vec![1; COPY_BYTES];
    let say = |said: String| {
        println!("{said}");
        let _ = stdout().flush();
    };
    say("ready".into());
    for line in stdin().lock().lines() {
        let line = line?;
        let words: Vec<&str> = line.split(' ').collect();
        let number =
            |at: usize| words.get(at).and_then(|word| word.parse::<usize>().ok()).unwrap_or(0);
        let sleeps = words.get(2) == Some(&"asleep");
        say(match words[0] {
            "ping" => told(memory.ping(number(1), sleeps)?),
            "pong" => memory.pong(number(1), sleeps).map(|()| "done".into())?,
            "stream" => format!("{:.0}", memory.stream(&source, number(1) << 20)?),
            "copy" => format!("{:.0}", copies(&source, &mut copied, number(1) << 20)),
            "chain" => format!("{:.0}", chain(&source, number(1) << 20)),
            "digest" => format!("{:x}", memory.digest()),
            _ => return Ok(()),
        });
    }
    Ok(())
}

fn answer(address: &str) -> io::Result<()> {
    let listener = TcpListener::bind(address)?;
    println!("ready");
    stdout().flush()?;
    let (mut end, _) = listener.accept()?;
    end.set_nodelay(true)?;
    let mut word = [0; 8];
    while end.read(&mut word)? == word.len() {
        end.write_all(&word)?;
    }
    Ok(())
}

fn ask(address: &str, trips: usize) -> io::Result<()> {
    let mut end = TcpStream::connect(address)?;
    end.set_nodelay(true)?;
    let mut word = [7; 8];
    let mut trip = || {
        end.write_all(&word)?;
        end.read_exact(&mut word)
    };
    // (So long that it is in memory by then.)
    let since = Instant::now();
    while since.elapsed() < Duration::from_secs(1) {
        trip()?;
    }
    println!("{}", told(rounds(trips, trip)?));
    Ok(())
}

fn main() -> io::Result<()> {
    let words: Vec<String> = std::env::args().collect();
    match words.iter().map(String::as_str).collect::<Vec<_>>()[1..] {
        ["memory"] => by_memory(),
        ["answer", address] => answer(address),
        ["ask", address, trips] => ask(address, trips.parse().map_err(io::Error::other)?),
        _ => Err(io::Error::other("memory | answer ADDRESS | ask ADDRESS TRIPS")),
    }
}
