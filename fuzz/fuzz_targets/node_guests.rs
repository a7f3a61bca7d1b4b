//! libFuzzer's door to the script in `node_guests.rs`.
#![no_main]

#[path = "../src/node_guests.rs"]
mod node_guests;

libfuzzer_sys::fuzz_target!(|script: &[u8]| {
    node_guests::run(script);
});
