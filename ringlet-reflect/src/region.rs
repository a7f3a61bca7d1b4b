//! A region as a process has it: to transmit to, to receive, and to be told of what was written.

use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use ringlet_core::sync::{AtomicU64, Ordering, fence};
use ringlet_linux::{fd, futex};

use crate::PAGE_BYTES;
use crate::host::Membership;
use crate::memory::{self, Mapping};
use crate::protocol::{Ask, Made};
use crate::registry::{Direction, Use};
use crate::status::Status;
use crate::trap::Opened;

/// Who sleeps looks again so often, whatever others do.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// An allocated region. Dropped, with what was attached by it, it is given back; the memory goes with its last user on the host.
pub struct Region(Arc<Allocated>);

struct Allocated {
    host: Arc<Membership>,
    id: u32,
    key: u64,
    bytes: usize,
    made: Made,
}

impl Drop for Allocated {
    fn drop(&mut self) {
        // (A keeper that has gone has given it back.)
        let _ = self.host.ask(&Ask::Deallocate { id: self.id });
    }
}

/// Dropped, it is detached, whatever became of its memory.
struct Attachment {
    of: Arc<Allocated>,
    direction: Direction,
}

impl Attachment {
    fn new(
        of: &Arc<Allocated>,
        direction: Direction,
        how: Use,
        only: Option<&str>,
    ) -> Result<(Attachment, Vec<OwnedFd>), Status> {
        let ask = Ask::Attach { id: of.id, direction, how, only: only.map(str::to_owned) };
        let answered = of.host.ask(&ask)?;
        // (From here on it is detached whatever happens.)
        let attachment = Attachment { of: of.clone(), direction };
        let (bytes, fds) = of.host.await_contents(of.id, direction, answered)?;
        if bytes as usize == of.bytes { Ok((attachment, fds)) } else { Err(Status::BadSize) }
    }
}

impl Drop for Attachment {
    fn drop(&mut self) {
        let _ = self.of.host.ask(&Ask::Detach { id: self.of.id, direction: self.direction });
    }
}

impl Region {
    pub(crate) fn new(
        host: Arc<Membership>,
        id: u32,
        key: u64,
        bytes: usize,
        made: Made,
    ) -> Region {
        Region(Arc::new(Allocated { host, id, key, bytes, made }))
    }

    pub fn key(&self) -> u64 {
        self.0.key
    }

    /// Its number on this host.
    pub fn id(&self) -> u32 {
        self.0.id
    }

    /// Who has made it, and how: not always as this process asked for.
    pub fn made(&self) -> Made {
        self.0.made
    }

    /// In bytes, of whole pages.
    pub fn len(&self) -> usize {
        self.0.bytes
    }

    pub fn is_empty(&self) -> bool {
        false
    }

    fn words(&self) -> usize {
        memory::words_bytes(self.0.bytes / PAGE_BYTES)
    }

    /// Attaches it to be written.
    ///
    /// In a cluster a coherent region's contents may be on their way to this host: who can't do without waits for them, however long that takes, and
    /// nothing else of the process does. [`Status::Timeout`]: none has come for half a minute. [`Status::Incomplete`]: nobody has all of them any more.
    /// [`Status::Denied`]: it may not be. [`Status::TransmitAttached`]: it is. [`Status::Shared`], [`Status::NonShared`], [`Status::OtherLoopback`]: who has
    /// attached it first on this host said otherwise.
    pub fn transmit(&self, how: Use) -> Result<Transmitter, Status> {
        self.transmit_by(how, None, memory::map)
    }

    /// The same where no page is held before its first use, as memory of the program's own is: what there is no memory for by then ends somebody.
    pub fn transmit_sparse(&self, how: Use) -> Result<Transmitter, Status> {
        self.transmit_by(how, None, memory::map_sparse)
    }

    /// Attaches it to be written, for one other host of the cluster: nobody else receives that. [`Status::BadHost`]: there is no such host;
    /// [`Status::ToItself`]: it is this one. Otherwise as [`Region::transmit`].
    pub fn transmit_to(&self, host: &str, shared: bool) -> Result<Transmitter, Status> {
        self.transmit_by(Use { shared, loopback: false }, Some(host), memory::map)
    }

