//! Programs of one host, in this process and others: what one writes the others see, who may not is refused, and what the dead had is given back.

use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use ringlet_reflect::keeper::{Limits, Options, keep};
use ringlet_reflect::{Host, Permission, Sample, Status, Use, Wait};

/// Only against hanging.
const PATIENCE: Duration = Duration::from_secs(60);
const MB: u64 = 1 << 20;

/// A keeper on a thread of this process.
struct Keeper {
    _folder: tempfile::TempDir,
    path: PathBuf,
}

impl Keeper {
    fn new() -> Keeper {
        Keeper::with(Limits { all: 64 * MB, received: 32 * MB })
    }

    fn with(limits: Limits) -> Keeper {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("reflect.sock");
        let (ready, is_ready) = std::sync::mpsc::channel();
        let at = path.clone();
        std::thread::spawn(move || {
            let options = Options { path: Some(&at), limits, stays: true, ..Options::default() };
            keep(&options, || ready.send(()).unwrap()).unwrap();
        });
        is_ready.recv_timeout(PATIENCE).unwrap();
        Keeper { _folder: folder, path }
    }

    fn host(&self) -> Host {
        Host::at(&self.path).unwrap()
    }
}

fn until(what: &str, mut is: impl FnMut() -> bool) {
    let began = Instant::now();
    while !is() {
        assert!(began.elapsed() < PATIENCE, "waited for {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn what_is_written_is_received_and_the_memory_goes_with_its_last_user() {
    let keeper = Keeper::new();
    let (one, other) = (keeper.host(), keeper.host());
    let how = Permission::default();
    let (region, same) =
        (one.allocate(7, 5000, &how).unwrap(), other.allocate(7, 8000, &how).unwrap());
    assert_eq!((region.len(), same.len()), (8192, 8192));
    let transmitter = region.transmit(Use::default()).unwrap();
    let receiver = same.receive(Use::default()).unwrap();
    for (at, length) in
        [(0, 1), (1, 7), (3, 4), (5, 8), (7, 100), (4090, 12), (8191, 1), (8192, 0), (0, 8192)]
    {
        let bytes: Vec<u8> = (0..length).map(|n| (n * 7 + at) as u8 | 1).collect();
        transmitter.put(at, &bytes).unwrap();
        let mut got = vec![0; length];
        receiver.get(at, &mut got).unwrap();
        assert_eq!(got, bytes, "{length} at {at}");
    }
    assert_eq!(transmitter.put(8190, &[1, 2, 3]), Err(Status::BadParameter));
    assert_eq!(receiver.get(usize::MAX, &mut [0; 2]), Err(Status::BadParameter));
    transmitter.words()[9].store(42, Ordering::Release);
    assert_eq!(receiver.words()[9].load(Ordering::Acquire), 42);
    drop((region, transmitter));
    assert_eq!(one.state().unwrap().regions.len(), 1, "another one has it");
    assert_eq!(receiver.words()[9].load(Ordering::Acquire), 42);
    drop((same, receiver));
    assert_eq!(one.state().unwrap().regions, []);
    let again = one.allocate(7, 4096, &how).unwrap();
    assert_eq!(again.receive(Use::default()).unwrap().words()[9].load(Ordering::Acquire), 0);
}

#[test]
fn what_is_filled_is_received_or_refused_by_who_fills_it() {
    let keeper = Keeper::new();
    let (one, other) = (keeper.host(), keeper.host());
    let how = Permission { mode: 0o640, ..Permission::default() };
    let (region, same) = (
        one.allocate(7, 8192, &how).unwrap(),
        other.allocate(7, 8192, &Permission::default()).unwrap(),
    );
    let made = ringlet_reflect::Made { owner: one.user(), mode: 0o640 };
    assert_eq!((region.made(), same.made()), (made, made));
    let (to, from) =
        (region.transmit(Use::default()).unwrap(), same.receive(Use::default()).unwrap());
    assert!(to.is_memory());
    let filled = to.fill(100, 3, |at, length, to| {
        assert_eq!((at, length), (0, 3));
        // SAFETY: so many bytes may be written there.
        unsafe { to.copy_from_nonoverlapping(b"abc".as_ptr(), length) };
        true
    });
    assert_eq!(filled, Ok(()));
    let mut bytes = [0; 5];
    from.get(99, &mut bytes).unwrap();
    assert_eq!(&bytes, b"\0abc\0");
    assert_eq!(to.fill(0, 1, |_, _, _| false), Err(Status::BadAddress));
    assert_eq!(to.fill(8190, 3, |_, _, _| panic!("it is outside")), Err(Status::BadParameter));
    let locks = one.locks(7, 3, 0o640, false).unwrap();
    assert_eq!(
        (locks.made(), locks.holder(1), locks.holder(3)),
        (made, Ok(None), Err(Status::BadLock))
    );
    locks.acquire(1, Wait::No).unwrap();
    let theirs = other.locks(7, 3, 0o600, false).unwrap();
    assert_eq!((theirs.made(), theirs.holder(1)), (made, Ok(Some(one.member()))));
}

#[test]
fn each_refusal_has_its_status() {
    let keeper = Keeper::new();
    let (one, other) = (keeper.host(), keeper.host());
    let (how, shared) = (Permission::default(), Use::default());
    let status = |made: Result<_, Status>| made.err();
    assert_eq!(status(one.allocate(1, 0, &how).map(drop)), Some(Status::BadSize));
    assert_eq!(status(one.allocate(1, 65 << 20, &how).map(drop)), Some(Status::Full));
    assert_eq!(
        status(one.allocate(1, 1, &Permission { rail: 1, ..how }).map(drop)),
        Some(Status::BadRail)
    );
    assert_eq!(
        status(one.allocate(1, 1, &Permission { mode: 0o700, ..how }).map(drop)),
        Some(Status::BadParameter)
    );
    let region = one.allocate(1, 4096, &how).unwrap();
    assert_eq!(status(one.allocate(1, 4096, &how).map(drop)), Some(Status::Prior));
    assert_eq!(status(other.allocate(1, 4097, &how).map(drop)), Some(Status::BadSize));
    assert_eq!(
        status(other.allocate(1, 1, &Permission { coherent: false, ..how }).map(drop)),
        Some(Status::Incoherent)
    );
    let theirs = other.allocate(1, 4096, &how).unwrap();
    let first = region.transmit(shared).unwrap();
    assert_eq!(status(region.transmit(shared).map(drop)), Some(Status::TransmitAttached));
    assert_eq!(
        status(theirs.transmit(Use { loopback: false, ..shared }).map(drop)),
        Some(Status::OtherLoopback)
    );
    assert_eq!(
        status(theirs.receive(Use { shared: false, ..shared }).map(drop)),
        Some(Status::Shared)
    );
    drop(first);
    let alone = region.receive(Use { shared: false, ..shared }).unwrap();
    assert_eq!(status(region.receive(shared).map(drop)), Some(Status::ReceiveAttached));
    assert_eq!(status(theirs.receive(shared).map(drop)), Some(Status::NonShared));
    assert_eq!(
        status(theirs.receive(Use { shared: false, ..shared }).map(drop)),
        Some(Status::NonShared)
    );
    drop(alone);
    drop(theirs.receive(shared).unwrap());
    // What this host receives is less than what there is.
    let large = one.allocate(2, 31 << 20, &how).unwrap();
    let received = large.receive(shared).unwrap();
    let more = one.allocate(3, 2 << 20, &how).unwrap();
    assert_eq!(status(more.receive(shared).map(drop)), Some(Status::ReceiveFull));
    drop(received);
    drop(more.receive(shared).unwrap());
    // Read only, write only, neither.
    let to_read = one.allocate(4, 1, &Permission { mode: 0o400, ..how });
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        assert_eq!(
            status(to_read.as_ref().unwrap().transmit(shared).map(drop)),
            Some(Status::Denied)
        );
    }
    let name = one.state().unwrap().host;
    assert_eq!(one.cluster().unwrap().hosts, std::slice::from_ref(&name));
    assert_eq!(status(region.transmit_to("nowhere", true).map(drop)), Some(Status::BadHost));
    assert_eq!(status(region.transmit_to(&name, true).map(drop)), Some(Status::ToItself));
    assert_eq!(one.errors(0), Ok(0));
    assert_eq!(one.errors(1), Err(Status::BadRail));
    assert_eq!(one.check_errors(0, 0), Ok(0));
    assert_eq!(one.check_errors(0, 1), Err(Status::ChannelError));
    assert_eq!(Host::at(Path::new("/nowhere")).err(), Some(Status::NotInitialised));
    let locks = one.locks(1, 3, 0o600, true).unwrap();
    assert_eq!(locks.acquire(0, Wait::No), Err(Status::HeldByUs), "its creator has the first one");
    assert_eq!(status(other.locks(1, 3, 0o600, true).map(drop)), Some(Status::Exists));
    assert_eq!(status(one.locks(1, 3, 0o600, false).map(drop)), Some(Status::Prior));
    assert_eq!(status(one.locks(2, 0, 0o600, false).map(drop)), Some(Status::BadParameter));
    let theirs = other.locks(1, 9, 0o600, false).unwrap();
    assert_eq!(theirs.count(), 3);
    assert_eq!(theirs.acquire(0, Wait::No), Err(Status::Busy));
    assert_eq!(theirs.acquire(0, Wait::UpTo(Duration::from_millis(1))), Err(Status::Busy));
    assert_eq!(
        (theirs.acquire(3, Wait::No), theirs.release(0)),
        (Err(Status::BadLock), Err(Status::NotHeld))
    );
    locks.release(0).unwrap();
    theirs.acquire(0, Wait::No).unwrap();
}

/// Where a process has no room for what it is given, what failed is as if it had not been.
#[test]
fn without_free_descriptors_nothing_is_half_there() {
    let keeper = Keeper::new();
    // (In a process of its own: its limit is for all threads.)
    assert!(actor_of(&keeper, "full").wait().unwrap().success());
}

/// The first one that it starts finds the name taken by one that is about to end; and the program wants to know of no child.
#[test]
fn a_keeper_is_started_until_there_is_one() {
    use std::os::unix::fs::PermissionsExt;
    let (folder, exe) = (tempfile::tempdir().unwrap(), std::env::current_exe().unwrap());
    let (command, first) = (folder.path().join("ringlet"), folder.path().join("first"));
    let script = format!(
        "#!/bin/sh\nmkdir {} 2>/dev/null && exit 1\n\
         REFLECT_ACTOR=keep {} --exact actor </dev/null >/dev/null 2>&1 &\n",
        first.display(),
        exe.display()
    );
    std::fs::write(&command, script).unwrap();
    std::fs::set_permissions(&command, std::fs::Permissions::from_mode(0o755)).unwrap();
    let path = format!("{}:{}", folder.path().display(), std::env::var("PATH").unwrap());
    // (Where no other keeper has this user's name.)
    let mut child = Command::new("unshare");
    child.args(["--map-root-user", "--net"]).arg(exe).args(["--exact", "actor"]);
    let done = child.env("REFLECT_ACTOR", "open").env("PATH", path).output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stdout));
    assert!(first.is_dir());
}

