//! ringlet's services: sockets today, other faces later.

pub mod config;
pub mod reasons;
