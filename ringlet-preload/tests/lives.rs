//! Which connections come to the ring, where those before them lived as they did: programs with `move_after` as it is by default.

mod library;

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::process::Command;

const SHORT_TRIPS: u32 = 10;
const LONG_TRIPS: u32 = 2000;
const LEARNING: u32 = 20;
const ROLE: &str = "TEST_LIVES_ROLE";
const MOVES: &str = "RINGLET_MOVES";

/// A client, and a server that serves one connection after the other, or has a child for each.
#[derive(Clone, Copy, PartialEq)]
enum Server {
    Alone,
    Forking,
}

fn serve(server: Server, listener: &TcpListener) -> ! {
    loop {
        let (mut connection, _) = listener.accept().unwrap();
        // SAFETY: the processes have one thread that matters, and the child ends by itself.
        let child = if server == Server::Forking { unsafe { libc::fork() } } else { 0 };
        if child == 0 {
            let mut byte = [0];
            while connection.read(&mut byte).unwrap() == 1 {
                connection.write_all(&byte).unwrap();
            }
        }
        drop(connection);
        if server == Server::Forking {
            // SAFETY: as above.
            unsafe {
                if child == 0 {
                    libc::_exit(0);
                }
                libc::waitpid(child, std::ptr::null_mut(), 0);
            }
        }
    }
}

/// Ends that moved so far.
fn moved() -> usize {
    let file = std::env::var_os(MOVES).unwrap();
    std::fs::read(file).map_or(0, |lines| lines.iter().filter(|byte| **byte == b'\n').count())
}

/// A connection that lives so long. Returns how many of its ends moved.
fn live(address: Ipv4Addr, port: u16, trips: u32) -> usize {
    let before = moved();
    let mut connection = TcpStream::connect((address, port)).unwrap();
    for trip in 0..trips {
        let mut byte = [trip as u8];
        connection.write_all(&byte).unwrap();
        connection.read_exact(&mut byte).unwrap();
        assert_eq!(byte, [trip as u8]);
    }
    connection.shutdown(std::net::Shutdown::Write).unwrap();
    assert_eq!(connection.read(&mut [0]).unwrap(), 0);
    moved() - before
}

/// Run by the tests below, under the library.
#[test]
#[ignore = "a program of the tests beside it"]
fn program() {
    let server = match std::env::var(ROLE).as_deref() {
        Ok("forking") => Server::Forking,
        Ok(_) => Server::Alone,
        Err(_) => return,
    };
    let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    // SAFETY: as in `serve`.
    let child = unsafe { libc::fork() };
    if child == 0 {
        serve(server, &listener);
    }
    drop(listener);
    // To a client that meets a new address each time nothing is known: it is the server that knows, from its children.
    let address = |n: u32| match server {
        Server::Alone => Ipv4Addr::LOCALHOST,
        Server::Forking => Ipv4Addr::new(127, 0, 1, n as u8 + 1),
    };
    println!("first: {}", live(address(0), port, LONG_TRIPS));
    for n in 0..LEARNING {
        live(address(1 + n), port, SHORT_TRIPS);
    }
    println!(
        "short: {}",
        (0..LEARNING).map(|n| live(address(100 + n), port, SHORT_TRIPS)).sum::<usize>()
    );
    println!("long: {}", live(address(200), port, LONG_TRIPS));
    // SAFETY: our own child.
    unsafe {
        libc::kill(child, libc::SIGKILL);
        libc::waitpid(child, std::ptr::null_mut(), 0);
    }
}

fn run(role: &str, move_after: Option<&str>) -> String {
    let moves = std::env::temp_dir().join(format!("ringlet-lives-{}-{role}", std::process::id()));
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--ignored", "--exact", "--nocapture", "--test-threads=1", "program"]);
    command.env("LD_PRELOAD", library::build()).env(ROLE, role).env(MOVES, &moves);
    command.env_remove("RINGLET_UNFORGIVING").env_remove("RINGLET_MOVE_AFTER");
    move_after.map(|after| command.env("RINGLET_MOVE_AFTER", after));
    let output = command.output().unwrap();
    let _ = std::fs::remove_file(&moves);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{text}\n{}", String::from_utf8_lossy(&output.stderr));
    let lines = text
        .lines()
        .filter(|line| ["first", "short", "long"].iter().any(|w| line.contains(&format!("{w}: "))));
    lines
        .map(|line| line.rsplit("... ").next().unwrap_or(line).to_string())
        .collect::<Vec<_>>()
        .join(", ")
}

#[test]
fn where_connections_die_young_only_one_that_does_not_is_moved() {
    assert_eq!(run("alone", None), "first: 2, short: 0, long: 2");
}

#[test]
fn what_the_children_of_a_server_learn_its_next_child_knows() {
    assert_eq!(run("forking", None), "first: 2, short: 0, long: 2");
}

#[test]
fn as_early_as_possible_is_as_early_as_possible() {
    let moved = run("always", Some("0"));
    assert!(!moved.contains("short: 0"), "{moved}");
}
