//! Where the functions of the library lie.

fn main() {
    println!("cargo:rerun-if-changed=together.ld");
    // (From the workspace's root, where cargo links its members: a tree that was moved finds it still.)
    println!("cargo:rustc-cdylib-link-arg=-Wl,-T,ringlet-preload/together.ld");
    // The linker's names for where a section begins and ends (`next`) are nobody else's.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,start-stop-visibility=hidden");
}
