//! Connections that end before they are moved: what they cost beyond the kernel, and what the close of a vfork child, or of a child of
//! its, does to its parent's.

mod library;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::process::{Command, Stdio};

const ROLE: &str = "TEST_SHORT_ROLE";
const MOVES: &str = "RINGLET_MOVES";
const CONNECTIONS: usize = 50;
const TRIPS: u32 = 2000;
/// Of this program, to be the one below.
const ARGUMENTS: [&str; 5] = ["--ignored", "--exact", "--nocapture", "--test-threads=1", "program"];

/// Of these calls the program makes none, and ringlet makes none for a connection that is not moved.
const FORBIDDEN: [i64; 3] = [libc::SYS_getpid, libc::SYS_gettid, libc::SYS_getsockopt];

/// From now on they kill the process.
fn forbid() {
    const LOAD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
    const EQUAL: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
    const END: u16 = (libc::BPF_RET | libc::BPF_K) as u16;
    let step = |code, k, jt| libc::sock_filter { code, jt, jf: 0, k };
    let mut filter = vec![step(LOAD, 0, 0)];
    for (left, number) in (0..FORBIDDEN.len() as u8).rev().zip(FORBIDDEN) {
        filter.push(step(EQUAL, number as u32, left + 1));
    }
    filter.push(step(END, libc::SECCOMP_RET_ALLOW, 0));
    filter.push(step(END, libc::SECCOMP_RET_KILL_PROCESS, 0));
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // (Around libc: a program that sets one by its calls is left alone from then on.)
    // SAFETY: a filter of this length, which is copied.
    let prctl = |option: i32, argument: u32, filter: *const libc::sock_fprog| unsafe {
        let args = [option as usize, argument as usize, filter as usize, 0, 0, 0];
        ringlet_linux::sys::call(libc::SYS_prctl, args)
    };
    assert_eq!(prctl(libc::PR_SET_NO_NEW_PRIVS, 1, std::ptr::null()), Ok(0));
    assert_eq!(prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &program), Ok(0));
}

fn watch(set: i32, op: i32, socket: &impl AsRawFd) {
    let mut event = libc::epoll_event { events: libc::EPOLLIN as u32, u64: 7 };
    // SAFETY: a set, and an event.
    assert_eq!(unsafe { libc::epoll_ctl(set, op, socket.as_raw_fd(), &raw mut event) }, 0);
}

fn wait(set: i32) {
    let mut event = libc::epoll_event { events: 0, u64: 0 };
    // SAFETY: room for one event.
    assert_eq!(unsafe { libc::epoll_wait(set, &raw mut event, 1, -1) }, 1);
    assert_eq!({ event.u64 }, 7);
}

/// A question and an answer over a connection of its own, as event loops have them.
fn one(set: i32, listener: &TcpListener) {
    let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (mut server, _) = listener.accept().unwrap();
    let mut byte = [1];
    for end in [&client, &server] {
        watch(set, libc::EPOLL_CTL_ADD, end);
        watch(set, libc::EPOLL_CTL_DEL, end);
        watch(set, libc::EPOLL_CTL_ADD, end);
        watch(set, libc::EPOLL_CTL_MOD, end);
    }
    client.set_nodelay(true).unwrap();
    client.write_all(&byte).unwrap();
    wait(set);
    server.read_exact(&mut byte).unwrap();
    server.write_all(&byte).unwrap();
    wait(set);
    client.read_exact(&mut byte).unwrap();
}

/// Run by the tests below, under the library.
#[test]
#[ignore = "a program of the tests beside it"]
fn program() {
    match std::env::var(ROLE).as_deref() {
        Ok("calls") => short_ones(),
        Ok("serve") => serve(),
        Ok("fork") => after_a_fork_in_a_vfork_child(),
        Ok(how) => after_a_vfork(how),
        Err(_) => {}
    }
}

fn short_ones() {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    // SAFETY: makes a set.
    let set = unsafe { libc::epoll_create1(0) };
    // What is asked once in a process.
    one(set, &listener);
    forbid();
    (0..CONNECTIONS).for_each(|_| one(set, &listener));
    println!("all made");
}

fn after_a_vfork(how: &str) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    // SAFETY: the child serves one connection and ends by itself.
    let server = unsafe { libc::fork() };
    let mut byte = [0];
    if server == 0 {
        let (mut connection, _) = listener.accept().unwrap();
        while connection.read(&mut byte).unwrap() == 1 {
            connection.write_all(&byte).unwrap();
        }
        // SAFETY: as above.
        unsafe { libc::_exit(0) };
    }
    let mut connection = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let mut trip = |connection: &mut TcpStream| {
        connection.write_all(&[1]).unwrap();
        connection.read_exact(&mut byte).unwrap();
    };
    trip(&mut connection);
    close_in_vfork_child(how, connection.as_raw_fd());
    (0..TRIPS).for_each(|_| trip(&mut connection));
    drop(connection);
    // SAFETY: our own child.
    unsafe { libc::waitpid(server, std::ptr::null_mut(), 0) };
    let notes = std::fs::read(std::env::var_os(MOVES).unwrap()).unwrap_or_default();
    println!("ends moved: {}", notes.iter().filter(|byte| **byte == b'\n').count());
}

