//! Plain stores to where a region is transmitted, in a cluster: nothing is mapped there, so each faults, and its handler passes on what it would have
//! written, and steps over it. As on the hardware, what loads there, or loads and stores, faults for good.
//!
//! The handler takes no lock, allocates nothing, and calls the kernel by number. A fault that is none of its business goes on to whoever had the signal
//! before. It knows what compilers and C libraries make of stores on x86-64; elsewhere all stores fault for good.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::host::Membership;
use crate::logged::touch;
use crate::memory::Window;
use crate::region::copy;
use crate::status::Status;

/// Windows of a process at a time.
const WINDOWS_MOST: usize = 1024;
/// Who closes a window waits so long for handlers that are about to write to it. (Later what they need stays.)
const LEAVES: Duration = Duration::from_secs(30);

struct Slot {
    /// 0: nobody's.
    base: AtomicUsize,
    bytes: AtomicUsize,
    target: AtomicPtr<Target>,
    users: AtomicU32,
}

struct Target {
    host: Arc<Membership>,
    region: u32,
}

static SLOTS: [Slot; WINDOWS_MOST] = [const {
    Slot {
        base: AtomicUsize::new(0),
        bytes: AtomicUsize::new(0),
        target: AtomicPtr::new(std::ptr::null_mut()),
        users: AtomicU32::new(0),
    }
}; WINDOWS_MOST];
/// Slots behind this were never used.
static USED: AtomicUsize = AtomicUsize::new(0);

/// A window that the handler knows.
pub struct Opened {
    window: Window,
    slot: &'static Slot,
}

