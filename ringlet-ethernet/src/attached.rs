//! A device on a network's bridge (`bridge`), as long as its process has it.

use std::os::fd::AsRawFd;
use std::sync::mpsc::{Receiver, Sender};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use netlink_packet_core::{NetlinkMessage, NetlinkPayload};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_sys::{Socket, protocols::NETLINK_ROUTE};
use ringlet_messages::guarded::Guarded;
use rustix::event::{PollFd, PollFlags, poll};

use crate::device::{End, Settings, check_name, mtu_of};
use crate::frame::Mac;
use crate::room::Room;
use crate::wire::{Answer, Ask, Device, hear, hello, say};

/// For the bridge, to which others may have come first.
const PATIENCE: Duration = Duration::from_secs(20);
const TRY_AGAIN: Duration = Duration::from_millis(20);

/// Has a device until somebody says `End`.
pub fn up(
    settings: &Settings,
    room: &Room,
    (ending, end): (Sender<End>, Receiver<End>),
    ready: impl FnOnce(Mac),
) -> Result<()> {
    check_name(&settings.device)?;
    let mac = settings.mac.map_or_else(Mac::random, Ok)?;
    let device = Device { name: settings.device.clone(), mac, mtu: mtu_of(settings)? };
    // (It says where the device is to be, and who may make it.)
    let kernel = Socket::new(NETLINK_ROUTE)?;
    kernel.set_non_blocking(true)?;
    let until = Instant::now() + PATIENCE;
    let socket = loop {
        match room.bridge(until)? {
            Some(socket) => break socket,
            // (It is begun again, it may be.)
            None if room.rules.bridge && !room.is_squatted() && Instant::now() < until => {
                std::thread::sleep(TRY_AGAIN);
            }
            None => bail!(
                "network {0:?} has no bridge now: `ringlet eth bridge {0}`, or its unit, begins one; --tap makes a TAP device",
                room.name
            ),
        }
    };
    say(&socket, &hello(Ask::Attach(device)), &[kernel.as_raw_fd()])?;
    match next(&socket, Some(until)).context("the bridge does not answer")? {
        Answer::Done => {}
        Answer::Refused(why) => {
            let why = refusal(&kernel, &settings.device).unwrap_or(why);
            bail!("{} can't be made: {why}", settings.device)
        }
        other => bail!("an answer to something else: {other:?}"),
    }
    ready(mac);
    let socket = std::sync::Arc::new(socket);
    let theirs = std::sync::Arc::clone(&socket);
    std::thread::Builder::new().name("bridge".into()).spawn(move || {
        let why = match next(&theirs, None) {
            Ok(Answer::Ending) => End::Asked,
            Ok(Answer::Refused(why)) => End::Failed(why),
            _ => End::Failed("the network's bridge has ended, and the device with it".into()),
        };
        let _ = ending.send(why);
    })?;
    let why = end.recv().unwrap_or(End::Asked);
    // (The device goes, and then the connection: who waits for our end finds none.)
    let _ = rustix::net::shutdown(&**socket, rustix::net::Shutdown::Write);
    let until = Instant::now() + PATIENCE;
    let _ = next(&socket, Some(until));
    ensure!(
        Instant::now() < until,
        "the network's bridge does not answer: {} is still there, and goes when the bridge does, or goes on",
        settings.device
    );
    match why {
        End::Asked => Ok(()),
        End::Failed(why) => bail!("{why}"),
    }
}

/// The next thing that is said there.
fn next(socket: &Guarded, until: Option<Instant>) -> Result<Answer> {
    loop {
        if let Some((answer, _)) = hear(socket)? {
            return Ok(answer);
        }
        let left = until.map(|until| until.saturating_duration_since(Instant::now()));
        ensure!(left.is_none_or(|left| !left.is_zero()), "nothing is said");
        let left = left.map(TryInto::try_into).transpose()?;
        let _ = poll(&mut [PollFd::new(&**socket, PollFlags::IN)], left.as_ref());
    }
}

/// What the kernel has answered to the bridge, which has asked it by our socket.
fn refusal(kernel: &Socket, name: &str) -> Option<String> {
    let (bytes, _) = kernel.recv_from_full().ok()?;
    let answer = NetlinkMessage::<RouteNetlinkMessage>::deserialize(&bytes).ok()?;
    let NetlinkPayload::Error(error) = answer.payload else { return None };
    let error = error.to_io();
    Some(match error.raw_os_error()? {
        0 => return None,
        libc::EEXIST => format!(
            "there is a device {name} here already: take another name, or end it (`ringlet eth down {name}`, `ip link del {name}`); with --tap a TAP device that persists is taken over"
        ),
        libc::EPERM => "that needs CAP_NET_ADMIN, in this network namespace and the bridge's: run as root, or give it to the container (`--cap-add NET_ADMIN`); with --tap it needs that here only".into(),
        libc::EOPNOTSUPP => "this kernel has no veth (`modprobe veth`); --tap makes a TAP device".into(),
        _ => error.to_string(),
    })
}
