//! Before main: reads the configuration and sets ringlet up.

use crate::musl;
use core::cell::UnsafeCell;
use core::ffi::CStr;
use ringlet::config::{Config, FILE_MAX_BYTES, NotRead};
use ringlet::socket;
use ringlet_linux::sys;

/// Under a tighter RLIMIT_AS ringlet stays off.
const ADDRESS_SPACE_MIN_BYTES: u64 = 1 << 30;

/// For a file of settings. (Not on the stack: where there is no such file, none of it is touched.)
struct Room(UnsafeCell<[u8; FILE_MAX_BYTES + 1]>);

// SAFETY: only `start` uses it.
unsafe impl Sync for Room {}

static ROOM: Room = Room(UnsafeCell::new([0; FILE_MAX_BYTES + 1]));

#[used]
#[unsafe(link_section = ".init_array")]
static START: extern "C" fn() = start;

extern "C" fn start() {
    musl::look();
    let mut wrong = 0usize;
    // SAFETY: the loader calls this once, before any other thread is there.
    let room = unsafe { &mut *ROOM.0.get() };
    let config = Config::load(&environment, &mut read_file, room, &mut |_, _| wrong += 1);
    if !config.enabled {
        return;
    }
    if sys::address_space_limit() < ADDRESS_SPACE_MIN_BYTES {
        // The tables and segments would take what the program needs.
        return;
    }
    ringlet::waiting::sleep::start(crate::cancellation::SLEEP);
    ringlet::thread::told_by(crate::next_of!(c"__libc_single_threaded").address() as usize);
    let started = socket::start(config);
    if started.is_ok() {
        crate::processes::watch_forks();
    }
    if wrong > 0 || started.is_err() {
        socket::note(
            &config.log,
            if wrong > 0 {
                b"ringlet: the configuration has errors; `ringlet config` tells which\n"
            } else {
                b"ringlet: out of memory at start; everything stays on the kernel\n"
            },
        );
    }
}

/// A program with more rights than its caller (AT_SECURE) takes nothing from him: neither settings nor the names of files. Only the machine's
/// own file counts.
fn environment(name: &str) -> Option<&'static [u8]> {
    // SAFETY: no memory is passed.
    if unsafe { libc::getauxval(libc::AT_SECURE) } != 0 {
        return None;
    }
    let mut zero_ended = [0u8; 64];
    zero_ended.get_mut(..name.len())?.copy_from_slice(name.as_bytes());
    zero_ended.get(name.len())?;
    // SAFETY: a C string; before main nobody changes the environment, and what is read is copied before main begins.
    let value = unsafe { libc::getenv(zero_ended.as_ptr().cast()) };
    // SAFETY: getenv returns a C string or null.
    (!value.is_null()).then(|| unsafe { CStr::from_ptr(value) }.to_bytes())
}

fn read_file(path: &CStr, buffer: &mut [u8]) -> Result<usize, NotRead> {
    match sys::read_file(path, buffer) {
        Ok(n) => Ok(n),
        Err(sys::Errno::ENOENT | sys::Errno::ENOTDIR) => Err(NotRead::Missing),
        Err(_) => Err(NotRead::Unreadable),
    }
}
