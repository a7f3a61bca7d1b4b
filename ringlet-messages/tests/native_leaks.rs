//! Nothing of the native library's connections stays: no descriptor, no mapping. (In a process of its own, to count them.)

use ringlet_messages::native::*;
use std::time::Duration;

const SOON: Timeout = Some(Duration::from_secs(120));

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

fn segments() -> usize {
    std::fs::read_to_string("/proc/self/maps").unwrap().matches("ringlet-native").count()
}

#[test]
fn nothing_stays() {
    let before = descriptors();
    for kind in [Kind::Bytes, Kind::Messages, Kind::Locked, Kind::Region, Kind::Mailbox] {
        let options = Options::new(kind);
        let name = format!("leaks-{}-{kind:?}", std::process::id());
        for _ in 0..20 {
            if kind == Kind::Mailbox {
                let mut mailbox = Mailbox::bind(&name, options).unwrap();
                std::thread::scope(|scope| {
                    let sending = scope.spawn(|| {
                        let mut sender = connect(&name, options, SOON).unwrap().sender().unwrap();
                        sender.send(b"x", SOON).unwrap();
                    });
                    mailbox.receive(&mut [0; 1], SOON).unwrap();
                    sending.join().unwrap();
                });
                continue;
            }
            let listener = Listener::bind(&name, options).unwrap();
            std::thread::scope(|scope| {
                let connecting = scope.spawn(|| drop(connect(&name, options, SOON).unwrap()));
                assert!(segments() < 4);
                drop(listener.accept(SOON).unwrap());
                connecting.join().unwrap();
            });
        }
    }
    assert_eq!((descriptors(), segments()), (before, 0));
}
