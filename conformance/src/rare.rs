//! Calls that few programs make, as safe functions (see `sys`).

use std::ffi::{CString, c_int, c_long, c_uint, c_void};
use std::mem::zeroed;
use std::ptr::{null, null_mut};
use std::time::Duration;

use crate::sys::{self, Errno, Fd, R};

fn result(ret: isize) -> R<usize> {
    usize::try_from(ret).map_err(|_| {
        Errno(std::io::Error::last_os_error().raw_os_error().expect("an error of the system"))
    })
}

fn unit(ret: c_int) -> R<()> {
    result(ret as isize).map(|_| ())
}

/// Which entry points of asynchronous I/O.
#[derive(Clone, Copy)]
pub enum Aio {
    Plain,
    Large,
    List,
}

unsafe extern "C" {
    fn aio_read64(request: *mut libc::aiocb) -> c_int;
    fn aio_write64(request: *mut libc::aiocb) -> c_int;
    fn sigset(signal: c_int, handler: usize) -> usize;
    fn sockatmark(fd: c_int) -> c_int;
    fn execveat(
        at: c_int,
        path: *const libc::c_char,
        args: *const *const libc::c_char,
        env: *const *const libc::c_char,
        flags: c_int,
    ) -> c_int;
    static environ: *const *const libc::c_char;
}

fn aio(fd: Fd, buf: *mut c_void, len: usize, write: bool, how: Aio) -> R<usize> {
    // SAFETY: zero is a valid aiocb; it and its buffer live until the request is done.
    unsafe {
        let mut request: libc::aiocb = zeroed();
        request.aio_fildes = fd;
        request.aio_buf = buf;
        request.aio_nbytes = len;
        request.aio_lio_opcode = if write { libc::LIO_WRITE } else { libc::LIO_READ };
        unit(match (how, write) {
            (Aio::Plain, true) => libc::aio_write(&mut request),
            (Aio::Plain, false) => libc::aio_read(&mut request),
            (Aio::Large, true) => aio_write64(&mut request),
            (Aio::Large, false) => aio_read64(&mut request),
            (Aio::List, _) => {
                libc::lio_listio(libc::LIO_WAIT, [&raw mut request].as_ptr(), 1, null_mut())
            }
        })?;
        let list = [&raw const request];
        while libc::aio_error(&request) == libc::EINPROGRESS {
            libc::aio_suspend(list.as_ptr(), 1, null());
        }
        match libc::aio_error(&request) {
            0 => Ok(libc::aio_return(&mut request) as usize),
            error => Err(Errno(error)),
        }
    }
}

pub fn aio_send(fd: Fd, data: &[u8], how: Aio) -> R<usize> {
    aio(fd, data.as_ptr().cast_mut().cast(), data.len(), true, how)
}

pub fn aio_receive(fd: Fd, len: usize, how: Aio) -> R<Vec<u8>> {
    let mut buf = vec![0; len];
    let got = aio(fd, buf.as_mut_ptr().cast(), len, false, how)?;
    buf.truncate(got);
    Ok(buf)
}

/// Becomes another program; returns only what went wrong.
pub fn exec_at(path: &str, args: &[&str]) -> Errno {
    let owned: Vec<CString> =
        args.iter().map(|a| CString::new(*a).expect("no zero byte")).collect();
    let mut raw: Vec<_> = owned.iter().map(|a| a.as_ptr()).collect();
    raw.push(null());
    let path = CString::new(path).expect("no zero byte");
    // SAFETY: the strings end with zero bytes and the array with a null; nobody changes the environment.
    let failed = unsafe { execveat(libc::AT_FDCWD, path.as_ptr(), raw.as_ptr(), environ, 0) };
    result(failed as isize).expect_err("exec returned")
}

/// The same, by a call that takes its arguments one by one: a program without any.
pub fn exec_list(program: &str) -> Errno {
    let program = CString::new(program).expect("no zero byte");
    // SAFETY: strings that end with zero bytes, and a null.
    let failed =
        unsafe { libc::execlp(program.as_ptr(), program.as_ptr(), null::<libc::c_char>()) };
    result(failed as isize).expect_err("exec returned")
}

/// Becomes a shell that says how many arguments it has, and a word of its environment: by lists that are longer than registers can hold, and
/// than usual.
pub fn exec_long_list(many: bool) -> Errno {
    let (shell, command) = (c"/bin/sh".as_ptr(), c"echo $# $8 $WORD".as_ptr());
    let (option, x, end) = (c"-c".as_ptr(), c"x".as_ptr(), null::<libc::c_char>());
    let eighth = c"the eighth".as_ptr();
    let environment = [c"WORD=and a word".as_ptr(), end];
    // SAFETY: strings that end with zero bytes, a null, and an environment that ends with one.
    let failed = unsafe {
        if many {
            libc::execl(
                shell, shell, option, command, x, x, x, x, x, x, x, x, eighth, x, x, x, x, x, x, x,
                x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x,
                x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, end,
            )
        } else {
            libc::execle(
                shell,
                shell,
                option,
                command,
                x,
                x,
                x,
                x,
                x,
                x,
                x,
                x,
                eighth,
                end,
                environment.as_ptr(),
            )
        }
    };
    result(failed as isize).expect_err("exec returned")
}

