//! A host's keeper: it makes the memory of regions and locks, and says who may map it. It reads nothing of what is written there but who holds a lock.
//!
//! One thread answers all, and waits for nobody: a question is one packet, and so is its answer. Who asks otherwise, or does not read, is out. A process
//! has gone when its socket has: what it had is given back then, and its locks are nobody's.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions, TryLockError};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, IntoRawFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

use ringlet_core::reflect::LockWord;
use ringlet_core::sync::Ordering;
use ringlet_linux::sys::Errno;
use ringlet_linux::{futex, meet};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::PAGE_BYTES;
use crate::host::{RAILS, abstract_name};
use crate::memory::{self, Mapping};
use crate::protocol::{
    ANSWER_BYTES, ASK_BYTES, Answer, Ask, LockState, MemberState, RegionState, State, VERSION,
};
pub use crate::registry::Limits;
use crate::registry::{Direction, Member, Registry, Unused};
use crate::status::Status;

/// Programs that are with it at a time.
const MEMBERS_MOST: usize = 4096;
/// Regions and sets that are there at a time: mappings of a process are few.
const MADE_MOST: usize = 16_384;
/// Descriptors of a region, and what the keeper needs beside.
const DESCRIPTORS: usize = 4;
const DESCRIPTORS_BESIDE: usize = 64;
/// Pages of which one program may be told.
const WATCHES_MOST: usize = 1 << 16;
/// For another one that is about to listen at the same path.
const BEGINS: Duration = Duration::from_secs(10);
/// Of one user but root.
const MEMBERS_OF_A_USER: usize = 1024;
/// Packets of one program that are answered before others have their turn.
const AT_ONCE: usize = 64;
/// One that was started by a program ends when for so long nobody was there.
const IDLE: Duration = Duration::from_secs(5);
/// What one answer shows of each kind.
const SHOWN: usize = 400;

/// Where it is found, and for how long it stays.
pub struct Options<'a> {
    /// A socket that all users can reach; otherwise it is this user's, by a name.
    pub path: Option<&'a Path>,
    pub limits: Limits,
    /// Though nobody is there.
    pub stays: bool,
}

impl Default for Options<'_> {
    fn default() -> Self {
        let most = 1 << 34;
        Options { path: None, limits: Limits { all: most, received: most }, stays: false }
    }
}

struct Memory {
    data: OwnedFd,
    /// What is written where there is no loopback, which nobody on this host reads.
    apart: Option<OwnedFd>,
    /// Of each page: how often somebody was told of writes, and how many wish to be.
    changes: OwnedFd,
    wishes: OwnedFd,
    wished: Mapping,
}

struct Words {
    memory: OwnedFd,
    words: Mapping,
}

struct Client {
    socket: OwnedFd,
    uid: u32,
    /// Its process: a child may have the socket still when it has gone.
    process: Option<OwnedFd>,
    /// Once it has said hello.
    member: Option<u32>,
    /// Region and page, and how often.
    watches: BTreeMap<(u32, u32), u32>,
    is_over: bool,
}

/// (By their numbers in the registry.)
struct Keeper {
    registry: Registry,
    memories: BTreeMap<u32, Memory>,
    words: BTreeMap<u32, Words>,
    clients: Vec<Client>,
    clients_most: usize,
    /// Listens by a name that all users can reach, and is not theirs.
    is_own: bool,
    /// Error counts of rails: on one host none can happen.
    rails: OwnedFd,
    barriers: bool,
    name: String,
}

