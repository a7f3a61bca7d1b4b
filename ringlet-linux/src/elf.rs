//! Libraries as they lie in memory (ELF): their tables of symbols and of references to others'.

use core::ffi::{CStr, c_char};
use core::slice::from_raw_parts;
use core::sync::atomic::{AtomicUsize, Ordering};
use libc::{Elf64_Ehdr, Elf64_Phdr, Elf64_Rela, Elf64_Sym};

/// elf.h: Elf64_Dyn.
#[repr(C)]
pub struct Entry {
    tag: i64,
    value: usize,
}

// elf.h.
const DT_PLTRELSZ: i64 = 2;
const DT_HASH: i64 = 4;
const DT_STRTAB: i64 = 5;
const DT_SYMTAB: i64 = 6;
const DT_RELA: i64 = 7;
const DT_RELASZ: i64 = 8;
const DT_SONAME: i64 = 14;
const DT_RPATH: i64 = 15;
const DT_JMPREL: i64 = 23;
const DT_RUNPATH: i64 = 29;
const DT_GNU_HASH: i64 = 0x6fff_fef5;
const DT_VERSYM: i64 = 0x6fff_fff0;
/// Of a symbol's version: an old one, which nobody gets who does not ask for it.
const VERSION_HIDDEN: u16 = 0x8000;
const STT_FUNC: u8 = 2;

/// # Safety
/// A library's header lies there.
pub unsafe fn segments<'a>(base: usize) -> &'a [Elf64_Phdr] {
    // SAFETY: by contract; it tells where its table of segments is.
    unsafe {
        let header = &*(base as *const Elf64_Ehdr);
        let table = (base + header.e_phoff as usize) as *const Elf64_Phdr;
        from_raw_parts(table, header.e_phnum as usize)
    }
}

/// A library or the program, as it lies in memory.
#[derive(Clone, Copy)]
pub struct Object {
    pub base: usize,
    pub dynamic: *const Entry,
    symbols: *const Elf64_Sym,
    names: *const c_char,
    versions: *const u16,
    gnu_hash: *const u32,
    hash: *const u32,
}

impl Object {
    /// # Safety
    /// A loaded object's base and dynamic section; it stays loaded as long as this is used.
    pub unsafe fn new(base: usize, dynamic: *const Entry) -> Option<Object> {
        let mut object = Object {
            base,
            dynamic,
            symbols: core::ptr::null(),
            names: core::ptr::null(),
            versions: core::ptr::null(),
            gnu_hash: core::ptr::null(),
            hash: core::ptr::null(),
        };
        object.symbols = object.address(DT_SYMTAB) as *const _;
        object.names = object.address(DT_STRTAB) as *const _;
        object.versions = object.address(DT_VERSYM) as *const _;
        object.gnu_hash = object.address(DT_GNU_HASH) as *const _;
        object.hash = object.address(DT_HASH) as *const _;
        (!object.symbols.is_null() && !object.names.is_null()).then_some(object)
    }

    pub fn is(&self, other: &Object) -> bool {
        self.dynamic == other.dynamic
    }

    fn entry(&self, tag: i64) -> Option<usize> {
        let mut at = self.dynamic;
        // SAFETY: a dynamic section, which ends with a null tag.
        unsafe {
            while (*at).tag != 0 {
                if (*at).tag == tag {
                    return Some((*at).value);
                }
                at = at.add(1);
            }
        }
        None
    }

    /// Where a table lies; 0 if there is none. The loader has made addresses of offsets, except where it could not write.
    fn address(&self, tag: i64) -> usize {
        match self.entry(tag) {
            None => 0,
            Some(value) if value < self.base => value + self.base,
            Some(value) => value,
        }
    }

