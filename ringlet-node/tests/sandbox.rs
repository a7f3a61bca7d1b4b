//! What a thread that has entered the sandbox can't do any more, and what it still can.

use std::fs::File;
use std::io::{Error, ErrorKind};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::thread;
use std::time::Duration;

use ringlet_linux::meet;
use ringlet_node::sandbox;
use ringlet_node::who::Who;

fn call(number: i64, arguments: [usize; 3]) -> Option<i32> {
    let [one, two, three] = arguments;
    // SAFETY: calls that fail before they look at memory, or are given none.
    let done = unsafe { libc::syscall(number, one, two, three) };
    (done < 0).then(|| Error::last_os_error().raw_os_error().unwrap_or(0))
}

#[test]
fn less_is_left_to_a_carrier() {
    thread::spawn(|| {
        sandbox::enter_as_carrier().unwrap();
        for (number, first) in [
            (libc::SYS_accept4, 0),
            (libc::SYS_bpf, 1),
            (libc::SYS_clone, libc::SIGCHLD as usize),
            (libc::SYS_execve, 0),
            (libc::SYS_kill, 1),
            (libc::SYS_openat, 0),
            (libc::SYS_pidfd_open, 1),
            (libc::SYS_ptrace, 0),
            (libc::SYS_socket, libc::AF_UNIX as usize),
        ] {
            assert_eq!(call(number, [first, 0, 0]), Some(libc::ENOSYS), "call {number}");
        }
        // It makes memory that can't shrink, and rings.
        let made =
            ringlet_linux::map::sealed_memfd(c"segment", 1 << 16, libc::F_SEAL_SEAL).unwrap();
        assert!(ringlet_linux::map::map_shared(made, 1 << 16, true).is_ok());
        let eventfd = ringlet_linux::fd::eventfd().unwrap();
        assert!(ringlet_linux::fd::ring(eventfd));
        assert!(thread::spawn(|| ()).join().is_ok());
    })
    .join()
    .unwrap();
}

#[test]
fn little_is_left_to_who_takes_the_service_over() {
    thread::spawn(|| {
        assert!(File::open("/etc/passwd").is_ok() && Command::new("true").status().is_ok());
        sandbox::enter(|| true).unwrap();
        // Files are read below /proc only, and written nowhere.
        let landlock = std::fs::read_to_string("/sys/kernel/security/lsm").ok();
        if landlock.is_none_or(|modules| modules.contains("landlock")) {
            assert_eq!(File::open("/etc/passwd").unwrap_err().kind(), ErrorKind::PermissionDenied);
        }
        for path in ["/proc/self/comm", "/dev/null", "/tmp/new"] {
            assert_eq!(File::create(path).unwrap_err().kind(), ErrorKind::Unsupported, "{path}");
        }
        // No other programs, connections, BPF programs (5), rights, debugging.
        assert!(Command::new("true").status().is_err());
        assert!(TcpStream::connect("127.0.0.1:1").unwrap_err().kind() == ErrorKind::Unsupported);
        assert!(UnixStream::connect("/nowhere").unwrap_err().kind() == ErrorKind::Unsupported);
        for (number, first) in [
            (libc::SYS_bpf, 5),
            (libc::SYS_clone, libc::SIGCHLD as usize),
            (libc::SYS_clone3, 0),
            (libc::SYS_execve, 0),
            (libc::SYS_kill, 1),
            (libc::SYS_memfd_create, 0),
            (libc::SYS_mount, 0),
            (libc::SYS_pidfd_getfd, 0),
            (libc::SYS_ptrace, 0),
            (libc::SYS_setns, 0),
            (libc::SYS_setuid, 0),
            (libc::SYS_unshare, 0),
        ] {
            assert_eq!(call(number, [first, 0, 0]), Some(libc::ENOSYS), "call {number}");
        }
        let executable = libc::PROT_READ | libc::PROT_EXEC;
        assert_eq!(call(libc::SYS_mprotect, [0, 4096, executable as usize]), Some(libc::ENOSYS));
        // It knows who comes, has threads, sleeps, and sends descriptors.
        let [ours, theirs] = meet::pair().unwrap();
        let who = Who::came(ours, None).unwrap();
        assert_eq!((who.pid, who.group.is_some()), (std::process::id() as i32, true));
        let [near, _far] = meet::pair().unwrap();
        meet::send(ours, b"x", &[near]).unwrap();
        let (len, mut received) = meet::receive(theirs, &mut [0; 9]).unwrap();
        assert!(len == 1 && received.take(0).is_some());
        assert!(thread::spawn(|| thread::sleep(Duration::from_millis(1))).join().is_ok());
        let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
        let said = |name: &str| {
            status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(":\t")).unwrap()
        };
        assert_eq!((said("Seccomp"), said("NoNewPrivs")), ("2", "1"));
        for name in ["CapEff", "CapPrm", "CapInh", "CapAmb"] {
            const RESOURCE: u64 = 1 << 24;
            let kept = u64::from_str_radix(said(name), 16).unwrap();
            assert_eq!(kept & !RESOURCE, 0, "{name}: {status}");
        }
    })
    .join()
    .unwrap();
}
