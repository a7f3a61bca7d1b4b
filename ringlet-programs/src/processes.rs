//! Reads the pages in which ringlet processes show themselves. Such a page belongs to a stranger, who may write anything
//! into it at any time: it is read once, bounded, and nothing in it is trusted. Nothing is opened before it is known to be a memfd, and
//! who keeps us waiting is left behind.

use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, ErrorKind};
use std::mem::offset_of;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::OnceLock;

use anyhow::Context;
use ringlet_core::memory::Area;
use ringlet_core::tap::{TAP_FILE_BYTES, TAP_HEAD_BYTES, TAP_MAGIC, Tap, TapHead};
use ringlet_core::view::{
    PATH_RING, PROCESS_FILE_BYTES, PROCESS_MAGIC, PROCESS_MEMFD_NAME, PROCESS_SLOT_COUNT,
    ProcessHeader, SLOT_FREE, SocketSlot,
};
use ringlet_linux::map;
use rustix::fs::{AtFlags, CWD, FallocateFlags, MemfdFlags, Mode, OFlags, StatxFlags};
use rustix::process::{Resource, getrlimit, setrlimit};

use crate::patience;
use crate::sockets::Descriptors;
use crate::table::printable;

const HEADER_BYTES: usize = size_of::<ProcessHeader>();
const SLOT_BYTES: usize = size_of::<SocketSlot>();

/// A process that shows a page of its own.
pub struct Process {
    pub pid: u32,
    /// The kernel's short name for it.
    pub program: String,
    /// Sockets that it left to the kernel for want of a slot, memory or descriptors.
    pub refused: u64,
    /// How long its waits have watched memory, how many ended by it, and how many slept in the end.
    pub watched_ns: u64,
    pub watched: u64,
    pub watched_in_vain: u64,
    /// Where the kernel shows it.
    pub directory: PathBuf,
    /// One for each of its sockets that it shows.
    pub slots: Vec<Slot>,
    page: File,
}

/// What `SocketSlot` held when it was read.
#[derive(Clone)]
pub struct Slot {
    pub index: usize,
    pub inode: u64,
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
        let more = if self.path == PATH_RING { 0 } else { since };
        let kernel = self.kernel_calls.saturating_add(more);
        (self.calls.saturating_sub(kernel), kernel.min(self.calls))
    }
}

impl Process {
    /// As it is called to people.
    pub fn name(&self) -> String {
        name(&self.program, self.pid)
    }

    /// Its page as shared memory, in which something can be asked of it.
    pub fn live(&self) -> anyhow::Result<LivePage> {
        let whose = || format!("cannot ask anything of {}", self.name());
        let page = self.page.try_clone()?;
        let area = map_again(&page, PROCESS_FILE_BYTES).with_context(whose)?;
        Ok(LivePage(area, page))
    }
}

/// Says what went wrong; the exit status says that something did.
pub fn tell(problems: &[String]) -> ExitCode {
    problems.iter().for_each(|problem| eprintln!("ringlet: {}", printable(problem)));
    ExitCode::from(u8::from(!problems.is_empty()))
}

pub fn name(program: &str, pid: u32) -> String {
    format!("{}/{pid}", printable(program))
}

/// Maps an open memfd, to be read and written.
fn map_again(file: &File, bytes: usize) -> anyhow::Result<Area> {
    let file = open_again(file, OFlags::RDWR)?;
    // Memory that could shrink would kill us.
    let sealed = map::sealed_size(file.as_raw_fd()) == Ok(bytes);
    anyhow::ensure!(sealed, "it is of another ringlet");
    let mapped = map::map_shared(file.as_raw_fd(), bytes, true);
    Ok(mapped.map_err(|error| io::Error::from_raw_os_error(error.0))?)
}

/// What a process records, mapped. The process writes into it while we look.
pub struct LiveTap(Tap, File);

impl LiveTap {
    /// Of each process what it records, if it does, or why that can't be told.
    pub fn of_each(pids: Vec<u32>) -> HashMap<u32, anyhow::Result<Option<LiveTap>>> {
        let found = patience::each(pids, |pid| TAP.find(pid)).into_iter();
        found.map(|(pid, found)| (pid, LiveTap::map(found))).collect()
    }

    fn map(found: Option<Result<Option<File>, String>>) -> anyhow::Result<Option<LiveTap>> {
        let found = found.context(patience::LATE)?.map_err(anyhow::Error::msg)?;
        let Some(file) = found else { return Ok(None) };
        let area = map_again(&file, TAP_FILE_BYTES)?;
        Ok(Some(LiveTap(Tap(area), file)))
    }

    pub fn tap(&self) -> Tap {
        self.0
    }

