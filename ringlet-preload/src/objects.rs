//! The libraries of this process, read from the loader's own list and their tables of symbols: dlsym would take the loader's lock,
//! which a constructor may hold while it waits for a thread whose first call is ours.

use core::arch::global_asm;
use core::ffi::{CStr, c_char, c_int};
use core::slice::from_raw_parts;
use core::sync::atomic::{AtomicUsize, Ordering};
use libc::Elf64_Phdr;
use ringlet_linux::elf::{Entry, Object};

/// link.h: struct link_map.
#[repr(C)]
struct LinkMap {
    base: usize,
    name: *const c_char,
    dynamic: *const Entry,
    next: *const LinkMap,
}

/// link.h: struct r_debug.
#[repr(C)]
struct Debug {
    version: c_int,
    first: *const LinkMap,
}

unsafe extern "C" {
    /// Our own dynamic section, by the linker.
    #[link_name = "_DYNAMIC"]
    static OURS: [Entry; 0];
}

/// elf.h: what may be read and run.
const PF_RX: u32 = 4 | 1;
/// The x86 instruction that returns, also where it is a part of another one.
const RET: u8 = 0xc3;

// The loader's list, as debuggers read it: glibc's loader has the struct, musl's (which is libc) a pointer to it.
#[cfg(target_arch = "x86_64")]
global_asm!(
    ".pushsection .text.ringlet_loaded, \"ax\", @progbits",
    ".weak _r_debug",
    ".weak _dl_debug_addr",
    ".hidden ringlet_loaded",
    ".globl ringlet_loaded",
    "ringlet_loaded:",
    "mov rax, [rip + _r_debug@GOTPCREL]",
    "test rax, rax",
    "jnz 2f",
    "mov rax, [rip + _dl_debug_addr@GOTPCREL]",
    "mov rax, [rax]",
    "2: ret",
    ".popsection",
);
#[cfg(target_arch = "aarch64")]
global_asm!(
    ".weak _r_debug",
    ".weak _dl_debug_addr",
    ".hidden ringlet_loaded",
    ".globl ringlet_loaded",
    "ringlet_loaded:",
    "adrp x0, :got:_r_debug",
    "ldr x0, [x0, :got_lo12:_r_debug]",
    "cbnz x0, 2f",
    "adrp x0, :got:_dl_debug_addr",
    "ldr x0, [x0, :got_lo12:_dl_debug_addr]",
    "ldr x0, [x0]",
    "2: ret",
);

unsafe extern "C" {
    safe fn ringlet_loaded() -> *const Debug;
}

/// What is glibc, which was once in several pieces.
const GLIBC: [&CStr; 4] = [c"libc.so.6", c"libpthread.so.0", c"libdl.so.2", c"librt.so.1"];

pub fn is_libc(object: &Object) -> bool {
    object.soname().is_some_and(|soname| GLIBC.contains(&soname)) || is_musl(object)
}

/// Its library, which is its loader as well, has no name of its own but what a distribution gives it.
pub fn is_musl(object: &Object) -> bool {
    let may_be = |name: &CStr| name == c"libc.so" || name.to_bytes().starts_with(b"libc.musl-");
    object.soname().is_none_or(may_be) && object.find(c"__libc_start_main").is_some()
}

struct Objects(*const LinkMap);

impl Iterator for Objects {
    type Item = Option<Object>;
    fn next(&mut self) -> Option<Option<Object>> {
        // SAFETY: an entry of the loader's list, or its end; what was loaded with the program stays there, before all the rest.
        let entry = unsafe { self.0.as_ref() }?;
        self.0 = entry.next;
        // SAFETY: the loader has filled the entry: its base and its dynamic section stay while it is in the list.
        Some(unsafe { Object::new(entry.base, entry.dynamic) })
    }
}

fn objects() -> impl Iterator<Item = Object> {
    // SAFETY: the loader's struct, filled before any code of ours can run.
    Objects(unsafe { (*ringlet_loaded()).first }).flatten()
}

pub fn ours() -> Option<Object> {
    objects().find(|object| object.dynamic == (&raw const OURS).cast())
}

/// What stands behind us, up to libc: they were loaded with the program, and stay.
pub fn behind_us() -> impl Iterator<Item = Object> {
    let mut ended = false;
    objects().skip_while(|object| object.dynamic != (&raw const OURS).cast()).skip(1).take_while(
        move |object| {
            !core::mem::replace(&mut ended, object.soname() == Some(GLIBC[0]) || is_musl(object))
        },
    )
}

/// Where libc's pieces lie that were loaded with the program.
pub fn pieces_of_libc() -> [(usize, usize); GLIBC.len()] {
    let mut pieces = [(0, 0); GLIBC.len()];
    let found = behind_us().filter(is_libc);
    // SAFETY: libraries, loaded with the program.
    pieces.iter_mut().zip(found).for_each(|(piece, object)| *piece = unsafe { object.extent() });
    pieces
}

