//! UDP. A datagram may be lost, so cases send no more than any receive buffer holds, and wait until it is there.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use libc::{MSG_DONTWAIT, MSG_PEEK, MSG_TRUNC, MSG_WAITALL, MSG_WAITFORONE, SO_RCVTIMEO};

use super::signals::interrupted;
use crate::case::*;
use crate::rare;
use crate::sys::{self, Errno, Fd};

/// Enough for a datagram to come between two steps of a look at its socket.
const ROUNDS: usize = 5_000;

/// A sender whose receiver never has read all tries the lane again after some of them.
const BACKLOG_ROUNDS: usize = 1_200;

/// One side's socket, and the other side's address as this one sees it.
#[derive(Clone, Copy)]
struct Port {
    end: End,
    other: SocketAddr,
}

impl Port {
    fn send(self, data: &[u8]) {
        record(format!("send {}", brief(data)), sys::sendto(self.end.0, data, 0, self.other));
    }

    /// What comes next, and whether it comes from the other side.
    fn receive(self, len: usize) {
        self.receive_with(len, 0);
    }

    fn receive_with(self, len: usize, flags: i32) {
        let got = sys::recv_from(self.end.0, len, flags);
        record(format!("recvfrom {len}"), got.map(|(data, from)| self.told(&data, from)));
    }

    fn told(self, data: &[u8], from: Option<SocketAddr>) -> String {
        let whose = if from == Some(self.other) { "the other side" } else { "somebody else" };
        format!("{} from {whose}", brief(data))
    }

    /// Waits until something can be received.
    fn wait(self) {
        self.end.wait_mask(IN);
    }
}

/// A socket bound to an address of the case's family.
fn bound(side: &Side, at: IpAddr) -> (Fd, u16) {
    let family = if at.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
    let fd = sys::socket(family, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC).expect("socket");
    sys::bind(fd, SocketAddr::new(at, 0)).expect("bind");
    let _ = side;
    (fd, sys::getsockname(fd).expect("getsockname").expect("an address").port())
}

fn any_of(ip: IpAddr) -> IpAddr {
    if ip.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { std::net::Ipv6Addr::UNSPECIFIED.into() }
}

/// Sockets of both sides that have exchanged so much that lanes are used, if they will be. The client is connected or not.
fn moved_as(side: &mut Side, connected: bool, wildcard: bool) -> Port {
    if side.is_client() {
        let other = {
            let port = side.hear() as u16;
            side.target(port.into())
        };
        let (fd, _) = bound(side, any_of(other.ip()));
        if connected {
            sys::connect(fd, other).expect("connect");
        }
        let port = Port { end: End(fd), other };
        warm(side, port);
        port
    } else {
        let ip = side.address();
        let (fd, number) = bound(side, if wildcard { any_of(ip) } else { ip });
        side.tell(i64::from(number));
        let port = serve_warm(fd);
        settle(side, port);
        port
    }
}

fn moved(side: &mut Side) -> Port {
    moved_as(side, false, false)
}

const TRIPS_AT_LEAST: u32 = 64;
const TRIPS_AT_MOST: u32 = 4000;

/// The client's part: round trips until both ends use lanes.
fn warm(side: &mut Side, port: Port) {
    exchange(port);
    settle(side, port);
}

fn exchange(port: Port) {
    let mut trips = 0;
    loop {
        let mine = sys::ringlet_path(port.end.0);
        sys::sendto(port.end.0, b"?", 0, port.other).expect("a request can be sent");
        let (answer, _) = sys::recv_from(port.end.0, 8, 0).expect("an answer comes");
        trips += 1;
        let theirs = i32::from(answer[0]);
        let settled = mine == RING && theirs == RING || mine == 0 || theirs == 0;
        if trips >= TRIPS_AT_MOST || trips >= TRIPS_AT_LEAST && settled {
            break;
        }
        if trips > 1000 {
            pause(1);
        }
    }
    sys::sendto(port.end.0, b"last", 0, port.other).expect("a request can be sent");
    sys::recv_from(port.end.0, 8, 0).expect("an answer comes");
}

/// The server's part, until the client says so.
fn serve_warm(fd: Fd) -> Port {
    loop {
        let (asked, from) = sys::recv_from(fd, 8, 0).expect("a request comes");
        let from = from.expect("an address");
        sys::sendto(fd, &[sys::ringlet_path(fd) as u8], 0, from).expect("an answer can be sent");
        if asked == b"last" {
            return Port { end: End(fd), other: from };
        }
    }
}

fn settle(side: &mut Side, port: Port) {
    side.sync();
    tell_path(side, port);
}

/// Sends numbered datagrams, of which each tells its number.
fn send_numbers(port: Port, numbers: std::ops::Range<u32>) {
    for number in numbers {
        sys::sendto(port.end.0, &number.to_le_bytes(), 0, port.other).expect("sent");
    }
}

/// Receives so many and records whether they are these numbers in order.
fn receive_numbers(port: Port, numbers: std::ops::Range<u32>) {
    let mut wrong = 0;
    for number in numbers.clone() {
        match sys::recv_from(port.end.0, 8, 0) {
            Ok((data, Some(from))) if data == number.to_le_bytes() && from == port.other => {}
            other => {
                wrong += 1;
                if wrong < 4 {
                    record(format!("number {number}"), other.map(|(data, _)| data));
                }
            }
        }
    }
    record(format!("numbers {numbers:?}, wrong"), wrong);
}

/// A thread or process that is to receive is in its call.
fn until_receiving(pid: i64) {
    until_asleep(pid as i32, pid as i32);
}

fn pid() -> i64 {
    i64::from(std::process::id())
}

/// Places at which a process is stopped within a call.
const STOPS: u32 = 64;

/// Waits until a process that does nothing else waits in a receive.
fn until_asleep_once(pid: i32) {
    until("asleep", || {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"));
        stat.is_ok_and(|stat| stat.contains(") S "))
    });
}

fn tell_path(side: &Side, port: Port) {
    if side.wants_ring() {
        remark(format!("path {}", sys::ringlet_path(port.end.0)));
    }
}

const SIZES: &[usize] = &[1, 8, 55, 56, 57, 64, 200, 1472, 9000, 16_384, 16_385, 65_507];

