//! Who is let in where a provider listens: nobody but who has been told its name by the node service, before the provider sees a byte.
//!
//! A provider in software (`tcp`, `net`, `sockets`) listens at a TCP port, and takes what comes for its own protocol: 16 bytes of a stranger's end
//! the process (1.17). So the name of an endpoint has a secret behind its address. Names are passed over TLS, to members only. Who connects says a digest
//! of the secret first; who listens takes it off, or closes what has come without it. The provider knows of neither: its calls of three functions of libc's
//! lead here.
//!
//! Who has connected and said nothing yet is held here, and the provider not told of it: a few of each address for a few seconds. Once it has said the
//! secret, a thread of ours wakes the provider by a connection to its own port, and the next `accept` gives what was held. (TCP_DEFER_ACCEPT does not do
//! it: with a queue that is full of silent strangers the kernel passes on a member too before its bytes are there.)
//! Providers whose connections are a device's affair (`verbs`) do not come past here.

use std::collections::HashMap;
use std::ffi::{CStr, c_int, c_void};
use std::io::{self, Write as _};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::os::fd::{AsRawFd as _, FromRawFd as _, IntoRawFd as _, OwnedFd, RawFd};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use libc::{sockaddr, socklen_t};
use ringlet_core::layout::PAGE_BYTES;
use ringlet_linux::elf::{Entry, Object};
use ringlet_linux::tcp;

/// What is said first.
pub const SECRET_BYTES: usize = 32;
pub type Secret = [u8; SECRET_BYTES];
type Said = [u8; SECRET_BYTES];

/// What is said for a secret. WHY not the secret itself: a hostile member chooses both it and the address, and would have us say 32 bytes of its choice to
/// any service that we can reach.
fn said_for(secret: &Secret) -> Said {
    let mut text = ring::digest::Context::new(&ring::digest::SHA256);
    text.update(b"ringlet: the secret of an endpoint\n");
    text.update(secret);
    text.finish().as_ref().try_into().expect("32 bytes")
}

/// Who has not said it by then goes; and who has, and was not taken by the provider in as long again.
const SAYS_IN: Duration = Duration::from_secs(5);
/// Connections that are held, of all and of one address: of too many the oldest of the most frequent address goes.
const HELD_MOST: usize = 64;
const HELD_OF_ONE: usize = 16;
/// A provider that was woken, and has not come, is woken again.
const WAKE_AGAIN: Duration = Duration::from_millis(200);

/// A connection that is not the provider's yet.
struct Held {
    socket: OwnedFd,
    /// The endpoint's address, and the stranger's.
    to: SocketAddr,
    from: IpAddr,
    since: Instant,
    has_said: bool,
}

#[derive(Default)]
struct Gate {
    /// Of endpoints of ours, by the address at which they listen: what opens them.
    ours: HashMap<SocketAddr, Said>,
    /// Of peers' endpoints, and how many ways lead there.
    theirs: HashMap<SocketAddr, (Said, usize)>,
    /// Connections that are being made: what is to be said, once they are.
    owed: HashMap<RawFd, Said>,
    /// Connections to endpoints of ours, the oldest first.
    held: Vec<Held>,
    /// Wakes the thread that looks after them, once there is one.
    bell: Option<OwnedFd>,
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
    with(|gate| gate.ours.insert(at, said_for(&secret)));
    Ok(secret)
}

pub fn close(at: SocketAddr) {
    with(|gate| {
        gate.ours.remove(&at);
        gate.held.retain(|held| held.to != at);
    });
}

/// Is it one that the provider has not been given yet?
pub fn holds(socket: RawFd) -> bool {
    with(|gate| gate.held.iter().any(|held| held.socket.as_raw_fd() == socket))
}

