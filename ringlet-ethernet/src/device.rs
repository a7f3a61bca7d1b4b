//! A TAP device that is a port: what the kernel sends goes to the network, and the other way. Its carrier says whether anybody else is there.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender};

use anyhow::{Context, Result, anyhow, bail, ensure};
use ringlet_linux::fd;
use rustix::io::Errno;
use tun_rs::{DeviceBuilder, Layer, SyncDevice};

use crate::counters::{Dropped, Totals};
use crate::frame::{HEADER_BYTES, MESSAGE_MOST, MTU_LEAST, MTU_MOST, Mac};
use crate::port::{self, Arrived, Event, Filled, Kind, Options, Port, Queue};
use crate::room::Room;
use crate::wire::About;

/// Frames of one way before the other has its turn.
const TURN: usize = 64;
/// Frames of one batch for which those who sleep are woken once.
const FRAMES_PER_BELL: usize = 8;
/// Of batches of one frame it is looked so often whether more lies behind it.
const BATCHES_PER_LOOK: u32 = 16;
/// Passes in which nobody has said whether the device has something, before it is asked.
const PASSES_PER_READ: u32 = 3;
const NAME_MOST: usize = 15;

#[derive(Clone, Debug)]
pub struct Settings {
    pub device: String,
    /// Without them a new device has the longest and a random one; one that is there keeps its own.
    pub mtu: Option<u16>,
    pub mac: Option<Mac>,
    pub queues: u16,
    /// It stays when its port ends, without a carrier, for the next one that takes it over.
    pub persists: bool,
    /// How long to watch, at most, before a sleep.
    pub watch_us: u64,
}

/// Why a device ends.
#[derive(Debug)]
pub enum End {
    Asked,
    Failed(String),
}

/// Makes the device, or takes over one that persists and that nobody has; joins the network, and passes frames until somebody says `End`. `tell` hears
/// what an operator may want to know.
pub fn up(
    settings: &Settings,
    room: Room,
    ends: (Sender<End>, Receiver<End>),
    ready: impl FnOnce(Mac),
    tell: impl Fn(String) + Send + 'static,
) -> Result<Totals> {
    run(settings, room, ends, Kind::Plain, |mac, _| ready(mac), |_| (), tell)
}

/// The same of a port of any kind. `counted` hears how many other ports there are whenever that changes.
pub(crate) fn run(
    settings: &Settings,
    room: Room,
    ends: (Sender<End>, Receiver<End>),
    kind: Kind,
    ready: impl FnOnce(Mac, &Port),
    counted: impl Fn(usize) + Send + 'static,
    tell: impl Fn(String) + Send + 'static,
) -> Result<Totals> {
    let mtu = mtu_of(settings)?;
    ensure!(
        !settings.persists || settings.queues == 1,
        "a device that persists has one queue: of one that has several the kernel does not tell whether somebody has it"
    );
    let (taps, mac, is_taken) = make(settings, mtu)?;
    let first = Arc::clone(&taps[0]);
    let options = Options { queues: settings.queues, ..Options::new(&settings.device, mac) };
    let (ending, end) = ends;
    let asked = ending.clone();
    let (port, queues) = Port::join(room, options, kind, move |event| match event {
        Event::Ports(count) => {
            let _ = set_carrier(first.as_fd(), count > 0);
            counted(count);
        }
        Event::Apart(why) => tell(why),
        Event::End => _ = asked.send(End::Asked),
    })?;
    // (Who has no port leaves no device behind, and one that was there as it was.)
    if is_taken {
        change(settings, &taps[0])?;
    }
    let stays = settings.persists.then(|| Arc::clone(&taps[0]));
    // (Only the queues keep the device.)
    let tap = Arc::downgrade(&taps[0]);
    port.is_presented_by(move |about| {
        if let Some(tap) = tap.upgrade() {
            look(tap.as_fd(), about);
        }
    });
    let threads = queues.into_iter().zip(taps).map(|(queue, tap)| {
        let (watch_us, ending) = (settings.watch_us, ending.clone());
        let name = format!("queue {}", queue.number());
        std::thread::Builder::new().name(name).spawn(move || {
            if let Err(error) = serve(queue, &tap, watch_us) {
                let _ = ending.send(End::Failed(format!("{error:#}")));
            }
        })
    });
    let threads = threads.collect::<Result<Vec<_>, _>>()?;
    if let Some(tap) = stays {
        ask(&tap, SET_PERSISTENT, &mut 1).context("the device can't be made to stay")?;
    }
    ready(mac, &port);
    let why = end.recv().unwrap_or(End::Asked);
    port.end();
    // (With the last queue the device goes; then the port's socket, and who waits for its end hears of it.)
    for thread in threads {
        let _ = thread.join();
    }
    match why {
        End::Asked => Ok(port.totals()),
        End::Failed(why) => bail!("{why}"),
    }
}

