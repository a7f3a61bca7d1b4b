//! The tables of calls and options in SPECIFICATION.md are complete: every function of this machine's libc that is given a
//! descriptor, a stream, or a new process stands there, under each of its names, and so does every option.

mod specification;

use std::collections::{BTreeMap, BTreeSet};
use std::process::{Command, Stdio};

use object::{Object, ObjectSymbol, SymbolKind};
use specification::{names, table};

/// The headers that declare them; those that a libc does not have are left out.
const HEADERS: [&str; 40] = [
    "aio.h",
    "arpa/inet.h",
    "dirent.h",
    "fcntl.h",
    "ftw.h",
    "mqueue.h",
    "netdb.h",
    "netinet/in.h",
    "poll.h",
    "pty.h",
    "sched.h",
    "signal.h",
    "spawn.h",
    "stdio.h",
    "stdlib.h",
    "sys/epoll.h",
    "sys/eventfd.h",
    "sys/fanotify.h",
    "sys/file.h",
    "sys/inotify.h",
    "sys/ioctl.h",
    "sys/mman.h",
    "sys/mount.h",
    "sys/pidfd.h",
    "sys/select.h",
    "sys/sendfile.h",
    "sys/signalfd.h",
    "sys/socket.h",
    "sys/stat.h",
    "sys/statfs.h",
    "sys/statvfs.h",
    "sys/syscall.h",
    "sys/time.h",
    "sys/timerfd.h",
    "sys/uio.h",
    "sys/wait.h",
    "sys/xattr.h",
    "termios.h",
    "unistd.h",
    "utmp.h",
];

/// What the headers call a descriptor (beside names with `fd`), and types that hold or stand for one.
const DESCRIPTORS: [&str; 11] = [
    "fildes", "filedes", "filedes1", "filedes2", "pipedes", "sock", "mqdes", "FILE", "DIR",
    "aiocb", "msghdr",
];
/// In the names of functions that make processes, replace programs, or set handlers.
const PROCESSES: [&str; 8] =
    ["exec", "fork", "spawn", "popen", "system", "sigaction", "signal", "sigset"];

fn preprocess(arguments: &[&str], source: String) -> String {
    let mut compiler = Command::new("cc")
        .args(arguments)
        .args(["-E", "-P", "-D_GNU_SOURCE", "-x", "c", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("the linker that Rust uses is a C compiler");
    let mut input = compiler.stdin.take().unwrap();
    let writer = std::thread::spawn(move || {
        use std::io::Write;
        input.write_all(source.as_bytes()).unwrap()
    });
    let output = compiler.wait_with_output().unwrap();
    writer.join().unwrap();
    assert!(output.status.success(), "cc -E failed");
    String::from_utf8(output.stdout).unwrap()
}

fn including(headers: &[&str]) -> String {
    let include =
        |header: &&str| format!("#if __has_include(<{header}>)\n#include <{header}>\n#endif\n");
    headers.iter().map(include).collect()
}

fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|word| !word.is_empty())
}

/// Functions that are declared to take a descriptor, or that concern processes or handlers.
fn declared() -> BTreeSet<String> {
    let text = preprocess(&[], including(&HEADERS));
    let mut found = BTreeSet::new();
    for statement in text.split(';').filter(|statement| !statement.contains("typedef")) {
        let Some((before, arguments)) = statement.split_once('(') else { continue };
        let Some(name) = words(before).last() else { continue };
        let descriptor = |word: &str| {
            let word = word.trim_start_matches('_');
            DESCRIPTORS.contains(&word) || word.contains("fd")
        };
        if words(arguments).any(descriptor) || PROCESSES.iter().any(|part| name.contains(part)) {
            found.insert(name.to_string());
        }
    }
    found
}

/// A function's name without what its other names differ in: `__read_chk`, `__libc_pread64` and the like.
fn stem(name: &str) -> String {
    let name = name.trim_start_matches('_');
    let name = name.strip_prefix("libc_").or(name.strip_prefix("IO_")).unwrap_or(name);
    let name = name.replace("64", "");
    let suffixes = ["_chk", "_2", "_nocancel", "_unlocked"];
    suffixes.iter().find_map(|end| name.strip_suffix(end)).unwrap_or(&name).to_string()
}

/// All functions that programs can link with or look up.
fn functions_of_libc() -> BTreeSet<String> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let path = maps.split_whitespace().find(|word| word.ends_with("/libc.so.6")).expect("glibc");
    let bytes = std::fs::read(path).unwrap();
    let file = object::File::parse(&*bytes).unwrap();
    let symbols = file.dynamic_symbols().filter(|symbol| symbol.is_definition());
    // The kind of one that is chosen at load time is no kind of its own here.
    let functions =
        symbols.filter(|symbol| !matches!(symbol.kind(), SymbolKind::Data | SymbolKind::Tls));
    functions.map(|symbol| symbol.name().unwrap().to_string()).collect()
}

#[test]
fn every_call_of_libc_that_concerns_descriptors_is_in_a_table() {
    let mut told = names(&table("calls that the library sees"));
    told.extend(names(&table("calls that it does not see")));
    let libc = functions_of_libc();
    let declared = declared();
    assert!(declared.contains("recvmsg") && declared.contains("fork"), "the headers were not read");
    let stems: BTreeSet<_> =
        declared.intersection(&libc).chain(&told).map(|name| stem(name)).collect();
    let missing: Vec<_> =
        libc.iter().filter(|name| stems.contains(&stem(name)) && !told.contains(*name)).collect();
    assert!(missing.is_empty(), "in no table of SPECIFICATION.md: {missing:?}");
}

/// Of the same look, but values of options.
const VALUES: [&str; 7] = [
    "TCP_AO_MAXKEYLEN",
    "TCP_COOKIE_MAX",
    "TCP_COOKIE_MIN",
    "TCP_MD5SIG_MAXKEYLEN",
    "TCP_REPAIR_OFF",
    "TCP_REPAIR_OFF_NO_WP",
    "TCP_REPAIR_ON",
];

/// The options of sockets and of TCP that the headers of this machine define, by level and number.
fn options() -> BTreeMap<(&'static str, i64), Vec<String>> {
    let text = preprocess(&["-dM"], including(&["sys/socket.h", "linux/tcp.h"]));
    let definitions: BTreeMap<_, _> = text
        .lines()
        .filter_map(|line| {
            let mut words = line.split_whitespace().skip(1);
            Some((words.next()?, words.next()?))
        })
        .collect();
    let mut found: BTreeMap<_, Vec<_>> = BTreeMap::new();
    for (name, value) in &definitions {
        let Some(level) = ["SO_", "TCP_"].into_iter().find(|level| name.starts_with(level)) else {
            continue;
        };
        let value = definitions.get(value).unwrap_or(value);
        if let (false, Ok(number)) = (VALUES.contains(name), value.parse()) {
            found.entry((level, number)).or_default().push(name.to_string());
        }
    }
    found
}

#[test]
fn every_option_is_in_the_table() {
    let told = names(&table("options"));
    let known = options();
    assert!(known.len() > 80, "the headers were not read: {known:?}");
    let missing: Vec<_> =
        known.values().filter(|names| !names.iter().any(|name| told.contains(name))).collect();
    assert!(missing.is_empty(), "not in the table of options: {missing:?}");
}
