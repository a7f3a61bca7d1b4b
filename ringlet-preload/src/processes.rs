//! Calls that make processes, replace programs, or set signal handlers.

use crate::edge::Call;
use crate::errno::result;
use crate::{next, next_of, set_errno};
use core::arch::naked_asm;
use core::ptr::null_mut;
use libc::{c_char, c_int, c_long, c_ulong, c_void, gid_t, pid_t, uid_t};
use ringlet::reasons::Reason;
use ringlet::socket::{context, process};
use ringlet::thread::is_alone;
use ringlet::waiting::signals;
use ringlet_agent::data::is_nowhere;
use ringlet_core::sync::{AtomicU64, Ordering};
use ringlet_linux::map::Scratch;
use ringlet_linux::sys;

macro_rules! next_address {
    ($name:literal) => {
        $crate::next_of!($name).address()
    };
}

/// Forks that this process has made, and those it comes from, up to two. (A page that nobody writes to is copied for no child.)
static FORKS: AtomicU64 = AtomicU64::new(0);

fn before_fork() {
    // The first may well be the only one.
    if FORKS.load(Ordering::Relaxed) < 2 && FORKS.fetch_add(1, Ordering::Relaxed) == 1 {
        next::find_all();
    }
    process::before_fork();
}

/// libc runs ours last before it copies the process, and first afterwards: whatever the program's handlers do is seen. (Without
/// memory for that, forks are noticed as those are that are made around libc.)
pub fn watch_forks() {
    extern "C" fn before() {
        before_fork();
    }
    extern "C" fn in_parent() {
        process::after_fork_in_parent();
    }
    extern "C" fn in_child() {
        process::after_fork_in_child();
    }
    // (Functions of this library, which is never unloaded.)
    type Handler = extern "C" fn();
    let _: c_int = match next_of!(c"__register_atfork").address().is_null() {
        // glibc's own; its other name is one that each library has for itself.
        false => next!(
            c"__register_atfork",
            fn(Handler, Handler, Handler, usize) -> c_int,
            before,
            in_parent,
            in_child,
            0
        ),
        true => next!(
            c"pthread_atfork",
            fn(Handler, Handler, Handler) -> c_int,
            before,
            in_parent,
            in_child
        ),
    };
}

#[unsafe(no_mangle)]
pub extern "C" fn fork() -> pid_t {
    let child = next!(c"fork", fn() -> pid_t,);
    match child {
        0 => {}
        1.. => process::forked(child),
        _ => process::fork_failed(),
    }
    child
}

/// Runs no handlers.
#[unsafe(no_mangle)]
pub extern "C" fn _Fork() -> pid_t {
    forking(|| next!(c"_Fork", fn() -> pid_t,).into()) as pid_t
}

/// A call that makes a process with a copy of our memory, around libc's handlers.
pub fn forking(make: impl FnOnce() -> c_long) -> c_long {
    before_fork();
    let child = make();
    match child {
        0 => process::after_fork_in_child(),
        _ => process::after_fork_in_parent(),
    }
    match child {
        0 => {}
        1.. => process::forked(child as pid_t),
        _ => process::fork_failed(),
    }
    child
}

/// Does this system call make a process with a copy of our memory?
///
/// # Safety
/// The arguments are those of the call.
pub unsafe fn makes_copy(number: c_long, first: c_ulong) -> bool {
    let flags = match number {
        #[cfg(target_arch = "x86_64")]
        libc::SYS_fork => 0,
        libc::SYS_clone => first,
        // SAFETY: struct clone_args begins with the flags.
        libc::SYS_clone3 if !is_nowhere(first as *const u64) => unsafe { *(first as *const u64) },
        _ => return false,
    };
    flags & libc::CLONE_VM as c_ulong == 0
}

/// Does it make one that shares our memory, but not our descriptors?
///
/// # Safety
/// As above.
pub unsafe fn lends(number: c_long, first: c_ulong) -> bool {
    let flags = match number {
        #[cfg(target_arch = "x86_64")]
        libc::SYS_vfork => libc::CLONE_VM as c_ulong,
        libc::SYS_clone => first,
        // SAFETY: struct clone_args begins with the flags.
        libc::SYS_clone3 if !is_nowhere(first as *const u64) => unsafe { *(first as *const u64) },
        _ => return false,
    };
    const BOTH: c_ulong = (libc::CLONE_VM | libc::CLONE_THREAD) as c_ulong;
    flags & BOTH == libc::CLONE_VM as c_ulong
}

