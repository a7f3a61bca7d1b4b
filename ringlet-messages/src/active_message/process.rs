//! A process that takes part, and its bundles.

use super::endpoint::say;
use super::lane::{Bells, Stage};
use super::message::Error;
use super::name::new_identity;
use super::service::Service;
use super::state::{BundleState, Command, Endpoint, Guard, Shared, own, raw};
use parking_lot::Mutex;
use ringlet_core::active::Status;
use ringlet_core::active::layout::{BELLS_BYTES, BUNDLES};
use ringlet_linux::{fd, map, sys};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;

/// This process as one that sends and receives Active Messages. Ends with the last handle: peers then find it unreachable.
pub struct Process {
    shared: Arc<Shared>,
    service: Option<JoinHandle<()>>,
}

/// A thread of ours: the program's signals are for the program's threads.
pub(super) fn thread(
    name: &str,
    run: impl FnOnce() + Send + 'static,
) -> std::io::Result<JoinHandle<()>> {
    let mask = sys::set_signal_mask(u64::MAX);
    let made = std::thread::Builder::new().name(name.into()).spawn(run);
    sys::set_signal_mask(mask);
    made
}

impl Process {
    pub fn start() -> Result<Process, Error> {
        let identity = new_identity().ok_or(Error::NoResource)?;
        let made = |fd: sys::Sys<i32>| fd.map(own).map_err(|_| Error::NoResource);
        let bells_fd = made(map::sealed_memfd(c"ringlet-am-bells", BELLS_BYTES, 0))?;
        let shared = Arc::new(Shared {
            identity,
            user: sys::geteuid(),
            bells: Bells::map(raw(&bells_fd)).ok_or(Error::NoResource)?,
            bells_fd,
            bundles: [const { OnceLock::new() }; BUNDLES],
            endpoints: Mutex::default(),
            known: Mutex::default(),
            offered: Mutex::default(),
            waits: Mutex::default(),
            interrupted: AtomicBool::new(false),
            next_endpoint: AtomicU32::new(0),
            next_lane: AtomicU64::new(0),
            commands: Mutex::default(),
            waker: made(fd::eventfd())?,
        });
        let service = Service::new(shared.clone()).map_err(|_| Error::NoResource)?;
        let service = thread("ringlet-am", move || service.run()).map_err(|_| Error::NoResource)?;
        let service = Some(service);
        Ok(Process { shared, service })
    }

    /// Wakes who waits for one of its bundles, to look at something else. From now on no request waits for room: whom it is for may not poll any more.
    pub fn interrupt(&self) {
        // ORDER: Relaxed; who is woken, and who tries again, finds it by the bundle's news.
        self.shared.interrupted.store(true, Ordering::Relaxed);
        // (Those that were never used are not made for this.)
        for bundle in self.shared.bundles.iter().filter_map(OnceLock::get) {
            if bundle.used.load(Ordering::Acquire) {
                bundle.tell(self.shared.bells.of(bundle.index));
            }
        }
    }

    /// A new bundle. Any thread may use it.
    pub fn bundle(&self) -> Result<Bundle, Error> {
        let free = (0..BUNDLES)
            .find(|&index| !self.shared.bundle(index).used.swap(true, Ordering::AcqRel));
        let index = free.ok_or(Error::NoResource)?;
        let (shared, closed) = (self.shared.clone(), AtomicBool::new(false));
        Ok(Bundle { shared, index, closed })
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let endpoints: Vec<_> = self.shared.endpoints.lock().values().cloned().collect();
        for endpoint in endpoints {
            // Not from a handler: a process does not end inside of one.
            let _ = endpoint.free();
        }
        self.shared.command(Command::Stop);
        if let Some(service) = self.service.take() {
            let _ = service.join();
        }
    }
}

/// Endpoints that are polled together. Freed, with its endpoints, when dropped.
pub struct Bundle {
    shared: Arc<Shared>,
    index: usize,
    closed: AtomicBool,
}

impl Bundle {
    fn state(&self) -> &BundleState {
        self.shared.bundle(self.index)
    }