/// As fork, by the system call itself; the child ends so too.
pub fn fork_around_libc(work: impl FnOnce() -> c_int) -> c_int {
    // SAFETY: one thread, so no lock is held by a thread that the child lacks; no new stack and no pointers.
    unsafe {
        match libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) {
            0 => {
                let status = work();
                loop {
                    libc::syscall(libc::SYS_exit_group, status);
                }
            }
            pid => {
                assert!(pid > 0, "clone: {}", std::io::Error::last_os_error());
                pid as c_int
            }
        }
    }
}

/// A process that shares this one's memory, but not its descriptors, sends and closes its copy; its number, and what its send returned. This thread waits for
/// it.
pub fn send_by_a_process_in_our_memory(fd: Fd, data: &[u8]) -> (String, isize) {
    struct Work<'a> {
        fd: Fd,
        data: &'a [u8],
        sent: isize,
    }
    extern "C" fn child(work: *mut c_void) -> c_int {
        // SAFETY: the `Work` below, which lives until we have ended.
        unsafe {
            let work = &mut *work.cast::<Work>();
            work.sent = libc::send(work.fd, work.data.as_ptr().cast(), work.data.len(), 0);
            libc::close(work.fd);
            0
        }
    }
    let mut work = Work { fd, data, sent: 0 };
    let mut stack = vec![0u128; 16 << 10];
    // SAFETY: the child runs on the stack, whose end is aligned, and has ended when it is freed.
    let pid = unsafe {
        let top = stack.as_mut_ptr_range().end.cast();
        libc::clone(child, top, libc::CLONE_VM | libc::SIGCHLD, (&raw mut work).cast())
    };
    assert!(pid > 0, "clone: {}", std::io::Error::last_os_error());
    (crate::sys::wait_for(pid), work.sent)
}

/// This thread runs on one processor only, and before all that has a lower number, if it may.
pub fn take_priority(priority: c_int) {
    // SAFETY: zero is an empty set; structs of ours.
    unsafe {
        let (mut allowed, mut one): (libc::cpu_set_t, libc::cpu_set_t) = zeroed();
        libc::sched_getaffinity(0, size_of_val(&allowed), &mut allowed);
        let first = (0..libc::CPU_SETSIZE as usize).find(|&cpu| libc::CPU_ISSET(cpu, &allowed));
        libc::CPU_SET(first.unwrap_or(0), &mut one);
        libc::sched_setaffinity(0, size_of_val(&one), &one);
        let how = libc::sched_param { sched_priority: priority };
        libc::sched_setscheduler(0, libc::SCHED_FIFO, &how);
    }
}

extern "C" fn nothing(_: c_int) {}

/// Sets a handler that does nothing, as System V has it.
pub fn sigset_handler(signal: c_int) {
    // SAFETY: a handler that may run at any time.
    unsafe { sigset(signal, nothing as *const () as usize) };
}

/// Blocks the signal, and tells whether it was blocked.
pub fn sigset_hold(signal: c_int) -> bool {
    const SIG_HOLD: usize = 2;
    // SAFETY: passes no pointers.
    unsafe { sigset(signal, SIG_HOLD) == SIG_HOLD }
}

pub fn at_mark(fd: Fd) -> R<usize> {
    // SAFETY: passes no pointers.
    result(unsafe { sockatmark(fd) } as isize)
}

pub fn close_range_flags(first: Fd, last: Fd, flags: c_uint) -> R<()> {
    // SAFETY: passes no pointers.
    unit(unsafe { libc::close_range(first as c_uint, last as c_uint, flags as c_int) })
}

/// linux/seccomp.h.
const NOTIFICATION: libc::c_ulong = 0xc050_2100;
const NOTIFICATION_ANSWER: libc::c_ulong = 0xc018_2101;
const GO_ON: u32 = 1;

/// `struct seccomp_notif`, as far as it is of interest.
#[derive(Default)]
#[repr(C)]
pub struct HeldCall {
    id: u64,
    whose: [u32; 2],
    number: i32,
    architecture: u32,
    at: u64,
    arguments: [u64; 6],
}