    fn transmit_by(
        &self,
        how: Use,
        only: Option<&str>,
        map: impl Fn(&OwnedFd, usize, bool) -> Result<Mapping, Status>,
    ) -> Result<Transmitter, Status> {
        let (attachment, fds) = Attachment::new(&self.0, Direction::Transmit, how, only)?;
        let way = match (&fds[..], &self.0.host.logged) {
            (_, Some(_)) => Way::Logged(Opened::new(self.0.bytes, &self.0.host, self.0.id)?),
            ([data, changes, wishes], None) => Way::Mapped(Mapped {
                data: map(data, self.0.bytes, true)?,
                changes: memory::map(changes, self.words(), true)?,
                wishes: memory::map(wishes, self.words(), false)?,
                has_barriers: self.0.host.has_barriers,
            }),
            _ => return Err(Status::NoMemory),
        };
        Ok(Transmitter { way, attachment })
    }

    /// Attaches it to be read. [`Status::ReceiveFull`]: this host receives as much as it may already; otherwise as [`Region::transmit`].
    pub fn receive(&self, how: Use) -> Result<Receiver, Status> {
        let (attachment, fds) = Attachment::new(&self.0, Direction::Receive, how, None)?;
        let [data, changes] = &fds[..] else { return Err(Status::NoMemory) };
        Ok(Receiver {
            received: Arc::new(Received {
                data: memory::map(data, self.0.bytes, false)?,
                changes: Arc::new(memory::map(changes, self.words(), false)?),
                attachment,
            }),
        })
    }
}

/// A region to write to. What is read back here proves nothing: read what is received. (In a cluster it can't be read.)
pub struct Transmitter {
    way: Way,
    attachment: Attachment,
}

enum Way {
    /// On one host: a store is one into what is received.
    Mapped(Mapped),
    /// In a cluster what is written goes by the log; where the region is there is nothing, and stores are trapped.
    Logged(Opened),
}

struct Mapped {
    data: Mapping,
    changes: Mapping,
    wishes: Mapping,
    has_barriers: bool,
}

/// The words of a mapping.
#[inline]
fn words<'a>(base: *const u8, bytes: usize) -> &'a [AtomicU64] {
    // SAFETY: whole pages of a mapping that lives as long as the borrow, which is that of its owner (callers); every bit pattern is an `AtomicU64`, and what
    // other processes do to it is to us as a device's writes. (Of one that may only be read no store is made: `Receiver::words`.)
    #[allow(unsafe_code)]
    unsafe {
        std::slice::from_raw_parts(base.cast(), bytes / size_of::<u64>())
    }
}

#[inline]
fn pages(at: usize, length: usize, of: usize) -> Result<Range<usize>, Status> {
    let end = at.checked_add(length).filter(|end| *end <= of);
    let end = end.ok_or(Status::BadParameter)?;
    Ok(at / PAGE_BYTES..end.div_ceil(PAGE_BYTES))
}

impl Transmitter {
    #[inline]
    pub fn len(&self) -> usize {
        match &self.way {
            Way::Mapped(mapped) => mapped.data.area().len(),
            Way::Logged(opened) => opened.window().len(),
        }
    }

    pub fn is_empty(&self) -> bool {
        false
    }

    /// The region, to store to. A store that is to be seen behind others is `Release`; who receives loads with `Acquire`.
    #[inline]
    pub fn words(&self) -> &[AtomicU64] {
        words(self.base(), self.len())
    }

    /// Where it is mapped, for stores of other kinds: volatile, and never a reference, since others write there too.
    #[inline]
    pub fn base(&self) -> *mut u8 {
        match &self.way {
            Way::Mapped(mapped) => mapped.data.area().base(),
            Way::Logged(opened) => opened.window().base(),
        }
    }

    /// Stores bytes, of any length and alignment, from byte `at` on. Aligned words of 8 bytes come whole.
    ///
    /// In a cluster it waits for room where much is under way. [`Status::Stopped`]: this host can't reach enough of the others; [`Status::NotInitialised`]:
    /// its keeper has gone.
    #[inline]
    pub fn put(&self, at: usize, bytes: &[u8]) -> Result<(), Status> {
        pages(at, bytes.len(), self.len())?;
        match &self.way {
            Way::Mapped(mapped) => {
                // SAFETY: looked at by `pages`; the program's bytes are in no mapping of ours that it may write (of what is received it has atomics only).
                #[allow(unsafe_code)]
                unsafe {
                    copy(bytes.as_ptr(), mapped.data.area().base().add(at), bytes.len());
                }
                Ok(())
            }
            Way::Logged(_) => self.log(at, bytes),
        }
    }

