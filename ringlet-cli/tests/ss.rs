//! `ringlet ss` on a page that this very process shows, with real connections behind its slots: what a ringlet process
//! writes, without ringlet. A page may also be a lie; then it is ignored.

mod support;

use std::fs::File;
use std::io::Write;
use std::mem::offset_of;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::{Mutex, MutexGuard, OnceLock};

use ringlet::reasons::Reason;
use ringlet_core::view::{
    PATH_KERNEL, PATH_RING, PROCESS_FILE_BYTES, PROCESS_MAGIC, PROCESS_MEMFD_NAME, ProcessHeader,
    SocketSlot,
};
use rustix::mm::{MapFlags, ProtFlags};
use serde_json::Value;
use support::{json, ringlet, text};

struct Page(File);

/// The page of this process, empty; a test has it for itself.
fn page() -> MutexGuard<'static, Page> {
    static PAGE: OnceLock<Mutex<Page>> = OnceLock::new();
    let page = PAGE.get_or_init(|| {
        let flags = rustix::fs::MemfdFlags::CLOEXEC;
        let file = File::from(rustix::fs::memfd_create(PROCESS_MEMFD_NAME, flags).unwrap());
        file.set_len(PROCESS_FILE_BYTES as u64).unwrap();
        let (hint, protection) = (std::ptr::null_mut(), ProtFlags::READ);
        // SAFETY: a fresh mapping at an address of the kernel's choice, which nobody ever looks into.
        unsafe { rustix::mm::mmap(hint, 4096, protection, MapFlags::SHARED, &file, 0) }.unwrap();
        Mutex::new(Page(file))
    });
    let page = page.lock().unwrap_or_else(|poison| poison.into_inner());
    page.write(offset_of!(ProcessHeader, magic), &PROCESS_MAGIC.to_ne_bytes());
    page.write(offset_of!(ProcessHeader, pid), &std::process::id().to_ne_bytes());
    page.set_slots_used(0);
    page.write(offset_of!(ProcessHeader, refused), &0u64.to_ne_bytes());
    page.set_watched(0, 0, 0);
    page
}

struct Slot {
    path: u32,
    reason: u32,
    fd: i32,
    tx_bytes: u64,
    rx_bytes: u64,
}

impl Page {
    fn write(&self, offset: usize, bytes: &[u8]) {
        self.0.write_all_at(bytes, offset as u64).unwrap();
    }

    fn set_slots_used(&self, count: u32) {
        self.write(offset_of!(ProcessHeader, slots_used), &count.to_ne_bytes());
    }

    fn set_watched(&self, ns: u64, watched: u64, in_vain: u64) {
        self.write(offset_of!(ProcessHeader, watched_ns), &ns.to_ne_bytes());
        self.write(offset_of!(ProcessHeader, watched), &watched.to_ne_bytes());
        self.write(offset_of!(ProcessHeader, watched_in_vain), &in_vain.to_ne_bytes());
    }

    fn show(&self, slots: &[Slot]) {
        for (index, slot) in slots.iter().enumerate() {
            let start = size_of::<ProcessHeader>() + index * size_of::<SocketSlot>();
            let write = |offset: usize, bytes: &[u8]| self.write(start + offset, bytes);
            write(offset_of!(SocketSlot, path), &slot.path.to_ne_bytes());
            write(offset_of!(SocketSlot, reason), &slot.reason.to_ne_bytes());
            write(offset_of!(SocketSlot, fd), &slot.fd.to_ne_bytes());
            write(offset_of!(SocketSlot, wakes), &11u32.to_ne_bytes());
            write(offset_of!(SocketSlot, bells), &12u32.to_ne_bytes());
            write(offset_of!(SocketSlot, tx_bytes), &slot.tx_bytes.to_ne_bytes());
            write(offset_of!(SocketSlot, rx_bytes), &slot.rx_bytes.to_ne_bytes());
            write(offset_of!(SocketSlot, calls), &13u64.to_ne_bytes());
        }
        self.set_slots_used(slots.len() as u32);
    }
}

fn on_ring(stream: &TcpStream, tx_bytes: u64, rx_bytes: u64) -> Slot {
    Slot { path: PATH_RING, reason: 0, fd: stream.as_raw_fd(), tx_bytes, rx_bytes }
}

fn on_kernel(stream: &TcpStream, reason: u32) -> Slot {
    Slot { path: PATH_KERNEL, reason, fd: stream.as_raw_fd(), tx_bytes: 0, rx_bytes: 0 }
}

