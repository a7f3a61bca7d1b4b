//! Several threads and one connection, or one set.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use libc::{EPOLL_CTL_ADD, EPOLL_CTL_MOD, MSG_DONTWAIT, SHUT_WR};

use super::close::{beside, shown};
use crate::case::*;
use crate::rare::{self, Room};
use crate::sys::{self, Fd, Waits};

const TRIPS: u32 = 1000;
const ET: u32 = libc::EPOLLET as u32;

fn ask_all(end: End, salt: u32) {
    for i in 0..TRIPS {
        let request = (i ^ salt).to_le_bytes();
        send_all(end, &request).expect("send");
        assert_eq!(recv_exact(end, 4), Ok(request.to_vec()), "reply to {i}");
    }
}

fn echo_all(end: End) -> usize {
    let mut bytes = 0;
    while let Ok(got @ [_, ..]) = recv(end, 512, 0).as_deref() {
        bytes += send_all(end, got).expect("send");
    }
    bytes
}

const SOON: std::time::Duration = std::time::Duration::from_millis(5);
const ONE_SHOT_ROUNDS: u32 = 200;
const ONE_SHOT_BYTES: u32 = 60;

/// Two threads serve a connection by one-shot, while this one goes on to send. How often was a thread told of it while the other had it?
fn had_by_both(end: End) -> u32 {
    use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
    let (inside, both, over) = (AtomicU32::new(0), AtomicU32::new(0), AtomicBool::new(false));
    let (set, end_all) =
        (sys::epoll_create().expect("a set"), sys::eventfd(0).expect("an eventfd"));
    let events = IN | libc::EPOLLONESHOT as u32;
    sys::epoll_ctl(set, EPOLL_CTL_ADD, end_all, IN, 1).expect("epoll_ctl");
    sys::epoll_ctl(set, EPOLL_CTL_ADD, end.0, events, 2).expect("epoll_ctl");
    let serve = || {
        while !over.load(Ordering::SeqCst) {
            for (data, _) in sys::epoll_wait(set, 1, -1).expect("epoll_wait") {
                if data == 1 {
                    return;
                }
                both.fetch_add(
                    (inside.fetch_add(1, Ordering::SeqCst) != 0) as u32,
                    Ordering::SeqCst,
                );
                std::thread::sleep(std::time::Duration::from_micros(50));
                let got = recv(end, 512, MSG_DONTWAIT);
                inside.fetch_sub(1, Ordering::SeqCst);
                if got.is_ok_and(|got| got.is_empty()) {
                    over.store(true, Ordering::SeqCst);
                    sys::write(end_all, &1u64.to_ne_bytes()).expect("write");
                    return;
                }
                sys::epoll_ctl(set, EPOLL_CTL_MOD, end.0, events, 2).expect("epoll_ctl");
            }
        }
    };
    thread::scope(|scope| {
        scope.spawn(serve);
        scope.spawn(serve);
        while !over.load(Ordering::SeqCst) {
            send_all(end, b"y").expect("send");
            std::thread::sleep(std::time::Duration::from_micros(5));
        }
    });
    for fd in [set, end_all, end.0] {
        sys::close(fd).expect("close");
    }
    both.into_inner()
}

/// Three threads receive, a byte is sent whenever they sleep, and then too they sleep.
fn receive_in_three(side: &mut Side) {
    let (end, pid) = (side.moved(), std::process::id() as i32);
    let got = std::sync::atomic::AtomicU32::new(0);
    let (tell, hear) = std::sync::mpsc::channel();
    thread::scope(|scope| {
        let ids = [(); 3].map(|()| {
            let (tell, got) = (tell.clone(), &got);
            scope.spawn(move || {
                tell.send(sys::thread_id()).expect("who waits");
                while recv(end, 1, 0).is_ok_and(|got| !got.is_empty()) {
                    got.fetch_add(1, Ordering::SeqCst);
                }
            });
            hear.recv().expect("a thread's number")
        });
        for sent in 1..=BYTES_TO_THREE {
            ids.iter().for_each(|id| until_asleep(pid, *id));
            side.tell(0);
            until("it comes", || got.load(Ordering::SeqCst) == sent);
            record("they sleep", sleep_together(&ids));
        }
        side.tell(0);
    });
    end.close();
}

const BYTES_TO_THREE: u32 = 3;

/// Keeps the connection full, until it is over: waits for room as `wait` does.
fn keep_full(end: End, over: &AtomicBool, wait: impl Fn(End)) {
    while !over.load(Ordering::SeqCst) {
        while sys::send(end.0, &[7; 16 << 10], MSG_DONTWAIT).is_ok() {}
        wait(end);
    }
}

pub fn poll_for_room(end: End) {
    let _ = sys::poll(&[(end.0, libc::POLLOUT)], -1);
}

pub fn send_more(end: End) {
    let _ = send_all(end, &[7; 1 << 20]);
}

/// So many threads wait for room, and do so asleep, though what the peer has sent lies unread.
pub fn wait_for_room(side: &mut Side, end: End, threads: usize, wait: fn(End)) {
    let over = AtomicBool::new(false);
    let (tell, hear) = std::sync::mpsc::channel();
    thread::scope(|scope| {
        let over = &over;
        let ids: Vec<i32> = (0..threads)
            .map(|_| {
                let tell = tell.clone();
                scope.spawn(move || {
                    tell.send(sys::thread_id()).expect("who waits");
                    keep_full(end, over, wait);
                });
                hear.recv().expect("a thread's number")
            })
            .collect();
        ids.iter().for_each(|id| until_asleep(std::process::id() as i32, *id));
        side.tell(0);
        side.hear();
        record("they sleep", sleep_together(&ids));
        over.store(true, Ordering::SeqCst);
        side.tell(0);
    });
    end.shutdown(SHUT_WR);
    record("the end", recv_to_end(end).1.map(|_| ()));
}

/// The peer of such a one: has sent something, and reads only then, or all the time, but slowly.
pub fn leave_full(side: &mut Side, send: impl FnOnce(End), slowly: bool) {
    let end = side.moved();
    let read_slowly = |side: &mut Side| {
        while slowly && !side.is_told() {
            let _ = recv(end, 8 << 10, 0);
            pause(2);
        }
    };
    read_slowly(side);
    side.hear();
    send(end);
    side.tell(0);
    read_slowly(side);
    side.hear();
    record("all", recv_to_end(end).1.map(|_| ()));
    end.close();
}