impl Opened {
    pub fn new(bytes: usize, host: &Arc<Membership>, region: u32) -> Result<Opened, Status> {
        let window = Window::new(bytes)?;
        let target = Box::into_raw(Box::new(Target { host: host.clone(), region }));
        // ORDER: AcqRel, pairs with the swap in `drop`: a slot that is free is so in all.
        let takes = |slot: &&Slot| {
            let free = std::ptr::null_mut();
            slot.target.compare_exchange(free, target, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        };
        let Some(at) = SLOTS.iter().position(|slot| takes(&slot)) else {
            // SAFETY: made above, and seen by nobody.
            #[allow(unsafe_code)]
            drop(unsafe { Box::from_raw(target) });
            return Err(Status::Full);
        };
        let slot = &SLOTS[at];
        USED.fetch_max(at + 1, Ordering::Relaxed);
        slot.bytes.store(bytes, Ordering::Relaxed);
        // ORDER: SeqCst, pairs with the loads in `find`.
        slot.base.store(window.base() as usize, Ordering::SeqCst);
        #[cfg(target_arch = "x86_64")]
        x86::install();
        Ok(Opened { window, slot })
    }

    #[inline]
    pub fn window(&self) -> &Window {
        &self.window
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        // ORDER: SeqCst, pairs with `find`: who is not seen as its user sees that it is nobody's.
        self.slot.base.store(0, Ordering::SeqCst);
        let began = Instant::now();
        while self.slot.users.load(Ordering::SeqCst) != 0 {
            if began.elapsed() > LEAVES {
                return;
            }
            std::thread::yield_now();
        }
        // ORDER: Release, pairs with the exchange in `new`.
        let target = self.slot.target.swap(std::ptr::null_mut(), Ordering::AcqRel);
        // SAFETY: made in `new`; nobody uses it, and nobody finds it any more.
        #[allow(unsafe_code)]
        drop(unsafe { Box::from_raw(target) });
    }
}

/// A window in use: it is not closed meanwhile.
struct Found {
    slot: &'static Slot,
    base: usize,
    bytes: usize,
}

impl Drop for Found {
    fn drop(&mut self) {
        self.slot.users.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Found {
    fn target(&self) -> &Target {
        // SAFETY: not given back while it has a user (`Opened::drop`).
        #[allow(unsafe_code)]
        unsafe {
            &*self.slot.target.load(Ordering::Acquire)
        }
    }

    /// Passes bytes on that `fill` writes. What the process can be told by nothing else is counted as an error.
    fn store(
        &self,
        address: usize,
        bytes: usize,
        fill: impl FnMut(usize, usize, *mut u8) -> bool,
    ) -> Result<(), Status> {
        let target = self.target();
        target.host.lives()?;
        let logged = target.host.logged.as_ref().ok_or(Status::NotInitialised)?;
        match logged.put_by(target.region, address - self.base, bytes, fill) {
            Ok(()) => Ok(()),
            Err(Status::BadAddress) => Err(Status::BadAddress),
            Err(_) => {
                logged.lose();
                Ok(())
            }
        }
    }

    fn holds(&self, address: usize, bytes: usize) -> bool {
        address >= self.base
            && address - self.base <= self.bytes
            && bytes <= self.bytes - (address - self.base)
    }
}

fn find(address: usize) -> Option<Found> {
    for slot in &SLOTS[..USED.load(Ordering::Relaxed)] {
        let is_in = |base: usize| {
            base != 0 && address >= base && address - base < slot.bytes.load(Ordering::Relaxed)
        };
        if !is_in(slot.base.load(Ordering::SeqCst)) {
            continue;
        }
        // ORDER: SeqCst, pairs with the store of the base in `Opened::drop`: either that sees a user, or this sees that it is nobody's.
        slot.users.fetch_add(1, Ordering::SeqCst);
        let base = slot.base.load(Ordering::SeqCst);
        let found = Found { slot, base, bytes: slot.bytes.load(Ordering::Relaxed) };
        if is_in(base) {
            return Some(found);
        }
    }
    None
}

/// As [`copy`], also to where a region is transmitted in a cluster. [`Status::BadParameter`]: not all of it is in one region.
///
/// # Safety
/// As of [`copy`]; or all of `to` is in one transmitter.
#[allow(unsafe_code)]
pub unsafe fn transmit(from: *const u8, to: *mut u8, bytes: usize) -> Result<(), Status> {
    let Some(found) = find(to as usize) else {
        // SAFETY: our own contract.
        unsafe { copy(from, to, bytes) };
        return Ok(());
    };
    if !found.holds(to as usize, bytes) {
        return Err(Status::BadParameter);
    }
    // SAFETY: our own contract.
    unsafe { touch(from, bytes) };
    found.store(to as usize, bytes, |at, length, to| {
        // SAFETY: a part of the bytes, and room for it in the log.
        unsafe { std::ptr::copy_nonoverlapping(from.add(at), to, length) };
        true
    })
}

#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code)]
mod x86 {
    use std::sync::{Mutex, OnceLock, PoisonError};

    use iced_x86::{Decoder, DecoderOptions, Instruction, Mnemonic, OpKind, Register};
    use libc::{c_int, c_void, siginfo_t, ucontext_t};

    use super::*;

    const PAGE: usize = 4096;
    const LONGEST: usize = 15;
    /// Of the page fault's cause: it was a store.
    const WRITES: i64 = 2;
    const FETCHES: i64 = 16;
    const DIRECTION: i64 = 1 << 10;
    /// What one fault of a repeated instruction does at most: then it faults again.
    const AT_ONCE: usize = 64 << 10;

    type Handler = extern "C" fn(c_int, *mut siginfo_t, *mut c_void);
    /// One for each time that we were put before others. Who took the signal since passes on to the one that he found, and that to who was there before
    /// him: never to him again.
    static HANDLERS: [Handler; 8] = [
        handle::<0>,
        handle::<1>,
        handle::<2>,
        handle::<3>,
        handle::<4>,
        handle::<5>,
        handle::<6>,
        handle::<7>,
    ];
    static BEFORE: [OnceLock<libc::sigaction>; 8] = [const { OnceLock::new() }; 8];
    /// A handler that is for once has been called.
    static SPENT: [AtomicBool; 8] = [const { AtomicBool::new(false) }; 8];
    static INSTALLING: Mutex<()> = Mutex::new(());
    /// Where parts of registers are in what the kernel saves: of opmasks, of the upper halves of ZMM0 to 15, of ZMM16 to 31.
    static PLACES: [AtomicUsize; 3] = [const { AtomicUsize::new(0) }; 3];

    /// Again at each window: a program may have taken the signal since, and has it behind us then.
    pub fn install() {
        let _one = INSTALLING.lock().unwrap_or_else(PoisonError::into_inner);
        // (Its tables are made at its first use, which must not be in a handler.)
        let _ = Decoder::with_ip(64, &[0x90], 0, DecoderOptions::NONE).decode();
        for (place, component) in PLACES.iter().zip(5..) {
            let leaf = std::arch::x86_64::__cpuid_count(0xd, component);
            place.store(leaf.ebx as usize, Ordering::Relaxed);
        }
        // SAFETY: a handler that only uses what it is given, and what was prepared above.
        unsafe {
            let mut ours: libc::sigaction = std::mem::zeroed();
            let mut before: libc::sigaction = std::mem::zeroed();
            ours.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESTART;
            libc::sigaction(libc::SIGSEGV, std::ptr::null(), &raw mut before);
            if HANDLERS.iter().any(|ours| before.sa_sigaction == *ours as usize) {
                return;
            }
            let free = BEFORE.iter().position(|each| each.get().is_none());
            let is_same = |each: &libc::sigaction| each.sa_sigaction == before.sa_sigaction;
            let same = || BEFORE.iter().position(|each| each.get().is_some_and(is_same));
            let Some(at) = free.or_else(same) else { return };
            BEFORE[at].get_or_init(|| before);
            SPENT[at].store(false, Ordering::Relaxed);
            ours.sa_sigaction = HANDLERS[at] as usize;
            libc::sigaction(libc::SIGSEGV, &raw const ours, std::ptr::null_mut());
        }
    }

    extern "C" fn handle<const AT: usize>(
        signal: c_int,
        info: *mut siginfo_t,
        context: *mut c_void,
    ) {
        // SAFETY: what the kernel gives to a handler with SA_SIGINFO; errno is this thread's.
        unsafe {
            let errno = *libc::__errno_location();
            let is_done = if (*info).si_code <= 0 {
                None
            } else {
                step((*info).si_addr() as usize, &mut *context.cast::<ucontext_t>())
            };
            *libc::__errno_location() = errno;
            // (It was set before this became the handler.)
            if let (None, Some(before)) = (is_done, BEFORE[AT].get()) {
                let is_fault = (*info).si_code > 0;
                if is_fault && matches!(before.sa_sigaction, libc::SIG_DFL | libc::SIG_IGN) {
                    say_why((*info).si_addr() as usize, &mut *context.cast::<ucontext_t>());
                }
                pass_on(before, &SPENT[AT], signal, info, context);
            }
        }
    }

    /// A line, within bounds, made where nothing can be allocated.
    struct Line([u8; 256], usize);

    impl std::fmt::Write for Line {
        fn write_str(&mut self, text: &str) -> std::fmt::Result {
            let length = text.len().min(self.0.len() - self.1);
            self.0[self.1..][..length].copy_from_slice(&text.as_bytes()[..length]);
            self.1 += length;
            Ok(())
        }
    }

    /// Of what ends a program, if that is an instruction which reached for what it transmits.
    fn say_why(address: usize, context: &mut ucontext_t) {
        use std::fmt::Write;
        let thread = Thread(context);
        let at = thread.register(libc::REG_RIP);
        if thread.register(libc::REG_ERR) as i64 & FETCHES != 0 || find(address).is_none() {
            return;
        }
        let Some(instruction) = decode(at as usize) else { return };
        let (mut line, what) = (Line([0; 256], 0), instruction.mnemonic());
        let _ = writeln!(
            line,
            "ringlet: {what:?} at {at:#x}: memory that is transmitted to other hosts takes plain stores only; this ends the program"
        );
        // SAFETY: what was written there.
        unsafe { libc::syscall(libc::SYS_write, 2, line.0.as_ptr(), line.1) };
    }

    /// Does as the kernel would have done without us. (But what is for once costs the signal for that handler alone: stores are trapped still.)
    ///
    /// # Safety
    /// What the kernel has given to the handler.
    unsafe fn pass_on(
        before: &libc::sigaction,
        spent: &AtomicBool,
        signal: c_int,
        info: *mut siginfo_t,
        context: *mut c_void,
    ) {
        // SAFETY: what is there; actions and sets that are filled; handlers that the program has set, each called as one of its kind.
        unsafe {
            let is_sent = (*info).si_code <= 0;
            let mut default: libc::sigaction = std::mem::zeroed();
            default.sa_sigaction = libc::SIG_DFL;
            let no_more = || libc::sigaction(signal, &raw const default, std::ptr::null_mut());
            let has = |flag: c_int| before.sa_flags & flag != 0;
            let is_spent = has(libc::SA_RESETHAND) && spent.swap(true, Ordering::Relaxed);
            match if is_spent { libc::SIG_DFL } else { before.sa_sigaction } {
                libc::SIG_IGN if is_sent => {}
                libc::SIG_DFL | libc::SIG_IGN => {
                    no_more();
                    // (A fault comes again when we return; what was sent does not.)
                    if is_sent {
                        libc::raise(signal);
                    }
                }
                handler => {
                    let none = std::ptr::null_mut();
                    libc::pthread_sigmask(libc::SIG_BLOCK, &raw const before.sa_mask, none);
                    if has(libc::SA_NODEFER) {
                        let mut only: libc::sigset_t = std::mem::zeroed();
                        libc::sigaddset(&raw mut only, signal);
                        libc::pthread_sigmask(libc::SIG_UNBLOCK, &raw const only, none);
                    }
                    if has(libc::SA_SIGINFO) {
                        let handler: Handler = std::mem::transmute(handler);
                        handler(signal, info, context);
                    } else {
                        let handler: extern "C" fn(c_int) = std::mem::transmute(handler);
                        handler(signal);
                    }
                }
            }
        }
    }

    /// What a program's thread was about to do.
    struct Thread<'a>(&'a mut ucontext_t);

    /// In the order of their numbers.
    const GENERAL: [c_int; 16] = [
        libc::REG_RAX,
        libc::REG_RCX,
        libc::REG_RDX,
        libc::REG_RBX,
        libc::REG_RSP,
        libc::REG_RBP,
        libc::REG_RSI,
        libc::REG_RDI,
        libc::REG_R8,
        libc::REG_R9,
        libc::REG_R10,
        libc::REG_R11,
        libc::REG_R12,
        libc::REG_R13,
        libc::REG_R14,
        libc::REG_R15,
    ];

    /// Its number among those from `first` on, of which there are so many.
    fn number(register: Register, first: Register, count: usize) -> Option<usize> {
        (register as usize).checked_sub(first as usize).filter(|number| *number < count)
    }

    impl Thread<'_> {
        fn register(&self, at: c_int) -> u64 {
            self.0.uc_mcontext.gregs[at as usize] as u64
        }

        fn set(&mut self, at: c_int, value: u64) {
            self.0.uc_mcontext.gregs[at as usize] = value as i64;
        }

        fn general(&self, register: Register) -> Option<u64> {
            for first in [Register::RAX, Register::EAX, Register::AX] {
                if let Some(number) = number(register, first, 16) {
                    return Some(self.register(GENERAL[number]));
                }
            }
            // (AL to BL, AH to BH, SPL to DIL, R8L to R15L.)
            let of_bytes = number(register, Register::AL, 20)?;
            let at = if of_bytes < 4 { of_bytes } else { of_bytes - 4 };
            let value = self.register(GENERAL[at]);
            Some(if (4..8).contains(&of_bytes) { value >> 8 } else { value })
        }

        /// A piece of what the kernel has saved of the other registers: all zero where it was not in use.
        fn saved(&self, component: u32, at: usize, to: &mut [u8]) -> Option<()> {
            let area = self.0.uc_mcontext.fpregs.cast::<u8>();
            if area.is_null() {
                return None;
            }
            let end = at + to.len();
            // KERNEL: behind the 464 bytes that fxsave has: a word that says that there is more, how much, and its parts; at 512 those that are in use.
            // SAFETY: the first 512 bytes are always there; then as many as the kernel says.
            unsafe {
                if component > 1 {
                    let word = |at: usize| area.add(at).cast::<u32>().read_unaligned();
                    let parts = |at: usize| area.add(at).cast::<u64>().read_unaligned();
                    let has_more = word(464) == libc_magic() && parts(472) >> component & 1 == 1;
                    if !has_more || end > word(480) as usize {
                        return None;
                    }
                    if parts(512) >> component & 1 == 0 {
                        to.fill(0);
                        return Some(());
                    }
                }
                std::ptr::copy_nonoverlapping(area.add(at), to.as_mut_ptr(), to.len());
            }
            Some(())
        }

        /// (Its registers are those of the x87, in the order of their numbers as long as they are used.)
        fn mmx(&self, register: Register) -> Option<[u8; 64]> {
            let mut value = [0; 64];
            let at = number(register, Register::MM0, 8)?;
            self.saved(0, 32 + 16 * at, &mut value[..8])?;
            Some(value)
        }

        /// As many bytes of a vector register as are asked for.
        fn vector(&self, register: Register, bytes: usize) -> Option<[u8; 64]> {
            let mut value = [0; 64];
            let of = [Register::XMM0, Register::YMM0, Register::ZMM0];
            let at = of.iter().find_map(|first| number(register, *first, 32))?;
            let place = |which: usize| PLACES[which].load(Ordering::Relaxed);
            if at >= 16 {
                self.saved(7, place(2) + 64 * (at - 16), &mut value)?;
                return Some(value);
            }
            self.saved(1, 160 + 16 * at, &mut value[..16])?;
            if bytes > 16 {
                self.saved(2, 576 + 16 * at, &mut value[16..32])?;
            }
            if bytes > 32 {
                self.saved(6, place(1) + 32 * at, &mut value[32..])?;
            }
            Some(value)
        }

        /// What the x87 has on top of its stack, and its control word.
        fn top(&self) -> Option<([u8; 10], u16)> {
            let (mut value, mut head) = ([0; 10], [0; 5]);
            self.saved(0, 32, &mut value)?;
            self.saved(0, 0, &mut head)?;
            let status = u16::from_le_bytes([head[2], head[3]]);
            let is_there = head[4] >> (status >> 11 & 7) & 1 == 1;
            is_there.then_some((value, u16::from_le_bytes([head[0], head[1]])))
        }

        /// It has been stored, with these exceptions; and is taken from the stack, or not.
        fn topped(&mut self, exceptions: u16, pops: bool) -> Option<()> {
            let area = self.0.uc_mcontext.fpregs.cast::<u8>();
            if area.is_null() {
                return None;
            }
            // SAFETY: within the first 512 bytes, which are always there: control, status, which registers of the stack are in use, and from 32 on they are.
            unsafe {
                let status = area.add(2).cast::<u16>();
                let mut now = status.read_unaligned() | exceptions;
                if pops {
                    let top = now >> 11 & 7;
                    *area.add(4) &= !(1 << top);
                    now = now & !(7 << 11) | (((top + 1) & 7) << 11);
                    std::slice::from_raw_parts_mut(area.add(32), 8 * 16).rotate_left(16);
                }
                status.write_unaligned(now);
            }
            Some(())
        }

        fn clear_mask(&mut self, register: Register) -> Option<()> {
            let at = PLACES[0].load(Ordering::Relaxed) + 8 * number(register, Register::K0, 8)?;
            // (It is saved where it is not zero.)
            self.mask(register).filter(|mask| *mask != 0)?;
            // SAFETY: `mask` has just read it there.
            unsafe {
                self.0.uc_mcontext.fpregs.cast::<u8>().add(at).cast::<u64>().write_unaligned(0)
            };
            Some(())
        }

        fn mask(&self, register: Register) -> Option<u64> {
            if register == Register::None {
                return Some(u64::MAX);
            }
            let (mut value, at) = ([0; 8], number(register, Register::K0, 8)?);
            self.saved(5, PLACES[0].load(Ordering::Relaxed) + 8 * at, &mut value)?;
            Some(u64::from_le_bytes(value))
        }
    }

