//! Ways to libc's functions that lead around ours: look-ups by a handle, libraries that prefer what they were linked with
//! (RTLD_DEEPBIND), and a second libc (dlmopen).

use crate::next;
use crate::objects::{self, Loaded};
use core::arch::naked_asm;
use core::ffi::CStr;
use libc::{c_char, c_int, c_long, c_void};
use ringlet::socket::process;
use ringlet_linux::elf::Object;
use ringlet_linux::map;

const READ_WRITE: c_int = libc::PROT_READ | libc::PROT_WRITE;
// dlfcn.h: RTLD_DEFAULT and RTLD_NEXT.
const DEFAULT: usize = 0;
const NEXT: usize = usize::MAX;

/// What one of these calls is to do: return `value`, or go on at `go`, as if it had been called by our caller: the loader looks at
/// who calls.
#[repr(C)]
struct Answer {
    value: usize,
    go: usize,
}

impl Answer {
    fn go(next: *mut c_void) -> Answer {
        Answer { value: 0, go: next as usize }
    }
    fn is(value: usize) -> Answer {
        Answer { value, go: 0 }
    }
}

macro_rules! next_address {
    ($name:literal) => {
        $crate::next_of!($name).address()
    };
}

/// Asks `$answer`, with up to three arguments and the caller's address.
macro_rules! as_the_caller {
    ($name:ident, $answer:ident) => {
        #[cfg(target_arch = "x86_64")]
        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        pub unsafe extern "C" fn $name() {
            naked_asm!(
                "push rdi", "push rsi", "push rdx",
                "mov rcx, [rsp+24]",
                "call {answer}",
                "mov r11, rdx",
                "pop rdx", "pop rsi", "pop rdi",
                "test r11, r11",
                "jz 2f",
                "jmp r11",
                "2: ret",
                answer = sym $answer,
            )
        }

        #[cfg(target_arch = "aarch64")]
        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        pub unsafe extern "C" fn $name() {
            naked_asm!(
                "stp x29, x30, [sp, #-48]!",
                "stp x0, x1, [sp, #16]", "str x2, [sp, #32]",
                "mov x3, x30",
                "bl {answer}",
                "mov x16, x1",
                "cbz x16, 2f",
                "ldp x0, x1, [sp, #16]", "ldr x2, [sp, #32]",
                "2: ldp x29, x30, [sp], #48",
                "cbz x16, 3f",
                "br x16",
                "3: ret",
                answer = sym $answer,
            )
        }
    };
}

as_the_caller!(dlsym, look_up);
as_the_caller!(dlvsym, look_up_version);
as_the_caller!(dlopen, load);
as_the_caller!(dlmopen, load_elsewhere);

extern "C" fn look_up(handle: usize, name: *const c_char, _: usize, caller: usize) -> Answer {
    let by_handle = || next!(c"dlsym", fn(usize, *const c_char) -> usize, handle, name);
    // SAFETY: the program's name.
    unsafe { found(next_address!(c"dlsym"), by_handle, handle, name, caller) }
}

extern "C" fn look_up_version(
    handle: usize,
    name: *const c_char,
    version: *const c_char,
    caller: usize,
) -> Answer {
    let by_handle = || {
        next!(c"dlvsym", fn(usize, *const c_char, *const c_char) -> usize, handle, name, version)
    };
    // SAFETY: the program's handle and name, as dlvsym takes them.
    unsafe { found(next_address!(c"dlvsym"), by_handle, handle, name, caller) }
}

