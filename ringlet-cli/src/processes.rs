//! Reads the pages in which ringlet processes show themselves. Such a page belongs to a stranger, who may write anything
//! into it at any time: it is read once, bounded, and nothing in it is trusted.

use std::fs::{self, File, OpenOptions};
use std::mem::offset_of;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::Relaxed;

use anyhow::Context;
use ringlet_core::memory::Area;
use ringlet_core::tap::{TAP_FILE_BYTES, TAP_HEAD_BYTES, TAP_MAGIC, TAP_MEMFD_NAME, Tap};
use ringlet_core::view::{
    PATH_RING, PROCESS_FILE_BYTES, PROCESS_MAGIC, PROCESS_MEMFD_NAME, PROCESS_SLOT_COUNT,
    ProcessHeader, SocketSlot,
};
use ringlet_linux::map;
use rustix::fs::{FallocateFlags, OFlags};

const HEADER_BYTES: usize = size_of::<ProcessHeader>();
const SLOT_BYTES: usize = size_of::<SocketSlot>();

/// A process that shows a page of its own.
pub struct Process {
    pub pid: u32,
    /// The kernel's short name for it.
    pub program: String,
    /// Sockets that it left to the kernel for want of a slot, memory or descriptors.
    pub refused: u64,
    pub slots: Vec<Slot>,
    page: File,
}

/// What `SocketSlot` held when it was read.
#[derive(Clone)]
pub struct Slot {
    pub index: usize,
    pub path: u32,
    pub reason: u32,
    pub fd: i32,
    pub wakes: u32,
    pub bells: u32,
    pub tx_bytes: u64,
    pub rx_bytes: u64,
    pub calls: u64,
    pub number: u64,
    pub asked: u32,
    pub spins: u32,
    pub began_ns: u64,
    pub path_since_ns: u64,
    pub moved_ns: u64,
    pub returned_ns: u64,
    pub kernel_tx_bytes: u64,
    pub kernel_rx_bytes: u64,
    kernel_calls: u64,
    calls_at_change: u64,
    pub entries: u32,
    pub returns: u32,
    pub return_reason: u32,
    pub overflows: u32,
}

impl Slot {
    /// Of its calls, those by the ring and those by the kernel.
    pub fn calls_by_path(&self) -> (u64, u64) {
        let since = self.calls.saturating_sub(self.calls_at_change);
        let kernel = self.kernel_calls + if self.path == PATH_RING { 0 } else { since };
        (self.calls.saturating_sub(kernel), kernel.min(self.calls))
    }
}

impl Process {
    /// Its page as shared memory, in which something can be asked of it.
    pub fn live(&self) -> anyhow::Result<LivePage> {
        let whose = || format!("cannot ask anything of {}/{}", self.program, self.pid);
        map_again(&self.page, PROCESS_FILE_BYTES).map(LivePage).with_context(whose)
    }

    /// What it has recorded, if it is being captured.
    pub fn tap(&self) -> Option<LiveTap> {
        LiveTap::of(self.pid)
    }
}

/// Maps an open memfd, to be read and written.
fn map_again(file: &File, bytes: usize) -> anyhow::Result<Area> {
    let path = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
    let file = OpenOptions::new().read(true).write(true).open(path)?;
    // Memory that could shrink would kill us.
    let sealed = map::sealed_size(file.as_raw_fd()) == Ok(bytes);
    anyhow::ensure!(sealed, "it is of another ringlet");
    let mapped = map::map_shared(file.as_raw_fd(), bytes, true);
    Ok(mapped.map_err(|error| std::io::Error::from_raw_os_error(error.0))?)
}

/// What a process records, mapped. The process writes into it while we look.
pub struct LiveTap(Tap, File);

impl LiveTap {
    pub fn of(pid: u32) -> Option<LiveTap> {
        let directory = PathBuf::from(format!("/proc/{pid}"));
        let inner_pid = pid_in_own_namespace(&directory)?;
        let files = memfds(&directory, TAP_MEMFD_NAME.to_str().ok()?);
        let taps = files.filter_map(|path| open(&path)).filter_map(|file| {
            map_again(&file, TAP_FILE_BYTES).ok().map(|area| LiveTap(Tap(area), file))
        });
        // A child by fork still has its parent's for a moment.
        let is_own = |tap: &LiveTap| {
            let head = tap.0.head();
            head.magic.load(Relaxed) == TAP_MAGIC && head.pid.load(Relaxed) == inner_pid
        };
        taps.into_iter().find(is_own)
    }

    pub fn tap(&self) -> Tap {
        self.0
    }

