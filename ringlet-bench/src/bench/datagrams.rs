//! Ping-pong and rate over UDP. The first byte of a datagram says what becomes of it.

use std::net::{Ipv4Addr, UdpSocket};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::spec::{Figure, Pause, Said, Spec, Unit, size_name};
use super::talk::{pause, say};
use super::trips::{RoundTrip, half_round_trip, path_name, settle};

/// Send it back; take it; take it and answer it.
const ECHO: u8 = 1;
const TAKE: u8 = 2;
const ANSWER: u8 = 3;
/// Datagrams under way without an answer: fewer than any receive buffer holds.
const WINDOW: u64 = 64;
const PATIENCE: Duration = Duration::from_secs(5);

/// Serves until its parent ends it: UDP tells no end.
pub fn serve() -> Result<()> {
    let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))?;
    say(&Said::Listening { address: socket.local_addr()?.to_string() })?;
    let mut buffer = vec![0; 1 << 16];
    loop {
        let (count, from) = socket.recv_from(&mut buffer)?;
        match buffer[0] {
            ECHO => drop(socket.send_to(&buffer[..count], from)),
            ANSWER => drop(socket.send_to(&buffer[..1], from)),
            _ => {}
        }
    }
}

struct Datagrams {
    socket: UdpSocket,
    message: Vec<u8>,
}

impl RoundTrip for Datagrams {
    fn announce(&mut self, _count: u64) -> Result<()> {
        Ok(())
    }

    fn once(&mut self) -> Result<()> {
        self.message[0] = ECHO;
        self.socket.send(&self.message)?;
        if self.socket.recv(&mut self.message).context("no answer")? != self.message.len() {
            bail!("an answer of another length");
        }
        Ok(())
    }

    fn path(&self) -> &'static str {
        path_name(self.socket.as_fd())
    }
}

pub fn measure(spec: &Spec, address: &str, sizes: &[usize]) -> Result<Vec<Figure>> {
    let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))?;
    socket.connect(address)?;
    socket.set_read_timeout(Some(PATIENCE))?;
    let budget = Duration::from_millis(spec.budget_ms);
    let mut trip = Datagrams { socket, message: vec![7; sizes[0]] };
    settle(&mut trip, spec.ring_expected)?;
    pause(Pause::Ready)?;
    let mut figures = Vec::new();
    for &size in sizes {
        trip.message = vec![7; size];
        figures.push(half_round_trip(&mut trip, budget, size_name(size))?);
    }
    trip.message = vec![7; sizes[0]];
    figures.push(rate(&mut trip, budget)?);
    Ok(figures)
}

/// One way, with an answer for each window.
fn rate(trip: &mut Datagrams, budget: Duration) -> Result<Figure> {
    let mut answer = [0; 8];
    let mut sent = 0;
    let start = Instant::now();
    while start.elapsed() < budget {
        trip.message[0] = TAKE;
        for _ in 1..WINDOW {
            trip.socket.send(&trip.message)?;
        }
        trip.message[0] = ANSWER;
        trip.socket.send(&trip.message)?;
        trip.socket.recv(&mut answer).context("no answer to a window")?;
        sent += WINDOW;
    }
    Ok(Figure {
        what: format!("{} one way", size_name(trip.message.len())),
        value: sent as f64 / start.elapsed().as_secs_f64(),
        unit: Unit::PerSecond,
        tails: None,
        path: trip.path().into(),
    })
}