const SPLICE_ROUNDS: u32 = 4;

/// The first thread is held in the midst of its splice, until the others wait for it.
fn splice_beside_splice_and_close(end: End) {
    let pipes = [(); 2].map(|()| sys::pipe().expect("pipe"));
    let splice = |(read, write)| {
        sys::write(write, b"bytes").expect("write");
        let _ = sys::splice(read, end.0, 5, 0);
    };
    let (started, over) = (AtomicBool::new(false), AtomicBool::new(false));
    thread::scope(|scope| {
        let start_others = |held: bool| {
            if started.swap(true, Ordering::SeqCst) {
                return;
            }
            let (tell, hear) = std::sync::mpsc::channel();
            let others: [Box<dyn FnOnce() + Send>; 2] =
                [Box::new(move || splice(pipes[1])), Box::new(move || _ = sys::close(end.0))];
            for other in others {
                let tell = tell.clone();
                scope.spawn(move || {
                    tell.send(sys::thread_id()).expect("who waits");
                    other();
                });
                let number = hear.recv().expect("a thread's number");
                if held {
                    until_asleep(std::process::id() as i32, number);
                }
            }
        };
        let (give, take) = std::sync::mpsc::channel();
        let over = &over;
        scope.spawn(move || {
            give.send(rare::hold_calls(&[libc::SYS_getsockopt])).expect("who lets it go on");
            splice(pipes[0]);
            over.store(true, Ordering::SeqCst);
        });
        let listener = take.recv().expect("a filter");
        rare::let_go_on(
            listener,
            || over.load(Ordering::SeqCst),
            |call| {
                if call.argument(2) as i32 == libc::TCP_INFO {
                    start_others(true);
                }
            },
        );
        // Or nothing has held it.
        start_others(false);
        sys::close(listener).expect("close");
    });
    pipes.iter().for_each(|pipe| {
        [pipe.0, pipe.1].iter().for_each(|fd| sys::close(*fd).expect("close"));
    });
}

/// So long a thread is held for a close beside it: one that waits for that comes behind it.
const HELD_MS: u64 = 300;

/// The thread that modifies the first in a set, where there is another, is held when it asks the kernel.
fn modify_beside_close(end: End, other: End) {
    let set = sys::epoll_create().expect("epoll_create1");
    sys::epoll_ctl(set, EPOLL_CTL_ADD, end.0, IN, 1).expect("epoll_ctl");
    sys::epoll_ctl(set, EPOLL_CTL_ADD, other.0, IN, 2).expect("epoll_ctl");
    let (started, closed, over) =
        (AtomicBool::new(false), AtomicBool::new(false), AtomicBool::new(false));
    thread::scope(|scope| {
        let (closed, over) = (&closed, &over);
        let start_close = || {
            if started.swap(true, Ordering::SeqCst) {
                return;
            }
            scope.spawn(move || {
                sys::close(end.0).expect("close");
                closed.store(true, Ordering::SeqCst);
            });
            (0..HELD_MS).take_while(|_| !closed.load(Ordering::SeqCst)).for_each(|_| pause(1));
        };
        let (give, take) = std::sync::mpsc::channel();
        scope.spawn(move || {
            give.send(rare::hold_calls(&[libc::SYS_ppoll])).expect("who lets it go on");
            let _ = sys::epoll_ctl(set, EPOLL_CTL_MOD, end.0, IN, 3);
            over.store(true, Ordering::SeqCst);
        });
        let listener = take.recv().expect("a filter");
        rare::let_go_on(listener, || over.load(Ordering::SeqCst), |_| start_close());
        // Or nothing has held it.
        start_close();
        sys::close(listener).expect("close");
    });
    sys::close(set).expect("close");
}

fn asking_client(a: &mut Side) {
    let end = a.moved();
    ask_all(end, 0);
    end.shutdown(SHUT_WR);
    end.recv_to_end();
}

fn asking_client_after_a_step(a: &mut Side) {
    let end = a.moved();
    a.sync();
    (0..5).for_each(|salt| ask_all(end, salt << 16));
    end.shutdown(SHUT_WR);
    end.recv_to_end();
}

fn in_thread<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    thread::spawn(work).join().expect("the thread")
}

/// Sends and receives `len` bytes at once, from one thread, as `ready` says what is possible.
fn both_ways(end: End, out: &[u8], len: usize, mut ready: impl FnMut(u32) -> u32) -> Vec<u8> {
    end.set_nonblocking(true);
    let (mut sent, mut got) = (0, Vec::new());
    while sent < out.len() || got.len() < len {
        let wish = if sent < out.len() { IN | OUT } else { IN };
        let events = ready(wish);
        if events & OUT != 0 {
            while sent < out.len() {
                match sys::send(end.0, &out[sent..], 0) {
                    Ok(n) => sent += n,
                    Err(_) => break,
                }
            }
        }
        if events & IN != 0 {
            while let Ok(part @ [_, ..]) = recv(end, 30_000, 0).as_deref() {
                got.extend_from_slice(part);
            }
        }
    }
    got
}

const BULK_BYTES: usize = 6 << 20;

fn bulk(side: &mut Side, wait: fn(End, Fd, u32) -> u32, edge: u32) {
    let end = side.moved();
    let set = sys::epoll_create().expect("epoll");
    sys::epoll_ctl(set, EPOLL_CTL_ADD, end.0, IN | OUT | edge, 0).expect("epoll_ctl");
    let out = pattern(if side.is_client() { 90 } else { 91 }, BULK_BYTES);
    let got = both_ways(end, &out, BULK_BYTES, |wish| wait(end, set, wish));
    record("received", got);
    side.sync();
    end.close();
}

fn poll_for(end: End, _: Fd, wish: u32) -> u32 {
    sys::poll(&[(end.0, wish as i16)], -1).expect("poll").1[0]
}

fn select_for(end: End, _: Fd, wish: u32) -> u32 {
    let fds = [end.0];
    let write: &[Fd] = if wish & OUT != 0 { &fds } else { &[] };
    let got = sys::select(&fds, write, &[], None).expect("select");
    let bit = |set: &[Fd], bit| if set.is_empty() { 0 } else { bit };
    bit(&got.read, IN) | bit(&got.write, OUT)
}