#[test]
fn a_watch_that_is_dropped_is_gone_with_its_thread() {
    let keeper = Keeper::new();
    let region = keeper.host().allocate(1, 4096, &Permission::default()).unwrap();
    let receiver = region.receive(Use::default()).unwrap();
    let mut watch = receiver.watch(0).unwrap();
    watch.descriptor().unwrap();
    // None of the program's signals is for that thread.
    let read = |path: PathBuf, name: &str| std::fs::read_to_string(path.join(name));
    let tasks = || std::fs::read_dir("/proc/self/task").unwrap().flatten().map(|task| task.path());
    let is_it = |task: &PathBuf| read(task.clone(), "comm").is_ok_and(|name| name == "reflect\n");
    // (It names itself.)
    until("its thread", || tasks().any(|task| is_it(&task)));
    let thread = tasks().find(is_it);
    let status = read(thread.unwrap(), "status").unwrap();
    let blocked = status.lines().find_map(|line| line.strip_prefix("SigBlk:\t")).unwrap();
    let blocked = u64::from_str_radix(blocked, 16).unwrap();
    assert_eq!(blocked >> (15 - 1) & 1, 1, "SIGTERM: {blocked:x}");
    drop((watch, receiver));
    region.receive(Use::default()).unwrap();
}

#[test]
fn without_loopback_no_receiver_on_this_host_sees_it() {
    let keeper = Keeper::new();
    let host = keeper.host();
    let region = host.allocate(1, 4096, &Permission::default()).unwrap();
    let receiver = region.receive(Use::default()).unwrap();
    let transmitter = region.transmit(Use { loopback: false, shared: true }).unwrap();
    transmitter.put(0, &[1; 100]).unwrap();
    assert_eq!(receiver.words()[0].load(Ordering::Acquire), 0);
}

