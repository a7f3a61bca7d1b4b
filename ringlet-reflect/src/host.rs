//! A process's connection to its host's keeper.

use std::ffi::{CStr, CString};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use ringlet_core::sync::Ordering;
use ringlet_linux::sys::Errno;
use ringlet_linux::{fd, futex, meet, service};

use crate::keeper::{lock_of, register_barriers};
use crate::lock::Locks;
use crate::log;
use crate::logged::Logged;
use crate::memory::{self, Mapping};
use crate::name;
use crate::process::Process;
use crate::protocol::{ANSWER_BYTES, Answer, Ask, Cluster, State, VERSION, page};
use crate::region::Region;
use crate::registry::{Direction, Permission};
use crate::sampler::Sampler;
use crate::status::Status;

/// Where a keeper for all users of a host listens, and what says otherwise.
pub const PATH: &str = "/run/ringlet/reflect.sock";
pub const VARIABLE: &str = "RINGLET_REFLECT";

/// For an answer, and for a keeper to begin.
const PATIENCE: Duration = Duration::from_secs(30);
/// Who sleeps for an event looks again so often whether the keeper is there.
const LOOK_AGAIN: Duration = Duration::from_secs(1);
/// The same of who waits for a region's contents.
const FILLS: Duration = Duration::from_millis(100);
const BEGINS: Duration = Duration::from_secs(10);

/// One process's membership. Cloned, it is the same. When the last clone, and what was made by it, has gone, all that it had is given back.
#[derive(Clone)]
pub struct Host(pub(crate) Arc<Membership>);

pub(crate) struct Membership {
    wire: Mutex<Wire>,
    patience: Duration,
    /// A copy of it in a child that was forked is not the child's.
    process: Process,
    pub member: u32,
    user: u32,
    socket: RawFd,
    page: Mapping,
    /// In a cluster.
    pub logged: Option<Logged>,
    /// A wish holds only behind a barrier that this process passes too.
    pub has_barriers: bool,
}

struct Wire {
    socket: OwnedFd,
    /// A question was not answered in time: what comes from now on would be taken for the answer to another one.
    is_lost: bool,
}

impl Host {
    /// Joins this host's keeper: the one that [`VARIABLE`] names, or that of all users ([`PATH`]), or this user's, which is started if it is not there.
    ///
    /// Where one for all users has been, it is that one, which is waited for a while: nobody is to be alone by mistake.
    ///
    /// Fails with [`Status::NotInitialised`] if there is none, and none can be started: `ringlet` is looked for in PATH.
    pub fn open() -> Result<Host, Status> {
        match named() {
            Some(path) => Host::at(&path),
            None => Host::open_by(Path::new(PATH), BEGINS),
        }
    }

    fn open_by(path: &Path, begins: Duration) -> Result<Host, Status> {
        let began = Instant::now();
        loop {
            match Host::find_by(path) {
                // (Another time too: one that was about to end may have had the name still.)
                Err(Status::NotInitialised) if began.elapsed() < begins => {
                    if !is_for_all(path) {
                        start()?;
                    }
                    std::thread::sleep(Duration::from_millis(5));
                }
                found => return found,
            }
        }
    }

    /// The same where it has to be there.
    pub fn find() -> Result<Host, Status> {
        match named() {
            Some(path) => Host::at(&path),
            None => Host::find_by(Path::new(PATH)),
        }
    }

    fn find_by(path: &Path) -> Result<Host, Status> {
        match Host::at(path) {
            Err(Status::NotInitialised) if !is_for_all(path) => {}
            found => return found,
        }
        // (There is one, but for moments in which one ends and another one begins.)
        let mut found = Err(Status::NotInitialised);
        for service in name::candidates(rustix::process::geteuid().as_raw()) {
            found = Host::by(|| meet::visit(&service).and_then(fd::hide), |_| false);
            if found.is_ok() {
                break;
            }
        }
        found
    }

    /// The keeper that listens there.
    pub fn at(path: &Path) -> Result<Host, Status> {
        let name = path_name(path)?;
        Host::by(|| visit(&name), |uid| is_theirs(uid, path))
    }

