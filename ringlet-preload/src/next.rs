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
        let found = objects::behind_us().find_map(|object| object.find(self.name));
        // Not one of libc's: liburing's, perhaps loaded by the program.
        let found = found.or_else(|| {
            let mut found = None;
            let ours = objects::ours();
            objects::each_loaded(|loaded| {
                if found.is_none() && !ours.is_some_and(|ours| ours.is(&loaded.object)) {
                    found = loaded.object.find(self.name);
                }
            });
            found
        });
        let found = found.unwrap_or(0) as *mut libc::c_void;
        self.found.store(found, Ordering::Relaxed);
        found
    }
}

/// Calls the next function of a name with the given signature; a missing one (an older libc) fails with ENOSYS.
#[macro_export]
macro_rules! next {
    ($name:literal, fn($($type:ty),* $(,)?) -> $result:ty, $($arg:expr),* $(,)?) => {{
        static NEXT: $crate::next::Next = $crate::next::Next::new($name);
        let address = NEXT.address();
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
                function($($arg),*)
            }
        }
    }};
}
