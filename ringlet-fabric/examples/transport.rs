//! What a transport costs over a rail that costs next to nothing: two processes, a rail in memory without chaos.
//!
//!     cargo run --release -p ringlet-fabric --example transport

use std::io::{BufRead, BufReader, Write as _};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use ringlet_fabric::memory::MemoryRail;
use ringlet_fabric::rail::{Event, Peer, Rail};
use ringlet_fabric::{Control, Memory, Node, NotTaken, Number, Progress, Told, Write};

const BATCHES: usize = 21;
const PINGS: u32 = 20_000;
const FRAMES: usize = 2_000_000;
const BYTES: usize = 64 << 20;
/// Everything that waits here ends after it.
const LIMIT: Duration = Duration::from_secs(120);

fn main() {
    let arguments: Vec<_> = std::env::args().collect();
    match &arguments[1..] {
        [] => {
            let folder = tempfile::Builder::new().tempdir_in("/dev/shm").expect("a folder");
            let mut child = Command::new(&arguments[0])
                .arg(folder.path())
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()
                .expect("a second process");
            let (to, from) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
            measure(folder.path(), to, BufReader::new(from));
            child.wait().expect("its end");
        }
        [folder] => answer(Path::new(folder)),
        _ => panic!("no arguments, please"),
    }
}

/// One end of a transport, whose controls go as lines.
struct End {
    node: Node,
    number: Number,
    to: Box<dyn std::io::Write>,
    from: Receiver<Control>,
    memory: Memory,
    begun: Instant,
    idle: u32,
}

impl End {
    fn new(
        rail: MemoryRail,
        to: impl std::io::Write + 'static,
        from: impl BufRead + Send + 'static,
    ) -> End {
        let (send, receive) = channel();
        std::thread::spawn(move || {
            for line in from.lines().map_while(Result::ok) {
                let _ = send.send(serde_json::from_str(&line).expect("a control"));
            }
        });
        let mut node = Node::new(vec![Box::new(rail)]);
        let number = node.open().expect("a number");
        let bytes = vec![1u8; BYTES].leak();
        // SAFETY: it is never freed, and looked at by nobody else.
        let memory = unsafe { node.register(number, bytes.as_mut_ptr(), BYTES) }.expect("memory");
        End {
            node,
            number,
            to: Box::new(to),
            from: receive,
            memory,
            begun: Instant::now(),
            idle: 0,
        }
    }

    /// One turn; true if something was heard, or is under way.
    fn turn(&mut self, hear: &mut dyn FnMut(&[u8])) -> Progress {
        let End { node, number, to, from, .. } = self;
        let progress = node.poll(&mut |_, told| match told {
            Told::Frame(bytes) => hear(bytes),
            Told::Control(control) => {
                writeln!(to, "{}", serde_json::to_string(&control).unwrap()).unwrap();
                to.flush().unwrap();
            }
            Told::Ended(error) => panic!("{error}"),
            _ => {}
        });
        // (A look costs as much as a message.)
        self.idle += u32::from(progress == Progress::Idle);
        if self.idle == 1000 {
            self.idle = 0;
            while let Ok(control) = from.try_recv() {
                node.control(*number, control);
            }
            assert!(self.begun.elapsed() < LIMIT, "it takes too long");
        }
        progress
    }

    fn say(&mut self, frame: &[u8], needs_writes: bool) {
        while let Err(error) = self.node.transport(self.number).frame(frame, needs_writes) {
            assert_eq!(error, NotTaken::Full);
            self.turn(&mut |_| panic!("an answer before its time"));
        }
    }

    fn wait_for_answer(&mut self) {
        let mut heard = false;
        while !heard {
            self.turn(&mut |_| heard = true);
        }
    }
}

/// The other process: everything that asks for it is answered.
fn answer(folder: &Path) {
    let mut raw = MemoryRail::new(folder, "raw-b", None).unwrap();
    let peer = raw.reach(b"raw-a").unwrap();
    let rail = MemoryRail::new(folder, "b", None).unwrap();
    // Its presence tells the first that the endpoints are there.
    let mut end = End::new(rail, std::io::stdout(), BufReader::new(std::io::stdin()));
    end.turn(&mut |_| {});
    let begun = Instant::now();
    let (mut ping, mut over) = (None, false);
    while !over {
        raw.poll(&mut |event| match event {
            Event::Message(b"") => over = true,
            Event::Message(bytes) => ping = Some(u64::from_le_bytes(bytes.try_into().unwrap())),
            _ => assert!(begun.elapsed() < LIMIT, "it takes too long"),
        });
        if let Some(ping) = ping.take() {
            raw.send(peer, &ping.to_le_bytes(), 0).unwrap_or_else(|_| panic!("full"));
        }
    }
    let (mut due, mut over) = (0, false);
    while !over || !end.node.transport(end.number).is_idle() {
        end.turn(&mut |bytes| match bytes[0] {
            b'?' => due += 1,
            b'!' => over = true,
            _ => {}
        });
        (0..std::mem::take(&mut due)).for_each(|_| end.say(b"12345678", false));
    }
}

