//! A guest's virtio-net as a port: the back end of vhost-user, for QEMU and whoever else speaks it, on a socket. The guest's buffers are read and
//! written where they lie; segments and checksums pass whole if its driver takes them, else they are cut and written (`cut`).
//!
//! What the guest writes is hostile: each word is read once, and checked where it is used (`virtio_queue`, `vm_memory`, `Head::is_sound`). Who
//! connects, the front end, has given the memory, and can end us; so one process serves one guest.
//!
//! There is a port while a guest's driver has its rings going, so that others see it come and go; and one guest at a time. Frames that find no buffer
//! wait in their senders' queues, as those of any port that does not take them.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::sync::mpsc::{Receiver, Sender};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::thread::JoinHandle;

use anyhow::{Context, Result, anyhow, bail, ensure};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use vhost::vhost_user::Listener;
use vhost::vhost_user::message::{VhostUserProtocolFeatures, VhostUserVirtioFeatures};
use vhost_user_backend::{
    Error, VhostUserBackend, VhostUserDaemon, VringEpollHandler, VringMutex, VringState, VringT,
};
use virtio_bindings::bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::bindings::virtio_net::*;
use virtio_bindings::bindings::virtio_ring::{
    VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC, VRING_AVAIL_F_NO_INTERRUPT,
};
use virtio_queue::{DescriptorChain, Queue as Ring, QueueOwnedT, QueueT};
use vm_memory::{
    Bytes, GuestAddress, GuestAddressSpace, GuestMemoryAtomic, GuestMemoryBackend, GuestMemoryMmap,
    VolatileSlice,
};
use vmm_sys_util::epoll::EventSet;
use vmm_sys_util::event::{
    EventConsumer, EventFlag, EventNotifier, new_event_consumer_and_notifier,
};

use crate::counters::Dropped;
use crate::cut;
use crate::device::End;
use crate::frame::{
    GSO_ECN, GSO_TCP4, GSO_TCP6, GSO_UDP, HEAD_BYTES, HEADER_BYTES, Head, MESSAGE_MOST, Mac,
    NEEDS_CHECKSUM,
};
use crate::keeper::is_name;
use crate::port::{Arrived, Event, Options, Port, Queue, Refused, new_bell, ring};
use crate::room::Room;

mod relay;

/// Frames of one way before the other has its turn; and turns before the front end has.
const TURN: usize = 64;
const TURNS: usize = 64;
const RING_MOST: usize = 1024;
/// Where something is lacking that a guest needs, before that is tried again.
const LACKING: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
/// Pieces of one frame in the guest's memory.
const PIECES_MOST: usize = 1024;
/// Rings, by their numbers.
const TO_GUEST: usize = 0;
const FROM_GUEST: usize = 1;
const RINGS: usize = 2;
/// The framework's numbers of other descriptors begin behind those of the rings and its own.
const PORT: u64 = RINGS as u64 + 1;
const AGAIN: u64 = PORT + 1;

/// What the guest's driver must have taken for each of our headers' kinds to pass whole.
const WHOLE: u64 = 1 << VIRTIO_NET_F_GUEST_CSUM
    | 1 << VIRTIO_NET_F_GUEST_TSO4
    | 1 << VIRTIO_NET_F_GUEST_TSO6
    | 1 << VIRTIO_NET_F_GUEST_ECN
    | 1 << VIRTIO_NET_F_GUEST_USO4
    | 1 << VIRTIO_NET_F_GUEST_USO6;
const FEATURES: u64 = WHOLE
    | 1 << VIRTIO_NET_F_CSUM
    | 1 << VIRTIO_NET_F_HOST_TSO4
    | 1 << VIRTIO_NET_F_HOST_TSO6
    | 1 << VIRTIO_NET_F_HOST_ECN
    | 1 << VIRTIO_NET_F_HOST_USO
    | 1 << VIRTIO_NET_F_MRG_RXBUF
    | 1 << VIRTIO_F_VERSION_1
    | 1 << VIRTIO_RING_F_EVENT_IDX
    | 1 << VIRTIO_RING_F_INDIRECT_DESC;

type Memory = GuestMemoryMmap;
type Vring = VringMutex<GuestMemoryAtomic<GuestMemoryMmap>>;

