//! What a child process is told to do and what it says back: one JSON value a line.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::stats::Tails;

/// Everything a child needs to know; it reads nothing else.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Spec {
    pub role: Role,
    pub family: Family,
    pub work: Work,
    /// How long one figure may take; a pass over it is about as long.
    pub budget_ms: u64,
    /// Whoever wrote this.
    pub parent: u32,
    /// This end runs with the preload library, or it measures something else than it was asked to.
    pub wrapped: bool,
    /// Both ends are under ringlet: give the connection time to reach the ring before measuring.
    pub ring_expected: bool,
}

#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub enum Role {
    Server,
    Client {
        address: String,
    },
    /// Wants a processor all the time.
    Hog,
    /// This command with other words, which ends with its parent too.
    Becomes {
        words: Vec<String>,
    },
    /// No peer: the limits of the machine itself.
    Alone,
}

#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub enum Family {
    Tcp,
    Unix,
    Udp,
}

#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub enum Work {
    /// Blocking ping-pong at each size in turn.
    Latency { sizes: Vec<usize> },
    /// 8-byte ping-pong of non-blocking sockets that wait by epoll or poll.
    Events { by: Waiting },
    /// One way, each message one write.
    Stream { size: usize },
    /// Blocking ping-pong of datagrams at each size in turn, then the rate of the first.
    Datagrams { sizes: Vec<usize> },
    /// Connect, one byte there, one byte back, close.
    Connect,
    /// Connect and be closed by the server.
    Accept,
    /// Blocking 8-byte ping-pong for the whole budget, counted.
    Pair,
    /// The same of messages of that size with a pause before each, and each trip timed.
    Trips { size: usize, pause_us: u64 },
    /// Blocking 8-byte ping-pong of ends that both sleep before each message.
    Asleep,
    /// The same without a connection; with the cores for two processes.
    HandOver { by: By, cpus: Option<(usize, usize)> },
    /// What one thread does again and again.
    Cost { of: Cost },
    /// Ping-pong by epoll on one connection, alone and then beside `idle` others.
    Scale { idle: usize },
    /// Round trips on so many connections, whose server waits for any of them.
    Many { by: Among, order: Order, connections: usize },
    /// The server waits by the millisecond for any of so many connections, which all are idle.
    Idle { by: Among, connections: usize },
    /// Active Messages: round trips, rate, stores; a poll that finds nothing with so many connections.
    Messages { peers: Vec<usize> },
    /// The same by UCX, which brings both its ends.
    Ucx,
    /// Channels of the native library between two cores.
    Native { cpus: (usize, usize) },
    /// Reflective memory between two cores.
    Reflect { cpus: (usize, usize) },
    /// Loads, by how much memory they are of; on this core.
    Hierarchy { cpu: usize },
    /// A ring in one memory and over a mirror, between two cores, or three.
    Mirror { cpus: (usize, usize) },
    /// TCP between two network namespaces.
    Ethernet { by: Link },
    /// What ETHOM's paper measured, between the same: messages of many sizes.
    Ethom { by: Link, over: Over },
    /// Frames between two ports of programs, on two cores.
    Ports { cpus: (usize, usize) },
    /// Round trips and a stream between two that share no memory: the control group of the end, and the services' processes.
    Carried { by: Apart, group: PathBuf, services: Vec<u32> },
    /// The bare cache line, memcpy and eventfd; with the cores for two threads.
    Limits { cpus: Option<(usize, usize)> },
}

#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub enum Waiting {
    Epoll,
    Poll,
}

/// How a server waits for any of its connections.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Among {
    /// Told again and again of what is left.
    Epoll,
    /// Told once of what has come.
    Edge,
    Poll,
    Select,
}

/// Which of many connections has the next message.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Order {
    Random,
    /// Each in its turn.
    Turns,
    /// Several at once, and then their answers.
    Bursts,
}

/// What lies between two network namespaces.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub enum Link {
    Veth,
    /// `ringlet eth`, with so many queues.
    Ringlet {
        queues: u16,
    },
    /// `ringlet eth`, by a bridge of the kernel's.
    Bridge,
    /// Two networks of that name which reach each other by UDP over veth, as two hosts' do, by packets of 1,500 bytes.
    Udp,
    /// Frames as ETHOS had them, each one datagram, over veth with packets of up to so many bytes.
    Ethos {
        packet: u16,
    },
}

/// By whom bytes go between two network namespaces.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub enum Apart {
    /// The kernel.
    Veth,
    /// One node service, which keeps two tenants apart.
    Tenants,
    /// A node service each, over rails in memory.
    Hosts,
}

/// Whose messages.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub enum Over {
    Tcp,
    Tipc,
}

/// What two processes wake each other by.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub enum By {
    Futex,
    Eventfd,
}

#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub enum Cost {
    /// A program that does nothing.
    Start,
    /// A child that ends at once.
    Fork,
    /// Beside a connection that has moved.
    ForkMoved,
    /// Connect, accept, close.
    Accept,
    /// Connect, accept, one byte there, one byte back, close.
    Short,
    /// Connect, accept, and so many round trips that a connection has moved that can.
    Move,
    /// Of both ends of a connection that has not been used.
    Close,
    /// Of one that has moved.
    CloseMoved,
}

/// A line from a child to its parent.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub enum Said {
    Listening {
        address: String,
    },
    /// The child waits for a line on its standard input before it goes on.
    Paused(Pause),
    Done(Vec<Figure>),
    Failed(String),
}

#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub enum Pause {
    /// Connected and warm: the measurement comes next.
    Ready,
    /// Before the idle connections are made: what the processes weigh without them.
    Few,
    /// All idle connections are made: nothing happens until the parent says so.
    Many { idle: usize },
}

