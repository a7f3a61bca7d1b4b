//! A back end whose process has no descriptor left when a front end connects goes on, and serves it once there is one. (A process of its own, since
//! the limit is a process's.)

mod guest;

use std::fs::File;
use std::os::unix::net::UnixStream;
use std::sync::Mutex;
use std::sync::mpsc::channel;
use std::thread;
use std::time::Instant;

use guest::*;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use ringlet_ethernet::device::End;
use ringlet_ethernet::room::{Room, Rules};
use ringlet_ethernet::{Mac, Options, Policy, Port, vhost};

/// So few descriptors that all are soon used.
const DESCRIPTORS: u64 = 64;

#[test]
fn a_guest_is_served_once_there_are_descriptors_again() {
    let folder = tempfile::tempdir().unwrap();
    let rules = Rules { addresses: Policy::Moving, storm: 0, bridge: false };
    Room::create(folder.path(), "net", rules, None).unwrap();
    let room = Room::open(folder.path(), "net").unwrap();
    let own = Options::new("test", Mac([2, 0, 0, 0, 0, 1]));
    let (port, _queues) = Port::open(room.clone(), own, |_| ()).unwrap();
    let path = folder.path().join("guest.sock");
    let mac = Some(Mac([2, 0, 0, 0, 0, 2]));
    let settings = vhost::Settings { socket: path.clone(), mac, watch_us: 0 };
    let (ends, (ready, is_ready), (tells, told)) = (channel(), channel(), channel());
    let ending = ends.0.clone();
    let back = thread::spawn(move || {
        let tells = Mutex::new(tells);
        let tell = move |what: String| _ = tells.lock().unwrap().send(what);
        vhost::serve(&settings, room, ends, move |_| ready.send(()).unwrap(), tell)
    });
    is_ready.recv_timeout(LIMIT).unwrap();

    let (_, most) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, DESCRIPTORS, most).unwrap();
    let mut used: Vec<File> =
        (0..DESCRIPTORS).map_while(|_| File::open("/dev/null").ok()).collect();
    assert!(used.pop().is_some());
    let front = UnixStream::connect(&path).unwrap();
    let said = told.recv_timeout(LIMIT).expect("it says that descriptors are lacking");
    assert!(said.contains("can't be served now"), "{said}");
    drop((front, used));
    setrlimit(Resource::RLIMIT_NOFILE, most, most).unwrap();

    let _guest = Guest::start(&path, VERSION_1 | EVENT_IDX, 8, 2048);
    let began = Instant::now();
    while port.others() != 1 {
        assert!(began.elapsed() < LIMIT, "no guest comes");
        thread::sleep(std::time::Duration::from_millis(1));
    }
    ending.send(End::Asked).unwrap();
    back.join().unwrap().unwrap();
}
