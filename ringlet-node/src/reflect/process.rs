//! The process.

use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::Context;
use ringlet_linux::{fd, meet};
use ringlet_reflect::keeper::{Limits, Membership, Options, keep_in};

use super::Orders;
use super::kept::Kept;
use super::network::Rails;
use crate::carrier::keeper::by_whom_it_was_started;
use crate::fabric::{PACKET_BYTES, RailSettings, SETTINGS, read};
use crate::sandbox;

/// A process whose service has gone tells the others that it leaves, for no longer than this.
const FAREWELL: Duration = Duration::from_secs(1);
const MB: u64 = 1 << 20;

/// The service has gone.
static LEAVES: AtomicBool = AtomicBool::new(false);

/// Keeps this host's part of the cluster's reflective memory, until the service at the other end of standard input has gone; or until the others have
/// declared this run of it dead, after which the next one begins with nothing.
pub fn reflect() -> anyhow::Result<()> {
    let service = by_whom_it_was_started();
    let mut bytes = vec![0; PACKET_BYTES];
    let mut fds = [fd::pollfd { fd: service.as_raw_fd(), events: libc::POLLIN, revents: 0 }];
    let _ = fd::poll(&mut fds, None, None);
    let Ok((len, _)) = meet::receive(service.as_raw_fd(), &mut bytes) else { return Ok(()) };
    let Some((SETTINGS, _, orders)) = read(&bytes[..len]) else { return Ok(()) };
    let orders: Orders = serde_json::from_slice(orders)?;
    let kept = Kept::open(&orders.directory.join("reflect"))?;
    let place = orders.socket.parent().context("the socket of reflective memory has no place")?;
    let folders = orders.rails.iter().filter_map(|rail| rail.folder.clone());
    let own = [kept.directory().to_owned(), place.to_owned()];
    sandbox::enter_as_fabric(&folders.chain(own).collect::<Vec<_>>())?;
    let rails = if orders.rails.is_empty() { RailSettings::found() } else { orders.rails };
    let network = Rails::new(service, kept, orders.node, rails, RailSettings::open, leave())?;
    let options = Options {
        path: Some(&orders.socket),
        limits: Limits { all: orders.all_mb * MB, received: orders.received_mb * MB },
        stays: true,
        leaves: Some(&LEAVES),
        membership: Membership {
            founders: orders.founders,
            silent: Duration::from_millis(orders.silent_ms),
            beat: Duration::from_millis(orders.beat_ms),
        },
    };
    Ok(keep_in(&options, Box::new(network), || ())?)
}

/// What becomes of it when the service has gone, which is called again and again.
fn leave() -> Box<dyn FnMut()> {
    let mut since = None;
    Box::new(move || {
        LEAVES.store(true, Ordering::Relaxed);
        if since.get_or_insert_with(Instant::now).elapsed() > FAREWELL {
            std::process::exit(0);
        }
    })
}