    /// Has so many bytes written there by `fill`, where they will be received, or on their way there: piece by piece (from, length, where). What it
    /// can't write, by saying false, ends it: [`Status::BadAddress`]; pieces before are written.
    ///
    /// In a cluster nothing that this process writes passes a piece that is not whole: who may have to wait fills memory of its own
    /// ([`Transmitter::is_memory`]).
    pub fn fill(
        &self,
        at: usize,
        length: usize,
        mut fill: impl FnMut(usize, usize, *mut u8) -> bool,
    ) -> Result<(), Status> {
        pages(at, length, self.len())?;
        match &self.way {
            Way::Mapped(mapped) => {
                // SAFETY: looked at by `pages`.
                #[allow(unsafe_code)]
                let to = unsafe { mapped.data.area().base().add(at) };
                let is_filled = fill(0, length, to);
                // ORDER: Release, pairs with Acquire in `get`: as in `copy`.
                fence(Ordering::Release);
                if is_filled { Ok(()) } else { Err(Status::BadAddress) }
            }
            Way::Logged(_) => {
                let of = &self.attachment.of;
                of.host.lives()?;
                let logged = of.host.logged.as_ref().ok_or(Status::NotInitialised)?;
                logged.put_by(of.id, at, length, fill)
            }
        }
    }

    /// What is written is in the memory that is received, at once: not in a cluster.
    pub fn is_memory(&self) -> bool {
        matches!(self.way, Way::Mapped(_))
    }

    fn log(&self, at: usize, bytes: &[u8]) -> Result<(), Status> {
        let of = &self.attachment.of;
        of.host.lives()?;
        of.host.logged.as_ref().ok_or(Status::NotInitialised)?.put(of.id, at, bytes)
    }

    /// What was stored before is seen before what is stored behind this, by all.
    pub fn fence(&self) {
        fence(Ordering::SeqCst);
    }

    /// Tells those who wish to be told that something was stored into these bytes. Costs a look at a word of each page where nobody does. (In a cluster
    /// keepers tell of all that is written.)
    #[inline]
    pub fn notify(&self, at: usize, length: usize) -> Result<(), Status> {
        let pages = pages(at, length, self.len())?;
        let Way::Mapped(mapped) = &self.way else { return Ok(()) };
        mapped.before_look();
        for page in pages {
            if mapped.wishes.word(page).load(Ordering::Relaxed) != 0 {
                mapped.tell(page);
            }
        }
        Ok(())
    }
}

impl Mapped {
    #[inline]
    fn before_look(&self) {
        if !self.has_barriers {
            // ORDER: SeqCst, pairs with the keeper's `fetch_add` of the wish: the stores before this are seen by who wished before the look.
            fence(Ordering::SeqCst);
        }
        // ORDER: otherwise the keeper has made this process pass a barrier behind the wish (`Keeper::watch`); the compiler must not move the look.
        std::sync::atomic::compiler_fence(Ordering::SeqCst);
    }

    #[cold]
    fn tell(&self, page: usize) {
        let changes = self.changes.word(page);
        // ORDER: Release, pairs with Acquire in `Watch::has_changed`: what was stored is seen with it.
        changes.fetch_add(1, Ordering::Release);
        futex::wake(changes);
    }
}

/// Copies to where others may look, and write beside: aligned words of 8 bytes come whole, and no byte is stored that is not of the copy.
///
/// # Safety
/// Both addresses are valid for so many bytes, which do not overlap.
#[allow(unsafe_code)]
pub unsafe fn copy(from: *const u8, to: *mut u8, bytes: usize) {
    let head = to.align_offset(LINE_BYTES).min(bytes);
    // SAFETY: within both, by our own contract.
    let lines = unsafe { copy_lines(from.add(head), to.add(head), bytes - head) };
    for (begin, end) in [(0, head), (head + lines, bytes)] {
        // SAFETY: both parts lie within what our own contract makes valid.
        unsafe { copy_words(from.add(begin), to.add(begin), end - begin) };
    }
    // ORDER: Release, pairs with Acquire in `get`: what is stored behind this call is seen behind it.
    fence(Ordering::Release);
}

const LINE_BYTES: usize = 64;

