//! Two nodes over chaotic rails, against a queue: every frame in order and once; the bytes of a write exact when the frame that needs it is
//! delivered; and memory that was handed back stays as it is, whatever lands late. `RINGLET_FUZZ_SECONDS` keeps on for so long.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use fastrand::Rng;
use ringlet_fabric::memory::{Chaos, MemoryRail};
use ringlet_fabric::rail::Rail;
use ringlet_fabric::{Control, Memory, Node, NotTaken, Number, Told, Write};

const BLOCKS: usize = 6;
const BLOCK_BYTES: usize = 6000;
/// The first half is the other end's to write to, the second is ours to write from.
const HALF: usize = BLOCKS * BLOCK_BYTES;
const MEMORIES: usize = 3;
const CANARY: u8 = 0xc5;
const SEEDS: u64 = 200;
const STEPS: usize = 12_000;
const DRAIN_STEPS: usize = 200_000;

/// Memory that others write to: it is looked at through a pointer only.
struct Bytes(*mut u8);

impl Bytes {
    const LEN: usize = 2 * HALF;

    fn new() -> Bytes {
        Bytes(Box::leak(vec![0u8; Bytes::LEN].into_boxed_slice()).as_mut_ptr())
    }

    fn block(&self, half: usize, block: usize) -> &[u8] {
        assert!(half < 2 && block < BLOCKS);
        // SAFETY: within it; all who write to it are on this thread, and it is not used while they do.
        unsafe {
            std::slice::from_raw_parts(self.0.add(half * HALF + block * BLOCK_BYTES), BLOCK_BYTES)
        }
    }

    fn fill(&mut self, half: usize, block: usize, byte: impl Fn(usize) -> u8) {
        assert!(half < 2 && block < BLOCKS);
        for nth in 0..BLOCK_BYTES {
            // SAFETY: as in `block`.
            unsafe { self.0.add(half * HALF + block * BLOCK_BYTES + nth).write(byte(nth)) };
        }
    }

    fn fill_all(&mut self) {
        (0..2 * BLOCKS).for_each(|nth| self.fill(nth % 2, nth / 2, |_| CANARY));
    }

    fn is_canary(&self, half: usize, block: usize) -> bool {
        self.block(half, block).iter().all(|byte| *byte == CANARY)
    }
}

impl Drop for Bytes {
    fn drop(&mut self) {
        // SAFETY: of `new`; the nodes that know it are dropped before (`End`).
        drop(unsafe { Box::from_raw(std::ptr::slice_from_raw_parts_mut(self.0, Bytes::LEN)) });
    }
}

fn pattern(seed: u32) -> impl Fn(usize) -> u8 {
    move |nth| (seed.wrapping_mul(0x9e37_79b9).wrapping_add(nth as u32 * 31) >> 8) as u8
}

/// A frame of the test's own protocol.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Says {
    Nothing,
    Registered(u32),
    /// Behind its writes.
    Filled(u32, usize, u32),
    HandedBack(u32, usize),
}

impl Says {
    /// With something behind it, so that frames have any length.
    fn bytes(self, count: u32, more: usize) -> Vec<u8> {
        let (kind, memory, block, seed) = match self {
            Says::Nothing => (0, 0, 0, 0),
            Says::Registered(memory) => (1, memory, 0, 0),
            Says::Filled(memory, block, seed) => (2, memory, block, seed),
            Says::HandedBack(memory, block) => (3, memory, block, 0),
        };
        let words = [kind, memory, block as u32, seed, count];
        let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        bytes.extend((0..more).map(|nth| (nth as u32 ^ count) as u8));
        bytes
    }

    fn read(bytes: &[u8]) -> Says {
        let word = |nth: usize| u32::from_le_bytes(bytes[4 * nth..][..4].try_into().unwrap());
        match word(0) {
            0 => Says::Nothing,
            1 => Says::Registered(word(1)),
            2 => Says::Filled(word(1), word(2) as usize, word(3)),
            3 => Says::HandedBack(word(1), word(2) as usize),
            other => panic!("a frame says {other}"),
        }
    }
}

