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

/// Run by the tests below, under the library.
#[test]
#[ignore = "a program of the tests beside it"]
fn program() {
    if std::env::var(ROLE).as_deref() == Ok("timer") {
        timer();
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
