//! What only Unix sockets have: control data among the bytes, credentials, names, pairs, ends that are seen at once.

use libc::{
    MSG_DONTWAIT, MSG_NOSIGNAL, MSG_PEEK, MSG_WAITALL, SHUT_RD, SHUT_WR, SIGKILL, SOL_SOCKET,
};

use super::close::beside;
use crate::case::*;
use crate::sys::{self, Carried, Fd, R};

/// A file that can be told from others by what is in it.
pub fn file(name: &str) -> Fd {
    sys::file_with(name.as_bytes()).expect("a file")
}

pub fn send_file(end: End, data: &[u8], names: &[&str]) {
    let files: Vec<Fd> = names.iter().map(|name| file(name)).collect();
    record(
        format!("send {} with {names:?}", brief(data)),
        sys::send_with_fds(end.0, data, &files, 0),
    );
    for file in files {
        sys::close(file).expect("close");
    }
}

/// The names of the files that came, each of which is closed.
fn names(fds: &[Fd]) -> Vec<String> {
    let name = |fd: &Fd| {
        let mut text = [0; 32];
        let n = sys::pread(*fd, &mut text, 0).expect("a file");
        sys::close(*fd).expect("close");
        String::from_utf8_lossy(&text[..n]).into_owned()
    };
    fds.iter().map(name).collect()
}

fn show(what: String, got: R<Carried>) {
    let shown = got.map(|got| {
        let truncated = if got.flags & libc::MSG_CTRUNC != 0 { ", truncated" } else { "" };
        format!("{} with {:?}{truncated}", brief(&got.data), names(&got.fds))
    });
    record(what, shown);
}

/// recvmsg with room for control data.
pub fn receive(end: End, len: usize, flags: i32) {
    show(format!("recvmsg {len}"), sys::recv_with_control(end.0, len, flags));
}

fn recvfrom(what: &str, end: End, flags: i32) {
    let got = sys::recvfrom(end.0, &mut [0; 10], flags);
    record(what, got.map(|(n, address)| format!("{n} bytes, an address of {address}")));
}

/// A pair of which this process keeps one end, and a child has the other one. The child asks, warming up.
pub fn with_child(side: &Side, work: impl FnOnce(End) -> i32) -> (End, i32) {
    let (near, far) = sys::socketpair(side.family().socket_type()).expect("socketpair");
    let child = sys::fork(|| {
        sys::close(near).expect("close");
        warm_as(End(far), true);
        side.tell_path(End(far));
        work(End(far))
    });
    sys::close(far).expect("close");
    warm_as(End(near), false);
    side.tell_path(End(near));
    (End(near), child)
}

pub fn join(pid: i32) {
    record("child", sys::wait_for(pid));
}