/// Half a round trip in ns: the median of batches.
fn half_round_trip(mut once: impl FnMut()) -> f64 {
    let mut batches: Vec<_> = (0..BATCHES)
        .map(|_| {
            let begun = Instant::now();
            (0..PINGS).for_each(|_| once());
            begun.elapsed().as_nanos() as f64 / f64::from(PINGS) / 2.0
        })
        .collect();
    batches.sort_by(f64::total_cmp);
    batches[BATCHES / 2]
}

/// The same code where the compiler knows which rail it is, and where it does not.
fn ping<R: Rail + ?Sized>(rail: &mut R, peer: Peer) -> f64 {
    let begun = Instant::now();
    half_round_trip(|| {
        rail.send(peer, &7u64.to_le_bytes(), 0).unwrap_or_else(|_| panic!("full"));
        let mut heard = false;
        while !heard {
            rail.poll(&mut |event| heard |= matches!(event, Event::Message(_)));
            assert!(heard || begun.elapsed() < LIMIT, "it takes too long");
        }
    })
}

fn measure(
    folder: &Path,
    to: impl std::io::Write + 'static,
    mut from: impl BufRead + Send + 'static,
) {
    let mut raw = MemoryRail::new(folder, "raw-a", None).unwrap();
    let rail = MemoryRail::new(folder, "a", None).unwrap();
    assert!(!from.fill_buf().expect("the second process").is_empty());
    let peer = raw.reach(b"raw-b").unwrap();
    println!("half a round trip of 8 bytes, ns");
    println!("  rail, known to the compiler   {:7.0}", ping(&mut raw, peer));
    println!("  rail, by its trait            {:7.0}", ping(&mut raw as &mut dyn Rail, peer));
    raw.send(peer, b"", 0).unwrap_or_else(|_| panic!("full"));

    let mut end = End::new(rail, to, from);
    while !end.node.transport(end.number).is_up(0) {
        end.turn(&mut |_| {});
    }
    let each = half_round_trip(|| {
        end.say(b"?2345678", false);
        end.wait_for_answer();
    });
    println!("  frame                         {each:7.0}");

    let begun = Instant::now();
    for _ in 0..FRAMES {
        end.say(b".2345678", false);
    }
    end.say(b"?", false);
    end.wait_for_answer();
    let rate = FRAMES as f64 / begun.elapsed().as_secs_f64() / 1e6;
    println!("frames of 8 bytes, in millions per second    {rate:7.1}");

    println!("writes of so many bytes, with a frame behind each: GB/s");
    for bytes in [64, 1024, 4096, 16 << 10, 64 << 10, 256 << 10, 1 << 20] {
        let all = if bytes < 4096 { BYTES } else { 32 * BYTES };
        let begun = Instant::now();
        for nth in 0..all / bytes {
            let at = nth * bytes % BYTES;
            let (from, to) = (end.memory, Memory(0));
            let write = Write { from, at, bytes, to, offset: at as u64 };
            while let Err(error) = end.node.transport(end.number).write(write) {
                assert_eq!(error, NotTaken::Full);
                end.turn(&mut |_| panic!("an answer before its time"));
            }
            end.say(b".", true);
            if nth % 8 == 7 {
                end.turn(&mut |_| panic!("an answer before its time"));
            }
        }
        end.say(b"?", true);
        end.wait_for_answer();
        println!("  {bytes:8}    {:7.2}", all as f64 / begun.elapsed().as_secs_f64() / 1e9);
    }
    let (from, mut to) = (vec![1u8; BYTES], vec![2u8; BYTES]);
    let begun = Instant::now();
    for _ in 0..16 {
        std::hint::black_box(&mut to).copy_from_slice(std::hint::black_box(&from));
    }
    println!("memcpy here     {:7.2}", 16.0 * BYTES as f64 / begun.elapsed().as_secs_f64() / 1e9);
    end.say(b"!", false);
    while !end.node.transport(end.number).is_idle() {
        end.turn(&mut |_| {});
    }
}
