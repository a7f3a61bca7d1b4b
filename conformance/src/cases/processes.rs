//! Connections across fork, exec, and from process to process.

use libc::{FD_CLOEXEC, MSG_NOSIGNAL, SHUT_WR, SIGKILL};

use super::close::beside;
use super::threads::{leave_full, poll_for_room, send_more, wait_for_room};
use crate::case::*;
use crate::rare;
use crate::sys::{self, Fd};

const UNREAD_AT_EXEC: &str = "A program that execs another (or passes the descriptor on) while bytes lie unread in the ring whose \
    sender has ended its direction, or gone on through the kernel behind them: the connection is reset, where the kernel would hand the bytes on.";

const UNREAD_BESIDE: &str = "A program that is started beside such a connection, while the process that starts it still has it: the new program \
    does not get the connection, which goes on.";

const UNSENT_AT_EXEC: &str = "A program that is started beside such a connection, whose peer has left the ring and reads so slowly that what was \
    sent before is not yet in the kernel: the new program does not get the connection, which goes on.";

/// More than the kernel holds for a peer that does not read, but for what was in its buffers before they were made small.
const MUCH_BYTES: usize = 150_000;

/// A connection in which this much was sent and is unread, by a peer that reads from the kernel by now.
fn much_to_send_again(side: &mut Side) -> End {
    let end = side.moved();
    end.send_all(&pattern(73, MUCH_BYTES));
    record("SO_SNDBUF", sys::setsockopt(end.0, libc::SOL_SOCKET, libc::SO_SNDBUF, 1));
    side.sync();
    side.sync();
    end
}

fn receive_sent_again(side: &mut Side) {
    let end = side.moved();
    side.sync();
    // Whatever reads standard input knows nothing of rings.
    sys::dup2(end.0, 0).expect("dup2");
    side.sync();
    side.sync();
    end.recv_exact(MUCH_BYTES);
    end.recv_to_end();
}

/// Asks the echoing peer `times` and says whether all answers were right.
fn rounds(end: End, times: u32) {
    let right = |i: u32| {
        let request = i.to_le_bytes();
        send_all(end, &request) == Ok(4) && recv_exact(end, 4) == Ok(request.to_vec())
    };
    record(format!("{times} rounds"), (0..times).all(right));
}

/// Echoes until the stream ends; returns the bytes.
fn echo_all(end: End) -> usize {
    let mut bytes = 0;
    while let Ok(got @ [_, ..]) = recv(end, 4096, 0).as_deref() {
        bytes += send_all(end, got).expect("send");
    }
    bytes
}

/// A moved connection, some rounds, and an orderly end.
fn asking_client(a: &mut Side) {
    let end = a.moved();
    rounds(end, 300);
    end.send(b"and then");
    end.shutdown(SHUT_WR);
    end.recv_to_end();
}

/// Sends, ends its direction, and waits for the peer's end: nobody can send these bytes again.
fn last_words(a: &mut Side) {
    let end = a.moved();
    end.send(b"the last words");
    end.shutdown(SHUT_WR);
    a.sync();
    end.recv_to_end();
}

/// Sends, ends its direction, and reads what comes back: a client for `cat`.
fn talk_to_cat(end: End) {
    end.send(b"a line\n");
    end.recv_exact(7);
    let data = pattern(70, 200_000);
    end.send_all(&data[..50_000]);
    end.recv_exact(50_000);
    end.shutdown(SHUT_WR);
    end.recv_to_end();
}

/// Puts the connection in place of standard input and output, and becomes `cat`.
fn become_cat(end: End) -> i32 {
    for fd in [0, 1] {
        sys::dup2(end.0, fd).expect("dup2");
    }
    let _ = sys::close(end.0);
    sys::exec(&["cat"]);
    127
}

/// Calls of a program that reads and writes alone, and waits by poll.
const FEW_CALLS: &[libc::c_long] = &[libc::SYS_read, libc::SYS_write, libc::SYS_poll];
const WITH_COPIES: &[libc::c_long] =
    &[libc::SYS_read, libc::SYS_write, libc::SYS_poll, libc::SYS_dup2];
const WITH_SETS: &[libc::c_long] =
    &[libc::SYS_read, libc::SYS_write, libc::SYS_epoll_wait, libc::SYS_epoll_ctl];
const WITH_SOCKETS: &[libc::c_long] = &[
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_socket,
    libc::SYS_connect,
    libc::SYS_accept,
    libc::SYS_accept4,
    libc::SYS_dup2,
];

/// Echoes by read and write until the stream ends, each time after `wait`. The sum of what came, by which its parent knows that it was all.
fn echo_confined(fd: Fd, mut wait: impl FnMut()) -> i32 {
    let (mut buffer, mut sum) = ([0; 512], 0u8);
    loop {
        wait();
        match sys::read(fd, &mut buffer) {
            Ok(0) => return i32::from(sum / 4),
            Ok(n) => {
                sum = buffer[..n].iter().fold(sum, |sum, byte| sum.wrapping_add(*byte));
                let mut sent = 0;
                while sent < n {
                    sent += sys::write(fd, &buffer[sent..n]).unwrap_or(n);
                }
            }
            Err(_) => return 98,
        }
    }
}

/// The same of a connection that is in a set before, and waits there.
fn echo_confined_with_a_set(end: End) -> i32 {
    let set = sys::epoll_create().expect("epoll_create");
    sys::epoll_ctl(set, libc::EPOLL_CTL_ADD, end.0, libc::EPOLLIN as u32, 7).expect("epoll_ctl");
    rare::close_in(rare::Calls::Filter(WITH_SETS));
    let mut wrong = 0;
    let code = echo_confined(end.0, || {
        let told = sys::epoll_wait(set, 4, -1);
        let right = told.is_ok_and(
            |told| matches!(told[..], [(7, events)] if events & libc::EPOLLIN as u32 != 0),
        );
        wrong += i32::from(!right);
    });
    if wrong == 0 { code } else { 97 }
}

/// Takes all that comes, and answers nothing.
fn take_confined(fd: Fd) -> i32 {
    let (mut buffer, mut sum) = ([0; 5], 0u8);
    loop {
        let _ = sys::poll(&[(fd, libc::POLLIN)], -1);
        match sys::read(fd, &mut buffer) {
            Ok(0) => return i32::from(sum / 4),
            Ok(n) => sum = buffer[..n].iter().fold(sum, |sum, byte| sum.wrapping_add(*byte)),
            Err(_) => return 98,
        }
    }
}

/// Sends what is unread when the peer closes itself in; then asks it, and ends.
fn ask_confined(a: &mut Side, end: End) {
    end.send(b"unread before");
    a.sync();
    end.recv_exact(13);
    rounds(end, 300);
    end.shutdown(SHUT_WR);
    end.recv_to_end();
}

/// A child goes on with the connection, and has closed itself in.
fn confine_child(b: &mut Side, end: End, work: impl FnOnce() -> i32) {
    b.sync();
    let child = sys::fork(work);
    end.close();
    join(child);
}

/// The same, when nobody else has the connection any more.
fn confine_heir(b: &mut Side, end: End, work: impl FnOnce() -> i32) {
    b.sync();
    let (over, tell_over) = sys::pipe().expect("pipe");
    let child = sys::fork(|| {
        sys::read(over, &mut [0]).expect("read");
        work()
    });
    end.close();
    sys::write(tell_over, b"!").expect("write");
    join(child);
}

/// Takes so much by poll and read.
fn take_exactly(fd: Fd, bytes: usize) -> Vec<u8> {
    let (mut buffer, mut all) = ([0; 5], Vec::new());
    while all.len() < bytes {
        let ready = sys::poll(&[(fd, libc::POLLIN)], -1);
        match sys::read(fd, &mut buffer[..5.min(bytes - all.len())]) {
            Ok(n @ 1..) if ready.is_ok() => all.extend_from_slice(&buffer[..n]),
            _ => break,
        }
    }
    all
}

/// More than ringlet notes of a family at a time.
const MANY_DEAD: u32 = 100;