/// One of ours.
struct Ours {
    bytes: Bytes,
    /// Blocks of the first half that are ours until then, of canaries.
    held: BTreeMap<usize, usize>,
    /// Blocks of the second half that are being written, up to this number.
    busy: BTreeMap<usize, u32>,
    withdrawing: bool,
}

struct End {
    node: Node,
    number: Number,
    ours: BTreeMap<u32, Ours>,
    /// Blocks that we may write to.
    theirs: BTreeMap<u32, Vec<usize>>,
    /// What is to be sent when there is room.
    to_say: VecDeque<Says>,
    count: u32,
    /// Withdrawn: nothing changes any more.
    buried: Vec<Bytes>,
    /// From the other end, on their way.
    controls: VecDeque<Control>,
    /// What the other end has sent: the model.
    expected: VecDeque<Vec<u8>>,
}

#[derive(Default, Debug)]
struct Seen {
    frames: usize,
    filled: usize,
    withdrawn: usize,
    left: usize,
    down: usize,
    /// There was no room for a frame.
    full: usize,
    /// The longest run.
    steps: usize,
}

impl End {
    fn new(rails: Vec<Box<dyn Rail>>) -> End {
        let mut node = Node::new(rails);
        let number = node.open().unwrap();
        End {
            node,
            number,
            ours: BTreeMap::new(),
            theirs: BTreeMap::new(),
            to_say: VecDeque::new(),
            count: 0,
            buried: Vec::new(),
            controls: VecDeque::new(),
            expected: VecDeque::new(),
        }
    }

    fn register(&mut self) {
        let bytes = Bytes::new();
        // SAFETY: it is kept until it is withdrawn, and longer.
        let memory = unsafe { self.node.register(self.number, bytes.0, Bytes::LEN) }.unwrap();
        let ours = Ours { bytes, held: BTreeMap::new(), busy: BTreeMap::new(), withdrawing: false };
        self.ours.insert(memory.0, ours);
        self.to_say.push_back(Says::Registered(memory.0));
    }

    /// Writes a whole block, in some writes, and says so.
    fn fill(&mut self, random: &mut Rng) {
        let theirs: Vec<_> = self.theirs.iter().filter(|(_, blocks)| !blocks.is_empty()).collect();
        let Some((memory, blocks)) = random.choice(theirs) else { return };
        let (memory, block) = (*memory, *random.choice(blocks).unwrap());
        let written = self.node.transport(self.number).written();
        let choices: Vec<_> = self.ours.iter().filter(|(_, ours)| !ours.withdrawing).collect();
        let Some(from) = random.choice(choices).map(|(memory, _)| *memory) else { return };
        let ours = self.ours.get_mut(&from).unwrap();
        // What is acknowledged may be changed: it is.
        let is_done = |upto: u32| (written.wrapping_sub(upto) as i32) >= 0;
        for (block, upto) in std::mem::take(&mut ours.busy) {
            if is_done(upto) {
                ours.bytes.fill(1, block, |_| 0xaa);
            } else {
                ours.busy.insert(block, upto);
            }
        }
        let Some(source) = (0..BLOCKS).find(|block| !ours.busy.contains_key(block)) else { return };
        let seed = random.u32(..);
        ours.bytes.fill(1, source, pattern(seed));
        self.theirs.get_mut(&memory).unwrap().retain(|other| *other != block);
        let mut at = 0;
        let mut pieces = Vec::new();
        while at < BLOCK_BYTES {
            let n = random.usize(1..=BLOCK_BYTES / 2).min(BLOCK_BYTES - at);
            pieces.push((at, n));
            at += n;
        }
        random.shuffle(&mut pieces);
        for (at, n) in pieces {
            let write = Write {
                from: Memory(from),
                at: HALF + source * BLOCK_BYTES + at,
                bytes: n,
                to: Memory(memory),
                offset: (block * BLOCK_BYTES + at) as u64,
            };
            match self.node.transport(self.number).write(write) {
                Ok(number) => drop(ours.busy.insert(source, number.wrapping_add(1))),
                // It is withdrawn there.
                Err(NotTaken::Gone) => {
                    self.theirs.remove(&memory);
                    return;
                }
                Err(error) => panic!("a write: {error}"),
            }
        }
        self.to_say.push_front(Says::Filled(memory, block, seed));
    }

