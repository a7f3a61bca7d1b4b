//! A port that dies at any step. A process with a port is killed at one system call after another, from its coming on, and at one instruction after
//! another while it sends and receives. One model tells each time of two ports that live: each broadcast of theirs is heard once, in order; of the
//! dead one a beginning of what it sent, whole and in order; its address goes to another one, and back to the next that comes with it.
//!
//! `RINGLET_MOMENTS=all` takes each moment, else it is some of each kind, of which the first is drawn by the `SEED` that is printed.

mod member;

use std::cell::Cell;
use std::fs;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};

use member::{BROADCAST, Heard, Member, mac, message, until};
use nix::sys::ptrace;
use nix::sys::signal::{Signal, raise};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use ringlet_ethernet::frame::HEAD_BYTES;
use ringlet_ethernet::room::Rules;
use ringlet_ethernet::{Mac, Options, Policy, Port, Room};

const FOLDER: &str = "RINGLET_DYING";
const DIES: u16 = 9;
/// Of each kind, in a usual run.
const MOMENTS: u64 = 10;

/// What the port that is to die sends, by number, and to whom.
fn sends(one: Mac, other: Mac) -> [Mac; 4] {
    [BROADCAST, one, other, BROADCAST]
}

/// In a process of its own, which is traced: stops for a signal before it comes, and before and behind what it does once it is there.
#[test]
#[ignore = "is run, and killed, by the others"]
fn who_dies() {
    let Ok(folder) = std::env::var(FOLDER) else { return };
    let room = Room::open(Path::new(&folder), "net").unwrap();
    raise(Signal::SIGUSR1).unwrap();
    let options = Options::new("dies", mac(DIES));
    let (port, mut queues) = Port::open(room, options, |_| ()).unwrap();
    let queue = &mut queues[0];
    until("two others", || {
        queue.begin();
        queue.receive(64, |_| Ok(()));
        port.others() == 2
    });
    let [one, other] = [mac(1), mac(2)];
    let messages = sends(one, other).into_iter().zip(0..);
    let messages: Vec<(u64, Mac, Vec<u8>)> =
        messages.map(|(to, number)| (number, to, message(to, mac(DIES), number))).collect();
    raise(Signal::SIGUSR1).unwrap();
    for (number, to, bytes) in messages {
        queue.begin();
        match number {
            // (Written where it is read, and behind that a look whether anybody sleeps.)
            1 | 2 => {
                if let Ok(mut place) = queue.reserve(to, bytes.len()) {
                    place.write(0, &bytes);
                    place.send_quietly().unwrap();
                    queue.flush();
                }
            }
            _ => queue.send(&bytes),
        }
        // (Takes in place, and gives back.)
        queue.hold(4, |arrived| {
            assert!(arrived.len > HEAD_BYTES);
            Ok(())
        });
        queue.release();
    }
    raise(Signal::SIGUSR1).unwrap();
}

/// Those of this thread alone: other tests have children, too.
const OURS: WaitPidFlag = WaitPidFlag::__WALL.union(WaitPidFlag::__WNOTHREAD);

enum Stop {
    Signal(Pid),
    Counted,
    Ended,
}

struct Traced {
    child: Child,
    has_ended: Cell<bool>,
}

