//! The descriptor that a socket holds at the rendezvous.

use super::table::{Socket, tables};
use crate::plain::P32;
use ringlet_linux::meet as rendezvous;
use ringlet_linux::{proof, sys, tcp};

/// Gives up what a socket has begun at the rendezvous.
pub fn abandon(socket: &Socket) {
    let given = given(socket);
    let meeting = socket.meeting.swap(0) as i32;
    if meeting != 0 {
        proof::take_back(socket.fd(), meeting);
        part(meeting);
        let [lifeline, channel] = given;
        // KERNEL: with words unread, a close alone is a reset there.
        if channel.is() {
            let _ = tcp::shut_down(channel.get() as i32, libc::SHUT_WR);
        }
        // Who would have carried is not to wait for us.
        for word in [lifeline, channel] {
            match word.swap(0) as i32 {
                0 => {}
                fd => part(fd),
            }
        }
    }
}

/// What the node service has given it at this meeting. (It may be closing.)
fn given(socket: &Socket) -> [&P32; 2] {
    match socket.meet_no_more_anew() {
        true => [&socket.next_lifeline, &socket.next_channel],
        false => socket.given(),
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
    if !socket.channel.is() {
        socket.channel.set(kept(socket));
    }
}

/// Its number: it is at the rendezvous no more.
pub fn kept(socket: &Socket) -> u32 {
    let meeting = socket.meeting.swap(0) as i32;
    proof::take_back(socket.fd(), meeting);
    rendezvous::admit_descriptors(meeting, false);
    meeting as u32
}

/// In a child by fork: it is the parent's.
pub fn forget(socket: &Socket) {
    let given = given(socket);
    let meeting = socket.meeting.swap(0) as i32;
    if meeting != 0 {
        close_ours(meeting);
        for word in given {
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
