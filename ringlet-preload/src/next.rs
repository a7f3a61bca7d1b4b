//! The functions that ours stand in front of, found once.

use crate::objects;
use core::ffi::CStr;
use core::sync::atomic::{AtomicPtr, Ordering};

/// One of them.
pub struct Next {
    name: &'static CStr,
    found: AtomicPtr<libc::c_void>,
}

impl Next {
    pub const fn new(name: &'static CStr) -> Next {
        Next { name, found: AtomicPtr::new(core::ptr::null_mut()) }
    }

    /// Its address; null if no later library has it.
    #[inline(always)]
    pub fn address(&self) -> *mut libc::c_void {
        let found = self.found.load(Ordering::Relaxed);
        if !found.is_null() { found } else { self.find() }
    }

    /// As dlsym(RTLD_NEXT) would, without the loader's lock.
    #[cold]
    fn find(&self) -> *mut libc::c_void {
        let found = self.behind_us();
        // Not one of libc's: liburing's, perhaps loaded by the program. (What stands in front of us has come to us.)
        let found = found.or_else(|| {
            let (mut found, mut behind_us) = (None, false);
            let ours = objects::ours()?;
            objects::each_loaded(|loaded| {
                if behind_us && found.is_none() {
                    found = loaded.object.find(self.name);
                }
                behind_us |= ours.is(&loaded.object);
            });
            found
        });
        let found = found.unwrap_or(0) as *mut libc::c_void;
        self.found.store(found, Ordering::Relaxed);
        found
    }

    fn behind_us(&self) -> Option<usize> {
        objects::behind_us().find_map(|object| object.find(self.name))
    }
}

/// Finds all that lie behind us, for a process that forks again and again: each child would look for what it needs itself, in pages of every
/// library before libc.
pub fn find_all() {
    unsafe extern "C" {
        /// The linker's names for where the section of all `Next`s begins and ends.
        #[link_name = "__start_ringlet_next"]
        static FIRST: u8;
        #[link_name = "__stop_ringlet_next"]
        static END: u8;
    }
    let (first, end) = (&raw const FIRST as usize, &raw const END as usize);
    // SAFETY: only `next_of` puts anything there: statics of this type, one after the other.
    let all = unsafe {
        core::slice::from_raw_parts(first as *const Next, (end - first) / size_of::<Next>())
    };
    for next in all.iter().filter(|next| next.found.load(Ordering::Relaxed).is_null()) {
        if let Some(found) = next.behind_us() {
            next.found.store(found as *mut libc::c_void, Ordering::Relaxed);
        }
    }
}

/// The next function of this name.
#[macro_export]
macro_rules! next_of {
    ($name:expr) => {{
        #[unsafe(link_section = "ringlet_next")]
        static NEXT: $crate::next::Next = $crate::next::Next::new($name);
        &NEXT
    }};
}

/// Calls the next function of a name with the given signature; a missing one (an older libc) fails with ENOSYS. Who polls all the time hears that
/// a call is over (`ringlet::socket::asked`).
#[macro_export]
macro_rules! next {
    ($name:expr, fn($($type:ty),* $(,)?) -> $result:ty, $($arg:expr),* $(,)?) => {{
        let address = $crate::next_of!($name).address();
        if address.is_null() {
            $crate::set_errno(libc::ENOSYS);
            -1isize as $result
        } else {
            // SAFETY: the address is that of the C function of this name, whose signature this is; the arguments are the
            // program's own, passed on.
            #[allow(unused_unsafe, clippy::macro_metavars_in_unsafe)]
            unsafe {
                let function: unsafe extern "C" fn($($type),*) -> $result =
                    core::mem::transmute(address);
                let done = function($($arg),*);
                ringlet::socket::asked::called();
                done
            }
        }
    }};
}