/// From now on these calls of this thread wait until whoever has the descriptor lets them go on.
pub fn hold_calls(calls: &[libc::c_long]) -> Fd {
    let load = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
    let is = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
    let end = (libc::BPF_RET | libc::BPF_K) as u16;
    let step = |code, jf, k| libc::sock_filter { code, jt: 0, jf, k };
    let mut steps = vec![step(load, 0, 0)];
    for call in calls {
        steps.push(step(is, 1, *call as u32));
        steps.push(step(end, 0, libc::SECCOMP_RET_USER_NOTIF));
    }
    steps.push(step(end, 0, libc::SECCOMP_RET_ALLOW));
    let program = libc::sock_fprog { len: steps.len() as u16, filter: steps.as_mut_ptr() };
    let flags = libc::SECCOMP_FILTER_FLAG_NEW_LISTENER;
    // (By no call of libc's, after which the process would be left alone.)
    // SAFETY: a program that lives; it concerns this thread alone.
    let listener = unsafe {
        unit(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)).expect("prctl");
        let operation = libc::SECCOMP_SET_MODE_FILTER as usize;
        around_libc(libc::SYS_seccomp, [operation, flags as usize, &raw const program as usize])
    };
    assert!(listener >= 0, "no filter: {listener}");
    listener as Fd
}

/// A system call.
///
/// # Safety
/// As for the call.
unsafe fn around_libc(number: c_long, [a, b, c]: [usize; 3]) -> isize {
    let done;
    // SAFETY: by contract; the kernel keeps all other registers.
    unsafe {
        #[cfg(target_arch = "x86_64")]
        std::arch::asm!(
            "syscall",
            inlateout("rax") number as isize => done,
            in("rdi") a,
            in("rsi") b,
            in("rdx") c,
            lateout("rcx") _,
            lateout("r11") _,
        );
        #[cfg(target_arch = "aarch64")]
        std::arch::asm!(
            "svc 0",
            in("x8") number,
            inlateout("x0") a as isize => done,
            in("x1") b,
            in("x2") c,
        );
    }
    done
}

/// Lets such calls go on until it is `over`; `amid` comes before each.
pub fn let_go_on(listener: Fd, over: impl Fn() -> bool, mut amid: impl FnMut(&HeldCall)) {
    while !over() {
        if crate::sys::poll(&[(listener, libc::POLLIN)], 5).is_ok_and(|(ready, _)| ready == 0) {
            continue;
        }
        let mut call = HeldCall::default();
        // SAFETY: room for a notification.
        if unsafe { libc::ioctl(listener, NOTIFICATION as _, &raw mut call) } != 0 {
            continue;
        }
        amid(&call);
        let mut answer = [call.id, 0, u64::from(GO_ON) << 32];
        // SAFETY: a `struct seccomp_notif_resp`.
        unsafe { libc::ioctl(listener, NOTIFICATION_ANSWER as _, answer.as_mut_ptr()) };
    }
}

impl HeldCall {
    pub fn is(&self, call: libc::c_long) -> bool {
        libc::c_long::from(self.number) == call
    }

    pub fn argument(&self, which: usize) -> u64 {
        self.arguments[which]
    }

    /// Does it make the memory of a connection, or look at it?
    pub fn is_about_a_connection(&self) -> bool {
        if !self.is(libc::SYS_memfd_create) {
            return self.is(libc::SYS_fcntl) && self.argument(1) as i32 == libc::F_GET_SEALS;
        }
        // SAFETY: the name that a thread of this process has given, which waits.
        let name = unsafe { std::ffi::CStr::from_ptr(self.argument(0) as *const libc::c_char) };
        name == c"ringlet-segment"
    }
}

/// As fork, but the child shares the table of descriptors.
pub fn fork_with_files(work: impl FnOnce() -> c_int) -> c_int {
    let flags = libc::CLONE_FILES | libc::SIGCHLD;
    // SAFETY: one thread, so no lock is held by a thread that the child lacks; no new stack and no pointers.
    match unsafe { libc::syscall(libc::SYS_clone, flags, 0, 0, 0, 0) } {
        0 => crate::sys::exit_now(work()),
        pid => {
            assert!(pid > 0, "clone: {}", std::io::Error::last_os_error());
            pid as c_int
        }
    }
}

