//! The server's end of streams.
//!
//! A stream's threads are leader and followers, as the server's own: who has its input receives requests and does what need not wait; for what may
//! wait for the device it gives the input to another one.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::thread::{self, Scope};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{RecvFlags, SendFlags};

use super::wire::{
    ANSWER_BYTES, Asked, GREETING, HELLO_BYTES, Head, REQUEST_BYTES, prepare, receive, receive_by,
    send, waits, welcome,
};
use crate::layout::{EXTENTS_MOST, Op, READERS, SLOT_BYTES, SLOTS};
use crate::locked;
use crate::wait::LOOK_AGAIN;

/// Those that have not said who they are: of more the oldest one makes way.
const STRANGERS: usize = READERS;
/// Where there is no descriptor for another one it is tried again so soon.
const RETRY: Duration = Duration::from_millis(100);
/// What is received at once, beside what is written.
const INPUT_BYTES: usize = 16 << 10;
/// Answers wait for each other while there is more to be done, up to so many bytes.
const OUTPUT_BYTES: usize = ANSWER_BYTES + SLOT_BYTES;
/// Larger ones do not: who asked takes them while the next is read.
const SENT_AT_ONCE: usize = 64 << 10;

/// A stream; its threads have it for as long as anything of it may be under way.
pub struct Link {
    stream: TcpStream,
    number: u64,
    is_over: AtomicBool,
}

impl Link {
    pub fn new(stream: TcpStream, number: u64) -> Link {
        Link { stream, number, is_over: AtomicBool::new(false) }
    }

    fn end(&self) {
        // ORDER: Relaxed: who goes on for a moment is waited for, by `Fence`.
        self.is_over.store(true, Ordering::Relaxed);
        let _ = self.stream.shutdown(Shutdown::Both);
    }

    pub fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Relaxed)
    }

    /// Before the first request.
    pub fn welcome(&self, by: [u64; 2]) -> io::Result<()> {
        prepare(&self.stream)?;
        send(&self.stream, &[IoSlice::new(&welcome(by))], SendFlags::empty()).map(drop)
    }
}

/// Which streams of a reader may still ask.
#[derive(Default)]
pub struct Fence {
    /// None up to this number.
    over: u64,
    last: u64,
    /// (Those before the last one, too, until nothing of them is under way.)
    links: Vec<Weak<Link>>,
}

impl Fence {
    /// Whether all that was asked for by streams up to that number is done. They are ended.
    pub fn raise(&mut self, over: u64) -> bool {
        self.over = self.over.max(over);
        let over = self.over;
        self.links.retain(|link| link.strong_count() > 0);
        let ended = self.links.iter().filter_map(Weak::upgrade).filter(|link| link.number <= over);
        ended.inspect(|link| link.end()).count() == 0
    }

    /// Lets it in, instead of those before; unless it is over, or one behind it was let in.
    pub fn admit(&mut self, link: &Arc<Link>) -> bool {
        let is_next = link.number > self.over.max(self.last);
        if is_next {
            self.links.retain(|link| link.strong_count() > 0);
            self.links.iter().filter_map(Weak::upgrade).for_each(|before| before.end());
            self.last = link.number;
            self.links.push(Arc::downgrade(link));
        }
        is_next
    }
}

/// Streams that have not said who they are, the oldest one first.
#[derive(Default)]
pub struct Pending(Mutex<VecDeque<Arc<TcpStream>>>);

impl Pending {
    fn add(&self, stream: &Arc<TcpStream>) {
        let mut pending = locked(&self.0);
        if pending.len() == STRANGERS
            && let Some(first) = pending.pop_front()
        {
            let _ = first.shutdown(Shutdown::Both);
        }
        pending.push_back(stream.clone());
    }

    fn remove(&self, stream: &Arc<TcpStream>) {
        locked(&self.0).retain(|other| !Arc::ptr_eq(other, stream));
    }
}