#[derive(Clone, Debug)]
pub struct Settings {
    /// Where the front end connects.
    pub socket: PathBuf,
    /// The guest's, as it was told by its front end.
    pub mac: Option<Mac>,
    /// How long to watch, at most, before a sleep.
    pub watch_us: u64,
}

/// Listens, and serves one guest after the other, until somebody says `End`.
pub fn serve(
    settings: &Settings,
    room: Room,
    ends: (Sender<End>, Receiver<End>),
    ready: impl FnOnce(Mac),
    tell: impl Fn(String) + Send + Sync + 'static,
) -> Result<()> {
    let mac = settings.mac.map_or_else(Mac::random, Ok)?;
    // (A wrong use is told of now, and not when a guest comes.)
    room.ports()?;
    let place = Place::listen(&settings.socket)?;
    let (ending, end) = ends;
    let back = Arc::new(Back::new(settings, mac, room, ending, Box::new(tell))?);
    let thread = Arc::clone(&back);
    let listener = place.listener.try_clone()?;
    let thread: JoinHandle<Result<()>> =
        std::thread::Builder::new().name("guests".into()).spawn(move || {
            thread.guests(&listener).inspect_err(|error| {
                let _ = thread.ending.send(End::Failed(format!("{error:#}")));
            })
        })?;
    ready(mac);
    let why = end.recv().unwrap_or(End::Asked);
    back.end();
    let _ = thread.join();
    match why {
        End::Asked => Ok(()),
        End::Failed(why) => bail!("{why}"),
    }
}

/// The socket; its name goes with it.
struct Place {
    listener: UnixListener,
    path: PathBuf,
}

impl Place {
    fn listen(path: &Path) -> Result<Place> {
        // (What a killed one has left behind: nobody listens there.)
        let is_socket =
            std::fs::symlink_metadata(path).is_ok_and(|what| what.file_type().is_socket());
        if is_socket
            && let Err(error) = UnixStream::connect(path)
            && error.kind() == io::ErrorKind::ConnectionRefused
        {
            let _ = std::fs::remove_file(path);
        }
        let listener = UnixListener::bind(path).map_err(|error| match error.kind() {
            io::ErrorKind::AddrInUse => anyhow!(
                "{} is there already: another back end listens there, or it is no socket",
                path.display()
            ),
            _ => anyhow!(error).context(format!("{} can't be made", path.display())),
        })?;
        Ok(Place { listener, path: path.to_owned() })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

/// What all guests have in common.
struct Back {
    room: Room,
    mac: Mac,
    name: String,
    watch_us: u64,
    ending: Sender<End>,
    tell: Arc<dyn Fn(String) + Send + Sync>,
    is_over: AtomicBool,
    bell: OwnedFd,
    /// The connection of the guest that is there.
    guest: Mutex<Option<UnixStream>>,
}

impl Back {
    fn new(
        settings: &Settings,
        mac: Mac,
        room: Room,
        ending: Sender<End>,
        tell: Box<dyn Fn(String) + Send + Sync>,
    ) -> Result<Back> {
        let name = settings.socket.file_stem().context("a socket has a name")?;
        let name = name.to_string_lossy().into_owned();
        ensure!(
            is_name(&name),
            "the socket's name is the port's: of up to 64 bytes, without control characters, and not {name:?}"
        );
        Ok(Back {
            room,
            mac,
            name,
            watch_us: settings.watch_us,
            ending,
            tell: tell.into(),
            is_over: AtomicBool::new(false),
            bell: new_bell()?,
            guest: Mutex::default(),
        })
    }

    fn is_over(&self) -> bool {
        self.is_over.load(Ordering::SeqCst)
    }

    fn end(&self) {
        self.is_over.store(true, Ordering::SeqCst);
        ring(&self.bell);
        self.end_guest();
    }

    fn guests(self: &Arc<Back>, listener: &UnixListener) -> Result<()> {
        let mut told = false;
        while !self.is_over() {
            self.await_bell(Some(listener), None)?;
            if self.is_over() {
                break;
            }
            let served = listener
                .accept()
                .map_err(Into::into)
                .and_then(|(front, _)| self.serve_guest(front));
            // (What is lacking, descriptors say, may be there later. Who waits at the socket waits on.)
            if let Err(error) = &served {
                if !told {
                    (self.tell)(format!("a front end can't be served now: {error:#}"));
                }
                self.await_bell(None, Some(&LACKING))?;
            }
            told = served.is_err();
        }
        Ok(())
    }

    /// Until it is over, or somebody connects, or for so long.
    fn await_bell(&self, listener: Option<&UnixListener>, most: Option<&Timespec>) -> Result<()> {
        let fds = [Some(self.bell.as_fd()), listener.map(AsFd::as_fd)];
        let mut fds: Vec<PollFd> = (fds.into_iter().flatten())
            .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN))
            .collect();
        match poll(&mut fds, most) {
            Err(rustix::io::Errno::INTR) => Ok(()),
            polled => Ok(polled.map(drop)?),
        }
    }

