//! What it costs to fork, accept, close, connect for a moment, and start: in one thread, so that nobody is woken, and what ringlet adds
//! stands beside nothing else.

#![allow(unsafe_code)]

use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::sys::wait::waitpid;
use nix::unistd::{ForkResult, fork};

use super::limits::best;
use super::spec::{Cost, Figure, Spec, Unit};
use super::trips::path_name;
use super::wire::{Listener, Wire, dial};

const BATCHES: u32 = 32;
const TRUE: &str = "/bin/true";
/// Connections that are made, or closed, in one batch.
const AT_ONCE: usize = 32;
/// Round trips after which a connection has moved that can, and after which one has where those before it lived long.
const TRIPS_TO_MOVE: usize = 64;
const TRIPS_TO_MOVE_SOON: usize = 12;

pub fn measure(spec: &Spec, of: Cost) -> Result<Vec<Figure>> {
    let budget = Duration::from_millis(spec.budget_ms);
    let (listener, address) = Listener::bind(spec.family)?;
    let connect = || -> Result<(Wire, Wire)> {
        let near = dial(spec.family, &address)?;
        Ok((near, listener.accept()?))
    };
    let talk = |(near, far): &(Wire, Wire), trips: usize| -> Result<()> {
        for _ in 0..trips {
            pass(near, far)?;
            pass(far, near)?;
        }
        Ok(())
    };
    let moved = || -> Result<(Wire, Wire)> {
        let ends = connect()?;
        talk(&ends, TRIPS_TO_MOVE)?;
        Ok(ends)
    };
    let mut path = "-";
    let each = match of {
        Cost::Start => each(budget, start)?,
        Cost::Fork => each(budget, fork_once)?,
        Cost::ForkMoved => {
            let ends = moved()?;
            path = path_name(ends.0.as_fd());
            each(budget, fork_once)?
        }
        Cost::Accept => each(budget, || connect().map(drop))?,
        Cost::Short => each(budget, || {
            let (near, far) = connect()?;
            pass(&near, &far)?;
            pass(&far, &near)
        })?,
        Cost::Move => {
            let mut spent = Vec::new();
            let begin = Instant::now();
            while spent.len() < 3 || begin.elapsed() < budget {
                let mut made = Vec::with_capacity(AT_ONCE);
                let start = Instant::now();
                for _ in 0..AT_ONCE {
                    let ends = connect()?;
                    talk(&ends, TRIPS_TO_MOVE_SOON)?;
                    made.push(ends);
                }
                spent.push(start.elapsed().as_nanos() as f64 / AT_ONCE as f64);
                path = path_name(made[0].0.as_fd());
                // (Connections that end young would have later ones move late.)
                made.iter().try_for_each(|ends| talk(ends, TRIPS_TO_MOVE))?;
            }
            best(spent, f64::min)?
        }
        Cost::Close | Cost::CloseMoved => {
            let mut spent = Vec::new();
            let begin = Instant::now();
            while spent.len() < 3 || begin.elapsed() < budget {
                let make = || if of == Cost::Close { connect() } else { moved() };
                let ends = (0..AT_ONCE).map(|_| make()).collect::<Result<Vec<_>>>()?;
                path = path_name(ends[0].0.as_fd());
                let start = Instant::now();
                drop(ends);
                spent.push(start.elapsed().as_nanos() as f64 / AT_ONCE as f64);
            }
            best(spent, f64::min)?
        }
    };
    let what = match of {
        Cost::Start => "a process starts and ends",
        Cost::Fork => "fork, exit, wait",
        Cost::ForkMoved => "the same beside a connection",
        Cost::Accept => "connect, accept, close",
        Cost::Short => "1 B each way and close",
        Cost::Move => "connect and 12 round trips",
        Cost::Close => "close of both ends, new",
        Cost::CloseMoved => "close of both ends, used",
    };
    let unit = Unit::Nanoseconds;
    Ok(vec![Figure { what: what.into(), value: each, unit, tails: None, path: path.into() }])
}

/// Nanoseconds of one, in the batch that was least disturbed.
fn each(budget: Duration, mut once: impl FnMut() -> Result<()>) -> Result<f64> {
    let begin = Instant::now();
    let mut probed = 0u32;
    while probed < 4 || begin.elapsed() < budget / 8 {
        once()?;
        probed += 1;
    }
    let batch = (probed * 8).div_ceil(BATCHES);
    let mut spent = Vec::with_capacity(BATCHES as usize);
    for _ in 0..BATCHES {
        let start = Instant::now();
        for _ in 0..batch {
            once()?;
        }
        spent.push(start.elapsed().as_nanos() as f64 / f64::from(batch));
    }
    best(spent, f64::min)
}

fn pass(mut from: &Wire, mut to: &Wire) -> Result<()> {
    from.write_all(&[7])?;
    Ok(to.read_exact(&mut [0])?)
}

/// A program that does nothing, with whatever libraries our environment has it load.
fn start() -> Result<()> {
    let status = Command::new(TRUE).stdin(Stdio::inherit()).status().context(TRUE)?;
    ensure!(status.success(), "{TRUE} failed");
    Ok(())
}

fn fork_once() -> Result<()> {
    // SAFETY: the child does nothing but end; no other thread runs here.
    match unsafe { fork() }? {
        // SAFETY: ends at once.
        ForkResult::Child => unsafe { libc::_exit(0) },
        ForkResult::Parent { child } => Ok(waitpid(child, None).map(drop)?),
    }
}
