//! Where the ports of a network meet: a directory with a socket of each. Who may enter it, by the kernel's permissions, may be a port.

use std::fs::{self, DirBuilder, Permissions};
use std::io::ErrorKind;
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use ringlet_linux::meet;
use ringlet_linux::sys::Errno;
use ringlet_messages::guarded::Guarded;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, listen, socket_with,
};
use serde::{Deserialize, Serialize};

use crate::table::Policy;
use crate::wire::{Answer, Ask, State, hear, hello, say};

/// Where networks are, and what says otherwise.
pub const DIRECTORY: &str = "/run/ringlet/ethernet";
pub const VARIABLE: &str = "RINGLET_ETHERNET";

pub const PORTS_MOST: usize = 512;
const BACKLOG: i32 = 4096;
const RULES: &str = "network.json";
const SUFFIX: &str = ".port";
/// For an answer of somebody who looks only.
const PATIENCE: Duration = Duration::from_secs(10);

#[derive(Clone, Debug)]
pub struct Room {
    pub name: String,
    directory: PathBuf,
    pub rules: Rules,
}

/// What holds for all ports of a network.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rules {
    pub addresses: Policy,
    /// Broadcast and multicast frames a second that are taken from one port; 0: any number.
    pub storm: u64,
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

impl Room {
    /// Makes a network; of this user, and of a group, if one is named.
    pub fn create(base: &Path, name: &str, rules: Rules, group: Option<u32>) -> Result<()> {
        let directory = place(base, name)?;
        let says = || format!("{} can't be made", base.display());
        DirBuilder::new().recursive(true).mode(0o755).create(base).with_context(says)?;
        match DirBuilder::new().mode(0o700).create(&directory) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                bail!(
                    "there is a network {name:?} already: `ringlet eth ls` shows its ports, `ringlet eth delete {name}` removes it"
                )
            }
            made => made.with_context(|| format!("{} can't be made", directory.display()))?,
        }
        let made = (|| -> Result<()> {
            let file = directory.join(RULES);
            fs::write(&file, serde_json::to_vec_pretty(&rules)?)?;
            fs::set_permissions(&file, Permissions::from_mode(0o644))?;
            if let Some(group) = group {
                std::os::unix::fs::chown(&directory, None, Some(group))
                    .context("the group can't be given")?;
                // (Sticky: nobody removes another's socket, nor the rules.)
                fs::set_permissions(&directory, Permissions::from_mode(0o1770))?;
            }
            Ok(())
        })();
        made.inspect_err(|_| _ = fs::remove_dir_all(&directory))
    }

    /// Removes a network without ports.
    pub fn delete(base: &Path, name: &str) -> Result<()> {
        let room = Room::open(base, name)?;
        let there = room.ports()?.len();
        ensure!(there == 0, "network {name:?} has {there} ports: `ringlet eth down` ends each");
        fs::remove_file(room.directory.join(RULES))
            .with_context(|| room.directory.display().to_string())?;
        fs::remove_dir(&room.directory)
            .with_context(|| format!("{} can't be removed", room.directory.display()))
    }

    pub fn open(base: &Path, name: &str) -> Result<Room> {
        let directory = place(base, name)?;
        let rules = match fs::read(directory.join(RULES)) {
            Ok(rules) => rules,
            Err(error) if error.kind() == ErrorKind::NotFound => bail!(
                "there is no network {name:?} in {}: `ringlet eth create {name}` makes it (in a container, that directory has to be the host's)",
                base.display()
            ),
            Err(error) if error.kind() == ErrorKind::PermissionDenied => bail!(
                "network {name:?} is not open to this user: its owner makes it with `ringlet eth create --group GROUP {name}`"
            ),
            Err(error) => return Err(error).with_context(|| directory.display().to_string()),
        };
        let rules = serde_json::from_slice(&rules)
            .with_context(|| format!("{} is no network's", directory.display()))?;
        Ok(Room { name: name.to_owned(), directory, rules })
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
        self.directory.join(format!("{id:016x}{SUFFIX}"))
    }

    /// Those that live. What a killed one has left behind is removed.
    pub fn ports(&self) -> Result<Vec<u64>> {
        let entries =
            fs::read_dir(&self.directory).with_context(|| self.directory.display().to_string())?;
        let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        let ids = names.filter_map(|name| u64::from_str_radix(name.strip_suffix(SUFFIX)?, 16).ok());
        let mut alive: Vec<u64> = ids.filter(|id| !self.bury(*id)).collect();
        alive.sort_unstable();
        Ok(alive)
    }

    /// Removes a port's socket if it is nobody's any more.
    pub fn bury(&self, id: u64) -> bool {
        // KERNEL: a name whose socket is gone refuses everybody (ECONNREFUSED), and one of another kind says so (EPROTOTYPE) even before it
        // listens: so a port that is about to is not taken for a dead one.
        let probe = socket_with(AddressFamily::UNIX, SocketType::DGRAM, SocketFlags::CLOEXEC, None);
        let (Ok(probe), Ok(address)) = (probe, SocketAddrUnix::new(self.path(id))) else {
            return false;
        };
        match rustix::net::connect(&probe, &address) {
            Err(rustix::io::Errno::CONNREFUSED) => {
                let _ = fs::remove_file(self.path(id));
                true
            }
            Err(rustix::io::Errno::NOENT) => true,
            _ => false,
        }
    }

    /// A connection to a port; no descriptors come by it unless they are asked for.
    pub fn connect(&self, id: u64) -> Result<Guarded, Errno> {
        let mut path = self.path(id).as_os_str().as_bytes().to_vec();
        path.push(0);
        let path = std::ffi::CStr::from_bytes_with_nul(&path).map_err(|_| Errno::EINVAL)?;
        let socket = meet::guard_channel(meet::look_at_path(path)?)?;
        // SAFETY: made just now, ours alone.
        #[allow(unsafe_code)]
        Ok(Guarded::new(unsafe { OwnedFd::from_raw_fd(socket) }))
    }

    /// Is a port's socket this user's?
    pub fn is_of(&self, id: u64, user: u32) -> bool {
        fs::symlink_metadata(self.path(id)).is_ok_and(|meta| meta.uid() == user)
    }

    /// Asks a port, and waits for its answer.
    fn ask(&self, id: u64, ask: Ask) -> Result<(Guarded, Answer)> {
        let socket = self
            .connect(id)
            .map_err(|error| anyhow::anyhow!("no port listens there: {error:?}"))?;
        say(&socket, &hello(ask), &[])?;
        let until = Instant::now() + PATIENCE;
        loop {
            if let Some((answer, _)) = hear(&socket)? {
                return Ok((socket, answer));
            }
            wait(&[&socket], until)?;
        }
    }

    /// Asks all ports at once. `each` hears their answers as they come, and says whether to go on. Who does not answer in time is left out.
    pub fn states(&self, mut each: impl FnMut(State) -> bool) -> Result<()> {
        let asked = self.ports()?.into_iter().map(|id| {
            let socket = self.connect(id).ok();
            (id, socket.filter(|socket| say(socket, &hello(Ask::State), &[]).is_ok()))
        });
        let mut asked: Vec<_> = asked.collect();
        let until = Instant::now() + PATIENCE;
        while asked.iter().any(|(_, socket)| socket.is_some()) {
            for (id, socket) in &mut asked {
                let answer = match socket.as_ref().map(hear) {
                    None | Some(Ok(None)) => continue,
                    Some(Ok(Some((Answer::State(state), _)))) => Some(state),
                    Some(_) => None,
                };
                *socket = None;
                if answer.is_some_and(|state| state.about.id == *id && !each(state)) {
                    return Ok(());
                }
            }
            let left: Vec<&Guarded> =
                asked.iter().filter_map(|(_, socket)| socket.as_ref()).collect();
            if left.is_empty() || wait(&left, until).is_err() {
                break;
            }
        }
        Ok(())
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

/// For one of them to have something to say.
fn wait(sockets: &[&Guarded], until: Instant) -> Result<()> {
    let left = until.saturating_duration_since(Instant::now());
    ensure!(!left.is_zero(), "it does not answer within {} s", PATIENCE.as_secs());
    let mut fds: Vec<PollFd> =
        sockets.iter().map(|socket| PollFd::new(&***socket, PollFlags::IN)).collect();
    match poll(&mut fds, Some(&left.try_into()?)) {
        Err(rustix::io::Errno::INTR) | Ok(_) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// A port's own socket in the room; its name goes with it.
pub struct Seat {
    pub socket: Guarded,
    path: PathBuf,
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
        let seat = |socket| Seat { socket: Guarded::new(socket), path: path.clone() };
        // (Who may enter the directory may connect.)
        fs::set_permissions(&path, Permissions::from_mode(0o666))?;
        let guarded = meet::guard_channel(socket.into_raw_fd())
            .map_err(|error| anyhow::anyhow!("{error:?}"))?;
        // SAFETY: ours alone, under a new number.
        #[allow(unsafe_code)]
        let seat = seat(unsafe { OwnedFd::from_raw_fd(guarded) });
        listen(&*seat.socket, BACKLOG)?;
        Ok(seat)
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
        let _ = fs::remove_file(&self.path);
    }
}
