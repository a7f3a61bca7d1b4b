//! Calls that few programs make, and that few libraries think of.

use std::time::Duration;

use libc::{MSG_OOB, SIGUSR1};

use crate::case::*;
use crate::rare::{self, Aio};
use crate::sys::{self, Handler};

const WAYS: [(&str, Aio); 3] =
    [("aio_read", Aio::Plain), ("aio_read64", Aio::Large), ("lio_listio", Aio::List)];

/// Questions and answers, far more than a connection exchanges before it is moved.
const ROUNDS: usize = 300;

/// A message, with how much control data.
fn told(end: End, len: usize, flags: i32) {
    let got = sys::recvmsg(end.0, &[len], flags);
    let got = got.map(|got| {
        let (data, control, flags) = (brief(&got.data), got.control_len, got.flags);
        format!("{data}, control {control}, flags {flags:x}")
    });
    record(format!("recvmsg {len}"), got);
}

/// A line each way.
fn a_line(side: &mut Side, end: End) {
    if side.is_client() {
        end.send(b"a line");
        end.recv_exact(6);
    } else {
        end.recv_exact(6);
        end.send(b"a line");
    }
}

/// Connections go on, `on_the_kernel` however much they are used.
fn used(side: &mut Side, ends: &[End], on_the_kernel: bool) {
    for end in ends {
        for _ in 0..200 {
            if side.is_client() {
                send_all(*end, b"ask").expect("send");
            }
            assert_eq!(recv_exact(*end, 3), Ok(b"ask".to_vec()));
            if !side.is_client() {
                send_all(*end, b"ask").expect("send");
            }
        }
        record("on the ring", on_the_kernel && sys::ringlet_path(end.0) == RING);
    }
}

