//! One process that is recorded: its page, in which it is asked, and its memory, from which we read.

use std::collections::{HashMap, HashSet};
use std::io::Write;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use ringlet_core::tap::{
    CELL_COUNT, CELL_DATA_BYTES, Cell, DATAGRAM_MAX_BYTES, Found, PIECE_BY_KERNEL, PIECE_DATAGRAM,
    PIECE_LAST, PIECE_MAX_BYTES, PIECE_RECEIVED, Tap,
};
use ringlet_core::view::{ASKED_TAP, ASKED_TAP_END};

use super::packets::{Packet, Writer};
use crate::targets::{Connection, End};
use ringlet_programs::processes::{LivePage, LiveTap, Process, has_ended};
use ringlet_programs::table;

/// A cell that was claimed and is not written after so long has lost its writer.
pub const UNFINISHED: Duration = Duration::from_secs(1);
/// One process must not keep us from the others.
const CELLS_AT_A_TIME: u64 = CELL_COUNT;
/// Of so many connections it is noted what they are called.
const NOTES_MAX: usize = 1 << 16;

/// Whatever a process says of a piece, it fits in a packet.
fn most(flags: u32) -> usize {
    if flags & PIECE_DATAGRAM != 0 { DATAGRAM_MAX_BYTES } else { PIECE_MAX_BYTES }
}

pub struct Source {
    pub pid: u32,
    name: String,
    page: Arc<LivePage>,
    /// Made by the process when it first has something to record.
    tap: Option<LiveTap>,
    /// When it is looked for again.
    look: Instant,
    /// Why it is not looked for any more.
    pub problem: Option<String>,
    place: u64,
    dropped_before: u64,
    /// Since when the next cell is unfinished.
    stuck: Option<Instant>,
    lost: u64,
    /// The piece whose cells are being read, and how many bytes of it they hold.
    piece: Option<(Packet, usize)>,
    interface: Option<u32>,
    received: u64,
    /// What a connection is called in the file, and those of which that was written.
    notes: HashMap<u64, String>,
    noted: HashSet<u64>,
}

impl Source {
    /// `left`: what an earlier capture has left, which is not for us.
    pub fn new(process: &Process, page: Arc<LivePage>, left: Option<LiveTap>) -> Source {
        let tap = left;
        let (place, dropped_before) = tap
            .as_ref()
            .map_or((0, 0), |tap| (tap.tap().begin(), tap.tap().head().dropped.load(Relaxed)));
        Source {
            pid: process.pid,
            name: process.name(),
            page,
            tap,
            look: Instant::now(),
            problem: None,
            place,
            dropped_before,
            stuck: None,
            lost: 0,
            piece: None,
            interface: None,
            received: 0,
            notes: HashMap::new(),
            noted: HashSet::new(),
        }
    }

    /// Asks for a connection.
    pub fn record(&mut self, end: &End, connection: &Connection) {
        let others = connection.ends.iter().filter(|other| other.accepts != end.accepts);
        let others = table::some_of(others.map(End::name));
        let peer = if others.is_empty() { "unseen" } else { &others };
        let note = format!("ringlet: {} descriptor {}, peer {peer}", self.name, end.slot.fd);
        self.notes.insert(end.slot.number, note);
        let slot = self.page.slot(end.slot.index);
        if slot.number.load(SeqCst) == end.slot.number {
            let asked = |asked| Some(asked & !ASKED_TAP_END | ASKED_TAP);
            let _ = slot.asked.fetch_update(SeqCst, SeqCst, asked);
        }
    }

    /// Of connections that are over nothing need be known.
    pub fn keep_notes_of(&mut self, there: &HashSet<(u32, u64)>) {
        self.notes.retain(|number, _| there.contains(&(self.pid, *number)));
    }

    /// Does what is next wait for its writer?
    pub fn is_stuck(&self) -> bool {
        self.stuck.is_some()
    }

    pub fn is_gone(&self) -> bool {
        has_ended(self.pid)
    }

    /// Asks for no more: the process gives its memory back at its next call.
    pub fn end(&mut self) {
        self.look = Instant::now();
        let header = self.page.header();
        header.asked.fetch_and(!ASKED_TAP, SeqCst);
        for index in self.page.used() {
            let asked = &self.page.slot(index).asked;
            let _ = asked.fetch_update(SeqCst, SeqCst, |asked| Some(super::ended(asked)));
        }
        header.tap_beat.store(0, SeqCst);
    }

    /// Nothing is read any more: the memory's pages go now, whenever the process gives it back.
    pub fn release(&self) {
        if let Some(tap) = &self.tap {
            tap.empty();
        }
    }

    pub fn dropped(&self) -> u64 {
        let dropped = self.tap.as_ref().map_or(0, |tap| tap.tap().head().dropped.load(Relaxed));
        dropped.saturating_sub(self.dropped_before).saturating_add(self.lost)
    }

