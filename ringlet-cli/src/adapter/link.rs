//! The links that are served, and what each has of its two ends.

use std::os::fd::BorrowedFd;
use std::task::Poll;

use ringlet::interconnect::introduction::{JOIN, LINK, LINKED, Message};
use ringlet_adapter::{Adapter, Bells, Link, Memory, Wakes};
use ringlet_core::layout::Geometry;
use ringlet_core::memory::Area;
use ringlet_core::sync::AtomicU64;
use ringlet_core::wait;
use ringlet_linux::meet::Fds;
use ringlet_linux::sys::{self, Sys};
use ringlet_linux::{fd, map, tcp};

use super::borrowed;

const LINKS_MOST: usize = 16 << 10;
/// Descriptors that each link costs beside its ends' lifelines: of two segments, connections and bells, and what rings it.
const LINK_DESCRIPTORS: usize = 7;
const PAGE_BYTES: usize = 4096;
/// Contexts in a page of flags (`ringlet::socket::context`).
const FLAG_APART_BYTES: usize = 128;
const CONTEXT_COUNT: u32 = (PAGE_BYTES / FLAG_APART_BYTES) as u32;

/// Which end of which link.
#[derive(Clone, Copy)]
pub struct Place {
    pub at: usize,
    pub end: usize,
}

/// A program's doorbell.
struct Bell {
    eventfd: i32,
    page: Area,
    line: usize,
    rung: u64,
    /// Its holder has us wait for it: it is rung no more.
    waits: bool,
}

impl Bell {
    /// Takes both descriptors. `None` if they are not what they should be.
    fn new(eventfd: i32, page_memfd: i32, context: u32) -> Option<Bell> {
        let sane = (1..=CONTEXT_COUNT).contains(&context)
            && fd::is_eventfd(eventfd)
            && fd::is_nonblocking(eventfd)
            && map::sealed_size(page_memfd) == Ok(PAGE_BYTES);
        let page = sane.then(|| map::map_shared(page_memfd, PAGE_BYTES, false).ok()).flatten();
        sys::close(page_memfd);
        let Some(page) = page else {
            sys::close(eventfd);
            return None;
        };
        let line = (context as usize - 1) * FLAG_APART_BYTES;
        Some(Bell { eventfd, page, line, rung: 0, waits: false })
    }

    fn ring(&mut self) {
        self.waits = self.waits || !fd::ring(self.eventfd);
    }

    fn ring_if_armed(&mut self) {
        if let Some(value) = wait::armed(self.page.at::<AtomicU64>(self.line), self.rung) {
            self.rung = value;
            self.ring();
        }
    }
}

impl Drop for Bell {
    #[allow(unsafe_code)]
    fn drop(&mut self) {
        sys::close(self.eventfd);
        // SAFETY: this bell alone has the mapping.
        unsafe { map::unmap(self.page) };
    }
}

/// What is held of one end. (0 connects, 1 accepts.)
struct End {
    memory: Memory,
    /// Its connection, from when its program has come until it has parted; and its bell.
    socket: Option<i32>,
    bell: Option<Bell>,
    /// Its last process is gone.
    gone: bool,
}

impl End {
    fn make(geometry: Geometry) -> Option<End> {
        Some(End { memory: Memory::make(geometry)?, socket: None, bell: None, gone: false })
    }

    fn let_go(&mut self) {
        let Some(socket) = self.socket.take() else { return };
        // KERNEL: who closes last waits, if the program had it so (SO_LINGER); a program that is killed does not.
        if self.gone && matches!(tcp::linger(socket), Ok([1, seconds]) if seconds > 0) {
            tcp::set_linger(socket, [0, 0]);
        }
        sys::close(socket);
    }
}

impl Drop for End {
    fn drop(&mut self) {
        self.let_go();
    }
}

pub struct Ends {
    ends: [End; 2],
    eventfd: i32,
    ticket: [u64; 2],
    ring_bytes: u64,
    number: u64,
    joined: [bool; 2],
}

impl Bells for Ends {
    fn published(&mut self, end: usize) {
        if let Some(bell) = &mut self.ends[end].bell {
            bell.ring_if_armed();
        }
    }

    fn event(&mut self, end: usize) {
        if let Some(bell) = &mut self.ends[end].bell {
            bell.ring();
        }
    }

    fn byte(&mut self, to: usize) -> Poll<bool> {
        Poll::Ready(self.ends[1 - to].socket.is_some_and(tcp::ring_byte))
    }

    fn part(&mut self, end: usize) -> Poll<()> {
        self.ends[end].let_go();
        Poll::Ready(())
    }
}

impl Wakes for Ends {
    fn eventfd(&self) -> BorrowedFd<'_> {
        borrowed(self.eventfd)
    }
}

impl Drop for Ends {
    fn drop(&mut self) {
        sys::close(self.eventfd);
    }
}

pub struct Links {
    seed: u64,
    /// The flags of the adapter's contexts: it sleeps by the wishes in the segments, so none is ever armed.
    page_memfd: i32,
    process: u64,
    /// Where links are, and for which tickets ends are still to come.
    awaited: Vec<usize>,
    count: u64,
    now: usize,
    most: usize,
}

