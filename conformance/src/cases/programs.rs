//! Other programs: started with a listening socket, as systemd does it, and linked statically.

use libc::{FD_CLOEXEC, SHUT_WR};
use tempfile::TempDir;

use crate::case::*;
use crate::sys;

/// The first descriptor that is handed over (sd_listen_fds(3)).
const LISTEN_FDS_START: i32 = 3;

/// The socket that this process was started with, if it was.
fn activated() -> Option<i32> {
    let says = |name: &str, value: String| std::env::var(name).is_ok_and(|said| said == value);
    let ours = says("LISTEN_PID", std::process::id().to_string());
    (ours && says("LISTEN_FDS", "1".into())).then(|| {
        let fd = LISTEN_FDS_START;
        record("F_SETFD", sys::fcntl(fd, libc::F_SETFD, FD_CLOEXEC));
        fd
    })
}

/// Starts this side's program with the socket.
fn activate(side: &Side, name: &str, fd: i32) {
    sys::dup2(fd, LISTEN_FDS_START).expect("dup2");
    sys::fcntl(LISTEN_FDS_START, libc::F_SETFD, 0).expect("F_SETFD");
    let pid = format!("LISTEN_PID={}", std::process::id());
    record("exec", side.start_anew(&["env", "LISTEN_FDS=1", &pid], name));
}

/// The static program, built in a directory of its own; none where there is no static libc.
fn static_program(side: &mut Side) -> Option<(TempDir, String)> {
    let place = TempDir::new().expect("a directory");
    let path = |name: &str| place.path().join(name).to_str().expect("a name").to_string();
    let (source, program) = (path("static.c"), path("static"));
    std::fs::write(&source, include_str!("../static.c")).expect("the source is written");
    let built = sys::system(&format!("cc -static -O1 -o {program} {source} 2>/dev/null")) == 0;
    side.tell(i64::from(built));
    if !built {
        skipped();
    }
    built.then_some((place, program))
}

fn skipped() {
    say("skipped: no static libc here (cc -static)");
}

/// The other side of `static_program`.
fn is_there(side: &mut Side) -> bool {
    let built = side.hear() != 0;
    if !built {
        skipped();
    }
    built
}

fn lines(end: End) {
    for number in 0..500 {
        let line = format!("line {number}\n");
        send_all(end, line.as_bytes()).expect("send");
        assert_eq!(recv_exact(end, line.len()), Ok(line.into_bytes()));
    }
    say("500 lines");
}

fn join(child: i32) {
    record("child", sys::wait_for(child));
}

fn tell_ring(end: End) {
    record("on the ring", sys::ringlet_path(end.0) == RING);
}

pub const CASES: &[Case] = &[
    pair(
        "programs/activated",
        "a service that is started with its listening socket at number 3: what it accepts is moved",
        |a| {
            let port = a.hear() as u32;
            // Not before the service runs.
            a.sync();
            for _ in 0..3 {
                let end = a.dial(port);
                a.warm(end);
                lines(end);
                end.close();
            }
        },
        |b| {
            let Some(listener) = activated() else {
                let (listener, port) = b.listener();
                b.tell(i64::from(port));
                return activate(b, "programs/activated", listener);
            };
            b.sync();
            for _ in 0..3 {
                let end = End(sys::accept(listener).expect("accept"));
                b.warm(end);
                echo(end);
                end.close();
            }
        },
    )
    .all_families()
    .each_side(),
    pair(
        "programs/activated_datagrams",
        "a service that is started with its datagram socket at number 3",
        |a| {
            let port = a.hear() as u32;
            let target = a.target(port);
            let end = End(sys::socket(libc::AF_INET, libc::SOCK_DGRAM).expect("socket"));
            record("connect", sys::connect(end.0, target));
            lines(end);
            end.send(b"");
        },
        |b| {
            let Some(fd) = activated() else {
                let fd = sys::socket(libc::AF_INET, libc::SOCK_DGRAM).expect("socket");
                sys::bind(fd, std::net::SocketAddr::new(b.address(), 0)).expect("bind");
                let name = sys::getsockname(fd).expect("getsockname").expect("an address");
                b.tell(i64::from(name.port()));
                return activate(b, "programs/activated_datagrams", fd);
            };
            let mut answered = 0;
            while let Ok((data, Some(source))) = sys::recv_from(fd, 100, 0)
                && !data.is_empty()
            {
                sys::sendto(fd, &data, 0, source).expect("sendto");
                answered += 1;
            }
            record("answered", answered);
        },
    )
    .any_path()
    .internet_only()
    .each_side(),
    pair(
        "programs/static_child",
        "a statically linked program goes on with a moved connection, which is the kernel's from then on",
        |a| {
            let end = a.moved();
            if is_there(a) {
                lines(end);
                tell_ring(end);
                end.shutdown(SHUT_WR);
                end.recv_to_end();
            }
        },
        |b| {
            let end = b.moved();
            let Some((_place, program)) = static_program(b) else { return };
            let number = end.0.to_string();
            let child = sys::fork(|| {
                sys::exec(&[&program, "talk", &number]);
                127
            });
            end.close();
            join(child);
        },
    )
    .steady()
    .each_side(),
    pair(
        "programs/static_server",
        "a statically linked server: a wrapped client stays on the kernel",
        |a| {
            if is_there(a) {
                let port = a.hear() as u32;
                let end = a.dial(port);
                lines(end);
                tell_ring(end);
                end.shutdown(SHUT_WR);
                end.recv_to_end();
            }
        },
        |b| {
            let Some((_place, program)) = static_program(b) else { return };
            let (listener, port) = b.listener();
            sys::fcntl(listener, libc::F_SETFD, 0).expect("F_SETFD");
            b.tell(i64::from(port));
            let number = listener.to_string();
            let child = sys::fork(|| {
                sys::exec(&[&program, "serve", &number]);
                127
            });
            join(child);
        },
    )
    .any_path(),
    pair(
        "programs/static_client",
        "a statically linked client: a wrapped server stays on the kernel",
        |a| {
            let Some((_place, program)) = static_program(a) else { return };
            let port = a.hear().to_string();
            let child = sys::fork(|| {
                sys::exec(&[&program, "call", &port]);
                127
            });
            join(child);
        },
        |b| {
            if is_there(b) {
                let (listener, port) = b.listener();
                b.tell(i64::from(port));
                let end = End(sys::accept(listener).expect("accept"));
                echo(end);
                tell_ring(end);
                end.close();
            }
        },
    )
    .any_path()
    .internet_only(),
];

/// Sends back what comes, to the end.
fn echo(end: End) {
    let mut all = 0;
    while let Ok(data) = recv(end, 4096, 0)
        && !data.is_empty()
    {
        all += data.len();
        send_all(end, &data).expect("send");
    }
    record("sent back", all);
}
