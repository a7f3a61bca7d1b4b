//! The name under which programs remember the library: its number changes when they must be compiled again.

fn main() {
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libringlet.so.0");
    // Its own functions, whatever the program exports under their names.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-Bsymbolic-functions");
    println!("cargo:rerun-if-changed=build.rs");
}
