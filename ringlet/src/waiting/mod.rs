//! How a thread waits: it watches memory (`spin`), then sleeps (`sleep`); and what a signal does to a wait (`signals`).

pub mod signals;
pub mod sleep;
pub mod spin;
