//! The rails of a process, each in its place. One is opened by a thread of its own: a device, or a network file system, may take any time for it.

use std::io::ErrorKind;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError, sync_channel};
use std::thread;

use anyhow::Context;
use ringlet_fabric::Node;
use ringlet_fabric::rail::{self, Grant, Rail, Refused, Region};
use ringlet_linux::fd;

use super::RailSettings;

pub(crate) type Opened = std::io::Result<Box<dyn Rail>>;
pub(crate) type Opens = fn(&RailSettings, &str) -> Opened;

pub(crate) struct Places {
    node: String,
    places: Vec<Place>,
    /// Opens them, and rings that bell.
    opens: Opens,
    bell: Arc<OwnedFd>,
}

struct Place {
    settings: RailSettings,
    is_open: bool,
    opening: Option<Receiver<Opened>>,
    /// That it can't be opened was said.
    is_said: bool,
}

impl Places {
    /// With a node that has none of them yet.
    pub fn new(
        node: String,
        rails: Vec<RailSettings>,
        opens: Opens,
    ) -> anyhow::Result<(Places, Node)> {
        let mut absent: Vec<Box<dyn Rail>> = Vec::new();
        for _ in &rails {
            absent.push(Box::new(Absent::new()?));
        }
        let bell = Arc::new(eventfd().context("an eventfd")?);
        let place = |settings| Place { settings, is_open: false, opening: None, is_said: false };
        let places = rails.into_iter().map(place).collect();
        Ok((Places { node, places, opens, bell }, Node::new(absent)))
    }

    /// Is readable when one has been opened, or could not be.
    pub fn bell(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }

    pub fn len(&self) -> usize {
        self.places.len()
    }

    pub fn is_open(&self, at: usize) -> bool {
        self.places[at].is_open
    }

    #[cfg(test)]
    pub fn is_opening(&self, at: usize) -> bool {
        self.places[at].opening.is_some()
    }

    /// Begins to open those that are not open, or are broken.
    pub fn open(&mut self, is_broken: impl Fn(usize) -> bool) {
        for (at, place) in self.places.iter_mut().enumerate() {
            if place.is_open && !is_broken(at) || place.opening.is_some() {
                continue;
            }
            place.is_open = false;
            let (to, opening) = sync_channel(1);
            let (settings, node, opens) = (place.settings.clone(), self.node.clone(), self.opens);
            let bell = self.bell.clone();
            let open = move || {
                let _ = to.send(opens(&settings, &node));
                fd::ring(bell.as_raw_fd());
            };
            // (If no thread can be started, one is tried to be again.)
            if thread::Builder::new().name("rail".into()).spawn(open).is_ok() {
                place.opening = Some(opening);
            }
        }
    }

    /// Those that have been opened, and where they belong; `log`: what is to be said of them.
    pub fn opened(&mut self, log: &mut dyn FnMut(&str)) -> Vec<(usize, Box<dyn Rail>)> {
        let _ = rustix::io::read(&self.bell, &mut [0u8; 8]);
        let mut all = Vec::new();
        for (at, place) in self.places.iter_mut().enumerate() {
            let opened = match place.opening.as_ref().map(Receiver::try_recv) {
                None | Some(Err(TryRecvError::Empty)) => continue,
                Some(Err(TryRecvError::Disconnected)) => Err(ErrorKind::Other.into()),
                Some(Ok(opened)) => opened,
            };
            place.opening = None;
            let text = place.settings.text();
            match opened {
                Ok(rail) => {
                    (place.is_open, place.is_said) = (true, false);
                    let unguarded = match rail.is_guarded() {
                        true => "",
                        false => {
                            "; no gate keeps strangers from this provider: whoever reaches its address is to be trusted"
                        }
                    };
                    log(&format!("rail {at} is open: {text}{unguarded}"));
                    all.push((at, rail));
                }
                Err(error) => {
                    if !std::mem::replace(&mut place.is_said, true) {
                        log(&format!("rail {at} can't be opened: {text}: {error}"));
                    }
                }
            }
        }
        all
    }
}

/// (It may take as long to close.)
pub(crate) fn close_apart(rail: Box<dyn Rail>) {
    let _ = thread::Builder::new().name("rail".into()).spawn(move || drop(rail));
}

/// In the place of a rail that can't be opened (yet).
pub(super) struct Absent(pub OwnedFd);

impl Absent {
    pub fn new() -> anyhow::Result<Absent> {
        Ok(Absent(eventfd().context("an eventfd")?))
    }
}

