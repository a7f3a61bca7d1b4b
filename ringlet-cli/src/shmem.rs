//! `ringlet shmem`: starts the processing elements of an OpenSHMEM program.

use std::os::fd::RawFd;
use std::process::ExitCode;

use anyhow::ensure;
use ringlet_messages::active_message::job::Word;

use crate::job::{self, EXIT_STATUS, JobArgs, Kind, Over, Process};
use crate::reflect;

/// As ringlet-shmem has them (job.rs).
const PE: &str = "RINGLET_SHMEM_PE";
const PES: &str = "RINGLET_SHMEM_NPES";
const KEY: &str = "RINGLET_SHMEM_KEY";
const LAUNCHER: &str = "RINGLET_SHMEM_FD";
const PES_MOST: u32 = 1024;

/// Run an OpenSHMEM program
///
/// Starts N processing elements (PEs) of a program that was compiled against ringlet's shmem.h, on this machine, where they map each other's memory:
/// one region of reflective memory (`ringlet reflect ls`). SHMEM_SYMMETRIC_SIZE is how much heap each has: 256M unless it says otherwise, or less, of
/// which all have 8G. When one ends with another status than 0, by a signal, or by _exit before shmem_finalize, the others are ended too.
#[derive(clap::Args)]
#[command(after_help = EXIT_STATUS)]
pub struct ShmemArgs {
    #[command(flatten)]
    job: JobArgs,
}

struct Pes {
    key: u64,
    /// How far each is.
    stages: Vec<Stage>,
}

#[derive(Clone, Copy, PartialEq)]
enum Stage {
    Started,
    Begun,
    Done,
}

pub fn run(args: ShmemArgs) -> anyhow::Result<ExitCode> {
    let count = args.job.processes;
    ensure!(count <= PES_MOST, "{count} PEs are more than {PES_MOST}");
    // (With it, it is there until all have ended.)
    let _host = reflect::host()?;
    let mut bytes = [0; 8];
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())?;
    let key = u64::from_ne_bytes(bytes);
    job::run(&args.job, &mut Pes { key, stages: vec![Stage::Started; count as usize] }, None)
}

impl Kind for Pes {
    fn environment(&self, rank: usize, descriptor: RawFd) -> Vec<(&'static str, String)> {
        vec![
            (PE, rank.to_string()),
            (PES, self.stages.len().to_string()),
            (KEY, self.key.to_string()),
            (LAUNCHER, descriptor.to_string()),
        ]
    }

    fn heard(&mut self, rank: usize, said: Word, processes: &[Process]) -> Option<Over> {
        // (The other word is none of a PE's.)
        let Word::Part(said) = said else { return None };
        match &said[..] {
            b"begun" => self.stages[rank] = Stage::Begun,
            b"done" => self.stages[rank] = Stage::Done,
            // shmem_global_exit.
            status => {
                self.stages[rank] = Stage::Done;
                return Some(Over::Ends(str::from_utf8(status).ok()?.parse::<i32>().ok()? as u8));
            }
        }
        self.missed(processes)
    }

    fn ended(&mut self, _rank: usize, processes: &[Process]) -> Option<Over> {
        self.missed(processes)
    }
}

impl Pes {
    /// Others wait, or will, for one that has ended. (Where none has begun it may be a script, or a program that is none of OpenSHMEM's.)
    fn missed(&self, processes: &[Process]) -> Option<Over> {
        let has_begun = self.stages.iter().any(|stage| *stage != Stage::Started);
        let is_missed = |rank: &usize| match self.stages[*rank] {
            Stage::Done => false,
            Stage::Begun => processes[*rank].has_ended(),
            Stage::Started => has_begun && processes[*rank].has_ended(),
        };
        let rank = (0..processes.len()).find(is_missed)?;
        eprintln!("ringlet: PE {rank} has ended without shmem_finalize");
        Some(Over::Ends(1))
    }
}
