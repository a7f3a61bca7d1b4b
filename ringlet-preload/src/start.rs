//! Before main: reads the configuration and sets ringlet up.

use crate::musl;
use core::cell::UnsafeCell;
use core::ffi::{CStr, c_char};
use ringlet::config::{Config, FILE_MAX_BYTES, NotRead};
use ringlet::socket;
use ringlet_linux::sys;

/// For a file of settings. (Not on the stack: where there is no such file, none of it is touched.)
struct Room(UnsafeCell<[u8; FILE_MAX_BYTES + 1]>);

// SAFETY: only `start` uses it.
unsafe impl Sync for Room {}

static ROOM: Room = Room(UnsafeCell::new([0; FILE_MAX_BYTES + 1]));

/// Behind all variables that are zero at first, so that the file has those too (`together.ld`).
#[used]
#[unsafe(link_section = ".data.ringlet_in_file")]
static IN_FILE: u8 = 1;

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
    ringlet::waiting::sleep::start(crate::cancellation::SLEEP);
    ringlet::thread::told_by(crate::next_of!(c"__libc_single_threaded").address() as usize);
    socket::start_when_needed(config, |config, begun| {
        if begun.is_err() {
            let text = b"ringlet: out of memory at start; everything stays on the kernel\n";
            socket::note(&config.log, text);
        }
    });
    crate::processes::watch_forks();
    if wrong > 0 {
        let text = b"ringlet: the configuration has errors; `ringlet config` tells which\n";
        socket::note(&config.log, text);
    }
}

unsafe extern "C" {
    static environ: *const *const c_char;
}

/// A program with more rights than its caller (AT_SECURE) takes nothing from him: neither settings nor the names of files. Only the machine's
/// own file counts.
fn environment(name: &str) -> Option<&'static [u8]> {
    // SAFETY: no memory is passed.
    if unsafe { libc::getauxval(libc::AT_SECURE) } != 0 {
        return None;
    }
    // (Not by getenv, for which alone pages of libc's would have to be mapped.)
    // SAFETY: libc's list of C strings, which a null ends; before main nobody changes it, and what is read is copied before main begins.
    unsafe {
        let mut next = environ;
        while !next.is_null() && !(*next).is_null() {
            let entry = (*next).cast::<u8>();
            let same = |(at, byte): (usize, u8)| *entry.add(at) == byte;
            // (Up to the first that differs, which the end does.)
            if name.bytes().enumerate().all(same) && *entry.add(name.len()) == b'=' {
                return Some(CStr::from_ptr(entry.add(name.len() + 1).cast()).to_bytes());
            }
            next = next.add(1);
        }
    }
    None
}

fn read_file(path: &CStr, buffer: &mut [u8]) -> Result<usize, NotRead> {
    match sys::read_file(path, buffer) {
        Ok(n) => Ok(n),
        Err(sys::Errno::ENOENT | sys::Errno::ENOTDIR) => Err(NotRead::Missing),
        Err(_) => Err(NotRead::Unreadable),
    }
}
