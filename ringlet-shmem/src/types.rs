//! The tables of OpenSHMEM's types: each calls a macro with a type's name in C functions and the same type in Rust.

use std::ffi::{c_char, c_int, c_long, c_longlong, c_short};

/// A `long double`, which Rust can't calculate with: shmem.h does.
#[repr(C, align(16))]
#[derive(Clone, Copy)]
pub struct LongDouble([u64; 2]);

pub type Char = c_char;
pub type Short = c_short;
pub type Int = c_int;
pub type Long = c_long;
pub type LongLong = c_longlong;

macro_rules! integer_types {
    ($each:ident) => {
        $each!("char", $crate::types::Char);
        $each!("schar", i8);
        $each!("ptrdiff", isize);
        $crate::types::bitwise_reduce_types!($each);
        $each!("short", $crate::types::Short);
        $each!("int", $crate::types::Int);
        $each!("long", $crate::types::Long);
        $each!("longlong", $crate::types::LongLong);
    };
}

/// Of reductions by AND, OR and XOR over teams. (Those over active sets have the signed ones of C instead.)
macro_rules! bitwise_reduce_types {
    ($each:ident) => {
        $each!("uchar", u8);
        $each!("ushort", u16);
        $each!("uint", u32);
        $each!("ulong", std::ffi::c_ulong);
        $each!("ulonglong", u64);
        $each!("int8", i8);
        $each!("int16", i16);
        $each!("int32", i32);
        $each!("int64", i64);
        $each!("uint8", u8);
        $each!("uint16", u16);
        $each!("uint32", u32);
        $each!("uint64", u64);
        $each!("size", usize);
    };
}

/// Those that are passed by value.
macro_rules! scalar_types {
    ($each:ident) => {
        $each!("float", f32);
        $each!("double", f64);
        $crate::types::integer_types!($each);
    };
}

macro_rules! rma_types {
    ($each:ident) => {
        $crate::types::scalar_types!($each);
        $each!("longdouble", $crate::types::LongDouble);
    };
}

macro_rules! atomic_types {
    ($each:ident) => {
        $crate::types::bitwise_types!($each);
        $each!("int", $crate::types::Int);
        $each!("long", $crate::types::Long);
        $each!("longlong", $crate::types::LongLong);
        $each!("size", usize);
        $each!("ptrdiff", isize);
    };
}

macro_rules! bitwise_types {
    ($each:ident) => {
        $each!("uint", u32);
        $each!("ulong", std::ffi::c_ulong);
        $each!("ulonglong", u64);
        $each!("int32", i32);
        $each!("int64", i64);
        $each!("uint32", u32);
        $each!("uint64", u64);
    };
}

macro_rules! wait_types {
    ($each:ident) => {
        $crate::types::atomic_types!($each);
        $each!("short", $crate::types::Short);
        $each!("ushort", u16);
    };
}

macro_rules! active_set_types {
    ($each:ident) => {
        $each!("short", $crate::types::Short);
        $each!("int", $crate::types::Int);
        $each!("long", $crate::types::Long);
        $each!("longlong", $crate::types::LongLong);
    };
}

pub(crate) use {
    active_set_types, atomic_types, bitwise_reduce_types, bitwise_types, integer_types, rma_types,
    scalar_types, wait_types,
};
