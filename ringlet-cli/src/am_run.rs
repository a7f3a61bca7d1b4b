//! `ringlet am-run`: starts the processes of a parallel program over Active Messages, and introduces them to each other.

use std::os::fd::RawFd;
use std::process::ExitCode;

use ringlet_messages::active_message::job::{
    DESCRIPTOR_ENVIRONMENT, NO_PARTS, RANK_ENVIRONMENT, SIZE_ENVIRONMENT, Word,
};

use crate::arrivals::Arrivals;
use crate::job::{self, EXIT_STATUS, JobArgs, Kind, Over, Process, end_word};

/// Run a parallel program over Active Messages
///
/// Starts N processes of the program on this machine. Each finds its number and the others' endpoints by AMX_SPMDStartup (am(3)).
/// When one calls AMX_SPMDExit, the others end too,
/// and its code is the job's; so they do when one ends with another status than 0, or by a signal.
#[derive(clap::Args)]
#[command(after_help = EXIT_STATUS)]
pub struct AmRunArgs {
    #[command(flatten)]
    job: JobArgs,
    /// Where the processes come that a spawn function has started
    #[arg(long, hide = true, value_name = "FD")]
    listener: Option<RawFd>,
}

/// What each process has given for a gather.
struct Parts(Vec<Option<Vec<u8>>>);

pub fn run(args: AmRunArgs) -> anyhow::Result<ExitCode> {
    let parts = vec![None; args.job.processes as usize];
    let arrivals = args.listener.map(Arrivals::new).transpose()?;
    job::run(&args.job, &mut Parts(parts), arrivals.as_ref())
}

impl Kind for Parts {
    fn environment(&self, rank: usize, descriptor: RawFd) -> Vec<(&'static str, String)> {
        vec![
            (RANK_ENVIRONMENT, rank.to_string()),
            (SIZE_ENVIRONMENT, self.0.len().to_string()),
            (DESCRIPTOR_ENVIRONMENT, descriptor.to_string()),
        ]
    }

    fn heard(&mut self, rank: usize, said: Word, processes: &[Process]) -> Option<Over> {
        match said {
            Word::Part(part) => self.0[rank] = Some(part),
            Word::End(code) => {
                let word = end_word(code);
                processes.iter().for_each(|process| process.tell(&word));
                return Some(Over::Told(code as u8));
            }
        }
        if self.0.iter().all(Option::is_some) {
            self.answer(processes);
        }
        self.give_up(processes);
        None
    }

    fn ended(&mut self, _rank: usize, processes: &[Process]) -> Option<Over> {
        self.give_up(processes);
        None
    }
}

impl Parts {
    /// Who waits for the part of a process that has ended would wait for ever: it is told.
    fn give_up(&self, processes: &[Process]) {
        let each = || processes.iter().zip(&self.0);
        if each().any(|(process, part)| process.has_ended() && part.is_none()) {
            for (process, _) in each().filter(|(_, part)| part.is_some()) {
                process.tell(&NO_PARTS.to_le_bytes().as_slice().into());
            }
        }
    }

    /// Gives all parts to all.
    fn answer(&mut self, processes: &[Process]) {
        let mut all = Vec::new();
        for part in &mut self.0 {
            let part = part.take().unwrap_or_default();
            all.extend((part.len() as u32).to_le_bytes());
            all.extend(part);
        }
        let all = all.into();
        processes.iter().for_each(|process| process.tell(&all));
    }
}
