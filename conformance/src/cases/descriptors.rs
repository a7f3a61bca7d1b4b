//! Descriptors: copies, numbers that change hands, flags, options, and what is told of a socket.

use libc::{
    FD_CLOEXEC, IPPROTO_TCP, MSG_DONTWAIT, MSG_NOSIGNAL, O_CLOEXEC, O_NONBLOCK, SOL_SOCKET,
};

use crate::case::*;
use crate::sys::{self, Fd, R, Stream};

/// Sends a line to the echoing peer and records what comes back.
fn round(end: End, text: &[u8]) {
    end.send(text);
    end.recv_exact(text.len());
}

/// Echoes until the stream ends.
fn echo_peer(a: &mut Side) {
    let end = a.moved();
    let mut bytes = 0;
    while let Ok(got @ [_, ..]) = recv(end, 100, 0).as_deref() {
        bytes += send_all(end, got).expect("send");
    }
    record("echoed", bytes);
    end.recv(1);
    end.close();
}

/// Each way to copy a descriptor.
fn copies(fd: Fd) -> [(&'static str, R<Fd>); 5] {
    [
        ("dup", sys::dup(fd)),
        ("dup2", sys::dup2(fd, 60)),
        ("dup3", sys::dup3(fd, 61, O_CLOEXEC)),
        ("F_DUPFD", sys::fcntl(fd, libc::F_DUPFD, 62)),
        ("F_DUPFD_CLOEXEC", sys::fcntl(fd, libc::F_DUPFD_CLOEXEC, 80)),
    ]
}

/// Opens files until there is no number left; returns the last.
fn count_up() -> R<Fd> {
    let mut last = Err(sys::Errno(0));
    while let Ok(fd) = sys::open("/dev/null") {
        last = Ok(fd);
    }
    last
}

fn ask_often(end: End, times: i32) {
    for i in 0..times {
        send_all(end, &i.to_le_bytes()).expect("send");
        assert_eq!(recv_exact(end, 4), Ok(i.to_le_bytes().to_vec()), "reply to {i}");
    }
}

/// This process's open descriptors and its mappings.
fn in_use() -> (usize, usize) {
    let entries = |path| std::fs::read_dir(path).map_or(0, |entries| entries.count());
    (entries("/proc/self/fd"), entries("/proc/self/map_files"))
}

/// What a plain file (of zeros) does under a number that a connection had.
fn plain_file(fd: Fd) {
    let mut buf = [1; 4];
    record("reads as a file", sys::read(fd, &mut buf).map(|_| buf.to_vec()));
    record("recv", sys::recv(fd, &mut buf, 0));
    record("is a socket", sys::file_type(fd).map(|kind| kind == libc::S_IFSOCK));
    record("close", sys::close(fd));
}

pub const CASES: &[Case] = &[
    pair(
        "descriptors/copies",
        "each copy serves the connection, whichever are closed",
        echo_peer,
        |b| {
            let end = b.moved();
            let mut ends = vec![end];
            for (what, copy) in copies(end.0) {
                let copy = End(copy.expect(what));
                record(what, sys::fcntl(copy.0, libc::F_GETFD, 0));
                round(copy, what.as_bytes());
                ends.push(copy);
            }
            for (number, copy) in ends.iter().enumerate() {
                round(ends[ends.len() - 1], format!("{number} before its close").as_bytes());
                copy.close();
                copy.recv(1);
            }
        },
    )
    .packets_too()
    .each_side(),
    pair(
        "descriptors/copy_before_data",
        "a connection copied before it carried anything",
        |a| {
            let end = a.fresh();
            a.sync();
            a.warm(end);
            end.recv(10);
            a.sync();
            end.recv(10);
            a.sync();
            end.recv(10);
        },
        |b| {
            let end = b.fresh();
            let copy = End(sys::dup(end.0).expect("dup"));
            b.sync();
            b.warm(end);
            copy.send(b"from copy");
            end.close();
            b.sync();
            copy.send(b"still");
            b.sync();
            copy.close();
        },
    )
    .packets_too(),
    pair(
        "descriptors/copy_unread",
        "unread data is there for each copy, once",
        |a| {
            let end = a.moved();
            end.send(b"abcdef");
            a.sync();
        },
        |b| {
            let end = b.moved();
            b.sync();
            end.until_unread(6);
            let copy = End(sys::dup(end.0).expect("dup"));
            copy.recv_with(2, libc::MSG_PEEK);
            copy.recv(2);
            end.recv(2);
            end.close();
            copy.mask();
            copy.recv(9);
            copy.recv_with(9, MSG_DONTWAIT);
        },
    ),
    pair(
        "descriptors/copies_share_flags",
        "O_NONBLOCK is shared, FD_CLOEXEC is not",
        echo_peer,
        |b| {
            let end = b.moved();
            let copy = sys::dup(end.0).expect("dup");
            End(copy).set_nonblocking(true);
            let flag = sys::fcntl(end.0, libc::F_GETFL, 0).map(|flags| flags & O_NONBLOCK != 0);
            record("the original's O_NONBLOCK", flag);
            end.recv(1);
            record("F_SETFD", sys::fcntl(copy, libc::F_SETFD, FD_CLOEXEC));
            record("the copy's", sys::fcntl(copy, libc::F_GETFD, 0));
            record("the original's", sys::fcntl(end.0, libc::F_GETFD, 0));
            record("FIONBIO", sys::ioctl(end.0, libc::FIONBIO, 0));
            let flag = sys::fcntl(copy, libc::F_GETFL, 0).map(|flags| flags & O_NONBLOCK != 0);
            record("the copy's O_NONBLOCK", flag);
            round(End(copy), b"blocking");
            End(copy).close();
            end.close();
        },
    ),
    pair("descriptors/replaced", "dup2 of a file over a connection closes it", echo_peer, |b| {
        let end = b.moved();
        round(end, b"before");
        let file = sys::open("/dev/zero").expect("open");
        record("dup2", sys::dup2(file, end.0).map(|fd| fd == end.0));
        plain_file(end.0);
    })
    .each_side(),
    pair(
        "descriptors/replaced_by_another",
        "dup2 of one connection over another closes the other",
        |a| {
            let (one, two) = (a.moved(), a.moved());
            two.recv(10);
            one.recv(10);
            one.send(b"to both");
            a.sync();
        },
        |b| {
            let (one, two) = (b.moved(), b.moved());
            record("dup2", sys::dup2(one.0, two.0).map(|fd| fd == two.0));
            two.send(b"from two");
            two.recv(10);
            one.close();
            b.sync();
        },
    )
    .each_side(),
    pair(
        "descriptors/copy_errors",
        "copies that are refused, and the copy onto itself",
        echo_peer,
        |b| {
            let end = b.moved();
            record("dup2 onto itself", sys::dup2(end.0, end.0).map(|fd| fd == end.0));
            record("dup3 onto itself", sys::dup3(end.0, end.0, 0));
            record("dup2 of closed", sys::dup2(555, end.0));
            record("dup2 to -1", sys::dup2(end.0, -1));
            record("dup of closed", sys::dup(555));
            record("F_DUPFD to -1", sys::fcntl(end.0, libc::F_DUPFD, -1));
            round(end, b"unharmed");
            end.close();
            record("dup2 onto itself, closed", sys::dup2(end.0, end.0));
            end.close();
        },
    ),
    pair(
        "descriptors/number_reused",
        "a closed connection's number serves a file, a pipe, a socket",
        echo_peer,
        |b| {
            let end = b.moved();
            end.close();
            end.recv(1);
            end.send_with(b"x", MSG_NOSIGNAL);
            let file = sys::open("/dev/zero").expect("open");
            record("same number", file == end.0);
            plain_file(file);
            let (from, to) = sys::pipe().expect("pipe");
            record("same number", from == end.0);
            record("write to the pipe", sys::write(to, b"piped"));
            let mut buf = [0; 8];
            record("read from it", sys::read(from, &mut buf).map(|n| buf[..n].to_vec()));
            record("send to it", sys::send(to, b"x", 0));
            sys::close(from).expect("close");
            let socket = sys::socket(libc::AF_UNIX, libc::SOCK_STREAM).expect("socket");
            record("same number", socket == end.0);
            End(socket).recv_with(1, MSG_DONTWAIT);
        },
    )
    .each_side(),
    pair(
        "descriptors/number_reused_by_connection",
        "a new connection takes a closed one's number, ten times",
        |a| {
            for _ in 0..10 {
                let end = a.moved();
                end.recv(20);
                end.recv(1);
                end.close();
                a.sync();
            }
        },
        |b| {
            for turn in 0..10 {
                let end = b.moved();
                record("number", end.0);
                end.send(format!("turn {turn}").as_bytes());
                end.close();
                b.sync();
            }
        },
    ),
    pair(
        "descriptors/closed_by_system_call",
        "a close that bypasses libc, as Node.js does it",
        echo_peer,
        |b| {
            let end = b.moved();
            round(end, b"before");
            record("close", sys::close_by_syscall(end.0));
            end.recv(1);
            let file = sys::open("/dev/zero").expect("open");
            record("same number", file == end.0);
            plain_file(file);
        },
    )
    .packets_too()
    .each_side(),
    pair(
        "descriptors/closed_by_system_call_then_accepted",
        "a new connection under the number of one that was closed behind libc's back",
        |a| {
            let first = a.moved();
            first.recv(1);
            let second = a.moved();
            second.recv(9);
            first.recv(1);
        },
        |b| {
            let first = b.moved();
            record("close", sys::close_by_syscall(first.0));
            let second = b.moved();
            record("same number", second == first);
            second.send(b"the second");
        },
    ),
    pair("descriptors/close_range", "close_range ends connections", echo_peer, |b| {
        let end = b.moved();
        round(end, b"before");
        record("close_range", sys::close_range(end.0, end.0 + 10));
        end.recv(1);
        end.close();
    }),
    pair(
        "descriptors/closing_strangers",
        "a program that closes every number it does not know",
        echo_peer,
        |b| {
            let end = b.moved();
            round(end, b"before");
            for fd in CONTROL + 1..4096 {
                let _ = sys::close(fd);
            }
            round(end, b"after close");
            record("close_range", sys::close_range(CONTROL + 1, -1));
            round(end, b"after close_range");
            round(end, &[b'x'; 90]);
            let copy = sys::dup2(end.0, CONTROL + 800).expect("dup2");
            round(End(copy), b"a copy among them");
            end.close();
            End(copy).close();
        },
    )
    .each_side(),
    pair(
        "descriptors/numbers",
        "descriptors are numbered as without ringlet, the lowest first",
        |a| {
            let ends = [a.moved(), a.moved(), a.moved()];
            record("connections", format!("{:?}", ends.map(|end| end.0)));
            record("open", sys::open("/dev/null"));
            ends[1].close();
            record("open", sys::open("/dev/null"));
            record("epoll", sys::epoll_create());
            record("pipe", sys::pipe().map(|ends| format!("{ends:?}")));
        },
        |b| {
            let ends = [b.moved(), b.moved(), b.moved()];
            record("connections", format!("{:?}", ends.map(|end| end.0)));
            record("dup", sys::dup(ends[0].0));
            record("F_DUPFD", sys::fcntl(ends[0].0, libc::F_DUPFD, 50));
            record(
                "socketpair",
                sys::socketpair(libc::SOCK_STREAM).map(|ends| format!("{ends:?}")),
            );
        },
    ),
    pair(
        "descriptors/taking_numbers",
        "a program that puts files under two hundred high numbers",
        echo_peer,
        |b| {
            let end = b.moved();
            round(end, b"before");
            let file = sys::open("/dev/null").expect("open");
            let taken = (1000..1200).filter(|fd| sys::dup2(file, *fd) == Ok(*fd)).count();
            record("taken", taken);
            round(end, b"while they are taken");
            let closed = (1000..1200).filter(|fd| sys::close(*fd).is_ok()).count();
            record("closed", closed);
            round(end, b"after they were closed");
            end.close();
        },
    )
    .each_side(),
    pair("descriptors/wrong_calls", "calls that a connection refuses", echo_peer, |b| {
        let end = b.moved();
        let peer = sys::getpeername(end.0).expect("getpeername").expect("an address");
        record("connect", sys::connect(end.0, peer));
        record("bind", sys::bind(end.0, peer));
        record("listen", sys::listen(end.0, 5));
        record("accept", sys::accept(end.0));
        round(end, b"unharmed");
        end.close();
        record("connect, closed", sys::connect(end.0, peer));
    })
    .internet_only(),
    pair(
        "descriptors/without_input",
        "a program with few descriptors that closes its standard input has that number for itself",
        |a| {
            let end = a.fresh();
            let _ = sys::close(0);
            record("limit", sys::limit_descriptors(24));
            a.warm(end);
            record("open", sys::open("/dev/null"));
            round(end, b"still here");
            end.close();
        },
        echo_peer,
    )
    .each_side(),
    pair(
        "descriptors/limit",
        "RLIMIT_NOFILE lets a program have as many descriptors as without ringlet",
        |a| {
            let first = a.moved();
            record("limit", sys::limit_descriptors(24));
            let second = a.fresh();
            a.warm(second);
            record("the last number", count_up());
            record("one more", sys::open("/dev/null"));
            record("socket", sys::socket(libc::AF_INET, libc::SOCK_STREAM));
            record("dup", sys::dup(first.0));
            record("epoll", sys::epoll_create());
            for end in [first, second] {
                round(end, b"still here");
                end.close();
            }
        },
        |b| {
            let first = b.moved();
            let second = b.fresh();
            b.warm(second);
            for end in [first, second] {
                while let Ok(got @ [_, ..]) = recv(end, 100, 0).as_deref() {
                    send_all(end, got).expect("send");
                }
            }
        },
    )
    .packets_too()
    .any_path()
    .each_side(),
    pair(
        "descriptors/short_lived",
        "five hundred connections, one after the other, leave no descriptor and no mapping",
        |a| {
            let end = a.fresh();
            a.warm(end);
            end.close();
            let mut after_hundred = (0, 0);
            for turn in 1..=500 {
                let end = a.fresh();
                ask_often(end, turn % 40);
                sys::close(end.0).expect("close");
                if turn == 100 {
                    after_hundred = in_use();
                }
            }
            let now = in_use();
            // A few may wait to be used again or to be let go.
            record("descriptors grow", now.0 > after_hundred.0 + 20);
            record("mappings grow", now.1 > after_hundred.1 + 20);
        },
        |b| {
            let end = b.fresh();
            b.warm(end);
            end.close();
            let mut after_hundred = (0, 0);
            for turn in 1..=500 {
                let end = b.fresh();
                while let Ok(got @ [_, ..]) = recv(end, 100, 0).as_deref() {
                    send_all(end, got).expect("send");
                }
                sys::close(end.0).expect("close");
                if turn == 100 {
                    after_hundred = in_use();
                }
            }
            let now = in_use();
            record("descriptors grow", now.0 > after_hundred.0 + 20);
            record("mappings grow", now.1 > after_hundred.1 + 20);
        },
    )
    .any_path()
    .each_side(),
    pair("descriptors/flags", "flags are set and told", echo_peer, |b| {
        let end = b.moved();
        let flags = || sys::fcntl(end.0, libc::F_GETFL, 0);
        record("fresh", flags());
        record("F_SETFL", sys::fcntl(end.0, libc::F_SETFL, O_NONBLOCK | libc::O_APPEND));
        record("both", flags());
        record("F_SETFL", sys::fcntl(end.0, libc::F_SETFL, 0));
        record("none", flags());
        record("F_SETFD", sys::fcntl(end.0, libc::F_SETFD, FD_CLOEXEC));
        record("F_GETFD", sys::fcntl(end.0, libc::F_GETFD, 0));
        record("unknown", sys::fcntl(end.0, 9999, 0));
        record("of closed", sys::fcntl(555, libc::F_GETFL, 0));
        record("not a terminal", sys::ioctl(end.0, libc::TIOCGWINSZ, 0));
        round(end, b"unharmed");
        end.close();
    }),
    pair(
        "descriptors/identity",
        "what a moved connection says that it is",
        |a| {
            let end = a.moved();
            let port = |addr: R<Option<std::net::SocketAddr>>| {
                addr.ok().flatten().map_or(0, |addr| i64::from(addr.port()))
            };
            a.tell(port(sys::getsockname(end.0)));
            a.tell(port(sys::getpeername(end.0)));
            a.sync();
        },
        |b| {
            let end = b.moved();
            let (theirs, ours) = (b.hear() as u16, b.hear() as u16);
            let near = sys::getsockname(end.0).expect("getsockname").expect("an address");
            let far = sys::getpeername(end.0).expect("getpeername").expect("an address");
            record("own address", near.ip().to_string());
            record("peer's address", far.ip().to_string());
            record("ports agree", near.port() == ours && far.port() == theirs);
            record("is a socket", sys::file_type(end.0).map(|kind| kind == libc::S_IFSOCK));
            for (name, option) in [
                ("SO_TYPE", libc::SO_TYPE),
                ("SO_DOMAIN", libc::SO_DOMAIN),
                ("SO_PROTOCOL", libc::SO_PROTOCOL),
                ("SO_ACCEPTCONN", libc::SO_ACCEPTCONN),
                ("SO_ERROR", libc::SO_ERROR),
            ] {
                record(name, sys::getsockopt(end.0, SOL_SOCKET, option));
            }
            record("TCP_INFO's state", sys::tcp_state(end.0));
            b.sync();
        },
    )
    .all_internet_families()
    .each_side(),
    pair("descriptors/options", "options are set and told", echo_peer, |b| {
        let end = b.moved();
        for (name, level, option) in [
            ("TCP_NODELAY", IPPROTO_TCP, libc::TCP_NODELAY),
            ("TCP_QUICKACK", IPPROTO_TCP, libc::TCP_QUICKACK),
            ("TCP_CORK", IPPROTO_TCP, libc::TCP_CORK),
            ("SO_KEEPALIVE", SOL_SOCKET, libc::SO_KEEPALIVE),
            ("SO_REUSEADDR", SOL_SOCKET, libc::SO_REUSEADDR),
            ("SO_OOBINLINE", SOL_SOCKET, libc::SO_OOBINLINE),
        ] {
            record(format!("{name} on"), sys::setsockopt(end.0, level, option, 1));
            record(name, sys::getsockopt(end.0, level, option));
            round(end, name.as_bytes());
            record(format!("{name} off"), sys::setsockopt(end.0, level, option, 0));
            record(name, sys::getsockopt(end.0, level, option));
        }
        for (name, option) in [("SO_SNDBUF", libc::SO_SNDBUF), ("SO_RCVBUF", libc::SO_RCVBUF)] {
            record(format!("{name} set"), sys::setsockopt(end.0, SOL_SOCKET, option, 50_000));
            record(name, sys::getsockopt(end.0, SOL_SOCKET, option));
        }
        record("unknown", sys::setsockopt(end.0, SOL_SOCKET, 9999, 1));
        record("unknown", sys::getsockopt(end.0, IPPROTO_TCP, 9999));
        record("not a socket", sys::getsockopt(0, SOL_SOCKET, libc::SO_ERROR));
        record("closed", sys::getsockopt(555, SOL_SOCKET, libc::SO_ERROR));
        round(end, &pattern(60, 60));
        end.close();
    })
    .packets_too()
    .each_side(),
    pair(
        "descriptors/queue_sizes",
        "FIONREAD counts what was sent, SIOCOUTQ is nothing once the peer has read it",
        |a| {
            let end = a.moved();
            let unsent = || sys::ioctl(end.0, libc::TIOCOUTQ, -1);
            until("SIOCOUTQ", || unsent() == Ok(0));
            record("SIOCOUTQ", unsent());
            a.sync();
            end.send(b"12345");
            end.send(&pattern(61, 3000));
            a.sync();
            a.sync();
            until("SIOCOUTQ", || unsent() == Ok(0));
            record("SIOCOUTQ", unsent());
            end.close();
        },
        |b| {
            let end = b.moved();
            end.unread();
            b.sync();
            b.sync();
            end.until_unread(3005);
            end.unread();
            end.recv_with(100, libc::MSG_PEEK);
            end.unread();
            end.recv(1005);
            end.unread();
            end.recv(2000);
            end.unread();
            b.sync();
            end.wait_mask(RDHUP);
            end.unread();
        },
    )
    .packets_too()
    .each_side(),
    pair(
        "descriptors/stdio",
        "a connection as a C stream",
        |a| {
            let end = a.moved();
            let mut stream = Stream::on(end.0, c"r+").expect("fdopen");
            record("fprintf", stream.printf("line", 1));
            record("fflush", stream.flush());
            record("fgets", stream.gets());
            record("fprintf", stream.printf("line", 2));
            record("fclose", stream.close());
            end.recv(1);
        },
        |b| {
            let end = b.moved();
            let mut stream = Stream::on(end.0, c"r+").expect("fdopen");
            record("fgets", stream.gets());
            record("fprintf", stream.printf("answer", 1));
            record("fflush", stream.flush());
            record("fgets", stream.gets());
            record("fgets", stream.gets());
            record("fclose", stream.close());
        },
    )
    .packets_too()
    .each_side(),
    pair(
        "descriptors/stdio_one_side",
        "a C stream here, plain calls there, and bytes of both kinds",
        |a| {
            let end = a.moved();
            end.send(b"first\nsecond\nthe rest");
            end.recv_exact(13);
            end.send_all(&pattern(62, 20_000));
            end.close();
        },
        |b| {
            let end = b.moved();
            end.until_unread(21);
            let copy = sys::dup(end.0).expect("dup");
            let mut stream = Stream::on(copy, c"r").expect("fdopen");
            record("fgets", stream.gets());
            record("fgets", stream.gets());
            record("fread", stream.fread(8));
            record("dprintf", sys::print_to(end.0, "formatted", 42));
            record("fread", stream.fread(30_000));
            record("fclose", stream.close());
            end.recv(1);
        },
    )
    // What is unread on both sides of a change of path can't be given to a C stream.
    .steady()
    .each_side(),
];
