//! Who is there, as data: the process with its bundles, their endpoints, and what a handler is given; each guarded as it says. They know each
//! other, so they lie together; what is done with them is above.

use super::lane::{Bells, Lane, Mapping, wake};
use super::message::Error;
use super::name::Name;
use super::statistics::Statistics;
use crate::guarded::Guarded;
use crate::native::hosts;
use parking_lot::{Mutex, ReentrantMutex, ReentrantMutexGuard};
use ringlet_core::active::layout::{BUFFER_BYTES, BUNDLES, Bell, LANES};
use ringlet_core::active::message::TAG_NONE;
use ringlet_core::active::{Call, Gate, Returned, SegmentMemory, Status, Tag};
use ringlet_linux::fd;
use std::cell::{Cell, RefCell, UnsafeCell};
use std::collections::{HashMap, VecDeque};
use std::os::fd::{FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// Entries of a translation table, and of a handler table.
pub const TRANSLATIONS: usize = 1 << 20;
pub const HANDLERS: usize = 256;
/// Entries that a new endpoint's translation table may have.
pub(super) const TRANSLATIONS_AT_FIRST: usize = 256;

/// By the service thread, which otherwise does not run any more.
const FORGOTTEN_IN: Duration = Duration::from_secs(10);

pub type Handler = Arc<dyn Fn(&Incoming) + Send + Sync>;
pub type ErrorHandler = Arc<dyn Fn(&Endpoint, &Undeliverable) + Send + Sync>;

/// What the threads of a process share.
pub(super) struct Shared {
    pub identity: [u8; 16],
    pub user: u32,
    pub bells: Bells,
    pub bells_fd: OwnedFd,
    pub bundles: [OnceLock<BundleState>; BUNDLES],
    pub endpoints: Mutex<HashMap<u32, Arc<Endpoint>>>,
    /// Endpoints by the numbers by which they are known.
    pub known: Mutex<HashMap<u16, Arc<Endpoint>>>,
    /// Those that are offered to others' network namespaces, once for each name.
    pub offered: Mutex<Vec<u32>>,
    /// By bundles of which a handler runs: the one for which their thread waits.
    pub waits: Mutex<HashMap<usize, usize>>,
    /// A request for which there is no room is refused.
    pub interrupted: AtomicBool,
    pub next_endpoint: AtomicU32,
    pub next_lane: AtomicU64,
    pub commands: Mutex<Vec<Command>>,
    pub waker: OwnedFd,
}

/// From the program's threads.
pub(super) enum Command {
    Connect {
        endpoint: Arc<Endpoint>,
        lane: Arc<Lane>,
        segment: OwnedFd,
        since_ns: u64,
    },
    /// An endpoint that is known by a number, and where callers come for that.
    Known {
        endpoint: Arc<Endpoint>,
        listener: Guarded,
    },
    End {
        lane: u64,
        status: Status,
    },
    /// A lane with a wire; an endpoint that is offered by that name, whose callers come by that line; one that is freed.
    Carry {
        endpoint: Arc<Endpoint>,
        lane: Arc<Lane>,
    },
    Offer {
        endpoint: Arc<Endpoint>,
        name: String,
        node: Box<hosts::Node>,
        line: Guarded,
    },
    Freed {
        endpoint: u32,
    },
    /// For the peer's segment; who knows its tag gets it.
    Ask {
        lane: u64,
        tag: Tag,
    },
    Stop,
}

impl Shared {
    pub fn name(&self, endpoint: u32) -> Name {
        Name::new(self.identity, self.user, endpoint)
    }

    #[inline(always)]
    pub fn bundle(&self, index: usize) -> &BundleState {
        self.bundles[index].get_or_init(|| BundleState::new(index))
    }

    /// Refused to a handler whose own bundle is waited for by who has this one: they would wait for ever.
    #[inline]
    pub fn lock<'a>(&self, bundle: &'a BundleState) -> Result<Guard<'a>, Error> {
        match bundle.inner.try_lock() {
            Some(inner) => Ok(Guard { bundle, inner }),
            None => self.await_lock(bundle),
        }
    }

    #[cold]
    fn await_lock<'a>(&self, bundle: &'a BundleState) -> Result<Guard<'a>, Error> {
        let made = self.bundles.iter().filter_map(OnceLock::get);
        let ours: Vec<usize> = made
            .filter(|each| each.inner.is_owned_by_current_thread())
            .map(|each| each.index)
            .collect();
        if ours.is_empty() {
            return Ok(bundle.lock());
        }
        let mut waits = self.waits.lock();
        let mut next = Some(&bundle.index);
        while let Some(index) = next {
            if ours.contains(index) {
                return Err(Error::InHandler);
            }
            // (They are no circle, so this ends: who would close one is refused.)
            next = waits.get(index);
        }
        waits.extend(ours.iter().map(|index| (*index, bundle.index)));
        drop(waits);
        let guard = bundle.lock();
        let mut waits = self.waits.lock();
        waits.retain(|index, _| !ours.contains(index));
        Ok(guard)
    }

    pub fn lane_id(&self) -> u64 {
        self.next_lane.fetch_add(1, Ordering::Relaxed)
    }

    pub fn command(&self, command: Command) {
        self.commands.lock().push(command);
        fd::ring(raw(&self.waker));
    }

    /// An endpoint is not known by its numbers any more, nor by the names by which it is offered.
    pub fn forget(&self, endpoint: u32) {
        self.known.lock().retain(|_, each| each.id != endpoint);
        self.offered.lock().retain(|id| *id != endpoint);
    }

    /// Waits until an endpoint that is freed is not known any more by its number and names, which then are another one's to have.
    pub fn await_unknown(&self, endpoint: u32) {
        let is_known = || {
            self.known.lock().values().any(|each| each.id == endpoint)
                || self.offered.lock().contains(&endpoint)
        };
        for _ in 0..FORGOTTEN_IN.as_millis() {
            if !is_known() {
                break;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// A lane is of no use any more: the peer is told, if it does not know.
    pub fn lane_ended(&self, lane: &Arc<Lane>, status: Status) {
        self.command(Command::End { lane: lane.id, status });
    }
}

/// Owns a descriptor that was just made.
#[allow(unsafe_code)]
pub(super) fn own(fd: i32) -> OwnedFd {
    // SAFETY: the caller was given it by the kernel, and keeps no other copy.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

pub(super) fn raw(fd: &OwnedFd) -> i32 {
    std::os::fd::AsRawFd::as_raw_fd(fd)
}

// ---- bundles ----

/// A lane that is watched.
pub(super) struct Hot {
    pub endpoint: Arc<Endpoint>,
    pub lane: Arc<Lane>,
    pub idle: Cell<u32>,
    pub served: Cell<u32>,
    pub left: Cell<bool>,
}

pub(super) struct Attached {
    pub endpoint: Arc<Endpoint>,
    pub lane: Arc<Lane>,
}

/// What the lock guards. Nothing is borrowed while a handler runs but for reading.
pub(super) struct Inner {
    pub endpoints: RefCell<Vec<Arc<Endpoint>>>,
    /// By the number of their bit.
    pub lanes: RefCell<Vec<Option<Attached>>>,
    pub hot: RefCell<Vec<Hot>>,
    pub returned: RefCell<VecDeque<(Arc<Endpoint>, Undelivered)>>,
    /// A handler runs.
    pub handling: Cell<bool>,
    pub empty: Cell<u32>,
    pub swept: Cell<usize>,
    /// Where a medium message's bytes are while its handler runs.
    pub scratch: Box<[Cell<u8>]>,
}

/// One of a process's bundles, whether in use or not.
pub(super) struct BundleState {
    pub index: usize,
    pub used: AtomicBool,
    pub mask: AtomicU32,
    /// The service thread has something for us: new lanes, or ends of lanes.
    pub news: AtomicBool,
    /// Threads that sleep, or are about to: then no lane is watched by others alone.
    pub sleepers: AtomicU32,
    pub inner: ReentrantMutex<Inner>,
}

/// Shows that its bundle is locked.
pub(super) struct Guard<'a> {
    pub bundle: &'a BundleState,
    pub inner: ReentrantMutexGuard<'a, Inner>,
}

impl BundleState {
    pub fn new(index: usize) -> BundleState {
        BundleState {
            index,
            used: AtomicBool::new(false),
            mask: AtomicU32::new(0),
            news: AtomicBool::new(false),
            sleepers: AtomicU32::new(0),
            inner: ReentrantMutex::new(Inner {
                endpoints: RefCell::default(),
                lanes: RefCell::default(),
                hot: RefCell::default(),
                returned: RefCell::default(),
                handling: Cell::new(false),
                empty: Cell::new(0),
                swept: Cell::new(0),
                scratch: vec![Cell::new(0); BUFFER_BYTES].into_boxed_slice(),
            }),
        }
    }

    #[inline]
    pub fn lock(&self) -> Guard<'_> {
        Guard { bundle: self, inner: self.inner.lock() }
    }

    /// From any thread: look at the inboxes and the stages.
    pub fn tell(&self, bell: &Bell) {
        // ORDER: SeqCst: before the look at the sleeper; pairs with the swap in `bundle::take_news`.
        self.news.store(true, Ordering::SeqCst);
        wake(bell);
    }
}

impl Guard<'_> {
    /// Handlers may reply, and ask; nothing else.
    pub fn outside(&self) -> Result<(), Error> {
        if self.inner.handling.get() { Err(Error::InHandler) } else { Ok(()) }
    }

    /// Gives a lane its bit. False when the bundle has no more.
    pub fn attach(&self, endpoint: &Arc<Endpoint>, lane: &Arc<Lane>) -> bool {
        let mut lanes = self.inner.lanes.borrow_mut();
        let free = lanes.iter().position(Option::is_none).unwrap_or(lanes.len());
        if free >= LANES {
            return false;
        }
        let attached = Attached { endpoint: endpoint.clone(), lane: lane.clone() };
        if free == lanes.len() {
            lanes.push(Some(attached));
        } else {
            lanes[free] = Some(attached);
        }
        lane.set_bell(self.bundle.index, free);
        drop(lanes);
        self.watch(free);
        true
    }

    /// Takes away those lanes for which `gone` says so.
    pub fn detach(&self, mut gone: impl FnMut(&Attached) -> bool) -> Vec<Attached> {
        let mut taken = Vec::new();
        for place in self.inner.lanes.borrow_mut().iter_mut() {
            if place.as_ref().is_some_and(&mut gone) {
                taken.extend(place.take());
            }
        }
        let is_taken = |hot: &Hot| taken.iter().any(|each| Arc::ptr_eq(&each.lane, &hot.lane));
        self.inner.hot.borrow_mut().retain(|hot| !is_taken(hot));
        taken
    }

    /// Watches a lane from now on.
    pub fn watch(&self, number: usize) {
        let lanes = self.inner.lanes.borrow();
        let Some(Some(Attached { endpoint, lane })) = lanes.get(number) else { return };
        let mut hot = self.inner.hot.borrow_mut();
        if !hot.iter().any(|each| Arc::ptr_eq(&each.lane, lane)) {
            let (endpoint, lane) = (endpoint.clone(), lane.clone());
            let zero = || Cell::new(0);
            let left = Cell::new(false);
            hot.push(Hot { endpoint, lane, idle: zero(), served: zero(), left });
        }
    }

    pub fn handle(&self, run: impl FnOnce()) {
        self.inner.handling.set(true);
        run();
        self.inner.handling.set(false);
    }

    /// Valid for `BUFFER_BYTES`, until the next medium message.
    pub fn scratch(&self) -> *mut u8 {
        self.inner.scratch.as_ptr().cast::<u8>().cast_mut()
    }
}

