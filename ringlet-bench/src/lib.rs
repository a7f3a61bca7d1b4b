//! What measures: `ringlet bench`, its figures of the papers, and `ringlet compare`, with the pictures of what they found.
#![deny(unsafe_code)]
#[macro_use(println, eprintln)]
extern crate ringlet_programs;

pub mod bench;
pub mod compare;
pub mod papers;
pub mod plot;
