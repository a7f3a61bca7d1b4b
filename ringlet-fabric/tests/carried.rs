//! Two nodes, each with two rails on libfabric, whose endpoints are closed in the middle: all frames come, each once and in order, and behind
//! the writes that they need.
//!
//! `RINGLET_TEST_RAILS` names another provider, with a local address. With `RINGLET_TEST_AT` there is one node in this process, and the other
//! elsewhere: `listen ADDRESS`, or `connect ADDRESS` where that is.

use std::io::{BufRead, BufReader, ErrorKind, Write as _};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use fastrand::Rng;
use ringlet_fabric::libfabric::Libfabric;
use ringlet_fabric::rail::Rail;
use ringlet_fabric::{Memory, Node, NotTaken, Number, Told, Write};
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};

/// Against hanging only.
const LIMIT: Duration = Duration::from_secs(200);
const FRAMES: u32 = 3000;
/// Each frame that is divisible by this needs a write.
const WITH_WRITE: u32 = 3;
const BLOCK: usize = 8 << 10;
/// Blocks under way. What is written from lies behind what is written to.
const BLOCKS: usize = 64;
const BYTES: usize = 2 * BLOCKS * BLOCK;
/// When an end closes the endpoint of a rail, and which.
const CLOSES: [&[(u32, usize)]; 2] = [&[(500, 0), (2000, 1)], &[(1200, 1), (2001, 0)]];

fn rail(provider: &str, local: &str) -> Box<dyn Rail> {
    Box::new(Libfabric::open(provider, Some(local)).unwrap())
}

fn block(number: u32) -> Vec<u8> {
    let mut random = Rng::with_seed(number.into());
    (0..BLOCK).map(|_| random.u8(..)).collect()
}

/// A frame without a number, which only says what its sender has heard.
const ONLY_HEARD: u32 = u32::MAX;

/// Its number, what its sender has heard, and more.
fn frame(number: u32, heard: u32) -> Vec<u8> {
    let mut random = Rng::with_seed(number.into());
    let more = random.usize(..900);
    let words = [number, heard].map(u32::to_le_bytes);
    words.into_iter().flatten().chain((0..more).map(|_| random.u8(..))).collect()
}

struct End {
    node: Node,
    number: Number,
    memory: Memory,
    at: *mut u8,
    sent: u32,
    heard: u32,
    /// What the other end has heard, and what it knows that we have.
    known: u32,
    said: u32,
    /// By block: the write from it that is under way.
    from: [Option<u32>; BLOCKS],
    /// The write of the next frame is given already.
    is_written: bool,
}

impl End {
    fn new(provider: &str, local: &str) -> End {
        let mut node = Node::new(vec![rail(provider, local), rail(provider, local)]);
        let number = node.open().unwrap();
        let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        // SAFETY: new memory, which is never unmapped.
        let at = unsafe { mmap_anonymous(std::ptr::null_mut(), BYTES, access, flags) }.unwrap();
        let at: *mut u8 = at.cast();
        // SAFETY: as above.
        let memory = unsafe { node.register(number, at, BYTES) }.unwrap();
        End {
            node,
            number,
            memory,
            at,
            sent: 0,
            heard: 0,
            known: 0,
            said: 0,
            from: [None; BLOCKS],
            is_written: false,
        }
    }

    /// Gives the next frame, with its write, if there is room for both.
    fn say(&mut self) -> bool {
        let nth = (self.sent / WITH_WRITE) as usize % BLOCKS;
        let has_write = self.sent.is_multiple_of(WITH_WRITE);
        if has_write && !self.is_written {
            // What was written there before was looked at, and what was written from there has arrived.
            let is_looked_at = self.sent - self.known.min(self.sent) < WITH_WRITE * BLOCKS as u32;
            let transport = self.node.transport(self.number);
            let is_free = self.from[nth]
                .is_none_or(|write| (transport.written().wrapping_sub(write) as i32) > 0);
            if !is_looked_at || !is_free {
                return false;
            }
            let (offset, from) = (nth * BLOCK, (BLOCKS + nth) * BLOCK);
            // SAFETY: within, and nothing is written from there now.
            unsafe { std::slice::from_raw_parts_mut(self.at.add(from), BLOCK) }
                .copy_from_slice(&block(self.sent));
            let write = Write {
                from: self.memory,
                at: from,
                bytes: BLOCK,
                to: Memory(0),
                offset: offset as u64,
            };
            match transport.write(write) {
                Ok(number) => (self.from[nth], self.is_written) = (Some(number), true),
                Err(NotTaken::Full) => return false,
                Err(error) => panic!("{error}"),
            }
        }
        let bytes = frame(self.sent, self.heard);
        match self.node.transport(self.number).frame(&bytes, has_write) {
            Ok(()) => (),
            Err(NotTaken::Full) => return false,
            Err(error) => panic!("{error}"),
        }
        (self.is_written, self.said) = (false, self.heard);
        self.sent += 1;
        true
    }

    /// Says what was heard, where no frame says so.
    fn acknowledge(&mut self) {
        let bytes = frame(ONLY_HEARD, self.heard);
        if self.said != self.heard && self.node.transport(self.number).frame(&bytes, false).is_ok()
        {
            self.said = self.heard;
        }
    }

