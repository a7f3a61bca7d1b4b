//! io_urings: what the program hands to the kernel through them happens behind our back.
//!
//! A ring can do nothing with a connection that is not named to it. So one that is made by liburing's functions, which pass through us, is let
//! be as long as each operation that is handed over is known to concern files only. The first other one, looked at before the kernel gets it,
//! moves the process's connections to the kernel for good, and so does a ring that we do not see into: one that the kernel polls by itself, or
//! that the program's own system calls work with.

use crate::data::is_nowhere;
use libc::c_int;
use ringlet::socket::table::lookup;
use ringlet::socket::{process, rings};

/// liburing's `struct io_uring`, as far as it is the same in all its versions.
#[repr(C)]
pub struct Ring {
    _positions: [usize; 2],
    mask: *const u32,
    _words: [usize; 4],
    entries: *const u8,
    /// Those that the program has filled and not handed over: from here, up to there.
    from: u32,
    to: u32,
    _rest: [usize; 4],
    _completions: [usize; 11],
    flags: u32,
    fd: c_int,
}

const _: () = assert!(core::mem::offset_of!(Ring, entries) == 56);
const _: () = assert!(core::mem::offset_of!(Ring, flags) == 192);

/// linux/io_uring.h: `struct io_uring_params`, up to the flags.
#[repr(C)]
pub struct Parameters {
    _entries: [u32; 2],
    flags: u32,
}

/// `struct io_uring_sqe`, up to the descriptor; so long is one, or twice that.
#[repr(C)]
struct Operation {
    code: u8,
    flags: u8,
    _priority: u16,
    fd: c_int,
}

const OPERATION_BYTES: usize = 64;
const SETUP_SQE128: u32 = 1 << 10;
/// Rings that only what is handed over concerns: all that is known, but those that the kernel polls (SQPOLL), and whose operations differ in length.
const SETUP_SEEN: u32 = ((1 << 17) - 1) & !(1 << 1);
/// More operations than a ring has (32,768).
const OPERATIONS_MAX: u32 = 1 << 16;
const FLAG_FIXED_FILE: u8 = 1;

/// What operations are about.
#[derive(PartialEq, Eq)]
enum About {
    /// Nothing, or paths.
    NoDescriptor,
    /// The one they name.
    Descriptor,
    /// Perhaps sockets, perhaps others than the one they name.
    Unknown,
}

fn about(code: u8) -> About {
    match code {
        // NOP, POLL_REMOVE, TIMEOUT, TIMEOUT_REMOVE, ASYNC_CANCEL, LINK_TIMEOUT, OPENAT, STATX, MADVISE, OPENAT2, PROVIDE_BUFFERS,
        // REMOVE_BUFFERS, RENAMEAT, UNLINKAT, MKDIRAT, SYMLINKAT, LINKAT, SETXATTR, GETXATTR, WAITID, FUTEX_WAIT, FUTEX_WAKE, FUTEX_WAITV
        0 | 7 | 11 | 12 | 14 | 15 | 18 | 21 | 25 | 28 | 31 | 32 | 35..=39 | 42 | 44 | 50..=53 => {
            About::NoDescriptor
        }
        // READV, WRITEV, FSYNC, READ_FIXED, WRITE_FIXED, POLL_ADD, SYNC_FILE_RANGE, FALLOCATE, CLOSE, READ, WRITE, FADVISE, FSETXATTR, FGETXATTR,
        // READ_MULTISHOT, FTRUNCATE
        1..=6 | 8 | 17 | 19 | 22..=24 | 41 | 43 | 49 | 55 => About::Descriptor,
        _ => About::Unknown,
    }
}

/// Is it a descriptor that the kernel alone has to do with? (A socket that nobody follows is never moved. Whose numbers we know is asked of nobody: a
/// program hands over millions of operations.)
fn is_kernels(fd: c_int) -> bool {
    lookup(fd).is_none()
}

/// liburing makes a ring by `make`, with these flags.
///
/// # Safety
/// liburing's ring, which `make` fills.
pub unsafe fn made(ring: *const Ring, flags: u32, make: impl FnOnce() -> c_int) -> c_int {
    if flags & !SETUP_SEEN != 0 {
        process::uses_io_uring();
    }
    rings::begins();
    let made = make();
    // SAFETY: filled now, if it was made.
    let fd = (made >= 0).then(|| unsafe { (*ring).fd });
    if !rings::made(fd) {
        process::uses_io_uring();
    }
    made
}

/// The same, with parameters.
///
/// # Safety
/// As `made`, and the program's parameters.
pub unsafe fn made_with(
    ring: *const Ring,
    parameters: *const Parameters,
    make: impl FnOnce() -> c_int,
) -> c_int {
    // (A bad one is liburing's affair.)
    // SAFETY: the program's.
    let flags = if is_nowhere(parameters) { 0 } else { unsafe { (*parameters).flags } };
    // SAFETY: asks for liburing's ring, which the caller vouches for.
    unsafe { made(ring, flags, make) }
}

/// liburing is about to end a ring, and to close its descriptor.
///
/// # Safety
/// liburing's ring.
pub unsafe fn ends(ring: *const Ring) {
    if !is_nowhere(ring) {
        // SAFETY: liburing's.
        rings::ends(unsafe { (*ring).fd });
    }
}

/// liburing is about to hand over what the program has filled.
///
/// # Safety
/// liburing's ring.
pub unsafe fn hands_over(ring: *const Ring) {
    if rings::are_kernels() || is_nowhere(ring) {
        return;
    }
    // SAFETY: liburing's ring; its entries are mapped as long as it is.
    let all_seen = unsafe {
        let Ring { mask, entries, from, to, flags, .. } = *ring;
        let bytes = OPERATION_BYTES << u32::from(flags & SETUP_SQE128 != 0);
        let count = to.wrapping_sub(from);
        count <= OPERATIONS_MAX
            && flags & !SETUP_SEEN == 0
            && (0..count).all(|nth| {
                let at = (from.wrapping_add(nth) & *mask) as usize;
                let operation = &*entries.add(at * bytes).cast::<Operation>();
                match about(operation.code) {
                    About::NoDescriptor => true,
                    // (What is registered was looked at then.)
                    About::Descriptor => {
                        operation.flags & FLAG_FIXED_FILE != 0 || is_kernels(operation.fd)
                    }
                    About::Unknown => false,
                }
            })
    };
    if !all_seen {
        process::uses_io_uring();
    }
}

/// The program is about to enter a ring by its descriptor, to hand over so many operations.
pub fn enters(count: u32) {
    if count != 0 {
        process::uses_io_uring();
    }
}

/// It is about to register files.
///
/// # Safety
/// The program's list.
pub unsafe fn registers(files: *const c_int, count: u32) {
    if rings::are_kernels() || is_nowhere(files) {
        return;
    }
    // SAFETY: by contract.
    let files = unsafe { core::slice::from_raw_parts(files, count as usize) };
    // (A place that is left empty, or as it is, is below zero.)
    if !files.iter().all(|&file| file < 0 || is_kernels(file)) {
        process::uses_io_uring();
    }
}

/// It is about to register something by a call of its own.
pub fn registers_by_call(what: u32) {
    // REGISTER_FILES, REGISTER_FILES_UPDATE, REGISTER_FILES2, REGISTER_FILES_UPDATE2; the highest bit tells how the ring is named.
    if matches!(what & !(1 << 31), 2 | 6 | 13 | 14) {
        process::uses_io_uring();
    }
}