/// The bytes that came, and whether time was left.
pub fn recvmmsg_timeout(fd: Fd, lens: &[usize], timeout: Duration) -> R<(Vec<Vec<u8>>, bool)> {
    let mut bufs: Vec<Vec<u8>> = lens.iter().map(|&len| vec![0; len]).collect();
    let mut vectors: Vec<libc::iovec> = bufs
        .iter_mut()
        .map(|buf| libc::iovec { iov_base: buf.as_mut_ptr().cast(), iov_len: buf.len() })
        .collect();
    let mut headers: Vec<libc::mmsghdr> = vectors
        .iter_mut()
        .map(|vector| {
            // SAFETY: zero is a valid mmsghdr.
            let mut header: libc::mmsghdr = unsafe { zeroed() };
            header.msg_hdr.msg_iov = vector;
            header.msg_hdr.msg_iovlen = 1;
            header
        })
        .collect();
    let mut time =
        libc::timespec { tv_sec: timeout.as_secs() as _, tv_nsec: timeout.subsec_nanos() as _ };
    let count = headers.len() as c_uint;
    // SAFETY: headers, vectors and buffers live; `time` too.
    let got = unsafe { libc::recvmmsg(fd, headers.as_mut_ptr(), count, 0, &mut time) };
    let got = result(got as isize)?;
    for (buf, header) in bufs.iter_mut().zip(&headers) {
        buf.truncate(header.msg_len as usize);
    }
    bufs.truncate(got);
    Ok((bufs, time.tv_sec != 0 || time.tv_nsec != 0))
}

/// Makes an io_uring of its own and drops it.
pub fn make_io_uring() {
    let mut parameters = [0u8; 256];
    // SAFETY: struct io_uring_params is shorter; what it holds is of no interest.
    let ring = unsafe { libc::syscall(libc::SYS_io_uring_setup, 4, parameters.as_mut_ptr()) };
    if ring >= 0 {
        // SAFETY: ours.
        unsafe { libc::close(ring as c_int) };
    }
}

/// The same, kept, by a system call that no library sees.
pub fn own_io_uring() -> Fd {
    let mut parameters = [0u8; 256];
    // SAFETY: struct io_uring_params is shorter.
    unsafe { own_call(libc::SYS_io_uring_setup, [4, parameters.as_mut_ptr() as usize, 0]) as Fd }
}

/// Reads by such a call.
pub fn own_read(fd: Fd, len: usize) -> R<Vec<u8>> {
    let mut buf = vec![0; len];
    // SAFETY: a buffer and its length.
    let got = unsafe { own_call(libc::SYS_read, [fd as usize, buf.as_mut_ptr() as usize, len]) };
    if got < 0 {
        return Err(Errno(-got as c_int));
    }
    buf.truncate(got as usize);
    Ok(buf)
}

/// # Safety
/// As for the system call.
#[cfg(target_arch = "x86_64")]
unsafe fn own_call(number: c_long, [a, b, c]: [usize; 3]) -> isize {
    let result;
    // SAFETY: the caller's; the kernel changes these two registers.
    unsafe {
        core::arch::asm!("syscall", inlateout("rax") number as isize => result, in("rdi") a, in("rsi") b, in("rdx") c, out("rcx") _, out("r11") _)
    };
    result
}

/// # Safety
/// As above.
#[cfg(target_arch = "aarch64")]
unsafe fn own_call(number: c_long, [a, b, c]: [usize; 3]) -> isize {
    let result;
    // SAFETY: the caller's.
    unsafe {
        core::arch::asm!("svc 0", in("x8") number, inlateout("x0") a as isize => result, in("x1") b, in("x2") c)
    };
    result
}

/// Loads liburing, makes a ring, and unloads it: what lay there then is nowhere.
pub fn makes_uring_once() -> bool {
    // SAFETY: C strings.
    let library = unsafe { libc::dlopen(c"liburing.so.2".as_ptr(), libc::RTLD_NOW) };
    let made = Uring::new().is_some();
    // SAFETY: two handles: this one's, and the one of `Uring::new`.
    let place = unsafe {
        let place = libc::dlsym(library, c"io_uring_get_probe".as_ptr()) as usize & !0xfff;
        libc::dlclose(library);
        libc::dlclose(library);
        place
    };
    let (fixed, none) = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE, -1);
    // SAFETY: a place where nothing is, if it can be had.
    unsafe { libc::mmap(place as *mut libc::c_void, 4096, libc::PROT_NONE, fixed, none, 0) };
    made
}

/// An io_uring made by liburing, as far as cases use one.
pub struct Uring {
    ring: Box<[u64; 64]>,
    submit: unsafe extern "C" fn(*mut u64, c_uint) -> c_int,
    exit: unsafe extern "C" fn(*mut u64),
}

pub const URING_WRITE: u8 = 23;
pub const URING_RECV: u8 = 27;

