//! epoll sets that hold attached connections.
//!
//! The kernel's set stays in charge of everything else. An attached connection is registered there under a mark of our own,
//! edge-triggered, for what only the kernel knows (doorbell bytes, the end of the connection); its readiness is computed here.
//!
//! Looking at every connection would cost what idle ones are many; so a set keeps a *hot list* of those that may be ready or were
//! lately. A sleeping set is woken for hot ones through its context. Cold ones are armed to be woken by a byte on their kernel
//! connection, which the kernel's set reports by itself; then they are hot again.
//!
//! The rooms, from the bottom: `set` (what is registered where), `hot`, `bells`, `elder`, `registration`; then, above the code that moves
//! bytes, `look`, `order`, `control`, `harvest`, `arm`, `nested`, `kernel`, `wait`.

mod arm;
pub mod bells;
mod control;
mod elder;
mod harvest;
mod hot;
mod kernel;
pub mod life;
mod look;
pub mod nested;
mod order;
pub mod registration;
pub mod set;
mod wait;

pub use bells::{any_of_ours, renamed};
pub use control::control;
pub use elder::{elders, inherit};
#[cfg(test)]
pub use hot::{amid, at_work, leave_amid, looks_at_all};
pub use life::{
    after_failed_exec, after_fork, before_exec, before_fork, before_fork_amid, closed, closes_in,
    created, give_back_inherited, given_away, named, number_closes, set_of, start, visit,
};
pub use nested::{has_adopted, holds_sets, nest, ready, settle};
pub use registration::{forget_socket, unregister};
pub use set::Visit;
#[cfg(test)]
pub use wait::latest_processor;
pub use wait::{after_native, begin_native, end_native, wait, wait_over_sets};