    fn serve_guest(self: &Arc<Back>, front: UnixStream) -> Result<()> {
        *lock(&self.guest) = Some(front.try_clone()?);
        // (Who has said that it is over meanwhile has found no guest.)
        if self.is_over() {
            return Ok(());
        }
        let served = self.serve_front(&front);
        *lock(&self.guest) = None;
        served
    }

    fn serve_front(self: &Arc<Back>, front: &UnixStream) -> Result<()> {
        let guest = Guest::new(self)?;
        let memory = guest.memory.clone();
        let mut daemon = VhostUserDaemon::new("front end".into(), Arc::clone(&guest), memory)
            .map_err(|error| anyhow!("no thread for a guest: {error}"))?;
        for handler in daemon.get_epoll_handlers() {
            handler.register_listener(guest.again.as_raw_fd(), EventSet::IN, AGAIN)?;
            let _ = guest.handler.set(Arc::downgrade(&handler));
        }
        let (door, inner) = relay::inner()?;
        daemon
            .start(&mut Listener::from(door))
            .map_err(|error| anyhow!("no guest can come: {error}"))?;
        relay::run(front, &inner);
        let ended = daemon.wait();
        if let Err(error) = ended
            && !is_gone(&error)
        {
            (self.tell)(format!("the front end's connection is ended: {error}"));
        }
        // Its threads end with it; then the port goes.
        drop(daemon);
        *lock(&guest.line) = None;
        Ok(())
    }

    fn end_guest(&self) {
        lock(&self.guest).iter().for_each(|front| _ = front.shutdown(Shutdown::Both));
    }
}

/// Has the front end just gone?
fn is_gone(error: &Error) -> bool {
    use vhost::vhost_user::Error::*;
    matches!(error, Error::HandleRequest(Disconnected | PartialMessage | SocketBroken(_)))
}

/// One front end's connection.
struct Guest {
    this: Weak<Guest>,
    back: Arc<Back>,
    memory: GuestMemoryAtomic<GuestMemoryMmap>,
    features: AtomicU64,
    handler: OnceLock<Weak<VringEpollHandler<Arc<Guest>>>>,
    /// While its rings go. Used by the rings' thread, and put away by who stops them.
    line: Mutex<Option<Line>>,
    /// There is more to do.
    again: OwnedFd,
    /// What ends the framework's thread.
    exit: Mutex<Option<RawFd>>,
}

thread_local! {
    /// Of the rings' thread, which the framework ends without a word when a ring's descriptor tells of more than there is.
    static ENDING: RefCell<Option<Ending>> = const { RefCell::new(None) };
}

/// With it the connection ends: nobody would serve the guest any more.
struct Ending(Weak<Guest>);

impl Drop for Ending {
    fn drop(&mut self) {
        if let Some(guest) = self.0.upgrade() {
            *lock(&guest.line) = None;
            guest.back.end_guest();
        }
    }
}