    pub fn write_statistics<W: Write>(&self, writer: &mut Writer<W>) -> anyhow::Result<()> {
        match self.interface {
            Some(interface) => writer.statistics(interface, self.received, self.dropped()),
            None => Ok(()),
        }
    }

    /// Is its memory to be looked for?
    pub fn is_due(&self) -> bool {
        self.tap.is_none() && self.problem.is_none() && Instant::now() >= self.look
    }

    /// What was found; it is to be looked for again after this time.
    pub fn note(&mut self, found: anyhow::Result<Option<LiveTap>>, pause: Duration) {
        match found {
            Ok(tap) => self.tap = tap,
            Err(error) => self.problem = Some(format!("{}: {error:#}", self.name)),
        }
        self.look = Instant::now() + pause;
    }

    /// Writes what the process has recorded. False if that was nothing.
    pub fn drain<W: Write>(&mut self, writer: &mut Writer<W>, limit: u64) -> anyhow::Result<bool> {
        let Some(tap) = self.tap.as_ref().map(LiveTap::tap) else { return Ok(false) };
        let first = self.place;
        while self.place.wrapping_sub(first) < CELLS_AT_A_TIME && writer.packets < limit {
            match tap.look(self.place) {
                Found::Nothing => break,
                Found::Unfinished => {
                    let stuck = self.stuck.get_or_insert_with(Instant::now).elapsed();
                    if stuck >= UNFINISHED || self.is_gone() {
                        // Its writer may finish right now: the next look tells whether it is lost.
                        tap.retire(self.place);
                    }
                    break;
                }
                Found::Lost => self.lost = self.lost.saturating_add(1),
                Found::Astray => {
                    let now = tap.begin();
                    self.lost = self.lost.saturating_add(now.wrapping_sub(self.place));
                    self.place = now;
                    break;
                }
                Found::Piece(cell) => self.take(tap, cell, writer)?,
            }
            self.stuck = None;
            self.place = self.place.wrapping_add(1);
            tap.give_back(self.place);
        }
        Ok(self.place != first)
    }

    /// Adds a cell to its piece, and writes the piece if it is whole.
    fn take<W: Write>(
        &mut self,
        tap: Tap,
        cell: &Cell,
        writer: &mut Writer<W>,
    ) -> anyhow::Result<()> {
        let mut bytes = [0; CELL_DATA_BYTES];
        tap.read(self.place, &mut bytes);
        let at = cell.at.load(Relaxed) as usize;
        if at == 0 {
            let packet = self.packet(cell);
            let kept = (cell.kept.load(Relaxed) as usize).min(packet.len);
            self.piece = Some((packet, kept));
        }
        let Some((piece, kept)) = self.piece.as_mut().filter(|(piece, _)| piece.bytes.len() == at)
        else {
            // Its beginning was lost.
            return Ok(());
        };
        let n = (*kept - at).min(CELL_DATA_BYTES);
        piece.bytes.extend_from_slice(&bytes[..n]);
        if at + n < *kept {
            return Ok(());
        }
        let Some((piece, _)) = self.piece.take() else { return Ok(()) };
        let interface = match self.interface {
            Some(interface) => interface,
            None => *self.interface.insert(writer.interface(&self.name)?),
        };
        self.received += 1;
        writer.packet(interface, &piece)
    }

    fn packet(&mut self, cell: &Cell) -> Packet {
        let flags = cell.flags.load(Relaxed);
        let ports = cell.ports.load(Relaxed);
        let number = cell.connection.load(Relaxed);
        let fd = cell.fd.load(Relaxed);
        let ip = |halves: &[std::sync::atomic::AtomicU64; 2]| {
            let mut bytes = [0; 16];
            for (half, chunk) in halves.iter().zip(bytes.chunks_exact_mut(8)) {
                chunk.copy_from_slice(&half.load(Relaxed).to_ne_bytes());
            }
            IpAddr::from(Ipv6Addr::from(bytes)).to_canonical()
        };
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
        let is_new = self.noted.len() < NOTES_MAX && self.noted.insert(number);
        Packet {
            time_ns: cell.time_ns.load(Relaxed).min(now as u64),
            local: SocketAddr::new(ip(&cell.local), (ports >> 16) as u16),
            remote: SocketAddr::new(ip(&cell.remote), ports as u16),
            received: flags & PIECE_RECEIVED != 0,
            by_kernel: flags & PIECE_BY_KERNEL != 0,
            last: flags & PIECE_LAST != 0,
            before: cell.before.load(Relaxed),
            other: cell.other.load(Relaxed),
            datagram: flags & PIECE_DATAGRAM != 0,
            len: (cell.len.load(Relaxed) as usize).min(most(flags)),
            number,
            note: is_new.then(|| {
                let plain = || format!("ringlet: {} descriptor {fd}", self.name);
                self.notes.remove(&number).unwrap_or_else(plain)
            }),
            bytes: Vec::new(),
        }
    }
}
