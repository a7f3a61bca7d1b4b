//! Figures 5, 6, 9 and 10 of ETHOM's paper: how long messages take, and how many bytes a second go, by TCP (as NetPIPE has it, to and fro) and by
//! TIPC (as tipcbench has it: to and fro, and one way), with the largest MTU that there is.

use std::fs::File;
use std::io::{Error, ErrorKind, Read, Write};
use std::net::TcpListener;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use ringlet_ethernet::frame::MTU_MOST;

use super::ethernet::{DEVICE, PATIENCE, PORT, address, between, connect, tool};
use super::spec::{Figure, Link, Over, Spec, Unit, size_name};
use super::stats::median;

/// As rows name what was measured, and by what.
pub const TCP: &str = "ethom, TCP";
pub const TIPC: &str = "ethom, TIPC";
pub const OURS: &str = "ringlet eth";
pub const ETHOS: &str = "ETHOS";

/// TIPC's messages are of 66,000 bytes at most.
pub const TIPC_SIZES: [usize; 7] = [1, 64, 1 << 10, 4 << 10, 8 << 10, 32 << 10, 64 << 10];
pub const TCP_SIZES: [usize; 9] =
    [1, 64, 1 << 10, 4 << 10, 8 << 10, 32 << 10, 64 << 10, 256 << 10, 1 << 20];
const MOST: usize = 1 << 20;
const BATCH: u64 = 8;
/// Of one size, one way.
const MESSAGES_MOST: u64 = 20_000;

pub fn half(size: usize) -> String {
    format!("{}, half a round trip", size_name(size))
}

pub fn rate(size: usize) -> String {
    format!("{}, bytes a second", size_name(size))
}

/// Has this kernel TIPC?
pub fn has_tipc() -> bool {
    socket().is_ok()
}

pub fn measure(spec: &Spec, by: Link, over: Over) -> Result<Vec<Figure>> {
    let sizes: &[usize] = if over == Over::Tcp { &TCP_SIZES } else { &TIPC_SIZES };
    let budget = Duration::from_millis(spec.budget_ms);
    let listen = move || match over {
        Over::Tcp => Ok(TcpListener::bind((address(2), PORT))?.into()),
        Over::Tipc => offer(),
    };
    let ask = move || {
        if over == Over::Tipc {
            bear()?;
        }
        let mut figures = Vec::new();
        for size in sizes {
            figures.extend(of_size(over, *size, budget)?);
        }
        Ok(figures)
    };
    between(by, MTU_MOST, listen, answer, ask)
}

/// What a connection begins with: messages of this size, so many of which come one way; or, if that is 0, each goes back.
fn order(size: usize, messages: u64) -> [u8; 16] {
    let mut order = [0; 16];
    order[..8].copy_from_slice(&(size as u64).to_le_bytes());
    order[8..].copy_from_slice(&messages.to_le_bytes());
    order
}

fn of_size(over: Over, size: usize, budget: Duration) -> Result<Vec<Figure>> {
    let mut bytes = vec![7; size];
    let mut line = call(over)?;
    line.write_all(&order(size, 0))?;
    let mut batch = || -> Result<f64> {
        let began = Instant::now();
        for _ in 0..BATCH {
            line.write_all(&bytes)?;
            line.read_exact(&mut bytes)?;
        }
        Ok(began.elapsed().as_nanos() as f64 / (2 * BATCH) as f64)
    };
    // (The first ones find the addresses, open TCP's window, and what watching pays.)
    for _ in 0..4 {
        batch()?;
    }
    let began = Instant::now();
    let mut halves = vec![batch()?];
    while began.elapsed() < budget {
        halves.push(batch()?);
    }
    drop(line);
    let half_ns = median(halves).context("no round trips")?;
    let per_second = match over {
        Over::Tcp => size as f64 / half_ns * 1e9,
        Over::Tipc => one_way(over, &bytes, (budget.as_nanos() as f64 / half_ns) as u64)?,
    };
    let figure = |what, value, unit| Figure { what, value, unit, tails: None, path: "-".into() };
    Ok(vec![
        figure(half(size), half_ns, Unit::Nanoseconds),
        figure(rate(size), per_second, Unit::BytesPerSecond),
    ])
}

