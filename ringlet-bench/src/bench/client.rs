//! The measuring child: an ordinary socket program with a clock.

use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};

use super::carried;
use super::datagrams;
use super::many;
use super::messages;
use super::spec::{Family, Figure, Pause, Spec, Unit, Waiting, Work, size_name};
use super::stats::Recorder;
use super::talk::pause;
use super::trips::{
    Blocking, IDLE_TRIPS, RoundTrip, SMALL, asleep, half_round_trip, path_name, settle, stream,
};
use super::wire::{Wire, dial, dial_for_messages, read_now, write_all_waiting};

pub fn measure(spec: &Spec, address: &str) -> Result<Vec<Figure>> {
    let family = spec.family;
    let budget = Duration::from_millis(spec.budget_ms);
    match &spec.work {
        Work::Latency { sizes } => {
            let mut trip = Blocking::new(dial_for_messages(family, address, false)?);
            settle(&mut trip, spec.ring_expected)?;
            pause(Pause::Ready)?;
            let mut figures = Vec::new();
            for &size in sizes {
                trip.resize(size);
                figures.push(half_round_trip(&mut trip, budget, size_name(size))?);
            }
            Ok(figures)
        }
        Work::Events { by } => {
            let mut trip = Evented::new(dial_for_messages(family, address, true)?, *by)?;
            settle(&mut trip, spec.ring_expected)?;
            pause(Pause::Ready)?;
            Ok(vec![half_round_trip(&mut trip, budget, size_name(SMALL))?])
        }
        Work::Stream { size } => {
            let mut trip = Blocking::new(dial_for_messages(family, address, false)?);
            settle(&mut trip, spec.ring_expected)?;
            pause(Pause::Ready)?;
            Ok(vec![stream(trip.wire, *size, budget)?])
        }
        Work::Datagrams { sizes } => datagrams::measure(spec, address, sizes),
        Work::Carried { .. } => carried::measure(spec, address),
        Work::Pair => {
            let mut trip = Blocking::new(dial_for_messages(family, address, false)?);
            settle(&mut trip, spec.ring_expected)?;
            pause(Pause::Ready)?;
            Ok(vec![trips_per_second(&mut trip, budget)?])
        }
        Work::Trips { size, pause_us } => {
            let mut trip = Blocking::new(dial_for_messages(family, address, false)?);
            trip.resize(*size);
            settle(&mut trip, spec.ring_expected)?;
            pause(Pause::Ready)?;
            Ok(vec![timed_trips(&mut trip, Duration::from_micros(*pause_us), budget)?])
        }
        Work::Connect | Work::Accept => {
            pause(Pause::Ready)?;
            connections_per_second(family, address, budget, spec.work == Work::Connect)
        }
        Work::Scale { idle } => scale(spec, address, *idle, budget),
        Work::Many { .. } | Work::Idle { .. } => many::measure(spec, address),
        Work::Messages { peers } => messages::measure(spec, address, peers),
        Work::Asleep => {
            let mut trip = Blocking::new(dial_for_messages(family, address, false)?);
            settle(&mut trip, spec.ring_expected)?;
            pause(Pause::Ready)?;
            asleep(trip, budget)
        }
        Work::Ucx
        | Work::Hierarchy { .. }
        | Work::Limits { .. }
        | Work::Native { .. }
        | Work::Reflect { .. }
        | Work::Ethernet { .. }
        | Work::Ethom { .. }
        | Work::Ports { .. }
        | Work::Mirror { .. }
        | Work::HandOver { .. }
        | Work::Cost { .. } => bail!("this needs no peer"),
    }
}

/// One non-blocking wire in an event loop that looks at nothing but what its set reports.
struct Evented {
    wire: Wire,
    /// None: wait by poll.
    set: Option<Epoll>,
}

const TOKEN: u64 = u64::MAX;

impl Evented {
    fn new(wire: Wire, by: Waiting) -> Result<Evented> {
        let set = match by {
            Waiting::Poll => None,
            Waiting::Epoll => {
                let set = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
                set.add(&wire, EpollEvent::new(EpollFlags::EPOLLIN, TOKEN))?;
                Some(set)
            }
        };
        Ok(Evented { wire, set })
    }

    fn wait(&self) -> Result<()> {
        match &self.set {
            Some(set) => {
                let mut events = [EpollEvent::empty(); 64];
                let count = set.wait(&mut events, EpollTimeout::NONE)?;
                if count != 1 || events[0].data() != TOKEN {
                    bail!("epoll reported {count} descriptors, of which one is due");
                }
            }
            None => {
                let mut fds = [PollFd::new(self.wire.as_fd(), PollFlags::POLLIN)];
                poll(&mut fds, PollTimeout::NONE)?;
            }
        }
        Ok(())
    }
}

impl RoundTrip for Evented {
    fn announce(&mut self, _count: u64) -> Result<()> {
        Ok(())
    }

    fn once(&mut self) -> Result<()> {
        write_all_waiting(&self.wire, &[7; SMALL])?;
        let mut reply = [0; SMALL];
        let mut have = 0;
        while have < SMALL {
            self.wait()?;
            match read_now(&self.wire, &mut reply[have..])? {
                Some(0) => bail!("the server closed the connection"),
                Some(count) => have += count,
                None => {}
            }
        }
        Ok(())
    }