/// A connection through an IPv4 socket at the near end, and at the far end an IPv6 socket that speaks IPv4.
fn connection() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST.to_ipv6_mapped(), 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    let near = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap();
    (near, listener.accept().unwrap().0)
}

fn port(stream: &TcpStream) -> u16 {
    stream.local_addr().unwrap().port()
}

fn own_pid() -> String {
    std::process::id().to_string()
}

/// What `ringlet ss` says of this process.
fn connections(filters: &[&str]) -> Vec<Value> {
    let report = json(&mut ringlet(&[&["ss", "--json", "--pid", &own_pid()], filters].concat()));
    report["connections"].as_array().unwrap().clone()
}

#[test]
fn queues_of_a_moved_connection_are_those_of_its_rings() {
    let page = page();
    let (near, far) = connection();
    page.show(&[on_ring(&near, 1000, 300), on_ring(&far, 500, 900)]);
    let shown = connections(&[]);
    assert_eq!(shown.len(), 2);
    let first = &shown[0];
    assert_eq!(first["state"], "ESTAB");
    assert_eq!((&first["path"], &first["reason"]), (&"ring".into(), &Value::Null));
    assert_eq!(first["local"]["address"], "127.0.0.1");
    assert_eq!(first["local"]["port"], port(&near));
    assert_eq!(first["peer"]["port"], port(&far));
    assert_eq!(shown[1]["local"]["address"], "::ffff:127.0.0.1");
    assert_eq!(first["pid"], std::process::id());
    assert_eq!(first["fd"], near.as_raw_fd());
    assert_eq!((&first["ring_out_bytes"], &first["ring_in_bytes"]), (&1000.into(), &300.into()));
    assert_eq!(
        (&first["wakes"], &first["bells"], &first["calls"]),
        (&11.into(), &12.into(), &13.into())
    );
    // What one end has sent and the other not received.
    let queues =
        |each: &Value| (each["receive_queue_bytes"].clone(), each["send_queue_bytes"].clone());
    assert_eq!(queues(first), (200.into(), 100.into()));
    assert_eq!(queues(&shown[1]), (100.into(), 200.into()));

    // The other end unseen: the fill is unknown, and not guessed.
    page.show(&[on_ring(&near, 1000, 300)]);
    assert_eq!(queues(&connections(&[])[0]), (Value::Null, Value::Null));
}

#[test]
fn a_connection_on_the_kernel_has_the_kernels_queues_and_a_reason() {
    let page = page();
    let (mut near, far) = connection();
    let (other, _other_far) = connection();
    near.write_all(b"12345").unwrap();
    // Until the bytes have arrived.
    far.peek(&mut [0]).unwrap();
    page.show(&[
        on_kernel(&near, 0),
        on_kernel(&far, Reason::NoPeer as u32),
        on_kernel(&other, 4242),
    ]);
    let shown = connections(&[]);
    assert_eq!(shown[0]["reason"], Value::Null);
    assert_eq!(shown[1]["reason"], "no-peer");
    assert_eq!(shown[1]["explanation"], Reason::NoPeer.sentence());
    assert_eq!(shown[1]["receive_queue_bytes"], 5);
    assert_eq!(shown[2]["reason"], "#4242");
}

#[test]
fn filters_choose() {
    let page = page();
    let (near, far) = connection();
    let (other, _other_far) = connection();
    page.show(&[
        on_ring(&near, 0, 0),
        on_ring(&far, 0, 0),
        on_kernel(&other, Reason::Urgent as u32),
    ]);
    let count = |filters: &[&str]| connections(filters).len();
    assert_eq!(count(&[]), 3);
    assert_eq!(count(&["--path", "ring"]), 2);
    assert_eq!(count(&["--path", "kernel"]), 1);
    assert_eq!(count(&["--port", &port(&near).to_string()]), 2);
    assert_eq!(count(&["--port", &port(&other).to_string()]), 1);
    assert_eq!(count(&["--reason", "urgent"]), 1);
    assert_eq!(count(&["--reason", "young"]), 0);
    let name = std::fs::read_to_string("/proc/self/comm").unwrap();
    assert_eq!(count(&[&name.trim()[1..]]), 3);
    assert_eq!(count(&[&format!("{}*", &name[..1])]), 3);
    assert_eq!(count(&[&name[..1].repeat(40)]), 0);
    assert_eq!(ringlet(&["ss", "--reason", "nonsense"]).output().unwrap().status.code(), Some(2));
}

