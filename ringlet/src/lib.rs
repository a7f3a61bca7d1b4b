//! ringlet's services: sockets today, other faces later.

pub mod reasons;
