//! Between a front end and the framework that serves it, for one word's sake: QEMU enables rings of a network card (SET_VRING_ENABLE) before its
//! guest's driver has taken any feature, and the framework takes that for a fault. So the feature which that message belongs to, and which QEMU has
//! taken by then (else it would not say so), is taken here in its name. All else passes as it is, with its descriptors; but those that tell of
//! something do so without waiting, from then on, as QEMU's do: a guest that takes no interrupts would hold up who gives them.

use std::fs::{self, DirBuilder};
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::{UnixListener, UnixStream};

use anyhow::{Context, Result, ensure};
use ringlet_linux::sys;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recv, recvmsg, sendmsg,
};
use vhost::vhost_user::message::VhostUserVirtioFeatures;

const HEAD_BYTES: usize = 12;
const BODY_MOST: usize = 4096;
/// With one message; more are none's.
const DESCRIPTORS_MOST: usize = 32;
/// Requests, and the version of all of them.
const SET_FEATURES: u32 = 2;
const SET_VRING_KICK: u32 = 12;
const SET_VRING_CALL: u32 = 13;
const SET_VRING_ERR: u32 = 14;
const SET_VRING_ENABLE: u32 = 18;
const VERSION: u32 = 1;

/// A connection of this process with itself: who listens, for the framework, which takes no connection that is made already, and the other end. Its
/// name is gone when this returns, and was where nobody else comes.
pub fn inner() -> Result<(UnixListener, UnixStream)> {
    let mut bits = [0; 8];
    ensure!(sys::random(&mut bits), "the kernel has no random bytes yet");
    let name = format!("ringlet-vhost-{:016x}", u64::from_ne_bytes(bits));
    let folder = std::env::temp_dir().join(name);
    DirBuilder::new()
        .mode(0o700)
        .create(&folder)
        .with_context(|| format!("{} can't be made", folder.display()))?;
    let path = folder.join("s");
    let made =
        UnixListener::bind(&path).and_then(|listener| Ok((listener, UnixStream::connect(&path)?)));
    let _ = fs::remove_dir_all(&folder);
    made.context("no connection within this process")
}

/// Until one of the two ends, or says what can't be; then both are.
pub fn run(front: &UnixStream, back: &UnixStream) {
    let mut has_features = false;
    while pass(front, back, &mut has_features).is_ok() {}
    let _ = front.shutdown(Shutdown::Both);
    let _ = back.shutdown(Shutdown::Both);
}

fn pass(front: &UnixStream, back: &UnixStream, has_features: &mut bool) -> Result<()> {
    let mut fds = [front, back].map(|end| PollFd::new(end, PollFlags::IN));
    match poll(&mut fds, None) {
        Err(Errno::INTR) => return Ok(()),
        polled => polled.map(drop)?,
    }
    let [asks, answers] = fds.map(|fd| !fd.revents().is_empty());
    if answers {
        let mut bytes = [0; BODY_MOST];
        let (got, descriptors) = take(back, &mut bytes, RecvFlags::empty())?;
        give(front, &bytes[..got], &descriptors)?;
    }
    if asks {
        let mut message = [0; HEAD_BYTES + BODY_MOST];
        let (head, body) = message.split_at_mut(HEAD_BYTES);
        let (got, descriptors) = take(front, head, RecvFlags::WAITALL)?;
        ensure!(got == HEAD_BYTES, "a part of a message");
        let word =
            |at: usize| u32::from_ne_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        let (request, bytes) = (word(0), word(8) as usize);
        ensure!(bytes <= BODY_MOST, "a message of {bytes} bytes");
        if bytes > 0 {
            let (got, _) = recv(front, &mut body[..bytes], RecvFlags::WAITALL)?;
            ensure!(got == bytes, "a part of a message");
        }
        if [SET_VRING_KICK, SET_VRING_CALL, SET_VRING_ERR].contains(&request) {
            for descriptor in &descriptors {
                fcntl_setfl(descriptor, fcntl_getfl(descriptor)? | OFlags::NONBLOCK)?;
            }
        }
        if request == SET_VRING_ENABLE && !*has_features {
            let features = VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits().to_ne_bytes();
            let head = [SET_FEATURES, VERSION, features.len() as u32].map(u32::to_ne_bytes);
            give(back, &[head.as_flattened(), &features].concat(), &[])?;
        }
        *has_features |= [SET_FEATURES, SET_VRING_ENABLE].contains(&request);
        give(back, &message[..HEAD_BYTES + bytes], &descriptors)?;
    }
    Ok(())
}

fn take(from: &UnixStream, bytes: &mut [u8], flags: RecvFlags) -> Result<(usize, Vec<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MOST))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let flags = flags | RecvFlags::CMSG_CLOEXEC;
    let got = loop {
        match recvmsg(from, &mut [IoSliceMut::new(bytes)], &mut ancillary, flags) {
            Err(Errno::INTR) => {}
            got => break got?.bytes,
        }
    };
    let descriptors = ancillary.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
        _ => None,
    });
    let descriptors = descriptors.flatten().collect();
    ensure!(got > 0, "the connection has ended");
    Ok((got, descriptors))
}

fn give(to: &UnixStream, mut bytes: &[u8], descriptors: &[OwnedFd]) -> Result<()> {
    let mut descriptors: Vec<BorrowedFd> = descriptors.iter().map(AsFd::as_fd).collect();
    while !bytes.is_empty() {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MOST))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() {
            let fits = ancillary.push(SendAncillaryMessage::ScmRights(&descriptors));
            ensure!(fits, "too many descriptors");
        }
        match sendmsg(to, &[IoSlice::new(bytes)], &mut ancillary, SendFlags::NOSIGNAL) {
            Err(Errno::INTR) => continue,
            sent => bytes = &bytes[sent?..],
        }
        // (They go with the first byte.)
        descriptors.clear();
    }
    Ok(())
}
