//! Some nodes on a net that loses nothing but what it is told to: what is seen at each step.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use ringlet_order::*;

const SILENT: Duration = Duration::from_millis(100);
const BEAT: Duration = Duration::from_millis(10);

struct Host {
    order: Order,
    delivered: Vec<(u64, String, u64, Vec<u8>)>,
    views: Vec<(u64, View, Vec<String>, Vec<String>)>,
    stable: u64,
    stopped: Vec<String>,
}

#[derive(Default)]
struct Net {
    hosts: BTreeMap<String, Host>,
    kept: BTreeMap<String, Vec<u8>>,
    incarnations: BTreeMap<String, u64>,
    frames: VecDeque<(Life, Life, Vec<u8>)>,
    cut: Vec<(String, String)>,
    /// Bytes that one has sent to another.
    sent: BTreeMap<(String, String), usize>,
    now: Duration,
}

fn life(node: &str, incarnation: u64) -> Life {
    Life { node: node.into(), incarnation }
}

fn names(lives: &[Life]) -> Vec<String> {
    lives.iter().map(|life| format!("{}{}", life.node, life.incarnation)).collect()
}

impl Net {
    /// All of them are founders.
    fn new(nodes: &str) -> Net {
        let mut net = Net::default();
        nodes.chars().for_each(|node| net.start(&node.to_string(), nodes));
        net
    }

    fn start(&mut self, node: &str, founders: &str) {
        let incarnation = self.incarnations.entry(node.into()).or_default();
        *incarnation += 1;
        let me = life(node, *incarnation);
        let founders = founders.chars().map(String::from).collect();
        let settings = Settings { me: me.clone(), founders, silent: SILENT, beat: BEAT };
        let mut order = Order::new(settings, self.kept.get(node).map(Vec::as_slice), self.now);
        for (name, host) in &mut self.hosts {
            host.order.up(me.clone(), self.now);
            order.up(life(name, self.incarnations[name]), self.now);
        }
        let host = Host {
            order,
            delivered: Vec::new(),
            views: Vec::new(),
            stable: 0,
            stopped: Vec::new(),
        };
        self.hosts.insert(node.into(), host);
    }

    fn stop(&mut self, node: &str) {
        self.hosts.remove(node);
        let gone = life(node, self.incarnations[node]);
        self.hosts.values_mut().for_each(|host| host.order.down(&gone, self.now));
    }

    /// Everything that can be done without time.
    fn settle(&mut self) {
        for _ in 0..100_000 {
            for (name, host) in &mut self.hosts {
                let me = life(name, self.incarnations[name]);
                while let Some(output) = host.order.output() {
                    match output {
                        Output::Keep(bytes) => drop(self.kept.insert(name.clone(), bytes)),
                        Output::Send { to, frame } => {
                            assert!(frame.len() <= FRAME_BYTES);
                            *self.sent.entry((name.clone(), to.node.clone())).or_default() +=
                                frame.len();
                            if !self.cut.contains(&(name.clone(), to.node.clone())) {
                                self.frames.push_back((me.clone(), to, frame.to_vec()));
                            }
                        }
                        Output::Deliver { sequence, origin, number, payload } => {
                            host.delivered.push((sequence, origin.node, number, payload.to_vec()));
                        }
                        Output::View { sequence, view, joined, left } => {
                            host.views.push((sequence, view, names(&joined), names(&left)));
                        }
                        Output::Stable { sequence } => host.stable = sequence,
                        Output::Stopped { why } => host.stopped.push(why),
                    }
                }
            }
            let Some((from, to, frame)) = self.frames.pop_front() else { return };
            if let Some(host) = self.hosts.get_mut(&to.node)
                && self.incarnations[&to.node] == to.incarnation
            {
                host.order.heard(&from, frame, self.now).expect("a sound frame");
            }
        }
        panic!("it never ends");
    }

    fn beats(&mut self, beats: u32) {
        for _ in 0..beats {
            self.settle();
            self.now += BEAT;
            self.hosts.values_mut().for_each(|host| host.order.tick(self.now));
        }
        self.settle();
    }

    fn order(&mut self, node: &str) -> &mut Order {
        &mut self.hosts.get_mut(node).unwrap().order
    }

    fn submit(&mut self, node: &str, payload: &[u8]) -> Result<u64, NotTaken> {
        let now = self.now;
        self.order(node).submit(payload.to_vec(), now)
    }

    fn members(&mut self, node: &str) -> Vec<String> {
        self.order(node).view().map_or(Vec::new(), |view| names(&view.members))
    }

    fn cut(&mut self, one: &str, other: &str) {
        self.cut.push((one.into(), other.into()));
        self.cut.push((other.into(), one.into()));
    }

