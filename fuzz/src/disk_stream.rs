//! Who connects to a disk's server (`ringlet disk serve --direct`) as one of its readers, says what he likes, and leaves when he likes. What must hold: what is
//! asked as it ought to be is answered as a plain model has it; all else is refused, or ends the connection; and another reader finds the disk as the
//! model has it.

use std::cell::RefCell;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::sync::mpsc::channel;
use std::time::Duration;

use ringlet_disk::{Options, Reader, Said};
use ringlet_reflect::keeper::{self, keep};
use ringlet_reflect::{Host, VARIABLE};

const BYTES: usize = (300 << 10) + 77;
const SLOT: u64 = 256 << 10;
const SLOTS: u64 = 16;
const LIMIT: Duration = Duration::from_secs(60);
const READ: u64 = 1;
const WRITE: u64 = 2;
const FLUSH: u64 = 3;
const TRIM: u64 = 4;
const ZERO: u64 = 5;
const EXTENTS: u64 = 6;
const DURABLE: u64 = 1;
const ZEROS: u64 = 0xffff;

struct Stage {
    liar: Reader,
    other: Reader,
    model: Vec<u8>,
}

thread_local! {
    static STAGE: RefCell<Option<Stage>> = const { RefCell::new(None) };
}

struct Script<'a>(&'a [u8]);

impl<'a> Script<'a> {
    fn number(&mut self, bytes: usize) -> u64 {
        let (first, rest) = self.0.split_at(bytes.min(self.0.len()));
        self.0 = rest;
        first.iter().fold(0, |number, &byte| number << 8 | u64::from(byte))
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.number(1) % limit
    }

    fn of(&mut self, all: &[u64]) -> u64 {
        all[self.below(all.len() as u64) as usize]
    }
}

