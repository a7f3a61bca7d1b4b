//! Where the ports of a network meet: a directory with a socket of each. Who may enter it, by the kernel's permissions, may be a port.

use std::collections::HashMap;
use std::fs::{self, DirBuilder, File, Permissions};
use std::io::{ErrorKind, Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use ringlet_linux::meet;
use ringlet_linux::sys::{self, Errno};
use ringlet_messages::guarded::Guarded;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{CWD, Mode, OFlags, RenameFlags, openat, renameat_with};
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, listen, socket_with,
};
use serde::{Deserialize, Serialize};

use crate::table::Policy;
use crate::wire::{Answer, Ask, Choice, Span, State, hear, hello, say};

/// Where networks are, and what says otherwise.
pub const DIRECTORY: &str = "/run/ringlet/ethernet";
pub const VARIABLE: &str = "RINGLET_ETHERNET";

pub const PORTS_MOST: usize = 512;
/// The number, in the room, of who spans hosts: it is no port itself.
pub const SPAN: u64 = 0;
/// That of who has a bridge of the kernel's for devices of this host: it has a port besides.
pub const BRIDGE: u64 = 1;
const BACKLOG: i32 = 4096;
const RULES: &str = "network.json";
const RULES_MOST: u64 = 4096;
const SUFFIX: &str = ".port";
/// Who makes or removes a network takes less.
const LEFT: Duration = Duration::from_secs(60);
/// For an answer of somebody who looks only; and where others may have what is looked for.
pub const PATIENCE: Duration = Duration::from_secs(10);
pub const GLANCE: Duration = Duration::from_millis(500);
/// For those of other users' who say nothing, where all of ours and root's have answered.
const PATIENCE_WITH_OTHERS: Duration = Duration::from_secs(3);

#[derive(Clone, Debug)]
pub struct Room {
    pub name: String,
    directory: PathBuf,
    /// Its directory's user and group, and who may enter that.
    of: (u32, u32, u32),
    pub rules: Rules,
}

/// What holds for all ports of a network.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rules {
    pub addresses: Policy,
    /// Broadcast and multicast frames a second that are taken from one port; 0: any number.
    pub storm: u64,
    /// Devices of this host are on its bridge: where that is not there, `up` waits for it.
    #[serde(default)]
    pub bridge: bool,
}

/// Where this process finds networks.
pub fn base() -> PathBuf {
    std::env::var_os(VARIABLE).filter(|path| !path.is_empty()).map_or(DIRECTORY.into(), Into::into)
}

fn place(base: &Path, name: &str) -> Result<PathBuf> {
    let sane = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    let good = (1..=32).contains(&name.len()) && name.bytes().all(sane) && !name.starts_with('.');
    ensure!(good, "a network's name is of up to 32 letters, digits, -, _ and .: not {name:?}");
    Ok(base.join(name))
}

/// Where a network is while it is made, or removed: no name of one.
fn aside(base: &Path, name: &str) -> Result<PathBuf> {
    let mut number = [0; 8];
    ensure!(sys::random(&mut number), "the kernel has no random bytes yet");
    Ok(base.join(format!(".{name}.{:016x}", u64::from_ne_bytes(number))))
}

/// Removes what somebody who was killed has left aside.
fn sweep(base: &Path) {
    let is_left = |entry: &fs::DirEntry| {
        let name = entry.file_name();
        let number = name.to_str().filter(|name| name.starts_with('.'))?.rsplit_once('.')?.1;
        u64::from_str_radix(number, 16).ok().filter(|_| number.len() == 16)?;
        let age = entry.metadata().ok()?.modified().ok()?.elapsed().ok()?;
        let room = in_directory(&entry.path());
        (age > LEFT
            && room.ports().ok()?.is_empty()
            && [SPAN, BRIDGE].iter().all(|id| room.bury(*id)))
        .then_some(())
    };
    let left = fs::read_dir(base).into_iter().flatten().flatten();
    for entry in left.filter(|entry| is_left(entry).is_some()) {
        let _ = fs::remove_dir_all(entry.path());
    }
}

/// As if it were a network's, whose rules do not matter.
fn in_directory(directory: &Path) -> Room {
    let rules = Rules { addresses: Policy::Static, storm: 0, bridge: false };
    Room { name: String::new(), directory: directory.to_owned(), of: (0, 0, 0), rules }
}