fn epoll_for(end: End, set: Fd, wish: u32) -> u32 {
    sys::epoll_ctl(set, EPOLL_CTL_MOD, end.0, wish, 0).expect("epoll_ctl");
    epoll_edge_for(end, set, wish)
}

fn epoll_edge_for(_: End, set: Fd, _: u32) -> u32 {
    let events = sys::epoll_wait(set, 4, PATIENCE_MS).expect("epoll_wait");
    assert!(!events.is_empty(), "an event comes in time");
    events[0].1
}

/// One thread after the other, in each way to wait.
fn cancel_in_waits(end: End) {
    let set = sys::epoll_create().expect("epoll_create");
    sys::epoll_ctl(set, EPOLL_CTL_ADD, end.0, IN, 0).expect("epoll_ctl");
    for (name, waits, fd) in [
        ("recv", Waits::Recv, end.0),
        ("poll", Waits::Poll, end.0),
        ("poll of many", Waits::PollMany, end.0),
        ("ppoll", Waits::Ppoll, end.0),
        ("select", Waits::Select, end.0),
        ("pselect", Waits::Pselect, end.0),
        ("epoll_wait", Waits::EpollWait, set),
        ("epoll_pwait", Waits::EpollPwait, set),
        ("splice", Waits::Splice, end.0),
        ("splice into a full pipe", Waits::SpliceFull, end.0),
    ] {
        let until = |tid| until_asleep(std::process::id() as i32, tid);
        record(format!("cancelled in {name}"), sys::cancel_in(fd, waits, until));
    }
    sys::close(set).expect("close");
}

const CLOSED_WHERE_CANCELLED: [(&str, Waits); 4] = [
    ("recv", Waits::Recv),
    ("poll", Waits::Poll),
    ("poll of many", Waits::PollMany),
    ("select", Waits::Select),
];

/// One thread sleeps in a set while another looks there without waiting; whoever is told answers.
fn served_beside_a_looker(b: &mut Side, edge: u32) {
    let end = b.moved();
    end.set_nonblocking(true);
    let set = sys::epoll_create().expect("epoll_create1");
    let events = IN | OUT | libc::EPOLLRDHUP as u32;
    sys::epoll_ctl(
        set,
        EPOLL_CTL_ADD,
        end.0,
        events & !(if edge == 0 { OUT } else { 0 }) | edge,
        7,
    )
    .expect("epoll_ctl");
    let (over, tell_over) = sys::pipe().expect("pipe");
    sys::epoll_ctl(set, EPOLL_CTL_ADD, over, IN, 8).expect("epoll_ctl");
    let turn = std::sync::Mutex::new(0);
    b.sync();
    thread::scope(|scope| {
        for timeout in [-1, 0] {
            let turn = &turn;
            scope.spawn(move || {
                loop {
                    let told = sys::epoll_wait(set, 4, timeout).expect("epoll_wait");
                    if told.iter().any(|(data, _)| *data == 8) {
                        return;
                    }
                    if told.iter().all(|(_, events)| events & IN == 0) {
                        continue;
                    }
                    let mut bytes = turn.lock().expect("no thread panics");
                    while let Ok(got) = recv(end, 64, 0) {
                        if got.is_empty() {
                            sys::write(tell_over, b"!").expect("write");
                            break;
                        }
                        *bytes += send_all(end, &got).expect("send");
                    }
                }
            });
        }
    });
    record("echoed", *turn.lock().expect("no thread panics"));
    end.close();
}

/// One question and its answer.
fn end_round(end: End, i: u32) {
    let request = i.to_le_bytes();
    assert_eq!(send_all(end, &request), Ok(4));
    assert_eq!(recv_exact(end, 4), Ok(request.to_vec()));
}

/// Calls with some KiB of stack in use.
#[inline(never)]
fn further_down(act: &mut dyn FnMut()) {
    let room = std::hint::black_box([0u8; 8192]);
    act();
    std::hint::black_box(&room);
}