/// Binds, calls `ready`, and serves. Returns when it is over: nobody has been there for a while, if it does not stay.
pub fn keep(options: &Options, ready: impl FnOnce()) -> std::io::Result<()> {
    let descriptors = widen();
    let listener = match options.path {
        Some(path) => listen_at(path)?,
        None => {
            let errno = |errno: Errno| std::io::Error::from_raw_os_error(errno.0);
            memory::own(
                meet::serve(&abstract_name(rustix::process::geteuid().as_raw())).map_err(errno)?,
            )
        }
    };
    let no_memory = |status: Status| std::io::Error::other(status.about());
    let mut keeper = Keeper {
        // (Half of what there is for those who come, two for each; nobody who makes regions keeps others out.)
        registry: Registry::new(
            options.limits,
            MADE_MOST.min((descriptors / 2).saturating_sub(DESCRIPTORS_BESIDE) / DESCRIPTORS),
        ),
        memories: BTreeMap::new(),
        words: BTreeMap::new(),
        clients: Vec::new(),
        clients_most: MEMBERS_MOST.min(descriptors / 4),
        is_own: options.path.is_none(),
        rails: memory::make(memory::words_bytes(RAILS)).map_err(no_memory)?,
        barriers: register_barriers(),
        name: rustix::system::uname().nodename().to_string_lossy().into_owned(),
    };
    ready();
    let mut seen = Instant::now();
    loop {
        if !keeper.clients.is_empty() {
            seen = Instant::now();
        }
        if !options.stays && seen.elapsed() >= IDLE {
            return Ok(());
        }
        keeper.turn(&listener);
    }
}

/// How many descriptors there may be.
fn widen() -> usize {
    let most = getrlimit(Resource::Nofile).maximum;
    let _ = setrlimit(Resource::Nofile, Rlimit { current: most, maximum: most });
    getrlimit(Resource::Nofile).current.map_or(usize::MAX, |most| most as usize)
}

/// Of two that begin at once one would remove the other's socket.
fn begin_alone(path: &Path) -> std::io::Result<File> {
    let mut name = path.as_os_str().to_owned();
    name.push(".lock");
    let flags = libc::O_NOFOLLOW;
    let mut options = OpenOptions::new();
    let options = options.write(true).create(true).mode(0o600).custom_flags(flags);
    let (file, began) = (options.open(name)?, Instant::now());
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(TryLockError::WouldBlock) if began.elapsed() < BEGINS => {
                std::thread::sleep(Duration::from_millis(2));
            }
            Err(error) => return Err(error.into()),
        }
    }
}

/// (One that is left of a keeper that has ended is replaced.)
fn listen_at(path: &Path) -> std::io::Result<OwnedFd> {
    use rustix::net::{
        AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with,
    };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let make = || socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None);
    let address = SocketAddrUnix::new(path)?;
    let _alone = begin_alone(path)?;
    let is_socket = std::fs::symlink_metadata(path).is_ok_and(|seen| seen.file_type().is_socket());
    if is_socket && connect(&make()?, &address) == Err(rustix::io::Errno::CONNREFUSED) {
        std::fs::remove_file(path)?;
    }
    let socket = make()?;
    meet::admit_descriptors(socket.as_raw_fd(), false);
    bind(&socket, &address)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o666))?;
    listen(&socket, 128)?;
    Ok(socket)
}

/// Can all processes that write be made to pass a barrier?
pub(crate) fn register_barriers() -> bool {
    barrier(libc::MEMBARRIER_CMD_REGISTER_GLOBAL_EXPEDITED)
}

fn barrier(command: libc::c_int) -> bool {
    // SAFETY: no memory is passed.
    #[allow(unsafe_code)]
    unsafe {
        libc::syscall(libc::SYS_membarrier, command, 0, 0) == 0
    }
}

impl Keeper {
    fn turn(&mut self, listener: &OwnedFd) {
        let has_room = self.clients.len() < self.clients_most;
        let first = if has_room { PollFlags::IN } else { PollFlags::empty() };
        let mut fds = vec![PollFd::new(listener, first)];
        for client in &self.clients {
            fds.push(PollFd::new(&client.socket, PollFlags::IN));
            // (In place of one that has none its socket again.)
            fds.push(PollFd::new(client.process.as_ref().unwrap_or(&client.socket), PollFlags::IN));
        }
        let second = Timespec { tv_sec: 1, tv_nsec: 0 };
        let _ = poll(&mut fds, Some(&second));
        let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        for at in (0..self.clients.len()).rev() {
            let [socket, process] = [ready[1 + 2 * at], ready[2 + 2 * at]];
            if socket {
                self.serve(at);
            }
            self.clients[at].is_over |= process && self.clients[at].process.is_some();
            if self.clients[at].is_over {
                let client = self.clients.swap_remove(at);
                self.gone(client);
            }
        }
        if ready[0] {
            self.accept(listener.as_fd());
        }
    }

