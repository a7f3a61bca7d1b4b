//! `ringlet capture`: what goes through shared memory, as a file that Wireshark reads.

mod packets;
mod taps;

use std::collections::HashSet;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::Context;
use ringlet_core::view::{ASKED_TAP, ASKED_TAP_END, SLOT_FREE};
use signal_hook::consts::{SIGHUP, SIGINT, SIGPIPE, SIGTERM};

use crate::processes::LivePage;
use crate::table::printable;
use crate::targets::{Connection, Targets};
use packets::Writer;
use taps::Source;

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
#[derive(clap::Args)]
pub struct CaptureArgs {
    #[command(flatten)]
    targets: Targets,
    /// Where to write; - is standard output, for example into `wireshark -k -i -`
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
/// How often a sign of life is given, and new connections and children are looked for.
const BEAT_EVERY: Duration = Duration::from_millis(500);
/// A program that is recorded already hears from whoever does it within this time.
const OTHERS_BEAT: Duration = Duration::from_millis(1500);

pub fn run(args: CaptureArgs) -> anyhow::Result<ExitCode> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM, SIGHUP, SIGPIPE] {
        signal_hook::flag::register(signal, Arc::clone(&stop))?;
    }
    let first_beat = SystemTime::now().duration_since(UNIX_EPOCH)?.subsec_nanos() | 1;
    let mut capture = Capture { args, sources: Vec::new(), chosen: HashSet::new(), first_beat };
    capture.look_around()?;
    anyhow::ensure!(!capture.sources.is_empty(), "nothing of that name is to be seen");
    let path = &capture.args.write;
    let output: Box<dyn Write> = if path.as_os_str() == "-" {
        Box::new(std::io::stdout())
    } else {
        Box::new(File::create(path).with_context(|| format!("cannot write {}", path.display()))?)
    };
    let mut writer = Writer::new(BufWriter::with_capacity(1 << 20, output))?;
    eprintln!("Recording; Ctrl-C ends it.");
    let result = capture.record(&mut writer, &stop);
    // Whatever has happened, nobody records on.
    capture.end();
    let result = result.and_then(|()| {
        capture.drain(&mut writer)?;
        capture.finish(&mut writer)
    });
    capture.sources.iter().for_each(Source::release);
    match result {
        // Whoever read it has had enough.
        Err(error) if is_broken_pipe(&error) => {}
        other => other?,
    }
    Ok(ExitCode::SUCCESS)
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
    /// Another one than an earlier capture's last.
    first_beat: u32,
}

impl Capture {
    /// Asks all processes and connections that are meant and were not asked yet.
    fn look_around(&mut self) -> anyhow::Result<()> {
        let found = self.args.targets.find()?;
        for process in &found.processes {
            let named = self.args.targets.names(process);
            let known = self.sources.iter().any(|source| source.pid == process.pid);
            let chosen = found.connections.iter().flat_map(chosen_ends);
            let ends: Vec<_> = chosen.filter(|end| end.pid == process.pid).collect();
            let inherited = !known && inherits(process, &self.sources)?;
            if known || !named && ends.is_empty() && !inherited {
                continue;
            }
            let page = process.live()?;
            if self.sources.is_empty() {
                refuse_a_second(
                    &page,
                    &format!("{}/{}", printable(&process.program), process.pid),
                )?;
            }
            page.header().tap_snaplen.store(self.args.snaplen, Ordering::Relaxed);
            page.header().tap_beat.store(self.first_beat, Ordering::Relaxed);
            if named {
                page.header().asked.fetch_or(ASKED_TAP, Ordering::SeqCst);
            }
            self.sources.push(Source::new(process, page, inherited));
        }
        for connection in &found.connections {
            let seen = |pid, number| self.chosen.contains(&(pid, number));
            let ends = chosen_ends(connection).collect::<Vec<_>>();
            // One end is enough; those who share it each record what they do.
            if connection.ends.iter().any(|end| {
                seen(end.pid, end.slot.number) && !ends.iter().any(|each| each.pid == end.pid)
            }) {
                continue;
            }
            for end in ends {
                let Some(source) = self.sources.iter_mut().find(|source| source.pid == end.pid)
                else {
                    continue;
                };
                if self.chosen.insert((end.pid, end.slot.number)) {
                    source.record(end, connection);
                }
            }
        }
        Ok(())
    }

    fn record<W: Write>(
        &mut self,
        writer: &mut Writer<W>,
        stop: &AtomicBool,
    ) -> anyhow::Result<()> {
        let began = Instant::now();
        let seconds = self.args.seconds.and_then(|limit| Duration::try_from_secs_f64(limit).ok());
        let mut beaten = Instant::now();
        loop {
            let found = self.drain(writer)?;
            let enough = self.args.packets.is_some_and(|limit| writer.packets >= limit)
                || seconds.is_some_and(|limit| began.elapsed() >= limit)
                || self.sources.iter().all(Source::is_gone);
            if enough || stop.load(Ordering::Relaxed) {
                return Ok(());
            }
            if beaten.elapsed() >= BEAT_EVERY {
                beaten = Instant::now();
                self.sources.iter().for_each(Source::beat);
                self.look_around()?;
                writer.flush()?;
            }
            if !found {
                std::thread::sleep(LOOK_EVERY);
            }
        }
    }

    /// Writes what was recorded meanwhile. False if nothing was.
    fn drain<W: Write>(&mut self, writer: &mut Writer<W>) -> anyhow::Result<bool> {
        let limit = self.args.packets.unwrap_or(u64::MAX);
        let mut found = false;
        for source in &mut self.sources {
            found |= source.drain(writer, limit)?;
        }
        Ok(found)
    }

    fn end(&mut self) {
        for source in &self.sources {
            source.end();
        }
    }

    fn finish<W: Write>(&mut self, writer: &mut Writer<W>) -> anyhow::Result<()> {
        let mut dropped = 0;
        for source in &self.sources {
            dropped += source.dropped();
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

/// A child by fork of a process that is recorded is asked by its parent.
fn inherits(process: &crate::processes::Process, sources: &[Source]) -> anyhow::Result<bool> {
    let Some(parent) = crate::processes::parent_of(process.pid) else { return Ok(false) };
    if !sources.iter().any(|source| source.pid == parent) {
        return Ok(false);
    }
    let page = process.live()?;
    let tapped = |slot: &crate::processes::Slot| {
        page.slot(slot.index).asked.load(Ordering::Relaxed) & ASKED_TAP != 0
    };
    Ok(page.header().asked.load(Ordering::Relaxed) & ASKED_TAP != 0
        || process.slots.iter().filter(|slot| slot.path != SLOT_FREE).any(tapped))
}

/// One capture at a time: its memory has one reader.
fn refuse_a_second(page: &LivePage, name: &str) -> anyhow::Result<()> {
    let beat = page.header().tap_beat.load(Ordering::Relaxed);
    if beat != 0 {
        let until = Instant::now() + OTHERS_BEAT;
        while Instant::now() < until {
            std::thread::sleep(LOOK_EVERY);
            let alive = page.header().tap_beat.load(Ordering::Relaxed) != beat;
            anyhow::ensure!(!alive, "{name} is being captured already");
        }
    }
    Ok(())
}

/// The row's words after a capture.
fn ended(asked: u32) -> u32 {
    if asked & ASKED_TAP == 0 { asked } else { asked & !ASKED_TAP | ASKED_TAP_END }
}
