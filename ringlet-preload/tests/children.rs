//! What a child by fork has of its parent's memory, and what of it the child of a server that forks per connection writes to.

mod library;

use std::fs::read_to_string;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::ops::Range;
use std::process::Command;
use std::sync::atomic::{AtomicI32, Ordering};

const OTHER_GROUP: libc::gid_t = 54_321;
const ROLE: &str = "TEST_CHILDREN_ROLE";
/// More than any other private mapping of the test has, less than that of the tables.
const TABLES_BYTES: usize = 32 << 20;
/// What else may lie in that mapping, at its end: what the loader has mapped for the thread.
const OTHERS_BYTES: usize = 1 << 20;
const PAGE_BYTES: usize = 4096;

/// Pages that are held of the mapping where the entries of tables lie that few processes use.
fn far_tables_held() -> Option<usize> {
    let (range, _) = ranges().into_iter().find(|(range, line)| {
        line.contains("rw-p") && range.len() > TABLES_BYTES && !line.contains('[')
    })?;
    let mut held = vec![0u8; (range.len() - OTHERS_BYTES) / PAGE_BYTES];
    let start = range.start as *mut libc::c_void;
    // SAFETY: a byte for each page of the range, of which the kernel only tells.
    let asked = unsafe { libc::mincore(start, held.len() * PAGE_BYTES, held.as_mut_ptr()) };
    (asked == 0).then(|| held.iter().filter(|held| **held & 1 != 0).count())
}

fn ranges() -> Vec<(Range<usize>, String)> {
    let range = |line: &str| {
        let (from, to) = line.split_whitespace().next().unwrap().split_once('-').unwrap();
        let number = |text| usize::from_str_radix(text, 16).unwrap();
        (number(from)..number(to), line.to_owned())
    };
    read_to_string("/proc/self/maps").unwrap().lines().map(range).collect()
}

/// Where the process's page is mapped, if it is.
fn page() -> Option<Range<usize>> {
    ranges().into_iter().find(|(_, line)| line.contains("ringlet-process")).map(|(range, _)| range)
}

/// As such a server's child: it closes the listener, watches the connection in a set of its own, and talks on it.
fn serve(listener: TcpListener, mut connection: TcpStream, parents: &Range<usize>) {
    drop(listener);
    // SAFETY: descriptors of our own; the structure outlives the call.
    unsafe {
        let set = libc::epoll_create1(libc::EPOLL_CLOEXEC);
        let mut event = libc::epoll_event { events: libc::EPOLLIN as u32, u64: 1 };
        let fd = std::os::fd::AsRawFd::as_raw_fd(&connection);
        assert_eq!(libc::epoll_ctl(set, libc::EPOLL_CTL_ADD, fd, &mut event), 0);
        assert_eq!(libc::epoll_wait(set, &mut event, 1, 10_000), 1);
        libc::signal(libc::SIGUSR1, libc::SIG_IGN);
    }
    let mut byte = [0];
    connection.read_exact(&mut byte).unwrap();
    connection.write_all(&byte).unwrap();
    println!("far tables: {:?}", far_tables_held());
    // With something new to show, it has a page of its own.
    let _listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    println!("the parent's page: {}", page().is_some_and(|page| page == *parents));
    // A frame that a handler interrupted in which we were forked may still write there.
    let stands_in = |(range, line): &(Range<usize>, String)| {
        range.contains(&parents.start)
            && range.contains(&(parents.end - 1))
            && line.contains("rw-p")
    };
    println!("something in its place: {}", ranges().iter().any(stands_in));
}

/// Run by the test below, under the library.
#[test]
#[ignore = "a program of the test beside it"]
fn program() {
    if std::env::var_os(ROLE).is_none() {
        return;
    }
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (connection, _) = listener.accept().unwrap();
    let page = page();
    println!("a page: {}", page.is_some());
    // SAFETY: the child ends by itself.
    let child = unsafe { libc::fork() };
    if child == 0 {
        drop(client);
        serve(listener, connection, &page.unwrap());
        // SAFETY: ends the child.
        unsafe { libc::_exit(0) };
    }
    drop(connection);
    client.write_all(b"x").unwrap();
    client.read_exact(&mut [0]).unwrap();
    // SAFETY: our own child.
    unsafe { libc::waitpid(child, std::ptr::null_mut(), 0) };
    // SAFETY: the child ends by itself, and does nothing else before.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // (Only root may.) SAFETY: no memory is passed.
        let became = unsafe { libc::setegid(OTHER_GROUP) } == 0;
        println!("of another group, the parent's page: {}", became && self::page().is_some());
        // SAFETY: ends the child.
        unsafe { libc::_exit(0) };
    }
    // SAFETY: our own child.
    unsafe { libc::waitpid(child, std::ptr::null_mut(), 0) };
}

#[test]
fn a_child_writes_to_few_pages_and_has_not_its_parents_page_beside_its_own() {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--ignored", "--exact", "--nocapture", "--test-threads=1", "program"]);
    command.env("LD_PRELOAD", library::build()).env(ROLE, "");
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{text}\n{}", String::from_utf8_lossy(&output.stderr));
    for line in [
        "a page: true",
        "far tables: Some(0)",
        "the parent's page: false",
        "something in its place: true",
        "of another group, the parent's page: false",
    ] {
        assert!(text.contains(line), "{line}: {text}");
    }
}

