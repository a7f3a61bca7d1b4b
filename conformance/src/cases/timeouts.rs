//! Calls that wait only so long. No length of a wait is recorded, only that there was one: a stalled machine's kernel counts its timeouts
//! from a clock that is behind, and ends them early.

use std::time::Duration;

use libc::{SO_RCVTIMEO, SO_SNDTIMEO};

use crate::case::*;
use crate::sys;

const SHORT: Duration = Duration::from_millis(60);

/// Runs `call`, and records its result and that the thread slept for it.
fn waited<T: Show>(what: &str, call: impl FnOnce() -> T) {
    let sleeps = sys::sleeps();
    record(what, call());
    record("waited", sys::sleeps() > sleeps);
}

pub const CASES: &[Case] = &[
    pair(
        "timeouts/receive",
        "SO_RCVTIMEO ends each receiving call with EAGAIN, and can be taken back",
        |a| {
            let end = a.moved();
            a.sync();
            pause(100);
            end.send(b"late");
        },
        |b| {
            let end = b.moved();
            record("unset", sys::timeout_of(end.0, SO_RCVTIMEO).map(|t| t.as_micros() as usize));
            record("set", sys::set_timeout(end.0, SO_RCVTIMEO, SHORT));
            record("get", sys::timeout_of(end.0, SO_RCVTIMEO).map(|t| t.as_micros() as usize));
            waited("recv", || recv(end, 4, 0));
            waited("read", || sys::read(end.0, &mut [0; 4]));
            waited("readv", || sys::readv(end.0, &[2, 2]));
            waited("recvmsg", || sys::recvmsg(end.0, &[4], 0).map(|m| m.data));
            waited("peek", || recv(end, 4, libc::MSG_PEEK));
            record("set back", sys::set_timeout(end.0, SO_RCVTIMEO, Duration::ZERO));
            b.sync();
            end.recv(10);
        },
    ).packets_too()
    .each_side(),
    pair(
        "timeouts/negative",
        "a negative timeout is none at all: a receive does not wait, though the option reads as unset",
        |a| {
            let end = a.moved();
            a.sync();
            a.sync();
            end.send(b"late");
        },
        |b| {
            let end = b.moved();
            b.sync();
            record("set", sys::set_negative_timeout(end.0, SO_RCVTIMEO));
            record("get", sys::timeout_of(end.0, SO_RCVTIMEO).map(|t| t.as_micros() as usize));
            record("recv", recv(end, 4, 0));
            record("set back", sys::set_timeout(end.0, SO_RCVTIMEO, Duration::ZERO));
            b.sync();
            end.recv(4);
        },
    )
    .each_side(),
    pair(
        "timeouts/waitall",
        "MSG_WAITALL returns what came before the timeout",
        |a| {
            let end = a.moved();
            end.send(b"half");
            a.sync();
        },
        |b| {
            let end = b.moved();
            record("set", sys::set_timeout(end.0, SO_RCVTIMEO, SHORT));
            b.sync();
            end.until_unread(4);
            waited("recv all of 8", || recv(end, 8, libc::MSG_WAITALL));
            waited("recv all of 8", || recv(end, 8, libc::MSG_WAITALL));
        },
    ),
    pair(
        "timeouts/send",
        "SO_SNDTIMEO ends a send on a full connection",
        |a| {
            let end = a.moved();
            let sent = fill(end);
            record("set", sys::set_timeout(end.0, SO_SNDTIMEO, SHORT));
            record("get", sys::timeout_of(end.0, SO_SNDTIMEO).map(|t| t.as_micros() as usize));
            waited("send", || sys::send(end.0, b"x", 0));
            waited("write", || sys::write(end.0, b"x"));
            a.tell(sent.len() as i64);
            a.sync();
            let data = pattern(30, 24 << 20);
            let sleeps = sys::sleeps();
            let part = sys::send(end.0, &data, 0).unwrap_or_default();
            record("a part", part > 0 && part < data.len());
            if part > 0 {
                record("waited", sys::sleeps() > sleeps);
            }
            a.tell(part as i64);
            a.tell(checksum(&data[..part]) as i64);
        },
        |b| {
            let end = b.moved();
            let len = b.hear() as usize;
            record("filling", recv_exact(end, len).map(|got| got.len() == len));
            b.sync();
            let (part, sum) = (b.hear() as usize, b.hear() as u64);
            let got = recv_exact(end, part).expect("recv");
            record("the part", got.len() == part && checksum(&got) == sum);
        },
    ).packets_too(),
    pair(
        "timeouts/readiness",
        "poll, ppoll, select, pselect and the epoll calls return nothing after their time",
        |a| {
            a.moved();
        },
        |b| {
            let end = b.moved();
            let set = sys::epoll_create().expect("epoll");
            sys::epoll_ctl(set, libc::EPOLL_CTL_ADD, end.0, IN, 1).expect("epoll_ctl");
            let (fds, ms) = (&[(end.0, libc::POLLIN)][..], SHORT.as_millis() as i32);
            waited("poll", || sys::poll(fds, ms).map(|(n, _)| n));
            waited("ppoll", || sys::ppoll(fds, Some(SHORT), None).map(|(n, _)| n));
            waited("select", || {
                let got = sys::select(&[end.0], &[], &[], Some(SHORT));
                got.map(|s| format!("{}, left {:?}", s.count, s.left))
            });
            waited("pselect", || {
                sys::pselect(&[end.0], &[], &[], Some(SHORT), None).map(|s| s.count)
            });
            waited("epoll_wait", || sys::epoll_wait(set, 4, ms).map(|events| events.len()));
            waited("epoll_pwait", || sys::epoll_pwait(set, 4, ms, None).map(|e| e.len()));
            waited("epoll_pwait2", || sys::epoll_wait_ns(set, 4, Some(SHORT)).map(|e| e.len()));
            record("poll 0", sys::poll(fds, 0).map(|(n, _)| n));
            record("epoll_wait 0", sys::epoll_wait(set, 4, 0).map(|events| events.len()));
            let none = sys::select(&[end.0], &[], &[], Some(Duration::ZERO));
            record("select 0", none.map(|s| s.count));
        },
    ).packets_too()
    .each_side(),
    pair(
        "timeouts/ready_in_time",
        "the same calls return early when data comes",
        |a| {
            let end = a.moved();
            for _ in 0..6 {
                a.sync();
                pause(10);
                end.send(b"x");
            }
        },
        |b| {
            let end = b.moved();
            let set = sys::epoll_create().expect("epoll");
            sys::epoll_ctl(set, libc::EPOLL_CTL_ADD, end.0, IN, 1).expect("epoll_ctl");
            let fds = &[(end.0, libc::POLLIN)][..];
            let long = Some(PATIENCE);
            let calls: [(&str, &dyn Fn() -> sys::R<i32>); 6] = [
                ("poll", &|| sys::poll(fds, PATIENCE_MS).map(|(n, _)| n)),
                ("ppoll", &|| sys::ppoll(fds, None, None).map(|(n, _)| n)),
                ("select", &|| sys::select(&[end.0], &[], &[], long).map(|s| s.count)),
                ("pselect", &|| sys::pselect(&[end.0], &[], &[], None, None).map(|s| s.count)),
                ("epoll_wait", &|| sys::epoll_wait(set, 4, -1).map(|e| e.len() as i32)),
                ("epoll_pwait2", &|| sys::epoll_wait_ns(set, 4, long).map(|e| e.len() as i32)),
            ];
            for (name, call) in calls {
                b.sync();
                record(name, call());
                end.recv(4);
            }
        },
    )
    .all_families()
    .each_side(),
];
