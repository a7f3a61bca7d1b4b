//! libFuzzer's door to the script in `nbd_client.rs`.
#![no_main]

#[path = "../src/nbd_client.rs"]
mod nbd_client;

libfuzzer_sys::fuzz_target!(|script: &[u8]| {
    nbd_client::run(script);
});
