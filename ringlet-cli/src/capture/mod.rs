//! `ringlet capture`: what goes through shared memory, as a file that Wireshark reads.

mod packets;
mod taps;

use std::collections::{BTreeSet, HashMap, HashSet};
use std::fs::File;
use std::io::{BufWriter, ErrorKind, Write};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::Context;
use ringlet_core::view::{ASKED_TAP, ASKED_TAP_END};
use rustix::fs::OFlags;
use signal_hook::consts::{SIGHUP, SIGINT, SIGPIPE, SIGTERM};

use crate::targets::{Connection, Targets};
use packets::Writer;
use ringlet_programs::processes::{self, LivePage, LiveTap, Process};
use taps::{Source, UNFINISHED};

/// Record what connections carry through shared memory, for Wireshark
///
/// Writes pcapng: each piece that a program sends or receives becomes a TCP packet between the connection's real addresses,
/// with the time at which it was sent or received; headers, sequence numbers and checksums are made up to match. (Unix
/// sockets get addresses of 192.0.2.0/24; sequenced packets that hold bytes get a TCP packet each.) Datagrams that go by shared
/// memory become UDP packets; those that the kernel carries are for tcpdump to see. Each program is an interface, each connection
/// is recorded at one of its ends, a UDP socket that is not connected wherever its program is named. Bytes that went by before the
/// capture, or before the connection moved, are not in it.
///
/// The program never waits for the capture: what finds no room is dropped, counted and said. Ends with Ctrl-C.
///
/// Exit status 1: nothing was recorded, or a program can't be seen or asked, or is being captured already.
#[derive(clap::Args)]
pub struct CaptureArgs {
    #[command(flatten)]
    targets: Targets,
    /// Where to write: a new file that only you may read, or a FIFO or device; - is standard output, for example into `wireshark -k -i -`
    #[arg(short, long, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    write: PathBuf,
    /// Keep only so many bytes of each piece
    #[arg(long, value_name = "BYTES", default_value_t = 65_535)]
    snaplen: u32,
    /// Stop after so many seconds
    #[arg(long)]
    seconds: Option<f64>,
    /// Stop after so many packets
    #[arg(long)]
    packets: Option<u64>,
}

const LOOK_EVERY: Duration = Duration::from_millis(2);
/// How often a sign of life is given.
const BEAT_EVERY: Duration = Duration::from_millis(500);
/// How often new connections and children are looked for.
const LOOK_AROUND_EVERY: Duration = Duration::from_millis(500);
/// How often the memory of processes is looked for, until they have some; and the part of the time that this may take.
const LOOK_FOR_MEMORY_EVERY: Duration = Duration::from_millis(10);
const LOOK_FOR_MEMORY_PART: u32 = 10;
/// A program that is recorded already hears from whoever does it within this time.
const OTHERS_BEAT: Duration = Duration::from_millis(1500);

pub fn run(args: CaptureArgs) -> anyhow::Result<ExitCode> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM, SIGHUP, SIGPIPE] {
        signal_hook::flag::register(signal, Arc::clone(&stop))?;
    }
    let first_beat = SystemTime::now().duration_since(UNIX_EPOCH)?.subsec_nanos() | 1;
    let mut capture = Capture {
        args,
        sources: Vec::new(),
        chosen: HashSet::new(),
        left_out: HashSet::new(),
        problems: BTreeSet::new(),
        first_beat,
        alive: Pages::default(),
    };
    let alive = Arc::clone(&capture.alive);
    std::thread::Builder::new().spawn(move || live(alive))?;
    capture.look_around()?;
    if capture.sources.is_empty() {
        capture.tell();
        anyhow::bail!("nothing that can be recorded is to be seen");
    }
    let path = &capture.args.write;
    let output: Box<dyn Write> = if path.as_os_str() == "-" {
        Box::new(std::io::stdout())
    } else {
        Box::new(create(path).with_context(|| format!("cannot write {}", path.display()))?)
    };
    let mut writer = Writer::new(BufWriter::with_capacity(1 << 20, output))?;
    eprintln!("Recording; Ctrl-C ends it.");
    let result = capture.record(&mut writer, &stop);
    // Whatever has happened, nobody records on.
    capture.end();
    let result = result.and_then(|()| {
        capture.drain_rest(&mut writer)?;
        capture.finish(&mut writer)
    });
    capture.sources.iter().for_each(Source::release);
    match result {
        // Whoever read it has had enough.
        Err(error) if is_broken_pipe(&error) => {}
        other => other?,
    }
    Ok(capture.tell())
}

/// What was said is for who captured it, and goes into nothing that another user has laid there.
fn create(path: &Path) -> std::io::Result<File> {
    let mut how = File::options();
    how.write(true).mode(0o600).custom_flags((OFlags::NOFOLLOW | OFlags::NOCTTY).bits() as i32);
    match path.symlink_metadata() {
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(error) => return Err(error),
        Ok(there) => {
            let kind = there.file_type();
            let own = [0, rustix::process::geteuid().as_raw()].contains(&there.uid());
            if own && (kind.is_fifo() || kind.is_char_device()) {
                return how.open(path);
            }
            if !own || !kind.is_file() {
                return Err(std::io::Error::other("there is something else than a file of yours"));
            }
            // Who has it open, or a link to it, is to read nothing.
            std::fs::remove_file(path)?;
        }
    }
    how.create_new(true).open(path)
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    let broken = |error: &std::io::Error| error.kind() == std::io::ErrorKind::BrokenPipe;
    error.chain().any(|cause| cause.downcast_ref().is_some_and(broken))
}