/// Others who share the process's environment are none: each process has one stage.
fn begin() -> Stage {
    let folder = std::env::temp_dir().join(format!("ringlet-stream-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).unwrap();
    let (place, disk) = (folder.join("r"), folder.join("disk"));
    std::fs::write(&disk, vec![0; BYTES]).unwrap();
    // SAFETY: no other thread looks for it yet.
    unsafe { std::env::set_var(VARIABLE, &place) };
    let (ready, is_ready) = channel();
    let kept = ready.clone();
    std::thread::spawn(move || {
        let options =
            keeper::Options { path: Some(&place), stays: true, ..keeper::Options::default() };
        keep(&options, || kept.send(()).unwrap()).unwrap();
    });
    is_ready.recv().unwrap();
    std::thread::spawn(move || {
        let direct = Some((Ipv4Addr::LOCALHOST, 0).into());
        let options = Options { name: "fuzz", path: &disk, read_only: false, mode: 0o600, direct };
        let say = |said| {
            if matches!(said, Said::Ready) {
                let _ = ready.send(());
            }
        };
        ringlet_disk::serve(&options, || Ok(Host::find()?), say).unwrap();
    });
    is_ready.recv().unwrap();
    let open = || Reader::open("fuzz", None, LIMIT).unwrap();
    Stage { liar: open(), other: open(), model: vec![0; BYTES] }
}

fn words(of: &[u64]) -> Vec<u8> {
    of.iter().flat_map(|word| word.to_le_bytes()).collect()
}

fn word(stream: &mut TcpStream) -> Option<u64> {
    let mut bytes = [0; 8];
    stream.read_exact(&mut bytes).ok()?;
    Some(u64::from_le_bytes(bytes))
}

impl Stage {
    /// How many requests were answered as they ought to be.
    fn play(&mut self, mut script: Script) -> usize {
        let mut done = 0;
        while !script.0.is_empty() {
            done += self.connect(&mut script);
        }
        let mut all = vec![0; BYTES];
        self.other.read(0, &mut all).unwrap();
        assert!(all == self.model, "another reader reads other bytes");
        done
    }

    /// One connection.
    fn connect(&mut self, script: &mut Script) -> usize {
        let (address, mut hello) = self.liar.stream_hello().unwrap();
        let mut stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        let is_wrong = script.below(8) == 0;
        if is_wrong {
            // (Not in its last word: a later stream's number is as good.)
            let (at, bit) = (script.below(40) as usize, script.below(8));
            hello[at] ^= 1 << bit;
        }
        let most = if script.below(16) == 0 { script.below(48) as usize } else { hello.len() };
        stream.write_all(&hello[..most]).unwrap();
        if most < hello.len() {
            return 0;
        }
        let welcome = word(&mut stream).and_then(|_| word(&mut stream));
        assert_eq!(welcome.is_some(), !is_wrong, "who is let in");
        let (mut done, mut number) = (0, script.number(2) + 1);
        while welcome.is_some() && !script.0.is_empty() {
            number += 1;
            match self.ask(&mut stream, number, script) {
                Some(is_right) => done += usize::from(is_right),
                None => break,
            }
        }
        done
    }

    /// Whether it was answered as it ought to be; `None` where that ends the connection.
    fn ask(&mut self, stream: &mut TcpStream, number: u64, script: &mut Script) -> Option<bool> {
        let op =
            script.of(&[READ, READ, READ, WRITE, WRITE, FLUSH, TRIM, ZERO, EXTENTS, 0, 7, 255]);
        let slot = script.of(&[0, 1, 15, 3, 4, 5, 16, 200]);
        let most = BYTES as u64;
        let offset = match script.below(8) {
            0 => script.of(&[most, most + 1, 1 << 32, 1 << 63, u64::MAX]),
            _ => script.number(3) % most,
        };
        let length = match script.below(8) {
            0 => script.of(&[0, SLOT, SLOT + 1, 1 << 32, 1 << 63, u64::MAX]),
            1 => most.saturating_sub(offset),
            2..5 => script.number(1),
            _ => script.number(3) % (280 << 10),
        };
        let flags = script.of(&[0, 0, DURABLE, 8, 6, 0xffff_fff0]);
        stream.write_all(&words(&[op | slot << 8 | flags << 32, number, offset, length])).ok()?;
        let is_known = op <= EXTENTS && slot < SLOTS;
        if !is_known || op == WRITE && length > SLOT {
            assert_eq!(word(stream), None, "op {op}, slot {slot}, {length}: it goes on");
            return None;
        }
        let fills = script.number(1) as u8;
        let payload = if op == WRITE { length as usize } else { 0 };
        if payload > 1 && script.below(16) == 0 {
            // (It leaves in the middle.)
            stream.write_all(&vec![fills; payload - 1]).ok()?;
            return None;
        }
        stream.write_all(&vec![fills; payload]).ok()?;
        let (said, what) = (word(stream).unwrap(), word(stream).unwrap());
        assert_eq!((said >> 16, what & 0xff), (number, slot), "another one's answer");
        let (error, mut bytes) = (said & 0xffff, vec![0; (what >> 8) as usize]);
        stream.read_exact(&mut bytes).unwrap();
        let is_inside = offset.checked_add(length).is_some_and(|end| end <= most);
        let is_right =
            op != 0 && is_inside && (op != READ || length <= SLOT) && (op != EXTENTS || length > 0);
        if !is_right {
            assert!(error != 0 && error != ZEROS && bytes.is_empty(), "op {op}: {error}");
            return Some(false);
        }
        let range = offset as usize..(offset + length) as usize;
        match (op, error) {
            (READ, 0) => assert!(bytes == self.model[range], "other bytes"),
            (READ, ZEROS) if flags & 8 != 0 => {
                assert!(bytes.is_empty() && self.model[range].iter().all(|byte| *byte == 0));
            }
            (WRITE, 0) => self.model[range].fill(fills),
            // (Where it would be slow.)
            (ZERO, 95) if flags & 4 != 0 => {}
            (TRIM | ZERO, 0) => self.model[range].fill(0),
            (FLUSH, 0) => {}
            (EXTENTS, 0) => {
                let words: Vec<_> = bytes.chunks_exact(8).collect();
                let word = |at: usize| u64::from_ne_bytes(words[at].try_into().unwrap());
                assert_eq!(word(0), words.len() as u64 - 1);
                let all: u64 = (1..words.len()).map(|at| word(at) >> 1).sum();
                assert!((1..=length).contains(&all));
            }
            _ => panic!("op {op}, flags {flags}, {length} at {offset}: {error}"),
        }
        assert!(bytes.is_empty() || op == READ || op == EXTENTS);
        Some(true)
    }
}

pub fn run(script: &[u8]) -> usize {
    STAGE.with_borrow_mut(|stage| stage.get_or_insert_with(begin).play(Script(script)))
}