    /// Frees the pages of its cells.
    pub fn empty(&self) {
        if let Ok(file) = open_again(&self.1, OFlags::WRONLY) {
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
pub struct LivePage(Area, File);

impl LivePage {
    pub fn header(&self) -> &ProcessHeader {
        self.0.at(0)
    }

    pub fn slot(&self, index: usize) -> &SocketSlot {
        self.0.at(HEADER_BYTES + index.min(PROCESS_SLOT_COUNT - 1) * SLOT_BYTES)
    }

    /// The rows in use. Read from the file, since to look at a row that was never used would take memory, and ours at that.
    pub fn used(&self) -> Vec<usize> {
        let rows = rows(&self.1, PROCESS_FILE_BYTES).unwrap_or_default();
        let rows = rows.chunks_exact(SLOT_BYTES).enumerate();
        let used = rows.filter(|(_, row)| word_u32(row, offset_of!(SocketSlot, path)) != SLOT_FREE);
        used.map(|(index, _)| index).collect()
    }
}

impl Drop for LivePage {
    #[allow(unsafe_code)]
    fn drop(&mut self) {
        // SAFETY: mapped in `live`; references to it borrow from us.
        unsafe { map::unmap(self.0) };
    }
}

/// Processes, and what kept others from being seen.
pub struct Seen {
    pub processes: Vec<Process>,
    pub problems: Vec<String>,
}

/// Every ringlet process that this user may look into, by pid. Those that end meanwhile are left out.
pub fn all() -> anyhow::Result<Seen> {
    // Each page is a descriptor.
    let limit = getrlimit(Resource::Nofile);
    let _ =
        setrlimit(Resource::Nofile, rustix::process::Rlimit { current: limit.maximum, ..limit });
    let entries = fs::read_dir("/proc").context("cannot read /proc")?;
    let pids: Vec<u32> =
        entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
    let mut problems = Vec::new();
    let mut pages = Vec::new();
    // Found first and read then, one right after the other: the two ends of a connection are compared.
    for (pid, found) in patience::each(pids, Page::find) {
        let why = match found {
            Some(Ok(page)) => {
                pages.extend(page);
                continue;
            }
            Some(Err(why)) => why,
            None => patience::LATE.to_owned(),
        };
        problems.push(format!("{} can't be seen: {why}", name(&program_of(pid), pid)));
    }
    let mut processes: Vec<Process> = pages.into_iter().filter_map(Page::read).collect();
    processes.sort_by_key(|process| process.pid);
    Ok(Seen { processes, problems })
}

/// Those of these processes that show a page of their own.
pub fn that_show(pids: Vec<u32>) -> impl Iterator<Item = u32> {
    let found = patience::each(pids, |pid| matches!(Page::find(pid), Ok(Some(_))));
    found.into_iter().filter(|(_, shows)| *shows == Some(true)).map(|(pid, _)| pid)
}

/// The process `pid`, if it shows a page of its own.
pub fn one(pid: u32) -> anyhow::Result<Option<Process>> {
    Ok(patience::one(pid, Page::find)?.map_err(anyhow::Error::msg)?.and_then(Page::read))
}

pub fn parent_of(pid: u32) -> Option<u32> {
    Status::of(&process(pid)).last("PPid:")
}

/// The kernel's short name for a process.
pub fn program_of(pid: u32) -> String {
    let name = fs::read(process(pid).join("comm")).unwrap_or_default();
    String::from_utf8_lossy(name.trim_ascii_end()).into_owned()
}

/// Has it ended, though its parent may not know yet?
pub fn has_ended(pid: u32) -> bool {
    Status::of(&directory(pid)).has_ended()
}

fn process(pid: u32) -> PathBuf {
    PathBuf::from(format!("/proc/{pid}"))
}

/// Where the kernel shows what a process has: when its first thread has ended, that one has nothing any more, and any other has all.
pub fn directory(pid: u32) -> PathBuf {
    let first = process(pid);
    if !Status::of(&first).has_ended() {
        return first;
    }
    let threads = fs::read_dir(first.join("task")).into_iter().flatten().flatten();
    let mut threads = threads.map(|entry| Path::new("/proc").join(entry.file_name()));
    threads.find(|thread| !Status::of(thread).has_ended()).unwrap_or(first)
}

/// What /proc/PID/status says; the name in it may hold any byte.
struct Status(Vec<u8>);

impl Status {
    fn of(directory: &Path) -> Status {
        Status(fs::read(directory.join("status")).unwrap_or_default())
    }

    fn line(&self, name: &str) -> Option<&str> {
        let lines = self.0.split(|byte| *byte == b'\n');
        let mut found = lines.filter_map(|line| line.strip_prefix(name.as_bytes()));
        found.next().and_then(|line| str::from_utf8(line).ok())
    }

    fn has_ended(&self) -> bool {
        self.line("State:").is_none_or(|state| state.trim_start().starts_with(['Z', 'X']))
    }

    fn last(&self, name: &str) -> Option<u32> {
        self.line(name)?.split_ascii_whitespace().last()?.parse().ok()
    }

    /// Its pid in its own namespace.
    fn inner_pid(&self) -> Option<u32> {
        self.last("NSpid:")
    }
}

/// A memfd that a process makes and nobody else may make for it, and the words at its head.
struct Kind {
    name: &'static str,
    magic: u64,
    magic_at: usize,
    pid_at: usize,
}

const PAGE: Kind = Kind {
    name: PROCESS_MEMFD_NAME,
    magic: PROCESS_MAGIC,
    magic_at: offset_of!(ProcessHeader, magic),
    pid_at: offset_of!(ProcessHeader, pid),
};
const TAP: Kind = Kind {
    name: "ringlet-tap",
    magic: TAP_MAGIC,
    magic_at: offset_of!(TapHead, magic),
    pid_at: offset_of!(TapHead, pid),
};

impl Kind {
    /// None if the process has none; an error if it may have one that can't be had.
    fn find(&self, pid: u32) -> Result<Option<File>, String> {
        let Some(inner_pid) = Status::of(&process(pid)).inner_pid() else { return Ok(None) };
        let owners = owners(pid);
        let mut problem = None;
        for path in self.paths(&directory(pid)) {
            let opened = open_memfd(&path, &owners).and_then(|file| {
                let Some(file) = file else { return Ok(None) };
                Ok(Some((read(&file, 0, HEADER_BYTES)?, file)))
            });
            let (header, file) = match opened {
                Ok(Some(opened)) => opened,
                Ok(None) => continue,
                Err(error) => {
                    // The process has ended, or has let it go, or it is for root only.
                    let fine = [ErrorKind::NotFound, ErrorKind::PermissionDenied];
                    let fine =
                        fine.contains(&error.kind()) || error.raw_os_error() == Some(libc::ESRCH);
                    problem = problem.or((!fine).then(|| error.to_string()));
                    continue;
                }
            };
            // Between fork and its first socket call, a child still has its parent's, and later perhaps both.
            if word_u32(&header, self.pid_at) != inner_pid {
                continue;
            }
            match word_u64(&header, self.magic_at) {
                magic if magic == self.magic => return Ok(Some(file)),
                0 => {}
                _ => problem = Some("it is of another ringlet".to_owned()),
            }
        }
        problem.map_or(Ok(None), Err)
    }

    /// Where it may be: among what is mapped, which only root may open, and then among the descriptors, of which a program may have
    /// closed that one. Nowhere in a process that has mapped nothing of that name, as most haven't.
    fn paths(&self, directory: &Path) -> impl Iterator<Item = PathBuf> {
        let link = format!("/memfd:{}", self.name);
        let mapped = mapped_at(directory, link.as_bytes()).unwrap_or_default();
        let descriptors = (!mapped.is_empty()).then(|| directory.join("fd")).into_iter();
        let descriptors = descriptors.filter_map(|place| fs::read_dir(place).ok()).flatten();
        let descriptors = descriptors.flatten().map(|entry| entry.path()).filter(move |path| {
            fs::read_link(path).is_ok_and(|target| target.to_string_lossy().starts_with(&link))
        });
        let place = directory.join("map_files");
        mapped.into_iter().map(move |range| place.join(range)).chain(descriptors)
    }
}

/// The ranges of its memory that are mapped from a file whose name begins so.
fn mapped_at(directory: &Path, name: &[u8]) -> io::Result<Vec<String>> {
    let mut maps = BufReader::with_capacity(1 << 16, File::open(directory.join("maps"))?);
    let (mut line, mut found) = (Vec::new(), Vec::new());
    while maps.read_until(b'\n', &mut line)? > 0 {
        // Range, permissions, offset, device, inode, name.
        let mut fields = line.split(|byte| *byte == b' ').filter(|field| !field.is_empty());
        let range = fields.next().and_then(|range| str::from_utf8(range).ok());
        if fields.nth(4).is_some_and(|field| field.starts_with(name)) {
            found.extend(range.map(str::to_owned));
        }
        line.clear();
    }
    Ok(found)
}

/// The users whose memfd a process may hold for its own: itself, root, and the root of its user namespace, as which it may have begun.
fn owners(pid: u32) -> Vec<u32> {
    let numbers = |text: &str| -> Vec<u32> {
        text.split_ascii_whitespace().filter_map(|word| word.parse().ok()).collect()
    };
    let mut owners = vec![0];
    owners.extend(Status::of(&process(pid)).line("Uid:").map(numbers).into_iter().flatten());
    let map = fs::read_to_string(process(pid).join("uid_map")).unwrap_or_default();
    owners.extend(
        map.lines()
            .map(numbers)
            .filter(|each| each.first() == Some(&0))
            .filter_map(|each| each.get(1).copied()),
    );
    owners
}

/// Opens a memfd that one of these users has made; None if it is something else.
fn open_memfd(path: &Path, owners: &[u32]) -> io::Result<Option<File>> {
    // KERNEL: to find a file is not to open it: no FIFO waits for its other end, no lease is broken, no server of files is asked.
    let place = File::from(rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?);
    let about = about(&place)?;
    let is_file = u32::from(about.stx_mode) & libc::S_IFMT == libc::S_IFREG;
    let is_memory = (about.stx_dev_major, about.stx_dev_minor) == memory_device()?;
    if !(is_file && is_memory && owners.contains(&about.stx_uid)) {
        return Ok(None);
    }
    open_again(&place, OFlags::RDONLY).map(Some)
}

fn about(file: &File) -> io::Result<rustix::fs::Statx> {
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    Ok(rustix::fs::statx(file, c"", flags, StatxFlags::BASIC_STATS)?)
}

/// The kernel's own file system, on which all memfds are and to which nobody gives names.
fn memory_device() -> io::Result<(u32, u32)> {
    static DEVICE: OnceLock<(u32, u32)> = OnceLock::new();
    if let Some(known) = DEVICE.get() {
        return Ok(*known);
    }
    let memfd = File::from(rustix::fs::memfd_create("ringlet", MemfdFlags::CLOEXEC)?);
    let about = about(&memfd)?;
    Ok(*DEVICE.get_or_init(|| (about.stx_dev_major, about.stx_dev_minor)))
}

/// Opens an open file again. Its holder may have taken a lease, for which we do not wait.
fn open_again(file: &File, access: OFlags) -> io::Result<File> {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let flags = access | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    Ok(File::from(rustix::fs::openat(CWD, path, flags, Mode::empty())?))
}

/// The open page of a process.
struct Page {
    pid: u32,
    program: String,
    file: File,
}

impl Page {
    fn find(pid: u32) -> Result<Option<Page>, String> {
        let found = PAGE.find(pid)?;
        Ok(found.map(|file| Page { pid, program: program_of(pid), file }))
    }

    fn read(self) -> Option<Process> {
        let length = usize::try_from(self.file.metadata().ok()?.len()).ok()?;
        let header = read(&self.file, 0, HEADER_BYTES).ok()?;
        let rows = rows(&self.file, length)?;
        let directory = directory(self.pid);
        let rows = rows.chunks_exact(SLOT_BYTES).enumerate().map(slot);
        let mut slots: Vec<Slot> = rows.filter(|slot| slot.path != SLOT_FREE).collect();
        // Of the rows of one socket the last one counts: the program may have closed an earlier one by a system call of its own. What is
        // no socket tells nothing.
        slots.sort_by_key(|slot| Reverse((slot.number, slot.index)));
        let mut descriptors = Descriptors::of(&directory);
        let (mut numbers, mut inodes) = (HashSet::new(), HashSet::new());
        slots.retain_mut(|slot| {
            numbers.insert(slot.fd)
                && descriptors.socket(slot.fd).is_some_and(|inode| {
                    slot.inode = inode;
                    inodes.insert(inode)
                })
        });
        slots.sort_by_key(|slot| slot.index);
        slots.shrink_to_fit();
        Some(Process {
            pid: self.pid,
            program: self.program,
            refused: word_u64(&header, offset_of!(ProcessHeader, refused)),
            watched_ns: word_u64(&header, offset_of!(ProcessHeader, watched_ns)),
            watched: word_u64(&header, offset_of!(ProcessHeader, watched)),
            watched_in_vain: word_u64(&header, offset_of!(ProcessHeader, watched_in_vain)),
            slots,
            directory,
            page: self.file,
        })
    }
}

/// The rows of a page of this length that were ever used, as they are now.
fn rows(file: &File, length: usize) -> Option<Vec<u8>> {
    let room = length.checked_sub(HEADER_BYTES)? / SLOT_BYTES;
    let header = read(file, 0, HEADER_BYTES).ok()?;
    let used = word_u32(&header, offset_of!(ProcessHeader, slots_used)) as usize;
    read(file, HEADER_BYTES, used.min(room).min(PROCESS_SLOT_COUNT) * SLOT_BYTES).ok()
}

fn read(file: &File, offset: usize, length: usize) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; length];
    file.read_exact_at(&mut bytes, offset as u64)?;
    Ok(bytes)
}

fn slot((index, bytes): (usize, &[u8])) -> Slot {
    Slot {
        index,
        inode: 0,
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
