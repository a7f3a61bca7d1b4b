//! A client of `ringlet disk attach`'s NBD server that agrees on what it likes, asks for what it likes, and leaves when it likes. What must hold: what is
//! asked as it ought to be is answered as a plain model has it, in the way that was agreed on; all else is refused, or ends the connection; and another
//! client finds the disk as the model has it.

use std::cell::RefCell;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::mpsc::channel;
use std::time::Duration;

use ringlet_disk::{Options, Reader, Said};
use ringlet_reflect::keeper::{self, keep};
use ringlet_reflect::{Host, VARIABLE};

const BYTES: usize = (600 << 10) + 123;
const SLOT: usize = 256 << 10;
const LIMIT: Duration = Duration::from_secs(60);
const READ: u16 = 0;
const WRITE: u16 = 1;
const FLUSH: u16 = 3;
const TRIM: u16 = 4;
const ZERO: u16 = 6;
const STATUS: u16 = 7;
const FAST: u16 = 16;
const PAYLOAD: u16 = 32;
const CONTEXT: &[u8] = b"\0\0\0\0\0\0\0\x01\0\0\0\x0fbase:allocation";

struct Stage {
    socket: PathBuf,
    model: Vec<u8>,
}

thread_local! {
    static STAGE: RefCell<Option<Stage>> = const { RefCell::new(None) };
}

struct Script<'a>(&'a [u8]);

impl<'a> Script<'a> {
    fn bytes(&mut self, len: usize) -> &'a [u8] {
        let (first, rest) = self.0.split_at(len.min(self.0.len()));
        self.0 = rest;
        first
    }

    fn number(&mut self, bytes: usize) -> u64 {
        self.bytes(bytes).iter().fold(0, |number, &byte| number << 8 | u64::from(byte))
    }

    fn below(&mut self, limit: usize) -> usize {
        self.number(1) as usize % limit
    }

    fn of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.below(all.len())]
    }
}

/// Others who share the process's environment are none: each process has one stage.
fn begin() -> Stage {
    let folder = std::env::temp_dir().join(format!("ringlet-nbd-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).unwrap();
    let (place, disk, socket) = (folder.join("r"), folder.join("disk"), folder.join("nbd"));
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
        let options =
            Options { name: "fuzz", path: &disk, read_only: false, mode: 0o600, direct: None };
        let say = |said| {
            if matches!(said, Said::Ready) {
                let _ = ready.send(());
            }
        };
        ringlet_disk::serve(&options, || Ok(Host::find()?), say).unwrap();
    });
    is_ready.recv().unwrap();
    let reader = Reader::open("fuzz", None, LIMIT).unwrap();
    let listener = UnixListener::bind(&socket).unwrap();
    std::thread::spawn(move || ringlet_nbd::serve(&listener, reader, &|_| ()));
    Stage { socket, model: vec![0; BYTES] }
}

/// A connection, and what was agreed on there.
struct Client {
    stream: UnixStream,
    structured: bool,
    extended: bool,
    allocation: bool,
    /// What it said first is no client's.
    is_odd: bool,
}

/// What became of a request.
#[derive(PartialEq, Eq)]
enum Asked {
    Right,
    Refused,
    /// The connection is over, as it has to be, or as the client wants it.
    Over,
}

/// The server has ended it.
struct Ended;

impl From<std::io::Error> for Ended {
    fn from(error: std::io::Error) -> Ended {
        let ends = [ErrorKind::UnexpectedEof, ErrorKind::ConnectionReset, ErrorKind::BrokenPipe];
        assert!(ends.contains(&error.kind()), "{error}");
        Ended
    }
}

impl Client {
    fn new(socket: &PathBuf) -> Client {
        let mut stream = UnixStream::connect(socket).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        let mut greeting = [0; 18];
        stream.read_exact(&mut greeting).unwrap();
        assert_eq!(&greeting[..], b"NBDMAGICIHAVEOPT\0\x03");
        Client { stream, structured: false, extended: false, allocation: false, is_odd: false }
    }

    fn get<const N: usize>(&mut self) -> Result<[u8; N], Ended> {
        let mut bytes = [0; N];
        self.stream.read_exact(&mut bytes)?;
        Ok(bytes)
    }

