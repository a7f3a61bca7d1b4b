//! Services at paths, which containers reach by a mount: is who listens there the host's own, and not one of the containers?
//!
//! Root of a container without a user namespace has the host root's number, and where the directory is mounted writable, also its rights there: it
//! can put a socket of its own in the service's place, to which programs of other containers would show their connections. What it can't do is to
//! give a file an extended attribute of the kernel's `security` kind, for which CAP_SYS_ADMIN is needed where the file system was mounted. So a
//! service *marks* its socket by one before anybody comes, and a program that does not see the service among its own processes asks for that mark, on
//! the very file by which it connects.

use core::ffi::CStr;

use crate::sys::{self, Errno, Sys, close, sys};
use crate::{fd, meet};

/// What a mark says; a socket of one kind is not taken for another's.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    Node,
    Reflect,
}

impl Kind {
    fn text(self) -> &'static [u8] {
        match self {
            Kind::Node => b"node",
            Kind::Reflect => b"reflect",
        }
    }
}

const MARK: &CStr = c"security.ringlet";
const MARK_ROOM_BYTES: usize = 16;

/// One that was come to, and whether it is marked.
pub struct Visited {
    pub socket: i32,
    pub is_marked: bool,
    /// The mount by which its file was come to lets us change nothing.
    pub is_read_only: bool,
}

/// A file, whatever its name leads to meanwhile.
struct Held {
    fd: i32,
    name: [u8; NAME_BYTES],
}

const PREFIX: &[u8] = b"/proc/thread-self/fd/";
const NAME_BYTES: usize = PREFIX.len() + 12;

impl Held {
    fn open(path: &CStr) -> Sys<Held> {
        let flags = libc::O_PATH | libc::O_CLOEXEC;
        // SAFETY: a C string.
        let fd = unsafe { sys!(SYS_openat, libc::AT_FDCWD, path.as_ptr(), flags, 0) }? as i32;
        let mut name = [0; NAME_BYTES];
        name[..PREFIX.len()].copy_from_slice(PREFIX);
        fd::write_decimal(&mut name[PREFIX.len()..], fd as u32);
        Ok(Held { fd, name })
    }

    /// By which it is reached again.
    fn name(&self) -> &CStr {
        CStr::from_bytes_until_nul(&self.name).unwrap_or(c"")
    }

    fn is_marked(&self, kind: Kind) -> bool {
        let mut value = [0u8; MARK_ROOM_BYTES];
        // SAFETY: C strings, and a buffer of its length.
        let got = unsafe {
            let (name, mark) = (self.name().as_ptr(), MARK.as_ptr());
            sys!(SYS_getxattr, name, mark, value.as_mut_ptr(), value.len())
        };
        got.is_ok_and(|got| value.get(..got) == Some(kind.text()))
    }

    /// Is it mounted so that we can change nothing there?
    fn is_read_only(&self) -> bool {
        const ST_RDONLY: u64 = 1;
        // struct statfs: 15 words, and the mount's flags in the eleventh.
        let mut found = [0u64; 16];
        // SAFETY: room for the struct.
        let asked = unsafe { sys!(SYS_fstatfs, self.fd, found.as_mut_ptr()) };
        asked.is_ok() && found[10] & ST_RDONLY != 0
    }

    fn mark(&self, kind: Kind) -> Sys<()> {
        let text = kind.text();
        // SAFETY: C strings, and a value of its length.
        unsafe {
            let (name, mark) = (self.name().as_ptr(), MARK.as_ptr());
            sys!(SYS_setxattr, name, mark, text.as_ptr(), text.len(), 0)
        }
        .map(drop)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        close(self.fd);
    }
}

/// Connects to what listens there: as `meet::look_at_path`.
pub fn visit(path: &CStr, kind: Kind) -> Sys<Visited> {
    let held = Held::open(path)?;
    let is_marked = held.is_marked(kind);
    let is_read_only = held.is_read_only();
    match meet::look_at_path(held.name()) {
        // (Without a /proc it is reached by its name alone.)
        Err(Errno::ENOENT) => {
            let by_name = |socket| Visited { socket, is_marked: false, is_read_only: false };
            meet::look_at_path(path).map(by_name)
        }
        socket => Ok(Visited { socket: socket?, is_marked, is_read_only }),
    }
}

/// Is it what it seems: a service of the host's, or of this user's?
///
/// One that is not marked is believed among the processes of our own pid namespace, which see it as we are seen. A service of a plain user, who can
/// mark nothing, is believed from a container of that user's too, where it is mounted to be read only; root's is not.
pub fn is_believed(visited: &Visited) -> bool {
    if visited.is_marked {
        return true;
    }
    let Ok(peer) = meet::credentials(visited.socket) else { return false };
    let is_ours = peer.uid == sys::geteuid();
    // KERNEL: in a user namespace the host's root may read as nobody.
    if peer.uid != 0 && !is_ours && !meet::is_vague(peer.uid) {
        return false;
    }
    let is_root = || peer.uid == 0 && meet::all_users_are_mapped();
    listens_in_sight(visited.socket, peer.pid) || is_ours && !is_root() && visited.is_read_only
}