    /// FP_XSTATE_MAGIC1.
    fn libc_magic() -> u32 {
        0x4650_5853
    }

    fn decode(at: usize) -> Option<Instruction> {
        let to_end = PAGE - at % PAGE;
        // (If it goes on in the next page, that is there: the processor has read it.)
        for length in [LONGEST.min(to_end), LONGEST] {
            // SAFETY: the processor has read this instruction just now.
            let bytes = unsafe { std::slice::from_raw_parts(at as *const u8, length) };
            let mut decoder = Decoder::with_ip(64, bytes, at as u64, DecoderOptions::NONE);
            let instruction = decoder.decode();
            if !instruction.is_invalid() {
                return Some(instruction);
            }
        }
        None
    }

    /// Does what the thread was about to do. `None` if it is nothing of ours.
    fn step(address: usize, context: &mut ucontext_t) -> Option<()> {
        let found = find(address)?;
        let mut thread = Thread(context);
        if thread.0.uc_mcontext.gregs[libc::REG_ERR as usize] & WRITES == 0 {
            return None;
        }
        let instruction = decode(thread.register(libc::REG_RIP) as usize)?;
        use Mnemonic::{Movsb, Movsd, Movsq, Movsw, Stosb, Stosd, Stosq, Stosw};
        let is_string = instruction.op0_kind() == OpKind::MemoryESRDI;
        match instruction.mnemonic() {
            Stosb | Stosw | Stosd | Stosq if is_string => {
                repeat(&found, &mut thread, &instruction, true)?
            }
            Movsb | Movsw | Movsd | Movsq if is_string => {
                repeat(&found, &mut thread, &instruction, false)?
            }
            mnemonic => {
                match kind(mnemonic) {
                    Kind::Plain => store(&found, &thread, &instruction)?,
                    Kind::X87(pops) => store_top(&found, &mut thread, &instruction, pops)?,
                    Kind::Scatter(each) => scatter(&mut thread, &instruction, each)?,
                    Kind::ByBytes => store_by_bytes(&found, &thread, &instruction)?,
                    Kind::Direct => store_directly(&found, &thread, &instruction)?,
                }
                thread.set(libc::REG_RIP, instruction.next_ip());
            }
        }
        Some(())
    }

