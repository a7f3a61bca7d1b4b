//! The name under which programs remember the library.

fn main() {
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libringlet_shmem.so.0");
    // (It is called when its program ends.)
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    // Its own functions, whatever the program exports under their names.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-Bsymbolic-functions");
    println!("cargo:rerun-if-changed=build.rs");
}
