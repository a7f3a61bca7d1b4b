//! An endpoint's tables: handlers, peers, its segment and its tag; and its end.

use super::lane::{Lane, Mapping};
use super::message::Error;
use super::name::Name;
use super::state::{
    Command, Endpoint, ErrorHandler, Guard, HANDLERS, Handler, State, TRANSLATIONS,
    TRANSLATIONS_AT_FIRST, Translation, Undeliverable, Undelivered, own, raw,
};
use super::statistics::Statistics;
use crate::guarded::Guarded;
use ringlet_core::active::message::{TAG_ALL, TAG_NONE};
use ringlet_core::active::{Gate, Status, Tag};
use ringlet_linux::sys::Errno;
use ringlet_linux::{map, meet};
use std::cell::RefCell;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::sync::Arc;

impl Endpoint {
    pub fn name(&self) -> Name {
        self.shared.name(self.id)
    }

    /// Ends the endpoint and its connections: its peers find that it does not exist. Its number is never used again.
    pub fn free(&self) -> Result<(), Error> {
        let (shared, (guard, _)) = (&self.shared, self.enter()?);
        guard.outside()?;
        shared.endpoints.lock().remove(&self.id);
        guard.inner.endpoints.borrow_mut().retain(|each| each.id != self.id);
        self.clear(&guard);
        self.set_bundle(None);
        let mut ended = guard.detach(|each| each.endpoint.id == self.id);
        let lanes = ended.drain(..).map(|each| each.lane).chain(self.take_inbox());
        for lane in lanes {
            lane.end(Status::BadEndpoint);
            shared.lane_ended(&lane, Status::BadEndpoint);
        }
        drop(guard);
        shared.command(Command::Freed { endpoint: self.id });
        shared.await_unknown(self.id);
        Ok(())
    }

    /// Gives back what its tables hold.
    fn clear(&self, guard: &Guard) {
        if let Some(state) = self.state(guard) {
            state.handlers.take();
            state.translations.take();
            state.lanes.take();
            state.gone.take();
            self.open.lock().memory = None;
            state.set_segment(std::ptr::null_mut(), 0, 0, None);
        }
    }

