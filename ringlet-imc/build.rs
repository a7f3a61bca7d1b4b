//! The name under which programs remember the library: the one by which they load it.

fn main() {
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libimc.so");
    // (A child of its program calls it.)
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    // Its own functions, whatever the program exports under their names.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-Bsymbolic-functions");
    println!("cargo:rerun-if-changed=build.rs");
}