/// One number of one round.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Figure {
    pub what: String,
    pub value: f64,
    pub unit: Unit,
    pub tails: Option<Tails>,
    /// Where the bytes really went: `ring`, `kernel`, `moving`, or a count of each.
    pub path: String,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Unit {
    Nanoseconds,
    Bytes,
    BytesPerSecond,
    PerSecond,
    /// Of something that is neither good nor bad.
    Number,
}

impl Unit {
    pub fn higher_is_better(self) -> bool {
        matches!(self, Unit::BytesPerSecond | Unit::PerSecond)
    }

    /// For people: three digits that count.
    pub fn show(self, value: f64) -> String {
        let (scales, suffixes): (&[f64], &[&str]) = match self {
            Unit::Nanoseconds => (&[1.0, 1e3, 1e6, 1e9], &["ns", "us", "ms", "s"]),
            Unit::Bytes => (&[1.0, 1024.0, 1048576.0], &["B", "KiB", "MiB"]),
            Unit::BytesPerSecond => (&[1e3, 1e6, 1e9], &["kB/s", "MB/s", "GB/s"]),
            Unit::PerSecond => (&[1.0, 1e3, 1e6], &["/s", "k/s", "M/s"]),
            Unit::Number => return three_digits(value),
        };
        // Half a step before the border, so that 999.9 us does not show as "1000 us".
        let index = scales.iter().rposition(|scale| value.abs() >= scale * 0.9995).unwrap_or(0);
        format!("{} {}", three_digits(value / scales[index]), suffixes[index])
    }
}

/// `0.123`, `1.23`, `12.3`, `123`.
pub fn three_digits(value: f64) -> String {
    let decimals = match value.abs() {
        v if v >= 99.95 || v == 0.0 => 0,
        v if v >= 9.995 => 1,
        v if v >= 0.9995 => 2,
        _ => 3,
    };
    format!("{value:.decimals$}")
}

/// `8 B`, `64 KiB`: exact for powers of two, and never lossy for the rest.
pub fn size_name(size: usize) -> String {
    match size {
        s if s >= 1 << 20 && s.is_multiple_of(1 << 20) => format!("{} MiB", s >> 20),
        s if s >= 1 << 10 && s.is_multiple_of(1 << 10) => format!("{} KiB", s >> 10),
        s => format!("{s} B"),
    }
}

/// `8`, `64K`, `1M`, and what `size_name` writes.
pub fn parse_size(text: &str) -> Result<usize, String> {
    let digits = text.trim_end_matches(|c: char| !c.is_ascii_digit());
    let shift = match text[digits.len()..].trim().to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kb" | "kib" => 10,
        "m" | "mb" | "mib" => 20,
        other => return Err(format!("unknown unit {other:?} (use B, K or M)")),
    };
    let count: usize = digits.parse().map_err(|_| format!("{text:?} is not a size"))?;
    match count.checked_shl(shift).filter(|size| size >> shift == count) {
        Some(size) if (1..=SIZE_MAX_BYTES).contains(&size) => Ok(size),
        _ => Err(format!("sizes go from 1 B to {}", size_name(SIZE_MAX_BYTES))),
    }
}

/// A message larger than this says nothing new and takes long.
pub const SIZE_MAX_BYTES: usize = 64 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spec_survives_the_command_line() {
        for work in [
            Work::Latency { sizes: vec![1, 8, 1 << 23] },
            Work::Events { by: Waiting::Poll },
            Work::Scale { idle: 10_000 },
            Work::Many { by: Among::Edge, order: Order::Bursts, connections: 2000 },
            Work::Limits { cpus: Some((0, 3)) },
        ] {
            let spec = Spec {
                role: Role::Client { address: "127.0.0.1:4711".into() },
                family: Family::Tcp,
                work,
                budget_ms: 50,
                parent: 1,
                wrapped: true,
                ring_expected: true,
            };
            let text = serde_json::to_string(&spec).unwrap();
            assert!(!text.contains('\n'));
            assert_eq!(serde_json::from_str::<Spec>(&text).unwrap(), spec);
        }
    }

    #[test]
    fn sizes_read_back_as_written() {
        for (text, size) in [("1", 1), ("8b", 8), ("64K", 65536), ("1MiB", 1 << 20), ("3", 3)] {
            assert_eq!(parse_size(text), Ok(size));
        }
        for text in ["", "K", "-1", "0", "1G", "65M", "18446744073709551615K", "1.5K"] {
            assert!(parse_size(text).is_err(), "{text}");
        }
        assert_eq!(size_name(1), "1 B");
        assert_eq!(size_name(1025), "1025 B");
        assert_eq!(size_name(65536), "64 KiB");
        for size in [1, 1023, 1024, 1025, 1 << 19, 8 << 20] {
            assert_eq!(parse_size(&size_name(size)), Ok(size));
        }
    }

    #[test]
    fn numbers_show_three_digits() {
        assert_eq!(Unit::Nanoseconds.show(123.4), "123 ns");
        assert_eq!(Unit::Nanoseconds.show(18_040.0), "18.0 us");
        assert_eq!(Unit::Nanoseconds.show(999_900.0), "1.00 ms");
        assert_eq!(Unit::Nanoseconds.show(0.0), "0 ns");
        assert_eq!(Unit::BytesPerSecond.show(13.24e9), "13.2 GB/s");
        assert_eq!(Unit::PerSecond.show(15_200_000.0), "15.2 M/s");
        assert_eq!(Unit::Bytes.show(16384.0), "16.0 KiB");
    }
}
