//! Signals that arrive while a call waits.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use libc::{MSG_NOSIGNAL, SA_RESTART, SIGPIPE, SIGUSR1};

use crate::case::*;
use crate::sys::{self, Handler, SigSet};

/// Of `while_it_watches`: so many alarms, each after so many messages.
const BURSTS: usize = 20;
const MESSAGES: usize = 40;

/// Runs `call` while another thread interrupts this one again and again, from when it sleeps: a
/// single signal could arrive before the call waits, on the kernel too.
pub fn interrupted<T>(call: impl FnOnce() -> T) -> T {
    interrupted_then(call, || ())
}

/// The same; `then` is done once the handler has run.
fn interrupted_then<T>(call: impl FnOnce() -> T, then: impl FnOnce() + Send) -> T {
    let (pid, tid) = (std::process::id() as i32, sys::thread_id());
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            until_asleep(pid, tid);
            let mut then = Some(then);
            while !done.load(Ordering::SeqCst) {
                sys::kill_thread(tid, SIGUSR1).expect("tgkill");
                pause(10);
                if sys::handler_runs() > 0
                    && let Some(then) = then.take()
                {
                    then();
                }
            }
        });
        let result = call();
        done.store(true, Ordering::SeqCst);
        result
    })
}

fn handled() {
    record("handler ran", sys::handler_runs() > 0);
}

