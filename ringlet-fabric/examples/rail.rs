//! What a provider of libfabric does between two rails of this process, a thread for each, which never sleep.
//!
//!     cargo run --release -p ringlet-fabric --example rail -- [PROVIDER [ADDRESS [PART]]]      by default: tcp 127.0.0.1 1
//!
//! On a slow machine a part of the work is enough: 10 is a tenth.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use ringlet_fabric::libfabric::{Libfabric, providers};
use ringlet_fabric::rail::{Event, Grant, Peer, Rail, Refused, Region};
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};

const BLOCK: usize = 64 << 10;
const BLOCKS: usize = 16;
/// The last message of a burst, and the answer to it.
const END: u32 = u32::MAX;

#[derive(Clone, Copy)]
struct Work {
    rounds: u32,
    messages: u32,
    writes: u32,
}

fn open(provider: &str, local: &str) -> io::Result<(Libfabric, Region, Grant)> {
    let mut rail = Libfabric::open(provider, Some(local))?;
    let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
    // SAFETY: new memory, which is never unmapped.
    let memory = unsafe { mmap_anonymous(std::ptr::null_mut(), BLOCK * BLOCKS, access, flags) }?;
    // SAFETY: as above.
    let (region, grant) = unsafe { rail.register(memory.cast(), BLOCK * BLOCKS) }?;
    Ok((rail, region, grant))
}

/// What one poll has told.
#[derive(Default)]
struct Told {
    notices: u32,
    messages: u32,
    last: u32,
}

fn poll(rail: &mut Libfabric) -> Told {
    let mut told = Told::default();
    rail.poll(&mut |event| match event {
        Event::Noticed { .. } => told.notices += 1,
        Event::Message(message) => {
            told.messages += 1;
            told.last = u32::from_le_bytes(*message.first_chunk().expect("ours"));
        }
        Event::Done { .. } => (),
        Event::Failed { error, .. } | Event::Broken(error) => panic!("{error}"),
    });
    told
}

/// Sends it as soon as there is room.
fn send(rail: &mut Libfabric, to: Peer, number: u32, told: &mut Told) {
    loop {
        match rail.send(to, &u64::from(number).to_le_bytes(), 0) {
            Ok(()) => return,
            Err(Refused::Full) => add(told, poll(rail)),
            Err(Refused::Failed(error)) => panic!("{error}"),
        }
    }
}

fn add(told: &mut Told, more: Told) {
    told.notices += more.notices;
    told.messages += more.messages;
    told.last = if more.messages > 0 { more.last } else { told.last };
}

/// Answers each message of the first part; then once for all of a burst, and once for all writes.
fn answer(rail: &mut Libfabric, to: Peer, work: Work, is_over: &AtomicBool) {
    let Work { rounds, messages: burst, writes } = work;
    let mut all = Told::default();
    let mut answered = 0;
    while !is_over.load(Ordering::Relaxed) {
        add(&mut all, poll(rail));
        let due = match all.messages {
            messages if messages <= rounds => messages,
            messages if messages < rounds + burst => rounds,
            _ => rounds + 1 + u32::from(all.notices == writes),
        };
        while answered < due {
            send(rail, to, END, &mut all);
            answered += 1;
        }
    }
}

fn main() -> io::Result<()> {
    let mut words = std::env::args().skip(1);
    let provider = words.next().unwrap_or_else(|| "tcp".into());
    let local = words.next().unwrap_or_else(|| "127.0.0.1".into());
    let part: u32 = words.next().map_or(Ok(1), |part| part.parse()).expect("a number");
    assert!((1..=100).contains(&part), "a part of 1 to 100");
    let work = Work { rounds: 5_000 / part, messages: 200_000 / part, writes: 20_000 / part };
    let Work { rounds, messages, writes } = work;
    for known in providers()? {
        let address = known.address.map(|address| address.to_string()).unwrap_or_default();
        println!("{:24} {:12} {address}", known.provider, known.domain);
    }
    let (mut rail, region, _) = open(&provider, &local)?;
    let (mut other, _, grant) = open(&provider, &local)?;
    let to = rail.reach(other.name())?;
    let back = other.reach(rail.name())?;
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| answer(&mut other, back, work, &is_over));
        let mut told = Told::default();
        let await_answers = |rail: &mut Libfabric, told: &mut Told, count: u32| {
            while told.messages < count {
                add(told, poll(rail));
            }
        };
        let mut start = Instant::now();
        for round in 0..rounds {
            send(&mut rail, to, round, &mut told);
            await_answers(&mut rail, &mut told, round + 1);
            if round == rounds / 10 {
                start = Instant::now();
            }
        }
        let timed = rounds - rounds / 10 - 1;
        println!(
            "round trip of 8 B     {:10.2} us",
            start.elapsed().as_secs_f64() * 1e6 / f64::from(timed)
        );

        let start = Instant::now();
        for number in 0..messages {
            send(&mut rail, to, number, &mut told);
        }
        await_answers(&mut rail, &mut told, rounds + 1);
        println!(
            "messages of 8 B       {:10.0} /s",
            f64::from(messages) / start.elapsed().as_secs_f64()
        );

        let start = Instant::now();
        for number in 0..writes {
            let at = number as usize % BLOCKS * BLOCK;
            loop {
                match rail.write(to, region, at, BLOCK, grant, at as u64, number, 0) {
                    Ok(()) => break,
                    Err(Refused::Full) => add(&mut told, poll(&mut rail)),
                    Err(Refused::Failed(error)) => panic!("{error}"),
                }
            }
        }
        await_answers(&mut rail, &mut told, rounds + 2);
        let bytes = f64::from(writes) * BLOCK as f64;
        println!("writes of 64 KiB      {:10.0} MB/s", bytes / start.elapsed().as_secs_f64() / 1e6);
        is_over.store(true, Ordering::Relaxed);
    });
    Ok(())
}
