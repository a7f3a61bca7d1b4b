//! What a frame for all costs its sender, and the others, which sleep: of its processor, and of theirs.
//!
//!     cargo run --release -p ringlet-ethernet --example broadcast

// (It has what the tests need, too.)
#[allow(dead_code)]
#[path = "../tests/member/mod.rs"]
mod member;

use std::time::Duration;

use member::{BROADCAST, Member, mac, message, until};
use nix::time::ClockId;
use ringlet_ethernet::room::Rules;
use ringlet_ethernet::{Options, Policy, Port, Room};

fn main() {
    const FRAMES: u32 = 2000;
    let folder = tempfile::tempdir().unwrap();
    let rules = Rules { addresses: Policy::Moving, storm: 0, bridge: false };
    Room::create(folder.path(), "net", rules, None).unwrap();
    let room = Room::open(folder.path(), "net").unwrap();
    let mut members = Vec::new();
    for others in [1, 2, 7, 31, 63] {
        while members.len() < others {
            members.push(Member::new(&room, 2 + members.len() as u16));
        }
        let (port, mut queues) =
            Port::open(room.clone(), Options::new("speaks", mac(1)), |_| ()).unwrap();
        until("others", || port.others() == others);
        let queue = &mut queues[0];
        let bytes = message(BROADCAST, mac(1), 1);
        let slept = || members.iter().map(|member| member.port.totals().slept).sum::<u64>();
        let clocks = || {
            [ClockId::CLOCK_THREAD_CPUTIME_ID, ClockId::CLOCK_PROCESS_CPUTIME_ID]
                .map(|clock| Duration::from(clock.now().unwrap()))
        };
        let (before, slept_before) = (clocks(), slept());
        for _ in 0..FRAMES {
            queue.begin();
            queue.send(&bytes);
            std::thread::sleep(Duration::from_millis(1));
        }
        let (after, slept_after) = (clocks(), slept());
        let [own, all] = [0, 1].map(|nth| (after[nth] - before[nth]) / FRAMES);
        println!(
            "{others} others: {own:.1?} of its sender's time a frame, {:.1?} of theirs; {:.2} sleeps a frame",
            all - own,
            (slept_after - slept_before) as f64 / f64::from(FRAMES)
        );
    }
}