/// What has this name, and not what a link of this name leads to. WHY: root of a container, which has this directory too, may put one there, and it
/// would lead to this host's files; or a pipe, for which who opens it would wait.
fn itself(path: &Path, how: OFlags) -> rustix::io::Result<OwnedFd> {
    let how = how | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    rustix::fs::open(path, how, Mode::empty())
}

fn read_rules(directory: &Path) -> Result<((u32, u32, u32), Rules)> {
    let folder = File::from(itself(directory, OFlags::PATH | OFlags::DIRECTORY)?);
    let meta = folder.metadata()?;
    let how = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = File::from(openat(&folder, RULES, how, Mode::empty())?);
    ensure!(file.metadata()?.is_file(), "{RULES} is no file");
    let mut bytes = Vec::new();
    file.take(RULES_MOST).read_to_end(&mut bytes)?;
    Ok(((meta.uid(), meta.gid(), meta.mode()), serde_json::from_slice(&bytes)?))
}

/// Lets all connect who may enter the directory, whatever the mask is.
fn let_all_connect(socket: &Path) -> Result<()> {
    let found = File::from(itself(socket, OFlags::PATH)?);
    ensure!(found.metadata()?.file_type().is_socket(), "{} is no socket", socket.display());
    let path = format!("/proc/self/fd/{}", found.as_raw_fd());
    Ok(fs::set_permissions(path, Permissions::from_mode(0o666))?)
}

fn none(base: &Path, name: &str) -> String {
    format!(
        "there is no network {name:?} in {}: `ringlet eth create {name}` makes it (in a container, that directory has to be the host's)",
        base.display()
    )
}

/// Is this user root, or our own?
pub fn is_trusted(user: u32) -> bool {
    user == 0 || user == rustix::process::geteuid().as_raw()
}

/// A port's name in the directory.
fn file_of(id: u64) -> String {
    format!("{id:016x}{SUFFIX}")
}

impl Room {
    /// Makes a network; of this user, and of a group, if one is named.
    pub fn create(base: &Path, name: &str, rules: Rules, group: Option<u32>) -> Result<()> {
        let directory = place(base, name)?;
        let says = || format!("{} can't be made", base.display());
        DirBuilder::new().recursive(true).mode(0o755).create(base).with_context(says)?;
        sweep(base);
        // (Made beside, and put there as a whole: who is killed meanwhile leaves no half of one.)
        let new = aside(base, name)?;
        let says = || format!("{} can't be made", directory.display());
        DirBuilder::new().mode(0o700).create(&new).with_context(says)?;
        let made = (|| -> Result<()> {
            let folder = File::from(itself(&new, OFlags::RDONLY | OFlags::DIRECTORY)?);
            let how = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
            let mut file = File::from(openat(&folder, RULES, how, Mode::RUSR | Mode::WUSR)?);
            file.write_all(&serde_json::to_vec_pretty(&rules)?)?;
            file.set_permissions(Permissions::from_mode(0o644))?;
            if let Some(group) = group {
                std::os::unix::fs::fchown(&folder, None, Some(group))
                    .context("the group can't be given")?;
                // (Sticky: nobody removes another's socket, nor the rules.)
                folder.set_permissions(Permissions::from_mode(0o1770))?;
            }
            match renameat_with(CWD, &new, CWD, &directory, RenameFlags::NOREPLACE) {
                Err(rustix::io::Errno::EXIST) => bail!(
                    "there is a network {name:?} already: `ringlet eth ls` shows its ports, `ringlet eth delete {name}` removes it"
                ),
                done => Ok(done?),
            }
        })();
        made.inspect_err(|_| _ = fs::remove_dir_all(&new)).with_context(says)
    }

    /// Nobody has need of it: no port, but a bridge's own, no device on that, and nobody who spans hosts.
    pub(crate) fn check_unused(&self, own: Option<u64>, devices: usize) -> Result<()> {
        ensure!(
            self.bury(SPAN),
            "it spans hosts, by a process that is to end first (`ringlet eth way` shows it)"
        );
        let others = self.ports()?.iter().filter(|id| Some(**id) != own).count() + devices;
        ensure!(others == 0, "it has {others} ports: `ringlet eth down` ends each");
        Ok(())
    }

