//! What two transports agree upon beside their rails: by the connection of both services, which is reliable, in order, and knows who is who.

use serde::{Deserialize, Serialize};

use crate::rail::Grant;
use crate::writes::{Memory, Receipt};

/// Rails are named by their place, which is the same in both nodes. An epoch counts how often one was begun.
#[derive(Serialize, Deserialize, Clone, PartialEq, Eq, Debug)]
pub enum Control {
    /// The first of all: what is to stand in messages and notices for the sender of this.
    Hello { number: u16, key: u32, rails: usize },
    /// The sender tries this rail (again): its endpoint's name, and what it grants of the memory that it has registered.
    Try { rail: usize, epoch: u16, name: Vec<u8>, grants: Vec<Granted> },
    /// The probe that was sent over this rail has arrived.
    Heard { rail: usize, epoch: u16 },
    /// The sender has given this rail up: it has withdrawn all grants there, so nothing more lands. What has arrived by then, by whatever rail.
    Left { rail: usize, epoch: u16, receipt: Receipt },
    /// Registered, with a grant for each rail that is used or tried; of no bytes, and with none, what only its owner uses.
    Registered { memory: Memory, bytes: u64, rails: Vec<(usize, Granted)> },
    /// No more writes to it, please.
    Withdrawing { memory: Memory },
    /// None is under way any more, and none will be.
    Free { memory: Memory },
}

#[derive(Serialize, Deserialize, Clone, Copy, PartialEq, Eq, Debug)]
pub struct Granted {
    pub memory: Memory,
    pub key: u64,
    pub base: u64,
}

impl Granted {
    pub fn new(memory: Memory, Grant { key, base }: Grant) -> Granted {
        Granted { memory, key, base }
    }

    pub fn grant(self) -> Grant {
        Grant { key: self.key, base: self.base }
    }
}