struct Capture {
    args: CaptureArgs,
    sources: Vec<Source>,
    /// Connections that are recorded already, at one end: by process and number.
    chosen: HashSet<(u32, u64)>,
    /// Processes that can't be recorded.
    left_out: HashSet<u32>,
    problems: BTreeSet<String>,
    /// Another one than an earlier capture's last.
    first_beat: u32,
    /// The pages in which signs of life are given.
    alive: Pages,
}

type Pages = Arc<Mutex<Vec<Arc<LivePage>>>>;

/// Gives signs of life beside all else: who is slow to be looked at, or reads slowly what we write, must not end what others record.
fn live(alive: Pages) {
    loop {
        std::thread::sleep(BEAT_EVERY);
        for page in alive.lock().unwrap_or_else(PoisonError::into_inner).iter() {
            let beat = &page.header().tap_beat;
            beat.store(beat.load(Ordering::Relaxed).wrapping_add(1).max(1), Ordering::Relaxed);
        }
    }
}

impl Capture {
    fn tell(&self) -> ExitCode {
        let late = self.sources.iter().filter_map(|source| source.problem.clone());
        processes::tell(&self.problems.iter().cloned().chain(late).collect::<Vec<_>>())
    }

    /// Asks all processes and connections that are meant and were not asked yet. Who can't be asked is left out.
    fn look_around(&mut self) -> anyhow::Result<()> {
        let found = self.args.targets.find()?;
        self.problems.extend(found.problems);
        let mut recorded: HashMap<u32, usize> =
            self.sources.iter().enumerate().map(|(at, source)| (source.pid, at)).collect();
        let ends: HashSet<u32> =
            found.connections.iter().flat_map(chosen_ends).map(|end| end.pid).collect();
        let mut new = Vec::new();
        for process in &found.processes {
            let pid = process.pid;
            if recorded.contains_key(&pid) || self.left_out.contains(&pid) {
                continue;
            }
            let parent = processes::parent_of(pid);
            let descends = parent.is_some_and(|parent| recorded.contains_key(&parent));
            let meant = self.args.targets.names(process) || ends.contains(&pid);
            if !meant && !descends {
                continue;
            }
            match process.live() {
                Ok(page) => {
                    // A child by fork of a process that is recorded is asked by its parent.
                    let inherits = descends && is_asked(process, &page);
                    if meant || inherits {
                        new.push((process, page, inherits));
                    }
                }
                Err(error) => self.leave_out(pid, format!("{error:#}")),
            }
        }
        if self.sources.is_empty() {
            let pages: Vec<&LivePage> = new.iter().map(|(_, page, _)| page).collect();
            let mut beaten = beaten(&pages).into_iter();
            new.retain(|(process, ..)| {
                let free = !beaten.next().unwrap_or(false);
                if !free {
                    let why = format!("{} is being captured already", process.name());
                    self.leave_out(process.pid, why);
                }
                free
            });
        }
        let mut left = LiveTap::of_each(new.iter().map(|(process, ..)| process.pid).collect());
        for (process, page, inherits) in new {
            // What it has recorded is for us, if it was asked by its parent.
            let left = left.remove(&process.pid).and_then(Result::ok).flatten();
            let (page, left) = (Arc::new(page), left.filter(|_| !inherits));
            page.header().tap_snaplen.store(self.args.snaplen, Ordering::Relaxed);
            page.header().tap_beat.store(self.first_beat, Ordering::Relaxed);
            if self.args.targets.names(process) {
                page.header().asked.fetch_or(ASKED_TAP, Ordering::SeqCst);
            }
            recorded.insert(process.pid, self.sources.len());
            self.alive.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::clone(&page));
            self.sources.push(Source::new(process, page, left));
        }
        self.choose(&found.connections, &recorded);
        Ok(())
    }

    fn leave_out(&mut self, pid: u32, why: String) {
        self.left_out.insert(pid);
        self.problems.insert(why);
    }

    /// Asks for connections that are not recorded yet; `recorded`: where the processes are among the sources.
    fn choose(&mut self, connections: &[Connection], recorded: &HashMap<u32, usize>) {
        let there: HashSet<(u32, u64)> = connections
            .iter()
            .flat_map(|connection| &connection.ends)
            .map(|end| (end.pid, end.slot.number))
            .collect();
        self.chosen.retain(|end| there.contains(end));
        self.sources.iter_mut().for_each(|source| source.keep_notes_of(&there));
        for connection in connections {
            let ends: Vec<_> = chosen_ends(connection).collect();
            let pids: HashSet<u32> = ends.iter().map(|end| end.pid).collect();
            // One end is enough; those who share it each record what they do.
            if connection.ends.iter().any(|end| {
                !pids.contains(&end.pid) && self.chosen.contains(&(end.pid, end.slot.number))
            }) {
                continue;
            }
            for end in ends {
                let Some(at) = recorded.get(&end.pid) else { continue };
                if self.chosen.insert((end.pid, end.slot.number)) {
                    self.sources[*at].record(end, connection);
                }
            }
        }
    }

    fn record<W: Write>(
        &mut self,
        writer: &mut Writer<W>,
        stop: &AtomicBool,
    ) -> anyhow::Result<()> {
        let began = Instant::now();
        let seconds = self.args.seconds.and_then(|limit| Duration::try_from_secs_f64(limit).ok());
        let mut looked = Instant::now();
        loop {
            let found = self.drain(writer)?;
            let enough = self.args.packets.is_some_and(|limit| writer.packets >= limit)
                || seconds.is_some_and(|limit| began.elapsed() >= limit)
                || self.sources.iter().all(Source::is_gone);
            if enough || stop.load(Ordering::Relaxed) {
                return Ok(());
            }
            if looked.elapsed() >= LOOK_AROUND_EVERY {
                self.look_around()?;
                looked = Instant::now();
                writer.flush()?;
            }
            if !found {
                std::thread::sleep(LOOK_EVERY);
            }
        }
    }

    /// Writes what was recorded meanwhile. False if nothing was.
    fn drain<W: Write>(&mut self, writer: &mut Writer<W>) -> anyhow::Result<bool> {
        self.look_for_memory();
        let limit = self.args.packets.unwrap_or(u64::MAX);
        let mut found = false;
        for source in &mut self.sources {
            found |= source.drain(writer, limit)?;
        }
        Ok(found)
    }

    /// Also what is behind a cell that is just being written.
    fn drain_rest<W: Write>(&mut self, writer: &mut Writer<W>) -> anyhow::Result<()> {
        let until = Instant::now() + 2 * UNFINISHED;
        while (self.drain(writer)? || self.sources.iter().any(Source::is_stuck))
            && Instant::now() < until
        {
            std::thread::sleep(LOOK_EVERY);
        }
        Ok(())
    }

    /// Of all at once: several may keep us waiting.
    fn look_for_memory(&mut self) {
        let began = Instant::now();
        let due = self.sources.iter().filter(|source| source.is_due());
        let due: Vec<u32> = due.map(|source| source.pid).collect();
        if due.is_empty() {
            return;
        }
        let mut found = LiveTap::of_each(due);
        let pause = (began.elapsed() * LOOK_FOR_MEMORY_PART).max(LOOK_FOR_MEMORY_EVERY);
        for source in &mut self.sources {
            if let Some(found) = found.remove(&source.pid) {
                source.note(found, pause);
            }
        }
    }

    fn end(&mut self) {
        self.alive.lock().unwrap_or_else(PoisonError::into_inner).clear();
        self.sources.iter_mut().for_each(Source::end);
    }

    fn finish<W: Write>(&mut self, writer: &mut Writer<W>) -> anyhow::Result<()> {
        let mut dropped = 0u64;
        for source in &self.sources {
            dropped = dropped.saturating_add(source.dropped());
            source.write_statistics(writer)?;
        }
        writer.flush()?;
        eprintln!("{} packets, {dropped} dropped", writer.packets);
        Ok(())
    }
}

