//! A keeper that is killed can tell nobody; so the kernel does, in a word that all programs see, as it does of who has died with a robust futex.
//!
//! WHY not the socket: who looks at a word costs a check and a lock nothing, and a look at the socket is a system call.

use std::ffi::c_long;
use std::marker::PhantomData;
use std::ptr::null;

use ringlet_core::sync::Ordering;
use ringlet_linux::futex;

use super::cluster::ring;
use crate::memory::Mapping;
use crate::protocol::page;

/// KERNEL: `struct robust_list_head`, with its only entry behind it: at so many bytes from that is the word.
#[repr(C)]
struct List {
    first: *const Entry,
    offset: c_long,
    pending: *const Entry,
    entry: Entry,
}

#[repr(C)]
struct Entry {
    next: *const List,
}

const HEAD_BYTES: usize = 24;

/// As long as it is there the kernel watches over this thread; behind it programs see that the keeper has gone. (It is dropped by the thread that has made it,
/// before the page is.)
pub struct Watched {
    list: Box<List>,
    /// What the C library has told the kernel of this thread, whose own list is not watched meanwhile. (No thread of a keeper has robust mutexes.)
    before: usize,
    of_thread: PhantomData<*const ()>,
}

impl Watched {
    pub fn new(page: &Mapping) -> Watched {
        let word = page.word(page::KEEPER);
        let entry = Entry { next: null() };
        let mut list = Box::new(List { first: null(), offset: 0, pending: null(), entry });
        let (mut before, mut length) = (0usize, 0usize);
        list.first = &raw const list.entry;
        list.entry.next = &raw const *list;
        list.offset = (&raw const *word as usize).wrapping_sub(list.first as usize) as c_long;
        // SAFETY: numbers, room for two, and a list that stays where it is until `drop` has taken it from the kernel. That follows the list, and the word, of
        // its own accord only, and stores nothing to a word that does not name the thread.
        #[allow(unsafe_code)]
        unsafe {
            word.store(libc::syscall(libc::SYS_gettid) as u32, Ordering::Relaxed);
            let told = (&raw mut before, &raw mut length);
            libc::syscall(libc::SYS_get_robust_list, 0, told.0, told.1);
            libc::syscall(libc::SYS_set_robust_list, &raw const *list, HEAD_BYTES);
        }
        Watched { list, before, of_thread: PhantomData }
    }

    /// The keeper goes, and says so itself.
    pub fn end(&self, page: &Mapping) {
        // SAFETY: what the C library had told the kernel before.
        #[allow(unsafe_code)]
        unsafe {
            libc::syscall(libc::SYS_set_robust_list, self.before, HEAD_BYTES);
        }
        debug_assert!(!self.list.first.is_null());
        let word = page.word(page::KEEPER);
        word.store(page::GONE, Ordering::Relaxed);
        futex::wake(word);
        ring(page);
    }
}
