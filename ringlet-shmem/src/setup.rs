//! Beginning, end, and what there is to ask.

use std::ffi::{c_char, c_int, c_void};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use crate::job::{VENDOR, begin, begun, give_up, job, world};
use crate::wait;

const SINGLE: c_int = 0;
const MULTIPLE: c_int = 3;

const MAJOR: c_int = 1;
const MINOR: c_int = 5;

/// The program is through with it, or ends without.
static IS_OVER: AtomicBool = AtomicBool::new(false);
/// The program has called `shmem_finalize`, which has returned.
static HAS_SAID_SO: AtomicBool = AtomicBool::new(false);
/// Which this one is.
static PROCESS: AtomicU32 = AtomicU32::new(0);

#[unsafe(no_mangle)]
extern "C" fn shmem_init() {
    shmem_init_thread(SINGLE, std::ptr::null_mut());
}

/// All threads may call all functions, whatever was asked for.
#[unsafe(no_mangle)]
extern "C" fn shmem_init_thread(wanted: c_int, provided: *mut c_int) -> c_int {
    let is_first = begun().is_none();
    if is_first {
        begin(wanted.clamp(SINGLE, MULTIPLE));
        at_exit();
    }
    if !provided.is_null() {
        // SAFETY: to be written, as the program says.
        unsafe { provided.write(job().threads) };
    }
    0
}

#[unsafe(no_mangle)]
extern "C" fn start_pes(_pes: c_int) {
    shmem_init();
}

#[unsafe(no_mangle)]
extern "C" fn shmem_finalize() {
    finalize();
    HAS_SAID_SO.store(true, Ordering::Relaxed);
}

fn finalize() {
    if !IS_OVER.swap(true, Ordering::Relaxed) {
        let job = job();
        world(job).sync();
        job.leave();
    }
}

/// For others, of whom nobody may be there any more. (Where the program ends without a word a thread of it may be about to.)
pub fn refuse_to_wait() {
    if HAS_SAID_SO.load(Ordering::Relaxed) {
        give_up("it waits for others behind shmem_finalize");
    }
}

/// A program that ends well without `shmem_finalize` has called it by that. (One that ends with another status is ended by the launcher, with
/// all others.)
fn at_exit() {
    PROCESS.store(std::process::id(), Ordering::Relaxed);
    #[cfg(target_env = "gnu")]
    {
        unsafe extern "C" {
            fn on_exit(act: extern "C" fn(c_int, *mut c_void), argument: *mut c_void) -> c_int;
        }
        extern "C" fn end(status: c_int, _argument: *mut c_void) {
            // (Not a child's end, which is no PE.)
            let is_ours = std::process::id() == PROCESS.load(Ordering::Relaxed);
            if status == 0 && is_ours {
                finalize();
            }
        }
        // SAFETY: a function of this library, which is not unloaded (build.rs).
        unsafe { on_exit(end, std::ptr::null_mut()) };
    }
}

/// Ends all PEs, with this status.
#[unsafe(no_mangle)]
extern "C" fn shmem_global_exit(status: c_int) -> ! {
    IS_OVER.store(true, Ordering::Relaxed);
    job().tell(&status.to_string());
    // SAFETY: ends the program as its own call would, with what it has still to write.
    unsafe { libc::exit(status) }
}

#[unsafe(no_mangle)]
extern "C" fn shmem_my_pe() -> c_int {
    job().me as c_int
}

#[unsafe(no_mangle)]
extern "C" fn shmem_n_pes() -> c_int {
    job().size as c_int
}

#[unsafe(no_mangle)]
extern "C" fn shmem_query_thread(provided: *mut c_int) {
    // SAFETY: to be written, as the program says.
    unsafe { provided.write(job().threads) };
}

#[unsafe(no_mangle)]
extern "C" fn shmem_info_get_version(major: *mut c_int, minor: *mut c_int) {
    // SAFETY: both to be written, as the program says.
    unsafe {
        major.write(MAJOR);
        minor.write(MINOR);
    }
}

#[unsafe(no_mangle)]
extern "C" fn shmem_info_get_name(name: *mut c_char) {
    let bytes = VENDOR.to_bytes_with_nul();
    // SAFETY: room for SHMEM_MAX_NAME_LEN bytes, as the program says.
    unsafe { name.copy_from_nonoverlapping(bytes.as_ptr().cast(), bytes.len()) };
}

#[unsafe(no_mangle)]
extern "C" fn shmem_pe_accessible(pe: c_int) -> c_int {
    usize::try_from(pe).is_ok_and(|pe| pe < job().size).into()
}

#[unsafe(no_mangle)]
extern "C" fn shmem_addr_accessible(address: *const u8, pe: c_int) -> c_int {
    (!job().pointer(address, pe as usize).is_null()).into()
}

#[unsafe(no_mangle)]
extern "C" fn shmem_ptr(address: *const u8, pe: c_int) -> *mut u8 {
    let (job, pe) = (job(), pe as usize);
    let found = job.pointer(address, pe);
    if pe != job.me && !found.is_null() {
        wait::is_pointed_at(job, pe);
    }
    found
}

#[unsafe(no_mangle)]
extern "C" fn shmem_quiet() {
    job().quiet();
}

/// (Programs have been written that take it for a barrier of the processor's: so it is one.)
#[unsafe(no_mangle)]
extern "C" fn shmem_fence() {
    job().quiet();
}

#[unsafe(no_mangle)]
extern "C" fn shmem_pcontrol(_level: c_int) {}
