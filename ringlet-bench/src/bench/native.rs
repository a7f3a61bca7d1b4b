//! The native library between two cores, beside the bare cache line in the same run.

use std::time::{Duration, Instant};

use anyhow::Result;
use ringlet_messages::native::*;

use super::limits::{best, cache_line, figure, ping_pong};
use super::place::pin;
use super::spec::{Figure, Spec, Unit, Work, size_name};

const WAIT: Timeout = Some(Duration::from_secs(10));
const SMALL_BYTES: usize = 8;
const LARGE_BYTES: usize = 16 << 10;
/// One-way runs; the best counts, as for the cache line.
const RUNS: u32 = 8;

pub fn measure(spec: &Spec) -> Result<Vec<Figure>> {
    let Work::Native { cpus } = spec.work else { return Ok(Vec::new()) };
    // An eighth for each: where processors are crowded, trips that were planned as fast ones become sleeps and wakes.
    let budget = Duration::from_millis(spec.budget_ms) / 8;
    let half = |what: &str, halves: Vec<f64>| -> Result<Figure> {
        Ok(figure(what, best(halves, f64::min)?, Unit::Nanoseconds))
    };
    let small = size_name(SMALL_BYTES);
    Ok(vec![
        half("cache line, half", cache_line(cpus, budget)?)?,
        half(&format!("messages, {small}, half"), copied(cpus, budget, Kind::Messages)?)?,
        half(&format!("messages in place, {small}, half"), in_place(cpus, budget)?)?,
        half(&format!("bytes, {small}, half"), copied(cpus, budget, Kind::Bytes)?)?,
        half(&format!("locked buffers, {small}, half"), locked(cpus, budget)?)?,
        half(&format!("mailboxes, {small}, half"), mailboxes(cpus, budget)?)?,
        one_way(cpus, budget, SMALL_BYTES)?,
        one_way(cpus, budget, LARGE_BYTES)?,
    ])
}

/// What one of the two threads uses, in lines of its own.
#[repr(align(128))]
struct Apart<T>(T);

fn apart<T>((near, far): (T, T)) -> (Apart<T>, Apart<T>) {
    (Apart(near), Apart(far))
}

fn buffers() -> (Apart<[u8; SMALL_BYTES]>, Apart<[u8; SMALL_BYTES]>) {
    apart(([0; SMALL_BYTES], [0; SMALL_BYTES]))
}

fn name() -> String {
    format!("bench-{}", std::process::id())
}

/// Both ends of a connection.
fn ends(kind: Kind) -> Result<(Connection, Connection), Error> {
    let options = Options::new(kind);
    let listener = Listener::bind(&name(), options)?;
    std::thread::scope(|scope| {
        let far = scope.spawn(|| connect(&name(), options, WAIT));
        let near = listener.accept(WAIT)?;
        Ok((far.join().expect("connecting does not panic")?, near))
    })
}

fn channels(kind: Kind) -> Result<(Channel, Channel), Error> {
    let (near, far) = ends(kind)?;
    Ok((near.channel()?, far.channel()?))
}

fn copied(cpus: (usize, usize), budget: Duration, kind: Kind) -> Result<Vec<f64>> {
    let (mut near, mut far) = apart(channels(kind)?);
    let (mut here, mut there) = buffers();
    ping_pong(
        cpus,
        budget,
        |_| {
            near.0.sender.send(&here.0, WAIT)?;
            near.0.receiver.receive(&mut here.0, WAIT)?;
            Ok(())
        },
        |_| {
            far.0.receiver.receive(&mut there.0, WAIT)?;
            far.0.sender.send(&there.0, WAIT)?;
            Ok(())
        },
    )
}

