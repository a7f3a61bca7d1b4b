//! What `ringlet bench` is asked for.

use std::path::PathBuf;
use std::str::FromStr;

use clap::{Args, Subcommand, ValueEnum};

use super::spec::parse_size;

/// Measure kernel TCP, Unix sockets and ringlet on this machine.
///
/// Without options: everything but the crowd, Ethernet and what is carried (of many and idle one number of connections only, by epoll), in about a minute,
/// unpinned; and 8-byte latencies also with both ends pinned to a core each, and with ringlet's spinning off.
#[derive(Args, Debug)]
#[command(args_conflicts_with_subcommands = true)]
pub struct BenchArgs {
    /// A short run that shows that everything works; its figures are rough
    #[arg(long)]
    pub quick: bool,
    /// How often every transport has its turn [default: 5, quick: 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub rounds: Option<u32>,
    /// Measure only these
    #[arg(long, value_name = "GROUPS", value_enum, value_delimiter = ',')]
    pub only: Vec<Group>,
    /// Compare only these; ratios need tcp
    #[arg(long, value_name = "TRANSPORTS", value_enum, value_delimiter = ',')]
    pub transport: Vec<Transport>,
    /// Message sizes for latency: a list like 8,4K,1M, or `all` for the powers of two up to 8M
    #[arg(long, value_name = "SIZES")]
    pub sizes: Option<Sizes>,
    /// Idle connections for scale, as far as RLIMIT_NOFILE allows [default: 1000, quick: 64]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub idle: Option<u32>,
    /// How many connections many and idle have [default where they are named: 1,32,128,512,2000 and 100,500,2000, quick: 1,32,128 and 100]
    #[arg(long, value_name = "NUMBERS", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=20_000))]
    pub connections: Vec<u32>,
    /// Pin both ends of everything: `auto` or two cores like 0,2; `none` leaves out the pinned rows
    #[arg(long, value_name = "CORES")]
    pub pin: Option<Pin>,
    /// Write everything, with each round's figures, as JSON; `-` is standard output
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Draw latency and throughput over all message sizes; FILE ends in .svg or .png
    #[arg(long, value_name = "FILE", value_parser = crate::plot::file)]
    pub plot: Option<PathBuf>,
    #[command(subcommand)]
    pub part: Option<Part>,
    /// What this program starts to do the work
    #[arg(long, hide = true, value_name = "SPEC", exclusive = true)]
    pub child: Option<String>,
}

#[derive(Subcommand, Debug)]
pub enum Part {
    Papers(PapersArgs),
}

