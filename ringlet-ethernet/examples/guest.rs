//! A front end of vhost-user without QEMU, whose guest is a host by itself: it answers who asks for its address, and who pings it.
//!
//!     ringlet eth vhost --socket PATH --network NAME &
//!     cargo run -p ringlet-ethernet --example guest -- PATH 10.7.0.9 [plain]
//!
//! `plain`: its driver takes frames as they go over a wire only, in buffers of 2 KiB.

#[path = "../tests/guest/mod.rs"]
mod guest;

use std::net::Ipv4Addr;
use std::path::Path;

use guest::{EVENT_IDX, Guest, LIMIT, MERGES, OFFLOADS, SIZE, VERSION_1};

const MAC: [u8; 6] = [2, 0, 0, 0, 0, 0x99];
const PLAIN: [u8; 10] = [0; 10];

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (path, ip, features) = match &arguments[..] {
        [path, ip] => (path, ip, VERSION_1 | EVENT_IDX | MERGES | OFFLOADS),
        [path, ip, word] if word == "plain" => (path, ip, VERSION_1),
        _ => panic!("usage: guest PATH ADDRESS [plain]"),
    };
    let ip: Ipv4Addr = ip.parse().expect("an address of IPv4");
    let mut guest = Guest::start(Path::new(path), features, SIZE, 2048);
    println!("answering");
    loop {
        let Some((header, mut frame)) = guest.receive(LIMIT) else { continue };
        // (What came with a checksum to be written has none that counts; ours is written.)
        assert!(features & OFFLOADS != 0 || header[..10] == PLAIN, "not plain: {header:?}");
        if turn_round(&mut frame, ip) {
            guest.send(&PLAIN, &frame, 1024 + frame.len() / 32);
        }
    }
}

/// Turns a question of ARP or ICMP into its answer.
fn turn_round(frame: &mut [u8], ip: Ipv4Addr) -> bool {
    match frame.get(12..14) {
        Some([8, 6]) if frame.len() >= 42 && frame[21] == 1 && frame[38..42] == ip.octets() => {
            frame[21] = 2;
            frame.copy_within(22..32, 32);
            frame[22..28].copy_from_slice(&MAC);
            frame[28..32].copy_from_slice(&ip.octets());
        }
        Some([8, 0]) if frame.len() >= 42 && frame[23] == 1 && frame[30..34] == ip.octets() => {
            let (head, whole) =
                (usize::from(frame[14] & 15) * 4, u16::from_be_bytes([frame[16], frame[17]]));
            let message = 14 + head..14 + usize::from(whole);
            if head < 20
                || message.len() < 8
                || message.end > frame.len()
                || frame[message.start] != 8
            {
                return false;
            }
            frame.copy_within(26..30, 30);
            frame[26..30].copy_from_slice(&ip.octets());
            frame[message.start] = 0;
            frame[message.start + 2..message.start + 4].fill(0);
            let sum = checksum(&frame[message.clone()]);
            frame[message.start + 2..message.start + 4].copy_from_slice(&sum.to_be_bytes());
        }
        _ => return false,
    }
    frame.copy_within(6..12, 0);
    frame[6..12].copy_from_slice(&MAC);
    true
}

fn checksum(bytes: &[u8]) -> u16 {
    let word = |pair: &[u8]| u32::from(pair[0]) << 8 | u32::from(*pair.get(1).unwrap_or(&0));
    let mut sum: u32 = bytes.chunks(2).map(word).sum();
    while sum > 0xffff {
        sum = (sum >> 16) + (sum & 0xffff);
    }
    !(sum as u16)
}
