//! The reader's end of streams: who waits for an answer receives it himself, and what comes with it where it is wanted.

use std::io::{self, IoSlice};
use std::net::{Shutdown, TcpStream};
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{RecvFlags, SendFlags};

use super::wire::{
    ANSWER_BYTES, Asked, GREETING, Head, Hello, WELCOME_BYTES, is_welcome, prepare, receive,
    receive_by, send, waits,
};
use crate::layout::{EXTENTS_MOST, Offer, Op, Request, SLOT_BYTES, SLOTS, answered, is_of_zeros};
use crate::locked;
use crate::wait::LOOK_AGAIN;

/// A stream that breaks, or is not to be had, is tried again so much later.
const AGAIN: Duration = Duration::from_millis(if cfg!(test) { 0 } else { 1000 });
/// All of a reader's requests go one way. For one that stands ready new ones wait so long for those that are under way, and again so much later: one of
/// these may take its time.
pub const HOLD: Duration = Duration::from_millis(20);
const HOLD_AGAIN: Duration = Duration::from_secs(1);
const CONNECT: Duration = Duration::from_millis(500);
/// Where a reader comes that waits for it.
const AT_ONCE: Duration = Duration::from_millis(if cfg!(test) { 500 } else { 50 });
/// What is received at once, beside what goes to its slot.
const INPUT_BYTES: usize = 32 << 10;

/// What a session has of streams.
pub struct Asks {
    offer: Option<Offer>,
    seat: usize,
    admitted: u64,
    state: Mutex<State>,
    woken: Condvar,
    /// The last answer of each slot that came by a stream, and what came with it, or is to be written.
    words: [AtomicU64; SLOTS],
    bytes: [Mutex<Box<[u8]>>; SLOTS],
}

struct State {
    link: Option<Arc<Link>>,
    /// The next one, for when nothing is asked any more.
    ready: Option<Arc<Link>>,
    asked: [Option<Asked>; SLOTS],
    /// Which stream has ended last, and which was tried last.
    over: u64,
    tried: u64,
    try_at: Instant,
    /// Who asks waits for the ready one until then; it is tried again later.
    hold_until: Instant,
    is_trying: bool,
    /// Somebody receives, and others wait for that.
    is_received: bool,
    waiting: usize,
}

impl State {
    fn has(&self, link: &Link) -> bool {
        self.link.as_ref().is_some_and(|now| now.number == link.number)
    }
}

struct Link {
    stream: TcpStream,
    number: u64,
    input: Mutex<Input>,
    /// What is to be sent.
    output: Mutex<Vec<Asked>>,
}

struct Input {
    bytes: Box<[u8]>,
    from: usize,
    to: usize,
    /// The answer of which bytes are to come, and how many have.
    head: Option<(Head, usize)>,
}

/// The stream has ended, by whosever fault.
pub struct Broken(u64);

