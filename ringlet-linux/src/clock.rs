//! The clocks, as the kernel has them: a library in front of libc's clock_gettime may stop or shift what that tells, and a wait
//! whose end is reckoned by it would never end. The kernel's page of functions (vDSO) spares the system call.

use crate::elf::{Entry, Object};
use crate::sys::sys;
use core::sync::atomic::{AtomicUsize, Ordering};
use libc::{c_int, timespec};

#[cfg(target_arch = "x86_64")]
const NAME: &core::ffi::CStr = c"__vdso_clock_gettime";
#[cfg(target_arch = "aarch64")]
const NAME: &core::ffi::CStr = c"__kernel_clock_gettime";

type ClockGettime = unsafe extern "C" fn(c_int, *mut timespec) -> c_int;

/// The kernel's function, or ours where it has none; 0 before it was looked for.
static FOUND: AtomicUsize = AtomicUsize::new(0);

unsafe extern "C" fn by_system_call(clock: c_int, to: *mut timespec) -> c_int {
    // SAFETY: as the caller's.
    unsafe { sys!(SYS_clock_gettime, clock, to) }.map_or(-1, |_| 0)
}

#[cold]
fn look_for_it() -> usize {
    // SAFETY: only asks what the kernel has told at the start.
    let page = unsafe { libc::getauxval(libc::AT_SYSINFO_EHDR) } as usize;
    // SAFETY: the kernel's page is a library, mapped for good.
    let found = if page == 0 { None } else { unsafe { in_library(page) } };
    let found = found.unwrap_or(by_system_call as *const () as usize);
    FOUND.store(found, Ordering::Relaxed);
    found
}

/// # Safety
/// A library's header lies there, and stays.
unsafe fn in_library(base: usize) -> Option<usize> {
    // SAFETY: by contract; the header tells where its table of segments is, and that where its dynamic section is.
    unsafe {
        let segments = crate::elf::segments(base);
        let part = segments.iter().find(|segment| segment.p_type == libc::PT_DYNAMIC)?;
        Object::new(base, (base + part.p_vaddr as usize) as *const Entry)?.find(NAME)
    }
}

/// Nanoseconds of a clock.
#[inline]
pub fn ns(clock: c_int) -> u64 {
    let found = FOUND.load(Ordering::Relaxed);
    let found = if found != 0 { found } else { look_for_it() };
    let mut time = timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: a function of this signature; `time` is valid for writing.
    unsafe {
        let function: ClockGettime = core::mem::transmute(found);
        function(clock, &mut time);
    }
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}
