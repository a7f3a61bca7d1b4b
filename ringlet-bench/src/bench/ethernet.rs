//! TCP between two network namespaces: by the kernel's veth, by two ports of `ringlet eth`, by two devices on its bridge, by a port of each of two
//! networks between which frames go by UDP over veth, or by UDP over veth as ETHOS had it: a stream, and a round trip, of plain sockets. All in this
//! process, whose threads are in namespaces of their own: with it everything goes.

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::process::Command;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use nix::sched::{CloneFlags, unshare};
use nix::unistd::gettid;
use ringlet_ethernet::device::{self, End, Settings};
use ringlet_ethernet::far::{Address, Host};
use ringlet_ethernet::room::Rules;
use ringlet_ethernet::{Policy, Room, attached, bridge, span};
use rustix::net::sockopt;
use tun_rs::{DeviceBuilder, Layer};

use super::spec::{Figure, Link, Spec, Unit};
use super::stats::median;
use super::talk::BUFFER_BYTES;

pub const DEVICE: &str = "ringlet0";
pub const PORT: u16 = 7007;
/// For what is to be there at once; only a fault meets it.
pub const PATIENCE: Duration = Duration::from_secs(60);
const BATCH: usize = 16;

pub fn address(number: u8) -> Ipv4Addr {
    Ipv4Addr::new(10, 7, 0, number)
}

/// Of ETHOS's device: its longest frame is the longest datagram.
const ETHOS_MTU: u16 = 65_535 - 20 - 8 - 14;
const ETHOS_PORT: u16 = 7473;
/// For what comes while a thread does something else.
const SOCKET_BYTES: usize = 4 << 20;

/// Of what is below, where frames go by UDP.
const BELOW: &str = "veth0";

fn address_below(number: u8) -> Ipv4Addr {
    Ipv4Addr::new(10, 8, 0, number)
}

pub fn measure(spec: &Spec, by: Link) -> Result<Vec<Figure>> {
    let budget = Duration::from_millis(spec.budget_ms);
    // (As veth has it; segments are passed whole by both.)
    let listen = || Ok(TcpListener::bind((address(2), PORT))?);
    let ask = move || Ok(vec![round_trips(budget)?, stream(budget)?]);
    between(by, 1500, listen, |listener| answer(&listener), ask)
}

/// Runs the two ends in a namespace each, between which there is that link: one listens and then answers, the other one asks.
pub fn between<T: 'static>(
    by: Link,
    mtu: u16,
    listen: impl FnOnce() -> Result<T> + Send + 'static,
    answer: impl FnOnce(T) -> Result<()> + Send + 'static,
    ask: impl FnOnce() -> Result<Vec<Figure>> + Send + 'static,
) -> Result<Vec<Figure>> {
    let folder = tempfile::tempdir()?;
    let rules = Rules { addresses: Policy::Moving, storm: 0, bridge: false };
    let rooms = (1..=2).map(|number| {
        // (One that both are on, or one of each host's.)
        let is_udp = by == Link::Udp;
        let base = folder.path().join(if is_udp { number } else { 1 }.to_string());
        if is_udp || number == 1 {
            Room::create(&base, "bench", rules, None)?;
        }
        Room::open(&base, "bench")
    });
    let [room, theirs] =
        <[Room; 2]>::try_from(rooms.collect::<Result<Vec<_>>>()?).expect("two of them");
    if by == Link::Bridge {
        let room = room.clone();
        begin(move |ready| joint(room, ready))?;
    }
    let (far_thread, is_there) = mpsc::channel();
    let (made, is_made) = mpsc::channel();
    let (listens, is_listening) = mpsc::channel();
    // (Until the process ends.)
    thread::spawn(move || {
        let far = || -> Result<T> {
            enter()?;
            far_thread.send(gettid().as_raw())?;
            is_made.recv()?;
            attach(by, mtu, 2, theirs)?;
            listen()
        };
        match far() {
            Err(error) => _ = listens.send(Err(format!("{error:#}"))),
            Ok(listener) => {
                let _ = listens.send(Ok(()));
                let _ = answer(listener);
            }
        }
    });
    let near = thread::spawn(move || -> Result<Vec<Figure>> {
        enter()?;
        let far: i32 = is_there.recv_timeout(PATIENCE).context("the far end does not begin")?;
        let cable = match by {
            Link::Veth => Some(DEVICE),
            Link::Udp | Link::Ethos { .. } => Some(BELOW),
            Link::Ringlet { .. } | Link::Bridge => None,
        };
        if let Some(name) = cable {
            let far = far.to_string();
            ip(&["link", "add", name, "type", "veth", "peer", "name", name, "netns", &far])?;
        }
        made.send(())?;
        attach(by, mtu, 1, room)?;
        is_listening
            .recv_timeout(PATIENCE)
            .context("the far end does not listen")?
            .map_err(|error| anyhow!(error))?;
        ask()
    });
    near.join().map_err(|_| anyhow!("a thread has panicked"))?
}

