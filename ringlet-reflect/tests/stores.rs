//! Plain stores to where a region is transmitted in a cluster: each form that compilers and the C library make of them writes there what it writes to
//! memory; and what is no store is the program's own fault.
#![cfg(target_arch = "x86_64")]

mod common;

use std::arch::asm;
use std::os::unix::process::ExitStatusExt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use common::{Cluster, settle, until};
use ringlet_reflect::{Host, Permission, Receiver, Status, Transmitter, Use};

const BYTES: usize = 4 * 4096;

fn ends(cluster: &Cluster) -> (Host, Transmitter, Receiver) {
    let (host, other) = (cluster.host(0), cluster.host(1));
    let to = host.allocate(1, BYTES, &Permission::default()).unwrap();
    let from = other.allocate(1, BYTES, &Permission::default()).unwrap();
    (host, to.transmit(Use::default()).unwrap(), from.receive(Use::default()).unwrap())
}

/// (As aligned as a region.)
#[repr(align(4096))]
struct Plain([u8; BYTES]);

type Form = (&'static str, unsafe fn(*mut u8));

/// One instruction that stores to `[rdi]`, with known values in all registers that it may have.
macro_rules! one {
    ($name:ident, $($text:literal),+) => {
        unsafe fn $name(to: *mut u8) {
            let mut source: Vec<u8> = (0..192u8).map(|byte| byte ^ 0x5a).collect();
            // SAFETY: room for the store; what it takes is loaded before.
            unsafe {
                asm!($($text),+,
                    in("rdi") to, in("rsi") source.as_mut_ptr(), inout("rax") 0x1122_3344_5566_7788u64 => _, in("rdx") 0x99aa_bbcc_ddee_ff01u64,
                    in("rcx") 3u64, out("r8") _, out("r9") _, out("r15") _,
                    out("mm1") _, out("mm6") _, out("st(0)") _, out("st(1)") _, out("st(2)") _, out("st(7)") _,
                    out("xmm0") _, out("xmm1") _, out("xmm9") _, out("xmm20") _, out("k1") _, options(nostack));
            }
        }
    };
}

one!(byte, "mov byte ptr [rdi + 5], al");
one!(high_byte, "mov byte ptr [rdi + 6], ah");
one!(sil, "mov r15b, 0x77", "mov byte ptr [rdi + rcx*8 + 1], r15b");
one!(half, "mov word ptr [rdi + 3], dx");
one!(four, "mov dword ptr [rdi + 4094], eax");
one!(eight, "mov qword ptr [rdi + rcx*8], rdx");
one!(immediate_1, "mov byte ptr [rdi], 0x81");
one!(immediate_2, "mov word ptr [rdi], 0x8182");
one!(immediate_4, "mov dword ptr [rdi], 0x81828384");
one!(immediate_8, "mov qword ptr [rdi], -2");
one!(movnti, "movnti qword ptr [rdi + 64], rax", "movnti dword ptr [rdi + 80], edx");
one!(
    sets,
    "cmp rcx, 3",
    "sete byte ptr [rdi]",
    "setne byte ptr [rdi + 1]",
    "cmp rcx, 5",
    "setl byte ptr [rdi + 2]",
    "seta byte ptr [rdi + 3]",
    "setbe byte ptr [rdi + 4]",
    "setg byte ptr [rdi + 5]",
    "sets byte ptr [rdi + 6]",
    "setp byte ptr [rdi + 7]"
);
one!(
    sse,
    "movdqu xmm0, [rsi]",
    "movdqu xmm9, [rsi + 32]",
    "movups [rdi + 7], xmm0",
    "movdqa [rdi + 32], xmm9",
    "movntdq [rdi + 48], xmm0",
    "movss [rdi + 64], xmm9",
    "movsd [rdi + 72], xmm9",
    "movq [rdi + 80], xmm0",
    "movd [rdi + 88], xmm0",
    "movhps [rdi + 96], xmm0",
    "movlpd [rdi + 104], xmm9"
);
one!(
    parts,
    "movdqu xmm0, [rsi]",
    "pextrq [rdi], xmm0, 1",
    "pextrd [rdi + 8], xmm0, 2",
    "pextrw [rdi + 12], xmm0, 5",
    "pextrb [rdi + 14], xmm0, 11",
    "extractps [rdi + 16], xmm0, 3"
);
one!(
    avx,
    "vmovdqu ymm0, [rsi]",
    "vmovdqu ymm9, [rsi + 64]",
    "vmovups [rdi + 9], ymm0",
    "vmovdqa [rdi + 64], ymm9",
    "vmovntdq [rdi + 96], ymm0",
    "vextracti128 [rdi + 128], ymm9, 1",
    "vextractf128 [rdi + 144], ymm9, 0",
    "vmovdqu [rdi + 160], xmm9",
    "vmovhps [rdi + 180], xmm9",
    "vpextrq [rdi + 190], xmm0, 1",
    "vmovsd [rdi + 200], xmm9",
    "vzeroupper"
);
one!(
    avx_masked,
    "vmovdqu ymm0, [rsi]",
    "vpslld ymm1, ymm0, 3",
    "vmaskmovps [rdi + 9], ymm1, ymm0",
    "vpmaskmovd [rdi + 48], xmm1, xmm0",
    "vpsllq ymm1, ymm0, 5",
    "vmaskmovpd [rdi + 80], ymm1, ymm0",
    "vpmaskmovq [rdi + 4080], ymm0, ymm1",
    // (All that is not written lies behind the end.)
    "mov r8, -1",
    "vmovq xmm1, r8",
    "vmaskmovpd [rdi + 16376], ymm1, ymm0",
    "vzeroupper"
);
one!(in_use_no_more, "vzeroall", "vmovdqu [rdi], ymm0", "vmovdqu [rdi + 32], ymm9");
one!(
    avx512,
    "vmovdqu64 zmm0, [rsi]",
    "vmovdqu64 zmm20, [rsi + 64]",
    "vmovdqu8 [rdi + 3], zmm20",
    "vmovups [rdi + 70], zmm0",
    "vmovdqu64 [rdi + 140], ymm20",
    "vmovdqa64 [rdi + 192], zmm0",
    "vextracti64x4 [rdi + 256], zmm20, 1",
    "mov eax, 0x5a5a5",
    "kmovd k1, eax",
    "vmovdqu8 [rdi + 300]{{k1}}, ymm20",
    "vmovdqu32 [rdi + 340]{{k1}}, zmm20",
    "vmovdqu64 [rdi + 440]{{k1}}, zmm0",
    // (All that is not written lies behind the end.)
    "mov eax, 0xff",
    "kmovd k1, eax",
    "vmovdqu8 [rdi + 16376]{{k1}}, zmm20",
    "vzeroupper"
);
one!(
    avx512_parts,
    "vmovdqu64 zmm0, [rsi]",
    "vmovdqu64 zmm20, [rsi + 64]",
    "mov eax, 0x5a5a5",
    "kmovd k1, eax",
    "vmovss [rdi]{{k1}}, xmm0",
    "vmovsd [rdi + 8]{{k1}}, xmm20",
    "vextracti32x4 [rdi + 16]{{k1}}, zmm20, 2",
    "vextractf64x4 [rdi + 32]{{k1}}, zmm0, 1",
    "vpcompressd [rdi + 64]{{k1}}, zmm20",
    "vcompresspd [rdi + 128]{{k1}}, zmm0",
    "vpmovdb [rdi + 192], zmm20",
    "vpmovqw [rdi + 208]{{k1}}, zmm0",
    "vpmovsdw [rdi + 224], zmm20",
    "vpmovusqd [rdi + 256]{{k1}}, ymm20",
    "vpmovwb [rdi + 288]{{k1}}, zmm0",
    "vcvtps2ph [rdi + 320]{{k1}}, zmm0, 3",
    "kmovd [rdi + 352], k1",
    "kmovw [rdi + 356], k1",
    // (Places that are twice there have the last one.)
    "vpsrld zmm0, zmm0, 25",
    "vpscatterdd [rdi + zmm0 * 4 + 400]{{k1}}, zmm20",
    "kmovd [rdi + 360], k1",
    "kxnord k1, k1, k1",
    "vpsrlq zmm0, zmm20, 57",
    "vpscatterqq [rdi + zmm0 * 8 + 1000]{{k1}}, zmm20",
    "vzeroupper"
);
one!(
    halves,
    "vmovdqu ymm0, [rsi + 32]",
    "vcvtps2ph [rdi], ymm0, 0",
    "vcvtps2ph [rdi + 16], ymm0, 1",
    "vcvtps2ph [rdi + 32], ymm0, 4",
    "vcvtps2ph [rdi + 48], xmm0, 2",
    "vzeroupper"
);
one!(
    x87,
    "mov word ptr [rsi], 0x0f7f",
    "fldpi",
    "fldl2e",
    "fst dword ptr [rdi]",
    "fst qword ptr [rdi + 8]",
    "fstp tbyte ptr [rdi + 16]",
    "fist dword ptr [rdi + 32]",
    "fldcw word ptr [rsi]",
    "fist word ptr [rdi + 36]",
    "fstp qword ptr [rdi + 40]",
    "fld1",
    "fld dword ptr [rsi + 4]",
    "fild dword ptr [rsi + 8]",
    "fistp qword ptr [rdi + 48]",
    "fisttp dword ptr [rdi + 56]",
    "fnstcw word ptr [rdi + 60]",
    "fnstsw word ptr [rdi + 62]",
    "fstp tbyte ptr [rdi + 64]",
    "fnstsw word ptr [rdi + 74]",
    "fninit"
);
one!(
    mmx,
    "movq mm1, qword ptr [rsi]",
    "movq mm6, qword ptr [rsi + 8]",
    "movq qword ptr [rdi], mm1",
    "movntq qword ptr [rdi + 8], mm6",
    "movd dword ptr [rdi + 16], mm6",
    "emms",
    "stmxcsr dword ptr [rdi + 24]"
);
one!(masked_bytes, "movdqu xmm0, [rsi]", "movdqu xmm1, [rsi + 100]", "maskmovdqu xmm0, xmm1");
one!(
    direct,
    "movdiri qword ptr [rdi], rdx",
    "add rdi, 64",
    "movdir64b rdi, [rsi + 3]",
    "sub rdi, 64"
);
one!(one_stos, "stosb", "mov al, 9", "stosq");
one!(movbe, "movbe qword ptr [rdi], rax", "movbe word ptr [rdi + 8], dx");

macro_rules! strings {
    ($name:ident, $count:expr, $at:expr, $text:literal) => {
        unsafe fn $name(to: *mut u8) {
            let source: Vec<u8> = (0..BYTES).map(|at| (at * 13 >> 3) as u8).collect();
            // SAFETY: room for so many, before and behind.
            unsafe {
                asm!($text, "cld", inout("rdi") to.add($at) => _, inout("rsi") source.as_ptr().add($at) => _, inout("rcx") $count => _,
                    in("rax") 0x0102_0304_0506_0708u64, options(nostack));
            }
        }
    };
}

strings!(movs_1, 5001usize, 3, "rep movsb");
strings!(movs_8, 1999usize, 8, "rep movsq");
strings!(movs_4_back, 77usize, 4000, "std\nrep movsd");
strings!(stos_1, BYTES, 0, "rep stosb");
strings!(stos_4, 300usize, 5, "rep stosd");
strings!(stos_8_back, 9usize, 4096, "std\nrep stosq");
strings!(movs_none, 0usize, 0, "rep movsb");

/// (Not known to the compiler: it makes a loop, or a call, of it.)
fn any<T>(value: T) -> T {
    std::hint::black_box(value)
}

unsafe fn library_copies(to: *mut u8) {
    let source: Vec<u8> = (0..BYTES).map(|at| ((at * 7) >> 2) as u8).collect();
    let mut at = 0;
    for length in [
        1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 200, 255, 256, 257,
        500, 1000, 3000, 4096,
    ] {
        // SAFETY: within both.
        unsafe { std::ptr::copy_nonoverlapping(source.as_ptr().add(at), to.add(at), any(length)) };
        at += length + 1;
    }
    // SAFETY: as above.
    unsafe { std::ptr::copy_nonoverlapping(source.as_ptr(), to, any(BYTES)) };
}

unsafe fn library_sets(to: *mut u8) {
    let mut at = 0;
    for length in [
        1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 200, 255, 256, 257,
        500, 1000, 3000, 4096,
    ] {
        // SAFETY: within it.
        unsafe { std::ptr::write_bytes(to.add(at), any(length) as u8 | 1, length) };
        at += length + 1;
    }
}

macro_rules! loops {
    ($name:ident $(, $feature:literal)?) => {
        $(#[target_feature(enable = $feature)])?
        unsafe fn $name(to: *mut u8) {
            // SAFETY: within it, aligned.
            unsafe {
                let bytes = std::slice::from_raw_parts_mut(to, any(1003));
                bytes.iter_mut().enumerate().for_each(|(at, byte)| *byte = (at * 3) as u8);
                let words = std::slice::from_raw_parts_mut(to.add(1024).cast::<u32>(), any(251));
                words.iter_mut().enumerate().for_each(|(at, word)| *word = at as u32 * 77);
                let longs = std::slice::from_raw_parts_mut(to.add(4096).cast::<u64>(), any(133));
                longs.iter_mut().enumerate().for_each(|(at, long)| *long = (at as u64) << 33);
                let doubles = std::slice::from_raw_parts_mut(to.add(8192).cast::<f64>(), any(99));
                doubles.iter_mut().enumerate().for_each(|(at, double)| *double = at as f64 * 1.5);
                let flags = std::slice::from_raw_parts_mut(to.add(12288).cast::<bool>(), any(55));
                flags.iter_mut().enumerate().for_each(|(at, flag)| *flag = at % 3 == any(1));
                let pairs = std::slice::from_raw_parts_mut(to.add(13000).cast::<(u16, u8)>(), any(40));
                pairs.iter_mut().enumerate().for_each(|(at, pair)| (pair.0, pair.1) = (at as u16 * 9, at as u8));
            }
        }
    };
}
loops!(loops_plain);
loops!(loops_avx2, "avx2");
loops!(loops_avx512, "avx512f,avx512bw,avx512vl");

#[test]
fn each_form_of_a_store_writes_there_as_it_does_to_memory() {
    let cluster = Cluster::new(2);
    let (host, to, from) = ends(&cluster);
    let mut forms: Vec<Form> = vec![
        ("1 byte", byte),
        ("from a high byte", high_byte),
        ("from a new byte", sil),
        ("2 bytes", half),
        ("4 bytes over pages", four),
        ("8 bytes", eight),
        ("1 immediate", immediate_1),
        ("2 immediate", immediate_2),
        ("4 immediate", immediate_4),
        ("8 immediate", immediate_8),
        ("movnti", movnti),
        ("setcc", sets),
        ("sse", sse),
        ("x87", x87),
        ("mmx", mmx),
        ("bytes by a mask", masked_bytes),
        ("a stos", one_stos),
        ("movs 1", movs_1),
        ("movs 8", movs_8),
        ("movs 4 back", movs_4_back),
        ("stos 1", stos_1),
        ("stos 4", stos_4),
        ("stos 8 back", stos_8_back),
        ("movs of nothing", movs_none),
        ("library copies", library_copies),
        ("library sets", library_sets),
        ("loops", loops_plain),
    ];
    if is_x86_feature_detected!("sse4.1") {
        forms.push(("parts", parts));
    }
    // (Of two features: stores past the caches, of 8 bytes and of 64.)
    let features = std::arch::x86_64::__cpuid_count(7, 0).ecx;
    if features >> 27 & 3 == 3 {
        forms.push(("movdir", direct));
    }
    if is_x86_feature_detected!("f16c") {
        forms.push(("halves", halves));
    }
    if is_x86_feature_detected!("movbe") {
        forms.push(("movbe", movbe));
    }
    if is_x86_feature_detected!("avx2") {
        forms.extend([
            ("avx", avx as unsafe fn(*mut u8)),
            ("avx with a mask", avx_masked),
            ("not in use", in_use_no_more),
            ("loops of avx2", loops_avx2),
        ]);
    }
    if is_x86_feature_detected!("avx512bw") && is_x86_feature_detected!("avx512vl") {
        forms.extend([
            ("avx512", avx512 as unsafe fn(*mut u8)),
            ("avx512 in parts", avx512_parts),
            ("loops of avx512", loops_avx512),
        ]);
    }
    let mut plain = Box::new(Plain([0; BYTES]));
    for (name, form) in forms {
        let errors = host.errors(0).unwrap();
        for fill in [0u8, 0xa5] {
            // SAFETY: all forms store within so many bytes.
            unsafe { std::ptr::write_bytes(plain.0.as_mut_ptr(), fill, BYTES) };
            to.put(0, &vec![fill; BYTES]).unwrap();
            // SAFETY: as above.
            unsafe {
                form(plain.0.as_mut_ptr());
                form(to.base());
            }
            settle(&host);
            let mut got = vec![0; BYTES];
            let expected = &plain.0;
            until(name, || {
                from.get(0, &mut got).unwrap();
                // (All have it: there is nothing to wait for.)
                let at = (0..BYTES).find(|at| got[*at] != expected[*at]);
                assert_eq!(
                    at,
                    None,
                    "{name}: {:x?}",
                    at.map(|at| (
                        &got[at..(at + 64).min(BYTES)],
                        &expected[at..(at + 64).min(BYTES)]
                    ))
                );
                true
            });
        }
        assert_eq!(host.errors(0), Ok(errors), "{name}");
    }
}

/// Stores by atomics are plain ones, if they are no exchanges.
#[test]
fn words_are_stored_in_their_order() {
    let cluster = Cluster::new(2);
    let (host, to, from) = ends(&cluster);
    let reader = std::thread::spawn(move || {
        let mut last = 0;
        while last < 5000 {
            let second = from.words()[1000].load(Ordering::Acquire);
            let first = from.words()[3].load(Ordering::Acquire);
            assert!(first >= second && second >= last);
            last = second;
        }
    });
    let began = Instant::now();
    for count in 1..=5000 {
        to.words()[3].store(count, Ordering::Relaxed);
        to.words()[1000].store(count, Ordering::Release);
    }
    let trapped = began.elapsed() / 10_000;
    settle(&host);
    let began = Instant::now();
    (0..10_000u64).for_each(|count| to.put(64, &count.to_ne_bytes()).unwrap());
    println!("a plain store costs {trapped:?}, put {:?}", began.elapsed() / 10_000);
    reader.join().unwrap();
}

static CAUGHT: AtomicUsize = AtomicUsize::new(0);

extern "C" fn catch(_: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: what the kernel gives; the instruction that faults is stepped over: `mov al, [rdi]` has two bytes, `add [rdi], eax` too.
    unsafe {
        CAUGHT.store((*info).si_addr() as usize, Ordering::Relaxed);
        (*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs[libc::REG_RIP as usize] += 2;
    }
}

type Handler = extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void);

/// Whose the signal was.
fn take(handler: usize, flags: i32) -> usize {
    // SAFETY: handlers of this kind, or none.
    unsafe {
        let [mut action, mut before]: [libc::sigaction; 2] = std::mem::zeroed();
        (action.sa_sigaction, action.sa_flags) = (handler, flags);
        libc::sigaction(libc::SIGSEGV, &raw const action, &raw mut before);
        before.sa_sigaction
    }
}

static BEFORE: AtomicUsize = AtomicUsize::new(libc::SIG_DFL);

/// As those do that tell of a crash.
extern "C" fn print(_: i32, _: *mut libc::siginfo_t, _: *mut libc::c_void) {
    if CAUGHT.fetch_add(1, Ordering::Relaxed) > 5 {
        // SAFETY: it is called again and again.
        unsafe { libc::_exit(3) };
    }
    let before = BEFORE.load(Ordering::Relaxed);
    if before != libc::SIG_DFL {
        take(before, libc::SA_SIGINFO);
    }
}

/// Faults itself, once.
extern "C" fn fault(_: i32, _: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: as of `catch`.
    unsafe {
        if CAUGHT.fetch_add(1, Ordering::Relaxed) == 0 {
            asm!("mov al, byte ptr [rdi]", in("rdi") 64, out("al") _);
        }
        (*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs[libc::REG_RIP as usize] += 2;
    }
}

extern "C" fn never_returns(_: i32, _: *mut libc::siginfo_t, _: *mut libc::c_void) {
    loop {
        // SAFETY: it sleeps.
        unsafe { libc::pause() };
    }
}

/// A thread whose source is not there, and that never comes back from its handler, holds up no other one.
#[test]
fn who_never_comes_back_from_a_fault_holds_up_nobody() {
    if std::env::var_os("STORES_CHILD").is_none() {
        let mut child = std::process::Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", "who_never_comes_back_from_a_fault_holds_up_nobody"]);
        assert!(child.env("STORES_CHILD", "leaves").status().unwrap().success());
        return;
    }
    take(never_returns as Handler as usize, libc::SA_SIGINFO);
    let cluster = Cluster::new(2);
    let (host, to, from) = ends(&cluster);
    let to: &'static Transmitter = Box::leak(Box::new(to));
    let all = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: fresh pages, of which the second one is not to be read.
    let pages = unsafe {
        let both = libc::mmap(std::ptr::null_mut(), 8192, libc::PROT_READ, all, -1, 0);
        libc::mprotect(both.byte_add(4096), 4096, libc::PROT_NONE);
        both as usize
    };
    for by_transmit in [false, true] {
        let stuck = std::thread::spawn(move || {
            // SAFETY: (It is not, as is tried here.)
            let bytes = unsafe { std::slice::from_raw_parts(pages as *const u8, 8192) };
            match by_transmit {
                // SAFETY: as above; into the transmitter.
                true => drop(unsafe { ringlet_reflect::transmit(bytes.as_ptr(), to.base(), 8192) }),
                false => drop(to.put(0, bytes)),
            }
        });
        let sleeps = || {
            let threads = std::fs::read_dir("/proc/self/task").unwrap();
            let call = |thread: std::io::Result<std::fs::DirEntry>| {
                std::fs::read_to_string(thread.unwrap().path().join("syscall")).unwrap_or_default()
            };
            let pauses = format!("{} ", libc::SYS_pause);
            threads.map(call).filter(|call| call.starts_with(&pauses)).count()
        };
        until("it to be stuck", || sleeps() == 1 + usize::from(by_transmit));
        let value = 7 + u64::from(by_transmit);
        to.put(4096, &value.to_ne_bytes()).unwrap();
        settle(&host);
        until("what another one writes", || from.words()[512].load(Ordering::Acquire) == value);
        assert!(!stuck.is_finished());
    }
    std::process::exit(0);
}

/// (In a process of its own: the handler is for all threads.)
#[test]
fn what_is_no_store_is_for_the_programs_own_handler() {
    if std::env::var_os("STORES_CHILD").is_none() {
        for (what, signal) in [
            ("handler", None),
            ("load", Some(libc::SIGSEGV)),
            ("exchange", Some(libc::SIGSEGV)),
            ("child", None),
            ("sent", Some(libc::SIGSEGV)),
            ("chained", Some(libc::SIGSEGV)),
            ("once", Some(libc::SIGSEGV)),
            ("mended", None),
            ("nested", None),
        ] {
            let mut child = std::process::Command::new(std::env::current_exe().unwrap());
            child.args(["--exact", "what_is_no_store_is_for_the_programs_own_handler"]);
            let status = child
                .env("STORES_CHILD", what)
                .stdout(std::process::Stdio::null())
                .stderr(std::process::Stdio::piped())
                .output()
                .unwrap();
            let (status, said) = (status.status, String::from_utf8_lossy(&status.stderr));
            assert_eq!((status.signal(), status.success()), (signal, signal.is_none()), "{what}");
            let is_named = said.contains("takes plain stores only") || what == "child";
            let instruction = match what {
                "load" => "ringlet: Mov",
                "exchange" => "ringlet: Xchg at",
                _ => "",
            };
            assert!(said.contains(instruction), "{said}");
            assert_eq!(is_named, matches!(what, "load" | "exchange" | "child"), "{what}: {said}");
        }
        return;
    }
    let what = std::env::var("STORES_CHILD").unwrap();
    match &what[..] {
        "handler" => _ = take(catch as Handler as usize, libc::SA_SIGINFO),
        // (The standard library has one.)
        "sent" | "chained" | "load" | "exchange" => _ = take(libc::SIG_DFL, 0),
        "once" => _ = take(print as Handler as usize, libc::SA_SIGINFO | libc::SA_RESETHAND),
        "mended" => _ = take(catch as Handler as usize, libc::SA_SIGINFO | libc::SA_RESETHAND),
        "nested" => _ = take(fault as Handler as usize, libc::SA_SIGINFO | libc::SA_NODEFER),
        _ => {}
    }
    let cluster = Cluster::new(2);
    let (host, to, from) = ends(&cluster);
    // SAFETY: these fault, which is what is looked for; a child that was forked only stores, and ends.
    unsafe {
        let [inside, nowhere] = [to.base().add(100) as usize, 64];
        match &what[..] {
            "handler" => {
                for address in [inside, nowhere] {
                    asm!("mov al, byte ptr [rdi]", in("rdi") address, out("al") _);
                    assert_eq!(CAUGHT.swap(0, Ordering::Relaxed), address);
                    asm!("add dword ptr [rdi], eax", in("rdi") address, in("eax") 1);
                    assert_eq!(CAUGHT.swap(0, Ordering::Relaxed), address);
                }
                // What it copies may not be there, or end in the middle: what is there is stored.
                asm!("rep movsb", inout("rdi") inside => _, inout("rsi") nowhere => _, inout("rcx") 8 => _);
                assert_eq!(CAUGHT.swap(0, Ordering::Relaxed), nowhere);
                let (flags, all) =
                    (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, libc::PROT_READ | libc::PROT_WRITE);
                let pages = libc::mmap(std::ptr::null_mut(), 8192, all, flags, -1, 0).cast::<u8>();
                libc::mprotect(pages.add(4096).cast(), 4096, libc::PROT_NONE);
                std::ptr::write_bytes(pages, 0x33, 4096);
                asm!("rep movsb", inout("rdi") to.base().add(200) => _, inout("rsi") pages.add(4093) => _, inout("rcx") 8usize => _);
                assert_eq!(CAUGHT.swap(0, Ordering::Relaxed), pages.add(4096) as usize);
                settle(&host);
                until("what was there", || from.words()[25].load(Ordering::Acquire) == 0x33_33_33);
                // Of much only the end: what is there is passed on about as often as it has pages.
                let pages =
                    libc::mmap(std::ptr::null_mut(), 1 << 16, all, flags, -1, 0).cast::<u8>();
                libc::mprotect(pages.add(15 << 12).cast(), 4096, libc::PROT_NONE);
                let large = host.allocate(3, 1 << 16, &Permission::default()).unwrap();
                let large = large.transmit(Use::default()).unwrap();
                let passed = || host.state().unwrap().cluster.unwrap().submitted;
                let before = passed();
                asm!("rep movsb", inout("rdi") large.base() => _, inout("rsi") pages => _, inout("rcx") 1usize << 16 => _);
                assert_eq!(CAUGHT.swap(0, Ordering::Relaxed), pages.add(15 << 12) as usize);
                let payloads = passed() - before;
                assert!((1..100).contains(&payloads), "{payloads}");
                to.base().write_volatile(7);
                settle(&host);
                until("the store", || from.words()[0].load(Ordering::Acquire) == 7);
                assert_eq!(CAUGHT.load(Ordering::Relaxed), 0);
            }
            "sent" => {
                libc::raise(libc::SIGSEGV);
            }
            // A handler that was set since the first window, and is behind us since the second one; it leaves the signal to who was there before him.
            "chained" => {
                BEFORE.store(take(print as Handler as usize, libc::SA_SIGINFO), Ordering::Relaxed);
                let second = host.allocate(2, BYTES, &Permission::default()).unwrap();
                let second = second.transmit(Use::default()).unwrap();
                second.base().write_volatile(7);
                assert_eq!(CAUGHT.load(Ordering::Relaxed), 0);
                asm!("mov al, byte ptr [rdi]", in("rdi") nowhere, out("al") _);
            }
            "once" => asm!("mov al, byte ptr [rdi]", in("rdi") nowhere, out("al") _),
            // One fault is all that its handler is for; stores go on.
            "mended" => {
                asm!("mov al, byte ptr [rdi]", in("rdi") nowhere, out("al") _);
                assert_eq!(CAUGHT.load(Ordering::Relaxed), nowhere);
                to.base().write_volatile(7);
                settle(&host);
                until("the store", || from.words()[0].load(Ordering::Acquire) == 7);
            }
            "nested" => {
                asm!("mov al, byte ptr [rdi]", in("rdi") nowhere, out("al") _);
                assert_eq!(CAUGHT.load(Ordering::Relaxed), 2);
            }
            "load" => drop(to.base().read_volatile()),
            "exchange" => drop(to.words()[0].swap(1, Ordering::Relaxed)),
            // A child by fork has to join by itself.
            "child" => match libc::fork() {
                0 => {
                    libc::alarm(30);
                    if host.await_end(Duration::ZERO) != Err(Status::NotInitialised) {
                        libc::_exit(1);
                    }
                    to.base().write_volatile(1);
                    libc::_exit(0);
                }
                pid => {
                    let mut status = 0;
                    assert_eq!(libc::waitpid(pid, &raw mut status, 0), pid);
                    assert!(libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGSEGV);
                }
            },
            _ => panic!("{what}"),
        }
    }
    drop(cluster);
    std::process::exit(0);
}
