//! Ports that say which groups they want: those come at once, others do not.

mod member;

use member::{BROADCAST, Member, mac, until};
use ringlet_ethernet::room::Rules;
use ringlet_ethernet::{Mac, Policy, Room};

/// (Of two bits of the filter.)
const GROUPS: [Mac; 2] = [Mac([1, 0, 0x5e, 7, 7, 7]), Mac([0x33, 0x33, 0, 0, 0, 0xfb])];
const TIMES: u64 = 200;
const LAST: u64 = 10_000;

/// What a member has heard up to a broadcast of this number, which is left out.
fn heard_before(member: &Member, number: u64) -> Vec<u64> {
    until("a broadcast", || member.heard().iter().any(|heard| heard.number == number));
    let mut heard: Vec<u64> = member.heard().drain(..).map(|heard| heard.number).collect();
    assert_eq!(heard.pop(), Some(number));
    heard
}

#[test]
fn a_port_gets_the_groups_that_it_wants_from_then_on() {
    let folder = tempfile::tempdir().unwrap();
    let rules = Rules { addresses: Policy::Moving, storm: 0, bridge: false };
    Room::create(folder.path(), "net", rules, None).unwrap();
    let room = Room::open(folder.path(), "net").unwrap();
    let [speaks, all, one, none] = [1, 2, 3, 4].map(|number| Member::new(&room, number));
    [&speaks, &all, &one, &none].iter().for_each(|member| member.meets(3));
    one.port.want(Some(&GROUPS[..1]));
    none.port.want(Some(&[]));
    let say = |to: Mac, number| speaks.send(to, speaks.mac, number);
    for (to, number) in [(GROUPS[0], 1), (GROUPS[1], 2), (none.mac, 3), (BROADCAST, 4)] {
        say(to, number);
    }
    assert_eq!(heard_before(&all, 4), [1, 2]);
    assert_eq!(heard_before(&one, 4), [1]);
    assert_eq!(heard_before(&none, 4), [3]);

    // A frame that is sent behind a join comes, and one behind a leave does not.
    for time in 0..TIMES {
        none.port.want(Some(&GROUPS));
        say(GROUPS[1], 1000 + 2 * time);
        until("a group's frame", || none.heard().len() as u64 == time + 1);
        none.port.want(Some(&[]));
        say(GROUPS[1], 1001 + 2 * time);
        // (Its thread has sent that one to all when it sends the next.)
        say(all.mac, LAST + time);
        until("all", || all.heard().iter().any(|heard| heard.number == LAST + time));
    }
    say(BROADCAST, 5);
    let joined: Vec<u64> = (0..TIMES).map(|time| 1000 + 2 * time).collect();
    assert_eq!(heard_before(&none, 5), joined);
    assert!(heard_before(&one, 5).is_empty());
    let mut heard = heard_before(&all, 5);
    heard.retain(|number| *number < LAST);
    assert_eq!(heard, (1000..1000 + 2 * TIMES).collect::<Vec<u64>>());

    // Who comes later is told as well; and nobody wants what only one knows of.
    let late = Member::new(&room, 5);
    late.meets(4);
    until("the late one", || none.port.others() == 4 && one.port.others() == 4);
    for (to, number) in [(GROUPS[0], 6), (GROUPS[1], 7), (BROADCAST, 8)] {
        late.send(to, mac(5), number);
    }
    assert!(heard_before(&none, 8).is_empty());
    assert_eq!(heard_before(&one, 8), [6]);
    none.port.want(None);
    late.send(GROUPS[1], mac(5), 9);
    late.send(BROADCAST, mac(5), 10);
    assert_eq!(heard_before(&none, 10), [9]);
}