    fn by(
        look: impl Fn() -> Result<i32, Errno>,
        is_believed: impl Fn(u32) -> bool,
    ) -> Result<Host, Status> {
        let socket = reach(look, is_believed)?;
        let (answer, fds) = ask(&socket, &Ask::Hello { version: VERSION }, PATIENCE)?;
        let Answer::Welcome { member, user, barriers, in_cluster } = answer else {
            return Err(Status::NotInitialised);
        };
        let mut fds = fds.into_iter();
        let shared = fds.next().ok_or(Status::NoMemory)?;
        let page = || memory::map(&shared, page::BYTES, false);
        let has_barriers = barriers && register_barriers();
        let number = socket.as_raw_fd();
        let logged = match (in_cluster, fds.next(), fds.next()) {
            (false, ..) => None,
            (true, Some(log), Some(bell)) => {
                let log = memory::map(&log, log::BYTES, true)?;
                Some(Logged::new(log, page()?, bell, number))
            }
            _ => return Err(Status::NoMemory),
        };
        let wire = Mutex::new(Wire { socket, is_lost: false });
        let (process, page) = (Process::this()?, page()?);
        Ok(Host(Arc::new(Membership {
            wire,
            patience: PATIENCE,
            process,
            member,
            user,
            socket: number,
            page,
            logged,
            has_barriers,
        })))
    }

    /// Its number: what a lock that it holds has.
    pub fn member(&self) -> u32 {
        self.0.member
    }

    /// Whose process it is, as the keeper sees it: what owners are compared with.
    pub fn user(&self) -> u32 {
        self.0.user
    }

    /// The region of this key, of so many bytes (whole pages are made of it); the first one who asks makes it.
    ///
    /// [`Status::BadSize`], [`Status::Incoherent`]: it is there, and was made otherwise. [`Status::Prior`]: this process has it already. [`Status::Denied`]:
    /// it may neither be read nor written. [`Status::Full`]: there is no room for it.
    pub fn allocate(&self, key: u64, bytes: usize, how: &Permission) -> Result<Region, Status> {
        match self.0.ask(&Ask::Allocate { key, bytes: bytes as u64, how: *how })? {
            (Answer::Region { id, bytes, made }, _) => {
                Ok(Region::new(self.0.clone(), id, key, bytes as usize, made))
            }
            _ => Err(Status::NotInitialised),
        }
    }

    /// The locks of this key: `count` of them if they have to be made, else as many as there are.
    ///
    /// With `creates` the set is made, and its first lock taken, in one step, or it is there: [`Status::Exists`]. So whoever creates it can prepare what
    /// it guards, and then releases it.
    pub fn locks(&self, key: u64, count: usize, mode: u32, creates: bool) -> Result<Locks, Status> {
        match self.0.ask(&Ask::Locks { key, count, mode, creates })? {
            (Answer::Locks { id, count, made }, fds) => {
                let words = fds.first().ok_or(Status::NoMemory);
                match words.and_then(|words| {
                    // (In a cluster the keeper alone writes there.)
                    memory::map(words, memory::words_bytes(count), self.0.logged.is_none())
                }) {
                    Ok(words) => Ok(Locks::new(self.0.clone(), id, count, made, words)),
                    Err(status) => {
                        // (With the first one, if it was created.)
                        let _ = self.0.ask(&Ask::DropLocks { id });
                        Err(status)
                    }
                }
            }
            _ => Err(Status::NotInitialised),
        }
    }

    /// Logical rails, numbered from 0. (On one host there is memory only, which is one.)
    pub fn rails(&self) -> usize {
        let number = self.0.page.word(page::RAILS).load(Ordering::Relaxed) as usize;
        number.clamp(1, page::RAILS_MOST)
    }

    /// Errors of a rail until now: negative while it is being counted, then look again. See [`Host::check_errors`].
    pub fn errors(&self, rail: usize) -> Result<i32, Status> {
        if rail >= self.rails() {
            return Err(Status::BadRail);
        }
        self.0.lives()?;
        // ORDER: Acquire, pairs with the fence in `check_errors`: a count that was read before something was written is not read behind it.
        let count = self.0.page.word(rail).load(Ordering::Acquire);
        let lost = self.0.logged.as_ref().map_or(0, Logged::lost);
        Ok((count.wrapping_add(lost) & i32::MAX as u32) as i32)
    }