    fn name(&self, at: usize) -> &'static CStr {
        // SAFETY: a place in the table of names, which the loader has mapped for good.
        unsafe { CStr::from_ptr(self.names.add(at)) }
    }

    pub fn soname(&self) -> Option<&'static CStr> {
        self.entry(DT_SONAME).map(|at| self.name(at))
    }

    /// Does it tell where the libraries lie that it asks for?
    pub fn has_search_path(&self) -> bool {
        self.entry(DT_RUNPATH).is_some()
    }

    /// And where those lie for which the libraries ask that it has loaded?
    pub fn has_lasting_search_path(&self) -> bool {
        self.entry(DT_RPATH).is_some()
    }

    /// What it defines under this name, in the version of today.
    pub fn find(&self, name: &CStr) -> Option<usize> {
        let found = match (self.gnu_hash.is_null(), self.hash.is_null()) {
            (false, _) => self.find_by_gnu_hash(name),
            (true, false) => self.find_by_count(name),
            _ => None,
        };
        // SAFETY: a symbol of the table.
        found.map(|index| self.base + unsafe { (*self.symbols.add(index)).st_value } as usize)
    }

    /// Where a library lies.
    ///
    /// # Safety
    /// It is one: a program that is not relocated has its header elsewhere than at its base.
    pub unsafe fn extent(&self) -> (usize, usize) {
        // SAFETY: by contract.
        let segments = unsafe { segments(self.base) };
        let loaded = segments.iter().filter(|segment| segment.p_type == libc::PT_LOAD);
        let ends = loaded.map(|segment| (segment.p_vaddr + segment.p_memsz) as usize);
        (self.base, self.base + ends.max().unwrap_or(0))
    }

    fn find_by_gnu_hash(&self, name: &CStr) -> Option<usize> {
        let hash = name
            .to_bytes()
            .iter()
            .fold(5381u32, |hash, byte| hash.wrapping_mul(33).wrapping_add(*byte as u32));
        // SAFETY: a GNU hash table: four words, a filter of 64-bit words, the buckets, and the chains, whose last hash is odd.
        unsafe {
            let [buckets, first, filter_words, shift] = *self.gnu_hash.cast::<[u32; 4]>();
            let filter = self.gnu_hash.add(4).cast::<u64>();
            let word = *filter.add((hash / 64 % filter_words) as usize);
            if word >> (hash % 64) & word >> ((hash >> shift) % 64) & 1 == 0 {
                return None;
            }
            let bucket = filter.add(filter_words as usize).cast::<u32>();
            let chain = bucket.add(buckets as usize);
            let mut index = *bucket.add((hash % buckets) as usize);
            if index < first {
                return None;
            }
            loop {
                let here = *chain.add((index - first) as usize);
                if (here ^ hash) >> 1 == 0 && self.is_definition(index as usize, name) {
                    return Some(index as usize);
                }
                if here & 1 != 0 {
                    return None;
                }
                index += 1;
            }
        }
    }

    /// By the old table's count of symbols, which is all that it is needed for.
    fn find_by_count(&self, name: &CStr) -> Option<usize> {
        // SAFETY: its second word is the number of symbols.
        let count = unsafe { *self.hash.add(1) } as usize;
        (1..count).find(|index| self.is_definition(*index, name))
    }

    fn is_definition(&self, index: usize, name: &CStr) -> bool {
        // SAFETY: an index that a table of this object has.
        unsafe {
            let symbol = &*self.symbols.add(index);
            let old = !self.versions.is_null() && *self.versions.add(index) & VERSION_HIDDEN != 0;
            symbol.st_shndx != 0
                && symbol.st_value != 0
                && symbol.st_info & 0xf <= STT_FUNC
                && !old
                && self.name(symbol.st_name as usize) == name
        }
    }

    /// Its references to what others define.
    pub fn references(&self) -> impl Iterator<Item = Reference> {
        let table = |start: i64, bytes: i64| -> &'static [Elf64_Rela] {
            let (start, bytes) = (self.address(start), self.entry(bytes).unwrap_or(0));
            let count = if start == 0 { 0 } else { bytes / size_of::<Elf64_Rela>() };
            if count == 0 {
                return &[];
            }
            // SAFETY: a table of relocations of so many bytes.
            unsafe { from_raw_parts(start as *const Elf64_Rela, count) }
        };
        let object = *self;
        let all = table(DT_RELA, DT_RELASZ).iter().chain(table(DT_JMPREL, DT_PLTRELSZ));
        all.filter_map(move |entry| {
            let (kind, index) = (entry.r_info as u32, (entry.r_info >> 32) as usize);
            if ![ADDRESS, GLOBAL, CALL].contains(&kind) || entry.r_addend != 0 || index == 0 {
                return None;
            }
            // SAFETY: a symbol that a relocation names.
            let symbol = unsafe { &*object.symbols.add(index) };
            (symbol.st_shndx == 0).then(|| Reference {
                place: object.base.wrapping_add(entry.r_offset as usize) as *const AtomicUsize,
                name: object.name(symbol.st_name as usize),
                lazily: kind == CALL,
            })
        })
    }
}

// Kinds of relocations that are a symbol's address.
#[cfg(target_arch = "x86_64")]
const ADDRESS: u32 = 1;
#[cfg(target_arch = "x86_64")]
const GLOBAL: u32 = 6;
#[cfg(target_arch = "x86_64")]
const CALL: u32 = 7;
#[cfg(target_arch = "aarch64")]
const ADDRESS: u32 = 257;
#[cfg(target_arch = "aarch64")]
const GLOBAL: u32 = 1025;
#[cfg(target_arch = "aarch64")]
const CALL: u32 = 1026;

pub struct Reference {
    place: *const AtomicUsize,
    pub name: &'static CStr,
    /// It may be looked up at the first call.
    pub lazily: bool,
}

impl Reference {
    pub fn place(&self) -> usize {
        self.place as usize
    }

    /// Where it leads now.
    pub fn target(&self) -> usize {
        // SAFETY: a place that the loader has filled, in an object that stays (see `Object::new`).
        // ORDER: Relaxed: the code that it leads to was there before.
        unsafe { (*self.place).load(Ordering::Relaxed) }
    }

    /// # Safety
    /// The place can be written.
    pub unsafe fn lead_to(&self, target: usize) {
        // SAFETY: by contract; one store, so a thread that calls meanwhile goes the old way or the new.
        unsafe { (*self.place).store(target, Ordering::Relaxed) };
    }
}
