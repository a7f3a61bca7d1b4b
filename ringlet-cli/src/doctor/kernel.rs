//! What the move of a connection needs of the kernel, tried with the very functions that the move uses.

use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::AtomicU32;
use std::time::Duration;

use ringlet_linux::fd as descriptor;
use ringlet_linux::sys::{Errno, Sys};
use ringlet_linux::{diag, map, meet, tcp, unix};
use rustix::event::epoll;

use super::Check;

/// The first kernel with all that is tried here: F_SEAL_FUTURE_WRITE came last.
const KERNEL_MIN: (u32, u32) = (5, 1);
/// What is sent to see it counted.
const MESSAGE: &[u8] = b"doctor";
const PATIENCE: Duration = Duration::from_secs(30);

pub fn checks() -> Vec<Check> {
    let mut checks =
        vec![version(), memory(), wipe_on_fork(), doorbell(), readiness(), unix_sockets()];
    match connection(Ipv4Addr::LOCALHOST.into()) {
        Ok(pair) => {
            checks.push(Check::ok("loopback", loopback()));
            checks.extend([counts(&pair), owner(&pair), descriptors_of_processes(&pair)]);
            checks.push(rendezvous(&pair));
        }
        Err(error) if error.kind() == io::ErrorKind::TimedOut => checks.push(Check::unknown(
            "loopback",
            "no connection over 127.0.0.1 in time; or else a firewall drops its packets",
        )),
        Err(error) => checks.push(Check::fail(
            "loopback",
            format!("no TCP connection over 127.0.0.1: {error}"),
            "Bring the interface up in this network namespace: `ip link set lo up`.",
        )),
    }
    checks
}

fn version() -> Check {
    let name = rustix::system::uname();
    let release = name.release().to_string_lossy();
    let found = format!("Linux {release} on {}", name.machine().to_string_lossy());
    let mut numbers = release.split(|each: char| !each.is_ascii_digit()).map(str::parse);
    let version = numbers.next().zip(numbers.next());
    match version {
        Some((Ok(major), Ok(minor))) if (major, minor) < KERNEL_MIN => Check::fail(
            "kernel",
            found,
            format!("Use Linux {}.{} or newer.", KERNEL_MIN.0, KERNEL_MIN.1),
        ),
        _ => Check::ok("kernel", found),
    }
}

fn memory() -> Check {
    let bytes = 64 << 10;
    let tried = map::sealed_memfd(c"ringlet-doctor", bytes, 0).map(own).and_then(|file| {
        let file = file.as_raw_fd();
        map::map_shared(file, bytes, true)?;
        map::seal_readers(file)?;
        map::sealed_size(file)
    });
    match tried {
        Ok(size) if size == bytes => {
            Check::ok("shared memory", "memfd, its seals and a shared mapping")
        }
        Ok(size) => Check::fail(
            "shared memory",
            format!("a memfd of {bytes} bytes has {size}"),
            "Report this: no kernel should do so.",
        ),
        Err(error) => refused("shared memory", "memfd_create, fcntl(F_ADD_SEALS) or mmap", error),
    }
}

fn wipe_on_fork() -> Check {
    match map::wiped_table::<AtomicU32>(1) {
        Ok(_) => Check::ok("fork", "memory that is wiped on fork"),
        Err(error) => refused("fork", "madvise(MADV_WIPEONFORK)", error),
    }
}

fn doorbell() -> Check {
    let tried = descriptor::eventfd().map(own).map(|bell| {
        let readable = || {
            descriptor::pending(bell.as_raw_fd(), rustix::event::PollFlags::IN.bits().cast_signed())
                != 0
        };
        let before = readable();
        descriptor::ring(bell.as_raw_fd());
        let rung = readable();
        descriptor::drain(bell.as_raw_fd());
        !before && rung && !readable()
    });
    match tried {
        Ok(true) => Check::ok("eventfd", "rings and is drained"),
        Ok(false) => broken("eventfd", "an eventfd or ppoll does not do what it should"),
        Err(error) => refused("eventfd", "eventfd2", error),
    }
}

fn readiness() -> Check {
    let tried = || -> rustix::io::Result<bool> {
        let bell = rustix::event::eventfd(1, rustix::event::EventfdFlags::CLOEXEC)?;
        let set = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&set, &bell, epoll::EventData::new_u64(7), epoll::EventFlags::IN)?;
        let mut events = Vec::with_capacity(2);
        let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        epoll::wait(&set, rustix::buffer::spare_capacity(&mut events), Some(&now))?;
        let ready: Vec<u64> = events.iter().map(|event| { event.data }.u64()).collect();
        Ok(ready == [7])
    };
    match tried() {
        Ok(true) => Check::ok("epoll", "tells what is ready"),
        Ok(false) => broken("epoll", "epoll does not tell of a ready eventfd"),
        Err(error) => {
            refused("epoll", "epoll_create1, epoll_ctl or epoll_wait", Errno(error.raw_os_error()))
        }
    }
}