    /// Frees the pages of its cells.
    pub fn empty(&self) {
        let path = format!("/proc/self/fd/{}", self.1.as_raw_fd());
        if let Ok(file) = OpenOptions::new().write(true).open(path) {
            let how = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            let (from, bytes) = (TAP_HEAD_BYTES as u64, (TAP_FILE_BYTES - TAP_HEAD_BYTES) as u64);
            let _ = rustix::fs::fallocate(file, how, from, bytes);
        }
    }
}

impl Drop for LiveTap {
    #[allow(unsafe_code)]
    fn drop(&mut self) {
        // SAFETY: mapped in `of`; who copies the tap keeps us.
        unsafe { map::unmap(self.0.0) };
    }
}

/// A process's page, mapped: it changes while we look.
pub struct LivePage(Area);

impl LivePage {
    pub fn header(&self) -> &ProcessHeader {
        self.0.at(0)
    }

    pub fn slot(&self, index: usize) -> &SocketSlot {
        self.0.at(HEADER_BYTES + index.min(PROCESS_SLOT_COUNT - 1) * SLOT_BYTES)
    }
}

impl Drop for LivePage {
    #[allow(unsafe_code)]
    fn drop(&mut self) {
        // SAFETY: mapped in `live`; references to it borrow from us.
        unsafe { map::unmap(self.0) };
    }
}

/// Every ringlet process that this user may look into, by pid. Those that end meanwhile are left out.
pub fn all() -> anyhow::Result<Vec<Process>> {
    let entries = fs::read_dir("/proc").context("cannot read /proc")?;
    let names = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    // Found first and read then, one right after the other: the two ends of a connection are compared.
    let pages: Vec<Page> = names.filter_map(Page::find).collect();
    let mut processes: Vec<Process> = pages.into_iter().filter_map(Page::read).collect();
    processes.sort_by_key(|process| process.pid);
    Ok(processes)
}

/// The process `pid`, if it shows a page of its own.
pub fn one(pid: u32) -> Option<Process> {
    Page::find(pid)?.read()
}

fn program(directory: &Path) -> String {
    let name = fs::read(directory.join("comm")).unwrap_or_default();
    String::from_utf8_lossy(name.trim_ascii_end()).into_owned()
}

pub fn parent_of(pid: u32) -> Option<u32> {
    status(&PathBuf::from(format!("/proc/{pid}")), "PPid:")
}

/// The kernel's short name for a process.
pub fn program_of(pid: u32) -> String {
    program(&PathBuf::from(format!("/proc/{pid}")))
}

/// Has it ended, though its parent may not know yet?
pub fn has_ended(pid: u32) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let state = status.lines().find_map(|line| line.strip_prefix("State:"));
    state.is_none_or(|state| state.trim_start().starts_with(['Z', 'X']))
}

