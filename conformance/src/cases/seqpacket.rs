//! What only packets have: boundaries, packets of no bytes, short buffers, sizes that are refused, an error before what is unread.

use libc::{
    MSG_DONTWAIT, MSG_EOR, MSG_ERRQUEUE, MSG_MORE, MSG_NOSIGNAL, MSG_OOB, MSG_PEEK, MSG_TRUNC,
    MSG_WAITALL, SHUT_RD, SHUT_WR, SOL_SOCKET,
};

use super::readiness::{ET, Set};
use super::unix::{file, join, receive, send_file, with_child};
use crate::case::*;
use crate::sys::{self, Errno};

/// Sizes around all that matters: to a slot, a record, what the ring takes, what the kernel takes.
const SIZES: &[usize] =
    &[1, 47, 48, 49, 56, 57, 100, 4095, 4096, 16_384, 16_385, 40_000, 131_008, 131_009, 212_960];

/// So many that some looks fall between two steps of the sender's.
const PEEKED_TRIPS: u32 = 5000;

/// recvmsg into buffers of these lengths: the bytes, and whether the packet was longer.
fn message(end: End, lens: &[usize], flags: i32) {
    let got = sys::recvmsg(end.0, lens, flags).map(|got| {
        let cut = if got.flags & MSG_TRUNC != 0 { ", cut" } else { "" };
        format!("{}{cut}, flags {:#x}", brief(&got.data), got.flags & !MSG_TRUNC)
    });
    record(format!("recvmsg {lens:?} with {flags:#x}"), got);
}

/// How long the call says that the packet is.
fn length(end: End, len: usize, flags: i32) {
    record(format!("length by {len} with {flags:#x}"), sys::recv(end.0, &mut vec![0; len], flags));
}

/// Waits until the sender has heard that all is taken.
fn until_taken(end: End) {
    until("all is taken", || sys::ioctl(end.0, libc::TIOCOUTQ, -1) == Ok(0));
}

fn outq(end: End) {
    record("SIOCOUTQ is 0", sys::ioctl(end.0, libc::TIOCOUTQ, -1).map(|n| n == 0));
}

/// Packets of any size, by a number.
fn size_of(numbers: &mut Sequence) -> usize {
    match numbers.below(10) {
        0 => 0,
        1 => numbers.below(60_000),
        2 => 131_000 + numbers.below(20),
        3..=5 => numbers.below(3000),
        _ => numbers.below(100),
    }
}

fn send_at_random(end: End, seed: u64, count: usize) {
    let mut numbers = Sequence::new(seed);
    for number in 0..count {
        let mut data = pattern(seed, size_of(&mut numbers));
        data.iter_mut().zip(number.to_le_bytes()).for_each(|(byte, of)| *byte = of);
        assert_eq!(sys::send(end.0, &data, MSG_NOSIGNAL), Ok(data.len()));
    }
}

/// Receives them, and says how many were as they should be, and the sum of all.
fn receive_at_random(end: End, seed: u64, count: usize) {
    let mut numbers = Sequence::new(seed);
    let (mut right, mut sum) = (0, 0u64);
    for _ in 0..count {
        let got = recv(end, 200_000, 0).expect("recv");
        right += (got.len() == size_of(&mut numbers)) as usize;
        sum = sum.rotate_left(7) ^ checksum(&got);
    }
    record("packets of their size", right);
    record("sum", format!("{sum:016x}"));
}