pub(crate) fn mtu_of(settings: &Settings) -> Result<u16> {
    let mtu = settings.mtu.unwrap_or(MTU_MOST);
    ensure!(
        (MTU_LEAST..=MTU_MOST).contains(&mtu),
        "an MTU is between {MTU_LEAST} and {MTU_MOST}: not {mtu}"
    );
    Ok(mtu)
}

pub(crate) fn check_name(name: &str) -> Result<()> {
    let sane = name.bytes().all(|byte| byte.is_ascii_graphic() && !b"/:%".contains(&byte));
    ensure!(
        (1..=NAME_MOST).contains(&name.len()) && sane && !name.starts_with('.'),
        "a device's name is of up to {NAME_MOST} characters, without blanks, /, : and %: not {name:?}"
    );
    Ok(())
}

/// The device's queues, and the address that it is to have; was it there before?
fn make(settings: &Settings, mtu: u16) -> Result<(Vec<Arc<OwnedFd>>, Mac, bool)> {
    let name = &settings.device;
    check_name(name)?;
    if exists(name) {
        let taken = take_over(settings).with_context(|| {
            format!(
                "there is a device {name} here already: take another name, or end it (`ringlet eth down {name}`, `ip link del {name}`); a TAP device of one queue that persists, and that nobody has, is taken over"
            )
        })?;
        let (taps, mac) = finish(settings, vec![taken])?;
        return Ok((taps, settings.mac.unwrap_or(mac), true));
    }
    let mac = settings.mac.map_or_else(Mac::random, Ok)?;
    // (A device of several queues takes more of them: without this, another process's that is made at this instant.)
    let claim = (settings.queues > 1).then(|| claim(name)).transpose();
    let built = claim.and_then(|_claim| {
        DeviceBuilder::new()
            .name(name)
            .layer(Layer::L2)
            .offload(true)
            .multi_queue(settings.queues > 1)
            .mtu(mtu)
            .mac_addr(mac.0)
            .build_sync()
    });
    let device = built.map_err(|error| match error.raw_os_error() {
        Some(libc::ENOENT | libc::ENXIO | libc::ENODEV) => anyhow!(
            "there is no /dev/net/tun: `modprobe tun` loads it on the host, `--device /dev/net/tun` puts it into a container"
        ),
        Some(libc::EPERM | libc::EACCES) => anyhow!(
            "{name} can't be made without CAP_NET_ADMIN in this network namespace: run as root, or give it to the container (`--cap-add NET_ADMIN`)"
        ),
        Some(libc::EBUSY | libc::EINVAL | libc::EEXIST) => anyhow!("{name} can't be made ({error}): is there such a device?"),
        _ => anyhow!(error).context(format!("{name} can't be made")),
    })?;
    let mut devices = vec![device];
    for _ in 1..settings.queues {
        let more = devices[0].try_clone().with_context(|| format!("{name} has no more queues"))?;
        devices.push(more);
    }
    let (taps, mac) = finish(settings, devices.into_iter().map(own).collect())?;
    Ok((taps, mac, false))
}

fn finish(settings: &Settings, taps: Vec<OwnedFd>) -> Result<(Vec<Arc<OwnedFd>>, Mac)> {
    let first = &taps[0];
    set_carrier(first.as_fd(), false)
        .context("the carrier can't be set (Linux 5.0 or newer can)")?;
    let mut request = request(&settings.device);
    ask(first, libc::SIOCGIFHWADDR, &mut request).context("the device tells no address")?;
    // SAFETY: the call has filled it in.
    #[allow(unsafe_code)]
    let address = unsafe { request.ifr_ifru.ifru_hwaddr.sa_data };
    for tap in &taps {
        rustix::io::ioctl_fionbio(tap, true)?;
    }
    let mac = Mac(std::array::from_fn(|at| address[at] as u8));
    Ok((taps.into_iter().map(Arc::new).collect(), mac))
}

/// `_IOW('T', 203, int)`, `_IOW('T', 208, unsigned int)`, `_IOW('T', 216, int)`.
const SET_PERSISTENT: libc::Ioctl = 0x4004_54cb;
const SET_OFFLOAD: libc::Ioctl = 0x4004_54d0;
const SET_HEADER_BYTES: libc::Ioctl = 0x4004_54d8;
/// `_IOR('T', 210, unsigned int)`.
const GET_NAME: libc::Ioctl = 0x8004_54d2;
const IFF_PERSIST: libc::c_short = 0x0800;

