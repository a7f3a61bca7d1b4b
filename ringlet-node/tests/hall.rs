//! Who meets whom: only the two ends of one connection, whatever is shown, claimed, forgotten, and comes twice.

use std::collections::HashMap;

use ringlet::reasons::Reason;
use ringlet_node::hall::{Hall, Verdict};
use ringlet_node::notes::{ACCEPTED, CONNECTED, Note, Notes, Pair};

/// The maps as the kernel's program fills them.
#[derive(Default)]
struct Seen {
    notes: HashMap<u64, Note>,
    pairs: HashMap<Pair, u64>,
}

impl Notes for Seen {
    fn of(&self, cookie: u64) -> Option<Note> {
        self.notes.get(&cookie).copied()
    }
    fn with(&self, pair: Pair) -> Option<u64> {
        self.pairs.get(&pair).copied()
    }
}

impl Seen {
    fn begin(&mut self, cookie: u64, pair: Pair, side: u32) {
        self.notes.insert(cookie, Note { pair, side, ..Note::default() });
        self.pairs.entry(pair).and_modify(|known| *known = 0).or_insert(cookie);
    }
}

struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }
}

/// Numbers from so few that they come again and again, which the kernel's do not.
fn pair(random: &mut Random) -> Pair {
    Pair { sends: random.below(40) as u32, expects: random.below(40) as u32 }
}

#[test]
fn a_million_attempts_match_no_two_that_are_not_the_ends_of_one_connection() {
    let mut random =
        Random(std::env::var("SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(1));
    let (mut met, mut ambiguous) = (0u64, 0u64);
    for _round in 0..2000 {
        let (mut seen, mut hall) = (Seen::default(), Hall::default());
        // Both ends of a connection, by their cookies; and of each pair, how many sockets ever began with it.
        let (mut far_of, mut times) = (HashMap::new(), HashMap::<Pair, u32>::new());
        let mut begin = |seen: &mut Seen, cookie, pair, side| {
            *times.entry(pair).or_default() += 1;
            seen.begin(cookie, pair, side);
        };
        let mut cookie = 1;
        for _ in 0..20 {
            let numbers = pair(&mut random);
            match random.below(4) {
                // Its far end is on another host, or its numbers were rewritten on the way.
                0 => begin(
                    &mut seen,
                    cookie,
                    numbers,
                    if random.below(2) == 0 { CONNECTED } else { ACCEPTED },
                ),
                _ => {
                    begin(&mut seen, cookie, numbers, CONNECTED);
                    begin(&mut seen, cookie + 1, numbers.mirrored(), ACCEPTED);
                    far_of.insert(cookie, cookie + 1);
                    far_of.insert(cookie + 1, cookie);
                }
            }
            cookie += 2;
        }
        // Some are forgotten.
        for _ in 0..random.below(4) {
            seen.notes.remove(&(1 + random.below(cookie)));
            seen.pairs.remove(&pair(&mut random));
        }
        let (mut shown_by, mut waits) = (HashMap::new(), HashMap::new());
        for guest in 0..500 {
            let shown = 1 + random.below(cookie + 2);
            let accepting = random.below(2) == 0;
            shown_by.insert(guest, shown);
            let (verdict, replaced) = hall.come(&seen, guest, shown, accepting);
            if let Some(replaced) = replaced {
                assert_eq!(waits.remove(&replaced), Some(shown), "only its like is replaced");
            }
            match verdict {
                Verdict::Wait => drop(waits.insert(guest, shown)),
                Verdict::With(other) => {
                    let far = shown_by[&other];
                    assert_eq!(waits.remove(&other), Some(far), "one who waits");
                    let (near, other_note) = (seen.notes[&shown], seen.notes[&far]);
                    assert_eq!(near.pair, other_note.pair.mirrored());
                    assert_eq!(near.side + other_note.side, CONNECTED + ACCEPTED);
                    assert_eq!((near.side == ACCEPTED), accepting, "no liar");
                    // Of what the kernel saw once on each side there is one far end.
                    if times[&near.pair] == 1 && times[&other_note.pair] == 1 {
                        assert!(far_of.get(&shown).is_none_or(|known| *known == far));
                        met += 1;
                    } else if seen.pairs.get(&near.pair) == Some(&0) {
                        panic!("a pair that came twice");
                    } else {
                        ambiguous += 1;
                    }
                    hall.leave(far, other);
                }
                Verdict::Apart(reason) => {
                    assert!(matches!(reason, Reason::NoMirror | Reason::NoNote | Reason::BadPeer));
                }
            }
        }
        assert_eq!(hall.len(), waits.len());
        for (guest, shown) in waits {
            hall.leave(shown, guest);
        }
        assert!(hall.is_empty());
    }
    assert!(met > 1000, "{met} met, {ambiguous} not told");
}

#[test]
fn the_ends_of_one_connection_meet_in_either_order_and_nobody_in_their_place() {
    let (mut seen, pair) = (Seen::default(), Pair { sends: 1, expects: 2 });
    seen.begin(10, pair, CONNECTED);
    seen.begin(20, pair.mirrored(), ACCEPTED);
    for [first, second] in [[10, 20], [20, 10]] {
        let mut hall = Hall::default();
        assert_eq!(hall.come(&seen, 1, first, first == 20), (Verdict::Wait, None));
        assert_eq!(hall.come(&seen, 2, second, second == 10).0, Verdict::Apart(Reason::BadPeer));
        assert_eq!(hall.come(&seen, 3, second, second == 20), (Verdict::With(1), None));
    }
    let mut hall = Hall::default();
    assert_eq!(hall.come(&seen, 1, 30, false).0, Verdict::Apart(Reason::NoNote));
    // One who has forged the numbers of another (by the right to administer a namespace of its own): nobody meets.
    seen.begin(30, pair.mirrored(), ACCEPTED);
    assert_eq!(hall.come(&seen, 1, 10, false).0, Verdict::Apart(Reason::NoMirror));
    assert_eq!(hall.come(&seen, 1, 30, true).0, Verdict::Apart(Reason::NoMirror));
    // A socket that is connected to itself.
    seen.begin(40, Pair { sends: 7, expects: 7 }, CONNECTED);
    assert_eq!(hall.come(&seen, 1, 40, false).0, Verdict::Apart(Reason::NoMirror));
}
