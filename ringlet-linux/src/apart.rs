//! Closing what a stranger has sent.
//!
//! KERNEL: whoever drops the last reference to a file waits for what that costs, for as long as its maker likes: a lingering socket, a file of a
//! FUSE daemon, and any file that can be polled (an eventfd, a pipe, a socket), which is taken out of each epoll set that it is in, behind that
//! set's lock (`eventpoll_release_file`). A stranger can put his copy into a set of his and hold its lock, from inside a page fault that he never
//! serves. That must not be a thread of the program. So such a descriptor is closed by a thread of its own, made of registers only: it closes, and
//! ends.
//!
//! The kernel's wait for that lock can't be killed. The program goes on meanwhile, but its end, and exec, wait for this thread; and they close
//! themselves what strangers have left in a queue of ours. So nothing that can be polled is shared with a stranger, either way (memory can't be, nor
//! be in a set), and a queue admits descriptors only from where memory is due (`meet`).

use crate::meet::MAX_FDS;
use crate::sys::{Errno, Sys, close, thread_exists, unsignalled};
use crate::{map, proof};
use core::arch::asm;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Closing at a time, for all and for one user; while as many hang, nothing more should be taken from strangers, or from that one.
const CLOSERS: usize = 32;
const OF_ONE_USER: usize = 8;

/// Memory that is freed in about a millisecond.
const QUICKLY_FREED_BYTES: u64 = 16 << 20;

/// One of whom nothing is known.
pub const SOMEBODY: u32 = u32::MAX;

struct Closer {
    /// 0 for none, `u32::MAX` while it is being started.
    thread: AtomicU32,
    /// From whom its descriptor came.
    user: AtomicU32,
}

static CLOSING: [Closer; CLOSERS] =
    [const { Closer { thread: AtomicU32::new(0), user: AtomicU32::new(0) } }; CLOSERS];

const FLAGS: i32 = libc::CLONE_VM
    | libc::CLONE_FS
    | libc::CLONE_FILES
    | libc::CLONE_SIGHAND
    | libc::CLONE_THREAD
    | libc::CLONE_SYSVSEM;

/// (Whose thread has ended is asked for once: a meeting looks at all of them at each of its steps.)
fn is_free(closer: &Closer) -> bool {
    let (thread, order) = (closer.thread.load(Ordering::Relaxed), Ordering::Relaxed);
    if thread == 0 {
        return true;
    }
    let has_ended = thread != u32::MAX && !thread_exists(thread as i32);
    // (Another thread may have taken it meanwhile.)
    has_ended && closer.thread.compare_exchange(thread, 0, order, order).is_ok()
}

/// Does any closer hang?
pub fn is_busy() -> bool {
    !CLOSING.iter().all(is_free)
}

/// Closers that there are for one more descriptor of this user's.
fn free_for(user: u32) -> usize {
    let busy = || CLOSING.iter().filter(|closer| !is_free(closer));
    let theirs = busy().filter(|closer| closer.user.load(Ordering::Relaxed) == user).count();
    OF_ONE_USER.saturating_sub(theirs).min(CLOSERS.saturating_sub(busy().count()))
}

/// Do so many hang that there might be no closer for each descriptor of one more message of this user's?
pub fn is_full(user: u32) -> bool {
    free_for(user) < MAX_FDS
}

/// Closes a descriptor that came from another user: here if that can't wait.
pub fn close_foreign(fd: i32, user: u32) {
    // Memory: all that a stranger should send us. KERNEL: whoever drops the last reference to it frees its pages, gigabytes for a second.
    if map::is_memory_of(fd, QUICKLY_FREED_BYTES) {
        close(fd);
    } else {
        close_apart(fd, user);
    }
}

/// Sockets of ours that wait for a closer, because as many hang as there may be.
const WAITING_MOST: usize = 1024;

struct Waiting {
    /// Its descriptor and 1; 0 for none. With `CLAIMED`, some thread is about to change it.
    fd: AtomicU32,
    user: AtomicU32,
    cookie: AtomicU64,
}