    /// Removes a network without ports, and ends its bridge, which itself says whether somebody has need of it.
    pub fn delete(base: &Path, name: &str) -> Result<()> {
        let directory = place(base, name)?;
        let is_empty = |directory: &Path| -> Result<()> {
            let room = in_directory(directory);
            ensure!(room.bury(BRIDGE), "it has a bridge that has just come");
            room.check_unused(None, 0)
        };
        let room = in_directory(&directory);
        room.evict();
        let ended = if room.bury(BRIDGE) { Ok(()) } else { room.end(BRIDGE) };
        ended.and_then(|()| is_empty(&directory)).with_context(|| {
            if directory.exists() { format!("network {name:?}") } else { none(base, name) }
        })?;
        // (Taken away first: who comes from now on finds none, and who has come meanwhile is seen.)
        let gone = aside(base, name)?;
        let says = || format!("{} can't be removed", directory.display());
        renameat_with(CWD, &directory, CWD, &gone, RenameFlags::NOREPLACE).with_context(says)?;
        is_empty(&gone).with_context(|| format!("network {name:?}")).inspect_err(|_| {
            let _ = renameat_with(CWD, &gone, CWD, &directory, RenameFlags::NOREPLACE);
        })?;
        match fs::remove_dir_all(&gone) {
            // (Swept by somebody else.)
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            done => done.with_context(says),
        }
    }

    pub fn open(base: &Path, name: &str) -> Result<Room> {
        let directory = place(base, name)?;
        let (of, rules) = match read_rules(&directory) {
            Ok(read) => read,
            Err(error) => {
                let says = match error.downcast_ref() {
                    Some(&rustix::io::Errno::NOENT) => none(base, name),
                    Some(&rustix::io::Errno::ACCESS) => format!(
                        "network {name:?} is not open to this user: its owner makes it with `ringlet eth create --group GROUP {name}`"
                    ),
                    _ => format!("{} is no network's", directory.display()),
                };
                return Err(error.context(says));
            }
        };
        Ok(Room { name: name.to_owned(), directory, of, rules })
    }

