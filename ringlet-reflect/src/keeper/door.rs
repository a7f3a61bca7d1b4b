//! Who comes to a keeper: where it listens, and who they are.

use std::ffi::CString;
use std::fs::{File, OpenOptions, TryLockError};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use ringlet_linux::sys::Errno;
use ringlet_linux::{meet, service};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::Mode;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit, umask};

use crate::memory;
use crate::name;
use crate::status::Status;

/// For another one that is about to listen at the same path.
const BEGINS: Duration = Duration::from_secs(10);

/// There, or by this user's name.
pub fn listen(path: Option<&Path>) -> std::io::Result<OwnedFd> {
    if let Some(path) = path {
        return listen_at(path);
    }
    let errno = |errno: Errno| std::io::Error::from_raw_os_error(errno.0);
    name::listen(rustix::process::geteuid().as_raw()).map_err(errno)
}

/// How many descriptors there may be.
pub fn widen() -> usize {
    let most = getrlimit(Resource::Nofile).maximum;
    let _ = setrlimit(Resource::Nofile, Rlimit { current: most, maximum: most });
    getrlimit(Resource::Nofile).current.map_or(usize::MAX, |most| most as usize)
}

/// What who begins there locks, which stays.
pub fn lock_of(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".lock");
    name.into()
}

/// Of two that begin at once one would remove the other's socket.
fn begin_alone(path: &Path) -> std::io::Result<File> {
    let name = lock_of(path);
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
    // (Not by its path: who may write to the directory could put a link to another file there meanwhile.)
    static MASK: Mutex<()> = Mutex::new(());
    let masked = MASK.lock();
    let before = umask(Mode::from_raw_mode(0o111));
    let bound = bind(&socket, &address);
    umask(before);
    drop(masked);
    bound?;
    listen(&socket, 128)?;
    // (Without the right to it is one that containers with processes of their own do not believe.)
    if let Ok(path) = CString::new(path.as_os_str().as_bytes()) {
        let _ = service::mark(&path, socket.as_raw_fd(), service::Kind::Reflect);
    }
    Ok(socket)
}

/// As the kernel vouches; none where it does not tell (before Linux 6.5, of a process in another pid namespace).
pub fn process_of(socket: &OwnedFd) -> Result<Option<OwnedFd>, Errno> {
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
pub fn credentials(socket: i32) -> Result<libc::ucred, Status> {
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

/// Is its process in this pid namespace, and in none below? Root of a container without a user namespace of its own is root for the kernel.
pub fn is_beside(socket: &OwnedFd, process: Option<&OwnedFd>) -> bool {
    let (Ok(peer), Some(process)) = (credentials(socket.as_raw_fd()), process) else {
        return false;
    };
    let levels = |process: &str| {
        let status = std::fs::read_to_string(format!("/proc/{process}/status")).ok()?;
        let line = status.lines().find_map(|line| line.strip_prefix("NSpid:"))?;
        Some(line.split_whitespace().count())
    };
    let ours = levels("self");
    let is_same = peer.pid > 0 && ours.is_some() && levels(&peer.pid.to_string()) == ours;
    // (That was another one's number if it has gone.)
    let mut fds = [PollFd::new(process, PollFlags::IN)];
    is_same && poll(&mut fds, Some(&Timespec::default())) == Ok(0)
}

/// Supplementary ones.
pub fn groups_of(socket: i32) -> Vec<u32> {
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
