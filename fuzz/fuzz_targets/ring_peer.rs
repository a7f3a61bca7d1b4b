//! libFuzzer's door to the script in `ring_peer.rs`.
#![no_main]

#[path = "../src/ring_peer.rs"]
mod ring_peer;
#[path = "../../ringlet-core/tests/segment/mod.rs"]
mod segment;

libfuzzer_sys::fuzz_target!(|script: &[u8]| ring_peer::run(script));