static WAITING: [Waiting; WAITING_MOST] = [const {
    Waiting { fd: AtomicU32::new(0), user: AtomicU32::new(0), cookie: AtomicU64::new(0) }
}; WAITING_MOST];
const CLAIMED: u32 = 1 << 31;
/// Of those that are not free, and it may be of some that are just being.
static WAITING_COUNT: AtomicU32 = AtomicU32::new(0);

/// How many sockets wait.
pub fn waiting() -> usize {
    WAITING_COUNT.load(Ordering::Relaxed) as usize
}

/// Closes a socket of ours by a thread of its own, as soon as there may be one: later, by `go_on`, if too many hang.
pub fn close_socket_apart(socket: i32, user: u32) {
    go_on();
    if !close_apart(socket, user) {
        wait(socket, user);
    }
}

fn wait(socket: i32, user: u32) {
    let Ok(cookie) = proof::cookie(socket) else { return };
    let order = Ordering::Relaxed;
    // ORDER: Acquire; pairs with `go_on` (Release).
    let claim = |waiting: &&Waiting| {
        waiting.fd.compare_exchange(0, CLAIMED, Ordering::Acquire, order).is_ok()
    };
    unsignalled(|| {
        WAITING_COUNT.fetch_add(1, order);
        let Some(waiting) = WAITING.iter().find(claim) else {
            WAITING_COUNT.fetch_sub(1, order);
            return;
        };
        waiting.user.store(user, order);
        waiting.cookie.store(cookie, order);
        // ORDER: Release; pairs with `go_on` (Acquire).
        waiting.fd.store(socket as u32 + 1, Ordering::Release);
    });
}

/// Closes those that wait, as far as there are closers for them. (Not for who borrows a process's memory, a vfork child: it has other descriptors.)
pub fn go_on() {
    if waiting() == 0 {
        return;
    }
    unsignalled(close_waiting);
}

fn close_waiting() {
    for waiting in &WAITING {
        let order = Ordering::Relaxed;
        // ORDER: Acquire; pairs with `wait` (Release): whose it is, is known only to who has claimed it.
        let claim =
            |fd| waiting.fd.compare_exchange(fd, fd | CLAIMED, Ordering::Acquire, order).is_ok();
        let fd = waiting.fd.load(order);
        if fd == 0 || fd & CLAIMED != 0 || !claim(fd) {
            continue;
        }
        let (user, cookie) = (waiting.user.load(order), waiting.cookie.load(order));
        let socket = fd as i32 - 1;
        // The program may have closed all numbers that it does not know, and this one may be its own now.
        let is_ours = || proof::cookie(socket) == Ok(cookie);
        let is_done = free_for(user) > 0 && (!is_ours() || close_apart(socket, user));
        // ORDER: Release; pairs with the next `wait` there, or `go_on`.
        waiting.fd.store(if is_done { 0 } else { fd }, Ordering::Release);
        WAITING_COUNT.fetch_sub(is_done.into(), order);
    }
}

/// In a child by fork, before it does any of this: the parent's threads are not there, neither those that close nor what had claimed a place. (The one that
/// forked has claimed none: `unsignalled`.)
pub fn after_fork() {
    let order = Ordering::Relaxed;
    for closer in CLOSING.iter().filter(|closer| closer.thread.load(order) != 0) {
        closer.thread.store(0, order);
    }
    if waiting() == 0 {
        return;
    }
    for waiting in WAITING.iter().filter(|waiting| waiting.fd.load(order) & CLAIMED != 0) {
        waiting.fd.fetch_and(!CLAIMED, order);
    }
    let count = WAITING.iter().filter(|waiting| waiting.fd.load(order) != 0).count();
    WAITING_COUNT.store(count as u32, order);
}

/// Closes a descriptor by a thread of its own. False, and it stays open, if there are too many already, or none can be made.
pub fn close_apart(fd: i32, user: u32) -> bool {
    free_for(user) > 0 && unsignalled(|| close_by_one(fd, user))
}