/// The rows of the end at which a connection is recorded: of the process that was named, else of whichever is seen first.
fn chosen_ends(connection: &Connection) -> impl Iterator<Item = &crate::targets::End> {
    let first = connection.ends.iter().find(|end| end.chosen).or(connection.ends.first());
    let side = first.is_some_and(|end| end.accepts);
    connection.ends.iter().filter(move |end| end.accepts == side)
}

fn is_asked(process: &Process, page: &LivePage) -> bool {
    let tapped = |slot: &processes::Slot| {
        page.slot(slot.index).asked.load(Ordering::Relaxed) & ASKED_TAP != 0
    };
    page.header().asked.load(Ordering::Relaxed) & ASKED_TAP != 0 || process.slots.iter().any(tapped)
}

/// Which of them others give signs of life to? One capture at a time: a process's memory has one reader.
fn beaten(pages: &[&LivePage]) -> Vec<bool> {
    let beats = || pages.iter().map(|page| page.header().tap_beat.load(Ordering::Relaxed));
    let before: Vec<u32> = beats().collect();
    let mut beaten = vec![false; pages.len()];
    let until = Instant::now() + OTHERS_BEAT;
    while before.iter().zip(&beaten).any(|(beat, beaten)| *beat != 0 && !beaten)
        && Instant::now() < until
    {
        std::thread::sleep(LOOK_EVERY);
        for ((beaten, before), now) in beaten.iter_mut().zip(&before).zip(beats()) {
            *beaten |= *before != 0 && now != *before;
        }
    }
    beaten
}

/// The row's words after a capture.
fn ended(asked: u32) -> u32 {
    if asked & ASKED_TAP == 0 { asked } else { asked & !ASKED_TAP | ASKED_TAP_END }
}
