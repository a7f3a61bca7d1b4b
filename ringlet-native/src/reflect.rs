//! The C edge of reflective memory (`ringlet_reflect`): handles, error numbers and texts, and nothing else. "As in the header" is as in lib.rs; but
//! any thread may use a handle, and several at once, where the header does not say otherwise.

use std::cell::RefCell;
use std::ffi::{CStr, CString, OsStr, c_char, c_int, c_uint, c_void};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr::{null, null_mut};
use std::time::Duration;

use crate::{boxed, room, timeout, unbox};
use ringlet_reflect::{
    Cluster, Host, Locks, Permission, Receiver, Region, Status, Transmitter, Use, Wait, Watch,
};

const INCOHERENT: c_uint = 1;
const TRANSMIT: c_uint = 1;
const RECEIVE: c_uint = 2;
const NONSHARED: c_uint = 1;
const NO_LOOPBACK: c_uint = 2;
const CREATE: c_uint = 1;
const HOST_NAME_BYTES: usize = 256;
const HOSTS: usize = 100;

pub struct ringlet_reflect_host(Host);

pub struct ringlet_reflect_region {
    // (Detached before it is given back.)
    transmitter: Option<Transmitter>,
    receiver: Option<Receiver>,
    region: Region,
}

pub struct ringlet_reflect_watch(Watch);

pub struct ringlet_reflect_locks(Locks);

#[repr(C)]
pub struct ringlet_reflect_state {
    host: [c_char; HOST_NAME_BYTES],
    allocated: u64,
    allocated_most: u64,
    received_most: u64,
    members: u32,
    regions: u32,
    watched_pages: u32,
    lock_sets: u32,
    locks_held: u32,
    is_cut: c_int,
}

#[repr(C)]
pub struct ringlet_reflect_cluster {
    event: u32,
    hosts: u32,
    rails: u32,
    active_rails: u32,
    stopped: [c_char; HOST_NAME_BYTES],
    names: [[c_char; HOST_NAME_BYTES]; HOSTS],
}

