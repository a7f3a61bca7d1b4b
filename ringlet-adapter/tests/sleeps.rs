//! When a server arms what it serves, and looks at it again.

use ringlet_adapter::{Progress, Serve, Server};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

/// What it was asked, and how often.
#[derive(Default)]
struct Asked {
    passes: Cell<u32>,
    armed: Cell<u32>,
    overdue: Cell<u32>,
}

/// It has nothing to do.
struct Idle {
    asked: Rc<Asked>,
    bell: OwnedFd,
    is_dear: bool,
    is_owed: bool,
}

impl Idle {
    fn new(is_dear: bool, is_owed: bool) -> (Idle, Rc<Asked>) {
        let asked = Rc::<Asked>::default();
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        (Idle { asked: asked.clone(), bell, is_dear, is_owed }, asked)
    }
}

impl Serve for Idle {
    fn pass(&mut self, _rouse: &mut Vec<usize>) -> Progress {
        self.asked.passes.set(self.asked.passes.get() + 1);
        Progress::Idle
    }
    fn arm(&mut self) -> bool {
        self.asked.armed.set(self.asked.armed.get() + 1);
        true
    }
    fn disarm(&mut self) {}
    fn is_owed(&self) -> bool {
        self.is_owed && self.asked.overdue.get() == 0
    }
    fn overdue(&mut self) {
        self.asked.overdue.set(self.asked.overdue.get() + 1);
    }
    fn is_dear(&self) -> bool {
        self.is_dear
    }
    fn descriptors(&self, tell: &mut dyn FnMut(BorrowedFd<'_>)) {
        tell(self.bell.as_fd());
    }
}

/// One turn, in which it is armed: what is to be watched first is watched in it.
fn until_armed(server: &mut Server<Idle>, asked: &Asked) {
    server.turn(Some(Duration::ZERO), &mut Vec::new(), &mut Vec::new()).unwrap();
    assert_eq!(asked.armed.get(), 1);
}

#[test]
fn what_has_nothing_to_do_is_armed_in_its_first_turn() {
    for is_dear in [true, false] {
        let (idle, asked) = Idle::new(is_dear, false);
        let mut server = Server::new().unwrap();
        server.serve(idle).unwrap();
        until_armed(&mut server, &asked);
    }
}

#[test]
fn what_is_owed_something_is_overdue_after_a_sleep_only() {
    for is_dear in [true, false] {
        let (idle, asked) = Idle::new(is_dear, true);
        let mut server = Server::new().unwrap();
        server.serve(idle).unwrap();
        until_armed(&mut server, &asked);
        assert_eq!(asked.overdue.get(), 0);
        let (mut ready, mut over) = (Vec::new(), Vec::new());
        for _ in 0..1000 {
            server.turn(Some(Duration::from_millis(100)), &mut ready, &mut over).unwrap();
            if asked.overdue.get() > 0 {
                break;
            }
        }
        assert_eq!(asked.overdue.get(), 1);
    }
}

#[test]
fn what_is_owed_nothing_is_not_looked_at_again() {
    let (idle, asked) = Idle::new(true, false);
    let mut server = Server::new().unwrap();
    server.serve(idle).unwrap();
    until_armed(&mut server, &asked);
    let passes = asked.passes.get();
    let (mut ready, mut over) = (Vec::new(), Vec::new());
    for _ in 0..10 {
        server.turn(Some(Duration::from_millis(5)), &mut ready, &mut over).unwrap();
    }
    assert_eq!((asked.passes.get(), asked.overdue.get()), (passes, 0));
}
