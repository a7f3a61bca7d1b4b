//! splice(2): what only the kernel can do for its own connection, done where the bytes are. Out of a connection they are moved into the
//! pipe here; into one the kernel moves them, with the direction aside.

use super::receive::receive_now;
use super::send::step_aside;
use super::wait::{Want, deadline, wait};
use crate::reasons::Reason;
use crate::socket::in_use::{self, Waiter};
use crate::socket::table::{End, Socket};
use crate::socket::{Native, carrier, control, patience, tap, words};
use crate::waiting::{signals, sleep};
use ringlet_core::memory::{Buffer, Buffers};
use ringlet_linux::fd;
use ringlet_linux::map::{CHUNK_BYTES, Chunk};
use ringlet_linux::sys::{self, Errno, Sys};
use ringlet_linux::unix::FromKernel;

/// KERNEL: a pipe that polls as writable takes so much without waiting (pipe(7)).
const PIPE_BUF: usize = 4096;

/// Moves bytes out of a stream into a pipe that is open for writing. `Ok(0)` is the end of the stream.
pub fn out(socket: &Socket, pipe: i32, len: usize, flags: u32) -> Sys<usize> {
    let end = socket.end();
    let pipe_waits = !fd::is_nonblocking(pipe);
    let splice_waits = pipe_waits && flags & libc::SPLICE_F_NONBLOCK == 0;
    let waits =
        !end.nonblocking.is() && (splice_waits || !carrier::facts(socket).heeds_splice_flag);
    let most = if pipe_waits { PIPE_BUF } else { CHUNK_BYTES };
    let (mut until, mut waiter) = (None, None);
    let mut total = 0;
    while total < len {
        // KERNEL: the pipe is looked at first; once some bytes are moved, nothing is waited for.
        let cancelled = || {
            if waiter.is_some() {
                in_use::wait_no_more(socket);
            }
        };
        match room(pipe, splice_waits && total == 0, &cancelled) {
            Err(_) if total > 0 => break,
            other => other?,
        }
        let mine = waiter.is_some() as u32;
        let step = {
            let _held = end.receive_lock.take_first().ok_or(Errno::EINTR)?;
            out_now(socket, end, pipe, most.min(len - total), waits, mine)
        };
        match step {
            Ok(0) => break,
            Ok(n) => total += n,
            Err(Errno::EAGAIN) if total > 0 => break,
            Err(Errno::EAGAIN) if waits => {
                let until = *until.get_or_insert_with(|| deadline(end.receive_timeout_ns.get()));
                let waiter = waiter.get_or_insert_with(|| Waiter::new(socket));
                wait(waiter, Want::Data, until)?;
            }
            Err(error) if total > 0 => {
                words::tell_later(end, error);
                break;
            }
            Err(error) => return Err(error),
        }
    }
    Ok(total)
}

/// One round, with the receive lock held: bytes are looked at, put into the pipe as far as it takes them, and only then taken.
fn out_now(
    socket: &Socket,
    end: &End,
    pipe: i32,
    max: usize,
    waits: bool,
    mine: u32,
) -> Sys<usize> {
    let chunk = Chunk::take().ok_or(Errno::ENOMEM)?;
    let base = chunk.base();
    let receive = |max: usize, flags: i32| {
        let list = [Buffer { base, len: max }];
        // SAFETY: within the chunk, which outlives the call.
        #[allow(unsafe_code)]
        let mut to = unsafe { Buffers::new(&list) };
        tap::recorded(socket, end, tap::Direction::of_receive(flags), &mut to, |to, asked| {
            if asked != 0 {
                control::notice(socket, end);
                control::leave_idle(socket, end);
            }
            receive_now(socket, end, to, flags, waits, mine, &mut FromKernel::new(None))
        })
    };
    let seen = receive(max.min(CHUNK_BYTES), libc::MSG_PEEK)?;
    if seen == 0 {
        return Ok(0);
    }
    // SAFETY: `receive` has initialised so many bytes of the chunk, and writes no more while they are read.
    #[allow(unsafe_code)]
    let bytes = unsafe { core::slice::from_raw_parts(base, seen) };
    let moved = sys::write(pipe, bytes)?;
    let mut taken = 0;
    while taken < moved {
        match receive(moved - taken, 0) {
            Ok(n @ 1..) => taken += n,
            // What was there a moment ago, under this lock.
            _ => return Err(patience::corrupt(socket)),
        }
    }
    Ok(moved)
}

/// Waits for room in the pipe, if that is to be waited for.
fn room(pipe: i32, waits: bool, cancelled: &dyn Fn()) -> Sys<()> {
    loop {
        let mut fds = [fd::pollfd { fd: pipe, events: libc::POLLOUT, revents: 0 }];
        signals::begin_wait();
        match sleep::poll(&mut fds, (!waits).then_some(0), None, cancelled) {
            Err(Errno::EINTR) if waits && signals::restart() => continue,
            other => drop(other?),
        }
        return match fds[0].revents {
            // KERNEL: nobody reads the pipe.
            events if events & libc::POLLERR != 0 => {
                sys::raise_sigpipe();
                Err(Errno::EPIPE)
            }
            0 => Err(Errno::EAGAIN),
            _ => Ok(()),
        };
    }
}

/// The kernel is about to move bytes into this stream by a call of the program's: its direction is there, and stays while the call is under way.
pub fn aside(socket: &'static Socket, waits: bool, reason: Reason) -> Sys<Native> {
    let end = socket.end();
    let waits = waits && !end.nonblocking.is();
    let (mut until, mut waiter) = (None, None);
    loop {
        let step = {
            let _held = end.send_lock.take_first().ok_or(Errno::EINTR)?;
            let Some(ring) = socket.outgoing() else { return Err(Errno::EBADF) };
            step_aside(socket, end, &ring, reason).map(|()| {
                if reason == Reason::Urgent {
                    // Behind such a byte the direction never enters the ring again.
                    end.sender.keep_out();
                }
                // (Under the lock, so that `sides::try_start` sees it.)
                Native::begin(socket, &end.native_senders)
            })
        };
        match step {
            Err(Errno::EAGAIN) if waits => {
                let until = *until.get_or_insert_with(|| deadline(end.send_timeout_ns.get()));
                let waiter = waiter.get_or_insert_with(|| Waiter::new(socket));
                wait(waiter, Want::Room, until)?;
            }
            other => return other,
        }
    }
}
