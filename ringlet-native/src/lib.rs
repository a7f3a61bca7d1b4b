//! The C edge of the native library (`ringlet_messages::native`, include/ringlet.h): handles, error numbers, and nothing else.
//!
//! Every function's contract is the header's: handles come from the functions that make them and are not used after they are closed,
//! one thread at a time uses a listener, a mailbox, a channel to send and a channel to receive, and buffers are valid for their
//! length. "As in the header" below is that.
#![allow(non_camel_case_types)] // the names are the header's
#![allow(clippy::missing_safety_doc)]

mod am;
mod am_job;
mod am_spawn;
mod amudp;
mod port;
mod reflect;

use ringlet_core::queue::{self, Reserved};
use ringlet_messages::native::*;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::ptr::{null, null_mut};
use std::time::Duration;

#[repr(C)]
pub struct ringlet_options {
    kind: c_uint,
    peers: c_uint,
    slot_count: usize,
    ring_bytes: usize,
    spin_us: c_int,
}

pub struct ringlet_listener(Listener);

/// Two halves that two threads may use at once, so each is borrowed by itself; or a locked pair, which is in the first.
pub struct ringlet_channel {
    out: Out,
    inward: In,
    /// The locked pair's end serves both ways. Those take turns, and so do the threads that use it.
    locked: Option<Locked>,
    region: Option<Region>,
}

#[derive(Default)]
struct Out {
    sender: Option<Sender>,
    reserved: Option<Reserved>,
}

#[derive(Default)]
struct In {
    receiver: Option<Receiver>,
    message: Option<queue::Message>,
}

pub struct ringlet_mailbox {
    mailbox: Mailbox,
    message: Option<queue::Message>,
}

/// An error number, or one of ours.
struct Failure(c_int);

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        Failure(error.errno())
    }
}

const INVALID: Failure = Failure(libc::EINVAL);

/// What to return, with errno when it went wrong.
fn answer<T>(failed: T, f: impl FnOnce() -> Result<T, Failure>) -> T {
    f().unwrap_or_else(|Failure(errno)| {
        // SAFETY: the calling thread's own.
        unsafe { *libc::__errno_location() = errno };
        failed
    })
}

fn timeout(ms: c_int) -> Timeout {
    u64::try_from(ms).ok().map(Duration::from_millis)
}

fn boxed<T>(value: T) -> *mut T {
    Box::into_raw(Box::new(value))
}

/// # Safety
/// `handle` is null, or came from `boxed` and is not used afterwards.
unsafe fn unbox<T>(handle: *mut T) {
    if !handle.is_null() {
        // SAFETY: our caller's contract.
        drop(unsafe { Box::from_raw(handle) });
    }
}

/// # Safety
/// As in the header.
unsafe fn read_options<'a>(
    name: *const c_char,
    options: *const ringlet_options,
) -> Result<(&'a str, Options), Failure> {
    if name.is_null() || options.is_null() {
        return Err(INVALID);
    }
    // SAFETY: not null, so a C string and an options structure.
    let (name, given) = unsafe { (CStr::from_ptr(name), &*options) };
    let kind = match given.kind {
        1 => Kind::Bytes,
        2 => Kind::Messages,
        3 => Kind::Locked,
        4 => Kind::Mailbox,
        5 => Kind::Region,
        _ => return Err(INVALID),
    };
    let mut options = Options::new(kind);
    options.peers = match given.peers {
        0 => Peers::SameUser,
        1 => Peers::Any,
        _ => return Err(INVALID),
    };
    if given.slot_count != 0 {
        options.slot_count = given.slot_count;
    }
    if given.ring_bytes != 0 {
        options.ring_bytes = given.ring_bytes;
    }
    if given.spin_us != 0 {
        options.spin_us = given.spin_us.max(0) as u64;
    }
    Ok((name.to_str().map_err(|_| INVALID)?, options))
}

