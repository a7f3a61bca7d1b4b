//! What Rust's own library asks of libgcc_s where a stack is unwound. Here that is only when a thread is cancelled, and then libgcc_s is there.
//! Named as a library that we need it would be loaded, and would ask for the processor's features, at the start of every program.
//!
//! The names are hidden: nobody else's calls come here.

use core::arch::global_asm;
use core::ffi::{c_int, c_void};

macro_rules! hidden {
    ($name:literal, $ours:ident) => {
        #[cfg(target_arch = "x86_64")]
        global_asm!(concat!(".hidden ", $name, "\n.globl ", $name, "\n", $name, ": jmp {}"), sym $ours);
        #[cfg(target_arch = "aarch64")]
        global_asm!(concat!(".hidden ", $name, "\n.globl ", $name, "\n", $name, ": b {}"), sym $ours);
    };
}

macro_rules! asks_libgcc {
    ($($ours:ident $name:literal $text:literal ($($argument:ident: $type:ty),*) -> $result:ty;)*) => {$(
        unsafe extern "C" fn $ours($($argument: $type),*) -> $result {
            crate::next!($text, fn($($type),*) -> $result, $($argument),*)
        }
        hidden!($name, $ours);
    )*};
}

type Context = *mut c_void;

asks_libgcc! {
    backtrace "_Unwind_Backtrace" c"_Unwind_Backtrace" (each: *mut c_void, argument: *mut c_void) -> c_int;
    data_base "_Unwind_GetDataRelBase" c"_Unwind_GetDataRelBase" (context: Context) -> usize;
    text_base "_Unwind_GetTextRelBase" c"_Unwind_GetTextRelBase" (context: Context) -> usize;
    place "_Unwind_GetIP" c"_Unwind_GetIP" (context: Context) -> usize;
    place_before "_Unwind_GetIPInfo" c"_Unwind_GetIPInfo" (context: Context, before: *mut c_int) -> usize;
    handlers "_Unwind_GetLanguageSpecificData" c"_Unwind_GetLanguageSpecificData" (context: Context) -> usize;
    start "_Unwind_GetRegionStart" c"_Unwind_GetRegionStart" (context: Context) -> usize;
    set_register "_Unwind_SetGR" c"_Unwind_SetGR" (context: Context, register: c_int, value: usize) -> c_int;
    set_place "_Unwind_SetIP" c"_Unwind_SetIP" (context: Context, place: usize) -> c_int;
}

unsafe extern "C" fn resume(exception: *mut c_void) -> ! {
    let _: c_int = crate::next!(c"_Unwind_Resume", fn(*mut c_void) -> c_int, exception);
    std::process::abort()
}
hidden!("_Unwind_Resume", resume);
