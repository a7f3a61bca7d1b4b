//! Who decides on the next view: single-decree Paxos among the nodes of the present one.

use crate::wire::Change;

/// A round, and in its lowest bits the proposer's place among the acceptors: no two proposers have the same. 0 is none.
pub type Ballot = u64;

const PLACES: u64 = 256;

pub fn place_of(ballot: Ballot) -> usize {
    (ballot % PLACES) as usize
}

/// That proposer's next one beyond all of these rounds.
pub fn above(ballot: Ballot, place: usize) -> Ballot {
    (ballot / PLACES + 1) * PLACES + place as u64
}

/// What a node must never forget: which view it knows of, and what it has promised and accepted about the next. A promise ends a node's deliveries in that
/// view, so a later proposer finds nobody who goes on behind what it was told.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Acceptor {
    pub view: Change,
    pub promised: Ballot,
    pub accepted: Option<(Ballot, Change)>,
}

impl Acceptor {
    pub fn new(view: Change) -> Acceptor {
        Acceptor { view, promised: 0, accepted: None }
    }

    pub fn promise(&mut self, ballot: Ballot) -> bool {
        let may = ballot >= self.promised;
        if may {
            self.promised = ballot;
        }
        may
    }

    pub fn accept(&mut self, ballot: Ballot, change: Change) -> bool {
        let may = self.promise(ballot);
        if may {
            self.accepted = Some((ballot, change));
        }
        may
    }
}

/// Do these make more than half of all? `electorate` says for each acceptor whether it counts at all, `there` whether it is there. Each has two votes,
/// and the first one three: so of an even split one half has a quorum.
pub fn is_quorum(electorate: &[bool], there: impl Fn(usize) -> bool) -> bool {
    let first = electorate.iter().position(|&counts| counts);
    let weight = |place| if Some(place) == first { 3 } else { 2 };
    let counted = (0..electorate.len()).filter(|&place| electorate[place]);
    let (all, got) = counted.fold((0, 0), |(all, got), place| {
        (all + weight(place), got + if there(place) { weight(place) } else { 0 })
    });
    2 * got > all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Life;
    use crate::wire::Seat;

    fn change(number: u64) -> Change {
        let life = Life { node: "a".into(), incarnation: 1 };
        Change { number, start: 0, members: vec![Seat { life, joins: false, count: 0 }] }
    }

    #[test]
    fn any_two_quorums_have_a_node_in_common_and_one_half_of_two_is_one() {
        for nodes in 1..=7 {
            let electorate = vec![true; nodes];
            let quorum = |set: u32| is_quorum(&electorate, |place| set >> place & 1 == 1);
            for set in 0..1 << nodes {
                // One of two halves is one, and never both.
                assert_ne!(quorum(set), quorum(!set), "{nodes} {set:b}");
                for other in 0..1 << nodes {
                    assert!(
                        !quorum(set) || !quorum(other) || set & other != 0,
                        "{nodes} {set:b} {other:b}"
                    );
                }
            }
        }
    }

    /// Whoever is buried never votes: among the others both kinds of quorum meet.
    #[test]
    fn a_quorum_without_the_buried_meets_one_with_them() {
        for nodes in 2..=6 {
            for left in 1..1u32 << nodes {
                let electorate: Vec<_> = (0..nodes).map(|place| left >> place & 1 == 1).collect();
                for (a, b) in (0..1u32 << nodes)
                    .flat_map(|a| (0..1u32 << nodes).map(move |b| (a & left, b & left)))
                {
                    let all = is_quorum(&vec![true; nodes], |place| a >> place & 1 == 1);
                    let some = is_quorum(&electorate, |place| b >> place & 1 == 1);
                    assert!(!all || !some || a & b != 0, "{nodes} {left:b} {a:b} {b:b}");
                }
            }
        }
    }

    #[test]
    fn a_promise_binds() {
        let mut acceptor = Acceptor::new(change(1));
        let (low, high) = (above(0, 3), above(above(0, 3), 1));
        assert_eq!((place_of(low), place_of(high), low < high), (3, 1, true));
        assert!(acceptor.promise(low) && acceptor.promise(high) && acceptor.promise(high));
        assert!(!acceptor.promise(low) && !acceptor.accept(low, change(2)));
        assert_eq!((acceptor.promised, &acceptor.accepted), (high, &None));
        assert!(acceptor.accept(high, change(2)));
        assert_eq!(acceptor.accepted, Some((high, change(2))));
        // A proposal that comes without its question is a promise as well.
        let higher = above(high, 0);
        assert!(acceptor.accept(higher, change(2)) && !acceptor.promise(high));
    }
}
