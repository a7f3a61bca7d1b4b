//! A rail on libfabric: one reliable-datagram endpoint of a provider, in the node service only.
//!
//! The library is loaded when the first rail is opened. What its headers have inline is a call through a table in an object's head (`abi`).
//!
//! All that an operation refers to (its context, the buffer of a message) lies in one `Arena`, by a slot that is free, or the provider's. A provider may use
//! memory of an operation until it has completed, or the endpoint is closed. So the endpoint is closed first; the arena, and a region that is withdrawn,
//! are let go only when nothing of them is under way.

mod abi;
mod gate;
#[cfg(test)]
mod layout;
mod library;
mod sockets;

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::collections::{HashMap, VecDeque};
use std::ffi::{c_int, c_void};
use std::io;
use std::net::SocketAddr;
use std::os::fd::{BorrowedFd, RawFd};
use std::ptr::{self, NonNull};
use std::time::{Duration, Instant};

use abi::{Context, CqDataEntry, CqErrEntry, Fid};
pub use library::Provider;
use library::{Infos, Library, address, text};
use ringlet_core::layout::PAGE_BYTES;
use rustix::mm::{MapFlags, MremapFlags, ProtFlags, mmap_anonymous, mremap, munmap};

use crate::rail::{Event, Grant, MESSAGE_BYTES, Peer, Rail, Refused, Region};

/// Slots: for messages that come, that go, and for writes.
const RECEIVES: usize = 256;
const SENDS: usize = 128;
const WRITES: usize = 512;
const SLOTS: usize = RECEIVES + SENDS + WRITES;
/// Slots with a buffer are the first ones.
const BUFFERS: usize = RECEIVES + SENDS;

/// What one `poll` takes from the completion queue: so many at once, so many times.
const ENTRIES: usize = 32;
const READS: usize = 8;
/// Outcomes that are kept while `withdraw` waits for others.
const OUTCOMES_MOST: usize = 16 * SLOTS;
/// How long `withdraw` waits for writes from the region, before it gives up the peers that don't take them.
const PATIENCE: Duration = Duration::from_millis(100);
/// How long a peer may refuse all, before that is not for want of room: a provider tries for ever to connect to who is dead.
const SILENCE: Duration = Duration::from_secs(5);
/// How long a provider may take to close connections that have ended, before the endpoint is closed all the same. (The other rails stand still meanwhile, where
/// one fails; and strangers can make it take as long.)
const CLOSING: Duration = Duration::from_millis(250);
/// Providers that listen to TCP.
const LISTENERS: [&str; 3] = ["tcp", "net", "sockets"];
/// Names are as short as addresses are.
const NAME_BYTES: usize = 256;

/// What a rail can be opened on here.
pub fn providers() -> io::Result<Vec<Provider>> {
    Library::get()?.providers()
}

/// Calls an entry of the table `ops` of an object; no entry is as a function that is not implemented.
macro_rules! call {
    ($object:expr, $($table:ident).+, $entry:ident, $($argument:expr),*) => {
        match (*(*$object).$($table).+).$entry {
            Some(function) => function($($argument),*),
            // ENOSYS, of whichever width.
            None => -38,
        }
    };
}

/// An object of libfabric's, whose first field is its `Fid`: closed when dropped.
struct Owned<T>(*mut T);

impl<T> Owned<T> {
    /// `make` puts the object where it is told to, or returns an error.
    fn new(
        library: &Library,
        name: &str,
        make: impl FnOnce(*mut *mut T) -> c_int,
    ) -> io::Result<Owned<T>> {
        let mut made = ptr::null_mut();
        match make(&raw mut made) {
            0 if !made.is_null() => Ok(Owned(made)),
            code => Err(library.error(name, code as isize)),
        }
    }

    fn fid(&self) -> *mut Fid {
        self.0.cast()
    }

    /// False if it could not be closed.
    fn close(&mut self) -> bool {
        if self.0.is_null() {
            return true;
        }
        // SAFETY: not closed yet; what was made of it is closed before it (the order of fields), or makes the call fail.
        let closed = unsafe { call!(self.fid(), ops, close, self.fid()) } == 0;
        if closed {
            self.0 = ptr::null_mut();
        }
        closed
    }
}

impl<T> Drop for Owned<T> {
    fn drop(&mut self) {
        self.close();
    }
}

/// Contexts of all slots, then the buffers.
struct Arena(NonNull<u8>);

impl Arena {
    const LAYOUT: Layout = match Layout::from_size_align(
        (SLOTS * size_of::<Context>()).next_multiple_of(4096) + BUFFERS * MESSAGE_BYTES,
        4096,
    ) {
        Ok(layout) => layout,
        Err(_) => panic!(),
    };

    fn new() -> Arena {
        // SAFETY: it has a size.
        let at = unsafe { alloc_zeroed(Arena::LAYOUT) };
        Arena(NonNull::new(at).unwrap_or_else(|| handle_alloc_error(Arena::LAYOUT)))
    }

    fn context(&self, slot: usize) -> *mut c_void {
        assert!(slot < SLOTS);
        // SAFETY: within the arena.
        unsafe { self.0.as_ptr().add(slot * size_of::<Context>()) }.cast()
    }