    /// Makes the endpoint known to this user's processes in this network namespace by a number, not 0, until it is freed (`Name::known`).
    pub fn make_known(self: &Arc<Self>, port: u16) -> Result<(), Error> {
        self.enter()?.0.outside()?;
        let listener =
            meet::offer_named(&Name::known(port).rendezvous()).map_err(|error| match error {
                Errno::EADDRINUSE => Error::InUse,
                _ => Error::NoResource,
            })?;
        let listener = Guarded::new(own(listener));
        self.shared.known.lock().insert(port, self.clone());
        self.shared.command(Command::Known { endpoint: self.clone(), listener });
        Ok(())
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

    /// Again as it was before there was one. Not from a handler.
    pub(super) fn clear_handler(&self, index: u8) -> Result<(), Error> {
        self.with(|state| {
            let mut handlers = state.handlers.try_borrow_mut().map_err(|_| Error::InHandler)?;
            handlers[index as usize] = None;
            let mut gate = state.gate.get();
            gate.handlers[index as usize / 64] &= !(1 << (index % 64));
            state.gate.set(gate);
            Ok(())
        })?
    }

    /// For messages that come back.
    pub fn set_error_handler(&self, handler: ErrorHandler) -> Result<(), Error> {
        self.with(|state| drop(state.error.replace(handler)))
    }

    /// The memory into which others may store; null and `usize::MAX` for all that the process has, where offsets are addresses.
    ///
    /// # Safety
    /// The memory is valid for writing until another segment is set (null for none) or the endpoint is freed, and nobody holds a
    /// reference to it while the bundle is polled.
    #[allow(unsafe_code)]
    pub unsafe fn set_segment(&self, base: *mut u8, bytes: usize) -> Result<(), Error> {
        self.with(|state| {
            let bytes = if base.is_null() && bytes != usize::MAX { 0 } else { bytes };
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

    /// Names a peer by a number below `translations`.
    pub fn map(&self, index: usize, name: Name, tag: Tag) -> Result<(), Error> {
        let own = name == self.name();
        self.with(|state| state.map(index, name, tag, own))?
    }

    /// The lowest free number.
    pub fn map_any(&self, name: Name, tag: Tag) -> Result<usize, Error> {
        let own = name == self.name();
        self.with(|state| {
            let table = state.translations.borrow();
            let index = table.iter().position(Option::is_none).unwrap_or(table.len());
            drop(table);
            if index >= state.capacity.get() {
                return Err(Error::NoResource);
            }
            state.map(index, name, tag, own).map(|()| index)
        })?
    }

    pub fn unmap(&self, index: usize) -> Result<(), Error> {
        self.with(|state| {
            let mut table = state.translations.borrow_mut();
            table.get_mut(index).and_then(Option::take).map(drop).ok_or(Error::BadArgument)
        })?
    }

    /// How many peers the translation table may hold.
    pub fn translations(&self) -> Result<usize, Error> {
        self.with(|state| state.capacity.get())
    }

    /// Changes that, up to `TRANSLATIONS`; what is mapped stays. Never less than a new endpoint's.
    pub fn set_translations(&self, count: usize) -> Result<(), Error> {
        let count = count.max(TRANSLATIONS_AT_FIRST);
        self.with(|state| {
            let mut table = state.translations.borrow_mut();
            if count > TRANSLATIONS || table.iter().skip(count).any(Option::is_some) {
                return Err(Error::NoResource);
            }
            table.truncate(count);
            state.capacity.set(count);
            Ok(())
        })?
    }

    /// The tag that messages to this number have from now on.
    pub fn set_translation_tag(&self, index: usize, tag: Tag) -> Result<(), Error> {
        self.with(|state| {
            let mut table = state.translations.borrow_mut();
            let found = table.get_mut(index).and_then(Option::as_mut);
            found.map(|translation| translation.tag = tag).ok_or(Error::NoResource)
        })?
    }

    pub fn statistics(&self) -> Result<Statistics, Error> {
        self.with(|state| *state.statistics.borrow())
    }

    pub fn reset_statistics(&self) -> Result<(), Error> {
        self.with(|state| *state.statistics.borrow_mut() = Statistics::default())
    }

    pub fn translation(&self, index: usize) -> Result<Option<(Name, Tag)>, Error> {
        self.with(|state| {
            let table = state.translations.borrow();
            table.get(index).and_then(|each| each.as_ref().map(|each| (each.name, each.tag)))
        })
    }

    pub(super) fn run_error(&self, guard: &Guard, what: &Undelivered) {
        let Some(state) = self.state(guard) else { return };
        state.statistics.borrow_mut().returned += 1;
        let handler = state.error.borrow().clone();
        let Undelivered { returned, peer } = what;
        handler(self, &Undeliverable { returned, peer: *peer });
    }
}

/// Unless the program takes care of what comes back, it is told of it: nothing is lost silently.
pub(super) fn say(endpoint: &Endpoint, what: &Undeliverable) {
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

    fn map(&self, index: usize, name: Name, tag: Tag, own: bool) -> Result<(), Error> {
        if index >= self.capacity.get() {
            return Err(Error::BadArgument);
        }
        let mut table = self.translations.borrow_mut();
        if table.len() <= index {
            table.resize(index + 1, None);
        }
        if table[index].is_some() {
            return Err(Error::InUse);
        }
        table[index] = Some(Translation { name, tag, lane: RefCell::default(), own });
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
        // (Another process may be known by that number then.)
        let can_return = lane.peer.port().is_some();
        if matches!(status, Status::Unreachable | Status::BadEndpoint) && !can_return {
            self.gone.borrow_mut().insert(lane.peer, status);
        }
    }
}
