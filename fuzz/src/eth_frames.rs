//! Messages of another port, of any bytes. What must hold: who takes them is shown what a kernel takes only, from addresses that can be; and
//! whatever has to be cut of it is cut into plain frames, or refused.

use std::cell::RefCell;
use std::time::Duration;

use ringlet_ethernet::cut;
use ringlet_ethernet::frame::{HEAD_BYTES, HEADER_BYTES, Head, MESSAGE_MOST};
use ringlet_ethernet::room::{Room, Rules};
use ringlet_ethernet::{Mac, Options, Policy, Port, Queue};

const OURS: Mac = Mac([2, 0, 0, 0, 0, 1]);
const THEIRS: Mac = Mac([2, 0, 0, 0, 0, 2]);
/// Frames that one may be cut into: of 28 bytes each at least.
const PIECES_MOST: usize = MESSAGE_MOST / 28 + 1;

struct Stage {
    _ports: [Port; 2],
    ours: Queue,
    theirs: Queue,
}

thread_local! {
    static STAGE: RefCell<Option<Stage>> = const { RefCell::new(None) };
}

impl Stage {
    fn new() -> Stage {
        let name = format!("ringlet-frames-{}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        let _ = std::fs::remove_dir_all(&folder);
        Room::create(
            &folder,
            "net",
            Rules { addresses: Policy::Moving, storm: 0, bridge: false },
            None,
        )
        .unwrap();
        let room = Room::open(&folder, "net").unwrap();
        let open = |name, mac| {
            let (port, queues) = Port::open(room.clone(), Options::new(name, mac), |_| ()).unwrap();
            (port, queues.into_iter().next().unwrap())
        };
        let ((one, mut ours), (other, mut theirs)) = (open("ours", OURS), open("theirs", THEIRS));
        while one.others() == 0 || other.others() == 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
        // (They have met, and their name is not needed any more.)
        std::fs::remove_dir_all(&folder).unwrap();
        ours.begin();
        theirs.begin();
        Stage { _ports: [one, other], ours, theirs }
    }

    fn take(&mut self) -> usize {
        let mut taken = 0;
        self.ours.begin();
        while self.ours.hold(64, |arrived| {
            taken += 1;
            assert!(arrived.head.is_sound(arrived.len) && arrived.head.source().is_station());
            let mut message = vec![0; arrived.len];
            assert_eq!(arrived.copy_to(&mut message), arrived.len);
            let mut pieces = 0;
            let cut = cut::plain(&message, |piece| {
                let head = Head(*piece.first_chunk().unwrap());
                assert!(head.is_sound(piece.len()) && cut::is_plain(&head));
                pieces += 1;
            });
            assert!(pieces <= PIECES_MOST && (cut.is_ok() || pieces == 0));
            assert!(cut.is_ok() || !cut::is_plain(arrived.head), "a plain frame is not one");
            Ok(())
        }) {}
        taken
    }

    fn play(&mut self, mut script: &[u8]) -> usize {
        let mut taken = 0;
        while let Some((&kind, rest)) = script.split_first() {
            let (len, rest) = rest.split_at(rest.len().min(2));
            let len = len.iter().fold(0, |sum, byte| sum << 8 | usize::from(*byte));
            let (bytes, rest) = rest.split_at(rest.len().min(if kind & 1 == 0 { len } else { 64 }));
            script = rest;
            let mut message = bytes.to_vec();
            // (Half of them are long, and half of what they are about is said as it ought to be.)
            if kind & 1 != 0 {
                message.resize(len.min(MESSAGE_MOST), kind);
            }
            if kind & 2 != 0 && message.len() >= HEAD_BYTES {
                message[HEADER_BYTES..HEAD_BYTES - 2].copy_from_slice(&[OURS.0, THEIRS.0].concat());
                message[0] &= 3;
                message[1] &= 0x87;
                message[3] = 0;
                message[6..10].copy_from_slice(&[34, 0, 16, 0]);
            }
            if kind & 4 != 0 && message.len() > HEADER_BYTES + 47 {
                message[HEADER_BYTES + 12..HEADER_BYTES + 15].copy_from_slice(&[8, 0, 0x45]);
                message[HEADER_BYTES + 46] = 0x50;
            }
            let sent = match self.theirs.reserve(OURS, message.len()) {
                Ok(mut place) => {
                    place.write(0, &message);
                    place.send().is_ok()
                }
                Err(_) => false,
            };
            if !sent || kind & 8 != 0 {
                taken += self.take();
            }
            self.theirs.begin();
        }
        taken + self.take()
    }
}

/// How many were taken.
pub fn run(script: &[u8]) -> usize {
    STAGE.with_borrow_mut(|stage| stage.get_or_insert_with(Stage::new).play(script))
}
