//! The process.

use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::Context;
use ringlet_linux::{fd, meet};
use ringlet_reflect::keeper::{Limits, Membership, Options, keep_in, listen};

use super::Orders;
use super::kept::Kept;
use super::network::Rails;
use crate::carrier::keeper::by_whom_it_was_started;
use crate::cluster::Session;
use crate::fabric::{ANSWER, ASK, LOG, PACKET_BYTES, RailSettings, SETTINGS, packet, read};
use crate::sandbox;

/// A process whose service has gone tells the others that it leaves, for no longer than this.
const FAREWELL: Duration = Duration::from_secs(2);
/// Where something is to be mended it is looked at so often.
const LOOK_AGAIN: Duration = Duration::from_secs(1);
const MB: u64 = 1 << 20;

/// The service has gone, or a service manager ends all processes of the service at once.
static LEAVES: AtomicBool = AtomicBool::new(false);

extern "C" fn leaves(_: libc::c_int) {
    leave_in_order();
}

/// The keeper goes on until the others have what it has.
pub fn leave_in_order() {
    LEAVES.store(true, Ordering::Relaxed);
}

/// Keeps this host's part of the cluster's reflective memory, until the service at the other end of standard input has gone; or until the others have
/// declared this run of it dead, after which the next one begins with nothing.
pub fn reflect() -> anyhow::Result<()> {
    // SAFETY: a handler that stores one word.
    unsafe { libc::signal(libc::SIGTERM, leaves as *const () as libc::sighandler_t) };
    let service = by_whom_it_was_started();
    let mut bytes = vec![0; PACKET_BYTES];
    let mut fds = [fd::pollfd { fd: service.as_raw_fd(), events: libc::POLLIN, revents: 0 }];
    let _ = fd::poll(&mut fds, None, None);
    let Ok((len, _)) = meet::receive(service.as_raw_fd(), &mut bytes) else { return Ok(()) };
    let Some((SETTINGS, _, orders)) = read(&bytes[..len]) else { return Ok(()) };
    let orders: Orders = serde_json::from_slice(orders)?;
    keep_freed_memory();
    let Some((kept, begun)) = begin(&service, &orders.directory.join("reflect")) else {
        return Ok(());
    };
    let place = orders.socket.parent().context("the socket of reflective memory has no place")?;
    let folders = orders.rails.iter().filter_map(|rail| rail.folder.clone());
    let own = [kept.directory().to_owned(), place.to_owned()];
    // (While there is the right to mark it.)
    let listener = listen(Some(&orders.socket))?;
    sandbox::enter_as_fabric(&folders.chain(own).collect::<Vec<_>>())?;
    let rails = if orders.rails.is_empty() { RailSettings::found() } else { orders.rails };
    let told = service.try_clone()?;
    let network =
        Rails::new(service, kept, begun, orders.node, rails, RailSettings::open, leave())?;
    let options = Options {
        path: Some(&orders.socket),
        listener: Some(listener),
        limits: Limits { all: orders.all_mb * MB, received: orders.received_mb * MB },
        stays: true,
        leaves: Some(&LEAVES),
        membership: Membership {
            founders: orders.founders,
            silent: Duration::from_millis(orders.silent_ms),
            beat: Duration::from_millis(orders.beat_ms),
        },
    };
    let kept = keep_in(&options, Box::new(network), || ());
    if let Err(error) = kept {
        say(&told, &error.to_string());
    }
    Ok(())
}

fn say(service: &OwnedFd, text: &str) {
    let packet = packet(LOG, Session::default(), text.as_bytes());
    let _ = meet::send(service.as_raw_fd(), &packet, &[]);
}

type Begun = (u64, Option<Vec<u8>>);

/// What was kept, if all is well there. If not that is said once, until it is another trouble; and once it is over another process begins. (What the
/// service has said meanwhile is said to that one.)
fn begin(service: &OwnedFd, directory: &Path) -> Option<(Kept, Begun)> {
    let mut said = None;
    let mut bytes = vec![0; PACKET_BYTES];
    loop {
        let began = Kept::open(directory).and_then(|kept| {
            let begun = kept.begin()?;
            Ok((kept, begun))
        });
        let text = match began {
            Ok(begun) => return said.is_none().then_some(begun),
            Err(error) => format!("{error:#}"),
        };
        if said.as_ref() != Some(&text) {
            say(service, &text);
            said = Some(text);
        }
        let mut fds = [fd::pollfd { fd: service.as_raw_fd(), events: libc::POLLRDHUP, revents: 0 }];
        if fd::poll(&mut fds, Some(LOOK_AGAIN.as_nanos() as u64), None) != Ok(0) {
            return None;
        }
        while let Ok((len @ 1.., _)) = meet::receive(service.as_raw_fd(), &mut bytes) {
            if let Some((ASK, session, _)) = read(&bytes[..len]) {
                let _ = meet::send(service.as_raw_fd(), &packet(ANSWER, session, &[]), &[]);
            }
        }
    }
}

/// What was freed is used again: payloads are made and freed all the time, and pages that were given back would be cleared anew for each.
fn keep_freed_memory() {
    #[cfg(target_env = "gnu")]
    // SAFETY: numbers only.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, 1 << 20);
        libc::mallopt(libc::M_TRIM_THRESHOLD, 16 << 20);
    }
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
