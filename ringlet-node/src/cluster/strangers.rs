//! How many may be there at a time who have connected and not said yet who they are: in all, and of one address. A node that is to dial us for channels
//! may besides have as many there as that are, at its own address; they take up no room of others.

use std::net::IpAddr;

const ALL: usize = 64;
const OF_AN_ADDRESS: usize = 8;

/// Those that are there, by address, and how many channels each address is waited for with.
#[derive(Default)]
pub struct Strangers {
    there: Vec<(IpAddr, usize)>,
    expected: Vec<(IpAddr, usize)>,
}

impl Strangers {
    pub fn new(
        there: impl Iterator<Item = IpAddr>,
        expected: impl Iterator<Item = IpAddr>,
    ) -> Strangers {
        let mut strangers = Strangers::default();
        there.for_each(|from| count(&mut strangers.there, from));
        expected.for_each(|from| count(&mut strangers.expected, from));
        strangers
    }

    /// May one more be there from this address? It is counted if so.
    pub fn admits(&mut self, from: IpAddr) -> bool {
        let from = from.to_canonical();
        let (there, expected) = (of(&self.there, from), of(&self.expected, from));
        let beyond = |(at, there): &(IpAddr, usize)| there.saturating_sub(of(&self.expected, *at));
        let all: usize = self.there.iter().map(beyond).sum();
        let admits = there < expected || there < expected + OF_AN_ADDRESS && all < ALL;
        if admits {
            count(&mut self.there, from);
        }
        admits
    }
}

fn count(counts: &mut Vec<(IpAddr, usize)>, from: IpAddr) {
    let from = from.to_canonical();
    match counts.iter_mut().find(|(at, _)| *at == from) {
        Some((_, count)) => *count += 1,
        None => counts.push((from, 1)),
    }
}

fn of(counts: &[(IpAddr, usize)], from: IpAddr) -> usize {
    counts.iter().find(|(at, _)| *at == from).map_or(0, |(_, count)| *count)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    /// So many of them are let in.
    fn let_in(strangers: &mut Strangers, from: IpAddr) -> usize {
        (0..1000).take_while(|_| strangers.admits(from)).count()
    }

    #[test]
    fn who_is_expected_makes_no_room_for_strangers() {
        let (node, stranger) = (ip("10.0.0.2"), ip("10.0.0.9"));
        let calls = || std::iter::repeat_n(ip("::ffff:10.0.0.2"), 100);
        let mut strangers = Strangers::new([].into_iter(), calls());
        assert_eq!(let_in(&mut strangers, stranger), OF_AN_ADDRESS);
        let others = (0..100).map(|at| ip(&format!("10.1.0.{at}")));
        let all: usize = others.map(|from| let_in(&mut strangers, from)).sum();
        assert_eq!(all, ALL - OF_AN_ADDRESS);
        // Nor do strangers take up its own, and it has no more than others besides.
        assert_eq!(let_in(&mut strangers, node), 100);
        let mut strangers = Strangers::new([stranger].into_iter(), calls());
        assert_eq!(let_in(&mut strangers, node), 100 + OF_AN_ADDRESS);
        assert_eq!(let_in(&mut strangers, stranger), OF_AN_ADDRESS - 1);
    }
}
