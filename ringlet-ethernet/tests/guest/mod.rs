//! A guest, and QEMU, as far as a back end of vhost-user sees them: memory, two rings, and who drives them.
#![allow(dead_code)] // each of its users needs a part

use std::fs::File;
use std::io::Write;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use vhost::vhost_user::message::{VhostUserProtocolFeatures, VhostUserVirtioFeatures};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use vm_memory::{Bytes, FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryMmap};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

pub const VERSION_1: u64 = 1 << 32;
pub const EVENT_IDX: u64 = 1 << 29;
pub const INDIRECT: u64 = 1 << 28;
pub const MERGES: u64 = 1 << 15;
/// Checksums and segments, both ways.
pub const OFFLOADS: u64 = 0b11 | 0x7f80 & !(1 << 10 | 1 << 14) | 7 << 54;

pub const TO_GUEST: usize = 0;
pub const FROM_GUEST: usize = 1;
pub const SIZE: u16 = 64;
const MEMORY_BYTES: usize = 4 << 20;
const BUFFERS_AT: u64 = 1 << 20;
const SENT_AT: u64 = 3 << 20;
const NEXT: u16 = 1;
const WRITE: u16 = 2;
/// Only a fault meets it.
pub const LIMIT: Duration = Duration::from_secs(60);

/// Where a ring lies: its table of descriptors, what the guest gives, what it gets back.
pub struct Ring {
    pub table: u64,
    pub avail: u64,
    pub used: u64,
    pub given: u16,
    pub taken: u16,
    pub kick: EventFd,
    pub call: EventFd,
}

pub struct Guest {
    pub front: Frontend,
    pub memory: GuestMemoryMmap,
    pub rings: [Ring; 2],
    pub features: u64,
    /// How long each of its buffers is.
    buffer_bytes: usize,
}

/// Connects, and enables rings before there is a driver, as QEMU does.
fn front_end(path: &Path) -> Frontend {
    let mut stream = UnixStream::connect(path).unwrap();
    for ring in 0..2 {
        let message = [18, 1, 8, ring, 1].map(u32::to_ne_bytes);
        stream.write_all(message.as_flattened()).unwrap();
    }
    Frontend::from_stream(stream, 2)
}

