//! Direct system calls. libc's wrappers of the socket calls are what the shim replaces, so calling them would come back to us;
//! a direct call also has no lock, no allocation and no cancellation point, and is safe after fork and in signal handlers.
//!
//! Every function returns what the kernel returned: a count or descriptor, or the error number.

use core::arch::asm;
use core::sync::atomic::{AtomicU32, Ordering};

/// An error number of the kernel.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Errno(pub i32);

pub type Sys<T> = Result<T, Errno>;

/// KERNEL: MAX_RW_COUNT, what one call moves at most.
pub const CALL_MAX_BYTES: usize = 0x7fff_f000;

macro_rules! errnos {
    ($($name:ident)*) => { impl Errno { $(pub const $name: Errno = Errno(libc::$name);)* } };
}
errnos! { EAGAIN EINTR EPIPE ECONNRESET ENOTCONN EBADF EFAULT EINVAL EMFILE ENFILE ENOMEM EPERM ENOSYS EACCES
ECONNREFUSED EADDRINUSE EEXIST ENOENT ENOTDIR EINPROGRESS ENOTSUP ERANGE }

/// # Safety
/// The caller answers for the arguments as the named system call defines them.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub unsafe fn call(number: i64, args: [usize; 6]) -> Sys<usize> {
    let result: isize;
    // SAFETY: the x86-64 Linux convention: number in rax, arguments in rdi rsi rdx r10 r8 r9; rcx and r11 are clobbered.
    unsafe {
        asm!("syscall", inlateout("rax") number as isize => result,
            in("rdi") args[0], in("rsi") args[1], in("rdx") args[2],
            in("r10") args[3], in("r8") args[4], in("r9") args[5],
            lateout("rcx") _, lateout("r11") _, options(nostack));
    }
    if (-4095..0).contains(&result) { Err(Errno(-result as i32)) } else { Ok(result as usize) }
}

/// # Safety
/// The caller answers for the arguments as the named system call defines them.
#[cfg(target_arch = "aarch64")]
#[inline(always)]
pub unsafe fn call(number: i64, args: [usize; 6]) -> Sys<usize> {
    let result: isize;
    // SAFETY: the AArch64 Linux convention: number in x8, arguments in x0 to x5, result in x0.
    unsafe {
        asm!("svc 0", in("x8") number as usize, inlateout("x0") args[0] => result,
            in("x1") args[1], in("x2") args[2], in("x3") args[3], in("x4") args[4], in("x5") args[5],
            options(nostack));
    }
    if (-4095..0).contains(&result) { Err(Errno(-result as i32)) } else { Ok(result as usize) }
}

macro_rules! sys {
    ($number:ident $(, $arg:expr)*) => {{
        let given = [$($arg as usize),*];
        let mut args = [0usize; 6];
        args[..given.len()].copy_from_slice(&given);
        $crate::sys::call(libc::$number as i64, args)
    }};
}
pub(crate) use sys;

/// Closes one of our own descriptors.
pub fn close(fd: i32) {
    // SAFETY: no memory is passed.
    let _ = unsafe { sys!(SYS_close, fd) };
}

pub fn getpid() -> i32 {
    // SAFETY: no arguments.
    unsafe { sys!(SYS_getpid) }.map_or(0, |pid| pid as i32)
}

pub fn getppid() -> i32 {
    // SAFETY: no arguments.
    unsafe { sys!(SYS_getppid) }.map_or(0, |pid| pid as i32)
}

pub fn gettid() -> i32 {
    // SAFETY: no arguments.
    unsafe { sys!(SYS_gettid) }.map_or(0, |tid| tid as i32)
}

pub fn geteuid() -> u32 {
    // SAFETY: no arguments.
    unsafe { sys!(SYS_geteuid) }.map_or(u32::MAX, |uid| uid as u32)
}

pub fn sched_yield() {
    // SAFETY: no arguments.
    let _ = unsafe { sys!(SYS_sched_yield) };
}