// ---- endpoints ----

/// A message that came back, and whom it was for (unless nobody was named).
pub(super) struct Undelivered {
    pub returned: Returned,
    pub peer: Option<Name>,
}

#[derive(Clone)]
pub(super) struct Translation {
    pub name: Name,
    pub tag: Tag,
    pub lane: RefCell<Option<Arc<Lane>>>,
    /// It names the endpoint itself.
    pub own: bool,
}

/// What the lock of the endpoint's bundle guards.
pub(super) struct State {
    pub gate: Cell<Gate>,
    pub segment: Cell<*mut u8>,
    /// The segment's memory, if it is ours.
    pub own: RefCell<Option<Mapping>>,
    pub handlers: RefCell<Vec<Option<Handler>>>,
    pub error: RefCell<ErrorHandler>,
    pub translations: RefCell<Vec<Option<Translation>>>,
    /// How many there may be.
    pub capacity: Cell<usize>,
    pub statistics: RefCell<Statistics>,
    pub lanes: RefCell<HashMap<Name, Vec<Arc<Lane>>>>,
    /// Peers that can't come back, and why.
    pub gone: RefCell<HashMap<Name, Status>>,
}

pub struct Endpoint {
    pub(super) shared: Arc<Shared>,
    pub(super) id: u32,
    pub(super) bundle: AtomicUsize,
    pub(super) inbox: Mutex<Vec<Arc<Lane>>>,
    /// For the service thread: the segment that peers with the endpoint's tag may have.
    pub(super) open: Mutex<Open>,
    state: UnsafeCell<State>,
}