fn one_way(over: Over, bytes: &[u8], messages: u64) -> Result<f64> {
    let messages = messages.clamp(BATCH, MESSAGES_MOST);
    let mut line = call(over)?;
    line.write_all(&order(bytes.len(), messages))?;
    let began = Instant::now();
    for _ in 0..messages {
        line.write_all(bytes)?;
    }
    line.read_exact(&mut [0])?;
    Ok((messages * bytes.len() as u64) as f64 / began.elapsed().as_secs_f64())
}

/// The far end, one connection after the other.
fn answer(listener: OwnedFd) -> Result<()> {
    let mut bytes = vec![0; MOST];
    loop {
        let mut line = accept(&listener)?;
        let mut order = [0; 16];
        line.read_exact(&mut order)?;
        let word = |at: usize| u64::from_le_bytes(order[at..at + 8].try_into().expect("8 bytes"));
        let bytes = bytes.get_mut(..word(0) as usize).context("a size")?;
        for _ in 0..word(8) {
            line.read_exact(bytes)?;
        }
        if word(8) > 0 {
            line.write_all(&[1])?;
            continue;
        }
        while line.read_exact(bytes).is_ok() && line.write_all(bytes).is_ok() {}
    }
}

fn call(over: Over) -> Result<File> {
    match over {
        Over::Tcp => Ok(OwnedFd::from(connect()?).into()),
        Over::Tipc => call_by_tipc(),
    }
}

/// struct sockaddr_tipc, of a service.
#[repr(C)]
struct Service {
    family: libc::sa_family_t,
    kind: u8,
    scope: i8,
    service: u32,
    /// The first and the last one that is offered; or the one that is called, and where.
    numbers: [u32; 2],
}

const SERVICE: u32 = 4711;
const OFFERS: u8 = 1;
const CALLS: u8 = 2;
const CLUSTER: i8 = 2;

fn service(kind: u8, numbers: [u32; 2]) -> Service {
    let family = libc::AF_TIPC as libc::sa_family_t;
    Service { family, kind, scope: CLUSTER, service: SERVICE, numbers }
}

fn socket() -> Result<OwnedFd> {
    // SAFETY: a new descriptor, ours alone.
    #[allow(unsafe_code)]
    unsafe {
        let fd = libc::socket(libc::AF_TIPC, libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC, 0);
        owned(fd)
    }
}

/// # Safety
/// A descriptor that nobody else has, or -1.
#[allow(unsafe_code)]
unsafe fn owned(fd: i32) -> Result<OwnedFd> {
    done(fd)?;
    // SAFETY: the caller's.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn done(status: i32) -> Result<(), Error> {
    if status < 0 { Err(Error::last_os_error()) } else { Ok(()) }
}

/// TIPC speaks by the device, in this thread's namespace.
fn bear() -> Result<()> {
    tool("tipc", &["bearer", "enable", "media", "eth", "device", DEVICE])
}

fn offer() -> Result<OwnedFd> {
    bear()?;
    let listener = socket()?;
    let offered = service(OFFERS, [1, 1]);
    // SAFETY: an address of that size.
    #[allow(unsafe_code)]
    unsafe {
        let length = size_of::<Service>() as u32;
        done(libc::bind(listener.as_raw_fd(), (&raw const offered).cast(), length))?;
        done(libc::listen(listener.as_raw_fd(), 8))?;
    }
    Ok(listener)
}

fn accept(listener: &OwnedFd) -> Result<File> {
    // SAFETY: nobody's address is asked for; a new descriptor, ours alone.
    #[allow(unsafe_code)]
    let line = unsafe {
        let (address, length) = (std::ptr::null_mut(), std::ptr::null_mut());
        owned(libc::accept4(listener.as_raw_fd(), address, length, libc::SOCK_CLOEXEC))?
    };
    Ok(line.into())
}

fn call_by_tipc() -> Result<File> {
    let until = Instant::now() + PATIENCE;
    let called = service(CALLS, [1, 0]);
    loop {
        let line = socket()?;
        // SAFETY: an address of that size.
        #[allow(unsafe_code)]
        let made = done(unsafe {
            let length = size_of::<Service>() as u32;
            libc::connect(line.as_raw_fd(), (&raw const called).cast(), length)
        });
        match made {
            Ok(()) => return Ok(line.into()),
            Err(error) if error.kind() != ErrorKind::Interrupted && Instant::now() > until => {
                return Err(error).context("the far end can't be reached by TIPC");
            }
            // (Until there is a carrier, and TIPC has found the other.)
            Err(_) => thread::sleep(Duration::from_millis(5)),
        }
    }
}
