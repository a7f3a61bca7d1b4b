//! Where a moved connection is known to differ from the kernel's: each difference is shown on both.
//!
//! A test starts this program anew, with the library and without it, as the one test `observe`, which makes a connection with
//! both ends, exchanges messages until it has moved, and prints what it sees.

mod library;

use std::fmt::Debug;
use std::io::{Error, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::Command;
use std::sync::OnceLock;
use std::time::Duration;

const CASE: &str = "RINGLET_DIFFERENCE";
const SEEN: &str = "seen: ";
const RING: i32 = 3;
const TRIPS_MOST: u32 = 5000;

/// Both ends of a connection.
struct Pair {
    near: TcpStream,
    far: TcpStream,
}

fn wrapped() -> bool {
    std::env::var_os("LD_PRELOAD").is_some()
}

fn path(fd: i32) -> i32 {
    // SAFETY: a C string; the library's function of this name takes an int and returns one.
    unsafe {
        let found = libc::dlsym(libc::RTLD_DEFAULT, c"ringlet_path".as_ptr());
        if found.is_null() {
            return -1;
        }
        std::mem::transmute::<*mut libc::c_void, extern "C" fn(i32) -> i32>(found)(fd)
    }
}

/// recvfrom by an instruction of the program's own.
#[cfg(target_arch = "x86_64")]
unsafe fn receive_around_libc(fd: i32, to: &mut [u8], flags: i32) -> isize {
    let done: isize;
    // SAFETY: by the caller's word; a system call leaves rcx and r11 changed.
    unsafe {
        std::arch::asm!("syscall", inlateout("rax") libc::SYS_recvfrom as isize => done,
            in("rdi") fd, in("rsi") to.as_mut_ptr(), in("rdx") to.len(), in("r10") flags,
            in("r8") 0, in("r9") 0, lateout("rcx") _, lateout("r11") _);
    }
    done
}

/// The same.
#[cfg(target_arch = "aarch64")]
unsafe fn receive_around_libc(fd: i32, to: &mut [u8], flags: i32) -> isize {
    let done: isize;
    // SAFETY: by the caller's word.
    unsafe {
        std::arch::asm!("svc 0", in("x8") libc::SYS_recvfrom, inlateout("x0") fd as isize => done,
            in("x1") to.as_mut_ptr(), in("x2") to.len(), in("x3") flags, in("x4") 0, in("x5") 0);
    }
    done
}

fn moved() -> Pair {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let mut far = listener.accept().unwrap().0;
    let on_ring = |pair: [&TcpStream; 2]| pair.iter().all(|end| path(end.as_raw_fd()) == RING);
    for trip in 0..TRIPS_MOST {
        let byte = &mut [trip as u8];
        near.write_all(byte).unwrap();
        far.read_exact(byte).unwrap();
        far.write_all(byte).unwrap();
        near.read_exact(byte).unwrap();
        if !wrapped() || on_ring([&near, &far]) {
            return Pair { near, far };
        }
    }
    panic!("the connection was not moved");
}

fn outcome(result: isize) -> String {
    if result >= 0 { result.to_string() } else { format!("errno {}", errno()) }
}

fn errno() -> i32 {
    Error::last_os_error().raw_os_error().unwrap_or_default()
}

fn set_option(end: &TcpStream, level: i32, option: i32, value: i32) {
    // SAFETY: an int and its size.
    let done =
        unsafe { libc::setsockopt(end.as_raw_fd(), level, option, (&raw const value).cast(), 4) };
    assert_eq!(done, 0, "{}", Error::last_os_error());
}

/// Tries `look` until it gives `wanted`, or for a minute; what it gave last.
fn settle<T: PartialEq + Debug>(wanted: T, look: impl Fn() -> T) -> T {
    for _ in 0..12_000 {
        if look() == wanted {
            break;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    look()
}

macro_rules! differences {
    ($($(#[$doc:meta])* $name:ident: $kernel:literal, $ringlet:literal, $observe:expr;)*) => {
        $($(#[$doc])* #[test] fn $name() {
            assert_eq!(run(stringify!($name), false), $kernel, "on the kernel");
            assert_eq!(run(stringify!($name), true), $ringlet, "on ringlet");
        })*

        /// What a process started by the tests does.
        #[test]
        #[ignore = "started by the others"]
        fn observe() {
            let Ok(case) = std::env::var(CASE) else { return };
            let seen: String = match case.as_str() {
                $(stringify!($name) => $observe(moved()),)*
                _ => panic!("no case {case}"),
            };
            println!("{SEEN}{seen}");
        }
    };
}

/// What a fresh process sees, or the signal that ends it.
fn run(case: &str, wrap: bool) -> String {
    static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--ignored", "--exact", "observe", "--nocapture"]);
    for (name, _) in std::env::vars_os() {
        if name.as_encoded_bytes().starts_with(b"RINGLET_") || name == "LD_PRELOAD" {
            command.env_remove(name);
        }
    }
    command.env(CASE, case).env("RINGLET_CONFIG", "/dev/null");
    if wrap {
        command.env("LD_PRELOAD", LIBRARY.get_or_init(library::build));
    }
    let output = command.output().unwrap();
    if let Some(signal) = output.status.signal() {
        return format!("signal {signal}");
    }
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let seen = text.split_once(SEEN).and_then(|(_, rest)| rest.lines().next());
    seen.unwrap_or_else(|| panic!("{case}: {output:?}")).to_string()
}

differences! {
    /// The kernel copies and finds the fault; we copy as the program would.
    unwritable_buffer: "errno 14", "signal 11", |mut pair: Pair| {
        pair.near.write_all(b"x").unwrap();
        // SAFETY: a mapping of no access harms nobody; the receive into it is what is tried.
        unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            let page = libc::mmap(std::ptr::null_mut(), 4096, libc::PROT_NONE, flags, -1, 0);
            outcome(libc::recv(pair.far.as_raw_fd(), page, 1, 0))
        }
    };

    /// TCP_INFO and all that the kernel counts know nothing of bytes in shared memory.
    bytes_that_the_kernel_counts: "800", "0", |mut pair: Pair| {
        let sent = |pair: &Pair| {
            let (mut info, mut len) = ([0u64; 32], 256u32);
            // SAFETY: a buffer and its size.
            let done = unsafe {
                let fd = pair.near.as_raw_fd();
                libc::getsockopt(fd, libc::IPPROTO_TCP, libc::TCP_INFO, info.as_mut_ptr().cast(), &mut len)
            };
            assert_eq!(done, 0);
            info[25] // tcpi_bytes_sent
        };
        let before = sent(&pair);
        for _ in 0..100 {
            pair.near.write_all(b"8 bytes.").unwrap();
            pair.far.read_exact(&mut [0; 8]).unwrap();
        }
        (sent(&pair) - before).to_string()
    };

    /// SIOCOUTQ: to the kernel, what its peer's kernel has is delivered; here only what the peer's program has taken.
    unsent_until_taken: "0", "5", |mut pair: Pair| {
        pair.near.write_all(b"12345").unwrap();
        let unsent = || {
            let mut count = 0;
            // SAFETY: the request writes an int.
            unsafe { libc::ioctl(pair.near.as_raw_fd(), libc::TIOCOUTQ, &mut count) };
            count
        };
        settle(if wrapped() { 5 } else { 0 }, unsent).to_string()
    };

    /// SO_SNDBUF and SO_RCVBUF bound the kernel's queues, not the ring.
    small_buffers: "a part", "all", |pair: Pair| {
        set_option(&pair.near, libc::SOL_SOCKET, libc::SO_SNDBUF, 4608);
        set_option(&pair.far, libc::SOL_SOCKET, libc::SO_RCVBUF, 4608);
        pair.near.set_nonblocking(true).unwrap();
        let data = vec![0; 500_000];
        let sent = (&pair.near).write(&data).unwrap();
        (if sent == data.len() { "all" } else { "a part" }).to_string()
    };

    /// System calls that the program makes by itself see the kernel's connection alone.
    system_calls_of_its_own: "1", "errno 11", |mut pair: Pair| {
        pair.near.write_all(b"x").unwrap();
        let mut byte = [0u8; 1];
        let (fd, flags) = (pair.far.as_raw_fd(), libc::MSG_DONTWAIT);
        // SAFETY: recvfrom into a buffer of its size, without an address.
        match unsafe { receive_around_libc(fd, &mut byte, flags) } {
            done @ 0.. => outcome(done),
            error => format!("errno {}", -error),
        }
    };

    /// ringlet's own descriptors lie from 512 up, so numbers there may be taken.
    numbers_from_512: "512", "another", |pair: Pair| {
        // SAFETY: no memory is passed.
        let fd = unsafe { libc::fcntl(pair.near.as_raw_fd(), libc::F_DUPFD, 512) };
        (if fd == 512 { "512" } else { "another" }).to_string()
    };

    /// They also make the descriptor table larger, and select fails for closed numbers inside it
    /// (notes/select_beyond_the_table.py).
    select_of_a_closed_number: "0", "errno 9", |_pair: Pair| {
        let mut set = [0u64; 16];
        set[900 / 64] |= 1 << (900 % 64);
        let mut now = libc::timeval { tv_sec: 0, tv_usec: 0 };
        // SAFETY: a set that covers 1024 numbers.
        outcome(unsafe {
            let none = std::ptr::null_mut();
            libc::select(901, set.as_mut_ptr().cast(), none, none, &mut now)
        } as isize)
    };
}
