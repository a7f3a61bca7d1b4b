//! What lies where in a disk's regions.

use std::net::SocketAddr;

use anyhow::ensure;
use ringlet_core::sync::Ordering;
use ringlet_reflect::{PAGE_BYTES, Receiver, Status, Transmitter};

use crate::file::Extent;

/// At a time.
pub const READERS: usize = 32;
/// Requests of a reader's at a time, and the most bytes of one.
pub const SLOTS: usize = 16;
pub const SLOT_BYTES: usize = 256 << 10;
pub const NAME_MOST: usize = 64;
/// Of hosts.
const HOST_MOST: usize = 128;

/// The first bits of the keys of all disks' regions.
const PREFIX: u64 = 0xd15c;
const MAGIC: u64 = u64::from_le_bytes(*b"ringdsk1");

/// A region of a disk's, by its number in the key.
#[derive(Clone, Copy)]
pub enum Part {
    /// What the disk is, and who was let in; also the key of its locks, of which the first one is the server's, and each other one a reader's.
    Announcement,
    /// Of all readers: a page of numbers, and a page for each reader.
    Requests,
    /// Of one reader: what it writes to the disk, and what it reads from it, behind a page of answers.
    Written(usize),
    Read(usize),
}

impl Part {
    pub fn key(self, disk: &str) -> u64 {
        let number = match self {
            Part::Announcement => 0,
            Part::Requests => 1,
            Part::Written(reader) => 2 + reader,
            Part::Read(reader) => 2 + READERS + reader,
        };
        // (FNV-1a: names that have the same are told apart by the announcement.)
        let hash = disk.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
        });
        PREFIX << 48 | ((hash ^ hash >> 36) & 0xf_ffff_ffff) << 12 | number as u64
    }

    pub fn is_announcement(key: u64) -> bool {
        key >> 48 == PREFIX && key & 0xfff == 0
    }

    pub fn bytes(self) -> usize {
        match self {
            Part::Announcement => PAGE_BYTES,
            Part::Requests => PAGE_BYTES * (1 + READERS),
            Part::Written(_) => SLOTS * SLOT_BYTES,
            Part::Read(_) => PAGE_BYTES + SLOTS * SLOT_BYTES,
        }
    }

    /// Only the announcement is the same for who comes late: whoever uses the rest has begun before anything is written there.
    pub fn is_coherent(self) -> bool {
        matches!(self, Part::Announcement)
    }

    /// Who may use the disk, as `mode` has it, writes what the server reads and reads what it writes, and no more. (They trust each other.)
    pub fn mode(self, mode: u32) -> u32 {
        let others = match self {
            Part::Announcement | Part::Read(_) => 0o044,
            Part::Requests | Part::Written(_) => 0o022,
        };
        0o600 | mode & others
    }
}

/// How far up numbers of requests go: an answer has one, and an error.
const NUMBERS: u64 = 1 << 48;

/// A number to begin with, which nobody has used there before. Never 0.
pub fn random() -> u64 {
    let mut bytes = [0; 8];
    // (It fails for no reason but a kernel without it, and then is the time's.)
    if rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty()).is_err() {
        bytes = ringlet_linux::sys::now_ns().to_ne_bytes();
    }
    next(u64::from_ne_bytes(bytes))
}

/// The number behind this one.
pub fn next(number: u64) -> u64 {
    number % (NUMBERS - 1) + 1
}

/// An answer: to which number, and the error, or 0.
pub fn answer(number: u64, done: Result<(), i32>) -> u64 {
    number << 16 | u64::from(done.err().map_or(0, |errno| errno as u16))
}

/// The answer that all that was to be read are zeros, none of which were sent. (No error of the kernel's has that number.)
pub fn answer_of_zeros(number: u64) -> u64 {
    number << 16 | u64::from(ZEROS)
}

const ZEROS: u16 = u16::MAX;

pub fn is_of_zeros(word: u64) -> bool {
    word as u16 == ZEROS
}

/// What is said to this number, if it is.
pub fn answered(word: u64, number: u64) -> Option<Result<(), i32>> {
    (word >> 16 == number).then_some(match word as u16 {
        0 | ZEROS => Ok(()),
        errno => Err(i32::from(errno)),
    })
}

/// Where a reader's slot has its number: all in one page, on which the server sleeps.
pub fn number_at(reader: usize, slot: usize) -> usize {
    (reader * SLOTS + slot) * size_of::<u64>()
}

