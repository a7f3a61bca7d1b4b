//! What an endpoint has sent and received.

use ringlet_core::active::{Head, Kind};

/// Bytes of a message beside its arguments and its payload: its head, and the stamp before it.
const OVERHEAD_BYTES: u64 = 32;

/// Short, medium and bulk messages, in this order.
pub type PerKind = [u64; 3];

#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Statistics {
    pub requests: Sent,
    pub replies: Sent,
    pub requests_received: PerKind,
    pub replies_received: PerKind,
    /// Messages of ours that came back.
    pub returned: u64,
}

#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Sent {
    pub messages: PerKind,
    /// Of arguments and payload.
    pub bytes: PerKind,
}

/// The place of a kind in `PerKind`.
pub fn place(kind: Kind) -> usize {
    match kind {
        Kind::Short | Kind::Get => 0,
        Kind::Medium => 1,
        Kind::Bulk | Kind::Stored => 2,
    }
}

impl Sent {
    #[inline]
    pub(super) fn count(&mut self, head: &Head) {
        let at = place(head.kind);
        self.messages[at] += 1;
        let bytes = if head.kind == Kind::Get { 0 } else { head.len };
        self.bytes[at] += (4 * head.arguments.words().len() + bytes) as u64;
    }

    /// With what each message needs beside arguments and payload.
    pub fn bytes_in_all(&self) -> PerKind {
        std::array::from_fn(|at| self.bytes[at] + OVERHEAD_BYTES * self.messages[at])
    }
}
