//! Two nodes in this process, joined before anybody comes.

use std::path::Path;
use std::time::{Duration, Instant};

use crate::{Hosts, Serve, Server, Trunk};
use anyhow::{Context, ensure};

/// Memory, where there is such a folder.
const FOLDER: &str = "/dev/shm";
const PATIENCE: Duration = Duration::from_secs(10);
const TURN: Duration = Duration::from_millis(1);

/// Joined, and served by `server`, as `serve` makes of them what it serves. Seed 0: the rails keep order, and do not fail.
pub fn join_hosts<S: Serve>(
    seed: u64,
    server: &mut Server<S>,
    serve: impl Fn(Trunk) -> S,
) -> anyhow::Result<Hosts> {
    // It is gone when they are joined: a process that is killed leaves nothing behind.
    let folder = if Path::new(FOLDER).is_dir() { FOLDER.into() } else { std::env::temp_dir() };
    let folder = tempfile::tempdir_in(folder).context("a folder for rails")?;
    let mut hosts = Hosts::new(folder.path(), (seed != 0).then_some(seed)).context("rails")?;
    let [one, other] = hosts.trunks().clone();
    let at = [server.serve(serve(one))?, server.serve(serve(other))?];
    hosts.are_served_at(at);
    let until = Instant::now() + PATIENCE;
    let (mut ready, mut over, mut rouse) = (Vec::new(), Vec::new(), at.to_vec());
    while !hosts.are_joined() {
        ensure!(Instant::now() < until, "the rails between the two hosts don't work");
        rouse.drain(..).for_each(|at| server.rouse(at));
        server.turn(Some(TURN), &mut ready, &mut over)?;
        hosts.relay(&mut rouse)?;
    }
    rouse.into_iter().for_each(|at| server.rouse(at));
    Ok(hosts)
}
