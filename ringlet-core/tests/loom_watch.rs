//! Connections in epoll sets, in every interleaving (see loom.rs): `RUSTFLAGS="--cfg loom" cargo test --release -p ringlet-core --test loom_watch`.
//!
//! The set, its kernel's part and what a wait does are small copies of ringlet/src/socket/epoll; the ring, the wishes, the words of
//! contexts, what was told and who rests are the shipped ones. An event that is lost is a deadlock.
#![cfg(loom)]

#[allow(dead_code)] // loom.rs uses the rest
mod model;

use loom::sync::{Arc, Condvar, Mutex, MutexGuard};
use loom::thread;
use model::{Memory, Wishes, model, model_of};
use ringlet_core::layout::{WANT_BYTE, WANT_READY};
use ringlet_core::memory::{Buffer, Buffers};
use ringlet_core::ready::{Awake, Board};
use ringlet_core::ring::{Next, Rx, Tx};
use ringlet_core::sync::{AtomicU32, AtomicU64, Ordering};
use ringlet_core::wait::*;
use ringlet_core::watch::{Rest, Told};

/// The rules that a test may leave out.
#[derive(Clone, Copy, Default)]
struct Without {
    /// Who takes doorbells asks for those who rest.
    asking_who_rests: bool,
    /// A watch rests before it wishes and looks.
    resting_first: bool,
    /// Who takes a wake-up has senders ring again for those that sleep on.
    renewing: bool,
    /// Who arms a registration again wakes a sleeper.
    kicking: bool,
    /// A sender announces before it looks at the flag.
    announcing_first: bool,
    /// And before it grants what was wished for.
    announcing_before_the_grant: bool,
    /// Who is about to sleep looks at the board.
    looking_at_the_board: bool,
    /// Who says that he is awake asks whether others sleep.
    asking_who_sleeps: bool,
    /// Who is about to sleep collects before it wishes.
    collecting_first: bool,
}

/// Where a sender stops.
#[derive(Clone, Copy, PartialEq)]
enum Stop {
    BeforeTheGrant,
    BeforeTheFlag,
    Never,
}

/// How the set is used.
#[derive(Clone, Copy, Default)]
struct How {
    /// What a look finds idle rests.
    cools: bool,
    /// The sender rings the set's eventfd, not by a byte.
    by_event: bool,
    /// What rests is announced on the set's ready board.
    by_board: bool,
    /// By a stranger, who sees there whether it is awake, and rings by its name.
    by_name: bool,
    one_shot: bool,
    without: Without,
}

/// What a kernel's set knows of us: that bytes have come on the connection, which it tells once, and its eventfd.
#[derive(Default)]
struct Kernel {
    edge: bool,
    rung: bool,
    /// Something of the program's own, by level: no thread need wait any more.
    over: bool,
}

#[derive(Default)]
struct KernelSet {
    state: Mutex<Kernel>,
    news: Condvar,
}

#[derive(Default)]
struct Watch {
    hot: bool,
    fresh: bool,
    disabled: bool,
    told: Told,
}

struct Set {
    how: How,
    watch: Mutex<Watch>,
    rests: Rest,
    flag: AtomicU64,
    awake: AtomicU64,
    board: [AtomicU64; 3],
    taken: AtomicU32,
    kernel: KernelSet,
}

/// The receiver's end of one connection, and the sets that it is in.
struct Connection {
    memory: Arc<Memory>,
    rx: Rx,
    receive_lock: Mutex<()>,
    wishes: Wishes,
    /// Doorbells that lie in the kernel.
    bytes: Mutex<usize>,
    sets: Vec<Set>,
}

struct Sender {
    connection: Arc<Connection>,
    tx: Tx,
    rung: u64,
}

