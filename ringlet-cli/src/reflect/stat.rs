//! `ringlet reflect stat`: what goes on, as far as it can be seen from outside.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::Context;
use ringlet_reflect::{ClusterState, Host, LockState, RegionState, Sample, Sampler, State, Status};
use serde::Serialize;

use super::{list, mode};
use ringlet_programs::table;

/// Between two looks at what is written.
const LOOK: Duration = Duration::from_millis(100);
/// Pages that one look compares, of all regions, and of one.
const PAGES: u64 = 16_384;
const PAGES_LEAST: u64 = 64;

/// What was seen of a region; nothing where it may not be read.
#[derive(Serialize)]
struct RegionRow<'a> {
    #[serde(flatten)]
    region: &'a RegionState,
    written: Option<Written>,
}

#[derive(Clone, Copy, Default, Serialize)]
struct Written {
    /// In a second, by looks of so many pages of so many: as if those that were not looked at were as the others.
    pages_per_second: f64,
    pages_looked_at: u64,
    pages: u64,
    looks: u64,
    /// In a second: pages told of to somebody who had wished it.
    told_per_second: f64,
}

#[derive(Serialize)]
struct Report<'a> {
    host: &'a str,
    seconds: f64,
    allocated: u64,
    allocated_most: u64,
    received_most: u64,
    members: &'a [ringlet_reflect::MemberState],
    regions: Vec<RegionRow<'a>>,
    sets: &'a [LockState],
    /// By rail; negative while they are being counted.
    errors: Vec<i32>,
    is_cut: bool,
    /// If memory is reflected among several hosts. (What is written is seen as it is received on this one, from all.)
    cluster: Option<&'a ClusterState>,
}

pub fn run(interval: u64, count: u64, json: bool) -> anyhow::Result<()> {
    let host = Host::find().context("this host's reflective memory")?;
    let mut seen = Seen { samplers: BTreeMap::new() };
    let mut shown = 0;
    while count == 0 || shown < count {
        let (written, seconds) = seen.watch(&host, Duration::from_secs(interval))?;
        let state = host.state()?;
        let errors = (0..host.rails()).map(|rail| host.errors(rail)).collect::<Result<_, _>>()?;
        let report = report(&state, &written, seconds, errors);
        if json {
            table::json(&report)?;
        } else {
            if shown > 0 {
                println!();
            }
            show(&report);
        }
        shown += 1;
    }
    Ok(())
}

struct Seen {
    samplers: BTreeMap<u32, Sampler>,
}

impl Seen {
    /// Looks again and again for so long. (What comes or goes meanwhile is seen for its time, or not.)
    fn watch(
        &mut self,
        host: &Host,
        most: Duration,
    ) -> anyhow::Result<(BTreeMap<u32, Written>, f64)> {
        let state = host.state()?;
        let each = (PAGES / (state.regions.len() as u64).max(1)).max(PAGES_LEAST);
        // (In a cluster what a host receives is other memory once it has received nothing of a region.)
        let may_stay = state.cluster.is_none();
        self.samplers
            .retain(|id, _| may_stay && state.regions.iter().any(|region| region.id == *id));
        for region in &state.regions {
            if self.samplers.contains_key(&region.id) {
                continue;
            }
            match host.sampler(region.id, each) {
                Ok(sampler) => drop(self.samplers.insert(region.id, sampler)),
                Err(Status::Denied | Status::BadRegion) => {}
                Err(status) => return Err(status.into()),
            }
        }
        // (What was before is not of this time.)
        for sampler in self.samplers.values_mut() {
            sampler.look()?;
        }
        let began = Instant::now();
        let mut sums: BTreeMap<u32, (Sample, u64)> = BTreeMap::new();
        while began.elapsed() < most {
            std::thread::sleep(LOOK.min(most.saturating_sub(began.elapsed())));
            for (id, sampler) in &mut self.samplers {
                let now = sampler.look()?;
                let (sum, looks) = sums.entry(*id).or_default();
                *sum =
                    Sample { changed: sum.changed + now.changed, told: sum.told + now.told, ..now };
                *looks += 1;
            }
        }
        let seconds = began.elapsed().as_secs_f64();
        let written = sums.into_iter().map(|(id, (sum, looks))| {
            let share = sum.pages as f64 / (sum.looked.max(1)) as f64;
            let written = Written {
                pages_per_second: sum.changed as f64 * share / seconds,
                pages_looked_at: sum.looked,
                pages: sum.pages,
                looks,
                told_per_second: sum.told as f64 / seconds,
            };
            (id, written)
        });
        Ok((written.collect(), seconds))
    }
}