/// What went wrong: by its status, or as an error number alone.
enum Why {
    Status(Status),
    Errno(c_int, &'static str),
}

impl From<Status> for Why {
    fn from(status: Status) -> Why {
        Why::Status(status)
    }
}

impl From<crate::Failure> for Why {
    fn from(failure: crate::Failure) -> Why {
        Why::Errno(failure.0, "an address is NULL")
    }
}

const ABSENT: Why = Why::Errno(libc::EINVAL, "the handle is NULL");
const UNKNOWN_FLAGS: Why = Why::Errno(libc::EINVAL, "the flags are unknown");

fn errno(status: Status) -> c_int {
    match status {
        Status::Full | Status::ReceiveFull => libc::ENOSPC,
        Status::Exists | Status::Prior => libc::EEXIST,
        Status::ReceiveAttached | Status::TransmitAttached => libc::EALREADY,
        Status::Attached | Status::Busy | Status::LockActive => libc::EBUSY,
        Status::Shared | Status::NonShared | Status::OtherLoopback => libc::EBUSY,
        Status::Denied => libc::EACCES,
        Status::NotAllocated | Status::NotHeld => libc::EPERM,
        Status::NotInitialised => libc::ENOTCONN,
        Status::BadRegion | Status::BadLock => libc::ENOENT,
        Status::ChannelError => libc::EIO,
        Status::Timeout => libc::ETIMEDOUT,
        Status::HeldByUs => libc::EDEADLK,
        Status::Interrupted => libc::EINTR,
        Status::NoMemory => libc::ENOMEM,
        Status::CorruptLock => libc::EPROTO,
        Status::BadRail | Status::BadHost | Status::WrongRail => libc::ENODEV,
        Status::NotSupported => libc::ENOTSUP,
        Status::Stopped => libc::EHOSTUNREACH,
        _ => libc::EINVAL,
    }
}

thread_local! {
    static LAST: RefCell<(Option<CString>, c_int)> = const { RefCell::new((None, 0)) };
}

/// What to return; with errno, and a text that names the call, what it was of, and why, when it went wrong.
fn answer<T>(
    failed: T,
    call: &str,
    of: impl Fn() -> String,
    f: impl FnOnce() -> Result<T, Why>,
) -> T {
    f().unwrap_or_else(|why| {
        let (number, about, code) = match why {
            Why::Status(status) => (errno(status), status.about(), status.code()),
            Why::Errno(number, about) => (number, about, 0),
        };
        let text = CString::new(format!("ringlet_reflect_{call}{}: {about}", of())).ok();
        // (A thread that ends has no text any more.)
        let _ = LAST.try_with(|last| *last.borrow_mut() = (text, code));
        // SAFETY: the calling thread's own.
        unsafe { *libc::__errno_location() = number };
        failed
    })
}

fn nothing() -> String {
    String::new()
}

fn known(flags: c_uint, all: c_uint) -> Result<(), Why> {
    if flags & !all == 0 { Ok(()) } else { Err(UNKNOWN_FLAGS) }
}

/// # Safety
/// As in the header: null, or a handle.
unsafe fn handle<'a, T>(handle: *const T) -> Result<&'a T, Why> {
    // SAFETY: our caller's contract.
    unsafe { handle.as_ref() }.ok_or(ABSENT)
}

/// # Safety
/// The same, and nobody else uses it meanwhile.
unsafe fn handle_mut<'a, T>(handle: *mut T) -> Result<&'a mut T, Why> {
    // SAFETY: our caller's contract.
    unsafe { handle.as_mut() }.ok_or(ABSENT)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringlet_reflect_open(path: *const c_char) -> *mut ringlet_reflect_host {
    // SAFETY: as in the header: null, or a C string.
    let path = (!path.is_null()).then(|| unsafe { CStr::from_ptr(path) });
    let path = path.map(|path| Path::new(OsStr::from_bytes(path.to_bytes())));
    let of = || path.map_or(String::new(), |path| format!(" at {}", path.display()));
    answer(null_mut(), "open", of, || {
        let opened = path.map_or_else(Host::open, Host::at);
        let host = opened.map_err(|status| match status {
            Status::Denied => Why::Errno(
                libc::EACCES,
                "its keeper is neither this user's nor root's, or does not let this user in",
            ),
            status => status.into(),
        })?;
        Ok(boxed(ringlet_reflect_host(host)))
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringlet_reflect_close(host: *mut ringlet_reflect_host) {
    // SAFETY: as in the header.
    unsafe { unbox(host) };
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringlet_reflect_await_end(
    host: *const ringlet_reflect_host,
    timeout_ms: c_int,
) -> c_int {
    answer(-1, "await_end", nothing, || {
        // SAFETY: as in the header.
        let host = unsafe { handle(host)? };
        let most = timeout(timeout_ms).unwrap_or(Duration::MAX);
        match host.0.await_end(most)? {
            true => Ok(0),
            false => Err(late(timeout_ms)),
        }
    })
}

fn late(timeout_ms: c_int) -> Why {
    match timeout_ms {
        0 => Why::Errno(libc::EAGAIN, "not now, and it was not to wait"),
        _ => Why::Errno(libc::ETIMEDOUT, "not in all that time"),
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringlet_reflect_allocate(
    host: *const ringlet_reflect_host,
    key: u64,
    bytes: usize,
    mode: c_uint,
    flags: c_uint,
) -> *mut ringlet_reflect_region {
    let of = || format!(" of key {key:#x}, {bytes} bytes, mode {mode:03o}");
    answer(null_mut(), "allocate", of, || {
        known(flags, INCOHERENT)?;
        let how = Permission { mode, coherent: flags & INCOHERENT == 0, ..Permission::default() };
        // SAFETY: as in the header.
        let region = unsafe { handle(host)? }.0.allocate(key, bytes, &how)?;
        Ok(boxed(ringlet_reflect_region { transmitter: None, receiver: None, region }))
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringlet_reflect_deallocate(region: *mut ringlet_reflect_region) {
    // SAFETY: as in the header.
    unsafe { unbox(region) };
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringlet_reflect_len(region: *const ringlet_reflect_region) -> usize {
    // SAFETY: as in the header.
    unsafe { handle(region) }.map_or(0, |region| region.region.len())
}

/// Of which one; for a text.
///
/// # Safety
/// As in the header.
unsafe fn of_region(region: *const ringlet_reflect_region) -> impl Fn() -> String {
    // SAFETY: our caller's contract.
    let key = unsafe { handle(region) }.map(|region| region.region.key()).ok();
    move || key.map_or(String::new(), |key| format!(" of region {key:#x}"))
}

fn attached(flags: c_uint) -> Use {
    Use { shared: flags & NONSHARED == 0, loopback: flags & NO_LOOPBACK == 0 }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringlet_reflect_transmit(
    region: *mut ringlet_reflect_region,
    flags: c_uint,
) -> *mut c_void {
    // SAFETY: as in the header.
    answer(null_mut(), "transmit", unsafe { of_region(region) }, || {
        known(flags, NONSHARED | NO_LOOPBACK)?;
        // SAFETY: as in the header.
        let region = unsafe { handle_mut(region)? };
        let transmitter = region.region.transmit(attached(flags))?;
        Ok(region.transmitter.insert(transmitter).base().cast())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringlet_reflect_receive(
    region: *mut ringlet_reflect_region,
    flags: c_uint,
) -> *const c_void {
    // SAFETY: as in the header.
    answer(null(), "receive", unsafe { of_region(region) }, || {
        known(flags, NONSHARED)?;
        // SAFETY: as in the header.
        let region = unsafe { handle_mut(region)? };
        let receiver = region.region.receive(attached(flags))?;
        Ok(region.receiver.insert(receiver).base().cast())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringlet_reflect_transmit_to(
    region: *mut ringlet_reflect_region,
    to: *const c_char,
    flags: c_uint,
) -> *mut c_void {
    // SAFETY: as in the header: null, or a C string.
    let to = (!to.is_null()).then(|| unsafe { CStr::from_ptr(to) }.to_string_lossy());
    // SAFETY: as in the header.
    let region_of = unsafe { of_region(region) };
    let of = || to.as_ref().map_or(region_of(), |to| format!("{} to {to}", region_of()));
    answer(null_mut(), "transmit_to", of, || {
        known(flags, NONSHARED)?;
        let to = to.as_ref().ok_or(crate::Failure(libc::EFAULT))?;
        // SAFETY: as in the header.
        let region = unsafe { handle_mut(region)? };
        let transmitter = region.region.transmit_to(to, attached(flags).shared)?;
        Ok(region.transmitter.insert(transmitter).base().cast())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringlet_reflect_detach(
    region: *mut ringlet_reflect_region,
    directions: c_uint,
) -> c_int {
    // SAFETY: as in the header.
    answer(-1, "detach", unsafe { of_region(region) }, || {
        known(directions, TRANSMIT | RECEIVE)?;
        // SAFETY: as in the header.
        let region = unsafe { handle_mut(region)? };
        let sent = (directions & TRANSMIT != 0).then(|| region.transmitter.take().is_some());
        let received = (directions & RECEIVE != 0).then(|| region.receiver.take().is_some());
        match [sent, received] {
            [None, None] => Err(UNKNOWN_FLAGS),
            [sent, received] if sent != Some(false) && received != Some(false) => Ok(0),
            _ => Err(NOT_ATTACHED),
        }
    })
}

const NOT_ATTACHED: Why = Why::Errno(libc::ENOTCONN, "it is not attached that way");

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringlet_reflect_put(
    region: *const ringlet_reflect_region,
    at: usize,
    data: *const c_void,
    len: usize,
) -> c_int {
    // SAFETY: as in the header.
    answer(-1, "put", unsafe { of_region(region) }, || {
        // SAFETY: as in the header.
        let to = unsafe { handle(region)? }.transmitter.as_ref().ok_or(NOT_ATTACHED)?;
        if data.is_null() && len > 0 {
            return Err(crate::Failure(libc::EFAULT).into());
        }
        if at > to.len() || len > to.len() - at {
            return Err(BEYOND);
        }
        if len > 0 {
            // SAFETY: within the region, as looked at above; the program's bytes by the header.
            unsafe { ringlet_reflect::transmit(data.cast(), to.base().add(at), len)? };
        }
        Ok(0)
    })
}

const BEYOND: Why = Why::Errno(libc::EMSGSIZE, "the bytes are not all within the region");

/// A range that is not within the region is told of as such.
fn within(status: Status) -> Why {
    if status == Status::BadParameter { BEYOND } else { status.into() }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringlet_reflect_get(
    region: *const ringlet_reflect_region,
    at: usize,
    buffer: *mut c_void,
    len: usize,
) -> c_int {
    // SAFETY: as in the header.
    answer(-1, "get", unsafe { of_region(region) }, || {
        // SAFETY: as in the header.
        let (from, to) = unsafe { (handle(region)?, room(buffer, len)?) };
        from.receiver.as_ref().ok_or(NOT_ATTACHED)?.get(at, to).map_err(within)?;
        Ok(0)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringlet_reflect_notify(
    region: *const ringlet_reflect_region,
    at: usize,
    len: usize,
) -> c_int {
    // SAFETY: as in the header.
    answer(-1, "notify", unsafe { of_region(region) }, || {
        // SAFETY: as in the header.
        let to = unsafe { handle(region)? }.transmitter.as_ref().ok_or(NOT_ATTACHED)?;
        to.notify(at, len).map_err(within)?;
        Ok(0)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringlet_reflect_watch_open(
    region: *const ringlet_reflect_region,
    at: usize,
) -> *mut ringlet_reflect_watch {
    // SAFETY: as in the header.
    answer(null_mut(), "watch_open", unsafe { of_region(region) }, || {
        // SAFETY: as in the header.
        let from = unsafe { handle(region)? }.receiver.as_ref().ok_or(NOT_ATTACHED)?;
        Ok(boxed(ringlet_reflect_watch(from.watch(at).map_err(within)?)))
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringlet_reflect_watch_changed(watch: *mut ringlet_reflect_watch) -> c_int {
    answer(-1, "watch_changed", nothing, || {
        // SAFETY: as in the header.
        Ok(unsafe { handle_mut(watch)? }.0.has_changed().into())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringlet_reflect_watch_wait(
    watch: *mut ringlet_reflect_watch,
    timeout_ms: c_int,
) -> c_int {
    answer(-1, "watch_wait", nothing, || {
        // SAFETY: as in the header.
        match unsafe { handle_mut(watch)? }.0.wait(timeout(timeout_ms)) {
            true => Ok(0),
            false => Err(late(timeout_ms)),
        }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringlet_reflect_watch_fd(watch: *mut ringlet_reflect_watch) -> c_int {
    answer(-1, "watch_fd", nothing, || {
        // SAFETY: as in the header.
        Ok(unsafe { handle_mut(watch)? }.0.descriptor()?.as_raw_fd())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringlet_reflect_watch_close(watch: *mut ringlet_reflect_watch) {
    // SAFETY: as in the header.
    unsafe { unbox(watch) };
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringlet_reflect_locks_open(
    host: *const ringlet_reflect_host,
    key: u64,
    count: usize,
    mode: c_uint,
    flags: c_uint,
) -> *mut ringlet_reflect_locks {
    let of = || format!(" of key {key:#x}, {count} locks, mode {mode:03o}");
    answer(null_mut(), "locks_open", of, || {
        known(flags, CREATE)?;
        // SAFETY: as in the header.
        let locks = unsafe { handle(host)? }.0.locks(key, count, mode, flags & CREATE != 0)?;
        Ok(boxed(ringlet_reflect_locks(locks)))
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringlet_reflect_locks_count(locks: *const ringlet_reflect_locks) -> usize {
    // SAFETY: as in the header.
    unsafe { handle(locks) }.map_or(0, |locks| locks.0.count())
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringlet_reflect_acquire(
    locks: *const ringlet_reflect_locks,
    lock: usize,
    timeout_ms: c_int,
) -> c_int {
    let wait = match (timeout_ms, timeout(timeout_ms)) {
        (0, _) => Wait::No,
        (_, Some(most)) => Wait::UpTo(most),
        (_, None) => Wait::Forever,
    };
    answer(
        -1,
        "acquire",
        || format!(" of lock {lock}"),
        || {
            // SAFETY: as in the header.
            match unsafe { handle(locks)? }.0.acquire(lock, wait) {
                Ok(()) => Ok(0),
                Err(Status::Busy) => Err(late(timeout_ms)),
                Err(status) => Err(status.into()),
            }
        },
    )
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringlet_reflect_release(
    locks: *const ringlet_reflect_locks,
    lock: usize,
) -> c_int {
    answer(
        -1,
        "release",
        || format!(" of lock {lock}"),
        || {
            // SAFETY: as in the header.
            unsafe { handle(locks)? }.0.release(lock)?;
            Ok(0)
        },
    )
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringlet_reflect_locks_close(locks: *mut ringlet_reflect_locks) {
    // SAFETY: as in the header.
    unsafe { unbox(locks) };
}

/// # Safety
/// As in the header.
unsafe fn count_of(host: *const ringlet_reflect_host, rail: c_uint) -> Result<c_int, Why> {
    // SAFETY: our caller's contract.
    match unsafe { handle(host)? }.0.errors(rail as usize)? {
        count if count >= 0 => Ok(count),
        _ => Err(Why::Errno(libc::EAGAIN, "errors are being counted: look again")),
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringlet_reflect_errors(
    host: *const ringlet_reflect_host,
    rail: c_uint,
) -> c_int {
    // SAFETY: as in the header.
    answer(-1, "errors", || format!(" of rail {rail}"), || unsafe { count_of(host, rail) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringlet_reflect_check(
    host: *const ringlet_reflect_host,
    rail: c_uint,
    since: c_int,
) -> c_int {
    answer(
        -1,
        "check",
        || format!(" of rail {rail}"),
        || {
            // SAFETY: as in the header.
            unsafe { handle(host)? }.0.check_errors(rail as usize, since)?;
            Ok(0)
        },
    )
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringlet_reflect_host_state(
    host: *const ringlet_reflect_host,
    state: *mut ringlet_reflect_state,
) -> c_int {
    answer(-1, "host_state", nothing, || {
        // SAFETY: as in the header.
        let (host, to) = unsafe { (handle(host)?, handle_mut(state)?) };
        let found = host.0.state()?;
        *to = ringlet_reflect_state {
            host: text(&found.host),
            allocated: found.allocated,
            allocated_most: found.allocated_most,
            received_most: found.received_most,
            members: found.members.len() as u32,
            regions: found.regions.len() as u32,
            watched_pages: found.regions.iter().map(|region| region.watched).sum(),
            lock_sets: found.sets.len() as u32,
            locks_held: found.sets.iter().map(|set| set.held.len() as u32).sum(),
            is_cut: found.is_cut.into(),
        };
        Ok(0)
    })
}

/// As much of it as there is room for.
fn text(from: &str) -> [c_char; HOST_NAME_BYTES] {
    let mut text = [0; HOST_NAME_BYTES];
    for (to, byte) in text[..HOST_NAME_BYTES - 1].iter_mut().zip(from.bytes()) {
        *to = byte as c_char;
    }
    text
}

fn told(cluster: &Cluster) -> ringlet_reflect_cluster {
    let mut names = [[0; HOST_NAME_BYTES]; HOSTS];
    for (to, name) in names.iter_mut().zip(&cluster.hosts) {
        *to = text(name);
    }
    ringlet_reflect_cluster {
        event: cluster.event,
        hosts: cluster.hosts.len() as u32,
        rails: cluster.rails,
        active_rails: cluster.active,
        stopped: text(cluster.stopped.as_deref().unwrap_or_default()),
        names,
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringlet_reflect_host_cluster(
    host: *const ringlet_reflect_host,
    cluster: *mut ringlet_reflect_cluster,
) -> c_int {
    answer(-1, "host_cluster", nothing, || {
        // SAFETY: as in the header.
        let (host, to) = unsafe { (handle(host)?, handle_mut(cluster)?) };
        *to = told(&host.0.cluster()?);
        Ok(0)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringlet_reflect_wait_event(
    host: *const ringlet_reflect_host,
    known: *mut ringlet_reflect_cluster,
    timeout_ms: c_int,
) -> c_int {
    answer(-1, "wait_event", nothing, || {
        // SAFETY: as in the header.
        let (host, known) = unsafe { (handle(host)?, handle_mut(known)?) };
        let since = Cluster { event: known.event, ..Cluster::default() };
        let most = timeout(timeout_ms).unwrap_or(Duration::MAX);
        match host.0.wait_event(&since, most) {
            Ok(now) => *known = told(&now),
            Err(Status::Timeout) => return Err(late(timeout_ms)),
            Err(status) => return Err(status.into()),
        }
        Ok(0)
    })
}

/// Nothing has failed yet, or nothing can be said of it.
const NO_TEXT: &CStr = c"";

#[unsafe(no_mangle)]
pub extern "C" fn ringlet_reflect_error() -> *const c_char {
    // (The text stays where it is until another one takes its place.)
    let text = LAST.try_with(|last| last.borrow().0.as_ref().map(|text| text.as_ptr()));
    text.ok().flatten().unwrap_or(NO_TEXT.as_ptr())
}

#[unsafe(no_mangle)]
pub extern "C" fn ringlet_reflect_status() -> c_int {
    LAST.try_with(|last| last.borrow().1).unwrap_or(0)
}