    fn accept(&mut self, listener: BorrowedFd) {
        let Ok(socket) = meet::accept(listener.as_raw_fd()) else {
            // KERNEL: who waits makes the listener readable again and again.
            return std::thread::sleep(Duration::from_millis(1));
        };
        let socket = memory::own(socket);
        let Ok(uid) = meet::credentials(socket.as_raw_fd()).map(|peer| peer.uid) else { return };
        let of_user = self.clients.iter().filter(|client| client.uid == uid).count();
        let may =
            uid == 0 || of_user < MEMBERS_OF_A_USER && (!self.is_own || meet::is_our_user(uid));
        match process_of(&socket) {
            Ok(process) if may => {
                let (member, watches) = (None, BTreeMap::new());
                self.clients.push(Client { socket, uid, process, member, watches, is_over: false });
            }
            _ => meet::part(socket.into_raw_fd()),
        }
    }

    fn serve(&mut self, at: usize) {
        for _ in 0..AT_ONCE {
            let mut bytes = [0; ASK_BYTES];
            // (Descriptors that came are closed: nobody has any to give.)
            let is_answered = match meet::receive(self.clients[at].socket.as_raw_fd(), &mut bytes) {
                Ok((length, _)) if length > 0 => self.serve_one(at, &bytes[..length]),
                Err(Errno::EAGAIN) => return,
                _ => false,
            };
            if !is_answered {
                self.clients[at].is_over = true;
                return;
            }
        }
    }

    /// False if who asks is out.
    fn serve_one(&mut self, at: usize, question: &[u8]) -> bool {
        let Ok(ask) = serde_json::from_slice::<Ask>(question) else { return false };
        let (answer, memory) = match self.answer(at, ask) {
            Ok(answered) => answered,
            Err(status) => (Answer::No(status), Vec::new()),
        };
        let Ok(text) = serde_json::to_vec(&answer) else { return false };
        let fds: Vec<i32> = memory.iter().map(AsRawFd::as_raw_fd).collect();
        text.len() <= ANSWER_BYTES
            && meet::send(self.clients[at].socket.as_raw_fd(), &text, &fds).is_ok()
    }

    fn answer(&mut self, at: usize, ask: Ask) -> Result<(Answer, Vec<OwnedFd>), Status> {
        let member = match (self.clients[at].member, &ask) {
            (None, Ask::Hello { version: VERSION }) => return self.welcome(at),
            (Some(member), _) => member,
            (None, Ask::State) => 0,
            (None, _) => return Err(Status::NotInitialised),
        };
        let done = Ok((Answer::Done, Vec::new()));
        match ask {
            Ask::Hello { .. } => Err(Status::BadParameter),
            Ask::Allocate { key, bytes, how } => {
                let (id, is_new) = self.registry.allocate(member, key, bytes, &how)?;
                let bytes = self.registry.regions[&id].bytes;
                if is_new {
                    match Memory::make(bytes as usize) {
                        Ok(memory) => drop(self.memories.insert(id, memory)),
                        Err(status) => {
                            let _ = self.registry.deallocate(member, id);
                            return Err(status);
                        }
                    }
                }
                Ok((Answer::Region { id, bytes }, Vec::new()))
            }
            Ask::Attach { id, direction, how } => {
                self.registry.attach(member, id, direction, how)?;
                let bytes = self.registry.regions[&id].bytes;
                let memory = self.memories.get_mut(&id).ok_or(Status::BadRegion)?;
                let given = match direction {
                    Direction::Transmit => memory.given_to_transmit(bytes as usize, how.loopback),
                    Direction::Receive => memory.given_to_receive(),
                };
                match given {
                    Ok(given) => Ok((Answer::Memory { bytes }, given)),
                    Err(status) => {
                        let _ = self.registry.detach(member, id, direction);
                        Err(status)
                    }
                }
            }
            Ask::Detach { id, direction } => {
                self.registry.detach(member, id, direction)?;
                if direction == Direction::Receive {
                    self.unwatch(at, Some(id));
                }
                done
            }
            Ask::Deallocate { id } => {
                if self.registry.deallocate(member, id)? {
                    self.memories.remove(&id);
                }
                done
            }
            Ask::Locks { key, count, mode, creates } => {
                let (id, is_new) = self.registry.locks(member, key, count, mode, creates)?;
                let given = if is_new { self.make_locks(id, member, creates) } else { Ok(()) };
                let given = given.and_then(|()| {
                    let memory = &self.words.get(&id).ok_or(Status::BadLock)?.memory;
                    memory.try_clone().map_err(|_| Status::NoMemory)
                });
                match given {
                    Ok(memory) => {
                        let count = self.registry.sets[&id].count;
                        Ok((Answer::Locks { id, count }, vec![memory]))
                    }
                    Err(status) => {
                        let _ = self.drop_locks(member, id);
                        Err(status)
                    }
                }
            }
            Ask::DropLocks { id } => {
                self.drop_locks(member, id)?;
                done
            }
            Ask::Watch { id, page, on } => {
                let region = self.registry.regions.get(&id).ok_or(Status::BadRegion)?;
                let attached = region.entry.users.get(&member).ok_or(Status::NotAllocated)?;
                if !attached.receives || u64::from(page) >= region.bytes / PAGE_BYTES as u64 {
                    return Err(Status::BadParameter);
                }
                self.watch(at, id, page, on)?;
                done
            }
            Ask::Look { id, lock } => {
                let set = self.registry.sets.get(&id).ok_or(Status::BadLock)?;
                if !set.entry.users.contains_key(&member) || lock as usize >= set.count {
                    return Err(Status::BadLock);
                }
                let words = &self.words.get(&id).ok_or(Status::BadLock)?.words;
                let word = lock_at(words, lock as usize);
                match word.holder() {
                    Some(holder) if !set.entry.users.contains_key(&holder) => {
                        // (What it holds was written by nobody who may.)
                        if word.give_up(holder) {
                            futex::wake(&word.0);
                        }
                        Err(Status::CorruptLock)
                    }
                    _ => done,
                }
            }
            Ask::State => Ok((Answer::State(Box::new(self.state(member))), Vec::new())),
        }
    }