pub const CASES: &[Case] = &[
    pair(
        "datagrams/exchange",
        "datagrams of many sizes arrive whole, with the sender's address, both ways",
        |a| {
            let port = moved(a);
            for (seed, &size) in SIZES.iter().enumerate() {
                port.send(&pattern(seed as u64, size));
                port.receive(70_000);
            }
            record("too long", sys::sendto(port.end.0, &[0; 65_536], 0, port.other));
            port.send(b"end");
            port.receive(70_000);
        },
        |b| {
            let port = moved(b);
            for _ in 0..=SIZES.len() {
                let (data, from) = sys::recv_from(port.end.0, 70_000, 0).expect("comes");
                record("got", port.told(&data, from));
                record("answered", sys::sendto(port.end.0, &data, 0, port.other));
            }
        },
    )
    .all_internet_families()
    .each_side(),
    pair(
        "datagrams/connected",
        "a connected client; send, write and their relatives; getpeername",
        |a| {
            let port = moved_as(a, true, false);
            let end = port.end;
            end.send(b"send");
            end.write(b"write");
            record("writev", sys::writev(end.0, &[b"wri", b"te", b"v"]));
            record("sendmsg", sys::sendmsg(end.0, &[b"send", b"msg"], 0));
            port.send(b"sendto");
            end.recv(100);
            end.read(100);
            record("readv", sys::readv(end.0, &[3, 100]));
            record("recvmsg", sys::recvmsg(end.0, &[4, 100], 0).map(|m| m.data));
            port.receive(100);
        },
        |b| {
            let port = moved_as(b, true, false);
            for _ in 0..5 {
                port.receive(100);
            }
            for data in [&b"recv"[..], b"read", b"readv", b"recvmsg", b"recvfrom"] {
                port.send(data);
            }
        },
    )
    .all_internet_families()
    .each_side(),
    pair(
        "datagrams/wildcard",
        "a server that is bound to no address",
        |a| {
            let port = moved_as(a, false, true);
            send_numbers(port, 0..50);
            receive_numbers(port, 0..50);
        },
        |b| {
            let port = moved_as(b, false, true);
            receive_numbers(port, 0..50);
            send_numbers(port, 0..50);
        },
    )
    .all_internet_families(),
    pair(
        "datagrams/empty",
        "datagrams of no bytes are datagrams",
        |a| {
            let port = moved(a);
            for data in [&b""[..], b"x", b"", b""] {
                port.send(data);
            }
            a.sync();
        },
        |b| {
            let port = moved(b);
            b.sync();
            port.wait();
            port.end.unread();
            port.receive(10);
            port.receive(10);
            // A read of nothing takes nothing; a recv of nothing takes a datagram.
            port.end.read(0);
            port.receive(0);
            port.end.recv(10);
            port.end.mask();
            port.receive_with(10, MSG_DONTWAIT);
        },
    )
    .internet_only()
    .each_side(),
    pair(
        "datagrams/short_buffers",
        "what does not fit is lost; MSG_TRUNC tells how long it was; MSG_PEEK leaves it",
        |a| {
            let port = moved(a);
            for _ in 0..8 {
                port.send(b"0123456789");
            }
            port.send(&pattern(4, 3000));
            a.sync();
        },
        |b| {
            let port = moved(b);
            b.sync();
            port.wait();
            port.end.unread();
            let show = |message: sys::Message| {
                let flags = if message.flags & MSG_TRUNC != 0 { ", truncated" } else { "" };
                format!("{}{flags}, name {}", brief(&message.data), message.name_len)
            };
            port.receive(4);
            record("recvmsg", sys::recvmsg(port.end.0, &[2, 3], 0).map(show));
            record("recvmsg", sys::recvmsg(port.end.0, &[2, 8], 0).map(show));
            let mut buf = [0; 4];
            record("recv MSG_TRUNC", sys::recv(port.end.0, &mut buf, MSG_TRUNC));
            record("bytes", buf.to_vec());
            port.receive_with(4, MSG_PEEK);
            record("peek MSG_TRUNC", sys::recv(port.end.0, &mut buf, MSG_PEEK | MSG_TRUNC));
            port.receive_with(20, MSG_PEEK);
            port.receive_with(20, MSG_WAITALL);
            record("recv into nothing", sys::recv(port.end.0, &mut [], 0));
            for room in [4, 0] {
                let got = sys::recv_from_with_room(port.end.0, &mut buf, room);
                record(format!("room {room}"), got.map(|got| format!("{got:?}")));
            }
            port.end.unread();
            port.receive(1000);
            port.receive_with(1000, MSG_DONTWAIT);
        },
    )
    .all_internet_families(),
    pair(
        "datagrams/many_at_once",
        "sendmmsg and recvmmsg",
        |a| {
            let port = moved_as(a, true, false);
            let parts: [&[u8]; 5] = [b"one", b"", b"three", b"four", b"five"];
            record("sendmmsg", sys::sendmmsg(port.end.0, &parts, 0).map(|n| format!("{n:?}")));
            a.sync();
            a.sync();
            record("sendmmsg", sys::sendmmsg(port.end.0, &parts, 0).map(|n| format!("{n:?}")));
            a.sync();
            a.sync();
            pause(20);
            port.send(b"late");
            port.send(b"later");
            a.sync();
            record("timed", sys::sendmmsg(port.end.0, &parts[..2], 0).map(|n| format!("{n:?}")));
            a.sync();
        },
        |b| {
            let port = moved_as(b, true, false);
            let show =
                |got: Vec<Vec<u8>>| got.iter().map(|m| brief(m)).collect::<Vec<_>>().join("; ");
            b.sync();
            port.wait();
            record("3 of 5", sys::recvmmsg(port.end.0, &[10; 3], 0).map(show));
            record("the rest", sys::recvmmsg(port.end.0, &[10; 8], MSG_DONTWAIT).map(show));
            record("nothing", sys::recvmmsg(port.end.0, &[10; 8], MSG_DONTWAIT).map(show));
            b.sync();
            b.sync();
            port.wait();
            record("what is there", sys::recvmmsg(port.end.0, &[2; 8], MSG_WAITFORONE).map(show));
            b.sync();
            record("waits for two", sys::recvmmsg(port.end.0, &[10; 2], 0).map(show));
            b.sync();
            b.sync();
            port.wait();
            let got = sys::recvmmsg_within(port.end.0, &[10; 2], 0, 5000);
            record("within a time", got.map(show));
        },
    )
    .internet_only(),
    pair(
        "datagrams/nonblocking",
        "EAGAIN while nothing is there",
        |a| {
            let port = moved(a);
            a.sync();
            port.send(b"x");
            a.sync();
            a.sync();
            port.send(b"y");
            a.sync();
        },
        |b| {
            let port = moved(b);
            port.receive_with(10, MSG_DONTWAIT);
            port.end.set_nonblocking(true);
            port.receive(10);
            port.end.read(10);
            b.sync();
            b.sync();
            port.wait();
            port.receive(10);
            port.receive(10);
            port.end.set_nonblocking(false);
            b.sync();
            port.receive(10);
            port.receive_with(10, MSG_DONTWAIT);
            b.sync();
        },
    )
    .internet_only()
    .each_side(),
    pair(
        "datagrams/timeout",
        "SO_RCVTIMEO ends a receive",
        |a| {
            let port = moved(a);
            a.sync();
            port.send(b"x");
        },
        |b| {
            let port = moved(b);
            let time = Duration::from_millis(60);
            record("set", sys::set_timeout(port.end.0, SO_RCVTIMEO, time));
            let sleeps = sys::sleeps();
            port.receive(10);
            record("waited", sys::sleeps() > sleeps);
            record("set back", sys::set_timeout(port.end.0, SO_RCVTIMEO, Duration::ZERO));
            b.sync();
            port.receive(10);
        },
    )
    .internet_only(),
    pair(
        "datagrams/waiting",
        "receivers that sleep in recv, poll, select and epoll are woken",
        |a| {
            let port = moved(a);
            let pid = a.hear();
            for round in 0..12u32 {
                a.sync();
                if round % 3 != 2 {
                    until_receiving(pid);
                }
                send_numbers(port, round..round + 1);
            }
        },
        |b| {
            let port = moved(b);
            b.tell(pid());
            let set = sys::epoll_create().expect("a set");
            sys::epoll_ctl(set, libc::EPOLL_CTL_ADD, port.end.0, IN, 5).expect("added");
            for round in 0..12u32 {
                b.sync();
                match round / 3 {
                    0 => {}
                    1 => record("poll", sys::poll(&[(port.end.0, libc::POLLIN)], -1).map(|p| p.0)),
                    2 => record(
                        "select",
                        sys::select(&[port.end.0], &[], &[], None).map(|s| s.count),
                    ),
                    _ => record(
                        "epoll",
                        sys::epoll_wait(set, 4, -1).map(|events| format!("{events:?}")),
                    ),
                }
                receive_numbers(port, round..round + 1);
            }
        },
    )
    .all_internet_families()
    .each_side(),
    pair(
        "datagrams/readiness",
        "what poll and select tell",
        |a| {
            let port = moved(a);
            a.sync();
            port.send(b"one");
            port.send(b"two");
            a.sync();
        },
        |b| {
            let port = moved(b);
            let end = port.end;
            end.mask();
            let select = |what: &str| {
                let got = sys::select(&[end.0], &[end.0], &[end.0], Some(Duration::ZERO));
                record(what, got.map(|s| format!("{:?} {:?} {:?}", s.read, s.write, s.except)));
            };
            select("select");
            b.sync();
            b.sync();
            end.until_mask(IN);
            select("select");
            record("poll for nothing", sys::poll(&[(end.0, 0)], 0).map(|p| p.0));
            port.receive(10);
            end.until_mask(IN);
            port.receive(10);
            end.mask();
            record("poll", sys::poll(&[(end.0, libc::POLLIN)], 20).map(|p| p.0));
        },
    )
    .internet_only()
    .each_side(),
    pair(
        "datagrams/epoll_level",
        "a set reports a socket as long as something is there",
        |a| {
            let port = moved(a);
            a.sync();
            send_numbers(port, 0..3);
            a.sync();
        },
        |b| {
            let port = moved(b);
            let set = sys::epoll_create().expect("a set");
            let add = sys::epoll_ctl(set, libc::EPOLL_CTL_ADD, port.end.0, IN | OUT, 7);
            record("add", add);
            record("add again", sys::epoll_ctl(set, libc::EPOLL_CTL_ADD, port.end.0, IN, 7));
            let wait = || record("wait", sys::epoll_wait(set, 4, 0).map(|e| format!("{e:?}")));
            wait();
            record("mod", sys::epoll_ctl(set, libc::EPOLL_CTL_MOD, port.end.0, IN, 8));
            wait();
            b.sync();
            b.sync();
            port.wait();
            for number in 0..3 {
                record("wait", sys::epoll_wait(set, 4, PATIENCE_MS).map(|e| format!("{e:?}")));
                receive_numbers(port, number..number + 1);
            }
            wait();
            record("del", sys::epoll_ctl(set, libc::EPOLL_CTL_DEL, port.end.0, 0, 0));
            wait();
        },
    )
    .internet_only()
    .each_side(),
    pair(
        "datagrams/epoll_level_by_kernel",
        "the same of what comes by the kernel, whatever becomes of the registration meanwhile",
        |a| {
            let port = moved(a);
            for _ in 0..2 {
                a.sync();
                for number in 0..3u32 {
                    let number = number.to_le_bytes();
                    let sent = sys::sendto(port.end.0, &number, libc::MSG_DONTROUTE, port.other);
                    sent.expect("sent");
                }
                a.sync();
            }
        },
        |b| {
            let port = moved(b);
            let set = sys::epoll_create().expect("a set");
            let control = |op, events| {
                record("control", sys::epoll_ctl(set, op, port.end.0, events, 7));
            };
            let wait = |most, ms| {
                record("wait", sys::epoll_wait(set, most, ms).map(|e| format!("{e:?}")));
            };
            control(libc::EPOLL_CTL_ADD, IN);
            b.sync();
            b.sync();
            // Again and again, also where nothing else is asked, nothing is received, and there is room for one event.
            for most in [4, 4, 1, 1] {
                wait(most, PATIENCE_MS);
            }
            wait(1, 0);
            receive_numbers(port, 0..1);
            for events in [OUT, 0, IN | libc::EPOLLET as u32, IN, IN | libc::EPOLLONESHOT as u32, IN]
            {
                control(libc::EPOLL_CTL_MOD, events);
                wait(4, 0);
                wait(4, 0);
            }
            control(libc::EPOLL_CTL_DEL, 0);
            wait(4, 20);
            control(libc::EPOLL_CTL_ADD, IN);
            wait(4, PATIENCE_MS);
            // Another one that is ready is told, too, where there is room for one.
            let ready = sys::eventfd(1).expect("an eventfd");
            sys::epoll_ctl(set, libc::EPOLL_CTL_ADD, ready, IN, 8).expect("added");
            let both = [(); 2].map(|()| sys::epoll_wait(set, 1, 0).expect("told"));
            record("both", both[0] != both[1] && both.iter().all(|told| told.len() == 1));
            sys::epoll_ctl(set, libc::EPOLL_CTL_DEL, ready, 0, 0).expect("taken out");
            receive_numbers(port, 1..3);
            wait(4, 0);
            // By another number, which is closed.
            let other = sys::dup(port.end.0).expect("a number");
            sys::epoll_ctl(set, libc::EPOLL_CTL_ADD, other, IN, 9).expect("added");
            control(libc::EPOLL_CTL_DEL, 0);
            sys::close(other).expect("closed");
            b.sync();
            b.sync();
            for number in 0..3 {
                wait(4, PATIENCE_MS);
                wait(4, PATIENCE_MS);
                receive_numbers(port, number..number + 1);
            }
            wait(4, 0);
        },
    )
    .internet_only()
    .each_side(),
    pair(
        "datagrams/epoll_edge",
        "an edge-triggered set reports what came since",
        |a| {
            let port = moved(a);
            for number in 0..4 {
                a.sync();
                send_numbers(port, number..number + 1);
                a.sync();
            }
        },
        |b| {
            let port = moved(b);
            let set = sys::epoll_create().expect("a set");
            let events = IN | libc::EPOLLET as u32;
            sys::epoll_ctl(set, libc::EPOLL_CTL_ADD, port.end.0, events, 9).expect("added");
            let wait = |ms| record("wait", sys::epoll_wait(set, 4, ms).map(|e| format!("{e:?}")));
            wait(0);
            for number in 0..4 {
                b.sync();
                b.sync();
                port.wait();
                wait(2000);
                wait(0);
                if number == 1 {
                    receive_numbers(port, 0..2);
                }
            }
            receive_numbers(port, 2..4);
            wait(0);
        },
    )
    .internet_only()
    .each_side(),
    pair(
        "datagrams/edge_beside_a_wait",
        "an edge that comes just as it is asked for anew is told once",
        |a| {
            let port = moved(a);
            for _ in 0..ROUNDS {
                sys::recv_from(port.end.0, 8, 0).expect("received");
                sys::sendto(port.end.0, b"x", 0, port.other).expect("sent");
            }
            a.sync();
        },
        |b| {
            let port = moved(b);
            let set = sys::epoll_create().expect("a set");
            let events = IN | libc::EPOLLET as u32;
            sys::epoll_ctl(set, libc::EPOLL_CTL_ADD, port.end.0, events, 9).expect("added");
            let mut told = [0; 2];
            for _ in 0..ROUNDS {
                sys::sendto(port.end.0, b"x", 0, port.other).expect("sent");
                sys::epoll_ctl(set, libc::EPOLL_CTL_MOD, port.end.0, events, 9).expect("asked");
                for (told, ms) in told.iter_mut().zip([PATIENCE_MS, 0]) {
                    *told += sys::epoll_wait(set, 4, ms).expect("a wait").len();
                }
                sys::recv_from(port.end.0, 8, 0).expect("received");
            }
            // (As on a connection: `readiness/edge_beside_a_wait`.)
            let by_lane = sys::ringlet_path(port.end.0) == RING;
            record("told", sys::R::Ok(told[0]));
            record("told twice by a lane", sys::R::Ok(if by_lane { told[1] } else { 0 }));
            b.sync();
        },
    )
    // (Of what comes by the kernel there is no count: the kernel's edge may come behind a look that has found it.)
    .steady()
    .internet_only(),
    pair(
        "datagrams/epoll_oneshot",
        "a one-shot registration reports once until it is armed again",
        |a| {
            let port = moved(a);
            for number in 0..3 {
                a.sync();
                send_numbers(port, number..number + 1);
                a.sync();
            }
        },
        |b| {
            let port = moved(b);
            let set = sys::epoll_create().expect("a set");
            let events = IN | libc::EPOLLONESHOT as u32;
            sys::epoll_ctl(set, libc::EPOLL_CTL_ADD, port.end.0, events, 9).expect("added");
            let wait = |ms| record("wait", sys::epoll_wait(set, 4, ms).map(|e| format!("{e:?}")));
            for _ in 0..3 {
                b.sync();
                b.sync();
                port.wait();
                wait(2000);
                wait(0);
                record("arm", sys::epoll_ctl(set, libc::EPOLL_CTL_MOD, port.end.0, events, 9));
            }
            wait(2000);
            receive_numbers(port, 0..3);
            record("arm", sys::epoll_ctl(set, libc::EPOLL_CTL_MOD, port.end.0, events, 9));
            wait(0);
        },
    )
    .internet_only(),
    pair(
        "datagrams/many_clients",
        "one socket serves many, and answers each",
        |a| {
            let port = moved(a);
            let ip = port.other.ip();
            let ends: Vec<End> = (0..40).map(|_| End(bound(a, any_of(ip)).0)).collect();
            let mut wrong = 0;
            for round in 0..30u8 {
                for (number, end) in ends.iter().enumerate() {
                    let data = [round, number as u8];
                    sys::sendto(end.0, &data, 0, port.other).expect("sent");
                    let got = sys::recv_from(end.0, 8, 0).expect("answered");
                    wrong += i32::from(got != (data.to_vec(), Some(port.other)));
                }
            }
            record("wrong answers", wrong);
            port.send(b"end");
        },
        |b| {
            let port = moved(b);
            let mut served = 0;
            loop {
                let (data, from) = sys::recv_from(port.end.0, 8, 0).expect("comes");
                if data == b"end" {
                    break;
                }
                sys::sendto(port.end.0, &data, 0, from.expect("an address")).expect("sent");
                served += 1;
            }
            record("served", served);
        },
    )
    .all_internet_families(),
    pair(
        "datagrams/behind_a_backlog",
        "what only the kernel can carry is not lost because its receiver, who never has read all, is late by a moment",
        |a| {
            let port = moved(a);
            for number in 0..BACKLOG_ROUNDS as u32 {
                send_numbers(port, 2 * number..2 * number + 1);
                a.tell(0);
                let next = (2 * number + 1).to_le_bytes();
                sys::sendto(port.end.0, &next, libc::MSG_DONTROUTE, port.other).expect("sent");
                a.hear();
            }
        },
        |b| {
            let port = moved(b);
            let (mut lost, mut wrong) = (0, 0);
            let mut next = 0;
            for number in 0..BACKLOG_ROUNDS as u32 {
                b.hear();
                // (Not as late as one that has stopped; but longer than the next one's send looks.)
                pause(1);
                // The last one of the round before is the first of this one; that of this one stays there.
                while next <= 2 * number {
                    match sys::recv_from(port.end.0, 8, MSG_DONTWAIT) {
                        Ok((data, _)) => {
                            let got = u32::from_le_bytes(data.try_into().expect("a number"));
                            lost += usize::from(got == next + 1);
                            wrong += i32::from(!(next..next + 2).contains(&got));
                            next = got + 1;
                        }
                        Err(Errno(libc::EAGAIN)) => std::thread::yield_now(),
                        Err(error) => panic!("{error}"),
                    }
                }
                b.tell(0);
            }
            record("out of order", wrong);
            // (One that is kept from running is late by more than a moment.)
            record("lost", if lost > BACKLOG_ROUNDS / 240 { lost } else { 0 });
        },
    )
    .internet_only(),
    pair(
        "datagrams/order",
        "a sender's datagrams keep their order, whether the receiver sleeps, polls or is busy",
        |a| {
            let port = moved(a);
            for burst in 0..300 {
                send_numbers(port, burst * 20..burst * 20 + 20);
                let (data, _) = sys::recv_from(port.end.0, 8, 0).expect("comes");
                assert_eq!(data, b"go on");
            }
        },
        |b| {
            let port = moved(b);
            let mut numbers = Sequence::new(3);
            let mut wrong = 0;
            for number in 0..6000u32 {
                match numbers.below(40) {
                    0 => pause(1),
                    1..4 => drop(sys::poll(&[(port.end.0, libc::POLLIN)], -1)),
                    4 => drop(sys::recv_from(port.end.0, 8, MSG_PEEK)),
                    _ => {}
                }
                let (data, _) = sys::recv_from(port.end.0, 8, 0).expect("comes");
                wrong += i32::from(data != number.to_le_bytes());
                if number % 20 == 19 {
                    sys::sendto(port.end.0, b"go on", 0, port.other).expect("sent");
                }
            }
            record("wrong", wrong);
        },
    )
    .internet_only()
    .each_side(),
    pair(
        "datagrams/stopped_sender",
        "what a sender sends that is stopped within it, while its receiver falls asleep, arrives once and in its place",
        |a| {
            let other = {
                let port = a.hear() as u16;
                a.target(port.into())
            };
            let server = a.hear() as i32;
            let child = sys::fork(|| {
                sys::be_traced();
                let port = Port { end: End(bound(a, any_of(other.ip())).0), other };
                for round in 0..STOPS {
                    exchange(port);
                    if round == 0 {
                        tell_path(a, port);
                    }
                    sys::stop();
                    send_numbers(port, 3 * round..3 * round + 1);
                    sys::stop();
                    send_numbers(port, 3 * round + 1..3 * round + 3);
                    sys::recv_from(port.end.0, 8, 0).expect("an answer comes");
                }
                0
            });
            for round in 0..STOPS {
                sys::go_on(child);
                a.sync();
                let at = sys::step(child, round as usize);
                a.tell(0);
                until_asleep_once(server);
                if at != sys::Traced::AtStop {
                    sys::go_on(child);
                }
            }
            sys::go_on(child);
        },
        |b| {
            let (fd, number) = bound(b, b.address());
            b.tell(i64::from(number));
            b.tell(pid());
            let mut wrong = 0;
            for round in 0..STOPS {
                let port = serve_warm(fd);
                if round == 0 {
                    tell_path(b, port);
                }
                b.sync();
                let mut got = Vec::new();
                while !b.is_told() {
                    got.extend(sys::recv_from(fd, 8, MSG_DONTWAIT).map(|got| got.0));
                }
                b.hear();
                while got.len() < 3 {
                    got.extend(sys::recv_from(fd, 8, 0).map(|got| got.0));
                }
                let sent: Vec<_> =
                    (3 * round..3 * round + 3).map(|n| n.to_le_bytes().to_vec()).collect();
                if got != sent {
                    remark(format!("round {round}: {got:?}"));
                    wrong += 1;
                }
                port.send(b"got");
            }
            record("wrong", wrong);
        },
    )
    .internet_only(),
    pair(
        "datagrams/stopped_receiver",
        "what comes while a receiver is stopped within its call, wherever that is, is received once and in order",
        |a| {
            let other = {
                let port = a.hear() as u16;
                a.target(port.into())
            };
            let child = sys::fork(|| {
                sys::be_traced();
                let port = Port { end: End(bound(a, any_of(other.ip())).0), other };
                let mut wrong = 0;
                for round in 0..STOPS {
                    exchange(port);
                    if round == 0 {
                        tell_path(a, port);
                    }
                    sys::stop();
                    let got: Vec<_> = (0..5)
                        .map(|_| sys::recv_from(port.end.0, 8, 0).expect("comes").0)
                        .collect();
                    let sent = (5 * round..5 * round + 5).map(|n| n.to_le_bytes().to_vec());
                    let sent = sent.collect::<Vec<_>>();
                    if got != sent {
                        remark(format!("round {round}: {got:?}"));
                        wrong += 1;
                    }
                }
                record("wrong", wrong);
                0
            });
            for round in 0..STOPS {
                sys::go_on(child);
                a.sync();
                sys::step(child, round as usize / 2);
                a.tell(0);
                a.hear();
            }
            sys::go_on(child);
        },
        |b| {
            let (fd, number) = bound(b, b.address());
            b.tell(i64::from(number));
            for round in 0..STOPS {
                let port = serve_warm(fd);
                if round == 0 {
                    tell_path(b, port);
                }
                // Something is there already, or not.
                let before = round % 2;
                send_numbers(port, 5 * round..5 * round + before);
                b.sync();
                b.hear();
                send_numbers(port, 5 * round + before..5 * round + 4);
                b.tell(0);
                send_numbers(port, 5 * round + 4..5 * round + 5);
            }
        },
    )
    .internet_only(),
    pair(
        "datagrams/shown",
        "what was looked at, or whose length was asked for, is what is received next",
        |a| {
            let port = moved(a);
            // One that the kernel brings, for a while at least.
            let stranger = bound(a, any_of(port.other.ip())).0;
            let mut numbers = Sequence::new(5);
            for _ in 0..100 {
                for number in 0..6 {
                    let from = if numbers.below(3) == 0 { stranger } else { port.end.0 };
                    sys::sendto(from, &[number; 40][..number as usize + 1], 0, port.other)
                        .expect("sent");
                    if numbers.below(3) == 0 {
                        pause(1);
                    }
                }
                let (data, _) = sys::recv_from(port.end.0, 8, 0).expect("comes");
                assert_eq!(data, b"go on");
            }
        },
        |b| {
            let port = moved(b);
            let end = port.end.0;
            let mut numbers = Sequence::new(7);
            let mut wrong = 0;
            for number in 0..600u32 {
                let shown = (numbers.below(2) == 0)
                    .then(|| sys::recv_from(end, 64, MSG_PEEK).expect("comes"));
                drop(sys::poll(&[(end, libc::POLLIN)], -1));
                let len = sys::ioctl(end, libc::FIONREAD, -1).expect("a length");
                let got = sys::recv_from(end, 64, 0).expect("comes");
                let same = shown.is_none_or(|shown| shown == got);
                wrong += i32::from(!same || got.0.len() != len as usize);
                if number % 6 == 5 {
                    sys::sendto(end, b"go on", 0, port.other).expect("sent");
                }
            }
            record("wrong", wrong);
        },
    )
    .internet_only()
    .each_side(),
    pair(
        "datagrams/by_length",
        "a loop that waits until a length is told gets every datagram, though it has often found none",
        |a| {
            let port = moved(a);
            for number in 0..300usize {
                sys::sendto(port.end.0, &vec![7; 1 + number], 0, port.other).expect("sent");
                sys::recv_from(port.end.0, 8, 0).expect("comes");
            }
        },
        |b| {
            let port = moved(b);
            let mut wrong = 0;
            for number in 0..300usize {
                let len = || sys::ioctl(port.end.0, libc::FIONREAD, -1).expect("a length");
                until("a length", || len() != 0);
                let told = len() as usize;
                let (data, _) = sys::recv_from(port.end.0, 2000, 0).expect("comes");
                wrong += i32::from(told != number + 1 || data.len() != told);
                sys::sendto(port.end.0, b"x", 0, port.other).expect("sent");
            }
            record("wrong", wrong);
        },
    )
    .internet_only()
    .each_side(),
    pair(
        "datagrams/overflow",
        "a sender is never held up; what comes first is kept, in order",
        |a| {
            let port = moved(a);
            // Nobody receives meanwhile.
            send_numbers(port, 0..30_000);
            a.sync();
            a.sync();
            port.send(b"end");
            a.sync();
        },
        |b| {
            let port = moved(b);
            b.sync();
            let mut next = 0u32;
            let mut in_order = true;
            while let Ok((data, _)) = sys::recv_from(port.end.0, 8, MSG_DONTWAIT) {
                in_order &= data == next.to_le_bytes();
                next += 1;
            }
            record("in order", in_order);
            record("many, not all", (100..30_000).contains(&next));
            b.sync();
            port.receive(10);
            b.sync();
        },
    )
    .internet_only(),
    pair(
        "datagrams/only_from_its_peer",
        "a connected socket receives from its peer only; connected anew, and dissolved",
        |a| {
            let port = moved(a);
            let stranger = End(bound(a, any_of(port.other.ip())).0);
            a.tell(i64::from(sys::getsockname(stranger.0).unwrap().unwrap().port()));
            a.sync();
            let from_both = |word: &str| {
                for (end, who) in [(stranger, "stranger"), (port.end, "client")] {
                    let data = format!("{word} {who}");
                    let _ = sys::sendto(end.0, data.as_bytes(), 0, port.other);
                }
            };
            for word in ["connected to the client", "to the stranger", "to nobody"] {
                // A port that refuses is told once, to the next call.
                let _ = (so_error(stranger), so_error(port.end));
                for _ in 0..40 {
                    from_both(word);
                }
                a.sync();
                a.sync();
            }
        },
        |b| {
            let port = moved(b);
            let stranger = SocketAddr::new(port.other.ip(), b.hear() as u16);
            let end = port.end;
            record("connect", sys::connect(end.0, port.other));
            b.sync();
            let mut count = 0;
            let mut take = || {
                let mut words: Vec<(String, u32)> = Vec::new();
                while let Ok((data, _)) = sys::recv_from(end.0, 100, MSG_DONTWAIT) {
                    count += 1;
                    let word = String::from_utf8(data).expect("text");
                    match words.iter_mut().find(|known| known.0 == word) {
                        Some(known) => known.1 += 1,
                        None => words.push((word, 1)),
                    }
                }
                words.sort();
                record("got", format!("{words:?}"));
            };
            b.sync();
            take();
            record("connect to the stranger", sys::connect(end.0, stranger));
            b.sync();
            b.sync();
            take();
            record("dissolve", sys::disconnect(end.0));
            // KERNEL: the address that connect had chosen goes with the connection.
            b.sync();
            b.sync();
            take();
            b.sync();
        },
    )
    .internet_only(),
    pair(
        "datagrams/refused",
        "a connected sender is told that its receiver has gone",
        |a| {
            let port = moved_as(a, true, false);
            a.sync();
            a.sync();
            port.end.send(b"into the void");
            port.end.until_mask(ERR);
            port.end.send(b"told");
            port.end.send(b"into the void");
            port.end.wait_mask(ERR);
            port.end.error();
            port.end.error();
            port.end.send(b"into the void");
            port.end.wait_mask(ERR);
            port.end.recv(10);
            port.end.recv_with(10, MSG_DONTWAIT);
        },
        |b| {
            let port = moved_as(b, true, false);
            b.sync();
            port.end.close();
            b.sync();
        },
    )
    .all_internet_families()
    .each_side(),
    pair(
        "datagrams/killed_receiver",
        "a receiver that is killed has gone",
        |a| {
            let port = moved_as(a, true, false);
            // The server's child is killed now, and reaped.
            a.sync();
            until("a refusal", || {
                let sent = sys::send(port.end.0, b"into the void", 0);
                pause(5);
                sent == Err(Errno(libc::ECONNREFUSED))
            });
            port.end.recv_with(10, MSG_DONTWAIT);
        },
        |b| {
            let child = sys::fork(|| {
                moved_as(b, true, false);
                sys::kill(std::process::id() as i32, libc::SIGKILL).expect("killed");
                0
            });
            record("child", sys::wait_for(child));
            // The child took the steps of `moved_as` with its copy of the side.
            b.step();
            b.sync();
        },
    )
    .internet_only(),
    pair(
        "datagrams/sender_gone",
        "what a sender had sent is received after it has closed",
        |a| {
            let port = moved(a);
            send_numbers(port, 0..10);
            port.end.close();
            a.sync();
        },
        |b| {
            let port = moved(b);
            b.sync();
            receive_numbers(port, 0..10);
            port.receive_with(10, MSG_DONTWAIT);
        },
    )
    .internet_only()
    .each_side(),
    pair(
        "datagrams/fork",
        "a child by fork receives what came before, and both receive and send",
        |a| {
            let port = moved(a);
            send_numbers(port, 0..4);
            a.sync();
            a.sync();
            send_numbers(port, 4..8);
            a.sync();
            port.receive(100);
            port.receive(100);
            for number in 8..40 {
                send_numbers(port, number..number + 1);
                port.receive(100);
            }
        },
        |b| {
            let port = moved(b);
            b.sync();
            port.wait();
            receive_numbers(port, 0..2);
            let child = sys::fork(|| {
                receive_numbers(port, 2..4);
                0
            });
            record("child", sys::wait_for(child));
            b.sync();
            b.sync();
            let child = sys::fork(|| {
                receive_numbers(port, 4..6);
                port.send(b"from the child");
                0
            });
            record("child", sys::wait_for(child));
            receive_numbers(port, 6..8);
            port.send(b"from the parent");
            for number in 8..40 {
                receive_numbers(port, number..number + 1);
                port.send(b"answer");
            }
        },
    )
    .internet_only()
    .each_side(),
    pair(
        "datagrams/dup",
        "every name of a socket serves, until the last is closed",
        |a| {
            let port = moved_as(a, true, false);
            let other = End(sys::dup(port.end.0).expect("dup"));
            port.end.send(b"by the first");
            other.send(b"by the second");
            port.end.close();
            other.send(b"by the second alone");
            other.recv(100);
            other.close();
        },
        |b| {
            let port = moved_as(b, true, false);
            let other = Port { end: End(sys::dup(port.end.0).expect("dup")), ..port };
            port.receive(100);
            other.receive(100);
            port.end.close();
            other.receive(100);
            other.send(b"answer");
        },
    )
    .internet_only(),
    pair(
        "datagrams/passed",
        "a socket that is passed to another process goes on there",
        |a| {
            let port = moved(a);
            a.sync();
            send_numbers(port, 0..10);
            port.receive(100);
            send_numbers(port, 10..20);
            port.receive(100);
        },
        |b| {
            let port = moved(b);
            let (near, far) = sys::socketpair(libc::SOCK_STREAM).expect("socketpair");
            let child = sys::fork(|| {
                let end = End(sys::receive_fd(far).expect("a descriptor"));
                let port = Port { end, ..port };
                receive_numbers(port, 0..10);
                port.send(b"from the child");
                0
            });
            record("passed", sys::pass_fd(near, port.end.0));
            b.sync();
            record("child", sys::wait_for(child));
            receive_numbers(port, 10..20);
            port.send(b"from the parent");
        },
    )
    .internet_only(),
    pair(
        "datagrams/options",
        "options that only the kernel serves bring back what they ask for",
        |a| {
            let port = moved(a);
            for number in 0..4 {
                a.sync();
                send_numbers(port, number..number + 1);
                a.sync();
            }
        },
        |b| {
            let port = moved(b);
            let show = |message: sys::Message| {
                format!("{}, control {}", brief(&message.data), message.control_len)
            };
            for option in [libc::SO_RCVBUF, libc::SO_TIMESTAMP, libc::SO_RXQ_OVFL, 0] {
                if option != 0 {
                    let value = if option == libc::SO_RCVBUF { 300_000 } else { 1 };
                    let set = sys::setsockopt(port.end.0, libc::SOL_SOCKET, option, value);
                    record(format!("option {option}"), set);
                }
                b.sync();
                b.sync();
                record("recvmsg", sys::recvmsg(port.end.0, &[10], 0).map(show));
            }
        },
    )
    .internet_only(),
    pair(
        "datagrams/peek_offset",
        "SO_PEEK_OFF",
        |a| {
            let port = moved(a);
            port.send(b"before");
            a.sync();
            a.sync();
            port.send(b"0123456789");
            a.sync();
        },
        |b| {
            let port = moved(b);
            b.sync();
            let set = sys::setsockopt(port.end.0, libc::SOL_SOCKET, libc::SO_PEEK_OFF, 0);
            record("set", set);
            port.receive(100);
            b.sync();
            b.sync();
            port.receive_with(4, MSG_PEEK);
            port.receive_with(4, MSG_PEEK);
            port.receive(100);
        },
    )
    .internet_only(),
    pair(
        "datagrams/bpf_program",
        "SO_ATTACH_BPF of a program whose descriptor is 0, which lets nothing through",
        |a| {
            let port = moved(a);
            port.send(b"before");
            a.sync();
            a.sync();
            port.send(b"filtered");
            a.sync();
            a.sync();
            port.send(b"after");
            a.sync();
        },
        |b| {
            let port = moved(b);
            b.sync();
            let set = rare::filter_of_all().and_then(|program| {
                let place = sys::dup2(program, 0)?;
                sys::close(program)?;
                sys::setsockopt(port.end.0, libc::SOL_SOCKET, libc::SO_ATTACH_BPF, place)
            });
            record("set", set);
            port.receive(100);
            b.sync();
            b.sync();
            port.receive_with(100, MSG_DONTWAIT);
            let detached = sys::setsockopt(port.end.0, libc::SOL_SOCKET, libc::SO_DETACH_BPF, 0);
            record("detached", detached);
            b.sync();
            b.sync();
            port.receive(100);
        },
    )
    .internet_only(),
    pair(
        "datagrams/shutdown",
        "each direction of a connected socket can be shut",
        |a| {
            let port = moved_as(a, true, false);
            a.sync();
            port.end.shutdown(libc::SHUT_WR);
            port.end.send_with(b"x", libc::MSG_NOSIGNAL);
            a.sync();
            port.receive(100);
            port.end.shutdown(libc::SHUT_RD);
            port.end.recv(10);
            port.end.mask();
        },
        |b| {
            let port = moved_as(b, true, false);
            b.sync();
            b.sync();
            port.send(b"still heard");
        },
    )
    .internet_only(),
    pair(
        "datagrams/corked",
        "MSG_MORE makes one datagram of several sends",
        |a| {
            let port = moved_as(a, true, false);
            port.end.send_with(b"one ", libc::MSG_MORE);
            port.end.send(b"datagram");
            port.end.send(b"another");
            a.sync();
        },
        |b| {
            let port = moved_as(b, true, false);
            b.sync();
            port.receive(100);
            port.receive(100);
        },
    )
    .internet_only(),
    pair(
        "datagrams/threads",
        "several threads receive from one socket; each datagram goes to one of them",
        |a| {
            let port = moved(a);
            for number in 0..2000u32 {
                send_numbers(port, number..number + 1);
                if number % 50 == 49 {
                    a.sync();
                }
            }
        },
        |b| {
            let port = moved(b);
            let sum = std::sync::atomic::AtomicU64::new(0);
            let count = std::sync::atomic::AtomicU64::new(0);
            let order = std::sync::atomic::Ordering::SeqCst;
            std::thread::scope(|scope| {
                for _ in 0..3 {
                    scope.spawn(|| {
                        while let Ok((data, _)) = sys::recv_from(port.end.0, 8, 0) {
                            let Ok(bytes) = data.try_into() else { break };
                            sum.fetch_add(u64::from(u32::from_le_bytes(bytes)), order);
                            count.fetch_add(1, order);
                        }
                    });
                }
                for round in 1..=40 {
                    until("fifty", || count.load(order) >= round * 50);
                    b.sync();
                }
                for _ in 0..3 {
                    let me = sys::getsockname(port.end.0).unwrap().unwrap();
                    let (fd, _) = bound(b, any_of(me.ip()));
                    let target = SocketAddr::new(b.address(), me.port());
                    let end = if me.ip().is_unspecified() { target } else { me };
                    sys::sendto(fd, b"", 0, end).expect("sent");
                    sys::close(fd).expect("close");
                }
            });
            record("received", count.load(order));
            record("sum", sum.load(order));
        },
    )
    .internet_only(),
    pair(
        "datagrams/cancelled",
        "a thread that waits in a receive can be cancelled, and nobody misses anything",
        |a| {
            let port = moved(a);
            a.sync();
            send_numbers(port, 0..20);
        },
        |b| {
            let port = moved(b);
            let me = std::process::id() as i32;
            record(
                "cancelled",
                sys::cancel_in(port.end.0, sys::Waits::Recv, |tid| until_asleep(me, tid)),
            );
            b.sync();
            receive_numbers(port, 0..20);
        },
    )
    .internet_only(),
    pair(
        "datagrams/signals",
        "a handler without SA_RESTART ends a receive",
        |a| {
            let port = moved(a);
            a.sync();
            send_numbers(port, 0..1);
        },
        |b| {
            let port = moved(b);
            sys::on_signal(libc::SIGUSR1, sys::Handler::Count, 0);
            for _ in 0..3 {
                let got = interrupted(|| sys::recv_from(port.end.0, 10, 0));
                record("recvfrom", got.map(|got| got.0));
                record(
                    "poll",
                    interrupted(|| sys::poll(&[(port.end.0, libc::POLLIN)], -1)).map(|p| p.0),
                );
            }
            b.sync();
            receive_numbers(port, 0..1);
        },
    )
    .internet_only(),
    solo("datagrams/one_process", "both ends in one process", |side| {
        let ip = side.address();
        let (far, number) = bound(side, ip);
        let target = SocketAddr::new(ip, number);
        let (near, _) = bound(side, ip);
        let me = sys::getsockname(near).unwrap().unwrap();
        let mut wrong = 0;
        for number in 0..500u32 {
            let data = number.to_le_bytes();
            sys::sendto(near, &data, 0, target).expect("sent");
            let got = sys::recv_from(far, 8, 0).expect("comes");
            wrong += i32::from(got != (data.to_vec(), Some(me)));
            sys::sendto(far, &data, 0, me).expect("sent");
            let got = sys::recv_from(near, 8, 0).expect("comes");
            wrong += i32::from(got != (data.to_vec(), Some(target)));
        }
        record("wrong", wrong);
        remark(format!("path {}", sys::ringlet_path(near)));
        remark(format!("path {}", sys::ringlet_path(far)));
        record("to itself", sys::sendto(near, b"me", 0, me));
        record(
            "from itself",
            sys::recv_from(near, 8, 0)
                .map(|(data, from)| format!("{} {}", brief(&data), from == Some(me))),
        );
    })
    .internet_only(),
    solo(
        "datagrams/stolen",
        "a socket that connects at a shared address takes what its peer sends from now on",
        |side| {
            let ip = side.address();
            let reusable = || {
                let family = if ip.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
                let fd = sys::socket(family, libc::SOCK_DGRAM).expect("socket");
                sys::setsockopt(fd, libc::SOL_SOCKET, libc::SO_REUSEADDR, 1).expect("reuse");
                fd
            };
            let server = reusable();
            sys::bind(server, SocketAddr::new(ip, 0)).expect("bind");
            let address = sys::getsockname(server).unwrap().unwrap();
            let (client, _) = bound(side, ip);
            let me = sys::getsockname(client).unwrap().unwrap();
            for number in 0..300u32 {
                sys::sendto(client, &number.to_le_bytes(), 0, address).expect("sent");
                sys::recv_from(server, 8, 0).expect("comes");
                sys::sendto(server, b"ok", 0, me).expect("sent");
                sys::recv_from(client, 8, 0).expect("comes");
            }
            remark(format!("path {}", sys::ringlet_path(client)));
            remark(format!("path {}", sys::ringlet_path(server)));
            let thief = reusable();
            record("bind", sys::bind(thief, address));
            record("connect", sys::connect(thief, me));
            // The kernel is asked now and then whether it would still bring datagrams to the same socket.
            pause(50);
            record("send", sys::sendto(client, b"whose?", 0, address));
            record("at the server", sys::recv_from(server, 8, MSG_DONTWAIT).map(|got| got.0));
            record("at the thief", sys::recv_from(thief, 8, 0).map(|got| got.0));
        },
    )
    .internet_only(),
];