#[test]
fn who_wishes_is_told_and_nobody_else_wakes() {
    let keeper = Keeper::new();
    let (one, other) = (keeper.host(), keeper.host());
    let how = Permission::default();
    let (region, same) =
        (one.allocate(1, 3 * 4096, &how).unwrap(), other.allocate(1, 3 * 4096, &how).unwrap());
    let transmitter = region.transmit(Use::default()).unwrap();
    let receiver = same.receive(Use::default()).unwrap();
    let mut watch = receiver.watch(4096).unwrap();
    assert_eq!(one.state().unwrap().regions[0].watched, 1);
    transmitter.notify(0, 4096).unwrap();
    assert!(!watch.wait(Some(Duration::from_millis(1))), "that was another page");
    transmitter.notify(4000, 4096).unwrap();
    assert!(watch.wait(Some(PATIENCE)) && !watch.has_changed());
    // Thousands of words there and back, each side asleep.
    let back = same.transmit(Use::default()).unwrap();
    let here = region.receive(Use::default()).unwrap();
    let mut answers = here.watch(2 * 4096).unwrap();
    let asked = std::thread::spawn(move || {
        for number in 1..=2000 {
            while receiver.words()[512].load(Ordering::Acquire) != number {
                assert!(watch.wait(Some(PATIENCE)));
            }
            back.words()[1024].store(number, Ordering::Release);
            back.notify(2 * 4096, 8).unwrap();
        }
    });
    for number in 1..=2000 {
        transmitter.words()[512].store(number, Ordering::Release);
        transmitter.notify(4096, 8).unwrap();
        while here.words()[1024].load(Ordering::Acquire) != number {
            assert!(answers.wait(Some(PATIENCE)));
        }
    }
    asked.join().unwrap();
    // By a descriptor.
    let bell = answers.descriptor().unwrap().try_clone_to_owned().unwrap();
    let is_readable = |within: i64| {
        let mut fds = [rustix::event::PollFd::new(&bell, rustix::event::PollFlags::IN)];
        let time = rustix::event::Timespec { tv_sec: within, tv_nsec: 0 };
        rustix::event::poll(&mut fds, Some(&time)).unwrap() > 0
    };
    assert!(!is_readable(0));
    transmitter.notify(2 * 4096, 1).unwrap();
    assert!(is_readable(60));
    assert!(answers.has_changed() && !is_readable(0));
    drop(answers);
    until("no page to be watched", || one.state().unwrap().regions[0].watched == 0);
}

