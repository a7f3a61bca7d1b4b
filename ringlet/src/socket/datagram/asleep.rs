//! Who waits in the kernel on a UDP socket: as long as somebody does, its lanes are turned there.

use super::inlets::{self, Inlets, Mailbox};
use crate::socket::epoll::registration::{heat_all, may_sleep_on};
use crate::socket::release;
use crate::socket::table::{Socket, tables};
use crate::waiting::spin;
use ringlet_core::sync::Ordering;

/// A thread that waits in the kernel for something to receive: while there is one, all that is sent to the socket goes there.
pub struct Asleep(&'static Socket);

impl Drop for Asleep {
    fn drop(&mut self) {
        // ORDER: SeqCst; pairs with `sleepers`.
        release::leave_native(&self.0.end().native_receivers);
        spin::woken(0);
        awake(self.0);
    }
}

/// The lanes stay turned to the kernel, as they are, while a thread looks there.
pub struct Still(&'static Socket);

impl Drop for Still {
    fn drop(&mut self) {
        // ORDER: SeqCst; pairs with `sleepers`. (Whoever receives, or looks behind this, turns them back.)
        release::leave_native(&self.0.end().native_receivers);
    }
}

/// Receive lock held.
pub(super) fn stay(socket: &Socket) -> Option<Still> {
    let tables = tables()?;
    let socket = tables.sockets.at(tables.index_of(socket) as usize);
    socket.enter_native(|end| &end.native_receivers);
    Some(Still(socket))
}

/// `None`: there is something to receive.
pub(super) fn fall_asleep(socket: &Socket) -> Option<Asleep> {
    let tables = tables()?;
    let socket = tables.sockets.at(tables.index_of(socket) as usize);
    socket.enter_native(|end| &end.native_receivers);
    let asleep = Asleep(socket);
    if arm(socket, false) { None } else { Some(asleep) }
}

/// Turns the lanes to the kernel. True if there is something in them; `at_once`: that may not keep the caller from sleeping.
pub fn arm(socket: &Socket, at_once: bool) -> bool {
    let Some((all, mailbox)) = inlets::of(socket) else { return false };
    let Some(_held) = socket.end().receive_lock.take() else { return true };
    mailbox.turn_to_kernel(all, at_once)
}

/// Turns the lanes back, if nobody sleeps any more.
pub fn awake(socket: &Socket) {
    let Some((all, mailbox)) = inlets::of(socket) else { return };
    let roused = mailbox.is_asleep()
        && socket.end().receive_lock.take().is_some_and(|_held| rouse(socket, all, mailbox));
    if roused {
        heat_all(socket);
    }
}

/// Does anybody wait in the kernel on this socket, or may a set in which it is?
pub(super) fn sleepers(socket: &Socket) -> bool {
    let end = socket.end();
    end.native_receivers.load(Ordering::SeqCst) != 0
        || end.holders.count() != 1
        || may_sleep_on(socket)
}

/// Turns the lanes back, if nobody sleeps any more; then epoll sets are to be told, once the receive lock, which the caller holds, is free.
pub(super) fn rouse(socket: &Socket, all: &Inlets, mailbox: &Mailbox) -> bool {
    mailbox.is_asleep() && !sleepers(socket) && mailbox.turn_to_ring(all)
}

/// A thread is about to sleep on the socket: datagrams find it in the kernel.
pub fn falls_asleep(socket: &Socket) {
    if socket.has_datagrams() {
        socket.enter_native(|end| &end.native_receivers);
        // What is in the lanes is found by the look that follows; who does not ask for it needs no waking by more of it.
        arm(socket, false);
    }
}

/// It is awake.
pub fn is_awake(socket: &Socket) {
    if socket.has_datagrams() {
        release::leave_native(&socket.end().native_receivers);
        awake(socket);
    }
}