    fn buffer(&self, slot: usize) -> *mut u8 {
        assert!(slot < BUFFERS);
        let buffers = Arena::LAYOUT.size() - BUFFERS * MESSAGE_BYTES;
        // SAFETY: within the arena.
        unsafe { self.0.as_ptr().add(buffers + slot * MESSAGE_BYTES) }
    }

    /// Whose context this is; of what comes from elsewhere, none.
    fn slot(&self, context: *mut c_void) -> Option<usize> {
        let offset = (context as usize).checked_sub(self.0.as_ptr() as usize)?;
        let slot = offset / size_of::<Context>();
        (slot < SLOTS && offset.is_multiple_of(size_of::<Context>())).then_some(slot)
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // SAFETY: allocated so; the endpoint is closed, or the arena is leaked (`Libfabric::drop`).
        unsafe { dealloc(self.0.as_ptr(), Arena::LAYOUT) };
    }
}

#[derive(Clone, Copy)]
enum Slot {
    Free,
    /// A receive is posted, or a message lies in the buffer.
    Receive,
    Send {
        token: u64,
        peer: Peer,
    },
    Write {
        token: u64,
        peer: Peer,
        region: Region,
    },
}

/// What has completed, and is not told yet.
enum Outcome {
    Done { token: u64 },
    Failed { token: u64, error: io::Error },
    Noticed { notice: u32 },
    Message { slot: usize, bytes: usize },
    Broken(io::Error),
}

/// A peer, as libfabric has it.
struct Way {
    address: u64,
    /// Where it is, if that is an Internet address.
    at: Option<SocketAddr>,
    /// Operations to it that are under way.
    under_way: usize,
    /// Since when it has been refused, though none is.
    refused: Option<Instant>,
}

/// A second mapping of memory that is registered: what the provider has.
///
/// A provider in software checks a key when a write begins, and puts down all of it as it comes, also after the registration has been closed. So at the
/// end there is other memory in this place, for what is late; it stays until the endpoint is closed.
struct Alias {
    start: *mut c_void,
    bytes: usize,
    /// From a page's start to that of the memory.
    shift: usize,
}

impl Alias {
    /// # Safety
    /// Mapped, and shared.
    unsafe fn new(at: *mut u8, bytes: usize) -> io::Result<Alias> {
        let shift = at as usize % PAGE_BYTES;
        let whole =
            bytes.checked_add(shift).and_then(|bytes| bytes.checked_next_multiple_of(PAGE_BYTES));
        let bytes = whole.filter(|&bytes| bytes > 0).ok_or(io::ErrorKind::InvalidInput)?;
        // KERNEL: from an old size of 0 shared memory is mapped once more; of private memory that is an error (mremap(2)).
        // SAFETY: the memory is mapped, and stays as it is.
        let start = unsafe { mremap(at.sub(shift).cast(), 0, bytes, MremapFlags::MAYMOVE) }?;
        Ok(Alias { start, bytes, shift })
    }

    fn at(&self) -> *mut u8 {
        // SAFETY: within the mapping.
        unsafe { self.start.cast::<u8>().add(self.shift) }
    }

    /// What is written here from now on is nobody's.
    fn cut(&self) -> io::Result<()> {
        let flags = MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::NORESERVE;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: instead of a mapping of our own, to which there are no references.
        unsafe { mmap_anonymous(self.start, self.bytes, access, flags) }.map(drop)?;
        Ok(())
    }
}

impl Drop for Alias {
    fn drop(&mut self) {
        // SAFETY: our own; the endpoint is closed, or it was never registered.
        let _ = unsafe { munmap(self.start, self.bytes) };
    }
}

struct Memory {
    mr: Owned<abi::Mr>,
    alias: Alias,
    bytes: usize,
    /// Writes from it that are under way.
    writes: usize,
}

/// Fields are dropped from the first to the last: each object before those that it was made of.
pub struct Libfabric {
    endpoint: Owned<abi::Endpoint>,
    regions: HashMap<u32, Memory>,
    /// Of regions that were withdrawn.
    cut: Vec<Alias>,
    /// Of the arena, if the provider asks for it.
    buffers: Option<Owned<abi::Mr>>,
    av: Owned<abi::Av>,
    cq: Owned<abi::Cq>,
    domain: Owned<abi::Domain>,
    fabric: Owned<abi::Fabric>,
    info: Infos,
    loaded: &'static Library,
    arena: std::mem::ManuallyDrop<Arena>,

    /// Behind an Internet address with what opens the `gate`.
    name: Vec<u8>,
    ours: Option<SocketAddr>,
    /// To TCP, past the gate.
    listens: bool,
    fd: RawFd,
    /// Their numbers are not used again.
    peers: HashMap<u32, Way>,
    next_peer: u32,
    next_region: u32,
    slots: [Slot; SLOTS],
    /// Free slots of each kind.
    receives: Vec<usize>,
    sends: Vec<usize>,
    writes: Vec<usize>,
    outcomes: VecDeque<Outcome>,
    is_broken: bool,
}

// SAFETY: one thread at a time uses the domain and what is of it, which FI_THREAD_DOMAIN asks for; which one does not matter.
unsafe impl Send for Libfabric {}