    enum Kind {
        Plain,
        /// Of what is on top of the x87's stack, which may be taken from it.
        X87(bool),
        /// Elements of so many bytes, each to a place of its own.
        Scatter(usize),
        /// Bytes that a mask of bytes names, to where RDI is.
        ByBytes,
        /// A line that lies elsewhere.
        Direct,
    }

    fn kind(mnemonic: Mnemonic) -> Kind {
        use Mnemonic::*;
        match mnemonic {
            Fst | Fist => Kind::X87(false),
            Fstp | Fistp | Fisttp => Kind::X87(true),
            Vpscatterdd | Vpscatterqd | Vscatterdps | Vscatterqps => Kind::Scatter(4),
            Vpscatterdq | Vpscatterqq | Vscatterdpd | Vscatterqpd => Kind::Scatter(8),
            Maskmovdqu | Vmaskmovdqu | Maskmovq => Kind::ByBytes,
            Movdir64b => Kind::Direct,
            _ => Kind::Plain,
        }
    }

    /// Where it stores (of those that store elements to several places, the one of this number).
    fn place(thread: &Thread, instruction: &Instruction, nth: usize) -> Option<usize> {
        let index = instruction.memory_index();
        let place = instruction.virtual_address(0, nth, |register, at, bytes| match register {
            // (Of these two the kernel does not tell where they are.)
            Register::FS | Register::GS => None,
            Register::CS | Register::DS | Register::ES | Register::SS => Some(0),
            register if register == index && register >= Register::XMM0 => {
                let value = thread.vector(register, 64).or_else(|| thread.vector(register, 32))?;
                let element = value.get(at * bytes..(at + 1) * bytes)?;
                Some(match bytes {
                    4 => i32::from_le_bytes(element.try_into().ok()?) as u64,
                    _ => u64::from_le_bytes(element.try_into().ok()?),
                })
            }
            register => thread.general(register),
        })?;
        Some(place as usize)
    }