/// The port of a guest whose rings go.
struct Line {
    _port: Port,
    queue: Queue,
    /// Messages, as the guest is to get them, for which it has no buffers yet; and up to where it had given some.
    waiting: VecDeque<Vec<u8>>,
    seen: u16,
    pieces: Pieces,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Guest {
    fn new(back: &Arc<Back>) -> Result<Arc<Guest>> {
        let again = new_bell()?;
        Ok(Arc::new_cyclic(|this| Guest {
            this: Weak::clone(this),
            back: Arc::clone(back),
            memory: GuestMemoryAtomic::new(GuestMemoryMmap::new()),
            features: AtomicU64::new(0),
            handler: OnceLock::new(),
            line: Mutex::default(),
            again,
            exit: Mutex::default(),
        }))
    }

    fn has(&self, feature: u32) -> bool {
        self.features.load(Ordering::Relaxed) & 1 << feature != 0
    }

    /// Of the header in the guest's memory: behind ours there is a count of buffers.
    fn header_bytes(&self) -> usize {
        let counts = self.has(VIRTIO_F_VERSION_1) || self.has(VIRTIO_NET_F_MRG_RXBUF);
        HEADER_BYTES + if counts { 2 } else { 0 }
    }

    /// Does the guest's driver take what this header says?
    fn takes(&self, head: &Head) -> bool {
        let [flags, kind, ..] = head.0;
        let kind_is = |kinds: &[u8]| kinds.contains(&(kind & !GSO_ECN));
        (flags & NEEDS_CHECKSUM == 0 || self.has(VIRTIO_NET_F_GUEST_CSUM))
            && (!kind_is(&[GSO_TCP4]) || self.has(VIRTIO_NET_F_GUEST_TSO4))
            && (!kind_is(&[GSO_TCP6]) || self.has(VIRTIO_NET_F_GUEST_TSO6))
            && (!kind_is(&[GSO_UDP])
                || self.has(VIRTIO_NET_F_GUEST_USO4) && self.has(VIRTIO_NET_F_GUEST_USO6))
            && (kind & GSO_ECN == 0 || self.has(VIRTIO_NET_F_GUEST_ECN))
    }

    /// Joins the network.
    fn begin(&self) -> Result<Line> {
        let back = &self.back;
        let (tell, ending) = (Arc::clone(&back.tell), back.ending.clone());
        let options = Options::new(&*back.name, back.mac);
        let (port, queues) = Port::open(back.room.clone(), options, move |event| match event {
            Event::Ports(_) => {}
            Event::Apart(why) => tell(why),
            Event::End => _ = ending.send(End::Asked),
        })?;
        let queue = queues.into_iter().next().context("a queue")?;
        let handler = self.handler.get().and_then(Weak::upgrade).context("no thread")?;
        handler.register_listener(queue.as_fd().as_raw_fd(), EventSet::IN, PORT)?;
        let (waiting, pieces) = Default::default();
        Ok(Line { _port: port, queue, waiting, seen: 0, pieces })
    }

    /// Frames both ways, until there are none; or so many that somebody else is to have a turn.
    fn go(&self, vrings: &[Vring]) -> Result<()> {
        let mut guard = lock(&self.line);
        if !vrings.iter().all(is_going) {
            *guard = None;
            return Ok(());
        }
        let line = match &mut *guard {
            Some(line) => line,
            none => none.insert(self.begin()?),
        };
        // (Whoever is awake looks by himself.)
        vrings.iter().try_for_each(|vring| vring.disable_notification()).context(BROKEN)?;
        for _ in 0..TURNS {
            line.queue.begin();
            let sent = self.forward(line, &vrings[FROM_GUEST])?;
            let received = self.deliver(line, &vrings[TO_GUEST])?;
            if !sent && !received && self.rest(line, vrings)? {
                return Ok(());
            }
        }
        ring(&self.again);
        Ok(())
    }

    /// Watches, and then sees to it that whatever comes wakes the thread. False: something has come.
    fn rest(&self, line: &mut Line, vrings: &[Vring]) -> Result<bool> {
        // (For whom there is no room its ring is not looked at, nor other ports for whom there are no buffers.)
        let (sends, takes) = (!line.queue.is_waiting(), line.waiting.is_empty());
        let has_given = |number: usize, seen: Option<u16>| {
            let vring = vrings[number].get_ref();
            let next = vring.get_queue().avail_idx(&*self.memory.memory(), Ordering::Acquire);
            next.is_ok_and(|next| next.0 != seen.unwrap_or(vring.get_queue().next_avail()))
        };
        let seen = line.seen;
        let guest_has =
            || sends && has_given(FROM_GUEST, None) || !takes && has_given(TO_GUEST, Some(seen));
        if line.queue.watch(self.back.watch_us, takes, guest_has) {
            return Ok(false);
        }
        let listen = |number: usize, seen: Option<u16>| -> Result<bool> {
            let mut vring = vrings[number].get_mut();
            let ring = vring.get_queue_mut();
            let next = ring.next_avail();
            // (It says from where on the guest is to tell: behind what it has given.)
            ring.set_next_avail(seen.unwrap_or(next));
            let more = ring.enable_notification(&*self.memory.memory());
            ring.set_next_avail(next);
            more.context(BROKEN)
        };
        let more = sends && listen(FROM_GUEST, None)? || !takes && listen(TO_GUEST, Some(seen))?;
        let arm = |queue: &mut Queue| if takes { queue.arm() } else { queue.arm_for_room() };
        Ok(!more && !arm(&mut line.queue))
    }

    /// Sends what the guest has. False: there is nothing, or no room for it.
    fn forward(&self, line: &mut Line, vring: &Vring) -> Result<bool> {
        let mut state = vring.get_mut();
        let memory = &*self.memory.memory();
        let header_bytes = self.header_bytes();
        let ring = state.get_queue_mut();
        let first = ring.next_used();
        for _ in 0..TURN {
            let Some(chain) = next(ring, memory)? else { break };
            let buffer = chain.head_index();
            line.pieces.clear();
            line.pieces.add(chain, false);
            match send(&mut line.queue, &line.pieces, memory, header_bytes) {
                // (It stays the next one.)
                Err(Unsent::Waits) => {
                    ring.go_to_previous_position();
                    break;
                }
                Err(Unsent::Dropped(why)) => line.queue.dropped(why),
                Ok(()) => {}
            }
            ring.add_used(memory, buffer, 0).context(BROKEN)?;
        }
        line.queue.flush();
        interrupt(&mut state, memory, first)
    }

    /// Gives the guest what has come. False: there is nothing, or no buffers for it.
    fn deliver(&self, line: &mut Line, vring: &Vring) -> Result<bool> {
        let mut state = vring.get_mut();
        let memory = &*self.memory.memory();
        let first = state.get_queue().next_used();
        let Line { queue, waiting, seen, pieces, .. } = line;
        let mut to = Giving { guest: self, ring: state.get_queue_mut(), memory, pieces };
        for _ in 0..TURN {
            // What waits goes first.
            if let Some(message) = waiting.front_mut() {
                match to.give_copy(message)? {
                    Given::No => {
                        *seen = to.seen()?;
                        break;
                    }
                    Given::Dropped(why) => queue.dropped(why),
                    Given::Yes => {}
                }
                waiting.pop_front();
                continue;
            }
            let mut failed = None;
            let came = queue.receive(1, |arrived| match to.take(arrived, waiting) {
                Ok(taken) => taken,
                Err(error) => {
                    failed = Some(error);
                    Ok(())
                }
            });
            if let Some(error) = failed {
                return Err(error);
            }
            if !came {
                break;
            }
        }
        interrupt(&mut state, memory, first)
    }
}

const BROKEN: &str = "the guest's ring is not one, or not in its memory";

fn is_going(vring: &Vring) -> bool {
    let state = vring.get_ref();
    state.is_enabled() && state.get_queue().ready() && state.get_kick().is_some()
}

fn next<'a>(ring: &mut Ring, memory: &'a Memory) -> Result<Option<DescriptorChain<&'a Memory>>> {
    Ok(ring.iter(memory).context(BROKEN)?.next())
}

