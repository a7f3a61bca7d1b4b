//! Where frames lie, and which of them a thread has left by a long jump.
//!
//! The stack grows down: a frame below the caller's has been left. But a handler may run on a stack of its own, or go over to a coroutine's, and from there
//! come back: then a lower address tells nothing. So only of the stack that the thread was begun on is it believed.

use crate::local;
use crate::socket::bypass;
use core::arch::asm;
use ringlet_linux::{mapped, sys};

/// Frames that lie further apart are not told apart from those of a neighbour that nothing parts from the thread's stack.
const SAME_STACK_BYTES: usize = 1 << 20;

/// The caller's stack pointer.
#[inline(always)]
pub fn here() -> usize {
    let here: usize;
    // SAFETY: reads a register.
    #[allow(unsafe_code)]
    #[cfg(target_arch = "x86_64")]
    unsafe {
        asm!("mov {}, rsp", out(reg) here, options(nomem, nostack, preserves_flags));
    }
    // SAFETY: reads a register.
    #[allow(unsafe_code)]
    #[cfg(target_arch = "aarch64")]
    unsafe {
        asm!("mov {}, sp", out(reg) here, options(nomem, nostack, preserves_flags));
    }
    here
}

/// Has this thread left a frame by a long jump? It is below `here`, which is a frame that is there.
#[cold]
pub fn has_left(frame: usize, here: usize) -> bool {
    let beyond = here.wrapping_sub(frame);
    // (A filter may forbid what is asked.)
    beyond < SAME_STACK_BYTES
        && !bypass::is_closed_in()
        && !sys::is_on_signal_stack()
        && mapped::are_on_own_stack(frame, here, local::beside_stack())
}

#[cfg(test)]
#[allow(unsafe_code)]
pub mod tests {
    use super::*;
    use core::mem::MaybeUninit;
    use std::cell::Cell;
    use std::ptr::null_mut;

    /// Work further down the stack than its caller, by so many bytes at least.
    #[inline(never)]
    pub fn deeper<const BYTES: usize, T>(work: impl FnOnce() -> T) -> T {
        let room = [0u8; BYTES];
        core::hint::black_box(&room);
        let done = work();
        core::hint::black_box(&room);
        done
    }

    /// Does `first` on a stack of its own; where that calls what it is given, `second` is done on a stack just above, which ends near the first one's
    /// frame. Then `first` goes on.
    pub fn amid(first: impl FnOnce(&dyn Fn()), second: impl FnOnce()) {
        const STACK_BYTES: usize = 256 << 10;
        // (What is left of the upper stack.)
        const DEPTH_BYTES: usize = STACK_BYTES - (7 << 10);
        type Work<'a> = &'a Cell<Option<&'a mut dyn FnMut()>>;
        extern "C" fn does(low: i32, high: i32) {
            let work = (high as u32 as usize) << 32 | low as u32 as usize;
            // SAFETY: `amid`, which has passed it, waits until both are done.
            let work = unsafe { &*(work as *const Cell<Option<&mut dyn FnMut()>>) };
            work.take().expect("once")();
        }
        let mut contexts = [const { MaybeUninit::<libc::ucontext_t>::uninit() }; 4];
        let [caller, lower, upper, left] = contexts.each_mut().map(|context| context.as_mut_ptr());
        let (mut first, mut second) = (Some(first), Some(second));
        // SAFETY: made below, and what is changed to is either not begun or has been left here.
        let go_over = || assert_eq!(unsafe { libc::swapcontext(left, upper) }, 0);
        let mut first = || first.take().unwrap()(&go_over);
        let mut second = || deeper::<DEPTH_BYTES, _>(|| second.take().unwrap()());
        let (first, second) = (
            Cell::new(Some(&mut first as &mut dyn FnMut())),
            Cell::new(Some(&mut second as &mut dyn FnMut())),
        );
        let mut stacks = std::vec![0u128; 2 * STACK_BYTES / 16];
        let stacks = stacks.as_mut_ptr().cast::<u8>();
        let make = |context: *mut libc::ucontext_t, at: *mut u8, next, work: Work<'_>| {
            let work = core::ptr::from_ref(work) as usize;
            // SAFETY: the context and its stack last until both are done; `does` takes two numbers.
            unsafe {
                assert_eq!(libc::getcontext(context), 0);
                (*context).uc_stack.ss_sp = at.cast();
                (*context).uc_stack.ss_size = STACK_BYTES;
                (*context).uc_link = next;
                let does: extern "C" fn() = core::mem::transmute(does as extern "C" fn(i32, i32));
                libc::makecontext(context, does, 2, work as i32, (work >> 32) as i32);
            }
        };
        make(lower, stacks, caller, &first);
        // SAFETY: the upper half.
        make(upper, unsafe { stacks.add(STACK_BYTES) }, left, &second);
        // SAFETY: made above; it comes back here.
        assert_eq!(unsafe { libc::swapcontext(caller, lower) }, 0);
        assert!(first.take().is_none() && second.take().is_none());
    }

    #[test]
    fn a_frame_is_left_only_on_the_stack_that_the_thread_was_begun_on() {
        let within = || {
            let (gone, far) = (deeper::<1024, _>(here), deeper::<{ 300 << 10 }, _>(here));
            assert!(has_left(gone, here()) && has_left(far, here()));
            // One that is there still.
            let there = here();
            assert!(!deeper::<1024, _>(|| has_left(there, here())));
            let coroutines = Cell::new(0);
            amid(
                |go_over| {
                    coroutines.set(here());
                    go_over();
                    assert!(!has_left(deeper::<1024, _>(here), here()), "it is not known");
                },
                || {
                    assert!(coroutines.get() < here() && here() - coroutines.get() < 1 << 13);
                    assert!(!has_left(coroutines.get(), here()));
                },
            );
            assert!(has_left(gone, here()));
        };
        within();
        std::thread::Builder::new().stack_size(1 << 20).spawn(within).unwrap().join().unwrap();
    }

    #[test]
    fn a_handler_on_a_stack_of_its_own_has_left_nothing() {
        thread_local!(static SEEN: Cell<Option<(usize, bool)>> = const { Cell::new(None) });
        extern "C" fn handler(_: i32) {
            SEEN.set(SEEN.get().map(|(frame, _)| (frame, has_left(frame, here()))));
        }
        // (In a frame further out: so the handler's stack is above, and not far.)
        let mut stack = [0u8; 64 << 10];
        let set = |stack: &mut [u8], flags| {
            let stack = libc::stack_t {
                ss_sp: stack.as_mut_ptr().cast(),
                ss_flags: flags,
                ss_size: stack.len(),
            };
            // SAFETY: it lasts until it is taken back below.
            assert_eq!(unsafe { libc::sigaltstack(&stack, null_mut()) }, 0);
        };
        set(&mut stack, 0);
        // SAFETY: zero is a valid action; no other test uses this signal.
        unsafe {
            let mut action: libc::sigaction = core::mem::zeroed();
            action.sa_sigaction = handler as extern "C" fn(i32) as usize;
            action.sa_flags = libc::SA_ONSTACK;
            assert_eq!(libc::sigaction(libc::SIGURG, &action, null_mut()), 0);
        }
        deeper::<1024, _>(|| {
            SEEN.set(Some((here(), true)));
            // SAFETY: its handler is ours.
            assert_eq!(unsafe { libc::raise(libc::SIGURG) }, 0);
        });
        assert!(matches!(SEEN.get(), Some((_, false))));
        set(&mut stack, libc::SS_DISABLE);
    }
}
