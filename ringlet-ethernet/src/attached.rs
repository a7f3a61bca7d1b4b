//! A device on a network's bridge (`bridge`), as long as its process has it.

use std::os::fd::AsRawFd;
use std::sync::mpsc::{Receiver, Sender};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use netlink_packet_core::{NetlinkMessage, NetlinkPayload};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_sys::Socket;
use ringlet_messages::guarded::Guarded;
use rustix::event::{PollFd, PollFlags, poll};

use crate::device::{End, Settings, check_name, mtu_of};
use crate::frame::Mac;
use crate::links::{self, Links};
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
    let kernel = links::socket()?;
    kernel.set_non_blocking(true)?;
    let links = Links::open()?;
    let until = Instant::now() + PATIENCE;
    let socket = loop {
        let socket = await_bridge(room, until)?;
        say(&socket, &hello(Ask::Attach(device.clone())), &[kernel.as_raw_fd()])?;
        let refused = match next(&socket, Some(until)).context("the bridge does not answer")? {
            Answer::Done => break socket,
            Answer::Refused(why) => why,
            other => bail!("an answer to something else: {other:?}"),
        };
        let error = refusal(&kernel);
        let may_come = error == Some(libc::EEXIST) && links.is_going(&device.name);
        if !may_come || Instant::now() >= until {
            let why = error.map_or(refused, |error| explain(error, &device.name));
            bail!("{} can't be made: {why}", device.name);
        }
        // (It is of a bridge that was killed.)
        std::thread::sleep(TRY_AGAIN);
    };
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

/// (It is begun again, it may be.)
fn await_bridge(room: &Room, until: Instant) -> Result<Guarded> {
    loop {
        if let Some(socket) = room.bridge(until)? {
            return Ok(socket);
        }
        ensure!(
            room.rules.bridge && !room.is_squatted() && Instant::now() < until,
            "network {0:?} has no bridge now: `ringlet eth bridge {0}`, or its unit, begins one; --tap makes a TAP device",
            room.name
        );
        std::thread::sleep(TRY_AGAIN);
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
fn refusal(kernel: &Socket) -> Option<i32> {
    let (bytes, _) = kernel.recv_from_full().ok()?;
    let answer = NetlinkMessage::<RouteNetlinkMessage>::deserialize(&bytes).ok()?;
    let NetlinkPayload::Error(error) = answer.payload else { return None };
    error.to_io().raw_os_error().filter(|error| *error != 0)
}

fn explain(error: i32, name: &str) -> String {
    match error {
        libc::EEXIST => format!(
            "there is a device {name} here already: take another name, or end it (`ringlet eth down {name}`, `ip link del {name}`); with --tap a TAP device that persists is taken over"
        ),
        libc::EPERM => "that needs CAP_NET_ADMIN, in this network namespace and the bridge's: run as root, or give it to the container (`--cap-add NET_ADMIN`); with --tap it needs that here only".into(),
        libc::EOPNOTSUPP => "this kernel has no veth (`modprobe veth`); --tap makes a TAP device".into(),
        _ => std::io::Error::from_raw_os_error(error).to_string(),
    }
}
