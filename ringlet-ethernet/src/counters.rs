//! What is counted, and why a frame is lost.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize};

macro_rules! reasons {
    ($($name:ident $says:literal,)*) => {
        /// Why a frame went nowhere.
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        pub enum Dropped { $(#[doc = $says] $name,)* }

        impl Dropped {
            pub const ALL: &[(Dropped, &str)] = &[$((Dropped::$name, $says),)*];
        }
    };
}

reasons! {
    NoPort "no other port",
    Full "the receiver's queue was full",
    Malformed "malformed header",
    Source "a source address that is another port's",
    Storm "too many to all ports",
    DeviceDown "the device is down",
    Kernel "refused by the kernel",
    Buffers "no buffers of the guest's that hold it",
}

/// Of one queue. (Written by its thread alone, for each frame: in lines of its own.)
#[derive(Default)]
#[repr(align(128))]
pub struct Counters {
    pub sent: AtomicU64,
    pub sent_bytes: AtomicU64,
    pub received: AtomicU64,
    pub received_bytes: AtomicU64,
    /// Times that the queue's thread slept; that others were woken.
    pub slept: AtomicU64,
    pub rang: AtomicU64,
    /// Times that the only receiver had no room, and was waited for.
    pub waited: AtomicU64,
    pub dropped: [AtomicU64; Dropped::ALL.len()],
}

/// Of one other port, by one queue.
#[derive(Default)]
#[repr(align(128))]
pub struct Traffic {
    pub sent: AtomicU64,
    pub received: AtomicU64,
    pub full: AtomicU64,
}

pub fn add(counter: &AtomicU64, count: u64) {
    counter.store(counter.load(Ordering::Relaxed) + count, Ordering::Relaxed);
}

impl Counters {
    pub fn dropped(&self, why: Dropped) {
        add(&self.dropped[why as usize], 1);
    }
}

/// As it is told.
#[derive(Clone, Default, Debug, PartialEq, Serialize, Deserialize)]
pub struct Totals {
    pub sent: u64,
    pub sent_bytes: u64,
    pub received: u64,
    pub received_bytes: u64,
    pub slept: u64,
    pub rang: u64,
    pub waited: u64,
    /// By their reasons.
    pub dropped: BTreeMap<String, u64>,
}

impl Totals {
    pub fn of<'a>(all: impl Iterator<Item = &'a Counters> + Clone) -> Totals {
        let sum = |of: &dyn Fn(&Counters) -> &AtomicU64| {
            all.clone().map(|each| of(each).load(Ordering::Relaxed)).sum()
        };
        let dropped = Dropped::ALL
            .iter()
            .map(|(why, says)| ((*says).to_owned(), sum(&|each| &each.dropped[*why as usize])));
        Totals {
            sent: sum(&|each| &each.sent),
            sent_bytes: sum(&|each| &each.sent_bytes),
            received: sum(&|each| &each.received),
            received_bytes: sum(&|each| &each.received_bytes),
            slept: sum(&|each| &each.slept),
            rang: sum(&|each| &each.rang),
            waited: sum(&|each| &each.waited),
            dropped: dropped.collect(),
        }
    }
}