    /// Has everybody what this process has written since the count was this? If so, the count is the same; if not, what was written is to be written
    /// again, with the new count (Gillett's protocol). On one host no write is ever lost. In a cluster it waits until all hosts have all of it:
    /// [`Status::ChannelError`] where that can't be told, since this host has lost touch with the others.
    pub fn check_errors(&self, rail: usize, since: i32) -> Result<i32, Status> {
        // ORDER: what was written is out before the count is read (pairs with Acquire in `errors`).
        ringlet_core::sync::fence(Ordering::SeqCst);
        let is_same = |count: i32| count == since && count >= 0;
        if self.0.logged.is_some() && is_same(self.errors(rail)?) {
            self.0.ask(&Ask::Settle)?;
        }
        match self.errors(rail)? {
            count if is_same(count) => Ok(count),
            _ => Err(Status::ChannelError),
        }
    }

    /// The hosts and rails that there are just now.
    pub fn cluster(&self) -> Result<Cluster, Status> {
        match self.0.ask(&Ask::Cluster)? {
            (Answer::Cluster(cluster), _) => Ok(cluster),
            _ => Err(Status::NotInitialised),
        }
    }

    /// Waits until the cluster is another than this, at most so long: hosts, rails, or that this host is cut off. [`Status::Timeout`]: it is not;
    /// [`Status::Interrupted`] by a signal; [`Status::NotInitialised`]: the keeper has gone.
    pub fn wait_event(&self, known: &Cluster, timeout: Duration) -> Result<Cluster, Status> {
        self.0.lives()?;
        let (began, events) = (Instant::now(), self.0.page.word(page::EVENTS));
        loop {
            // ORDER: Acquire, pairs with Release in `cluster::ring`: what is asked behind it is as new.
            if events.load(Ordering::Acquire) != known.event {
                return self.cluster();
            }
            let left = timeout.saturating_sub(began.elapsed());
            if left.is_zero() {
                return Err(Status::Timeout);
            }
            match futex::wait_word(events, known.event, left.min(LOOK_AGAIN).as_nanos() as u64) {
                Err(Errno::EINTR) => return Err(Status::Interrupted),
                _ if self.await_end(Duration::ZERO)? => return Err(Status::NotInitialised),
                _ => {}
            }
        }
    }

    /// Says, and answers for it, that this host of the cluster is dead for good: the others need its vote no more. For who may look after the keeper.
    pub fn bury(&self, host: &str) -> Result<(), Status> {
        self.0.ask(&Ask::Bury { node: host.into() }).map(drop)
    }

    /// Why this process can't give back a region of that number, which it has not allocated: others have ([`Status::NotAllocated`]), or nobody has
    /// ([`Status::BadRegion`]). (One that it has allocated is given back.)
    pub fn deallocate(&self, id: u32) -> Result<(), Status> {
        self.0.ask(&Ask::Deallocate { id }).map(drop)
    }

    /// The same of locks: [`Status::NotAllocated`], [`Status::BadLock`].
    pub fn drop_locks(&self, id: u32) -> Result<(), Status> {
        self.0.ask(&Ask::DropLocks { id }).map(drop)
    }

    /// What is there: members, regions, locks.
    pub fn state(&self) -> Result<State, Status> {
        match self.0.ask(&Ask::State)? {
            (Answer::State(state), _) => Ok(*state),
            _ => Err(Status::NotInitialised),
        }
    }

    /// To see from outside how much is written to a region of that number, on at most so many of its pages. [`Status::Denied`]: it may not be read.
    pub fn sampler(&self, id: u32, pages_most: u64) -> Result<Sampler, Status> {
        match self.0.ask(&Ask::Sample { id })? {
            (Answer::Memory { bytes }, fds) => match <[OwnedFd; 2]>::try_from(fds) {
                Ok([data, changes]) => Sampler::new(bytes, data, changes, pages_most),
                Err(_) => Err(Status::NoMemory),
            },
            _ => Err(Status::NotInitialised),
        }
    }

