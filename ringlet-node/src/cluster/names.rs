//! Nodes, and addresses to join, that are listed by name: a thread of its own, which waits for name servers, looks them up again and again.
//!
//! What a name server says is a hint where to dial, and whom to ask about an address. Who answers there has to prove which node it is.

use std::net::SocketAddr;
use std::sync::mpsc::sync_channel;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow};
use hickory_resolver::proto::rr::RData;
use hickory_resolver::proto::rr::rdata::SRV;
use hickory_resolver::{Resolver, TokioResolver};
use ringlet_linux::fd;
use tokio::runtime;
use tokio::task::JoinSet;

use super::members::Address;
use super::{Cluster, Target};
use crate::sandbox;

/// What was found is believed for its time to live, within these; what was not is looked for again so soon.
const BELIEVED: [Duration; 2] = [Duration::from_secs(2), Duration::from_secs(60)];
const AGAIN: Duration = Duration::from_secs(2);
/// Of one node; more are not tried.
const MOST: usize = 16;

/// What is known of a name, and until when.
type Found = Result<(Vec<SocketAddr>, Instant), String>;

/// Starts the thread, which gives up its rights, if there are names. (/etc/resolv.conf and /etc/hosts are read once.)
pub fn start(cluster: Cluster) -> anyhow::Result<()> {
    let settings = cluster.settings();
    let listed = settings.nodes.iter().map(|member| &member.address).enumerate();
    let seeds = settings.join.iter().flatten().enumerate();
    let all = listed
        .map(|(place, address)| (Target::Node(place), address))
        .chain(seeds.map(|(place, address)| (Target::Seed(place), address)));
    let named = all.filter(|(_, address)| !matches!(address, Address::Fixed(_)));
    let names: Vec<(Target, Address)> = named.map(|(of, address)| (of, address.clone())).collect();
    if names.is_empty() {
        return Ok(());
    }
    let mut builder = Resolver::builder_tokio().context("/etc/resolv.conf")?;
    // (A node that is added to the zone is to be found soon.)
    builder.options_mut().negative_max_ttl = Some(AGAIN);
    let resolver = builder.build().context("a resolver")?;
    let runtime = runtime::Builder::new_current_thread().enable_all().build()?;
    let (said, confined) = sync_channel(1);
    std::thread::Builder::new().name("names".into()).spawn(move || {
        let entered = sandbox::enter_for_names();
        let is_confined = entered.is_ok();
        let _ = said.send(entered);
        if is_confined {
            runtime.block_on(look_up(cluster, resolver, names));
        }
    })?;
    confined.recv().map_err(|_| anyhow!("the thread that looks names up has ended"))?
}

async fn look_up(cluster: Cluster, resolver: TokioResolver, names: Vec<(Target, Address)>) {
    let mut due = vec![Instant::now(); names.len()];
    loop {
        let mut looks = JoinSet::new();
        for (at, (_, address)) in names.iter().enumerate() {
            if due[at] <= Instant::now() {
                let (resolver, address) = (resolver.clone(), address.clone());
                looks.spawn(async move { (at, find(&resolver, &address).await) });
            }
        }
        while let Some(looked) = looks.join_next().await {
            let Ok((at, found)) = looked else { continue };
            let now = Instant::now();
            due[at] = match &found {
                Ok((_, until)) => now + until.duration_since(now).clamp(BELIEVED[0], BELIEVED[1]),
                Err(_) => now + AGAIN,
            };
            note(&cluster, &names[at], found.map(|(addresses, _)| addresses));
        }
        let next = due.iter().min().copied().unwrap_or_else(Instant::now);
        tokio::time::sleep_until(next.into()).await;
    }
}

/// Where to dial, the one to be tried first first.
async fn find(resolver: &TokioResolver, address: &Address) -> Found {
    match address {
        Address::Fixed(address) => Ok((vec![*address], Instant::now() + BELIEVED[1])),
        Address::Host { name, port } => hosts(resolver, name, *port).await,
        Address::Service(name) => {
            let looked =
                resolver.srv_lookup(name.as_str()).await.map_err(|error| error.to_string())?;
            let mut targets: Vec<&SRV> = looked.answers().iter().filter_map(srv).collect();
            // (RFC 2782 has chance among those of one priority decide by weight; here the heaviest is the first.)
            targets.sort_by_key(|target| (target.priority, u16::MAX - target.weight));
            let (mut all, mut until) = (Vec::new(), looked.valid_until());
            let mut why = "no target".to_owned();
            for target in targets {
                match hosts(resolver, &target.target.to_ascii(), target.port).await {
                    Ok((addresses, valid)) => {
                        all.extend(addresses);
                        until = until.min(valid);
                    }
                    Err(error) => why = error,
                }
            }
            all.truncate(MOST);
            if all.is_empty() { Err(why) } else { Ok((all, until)) }
        }
    }
}

fn srv(record: &hickory_resolver::proto::rr::Record) -> Option<&SRV> {
    match &record.data {
        RData::SRV(srv) => Some(srv),
        _ => None,
    }
}

async fn hosts(resolver: &TokioResolver, name: &str, port: u16) -> Found {
    let looked = resolver.lookup_ip(name).await.map_err(|error| error.to_string())?;
    let addresses: Vec<_> = looked.iter().map(|ip| SocketAddr::new(ip, port)).take(MOST).collect();
    match addresses.is_empty() {
        true => Err(format!("{name} has no address")),
        false => Ok((addresses, looked.valid_until())),
    }
}

/// What is no longer found stays: who is there can still be reached.
fn note(cluster: &Cluster, (of, name): &(Target, Address), found: Result<Vec<SocketAddr>, String>) {
    let now = &mut *cluster.now();
    let (node, known) = match *of {
        Target::Node(place) => (now.nodes[place].name.to_string(), &mut now.nodes[place].addresses),
        Target::Seed(place) => ("join".to_owned(), &mut now.seeds[place]),
    };
    match found {
        Ok(addresses) => {
            now.unfound.remove(of);
            if *known != addresses {
                let shown: Vec<_> = addresses.iter().map(SocketAddr::to_string).collect();
                now.journal.note("found", || format!("{node} at {}", shown.join(", ")));
                *known = addresses;
                fd::ring(cluster.0.wake);
            }
        }
        Err(why) => {
            // (Once.)
            if now.unfound.insert(*of) {
                now.journal.note("not-found", || format!("{node}: {name}: {why}"));
            }
        }
    }
}
