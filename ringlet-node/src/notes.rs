//! With which sequence numbers each TCP connection of this host began, as the kernel tells a BPF program of ours.
//!
//! The program is attached to the root of the control groups, so that it sees every socket of the host, in whatever namespaces. At the moment
//! that a connection is established, on either side, it notes the pair of numbers under the socket's cookie, and the cookie under the pair. The two
//! ends of one connection have mirrored pairs: what one sends next is what the other expects next. NAT rewrites addresses and not these; who
//! ends a connection and makes another one (a proxy) has other numbers; and a program can't choose its own, short of the right to administer its
//! network namespace. A pair that comes twice says nothing, and is noted as such.
//!
//! Both maps forget what was not used for long when they are full. Maps and program go with the descriptors that we hold.

use std::ffi::CString;
use std::io::{Error, ErrorKind, Result};
use std::net::IpAddr;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use serde::{Deserialize, Serialize};

/// How a connection began, as one end has it.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Note {
    pub pair: Pair,
    /// `CONNECTED` or `ACCEPTED`.
    pub side: u32,
    pub family: u32,
    pub namespace: u64,
    /// The far end's address as this end has it, in the order of the network: of IPv4, and of IPv6; and its port, in the upper half.
    pub four: u32,
    pub six: [u32; 4],
    pub port: u32,
}

impl Note {
    /// (A hint: NAT may have rewritten it.)
    pub fn far_address(&self) -> IpAddr {
        let six = || {
            let mut bytes = [0; 16];
            let words = self.six.iter().flat_map(|word| word.to_ne_bytes());
            bytes.iter_mut().zip(words).for_each(|(to, from)| *to = from);
            bytes
        };
        match self.family {
            family if family == libc::AF_INET6 as u32 => IpAddr::from(six()).to_canonical(),
            _ => IpAddr::from(self.four.to_ne_bytes()),
        }
    }
}

/// What it was to send next, and what it expected next.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default, Serialize, Deserialize)]
pub struct Pair {
    pub sends: u32,
    pub expects: u32,
}

impl Pair {
    pub fn mirrored(self) -> Pair {
        Pair { sends: self.expects, expects: self.sends }
    }
}

/// linux/bpf.h: BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB, BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB.
pub const CONNECTED: u32 = 4;
pub const ACCEPTED: u32 = 5;

/// Where notes are looked up.
pub trait Notes {
    fn of(&self, cookie: u64) -> Option<Note>;
    /// The socket that began with this pair; 0 if there was more than one.
    fn with(&self, pair: Pair) -> Option<u64>;
}

/// The maps, and what fills them.
pub struct Kernel {
    notes: OwnedFd,
    pairs: OwnedFd,
    _attached: OwnedFd,
}

impl Notes for Kernel {
    fn of(&self, cookie: u64) -> Option<Note> {
        let mut note = Note::default();
        look_up(&self.notes, &raw const cookie as u64, &raw mut note as u64).ok()?;
        Some(note)
    }

    fn with(&self, pair: Pair) -> Option<u64> {
        let mut cookie = 0u64;
        look_up(&self.pairs, &raw const pair as u64, &raw mut cookie as u64).ok()?;
        Some(cookie)
    }
}

impl Kernel {
    /// Begins to note what begins below this control group; so many connections are remembered.
    pub fn watch(group: &Path, connections: u32) -> Result<Kernel> {
        let entry = size_of::<Note>() as u32;
        let notes = make_map(c"ringlet_notes", 8, entry, connections)?;
        let pairs = make_map(c"ringlet_pairs", 8, 8, connections)?;
        let program = load(&assemble(notes.as_raw_fd(), pairs.as_raw_fd()))?;
        let path = CString::new(group.as_os_str().as_bytes())?;
        let flags = libc::O_RDONLY | libc::O_DIRECTORY | libc::O_CLOEXEC;
        // SAFETY: a C string; what is opened is ours.
        let group = unsafe {
            let opened = libc::open(path.as_ptr(), flags);
            if opened < 0 {
                return Err(Error::last_os_error());
            }
            OwnedFd::from_raw_fd(opened)
        };
        let attached = attach(&program, &group)?;
        Ok(Kernel { notes, pairs, _attached: attached })
    }

    /// May we look, as we are? (No socket has this cookie.)
    pub fn answers(&self) -> bool {
        let (cookie, mut note) = (0u64, Note::default());
        let looked = look_up(&self.notes, &raw const cookie as u64, &raw mut note as u64);
        looked.is_err_and(|error| error.kind() == ErrorKind::NotFound)
    }
}

