//! What takes the place of Rust's own library, which is not linked: it would bring its storage for threads, and ask libc for more than every
//! libc has. (Where stacks are unwound, as for tests, it is there, since `core` can't be without.)

use core::arch::global_asm;
use core::fmt::{self, Write};
use ringlet_linux::sys;

struct Stderr;

impl Write for Stderr {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let _ = sys::write_quietly(2, text.as_bytes());
        Ok(())
    }
}

#[panic_handler]
fn panic(info: &core::panic::PanicInfo) -> ! {
    let _ = writeln!(Stderr, "ringlet: {info}");
    // SAFETY: ends the process.
    unsafe { libc::abort() }
}

// Named by what `core` was compiled to, where a frame would be unwound; none ever is. Hidden: nobody else's calls come here.
#[cfg(target_arch = "x86_64")]
global_asm!(
    ".hidden rust_eh_personality",
    ".globl rust_eh_personality",
    ".hidden _Unwind_Resume",
    ".globl _Unwind_Resume",
    "rust_eh_personality:",
    "_Unwind_Resume: ud2",
);
#[cfg(target_arch = "aarch64")]
global_asm!(
    ".hidden rust_eh_personality",
    ".globl rust_eh_personality",
    ".hidden _Unwind_Resume",
    ".globl _Unwind_Resume",
    "rust_eh_personality:",
    "_Unwind_Resume: udf #0",
);