/// Tells the guest of what was used since `first`, if it wants to know. False: nothing was.
fn interrupt(
    state: &mut VringState<GuestMemoryAtomic<GuestMemoryMmap>>,
    memory: &Memory,
    first: u16,
) -> Result<bool> {
    let ring = state.get_queue();
    let now = ring.next_used();
    if now == first {
        return Ok(false);
    }
    // (The guest's driver has a barrier, too, as VIRTIO says: what is used is there before it is looked up whether it wants to know.)
    fence(Ordering::SeqCst);
    let word = |at: u64| -> Result<u16> {
        let place = ring.avail_ring().checked_add(at).context(BROKEN)?;
        Ok(u16::from_le(memory.load(GuestAddress(place), Ordering::Relaxed).context(BROKEN)?))
    };
    let wants = if ring.event_idx_enabled() {
        // Is the entry of which it wants to hear among them?
        let event = word(4 + 2 * u64::from(ring.size()))?;
        now.wrapping_sub(event).wrapping_sub(1) < now.wrapping_sub(first)
    } else {
        u32::from(word(0)?) & VRING_AVAIL_F_NO_INTERRUPT == 0
    };
    if wants {
        // (The number of the eventfd is full: it is told already.)
        let _ = state.signal_used_queue();
    }
    Ok(true)
}