/// A connection whose both ends are ours.
pub struct Pair {
    pub connector: TcpStream,
    pub acceptor: TcpStream,
}

pub fn connection(address: IpAddr) -> io::Result<Pair> {
    let listener = TcpListener::bind((address, 0))?;
    let connector = TcpStream::connect_timeout(&listener.local_addr()?, PATIENCE)?;
    // A stranger may have come first.
    loop {
        let (acceptor, from) = listener.accept()?;
        if from == connector.local_addr()? {
            return Ok(Pair { connector, acceptor });
        }
    }
}

fn loopback() -> String {
    let namespace = std::fs::read_link("/proc/self/ns/net").unwrap_or_default();
    let families = match connection(Ipv6Addr::LOCALHOST.into()) {
        Ok(_) => "IPv4 and IPv6",
        Err(_) => "IPv4 (no IPv6)",
    };
    format!("{families} in network namespace {}", namespace.display())
}

fn counts(pair: &Pair) -> Check {
    let length = MESSAGE.len() as u64;
    let tried = (&pair.connector).write_all(MESSAGE).map_err(errno).and_then(|()| {
        // Delivery over loopback happens within the send, but may be put off to a softirq thread.
        let ready = rustix::event::poll(
            &mut [rustix::event::PollFd::new(&pair.acceptor, rustix::event::PollFlags::IN)],
            Some(&rustix::event::Timespec { tv_sec: PATIENCE.as_secs() as i64, tv_nsec: 0 }),
        );
        if ready.map_err(|error| Errno(error.raw_os_error()))? == 0 {
            return Err(Errno(libc::ETIMEDOUT));
        }
        let acceptor = pair.acceptor.as_raw_fd();
        Ok((
            tcp::written(pair.connector.as_raw_fd(), true)?,
            tcp::counts(acceptor)?.received,
            tcp::unread(acceptor)? as u64,
            tcp::consumed(acceptor, || ())?,
        ))
    });
    match tried {
        Ok((written, received, unread, consumed))
            if (written.agreed(), received, unread, consumed)
                == (Some(length), length, length, 0) =>
        {
            Check::ok("byte counts", "TCP_INFO, SIOCOUTQ and FIONREAD are exact")
        }
        Ok((written, received, unread, consumed)) => broken(
            "byte counts",
            &format!(
                "of {length} bytes sent, TCP_INFO, SIOCOUTQ and FIONREAD say that {} were written and {} transmitted, {received} arrived, \
                 {unread} wait and {consumed} were read",
                written.place, written.transmitted
            ),
        ),
        Err(Errno(libc::ETIMEDOUT)) => {
            Check::unknown("byte counts", format!("what was sent has not come in {PATIENCE:?}"))
        }
        Err(Errno::ENOSYS) => Check::fail(
            "byte counts",
            "TCP_INFO lacks the counts of bytes sent",
            "Use a newer kernel; under gVisor or another emulated kernel connections cannot be moved.",
        ),
        Err(error) => refused(
            "byte counts",
            "getsockopt(TCP_INFO), ioctl(SIOCOUTQ) or ioctl(FIONREAD)",
            error,
        ),
    }
}

/// Who is at the other end of a Unix socket, and has it taken all?
fn unix_sockets() -> Check {
    let name = "Unix sockets";
    let tried = || -> Sys<(bool, bool)> {
        let (near, mut far) = UnixStream::pair().map_err(|_| Errno::EMFILE)?;
        let found = unix::ends(near.as_raw_fd())?;
        let owner = diag::far_owner(near.as_raw_fd(), &meet::Ends::Unix(found))?;
        let identified = Some(owner.inode) == inode(far.as_fd())
            && owner.uid == rustix::process::geteuid().as_raw();
        let untaken = || unix::untaken(near.as_raw_fd());
        tcp::send_from(near.as_raw_fd(), b"x", 0)?;
        let counted = untaken()? > 0;
        far.read_exact(&mut [0]).map_err(|_| Errno::EINVAL)?;
        Ok((identified, counted && untaken()? == 0))
    };
    match tried() {
        Ok((true, true)) => {
            Check::ok(name, "sock_diag finds the far end, SIOCOUTQ tells when all is taken")
        }
        Ok((false, _)) => broken(name, "sock_diag names another socket or user than the far end's"),
        Ok((_, false)) => broken(name, "SIOCOUTQ does not tell when all is taken"),
        Err(error) => Check::warn(
            name,
            format!(
                "sock_diag does not find the far end: {}; they stay on the kernel",
                describe(error)
            ),
            "Load the module (`modprobe unix_diag`, CONFIG_UNIX_DIAG).",
        ),
    }
}