    fn put(found: &Found, to: usize, value: &[u8]) -> Option<()> {
        if !found.holds(to, value.len()) {
            return None;
        }
        let stored = found.store(to, value.len(), |at, length, to| {
            // SAFETY: a part of the value, and room for it in the log.
            unsafe { std::ptr::copy_nonoverlapping(value[at..].as_ptr(), to, length) };
            true
        });
        stored.ok()
    }

    /// A number on top of the stack, as the processor converts it.
    fn store_top(
        found: &Found,
        thread: &mut Thread,
        instruction: &Instruction,
        pops: bool,
    ) -> Option<()> {
        use iced_x86::MemorySize::*;
        if instruction.op0_kind() != OpKind::Memory {
            return None;
        }
        let (to, (top, control)) = (place(thread, instruction, 0)?, thread.top()?);
        let (mut value, mut exceptions) = ([0u8; 16], 0u16);
        // (No exception ends the handler. It has the x87 as a new process has it, and leaves it so.)
        let control = control | 0x3f;
        macro_rules! convert {
            ($store:literal) => {
                // SAFETY: 10 bytes are loaded, and 10 at most are stored where there are 16; nothing is left on the stack.
                unsafe {
                    std::arch::asm!(
                        "fldcw word ptr [{control}]",
                        "fld tbyte ptr [{top}]",
                        "fnclex",
                        $store,
                        "fnstsw ax",
                        "fninit",
                        control = in(reg) &raw const control,
                        top = in(reg) top.as_ptr(),
                        to = in(reg) value.as_mut_ptr(),
                        out("ax") exceptions,
                        out("st(0)") _, out("st(1)") _, out("st(2)") _, out("st(3)") _,
                        out("st(4)") _, out("st(5)") _, out("st(6)") _, out("st(7)") _,
                    )
                }
            };
        }
        match (instruction.mnemonic(), instruction.memory_size()) {
            (_, Float80) => value[..10].copy_from_slice(&top),
            (_, Float64) => convert!("fstp qword ptr [{to}]"),
            (_, Float32) => convert!("fstp dword ptr [{to}]"),
            (Mnemonic::Fisttp, Int16) => convert!("fisttp word ptr [{to}]"),
            (Mnemonic::Fisttp, Int32) => convert!("fisttp dword ptr [{to}]"),
            (Mnemonic::Fisttp, Int64) => convert!("fisttp qword ptr [{to}]"),
            (_, Int16) => convert!("fistp word ptr [{to}]"),
            (_, Int32) => convert!("fistp dword ptr [{to}]"),
            (_, Int64) => convert!("fistp qword ptr [{to}]"),
            _ => return None,
        }
        put(found, to, &value[..instruction.memory_size().size()])?;
        thread.topped(exceptions & 0x3f, pops)
    }

    fn scatter(thread: &mut Thread, instruction: &Instruction, each: usize) -> Option<()> {
        let (from, index) = (instruction.op1_register(), instruction.memory_index());
        let index_bytes = match instruction.mnemonic() {
            Mnemonic::Vpscatterdd
            | Mnemonic::Vpscatterdq
            | Mnemonic::Vscatterdps
            | Mnemonic::Vscatterdpd => 4,
            _ => 8,
        };
        let count = (from.size() / each).min(index.size() / index_bytes);
        let (mask, value) =
            (thread.mask(instruction.op_mask())?, thread.vector(from, from.size())?);
        for nth in (0..count).filter(|nth| mask >> nth & 1 == 1) {
            let (to, element) = (place(thread, instruction, nth)?, &value[nth * each..][..each]);
            match find(to) {
                Some(found) => put(&found, to, element)?,
                // (Elsewhere it is a store like any other, which may fault.)
                None => write(to, element)?,
            }
        }
        thread.clear_mask(instruction.op_mask())
    }