impl Uring {
    /// `None`: there is no liburing, or the kernel has no rings.
    pub fn new() -> Option<Uring> {
        // SAFETY: C strings.
        let library = unsafe { libc::dlopen(c"liburing.so.2".as_ptr(), libc::RTLD_NOW) };
        let find = |name: &std::ffi::CStr| {
            // SAFETY: a handle, and a C string.
            let found = unsafe { libc::dlsym(library, name.as_ptr()) };
            (!library.is_null() && !found.is_null()).then_some(found)
        };
        type Init = unsafe extern "C" fn(c_uint, *mut u64, c_uint) -> c_int;
        // SAFETY: liburing's functions of these names.
        let (init, submit, exit) = unsafe {
            (
                std::mem::transmute::<*mut libc::c_void, Init>(find(c"io_uring_queue_init")?),
                std::mem::transmute::<
                    *mut libc::c_void,
                    unsafe extern "C" fn(*mut u64, c_uint) -> c_int,
                >(find(c"io_uring_submit_and_wait")?),
                std::mem::transmute::<*mut libc::c_void, unsafe extern "C" fn(*mut u64)>(find(
                    c"io_uring_queue_exit",
                )?),
            )
        };
        let mut ring = Box::new([0; 64]);
        // SAFETY: its `struct io_uring` is 216 bytes long.
        (unsafe { init(8, ring.as_mut_ptr(), 0) } == 0).then_some(Uring { ring, submit, exit })
    }

    /// Fills an operation in.
    pub fn prepare(&mut self, code: u8, fd: Fd, bytes: *mut u8, len: usize) {
        // SAFETY: struct io_uring_sq: the mask's place is its third word, the entries' its eighth, and the next one's number the upper half of the
        // ninth. An entry: code, descriptor, offset, address, length.
        unsafe {
            let words = self.ring.as_mut_ptr();
            let next = words.add(8).cast::<u32>().add(1);
            let at = (*next & *(*words.add(2) as *const u32)) as usize;
            let entry = (*words.add(7) as *mut u8).add(at * 64);
            entry.write_bytes(0, 64);
            *entry = code;
            entry.add(4).cast::<c_int>().write(fd);
            entry.add(16).cast::<usize>().write(bytes as usize);
            entry.add(24).cast::<u32>().write(len as u32);
            *next += 1;
        }
    }

    /// Hands over what was filled in, and waits until so many are done.
    pub fn submit(&mut self, wait: u32) -> c_int {
        // SAFETY: liburing's function with its ring.
        unsafe { (self.submit)(self.ring.as_mut_ptr(), wait) }
    }

    /// The result of one that is done.
    pub fn result(&mut self) -> c_int {
        // SAFETY: struct io_uring_cq begins at the 14th word: the places of head, tail and mask; its seventh word is that of the entries, of 16
        // bytes, with the result behind the first 8.
        unsafe {
            let words = self.ring.as_mut_ptr().add(13);
            let head = *words as *mut u32;
            let at = (*head & *(*words.add(2) as *const u32)) as usize;
            let result = *((*words.add(6) as *const u8).add(at * 16 + 8).cast::<c_int>());
            (*head.cast::<std::sync::atomic::AtomicU32>())
                .fetch_add(1, std::sync::atomic::Ordering::Release);
            result
        }
    }
}

impl Drop for Uring {
    fn drop(&mut self) {
        // SAFETY: liburing's function with its ring.
        unsafe { (self.exit)(self.ring.as_mut_ptr()) }
    }
}

/// A set that no library sees, watching one descriptor: an event disarms it.
pub fn raw_epoll(fd: Fd) -> R<Fd> {
    // SAFETY: no memory is passed.
    let set = unsafe { libc::syscall(libc::SYS_epoll_create1, libc::EPOLL_CLOEXEC) };
    let set = result(set as isize)? as Fd;
    raw_epoll_control(set, libc::EPOLL_CTL_ADD, fd)?;
    Ok(set)
}

/// Adds the descriptor to such a set, or arms it anew.
pub fn raw_epoll_control(set: Fd, what: c_int, fd: Fd) -> R<()> {
    let mut event =
        libc::epoll_event { events: (libc::EPOLLIN | libc::EPOLLONESHOT) as u32, u64: 0 };
    // SAFETY: an event for the kernel to read.
    unit(unsafe { libc::syscall(libc::SYS_epoll_ctl, set, what, fd, &raw mut event) } as c_int)
}

pub fn raw_epoll_wait(set: Fd, patience: Duration) -> R<usize> {
    let mut event = libc::epoll_event { events: 0, u64: 0 };
    let (mask, len) = (null::<c_void>(), 8usize);
    let patience = patience.as_millis() as c_int;
    // SAFETY: room for one event; no mask. (Not every architecture has an epoll_wait without one.)
    let got = unsafe {
        libc::syscall(libc::SYS_epoll_pwait, set, &raw mut event, 1, patience, mask, len)
    };
    result(got as isize)
}

/// A read that no library sees.
pub fn raw_read(fd: Fd, len: usize) -> R<Vec<u8>> {
    let mut buf = vec![0; len];
    // SAFETY: a buffer and its length.
    let got: c_long = unsafe { libc::syscall(libc::SYS_read, fd, buf.as_mut_ptr(), len) };
    let got = result(got as isize)?;
    buf.truncate(got);
    Ok(buf)
}

