//! libimc: the Memory Channel API (`<sys/imc.h>`) on ringlet's reflective memory. `include/sys/imc.h` says what each call does, and what of it was chosen.
//!
//! What the functions with three dots take behind them comes as further arguments: the C library's conventions on the processors that ringlet runs on pass
//! both alike. As many are looked at as the list before them says.

use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_int, c_long, c_uint, c_ulong, c_void};
use std::io::ErrorKind;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Once, PoisonError};
use std::time::Duration;

use ringlet_reflect::{
    Cluster, Host, LOCKS_MOST, Locks, Permission, Receiver, Region, Status, Transmitter, Use, Wait,
    transmit,
};

const SUCCESS: c_int = 0;
const TRANSMIT: c_int = 1;
const RECEIVE: c_int = 2;
const SHARED: c_int = 1;
const NONSHARED: c_int = 2;
const COHERENT: c_int = 1;
const LOOPBACK: c_int = 1;
const CREATOR: c_int = 1;
const LOCKWAIT: c_int = 1;
const LOCKNOWAIT: c_int = 2;
const GET_HOSTS: c_uint = 1;
const GET_NRAILS: c_uint = 2;
const GET_ACTIVERAILS: c_uint = 3;
const EVENT_HOST: c_uint = 1;
const EVENT_RAIL: c_uint = 2;
const MAXHOSTS: usize = 64;
const MAXHOSTNAME: usize = 256;

/// Statuses that only this interface has.
const EINVAL: c_int = -27;
const ESRCH: c_int = -28;
const EPERM: c_int = -31;
const NOROOT: c_int = -32;
const INSUFFMEM: c_int = -48;
const RAIL_CHANGE: c_int = -54;
const HOST_CHANGE: c_int = -55;
const MULTIPLE_CHANGE: c_int = -56;

/// `imc_hostinfo`.
#[repr(C)]
struct HostInfo {
    count: c_int,
    names: [[u8; MAXHOSTNAME]; MAXHOSTS],
}

struct Allocated {
    /// Another thread that attaches it has it too.
    region: Arc<Region>,
    transmitter: Option<Transmitter>,
    receiver: Option<Receiver>,
}

#[derive(Default)]
struct Api {
    host: Option<Host>,
    name: String,
    regions: BTreeMap<c_int, Allocated>,
    locks: BTreeMap<c_int, Arc<Locks>>,
}

/// Its own for each process: another thread of the parent's may have had the lock at the fork, and no child of it ever gives that back.
static API: AtomicPtr<Mutex<Option<Api>>> = AtomicPtr::new(std::ptr::null_mut());

fn api() -> MutexGuard<'static, Option<Api>> {
    static AT_FORK: Once = Once::new();
    AT_FORK.call_once(|| {
        // SAFETY: a function of this library, which is not unloaded (build.rs).
        unsafe { libc::pthread_atfork(None, None, Some(forget)) };
    });
    let mut known = API.load(Ordering::Acquire);
    if known.is_null() {
        let made = Box::into_raw(Box::default());
        // ORDER: Release, pairs with Acquire of the load in `api`: who finds it finds it made.
        let swap = API.compare_exchange(known, made, Ordering::AcqRel, Ordering::Acquire);
        known = match swap {
            Ok(_) => made,
            Err(theirs) => {
                // SAFETY: made above, and seen by nobody.
                drop(unsafe { Box::from_raw(made) });
                theirs
            }
        };
    }
    // SAFETY: never given back.
    unsafe { &*known }.lock().unwrap_or_else(PoisonError::into_inner)
}

/// In a child.
extern "C" fn forget() {
    API.store(std::ptr::null_mut(), Ordering::Release);
}

type Outcome = Result<c_int, Status>;

fn code(outcome: Outcome) -> c_int {
    outcome.unwrap_or_else(Status::code)
}

/// What the process has, once `imc_api_init` was called.
fn with(act: impl FnOnce(&mut Api, &Host) -> Outcome) -> c_int {
    let mut api = api();
    let api = api.get_or_insert_default();
    let Some(host) = api.host.clone() else { return Status::NotInitialised.code() };
    code(act(api, &host))
}