/// Pieces of the guest's memory, in order.
#[derive(Default)]
struct Pieces {
    all: Vec<(GuestAddress, usize)>,
    bytes: usize,
    /// The buffers that they are of, and how much each holds.
    buffers: Vec<(u16, usize)>,
}

/// A piece is not in the guest's memory.
struct Outside;

impl Pieces {
    fn clear(&mut self) {
        self.all.clear();
        self.buffers.clear();
        self.bytes = 0;
    }

    /// Looks at each descriptor once. (Of too many the rest is left out, and then the frame is too long for it, or too short.)
    fn add(&mut self, chain: DescriptorChain<&Memory>, writable: bool) {
        let (head, before) = (chain.head_index(), self.bytes);
        for piece in chain.filter(|piece| piece.is_write_only() == writable) {
            if self.all.len() == PIECES_MOST {
                break;
            }
            self.all.push((piece.addr(), piece.len() as usize));
            self.bytes += piece.len() as usize;
        }
        self.buffers.push((head, self.bytes - before));
    }

    /// Copies between the bytes from `at` on, and `other`, all of which they hold.
    fn copy(
        &self,
        memory: &Memory,
        at: usize,
        other: &VolatileSlice,
        is_read: bool,
    ) -> Result<(), Outside> {
        let (mut skip, mut done) = (at, 0);
        for (address, len) in &self.all {
            if done == other.len() {
                break;
            }
            let skipped = skip.min(*len);
            skip -= skipped;
            let count = (len - skipped).min(other.len() - done);
            let place = address.0.checked_add(skipped as u64).ok_or(Outside)?;
            for slice in memory.get_slices(GuestAddress(place), count) {
                let slice = slice.map_err(|_| Outside)?;
                let part = other.subslice(done, slice.len()).map_err(|_| Outside)?;
                match is_read {
                    true => slice.copy_to_volatile_slice(part),
                    false => part.copy_to_volatile_slice(slice),
                }
                done += slice.len();
            }
        }
        if done == other.len() { Ok(()) } else { Err(Outside) }
    }
}

enum Unsent {
    /// There is no room, and it is waited for.
    Waits,
    Dropped(Dropped),
}

/// Sends one frame of the guest's.
fn send(
    queue: &mut Queue,
    from: &Pieces,
    memory: &Memory,
    header_bytes: usize,
) -> Result<(), Unsent> {
    let malformed = |_| Unsent::Dropped(Dropped::Malformed);
    let len = (from.bytes + HEADER_BYTES).saturating_sub(header_bytes);
    if !(HEAD_BYTES..=MESSAGE_MOST).contains(&len) {
        return Err(malformed(Outside));
    }
    let mut head = Head([0; HEAD_BYTES]);
    let (header, ethernet) = head.0.split_at_mut(HEADER_BYTES);
    from.copy(memory, 0, &VolatileSlice::from(header), true).map_err(malformed)?;
    from.copy(memory, header_bytes, &VolatileSlice::from(ethernet), true).map_err(malformed)?;
    if !head.is_sound(len) {
        return Err(malformed(Outside));
    }
    let mut place = match queue.reserve(head.destination(), len) {
        Ok(place) => place,
        Err(Refused::Full) => {
            let waits = queue.is_patient();
            return Err(if waits { Unsent::Waits } else { Unsent::Dropped(Dropped::Full) });
        }
        Err(Refused::NoPort) => return Err(Unsent::Dropped(Dropped::NoPort)),
        Err(Refused::Length) => return Err(malformed(Outside)),
    };
    place.write(0, &head.0);
    // SAFETY: `len` bytes lie there while the place is held. (Whoever shares them may write there too: bytes are copied raw.)
    #[allow(unsafe_code)]
    let rest = unsafe { VolatileSlice::new(place.pointer().add(HEAD_BYTES), len - HEAD_BYTES) };
    let behind = header_bytes + HEAD_BYTES - HEADER_BYTES;
    from.copy(memory, behind, &rest, true).map_err(malformed)?;
    // (Nobody takes what is for all: each has counted it.)
    let _ = place.send_quietly();
    Ok(())
}

