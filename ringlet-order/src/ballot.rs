//! Who decides on the next view: single-decree Paxos among the nodes of the present one.

use crate::view::Change;

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

/// What a node must never forget: which view it knows of, and what it has promised and accepted about the next. A promise ends a node's deliveries in
/// that view, so a later proposer finds nobody who goes on behind what it was told.
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

/// Are there enough of them? `electorate` says for each acceptor whether it counts at all, `there` whether it is there. More than half is enough,
/// where each has two votes and the first one three: so of an even split one half has a quorum. Where some don't count, who are buried, all others
/// are needed: what was decided with the buried ones then is known to one of them, unless it was to the buried only.
pub fn is_quorum(electorate: &[bool], there: impl Fn(usize) -> bool) -> bool {
    let places = 0..electorate.len();
    if electorate.contains(&false) {
        return electorate.contains(&true)
            && places.into_iter().all(|place| there(place) || !electorate[place]);
    }
    let weight = |place| if place == 0 { 3 } else { 2 };
    let got: usize = places.filter(|&place| there(place)).map(weight).sum();
    2 * got > 2 * electorate.len() + 1
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::Life;
    use crate::view::Seat;

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

    #[test]
    fn a_quorum_without_the_buried_meets_each_one_with_some_of_those_left() {
        for nodes in 2..=6 {
            for left in 0..(1u32 << nodes) - 1 {
                let electorate: Vec<_> = (0..nodes).map(|place| left >> place & 1 == 1).collect();
                for set in 0..1u32 << nodes {
                    let quorum = is_quorum(&electorate, |place| set >> place & 1 == 1);
                    assert_eq!(quorum, left != 0 && set & left == left, "{nodes} {left:b} {set:b}");
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