/// Becomes readable when the process ends.
pub fn pidfd(pid: i32) -> Sys<i32> {
    // SAFETY: no memory is passed.
    unsafe { sys!(SYS_pidfd_open, pid, 0) }.map(|fd| fd as i32)
}

/// Sets this thread's signal mask; returns the one before.
pub fn set_signal_mask(mask: u64) -> u64 {
    let mut before = 0u64;
    let (new, old) = (&raw const mask, &raw mut before);
    // SAFETY: eight readable and eight writable bytes.
    let _ = unsafe { sys!(SYS_rt_sigprocmask, libc::SIG_SETMASK, new, old, 8) };
    before
}

/// Does this with all signals blocked. WHY: a handler may leave it by a jump, or wait for what it has interrupted. Or it forks, and in the child returns to
/// what goes on there with what the child has taken over by then: the number of a file is another one's, say.
pub fn unsignalled<T>(body: impl FnOnce() -> T) -> T {
    let before = set_signal_mask(u64::MAX);
    let done = body();
    set_signal_mask(before);
    done
}

/// The real, effective and saved user of this thread.
pub fn users() -> [u32; 3] {
    let mut users = [u32::MAX; 3];
    let [real, effective, saved] = users.each_mut();
    // SAFETY: three writable numbers.
    let _ = unsafe { sys!(SYS_getresuid, &raw mut *real, &raw mut *effective, &raw mut *saved) };
    users
}

/// The same of groups.
pub fn groups() -> [u32; 3] {
    let mut groups = [u32::MAX; 3];
    let [real, effective, saved] = groups.each_mut();
    // SAFETY: three writable numbers.
    let _ = unsafe { sys!(SYS_getresgid, &raw mut *real, &raw mut *effective, &raw mut *saved) };
    groups
}

/// Is the parent in another pid namespace? (It has no number in ours then.)
pub fn is_first_of_namespace() -> bool {
    getppid() == 0
}

/// Does the calling thread run on the stack that it has set aside for signal handlers?
pub fn is_on_signal_stack() -> bool {
    // SAFETY: zero is a valid stack_t.
    let mut stack: libc::stack_t = unsafe { core::mem::zeroed() };
    // SAFETY: `stack` is valid for writing; nothing is changed.
    let asked = unsafe { sys!(SYS_sigaltstack, 0usize, &raw mut stack) };
    asked.is_ok() && stack.ss_flags & libc::SS_ONSTACK != 0
}

/// Is there a thread of this number in our process?
pub fn has_thread(tid: i32) -> bool {
    // SAFETY: signal 0 only asks.
    unsafe { sys!(SYS_tgkill, getpid(), tid, 0) }.is_ok()
}

/// Does a thread of this number exist (whoever owns it)?
pub fn thread_exists(tid: i32) -> bool {
    // SAFETY: signal 0 only asks.
    let asked = unsafe { sys!(SYS_tkill, tid, 0) };
    asked != Err(Errno(libc::ESRCH))
}

/// Is the process of this number over, though its number is not yet free, since nobody has waited for it? (Of a thread's number that is no
/// process's: no.)
pub fn has_ended(pid: i32) -> bool {
    pidfd(pid).is_ok_and(|process| {
        let ended = crate::fd::pending(process, libc::POLLIN) != 0;
        close(process);
        ended
    })
}

/// Raises a signal in the calling thread.
pub fn raise(signal: i32) {
    // SAFETY: no memory is passed.
    let _ = unsafe { sys!(SYS_tkill, gettid(), signal) };
}

/// Nanoseconds of the monotonic clock, without entering the kernel where the vDSO can.
#[inline]
pub fn now_ns() -> u64 {
    crate::clock::ns(libc::CLOCK_MONOTONIC)
}

/// Nanoseconds since 1970, likewise.
pub fn real_time_ns() -> u64 {
    crate::clock::ns(libc::CLOCK_REALTIME)
}