pub const CASES: &[Case] = &[
    pair(
        "unix/descriptors_in_order",
        "descriptors passed among bytes come with the first of theirs, and the ring goes on afterwards",
        |a| {
            let end = a.moved();
            for _ in 0..3 {
                end.send(b"before");
                send_file(end, b"with one", &["one"]);
                end.send(b"after");
                send_file(end, b"two", &["two", "three"]);
                send_file(end, b"four", &["four"]);
                a.sync();
                a.warm(end);
            }
        },
        |b| {
            let end = b.moved();
            for _ in 0..3 {
                b.sync();
                receive(end, 6, 0);
                receive(end, 4, MSG_PEEK);
                receive(end, 8, 0);
                receive(end, 5, 0);
                receive(end, 3, 0);
                receive(end, 100, 0);
                b.warm(end);
            }
        },
    )
    .unix_only().packets_too()
    .each_side(),
    pair(
        "unix/descriptors_both_ways",
        "both sides pass descriptors while both send bytes",
        |a| {
            let end = a.moved();
            for _ in 0..20 {
                end.send(b"bytes");
                send_file(end, b"x", &["from a"]);
                receive(end, 5, MSG_WAITALL);
                receive(end, 1, 0);
            }
            a.warm(end);
        },
        |b| {
            let end = b.moved();
            for _ in 0..20 {
                receive(end, 5, MSG_WAITALL);
                receive(end, 1, 0);
                end.send(b"bytes");
                send_file(end, b"x", &["from b", "and more"]);
            }
            b.warm(end);
        },
    )
    .unix_only().packets_too()
    .each_side(),
    pair(
        "unix/descriptors_at_random",
        "each of many descriptors comes with the very byte that it was sent with",
        |a| {
            let end = a.moved();
            let mut numbers = Sequence::new(90);
            let mut sent = 0usize;
            for _ in 0..600 {
                let data = pattern(91, numbers.below(700) + 1);
                if numbers.below(4) == 0 {
                    let mark = file(&sent.to_string());
                    let n = sys::send_with_fds(end.0, &data, &[mark], 0).expect("send");
                    sys::close(mark).expect("close");
                    sent += n + send_all(end, &data[n..]).expect("send");
                } else {
                    sent += send_all(end, &data).expect("send");
                }
            }
            end.shutdown(SHUT_WR);
            end.recv_to_end();
        },
        |b| {
            let end = b.moved();
            let mut numbers = Sequence::new(92);
            let (mut all, mut came, mut in_place) = (Vec::new(), 0, true);
            loop {
                let got = sys::recv_with_control(end.0, numbers.below(3000) + 1, 0).expect("recv");
                if got.data.is_empty() {
                    break;
                }
                let range = all.len()..all.len() + got.data.len();
                for name in names(&got.fds) {
                    came += 1;
                    in_place &= range.contains(&name.parse().expect("a place"));
                }
                all.extend(got.data);
            }
            record("bytes", all);
            record("descriptors", came);
            record("each in its place", in_place);
            end.close();
        },
    )
    .unix_only().packets_too()
    .each_side(),
    pair(
        "unix/descriptor_for_a_sleeper",
        "a descriptor wakes a receive, a poll and an epoll_wait",
        |a| {
            let end = a.moved();
            for _ in 0..3 {
                let pid = a.hear() as i32;
                until_asleep(pid, pid);
                send_file(end, b"wake", &["up"]);
                a.sync();
                a.warm(end);
            }
        },
        |b| {
            let end = b.moved();
            let set = sys::epoll_create().expect("epoll");
            sys::epoll_ctl(set, libc::EPOLL_CTL_ADD, end.0, IN, 7).expect("epoll_ctl");
            for way in 0..3 {
                b.tell(i64::from(std::process::id()));
                match way {
                    0 => {}
                    1 => end.wait_mask(IN),
                    _ => record("events", sys::epoll_wait(set, 4, -1).map(|events| events.len())),
                }
                receive(end, 10, 0);
                b.sync();
                b.warm(end);
            }
        },
    )
    .unix_only().packets_too()
    .each_side(),
    pair(
        "unix/descriptors_without_room",
        "a receive without room for control data drops descriptors, and says so if it can",
        |a| {
            let end = a.moved();
            send_file(end, b"dropped", &["one"]);
            send_file(end, b"dropped too", &["two"]);
            a.sync();
            a.warm(end);
        },
        |b| {
            let end = b.moved();
            b.sync();
            end.recv(7);
            let mut buf = [0; 11];
            record("recvfrom", sys::recvfrom(end.0, &mut buf, 0).map(|(n, _)| n));
            b.warm(end);
        },
    )
    .unix_only().packets_too(),
    pair(
        "unix/wrong_descriptors",
        "a message with a closed number is refused as a whole",
        |a| {
            let end = a.moved();
            record("send", sys::send_with_fds(end.0, b"never", &[999], 0));
            end.send(b"fine");
            send_file(end, b"", &["nothing to go with"]);
            a.sync();
            a.sync();
            a.warm(end);
        },
        |b| {
            let end = b.moved();
            b.sync();
            receive(end, 20, 0);
            receive(end, 20, MSG_DONTWAIT);
            b.sync();
            b.warm(end);
        },
    )
    .unix_only().packets_too(),
    pair(
        "unix/waitall_until_control",
        "MSG_WAITALL ends with the bytes that control data came with",
        |a| {
            let end = a.moved();
            end.send(b"12345678");
            send_file(end, b"abcd", &["one"]);
            end.send(b"efgh");
            a.sync();
        },
        |b| {
            let end = b.moved();
            b.sync();
            receive(end, 16, MSG_WAITALL);
            receive(end, 4, MSG_WAITALL);
        },
    )
    .unix_only().packets_too(),
    pair(
        "unix/credentials",
        "SO_PEERCRED, credentials that are sent, and those that are asked for after the move",
        |a| {
            let end = a.moved();
            a.tell(i64::from(std::process::id()));
            record("peer is the other side", sys::peer_process(end.0) == Ok(a.hear() as u32));
            a.sync();
            end.send(b"unasked");
            record("send with credentials", sys::send_with_credentials(end.0, b"explicit"));
            a.sync();
            end.recv_exact(5);
            end.send(b"asked for");
            end.recv_to_end();
        },
        |b| {
            let end = b.moved();
            b.tell(i64::from(std::process::id()));
            let pid = b.hear();
            record("peer is the other side", sys::peer_process(end.0) == Ok(pid as u32));
            b.sync();
            b.sync();
            let ask = |len| {
                let got = sys::recv_with_control(end.0, len, 0).expect("recvmsg");
                let theirs = got.pid.map(|it| i64::from(it) == pid);
                say(format!("{} from the other side: {theirs:?}", brief(&got.data)));
            };
            ask(7);
            ask(8);
            record("SO_PASSCRED", sys::setsockopt(end.0, SOL_SOCKET, libc::SO_PASSCRED, 1));
            end.send(b"ready");
            ask(9);
            end.close();
        },
    )
    .unix_only().packets_too()
    .each_side(),
    pair(
        "unix/names",
        "a receive tells the address that the other side is bound to, and a send takes none",
        |a| {
            let end = a.moved();
            a.sync();
            recvfrom("recvfrom", end, MSG_PEEK);
            let got = sys::recvmsg(end.0, &[10], 0);
            record("recvmsg's address", got.map(|got| got.name_len));
            record("sendto", sys::sendto(end.0, b"x", 0, ([127, 0, 0, 1], 9).into()));
            record("connect", sys::connect_to_a_number(end.0, 1));
            end.send(b"hello");
            a.sync();
            end.recv_to_end();
            recvfrom("recvfrom at the end", end, 0);
        },
        |b| {
            let end = b.moved();
            end.send(b"hello");
            b.sync();
            b.sync();
            recvfrom("recvfrom", end, 0);
            end.close();
        },
    )
    .unix_only().packets_too(),
    pair(
        "unix/queues",
        "SIOCOUTQ is 0 when all is taken, FIONREAD counts what waits; SO_PEEK_OFF and SO_RCVLOWAT go to the kernel",
        |a| {
            let end = a.moved();
            let outq = || sys::ioctl(end.0, libc::TIOCOUTQ, -1).map(|n| n == 0);
            until("SIOCOUTQ is 0", || outq() == Ok(true));
            end.send(b"0123456789");
            record("SIOCOUTQ is 0", outq());
            a.sync();
            a.sync();
            until("SIOCOUTQ is 0", || outq() == Ok(true));
            end.send(b"0123456789");
            a.sync();
            a.sync();
            end.send(b"abc");
            a.sync();
        },
        |b| {
            let end = b.moved();
            b.sync();
            end.until_unread(10);
            end.unread();
            end.recv(4);
            end.unread();
            end.recv(10);
            end.unread();
            record("SO_PEEK_OFF", sys::setsockopt(end.0, SOL_SOCKET, libc::SO_PEEK_OFF, 2));
            b.sync();
            b.sync();
            end.until_unread(10);
            end.recv_with(3, MSG_PEEK);
            end.recv_with(3, MSG_PEEK);
            end.recv(10);
            record("SO_RCVLOWAT", sys::setsockopt(end.0, SOL_SOCKET, libc::SO_RCVLOWAT, 3));
            b.sync();
            b.sync();
            end.recv(10);
        },
    )
    .unix_only(),
    pair(
        "unix/shutdown_rd",
        "after the peer's shutdown(RD) a send fails at once, and what was sent before can be read",
        |a| {
            let end = a.moved();
            end.send(b"in time");
            a.sync();
            a.sync();
            end.mask();
            end.send_with(b"too late", MSG_NOSIGNAL);
            end.mask();
            a.sync();
            end.recv(20);
            end.close();
            a.sync();
        },
        |b| {
            let end = b.moved();
            b.sync();
            end.shutdown(SHUT_RD);
            end.mask();
            b.sync();
            b.sync();
            end.send(b"still");
            end.recv(10);
            end.recv(10);
            b.sync();
            end.mask();
        },
    )
    .unix_only().packets_too()
    .each_side(),
    pair(
        "unix/shutdown_rd_beside_send",
        "the peer's shutdown(RD) ends a send on a full connection",
        |a| {
            let end = a.moved();
            fill(end);
            a.tell(i64::from(std::process::id()));
            end.send_with(b"x", MSG_NOSIGNAL);
            a.sync();
        },
        |b| {
            let end = b.moved();
            let pid = b.hear() as i32;
            until_asleep(pid, pid);
            end.shutdown(SHUT_RD);
            b.sync();
        },
    )
    .unix_only().packets_too()
    .each_side(),
    pair(
        "unix/close_unread_while_polled",
        "a close with bytes unread: all event bits, SO_ERROR once, then the end",
        |a| {
            let end = a.moved();
            end.send(b"unread");
            a.sync();
            end.until_mask(HUP);
            end.error();
            end.mask();
            end.recv(1);
            end.send_with(b"x", MSG_NOSIGNAL);
        },
        |b| {
            let end = b.moved();
            b.sync();
            end.until_unread(6);
            end.close();
        },
    )
    .unix_only().packets_too()
    .each_side(),
    pair(
        "unix/close_unread_then_bytes",
        "bytes that came before a close with others unread are read before its error",
        |a| {
            let end = a.moved();
            end.send(b"unread");
            a.sync();
            a.sync();
            end.recv(3);
            end.mask();
            end.recv(10);
            end.recv(10);
            end.recv(10);
            end.error();
        },
        |b| {
            let end = b.moved();
            b.sync();
            end.send(b"farewell");
            end.until_unread(6);
            end.close();
            b.sync();
        },
    )
    .unix_only().packets_too()
    .each_side(),
    pair(
        "unix/close_after_half",
        "the end of the stream was seen; then the peer closes with bytes unread",
        |a| {
            let end = a.moved();
            a.sync();
            end.recv(1);
            end.mask();
            end.send(b"unread");
            a.sync();
            end.until_mask(HUP);
            end.recv(1);
            end.recv(1);
        },
        |b| {
            let end = b.moved();
            end.shutdown(SHUT_WR);
            b.sync();
            b.sync();
            end.close();
        },
    )
    .unix_only().packets_too(),
    solo(
        "unix/pair_over_fork",
        "a pair shared with a child, bytes and descriptors in both directions",
        |s| {
            let (end, child) = with_child(s, |far| {
                far.recv_exact(5);
                let sent = sys::send_with_fds(far.0, b"abc", &[file("child's")], 0);
                receive(far, 10, 0);
                send_all(far, &pattern(93, 300_000)).expect("send");
                sys::shutdown(far.0, SHUT_WR).expect("shutdown");
                far.recv_to_end();
                sent.map_or(1, |_| 0)
            });
            // In silence: what two processes say at a time comes in any order.
            send_all(end, b"hello").expect("send");
            receive(end, 10, 0);
            let sent = sys::send_with_fds(end.0, b"def", &[file("parent's")], 0);
            end.recv_to_end();
            record("sent", sent);
            send_all(end, b"goodbye").expect("send");
            sys::close(end.0).expect("close");
            join(child);
        },
    )
    .unix_only(),
    solo("unix/pair_in_one_process", "both ends in one process: the pair of an event loop", |_| {
        let (near, far) = sys::socketpair(libc::SOCK_STREAM).expect("socketpair");
        for i in 0..300u32 {
            assert_eq!(send_all(End(near), &i.to_le_bytes()), Ok(4));
            assert_eq!(recv_exact(End(far), 4), Ok(i.to_le_bytes().to_vec()));
        }
        record("on the ring", [near, far].map(sys::ringlet_path).contains(&RING));
        End(far).close();
        End(near).mask();
        End(near).recv(1);
    })
    .any_path()
    .unix_only().packets_too(),
    solo("unix/exit", "a child's exit is seen by the next send, and after all bytes", |s| {
        let (end, child) = with_child(s, |far| {
            far.send(b"last words");
            0
        });
        join(child);
        end.send_with(b"x", MSG_NOSIGNAL);
        end.mask();
        end.recv(20);
        end.recv(1);
        end.error();
    })
    .unix_only().packets_too(),
    solo("unix/exit_unread", "a child exits with bytes unread", |s| {
        let (go, gone) = sys::pipe().expect("pipe");
        let (end, child) = with_child(s, |_| {
            sys::read(go, &mut [0; 1]).expect("read");
            0
        });
        end.send(b"unread");
        sys::write(gone, b"!").expect("write");
        join(child);
        end.mask();
        end.recv(1);
        end.recv(1);
        end.send_with(b"x", MSG_NOSIGNAL);
    })
    .unix_only().packets_too(),
    solo("unix/kill", "a child is killed; what it sent is read, then the stream ends", |s| {
        let (go, gone) = sys::pipe().expect("pipe");
        let (end, child) = with_child(s, |far| {
            far.send(b"last words");
            sys::write(gone, b"!").expect("write");
            pause(100_000);
            0
        });
        sys::read(go, &mut [0; 1]).expect("read");
        sys::kill(child, SIGKILL).expect("kill");
        join(child);
        end.wait_mask(HUP);
        end.send_with(b"x", MSG_NOSIGNAL);
        end.recv(20);
        end.mask();
        end.recv(1);
    })
    .unix_only().packets_too(),
    solo("unix/close_beside_send", "the peer closes while a thread waits in a send", |s| {
        let (near, far) = s.both_ends();
        fill(near);
        let sent = beside(move || sys::send(near.0, b"x", MSG_NOSIGNAL), || far.close());
        record("send", sent);
        near.mask();
        near.recv(1);
        near.send_with(b"x", MSG_NOSIGNAL);
    })
    .unix_only().packets_too(),
];
