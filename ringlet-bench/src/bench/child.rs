//! The way into a child of `ringlet bench`, of whatever kind.

use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use nix::sys::{prctl, signal::Signal};
use nix::unistd::getppid;

use super::handover::HandOver;
use super::spec::{Pause, Role, Said, Spec, Work};
use super::talk::{pause, say};
use super::trips::asleep;
use super::{
    client, cost, ethernet, ethom, hierarchy, limits, messages, mirror, native, ports, reflect,
    server, symbol,
};

/// `ringlet bench --child SPEC`.
pub fn run(spec: &str) -> ExitCode {
    match try_run(spec) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // If even this can't be said the parent sees our end, which says enough.
            let _ = say(&Said::Failed(format!("{error:#}")));
            ExitCode::FAILURE
        }
    }
}

fn try_run(spec: &str) -> Result<()> {
    // Children never outlive their parent, however it ends.
    prctl::set_pdeathsig(Signal::SIGKILL)?;
    let spec: Spec = serde_json::from_str(spec).context("unreadable order from the parent")?;
    if spec.wrapped && !symbol::is_loaded() {
        bail!("the preload library was not loaded");
    }
    ensure!(getppid().as_raw() as u32 == spec.parent, "the parent is gone");
    let figures = match &spec.role {
        Role::Hog => hog(),
        Role::Becomes { words } => {
            return Err(Command::new(std::env::current_exe()?).args(words).exec().into());
        }
        Role::Server => return server::serve(&spec),
        Role::Client { address } => client::measure(&spec, address)?,
        Role::Alone => {
            pause(Pause::Ready)?;
            match spec.work {
                Work::Cost { of } => cost::measure(&spec, of)?,
                Work::HandOver { by, cpus } => {
                    let budget = Duration::from_millis(spec.budget_ms);
                    asleep(HandOver::new(by, cpus)?, budget)?
                }
                Work::Ethernet { by } => ethernet::measure(&spec, by)?,
                Work::Ethom { by, over } => ethom::measure(&spec, by, over)?,
                Work::Ports { .. } => ports::measure(&spec)?,
                Work::Ucx => messages::measure_ucx()?,
                Work::Native { .. } => native::measure(&spec)?,
                Work::Reflect { .. } => reflect::measure(&spec)?,
                Work::Hierarchy { cpu } => hierarchy::measure(&spec, cpu)?,
                Work::Mirror { .. } => mirror::measure(&spec)?,
                _ => limits::measure(&spec)?,
            }
        }
    };
    say(&Said::Done(figures))
}

/// Wants a processor until it is killed.
fn hog() -> ! {
    loop {
        std::hint::black_box(());
    }
}
