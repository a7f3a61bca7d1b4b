//! Notes for people, where the configuration wants any.

use crate::config::LogTarget;
use ringlet_linux::{fd, sys};

/// Adds a line to where notes of a kind go, if anywhere.
pub fn note(target: &LogTarget, line: &[u8]) {
    match target {
        LogTarget::Off => {}
        // Its reader may not read.
        LogTarget::Stderr if fd::is_writable(2) => drop(sys::write_quietly(2, line)),
        LogTarget::Stderr => {}
        LogTarget::File(path) => sys::append(path.as_c_str(), line),
    }
}