impl Traced {
    /// The process, and the thread whose port is to come, which has stopped before that.
    fn begin(folder: &Path) -> (Traced, Pid) {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["who_dies", "--exact", "--ignored", "--nocapture"])
            .env(FOLDER, folder)
            .stdin(Stdio::null())
            .stdout(Stdio::null());
        // SAFETY: one system call.
        unsafe { command.pre_exec(|| Ok(ptrace::traceme()?)) };
        let child = command.spawn().unwrap();
        let pid = Pid::from_raw(child.id() as i32);
        assert!(matches!(waitpid(pid, None).unwrap(), WaitStatus::Stopped(_, Signal::SIGTRAP)));
        let options = ptrace::Options::PTRACE_O_TRACECLONE
            | ptrace::Options::PTRACE_O_TRACESYSGOOD
            | ptrace::Options::PTRACE_O_EXITKILL;
        ptrace::setoptions(pid, options).unwrap();
        ptrace::cont(pid, None).unwrap();
        let traced = Traced { child, has_ended: Cell::new(false) };
        match traced.goes_on(false, &mut { u64::MAX }) {
            Stop::Signal(thread) => (traced, thread),
            _ => panic!("it has not begun"),
        }
    }

    /// Lets all its threads run until one stops for the signal, `left` stops at system calls have passed, or it ends.
    fn goes_on(&self, at_calls: bool, left: &mut u64) -> Stop {
        let on = |pid, signal: Option<Signal>| {
            // (It may have ended meanwhile.)
            let _ = if at_calls { ptrace::syscall(pid, signal) } else { ptrace::cont(pid, signal) };
        };
        loop {
            match waitpid(None, Some(OURS)).unwrap() {
                WaitStatus::Stopped(pid, Signal::SIGUSR1) => return Stop::Signal(pid),
                WaitStatus::PtraceSyscall(pid) => {
                    *left -= 1;
                    if *left == 0 {
                        return Stop::Counted;
                    }
                    on(pid, None);
                }
                // (A thread that begins stops for that.)
                WaitStatus::Stopped(pid, Signal::SIGSTOP) | WaitStatus::PtraceEvent(pid, ..) => {
                    on(pid, None);
                }
                WaitStatus::Stopped(pid, signal) => on(pid, Some(signal)),
                WaitStatus::Exited(pid, status) if pid == self.pid() => {
                    self.has_ended.set(true);
                    assert_eq!(status, 0, "the port that was to die has failed");
                    return Stop::Ended;
                }
                _ => {}
            }
        }
    }

    /// So many instructions of that thread's, and its system calls as one each. False: it has stopped for the signal before.
    fn steps(&self, thread: Pid, count: u64) -> bool {
        (0..count).all(|_| {
            ptrace::step(thread, None).unwrap();
            let status = waitpid(thread, Some(WaitPidFlag::__WALL)).unwrap();
            assert!(matches!(status, WaitStatus::Stopped(..)), "{status:?}");
            matches!(status, WaitStatus::Stopped(_, Signal::SIGTRAP))
        })
    }

    fn pid(&self) -> Pid {
        Pid::from_raw(self.child.id() as i32)
    }

    fn dies(mut self) {
        // (Its number may be another one's by then.)
        if !self.has_ended.get() {
            let _ = self.child.kill();
        }
        // (Until none of its threads is left.)
        while waitpid(None, Some(OURS)).is_ok() {}
    }
}

/// Two ports that live, and what is known of what they hear.
struct Model {
    folder: tempfile::TempDir,
    members: [Member; 2],
    sent: u64,
    deaths: u64,
}

impl Model {
    fn new() -> Model {
        let folder = tempfile::tempdir().unwrap();
        let rules = Rules { addresses: Policy::Moving, storm: 0, bridge: false };
        Room::create(folder.path(), "net", rules, None).unwrap();
        let room = Room::open(folder.path(), "net").unwrap();
        let members = [1, 2].map(|number| Member::new(&room, number));
        members.iter().for_each(|member| member.meets(1));
        Model { folder, members, sent: 0, deaths: 0 }
    }

    /// Broadcasts of both.
    fn speak(&mut self) {
        for member in &self.members {
            member.send(BROADCAST, member.mac, self.sent);
        }
        self.sent += 1;
    }

    /// The third one has sent all: what is not taken yet goes with a port that ends.
    fn hears_all(&self) {
        for member in &self.members {
            let is_theirs = |heard: &&Heard| heard.from == mac(DIES) && heard.number != u64::MAX;
            until("frames of one that lives", || {
                member.heard().iter().filter(is_theirs).count() == 3
            });
        }
    }

    /// The third one is dead: what has been heard, and what goes on.
    fn check(&mut self, moment: &str) {
        self.deaths += 1;
        self.members.iter().for_each(|member| member.meets(1));
        self.speak();
        // Its address is another one's now, until one comes with it.
        let moved = self.deaths.is_multiple_of(2);
        if moved {
            self.members[1].send(self.members[0].mac, mac(DIES), u64::MAX);
        }
        let [one, other] = [mac(1), mac(2)];
        for (member, from) in [(&self.members[0], other), (&self.members[1], one)] {
            until(&format!("what was sent, {moment}"), || {
                let heard = member.heard();
                let count = heard.iter().filter(|heard| heard.from == from).count();
                let has_moved = |heard: &&Heard| heard.number == u64::MAX;
                count as u64 >= self.sent
                    && (!moved || from == one || heard.iter().any(|heard| has_moved(&heard)))
            });
            let mut heard = member.heard();
            let theirs = heard.iter().filter(|heard| heard.from == from);
            let numbers: Vec<u64> = theirs.map(|heard| heard.number).collect();
            assert_eq!(numbers, (0..self.sent).collect::<Vec<u64>>(), "{moment}");
            let of_dead = heard.iter().filter(|heard| heard.from == mac(DIES));
            let of_dead = of_dead.filter(|heard| heard.number != u64::MAX);
            let of_dead: Vec<(Mac, u64)> = of_dead.map(|heard| (heard.to, heard.number)).collect();
            let all = sends(one, other).into_iter().zip(0..);
            let all: Vec<(Mac, u64)> =
                all.filter(|(to, _)| [BROADCAST, member.mac].contains(to)).collect();
            assert!(all.starts_with(&of_dead), "{} hears {of_dead:?}, {moment}", member.mac);
            heard.retain(|heard| heard.from != mac(DIES));
            HEARD.fetch_add(of_dead.len() as u64, Ordering::Relaxed);
        }
        let room = Room::open(self.folder.path(), "net").unwrap();
        assert_eq!(room.ports().unwrap().len(), 2, "{moment}");
    }
}