/// Whoever attaches a region has all of it, whatever there is no memory for later.
#[test]
fn all_of_what_is_mapped_is_held_by_memory() {
    let keeper = Keeper::new();
    let region = keeper.host().allocate(1, 8 << 20, &Permission::default()).unwrap();
    // (Nobody has stored anything.)
    let receiver = region.receive(Use::default()).unwrap();
    assert_eq!(resident(receiver.base()), 8 << 10);
    let transmitter = region.transmit(Use::default()).unwrap();
    assert_eq!(resident(transmitter.base()), 8 << 10);
    // Unless he wants it otherwise.
    let region = keeper.host().allocate(2, 8 << 20, &Permission::default()).unwrap();
    let sparse = region.transmit_sparse(Use::default()).unwrap();
    assert_eq!(resident(sparse.base()), 0);
}

/// Of the mapping that begins there, in KiB.
fn resident(base: *const u8) -> u64 {
    let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let from_it = maps.split_once(&format!("{:08x}-", base as usize)).unwrap().1;
    let rss = from_it.lines().find_map(|line| line.strip_prefix("Rss:")).unwrap();
    rss.trim().trim_end_matches(" kB").parse().unwrap()
}

#[test]
fn who_looks_from_outside_sees_which_pages_change_and_is_no_user() {
    let keeper = Keeper::new();
    let (host, looks) = (keeper.host(), keeper.host());
    let region = host.allocate(1, 100 * 4096, &Permission::default()).unwrap();
    let transmitter = region.transmit(Use::default()).unwrap();
    let receiver = region.receive(Use::default()).unwrap();
    let mut all = looks.sampler(region.id(), 1000).unwrap();
    let mut some = looks.sampler(region.id(), 30).unwrap();
    let none = Sample { changed: 0, looked: 100, pages: 100, told: 0 };
    assert_eq!(all.look(), Ok(none));
    for page in [0, 4, 7, 99] {
        transmitter.put(page * 4096 + page, &[1]).unwrap();
        transmitter.notify(page * 4096, 1).unwrap();
    }
    assert_eq!(all.look(), Ok(Sample { changed: 4, ..none }), "and nobody was told");
    assert_eq!(some.look(), Ok(Sample { changed: 2, looked: 25, ..none }), "every fourth one");
    transmitter.put(0, &[1]).unwrap();
    assert_eq!(all.look(), Ok(none), "as it was");
    let _watch = receiver.watch(0).unwrap();
    for _ in 0..3 {
        transmitter.notify(0, 5000).unwrap();
    }
    assert_eq!(all.look(), Ok(Sample { told: 3, ..none }));
    let state = looks.state().unwrap();
    assert_eq!((state.members.len(), state.regions[0].users.len()), (1, 1));
    assert_eq!(looks.sampler(9999, 1).err(), Some(Status::BadRegion));
    // What is written without loopback is somewhere else.
    drop(transmitter);
    let transmitter = region.transmit(Use { loopback: false, ..Use::default() }).unwrap();
    let mut apart = looks.sampler(region.id(), 1000).unwrap();
    transmitter.put(0, &[9]).unwrap();
    assert_eq!(apart.look().map(|sample| sample.changed), Ok(1));
}