impl Sender {
    fn new(sets: &[How]) -> (Sender, Arc<Connection>) {
        let sets = sets.iter().map(|how| Set {
            how: *how,
            watch: Mutex::new(Watch { hot: true, ..Watch::default() }),
            rests: Rest::default(),
            flag: AtomicU64::new(0),
            awake: AtomicU64::new(u64::from(how.by_name)),
            board: std::array::from_fn(|_| AtomicU64::new(0)),
            taken: AtomicU32::new(0),
            kernel: KernelSet::default(),
        });
        let connection = Arc::new(Connection {
            memory: Arc::new(Memory::new(128)),
            rx: Rx::default(),
            receive_lock: Mutex::new(()),
            wishes: Wishes::default(),
            bytes: Mutex::new(0),
            sets: sets.collect(),
        });
        for set in connection.sets.iter().filter(|set| set.how.by_name) {
            // At rest, as a stranger's connection of many is.
            let wish = || connection.wishes.wish().want(WANT_READY);
            set.watch.lock().unwrap().hot = !set.rests.begin(wish, || false);
        }
        (Sender { connection: connection.clone(), tx: Tx::default(), rung: 0 }, connection)
    }

    /// `sides::wake_receiver`.
    fn send(&mut self) {
        self.send_until(Stop::Never);
    }

    fn send_until(&mut self, stop: Stop) {
        let mut byte = [1];
        let list = [Buffer { base: byte.as_mut_ptr(), len: 1 }];
        // SAFETY: `byte` is valid for its length.
        let mut from = unsafe { Buffers::new(&list) };
        assert_eq!(self.tx.push(&*self.connection.memory, &mut from), 1);
        let connection = &self.connection;
        let set = &connection.sets[0];
        let without = set.how.without;
        let first = |how| {
            if how & WANT_READY != 0
                && !without.announcing_first
                && !without.announcing_before_the_grant
            {
                set.board().announce(LANE);
            }
        };
        let how = match stop {
            Stop::BeforeTheGrant => return,
            _ => connection.wishes.wish().granted_by_sender_behind(first),
        };
        let announced = how & WANT_READY != 0;
        if stop == Stop::BeforeTheFlag {
            return;
        }
        if announced && without.announcing_before_the_grant {
            set.board().announce(LANE);
        }
        if set.how.by_event
            && let Some(value) = armed(&set.flag, self.rung)
        {
            self.rung = value;
            set.kick();
        }
        if announced
            && set.how.by_name
            && let Some(sleep) = Awake(&set.awake).asleep(self.rung)
        {
            set.kick();
            self.rung = sleep;
        }
        if announced && without.announcing_first {
            set.board().announce(LANE);
        }
        if how & WANT_BYTE != 0 {
            *connection.bytes.lock().unwrap() += 1;
            for set in &connection.sets {
                set.kernel.state.lock().unwrap().edge = true;
                set.kernel.news.notify_all();
            }
        }
    }
}

impl Set {
    fn board(&self) -> Board<'_> {
        let [top, middle, lanes] = &self.board;
        Board { top, middle: std::slice::from_ref(middle), lanes: std::slice::from_ref(lanes) }
    }

    /// `bells::kick`.
    fn kick(&self) {
        self.kernel.state.lock().unwrap().rung = true;
        self.kernel.news.notify_all();
    }

    fn kick_sleepers(&self) {
        if sleepers(&self.flag) {
            self.kick();
        }
    }

    /// What the kernel tells: of the connection, of the eventfd.
    fn ask_kernel(&self, bytes: &Mutex<usize>, sleeps: bool) -> (bool, bool) {
        let mut kernel = self.kernel.state.lock().unwrap();
        loop {
            let of_connection = std::mem::take(&mut kernel.edge) && *bytes.lock().unwrap() > 0;
            let of_bell = std::mem::take(&mut kernel.rung);
            if of_connection || of_bell || kernel.over || !sleeps {
                return (of_connection, of_bell);
            }
            kernel = self.kernel.news.wait(kernel).unwrap();
        }
    }

    /// What a poll on the set itself waits for.
    fn await_readable(&self, bytes: &Mutex<usize>) {
        let mut kernel = self.kernel.state.lock().unwrap();
        while !kernel.rung && !(kernel.edge && *bytes.lock().unwrap() > 0) {
            kernel = self.kernel.news.wait(kernel).unwrap();
        }
    }

    /// `hot::collect`.
    fn collect(&self, watch: &mut Watch) {
        if self.how.by_board && self.board().announced() {
            self.board().collect(|lane| {
                assert_eq!(lane, LANE);
                self.heat(watch);
            });
        }
    }

    /// `bells::disarm`.
    fn disarm(&self) {
        disarm(&self.flag);
        if self.how.by_name {
            let asks = !self.how.without.asking_who_sleeps;
            Awake(&self.awake).wakes(|| asks && sleepers(&self.flag));
        }
    }

    /// `hot::heat`.
    fn heat(&self, watch: &mut Watch) {
        if !watch.hot {
            self.rests.end();
            watch.hot = true;
        }
    }
}

