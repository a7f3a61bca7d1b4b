//! epoll_ctl on descriptors of followed sockets.

use super::arm::want;
use super::bells::{kick_sleepers, mark, others_sleep};
use super::elder::is_anothers;
use super::hot::{cool, heat};
use super::look::look;
use super::registration::{
    count_neighbour, is_neighbour, our_event, prepare, register_anew, sending_changed, take_up,
    withdraw,
};
use super::set::{
    self, EPOLLET, EPOLLEXCLUSIVE, EPOLLIN, EPOLLONESHOT, EPOLLOUT, EPOLLREAD, NO_QUESTION, Set,
    Watch, entry, find, is_linked, is_of,
};
use crate::reasons::Reason;
use crate::socket::table::{Sending, Socket, Tables, tables};
use ringlet_core::sync::Ordering;
use ringlet_linux::fd::{self, epoll_event};
use ringlet_linux::sys::{self, Errno, Sys};
use ringlet_linux::tcp;

/// KERNEL: what may stand beside EPOLLEXCLUSIVE.
const EXCLUSIVE_ALLOWS: u32 = EPOLLIN
    | EPOLLOUT
    | EPOLLET
    | EPOLLEXCLUSIVE
    | (libc::EPOLLERR | libc::EPOLLHUP | libc::EPOLLWAKEUP) as u32;

/// epoll_ctl on a descriptor of a followed socket.
pub fn control(
    set_index: u32,
    op: i32,
    fd: i32,
    socket: &'static Socket,
    event: Option<epoll_event>,
) -> Sys<()> {
    let tables = tables().ok_or(Errno::EBADF)?;
    let set = set::at(set_index);
    let ours = || {
        let (_, watch) = socket.is_ours().then(|| find(tables, socket, set_index, fd))??;
        watch.adopted.is().then(|| control_adopted(tables, set, op, socket, watch, event))
    };
    if let Some(done) = ours() {
        return done;
    }
    // Until it is adopted, and then it stays so: what is registered here and in the kernel changes together.
    let _registering = socket.registering.take_first();
    if let Some(done) = ours() {
        return done;
    }
    if op == libc::EPOLL_CTL_ADD
        && let Some(event) = event
    {
        if set.given.is() {
            crate::socket::keep_on_kernel(socket, Reason::Passed);
        }
        return add(tables, set, set_index, fd, socket, event);
    }
    let watch = find(tables, socket, set_index, fd);
    if let (libc::EPOLL_CTL_MOD, Some(event), Some((index, watch))) = (op, event, watch) {
        return register(set, op, fd, socket, event, (index, watch), || aim(watch, event));
    }
    fd::epoll_ctl(set.epfd.get() as i32, op, fd, event)?;
    if let (libc::EPOLL_CTL_DEL, Some((_, watch))) = (op, watch) {
        withdraw(watch);
    }
    Ok(())
}

/// Registers in the kernel's set what is the kernel's so far; `done` notes it.
///
/// By one-shot it is registered under our mark, so that it is known when it has told (`restore`): it may move at any time then. Whoever gets
/// the mark waits for the set's lock until it is noted.
fn register(
    set: &Set,
    op: i32,
    fd: i32,
    socket: &Socket,
    event: epoll_event,
    (index, watch): (u32, &Watch),
    done: impl FnOnce(),
) -> Sys<()> {
    let one_shot = event.events & EPOLLONESHOT != 0;
    let _held = (one_shot || watch.marked.is()).then(|| set.take());
    let marked = one_shot && !socket.is_kernels_for_good() && !set.given.is() && !is_anothers(set);
    let data = if marked { mark(index) } else { event.u64 };
    fd::epoll_ctl(set.epfd.get() as i32, op, fd, Some(epoll_event { u64: data, ..event }))?;
    watch.marked.set(if marked { data as u32 } else { 0 });
    done();
    Ok(())
}