/// The last number on a line of its status.
fn status(directory: &Path, name: &str) -> Option<u32> {
    let status = fs::read_to_string(directory.join("status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix(name))?;
    line.split_ascii_whitespace().last()?.parse().ok()
}

fn pid_in_own_namespace(directory: &Path) -> Option<u32> {
    status(directory, "NSpid:")
}

/// The files of a process that may be its memfd of this name.
fn memfds(directory: &Path, name: &str) -> impl Iterator<Item = PathBuf> {
    let link = format!("/memfd:{name}");
    let maps = fs::read(directory.join("maps")).unwrap_or_default();
    let maps = String::from_utf8_lossy(&maps);
    let ranges: Vec<&str> = maps
        .lines()
        .filter(|line| line.contains(&link))
        .filter_map(|line| line.split_ascii_whitespace().next())
        .collect();
    // Most processes are none of ours: don't walk through their descriptors.
    let directories =
        if ranges.is_empty() { None } else { fs::read_dir(directory.join("fd")).ok() };
    let descriptors = directories.into_iter().flatten().flatten().map(|entry| entry.path());
    let descriptors: Vec<PathBuf> = descriptors
        .filter(|path| {
            fs::read_link(path).is_ok_and(|target| target.to_string_lossy().starts_with(&link))
        })
        .collect();
    // A program that closed the descriptor still has the mapping, which only root may open.
    let mapped: Vec<PathBuf> =
        ranges.iter().map(|range| directory.join("map_files").join(range)).collect();
    descriptors.into_iter().chain(mapped)
}

/// The open page of a process.
struct Page {
    pid: u32,
    program: String,
    file: File,
}

impl Page {
    fn find(pid: u32) -> Option<Page> {
        let directory = PathBuf::from(format!("/proc/{pid}"));
        let inner_pid = pid_in_own_namespace(&directory)?;
        // Between fork and its first socket call, a child still has its parent's page, and later perhaps both.
        let is_own = |file: &File| {
            read(file, 0, HEADER_BYTES).is_some_and(|header| {
                word_u64(&header, offset_of!(ProcessHeader, magic)) == PROCESS_MAGIC
                    && word_u32(&header, offset_of!(ProcessHeader, pid)) == inner_pid
            })
        };
        let files = memfds(&directory, PROCESS_MEMFD_NAME);
        let file = files.filter_map(|path| open(&path)).find(is_own)?;
        Some(Page { pid, program: program(&directory), file })
    }

    fn read(self) -> Option<Process> {
        let length = usize::try_from(self.file.metadata().ok()?.len()).ok()?;
        let room = length.checked_sub(HEADER_BYTES)? / SLOT_BYTES;
        let header = read(&self.file, 0, HEADER_BYTES)?;
        let used = word_u32(&header, offset_of!(ProcessHeader, slots_used)) as usize;
        let used = used.min(room).min(PROCESS_SLOT_COUNT);
        let slots = read(&self.file, HEADER_BYTES, used * SLOT_BYTES)?;
        Some(Process {
            pid: self.pid,
            program: self.program,
            refused: word_u64(&header, offset_of!(ProcessHeader, refused)),
            slots: slots.chunks_exact(SLOT_BYTES).enumerate().map(slot).collect(),
            page: self.file,
        })
    }
}

fn open(path: &Path) -> Option<File> {
    // Anybody may give the name of our page to a FIFO, whose opening must not block us.
    let flags = (OFlags::NONBLOCK | OFlags::NOCTTY).bits() as i32;
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path).ok()?;
    file.metadata().is_ok_and(|metadata| metadata.is_file()).then_some(file)
}

fn read(file: &File, offset: usize, length: usize) -> Option<Vec<u8>> {
    let mut bytes = vec![0; length];
    file.read_exact_at(&mut bytes, offset as u64).ok()?;
    Some(bytes)
}

fn slot((index, bytes): (usize, &[u8])) -> Slot {
    Slot {
        index,
        path: word_u32(bytes, offset_of!(SocketSlot, path)),
        reason: word_u32(bytes, offset_of!(SocketSlot, reason)),
        fd: word_u32(bytes, offset_of!(SocketSlot, fd)).cast_signed(),
        wakes: word_u32(bytes, offset_of!(SocketSlot, wakes)),
        bells: word_u32(bytes, offset_of!(SocketSlot, bells)),
        tx_bytes: word_u64(bytes, offset_of!(SocketSlot, tx_bytes)),
        rx_bytes: word_u64(bytes, offset_of!(SocketSlot, rx_bytes)),
        calls: word_u64(bytes, offset_of!(SocketSlot, calls)),
        number: word_u64(bytes, offset_of!(SocketSlot, number)),
        asked: word_u32(bytes, offset_of!(SocketSlot, asked)),
        spins: word_u32(bytes, offset_of!(SocketSlot, spins)),
        began_ns: word_u64(bytes, offset_of!(SocketSlot, began_ns)),
        path_since_ns: word_u64(bytes, offset_of!(SocketSlot, path_since_ns)),
        moved_ns: word_u64(bytes, offset_of!(SocketSlot, moved_ns)),
        returned_ns: word_u64(bytes, offset_of!(SocketSlot, returned_ns)),
        kernel_tx_bytes: word_u64(bytes, offset_of!(SocketSlot, kernel_tx_bytes)),
        kernel_rx_bytes: word_u64(bytes, offset_of!(SocketSlot, kernel_rx_bytes)),
        kernel_calls: word_u64(bytes, offset_of!(SocketSlot, kernel_calls)),
        calls_at_change: word_u64(bytes, offset_of!(SocketSlot, calls_at_change)),
        entries: word_u32(bytes, offset_of!(SocketSlot, entries)),
        returns: word_u32(bytes, offset_of!(SocketSlot, returns)),
        return_reason: word_u32(bytes, offset_of!(SocketSlot, return_reason)),
        overflows: word_u32(bytes, offset_of!(SocketSlot, overflows)),
    }
}

fn word_u32(bytes: &[u8], offset: usize) -> u32 {
    u32::from_ne_bytes(bytes[offset..offset + 4].try_into().expect("four bytes"))
}

fn word_u64(bytes: &[u8], offset: usize) -> u64 {
    u64::from_ne_bytes(bytes[offset..offset + 8].try_into().expect("eight bytes"))
}