fn report<'a>(
    state: &'a State,
    written: &BTreeMap<u32, Written>,
    seconds: f64,
    errors: Vec<i32>,
) -> Report<'a> {
    let row =
        |region: &'a RegionState| RegionRow { region, written: written.get(&region.id).copied() };
    Report {
        host: &state.host,
        seconds,
        allocated: state.allocated,
        allocated_most: state.allocated_most,
        received_most: state.received_most,
        members: &state.members,
        regions: state.regions.iter().map(row).collect(),
        sets: &state.sets,
        errors,
        is_cut: state.is_cut,
        cluster: state.cluster.as_ref(),
    }
}

fn show_cluster(cluster: &ClusterState) {
    println!(
        "one of {} hosts: {}; place {} of the order by {}; {} payloads of this host are not everywhere yet",
        cluster.hosts.len(),
        table::printable(&cluster.hosts.join(" ")),
        table::grouped(cluster.delivered),
        table::printable(&cluster.hub),
        table::grouped(cluster.submitted.saturating_sub(cluster.settled))
    );
    if let Some(why) = &cluster.stopped {
        println!("stopped: {}", table::printable(why));
    }
    for (node, why) in &cluster.unheard {
        println!("not heard: {}, which says {why}", table::printable(node));
    }
}

fn show(report: &Report) {
    let errors: Vec<_> = report
        .errors
        .iter()
        .enumerate()
        .map(|(rail, count)| format!("{count} on rail {rail}"))
        .collect();
    println!(
        "{}: {} programs, {} of {} bytes allocated; errors: {}; {:.1} s",
        table::printable(report.host),
        report.members.len(),
        table::grouped(report.allocated),
        table::grouped(report.allocated_most),
        errors.join(", "),
        report.seconds
    );
    if let Some(cluster) = report.cluster {
        show_cluster(cluster);
    }
    if !report.regions.is_empty() {
        println!();
        let rate = |value: f64| table::grouped(value.round() as u64);
        let rows = report.regions.iter().map(|row| {
            let (region, written) = (row.region, row.written);
            let about =
                |written: Written| if written.pages_looked_at < written.pages { "~" } else { "" };
            [
                format!("{:#x}", region.key),
                table::grouped(region.bytes),
                mode(region.mode),
                written.map_or("-".to_owned(), |each| {
                    format!("{}{}", about(each), rate(each.pages_per_second))
                }),
                written.map_or("-".to_owned(), |each| rate(each.told_per_second)),
                region.watched.to_string(),
                list(&region.transmit),
                list(&region.receive),
            ]
        });
        let head = ["Region", "Size", "Mode", "Pages/s", "Told/s", "Wishes", "Transmit", "Receive"];
        table::print(head.map(str::to_owned), rows.collect::<Vec<_>>());
    }
    if !report.sets.is_empty() {
        println!();
        let rows = report.sets.iter().map(|set| {
            let held = set.held.iter().map(|(lock, member)| format!("{lock} by {member}"));
            [
                format!("{:#x}", set.key),
                set.count.to_string(),
                mode(set.mode),
                list(&set.users),
                list(&set.waited),
                held.collect::<Vec<_>>().join(", "),
            ]
        });
        let head = ["Locks", "Count", "Mode", "Members", "Waited for", "Held"];
        table::print(head.map(str::to_owned), rows.collect::<Vec<_>>());
    }
    if report.is_cut {
        println!("(There are more.)");
    }
}
