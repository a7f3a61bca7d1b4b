//! What the children of a server that forks per connection run lies together in the library (`together.ld`), and what it calls of its own is
//! its own.

mod library;

use object::{
    Object, ObjectSection, ObjectSegment, ObjectSymbol, ObjectSymbolTable, RelocationTarget,
};

#[test]
fn what_a_child_runs_lies_together() {
    let library = std::fs::read(library::build()).expect("the library");
    let library = object::File::parse(library.as_slice()).expect("an ELF library");
    let together = library.section_by_name("ringlet_text").expect("the section of together.ld");
    let here = together.address()..together.address() + together.size();
    let is_here = |wanted: &dyn Fn(&str) -> bool| {
        let found = library.symbols().filter(|symbol| symbol.name().is_ok_and(wanted));
        let (mut count, mut inside) = (0, 0);
        for symbol in found {
            count += 1;
            inside += usize::from(here.contains(&symbol.address()));
        }
        count > 0 && count == inside
    };
    for name in ["fork", "accept", "close", "recv", "send", "epoll_ctl", "sigaction"] {
        assert!(is_here(&|symbol| symbol == name), "{name}");
    }
    // Of ours, those that are a function of their own however the library is linked.
    for part in [
        "7process10after_fork",
        "7process12before_close",
        "5epoll7control",
        "7release11clean_up_as",
    ] {
        assert!(is_here(&|symbol| symbol.contains(part)), "{part}");
    }
    for part in ["9processes7at_exit", "6thread12become_child", "5start5start17h"] {
        assert!(is_here(&|symbol| symbol.contains(part)), "{part}");
    }
    // Each step to another library's function, if there is one, is in the pages behind it.
    if let Some(steps) = library.section_by_name(".plt") {
        assert_eq!(steps.address(), here.end.next_multiple_of(16));
    }
}

#[test]
fn it_is_mapped_in_two_pieces() {
    let library = std::fs::read(library::build()).expect("the library");
    let library = object::File::parse(library.as_slice()).expect("an ELF library");
    let pieces: Vec<_> = library.segments().collect();
    assert_eq!(pieces.len(), 2);
    // None has memory behind what the file has, which would be a mapping of its own.
    for piece in &pieces {
        let (_, in_file) = piece.file_range();
        assert_eq!(in_file, piece.size());
    }
}

/// A program that exports one of our names goes on to ours: what of ours went by that name would come back to it.
#[test]
fn it_reaches_its_own_functions_by_no_name() {
    let library = std::fs::read(library::build()).expect("the library");
    let library = object::File::parse(library.as_slice()).expect("an ELF library");
    let symbols = library.dynamic_symbol_table().expect("the names that it exports and asks for");
    let (mut of_others, mut of_its_own) = (0, Vec::new());
    for (_, relocation) in library.dynamic_relocations().expect("the loader's work") {
        let RelocationTarget::Symbol(index) = relocation.target() else { continue };
        let symbol = symbols.symbol_by_index(index).expect("a name that a relocation asks for");
        match symbol.is_undefined() {
            true => of_others += 1,
            false => of_its_own.push(symbol.name().unwrap_or_default().to_owned()),
        }
    }
    assert!(of_others > 0, "none of libc's either?");
    assert!(of_its_own.is_empty(), "by the loader, who asks the program first: {of_its_own:?}");
}
