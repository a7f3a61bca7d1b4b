//! Active Messages 2.0: a message names a handler, which runs where the message arrives.
//!
//! A [`Process`] has [`Bundle`]s of [`Endpoint`]s. An endpoint sends requests to the peers in its translation table; a request's
//! handler may reply once, a reply's handler may not send. Handlers run inside `poll`, and inside `request`, which polls. What
//! can't be delivered comes back to the error handler.
//!
//! Messages go through a segment for each pair of endpoints that talk ([`ringlet_core::active`]), made at the first message and
//! found by the peer's [`Name`]. A thread of each process does that, and notices the end of its peers; it sleeps otherwise.
//!
//! An endpoint that is offered as `:orders` ([`Endpoint::offer`]) is found by others in other network namespaces and on other hosts as `NODE:orders`
//! ([`Endpoint::find`]), by way of the node service. Such a pair has a segment at each end, which a channel keeps in step.

mod afar;
mod bundle;
mod endpoint;
mod handler;
mod introduction;
pub mod invitation;
pub mod job;
mod lane;
mod message;
mod name;
mod process;
mod request;
mod service;
mod state;
mod statistics;
mod wire;

pub use message::{Error, Payload};
pub use name::{NAME_BYTES, Name};
pub use process::{Bundle, Process};
pub use ringlet_core::active::layout::{BUFFER_BYTES, BUNDLES};
pub use ringlet_core::active::message::{TAG_ALL, TAG_NONE};
pub use ringlet_core::active::{ARGUMENTS, Status, Tag};
pub use state::{Endpoint, ErrorHandler, HANDLERS, Handler, Incoming, TRANSLATIONS, Undeliverable};
pub use statistics::{PerKind, Statistics};