/// As what `DeviceBuilder` makes is. KERNEL: who has it already has it alone (EBUSY); what is no TAP device, or has several queues, is EINVAL.
fn take_over(settings: &Settings) -> Result<OwnedFd> {
    ensure!(settings.queues == 1, "{} queues", settings.queues);
    let name = &settings.device;
    let tap = OwnedFd::from(std::fs::File::options().read(true).write(true).open("/dev/net/tun")?);
    let mut named = request(name);
    let kind = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
    named.ifr_ifru.ifru_flags = kind as libc::c_short;
    ask(&tap, libc::TUNSETIFF, &mut named)?;
    let mut found = request(name);
    ask(&tap, GET_NAME, &mut found)?;
    // SAFETY: the call has filled it in.
    #[allow(unsafe_code)]
    let flags = unsafe { found.ifr_ifru.ifru_flags };
    // KERNEL: where the name has become free meanwhile, the first call has made a device, which goes with this descriptor.
    ensure!(flags & IFF_PERSIST != 0, "it was removed meanwhile");
    // (Whoever had it before may have wanted another one.)
    ask(&tap, SET_HEADER_BYTES, &mut (HEADER_BYTES as libc::c_int))?;
    let offloads = libc::TUN_F_CSUM | libc::TUN_F_TSO4 | libc::TUN_F_TSO6;
    set(&tap, SET_OFFLOAD, offloads)?;
    // (Linux 6.2 or newer.)
    let _ = set(&tap, SET_OFFLOAD, offloads | libc::TUN_F_USO4 | libc::TUN_F_USO6);
    Ok(tap)
}

/// What is wanted of a device that was taken over.
fn change(settings: &Settings, tap: &OwnedFd) -> Result<()> {
    let name = &settings.device;
    if let Some(mac) = settings.mac {
        let mut named = request(name);
        named.ifr_ifru.ifru_hwaddr.sa_family = libc::ARPHRD_ETHER;
        let mut data = [0; 14];
        data.iter_mut().zip(mac.0).for_each(|(to, from)| *to = from as libc::c_char);
        named.ifr_ifru.ifru_hwaddr.sa_data = data;
        ask(tap, libc::SIOCSIFHWADDR, &mut named)
            .with_context(|| format!("the address of {name} can't be set"))?;
    }
    let socket = rustix::net::socket_with(
        rustix::net::AddressFamily::INET,
        rustix::net::SocketType::DGRAM,
        rustix::net::SocketFlags::CLOEXEC,
        None,
    )?;
    if let Some(mtu) = settings.mtu {
        let mut named = request(name);
        named.ifr_ifru.ifru_mtu = mtu.into();
        ask(&socket, libc::SIOCSIFMTU, &mut named)
            .with_context(|| format!("the MTU of {name} can't be set"))?;
    }
    let mut named = request(name);
    ask(&socket, libc::SIOCGIFFLAGS, &mut named)?;
    // SAFETY: the call has filled it in.
    #[allow(unsafe_code)]
    let flags = unsafe { named.ifr_ifru.ifru_flags };
    named.ifr_ifru.ifru_flags = flags | libc::IFF_UP as libc::c_short;
    ask(&socket, libc::SIOCSIFFLAGS, &mut named)
        .with_context(|| format!("{name} can't be set up"))?;
    Ok(())
}

/// Of a device of this name, which is short enough (`make`).
fn request(name: &str) -> libc::ifreq {
    // SAFETY: zeros are a request.
    #[allow(unsafe_code)]
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    let place = &mut request.ifr_name[..NAME_MOST];
    place.iter_mut().zip(name.bytes()).for_each(|(to, from)| *to = from as libc::c_char);
    request
}

/// One of the calls above, each of which reads and writes no more than what it is given here.
fn ask<T>(of: &OwnedFd, what: libc::Ioctl, with: &mut T) -> std::io::Result<()> {
    // SAFETY: a request, or a number, as the call takes it: callers.
    #[allow(unsafe_code)]
    let done = unsafe { libc::ioctl(of.as_raw_fd(), what, std::ptr::from_mut(with)) };
    if done < 0 { Err(std::io::Error::last_os_error()) } else { Ok(()) }
}