impl Links {
    /// With no more than so many descriptors.
    pub fn new(seed: u64, descriptors: usize) -> Sys<Links> {
        let page_memfd = map::sealed_memfd(c"ringlet-context", PAGE_BYTES, 0)?;
        map::seal_readers(page_memfd)?;
        let mut process = [0; 8];
        sys::random(&mut process);
        let process = u64::from_ne_bytes(process);
        let most = (descriptors / LINK_DESCRIPTORS).min(LINKS_MOST);
        Ok(Links { seed, page_memfd, process, awaited: Vec::new(), count: 0, now: 0, most })
    }

    /// What a program asks for: the place of its end, and what it is told, with which descriptors.
    pub fn request(
        &mut self,
        adapter: &mut Adapter<Ends>,
        message: &Message,
        fds: &mut Fds,
    ) -> Option<(Place, Message, [i32; 3])> {
        let socket = fds.take(0)?;
        let bell = match (message.context, fds.take(1), fds.take(2)) {
            (context @ 1.., Some(eventfd), Some(page)) => Bell::new(eventfd, page, context),
            _ => None,
        };
        let place = match message.kind {
            _ if !is_connection(socket) => None,
            LINK => self.make(adapter, message.ring_bytes).map(|at| Place { at, end: 1 }),
            JOIN => self.find(adapter, message).map(|at| Place { at, end: 0 }),
            _ => None,
        };
        let found = place.and_then(|place| Some((place, adapter.bells(place.at)?)));
        let Some((place, ends)) = found else {
            sys::close(socket);
            return None;
        };
        let end = &mut ends.ends[place.end];
        (end.socket, end.bell) = (Some(socket), bell);
        ends.joined[place.end] = true;
        let linked = Message {
            kind: LINKED,
            ring_bytes: ends.ring_bytes,
            ticket: if place.end == 1 { ends.ticket } else { [0; 2] },
            // Each link has a bell of its own.
            process: self.process.wrapping_add(ends.number),
            context: 1,
        };
        Some((place, linked, [end.memory.memfd, ends.eventfd, self.page_memfd]))
    }

    fn make(&mut self, adapter: &mut Adapter<Ends>, ring_bytes: u64) -> Option<usize> {
        let geometry = Geometry::new(usize::try_from(ring_bytes).ok()?)?;
        let mut random = [0; 16];
        if self.now >= self.most || !sys::random(&mut random) {
            return None;
        }
        let half = |at: usize| u64::from_ne_bytes(std::array::from_fn(|i| random[at + i]));
        let ends = [End::make(geometry)?, End::make(geometry)?];
        let segments = [0, 1].map(|end: usize| ends[end].memory.segment());
        self.count += 1;
        // Each link draws otherwise, and alike when all is run again in the same order.
        let seed = (self.seed != 0)
            .then(|| self.seed.wrapping_add(self.count.wrapping_mul(0x9e37_79b9_7f4a_7c15)));
        let ends = Ends {
            ends,
            eventfd: fd::eventfd().ok()?,
            ticket: [half(0), half(8)],
            ring_bytes,
            number: self.count,
            joined: [false; 2],
        };
        let at = adapter.add(Link::new(seed, segments), ends).ok()?;
        self.awaited.push(at);
        self.now += 1;
        Some(at)
    }

    /// The link for which the ticket is. It is good once.
    fn find(&mut self, adapter: &mut Adapter<Ends>, message: &Message) -> Option<usize> {
        let is = |at: &usize| {
            let ends = adapter.bells(*at);
            ends.is_some_and(|ends| {
                ends.ticket == message.ticket && ends.ring_bytes == message.ring_bytes
            })
        };
        let nth = self.awaited.iter().position(is)?;
        Some(self.awaited.swap_remove(nth))
    }

    /// The last process of this end is gone.
    pub fn gone(&mut self, adapter: &mut Adapter<Ends>, place: Place) {
        if let Some(ends) = adapter.bells(place.at) {
            ends.ends[place.end].gone = true;
        }
        adapter.gone(place.at, place.end);
        // (Who has not come by then goes on with the kernel.)
        if adapter.bells(place.at).is_some_and(|ends| !ends.joined[1 - place.end]) {
            self.awaited.retain(|at| *at != place.at);
            adapter.gone(place.at, 1 - place.end);
        }
    }

    /// The link is over, or can't go on.
    pub fn end(&mut self, at: usize, adapter: &mut Adapter<Ends>) {
        self.awaited.retain(|awaited| *awaited != at);
        if adapter.remove(at).is_some() {
            self.now -= 1;
        }
    }
}

/// A descriptor that a doorbell byte may be put on.
fn is_connection(fd: i32) -> bool {
    let kind = tcp::int_option(fd, libc::SOL_SOCKET, libc::SO_TYPE);
    matches!(kind, Ok(libc::SOCK_STREAM | libc::SOCK_SEQPACKET))
}
