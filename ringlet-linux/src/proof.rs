//! Proof that who is at a rendezvous holds a socket. It needs neither users nor process numbers, which say nothing from one user or
//! pid namespace to another.
//!
//! The holder *states* on the socket itself at which rendezvous it is: it locks the socket at a place that names its own end of the
//! rendezvous (an OFD lock). Only who holds the socket can do so, since no name opens one; /proc/locks shows such a lock in every
//! namespace; and it goes with the socket. No descriptor is handed out, and nothing that a stranger could keep, hold up or pass on
//! as its own: a statement names one rendezvous, by a number that no other ever had.

use crate::map::Scratch;
use crate::sys::{Errno, Sys, sys};
use crate::{diag, fd, sys, unix};
use core::cell::UnsafeCell;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// struct flock64.
#[repr(C)]
struct Lock {
    kind: i16,
    whence: i16,
    start: i64,
    len: i64,
    pid: i32,
}

const SO_COOKIE: i32 = 57;
/// Places of locks are below 2^63.
const COOKIE_BITS: u64 = 0x7fff_ffff;
/// So much of the machine's list of locks is looked at, some 5,000 locks: who takes more hides those behind. (KERNEL: each piece is looked for
/// from the beginning, so that the whole of a long list takes seconds.)
const LIST_BYTES_MOST: usize = 256 << 10;
/// KERNEL: it gives out no more of the list at a time.
const LIST_PIECE_BYTES: usize = 4096;
/// What strangers can make this process spend on looks: so long, and then so large a part of the time that passes.
const PATIENCE_NS: u64 = 200_000_000;
const PATIENCE_SHARE: u64 = 10;

fn place(inode: u32, cookie: u64) -> u64 {
    (cookie & COOKIE_BITS) << 32 | u64::from(inode)
}

/// The kernel's number of a socket, which no other ever had.
pub fn cookie(socket: i32) -> Sys<u64> {
    number(socket, SO_COOKIE)
}

fn number(socket: i32, option: i32) -> Sys<u64> {
    let (mut number, mut len) = (0u64, 8u32);
    // SAFETY: eight writable bytes, and their number.
    unsafe {
        let (value, size) = (&raw mut number, &raw mut len);
        sys!(SYS_getsockopt, socket, libc::SOL_SOCKET, option, value, size)?;
    }
    Ok(number)
}

/// KERNEL: Linux 5.14.
const SO_NETNS_COOKIE: i32 = 71;

/// Are these two sockets certainly in one network namespace? (Each is in that in which its thread was when it made it.)
pub fn are_of_one_namespace(one: i32, other: i32) -> bool {
    let namespace = |socket| number(socket, SO_NETNS_COOKIE);
    namespace(one).is_ok_and(|found| namespace(other) == Ok(found))
}

/// Are they certainly not?
pub fn are_of_two_namespaces(one: i32, other: i32) -> bool {
    let namespace = |socket| number(socket, SO_NETNS_COOKIE);
    namespace(one).is_ok_and(|found| namespace(other).is_ok_and(|other| other != found))
}

/// What a statement says of a Unix socket of ours.
fn place_of(meeting: i32) -> Sys<u64> {
    let cookie = cookie(meeting)?;
    Ok(place(unix::inode(meeting)?, cookie))
}

fn set_lock(held: i32, kind: i32, place: u64) -> Sys<()> {
    let (kind, whence) = (kind as i16, libc::SEEK_SET as i16);
    let lock = Lock { kind, whence, start: place as i64, len: 1, pid: 0 };
    // SAFETY: a struct flock64.
    unsafe { sys!(SYS_fcntl, held, libc::F_OFD_SETLK, &raw const lock) }.map(drop)
}

/// States that who holds the socket `held` is at the rendezvous with the Unix socket `meeting`.
pub fn state(held: i32, meeting: i32) -> Sys<()> {
    set_lock(held, libc::F_RDLCK, place_of(meeting)?)
}

/// Takes it back, while both are still open. (What the program itself has locked, if it ever did, lies elsewhere.)
pub fn take_back(held: i32, meeting: i32) {
    if let Ok(place) = place_of(meeting) {
        let _ = set_lock(held, libc::F_UNLCK, place);
    }
}

/// Does a holder of the socket `inode` state that it is at the other end of our Unix socket `meeting`? `EAGAIN`: that can't be said now, since
/// others hold so many locks, or change them, or since too much time went into such looks of late.
///
/// KERNEL: the first look for a while may take some 20 ms: the list is read alone, for which all processors are waited for.
pub fn is_stated(inode: u32, meeting: i32) -> Sys<bool> {
    let stated = Statement {
        device: device(meeting)?,
        inode: u64::from(inode),
        place: match diag::unix_far(unix::inode(meeting)?) {
            Err(Errno::ENOENT) => return Ok(false),
            found => found.map(|(far, cookie)| place(far, cookie))?,
        },
    };
    if was_seen(&stated) {
        return Ok(true);
    }
    let before = sys::now_ns();
    let owed = AGAIN_NS.load(Ordering::Relaxed).saturating_sub(before);
    if owed > PATIENCE_NS * PATIENCE_SHARE {
        return Err(Errno::EAGAIN);
    }
    let is_listed = is_listed(&stated);
    let spent = sys::now_ns().saturating_sub(before);
    // ORDER: Relaxed; two threads at once may spend more than one.
    AGAIN_NS.store(before + owed + spent.saturating_mul(PATIENCE_SHARE), Ordering::Relaxed);
    is_listed
}

