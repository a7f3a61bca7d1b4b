//! What differs between the kinds of kernel connection that can carry one of ours. Each kind is a module, what they are asked is `Carrier`, and
//! the functions here ask the one that a socket has: whoever moves bytes does not ask which it is.
//!
//! How the kernel counts: TCP tells how many bytes were ever written and read, so a mark of `handover` names a place in all that
//! the connection has carried. It tells so by several measures, and where one contradicts another (packets that could not be sent; a socket
//! in a BPF sockmap, whose bytes go past TCP) no place can be named: the connection stays on the kernel, or ends with an error. A Unix connection tells only
//! whether all that was sent is also taken. Then it can be moved: a
//! `Start` stands at place 0, and both ends count the doorbells that follow, up to a `Back`. (The receiver counts on, and notes
//! where that place lies in its count: `base`.) Where a Unix connection carries packets, a doorbell is a packet of one byte.

mod contract;
mod facts;
mod kernel;
pub mod packets;
mod tcp;
mod unix_stream;

use super::table::{End, Kind, Socket, Tables};
use crate::reasons::Reason;
use contract::{Carrier, UnixStream};
use packets::Packets;
use ringlet_core::handover::Incoming;
use ringlet_core::memory::Buffers;
use ringlet_core::ring::SegmentRing;
use ringlet_linux::meet::Ends;
use ringlet_linux::sys::{Errno, Sys};
use ringlet_linux::unix::FromKernel;
use tcp::Tcp;

pub use facts::{Facts, MSG_SERVED, facts, inode, is_wanted, kind, kind_of, unconnected};
pub use kernel::{kernel_says_end, receive_native};

/// For each of these functions of `Carrier`, one of the same name that asks the carrier of the socket.
macro_rules! dispatched {
    ($(fn $name:ident($socket:ident: &Socket $(, $arg:ident: $type:ty)*) $(-> $result:ty)?;)*) => {
        $(pub fn $name($socket: &Socket $(, $arg: $type)*) $(-> $result)? {
            match $socket.kind() {
                Kind::Packets => Packets::$name($socket $(, $arg)*),
                Kind::UnixStream => UnixStream::$name($socket $(, $arg)*),
                Kind::Tcp | Kind::Datagrams => Tcp::$name($socket $(, $arg)*),
            }
        })*
    };
}

dispatched! {
    fn ends(socket: &Socket, tables: &Tables) -> Result<Ends, Option<Reason>>;
    fn countable(socket: &Socket) -> Result<(), Reason>;
    fn has_unserved_option(socket: &Socket) -> bool;
    fn shutting_down(socket: &Socket);
    fn limits_changed(socket: &Socket, end: &End);
    fn tune(socket: &Socket, end: &End);
    fn written_place(socket: &Socket) -> Option<u64>;
    fn carried(socket: &Socket) -> (usize, usize);
    fn start_place(socket: &Socket, end: &End) -> Option<u64>;
    fn await_start(socket: &Socket, end: &End) -> bool;
    fn back_place(socket: &Socket, end: &End, bells: u64) -> Sys<u64>;
    fn orphaned_place(socket: &Socket, end: &End, bells: u64) -> Sys<u64>;
    fn base(socket: &Socket, start: u64, taken: u64) -> u64;
    fn begin_count(socket: &Socket, end: &End) -> bool;
    fn taken(socket: &Socket, end: &End) -> Sys<u64>;
    fn received(socket: &Socket, end: &End) -> Sys<u64>;
    fn has_counted_all(socket: &Socket, end: &End) -> bool;
    fn untaken(socket: &Socket) -> Sys<usize>;
    fn undelivered(socket: &Socket) -> usize;
    fn receive_kernel(socket: &Socket, end: &End, side: &impl Incoming<Error = Errno>, to: &mut Buffers, flags: i32, from: &mut FromKernel) -> Sys<Option<usize>>;
    fn goes_on(socket: &Socket) -> bool;
    fn send_again(socket: &Socket, end: &End, ring: &SegmentRing, used: u64) -> Sys<u64>;
    fn peer_ended(socket: &Socket) -> bool;
    fn judge(socket: &Socket, end: &End, taken: i32) -> bool;
    fn classify(socket: &Socket, end: &End, found: Sys<usize>) -> Sys<usize>;
    fn end_of_stream(socket: &Socket, end: &End) -> Sys<Option<usize>>;
    fn broken(socket: &Socket, end: &End) -> Option<Errno>;
    fn told_by_send(socket: &Socket, end: &End, error: Errno);
    fn ends_in_ring(socket: &Socket, end: &End, ring: &SegmentRing, from: &mut Buffers) -> Sys<Option<usize>>;
    fn lost_by_death(socket: &Socket, end: &End, ring: &SegmentRing, from: &mut Buffers) -> Option<usize>;
    fn died_unread(socket: &Socket, end: &End, ring: &SegmentRing) -> Sys<()>;
    fn is_open_after_reset(socket: &Socket, end: &End) -> bool;
    fn shown(socket: &Socket, end: &End, kernel: i16) -> i16;
    fn end_told(socket: &Socket, shut: u32, unread: bool) -> u32;
    fn exiting(socket: &Socket);
    fn exiting_unsent(socket: &Socket, end: &End);
    fn break_off(socket: &Socket);
}

/// Options whose meaning lies in the kernel's queues.
pub fn unserved_option(socket: &Socket) -> Option<Reason> {
    let either =
        kernel::is_on(socket, libc::SO_RCVLOWAT, 2) || kernel::is_on(socket, libc::SO_OOBINLINE, 1);
    (either || has_unserved_option(socket)).then_some(Reason::Option)
}

/// A connection is about to be attached.
pub fn attaching(socket: &Socket, end: &End) {
    socket.inode.set(inode(socket.fd()));
    limits_changed(socket, end);
}

/// It is, and whoever sets an option from now on sees that.
pub fn attached(socket: &Socket, end: &End) {
    limits_changed(socket, end);
    tune(socket, end);
}
