//! The functions that ours stand in front of, found once.

use crate::objects;
use core::ffi::CStr;
use core::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

/// One of them.
pub struct Next {
    name: &'static CStr,
    found: AtomicPtr<libc::c_void>,
    /// In a library that the program has loaded; and how many had been unloaded then, plus one.
    later: AtomicPtr<libc::c_void>,
    at_unloaded: AtomicU64,
}

impl Next {
    pub const fn new(name: &'static CStr) -> Next {
        let none = core::ptr::null_mut();
        Next {
            name,
            found: AtomicPtr::new(none),
            later: AtomicPtr::new(none),
            at_unloaded: AtomicU64::new(0),
        }
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
        if self.at_unloaded.load(Ordering::Relaxed) == 0
            && let Some(found) = self.behind_us()
        {
            self.found.store(found as *mut libc::c_void, Ordering::Relaxed);
            return found as *mut libc::c_void;
        }
        // A library that the program has loaded may be unloaded again.
        let unloaded = objects::unloaded();
        // ORDER: Acquire; pairs with `find` (Release): what is found is at least as new.
        if self.at_unloaded.load(Ordering::Acquire) != unloaded + 1 {
            let found = self.loaded_later().unwrap_or(0) as *mut libc::c_void;
            if found.is_null() {
                return found;
            }
            self.later.store(found, Ordering::Relaxed);
            // ORDER: Release; pairs with `find` (Acquire).
            self.at_unloaded.store(unloaded + 1, Ordering::Release);
        }
        self.later.load(Ordering::Relaxed)
    }

    /// Not one of libc's: liburing's, perhaps loaded by the program. (What stands in front of us has come to us.)
    fn loaded_later(&self) -> Option<usize> {
        let (mut found, mut behind_us) = (None, false);
        let ours = objects::ours()?;
        objects::each_loaded(|loaded| {
            if behind_us && found.is_none() {
                found = loaded.object.find(self.name);
            }
            behind_us |= ours.is(&loaded.object);
        });
        found
    }

    fn behind_us(&self) -> Option<usize> {
        objects::behind_us().find_map(|object| object.find(self.name))
    }
}

/// What our function of this name goes on to; null: nothing, or we have none.
pub fn address_of(name: &CStr) -> *mut libc::c_void {
    let next = all().iter().find(|next| next.name == name);
    next.map_or(core::ptr::null_mut(), Next::address)
}

fn all() -> &'static [Next] {
    unsafe extern "C" {
        /// The linker's names for where the section of all `Next`s begins and ends.
        #[link_name = "__start_ringlet_next"]
        static FIRST: u8;
        #[link_name = "__stop_ringlet_next"]
        static END: u8;
    }
    let (first, end) = (&raw const FIRST as usize, &raw const END as usize);
    // SAFETY: only `next_of` puts anything there: statics of this type, one after the other.
    unsafe { core::slice::from_raw_parts(first as *const Next, (end - first) / size_of::<Next>()) }
}

/// Finds all that lie behind us, for a process that forks again and again: each child would look for what it needs itself, in pages of every
/// library before libc.
pub fn find_all() {
    for next in all().iter().filter(|next| next.found.load(Ordering::Relaxed).is_null()) {
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