/// The same in a fifth of the time, and a tick ago, or more where the host does not run the processor that keeps it: for people only.
pub fn about_real_time_ns() -> u64 {
    crate::clock::ns(libc::CLOCK_REALTIME_COARSE)
}

/// Raises SIGPIPE in the calling thread, as the kernel does for a write to a dead connection.
pub fn raise_sigpipe() {
    // SAFETY: no memory is passed.
    let _ = unsafe { sys!(SYS_tgkill, getpid(), gettid(), libc::SIGPIPE) };
}

/// The processor's own clock, for "about so long ago" on the data path: some 10 ns cheaper than `now_ns`. Between 1 and 5 ticks
/// per nanosecond on x86-64; slower elsewhere, which only makes the looks rarer.
#[inline(always)]
pub fn ticks() -> u64 {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 processor has it.
    unsafe {
        core::arch::x86_64::_rdtsc()
    }
    #[cfg(not(target_arch = "x86_64"))]
    now_ns()
}

/// Random bytes; false when the kernel has none yet.
pub fn random(to: &mut [u8]) -> bool {
    // SAFETY: a valid buffer.
    let got = unsafe { sys!(SYS_getrandom, to.as_mut_ptr(), to.len(), libc::GRND_NONBLOCK) };
    got == Ok(to.len())
}

pub fn write(fd: i32, bytes: &[u8]) -> Sys<usize> {
    // SAFETY: a valid buffer.
    unsafe { sys!(SYS_write, fd, bytes.as_ptr(), bytes.len()) }
}

/// What a thread is told of a write that fails, or of one to a terminal from the background.
static TOLD_OF_WRITES: u64 =
    1 << (libc::SIGPIPE - 1) | 1 << (libc::SIGXFSZ - 1) | 1 << (libc::SIGTTOU - 1);

/// Writes as `write` does, but none of its signals reaches the program, which has not written.
pub fn write_quietly(fd: i32, bytes: &[u8]) -> Sys<usize> {
    let (mut before, mut pending) = (0u64, 0u64);
    let (block, old) = (&raw const TOLD_OF_WRITES, &raw mut before);
    // SAFETY: eight readable and eight writable bytes, for each.
    unsafe {
        sys!(SYS_rt_sigprocmask, libc::SIG_BLOCK, block, old, 8)?;
        let _ = sys!(SYS_rt_sigpending, &raw mut pending, 8);
    }
    let written = write(fd, bytes);
    // KERNEL: this thread is sent one, unless one waits already, which is the program's.
    let told = match written {
        Err(Errno::EPIPE) => 1 << (libc::SIGPIPE - 1),
        Err(Errno(libc::EFBIG)) => 1 << (libc::SIGXFSZ - 1),
        _ => 0,
    } & !pending;
    if told != 0 {
        let (signals, now) = (&raw const told, [0u64; 2]);
        // SAFETY: eight readable bytes, and a time; nobody asks what was taken.
        let _ = unsafe { sys!(SYS_rt_sigtimedwait, signals, 0, now.as_ptr(), 8) };
    }
    set_signal_mask(before);
    written
}

/// The beginning of a file, as much as the buffer holds.
pub fn read_file(path: &core::ffi::CStr, to: &mut [u8]) -> Sys<usize> {
    let flags = libc::O_RDONLY | libc::O_CLOEXEC;
    // SAFETY: a C string.
    let fd = unsafe { sys!(SYS_openat, libc::AT_FDCWD, path.as_ptr(), flags, 0)? } as i32;
    let mut total = 0;
    let result = loop {
        let rest = &mut to[total..];
        // SAFETY: a valid buffer.
        match unsafe { sys!(SYS_read, fd, rest.as_mut_ptr(), rest.len()) } {
            Ok(0) => break Ok(total),
            Ok(n) => total += n,
            Err(error) => break Err(error),
        }
    };
    close(fd);
    result
}

