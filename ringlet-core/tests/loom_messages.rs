//! Message queue, mailbox and locked buffer in every interleaving (see loom.rs):
//! `RUSTFLAGS="--cfg loom" cargo test --release -p ringlet-core --test loom_messages`.
#![cfg(loom)]

#[allow(dead_code)] // loom.rs uses the rest
mod model;

use loom::sync::Arc;
use loom::thread;
use model::{Bell, Context, LINE, Memory, Wishes, model};
use ringlet_core::layout::{Ready, WANT_EVENT};
use ringlet_core::locked::Locked;
use ringlet_core::mailbox::{Inbox, announce, announced};
use ringlet_core::queue::{Message, Next, Refused, Rx, Tx};
use ringlet_core::sync::AtomicU32;
use ringlet_core::wait::{arm, disarm, nap, rouse};

/// Message `number` is so many times that byte.
fn send(tx: &Tx, memory: &Memory, number: u8, len: usize) -> bool {
    let data = vec![number; len];
    match tx.reserve(memory, len) {
        Ok(place) => {
            // SAFETY: `data` is valid for `len` bytes.
            unsafe { place.write(memory, 0, data.as_ptr(), len) };
            tx.commit(memory, place, len);
            true
        }
        Err(refused) => {
            assert_eq!(refused, Refused::Full);
            false
        }
    }
}

fn bytes(memory: &Memory, message: &Message) -> Vec<u8> {
    let mut data = vec![0; 4 * LINE];
    // SAFETY: `data` is valid for more than the longest message of this memory.
    unsafe { message.read(memory, 0, data.as_mut_ptr(), message.len()) };
    data.truncate(message.len());
    data
}

/// The next message; `Some(look)` when there was one.
fn receive(rx: &Rx, memory: &Memory, got: &mut Vec<Vec<u8>>) -> Option<bool> {
    match rx.peek(memory) {
        Next::Empty => None,
        Next::Message(message) => {
            got.push(bytes(memory, &message));
            Some(rx.release(memory, message))
        }
        Next::Corrupt => panic!("corrupt"),
    }
}

/// Messages of these lengths, the first so many before the threads start; the sender sleeps when there is no room.
fn messages(hot_data: u64, lens: &'static [usize], before: usize, received: usize) {
    model(move || {
        let memory = Arc::new(Memory::new(hot_data));
        let (tx, rx) = (Tx::default(), Rx::default());
        let (room, bell) = (Arc::new(Wishes::default()), Arc::new(Bell::default()));
        let mut got = Vec::new();
        for i in 0..before {
            assert!(send(&tx, &memory, i as u8, lens[i]));
            if i < received {
                assert!(receive(&rx, &memory, &mut got).is_some());
            }
        }
        let (theirs, flag, rung) = (memory.clone(), room.clone(), bell.clone());
        let sending = thread::spawn(move || {
            for i in before..lens.len() {
                while !send(&tx, &theirs, i as u8, lens[i]) {
                    flag.wish().want(WANT_EVENT);
                    if !tx.writable(&*theirs) {
                        rung.poll();
                        rung.drain();
                    }
                }
            }
        });
        while got.len() < lens.len() {
            match receive(&rx, &memory, &mut got) {
                None => thread::yield_now(),
                Some(true) if room.wish().granted_by_receiver() == WANT_EVENT => bell.ring(),
                Some(_) => {}
            }
        }
        sending.join().unwrap();
        for (i, message) in got.iter().enumerate() {
            assert_eq!(*message, vec![i as u8; lens[i]]);
        }
    });
}

#[test]
fn messages_with_rewind_and_empty_ones() {
    messages(128, &[1, 0, 2, 0, 1, 2], 2, 2);
}

#[test]
fn messages_through_full_slots() {
    messages(128, &[1, 1, 1, 1, 1, 1, 1, 1], 6, 0);
}

#[test]
fn messages_through_full_data() {
    messages(512, &[128, 128, 128, 128, 60], 3, 0);
}

/// One line is left before the end: it is skipped, whether or not the receiver has made room at the beginning.
#[test]
fn messages_stay_whole_at_the_end() {
    messages(512, &[60, 128, 128, 128, 128, 2], 4, 0);
}