/// Echoes on one connection, by another process than the one that connects.
fn serve() {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    println!("port {}", listener.local_addr().unwrap().port());
    let (mut connection, _) = listener.accept().unwrap();
    let mut byte = [0];
    while connection.read(&mut byte).unwrap() == 1 {
        connection.write_all(&byte).unwrap();
    }
}

/// A vfork child forks, and ends; what it has forked closes its copy of a connection in which bytes are unread.
fn after_a_fork_in_a_vfork_child() {
    let program = std::env::current_exe().unwrap();
    let mut server = Command::new(program)
        .args(ARGUMENTS)
        .env(ROLE, "serve")
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(server.stdout.take().unwrap()).lines();
    let port = |line: String| line.split_once("port ")?.1.trim().parse::<u16>().ok();
    let port = lines.find_map(|line| port(line.unwrap())).unwrap();
    let mut connection = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap();
    let mut byte = [1];
    for _ in 0..TRIPS {
        connection.write_all(&byte).unwrap();
        connection.read_exact(&mut byte).unwrap();
    }
    connection.write_all(&byte).unwrap();
    assert_eq!(connection.peek(&mut byte).unwrap(), 1);
    let (vfork_is_over, go) = std::io::pipe().unwrap();
    let (mut closed, closing) = std::io::pipe().unwrap();
    // SAFETY: the child forks and ends, by `_exit`; what it has forked closes descriptors, reads one, and ends likewise.
    #[allow(deprecated)]
    let child = unsafe {
        let child = libc::vfork();
        if child == 0 {
            if libc::fork() == 0 {
                libc::close(go.as_raw_fd());
                libc::read(vfork_is_over.as_raw_fd(), (&raw mut byte).cast(), 1);
                libc::close(connection.as_raw_fd());
            }
            libc::_exit(0)
        }
        child
    };
    // SAFETY: our own child.
    assert_eq!(unsafe { libc::waitpid(child, std::ptr::null_mut(), 0) }, child);
    drop((go, closing));
    // (It has ended, and so has closed its copy.)
    assert_eq!(closed.read(&mut byte).unwrap(), 0);
    for _ in 0..TRIPS {
        connection.read_exact(&mut byte).unwrap();
        connection.write_all(&byte).unwrap();
    }
    connection.read_exact(&mut byte).unwrap();
    drop(connection);
    assert!(server.wait().unwrap().success());
    println!("both served");
}

fn close_in_vfork_child(how: &str, fd: i32) {
    extern "C" fn close(fd: *mut libc::c_void) -> i32 {
        // SAFETY: a descriptor of the child's.
        unsafe {
            libc::close(fd as usize as i32);
            libc::_exit(0)
        }
    }
    let argument = fd as usize as *mut libc::c_void;
    let mut stack = vec![0u128; 4096];
    // SAFETY: the child closes a number and ends, by `_exit`; the stack of the one by clone is its own.
    #[allow(deprecated)]
    let child = unsafe {
        match how {
            "vfork" => {
                let child = libc::vfork();
                if child == 0 {
                    close(argument);
                }
                child
            }
            _ => {
                let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD;
                libc::clone(close, stack.as_mut_ptr_range().end.cast(), flags, argument)
            }
        }
    };
    // SAFETY: our own child.
    assert_eq!(unsafe { libc::waitpid(child, std::ptr::null_mut(), 0) }, child);
}

fn run(role: &str) -> String {
    let moves = std::env::temp_dir().join(format!("ringlet-short-{}-{role}", std::process::id()));
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(ARGUMENTS);
    command.env("LD_PRELOAD", library::build()).env(ROLE, role).env(MOVES, &moves);
    command.env_remove("RINGLET_UNFORGIVING").env_remove("RINGLET_MOVE_AFTER");
    let output = command.output().unwrap();
    let _ = std::fs::remove_file(&moves);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{text}\n{:?}", output);
    text
}

#[test]
fn a_connection_that_is_not_moved_makes_no_call_of_its_own() {
    assert!(run("calls").contains("all made"));
}

#[test]
fn what_a_vfork_child_closes_its_parent_moves() {
    for how in ["vfork", "clone"] {
        let told = run(how);
        assert!(told.contains("ends moved: 2"), "{how}: {told}");
    }
}

#[test]
fn what_a_vfork_child_has_forked_closes_the_others_keep() {
    assert!(run("fork").contains("both served"));
}
