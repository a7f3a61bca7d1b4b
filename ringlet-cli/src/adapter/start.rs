//! The adapter of `ringlet run --mirror` and `--hosts`: one for each user and seed, started when the first program is, and gone after the last.

use std::io::{BufRead, BufReader, Read};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use ringlet::handshake::ROOM_BYTES;
use ringlet::interconnect::introduction::{self, GREETING, Message};
use ringlet_linux::sys::{self, Errno};
use ringlet_linux::{fd, meet};

/// The key's variable.
pub const ENVIRONMENT: &str = "RINGLET_ADAPTER";
const PATIENCE: Duration = Duration::from_secs(10);

/// The number of the adapter for this seed (and with `hosts`), which knows from now on that this process, and the program that it becomes, is there.
pub fn start_for_program(seed: u32, hosts: bool) -> anyhow::Result<u64> {
    let kind = 1 << 63 | u64::from(hosts) << 62;
    let number = u64::from(sys::geteuid()) << 32 | u64::from(seed) | kind;
    let until = Instant::now() + PATIENCE;
    loop {
        match come(number)? {
            true => return Ok(number),
            // (Of two that start one at once, one does.)
            false => start(number, seed, hosts)?,
        }
        ensure!(Instant::now() < until, "the adapter does not answer");
    }
}

/// Is it there? Its socket to us stays open until this process becomes the program.
fn come(number: u64) -> anyhow::Result<bool> {
    let failed = |error: Errno| std::io::Error::from_raw_os_error(error.0);
    let lifeline = match meet::look_named(&introduction::name(number)) {
        Ok(lifeline) => lifeline,
        Err(Errno::ECONNREFUSED) => return Ok(false),
        Err(error) => return Err(failed(error)).context("the adapter"),
    };
    let adapter = meet::credentials(lifeline).map_err(failed)?;
    if adapter.uid != 0 && !meet::is_our_user(adapter.uid) {
        bail!("another user's adapter has this seed");
    }
    let mut fds = [fd::pollfd { fd: lifeline, events: libc::POLLIN, revents: 0 }];
    let _ = fd::poll(&mut fds, Some(PATIENCE.as_nanos() as u64), None);
    let mut bytes = [0; ROOM_BYTES];
    let greeting = meet::take(lifeline, &mut bytes).map_err(failed).context("the adapter")?;
    let greeting = Message::read(&bytes[..greeting.len]).ok();
    // (It may be about to end.)
    Ok(greeting.is_some_and(|greeting| greeting.kind == GREETING))
}

/// Starts one that is nobody's child: the program must not meet it in wait(2).
fn start(number: u64, seed: u32, hosts: bool) -> anyhow::Result<()> {
    let mut command = Command::new("/bin/sh");
    command.args(["-c", "\"$@\" </dev/null 2>/dev/null &", "sh"]);
    command.arg(std::env::current_exe().context("cannot tell where the ringlet command lies")?);
    command.args(["adapter", "--for-programs", "--number", &number.to_string()]);
    command.args(["--seed", &seed.to_string()]).args(hosts.then_some("--hosts"));
    command.env_remove("LD_PRELOAD").stdin(Stdio::null()).stdout(Stdio::piped());
    let mut child = command.spawn().context("the adapter can't be started")?;
    let mut line = String::new();
    if let Some(output) = child.stdout.take() {
        // Until it is ready, or has ended since another one is.
        let _ = BufReader::new(output.take(64)).read_line(&mut line);
    }
    child.wait()?;
    Ok(())
}