/// vfork returns twice, on our caller's stack: so we are gone by then.
macro_rules! lends_memory {
    ($name:ident, $before:ident) => {
        #[cfg(target_arch = "x86_64")]
        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        pub unsafe extern "C" fn $name() -> pid_t {
            naked_asm!("sub rsp, 8", "call {before}", "add rsp, 8", "jmp rax", before = sym $before)
        }

        #[cfg(target_arch = "aarch64")]
        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        pub unsafe extern "C" fn $name() -> pid_t {
            naked_asm!(
                "stp x29, x30, [sp, #-16]!",
                "bl {before}",
                "mov x16, x0",
                "ldp x29, x30, [sp], #16",
                "br x16",
                before = sym $before,
            )
        }
    };
}

extern "C" fn before_vfork() -> *mut c_void {
    process::lends_memory();
    or_none(next_address!(c"vfork"))
}
extern "C" fn before_vfork_too() -> *mut c_void {
    process::lends_memory();
    or_none(next_address!(c"__vfork"))
}

/// For a libc that has none.
fn or_none(vfork: *mut c_void) -> *mut c_void {
    extern "C" fn none() -> pid_t {
        set_errno(libc::ENOSYS);
        -1
    }
    if vfork.is_null() { none as *mut c_void } else { vfork }
}

lends_memory!(vfork, before_vfork);
lends_memory!(__vfork, before_vfork_too);

type Work = extern "C" fn(*mut c_void) -> c_int;

#[unsafe(no_mangle)]
pub unsafe extern "C" fn clone(
    work: Option<Work>,
    stack: *mut c_void,
    flags: c_int,
    argument: *mut c_void,
    parent: *mut pid_t,
    storage: *mut c_void,
    child: *mut pid_t,
) -> c_int {
    let make = || {
        next!(
            c"clone",
            fn(
                Option<Work>,
                *mut c_void,
                c_int,
                *mut c_void,
                *mut pid_t,
                *mut c_void,
                *mut pid_t,
            ) -> c_int,
            work,
            stack,
            flags,
            argument,
            parent,
            storage,
            child
        )
    };
    // SAFETY: no memory is named.
    if unsafe { lends(libc::SYS_clone, flags as c_ulong) } {
        process::lends_memory();
    }
    if flags & libc::CLONE_VM != 0 { make() } else { forking(|| make().into()) as c_int }
}

#[unsafe(no_mangle)]
pub extern "C" fn unshare(flags: c_int) -> c_int {
    if flags & libc::CLONE_FILES != 0 && !is_alone() {
        process::before_split();
    }
    next!(c"unshare", fn(c_int) -> c_int, flags)
}

/// (What an option does not take is passed on as it is.)
#[unsafe(no_mangle)]
pub extern "C" fn prctl(option: c_int, a: c_ulong, b: c_ulong, c: c_ulong, d: c_ulong) -> c_int {
    let call = Call(|| {
        next!(c"prctl", fn(c_int, c_ulong, c_ulong, c_ulong, c_ulong) -> c_int, option, a, b, c, d)
            as isize
    });
    let args = [option as usize, a as usize, b as usize];
    result(ringlet_agent::confine::confine(&call, libc::SYS_prctl, args)) as c_int
}

#[unsafe(no_mangle)]
pub extern "C" fn mlockall(flags: c_int) -> c_int {
    let call = Call(|| next!(c"mlockall", fn(c_int) -> c_int, flags) as isize);
    result(ringlet_agent::confine::lock_all(&call, flags)) as c_int
}

/// No user or group: that one stays.
const SAME: u32 = u32::MAX;

/// Real, effective and saved numbers are to become these: is any of them another one than now?
fn is_change(now: [u32; 3], then: [u32; 3]) -> bool {
    then.iter().zip(now).any(|(then, now)| ![SAME, now].contains(then))
}

macro_rules! changes_credentials {
    ($($name:ident $text:literal ($($id:ident: $type:ty),*) $kind:ident $then:expr;)*) => {$(
        #[unsafe(no_mangle)]
        pub extern "C" fn $name($($id: $type),*) -> c_int {
            let now = sys::$kind();
            let then: fn([u32; 3], $($type),*) -> [u32; 3] = $then;
            if is_change(now, then(now, $($id),*)) {
                process::before_credentials(is_alone());
            }
            next!($text, fn($($type),*) -> c_int, $($id),*)
        }
    )*};
}