/// And what is asked for.
fn request_at(reader: usize, slot: usize) -> usize {
    PAGE_BYTES * (1 + reader) + slot * 64
}

/// On which host the reader is.
fn host_at(reader: usize) -> usize {
    PAGE_BYTES * (1 + reader) + PAGE_BYTES / 2
}

/// Where a reader's slot has its answer: all in one page, on which the reader sleeps.
pub fn answer_at(slot: usize) -> usize {
    slot * size_of::<u64>()
}

/// The bytes of a slot, of what is written and of what is read.
pub fn written_at(slot: usize) -> usize {
    slot * SLOT_BYTES
}

pub fn read_at(slot: usize) -> usize {
    PAGE_BYTES + slot * SLOT_BYTES
}

/// Who was let in.
pub fn granted_at(reader: usize) -> usize {
    PAGE_BYTES / 2 + reader * size_of::<u64>()
}

fn put_text(to: &Transmitter, at: usize, text: &str, most: usize) -> Result<(), Status> {
    let mut bytes = text.as_bytes().to_vec();
    if bytes.len() > most {
        return Err(Status::BadParameter);
    }
    bytes.resize(most, 0);
    to.put(at, &bytes)
}

fn text(from: &Receiver, at: usize, most: usize) -> Option<String> {
    let mut bytes = vec![0; most];
    from.get(at, &mut bytes).ok()?;
    let length = bytes.iter().position(|byte| *byte == 0).unwrap_or(most);
    Some(str::from_utf8(&bytes[..length]).ok()?.to_owned())
}

#[inline]
pub fn load(region: &Receiver, at: usize) -> u64 {
    // ORDER: Acquire, pairs with Release in `publish`: what was written before the word is seen with it.
    region.words()[at / size_of::<u64>()].load(Ordering::Acquire)
}

/// Writes a word behind all that was written before; who sleeps is not told.
pub fn write(region: &Transmitter, at: usize, word: u64) -> Result<(), Status> {
    // ORDER: Release, pairs with Acquire in `load`. (`put` stores a word whole.)
    std::sync::atomic::fence(Ordering::Release);
    region.put(at, &word.to_ne_bytes())
}

/// The same, and wakes who waits for it.
pub fn publish(region: &Transmitter, at: usize, word: u64) -> Result<(), Status> {
    write(region, at, word)?;
    region.notify(at, size_of::<u64>())
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Op {
    /// Asks to be let in.
    Hello,
    Read,
    Write,
    Flush,
    Trim,
    Zero,
    /// Which of these bytes are held, and which are holes.
    Extents,
}

const OPS: [Op; 7] = [Op::Hello, Op::Read, Op::Write, Op::Flush, Op::Trim, Op::Zero, Op::Extents];

pub fn op_of(number: u32) -> Option<Op> {
    OPS.get(number as usize).copied()
}

impl Op {
    /// Has it no bytes but those of a slot?
    pub fn is_of_slot(self) -> bool {
        matches!(self, Op::Read | Op::Write)
    }

    /// Does it change what is on the disk?
    pub fn changes(self) -> bool {
        matches!(self, Op::Write | Op::Trim | Op::Zero)
    }
}

/// What is written is on the disk before the answer; zeros may be holes; zeros only if that is fast; what is read and a hole need not be sent.
pub const DURABLE: u32 = 1;
pub const MAY_TRIM: u32 = 2;
pub const FAST: u32 = 4;
pub const SPARSE: u32 = 8;

/// Extents of an answer, which lie where bytes that are read do: how many, and then of each a word.
pub const EXTENTS_MOST: usize = 4096;

pub fn extents_bytes(extents: &[Extent]) -> Vec<u8> {
    let words = extents.iter().map(|extent| extent.length << 1 | u64::from(extent.is_hole));
    let words = std::iter::once(extents.len() as u64).chain(words);
    words.flat_map(u64::to_ne_bytes).collect()
}

/// From words, of these bytes at most. `None` if that is none of a disk's extents.
pub fn extents(word: impl Fn(usize) -> u64, bytes: u64) -> Option<Vec<Extent>> {
    let count = usize::try_from(word(0)).ok()?;
    if !(1..=EXTENTS_MOST).contains(&count) {
        return None;
    }
    let mut left = bytes;
    let extent = |number| {
        let word = word(1 + number);
        let extent = Extent { length: word >> 1, is_hole: word & 1 != 0 };
        left = left.checked_sub(extent.length)?;
        (extent.length > 0).then_some(extent)
    };
    (0..count).map(extent).collect()
}

/// As it was copied: nothing of it is true until it is checked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Request {
    pub op: Op,
    pub flags: u32,
    pub offset: u64,
    pub length: u64,
    /// Streams up to that number have ended (`direct`): what was asked for by them is done before this is.
    pub over: u64,
}

