//! An endpoint: its tables, its connections, and how its requests are sent.

use super::bundle::{BundleState, Guard};
use super::lane::{Lane, Mapping, Stage};
use super::process::{Shared, own, raw};
use super::{Error, Incoming, Name, Payload, Undeliverable};
use parking_lot::Mutex;
use ringlet_core::active::layout::BUFFER_BYTES;
use ringlet_core::active::message::{TAG_ALL, TAG_NONE};
use ringlet_core::active::{
    Arguments, Call, Gate, Head, Host, Kind, Message, Returned, SegmentMemory, Status, Tag,
};
use ringlet_linux::{map, sys};
use std::cell::{Cell, RefCell, UnsafeCell};
use std::collections::HashMap;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Entries of a translation table, and of a handler table.
pub const TRANSLATIONS: usize = 1 << 16;
pub const HANDLERS: usize = 256;

pub type Handler = Arc<dyn Fn(&Incoming) + Send + Sync>;
pub type ErrorHandler = Arc<dyn Fn(&Endpoint, &Undeliverable) + Send + Sync>;

/// A message that came back, and whom it was for (unless nobody was named).
pub(super) struct Undelivered {
    pub returned: Returned,
    pub peer: Option<Name>,
}

#[derive(Clone)]
struct Translation {
    name: Name,
    tag: Tag,
    lane: RefCell<Option<Arc<Lane>>>,
}

/// What the lock of the endpoint's bundle guards.
pub(super) struct State {
    gate: Cell<Gate>,
    segment: Cell<*mut u8>,
    /// The segment's memory, if it is ours.
    own: RefCell<Option<Mapping>>,
    handlers: RefCell<Vec<Option<Handler>>>,
    error: RefCell<ErrorHandler>,
    translations: RefCell<Vec<Option<Translation>>>,
    lanes: RefCell<HashMap<Name, Vec<Arc<Lane>>>>,
    /// Peers that can't come back, and why.
    gone: RefCell<HashMap<Name, Status>>,
}

pub struct Endpoint {
    pub(super) shared: Arc<Shared>,
    id: u32,
    bundle: AtomicUsize,
    inbox: Mutex<Vec<Arc<Lane>>>,
    /// For the service thread: the segment that peers with the endpoint's tag may have.
    open: Mutex<Open>,
    state: UnsafeCell<State>,
}

#[allow(unsafe_code)]
// SAFETY: `state` is reached only with the lock of the bundle that the endpoint belongs to (`Endpoint::state`), and belongs to
// another one only after both locks were held; what it holds may be used by any one thread at a time.
unsafe impl Sync for Endpoint {}
#[allow(unsafe_code)]
// SAFETY: as above; the segment's address is used only as the program that set it has promised.
unsafe impl Send for Endpoint {}

/// Tries of a request that finds no room, before it sleeps.
const SPINS: u32 = 256;
const YIELDS: u32 = 4;

/// In no bundle.
const FREED: usize = usize::MAX;

/// A segment that peers may map, and what they must know.
#[derive(Default)]
struct Open {
    tag: Tag,
    generation: u8,
    memory: Option<OwnedFd>,
}

enum Attempt {
    Done,
    /// No room on this connection yet, or it is only being made.
    Wait(Arc<Lane>),
}

impl Endpoint {
    pub(super) fn new(shared: Arc<Shared>, id: u32, bundle: usize) -> Endpoint {
        let gate = Gate { tag: TAG_NONE, segment: 0, generation: 0, handlers: [0; 4] };
        let state = State {
            gate: Cell::new(gate),
            segment: Cell::new(std::ptr::null_mut()),
            own: RefCell::default(),
            handlers: RefCell::new(vec![None; HANDLERS]),
            error: RefCell::new(Arc::new(say)),
            translations: RefCell::default(),
            lanes: RefCell::default(),
            gone: RefCell::default(),
        };
        let (bundle, inbox) = (AtomicUsize::new(bundle), Mutex::default());
        let open = Mutex::default();
        Endpoint { shared, id, bundle, inbox, open, state: UnsafeCell::new(state) }
    }

