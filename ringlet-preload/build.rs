//! Where the functions of the library lie.

fn main() {
    println!("cargo:rerun-if-changed=together.ld");
    let root = std::env::var("CARGO_MANIFEST_DIR").expect("cargo says where the sources are");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-T,{root}/together.ld");
    // The linker's names for where a section begins and ends (`next`) are nobody else's.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,start-stop-visibility=hidden");
}