/// Who holds this socket is at that rendezvous.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
struct Statement {
    device: (u32, u32),
    inode: u64,
    place: u64,
}

/// Statements that were passed as others were looked for, and when that look began: where many connections meet at a time, one look is one for all. One
/// is believed for a moment, since the number of a socket comes again after 2^32 others.
static SEEN: Seen = Seen {
    busy: AtomicU32::new(0),
    statements: UnsafeCell::new([(Statement { device: (0, 0), inode: 0, place: 0 }, 0); SEEN_MOST]),
};
const SEEN_MOST: usize = 1024;
const BELIEVED_NS: u64 = 500_000_000;

struct Seen {
    busy: AtomicU32,
    statements: UnsafeCell<[(Statement, u64); SEEN_MOST]>,
}

// SAFETY: the statements are used by the one thread that has set `busy`.
unsafe impl Sync for Seen {}

impl Seen {
    /// `None` while another thread is at it, or one that has never come back from there (a handler that jumped, a child by fork): then each looks for
    /// himself.
    fn with<T>(&self, act: impl FnOnce(&mut [(Statement, u64); SEEN_MOST]) -> T) -> Option<T> {
        // ORDER: Acquire; pairs with the store in `with` below.
        if self.busy.swap(1, Ordering::Acquire) != 0 {
            return None;
        }
        // SAFETY: nobody else has found `busy` clear since.
        let done = act(unsafe { &mut *self.statements.get() });
        // ORDER: Release; pairs with the swap in `with` above.
        self.busy.store(0, Ordering::Release);
        Some(done)
    }
}

fn slot(stated: &Statement) -> usize {
    // (The low half is a number of a rendezvous, the next one has the next.)
    (stated.place ^ stated.place >> 32) as usize % SEEN_MOST
}

/// Once: whoever asks again looks for himself.
fn was_seen(stated: &Statement) -> bool {
    let now = sys::now_ns();
    SEEN.with(|seen| {
        let (passed, at) = &mut seen[slot(stated)];
        let is_it = passed == stated && now < *at + BELIEVED_NS;
        if is_it {
            *at = 0;
        }
        is_it
    }) == Some(true)
}

/// When what was spent is made up for.
static AGAIN_NS: AtomicU64 = AtomicU64::new(0);

/// The device of all sockets.
fn device(socket: i32) -> Sys<(u32, u32)> {
    // SAFETY: zero is a valid struct stat.
    let mut stat: libc::stat = unsafe { core::mem::zeroed() };
    // SAFETY: a writable struct stat.
    unsafe { sys!(SYS_fstat, socket, &raw mut stat)? };
    Ok((libc::major(stat.st_dev), libc::minor(stat.st_dev)))
}

fn is_listed(stated: &Statement) -> Sys<bool> {
    // (Not on the stack, which may be small.)
    let mut piece = Scratch::new(LIST_PIECE_BYTES, 0u8).ok_or(Errno::ENOMEM)?;
    for _ in 0..LOOKS {
        let (mut found, began) = (false, sys::now_ns());
        let looked = fd::find_line_by(b"/proc/locks\0", LIST_BYTES_MOST, &mut piece, |line| {
            let passed = parse(line).filter(|passed| passed.device == stated.device);
            if let Some(passed) = passed {
                found |= passed == *stated;
                SEEN.with(|seen| seen[slot(&passed)] = (passed, began));
            }
            false
        })?;
        match looked {
            _ if found => return Ok(true),
            // KERNEL: it goes on at a line's number after each piece, so that a line may be passed over while others go.
            fd::Looked::Found | fd::Looked::Through { at_once: false } => {}
            fd::Looked::Through { at_once: true } => return Ok(false),
            fd::Looked::Part => break,
        }
    }
    Err(Errno::EAGAIN)
}

const LOOKS: u32 = 4;

/// A line `N: OFDLCK ADVISORY READ -1 MAJOR:MINOR:INODE START END`.
fn parse(line: &[u8]) -> Option<Statement> {
    let line = core::str::from_utf8(line).ok()?;
    let mut words = line.split_ascii_whitespace().skip(1);
    if words.next()? != "OFDLCK" {
        return None;
    }
    let mut file = words.nth(3)?.split(':');
    let mut hexadecimal = || u32::from_str_radix(file.next()?, 16).ok();
    let device = (hexadecimal()?, hexadecimal()?);
    let inode = file.next()?.parse().ok()?;
    let place = words.next()?.parse().ok()?;
    Some(Statement { device, inode, place })
}
