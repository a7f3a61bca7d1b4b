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
    match meet::look_at_path(held.name()) {
        // (Without a /proc it is reached by its name alone.)
        Err(Errno::ENOENT) => {
            meet::look_at_path(path).map(|socket| Visited { socket, is_marked: false })
        }
        socket => Ok(Visited { socket: socket?, is_marked }),
    }
}

/// Is it what `path` is for: a service of the host's, or of this user's?
///
/// One that is not marked is believed among the processes of our own pid namespace, which see it as we are seen. A service of a plain user, who can
/// mark nothing, is believed from a container of that user's too, where it is mounted to be read only; root's is not.
pub fn is_believed(visited: &Visited, path: &CStr) -> bool {
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
    meet::is_in_sight(peer.pid) || is_ours && !is_root() && is_read_only(path)
}

/// Is what lies there mounted so that we can change nothing?
pub fn is_read_only(path: &CStr) -> bool {
    const ST_RDONLY: u64 = 1;
    // struct statfs: 15 words, and the mount's flags in the eleventh.
    let mut found = [0u64; 16];
    // SAFETY: a C string, and room for the struct.
    let asked = unsafe { sys!(SYS_statfs, path.as_ptr(), found.as_mut_ptr()) };
    asked.is_ok() && found[10] & ST_RDONLY != 0
}

/// Marks the socket at `path`, at which `listener` listens. `EPERM` for want of the right to, `EOPNOTSUPP` where the file system has no marks,
/// `ESTALE` where something else has been put there meanwhile. Who has come to the listener before us is sent away, and comes again.
pub fn mark(path: &CStr, listener: i32, kind: Kind) -> Sys<()> {
    let held = Held::open(path)?;
    if held.is_marked(kind) {
        return Ok(());
    }
    let visit = meet::look_at_path(held.name())?;
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