fn close_by_one(fd: i32, user: u32) -> bool {
    for closer in &CLOSING {
        // ORDER: Relaxed; the words only count.
        let taken = || {
            let order = Ordering::Relaxed;
            closer.thread.compare_exchange(0, u32::MAX, order, order).is_ok()
        };
        if is_free(closer) && taken() {
            closer.user.store(user, Ordering::Relaxed);
            let thread = start(fd);
            closer.thread.store(thread.unwrap_or(0), Ordering::Relaxed);
            return thread.is_ok();
        }
    }
    false
}

/// Starts the thread. All signals are blocked, so that none is handled in it.
fn start(fd: i32) -> Sys<u32> {
    // SAFETY: the new thread touches no memory: see there; `unsignalled` has blocked all.
    let made = unsafe { clone_that_closes(fd) };
    if made < 0 { Err(Errno(-made as i32)) } else { Ok(made as u32) }
}

/// # Safety
/// All signals are blocked.
#[cfg(target_arch = "x86_64")]
unsafe fn clone_that_closes(fd: i32) -> isize {
    let made: isize;
    // SAFETY: the new thread has our stack pointer, and touches no memory: it makes two system calls out of registers, and the kernel
    // enters it for no signal. Ours goes on behind.
    unsafe {
        asm!(
            "syscall",
            "test rax, rax",
            "jnz 2f",
            "mov edi, r12d",
            "mov eax, {close}",
            "syscall",
            "xor edi, edi",
            "mov eax, {exit}",
            "syscall",
            "ud2",
            "2:",
            close = const libc::SYS_close,
            exit = const libc::SYS_exit,
            inlateout("rax") libc::SYS_clone as isize => made,
            in("rdi") FLAGS as usize, in("rsi") 0, in("rdx") 0, in("r10") 0, in("r8") 0,
            in("r12") fd as usize,
            lateout("rcx") _, lateout("r11") _,
        );
    }
    made
}