/// Ours, where the loader would find libc's.
unsafe fn found(
    next: *mut c_void,
    by_handle: impl FnOnce() -> usize,
    handle: usize,
    name: *const c_char,
    caller: usize,
) -> Answer {
    if name.is_null() {
        return Answer::go(next);
    }
    // SAFETY: a C string, by the contract of dlsym.
    let name = unsafe { CStr::from_ptr(name) };
    let Some((ours, of_ours)) = objects::ours().and_then(|us| Some((us, us.find(name)?))) else {
        return Answer::go(next);
    };
    if handle == DEFAULT || handle == NEXT {
        return match is_only_libcs(ours, name, Some((handle, caller))) {
            true => Answer::is(of_ours),
            false => Answer::go(next),
        };
    }
    let found = by_handle();
    if name.to_bytes().starts_with(b"io_uring_") && found != of_ours && found != 0 {
        if next::address_of(name) as usize == found {
            return Answer::is(of_ours);
        }
        // The program's own, or a second liburing's: ours does not stand before it.
        process::uses_io_uring();
    }
    let of_libc = objects::is_in(&objects::pieces_of_libc(), found);
    Answer::is(if of_libc && !goes_on_to(caller, name) { of_ours } else { found })
}

/// Does ours of this name go on to the caller's, which stands between us and libc? It means libc's: ours would come back to it.
fn goes_on_to(caller: usize, name: &CStr) -> bool {
    let mut found = false;
    objects::each_loaded(|loaded| {
        let object = &loaded.object;
        found |= loaded.holds(caller)
            && object.find(name).is_some()
            && objects::behind_us().any(|other| other.is(object) && !objects::is_libc(&other));
    });
    found
}

/// Does nobody but us and libc have a function of this name, so that whoever asks for it means libc's? A caller that stands in front
/// of us finds ours by itself; one that stands in front of libc and has such a function is what ours goes on to.
fn is_only_libcs(ours: Object, name: &CStr, look_up: Option<(usize, usize)>) -> bool {
    let (mut only, mut behind_us, mut before_us) = (true, false, false);
    objects::each_loaded(|loaded| {
        let object = &loaded.object;
        let asks = look_up.is_some_and(|(handle, caller)| handle == NEXT && loaded.holds(caller));
        if object.is(&ours) {
            behind_us = true;
        } else if objects::is_libc(object) {
        } else if asks && !behind_us {
            before_us = true;
        } else if object.find(name).is_some() {
            let stands_between = || objects::behind_us().any(|other| other.is(object));
            only &= asks && !stands_between();
        }
    });
    only && !before_us
}

extern "C" fn load(file: *const c_char, flags: c_int, _: usize, caller: usize) -> Answer {
    let next = next_address!(c"dlopen");
    if flags & libc::RTLD_DEEPBIND == 0 || file.is_null() {
        return Answer::go(next);
    }
    // SAFETY: the program's name.
    let place = match is_looked_for(unsafe { CStr::from_ptr(file) }, caller) {
        true => objects::returns_from(caller).filter(|_| !returns_are_guarded()),
        false => Some(here as *const () as usize),
    };
    let Some(place) = place else {
        // The loader must see who asks, and then we do not see when it is done.
        process::is_reached_around();
        return Answer::go(next);
    };
    process::begin_loading_deep();
    let handle = match returns_are_guarded() {
        true => next!(c"dlopen", fn(*const c_char, c_int) -> usize, file, flags),
        // SAFETY: libc's function of this name with the program's arguments; `place` is a `ret`.
        false => unsafe { call_from(place, next as usize, file as usize, flags as usize) },
    };
    let all_ours = lead_to_ours();
    process::end_loading_deep();
    if !all_ours {
        process::is_reached_around();
    }
    Answer::is(handle)
}

/// Calls `function` with two arguments as if from `place`, where an instruction stands that returns: to us.
#[cfg(target_arch = "x86_64")]
#[unsafe(naked)]
unsafe extern "C" fn call_from(
    place: usize,
    function: usize,
    first: usize,
    second: usize,
) -> usize {
    naked_asm!(
        // (Both addresses take 16 bytes: the stack is aligned as for any call.)
        "lea rax, [rip + 2f]",
        "push rax",
        "push rdi",
        "mov rax, rsi",
        "mov rdi, rdx",
        "mov rsi, rcx",
        "jmp rax",
        "2: ret",
    )
}