    fn store_by_bytes(found: &Found, thread: &Thread, instruction: &Instruction) -> Option<()> {
        let bytes = if instruction.mnemonic() == Mnemonic::Maskmovq { 8 } else { 16 };
        let of = |register| match bytes {
            8 => thread.mmx(register),
            _ => thread.vector(register, bytes),
        };
        let value = of(instruction.op1_register())?;
        let mask = signs(&of(instruction.op2_register())?, 1);
        let to = thread.register(libc::REG_RDI) as usize;
        let mut written = (0..bytes).filter(|at| mask >> at & 1 == 1);
        written.try_for_each(|at| put(found, to + at, &value[at..=at]))
    }

    fn store_directly(found: &Found, thread: &Thread, instruction: &Instruction) -> Option<()> {
        let to = thread.general(instruction.op0_register())? as usize;
        let from = instruction.virtual_address(1, 0, |register, _, _| match register {
            Register::FS | Register::GS => None,
            Register::CS | Register::DS | Register::ES | Register::SS => Some(0),
            register => thread.general(register),
        })?;
        let mut value = [0; 64];
        read(from as usize, value.len(), value.as_mut_ptr()).then_some(())?;
        put(found, to, &value)
    }

    fn store(found: &Found, thread: &Thread, instruction: &Instruction) -> Option<()> {
        if instruction.op0_kind() != OpKind::Memory {
            return None;
        }
        let to = place(thread, instruction, 0)?;
        let bytes = instruction.memory_size().size();
        if let Some(each) = compressed(instruction.mnemonic()) {
            let from = instruction.op1_register();
            let (mask, value) =
                (thread.mask(instruction.op_mask())?, thread.vector(from, from.size())?);
            let chosen = (0..from.size() / each).filter(|nth| mask >> nth & 1 == 1);
            let (mut packed, mut end) = ([0; 64], 0);
            for nth in chosen {
                packed[end..end + each].copy_from_slice(&value[nth * each..][..each]);
                end += each;
            }
            return if end > 0 { put(found, to, &packed[..end]) } else { Some(()) };
        }
        let value = value(thread, instruction, bytes)?;
        if bytes > value.len() {
            return None;
        }
        let put = |from: usize, to_end: usize| {
            let at = to.checked_add(from)?;
            put(found, at, &value[from..to_end])
        };
        let (mask, each) = match by_vector(instruction.mnemonic()) {
            Some(each) => (signs(&thread.vector(instruction.op1_register(), bytes)?, each), each),
            None if instruction.op_mask() == Register::None => return put(0, bytes),
            None => (thread.mask(instruction.op_mask())?, element(instruction.mnemonic())?),
        };
        let is_written = |at: &usize| mask >> (at / each) & 1 == 1;
        let mut at = 0;
        while at < bytes {
            let end = (at..bytes).step_by(each).find(|at| !is_written(at)).unwrap_or(bytes);
            if end > at {
                put(at, end)?;
            }
            at = end + each;
        }
        Some(())
    }

    /// What a mask has a bit for.
    fn element(mnemonic: Mnemonic) -> Option<usize> {
        use Mnemonic::*;
        Some(match mnemonic {
            Vmovdqu8 => 1,
            Vmovdqu16 | Vmovsh | Vcvtps2ph => 2,
            Vmovdqu32 | Vmovdqa32 | Vmovups | Vmovaps | Vmovss => 4,
            Vextractf32x4 | Vextracti32x4 | Vextractf32x8 | Vextracti32x8 => 4,
            Vmovdqu64 | Vmovdqa64 | Vmovupd | Vmovapd | Vmovsd => 8,
            Vextractf64x2 | Vextracti64x2 | Vextractf64x4 | Vextracti64x4 => 8,
            narrows => return Some(narrowed(narrows)?.1),
        })
    }

    /// What stores elements of so many bytes one behind the other, of those that a mask names.
    fn compressed(mnemonic: Mnemonic) -> Option<usize> {
        use Mnemonic::*;
        Some(match mnemonic {
            Vpcompressb => 1,
            Vpcompressw => 2,
            Vpcompressd | Vcompressps => 4,
            Vpcompressq | Vcompresspd => 8,
            _ => return None,
        })
    }

    /// How an element becomes a shorter one.
    #[derive(Clone, Copy)]
    enum Narrows {
        Truncates,
        Signed,
        Unsigned,
    }

    /// What stores elements shorter than they are: of so many bytes, as so many.
    fn narrowed(mnemonic: Mnemonic) -> Option<(usize, usize, Narrows)> {
        use Mnemonic::*;
        use Narrows::*;
        Some(match mnemonic {
            Vpmovwb => (2, 1, Truncates),
            Vpmovdb => (4, 1, Truncates),
            Vpmovdw => (4, 2, Truncates),
            Vpmovqb => (8, 1, Truncates),
            Vpmovqw => (8, 2, Truncates),
            Vpmovqd => (8, 4, Truncates),
            Vpmovswb => (2, 1, Signed),
            Vpmovsdb => (4, 1, Signed),
            Vpmovsdw => (4, 2, Signed),
            Vpmovsqb => (8, 1, Signed),
            Vpmovsqw => (8, 2, Signed),
            Vpmovsqd => (8, 4, Signed),
            Vpmovuswb => (2, 1, Unsigned),
            Vpmovusdb => (4, 1, Unsigned),
            Vpmovusdw => (4, 2, Unsigned),
            Vpmovusqb => (8, 1, Unsigned),
            Vpmovusqw => (8, 2, Unsigned),
            Vpmovusqd => (8, 4, Unsigned),
            _ => return None,
        })
    }