    fn welcome(&mut self, at: usize) -> Result<(Answer, Vec<OwnedFd>), Status> {
        let socket = &self.clients[at].socket;
        let peer = credentials(socket.as_raw_fd())?;
        // (All users and groups that a user namespace does not know have one number there, and are not one.)
        if meet::is_vague(peer.uid) || meet::is_vague(peer.gid) {
            return Err(Status::Denied);
        }
        let mut groups = vec![peer.gid];
        groups.extend(groups_of(socket.as_raw_fd()));
        groups.retain(|group| !meet::is_vague(*group));
        let who = Member { pid: peer.pid, uid: peer.uid, groups };
        let rails = memory::to_read(&self.rails)?;
        let member = self.registry.join(who)?;
        self.clients[at].member = Some(member);
        Ok((Answer::Welcome { member, barriers: self.barriers }, vec![rails.into()]))
    }

    /// The creator has the first one, before anybody else can.
    fn make_locks(&mut self, id: u32, member: u32, takes_first: bool) -> Result<(), Status> {
        let count = self.registry.sets[&id].count;
        let bytes = memory::words_bytes(count);
        let memory = memory::make(bytes)?;
        let words = memory::map(&memory, bytes, true)?;
        if takes_first {
            let _ = lock_at(&words, 0).try_acquire(member);
        }
        self.words.insert(id, Words { memory, words });
        Ok(())
    }

    fn watch(&mut self, at: usize, id: u32, page: u32, on: bool) -> Result<(), Status> {
        let memory = self.memories.get(&id).ok_or(Status::BadRegion)?;
        let wish = memory.wished.word(page as usize);
        let watches = &mut self.clients[at].watches;
        if on && watches.len() >= WATCHES_MOST {
            return Err(Status::Full);
        }
        let count = watches.entry((id, page)).or_default();
        if on {
            *count += 1;
            wish.fetch_add(1, Ordering::SeqCst);
            // ORDER: who writes looks at the wish behind its store, with no barrier of its own if it is registered. Behind this each such
            // store is seen, or the wish was: `Transmitter::notify`.
            if self.barriers {
                barrier(libc::MEMBARRIER_CMD_GLOBAL_EXPEDITED);
            }
        } else if *count > 0 {
            *count -= 1;
            wish.fetch_sub(1, Ordering::SeqCst);
        }
        if *count == 0 {
            self.clients[at].watches.remove(&(id, page));
        }
        Ok(())
    }