/// One byte of eight is written and read where it lies.
fn in_place(cpus: (usize, usize), budget: Duration) -> Result<Vec<f64>> {
    use std::sync::atomic::Ordering::Relaxed;
    fn say(sender: &mut Sender, turn: u32) -> Result<(), Error> {
        let slot = sender.reserve(SMALL_BYTES, WAIT)?;
        slot.bytes()[0].store(turn as u8, Relaxed);
        slot.commit(SMALL_BYTES)
    }
    fn hear(receiver: &mut Receiver) -> Result<u8, Error> {
        let message = receiver.peek(WAIT)?;
        let said = message.bytes()[0].load(Relaxed);
        message.release();
        Ok(said)
    }
    let (mut near, mut far) = apart(channels(Kind::Messages)?);
    ping_pong(
        cpus,
        budget,
        |turn| {
            say(&mut near.0.sender, turn)?;
            anyhow::ensure!(hear(&mut near.0.receiver)? == turn as u8);
            Ok(())
        },
        |turn| {
            anyhow::ensure!(hear(&mut far.0.receiver)? == turn as u8);
            Ok(say(&mut far.0.sender, turn)?)
        },
    )
}

fn locked(cpus: (usize, usize), budget: Duration) -> Result<Vec<f64>> {
    let (near, far) = ends(Kind::Locked)?;
    let (mut near, mut far) = apart((near.locked()?, far.locked()?));
    let (mut here, mut there) = buffers();
    ping_pong(
        cpus,
        budget,
        |_| {
            near.0.call(&[1; SMALL_BYTES], &mut here.0, WAIT)?;
            Ok(())
        },
        |_| {
            far.0.receive(&mut there.0, WAIT)?;
            far.0.send(&there.0, WAIT)?;
            Ok(())
        },
    )
}

/// A mailbox at each side, with one sender.
fn mailboxes(cpus: (usize, usize), budget: Duration) -> Result<Vec<f64>> {
    let ((near, to_near), (far, to_far)) = (mailbox("near")?, mailbox("far")?);
    let (mut near, mut far) = apart(((near, to_far), (far, to_near)));
    let (mut here, mut there) = buffers();
    ping_pong(
        cpus,
        budget,
        |_| {
            near.0.1.send(&here.0, WAIT)?;
            near.0.0.receive(&mut here.0, WAIT)?;
            Ok(())
        },
        |_| {
            far.0.0.receive(&mut there.0, WAIT)?;
            far.0.1.send(&there.0, WAIT)?;
            Ok(())
        },
    )
}

fn mailbox(whose: &str) -> Result<(Mailbox, Sender), Error> {
    let (name, options) = (format!("{}-{whose}", name()), Options::new(Kind::Mailbox));
    let mut mailbox = Mailbox::bind(&name, options)?;
    std::thread::scope(|scope| {
        let sender = scope.spawn(|| -> Result<Sender, Error> {
            let mut sender = connect(&name, options, WAIT)?.sender()?;
            sender.send(&[], WAIT)?;
            Ok(sender)
        });
        // Lets the sender in.
        mailbox.receive(&mut [], WAIT)?;
        Ok((mailbox, sender.join().expect("connecting does not panic")?))
    })
}

/// Messages of `size` bytes as fast as they go.
fn one_way(cpus: (usize, usize), budget: Duration, size: usize) -> Result<Figure> {
    let (mut near, mut far) = channels(Kind::Messages)?;
    pin(&[cpus.0])?;
    let rates = std::thread::scope(|scope| -> Result<Vec<f64>> {
        let receiving = scope.spawn(move || -> Result<(), Error> {
            let pinned = pin(&[cpus.1]);
            let mut to = vec![0; size];
            while far.receiver.receive(&mut to, WAIT)? > 0 {}
            drop(pinned);
            Ok(())
        });
        let data = vec![1; size];
        let mut rates = Vec::new();
        for _ in 0..RUNS {
            let (start, mut sent) = (Instant::now(), 0u32);
            while sent % 64 != 0 || start.elapsed() < budget / RUNS {
                near.sender.send(&data, WAIT)?;
                sent += 1;
            }
            rates.push(f64::from(sent) / start.elapsed().as_secs_f64());
        }
        near.sender.send(&[], WAIT)?;
        receiving.join().expect("receiving does not panic")?;
        Ok(rates)
    })?;
    let what = format!("messages, {}, one way", size_name(size));
    let rate = best(rates, f64::max)?;
    Ok(if size == SMALL_BYTES {
        figure(&what, rate, Unit::PerSecond)
    } else {
        figure(&what, rate * size as f64, Unit::BytesPerSecond)
    })
}