    /// All networks of which this user may know more than the name, in order.
    pub fn all(base: &Path) -> Result<Vec<Room>> {
        let entries = match fs::read_dir(base) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.with_context(|| base.display().to_string())?,
        };
        let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        let mut rooms: Vec<Room> = names.filter_map(|name| Room::open(base, &name).ok()).collect();
        rooms.sort_by(|one, other| one.name.cmp(&other.name));
        Ok(rooms)
    }

    fn path(&self, id: u64) -> PathBuf {
        self.directory.join(file_of(id))
    }

    /// Those that live, with their users. What a killed one has left behind is removed.
    fn list(&self) -> Result<Vec<(u32, u64)>> {
        let entries =
            fs::read_dir(&self.directory).with_context(|| self.directory.display().to_string())?;
        // (Sockets by their one name: by another one, or by a link, a port would be met twice, and once taken for a liar.)
        let known = |entry: fs::DirEntry| {
            let name = entry.file_name().into_string().ok()?;
            let id = u64::from_str_radix(name.strip_suffix(SUFFIX)?, 16).ok()?;
            let about = entry.metadata().ok()?;
            (name == file_of(id) && about.file_type().is_socket()).then_some((about.uid(), id))
        };
        let known = entries.filter_map(|entry| known(entry.ok()?));
        Ok(known.filter(|(_, id)| ![SPAN, BRIDGE].contains(id) && !self.bury(*id)).collect())
    }

    /// Those that live. Of names that are more than ports there may be: this user's and root's first, then of each other user as many as of the next.
    pub fn ports(&self) -> Result<Vec<u64>> {
        let mut found = self.list()?;
        found.sort_unstable();
        let mut ranks = HashMap::<u32, u32>::new();
        let rank = |(user, id): (u32, u64)| {
            let rank = ranks.entry(user).or_default();
            *rank += 1;
            (if is_trusted(user) { 0 } else { *rank }, id)
        };
        let mut ranked: Vec<(u32, u64)> = found.into_iter().map(rank).collect();
        ranked.sort_unstable();
        let mut alive: Vec<u64> = ranked.into_iter().take(PORTS_MOST).map(|(_, id)| id).collect();
        alive.sort_unstable();
        Ok(alive)
    }

    /// Has it no place for one more of this user's, for whom others' make way?
    pub fn is_full(&self) -> Result<bool> {
        let found = self.list()?;
        Ok(found.iter().filter(|(user, _)| is_trusted(*user)).count() >= PORTS_MOST)
    }

    /// Removes a port's socket if it is nobody's any more.
    pub fn bury(&self, id: u64) -> bool {
        // KERNEL: a name whose socket is gone refuses everybody (ECONNREFUSED), and one of another kind says so (EPROTOTYPE) even before it
        // listens: so a port that is about to is not taken for a dead one.
        let path = self.path(id);
        let probe = socket_with(AddressFamily::UNIX, SocketType::DGRAM, SocketFlags::CLOEXEC, None);
        let (Ok(probe), Ok(address)) = (probe, SocketAddrUnix::new(&path)) else {
            return false;
        };
        // (Held, so that its number is no other's.)
        let held = itself(&path, OFlags::PATH);
        let found = identity(&path);
        match rustix::net::connect(&probe, &address) {
            Err(rustix::io::Errno::CONNREFUSED) => {
                // (Another one may have buried it, and somebody have taken the name.)
                let now = identity(&path);
                let is_same = held.is_ok() && now == found;
                if is_same {
                    let _ = fs::remove_file(&path);
                }
                is_same || now.is_none()
            }
            Err(rustix::io::Errno::NOENT) => true,
            _ => false,
        }
    }

    /// A connection to a port; no descriptors come by it unless they are asked for.
    pub fn connect(&self, id: u64) -> Result<Guarded, Errno> {
        connect(&self.path(id))
    }

    /// A connection to the network's bridge, if there is one of somebody who is trusted with it. (Who may enter the directory may have put there what
    /// takes no connection, or a link to what says nothing: nothing is said to those.)
    pub(crate) fn bridge(&self, until: Instant) -> Result<Option<Guarded>> {
        let Ok(found) = itself(&self.path(BRIDGE), OFlags::PATH) else { return Ok(None) };
        let found = File::from(found);
        let meta = found.metadata()?;
        if !meta.file_type().is_socket() || !self.trusts(meta.uid()) {
            return Ok(None);
        }
        let path = format!("/proc/self/fd/{}", found.as_raw_fd());
        match connect_until(Path::new(&path), until) {
            Ok(socket) => {
                let who = meet::credentials(socket.as_raw_fd());
                Ok(Some(socket).filter(|_| who.is_ok_and(|who| self.trusts(who.uid))))
            }
            Err(Errno::EAGAIN) => bail!("the network's bridge does not answer"),
            Err(_) => Ok(None),
        }
    }

    /// With its bridge.
    fn trusts(&self, user: u32) -> bool {
        is_trusted(user) || self.is_owner(user)
    }

    /// Has somebody the name of its bridge who is not trusted with that?
    pub(crate) fn is_squatted(&self) -> bool {
        fs::symlink_metadata(self.path(BRIDGE)).is_ok_and(|meta| !self.trusts(meta.uid()))
    }

    /// Lets its bridge have the name.
    pub(crate) fn evict(&self) {
        if self.is_squatted() {
            let _ = fs::remove_file(self.path(BRIDGE));
        }
    }

    /// Is a port's socket this user's?
    pub fn is_of(&self, id: u64, user: u32) -> bool {
        fs::symlink_metadata(self.path(id)).is_ok_and(|meta| meta.uid() == user)
    }

    /// Is the network this user's?
    pub fn is_owner(&self, user: u32) -> bool {
        let is_theirs = |meta: fs::Metadata| meta.uid() == user && !meet::is_vague(user);
        fs::symlink_metadata(&self.directory).is_ok_and(is_theirs)
    }

    /// To which hosts it reaches; `None` if it is of this host alone.
    pub fn span(&self) -> Result<Option<Span>> {
        if self.bury(SPAN) {
            return Ok(None);
        }
        match self.ask(SPAN, Ask::State)?.1 {
            Answer::Span(span) => Ok(Some(span)),
            other => bail!("an answer to something else: {other:?}"),
        }
    }

    /// By which kind of way to send to other hosts from now on.
    pub fn choose(&self, choice: Choice) -> Result<()> {
        match self.ask(SPAN, Ask::Way(choice))?.1 {
            Answer::Done => Ok(()),
            Answer::Refused(why) => bail!("{why}"),
            other => bail!("an answer to something else: {other:?}"),
        }
    }

    /// Asks a port, and waits for its answer.
    pub(crate) fn ask(&self, id: u64, ask: Ask) -> Result<(Guarded, Answer)> {
        self.ask_until(id, ask, Instant::now() + PATIENCE)
    }

    pub(crate) fn ask_until(&self, id: u64, ask: Ask, until: Instant) -> Result<(Guarded, Answer)> {
        let socket = if id == BRIDGE {
            self.bridge(until)?.with_context(|| {
                format!(
                    "{} is no bridge of root's, of this user's or of the network's owner's",
                    self.path(id).display()
                )
            })?
        } else {
            connect_until(&self.path(id), until)
                .map_err(|error| anyhow::anyhow!("no port listens there: {error:?}"))?
        };
        say(&socket, &hello(ask), &[])?;
        let until = until.min(Instant::now() + patience(&[&socket]));
        loop {
            if let Some((answer, _)) = hear(&socket)? {
                return Ok((socket, answer));
            }
            wait(&[&socket], until)?;
        }
    }

    /// Asks all ports at once. `each` hears their answers as they come, and from whom, and says whether to go on. Who does not answer in time, and in
    /// `most` at most, is left out. Is there nobody of that kind?
    pub fn states(
        &self,
        most: Duration,
        mut each: impl FnMut(State, &Guarded) -> bool,
    ) -> Result<bool> {
        let asked = self.ports()?.into_iter().map(|id| {
            let socket = self.connect(id).ok();
            (id, socket.filter(|socket| say(socket, &hello(Ask::State), &[]).is_ok()))
        });
        let mut asked: Vec<_> = asked.collect();
        let mut all = asked.iter().all(|(_, socket)| socket.is_some());
        let began = Instant::now();
        while asked.iter().any(|(_, socket)| socket.is_some()) {
            for (id, socket) in &mut asked {
                let answer = match socket.as_ref().map(hear) {
                    None | Some(Ok(None)) => continue,
                    Some(Ok(Some((Answer::State(state), _)))) if state.about.id == *id => state,
                    Some(_) => {
                        (*socket, all) = (None, false);
                        continue;
                    }
                };
                if socket.take().is_some_and(|socket| !each(answer, &socket)) {
                    return Ok(true);
                }
            }
            let left: Vec<&Guarded> =
                asked.iter().filter_map(|(_, socket)| socket.as_ref()).collect();
            if left.is_empty() {
                break;
            }
            if wait(&left, began + patience(&left).min(most)).is_err() {
                return Ok(false);
            }
        }
        Ok(all)
    }

    /// Asks the network's bridge, if it has one, for each device on it, as `states` asks ports.
    pub fn devices(
        &self,
        most: Duration,
        mut each: impl FnMut(State, &Guarded) -> bool,
    ) -> Result<()> {
        let mut before = 0;
        let until = Instant::now() + most;
        if self.bury(BRIDGE) || self.bridge(until)?.is_none() {
            return Ok(());
        }
        for _ in 0..=PORTS_MOST {
            match self.ask_until(BRIDGE, Ask::Next(before), until)? {
                (socket, Answer::State(state)) if state.about.id > before => {
                    before = state.about.id;
                    if !each(state, &socket) {
                        break;
                    }
                }
                (_, Answer::Done) => break,
                (_, Answer::Refused(why)) => bail!("{why}"),
                (_, other) => bail!("an answer to something else: {other:?}"),
            }
        }
        Ok(())
    }

    /// Ends a device on the network's bridge.
    pub fn detach(&self, number: u64) -> Result<()> {
        match self.ask(BRIDGE, Ask::Detach(number))?.1 {
            Answer::Done => Ok(()),
            Answer::Refused(why) => bail!("{why}"),
            other => bail!("an answer to something else: {other:?}"),
        }
    }

    /// Ends a port, and waits until it has.
    pub fn end(&self, id: u64) -> Result<()> {
        let (socket, answer) = self.ask(id, Ask::End)?;
        match answer {
            Answer::Ending => {}
            Answer::Refused(why) => bail!("{why}"),
            other => bail!("an answer to something else: {other:?}"),
        }
        let until = Instant::now() + PATIENCE;
        while hear::<Answer>(&socket).is_ok_and(|came| came.is_none()) {
            wait(&[&socket], until)?;
        }
        Ok(())
    }
}

