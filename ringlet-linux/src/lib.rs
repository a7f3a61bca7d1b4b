//! System calls, and only system calls.
