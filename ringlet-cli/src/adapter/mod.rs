//! `ringlet adapter`: gives each end of a connection a segment of its own, and keeps them in step.
//!
//! One thread serves all connections (`ringlet_adapter::Server`), and all who come (`ringlet::interconnect::introduction`).

mod link;
mod peers;
mod start;

pub use start::{ENVIRONMENT, start_for_program};

use std::io::Write;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::anyhow;
use ringlet::interconnect::introduction;
use ringlet_adapter::{Progress, join_hosts};
use ringlet_linux::meet;
use ringlet_linux::sys::{self, Errno};

use link::{Adapter, Links, Served};
use peers::Peers;

/// One that was started for programs ends when the last one and its connections are gone for so long.
const LINGER: Duration = Duration::from_secs(1);
/// How long a lane's other half may owe an answer; rails of ours are soon tried again.
const ANSWER_IN: Duration = Duration::from_secs(4);

/// Keep the two segments of each connection in step, as a network card in each host would
///
/// Programs whose setting `adapter` has this adapter's number come to it when their connections are about to be moved. It serves programs of
/// its own user, and root's. It says `ready` when it is there. If it dies, its connections go back to the kernel.
#[derive(clap::Args)]
pub struct AdapterArgs {
    /// Its number, by which programs find it
    #[arg(long, value_name = "NUMBER")]
    #[arg(value_parser = clap::value_parser!(u64).range(1..))]
    number: u64,
    /// Delay, shuffle and repeat what crosses, as an unordered network may, by this seed; 0 does not
    #[arg(long, value_name = "SEED", default_value_t = 0)]
    seed: u64,
    /// Keep them in step by what carries between two hosts: two nodes in this process, over rails in memory that by the seed also fail and come back
    #[arg(long)]
    hosts: bool,
    /// End when the programs that came have ended, and their connections
    #[arg(long)]
    for_programs: bool,
}

pub fn run(args: AdapterArgs) -> anyhow::Result<ExitCode> {
    let failed = |error: Errno| std::io::Error::from_raw_os_error(error.0);
    if args.for_programs {
        leave_to_the_program()?;
    }
    let listener = meet::offer_named(&introduction::name(args.number))
        .map_err(|error| anyhow!("adapter {}: {}", args.number, failed(error)))?;
    never_wait_long()?;
    let descriptors = raised_limit();
    let mut adapter = Adapter::new()?;
    let hosts =
        if args.hosts { Some(join_hosts(args.seed, &mut adapter, Served::Trunk)?) } else { None };
    // (Of what is left, some are on their way.)
    let mut links = Links::new(args.seed, hosts, descriptors / 8 * 5).map_err(failed)?;
    let mut peers = Peers::new(listener, descriptors / 4, &mut adapter)?;
    let mut out = std::io::stdout();
    // (Whoever started it may not listen.)
    let _ = writeln!(out, "ready").and_then(|()| out.flush());
    let (mut ready, mut over) = (Vec::new(), Vec::new());
    let (mut alone_since, mut looked, mut broken) = (Instant::now(), Instant::now(), 0);
    let mut most = LINGER;
    loop {
        adapter.turn(Some(most), &mut ready, &mut over)?;
        for token in ready.drain(..) {
            peers.ready(token, &mut adapter, &mut links);
        }
        if args.hosts && looked.elapsed() >= ANSWER_IN {
            looked = Instant::now();
            over.extend(links.hanging(&mut adapter).into_iter().map(|at| (at, Progress::Failed)));
        }
        for (at, progress) in over.drain(..) {
            let ends = links.end(at, &mut adapter);
            peers.end(&ends, progress, &mut adapter);
            if args.hosts && progress == Progress::Failed {
                broken += 1;
                eprintln!("ringlet adapter: a lane can't go on");
            }
        }
        most = links.relay(&mut adapter)?.unwrap_or(LINGER);
        peers.forget_the_silent(&mut adapter);
        if !peers.is_empty() {
            alone_since = Instant::now();
        } else if args.for_programs && alone_since.elapsed() >= LINGER {
            // (Who tests what carries between hosts is to know.)
            return Ok(if broken == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE });
        }
    }
}

/// What the program has from whoever started it is not kept open, or in use, beyond its end: another program may need the adapter for longer.
fn leave_to_the_program() -> anyhow::Result<()> {
    let numbers = std::fs::read_dir("/proc/self/fd")?
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .filter(|number| *number > libc::STDERR_FILENO);
    // (One of them is that of the look itself, which is closed by then.)
    numbers.collect::<Vec<i32>>().into_iter().for_each(sys::close);
    std::env::set_current_dir("/")?;
    // What ends a program by its terminal does not end this.
    let _ = nix::unistd::setsid();
    Ok(())
}

/// How many descriptors there may be.
fn raised_limit() -> usize {
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    let Ok((limit, most)) = getrlimit(Resource::RLIMIT_NOFILE) else { return 0 };
    let raised = setrlimit(Resource::RLIMIT_NOFILE, most, most).is_ok();
    (if raised { most } else { limit }) as usize
}

/// KERNEL: a write to a full eventfd waits if one who holds it has had O_NONBLOCK off meanwhile, and the close of a lingering connection takes its
/// time. Signals end both. So one comes now and then, as often as we wake in any case.
#[allow(unsafe_code)]
fn never_wait_long() -> std::io::Result<()> {
    extern "C" fn nothing(_: i32) {}
    let every = libc::timeval { tv_sec: LINGER.as_secs() as i64, tv_usec: 0 };
    let timer = libc::itimerval { it_interval: every, it_value: every };
    // SAFETY: zero is a valid action, without SA_RESTART; the handler does nothing; both calls read what lives.
    let done = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = nothing as extern "C" fn(i32) as usize;
        libc::sigaction(libc::SIGALRM, &action, std::ptr::null_mut()) == 0
            && libc::setitimer(libc::ITIMER_REAL, &timer, std::ptr::null_mut()) == 0
    };
    if done { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}

/// A number of ours, for a call.
#[allow(unsafe_code)]
fn borrowed(fd: i32) -> std::os::fd::BorrowedFd<'static> {
    // SAFETY: its owner closes it after the call.
    unsafe { std::os::fd::BorrowedFd::borrow_raw(fd) }
}