#[test]
fn listeners_are_shown_on_request() {
    let page = page();
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let slot = Slot {
        path: PATH_KERNEL,
        reason: Reason::NotConnected as u32,
        fd: listener.as_raw_fd(),
        tx_bytes: 0,
        rx_bytes: 0,
    };
    page.show(&[slot]);
    assert_eq!(connections(&[]).len(), 0);
    // It is the kernel's in any case, and needs no reason.
    let shown = &connections(&["--all"])[0];
    assert_eq!((&shown["state"], &shown["reason"]), (&"LISTEN".into(), &Value::Null));
}

#[test]
fn the_table_is_aligned_and_explains() {
    let page = page();
    let (near, far) = connection();
    page.show(&[on_ring(&near, 7, 0), on_kernel(&far, Reason::Stdio as u32)]);
    page.write(offset_of!(ProcessHeader, refused), &3u64.to_ne_bytes());
    let output = ringlet(&["ss", "--explain", "--pid", &own_pid()]).output().unwrap();
    let (out, _) = text(&output);
    let lines: Vec<&str> = out.lines().collect();
    assert_eq!(lines.len(), 4, "{out}");
    let at =
        |word: &str, line: usize| lines[line].find(word).unwrap_or_else(|| panic!("{word}: {out}"));
    assert_eq!(at("Path", 0), at("ring", 1));
    assert_eq!(at("Path", 0), at("kernel", 2));
    assert_eq!(at("Reason", 0), at("stdio", 2));
    assert!(lines[2].ends_with(Reason::Stdio.sentence()), "{out}");
    assert!(lines[3].contains("left 3 sockets to the kernel"), "{out}");
}

#[test]
fn how_long_memory_was_watched_is_said() {
    let page = page();
    let said = || text(&ringlet(&["ss", "--pid", &own_pid()]).output().unwrap()).0;
    assert!(!said().contains("watched memory"), "{}", said());
    page.set_watched(1_200_000_000, 40_312, 122);
    let line = " has watched memory for 1.20 s: 40,312 waits ended by it, 122 in vain.\n";
    assert!(said().ends_with(line), "{}", said());
    let report = json(&mut ringlet(&["ss", "--json", "--pid", &own_pid()]));
    let process = &report["processes"][0];
    assert_eq!(process["watched_ns"], 1_200_000_000);
    assert_eq!((&process["watched"], &process["watched_in_vain"]), (&40_312.into(), &122.into()));
    // A page that lies.
    page.set_watched(u64::MAX, u64::MAX, u64::MAX);
    assert!(said().contains(" in vain."), "{}", said());
}

#[test]
fn nothing_to_show_is_said() {
    // A process that certainly shows no page: the one that asks.
    let output = ringlet(&["ss", "--pid", "4194305"]).output().unwrap();
    assert!(output.status.success());
    assert!(text(&output).0.starts_with("No ringlet program is running"), "{output:?}");
    let page = page();
    page.show(&[]);
    let output = ringlet(&["ss", "--pid", &own_pid()]).output().unwrap();
    assert!(text(&output).0.starts_with("No"), "{output:?}");
}

#[test]
fn a_page_that_lies_does_no_harm() {
    let page = page();
    let (near, _far) = connection();
    let processes = || {
        let report = json(&mut ringlet(&["ss", "--json", "--pid", &own_pid()]));
        report["processes"].as_array().unwrap().len()
    };
    // Slots without end, descriptors that are none or no sockets, paths that don't exist.
    let slot = |path, fd| Slot { path, reason: u32::MAX, fd, tx_bytes: u64::MAX, rx_bytes: 0 };
    page.show(&[
        slot(PATH_RING, -1),
        slot(PATH_RING, i32::MAX),
        slot(PATH_RING, page.0.as_raw_fd()),
        slot(77, near.as_raw_fd()),
        slot(PATH_RING, near.as_raw_fd()),
    ]);
    page.set_slots_used(u32::MAX);
    assert_eq!(connections(&[]).len(), 1);
    assert_eq!(processes(), 1);
    // The page of a parent that a child still has, and something else under our name.
    page.write(offset_of!(ProcessHeader, pid), &1u32.to_ne_bytes());
    assert_eq!(processes(), 0);
    page.write(offset_of!(ProcessHeader, pid), &std::process::id().to_ne_bytes());
    page.write(offset_of!(ProcessHeader, magic), b"nonsense");
    assert_eq!(processes(), 0);
}