/// The figures of Memory Channel's paper, and of ETHOM's, beside what is measured now
///
/// Of Memory Channel's its Figure 1 (what memory, and messages, cost), Figure 5 (one-way messages of 32 B by PVM and directly), the overhead of a
/// message that is written and left to run, and Figure 6 (an application of PVM's). PVM takes part where it is installed, unmodified, with both its
/// tasks here. Of ETHOM's its Figures 5 and 6 (how long messages take, and how many bytes a second go, by TCP), and 9 and 10 (the same by TIPC, where
/// the kernel has it) between two network namespaces: by `ringlet eth` (ETHOM), by frames over UDP (ETHOS), and by veth (the kernel's own Ethernet).
/// That needs root.
#[derive(Args, Debug)]
pub struct PapersArgs {
    /// One of the papers only
    #[arg(long, value_enum)]
    pub only: Option<Paper>,
    /// A short run that shows that everything works; its figures are rough
    #[arg(long)]
    pub quick: bool,
    /// How often everything has its turn [default: 5, quick: 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub rounds: Option<u32>,
    /// Write everything, with each round's figures, as JSON; `-` is standard output
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Draw each figure into this directory, as an .svg
    #[arg(long, value_name = "DIR")]
    pub plot: Option<PathBuf>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum Paper {
    /// R. B. Gillett, "Memory Channel network for PCI" (1996)
    MemoryChannel,
    /// R. Finocchiaro et al., "ETHOM, an Ethernet over SCI and DX driver for Linux" (2009)
    Ethom,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum Group {
    /// Blocking ping-pong over message sizes
    Latency,
    /// Ping-pong of ends that both sleep before each message, beside the barest hand-over
    Asleep,
    /// Ping-pong of event loops, by epoll and by poll
    Epoll,
    /// One way: 64 KiB writes, 8-byte writes
    Stream,
    /// UDP: ping-pong and rate
    Udp,
    /// A connection per request
    Connect,
    /// A fork, an accept, a close, a short connection, the start of a program
    Costs,
    /// One busy connection beside many idle ones
    Scale,
    /// Round trips on many connections, and what they take of each end's processor: on a random one by epoll (level and edge), poll, select;
    /// on each in its turn, and in bursts; and the same by many UDP senders
    Many,
    /// Waits of 1 ms beside many idle connections, and what each takes of a processor: by epoll, poll, select
    Idle,
    /// Eight busy pairs of processes at once
    Pairs,
    /// Beside processes that want all processors, with a share of one, on one alone: only if it is named
    Crowd,
    /// Only one end under ringlet
    OneSide,
    /// Active Messages, beside UCX's if ucx_perftest is there
    Messages,
    /// The native library beside the bare cache line
    Native,
    /// Reflective memory beside the bare cache line and plain stores
    Reflect,
    /// A ring in one memory, and over two that an adapter keeps in step
    Mirror,
    /// TCP between two network namespaces, by veth and by `ringlet eth`, as root, and frames between ports: only if it is named
    Ethernet,
    /// Two programs that share no memory, in two network namespaces: by veth, carried in isolation, and as on two hosts with rails in memory, with what
    /// each round trip takes of both ends' processors and of the services'. As root: only if it is named
    Carried,
    /// What the machine itself allows
    Limits,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum Transport {
    Tcp,
    Unix,
    Ringlet,
    RingletUnix,
}

#[derive(Clone, PartialEq, Debug)]
pub struct Sizes(pub Vec<usize>);

impl Sizes {
    pub fn all() -> Sizes {
        Sizes((0..=23).map(|bit| 1 << bit).collect())
    }

    pub fn usual(quick: bool) -> Sizes {
        Sizes(if quick {
            vec![8, 4 << 10, 64 << 10]
        } else {
            vec![8, 64, 1 << 10, 4 << 10, 64 << 10, 1 << 20]
        })
    }
}

impl FromStr for Sizes {
    type Err = String;
    fn from_str(text: &str) -> Result<Sizes, String> {
        if text == "all" {
            return Ok(Sizes::all());
        }
        let mut sizes =
            text.split(',').map(|size| parse_size(size.trim())).collect::<Result<Vec<_>, _>>()?;
        sizes.sort_unstable();
        sizes.dedup();
        Ok(Sizes(sizes))
    }
}

#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Pin {
    None,
    Auto,
    Cores(usize, usize),
}

impl FromStr for Pin {
    type Err = String;
    fn from_str(text: &str) -> Result<Pin, String> {
        let cores = || -> Option<(usize, usize)> {
            let (server, client) = text.split_once(',')?;
            Some((server.trim().parse().ok()?, client.trim().parse().ok()?))
        };
        match (text, cores()) {
            ("none", _) => Ok(Pin::None),
            ("auto", _) => Ok(Pin::Auto),
            (_, Some((server, client))) if server != client => Ok(Pin::Cores(server, client)),
            _ => Err("none, auto or two different cores like 0,1".into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_on_the_command_line() {
        assert_eq!("8, 1K,8".parse(), Ok(Sizes(vec![8, 1024])));
        assert_eq!("all".parse::<Sizes>().unwrap().0.last(), Some(&(8 << 20)));
        assert!("8,,9".parse::<Sizes>().is_err());
        assert_eq!("0,3".parse(), Ok(Pin::Cores(0, 3)));
        assert_eq!("none".parse(), Ok(Pin::None));
        assert!("1,1".parse::<Pin>().is_err());
        assert!("1".parse::<Pin>().is_err());
    }
}
