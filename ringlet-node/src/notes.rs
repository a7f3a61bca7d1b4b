//! With which sequence numbers each TCP connection of this host began, as the kernel tells a BPF program of ours.
//!
//! The program is attached to the root of the control groups, so that it sees every socket of the host, in whatever namespaces. At the moment
//! that a connection is established, on either side, it notes the pair of numbers under the socket's cookie, and the cookie under the pair. The two
//! ends of one connection have mirrored pairs: what one sends next is what the other expects next. NAT rewrites addresses and not these; who
//! ends a connection and makes another one (a proxy) has other numbers; and a program can't choose its own, short of the right to administer its
//! network namespace. A pair that comes twice says nothing, and is noted as such.
//!
//! A note lasts as long as its socket: it goes when the kernel closes the connection, and if that was not told (another program of this kind may take
//! the wish for it away), when the program closes the socket. So nobody makes others be forgotten. Who keeps as many connections as are remembered
//! has new ones not be noted. A pair that came twice stays nobody's until all who had it are gone. Maps and programs go with the descriptors that we
//! hold; or they are *kept*: attached to the control group for good, from where the next service takes them over, which so knows the connections of the
//! time before, and of the time when there was none.

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

/// The maps, and what fills and empties them.
pub struct Kernel {
    notes: OwnedFd,
    pairs: OwnedFd,
    /// None where they are kept.
    _attached: Vec<OwnedFd>,
}

const NOTES: &std::ffi::CStr = c"ringlet_notes";
const PAIRS: &std::ffi::CStr = c"ringlet_pairs";

/// Who began with a pair: the socket, or 0 where there was more than one; and how many there are.
#[repr(C)]
#[derive(Default)]
struct Place {
    cookie: u64,
    count: u64,
}

impl Notes for Kernel {
    fn of(&self, cookie: u64) -> Option<Note> {
        let mut note = Note::default();
        look_up(&self.notes, &raw const cookie as u64, &raw mut note as u64).ok()?;
        Some(note)
    }

    fn with(&self, pair: Pair) -> Option<u64> {
        let mut place = Place::default();
        look_up(&self.pairs, &raw const pair as u64, &raw mut place as u64).ok()?;
        Some(place.cookie)
    }
}

impl Kernel {
    /// Begins to note what begins below this control group; so many connections are remembered. `keeps`: goes on with what a service before has kept,
    /// and keeps it for the next one.
    pub fn watch(group: &Path, connections: u32, keeps: bool) -> Result<Kernel> {
        let entry = size_of::<Note>() as u32;
        let notes = make_map(NOTES, 8, entry, connections)?;
        let place = size_of::<Place>() as u32;
        let pairs = make_map(PAIRS, 8, place, connections)?;
        let maps = Maps { notes: notes.as_raw_fd(), pairs: pairs.as_raw_fd() };
        let group = open_group(group)?;
        let called = if keeps { KEPT } else { HELD };
        // (What empties them first, so that nothing is left of what is noted.)
        let programs = [
            (assemble_release(&maps), PROG_TYPE_CGROUP_SOCK, INET_SOCK_RELEASE),
            (assemble(&maps), PROG_TYPE_SOCK_OPS, CGROUP_SOCK_OPS),
        ];
        let mut loaded = Vec::new();
        for (program, kind, attached) in &programs {
            loaded.push((load(program, *kind, *attached, called)?, *attached));
        }
        if !keeps {
            let attached = loaded.iter().map(|(program, kind)| attach(program, &group, *kind));
            let _attached = attached.collect::<Result<_>>()?;
            return Ok(Kernel { notes, pairs, _attached });
        }
        if let Some([notes, pairs]) = kept(&group, &loaded, connections)? {
            return Ok(Kernel { notes, pairs, _attached: Vec::new() });
        }
        for (at, (program, kind)) in loaded.iter().enumerate() {
            if let Err(error) = attach_for_good(program, &group, *kind) {
                for (program, kind) in &loaded[..at] {
                    let _ = detach(program, &group, *kind);
                }
                return Err(error);
            }
        }
        Ok(Kernel { notes, pairs, _attached: Vec::new() })
    }