    /// Waits until the keeper has gone, at most so long. True if it has; [`Status::Interrupted`] by a signal.
    pub fn await_end(&self, timeout: Duration) -> Result<bool, Status> {
        // (Not `lives`: that the keeper has gone is the answer.)
        if !self.0.process.is_this() {
            return Err(Status::NotInitialised);
        }
        if !page::keeper_lives(&self.0.page) {
            return Ok(true);
        }
        let socket = self.0.socket;
        // (Answers to others' questions are none of it.)
        let mut fds = [fd::pollfd { fd: socket, events: libc::POLLRDHUP, revents: 0 }];
        match fd::poll(&mut fds, Some(timeout.as_nanos() as u64), None) {
            Ok(ready) => Ok(ready > 0),
            Err(Errno::EINTR) => Err(Status::Interrupted),
            Err(_) => Err(Status::NoMemory),
        }
    }
}

impl Membership {
    /// Is this the process that has joined, and its keeper there? Another keeper knows nothing of it, and has other memory, and other locks.
    #[inline]
    pub fn lives(&self) -> Result<(), Status> {
        let lives = self.process.is_this() && page::keeper_lives(&self.page);
        if lives { Ok(()) } else { Err(Status::NotInitialised) }
    }

    /// What was attached can be used once all of it has come, and is waited for as long as more comes: then its size and memory.
    pub fn await_contents(
        &self,
        id: u32,
        direction: Direction,
        mut answered: (Answer, Vec<OwnedFd>),
    ) -> Result<(u64, Vec<OwnedFd>), Status> {
        let (mut had, mut since) = (None, Instant::now());
        let events = self.page.word(page::EVENTS);
        loop {
            match answered {
                (Answer::Memory { bytes }, fds) => return Ok((bytes, fds)),
                (Answer::Filling { came }, _) if had != Some(came) => {
                    (had, since) = (Some(came), Instant::now());
                }
                (Answer::Filling { .. }, _) if since.elapsed() < self.patience => {}
                (Answer::Filling { .. }, _) => return Err(Status::Timeout),
                _ => return Err(Status::NotInitialised),
            }
            // ORDER: Acquire, pairs with Release in `cluster::ring`: what is asked behind it is as new.
            let seen = events.load(Ordering::Acquire);
            answered = self.ask(&Ask::Filled { id, direction })?;
            if matches!(answered.0, Answer::Filling { .. }) {
                let _ = futex::wait_word(events, seen, FILLS.as_nanos() as u64);
            }
        }
    }

    pub fn ask(&self, what: &Ask) -> Result<(Answer, Vec<OwnedFd>), Status> {
        self.lives()?;
        let mut wire = self.wire.lock().unwrap_or_else(PoisonError::into_inner);
        if wire.is_lost {
            return Err(Status::NotInitialised);
        }
        let answered = ask(&wire.socket, what, self.patience);
        wire.is_lost = matches!(answered, Err(Status::Timeout));
        answered
    }
}

fn path_name(path: &Path) -> Result<CString, Status> {
    CString::new(path.as_os_str().as_bytes()).map_err(|_| Status::BadParameter)
}

/// A keeper listens there, or did: it leaves its socket, and what it locks as it begins (also while the next one replaces the socket).
fn is_for_all(path: &Path) -> bool {
    [path, &lock_of(path)].into_iter().any(|path| path.symlink_metadata().is_ok())
}

/// KERNEL: in a user namespace the host's root reads as nobody. Who may put a socket there is believed then.
fn is_theirs(uid: u32, path: &Path) -> bool {
    meet::is_vague(uid) && is_of_root(path.parent())
}

/// Who listens there; `EPERM` if it may be a container that has put its own socket there.
fn visit(path: &CStr) -> Result<i32, Errno> {
    let visited = service::visit(path, service::Kind::Reflect)?;
    if service::is_believed(&visited) {
        return Ok(visited.socket);
    }
    meet::part(visited.socket);
    Err(Errno::EPERM)
}