/// Commands of bpf(2), and other numbers of linux/bpf.h.
const MAP_CREATE: i32 = 0;
pub(crate) const MAP_LOOKUP_ELEM: i32 = 1;
const PROG_LOAD: i32 = 5;
const LINK_CREATE: i32 = 28;
const MAP_TYPE_LRU_HASH: u32 = 9;
const PROG_TYPE_SOCK_OPS: u32 = 13;
const CGROUP_SOCK_OPS: u32 = 3;

/// union bpf_attr of a command, or as much of it as is not zero.
fn bpf<T>(command: i32, attributes: &mut T) -> Result<i32> {
    // SAFETY: so many bytes, which the command reads, and the places that they name, which the caller keeps.
    let done =
        unsafe { libc::syscall(libc::SYS_bpf, command, attributes as *mut T, size_of::<T>()) };
    if done < 0 { Err(Error::last_os_error()) } else { Ok(done as i32) }
}

fn owned(fd: i32) -> OwnedFd {
    // SAFETY: the kernel has just made it for us.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

fn name(text: &std::ffi::CStr) -> [u8; 16] {
    let mut name = [0; 16];
    let bytes = text.to_bytes();
    name[..bytes.len().min(15)].copy_from_slice(&bytes[..bytes.len().min(15)]);
    name
}

fn make_map(called: &std::ffi::CStr, key: u32, value: u32, entries: u32) -> Result<OwnedFd> {
    #[repr(C)]
    struct Attributes {
        kind: u32,
        key: u32,
        value: u32,
        entries: u32,
        flags: u32,
        inner: u32,
        node: u32,
        name: [u8; 16],
    }
    let (kind, name) = (MAP_TYPE_LRU_HASH, name(called));
    let mut attributes =
        Attributes { kind, key, value, entries, flags: 0, inner: 0, node: 0, name };
    bpf(MAP_CREATE, &mut attributes).map(owned)
}

fn look_up(map: &OwnedFd, key: u64, value: u64) -> Result<()> {
    #[repr(C)]
    struct Attributes {
        map: u32,
        pad: u32,
        key: u64,
        value: u64,
        flags: u64,
    }
    let mut attributes = Attributes { map: map.as_raw_fd() as u32, pad: 0, key, value, flags: 0 };
    bpf(MAP_LOOKUP_ELEM, &mut attributes).map(drop)
}

fn load(program: &[Instruction]) -> Result<OwnedFd> {
    #[repr(C)]
    struct Attributes {
        kind: u32,
        count: u32,
        instructions: u64,
        license: u64,
        log_level: u32,
        log_size: u32,
        log: u64,
        kernel: u32,
        flags: u32,
        name: [u8; 16],
    }
    let load = |log: &mut [u8]| {
        let mut attributes = Attributes {
            kind: PROG_TYPE_SOCK_OPS,
            count: program.len() as u32,
            instructions: program.as_ptr() as u64,
            license: c"MIT OR Apache-2.0".as_ptr() as u64,
            log_level: u32::from(!log.is_empty()),
            log_size: log.len() as u32,
            log: if log.is_empty() { 0 } else { log.as_mut_ptr() as u64 },
            kernel: 0,
            flags: 0,
            name: name(c"ringlet_node"),
        };
        bpf(PROG_LOAD, &mut attributes).map(owned)
    };
    load(&mut []).or_else(|error| match error.kind() {
        ErrorKind::PermissionDenied => {
            // Not allowed at all, or not liked by the kernel's verifier, which says why.
            let mut log = vec![0; 64 << 10];
            let error = match load(&mut log) {
                Ok(loaded) => return Ok(loaded),
                Err(error) => error,
            };
            let said = String::from_utf8_lossy(&log);
            let said = said.trim_end_matches('\0').trim_end();
            let last = said.lines().rev().take(3).collect::<Vec<_>>().join("; ");
            Err(if last.is_empty() { error } else { Error::new(error.kind(), last) })
        }
        _ => Err(error),
    })
}

fn attach(program: &OwnedFd, group: &OwnedFd) -> Result<OwnedFd> {
    #[repr(C)]
    struct Attributes {
        program: u32,
        target: u32,
        kind: u32,
        flags: u32,
    }
    let (program, target) = (program.as_raw_fd() as u32, group.as_raw_fd() as u32);
    bpf(LINK_CREATE, &mut Attributes { program, target, kind: CGROUP_SOCK_OPS, flags: 0 })
        .map(owned)
}

/// struct bpf_insn.
#[repr(C)]
#[derive(Clone, Copy)]
struct Instruction {
    code: u8,
    /// Destination in the low half, source in the high one.
    registers: u8,
    offset: i16,
    value: i32,
}

/// Codes of what is used: BPF_CLASS, size or operation, mode or source.
const LOAD_WORD: u8 = 0x61;
const STORE_WORD: u8 = 0x63;
const STORE_LONG: u8 = 0x7b;
const STORE_LONG_VALUE: u8 = 0x7a;
const LOAD_VALUE_64: u8 = 0x18;
const MOVE: u8 = 0xbf;
const MOVE_VALUE: u8 = 0xb7;
const ADD_VALUE: u8 = 0x07;
const JUMP_EQUAL: u8 = 0x15;
const JUMP_NOT_EQUAL: u8 = 0x55;
const CALL: u8 = 0x85;
const EXIT: u8 = 0x95;
/// The source register of `LOAD_VALUE_64` that makes the value a map's descriptor.
const IS_MAP: u8 = 1;
/// Helpers, and flags of the first.
const MAP_UPDATE_ELEM: i32 = 2;
const GET_SOCKET_COOKIE: i32 = 46;
const GET_NETNS_COOKIE: i32 = 122;
const ANY: i32 = 0;
const NEW_ONLY: i32 = 1;
/// struct bpf_sock_ops.
const OP: i16 = 0;
const FAMILY: i16 = 20;
const FAR_FOUR: i16 = 24;
const FAR_SIX: i16 = 32;
const FAR_PORT: i16 = 64;
const EXPECTS: i16 = 100;
const SENDS: i16 = 104;

/// Where things lie below the frame's end (register 10): a note, and the socket's cookie.
const NOTE: i16 = -(size_of::<Note>() as i16);
const COOKIE: i16 = NOTE - 8;

/// KERNEL: what the program returns is 1, or the kernel's own calls of it for other events would take its answer for a setting.
fn assemble(notes: i32, pairs: i32) -> Vec<Instruction> {
    let of = |code, to: u8, from: u8, offset, value| Instruction {
        code,
        registers: to | from << 4,
        offset,
        value,
    };
    let word_to_note = |from: i16, place: usize| {
        [of(LOAD_WORD, 1, 6, from, 0), of(STORE_WORD, 10, 1, NOTE + place as i16, 0)]
    };
    let call_for_socket = |helper, to: i16| {
        [of(MOVE, 1, 6, 0, 0), of(CALL, 0, 0, 0, helper), of(STORE_LONG, 10, 0, to, 0)]
    };
    let update = |map, key: i16, value: i16, flags| {
        [
            of(LOAD_VALUE_64, 1, IS_MAP, 0, map),
            of(0, 0, 0, 0, 0),
            of(MOVE, 2, 10, 0, 0),
            of(ADD_VALUE, 2, 0, 0, i32::from(key)),
            of(MOVE, 3, 10, 0, 0),
            of(ADD_VALUE, 3, 0, 0, i32::from(value)),
            of(MOVE_VALUE, 4, 0, 0, flags),
            of(CALL, 0, 0, 0, MAP_UPDATE_ELEM),
        ]
    };
    use std::mem::offset_of;
    let sends = offset_of!(Note, pair) + offset_of!(Pair, sends);
    let expects = offset_of!(Note, pair) + offset_of!(Pair, expects);
    let again =
        [[of(STORE_LONG_VALUE, 10, 0, COOKIE, 0)].as_slice(), &update(pairs, NOTE, COOKIE, ANY)]
            .concat();
    let noting = [
        word_to_note(OP, offset_of!(Note, side)).as_slice(),
        &word_to_note(SENDS, sends),
        &word_to_note(EXPECTS, expects),
        &word_to_note(FAMILY, offset_of!(Note, family)),
        &word_to_note(FAR_FOUR, offset_of!(Note, four)),
        &word_to_note(FAR_SIX, offset_of!(Note, six)),
        &word_to_note(FAR_SIX + 4, offset_of!(Note, six) + 4),
        &word_to_note(FAR_SIX + 8, offset_of!(Note, six) + 8),
        &word_to_note(FAR_SIX + 12, offset_of!(Note, six) + 12),
        &word_to_note(FAR_PORT, offset_of!(Note, port)),
        &call_for_socket(GET_NETNS_COOKIE, NOTE + offset_of!(Note, namespace) as i16),
        &call_for_socket(GET_SOCKET_COOKIE, COOKIE),
        &update(notes, COOKIE, NOTE, ANY),
        &update(pairs, NOTE, COOKIE, NEW_ONLY),
        &[of(JUMP_EQUAL, 0, 0, again.len() as i16, 0)],
        &again,
    ]
    .concat();
    [
        [
            of(MOVE, 6, 1, 0, 0),
            of(LOAD_WORD, 1, 6, OP, 0),
            of(JUMP_EQUAL, 1, 0, 1, CONNECTED as i32),
            of(JUMP_NOT_EQUAL, 1, 0, noting.len() as i16, ACCEPTED as i32),
        ]
        .as_slice(),
        &noting,
        &[of(MOVE_VALUE, 0, 0, 0, 1), of(EXIT, 0, 0, 0, 0)],
    ]
    .concat()
}