    /// Takes away what services have kept at this control group: so many programs.
    pub fn forget(group: &Path) -> Result<usize> {
        let group = open_group(group)?;
        let mut count = 0;
        for kind in [CGROUP_SOCK_OPS, INET_SOCK_RELEASE] {
            for program in attached_programs(&group, kind)? {
                if ProgramInfo::of(&program)?.name == name(KEPT) {
                    detach(&program, &group, kind)?;
                    count += 1;
                }
            }
        }
        Ok(count)
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
const PROG_ATTACH: i32 = 8;
const PROG_DETACH: i32 = 9;
const PROG_GET_FD_BY_ID: i32 = 13;
const MAP_GET_FD_BY_ID: i32 = 14;
const GET_INFO_BY_FD: i32 = 15;
const PROG_QUERY: i32 = 16;
const ALLOW_MULTI: u32 = 2;
const LINK_CREATE: i32 = 28;
const MAP_TYPE_HASH: u32 = 1;
const NO_PREALLOC: u32 = 1;
const PROG_TYPE_CGROUP_SOCK: u32 = 9;
const PROG_TYPE_SOCK_OPS: u32 = 13;
const CGROUP_SOCK_OPS: u32 = 3;
const INET_SOCK_RELEASE: u32 = 34;

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
    let (kind, flags, name) = (MAP_TYPE_HASH, NO_PREALLOC, name(called));
    let mut attributes = Attributes { kind, key, value, entries, flags, inner: 0, node: 0, name };
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

fn load(
    program: &[Instruction],
    kind: u32,
    attached: u32,
    called: &std::ffi::CStr,
) -> Result<OwnedFd> {
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
        interface: u32,
        attached: u32,
    }
    let load = |log: &mut [u8]| {
        let mut attributes = Attributes {
            kind,
            count: program.len() as u32,
            instructions: program.as_ptr() as u64,
            license: c"MIT OR Apache-2.0".as_ptr() as u64,
            log_level: u32::from(!log.is_empty()),
            log_size: log.len() as u32,
            log: if log.is_empty() { 0 } else { log.as_mut_ptr() as u64 },
            kernel: 0,
            flags: 0,
            name: name(called),
            interface: 0,
            attached,
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

fn attach(program: &OwnedFd, group: &OwnedFd, kind: u32) -> Result<OwnedFd> {
    #[repr(C)]
    struct Attributes {
        program: u32,
        target: u32,
        kind: u32,
        flags: u32,
    }
    let (program, target) = (program.as_raw_fd() as u32, group.as_raw_fd() as u32);
    bpf(LINK_CREATE, &mut Attributes { program, target, kind, flags: 0 }).map(owned)
}

/// What our programs are called: those that go with us, and those that are kept. (Only root of the host attaches programs to control groups, and so
/// decides what a service finds there.)
const HELD: &std::ffi::CStr = c"ringlet_node";
const KEPT: &std::ffi::CStr = c"ringlet_kept";
/// KERNEL: a control group has no more programs of one kind (BPF_CGROUP_MAX_PROGS).
const PROGRAMS_MOST: usize = 64;

fn open_group(group: &Path) -> Result<OwnedFd> {
    let path = CString::new(group.as_os_str().as_bytes())?;
    let flags = libc::O_RDONLY | libc::O_DIRECTORY | libc::O_CLOEXEC;
    // SAFETY: a C string; what is opened is ours.
    unsafe {
        let opened = libc::open(path.as_ptr(), flags);
        if opened < 0 {
            return Err(Error::last_os_error());
        }
        Ok(OwnedFd::from_raw_fd(opened))
    }
}

/// The attributes of BPF_PROG_ATTACH and BPF_PROG_DETACH.
#[repr(C)]
struct Attaching {
    group: u32,
    program: u32,
    kind: u32,
    flags: u32,
    replaced: u32,
}

fn attaching(program: &OwnedFd, group: &OwnedFd, kind: u32, flags: u32) -> Attaching {
    let (program, group) = (program.as_raw_fd() as u32, group.as_raw_fd() as u32);
    Attaching { group, program, kind, flags, replaced: 0 }
}

/// KERNEL: without a link it stays when we have gone, as long as its control group is there.
fn attach_for_good(program: &OwnedFd, group: &OwnedFd, kind: u32) -> Result<()> {
    bpf(PROG_ATTACH, &mut attaching(program, group, kind, ALLOW_MULTI)).map(drop)
}

fn detach(program: &OwnedFd, group: &OwnedFd, kind: u32) -> Result<()> {
    bpf(PROG_DETACH, &mut attaching(program, group, kind, 0)).map(drop)
}

fn by_number(command: i32, number: u32) -> Result<OwnedFd> {
    #[repr(C)]
    struct Attributes {
        number: u32,
        next: u32,
        flags: u32,
    }
    bpf(command, &mut Attributes { number, next: 0, flags: 0 }).map(owned)
}

/// Those of a kind that are attached to this control group itself. (To look them up takes CAP_SYS_ADMIN.)
fn attached_programs(group: &OwnedFd, kind: u32) -> Result<Vec<OwnedFd>> {
    #[repr(C)]
    struct Attributes {
        group: u32,
        kind: u32,
        flags: u32,
        attach_flags: u32,
        numbers: u64,
        count: u32,
        pad: u32,
    }
    let mut numbers = [0u32; PROGRAMS_MOST];
    let mut attributes = Attributes {
        group: group.as_raw_fd() as u32,
        kind,
        flags: 0,
        attach_flags: 0,
        numbers: numbers.as_mut_ptr() as u64,
        count: PROGRAMS_MOST as u32,
        pad: 0,
    };
    bpf(PROG_QUERY, &mut attributes)?;
    let mut programs = Vec::new();
    for number in &numbers[..PROGRAMS_MOST.min(attributes.count as usize)] {
        match by_number(PROG_GET_FD_BY_ID, *number) {
            Ok(program) => programs.push(program),
            // (It has gone meanwhile.)
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    Ok(programs)
}

fn info_of<T>(fd: &OwnedFd, info: &mut T) -> Result<()> {
    #[repr(C)]
    struct Attributes {
        fd: u32,
        len: u32,
        info: u64,
    }
    let (fd, len) = (fd.as_raw_fd() as u32, size_of::<T>() as u32);
    bpf(GET_INFO_BY_FD, &mut Attributes { fd, len, info: info as *mut T as u64 }).map(drop)
}

/// The beginning of struct bpf_prog_info. The kernel's digest of the instructions does not depend on which maps they name.
#[repr(C)]
#[derive(Default)]
struct ProgramInfo {
    kind: u32,
    id: u32,
    tag: [u8; 8],
    lengths: [u32; 2],
    instructions: [u64; 2],
    load_time: u64,
    user: u32,
    map_count: u32,
    maps: u64,
    name: [u8; 16],
}

impl ProgramInfo {
    fn of(program: &OwnedFd) -> Result<ProgramInfo> {
        let mut info = ProgramInfo::default();
        info_of(program, &mut info)?;
        Ok(info)
    }

    /// The numbers of its maps.
    fn maps(program: &OwnedFd) -> Result<Vec<u32>> {
        let mut numbers = [0u32; 8];
        let (map_count, maps) = (numbers.len() as u32, numbers.as_mut_ptr() as u64);
        let mut info = ProgramInfo { map_count, maps, ..ProgramInfo::default() };
        info_of(program, &mut info)?;
        let mut maps = numbers[..numbers.len().min(info.map_count as usize)].to_vec();
        maps.sort_unstable();
        Ok(maps)
    }
}

/// The beginning of struct bpf_map_info.
#[repr(C)]
#[derive(Default, PartialEq, Eq, Debug)]
struct MapInfo {
    kind: u32,
    id: u32,
    key: u32,
    value: u32,
    entries: u32,
    flags: u32,
    name: [u8; 16],
}

/// The maps of programs that are just as these, and that remember as many: of both kinds, with the same maps.
fn kept(
    group: &OwnedFd,
    loaded: &[(OwnedFd, u32)],
    connections: u32,
) -> Result<Option<[OwnedFd; 2]>> {
    let mut found: Vec<Vec<Vec<u32>>> = Vec::new();
    for (ours, kind) in loaded {
        let tag = ProgramInfo::of(ours)?.tag;
        let mut maps = Vec::new();
        for program in attached_programs(group, *kind)? {
            let info = ProgramInfo::of(&program)?;
            if info.name == name(KEPT) && info.tag == tag {
                maps.push(ProgramInfo::maps(&program)?);
            }
        }
        found.push(maps);
    }
    let [first, rest @ ..] = &found[..] else { return Ok(None) };
    for numbers in first.iter().filter(|numbers| rest.iter().all(|maps| maps.contains(numbers))) {
        let mut kept = [None, None];
        for number in numbers {
            let map = by_number(MAP_GET_FD_BY_ID, *number)?;
            let mut info = MapInfo::default();
            info_of(&map, &mut info)?;
            let fits = |called, value: usize| {
                let kind = (info.kind, info.flags) == (MAP_TYPE_HASH, NO_PREALLOC);
                let sizes = (info.key, info.value, info.entries) == (8, value as u32, connections);
                kind && sizes && info.name == name(called)
            };
            if fits(NOTES, size_of::<Note>()) {
                kept[0] = Some(map);
            } else if fits(PAIRS, size_of::<Place>()) {
                kept[1] = Some(map);
            }
        }
        if let [Some(notes), Some(pairs)] = kept {
            return Ok(Some([notes, pairs]));
        }
    }
    Ok(None)
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
const LOAD_LONG: u8 = 0x79;
const STORE_WORD: u8 = 0x63;
const STORE_LONG: u8 = 0x7b;
const STORE_LONG_VALUE: u8 = 0x7a;
const ATOMIC_ADD_LONG: u8 = 0xdb;
const LOAD_VALUE_64: u8 = 0x18;
const MOVE: u8 = 0xbf;
const MOVE_VALUE: u8 = 0xb7;
const ADD_VALUE: u8 = 0x07;
const OR_VALUE: u8 = 0x47;
const JUMP: u8 = 0x05;
const JUMP_EQUAL: u8 = 0x15;
const JUMP_NOT_EQUAL: u8 = 0x55;
const JUMP_GREATER_SIGNED: u8 = 0x65;
const CALL: u8 = 0x85;
const EXIT: u8 = 0x95;
/// The source register of `LOAD_VALUE_64` that makes the value a map's descriptor.
const IS_MAP: u8 = 1;
/// Helpers, and flags of the second.
const MAP_LOOKUP: i32 = 1;
const MAP_UPDATE: i32 = 2;
const MAP_DELETE: i32 = 3;
const GET_SOCKET_COOKIE: i32 = 46;
const SET_CALLBACK_FLAGS: i32 = 59;
const GET_NETNS_COOKIE: i32 = 122;
const ANY: i32 = 0;
const NEW_ONLY: i32 = 1;
/// struct bpf_sock_ops.
const OP: i16 = 0;
const NEW_STATE: i16 = 8;
const FAMILY: i16 = 20;
const FAR_FOUR: i16 = 24;
const FAR_SIX: i16 = 32;
const FAR_PORT: i16 = 64;
const CALLBACK_FLAGS: i16 = 84;
const EXPECTS: i16 = 100;
const SENDS: i16 = 104;
/// BPF_SOCK_OPS_STATE_CB, its flag, and BPF_TCP_CLOSE.
const STATE_CHANGES: i32 = 10;
const TELL_STATES: i32 = 1 << 2;
const CLOSED: i32 = 7;

/// Where things lie below the frame's end (register 10): a note, the socket's cookie, and a place.
const NOTE: i16 = -(size_of::<Note>() as i16);
const COOKIE: i16 = NOTE - 8;
const PLACE: i16 = COOKIE - size_of::<Place>() as i16;
const PLACE_COUNT: i16 = std::mem::offset_of!(Place, count) as i16;

struct Maps {
    notes: i32,
    pairs: i32,
}

/// A program, with names for where it jumps to.
#[derive(Default)]
struct Assembly {
    code: Vec<Instruction>,
    jumps: Vec<(usize, &'static str)>,
    labels: Vec<(&'static str, usize)>,
}

impl Assembly {
    fn put(&mut self, code: u8, to: u8, from: u8, offset: i16, value: i32) {
        self.code.push(Instruction { code, registers: to | from << 4, offset, value });
    }

    /// A jump, by a comparison of a register with a value.
    fn jump(&mut self, code: u8, register: u8, value: i32, to: &'static str) {
        self.jumps.push((self.code.len(), to));
        self.put(code, register, 0, 0, value);
    }

    fn label(&mut self, name: &'static str) {
        self.labels.push((name, self.code.len()));
    }

    fn map_and_key(&mut self, map: i32, key: i16) {
        self.put(LOAD_VALUE_64, 1, IS_MAP, 0, map);
        self.put(0, 0, 0, 0, 0);
        self.put(MOVE, 2, 10, 0, 0);
        self.put(ADD_VALUE, 2, 0, 0, i32::from(key));
    }

    /// Register 0 is where the value lies, or 0.
    fn look_up(&mut self, map: i32, key: i16) {
        self.map_and_key(map, key);
        self.put(CALL, 0, 0, 0, MAP_LOOKUP);
    }

    fn delete(&mut self, map: i32, key: i16) {
        self.map_and_key(map, key);
        self.put(CALL, 0, 0, 0, MAP_DELETE);
    }

    /// Register 0 is 0, or an error.
    fn update(&mut self, map: i32, key: i16, value: i16, flags: i32) {
        self.map_and_key(map, key);
        self.put(MOVE, 3, 10, 0, 0);
        self.put(ADD_VALUE, 3, 0, 0, i32::from(value));
        self.put(MOVE_VALUE, 4, 0, 0, flags);
        self.put(CALL, 0, 0, 0, MAP_UPDATE);
    }

    /// Of the socket that the context (register 6) is about.
    fn call_for_socket(&mut self, helper: i32, to: i16) {
        self.put(MOVE, 1, 6, 0, 0);
        self.put(CALL, 0, 0, 0, helper);
        self.put(STORE_LONG, 10, 0, to, 0);
    }

    /// In the place of a pair, at register 0.
    fn count(&mut self, by: i32) {
        self.put(MOVE_VALUE, 1, 0, 0, by);
        self.put(ATOMIC_ADD_LONG, 0, 1, PLACE_COUNT, 0);
    }

    /// Forgets the socket that the context is about, if it was noted. (It alone notes and forgets itself; of a pair all count, of which one at least
    /// is there while it is noted. So none that came twice begins anew.)
    fn forget(&mut self, maps: &Maps) {
        self.call_for_socket(GET_SOCKET_COOKIE, COOKIE);
        self.look_up(maps.notes, COOKIE);
        self.jump(JUMP_EQUAL, 0, 0, "end");
        self.put(LOAD_LONG, 1, 0, std::mem::offset_of!(Note, pair) as i16, 0);
        self.put(STORE_LONG, 10, 1, NOTE, 0);
        self.delete(maps.notes, COOKIE);
        self.look_up(maps.pairs, NOTE);
        self.jump(JUMP_EQUAL, 0, 0, "end");
        self.count(-1);
        self.put(LOAD_LONG, 1, 0, PLACE_COUNT, 0);
        self.jump(JUMP_GREATER_SIGNED, 1, 0, "end");
        self.delete(maps.pairs, NOTE);
    }

    /// KERNEL: what the program returns is 1, or the kernel's own calls of it for other events would take its answer for a setting.
    fn end(mut self) -> Vec<Instruction> {
        self.label("end");
        self.put(MOVE_VALUE, 0, 0, 0, 1);
        self.put(EXIT, 0, 0, 0, 0);
        for (at, to) in self.jumps {
            let found = self.labels.iter().find(|(name, _)| *name == to);
            let (_, target) = found.expect("a label of this program");
            self.code[at].offset = (target - at - 1) as i16;
        }
        self.code
    }
}

/// What is run as connections begin, and change their state.
fn assemble(maps: &Maps) -> Vec<Instruction> {
    use std::mem::offset_of;
    let mut program = Assembly::default();
    program.put(MOVE, 6, 1, 0, 0);
    program.put(LOAD_WORD, 1, 6, OP, 0);
    program.jump(JUMP_EQUAL, 1, CONNECTED as i32, "note");
    program.jump(JUMP_EQUAL, 1, ACCEPTED as i32, "note");
    program.jump(JUMP_NOT_EQUAL, 1, STATE_CHANGES, "end");
    program.put(LOAD_WORD, 1, 6, NEW_STATE, 0);
    program.jump(JUMP_NOT_EQUAL, 1, CLOSED, "end");
    program.forget(maps);
    program.jump(JUMP, 0, 0, "end");

    program.label("note");
    let pair = offset_of!(Note, pair);
    let words = [
        (OP, offset_of!(Note, side)),
        (SENDS, pair + offset_of!(Pair, sends)),
        (EXPECTS, pair + offset_of!(Pair, expects)),
        (FAMILY, offset_of!(Note, family)),
        (FAR_FOUR, offset_of!(Note, four)),
        (FAR_SIX, offset_of!(Note, six)),
        (FAR_SIX + 4, offset_of!(Note, six) + 4),
        (FAR_SIX + 8, offset_of!(Note, six) + 8),
        (FAR_SIX + 12, offset_of!(Note, six) + 12),
        (FAR_PORT, offset_of!(Note, port)),
    ];
    for (from, place) in words {
        program.put(LOAD_WORD, 1, 6, from, 0);
        program.put(STORE_WORD, 10, 1, NOTE + place as i16, 0);
    }
    program.call_for_socket(GET_NETNS_COOKIE, NOTE + offset_of!(Note, namespace) as i16);
    program.call_for_socket(GET_SOCKET_COOKIE, COOKIE);
    // (Where there is no room it is not noted, and so not counted.)
    program.update(maps.notes, COOKIE, NOTE, ANY);
    program.jump(JUMP_NOT_EQUAL, 0, 0, "end");
    program.look_up(maps.pairs, NOTE);
    program.jump(JUMP_NOT_EQUAL, 0, 0, "again");
    program.put(LOAD_LONG, 1, 10, COOKIE, 0);
    program.put(STORE_LONG, 10, 1, PLACE + offset_of!(Place, cookie) as i16, 0);
    program.put(STORE_LONG_VALUE, 10, 0, PLACE + PLACE_COUNT, 1);
    program.update(maps.pairs, NOTE, PLACE, NEW_ONLY);
    program.jump(JUMP_EQUAL, 0, 0, "noted");
    // Another one has come first, or there is no room.
    program.look_up(maps.pairs, NOTE);
    program.jump(JUMP_NOT_EQUAL, 0, 0, "again");
    program.delete(maps.notes, COOKIE);
    program.jump(JUMP, 0, 0, "end");
    program.label("again");
    program.put(STORE_LONG_VALUE, 0, 0, offset_of!(Place, cookie) as i16, 0);
    program.count(1);
    program.label("noted");
    program.put(LOAD_WORD, 2, 6, CALLBACK_FLAGS, 0);
    program.put(OR_VALUE, 2, 0, 0, TELL_STATES);
    program.put(MOVE, 1, 6, 0, 0);
    program.put(CALL, 0, 0, 0, SET_CALLBACK_FLAGS);
    program.end()
}

/// What is run as a program closes a socket.
fn assemble_release(maps: &Maps) -> Vec<Instruction> {
    let mut program = Assembly::default();
    program.put(MOVE, 6, 1, 0, 0);
    program.forget(maps);
    program.end()
}