pub const CASES: &[Case] = &[
    pair(
        "seqpacket/boundaries",
        "each packet is received by itself, whatever its size and the buffer's",
        |a| {
            let end = a.moved();
            for size in SIZES {
                end.send(&pattern(3, *size));
                end.send(b"next");
                a.sync();
            }
            end.send(&[7; 212_961]);
            end.send(b"after a refusal");
            a.sync();
            a.warm(end);
        },
        |b| {
            let end = b.moved();
            for _ in SIZES {
                end.recv(300_000);
                end.recv(300_000);
                b.sync();
            }
            end.recv(300_000);
            b.sync();
            b.warm(end);
        },
    )
    .packets_only()
    .each_side(),
    pair(
        "seqpacket/empty",
        "packets of no bytes arrive, are readable, and are not the end",
        |a| {
            let end = a.moved();
            for _ in 0..3 {
                end.send(b"");
                end.write(b"");
                record("writev of nothing", sys::writev(end.0, &[b"", b""]));
                end.send(b"bytes");
                end.send(b"");
                a.sync();
                outq(end);
                a.sync();
                a.sync();
                until_taken(end);
                outq(end);
                a.warm(end);
            }
            end.send(b"");
            end.shutdown(SHUT_WR);
            a.sync();
            end.recv(1);
        },
        |b| {
            let end = b.moved();
            for _ in 0..3 {
                b.sync();
                end.until_mask(IN);
                end.unread();
                end.recv_with(10, MSG_PEEK);
                b.sync();
                end.recv(10);
                end.read(10);
                end.recv(10);
                end.mask();
                end.unread();
                end.recv(10);
                end.recv_with(10, MSG_DONTWAIT);
                end.mask();
                b.sync();
                b.warm(end);
            }
            b.sync();
            end.until_mask(RDHUP);
            end.recv(10);
            end.recv(10);
            end.close();
        },
    )
    .packets_only()
    .each_side(),
    pair(
        "seqpacket/empty_wakes",
        "a packet of no bytes wakes a receive, a poll and a set that tells of edges",
        |a| {
            let end = a.moved();
            for _ in 0..6 {
                let pid = a.hear() as i32;
                until_asleep(pid, pid);
                end.send(b"");
                a.sync();
            }
            a.warm(end);
        },
        |b| {
            let end = b.moved();
            let set = Set::on(end, IN | ET);
            for way in 0..6 {
                b.tell(i64::from(std::process::id()));
                match way % 3 {
                    0 => end.recv(5),
                    1 => {
                        end.wait_mask(IN);
                        end.recv(5);
                    }
                    _ => {
                        set.expect();
                        end.recv(5);
                        set.expect_none();
                    }
                }
                // What the other ways have told of is no news afterwards.
                let _ = sys::epoll_wait(set.0, 4, 0);
                b.sync();
            }
            b.warm(end);
        },
    )
    .packets_only(),
    pair(
        "seqpacket/short_buffers",
        "what a buffer has no room for is lost, and it is said how long the packet was",
        |a| {
            let end = a.moved();
            for _ in 0..2 {
                for _ in 0..9 {
                    end.send(b"0123456789");
                }
                end.send(&pattern(5, 50_000));
                end.send(b"last");
                a.sync();
                a.warm(end);
            }
        },
        |b| {
            let end = b.moved();
            for _ in 0..2 {
                end.recv(4);
                length(end, 4, MSG_TRUNC);
                length(end, 4, MSG_TRUNC | MSG_PEEK);
                length(end, 0, MSG_TRUNC | MSG_PEEK);
                end.recv(20);
                length(end, 0, 0);
                message(end, &[3, 4], 0);
                message(end, &[3, 0, 4, 3], 0);
                message(end, &[3], MSG_PEEK);
                message(end, &[3], MSG_TRUNC);
                end.recv_with(100, MSG_PEEK);
                record("readv", sys::readv(end.0, &[1, 2]));
                end.read(9);
                length(end, 10, MSG_TRUNC);
                end.recv(20);
                b.sync();
                b.warm(end);
            }
        },
    )
    .packets_only()
    .each_side(),
    pair(
        "seqpacket/peeked_as_it_comes",
        "a peek that looks at the very moment when a packet is sent finds it, or nothing",
        |a| {
            let end = a.moved();
            for trip in 0..PEEKED_TRIPS {
                assert_eq!(sys::send(end.0, &trip.to_le_bytes(), MSG_NOSIGNAL), Ok(4));
                assert_eq!(recv(end, 9, 0).as_deref(), Ok(&trip.to_le_bytes()[..]));
            }
            a.warm(end);
        },
        |b| {
            let end = b.moved();
            for trip in 0..PEEKED_TRIPS {
                let peeked = loop {
                    match recv(end, 9, MSG_PEEK | MSG_DONTWAIT) {
                        Err(Errno(libc::EAGAIN)) => std::thread::yield_now(),
                        found => break found,
                    }
                };
                assert_eq!(peeked.as_deref(), Ok(&trip.to_le_bytes()[..]));
                assert_eq!(recv(end, 9, 0), peeked);
                assert_eq!(sys::send(end.0, &trip.to_le_bytes(), MSG_NOSIGNAL), Ok(4));
            }
            say("all peeked at");
            b.warm(end);
        },
    )
    .packets_only(),
    pair(
        "seqpacket/calls",
        "every call that sends or receives, batches among them",
        |a| {
            let end = a.moved();
            end.write(b"written");
            record("writev", sys::writev(end.0, &[b"two", b"", b" vectors"]));
            record("sendmsg", sys::sendmsg(end.0, &[b"m", b"essage"], 0));
            record("sendmmsg", sys::sendmmsg(end.0, &[b"one", b"", b"three"], 0).map(|n| format!("{n:?}")));
            let many: Vec<Vec<u8>> = (0..300usize).map(|i| pattern(i as u64, i % 5)).collect();
            let parts: Vec<&[u8]> = many.iter().map(Vec::as_slice).collect();
            record("sendmsg of 300", sys::sendmsg(end.0, &parts, 0));
            // A flag that the ring does not know.
            record("sendmsg of 300 by the kernel", sys::sendmsg(end.0, &parts, libc::MSG_ZEROCOPY));
            a.sync();
            end.shutdown(SHUT_WR);
            a.sync();
        },
        |b| {
            let end = b.moved();
            b.sync();
            end.read(100);
            record("readv", sys::readv(end.0, &[4, 100]));
            message(end, &[2, 2, 100], 0);
            let show = |got: Vec<Vec<u8>>| format!("{:?}", got.iter().map(|p| brief(p)).collect::<Vec<_>>());
            record("recvmmsg", sys::recvmmsg(end.0, &[10, 10, 2], 0).map(show));
            message(end, &[7; 200], 0);
            message(end, &[7; 200], 0);
            b.sync();
            record("recvmmsg at the end", sys::recvmmsg(end.0, &[10, 10, 2], 0).map(show));
        },
    )
    .packets_only()
    .each_side(),
    pair(
        "seqpacket/flags",
        "flags that mean nothing here, and those that are refused",
        |a| {
            let end = a.moved();
            end.send_with(b"end of record", MSG_EOR);
            end.send_with(b"more", MSG_MORE);
            end.send(b"waitall");
            end.send(b"no queue of errors");
            a.sync();
            a.sync();
            record("urgent", sys::send(end.0, b"!", MSG_OOB));
            end.send(b"not urgent");
            a.sync();
        },
        |b| {
            let end = b.moved();
            b.sync();
            message(end, &[50], 0);
            message(end, &[50], 0);
            end.recv_with(50, MSG_WAITALL);
            end.recv_with(50, MSG_ERRQUEUE);
            end.recv_with(50, MSG_DONTWAIT);
            end.recv_with(1, MSG_OOB);
            b.sync();
            b.sync();
            end.recv(50);
        },
    )
    .packets_only()
    .each_side(),
    pair(
        "seqpacket/queues",
        "FIONREAD counts the bytes of all packets, SIOCOUTQ is 0 when all is taken",
        |a| {
            let end = a.moved();
            until_taken(end);
            outq(end);
            end.send(b"0123456789");
            end.send(b"abc");
            outq(end);
            a.sync();
            a.sync();
            until_taken(end);
            outq(end);
            a.warm(end);
        },
        |b| {
            let end = b.moved();
            b.sync();
            end.until_unread(13);
            end.unread();
            end.recv(4);
            end.unread();
            end.recv(4);
            end.unread();
            b.sync();
            b.warm(end);
        },
    )
    .packets_only()
    .each_side(),
    pair(
        "seqpacket/limits",
        "SO_SNDBUF limits a packet, whenever it is set",
        |a| {
            let end = a.moved();
            let limit = |bytes| record("SO_SNDBUF", sys::setsockopt(end.0, SOL_SOCKET, libc::SO_SNDBUF, bytes));
            limit(1);
            for size in [4576, 4577, 0, 5000] {
                end.send(&pattern(8, size));
                a.sync();
            }
            limit(10_000);
            for size in [19_968, 19_969] {
                end.send(&pattern(8, size));
                a.sync();
            }
            a.warm(end);
        },
        |b| {
            let end = b.moved();
            for arrives in [true, false, true, false, true, false] {
                if arrives {
                    end.recv(300_000);
                }
                b.sync();
            }
            b.warm(end);
        },
    )
    .packets_only()
    .each_side(),
    pair(
        "seqpacket/at_random",
        "thousands of packets of any size, both ways",
        |a| {
            let end = a.moved();
            send_at_random(end, 11, 1500);
            receive_at_random(end, 12, 1500);
            end.close();
        },
        |b| {
            let end = b.moved();
            receive_at_random(end, 11, 1500);
            send_at_random(end, 12, 1500);
            end.recv_to_end();
        },
    )
    .packets_only()
    .each_side(),
    pair(
        "seqpacket/descriptors",
        "descriptors come with their packet, whatever it holds and whoever has room for it",
        |a| {
            let end = a.moved();
            for _ in 0..3 {
                end.send(b"before");
                send_file(end, b"0123456789", &["cut"]);
                send_file(end, b"", &["with nothing"]);
                send_file(end, b"dropped", &["dropped"]);
                record("a closed one", sys::send_with_fds(end.0, b"never", &[999], 0));
                send_file(end, b"two", &["one", "two"]);
                end.send(b"after");
                a.sync();
                a.warm(end);
            }
        },
        |b| {
            let end = b.moved();
            for _ in 0..3 {
                receive(end, 100, 0);
                receive(end, 4, MSG_PEEK);
                receive(end, 4, 0);
                receive(end, 4, 0);
                end.recv(100);
                receive(end, 100, 0);
                receive(end, 100, 0);
                b.sync();
                b.warm(end);
            }
        },
    )
    .packets_only()
    .each_side(),
    pair(
        "seqpacket/names",
        "a receive tells the address of the other side, of a packet of no bytes too; a send's address is ignored",
        |a| {
            let end = a.moved();
            a.sync();
            let from = |what: &str| {
                let got = sys::recvfrom(end.0, &mut [0; 10], 0);
                record(what, got.map(|(n, address)| format!("{n} bytes, an address of {address}")));
            };
            from("recvfrom");
            from("recvfrom");
            let got = sys::recvmsg(end.0, &[10], 0);
            record("recvmsg's address", got.map(|got| got.name_len));
            record("sendto", sys::sendto(end.0, b"x", 0, ([127, 0, 0, 1], 9).into()));
            a.sync();
            from("recvfrom at the end");
        },
        |b| {
            let end = b.moved();
            end.send(b"hello");
            end.send(b"");
            end.send(b"");
            b.sync();
            let got = sys::recvfrom(end.0, &mut [0; 10], 0);
            record("recvfrom", got.map(|(n, address)| format!("{n} bytes, an address of {address}")));
            end.shutdown(SHUT_WR);
            b.sync();
        },
    )
    .packets_only(),
    pair(
        "seqpacket/closed_unread",
        "a close with packets unread: the error comes first, in one call, then what is unread here",
        |a| {
            for way in 0..4 {
                let end = a.moved();
                end.send(b"unread");
                a.sync();
                a.sync();
                end.mask();
                match way {
                    0 => end.recv(20),
                    1 => end.recv_with(20, MSG_PEEK),
                    2 => end.send_with(b"x", MSG_NOSIGNAL),
                    _ => end.error(),
                }
                end.mask();
                end.recv(3);
                end.recv(20);
                end.recv(20);
                end.send_with(b"x", MSG_NOSIGNAL);
                end.error();
                end.close();
            }
        },
        |b| {
            for _ in 0..4 {
                let end = b.moved();
                end.send(b"farewell");
                end.send(b"");
                b.sync();
                end.until_unread(6);
                end.close();
                b.sync();
            }
        },
    )
    .packets_only()
    .each_side(),
    pair(
        "seqpacket/no_signal",
        "a send to an end that is closed, or receives no more, fails without SIGPIPE",
        |a| {
            let end = a.moved();
            a.sync();
            end.send(b"x");
            end.send(b"");
            end.mask();
            end.close();
            let end = a.moved();
            a.sync();
            end.send(b"x");
            end.recv(10);
            end.close();
            let end = a.moved();
            end.shutdown(SHUT_WR);
            end.send(b"x");
            end.close();
        },
        |b| {
            b.moved().close();
            b.sync();
            let end = b.moved();
            end.shutdown(SHUT_RD);
            end.send(b"still");
            b.sync();
            let last = b.moved();
            last.recv_to_end();
        },
    )
    .packets_only()
    .each_side(),
    pair(
        "seqpacket/back_to_the_kernel",
        "packets that are unread when a connection goes back arrive as they were sent",
        |a| {
            let end = a.moved();
            end.send(b"first");
            end.send(b"");
            end.send(&pattern(21, 40));
            end.send(&pattern(22, 4000));
            end.send(&pattern(23, 60_000));
            record("SO_SNDBUF", sys::setsockopt(end.0, SOL_SOCKET, libc::SO_SNDBUF, 40_000));
            a.sync();
            // The receiver has gone.
            a.sync();
            end.send(b"after");
            end.recv(10);
            a.sync();
        },
        |b| {
            let end = b.moved();
            b.sync();
            end.until_unread(64_045);
            end.recv(3);
            // What the kernel has signals for is to be on the kernel.
            record("O_ASYNC", sys::fcntl(end.0, libc::F_SETFL, libc::O_ASYNC));
            b.sync();
            for _ in 0..5 {
                end.recv(100_000);
            }
            end.send(b"thanks");
            b.sync();
        },
    )
    .packets_only()
    .steady()
    .each_side(),
    pair(
        "seqpacket/sendfile",
        "a file is divided into packets as the kernel does it",
        |a| {
            let end = a.moved();
            let from = file(&"0123456789".repeat(2000));
            let mut offset = 0;
            record("sendfile", sys::sendfile(end.0, from, Some(&mut offset), 20_000));
            end.shutdown(SHUT_WR);
            end.recv(1);
        },
        |b| {
            let end = b.moved();
            loop {
                let got = recv(end, 100_000, 0);
                let over = got.as_ref().is_ok_and(|got| got.is_empty());
                record("recv", got);
                if over {
                    break;
                }
            }
            end.close();
        },
    )
    .packets_only(),
    solo("seqpacket/pair_over_fork", "a pair shared with a child, packets both ways", |s| {
        let (end, child) = with_child(s, |far| {
            for number in 0..2000usize {
                let got = recv(far, 5000, 0).expect("recv");
                assert_eq!(got.len(), number);
                send_all_of_it(far, &got);
            }
            far.recv_to_end();
            0
        });
        let mut right = 0;
        for number in 0..2000usize {
            send_all_of_it(end, &pattern(number as u64, number));
            right += (recv(end, 5000, 0) == Ok(pattern(number as u64, number))) as usize;
        }
        record("answers", right);
        sys::close(end.0).expect("close");
        join(child);
    })
    .packets_only(),
];

fn send_all_of_it(end: End, data: &[u8]) {
    assert_eq!(sys::send(end.0, data, MSG_NOSIGNAL), Ok(data.len()));
}