/// Is this port in that network namespace, and with how many doubts? The kernel knows where its process is, if that can be looked at; root and this user
/// are believed that their device is where they say, which may have been moved; but root of a container is root, too.
pub fn is_in(namespace: u64, state: &State, socket: &Guarded) -> Option<u8> {
    let who = meet::credentials(socket.as_raw_fd()).ok()?;
    let is_its_process = || {
        fs::metadata(format!("/proc/{}/ns/net", who.pid))
            .is_ok_and(|found| found.ino() == namespace)
    };
    if who.uid == 0 || meet::is_our_user(who.uid) {
        let says_so = state.about.namespace == namespace;
        return says_so.then(|| u8::from(!is_its_process()));
    }
    is_its_process().then_some(2)
}

fn connect(path: &Path) -> Result<Guarded, Errno> {
    let mut path = path.as_os_str().as_bytes().to_vec();
    path.push(0);
    let path = std::ffi::CStr::from_bytes_with_nul(&path).map_err(|_| Errno::EINVAL)?;
    let socket = meet::guard_channel(meet::look_at_path(path)?)?;
    // SAFETY: made just now, ours alone.
    #[allow(unsafe_code)]
    Ok(Guarded::new(unsafe { OwnedFd::from_raw_fd(socket) }))
}

/// (Many may wait there.)
fn connect_until(path: &Path, until: Instant) -> Result<Guarded, Errno> {
    loop {
        match connect(path) {
            Err(Errno::EAGAIN) if Instant::now() < until => {
                std::thread::sleep(PATIENCE / 1000);
            }
            done => return done,
        }
    }
}