/// Meets all that connect, until it is over; each has a thread while it says hello, which `greeted` goes on with.
pub fn meet<'scope>(
    scope: &'scope Scope<'scope, '_>,
    listener: &TcpListener,
    pending: &'scope Pending,
    is_over: impl Fn() -> bool,
    greeted: impl Fn(TcpStream, [u8; HELLO_BYTES]) + Clone + Send + 'scope,
) {
    let most = Timespec { tv_sec: 0, tv_nsec: LOOK_AGAIN.subsec_nanos().into() };
    while !is_over() {
        let found = poll(&mut [PollFd::new(listener, PollFlags::IN)], Some(&most));
        if !found.is_ok_and(|found| found > 0) {
            continue;
        }
        let stream = match listener.accept() {
            Ok((stream, _)) => Arc::new(stream),
            Err(error) if waits(&error) => continue,
            Err(_) => {
                thread::sleep(RETRY);
                continue;
            }
        };
        pending.add(&stream);
        let (met, greeted) = (stream.clone(), greeted.clone());
        let meets = move || {
            let mut hello = [0; HELLO_BYTES];
            let until = Instant::now() + GREETING;
            let has_said = receive_by(&met, &mut hello, until).is_ok();
            pending.remove(&met);
            // (Who made way is in nobody's hands but this one's then.)
            if has_said && let Some(stream) = Arc::into_inner(met) {
                greeted(stream, hello);
            }
        };
        // (Its own hands are empty before it is looked whose it is.)
        let known = Arc::downgrade(&stream);
        drop(stream);
        if thread::Builder::new().spawn_scoped(scope, meets).is_err()
            && let Some(stream) = known.upgrade()
        {
            pending.remove(&stream);
        }
    }
    for stream in locked(&pending.0).drain(..) {
        let _ = stream.shutdown(Shutdown::Both);
    }
}

/// The stream is to be ended.
pub struct Ended;

impl From<io::Error> for Ended {
    fn from(_: io::Error) -> Ended {
        Ended
    }
}

/// Does what is asked: what is written is there, and what is read goes there. The answer's word, and how many bytes it has. `None`: it would have to
/// wait, and was not to.
pub trait Does: Fn(&Asked, &mut [u8], bool) -> Result<Option<(u64, usize)>, Ended> + Sync {}
impl<F: Fn(&Asked, &mut [u8], bool) -> Result<Option<(u64, usize)>, Ended> + Sync> Does for F {}

struct Work<D> {
    link: Arc<Link>,
    input: Mutex<Input>,
    /// Whole answers, one thread's at a time.
    output: Mutex<()>,
    threads: AtomicUsize,
    idle: AtomicUsize,
    does: D,
}

/// Serves it until it ends, by this thread and, where requests have to wait, by others.
pub fn serve<'scope>(
    scope: &'scope Scope<'scope, '_>,
    link: Arc<Link>,
    does: impl Does + Send + 'scope,
) {
    let work = Work {
        link,
        input: Mutex::new(Input { bytes: vec![0; INPUT_BYTES].into(), from: 0, to: 0 }),
        output: Mutex::new(()),
        threads: AtomicUsize::new(1),
        idle: AtomicUsize::new(0),
        does,
    };
    work_all(scope, Arc::new(work));
}

fn work_all<'scope, D: Does + Send + 'scope>(scope: &'scope Scope<'scope, '_>, work: Arc<Work<D>>) {
    let mut hands = Hands {
        payload: vec![0; SLOT_BYTES].into(),
        output: vec![0; OUTPUT_BYTES].into(),
        used: 0,
    };
    let another = || {
        // ORDER: Relaxed: counts, by which nothing else is told; a thread more or less does no harm.
        if work.idle.load(Ordering::Relaxed) > 0 {
            return;
        }
        let (spawned, others) = (work.clone(), work.threads.fetch_add(1, Ordering::Relaxed));
        let works = move || work_all(scope, spawned);
        if others > SLOTS || thread::Builder::new().spawn_scoped(scope, works).is_err() {
            work.threads.fetch_sub(1, Ordering::Relaxed);
        }
    };
    while work.once(&mut hands, another).is_ok() {}
    work.link.end();
}