    /// All of these have delivered the same, by name and number.
    fn agree(&self, nodes: &str) -> Vec<String> {
        let seen = |node: char| {
            let host = &self.hosts[&node.to_string()];
            host.delivered
                .iter()
                .map(|(_, origin, number, _)| format!("{origin}{number}"))
                .collect::<Vec<_>>()
        };
        let first = seen(nodes.chars().next().unwrap());
        for node in nodes.chars() {
            assert_eq!(seen(node), first, "{node}");
        }
        first
    }
}

#[test]
fn founders_begin_and_all_deliver_in_one_order() {
    let mut net = Net::new("abc");
    net.beats(3);
    assert_eq!(net.members("b"), ["a1", "b1", "c1"]);
    for number in 1..=100 {
        for node in ["a", "b", "c"] {
            assert_eq!(net.submit(node, node.as_bytes()), Ok(number));
        }
    }
    net.beats(1);
    assert_eq!(net.agree("abc").len(), 300);
    assert_eq!(net.hosts["c"].stable, 300);
}

#[test]
fn a_node_that_has_none_to_found_with_waits() {
    let mut net = Net::default();
    net.start("b", "ab");
    net.beats(50);
    assert_eq!(net.order("b").view(), None);
    assert_eq!(net.submit("b", b"x"), Err(NotTaken::Stopped));
    // The first of two decides alone; the other one joins.
    net.start("a", "ab");
    net.beats(30);
    assert_eq!(net.members("a"), net.members("b"));
}

#[test]
fn a_dead_hub_is_followed_and_nothing_is_lost() {
    let mut net = Net::new("abc");
    net.beats(3);
    net.submit("b", b"one").unwrap();
    net.settle();
    // This one does not reach it.
    net.cut("a", "b");
    net.submit("b", b"two").unwrap();
    net.submit("c", b"three").unwrap();
    net.settle();
    net.stop("a");
    net.beats(30);
    assert_eq!(net.members("b"), ["b1", "c1"]);
    assert_eq!(net.agree("bc"), ["b1", "c1", "b2"]);
    let (sequence, _, joined, left) = net.hosts["c"].views.last().unwrap().clone();
    assert_eq!((sequence, joined, left), (3, vec![], vec!["a1".to_string()]));
    net.cut.clear();
    net.start("a", "abc");
    net.beats(30);
    assert_eq!(net.members("a"), ["b1", "c1", "a2"]);
    net.submit("a", b"four").unwrap();
    net.settle();
    assert_eq!(net.hosts["a"].delivered, [(4, "a".to_string(), 1, b"four".to_vec())]);
}

#[test]
fn of_two_halves_the_one_with_the_first_goes_on() {
    let mut net = Net::new("abcd");
    net.beats(3);
    for (one, other) in [("a", "c"), ("a", "d"), ("b", "c"), ("b", "d")] {
        net.cut(one, other);
    }
    net.beats(60);
    assert_eq!(net.members("a"), ["a1", "b1"]);
    assert!(net.submit("b", b"x").is_ok());
    assert_eq!(net.submit("d", b"x"), Err(NotTaken::Stopped));
    assert!(net.hosts["c"].stopped[0].contains("can't reach enough of the members of view 1"));
    net.cut.clear();
    net.beats(30);
    assert!(
        net.order("c").is_over() && net.hosts["c"].stopped[1].contains("taken for dead"),
        "{:?}",
        net.hosts["c"].stopped
    );
    net.start("c", "abcd");
    net.beats(30);
    assert_eq!(net.members("c"), ["a1", "b1", "c2"]);
}

/// The first one of two has gone, behind what the other one has submitted.
fn without_the_first() -> Net {
    let mut net = Net::new("ab");
    net.beats(3);
    net.submit("b", b"x").unwrap();
    net.settle();
    net.stop("a");
    net.beats(60);
    net
}

#[test]
fn without_the_first_the_other_of_two_stops_until_it_is_buried() {
    let mut net = without_the_first();
    assert_eq!(net.submit("b", b"x"), Err(NotTaken::Stopped));
    let now = net.now;
    net.order("b").bury(&life("a", 1), now);
    net.beats(60);
    assert_eq!(net.members("b"), ["b1"]);
    assert_eq!(net.submit("b", b"y"), Ok(2));
    net.settle();
    assert_eq!(net.agree("b"), ["b1", "b2"]);
    // Or until it is back: as one that has lost all.
    let mut net = without_the_first();
    net.start("a", "ab");
    net.beats(60);
    assert_eq!(net.members("a"), ["b1", "a2"]);
    assert_eq!(net.hosts["b"].stopped.len(), 1);
    net.submit("b", b"y").unwrap();
    net.settle();
    assert_eq!((net.agree("b").len(), net.agree("a").len()), (2, 1));
}