pub const CASES: &[Case] = &[
    pair(
        "rare/aio",
        "asynchronous reads and writes of libc's threads",
        |a| {
            for (name, way) in WAYS {
                let end = a.moved();
                a.sync();
                record(name, rare::aio_send(end.0, b"from a thread", way));
                end.recv_exact(6);
                end.close();
            }
        },
        |b| {
            for (name, way) in WAYS {
                let end = b.moved();
                b.sync();
                record(name, rare::aio_receive(end.0, 100, way));
                end.send(b"thanks");
                end.recv_to_end();
            }
        },
    ),
    pair(
        "rare/execveat",
        "a program becomes another by execveat, which finds the connection under its number",
        |a| {
            let end = a.moved();
            end.send(b"to the shell\n");
            end.recv_to_end();
        },
        |b| {
            let end = b.moved();
            let command = format!("read line <&{0}; echo \"got: $line\" >&{0}", end.0);
            record("execveat", rare::exec_at("/bin/sh", &["sh", "-c", &command]));
        },
    )
    .steady()
    .each_side(),
    pair(
        "rare/exec_of_the_unwrapped",
        "a program that loads no library with it reads and answers on the connection",
        |a| {
            let end = a.moved();
            end.send(b"to the shell\n");
            end.recv_to_end();
        },
        |b| {
            let end = b.moved();
            let command = format!("read line <&{0}; echo \"got: $line\" >&{0}", end.0);
            record("exec", sys::exec(&["env", "-i", "/bin/sh", "-c", &command]));
        },
    )
    .steady(),
    solo("rare/exec_by_lists", "a program becomes another by lists of arguments, short and long", |_| {
        for many in [false, true] {
            rare::set_environment("WORD", "of its own");
            let child = sys::fork(|| {
                rare::exec_long_list(many);
                127
            });
            record("child", sys::wait_for(child));
        }
    })
    .any_path(),
    pair(
        "rare/fork_around_libc",
        "a child that was forked by the system call itself goes on with a connection, and its parent with another",
        |a| {
            let ends = [a.moved(), a.moved()];
            let right = |end: &End| {
                let answered = |_| send_all(*end, b"ask").is_ok() && recv_exact(*end, 3).is_ok();
                (0..100).all(answered)
            };
            record("answered", (0..4).all(|_| ends.iter().all(right)));
            for end in ends {
                end.shutdown(libc::SHUT_WR);
                end.recv_to_end();
                end.close();
            }
        },
        |b| {
            let ends = [b.moved(), b.moved()];
            let answer = |end: End| {
                let mut bytes = 0;
                while let Ok(got @ [_, ..]) = recv(end, 512, 0).as_deref() {
                    bytes += send_all(end, got).expect("send");
                }
                bytes
            };
            let child = rare::fork_around_libc(|| i32::from(answer(ends[0]) != 1200));
            ends[0].close();
            record("answered", answer(ends[1]));
            ends[1].close();
            record("child", sys::wait_for(child));
        },
    )
    .packets_too(),
    pair(
        "rare/process_in_our_memory",
        "a process that shares a program's memory, but not its descriptors, sends and closes its copy",
        |a| {
            let end = a.moved();
            end.recv_exact(22);
            end.send(b"both");
        },
        |b| {
            let end = b.moved();
            let (child, sent) = rare::send_by_a_process_in_our_memory(end.0, b"by another ");
            record("child", child);
            record("send", sent);
            end.send(b"by the one ");
            end.recv_exact(4);
        },
    ),
    pair(
        "rare/sigset",
        "a handler set by sigset ends a receive with EINTR, and SIG_HOLD blocks the signal",
        |a| {
            let end = a.moved();
            a.sync();
            end.send(b"after the signal");
        },
        |b| {
            let end = b.moved();
            rare::sigset_handler(SIGUSR1);
            let (pid, tid) = (std::process::id() as i32, sys::thread_id());
            let done = std::sync::atomic::AtomicBool::new(false);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    until_asleep(pid, tid);
                    while !done.load(std::sync::atomic::Ordering::SeqCst) {
                        sys::kill_thread(tid, SIGUSR1).expect("tgkill");
                        pause(10);
                    }
                });
                end.recv(1);
                done.store(true, std::sync::atomic::Ordering::SeqCst);
            });
            record("was held", rare::sigset_hold(SIGUSR1));
            sys::kill_thread(tid, SIGUSR1).expect("tgkill");
            record("was held", rare::sigset_hold(SIGUSR1));
            b.sync();
            end.recv_exact(16);
        },
    ),
    pair(
        "rare/fioasync",
        "FIOASYNC brings SIGIO when data comes",
        |a| {
            let end = a.moved();
            a.sync();
            end.send(b"knock");
        },
        |b| {
            let end = b.moved();
            sys::on_signal(libc::SIGIO, Handler::Count, libc::SA_RESTART);
            let pid = std::process::id() as i32;
            record("F_SETOWN", sys::fcntl(end.0, libc::F_SETOWN, pid));
            record("FIOASYNC", sys::ioctl(end.0, 0x5452, 1));
            b.sync();
            until("SIGIO", || sys::handler_runs() > 0);
            end.until_unread(5);
            end.recv(10);
        },
    ),
    pair(
        "rare/recvmmsg_timeout",
        "recvmmsg looks at its time after each message, and tells what is left",
        |a| {
            let end = a.moved();
            end.send(b"onetwothree");
            a.sync();
        },
        |b| {
            let end = b.moved();
            b.sync();
            end.until_unread(11);
            for (time, lens) in [(0, [3, 3, 5]), (3600, [3, 3, 2])] {
                let got = rare::recvmmsg_timeout(end.0, &lens, Duration::from_secs(time));
                record(format!("recvmmsg within {time} s"), got.map(|got| format!("{got:?}")));
            }
            end.close();
        },
    ),
    pair(
        "rare/sockatmark",
        "sockatmark, before the mark and at it",
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
            record("sockatmark", rare::at_mark(end.0));
            b.sync();
            b.sync();
            end.until_unread(2);
            end.until_mask(libc::POLLPRI as u32);
            record("sockatmark", rare::at_mark(end.0));
            end.recv(10);
            record("sockatmark", rare::at_mark(end.0));
            b.sync();
            end.recv_to_end();
        },
    ),
    pair(
        "rare/control_of_tcp",
        "a connection's times and what waits behind a message come beside its bytes once they are asked for",
        |a| {
            let end = a.moved();
            while a.hear() == 1 {
                sys::send(end.0, b"one", 0).expect("sent");
            }
        },
        |b| {
            let end = b.moved();
            let next = |b: &mut Side| {
                b.tell(1);
                end.until_unread(3);
            };
            let asked = sys::setsockopt(end.0, libc::SOL_SOCKET, libc::SO_TIMESTAMPNS, 1);
            record("option", asked);
            // KERNEL: it begins to note when packets come a moment after somebody has asked for that.
            until("a time", || {
                next(b);
                sys::recvmsg(end.0, &[3], 0).expect("comes").control_len != 0
            });
            let asked = sys::setsockopt(end.0, libc::IPPROTO_TCP, libc::TCP_INQ, 1);
            record("option", asked);
            next(b);
            told(end, 2, 0);
            told(end, 2, 0);
            b.tell(0);
        },
    )
    .internet_only()
    .each_side(),
    pair(
        "rare/error_queue",
        "what was sent by buffers of the program's is told once for each call, by poll and MSG_ERRQUEUE; a wait for bytes does not end by it",
        |a| {
            let end = a.moved();
            record("option", sys::setsockopt(end.0, libc::SOL_SOCKET, libc::SO_ZEROCOPY, 1));
            let large = pattern(3, 3 << 20);
            for _ in 0..3 {
                record("send", sys::send(end.0, &large, libc::MSG_ZEROCOPY));
                end.recv_exact(1);
                end.until_mask(ERR);
                told(end, 10, libc::MSG_ERRQUEUE);
                told(end, 10, libc::MSG_ERRQUEUE);
                end.mask();
            }
        },
        |b| {
            let end = b.moved();
            for _ in 0..3 {
                let got = recv_exact(end, 3 << 20).expect("comes");
                record("whole", got == pattern(3, 3 << 20));
                // Meanwhile the other side waits, with something in its queue.
                pause(20);
                end.send(b"k");
            }
        },
    )
    .internet_only()
    .each_side(),
    pair(
        "rare/close_range_unshare",
        "close_range with CLOEXEC closes nothing yet; with UNSHARE it ends connections",
        |a| {
            let end = a.moved();
            end.send(b"unread");
            a.sync();
            end.recv_to_end();
            let end = a.moved();
            end.recv_to_end();
        },
        |b| {
            let first = b.moved();
            b.sync();
            first.until_unread(6);
            record(
                "close_range",
                rare::close_range_flags(first.0, first.0, libc::CLOSE_RANGE_CLOEXEC),
            );
            first.recv(10);
            first.send(b"still open");
            record(
                "close_range",
                rare::close_range_flags(first.0, first.0, libc::CLOSE_RANGE_UNSHARE),
            );
            record("read", sys::read(first.0, &mut [0]));
            let second = b.moved();
            second.send(b"under its number");
            let (first, last) = (second.0, second.0 + 5000);
            record("close_range", rare::close_range_flags(first, last, libc::CLOSE_RANGE_UNSHARE));
        },
    ),
    solo(
        "rare/close_range_of_a_shared_table",
        "close_range with UNSHARE in a process that shares its maker's descriptors closes its own only",
        |_| {
            let (out, into) = sys::pipe().expect("pipe");
            let child = rare::fork_with_files(|| {
                record("close_range", rare::close_range_flags(out, into, libc::CLOSE_RANGE_UNSHARE));
                record("in the child", sys::write(into, b"x"));
                0
            });
            record("child", sys::wait_for(child));
            record("in its maker", sys::write(into, b"x"));
        },
    )
    .any_path(),
    pair(
        "rare/io_uring_of_files",
        "an io_uring that works on files, and on a socket that is none of ringlet's, leaves connections where they are, until it is given one",
        |a| {
            let end = a.moved();
            a.sync();
            a.warm(end);
            a.sync();
            end.send(b"for the ring");
            end.recv_exact(6);
        },
        |b| {
            let end = b.moved();
            let mut ring = rare::Uring::new();
            record("a ring", ring.is_some());
            let file = sys::file_with(b"").expect("a file");
            let mut bytes = *b"to a file";
            if let Some(ring) = &mut ring {
                ring.prepare(rare::URING_WRITE, file, bytes.as_mut_ptr(), bytes.len());
                record("submit", ring.submit(1));
                record("written", ring.result());
                let (near, far) = sys::socketpair(libc::SOCK_DGRAM).expect("socketpair");
                ring.prepare(rare::URING_WRITE, near, bytes.as_mut_ptr(), bytes.len());
                record("submit", ring.submit(1));
                record("sent", ring.result());
                record("datagram", sys::read(far, &mut [0; 20]));
            }
            b.sync();
            b.warm(end);
            let mut bytes = [0; 12];
            if let Some(ring) = &mut ring {
                ring.prepare(rare::URING_RECV, end.0, bytes.as_mut_ptr(), bytes.len());
                record("submit", ring.submit(0));
            }
            b.sync();
            match &mut ring {
                Some(ring) => {
                    ring.submit(1);
                    record("received", ring.result());
                    record("bytes", bytes.to_vec());
                }
                None => end.recv_exact(12),
            }
            end.send(b"thanks");
        },
    ),
    pair(
        "rare/io_uring_in_traffic",
        "an io_uring that is given a connection with bytes unread gets them, and what comes then",
        |a| {
            let end = a.moved();
            a.warm(end);
            end.send(b"unread");
            a.sync();
            // (It waits here, in a call of its connection's.)
            end.recv_exact(2);
            end.send(b"then");
        },
        |b| {
            let end = b.moved();
            b.warm(end);
            b.sync();
            for (bytes, unread) in [(b"unread".len(), true), (b"then".len(), false)] {
                let mut ring = rare::Uring::new();
                let mut got = vec![0; bytes];
                match &mut ring {
                    Some(ring) => {
                        ring.prepare(rare::URING_RECV, end.0, got.as_mut_ptr(), got.len());
                        ring.submit(1);
                        record("received", ring.result());
                        record("bytes", got);
                    }
                    None => end.recv_exact(bytes),
                }
                if unread {
                    end.send(b"ok");
                }
            }
        },
    )
    .any_path()
    .steady(),
    pair(
        "rare/io_uring_of_both_ends",
        "an io_uring that is given one of two ends of this process's own gets what is unread",
        |a| {
            let (near, far) = a.both_ends();
            for unread in [near, far] {
                let other = if unread.0 == near.0 { far } else { near };
                other.send(b"unread");
                let mut got = [0; 6];
                match &mut rare::Uring::new() {
                    Some(ring) => {
                        ring.prepare(rare::URING_RECV, unread.0, got.as_mut_ptr(), got.len());
                        ring.submit(1);
                        record("received", ring.result());
                        record("bytes", got.to_vec());
                    }
                    None => unread.recv_exact(6),
                }
            }
        },
        |_| {},
    )
    .any_path()
    .steady(),
    pair(
        "rare/io_uring_unread_on_both",
        "an io_uring is given a connection whose peer went back to the kernel behind unread bytes: it gets all, or an error",
        |a| {
            let end = a.moved();
            end.send(b"the ring, ");
            end.send_with(b"the kernel", libc::MSG_ZEROCOPY);
            a.sync();
            a.sync();
        },
        |b| {
            let end = b.moved();
            b.sync();
            end.until_unread(20);
            let mut got = [0; 20];
            let all_or_none = match &mut rare::Uring::new() {
                Some(ring) => {
                    ring.prepare(rare::URING_RECV, end.0, got.as_mut_ptr(), got.len());
                    ring.submit(1);
                    match ring.result() {
                        20 => got == *b"the ring, the kernel",
                        result => result < 0,
                    }
                }
                None => sys::recv(end.0, &mut got, libc::MSG_WAITALL) == Ok(20),
            };
            record("all or none", all_or_none);
            b.sync();
        },
    )
    .steady(),
    pair(
        "rare/io_uring_again",
        "liburing is loaded, unloaded and loaded again",
        |_| {
            for _ in 0..3 {
                record("a ring", rare::makes_uring_once());
            }
        },
        |_| {},
    )
    .any_path(),
    pair(
        "rare/io_uring_unseen",
        "a ring that the program has made by system calls of its own is found before a connection is moved",
        |a| {
            let end = a.fresh();
            a.warm(end);
            a.sync();
            end.send(b"for the ring");
            a.sync();
        },
        |b| {
            let ring = rare::own_io_uring();
            record("a ring", ring >= 0);
            let end = b.fresh();
            b.warm(end);
            b.sync();
            b.sync();
            record("read", rare::own_read(end.0, 100));
        },
    )
    .any_path(),
    pair(
        "rare/io_uring",
        "in a program that makes an io_uring, system calls of its own see the connection's bytes",
        |a| {
            let end = a.moved();
            a.sync();
            end.send(b"for the ring");
            a.sync();
            end.recv_exact(6);
        },
        |b| {
            let end = b.moved();
            rare::make_io_uring();
            b.sync();
            b.sync();
            record("read", rare::raw_read(end.0, 100));
            end.send(b"thanks");
        },
    )
    .steady(),
    // Steady: that mode moves a connection as it is accepted, before the program can have made its set.
    pair(
        "rare/epoll_around_libc",
        "a program that waits in an epoll set of its own system calls, and reads by libc's, hears of every message",
        |a| {
            let end = a.fresh();
            let answered = (0..ROUNDS)
                .take_while(|_| send_all(end, b"ask").is_ok() && recv_exact(end, 3).is_ok())
                .count();
            record("answered", answered);
        },
        |b| {
            let end = b.fresh();
            end.set_nonblocking(true);
            let set = rare::raw_epoll(end.0).expect("an epoll set");
            let heard = (0..ROUNDS)
                .take_while(|_| {
                    rare::raw_epoll_wait(set, PATIENCE) == Ok(1)
                        && recv_exact(end, 3) == Ok(b"ask".to_vec())
                        && send_all(end, b"yes").is_ok()
                        && rare::raw_epoll_control(set, libc::EPOLL_CTL_MOD, end.0).is_ok()
                })
                .count();
            record("heard", heard);
        },
    )
    .packets_too()
    .any_path()
    .each_side()
    .steady(),
    pair(
        "rare/linger_without_waiting",
        "a close of a non-blocking connection that lingers returns at once, and what was sent arrives",
        |a| {
            let end = a.moved();
            end.set_nonblocking(true);
            record("SO_LINGER", sys::set_linger(end.0, Some(30)));
            let sent = fill(end).len();
            let began = std::time::Instant::now();
            end.close();
            record("waited", began.elapsed() > Duration::from_secs(25));
            a.tell(sent as i64);
            let end = a.moved();
            record("SO_LINGER", sys::set_linger(end.0, Some(5)));
            record("SO_LINGER", sys::set_linger(end.0, None));
            end.send(b"after all");
            end.close();
            a.sync();
        },
        |b| {
            let end = b.moved();
            let sent = b.hear() as usize;
            let (got, how) = recv_to_end(end);
            record("all arrived", got.len() == sent);
            record("then", how);
            let end = b.moved();
            end.recv_to_end();
            b.sync();
        },
    ),
    pair(
        "rare/setuid",
        "a program that drops its rights goes on with its connection, and makes another",
        |a| {
            let end = a.moved();
            a.sync();
            a_line(a, end);
            let end = a.fresh();
            a_line(a, end);
        },
        |b| {
            let end = b.moved();
            record("setresuid", rare::set_user(65534));
            b.sync();
            a_line(b, end);
            let end = b.fresh();
            a_line(b, end);
        },
    ),
    pair(
        "rare/ktls",
        "a connection that is given TLS by the kernel goes back there, or stays; one that is refused it goes on",
        |a| {
            let (moved, fresh) = (a.moved(), a.fresh());
            let given = a.hear() != 0;
            used(a, &[moved, fresh], given);
        },
        |b| {
            let (moved, fresh) = (b.moved(), b.fresh());
            let mut given = false;
            for end in [moved, fresh] {
                record("TCP_ULP", rare::set_upper_protocol(end.0, "nonsense"));
                let told = rare::set_upper_protocol(end.0, "tls");
                given = told.is_ok();
                record("TCP_ULP", told);
            }
            b.tell(i64::from(given));
            used(b, &[moved, fresh], given);
        },
    )
    .internet_only()
    .each_side(),
    pair(
        "rare/repair",
        "a connection that is repaired is on the kernel; one that may not be goes on",
        |a| {
            let ends = [a.moved(), a.moved()];
            let given = a.hear();
            used(a, &ends[..1], given != 0);
            used(a, &ends[1..], false);
        },
        |b| {
            let ends = [b.moved(), b.moved()];
            let mut given = false;
            let mut repair = |end: End| {
                let set = |value| sys::setsockopt(end.0, libc::IPPROTO_TCP, libc::TCP_REPAIR, value);
                record("TCP_REPAIR on", set(1));
                let on = sys::getsockopt(end.0, libc::IPPROTO_TCP, libc::TCP_REPAIR);
                let is_on = on == Ok(1);
                given |= is_on;
                record("TCP_REPAIR", on);
                if is_on {
                    end.send(b"in no queue");
                }
                record("TCP_REPAIR off", set(0));
            };
            repair(ends[0]);
            record("setresuid", rare::set_user(65534));
            repair(ends[1]);
            b.tell(i64::from(given));
            used(b, &ends[..1], given);
            used(b, &ends[1..], false);
        },
    )
    .internet_only()
    .each_side(),
    pair(
        "rare/chroot",
        "a program that leaves the file system goes on with its connection, and makes another",
        |a| {
            let end = a.moved();
            a.sync();
            a_line(a, end);
            let end = a.fresh();
            (0..20).for_each(|_| a_line(a, end));
        },
        |b| {
            let end = b.moved();
            record("chroot", rare::change_root("/dev"));
            b.sync();
            a_line(b, end);
            let end = b.fresh();
            (0..20).for_each(|_| a_line(b, end));
        },
    ),
];
