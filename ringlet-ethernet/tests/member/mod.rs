//! A port with a thread that notes what it hears and sends what it is told, for tests of several processes.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use ringlet_ethernet::frame::{HEAD_BYTES, HEADER_BYTES};
use ringlet_ethernet::{Filled, Mac, Options, Port, Queue, Room};

/// Only a fault meets it.
pub const LIMIT: Duration = Duration::from_secs(300);
pub const BROADCAST: Mac = Mac([0xff; 6]);

pub fn mac(number: u16) -> Mac {
    let [high, low] = number.to_be_bytes();
    Mac([2, 0, 0, 0, high, low])
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Heard {
    pub from: Mac,
    pub to: Mac,
    pub number: u64,
}

/// A header and a frame whose bytes all follow from its number.
pub fn message(to: Mac, from: Mac, number: u64) -> Vec<u8> {
    let head = [&[0; HEADER_BYTES][..], &to.0, &from.0, &[0x88, 0xb5], &number.to_le_bytes()];
    let len = 64 + number.wrapping_mul(37) as usize % 1400;
    let fill = (0..len).map(|at| (at as u64 ^ number) as u8);
    head.concat().into_iter().chain(fill).collect()
}

/// Panics at what nobody has sent.
fn read(bytes: &[u8]) -> Heard {
    let mac = |at: usize| Mac(bytes[at..at + 6].try_into().unwrap());
    let (to, from) = (mac(HEADER_BYTES), mac(HEADER_BYTES + 6));
    let number = u64::from_le_bytes(bytes[HEAD_BYTES..HEAD_BYTES + 8].try_into().unwrap());
    assert!(bytes == message(to, from, number), "{from} to {to}: half of {number}");
    Heard { from, to, number }
}

pub fn until(what: &str, mut is: impl FnMut() -> bool) {
    let began = Instant::now();
    while !is() {
        assert!(began.elapsed() < LIMIT, "waited too long for {what}");
        thread::sleep(Duration::from_millis(1));
    }
}

pub struct Member {
    pub port: Port,
    pub mac: Mac,
    orders: Sender<Vec<u8>>,
    bell: UnixStream,
    heard: Arc<Mutex<Vec<Heard>>>,
    thread: Option<JoinHandle<()>>,
}

impl Member {
    pub fn new(room: &Room, number: u16) -> Member {
        let options = Options::new(format!("port{number}"), mac(number));
        let (port, mut queues) = Port::open(room.clone(), options, |_| ()).unwrap();
        let (orders, told) = channel();
        let (bell, rings) = UnixStream::pair().unwrap();
        rings.set_nonblocking(true).unwrap();
        let heard = Arc::new(Mutex::new(Vec::new()));
        let (queue, notes) = (queues.remove(0), Arc::clone(&heard));
        let hear = move |bytes: Vec<u8>| notes.lock().unwrap().push(read(&bytes));
        let thread = Some(thread::spawn(move || serve(queue, &told, &rings, hear)));
        Member { port, mac: mac(number), orders, bell, heard, thread }
    }

    pub fn send(&self, to: Mac, from: Mac, number: u64) {
        self.orders.send(message(to, from, number)).unwrap();
        (&self.bell).write_all(&[0]).unwrap();
    }

    pub fn heard(&self) -> MutexGuard<'_, Vec<Heard>> {
        self.heard.lock().unwrap()
    }

    pub fn meets(&self, others: usize) {
        until("others", || self.port.others() == others);
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        self.port.end();
        let ended = self.thread.take().unwrap().join();
        assert!(ended.is_ok() || thread::panicking(), "a queue's thread has panicked");
    }
}

/// A queue's thread, until its port is over: sends what it is told, for which the bell rings, and gives away what it hears.
pub fn serve(
    mut queue: Queue,
    told: &Receiver<Vec<u8>>,
    bell: &UnixStream,
    mut hear: impl FnMut(Vec<u8>),
) {
    queue.watch_outside(bell).unwrap();
    let mut waiting: Option<Vec<u8>> = None;
    while !queue.is_over() {
        queue.begin();
        let received = queue.receive(64, |arrived| {
            let mut bytes = vec![0; arrived.len];
            assert_eq!(arrived.copy_to(&mut bytes), arrived.len);
            hear(bytes);
            Ok(())
        });
        // (Before the orders are looked at: what comes behind that rings again.)
        while (&*bell).read(&mut [0; 64]).is_ok_and(|got| got > 0) {}
        waiting = waiting.or_else(|| told.try_recv().ok());
        if let Some(bytes) = &waiting {
            let filled = queue.fill(|to, most| {
                assert!(bytes.len() <= most);
                // SAFETY: room for so many bytes, by the contract of `fill`.
                unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
                bytes.len()
            });
            let waits = match filled {
                Filled::NotAlone => !queue.offer(bytes),
                filled => filled == Filled::Full,
            };
            if !waits {
                waiting = None;
                continue;
            }
        }
        if !received {
            queue.wait(0, || false).unwrap();
        }
    }
}
