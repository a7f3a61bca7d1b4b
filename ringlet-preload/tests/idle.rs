//! Idle connections: what a loop asks over and over, and finds nothing at, is left to a doorbell.

mod library;

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::process::Command;

const ROLE: &str = "TEST_IDLE_ROLE";
const TRIPS_MOST: u32 = 5000;
const PAIRS: usize = 64;
const WAITS: usize = 300;
/// Of this program, to be the one below.
const ARGUMENTS: [&str; 5] = ["--ignored", "--exact", "--nocapture", "--test-threads=1", "program"];

/// Both ends of a connection.
struct Pair {
    near: TcpStream,
    far: TcpStream,
}

fn is_moved(end: &TcpStream) -> bool {
    // SAFETY: a C string; the library's function of this name takes an int and returns one.
    let path = unsafe {
        let found = libc::dlsym(libc::RTLD_DEFAULT, c"ringlet_path".as_ptr());
        assert!(!found.is_null());
        std::mem::transmute::<*mut libc::c_void, extern "C" fn(i32) -> i32>(found)(end.as_raw_fd())
    };
    path == 3
}

fn moved() -> Pair {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let mut near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let mut far = listener.accept().unwrap().0;
    for trip in 0..TRIPS_MOST {
        let byte = &mut [trip as u8];
        near.write_all(byte).unwrap();
        far.read_exact(byte).unwrap();
        far.write_all(byte).unwrap();
        near.read_exact(byte).unwrap();
        if is_moved(&near) && is_moved(&far) {
            return Pair { near, far };
        }
    }
    panic!("the connection was not moved");
}

/// Doorbells that lie in the kernel.
fn doorbells(end: &TcpStream) -> usize {
    ringlet_linux::tcp::unread(end.as_raw_fd()).unwrap()
}

/// A set tells of these; none twice.
fn told(set: i32) -> Vec<u64> {
    let mut events = [libc::epoll_event { events: 0, u64: 0 }; PAIRS];
    // SAFETY: room for so many events.
    let n = unsafe { libc::epoll_wait(set, events.as_mut_ptr(), PAIRS as i32, 1) };
    events[..usize::try_from(n).unwrap()].iter().map(|event| event.u64).collect()
}

fn timer() {
    let mut pairs: Vec<Pair> = (0..PAIRS).map(|_| moved()).collect();
    // SAFETY: makes a set.
    let set = unsafe { libc::epoll_create1(0) };
    for (nth, pair) in pairs.iter().enumerate() {
        let mut event = libc::epoll_event { events: libc::EPOLLIN as u32, u64: nth as u64 };
        let near = pair.near.as_raw_fd();
        // SAFETY: a set, and an event.
        let added = unsafe { libc::epoll_ctl(set, libc::EPOLL_CTL_ADD, near, &raw mut event) };
        assert_eq!(added, 0);
    }
    // (A wait may hear of doorbells from before.)
    let mut in_vain = 0;
    while in_vain < WAITS {
        in_vain += usize::from(told(set).is_empty());
    }
    let mut ring = 0;
    for (nth, pair) in pairs.iter_mut().enumerate() {
        pair.far.write_all(&[nth as u8]).unwrap();
        ring += usize::from(doorbells(&pair.near) != 0);
    }
    let mut heard: Vec<u64> = Vec::new();
    while heard.len() < PAIRS {
        for nth in told(set) {
            let mut byte = [0];
            pairs[nth as usize].near.read_exact(&mut byte).unwrap();
            assert_eq!(u64::from(byte[0]), nth);
            heard.push(nth);
        }
    }
    println!("rung by a byte: {ring} of {PAIRS}");
    assert!(ring > PAIRS / 2);
    // What was told is looked at again by each wait, and rings no more. (Of bytes that rang before some may lie there still.)
    let rung = |pairs: &[Pair]| pairs.iter().map(|pair| doorbells(&pair.near)).sum::<usize>();
    let before = rung(&pairs);
    pairs.iter_mut().for_each(|pair| pair.far.write_all(&[1]).unwrap());
    assert_eq!(rung(&pairs), before);
    println!("all told");
}

/// From now on a poll of one descriptor kills the process.
fn forbid_questions_for_one() {
    const LOAD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
    const EQUAL: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
    const END: u16 = (libc::BPF_RET | libc::BPF_K) as u16;
    /// The low half of the second argument: how many.
    const COUNT: u32 = 24;
    let step = |code, k, jt, jf| libc::sock_filter { code, jt, jf, k };
    let mut filter = [
        step(LOAD, 0, 0, 0),
        step(EQUAL, libc::SYS_ppoll as u32, 1, 0),
        step(EQUAL, POLL, 0, 3),
        step(LOAD, COUNT, 0, 0),
        step(EQUAL, 1, 0, 1),
        step(END, libc::SECCOMP_RET_KILL_PROCESS, 0, 0),
        step(END, libc::SECCOMP_RET_ALLOW, 0, 0),
    ];
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

#[cfg(target_arch = "x86_64")]
const POLL: u32 = libc::SYS_poll as u32;
#[cfg(not(target_arch = "x86_64"))]
const POLL: u32 = libc::SYS_ppoll as u32;

/// How many of these are ready?
fn poll(pairs: &[Pair], timeout_ms: i32) -> i32 {
    let mut fds: Vec<libc::pollfd> = Vec::new();
    for pair in pairs {
        let fd = pair.near.as_raw_fd();
        fds.push(libc::pollfd { fd, events: libc::POLLIN, revents: 0 });
    }
    // SAFETY: an array of this length.
    unsafe { libc::poll(fds.as_mut_ptr(), fds.len() as u64, timeout_ms) }
}

fn polls() {
    let mut pairs: Vec<Pair> = (0..PAIRS).map(|_| moved()).collect();
    pairs.iter_mut().step_by(2).for_each(|pair| pair.far.write_all(&[1]).unwrap());
    for timeout in [0, 1].repeat(2) {
        assert_eq!(poll(&pairs, timeout), PAIRS as i32 / 2);
    }
    pairs.iter_mut().step_by(2).for_each(|pair| pair.near.read_exact(&mut [0]).unwrap());
    // (Of what rang the kernel is asked for one.)
    for timeout in [0, 1].repeat(WAITS) {
        assert_eq!(poll(&pairs, timeout), 0);
    }
    forbid_questions_for_one();
    for timeout in [0, 1].repeat(WAITS) {
        assert_eq!(poll(&pairs, timeout), 0);
    }
    println!("all told");
}

/// Run by the tests below, under the library.
#[test]
#[ignore = "a program of the tests beside it"]
fn program() {
    match std::env::var(ROLE).as_deref() {
        Ok("timer") => timer(),
        Ok("polls") => polls(),
        _ => {}
    }
}

fn run(role: &str) -> String {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(ARGUMENTS).env("LD_PRELOAD", library::build()).env(ROLE, role);
    command.env_remove("RINGLET_UNFORGIVING").env_remove("RINGLET_MOVE_AFTER");
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{text}\n{output:?}");
    text
}

#[test]
fn a_loop_with_a_timer_looks_no_more_at_idle_connections() {
    assert!(run("timer").contains("all told"));
}

#[test]
fn a_poll_of_many_idle_connections_asks_the_kernel_for_all_at_once() {
    assert!(run("polls").contains("all told"));
}