/// The same of those that take a number itself.
fn set(of: &OwnedFd, what: libc::Ioctl, number: libc::c_uint) -> std::io::Result<()> {
    // SAFETY: a number, which is no address to these: callers.
    #[allow(unsafe_code)]
    let done = unsafe { libc::ioctl(of.as_raw_fd(), what, libc::c_ulong::from(number)) };
    if done < 0 { Err(std::io::Error::last_os_error()) } else { Ok(()) }
}

/// A first queue of a device that nobody has yet, for as long as it takes to make the others.
fn claim(name: &str) -> std::io::Result<OwnedFd> {
    let tun = std::fs::File::options().read(true).write(true).open("/dev/net/tun")?;
    // KERNEL: IFF_TUN_EXCL: EBUSY where there is a device of this name. The others are those that `DeviceBuilder` has.
    let kind = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR | libc::IFF_MULTI_QUEUE;
    let (tun, mut named) = (OwnedFd::from(tun), request(name));
    named.ifr_ifru.ifru_flags = (kind | libc::IFF_TUN_EXCL) as libc::c_short;
    ask(&tun, libc::TUNSETIFF, &mut named).map(|()| tun)
}

fn exists(name: &str) -> bool {
    let Ok(name) = std::ffi::CString::new(name) else { return false };
    // SAFETY: a C string.
    #[allow(unsafe_code)]
    unsafe {
        libc::if_nametoindex(name.as_ptr()) != 0
    }
}

fn own(device: SyncDevice) -> OwnedFd {
    // SAFETY: the device gives it away.
    #[allow(unsafe_code)]
    unsafe {
        OwnedFd::from_raw_fd(device.into_raw_fd())
    }
}

fn set_carrier(tap: BorrowedFd, on: bool) -> Result<()> {
    /// TUNSETCARRIER: `_IOW('T', 226, int)`.
    const SET_CARRIER: libc::Ioctl = 0x4004_54e2;
    let on = libc::c_int::from(on);
    // SAFETY: it reads an int.
    #[allow(unsafe_code)]
    let done = unsafe { libc::ioctl(tap.as_raw_fd(), SET_CARRIER, &raw const on) };
    ensure!(done == 0, std::io::Error::last_os_error());
    Ok(())
}

/// What the device is now, which may have been renamed, moved to another network namespace, or given another address. What can't be known stays.
fn look(tap: BorrowedFd, about: &mut About) {
    /// TUNGETDEVNETNS: `_IO('T', 227)`, with CAP_NET_ADMIN there.
    const GET_NAMESPACE: libc::Ioctl = 0x54e3;
    // SAFETY: zeros are a request, which the first and the last call write; the second returns a descriptor, which nobody else has. The name ends with a zero.
    #[allow(unsafe_code)]
    unsafe {
        let mut request: libc::ifreq = std::mem::zeroed();
        if libc::ioctl(tap.as_raw_fd(), GET_NAME, &raw mut request) < 0 {
            return;
        }
        let name = std::ffi::CStr::from_ptr(request.ifr_name.as_ptr());
        about.name = name.to_string_lossy().into_owned();
        let namespace = libc::ioctl(tap.as_raw_fd(), GET_NAMESPACE);
        if namespace < 0 {
            return;
        }
        let namespace = OwnedFd::from_raw_fd(namespace);
        about.namespace =
            rustix::fs::fstat(namespace).map_or(about.namespace, |found| found.st_ino);
        // KERNEL: this one looks for the name where the device was made (tun_chr_ioctl): there it may be another's by now.
        if port::namespace().is_ok_and(|ours| ours == about.namespace)
            && libc::ioctl(tap.as_raw_fd(), libc::SIOCGIFHWADDR, &raw mut request) == 0
        {
            let address = request.ifr_ifru.ifru_hwaddr.sa_data;
            about.mac = Mac(std::array::from_fn(|at| address[at] as u8));
        }
    }
}

/// One queue's frames, both ways, until the port is over.
fn serve(mut queue: Queue, tap: &OwnedFd, watch_us: u64) -> Result<()> {
    queue.watch_level(tap)?;
    let (mut intake, mut heeds) = (Intake::new(tap), true);
    while !queue.is_over() {
        queue.begin();
        let sent = intake.is_due(queue.heard_outside()) && intake.take(&mut queue)?;
        let received = queue.receive(TURN, |arrived| to_kernel(tap, arrived));
        if sent || received {
            continue;
        }
        // (What can be read, and has no room where it is to go, would end each sleep.)
        if heeds == intake.is_full {
            heeds = !intake.is_full;
            queue.heed(tap, heeds)?;
        }
        queue.wait(watch_us, || fd::pending(tap.as_raw_fd(), libc::POLLIN) != 0)?;
    }
    Ok(())
}