/// KERNEL: the saved number becomes the effective one, unless only that is set, and to the real one. (Then nothing is lost by taking it
/// for a change.)
fn both([_, now, _]: [u32; 3], real: u32, effective: u32) -> [u32; 3] {
    let saved =
        if (real, effective) == (SAME, SAME) || effective != SAME { effective } else { now };
    [real, effective, saved]
}

changes_credentials! {
    setuid c"setuid" (user: uid_t) users |_, user| [user; 3];
    seteuid c"seteuid" (user: uid_t) users |_, user| [SAME, user, SAME];
    setreuid c"setreuid" (real: uid_t, effective: uid_t) users both;
    setresuid c"setresuid" (real: uid_t, effective: uid_t, saved: uid_t) users |_, r, e, s| [r, e, s];
    setgid c"setgid" (group: gid_t) groups |_, group| [group; 3];
    setegid c"setegid" (group: gid_t) groups |_, group| [SAME, group, SAME];
    setregid c"setregid" (real: gid_t, effective: gid_t) groups both;
    setresgid c"setresgid" (real: gid_t, effective: gid_t, saved: gid_t) groups |_, r, e, s| [r, e, s];
}

type Strings = *const *mut c_char;

#[unsafe(no_mangle)]
pub unsafe extern "C" fn execve(path: *const c_char, args: Strings, env: Strings) -> c_int {
    process::before_exec();
    let failed = next!(c"execve", fn(*const c_char, Strings, Strings) -> c_int, path, args, env);
    process::after_failed_exec();
    failed
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn execv(path: *const c_char, args: Strings) -> c_int {
    process::before_exec();
    let failed = next!(c"execv", fn(*const c_char, Strings) -> c_int, path, args);
    process::after_failed_exec();
    failed
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn execvp(file: *const c_char, args: Strings) -> c_int {
    process::before_exec();
    let failed = next!(c"execvp", fn(*const c_char, Strings) -> c_int, file, args);
    process::after_failed_exec();
    failed
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn execvpe(file: *const c_char, args: Strings, env: Strings) -> c_int {
    process::before_exec();
    let failed = next!(c"execvpe", fn(*const c_char, Strings, Strings) -> c_int, file, args, env);
    process::after_failed_exec();
    failed
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn fexecve(fd: c_int, args: Strings, env: Strings) -> c_int {
    process::before_exec();
    let failed = next!(c"fexecve", fn(c_int, Strings, Strings) -> c_int, fd, args, env);
    process::after_failed_exec();
    failed
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn execveat(
    at: c_int,
    path: *const c_char,
    args: Strings,
    env: Strings,
    flags: c_int,
) -> c_int {
    process::before_exec();
    let failed = next!(
        c"execveat",
        fn(c_int, *const c_char, Strings, Strings, c_int) -> c_int,
        at,
        path,
        args,
        env,
        flags
    );
    process::after_failed_exec();
    failed
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn posix_spawn(
    pid: *mut pid_t,
    path: *const c_char,
    actions: *const c_void,
    attributes: *const c_void,
    args: Strings,
    env: Strings,
) -> c_int {
    process::before_spawn();
    let result = next!(
        c"posix_spawn",
        fn(*mut pid_t, *const c_char, *const c_void, *const c_void, Strings, Strings) -> c_int,
        pid,
        path,
        actions,
        attributes,
        args,
        env
    );
    process::after_spawn();
    result
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn posix_spawnp(
    pid: *mut pid_t,
    file: *const c_char,
    actions: *const c_void,
    attributes: *const c_void,
    args: Strings,
    env: Strings,
) -> c_int {
    process::before_spawn();
    let result = next!(
        c"posix_spawnp",
        fn(*mut pid_t, *const c_char, *const c_void, *const c_void, Strings, Strings) -> c_int,
        pid,
        file,
        actions,
        attributes,
        args,
        env
    );
    process::after_spawn();
    result
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn pidfd_spawn(
    pidfd: *mut c_int,
    path: *const c_char,
    actions: *const c_void,
    attributes: *const c_void,
    args: Strings,
    env: Strings,
) -> c_int {
    process::before_spawn();
    let result = next!(
        c"pidfd_spawn",
        fn(*mut c_int, *const c_char, *const c_void, *const c_void, Strings, Strings) -> c_int,
        pidfd,
        path,
        actions,
        attributes,
        args,
        env
    );
    process::after_spawn();
    result
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn pidfd_spawnp(
    pidfd: *mut c_int,
    file: *const c_char,
    actions: *const c_void,
    attributes: *const c_void,
    args: Strings,
    env: Strings,
) -> c_int {
    process::before_spawn();
    let result = next!(
        c"pidfd_spawnp",
        fn(*mut c_int, *const c_char, *const c_void, *const c_void, Strings, Strings) -> c_int,
        pidfd,
        file,
        actions,
        attributes,
        args,
        env
    );
    process::after_spawn();
    result
}

/// What a spawned program is given under another number: its own flag (close-on-exec) does not count there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn posix_spawn_file_actions_adddup2(
    actions: *mut c_void,
    from: c_int,
    to: c_int,
) -> c_int {
    process::given_to_spawned(from);
    next!(
        c"posix_spawn_file_actions_adddup2",
        fn(*mut c_void, c_int, c_int) -> c_int,
        actions,
        from,
        to
    )
}

/// The ways in which a process ends by itself.
#[unsafe(no_mangle)]
pub extern "C" fn _exit(status: c_int) -> ! {
    process::at_exit();
    end(status)
}

#[unsafe(no_mangle)]
pub extern "C" fn _Exit(status: c_int) -> ! {
    process::at_exit();
    end(status)
}

fn end(status: c_int) -> ! {
    loop {
        // (Not by libc's `syscall`, which is ours.) SAFETY: ends the process.
        let _ = unsafe { sys::call(libc::SYS_exit_group, [status as usize, 0, 0, 0, 0, 0]) };
    }
}

#[used]
#[unsafe(link_section = ".fini_array")]
static END: extern "C" fn() = at_exit;

extern "C" fn at_exit() {
    process::at_exit();
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn system(command: *const c_char) -> c_int {
    process::before_spawn();
    let status = next!(c"system", fn(*const c_char) -> c_int, command);
    process::after_spawn();
    status
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn popen(command: *const c_char, kind: *const c_char) -> *mut libc::FILE {
    process::before_spawn();
    let stream = next!(c"popen", fn(*const c_char, *const c_char) -> usize, command, kind);
    process::after_spawn();
    if stream == usize::MAX { core::ptr::null_mut() } else { stream as *mut libc::FILE }
}

/// Stands in for a handler without SA_RESTART.
extern "C" fn interrupting(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    run_handler(signal, info, context, true);
}

/// Stands in for one with SA_RESTART.
extern "C" fn restarting(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    run_handler(signal, info, context, false);
}

/// Notes that the program's handler runs, and runs it.
fn run_handler(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void, interrupts: bool) {
    signals::note(interrupts);
    let took = context::begin_handler();
    if let Some(handler) = signals::handler_of(signal) {
        // SAFETY: the program gave it to sigaction as the handler of this signal; one that takes only the number ignores the rest.
        unsafe {
            let handler: extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void) =
                core::mem::transmute(handler);
            handler(signal, info, context);
        }
    }
    // Again: a wait of the handler's own begins without a note.
    signals::note(interrupts);
    context::end_handler(took);
}

/// Is it one of ours that stands in for the program's?
fn stands_in(handler: usize) -> bool {
    handler == interrupting as *const () as usize || handler == restarting as *const () as usize
}

fn is_function(handler: usize) -> bool {
    handler != libc::SIG_DFL && handler != libc::SIG_IGN
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn sigaction(
    signal: c_int,
    new: *const libc::sigaction,
    old: *mut libc::sigaction,
) -> c_int {
    type Signature = *const libc::sigaction;
    let pass_on = |new: Signature| {
        next!(c"sigaction", fn(c_int, Signature, *mut libc::sigaction) -> c_int, signal, new, old)
    };
    let stood_in = signals::handler_of(signal);
    // SAFETY: the program's struct, if there is one.
    let handler = unsafe { new.as_ref() }.map(|action| action.sa_sigaction);
    // (Who has ours from the kernel by another way, and sets it again, means the handler that it stands in for.)
    let handler = handler.filter(|handler| is_function(*handler) && !stands_in(*handler));
    let done = match handler {
        // A vfork child shares our memory, not our handlers.
        Some(handler) if !process::borrowed() => {
            // SAFETY: the program's struct.
            let mut action = unsafe { *new };
            // Before the kernel knows ours: it may run at once. (And it stays when the program sets none: one may be about to run.)
            signals::set_handler(signal, Some(handler));
            let restarts = action.sa_flags & libc::SA_RESTART != 0;
            let ours = if restarts { restarting } else { interrupting };
            action.sa_sigaction = ours as *const () as usize;
            let done = pass_on(&action);
            if done != 0 {
                signals::set_handler(signal, stood_in);
            }
            done
        }
        _ => pass_on(new),
    };
    if done == 0 && !old.is_null() {
        // SAFETY: the kernel has just filled it.
        unsafe {
            if stands_in((*old).sa_sigaction) {
                (*old).sa_sigaction = stood_in.unwrap_or(libc::SIG_DFL);
            }
        }
    }
    done
}

/// Signals of which siginterrupt has said that handlers set by `signal` interrupt calls: a bit for each.
static BY_SIGNAL_INTERRUPTS: AtomicU64 = AtomicU64::new(0);

fn bit_of(signal: c_int) -> u64 {
    1 << ((signal as u32 - 1) % u64::BITS)
}

/// BSD semantics: handlers set by it restart calls, unless siginterrupt has said otherwise.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn signal(signal: c_int, handler: usize) -> usize {
    // SAFETY: zero is a valid sigaction; the calls are ours, with structs of ours.
    unsafe {
        let (mut new, mut old) =
            (core::mem::zeroed::<libc::sigaction>(), core::mem::zeroed::<libc::sigaction>());
        new.sa_sigaction = handler;
        // (A number that is no signal's fails here.)
        if handler == libc::SIG_ERR || libc::sigaddset(&mut new.sa_mask, signal) != 0 {
            *libc::__errno_location() = libc::EINVAL;
            return libc::SIG_ERR;
        }
        let interrupts = BY_SIGNAL_INTERRUPTS.load(Ordering::Relaxed) & bit_of(signal) != 0;
        new.sa_flags = if interrupts { 0 } else { libc::SA_RESTART };
        if sigaction(signal, &new, &mut old) != 0 { libc::SIG_ERR } else { old.sa_sigaction }
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn __sigaction(
    number: c_int,
    new: *const libc::sigaction,
    old: *mut libc::sigaction,
) -> c_int {
    // SAFETY: the contract of sigaction.
    unsafe { sigaction(number, new, old) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn bsd_signal(number: c_int, handler: usize) -> usize {
    // SAFETY: the contract of signal.
    unsafe { signal(number, handler) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ssignal(number: c_int, handler: usize) -> usize {
    // SAFETY: the contract of signal.
    unsafe { signal(number, handler) }
}

/// The handler stays, and it interrupts calls; or (SIG_HOLD) the signal is blocked.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sigset(number: c_int, handler: usize) -> usize {
    const SIG_HOLD: usize = 2;
    // SAFETY: zero is a valid sigaction and a valid mask; the calls are ours, with structs of ours.
    unsafe {
        let (mut new, mut old) =
            (core::mem::zeroed::<libc::sigaction>(), core::mem::zeroed::<libc::sigaction>());
        let (mut one, mut before): (libc::sigset_t, libc::sigset_t) = core::mem::zeroed();
        new.sa_sigaction = handler;
        let holds = handler == SIG_HOLD;
        let how = if holds { libc::SIG_BLOCK } else { libc::SIG_UNBLOCK };
        let action = if holds { core::ptr::null() } else { &raw const new };
        if libc::sigaddset(&mut one, number) != 0
            || sigaction(number, action, &mut old) != 0
            || libc::sigprocmask(how, &one, &mut before) != 0
        {
            return libc::SIG_ERR;
        }
        if libc::sigismember(&before, number) == 1 { SIG_HOLD } else { old.sa_sigaction }
    }
}

/// System V semantics: once, and it interrupts calls. What `signal` is in a program of strict ISO C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn __sysv_signal(number: c_int, handler: usize) -> usize {
    // SAFETY: zero is a valid sigaction; the call is ours, with structs of ours.
    unsafe {
        let (mut new, mut old) =
            (core::mem::zeroed::<libc::sigaction>(), core::mem::zeroed::<libc::sigaction>());
        new.sa_sigaction = handler;
        new.sa_flags = libc::SA_RESETHAND | libc::SA_NODEFER;
        if sigaction(number, &new, &mut old) != 0 { libc::SIG_ERR } else { old.sa_sigaction }
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn sysv_signal(number: c_int, handler: usize) -> usize {
    // SAFETY: the contract of signal.
    unsafe { __sysv_signal(number, handler) }
}

/// Changes what the handler that is there does to calls.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn siginterrupt(number: c_int, interrupt: c_int) -> c_int {
    // SAFETY: zero is a valid sigaction; both calls are ours, with a struct of ours.
    unsafe {
        let mut action: libc::sigaction = core::mem::zeroed();
        if sigaction(number, core::ptr::null(), &mut action) != 0 {
            return -1;
        }
        action.sa_flags &= !libc::SA_RESTART;
        if interrupt == 0 {
            action.sa_flags |= libc::SA_RESTART;
            BY_SIGNAL_INTERRUPTS.fetch_and(!bit_of(number), Ordering::Relaxed);
        } else {
            BY_SIGNAL_INTERRUPTS.fetch_or(bit_of(number), Ordering::Relaxed);
        }
        sigaction(number, &action, core::ptr::null_mut())
    }
}

// Variadic functions. Rust cannot define them, so a few instructions stand in front of libc's: they keep every register that may
// hold an argument, call `before`, which returns the address of libc's function, and jump there.

macro_rules! in_front_of {
    ($name:ident, $before:ident) => {
        #[cfg(target_arch = "x86_64")]
        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        pub unsafe extern "C" fn $name() {
            naked_asm!(
                "sub rsp, 200",
                "mov [rsp], rdi", "mov [rsp+8], rsi", "mov [rsp+16], rdx",
                "mov [rsp+24], rcx", "mov [rsp+32], r8", "mov [rsp+40], r9", "mov [rsp+48], rax",
                "movups [rsp+64], xmm0", "movups [rsp+80], xmm1", "movups [rsp+96], xmm2",
                "movups [rsp+112], xmm3", "movups [rsp+128], xmm4", "movups [rsp+144], xmm5",
                "movups [rsp+160], xmm6", "movups [rsp+176], xmm7",
                "call {before}",
                "mov r11, rax",
                "mov rdi, [rsp]", "mov rsi, [rsp+8]", "mov rdx, [rsp+16]",
                "mov rcx, [rsp+24]", "mov r8, [rsp+32]", "mov r9, [rsp+40]", "mov rax, [rsp+48]",
                "movups xmm0, [rsp+64]", "movups xmm1, [rsp+80]", "movups xmm2, [rsp+96]",
                "movups xmm3, [rsp+112]", "movups xmm4, [rsp+128]", "movups xmm5, [rsp+144]",
                "movups xmm6, [rsp+160]", "movups xmm7, [rsp+176]",
                "add rsp, 200",
                "jmp r11",
                before = sym $before,
            )
        }

        #[cfg(target_arch = "aarch64")]
        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        pub unsafe extern "C" fn $name() {
            naked_asm!(
                "stp x29, x30, [sp, #-208]!",
                "stp x0, x1, [sp, #16]", "stp x2, x3, [sp, #32]",
                "stp x4, x5, [sp, #48]", "stp x6, x7, [sp, #64]",
                "stp q0, q1, [sp, #80]", "stp q2, q3, [sp, #112]",
                "stp q4, q5, [sp, #144]", "stp q6, q7, [sp, #176]",
                "bl {before}",
                "mov x16, x0",
                "ldp x0, x1, [sp, #16]", "ldp x2, x3, [sp, #32]",
                "ldp x4, x5, [sp, #48]", "ldp x6, x7, [sp, #64]",
                "ldp q0, q1, [sp, #80]", "ldp q2, q3, [sp, #112]",
                "ldp q4, q5, [sp, #144]", "ldp q6, q7, [sp, #176]",
                "ldp x29, x30, [sp], #208",
                "br x16",
                before = sym $before,
            )
        }
    };
}

extern "C" fn before_dprintf(fd: c_int) -> *mut c_void {
    process::keep_fd_on_kernel(fd, Reason::Stdio);
    next_address!(c"dprintf")
}
extern "C" fn before_dprintf_chk(fd: c_int) -> *mut c_void {
    process::keep_fd_on_kernel(fd, Reason::Stdio);
    next_address!(c"__dprintf_chk")
}

in_front_of!(dprintf, before_dprintf);
in_front_of!(__dprintf_chk, before_dprintf_chk);

// Those that become another program, of which we must hear if they do not: the list is made the array that the others take.

macro_rules! takes_list {
    ($name:ident, $with_array:ident) => {
        #[cfg(target_arch = "x86_64")]
        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        pub unsafe extern "C" fn $name() {
            naked_asm!(
                "push r9", "push r8", "push rcx", "push rdx", "push rsi",
                "mov rsi, rsp",
                "lea rdx, [rsp+48]",
                "call {with_array}",
                "add rsp, 40",
                "ret",
                with_array = sym $with_array,
            )
        }

        #[cfg(target_arch = "aarch64")]
        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        pub unsafe extern "C" fn $name() {
            naked_asm!(
                "stp x29, x30, [sp, #-80]!",
                "stp x1, x2, [sp, #16]", "stp x3, x4, [sp, #32]", "stp x5, x6, [sp, #48]", "str x7, [sp, #64]",
                "add x1, sp, #16",
                "add x2, sp, #80",
                "bl {with_array}",
                "ldp x29, x30, [sp], #80",
                "ret",
                with_array = sym $with_array,
            )
        }
    };
}

/// Arguments behind the first one that come in registers.
const IN_REGISTERS: usize = if cfg!(target_arch = "x86_64") { 5 } else { 7 };
/// Arguments for which there is room on the stack.
const USUAL_COUNT: usize = 64;

/// Where the arguments of such a call are: those that came in registers, and the others.
#[derive(Clone, Copy)]
struct List(Strings, Strings);

impl List {
    /// # Safety
    /// The list has so many.
    unsafe fn at(self, index: usize) -> *mut c_char {
        // SAFETY: by contract.
        unsafe {
            match index.checked_sub(IN_REGISTERS) {
                None => *self.0.add(index),
                Some(other) => *self.1.add(other),
            }
        }
    }

    /// Gives the array, up to the null that ends it, to `exec`; and what follows behind that.
    ///
    /// # Safety
    /// The list ends with a null.
    unsafe fn as_array(self, exec: impl FnOnce(Strings, List, usize) -> c_int) -> c_int {
        // SAFETY: by contract, for these and those below.
        let count = (0..).find(|&index| unsafe { self.at(index) }.is_null()).unwrap_or(0);
        let with = |array: &mut [*mut c_char]| {
            for (index, place) in array.iter_mut().enumerate().take(count) {
                // SAFETY: by contract, below the null that ends the list.
                *place = unsafe { self.at(index) };
            }
            exec(array.as_ptr(), self, count + 1)
        };
        if count < USUAL_COUNT {
            return with(&mut [null_mut(); USUAL_COUNT]);
        }
        // (What a vfork child maps its parent keeps, if it becomes another program.)
        match Scratch::new(count + 1, null_mut()) {
            Some(mut array) => with(&mut array),
            None => {
                set_errno(libc::ENOMEM);
                -1
            }
        }
    }
}

extern "C" fn execl_array(path: *const c_char, first: Strings, others: Strings) -> c_int {
    // SAFETY: the contract of execl.
    unsafe { List(first, others).as_array(|args, _, _| execv(path, args)) }
}
extern "C" fn execlp_array(file: *const c_char, first: Strings, others: Strings) -> c_int {
    // SAFETY: the contract of execlp.
    unsafe { List(first, others).as_array(|args, _, _| execvp(file, args)) }
}
extern "C" fn execle_array(path: *const c_char, first: Strings, others: Strings) -> c_int {
    let exec = |args, list: List, behind| {
        // SAFETY: the contract of execle: the environment follows.
        unsafe { execve(path, args, list.at(behind).cast_const().cast()) }
    };
    // SAFETY: the contract of execle: a list that ends with a null.
    unsafe { List(first, others).as_array(exec) }
}

takes_list!(execl, execl_array);
takes_list!(execlp, execlp_array);
takes_list!(execle, execle_array);
