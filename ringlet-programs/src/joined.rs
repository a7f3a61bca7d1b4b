//! What programs show of their sockets, joined with what the kernel knows of them.

use std::io::ErrorKind;

use clap::ValueEnum;
use ringlet::reasons::Reason;
use ringlet_core::view::{PATH_KERNEL, PATH_MOVING, PATH_RING};
use serde::Serialize;

use crate::processes::{Process, Slot};
use crate::sockets::{KernelSocket, LISTENING, SocketTables};

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Path {
    Ring,
    Moving,
    Kernel,
}

impl Path {
    /// None for a free slot, or for what only a newer ringlet knows.
    fn from_u32(path: u32) -> Option<Path> {
        match path {
            PATH_KERNEL => Some(Path::Kernel),
            PATH_MOVING => Some(Path::Moving),
            PATH_RING => Some(Path::Ring),
            _ => None,
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Path::Ring => "ring",
            Path::Moving => "moving",
            Path::Kernel => "kernel",
        }
    }
}

/// A slot, and the kernel's view of its socket.
pub struct Joined<'p> {
    pub process: &'p Process,
    pub slot: &'p Slot,
    pub path: Path,
    pub namespace: String,
    /// None for a socket that the kernel's table doesn't list: one that is bound to nothing.
    pub socket: Option<KernelSocket>,
}

impl Joined<'_> {
    /// Why it is where it is; a listener is the kernel's in any case.
    pub fn reason(&self) -> u32 {
        let listens = self.socket.as_ref().is_some_and(|socket| socket.state == LISTENING);
        if listens { Reason::None as u32 } else { self.slot.reason }
    }
}

/// What is shown with what the kernel knows; adds what that could not tell to the problems.
pub fn join<'p>(processes: &'p [Process], problems: &mut Vec<String>) -> Vec<Joined<'p>> {
    let mut tables = SocketTables::default();
    let mut joined = Vec::new();
    for process in processes {
        let (namespace, table) = tables.of(&process.directory);
        let mut problem = None;
        for slot in &process.slots {
            let Some(path) = Path::from_u32(slot.path) else { continue };
            let socket = table.find(slot.inode).or_else(|| {
                table.look_again(&process.directory);
                table.find(slot.inode)
            });
            if socket.is_none() {
                problem = table.problem.clone();
            }
            joined.push(Joined { process, slot, path, namespace: namespace.clone(), socket });
        }
        // Nothing can be told of one that ends meanwhile, and nothing is missing. KERNEL: such a one is in no namespace any more.
        let place = process.directory.join("ns/net");
        let ends = || place.read_link().is_err_and(|error| error.kind() == ErrorKind::NotFound);
        let problem = problem.filter(|_| !ends());
        problems.extend(problem.map(|why| format!("{}: {why}", process.name())));
    }
    joined
}

pub fn reason_code(reason: u32) -> Option<String> {
    match Reason::from_u32(reason) {
        Some(Reason::None) => None,
        Some(reason) => Some(reason.code().to_owned()),
        None => Some(format!("#{reason}")),
    }
}

pub fn explanation(reason: u32) -> Option<&'static str> {
    match Reason::from_u32(reason) {
        Some(Reason::None) => None,
        Some(reason) => Some(reason.sentence()),
        None => Some("A reason that only a newer ringlet can explain."),
    }
}
