//! Reflective memory of one host, beside what a processor does by itself; and the kernel's file lock.

use std::hint::black_box;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use ringlet_reflect::keeper::{Options, keep};
use ringlet_reflect::{Host, Permission, Receiver, Region, Transmitter, Use, Wait};
use rustix::fs::{FlockOperation, fcntl_lock};

use super::limits::{best, cache_line, figure, line_each_way, ping_pong};
use super::place::pin;
use super::spec::{Figure, Spec, Unit, Work};

const REGION_BYTES: usize = 1 << 16;
/// Words of a message: the last one says that it is there.
const WORDS: usize = 4;
const RECEIVERS: usize = 64;
const BATCH: u32 = 10_000;

pub fn measure(spec: &Spec) -> Result<Vec<Figure>> {
    let Work::Reflect { cpus } = spec.work else { return Ok(Vec::new()) };
    let budget = Duration::from_millis(spec.budget_ms) / 10;
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("keeper");
    let (ready, is_ready) = mpsc::channel();
    let at = path.clone();
    // (Until the process ends.)
    std::thread::spawn(move || {
        let options = Options { path: Some(&at), stays: true, ..Options::default() };
        let _ = keep(&options, || ready.send(()).unwrap_or(()));
    });
    is_ready.recv().context("the keeper does not start")?;
    let hosts: Vec<Host> = (0..=RECEIVERS).map(|_| Host::at(&path)).collect::<Result<_, _>>()?;
    let regions: Vec<Region> = hosts
        .iter()
        .map(|host| host.allocate(1, REGION_BYTES, &Permission::default()))
        .collect::<Result<_, _>>()?;
    let (here, there) = (&regions[0], &regions[1]);
    let half = |what: &str, halves: Vec<f64>| -> Result<Figure> {
        Ok(figure(what, best(halves, f64::min)?, Unit::Nanoseconds))
    };
    let mut figures = vec![half("cache line, half", cache_line(cpus, budget)?)?];
    // (What the other thread looks at shares no line with what this one writes to its stack.)
    let ours = Alone((here.transmit(Use::default())?, here.receive(Use::default())?));
    let theirs = Alone((there.transmit(Use::default())?, there.receive(Use::default())?));
    let (Alone((to, from)), Alone((there_to, there_from))) = (&ours, &theirs);
    // A line that is loaded by a mapping that may only be read comes to be shared, so that a store to it fetches it again (AMD's processors, at least: by a
    // mapping that may be written it comes for good). An answer in the same word pays for that, one in another line does not.
    let there_and_back = |there: usize, back: usize| {
        ping_pong(
            cpus,
            budget,
            |turn| {
                to.words()[there].store(2 * u64::from(turn) + 1, Ordering::Release);
                until(&from.words()[back], 2 * u64::from(turn) + 2);
                Ok(())
            },
            |turn| {
                until(&there_from.words()[there], 2 * u64::from(turn) + 1);
                there_to.words()[back].store(2 * u64::from(turn) + 2, Ordering::Release);
                Ok(())
            },
        )
    };
    figures.push(half("store to load, half", there_and_back(0, 0)?)?);
    figures.push(half("line each way, half", line_each_way(cpus, budget)?)?);
    figures.push(half("store to load, line each way, half", there_and_back(64, 96)?)?);
    pin(&[cpus.0])?;
    let plain = Alone([const { AtomicU64::new(0) }; 8]);
    let stored = |what: &str, cost: f64| figure(what, cost, Unit::Nanoseconds);
    figures.push(stored("32 B, plain memory", each(budget, |n| write(&plain.0, n))));
    figures.push(stored("32 B stored", each(budget, |n| write(to.words(), n))));
    figures.push(stored("32 B stored, and run", each(budget, |n| run(to, n))));
    let receivers: Vec<Receiver> = regions[2..]
        .iter()
        .map(|region| region.receive(Use::default()))
        .collect::<Result<_, _>>()?;
    let what = format!("32 B stored, and run, {} receivers", receivers.len() + 2);
    figures.push(stored(&what, each(budget, |n| run(to, n))));
    let line = AtomicU32::new(0);
    figures.push(stored(
        "atomic exchange",
        each(budget, |n| _ = black_box(line.swap(n, Ordering::AcqRel))),
    ));
    let locks = hosts[0].locks(1, 1, 0o600, false)?;
    let mut failed = None;
    let cost = each(budget, |_| {
        failed = failed.or(locks.acquire(0, Wait::No).and_then(|()| locks.release(0)).err());
    });
    failed.map_or(Ok(()), Err)?;
    figures.push(stored("lock, taken and released", cost));
    let file = tempfile::tempfile()?;
    let mut failed = Ok(());
    let cost = each(budget, |_| {
        for operation in [FlockOperation::LockExclusive, FlockOperation::Unlock] {
            failed = failed.and(fcntl_lock(&file, operation));
        }
    });
    failed?;
    figures.push(stored("kernel's file lock, the same", cost));
    Ok(figures)
}

#[repr(align(128))]
struct Alone<T>(T);

fn until(word: &AtomicU64, value: u64) {
    while word.load(Ordering::Acquire) != value {
        std::hint::spin_loop();
    }
}

fn write(words: &[AtomicU64], number: u32) {
    for word in &words[..WORDS - 1] {
        word.store(u64::from(number), Ordering::Relaxed);
    }
    words[WORDS - 1].store(u64::from(number), Ordering::Release);
}

fn run(to: &Transmitter, number: u32) {
    write(to.words(), number);
    let _ = black_box(to.notify(0, WORDS * size_of::<u64>()));
}

/// Nanoseconds of one, in the batch that was least disturbed.
fn each(budget: Duration, mut act: impl FnMut(u32)) -> f64 {
    let (began, mut least) = (Instant::now(), f64::INFINITY);
    while began.elapsed() < budget {
        let start = Instant::now();
        (0..BATCH).for_each(&mut act);
        least = least.min(start.elapsed().as_nanos() as f64 / f64::from(BATCH));
    }
    least
}