#[allow(unsafe_code)]
// SAFETY: `state` is reached only with the lock of the bundle that the endpoint belongs to (`Endpoint::state`), and belongs to
// another one only after both locks were held; what it holds may be used by any one thread at a time.
unsafe impl Sync for Endpoint {}
#[allow(unsafe_code)]
// SAFETY: `state` is reached with its bundle's lock only; the segment's address is used only as the program that set it has promised.
unsafe impl Send for Endpoint {}

/// In no bundle.
const FREED: usize = usize::MAX;

/// A segment that peers may map, and what they must know.
#[derive(Default)]
pub(super) struct Open {
    pub tag: Tag,
    pub generation: u8,
    pub memory: Option<OwnedFd>,
}

impl Endpoint {
    pub(super) fn new(
        shared: Arc<Shared>,
        id: u32,
        bundle: usize,
        error: ErrorHandler,
    ) -> Endpoint {
        let gate = Gate { tag: TAG_NONE, segment: 0, generation: 0, handlers: [0; 4] };
        let state = State {
            gate: Cell::new(gate),
            segment: Cell::new(std::ptr::null_mut()),
            own: RefCell::default(),
            handlers: RefCell::new(vec![None; HANDLERS]),
            error: RefCell::new(error),
            translations: RefCell::default(),
            capacity: Cell::new(TRANSLATIONS_AT_FIRST),
            statistics: RefCell::default(),
            lanes: RefCell::default(),
            gone: RefCell::default(),
        };
        let (bundle, inbox) = (AtomicUsize::new(bundle), Mutex::default());
        let open = Mutex::default();
        Endpoint { shared, id, bundle, inbox, open, state: UnsafeCell::new(state) }
    }

