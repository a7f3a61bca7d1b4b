//! Active Messages 2.0 without a system call: what lies in shared memory, and the protocol of one connection.
//!
//! A *connection* joins two endpoints. Each direction has two queues: requests, and replies to the other direction's
//! requests. A request's place in the reply queue is reserved with the request's own: an end has at most `DEPTH` requests
//! that are not completed, and a request is completed when the peer has served it and its reply, if it made one, was taken.
//! So a reply never waits for room, and no two ends can wait for each other.
//!
//! [`Connection`] is one end's state machine; it is generic over its [`Memory`]. [`Gate`] says what an endpoint lets in.

pub mod connection;
pub mod layout;
pub mod memory;
pub mod message;
pub mod relay;

pub use connection::{Call, Connection, Delivered, Full, Host, NoReply};
pub use memory::{Memory, Queue, SegmentMemory};
pub use message::{ARGUMENTS, Arguments, Gate, Head, Kind, Message, Returned, Status, Tag};
pub use relay::Relay;
