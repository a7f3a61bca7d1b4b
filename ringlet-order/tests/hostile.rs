//! A member that says anything: others don't fall over, keep no more than their windows, and go on without it.

use std::time::Duration;

use proptest::prelude::*;
use ringlet_order::*;

const SILENT: Duration = Duration::from_millis(100);
const BEAT: Duration = Duration::from_millis(10);
const NAMES: [&str; 3] = ["a", "b", "c"];

fn life(node: &str) -> Life {
    Life { node: node.into(), incarnation: 1 }
}

/// Three nodes of which the last one to be named is not to be trusted.
struct Net {
    orders: Vec<Order>,
    frames: Vec<(usize, usize, Vec<u8>)>,
    /// Of each, what it has delivered.
    delivered: Vec<Vec<(u64, u64)>>,
    now: Duration,
}

impl Net {
    fn new() -> Net {
        let order = |node: &&str| {
            let founders = NAMES.map(String::from).to_vec();
            Order::new(
                Settings { me: life(node), founders, silent: SILENT, beat: BEAT },
                None,
                Duration::ZERO,
            )
        };
        let mut orders: Vec<_> = NAMES.iter().map(order).collect();
        for (at, order) in orders.iter_mut().enumerate() {
            let others = NAMES.iter().enumerate().filter(|(other, _)| *other != at);
            others.for_each(|(_, other)| order.up(life(other), Duration::ZERO));
        }
        let mut net =
            Net { orders, frames: Vec::new(), delivered: vec![Vec::new(); 3], now: Duration::ZERO };
        net.beats(4);
        net
    }

    /// What all say, and how much of it there is.
    fn drain(&mut self) -> usize {
        let mut bytes = 0;
        for at in 0..3 {
            while let Some(output) = self.orders[at].output() {
                match output {
                    Output::Send { to, frame } => {
                        bytes += frame.len();
                        let to = NAMES.iter().position(|name| *name == to.node).unwrap();
                        self.frames.push((at, to, frame.to_vec()));
                    }
                    Output::Deliver { sequence, number, .. } => {
                        self.delivered[at].push((sequence, number))
                    }
                    _ => {}
                }
            }
        }
        bytes
    }

    /// All that is said is heard.
    fn settle(&mut self) {
        for _ in 0..10_000 {
            self.drain();
            if self.frames.is_empty() {
                return;
            }
            for (from, to, frame) in std::mem::take(&mut self.frames) {
                let _ = self.orders[to].heard(&life(NAMES[from]), frame, self.now);
            }
        }
        panic!("it never ends");
    }

    fn beats(&mut self, beats: u32) {
        for _ in 0..beats {
            self.settle();
            self.now += BEAT;
            self.orders.iter_mut().for_each(|order| order.tick(self.now));
        }
        self.settle();
    }
}

#[derive(Clone, Debug)]
enum Lie {
    /// Any bytes, of that kind; a frame that was said once, with some bytes changed; and as it was.
    Bytes(u8, Vec<u8>),
    Changed(usize, Vec<(usize, u8)>),
    Beat,
    /// By an honest one.
    Submit(usize, usize),
}

fn lie() -> impl Strategy<Value = Lie> {
    prop_oneof![
        3 => (0..12u8, prop::collection::vec(any::<u8>(), 0..200)).prop_map(|(kind, bytes)| Lie::Bytes(kind, bytes)),
        8 => (any::<usize>(), prop::collection::vec((0..100usize, any::<u8>()), 0..4)).prop_map(|(at, changes)| Lie::Changed(at, changes)),
        2 => Just(Lie::Beat),
        4 => (any::<usize>(), 0..2000usize).prop_map(|(node, bytes)| Lie::Submit(node, bytes)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn whatever_one_says_others_stand(liar in 0..3usize, lies in prop::collection::vec(lie(), 1..60)) {
        let mut net = Net::new();
        let mut said: Vec<Vec<u8>> = Vec::new();
        for lie in lies {
            let frame = match lie {
                Lie::Bytes(kind, mut bytes) => {
                    // (One that is of the right version and view.)
                    bytes.splice(0..0, [VERSION, kind, 1, 0, 0, 0, 0, 0, 0, 0]);
                    bytes
                }
                Lie::Changed(at, changes) if !said.is_empty() => {
                    let mut frame = said[at % said.len()].clone();
                    for (place, byte) in changes {
                        if let Some(changed) = frame.get_mut(place) {
                            *changed = byte;
                        }
                    }
                    frame
                }
                Lie::Changed(..) => continue,
                Lie::Beat => {
                    net.drain();
                    said.extend(net.frames.iter().map(|(_, _, frame)| frame.clone()));
                    net.beats(1);
                    continue;
                }
                Lie::Submit(node, bytes) => {
                    let _ = net.orders[node % 3].submit(vec![1; bytes], net.now);
                    net.drain();
                    said.extend(net.frames.iter().map(|(_, _, frame)| frame.clone()));
                    continue;
                }
            };
            for to in (0..3).filter(|to| *to != liar) {
                let _ = net.orders[to].heard(&life(NAMES[liar]), frame.clone(), net.now);
            }
            // What is answered has an end, too.
            prop_assert!(net.drain() <= 16 * WINDOW_BYTES);
        }
        net.beats(3);
        for delivered in &net.delivered {
            prop_assert!(delivered.windows(2).all(|pair| pair[0].0 < pair[1].0), "{delivered:?}");
        }
    }
}

#[test]
fn who_says_nonsense_is_told_from_others_and_left_out() {
    let mut net = Net::new();
    for liar in [2, 0] {
        let mut net = std::mem::replace(&mut net, Net::new());
        for to in (0..3).filter(|to| *to != liar) {
            assert_eq!(
                net.orders[to].heard(&life(NAMES[liar]), vec![VERSION, 77], net.now),
                Err("a frame that is cut off")
            );
        }
        net.beats(30);
        for honest in (0..3).filter(|to| *to != liar) {
            let view = net.orders[honest].view().unwrap();
            assert!(!view.members.contains(&life(NAMES[liar])), "{view:?}");
            assert!(net.orders[honest].submit(vec![7], net.now).is_ok());
        }
        net.beats(3);
    }
}

/// It submits more than a window, in the right order, while another one acknowledges nothing.
#[test]
fn the_hub_takes_no_more_than_a_window_of_one() {
    let mut net = Net::new();
    let payload = vec![7; PAYLOAD_BYTES];
    let mut taken = 0;
    for number in 1..200u64 {
        let mut frame = vec![VERSION, 1];
        frame.extend(1u64.to_le_bytes());
        frame.extend(0u64.to_le_bytes());
        frame.push(1);
        frame.extend(number.to_le_bytes());
        frame.extend((payload.len() as u32).to_le_bytes());
        frame.extend(&payload);
        net.orders[0].heard(&life("b"), frame, net.now).unwrap();
        while let Some(output) = net.orders[0].output() {
            taken += usize::from(matches!(output, Output::Deliver { .. }));
        }
    }
    assert_eq!(taken, WINDOW_BYTES / PAYLOAD_BYTES);
}