fn enter() -> Result<()> {
    unshare(CloneFlags::CLONE_NEWNET).context("a network namespace can't be made: only root may")
}

fn ip(words: &[&str]) -> Result<()> {
    tool("ip", words)
}

/// One of iproute2's.
pub fn tool(name: &str, words: &[&str]) -> Result<()> {
    let done = Command::new(name)
        .args(words)
        .output()
        .with_context(|| format!("`{name}` can't be run (package iproute2)"))?;
    ensure!(
        done.status.success(),
        "{name} {}: {}",
        words.join(" "),
        String::from_utf8_lossy(&done.stderr).trim()
    );
    Ok(())
}

/// This thread's namespace has its end of the link, with an address.
fn attach(by: Link, mtu: u16, number: u8, room: Room) -> Result<()> {
    // (As a network between hosts is, or as one for large packets.)
    let below = match by {
        Link::Veth | Link::Ringlet { .. } | Link::Bridge => None,
        Link::Udp => Some(1500),
        Link::Ethos { packet } => Some(packet),
    };
    if let Some(packet) = below {
        ip(&["link", "set", BELOW, "mtu", &packet.to_string(), "up"])?;
        ip(&["address", "add", &format!("{}/24", address_below(number)), "dev", BELOW])?;
    }
    if by == Link::Udp {
        let (room, peer) = (room.clone(), address_below(3 - number));
        begin(move |ready| span(room, peer, ready))?;
    }
    let mtu = if matches!(by, Link::Ethos { .. }) { ETHOS_MTU } else { mtu };
    match by {
        Link::Veth => {}
        Link::Ethos { .. } => ethos(number)?,
        Link::Udp => begin(move |ready| port(1, mtu, room, ready))?,
        Link::Ringlet { queues } => begin(move |ready| port(queues, mtu, room, ready))?,
        Link::Bridge => begin(move |ready| on_bridge(mtu, &room, ready))?,
    }
    ip(&["link", "set", DEVICE, "mtu", &mtu.to_string(), "up"])?;
    ip(&["address", "add", &format!("{}/24", address(number)), "dev", DEVICE])
}

/// A driver as ETHOS was, whose device is a TAP device: what it sends is a datagram, and what comes is a frame. A thread each way, which waits in the
/// kernel both for frames and for room.
fn ethos(number: u8) -> Result<()> {
    let device = Arc::new(DeviceBuilder::new().name(DEVICE).layer(Layer::L2).build_sync()?);
    let socket = Arc::new(UdpSocket::bind((address_below(number), ETHOS_PORT))?);
    socket.connect((address_below(3 - number), ETHOS_PORT))?;
    sockopt::set_socket_recv_buffer_size_force(&socket, SOCKET_BYTES)?;
    sockopt::set_socket_send_buffer_size_force(&socket, SOCKET_BYTES)?;
    let (from, to) = (Arc::clone(&device), Arc::clone(&socket));
    thread::spawn(move || {
        let mut frame = vec![0; usize::from(u16::MAX)];
        while let Ok(len) = from.recv(&mut frame) {
            // (Whoever is not there yet gets nothing.)
            let _ = to.send(&frame[..len]);
        }
    });
    thread::spawn(move || {
        let mut frame = vec![0; usize::from(u16::MAX)];
        loop {
            match socket.recv(&mut frame) {
                // (A device that is not up takes nothing.)
                Ok(len) => _ = device.send(&frame[..len]),
                Err(error) if error.kind() == ErrorKind::ConnectionRefused => {}
                Err(_) => break,
            }
        }
    });
    Ok(())
}

/// Starts what says when it is ready, and goes on.
fn begin(run: impl FnOnce(&Sender<Result<(), String>>) + Send + 'static) -> Result<()> {
    let (ready, is_ready) = mpsc::channel();
    thread::spawn(move || run(&ready));
    is_ready
        .recv_timeout(PATIENCE)
        .context("the port is not ready")?
        .map_err(|error| anyhow!(error))
}