fn flag(given: c_int, known: c_int) -> Result<bool, Status> {
    if given == known || given == 0 { Ok(given == known) } else { Err(Status::BadParameter) }
}

/// Where an answer is to be put.
///
/// # Safety
/// The address is null, or valid for a `T` as long as the result is used.
unsafe fn to<'a, T>(address: *mut T) -> Result<&'a mut T, Status> {
    // SAFETY: our own contract.
    unsafe { address.as_mut() }.ok_or(Status::BadParameter)
}

#[unsafe(no_mangle)]
pub extern "C" fn imc_api_init(_reserved: *mut c_ulong) -> c_int {
    let mut api = api();
    // (In a child what the parent had is the parent's: it is forgotten, not given back. Its keeper knows the parent's process.)
    if api.as_ref().and_then(|api| api.host.as_ref()).is_some_and(|host| host.state().is_ok()) {
        return SUCCESS;
    }
    let found = Host::find().and_then(|host| Ok((host.state()?.host, host)));
    match found {
        Ok((name, host)) => {
            std::mem::forget(api.take());
            *api = Some(Api { host: Some(host), name, ..Api::default() });
            SUCCESS
        }
        Err(status) => status.code(),
    }
}

/// # Safety
/// `id` is null or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn imc_asalloc(
    key: c_ulong,
    bytes: c_ulong,
    mode: c_uint,
    flags: c_int,
    id: *mut c_int,
    rail: c_int,
) -> c_int {
    with(|api, host| {
        // SAFETY: our own contract.
        let id = unsafe { to(id) }?;
        let coherent = flag(flags, COHERENT)?;
        let rail = rail.try_into().map_err(|_| Status::BadRail)?;
        let region = host.allocate(key, bytes as usize, &Permission { mode, coherent, rail })?;
        let region = Arc::new(region);
        *id = region.id() as c_int;
        api.regions.insert(*id, Allocated { region, transmitter: None, receiver: None });
        Ok(SUCCESS)
    })
}

fn region(api: &mut Api, id: c_int) -> Result<&mut Allocated, Status> {
    api.regions.get_mut(&id).ok_or(Status::BadRegion)
}

fn sharing(mode: c_int) -> Result<bool, Status> {
    match mode {
        SHARED => Ok(true),
        NONSHARED => Ok(false),
        _ => Err(Status::BadParameter),
    }
}

/// # Safety
/// `address` is null or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn imc_asattach(
    id: c_int,
    direction: c_int,
    mode: c_int,
    flags: c_int,
    address: *mut *mut c_char,
) -> c_int {
    // SAFETY: our own contract.
    let address = match unsafe { to(address) } {
        Ok(address) => address,
        Err(status) => return with(|_, _| Err(status)),
    };
    attach(id, address, |region| {
        let shared = sharing(mode)?;
        Ok(match direction {
            TRANSMIT => {
                let loopback = flag(flags, LOOPBACK)?;
                Attached::Transmits(region.transmit(Use { shared, loopback })?)
            }
            RECEIVE if flags == 0 => {
                Attached::Receives(region.receive(Use { shared, ..Use::default() })?)
            }
            _ => return Err(Status::BadParameter),
        })
    })
}

enum Attached {
    Transmits(Transmitter),
    Receives(Receiver),
}

/// (Out of the table: all of its memory may have to be had first, or its contents, and other calls need not wait for that.)
fn attach(
    id: c_int,
    address: &mut *mut c_char,
    by: impl FnOnce(&Region) -> Result<Attached, Status>,
) -> c_int {
    let mut region = None;
    let found = with(|api, _| {
        region = Some(self::region(api, id)?.region.clone());
        Ok(SUCCESS)
    });
    let Some(region) = region else { return found };
    let attached = match by(&region) {
        Ok(attached) => attached,
        Err(status) => return status.code(),
    };
    with(|api, _| {
        // (Another table: the process has joined anew meanwhile.)
        let allocated = api.regions.get_mut(&id).filter(|it| Arc::ptr_eq(&it.region, &region));
        let allocated = allocated.ok_or(Status::NotInitialised)?;
        match attached {
            Attached::Transmits(transmitter) => {
                *address = transmitter.base().cast();
                allocated.transmitter = Some(transmitter);
            }
            Attached::Receives(receiver) => {
                *address = receiver.base().cast::<c_char>().cast_mut();
                allocated.receiver = Some(receiver);
            }
        }
        Ok(SUCCESS)
    })
}