fn owner(pair: &Pair) -> Check {
    let expected = inode(pair.acceptor.as_fd());
    let socket = pair.connector.as_raw_fd();
    match ends(&pair.connector).and_then(|ends| diag::far_owner(socket, &ends)) {
        Ok(owner) if Some(owner.inode) == expected => {
            Check::ok("socket table", "sock_diag finds the far end of a connection")
        }
        Ok(owner) => broken(
            "socket table",
            &format!("sock_diag says inode {}, fstat says {expected:?}", owner.inode),
        ),
        Err(error) => Check::fail(
            "socket table",
            format!("sock_diag does not find the far end of a connection: {}", describe(error)),
            "Load the module (`modprobe tcp_diag`, CONFIG_INET_TCP_DIAG), and let the seccomp filter, if there is one, \
             pass socket(AF_NETLINK, .., NETLINK_SOCK_DIAG).",
        ),
    }
}

fn ends(socket: &TcpStream) -> Sys<meet::Ends> {
    tcp::ends(socket.as_raw_fd()).map(meet::Ends::Tcp).ok_or(Errno::ENOTCONN)
}

fn inode(socket: BorrowedFd) -> Option<u32> {
    u32::try_from(rustix::fs::fstat(socket).ok()?.st_ino).ok()
}

fn descriptors_of_processes(pair: &Pair) -> Check {
    let pid = rustix::process::getpid().as_raw_nonzero().get();
    let socket = &pair.acceptor;
    let fix = "Mount /proc (`mount -t proc proc /proc`); without it nobody can prove that he owns a connection.";
    match inode(socket.as_fd()).map(|inode| meet::holds(pid, socket.as_raw_fd(), inode)) {
        Some(Ok(true)) => Check::ok("/proc", "shows who holds a socket"),
        Some(Err(error)) => {
            Check::fail("/proc", format!("cannot read /proc/self/fd: {}", describe(error)), fix)
        }
        _ => Check::fail("/proc", "does not show the descriptors of this process", fix),
    }
}

/// Two strangers meet by the addresses of a connection, and one gives the other a descriptor.
fn rendezvous(pair: &Pair) -> Check {
    let tried = || -> Sys<bool> {
        let offer = meet::offer(&ends(&pair.acceptor)?).map(own)?;
        let seeker = meet::look(&ends(&pair.connector)?).map(own)?;
        let host = meet::accept(offer.as_raw_fd()).map(own)?;
        let us =
            (rustix::process::getpid().as_raw_nonzero().get(), rustix::process::geteuid().as_raw());
        let credentials = meet::credentials(host.as_raw_fd())?;
        let gift = descriptor::eventfd().map(own)?;
        meet::admit_descriptors(seeker.as_raw_fd(), true);
        meet::send(host.as_raw_fd(), MESSAGE, &[gift.as_raw_fd()])?;
        let mut buffer = [0; 64];
        let (length, mut fds) = meet::receive(seeker.as_raw_fd(), &mut buffer)?;
        let came = fds.take(0).map(own).is_some_and(|fd| descriptor::is_eventfd(fd.as_raw_fd()));
        Ok((credentials.pid, credentials.uid) == us && &buffer[..length] == MESSAGE && came)
    };
    match tried() {
        Ok(true) => {
            Check::ok("rendezvous", "abstract Unix sockets, SO_PEERCRED, descriptors passed")
        }
        Ok(false) => {
            broken("rendezvous", "credentials or descriptors do not arrive as they were sent")
        }
        Err(error) => refused("rendezvous", "AF_UNIX, SO_PEERCRED or SCM_RIGHTS", error),
    }
}

/// Takes charge of a descriptor that is nobody else's.
#[allow(unsafe_code)]
pub fn own(fd: i32) -> OwnedFd {
    // SAFETY: every caller has it from a function that has just made it and gives it away.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

fn errno(error: io::Error) -> Errno {
    Errno(error.raw_os_error().unwrap_or_default())
}

pub fn describe(error: Errno) -> String {
    io::Error::from_raw_os_error(error.0).to_string()
}

fn refused(name: &'static str, calls: &str, error: Errno) -> Check {
    let found = format!("{calls} is refused: {}", describe(error));
    let fix = match error {
        Errno::ENOSYS | Errno::EPERM | Errno::EACCES => {
            "If a seccomp filter or security module forbids it (in a container, say), allow it; else use a newer kernel."
        }
        Errno::EINVAL => "Use a newer kernel.",
        Errno::EMFILE | Errno::ENFILE => "Raise the limit of open descriptors (`ulimit -n`).",
        Errno::ENOMEM => "Free some memory, or raise the memory limit of this container.",
        _ => "See the manual pages of these calls for what this error means.",
    };
    Check::fail(name, found, fix)
}

fn broken(name: &'static str, found: &str) -> Check {
    Check::fail(
        name,
        found,
        "This kernel (or what emulates it) cannot be used for moving connections.",
    )
}