/// `registering` held.
fn add(
    tables: &Tables,
    set: &Set,
    set_index: u32,
    fd: i32,
    socket: &Socket,
    event: epoll_event,
) -> Sys<()> {
    if event.events & EPOLLEXCLUSIVE != 0 && event.events & !EXCLUSIVE_ALLOWS != 0 {
        return Err(Errno::EINVAL);
    }
    let epfd = set.epfd.get() as i32;
    let attached = socket.is_ours() && !set.given.is();
    let (index, watch) = entry(tables, socket).ok_or(Errno::ENOMEM)?;
    watch.fd.set(fd as u32);
    watch.adopted.set(0);
    watch.dormant.set(0);
    // What an earlier user of this entry had seen is nothing to this one.
    watch.rests.end();
    watch.seen.set(0);
    watch.seen_epoch.set(socket.epoch.get());
    watch.seen_received.set(0);
    watch.settled.set(0);
    watch.seen_ends.set(0);
    watch.seen_room.set(socket.end().room_news.get());
    watch.told.set(0);
    watch.told_in(NO_QUESTION);
    watch.linked.set(0);
    aim(watch, event);
    if !attached {
        let (op, of) = (libc::EPOLL_CTL_ADD, (index, watch));
        register(set, op, fd, socket, event, of, || watch.set.set(set_index))?;
        // (What is connected never does.)
        let listens = || {
            !socket.is_begun()
                && tcp::int_option(fd, libc::SOL_SOCKET, libc::SO_ACCEPTCONN) == Ok(1)
        };
        count_neighbour(set, watch, is_neighbour(socket) && !listens());
        return Ok(());
    }
    prepare(set, set_index);
    watch.marked.set(mark(index) as u32);
    let ours = our_event(watch, socket, event.events);
    if let Err(error) = fd::epoll_ctl(epfd, libc::EPOLL_CTL_ADD, fd, Some(ours)) {
        set.adopted.fetch_sub(1, Ordering::SeqCst);
        return Err(error);
    }
    watch.set.set(set_index);
    take_up(tables, set, watch, want);
    link_if_ready(tables, set, watch, 0);
    Ok(())
}

/// On a watch that is ours the kernel need not be asked. A removed one stays registered there, dormant: programs that add and remove a
/// connection for every message pay no system call for it, and the kernel drops it when the connection is closed.
fn control_adopted(
    tables: &Tables,
    set: &Set,
    op: i32,
    socket: &Socket,
    watch: &Watch,
    event: Option<epoll_event>,
) -> Sys<()> {
    let asked = watch.events.get();
    let mut heard = asked;
    {
        let held = set.take_first();
        let dormant = watch.dormant.is();
        if dormant || watch.disabled.is() {
            heard = 0;
        }
        match (op, event) {
            (libc::EPOLL_CTL_ADD, _) if !dormant => return Err(Errno::EEXIST),
            (libc::EPOLL_CTL_MOD | libc::EPOLL_CTL_DEL, _) if dormant => return Err(Errno::ENOENT),
            (libc::EPOLL_CTL_ADD, Some(event))
                if event.events & EPOLLEXCLUSIVE != 0 && event.events & !EXCLUSIVE_ALLOWS != 0 =>
            {
                return Err(Errno::EINVAL);
            }
            (libc::EPOLL_CTL_MOD, Some(event)) if (event.events | asked) & EPOLLEXCLUSIVE != 0 => {
                return Err(Errno::EINVAL);
            }
            (libc::EPOLL_CTL_ADD | libc::EPOLL_CTL_MOD, Some(event)) => {
                aim(watch, event);
                watch.dormant.set(0);
                heat(set, watch, held.is_some());
            }
            (libc::EPOLL_CTL_DEL, _) => {
                watch.dormant.set(1);
                watch.linked.set(0);
                if held.is_some() {
                    cool(set, watch);
                }
            }
            _ => return Err(Errno::EINVAL),
        }
    }
    count_neighbour(set, watch, !watch.dormant.is() && is_neighbour(socket));
    if op != libc::EPOLL_CTL_DEL {
        if (asked ^ watch.events.get()) & EPOLLOUT != 0 && socket.end().sending() != Sending::Ring {
            register_anew(socket, watch);
        }
        if link_if_ready(tables, set, watch, heard) || others_sleep(set) {
            kick_sleepers(set);
        }
    }
    if socket.has_datagrams() {
        // Room for datagrams only the kernel knows.
        sending_changed(socket);
    }
    Ok(())
}

/// What the program asks of a watch; the kernel looks at readiness anew then, and so do we.
fn aim(watch: &Watch, event: epoll_event) {
    watch.events.set(event.events);
    watch.data.set(event.u64);
    watch.disabled.set(0);
    watch.fresh.set(1);
    watch.again.set(1);
    watch.turn.set(0);
}

/// KERNEL: what is ready as it is asked for is put into the list of what is ready, unless it is there: since it was reported by level, or its
/// data came while that was asked for (`heard`). True if it was put there now.
fn link_if_ready(tables: &Tables, set: &Set, watch: &Watch, heard: u32) -> bool {
    if is_linked(watch) || set.hot_count.get() < 2 && !set.beside.is() {
        return false;
    }
    // (In a handler that interrupted its holder: whoever sleeps looks.)
    let Some(_held) = set.take() else { return true };
    if !is_of(watch, set) {
        return false;
    }
    let ready = look(tables, watch).events;
    let new = ready != 0 && ready & heard & EPOLLREAD == 0;
    if new {
        watch.linked.set(sys::ticks());
    }
    new
}
