//! Active Messages for C: the functions of `am.h`, whose contracts are the header's.
#![allow(non_snake_case, non_upper_case_globals)] // the names of the interface

use crate::{am_job, am_spawn, amudp};
use core::ffi::{CStr, c_char, c_int, c_void};
use ringlet_messages::active_message::{
    ARGUMENTS, BUFFER_BYTES, Bundle, Endpoint, Error, HANDLERS, Incoming, NAME_BYTES, Name,
    Payload, Process, TRANSLATIONS, Tag, Undeliverable,
};
use ringlet_messages::native;
use std::io::Write;
use std::net::{Ipv4Addr, ToSocketAddrs, UdpSocket};
use std::ptr::{null_mut, without_provenance};
use std::sync::atomic::{AtomicI32, AtomicPtr, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

const OK: c_int = 0;
const NOT_INIT: c_int = 1;
const BAD_ARG: c_int = 2;
const RESOURCE: c_int = 3;
const NOT_SENT: c_int = 4;
const IN_USE: c_int = 5;

const NOT_EMPTY: u32 = 1;
const RECEIVED: u32 = 2;
const CAN_SEND: u32 = 4;

/// en_t.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Default)]
pub struct CName([u64; 4]);

impl From<Name> for CName {
    fn from(name: Name) -> CName {
        CName::read(&name.to_bytes())
    }
}

impl CName {
    fn read(bytes: &[u8; NAME_BYTES]) -> CName {
        let (words, _) = bytes.as_chunks::<8>();
        CName([0, 1, 2, 3].map(|at| u64::from_le_bytes(words[at])))
    }

    fn to_bytes(self) -> [u8; NAME_BYTES] {
        let mut bytes = [0; NAME_BYTES];
        for (to, word) in bytes.chunks_exact_mut(8).zip(self.0) {
            to.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    fn name(self) -> Option<Name> {
        Name::from_bytes(&self.to_bytes())
    }

    /// The NOW's name of an endpoint is a port and an address, in the places of udpam.h; no identity of a process looks like that.
    fn of_address(port: u16, address: Ipv4Addr) -> CName {
        CName([port.into(), u32::from_ne_bytes(address.octets()).into(), 0, 0])
    }

    fn address(self) -> Option<(u16, Ipv4Addr)> {
        let address = self.0[1] as u32;
        let is_one = matches!(self.0[1] >> 32, 0 | 0xffff_ffff);
        is_one.then(|| (self.0[0] as u16, Ipv4Addr::from(address.to_ne_bytes())))
    }

    /// The name, for this endpoint.
    fn resolve(self, ea: &Endpoint) -> Result<Name, Error> {
        match self.address() {
            None => self.name().ok_or(Error::BadArgument),
            Some((0, _)) => Err(Error::BadArgument),
            // (What an address is of this host can be bound to.)
            Some((port, address))
                if address.is_unspecified() || UdpSocket::bind((address, 0)).is_ok() =>
            {
                Ok(Name::known(port))
            }
            Some((port, address)) => {
                ea.find(&format!("{address}{}", udpam_service(port)), Some(KNOWN_IN))
            }
        }
    }
}

/// How long an endpoint of another host may take to be made known.
const KNOWN_IN: Duration = Duration::from_secs(60);

/// By which other hosts find an endpoint that is known by a port.
fn udpam_service(port: u16) -> String {
    format!(":udpam-{port}")
}

/// struct am_argblock.
#[repr(C)]
struct ArgumentBlock {
    name: CName,
    tag: Tag,
    handler: u8,
    count: u8,
    arguments: [u32; ARGUMENTS],
    len: usize,
    offset: usize,
}

/// What AM_Init has made; null before, and in a child by fork, which has neither its thread nor its identity.
static PROCESS: AtomicPtr<Process> = AtomicPtr::new(null_mut());
/// Who makes and ends it, one at a time; how often it was begun.
static INIT: Mutex<u32> = Mutex::new(0);

/// Requests that found no room, for AM_CANSEND: endpoint (its address) and number.
static REFUSED: Mutex<Vec<(usize, usize)>> = Mutex::new(Vec::new());

#[unsafe(no_mangle)]
pub static AMX_VerboseErrors: AtomicI32 = AtomicI32::new(0);

/// A call that can't be done, for a reason of which the program hears in words.
pub fn refused(call: &str, why: &str) -> c_int {
    // Its reader may have gone.
    let _ = writeln!(std::io::stderr(), "ringlet: {call}: {why}");
    RESOURCE
}

/// Wakes whoever waits for messages, or for room.
pub fn interrupt() {
    let _not_terminated = lock(&INIT);
    // SAFETY: null, or a process, which lives while INIT is held.
    if let Some(process) = unsafe { PROCESS.load(Ordering::Acquire).as_ref() } {
        process.interrupt();
    }
}

pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

fn code(error: Error) -> c_int {
    match error {
        Error::BadArgument | Error::Freed => BAD_ARG,
        Error::NoResource | Error::InHandler => RESOURCE,
        Error::NotSent => NOT_SENT,
        Error::InUse => IN_USE,
        Error::Node(native::Error::WouldBlock | native::Error::TimedOut) => NOT_SENT,
        Error::Node(error) => match error.errno() {
            libc::EADDRINUSE => IN_USE,
            libc::EINVAL | libc::ENAMETOOLONG => BAD_ARG,
            _ => RESOURCE,
        },
    }
}

/// A call's result; said aloud where the program wants that.
pub fn done<T>(call: &str, result: Result<T, Error>) -> c_int {
    let Err(error) = result else { return OK };
    if let Error::Node(error) = error {
        // SAFETY: the calling thread's own.
        unsafe { *libc::__errno_location() = error.errno() };
    }
    if error != Error::NotSent && AMX_VerboseErrors.load(Ordering::Relaxed) != 0 {
        // Its reader may have gone.
        let _ = writeln!(std::io::stderr(), "ringlet: {call}: {error}");
    }
    code(error)
}

pub fn started() -> bool {
    !PROCESS.load(Ordering::Relaxed).is_null()
}

/// # Safety
/// Null, or what AM_AllocateEndpoint has given.
pub unsafe fn endpoint<'a>(ea: *const Endpoint) -> Result<&'a Endpoint, Error> {
    // SAFETY: endpoints are never deallocated, so also a freed one can be looked at.
    unsafe { ea.as_ref() }.ok_or(Error::BadArgument)
}

/// # Safety
/// What AM_AllocateEndpoint has given.
pub unsafe fn shared(ea: *const Endpoint) -> Arc<Endpoint> {
    // SAFETY: by contract; the program keeps its own count.
    unsafe {
        Arc::increment_strong_count(ea);
        Arc::from_raw(ea)
    }
}

/// # Safety
/// Null, or what AM_AllocateBundle has given.
unsafe fn bundle<'a>(eb: *const Bundle) -> Result<&'a Bundle, Error> {
    // SAFETY: as for endpoints.
    unsafe { eb.as_ref() }.filter(|bundle| !bundle.is_closed()).ok_or(Error::BadArgument)
}

/// # Safety
/// Null, or a C string.
unsafe fn text<'a>(name: *const c_char) -> Result<&'a str, Error> {
    if name.is_null() {
        return Err(Error::BadArgument);
    }
    // SAFETY: by contract.
    unsafe { CStr::from_ptr(name) }.to_str().map_err(|_| Error::BadArgument)
}

/// # Safety
/// Null, or valid for writing.
pub unsafe fn put<T>(to: *mut T, value: T) -> Result<(), Error> {
    if to.is_null() {
        return Err(Error::BadArgument);
    }
    // SAFETY: by contract.
    unsafe { to.write(value) };
    Ok(())
}

/// # Safety
/// `bytes` is valid for reading `len` bytes, or `len` is 0.
unsafe fn slice<'a>(bytes: *const c_void, len: usize) -> Result<&'a [u8], Error> {
    match (bytes.is_null(), len) {
        (_, 0) => Ok(&[]),
        (true, _) => Err(Error::BadArgument),
        (false, len) if len > BUFFER_BYTES => Err(Error::BadArgument),
        // SAFETY: by contract.
        (false, len) => Ok(unsafe { std::slice::from_raw_parts(bytes.cast(), len) }),
    }
}

/// # Safety
/// `arguments` is valid for reading `count` words.
unsafe fn words<'a>(arguments: *const u32, count: c_int) -> Result<&'a [u32], Error> {
    match usize::try_from(count) {
        Ok(count) if count <= ARGUMENTS && (count == 0 || !arguments.is_null()) => {
            let base = if count == 0 { without_provenance(4) } else { arguments };
            // SAFETY: by contract; an empty slice at an aligned address.
            Ok(unsafe { std::slice::from_raw_parts(base, count) })
        }
        _ => Err(Error::BadArgument),
    }
}

extern "C" fn in_child() {
    PROCESS.store(null_mut(), Ordering::Relaxed);
}

#[unsafe(no_mangle)]
pub extern "C" fn AM_Init() -> c_int {
    let mut count = lock(&INIT);
    if started() {
        *count += 1;
        return OK;
    }
    let process = match Process::start() {
        Ok(process) => process,
        Err(error) => return done("AM_Init", Err::<(), _>(error)),
    };
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(|| {
        // SAFETY: the handler stores one word.
        unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
    });
    PROCESS.store(Box::into_raw(Box::new(process)), Ordering::Release);
    *count = 1;
    OK
}

#[unsafe(no_mangle)]
pub extern "C" fn AM_Terminate() -> c_int {
    let mut count = lock(&INIT);
    if !started() {
        return NOT_INIT;
    }
    *count -= 1;
    if *count == 0 {
        let process = PROCESS.swap(null_mut(), Ordering::AcqRel);
        // SAFETY: made by AM_Init, taken once.
        drop(unsafe { Box::from_raw(process) });
    }
    OK
}

#[unsafe(no_mangle)]
pub extern "C" fn AM_AllocateBundle(kind: c_int, eb: *mut *const Bundle) -> c_int {
    // ORDER: Acquire; pairs with `AM_Init`.
    // SAFETY: null, or a process that lives until AM_Terminate.
    let Some(process) = (unsafe { PROCESS.load(Ordering::Acquire).as_ref() }) else {
        return NOT_INIT;
    };
    // Either kind may be used by several threads.
    if !matches!(kind, 0 | 1) || eb.is_null() {
        return BAD_ARG;
    }
    done(
        "AM_AllocateBundle",
        process.bundle().and_then(|bundle| {
            // SAFETY: valid for writing, as the caller has promised.
            unsafe { put(eb, Box::into_raw(Box::new(bundle)).cast_const()) }
        }),
    )
}

#[unsafe(no_mangle)]
pub extern "C" fn AM_AllocateEndpoint(
    eb: *const Bundle,
    ea: *mut *const Endpoint,
    name: *mut CName,
) -> c_int {
    if !started() {
        return NOT_INIT;
    }
    if ea.is_null() || name.is_null() {
        return BAD_ARG;
    }
    // SAFETY: the program's own bundle, and places for the results.
    done(
        "AM_AllocateEndpoint",
        unsafe { bundle(eb) }.and_then(Bundle::endpoint).and_then(|made| {
            // SAFETY: both places are not null, and the program's to write to.
            unsafe {
                put(name, made.name().into())?;
                put(ea, Arc::into_raw(made))
            }
        }),
    )
}

/// The Berkeley NOW's later AM_AllocateEndpoint: the name is malloc's.
#[unsafe(no_mangle)]
pub extern "C" fn ringlet_am_allocate_named(
    eb: *const Bundle,
    ea: *mut *const Endpoint,
    name: *mut *mut CName,
) -> c_int {
    if name.is_null() {
        return BAD_ARG;
    }
    // SAFETY: any size will do.
    let made = unsafe { libc::malloc(size_of::<CName>()) }.cast::<CName>();
    if made.is_null() {
        return RESOURCE;
    }
    let result = AM_AllocateEndpoint(eb, ea, made);
    // SAFETY: valid for writing, as the program says; else ours to free.
    unsafe { if result == OK { name.write(made) } else { libc::free(made.cast()) } }
    result
}

/// The Berkeley NOW's endpoint that is known by a port; without a place for its name if that is null.
#[unsafe(no_mangle)]
pub extern "C" fn ringlet_am_allocate_known(
    eb: *const Bundle,
    ea: *mut *const Endpoint,
    name: *mut *mut CName,
    port: c_int,
) -> c_int {
    let Some(port) = u16::try_from(port).ok().filter(|port| *port > 0) else { return BAD_ARG };
    let (mut made, mut own) = (std::ptr::null(), CName::default());
    if ea.is_null() {
        return BAD_ARG;
    }
    let result = AM_AllocateEndpoint(eb, &mut made, &mut own);
    if result != OK {
        return result;
    }
    // SAFETY: made just now.
    let endpoint = unsafe { shared(made) };
    let known =
        endpoint.make_known(port).and_then(|()| match endpoint.offer(&udpam_service(port)) {
            // Then other hosts do not find it.
            Err(Error::Node(native::Error::Unreachable)) => Ok(()),
            offered => offered,
        });
    // SAFETY: any size will do.
    let place = unsafe { libc::malloc(size_of::<CName>()) }.cast::<CName>();
    if known.is_err() || place.is_null() {
        let _ = endpoint.free();
        // SAFETY: ours, or null.
        unsafe { libc::free(place.cast()) };
        return done("AM_AllocateKnownEndpoint", known.and(Err::<(), _>(Error::NoResource)));
    }
    let addresses = (am_spawn::host_name(), port).to_socket_addrs().into_iter().flatten();
    let own = addresses.filter_map(|address| address.ip().to_string().parse().ok()).next();
    // SAFETY: places for the results, as the program says; `place` is of that size.
    unsafe {
        place.write(CName::of_address(port, own.unwrap_or(Ipv4Addr::LOCALHOST)));
        ea.write(made);
        if name.is_null() { libc::free(place.cast()) } else { name.write(place) }
    }
    OK
}

/// Functions of a bundle or endpoint: their name, their parameters, and what they do.
macro_rules! calls {
    ($($name:ident($handle:ident: $kind:ident $(, $arg:ident: $type:ty)*) $body:block)*) => { $(
        #[unsafe(no_mangle)]
        pub extern "C" fn $name($handle: *const calls!(@ $kind) $(, $arg: $type)*) -> c_int {
            if !started() {
                return NOT_INIT;
            }
            // SAFETY: the program's own handle.
            let found = unsafe { $kind($handle) };
            done(stringify!($name), found.and_then(|$handle| $body))
        }
    )* };
    (@ bundle) => { Bundle };
    (@ endpoint) => { Endpoint };
}

calls! {
    AM_FreeBundle(eb: bundle) { eb.close() }
    AM_Poll(eb: bundle) {
        let polled = eb.poll();
        am_job::heed();
        polled
    }
    AM_WaitSema(eb: bundle) {
        let waited = wait(eb);
        am_job::heed();
        waited
    }
    AM_SetEventMask(eb: bundle, mask: c_int) {
        if mask as u32 & !(NOT_EMPTY | RECEIVED | CAN_SEND) != 0 {
            return Err(Error::BadArgument);
        }
        eb.mask().store(mask as u32, Ordering::Relaxed);
        Ok(())
    }
    AM_GetEventMask(eb: bundle, mask: *mut c_int) {
        // SAFETY: null or valid.
        unsafe { put(mask, eb.mask().load(Ordering::Relaxed) as c_int) }
    }
    AM_FreeEndpoint(ea: endpoint) { ea.free() }
    AM_GetEndpointName(ea: endpoint, name: *mut CName) {
        // SAFETY: null or valid.
        unsafe { put(name, ea.name().into()) }
    }
    AM_SetExpectedResources(ea: endpoint, peers: c_int, outstanding: c_int) {
        // What is needed is made when it is needed.
        if peers < 0 || outstanding < 0 { Err(Error::BadArgument) } else { ea.tag().map(drop) }
    }
    AM_SetTag(ea: endpoint, tag: Tag) { ea.set_tag(tag) }
    AM_GetTag(ea: endpoint, tag: *mut Tag) {
        // SAFETY: null or valid.
        unsafe { put(tag, ea.tag()?) }
    }
    AM_SetSeg(ea: endpoint, base: *mut c_void, bytes: usize) {
        // SAFETY: the program says that its peers may store there.
        unsafe { ea.set_segment(base.cast(), bytes) }
    }
    AMX_AllocateSeg(ea: endpoint, bytes: usize, base: *mut *mut c_void) {
        if base.is_null() {
            return Err(Error::BadArgument);
        }
        // SAFETY: valid for writing.
        unsafe { put(base, ea.allocate_segment(bytes)?.cast()) }
    }
    AM_GetSeg(ea: endpoint, base: *mut *mut c_void, bytes: *mut usize) {
        let (found, len) = ea.segment()?;
        // SAFETY: null or valid.
        unsafe { put(base, found.cast()).and_then(|()| put(bytes, len)) }
    }
    AMX_Offer(ea: endpoint, name: *const c_char) {
        // SAFETY: null or a C string.
        ea.offer(unsafe { text(name)? })
    }
    AMX_Find(ea: endpoint, name: *const c_char, found: *mut CName, timeout_ms: c_int) {
        if found.is_null() {
            return Err(Error::BadArgument);
        }
        let timeout = u64::try_from(timeout_ms).ok().map(Duration::from_millis);
        // SAFETY: null or a C string.
        let name = ea.find(unsafe { text(name)? }, timeout)?;
        // SAFETY: valid for writing.
        unsafe { put(found, name.into()) }
    }
    AM_Map(ea: endpoint, index: c_int, name: CName, tag: Tag) {
        ea.map(number(index)?, name.resolve(ea)?, tag)
    }
    AM_MapAny(ea: endpoint, index: *mut c_int, name: CName, tag: Tag) {
        if index.is_null() {
            return Err(Error::BadArgument);
        }
        let made = ea.map_any(name.resolve(ea)?, tag)?;
        // SAFETY: valid for writing.
        unsafe { put(index, made as c_int) }
    }
    AM_UnMap(ea: endpoint, index: c_int) {
        ea.translation(number(index)?)?.ok_or(Error::NoResource)?;
        ea.unmap(number(index)?)
    }
    AM_GetTranslationName(ea: endpoint, index: c_int, name: *mut CName) {
        let found = ea.translation(number(index)?)?.ok_or(Error::NoResource)?;
        // SAFETY: null or valid.
        unsafe { put(name, found.0.into()) }
    }
    AM_GetTranslationTag(ea: endpoint, index: c_int, tag: *mut Tag) {
        let found = ea.translation(number(index)?)?.ok_or(Error::NoResource)?;
        // SAFETY: null or valid.
        unsafe { put(tag, found.1) }
    }
    AM_GetNumTranslations(ea: endpoint, count: *mut c_int) {
        // SAFETY: null or valid.
        unsafe { put(count, ea.translations()? as c_int) }
    }
    AM_SetNumTranslations(ea: endpoint, count: c_int) {
        ea.set_translations(usize::try_from(count).map_err(|_| Error::NoResource)?)
    }
    AMUDP_SetTranslationTag(ea: endpoint, index: c_int, tag: Tag) {
        ea.set_translation_tag(number(index)?, tag)
    }
    AM_GetNumHandlers(ea: endpoint, count: *mut c_int) {
        ea.tag()?;
        // SAFETY: null or valid.
        unsafe { put(count, HANDLERS as c_int) }
    }
    AM_SetNumHandlers(ea: endpoint, count: c_int) {
        ea.tag()?;
        // There are neither more nor fewer.
        if number(count)? == HANDLERS { Ok(()) } else { Err(Error::NoResource) }
    }
    ringlet_am_set_handler(ea: endpoint, index: u8, function: Option<Handler>) {
        let function = function.ok_or(Error::BadArgument)?;
        if index == 0 {
            return ea.set_error_handler(Arc::new(move |_: &_, what: &_| run_error(function, what)));
        }
        ea.set_handler(index, Arc::new(move |message: &_| run(function, message)))
    }
    ringlet_am_set_handler_any(ea: endpoint, index: *mut u8, function: Option<Handler>) {
        let function = function.ok_or(Error::BadArgument)?;
        if index.is_null() {
            return Err(Error::BadArgument);
        }
        let made = ea.set_handler_any(Arc::new(move |message: &_| run(function, message)))?;
        // SAFETY: valid for writing.
        unsafe { put(index, made) }
    }
    ringlet_am_request(
        ea: endpoint, dest: c_int, handler: u8, count: c_int, arguments: *const u32
    ) {
        // SAFETY: so many words, by the header.
        send(ea, dest, handler, unsafe { words(arguments, count)? }, Payload::None, false)
    }
    ringlet_am_request_medium(
        ea: endpoint, dest: c_int, handler: u8, bytes: *const c_void, len: usize,
        count: c_int, arguments: *const u32
    ) {
        // SAFETY: so many bytes, as the program says, and so many words, by the header.
        let (bytes, arguments) = unsafe { (slice(bytes, len)?, words(arguments, count)?) };
        send(ea, dest, handler, arguments, Payload::Medium(bytes), false)
    }
    ringlet_am_request_bulk(
        ea: endpoint, dest: c_int, handler: u8, bytes: *const c_void, len: usize,
        offset: usize, asynchronous: c_int, count: c_int, arguments: *const u32
    ) {
        // SAFETY: so many bytes, as the program says, and so many words, by the header.
        let (bytes, arguments) = unsafe { (slice(bytes, len)?, words(arguments, count)?) };
        let payload = Payload::Bulk { offset: offset as u64, bytes };
        send(ea, dest, handler, arguments, payload, asynchronous != 0)
    }
    ringlet_am_get(
        ea: endpoint, dest: c_int, handler: u8, from: usize, to: usize, len: usize,
        asynchronous: c_int, count: c_int, arguments: *const u32
    ) {
        let payload = Payload::Get { from: from as u64, to: to as u64, len };
        // SAFETY: so many words, by the header.
        send(ea, dest, handler, unsafe { words(arguments, count)? }, payload, asynchronous != 0)
    }
}

/// A request; one that does not wait if it is asynchronous, and remembered for AM_CANSEND.
#[inline(always)]
fn send(
    ea: &Endpoint,
    dest: c_int,
    handler: u8,
    arguments: &[u32],
    payload: Payload,
    asynchronous: bool,
) -> Result<(), Error> {
    let dest = dest as usize;
    if !asynchronous {
        let sent = ea.request(dest, handler, arguments, payload);
        if sent == Err(Error::NotSent) {
            // The job has ended meanwhile.
            am_job::heed();
        }
        return sent;
    }
    let result = ea.try_request(dest, handler, arguments, payload);
    if result == Err(Error::NotSent) {
        let refused = (std::ptr::from_ref(ea).addr(), dest);
        let mut list = lock(&REFUSED);
        if !list.contains(&refused) {
            list.push(refused);
        }
    }
    result
}

fn number(index: c_int) -> Result<usize, Error> {
    usize::try_from(index).map_err(|_| Error::BadArgument)
}

#[unsafe(no_mangle)]
pub extern "C" fn AM_MoveEndpoint(
    ea: *const Endpoint,
    from: *const Bundle,
    to: *const Bundle,
) -> c_int {
    if !started() {
        return NOT_INIT;
    }
    // SAFETY: the program's own handles.
    let found = unsafe { (endpoint(ea), bundle(from), bundle(to)) };
    let (Ok(ea), Ok(from), Ok(to)) = found else { return BAD_ARG };
    done("AM_MoveEndpoint", from.move_endpoint(ea, to))
}

/// Whether a translation is in use is asked, not demanded: nothing is said aloud.
#[unsafe(no_mangle)]
pub extern "C" fn AM_GetTranslationInuse(ea: *const Endpoint, index: c_int) -> c_int {
    if !started() {
        return NOT_INIT;
    }
    // SAFETY: the program's own handle.
    let found = unsafe { endpoint(ea) }.and_then(|ea| ea.translation(number(index)?));
    found.map_or_else(code, |found| if found.is_some() { OK } else { RESOURCE })
}

#[unsafe(no_mangle)]
pub extern "C" fn AM_MaxNumTranslations(count: *mut c_int) -> c_int {
    // SAFETY: null or valid.
    done("AM_MaxNumTranslations", unsafe { put(count, TRANSLATIONS as c_int) })
}

#[unsafe(no_mangle)]
pub extern "C" fn AM_MaxSegLength(bytes: *mut usize) -> c_int {
    // SAFETY: null or valid.
    done("AM_MaxSegLength", unsafe { put(bytes, usize::MAX) })
}

#[unsafe(no_mangle)]
pub extern "C" fn AMX_enEqual(one: CName, other: CName) -> c_int {
    (one == other) as c_int
}

/// Sleeps until one of the mask's events, then polls: programs may count on either.
fn wait(eb: &Bundle) -> Result<(), Error> {
    let mask = eb.mask().load(Ordering::Relaxed);
    if mask == 0 {
        return Err(Error::BadArgument); // it would never return
    }
    if mask & CAN_SEND == 0 {
        eb.wait(Duration::MAX, &[])?;
        return eb.poll().map(drop);
    }
    loop {
        let ours = eb.endpoints();
        let refused = lock(&REFUSED).clone();
        let peers: Vec<(&Endpoint, usize)> = refused
            .iter()
            .filter_map(|(address, index)| {
                let found = ours.iter().find(|each| Arc::as_ptr(each).addr() == *address)?;
                Some((&**found, *index))
            })
            .collect();
        if peers.is_empty() && mask == CAN_SEND {
            return Ok(());
        }
        eb.wait(Duration::MAX, &peers)?;
        let polled = eb.poll()?;
        // (Who still finds no room may be waiting for a process that has ended with the job.)
        am_job::heed();
        let can_send = |(endpoint, index): &(&Endpoint, usize)| endpoint.can_send(*index);
        let now: Vec<_> = peers
            .iter()
            .filter(|peer| can_send(peer) != Ok(false))
            .map(|(endpoint, index)| (std::ptr::from_ref(*endpoint).addr(), *index))
            .collect();
        lock(&REFUSED).retain(|each| !now.contains(each));
        if !now.is_empty() || polled > 0 && mask != CAN_SEND {
            return Ok(());
        }
    }
}

/// A handler of the program; what it takes depends on the message.
type Handler = unsafe extern "C" fn();

/// Gives a macro the numbers of arguments, and for each of them the arguments' places.
macro_rules! for_each_count {
    ($make:ident) => {
        $make! {
            0 [] 1 [0] 2 [0 1] 3 [0 1 2] 4 [0 1 2 3] 5 [0 1 2 3 4] 6 [0 1 2 3 4 5]
            7 [0 1 2 3 4 5 6] 8 [0 1 2 3 4 5 6 7] 9 [0 1 2 3 4 5 6 7 8]
            10 [0 1 2 3 4 5 6 7 8 9] 11 [0 1 2 3 4 5 6 7 8 9 10]
            12 [0 1 2 3 4 5 6 7 8 9 10 11] 13 [0 1 2 3 4 5 6 7 8 9 10 11 12]
            14 [0 1 2 3 4 5 6 7 8 9 10 11 12 13] 15 [0 1 2 3 4 5 6 7 8 9 10 11 12 13 14]
            16 [0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15]
        }
    };
}

macro_rules! int {
    ($at:literal) => {
        c_int
    };
}

fn run(function: Handler, message: &Incoming) {
    if amudp::ARE_HOOKS.load(Ordering::Relaxed) {
        return amudp::between_hooks(message, || run_handler(function, message));
    }
    run_handler(function, message)
}

fn run_handler(function: Handler, message: &Incoming) {
    let token = std::ptr::from_ref(message).cast_mut().cast::<c_void>();
    let words = message.arguments();
    macro_rules! short {
        ($($count:literal [$($at:literal)*])*) => {
            match words.len() {
                $($count => {
                    type Short = unsafe extern "C" fn(*mut c_void $(, int!($at))*);
                    // SAFETY: the program's handler for messages with so many arguments; a pointer to a function either way.
                    unsafe { std::mem::transmute::<Handler, Short>(function)(token $(, words[$at] as c_int)*) }
                })*
                _ => {}
            }
        };
    }
    let (place, len) = message.place();
    let place = place.cast::<c_void>();
    macro_rules! long {
        ($($count:literal [$($at:literal)*])*) => {
            match words.len() {
                $($count => {
                    type Long = unsafe extern "C" fn(*mut c_void, *mut c_void, usize $(, int!($at))*);
                    // SAFETY: the program's handler for long messages with so many arguments; a pointer to a function either way.
                    unsafe { std::mem::transmute::<Handler, Long>(function)(token, place, len $(, words[$at] as c_int)*) }
                })*
                _ => {}
            }
        };
    }
    if message.is_short() { for_each_count!(short) } else { for_each_count!(long) }
}

fn run_error(function: Handler, what: &Undeliverable) {
    let (len, offset) = what.bytes();
    let mut arguments = [0; ARGUMENTS];
    let words = what.arguments();
    arguments[..words.len()].copy_from_slice(words);
    let mut block = ArgumentBlock {
        name: what.peer().map_or(CName([0; 4]), CName::from),
        tag: what.tag(),
        handler: what.handler(),
        count: words.len() as u8,
        arguments,
        len,
        offset: offset.unwrap_or(0) as usize,
    };
    let kind = match (what.is_short(), offset) {
        _ if what.is_get() => 7,
        (true, _) => 1,
        (false, None) => 2,
        (false, Some(_)) => 3,
    };
    let opcode = kind + if what.is_reply() { 3 } else { 0 };
    type ErrorHandler = unsafe extern "C" fn(c_int, c_int, *mut c_void);
    // SAFETY: the program's handler of index 0, which is given a block of its own.
    unsafe {
        std::mem::transmute::<Handler, ErrorHandler>(function)(
            what.status() as c_int,
            opcode,
            (&raw mut block).cast(),
        )
    }
}

/// Functions of a token, which a handler has.
macro_rules! inside {
    ($($name:ident($token:ident $(, $arg:ident: $type:ty)*) $body:block)*) => { $(
        #[unsafe(no_mangle)]
        pub extern "C" fn $name($token: *const c_void $(, $arg: $type)*) -> c_int {
            // SAFETY: null, or what the handler was given, while it runs.
            let found = unsafe { $token.cast::<Incoming>().as_ref() }.ok_or(Error::BadArgument);
            done(stringify!($name), found.and_then(|$token| $body))
        }
    )* };
}

inside! {
    AM_GetSourceEndpoint(token, name: *mut CName) {
        // SAFETY: null or valid.
        unsafe { put(name, token.source().into()) }
    }
    AM_GetDestEndpoint(token, ea: *mut *const Endpoint) {
        // SAFETY: null or valid.
        unsafe { put(ea, Arc::as_ptr(token.endpoint())) }
    }
    AMUDP_GetSourceId(token, id: *mut c_int) {
        let index = token.source_index().ok_or(Error::NoResource)?;
        // SAFETY: null or valid.
        unsafe { put(id, index as c_int) }
    }
    AMUDP_GetTokenInfo(token, handler: *mut u8, category: *mut c_int, is_request: *mut c_int) {
        // SAFETY: null or valid.
        unsafe {
            put(handler, token.handler())?;
            put(category, amudp::category(token))?;
            put(is_request, !token.is_reply() as c_int)
        }
    }
    AM_GetMsgTag(token, tag: *mut Tag) {
        // SAFETY: null or valid.
        unsafe { put(tag, token.tag()) }
    }
    ringlet_am_reply(token, handler: u8, count: c_int, arguments: *const u32) {
        // SAFETY: so many words, by the header.
        token.reply(handler, unsafe { words(arguments, count)? }, Payload::None)
    }
    ringlet_am_reply_medium(
        token, handler: u8, bytes: *const c_void, len: usize, count: c_int, arguments: *const u32
    ) {
        // SAFETY: so many bytes, as the program says, and so many words, by the header.
        let (bytes, arguments) = unsafe { (slice(bytes, len)?, words(arguments, count)?) };
        token.reply(handler, arguments, Payload::Medium(bytes))
    }
    ringlet_am_reply_bulk(
        token, handler: u8, bytes: *const c_void, len: usize, offset: usize,
        count: c_int, arguments: *const u32
    ) {
        // SAFETY: so many bytes, as the program says, and so many words, by the header.
        let (bytes, arguments) = unsafe { (slice(bytes, len)?, words(arguments, count)?) };
        token.reply(handler, arguments, Payload::Bulk { offset: offset as u64, bytes })
    }
}