/// TCP_ULP.
pub fn set_upper_protocol(fd: Fd, name: &str) -> R<()> {
    // SAFETY: `name` is valid for its length.
    unit(unsafe {
        libc::setsockopt(
            fd,
            libc::IPPROTO_TCP,
            libc::TCP_ULP,
            name.as_ptr().cast(),
            name.len() as libc::socklen_t,
        )
    })
}

/// A program for SO_ATTACH_BPF that lets nothing through.
pub fn filter_of_all() -> R<Fd> {
    const BPF_PROG_LOAD: c_int = 5;
    const BPF_PROG_TYPE_SOCKET_FILTER: u64 = 1;
    // r0 = 0; exit
    let instructions = [0xb7u64, 0x95];
    let license = c"GPL";
    let mut attributes = [0u64; 16];
    attributes[0] = BPF_PROG_TYPE_SOCKET_FILTER | (instructions.len() as u64) << 32;
    attributes[1] = instructions.as_ptr() as u64;
    attributes[2] = license.as_ptr() as u64;
    let bytes = size_of_val(&attributes);
    // SAFETY: attributes with what they point to.
    let made = unsafe { libc::syscall(libc::SYS_bpf, BPF_PROG_LOAD, attributes.as_ptr(), bytes) };
    result(made as isize).map(|fd| fd as Fd)
}

pub fn set_user(user: libc::uid_t) -> R<()> {
    // SAFETY: passes no pointers.
    unit(unsafe { libc::setresuid(user, user, user) })
}

pub fn change_root(path: &str) -> R<()> {
    let path = CString::new(path).expect("no zero byte");
    // SAFETY: a string that ends with a zero byte.
    unit(unsafe { libc::chroot(path.as_ptr()) })
}

/// The first version of glibc on this machine's kind, as its symbols name it.
#[cfg(target_arch = "x86_64")]
pub const OLDEST_VERSION: &str = "GLIBC_2.2.5";
#[cfg(not(target_arch = "x86_64"))]
pub const OLDEST_VERSION: &str = "GLIBC_2.17";

fn c_string(text: &str) -> CString {
    CString::new(text).expect("no zero byte")
}

/// Loads a library; its handle.
pub fn load(path: &str, flags: c_int) -> usize {
    // SAFETY: a C string; the library has no constructor that harms us.
    let handle = unsafe { libc::dlopen(c_string(path).as_ptr(), flags) };
    assert!(!handle.is_null(), "dlopen {path}");
    handle as usize
}

/// The same, with all that it needs, apart from what the program has.
pub fn load_apart(path: &str, flags: c_int) -> usize {
    // SAFETY: as in `load`.
    let handle = unsafe { libc::dlmopen(libc::LM_ID_NEWLM, c_string(path).as_ptr(), flags) };
    assert!(!handle.is_null(), "dlmopen {path}");
    handle as usize
}

fn look_up(library: usize, version: Option<&str>, name: &str) -> *mut c_void {
    let (library, name) = (library as *mut c_void, c_string(name));
    // SAFETY: a handle and C strings.
    let found = unsafe {
        match version {
            None => libc::dlsym(library, name.as_ptr()),
            Some(version) => libc::dlvsym(library, name.as_ptr(), c_string(version).as_ptr()),
        }
    };
    assert!(!found.is_null(), "dlsym {name:?}");
    found
}

/// Calls a function of `around.c`.
pub fn call(library: usize, name: &str, fd: Fd) -> c_int {
    // SAFETY: each of them takes and returns an int.
    unsafe {
        let function: extern "C" fn(c_int) -> c_int =
            std::mem::transmute(look_up(library, None, name));
        function(fd)
    }
}

/// Is there something to receive, by libc's poll as it was looked up? (Waits for it.)
pub fn poll_by_handle(libc: usize, version: Option<&str>, fd: Fd) -> R<usize> {
    let mut entry = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    type Poll = unsafe extern "C" fn(*mut libc::pollfd, libc::nfds_t, c_int) -> c_int;
    // SAFETY: libc's function of this name; one entry.
    let ready = unsafe {
        let poll: Poll = std::mem::transmute(look_up(libc, version, "poll"));
        poll(&mut entry, 1, 10_000)
    };
    result(ready as isize).map(|_| entry.revents as usize)
}

pub fn recv_by_handle(libc: usize, version: Option<&str>, fd: Fd, len: usize) -> R<Vec<u8>> {
    let mut buf = vec![0u8; len];
    type Recv = unsafe extern "C" fn(c_int, *mut c_void, usize, c_int) -> isize;
    // SAFETY: libc's function of this name; a buffer of its length.
    let got = unsafe {
        let recv: Recv = std::mem::transmute(look_up(libc, version, "recv"));
        recv(fd, buf.as_mut_ptr().cast(), len, libc::MSG_DONTWAIT)
    };
    buf.truncate(result(got)?);
    Ok(buf)
}