impl Connection {
    /// `look::look`, of which the position is told if it is reported.
    fn look(&self, watch: &Watch) -> Option<u64> {
        let (ready, seen) = watch
            .told
            .look(&self.rx, &*self.memory, || self.rx.has_bytes(&*self.memory) && !watch.disabled);
        (ready && (watch.fresh || seen.more)).then_some(seen.position)
    }

    fn any_ready(&self, set: &Set) -> bool {
        let mut watch = set.watch.lock().unwrap();
        if !set.how.without.looking_at_the_board {
            set.collect(&mut watch);
        }
        watch.hot && self.look(&watch).is_some()
    }

    /// `arm::arm`.
    fn arm(&self, set: &Set) {
        arm(&set.flag);
        if set.how.by_name {
            Awake(&set.awake).sleeps();
            if !set.how.without.collecting_first {
                set.collect(&mut set.watch.lock().unwrap());
            }
        }
        if set.watch.lock().unwrap().hot && !set.how.by_event {
            self.wishes.wish().want(WANT_BYTE);
        }
    }

    /// `harvest::harvest`.
    fn harvest(&self, set: &Set) -> bool {
        let mut watch = set.watch.lock().unwrap();
        set.collect(&mut watch);
        if !watch.hot {
            return false;
        }
        if let Some(position) = self.look(&watch) {
            watch.told.set(position);
            watch.fresh = false;
            watch.disabled = set.how.one_shot;
            return true;
        }
        if set.how.cools {
            let how = if set.how.by_board { WANT_READY } else { WANT_BYTE };
            let wish = || self.wishes.wish().want(how);
            let found = || self.look(&watch).is_some();
            watch.hot = if set.how.without.resting_first {
                wish();
                let found = found();
                found || !set.rests.begin(|| {}, || false)
            } else {
                !set.rests.begin(wish, found)
            };
        }
        false
    }

    /// `wait::wait`: true if the connection is ready. `sleeps`: it does until then.
    fn wait(&self, set: &Set, sleeps: bool) -> bool {
        let told = self.wait_in(set, sleeps);
        if set.taken.swap(0, Ordering::AcqRel) != 0 && sleepers(&set.flag) && self.any_ready(set) {
            set.kick();
        }
        told
    }

    fn wait_in(&self, set: &Set, sleeps: bool) -> bool {
        loop {
            if self.harvest(set) {
                return true;
            }
            if !sleeps {
                self.hear(set, set.ask_kernel(&self.bytes, false), 0);
                return self.harvest(set);
            }
            self.arm(set);
            if !self.any_ready(set) {
                self.hear(set, set.ask_kernel(&self.bytes, true), 1);
            }
            set.disarm();
            if set.kernel.state.lock().unwrap().over {
                return false;
            }
        }
    }

    /// A wait on a set in which this one is: that sleeps while the kernel says that nothing can be read here (`nested::settle_nested`).
    fn wait_outside(&self, set: &Set) -> bool {
        let mut armed = false;
        loop {
            set.kernel.state.lock().unwrap().rung = false;
            if armed {
                set.disarm();
            }
            self.arm(set);
            armed = true;
            if self.any_ready(set) && !set.how.without.kicking {
                set.kick();
            }
            set.await_readable(&self.bytes);
            if self.wait(set, false) {
                set.disarm();
                return true;
            }
        }
    }

    /// `kernel::translate`. `mine`: of the sleepers.
    fn hear(&self, set: &Set, (of_connection, of_bell): (bool, bool), mine: u64) {
        if of_connection {
            set.heat(&mut set.watch.lock().unwrap());
        }
        let told = of_connection || of_bell;
        if told && !set.how.without.renewing && sleeper_count(&set.flag) > mine {
            self.arm(set);
            set.disarm();
            set.taken.store(1, Ordering::Release);
        }
    }

