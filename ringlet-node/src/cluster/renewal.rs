//! This node's key and certificates, read again when they have changed, by a thread of its own: it alone can open a file, and it waits for those.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::mpsc::sync_channel;
use std::time::Duration;

use anyhow::anyhow;
use ringlet_linux::fd;

use super::{Cluster, identity};
use crate::journal::say;
use crate::sandbox;

const LOOK: Duration = Duration::from_secs(1);

/// Starts the thread, which gives up its rights.
pub fn start(cluster: Cluster) -> anyhow::Result<()> {
    let (said, confined) = sync_channel(1);
    let mut seen = stamp(&cluster.settings().directory);
    std::thread::Builder::new().name("renewal".into()).spawn(move || {
        let directory = cluster.settings().directory.clone();
        let entered = sandbox::enter_for_renewal(&directory);
        let is_confined = entered.is_ok();
        let _ = said.send(entered);
        if !is_confined {
            return;
        }
        loop {
            std::thread::sleep(LOOK);
            let now = stamp(&directory);
            // (Who writes them puts each in its place whole; a key without its certificate is refused, and looked at again behind that.)
            if now.is_none() || now == seen {
                continue;
            }
            seen = now;
            match identity::load(&directory, &cluster.settings().node) {
                Ok(identity) => {
                    cluster.now().identity = Some(identity);
                    fd::ring(cluster.0.wake);
                }
                Err(error) => say(&format!("the old key and certificate stay in use: {error:#}")),
            }
        }
    })?;
    confined.recv().map_err(|_| anyhow!("the thread that looks for new keys has ended"))?
}

/// Which files they are, and as of when. None while one is missing.
fn stamp(directory: &Path) -> Option<Vec<(u64, i64, i64)>> {
    let of = |name: &&str| {
        let seen = std::fs::metadata(directory.join(name)).ok()?;
        Some((seen.ino(), seen.mtime(), seen.mtime_nsec()))
    };
    identity::FILES.iter().map(of).collect()
}