/// As many whole lines as there are, to where one begins: how many bytes. (A loop of words takes almost twice as long.)
///
/// # Safety
/// As `copy`.
#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code)]
unsafe fn copy_lines(from: *const u8, to: *mut u8, bytes: usize) -> usize {
    let lines = bytes / LINE_BYTES;
    // (With AVX, Intel and AMD say, aligned stores of 16 bytes come whole; without it nobody says so.)
    if lines == 0 || !std::arch::is_x86_feature_detected!("avx") {
        return 0;
    }
    // SAFETY: so many lines of both, by our own contract; stores of the processor's, in their order, which others may see at any time.
    unsafe {
        std::arch::asm!(
            "2:",
            "movdqu {a}, [{from}]",
            "movdqu {b}, [{from} + 16]",
            "movdqu {c}, [{from} + 32]",
            "movdqu {d}, [{from} + 48]",
            "movdqa [{to}], {a}",
            "movdqa [{to} + 16], {b}",
            "movdqa [{to} + 32], {c}",
            "movdqa [{to} + 48], {d}",
            "add {from}, 64",
            "add {to}, 64",
            "dec {lines}",
            "jnz 2b",
            from = inout(reg) from => _,
            to = inout(reg) to => _,
            lines = inout(reg) lines => _,
            a = out(xmm_reg) _,
            b = out(xmm_reg) _,
            c = out(xmm_reg) _,
            d = out(xmm_reg) _,
            options(nostack),
        );
    }
    lines * LINE_BYTES
}

#[cfg(not(target_arch = "x86_64"))]
#[allow(unsafe_code)]
unsafe fn copy_lines(_: *const u8, _: *mut u8, _: usize) -> usize {
    0
}

/// # Safety
/// As `copy`.
#[allow(unsafe_code)]
unsafe fn copy_words(from: *const u8, to: *mut u8, bytes: usize) {
    use std::sync::atomic::AtomicU8;
    let head = to.align_offset(8).min(bytes);
    let tail = (bytes - head) % 8;
    let byte = |at: usize| {
        // SAFETY: within both, by our own contract; bytes that others write too are stored as atomics.
        unsafe { (*to.add(at).cast::<AtomicU8>()).store(*from.add(at), Ordering::Relaxed) }
    };
    (0..head).for_each(byte);
    for at in (head..bytes - tail).step_by(8) {
        // SAFETY: within both, by our own contract, and `to` is aligned from `head` on.
        unsafe {
            let word = from.add(at).cast::<u64>().read_unaligned();
            (*to.add(at).cast::<AtomicU64>()).store(word, Ordering::Relaxed);
        }
    }
    (bytes - tail..bytes).for_each(byte);
}

/// A region to read: what was written by all, in one order.
pub struct Receiver {
    received: Arc<Received>,
}

struct Received {
    data: Mapping,
    changes: Arc<Mapping>,
    attachment: Attachment,
}

impl Receiver {
    pub fn len(&self) -> usize {
        self.received.data.area().len()
    }

    pub fn is_empty(&self) -> bool {
        false
    }

    /// What was received, to be loaded: it may change at any time, so load each word once. It can't be stored to: the processor refuses that (SIGSEGV).
    #[inline]
    pub fn words(&self) -> &[AtomicU64] {
        words(self.base(), self.len())
    }

    pub fn base(&self) -> *const u8 {
        self.received.data.area().base()
    }

    /// Copies bytes out, from byte `at` on. What is written meanwhile may be seen in part; aligned words of 8 bytes are whole.
    pub fn get(&self, at: usize, to: &mut [u8]) -> Result<(), Status> {
        pages(at, to.len(), self.len())?;
        let (words, mut place, length) = (self.words(), at, to.len());
        let mut rest = to;
        while !rest.is_empty() {
            // ORDER: Acquire, pairs with Release in `copy`: what was stored before a word is seen with it.
            let word = words[place / 8].load(Ordering::Acquire).to_ne_bytes();
            let from = &word[place % 8..];
            let n = from.len().min(rest.len());
            rest[..n].copy_from_slice(&from[..n]);
            rest = &mut rest[n..];
            place += n;
        }
        debug_assert_eq!(place, at + length);
        Ok(())
    }

    /// Wishes to be told of what is stored into the page of this byte: from now on `Transmitter::notify` wakes.
    pub fn watch(&self, at: usize) -> Result<Watch, Status> {
        let page = pages(at, 1, self.len())?.start;
        let of = &self.received.attachment.of;
        let seen = self.received.changes.word(page).load(Ordering::Acquire);
        of.host.ask(&Ask::Watch { id: of.id, page: page as u32, on: true })?;
        Ok(Watch { received: self.received.clone(), page, seen, waker: None })
    }
}