    /// `control::control`, by which a registration is armed again.
    fn modify(&self, set: &Set) {
        let mut watch = set.watch.lock().unwrap();
        (watch.disabled, watch.fresh) = (false, true);
        set.heat(&mut watch);
        drop(watch);
        if !set.how.without.kicking {
            set.kick_sleepers();
        }
    }

    /// `registration::end_rests`.
    fn end_rests(&self) -> bool {
        self.sets.iter().filter(|set| set.rests.is()).all(|set| {
            let Ok(mut watch) = set.watch.try_lock() else { return false };
            set.heat(&mut watch);
            drop(watch);
            set.kick_sleepers();
            true
        })
    }

    fn pop(&self) -> bool {
        let mut byte = [0];
        let list = [Buffer { base: byte.as_mut_ptr(), len: 1 }];
        // SAFETY: `byte` is valid for its length.
        match self.rx.pop(&*self.memory, &mut unsafe { Buffers::new(&list) }) {
            Next::Empty => false,
            Next::Bytes(1, _) => true,
            other => panic!("{other:?}"),
        }
    }

    /// One record; takes doorbells away when the ring is empty (`doorbells::look_at_kernel`).
    fn receive(&self) -> bool {
        let _held: MutexGuard<()> = self.receive_lock.lock().unwrap();
        if self.pop() {
            return true;
        }
        let count = *self.bytes.lock().unwrap();
        if count == 0 || !self.sets[0].how.without.asking_who_rests && !self.end_rests() {
            return false;
        }
        if self.sets.iter().any(|set| sleepers(&set.flag)) {
            self.wishes.wish().want(WANT_BYTE);
        }
        if self.rx.ready(&*self.memory) {
            return self.pop();
        }
        *self.bytes.lock().unwrap() -= count;
        false
    }

    /// Waits until it has received a record.
    fn serve(&self, set: &Set) {
        while !(self.wait(set, true) && self.receive()) {}
    }
}

/// Runs an ignored test that must end in a deadlock, which takes its process with it.
fn deadlocks(test: &str) {
    let this = std::env::current_exe().unwrap();
    let output = std::process::Command::new(this)
        .args(["--ignored", "--nocapture", "--exact", test])
        .env("RUST_BACKTRACE", "0")
        .output()
        .unwrap();
    assert!(!output.status.success());
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("deadlock"), "{said}");
}

/// A thread sleeps in the last set, while another one does `beside`, which may receive a record; then there is one for the sleeper.
fn sleeper_beside(sets: &'static [How], beside: fn(&Connection) -> bool) {
    model(move || {
        let (mut sender, connection) = Sender::new(sets);
        let sleeper = connection.clone();
        let sleeping = thread::spawn(move || sleeper.serve(sleeper.sets.last().unwrap()));
        let other = connection.clone();
        let passing = thread::spawn(move || beside(&other));
        sender.send();
        if passing.join().unwrap() {
            sender.send();
        }
        sleeping.join().unwrap();
    });
}

const COOLS: How = How {
    cools: true,
    by_event: false,
    by_board: false,
    by_name: false,
    one_shot: false,
    without: Without {
        asking_who_rests: false,
        resting_first: false,
        renewing: false,
        kicking: false,
        announcing_first: false,
        announcing_before_the_grant: false,
        looking_at_the_board: false,
        asking_who_sleeps: false,
        collecting_first: false,
    },
};

/// It rests, and is announced on the board.
const BY_BOARD: How = How { by_event: true, by_board: true, ..COOLS };

/// The same by a stranger.
const BY_NAME: How = How { by_board: true, by_name: true, ..COOLS };

/// Of the one connection.
const LANE: usize = 5;

/// As a program that reads until there is no more, without having been told.
fn receives(connection: &Connection) -> bool {
    (0..2).any(|_| connection.receive()) && {
        connection.receive();
        true
    }
}

#[test]
fn watch_that_rests_beside_a_receive() {
    sleeper_beside(&[COOLS], receives);
}

#[test]
#[ignore = "deadlocks, as the next one checks"]
fn doorbell_taken_from_who_rests() {
    const HOW: How = How { without: Without { asking_who_rests: true, ..COOLS.without }, ..COOLS };
    sleeper_beside(&[HOW], receives);
}

