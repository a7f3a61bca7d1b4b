//! The descriptor that a socket holds at the rendezvous.

use super::table::{Socket, tables};
use ringlet_linux::meet as rendezvous;
use ringlet_linux::{proof, sys, tcp};

/// Gives up what a socket has begun at the rendezvous.
pub fn abandon(socket: &Socket) {
    let meeting = socket.meeting.swap(0) as i32;
    if meeting != 0 {
        proof::take_back(socket.fd(), meeting);
        part(meeting);
        // KERNEL: with words unread, a close alone is a reset there.
        if socket.channel.is() {
            let _ = tcp::shut_down(socket.channel.get() as i32, libc::SHUT_WR);
        }
        // Who would have carried is not to wait for us.
        for word in [&socket.lifeline, &socket.channel] {
            match word.swap(0) as i32 {
                0 => {}
                fd => part(fd),
            }
        }
    }
}

/// What it was for is done.
pub fn leave(socket: &Socket) {
    let meeting = socket.meeting.swap(0) as i32;
    if meeting != 0 {
        proof::take_back(socket.fd(), meeting);
        part(meeting);
    }
}

/// It stays, as the ends' channel (`orphan`), if they have no other. Nothing but words is sent there.
pub fn keep(socket: &Socket) {
    if socket.channel.is() {
        return;
    }
    let meeting = socket.meeting.swap(0) as i32;
    proof::take_back(socket.fd(), meeting);
    rendezvous::admit_descriptors(meeting, false);
    socket.channel.set(meeting as u32);
}

/// In a child by fork: it is the parent's.
pub fn forget(socket: &Socket) {
    let meeting = socket.meeting.swap(0) as i32;
    if meeting != 0 {
        close_ours(meeting);
        for word in [&socket.lifeline, &socket.channel] {
            match word.swap(0) as i32 {
                0 => {}
                fd => close_ours(fd),
            }
        }
    }
}

/// Closes a descriptor of the rendezvous, into which strangers may have put what they like.
pub fn part(fd: i32) {
    if let Some(tables) = tables() {
        tables.clear(fd);
    }
    rendezvous::part(fd);
}

pub fn close_ours(fd: i32) {
    if let Some(tables) = tables() {
        tables.clear(fd);
    }
    sys::close(fd);
}

pub fn hidden(fd: i32) -> i32 {
    if let Some(tables) = tables() {
        tables.hide(fd);
    }
    fd
}