/// # Safety
/// `host` is null or a C string; `address` is null or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn imc_asattach_ptp(
    id: c_int,
    mode: c_int,
    flags: c_int,
    host: *const c_char,
    address: *mut *mut c_char,
) -> c_int {
    if host.is_null() || flags != 0 {
        return with(|_, _| Err(Status::BadParameter));
    }
    // SAFETY: our own contract.
    let (host, address) = match unsafe { (CStr::from_ptr(host), to(address)) } {
        (host, Ok(address)) => (host, address),
        (_, Err(status)) => return with(|_, _| Err(status)),
    };
    attach(id, address, |region| {
        let shared = sharing(mode)?;
        let host = host.to_str().map_err(|_| Status::BadHost)?;
        Ok(Attached::Transmits(region.transmit_to(host, shared)?))
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn imc_asdetach(id: c_int) -> c_int {
    let mut detached = (None, None);
    // (Given back out of the table: of a large region that takes a while.)
    with(|api, _| {
        let allocated = region(api, id)?;
        detached = (allocated.transmitter.take(), allocated.receiver.take());
        let is_any = detached.0.is_some() || detached.1.is_some();
        is_any.then_some(SUCCESS).ok_or(Status::BadRegion)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn imc_asdealloc(id: c_int) -> c_int {
    with(|api, host| {
        let is_attached = |allocated: &Allocated| {
            let is_now = allocated.transmitter.is_some() || allocated.receiver.is_some();
            is_now || Arc::strong_count(&allocated.region) > 1
        };
        match api.regions.get(&id) {
            Some(allocated) if is_attached(allocated) => Err(Status::Attached),
            Some(_) => {
                api.regions.remove(&id);
                Ok(SUCCESS)
            }
            // (Others may have one of that number.)
            None => {
                host.deallocate(id.try_into().map_err(|_| Status::BadRegion)?).map(|()| SUCCESS)
            }
        }
    })
}

/// # Safety
/// Both addresses are valid for so many bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn imc_bcopy(
    source: *const c_void,
    destination: *mut c_void,
    bytes: c_long,
    _write_only: c_long,
    _first: c_long,
) -> c_long {
    let Ok(bytes) = usize::try_from(bytes) else {
        return c_long::from(Status::BadParameter.code());
    };
    // SAFETY: our own contract.
    let copied = unsafe { transmit(source.cast(), destination.cast(), bytes) };
    c_long::from(code(copied.map(|()| SUCCESS)))
}

#[unsafe(no_mangle)]
pub extern "C" fn imc_rderrcnt_mr(rail: c_int) -> c_int {
    with(|_, host| host.errors(usize::try_from(rail).map_err(|_| Status::BadRail)?))
}

/// # Safety
/// `count` is null or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn imc_ckerrcnt_mr(count: *mut c_int, rail: c_int) -> c_int {
    let Ok(number) = usize::try_from(rail) else { return Status::BadRail.code() };
    let settle = |host: &Host| host.check_errors(number, host.errors(number)?);
    // SAFETY: our own contract.
    unsafe { checked(count, |host| host.errors(number), settle) }
}

/// The sum over all rails.
fn all_errors(host: &Host) -> Result<c_int, Status> {
    (0..host.rails()).try_fold(0, |sum: c_int, rail| {
        let count = host.errors(rail)?;
        // (One that is being counted makes the sum so.)
        Ok(if count < 0 || sum < 0 { -1 } else { sum.wrapping_add(count) & c_int::MAX })
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn imc_rderrcnt() -> c_int {
    with(|_, host| all_errors(host))
}

/// # Safety
/// `count` is null or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn imc_ckerrcnt(count: *mut c_int) -> c_int {
    // SAFETY: our own contract.
    unsafe { checked(count, all_errors, |host| host.check_errors(0, host.errors(0)?)) }
}

/// Is the count what it was, before and behind it that everybody has what was written? (Out of the table: others' calls need not wait for that.)
///
/// # Safety
/// `count` is null or valid.
unsafe fn checked(
    count: *mut c_int,
    errors: impl Fn(&Host) -> Result<c_int, Status>,
    settle: impl Fn(&Host) -> Result<c_int, Status>,
) -> c_int {
    let host = api().as_ref().and_then(|api| api.host.clone());
    code(host.ok_or(Status::NotInitialised).and_then(|host| {
        // SAFETY: our own contract.
        let count = unsafe { to(count) }?;
        let since = *count;
        let settled = match errors(&host)? {
            now if now == since && now >= 0 => settle(&host).map(drop),
            _ => Err(Status::ChannelError),
        };
        *count = errors(&host)?;
        settled?;
        if *count == since { Ok(SUCCESS) } else { Err(Status::ChannelError) }
    }))
}

/// # Safety
/// `count` and `id` are null or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn imc_lkalloc(
    key: c_ulong,
    count: *mut c_int,
    mode: c_uint,
    flags: c_int,
    id: *mut c_int,
) -> c_int {
    with(|api, host| {
        // SAFETY: our own contract.
        let (count, id) = unsafe { (to(count)?, to(id)?) };
        let creates = flag(flags, CREATOR)?;
        let wanted = usize::try_from(*count).ok().filter(|count| (1..=LOCKS_MOST).contains(count));
        let locks = host.locks(key, wanted.ok_or(Status::BadParameter)?, mode, creates)?;
        (*id, *count) = (locks.id() as c_int, locks.count() as c_int);
        api.locks.insert(*id, Arc::new(locks));
        Ok(SUCCESS)
    })
}

/// (Out of the table: who waits for a lock holds up no other call.)
fn locks(id: c_int) -> Result<Arc<Locks>, Status> {
    let api = api();
    let api = api.as_ref().filter(|api| api.host.is_some()).ok_or(Status::NotInitialised)?;
    api.locks.get(&id).cloned().ok_or(Status::BadLock)
}

fn number(lock: c_int) -> Result<usize, Status> {
    lock.try_into().map_err(|_| Status::BadLock)
}

#[unsafe(no_mangle)]
pub extern "C" fn imc_lkacquire(id: c_int, lock: c_int, reserved: c_int, flags: c_int) -> c_int {
    let wait = match flags {
        LOCKWAIT if reserved == 0 => Wait::Forever,
        LOCKNOWAIT if reserved == 0 => Wait::No,
        _ => return Status::BadParameter.code(),
    };
    code(locks(id).and_then(|locks| locks.acquire(number(lock)?, wait)).map(|()| SUCCESS))
}

#[unsafe(no_mangle)]
pub extern "C" fn imc_lkrelease(id: c_int, lock: c_int) -> c_int {
    code(locks(id).and_then(|locks| locks.release(number(lock)?)).map(|()| SUCCESS))
}

#[unsafe(no_mangle)]
pub extern "C" fn imc_lkdealloc(id: c_int) -> c_int {
    with(|api, host| {
        let Some(locks) = api.locks.get(&id) else {
            // (Others may have one of that number.)
            return host.drop_locks(id.try_into().map_err(|_| Status::BadLock)?).map(|()| SUCCESS);
        };
        // (In another thread somebody may wait for one.)
        if locks.holds_any() || Arc::strong_count(locks) > 1 {
            return Err(Status::LockActive);
        }
        api.locks.remove(&id);
        Ok(SUCCESS)
    })
}

/// What the cluster is just now, of one kind.
fn told(cluster: &Cluster, kind: c_uint) -> Result<Vec<u8>, Status> {
    Ok(match kind {
        GET_HOSTS => {
            let mut bytes = vec![0; size_of::<HostInfo>()];
            let names = &cluster.hosts[..cluster.hosts.len().min(MAXHOSTS)];
            bytes[..4].copy_from_slice(&(names.len() as c_int).to_ne_bytes());
            for (at, name) in names.iter().enumerate() {
                let name = &name.as_bytes()[..name.len().min(MAXHOSTNAME - 1)];
                bytes[4 + at * MAXHOSTNAME..][..name.len()].copy_from_slice(name);
            }
            bytes
        }
        GET_NRAILS => cluster.rails.to_ne_bytes().to_vec(),
        GET_ACTIVERAILS => cluster.active.to_ne_bytes().to_vec(),
        _ => return Err(Status::BadParameter),
    })
}

/// # Safety
/// `items` is null or valid for `count`; each item before a 0 has a valid address and its size among `pairs`.
#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments)]
pub unsafe extern "C" fn imc_getclusterinfo(
    items: *const c_uint,
    count: c_int,
    a1: usize,
    b1: usize,
    a2: usize,
    b2: usize,
    a3: usize,
    b3: usize,
    a4: usize,
    b4: usize,
    a5: usize,
    b5: usize,
    a6: usize,
    b6: usize,
) -> c_int {
    with(|_, host| {
        let cluster = host.cluster()?;
        let count = usize::try_from(count).map_err(|_| Status::BadParameter)?;
        // SAFETY: our own contract.
        let items = unsafe { list(items, count) }?;
        // SAFETY: the program gives addresses of as many bytes as the header says for each item.
        unsafe {
            each(items, [(a1, b1), (a2, b2), (a3, b3), (a4, b4), (a5, b5), (a6, b6)], |kind, to| {
                let now = told(&cluster, kind)?;
                let Some(to) = to.get_mut(..now.len()) else { return Ok(INSUFFMEM) };
                to.copy_from_slice(&now);
                Ok(SUCCESS)
            })
        }
    })
}

/// The numbers before a 0.
///
/// # Safety
/// `items` is null or valid for `count`, or up to a 0.
unsafe fn list<'a>(items: *const c_uint, count: usize) -> Result<&'a [c_uint], Status> {
    if items.is_null() {
        return if count == 0 { Ok(&[]) } else { Err(Status::BadParameter) };
    }
    // SAFETY: our own contract; none behind a 0 is looked at.
    let length = (0..count).find(|at| unsafe { *items.add(*at) } == 0).unwrap_or(count);
    // SAFETY: our own contract: items up to a 0, which comes behind `length`.
    Ok(unsafe { std::slice::from_raw_parts(items, length) })
}

/// Has `act` look at each with its bytes, until one fails.
///
/// # Safety
/// For each item there is a valid address, and its size.
unsafe fn each(
    items: &[c_uint],
    pairs: [(usize, usize); 6],
    mut act: impl FnMut(c_uint, &mut [u8]) -> Outcome,
) -> Outcome {
    if items.len() > pairs.len() {
        return Err(Status::BadParameter);
    }
    for (kind, (address, size)) in items.iter().zip(pairs) {
        if address == 0 {
            return Err(Status::BadParameter);
        }
        // (An int or a size_t: the upper half of an int is anything.)
        let size = size as u32 as usize;
        // SAFETY: our own contract.
        let bytes = unsafe { std::slice::from_raw_parts_mut(address as *mut u8, size) };
        match act(*kind, bytes)? {
            SUCCESS => {}
            other => return Ok(other),
        }
    }
    Ok(SUCCESS)
}

/// # Safety
/// `events` is null or valid for `count`; each event before a 0 has a valid configuration and its size among `pairs`.
#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments)]
pub unsafe extern "C" fn imc_wait_cluster_event(
    events: *const c_uint,
    count: c_ulong,
    reserved: c_ulong,
    a1: usize,
    b1: usize,
    a2: usize,
    b2: usize,
    a3: usize,
    b3: usize,
    a4: usize,
    b4: usize,
    a5: usize,
    b5: usize,
    a6: usize,
    b6: usize,
) -> c_int {
    if events.is_null() || count == 0 || reserved != 0 {
        return Status::BadParameter.code();
    }
    loop {
        let mut awaited = None;
        let changed = with(|_, host| {
            let cluster = host.cluster()?;
            awaited = Some((host.clone(), cluster.clone()));
            // SAFETY: our own contract.
            let events = unsafe { list(events, count as usize) }?;
            if events.is_empty() {
                return Err(Status::BadParameter);
            }
            let (mut hosts, mut rails) = (false, false);
            // SAFETY: our own contract.
            let looked = unsafe {
                each(
                    events,
                    [(a1, b1), (a2, b2), (a3, b3), (a4, b4), (a5, b5), (a6, b6)],
                    |event, known| {
                        let (kind, changed) = match event {
                            EVENT_HOST => (GET_HOSTS, &mut hosts),
                            EVENT_RAIL => (GET_ACTIVERAILS, &mut rails),
                            _ => return Err(Status::BadParameter),
                        };
                        let now = told(&cluster, kind)?;
                        let Some(known) = known.get_mut(..now.len()) else { return Ok(INSUFFMEM) };
                        *changed |= *known != *now;
                        known.copy_from_slice(&now);
                        Ok(SUCCESS)
                    },
                )
            }?;
            Ok(match (hosts, rails) {
                _ if looked != SUCCESS => looked,
                (true, true) => MULTIPLE_CHANGE,
                (true, false) => HOST_CHANGE,
                (false, true) => RAIL_CHANGE,
                (false, false) => SUCCESS,
            })
        });
        if changed != SUCCESS {
            return changed;
        }
        // (Out of the table: who waits holds up no other call.)
        let Some((host, cluster)) = awaited else { return Status::NotInitialised.code() };
        match host.wait_event(&cluster, Duration::from_secs(1)) {
            Ok(_) | Err(Status::Timeout) => {}
            Err(status) => return status.code(),
        }
    }
}

/// # Safety
/// `host` is null or a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn imc_kill(host: *const c_char, process: c_int, signal: c_int) -> c_int {
    with(|api, known| {
        if host.is_null() || process <= 0 {
            return Err(Status::BadParameter);
        }
        // SAFETY: our own contract.
        let name = unsafe { CStr::from_ptr(host) }.to_bytes();
        if name != api.name.as_bytes() {
            let hosts = known.cluster()?.hosts;
            let is_there = hosts.iter().any(|each| each.as_bytes() == name);
            return Err(if is_there { Status::NotSupported } else { Status::BadHost });
        }
        let is_first = process == 1
            && [libc::SIGKILL, libc::SIGSTOP, libc::SIGTSTP, libc::SIGCONT].contains(&signal);
        if !(0..=64).contains(&signal) || is_first {
            return Ok(EINVAL);
        }
        // SAFETY: no memory is passed.
        unsafe {
            if libc::geteuid() == 0 {
                return Ok(NOROOT);
            }
            if libc::kill(process, signal) == 0 {
                return Ok(SUCCESS);
            }
        }
        Ok(match std::io::Error::last_os_error().raw_os_error() {
            Some(libc::EPERM) => EPERM,
            Some(libc::ESRCH) => ESRCH,
            _ => EINVAL,
        })
    })
}

/// # Safety
/// `message` is null or a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn imc_perror(message: *const c_char, status: c_int) {
    let about = match status {
        SUCCESS => "success",
        EINVAL => "there is no such signal, or it is not for that process",
        ESRCH => "there is no such process",
        EPERM => "that process may not be sent a signal",
        NOROOT => "root may not send signals by this",
        INSUFFMEM => "the buffer is too small",
        RAIL_CHANGE => "rails have changed",
        HOST_CHANGE => "hosts have changed",
        MULTIPLE_CHANGE => "hosts and rails have changed",
        _ => Status::of_code(status).map_or("an unknown status", Status::about),
    };
    let message = match message.is_null() {
        true => c"imc",
        // SAFETY: our own contract.
        false => unsafe { CStr::from_ptr(message) },
    };
    let text = format!("{}: {about}\n", message.to_string_lossy());
    let mut rest = text.as_bytes();
    while !rest.is_empty() {
        // (By number: the C library's is where a cancelled thread ends, in the middle of this.)
        // SAFETY: bytes and how many.
        let done = unsafe { libc::syscall(libc::SYS_write, 2, rest.as_ptr(), rest.len()) };
        match usize::try_from(done) {
            Ok(done) => rest = &rest[done.min(rest.len())..],
            Err(_) if std::io::Error::last_os_error().kind() == ErrorKind::Interrupted => {}
            Err(_) => return,
        }
    }
}
