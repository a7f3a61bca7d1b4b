//! What a connection asks the kernel for until it has moved: by a tracer that counts.

mod library;

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

const ROLE: &str = "TEST_MEETINGS_ROLE";
const MOVES: &str = "RINGLET_MOVES";
const CONNECTIONS: usize = 20;
/// Round trips after which a connection has moved.
const TRIPS: usize = 64;
/// A process that there is not: asked for by the program before and behind what is counted.
const MARK: i32 = -77;

fn one(listener: &TcpListener) {
    let mut near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (mut far, _) = listener.accept().unwrap();
    let mut byte = [1];
    for _ in 0..TRIPS {
        near.write_all(&byte).unwrap();
        far.read_exact(&mut byte).unwrap();
        far.write_all(&byte).unwrap();
        near.read_exact(&mut byte).unwrap();
    }
}

/// Run by the test below, under the library: both ends are this thread's, so that no step waits for another.
#[test]
#[ignore = "a program of the test beside it"]
fn program() {
    if std::env::var_os(ROLE).is_none() {
        return;
    }
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    // What is asked once in a process.
    one(&listener);
    // SAFETY: no memory is passed.
    unsafe { libc::getpgid(MARK) };
    (0..CONNECTIONS).for_each(|_| one(&listener));
    // SAFETY: as above.
    unsafe { libc::getpgid(MARK) };
}

#[derive(Default, Debug)]
struct Asked {
    /// Sockets by which the kernel's table of sockets is asked.
    tables: usize,
    /// Files of /proc, which the kernel writes anew for each.
    files: usize,
    /// TCP_INFO.
    counts: usize,
}

/// Counts what the program asks between its two marks.
fn count(program: i32) -> Asked {
    let (mut asked, mut marks, mut began) = (Asked::default(), 0, false);
    let none = std::ptr::null_mut::<libc::c_void>();
    loop {
        let mut status = 0;
        // SAFETY: our own children; room for what we are told.
        let thread = unsafe { libc::waitpid(-1, &raw mut status, libc::__WALL) };
        if thread < 0 || thread == program && !libc::WIFSTOPPED(status) {
            break;
        }
        if !libc::WIFSTOPPED(status) {
            continue;
        }
        if !began {
            began = true;
            let options =
                libc::PTRACE_O_TRACESYSGOOD | libc::PTRACE_O_TRACECLONE | libc::PTRACE_O_EXITKILL;
            // SAFETY: a tracee that has stopped.
            unsafe { libc::ptrace(libc::PTRACE_SETOPTIONS, thread, none, options as usize) };
        }
        // SAFETY: zero is a valid structure.
        let mut info: libc::ptrace_syscall_info = unsafe { std::mem::zeroed() };
        let signal = libc::WSTOPSIG(status);
        if signal == libc::SIGTRAP | 0x80 {
            let len = size_of_val(&info);
            // SAFETY: a tracee that has stopped; a structure, and its length.
            unsafe { libc::ptrace(libc::PTRACE_GET_SYSCALL_INFO, thread, len, &raw mut info) };
        }
        if info.op == libc::PTRACE_SYSCALL_INFO_ENTRY {
            // SAFETY: so it is a call that begins.
            let (number, args) = unsafe { (info.u.entry.nr as i64, info.u.entry.args) };
            let first = args[0] as i32;
            let counts = (libc::IPPROTO_TCP as u64, libc::TCP_INFO as u64);
            match number {
                libc::SYS_getpgid if first == MARK => marks += 1,
                _ if marks != 1 => {}
                libc::SYS_socket if first == libc::AF_NETLINK => asked.tables += 1,
                // (Lists of descriptors are looked at by the clock.)
                libc::SYS_openat if args[2] as i32 & libc::O_DIRECTORY == 0 => asked.files += 1,
                libc::SYS_getsockopt if (args[1], args[2]) == counts => asked.counts += 1,
                _ => {}
            }
        }
        // (The first stop of a thread is by SIGSTOP, and each of ours by SIGTRAP: it gets neither.)
        let passed = match signal & 0x7f {
            libc::SIGTRAP | libc::SIGSTOP => 0,
            signal => signal as usize,
        };
        // SAFETY: a tracee that has stopped.
        unsafe { libc::ptrace(libc::PTRACE_SYSCALL, thread, none, passed) };
    }
    assert_eq!(marks, 2);
    asked
}

/// Who is at the other end of a meeting, and what it holds, does not change while it lasts.
#[test]
fn what_does_not_change_is_asked_once_at_a_meeting() {
    let moves = std::env::temp_dir().join(format!("ringlet-meetings-{}", std::process::id()));
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--ignored", "--exact", "--nocapture", "--test-threads=1", "program"]);
    command.env("LD_PRELOAD", library::build()).env(ROLE, "").env(MOVES, &moves);
    command.env_remove("RINGLET_UNFORGIVING").env_remove("RINGLET_MOVE_AFTER");
    command.stdout(Stdio::null());
    // SAFETY: a system call.
    unsafe {
        command.pre_exec(|| match libc::ptrace(libc::PTRACE_TRACEME, 0, 0, 0) {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        })
    };
    let mut child = command.spawn().unwrap();
    let asked = count(child.id() as i32);
    // (That was told to the count.)
    let _ = child.wait();
    let notes = std::fs::read(&moves).unwrap_or_default();
    let _ = std::fs::remove_file(&moves);
    let moved = notes.iter().filter(|byte| **byte == b'\n').count();
    assert!(moved >= 2 * CONNECTIONS, "{moved} {asked:?}");
    // Each end asks the table once who has the far end, and by three files who is at the other end, and what that may be trusted with.
    assert!(asked.tables <= 2 * CONNECTIONS, "{asked:?}");
    assert!(asked.files <= 7 * CONNECTIONS, "{asked:?}");
    assert!(asked.counts <= 24 * CONNECTIONS, "{asked:?}");
}