/// Frames of dead ones, in all: if none were heard, or always all, nothing is shown.
static HEARD: AtomicU64 = AtomicU64::new(0);

/// Each of so many moments, or some of them.
fn moments(what: &str, count: u64) -> impl Iterator<Item = u64> + use<> {
    let all = std::env::var("RINGLET_MOMENTS").is_ok_and(|which| which == "all");
    let seed = std::env::var("SEED").ok().and_then(|seed| seed.parse().ok());
    let seed: u64 = seed.unwrap_or_else(|| std::process::id().into());
    let stride = if all { 1 } else { (count / MOMENTS).max(1) };
    println!("SEED={seed}: {count} {what}, of which one in {stride}");
    (1 + seed % stride..=count).step_by(stride as usize)
}

/// Dies at this system call, as it comes, sends or leaves; how many there were until then.
fn dies_at_call(model: &mut Model, moment: u64) -> u64 {
    let (traced, thread) = Traced::begin(model.folder.path());
    let mut left = moment;
    model.speak();
    ptrace::syscall(thread, None).unwrap();
    let mut signals = 1;
    while let Stop::Signal(thread) = traced.goes_on(true, &mut left) {
        model.speak();
        signals += 1;
        if signals == 3 {
            model.hears_all();
        }
        ptrace::syscall(thread, None).unwrap();
    }
    traced.dies();
    model.check(&format!("at system call {moment}"));
    moment - left
}

/// Dies at this instruction, as it sends and receives; how many there were until then.
fn dies_at_instruction(model: &mut Model, moment: u64) -> u64 {
    let (traced, thread) = Traced::begin(model.folder.path());
    ptrace::cont(thread, None).unwrap();
    let Stop::Signal(thread) = traced.goes_on(false, &mut { u64::MAX }) else {
        panic!("it has not met the others");
    };
    model.speak();
    let steps = (0..moment).take_while(|_| traced.steps(thread, 1)).count();
    if moment == u64::MAX {
        model.hears_all();
    }
    traced.dies();
    model.check(&format!("at instruction {moment}"));
    steps as u64
}

fn descriptors() -> usize {
    fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Of strands: a dead one's memory is to go, too.
fn mappings() -> usize {
    fs::read_to_string("/proc/self/maps").unwrap().matches("ringlet-ethernet").count()
}

/// The descriptor by which a strand's memory is given goes once it is given, which may be behind the meeting.
fn is_given() -> bool {
    let is_memory = |fd: fs::DirEntry| {
        fs::read_link(fd.path())
            .is_ok_and(|path| path.to_string_lossy().contains("ringlet-ethernet"))
    };
    !fs::read_dir("/proc/self/fd").unwrap().flatten().any(is_memory)
}

#[test]
fn a_port_may_die_at_any_step() {
    let mut model = Model::new();
    until("memory that is given", is_given);
    let before = (descriptors(), mappings());
    type Dies = fn(&mut Model, u64) -> u64;
    let kinds: [(&str, Dies); 2] =
        [("stops at system calls", dies_at_call), ("instructions", dies_at_instruction)];
    for (what, dies) in kinds {
        let count = dies(&mut model, u64::MAX);
        assert!(count > 100, "{count} {what}");
        let heard = HEARD.swap(0, Ordering::Relaxed);
        assert_eq!(heard, 6, "who lives long enough is heard");
        let deaths = moments(what, count).map(|moment| dies(&mut model, moment)).count() as u64;
        let heard = HEARD.swap(0, Ordering::Relaxed);
        println!("{deaths} deaths, {heard} frames of theirs");
        assert!(0 < heard && heard < 6 * deaths, "{heard} frames of {deaths}");
    }
    until("what dead ones had", || (descriptors(), mappings()) == before);
}
