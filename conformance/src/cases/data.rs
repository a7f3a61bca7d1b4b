//! Bytes: each call that moves them, each flag, sizes from one byte to megabytes.

use std::net::{Ipv4Addr, SocketAddr};
use std::thread;
use std::time::Duration;

use libc::{MSG_DONTWAIT, MSG_MORE, MSG_NOSIGNAL, MSG_OOB, MSG_PEEK, MSG_TRUNC, MSG_WAITALL};

use crate::case::*;
use crate::sys::{self, Errno, NOWHERE};

/// Sizes around powers of two, where rings and pages end.
const SIZES: &[usize] = &[
    1,
    2,
    7,
    8,
    63,
    64,
    65,
    255,
    1000,
    1448,
    4095,
    4096,
    4097,
    16_384,
    65_535,
    65_536,
    65_537,
    262_144,
    300_001,
    1 << 20,
    4 << 20,
];

/// A sender is woken for each piece: a quarter of the smallest ring.
const WAKING_PIECE: usize = 16 << 10;
const WAKING_BYTES: usize = 6000 * WAKING_PIECE;

/// The libc crate has no name for it on Linux.
const SIOCATMARK: libc::Ioctl = 0x8905;

/// What each direction of the floods carries.
const FLOOD_BYTES: usize = 8 << 20;