#[test]
fn where_all_have_lost_everything_the_order_goes_on_beyond_it() {
    let mut net = Net::new("abc");
    net.beats(3);
    net.submit("b", b"x").unwrap();
    net.settle();
    ["a", "b", "c"].iter().for_each(|node| net.stop(node));
    net.start("b", "abc");
    net.start("c", "abc");
    net.beats(60);
    let (sequence, view, joined, _) = net.hosts["c"].views[0].clone();
    assert_eq!((names(&view.members), joined.len()), (vec!["b2".to_string(), "c2".into()], 2));
    assert!(sequence > 1 << 40);
    net.submit("c", b"y").unwrap();
    net.settle();
    assert_eq!(net.agree("bc"), ["c1"]);
}

#[test]
fn who_leaves_does_so_behind_what_it_submitted() {
    for leaver in ["a", "b", "c"] {
        let mut net = Net::new("abc");
        net.beats(3);
        net.submit(leaver, b"last").unwrap();
        let now = net.now;
        net.order(leaver).leave(now);
        net.beats(60);
        let host = &net.hosts[leaver];
        assert_eq!(
            (host.order.is_over(), &host.stopped[..]),
            (true, &["this node has left".to_string()][..])
        );
        let rest: String = "abc".chars().filter(|&node| node.to_string() != leaver).collect();
        assert_eq!(net.agree(&rest), [format!("{leaver}1")]);
        assert_eq!(net.members(&rest[..1]).len(), 2);
        // The others go on, and so down to the last.
        for node in rest.chars().map(|node| node.to_string()) {
            let now = net.now;
            net.order(&node).leave(now);
            net.beats(60);
            assert_eq!(net.hosts[&node].stopped, ["this node has left"]);
        }
    }
}

#[test]
fn a_window_is_full_and_has_room_again() {
    let mut net = Net::new("ab");
    net.beats(3);
    for node in ["a", "b"] {
        assert_eq!(net.submit(node, &vec![0; PAYLOAD_BYTES + 1]), Err(NotTaken::TooLong));
        let mut taken = 0;
        while net.submit(node, &vec![1; PAYLOAD_BYTES]).is_ok() {
            taken += 1;
        }
        assert_eq!(taken, WINDOW_BYTES / PAYLOAD_BYTES);
        assert_eq!(net.submit(node, &vec![1; PAYLOAD_BYTES]), Err(NotTaken::Full));
    }
    net.beats(4);
    assert_eq!(net.agree("ab").len(), 2 * (WINDOW_BYTES / PAYLOAD_BYTES));
    assert!(net.submit("a", b"x").is_ok());
}

#[test]
fn a_run_whose_number_was_there_and_one_that_forgot_do_not_take_part() {
    let mut net = Net::new("ab");
    net.beats(3);
    let founders = || vec!["a".to_string(), "b".to_string()];
    let now = net.now;
    let why = |incarnation, kept: &[u8]| {
        let settings = Settings {
            me: life("a", incarnation),
            founders: founders(),
            silent: SILENT,
            beat: BEAT,
        };
        let mut order = Order::new(settings, Some(kept), now);
        let Some(Output::Stopped { why }) = order.output() else { return String::new() };
        assert!(order.is_over() && order.due() == Duration::MAX);
        why
    };
    let kept = net.kept["a"].clone();
    assert!(why(1, &kept).contains("has had number 1 before"));
    assert!(why(2, &kept[..20]).contains("damaged"));
    assert_eq!(why(2, &kept), "");
}

#[test]
fn what_a_node_has_submitted_does_not_come_back_to_it() {
    let mut net = Net::new("abc");
    net.beats(4);
    net.sent.clear();
    net.submit("b", &[7; 10_000]).unwrap();
    net.settle();
    let sent = |from: &str, to: &str| net.sent[&(from.to_string(), to.to_string())];
    assert!(
        sent("b", "a") > 10_000 && sent("a", "c") > 10_000 && sent("a", "b") < 1000,
        "{:?}",
        net.sent
    );
    let delivered = |node: &str| net.hosts[node].delivered.last().unwrap().clone();
    assert_eq!(delivered("b").3, [7; 10_000]);
    assert_eq!([delivered("a"), delivered("c")], [delivered("b"), delivered("b")]);
}

#[test]
fn what_a_member_sends_unanswered_has_a_bound_and_all_of_it_comes() {
    let mut net = Net::new("ab");
    net.beats(4);
    net.cut.push(("b".into(), "a".into()));
    net.sent.clear();
    let mut submitted = 0;
    while net.submit("b", &[1; PAYLOAD_BYTES]).is_ok() {
        submitted += 1;
    }
    net.settle();
    assert!(net.sent[&("b".to_string(), "a".to_string())] < WINDOW_BYTES / 2);
    net.cut.clear();
    net.beats(8);
    assert_eq!(net.agree("ab").len(), submitted);
}