/// Has the calling thread this capability in its own user namespace?
pub fn has_capability(number: u32) -> bool {
    const VERSION_3: u32 = 0x2008_0522;
    let header = [VERSION_3, 0];
    // Effective, permitted, inheritable; of the first 32, and of the others.
    let mut sets = [0u32; 6];
    // SAFETY: a header of that version, and room for what it tells of.
    let asked = unsafe { sys!(SYS_capget, header.as_ptr(), sets.as_mut_ptr()) };
    asked.is_ok() && sets[number as usize / 32 * 3] >> (number % 32) & 1 != 0
}

/// Has the calling thread given up that a program which it executes has more privileges? (True where the kernel does not tell.)
pub fn gains_no_privileges() -> bool {
    // SAFETY: no memory is passed.
    let asked = unsafe { sys!(SYS_prctl, libc::PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0) };
    asked != Ok(0)
}

/// Is there a file of that name, which we may use?
pub fn exists(path: &core::ffi::CStr) -> bool {
    let mode = libc::R_OK | libc::W_OK;
    // SAFETY: a C string.
    unsafe { sys!(SYS_faccessat, libc::AT_FDCWD, path.as_ptr(), mode) }.is_ok()
}

/// Adds a line to a file, which is made if need be. It waits for nobody, whatever it is.
pub fn append(path: &core::ffi::CStr, line: &[u8]) {
    let flags = libc::O_WRONLY | libc::O_APPEND | libc::O_CREAT | libc::O_CLOEXEC;
    let flags = flags | libc::O_NONBLOCK | libc::O_NOCTTY;
    // SAFETY: a C string.
    if let Ok(fd) = unsafe { sys!(SYS_openat, libc::AT_FDCWD, path.as_ptr(), flags, 0o600) } {
        let _ = write_quietly(fd as i32, line);
        close(fd as i32);
    }
}

/// The processor that this thread runs on.
pub fn processor() -> u32 {
    // SAFETY: no arguments; answered by the vDSO or rseq.
    unsafe { libc::sched_getcpu() }.max(0) as u32
}

/// Has this thread run for no longer than a tenth of a millisecond at a time where others want to: who is woken for a moment's work need not wait for their
/// slices then. Its share of the processor stays what it is.
///
/// KERNEL: the slice of one that is not real-time is 0.1 to 100 ms (`sched_runtime`), since Linux 6.12; before that it is passed over.
pub fn run_briefly() {
    /// Nanoseconds.
    const SLICE: u64 = 100_000;
    #[repr(C)]
    #[derive(Default)]
    struct Attributes {
        size: u32,
        policy: u32,
        flags: u64,
        nice: i32,
        priority: u32,
        runtime: u64,
        deadline: u64,
        period: u64,
    }
    let mut of_us = Attributes::default();
    // SAFETY: room for so many bytes.
    let known = unsafe { sys!(SYS_sched_getattr, 0, &raw mut of_us, size_of::<Attributes>(), 0) };
    if known.is_ok() && of_us.policy == libc::SCHED_OTHER as u32 {
        of_us.runtime = SLICE;
        // SAFETY: a struct of the size that it says.
        let _ = unsafe { sys!(SYS_sched_setattr, 0, &raw const of_us, 0) };
    }
}

/// Where it is told how many threads want to run. For good: opened for each look it would take the program's next number for a moment.
pub fn open_load() -> Sys<i32> {
    let flags = libc::O_RDONLY | libc::O_CLOEXEC;
    // SAFETY: a C string.
    unsafe { sys!(SYS_openat, libc::AT_FDCWD, c"/proc/loadavg".as_ptr(), flags, 0) }
        .map(|fd| fd as i32)
}

/// How many threads want to run on this machine now, by what `open_load` opened; 0 if that can't be seen.
pub fn runnable(load: i32) -> u32 {
    let mut text = [0u8; 64];
    // SAFETY: so many writable bytes.
    let got = unsafe { sys!(SYS_pread64, load, text.as_mut_ptr(), text.len(), 0) };
    let read = got.unwrap_or(0).min(text.len());
    let field = text[..read].split(|byte| *byte == b' ').nth(3).unwrap_or_default();
    number(field)
}