    /// What waits, as far as there is room.
    fn speak(&mut self, random: &mut Rng, model: &mut VecDeque<Vec<u8>>, seen: &mut Seen) {
        while let Some(says) = self.to_say.front() {
            let most = if random.u32(..4) == 0 { 1000 } else { 30 };
            let bytes = says.bytes(self.count, random.usize(..most));
            let needs = matches!(says, Says::Filled(..));
            match self.node.transport(self.number).frame(&bytes, needs) {
                Ok(()) => {
                    model.push_back(bytes);
                    self.count += 1;
                    self.to_say.pop_front();
                }
                Err(NotTaken::Full) => {
                    seen.full += 1;
                    return;
                }
                Err(error) => panic!("a frame: {error}"),
            }
        }
    }

    /// A frame has come.
    fn hear(&mut self, says: Says, step: usize, random: &mut Rng, seen: &mut Seen) {
        match says {
            Says::Nothing => {}
            Says::Registered(memory) => {
                self.theirs.insert(memory, (0..BLOCKS).collect());
            }
            Says::Filled(memory, block, _) => {
                let Some(ours) = self.ours.get_mut(&memory) else { return };
                ours.bytes.fill(0, block, |_| CANARY);
                ours.held.insert(block, step + random.usize(..600));
                seen.filled += 1;
            }
            Says::HandedBack(memory, block) => {
                if let Some(blocks) = self.theirs.get_mut(&memory) {
                    blocks.push(block);
                }
            }
        }
    }

    /// Blocks that we have had for long enough are handed back, as they were.
    fn hand_back(&mut self, step: usize) {
        for (memory, ours) in &mut self.ours {
            ours.held.retain(|block, until| {
                if *until > step {
                    return true;
                }
                assert!(
                    ours.bytes.is_canary(0, *block),
                    "block {block} of {memory} was written to"
                );
                self.to_say.push_back(Says::HandedBack(*memory, *block));
                false
            });
        }
    }

    fn check_buried(&self) {
        for bytes in &self.buried {
            let is_whole = (0..2 * BLOCKS).all(|nth| bytes.is_canary(nth % 2, nth / 2));
            assert!(is_whole, "withdrawn memory was written to");
        }
    }

    fn poll(&mut self, step: usize, random: &mut Rng, seen: &mut Seen) -> Vec<Control> {
        let mut controls = Vec::new();
        let mut heard = Vec::new();
        let mut withdrawn = Vec::new();
        let (number, expected) = (self.number, &mut self.expected);
        // At the moment of delivery: what a frame needs is there when it is told, not only when the poll returns.
        let ours = &self.ours;
        self.node.poll(&mut |from, told| {
            assert_eq!(from, number);
            match told {
                Told::Control(control) => {
                    seen.left += matches!(control, Control::Left { .. }) as usize;
                    controls.push(control);
                }
                Told::Frame(bytes) => {
                    let model = expected.pop_front().expect("a frame that nobody has sent");
                    assert_eq!(bytes, model, "another frame than was next");
                    seen.frames += 1;
                    let says = Says::read(bytes);
                    if let Says::Filled(memory, block, seed) = says
                        && let Some(ours) = ours.get(&memory)
                    {
                        let is = pattern(seed);
                        let mut bytes = ours.bytes.block(0, block).iter().enumerate();
                        let wrong = bytes.position(|(nth, byte)| *byte != is(nth));
                        assert_eq!(wrong, None, "in block {block} of {memory}");
                    }
                    heard.push(says);
                }
                Told::Withdrawn(memory) => withdrawn.push(memory.0),
                Told::Up => {}
                Told::Down => seen.down += 1,
                Told::Ended(error) => panic!("{error}"),
            }
        });
        heard.into_iter().for_each(|says| self.hear(says, step, random, seen));
        for memory in withdrawn {
            let mut bytes = self.ours.remove(&memory).unwrap().bytes;
            bytes.fill_all();
            self.buried.push(bytes);
            seen.withdrawn += 1;
        }
        controls
    }

