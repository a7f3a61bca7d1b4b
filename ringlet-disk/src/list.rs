//! The disks that there are.

use ringlet_reflect::{Host, PAGE_BYTES, Permission, Status, Use};
use serde::Serialize;

use crate::layout::{Facts, Part};

#[derive(Serialize)]
pub struct Listed {
    pub name: String,
    pub bytes: u64,
    pub read_only: bool,
    pub owner: u32,
    /// The host that serves it; none: nobody does just now.
    pub host: Option<String>,
    /// The hosts of its readers, one for each.
    pub readers: Vec<String>,
}

/// Those that this user may use.
pub fn list(host: &Host) -> Result<Vec<Listed>, Status> {
    let state = host.state()?;
    let mut listed = Vec::new();
    for region in &state.regions {
        if !Part::is_announcement(region.key) || region.bytes != PAGE_BYTES as u64 {
            continue;
        }
        let Some(facts) = facts(host, region.key) else { continue };
        let set = state.sets.iter().find(|set| set.key == region.key && set.owner == region.owner);
        let held = set.map_or(&[][..], |set| &set.held);
        let of = |member: u32| {
            let who = state.members.iter().find(|who| who.member == member);
            who.map(|who| who.host.clone().unwrap_or_else(|| state.host.clone()))
        };
        let server = held.iter().find(|(lock, _)| *lock == 0);
        let readers = held.iter().filter(|(lock, _)| *lock > 0);
        listed.push(Listed {
            name: facts.name,
            bytes: facts.bytes,
            read_only: facts.read_only,
            owner: region.owner,
            host: server.and_then(|(_, member)| of(*member)),
            readers: readers.filter_map(|(_, member)| of(*member)).collect(),
        });
    }
    listed.sort_by(|one, other| one.name.cmp(&other.name));
    Ok(listed)
}

/// None of what may not be read, or is none of a disk's.
fn facts(host: &Host, key: u64) -> Option<Facts> {
    let region = host.allocate(key, PAGE_BYTES, &Permission::default()).ok()?;
    let receiver = region.receive(Use::default()).ok()?;
    Facts::read(&receiver).map(|(facts, _)| facts)
}