    fn number<const N: usize>(&mut self) -> Result<u64, Ended> {
        Ok(self.get::<N>()?.iter().fold(0, |number, byte| number << 8 | u64::from(*byte)))
    }

    /// The last reply to it; `contexts`: how many came before.
    fn option(&mut self, option: u32, data: &[u8]) -> Result<(u32, usize), Ended> {
        let head = [&b"IHAVEOPT"[..], &option.to_be_bytes(), &(data.len() as u32).to_be_bytes()];
        self.stream.write_all(&[&head.concat(), data].concat())?;
        let mut contexts = 0;
        loop {
            assert_eq!(self.number::<8>()?, 0x0003_e889_0455_65a9);
            assert_eq!(self.number::<4>()?, u64::from(option));
            let (kind, length) = (self.number::<4>()? as u32, self.number::<4>()?);
            assert!(length < 8192);
            self.stream.read_exact(&mut vec![0; length as usize])?;
            contexts += usize::from(kind == 4);
            if kind == 1 || kind >> 31 == 1 {
                return Ok((kind, contexts));
            }
        }
    }

    fn agree(&mut self, script: &mut Script) -> Result<(), Ended> {
        let flags = if script.below(16) == 0 { script.number(4) as u32 } else { 3 };
        self.is_odd = flags & !3 != 0;
        self.stream.write_all(&flags.to_be_bytes())?;
        for _ in 0..script.below(6) {
            let chunks = self.structured || self.extended;
            match script.below(8) {
                0 | 1 => {
                    assert_eq!(self.option(8, &[])?.0, 1);
                    self.structured = true;
                }
                2 => {
                    assert_eq!(self.option(11, &[])?.0, 1);
                    self.extended = true;
                }
                3 | 4 => {
                    let (kind, contexts) = self.option(10, CONTEXT)?;
                    assert_eq!((kind == 1, contexts), (chunks, usize::from(chunks)));
                    self.allocation = chunks;
                }
                5 => {
                    let length = script.below(CONTEXT.len());
                    assert!(self.option(script.of(&[9, 10]), &CONTEXT[..length])?.0 >> 31 == 1);
                    // (If it was the one that sets.)
                    self.allocation = false;
                    let (kind, _) = self.option(10, CONTEXT)?;
                    self.allocation = kind == 1;
                    assert_eq!(self.allocation, chunks);
                }
                6 => assert_eq!(self.option(6, &[0; 6])?.0, 1),
                _ => {
                    // (None that begins, or ends, all.)
                    let option = script.of(&[0, 3, 4, 5, 6, 8, 9, 11, 12, 1 << 31]);
                    let length = script.below(64);
                    let data = script.bytes(length);
                    let (kind, _) = self.option(option, data)?;
                    if kind == 1 && data.is_empty() {
                        self.structured |= option == 8;
                        self.extended |= option == 11;
                    }
                }
            }
        }
        assert_eq!(self.option(7, &[0; 6])?.0, 1);
        Ok(())
    }

    fn head(&self, flags: u16, kind: u16, offset: u64, length: u64) -> Vec<u8> {
        let magic: u32 = if self.extended { 0x21e4_1c71 } else { 0x2560_9513 };
        let mut head = magic.to_be_bytes().to_vec();
        head.extend([flags, kind].iter().flat_map(|word| word.to_be_bytes()));
        head.extend([0x77, offset].iter().flat_map(|word: &u64| word.to_be_bytes()));
        match self.extended {
            true => head.extend(length.to_be_bytes()),
            false => head.extend((length as u32).to_be_bytes()),
        }
        head
    }

