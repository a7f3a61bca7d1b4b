//! Parallel programs for C: the SPMD functions of `am.h`.
#![allow(non_snake_case, non_upper_case_globals)] // the names of the interface

use crate::am::{self, CName};
use crate::am_spawn::{self, Spawn};
use core::ffi::{CStr, c_char, c_int, c_void};
use ringlet_messages::active_message::invitation::new_secret;
use ringlet_messages::active_message::job::Job;
use ringlet_messages::active_message::{Bundle, Endpoint, Tag};
use std::ffi::CString;
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, Ordering};
use std::sync::{Mutex, OnceLock};
use std::time::Duration;

const OK: c_int = 0;
const NOT_INIT: c_int = 1;
const BAD_ARG: c_int = 2;
const RESOURCE: c_int = 3;
/// AM_PAR.
const PARALLEL: c_int = 1;

/// A process that does not end by itself when the job has ended is told to after so long, and ended after as long again.
const GRACE: Duration = Duration::from_secs(2);

static JOB: OnceLock<Job> = OnceLock::new();
static ON_EXIT: Mutex<Option<extern "C" fn(c_int)>> = Mutex::new(None);
/// The launcher has said that the job ends.
static ENDED: AtomicBool = AtomicBool::new(false);
/// This process ends: for that no second time.
static LEAVING: AtomicBool = AtomicBool::new(false);
/// What the program wants to be, by AMUDP_SPMDSetProc; negative if it does not care.
static WANTED_RANK: AtomicI32 = AtomicI32::new(-1);

/// What ends the process; the program may set another one.
#[unsafe(no_mangle)]
pub static AMUDP_SPMDkillmyprocess: AtomicPtr<()> =
    AtomicPtr::new(libc::_exit as unsafe extern "C" fn(c_int) -> ! as *mut ());

/// The job's bundle, to be polled while its processes are waited for.
static BUNDLE: OnceLock<Polled> = OnceLock::new();
struct Polled(*const Bundle);
// SAFETY: a handle, which the functions of `am` take from any thread.
unsafe impl Send for Polled {}
// SAFETY: a handle, which the functions of `am` take from any thread.
unsafe impl Sync for Polled {}

/// AMUDP_SPMDSetProc's, or WORKER_RANK: a number, or the name of the variable that has it.
fn wanted_rank() -> Result<Option<usize>, String> {
    let set = WANTED_RANK.load(Ordering::Relaxed);
    if set >= 0 {
        return Ok(Some(set as usize));
    }
    let Some(text) = am_spawn::setting("WORKER_RANK") else { return Ok(None) };
    let number = |text: &str| text.parse::<u16>().ok().map(usize::from);
    let found = number(&text).or_else(|| number(&std::env::var(&text).ok()?));
    found
        .map(Some)
        .ok_or_else(|| format!("WORKER_RANK={text} is neither a rank nor a variable that has one"))
}

extern "C" fn in_child() {
    if let Some(job) = JOB.get() {
        job.leave_to_parent();
    }
}

fn poll() {
    if let Some(bundle) = BUNDLE.get() {
        am::AM_Poll(bundle.0);
    }
}

/// Was this process started by `ringlet am-run`, or by a spawn function?
#[unsafe(no_mangle)]
pub extern "C" fn AMX_SPMDIsWorker(_argv: *mut *mut c_char) -> c_int {
    // (Once it is in its job its environment says nothing of that any more.)
    JOB.get().map_or_else(Job::is_expected, Job::is_launched) as c_int
}

#[unsafe(no_mangle)]
pub extern "C" fn AMX_SPMDStartup(
    argc: *mut c_int,
    argv: *mut *mut *mut c_char,
    depth: c_int,
    identity: *mut u64,
    eb: *mut *const Bundle,
    ea: *mut *const Endpoint,
) -> c_int {
    AMUDP_SPMDStartup(argc, argv, 0, depth, None, identity, eb, ea)
}