/// What is to be said to a peer's endpoint. False: ways lead there by another secret, which who names the address anew does not take from them.
#[must_use]
pub fn learn(at: SocketAddr, secret: Secret) -> bool {
    let said = said_for(&secret);
    with(|gate| {
        let known = gate.theirs.entry(at).or_insert((said, 0));
        let is_same = known.0 == said;
        known.1 += usize::from(is_same);
        is_same
    })
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

type Calls = [(&'static CStr, usize); 3];

fn calls() -> Calls {
    [
        (c"accept", accept as *const () as usize),
        (c"connect", connect as *const () as usize),
        (c"getsockopt", getsockopt as *const () as usize),
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
    told_by(libc::getsockname, socket)
}

/// Who is at its other end.
fn remote(socket: RawFd) -> Option<SocketAddr> {
    told_by(libc::getpeername, socket)
}

type Tells = unsafe extern "C" fn(c_int, *mut sockaddr, *mut socklen_t) -> c_int;

fn told_by(tells: Tells, socket: RawFd) -> Option<SocketAddr> {
    // SAFETY: zero is a valid address.
    let mut at: libc::sockaddr_storage = unsafe { std::mem::zeroed() };
    let mut len = size_of::<libc::sockaddr_storage>() as socklen_t;
    let to = (&raw mut at).cast::<sockaddr>();
    // SAFETY: room for an address, and its size; then as many bytes as were filled.
    unsafe {
        if tells(socket, to, &raw mut len) != 0 {
            return None;
        }
        address(to, len.min(size_of::<libc::sockaddr_storage>() as socklen_t))
    }
}

unsafe extern "C" fn accept(socket: c_int, at: *mut sockaddr, len: *mut socklen_t) -> c_int {
    let ours = local(socket).filter(|_| is_tcp(socket));
    while let Some(said) = ours.and_then(|ours| with(|gate| gate.take_said(ours))) {
        // SAFETY: as the caller promises for `accept`, which fills the same. (It fails for one that has ended meanwhile.)
        if at.is_null() || unsafe { libc::getpeername(said.as_raw_fd(), at, len) } == 0 {
            return said.into_raw_fd();
        }
    }
    // SAFETY: as the caller promises.
    let came = unsafe { libc::accept(socket, at, len) };
    if came < 0 {
        return came;
    }
    with(|gate| gate.owed.remove(&came));
    if ours.is_none() && !is_tcp(came) {
        return came;
    }
    // SAFETY: made just now, ours alone.
    let came = unsafe { OwnedFd::from_raw_fd(came) };
    let Some(ours) = ours else { return fail(libc::EAGAIN) };
    match has_said(ours, &came) {
        Some(true) => return came.into_raw_fd(),
        Some(false) => {}
        None => hold(came, ours),
    }
    fail(libc::EAGAIN)
}

/// Takes the secret off what has come to our endpoint: is it the right one? `None`: not all of it is there yet.
fn has_said(ours: SocketAddr, came: &OwnedFd) -> Option<bool> {
    let Some(secret) = with(|gate| gate.ours.get(&ours).copied()) else { return Some(false) };
    let mut said = [0; SECRET_BYTES];
    let mut receive = |flags| {
        let (socket, to) = (came.as_raw_fd(), said.as_mut_ptr().cast());
        // SAFETY: a buffer of its length.
        match unsafe { libc::recv(socket, to, SECRET_BYTES, flags | libc::MSG_DONTWAIT) } {
            -1 => Err(io::Error::last_os_error().kind()),
            got => Ok(got as usize),
        }
    };
    match receive(libc::MSG_PEEK) {
        Ok(SECRET_BYTES) if receive(0) == Ok(SECRET_BYTES) => {}
        Err(io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => return None,
        Ok(1..SECRET_BYTES) => return None,
        _ => return Some(false),
    }
    // (All bytes are looked at, so that the time says nothing of how many were right.)
    let differs = secret.iter().zip(said).fold(0, |differs, (one, other)| differs | (one ^ other));
    Some(std::hint::black_box(differs) == 0)
}

/// Keeps one that has not said all yet; or closes it, if nobody can look after it.
fn hold(socket: OwnedFd, to: SocketAddr) {
    let Some(from) = remote(socket.as_raw_fd()) else { return };
    let enough = SECRET_BYTES as c_int;
    if !receive_least(&socket, enough) {
        return;
    }
    let held = Held { socket, to, from: from.ip(), since: Instant::now(), has_said: false };
    with(|gate| {
        if gate.bell.is_none() {
            gate.bell = watch();
        }
        let Some(bell) = &gate.bell else { return };
        let one = 1_u64;
        // SAFETY: 8 bytes. (One that is full wakes too.)
        unsafe { libc::write(bell.as_raw_fd(), (&raw const one).cast(), 8) };
        gate.hold(held);
    });
}

impl Gate {
    fn hold(&mut self, held: Held) {
        let of = |gate: &Gate, from| gate.held.iter().filter(|held| held.from == from).count();
        let crowded = if of(self, held.from) >= HELD_OF_ONE {
            Some(held.from)
        } else if self.held.len() >= HELD_MOST {
            self.held.iter().rev().map(|held| held.from).max_by_key(|from| of(self, *from))
        } else {
            None
        };
        if let Some(at) = self.held.iter().position(|held| Some(held.from) == crowded) {
            self.held.remove(at);
        }
        self.held.push(held);
    }

    /// One that has said the secret to this endpoint of ours.
    fn take_said(&mut self, ours: SocketAddr) -> Option<OwnedFd> {
        let at = self.held.iter().position(|held| held.has_said && held.to == ours)?;
        let socket = self.held.remove(at).socket;
        receive_least(&socket, 1);
        Some(socket)
    }

    /// Lets go who is late, has ended, or has said something else. The endpoints whose provider is to be woken.
    fn look_after(&mut self) -> Vec<SocketAddr> {
        let mut held = std::mem::take(&mut self.held);
        let ours = &self.ours;
        held.retain(|held| ours.contains_key(&held.to) && held.since.elapsed() < SAYS_IN);
        self.held = held;
        let mut woken: Vec<SocketAddr> =
            self.held.iter().filter(|held| held.has_said).map(|held| held.to).collect();
        woken.sort_unstable();
        woken.dedup();
        woken
    }
}

/// A thread that looks after those that are held, for as long as the process lives; and what wakes it.
fn watch() -> Option<OwnedFd> {
    // SAFETY: no memory is passed.
    let bell = match unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) } {
        -1 => return None,
        // SAFETY: made just now, ours alone.
        bell => unsafe { OwnedFd::from_raw_fd(bell) },
    };
    let heard = bell.try_clone().ok()?;
    let thread = std::thread::Builder::new().name("gate".to_owned());
    thread
        .spawn(move || {
            loop {
                watch_once(&heard)
            }
        })
        .ok()?;
    Some(bell)
}

fn watch_once(bell: &OwnedFd) {
    for at in with(Gate::look_after) {
        wake(at);
    }
    // Copies, as `accept` and `close` may close the others meanwhile.
    let (copies, said, none): (Vec<(OwnedFd, SocketAddr, RawFd)>, bool, bool) = with(|gate| {
        let silent = gate.held.iter().filter(|held| !held.has_said);
        let copies = silent.filter_map(|held| {
            Some((held.socket.try_clone().ok()?, held.to, held.socket.as_raw_fd()))
        });
        (copies.collect(), gate.held.iter().any(|held| held.has_said), gate.held.is_empty())
    });
    let of = |fd, events| libc::pollfd { fd, events, revents: 0 };
    let events = libc::POLLIN | libc::POLLRDHUP;
    let mut looked: Vec<_> = copies.iter().map(|copy| of(copy.0.as_raw_fd(), events)).collect();
    looked.push(of(bell.as_raw_fd(), libc::POLLIN));
    let patience = match (none, said) {
        (true, _) => -1,
        (_, true) => WAKE_AGAIN.as_millis() as c_int,
        _ => SAYS_IN.as_millis() as c_int / 5,
    };
    // SAFETY: so many structs.
    unsafe { libc::poll(looked.as_mut_ptr(), looked.len() as libc::nfds_t, patience) };
    let mut rung = 0_u64;
    // SAFETY: 8 bytes.
    unsafe { libc::read(bell.as_raw_fd(), (&raw mut rung).cast(), 8) };
    for ((copy, to, number), seen) in copies.iter().zip(&looked) {
        if seen.revents == 0 {
            continue;
        }
        let said = has_said(*to, copy);
        with(|gate| {
            let is_it =
                |held: &Held| held.socket.as_raw_fd() == *number && is_same(&held.socket, copy);
            let Some(at) = gate.held.iter().position(is_it) else { return };
            if said == Some(true) {
                (gate.held[at].has_said, gate.held[at].since) = (true, Instant::now());
            } else {
                // It has ended, or said something else.
                gate.held.remove(at);
            }
        });
    }
}

fn is_same(one: &OwnedFd, other: &OwnedFd) -> bool {
    let inode = |socket| rustix::fs::fstat(socket).map(|seen| seen.st_ino).ok();
    inode(one) == inode(other)
}

/// Makes the provider call `accept`: by a connection that says what is never the secret.
fn wake(at: SocketAddr) {
    let Ok(mut socket) = TcpStream::connect_timeout(&at, WAKE_AGAIN) else { return };
    let _ = socket.set_nonblocking(true);
    let _ = socket.write_all(&[0; SECRET_BYTES]);
}

/// `poll` is to tell of no fewer bytes.
fn receive_least(socket: &OwnedFd, bytes: c_int) -> bool {
    let (level, option) = (libc::SOL_SOCKET, libc::SO_RCVLOWAT);
    // SAFETY: an int and its size.
    unsafe {
        libc::setsockopt(socket.as_raw_fd(), level, option, (&raw const bytes).cast(), 4) == 0
    }
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
        return if say(socket, &secret) == Told::All { 0 } else { refused(socket) };
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
    let said = if *error == 0 { say(socket, &secret) } else { Told::Nothing };
    if said != Told::NotYet {
        with(|gate| gate.owed.remove(&socket));
    }
    if *error == 0 && said == Told::Nothing {
        refused(socket);
        *error = libc::ECONNREFUSED;
    }
    done
}

#[derive(PartialEq, Eq)]
enum Told {
    All,
    /// The connection is not made yet.
    NotYet,
    Nothing,
}

fn say(socket: RawFd, secret: &Said) -> Told {
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: a buffer of its length.
    let sent = unsafe { libc::send(socket, secret.as_ptr().cast(), SECRET_BYTES, flags) };
    match sent {
        // (A connection that is new has room for it.)
        sent if sent == SECRET_BYTES as isize => Told::All,
        -1 if io::Error::last_os_error().kind() == io::ErrorKind::WouldBlock => Told::NotYet,
        _ => Told::Nothing,
    }
}

/// It could not be said, and nothing else is to be.
fn refused(socket: RawFd) -> c_int {
    // SAFETY: no memory is passed.
    unsafe { libc::shutdown(socket, libc::SHUT_RDWR) };
    fail(libc::ECONNREFUSED)
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    /// As a provider takes them: `accept` when the listener is readable.
    fn serve(listener: &TcpListener) -> OwnedFd {
        let until = Instant::now() + Duration::from_secs(60);
        while Instant::now() < until {
            let mut seen =
                libc::pollfd { fd: listener.as_raw_fd(), events: libc::POLLIN, revents: 0 };
            // SAFETY: one struct, and no address is asked for.
            let came = unsafe {
                if libc::poll(&raw mut seen, 1, 1000) != 1 {
                    continue;
                }
                accept(listener.as_raw_fd(), std::ptr::null_mut(), std::ptr::null_mut())
            };
            if came >= 0 {
                // SAFETY: made just now, ours alone.
                return unsafe { OwnedFd::from_raw_fd(came) };
            }
        }
        panic!("nobody is let in");
    }

    fn listening(host: &str) -> (TcpListener, SocketAddr, Secret) {
        let listener = TcpListener::bind((host, 0)).unwrap();
        listener.set_nonblocking(true).unwrap();
        let at = listener.local_addr().unwrap();
        (listener, at, open(at).unwrap())
    }

    /// More silent strangers than the queue has room for, and than are held: a member is let in, also one whose bytes come later, and in two parts.
    #[test]
    fn silent_strangers_keep_no_member_out() {
        let (listener, at, secret) = listening("127.0.0.9");
        let strangers: Vec<TcpStream> =
            std::iter::from_fn(|| TcpStream::connect_timeout(&at, Duration::from_millis(300)).ok())
                .take(200)
                .collect();
        assert!(strangers.len() > HELD_MOST);
        // (From another address than theirs.)
        let member = std::thread::spawn(move || {
            let mut member = connected_from("127.0.0.10", at);
            std::thread::sleep(Duration::from_millis(50));
            let said = said_for(&secret);
            member.write_all(&said[..20]).unwrap();
            std::thread::sleep(Duration::from_millis(50));
            member.write_all(&said[20..]).unwrap();
            member
        });
        let came = serve(&listener);
        let member = member.join().unwrap();
        assert_eq!(remote(came.as_raw_fd()), member.local_addr().ok());
        let ours = with(|gate| gate.held.iter().filter(|held| held.to == at).count());
        assert!(ours <= HELD_OF_ONE, "{ours} of one address are held");
        close(at);
        assert!(!holds(came.as_raw_fd()) && with(|gate| gate.held.iter().all(|it| it.to != at)));
    }

    fn connected_from(host: &str, to: SocketAddr) -> TcpStream {
        use rustix::net::{AddressFamily, SocketType, bind, connect, socket};
        let from = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
        bind(&from, &SocketAddr::new(host.parse().unwrap(), 0)).unwrap();
        // (With a queue that is full the kernel tries again.)
        connect(&from, &to).unwrap();
        from.into()
    }

    #[test]
    fn a_secret_is_not_replaced_while_ways_lead_there() {
        let at = "127.0.0.11:9".parse().unwrap();
        assert!(learn(at, [1; 32]) && learn(at, [1; 32]));
        assert!(!learn(at, [2; 32]));
        forget(at);
        assert!(!learn(at, [2; 32]));
        forget(at);
        assert!(learn(at, [2; 32]));
        forget(at);
    }
}
