//! Where the functions of the library lie, and in how many mappings.

use std::env::var;
use std::process::Command;

fn main() {
    println!("cargo:rerun-if-changed=together.ld");
    // (From the workspace's root, where cargo links its members: a tree that was moved finds it still.)
    println!("cargo:rustc-cdylib-link-arg=-Wl,-T,ringlet-preload/together.ld");
    // Our own functions are called where they stand. A program that exports one of these names (Erlang's sigaction) goes on to ours, which would
    // come back to it.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-Bsymbolic-functions");
    // The linker's names for where a section begins and ends (`next`) are nobody else's.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,start-stop-visibility=hidden");
    // Two mappings, of code and of variables, not five: each is made at every start, copied by every fork, and taken down at every end. (What
    // is read-only after relocation would be one more. The addresses of the functions that ours stand in front of lie in variables anyway.)
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,norelro");
    // What compilers put before and behind a library's own code has nothing to do here, but pages to be mapped for it.
    println!("cargo:rustc-cdylib-link-arg=-nostartfiles");
    if links_with("-Wl,--no-rosegment") {
        println!("cargo:rustc-cdylib-link-arg=-Wl,--no-rosegment");
    } else {
        println!("cargo:rustc-cdylib-link-arg=-Wl,-z,noseparate-code");
    }
}

/// Does the linker know this argument? (LLVM's does, and GNU's later ones.)
fn links_with(argument: &str) -> bool {
    let (Ok(rustc), Ok(directory), Ok(target)) = (var("RUSTC"), var("OUT_DIR"), var("TARGET"))
    else {
        return false;
    };
    let source = format!("{directory}/links.rs");
    if std::fs::write(
        &source,
        "#![no_std]\n#[panic_handler]\nfn panic(_: &core::panic::PanicInfo) -> ! { loop {} }\n",
    )
    .is_err()
    {
        return false;
    }
    let flags = var("CARGO_ENCODED_RUSTFLAGS").unwrap_or_default();
    let mut linking = Command::new(rustc);
    linking.args(flags.split('\x1f').filter(|flag| !flag.is_empty()));
    if let Ok(linker) = var("RUSTC_LINKER") {
        linking.arg(format!("-Clinker={linker}"));
    }
    linking.args([
        "--edition=2024",
        "--crate-type=cdylib",
        "-Cpanic=abort",
        "--target",
        &target,
        &source,
    ]);
    linking.arg(format!("-Clink-arg={argument}")).arg(format!("-o{directory}/links.so"));
    linking.output().is_ok_and(|output| output.status.success())
}
