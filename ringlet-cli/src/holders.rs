//! Who holds a socket: every process whose descriptors this user may look at.

use std::collections::HashMap;
use std::fs;

use serde::Serialize;

use ringlet_programs::processes;
use ringlet_programs::sockets::Descriptors;

#[derive(Clone, Serialize)]
pub struct Holder {
    pub pid: u32,
    pub program: String,
    pub fd: i32,
}

/// By inode; each process's lowest descriptor.
pub struct Holders(HashMap<u64, Vec<Holder>>);

impl Holders {
    pub fn look() -> Holders {
        let mut found: HashMap<u64, Vec<Holder>> = HashMap::new();
        let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
        for pid in entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok()) {
            let program = processes::program_of(pid);
            for (fd, inode) in sockets_of(pid) {
                let holders = found.entry(inode).or_default();
                if holders.last().is_none_or(|holder| holder.pid != pid) {
                    holders.push(Holder { pid, program: program.clone(), fd });
                }
            }
        }
        Holders(found)
    }

    pub fn of(&self, inode: u64) -> &[Holder] {
        self.0.get(&inode).map_or(&[], Vec::as_slice)
    }
}

/// The descriptors of a process that are sockets, in order, with their inodes.
pub fn sockets_of(pid: u32) -> Vec<(i32, u64)> {
    let mut descriptors = Descriptors::of(&processes::directory(pid));
    let numbers = descriptors.list();
    let mut found: Vec<(i32, u64)> =
        numbers.filter_map(|fd| Some((fd, descriptors.socket(fd)?))).collect();
    found.sort_unstable();
    found
}
