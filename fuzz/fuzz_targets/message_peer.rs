//! libFuzzer's door to the script in `message_peer.rs`.
#![no_main]

#[path = "../src/message_peer.rs"]
mod message_peer;
#[allow(dead_code)] // its script belongs to another target
#[path = "../src/ring_peer.rs"]
mod ring_peer;
#[path = "../../ringlet-core/tests/segment/mod.rs"]
mod segment;

libfuzzer_sys::fuzz_target!(|script: &[u8]| message_peer::run(script));
