//! Parallel programs for C: the AMX_SPMD functions of `am.h`.
#![allow(non_snake_case)] // the names of the interface

use crate::am::{self, CName};
use core::ffi::{c_char, c_int, c_void};
use ringlet_messages::active_message::job::Job;
use ringlet_messages::active_message::{Bundle, Endpoint};
use std::ptr::null;
use std::sync::{Mutex, OnceLock};

const OK: c_int = 0;
const NOT_INIT: c_int = 1;
const BAD_ARG: c_int = 2;
const RESOURCE: c_int = 3;
/// AM_PAR.
const PARALLEL: c_int = 1;

static JOB: OnceLock<Job> = OnceLock::new();
static ON_EXIT: Mutex<Option<extern "C" fn(c_int)>> = Mutex::new(None);

/// The job's bundle, to be polled while its processes are waited for.
static BUNDLE: OnceLock<Polled> = OnceLock::new();
struct Polled(*const Bundle);
// SAFETY: a handle, which the functions of `am` take from any thread.
unsafe impl Send for Polled {}
// SAFETY: as above.
unsafe impl Sync for Polled {}

fn poll() {
    if let Some(bundle) = BUNDLE.get() {
        am::AM_Poll(bundle.0);
    }
}

/// An endpoint for each process, whose translation tables hold all, by rank; each with a tag of its own.
#[unsafe(no_mangle)]
pub extern "C" fn AMX_SPMDStartup(
    _argc: *mut c_int,
    _argv: *mut *mut *mut c_char,
    _depth: c_int,
    identity: *mut u64,
    eb: *mut *const Bundle,
    ea: *mut *const Endpoint,
) -> c_int {
    if eb.is_null() || ea.is_null() {
        return BAD_ARG;
    }
    let job = match Job::from_environment() {
        Ok(job) => JOB.get_or_init(|| job),
        Err(_) => return RESOURCE,
    };
    let (mut bundle, mut endpoint, mut name) = (null(), null(), CName::default());
    let made = [
        am::AM_Init(),
        am::AM_AllocateBundle(PARALLEL, &mut bundle),
        am::AM_AllocateEndpoint(bundle, &mut endpoint, &mut name),
        // Chosen at random with the process's name.
        am::AM_SetTag(endpoint, name.tag()),
    ];
    if let Some(failed) = made.into_iter().find(|result| *result != OK) {
        return failed;
    }
    let _ = BUNDLE.set(Polled(bundle));
    let Ok(names) = job.gather(&name.to_bytes(), poll) else { return RESOURCE };
    for (rank, bytes) in names.iter().enumerate() {
        let Some(name) = CName::from_bytes(bytes) else { return RESOURCE };
        if rank == 0 && !identity.is_null() {
            // SAFETY: valid for writing.
            unsafe { identity.write(name.tag()) };
        }
        let result = am::AM_Map(endpoint, rank as c_int, name, name.tag());
        if result != OK {
            return result;
        }
    }
    // SAFETY: valid for writing, as the program says.
    unsafe {
        eb.write(bundle);
        ea.write(endpoint);
    }
    OK
}

#[unsafe(no_mangle)]
pub extern "C" fn AMX_SPMDMyProc() -> c_int {
    JOB.get().map_or(0, |job| job.rank() as c_int)
}

#[unsafe(no_mangle)]
pub extern "C" fn AMX_SPMDNumProcs() -> c_int {
    JOB.get().map_or(1, |job| job.size() as c_int)
}

#[unsafe(no_mangle)]
pub extern "C" fn AMX_SPMDBarrier() -> c_int {
    let Some(job) = JOB.get() else { return NOT_INIT };
    job.gather(&[], poll).map_or(RESOURCE, |_| OK)
}

#[unsafe(no_mangle)]
pub extern "C" fn AMX_SPMDAllGather(
    source: *const c_void,
    dest: *mut c_void,
    bytes: usize,
) -> c_int {
    let Some(job) = JOB.get() else { return NOT_INIT };
    if bytes > 0 && (source.is_null() || dest.is_null()) {
        return BAD_ARG;
    }
    let ours = match bytes {
        0 => Vec::new(),
        // SAFETY: so many bytes, as the program says.
        _ => unsafe { std::slice::from_raw_parts(source.cast::<u8>(), bytes) }.to_vec(),
    };
    let Ok(parts) = job.gather(&ours, poll) else { return RESOURCE };
    if parts.iter().any(|part| part.len() != bytes) {
        return BAD_ARG; // not the same length everywhere
    }
    for (rank, part) in parts.iter().enumerate() {
        // SAFETY: room for the bytes of all, as the program says.
        unsafe { dest.cast::<u8>().add(rank * bytes).copy_from(part.as_ptr(), bytes) };
    }
    OK
}

#[unsafe(no_mangle)]
pub extern "C" fn AMX_SPMDSetExitCallback(callback: Option<extern "C" fn(c_int)>) -> c_int {
    *ON_EXIT.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = callback;
    OK
}

/// The launcher ends the others when a process ends with another code than 0.
#[unsafe(no_mangle)]
pub extern "C" fn AMX_SPMDExit(code: c_int) -> c_int {
    let callback = *ON_EXIT.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    if let Some(callback) = callback {
        callback(code);
    }
    am::AM_Terminate();
    std::process::exit(code)
}