impl Libfabric {
    /// An endpoint of a provider, at a local address (or in a domain by its name).
    ///
    /// # Errors
    /// The library is missing, or the provider is not known, or can't do what a rail needs: the text says what there is.
    pub fn open(provider: &str, local: Option<&str>) -> io::Result<Libfabric> {
        let library = Library::get()?;
        let Some(info) = library.infos(Some(provider), local)? else {
            return Err(unknown(library, provider, local));
        };
        // (By now it has loaded its providers, before any of them listens.)
        let listens = LISTENERS.iter().any(|core| provider.split(';').any(|it| it == *core));
        if !gate::install() && listens {
            let text = format!("{provider}: strangers could not be kept out of what it listens to");
            return Err(io::Error::new(io::ErrorKind::Unsupported, text));
        }
        let at = info.first();
        // SAFETY: `getinfo` made it, with all its parts.
        let (domain_attr, fabric_attr, ready) =
            unsafe { (&*(*at).domain_attr, (*at).fabric_attr, (*(*at).rx_attr).size) };

        let fabric = Owned::new(library, "fi_fabric", |made| {
            // SAFETY: the provider's own attributes.
            unsafe { (library.fabric)(fabric_attr, made, ptr::null_mut()) }
        })?;
        let domain = Owned::new(library, "fi_domain", |made| {
            // SAFETY: the fabric is open, and the information is of it.
            unsafe { call!(fabric.0, ops, domain, fabric.0, at, made, ptr::null_mut()) }
        })?;
        let mut attr = abi::CqAttr {
            size: 2 * SLOTS,
            flags: 0,
            format: abi::CQ_FORMAT_DATA,
            wait_obj: abi::WAIT_FD,
            signaling_vector: 0,
            wait_cond: 0,
            wait_set: ptr::null_mut(),
        };
        let cq = Owned::new(library, "fi_cq_open", |made| {
            // SAFETY: the domain is open.
            unsafe { call!(domain.0, ops, cq_open, domain.0, &raw mut attr, made, ptr::null_mut()) }
        })?;
        let mut attr = abi::AvAttr {
            kind: if domain_attr.av_type == abi::AV_MAP { abi::AV_MAP } else { abi::AV_TABLE },
            rx_ctx_bits: 0,
            count: 64,
            ep_per_node: 0,
            name: ptr::null(),
            map_addr: ptr::null_mut(),
            flags: 0,
        };
        let av = Owned::new(library, "fi_av_open", |made| {
            // SAFETY: the domain is open.
            unsafe { call!(domain.0, ops, av_open, domain.0, &raw mut attr, made, ptr::null_mut()) }
        })?;
        let endpoint = Owned::<abi::Endpoint>::new(library, "fi_endpoint", |made| {
            // SAFETY: the domain is open, and the information is of it.
            unsafe { call!(domain.0, ops, endpoint, domain.0, at, made, ptr::null_mut()) }
        })?;
        let mut fd: c_int = -1;
        let steps: [(&str, &dyn Fn() -> c_int); 3] = [
            ("fi_ep_bind (completion queue)", &|| {
                // SAFETY: both are open; all completions go there.
                unsafe {
                    let flags = abi::SEND | abi::RECV;
                    call!(endpoint.fid(), ops, bind, endpoint.fid(), cq.fid(), flags)
                }
            }),
            ("fi_ep_bind (address vector)", &|| {
                // SAFETY: both are open.
                unsafe { call!(endpoint.fid(), ops, bind, endpoint.fid(), av.fid(), 0) }
            }),
            ("fi_enable", &|| {
                // SAFETY: all is bound.
                unsafe {
                    let nothing = ptr::null_mut();
                    call!(endpoint.fid(), ops, control, endpoint.fid(), abi::ENABLE, nothing)
                }
            }),
        ];
        for (name, step) in steps {
            succeeds(library, name, step())?;
        }
        // SAFETY: the queue was opened with a descriptor; one is put there.
        let got =
            unsafe { call!(cq.fid(), ops, control, cq.fid(), abi::GETWAIT, (&raw mut fd).cast()) };
        if got != 0 || fd < 0 {
            let text = format!("{provider}: this provider has nothing to sleep on (code {got})");
            return Err(io::Error::new(io::ErrorKind::Unsupported, text));
        }
        let (mut name, mut bytes) = ([0; NAME_BYTES], NAME_BYTES);
        // SAFETY: so many bytes are there; it tells how many it has, which can be more.
        let got = unsafe {
            let to = name.as_mut_ptr().cast();
            call!(endpoint.0, cm, getname, endpoint.fid(), to, &raw mut bytes)
        };
        succeeds(library, "fi_getname", got)?;
        let mut name = name.get(..bytes).ok_or(io::ErrorKind::InvalidData)?.to_vec();
        if address(&name).is_some_and(|address| address.is_unspecified()) {
            let text = "this provider has no address of its own: name a local one";
            return Err(io::Error::new(io::ErrorKind::AddrNotAvailable, text));
        }

        // SAFETY: made by `getinfo`, with all its parts.
        let format = unsafe { (*at).addr_format };
        let ours = socket_address(format, &name);
        if let Some(ours) = ours {
            name.extend(gate::open(ours)?);
        }

        let needs_registered = domain_attr.mr_mode & abi::MR_LOCAL != 0;
        let mut rail = Libfabric {
            endpoint,
            regions: HashMap::new(),
            cut: Vec::new(),
            buffers: None,
            av,
            cq,
            domain,
            fabric,
            info,
            loaded: library,
            arena: std::mem::ManuallyDrop::new(Arena::new()),
            name,
            ours,
            listens,
            fd,
            peers: HashMap::new(),
            next_peer: 0,
            next_region: 0,
            slots: [Slot::Free; SLOTS],
            receives: (0..RECEIVES.min(ready)).collect(),
            sends: (RECEIVES..BUFFERS).collect(),
            writes: (BUFFERS..SLOTS).collect(),
            outcomes: VecDeque::new(),
            is_broken: false,
        };
        if needs_registered {
            let access = abi::SEND | abi::RECV;
            let (at, bytes) = (rail.arena.buffer(0), BUFFERS * MESSAGE_BYTES);
            // SAFETY: the arena stays until the endpoint is closed.
            rail.buffers = Some(unsafe { rail.register_memory(at, bytes, access) }?);
        }
        rail.post();
        match rail.outcomes.pop_front() {
            Some(Outcome::Broken(error)) => Err(error),
            _ => Ok(rail),
        }
    }