enum Given {
    Yes,
    /// There are not so many buffers yet.
    No,
    Dropped(Dropped),
}

/// The guest's buffers, to be filled.
struct Giving<'a> {
    guest: &'a Guest,
    ring: &'a mut Ring,
    memory: &'a Memory,
    pieces: &'a mut Pieces,
}

impl Giving<'_> {
    /// Up to where the guest has given buffers.
    fn seen(&self) -> Result<u16> {
        Ok(self.ring.avail_idx(self.memory, Ordering::Acquire).context(BROKEN)?.0)
    }

    /// Gives it to the guest, or puts it with what waits.
    fn take(
        &mut self,
        arrived: &Arrived,
        waiting: &mut VecDeque<Vec<u8>>,
    ) -> Result<Result<(), Dropped>> {
        let copy = || {
            let mut message = vec![0; arrived.len];
            arrived.copy_to(&mut message);
            message
        };
        if !self.guest.takes(arrived.head) {
            return Ok(cut::plain(&copy(), |message| waiting.push_back(message.to_vec())));
        }
        let rest = arrived.pointer().wrapping_add(HEAD_BYTES).cast_mut();
        // SAFETY: so many bytes lie there until the message is released, which is behind this call. They are read only, and raw.
        #[allow(unsafe_code)]
        let rest = unsafe { VolatileSlice::new(rest, arrived.len - HEAD_BYTES) };
        match self.give(arrived.head, &rest)? {
            Given::Yes => Ok(Ok(())),
            Given::Dropped(why) => Ok(Err(why)),
            Given::No => {
                waiting.push_back(copy());
                Ok(Ok(()))
            }
        }
    }

    fn give_copy(&mut self, message: &mut [u8]) -> Result<Given> {
        let Some((head, rest)) = message.split_first_chunk_mut() else {
            return Ok(Given::Dropped(Dropped::Malformed));
        };
        self.give(&Head(*head), &VolatileSlice::from(rest))
    }

    /// Writes a message into buffers, as many as it takes if the guest's driver merges them.
    fn give(&mut self, head: &Head, rest: &VolatileSlice) -> Result<Given> {
        let header_bytes = self.guest.header_bytes();
        let needed = header_bytes + HEAD_BYTES - HEADER_BYTES + rest.len();
        self.pieces.clear();
        while self.pieces.bytes < needed {
            let buffers = self.pieces.buffers.len();
            let is_too_long = match buffers {
                0 => false,
                1 if !self.guest.has(VIRTIO_NET_F_MRG_RXBUF) => true,
                _ => buffers == usize::from(self.ring.size()),
            };
            let chain = if is_too_long { None } else { next(self.ring, self.memory)? };
            match chain {
                Some(chain) => self.pieces.add(chain, true),
                None => {
                    (0..buffers).for_each(|_| self.ring.go_to_previous_position());
                    return Ok(match is_too_long {
                        true => Given::Dropped(Dropped::Buffers),
                        false => Given::No,
                    });
                }
            }
        }
        let buffers = self.pieces.buffers.len() as u16;
        let written = self.write(header_bytes, head, rest, buffers);
        self.use_buffers(if written.is_ok() { needed } else { 0 })?;
        Ok(if written.is_ok() { Given::Yes } else { Given::Dropped(Dropped::Buffers) })
    }

    fn write(
        &self,
        header_bytes: usize,
        head: &Head,
        rest: &VolatileSlice,
        buffers: u16,
    ) -> Result<(), Outside> {
        let mut header = [0; HEADER_BYTES + 2];
        header[..HEADER_BYTES].copy_from_slice(&head.0[..HEADER_BYTES]);
        header[HEADER_BYTES..].copy_from_slice(&buffers.to_le_bytes());
        if !self.guest.has(VIRTIO_NET_F_GUEST_CSUM) {
            header[0] = 0;
        }
        let mut ethernet = [0; HEAD_BYTES - HEADER_BYTES];
        ethernet.copy_from_slice(&head.0[HEADER_BYTES..]);
        let (header, ethernet) = (&mut header[..header_bytes], &mut ethernet[..]);
        let behind = header_bytes + ethernet.len();
        let Giving { memory, pieces, .. } = self;
        pieces.copy(memory, 0, &VolatileSlice::from(header), false)?;
        pieces.copy(memory, header_bytes, &VolatileSlice::from(ethernet), false)?;
        pieces.copy(memory, behind, rest, false)
    }

    /// The guest sees all of a frame's buffers at once: the first tells how many they are.
    fn use_buffers(&mut self, bytes: usize) -> Result<()> {
        let (ring, mut left) = (&mut *self.ring, bytes);
        let first = ring.next_used();
        let Some((&(last, _), before)) = self.pieces.buffers.split_last() else { return Ok(()) };
        for (nth, &(buffer, holds)) in before.iter().enumerate() {
            let used = holds.min(left);
            left -= used;
            let at = u64::from(first.wrapping_add(nth as u16) % ring.size());
            let place = ring.used_ring().checked_add(4 + at * 8).context(BROKEN)?;
            let entry = [buffer.into(), used as u32].map(u32::to_le_bytes);
            self.memory.write_slice(entry.as_flattened(), GuestAddress(place)).context(BROKEN)?;
        }
        ring.set_next_used(first.wrapping_add(before.len() as u16));
        ring.add_used(self.memory, last, left as u32).context(BROKEN)
    }
}