fn channel(connection: Connection) -> *mut ringlet_channel {
    let (mut out, mut inward) = (Out::default(), In::default());
    let (mut locked, mut region) = (None, None);
    match connection {
        Connection::Channel(channel) => {
            (out.sender, inward.receiver) = (Some(channel.sender), Some(channel.receiver));
        }
        Connection::Sender(sender) => out.sender = Some(sender),
        Connection::Locked(end) => locked = Some(end),
        Connection::Region(end) => region = Some(end),
    }
    boxed(ringlet_channel { out, inward, locked, region })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringlet_listen(
    name: *const c_char,
    options: *const ringlet_options,
) -> *mut ringlet_listener {
    answer(null_mut(), || {
        // SAFETY: as in the header.
        let (name, options) = unsafe { read_options(name, options)? };
        Ok(boxed(ringlet_listener(Listener::bind(name, options)?)))
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringlet_accept(
    listener: *mut ringlet_listener,
    timeout_ms: c_int,
) -> *mut ringlet_channel {
    // SAFETY: as in the header.
    let listener = unsafe { &(*listener).0 };
    answer(null_mut(), || Ok(channel(listener.accept(timeout(timeout_ms))?)))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringlet_listener_fd(listener: *const ringlet_listener) -> c_int {
    // SAFETY: as in the header.
    unsafe { (*listener).0.descriptor() }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringlet_listener_close(listener: *mut ringlet_listener) {
    // SAFETY: as in the header.
    unsafe { unbox(listener) };
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringlet_connect(
    name: *const c_char,
    options: *const ringlet_options,
    timeout_ms: c_int,
) -> *mut ringlet_channel {
    answer(null_mut(), || {
        // SAFETY: as in the header.
        let (name, options) = unsafe { read_options(name, options)? };
        Ok(channel(connect(name, options, timeout(timeout_ms))?))
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringlet_close(channel: *mut ringlet_channel) {
    // SAFETY: as in the header.
    unsafe { unbox(channel) };
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringlet_finish(channel: *mut ringlet_channel) -> c_int {
    // SAFETY: as in the header; this thread is the one that sends.
    let out = unsafe { &mut (*channel).out };
    answer(-1, || {
        out.reserved = None;
        out.sender.take().map(|_| 0).ok_or(INVALID)
    })
}

/// What sends on this channel, and the place where it keeps what is reserved.
///
/// # Safety
/// As in the header; this thread is the one that sends.
unsafe fn sending<'a>(
    channel: *mut ringlet_channel,
) -> Result<(&'a mut dyn Sends, &'a mut Option<Reserved>), Failure> {
    // SAFETY: as in the header: fields that only the sending thread uses, or, of a locked pair, the one whose turn it is.
    let (out, locked) = unsafe { (&mut (*channel).out, &raw mut (*channel).locked) };
    let Out { sender, reserved } = out;
    match sender {
        Some(sender) => Ok((sender, reserved)),
        // SAFETY: a channel with halves is not locked, so only the thread that sends looks at this.
        None => match unsafe { &mut *locked } {
            Some(end) => Ok((end, reserved)),
            // SAFETY: as in the header; nothing is changed.
            None => Err(unsafe { no_sender(channel) }),
        },
    }
}

/// # Safety
/// As in the header.
unsafe fn no_sender(channel: *const ringlet_channel) -> Failure {
    // SAFETY: as in the header; nothing is changed.
    let is_region = unsafe { (*channel).region.is_some() };
    Failure(if is_region { libc::ENOTSUP } else { libc::EPIPE })
}

/// What receives on this channel, and the place where it keeps what is peeked at.
///
/// # Safety
/// As in the header; this thread is the one that receives.
unsafe fn receiving<'a>(
    channel: *mut ringlet_channel,
) -> Result<(&'a mut dyn Receives, &'a mut Option<queue::Message>), Failure> {
    // SAFETY: as in `sending`.
    let (inward, locked) = unsafe { (&mut (*channel).inward, &raw mut (*channel).locked) };
    let In { receiver, message } = inward;
    match receiver {
        Some(receiver) => Ok((receiver, message)),
        // SAFETY: as in `sending`.
        None => match unsafe { &mut *locked } {
            Some(end) => Ok((end, message)),
            None => Err(Failure(libc::ENOTSUP)),
        },
    }
}

/// # Safety
/// `data` is valid for `len` bytes.
unsafe fn bytes<'a>(data: *const c_void, len: usize) -> Result<&'a [u8], Failure> {
    match (data.is_null(), len) {
        (_, 0) => Ok(&[]),
        (true, _) => Err(Failure(libc::EFAULT)),
        // SAFETY: our caller's contract.
        _ => Ok(unsafe { std::slice::from_raw_parts(data.cast(), len) }),
    }
}

/// # Safety
/// `buffer` is valid for `size` bytes.
unsafe fn room<'a>(buffer: *mut c_void, size: usize) -> Result<&'a mut [u8], Failure> {
    match (buffer.is_null(), size) {
        (_, 0) => Ok(&mut []),
        (true, _) => Err(Failure(libc::EFAULT)),
        // SAFETY: our caller's contract. What it holds is not read.
        _ => Ok(unsafe { std::slice::from_raw_parts_mut(buffer.cast(), size) }),
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringlet_send(
    channel: *mut ringlet_channel,
    data: *const c_void,
    len: usize,
    timeout_ms: c_int,
) -> isize {
    answer(-1, || {
        // SAFETY: as in the header.
        let ((sender, reserved), data) = unsafe { (sending(channel)?, bytes(data, len)?) };
        *reserved = None;
        Ok(sender.send(data, timeout(timeout_ms))? as isize)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringlet_receive(
    channel: *mut ringlet_channel,
    buffer: *mut c_void,
    size: usize,
    timeout_ms: c_int,
) -> isize {
    answer(-1, || {
        // SAFETY: as in the header.
        let ((receiver, message), to) = unsafe { (receiving(channel)?, room(buffer, size)?) };
        *message = None;
        Ok(receiver.receive(to, timeout(timeout_ms))? as isize)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringlet_max_bytes(channel: *const ringlet_channel) -> usize {
    // SAFETY: as in the header; nothing is changed.
    let (out, locked) = unsafe { (&(*channel).out, &(*channel).locked) };
    match (&out.sender, locked) {
        (Some(sender), _) => sender.max_bytes(),
        (None, Some(locked)) => locked.max_bytes(),
        (None, None) => 0,
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringlet_reserve(
    channel: *mut ringlet_channel,
    len: usize,
    timeout_ms: c_int,
) -> *mut c_void {
    answer(null_mut(), || {
        // SAFETY: as in the header.
        let (sender, reserved) = unsafe { sending(channel)? };
        let place = reserved.insert(sender.reserve_raw(len, timeout(timeout_ms))?);
        Ok(place.pointer(sender.out()).cast())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringlet_commit(channel: *mut ringlet_channel, len: usize) -> c_int {
    answer(-1, || {
        // SAFETY: as in the header.
        let (sender, reserved) = unsafe { sending(channel)? };
        let place = reserved.take_if(|place| len <= place.room()).ok_or(INVALID)?;
        sender.commit_raw(place, len)?;
        Ok(0)
    })
}

/// Looks at the next message: where, and how long.
fn look<R: Receives + ?Sized>(
    receiver: &mut R,
    held: &mut Option<queue::Message>,
    timeout: Timeout,
) -> Result<(*const c_void, usize), Failure> {
    let message = held.insert(receiver.peek_raw(timeout)?);
    let at = message.pointer(receiver.inward()).wrapping_add(receiver.used());
    Ok((at.cast(), message.len() - receiver.used()))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringlet_peek(
    channel: *mut ringlet_channel,
    len: *mut usize,
    timeout_ms: c_int,
) -> *const c_void {
    answer(null(), || {
        // SAFETY: as in the header.
        let (receiver, held) = unsafe { receiving(channel)? };
        *held = None;
        let (at, n) = look(receiver, held, timeout(timeout_ms))?;
        // SAFETY: as in the header.
        unsafe { *len = n };
        Ok(at)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringlet_release(channel: *mut ringlet_channel, len: usize) -> c_int {
    answer(-1, || {
        // SAFETY: as in the header.
        let (receiver, held) = unsafe { receiving(channel)? };
        let used = receiver.used();
        let message = held.take_if(|message| len <= message.len() - used).ok_or(INVALID)?;
        receiver.take_raw(message, len);
        Ok(0)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringlet_receive_fd(channel: *const ringlet_channel) -> c_int {
    // SAFETY: as in the header; nothing is changed.
    let (inward, locked, region) =
        unsafe { (&(*channel).inward, &(*channel).locked, &(*channel).region) };
    answer(-1, || match (&inward.receiver, locked, region) {
        (Some(receiver), ..) => Ok(receiver.descriptor()),
        (None, Some(locked), _) => Ok(locked.descriptor()),
        (None, None, Some(region)) => Ok(region.descriptor()),
        (None, None, None) => Err(Failure(libc::ENOTSUP)),
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringlet_send_fd(channel: *const ringlet_channel) -> c_int {
    // SAFETY: as in the header; nothing is changed.
    let (out, locked) = unsafe { (&(*channel).out, &(*channel).locked) };
    answer(-1, || match (&out.sender, locked) {
        (Some(sender), _) => Ok(sender.descriptor()),
        (None, Some(locked)) => Ok(locked.descriptor()),
        // SAFETY: a channel as in the header; nothing is changed.
        (None, None) => Err(unsafe { no_sender(channel) }),
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringlet_arm_receive(channel: *mut ringlet_channel) -> c_int {
    // SAFETY: as in the header; this thread is the one that receives.
    let (inward, locked) = unsafe { (&mut (*channel).inward, &raw mut (*channel).locked) };
    answer(-1, || match &mut inward.receiver {
        Some(receiver) => Ok(receiver.arm().into()),
        // SAFETY: as in `sending`.
        None => match unsafe { &mut *locked } {
            Some(locked) => Ok(locked.arm().into()),
            // SAFETY: as in the header: one thread at a time waits at a region.
            None => Ok(unsafe { waiting(channel)? }.arm().into()),
        },
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringlet_arm_send(channel: *mut ringlet_channel) -> c_int {
    // SAFETY: as in the header; this thread is the one that sends.
    let (out, locked) = unsafe { (&mut (*channel).out, &raw mut (*channel).locked) };
    answer(-1, || match &mut out.sender {
        Some(sender) => Ok(sender.arm().into()),
        // SAFETY: as in `sending`.
        None => match unsafe { &mut *locked } {
            // There is room in our turn; the turn comes with the other end's message.
            Some(locked) => Ok((!locked.is_our_turn() && locked.arm()).into()),
            // SAFETY: a channel as in the header; nothing is changed.
            None => Err(unsafe { no_sender(channel) }),
        },
    })
}

/// # Safety
/// As in the header.
unsafe fn region<'a>(channel: *const ringlet_channel) -> Result<&'a Region, Failure> {
    // SAFETY: as in the header; nothing is changed.
    unsafe { (*channel).region.as_ref() }.ok_or(Failure(libc::ENOTSUP))
}

/// # Safety
/// As in the header: no other thread uses the region meanwhile.
unsafe fn waiting<'a>(channel: *mut ringlet_channel) -> Result<&'a mut Region, Failure> {
    // SAFETY: our caller's contract.
    unsafe { (*channel).region.as_mut() }.ok_or(Failure(libc::ENOTSUP))
}

/// A part of a region, and how long it is.
///
/// # Safety
/// As in the header.
unsafe fn part(
    channel: *const ringlet_channel,
    len: *mut usize,
    which: impl FnOnce(&Region) -> *const c_void,
) -> *const c_void {
    answer(null(), || {
        // SAFETY: as in the header.
        let region = unsafe { region(channel)? };
        if !len.is_null() {
            // SAFETY: as in the header: null or can be written to.
            unsafe { *len = region.part_bytes() };
        }
        Ok(which(region))
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringlet_remote(
    channel: *const ringlet_channel,
    len: *mut usize,
) -> *mut c_void {
    // SAFETY: as in the header.
    unsafe { part(channel, len, |region| region.remote().as_ptr().cast()).cast_mut() }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringlet_local(
    channel: *const ringlet_channel,
    len: *mut usize,
) -> *const c_void {
    // SAFETY: as in the header.
    unsafe { part(channel, len, |region| region.local().as_ptr().cast()) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringlet_put(
    channel: *const ringlet_channel,
    at: usize,
    data: *const c_void,
    len: usize,
) -> c_int {
    answer(-1, || {
        // SAFETY: as in the header.
        let (region, data) = unsafe { (region(channel)?, bytes(data, len)?) };
        Ok(region.put(at, data).map(|()| 0)?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn ringlet_fence() {
    std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringlet_ring(channel: *mut ringlet_channel) -> c_int {
    // SAFETY: as in the header.
    answer(-1, || Ok(unsafe { waiting(channel)? }.ring().map(|()| 0)?))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringlet_wait(channel: *mut ringlet_channel, timeout_ms: c_int) -> i64 {
    answer(-1, || {
        // SAFETY: as in the header.
        let region = unsafe { waiting(channel)? };
        // `wait` takes a count of more than half of a u64 for a lie.
        Ok(region.wait(timeout(timeout_ms))? as i64)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringlet_check(channel: *const ringlet_channel) -> c_int {
    // SAFETY: as in the header.
    answer(-1, || Ok(unsafe { region(channel)? }.check().map(|()| 0)?))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringlet_mailbox_open(
    name: *const c_char,
    options: *const ringlet_options,
) -> *mut ringlet_mailbox {
    answer(null_mut(), || {
        // SAFETY: as in the header.
        let (name, options) = unsafe { read_options(name, options)? };
        Ok(boxed(ringlet_mailbox { mailbox: Mailbox::bind(name, options)?, message: None }))
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringlet_mailbox_receive(
    mailbox: *mut ringlet_mailbox,
    buffer: *mut c_void,
    size: usize,
    sender: *mut u64,
    timeout_ms: c_int,
) -> isize {
    answer(-1, || {
        // SAFETY: as in the header.
        let (ringlet_mailbox { mailbox, message }, to) =
            unsafe { (&mut *mailbox, room(buffer, size)?) };
        *message = None;
        let n = mailbox.receive(to, timeout(timeout_ms))?;
        // SAFETY: as in the header.
        unsafe { tell(sender, mailbox) };
        Ok(n as isize)
    })
}

/// # Safety
/// `sender` is null or can be written to.
unsafe fn tell(sender: *mut u64, mailbox: &Mailbox) {
    if !sender.is_null() {
        // SAFETY: our caller's contract.
        unsafe { *sender = mailbox.last_sender().0 };
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringlet_mailbox_peek(
    mailbox: *mut ringlet_mailbox,
    len: *mut usize,
    sender: *mut u64,
    timeout_ms: c_int,
) -> *const c_void {
    answer(null(), || {
        // SAFETY: as in the header.
        let ringlet_mailbox { mailbox, message } = unsafe { &mut *mailbox };
        *message = None;
        let (at, n) = look(mailbox, message, timeout(timeout_ms))?;
        // SAFETY: as in the header.
        unsafe {
            *len = n;
            tell(sender, mailbox);
        }
        Ok(at)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringlet_mailbox_release(mailbox: *mut ringlet_mailbox) -> c_int {
    answer(-1, || {
        // SAFETY: as in the header.
        let ringlet_mailbox { mailbox, message } = unsafe { &mut *mailbox };
        let message = message.take().ok_or(INVALID)?;
        let len = message.len();
        mailbox.take_raw(message, len);
        Ok(0)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringlet_mailbox_fd(mailbox: *const ringlet_mailbox) -> c_int {
    // SAFETY: as in the header.
    unsafe { (*mailbox).mailbox.descriptor() }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringlet_mailbox_arm(mailbox: *mut ringlet_mailbox) -> c_int {
    // SAFETY: as in the header.
    unsafe { (*mailbox).mailbox.arm().into() }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringlet_mailbox_senders(mailbox: *const ringlet_mailbox) -> usize {
    // SAFETY: as in the header.
    unsafe { (*mailbox).mailbox.senders() }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringlet_mailbox_close(mailbox: *mut ringlet_mailbox) {
    // SAFETY: as in the header.
    unsafe { unbox(mailbox) };
}
