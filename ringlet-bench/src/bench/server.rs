//! The serving child: an ordinary socket program that ends when its client is gone, or when its parent kills it.

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd};

use anyhow::{Context, Result, bail};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};

use super::carried;
use super::datagrams;
use super::many;
use super::messages;
use super::orders::obey_orders;
use super::spec::{Family, Said, Spec, Waiting, Work};
use super::talk::{BUFFER_BYTES, say};
use super::wire::{Listener, Wire, read_now, write_all_waiting};

pub fn serve(spec: &Spec) -> Result<()> {
    if let Work::Messages { .. } = spec.work {
        return messages::serve();
    }
    if let Work::Many { .. } | Work::Idle { .. } = spec.work {
        return many::serve(spec);
    }
    if let Work::Carried { .. } = spec.work {
        return carried::serve(spec);
    }
    if spec.family == Family::Udp {
        return datagrams::serve();
    }
    let (listener, address) = Listener::bind(spec.family).context("cannot listen")?;
    say(&Said::Listening { address })?;
    match &spec.work {
        Work::Latency { .. }
        | Work::Stream { .. }
        | Work::Pair
        | Work::Trips { .. }
        | Work::Asleep => obey_orders(listener.accept_for_messages(false)?),
        Work::Events { by: Waiting::Poll } => echo_by_poll(listener),
        Work::Events { by: Waiting::Epoll } | Work::Scale { .. } => echo_by_epoll(listener),
        Work::Connect => loop {
            answer_one(listener.accept()?)?;
        },
        Work::Accept => loop {
            drop(listener.accept()?);
        },
        Work::Messages { .. }
        | Work::Many { .. }
        | Work::Idle { .. }
        | Work::Carried { .. }
        | Work::Datagrams { .. }
        | Work::Ucx
        | Work::Hierarchy { .. }
        | Work::Limits { .. }
        | Work::Native { .. }
        | Work::Reflect { .. }
        | Work::Ethernet { .. }
        | Work::Ethom { .. }
        | Work::Ports { .. }
        | Work::Mirror { .. }
        | Work::HandOver { .. }
        | Work::Cost { .. } => {
            bail!("this needs no listener")
        }
    }
}

fn answer_one(mut wire: Wire) -> io::Result<()> {
    let mut byte = [0];
    wire.read_exact(&mut byte)?;
    wire.write_all(&byte)?;
    // The client closes first, as most do; so TIME_WAIT stays on its side.
    match wire.read(&mut byte)? {
        0 => Ok(()),
        _ => Err(io::Error::other("more than one request on a connection")),
    }
}

fn echo_by_poll(listener: Listener) -> Result<()> {
    let wire = listener.accept_for_messages(true)?;
    let mut buffer = vec![0; BUFFER_BYTES];
    let mut fds = [
        PollFd::new(listener.as_fd(), PollFlags::POLLIN),
        PollFd::new(wire.as_fd(), PollFlags::POLLIN),
    ];
    loop {
        poll(&mut fds, PollTimeout::NONE)?;
        if !echo(&wire, &mut buffer)? {
            return Ok(());
        }
    }
}

/// The usual event loop: the listener and all connections in one level-triggered set.
fn echo_by_epoll(listener: Listener) -> Result<()> {
    const LISTENER: u64 = u64::MAX;
    listener.set_nonblocking()?;
    let set = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
    set.add(&listener, EpollEvent::new(EpollFlags::EPOLLIN, LISTENER))?;
    let mut wires: Vec<Option<Wire>> = Vec::new();
    let mut open = 0;
    let mut buffer = vec![0; BUFFER_BYTES];
    let mut events = [EpollEvent::empty(); 64];
    loop {
        let count = set.wait(&mut events, EpollTimeout::NONE)?;
        for event in &events[..count] {
            if event.data() == LISTENER {
                while let Some(wire) = accept_now(&listener)? {
                    let fd = wire.as_raw_fd() as usize;
                    set.add(&wire, EpollEvent::new(EpollFlags::EPOLLIN, fd as u64))?;
                    if wires.len() <= fd {
                        wires.resize_with(fd + 1, || None);
                    }
                    wires[fd] = Some(wire);
                    open += 1;
                }
                continue;
            }
            let place = &mut wires[event.data() as usize];
            let Some(wire) = place else { continue };
            if !echo(wire, &mut buffer)? {
                *place = None;
                open -= 1;
                if open == 0 {
                    return Ok(());
                }
            }
        }
    }
}

fn accept_now(listener: &Listener) -> io::Result<Option<Wire>> {
    match listener.accept_for_messages(true) {
        Ok(wire) => Ok(Some(wire)),
        Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(None),
        Err(e) => Err(e),
    }
}

/// Sends back what is there; false at the end.
fn echo(wire: &Wire, buffer: &mut [u8]) -> io::Result<bool> {
    match read_now(wire, buffer)? {
        Some(0) => Ok(false),
        Some(count) => write_all_waiting(wire, &buffer[..count]).map(|()| true),
        None => Ok(true),
    }
}
