//! The three threads of a direction's two ends, which take turns as is drawn by a seed; some are killed between two accesses.

use super::{Engine, Failed, Kernel, Record, Rule, Side, Who, World};
use ringlet_core::handover::{Outgoing, Receiver, Sender, Sending, Step};
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::thread::{self, Thread};

/// Numbers by seed.
pub struct Random(Cell<u64>);

impl Random {
    pub fn new(seed: u64, stream: u64) -> Random {
        Random(Cell::new(seed << 8 | stream))
    }
    pub fn below(&self, n: u64) -> u64 {
        let state = self.0.get().wrapping_add(0x9e37_79b9_7f4a_7c15);
        self.0.set(state);
        let mixed = (state ^ state >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ mixed >> 31) % n
    }
    pub fn one_in(&self, n: u64) -> bool {
        self.below(n) == 0
    }
    pub fn length(&self) -> u64 {
        1 + self.below(1 << self.below(13))
    }
}

const NOBODY: usize = usize::MAX;
const THREADS: usize = 3;
const WHO: [Who; THREADS] = [Who::Sender, Who::Ringer, Who::Receiver];
/// Turns that a test may take, and that somebody is waited for.
const TURNS_MOST: u32 = 300_000;
const WAIT_TURNS: u32 = 2000;

/// Where the threads take turns.
struct Stage<W> {
    world: Mutex<W>,
    sender: Sender,
    receiver: Receiver,
    seed: u64,
    broken: Option<Rule>,
    turn: AtomicUsize,
    killed: [AtomicBool; THREADS],
    ended: [AtomicBool; THREADS],
    director: Thread,
}

struct Killed;

/// One thread there.
struct Actor<'a, W> {
    stage: &'a Stage<W>,
    me: usize,
}

impl<W: World> Actor<'_, W> {
    /// Others' turns; returns in one's own.
    fn pause(&self) {
        self.stage.turn.store(NOBODY, SeqCst);
        self.stage.director.unpark();
        self.await_turn();
    }

    fn await_turn(&self) {
        while self.stage.turn.load(SeqCst) != self.me {
            thread::park();
        }
        if self.stage.killed[self.me].load(SeqCst) {
            resume_unwind(Box::new(Killed));
        }
    }

    fn wrong(&self, what: &'static str) {
        self.stage.world.lock().unwrap().record().wrong(what);
    }

    fn somebody_died(&self) -> bool {
        self.stage.killed.iter().any(|killed| killed.load(SeqCst))
    }

    fn act(&self) {
        let who = WHO[self.me];
        let (sender, receiver) = (&self.stage.sender, &self.stage.receiver);
        let side = Side { engine: self, who, sender, receiver, broken: self.stage.broken };
        let random = Random::new(self.stage.seed, self.me as u64);
        match who {
            Who::Sender => self.send(&side, &random),
            Who::Ringer => (0..random.below(20)).for_each(|_| side.ring()),
            Who::Receiver => self.receive(&side, &random),
        }
    }

    fn send(&self, side: &Side<Self>, random: &Random) {
        for _ in 0..random.below(80) {
            let done = match random.below(16) {
                0..3 => {
                    side.try_start();
                    Ok(())
                }
                3 => side.step_back(Sending::Kernel),
                4 if random.one_in(8) => side.step_back(Sending::KernelForGood),
                5 => side.look_around(),
                _ => side.send(random.length()),
            };
            if !matches!(done, Ok(()) | Err(Failed::Full)) {
                return self.fails(done);
            }
        }
        loop {
            match side.shut() {
                // (One that has died makes no room.)
                Err(Failed::Full) if !self.somebody_died() => {}
                done => return self.fails(done),
            }
        }
    }

    fn receive(&self, side: &Side<Self>, random: &Random) {
        loop {
            if random.one_in(40) {
                let reads_on = random.one_in(2);
                if let Err(failed) = ringlet_core::handover::Incoming::leave(side, reads_on) {
                    return self.fails(Err(failed));
                }
            }
            match side.receive(random.length()) {
                Ok(Step::End) => return,
                Ok(_) | Err(Failed::Full) => {}
                Err(failed) => return self.fails(Err(failed)),
            }
        }
    }

    /// An error is only for those whose peer has died.
    fn fails(&self, how: Result<(), Failed>) {
        if how.is_err() && !self.somebody_died() {
            self.wrong("an error, though nobody died");
        }
    }
}

