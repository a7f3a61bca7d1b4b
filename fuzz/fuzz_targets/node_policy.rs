//! libFuzzer's door to the script in `node_policy.rs`.
#![no_main]

#[path = "../src/node_policy.rs"]
mod node_policy;

libfuzzer_sys::fuzz_target!(|script: &[u8]| {
    node_policy::run(script);
});