    pub fn name(&self) -> Name {
        self.shared.name(self.id)
    }

    pub(super) fn id(&self) -> u32 {
        self.id
    }

    /// Locks the endpoint's bundle.
    #[inline]
    fn enter(&self) -> Result<(Guard<'_>, &BundleState), Error> {
        loop {
            let index = self.bundle.load(Ordering::Acquire);
            if index == FREED {
                return Err(Error::Freed);
            }
            let bundle = self.shared.bundle(index);
            let guard = bundle.lock();
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

    fn with<R>(&self, f: impl FnOnce(&State) -> R) -> Result<R, Error> {
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

    /// Ends the endpoint and its connections: its peers find that it does not exist.
    pub fn free(&self) -> Result<(), Error> {
        self.shared.free(self)
    }

    /// Gives back what its tables hold.
    pub(super) fn clear(&self, guard: &Guard) {
        if let Some(state) = self.state(guard) {
            state.handlers.take();
            state.translations.take();
            state.lanes.take();
            state.gone.take();
            self.open.lock().memory = None;
            state.set_segment(std::ptr::null_mut(), 0, 0, None);
        }
    }

    pub fn tag(&self) -> Result<Tag, Error> {
        self.with(|state| state.gate.get().tag)
    }

    /// Only requests with this tag are let in; `TAG_ALL` lets all in, `TAG_NONE` (the first) none.
    pub fn set_tag(&self, tag: Tag) -> Result<(), Error> {
        self.with(|state| {
            self.open.lock().tag = tag;
            state.gate.set(Gate { tag, ..state.gate.get() });
        })
    }

    /// `index` 1 to 255. Not from a handler.
    pub fn set_handler(&self, index: u8, handler: Handler) -> Result<(), Error> {
        if index == 0 {
            return Err(Error::BadArgument);
        }
        self.with(|state| state.set_handler(index, handler))?
    }

    /// The lowest index without a handler.
    pub fn set_handler_any(&self, handler: Handler) -> Result<u8, Error> {
        self.with(|state| {
            let free = (1..HANDLERS).find(|index| state.handlers.borrow()[*index].is_none());
            let free = free.ok_or(Error::NoResource)? as u8;
            state.set_handler(free, handler).map(|()| free)
        })?
    }

    /// For messages that come back.
    pub fn set_error_handler(&self, handler: ErrorHandler) -> Result<(), Error> {
        self.with(|state| drop(state.error.replace(handler)))
    }

    /// The memory into which others may store.
    ///
    /// # Safety
    /// The memory is valid for writing until another segment is set (null for none) or the endpoint is freed, and nobody holds a
    /// reference to it while the bundle is polled.
    #[allow(unsafe_code)]
    pub unsafe fn set_segment(&self, base: *mut u8, bytes: usize) -> Result<(), Error> {
        self.with(|state| {
            let bytes = if base.is_null() { 0 } else { bytes };
            self.open.lock().memory = None;
            state.set_segment(base, bytes, 0, None);
        })
    }

    /// Makes a segment into which peers that know the endpoint's tag store by themselves, with one copy. It is theirs as well as
    /// ours until another one is set: they may write to it at any time.
    pub fn allocate_segment(&self, bytes: usize) -> Result<*mut u8, Error> {
        if bytes == 0 {
            return Err(Error::BadArgument);
        }
        let made = map::sealed_memfd(c"ringlet-am-segment", bytes, 0);
        let memory = own(made.map_err(|_| Error::NoResource)?);
        let mapping = Mapping::new(raw(&memory), bytes).ok_or(Error::NoResource)?;
        self.with(|state| {
            let base = mapping.area().base();
            let mut open = self.open.lock();
            open.generation = open.generation % u8::MAX + 1;
            open.memory = Some(memory);
            state.set_segment(base, bytes, open.generation, Some(mapping));
            base
        })
    }

    /// For a peer that knows the tag: the segment and its generation.
    pub(super) fn give_segment(&self, tag: Tag) -> Option<(OwnedFd, u8)> {
        let open = self.open.lock();
        let knows = open.tag == TAG_ALL || open.tag == tag && tag != TAG_NONE;
        let memory = open.memory.as_ref().filter(|_| knows)?.try_clone().ok()?;
        Some((memory, open.generation))
    }

    pub fn segment(&self) -> Result<(*mut u8, usize), Error> {
        self.with(|state| (state.segment.get(), state.gate.get().segment))
    }

    /// Names a peer by a number.
    pub fn map(&self, index: usize, name: Name, tag: Tag) -> Result<(), Error> {
        self.with(|state| state.map(index, name, tag))?
    }

    /// The lowest free number.
    pub fn map_any(&self, name: Name, tag: Tag) -> Result<usize, Error> {
        self.with(|state| {
            let table = state.translations.borrow();
            let index = table.iter().position(Option::is_none).unwrap_or(table.len());
            drop(table);
            state.map(index, name, tag).map(|()| index)
        })?
    }

    pub fn unmap(&self, index: usize) -> Result<(), Error> {
        self.with(|state| {
            let mut table = state.translations.borrow_mut();
            table.get_mut(index).and_then(Option::take).map(drop).ok_or(Error::BadArgument)
        })?
    }

    pub fn translation(&self, index: usize) -> Result<Option<(Name, Tag)>, Error> {
        self.with(|state| {
            let table = state.translations.borrow();
            table.get(index).and_then(|each| each.as_ref().map(|each| (each.name, each.tag)))
        })
    }

    /// Sends a request, and polls. Waits while there is no room, polling.
    #[inline]
    pub fn request(
        &self,
        index: usize,
        handler: u8,
        arguments: &[u32],
        payload: Payload,
    ) -> Result<(), Error> {
        self.send(index, payload.message(handler, arguments)?)
    }

    fn send(&self, index: usize, mut message: Message) -> Result<(), Error> {
        let mut tries = 0;
        loop {
            let (guard, bundle) = self.enter()?;
            guard.outside()?;
            let attempt = self.attempt(&guard, index, &mut message)?;
            let polled = guard.poll(&self.shared)?;
            drop(guard);
            let Attempt::Wait(lane) = attempt else { return Ok(()) };
            // A receiver that is awake makes room in less time than a sleep takes.
            if tries < SPINS {
                tries += 1;
                std::hint::spin_loop();
            } else if tries < SPINS + YIELDS {
                tries += 1;
                sys::sched_yield();
            } else if polled == 0 {
                bundle.wait(&self.shared, u64::MAX, |guard, sleeping| {
                    guard.pending(&self.shared) || lane.accepts(sleeping)
                });
            }
        }
    }

    /// Sends a request if it need not wait.
    pub fn try_request(
        &self,
        index: usize,
        handler: u8,
        arguments: &[u32],
        payload: Payload,
    ) -> Result<(), Error> {
        let mut message = payload.message(handler, arguments)?;
        let (guard, _) = self.enter()?;
        guard.outside()?;
        let attempt = self.attempt(&guard, index, &mut message)?;
        guard.poll(&self.shared)?;
        match attempt {
            Attempt::Done => Ok(()),
            Attempt::Wait(_) => Err(Error::NotSent),
        }
    }

    /// Need a request to this number not wait now?
    pub fn can_send(&self, index: usize) -> Result<bool, Error> {
        self.with(|state| state.can_send(index, false))
    }

    #[inline]
    fn attempt(
        &self,
        guard: &Guard,
        index: usize,
        message: &mut Message,
    ) -> Result<Attempt, Error> {
        let state = self.state(guard).ok_or(Error::Freed)?;
        let table = state.translations.borrow();
        let Some(Some(translation)) = table.get(index) else {
            self.give_back(guard, message, Status::BadEntry, None);
            return Ok(Attempt::Done);
        };
        let mut cached = translation.lane.borrow_mut();
        let lane = match &*cached {
            Some(lane) => lane,
            None => match self.connect(guard, state, translation.name) {
                Ok(lane) => cached.insert(lane),
                Err(status) => {
                    self.give_back(guard, message, status, Some(translation.name));
                    return Ok(Attempt::Done);
                }
            },
        };
        match lane.stage() {
            Stage::Open => {
                message.head.tag = translation.tag;
                // Not stored for a request that will wait.
                let has_room = || lane.connection.has_room(&lane.memory);
                let stored;
                let message = if message.head.kind == Kind::Bulk && has_room() {
                    stored = self.shared.stored(lane, *message);
                    &stored
                } else {
                    message
                };
                if lane.connection.request(&lane.memory, message).is_err() {
                    return Ok(Attempt::Wait(lane.clone()));
                }
                lane.notify();
                Ok(Attempt::Done)
            }
            Stage::Opening => Ok(Attempt::Wait(lane.clone())),
            Stage::Ended(status) => {
                self.give_back(guard, message, status, Some(translation.name));
                *cached = None;
                Ok(Attempt::Done)
            }
        }
    }

    /// The connection to a peer: one that is there, or a new one.
    #[cold]
    fn connect(&self, guard: &Guard, state: &State, peer: Name) -> Result<Arc<Lane>, Status> {
        if let Some(status) = state.gone.borrow().get(&peer) {
            return Err(*status);
        }
        if let Some(lanes) = state.lanes.borrow().get(&peer)
            && let Some(lane) = lanes.iter().find(|lane| !matches!(lane.stage(), Stage::Ended(_)))
        {
            return Ok(lane.clone());
        }
        let endpoints = guard.inner().endpoints.borrow();
        let this = endpoints.iter().find(|each| std::ptr::eq(&***each, self));
        let this = this.ok_or(Status::BadEndpoint)?;
        let lane = self.shared.connect(this, peer).ok_or(Status::Congestion)?;
        if !guard.attach(this, &lane) {
            lane.end(Status::Congestion);
            return Err(Status::Congestion);
        }
        state.know(&lane);
        Ok(lane)
    }

    #[cold]
    fn give_back(&self, guard: &Guard, message: &Message, status: Status, peer: Option<Name>) {
        let endpoints = guard.inner().endpoints.borrow();
        if let Some(this) = endpoints.iter().find(|each| std::ptr::eq(&***each, self)) {
            let returned = Returned { status, reply: false, head: message.head };
            let what = Undelivered { returned, peer };
            guard.inner().returned.borrow_mut().push_back((this.clone(), what));
        }
    }

    pub(super) fn run_error(&self, guard: &Guard, what: &Undelivered) {
        let Some(state) = self.state(guard) else { return };
        let handler = state.error.borrow().clone();
        let Undelivered { returned, peer } = what;
        handler(self, &Undeliverable { returned, peer: *peer });
    }
}

/// Unless the program takes care of what comes back, it is told of it: nothing is lost silently.
fn say(endpoint: &Endpoint, what: &Undeliverable) {
    // (Whoever reads that may have gone.)
    let _ = writeln!(
        std::io::stderr(),
        "ringlet: Active Message to handler {} of {:?} came back to endpoint {}: {:?}",
        what.handler(),
        what.peer(),
        endpoint.id,
        what.status()
    );
}

impl State {
    fn set_handler(&self, index: u8, handler: Handler) -> Result<(), Error> {
        // Borrowed while one of them runs.
        let mut handlers = self.handlers.try_borrow_mut().map_err(|_| Error::InHandler)?;
        handlers[index as usize] = Some(handler);
        let mut gate = self.gate.get();
        gate.handlers[index as usize / 64] |= 1 << (index % 64);
        self.gate.set(gate);
        Ok(())
    }

    /// Who is about to sleep asks to be woken.
    pub fn can_send(&self, index: usize, sleeping: bool) -> bool {
        let table = self.translations.borrow();
        let Some(Some(translation)) = table.get(index) else { return true };
        let lane = translation.lane.borrow();
        lane.as_ref().is_none_or(|lane| lane.accepts(sleeping))
    }

    fn map(&self, index: usize, name: Name, tag: Tag) -> Result<(), Error> {
        if index >= TRANSLATIONS {
            return Err(Error::BadArgument);
        }
        let mut table = self.translations.borrow_mut();
        if table.len() <= index {
            table.resize(index + 1, None);
        }
        if table[index].is_some() {
            return Err(Error::InUse);
        }
        table[index] = Some(Translation { name, tag, lane: RefCell::default() });
        Ok(())
    }

    fn set_segment(&self, base: *mut u8, bytes: usize, generation: u8, own: Option<Mapping>) {
        self.segment.set(base);
        self.own.replace(own);
        self.gate.set(Gate { segment: bytes, generation, ..self.gate.get() });
        for lane in self.lanes.borrow().values().flatten() {
            lane.set_generation(generation);
        }
    }

    pub fn know(&self, lane: &Arc<Lane>) {
        lane.set_generation(self.gate.get().generation);
        self.lanes.borrow_mut().entry(lane.peer).or_default().push(lane.clone());
    }

    /// A lane has ended. What can't be repaired is remembered.
    pub fn bury(&self, lane: &Arc<Lane>, status: Status) {
        let mut lanes = self.lanes.borrow_mut();
        if let Some(list) = lanes.get_mut(&lane.peer) {
            list.retain(|each| !Arc::ptr_eq(each, lane));
            if list.is_empty() {
                lanes.remove(&lane.peer);
            }
        }
        if matches!(status, Status::Unreachable | Status::BadEndpoint) {
            self.gone.borrow_mut().insert(lane.peer, status);
        }
    }
}

/// A lane while its messages are delivered.
pub(super) struct Handled<'a> {
    pub guard: &'a Guard<'a>,
    pub endpoint: &'a Arc<Endpoint>,
    pub state: &'a State,
    pub lane: &'a Lane,
}

#[allow(unsafe_code)]
// SAFETY: the gate's segment is what `set_segment` was promised to be writable; the scratch holds `BUFFER_BYTES`.
unsafe impl Host<SegmentMemory> for Handled<'_> {
    #[inline]
    fn gate(&self) -> Gate {
        self.state.gate.get()
    }

    #[inline]
    fn place(&self, head: &Head) -> *mut u8 {
        match head.kind {
            Kind::Bulk | Kind::Stored => {
                self.state.segment.get().wrapping_add(head.place() as usize)
            }
            Kind::Short | Kind::Medium => self.guard.scratch(),
        }
    }

    #[inline]
    fn run(&self, call: &Call<SegmentMemory>) {
        let handlers = self.state.handlers.borrow();
        if let Some(handler) = &handlers[call.head().handler as usize] {
            self.guard.run_handler(|| handler(&Incoming { call, host: self }));
        }
    }

    fn returned(&self, returned: &Returned) {
        let what = Undelivered { returned: *returned, peer: Some(self.lane.peer) };
        self.guard.inner().returned.borrow_mut().push_back((self.endpoint.clone(), what));
    }
}

impl<'a> Payload<'a> {
    #[inline(always)]
    pub(super) fn message(self, handler: u8, arguments: &[u32]) -> Result<Message<'a>, Error> {
        let (kind, bytes, offset) = match self {
            Payload::None => (Kind::Short, &[][..], 0),
            Payload::Medium(bytes) => (Kind::Medium, bytes, 0),
            Payload::Bulk { offset, bytes } => (Kind::Bulk, bytes, offset),
        };
        let arguments = Arguments::new(arguments).ok_or(Error::BadArgument)?;
        if bytes.len() > BUFFER_BYTES {
            return Err(Error::BadArgument);
        }
        let (tag, len) = (TAG_ALL, bytes.len());
        let head = Head { kind, handler, arguments, tag, len, offset };
        Ok(Message { head, bytes })
    }
}