/// A child gets all that this process has, and is killed with it.
fn share_with_the_dead() {
    let child = sys::fork(|| {
        pause(u64::MAX);
        0
    });
    sys::kill(child, SIGKILL).expect("kill");
    join(child);
}

fn join(pid: i32) {
    record("child", sys::wait_for(pid));
}

/// While a child only has the connection too, a thread waits for room beside a byte that nobody reads.
fn wait_for_room_beside_a_child(side: &mut Side, wait: fn(End)) {
    let end = side.moved();
    let (over, tell_over) = sys::pipe().expect("pipe");
    let child = sys::fork(|| {
        sys::close(tell_over).expect("close");
        sys::read(over, &mut [0]).map_or(1, |n| n as i32)
    });
    wait_for_room(side, end, 1, wait);
    sys::close(tell_over).expect("close");
    join(child);
    end.close();
}

const ROOM_ROUNDS: u32 = 40;

/// Fills the connection and waits for room, again and again.
fn fill_and_wait(side: &mut Side, end: End) -> i32 {
    for _ in 0..ROOM_ROUNDS {
        let mut sent = 0;
        while let Ok(n) = sys::send(end.0, &[7; 16 << 10], libc::MSG_DONTWAIT) {
            sent += n;
        }
        side.tell(sent as i64);
        let told = sys::poll(&[(end.0, libc::POLLOUT)], -1);
        if told.map_or(true, |(ready, _)| ready != 1) {
            return 1;
        }
    }
    0
}

/// How long a thread that takes a connection into the ring is held for a fork beside it: one that waits for that comes behind it.
const HELD_MS: u128 = 100;

/// A thread takes a connection into the ring, and in the midst of that this one forks. The child sends and receives, then this process.
fn fork_amid_attach(side: &mut Side) {
    use std::sync::atomic::{AtomicBool, Ordering};
    let (forked, over) = (AtomicBool::new(false), AtomicBool::new(false));
    let end = side.fresh();
    let (wait, go_on) = sys::pipe().expect("pipe");
    let (tell, hear) = std::sync::mpsc::channel();
    let child = std::thread::scope(|scope| {
        scope.spawn(|| {
            let (give, take) = std::sync::mpsc::channel();
            let (over, forked) = (&over, &forked);
            scope.spawn(move || {
                let mut tell = Some(tell);
                let amid = |call: &rare::HeldCall| {
                    let Some(tell) = tell.take_if(|_| call.is_about_a_connection()) else { return };
                    tell.send(()).expect("the thread that forks");
                    let since = std::time::Instant::now();
                    while !forked.load(Ordering::SeqCst) && since.elapsed().as_millis() < HELD_MS {
                        pause(1);
                    }
                };
                let is_over = || over.load(Ordering::SeqCst);
                rare::let_go_on(take.recv().expect("a filter"), is_over, amid);
            });
            give.send(rare::hold_calls(&[libc::SYS_memfd_create, libc::SYS_fcntl]))
                .expect("the other thread");
            side.warm(end);
            over.store(true, Ordering::SeqCst);
        });
        // Or nothing of it is shared.
        let _ = hear.recv();
        let child = sys::fork(|| {
            sys::read(wait, &mut [0; 1]).expect("read");
            end.send(b"by the child");
            end.recv_exact(12);
            0
        });
        forked.store(true, Ordering::SeqCst);
        child
    });
    side.sync();
    sys::write(go_on, b"!").expect("write");
    join(child);
    record("echoed", echo_all(end));
    end.close();
}

/// The other end of it.
fn beside_fork_amid_attach(side: &mut Side) {
    let end = side.moved();
    side.sync();
    end.recv_exact(12);
    end.send(b"to the child");
    rounds(end, 100);
    end.shutdown(SHUT_WR);
    end.recv_to_end();
}

/// A thread closes a connection on which another one waits, and forks. The child lives on when that one is done.
fn fork_beside_orphan(end: End, side: &mut Side) {
    let (wait, go_on) = sys::pipe().expect("pipe");
    let mut child = 0;
    let got = beside(
        move || recv(end, 64, 0),
        || {
            end.close();
            child = sys::fork(|| {
                sys::read(wait, &mut [0; 1]).expect("read");
                0
            });
            side.sync();
        },
    );
    record("recv", got);
    side.sync();
    sys::write(go_on, b"!").expect("write");
    join(child);
}