impl VhostUserBackend for Guest {
    type Bitmap = ();
    type Vring = Vring;

    fn num_queues(&self) -> usize {
        RINGS
    }

    fn max_queue_size(&self) -> usize {
        RING_MOST
    }

    fn features(&self) -> u64 {
        FEATURES | VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits()
    }

    fn acked_features(&self, features: u64) {
        self.features.store(features, Ordering::Relaxed);
    }

    fn protocol_features(&self) -> VhostUserProtocolFeatures {
        VhostUserProtocolFeatures::REPLY_ACK
    }

    fn reset_device(&self) {
        *lock(&self.line) = None;
    }

    fn set_event_idx(&self, _: bool) {}

    fn update_memory(&self, _: GuestMemoryAtomic<GuestMemoryMmap>) -> io::Result<()> {
        Ok(())
    }

    fn exit_event(&self, _: usize) -> Option<(EventConsumer, EventNotifier)> {
        let (consumer, notifier) =
            new_event_consumer_and_notifier(EventFlag::NONBLOCK | EventFlag::CLOEXEC).ok()?;
        *lock(&self.exit) = Some(consumer.as_raw_fd());
        Some((consumer, notifier))
    }

    fn stop_vring(&self, _: u32) -> io::Result<()> {
        *lock(&self.line) = None;
        Ok(())
    }

    fn handle_event(&self, event: u16, _: EventSet, vrings: &[Vring], _: usize) -> io::Result<()> {
        ENDING.with_borrow_mut(|ending| {
            ending.get_or_insert_with(|| Ending(Weak::clone(&self.this)));
        });
        if u64::from(event) == AGAIN {
            let _ = rustix::io::read(&self.again, &mut [0; 8]);
        }
        if let Err(error) = self.go(vrings) {
            (self.back.tell)(format!("the guest's connection is ended: {error:#}"));
            *lock(&self.line) = None;
            self.back.end_guest();
        }
        Ok(())
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        // SAFETY: the framework has taken this number out of the object that owned it (`into_raw_fd`), has stopped to use it with its threads, which
        // hold us, and closes it never.
        #[allow(unsafe_code)]
        drop(lock(&self.exit).take().map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }));
    }
}