/// Also where there are more than one answer shows.
#[test]
fn a_number_is_of_others_or_of_nobody() {
    let keeper = Keeper::new();
    let (one, other) = (keeper.host(), keeper.host());
    let how = Permission::default();
    let regions: Vec<_> = (0..900).map(|key| one.allocate(key, 1, &how).unwrap()).collect();
    let locks = one.locks(1, 1, 0o600, false).unwrap();
    assert!(one.state().unwrap().is_cut);
    for region in &regions {
        assert_eq!(other.deallocate(region.id()), Err(Status::NotAllocated));
        assert_eq!(other.drop_locks(region.id()), Err(Status::BadLock));
    }
    assert_eq!(other.drop_locks(locks.id()), Err(Status::NotAllocated));
    assert_eq!(other.deallocate(1 << 30), Err(Status::BadRegion));
}

#[test]
fn what_is_waited_for_is_shown() {
    let keeper = Keeper::new();
    let (one, other) = (keeper.host(), keeper.host());
    let locks = one.locks(1, 3, 0o600, true).unwrap();
    let waits = std::thread::spawn(move || {
        let theirs = other.locks(1, 3, 0o600, false).unwrap();
        theirs.acquire(0, Wait::UpTo(PATIENCE))
    });
    until("a lock to be waited for", || one.state().unwrap().sets[0].waited == [0]);
    assert_eq!(one.state().unwrap().sets[0].held, [(0, one.member())]);
    locks.release(0).unwrap();
    waits.join().unwrap().unwrap();
}

/// What children do: this program again, with the words behind the keeper's path.
#[test]
fn actor() {
    let Ok(words) = std::env::var("REFLECT_ACTOR") else { return };
    let words: Vec<&str> = words.split(' ').collect();
    if words[0] == "keep" {
        return keep(&Options { stays: false, ..Options::default() }, || ()).unwrap();
    }
    if words[0] == "open" {
        // SAFETY: no function is called.
        unsafe { libc::signal(libc::SIGCHLD, libc::SIG_IGN) };
        return assert!(Host::open().unwrap().state().is_ok());
    }
    let host = Host::at(Path::new(words[0])).unwrap();
    match words[1] {
        // Adds under a lock, for ever.
        "add" => {
            let locks = host.locks(1, 4, 0o600, false).unwrap();
            let region = host.allocate(1, 4096, &Permission::default()).unwrap();
            let (to, from) =
                (region.transmit(Use::default()).unwrap(), region.receive(Use::default()).unwrap());
            println!("\nready");
            loop {
                locks.acquire(1, Wait::Forever).unwrap();
                let (first, second) = (
                    from.words()[0].load(Ordering::Relaxed),
                    from.words()[1].load(Ordering::Relaxed),
                );
                // (Whoever dies between leaves one behind: no other one has written meanwhile.)
                assert!(first == second || first == second + 1, "{first} {second}");
                to.words()[0].store(first + 1, Ordering::Relaxed);
                to.words()[1].store(first + 1, Ordering::Relaxed);
                locks.release(1).unwrap();
            }
        }
        // Has everything, and hangs.
        "hold" => {
            let locks = host.locks(1, 4, 0o600, false).unwrap();
            locks.acquire(2, Wait::No).unwrap();
            let region = host.allocate(9, 1 << 20, &Permission::default()).unwrap();
            let receiver = region.receive(Use::default()).unwrap();
            let _watch = receiver.watch(0).unwrap();
            println!("\nready");
            std::thread::sleep(PATIENCE);
        }
        "full" => full(&host, Path::new(words[0])),
        word => panic!("{word}"),
    }
}

