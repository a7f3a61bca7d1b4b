//! Two nodes in one process: what is passed comes in order or the session ends, and nobody keeps more than the limit for who does not read.

use std::net::{SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use ringlet_node::cluster::members::{Member, Settings};
use ringlet_node::cluster::{
    Cluster, Events, NotPassed, PASS_BYTES, Peer, Running, Token, Word, identity,
};

const TERMS: identity::Terms = identity::Terms { days: 1, subnets: &[] };
/// Only against hanging.
const PATIENCE: Duration = Duration::from_secs(60);

enum Event {
    Joined(Peer, bool),
    Ended(Peer),
    Passed(Vec<u8>),
}

struct Told {
    to: Sender<Event>,
    /// Taking a message waits until something comes here.
    gate: Option<Receiver<()>>,
}

impl Events for Told {
    fn joined(&mut self, peer: &Peer, restarted: bool) {
        let _ = self.to.send(Event::Joined(peer.clone(), restarted));
    }
    fn ended(&mut self, peer: &Peer) {
        let _ = self.to.send(Event::Ended(peer.clone()));
    }
    fn said(&mut self, _: &Peer, _: Word) {}
    fn passed(&mut self, _: &Peer, message: &[u8]) {
        if let Some(gate) = &self.gate {
            let _ = gate.recv_timeout(PATIENCE);
        }
        let _ = self.to.send(Event::Passed(message.to_vec()));
    }
    fn called(&mut self, _: Token, _: Option<OwnedFd>) {}
}

fn free_port() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap()
}

fn start(
    place: &Path,
    [(node, listen), other]: [(&str, SocketAddr); 2],
    gate: Option<Receiver<()>>,
) -> (Cluster, Receiver<Event>) {
    let member = Member { name: other.0.into(), address: other.1.into(), subnets: Vec::new() };
    let settings = Settings {
        node: node.into(),
        listen,
        directory: place.join(node),
        rails: Vec::new(),
        nodes: vec![member],
        join: None,
        banned: Vec::new(),
        reflect: None,
    };
    let (to, events) = channel();
    let running = Running::prepare(settings).unwrap();
    (running.start(Box::new(Told { to, gate }), true).unwrap(), events)
}

fn joined(events: &Receiver<Event>) -> Peer {
    match events.recv_timeout(PATIENCE).unwrap() {
        Event::Joined(peer, false) => peer,
        _ => panic!("something else"),
    }
}

#[test]
fn what_is_passed_comes_in_order_and_a_session_that_ended_takes_nothing() {
    let place = std::env::temp_dir().join(format!("ringlet-cluster-{}", std::process::id()));
    std::fs::create_dir(&place).unwrap();
    identity::found(&place.join("a"), "a", &TERMS).unwrap();
    for name in ["b", "c"] {
        let bundle = identity::issue(&place.join("a"), name, &TERMS).unwrap();
        assert_eq!(identity::join(&place.join(name), &bundle).unwrap(), name);
    }
    assert!(identity::found(&place.join("b"), "b", &TERMS).is_err(), "it is of a cluster");
    assert!(
        identity::issue(&place.join("b"), "d", &TERMS).is_err(),
        "it has not the authority's key"
    );
    identity::found(&place.join("foreign"), "foreign", &TERMS).unwrap();
    let foreign = identity::issue(&place.join("foreign"), "b", &TERMS).unwrap();
    assert!(identity::join(&place.join("b"), &foreign).is_err(), "another cluster's");
    assert!(identity::join(&place.join("b"), &foreign[..foreign.len() / 2]).is_err());

    let (one, two) = (("a", free_port()), ("b", free_port()));
    let (open, gate) = channel();
    let (a, at_a) = start(&place, [one, two], None);
    let (_b, at_b) = start(&place, [two, one], Some(gate));
    let (to_b, to_a) = (joined(&at_a), joined(&at_b));
    assert_eq!((to_b.node(), to_a.node()), ("b", "a"));
    assert_eq!(to_b.session, to_a.session, "both call it the same");
    assert!(a.peer("b").is_some() && a.peer("c").is_none());

    assert_eq!(to_b.pass(&vec![0; PASS_BYTES + 1]), Err(NotPassed::TooLong));
    // b's thread stands at the gate with the first one: what it does not take waits here and in the kernel, and then no more does.
    let message = |number: u32| {
        let mut message = vec![number as u8; PASS_BYTES];
        message[..4].copy_from_slice(&number.to_le_bytes());
        message
    };
    let mut sent = 0;
    let until = Instant::now() + PATIENCE;
    let mut full = 0;
    while full < 20 {
        assert!(
            Instant::now() < until && sent < 4096,
            "{sent} messages wait for who does not read"
        );
        match to_b.pass(&message(sent)) {
            Ok(()) => (sent, full) = (sent + 1, 0),
            Err(NotPassed::Full) => {
                full += 1;
                std::thread::sleep(Duration::from_millis(10));
            }
            Err(other) => panic!("{other:?}"),
        }
    }
    assert!(sent > 16, "no more than {sent} were taken");
    drop(open);
    for number in 0..sent {
        match at_b.recv_timeout(PATIENCE).unwrap() {
            Event::Passed(came) => assert!(came == message(number), "message {number}"),
            _ => panic!("the session ended at message {number}"),
        }
    }
    to_a.pass(b"").unwrap();
    assert!(matches!(at_a.recv_timeout(PATIENCE).unwrap(), Event::Passed(came) if came.is_empty()));

    // Another run of b takes its place: the session of the first one is over, at both.
    let again = ("b", free_port());
    let (_b, at_new) = start(&place, [again, one], None);
    assert!(
        at_new.try_recv().is_err(),
        "nobody dials it: a has the lower name, and knows the other address"
    );
    let (_c, at_c) = start(&place, [("a", free_port()), two], None);
    // (The newer a, started with a's key, has a greater incarnation: b's session with the old one ends.)
    let to_b_again = joined(&at_c);
    assert_ne!(to_b_again.session, to_b.session);
    for (events, peer) in [(&at_a, &to_b), (&at_b, &to_a)] {
        match events.recv_timeout(PATIENCE).unwrap() {
            Event::Ended(ended) => assert_eq!(ended.session, peer.session),
            _ => panic!("it did not end"),
        }
        assert_eq!(peer.pass(b"late"), Err(NotPassed::Over));
    }
    assert!(matches!(at_b.recv_timeout(PATIENCE).unwrap(), Event::Joined(_, true)), "restarted");
    std::fs::remove_dir_all(&place).unwrap();
}
