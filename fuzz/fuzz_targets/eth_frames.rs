//! libFuzzer's door to the script in `eth_frames.rs`.
#![no_main]

#[path = "../src/eth_frames.rs"]
mod eth_frames;

libfuzzer_sys::fuzz_target!(|script: &[u8]| {
    eth_frames::run(script);
});