    /// Takes what has come; returns what is to be said to the other node.
    fn turn(&mut self) -> Vec<String> {
        let End { node, at, heard, known, .. } = self;
        let mut lines = Vec::new();
        node.poll(&mut |_, told| match told {
            Told::Control(control) => lines.push(serde_json::to_string(&control).unwrap()),
            Told::Frame(bytes) => {
                *known = u32::from_le_bytes(*bytes[4..].first_chunk().unwrap());
                if *bytes == frame(ONLY_HEARD, *known) {
                    return;
                }
                assert!(*bytes == frame(*heard, *known), "frame {heard} is another");
                if heard.is_multiple_of(WITH_WRITE) {
                    let nth = (*heard / WITH_WRITE) as usize % BLOCKS;
                    // SAFETY: within; the other end writes there again when it knows that this was looked at.
                    let is: &[u8] =
                        unsafe { std::slice::from_raw_parts(at.add(nth * BLOCK), BLOCK) };
                    assert!(*is == block(*heard), "the write of frame {heard} is not there");
                }
                *heard += 1;
            }
            Told::Ended(error) => panic!("{error}"),
            _ => {}
        });
        lines
    }
}

/// One end, until both are done. `closes`: which of the two it is.
fn play(wire: TcpStream, tested: &(String, String), closes: usize) -> u32 {
    let (provider, local) = tested;
    let mut end = End::new(provider, local);
    wire.set_nodelay(true).unwrap();
    let mut to = wire.try_clone().unwrap();
    wire.set_nonblocking(true).unwrap();
    let mut from = BufReader::new(wire);
    let mut line = Vec::new();
    let mut closes = CLOSES[closes].iter().peekable();
    let (mut closed, mut was_up, mut is_done, mut is_other_done) = (0, 0, false, false);
    let (limit, mut tried) = (Instant::now() + LIMIT, Instant::now());
    while !is_done || !is_other_done {
        assert!(
            Instant::now() < limit,
            "sent {}, heard {}, {:?}",
            end.sent,
            end.heard,
            end.node.transport(end.number).oldest()
        );
        if let Some((_, place)) = closes.next_if(|(at, _)| end.heard >= *at) {
            was_up += u32::from(end.node.transport(end.number).is_up(*place));
            end.node.replace(*place, rail(provider, local));
            closed += 1;
        }
        // (As many as have room; then it listens.)
        while end.sent < FRAMES && end.say() {}
        end.acknowledge();
        let mut lines = end.turn();
        let is_idle = end.node.transport(end.number).is_idle();
        if !is_done && end.heard == FRAMES && end.sent == FRAMES && is_idle {
            is_done = true;
            lines.push("done".into());
        }
        for each in lines {
            send(&mut to, &each);
        }
        if tried.elapsed() > Duration::from_millis(100) {
            tried = Instant::now();
            end.node.try_again(end.number);
        }
        match from.read_until(b'\n', &mut line) {
            Ok(0) => panic!("the other end has gone"),
            Ok(_) if line == b"done\n" => is_other_done = true,
            Ok(_) if line.ends_with(b"\n") => {
                end.node.control(end.number, serde_json::from_slice(&line).unwrap());
            }
            Ok(_) => continue,
            Err(error) if error.kind() == ErrorKind::WouldBlock => continue,
            Err(error) => panic!("{error}"),
        }
        line.clear();
    }
    assert_eq!(closed, 2, "no endpoint was closed");
    was_up
}

/// Blocks for as long as the other end does not read, which does little else.
fn send(to: &mut TcpStream, line: &str) {
    let bytes = [line.as_bytes(), b"\n"].concat();
    let mut rest = bytes.as_slice();
    while !rest.is_empty() {
        match to.write(rest) {
            Ok(count) => rest = &rest[count..],
            Err(error) if error.kind() == ErrorKind::WouldBlock => std::thread::yield_now(),
            Err(error) => panic!("{error}"),
        }
    }
}

fn tested() -> (String, String) {
    let named = std::env::var("RINGLET_TEST_RAILS").unwrap_or_else(|_| "tcp 127.0.0.1".into());
    let (provider, local) = named.split_once(' ').expect("a provider and an address");
    (provider.into(), local.into())
}

#[test]
fn endpoints_are_closed_amid_frames_and_writes() {
    let tested = tested();
    let was_up = match std::env::var("RINGLET_TEST_AT") {
        Ok(at) => {
            let (what, address) = at.split_once(' ').expect("what, and where");
            match what {
                "listen" => {
                    let listener = TcpListener::bind(address).unwrap();
                    println!("listens");
                    play(listener.accept().unwrap().0, &tested, 0)
                }
                _ => play(TcpStream::connect(address).unwrap(), &tested, 1),
            }
        }
        Err(_) => {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let two = listener.accept().unwrap().0;
            std::thread::scope(|scope| {
                let other = scope.spawn(|| play(one, &tested, 0));
                play(two, &tested, 1) + other.join().unwrap()
            })
        }
    };
    assert!(was_up > 0, "no rail was closed that carried");
}
