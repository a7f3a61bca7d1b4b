//! The C edge of ports of an Ethernet (`ringlet_ethernet::port`): handles, error numbers and texts; and frames that are plain, for programs that take
//! no others. "As in the header" is as in lib.rs.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::os::fd::{AsFd, AsRawFd};
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use ringlet_ethernet::cut;
use ringlet_ethernet::frame::{ETHERNET_BYTES, HEAD_BYTES, HEADER_BYTES, Head};
use ringlet_ethernet::port::{Ender, Event, Options, Port, Queue};
use ringlet_ethernet::{Mac, Refused, Room, room};
use ringlet_reflect::Process;

use crate::{boxed, timeout, unbox};

const OFFLOADS: c_uint = 1;
/// What an operator may want to know and nobody asks for: older news go.
const NEWS: usize = 16;
const SPIN_US: u64 = 50;

#[repr(C)]
pub struct ringlet_port_options {
    name: *const c_char,
    address: [u8; 6],
    queues: u16,
    flags: c_uint,
    spin_us: c_int,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct ringlet_port_offload {
    flags: u8,
    gso_type: u8,
    hdr_len: u16,
    gso_size: u16,
    csum_start: u16,
    csum_offset: u16,
}

#[repr(C)]
pub struct ringlet_port_frame {
    data: *const c_void,
    len: usize,
    destination: [u8; 6],
    source: [u8; 6],
    offload: ringlet_port_offload,
}

type News = Arc<Mutex<VecDeque<String>>>;

/// Somebody asks the port to end, it may be before that is open.
#[derive(Default)]
struct Ending {
    is_asked: AtomicBool,
    of: OnceLock<Ender>,
}

impl Ending {
    fn end(&self) {
        if self.is_asked.load(Ordering::SeqCst) {
            self.of.get().iter().for_each(|ender| ender.end());
        }
    }
}

pub struct ringlet_port {
    process: Process,
    port: Port,
    address: Mac,
    queues: Vec<*mut ringlet_port_queue>,
    news: News,
}

pub struct ringlet_port_queue {
    process: Process,
    queue: Queue,
    offloads: bool,
    spin_us: u64,
    /// Frames that were cut, or came behind such: those that are still to be shown, and those that are.
    backlog: VecDeque<Vec<u8>>,
    shown: Vec<Vec<u8>>,
}

/// An error number, and what went wrong.
struct Why(c_int, String);

fn why(number: c_int, about: &str) -> Why {
    Why(number, about.into())
}

impl From<Refused> for Why {
    fn from(refused: Refused) -> Why {
        match refused {
            Refused::NoPort => why(libc::ENETDOWN, "no port that could have this address is there"),
            Refused::Full => why(libc::EAGAIN, "no room now"),
            Refused::Length => {
                why(libc::EMSGSIZE, "a frame is shorter, or longer than was asked for")
            }
        }
    }
}

fn of_opening(error: &anyhow::Error) -> Why {
    let number = error.chain().find_map(|cause| {
        let system = cause.downcast_ref::<std::io::Error>().and_then(std::io::Error::raw_os_error);
        system.or_else(|| Some(cause.downcast_ref::<rustix::io::Errno>()?.raw_os_error()))
    });
    Why(number.unwrap_or(libc::EINVAL), format!("{error:#}"))
}

thread_local! {
    static LAST: RefCell<CString> = RefCell::default();
}

/// What to return; with errno and a text when it went wrong.
fn answer<T>(failed: T, call: &str, f: impl FnOnce() -> Result<T, Why>) -> T {
    f().unwrap_or_else(|Why(number, about)| {
        // (No room, and nothing there, are no news: no text for them.)
        if number != libc::EAGAIN {
            let text = CString::new(format!("ringlet_port_{call}: {about}")).unwrap_or_default();
            // (A thread that ends has no text any more.)
            let _ = LAST.try_with(|last| *last.borrow_mut() = text);
        }
        // SAFETY: the calling thread's own.
        unsafe { *libc::__errno_location() = number };
        failed
    })
}

/// # Safety
/// As in the header: null, or a queue that nobody else uses meanwhile.
unsafe fn queue_of<'a>(queue: *mut ringlet_port_queue) -> Result<&'a mut ringlet_port_queue, Why> {
    // SAFETY: our caller's contract.
    let queue = unsafe { queue.as_mut() }.ok_or_else(|| why(libc::EINVAL, "the handle is NULL"))?;
    is_ours(&queue.process)?;
    Ok(queue)
}

/// # Safety
/// As in the header: null, or a port that is not closed meanwhile.
unsafe fn port_of<'a>(port: *const ringlet_port) -> Result<&'a ringlet_port, Why> {
    // SAFETY: our caller's contract.
    let port = unsafe { port.as_ref() }.ok_or_else(|| why(libc::EINVAL, "the handle is NULL"))?;
    is_ours(&port.process)?;
    Ok(port)
}

/// A child by fork would take what comes for its parent, and has no keeper.
fn is_ours(process: &Process) -> Result<(), Why> {
    match process.is_this() {
        true => Ok(()),
        false => {
            Err(why(libc::ENOTCONN, "this process has been forked, and the port is its parent's"))
        }
    }
}

/// # Safety
/// As in the header: null, or a C string.
unsafe fn text<'a>(text: *const c_char) -> Result<Option<&'a str>, Why> {
    // SAFETY: our caller's contract.
    let text = (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_str());
    text.transpose().map_err(|_| why(libc::EINVAL, "a name is not UTF-8"))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringlet_port_open(
    network: *const c_char,
    options: *const ringlet_port_options,
) -> *mut ringlet_port {
    answer(null_mut(), "open", || {
        // SAFETY: as in the header: null, or options.
        let (network, given) = unsafe { (text(network)?, options.as_ref()) };
        let network = network.ok_or_else(|| why(libc::EFAULT, "a network has a name"))?;
        let flags = given.map_or(0, |given| given.flags);
        if flags & !OFFLOADS != 0 {
            return Err(why(libc::EINVAL, "the flags are unknown"));
        }
        // SAFETY: as in the header.
        let name = given.map_or(Ok(None), |given| unsafe { text(given.name) })?;
        let program = || std::env::current_exe().ok()?.file_name()?.to_str().map(str::to_owned);
        let name = name.map(str::to_owned).or_else(program).unwrap_or_else(|| "program".into());
        let address = given.map_or(Mac::default(), |given| Mac(given.address));
        let address = if address == Mac::default() { Mac::random() } else { Ok(address) };
        let address = address.map_err(|error| of_opening(&error))?;
        if !address.is_station() {
            return Err(Why(libc::EINVAL, format!("{address} is no station's address")));
        }
        let queues = given.map_or(0, |given| given.queues).max(1);
        let options = Options { queues, ..Options::new(name, address) };
        let opened = Room::open(&room::base(), network).and_then(|room| {
            let (news, ender) = (News::default(), Arc::new(Ending::default()));
            let (told, ends) = (Arc::clone(&news), Arc::clone(&ender));
            let (port, queues) = Port::open(room, options, move |event| match event {
                Event::Ports(_) => {}
                Event::Apart(why) => tell(&told, why),
                Event::End => {
                    ends.is_asked.store(true, Ordering::SeqCst);
                    ends.end();
                }
            })?;
            let _ = ender.of.set(port.ender());
            // (Somebody may have asked before it was open: he has found no `of`, or is seen here.)
            ender.end();
            Ok((port, queues, news))
        });
        let (port, queues, news) = opened.map_err(|error| of_opening(&error))?;
        let process = Process::this().map_err(|error| Why(error.0, "no memory".into()))?;
        let spin_us = match given.map_or(0, |given| given.spin_us) {
            0 => SPIN_US,
            given => given.max(0) as u64,
        };
        let queue = |queue| {
            let (backlog, shown) = Default::default();
            let offloads = flags & OFFLOADS != 0;
            boxed(ringlet_port_queue { process, queue, offloads, spin_us, backlog, shown })
        };
        let queues = queues.into_iter().map(queue).collect();
        Ok(boxed(ringlet_port { process, port, address, queues, news }))
    })
}

fn tell(news: &News, what: String) {
    let mut news = news.lock().unwrap_or_else(PoisonError::into_inner);
    if news.len() == NEWS {
        news.pop_front();
    }
    news.push_back(what);
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringlet_port_close(port: *mut ringlet_port) {
    // SAFETY: as in the header.
    let Some(opened) = (unsafe { port.as_mut() }) else { return };
    // (What a child has of it is its parent's, too: descriptors, and the port's name. That stays.)
    if !opened.process.is_this() {
        return;
    }
    opened.port.end();
    for queue in opened.queues.drain(..) {
        // SAFETY: made by `open`, closed once; nobody uses it any more, by the header.
        unsafe { unbox(queue) };
    }
    // SAFETY: as in the header.
    unsafe { unbox(port) };
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringlet_port_address(port: *const ringlet_port, address: *mut u8) {
    // SAFETY: as in the header: a handle, and six bytes. Nothing is changed there but these.
    unsafe { std::ptr::copy_nonoverlapping((*port).address.0.as_ptr(), address, 6) };
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringlet_port_others(port: *const ringlet_port) -> c_int {
    // SAFETY: as in the header.
    answer(-1, "others", || Ok(unsafe { port_of(port)? }.port.others() as c_int))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringlet_port_groups(
    port: *const ringlet_port,
    groups: *const [u8; 6],
    count: usize,
) -> c_int {
    answer(-1, "groups", || {
        // SAFETY: as in the header.
        let port = unsafe { &(*port).port };
        if groups.is_null() {
            port.want(None);
            return Ok(0);
        }
        // SAFETY: as in the header: so many addresses.
        let groups = unsafe { std::slice::from_raw_parts(groups, count) };
        let groups: Vec<Mac> = groups.iter().copied().map(Mac).collect();
        if let Some(other) = groups.iter().find(|group| !group.is_multicast()) {
            return Err(Why(libc::EINVAL, format!("{other} is no group's address")));
        }
        port.want(Some(&groups));
        Ok(0)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringlet_port_news(
    port: *const ringlet_port,
    buffer: *mut c_char,
    size: usize,
) -> c_int {
    answer(-1, "news", || {
        // SAFETY: as in the header.
        let news = unsafe { &port_of(port)?.news };
        let Some(text) = news.lock().unwrap_or_else(PoisonError::into_inner).pop_front() else {
            return Ok(0);
        };
        let len = text.len().min(size.saturating_sub(1));
        if size > 0 {
            // SAFETY: as in the header: room for `size` bytes.
            unsafe {
                std::ptr::copy_nonoverlapping(text.as_ptr().cast(), buffer, len);
                *buffer.add(len) = 0;
            }
        }
        Ok(1)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringlet_port_queue_of(
    port: *const ringlet_port,
    number: c_uint,
) -> *mut ringlet_port_queue {
    answer(null_mut(), "queue_of", || {
        // SAFETY: as in the header; nothing is changed.
        let queues = unsafe { &port_of(port)?.queues };
        queues
            .get(number as usize)
            .copied()
            .ok_or_else(|| why(libc::EINVAL, "the port has no such queue"))
    })
}

fn is_open(queue: &Queue) -> Result<(), Why> {
    match queue.is_over() {
        true => Err(why(libc::ESHUTDOWN, "somebody has ended the port")),
        false => Ok(()),
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringlet_port_reserve(
    queue: *mut ringlet_port_queue,
    to: *const u8,
    len: usize,
) -> *mut c_void {
    answer(null_mut(), "reserve", || {
        // SAFETY: as in the header: a handle, and six bytes.
        let (queue, to) = unsafe { (queue_of(queue)?, Mac(*to.cast())) };
        is_open(&queue.queue)?;
        let place = queue.queue.reserve(to, len.saturating_add(HEADER_BYTES))?;
        Ok(place.keep().wrapping_add(HEADER_BYTES).cast())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringlet_port_commit(
    queue: *mut ringlet_port_queue,
    len: usize,
    offload: *const ringlet_port_offload,
) -> c_int {
    answer(-1, "commit", || {
        // SAFETY: as in the header.
        let (queue, offload) = unsafe { (queue_of(queue)?, offload.as_ref()) };
        let len = len.saturating_add(HEADER_BYTES);
        if let Some(offload) = offload {
            let header = offload.header();
            let mut head = Head([0; HEAD_BYTES]);
            head.0[..HEADER_BYTES].copy_from_slice(&header);
            if !head.is_sound(len) {
                return Err(why(
                    libc::EINVAL,
                    "the offload is none, or not of a frame of this length",
                ));
            }
            queue.queue.write_header(&header);
        }
        queue.queue.send_place(len)?;
        Ok(0)
    })
}

impl ringlet_port_offload {
    fn header(&self) -> [u8; HEADER_BYTES] {
        let mut header = [self.flags, self.gso_type, 0, 0, 0, 0, 0, 0, 0, 0];
        let words = [self.hdr_len, self.gso_size, self.csum_start, self.csum_offset];
        for (to, word) in header[2..].chunks_exact_mut(2).zip(words) {
            to.copy_from_slice(&word.to_le_bytes());
        }
        header
    }

    fn of(head: &Head) -> ringlet_port_offload {
        let word = |at: usize| u16::from_le_bytes([head.0[at], head.0[at + 1]]);
        ringlet_port_offload {
            flags: head.0[0],
            gso_type: head.0[1],
            hdr_len: word(2),
            gso_size: word(4),
            csum_start: word(6),
            csum_offset: word(8),
        }
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringlet_port_send(
    queue: *mut ringlet_port_queue,
    frames: *const libc::iovec,
    count: c_uint,
) -> c_int {
    answer(-1, "send", || {
        // SAFETY: as in the header.
        let queue = &mut unsafe { queue_of(queue)? }.queue;
        is_open(queue)?;
        queue.begin();
        for sent in 0..count as usize {
            // SAFETY: as in the header: so many of them, each valid for its length.
            let frame = unsafe {
                let frame = &*frames.add(sent);
                crate::bytes(frame.iov_base, frame.iov_len)
                    .map_err(|_| why(libc::EFAULT, "a frame is NULL"))?
            };
            if let Err(refused) = send_copy(queue, frame) {
                queue.flush();
                return if sent > 0 { Ok(sent as c_int) } else { Err(refused.into()) };
            }
        }
        queue.flush();
        Ok(count as c_int)
    })
}

fn send_copy(queue: &mut Queue, frame: &[u8]) -> Result<(), Refused> {
    let to = frame.first_chunk().map(|to| Mac(*to)).ok_or(Refused::Length)?;
    let mut place = queue.reserve(to, HEADER_BYTES + frame.len())?;
    place.write(HEADER_BYTES, frame);
    place.send_quietly()
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringlet_port_receive(
    queue: *mut ringlet_port_queue,
    frames: *mut ringlet_port_frame,
    count: c_uint,
) -> c_int {
    answer(-1, "receive", || {
        // SAFETY: as in the header.
        let handle = unsafe { queue_of(queue)? };
        let ringlet_port_queue { queue, offloads, backlog, shown, .. } = handle;
        is_open(queue)?;
        queue.begin();
        shown.clear();
        let (count, mut n) = (count as usize, 0);
        let mut put = |frame: ringlet_port_frame| {
            // SAFETY: as in the header: room for `count` of them, and `n` is less.
            unsafe { frames.add(n).write(frame) };
            n += 1;
        };
        let left = count.saturating_sub(backlog.len());
        if left > 0 {
            queue.hold(left, |arrived| {
                let is_plain = cut::is_plain(arrived.head);
                if backlog.is_empty() && (*offloads || is_plain) {
                    put(ringlet_port_frame {
                        data: arrived.pointer().wrapping_add(HEADER_BYTES).cast(),
                        len: arrived.len - HEADER_BYTES,
                        destination: arrived.head.destination().0,
                        source: arrived.head.source().0,
                        offload: ringlet_port_offload::of(arrived.head),
                    });
                    return Ok(());
                }
                let mut copy = vec![0; arrived.len];
                arrived.copy_to(&mut copy);
                if is_plain || *offloads {
                    backlog.push_back(copy);
                    return Ok(());
                }
                cut::plain(&copy, |message| backlog.push_back(message.to_vec()))
            });
        }
        // (What was cut comes in its order: what came behind it went behind it.)
        let ready = backlog.len().min(count - n);
        for message in backlog.drain(..ready) {
            let Some(head) = message.first_chunk().map(|head| Head(*head)) else { continue };
            let frame = ringlet_port_frame {
                data: message[HEADER_BYTES..].as_ptr().cast(),
                len: message.len() - HEADER_BYTES,
                destination: head.destination().0,
                source: head.source().0,
                offload: ringlet_port_offload::of(&head),
            };
            // SAFETY: the program's array has room for `count` frames, and `n` is below that.
            unsafe { frames.add(n).write(frame) };
            n += 1;
            shown.push(message);
        }
        Ok(n as c_int)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringlet_port_fd(queue: *const ringlet_port_queue) -> c_int {
    // SAFETY: as in the header; nothing is changed.
    answer(-1, "fd", || Ok(unsafe { queue_of(queue.cast_mut())? }.queue.as_fd().as_raw_fd()))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringlet_port_arm(queue: *mut ringlet_port_queue) -> c_int {
    answer(-1, "arm", || {
        // SAFETY: as in the header.
        let handle = unsafe { queue_of(queue)? };
        is_open(&handle.queue)?;
        let is_quiet = handle.backlog.is_empty() && !handle.queue.arm();
        Ok(is_quiet.into())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringlet_port_wait(
    queue: *mut ringlet_port_queue,
    timeout_ms: c_int,
) -> c_int {
    answer(-1, "wait", || {
        // SAFETY: as in the header.
        let handle = unsafe { queue_of(queue)? };
        is_open(&handle.queue)?;
        if !handle.backlog.is_empty() {
            return Ok(0);
        }
        let spin_us = if timeout_ms == 0 { 0 } else { handle.spin_us };
        match handle.queue.wait_for(spin_us, timeout(timeout_ms)) {
            Ok(true) => Ok(0),
            Ok(false) if timeout_ms == 0 => Err(why(libc::EAGAIN, "nothing is there")),
            Ok(false) => Err(why(libc::ETIMEDOUT, "nothing came in all that time")),
            Err(error) => Err(of_opening(&error)),
        }
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn ringlet_port_error() -> *const c_char {
    LAST.try_with(|last| last.borrow().as_ptr()).unwrap_or(null())
}

// What C sees is what stands here.
const _: () = {
    assert!(size_of::<ringlet_port_offload>() == HEADER_BYTES);
    assert!(ETHERNET_BYTES + HEADER_BYTES == HEAD_BYTES);
};