/// What is to be asked by the regions, of which streams have ended up to that number.
pub struct Moved {
    pub asked: Vec<Asked>,
    pub over: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Waited {
    /// There is no stream.
    NoStream,
    /// Another thread waits for answers.
    Busy,
    /// There may be answers, or (the second) there is something beside.
    Seen {
        beside: bool,
    },
    Nothing,
}

impl Asks {
    pub fn new(offer: Option<Offer>, seat: usize, admitted: u64) -> Asks {
        let state = State {
            link: None,
            ready: None,
            asked: [None; SLOTS],
            over: 0,
            tried: 0,
            try_at: Instant::now(),
            hold_until: Instant::now(),
            is_trying: false,
            is_received: false,
            waiting: 0,
        };
        Asks {
            offer,
            seat,
            admitted,
            state: Mutex::new(state),
            woken: Condvar::new(),
            words: std::array::from_fn(|_| AtomicU64::new(0)),
            bytes: std::array::from_fn(|_| Mutex::default()),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        locked(&self.state)
    }

    /// Is it time to try to connect? Who is told so does.
    pub fn is_due(&self) -> bool {
        if self.offer.is_none() {
            return false;
        }
        let mut state = self.state();
        let has_none = state.link.is_none() && state.ready.is_none();
        let is_due = has_none && !state.is_trying && Instant::now() >= state.try_at;
        state.is_trying |= is_due;
        is_due
    }

    /// Where to connect, and what the next stream says first.
    pub fn hello(&self) -> Option<(&Offer, Hello)> {
        let offer = self.offer.as_ref()?;
        let (token, seat, admitted) = (offer.token, self.seat, self.admitted);
        let mut state = self.state();
        state.tried += 1;
        Some((offer, Hello { token, seat, admitted, stream: state.tried }))
    }

    pub fn connect(&self) {
        self.connect_within(CONNECT, GREETING);
    }

    /// For who waits meanwhile.
    pub fn connect_at_once(&self) {
        self.connect_within(AT_ONCE, AT_ONCE);
    }

    fn connect_within(&self, connect: Duration, greeting: Duration) {
        let Some((offer, hello)) = self.hello() else { return };
        let link = Link::new(offer, &hello, connect, greeting).ok();
        let mut state = self.state();
        (state.ready, state.hold_until) = (link.map(Arc::new), Instant::now() + HOLD);
        drop(state);
        self.put_off();
    }

    /// The next time is later.
    pub fn put_off(&self) {
        let mut state = self.state();
        (state.is_trying, state.try_at) = (false, Instant::now() + AGAIN);
    }

    /// May something be asked, where so many slots are free? While a stream stands ready, nothing until all that was asked by the regions is
    /// answered: so all that is asked at a time goes one way.
    pub fn is_open(&self, free: usize) -> bool {
        if self.offer.is_none() {
            return true;
        }
        let mut state = self.state();
        if state.ready.is_some() && free == SLOTS {
            state.link = state.ready.take();
        }
        if state.ready.is_none() {
            return true;
        }
        let now = Instant::now();
        if now >= state.hold_until + HOLD_AGAIN {
            state.hold_until = now + HOLD;
        }
        now >= state.hold_until
    }

    pub fn has_stream(&self) -> bool {
        self.offer.is_some() && self.state().link.is_some()
    }

    /// A slot's bytes, while its request is prepared, or is to be asked otherwise.
    pub fn bytes(&self, slot: usize) -> MutexGuard<'_, Box<[u8]>> {
        let mut bytes = locked(&self.bytes[slot]);
        if bytes.is_empty() {
            *bytes = vec![0; SLOT_BYTES].into();
        }
        bytes
    }

    /// What came to this number by a stream.
    #[inline]
    pub fn answer(&self, slot: usize, number: u64) -> Option<u64> {
        // ORDER: Acquire, pairs with Release in `conclude`: what came with it is there.
        let word = self.words[slot].load(Ordering::Acquire);
        answered(word, number).map(|_| word)
    }

    /// Asks by the stream, once that is sent. Which streams have ended, if there is none.
    pub fn ask(&self, slot: usize, number: u64, request: Request) -> Result<(), u64> {
        if self.offer.is_none() {
            return Err(0);
        }
        let mut state = self.state();
        // (What is too long for a slot has no bytes, and is refused.)
        let fits = !request.op.is_of_slot() || request.length <= SLOT_BYTES as u64;
        let Some(link) = state.link.clone().filter(|_| fits) else { return Err(state.over) };
        let asked = Asked { slot, number, request };
        state.asked[slot] = Some(asked);
        drop(state);
        locked(&link.output).push(asked);
        Ok(())
    }

    /// Sends all that was asked. Meanwhile it receives, if the server takes nothing before its answers are taken.
    pub fn send(&self) -> Result<(), Broken> {
        if self.offer.is_none() {
            return Ok(());
        }
        let Some(link) = self.state().link.clone() else { return Ok(()) };
        // (One sends at a time.)
        let mut output = locked(&link.output);
        let all = std::mem::take(&mut *output);
        self.send_all(&link, &all).map_err(|_| Broken(link.number))
    }

