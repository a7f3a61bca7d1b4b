//! Two memories that an adapter keeps in step (`ringlet_core::mirror`), in every interleaving: what an end must wait for where in one memory a fence
//! would do. `RUSTFLAGS="--cfg loom" cargo test --release -p ringlet-core --test loom_mirror`. Tests that must fail show that the rules they
//! break are needed.
#![cfg(loom)]

#[allow(dead_code)]
mod model;

use loom::sync::Arc;
use loom::thread;
use model::model;
use ringlet_core::layout::{Control, WANT_BYTE};
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
    /// The sender gives nothing to the kernel before its mark is delivered.
    AwaitsDelivery,
    /// What is asked for is answered behind the records.
    AnswersLast,
    /// A doorbell byte goes behind the `Start` that is delivered.
    StartFirst,
    /// None goes once its number was told.
    StaysSilent,
    /// Doorbells are allowed before the `Start` is published.
    AllowsFirst,
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

/// What the adapter does in one turn for this direction, in the order of `ringlet_adapter::Half`.
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
    if broken == Some(Rule::AnswersLast) {
        sender.words.answer_delivery(said.flushes);
    }
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

/// Looks that a model takes, for it goes on only so long.
fn soon<T>(look: impl FnMut() -> Option<T>) -> Option<T> {
    std::iter::repeat_with(look).take(2).inspect(|_| thread::yield_now()).flatten().next()
}

/// A byte of the stream's, by the kernel's connection, behind the mark that says so: who has the byte has the mark.
fn goes_back_to_the_kernel(broken: Option<Rule>) {
    model(move || {
        let ends = Arc::new(Mirrored::default());
        let kernel = Arc::new(AtomicU32::new(0));
        let (theirs, wire) = (ends.clone(), kernel.clone());
        let sending = thread::spawn(move || {
            theirs.sender.record.store(1, Ordering::Release);
            let asked = theirs.sender.words.ask_delivery();
            let delivered = || theirs.sender.words.is_delivered(asked).then_some(());
            if broken == Some(Rule::AwaitsDelivery) || soon(delivered).is_some() {
                wire.fetch_add(1, Ordering::AcqRel);
            }
        });
        let adapter = adapter(&ends, 2, broken);
        if soon(|| (kernel.load(Ordering::Acquire) != 0).then_some(())).is_some() {
            assert_eq!(ends.receiver.record.load(Ordering::Acquire), 1);
        }
        sending.join().unwrap();
        adapter.join().unwrap();
    });
}

#[test]
fn a_byte_of_the_kernels_is_behind_its_mark() {
    goes_back_to_the_kernel(None);
}

#[test]
#[should_panic]
fn who_goes_back_must_await_the_delivery_of_the_mark() {
    goes_back_to_the_kernel(Some(Rule::AwaitsDelivery));
}

#[test]
#[should_panic]
fn a_delivery_must_be_answered_behind_it() {
    goes_back_to_the_kernel(Some(Rule::AnswersLast));
}

/// What the adapter knows of doorbell bytes: how many went, the wish for silence that it has answered, and whether one is due.
#[derive(Default)]
struct Bells {
    put: u64,
    done: u32,
    due: bool,
}

/// Its turn for them.
fn ring(ends: &Mirrored, kernel: &AtomicU32, bells: &mut Bells, broken: Option<Rule>) {
    let record = ends.sender.record.load(Ordering::Acquire);
    let deliver = || ends.receiver.record.store(record, Ordering::Release);
    if broken != Some(Rule::StartFirst) {
        deliver();
    }
    bells.due |= ends.receiver.words.data_wish().granted_by_sender() & WANT_BYTE != 0;
    let hold = ends.sender.words.sender.hold.load(Ordering::Acquire);
    let silent = hold & 1 != 0 && hold == bells.done && broken != Some(Rule::StaysSilent);
    if record != 0 && !silent && bells.due {
        kernel.fetch_add(1, Ordering::AcqRel);
        (bells.put, bells.due) = (bells.put + 1, false);
    }
    if broken == Some(Rule::StartFirst) {
        deliver();
    }
    if hold & 1 != 0 && hold != bells.done {
        bells.done = hold;
        ends.sender.words.answer_silence(hold, bells.put);
    }
}

/// Doorbell bytes of a direction that starts in the ring, and leaves it: who has one has the `Start`, and who was told their number was told of all.
fn rings_by_bytes(broken: Option<Rule>) {
    model(move || {
        let ends = Arc::new(Mirrored::default());
        let kernel = Arc::new(AtomicU32::new(0));
        let (theirs, wire) = (ends.clone(), kernel.clone());
        let adapter = thread::spawn(move || {
            let mut bells = Bells::default();
            for _ in 0..2 {
                ring(&theirs, &wire, &mut bells, broken);
                thread::yield_now();
            }
        });
        let (theirs, wire) = (ends.clone(), kernel.clone());
        let receiving = thread::spawn(move || {
            theirs.receiver.words.data_wish().want(WANT_BYTE);
            if wire.load(Ordering::Acquire) != 0 {
                assert_eq!(theirs.receiver.record.load(Ordering::Acquire), 1);
            }
        });
        ends.sender.record.store(1, Ordering::Release);
        ends.sender.words.ask_silence();
        let told = soon(|| ends.sender.words.bells_of_silence());
        adapter.join().unwrap();
        receiving.join().unwrap();
        if let Some(bells) = told {
            assert_eq!(bells, u64::from(kernel.load(Ordering::Acquire)));
        }
    });
}

#[test]
fn a_doorbell_is_behind_its_start_and_counted() {
    rings_by_bytes(None);
}

#[test]
#[should_panic]
fn a_doorbell_must_come_behind_the_start() {
    rings_by_bytes(Some(Rule::StartFirst));
}

#[test]
#[should_panic]
fn no_doorbell_may_come_once_their_number_was_told() {
    rings_by_bytes(Some(Rule::StaysSilent));
}

/// A direction comes back to the ring after silence: who delivers its `Start` may ring.
fn starts_anew(broken: Option<Rule>) {
    model(move || {
        let ends = Arc::new(Mirrored::default());
        ends.sender.words.ask_silence();
        let hold = ends.sender.words.sender.hold.load(Ordering::Relaxed);
        ends.sender.words.answer_silence(hold, 0);
        ends.receiver.words.data_wish().want(WANT_BYTE);
        let theirs = ends.clone();
        let adapter = thread::spawn(move || {
            let kernel = AtomicU32::new(0);
            ring(&theirs, &kernel, &mut Bells { done: hold, ..Bells::default() }, None);
            let started = theirs.receiver.record.load(Ordering::Relaxed) != 0;
            assert_eq!(started, kernel.load(Ordering::Relaxed) != 0);
        });
        let publish = || ends.sender.record.store(1, Ordering::Release);
        if broken == Some(Rule::AllowsFirst) {
            publish();
        }
        ends.sender.words.allow_bells();
        publish();
        adapter.join().unwrap();
    });
}

#[test]
fn who_starts_anew_is_rung_for() {
    starts_anew(None);
}

#[test]
#[should_panic]
fn doorbells_must_be_allowed_before_the_start() {
    starts_anew(Some(Rule::AllowsFirst));
}