/// What a queue reads from its device. A read that finds nothing costs as much as one that does; so there is none where the kernel has said, by what woke
/// us, that there is nothing, and none behind the one frame of a batch where batches are of one.
struct Intake<'a> {
    tap: &'a OwnedFd,
    buffer: Vec<u8>,
    /// So many bytes of it are a frame that waits for room.
    held: usize,
    /// There was no room.
    is_full: bool,
    /// Passes since it was known whether there is something.
    unknown: u32,
    /// Batches lately had several frames, and are read to their end.
    is_deep: bool,
    batches: u32,
}

impl<'a> Intake<'a> {
    fn new(tap: &'a OwnedFd) -> Intake<'a> {
        let buffer = vec![0; MESSAGE_MOST];
        Intake { tap, buffer, held: 0, is_full: false, unknown: 0, is_deep: true, batches: 0 }
    }

    /// Is the device to be read? `heard`: what the kernel has said meanwhile, if it was asked. (Who is kept busy by others looks now and then.)
    fn is_due(&mut self, heard: Option<bool>) -> bool {
        self.unknown = if heard == Some(false) { 0 } else { self.unknown + 1 };
        heard == Some(true) || self.is_full || self.unknown >= PASSES_PER_READ
    }

    /// Sends what the kernel has. False: it has nothing more, as far as is known, or there is no room for it.
    fn take(&mut self, queue: &mut Queue) -> Result<bool> {
        self.unknown = 0;
        self.batches = self.batches.wrapping_add(1);
        let reads_on = self.is_deep || self.batches.is_multiple_of(BATCHES_PER_LOOK);
        let most = if reads_on { TURN } else { 1 };
        queue.gather(reads_on);
        let (mut count, mut unrung, mut last) = (0, 0, Filled::Nothing);
        let mut failed = None;
        while count < most {
            last = self.take_one(queue, &mut failed);
            if last != Filled::Sent {
                break;
            }
            count += 1;
            unrung += 1;
            if unrung == FRAMES_PER_BELL {
                queue.flush();
                unrung = 0;
            }
        }
        queue.gather(false);
        self.is_full = last == Filled::Full;
        if reads_on {
            self.is_deep = count > 1 || self.is_full;
        }
        match failed {
            Some(error) => bail!("the device was removed, or can't be read: {error}"),
            None => Ok(last == Filled::Sent),
        }
    }

    fn take_one(&mut self, queue: &mut Queue, failed: &mut Option<Errno>) -> Filled {
        let tap = self.tap;
        let mut ended = |error| {
            // (The kernel lets nobody read from a device that was removed.)
            if error != Errno::AGAIN && error != Errno::INTR {
                *failed = Some(error);
            }
            0
        };
        let mut filled = match self.held {
            0 => queue.fill(|to, most| {
                // SAFETY: so many writable bytes of a mapping; another port may write there too, which is its own loss.
                #[allow(unsafe_code)]
                let got = unsafe { libc::read(tap.as_raw_fd(), to.cast(), most) };
                if got < 0 { ended(Errno::from_raw_os_error(errno())) } else { got as usize }
            }),
            _ => Filled::NotAlone,
        };
        if filled == Filled::NotAlone {
            if self.held == 0 {
                self.held = rustix::io::read(tap, &mut *self.buffer).unwrap_or_else(&mut ended);
            }
            filled = match self.held {
                0 => Filled::Nothing,
                len if queue.offer(&self.buffer[..len]) => Filled::Sent,
                _ => Filled::Full,
            };
            if filled == Filled::Sent {
                self.held = 0;
            }
        }
        // (Where there is no room nothing is read, by which it would be noticed.)
        if filled == Filled::Full && fd::pending(tap.as_raw_fd(), 0) & libc::POLLERR != 0 {
            ended(Errno::BADFD);
        }
        filled
    }
}

fn errno() -> i32 {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(0)
}

fn to_kernel(tap: &OwnedFd, arrived: &Arrived) -> Result<(), Dropped> {
    let pieces = arrived.pieces();
    // SAFETY: the pieces are the head's copy and a strand's memory, both valid for their lengths until this returns.
    #[allow(unsafe_code)]
    let written = unsafe { libc::writev(tap.as_raw_fd(), pieces.as_ptr(), 2) };
    if written >= 0 {
        return Ok(());
    }
    Err(match errno() {
        libc::EIO => Dropped::DeviceDown,
        libc::EINVAL => Dropped::Malformed,
        _ => Dropped::Kernel,
    })
}