    fn is_done(&mut self) -> bool {
        self.to_say.is_empty()
            && self.expected.is_empty()
            && self.controls.is_empty()
            && self.ours.values().all(|ours| ours.held.is_empty() && !ours.withdrawing)
            && self.node.transport(self.number).is_idle()
    }
}

fn run(seed: u64) -> Seen {
    let mut random = Rng::with_seed(seed);
    let folder = tempfile::tempdir().unwrap();
    let count = 1 + seed as usize % 3;
    let fails_one_in = [0, 100, 1000][random.usize(..3)];
    let mut ends = [0, 1].map(|end| {
        let rails = (0..count).map(|nth| {
            let chaos = Chaos { seed: random.u64(..), fails_one_in };
            let name = format!("{end}-{nth}");
            Box::new(MemoryRail::new(folder.path(), &name, Some(chaos)).unwrap()) as Box<dyn Rail>
        });
        End::new(rails.collect())
    });
    ends.iter_mut().for_each(|end| (0..MEMORIES).for_each(|_| end.register()));
    let mut seen = Seen::default();
    let (mut step, mut done) = (0, false);
    while !done {
        step += 1;
        assert!(step < STEPS + DRAIN_STEPS, "it does not come to an end: {seen:?}");
        let works = step < STEPS;
        let [first, second] = &mut ends;
        let (end, other) = if random.bool() { (first, second) } else { (second, first) };
        if works {
            match random.u32(..8) {
                0 | 1 => end.fill(&mut random),
                2 if end.to_say.len() < 50 => {
                    let most = if random.u32(..40) == 0 { 1500 } else { 20 };
                    (0..random.usize(..most)).for_each(|_| end.to_say.push_back(Says::Nothing));
                }
                3 if random.u32(..200) == 0 => {
                    let nth = random.usize(..end.ours.len());
                    let (memory, ours) = end.ours.iter_mut().nth(nth).unwrap();
                    if !ours.withdrawing {
                        ours.withdrawing = true;
                        end.node.transport(end.number).withdraw(Memory(*memory));
                        end.register();
                    }
                }
                4 if fails_one_in > 0 && random.u32(..500) == 0 => {
                    end.node.give_up(end.number, random.usize(..count));
                }
                _ => {}
            }
        }
        end.hand_back(step);
        end.speak(&mut random, &mut other.expected, &mut seen);
        for _ in 0..random.usize(..4) {
            let controls = end.poll(step, &mut random, &mut seen);
            // As they go from one service to another.
            other.controls.extend(controls.iter().map(|control| {
                serde_json::from_str(&serde_json::to_string(control).unwrap()).unwrap()
            }));
        }
        for _ in 0..random.usize(..3) {
            if let Some(control) = end.controls.pop_front() {
                end.node.control(end.number, control);
            }
        }
        if random.u32(..30) == 0 {
            end.node.try_again(end.number);
        }
        if step % 1000 == 0 {
            ends.iter().for_each(End::check_buried);
        }
        done = !works && ends.iter_mut().all(End::is_done);
    }
    ends.iter().for_each(End::check_buried);
    for end in &mut ends {
        end.node.close(end.number);
    }
    seen.steps = step;
    seen
}

#[test]
fn frames_and_writes_are_as_in_the_model() {
    let mut all = Seen::default();
    let more = std::env::var("RINGLET_FUZZ_SECONDS").ok().and_then(|seconds| seconds.parse().ok());
    let until = Instant::now() + Duration::from_secs(more.unwrap_or(0));
    for seed in (0..).take_while(|seed| *seed < SEEDS || Instant::now() < until) {
        let result = std::panic::catch_unwind(|| run(seed));
        let seen = result.unwrap_or_else(|_| panic!("by seed {seed}"));
        all.frames += seen.frames;
        all.filled += seen.filled;
        all.withdrawn += seen.withdrawn;
        all.left += seen.left;
        all.down += seen.down;
        all.full += seen.full;
        all.steps = all.steps.max(seen.steps);
    }
    println!("{all:?}");
    let Seen { frames, filled, withdrawn, left, down, full, .. } = all;
    assert!(down > 1000 && full > 500, "it is too quiet");
    assert!(frames > 1_000_000 && filled > 100_000 && withdrawn > 500 && left > 10_000);
}