/// The highest of the machine's processors that run, plus one; none that could be seen are endless.
pub fn processors() -> u32 {
    static PROCESSORS: AtomicU32 = AtomicU32::new(0);
    // ORDER: Relaxed: whoever comes first finds the same.
    let known = PROCESSORS.load(Ordering::Relaxed);
    if known != 0 {
        return known;
    }
    let mut text = [0u8; 256];
    let read = read_file(c"/sys/devices/system/cpu/online", &mut text).unwrap_or(0);
    let last = text[..read].trim_ascii_end().rsplit(|byte| matches!(byte, b'-' | b',')).next();
    let count = match last.unwrap_or_default() {
        [] => u32::MAX,
        last => number(last) + 1,
    };
    PROCESSORS.store(count, Ordering::Relaxed);
    count
}

/// The digits that it begins with.
fn number(text: &[u8]) -> u32 {
    let digits = text.iter().take_while(|byte| byte.is_ascii_digit());
    digits.fold(0u32, |sum, byte| sum.saturating_mul(10).saturating_add(u32::from(byte - b'0')))
}

/// May this thread use one processor only?
pub fn is_bound() -> bool {
    let mut allowed = [0u64; 16];
    // SAFETY: so many writable bytes.
    let got =
        unsafe { sys!(SYS_sched_getaffinity, 0, size_of_val(&allowed), allowed.as_mut_ptr()) };
    got.is_ok() && allowed.iter().map(|word| word.count_ones()).sum::<u32>() == 1
}

/// Has this thread said that others go first?
pub fn is_nice() -> bool {
    // SAFETY: no pointers.
    let policy = unsafe { sys!(SYS_sched_getscheduler, 0) };
    // (Which child by fork has it too is another matter.)
    let policy = policy.map_or(0, |policy| policy as i32 & !libc::SCHED_RESET_ON_FORK);
    // KERNEL: it tells 20 less the value, so that none is an error.
    // SAFETY: no pointers.
    let priority = unsafe { sys!(SYS_getpriority, libc::PRIO_PROCESS, 0) }.unwrap_or(20);
    matches!(policy, libc::SCHED_IDLE | libc::SCHED_BATCH) || priority < 20
}

/// Did a control group of this process, when that was asked first, have so much of the processors' time only (version 2, `cpu.max`)?
pub fn has_quota() -> bool {
    static QUOTA: AtomicU32 = AtomicU32::new(0);
    // ORDER: Relaxed: whoever comes first finds the same.
    let known = QUOTA.load(Ordering::Relaxed);
    if known != 0 {
        return known == 2;
    }
    let mut text = [0u8; 512];
    let read = read_file(c"/proc/self/cgroup", &mut text).unwrap_or(0);
    let found = group_of(&text[..read]).is_some_and(|group| groups_upwards(group).any(is_limited));
    QUOTA.store(if found { 2 } else { 1 }, Ordering::Relaxed);
    found
}

/// The path of the control group of version 2.
fn group_of(text: &[u8]) -> Option<&[u8]> {
    text.split(|byte| *byte == b'\n').find_map(|line| line.strip_prefix(b"0::"))
}

/// The group, and those that it is in.
fn groups_upwards(group: &[u8]) -> impl Iterator<Item = &[u8]> {
    core::iter::successors(Some(group.strip_suffix(b"/").unwrap_or(group)), |group| {
        let parent = group.iter().rposition(|byte| *byte == b'/')?;
        Some(&group[..parent])
    })
}

