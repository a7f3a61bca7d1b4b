//! A stream that lies on both sides of a change of path, or is back on the kernel: the program sees one stream.

use libc::{MSG_OOB, MSG_PEEK, MSG_WAITALL, MSG_ZEROCOPY};

use super::readiness::{ET, Set};
use crate::case::*;
use crate::sys;

/// Sets the option whose meaning lies in the kernel's queues, to what it is anyway.
fn back_to_the_kernel(end: End) {
    record("SO_RCVLOWAT", sys::setsockopt(end.0, libc::SOL_SOCKET, libc::SO_RCVLOWAT, 1));
}

/// Each has urgent data at another of its first twelve trips, in which connections move.
const URGENT_CONNECTIONS: u32 = 96;
const URGENT_TRIPS: u32 = 20;

pub const CASES: &[Case] = &[
    pair(
        "paths/unread_on_both",
        "a count, a look and a receive find what waits in the ring and behind it in the kernel",
        |a| {
            let end = a.moved();
            end.send(b"the ring, ");
            // A flag that the ring does not know.
            end.send_with(b"the kernel", MSG_ZEROCOPY);
            a.sync();
        },
        |b| {
            let end = b.moved();
            b.sync();
            end.until_unread(20);
            end.unread();
            end.recv_with(50, MSG_PEEK);
            end.recv_with(50, MSG_PEEK);
            end.unread();
            end.recv(50);
        },
    )
    .packets_too()
    .each_side(),
    pair(
        "paths/unread_while_it_moves",
        "a receive takes what a count has found, before the change of path and behind it",
        |a| {
            let end = a.fresh();
            for _ in 0..60 {
                send_all(end, b"ten bytes.").expect("send");
                recv_exact(end, 1).expect("recv");
            }
            end.close();
        },
        |b| {
            let end = b.fresh();
            let mut left = 0;
            for round in 0..60 {
                end.until_unread(left + 10);
                // Something is left each time, where the path changes too.
                let got = recv(end, left + 5, 0).expect("recv");
                if got.len() != left + 5 {
                    record(format!("received in round {round}, of {}", left + 5), got);
                }
                left = 5;
                send_all(end, b"x").expect("send");
            }
            end.recv_to_end();
        },
    )
    .any_path()
    .each_side()
    .internet_only(),
    pair(
        "paths/splice_of_both",
        "a splice takes what waits in the ring and behind it in the kernel, and the connection lives on",
        |a| {
            let end = a.moved();
            end.send(b"the ring, ");
            end.send_with(b"the kernel", MSG_ZEROCOPY);
            a.sync();
            end.recv(10);
            end.send(b"later");
        },
        |b| {
            let end = b.moved();
            let (from, to) = sys::pipe().expect("pipe");
            b.sync();
            end.until_unread(20);
            record("splice a part", sys::splice(end.0, to, 4, 0));
            record("splice the rest", sys::splice(end.0, to, 50, 0));
            record("splice back", sys::splice(from, end.0, 8, 0));
            end.recv(10);
            let mut buf = [0; 32];
            record("from the pipe", sys::read(from, &mut buf).map(|n| buf[..n].to_vec()));
        },
    )
    .each_side(),
    pair(
        "paths/level_behind_the_change",
        "a set goes on telling of bytes in the kernel after a receive that began in the ring",
        |a| {
            let end = a.moved();
            end.send(b"the ring, ");
            end.send_with(b"the kernel", MSG_ZEROCOPY);
            a.sync();
        },
        |b| {
            let end = b.moved();
            let set = Set::on(end, IN);
            b.sync();
            end.until_unread(20);
            for _ in 0..4 {
                set.expect();
                end.recv(6);
            }
            set.expect_none();
        },
    )
    .each_side(),
    pair(
        "paths/edges_behind_the_change",
        "EPOLLET tells of bytes in the kernel while others before them wait in the ring",
        |a| {
            let end = a.moved();
            end.send(b"the ring, ");
            end.send_with(b"the kernel", MSG_ZEROCOPY);
            for part in [&b", more"[..], b" and more"] {
                a.sync();
                end.send(part);
            }
            a.sync();
        },
        |b| {
            let end = b.moved();
            end.until_unread(20);
            let set = Set::on(end, IN | ET);
            set.expect();
            set.expect_none();
            b.sync();
            set.expect();
            set.expect_none();
            end.recv(12);
            b.sync();
            set.expect();
            b.sync();
            end.recv_exact(23);
            set.expect_none();
        },
    )
    .packets_too()
    .each_side(),
    pair(
        "paths/sets_on_the_kernel",
        "a set, and one around it, tell the same of a connection that went back as of any",
        |a| {
            let end = a.moved();
            back_to_the_kernel(end);
            a.sync();
            a.sync();
            end.send(b"x");
            a.sync();
        },
        |b| {
            let end = b.moved();
            b.sync();
            let inner = Set::on(end, IN);
            let outer = Set::new();
            record("ADD", outer.add(inner.0, IN, 77));
            let edge = Set::on(end, IN | OUT | ET);
            edge.expect();
            edge.expect_none();
            outer.expect_none();
            record("MOD", inner.modify(end.0, OUT, 2));
            outer.expect();
            record("MOD", inner.modify(end.0, IN, 3));
            outer.expect_none();
            b.sync();
            outer.expect();
            edge.expect();
            edge.expect_none();
            b.sync();
            end.recv(4);
            outer.expect_none();
        },
    )
    .packets_too()
    .each_side(),
    pair(
        "paths/vectors_on_the_kernel",
        "vectors stay in one piece when their connection has gone back to the kernel",
        |a| {
            let end = a.moved();
            back_to_the_kernel(end);
            a.sync();
            let parts = [&b"abc"[..]; 1000];
            record("writev of 1000", sys::writev(end.0, &parts));
            a.sync();
            a.sync();
            record("sendmsg of 2", sys::sendmsg(end.0, &[b"head ", b"body"], 0));
            a.sync();
        },
        |b| {
            let end = b.moved();
            b.sync();
            b.sync();
            end.until_unread(3000);
            record("readv of 1000", sys::readv(end.0, &[2; 1000]));
            record("readv of 4", sys::readv(end.0, &[100, 0, 400, 1000]));
            b.sync();
            b.sync();
            end.until_unread(9);
            end.recv(100);
        },
    ),
    pair(
        "paths/urgent_before_the_move",
        "a connection with urgent data in its young days loses none of what follows",
        |a| {
            let mut end = a.fresh();
            end.send_with(b"abc!", MSG_OOB);
            a.warm(end);
            a.sync();
            end.send(b"after");
            end = a.moved();
            end.send(b"another");
        },
        |b| {
            let mut end = b.fresh();
            end.until_mask(PRI);
            end.recv(3);
            b.warm(end);
            b.sync();
            end.recv_exact(5);
            end = b.moved();
            end.recv_exact(7);
        },
    )
    .any_path(),
    pair(
        "paths/urgent_while_it_moves",
        "urgent data around an answer, at whatever moment of the move, loses none of the answers",
        |a| {
            let mut whole = 0;
            for _ in 0..URGENT_CONNECTIONS {
                let end = a.fresh();
                let answered = (0..URGENT_TRIPS).all(|_| {
                    send_all(end, &[b'q'; 100]).is_ok() && recv_exact(end, 100) == Ok(vec![b'a'; 100])
                });
                whole += i32::from(answered);
                sys::close(end.0).expect("closed");
            }
            record("whole", whole);
        },
        |b| {
            let mut whole = 0;
            for connection in 0..URGENT_CONNECTIONS {
                let end = b.fresh();
                let answered = (0..URGENT_TRIPS).all(|trip| {
                    let urgent = || trip != connection % 12 || sys::send(end.0, b"!", MSG_OOB) == Ok(1);
                    recv_exact(end, 100) == Ok(vec![b'q'; 100])
                        && urgent()
                        && send_all(end, &[b'a'; 100]).is_ok()
                        && urgent()
                });
                whole += i32::from(answered);
                sys::close(end.0).expect("closed");
            }
            record("whole", whole);
        },
    )
    .internet_only()
    .any_path(),
    pair(
        "paths/urgent_behind_a_doorbell",
        "an urgent byte that another one takes over before it was passed is no data, though a doorbell lies before it",
        |a| {
            for early in [false, true, true] {
                let end = a.moved();
                a.sync();
                // (The child is asleep by then, mostly, and woken by a byte.)
                pause(20);
                end.send(b"wakes");
                a.sync();
                if early {
                    // Its path changes by something else.
                    sys::setsockopt(end.0, libc::SOL_SOCKET, libc::SO_TIMESTAMP, 1).expect("set");
                    end.recv_with(1, libc::MSG_DONTWAIT);
                }
                end.send_with(b"!", MSG_OOB);
                end.send(b"behind");
                end.send_with(b"!", MSG_OOB);
                a.sync();
                end.recv_exact(5);
                end.close();
            }
        },
        |b| {
            for _ in 0..3 {
                let end = b.moved();
                let child = sys::fork(|| {
                    i32::from(sys::poll(&[(end.0, libc::POLLIN)], -1).is_err())
                });
                b.sync();
                record("child", sys::wait_for(child));
                end.recv(5);
                b.sync();
                b.sync();
                end.until_unread(6);
                end.recv(100);
                end.send(b"taken");
                end.close();
            }
        },
    )
    .internet_only()
    .each_side(),
    pair(
        "paths/reset_of_a_part",
        "a receive that waits for more than comes tells of the reset in the next call",
        |a| {
            let end = a.moved();
            a.sync();
            end.send(b"a part");
            a.sync();
            record("linger", sys::set_linger(end.0, Some(0)));
            end.close();
        },
        |b| {
            let end = b.moved();
            b.sync();
            end.until_unread(6);
            b.sync();
            end.recv_with(100, MSG_WAITALL);
            end.recv(100);
            end.recv(100);
        },
    )
    .packets_too()
    .each_side(),
];