/// A keeper that is believed.
fn reach(
    look: impl Fn() -> Result<i32, Errno>,
    is_believed: impl Fn(u32) -> bool,
) -> Result<OwnedFd, Status> {
    let began = Instant::now();
    let socket = loop {
        match look() {
            Ok(socket) => break memory::own(socket),
            // (More have come at once than it could take.)
            Err(Errno::EAGAIN) if began.elapsed() < PATIENCE => {
                std::thread::sleep(Duration::from_millis(2));
            }
            Err(Errno::EAGAIN) => return Err(Status::Timeout),
            Err(Errno::EMFILE | Errno::ENFILE | Errno::ENOMEM) => return Err(Status::NoMemory),
            Err(Errno::EPERM) => return Err(Status::Denied),
            Err(_) => return Err(Status::NotInitialised),
        }
    };
    // (Anybody may have a name; who is believed is root, and this user.)
    let uid = meet::credentials(socket.as_raw_fd()).map_err(|_| Status::NotInitialised)?.uid;
    let is_right = uid == 0 || meet::is_our_user(uid) || is_believed(uid);
    if is_right { Ok(socket) } else { Err(Status::Denied) }
}

/// What the keeper that listens there shows. Who asks becomes no member, for which a cluster that has stopped has no answer.
pub fn state_at(path: &Path) -> Result<State, Status> {
    match ask_at(path, &Ask::State)? {
        Answer::State(state) => Ok(*state),
        _ => Err(Status::NotInitialised),
    }
}

/// Tells the keeper that listens there that this host of its cluster is dead for good, for which an operator answers.
pub fn bury_at(path: &Path, host: &str) -> Result<(), Status> {
    ask_at(path, &Ask::Bury { node: host.into() }).map(drop)
}

fn ask_at(path: &Path, what: &Ask) -> Result<Answer, Status> {
    let name = path_name(path)?;
    let socket = reach(|| visit(&name), |uid| is_theirs(uid, path))?;
    Ok(ask(&socket, what, PATIENCE)?.0)
}

/// (Descriptors are fewer where this process has no room for more: what was answered is so all the same.)
fn ask(
    socket: &impl AsFd,
    what: &Ask,
    patience: Duration,
) -> Result<(Answer, Vec<OwnedFd>), Status> {
    let socket = socket.as_fd().as_raw_fd();
    let text = serde_json::to_vec(what).map_err(|_| Status::BadParameter)?;
    meet::send(socket, &text, &[]).map_err(|_| Status::NotInitialised)?;
    let began = Instant::now();
    let mut bytes = vec![0; ANSWER_BYTES];
    loop {
        match meet::receive(socket, &mut bytes) {
            Ok((0, _)) => return Err(Status::NotInitialised),
            Ok((length, mut fds)) => {
                let answer = serde_json::from_slice(&bytes[..length]);
                let taken = (0..fds.count).filter_map(|at| fds.take(at)).map(memory::own).collect();
                return match answer.map_err(|_| Status::NotInitialised)? {
                    Answer::No(status) => Err(status),
                    answer => Ok((answer, taken)),
                };
            }
            Err(Errno::EAGAIN | Errno::EINTR) => {}
            Err(_) => return Err(Status::NotInitialised),
        }
        let left = patience.checked_sub(began.elapsed()).ok_or(Status::Timeout)?;
        let mut fds = [fd::pollfd { fd: socket, events: libc::POLLIN, revents: 0 }];
        let _ = fd::poll(&mut fds, Some(left.as_nanos() as u64), None);
    }
}

/// Starts this user's keeper, which says nothing, and belongs to nobody.
fn start() -> Result<(), Status> {
    let command = command().filter(|_| !is_privileged()).ok_or(Status::NotInitialised)?;
    let mut child = Command::new(command)
        .args(["reflect", "keep", "--behind"])
        .env_remove("LD_PRELOAD")
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .map_err(|_| Status::NotInitialised)?;
    // (It forks, and ends at once. A program that wants to know of no child, or waits for all, has its end already.)
    let _ = child.wait();
    Ok(())
}

