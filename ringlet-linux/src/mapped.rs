//! What is mapped into this process, as /proc/self/maps tells it: without an allocation, since we may be inside the program's allocator.

use crate::map::Scratch;
use crate::sys::{self, Errno, Sys, close, sys};
use core::ops::Range;

/// Lines that are read at a time: a line of the kernel's is never longer than its path and a page.
const LINES_BYTES: usize = 32 << 10;

/// Each line in order, and where what they are read into lies, which is one of them.
pub(crate) fn each_line(mut tell: impl FnMut(&[u8], &Range<usize>)) -> Sys<()> {
    let mut lines = Scratch::new(LINES_BYTES, 0u8).ok_or(Errno::ENOMEM)?;
    let flags = libc::O_RDONLY | libc::O_CLOEXEC;
    // SAFETY: a C string.
    let file =
        unsafe { sys!(SYS_openat, libc::AT_FDCWD, c"/proc/self/maps".as_ptr(), flags, 0)? } as i32;
    let own = lines.area();
    let own = own.base() as usize..own.base() as usize + own.len();
    let told = loop {
        // SAFETY: a valid buffer.
        match unsafe { sys!(SYS_read, file, lines.as_mut_ptr(), LINES_BYTES) } {
            // KERNEL: each read brings whole lines.
            Ok(0) => break Ok(()),
            Ok(n) => lines[..n].split(|byte| *byte == b'\n').for_each(|line| tell(line, &own)),
            Err(error) => break Err(error),
        }
    };
    close(file);
    told
}

/// `START-END RIGHTS OFFSET DEVICE INODE PATH`; none of what lies beyond the program's half.
pub(crate) fn range_of(line: &[u8]) -> Option<Range<usize>> {
    const USER_END: usize = 1 << 56;
    let end = line.iter().position(|byte| *byte == b' ')?;
    let (start, end) = core::str::from_utf8(&line[..end]).ok()?.split_once('-')?;
    let number = |text| usize::from_str_radix(text, 16).ok();
    let range = number(start)?..number(end)?;
    (range.end <= USER_END).then_some(range)
}

/// Do both addresses lie on the stack that the calling thread was begun on? `inside`: an address in what libc keeps for the thread.
///
/// KERNEL: the process's first thread has a stack with a name. libc maps the others', with the thread's own storage at the upper end; what it forbids at
/// the lower end parts it from its neighbours. Neither is the stack of a coroutine, unless it is carved out of one of these.
pub fn are_on_own_stack(low: usize, high: usize, inside: usize) -> bool {
    let is_first = sys::gettid() == sys::getpid();
    let mut found = false;
    let told = each_line(|line, _| {
        if let Some(range) = range_of(line)
            && range.contains(&high)
        {
            let is_own = match is_first {
                true => line.ends_with(b" [stack]"),
                false => high < inside && range.contains(&inside),
            };
            found = is_own && range.contains(&low);
        }
    });
    told.is_ok() && found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_threads_own_stack_is_told_from_other_memory() {
        let within = |inside: usize| {
            let here = 0u8;
            let at = &raw const here as usize;
            let elsewhere = std::vec![0u8; 1 << 20];
            let other = elsewhere.as_ptr() as usize;
            assert!(are_on_own_stack(at, at + 64, inside));
            assert!(!are_on_own_stack(other, at, inside) && !are_on_own_stack(at, other, inside));
            assert!(!are_on_own_stack(other, other + 64, inside));
            assert!(!are_on_own_stack(at, at + 64, other));
        };
        std::thread_local!(static STORED: u8 = const { 0 });
        // (A thread that libc has made, with its storage on its stack.)
        std::thread::spawn(move || STORED.with(|stored| within(stored as *const u8 as usize)))
            .join()
            .unwrap();
    }
}