    #[inline]
    fn lock(&self) -> Result<Guard<'_>, Error> {
        self.shared.lock(self.state())
    }

    /// A new endpoint, which lets nothing in until it has a tag.
    pub fn endpoint(&self) -> Result<Arc<Endpoint>, Error> {
        let guard = self.lock()?;
        guard.outside()?;
        let id = self.shared.next_endpoint.fetch_add(1, Ordering::Relaxed);
        let endpoint = Arc::new(Endpoint::new(self.shared.clone(), id, self.index, Arc::new(say)));
        self.shared.endpoints.lock().insert(id, endpoint.clone());
        guard.inner.endpoints.borrow_mut().push(endpoint.clone());
        Ok(endpoint)
    }

    /// Runs the handlers of what has arrived; returns how many.
    #[inline]
    pub fn poll(&self) -> Result<usize, Error> {
        self.lock()?.poll(&self.shared)
    }

    /// Waits until there is something for `poll`, or until one of `peers` (endpoint and number), to which there was no room, can be
    /// sent to; false if that took longer. Watches memory for a short while, then sleeps.
    pub fn wait(
        &self,
        limit: std::time::Duration,
        peers: &[(&Endpoint, usize)],
    ) -> Result<bool, Error> {
        self.lock()?.outside()?;
        let limit = u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX);
        Ok(self.state().wait(&self.shared, limit, |guard, sleeping| {
            let room = |(endpoint, index): &(&Endpoint, usize)| {
                endpoint.state(guard).is_some_and(|state| state.can_send(*index, sleeping))
            };
            guard.pending(&self.shared) || peers.iter().any(room)
        }))
    }

    /// Moves one of this bundle's endpoints to another bundle of the same process.
    pub fn move_endpoint(&self, endpoint: &Endpoint, to: &Bundle) -> Result<(), Error> {
        if endpoint.bundle() != Some(self.index) || !Arc::ptr_eq(&self.shared, &to.shared) {
            return Err(Error::BadArgument);
        }
        if self.index == to.index {
            return Ok(());
        }
        // In the order of their numbers, so that no two moves wait for each other.
        let [low, high] = [self.index.min(to.index), self.index.max(to.index)]
            .map(|index| self.shared.bundle(index));
        let (low, high) = loop {
            let low = self.shared.lock(low)?;
            low.outside()?;
            if let Ok(high) = self.shared.lock(high) {
                break (low, high);
            }
            // A handler of the higher one waits for the lower one: it goes first.
            drop(low);
            drop(self.shared.lock(high)?);
        };
        let (here, there) = if self.index < to.index { (&low, &high) } else { (&high, &low) };
        here.outside()?;
        there.outside()?;
        let this = |each: &&Arc<Endpoint>| each.id == endpoint.id;
        let found = here.inner.endpoints.borrow().iter().find(this).cloned();
        let endpoint = &found.ok_or(Error::BadArgument)?;
        let lanes = here.detach(|each| Arc::ptr_eq(&each.endpoint, endpoint));
        here.inner.endpoints.borrow_mut().retain(|each| !Arc::ptr_eq(each, endpoint));
        there.inner.endpoints.borrow_mut().push(endpoint.clone());
        let mut returned = here.inner.returned.borrow_mut();
        let all = std::mem::take(&mut *returned);
        let (moved, stay) = all.into_iter().partition(|each| Arc::ptr_eq(&each.0, endpoint));
        *returned = stay;
        there.inner.returned.borrow_mut().append(&mut { moved });
        endpoint.set_bundle(Some(to.index));
        for each in lanes {
            if !there.attach(endpoint, &each.lane) {
                each.lane.end(Status::Congestion);
            }
        }
        // Lanes that came, or ended, meanwhile.
        endpoint.tell();
        Ok(())
    }

    /// Frees its endpoints, and the bundle.
    pub fn close(&self) -> Result<(), Error> {
        let guard = self.lock()?;
        guard.outside()?;
        if !self.closed.swap(true, Ordering::AcqRel) {
            for endpoint in self.endpoints() {
                endpoint.free()?;
            }
            self.state().mask.store(0, Ordering::Relaxed);
            self.state().used.store(false, Ordering::Release);
        }
        Ok(())
    }

    pub fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    pub fn endpoints(&self) -> Vec<Arc<Endpoint>> {
        self.state().lock().inner.endpoints.borrow().clone()
    }

    /// For whoever keeps an event mask with the bundle.
    pub fn mask(&self) -> &AtomicU32 {
        &self.state().mask
    }

    /// How many of an endpoint's connections are open.
    pub fn connections(&self) -> usize {
        self.state().lock().count(|each| each.lane.stage() == Stage::Open)
    }
}

impl Drop for Bundle {
    fn drop(&mut self) {
        let _ = self.close();
    }
}