    fn path(&self) -> &'static str {
        path_name(self.wire.as_fd())
    }
}

fn trips_per_second(trip: &mut impl RoundTrip, budget: Duration) -> Result<Figure> {
    const BATCH: u64 = 32;
    let mut trips = 0;
    let start = Instant::now();
    while start.elapsed() < budget {
        trip.announce(BATCH)?;
        for _ in 0..BATCH {
            trip.once()?;
        }
        trips += BATCH;
    }
    Ok(Figure {
        what: "round trips".into(),
        value: trips as f64 / start.elapsed().as_secs_f64(),
        unit: Unit::PerSecond,
        tails: None,
        path: trip.path().into(),
    })
}

/// As many as there is time for, with a pause before each.
fn timed_trips(trip: &mut Blocking, pause: Duration, budget: Duration) -> Result<Figure> {
    const BATCH: u64 = 16;
    let mut recorder = Recorder::start();
    let mut trips = 0;
    let start = Instant::now();
    while start.elapsed() < budget {
        trip.announce(BATCH)?;
        for _ in 0..BATCH {
            if !pause.is_zero() {
                thread::sleep(pause);
            }
            let began = Instant::now();
            trip.once()?;
            recorder.record(began.elapsed());
        }
        trips += BATCH;
    }
    let size = size_name(trip.message.len());
    let what = match pause.as_micros() {
        0 => size,
        us => format!("{size} and {us} us of thought"),
    };
    Ok(Figure {
        what,
        value: trips as f64 / start.elapsed().as_secs_f64(),
        unit: Unit::PerSecond,
        tails: recorder.tails(1.0),
        path: trip.path().into(),
    })
}

fn connections_per_second(
    family: Family,
    address: &str,
    budget: Duration,
    request: bool,
) -> Result<Vec<Figure>> {
    let mut recorder = Recorder::start();
    let mut byte = [7];
    let mut count = 0;
    let mut path = "kernel";
    let start = Instant::now();
    while start.elapsed() < budget {
        let began = Instant::now();
        let mut wire = dial(family, address)?;
        if request {
            wire.write_all(&byte)?;
            wire.read_exact(&mut byte)?;
        } else if wire.read(&mut byte)? != 0 {
            bail!("a server that only accepts sent something");
        }
        path = path_name(wire.as_fd());
        drop(wire);
        recorder.record(began.elapsed());
        count += 1;
    }
    Ok(vec![Figure {
        what: if request { "1 B each way" } else { "accept, close" }.into(),
        value: f64::from(count) / start.elapsed().as_secs_f64(),
        unit: Unit::PerSecond,
        tails: recorder.tails(1.0),
        path: path.into(),
    }])
}

fn scale(spec: &Spec, address: &str, idle: usize, budget: Duration) -> Result<Vec<Figure>> {
    let mut busy = Evented::new(dial_for_messages(spec.family, address, true)?, Waiting::Epoll)?;
    settle(&mut busy, spec.ring_expected)?;
    pause(Pause::Ready)?;
    let alone = half_round_trip(&mut busy, budget, "8 B, alone".into())?;
    pause(Pause::Few)?;

    let set = busy.set.as_ref().context("made to wait by epoll")?;
    let mut others = Vec::with_capacity(idle);
    for index in 0..idle {
        let wire = dial_for_messages(spec.family, address, true)
            .with_context(|| format!("connection {} of {idle}", index + 1))?;
        set.add(&wire, EpollEvent::new(EpollFlags::EPOLLIN, index as u64))?;
        others.push(wire);
        // The answer proves that the server has accepted it, so its backlog can't overflow.
        exchange_with_all(set, &others[index..], index)?;
    }
    for _ in 1..IDLE_TRIPS {
        exchange_with_all(set, &others, 0)?;
    }
    pause(Pause::Many { idle })?;

    let what = format!("8 B, beside {idle} idle");
    let mut beside = half_round_trip(&mut busy, budget, what)?;
    let on_ring = others.iter().filter(|wire| path_name(wire.as_fd()) == "ring").count();
    if spec.ring_expected && on_ring < idle {
        beside.path = format!("{} ({on_ring}/{idle})", beside.path);
    }
    Ok(vec![alone, beside])
}

/// One message to each of `wires`, and all the answers. `first` is the token of the first.
fn exchange_with_all(set: &Epoll, wires: &[Wire], first: usize) -> Result<()> {
    for wire in wires {
        write_all_waiting(wire, &[7; SMALL])?;
    }
    let mut due = wires.len() * SMALL;
    let mut events = [EpollEvent::empty(); 64];
    let mut buffer = [0; 4096];
    while due > 0 {
        let count = set.wait(&mut events, EpollTimeout::NONE)?;
        for event in &events[..count] {
            let wire = (event.data() as usize)
                .checked_sub(first)
                .and_then(|index| wires.get(index))
                .context("epoll reported a connection that is not due")?;
            match read_now(wire, &mut buffer)? {
                Some(0) => bail!("the server closed a connection"),
                Some(count) => {
                    due = due.checked_sub(count).context("more came back than was sent")?;
                }
                None => {}
            }
        }
    }
    Ok(())
}