    /// What is answered: the bytes that were read and the body of what is held, or an error.
    fn answer(&mut self, kind: u16, at: u64, length: usize) -> Result<Result<Vec<u8>, u32>, Ended> {
        let (chunks, mut read, mut covered) =
            (self.structured || self.extended, vec![0; length], vec![false; length]);
        let (mut failed, mut held) = (None, None);
        loop {
            let magic = self.number::<4>()?;
            if magic == 0x6744_6698 {
                assert!(!self.extended);
                let (error, cookie) = (self.number::<4>()?, self.number::<8>()?);
                assert_eq!(cookie, 0x77);
                if error != 0 {
                    return Ok(Err(error as u32));
                }
                // (Of a read it would be no answer in chunks.)
                assert!(kind != READ || !chunks);
                if kind == READ {
                    self.stream.read_exact(&mut read)?;
                }
                return Ok(Ok(read));
            }
            assert!(chunks && magic == if self.extended { 0x6e8a_278c } else { 0x668e_33ef });
            let (flags, chunk, cookie) =
                (self.number::<2>()?, self.number::<2>()?, self.number::<8>()?);
            assert!(cookie == 0x77 && flags <= 1);
            let bytes = match self.extended {
                true => {
                    assert_eq!(self.number::<8>()?, at);
                    self.number::<8>()?
                }
                false => self.number::<4>()?,
            };
            assert!(bytes < 33 << 20);
            let mut body = vec![0; bytes as usize];
            self.stream.read_exact(&mut body)?;
            let word = |from: usize, bytes: usize| {
                body[from..from + bytes].iter().fold(0, |all, byte| all << 8 | u64::from(*byte))
            };
            match chunk {
                0 => assert!(body.is_empty() && flags == 1),
                1 | 2 if kind == READ => {
                    let from = (word(0, 8) - at) as usize;
                    let part = if chunk == 1 { body.len() - 8 } else { word(8, 4) as usize };
                    assert!(part > 0 && !covered[from..from + part].contains(&true));
                    covered[from..from + part].fill(true);
                    if chunk == 1 {
                        read[from..from + part].copy_from_slice(&body[8..]);
                    }
                }
                5 | 6 if kind == STATUS => held = Some(body),
                0x8001 | 0x8002 => failed = Some(word(0, 4) as u32),
                _ => panic!("a chunk of kind {chunk} for {kind}"),
            }
            if flags == 1 {
                break;
            }
        }
        Ok(match (failed, held) {
            (Some(error), _) => Err(error),
            (None, Some(held)) => Ok(held),
            (None, None) => {
                assert!(kind != STATUS && (kind != READ || !covered.contains(&false)));
                Ok(read)
            }
        })
    }
}

impl Stage {
    /// How many requests were answered as they ought to be.
    fn play(&mut self, mut script: Script) -> usize {
        let mut client = Client::new(&self.socket);
        let mut done = 0;
        if client.agree(&mut script).is_err() {
            assert!(client.is_odd, "it ends while they agree");
            script.0 = &[];
        }
        while !script.0.is_empty() {
            match self.ask(&mut client, &mut script) {
                Ok(Asked::Over) => break,
                Ok(asked) => done += usize::from(asked == Asked::Right),
                Err(Ended) => panic!("it ends"),
            }
        }
        drop(client);
        let mut other = Client::new(&self.socket);
        let all = other.stream.write_all(&3_u32.to_be_bytes()).map_err(Ended::from);
        let all = all.and_then(|()| other.option(7, &[0; 6])).and_then(|_| {
            other.stream.write_all(&other.head(0, READ, 0, BYTES as u64))?;
            other.answer(READ, 0, BYTES)
        });
        let Ok(Ok(all)) = all else { panic!("another client is not served") };
        assert!(all == self.model, "another client reads other bytes");
        done
    }