#[test]
fn who_takes_doorbells_must_ask_who_rests() {
    deadlocks("doorbell_taken_from_who_rests");
}

#[test]
#[ignore = "deadlocks, as the next one checks"]
fn rest_said_after_the_wish() {
    const HOW: How = How { without: Without { resting_first: true, ..COOLS.without }, ..COOLS };
    sleeper_beside(&[HOW], receives);
}

#[test]
fn who_rests_must_say_so_before_it_wishes() {
    deadlocks("rest_said_after_the_wish");
}

/// Asks without waiting, and reads until there is no more, if it is told.
fn polls(connection: &Connection) -> bool {
    let mut got = false;
    for _ in 0..2 {
        if connection.wait(&connection.sets[0], false) {
            while connection.receive() {
                got = true;
            }
        }
        if got {
            break;
        }
    }
    got
}

#[test]
fn watch_that_rests_beside_one_who_polls() {
    sleeper_beside(&[COOLS], polls);
}

/// As with EPOLLEXCLUSIVE, or in two processes' worth of threads: each has a set of its own.
#[test]
fn watch_that_rests_beside_one_in_another_set() {
    const HOT: How = How { cools: false, ..COOLS };
    sleeper_beside(&[HOT, COOLS], polls);
}

#[test]
fn watch_that_is_looked_at_beside_one_who_polls() {
    const HOT: How = How { cools: false, ..COOLS };
    sleeper_beside(&[HOT], polls);
}

#[test]
fn eventfd_beside_one_who_polls() {
    const HOW: How = How { cools: false, by_event: true, ..COOLS };
    sleeper_beside(&[HOW], polls);
}

#[test]
#[ignore = "deadlocks, as the next one checks"]
fn wake_up_taken_in_silence() {
    const HOW: How = How {
        cools: false,
        by_event: true,
        without: Without { renewing: true, ..COOLS.without },
        ..COOLS
    };
    sleeper_beside(&[HOW], polls);
}

#[test]
fn who_takes_a_wake_up_must_renew_it() {
    deadlocks("wake_up_taken_in_silence");
}