/// Two senders with a lane each, one receiver that sleeps when nothing is announced: nobody is forgotten.
#[test]
fn mailbox_hears_all_its_senders() {
    model(|| {
        let context = Arc::new(Context::default());
        let ready = Arc::new(Ready::default());
        let lanes: Vec<_> = (0..2).map(|_| Arc::new(Memory::new(128))).collect();
        let threads: Vec<_> = (0..2)
            .map(|lane| {
                let (memory, ready, context) =
                    (lanes[lane].clone(), ready.clone(), context.clone());
                thread::spawn(move || {
                    assert!(send(&Tx::default(), &memory, lane as u8, 1));
                    announce(&ready, lane);
                    context.ring_if_armed(&mut 0);
                })
            })
            .collect();
        receive_from(&lanes, &ready, &context, 2);
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
}

/// One sender, two messages: the bit that it finds set still leads the receiver to the second.
#[test]
fn mailbox_hears_the_next_message() {
    model(|| {
        let context = Arc::new(Context::default());
        let ready = Arc::new(Ready::default());
        let lanes = vec![Arc::new(Memory::new(128))];
        let (memory, theirs, bell) = (lanes[0].clone(), ready.clone(), context.clone());
        let sending = thread::spawn(move || {
            let (tx, mut rung) = (Tx::default(), 0);
            for number in 0..2 {
                assert!(send(&tx, &memory, number, 1));
                announce(&theirs, 0);
                bell.ring_if_armed(&mut rung);
            }
        });
        receive_from(&lanes, &ready, &context, 2);
        sending.join().unwrap();
    });
}

/// Looks only at what was announced, unlike `Inbox::poll`: a forgotten announcement is a deadlock.
fn receive_from(lanes: &[Arc<Memory>], ready: &Ready, context: &Context, count: usize) {
    let rx: Vec<_> = lanes.iter().map(|_| Rx::default()).collect();
    let (mut inbox, mut got) = (Inbox::default(), Vec::new());
    while got.len() < count {
        let mut poll = || {
            inbox.collect(ready);
            inbox.next_pending(lanes.len(), |lane| rx[lane].ready(&*lanes[lane]))
        };
        if let Some(lane) = poll() {
            assert!(receive(&rx[lane], &lanes[lane], &mut got).is_some());
            continue;
        }
        arm(&context.flag);
        if poll().is_none() {
            context.bell.poll();
            context.bell.drain();
        }
        disarm(&context.flag);
    }
}

/// A receiver that leaves its lanes and sleeps, as a bundle of Active Messages does: whoever finds that its lane is left sets its bit, and
/// whoever has set it finds the sleeper. From then on the receiver looks at bits only: a message that was forgotten on the way is a
/// deadlock.
fn left_lanes(lens: &'static [&'static [usize]]) {
    model(move || {
        let bell = Arc::new((AtomicU32::new(0), Ready::default(), Bell::default()));
        let lanes: Vec<_> =
            lens.iter().map(|_| Arc::new((Wishes::default(), Memory::new(128)))).collect();
        let threads: Vec<_> = (0..lens.len())
            .map(|number| {
                let (lane, bell) = (lanes[number].clone(), bell.clone());
                thread::spawn(move || {
                    let ((left, memory), (sleep, ready, rung)) = (&*lane, &*bell);
                    let tx = Tx::default();
                    for (message, len) in lens[number].iter().enumerate() {
                        assert!(send(&tx, memory, message as u8, *len));
                        if left.wish().granted_by_sender() != 0 {
                            announce(ready, number);
                            if rouse(sleep) {
                                rung.ring();
                            }
                        }
                    }
                })
            })
            .collect();
        let (sleep, ready, rung) = &*bell;
        let rx: Vec<_> = lanes.iter().map(|_| Rx::default()).collect();
        let mut watched: Vec<_> = (0..lanes.len()).collect();
        let (mut got, all) = (Vec::new(), lens.iter().map(|lens| lens.len()).sum());
        while got.len() < all {
            // Each that is watched is served, and then left unless something has come meanwhile.
            watched.retain(|number| {
                let (left, memory) = &*lanes[*number];
                while receive(&rx[*number], memory, &mut got).is_some() {}
                left.wish().want(WANT_EVENT);
                rx[*number].ready(memory)
            });
            if !watched.is_empty() {
                continue;
            }
            nap(sleep);
            if !announced(ready) && got.len() < all {
                rung.poll();
                rung.drain();
            }
            let mut inbox = Inbox::default();
            inbox.collect(ready);
            inbox.next_pending(lanes.len(), |number| {
                watched.push(number);
                false
            });
        }
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
}

#[test]
fn a_lane_that_is_left_is_heard() {
    left_lanes(&[&[1, 1]]);
}

#[test]
fn two_lanes_that_are_left_are_heard() {
    left_lanes(&[&[1], &[1]]);
}

/// Question and answer, twice, each written where the other reads it.
#[test]
fn locked_buffers_take_turns() {
    model(|| {
        let buffers = Arc::new([Memory::new(128), Memory::new(128)]);
        let theirs = buffers.clone();
        let serving = thread::spawn(move || {
            let end = Locked::server();
            for round in 0..2 {
                let question = await_turn(&end, &theirs[0]);
                assert_eq!(bytes(&theirs[0], &question), vec![round; 1 + round as usize]);
                end.take_turn(&question);
                say(&end, &theirs[1], 10 + round, 60);
            }
        });
        let end = Locked::client();
        for round in 0..2 {
            say(&end, &buffers[0], round, 1 + round as usize);
            assert_eq!(end.reserve(&buffers[0], 1).unwrap_err(), Refused::Full);
            let answer = await_turn(&end, &buffers[1]);
            assert_eq!(bytes(&buffers[1], &answer), vec![10 + round; 60]);
            end.take_turn(&answer);
        }
        serving.join().unwrap();
    });
}

fn say(end: &Locked, ours: &Memory, byte: u8, len: usize) {
    let place = end.reserve(ours, len).unwrap();
    // SAFETY: the vector is valid for its length.
    unsafe { place.write(ours, 0, vec![byte; len].as_ptr(), len) };
    end.commit(ours, place, len);
}

fn await_turn(end: &Locked, theirs: &Memory) -> Message {
    loop {
        match end.peek(theirs) {
            Next::Empty => thread::yield_now(),
            Next::Message(message) => return message,
            Next::Corrupt => panic!("corrupt"),
        }
    }
}
