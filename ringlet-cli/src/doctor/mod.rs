//! `ringlet doctor`: tries everything that moving a connection needs, then moves one.

mod kernel;
mod node;
mod probe;
mod setup;

use std::net::SocketAddr;
use std::process::ExitCode;
use std::time::Duration;

use anstyle::{AnsiColor, Style};
use serde::Serialize;

/// Check whether connections can be moved on this machine, and say what to do where they cannot
///
/// Tries each thing that ringlet needs of the kernel in the way in which ringlet uses it, looks at the limits, the library
/// and the configuration, asks the node service to introduce two ends, and finally has two programs talk to each other through shared memory.
#[derive(clap::Args)]
#[command(
    after_help = "Exit status: 0 if nothing fails (warnings are allowed), else 1, also if something could not be told."
)]
pub struct DoctorArgs {
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// How long each step of the two programs that are tried may take, in seconds
    #[arg(long, hide = true, default_value_t = 60)]
    patience: u64,
    /// The far end of the connection that is tried
    #[arg(long, hide = true)]
    probe_server: bool,
    /// The near end
    #[arg(long, hide = true, value_name = "ADDRESS")]
    probe_client: Option<SocketAddr>,
}

#[derive(Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    Ok,
    Warn,
    Fail,
    /// It took too long to be told.
    Unknown,
}

#[derive(Serialize)]
pub struct Check {
    pub name: &'static str,
    pub status: Status,
    pub found: String,
    pub fix: Option<String>,
}

impl Check {
    pub fn ok(name: &'static str, found: impl Into<String>) -> Check {
        Check { name, status: Status::Ok, found: found.into(), fix: None }
    }

    pub fn warn(name: &'static str, found: impl Into<String>, fix: impl Into<String>) -> Check {
        Check { name, status: Status::Warn, found: found.into(), fix: Some(fix.into()) }
    }

    /// What took so long that nothing can be said, as on a machine with too much else to do.
    pub fn unknown(name: &'static str, found: impl Into<String>) -> Check {
        let found = format!("could not be told: {}", found.into());
        let fix = "Run `ringlet doctor` again when the machine has less to do.".to_owned();
        Check { name, status: Status::Unknown, found, fix: Some(fix) }
    }

    pub fn fail(name: &'static str, found: impl Into<String>, fix: impl Into<String>) -> Check {
        Check { name, status: Status::Fail, found: found.into(), fix: Some(fix.into()) }
    }
}

#[derive(Serialize)]
struct Report {
    ok: bool,
    checks: Vec<Check>,
}

pub fn run(args: DoctorArgs) -> anyhow::Result<ExitCode> {
    if args.probe_server {
        return probe::serve();
    }
    if let Some(address) = args.probe_client {
        return probe::call(address);
    }
    let mut checks = Vec::new();
    let mut add = |check: Check| {
        // A person sees each check as it is made, since the last one takes a moment.
        if !args.json {
            print(&check);
        }
        checks.push(check);
    };
    kernel::checks().into_iter().for_each(&mut add);
    setup::checks().into_iter().for_each(&mut add);
    node::checks().into_iter().for_each(&mut add);
    probe::checks(Duration::from_secs(args.patience)).into_iter().for_each(&mut add);
    let any = |status: Status| checks.iter().any(|check| check.status == status);
    let (failed, untold) = (any(Status::Fail), any(Status::Unknown));
    let ok = !failed && !untold;
    if args.json {
        println!("{}", serde_json::to_string_pretty(&Report { ok, checks })?);
    } else if ok {
        println!("\nConnections can be moved on this machine.");
    } else if failed {
        println!("\nSomething is wrong: see what is marked with fail.");
    } else {
        println!("\nWhether connections can be moved on this machine could not be told.");
    }
    Ok(ExitCode::from(u8::from(!ok)))
}

fn print(check: &Check) {
    let (word, color) = match check.status {
        Status::Ok => ("ok", AnsiColor::Green),
        Status::Warn => ("warn", AnsiColor::Yellow),
        Status::Fail => ("fail", AnsiColor::Red),
        Status::Unknown => ("?", AnsiColor::Yellow),
    };
    let style = Style::new().fg_color(Some(color.into()));
    println!("{style}{word:4}{style:#}  {:14}  {}", check.name, check.found);
    if let Some(fix) = &check.fix {
        println!("{:22}{fix}", "");
    }
}