pub fn send_by_handle(libc: usize, version: Option<&str>, fd: Fd, data: &[u8]) -> R<usize> {
    type Send = unsafe extern "C" fn(c_int, *const c_void, usize, c_int) -> isize;
    // SAFETY: libc's function of this name; a buffer of its length.
    result(unsafe {
        let send: Send = std::mem::transmute(look_up(libc, version, "send"));
        send(fd, data.as_ptr().cast(), data.len(), 0)
    })
}

/// Before this process starts threads.
pub fn set_environment(name: &str, value: &str) {
    // SAFETY: one thread.
    unsafe { std::env::set_var(name, value) };
}

/// Runs `work` in a thread with the smallest stack that there is, where it must not need much itself; what it returned.
pub fn on_the_smallest_stack<F: FnMut() -> usize>(mut work: F) -> usize {
    extern "C" fn run<F: FnMut() -> usize>(work: *mut c_void) -> *mut c_void {
        // SAFETY: what `pthread_create` was given, which lives until the thread is joined.
        unsafe { (*work.cast::<F>())() as *mut c_void }
    }
    // SAFETY: a valid attribute and thread; `work` outlives the thread.
    unsafe {
        let mut attribute: libc::pthread_attr_t = zeroed();
        libc::pthread_attr_init(&mut attribute);
        let sized = libc::pthread_attr_setstacksize(&mut attribute, libc::PTHREAD_STACK_MIN);
        assert_eq!(sized, 0, "pthread_attr_setstacksize");
        let (mut thread, mut returned): (libc::pthread_t, _) = (zeroed(), null_mut());
        let made = libc::pthread_create(&mut thread, &attribute, run::<F>, (&raw mut work).cast());
        assert_eq!(made, 0, "pthread_create");
        libc::pthread_join(thread, &mut returned);
        returned as usize
    }
}

/// What `every_call` needs, made where there is room.
pub struct Room {
    bytes: Vec<u8>,
    vectors: Vec<libc::iovec>,
    entries: Vec<libc::pollfd>,
    file: Fd,
    copy: Fd,
    pipe: (Fd, Fd),
    set: Fd,
}

pub const PIECES: usize = 1000;
const PIECE_BYTES: usize = 7;

impl Room {
    pub fn new(file: Fd, copy: Fd, pipe: (Fd, Fd), set: Fd) -> Room {
        let mut bytes = vec![1u8; PIECES * PIECE_BYTES];
        let vectors = bytes
            .chunks_mut(PIECE_BYTES)
            .map(|piece| libc::iovec { iov_base: piece.as_mut_ptr().cast(), iov_len: piece.len() })
            .collect();
        let entries = vec![libc::pollfd { fd: -1, events: libc::POLLIN, revents: 0 }; 300];
        Room { bytes, vectors, entries, file, copy, pipe, set }
    }

    /// Sends by each call from `from` and receives by each at `to`, and waits by each; the number of the first call that did not do
    /// what it should, or 0.
    pub fn every_call(&mut self, from: Fd, to: Fd) -> usize {
        let (bytes, all) = (self.bytes.as_mut_ptr().cast::<c_void>(), self.bytes.len());
        let (vectors, count) = (self.vectors.as_mut_ptr(), self.vectors.len() as c_int);
        let mut number = 0;
        let mut must = |good: bool| {
            number += 1;
            if good { Ok(()) } else { Err(number) }
        };
        // SAFETY: the buffers, vectors and entries are ours, of these lengths; zero is a valid header, set, mask and event.
        let mut run = || unsafe {
            let mut header: libc::mmsghdr = zeroed();
            header.msg_hdr.msg_iov = vectors;
            header.msg_hdr.msg_iovlen = count as usize;
            let one = self.entries.as_mut_ptr();
            (*one).fd = to;
            let now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
            let mut none = libc::timeval { tv_sec: 0, tv_usec: 0 };
            let mut readable: libc::fd_set = zeroed();
            let mut event: libc::epoll_event = zeroed();
            let whole = libc::MSG_WAITALL;
            let take = || libc::recv(to, bytes, all, whole) == all as isize;
            must(libc::send(from, bytes, all, 0) == all as isize)?;
            for entries in [1, 100, 300] {
                must(libc::poll(one, entries, -1) == 1)?;
                must(libc::ppoll(one, entries, null(), null()) == 1)?;
            }
            libc::FD_SET(to, &mut readable);
            must(libc::select(to + 1, &mut readable, null_mut(), null_mut(), &mut none) == 1)?;
            must(libc::pselect(to + 1, &mut readable, null_mut(), null_mut(), &now, null()) == 1)?;
            must(libc::epoll_wait(self.set, &mut event, 1, -1) == 1)?;
            must(libc::epoll_pwait(self.set, &mut event, 1, -1, null()) == 1)?;
            must(libc::recv(to, bytes, all, whole | libc::MSG_PEEK) == all as isize)?;
            must(take())?;
            must(libc::writev(from, vectors, count) == all as isize && take())?;
            must(libc::sendmsg(from, &header.msg_hdr, 0) == all as isize)?;
            must(libc::recvmsg(to, &mut header.msg_hdr, whole) == all as isize)?;
            must(libc::sendmmsg(from, &mut header, 1, 0) == 1)?;
            must(libc::recvmmsg(to, &mut header, 1, whole, null_mut()) == 1)?;
            must(libc::write(from, bytes, all) == all as isize)?;
            must(libc::recvmsg(to, &mut header.msg_hdr, whole | libc::MSG_PEEK) == all as isize)?;
            let got = libc::readv(to, vectors, count);
            let rest = all as isize - got;
            must(got > 0 && (rest == 0 || libc::recv(to, bytes, rest as usize, whole) == rest))?;
            must(libc::pwrite(self.file, bytes, all, 0) == all as isize)?;
            let mut place = 0;
            must(libc::sendfile(from, self.file, &mut place, all) == all as isize && take())?;
            place = 0;
            must(libc::sendfile(self.copy, self.file, &mut place, all) == all as isize)?;
            must(libc::send(from, bytes, 100, 0) == 100)?;
            let moved = libc::splice(to, null_mut(), self.pipe.1, null_mut(), 100, 0);
            must(moved == 100)?;
            let moved = libc::splice(self.pipe.0, null_mut(), from, null_mut(), 100, 0);
            must(moved == 100 && libc::recv(to, bytes, 100, whole) == 100)?;
            must(libc::epoll_ctl(self.set, libc::EPOLL_CTL_MOD, to, &mut event) == 0)?;
            must(libc::close(libc::dup(to)) == 0)
        };
        run().err().unwrap_or(0)
    }
}