fn full(host: &Host, path: &Path) {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    println!("\nready");
    let had = getrlimit(Resource::Nofile);
    let set = |current| setrlimit(Resource::Nofile, Rlimit { current, ..had }).unwrap();
    let region = host.allocate(1, 4096, &Permission::default()).unwrap();
    for room in 0..3 {
        let next = std::fs::File::open("/dev/null").unwrap();
        let limit = Some(std::os::fd::AsRawFd::as_raw_fd(&next) as u64 + room);
        drop(next);
        set(limit);
        let sent = region.transmit(Use::default()).err();
        let received = (room < 2).then(|| region.receive(Use::default()).err());
        let locks = (room < 1).then(|| host.locks(1, 4, 0o600, true).err());
        let joined = (room < 1).then(|| Host::at(path).err());
        set(had.current);
        assert_eq!(sent, Some(Status::NoMemory));
        for failed in [received, locks, joined].into_iter().flatten() {
            assert_eq!(failed, Some(Status::NoMemory));
        }
        region.transmit(Use::default()).unwrap();
        region.receive(Use::default()).unwrap();
        host.locks(1, 4, 0o600, true).unwrap();
    }
    drop(region);
    host.allocate(1, 8192, &Permission::default()).unwrap();
    // (Nobody reads what the harness would say.)
    std::process::exit(0);
}

fn actor_of(keeper: &Keeper, words: &str) -> Child {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "actor", "--nocapture"])
        .env("REFLECT_ACTOR", format!("{} {words}", keeper.path.display()))
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = std::io::BufRead::lines(std::io::BufReader::new(child.stdout.take().unwrap()));
    assert!(lines.any(|line| line.unwrap() == "ready"));
    child
}

#[test]
fn what_the_dead_had_is_given_back() {
    let keeper = Keeper::new();
    let host = keeper.host();
    let locks = host.locks(1, 4, 0o600, false).unwrap();
    for _ in 0..10 {
        let mut child = actor_of(&keeper, "hold");
        assert_eq!(locks.acquire(2, Wait::No), Err(Status::Busy));
        let state = host.state().unwrap();
        assert_eq!(
            (state.regions.len(), state.regions[0].watched, state.sets[0].held.len()),
            (1, 1, 1)
        );
        child.kill().unwrap();
        locks.acquire(2, Wait::UpTo(PATIENCE)).unwrap();
        locks.release(2).unwrap();
        child.wait().unwrap();
        until("all to be given back", || {
            let state = host.state().unwrap();
            state.regions.is_empty() && state.members.len() == 1 && state.sets.len() == 1
        });
    }
}

#[test]
fn a_lock_is_held_by_one_whoever_dies() {
    let keeper = Keeper::new();
    let host = keeper.host();
    let region = host.allocate(1, 4096, &Permission::default()).unwrap();
    let receiver = region.receive(Use::default()).unwrap();
    let mut children: Vec<Child> = (0..3).map(|_| actor_of(&keeper, "add")).collect();
    for kill in 0..60 {
        let before = receiver.words()[0].load(Ordering::Relaxed);
        until("somebody to go on", || receiver.words()[0].load(Ordering::Relaxed) > before);
        let child = &mut children[kill % 3];
        child.kill().unwrap();
        // (Who had failed would have ended otherwise.)
        assert_eq!(child.wait().unwrap().signal(), Some(9));
        children[kill % 3] = actor_of(&keeper, "add");
    }
    for child in &mut children {
        child.kill().unwrap();
        assert_eq!(child.wait().unwrap().signal(), Some(9));
    }
    let host_locks = host.locks(1, 4, 0o600, false).unwrap();
    host_locks.acquire(1, Wait::UpTo(PATIENCE)).unwrap();
}

#[test]
fn a_lock_that_is_taken_again_and_again_is_had_by_others_too() {
    let keeper = Keeper::new();
    let hosts: Vec<Host> = (0..4).map(|_| keeper.host()).collect();
    let threads: Vec<_> = hosts
        .into_iter()
        .map(|host| {
            std::thread::spawn(move || {
                let locks = host.locks(1, 1, 0o600, false).unwrap();
                for _ in 0..3000 {
                    locks.acquire(0, Wait::UpTo(PATIENCE)).unwrap();
                    locks.release(0).unwrap();
                }
            })
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
}