impl Guest {
    /// Connects, and starts its driver, which gives so many buffers of so many bytes.
    pub fn start(path: &Path, features: u64, buffers: u16, buffer_bytes: usize) -> Guest {
        let fd = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&fd, MEMORY_BYTES as u64).unwrap();
        let range = (GuestAddress(0), MEMORY_BYTES, Some(FileOffset::new(File::from(fd), 0)));
        let memory = GuestMemoryMmap::from_ranges_with_files([range]).unwrap();
        let ring = |at: u64| Ring {
            table: at,
            avail: at + 0x4000,
            used: at + 0x8000,
            given: 0,
            taken: 0,
            kick: EventFd::new(EFD_NONBLOCK).unwrap(),
            call: EventFd::new(EFD_NONBLOCK).unwrap(),
        };
        let rings = [ring(0x10000), ring(0x20000)];
        let front = front_end(path);
        let mut guest = Guest { front, memory, rings, features, buffer_bytes };
        guest.connect();
        for number in 0..buffers {
            guest.give(number);
        }
        guest.kick(TO_GUEST);
        guest
    }

    /// What QEMU says when a driver is ready.
    fn connect(&mut self) {
        let front = &mut self.front;
        front.set_owner().unwrap();
        let offered = front.get_features().unwrap();
        assert_eq!(self.features & !offered, 0, "not offered");
        let protocol = VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits();
        front.set_features(self.features | protocol).unwrap();
        front.get_protocol_features().unwrap();
        front.set_protocol_features(VhostUserProtocolFeatures::REPLY_ACK).unwrap();
        let region = self.memory.iter().next().unwrap();
        let region = VhostUserMemoryRegionInfo::from_guest_region(region).unwrap();
        front.set_mem_table(&[region]).unwrap();
        for (number, ring) in self.rings.iter().enumerate() {
            let place = |at| region.userspace_addr + at;
            front.set_vring_num(number, SIZE).unwrap();
            let addresses = VringConfigData {
                queue_max_size: SIZE,
                queue_size: SIZE,
                flags: 0,
                desc_table_addr: place(ring.table),
                used_ring_addr: place(ring.used),
                avail_ring_addr: place(ring.avail),
                log_addr: None,
            };
            front.set_vring_addr(number, &addresses).unwrap();
            front.set_vring_base(number, ring.taken).unwrap();
            front.set_vring_call(number, &ring.call).unwrap();
            front.set_vring_kick(number, &ring.kick).unwrap();
        }
        (0..2).for_each(|number| front.set_vring_enable(number, true).unwrap());
    }

    /// The back end has gone, and is there again. (What was given and not used is given once more, as QEMU says.)
    pub fn connect_again(&mut self, path: &Path) {
        self.front = front_end(path);
        self.connect();
        self.kick(TO_GUEST);
    }

    pub fn header_bytes(&self) -> usize {
        if self.features & (VERSION_1 | MERGES) == 0 { 10 } else { 12 }
    }

    fn word(&self, at: u64) -> u16 {
        self.memory.load(GuestAddress(at), Ordering::Acquire).unwrap()
    }

    /// A descriptor: where, how long, flags and the next one.
    pub fn describe(&self, ring: usize, number: u16, at: u64, len: u32, flags: u16, next: u16) {
        let place = self.rings[ring].table + 16 * u64::from(number);
        let put = |value: &[u8], at| self.memory.write_slice(value, GuestAddress(at)).unwrap();
        put(&at.to_le_bytes(), place);
        put(&len.to_le_bytes(), place + 8);
        put(&flags.to_le_bytes(), place + 12);
        put(&next.to_le_bytes(), place + 14);
    }

    /// The driver has given a chain; `kick` tells.
    pub fn publish(&mut self, number: usize, head: u16) {
        let ring = &mut self.rings[number];
        let at = ring.avail + 4 + 2 * u64::from(ring.given % SIZE);
        self.memory.store(head, GuestAddress(at), Ordering::Relaxed).unwrap();
        ring.given = ring.given.wrapping_add(1);
        self.memory.store(ring.given, GuestAddress(ring.avail + 2), Ordering::Release).unwrap();
    }

    /// Tells the back end, if it wants to know.
    pub fn kick(&self, number: usize) {
        let ring = &self.rings[number];
        fence(Ordering::SeqCst);
        let wants = if self.features & EVENT_IDX != 0 {
            // (What was given with the last call at least; to tell too often is no fault.)
            let event = self.word(ring.used + 4 + 8 * u64::from(SIZE));
            ring.given.wrapping_sub(event).wrapping_sub(1) < SIZE
        } else {
            self.word(ring.used) & 1 == 0
        };
        if wants {
            ring.kick.write(1).unwrap();
        }
    }

    /// Gives one of the buffers in which frames come.
    pub fn give(&mut self, number: u16) {
        let at = BUFFERS_AT + u64::from(number) * self.buffer_bytes as u64;
        self.describe(TO_GUEST, number, at, self.buffer_bytes as u32, WRITE, 0);
        self.publish(TO_GUEST, number);
    }

    /// What was used: the chain, and how much was written; `None` if nothing is within that time.
    pub fn used(&mut self, number: usize, patience: Duration) -> Option<(u16, usize)> {
        let until = Instant::now() + patience;
        loop {
            let ring = &self.rings[number];
            // From now on it is to tell.
            let event = GuestAddress(ring.avail + 4 + 2 * u64::from(SIZE));
            self.memory.store(ring.taken, event, Ordering::SeqCst).unwrap();
            fence(Ordering::SeqCst);
            if self.word(ring.used + 2) != ring.taken {
                let at = ring.used + 4 + 8 * u64::from(ring.taken % SIZE);
                let [head, bytes]: [u32; 2] =
                    [0, 4].map(|more| self.memory.read_obj(GuestAddress(at + more)).unwrap());
                self.rings[number].taken = ring.taken.wrapping_add(1);
                return Some((head as u16, bytes as usize));
            }
            let left = until.checked_duration_since(Instant::now())?;
            let timeout = left.try_into().unwrap();
            // SAFETY: it is open as long as the ring is.
            let call = unsafe { BorrowedFd::borrow_raw(ring.call.as_raw_fd()) };
            let mut fds = [PollFd::from_borrowed_fd(call, PollFlags::IN)];
            poll(&mut fds, Some(&timeout)).unwrap();
            let _ = ring.call.read();
        }
    }

    /// Sends a frame, in pieces of so many bytes, and waits until it is taken.
    pub fn send(&mut self, header: &[u8; 10], frame: &[u8], piece_bytes: usize) {
        self.post(header, frame, piece_bytes);
        assert!(self.used(FROM_GUEST, LIMIT).is_some(), "a frame is not taken");
    }

    pub fn post(&mut self, header: &[u8; 10], frame: &[u8], piece_bytes: usize) {
        let mut message = header.to_vec();
        message.resize(self.header_bytes(), 0);
        message.extend_from_slice(frame);
        self.memory.write_slice(&message, GuestAddress(SENT_AT)).unwrap();
        let pieces = message.len().div_ceil(piece_bytes);
        assert!(pieces <= usize::from(SIZE));
        for number in 0..pieces {
            let at = number * piece_bytes;
            let len = piece_bytes.min(message.len() - at);
            let flags = if number + 1 < pieces { NEXT } else { 0 };
            let place = SENT_AT + at as u64;
            self.describe(FROM_GUEST, number as u16, place, len as u32, flags, number as u16 + 1);
        }
        self.publish(FROM_GUEST, 0);
        self.kick(FROM_GUEST);
    }

    /// The next frame and its header, of as many buffers as it says, which are given back.
    pub fn receive(&mut self, patience: Duration) -> Option<(Vec<u8>, Vec<u8>)> {
        let (mut message, mut count) = (Vec::new(), 1);
        let mut buffers = Vec::new();
        while buffers.len() < count {
            // Those of one frame are there at once.
            let patience = if buffers.is_empty() { patience } else { Duration::ZERO };
            let used = self.used(TO_GUEST, patience);
            assert!(used.is_some() || buffers.is_empty(), "buffers of a frame are missing");
            let (number, bytes) = used?;
            let mut part = vec![0; bytes];
            let at = BUFFERS_AT + u64::from(number) * self.buffer_bytes as u64;
            self.memory.read_slice(&mut part, GuestAddress(at)).unwrap();
            if buffers.is_empty() && self.header_bytes() == 12 {
                count = usize::from(u16::from_le_bytes([part[10], part[11]]));
            }
            message.extend(part);
            buffers.push(number);
        }
        buffers.into_iter().for_each(|number| self.give(number));
        self.kick(TO_GUEST);
        let frame = message.split_off(self.header_bytes());
        Some((message, frame))
    }

    /// As QEMU does when the driver goes.
    pub fn stop(&mut self) {
        for number in 0..2 {
            self.front.set_vring_enable(number, false).unwrap();
            self.front.get_vring_base(number).unwrap();
        }
    }
}