    fn narrow(
        vector: &[u8; 64],
        count: usize,
        (from, to, how): (usize, usize, Narrows),
    ) -> Option<[u8; 64]> {
        let mut narrow = [0; 64];
        for nth in 0..count {
            let mut wide = [0; 8];
            wide[..from].copy_from_slice(vector.get(nth * from..(nth + 1) * from)?);
            let (unsigned, unused) = (u64::from_le_bytes(wide), 64 - 8 * from);
            let signed = (unsigned << unused) as i64 >> unused;
            let most = u64::MAX >> (64 - 8 * to);
            let value = match how {
                Narrows::Truncates => unsigned,
                Narrows::Signed => signed.clamp(-(most as i64 / 2) - 1, most as i64 / 2) as u64,
                Narrows::Unsigned => unsigned.min(most),
            };
            narrow[nth * to..(nth + 1) * to].copy_from_slice(&value.to_le_bytes()[..to]);
        }
        Some(narrow)
    }

    /// Numbers of half the length, as the processor rounds them.
    fn halved(vector: &[u8; 64], count: usize, rounding: u32) -> Option<[u8; 64]> {
        use std::arch::x86_64::{__m128i, _mm_castsi128_ps, _mm_cvtps_ph, _mm_loadu_si128};
        #[target_feature(enable = "f16c")]
        unsafe fn four<const HOW: i32>(from: *const u8) -> __m128i {
            // SAFETY: 16 bytes, by our caller.
            _mm_cvtps_ph::<HOW>(_mm_castsi128_ps(unsafe { _mm_loadu_si128(from.cast()) }))
        }
        let mut half = [0; 64];
        for nth in (0..count).step_by(4) {
            // SAFETY: 16 bytes of the vector; a processor that has this instruction, since the program has used it.
            let four = unsafe {
                let from = vector.get(4 * nth..4 * nth + 16)?.as_ptr();
                let four = match rounding {
                    0 => four::<0>(from),
                    1 => four::<1>(from),
                    2 => four::<2>(from),
                    _ => four::<3>(from),
                };
                std::mem::transmute::<__m128i, [u8; 16]>(four)
            };
            half[2 * nth..2 * nth + 8].copy_from_slice(&four[..8]);
        }
        Some(half)
    }

    /// The same of those whose mask is a vector's signs.
    fn by_vector(mnemonic: Mnemonic) -> Option<usize> {
        use Mnemonic::*;
        Some(match mnemonic {
            Vmaskmovps | Vpmaskmovd => 4,
            Vmaskmovpd | Vpmaskmovq => 8,
            _ => return None,
        })
    }

    fn signs(vector: &[u8; 64], each: usize) -> u64 {
        let signs = vector.chunks(each).map(|element| u64::from(element[each - 1] >> 7));
        signs.enumerate().fold(0, |mask, (at, sign)| mask | sign << at)
    }

    /// What a store of so many bytes writes.
    fn value(thread: &Thread, instruction: &Instruction, bytes: usize) -> Option<[u8; 64]> {
        use Mnemonic::*;
        let mut of = [0; 64];
        let word = |value: u64| {
            let mut of = [0; 64];
            of[..8].copy_from_slice(&value.to_le_bytes());
            of
        };
        let from = match by_vector(instruction.mnemonic()) {
            Some(_) => instruction.op2_register(),
            None => instruction.op1_register(),
        };
        let part = |at: usize| {
            let value = thread.vector(from, at + bytes)?;
            let mut part = [0; 64];
            part[..bytes].copy_from_slice(value.get(at..at + bytes)?);
            Some(part)
        };
        let which = |of: usize| (instruction.immediate8() as usize % (of / bytes)) * bytes;
        if let Some(how) = narrowed(instruction.mnemonic()) {
            return narrow(&thread.vector(from, from.size())?, from.size() / how.0, how);
        }
        Some(match instruction.mnemonic() {
            Movd | Movq | Movntq if number(from, Register::MM0, 8).is_some() => thread.mmx(from)?,
            Kmovb | Kmovw | Kmovd | Kmovq => word(thread.mask(from)?),
            Fnstcw | Fnstsw | Stmxcsr | Vstmxcsr => {
                let at = match instruction.mnemonic() {
                    Fnstcw => 0,
                    Fnstsw => 2,
                    _ => 24,
                };
                thread.saved(0, at, &mut of[..bytes])?;
                of
            }
            Vcvtps2ph => {
                let mut control = [0; 4];
                thread.saved(0, 24, &mut control)?;
                let how = u32::from(instruction.immediate8());
                let by_control = u32::from_le_bytes(control) >> 13 & 3;
                let rounding = if how & 4 != 0 { by_control } else { how & 3 };
                halved(&thread.vector(from, from.size())?, from.size() / 4, rounding)?
            }
            Mov | Movnti | Movdiri if instruction.op1_kind() == OpKind::Register => {
                word(thread.general(from)?)
            }
            Mov => word(instruction.try_immediate(1).ok()?),
            Movbe => {
                let value = thread.general(from)?.to_le_bytes();
                for (at, to) in of[..bytes].iter_mut().enumerate() {
                    *to = value[bytes - 1 - at];
                }
                of
            }
            Movaps | Movups | Movapd | Movupd | Movdqa | Movdqu | Movntdq | Movntps | Movntpd
            | Movss | Movsd | Movd | Movq | Movlps | Movlpd | Vmovaps | Vmovups | Vmovapd
            | Vmovupd | Vmovdqa | Vmovdqu | Vmovdqa32 | Vmovdqa64 | Vmovdqu8 | Vmovdqu16
            | Vmovdqu32 | Vmovdqu64 | Vmovntdq | Vmovntps | Vmovntpd | Vmovss | Vmovsd | Vmovd
            | Vmovq | Vmovsh | Vmovw | Movntss | Movntsd | Vmovlps | Vmovlpd | Vmaskmovps
            | Vpmaskmovd | Vmaskmovpd | Vpmaskmovq => part(0)?,
            Movhps | Movhpd | Vmovhps | Vmovhpd => part(8)?,
            Vextractf128 | Vextracti128 => part(which(32))?,
            Vextractf32x4 | Vextracti32x4 | Vextractf64x2 | Vextracti64x2 | Vextractf32x8
            | Vextracti32x8 | Vextractf64x4 | Vextracti64x4 => {
                let is_wide = number(from, Register::ZMM0, 32).is_some();
                part(which(if is_wide { 64 } else { 32 }))?
            }
            Pextrb | Pextrw | Pextrd | Pextrq | Extractps | Vpextrb | Vpextrw | Vpextrd
            | Vpextrq | Vextractps => part(which(16))?,
            condition => word(u64::from(holds(condition, thread.register(libc::REG_EFL))?)),
        })
    }