#[test]
fn a_program_without_sockets_has_no_memory_of_ours_but_the_library() {
    let maps = |ringlet: bool| {
        let mut command = Command::new("/bin/cat");
        command.arg("/proc/self/maps");
        if ringlet {
            command.env("LD_PRELOAD", library::build());
        }
        String::from_utf8(command.output().unwrap().stdout).unwrap()
    };
    let name = library::build().file_name().unwrap().to_string_lossy().into_owned();
    let (with, without) = (maps(true), maps(false));
    let library = with.lines().filter(|line| line.contains(&name)).count();
    assert_eq!(library, 2, "{with}");
    assert_eq!(with.lines().count(), without.lines().count() + library, "{with}");
}

const FORKS: libc::c_long = 50;

/// Run by the test below: a listener and a connection, and children that end at once.
#[test]
#[ignore = "a program of the test beside it"]
fn forker() {
    if std::env::var_os(ROLE).is_none() {
        return;
    }
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let _client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let _connection = listener.accept().unwrap();
    // SAFETY: zero is a valid rusage, which the kernel fills; the children end at once; nothing else runs here that could fault.
    let faults = |who| unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        assert_eq!(libc::getrusage(who, &mut usage), 0);
        usage.ru_minflt
    };
    // SAFETY: as said.
    let fork = || unsafe {
        match libc::fork() {
            0 => libc::_exit(0),
            child => assert_eq!(libc::waitpid(child, std::ptr::null_mut(), 0), child),
        }
    };
    (0..3).for_each(|_| fork());
    let before = [libc::RUSAGE_SELF, libc::RUSAGE_CHILDREN].map(faults);
    (0..FORKS).for_each(|_| fork());
    let after = [libc::RUSAGE_SELF, libc::RUSAGE_CHILDREN].map(faults);
    println!("faults: {} {}", after[0] - before[0], after[1] - before[1]);
}

#[test]
fn a_child_that_ends_at_once_takes_few_faults() {
    let faults = |ringlet: bool| {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--ignored", "--exact", "--nocapture", "--test-threads=1", "forker"]);
        command.env(ROLE, "");
        if ringlet {
            command.env("LD_PRELOAD", library::build());
        }
        let text = String::from_utf8(command.output().unwrap().stdout).unwrap();
        let line = text.lines().find_map(|line| line.split_once("faults: ")).expect(&text).1;
        let mut numbers = line.split(' ').map(|number| number.parse::<libc::c_long>().unwrap());
        [numbers.next().unwrap(), numbers.next().unwrap()]
    };
    let ([parent, child], [parent_without, child_without]) = (faults(true), faults(false));
    // A page that is copied; and one of code, one that counts who holds the connection, and what the layout of the program's own makes.
    assert!(parent <= parent_without + 2 * FORKS, "{parent} {parent_without}");
    assert!(child <= child_without + 5 * FORKS, "{child} {child_without}");
}

static HANDLED: AtomicI32 = AtomicI32::new(0);

extern "C" fn parents(_: libc::c_int) {
    HANDLED.store(1, Ordering::Relaxed);
}
extern "C" fn borrowers(_: libc::c_int) {
    HANDLED.store(2, Ordering::Relaxed);
}

/// A child that borrows the parent's memory, as one by vfork does: it has handlers and descriptors of its own.
extern "C" fn borrow(_: *mut libc::c_void) -> libc::c_int {
    // SAFETY: no memory but its own stack is written to.
    unsafe {
        libc::signal(libc::SIGUSR1, borrowers as *const () as usize);
        libc::socket(libc::AF_INET, libc::SOCK_STREAM, 0);
    }
    0
}

/// Run by the test below.
#[test]
#[ignore = "a program of the test beside it"]
fn lender() {
    if std::env::var_os(ROLE).is_none() {
        return;
    }
    let mut stack = vec![0u128; 4096];
    let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD;
    // SAFETY: a handler that stores a number; a child with a stack of its own that is over when the call returns.
    unsafe {
        libc::signal(libc::SIGUSR1, parents as *const () as usize);
        let top = stack.as_mut_ptr_range().end.cast();
        let child = libc::clone(borrow, top, flags, std::ptr::null_mut());
        assert_eq!(libc::waitpid(child, std::ptr::null_mut(), 0), child);
        libc::raise(libc::SIGUSR1);
    }
    println!("the handler: {}", HANDLED.load(Ordering::Relaxed));
    println!("tables: {}", far_tables_held().is_some());
    let _listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    println!("tables with a socket: {}", far_tables_held().is_some());
}

#[test]
fn a_child_that_borrows_memory_without_tables_leaves_its_parent_as_it_was() {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--ignored", "--exact", "--nocapture", "--test-threads=1", "lender"]);
    command.env("LD_PRELOAD", library::build()).env(ROLE, "");
    let text = String::from_utf8(command.output().unwrap().stdout).unwrap();
    for line in ["the handler: 1", "tables: false", "tables with a socket: true"] {
        assert!(text.contains(line), "{line}: {text}");
    }
}