    /// The wishes of one region, or of all.
    fn unwatch(&mut self, at: usize, only: Option<u32>) {
        let watches = &mut self.clients[at].watches;
        forget(&self.memories, watches, only);
    }

    fn gone(&mut self, mut client: Client) {
        meet::part(client.socket.into_raw_fd());
        forget(&self.memories, &mut client.watches, None);
        let Some(member) = client.member else { return };
        for id in self.registry.sets.keys() {
            self.give_up(member, *id);
        }
        let Unused { regions, sets } = self.registry.leave(member);
        regions.iter().for_each(|id| drop(self.memories.remove(id)));
        sets.iter().for_each(|id| drop(self.words.remove(id)));
    }

    fn drop_locks(&mut self, member: u32, id: u32) -> Result<(), Status> {
        self.give_up(member, id);
        if self.registry.drop_locks(member, id)? {
            self.words.remove(&id);
        }
        Ok(())
    }

    /// What it holds of this set is nobody's.
    fn give_up(&self, member: u32, id: u32) {
        let set = self.registry.sets.get(&id).filter(|set| set.entry.users.contains_key(&member));
        let (Some(set), Some(words)) = (set, self.words.get(&id)) else { return };
        for word in (0..set.count).map(|lock| lock_at(&words.words, lock)) {
            if word.give_up(member) {
                futex::wake(&word.0);
            }
        }
    }

    /// (Who asks and has nothing is not counted.)
    fn state(&self, asks: u32) -> State {
        let registry = &self.registry;
        let has = registry.has(asks);
        let (members, regions, sets) = (&registry.members, &registry.regions, &registry.sets);
        let member = |(member, who): (&u32, &Member)| MemberState {
            member: *member,
            pid: who.pid,
            uid: who.uid,
        };
        let region = |(id, region): (&u32, &crate::registry::RegionEntry)| {
            let users = &region.entry.users;
            let wished = &self.memories[id].wished;
            let pages = (region.bytes as usize / PAGE_BYTES).min(1 << 16);
            RegionState {
                id: *id,
                key: region.entry.key,
                bytes: region.bytes,
                mode: region.entry.mode,
                owner: region.entry.owner,
                coherent: region.coherent,
                users: users.keys().copied().take(SHOWN).collect(),
                transmit: users
                    .iter()
                    .filter(|(_, each)| each.transmits)
                    .map(|(member, _)| *member)
                    .take(SHOWN)
                    .collect(),
                receive: users
                    .iter()
                    .filter(|(_, each)| each.receives)
                    .map(|(member, _)| *member)
                    .take(SHOWN)
                    .collect(),
                watched: (0..pages)
                    .filter(|page| wished.word(*page).load(Ordering::Relaxed) != 0)
                    .count() as u32,
            }
        };
        let set = |(id, set): (&u32, &crate::registry::LockEntry)| {
            let words = &self.words[id].words;
            let held = (0..set.count)
                .filter_map(|lock| Some((lock as u32, lock_at(words, lock).holder()?)));
            LockState {
                id: *id,
                key: set.entry.key,
                count: set.count,
                mode: set.entry.mode,
                owner: set.entry.owner,
                users: set.entry.users.keys().copied().take(SHOWN).collect(),
                held: held.take(SHOWN).collect(),
            }
        };
        let mut state = State {
            host: self.name.clone(),
            allocated: regions.values().map(|region| region.bytes).sum(),
            allocated_most: registry.limits.all,
            received_most: registry.limits.received,
            members: members
                .iter()
                .filter(|(member, _)| has || **member != asks)
                .map(member)
                .take(SHOWN)
                .collect(),
            regions: regions.iter().map(region).take(SHOWN).collect(),
            sets: sets.iter().map(set).take(SHOWN).collect(),
            is_cut: members.len().max(regions.len()).max(sets.len()) > SHOWN,
        };
        // (The lists of users may still make it too long.)
        while serde_json::to_vec(&state).is_ok_and(|text| text.len() > ANSWER_BYTES) {
            let half = |length: usize| length / 2;
            state.members.truncate(half(state.members.len()));
            state.regions.truncate(half(state.regions.len()));
            state.sets.truncate(half(state.sets.len()));
            state.is_cut = true;
        }
        state
    }
}