/// Is who listens at the other end a process of our own pid namespace? Not if it has ended: another process may have its number.
fn listens_in_sight(socket: i32, pid: i32) -> bool {
    match meet::process_at_other_end(socket) {
        Ok(Some(process)) => {
            let lives = || fd::pending(process, libc::POLLIN) == 0;
            let is_it = lives() && meet::is_in_sight(pid) && lives();
            close(process);
            is_it
        }
        // The kernel does not tell.
        Ok(None) => meet::is_in_sight(pid),
        Err(_) => false,
    }
}

/// How often a full queue is emptied for our own visit, and of how many at a time.
const VISITS_MOST: u32 = 256;
const WAITING_MOST: u32 = 4096;

/// Marks the socket at `path`, at which `listener` listens. `EPERM` for want of the right to, `EOPNOTSUPP` where the file system has no marks,
/// `ESTALE` where something else has been put there meanwhile. Who has come to the listener before us is sent away, and comes again.
pub fn mark(path: &CStr, listener: i32, kind: Kind) -> Sys<()> {
    let held = Held::open(path)?;
    if held.is_marked(kind) {
        return Ok(());
    }
    let mut visit = meet::look_at_path(held.name());
    // Strangers may have filled its queue before anybody is let in.
    for _ in 0..VISITS_MOST {
        if visit != Err(Errno::EAGAIN) {
            break;
        }
        for _ in 0..WAITING_MOST {
            match meet::accept_in_sight(listener) {
                Ok(came) => meet::part(came),
                Err(_) => break,
            }
        }
        visit = meet::look_at_path(held.name());
    }
    let visit = visit?;
    let ours = leads_to(listener);
    close(visit);
    if ours { held.mark(kind) } else { Err(Errno(libc::ESTALE)) }
}

/// Is a visit of this process's among those that wait there? (No process of a container has this one's number.)
fn leads_to(listener: i32) -> bool {
    while let Ok(came) = meet::accept_in_sight(listener) {
        let from = meet::credentials(came).map_or(0, |caller| caller.pid);
        meet::part(came);
        if from == sys::getpid() {
            return true;
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use std::ffi::CString;
    use std::format;
    use std::vec::Vec;

    use super::*;

    /// A socket of sequenced packets at a path of its own; it does not listen yet.
    fn bound(name: &str) -> (i32, CString, libc::sockaddr_un) {
        let path = format!("/tmp/ringlet-{name}-{}", sys::getpid());
        let _ = std::fs::remove_file(&path);
        // SAFETY: zero is a valid sockaddr_un.
        let mut address: libc::sockaddr_un = unsafe { core::mem::zeroed() };
        address.sun_family = libc::AF_UNIX as u16;
        for (to, byte) in address.sun_path.iter_mut().zip(path.bytes()) {
            *to = byte as _;
        }
        let listener = socket();
        // SAFETY: an address and its size.
        assert_eq!(unsafe { libc::bind(listener, (&raw const address).cast(), SIZE) }, 0);
        (listener, CString::new(path).unwrap(), address)
    }

    const SIZE: u32 = size_of::<libc::sockaddr_un>() as u32;

    fn socket() -> i32 {
        let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        // SAFETY: no memory is passed.
        let socket = unsafe { libc::socket(libc::AF_UNIX, kind, 0) };
        assert!(socket >= 0);
        socket
    }

    /// Strangers who have come first, and leave no room, do not keep a service from marking its socket (where it may).
    #[test]
    fn a_full_queue_does_not_keep_the_mark_away() {
        let (listener, path, address) = bound("mark");
        // SAFETY: no memory is passed.
        assert_eq!(unsafe { libc::listen(listener, 2) }, 0);
        let mut strangers = Vec::new();
        loop {
            strangers.push(socket());
            let stranger = *strangers.last().unwrap();
            // SAFETY: an address and its size.
            if unsafe { libc::connect(stranger, (&raw const address).cast(), SIZE) } != 0 {
                break;
            }
        }
        assert!(strangers.len() > 1 && meet::look_at_path(&path) == Err(Errno::EAGAIN));
        let marked = mark(&path, listener, Kind::Node);
        let seen = visit(&path, Kind::Node).unwrap();
        std::fs::remove_file(path.to_str().unwrap()).unwrap();
        let may_not = [Err(Errno(libc::EPERM)), Err(Errno(libc::EOPNOTSUPP))].contains(&marked);
        assert!(may_not || marked == Ok(()), "{marked:?}");
        assert_eq!(seen.is_marked, marked.is_ok());
        assert!(!seen.is_read_only && is_believed(&seen));
        strangers.into_iter().chain([seen.socket, listener]).for_each(close);
    }

    /// The number of a process that has called `listen` and ended may be another's by now.
    #[test]
    fn who_has_ended_does_not_listen_in_sight() {
        let (listener, path, _) = bound("ended");
        // SAFETY: the child makes two system calls, of no memory; the status is not asked for.
        unsafe {
            let child = libc::fork();
            if child == 0 {
                libc::_exit(libc::listen(listener, 4));
            }
            assert_eq!(libc::waitpid(child, core::ptr::null_mut(), 0), child);
        }
        let socket = meet::look_at_path(&path).unwrap();
        std::fs::remove_file(path.to_str().unwrap()).unwrap();
        // As if this process had got the number.
        assert!(!listens_in_sight(socket, sys::getpid()));
        close(socket);
        close(listener);
    }
}