/// A wish to be told of what is stored into a page.
pub struct Watch {
    received: Arc<Received>,
    page: usize,
    seen: u32,
    waker: Option<Waker>,
}

/// A thread that sleeps on the page's changes, for an epoll set.
struct Waker {
    event: Arc<OwnedFd>,
    is_over: Arc<AtomicBool>,
}

impl Watch {
    /// Was something stored, and told of, since the last time that this said so? (What was stored before the watch began may be told of once.)
    pub fn has_changed(&mut self) -> bool {
        if let Some(waker) = &self.waker {
            fd::drain(waker.event.as_raw_fd());
        }
        // ORDER: Acquire, pairs with Release in `notify`.
        let now = self.received.changes.word(self.page).load(Ordering::Acquire);
        std::mem::replace(&mut self.seen, now) != now
    }

    /// Sleeps until something was stored, and told of. False if that took too long.
    pub fn wait(&mut self, timeout: Option<Duration>) -> bool {
        let began = Instant::now();
        loop {
            if self.has_changed() {
                return true;
            }
            let left = timeout.map(|timeout| timeout.saturating_sub(began.elapsed()));
            if left == Some(Duration::ZERO) {
                return false;
            }
            let slice = left.unwrap_or(LOOK_AGAIN).min(LOOK_AGAIN);
            let word = self.received.changes.word(self.page);
            futex::wait(word, self.seen, slice.as_nanos() as u64);
        }
    }

    /// Readable when something was stored; `has_changed` makes it unreadable again. (From the first call on a thread of this process sleeps for it.)
    pub fn descriptor(&mut self) -> Result<BorrowedFd<'_>, Status> {
        if self.waker.is_none() {
            self.waker = Some(self.wake_by_thread()?);
        }
        self.waker.as_ref().map(|waker| waker.event.as_fd()).ok_or(Status::NoMemory)
    }

    fn wake_by_thread(&self) -> Result<Waker, Status> {
        let event = Arc::new(memory::own(fd::eventfd()?));
        let is_over = Arc::new(AtomicBool::new(false));
        let (bell, over) = (event.clone(), is_over.clone());
        // (The mapping alone: what else is received is given back with the watch, though this thread looks up later.)
        let (changes, page, mut seen) = (self.received.changes.clone(), self.page, self.seen);
        let sleep = move || {
            // ORDER: Relaxed: a flag alone.
            while !over.load(Ordering::Relaxed) {
                let word = changes.word(page);
                let now = word.load(Ordering::Acquire);
                if now != seen {
                    seen = now;
                    fd::ring(bell.as_raw_fd());
                }
                futex::wait(word, seen, LOOK_AGAIN.as_nanos() as u64);
            }
        };
        let thread = std::thread::Builder::new().name("reflect".into()).stack_size(64 << 10);
        without_signals(|| thread.spawn(sleep)).map_err(|_| Status::NoMemory)?;
        Ok(Waker { event, is_over })
    }
}

/// Threads that `act` starts are sent none of the program's signals.
fn without_signals<T>(act: impl FnOnce() -> T) -> T {
    // SAFETY: sets that are filled before they are used.
    #[allow(unsafe_code)]
    unsafe {
        let (mut all, mut before) = (std::mem::zeroed(), std::mem::zeroed());
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
        let done = act();
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, std::ptr::null_mut());
        done
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        if let Some(waker) = &self.waker {
            waker.is_over.store(true, Ordering::Relaxed);
        }
        let of = &self.received.attachment.of;
        let _ = of.host.ask(&Ask::Watch { id: of.id, page: self.page as u32, on: false });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_is_what_it_copies_and_no_byte_more() {
        let source: Vec<u8> = (0..700u32).map(|at| (at * 7) as u8 | 1).collect();
        for (from, to) in (0..9).flat_map(|from| (0..70).map(move |to| (from, to))) {
            for length in (0..40).chain([63, 64, 65, 127, 128, 200, 300, 511]) {
                let mut target = vec![0; 700];
                let whole = target.as_mut_ptr();
                // SAFETY: within both.
                #[allow(unsafe_code)]
                unsafe {
                    copy(source.as_ptr().add(from), whole.add(to), length);
                }
                let mut expected = vec![0; 700];
                expected[to..to + length].copy_from_slice(&source[from..from + length]);
                assert!(target == expected, "{length} bytes from {from} to {to}");
            }
        }
    }
}