    /// Of an instruction that stores whether the flags say this.
    fn holds(mnemonic: Mnemonic, flags: u64) -> Option<bool> {
        use Mnemonic::*;
        let [carry, parity, zero, sign, overflow] =
            [0, 2, 6, 7, 11].map(|bit| flags >> bit & 1 == 1);
        Some(match mnemonic {
            Seto => overflow,
            Setno => !overflow,
            Setb => carry,
            Setae => !carry,
            Sete => zero,
            Setne => !zero,
            Setbe => carry || zero,
            Seta => !carry && !zero,
            Sets => sign,
            Setns => !sign,
            Setp => parity,
            Setnp => !parity,
            Setl => sign != overflow,
            Setge => sign == overflow,
            Setle => zero || sign != overflow,
            Setg => !zero && sign == overflow,
            _ => return None,
        })
    }

    /// STOS and MOVS, with a count or without: as much as fits in, and is not too much at once.
    fn repeat(
        found: &Found,
        thread: &mut Thread,
        instruction: &Instruction,
        fills: bool,
    ) -> Option<()> {
        let each = instruction.memory_size().size();
        let to = thread.register(libc::REG_RDI) as usize;
        let from = thread.register(libc::REG_RSI) as usize;
        let is_counted = instruction.has_rep_prefix() || instruction.has_repne_prefix();
        let count = if is_counted { thread.register(libc::REG_RCX) as usize } else { 1 };
        if !found.holds(to, each) || !fills && instruction.segment_prefix() != Register::None {
            return None;
        }
        let backwards = thread.register(libc::REG_EFL) as i64 & DIRECTION != 0;
        let fit = (found.base + found.bytes - to) / each;
        let pattern = thread.register(libc::REG_RAX).to_le_bytes();
        let store = |count: usize| {
            found.store(to, count * each, |at, length, to| {
                if fills {
                    for place in 0..length {
                        // SAFETY: room for so many bytes in the log.
                        unsafe { *to.add(place) = pattern[(at + place) % each] };
                    }
                    return true;
                }
                read(from + at, length, to)
            })
        };
        let most = if backwards { count.min(1) } else { count.min(fit).min(AT_ONCE / each) };
        // (Not all of what is copied may be there. What is in the next one's page is: the processor has read it.)
        let in_page = (PAGE - from % PAGE) / each;
        let done = match store(most) {
            Err(_) if most > 1 => {
                let most = in_page.clamp(1, most);
                store(most).ok().map(|()| most)?
            }
            stored => stored.ok().map(|()| most)?,
        };
        let moved = (done * each) as u64;
        let after = |register: u64| match backwards {
            true => register.wrapping_sub(moved),
            false => register.wrapping_add(moved),
        };
        thread.set(libc::REG_RDI, after(to as u64));
        if !fills {
            thread.set(libc::REG_RSI, after(from as u64));
        }
        if is_counted {
            thread.set(libc::REG_RCX, (count - done) as u64);
        }
        if count == done {
            thread.set(libc::REG_RIP, instruction.next_ip());
        }
        Some(())
    }

    /// Memory of this process, which may not be there. (A fault in the handler would end the program, where its own handler may mend it.)
    fn read(from: usize, bytes: usize, to: *mut u8) -> bool {
        let ours = libc::iovec { iov_base: to.cast(), iov_len: bytes };
        let theirs = libc::iovec { iov_base: from as *mut c_void, iov_len: bytes };
        // SAFETY: room for so many bytes in the log; what is read is looked at by the kernel.
        let done = unsafe {
            let process = libc::syscall(libc::SYS_getpid);
            let (ours, theirs) = (&raw const ours, &raw const theirs);
            libc::syscall(libc::SYS_process_vm_readv, process, ours, 1usize, theirs, 1usize, 0usize)
        };
        done == bytes as i64
    }
    fn write(to: usize, value: &[u8]) -> Option<()> {
        let ours = libc::iovec { iov_base: value.as_ptr().cast_mut().cast(), iov_len: value.len() };
        let theirs = libc::iovec { iov_base: to as *mut c_void, iov_len: value.len() };
        // SAFETY: what is written there is looked at by the kernel, and is the program's own store.
        let done = unsafe {
            let process = libc::syscall(libc::SYS_getpid);
            let (ours, theirs) = (&raw const ours, &raw const theirs);
            libc::syscall(
                libc::SYS_process_vm_writev,
                process,
                ours,
                1usize,
                theirs,
                1usize,
                0usize,
            )
        };
        (done == value.len() as i64).then_some(())
    }
}
