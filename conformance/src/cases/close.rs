//! Ends of connections: orderly, half, reset, by a thread beside a waiting one, by death.

use std::thread;
use std::time::Duration;

use libc::{MSG_DONTWAIT, MSG_NOSIGNAL, SHUT_RD, SHUT_RDWR, SHUT_WR, SIGKILL};

use crate::case::*;
use crate::sys;

/// Ways in which a process ends by itself, or lets go of what it does not hand on.
const ENDS: u32 = 4;

/// Dies by SIGKILL once the other side, which has told its process, waits in a call.
fn die_when_awaited(side: &mut Side) {
    let pid = side.hear() as i32;
    until_asleep(pid, pid);
    sys::kill(std::process::id() as i32, SIGKILL).expect("kill");
}

fn sum_of(data: &[u8]) -> i64 {
    data.iter().fold(0, |sum: i64, byte| sum.wrapping_mul(31).wrapping_add(i64::from(*byte)))
}

fn tell_pid(side: &mut Side) {
    side.tell(i64::from(std::process::id()));
}

/// Wakes the peer, which is in `die_when_woken`, and returns once it is dead.
fn wake_to_die(side: &mut Side, end: End) {
    side.hear();
    end.send(b"1");
    until("the peer has died", || mask_of(end) & RDHUP != 0);
}

/// The same, but the connection goes back to the kernel meanwhile, where nothing follows what woke the peer.
fn wake_to_die_and_leave(side: &mut Side, end: End) {
    side.hear();
    end.send(b"1");
    record("option", sys::setsockopt(end.0, libc::SOL_SOCKET, libc::SO_OOBINLINE, 1));
    until("the peer has died", || mask_of(end) & RDHUP != 0);
}

/// What a connection says whose peer has ended in order.
fn after_end(end: End) {
    end.mask();
    end.error();
    end.recv(10);
    end.mask();
    end.shutdown(libc::SHUT_WR);
    end.mask();
}

/// Sends to a peer that has ended in order.
fn send_after_end(end: End) {
    end.send_with(b"lost", MSG_NOSIGNAL);
    end.wait_mask(HUP);
    end.send_with(b"x", MSG_NOSIGNAL);
    end.recv(10);
}

/// A second thread, woken in poll, takes what came and dies. (It is woken through the connection itself, and what woke it is still
/// there when it dies.)
fn die_when_woken(side: &mut Side) {
    let end = side.moved();
    die_when_woken_on(side, end);
}

fn die_when_woken_on(side: &mut Side, end: End) {
    let woken = move || {
        sys::poll(&[(end.0, IN as i16)], -1).expect("poll");
        let _ = recv(end, 1, 0);
        sys::kill(std::process::id() as i32, SIGKILL)
    };
    beside(woken, || tell_pid(side)).expect("kill");
}

/// What a connection says once its peer has reset it.
fn after_reset(end: End) {
    end.recv(10);
    end.recv(10);
    end.send_with(b"x", MSG_NOSIGNAL);
    end.error();
    end.mask();
}

/// Runs `call` in a thread, does `meanwhile` once that thread sleeps, and returns what it returned.
pub fn beside<T: Send + 'static>(
    call: impl FnOnce() -> T + Send + 'static,
    meanwhile: impl FnOnce(),
) -> T {
    let (tell, hear) = std::sync::mpsc::channel();
    let thread = thread::spawn(move || {
        tell.send(sys::thread_id()).expect("the other thread listens");
        call()
    });
    until_asleep(std::process::id() as i32, hear.recv().expect("the thread's number"));
    meanwhile();
    thread.join().expect("the thread")
}

/// More than a connection needs to move.
const TRIPS: u32 = 100;

