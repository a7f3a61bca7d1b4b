//! Two memories that an adapter keeps in step (`ringlet_core::mirror`), in every interleaving: what an end must wait for where in one memory a fence
//! would do. `RUSTFLAGS="--cfg loom" cargo test --release -p ringlet-core --test loom_mirror`. Tests that must fail show that the rules they
//! break are needed.
#![cfg(loom)]

#[allow(dead_code)]
mod model;

use loom::sync::Arc;
use loom::thread;
use model::model;
use ringlet_core::layout::Control;
use ringlet_core::leaving::{Leaving, ReceiverState};
use ringlet_core::mirror::{Answers, Asks, ReceiverLine, SenderLine};
use ringlet_core::sync::{AtomicU32, Ordering, fence};

/// What the adapter, or an end, leaves out.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Rule {
    /// The receiver waits for the echo, not only until it sees nobody at work.
    AwaitsEcho,
    /// The sender's line is read behind the delivery of the receiver's.
    ReadsBehind,
    /// The sender's line is delivered behind the records.
    RecordsFirst,
}

/// One end's memory: its words, and a record.
#[derive(Default)]
struct End {
    words: Control,
    record: AtomicU32,
}

#[derive(Default)]
struct Mirrored {
    sender: End,
    receiver: End,
}

/// What the adapter does in one turn for this direction, in the order of `ringlet_adapter::Link`.
fn pass(ends: &Mirrored, told: &mut SenderLine, heard: &mut ReceiverLine, broken: Option<Rule>) {
    let Mirrored { sender, receiver } = ends;
    let read = |told: &SenderLine| SenderLine::read(&sender.words.sender, told);
    let early = read(told);
    let line = ReceiverLine::read(&receiver.words.receiver);
    if line != *heard {
        line.write_first(&sender.words.receiver);
        line.write_last(&sender.words.receiver);
        *heard = line;
    }
    fence(Ordering::SeqCst);
    let said = if broken == Some(Rule::ReadsBehind) { early } else { read(told) };
    let Some(said) = said else { return };
    let deliver = || {
        let record = sender.record.load(Ordering::Acquire);
        receiver.record.store(record, Ordering::Release);
    };
    if broken != Some(Rule::RecordsFirst) {
        deliver();
    }
    said.write(&receiver.words.sender);
    receiver.words.answer_echo(heard.changes);
    if broken == Some(Rule::RecordsFirst) {
        deliver();
    }
    sender.words.answer_delivery(said.flushes);
    *told = said;
}

fn adapter(ends: &Arc<Mirrored>, turns: usize, broken: Option<Rule>) -> thread::JoinHandle<()> {
    let ends = ends.clone();
    thread::spawn(move || {
        let (mut told, mut heard) = Default::default();
        for _ in 0..turns {
            pass(&ends, &mut told, &mut heard, broken);
            thread::yield_now();
        }
    })
}

fn is_quiet(end: &End, broken: Option<Rule>) -> bool {
    match broken {
        Some(Rule::AwaitsEcho) => end.words.is_quiet(),
        _ => end.words.is_quiet_beyond(),
    }
}

/// As loom.rs has it for one memory: a mark is there when the sender is quiet, or the receiver was seen to leave.
fn leaves_beside_a_mark(broken: Option<Rule>) {
    model(move || {
        let ends = Arc::new(Mirrored::default());
        let theirs = ends.clone();
        let sending = thread::spawn(move || {
            let goes = || theirs.sender.record.store(1, Ordering::Release);
            theirs.sender.words.unless_left(goes)
        });
        let adapter = adapter(&ends, 2, broken);
        ends.receiver.words.leave(0);
        // (The adapter does not go on for ever, for the model's sake: what it has not told in the end is not known.)
        let quiet = (0..2).any(|_| {
            thread::yield_now();
            is_quiet(&ends.receiver, broken)
        });
        let found = ends.receiver.record.load(Ordering::Acquire) != 0;
        let marked = sending.join().unwrap();
        adapter.join().unwrap();
        if quiet {
            assert_eq!(marked, found);
        }
    });
}

#[test]
fn a_mark_is_there_or_the_receiver_was_seen_to_leave() {
    leaves_beside_a_mark(None);
}

#[test]
#[should_panic]
fn who_leaves_must_await_the_echo() {
    leaves_beside_a_mark(Some(Rule::AwaitsEcho));
}

#[test]
#[should_panic]
fn the_echo_must_be_of_a_line_that_was_read_behind() {
    leaves_beside_a_mark(Some(Rule::ReadsBehind));
}

#[test]
#[should_panic]
fn records_must_come_before_the_line() {
    leaves_beside_a_mark(Some(Rule::RecordsFirst));
}

/// A receiver takes its word back while its sender may answer: both know alike whether it was answered.
fn stays_beside_an_answer(broken: Option<Rule>) {
    model(move || {
        let ends = Arc::new(Mirrored::default());
        let (mut told, mut heard) = Default::default();
        ends.receiver.words.leave(0);
        pass(&ends, &mut told, &mut heard, None);
        let theirs = ends.clone();
        let sending = thread::spawn(move || theirs.sender.words.answer());
        let adapter = adapter(&ends, 2, broken);
        let quiet = || {
            (0..2).any(|_| {
                thread::yield_now();
                is_quiet(&ends.receiver, broken)
            })
        };
        let stays = ends.receiver.words.stay(quiet);
        let answered = sending.join().unwrap();
        adapter.join().unwrap();
        if let Some(stays) = stays {
            assert_eq!(stays, !answered);
            let state = ends.receiver.words.receiver_state();
            assert_eq!(state == ReceiverState::Answered, answered);
        }
    });
}

#[test]
fn who_stays_was_not_answered() {
    stays_beside_an_answer(None);
}

#[test]
#[should_panic]
fn who_stays_must_await_the_echo() {
    stays_beside_an_answer(Some(Rule::AwaitsEcho));
}
