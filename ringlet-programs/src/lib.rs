//! Programs under ringlet, from outside: how one is started ([`program`], [`settings`], [`preload`]), and what is seen of those that run
//! ([`processes`], [`sockets`], [`joined`]). For the command and for what measures.
#![deny(unsafe_code)]

/// As std's, but where it can't be written, the command ends with a failure.
#[macro_export]
macro_rules! println {
    () => { $crate::table::say("\n") };
    ($($text:tt)*) => { $crate::table::say(&format!("{}\n", format_args!($($text)*))) };
}

/// As std's, but what can't be written is left out: who complains goes on.
#[macro_export]
macro_rules! eprintln {
    ($($text:tt)*) => {{
        use std::io::Write as _;
        let _ = writeln!(std::io::stderr(), $($text)*);
    }};
}

pub mod joined;
mod namespaces;
pub mod patience;
pub mod preload;
pub mod processes;
pub mod program;
pub mod settings;
pub mod sockets;
pub mod table;
