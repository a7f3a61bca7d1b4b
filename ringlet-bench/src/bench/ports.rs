//! Frames from port to port of an Ethernet, without devices: two threads, each a program's port, on a core each.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use ringlet_ethernet::frame::{HEAD_BYTES, HEADER_BYTES};
use ringlet_ethernet::room::Rules;
use ringlet_ethernet::{Mac, Options, Policy, Port, Queue, Refused, Room};

use super::limits::{figure, ping_pong};
use super::place::pin;
use super::spec::{Figure, Spec, Unit, Work};
use super::stats::median;

const SIZES: [usize; 2] = [64, 1500];
const BATCH: usize = 64;
const WATCH_US: u64 = 200;
/// For what is to be there at once; only a fault meets it.
const PATIENCE: Duration = Duration::from_secs(10);

pub fn measure(spec: &Spec) -> Result<Vec<Figure>> {
    let Work::Ports { cpus } = spec.work else { return Ok(Vec::new()) };
    let budget = Duration::from_millis(spec.budget_ms);
    let mut figures = Vec::new();
    for size in SIZES {
        for (polls, how) in [(true, "polling"), (false, "waiting")] {
            let rate = one_way(cpus, budget, size, polls)?;
            figures.push(figure(&format!("{size} B frames, {how}"), rate, Unit::PerSecond));
        }
    }
    let half = median(round_trips(cpus, budget)?).context("no round trips")?;
    figures.push(figure("64 B, half a round trip", half, Unit::Nanoseconds));
    Ok(figures)
}

fn mac(number: u8) -> Mac {
    Mac([2, 0, 0, 0, 0, number])
}

/// Two ports that have met.
fn ports() -> Result<[(Port, Queue); 2]> {
    let folder = tempfile::tempdir()?;
    let rules = Rules { addresses: Policy::Moving, storm: 0, bridge: false };
    Room::create(folder.path(), "bench", rules, None)?;
    let room = Room::open(folder.path(), "bench")?;
    let open = |number| -> Result<(Port, Queue)> {
        let options = Options::new(format!("port{number}"), mac(number));
        let (port, queues) = Port::open(room.clone(), options, |_| ())?;
        Ok((port, queues.into_iter().next().context("a queue")?))
    };
    let mut ports = [open(1)?, open(2)?];
    let until = Instant::now() + PATIENCE;
    for (_, queue) in &mut ports {
        while queue.reserve(mac(0), HEAD_BYTES).err() == Some(Refused::NoPort) {
            ensure!(Instant::now() < until, "the ports do not meet");
            thread::sleep(Duration::from_millis(1));
        }
    }
    Ok(ports)
}

fn frame(from: u8, to: u8, size: usize) -> Vec<u8> {
    let mut frame = [&mac(to).0[..], &mac(from).0, &[0x88, 0xb5]].concat();
    frame.resize(size, 7);
    frame
}

/// False: there is no room now.
fn put(queue: &mut Queue, frame: &[u8]) -> Result<bool> {
    let to = Mac(*frame.first_chunk().context("a frame")?);
    let mut place = match queue.reserve(to, HEADER_BYTES + frame.len()) {
        Ok(place) => place,
        Err(Refused::Full) => return Ok(false),
        Err(refused) => return Err(anyhow!("{refused:?}")),
    };
    place.write(HEADER_BYTES, frame);
    place.send_quietly().map_err(|refused| anyhow!("{refused:?}"))?;
    Ok(true)
}

/// Frames a second, one way. Who polls has a core, and never sleeps.
fn one_way(cpus: (usize, usize), budget: Duration, size: usize, polls: bool) -> Result<f64> {
    let [(_one, mut sends), (_other, mut takes)] = ports()?;
    let (is_over, taken) = (AtomicBool::new(false), AtomicU64::new(0));
    let frame = frame(1, 2, size);
    thread::scope(|scope| -> Result<f64> {
        let sink = scope.spawn(|| -> Result<()> {
            pin(&[cpus.1])?;
            let mut count = 0;
            while !is_over.load(Ordering::Relaxed) {
                takes.begin();
                let any = takes.hold(BATCH, |arrived| {
                    count += u64::from(arrived.len == HEADER_BYTES + size);
                    Ok(())
                });
                taken.store(count, Ordering::Relaxed);
                if !any && !polls {
                    takes.wait_for(WATCH_US, Some(budget))?;
                }
            }
            Ok(())
        });
        let generate = || -> Result<f64> {
            pin(&[cpus.0])?;
            // (The first fifth warms memory, and what watching pays.)
            let (began, mut since) = (Instant::now(), None);
            loop {
                for _ in 0..BATCH {
                    if put(&mut sends, &frame)? {
                        continue;
                    }
                    if !polls {
                        sends.wait_for(WATCH_US, Some(budget))?;
                    }
                    sends.begin();
                }
                sends.flush();
                let (now, count) = (began.elapsed(), taken.load(Ordering::Relaxed));
                match since {
                    None if now > budget / 5 => since = Some((now, count)),
                    Some((then, before)) if now > budget => {
                        return Ok((count - before) as f64 / (now - then).as_secs_f64());
                    }
                    _ => {}
                }
            }
        };
        // (Each a thread of its own: who begins one is on neither core.)
        let rate = scope.spawn(generate).join().map_err(|_| anyhow!("a thread has panicked"));
        is_over.store(true, Ordering::Relaxed);
        sink.join().map_err(|_| anyhow!("a thread has panicked"))??;
        rate?
    })
}

fn round_trips(cpus: (usize, usize), budget: Duration) -> Result<Vec<f64>> {
    let [(_one, mut near), (_other, mut far)] = ports()?;
    let (there, back) = (frame(1, 2, SIZES[0]), frame(2, 1, SIZES[0]));
    fn hear(queue: &mut Queue) -> Result<()> {
        let mut came = false;
        while !came {
            queue.begin();
            let any = queue.receive(1, |arrived| {
                came = arrived.len > HEAD_BYTES;
                Ok(())
            });
            if !any {
                queue.wait_for(WATCH_US, Some(PATIENCE))?;
            }
        }
        Ok(())
    }
    ping_pong(
        cpus,
        budget,
        |_| {
            ensure!(put(&mut near, &there)?, "no room for one frame");
            near.flush();
            hear(&mut near)
        },
        |_| {
            hear(&mut far)?;
            ensure!(put(&mut far, &back)?, "no room for one frame");
            far.flush();
            Ok(())
        },
    )
}
