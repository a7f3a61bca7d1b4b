//! Notes last as long as their sockets. Needs the right to load BPF, and passes without (as a user's).

use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use ringlet_linux::proof;
use ringlet_node::notes::{Kernel, Notes, Pair};

const PATIENCE: Duration = Duration::from_secs(30);

fn kernel() -> Option<Kernel> {
    Kernel::watch(&mounted()?, 1 << 16, false).ok()
}

/// Where the root of the unified hierarchy is.
fn mounted() -> Option<PathBuf> {
    let mounts = std::fs::read_to_string("/proc/self/mounts").ok()?;
    let mut fields = mounts.lines().map(|line| line.split(' ').skip(1));
    fields.find_map(|mut fields| {
        let at = fields.next()?;
        (fields.next()? == "cgroup2").then(|| PathBuf::from(at))
    })
}

fn cookie(socket: &impl AsRawFd) -> u64 {
    proof::cookie(socket.as_raw_fd()).unwrap()
}

/// (The kernel closes a connection some time after its programs have.)
fn is_forgotten(notes: &Kernel, cookie: u64, pair: Pair) -> bool {
    let began = Instant::now();
    while notes.of(cookie).is_some() || notes.with(pair).is_some() {
        if began.elapsed() > PATIENCE {
            return false;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    true
}

#[test]
fn a_note_goes_with_its_socket() {
    let Some(notes) = kernel() else { return };
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let far = listener.accept().unwrap().0;
    let known = [cookie(&near), cookie(&far)].map(|cookie| (cookie, notes.of(cookie).unwrap()));
    for (cookie, note) in &known {
        assert_eq!(notes.with(note.pair), Some(*cookie));
    }
    assert_eq!(known[0].1.pair.mirrored(), known[1].1.pair);
    drop((near, far));
    for (cookie, note) in known {
        assert!(is_forgotten(&notes, cookie, note.pair), "{note:?}");
    }
    // One that nobody accepts.
    let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let note = notes.of(cookie(&near)).unwrap();
    assert!(notes.with(note.pair.mirrored()).is_some());
    drop(listener);
    let (near, pair) = (cookie(&near), note.pair);
    assert!(is_forgotten(&notes, near, pair) && is_forgotten(&notes, 0, pair.mirrored()));
}

/// A socket of ours that is given these numbers, as whoever administers a network namespace may.
fn forged(pair: Pair) -> Option<TcpStream> {
    use std::os::fd::{FromRawFd, OwnedFd};
    const REPAIR: i32 = 19;
    const QUEUE: i32 = 20;
    const SEQUENCE: i32 = 21;
    const RECEIVES: i32 = 1;
    const SENDS: i32 = 2;
    // SAFETY: numbers only; then a descriptor that is ours alone.
    let socket = unsafe {
        let made = libc::socket(libc::AF_INET, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0);
        assert!(made >= 0);
        OwnedFd::from_raw_fd(made)
    };
    let set = |option, value: u32| {
        // SAFETY: four bytes.
        let done = unsafe {
            let value = (&raw const value).cast();
            libc::setsockopt(socket.as_raw_fd(), libc::IPPROTO_TCP, option, value, 4)
        };
        done == 0
    };
    let all = set(REPAIR, 1)
        && set(QUEUE, SENDS as u32)
        && set(SEQUENCE, pair.sends)
        && set(QUEUE, RECEIVES as u32)
        && set(SEQUENCE, pair.expects);
    if !all {
        return None;
    }
    let to = libc::sockaddr_in {
        sin_family: libc::AF_INET as u16,
        sin_port: 9u16.to_be(),
        sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes([127, 0, 0, 9]) },
        sin_zero: [0; 8],
    };
    // SAFETY: an address and its size.
    let made = unsafe {
        let len = size_of::<libc::sockaddr_in>() as u32;
        libc::connect(socket.as_raw_fd(), (&raw const to).cast(), len)
    };
    (made == 0).then(|| socket.into())
}

#[test]
fn a_pair_that_came_twice_is_nobody_s_until_all_who_had_it_are_gone() {
    let Some(notes) = kernel() else { return };
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (at, pair) = (cookie(&near), notes.of(cookie(&near)).unwrap().pair);
    for _ in 0..3 {
        let Some(other) = forged(pair) else { return };
        let noted = notes.of(cookie(&other)).map(|note| note.pair);
        assert_eq!(noted, Some(pair), "the forged one is noted");
        assert_eq!(notes.with(pair), Some(0));
        let gone = cookie(&other);
        drop(other);
        assert!(is_forgotten(&notes, gone, Pair::default()));
        // The one that was there first is there still.
        assert_eq!(notes.with(pair), Some(0));
    }
    drop(near);
    assert!(is_forgotten(&notes, at, pair));
}

/// A control group of this test's own, in which it is itself meanwhile.
struct Group {
    path: PathBuf,
    before: PathBuf,
}

impl Group {
    fn enter() -> Option<Group> {
        let mounted = mounted()?;
        let own = std::fs::read_to_string("/proc/self/cgroup").ok()?;
        let own = own.lines().find_map(|line| line.strip_prefix("0::/"))?;
        let before = mounted.join(own);
        let path = mounted.join(format!("ringlet-notes-{}", std::process::id()));
        std::fs::create_dir(&path).ok()?;
        let group = Group { path, before };
        // (Dropped, it goes.)
        group.join(&group.path).ok().map(|()| group)
    }

    fn join(&self, path: &Path) -> std::io::Result<()> {
        std::fs::write(path.join("cgroup.procs"), std::process::id().to_string())
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = self.join(&self.before);
        let _ = std::fs::remove_dir(&self.path);
    }
}

#[test]
fn what_is_kept_is_known_to_the_next_service() {
    let Some(group) = Group::enter() else { return };
    let watch = |connections| Kernel::watch(&group.path, connections, true);
    let Ok(first) = watch(1 << 10) else { return };
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let connect = || {
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (near, listener.accept().unwrap().0)
    };
    let before = connect();
    let note = first.of(cookie(&before.0)).unwrap();
    drop(first);
    let between = connect();
    let next = watch(1 << 10).unwrap();
    assert_eq!(next.of(cookie(&before.0)), Some(note));
    for (near, far) in [&before, &between, &connect()] {
        let [near, far] = [near, far].map(|end| next.of(cookie(end)).expect("a note").pair);
        assert_eq!(near.mirrored(), far);
        // Noted once, by one program: a pair that comes twice is nobody's.
        assert!(next.with(near).is_some_and(|cookie| cookie != 0));
    }
    // One that remembers another number has notes of its own.
    let other = watch(1 << 11).unwrap();
    assert_eq!(other.of(cookie(&before.0)), None);
    drop(other);
    drop(next);
    assert_eq!(Kernel::forget(&group.path).unwrap(), 4);
    assert_eq!(Kernel::forget(&group.path).unwrap(), 0);
    let last = watch(1 << 10).unwrap();
    assert_eq!(last.of(cookie(&before.0)), None);
    Kernel::forget(&group.path).unwrap();
}