pub fn is_in(pieces: &[(usize, usize)], address: usize) -> bool {
    pieces.iter().any(|(start, end)| (*start..*end).contains(&address))
}

fn holds(base: usize, segments: &[Elf64_Phdr], address: usize) -> bool {
    segments.iter().any(|segment| {
        let start = base.wrapping_add(segment.p_vaddr as usize);
        segment.p_type == libc::PT_LOAD && address.wrapping_sub(start) < segment.p_memsz as usize
    })
}

/// One of all objects, with its segments.
pub struct Loaded<'a> {
    pub object: Object,
    segments: &'a [Elf64_Phdr],
}

impl Loaded<'_> {
    pub fn holds(&self, address: usize) -> bool {
        holds(self.object.base, self.segments, address)
    }

    /// An instruction that returns, in the object's code.
    fn returns(&self) -> Option<usize> {
        let readable = |segment: &&Elf64_Phdr| segment.p_flags & PF_RX == PF_RX;
        let code = self.segments.iter().filter(|segment| segment.p_type == libc::PT_LOAD);
        code.filter(readable).find_map(|segment| {
            let start = self.object.base.wrapping_add(segment.p_vaddr as usize);
            // SAFETY: a segment as the loader has mapped it, to be read and run; its object stays while `each_loaded` shows it.
            let code = unsafe { from_raw_parts(start as *const u8, segment.p_filesz as usize) };
            Some(start + code.iter().position(|byte| *byte == RET)?)
        })
    }

    /// What the loader has made read-only when it was done.
    pub fn sealed(&self) -> Option<(usize, usize)> {
        let part = self.segments.iter().find(|segment| segment.p_type == libc::PT_GNU_RELRO)?;
        let start = self.object.base.wrapping_add(part.p_vaddr as usize);
        Some((start, start + part.p_memsz as usize))
    }
}

/// An instruction that returns, in the object where the caller's code lies.
pub fn returns_from(caller: usize) -> Option<usize> {
    let mut found = None;
    each_loaded(|loaded| {
        if loaded.holds(caller) {
            found = loaded.returns();
        }
    });
    found
}

/// Calls `each` with every object, in the loader's order, while none comes or goes. The lock that this takes is not held while
/// constructors run.
pub fn each_loaded(mut each: impl FnMut(&Loaded)) {
    type Each<'a> = &'a mut dyn FnMut(&Loaded);
    unsafe extern "C" fn one(
        info: *mut libc::dl_phdr_info,
        _: usize,
        each: *mut libc::c_void,
    ) -> c_int {
        // SAFETY: what the loader tells of an object, and what `each_loaded` has given.
        unsafe {
            let (info, each) = (&*info, &mut *each.cast::<Each>());
            let segments = from_raw_parts(info.dlpi_phdr, info.dlpi_phnum as usize);
            let base = info.dlpi_addr as usize;
            if let Some(part) = segments.iter().find(|part| part.p_type == libc::PT_DYNAMIC) {
                let dynamic = base.wrapping_add(part.p_vaddr as usize) as *const Entry;
                if let Some(object) = Object::new(base, dynamic) {
                    each(&Loaded { object, segments });
                }
            }
        }
        0
    }
    let Some(iterate) = iterate() else { return };
    let mut each: Each = &mut each;
    // SAFETY: libc's function of this name; `one` takes what it is given back.
    unsafe { iterate(one, (&raw mut each).cast()) };
}

type Callback = unsafe extern "C" fn(*mut libc::dl_phdr_info, usize, *mut libc::c_void) -> c_int;
type Iterate = unsafe extern "C" fn(Callback, *mut libc::c_void) -> c_int;

/// WHY libc's own: a sanitizer that stands before it looks its functions up through us before it is ready to be called.
fn iterate() -> Option<Iterate> {
    static FOUND: AtomicUsize = AtomicUsize::new(0);
    let find = || behind_us().filter(is_libc).find_map(|object| object.find(c"dl_iterate_phdr"));
    let libc = match FOUND.load(Ordering::Relaxed) {
        0 => find()?,
        found => found,
    };
    FOUND.store(libc, Ordering::Relaxed);
    // SAFETY: libc's function of this name, whose signature this is.
    Some(unsafe { core::mem::transmute::<usize, Iterate>(libc) })
}

/// How many libraries have been unloaded so far. (None ever is by musl.)
pub fn unloaded() -> u64 {
    unsafe extern "C" fn first(
        info: *mut libc::dl_phdr_info,
        _: usize,
        count: *mut libc::c_void,
    ) -> c_int {
        // SAFETY: what the loader tells of an object, and the number that `unloaded` has given.
        unsafe { *count.cast::<u64>() = (*info).dlpi_subs };
        1
    }
    let mut count = 0u64;
    if let Some(iterate) = iterate() {
        // SAFETY: libc's function of this name; `first` takes what it is given back.
        unsafe { iterate(first, (&raw mut count).cast()) };
    }
    count
}