fn is_limited(group: &[u8]) -> bool {
    let mut path = [0u8; 640];
    let mut used = 0;
    for part in [&b"/sys/fs/cgroup"[..], group, b"/cpu.max", b"\0"] {
        let Some(room) = path.get_mut(used..used + part.len()) else { return false };
        room.copy_from_slice(part);
        used += part.len();
    }
    let mut text = [0u8; 64];
    let Ok(path) = core::ffi::CStr::from_bytes_until_nul(&path) else { return false };
    let read = read_file(path, &mut text).unwrap_or(0);
    is_quota(&text[..read])
}

/// As `cpu.max` has it: a number of microseconds, or none.
fn is_quota(text: &[u8]) -> bool {
    text.first().is_some_and(u8::is_ascii_digit)
}

/// Moves this thread to another processor of those that it may use, if there is one, and leaves it its choice afterwards.
pub fn leave_processor(processor: u32) -> bool {
    let mut allowed = [0u64; 16];
    let bytes = size_of_val(&allowed);
    // SAFETY: a writable mask.
    if unsafe { sys!(SYS_sched_getaffinity, 0, bytes, allowed.as_mut_ptr()) }.is_err() {
        return false;
    }
    let mut others = allowed;
    let word = processor as usize / 64;
    if word >= others.len() {
        return false;
    }
    others[word] &= !(1 << (processor % 64));
    if others.iter().all(|word| *word == 0) {
        return false;
    }
    // SAFETY: readable masks.
    unsafe {
        let moved = sys!(SYS_sched_setaffinity, 0, bytes, others.as_ptr());
        let _ = sys!(SYS_sched_setaffinity, 0, bytes, allowed.as_ptr());
        moved.is_ok()
    }
}

/// Bytes of address space in use; 0 if that can't be seen.
pub fn address_space_used() -> u64 {
    let mut text = [0u8; 128];
    let read = read_file(c"/proc/self/statm", &mut text).unwrap_or(0);
    let digits = text[..read].iter().take_while(|byte| byte.is_ascii_digit());
    let pages = digits.fold(0u64, |sum, byte| sum * 10 + u64::from(byte - b'0'));
    pages * ringlet_core::layout::PAGE_BYTES as u64
}

/// RLIMIT_AS in bytes; `u64::MAX` is no limit.
pub fn address_space_limit() -> u64 {
    limit(libc::RLIMIT_AS)
}

/// A limit of this process; `u64::MAX` is none.
pub fn limit(which: libc::__rlimit_resource_t) -> u64 {
    limits(which)[0]
}

/// Soft and hard.
pub fn limits(which: libc::__rlimit_resource_t) -> [u64; 2] {
    let mut limits = [u64::MAX; 2];
    // SAFETY: a writable struct rlimit64; no limit is set.
    let _ = unsafe { sys!(SYS_prlimit64, 0, which, 0, limits.as_mut_ptr()) };
    limits
}

pub fn set_limits(which: libc::__rlimit_resource_t, limits: [u64; 2]) {
    // SAFETY: a readable struct rlimit64.
    let _ = unsafe { sys!(SYS_prlimit64, 0, which, limits.as_ptr(), 0) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quota_is_that_of_a_group_or_of_one_around_it() {
        assert_eq!(group_of(b"12:cpu:/a\n0::/b/c.scope\n"), Some(&b"/b/c.scope"[..]));
        assert_eq!(group_of(b"12:cpu:/a\n"), None);
        assert!(groups_upwards(b"/b/c.scope").eq([&b"/b/c.scope"[..], b"/b", b""]));
        assert!(groups_upwards(b"/").eq([&b""[..]]));
        assert!(is_quota(b"50000 100000\n"));
        assert!(!is_quota(b"max 100000\n") && !is_quota(b""));
    }

    #[test]
    fn a_thread_that_is_nice_is_known() {
        std::thread::spawn(|| {
            assert!(!is_nice());
            // SAFETY: no pointers.
            let done = unsafe { sys!(SYS_setpriority, libc::PRIO_PROCESS, 0, 5) };
            assert!(done.is_ok() && is_nice());
        })
        .join()
        .unwrap();
    }
}
