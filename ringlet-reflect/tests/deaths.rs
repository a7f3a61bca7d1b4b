//! The keeper, and programs, killed at random moments: a lock is held by one, nobody waits for ever, and nothing stays.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use ringlet_reflect::keeper::{Options, keep};
use ringlet_reflect::{Host, Permission, Status, Use, Wait};

/// Only against hanging.
const PATIENCE: Duration = Duration::from_secs(60);
const KILLS: u64 = 400;
const PROGRAMS: usize = 4;

fn child(what: &str, path: &Path) -> Child {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "what_children_do", "--nocapture"])
        .envs([("DEATHS", what.as_ref()), ("DEATHS_PATH", path.as_os_str())])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let output = BufReader::new(child.stdout.as_mut().unwrap());
    assert!(output.lines().any(|line| line.unwrap() == "ready"));
    child
}

#[test]
fn what_children_do() {
    let (Ok(what), Some(path)) = (std::env::var("DEATHS"), std::env::var_os("DEATHS_PATH")) else {
        return;
    };
    let path = PathBuf::from(path);
    if what == "keeper" {
        let options = Options { path: Some(&path), stays: true, ..Options::default() };
        keep(&options, || println!("\nready")).unwrap();
    }
    println!("\nready");
    // (When its keeper has gone each call says so: then it ends well.)
    loop {
        // (When its keeper has gone each call says so: then it ends well.)
        match Host::at(&path).and_then(|host| (0..200).try_for_each(|_| add(&host))) {
            Ok(()) => {}
            Err(Status::NotInitialised) => return,
            Err(status) => panic!("{status:?}"),
        }
    }
}

/// Everything that a program does, so that it is killed in the middle of each.
fn add(host: &Host) -> Result<(), Status> {
    let region = host.allocate(1, 8192, &Permission::default())?;
    let locks = host.locks(1, 4, 0o600, false)?;
    let (to, from) = (region.transmit(Use::default())?, region.receive(Use::default())?);
    let mut watch = from.watch(4096)?;
    for lock in [1, 3] {
        locks.acquire(lock, Wait::UpTo(PATIENCE))?;
        let at = lock * 8;
        let [first, second] = [at, at + 1].map(|word| from.words()[word].load(Ordering::Relaxed));
        // (Whoever dies between leaves one behind: no other one has written meanwhile.)
        assert!(first == second || first == second + 1, "{first} {second}");
        to.words()[at].store(first + 1, Ordering::Relaxed);
        to.words()[at + 1].store(first + 1, Ordering::Relaxed);
        to.notify(4096, 1)?;
        locks.release(lock)?;
    }
    assert!(watch.has_changed());
    Ok(())
}

#[test]
fn whoever_is_killed_whenever() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let mut keeper = child("keeper", &path);
    let mut programs: Vec<Child> = (0..PROGRAMS).map(|_| child("program", &path)).collect();
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    for kill in 0..KILLS {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        std::thread::sleep(Duration::from_micros(random % 3000));
        if kill % 10 != 9 {
            let program = &mut programs[random as usize % PROGRAMS];
            assert_eq!(program.try_wait().unwrap(), None, "it has failed");
            program.kill().unwrap();
            program.wait().unwrap();
            *program = child("program", &path);
            continue;
        }
        keeper.kill().unwrap();
        keeper.wait().unwrap();
        for program in &mut programs {
            let began = Instant::now();
            let ended = loop {
                match program.try_wait().unwrap() {
                    Some(ended) => break ended,
                    None => assert!(began.elapsed() < PATIENCE, "it waits for a dead keeper"),
                }
                std::thread::sleep(Duration::from_millis(2));
            };
            assert!(ended.success(), "{ended}");
        }
        keeper = child("keeper", &path);
        programs = (0..PROGRAMS).map(|_| child("program", &path)).collect();
    }
    for mut program in programs {
        program.kill().unwrap();
        program.wait().unwrap();
    }
    let (host, began) = (Host::at(&path).unwrap(), Instant::now());
    loop {
        let state = host.state().unwrap();
        if state.regions.is_empty() && state.sets.is_empty() && state.members.is_empty() {
            break;
        }
        assert!(began.elapsed() < PATIENCE, "{state:?}");
        std::thread::sleep(Duration::from_millis(2));
    }
    keeper.kill().unwrap();
    keeper.wait().unwrap();
}

/// Another keeper has other memory and other locks: who has joined the one before is told by each check, and by each lock.
#[test]
fn who_has_joined_a_keeper_that_was_killed_is_told_by_all_that_he_does() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let mut keeper = child("keeper", &path);
    let host = Host::at(&path).unwrap();
    let locks = host.locks(1, 2, 0o600, false).unwrap();
    locks.acquire(0, Wait::No).unwrap();
    let errors = host.errors(0).unwrap();
    assert_eq!(host.check_errors(0, errors), Ok(errors));
    keeper.kill().unwrap();
    keeper.wait().unwrap();
    let mut next = child("keeper", &path);
    let theirs = Host::at(&path).unwrap().locks(1, 2, 0o600, false).unwrap();
    theirs.acquire(0, Wait::No).unwrap();
    let gone = Status::NotInitialised;
    assert_eq!(locks.release(0), Err(gone));
    assert_eq!([Wait::No, Wait::Forever].map(|wait| locks.acquire(1, wait)), [Err(gone); 2]);
    assert_eq!(locks.holder(0), Err(gone));
    assert_eq!((host.errors(0), host.check_errors(0, errors)), (Err(gone), Err(gone)));
    next.kill().unwrap();
    next.wait().unwrap();
}
