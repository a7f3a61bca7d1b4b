//! Who is let in where a provider listens: nobody but who has been told its name by the node service, before the provider sees a byte.
//!
//! A provider in software (`tcp`, `net`, `sockets`) listens at a TCP port, and takes what comes for its own protocol: 16 bytes of a stranger's end
//! the process (1.17). So the name of an endpoint has a secret behind its address. Names are passed over TLS, to members only. Who connects says the
//! secret first; who listens takes it off, or closes what has come without it. The provider knows of neither: its calls of four functions of libc's
//! lead here.
//!
//! The kernel holds back who has said nothing (TCP_DEFER_ACCEPT), so nobody is waited for. Providers whose connections are a device's affair
//! (`verbs`) do not come past here.

use std::collections::HashMap;
use std::ffi::{CStr, c_int, c_void};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::RawFd;
use std::sync::{Mutex, MutexGuard, PoisonError};

use libc::{sockaddr, socklen_t};
use ringlet_core::layout::PAGE_BYTES;
use ringlet_linux::elf::{Entry, Object};
use ringlet_linux::tcp;

/// What is said first.
pub const SECRET_BYTES: usize = 32;
pub type Secret = [u8; SECRET_BYTES];

/// Who has not said it by so many seconds goes (rounded up by the kernel).
const SAYS_IN_SECONDS: c_int = 5;

#[derive(Default)]
struct Gate {
    /// Of endpoints of ours, by the address at which they listen.
    ours: HashMap<SocketAddr, Secret>,
    /// Of peers' endpoints, and how many ways lead there.
    theirs: HashMap<SocketAddr, (Secret, usize)>,
    /// Connections that are being made: what is to be said, once they are.
    owed: HashMap<RawFd, Secret>,
}

static GATE: Mutex<Option<Gate>> = Mutex::new(None);

fn with<T>(act: impl FnOnce(&mut Gate) -> T) -> T {
    let mut held: MutexGuard<Option<Gate>> = GATE.lock().unwrap_or_else(PoisonError::into_inner);
    act(held.get_or_insert_default())
}

/// An endpoint of ours listens there: from now on it lets in who says this.
pub fn open(at: SocketAddr) -> io::Result<Secret> {
    let mut secret = [0; SECRET_BYTES];
    if !ringlet_linux::sys::random(&mut secret) {
        return Err(io::Error::other("the kernel has no random bytes"));
    }
    with(|gate| gate.ours.insert(at, secret));
    Ok(secret)
}

pub fn close(at: SocketAddr) {
    with(|gate| gate.ours.remove(&at));
}

/// What is to be said to a peer's endpoint. (One that has begun again at the same address has another secret: the last one holds.)
pub fn learn(at: SocketAddr, secret: Secret) {
    with(|gate| {
        let known = gate.theirs.entry(at).or_insert((secret, 0));
        (known.0, known.1) = (secret, known.1 + 1);
    });
}

pub fn forget(at: SocketAddr) {
    with(|gate| {
        let Some(known) = gate.theirs.get_mut(&at) else { return };
        known.1 -= 1;
        if known.1 == 0 {
            gate.theirs.remove(&at);
        }
    });
}

