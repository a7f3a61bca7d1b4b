//! How a user's keeper is found in its network namespace. Anybody may take any name there; so it has another one where a stranger has the plain
//! one, and is found by what the kernel knows of each socket: whose it is.

use std::os::fd::{AsRawFd, OwnedFd};

use ringlet_linux::sys::{self, Errno};
use ringlet_linux::{diag, meet};

use crate::memory;

/// include/net/tcp_states.h: of sockets that are bound, and of those that listen. (A connection's end has its listener's name too.)
const BOUND: u8 = 7;
const LISTENS: u8 = 10;

fn plain(uid: u32) -> Vec<u8> {
    format!("ringlet-reflect/{uid}").into_bytes()
}

struct Found {
    service: Vec<u8>,
    inode: u32,
    listens: bool,
}

/// This user's sockets that have such a name; none if the kernel does not tell.
fn all_of(uid: u32) -> Option<Vec<Found>> {
    let (socket, plain) = (memory::own(diag::open().ok()?), plain(uid));
    let (mut found, mut is_told) = (Vec::new(), true);
    let mut room = Box::new([0; diag::LIST_BYTES]);
    let listed = diag::unix_sockets(socket.as_raw_fd(), &mut room, |each| {
        let Some(service) = each.name.and_then(meet::service_of) else { return };
        let Some(rest) = service.strip_prefix(&plain[..]) else { return };
        is_told &= each.uid.is_some();
        let is_it = rest.is_empty() || rest.starts_with(b"/");
        if is_it && each.uid == Some(uid) && matches!(each.state, BOUND | LISTENS) {
            let (service, inode) = (service.to_vec(), each.inode);
            found.push(Found { service, inode, listens: each.state == LISTENS });
        }
    });
    (listed.is_ok() && is_told).then_some(found)
}

/// Where this user's keeper may be.
pub fn candidates(uid: u32) -> Vec<Vec<u8>> {
    let listen = |found: Vec<Found>| found.into_iter().filter(|each| each.listens);
    match all_of(uid) {
        Some(found) => listen(found).map(|each| each.service).collect(),
        None => vec![plain(uid)],
    }
}

/// Listens as this user's only keeper. `EADDRINUSE`: there is one, or one begins at this moment; or a stranger has the name, and the kernel does
/// not tell whose sockets are.
pub fn listen(uid: u32) -> Result<OwnedFd, Errno> {
    let (socket, is_plain) = match meet::take_name(&plain(uid)) {
        Err(Errno::EADDRINUSE) if all_of(uid).is_some_and(|found| found.is_empty()) => {
            (meet::take_name(&another(uid)?)?, false)
        }
        taken => (taken?, true),
    };
    let socket = memory::own(socket);
    let own = rustix::fs::fstat(&socket).map_err(|_| Errno::EADDRINUSE)?.st_ino;
    // (Each has its name before it looks for others: of two that begin at once one at least sees the other, and goes.)
    match all_of(uid) {
        Some(found) if found.iter().any(|each| u64::from(each.inode) != own) => {
            return Err(Errno::EADDRINUSE);
        }
        None if !is_plain => return Err(Errno::EADDRINUSE),
        _ => {}
    }
    meet::let_in(socket.as_raw_fd()).map(|()| socket)
}

/// A name that nobody knows before.
fn another(uid: u32) -> Result<Vec<u8>, Errno> {
    let mut random = [0; 8];
    if !sys::random(&mut random) {
        return Err(Errno::EADDRINUSE);
    }
    let mut name = plain(uid);
    name.extend(format!("/{:016x}", u64::from_ne_bytes(random)).into_bytes());
    Ok(name)
}