impl<W: World> Engine for Actor<'_, W> {
    type World = W;
    fn op(&self, access: impl FnOnce(&mut W) -> u64) -> u64 {
        if thread::panicking() {
            return 0;
        }
        self.pause();
        self.alone(access)
    }
    fn alone(&self, access: impl FnOnce(&mut W) -> u64) -> u64 {
        if thread::panicking() {
            return 0;
        }
        let mut world = self.stage.world.lock().unwrap();
        world.now(WHO[self.me]);
        access(&mut world)
    }
    fn wait(&self, mut until: impl FnMut(&mut W) -> bool) -> bool {
        (0..WAIT_TURNS).any(|_| self.op(|world| until(world).into()) != 0)
    }
}

/// A kernel's connection, by seed.
pub fn kernel(seed: u64) -> Kernel {
    let random = Random::new(seed, 255);
    Kernel {
        room: 1 + random.below(1 << (4 + random.below(12))) as usize,
        counts_nothing: random.one_in(2),
        ..Kernel::default()
    }
}

/// One run. What went wrong, or how many bytes went through the ring.
pub fn run<W: World + Send>(
    seed: u64,
    broken: Option<Rule>,
    world: W,
) -> Result<u64, &'static str> {
    let random = Random::new(seed, 254);
    let stage = Stage {
        world: Mutex::new(world),
        sender: Sender::default(),
        receiver: Receiver::default(),
        seed,
        broken,
        turn: AtomicUsize::new(NOBODY),
        killed: Default::default(),
        ended: Default::default(),
        director: thread::current(),
    };
    let wrong = thread::scope(|scope| {
        let stage = &stage;
        let threads: [Thread; THREADS] = std::array::from_fn(|me| {
            let act = move || {
                let actor = Actor { stage, me };
                let acted = catch_unwind(AssertUnwindSafe(|| {
                    actor.await_turn();
                    actor.act();
                }));
                match acted {
                    Err(panic) if !panic.is::<Killed>() => {
                        actor.wrong("a panic");
                    }
                    _ => {}
                }
                stage.ended[me].store(true, SeqCst);
                stage.turn.store(NOBODY, SeqCst);
                stage.director.unpark();
            };
            scope.spawn(act).thread().clone()
        });
        let goes_on = |me: usize| !stage.ended[me].load(SeqCst);
        let takes_turn = |me: usize| {
            stage.turn.store(me, SeqCst);
            threads[me].unpark();
            while stage.turn.load(SeqCst) != NOBODY {
                thread::park();
            }
        };
        let kill = |me: usize| {
            stage.killed[me].store(true, SeqCst);
            while goes_on(me) {
                takes_turn(me);
            }
        };
        // Who dies, and when.
        let victim = random.below(4);
        let dies_at = random.below(1500) as u32;
        for turn in 0..TURNS_MOST {
            if turn == dies_at && victim < 2 {
                let sender_dies = victim == 0 && goes_on(0);
                if sender_dies {
                    kill(0);
                    kill(1);
                    stage.world.lock().unwrap().sender_died();
                } else if goes_on(2) {
                    kill(2);
                }
            }
            if random.one_in(3) {
                let mut world = stage.world.lock().unwrap();
                for _ in 0..random.length() {
                    world.kernel().arrive();
                }
            }
            stage.world.lock().unwrap().pass();
            let me = random.below(THREADS as u64) as usize;
            if goes_on(me) {
                takes_turn(me);
            }
            let wrong = stage.world.lock().unwrap().record().wrong;
            if wrong.is_some() || !(0..THREADS).any(goes_on) {
                (0..THREADS).for_each(kill);
                return wrong;
            }
        }
        (0..THREADS).for_each(kill);
        Some("it never ends")
    });
    if let Some(wrong) = wrong {
        return Err(wrong);
    }
    let mut world = stage.world.lock().unwrap();
    let Record { sent, got, .. } = *world.record();
    let in_ring = stage.sender.in_ring();
    drop(world);
    // A receiver that has died: what it has not taken does not count as taken.
    if in_ring && got < sent {
        let judge = Judge(&stage);
        let (sender, receiver) = (&stage.sender, &stage.receiver);
        let side = Side { engine: &judge, who: Who::Sender, sender, receiver, broken: None };
        if side.drained() && side.all_taken() {
            return Err("what was not taken counts as taken");
        }
    }
    Ok(stage.world.lock().unwrap().records())
}

/// Looks on when all is over.
struct Judge<'a, W>(&'a Stage<W>);

impl<W: World> Engine for Judge<'_, W> {
    type World = W;
    fn op(&self, access: impl FnOnce(&mut W) -> u64) -> u64 {
        let mut world = self.0.world.lock().unwrap();
        world.now(Who::Sender);
        access(&mut world)
    }
    fn wait(&self, mut until: impl FnMut(&mut W) -> bool) -> bool {
        until(&mut self.0.world.lock().unwrap())
    }
}