/// An endpoint for each process, whose translation tables hold all, by rank; each with a tag of its own.
#[unsafe(no_mangle)]
pub extern "C" fn AMUDP_SPMDStartup(
    argc: *mut c_int,
    argv: *mut *mut *mut c_char,
    processes: c_int,
    _depth: c_int,
    spawn: Option<Spawn>,
    identity: *mut u64,
    eb: *mut *const Bundle,
    ea: *mut *const Endpoint,
) -> c_int {
    if eb.is_null() || ea.is_null() || processes < 0 {
        return BAD_ARG;
    }
    let launched = AMX_SPMDIsWorker(null_mut()) != 0;
    // SAFETY: the arguments of main, as the program says.
    let arguments = unsafe { am_spawn::Arguments::new(argc, argv) };
    if !launched {
        match am_spawn::as_master(arguments, processes, spawn) {
            am_spawn::Master::JobOfOne => {}
            am_spawn::Master::Failed => return RESOURCE,
        }
    }
    if JOB.get().is_some() {
        return am::refused("AMUDP_SPMDStartup", "called twice");
    }
    let wanted = match wanted_rank() {
        Ok(wanted) => wanted,
        Err(why) => return am::refused("AMUDP_SPMDStartup", &why),
    };
    let job = match Job::from_environment(wanted, ended) {
        Ok(job) => JOB.get_or_init(|| job),
        Err(error) => return am::refused("AMUDP_SPMDStartup", &error.to_string()),
    };
    // SAFETY: the handler makes system calls only.
    unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
    if launched {
        am_spawn::strip(arguments, if processes == 0 { Some(job.size()) } else { None });
    }
    if wanted.is_some_and(|wanted| wanted != job.rank()) {
        return am::refused("AMUDP_SPMDSetProc", "the launcher has given another rank");
    }
    let _ = environment();
    let Ok(secret) = new_secret() else { return RESOURCE };
    // WHY none of its name's: any user sees that, in the list of Unix sockets.
    let (words, _) = secret.as_chunks::<8>();
    let tag = Tag::from_le_bytes(words[0]).clamp(1, Tag::MAX - 1);
    let (mut bundle, mut endpoint, mut name) = (null(), null(), CName::default());
    let made = [
        am::AM_Init(),
        am::AM_AllocateBundle(PARALLEL, &mut bundle),
        am::AM_AllocateEndpoint(bundle, &mut endpoint, &mut name),
        am::AM_SetTag(endpoint, tag),
        am::AM_SetNumTranslations(endpoint, job.size() as c_int),
    ];
    if let Some(failed) = made.into_iter().find(|result| *result != OK) {
        return failed;
    }
    let _ = BUNDLE.set(Polled(bundle));
    // SAFETY: made just now; endpoints are never deallocated.
    let ours = unsafe { am::shared(endpoint) };
    let tags = match job.introduce(&ours, tag, poll) {
        Ok(tags) => tags,
        Err(error) => {
            heed();
            return am::refused("AMUDP_SPMDStartup", &error.to_string());
        }
    };
    if !identity.is_null() {
        // SAFETY: valid for writing.
        unsafe { identity.write(tags[0]) };
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
pub extern "C" fn AMUDP_SPMDSetProc(rank: c_int) {
    WANTED_RANK.store(rank, Ordering::Relaxed);
}

#[unsafe(no_mangle)]
pub extern "C" fn AMX_SPMDBarrier() -> c_int {
    let Some(job) = JOB.get() else { return NOT_INIT };
    let met = job.gather(&[], poll);
    heed();
    met.map_or(RESOURCE, |_| OK)
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
    let met = job.gather(&ours, poll);
    heed();
    let Ok(parts) = met else { return RESOURCE };
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

/// By the thread that listens to the launcher: who polls, or waits for messages, is to notice.
fn ended(can_signal: bool) {
    // ORDER: Release; pairs with `heed`, after `Job::ended` is set.
    ENDED.store(true, Ordering::Release);
    am::interrupt();
    if can_signal {
        return;
    }
    // The launcher may be on another host: we do what it does with its own.
    for signal in [libc::SIGTERM, libc::SIGKILL] {
        std::thread::sleep(GRACE);
        // SAFETY: a signal to ourselves.
        unsafe { libc::kill(libc::getpid(), signal) };
    }
}

/// Ends this process if another one has ended the job. Outside of handlers.
#[inline(always)]
pub fn heed() {
    if ENDED.load(Ordering::Relaxed) {
        leave_too();
    }
}

#[cold]
fn leave_too() {
    if !LEAVING.swap(true, Ordering::AcqRel) {
        leave(JOB.get().and_then(Job::ended).unwrap_or(0));
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn AMUDP_SPMDHandleControlTraffic(served: *mut c_int) -> c_int {
    heed();
    if !served.is_null() {
        // SAFETY: valid for writing, as the program says.
        unsafe { served.write(0) };
    }
    OK
}

/// Ends the job: all its processes, as soon as they poll or wait.
#[unsafe(no_mangle)]
pub extern "C" fn AMX_SPMDExit(code: c_int) -> c_int {
    let Some(job) = JOB.get() else { return NOT_INIT };
    if LEAVING.swap(true, Ordering::AcqRel) {
        // From what it calls itself, or while another thread does it.
        return RESOURCE;
    }
    flush();
    job.end(code);
    leave(code)
}

fn flush() {
    // SAFETY: all streams of the program's.
    unsafe { libc::fflush(null_mut()) };
}

/// No handlers of atexit, as with AMUDP: they may come back here.
fn leave(code: c_int) -> ! {
    flush();
    let callback = *ON_EXIT.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    if let Some(callback) = callback {
        callback(code);
    }
    am::AM_Terminate();
    flush();
    let kill = AMUDP_SPMDkillmyprocess.load(Ordering::Relaxed);
    if !kill.is_null() {
        // SAFETY: `_exit`, or what the program has put there: a function of that type.
        unsafe { std::mem::transmute::<*mut (), unsafe extern "C" fn(c_int)>(kill)(code) };
    }
    // SAFETY: ends the process.
    unsafe { libc::_exit(code) }
}

/// The launcher's environment, with which this process began too unless the launcher says it.
fn environment() -> &'static [CString] {
    static ALL: OnceLock<Vec<CString>> = OnceLock::new();
    ALL.get_or_init(|| {
        let bytes = match JOB.get().and_then(Job::environment) {
            Some(said) => said.to_vec(),
            None => std::fs::read("/proc/self/environ").unwrap_or_default(),
        };
        bytes.split(|byte| *byte == 0).filter_map(|each| CString::new(each).ok()).collect()
    })
}

fn find(begins: &[u8], at: usize) -> *const c_char {
    if JOB.get().is_none() {
        return null();
    }
    let found = environment().iter().find(|each| each.as_bytes().starts_with(begins));
    // SAFETY: within the string, which is longer than `begins`, and stays.
    found.map_or(null(), |each| unsafe { each.as_ptr().add(at) })
}

#[unsafe(no_mangle)]
pub extern "C" fn AMX_SPMDgetenvMaster(name: *const c_char) -> *const c_char {
    if name.is_null() {
        return null();
    }
    // SAFETY: a C string, as the program says.
    let name = [unsafe { CStr::from_ptr(name) }.to_bytes(), b"="].concat();
    find(&name, name.len())
}

#[unsafe(no_mangle)]
pub extern "C" fn AMUDP_check_env_prefix(prefix: *const c_char) -> *const c_char {
    if prefix.is_null() {
        return null();
    }
    // SAFETY: a C string, as the program says.
    find(unsafe { CStr::from_ptr(prefix) }.to_bytes(), 0)
}