    fn info(&self) -> &abi::Info {
        // SAFETY: made by `getinfo`, ours until it is dropped; nobody changes it.
        unsafe { &*self.info.first() }
    }

    fn mr_mode(&self) -> c_int {
        // SAFETY: a part of it.
        unsafe { (*self.info().domain_attr).mr_mode }
    }

    /// Where it is mapped once more, too.
    ///
    /// # Safety
    /// As `Rail::register`.
    unsafe fn enter(
        &mut self,
        at: *mut u8,
        bytes: usize,
        access: u64,
    ) -> io::Result<(Region, *mut u8)> {
        if self.is_broken {
            return Err(io::Error::new(io::ErrorKind::BrokenPipe, "the rail has failed"));
        }
        // SAFETY: mapped and shared, as the caller promises.
        let alias = unsafe { Alias::new(at, bytes) }?;
        let at = alias.at();
        // SAFETY: it stays mapped until the endpoint is closed.
        let mr = unsafe { self.register_memory(at, bytes, access) }?;
        let number = self.next_region;
        self.next_region = number.checked_add(1).ok_or(io::ErrorKind::OutOfMemory)?;
        self.regions.insert(number, Memory { mr, alias, bytes, writes: 0 });
        Ok((Region(number), at))
    }

    /// # Safety
    /// The memory stays mapped until it is closed.
    unsafe fn register_memory(
        &self,
        at: *mut u8,
        bytes: usize,
        access: u64,
    ) -> io::Result<Owned<abi::Mr>> {
        // SAFETY: a part of it.
        let key_bytes = unsafe { (*self.info().domain_attr).mr_key_size };
        let mut failed = io::Error::from(io::ErrorKind::AlreadyExists);
        // (A key may be taken already, where they are short.)
        for _ in 0..8 {
            let mut key = [0_u8; 8];
            let random = key_bytes.min(key.len());
            // SAFETY: so many bytes are there.
            if unsafe { libc::getrandom(key.as_mut_ptr().cast(), random, 0) } != random as isize {
                return Err(io::Error::last_os_error());
            }
            let (key, domain) = (u64::from_le_bytes(key), self.domain.0);
            let mr = Owned::new(self.loaded, "fi_mr_reg", |made| {
                let (from, context) = (at.cast(), ptr::null_mut());
                // SAFETY: the domain is open; the memory stays, as the caller promises.
                unsafe {
                    call!(
                        domain,
                        mr,
                        reg,
                        domain.cast(),
                        from,
                        bytes,
                        access,
                        0,
                        key,
                        0,
                        made,
                        context
                    )
                }
            });
            let mr = match mr {
                Ok(mr) => mr,
                Err(error) => {
                    failed = error;
                    continue;
                }
            };
            if self.mr_mode() & abi::MR_ENDPOINT != 0 {
                // SAFETY: both are open.
                let bound = unsafe { call!(mr.fid(), ops, bind, mr.fid(), self.endpoint.fid(), 0) };
                succeeds(self.loaded, "fi_mr_bind", bound)?;
                let nothing = ptr::null_mut();
                // SAFETY: it is bound.
                let enabled =
                    unsafe { call!(mr.fid(), ops, control, mr.fid(), abi::ENABLE, nothing) };
                succeeds(self.loaded, "fi_mr_enable", enabled)?;
            }
            return Ok(mr);
        }
        Err(failed)
    }

    fn broken(&self) -> Refused {
        Refused::Failed(io::Error::new(io::ErrorKind::BrokenPipe, "the rail has failed"))
    }

    fn peer(&self, peer: Peer) -> Result<u64, Refused> {
        if self.is_broken {
            return Err(self.broken());
        }
        let unknown = || Refused::Failed(io::Error::new(io::ErrorKind::NotFound, "no such peer"));
        self.peers.get(&peer.0).map(|way| way.address).ok_or_else(unknown)
    }

    /// What the provider returned instead of taking an operation.
    fn refused(&mut self, call: &str, peer: Peer, code: isize) -> Refused {
        if code != -(libc::EAGAIN as isize) {
            return Refused::Failed(self.loaded.error(call, code));
        }
        let now = Instant::now();
        let idle = self.peers.get_mut(&peer.0).filter(|way| way.under_way == 0);
        let since = idle.map_or(now, |way| *way.refused.get_or_insert(now));
        if now - since <= SILENCE {
            return Refused::Full;
        }
        Refused::Failed(io::Error::new(io::ErrorKind::TimedOut, "the peer can't be reached"))
    }