fn forget(
    memories: &BTreeMap<u32, Memory>,
    watches: &mut BTreeMap<(u32, u32), u32>,
    only: Option<u32>,
) {
    watches.retain(|(id, page), count| {
        let is_it = only.is_none_or(|only| only == *id);
        if let (true, Some(memory)) = (is_it, memories.get(id)) {
            memory.wished.word(*page as usize).fetch_sub(*count, Ordering::SeqCst);
        }
        !is_it
    });
}

fn lock_at(words: &Mapping, lock: usize) -> &LockWord {
    words.area().at(lock * size_of::<u32>())
}

/// As the kernel vouches; none where it does not tell (before Linux 6.5, of a process in another pid namespace).
fn process_of(socket: &OwnedFd) -> Result<Option<OwnedFd>, Errno> {
    const SO_PEERPIDFD: libc::c_int = 77;
    let (mut process, mut length) = (-1, size_of::<libc::c_int>() as libc::socklen_t);
    let fd = socket.as_raw_fd();
    // SAFETY: room for a descriptor's number.
    #[allow(unsafe_code)]
    let told = unsafe {
        libc::getsockopt(
            fd,
            libc::SOL_SOCKET,
            SO_PEERPIDFD,
            (&raw mut process).cast(),
            &raw mut length,
        )
    };
    if told == 0 {
        return Ok(Some(memory::own(process)));
    }
    // (No descriptor is free, or it has gone already: another one may have its number.)
    if std::io::Error::last_os_error().raw_os_error() != Some(libc::ENOPROTOOPT) {
        return Err(Errno::EMFILE);
    }
    match meet::credentials(fd)?.pid {
        0 => Ok(None),
        pid => Ok(Some(memory::own(ringlet_linux::sys::pidfd(pid)?))),
    }
}

/// With its group. (0 is the pid of a process in a pid namespace that is not seen from here.)
fn credentials(socket: i32) -> Result<libc::ucred, Status> {
    let mut found = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut length = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: room for what is told.
    #[allow(unsafe_code)]
    let told = unsafe {
        libc::getsockopt(
            socket,
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut found).cast(),
            &raw mut length,
        )
    };
    if told == 0 { Ok(found) } else { Err(Status::Denied) }
}

/// Supplementary ones.
fn groups_of(socket: i32) -> Vec<u32> {
    let mut groups = vec![0u32; 1 << 16];
    let mut length = (groups.len() * size_of::<u32>()) as libc::socklen_t;
    // SAFETY: room for so many bytes.
    #[allow(unsafe_code)]
    let told = unsafe {
        libc::getsockopt(
            socket,
            libc::SOL_SOCKET,
            libc::SO_PEERGROUPS,
            groups.as_mut_ptr().cast(),
            &raw mut length,
        )
    };
    groups.truncate(if told == 0 { length as usize / size_of::<u32>() } else { 0 });
    groups
}

impl Memory {
    fn make(bytes: usize) -> Result<Memory, Status> {
        let words = memory::words_bytes(bytes / PAGE_BYTES);
        let wishes = memory::make(words)?;
        Ok(Memory {
            data: memory::make(bytes)?,
            apart: None,
            changes: memory::make(words)?,
            wished: memory::map(&wishes, words, true)?,
            wishes,
        })
    }

    fn given_to_transmit(&mut self, bytes: usize, loopback: bool) -> Result<Vec<OwnedFd>, Status> {
        if !loopback && self.apart.is_none() {
            self.apart = Some(memory::make(bytes)?);
        }
        let written = if loopback { &self.data } else { self.apart.as_ref().unwrap_or(&self.data) };
        let copy = |memory: &OwnedFd| memory.try_clone().map_err(|_| Status::NoMemory);
        Ok(vec![copy(written)?, copy(&self.changes)?, memory::to_read(&self.wishes)?.into()])
    }

    fn given_to_receive(&self) -> Result<Vec<OwnedFd>, Status> {
        Ok(vec![memory::to_read(&self.data)?.into(), memory::to_read(&self.changes)?.into()])
    }
}
