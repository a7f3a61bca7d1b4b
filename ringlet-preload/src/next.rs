//! The functions that ours stand in front of, found once by dlsym.

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

    #[cold]
    fn find(&self) -> *mut libc::c_void {
        // SAFETY: a C string; RTLD_NEXT is the library after us.
        let found = unsafe { libc::dlsym(libc::RTLD_NEXT, self.name.as_ptr()) };
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
