//! Two nodes in one process, joined by rails in memory: all that carries between hosts, where it can be tried by itself.

use crate::trunk::{Event, LaneName, Trunk};
use ringlet_fabric::memory::{Chaos, MemoryRail};
use ringlet_fabric::rail::Rail;
use ringlet_fabric::{Error, Node, Number};
use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

const RAILS: usize = 3;
/// By a seed: of so many polls of a rail one loses its way. What is busy polls some million times in a second.
const FAILS_ONE_IN: u32 = 5000;
/// How often rails that are down are tried again.
const TRY_AGAIN: Duration = Duration::from_millis(1);

pub struct Hosts {
    trunks: [Trunk; 2],
    numbers: [Number; 2],
    served_at: [Option<usize>; 2],
    tried: Instant,
    /// Rails that have worked.
    joined: [bool; RAILS],
}

impl Hosts {
    /// `seed`: the rails delay, shuffle and repeat what they carry, and fail, by this number. They are files in this folder, which is not needed any more
    /// when they `are_joined`.
    pub fn new(folder: &Path, seed: Option<u64>) -> io::Result<Hosts> {
        let rail = |end: usize, nth: usize| -> io::Result<Box<dyn Rail>> {
            let own = |seed: u64| seed.wrapping_mul(2 * RAILS as u64) + (2 * nth + end) as u64;
            let chaos = seed.map(|seed| Chaos { seed: own(seed), fails_one_in: FAILS_ONE_IN });
            Ok(Box::new(MemoryRail::new(folder, &format!("host{end}rail{nth}"), chaos)?))
        };
        let node = |end| -> io::Result<(Trunk, Number)> {
            let rails = (0..RAILS).map(|nth| rail(end, nth)).collect::<io::Result<_>>()?;
            let mut node = Node::new(rails);
            let number = node.open().ok_or_else(|| io::Error::other("no transport"))?;
            Ok((Trunk::new(node), number))
        };
        let ((one, first), (other, second)) = (node(0)?, node(1)?);
        Ok(Hosts {
            trunks: [one, other],
            numbers: [first, second],
            served_at: [None; 2],
            tried: Instant::now(),
            joined: [false; RAILS],
        })
    }

    /// To be served, both, before anything is carried; then it is to be told where.
    pub fn trunks(&self) -> &[Trunk; 2] {
        &self.trunks
    }

    pub fn are_served_at(&mut self, at: [usize; 2]) {
        self.served_at = at.map(Some);
        self.trunks.iter().zip(at).for_each(|(trunk, at)| trunk.is_served_at(at));
    }

    /// They are to be roused when lanes are dropped.
    pub fn served_at(&self) -> impl Iterator<Item = usize> {
        self.served_at.into_iter().flatten()
    }

    pub fn name(&self, end: usize, lane: u32) -> LaneName {
        (self.numbers[end], lane)
    }

    pub fn are_joined(&self) -> bool {
        self.joined == [true; RAILS]
    }

    /// What the nodes say to each other beside their rails; and rails that are down are tried again. After each turn of who serves them. The longest
    /// that the next one may sleep; `rouse`: who is to be roused before.
    pub fn relay(&mut self, rouse: &mut Vec<usize>) -> Result<Option<Duration>, Error> {
        let Hosts { trunks, numbers, served_at, tried, joined } = self;
        for end in [0, 1] {
            for (_, event) in trunks[end].events() {
                match event {
                    Event::Control(control) => {
                        let number = numbers[1 - end];
                        trunks[1 - end].with_node(|node| node.control(number, control));
                        rouse.extend(served_at[1 - end]);
                    }
                    Event::Ended(error) => return Err(error),
                    Event::Up | Event::Down => {}
                }
            }
        }
        let mut all_up = true;
        for end in [0, 1] {
            trunks[end].with_node(|node| {
                let transport = node.transport(numbers[end]);
                for (rail, joined) in joined.iter_mut().enumerate() {
                    *joined |= transport.is_up(rail);
                    all_up &= transport.is_up(rail);
                }
            });
        }
        if !all_up && tried.elapsed() >= TRY_AGAIN {
            *tried = Instant::now();
            for end in [0, 1] {
                trunks[end].with_node(|node| node.try_again(numbers[end]));
                rouse.extend(served_at[end]);
            }
        }
        Ok((!all_up).then_some(TRY_AGAIN))
    }
}