pub const CASES: &[Case] = &[
    pair(
        "data/read_write",
        "write and read carry bytes both ways, and a short read leaves the rest",
        |a| {
            let end = a.moved();
            end.write(b"hello");
            a.sync();
            a.sync();
            end.until_unread(6);
            end.read(100);
        },
        |b| {
            let end = b.moved();
            b.sync();
            end.until_unread(5);
            end.read(2);
            end.read(100);
            end.write(b"world!");
            b.sync();
        },
    )
    .all_families()
    .each_side(),
    pair(
        "data/send_recv",
        "send and recv carry bytes both ways, zero bytes and all",
        |a| {
            let end = a.moved();
            end.send(b"\0one\xff");
            end.recv_exact(6);
            end.send(b"three");
            end.close();
        },
        |b| {
            let end = b.moved();
            end.recv_exact(5);
            end.send(b"two\0\0\n");
            end.recv_to_end();
        },
    )
    .all_families()
    .packets_too()
    .each_side(),
    pair(
        "data/sendto_recvfrom",
        "sendto ignores an address on a connection, recvfrom tells none",
        |a| {
            let end = a.moved();
            let elsewhere = SocketAddr::from((Ipv4Addr::new(127, 0, 0, 9), 9));
            record("sendto", sys::sendto(end.0, b"to whom", 0, elsewhere));
            a.sync();
        },
        |b| {
            let end = b.moved();
            b.sync();
            end.until_unread(7);
            let mut buf = [0; 32];
            let got = sys::recvfrom(end.0, &mut buf, MSG_PEEK);
            record("recvfrom, peeking", got.map(|(n, _)| n));
            let got = sys::recvfrom(end.0, &mut buf, 0);
            record("recvfrom's address length", got.map(|(_, len)| len));
            say(brief(&buf[..7]));
        },
    )
    .internet_only()
    .each_side(),
    pair(
        "data/sendmsg_recvmsg",
        "messages of many vectors, empty ones among them, and what recvmsg fills in",
        |a| {
            let end = a.moved();
            let parts: &[&[u8]] = &[b"", b"ab", b"", b"c", &[b'd'; 500], b""];
            record("sendmsg", sys::sendmsg(end.0, parts, 0));
            a.sync();
            a.sync();
            record("sendmsg of nothing", sys::sendmsg(end.0, &[], 0));
            record("sendmsg of empty parts", sys::sendmsg(end.0, &[b"", b""], 0));
        },
        |b| {
            let end = b.moved();
            b.sync();
            end.until_unread(503);
            for (lens, flags) in [
                (&[1, 0, 1][..], MSG_PEEK),
                (&[1, 0, 1], 0),
                (&[0, 300, 0, 7], 0),
                (&[1000, 10], MSG_DONTWAIT),
                (&[10], MSG_DONTWAIT),
            ] {
                match sys::recvmsg(end.0, lens, flags) {
                    Ok(m) => say(format!(
                        "recvmsg = {}, flags {:#x}, name {}, control {}",
                        brief(&m.data),
                        m.flags,
                        m.name_len,
                        m.control_len
                    )),
                    Err(e) => record("recvmsg", e),
                }
            }
            b.sync();
        },
    )
    .each_side(),
    pair(
        "data/readv_writev",
        "vectors up to IOV_MAX, and one more",
        |a| {
            let end = a.moved();
            let data = pattern(1, 3000);
            let parts: Vec<&[u8]> = data.chunks(3).collect();
            record("writev of 1000", sys::writev(end.0, &parts));
            record("writev of 1024", sys::writev(end.0, &[&b"x"[..]; 1024]));
            record("writev of 1025", sys::writev(end.0, &[&b"x"[..]; 1025]));
            record("writev of none", sys::writev(end.0, &[]));
            a.sync();
        },
        |b| {
            let end = b.moved();
            b.sync();
            end.until_unread(4024);
            record("readv of 4", sys::readv(end.0, &[1, 0, 1500, 499]));
            record("readv of 1024", sys::readv(end.0, &[1; 1024]));
            record("readv of 1025", sys::readv(end.0, &[1; 1025]));
            record("readv of the rest", sys::readv(end.0, &[900, 900]));
        },
    )
    .each_side(),
    pair(
        "data/no_offsets",
        "calls with an offset and lseek fail on a connection, preadv2 at -1 is readv",
        |a| {
            let end = a.moved();
            end.send(b"abcdef");
            a.sync();
            record("pwrite", sys::pwrite(end.0, b"x", 0));
        },
        |b| {
            let end = b.moved();
            b.sync();
            end.until_unread(6);
            record("pread", sys::pread(end.0, &mut [0; 4], 0));
            record("preadv", sys::preadv(end.0, &[4], 0));
            record("preadv2 at 0", sys::preadv2(end.0, &[4], 0));
            record("preadv2 at -1", sys::preadv2(end.0, &[2, 2], -1));
            record("lseek", sys::lseek(end.0, 0, libc::SEEK_CUR));
            end.recv(10);
        },
    ),
    pair(
        "data/zero_lengths",
        "calls for no bytes, on an empty connection, with data, and at its end",
        |a| {
            let end = a.moved();
            a.sync();
            end.write(b"");
            end.send(b"");
            end.send(b"x");
            a.sync();
            a.sync();
            end.close();
            a.sync();
        },
        |b| {
            let end = b.moved();
            end.read(0);
            end.recv_with(0, MSG_DONTWAIT);
            end.recv_with(0, MSG_DONTWAIT | MSG_PEEK);
            b.sync();
            b.sync();
            end.until_unread(1);
            end.read(0);
            end.recv(0);
            end.recv_with(0, MSG_PEEK);
            end.recv(1);
            b.sync();
            b.sync();
            end.wait_mask(RDHUP);
            end.read(0);
            end.recv(0);
            end.recv(1);
        },
    )
    .packets_too(),
    pair(
        "data/sizes",
        "one transfer each way of many sizes from 1 byte to 4 MB",
        |a| {
            let end = a.moved();
            for (seed, size) in SIZES.iter().enumerate() {
                end.send_all(&pattern(seed as u64, *size));
                end.recv_exact(*size);
            }
        },
        |b| {
            let end = b.moved();
            for (seed, size) in SIZES.iter().enumerate() {
                end.recv_exact(*size);
                end.send_all(&pattern(!seed as u64, *size));
            }
        },
    )
    .all_families()
    .each_side(),
    pair(
        "data/odd_chunks",
        "writes and reads of unrelated sizes see one stream",
        |a| {
            let end = a.moved();
            let (data, mut lens, mut at) = (pattern(5, 1 << 20), Sequence::new(6), 0);
            while at < data.len() {
                let len = (1 + lens.below(9000)).min(data.len() - at);
                send_all(end, &data[at..at + len]).expect("send");
                at += len;
            }
            record("sent", at);
        },
        |b| {
            let end = b.moved();
            let (mut lens, mut all) = (Sequence::new(7), Vec::new());
            while all.len() < 1 << 20 {
                all.extend(recv(end, 1 + lens.below(5000), 0).expect("recv"));
            }
            record("received", all);
        },
    )
    .each_side(),
    pair(
        "data/many_small",
        "twenty thousand small writes, read in large pieces",
        |a| {
            let end = a.moved();
            let (mut lens, mut sent) = (Sequence::new(8), 0);
            for i in 0..20_000u32 {
                let len = 1 + lens.below(64);
                sent += send_all(end, &vec![i as u8; len]).expect("send");
            }
            record("sent", sent);
            end.close();
        },
        |b| {
            let end = b.moved();
            end.recv_to_end();
        },
    )
    .packets_too(),
    pair(
        "data/peek",
        "MSG_PEEK, repeated and partial, takes nothing",
        |a| {
            let end = a.moved();
            a.sync();
            end.send(b"abc");
            end.send(b"defgh");
            a.sync();
            a.sync();
            end.close();
            a.sync();
        },
        |b| {
            let end = b.moved();
            end.recv_with(4, MSG_PEEK | MSG_DONTWAIT);
            b.sync();
            b.sync();
            end.until_unread(8);
            end.recv_with(2, MSG_PEEK);
            end.recv_with(100, MSG_PEEK);
            end.recv_with(100, MSG_PEEK);
            end.recv_with(4, MSG_PEEK | MSG_WAITALL);
            end.recv(4);
            end.recv_with(100, MSG_PEEK);
            end.unread();
            end.recv(100);
            b.sync();
            b.sync();
            end.wait_mask(RDHUP);
            end.recv_with(1, MSG_PEEK);
            end.recv(1);
        },
    )
    .packets_too()
    .each_side(),
    pair(
        "data/peek_large",
        "a peek sees the same bytes as the read after it, wherever they lie in a buffer",
        |a| {
            let end = a.moved();
            for seed in 0..40 {
                send_all(end, &pattern(seed, 20_011)).expect("send");
                a.sync();
            }
        },
        |b| {
            let end = b.moved();
            for _ in 0..40 {
                end.until_unread(20_011);
                let peeked = recv(end, 40_000, MSG_PEEK);
                let read = recv(end, 40_000, 0);
                record("peek equals read", peeked == read);
                record("read", read);
                b.sync();
            }
        },
    )
    .packets_too(),
    pair(
        "data/waitall",
        "MSG_WAITALL waits across several sends",
        |a| {
            let end = a.moved();
            a.sync();
            for part in [b"0123456789", b"abcdefghij", b"ABCDEFGHIJ"] {
                pause(20);
                end.send(part);
            }
        },
        |b| {
            let end = b.moved();
            b.sync();
            end.recv_with(25, MSG_WAITALL);
            end.recv_with(5, MSG_WAITALL);
        },
    )
    .packets_too()
    .each_side(),
    pair(
        "data/waitall_large",
        "MSG_WAITALL for more than any buffer holds",
        |a| {
            let end = a.moved();
            end.send_all(&pattern(9, 6 << 20));
        },
        |b| {
            let end = b.moved();
            end.recv_with(6 << 20, MSG_WAITALL);
        },
    ),
    pair(
        "data/waitall_end",
        "MSG_WAITALL returns what there is when the stream ends in the middle",
        |a| {
            let end = a.moved();
            a.sync();
            end.send(b"0123456789");
            pause(20);
            end.shutdown(libc::SHUT_WR);
        },
        |b| {
            let end = b.moved();
            b.sync();
            end.recv_with(25, MSG_WAITALL);
            end.recv_with(25, MSG_WAITALL);
        },
    ),
    pair(
        "data/dontwait",
        "MSG_DONTWAIT on a blocking connection, with MSG_WAITALL too",
        |a| {
            let end = a.moved();
            a.sync();
            end.send_with(b"data", MSG_DONTWAIT);
            a.sync();
        },
        |b| {
            let end = b.moved();
            end.recv_with(10, MSG_DONTWAIT);
            b.sync();
            b.sync();
            end.until_unread(4);
            end.recv_with(10, MSG_DONTWAIT | MSG_WAITALL);
            end.recv_with(10, MSG_DONTWAIT | MSG_WAITALL);
        },
    )
    .packets_too(),
    pair(
        "data/trunc",
        "MSG_TRUNC discards bytes without touching the buffer",
        |a| {
            let end = a.moved();
            end.send(b"0123456789");
            a.sync();
            a.sync();
            for _ in 0..3 {
                end.send(&[b'x'; 100]);
            }
            a.sync();
        },
        |b| {
            let end = b.moved();
            b.sync();
            end.until_unread(10);
            let mut buf = [b'.'; 8];
            record("recv 4, truncating", sys::recv(end.0, &mut buf[..4], MSG_TRUNC));
            say(brief(&buf));
            record("recv to nowhere", sys::recv_to_null(end.0, 2, MSG_TRUNC));
            let peeked = sys::recv(end.0, &mut buf[..3], MSG_TRUNC | MSG_PEEK);
            record("peek 3, truncating", peeked);
            say(brief(&buf));
            end.recv(10);
            b.sync();
            b.sync();
            end.until_unread(300);
            let mut long = [b'.'; 400];
            let peeked = sys::recv(end.0, &mut long, MSG_TRUNC | MSG_PEEK);
            record("peek 3 sends, truncating", peeked);
            record("recv 3 sends, truncating", sys::recv(end.0, &mut long, MSG_TRUNC));
            say(brief(&long[..8]));
        },
    ),
    pair(
        "data/more",
        "MSG_MORE and TCP_CORK hold bytes back only until the next send",
        |a| {
            let end = a.moved();
            end.send_with(b"head ", MSG_MORE);
            end.send(b"body");
            a.sync();
            a.sync();
            let cork = |on| sys::setsockopt(end.0, libc::IPPROTO_TCP, libc::TCP_CORK, on);
            record("cork", cork(1));
            end.send(b"one ");
            end.send(b"two");
            record("uncork", cork(0));
            a.sync();
        },
        |b| {
            let end = b.moved();
            b.sync();
            end.until_unread(9);
            end.recv(100);
            b.sync();
            b.sync();
            end.until_unread(7);
            end.recv(100);
        },
    )
    .packets_too()
    .each_side(),
    pair(
        "data/rare_flags",
        "flags of send and recv that mean nothing to TCP",
        |a| {
            let end = a.moved();
            for (text, flags) in [
                (&b"confirm "[..], libc::MSG_CONFIRM),
                (b"route ", libc::MSG_DONTROUTE),
                (b"record ", libc::MSG_EOR),
                (b"zerocopy ", libc::MSG_ZEROCOPY),
                (b"plain", 0),
            ] {
                end.send_with(text, flags | MSG_NOSIGNAL);
            }
            end.recv_exact(4);
            end.close();
        },
        |b| {
            let end = b.moved();
            end.recv_exact(35);
            end.send(b"back");
            end.recv_with(4, MSG_WAITALL | libc::MSG_CMSG_CLOEXEC);
        },
    )
    .packets_too()
    .each_side(),
    pair(
        "data/oob",
        "urgent data is told by POLLPRI and read beside the stream",
        |a| {
            let end = a.moved();
            a.sync();
            end.send(b"ab");
            end.send_with(b"!", MSG_OOB);
            a.sync();
            a.sync();
            end.send(b"cd");
            end.close();
        },
        |b| {
            let end = b.moved();
            end.recv_with(1, MSG_OOB);
            b.sync();
            b.sync();
            end.until_unread(2);
            end.until_mask(PRI);
            let at_mark = || sys::ioctl(end.0, SIOCATMARK, -1);
            record("at the mark", at_mark());
            end.recv_with(1, MSG_OOB);
            end.recv(10);
            record("at the mark", at_mark());
            b.sync();
            end.recv_to_end();
        },
    ),
    pair(
        "data/behind_the_urgent_byte",
        "what follows an urgent byte that nobody asks for is told by poll, select and epoll, and received",
        |a| {
            let end = a.moved();
            for _ in 0..3 {
                a.sync();
                end.send_with(b"!", MSG_OOB);
                end.send(b"after");
                a.sync();
            }
            end.recv_exact(6);
        },
        |b| {
            let end = b.moved();
            let set = sys::epoll_create().expect("a set");
            sys::epoll_ctl(set, libc::EPOLL_CTL_ADD, end.0, IN, 1).expect("added");
            for round in 0..3 {
                b.sync();
                b.sync();
                match round {
                    0 => end.wait_mask(IN),
                    1 => record("select", sys::select(&[end.0], &[], &[], Some(PATIENCE)).map(|found| found.count)),
                    _ => record("epoll", sys::epoll_wait(set, 4, PATIENCE_MS).map(|told| told.len())),
                }
                end.unread();
                end.recv_exact(5);
            }
            end.send(b"thanks");
        },
    )
    .each_side(),
    pair(
        "data/urgent_with_control",
        "what follows an urgent byte that was sent with a control message arrives",
        |a| {
            let end = a.moved();
            for _ in 0..3 {
                end.send(b"before");
                record("urgent", sys::send_with_stamps(end.0, b"!", 0, MSG_OOB));
                end.send(b"after");
                end.recv_exact(2);
                for _ in 0..100 {
                    let _ = (send_all(end, b"ask"), recv_exact(end, 3));
                }
            }
        },
        |b| {
            let end = b.moved();
            for _ in 0..3 {
                end.recv_exact(11);
                end.send(b"ok");
                for _ in 0..100 {
                    let _ = (recv_exact(end, 3), send_all(end, b"yes"));
                }
            }
        },
    )
    .any_path()
    .each_side(),
    pair(
        "data/edges_behind_the_urgent_byte",
        "an edge-triggered set tells of what comes after an urgent byte that a receive has passed",
        |a| {
            let end = a.moved();
            for _ in 0..3 {
                a.sync();
                end.send_with(b"!", MSG_OOB);
                a.sync();
                a.sync();
                end.send(b"y");
                a.sync();
            }
        },
        |b| {
            let end = b.moved();
            end.set_nonblocking(true);
            let set = sys::epoll_create().expect("a set");
            let events = IN | PRI | libc::EPOLLET as u32;
            sys::epoll_ctl(set, libc::EPOLL_CTL_ADD, end.0, events, 1).expect("added");
            let told = || sys::epoll_wait(set, 4, PATIENCE_MS).map(|told| told.len());
            for _ in 0..3 {
                b.sync();
                b.sync();
                record("urgent", told());
                end.recv(10);
                b.sync();
                b.sync();
                record("behind it", told());
                end.recv(10);
                end.recv(10);
            }
        },
    ),
    pair(
        "data/sendfile",
        "sendfile from a file's position, from an offset, and past its end",
        |a| {
            let end = a.moved();
            let file = sys::file_with(&pattern(10, 100_000)).expect("a file");
            record("sendfile", sys::sendfile(end.0, file, None, 1000));
            record("position", sys::lseek(file, 0, libc::SEEK_CUR));
            let mut at = 70_000;
            record("sendfile at 70000", sys::sendfile(end.0, file, Some(&mut at), 10_000));
            record("offset", at);
            record("position", sys::lseek(file, 0, libc::SEEK_CUR));
            record("sendfile past the end", sys::sendfile(end.0, file, Some(&mut at), 50_000));
            record("offset", at);
            record("sendfile at the end", sys::sendfile(end.0, file, Some(&mut at), 10));
            record("sendfile of nothing", sys::sendfile(end.0, file, None, 0));
            record("sendfile from no file", sys::sendfile(end.0, 999, None, 10));
            end.send(b"and plain bytes");
            end.close();
        },
        |b| {
            let end = b.moved();
            end.recv_to_end();
        },
    )
    .packets_too()
    .each_side(),
    pair(
        "data/sendfile_large",
        "sendfile of more than fits, to a reader that is slow to start",
        |a| {
            let end = a.moved();
            let file = sys::file_with(&pattern(11, 12 << 20)).expect("a file");
            let (mut at, mut left) = (0, 12 << 20);
            while left > 0 {
                left -= sys::sendfile(end.0, file, Some(&mut at), left).expect("sendfile");
            }
            record("offset", at);
            end.close();
        },
        |b| {
            let end = b.moved();
            pause(50);
            end.recv_to_end();
        },
    ),
    pair(
        "data/splice",
        "splice between a pipe and a connection, both ways",
        |a| {
            let end = a.moved();
            let (from, to) = sys::pipe().expect("pipe");
            record("write to the pipe", sys::write(to, b"through a pipe"));
            record("splice in", sys::splice(from, end.0, 14, 0));
            end.recv_exact(5);
        },
        |b| {
            let end = b.moved();
            let (from, to) = sys::pipe().expect("pipe");
            end.until_unread(14);
            record("splice out", sys::splice(end.0, to, 7, 0));
            let mut buf = [0; 32];
            record("from the pipe", sys::read(from, &mut buf).map(|n| buf[..n].to_vec()));
            end.recv(100);
            end.send(b"later");
        },
    ),
    pair(
        "data/splice_asks",
        "what splice says: when empty, of a part, into a full pipe, where nobody reads, at the end; and sendfile into a pipe",
        |a| {
            let end = a.moved();
            for text in [&b"0123456789"[..], b"abcdefgh", b"waited for", b"last"] {
                a.sync();
                end.send(text);
            }
            end.close();
        },
        |b| {
            let end = b.moved();
            let (from, to) = sys::pipe().expect("pipe");
            let file = sys::file_with(b"").expect("a file");
            let nonblocking = libc::SPLICE_F_NONBLOCK;
            let splice = |what: &str, to, len, flags| {
                record(format!("splice {what}"), sys::splice(end.0, to, len, flags));
            };
            let from_pipe = |from| {
                let mut buf = [0; 32];
                record("from the pipe", sys::read(from, &mut buf).map(|n| buf[..n].to_vec()));
            };
            splice("into a file", file, 5, 0);
            splice("into the end to read", from, 5, 0);
            splice("by unknown flags", to, 5, 64);
            splice("of nothing", to, 0, 0);
            if b.family() == Family::Unix {
                splice("when empty, by the flag", to, 5, nonblocking);
            }
            end.set_nonblocking(true);
            splice("when empty", to, 5, 0);
            b.sync();
            end.until_unread(10);
            splice("a part", to, 4, 0);
            record("sendfile", sys::sendfile(to, end.0, None, 2));
            record("sendfile at an offset", sys::sendfile(to, end.0, Some(&mut 0), 2));
            record("sendfile into a file", sys::sendfile(file, end.0, None, 2));
            splice("the rest", to, 100, nonblocking | libc::SPLICE_F_MOVE);
            splice("when empty again", to, 100, nonblocking);
            from_pipe(from);
            record("size", sys::fcntl(to, libc::F_SETPIPE_SZ, 4096));
            record("fill the pipe", sys::write(to, &[7; 4096]));
            b.sync();
            end.until_unread(8);
            splice("into a full pipe", to, 3, nonblocking);
            record("empty the pipe", sys::read(from, &mut [0; 4096]));
            splice("into an empty one", to, 3, nonblocking);
            from_pipe(from);
            sys::close(from).expect("close");
            sys::on_signal(libc::SIGPIPE, sys::Handler::Count, 0);
            splice("where nobody reads", to, 3, 0);
            record("signals", sys::handler_runs());
            end.recv(2);
            let (from, to) = sys::pipe().expect("pipe");
            splice("of what is left", to, 100, 0);
            from_pipe(from);
            end.set_nonblocking(false);
            sys::set_timeout(end.0, libc::SO_RCVTIMEO, Duration::from_millis(20)).expect("a timeout");
            splice("in vain", to, 100, 0);
            sys::set_timeout(end.0, libc::SO_RCVTIMEO, Duration::ZERO).expect("no timeout");
            b.sync();
            splice("that waits", to, 100, 0);
            b.sync();
            end.until_mask(RDHUP);
            splice("of the last", to, 100, 0);
            splice("at the end", to, 100, 0);
            splice("at the end, again", to, 100, nonblocking);
            from_pipe(from);
        },
    )
    .each_side(),
    pair(
        "data/splice_large",
        "through pipes, out of a connection that was full for a while, and into one",
        |a| {
            let end = a.moved();
            let data = pattern(12, 6 << 20);
            end.send_all(&data);
            a.sync();
            let (from, to) = sys::pipe().expect("pipe");
            for piece in data.chunks(50_000) {
                assert_eq!(sys::write(to, piece), Ok(piece.len()));
                let mut left = piece.len();
                while left > 0 {
                    left -= sys::splice(from, end.0, left, libc::SPLICE_F_MOVE).expect("splice");
                }
            }
            end.send(b"and plain bytes");
            end.close();
        },
        |b| {
            let end = b.moved();
            pause(50);
            end.set_nonblocking(true);
            let (from, to) = sys::pipe().expect("pipe");
            for fd in [from, to] {
                sys::fcntl(fd, libc::F_SETFL, libc::O_NONBLOCK).expect("F_SETFL");
            }
            let (mut all, mut buf) = (Vec::new(), vec![0; 64 << 10]);
            while all.len() < 6 << 20 {
                match sys::splice(end.0, to, 1 << 20, libc::SPLICE_F_NONBLOCK) {
                    Ok(0) => break,
                    Ok(_) => {}
                    Err(Errno(libc::EAGAIN)) => end.wait_mask(IN),
                    Err(error) => panic!("splice: {error}"),
                }
                while let Ok(n @ 1..) = sys::read(from, &mut buf) {
                    all.extend_from_slice(&buf[..n]);
                }
            }
            record("through the pipe", all);
            b.sync();
            pause(50);
            end.recv_to_end();
        },
    )
    .each_side(),
    pair(
        "data/many_messages",
        "sendmmsg and recvmmsg on a stream",
        |a| {
            let end = a.moved();
            // (The other side waits for the last one's bytes.)
            let sent = sys::sendmmsg(end.0, &[b"one", b"", b"three"], 0);
            record("sendmmsg", sent.map(|counts| format!("{counts:?}")));
            a.sync();
        },
        |b| {
            let end = b.moved();
            b.sync();
            end.until_unread(8);
            let got = sys::recvmmsg(end.0, &[2, 4, 4], MSG_DONTWAIT);
            record(
                "recvmmsg",
                got.map(|all| format!("{:?}", all.iter().map(|m| brief(m)).collect::<Vec<_>>())),
            );
            let got = sys::recvmmsg(end.0, &[2, 4], MSG_DONTWAIT);
            record("recvmmsg when empty", got.map(|all| all.len()));
        },
    )
    .packets_too(),
    pair(
        "data/fortified",
        "the entry points of programs compiled with _FORTIFY_SOURCE",
        |a| {
            let end = a.moved();
            end.send(b"0123456789");
            a.sync();
        },
        |b| {
            let end = b.moved();
            b.sync();
            end.until_unread(10);
            let events = sys::poll_fortified(&[(end.0, ALL_EVENTS as i16)], 1000);
            record("__poll_chk", events.map(|(_, masks)| sys::event_names(masks[0])));
            let mut buf = [0; 3];
            record("__read_chk", sys::read_fortified(end.0, &mut buf).map(|_| buf.to_vec()));
            record("__recv_chk", sys::recv_fortified(end.0, &mut buf, 0).map(|_| buf.to_vec()));
            let got = sys::recvfrom_fortified(end.0, &mut buf, MSG_PEEK);
            record("__recvfrom_chk", got.map(|_| buf.to_vec()));
            end.recv(10);
        },
    )
    .each_side(),
    pair(
        "data/bad_buffers",
        "buffers at address zero fail with EFAULT and the stream goes on",
        |a| {
            let end = a.moved();
            a.sync();
            record("send from null", sys::send_from_null(end.0, 5, 0));
            record("send nothing from null", sys::send_from_null(end.0, 0, 0));
            record("writev, all from null", sys::writev_null(end.0, b"", 10));
            record("writev, its second part from null", sys::writev_null(end.0, b"0123", 10));
            end.send(b"0123456789");
            a.sync();
            a.sync();
            end.send(b"after");
            end.close();
        },
        |b| {
            let end = b.moved();
            record("recv to null, empty", sys::recv_to_null(end.0, 5, MSG_DONTWAIT));
            b.sync();
            b.sync();
            end.until_unread(10);
            record("recv to null", sys::recv_to_null(end.0, 5, 0));
            record("peek to null", sys::recv_to_null(end.0, 5, MSG_PEEK));
            record("readv, its second part to null", sys::readv_null(end.0, 4, 4));
            end.unread();
            end.recv(10);
            b.sync();
            end.recv_to_end();
        },
    ),
    pair(
        "data/nowhere",
        "pointers into the kernel's half fail with EFAULT; headers that no kernel takes are refused",
        |a| {
            let end = a.moved();
            a.sync();
            record("send", sys::send_from(end.0, NOWHERE, 5, MSG_NOSIGNAL));
            record("sendmsg, its name", sys::message_with(end.0, true, Some(NOWHERE), 16, 1));
            record("sendmsg, a negative name", sys::message_with(end.0, true, None, -1, 1));
            record("sendmsg, 1025 parts", sys::message_with(end.0, true, None, 0, 1025));
            end.send(b"0123456789");
            a.sync();
            a.sync();
            end.send(b"after");
            end.close();
        },
        |b| {
            let end = b.moved();
            record("recv, empty", sys::recv_to(end.0, NOWHERE, 5, 0));
            record("recvmsg, a negative name", sys::message_with(end.0, false, None, -1, 1));
            record("recvmsg, 1025 parts", sys::message_with(end.0, false, None, 0, 1025));
            record("ppoll, its array", sys::ppoll_at(end.0, Some(NOWHERE), None));
            record("ppoll, its mask", sys::ppoll_at(end.0, None, Some(NOWHERE)));
            b.sync();
            b.sync();
            end.until_unread(10);
            record("recv", sys::recv_to(end.0, NOWHERE, 5, 0));
            end.unread();
            // What was received is lost.
            record("recvfrom, no length", sys::recvfrom_with(end.0, &mut [0; 3], 0, None));
            record("recvfrom, a negative one", sys::recvfrom_with(end.0, &mut [0; 3], 0, Some(-1)));
            end.unread();
            end.recv(4);
            b.sync();
            end.recv_to_end();
        },
    ),
    solo("data/bad_pointers", "what ringlet does not serve, the kernel alone looks at", |_| {
        let bad = sys::forbidden();
        let (pipe, _) = sys::pipe().expect("pipe");
        record("ppoll, its array", sys::ppoll_at(pipe, Some(bad), None));
        record("ppoll, its mask", sys::ppoll_at(pipe, None, Some(bad)));
        let set = sys::epoll_create().expect("epoll_create");
        record("epoll_pwait, its mask", sys::epoll_pwait_at(set, None, Some(bad)));
        record("epoll_pwait2, its time", sys::epoll_pwait_at(set, Some(bad), None));
        let plain = sys::socket(libc::AF_INET, libc::SOCK_STREAM).expect("socket");
        record("send", sys::send_from(plain, bad, 1, MSG_NOSIGNAL));
        let datagrams = sys::socket(libc::AF_INET, libc::SOCK_DGRAM).expect("socket");
        record("sendto, its name", sys::sendto_with(datagrams, b"x", NOWHERE, 16));
        record("sendmsg, its name", sys::message_with(datagrams, true, Some(NOWHERE), 16, 1));
    })
    .any_path(),
    pair(
        "data/huge_lengths",
        "lengths beyond 32 bits and beyond the address space",
        |a| {
            let end = a.moved();
            end.send(b"0123456789");
            a.sync();
            a.sync();
            let zeros = sys::vast(5 << 30);
            let sent = sys::send(end.0, zeros, MSG_DONTWAIT | MSG_NOSIGNAL);
            record("part of 5 GB was sent", matches!(sent, Ok(n) if n > 0 && n < 5 << 30));
            a.tell(sent.unwrap_or_default() as i64);
        },
        |b| {
            let end = b.moved();
            b.sync();
            end.until_unread(10);
            let room = sys::vast((4 << 30) + 4);
            record("recv of 4 GB and 4", sys::recv(end.0, room, MSG_PEEK));
            // On the heap: on a stack near the end of the address space even the kernel's cut of SIZE_MAX does not fit.
            let mut buf = vec![0; 64];
            record("read of SIZE_MAX", sys::read_claiming(end.0, &mut buf, usize::MAX));
            record("peek of SIZE_MAX", sys::peek_claiming(end.0, &mut buf, usize::MAX));
            record("read of 4 GB and 4", sys::read(end.0, room));
            b.sync();
            let sent = b.hear() as usize;
            let got = recv_exact(end, sent).expect("recv");
            record("all arrived", got.len() == sent && got.iter().all(|byte| *byte == 0));
        },
    ),
    solo("data/one_thread", "one thread writes 200 KB and then reads them, both ways", |s| {
        let (near, far) = s.both_ends();
        for seed in 0..5 {
            near.send_all(&pattern(seed, 200_000));
            far.recv_exact(200_000);
            far.send_all(&pattern(!seed, 200_000));
            near.recv_exact(200_000);
        }
    })
    .packets_too()
    .any_path(),
    pair("data/flood", "both sides send and receive at once, a thread for each", flood, flood)
        .all_families()
        .packets_too()
        .each_side(),
    pair(
        "data/crossed_writes",
        "both sides write 100 KB before either reads",
        |a| {
            let end = a.moved();
            end.send_all(&pattern(14, 100_000));
            a.sync();
            end.recv_exact(100_000);
        },
        |b| {
            let end = b.moved();
            end.send_all(&pattern(15, 100_000));
            b.sync();
            end.recv_exact(100_000);
        },
    )
    .packets_too(),
    // Steady: where the path changes all the time, no doorbell stays.
    pair(
        "data/many_doorbells",
        "a sender is woken thousands of times beside a byte that it has not read, then it reads",
        |a| {
            let end = a.moved();
            end.send(b"!");
            a.sync();
            let mut left = WAKING_BYTES;
            while left > 0 {
                let got = recv_exact(end, WAKING_PIECE).expect("recv");
                assert_eq!(got.len(), WAKING_PIECE, "with {left} bytes to come");
                left -= got.len();
                // So that the sender finds no room, if it is quick.
                thread::sleep(Duration::from_micros(50));
            }
            a.sync();
            end.send(b"after all");
        },
        |b| {
            const SMALL: &str = "RINGLET_RING_BYTES";
            if std::env::var_os(SMALL).is_none() {
                let small = format!("{SMALL}={}", 4 * WAKING_PIECE);
                record("exec", b.start_anew(&["env", &small], "data/many_doorbells"));
            }
            let end = b.moved();
            b.sync();
            // Not the one that moved it, which would be woken otherwise.
            let sender = thread::spawn(move || {
                let piece = vec![b'x'; WAKING_PIECE];
                let half = || 0..WAKING_BYTES / WAKING_PIECE / 2;
                // Each would have woken the sender at once, in place of its sleep.
                let few = || record("few wait in the kernel", sys::unread_in_kernel(end.0).map(|n| n < 16));
                half().try_for_each(|_| send_all(end, &piece).map(drop))?;
                few();
                end.set_nonblocking(true);
                half().try_for_each(|_| send_all(end, &piece).map(drop))?;
                end.set_nonblocking(false);
                few();
                sys::R::Ok(())
            });
            record("sent", sender.join().expect("a thread"));
            end.recv(1);
            end.recv_with(1, MSG_DONTWAIT);
            b.sync();
            end.recv(9);
        },
    )
    .steady(),
    pair(
        "data/two_senders",
        "two threads send on one connection: each one's records stay whole and in order",
        |a| {
            let end = a.moved();
            let sender = |who: u32| {
                move || {
                    for number in 0..2000u32 {
                        let record = [who.to_le_bytes(), number.to_le_bytes()].concat();
                        sys::send(end.0, &record, 0).expect("send");
                    }
                }
            };
            let threads = [thread::spawn(sender(0)), thread::spawn(sender(1))];
            for thread in threads {
                thread.join().expect("a sender");
            }
            end.close();
        },
        |b| {
            let end = b.moved();
            let (data, _) = recv_to_end(end);
            let mut next = [0u32; 2];
            let whole = data.chunks_exact(8).all(|record| {
                let word = |at: usize| u32::from_le_bytes([0, 1, 2, 3].map(|i| record[at + i]));
                let expected = next.get_mut(word(0) as usize);
                expected.is_some_and(|n| {
                    *n += 1;
                    *n == word(4) + 1
                })
            });
            record("in order", whole);
            record("records", format!("{next:?}"));
        },
    )
    .packets_too(),
    pair(
        "data/two_receivers",
        "two threads receive on one connection: together they get each byte once",
        |a| {
            let end = a.moved();
            let data: Vec<u8> = (0..500_000).map(|i| (i % 251) as u8).collect();
            end.send_all(&data);
            end.close();
        },
        |b| {
            let end = b.moved();
            let receiver = || {
                move || {
                    let (data, end) = recv_to_end(end);
                    let sum: u64 = data.iter().map(|byte| u64::from(*byte)).sum();
                    (data.len(), sum, end)
                }
            };
            let threads = [thread::spawn(receiver()), thread::spawn(receiver())];
            let [one, two] = threads.map(|t| t.join().expect("a receiver"));
            record("bytes", one.0 + two.0);
            record("sum", one.1 + two.1);
            record("ends", format!("{:?} {:?}", one.2, two.2));
        },
    )
    .packets_too(),
    pair(
        "data/low_water",
        "SO_RCVLOWAT holds readiness back until enough bytes are there",
        |a| {
            let end = a.moved();
            a.sync();
            end.send(b"12345");
            a.sync();
            a.sync();
            end.send(b"67890");
            a.sync();
        },
        |b| {
            let end = b.moved();
            record("set", sys::setsockopt(end.0, libc::SOL_SOCKET, libc::SO_RCVLOWAT, 8));
            b.sync();
            b.sync();
            end.until_unread(5);
            end.mask();
            end.recv_with(20, MSG_DONTWAIT | MSG_PEEK);
            b.sync();
            b.sync();
            end.until_unread(10);
            end.until_mask(IN);
            end.recv(20);
        },
    ),
    solo("data/not_a_connection", "data calls on what is not connected or not a socket", |s| {
        let plain = sys::socket(libc::AF_INET, libc::SOCK_STREAM).expect("socket");
        let (listener, _) = s.listener();
        let (pipe, _) = sys::pipe().expect("pipe");
        for (what, fd) in
            [("unconnected", plain), ("listener", listener), ("pipe", pipe), ("closed", 555)]
        {
            record(format!("send on {what}"), sys::send(fd, b"x", MSG_NOSIGNAL));
            record(format!("recv on {what}"), sys::recv(fd, &mut [0; 4], MSG_DONTWAIT));
            record(format!("sendmsg on {what}"), sys::sendmsg(fd, &[b"x"], MSG_NOSIGNAL));
        }
        record("read on a listener", sys::read(listener, &mut [0; 4]));
        record("write on closed", sys::write(555, b"x"));
        record("read on -1", sys::read(-1, &mut [0; 4]));
    })
    .any_path(),
];

fn flood(side: &mut Side) {
    let end = side.moved();
    let seed = if side.is_client() { 12 } else { 13 };
    let sender = thread::spawn(move || {
        let sent = send_all(end, &pattern(seed, FLOOD_BYTES));
        (sent, sys::shutdown(end.0, libc::SHUT_WR))
    });
    let (data, how) = recv_to_end(end);
    let (sent, shut) = sender.join().expect("the sender");
    record("sent", sent);
    record("shutdown", shut);
    record("received", data);
    record("end", how);
}