impl Rail for Absent {
    fn name(&self) -> &[u8] {
        &[]
    }
    fn reach(&mut self, _: &[u8]) -> std::io::Result<rail::Peer> {
        Err(ErrorKind::NotConnected.into())
    }
    fn forget(&mut self, _: rail::Peer) {}
    #[allow(unsafe_code)]
    unsafe fn register(&mut self, _: *mut u8, _: usize) -> std::io::Result<(Region, Grant)> {
        Err(ErrorKind::NotConnected.into())
    }
    #[allow(unsafe_code)]
    unsafe fn register_source(&mut self, _: *mut u8, _: usize) -> std::io::Result<Region> {
        Err(ErrorKind::NotConnected.into())
    }
    fn withdraw(&mut self, _: Region) {}
    fn write(
        &mut self,
        _: rail::Peer,
        _: Region,
        _: usize,
        _: usize,
        _: Grant,
        _: u64,
        _: u32,
        _: u64,
    ) -> Result<(), Refused> {
        Err(Refused::Failed(ErrorKind::NotConnected.into()))
    }
    fn send(&mut self, _: rail::Peer, _: &[u8], _: u64) -> Result<(), Refused> {
        Err(Refused::Failed(ErrorKind::NotConnected.into()))
    }
    fn poll(&mut self, _: &mut dyn FnMut(rail::Event<'_>)) {}
    fn fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
    fn may_sleep(&mut self) -> bool {
        true
    }
}

pub(crate) fn eventfd() -> Option<OwnedFd> {
    // SAFETY: made just now, ours alone.
    fd::eventfd().ok().map(|fd| unsafe { OwnedFd::from_raw_fd(fd) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fabric::RailSettings;

    /// A rail of a provider past whose listening there is no gate.
    struct Open(Absent);

    impl Rail for Open {
        fn is_guarded(&self) -> bool {
            false
        }
        fn name(&self) -> &[u8] {
            self.0.name()
        }
        fn reach(&mut self, name: &[u8]) -> std::io::Result<rail::Peer> {
            self.0.reach(name)
        }
        fn forget(&mut self, _: rail::Peer) {}
        #[allow(unsafe_code)]
        unsafe fn register(&mut self, _: *mut u8, _: usize) -> std::io::Result<(Region, Grant)> {
            Err(ErrorKind::NotConnected.into())
        }
        #[allow(unsafe_code)]
        unsafe fn register_source(&mut self, _: *mut u8, _: usize) -> std::io::Result<Region> {
            Err(ErrorKind::NotConnected.into())
        }
        fn withdraw(&mut self, _: Region) {}
        fn write(
            &mut self,
            to: rail::Peer,
            from: Region,
            at: usize,
            bytes: usize,
            grant: Grant,
            offset: u64,
            notice: u32,
            token: u64,
        ) -> Result<(), Refused> {
            self.0.write(to, from, at, bytes, grant, offset, notice, token)
        }
        fn send(&mut self, to: rail::Peer, message: &[u8], token: u64) -> Result<(), Refused> {
            self.0.send(to, message, token)
        }
        fn poll(&mut self, _: &mut dyn FnMut(rail::Event<'_>)) {}
        fn fd(&self) -> BorrowedFd<'_> {
            self.0.fd()
        }
        fn may_sleep(&mut self) -> bool {
            true
        }
    }

    #[test]
    fn of_a_provider_without_a_gate_it_is_said() {
        for (provider, is_open) in [("verbs;ofi_rxm", true), ("tcp;ofi_rxm", false)] {
            let text = format!("{{\"provider\": \"{provider}\"}}");
            let settings: RailSettings = serde_json::from_str(&text).unwrap();
            let opens: Opens = |settings, _| {
                let absent = Absent::new().unwrap();
                Ok(match settings.provider.starts_with("verbs") {
                    true => Box::new(Open(absent)),
                    false => Box::new(absent),
                })
            };
            let (mut places, _node) = Places::new("a".into(), vec![settings], opens).unwrap();
            places.open(|_| false);
            let (mut said, mut opened) = (String::new(), Vec::new());
            while opened.is_empty() {
                let _ = rustix::event::poll(
                    &mut [rustix::event::PollFd::new(&places.bell, rustix::event::PollFlags::IN)],
                    None,
                );
                opened = places.opened(&mut |text| said += text);
            }
            assert_eq!(said.contains("no gate keeps strangers"), is_open, "{said}");
        }
    }
}