/// How it is called, and what it comes to.
type Start = (&'static str, fn() -> String);

/// In every way in which programs are started, or fail to be.
const STARTS: &[Start] = &[
    ("system", || sys::system("exit 3").to_string()),
    ("popen", || sys::popen("echo shell").map(|(text, code)| format!("{text:?} {code}")).show()),
    ("posix_spawn", || sys::spawn(&["true"], None).map(sys::wait_for).show()),
    ("posix_spawn of nothing", || sys::spawn(&[NOTHING], None).show()),
    ("vfork", || sys::wait_for(sys::vfork_and_close(-1, &["true"]))),
    ("vfork of nothing", || sys::wait_for(sys::vfork_and_close(-1, &[NOTHING]))),
    ("fork", || started(|| sys::exec(&["true"]))),
    ("fork of nothing", || started(|| sys::exec(&[NOTHING]))),
    ("a list", || started(|| rare::exec_list("true"))),
    ("a list of nothing", || started(|| rare::exec_list(NOTHING))),
    ("itself", || sys::exec(&[NOTHING]).show()),
    ("itself by a list", || rare::exec_list(NOTHING).show()),
];

const NOTHING: &str = "/no/such/program";

fn started(exec: fn() -> sys::Errno) -> String {
    sys::wait_for(sys::fork(|| {
        exec();
        127
    }))
}

/// Is a child dead, with all its threads, and not yet waited for?
fn is_over(child: i32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{child}/stat"));
    let threads = std::fs::read_dir(format!("/proc/{child}/task")).map_or(0, Iterator::count);
    stat.is_ok_and(|stat| stat.contains(") Z ")) && threads == 1
}

/// In every way in which a process starts programs, none of which wants the connection.
fn start_programs_beside(end: End) {
    record("system", sys::system("exit 3"));
    record("popen", sys::popen("echo shell").map(|(text, code)| format!("{text:?} {code}")));
    record("posix_spawn", sys::spawn(&["true"], None).map(sys::wait_for));
    record("vfork", sys::wait_for(sys::vfork_and_close(end.0, &["true"])));
    join(sys::fork(|| {
        sys::exec(&["true"]);
        127
    }));
}

/// Writes over all memory that this process shares with its family without having asked for it.
fn spoil_family_memory() {
    let maps = std::fs::read_to_string("/proc/self/maps").expect("maps");
    for line in maps.lines().filter(|line| line.contains("rw-s") && line.contains("/dev/zero")) {
        let (first, rest) = line.split_once('-').expect("a range");
        let end = rest.split_once(' ').expect("a range").0;
        let number = |text| usize::from_str_radix(text, 16).expect("an address");
        let (first, end) = (number(first), number(end));
        sys::overwrite(first, (end - first).min(1 << 20), 0xff);
    }
}

/// Says something on each of two moved connections, when the other side is ready for it.
fn tell_two_in_turn(a: &mut Side) {
    let ends = [a.moved(), a.moved()];
    for end in ends {
        a.sync();
        end.send(b"x");
    }
    a.sync();
}

/// The sender's side of `wait_with_child`.
fn wake_parent_and_child(a: &mut Side) {
    let ends = [a.fresh(), a.fresh()];
    a.sync();
    ends.iter().for_each(|end| a.warm(*end));
    a.sync();
    ends[0].send(b"for the child");
    ends[0].recv(20);
    for _ in 0..50 {
        a.sync();
        ends[1].send(b"x");
    }
    a.sync();
}

/// A child waits on a set beside its parent, which has so many `others`. Does it bring the parent's connection back to the kernel first?
fn wait_with_child(b: &mut Side, others: u32, returns: bool) {
    let ends = [b.fresh(), b.fresh()];
    // Watched before they move, they wake the set itself.
    let set = sys::epoll_create().expect("epoll_create1");
    for (data, end) in (1..).zip(ends) {
        sys::epoll_ctl(set, libc::EPOLL_CTL_ADD, end.0, IN, data).expect("epoll_ctl");
    }
    for _ in 0..others {
        let set = sys::epoll_create().expect("epoll_create1");
        sys::epoll_ctl(set, libc::EPOLL_CTL_ADD, ends[0].0, IN, 1).expect("epoll_ctl");
    }
    b.sync();
    ends.iter().for_each(|end| b.warm(*end));
    record("nothing", sys::epoll_wait(set, 4, 20).map(|told| told.len()));
    let (over, tell_over) = sys::pipe().expect("pipe");
    sys::epoll_ctl(set, libc::EPOLL_CTL_ADD, over, IN, 3).expect("epoll_ctl");
    let (ready, tell_ready) = sys::pipe().expect("pipe");
    let child = sys::fork(|| {
        sys::write(tell_ready, b"!").expect("write");
        let told = sys::epoll_wait(set, 4, 10_000).expect("epoll_wait");
        record("child", format!("{told:?}"));
        ends[0].recv(20);
        ends[0].send(b"from the child");
        if returns {
            record("option", sys::setsockopt(ends[1].0, libc::SOL_SOCKET, libc::SO_OOBINLINE, 1));
        }
        // From now on it takes no notice of what is not for it.
        let parent = std::os::unix::process::parent_id();
        while std::os::unix::process::parent_id() == parent
            && sys::epoll_wait(set, 4, 1000).is_ok_and(|told| told.iter().all(|of| of.0 != 3))
        {
        }
        0
    });
    sys::read(ready, &mut [0]).expect("read");
    b.sync();
    for round in 0..50 {
        b.sync();
        // Without an end: what a time's end would find was never told.
        while sys::epoll_wait(set, 4, -1).expect("epoll_wait").iter().all(|of| of.0 != 2) {
            // The child's may be told here too.
        }
        assert_eq!(recv(ends[1], 4, 0), Ok(b"x".to_vec()), "round {round}");
    }
    b.sync();
    sys::write(tell_over, b"!").expect("write");
    join(child);
}

pub const CASES: &[Case] = &[
    pair(
        "processes/waits_for_room_asleep",
        "a thread polls for room, asleep, beside a byte that nobody reads, while a child has the connection too",
        |a| leave_full(a, |end| end.send(b"y"), false),
        |b| wait_for_room_beside_a_child(b, poll_for_room),
    ),
    pair(
        "processes/sends_asleep",
        "the same for one that sends to a peer that reads slowly",
        |a| leave_full(a, |end| end.send(b"y"), true),
        |b| wait_for_room_beside_a_child(b, send_more),
    ),
    pair(
        "processes/room_beside_a_receiver",
        "a child that polls for room hears of it, though its parent, which receives, takes what wakes them",
        |a| {
            let end = a.moved();
            for _ in 0..ROOM_ROUNDS {
                let mut unread = a.hear() as usize;
                pause(2);
                // (Some of it may still be on its way.)
                while unread > 0 {
                    match recv(end, 1 << 20, libc::MSG_DONTWAIT) {
                        Ok(got) if !got.is_empty() => unread -= got.len(),
                        Err(sys::Errno(libc::EAGAIN)) => pause(1),
                        _ => break,
                    }
                }
            }
            record("all", recv_to_end(end).1.map(|_| ()));
            end.close();
        },
        |b| {
            let end = b.moved();
            // On one processor, where this one has taken it before the other looks.
            rare::take_priority(2);
            let child = sys::fork(|| {
                rare::take_priority(1);
                let code = fill_and_wait(b, end);
                end.shutdown(SHUT_WR);
                code
            });
            end.recv_to_end();
            join(child);
        },
    )
    .each_side(),
    pair(
        "processes/fork_hostile_child",
        "a child that writes over what it shares with its parent harms no connection that the parent makes afterwards",
        |a| {
            a.moved();
            for _ in 0..3 {
                asking_client(a);
                a.sync();
            }
        },
        |b| {
            b.moved();
            let child = sys::fork(|| {
                spoil_family_memory();
                let _ = sys::kill(std::process::id() as i32, SIGKILL);
                0
            });
            join(child);
            for _ in 0..3 {
                let end = b.moved();
                record("echoed", echo_all(end));
                end.close();
                b.sync();
            }
        },
    )
    .each_side(),
    pair(
        "processes/closed_in",
        "a child that shares a moved connection is killed from then on for any call but read, write and poll",
        |a| {
            let end = a.moved();
            ask_confined(a, end);
        },
        |b| {
            let end = b.moved();
            confine_child(b, end, || {
                rare::close_in(rare::Calls::Filter(FEW_CALLS));
                let code = echo_confined(end.0, || {
                    let _ = sys::poll(&[(end.0, libc::POLLIN)], -1);
                });
                let _ = sys::close(end.0);
                code
            });
        },
    )
    .each_side()
    .steady(),
    pair(
        "processes/closed_in_before_it_moves",
        "the same of a connection that was not yet moved, closed in by seccomp",
        |a| {
            a.moved();
            let end = a.fresh();
            ask_confined(a, end);
        },
        |b| {
            b.moved();
            let end = b.fresh();
            confine_child(b, end, || {
                rare::close_in(rare::Calls::FilterBySyscall(FEW_CALLS));
                echo_confined(end.0, || {})
            });
        },
    )
    .each_side()
    .steady(),
    pair(
        "processes/closed_in_strictly",
        "the same in strict mode, where even an end by exit_group kills",
        |a| {
            let end = a.moved();
            ask_confined(a, end);
        },
        |b| {
            let end = b.moved();
            confine_child(b, end, || {
                rare::close_in(rare::Calls::Strict);
                rare::end_thread(echo_confined(end.0, || {}))
            });
        },
    )
    .each_side()
    .steady(),
    pair(
        "processes/closed_in_by_landlock",
        "the same of one that may open no file any more",
        |a| {
            let end = a.moved();
            ask_confined(a, end);
        },
        |b| {
            let end = b.moved();
            confine_child(b, end, || {
                rare::close_in_by_landlock();
                echo_confined(end.0, || {})
            });
        },
    )
    .steady(),
    pair(
        "processes/closed_in_with_a_set",
        "the same, waiting on a set in which the connection was before",
        |a| {
            let end = a.moved();
            ask_confined(a, end);
        },
        |b| {
            let end = b.moved();
            confine_child(b, end, || echo_confined_with_a_set(end));
        },
    )
    .steady(),
    pair(
        "processes/closed_in_with_a_set_beside_a_thread",
        "the same where another thread is, so that the tables stay",
        |a| {
            let end = a.moved();
            ask_confined(a, end);
        },
        |b| {
            let end = b.moved();
            confine_child(b, end, || {
                std::thread::spawn(|| pause(u64::MAX));
                echo_confined_with_a_set(end)
            });
        },
    )
    .steady(),
    pair(
        "processes/closed_in_before_the_last_is_read",
        "the same where the peer has sent, and has ended before, so that nobody sends it again",
        |a| {
            let end = a.moved();
            end.send(b"unread before");
            end.close();
            a.sync();
        },
        |b| {
            let end = b.moved();
            confine_child(b, end, || {
                rare::close_in(rare::Calls::Filter(FEW_CALLS));
                let code = take_confined(end.0);
                let _ = sys::close(end.0);
                code
            });
        },
    )
    .steady(),
    pair(
        "processes/closed_in_while_the_peer_is_busy",
        "the same where the peer has sent, and then makes no call on the connection until that was read",
        |a| {
            let end = a.moved();
            end.send(b"unread before");
            a.sync();
            a.hear();
            end.recv(1);
            for _ in 0..100 {
                end.send(b"then");
                end.recv_exact(4);
            }
            end.close();
        },
        |b| {
            let end = b.moved();
            let (read, tell_read) = sys::pipe().expect("pipe");
            b.sync();
            let (alone, tell_alone) = sys::pipe().expect("pipe");
            let child = sys::fork(|| {
                sys::read(alone, &mut [0]).expect("read");
                rare::close_in(rare::Calls::Filter(WITH_COPIES));
                let copy = 60;
                if sys::dup2(end.0, copy).is_err() || sys::close(end.0).is_err() {
                    return 99;
                }
                if take_exactly(copy, 13) != b"unread before" {
                    return 98;
                }
                let _ = sys::write(tell_read, b"!");
                let _ = sys::write(copy, b"!");
                echo_confined(copy, || {
                    let _ = sys::poll(&[(copy, libc::POLLIN)], -1);
                })
            });
            end.close();
            sys::write(tell_alone, b"!").expect("write");
            sys::read(read, &mut [0]).expect("read");
            b.tell(1);
            join(child);
        },
    )
    .each_side()
    .steady(),
    pair(
        "processes/closed_in_behind_a_change_of_path",
        "the same where the peer has gone on through the kernel behind what is unread in the ring",
        |a| {
            let end = a.moved();
            end.send(b"the ring, ");
            end.send_with(b"the kernel\n", libc::MSG_ZEROCOPY);
            a.sync();
            end.recv(1);
            end.send(b"and more of it");
            end.close();
        },
        |b| {
            let end = b.moved();
            confine_heir(b, end, || {
                rare::close_in(rare::Calls::Filter(FEW_CALLS));
                let first = take_exactly(end.0, 21);
                let _ = sys::write(end.0, b"!");
                let more = take_exactly(end.0, 100);
                i32::from(first != b"the ring, the kernel\n" || more != b"and more of it")
            });
        },
    )
    .each_side()
    .steady(),
    pair(
        "processes/closed_in_and_closes_unread",
        "a child that has closed itself in closes a connection with bytes unread, or ends with them: its peer is told of a reset",
        |a| {
            for _ in 0..2 {
                let end = a.moved();
                end.send(b"never read");
                a.sync();
                end.recv(1);
                end.close();
            }
        },
        |b| {
            for closes in [true, false] {
                let end = b.moved();
                end.until_unread(10);
                confine_heir(b, end, || {
                    rare::close_in(rare::Calls::Filter(FEW_CALLS));
                    if closes {
                        let _ = sys::close(end.0);
                    }
                    0
                });
            }
        },
    )
    .steady(),
    pair(
        "processes/closed_in_and_accepts",
        "a child that has closed itself in accepts connections, and names them anew",
        |a| {
            a.moved();
            let port = a.hear() as u32;
            for _ in 0..3 {
                let end = a.dial(port);
                rounds(end, 300);
                end.shutdown(SHUT_WR);
                end.recv_to_end();
                end.close();
            }
        },
        |b| {
            b.moved();
            let (listener, port) = b.listener();
            b.tell(i64::from(port));
            let child = sys::fork(|| {
                let spare = sys::dup(listener).expect("dup");
                rare::close_in(rare::Calls::Filter(WITH_SOCKETS));
                for _ in 0..3 {
                    let Ok(made) = sys::accept(listener) else { return 96 };
                    let _ = sys::dup2(made, spare);
                    let _ = sys::close(made);
                    echo_confined(spare, || {});
                    let _ = sys::close(spare);
                }
                0
            });
            join(child);
        },
    ),
    pair(
        "processes/inherited_set",
        "a child waits on a set that it has inherited, while its parent waits there too",
        wake_parent_and_child,
        |b| wait_with_child(b, 0, false),
    )
    .packets_too(),
    pair(
        "processes/inherited_set_of_many",
        "the same of a process that has many other sets",
        wake_parent_and_child,
        |b| wait_with_child(b, 40, false),
    )
    .packets_too(),
    pair(
        "processes/inherited_set_and_return",
        "the same, where the child brings a connection back to the kernel that its parent waits for",
        wake_parent_and_child,
        |b| wait_with_child(b, 40, true),
    )
    .packets_too(),
    pair(
        "processes/fork_per_connection",
        "a server forks for each connection, and the parent closes its copy",
        |a| {
            for _ in 0..3 {
                let end = a.fresh();
                a.warm(end);
                rounds(end, 300);
                end.shutdown(SHUT_WR);
                end.recv_to_end();
                a.sync();
            }
        },
        |b| {
            for _ in 0..3 {
                let end = b.fresh();
                let child = sys::fork(|| {
                    b.warm(end);
                    record("echoed", echo_all(end));
                    0
                });
                end.close();
                join(child);
                b.sync();
            }
        },
    )
    .all_families()
    .each_side(),
    pair(
        "processes/fork_hostile_user",
        "a child that has changed its user harms not even the connection that it shares",
        |a| {
            let end = a.moved();
            rounds(end, 300);
            a.sync();
            rounds(end, 300);
            end.shutdown(SHUT_WR);
            end.recv_to_end();
        },
        |b| {
            let end = b.moved();
            for _ in 0..300 {
                let got = recv_exact(end, 4).expect("recv");
                send_all(end, &got).expect("send");
            }
            let child = sys::fork(|| {
                // (Who may not is taken at its word.)
                let _ = rare::set_user(65534);
                spoil_family_memory();
                let _ = sys::kill(std::process::id() as i32, SIGKILL);
                0
            });
            join(child);
            b.sync();
            record("echoed", echo_all(end));
            end.close();
        },
    )
    .each_side(),
    pair(
        "processes/fork_same_user",
        "a child that sets the user that it has already leaves nothing: the connection that it shares stays where it is",
        |a| {
            let end = a.moved();
            rounds(end, 300);
            a.sync();
            rounds(end, 300);
            end.shutdown(SHUT_WR);
            end.recv_to_end();
        },
        |b| {
            let end = b.moved();
            for _ in 0..300 {
                let got = recv_exact(end, 4).expect("recv");
                send_all(end, &got).expect("send");
            }
            let child = sys::fork(|| {
                record("setuid", sys::become_oneself());
                b.tell_path(end);
                0
            });
            join(child);
            b.tell_path(end);
            b.sync();
            record("echoed", echo_all(end));
            end.close();
        },
    ),
    pair(
        "processes/fork_beside_accept",
        "another thread gets a connection while a fork is under way, and the child closes its copy",
        |a| {
            let first = a.fresh();
            a.sync();
            a.warm(first);
            let second = a.moved();
            for _ in 0..3 {
                rounds(first, 100);
                rounds(second, 100);
            }
            first.shutdown(SHUT_WR);
            first.recv_to_end();
            second.shutdown(SHUT_WR);
            second.recv_to_end();
        },
        |b| {
            sys::hold_forks();
            let (child, first) = std::thread::scope(|scope| {
                let worker = scope.spawn(|| sys::during_fork(|| b.fresh().0));
                let child = sys::fork(|| {
                    let _ = sys::close(sys::made_during_fork());
                    0
                });
                (child, End(worker.join().expect("a thread")))
            });
            join(child);
            b.sync();
            b.warm(first);
            let second = b.moved();
            let other = std::thread::spawn(move || {
                let echoed = echo_all(first);
                sys::close(first.0).expect("close");
                echoed
            });
            record("second", echo_all(second));
            second.close();
            record("first", other.join().expect("a thread"));
        },
    )
    .each_side(),
    pair(
        "processes/fork_amid_attach",
        "a fork while another thread takes an accepted connection into the ring: the child has it there too",
        beside_fork_amid_attach,
        fork_amid_attach,
    )
    .each_side(),
    pair(
        "processes/fork_amid_attach_of_client",
        "the same of a connection that was made by connect",
        fork_amid_attach,
        beside_fork_amid_attach,
    )
    .each_side(),
    pair(
        "processes/fork_beside_orphan",
        "a child that is forked while another thread waits on a closed connection does not have it: it ends with that wait",
        |a| {
            let end = a.moved();
            a.sync();
            end.send(b"at last");
            end.recv_to_end();
            a.sync();
        },
        |b| {
            let end = b.moved();
            fork_beside_orphan(end, b);
        },
    ),
    pair(
        "processes/fork_child_takes_over",
        "a child goes on with a moved connection",
        asking_client,
        |b| {
            let end = b.moved();
            let child = sys::fork(|| {
                record("echoed", echo_all(end));
                0
            });
            // Beside the child, which may be done before us.
            let closed = sys::close(end.0);
            join(child);
            record("close", closed);
        },
    )
    .packets_too()
    .each_side(),
    pair(
        "processes/fork_parent_goes_on",
        "a child that only exits does not disturb the parent's connection",
        asking_client,
        |b| {
            let end = b.moved();
            let child = sys::fork(|| {
                pause(30);
                7
            });
            for _ in 0..100 {
                let got = recv_exact(end, 4).expect("recv");
                send_all(end, &got).expect("send");
            }
            join(child);
            record("echoed", echo_all(end));
            end.close();
        },
    ),
    pair(
        "processes/fork_snapshot",
        "round trips go on while children with copies come, live and exit",
        |a| {
            let end = a.moved();
            for _ in 0..4 {
                rounds(end, 500);
                a.sync();
            }
            end.close();
        },
        |b| {
            let end = b.moved();
            let mut children = Vec::new();
            for _ in 0..4 {
                children.push(sys::fork(|| {
                    pause(20);
                    0
                }));
                for _ in 0..500 {
                    let got = recv_exact(end, 4).expect("recv");
                    send_all(end, &got).expect("send");
                }
                b.sync();
            }
            children.into_iter().for_each(join);
            end.recv(4);
        },
    )
    .each_side(),
    pair(
        "processes/fork_last_copy",
        "the peer sees the end only when parent and child have closed",
        |a| {
            let end = a.moved();
            a.sync();
            pause(20);
            end.recv_with(1, libc::MSG_DONTWAIT);
            end.mask();
            a.sync();
            end.recv(20);
            end.recv(20);
        },
        |b| {
            let end = b.moved();
            let (from, to) = sys::pipe().expect("pipe");
            let child = sys::fork(|| {
                sys::read(from, &mut [0; 1]).expect("read");
                end.send(b"the child's last");
                0
            });
            end.close();
            b.sync();
            b.sync();
            sys::write(to, b"!").expect("write");
            join(child);
        },
    )
    .each_side(),
    pair(
        "processes/fork_take_turns",
        "parent and child read and write one connection in turn",
        |a| {
            let end = a.moved();
            for _ in 0..6 {
                end.send(b"abcd");
                end.recv_exact(4);
            }
            end.close();
        },
        |b| {
            let end = b.moved();
            let ((go, tell), (done, told)) =
                (sys::pipe().expect("pipe"), sys::pipe().expect("pipe"));
            let turn = move || {
                let mut got = recv_exact(end, 4).expect("recv");
                got.reverse();
                send_all(end, &got).expect("send");
            };
            let child = sys::fork(|| {
                for _ in 0..3 {
                    sys::read(go, &mut [0; 1]).expect("read");
                    turn();
                    sys::write(told, b"!").expect("write");
                }
                0
            });
            for _ in 0..3 {
                turn();
                sys::write(tell, b"!").expect("write");
                sys::read(done, &mut [0; 1]).expect("read");
            }
            join(child);
            end.recv(1);
        },
    )
    .packets_too()
    .each_side(),
    pair(
        "processes/fork_both_receive",
        "parent and child wait in receives at once: each message goes to one of them",
        |a| {
            let end = a.moved();
            for _ in 0..400 {
                send_all(end, &[1; 8]).expect("send");
                pause(0);
            }
            end.shutdown(SHUT_WR);
        },
        |b| {
            let end = b.moved();
            let (from, to) = sys::pipe().expect("pipe");
            let count = move || recv_to_end(end).0.len() as u32;
            let child = sys::fork(|| {
                sys::write(to, &count().to_le_bytes()).expect("write");
                0
            });
            let mine = count();
            join(child);
            let mut theirs = [0; 4];
            sys::read(from, &mut theirs).expect("read");
            record("together", mine + u32::from_le_bytes(theirs));
        },
    )
    .packets_too()
    .each_side(),
    pair(
        "processes/fork_shares_unread",
        "what is unread at a fork is read once, by whoever comes first",
        |a| {
            let end = a.moved();
            end.send(b"for the child, for the parent");
            a.sync();
            a.sync();
            end.send(b"more");
        },
        |b| {
            let end = b.moved();
            b.sync();
            end.until_unread(29);
            join(sys::fork(|| {
                end.recv(15);
                0
            }));
            end.recv(30);
            b.sync();
            end.recv(30);
        },
    ),
    pair(
        "processes/fork_shares_shutdown",
        "a child's shutdown is the parent's",
        |a| {
            let end = a.moved();
            end.recv_to_end();
            end.send(b"one way");
        },
        |b| {
            let end = b.moved();
            join(sys::fork(|| {
                end.send(b"from the child");
                end.shutdown(SHUT_WR);
                0
            }));
            end.send_with(b"x", MSG_NOSIGNAL);
            end.recv_exact(7);
        },
    )
    .packets_too(),
    pair(
        "processes/fork_child_killed",
        "a child that serves a connection is killed: the peer sees the end",
        |a| {
            let end = a.moved();
            rounds(end, 100);
            a.sync();
            end.recv(4);
        },
        |b| {
            let end = b.moved();
            let child = sys::fork(|| {
                echo_all(end);
                0
            });
            end.close();
            b.sync();
            sys::kill(child, SIGKILL).expect("kill");
            join(child);
        },
    )
    .each_side(),
    pair(
        "processes/sharer_killed",
        "a child that shared the connection was killed: what its parent sent before it closes it, or ends, arrives",
        |a| {
            let end = much_to_send_again(a);
            (0..MANY_DEAD).for_each(|_| share_with_the_dead());
            end.close();
            a.sync();
            let end = much_to_send_again(a);
            join(sys::fork(|| {
                share_with_the_dead();
                sys::exit_with_handlers(0)
            }));
            end.close();
            a.sync();
            let _end = much_to_send_again(a);
            share_with_the_dead();
            a.sync();
            sys::exit_with_handlers(0);
        },
        |b| (0..3).for_each(|_| receive_sent_again(b)),
    )
    .steady(),
    pair(
        "processes/sharer_killed_unread",
        "a child that shared the connection was killed, and its parent closes it with bytes unread",
        |a| {
            let end = a.moved();
            end.send(b"unread");
            a.sync();
            end.recv_to_end();
        },
        |b| {
            let end = b.moved();
            share_with_the_dead();
            end.wait_mask(IN);
            end.close();
            b.sync();
        },
    )
    .all_families()
    .packets_too(),
    pair(
        "processes/daemonise",
        "a server detaches by two forks and goes on with its connection",
        asking_client,
        |b| {
            let end = b.moved();
            let (from, to) = sys::pipe().expect("pipe");
            let child = sys::fork(|| {
                sys::fork(|| {
                    record("echoed", echo_all(end));
                    sys::write(to, b"!").expect("write");
                    0
                });
                0
            });
            end.close();
            let ended = sys::wait_for(child);
            sys::read(from, &mut [0; 1]).expect("read");
            record("child", ended);
        },
    ),
    pair(
        "processes/prefork",
        "two workers accept on one listener that they inherited",
        |a| {
            for _ in 0..6 {
                let port = a.hear() as u32;
                let end = a.dial(port);
                rounds(end, 200);
                end.shutdown(SHUT_WR);
                end.recv_to_end();
                end.close();
                a.sync();
            }
            a.sync();
        },
        |b| {
            let (listener, port) = b.listener();
            let workers = [0, 1].map(|_| {
                sys::fork(|| {
                    loop {
                        let end = End(sys::accept(listener).expect("accept"));
                        echo_all(end);
                        sys::close(end.0).expect("close");
                    }
                })
            });
            for _ in 0..6 {
                b.tell(i64::from(port));
                b.sync();
            }
            for worker in workers {
                sys::kill(worker, SIGKILL).expect("kill");
                join(worker);
            }
            b.sync();
        },
    )
    .packets_too()
    .any_path()
    .each_side(),
    pair(
        "processes/prefork_epoll",
        "two workers, each with its own set that watches the inherited listener",
        |a| {
            let port = a.hear() as u32;
            for _ in 0..8 {
                let ends = [a.dial(port), a.dial(port), a.dial(port)];
                for end in ends {
                    rounds(end, 100);
                }
                for end in ends {
                    rounds(end, 10);
                    end.shutdown(SHUT_WR);
                    end.recv_to_end();
                    end.close();
                }
            }
            a.sync();
        },
        |b| {
            let (listener, port) = b.listener();
            End(listener).set_nonblocking(true);
            let workers = [0, 1].map(|_| sys::fork(|| serve_by_epoll(listener)));
            b.tell(i64::from(port));
            b.sync();
            for worker in workers {
                sys::kill(worker, SIGKILL).expect("kill");
                join(worker);
            }
        },
    )
    .any_path()
    .each_side(),
    pair(
        "processes/fork_with_a_set",
        "a child's end does not disturb the parent's epoll set",
        |a| {
            let end = a.moved();
            for _ in 0..2 {
                a.sync();
                end.send(b"x");
            }
        },
        |b| {
            let end = b.moved();
            let set = sys::epoll_create().expect("epoll");
            sys::epoll_ctl(set, libc::EPOLL_CTL_ADD, end.0, IN, 5).expect("epoll_ctl");
            let wait = || super::close::shown(sys::epoll_wait(set, 4, PATIENCE_MS));
            b.sync();
            record("epoll_wait", wait());
            end.recv(4);
            join(sys::fork(|| 0));
            b.sync();
            record("epoll_wait", wait());
            end.recv(4);
        },
    ),
    // ---- exec ----
    pair(
        "processes/exec_fresh",
        "a connection that carried nothing becomes cat's standard input and output",
        |a| talk_to_cat(a.fresh()),
        |b| {
            let end = b.fresh();
            let child = sys::fork(|| become_cat(end));
            end.close();
            join(child);
        },
    )
    .steady()
    .any_path()
    .each_side(),
    pair(
        "processes/exec_before_a_look",
        "head reads what came before the process that accepted the connection has looked at it",
        |a| {
            let end = a.fresh();
            for _ in 0..8 {
                end.send(b"greeting ");
            }
            a.sync();
            a.sync();
        },
        |b| {
            let end = b.fresh();
            b.sync();
            join(sys::fork(|| {
                sys::dup2(end.0, 0).expect("dup2");
                sys::exec(&["head", "-c", "72"]);
                127
            }));
            b.sync();
        },
    )
    .any_path(),
    pair(
        "processes/exec_moved",
        "a moved connection becomes cat's standard input and output",
        |a| {
            let end = a.moved();
            a.sync();
            talk_to_cat(end);
        },
        |b| {
            let end = b.moved();
            let child = sys::fork(|| become_cat(end));
            end.close();
            b.sync();
            join(child);
        },
    )
    .packets_too()
    .steady()
    .all_families()
    .each_side(),
    pair(
        "processes/exec_unread",
        "cat reads what was unread in a moved connection when it was started",
        |a| {
            let end = a.moved();
            end.send(b"early ");
            a.sync();
            a.sync();
            end.send(b"late\n");
            end.recv_exact(11);
            end.shutdown(SHUT_WR);
            end.recv_to_end();
        },
        |b| {
            let end = b.moved();
            b.sync();
            end.until_unread(6);
            let child = sys::fork(|| become_cat(end));
            end.close();
            b.sync();
            join(child);
        },
    )
    .packets_too()
    .steady(),
    pair(
        "processes/exec_unread_on_both",
        "head reads what was unread in a connection whose peer went back to the kernel by itself",
        |a| {
            let end = a.moved();
            end.send(b"the ring, ");
            end.send_with(b"the kernel\n", libc::MSG_ZEROCOPY);
            a.sync();
            a.sync();
        },
        |b| {
            let end = b.moved();
            b.sync();
            end.until_unread(21);
            join(sys::fork(|| {
                sys::dup2(end.0, 0).expect("dup2");
                sys::exec(&["head", "-c", "21"]);
                127
            }));
            b.sync();
        },
    )
    .steady()
    .differs(&[
        Difference { kernel: "the ring, the kernel", ringlet: "", sentence: UNREAD_AT_EXEC },
        Difference {
            kernel: "child = exit 0",
            ringlet: "child = exit 1",
            sentence: UNREAD_AT_EXEC,
        },
    ]),
    pair(
        "processes/exec_unread_after_option",
        "the same, of a connection that an option had brought to the kernel before",
        |a| {
            let end = a.moved();
            end.send(b"the ring, ");
            end.send_with(b"the kernel\n", libc::MSG_ZEROCOPY);
            a.sync();
            end.shutdown(SHUT_WR);
            a.sync();
        },
        |b| {
            let end = b.moved();
            b.sync();
            end.until_unread(21);
            record("SO_RCVLOWAT", sys::setsockopt(end.0, libc::SOL_SOCKET, libc::SO_RCVLOWAT, 2));
            b.sync();
            join(sys::fork(|| {
                sys::dup2(end.0, 0).expect("dup2");
                sys::exec(&["head", "-c", "21"]);
                127
            }));
        },
    )
    .steady()
    .differs(&[
        Difference { kernel: "the ring, the kernel", ringlet: "", sentence: UNREAD_AT_EXEC },
        Difference {
            kernel: "child = exit 0",
            ringlet: "child = exit 1",
            sentence: UNREAD_AT_EXEC,
        },
    ]),
    pair(
        "processes/exec_unread_after_close",
        "cat reads what was unread in a connection that its peer has closed",
        |a| {
            let end = a.moved();
            end.send(b"sent before the close\n");
            end.close();
            a.sync();
        },
        |b| {
            let end = b.moved();
            b.sync();
            end.wait_mask(RDHUP);
            join(sys::fork(|| {
                sys::dup2(end.0, 0).expect("dup2");
                sys::exec(&["cat"]);
                127
            }));
        },
    )
    .steady()
    .differs(&[
        Difference { kernel: "sent before the close", ringlet: "", sentence: UNREAD_AT_EXEC },
        Difference {
            kernel: "child = exit 0",
            ringlet: "child = exit 1",
            sentence: UNREAD_AT_EXEC,
        },
    ]),
    pair(
        "processes/exec_unread_by_peer",
        "what was sent before the exec arrives before what cat sends",
        |a| {
            let end = a.moved();
            a.sync();
            end.send(b"and cat's");
            end.shutdown(SHUT_WR);
            a.sync();
            end.recv_to_end();
        },
        |b| {
            let end = b.moved();
            end.send_all(&pattern(71, 70_000));
            b.sync();
            b.sync();
            let child = sys::fork(|| become_cat(end));
            end.close();
            join(child);
        },
    )
    .steady()
    .differs(&[
        Difference {
            kernel: "recv to the end = 70009 bytes, sum 4edb06ef9f164ffc, then 0",
            ringlet: "recv to the end = 70000 bytes, sum 786c1c2607daf669, then ECONNRESET",
            sentence: UNREAD_AT_EXEC,
        },
        Difference {
            kernel: "child = exit 0",
            ringlet: "child = exit 1",
            sentence: UNREAD_AT_EXEC,
        },
    ]),
    pair(
        "processes/exec_amid_sent_again",
        "what a program that is started beside the connection says does not come before what was sent, and finds no room in the kernel",
        |a| {
            let end = much_to_send_again(a);
            let (started, starts) = sys::pipe().expect("pipe");
            let child = sys::fork(|| {
                let command = format!("trap '' PIPE; echo beside >&{}", end.0);
                sys::exec(&["sh", "-c", &command]);
                127
            });
            let _ = sys::close(starts);
            // It ends when the other program begins.
            record("started", sys::read(started, &mut [0]));
            a.sync();
            join(child);
            end.send(b"the end");
            end.shutdown(SHUT_WR);
        },
        receive_sent_again,
    )
    .steady()
    .differs(&[
        Difference { kernel: "child = exit 0", ringlet: "child = exit 1", sentence: UNSENT_AT_EXEC },
        Difference {
            kernel: "recv to the end = 14 \"beside\\\\nthe end\", then 0",
            ringlet: "recv to the end = 7 \"the end\", then 0",
            sentence: UNSENT_AT_EXEC,
        },
    ]),
    pair(
        "processes/exec_list_amid_sent_again",
        "what was sent arrives though its sender became another program, by a list, before the kernel had room for it",
        |a| {
            let end = much_to_send_again(a);
            sys::fcntl(end.0, libc::F_SETFD, FD_CLOEXEC).expect("F_SETFD");
            a.sync();
            record("execlp", rare::exec_list("true"));
        },
        receive_sent_again,
    )
    .steady(),
    pair(
        "processes/exec_beside_sent_again",
        "a connection ends in order though another program was started while what was sent found no room in the kernel",
        |a| {
            let end = much_to_send_again(a);
            sys::fcntl(end.0, libc::F_SETFD, FD_CLOEXEC).expect("F_SETFD");
            join(sys::fork(|| {
                sys::exec(&["true"]);
                127
            }));
            join(sys::fork(|| sys::exit_with_handlers(0)));
            a.sync();
            end.send(b"the end");
            record("SO_LINGER", sys::linger(end.0).map(|(on, _)| on));
            end.close();
        },
        receive_sent_again,
    )
    .steady(),
    pair(
        "processes/exit_amid_sent_again",
        "what was sent arrives though its sender closed, or ended, before the kernel had room for it",
        |a| {
            let end = much_to_send_again(a);
            end.close();
            a.sync();
            let end = much_to_send_again(a);
            let (alone, others) = sys::pipe().expect("pipe");
            let child = sys::fork(|| {
                let _ = sys::close(others);
                let _ = sys::read(alone, &mut [0]);
                sys::exit_with_handlers(0)
            });
            end.close();
            let _ = sys::close(others);
            join(child);
            a.sync();
        },
        |b| {
            receive_sent_again(b);
            receive_sent_again(b);
        },
    )
    .steady(),
    pair(
        "processes/exec_in_place",
        "a program becomes another, which finds the connection under its number",
        |a| {
            let end = a.moved();
            end.send(b"to the shell\n");
            end.recv_to_end();
        },
        |b| {
            let end = b.moved();
            let command = format!("read line <&{0}; echo \"got: $line\" >&{0}", end.0);
            record("exec", sys::exec(&["sh", "-c", &command]));
        },
    )
    .steady()
    .each_side(),
    pair(
        "processes/exec_cloexec",
        "exec closes a connection with FD_CLOEXEC",
        |a| {
            let end = a.moved();
            end.recv(9);
            end.recv(9);
            a.sync();
        },
        |b| {
            let end = b.moved();
            record("F_SETFD", sys::fcntl(end.0, libc::F_SETFD, FD_CLOEXEC));
            end.send(b"at last");
            let child = sys::fork(|| {
                sys::exec(&["sleep", "30"]);
                127
            });
            end.close();
            b.sync();
            sys::kill(child, SIGKILL).expect("kill");
            join(child);
        },
    )
    .packets_too(),
    pair(
        "processes/spawn_beside",
        "system, popen and posix_spawn beside a moved connection",
        asking_client,
        |b| {
            let end = b.moved();
            record("system", sys::system("exit 3"));
            record(
                "popen",
                sys::popen("echo from the shell").map(|(text, code)| format!("{text:?} {code}")),
            );
            let child = sys::spawn(&["true"], None);
            record("posix_spawn", child.map(sys::wait_for));
            record("no such program", sys::spawn(&["/no/such/program"], None));
            record("echoed", echo_all(end));
            end.close();
        },
    )
    .packets_too()
    .each_side(),
    pair(
        "processes/spawn_beside_unread",
        "programs are started beside bytes that lie unread on both sides of a change of path",
        |a| {
            let end = a.moved();
            end.send(b"the ring, ");
            end.send_with(b"the kernel\n", libc::MSG_ZEROCOPY);
            a.sync();
            end.recv_exact(6);
            end.send(b"more");
            end.shutdown(SHUT_WR);
            end.recv_to_end();
        },
        |b| {
            let end = b.moved();
            b.sync();
            end.until_unread(21);
            start_programs_beside(end);
            end.recv_exact(21);
            end.send(b"answer");
            end.recv_to_end();
            end.close();
        },
    )
    .each_side(),
    pair(
        "processes/spawn_beside_ended",
        "programs are started beside unread bytes of a peer that sends no more",
        last_words,
        |b| {
            let end = b.moved();
            b.sync();
            end.wait_mask(RDHUP);
            start_programs_beside(end);
            end.recv_to_end();
            end.send(b"answer");
            end.close();
        },
    )
    .packets_too()
    .each_side(),
    pair(
        "processes/spawned_may_read",
        "a program that is started beside unread bytes of a peer that sends no more may read them; who started it goes on",
        last_words,
        |b| {
            let end = b.moved();
            b.sync();
            end.wait_mask(RDHUP);
            let command = format!("test \"$(cat <&{0})\" = 'the last words'", end.0);
            record("read", sys::system(&format!("({command}) 2>/dev/null")) == 0);
            end.recv_to_end();
            end.send(b"answer");
            end.close();
        },
    )
    .steady()
    .differs(&[
        Difference { kernel: "read = true", ringlet: "read = false", sentence: UNREAD_BESIDE },
        Difference {
            kernel: "recv to the end = 0 \"\", then 0",
            ringlet: "recv to the end = 14 \"the last words\", then 0",
            sentence: UNREAD_BESIDE,
        },
    ]),
    pair(
        "processes/moved_after_programs",
        "a connection that was there while programs were started, or could not be, is moved afterwards",
        |a| {
            for _ in STARTS {
                let end = a.fresh();
                a.sync();
                a.warm(end);
                end.close();
            }
        },
        |b| {
            for (name, start) in STARTS {
                let end = b.fresh();
                sys::fcntl(end.0, libc::F_SETFD, FD_CLOEXEC).expect("F_SETFD");
                record(name, start());
                b.sync();
                b.warm(end);
                end.recv(1);
                end.close();
            }
        },
    ),
    pair(
        "processes/stranger_resets",
        "a program that knows of no ring says something, and the connection ends by a reset, which is told",
        |a| {
            let end = a.moved();
            end.until_unread(5);
            a.sync();
            end.wait_mask(HUP);
            end.recv(10);
            end.recv(10);
        },
        |b| {
            let end = b.moved();
            record("SO_LINGER", sys::set_linger(end.0, Some(0)));
            join(sys::fork(|| {
                sys::exec(&["env", "-i", "/bin/sh", "-c", &format!("printf hello >&{}", end.0)]);
                127
            }));
            b.sync();
            end.close();
        },
    )
    .steady(),
    pair(
        "processes/killed_amid_send",
        "a child is killed in the middle of a send, and not yet waited for: its parent sends",
        |a| {
            let end = a.moved();
            end.recv_to_end();
        },
        |b| {
            let end = b.moved();
            let child = sys::fork(|| {
                let page = sys::LatePage::new(b"never sent");
                std::thread::scope(|scope| {
                    scope.spawn(|| {
                        page.await_touch();
                        sys::kill(std::process::id() as i32, SIGKILL)
                    });
                    if !page.is_late() {
                        pause(100_000);
                    }
                    let _ = sys::send(end.0, &page.bytes()[..10], MSG_NOSIGNAL);
                });
                0
            });
            until("the child is dead", || is_over(child));
            end.send(b"sent, ");
            join(child);
            end.send(b"and on");
            end.close();
        },
    )
    .packets_too(),
    pair(
        "processes/spawn_with_connection",
        "posix_spawn gives a moved connection to cat",
        |a| {
            let end = a.moved();
            a.sync();
            talk_to_cat(end);
        },
        |b| {
            let end = b.moved();
            let child = sys::spawn(&["cat"], Some((end.0, end.0)));
            // Or cat would hold a copy that is not its standard input, and see no end.
            end.close();
            b.sync();
            record("cat", child.map(sys::wait_for));
        },
    )
    .steady()
    .each_side(),
    pair(
        "processes/system_uses_connection",
        "a shell command writes to a connection that it inherited, between our own writes",
        |a| {
            let end = a.moved();
            end.recv_exact(20);
            end.recv(1);
        },
        |b| {
            let end = b.moved();
            end.send(b"before, ");
            record("system", sys::system(&format!("printf 'within, ' >&{}", end.0)));
            end.send(b"after");
            end.close();
        },
    )
    .each_side(),
    // ---- passing ----
    pair(
        "processes/exec_keeps_a_set",
        "a program waits in a set that it has from the program before, in the same process, and is told that one's data",
        tell_two_in_turn,
        |b| {
            let name = "processes/exec_keeps_a_set";
            let told = |set: Fd| sys::epoll_wait(set, 4, 10_000).map(|told| format!("{told:?}"));
            if let Ok(numbers) = std::env::var("CASE_SET") {
                let mut numbers = numbers.split(' ').map(|number| number.parse().expect("a number"));
                let set = numbers.next().expect("a set");
                for end in numbers.map(End) {
                    b.sync();
                    record("told", told(set));
                    end.recv(4);
                }
                record("nothing", sys::epoll_wait(set, 4, 20).map(|told| told.len()));
                b.sync();
                return;
            }
            let ends = [b.moved(), b.moved()];
            let set = sys::epoll_create().expect("a set");
            sys::fcntl(set, libc::F_SETFD, 0).expect("F_SETFD");
            let edge = libc::EPOLLET as u32;
            for (end, edge) in ends.iter().zip([0, edge]) {
                sys::epoll_ctl(set, libc::EPOLL_CTL_ADD, end.0, IN | edge, end.0 as u64 + 1000)
                    .expect("epoll_ctl");
            }
            record("nothing", sys::epoll_wait(set, 4, 20).map(|told| told.len()));
            let numbers = format!("CASE_SET={set} {} {}", ends[0].0, ends[1].0);
            record("exec", b.start_anew(&["env", &numbers], name));
        },
    )
    .packets_too()
    .steady(),
    pair(
        "processes/failed_exec_keeps_a_set",
        "after an exec that failed a set goes on to tell of its connections, inherited or not",
        tell_two_in_turn,
        |b| {
            let ends = [b.moved(), b.moved()];
            sys::fcntl(ends[0].0, libc::F_SETFD, FD_CLOEXEC).expect("F_SETFD");
            let set = sys::epoll_create().expect("a set");
            sys::fcntl(set, libc::F_SETFD, 0).expect("F_SETFD");
            for (data, end) in (1..).zip(ends) {
                sys::epoll_ctl(set, libc::EPOLL_CTL_ADD, end.0, IN, data).expect("epoll_ctl");
            }
            record("nothing", sys::epoll_wait(set, 4, 20).map(|told| told.len()));
            record("exec", sys::exec(&["/nowhere"]));
            for end in ends {
                let told = beside(move || sys::epoll_wait(set, 4, 10_000), || b.sync());
                record("told", told.map(|told| format!("{told:?}")));
                end.recv(4);
            }
            b.sync();
        },
    )
    .packets_too()
    .steady(),
    pair(
        "processes/pass_a_set",
        "a set that watches moved connections is passed to another process, which is told the program's data",
        |a| {
            let end = a.moved();
            a.sync();
            end.send(b"x");
            a.sync();
            end.send(b"y");
            a.sync();
        },
        |b| {
            let (near, far) = sys::socketpair(libc::SOCK_STREAM).expect("socketpair");
            let child = sys::fork(|| {
                let set = sys::receive_fd(far).expect("a set");
                let told = sys::epoll_wait(set, 4, 10_000);
                record("told to the child", told.map(|told| format!("{told:?}")));
                0
            });
            let end = b.moved();
            let set = sys::epoll_create().expect("a set");
            sys::epoll_ctl(set, libc::EPOLL_CTL_ADD, end.0, IN, 7).expect("epoll_ctl");
            record("nothing", sys::epoll_wait(set, 4, 20).map(|told| told.len()));
            record("passed", sys::pass_fd(near, set));
            b.sync();
            join(child);
            record("told", sys::epoll_wait(set, 4, 10_000).map(|told| format!("{told:?}")));
            end.recv(4);
            b.sync();
            record("told", sys::epoll_wait(set, 4, 10_000).map(|told| format!("{told:?}")));
            end.recv(4);
            b.sync();
        },
    )
    .packets_too()
    .steady(),
    pair(
        "processes/pass_fresh",
        "a connection that carried nothing is passed to another process",
        |a| {
            let end = a.fresh();
            rounds(end, 300);
            end.shutdown(SHUT_WR);
            end.recv_to_end();
        },
        |b| {
            let (near, child) = taker();
            let end = b.fresh();
            record("passed", sys::pass_fd(near, end.0));
            end.close();
            join(child);
        },
    )
    .steady()
    .any_path()
    .each_side(),
    pair(
        "processes/pass_moved",
        "a moved connection is passed to another process, with unread data",
        |a| {
            let end = a.moved();
            end.send(b"unread!!");
            a.sync();
            end.recv_exact(8);
            rounds(end, 300);
            end.shutdown(SHUT_WR);
            end.recv_to_end();
        },
        |b| {
            let (near, child) = taker();
            let end = b.moved();
            b.sync();
            end.until_unread(8);
            record("passed", sys::pass_fd(near, end.0));
            end.close();
            join(child);
        },
    )
    .packets_too()
    .steady()
    .each_side(),
    pair(
        "processes/pass_to_oneself",
        "a moved connection is passed to its own process",
        asking_client,
        |b| {
            let end = b.moved();
            let (near, far) = sys::socketpair(libc::SOCK_STREAM).expect("socketpair");
            record("passed", sys::pass_fd(near, end.0));
            let copy = sys::receive_fd(far).expect("a descriptor");
            record("another number", copy != end.0);
            end.close();
            record("echoed", echo_all(End(copy)));
            End(copy).close();
        },
    )
    .steady(),
];

/// What an event-driven worker does, for ever.
fn serve_by_epoll(listener: Fd) -> ! {
    let set = sys::epoll_create().expect("epoll");
    let watch = |fd: Fd, events: u32| {
        sys::epoll_ctl(set, libc::EPOLL_CTL_ADD, fd, events, fd as u64).expect("epoll_ctl");
    };
    watch(listener, IN | libc::EPOLLEXCLUSIVE as u32);
    loop {
        for (fd, _) in sys::epoll_wait(set, 16, -1).expect("epoll_wait") {
            if fd == listener as u64 {
                while let Ok((fd, _)) = sys::accept4(listener, libc::SOCK_NONBLOCK) {
                    watch(fd, IN | RDHUP | libc::EPOLLET as u32);
                }
                continue;
            }
            let end = End(fd as Fd);
            loop {
                match recv(end, 512, 0) {
                    Ok(got) if got.is_empty() => {
                        sys::close(end.0).expect("close");
                        break;
                    }
                    Ok(got) => drop(send_all(end, &got)),
                    Err(_) => break,
                }
            }
        }
    }
}

/// A child that waits for a connection over a Unix socket and echoes on it.
fn taker() -> (Fd, i32) {
    let (near, far) = sys::socketpair(libc::SOCK_STREAM).expect("socketpair");
    let child = sys::fork(|| {
        sys::close(near).expect("close");
        let end = End(sys::receive_fd(far).expect("a descriptor"));
        record("echoed by the child", echo_all(end));
        0
    });
    (near, child)
}