type Calls = [(&'static CStr, usize); 4];

fn calls() -> Calls {
    [
        (c"accept", accept as *const () as usize),
        (c"connect", connect as *const () as usize),
        (c"getsockopt", getsockopt as *const () as usize),
        (c"listen", listen as *const () as usize),
    ]
}

/// Leads the library's calls here, and those of providers that it has loaded. False if it makes none of `accept`, as far as can be seen: then nothing
/// is kept out.
pub fn install() -> bool {
    let mut found = false;
    // SAFETY: the function is called for each loaded object with what is declared, and the pointer is to `found`.
    unsafe { libc::dl_iterate_phdr(Some(each), (&raw mut found).cast()) };
    found
}

unsafe extern "C" fn each(info: *mut libc::dl_phdr_info, _: usize, found: *mut c_void) -> c_int {
    // SAFETY: as the loader calls it.
    let (info, found) = unsafe { (&*info, &mut *found.cast::<bool>()) };
    // SAFETY: null, or a string that ends.
    let name = unsafe { super::library::text(info.dlpi_name) }.unwrap_or_default();
    if !name.contains("libfabric") && !name.ends_with("-fi.so") {
        return 0;
    }
    let base = info.dlpi_addr as usize;
    // SAFETY: the object's own table.
    let segments = unsafe { std::slice::from_raw_parts(info.dlpi_phdr, info.dlpi_phnum.into()) };
    let of_kind = |kind| segments.iter().find(|segment| segment.p_type == kind);
    let Some(dynamic) = of_kind(libc::PT_DYNAMIC) else { return 0 };
    let dynamic = (base + dynamic.p_vaddr as usize) as *const Entry;
    // SAFETY: a loaded object, which is never unloaded (`Library::load`).
    let Some(object) = (unsafe { Object::new(base, dynamic) }) else { return 0 };
    // What the loader has made read-only when all was found.
    let sealed = of_kind(libc::PT_GNU_RELRO).map(|segment| {
        let start = (base + segment.p_vaddr as usize) & !(PAGE_BYTES - 1);
        let end = (base + (segment.p_vaddr + segment.p_memsz) as usize) & !(PAGE_BYTES - 1);
        (start, end)
    });
    let protect = |access| {
        sealed.is_none_or(|(start, end)| {
            // SAFETY: pages of the object's own data.
            start >= end
                || unsafe { libc::mprotect(start as *mut c_void, end - start, access) } == 0
        })
    };
    if !protect(libc::PROT_READ | libc::PROT_WRITE) {
        return 0;
    }
    for reference in object.references() {
        let Some((name, ours)) = calls().into_iter().find(|(name, _)| *name == reference.name)
        else {
            continue;
        };
        // SAFETY: as writable as the loader leaves such places, or made so.
        unsafe { reference.lead_to(ours) };
        *found |= name == c"accept";
    }
    protect(libc::PROT_READ);
    0
}

fn fail(error: c_int) -> c_int {
    // SAFETY: this thread's own.
    unsafe { *libc::__errno_location() = error };
    -1
}

fn is_tcp(socket: RawFd) -> bool {
    tcp::int_option(socket, libc::SOL_SOCKET, libc::SO_PROTOCOL) == Ok(libc::IPPROTO_TCP)
}

/// # Safety
/// An address and its length.
unsafe fn address(at: *const sockaddr, len: socklen_t) -> Option<SocketAddr> {
    if at.is_null() || (len as usize) < size_of::<libc::sockaddr_in>() {
        return None;
    }
    // SAFETY: so many bytes are there.
    let bytes = unsafe { std::slice::from_raw_parts(at.cast::<u8>(), len as usize) };
    let family = u16::from_ne_bytes([bytes[0], bytes[1]]);
    let port = u16::from_be_bytes([bytes[2], bytes[3]]);
    let ip: IpAddr = match i32::from(family) {
        libc::AF_INET => <[u8; 4]>::try_from(&bytes[4..8]).ok()?.into(),
        libc::AF_INET6 => <[u8; 16]>::try_from(bytes.get(8..24)?).ok()?.into(),
        _ => return None,
    };
    Some(SocketAddr::new(ip, port))
}

/// Where a socket of ours is bound.
fn local(socket: RawFd) -> Option<SocketAddr> {
    // SAFETY: zero is a valid address.
    let mut at: libc::sockaddr_storage = unsafe { std::mem::zeroed() };
    let mut len = size_of::<libc::sockaddr_storage>() as socklen_t;
    let to = (&raw mut at).cast::<sockaddr>();
    // SAFETY: room for an address, and its size; then as many bytes as were filled.
    unsafe {
        if libc::getsockname(socket, to, &raw mut len) != 0 {
            return None;
        }
        address(to, len.min(size_of::<libc::sockaddr_storage>() as socklen_t))
    }
}

unsafe extern "C" fn listen(socket: c_int, backlog: c_int) -> c_int {
    if is_tcp(socket) {
        let seconds = SAYS_IN_SECONDS;
        // SAFETY: an int and its size.
        unsafe {
            let (level, option) = (libc::IPPROTO_TCP, libc::TCP_DEFER_ACCEPT);
            libc::setsockopt(socket, level, option, (&raw const seconds).cast(), 4);
        }
    }
    // SAFETY: no memory is passed.
    unsafe { libc::listen(socket, backlog) }
}

unsafe extern "C" fn accept(socket: c_int, at: *mut sockaddr, len: *mut socklen_t) -> c_int {
    // SAFETY: as the caller promises.
    let came = unsafe { libc::accept(socket, at, len) };
    if came < 0 {
        return came;
    }
    with(|gate| gate.owed.remove(&came));
    if !is_tcp(came) || has_said(socket, came) {
        return came;
    }
    // SAFETY: made just now, ours alone.
    unsafe { libc::close(came) };
    fail(libc::EAGAIN)
}

/// Takes the secret off what has come to our endpoint, if it is there.
fn has_said(socket: RawFd, came: RawFd) -> bool {
    let Some(secret) = local(socket).and_then(|at| with(|gate| gate.ours.get(&at).copied())) else {
        return false;
    };
    let mut said = [0; SECRET_BYTES];
    // SAFETY: a buffer of its length.
    let got =
        unsafe { libc::recv(came, said.as_mut_ptr().cast(), SECRET_BYTES, libc::MSG_DONTWAIT) };
    // (All bytes are looked at, so that the time says nothing of how many were right.)
    let differs = secret.iter().zip(said).fold(0, |differs, (one, other)| differs | (one ^ other));
    got == SECRET_BYTES as isize && std::hint::black_box(differs) == 0
}

unsafe extern "C" fn connect(socket: c_int, to: *const sockaddr, len: socklen_t) -> c_int {
    // SAFETY: as the caller promises.
    let at = unsafe { address(to, len) };
    let secret = at.filter(|_| is_tcp(socket)).and_then(|at| {
        with(|gate| {
            gate.owed.remove(&socket);
            gate.theirs.get(&at).map(|known| known.0)
        })
    });
    // SAFETY: as the caller promises.
    let done = unsafe { libc::connect(socket, to, len) };
    let Some(secret) = secret else { return done };
    if done == 0 {
        return if say(socket, &secret) == Said::All { 0 } else { refused(socket) };
    }
    let error = io::Error::last_os_error().raw_os_error().unwrap_or(libc::ECONNREFUSED);
    if matches!(error, libc::EINPROGRESS | libc::EAGAIN | libc::EINTR) {
        with(|gate| gate.owed.insert(socket, secret));
    }
    fail(error)
}

/// By SO_ERROR a provider asks whether a connection has been made; with that the secret is due.
unsafe extern "C" fn getsockopt(
    socket: c_int,
    level: c_int,
    option: c_int,
    value: *mut c_void,
    len: *mut socklen_t,
) -> c_int {
    // SAFETY: as the caller promises.
    let done = unsafe { libc::getsockopt(socket, level, option, value, len) };
    if done != 0 || (level, option) != (libc::SOL_SOCKET, libc::SO_ERROR) {
        return done;
    }
    let Some(secret) = with(|gate| gate.owed.get(&socket).copied()) else { return done };
    // SAFETY: an int, which the kernel has just put there.
    let error = unsafe { &mut *value.cast::<c_int>() };
    let said = if *error == 0 { say(socket, &secret) } else { Said::Nothing };
    if said != Said::NotYet {
        with(|gate| gate.owed.remove(&socket));
    }
    if *error == 0 && said == Said::Nothing {
        refused(socket);
        *error = libc::ECONNREFUSED;
    }
    done
}

#[derive(PartialEq, Eq)]
enum Said {
    All,
    /// The connection is not made yet.
    NotYet,
    Nothing,
}

fn say(socket: RawFd, secret: &Secret) -> Said {
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: a buffer of its length.
    let sent = unsafe { libc::send(socket, secret.as_ptr().cast(), SECRET_BYTES, flags) };
    match sent {
        // (A connection that is new has room for it.)
        sent if sent == SECRET_BYTES as isize => Said::All,
        -1 if io::Error::last_os_error().kind() == io::ErrorKind::WouldBlock => Said::NotYet,
        _ => Said::Nothing,
    }
}

/// It could not be said, and nothing else is to be.
fn refused(socket: RawFd) -> c_int {
    // SAFETY: no memory is passed.
    unsafe { libc::shutdown(socket, libc::SHUT_RDWR) };
    fail(libc::ECONNREFUSED)
}