/// What a thread has.
struct Hands {
    payload: Box<[u8]>,
    output: Box<[u8]>,
    used: usize,
}

impl<D: Does> Work<D> {
    /// All that need not wait, and one that may.
    fn once(&self, hands: &mut Hands, another: impl Fn()) -> Result<(), Ended> {
        let late = {
            self.idle.fetch_add(1, Ordering::Relaxed);
            let mut input = locked(&self.input);
            self.idle.fetch_sub(1, Ordering::Relaxed);
            loop {
                if input.left() < REQUEST_BYTES {
                    self.send(hands)?;
                }
                let asked = input.request(&self.link.stream, &mut hands.payload)?;
                if !self.try_one(hands, &asked, false)? {
                    break asked;
                }
                if hands.used >= SENT_AT_ONCE {
                    self.send(hands)?;
                }
            }
        };
        self.send(hands)?;
        another();
        self.try_one(hands, &late, true)?;
        self.send(hands)
    }

    /// False: it has to wait.
    fn try_one(&self, hands: &mut Hands, asked: &Asked, may_wait: bool) -> Result<bool, Ended> {
        let room = match asked.request.op {
            Op::Read => asked.request.length.min(SLOT_BYTES as u64) as usize,
            Op::Extents => (1 + EXTENTS_MOST) * size_of::<u64>(),
            _ => 0,
        };
        if hands.used + ANSWER_BYTES + room > hands.output.len() {
            self.send(hands)?;
        }
        let (head, rest) = hands.output[hands.used..].split_at_mut(ANSWER_BYTES);
        let bytes = match asked.payload() as usize {
            0 => &mut rest[..room],
            written => &mut hands.payload[..written],
        };
        let Some((word, length)) = (self.does)(asked, bytes, may_wait)? else { return Ok(false) };
        head.copy_from_slice(&Head { slot: asked.slot, word, length }.bytes());
        hands.used += ANSWER_BYTES + length;
        Ok(true)
    }

    fn send(&self, hands: &mut Hands) -> Result<(), Ended> {
        let mut bytes = &hands.output[..std::mem::take(&mut hands.used)];
        let _whole = (!bytes.is_empty()).then(|| locked(&self.output));
        while !bytes.is_empty() {
            let sent = send(&self.link.stream, &[IoSlice::new(bytes)], SendFlags::empty())?;
            bytes = &bytes[sent..];
        }
        Ok(())
    }
}

struct Input {
    bytes: Box<[u8]>,
    from: usize,
    to: usize,
}

impl Input {
    fn left(&self) -> usize {
        self.to - self.from
    }

    /// The next one, and what it writes.
    fn request(&mut self, stream: &TcpStream, payload: &mut [u8]) -> Result<Asked, Ended> {
        while self.left() < REQUEST_BYTES {
            self.bytes.copy_within(self.from..self.to, 0);
            (self.from, self.to) = (0, self.left());
            self.to += receive(stream, &mut self.bytes[self.to..], RecvFlags::empty())?;
        }
        let asked = Asked::read(&self.bytes[self.from..self.to]).ok_or(Ended)?;
        self.from += REQUEST_BYTES;
        let length = usize::try_from(asked.payload()).unwrap_or(usize::MAX);
        let payload = payload.get_mut(..length).ok_or(Ended)?;
        let had = length.min(self.left());
        payload[..had].copy_from_slice(&self.bytes[self.from..self.from + had]);
        self.from += had;
        let mut done = had;
        while done < length {
            done += receive(stream, &mut payload[done..], RecvFlags::WAITALL)?;
        }
        Ok(asked)
    }
}