fn span(room: Room, peer: Ipv4Addr, ready: &Sender<Result<(), String>>) {
    let host = Host(vec![Address::Udp((peer, ringlet_ethernet::far::PORT).into())]);
    let settings = span::Settings { hosts: vec![host], listen: None, watch_us: 200 };
    let is_ready = ready.clone();
    let says = move || _ = is_ready.send(Ok(()));
    let ended = span::up(&settings, room, mpsc::channel(), says, |_| ());
    let _ = ready.send(ended.map_err(|error| format!("{error:#}")));
}

/// The bridge between the two.
fn joint(room: Room, ready: &Sender<Result<(), String>>) {
    let is_ready = ready.clone();
    let says = move || _ = is_ready.send(Ok(()));
    let ended = bridge::serve(room, 200, mpsc::channel(), says, |_| ());
    let _ = ready.send(ended.map_err(|error| format!("{error:#}")));
}

fn on_bridge(mtu: u16, room: &Room, ready: &Sender<Result<(), String>>) {
    let (device, mtu) = (DEVICE.into(), Some(mtu));
    let settings = Settings { device, mtu, mac: None, queues: 1, persists: false, watch_us: 200 };
    let is_ready = ready.clone();
    let ended = attached::up(&settings, room, mpsc::channel(), move |_| _ = is_ready.send(Ok(())));
    let _ = ready.send(ended.map_err(|error| format!("{error:#}")));
}

fn port(queues: u16, mtu: u16, room: Room, ready: &Sender<Result<(), String>>) {
    let ends: (Sender<End>, Receiver<End>) = mpsc::channel();
    let (device, mtu) = (DEVICE.into(), Some(mtu));
    let settings = Settings { device, mtu, mac: None, queues, persists: false, watch_us: 200 };
    let is_ready = ready.clone();
    let ended = device::up(&settings, room, ends, move |_| _ = is_ready.send(Ok(())), |_| ());
    let _ = ready.send(ended.map(drop).map_err(|error| format!("{error:#}")));
}

pub fn connect() -> Result<TcpStream> {
    let until = Instant::now() + PATIENCE;
    loop {
        match TcpStream::connect_timeout(&SocketAddr::from((address(2), PORT)), PATIENCE) {
            Ok(stream) => {
                stream.set_nodelay(true)?;
                return Ok(stream);
            }
            // (Until there is a carrier.)
            Err(error) if Instant::now() > until => {
                return Err(error).context("the far end can't be reached");
            }
            Err(_) => thread::sleep(Duration::from_millis(5)),
        }
    }
}

/// The far end: what comes on the first connection goes back; what comes on the second is counted.
fn answer(listener: &TcpListener) -> Result<()> {
    let (mut trips, _) = listener.accept()?;
    trips.set_nodelay(true)?;
    let mut byte = [0];
    while trips.read(&mut byte)? == 1 {
        trips.write_all(&byte)?;
    }
    let (mut stream, _) = listener.accept()?;
    let (mut bytes, mut count) = (vec![0; BUFFER_BYTES], 0u64);
    loop {
        match stream.read(&mut bytes) {
            Ok(0) => break,
            Ok(got) => count += got as u64,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(stream.write_all(&count.to_le_bytes())?)
}

fn round_trips(budget: Duration) -> Result<Figure> {
    let mut trips = connect()?;
    let mut byte = [7];
    let mut batch = || -> Result<f64> {
        let began = Instant::now();
        for _ in 0..BATCH {
            trips.write_all(&byte)?;
            trips.read_exact(&mut byte)?;
        }
        Ok(began.elapsed().as_nanos() as f64 / (2 * BATCH) as f64)
    };
    // (The first ones find the addresses, and what watching pays.)
    for _ in 0..8 {
        batch()?;
    }
    let began = Instant::now();
    let mut halves = vec![batch()?];
    while began.elapsed() < budget {
        halves.push(batch()?);
    }
    let value = median(halves).context("no round trips")?;
    Ok(Figure {
        what: "1 B, half a round trip".into(),
        value,
        unit: Unit::Nanoseconds,
        tails: None,
        path: "-".into(),
    })
}

fn stream(budget: Duration) -> Result<Figure> {
    let mut stream = connect()?;
    let bytes = vec![7; BUFFER_BYTES];
    let began = Instant::now();
    while began.elapsed() < budget {
        stream.write_all(&bytes)?;
    }
    stream.shutdown(std::net::Shutdown::Write)?;
    let mut count = [0; 8];
    stream.read_exact(&mut count)?;
    let value = u64::from_le_bytes(count) as f64 / began.elapsed().as_secs_f64();
    Ok(Figure {
        what: "64 KiB writes, one way".into(),
        value,
        unit: Unit::BytesPerSecond,
        tails: None,
        path: "-".into(),
    })
}
