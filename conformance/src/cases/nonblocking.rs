//! Calls that must not wait.

use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use libc::{FIONBIO, MSG_DONTWAIT, MSG_NOSIGNAL, SOCK_NONBLOCK, SOCK_STREAM};

use crate::case::*;
use crate::sys;

pub const CASES: &[Case] = &[
    pair(
        "nonblocking/empty",
        "each receiving call on an empty connection fails with EAGAIN",
        |a| {
            let end = a.moved();
            a.sync();
            end.send(b"now");
            a.sync();
        },
        |b| {
            let end = b.moved();
            end.set_nonblocking(true);
            end.recv(4);
            end.read(4);
            record("readv", sys::readv(end.0, &[4, 4]));
            record("recvmsg", sys::recvmsg(end.0, &[4], 0).map(|m| m.data));
            record("recvfrom", sys::recvfrom(end.0, &mut [0; 4], 0).map(|(n, _)| n));
            end.recv_with(4, libc::MSG_WAITALL);
            b.sync();
            b.sync();
            end.until_unread(3);
            end.recv_with(10, libc::MSG_WAITALL);
            end.recv(10);
        },
    )
    .all_families()
    .packets_too()
    .each_side(),
    pair(
        "nonblocking/fionbio",
        "FIONBIO and O_NONBLOCK are one flag, and blocking calls wait again without it",
        |a| {
            let end = a.moved();
            a.sync();
            pause(20);
            end.send(b"awaited");
        },
        |b| {
            let end = b.moved();
            let flag = || {
                let flags = sys::fcntl(end.0, libc::F_GETFL, 0);
                record("O_NONBLOCK", flags.map(|f| f & libc::O_NONBLOCK != 0));
                record("O_RDWR", flags.map(|f| f & libc::O_ACCMODE == libc::O_RDWR));
            };
            flag();
            record("FIONBIO 1", sys::ioctl(end.0, FIONBIO, 1));
            flag();
            end.recv(4);
            record("FIONBIO 0", sys::ioctl(end.0, FIONBIO, 0));
            flag();
            b.sync();
            end.recv(10);
            end.set_nonblocking(true);
            flag();
            end.recv(10);
        },
    )
    .each_side(),
    pair(
        "nonblocking/accept4",
        "a connection accepted or made with SOCK_NONBLOCK has the flag from the start",
        |a| {
            let port = a.hear() as u32;
            let fd = sys::socket(libc::AF_INET, SOCK_STREAM | SOCK_NONBLOCK).expect("socket");
            record("connect", sys::connect(fd, a.target(port)));
            let end = End(fd);
            end.until_mask(OUT);
            end.error();
            record("connect again", sys::connect(fd, a.target(port)));
            record("and again", sys::connect(fd, a.target(port)));
            a.sync();
            a.warm(end);
            end.recv(4);
        },
        |b| {
            let (listener, port) = b.listener();
            b.tell(i64::from(port));
            let accepted = sys::accept4(listener, SOCK_NONBLOCK | libc::SOCK_CLOEXEC);
            let (fd, from) = accepted.expect("accept4");
            record("from", from.map(|addr| addr.ip().to_string()));
            let flags = sys::fcntl(fd, libc::F_GETFL, 0).expect("F_GETFL");
            record("O_NONBLOCK", flags & libc::O_NONBLOCK != 0);
            record("FD_CLOEXEC", sys::fcntl(fd, libc::F_GETFD, 0));
            b.sync();
            b.warm(End(fd));
            End(fd).recv(4);
        },
    )
    .internet_only()
    .each_side(),
    pair(
        "nonblocking/full",
        "a full connection refuses, and takes bytes again once the reader has drained it",
        |a| {
            let end = a.moved();
            let sent = fill(end);
            end.mask();
            end.send_with(b"x", MSG_DONTWAIT);
            end.set_nonblocking(true);
            end.write(b"x");
            record("writev", sys::writev(end.0, &[b"x", b"y"]));
            record("sendmsg", sys::sendmsg(end.0, &[b"x"], MSG_NOSIGNAL));
            let file = sys::file_with(b"file").expect("a file");
            record("sendfile", sys::sendfile(end.0, file, None, 4));
            record("file position", sys::lseek(file, 0, libc::SEEK_CUR));
            a.tell(sent.len() as i64);
            a.tell(checksum(&sent) as i64);
            a.sync();
            end.until_mask(OUT);
            end.send(b"room again");
        },
        |b| {
            let end = b.moved();
            let (len, sum) = (b.hear() as usize, b.hear() as u64);
            let got = recv_exact(end, len).expect("recv");
            record("all arrived", got.len() == len && checksum(&got) == sum);
            end.recv_with(10, MSG_DONTWAIT);
            b.sync();
            end.recv_exact(10);
        },
    )
    .all_families()
    .packets_too()
    .each_side(),
    pair(
        "nonblocking/partial",
        "a send of more than fits takes a part, and the rest follows by readiness",
        |a| {
            let end = a.moved();
            end.set_nonblocking(true);
            let data = pattern(20, 24 << 20);
            let first = sys::send(end.0, &data, MSG_NOSIGNAL).unwrap_or_default();
            record("a part", first > 0 && first < data.len());
            a.sync();
            record("the rest", send_all(end, &data[first..]).map(|n| n + first));
            end.close();
        },
        |b| {
            let end = b.moved();
            b.sync();
            end.recv_to_end();
        },
    )
    .packets_too(),
    pair(
        "nonblocking/partial_vectors",
        "writev of more than fits takes a part, wherever that ends",
        |a| {
            let end = a.moved();
            end.set_nonblocking(true);
            let data = pattern(21, 16 << 20);
            let parts: Vec<&[u8]> = data.chunks(100_003).collect();
            let first = sys::writev(end.0, &parts).unwrap_or_default();
            record("a part", first > 0 && first < data.len());
            a.sync();
            record("the rest", send_all(end, &data[first..]).map(|n| n + first));
            end.close();
        },
        |b| {
            let end = b.moved();
            b.sync();
            end.recv_to_end();
        },
    ),
    pair(
        "nonblocking/blocked_sender",
        "a blocking send on a full connection ends when the reader makes room",
        |a| {
            let end = a.moved();
            let sent = fill(end);
            a.tell(sent.len() as i64);
            a.tell(i64::from(std::process::id()));
            end.send(&pattern(22, 5000));
            a.sync();
        },
        |b| {
            let end = b.moved();
            let (len, pid) = (b.hear() as usize, b.hear() as i32);
            until_asleep(pid, pid);
            let got = recv_exact(end, len).expect("recv");
            record("filling", got.len() == len);
            end.recv_exact(5000);
            b.sync();
        },
    )
    .packets_too()
    .each_side(),
    pair(
        "nonblocking/ping_pong",
        "two thousand round trips by retrying on EAGAIN only",
        |a| {
            let end = a.moved();
            end.set_nonblocking(true);
            for i in 0..2000u32 {
                send_all(end, &i.to_le_bytes()).expect("send");
                let reply = recv_exact(end, 4).expect("recv");
                assert_eq!(reply, (!i).to_le_bytes(), "the reply to {i}");
            }
            end.close();
        },
        |b| {
            let end = b.moved();
            end.set_nonblocking(true);
            for _ in 0..2000 {
                let request = recv_exact(end, 4).expect("recv");
                let reply: Vec<u8> = request.iter().map(|byte| !byte).collect();
                send_all(end, &reply).expect("send");
            }
            end.wait_mask(RDHUP);
            end.recv(1);
        },
    )
    .packets_too(),
    pair(
        "nonblocking/all_of_a_send_arrives",
        "a receiver that sleeps gets all that a send has taken, also of one for which there was too little room",
        |a| {
            let end = a.moved();
            for round in 0..60 {
                let data = pattern(round, [300_001, 6_000_000, 70_001][round as usize % 3]);
                end.wait_mask(OUT);
                let sent = sys::send(end.0, &data, MSG_DONTWAIT | MSG_NOSIGNAL).expect("send");
                a.tell(sent as i64);
                a.tell(checksum(&data[..sent]) as i64);
                a.hear();
            }
            end.close();
        },
        |b| {
            let end = b.moved();
            let got = Arc::new(Mutex::new(Vec::new()));
            let receiver = {
                let got = got.clone();
                thread::spawn(move || {
                    let mut buf = vec![0; 1 << 20];
                    while let Ok(n @ 1..) = sys::recv(end.0, &mut buf, 0) {
                        got.lock().unwrap().extend_from_slice(&buf[..n]);
                    }
                })
            };
            let mut right = 0;
            for _ in 0..60 {
                let (sent, sum) = (b.hear() as usize, b.hear() as u64);
                until("all of a send", || got.lock().unwrap().len() >= sent);
                right += u32::from(checksum(&std::mem::take(&mut *got.lock().unwrap())) == sum);
                b.tell(0);
            }
            record("right", right);
            receiver.join().expect("receiver");
        },
    )
    .all_families()
    .each_side(),
    solo("nonblocking/refused", "a refused connect tells so by POLLERR and SO_ERROR", |s| {
        let (listener, port) = s.listener();
        End(listener).close();
        let fd = sys::socket(libc::AF_INET, SOCK_STREAM | SOCK_NONBLOCK).expect("socket");
        let target = s.target(port);
        End(fd).mask();
        record("connect", sys::connect(fd, target));
        End(fd).until_mask(ERR | HUP);
        End(fd).error();
        End(fd).error();
        End(fd).mask();
        End(fd).send_with(b"x", MSG_NOSIGNAL);
        End(fd).recv(1);
        let blocking = sys::socket(libc::AF_INET, SOCK_STREAM).expect("socket");
        record("blocking connect", sys::connect(blocking, target));
    })
    .internet_only()
    .any_path(),
    solo("nonblocking/accept", "accept with nobody there fails, or ends with its timeout", |s| {
        let (listener, port) = s.listener();
        let timeout = sys::set_timeout(listener, libc::SO_RCVTIMEO, Duration::from_millis(50));
        record("SO_RCVTIMEO", timeout);
        record("accept in time", sys::accept(listener).map(|_| ()));
        End(listener).set_nonblocking(true);
        record("accept", sys::accept(listener).map(|_| ()));
        End(listener).mask();
        let near = s.dial(port);
        End(listener).until_mask(IN);
        let far = sys::accept(listener);
        record("accepted", far.map(|_| ()));
        let inherited = far.and_then(|fd| sys::fcntl(fd, libc::F_GETFL, 0));
        record("O_NONBLOCK inherited", inherited.map(|f| f & libc::O_NONBLOCK != 0));
        near.close();
    })
    .any_path(),
];