pub const CASES: &[Case] = &[
    pair(
        "signals/jump_out_of_a_wait",
        "a handler leaves a receive (and a poll) by a long jump, and the connection is closed",
        |a| {
            for _ in 0..2 {
                let end = a.moved();
                a.sync();
                end.recv_to_end();
                end.close();
            }
        },
        |b| {
            for polls in [false, true] {
                let end = b.moved();
                let left = sys::left_by_jump(libc::SIGALRM, 20, &mut || {
                    if polls {
                        let _ = sys::poll(&[(end.0, libc::POLLIN)], -1);
                    } else {
                        let _ = sys::recv(end.0, &mut [0; 8], 0);
                    }
                });
                record("left by a jump", left);
                end.close();
                b.sync();
            }
        },
    )
    .each_side(),
    pair(
        "signals/jump_before_the_move",
        "receives are left by long jumps before their connections move, and those are closed: the next one moves",
        |a| {
            for _ in 0..JUMPS {
                let end = a.fresh();
                end.recv_to_end();
                end.close();
            }
            a.moved();
        },
        |b| {
            let mut left = 0;
            for _ in 0..JUMPS {
                let end = b.fresh();
                let mut receive = || _ = sys::recv(end.0, &mut [0; 8], 0);
                left += u32::from(sys::left_by_jump(libc::SIGALRM, 5, &mut receive));
                end.close();
            }
            record("left by a jump", left == JUMPS);
            b.moved();
        },
    ),
    pair(
        "signals/receive",
        "a handler without SA_RESTART ends each receiving call with EINTR",
        |a| {
            a.moved();
        },
        |b| {
            let end = b.moved();
            sys::on_signal(SIGUSR1, Handler::Count, 0);
            record("recv", interrupted(|| recv(end, 4, 0)));
            record("read", interrupted(|| sys::read(end.0, &mut [0; 4])));
            record("readv", interrupted(|| sys::readv(end.0, &[4])));
            record("recvmsg", interrupted(|| sys::recvmsg(end.0, &[4], 0).map(|m| m.data)));
            record("recvfrom", interrupted(|| sys::recvfrom(end.0, &mut [0; 4], 0).map(|r| r.0)));
            record("peek", interrupted(|| recv(end, 4, libc::MSG_PEEK)));
            handled();
        },
    )
    .packets_too()
    .each_side(),
    pair(
        "signals/waitall",
        "a signal ends MSG_WAITALL with the bytes that have come",
        |a| {
            let end = a.moved();
            end.send(b"half");
            a.sync();
        },
        |b| {
            let end = b.moved();
            sys::on_signal(SIGUSR1, Handler::Count, 0);
            b.sync();
            end.until_unread(4);
            record("recv all of 8", interrupted(|| recv(end, 8, libc::MSG_WAITALL)));
            handled();
        },
    ),
    pair(
        "signals/send",
        "a handler without SA_RESTART ends a send on a full connection",
        |a| {
            let end = a.moved();
            sys::on_signal(SIGUSR1, Handler::Count, 0);
            let sent = fill(end);
            record("send", interrupted(|| sys::send(end.0, b"x", 0)));
            record("write", interrupted(|| sys::write(end.0, b"x")));
            record("sendmsg", interrupted(|| sys::sendmsg(end.0, &[b"x"], 0)));
            handled();
            a.tell(sent.len() as i64);
            a.sync();
            let data = pattern(40, 24 << 20);
            let part = interrupted(|| sys::send(end.0, &data, 0)).unwrap_or_default();
            record("a part", part > 0 && part < data.len());
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
    )
    .packets_too(),
    pair(
        "signals/readiness",
        "poll, select and epoll end with EINTR, with SA_RESTART too",
        |a| {
            a.moved();
        },
        |b| {
            let end = b.moved();
            let set = sys::epoll_create().expect("epoll");
            sys::epoll_ctl(set, libc::EPOLL_CTL_ADD, end.0, IN, 1).expect("epoll_ctl");
            let (fds, read, long) = (&[(end.0, libc::POLLIN)][..], &[end.0][..], Some(PATIENCE));
            for flags in [0, SA_RESTART] {
                sys::on_signal(SIGUSR1, Handler::Count, flags);
                record("poll", interrupted(|| sys::poll(fds, -1).map(|(n, _)| n)));
                record("ppoll", interrupted(|| sys::ppoll(fds, long, None).map(|(n, _)| n)));
                record(
                    "select",
                    interrupted(|| sys::select(read, &[], &[], None)).map(|s| s.count),
                );
                let call = || sys::pselect(read, &[], &[], long, None).map(|s| s.count);
                record("pselect", interrupted(call));
                record("epoll_wait", interrupted(|| sys::epoll_wait(set, 4, -1).map(|e| e.len())));
                let call = || sys::epoll_pwait(set, 4, PATIENCE_MS, None).map(|e| e.len());
                record("epoll_pwait", interrupted(call));
                let call = || sys::epoll_wait_ns(set, 4, long).map(|e| e.len());
                record("epoll_pwait2", interrupted(call));
                handled();
            }
        },
    )
    .packets_too()
    .each_side(),
    pair(
        "signals/while_it_watches",
        "poll and epoll_wait end with EINTR soon after the last message, where memory may be watched, with SA_RESTART too",
        |a| {
            let end = a.moved();
            for _ in 0..2 * BURSTS * MESSAGES {
                end.recv_exact(1);
                // What the other end watches for.
                let began = Instant::now();
                while began.elapsed() < Duration::from_micros(100) {}
                end.send(b"x");
            }
        },
        |b| {
            let end = b.moved();
            let set = sys::epoll_create().expect("epoll");
            sys::epoll_ctl(set, libc::EPOLL_CTL_ADD, end.0, IN, 1).expect("epoll_ctl");
            sys::on_signal_bsd(libc::SIGALRM);
            let fds = [(end.0, libc::POLLIN)];
            type Call<'a> = &'a dyn Fn(i32) -> sys::R<usize>;
            let calls: [(&str, Call); 2] = [
                ("poll", &|ms| sys::poll(&fds, ms).map(|(n, _)| n as usize)),
                ("epoll_wait", &|ms| sys::epoll_wait(set, 4, ms).map(|events| events.len())),
            ];
            for (name, call) in calls {
                let mut interrupted = 0;
                for _ in 0..BURSTS {
                    for _ in 0..MESSAGES {
                        end.send(b"x");
                        while call(PATIENCE_MS) != Ok(1) {}
                        end.recv_exact(1);
                    }
                    sys::alarm(Duration::from_micros(50));
                    // (It may be over before the call begins: not often.)
                    interrupted += usize::from(call(200) == Err(sys::Errno(libc::EINTR)));
                }
                record(name, interrupted > BURSTS / 2);
            }
        },
    ),
    pair(
        "signals/one_signal",
        "one signal is enough for a call that sleeps",
        |a| {
            a.moved();
        },
        |b| {
            let end = b.moved();
            let set = sys::epoll_create().expect("epoll");
            sys::epoll_ctl(set, libc::EPOLL_CTL_ADD, end.0, IN, 1).expect("epoll_ctl");
            sys::on_signal(SIGUSR1, Handler::Count, 0);
            let (pid, tid) = (std::process::id() as i32, sys::thread_id());
            let calls: [(&str, &dyn Fn() -> sys::R<i32>); 3] = [
                ("recv", &|| recv(end, 4, 0).map(|got| got.len() as i32)),
                ("poll", &|| sys::poll(&[(end.0, libc::POLLIN)], -1).map(|(n, _)| n)),
                ("epoll_wait", &|| sys::epoll_wait(set, 4, -1).map(|e| e.len() as i32)),
            ];
            for (name, call) in calls {
                thread::scope(|scope| {
                    scope.spawn(|| {
                        until_asleep(pid, tid);
                        sys::kill_thread(tid, SIGUSR1)
                    });
                    record(name, call());
                });
            }
            record("handler runs", sys::handler_runs());
        },
    ),
    pair(
        "signals/restart_receive",
        "with SA_RESTART a receive goes on until data comes",
        |a| {
            let end = a.moved();
            a.hear();
            end.send(b"at last");
        },
        |b| {
            let end = b.moved();
            sys::on_signal(SIGUSR1, Handler::Count, SA_RESTART);
            record("recv", interrupted_then(|| recv(end, 10, 0), || b.tell(0)));
            handled();
        },
    )
    .packets_too()
    .each_side(),
    pair(
        "signals/restart_send",
        "with SA_RESTART a send goes on until there is room",
        |a| {
            let end = a.moved();
            sys::on_signal(SIGUSR1, Handler::Count, SA_RESTART);
            let sent = fill(end);
            a.tell(sent.len() as i64);
            let call = || sys::send(end.0, b"at last", 0);
            record("send", interrupted_then(call, || a.tell(0)));
            handled();
        },
        |b| {
            let end = b.moved();
            let len = b.hear() as usize;
            b.hear();
            record("filling", recv_exact(end, len).map(|got| got.len() == len));
            end.recv_exact(7);
        },
    )
    .packets_too(),
    pair(
        "signals/restart_with_timeout",
        "a receive that has a timeout is not restarted",
        |a| {
            a.moved();
        },
        |b| {
            let end = b.moved();
            sys::on_signal(SIGUSR1, Handler::Count, SA_RESTART);
            record("set", sys::set_timeout(end.0, libc::SO_RCVTIMEO, PATIENCE));
            record("recv", interrupted(|| recv(end, 10, 0)));
            handled();
        },
    ),
    pair(
        "signals/masks",
        "ppoll, pselect and epoll_pwait let a pending signal in, unless something is ready",
        |a| {
            let end = a.moved();
            a.sync();
            end.send(b"x");
            a.sync();
        },
        |b| {
            let end = b.moved();
            let set = sys::epoll_create().expect("epoll");
            sys::epoll_ctl(set, libc::EPOLL_CTL_ADD, end.0, IN, 1).expect("epoll_ctl");
            let (fds, read, long) = (&[(end.0, libc::POLLIN)][..], &[end.0][..], Some(PATIENCE));
            let open = SigSet::empty();
            sys::set_mask(&open.with(SIGUSR1));
            let calls: [(&str, &dyn Fn() -> sys::R<i32>); 3] = [
                ("ppoll", &|| sys::ppoll(fds, long, Some(&open)).map(|(n, _)| n)),
                ("pselect", &|| sys::pselect(read, &[], &[], long, Some(&open)).map(|s| s.count)),
                ("epoll_pwait", &|| {
                    sys::epoll_pwait(set, 4, PATIENCE_MS, Some(&open)).map(|e| e.len() as i32)
                }),
            ];
            for ready in [false, true] {
                if ready {
                    b.sync();
                    b.sync();
                    end.until_unread(1);
                }
                for (name, call) in calls {
                    sys::on_signal(SIGUSR1, Handler::Count, 0);
                    sys::kill_thread(sys::thread_id(), SIGUSR1).expect("tgkill");
                    record("runs while blocked", sys::handler_runs());
                    record(name, call());
                    record("runs after it", sys::handler_runs());
                }
            }
            sys::set_mask(&open);
            record("runs after unblocking", sys::handler_runs());
            let blocked = open.with(SIGUSR1);
            sys::kill_thread(sys::thread_id(), SIGUSR1).expect("tgkill");
            end.recv(1);
            let short = Some(Duration::from_millis(20));
            record("ppoll, blocking it", sys::ppoll(fds, short, Some(&blocked)).map(|(n, _)| n));
        },
    )
    .each_side(),
    pair(
        "signals/handler_sends_elsewhere",
        "a handler sends on another connection while a receive waits",
        |a| {
            let (one, two) = (a.moved(), a.moved());
            two.recv(1);
            one.send(b"go on");
            two.recv(1);
        },
        |b| {
            let (one, two) = (b.moved(), b.moved());
            sys::on_signal(SIGUSR1, Handler::Send(two.0), SA_RESTART);
            record("recv", interrupted(|| recv(one, 10, 0)));
            record("the handler's send", sys::handler_sent());
            two.send(b".");
        },
    )
    .each_side(),
    pair(
        "signals/handler_sends_here",
        "a handler sends on the connection whose receive it interrupts",
        |a| {
            let end = a.moved();
            end.recv(1);
            end.send(b"go on");
        },
        |b| {
            let end = b.moved();
            sys::on_signal(SIGUSR1, Handler::Send(end.0), SA_RESTART);
            record("recv", interrupted(|| recv(end, 10, 0)));
            record("the handler's send", sys::handler_sent());
        },
    ),
    pair(
        "signals/fork_amid_send",
        "a handler that interrupts a send, in the middle, forks; the child's call returns after the parent has gone on",
        |a| {
            let end = a.moved();
            end.recv_exact(LATE_BYTES + 2 * MORE_ROUNDS * LATE_BYTES);
            end.send(b"all");
        },
        |b| {
            let end = b.moved();
            let data = pattern(80, LATE_BYTES);
            let sent = forked_amid(&data, |page| {
                sys::send(end.0, page, MSG_NOSIGNAL)
            }, |_| true, || send_more(end));
            record("send", sent);
            send_more(end);
            end.recv_exact(3);
        },
    )
    .steady(),
    pair(
        "signals/close_amid_send",
        "a handler that interrupts a send, in the middle, closes the connection: nobody looks at memory that is gone",
        |a| {
            let end = a.moved();
            while recv(end, LATE_BYTES, 0).is_ok_and(|got| !got.is_empty()) {}
        },
        |b| {
            let end = b.moved();
            closed_amid(end, &pattern(80, LATE_BYTES), |page| {
                let _ = sys::send(end.0, page, MSG_NOSIGNAL);
            });
        },
    ),
    pair(
        "signals/close_amid_receive",
        "the same of a receive",
        |a| {
            let end = a.moved();
            let _ = send_all(end, &pattern(80, LATE_BYTES));
            a.sync();
            while recv(end, LATE_BYTES, 0).is_ok_and(|got| !got.is_empty()) {}
        },
        |b| {
            let end = b.moved();
            b.sync();
            closed_amid(end, &[0; LATE_BYTES], |page| {
                let _ = sys::recv(end.0, page, 0);
            });
        },
    ),
    pair(
        "signals/fork_amid_poll",
        "a handler that interrupts a poll of many connections forks; what child and parent close is closed",
        |a| {
            let ends: Vec<_> = (0..POLLED_COUNT).map(|_| a.moved()).collect();
            a.sync();
            ends.iter().for_each(|end| end.recv_to_end());
            a.sync();
        },
        |b| {
            let ends: Vec<_> = (0..POLLED_COUNT).map(|_| b.moved()).collect();
            fork_amid_poll(&ends, b);
        },
    ),
    pair(
        "signals/fork_amid_receive",
        "the same of a receive: both have got the bytes",
        |a| {
            let end = a.moved();
            end.send(&pattern(80, LATE_BYTES));
            send_more(end);
            send_more(end);
            end.recv_exact(3);
        },
        |b| {
            let end = b.moved();
            let data = pattern(80, LATE_BYTES);
            end.until_unread(LATE_BYTES);
            let more = || drop(recv_exact(end, MORE_ROUNDS * LATE_BYTES));
            let got = forked_amid(&[0; LATE_BYTES], |page| sys::recv(end.0, page, 0), |page| page == data, more);
            record("recv", got);
            end.recv_exact(MORE_ROUNDS * LATE_BYTES);
            end.send(b"all");
        },
    )
    .steady(),
    pair(
        "signals/handler_during_traffic",
        "signals that land anywhere in busy traffic lose nothing",
        |a| {
            let end = a.moved();
            sys::on_signal(SIGUSR1, Handler::Count, SA_RESTART);
            interrupted_always(|| {
                for i in 0.. {
                    let mine = i >= ROUNDS && sys::handler_runs() > 0;
                    send_all(end, &said(i, mine)).expect("send");
                    let reply = recv_exact(end, 5).expect("recv");
                    assert_eq!(reply[..4], said(i, mine)[..4], "reply to {i}");
                    if mine && reply[4] != 0 {
                        break;
                    }
                }
            });
            handled();
            end.close();
        },
        |b| {
            let end = b.moved();
            sys::on_signal(SIGUSR1, Handler::Count, 0);
            interrupted_always(|| {
                for i in 0.. {
                    let got = recv_exact(end, 5).expect("recv");
                    let mine = sys::handler_runs() > 0;
                    assert_eq!(got[..4], said(i, mine)[..4], "request {i}");
                    send_all(end, &said(i, mine)).expect("send");
                    if mine && got[4] != 0 {
                        break;
                    }
                }
            });
            handled();
            end.recv(1);
        },
    )
    .packets_too(),
    pair(
        "signals/set_again",
        "a handler that a program has from the kernel itself, and sets again, runs",
        |a| {
            a.moved().send(b"moved");
        },
        |b| {
            let end = b.moved();
            sys::on_signal(libc::SIGUSR1, sys::Handler::Count, 0);
            sys::set_again(libc::SIGUSR1);
            sys::kill(std::process::id() as i32, libc::SIGUSR1).expect("kill");
            until("the handler runs", || sys::handler_runs() > 0);
            record("runs", sys::handler_runs().to_string());
            end.recv_exact(5);
        },
    ),
    pair(
        "signals/sigpipe",
        "a write to a closed connection raises SIGPIPE, with MSG_NOSIGNAL it does not",
        |a| {
            let end = a.moved();
            sys::on_signal(SIGPIPE, Handler::Count, 0);
            a.sync();
            end.wait_mask(RDHUP);
            end.send(b"to nobody");
            end.wait_mask(HUP);
            let file = sys::file_with(b"file").expect("a file");
            let calls: [(&str, &dyn Fn() -> sys::R<usize>); 6] = [
                ("send", &|| sys::send(end.0, b"x", 0)),
                ("send without signal", &|| sys::send(end.0, b"x", MSG_NOSIGNAL)),
                ("write", &|| sys::write(end.0, b"x")),
                ("writev", &|| sys::writev(end.0, &[b"x"])),
                ("sendmsg", &|| sys::sendmsg(end.0, &[b"x"], 0)),
                ("sendfile", &|| sys::sendfile(end.0, file, None, 4)),
            ];
            for (name, call) in calls {
                record(name, call());
                record("signals so far", sys::handler_runs());
            }
            sys::on_signal(SIGPIPE, Handler::Ignore, 0);
            record("write, ignoring it", sys::write(end.0, b"x"));
        },
        |b| {
            let end = b.moved();
            end.close();
            b.sync();
        },
    )
    .packets_too()
    .each_side(),
    pair(
        "signals/sigpipe_kills",
        "SIGPIPE as it is by default ends the program",
        |a| {
            let end = a.moved();
            end.shutdown(libc::SHUT_WR);
            say("about to write");
            end.write(b"x");
            say("not reached");
        },
        |b| {
            let end = b.moved();
            end.recv_to_end();
        },
    ),
    pair(
        "signals/sigio",
        "O_ASYNC brings SIGIO when data comes",
        |a| {
            let end = a.moved();
            a.sync();
            end.send(b"knock");
        },
        |b| {
            let end = b.moved();
            sys::on_signal(libc::SIGIO, Handler::Count, SA_RESTART);
            let pid = std::process::id() as i32;
            record("F_SETOWN", sys::fcntl(end.0, libc::F_SETOWN, pid));
            record("F_GETOWN is us", sys::fcntl(end.0, libc::F_GETOWN, 0) == Ok(pid));
            let flags = sys::fcntl(end.0, libc::F_GETFL, 0).expect("F_GETFL");
            record("O_ASYNC", sys::fcntl(end.0, libc::F_SETFL, flags | libc::O_ASYNC));
            b.sync();
            until("SIGIO", || sys::handler_runs() > 0);
            end.until_unread(5);
            end.recv(10);
        },
    )
    .packets_too(),
];

/// More than ends that are passed over.
const JUMPS: u32 = 20;

/// Rounds of traffic at least; they go on until a signal has come to both sides.
const ROUNDS: u32 = 3000;

/// A number, and whether its sender has seen enough.
fn said(number: u32, enough: bool) -> [u8; 5] {
    let [a, b, c, d] = number.to_le_bytes();
    [a, b, c, d, u8::from(enough)]
}

const LATE_BYTES: usize = 300;
const MORE_ROUNDS: usize = 40;
/// What a handler may take that can run at once. (On the kernel it runs when the call is over.)
const HANDLER_MOMENT_MS: u64 = 300;

fn send_more(end: End) {
    for _ in 0..MORE_ROUNDS {
        send_all(end, &pattern(81, LATE_BYTES)).expect("send");
    }
}

/// Makes a call with memory (and what is in it) that comes when a handler has interrupted the call and forked. The parent does `more` once the call has
/// returned there; then the child goes on, and ends after its call: well if what it has then is `right`.
fn forked_amid<T>(
    content: &[u8],
    call: impl FnOnce(&mut [u8]) -> T,
    right: impl Fn(&[u8]) -> bool,
    more: impl FnOnce(),
) -> T {
    let (parent, thread) = (std::process::id(), sys::thread_id());
    let (go_on, tell) = sys::pipe().expect("pipe");
    let page = sys::LatePage::new(content);
    sys::on_signal(SIGUSR1, Handler::Fork(go_on), SA_RESTART);
    let result = thread::scope(|scope| {
        scope.spawn(|| {
            page.await_touch();
            sys::kill_thread(thread, SIGUSR1).expect("tgkill");
            for _ in 0..HANDLER_MOMENT_MS {
                if sys::handler_runs() == 0 || sys::handler_forked() == 0 {
                    pause(1);
                }
            }
            page.provide();
        });
        let result = call(&mut page.bytes()[..content.len()]);
        if std::process::id() != parent {
            sys::exit_now(!right(&page.bytes()[..content.len()]) as i32);
        }
        record("right", right(&page.bytes()[..content.len()]));
        result
    });
    until("the handler has forked", || sys::handler_forked() > 0);
    more();
    sys::write(tell, b"!").expect("write");
    record("child", sys::wait_for(sys::handler_forked()));
    result
}

/// A handler that interrupts a call with memory that comes late closes the connection.
fn closed_amid(end: End, content: &[u8], call: impl FnOnce(&mut [u8])) {
    let thread = sys::thread_id();
    let page = sys::LatePage::new(content);
    sys::on_signal(SIGUSR1, Handler::Close(end.0), SA_RESTART);
    thread::scope(|scope| {
        scope.spawn(|| {
            page.await_touch();
            sys::kill_thread(thread, SIGUSR1).expect("tgkill");
            for _ in 0..HANDLER_MOMENT_MS {
                if sys::handler_sent() == 0 {
                    pause(1);
                }
            }
            page.provide();
        });
        call(&mut page.bytes()[..content.len()]);
    });
    until("the handler has closed it", || sys::handler_sent() > 0);
    record("recv of a closed one", recv(end, 1, 0));
}

/// More than a call notes of what it waits for, where a handler may leave it.
const POLLED_COUNT: usize = 20;

/// A handler that interrupts a poll of many connections forks; the child comes back from it, closes them, and lives on.
fn fork_amid_poll(ends: &[End], side: &mut Side) {
    let (parent, thread) = (std::process::id(), sys::thread_id());
    let (go_on, tell) = sys::pipe().expect("pipe");
    let (closed, has_closed) = sys::pipe().expect("pipe");
    let (over, end_child) = sys::pipe().expect("pipe");
    let close_all = || ends.iter().for_each(|end| sys::close(end.0).expect("close"));
    sys::on_signal(SIGUSR1, Handler::Fork(go_on), 0);
    thread::scope(|scope| {
        scope.spawn(|| {
            until_asleep(parent as i32, thread);
            sys::kill_thread(thread, SIGUSR1).expect("tgkill");
        });
        let polled: Vec<_> = ends.iter().map(|end| (end.0, libc::POLLIN)).collect();
        let result = sys::poll(&polled, -1).map(|(n, _)| n);
        if std::process::id() != parent {
            close_all();
            sys::write(has_closed, b"!").expect("write");
            sys::read(over, &mut [0; 1]).expect("read");
            sys::exit_now(0);
        }
        record("poll", result);
    });
    sys::write(tell, b"!").expect("write");
    sys::read(closed, &mut [0; 1]).expect("read");
    close_all();
    side.sync();
    side.sync();
    sys::write(end_child, b"!").expect("write");
    record("child", sys::wait_for(sys::handler_forked()));
}

/// Runs `work` under a rain of signals.
fn interrupted_always(work: impl FnOnce()) {
    let tid = sys::thread_id();
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::SeqCst) {
                sys::kill_thread(tid, SIGUSR1).expect("tgkill");
                thread::sleep(Duration::from_micros(300));
            }
        });
        work();
        done.store(true, Ordering::SeqCst);
    });
}
