//! Socket pairs.

use super::table::{Kind, Socket, Tables};
use super::{meet, view};
use crate::reasons::Reason;

/// A socket pair was made. While one process holds both ends it stays on the kernel: such pairs wake event loops. The first end offers.
pub fn made_pair(tables: &'static Tables, first: i32, second: i32, kind: Kind) {
    let Some(one) = tables.follow(first, kind) else { return };
    one.side.set(1);
    let Some(two) = tables.follow(second, kind) else { return };
    one.twin.set(tables.index_of(two));
    two.twin.set(tables.index_of(one));
    one.paired.set(1);
    two.paired.set(1);
    view::show(one, Reason::Pair);
    view::show(two, Reason::Pair);
}

/// This process's last name of one end of a pair goes: the other one may be moved now.
pub fn part(tables: &'static Tables, socket: &Socket) {
    let twin = tables.sockets.at(socket.twin.swap(0) as usize);
    if twin.twin.get() == tables.index_of(socket) {
        twin.twin.set(0);
        meet::begin(twin, twin.side.get() == 1, 0);
        view::begin(twin);
    }
}
