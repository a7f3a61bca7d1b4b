//! What the children of a server that forks per connection run lies together in the library (`together.ld`).

mod library;

use object::{Object, ObjectSection, ObjectSymbol};

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
    // Each step to another library's function is in the pages behind it.
    let steps = library.section_by_name(".plt").expect("steps to other libraries");
    assert_eq!(steps.address(), here.end.next_multiple_of(16));
}