impl Request {
    /// Asks to be let in, in the first slot: by the answer's number in the announcement.
    pub fn hello(to: &Transmitter, reader: usize, host: &str, number: u64) -> Result<(), Status> {
        put_text(to, host_at(reader), host, HOST_MOST)?;
        let hello = Request { op: Op::Hello, flags: 0, offset: 0, length: 0, over: 0 };
        hello.write(to, reader, 0)?;
        publish(to, number_at(reader, 0), number)
    }

    pub fn write(&self, to: &Transmitter, reader: usize, slot: usize) -> Result<(), Status> {
        let what = self.op as u64 | u64::from(self.flags) << 32;
        let words = [what, self.offset, self.length, self.over];
        let mut bytes = [0; 32];
        for (to, word) in bytes.chunks_exact_mut(8).zip(words) {
            to.copy_from_slice(&word.to_ne_bytes());
        }
        to.put(request_at(reader, slot), &bytes)
    }

    /// None if there is no such operation.
    pub fn read(from: &Receiver, reader: usize, slot: usize) -> Option<Request> {
        let at = request_at(reader, slot);
        let [what, offset, length, over] = [0, 8, 16, 24].map(|word| load(from, at + word));
        let op = op_of(what as u32)?;
        Some(Request { op, flags: (what >> 32) as u32, offset, length, over })
    }
}

/// What a disk is, as its server announces it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Facts {
    pub name: String,
    pub bytes: u64,
    pub read_only: bool,
    /// Which run of the host's kernel it is: what was written, and not flushed, is lost with it.
    pub boot: u64,
    /// On which it is.
    pub host: String,
    /// Which file: device, and number there, with when it was made.
    pub file: [u64; 2],
    /// Which medium a device has had in this run of the kernel.
    pub sequence: u64,
    pub offer: Option<Offer>,
}

/// Where a server takes streams (`direct`), and what is said there: by who connects, and by the server to him. (When that has gone, its port may be
/// anybody's.)
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Offer {
    pub address: SocketAddr,
    pub token: [u64; 2],
    pub welcome: [u64; 2],
}

const GENERATION: usize = 8;
const NAME: usize = 56;
const HOST: usize = NAME + NAME_MOST;
/// Another number since something that was written is found not to be on the disk. (No server takes it back.)
pub const LOST: usize = HOST + HOST_MOST;
const SEQUENCE: usize = LOST + 8;
/// Token and welcome, and behind them an address; of a server that takes no streams none.
const OFFER: usize = PAGE_BYTES / 2 + READERS * 8;
const ADDRESS_MOST: usize = 64;

impl Facts {
    /// Behind it all can be used: `generation` is a number of this run of the server's.
    pub fn announce(&self, to: &Transmitter, generation: u64) -> Result<(), Status> {
        publish(to, GENERATION, 0)?;
        let words = [self.bytes, u64::from(self.read_only), self.boot, self.file[0], self.file[1]];
        publish(to, 0, MAGIC)?;
        for (word, at) in words.iter().zip((GENERATION + 8..).step_by(8)) {
            publish(to, at, *word)?;
        }
        put_text(to, NAME, &self.name, NAME_MOST)?;
        put_text(to, HOST, &self.host, HOST_MOST)?;
        publish(to, SEQUENCE, self.sequence)?;
        let address = self.offer.as_ref().map(|offer| offer.address.to_string());
        put_text(to, OFFER + 32, &address.unwrap_or_default(), ADDRESS_MOST)?;
        let said = self.offer.as_ref().map_or([[0; 2]; 2], |offer| [offer.token, offer.welcome]);
        for (word, at) in said.as_flattened().iter().zip((OFFER..).step_by(8)) {
            publish(to, at, *word)?;
        }
        publish(to, GENERATION, generation)
    }