    fn send_all(&self, link: &Link, all: &[Asked]) -> io::Result<()> {
        let heads: Vec<_> = all.iter().map(Asked::bytes).collect();
        let payloads: Vec<_> =
            all.iter().map(|asked| (asked.payload() > 0).then(|| self.bytes(asked.slot))).collect();
        let mut parts = Vec::with_capacity(2 * all.len());
        for ((asked, head), payload) in all.iter().zip(&heads).zip(&payloads) {
            parts.push(IoSlice::new(head));
            if let Some(payload) = payload {
                parts.push(IoSlice::new(&payload[..asked.payload() as usize]));
            }
        }
        let mut parts = &mut parts[..];
        while !parts.is_empty() {
            match send(&link.stream, parts, SendFlags::DONTWAIT) {
                Ok(sent) => IoSlice::advance_slices(&mut parts, sent),
                Err(error) if waits(&error) => self.make_room(link)?,
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Until something can be sent, or was received.
    fn make_room(&self, link: &Link) -> io::Result<()> {
        let receives = !std::mem::replace(&mut self.state().is_received, true);
        let wants = if receives { PollFlags::IN | PollFlags::OUT } else { PollFlags::OUT };
        let found = look(&mut [PollFd::new(&link.stream, wants)], LOOK_AGAIN);
        if !receives {
            return found.map(drop);
        }
        let received = found.and_then(|_| self.receive(link));
        self.leave_receiving();
        received
    }

    fn leave_receiving(&self) {
        let mut state = self.state();
        state.is_received = false;
        if state.waiting > 0 {
            self.woken.notify_all();
        }
    }

    /// Waits for answers, for so long at most, unless `is_done`; or for what is to be read beside.
    pub fn wait(
        &self,
        beside: Option<BorrowedFd>,
        most: Duration,
        is_done: impl Fn() -> bool,
    ) -> Result<Waited, Broken> {
        if self.offer.is_none() {
            return Ok(Waited::NoStream);
        }
        let mut state = self.state();
        let Some(link) = state.link.clone() else { return Ok(Waited::NoStream) };
        // (Answers are there before this is seen unlocked.)
        if is_done() {
            return Ok(Waited::Seen { beside: false });
        }
        if state.is_received && beside.is_some() {
            return Ok(Waited::Busy);
        }
        if state.is_received {
            state.waiting += 1;
            let woken = self.woken.wait_timeout(state, most);
            let (mut state, timeout) = woken.unwrap_or_else(PoisonError::into_inner);
            state.waiting -= 1;
            let seen = Waited::Seen { beside: false };
            return Ok(if timeout.timed_out() { Waited::Nothing } else { seen });
        }
        state.is_received = true;
        drop(state);
        let mut looks = vec![PollFd::new(&link.stream, PollFlags::IN)];
        looks.extend(beside.map(|beside| PollFd::from_borrowed_fd(beside, PollFlags::IN)));
        let seen = look(&mut looks, most).and_then(|found| {
            let [has_come, beside] = [0, 1].map(|at: usize| {
                looks.get(at).is_some_and(|look: &PollFd| !look.revents().is_empty())
            });
            if has_come {
                self.receive(&link)?;
            }
            Ok(if found > 0 { Waited::Seen { beside } } else { Waited::Nothing })
        });
        self.leave_receiving();
        seen.map_err(|_| Broken(link.number))
    }

    /// What has come, to where it belongs: of what was asked, to each number once.
    fn receive(&self, link: &Link) -> io::Result<()> {
        let mut input = locked(&link.input);
        let Input { bytes, from, to, head } = &mut *input;
        // (What did not take all the room was all that there is.)
        let mut is_dry = false;
        loop {
            if let Some((next, done)) = head {
                if *done < next.length {
                    let mut slot = self.bytes(next.slot);
                    // (Behind its end a slot's bytes are another request's, whoever still receives here.)
                    if !self.is_current(link) {
                        return Err(io::ErrorKind::BrokenPipe.into());
                    }
                    let place = &mut slot[*done..next.length];
                    let had = place.len().min(*to - *from);
                    if had > 0 {
                        place[..had].copy_from_slice(&bytes[*from..*from + had]);
                        *from += had;
                        *done += had;
                        continue;
                    }
                    if is_dry {
                        return Ok(());
                    }
                    match receive(&link.stream, place, RecvFlags::DONTWAIT) {
                        Ok(more) => {
                            is_dry = more < place.len();
                            *done += more;
                        }
                        Err(error) if waits(&error) => return Ok(()),
                        Err(error) => return Err(error),
                    }
                    continue;
                }
                self.conclude(link, *next);
                *head = None;
            }
            if *to - *from < ANSWER_BYTES {
                if is_dry {
                    return Ok(());
                }
                bytes.copy_within(*from..*to, 0);
                (*from, *to) = (0, *to - *from);
                match receive(&link.stream, &mut bytes[*to..], RecvFlags::DONTWAIT) {
                    Ok(more) => {
                        *to += more;
                        is_dry = *to < bytes.len();
                    }
                    Err(error) if waits(&error) => return Ok(()),
                    Err(error) => return Err(error),
                }
                continue;
            }
            let next = Head::read(&bytes[*from..*to]).filter(|next| self.is_right(next));
            *head = Some((next.ok_or(io::ErrorKind::InvalidData)?, 0));
            *from += ANSWER_BYTES;
        }
    }

    /// Is it the answer to what was asked, with as many bytes as that has?
    fn is_right(&self, head: &Head) -> bool {
        let Some(Asked { number, request, .. }) = self.state().asked[head.slot] else {
            return false;
        };
        let Some(done) = answered(head.word, number) else { return false };
        let fits = head.length <= SLOT_BYTES;
        match request.op {
            _ if !fits => false,
            Op::Read if done.is_ok() && is_of_zeros(head.word) => head.length == 0,
            Op::Read if done.is_ok() => head.length as u64 == request.length,
            Op::Extents if done.is_ok() => head.length <= (1 + EXTENTS_MOST) * size_of::<u64>(),
            _ => head.length == 0,
        }
    }

    fn is_current(&self, link: &Link) -> bool {
        self.state().has(link)
    }

    fn conclude(&self, link: &Link, head: Head) {
        let mut state = self.state();
        // (Behind its end it is asked for again.)
        if state.has(link) && state.asked[head.slot].take().is_some() {
            // ORDER: Release, pairs with Acquire in `answer`.
            self.words[head.slot].store(head.word, Ordering::Release);
        }
    }

    /// The stream is left: what was asked by it, and not answered, is to be asked by the regions. Once.
    pub fn leave(&self, broken: &Broken) -> Moved {
        let mut state = self.state();
        let mut asked = Vec::new();
        if let Some(link) = state.link.take_if(|link| link.number == broken.0) {
            let _ = link.stream.shutdown(Shutdown::Both);
            state.over = link.number;
            state.try_at = Instant::now() + AGAIN;
            asked.extend(state.asked.iter_mut().filter_map(Option::take));
            self.woken.notify_all();
        }
        Moved { asked, over: state.over }
    }
}

#[cfg(test)]
impl Asks {
    pub fn offer(&self) -> Option<Offer> {
        self.offer.clone()
    }

    pub fn admitted(&self) -> u64 {
        self.admitted
    }

    pub fn is_ready(&self) -> bool {
        self.state().ready.is_some()
    }
}

/// Less than a second.
fn look(at: &mut [PollFd], most: Duration) -> io::Result<usize> {
    let most = Timespec { tv_sec: 0, tv_nsec: most.subsec_nanos().into() };
    match poll(at, Some(&most)) {
        Err(rustix::io::Errno::INTR) => Ok(0),
        found => Ok(found?),
    }
}

impl Link {
    fn new(
        offer: &Offer,
        hello: &Hello,
        connect: Duration,
        greeting: Duration,
    ) -> io::Result<Link> {
        let stream = TcpStream::connect_timeout(&offer.address, connect)?;
        prepare(&stream)?;
        // (It has room for so little.)
        send(&stream, &[IoSlice::new(&hello.bytes())], SendFlags::DONTWAIT)?;
        let mut said = [0; WELCOME_BYTES];
        receive_by(&stream, &mut said, Instant::now() + greeting)?;
        if !is_welcome(&said, offer.welcome) {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let input = Input { bytes: vec![0; INPUT_BYTES].into(), from: 0, to: 0, head: None };
        let (input, output) = (Mutex::new(input), Mutex::default());
        Ok(Link { stream, number: hello.stream, input, output })
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::TcpListener;

    use super::*;
    use crate::direct::wire;
    use crate::layout::answer;

    #[test]
    fn what_comes_behind_the_end_of_a_stream_is_in_no_slot() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let [welcome, token] = [[1, 2], [3, 4]];
        let offer = Offer { address: listener.local_addr().unwrap(), token, welcome };
        let asks = Asks::new(Some(offer), 0, 1);
        let theirs = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            stream.write_all(&wire::welcome(welcome)).unwrap();
            stream
        });
        asks.connect();
        let mut theirs = theirs.join().unwrap();
        assert!(asks.is_open(SLOTS));
        let (slot, number, length) = (3, 7, 4096);
        let request = Request { op: Op::Read, flags: 0, offset: 0, length: length as u64, over: 0 };
        asks.ask(slot, number, request).unwrap();
        let head = Head { slot, word: answer(number, Ok(())), length }.bytes();
        theirs.write_all(&[&head[..], &vec![5; length / 2]].concat()).unwrap();
        let link = asks.state().link.clone().unwrap();
        let has_half = || locked(&link.input).head.is_some_and(|(_, done)| done == length / 2);
        let began = Instant::now();
        while !has_half() {
            assert!(began.elapsed() < Duration::from_secs(60));
            let _ = asks.receive(&link);
        }
        // (What has come before the end is still there to be received.)
        theirs.write_all(&vec![6; length / 2]).unwrap();
        look(&mut [PollFd::new(&link.stream, PollFlags::IN)], LOOK_AGAIN).unwrap();
        assert_eq!(asks.leave(&Broken(link.number)).asked.len(), 1);
        asks.bytes(slot).fill(9);
        let _ = asks.receive(&link);
        assert!(asks.bytes(slot).iter().all(|byte| *byte == 9));
    }
}