    /// Locks the endpoint's bundle.
    #[inline]
    pub(super) fn enter(&self) -> Result<(Guard<'_>, &BundleState), Error> {
        loop {
            let index = self.bundle.load(Ordering::Acquire);
            if index == FREED {
                return Err(Error::Freed);
            }
            let bundle = self.shared.bundle(index);
            let guard = self.shared.lock(bundle)?;
            if self.bundle.load(Ordering::Relaxed) == index {
                return Ok((guard, bundle));
            }
        }
    }

    /// `None` if the guard is not that of the endpoint's bundle.
    #[inline(always)]
    #[allow(unsafe_code)]
    pub(super) fn state<'g>(&'g self, guard: &'g Guard) -> Option<&'g State> {
        let ours = self.bundle.load(Ordering::Relaxed) == guard.bundle.index;
        // SAFETY: the bundle is locked by this thread as long as the guard lives, and the endpoint can't leave it meanwhile but
        // by this thread, outside of handlers. All fields are cells, so more than one reference in this thread does no harm.
        ours.then(|| unsafe { &*self.state.get() })
    }

    pub(super) fn with<R>(&self, f: impl FnOnce(&State) -> R) -> Result<R, Error> {
        let (guard, _) = self.enter()?;
        self.state(&guard).map(f).ok_or(Error::Freed)
    }

    /// The bundle's number; `None` when freed.
    pub(super) fn bundle(&self) -> Option<usize> {
        // ORDER: SeqCst; pairs with `set_bundle`: either the service thread finds the new bundle, or that one's `BundleState::news` is set
        // after its inbox was filled.
        Some(self.bundle.load(Ordering::SeqCst)).filter(|index| *index != FREED)
    }

    pub(super) fn set_bundle(&self, bundle: Option<usize>) {
        self.bundle.store(bundle.unwrap_or(FREED), Ordering::SeqCst);
    }

    /// From the service thread: a connection that a peer has opened.
    pub(super) fn put(&self, lane: Arc<Lane>) {
        self.inbox.lock().push(lane);
        self.tell();
    }

    pub(super) fn tell(&self) {
        while let Some(index) = self.bundle() {
            self.shared.bundle(index).tell(self.shared.bells.of(index));
            if self.bundle() == Some(index) {
                break;
            }
        }
    }

    pub(super) fn take_inbox(&self) -> Vec<Arc<Lane>> {
        std::mem::take(&mut self.inbox.lock())
    }
}

// ---- handlers ----

/// A lane while its messages are delivered.
pub(super) struct Handled<'a> {
    pub guard: &'a Guard<'a>,
    pub endpoint: &'a Arc<Endpoint>,
    pub state: &'a State,
    pub lane: &'a Lane,
}

/// A message in its handler.
pub struct Incoming<'a> {
    pub(super) call: &'a Call<'a, SegmentMemory>,
    pub(super) host: &'a Handled<'a>,
}

/// A message that came back.
pub struct Undeliverable<'a> {
    pub(super) returned: &'a Returned,
    pub(super) peer: Option<Name>,
}