    fn ask(&mut self, client: &mut Client, script: &mut Script) -> Result<Asked, Ended> {
        let kind = script.of(&[READ, READ, WRITE, WRITE, FLUSH, TRIM, ZERO, STATUS, STATUS, 5, 99]);
        let most = BYTES as u64;
        let offset = match script.below(8) {
            0 => script.of(&[most, most + 1, 1 << 32, 1 << 63, u64::MAX]),
            _ => script.number(3) % most,
        };
        let wide = [0, u64::from(u32::MAX), 1 << 32, 1 << 63, u64::MAX, (32 << 20) + 1];
        let length = match script.below(8) {
            0 => script.of(&wide),
            1 => most.saturating_sub(offset),
            2..5 => script.number(1),
            _ => script.number(3) % (300 << 10),
        };
        let (offset, length) = if kind == FLUSH { (0, 0) } else { (offset, length) };
        let length = if client.extended { length } else { length & u64::from(u32::MAX) };
        let mut flags = script.of(&[0, 0, 0, 1, 2, 4, 8, FAST, 64, 1 << 15]);
        if client.extended && (kind == WRITE) != (script.below(8) == 0) {
            flags |= PAYLOAD;
        }
        let chunks = client.structured || client.extended;
        let has_payload = if client.extended { flags & PAYLOAD != 0 } else { kind == WRITE };
        let payload = if has_payload { length } else { 0 };
        client.stream.write_all(&client.head(flags, kind, offset, length))?;
        let fills = script.number(1) as u8;
        if payload > 32 << 20 {
            // (It is not waited for.)
            let ended = client.answer(kind, offset, 0);
            assert!(ended.is_err(), "so much would be received");
            return Ok(Asked::Over);
        }
        // One leaves in the middle of what is not so long that a part of it is asked for.
        if has_payload && payload > 1 && payload < SLOT as u64 && script.below(16) == 0 {
            client.stream.write_all(&vec![fills; payload as usize - 1])?;
            return Ok(Asked::Over);
        }
        client.stream.write_all(&vec![fills; payload as usize])?;
        let allowed = 1 | match kind {
            READ if chunks => 4,
            WRITE if client.extended => PAYLOAD,
            ZERO => 2 | FAST,
            STATUS => 8,
            _ => 0,
        };
        let is_inside = offset.checked_add(length).is_some_and(|end| end <= most);
        let is_whole = kind != READ || flags & 4 == 0 || length <= SLOT as u64;
        let is_right = [READ, WRITE, FLUSH, TRIM, ZERO, STATUS].contains(&kind)
            && flags & !allowed == 0
            && is_inside
            && is_whole
            && (kind != WRITE || has_payload || length == 0)
            && (kind != STATUS || client.allocation && length > 0);
        let room = if is_right && kind == READ { length as usize } else { 0 };
        let answer = client.answer(kind, offset, room)?;
        if !is_right {
            assert!(answer.is_err(), "kind {kind}, flags {flags}, {length} at {offset}");
            return Ok(Asked::Refused);
        }
        let range = offset as usize..(offset + length) as usize;
        match (kind, answer) {
            (READ, Ok(read)) => assert!(read == self.model[range], "other bytes"),
            (WRITE, Ok(_)) => self.model[range].fill(fills),
            // (Where the file system punches no holes it may be slow, and what is trimmed stays: not where it is tried.)
            (ZERO, Err(95)) if flags & FAST != 0 => {}
            (ZERO | TRIM, Ok(_)) => self.model[range].fill(0),
            (STATUS, Ok(held)) => self.is_held(client, offset as usize, length, flags, &held),
            (FLUSH, Ok(_)) => {}
            (kind, answer) => {
                panic!("kind {kind}, flags {flags}, {length} at {offset}: {answer:?}")
            }
        }
        Ok(Asked::Right)
    }

    /// What is told to be a hole is zeros; and it is told of what was asked for.
    fn is_held(&self, client: &Client, at: usize, most: u64, flags: u16, held: &[u8]) {
        let (size, count) = if client.extended { (8, 4) } else { (4, 0) };
        assert_eq!(held[..4], [0, 0, 0, 1]);
        let number = |bytes: &[u8]| bytes.iter().fold(0, |all, byte| all << 8 | u64::from(*byte));
        let extents = held[4 + count..].chunks_exact(2 * size);
        assert!(extents.len() > 0 && (flags & 8 == 0 || extents.len() == 1));
        assert!(count == 0 || number(&held[4..8]) == extents.len() as u64);
        let mut from = at;
        for extent in extents {
            let (length, status) = (number(&extent[..size]), number(&extent[size..]));
            assert!(length > 0 && [0, 3].contains(&status));
            let range = from..from + length as usize;
            assert!(status == 0 || self.model[range.clone()].iter().all(|byte| *byte == 0));
            from = range.end;
        }
        assert!((from - at) as u64 <= most);
    }
}

pub fn run(script: &[u8]) -> usize {
    STAGE.with_borrow_mut(|stage| stage.get_or_insert_with(begin).play(Script(script)))
}