pub const CASES: &[Case] = &[
    pair(
        "threads/own_descriptors",
        "a thread that has left the table of descriptors closes a number there, and uses it anew",
        |a| {
            let end = a.moved();
            for i in 0..300u32 {
                end_round(end, i);
            }
            a.sync();
            for i in 0..300u32 {
                end_round(end, i);
            }
            end.shutdown(libc::SHUT_WR);
            end.recv_to_end();
        },
        |b| {
            let end = b.moved();
            for _ in 0..300 {
                let got = recv_exact(end, 4).expect("recv");
                send_all(end, &got).expect("send");
            }
            std::thread::spawn(move || {
                sys::unshare(libc::CLONE_FILES).expect("unshare");
                sys::close(end.0).expect("close");
                let (from, to) = sys::pipe().expect("pipe");
                record("reused", from == end.0);
                sys::write(to, b"!").expect("write");
                record("read", sys::read(from, &mut [0; 8]));
            })
            .join()
            .expect("a thread");
            b.sync();
            while let Ok(got @ [_, ..]) = recv(end, 4096, 0).as_deref() {
                send_all(end, got).expect("send");
            }
            end.close();
        },
    )
    .each_side(),
    pair(
        "threads/one_connection_in_two_sets",
        "two threads put one connection into a set each, and take it out, again and again",
        |a| {
            let end = a.fresh();
            a.sync();
            end.send(b"x");
            a.sync();
        },
        |b| {
            let end = b.fresh();
            let sets = [(); 2].map(|()| sys::epoll_create().expect("epoll_create1"));
            thread::scope(|scope| {
                for set in sets {
                    scope.spawn(move || {
                        for _ in 0..20_000 {
                            sys::epoll_ctl(set, EPOLL_CTL_ADD, end.0, IN, 5).expect("ADD");
                            sys::epoll_ctl(set, libc::EPOLL_CTL_DEL, end.0, 0, 0).expect("DEL");
                        }
                        sys::epoll_ctl(set, EPOLL_CTL_ADD, end.0, IN, 6).expect("ADD");
                    });
                }
            });
            b.sync();
            for set in sets {
                record("epoll_wait", shown(sys::epoll_wait(set, 4, 10_000)));
            }
            b.sync();
        },
    )
    .any_path()
    .each_side(),
    pair(
        "threads/watched_while_it_moves",
        "a thread adds a connection to a set, modifies and removes it, while it moves: what it did last holds",
        |a| {
            for _ in 0..40 {
                let end = a.fresh();
                a.warm(end);
                a.sync();
                end.send(b"x");
                a.sync();
                end.close();
            }
        },
        |b| {
            let set = sys::epoll_create().expect("epoll_create1");
            for turn in 0..40u64 {
                let end = b.fresh();
                let moved = std::sync::atomic::AtomicBool::new(false);
                let edge = [0, ET][turn as usize % 2];
                thread::scope(|scope| {
                    scope.spawn(|| {
                        let control = |op, data| {
                            sys::epoll_ctl(set, op, end.0, IN | edge, data).expect("epoll_ctl");
                        };
                        while !moved.load(std::sync::atomic::Ordering::SeqCst) {
                            control(EPOLL_CTL_ADD, 1);
                            control(EPOLL_CTL_MOD, 2);
                            control(libc::EPOLL_CTL_DEL, 0);
                        }
                        control(EPOLL_CTL_ADD, 3);
                        control(EPOLL_CTL_MOD, turn + 10);
                    });
                    b.warm(end);
                    moved.store(true, std::sync::atomic::Ordering::SeqCst);
                });
                let got = beside(move || sys::epoll_wait(set, 4, 10_000), || b.sync());
                record("epoll_wait", shown(got));
                record("recv", recv(end, 4, 0));
                b.sync();
                end.close();
            }
        },
    )
    .each_side(),
    pair(
        "threads/options_while_it_moves",
        "what a thread sets of a connection while another moves it is set: O_NONBLOCK, a timeout, TCP_NODELAY",
        |a| {
            for _ in 0..60 {
                let end = a.fresh();
                a.warm(end);
                a.sync();
                end.close();
            }
        },
        |b| {
            for turn in 0..60u32 {
                let end = b.fresh();
                thread::scope(|scope| {
                    scope.spawn(|| {
                        // As it begins to move, if it does, and then at any moment.
                        (0..100_000).take_while(|_| sys::ringlet_path(end.0) == 1).for_each(drop);
                        (0..turn / 2 * 400).for_each(|_| std::hint::spin_loop());
                        match turn % 2 {
                            0 => end.set_nonblocking(true),
                            _ => sys::set_timeout(end.0, libc::SO_RCVTIMEO, SOON).expect("set"),
                        }
                        sys::setsockopt(end.0, libc::IPPROTO_TCP, libc::TCP_NODELAY, 1)
                            .expect("set");
                    });
                    b.warm(end);
                });
                record("recv", recv(end, 4, 0));
                let no_delay = sys::getsockopt(end.0, libc::IPPROTO_TCP, libc::TCP_NODELAY);
                record("TCP_NODELAY", no_delay);
                b.sync();
                end.close();
            }
        },
    )
    .any_path()
    .internet_only()
    .each_side(),
    pair(
        "threads/splice_beside_splice_and_close",
        "a thread splices into a connection while another does, and a third closes it: nobody looks at memory that is gone",
        |a| {
            for _ in 0..SPLICE_ROUNDS {
                let end = a.moved();
                while recv(end, 64, 0).is_ok_and(|got| !got.is_empty()) {}
                end.close();
            }
        },
        |b| {
            for _ in 0..SPLICE_ROUNDS {
                let end = b.moved();
                splice_beside_splice_and_close(end);
            }
        },
    )
    .internet_only(),
    pair(
        "threads/modified_beside_close",
        "a thread modifies a connection's registration while another closes it: nobody looks at memory that is gone",
        |a| {
            let ends = [a.moved(), a.moved()];
            for end in ends {
                while recv(end, 64, 0).is_ok_and(|got| !got.is_empty()) {}
                end.close();
            }
        },
        |b| {
            let ends = [b.moved(), b.moved()];
            modify_beside_close(ends[0], ends[1]);
            ends[1].close();
        },
    ),
    pair(
        "threads/one_shot_while_it_moves",
        "two threads wait for a connection by one-shot while it moves, and never have it both",
        |a| {
            for _ in 0..ONE_SHOT_ROUNDS {
                let end = a.fresh();
                thread::scope(|scope| {
                    scope.spawn(|| while recv(end, 512, 0).is_ok_and(|got| !got.is_empty()) {});
                    for _ in 0..ONE_SHOT_BYTES {
                        send_all(end, b"x").expect("send");
                        std::thread::sleep(std::time::Duration::from_micros(80));
                    }
                    end.shutdown(SHUT_WR);
                });
                end.close();
            }
        },
        |b| {
            let mut both = 0;
            for _ in 0..ONE_SHOT_ROUNDS {
                both += had_by_both(b.fresh());
            }
            record("had by both", both);
        },
    )
    .any_path()
    .internet_only(),
    pair(
        "threads/one_shot_armed_before_it_is_served",
        "a thread waits, and arms a one-shot registration again before another serves it: the connection moves, and nothing is lost",
        |a| {
            let end = a.fresh();
            a.warm(end);
            ask_all(end, 5);
            end.close();
        },
        |b| {
            let end = b.fresh();
            let (set, over) =
                (sys::epoll_create().expect("a set"), sys::eventfd(0).expect("an eventfd"));
            let events = IN | libc::EPOLLONESHOT as u32;
            sys::epoll_ctl(set, EPOLL_CTL_ADD, over, IN, 1).expect("epoll_ctl");
            let (tell, hear) = std::sync::mpsc::channel();
            let waiting = thread::spawn(move || {
                loop {
                    let told = sys::epoll_wait(set, 4, -1).expect("epoll_wait");
                    if told.iter().any(|(data, _)| *data == 1) {
                        return;
                    }
                    sys::epoll_ctl(set, EPOLL_CTL_MOD, end.0, events, 2).expect("epoll_ctl");
                    tell.send(()).expect("the main thread listens");
                    thread::sleep(std::time::Duration::from_micros(50));
                }
            });
            sys::epoll_ctl(set, EPOLL_CTL_ADD, end.0, events, 2).expect("epoll_ctl");
            b.warm(end);
            let mut bytes = 0;
            'serving: loop {
                hear.recv().expect("the thread that waits");
                loop {
                    match recv(end, 512, MSG_DONTWAIT) {
                        Ok(got) if got.is_empty() => break 'serving,
                        Ok(got) => bytes += send_all(end, &got).expect("send"),
                        Err(_) => break,
                    }
                }
            }
            record("bytes", bytes);
            sys::write(over, &1u64.to_ne_bytes()).expect("write");
            waiting.join().expect("the thread that waits");
        },
    )
    .each_side(),
    pair(
        "threads/waiters_since_before_the_move",
        "each of three threads that wait in a set since before it had a connection of the ring is told of a message",
        |a| {
            let end = a.moved();
            for _ in 0..3 {
                a.sync();
                end.send(b"x");
            }
            a.sync();
        },
        |b| {
            let end = b.moved();
            let set = sys::epoll_create().expect("epoll_create1");
            let (tell, hear) = std::sync::mpsc::channel();
            let threads = [(); 3].map(|()| {
                let tell = tell.clone();
                thread::spawn(move || {
                    tell.send(sys::thread_id()).expect("the main thread listens");
                    let told = sys::epoll_wait(set, 1, 20_000);
                    tell.send(0).expect("the main thread listens");
                    told
                })
            });
            for _ in 0..3 {
                until_asleep(std::process::id() as i32, hear.recv().expect("a thread's number"));
            }
            sys::epoll_ctl(set, EPOLL_CTL_ADD, end.0, IN | ET, 7).expect("epoll_ctl");
            for _ in 0..3 {
                b.sync();
                hear.recv().expect("a thread");
                record("recv", recv(end, 4, 0));
            }
            for thread in threads {
                record("told", shown(thread.join().expect("a thread")));
            }
            b.sync();
        },
    )
    .each_side(),
    pair(
        "threads/beside_a_looker",
        "a thread that sleeps in a set hears of what another one, which looks there without waiting, does not take",
        asking_client_after_a_step,
        |b| served_beside_a_looker(b, 0),
    ),
    pair(
        "threads/edges_beside_a_looker",
        "the same by edges",
        asking_client_after_a_step,
        |b| served_beside_a_looker(b, ET),
    ),
    pair(
        "threads/handed_over",
        "a connection moved in one thread is served by another",
        asking_client,
        |b| {
            let end = b.moved();
            record("echoed", in_thread(move || echo_all(end)));
            end.close();
        },
    ).packets_too()
    .each_side(),
    pair(
        "threads/handed_back",
        "a connection moved by a thread that has ended",
        asking_client_in_thread,
        |b| {
            let end = b.fresh();
            thread::scope(|scope| {
                scope.spawn(|| b.warm(end));
            });
            record("echoed", echo_all(end));
            end.close();
        },
    ),
    pair(
        "threads/reader_and_writer",
        "one thread receives what another answers, over copies",
        asking_client,
        |b| {
            let end = b.moved();
            let copy = End(sys::dup(end.0).expect("dup"));
            let (tell, hear) = std::sync::mpsc::channel::<Vec<u8>>();
            let writer = thread::spawn(move || {
                hear.iter().map(|part| send_all(copy, &part).expect("send")).sum::<usize>()
            });
            loop {
                let got = recv(end, 512, 0).expect("recv");
                if got.is_empty() {
                    break;
                }
                tell.send(got).expect("the writer listens");
            }
            drop(tell);
            record("answered", writer.join().expect("the writer"));
            copy.close();
            end.close();
        },
    ).packets_too()
    .each_side(),
    pair(
        "threads/thread_per_connection",
        "fifty connections, each with a thread of its own at either side",
        |a| {
            let ends: Vec<End> = (0..50).map(|_| a.moved()).collect();
            let ask = |end: &End| {
                let end = *end;
                thread::spawn(move || {
                    ask_all(end, 0);
                    sys::close(end.0)
                })
            };
            for thread in ends.iter().map(ask).collect::<Vec<_>>() {
                assert_eq!(thread.join().expect("a client"), Ok(()), "close");
            }
        },
        |b| {
            let serve = |end| thread::spawn(move || echo_all(end));
            let threads: Vec<_> = (0..50).map(|_| serve(b.moved())).collect();
            let bytes = threads.into_iter().map(|thread| thread.join().expect("a server"));
            record("echoed", bytes.sum::<usize>());
        },
    )
    .each_side(),
    pair(
        "threads/watchers",
        "threads that wait for a hang-up by poll and epoll beside busy traffic",
        |a| {
            let end = a.moved();
            a.sync();
            ask_all(end, 0);
            end.shutdown(SHUT_WR);
            end.recv_to_end();
        },
        |b| {
            let end = b.moved();
            let set = sys::epoll_create().expect("epoll");
            sys::epoll_ctl(set, EPOLL_CTL_ADD, end.0, RDHUP, 7).expect("epoll_ctl");
            let by_epoll = thread::spawn(move || shown(sys::epoll_wait(set, 4, -1)));
            let by_poll = thread::spawn(move || sys::poll(&[(end.0, libc::POLLRDHUP)], -1));
            b.sync();
            record("echoed", echo_all(end));
            record("epoll_wait", by_epoll.join().expect("a watcher"));
            let polled = by_poll.join().expect("a watcher");
            record("poll", polled.map(|(_, masks)| sys::event_names(masks[0])));
            end.close();
        },
    )
    .each_side(),
    pair(
        "threads/workers",
        "four threads wait on one set, and each request wakes one of them, by one-shot",
        |a| {
            let ends: Vec<End> = (0..4).map(|_| a.moved()).collect();
            a.sync();
            let ask = |(salt, end): (usize, &End)| {
                let (salt, end) = (salt as u32, *end);
                thread::spawn(move || ask_all(end, salt << 16))
            };
            for thread in ends.iter().enumerate().map(ask).collect::<Vec<_>>() {
                thread.join().expect("a client");
            }
            ends.iter().for_each(|end| end.close());
        },
        |b| {
            let ends: Vec<End> = (0..4).map(|_| b.moved()).collect();
            let set = sys::epoll_create().expect("epoll");
            let events = IN | libc::EPOLLONESHOT as u32;
            for end in &ends {
                sys::epoll_ctl(set, EPOLL_CTL_ADD, end.0, events, end.0 as u64).expect("epoll_ctl");
            }
            b.sync();
            // Readable when all connections have ended, for all workers.
            let (over, tell_over) = sys::pipe().expect("pipe");
            sys::epoll_ctl(set, EPOLL_CTL_ADD, over, IN, u64::MAX).expect("epoll_ctl");
            let open = std::sync::atomic::AtomicUsize::new(ends.len());
            thread::scope(|scope| {
                for _ in 0..4 {
                    scope.spawn(|| {
                        loop {
                            let got = sys::epoll_wait(set, 1, -1).expect("epoll_wait");
                            if got[0].0 == u64::MAX {
                                break;
                            }
                            let end = End(got[0].0 as Fd);
                            let data = recv(end, 64, MSG_DONTWAIT).expect("ready means readable");
                            if !data.is_empty() {
                                send_all(end, &data).expect("send");
                                let (fd, data) = (end.0, end.0 as u64);
                                sys::epoll_ctl(set, EPOLL_CTL_MOD, fd, events, data)
                                    .expect("epoll_ctl");
                            } else if open.fetch_sub(1, std::sync::atomic::Ordering::SeqCst) == 1 {
                                sys::write(tell_over, b"!").expect("write");
                            }
                        }
                    });
                }
            });
            say("all served");
        },
    )
    .each_side(),
    pair(
        "threads/two_in_one_set",
        "data wakes at least one of two threads in epoll_wait on one set",
        |a| {
            let end = a.moved();
            for _ in 0..300 {
                send_all(end, b"x").expect("send");
                a.hear();
            }
            end.close();
        },
        |b| {
            let end = b.moved();
            let set = sys::epoll_create().expect("epoll");
            sys::epoll_ctl(set, EPOLL_CTL_ADD, end.0, IN, 7).expect("epoll_ctl");
            let (tell, hear) = std::sync::mpsc::channel();
            let waiter = |tell: std::sync::mpsc::Sender<usize>| {
                move || {
                    loop {
                        sys::epoll_wait(set, 4, -1).expect("epoll_wait");
                        // The other one may have been here first.
                        match recv(end, 64, MSG_DONTWAIT) {
                            Ok(got) => tell.send(got.len()).expect("the main thread listens"),
                            Err(_) => continue,
                        }
                        if sys::poll(&[(end.0, libc::POLLRDHUP)], 0).is_ok_and(|(n, _)| n > 0) {
                            break;
                        }
                    }
                }
            };
            let threads = [tell.clone(), tell].map(|tell| thread::spawn(waiter(tell)));
            let mut bytes = 0;
            while bytes < 300 {
                bytes += hear.recv().expect("a waiter lives");
                b.tell(0);
            }
            record("bytes", bytes);
            for thread in threads {
                thread.join().expect("a waiter");
            }
        },
    ).packets_too(),
    pair(
        "threads/many_idle",
        "a hundred and twenty connections in one set, of which now one speaks, now another",
        |a| {
            let ends: Vec<End> = (0..120).map(|_| a.moved()).collect();
            let mut order = Sequence::new(80);
            a.sync();
            for i in 0..2000u32 {
                // Mostly the first few, now and then any.
                let which = if i % 5 == 0 { order.below(ends.len()) } else { order.below(3) };
                send_all(ends[which], &i.to_le_bytes()).expect("send");
                assert_eq!(
                    recv_exact(ends[which], 4),
                    Ok(i.to_le_bytes().to_vec()),
                    "reply to {i}"
                );
            }
            ends.iter().for_each(|end| sys::close(end.0).expect("close"));
        },
        |b| {
            let ends: Vec<End> = (0..120).map(|_| b.moved()).collect();
            let set = sys::epoll_create().expect("epoll");
            for end in &ends {
                sys::epoll_ctl(set, EPOLL_CTL_ADD, end.0, IN, end.0 as u64).expect("epoll_ctl");
            }
            b.sync();
            let (mut open, mut served) = (ends.len(), 0);
            while open > 0 {
                for (fd, _) in sys::epoll_wait(set, 8, -1).expect("epoll_wait") {
                    let end = End(fd as Fd);
                    let got = recv(end, 64, MSG_DONTWAIT).expect("ready means readable");
                    if got.is_empty() {
                        open -= 1;
                        sys::close(end.0).expect("close");
                    } else {
                        send_all(end, &got).expect("send");
                        served += 1;
                    }
                }
            }
            record("served", served);
        },
    )
    .each_side(),
    pair(
        "threads/cancelled",
        "pthread_cancel ends a thread that waits in a receive, and the connection lives on",
        |a| {
            let end = a.moved();
            a.sync();
            end.send(b"after");
            end.recv(10);
            end.recv_to_end();
        },
        |b| {
            let end = b.moved();
            for _ in 0..3 {
                record(
                    "cancelled",
                    sys::cancel_in(end.0, Waits::Recv, |tid| {
                        until_asleep(std::process::id() as i32, tid);
                    }),
                );
            }
            b.sync();
            end.recv(10);
            end.send(b"answer");
            end.close();
        },
    ).packets_too()
    .each_side(),
    pair(
        "threads/cancelled_in_waits",
        "pthread_cancel ends a thread inside poll, select or epoll_wait at once, and the connection lives on, and ends",
        |a| {
            let end = a.moved();
            a.sync();
            end.send(b"after");
            end.recv(10);
            end.recv_to_end();
        },
        |b| {
            let end = b.moved();
            cancel_in_waits(end);
            b.sync();
            end.recv(10);
            end.send(b"answer");
            end.close();
        },
    )
    .each_side(),
    pair(
        "threads/left_in_a_set",
        "waits in a set of none are left by cancellation and by a long jump: who waits there afterwards for a connection sleeps",
        |a| {
            for _ in 0..2 {
                let end = a.moved();
                a.sync();
                end.send(b"x");
                end.recv_to_end();
            }
        },
        |b| {
            for jumps in [false, true] {
                let set = sys::epoll_create().expect("epoll_create");
                if jumps {
                    // (That a frame was left shows at a call from further up the stack.)
                    let left = sys::left_by_jump(libc::SIGALRM, 20, &mut || {
                        further_down(&mut || drop(sys::epoll_wait(set, 1, -1)));
                    });
                    record("left by a jump", left);
                } else {
                    let until = |tid| until_asleep(std::process::id() as i32, tid);
                    record("cancelled", sys::cancel_in(set, Waits::EpollWait, until));
                }
                let end = b.moved();
                sys::epoll_ctl(set, EPOLL_CTL_ADD, end.0, IN, 7).expect("epoll_ctl");
                let (waiter, side) = (sys::thread_id(), &mut *b);
                thread::scope(|scope| {
                    let looker = scope.spawn(move || {
                        let asleep = falls_asleep(std::process::id() as i32, waiter, 20);
                        (asleep, side.sync()).0
                    });
                    record("told", format!("{:?}", sys::epoll_wait(set, 4, PATIENCE_MS)));
                    record("slept", looker.join().expect("no panic"));
                });
                end.close();
                sys::close(set).expect("close");
            }
        },
    )
    .each_side(),
    pair(
        "threads/waits_in_a_closed_set",
        "a wait in a set that is closed beside it goes on, and is nothing to the set that is made next: who waits there sleeps",
        |a| {
            let end = a.moved();
            a.sync();
            end.send(b"x");
            end.recv_to_end();
        },
        |b| {
            let (old, mut set) = (sys::epoll_create().expect("epoll_create"), -1);
            let waited = beside(
                move || sys::epoll_wait(old, 1, 1000).map(|events| events.len()),
                || {
                    sys::close(old).expect("close");
                    set = sys::epoll_create().expect("epoll_create");
                },
            );
            record("the first wait", waited);
            let end = b.moved();
            sys::epoll_ctl(set, EPOLL_CTL_ADD, end.0, IN, 7).expect("epoll_ctl");
            let (waiter, side) = (sys::thread_id(), &mut *b);
            thread::scope(|scope| {
                let looker = scope.spawn(move || {
                    let asleep = falls_asleep(std::process::id() as i32, waiter, 20);
                    (asleep, side.sync()).0
                });
                record("told", format!("{:?}", sys::epoll_wait(set, 4, PATIENCE_MS)));
                record("slept", looker.join().expect("no panic"));
            });
            end.close();
        },
    )
    .each_side(),
    pair(
        "threads/waits_in_a_closed_set_of_others",
        "and takes nothing of what the next set is about to tell, though it has slept for a connection of its own",
        |a| {
            let (_, end) = (a.moved(), a.moved());
            a.sync();
            end.send(b"x");
            a.sync();
        },
        |b| {
            let (quiet, end) = (b.moved(), b.moved());
            let (old, mut set) = (sys::epoll_create().expect("epoll_create"), -1);
            sys::epoll_ctl(old, EPOLL_CTL_ADD, quiet.0, IN, 6).expect("epoll_ctl");
            let waited = beside(
                move || sys::epoll_wait(old, 1, 1000).map(|events| events.len()),
                || {
                    sys::close(old).expect("close");
                    set = sys::epoll_create().expect("epoll_create");
                    sys::epoll_ctl(set, EPOLL_CTL_ADD, end.0, IN | ET, 7).expect("epoll_ctl");
                    b.sync();
                    end.until_unread(1);
                },
            );
            record("the first wait", waited);
            record("told", format!("{:?}", sys::epoll_wait(set, 4, PATIENCE_MS)));
            b.sync();
        },
    )
    .each_side(),
    pair(
        "threads/cancelled_and_closed",
        "a thread that is cancelled where it waits closes its connection at its end",
        |a| {
            for _ in CLOSED_WHERE_CANCELLED {
                let end = a.moved();
                a.sync();
                end.recv_to_end();
            }
        },
        |b| {
            for (name, waits) in CLOSED_WHERE_CANCELLED {
                let end = b.moved();
                b.sync();
                let until = |tid| until_asleep(std::process::id() as i32, tid);
                record(name, sys::cancel_and_close_in(end.0, waits, until));
            }
        },
    )
    .packets_too()
    .each_side(),
    pair(
        "threads/cancelled_before_the_move",
        "a connection on which threads were cancelled inside recv, poll, select or epoll_wait is moved as any other",
        |a| {
            let end = a.fresh();
            a.sync();
            a.warm(end);
            end.recv_to_end();
        },
        |b| {
            let end = b.fresh();
            cancel_in_waits(end);
            b.sync();
            b.warm(end);
            end.close();
        },
    ),
    pair(
        "threads/cancelled_in_traffic",
        "pthread_cancel ends a thread that is never idle",
        |a| {
            let end = a.moved();
            // Until it is closed, perhaps with an answer unread.
            while recv(end, 1, 0).is_ok_and(|request| {
                !request.is_empty() && send_all(end, &request).is_ok()
            }) {}
        },
        |b| {
            let end = b.moved();
            for _ in 0..3 {
                record("cancelled", sys::cancel_in(end.0, Waits::Traffic, |_| pause(20)));
            }
            end.close();
        },
    ),
    // ---- one thread, both directions, much data ----
    pair(
        "threads/bulk_poll",
        "6 MB each way at once from one thread, by poll",
        |a| bulk(a, poll_for, 0),
        |b| bulk(b, poll_for, 0),
    ),
    pair(
        "threads/bulk_select",
        "6 MB each way at once from one thread, by select",
        |a| bulk(a, select_for, 0),
        |b| bulk(b, select_for, 0),
    ),
    pair(
        "threads/bulk_epoll",
        "6 MB each way at once from one thread, by epoll",
        |a| bulk(a, epoll_for, 0),
        |b| bulk(b, epoll_for, 0),
    )
    .each_side(),
    pair(
        "threads/bulk_edge",
        "6 MB each way at once from one thread, by edges alone",
        |a| bulk(a, epoll_edge_for, ET),
        |b| bulk(b, epoll_edge_for, ET),
    )
    .all_families()
    .each_side(),
    pair(
        "threads/ended_beside",
        "a thread sleeps in a receive while the one that moved the connection ends",
        |a| {
            let end = a.fresh();
            a.warm(end);
            a.sync();
            end.send(b"late");
            a.sync();
        },
        |b| {
            let end = b.fresh();
            thread::scope(|scope| {
                scope.spawn(|| b.warm(end));
            });
            let got = beside(move || recv(end, 10, 0), || b.sync());
            record("recv", got);
            b.sync();
        },
    ),
    pair(
        "threads/one_sleeps_beside_a_set",
        "connections of one thread: it receives on one while another thread waits for the other in a set",
        |a| {
            let (one, other) = (a.moved(), a.moved());
            let rounds = (0..500).all(|_| send_all(one, b"x") == Ok(1) && recv_exact(one, 1).is_ok());
            record("rounds", rounds);
            other.send(b"enough");
        },
        |b| {
            let (one, other) = (b.moved(), b.moved());
            let set = sys::epoll_create().expect("epoll_create1");
            sys::epoll_ctl(set, libc::EPOLL_CTL_ADD, one.0, IN, 1).expect("epoll_ctl");
            let thread = thread::spawn(move || {
                (0..500).all(|_| {
                    sys::epoll_wait(set, 1, -1).is_ok()
                        && recv_exact(one, 1).is_ok()
                        && send_all(one, b"y") == Ok(1)
                })
            });
            other.recv(10);
            record("all answered", thread.join().expect("the thread ends"));
        },
    ).packets_too()
    .each_side(),
    pair(
        "threads/receive_asleep",
        "three threads that receive from one connection sleep while nothing comes, whatever has woken them before",
        |a| {
            let end = a.moved();
            for _ in 0..BYTES_TO_THREE {
                a.hear();
                end.send(b"x");
            }
            a.hear();
            end.close();
        },
        receive_in_three,
    )
    .each_side(),
    pair(
        "threads/two_wait_for_room_asleep",
        "two threads wait for room, asleep, beside a byte that nobody reads",
        |a| leave_full(a, |end| end.send(b"y"), false),
        |b| {
            let end = b.moved();
            wait_for_room(b, end, 2, poll_for_room);
        },
    ),
    pair(
        "threads/waits_for_room_asleep",
        "a thread waits for room, asleep, beside more unread bytes than a ring holds",
        |a| leave_full(a, |end| drop(fill(end)), false),
        |b| {
            let end = b.moved();
            wait_for_room(b, end, 1, poll_for_room);
        },
    ),
    pair(
        "threads/priorities",
        "a thread of higher priority sends while one of lower priority, on the same processor, is in the middle of it",
        |a| {
            let end = a.moved();
            record("both", recv_exact(end, 16).map(|got| got.len()));
            end.send(b"both");
        },
        |b| {
            let end = b.moved();
            let page = sys::LatePage::new(b"the low ");
            let (go, tell) = sys::pipe().expect("pipe");
            let sends = AtomicBool::new(false);
            thread::scope(|scope| {
                let low = scope.spawn(|| {
                    rare::take_priority(1);
                    sys::send(end.0, &page.bytes()[..8], 0)
                });
                let high = scope.spawn(|| {
                    rare::take_priority(2);
                    sys::read(go, &mut [0]).expect("read");
                    sends.store(true, Ordering::SeqCst);
                    sys::send(end.0, b"the high", 0)
                });
                page.await_touch();
                sys::write(tell, b"!").expect("write");
                until("it sends", || sends.load(Ordering::SeqCst));
                page.provide();
                record("low", low.join().expect("a thread"));
                record("high", high.join().expect("a thread"));
            });
            end.recv_exact(4);
        },
    ),
    pair(
        "threads/dup2_onto_a_bell",
        "who sleeps hears, though another thread takes the numbers that ringlet has; what stands there is left alone",
        |a| {
            let end = a.moved();
            for _ in 0..SLEEPS {
                a.hear();
                end.send(b"asleep?");
                end.recv_exact(5);
            }
            end.recv_to_end();
        },
        |b| {
            let (end, sleeper) = (b.moved(), sys::thread_id());
            let set = sys::epoll_create().expect("epoll_create1");
            sys::epoll_ctl(set, EPOLL_CTL_ADD, end.0, IN, 7).expect("epoll_ctl");
            for round in 0..SLEEPS {
                let file = sys::eventfd(5).expect("an eventfd");
                thread::scope(|scope| {
                    scope.spawn(|| {
                        until_asleep(std::process::id() as i32, sleeper);
                        for number in TAKEN.into_iter().flatten() {
                            let _ = sys::dup2(file, number);
                        }
                        b.tell(0);
                    });
                    match round % 3 {
                        0 => {}
                        1 => {
                            let told = sys::poll(&[(end.0, libc::POLLIN)], 20_000);
                            record("poll", told.map(|told| told.0));
                        }
                        _ => record("told", shown(sys::epoll_wait(set, 1, 20_000))),
                    }
                    record("recv", recv(end, 7, 0));
                });
                let mut count = [0; 8];
                if sys::poll(&[(file, libc::POLLIN)], 0).is_ok_and(|(ready, _)| ready == 1) {
                    sys::read(file, &mut count).expect("read");
                }
                record("count", u64::from_ne_bytes(count));
                for number in TAKEN.into_iter().flatten().chain([file]) {
                    let _ = sys::close(number);
                }
                end.send(b"awake");
            }
            end.close();
        },
    ),
    solo(
        "threads/smallest_stack",
        "a thread with the smallest stack makes every call that moves data or waits",
        |s| {
            let (near, far) = s.both_ends();
            let set = sys::epoll_create().expect("epoll_create1");
            sys::epoll_ctl(set, EPOLL_CTL_ADD, far.0, libc::EPOLLIN as u32, 1).expect("epoll_ctl");
            let file = || sys::file_with(b"").expect("a file");
            let mut room = Room::new(file(), file(), sys::pipe().expect("pipe"), set);
            for _ in 0..3 {
                let failed = rare::on_the_smallest_stack(|| room.every_call(near.0, far.0));
                record("the call that failed", failed);
            }
        },
    ),
];

const SLEEPS: u32 = 6;
/// Where ringlet's descriptors begin, by the limit; they find room above.
const TAKEN: [std::ops::Range<Fd>; 2] = [510..560, 1020..1100];

/// As `asking_client`, but the connection is warmed up by a thread that then ends.
fn asking_client_in_thread(a: &mut Side) {
    let end = a.fresh();
    thread::scope(|scope| {
        scope.spawn(|| a.warm(end));
    });
    ask_all(end, 0);
    end.shutdown(SHUT_WR);
    end.recv_to_end();
}
