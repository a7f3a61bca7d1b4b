//! Which links a packet takes from node to node.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// How the nodes are joined.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize, Serialize)]
#[serde(try_from = "String", into = "String")]
pub enum Topology {
    /// One SCI ringlet: links go one way round.
    Ring,
    /// Ringlets of so many nodes, and a port of the switch in each.
    Switch(usize),
    /// Each node is in one ringlet of its row and one of its column.
    Torus,
    /// A Memory Channel hub, and so many spare ones.
    Hub(usize),
}

impl FromStr for Topology {
    type Err = String;

    fn from_str(text: &str) -> Result<Topology, String> {
        let (kind, number) = match text.split_once(':') {
            Some((kind, number)) => (kind, Some(number)),
            None => (text, None),
        };
        let count = |default| match number.map(str::parse::<usize>) {
            None => Ok(default),
            Some(Ok(count)) if count <= 512 => Ok(count),
            Some(_) => Err(format!("{text}: not a number up to 512")),
        };
        match kind {
            "ring" if number.is_none() => Ok(Topology::Ring),
            "torus" if number.is_none() => Ok(Topology::Torus),
            "switch" => match count(2)? {
                0 => Err(format!("{text}: a ringlet has a node")),
                nodes => Ok(Topology::Switch(nodes)),
            },
            "hub" => Ok(Topology::Hub(count(0)?)),
            _ => Err(format!("{text}: none of ring, switch:NODES, torus, hub:SPARES")),
        }
    }
}

impl TryFrom<String> for Topology {
    type Error = String;
    fn try_from(text: String) -> Result<Topology, String> {
        text.parse()
    }
}

impl From<Topology> for String {
    fn from(topology: Topology) -> String {
        topology.to_string()
    }
}

impl fmt::Display for Topology {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Topology::Ring => f.write_str("ring"),
            Topology::Switch(nodes) => write!(f, "switch:{nodes}"),
            Topology::Torus => f.write_str("torus"),
            Topology::Hub(spares) => write!(f, "hub:{spares}"),
        }
    }
}

/// The way of a packet: its links in order, and how many switches (or hubs) it goes through.
#[derive(Default)]
pub struct Route {
    pub links: Vec<usize>,
    pub switches: u64,
}

impl Topology {
    /// Columns of the torus: the divisor that makes it squarest.
    fn columns(nodes: usize) -> usize {
        (1..=nodes)
            .take_while(|n| n * n <= nodes)
            .filter(|n| nodes.is_multiple_of(*n))
            .max()
            .unwrap_or(1)
    }

    pub fn link_count(self, nodes: usize) -> usize {
        match self {
            Topology::Ring => nodes,
            Topology::Switch(per_ring) => nodes.div_ceil(per_ring) * (per_ring + 1),
            Topology::Torus => 2 * nodes,
            Topology::Hub(spares) => 2 * nodes * (spares + 1),
        }
    }

    /// The ways there are, the preferred one first; `number` counts from 0.
    fn way(self, nodes: usize, from: usize, to: usize, number: usize, route: &mut Route) -> bool {
        route.links.clear();
        route.switches = 0;
        // `size` links one way round, the one after member `m` being `base + m`.
        let mut round = |base: usize, stride: usize, size: usize, from: usize, to: usize| {
            let mut at = from;
            while at != to {
                route.links.push(base + at * stride);
                at = (at + 1) % size;
            }
        };
        match self {
            Topology::Ring if number == 0 => round(0, 1, nodes, from, to),
            Topology::Switch(per_ring) if number == 0 => {
                let size = per_ring + 1;
                let (ring, other) = (from / per_ring, to / per_ring);
                let (from, to) = (from % per_ring, to % per_ring);
                if ring == other {
                    round(ring * size, 1, size, from, to);
                } else {
                    round(ring * size, 1, size, from, per_ring);
                    round(other * size, 1, size, per_ring, to);
                    route.switches = 1;
                }
            }
            Topology::Torus if number < 4 => {
                let columns = Topology::columns(nodes);
                let rows = nodes / columns;
                let (x, y) = (from % columns, from / columns);
                let (to_x, to_y) = (to % columns, to / columns);
                let (next_x, next_y) = ((x + 1) % columns, (y + 1) % rows);
                // Corners of the way: row then column, column then row, and both by the next column or row over, which also
                // leads from place to place within a row or column.
                let corners: &[(usize, usize)] = match number {
                    0 => &[(to_x, y), (to_x, to_y)],
                    1 => &[(x, to_y), (to_x, to_y)],
                    2 => &[(next_x, y), (next_x, to_y), (to_x, to_y)],
                    _ => &[(x, next_y), (to_x, next_y), (to_x, to_y)],
                };
                let (mut x, mut y) = (x, y);
                for &(corner_x, corner_y) in corners {
                    // Row y's links are `y * columns + x`; column x's follow all of them.
                    round(y * columns, 1, columns, x, corner_x);
                    round(nodes + corner_x, columns, rows, y, corner_y);
                    (x, y) = (corner_x, corner_y);
                }
            }
            // The hub itself, with its spares, is number `nodes`.
            Topology::Hub(spares) if number <= spares => {
                if from < nodes {
                    route.links.push(2 * (number * nodes + from));
                    route.switches = 1;
                }
                if to < nodes {
                    route.links.push(2 * (number * nodes + to) + 1);
                }
            }
            _ => return false,
        }
        true
    }

    /// The first way without a dead link. False when there is none.
    pub fn route(
        self,
        nodes: usize,
        from: usize,
        to: usize,
        dead: &[bool],
        route: &mut Route,
    ) -> bool {
        let mut number = 0;
        while self.way(nodes, from, to, number, route) {
            if route.links.iter().all(|&link| !dead[link]) {
                return true;
            }
            number += 1;
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each link lies in exactly one place, and each way leads to its target over links that exist.
    #[test]
    fn ways_exist_between_all_nodes() {
        for text in ["ring", "switch:3", "torus", "hub:1"] {
            let topology: Topology = text.parse().unwrap();
            assert_eq!(topology.to_string(), text);
            for nodes in [2, 7, 12] {
                let dead = vec![false; topology.link_count(nodes)];
                let mut route = Route::default();
                for from in 0..nodes {
                    for to in (0..nodes).filter(|&to| to != from) {
                        assert!(topology.route(nodes, from, to, &dead, &mut route));
                        assert!(!route.links.is_empty());
                        let mut once = route.links.clone();
                        once.sort_unstable();
                        once.dedup();
                        assert_eq!(
                            once.len(),
                            route.links.len(),
                            "a link twice: {text} {from} {to}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn a_dead_link_is_gone_round_where_there_is_another_way() {
        let mut route = Route::default();
        for (text, other) in [("ring", false), ("torus", true), ("hub:1", true), ("hub", false)] {
            let topology: Topology = text.parse().unwrap();
            let mut dead = vec![false; topology.link_count(9)];
            assert!(topology.route(9, 0, 4, &dead, &mut route));
            dead[route.links[0]] = true;
            assert_eq!(topology.route(9, 0, 4, &dead, &mut route), other, "{text}");
        }
    }

    #[test]
    fn what_is_no_topology_is_refused() {
        for text in ["", "ring:2", "switch:0", "hub:x", "hub:1000", "mesh"] {
            assert!(text.parse::<Topology>().is_err(), "{text}");
        }
    }
}
