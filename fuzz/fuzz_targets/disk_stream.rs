//! libFuzzer's door to the script in `disk_stream.rs`.
#![no_main]

#[path = "../src/disk_stream.rs"]
mod disk_stream;

libfuzzer_sys::fuzz_target!(|script: &[u8]| {
    disk_stream::run(script);
});