/// A program with more rights than its caller takes no names of files from him.
fn is_privileged() -> bool {
    // SAFETY: only asks what the kernel has told at the start.
    #[allow(unsafe_code)]
    unsafe {
        libc::getauxval(libc::AT_SECURE) != 0
    }
}

/// A folder in which nobody makes anything but root, or users whom this user namespace does not know.
fn is_of_root(folder: Option<&Path>) -> bool {
    use std::os::unix::fs::MetadataExt;
    let seen = folder.and_then(|folder| std::fs::metadata(folder).ok());
    let is = |uid| uid == 0 || meet::is_vague(uid);
    seen.is_some_and(|seen| seen.mode() & 0o022 == 0 && is(seen.uid()))
}

fn named() -> Option<PathBuf> {
    let path = std::env::var_os(VARIABLE).filter(|path| !path.is_empty() && !is_privileged())?;
    Some(path.into())
}

/// The `ringlet` of PATH.
fn command() -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|folder| folder.join("ringlet")).find(|file| file.is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_late_answer_is_not_taken_for_that_to_another_question() {
        let [ours, keeper] = meet::pair().unwrap().map(memory::own);
        let answer = |answer: &Answer, fds: &[i32]| {
            meet::send(keeper.as_raw_fd(), &serde_json::to_vec(answer).unwrap(), fds).unwrap();
        };
        let shared = memory::make(page::BYTES).unwrap();
        let welcome = Answer::Welcome { member: 1, user: 0, barriers: false, in_cluster: false };
        answer(&welcome, &[shared.as_raw_fd()]);
        let ours = std::cell::Cell::new(Some(ours));
        let look = || Ok(std::os::fd::IntoRawFd::into_raw_fd(ours.take().unwrap()));
        let mut host = Host::by(look, |_| false).unwrap();
        Arc::get_mut(&mut host.0).unwrap().patience = Duration::from_millis(1);
        let how = Permission::default();
        assert_eq!(host.allocate(1, 4096, &how).err(), Some(Status::Timeout));
        answer(&Answer::Region { id: 1, bytes: 4096, made: Default::default() }, &[]);
        assert_eq!(host.allocate(2, 4096, &how).err(), Some(Status::NotInitialised));
    }

    /// The one for all users is about to begin, or has ended: who comes meanwhile is none of his own user's.
    #[test]
    fn where_one_for_all_users_has_been_nobody_is_alone() {
        let place = tempfile::tempdir().unwrap();
        let [other, path] = ["other", "socket"].map(|name| place.path().join(name));
        std::thread::spawn(|| crate::keeper::keep(&crate::keeper::Options::default(), || ()));
        let began = Instant::now();
        // (Or of whoever tests beside this.)
        while Host::find_by(&other).is_err() {
            assert!(began.elapsed() < PATIENCE);
            std::thread::sleep(Duration::from_millis(1));
        }
        let flags = rustix::net::SocketFlags::CLOEXEC;
        let (family, kind) = (rustix::net::AddressFamily::UNIX, rustix::net::SocketType::SEQPACKET);
        let socket = rustix::net::socket_with(family, kind, flags, None).unwrap();
        rustix::net::bind(&socket, &rustix::net::SocketAddrUnix::new(&path).unwrap()).unwrap();
        drop(socket);
        let none = Some(Status::NotInitialised);
        assert_eq!(Host::open_by(&path, Duration::from_millis(20)).err(), none);
        // (Between the old socket and the new one.)
        std::fs::rename(&path, lock_of(&path)).unwrap();
        assert_eq!(Host::find_by(&path).err(), none);
        std::fs::remove_file(lock_of(&path)).unwrap();
        std::fs::write(lock_of(&path), "").unwrap();
        let [here, there] = [path.clone(), path.clone()];
        let opened = std::thread::spawn(move || Host::open_by(&here, PATIENCE));
        std::thread::spawn(move || {
            let path = Some(&*there);
            crate::keeper::keep(&crate::keeper::Options { path, ..Default::default() }, || ())
        });
        let opened = opened.join().unwrap().unwrap();
        let state = state_at(&path).unwrap();
        assert_eq!(
            state.members.iter().map(|each| each.member).collect::<Vec<_>>(),
            [opened.member()]
        );
    }
}