/// What a process that has closed itself in may still call.
#[derive(Clone, Copy)]
pub enum Calls {
    /// read, write and the thread's own end.
    Strict,
    /// These, and what memory, signals and an end take, by prctl.
    Filter(&'static [c_long]),
    /// The same by seccomp.
    FilterBySyscall(&'static [c_long]),
}

const ALWAYS: [c_long; 9] = [
    libc::SYS_exit_group,
    libc::SYS_exit,
    libc::SYS_rt_sigreturn,
    libc::SYS_brk,
    libc::SYS_mmap,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_close,
    libc::SYS_futex,
];

/// From now on the process is killed for any other.
pub fn close_in(calls: Calls) {
    let step =
        |code: u32, k: u32, jt: u8, jf: u8| libc::sock_filter { code: code as u16, jt, jf, k };
    let given = match calls {
        Calls::Strict => &[][..],
        Calls::Filter(given) | Calls::FilterBySyscall(given) => given,
    };
    // (The number of a call is the first word that a filter is shown.)
    let mut filter = vec![step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0)];
    for number in ALWAYS.iter().chain(given) {
        filter.push(step(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, *number as u32, 0, 1));
        filter.push(step(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW, 0, 0));
    }
    filter.push(step(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_KILL_PROCESS, 0, 0));
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: the kernel copies the filter.
    let done = unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        match calls {
            Calls::Strict => libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_STRICT),
            Calls::Filter(_) => {
                let mode = libc::SECCOMP_MODE_FILTER;
                libc::prctl(libc::PR_SET_SECCOMP, mode, &raw const program)
            }
            Calls::FilterBySyscall(_) => {
                let operation = libc::SECCOMP_SET_MODE_FILTER;
                libc::syscall(libc::SYS_seccomp, operation, 0, &raw const program) as c_int
            }
        }
    };
    if done != 0 {
        // (What could be said of it may be forbidden by now.)
        sys::exit_now(99);
    }
    // The kernel unmaps nothing in strict mode either.
    std::mem::forget(filter);
}

/// From now on the process opens no file to read from. (Where the kernel has no Landlock, it does as before.)
pub fn close_in_by_landlock() {
    const CREATE_RULESET: c_long = 444;
    const RESTRICT_SELF: c_long = 446;
    let read_file = 1u64 << 2;
    // SAFETY: a struct of one field, which is what the first version knows.
    unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
        let rules = libc::syscall(CREATE_RULESET, &raw const read_file, size_of::<u64>(), 0);
        if rules >= 0 {
            libc::syscall(RESTRICT_SELF, rules, 0);
            let _ = sys::close(rules as Fd);
        }
    }
}

/// Ends this thread, which is the only one, as strict mode allows.
pub fn end_thread(status: c_int) -> ! {
    // SAFETY: does not return.
    unsafe { libc::syscall(libc::SYS_exit, status) };
    unreachable!("a thread that has ended")
}