pub const CASES: &[Case] = &[
    pair(
        "close/orderly",
        "data before a close is read, then the stream ends, again and again",
        |a| {
            let end = a.moved();
            end.send(b"goodbye");
            end.close();
            a.sync();
        },
        |b| {
            let end = b.moved();
            b.sync();
            end.until_mask(IN | RDHUP);
            end.recv(4);
            end.mask();
            end.recv(10);
            end.recv(10);
            end.read(10);
            end.mask();
            end.error();
            end.close();
        },
    )
    .all_families().packets_too()
    .each_side(),
    pair(
        "close/half_by_client",
        "after a client's shutdown(WR) the server still sends 100 KB",
        |a| {
            let end = a.moved();
            end.send(b"request");
            end.shutdown(SHUT_WR);
            end.send_with(b"x", MSG_NOSIGNAL);
            end.recv_to_end();
            end.mask();
            a.sync();
        },
        |b| {
            let end = b.moved();
            end.recv_to_end();
            end.mask();
            end.send_all(&pattern(50, 100_000));
            end.send(b"small");
            end.close();
            b.sync();
        },
    )
    .all_families().packets_too()
    .each_side(),
    pair(
        "close/half_by_server",
        "after a server's shutdown(WR) the client still sends, in many messages",
        |a| {
            let end = a.moved();
            end.recv_to_end();
            for i in 0..500 {
                send_all(end, &pattern(i, 300)).expect("send");
            }
            end.shutdown(SHUT_WR);
            a.sync();
            end.mask();
        },
        |b| {
            let end = b.moved();
            end.send_all(&pattern(51, 70_000));
            end.shutdown(SHUT_WR);
            end.recv_to_end();
            end.until_mask(HUP);
            b.sync();
        },
    ).packets_too()
    .each_side(),
    pair(
        "close/both_at_once",
        "both sides send and close without looking",
        |a| {
            let end = a.moved();
            end.send(b"a's last");
            end.shutdown(SHUT_WR);
            a.sync();
            end.recv_to_end();
            end.until_mask(HUP);
            end.close();
        },
        |b| {
            let end = b.moved();
            end.send(b"b's last");
            end.shutdown(SHUT_WR);
            b.sync();
            end.recv_to_end();
            end.until_mask(HUP);
            end.close();
        },
    ).packets_too(),
    pair(
        "close/write_after_close",
        "the first write after the peer's close is taken, the second is EPIPE",
        |a| {
            let end = a.moved();
            a.sync();
            end.until_mask(RDHUP);
            end.send_with(b"first", MSG_NOSIGNAL);
            end.until_mask(HUP);
            end.send_with(b"second", MSG_NOSIGNAL);
            end.send_with(b"third", MSG_NOSIGNAL);
            end.send_with(b"", MSG_NOSIGNAL);
            end.recv(10);
            end.error();
            end.mask();
        },
        |b| {
            let end = b.moved();
            end.close();
            b.sync();
        },
    ).packets_too()
    .each_side(),
    pair(
        "close/read_after_refused_write",
        "after a write to a closed connection, the error is told once, then the end",
        |a| {
            let end = a.moved();
            a.sync();
            end.wait_mask(RDHUP);
            end.send_with(b"first", MSG_NOSIGNAL);
            end.wait_mask(HUP);
            end.recv(10);
            end.recv(10);
            end.error();
        },
        |b| {
            let end = b.moved();
            end.send(b"unread by a");
            end.close();
            b.sync();
        },
    ),
    pair(
        "close/unread",
        "a close with unread data resets the peer",
        |a| {
            let end = a.moved();
            end.send(b"never read");
            a.sync();
            a.sync();
            end.until_mask(HUP);
            after_reset(end);
        },
        |b| {
            let end = b.moved();
            b.sync();
            end.until_unread(10);
            end.recv(3);
            end.close();
            b.sync();
        },
    )
    .all_families().packets_too()
    .each_side(),
    pair(
        "close/unread_both",
        "a reset peer first reads what it was sent",
        |a| {
            let end = a.moved();
            end.send(b"never read");
            a.sync();
            a.sync();
            end.until_mask(HUP);
            after_reset(end);
        },
        |b| {
            let end = b.moved();
            b.sync();
            end.until_unread(10);
            end.send(b"read later");
            end.close();
            b.sync();
        },
    ).packets_too(),
    pair(
        "close/reset_while_receiving",
        "a close with unread data wakes a waiting receive with ECONNRESET",
        |a| {
            let end = a.moved();
            end.send(b"never read");
            tell_pid(a);
            end.recv(10);
            end.recv(10);
        },
        |b| {
            let end = b.moved();
            end.until_unread(10);
            let pid = b.hear() as i32;
            until_asleep(pid, pid);
            end.close();
        },
    )
    .each_side(),
    pair(
        "close/so_error",
        "SO_ERROR tells a reset once",
        |a| {
            let end = a.moved();
            end.send(b"never read");
            a.sync();
            a.sync();
            end.wait_mask(HUP);
            end.error();
            end.error();
            end.recv(10);
            end.send_with(b"x", MSG_NOSIGNAL);
        },
        |b| {
            let end = b.moved();
            b.sync();
            end.until_unread(10);
            end.close();
            b.sync();
        },
    ).packets_too(),
    pair(
        "close/linger_zero",
        "a close with a linger of zero resets, and data sent before it can still be read",
        |a| {
            let end = a.moved();
            a.sync();
            end.wait_mask(HUP);
            after_reset(end);
        },
        |b| {
            let end = b.moved();
            record("unset", sys::linger(end.0).map(|l| format!("{l:?}")));
            record("set", sys::set_linger(end.0, Some(0)));
            record("get", sys::linger(end.0).map(|l| format!("{l:?}")));
            end.send(b"before");
            end.close();
            b.sync();
        },
    )
    .each_side(),
    pair(
        "close/linger_wait",
        "a close that lingers loses nothing",
        |a| {
            let end = a.moved();
            record("set", sys::set_linger(end.0, Some(5)));
            end.send_all(&pattern(52, 300_000));
            end.close();
        },
        |b| {
            let end = b.moved();
            pause(50);
            end.recv_to_end();
        },
    ),
    pair(
        "close/after_large_send",
        "a close right after a large send delivers all of it",
        |a| {
            let end = a.moved();
            end.send_all(&pattern(53, 3 << 20));
            end.close();
        },
        |b| {
            let end = b.moved();
            let mut all = Vec::new();
            while let Ok(part @ [_, ..]) = recv(end, 50_000, 0).as_deref() {
                all.extend_from_slice(part);
                thread::sleep(Duration::from_micros(300));
            }
            record("received", all);
            end.recv(1);
        },
    ).packets_too(),
    pair(
        "close/exit_after_send",
        "a program that sends 100 KB and exits without a close delivers all of it",
        |a| {
            let end = a.moved();
            end.send_all(&pattern(54, 100_000));
            sys::exit_now(3);
        },
        |b| {
            let end = b.moved();
            pause(100);
            end.recv_to_end();
        },
    ).packets_too()
    .each_side(),
    pair(
        "close/end_after_large_send",
        "children that send 3 MB and end at once, in each way there is, deliver all of it to a reader that is slow",
        |a| {
            for how in 0..ENDS {
                let end = a.moved();
                let child = sys::fork(|| {
                    // (Here too bytes go both ways, by the child.)
                    for _ in 0..20 {
                        end.send(b"asks");
                        end.recv_exact(4);
                    }
                    end.send_all(&pattern(56, 3 << 20));
                    match how {
                        0 => sys::exit_now(0),
                        1 => sys::exit_with_handlers(0),
                        2 => sys::exit_by_call(0),
                        _ => {
                            sys::fcntl(end.0, libc::F_SETFD, libc::FD_CLOEXEC).expect("F_SETFD");
                            sys::exec(&["true"]);
                            127
                        }
                    }
                });
                end.close();
                record("child", sys::wait_for(child));
            }
        },
        |b| {
            for _ in 0..ENDS {
                let end = b.moved();
                for _ in 0..20 {
                    end.recv_exact(4);
                    end.send(b"here");
                }
                let mut all = Vec::new();
                while let Ok(part @ [_, ..]) = recv(end, 50_000, 0).as_deref() {
                    all.extend_from_slice(part);
                    thread::sleep(Duration::from_micros(300));
                }
                record("received", all);
                end.recv(1);
                end.close();
            }
        },
    ),
    pair(
        "close/exit_while_awaited",
        "exit() wakes a waiting receive with the end of the stream",
        |a| {
            let end = a.moved();
            tell_pid(a);
            end.recv(10);
            end.mask();
        },
        |b| {
            b.moved();
            let pid = b.hear() as i32;
            until_asleep(pid, pid);
            sys::exit_with_handlers(4);
        },
    ),
    pair(
        "close/kill_after_send",
        "what a killed program has sent is delivered",
        |a| {
            let end = a.moved();
            end.send_all(&pattern(55, 60_000));
            end.send(b"and gone");
            let _ = sys::kill(std::process::id() as i32, SIGKILL);
        },
        |b| {
            let end = b.moved();
            pause(100);
            end.recv_to_end();
            end.mask();
        },
    ).packets_too(),
    pair(
        "close/kill_while_receiving",
        "the peer's death ends a waiting receive, as the end of the stream",
        |a| {
            let end = a.moved();
            tell_pid(a);
            end.recv(10);
            end.recv(10);
            end.mask();
        },
        |b| {
            b.moved();
            die_when_awaited(b);
        },
    )
    .all_families().packets_too()
    .each_side(),
    pair(
        "close/kill_with_unread",
        "the death of a peer that has not read all is a reset",
        |a| {
            let end = a.moved();
            end.send(b"never read");
            tell_pid(a);
            end.recv(10);
            end.recv(10);
        },
        |b| {
            let end = b.moved();
            end.until_unread(10);
            die_when_awaited(b);
        },
    ).packets_too()
    .each_side(),
    pair(
        "close/kill_while_sending",
        "the peer's death ends a send on a full connection",
        |a| {
            let end = a.moved();
            fill(end);
            tell_pid(a);
            end.send_with(b"x", MSG_NOSIGNAL);
            end.send_with(b"x", MSG_NOSIGNAL);
            end.recv(1);
        },
        |b| {
            b.moved();
            die_when_awaited(b);
        },
    ).packets_too()
    .each_side(),
    pair(
        "close/kill_before_send",
        "the death of a peer is told once, by a send on a full connection that does not wait or by what comes behind it",
        |a| {
            let end = a.moved();
            fill(end);
            a.sync();
            let flags = libc::MSG_DONTWAIT | MSG_NOSIGNAL;
            let sent = loop {
                match sys::send(end.0, b"x", flags) {
                    Err(sys::Errno(libc::EAGAIN)) => pause(2),
                    sent => break sent,
                }
            };
            record("send", sent);
            end.send_with(b"x", MSG_NOSIGNAL);
            end.recv(1);
            end.recv(1);
        },
        |b| {
            b.moved();
            b.sync();
            sys::kill(std::process::id() as i32, SIGKILL).expect("kill");
        },
    ).packets_too()
    .each_side(),
    pair(
        "close/kill_amid_overflow",
        "what a child has sent that finds no more room arrives, though its receiver had gone on reading when it was killed",
        |a| {
            let end = a.moved();
            let child = sys::fork(|| {
                let sent = fill(end);
                a.tell(sent.len() as i64);
                a.tell(sum_of(&sent));
                tell_pid(a);
                let _ = sys::send(end.0, &pattern(3, 16 << 20), MSG_NOSIGNAL);
                0
            });
            end.close();
            let _ = sys::wait_for(child);
        },
        |b| {
            let end = b.moved();
            let (sent, sum, pid) = (b.hear() as usize, b.hear(), b.hear() as i32);
            until_asleep(pid, pid);
            // So much that the sender might be told of room.
            let mut got = recv_exact(end, sent / 4).expect("what was sent");
            sys::kill(pid, SIGKILL).expect("kill");
            let (rest, how) = recv_to_end(end);
            got.extend(rest);
            record("the end", how);
            record("all of it", Ok(got.len() >= sent && sum_of(&got[..sent]) == sum));
        },
    )
    .each_side(),
    pair(
        "close/kill_unread_and_poll_for_room",
        "a peer that dies with bytes unread has reset the connection, for whoever waits for room: by poll, then by a send",
        |a| {
            let end = a.moved();
            fill(end);
            tell_pid(a);
            let found = sys::poll(&[(end.0, libc::POLLOUT)], 30_000);
            // KERNEL: a Unix socket's poller is woken before what its dead peer had not read is freed, so room may come later.
            record("poll", found.map(|(_, events)| i64::from(events[0] & !(libc::POLLOUT as u32))));
            pause(20);
            end.mask();
            end.send_with(b"x", MSG_NOSIGNAL);
            end.recv(10);
        },
        |b| {
            b.moved();
            die_when_awaited(b);
        },
    )
    .each_side(),
    pair(
        "close/kill_beside_wakeup_and_poll",
        "a peer that dies when it has read what woke it has ended in order: by poll, then by all other calls",
        |a| {
            let end = a.moved();
            wake_to_die(a, end);
            after_end(end);
        },
        die_when_woken,
    )
    .each_side(),
    pair(
        "close/kill_beside_wakeup_and_receive",
        "the same, by a receive that waits for it",
        |a| {
            let end = a.moved();
            a.hear();
            end.send(b"1");
            end.recv(10);
            after_end(end);
        },
        die_when_woken,
    )
    .each_side(),
    pair(
        "close/kill_beside_wakeup_and_ask_first",
        "the same, by SO_ERROR before all other calls",
        |a| {
            let end = a.moved();
            let peer = format!("/proc/{}", a.hear());
            end.send(b"1");
            until("the peer is gone", || !std::path::Path::new(&peer).exists());
            end.error();
            // (Over an adapter the end of one that was killed comes a little later.)
            end.wait_mask(RDHUP);
            after_end(end);
        },
        die_when_woken,
    )
    .each_side(),
    pair(
        "close/kill_beside_wakeup_and_overflow",
        "the same, where its last bytes had found no room in the ring, and have arrived",
        |a| {
            let end = a.moved();
            let all = a.hear() as usize;
            record("all of it", recv_exact(end, all).map(|got| got.len() == all));
            a.tell(0);
            wake_to_die(a, end);
            after_end(end);
        },
        |b| {
            let end = b.moved();
            b.tell(fill(end).len() as i64);
            b.hear();
            die_when_woken_on(b, end);
        },
    )
    .each_side(),
    pair(
        "close/kill_beside_wakeup_and_ask",
        "the same, by SO_ERROR and epoll first",
        |a| {
            let end = a.moved();
            wake_to_die(a, end);
            end.error();
            let set = sys::epoll_create().expect("epoll");
            let all = IN | libc::EPOLLOUT as u32 | RDHUP;
            sys::epoll_ctl(set, libc::EPOLL_CTL_ADD, end.0, all, 7).expect("epoll_ctl");
            record("epoll_wait", shown(sys::epoll_wait(set, 4, -1)));
            end.recv(10);
            end.mask();
        },
        die_when_woken,
    )
    .each_side(),
    pair(
        "close/kill_beside_wakeup_and_send",
        "the same, with a send first, which is lost",
        |a| {
            let end = a.moved();
            wake_to_die(a, end);
            send_after_end(end);
        },
        die_when_woken,
    )
    .each_side(),
    pair(
        "close/kill_beside_wakeup_and_return",
        "a peer that dies when it has read what woke it has ended in order, also when the connection was taken back to the kernel",
        |a| {
            let end = a.moved();
            wake_to_die_and_leave(a, end);
            after_end(end);
        },
        die_when_woken,
    )
    .each_side(),
    pair(
        "close/kill_beside_wakeup_return_and_send",
        "the same, with a send first, which is lost",
        |a| {
            let end = a.moved();
            wake_to_die_and_leave(a, end);
            send_after_end(end);
        },
        die_when_woken,
    )
    .each_side(),
    pair(
        "close/kill_while_polling",
        "the peer's death ends poll",
        |a| {
            let end = a.moved();
            tell_pid(a);
            let events = (IN | RDHUP) as i16;
            let got = sys::poll(&[(end.0, events)], -1);
            record("poll", got.map(|(_, masks)| sys::event_names(masks[0])));
            end.recv(1);
        },
        |b| {
            b.moved();
            die_when_awaited(b);
        },
    ),
    pair(
        "close/kill_while_in_epoll",
        "the peer's death ends epoll_wait",
        |a| {
            let end = a.moved();
            let set = sys::epoll_create().expect("epoll");
            sys::epoll_ctl(set, libc::EPOLL_CTL_ADD, end.0, IN | RDHUP, 7).expect("epoll_ctl");
            tell_pid(a);
            record("epoll_wait", shown(sys::epoll_wait(set, 4, -1)));
            end.recv(1);
        },
        |b| {
            b.moved();
            die_when_awaited(b);
        },
    )
    .each_side(),
    pair(
        "close/kill_while_in_select",
        "the peer's death ends select",
        |a| {
            let end = a.moved();
            tell_pid(a);
            let got = sys::select(&[end.0], &[], &[end.0], None);
            let shown = got.map(|s| format!("{} {} {}", s.count, s.read.len(), s.except.len()));
            record("select", shown);
            end.recv(1);
        },
        |b| {
            b.moved();
            die_when_awaited(b);
        },
    ),
    pair(
        "close/kill_in_traffic",
        "a server that dies on its hundredth request: ninety-nine replies, then the end",
        |a| {
            let end = a.moved();
            let mut replies = 0;
            loop {
                let _ = sys::send(end.0, b"request.", MSG_NOSIGNAL);
                match recv_exact(end, 8) {
                    Ok(reply) if reply == b"request." => replies += 1,
                    other => break record("at last", other),
                }
            }
            record("replies", replies);
        },
        |b| {
            let end = b.moved();
            for request in 1..=100 {
                let got = recv_exact(end, 8).expect("recv");
                if request == 100 {
                    let _ = sys::kill(std::process::id() as i32, SIGKILL);
                }
                send_all(end, &got).expect("send");
            }
        },
    ).packets_too()
    .each_side(),
    pair(
        "close/shutdown_rd",
        "shutdown(RD) ends receives, yet data that comes later can be read",
        |a| {
            let end = a.moved();
            a.sync();
            a.sync();
            end.mask();
            end.send(b"all the same");
            a.sync();
            end.recv(4);
        },
        |b| {
            let end = b.moved();
            b.sync();
            end.shutdown(SHUT_RD);
            end.mask();
            end.recv(10);
            b.sync();
            b.sync();
            end.until_unread(12);
            end.recv(20);
            end.recv(20);
            end.send(b"sent");
        },
    )
    // Unix streams end the peer's sends: `unix/shutdown_rd`.
    .internet_only(),
    pair(
        "close/shutdown_rd_unread",
        "shutdown(RD) before the peer has read what was sent loses nothing, and sends go on",
        |a| {
            let end = a.moved();
            a.sync();
            a.sync();
            end.until_unread(9);
            end.recv(20);
            end.send(b"back");
            a.sync();
        },
        |b| {
            let end = b.moved();
            b.sync();
            end.send(b"one");
            end.shutdown(SHUT_RD);
            end.recv(10);
            end.send(b"two");
            end.recv(10);
            end.send(b"six");
            end.error();
            b.sync();
            b.sync();
            end.until_unread(4);
            end.recv(10);
        },
    )
    .internet_only(),
    pair(
        "close/shutdown_rdwr",
        "shutdown(RDWR) ends both directions for both sides",
        |a| {
            let end = a.moved();
            a.sync();
            end.until_mask(RDHUP);
            end.recv(4);
            end.shutdown(SHUT_WR);
            a.sync();
        },
        |b| {
            let end = b.moved();
            end.shutdown(SHUT_RDWR);
            end.mask();
            end.recv(4);
            end.send_with(b"x", MSG_NOSIGNAL);
            b.sync();
            b.sync();
            end.until_mask(HUP);
            end.shutdown(SHUT_RDWR);
        },
    ).packets_too()
    .each_side(),
    pair(
        "close/shutdown_twice",
        "a second shutdown of one direction, and one of a wrong kind",
        |a| {
            let end = a.moved();
            a.sync();
            end.recv_to_end();
        },
        |b| {
            let end = b.moved();
            end.shutdown(3);
            end.shutdown(-1);
            end.shutdown(SHUT_WR);
            end.shutdown(SHUT_WR);
            end.shutdown(SHUT_RD);
            end.mask();
            b.sync();
        },
    ),
    pair(
        "close/shutdown_before_the_move",
        "a shutdown before the connection moves, with data before it under way, ends one direction only",
        |a| {
            let end = a.fresh();
            let data = pattern(90, 8 << 20);
            let sent = sys::send(end.0, &data, libc::MSG_DONTWAIT).expect("send");
            end.shutdown(SHUT_WR);
            a.tell(sent as i64);
            for _ in 0..TRIPS {
                recv_exact(end, 1).expect("recv");
                a.sync();
            }
            a.sync();
            end.recv_to_end();
        },
        |b| {
            let end = b.fresh();
            let sent = b.hear() as usize;
            for _ in 0..TRIPS {
                sys::send(end.0, b"x", 0).expect("send");
                b.sync();
            }
            end.send_all(&pattern(91, 100_000));
            record("all came", recv_exact(end, sent) == Ok(pattern(90, 8 << 20)[..sent].to_vec()));
            end.recv(1);
            // So that whoever asks the kernel only now and then asks.
            pause(20);
            end.send(b"and more");
            end.close();
            b.sync();
        },
    )
    .any_path(),
    solo("close/shutdown_errors", "shutdown of what is not a connection", |s| {
        let plain = sys::socket(libc::AF_INET, libc::SOCK_STREAM).expect("socket");
        let (pipe, _) = sys::pipe().expect("pipe");
        for (what, fd) in [("unconnected", plain), ("pipe", pipe), ("closed", 555), ("-1", -1)] {
            record(format!("shutdown of {what}"), sys::shutdown(fd, SHUT_WR));
            record(format!("close of {what}"), sys::close(fd));
        }
        let (listener, port) = s.listener();
        record("shutdown of a listener", sys::shutdown(listener, SHUT_RDWR));
        let again = sys::socket(libc::AF_INET, libc::SOCK_STREAM).expect("socket");
        record("connect to it", sys::connect(again, s.target(port)));
    })
    .any_path()
    .internet_only(),
    pair(
        "close/beside_receive",
        "a close beside a receiving thread: the receive goes on, then the connection ends",
        |a| {
            let end = a.moved();
            a.sync();
            end.send(b"late");
            end.recv(10);
        },
        |b| {
            let end = b.moved();
            let got = beside(
                move || recv(end, 10, 0),
                || {
                    end.close();
                    b.sync();
                },
            );
            record("recv", got);
            end.recv(10);
        },
    ).packets_too(),
    pair(
        "close/beside_poll",
        "a close beside a polling thread: the poll goes on",
        |a| {
            let end = a.moved();
            a.sync();
            end.send(b"late");
            a.sync();
        },
        |b| {
            let end = b.moved();
            let got = beside(
                move || sys::poll(&[(end.0, libc::POLLIN)], -1),
                || {
                    end.close();
                    b.sync();
                },
            );
            record("poll", got.map(|(_, masks)| sys::event_names(masks[0])));
            end.recv(10);
            b.sync();
        },
    ),
    pair(
        "close/beside_two_polls",
        "a close beside two polling threads: both go on",
        |a| {
            let end = a.moved();
            a.sync();
            end.send(b"x");
            a.sync();
        },
        |b| {
            let end = b.moved();
            let poll = move || sys::poll(&[(end.0, libc::POLLIN)], -1);
            let one = thread::spawn(poll);
            let other = beside(poll, || {
                end.close();
                // So that whoever looks again now and then has looked.
                pause(200);
                b.sync();
            });
            for got in [one.join().expect("the thread"), other] {
                record("poll", got.map(|(_, masks)| sys::event_names(masks[0])));
            }
            b.sync();
        },
    ).packets_too(),
    pair(
        "close/peer_shuts_amid_send",
        "a send that has sent something, and whose peer receives no more, says how much, and raises no signal",
        |a| {
            let end = a.moved();
            a.sync();
            let call = move || sys::send(end.0, &vec![b'x'; 32 << 20], 0);
            let sent = beside(call, || a.sync());
            record("some, not all", sent.is_ok_and(|sent| (1..32 << 20).contains(&sent)));
        },
        |b| {
            let end = b.moved();
            b.sync();
            b.sync();
            end.shutdown(SHUT_RD);
        },
    )
    .unix_only(),
    pair(
        "close/beside_epoll",
        "a close beside a thread in epoll_wait takes the connection out of the set",
        |a| {
            let end = a.moved();
            a.sync();
            end.recv(10);
        },
        |b| {
            let end = b.moved();
            let set = sys::epoll_create().expect("epoll");
            sys::epoll_ctl(set, libc::EPOLL_CTL_ADD, end.0, IN, 7).expect("epoll_ctl");
            let got = beside(
                move || sys::epoll_wait(set, 4, 300),
                || {
                    end.close();
                    b.sync();
                },
            );
            record("epoll_wait", shown(got));
        },
    ).packets_too(),
    pair(
        "close/shutdown_beside_receive",
        "shutdown wakes a receiving thread with the end of the stream",
        |a| {
            let end = a.moved();
            end.recv_to_end();
        },
        |b| {
            let end = b.moved();
            record("recv", beside(move || recv(end, 10, 0), || end.shutdown(SHUT_RDWR)));
            end.recv_with(10, MSG_DONTWAIT);
        },
    ).packets_too()
    .each_side(),
    pair(
        "close/shutdown_rd_beside_receive",
        "shutdown(RD) wakes a receiving thread too",
        |a| {
            let end = a.moved();
            end.recv(4);
        },
        |b| {
            let end = b.moved();
            record("recv", beside(move || recv(end, 10, 0), || end.shutdown(SHUT_RD)));
            end.send(b"fine");
        },
    ),
    pair(
        "close/shutdown_beside_poll",
        "shutdown wakes a polling thread",
        |a| {
            let end = a.moved();
            end.recv_to_end();
        },
        |b| {
            let end = b.moved();
            let call = move || sys::poll(&[(end.0, (IN | RDHUP) as i16)], -1);
            let got = beside(call, || end.shutdown(SHUT_RDWR));
            record("poll", got.map(|(_, masks)| sys::event_names(masks[0])));
        },
    ),
    pair(
        "close/shutdown_beside_send",
        "shutdown(WR) ends a thread's send on a full connection",
        |a| {
            let end = a.moved();
            let sent = fill(end);
            let call = move || sys::send(end.0, b"x", MSG_NOSIGNAL);
            record("send", beside(call, || end.shutdown(SHUT_WR)));
            a.tell(sent.len() as i64);
        },
        |b| {
            let end = b.moved();
            let len = b.hear() as usize;
            let (data, how) = recv_to_end(end);
            record("all arrived", data.len() == len);
            record("end", how);
        },
    ).packets_too(),
    pair(
        "close/two_waiting",
        "the peer's close wakes two threads that receive on one connection",
        |a| {
            let end = a.moved();
            a.sync();
            end.close();
        },
        |b| {
            let end = b.moved();
            let one = thread::spawn(move || recv(end, 4, 0));
            record("the other", beside(move || recv(end, 4, 0), || b.sync()));
            record("one", one.join().expect("the thread"));
        },
    ).packets_too(),
    solo(
        "close/listener_with_waiting",
        "closing a listener resets connections not yet accepted",
        |s| {
            let (listener, port) = s.listener();
            let near = s.dial(port);
            near.send(b"hello?");
            End(listener).close();
            near.until_mask(HUP);
            after_reset(near);
        },
    )
    .any_path(),
];

/// Events with their data, in the order of their data.
pub fn shown(events: sys::R<sys::Events>) -> sys::R<String> {
    events.map(|mut events| {
        events.sort();
        let one = |(data, mask): &(u64, u32)| format!("{data}:{}", sys::event_names(*mask));
        format!("[{}]", events.iter().map(one).collect::<Vec<_>>().join(" "))
    })
}
