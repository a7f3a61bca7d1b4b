//! The node service (`ringlet node`): introduces processes of one host that can't see each other, since they are in different network namespaces,
//! when they are the two ends of one TCP connection. Data never passes it; between two that may not share memory a process of its own may carry that.
//!
//! ```text
//!   notes.rs     with which sequence numbers each connection of the host began (BPF)
//!   who.rs       the process, user and control group of who comes
//!   policy.rs    who may meet whom
//!   hall.rs      who waits for whom: the decision, without a system call
//!   service.rs   the socket, its guests and what they say (`ringlet::interconnect::node`)
//!   far.rs       guests whose far end is on another host
//!   apart.rs     what may wait for a guest: closing what it has handed over
//!   clock.rs     how long others take, where this process itself may stand still
//!   carrier/     copies between two that may not share memory, in a process of its own
//!   cluster/     the node services of other hosts: who they are, and whether they can be reached
//!   fabric/      what carries connections to those hosts, in a process of its own
//!   reflect/     reflective memory of several hosts: this one's keeper, in a process of its own
//!   journal.rs   what was decided, and why
//!   memory.rs    what the service's control group leaves for what is carried
//!   mounts.rs    how the socket's directory is mounted where guests are
//!   sandbox.rs   what the service gives up when all is made
//! ```
//!
//! Whoever comes is hostile input: it may say anything, hang, die, hand over any descriptor. One thread serves all; it waits for nobody, takes
//! one message of each guest at a time, and holds no more for a user than the policy's limits say. It keeps nothing that is needed later: killed, it
//! leaves introduced connections as they are, and those that waited on the kernel.

mod apart;
pub mod carrier;
mod clock;
pub mod cluster;
pub mod fabric;
mod far;
pub mod hall;
mod journal;
mod memory;
pub mod mounts;
pub mod notes;
mod offers;
pub mod policy;
pub mod reflect;
mod reload;
pub mod sandbox;
mod service;
mod slice;
pub mod who;

pub use service::{Listener, Options, Service, forget_notes, run};

use std::ffi::CString;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use anyhow::{Context, bail, ensure};
use ringlet::handshake::ROOM_BYTES;
use ringlet::interconnect::node::{APART, GREETING, Message, STATUS};
use ringlet_linux::sys::Errno;
use ringlet_linux::{fd, meet};

/// What the service of this socket tells of itself (JSON).
pub fn status(socket: &Path) -> anyhow::Result<serde_json::Value> {
    const PATIENCE_NS: u64 = 5_000_000_000;
    const TEXT_BYTES: usize = 256 << 10;
    let failed = |error: Errno| std::io::Error::from_raw_os_error(error.0);
    let path = CString::new(socket.as_os_str().as_bytes())?;
    let service = meet::look_at_path(&path)
        .map_err(failed)
        .with_context(|| format!("no node service at {}", socket.display()))?;
    let hear = |bytes: &mut [u8]| {
        let mut fds = [fd::pollfd { fd: service, events: libc::POLLIN, revents: 0 }];
        let _ = fd::poll(&mut fds, Some(PATIENCE_NS), None);
        meet::take(service, bytes).map_err(failed).context("the node service does not answer")
    };
    let told = (|| {
        let mut bytes = [0; ROOM_BYTES];
        let greeting = hear(&mut bytes)?;
        let greeting = Message::read(&bytes[..greeting.len]).ok();
        ensure!(
            greeting.is_some_and(|greeting| greeting.kind == GREETING),
            "this is no node service of this version"
        );
        let ask = Message { kind: STATUS, ..Message::default() };
        meet::send(service, ask.frame().as_bytes(), &[]).map_err(failed)?;
        let mut text = vec![0; TEXT_BYTES];
        let told = hear(&mut text)?;
        let text = &text[..told.len];
        if Message::read(text).is_ok_and(|message| message.kind == APART) {
            bail!("only the service's own user and root are told");
        }
        Ok(serde_json::from_slice(text)?)
    })();
    meet::part(service);
    told
}
