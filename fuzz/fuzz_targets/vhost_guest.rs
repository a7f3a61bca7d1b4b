//! libFuzzer's door to the script in `vhost_guest.rs`.
#![no_main]

#[path = "../../ringlet-ethernet/tests/guest/mod.rs"]
mod guest;
#[path = "../src/vhost_guest.rs"]
mod vhost_guest;

libfuzzer_sys::fuzz_target!(|script: &[u8]| {
    vhost_guest::run(script);
});
