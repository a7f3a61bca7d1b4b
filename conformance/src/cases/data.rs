//! Bytes: each call that moves them, each flag, sizes from one byte to megabytes.

use crate::case::*;
use crate::sys;

pub const CASES: &[Case] = &[pair(
    "data/read_write",
    "write and read carry bytes both ways",
    |a| {
        let end = a.moved();
        end.write(b"hello");
        a.sync();
        a.sync();
        end.until_unread(6);
        end.read(100);
        end.write(b"");
    },
    |b| {
        let end = b.moved();
        b.sync();
        end.until_unread(5);
        end.read(2);
        end.read(100);
        end.write(b"world!");
        b.sync();
        end.read(1);
    },
)
.all_families()
.each_side()];