/// How long these are waited for.
fn patience(sockets: &[&Guarded]) -> Duration {
    let is_ours = |socket: &&Guarded| {
        meet::credentials(socket.as_raw_fd()).is_ok_and(|who| is_trusted(who.uid))
    };
    if sockets.iter().any(is_ours) { PATIENCE } else { PATIENCE_WITH_OTHERS }
}

/// For one of them to have something to say.
fn wait(sockets: &[&Guarded], until: Instant) -> Result<()> {
    let left = until.saturating_duration_since(Instant::now());
    ensure!(!left.is_zero(), "it does not answer");
    let mut fds: Vec<PollFd> =
        sockets.iter().map(|socket| PollFd::new(&***socket, PollFlags::IN)).collect();
    match poll(&mut fds, Some(&left.try_into()?)) {
        Err(rustix::io::Errno::INTR) | Ok(_) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

fn identity(path: &Path) -> Option<(u64, u64)> {
    fs::symlink_metadata(path).ok().map(|meta| (meta.dev(), meta.ino()))
}

/// A port's own socket in the room; its name goes with it.
pub struct Seat {
    pub socket: Guarded,
    path: PathBuf,
    /// Its device and inode: another one may have the name, where the network was made again.
    is: (u64, u64),
}

impl Seat {
    pub fn take(room: &Room, id: u64) -> Result<Seat> {
        let path = room.path(id);
        let socket = socket_with(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::NONBLOCK | SocketFlags::CLOEXEC,
            None,
        )?;
        let address = SocketAddrUnix::new(&path).with_context(|| {
            format!(
                "{} is too long for a socket's name: set {VARIABLE} to a shorter one",
                path.display()
            )
        })?;
        bind(&socket, &address).with_context(|| format!("{} can't be made", path.display()))?;
        let is =
            identity(&path).with_context(|| format!("{} was removed at once", path.display()))?;
        let seat = |socket| Seat { socket: Guarded::new(socket), path: path.clone(), is };
        let_all_connect(&path)?;
        let guarded = meet::guard_channel(socket.into_raw_fd())
            .map_err(|error| anyhow::anyhow!("{error:?}"))?;
        // SAFETY: ours alone, under a new number.
        #[allow(unsafe_code)]
        let seat = seat(unsafe { OwnedFd::from_raw_fd(guarded) });
        listen(&*seat.socket, BACKLOG)?;
        Ok(seat)
    }

    /// Is it found under its name?
    pub fn is_here(&self) -> bool {
        identity(&self.path) == Some(self.is)
    }

    /// The network was removed under it, and is there again, by the same rules and for the same users: it is in that one from now on.
    pub fn take_again(&mut self, room: &Room, id: u64) -> Result<()> {
        let base = room.directory.parent().context("a network is in a directory")?;
        let open = || {
            let again = Room::open(base, &room.name)?;
            ensure!(
                again.of == room.of,
                "it was made again by another user, or for others, which holds for ports that are begun anew"
            );
            ensure!(
                again.rules == room.rules,
                "it was made again with other rules, which hold for ports that are begun anew"
            );
            Ok(again)
        };
        let seat = Seat::take(&open()?, id)?;
        // (It may have been made once more meanwhile.)
        open()?;
        *self = seat;
        Ok(())
    }

    /// Who has come.
    pub fn accept(&self) -> Option<Guarded> {
        let came = meet::accept(self.socket.as_raw_fd()).ok()?;
        // SAFETY: made just now, ours alone.
        #[allow(unsafe_code)]
        Some(Guarded::new(unsafe { OwnedFd::from_raw_fd(came) }))
    }

    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        if self.is_here() {
            let _ = fs::remove_file(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;
    use std::sync::mpsc::channel;

    use super::*;
    use crate::frame::Mac;
    use crate::port::{Kind, Options, Port};
    use crate::wire::About;

    const RULES_HERE: Rules = Rules { addresses: Policy::Moving, storm: 7, bridge: false };

    fn made() -> (tempfile::TempDir, Room) {
        let folder = tempfile::tempdir().unwrap();
        Room::create(folder.path(), "net", RULES_HERE, None).unwrap();
        let room = Room::open(folder.path(), "net").unwrap();
        (folder, room)
    }

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().mode() & 0o7777
    }

    /// Who has a network's directory in a container leads nobody to other files, and has nobody wait.
    #[test]
    fn what_is_no_network_s_own_is_not_followed() {
        let (folder, room) = made();
        assert_eq!(room.rules, RULES_HERE);
        let (base, rules) = (folder.path(), room.directory.join(RULES));
        let other = base.join("other");
        fs::rename(&rules, &other).unwrap();
        let opens = || {
            let ((says, hears), base) = (channel(), base.to_owned());
            std::thread::spawn(move || says.send(Room::open(&base, "net").is_ok()));
            hears.recv_timeout(PATIENCE).expect("it waits")
        };
        symlink(&other, &rules).unwrap();
        assert!(!opens());
        fs::remove_file(&rules).unwrap();
        rustix::fs::mknodat(CWD, &rules, rustix::fs::FileType::Fifo, Mode::RWXU, 0).unwrap();
        assert!(!opens());
        fs::remove_file(&rules).unwrap();
        fs::rename(&other, &rules).unwrap();
        assert!(opens());
        symlink("net", base.join("led")).unwrap();
        assert!(Room::open(base, "led").is_err());
        // A port's name that has become a link by the time that all are let connect.
        fs::write(&other, "").unwrap();
        fs::set_permissions(&other, Permissions::from_mode(0o600)).unwrap();
        symlink(&other, room.path(1)).unwrap();
        assert!(let_all_connect(&room.path(1)).is_err());
        assert_eq!(mode(&other), 0o600);
        let seat = Seat::take(&room, 2).unwrap();
        assert_eq!(mode(seat.path()), 0o666);
    }

    #[test]
    fn a_port_has_one_name() {
        let (_folder, room) = made();
        let seat = Seat::take(&room, 0xab).unwrap();
        for alias in ["ab", "+00000000000000ab", "00000000000000AB", "0000000000000001"] {
            symlink(seat.path(), room.directory.join(format!("{alias}{SUFFIX}"))).unwrap();
        }
        fs::hard_link(seat.path(), room.directory.join("ab.port.port")).unwrap();
        fs::hard_link(seat.path(), room.directory.join("00000000000000Ab.port")).unwrap();
        assert_eq!(room.ports().unwrap(), [0xab]);
    }

    /// Who makes a network anew under a port does not get the port by that.
    #[test]
    fn a_port_joins_no_strangers_network_by_itself() {
        let (folder, room) = made();
        let mut seat = Seat::take(&room, 1).unwrap();
        let again = |change: &dyn Fn(&Path)| {
            let _ = fs::remove_dir_all(&room.directory);
            Room::create(folder.path(), "net", RULES_HERE, None).unwrap();
            change(&room.directory);
        };
        let chown = |path: &Path, user, group| std::os::unix::fs::chown(path, user, group).unwrap();
        let mode = |path: &Path| fs::set_permissions(path, Permissions::from_mode(0o777)).unwrap();
        let group = |path: &Path| chown(path, None, Some(12345));
        let user = |path: &Path| chown(path, Some(12345), None);
        let changes: [&dyn Fn(&Path); 3] = [&mode, &group, &user];
        let possible = if rustix::process::geteuid().is_root() { 3 } else { 1 };
        for change in &changes[..possible] {
            again(change);
            let why = format!("{:#}", seat.take_again(&room, 1).unwrap_err());
            assert!(why.contains("by another user"), "{why}");
            assert!(!room.path(1).exists() && !seat.is_here());
        }
        again(&|_| ());
        seat.take_again(&room, 1).unwrap();
        assert!(seat.is_here());
    }

    /// Whatever somebody has left there, or did not come to make: a network can be removed, and made anew.
    #[test]
    fn a_network_is_there_or_not() {
        let (folder, room) = made();
        let base = folder.path();
        let again = || format!("{:#}", Room::create(base, "net", RULES_HERE, None).unwrap_err());
        assert!(again().contains("there is a network"));
        fs::write(room.directory.join("whatever"), "").unwrap();
        Room::delete(base, "net").unwrap();
        Room::create(base, "net", RULES_HERE, None).unwrap();
        fs::remove_file(room.directory.join(RULES)).unwrap();
        assert!(again().contains("there is a network"));
        Room::delete(base, "net").unwrap();
        let none = Room::delete(base, "net").unwrap_err();
        assert!(format!("{none:#}").contains("there is no network"));
        assert_eq!(fs::read_dir(base).unwrap().count(), 0);
        // What was left aside goes in time, unless it is just made, or in use.
        let asides = [0; 3].map(|_| aside(base, "other").unwrap());
        asides.iter().for_each(|path| fs::create_dir(path).unwrap());
        let used = std::os::unix::net::UnixDatagram::bind(asides[2].join(file_of(1))).unwrap();
        for path in [&asides[0], &asides[2]] {
            let ago = std::time::SystemTime::now() - 2 * LEFT;
            File::open(path).unwrap().set_times(fs::FileTimes::new().set_modified(ago)).unwrap();
        }
        Room::create(base, "net", RULES_HERE, None).unwrap();
        assert_eq!(asides.each_ref().map(|path| path.exists()), [false, true, true]);
        drop(used);
        asides[1..].iter().for_each(|path| fs::remove_dir_all(path).unwrap());
        // One who is about to listen keeps it.
        let comes = std::os::unix::net::UnixDatagram::bind(room.path(3)).unwrap();
        assert!(format!("{:#}", Room::delete(base, "net").unwrap_err()).contains("1 ports"));
        drop(comes);
        // Who spans hosts is no port, and keeps it too.
        let spans = Seat::take(&room, SPAN).unwrap();
        assert!(room.ports().unwrap().is_empty());
        assert!(format!("{:#}", Room::delete(base, "net").unwrap_err()).contains("spans hosts"));
        drop(spans);
        Room::delete(base, "net").unwrap();
    }

    /// A bridge's own port, which may be missed there for a moment, is not another one in its place.
    #[test]
    fn another_s_port_is_no_bridge_s_own() {
        let (_folder, room) = made();
        let port = Seat::take(&room, 7).unwrap();
        assert!(room.check_unused(Some(7), 0).is_ok());
        assert!(room.check_unused(Some(7), 1).is_err());
        assert!(room.check_unused(Some(8), 0).is_err() && room.check_unused(None, 0).is_err());
        drop(port);
        assert!(room.check_unused(Some(8), 0).is_ok());
    }

    #[test]
    fn other_hosts_ports_have_nothing_to_do_with_each_other() {
        let (_folder, room) = made();
        let options = Options::new("one", Mac::random().unwrap());
        let (_port, _queues) = Port::join(room.clone(), options, Kind::Far, |_| ()).unwrap();
        let id = room.ports().unwrap()[0];
        let Answer::State(state) = room.ask(id, Ask::State).unwrap().1 else { panic!("no state") };
        let other = |far| Ask::Join(About { id: id ^ 1, far, ..state.about.clone() });
        assert_eq!(room.ask(id, other(true)).unwrap().1, Answer::Done);
        assert!(matches!(room.ask(id, other(false)).unwrap().1, Answer::Refused(_)));
    }

    /// Many at once: each is there as a whole or not at all, and one alone has made it.
    #[test]
    fn who_makes_it_first_has_made_it() {
        let folder = tempfile::tempdir().unwrap();
        let base = folder.path();
        std::thread::scope(|scope| {
            let makes = || (0..200).filter(|_| Room::create(base, "net", RULES_HERE, None).is_ok());
            let looks = || {
                for _ in 0..2000 {
                    if base.join("net").exists() {
                        let opened = Room::open(base, "net");
                        let is_none =
                            |error: &anyhow::Error| format!("{error:#}").contains("no network");
                        assert!(
                            opened.as_ref().map_or_else(is_none, |room| room.rules == RULES_HERE)
                        );
                    }
                }
            };
            let removes = || (0..200).filter(|_| Room::delete(base, "net").is_ok());
            scope.spawn(looks);
            let made: Vec<_> = (0..2).map(|_| scope.spawn(move || makes().count())).collect();
            let gone: Vec<_> = (0..2).map(|_| scope.spawn(move || removes().count())).collect();
            let sum = |all: Vec<std::thread::ScopedJoinHandle<usize>>| -> usize {
                all.into_iter().map(|each| each.join().unwrap()).sum()
            };
            let (made, gone) = (sum(made), sum(gone));
            assert_eq!(made - gone, usize::from(base.join("net").exists()));
        });
    }
}
