//! Moving one direction of a stream between the kernel's connection and the ring at a known byte: what every end runs.
//!
//! The kernel's connection is a queue of bytes, shared by the stream and by doorbells (single bytes without meaning that
//! wake a receiver sleeping in the kernel). Both ends know exactly how many bytes ever went into it and came out of it, so
//! a count of kernel bytes names a place in the stream:
//!
//! ```text
//! kernel   s s s s d d s s     s = stream, d = doorbell
//!                 |   |
//! ring     Start(4) r r r Back(6)
//! ```
//!
//! `Start(n)`: the first n kernel bytes come before what follows in the ring, and all after them are doorbells. `Back(n)`:
//! kernel bytes up to n are doorbells, and the stream goes on behind them. The sender publishes a mark *before* the first
//! kernel byte that it gives a meaning to. Hence the receiver's one rule, on which everything rests: **count what waits in
//! the kernel, then look at the ring.** If no mark is there, each byte that was counted still has the old meaning; of bytes
//! that arrived after the count nothing is known, and they are not touched. The same with the end of the stream: it is
//! believed if it was seen before a count that found nothing and a look that found the ring empty.
//!
//! ```text
//! sender (`sending`)                                receiver (`receiving`)
//!
//!             Start into a drained ring                       Start(n) met
//!    Kernel ---------------------------> Ring         Kernel --------------> Draining   takes kernel bytes up to n
//!      |    <---------------------------  |  |          ^                       |
//!      |      Back, for a while           |  |          | all doorbells are     | place n is reached
//!      |                                  |  |          | thrown away           v
//!      | for good         Back, for good  |  |      Discarding <-------------- Ring      takes records
//!      v                                  |  |          ^    Back(n) met
//!    KernelForGood <----------------------+  |          |
//!      ^    all is sent again                |          +---- from Ring or Draining, when the receiver has left:
//!      +---------------------- Returning <---+                up to the doorbells that the sender has counted
//!                               the receiver has left,
//!                               and was answered
//! ```
//!
//! Who leaves, and how both may at once, is in `leaving`; its three words decide between a mark of the sender's, after which all is read
//! where it stands, and an answer, after which the sender sends again what was not read. A sender that ends while the receiver leaves does
//! one of the two as well; if it did neither and is over, or was killed while it sent again, the receiver takes the ring up where that ended.
//!
//! The states are `Sender` and `Receiver`: each belongs to one caller at a time (the owner's lock) and may lie in memory shared over fork.
//! What an end has around it (the kernel's connection, the ring, its own threads, its peer's words) it brings as an `Outgoing` or an
//! `Incoming`, whose provided methods are the protocol. The socket layer, the simulator and the models bring different ones.

mod receiving;
mod sending;

pub use receiving::{Fault, Head, Incoming, Receiver, Receiving, Seen, Step};
pub use sending::{Outgoing, Sender, Sending, all_taken};

/// Changes of path that one call follows; a peer that changes more often is not sane.
pub const CHANGES_MAX: usize = 16;
