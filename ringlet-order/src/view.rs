//! Views as they are decided on.

use crate::api::Life;

/// A member of a view: whether it begins there, knowing nothing; and how many of its own were delivered before.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Seat {
    pub life: Life,
    pub joins: bool,
    pub count: u64,
}

/// A view, as it is decided on: `start` is the last place in the order before it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Change {
    pub number: u64,
    pub start: u64,
    pub members: Vec<Seat>,
}

impl Change {
    pub fn place(&self, life: &Life) -> Option<usize> {
        self.members.iter().position(|member| member.life == *life)
    }

    pub fn place_of_node(&self, node: &str) -> Option<usize> {
        self.members.iter().position(|member| member.life.node == node)
    }
}