/// There a return to what was not called can't be made.
#[cfg(target_arch = "aarch64")]
unsafe extern "C" fn call_from(_: usize, function: usize, first: usize, second: usize) -> usize {
    // SAFETY: our own contract: the address of a C function of two words.
    unsafe {
        let function: extern "C" fn(usize, usize) -> usize = core::mem::transmute(function);
        function(first, second)
    }
}

/// A place of ours that returns.
#[unsafe(naked)]
unsafe extern "C" fn here() {
    naked_asm!("ret")
}

/// Does the processor check that each return goes to where the call came from (a shadow stack)?
#[cfg(target_arch = "x86_64")]
fn returns_are_guarded() -> bool {
    let stack: usize;
    // SAFETY: rdsspq rax: reads a register, and does nothing where there is none such.
    unsafe {
        core::arch::asm!(
            ".byte 0xf3, 0x48, 0x0f, 0x1e, 0xc8",
            inout("rax") 0usize => stack,
            options(nomem, nostack)
        );
    }
    stack != 0
}

#[cfg(target_arch = "aarch64")]
fn returns_are_guarded() -> bool {
    true
}

/// Does it depend on the caller where the loader finds this file?
fn is_looked_for(file: &CStr, caller: usize) -> bool {
    let file = file.to_bytes();
    if file.contains(&b'/') && !file.contains(&b'$') {
        return false;
    }
    let mut depends = false;
    objects::each_loaded(|loaded| {
        let asks =
            loaded.holds(caller) && (file.contains(&b'$') || loaded.object.has_search_path());
        depends |= asks || loaded.object.has_lasting_search_path();
    });
    depends
}

/// Another libc, whose functions do not come past us; or (into the program's own part) a library that may prefer libc's.
extern "C" fn load_elsewhere(part: c_long, _: usize, flags: usize, _: usize) -> Answer {
    if part != libc::LM_ID_BASE || flags as c_int & libc::RTLD_DEEPBIND != 0 {
        process::is_reached_around();
    }
    Answer::go(next_address!(c"dlmopen"))
}

/// Leads each reference that goes to libc's function, where we have one of the name, to ours. False: not all could be.
fn lead_to_ours() -> bool {
    let Some(ours) = objects::ours() else { return true };
    let mut all = true;
    objects::each_loaded(|loaded| {
        if !loaded.object.is(&ours) && !objects::is_libc(&loaded.object) {
            all &= lead_to(&ours, loaded);
        }
    });
    all
}

fn lead_to(ours: &Object, loaded: &Loaded) -> bool {
    let libc = objects::pieces_of_libc();
    let mut sealed = loaded.sealed().map(|part| (part, false));
    let mut all = true;
    for reference in loaded.object.references() {
        let target = reference.target();
        // Not looked up yet: it leads back into the library itself.
        let open = reference.lazily && loaded.holds(target);
        let uring = reference.name.to_bytes().starts_with(b"io_uring_") && {
            let next = next::address_of(reference.name) as usize;
            next != 0 && (open || target == next)
        };
        if !open && !uring && !objects::is_in(&libc, target) {
            continue;
        }
        let Some(of_ours) = ours.find(reference.name) else { continue };
        if target == of_ours {
            continue;
        }
        if open && !uring && !is_only_libcs(*ours, reference.name, None) {
            all = false;
            continue;
        }
        let mut writable = true;
        if let Some(((start, end), opened)) = &mut sealed
            && (*start..*end).contains(&reference.place())
        {
            // SAFETY: takes no right away.
            *opened = *opened || unsafe { map::protect(*start, *end, READ_WRITE) };
            writable = *opened;
        }
        if writable {
            // SAFETY: writable as the loader has left it, or made so.
            unsafe { reference.lead_to(of_ours) };
        }
        all &= writable;
    }
    if let Some(((start, end), true)) = sealed {
        // SAFETY: as the loader has left it.
        unsafe { map::protect(start, end, libc::PROT_READ) };
    }
    all
}