/// # Safety
/// All signals are blocked.
#[cfg(target_arch = "aarch64")]
unsafe fn clone_that_closes(fd: i32) -> isize {
    let made: isize;
    // SAFETY: all signals are blocked (our own contract), and the child makes two system calls on registers alone: it uses no stack.
    unsafe {
        asm!(
            "svc 0",
            "cbnz x0, 2f",
            "mov w0, w9",
            "mov x8, {close}",
            "svc 0",
            "mov x0, #0",
            "mov x8, {exit}",
            "svc 0",
            "brk #1",
            "2:",
            close = const libc::SYS_close,
            exit = const libc::SYS_exit,
            in("x8") libc::SYS_clone as usize,
            inlateout("x0") FLAGS as usize as isize => made,
            in("x1") 0, in("x2") 0, in("x3") 0, in("x4") 0,
            in("x9") fd as usize,
        );
    }
    made
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fd;

    /// A process forks while another thread has claimed a place, and while another one starts a closer: the child closes its copy all the same.
    #[test]
    fn what_the_parents_threads_had_in_hand_a_child_does() {
        const USER: u32 = 4712;
        let [socket, peer] = crate::meet::pair().unwrap();
        wait(socket, USER);
        let place =
            WAITING.iter().find(|each| each.fd.load(Ordering::Relaxed) == socket as u32 + 1);
        let place = place.unwrap();
        place.fd.fetch_or(CLAIMED, Ordering::Relaxed);
        for closer in &CLOSING[..OF_ONE_USER] {
            closer.user.store(USER, Ordering::Relaxed);
            closer.thread.store(u32::MAX, Ordering::Relaxed);
        }
        // SAFETY: the child makes system calls only.
        let child = unsafe { libc::fork() };
        assert!(child >= 0);
        if child == 0 {
            after_fork();
            go_on();
            let is_done = waiting() == 0 && place.fd.load(Ordering::Relaxed) == 0;
            // SAFETY: this ends us.
            unsafe { libc::_exit(i32::from(!is_done)) };
        }
        for closer in &CLOSING[..OF_ONE_USER] {
            closer.thread.store(0, Ordering::Relaxed);
        }
        let mut status = -1;
        // SAFETY: an int.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0);
        place.fd.fetch_and(!CLAIMED, Ordering::Relaxed);
        go_on();
        assert_eq!(waiting(), 0);
        close(peer);
    }

    /// A handler forks, and the child closes what waits, and returns to where the parent was at it.
    #[test]
    fn a_fork_amid_it_closes_once() {
        const USER: u32 = 4713;
        extern "C" fn forks(_: i32) {
            // SAFETY: the child makes system calls only.
            match unsafe { libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) } as i32 {
                0 => {
                    after_fork();
                    go_on();
                }
                // SAFETY: an int; this ends us.
                child => unsafe {
                    let mut status = -1;
                    let waited = libc::waitpid(child, &raw mut status, 0);
                    if waited != child || status != 0 {
                        libc::_exit(1);
                    }
                },
            }
        }
        let is_sound = || {
            let left = WAITING.iter().filter(|each| each.fd.load(Ordering::Relaxed) != 0);
            (waiting(), left.count()) == (0, 0)
        };
        // A process of its own, which has no other thread.
        // SAFETY: it makes system calls only.
        let child = unsafe { libc::fork() };
        assert!(child >= 0);
        if child == 0 {
            after_fork();
            let pid = crate::sys::getpid();
            // SAFETY: a handler, and times that are read.
            unsafe { libc::signal(libc::SIGALRM, forks as extern "C" fn(i32) as usize) };
            for round in 0..400 {
                let [socket, peer] = crate::meet::pair().unwrap();
                // SAFETY: zeros are a time.
                let mut timer: libc::itimerval = unsafe { core::mem::zeroed() };
                timer.it_value.tv_usec = 1 + round % 40;
                // SAFETY: a time that is only read, and no place for the one before.
                unsafe {
                    libc::setitimer(libc::ITIMER_REAL, &raw const timer, core::ptr::null_mut())
                };
                wait(socket, USER);
                go_on();
                if crate::sys::getpid() != pid || !is_sound() {
                    // SAFETY: this ends us.
                    unsafe { libc::_exit(i32::from(!is_sound())) };
                }
                close(peer);
            }
            // SAFETY: this ends us.
            unsafe { libc::_exit(0) };
        }
        let mut status = -1;
        // SAFETY: an int.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0);
    }

    #[test]
    fn a_closer_that_has_ended_is_not_asked_for_again() {
        let thread = std::thread::spawn(crate::sys::gettid).join().unwrap();
        while thread_exists(thread) {
            std::thread::yield_now();
        }
        let closer = Closer { thread: AtomicU32::new(thread as u32), user: AtomicU32::new(0) };
        assert!(is_free(&closer) && closer.thread.load(Ordering::Relaxed) == 0);
        // One that is being started, or that hangs, keeps its place.
        for busy in [u32::MAX, crate::sys::gettid() as u32] {
            closer.thread.store(busy, Ordering::Relaxed);
            assert!(!is_free(&closer) && closer.thread.load(Ordering::Relaxed) == busy);
        }
    }

    #[test]
    fn only_little_memory_is_closed_here() {
        let is_quick = |fd| map::is_memory_of(fd, QUICKLY_FREED_BYTES);
        let of = |bytes| map::sealed_memfd(c"memory", bytes, 0).unwrap();
        let (segment, large) = (of(2 << 20), of(1 << 30));
        // SAFETY: a C string.
        let unsealed = unsafe { libc::memfd_create(c"memory".as_ptr(), libc::MFD_ALLOW_SEALING) };
        let eventfd = fd::eventfd().unwrap();
        assert!(is_quick(segment) && !is_quick(large) && !is_quick(unsealed) && !is_quick(eventfd));
        assert!(map::sealed_size(segment) == Ok(2 << 20) && map::sealed_size(unsealed).is_err());
        // What lies behind the end is freed as well.
        let hidden = unsealed;
        // SAFETY: no memory is passed.
        unsafe {
            assert_eq!(libc::fallocate(hidden, libc::FALLOC_FL_KEEP_SIZE, 0, 32 << 20), 0);
            libc::fcntl(hidden, libc::F_ADD_SEALS, libc::F_SEAL_SHRINK | libc::F_SEAL_GROW);
        }
        assert!(!is_quick(hidden) && map::sealed_size(hidden) == Err(Errno::EINVAL));
        [segment, large, hidden, eventfd].into_iter().for_each(close);
    }
}
