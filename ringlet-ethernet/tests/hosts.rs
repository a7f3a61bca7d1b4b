//! Two networks of one name, as two hosts have them, which reach each other by UDP over the loopback device: what a port of one sends comes to
//! those of the other, once, in order and whole; while either end comes and goes.

use std::net::UdpSocket;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use ringlet_ethernet::device::End;
use ringlet_ethernet::frame::{HEAD_BYTES, HEADER_BYTES, MESSAGE_MOST};
use ringlet_ethernet::port::{Event, Options, Port, Queue};
use ringlet_ethernet::room::{Room, Rules};
use ringlet_ethernet::span::{self, Settings};
use ringlet_ethernet::{Mac, Policy};

/// Only a fault meets it.
const LIMIT: Duration = Duration::from_secs(60);
const BROADCAST: Mac = Mac([0xff; 6]);

fn mac(number: u8) -> Mac {
    Mac([2, 0, 0, 0, 0, number])
}

fn message(to: Mac, from: Mac, number: u64, len: usize) -> Vec<u8> {
    let mut bytes = [&[0; HEADER_BYTES][..], &to.0, &from.0, &[0x88, 0xb5]].concat();
    bytes.extend(number.to_le_bytes());
    bytes.extend((bytes.len()..len).map(|at| (at as u64 * 31 + number) as u8));
    bytes
}

fn until(what: &str, mut is: impl FnMut() -> bool) {
    let began = Instant::now();
    while !is() {
        assert!(began.elapsed() < LIMIT, "waited too long for {what}");
        thread::sleep(Duration::from_millis(1));
    }
}

struct Site {
    room: Room,
    _port: Port,
    queue: Queue,
    others: Arc<AtomicU64>,
}

impl Site {
    fn new(folder: &Path, number: u8) -> Site {
        let base = folder.join(number.to_string());
        let rules = Rules { addresses: Policy::Locked, storm: 0, bridge: false };
        Room::create(&base, "net", rules, None).unwrap();
        let room = Room::open(&base, "net").unwrap();
        let others = Arc::new(AtomicU64::new(0));
        let seen = Arc::clone(&others);
        let options =
            Options { name: "port".into(), mac: mac(number), queues: 1, ring_bytes: 2 << 20 };
        let (port, queues) = Port::open(room.clone(), options, move |event| {
            if let Event::Ports(count) = event {
                seen.store(count as u64, Ordering::SeqCst);
            }
        })
        .unwrap();
        Site { room, _port: port, queue: queues.into_iter().next().unwrap(), others }
    }

    fn meets(&self, count: u64) {
        until("others", || self.others.load(Ordering::SeqCst) == count);
    }

    fn hears(&mut self, count: usize) -> Vec<Vec<u8>> {
        let (queue, mut came) = (&mut self.queue, Vec::new());
        until("frames", || {
            queue.begin();
            queue.receive(64, |arrived| {
                let mut bytes = vec![0; arrived.len];
                arrived.copy_to(&mut bytes);
                came.push(bytes);
                Ok(())
            });
            came.len() >= count
        });
        came
    }

    fn spans(&self, own: u16, peer: u16, by: &str) -> (Sender<End>, JoinHandle<()>) {
        let host = format!("{by}:{peer}").parse().unwrap();
        let listen = Some(format!("{by}:{own}").parse().unwrap());
        let settings = Settings { hosts: vec![host], listen, watch_us: 50 };
        let (room, ends, (is_up, up)) = (self.room.clone(), channel(), channel());
        let end = ends.0.clone();
        let run = move || {
            span::up(&settings, room, ends, move || is_up.send(()).unwrap(), |_| ()).unwrap();
        };
        let thread = thread::spawn(run);
        up.recv_timeout(LIMIT).unwrap();
        (end, thread)
    }
}

fn end((end, thread): (Sender<End>, JoinHandle<()>)) {
    end.send(End::Asked).unwrap();
    thread.join().unwrap();
}

fn free_port(by: &str) -> u16 {
    UdpSocket::bind(format!("{by}:0")).unwrap().local_addr().unwrap().port()
}

#[test]
fn frames_come_whole_once_and_in_order() {
    for by in ["127.0.0.1", "[::1]"] {
        if by == "[::1]" && UdpSocket::bind("[::1]:0").is_err() {
            continue;
        }
        let folder = tempfile::tempdir().unwrap();
        let mut sites = [1, 2].map(|number| Site::new(folder.path(), number));
        let ports = [free_port(by), free_port(by)];
        let mut spans = [0, 1].map(|at| Some(sites[at].spans(ports[at], ports[1 - at], by)));
        for (round, len) in [HEAD_BYTES + 8, 1500, 9000, MESSAGE_MOST].into_iter().enumerate() {
            sites.iter().for_each(|site| site.meets(1));
            // (No more at a time than sockets take, however late they are read.)
            let at_once = (MESSAGE_MOST / len).clamp(1, 8) as u64;
            for (from, to) in [(0, 1), (1, 0)] {
                for first in (0..64).step_by(at_once as usize) {
                    for number in first..first + at_once {
                        let whom = if number % 2 == 0 { BROADCAST } else { mac(to as u8 + 1) };
                        let sent = message(whom, mac(from as u8 + 1), number, len);
                        sites[from].queue.begin();
                        sites[from].queue.send(&sent);
                    }
                    let came = sites[to].hears(at_once as usize);
                    assert_eq!(came.len() as u64, at_once);
                    for (number, bytes) in (first..).zip(came) {
                        let whom = if number % 2 == 0 { BROADCAST } else { mac(to as u8 + 1) };
                        assert!(
                            bytes == message(whom, mac(from as u8 + 1), number, len),
                            "{number}"
                        );
                    }
                }
            }
            // Either ends in order, and the other's port goes at once; it is back with the next.
            let at = round % 2;
            spans[at].take().into_iter().for_each(end);
            sites.iter().for_each(|site| site.meets(0));
            spans[at] = Some(sites[at].spans(ports[at], ports[1 - at], by));
        }
        spans.into_iter().flatten().for_each(end);
        for site in &sites {
            site.meets(0);
            assert!(site.room.span().unwrap().is_none());
        }
    }
}