/// Two threads serve one connection by one-shot: a record each, and never both at once.
fn one_shot(how: How) {
    model(move || {
        let (mut sender, connection) = Sender::new(&[How { one_shot: true, ..how }]);
        let serving = Arc::new(AtomicU32::new(0));
        let threads: Vec<_> = (0..2)
            .map(|_| {
                let (connection, serving) = (connection.clone(), serving.clone());
                thread::spawn(move || {
                    let set = &connection.sets[0];
                    let mut got = false;
                    while !got && connection.wait(set, true) {
                        assert_eq!(serving.swap(1, Ordering::SeqCst), 0, "told to both");
                        got = connection.receive();
                        serving.store(0, Ordering::SeqCst);
                        connection.modify(set);
                    }
                })
            })
            .collect();
        sender.send();
        sender.send();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
}

#[test]
fn one_shot_with_two_sleepers() {
    one_shot(How { cools: false, ..COOLS });
}

#[test]
fn one_shot_that_rests() {
    one_shot(COOLS);
}

#[test]
#[ignore = "deadlocks, as the next one checks"]
fn armed_again_in_silence() {
    one_shot(How { cools: false, without: Without { kicking: true, ..COOLS.without }, ..COOLS });
}

#[test]
fn who_arms_again_must_wake_a_sleeper() {
    deadlocks("armed_again_in_silence");
}

/// Two threads send a record each. One thread sleeps in the set, two ask without waiting; whoever is told reads until there is no more.
fn senders_and_waiters(how: How) {
    model_of(2, move || {
        let (sender, connection) = Sender::new(&[how]);
        let (sender, left) = (Arc::new(Mutex::new(sender)), Arc::new(AtomicU32::new(2)));
        let serve = |connection: Arc<Connection>, left: Arc<AtomicU32>, sleeps: bool| {
            move || {
                let set = &connection.sets[0];
                while connection.wait(set, sleeps) {
                    while connection.receive() {
                        if left.fetch_sub(1, Ordering::AcqRel) == 1 {
                            set.kernel.state.lock().unwrap().over = true;
                            set.kernel.news.notify_all();
                        }
                    }
                    if !sleeps || left.load(Ordering::Acquire) == 0 {
                        break;
                    }
                }
            }
        };
        let sending = sender.clone();
        let threads = [
            thread::spawn(serve(connection.clone(), left.clone(), true)),
            thread::spawn(serve(connection.clone(), left.clone(), false)),
            thread::spawn(move || sending.lock().unwrap().send()),
        ];
        sender.lock().unwrap().send();
        serve(connection, left, false)();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
}

#[test]
fn two_senders_and_three_waiters() {
    senders_and_waiters(How { cools: false, ..COOLS });
}

#[test]
fn two_senders_and_three_waiters_where_it_rests() {
    senders_and_waiters(COOLS);
}

#[test]
fn two_senders_and_three_waiters_by_an_eventfd() {
    senders_and_waiters(How { cools: false, by_event: true, ..COOLS });
}

#[test]
fn two_senders_and_three_waiters_by_the_board() {
    senders_and_waiters(BY_BOARD);
}

#[test]
fn board_beside_one_who_polls() {
    sleeper_beside(&[BY_BOARD], polls);
}

#[test]
fn board_beside_a_receive() {
    sleeper_beside(&[BY_BOARD], receives);
}

#[test]
fn one_shot_by_the_board() {
    one_shot(BY_BOARD);
}

/// As by forks that share the connection: one is told by the board, the other one by a byte.
#[test]
fn board_beside_one_in_another_set() {
    sleeper_beside(&[BY_BOARD, COOLS], polls);
}

#[test]
#[ignore = "deadlocks, as the next one checks"]
fn announced_behind_the_flag() {
    const HOW: How =
        How { without: Without { announcing_first: true, ..COOLS.without }, ..BY_BOARD };
    sleeper_beside(&[HOW], nothing);
}

#[test]
fn a_sender_must_announce_before_it_looks_at_the_flag() {
    deadlocks("announced_behind_the_flag");
}

/// A sender stops in the midst (it is killed, or a handler jumps out of it); one that shares the connection with it sends too.
fn stopped_sender(how: How, stop: Stop) {
    model(move || {
        let (mut sender, connection) = Sender::new(&[how]);
        let sleeper = connection.clone();
        let sleeping = thread::spawn(move || sleeper.serve(&sleeper.sets[0]));
        sender.send_until(stop);
        sender.send();
        sleeping.join().unwrap();
    });
}

#[test]
fn sender_that_stops_is_made_up_for_by_the_next() {
    for stop in [Stop::BeforeTheGrant, Stop::BeforeTheFlag] {
        stopped_sender(BY_BOARD, stop);
    }
}

#[test]
#[ignore = "deadlocks, as the next one checks"]
fn granted_before_it_is_announced() {
    const HOW: How =
        How { without: Without { announcing_before_the_grant: true, ..COOLS.without }, ..BY_BOARD };
    stopped_sender(HOW, Stop::BeforeTheFlag);
}

#[test]
fn a_sender_must_announce_before_it_grants() {
    deadlocks("granted_before_it_is_announced");
}

#[test]
#[ignore = "deadlocks, as the next one checks"]
fn asleep_beside_a_full_board() {
    const HOW: How =
        How { without: Without { looking_at_the_board: true, ..COOLS.without }, ..BY_BOARD };
    sleeper_beside(&[HOW], nothing);
}

#[test]
fn who_sleeps_must_look_at_the_board() {
    deadlocks("asleep_beside_a_full_board");
}

fn nothing(_: &Connection) -> bool {
    false
}

#[test]
fn two_strangers_and_three_waiters() {
    senders_and_waiters(BY_NAME);
}

#[test]
fn rings_by_name_beside_one_who_polls() {
    sleeper_beside(&[BY_NAME], polls);
}

#[test]
fn rings_by_name_beside_a_receive() {
    sleeper_beside(&[BY_NAME], receives);
}

#[test]
fn rings_by_name_with_one_shot() {
    one_shot(BY_NAME);
}

#[test]
#[ignore = "deadlocks, as the next one checks"]
fn collected_behind_the_wishes() {
    const HOW: How =
        How { without: Without { collecting_first: true, ..COOLS.without }, ..BY_NAME };
    sleeper_beside(&[HOW], polls);
}

#[test]
fn who_sleeps_must_collect_before_it_wishes() {
    deadlocks("collected_behind_the_wishes");
}

#[test]
#[ignore = "deadlocks, as the next one checks"]
fn awake_beside_one_who_sleeps() {
    const HOW: How =
        How { without: Without { asking_who_sleeps: true, ..COOLS.without }, ..BY_NAME };
    sleeper_beside(&[HOW], polls_and_looks_on);
}

/// What it has received rests again.
fn polls_and_looks_on(connection: &Connection) -> bool {
    let got = polls(connection);
    if connection.wait(&connection.sets[0], false) {
        while connection.receive() {}
        return true;
    }
    got
}

#[test]
fn rings_by_name_beside_one_who_looks_on() {
    sleeper_beside(&[BY_NAME], polls_and_looks_on);
}

#[test]
fn who_says_that_he_is_awake_must_ask_who_sleeps() {
    deadlocks("awake_beside_one_who_sleeps");
}

/// Two senders announce two connections of one word while they are collected: none is lost, at whatever level the other one was.
#[test]
fn two_announce_at_once() {
    model(|| {
        let words: Arc<[AtomicU64; 3]> = Arc::new(std::array::from_fn(|_| AtomicU64::new(0)));
        fn board(words: &[AtomicU64; 3]) -> Board<'_> {
            let [top, middle, lanes] = words;
            Board { top, middle: std::slice::from_ref(middle), lanes: std::slice::from_ref(lanes) }
        }
        let senders: Vec<_> = (0..2)
            .map(|lane| {
                let words = words.clone();
                thread::spawn(move || board(&words).announce(lane))
            })
            .collect();
        let mut found = 0u32;
        board(&words).collect(|lane| found |= 1 << lane);
        senders.into_iter().for_each(|sender| sender.join().unwrap());
        if board(&words).announced() {
            board(&words).collect(|lane| found |= 1 << lane);
        }
        assert_eq!(found, 0b11);
    });
}

/// A record comes while a registration is armed anew and asked for by two threads: it is told once.
#[test]
fn record_beside_a_look_is_told_once() {
    for how in [How { cools: false, ..COOLS }, COOLS, BY_BOARD] {
        model(move || {
            let (mut sender, connection) = Sender::new(&[how]);
            let told = Arc::new(AtomicU32::new(0));
            let asks = |connection: Arc<Connection>, told: Arc<AtomicU32>| {
                move || {
                    for _ in 0..2 {
                        told.fetch_add(
                            connection.wait(&connection.sets[0], false) as u32,
                            Ordering::AcqRel,
                        );
                    }
                }
            };
            connection.modify(&connection.sets[0]);
            let other = thread::spawn(asks(connection.clone(), told.clone()));
            let sending = thread::spawn(move || sender.send());
            asks(connection.clone(), told.clone())();
            other.join().unwrap();
            sending.join().unwrap();
            let last = connection.wait(&connection.sets[0], false) as u32;
            assert_eq!(told.load(Ordering::Acquire) + last, 1, "not told once");
        });
    }
}

/// The set is in another one, in which a thread sleeps.
fn nested(how: How) {
    model(move || {
        let (mut sender, connection) = Sender::new(&[How { cools: false, ..how }]);
        let sleeper = connection.clone();
        let sleeping =
            thread::spawn(
                move || {
                    while !(sleeper.wait_outside(&sleeper.sets[0]) && sleeper.receive()) {}
                },
            );
        let other = connection.clone();
        let passing = thread::spawn(move || receives(&other));
        sender.send();
        if passing.join().unwrap() {
            sender.send();
        }
        sleeping.join().unwrap();
    });
}

#[test]
fn set_in_another_one() {
    nested(COOLS);
}

#[test]
fn set_in_another_one_by_an_eventfd() {
    nested(How { by_event: true, ..COOLS });
}

#[test]
#[ignore = "deadlocks, as the next one checks"]
fn inner_set_left_unreadable() {
    nested(How { without: Without { kicking: true, ..COOLS.without }, ..COOLS });
}

#[test]
fn an_inner_set_must_be_readable_while_it_is_ready() {
    deadlocks("inner_set_left_unreadable");
}
