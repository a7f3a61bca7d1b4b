//! Who asks a keeper otherwise than programs do: it answers, or throws out who asks, and goes on.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use ringlet_reflect::keeper::{Options, keep};
use ringlet_reflect::{Host, Permission, Status, Use};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType, connect, recv, send, sendmsg, socket_with,
};

const PATIENCE: Duration = Duration::from_secs(60);

fn keeper(folder: &Path) -> PathBuf {
    let path = folder.join("reflect.sock");
    let (ready, is_ready) = std::sync::mpsc::channel();
    let at = path.clone();
    std::thread::spawn(move || {
        let options = Options { path: Some(&at), stays: true, ..Options::default() };
        keep(&options, || ready.send(()).unwrap()).unwrap();
    });
    is_ready.recv_timeout(PATIENCE).unwrap();
    path
}

fn stranger(path: &Path) -> OwnedFd {
    let flags = SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
    connect(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
    socket
}

/// What it says; empty when it has thrown us out.
fn said(socket: &OwnedFd) -> String {
    let mut fds = [PollFd::new(socket, PollFlags::IN)];
    let time = Timespec { tv_sec: 60, tv_nsec: 0 };
    assert!(poll(&mut fds, Some(&time)).unwrap() > 0, "it says nothing");
    let mut bytes = vec![0; 1 << 18];
    let length = recv(socket, &mut bytes[..], RecvFlags::empty()).map_or(0, |(length, _)| length);
    String::from_utf8_lossy(&bytes[..length]).into_owned()
}

fn ask(socket: &OwnedFd, text: &str) -> String {
    match send(socket, text.as_bytes(), SendFlags::NOSIGNAL) {
        Ok(_) => said(socket),
        Err(_) => String::new(),
    }
}

const HELLO: &str = r#"{"Hello":{"version":4}}"#;
const ALLOCATE: &str =
    r#"{"Allocate":{"key":7,"bytes":8192,"how":{"mode":384,"coherent":true,"rail":0}}}"#;

/// Of this file.
fn descriptors_of(end: &OwnedFd) -> usize {
    let link = |fd: &str| std::fs::read_link(format!("/proc/self/fd/{fd}"));
    let own = link(&end.as_raw_fd().to_string()).unwrap();
    let all = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    all.filter(|each| link(each.file_name().to_str().unwrap()).is_ok_and(|link| link == own))
        .count()
}

#[test]
fn who_says_what_nobody_says_is_refused_or_out() {
    let folder = tempfile::tempdir().unwrap();
    let path = keeper(folder.path());
    let honest = Host::at(&path).unwrap();
    let region = honest.allocate(1, 4096, &Permission::default()).unwrap();
    let transmitter = region.transmit(Use::default()).unwrap();
    for words in
        ["", "nonsense", "{}", "[1,2", "\0\0\0", r#"{"Hello":{}}"#, r#""Hello""#, &"x".repeat(4000)]
    {
        let socket = stranger(&path);
        let _ = send(&socket, words.as_bytes(), SendFlags::NOSIGNAL);
        assert_eq!(said(&socket), "", "{words:.20}");
    }
    // Before it has said hello; another version; twice.
    for words in
        [ALLOCATE, r#"{"Detach":{"id":1,"direction":"Transmit"}}"#, r#"{"Hello":{"version":9}}"#]
    {
        assert!(ask(&stranger(&path), words).contains("NotInitialised"), "{words}");
    }
    let socket = stranger(&path);
    assert!(ask(&socket, HELLO).contains("Welcome"));
    assert!(ask(&socket, HELLO).contains("BadParameter"));
    // Numbers of others', and of nobody's.
    for (words, status) in [
        (
            r#"{"Attach":{"id":ID,"direction":"Receive","how":{"shared":true,"loopback":true}}}"#,
            "NotAllocated",
        ),
        (r#"{"Detach":{"id":ID,"direction":"Receive"}}"#, "BadRegion"),
        (r#"{"Deallocate":{"id":ID}}"#, "NotAllocated"),
        (r#"{"Watch":{"id":ID,"page":0,"on":true}}"#, "NotAllocated"),
        (r#"{"Watch":{"id":999,"page":0,"on":true}}"#, "BadRegion"),
        (r#"{"Look":{"id":ID,"lock":0}}"#, "BadLock"),
        (r#"{"DropLocks":{"id":ID}}"#, "BadLock"),
        (
            r#"{"Allocate":{"key":7,"bytes":18446744073709551615,"how":{"mode":384,"coherent":true,"rail":0}}}"#,
            "BadSize",
        ),
        (
            r#"{"Allocate":{"key":7,"bytes":1,"how":{"mode":4294967295,"coherent":true,"rail":0}}}"#,
            "BadParameter",
        ),
        (
            r#"{"Locks":{"key":7,"count":18446744073709551615,"mode":384,"creates":true}}"#,
            "BadParameter",
        ),
    ] {
        let words = words.replace("ID", &region.id().to_string());
        let said = ask(&socket, &words);
        assert!(said.contains(status), "{words}: {said}");
    }
    // A page that is not there, of one that is its own; wishes that it never made.
    assert!(ask(&socket, ALLOCATE).contains("Region"));
    let state = honest.state().unwrap();
    let own = state.regions.iter().find(|region| region.key == 7).unwrap().id;
    let attach = format!(
        r#"{{"Attach":{{"id":{own},"direction":"Receive","how":{{"shared":true,"loopback":true}}}}}}"#
    );
    assert!(ask(&socket, &attach).contains("Memory"));
    for (page, on, status) in
        [(2, true, "BadParameter"), (u32::MAX, false, "BadParameter"), (1, false, "Done")]
    {
        assert!(
            ask(&socket, &format!(r#"{{"Watch":{{"id":{own},"page":{page},"on":{on}}}}}"#))
                .contains(status)
        );
    }
    assert_eq!(honest.state().unwrap().regions.iter().map(|region| region.watched).sum::<u32>(), 0);
    transmitter.put(0, b"as before").unwrap();
}

/// Questions that came while another one was answered, as those of a program of higher priority do.
#[test]
fn who_asks_much_is_answered_by_and_by() {
    let folder = tempfile::tempdir().unwrap();
    let socket = stranger(&keeper(folder.path()));
    assert!(ask(&socket, HELLO).contains("Welcome"));
    let mut answers = 0;
    for _ in 0..50 {
        // (As many as there is room for, which depends on the machine.)
        let look = br#"{"Look":{"id":1,"lock":0}}"#;
        let asked = (0..100)
            .take_while(|_| send(&socket, look, SendFlags::NOSIGNAL | SendFlags::DONTWAIT).is_ok())
            .count();
        for _ in 0..asked {
            assert!(said(&socket).contains("BadLock"), "out after {answers}");
            answers += 1;
        }
    }
}

/// A wish that is wished again and again is counted as often as it can be, and all of it goes with who wished it.
#[test]
fn wishes_are_counted_within_bounds() {
    let folder = tempfile::tempdir().unwrap();
    let path = keeper(folder.path());
    let honest = Host::at(&path).unwrap();
    let socket = stranger(&path);
    assert!(ask(&socket, HELLO).contains("Welcome") && ask(&socket, ALLOCATE).contains("Region"));
    let id = honest.state().unwrap().regions[0].id;
    let attach =
        r#"{"Attach":{"id":ID,"direction":"Receive","how":{"shared":true,"loopback":true}}}"#;
    assert!(ask(&socket, &attach.replace("ID", &id.to_string())).contains("Memory"));
    let wish = format!(r#"{{"Watch":{{"id":{id},"page":0,"on":true}}}}"#);
    for _ in 0..1 << 16 {
        assert!(ask(&socket, &wish).contains("Done"));
    }
    assert!(ask(&socket, &wish).contains("Full"));
    let watched = || honest.state().unwrap().regions.first().map(|region| region.watched);
    assert_eq!(watched(), Some(1));
    let _same = honest.allocate(7, 8192, &Permission::default()).unwrap();
    drop(socket);
    let began = std::time::Instant::now();
    while watched() != Some(0) {
        assert!(began.elapsed() < PATIENCE, "{:?}", watched());
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Its backlog is full while it does nothing: they wait.
#[test]
fn many_who_come_at_once_are_all_let_in() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let mut child = by_itself(&path);
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, rustix::process::Signal::STOP).unwrap();
    let (come, came) = std::sync::mpsc::channel();
    for _ in 0..200 {
        let (path, come) = (path.clone(), come.clone());
        std::thread::spawn(move || come.send(Host::at(&path)).unwrap());
    }
    let waiting = || std::fs::read_to_string("/proc/net/unix").unwrap();
    let name = path.to_str().unwrap();
    // (All that the backlog holds; the others have to ask again.)
    let began = std::time::Instant::now();
    while waiting().lines().filter(|line| line.ends_with(name)).count() <= 128 {
        let refused = came.try_recv().ok().map(|found| found.err());
        assert!(refused.is_none() && began.elapsed() < PATIENCE, "{refused:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
    rustix::process::kill_process(pid, rustix::process::Signal::CONT).unwrap();
    for _ in 0..200 {
        assert!(came.recv_timeout(PATIENCE).unwrap().is_ok());
    }
    child.kill().unwrap();
    child.wait().unwrap();
}

/// Keepers that begin at once where one was killed: one listens, and can be found.
#[test]
fn of_keepers_that_begin_at_once_there_is_one() {
    use std::sync::{Arc, Barrier, mpsc};
    const AT_ONCE: usize = 8;
    for _ in 0..50 {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let kind = SocketType::SEQPACKET;
        let dead = socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).unwrap();
        rustix::net::bind(&dead, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        drop(dead);
        let (say, said) = mpsc::channel();
        let together = Arc::new(Barrier::new(AT_ONCE));
        for _ in 0..AT_ONCE {
            let (path, say, together) = (path.clone(), say.clone(), together.clone());
            std::thread::spawn(move || {
                let options = Options { path: Some(&path), ..Options::default() };
                together.wait();
                let _ = keep(&options, || say.send(true).unwrap()).map_err(|_| say.send(false));
            });
        }
        let listen = (0..AT_ONCE).filter(|_| said.recv_timeout(PATIENCE).unwrap()).count();
        assert_eq!(listen, 1);
        assert!(Host::at(&path).is_ok());
    }
}

#[test]
fn descriptors_that_strangers_send_are_closed_and_who_does_not_read_is_out() {
    let folder = tempfile::tempdir().unwrap();
    let path = keeper(folder.path());
    let honest = Host::at(&path).unwrap();
    let (end, _other) = rustix::pipe::pipe().unwrap();
    let before = descriptors_of(&end);
    for _ in 0..100 {
        let socket = stranger(&path);
        ask(&socket, HELLO);
        let mut room = [std::mem::MaybeUninit::uninit(); 256];
        let mut control = SendAncillaryBuffer::new(&mut room);
        let ends = [end.as_fd(); 4];
        control.push(SendAncillaryMessage::ScmRights(&ends));
        let bytes = [std::io::IoSlice::new(br#""State""#)];
        // (Since Linux 6.16 they can't be sent there at all. Before, who sends too many is out.)
        if sendmsg(&socket, &bytes, &mut control, SendFlags::NOSIGNAL).is_ok() {
            said(&socket);
        }
    }
    let began = std::time::Instant::now();
    // (They are closed by another thread, since a stranger's close may wait.)
    while descriptors_of(&end) > before {
        assert!(began.elapsed() < PATIENCE, "{} descriptors are open", descriptors_of(&end));
        std::thread::sleep(Duration::from_millis(5));
    }
    // Questions without end, and no look at an answer.
    let deaf = stranger(&path);
    while send(&deaf, br#""State""#, SendFlags::NOSIGNAL).is_ok() {}
    assert!(honest.state().is_ok());
    // As many as may come, and one more, who is told that he may not.
    let many: Vec<_> = (0..2000).map(|_| stranger(&path)).collect();
    assert!(honest.state().is_ok());
    drop(many);
}

#[test]
fn when_the_keeper_has_gone_calls_say_so_and_the_memory_stays() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let mut child = by_itself(&path);
    let (one, other) = (Host::at(&path).unwrap(), Host::at(&path).unwrap());
    let how = Permission::default();
    let (region, same) =
        (one.allocate(1, 4096, &how).unwrap(), other.allocate(1, 4096, &how).unwrap());
    let (to, from) =
        (region.transmit(Use::default()).unwrap(), same.receive(Use::default()).unwrap());
    let (locks, theirs) =
        (one.locks(1, 1, 0o600, true).unwrap(), other.locks(1, 1, 0o600, false).unwrap());
    let waits = std::thread::spawn(move || theirs.acquire(0, ringlet_reflect::Wait::Forever));
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(one.await_end(PATIENCE), Ok(true));
    assert_eq!(
        waits.join().unwrap(),
        Err(Status::NotInitialised),
        "nobody can tell whether its holder is there"
    );
    to.put(0, &[7]).unwrap();
    assert_eq!(from.words()[0].load(std::sync::atomic::Ordering::Acquire), 7);
    assert_eq!(one.allocate(2, 4096, &how).err(), Some(Status::NotInitialised));
    assert_eq!(one.state().err(), Some(Status::NotInitialised));
    drop((to, from, region, same, locks));
}

/// A keeper in a process of its own, to be killed: this program again.
fn begin(path: &Path) -> std::process::Child {
    std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "a_keeper_by_itself", "--nocapture"])
        .env("REFLECT_KEEPER", path)
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::null())
        .spawn()
        .unwrap()
}

fn is_ready(child: &mut std::process::Child) -> bool {
    let output = std::io::BufReader::new(child.stdout.as_mut().unwrap());
    std::io::BufRead::lines(output).any(|line| line.unwrap() == "ready")
}

fn by_itself(path: &Path) -> std::process::Child {
    let mut child = begin(path);
    assert!(is_ready(&mut child));
    child
}

#[test]
fn a_keeper_by_itself() {
    let Some(path) = std::env::var_os("REFLECT_KEEPER") else { return };
    let path = PathBuf::from(path);
    let options = Options { path: Some(&path), stays: true, ..Options::default() };
    keep(&options, || println!("\nready")).unwrap();
}
