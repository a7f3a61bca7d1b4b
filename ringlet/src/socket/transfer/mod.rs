//! Moving the bytes of an attached connection: one direction at a time is on the kernel or in the ring, and changes at a known byte (see
//! `ringlet_core::handover` for the protocol as a model, and ARCHITECTURE.md for the walk). Packets go the same ways, and change between
//! them; what is otherwise with them is in `carrier`.
//!
//! `wait` is the one place that waits; `send` and `receive` look and come to it, `events` says what they would find. Order of locks:
//! receive before send.

pub mod events;
mod receive;
pub mod room;
mod send;
pub mod shut;
pub mod splice;
pub mod wait;

pub use receive::{receive, receive_by};
pub use send::{send, send_by};