    fn leaves(&mut self, to: Peer) {
        if let Some(way) = self.peers.get_mut(&to.0) {
            way.under_way += 1;
            way.refused = None;
        }
    }

    /// An operation has completed, or failed. (Its peer may be forgotten by now.)
    fn arrived(&mut self, at: Peer) {
        if let Some(way) = self.peers.get_mut(&at.0) {
            way.under_way -= 1;
        }
    }

    /// Closes the endpoint. False if it could not be closed.
    ///
    /// ofi_rxm frees the endpoint below a connection before it takes what has come by it, for which it posts a new receive there (`rxm_close_conn`; mended
    /// in August 2026); and of a write of which half has come it then looks at an operation that is none (1.17). Either ends the process. A connection that
    /// its peer ends it closes rightly. So here all are ended first, as if by their peers.
    fn close_endpoint(&mut self) -> bool {
        if let Some(ours) = self.ours {
            let peers = self.peers.values().filter_map(|way| way.at).collect();
            let mut connections = sockets::Connections::new(ours, peers);
            let limit = Instant::now() + CLOSING;
            while connections.shut() && Instant::now() < limit {
                self.clear();
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        self.clear();
        self.endpoint.close()
    }

    /// Takes what is in the queue, which nobody will be told.
    fn clear(&mut self) {
        let mut entries = [const { std::mem::MaybeUninit::<CqDataEntry>::uninit() }; ENTRIES];
        let cq = self.cq.0;
        for _ in 0..2 * SLOTS {
            // SAFETY: there is room for so many, in the format that the queue was opened with.
            let count = unsafe { call!(cq, ops, read, cq, entries.as_mut_ptr().cast(), ENTRIES) };
            if count == -(abi::EAVAIL as isize) {
                // SAFETY: made of numbers and pointers.
                let mut entry = unsafe { std::mem::zeroed::<CqErrEntry>() };
                // SAFETY: an entry; the queue is open.
                unsafe { call!(cq, ops, readerr, cq, &raw mut entry, 0) };
            } else if count <= 0 {
                break;
            }
        }
    }

    /// Closes the endpoint: nothing is sent, written or received any more. All that was under way has failed.
    fn fail(&mut self, error: io::Error) {
        if self.is_broken {
            return;
        }
        self.is_broken = true;
        self.close_endpoint();
        for slot in &mut self.slots {
            let gone = || io::Error::new(error.kind(), error.to_string());
            match std::mem::replace(slot, Slot::Free) {
                Slot::Send { token, .. } => {
                    self.outcomes.push_back(Outcome::Failed { token, error: gone() });
                }
                Slot::Write { token, region, .. } => {
                    self.outcomes.push_back(Outcome::Failed { token, error: gone() });
                    self.regions.get_mut(&region.0).expect("in use").writes -= 1;
                }
                // A message that is not told yet keeps its buffer: the arena stays.
                Slot::Free | Slot::Receive => (),
            }
        }
        self.outcomes.push_back(Outcome::Broken(error));
    }

    /// Posts receives that are free.
    fn post(&mut self) {
        while !self.is_broken
            && let Some(slot) = self.receives.pop()
        {
            let (context, buffer) = (self.arena.context(slot), self.arena.buffer(slot));
            let endpoint = self.endpoint.0;
            let (desc, from) = (self.desc(), abi::ADDR_UNSPEC);
            // SAFETY: the slot was free: context and buffer are the provider's until it completes, or the endpoint is closed.
            let code = unsafe {
                let buffer = buffer.cast();
                call!(endpoint, msg, recv, endpoint, buffer, MESSAGE_BYTES, desc, from, context)
            };
            if code == 0 {
                self.slots[slot] = Slot::Receive;
                continue;
            }
            self.receives.push(slot);
            if code != -(libc::EAGAIN as isize) {
                self.fail(self.loaded.error("fi_recv", code));
            }
            return;
        }
    }

    /// What says to the provider that buffers are registered.
    fn desc(&self) -> *mut c_void {
        // SAFETY: open.
        self.buffers.as_ref().map_or(ptr::null_mut(), |mr| unsafe { (*mr.0).mem_desc })
    }

    /// Takes completions from the queue; false: there are none now.
    fn harvest(&mut self) -> bool {
        if self.is_broken {
            return false;
        }
        let mut entries = [const { std::mem::MaybeUninit::<CqDataEntry>::uninit() }; ENTRIES];
        let cq = self.cq.0;
        // SAFETY: there is room for so many, in the format that the queue was opened with.
        let count = unsafe { call!(cq, ops, read, cq, entries.as_mut_ptr().cast(), ENTRIES) };
        match usize::try_from(count) {
            Ok(count) => {
                for entry in &entries[..count.min(ENTRIES)] {
                    // SAFETY: the first ones were filled.
                    self.complete(unsafe { entry.assume_init_ref() });
                }
                count > 0
            }
            Err(_) if count == -(libc::EAGAIN as isize) => false,
            Err(_) if count == -(abi::EAVAIL as isize) => self.harvest_error(),
            Err(_) => {
                self.fail(self.loaded.error("fi_cq_read", count));
                true
            }
        }
    }

    fn complete(&mut self, entry: &CqDataEntry) {
        // A write of another's, which has no slot of ours. (One without a notice is nobody's.)
        let is_theirs = entry.flags & abi::REMOTE_WRITE != 0
            || entry.flags & (abi::RMA | abi::WRITE) == abi::RMA;
        if is_theirs {
            if entry.flags & abi::REMOTE_CQ_DATA != 0 {
                // (As wide as we send it; a stranger's can be wider.)
                self.outcomes.push_back(Outcome::Noticed { notice: entry.data as u32 });
            }
            return;
        }
        let Some(slot) = self.arena.slot(entry.op_context) else { return };
        match self.release(slot) {
            Slot::Free => (),
            Slot::Receive => {
                let bytes = entry.len.min(MESSAGE_BYTES);
                self.slots[slot] = Slot::Receive;
                self.outcomes.push_back(Outcome::Message { slot, bytes });
            }
            Slot::Send { token, .. } | Slot::Write { token, .. } => {
                self.outcomes.push_back(Outcome::Done { token });
            }
        }
    }

    /// What a slot was for. A receive is left out of the free ones.
    fn release(&mut self, slot: usize) -> Slot {
        let was = std::mem::replace(&mut self.slots[slot], Slot::Free);
        match was {
            Slot::Free | Slot::Receive => (),
            Slot::Send { peer, .. } => {
                self.sends.push(slot);
                self.arrived(peer);
            }
            Slot::Write { peer, region, .. } => {
                self.writes.push(slot);
                self.arrived(peer);
                self.regions.get_mut(&region.0).expect("in use").writes -= 1;
            }
        }
        was
    }

    fn harvest_error(&mut self) -> bool {
        // SAFETY: made of numbers and pointers; without room of ours for more, the provider shows its own.
        let mut entry = unsafe { std::mem::zeroed::<CqErrEntry>() };
        let cq = self.cq.0;
        // SAFETY: an entry; it is open.
        let count = unsafe { call!(cq, ops, readerr, cq, &raw mut entry, 0) };
        if count == -(libc::EAGAIN as isize) {
            return false;
        }
        if count < 0 {
            self.fail(self.loaded.error("fi_cq_readerr", count));
            return true;
        }
        // SAFETY: what the entry says, given back; the text is static, or the provider's until the next call.
        let more: Option<String> = unsafe {
            match (*(*cq).ops).strerror {
                Some(strerror) => {
                    text(strerror(cq, entry.prov_errno, entry.err_data, ptr::null_mut(), 0))
                }
                None => None,
            }
        };
        let error = self.loaded.error(more.as_deref().unwrap_or("completion"), entry.err as isize);
        let Some(slot) = self.arena.slot(entry.op_context) else { return true };
        match self.release(slot) {
            Slot::Free => (),
            // One message is lost: one that is too long, or whose sender died in the middle. No stranger ends the rail by that.
            Slot::Receive if entry.err != libc::ECANCELED => self.receives.push(slot),
            Slot::Receive => self.fail(error),
            Slot::Send { token, .. } | Slot::Write { token, .. } => {
                self.outcomes.push_back(Outcome::Failed { token, error });
            }
        }
        true
    }

    /// True once no write from the region is under way.
    fn settle(&mut self, region: Region) -> bool {
        let until = Instant::now() + PATIENCE;
        while self.regions.get(&region.0).is_some_and(|memory| memory.writes > 0) {
            if self.outcomes.len() >= OUTCOMES_MOST {
                return false;
            }
            if !self.harvest() {
                if Instant::now() > until {
                    return false;
                }
                std::thread::yield_now();
            }
        }
        true
    }
}

impl Rail for Libfabric {
    fn is_dear(&self) -> bool {
        self.listens
    }

    fn name(&self) -> &[u8] {
        &self.name
    }

    fn is_guarded(&self) -> bool {
        self.listens
    }

    fn reach(&mut self, name: &[u8]) -> io::Result<Peer> {
        let bad = |text: &str| io::Error::new(io::ErrorKind::InvalidInput, text);
        if self.is_broken {
            return Err(io::Error::new(io::ErrorKind::BrokenPipe, "the rail has failed"));
        }
        let is_fit = match self.info().addr_format {
            abi::ADDR_STR => {
                name.len() <= NAME_BYTES
                    && name.iter().position(|&byte| byte == 0) == name.len().checked_sub(1)
            }
            _ => name.len() == self.name.len(),
        };
        if !is_fit {
            return Err(bad("not a name of an endpoint of this provider"));
        }
        if let abi::SOCKADDR | abi::SOCKADDR_IN | abi::SOCKADDR_IN6 = self.info().addr_format {
            let address = parts(name).and_then(|(name, _)| address(name));
            let address = address.ok_or_else(|| bad("not an Internet address"))?;
            if name[..2] != self.name[..2] {
                return Err(bad("an address of another family"));
            }
            if name[2..4] == [0; 2] || address.is_unspecified() || address.is_multicast() {
                return Err(bad("not an endpoint's address"));
            }
            // Services that listen for this host alone.
            let is_elsewhere = self.ours.is_some_and(|ours| !ours.ip().is_loopback());
            if is_elsewhere && address.to_canonical().is_loopback() {
                return Err(bad("an address of this host alone"));
            }
        }
        let known = parts(name).and_then(|(address, secret)| {
            Some((socket_address(self.info().addr_format, address)?, *secret))
        });
        // A session has one way by this rail: another way that leads there is another session's, which a hostile one may want to cut.
        let at = known.map(|(at, _)| at);
        if at.is_some() && self.peers.values().any(|way| way.at == at) {
            return Err(bad("another peer's endpoint"));
        }
        if let Some((at, secret)) = known
            && !gate::learn(at, secret)
        {
            return Err(bad("an endpoint that is known by another secret"));
        }
        // As aligned as any address is, and longer.
        let mut copy = [0_u64; NAME_BYTES / 8];
        for (word, bytes) in copy.iter_mut().zip(name.chunks(8)) {
            let mut whole = [0; 8];
            whole[..bytes.len()].copy_from_slice(bytes);
            *word = u64::from_ne_bytes(whole);
        }
        let (av, mut peer) = (self.av.0, abi::ADDR_UNSPEC);
        // SAFETY: one name, of the length that the format has.
        let count = unsafe {
            call!(av, ops, insert, av, copy.as_ptr().cast(), 1, &raw mut peer, 0, ptr::null_mut())
        };
        if count != 1 || peer == abi::ADDR_UNSPEC {
            at.into_iter().for_each(gate::forget);
            return Err(match count {
                ..0 => self.loaded.error("fi_av_insert", count as isize),
                _ => bad("the provider does not take this name"),
            });
        }
        let number = self.next_peer;
        let Some(next) = number.checked_add(1) else {
            at.into_iter().for_each(gate::forget);
            return Err(io::ErrorKind::OutOfMemory.into());
        };
        self.next_peer = next;
        self.peers.insert(number, Way { address: peer, at, under_way: 0, refused: None });
        Ok(Peer(number))
    }

    fn forget(&mut self, peer: Peer) {
        let Some(mut way) = self.peers.remove(&peer.0) else { return };
        way.at.into_iter().for_each(gate::forget);
        let av = self.av.0;
        // Two names of ours can be one of the provider's, which counts them. If it refuses, it keeps an address: no harm.
        // SAFETY: it was inserted, once for each of ours.
        unsafe { call!(av, ops, remove, av, &raw mut way.address, 1, 0) };
    }

    unsafe fn register(&mut self, at: *mut u8, bytes: usize) -> io::Result<(Region, Grant)> {
        // SAFETY: as the caller promises.
        let (region, at) = unsafe { self.enter(at, bytes, abi::WRITE | abi::REMOTE_WRITE) }?;
        // SAFETY: open.
        let key = unsafe { (*self.regions[&region.0].mr.0).key };
        if key == abi::KEY_NOTAVAIL {
            self.withdraw(region);
            return Err(io::Error::new(io::ErrorKind::Unsupported, "keys of more than 8 bytes"));
        }
        let is_virtual = self.mr_mode() & abi::MR_VIRT_ADDR != 0;
        Ok((region, Grant { key, base: if is_virtual { at as u64 } else { 0 } }))
    }

    unsafe fn register_source(&mut self, at: *mut u8, bytes: usize) -> io::Result<Region> {
        // SAFETY: as the caller promises.
        unsafe { self.enter(at, bytes, abi::WRITE) }.map(|(region, _)| region)
    }

    fn withdraw(&mut self, region: Region) {
        if !self.settle(region) {
            // Peers that don't take what is written to them: without them it fails.
            let peers: Vec<Peer> = self
                .slots
                .iter()
                .filter_map(|slot| match slot {
                    Slot::Write { peer, region: from, .. } if *from == region => Some(*peer),
                    _ => None,
                })
                .collect();
            peers.into_iter().for_each(|peer| self.forget(peer));
            if !self.settle(region) {
                let text = "a write could not be taken back from memory that was withdrawn";
                self.fail(io::Error::new(io::ErrorKind::TimedOut, text));
            }
        }
        let Some(mut memory) = self.regions.remove(&region.0) else { return };
        let closed = memory.mr.close();
        let Memory { alias, .. } = memory;
        if !closed || alias.cut().is_err() {
            // Without an endpoint nothing arrives either.
            self.fail(io::Error::other("memory could not be withdrawn"));
        }
        self.cut.push(alias);
    }

    fn write(
        &mut self,
        to: Peer,
        from: Region,
        at: usize,
        bytes: usize,
        grant: Grant,
        offset: u64,
        notice: u32,
        token: u64,
    ) -> Result<(), Refused> {
        let peer = self.peer(to)?;
        // SAFETY: a part of it.
        let most = unsafe { (*self.info().ep_attr).max_msg_size };
        let bad = |text: &str| Refused::Failed(io::Error::new(io::ErrorKind::InvalidInput, text));
        let memory = self.regions.get_mut(&from.0).ok_or_else(|| bad("no such region"))?;
        if at.checked_add(bytes).is_none_or(|end| end > memory.bytes) || bytes > most {
            return Err(bad("not within the region"));
        }
        let Some(slot) = self.writes.pop() else { return Err(Refused::Full) };
        let (endpoint, context) = (self.endpoint.0, self.arena.context(slot));
        // SAFETY: the slot was free, and the memory is within a region, which `withdraw` leaves registered until the write has completed.
        let code = unsafe {
            let (desc, data) = ((*memory.mr.0).mem_desc, u64::from(notice));
            let (source, target) =
                (memory.alias.at().add(at).cast(), grant.base.wrapping_add(offset));
            call!(
                endpoint, rma, writedata, endpoint, source, bytes, desc, data, peer, target,
                grant.key, context
            )
        };
        if code != 0 {
            self.writes.push(slot);
            return Err(self.refused("fi_writedata", to, code));
        }
        memory.writes += 1;
        self.slots[slot] = Slot::Write { token, peer: to, region: from };
        self.leaves(to);
        Ok(())
    }

    fn send(&mut self, to: Peer, message: &[u8], token: u64) -> Result<(), Refused> {
        let peer = self.peer(to)?;
        if message.len() > MESSAGE_BYTES {
            let text = "too long for a message";
            return Err(Refused::Failed(io::Error::new(io::ErrorKind::InvalidInput, text)));
        }
        let Some(slot) = self.sends.pop() else { return Err(Refused::Full) };
        let (endpoint, context) = (self.endpoint.0, self.arena.context(slot));
        let (buffer, desc) = (self.arena.buffer(slot), self.desc());
        // SAFETY: the slot was free: its buffer is ours until the provider has it, and then its own until it completes.
        let code = unsafe {
            ptr::copy_nonoverlapping(message.as_ptr(), buffer, message.len());
            let from = buffer.cast();
            call!(endpoint, msg, send, endpoint, from, message.len(), desc, peer, context)
        };
        if code != 0 {
            self.sends.push(slot);
            return Err(self.refused("fi_send", to, code));
        }
        self.slots[slot] = Slot::Send { token, peer: to };
        self.leaves(to);
        Ok(())
    }

    fn poll(&mut self, tell: &mut dyn FnMut(Event<'_>)) {
        for _ in 0..READS {
            self.post();
            let is_dry = self.outcomes.is_empty() && !self.harvest();
            while let Some(outcome) = self.outcomes.pop_front() {
                match outcome {
                    Outcome::Done { token } => tell(Event::Done { token }),
                    Outcome::Failed { token, error } => tell(Event::Failed { token, error }),
                    Outcome::Noticed { notice } => tell(Event::Noticed { notice }),
                    Outcome::Broken(error) => tell(Event::Broken(error)),
                    Outcome::Message { slot, bytes } => {
                        // SAFETY: its receive has completed, so that nobody writes there until it is posted again, after this.
                        tell(Event::Message(unsafe {
                            std::slice::from_raw_parts(self.arena.buffer(slot), bytes)
                        }));
                        self.slots[slot] = Slot::Free;
                        self.receives.push(slot);
                    }
                }
            }
            if is_dry {
                break;
            }
        }
        self.post();
    }

    fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the queue's own, which is open for as long as we are.
        unsafe { BorrowedFd::borrow_raw(self.fd) }
    }

    fn may_sleep(&mut self) -> bool {
        if !self.outcomes.is_empty() {
            return false;
        }
        if self.is_broken {
            return true;
        }
        let (fabric, mut fids) = (self.fabric.0, [self.cq.fid()]);
        // SAFETY: one object of this fabric, opened with a descriptor.
        let code = unsafe { call!(fabric, ops, trywait, fabric, fids.as_mut_ptr(), 1) };
        code == 0
    }
}

impl Drop for Libfabric {
    fn drop(&mut self) {
        // What is bound to the endpoint goes before it.
        if self.mr_mode() & abi::MR_ENDPOINT != 0 {
            for memory in self.regions.values_mut() {
                memory.mr.close();
            }
            self.buffers = None;
        }
        self.peers.values().filter_map(|way| way.at).for_each(gate::forget);
        self.ours.into_iter().for_each(gate::close);
        // What a provider may still use is not freed.
        if self.is_broken && self.endpoint.close() || self.close_endpoint() {
            // SAFETY: not used any more, and dropped once.
            unsafe { std::mem::ManuallyDrop::drop(&mut self.arena) };
        } else {
            std::mem::forget((std::mem::take(&mut self.regions), std::mem::take(&mut self.cut)));
        }
    }
}

/// A name with a secret behind it.
fn parts(name: &[u8]) -> Option<(&[u8], &gate::Secret)> {
    name.split_last_chunk()
}

/// The Internet address in what a provider calls an endpoint.
fn socket_address(format: u32, name: &[u8]) -> Option<SocketAddr> {
    let formats = [abi::SOCKADDR, abi::SOCKADDR_IN, abi::SOCKADDR_IN6];
    let address = formats.contains(&format).then(|| address(name))??;
    Some(SocketAddr::new(address, u16::from_be_bytes([name[2], name[3]])))
}

fn succeeds(library: &Library, call: &str, code: c_int) -> io::Result<()> {
    if code == 0 { Ok(()) } else { Err(library.error(call, code as isize)) }
}

fn unknown(library: &'static Library, provider: &str, local: Option<&str>) -> io::Error {
    let mut text = format!("libfabric has no provider {provider:?} that can carry a rail");
    if let Some(local) = local {
        text += &format!(" at {local:?}");
    }
    text += "; there are:";
    for known in library.providers().unwrap_or_default() {
        text += &format!(" {:?} in {}", known.provider, known.domain);
        if let Some(address) = known.address {
            text += &format!(" ({address})");
        }
        text += ",";
    }
    io::Error::new(io::ErrorKind::NotFound, text.trim_end_matches(',').to_owned())
}