    /// With the number of the server's run. None if nothing is announced there.
    pub fn read(from: &Receiver) -> Option<(Facts, u64)> {
        let generation = generation(from);
        let [magic, _, bytes, read_only, boot, device, inode] =
            std::array::from_fn(|word| load(from, word * 8));
        let (name, host) = (text(from, NAME, NAME_MOST)?, text(from, HOST, HOST_MOST)?);
        let [token, welcome] = [OFFER, OFFER + 16].map(|at| [load(from, at), load(from, at + 8)]);
        let address = text(from, OFFER + 32, ADDRESS_MOST).and_then(|text| text.parse().ok());
        let offer = address.map(|address| Offer { address, token, welcome });
        let is_whole = magic == MAGIC && generation != 0 && self::generation(from) == generation;
        let (file, sequence) = ([device, inode], load(from, SEQUENCE));
        let read_only = read_only != 0;
        let facts = Facts { name, bytes, read_only, boot, host, file, sequence, offer };
        (is_whole && check_name(&facts.name).is_ok()).then_some((facts, generation))
    }
}

/// The host of who may read this reader's regions, as it says.
pub fn host_of(from: &Receiver, reader: usize) -> Option<String> {
    text(from, host_at(reader), HOST_MOST)
}

pub fn generation(from: &Receiver) -> u64 {
    load(from, GENERATION)
}

pub fn check_name(name: &str) -> anyhow::Result<()> {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    ensure!(
        (1..=NAME_MOST).contains(&name.len()) && name.bytes().all(is_plain),
        "a disk's name has 1 to {NAME_MOST} letters, digits, dots, dashes and underscores"
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_of_one_disk_and_part() {
        let parts = [Part::Announcement, Part::Requests]
            .into_iter()
            .chain((0..READERS).flat_map(|reader| [Part::Written(reader), Part::Read(reader)]));
        let keys: Vec<u64> =
            parts.flat_map(|part| ["a", "b", "ab", "ba"].map(|name| part.key(name))).collect();
        let mut sorted = keys.clone();
        sorted.sort_unstable();
        sorted.dedup();
        assert_eq!(sorted.len(), keys.len());
        assert!(keys.iter().all(|key| key >> 48 == PREFIX));
        assert!(Part::is_announcement(Part::Announcement.key("x")));
        assert!(!Part::is_announcement(Part::Requests.key("x")));
    }

    #[test]
    fn numbers_go_round_without_nothing() {
        for number in [0, 1, NUMBERS - 2, NUMBERS - 1, NUMBERS, u64::MAX] {
            let behind = next(number);
            assert!((1..NUMBERS).contains(&behind), "{number} {behind}");
            assert_ne!(behind, number);
            assert_eq!(answered(answer(behind, Err(5)), behind), Some(Err(5)));
            assert_eq!(answered(answer(behind, Ok(())), next(behind)), None);
            let zeros = answer_of_zeros(behind);
            assert_eq!(answered(zeros, behind), Some(Ok(())));
            assert!(is_of_zeros(zeros) && !is_of_zeros(answer(behind, Ok(()))));
        }
    }

    #[test]
    fn places_do_not_overlap() {
        assert!(number_at(READERS - 1, SLOTS - 1) + 8 <= PAGE_BYTES);
        assert!(request_at(READERS - 1, SLOTS - 1) + 32 <= Part::Requests.bytes());
        assert!(request_at(0, SLOTS - 1) + 32 <= request_at(1, 0));
        assert!(
            SEQUENCE + 8 <= granted_at(0)
                && LOST.is_multiple_of(8)
                && granted_at(READERS - 1) + 8 <= PAGE_BYTES
        );
        assert_eq!(read_at(SLOTS), Part::Read(0).bytes());
        assert_eq!(OFFER, granted_at(READERS));
        assert!(OFFER + 32 + ADDRESS_MOST <= Part::Announcement.bytes());
        assert!((1 + EXTENTS_MOST) * size_of::<u64>() <= SLOT_BYTES);
        assert!(request_at(0, SLOTS - 1) + 32 <= host_at(0));
        assert!(host_at(0) + HOST_MOST <= request_at(1, 0));
        assert!(answer_at(SLOTS - 1) + 8 <= read_at(0));
        assert_eq!(written_at(SLOTS), Part::Written(0).bytes());
    }
}
