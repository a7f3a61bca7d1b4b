//! A bridge of the kernel's for devices of one host: frames between them do not leave the kernel. With a port of the network, which is its uplink, it is a
//! process, whose network namespace has all of it: with the process it goes, however that ends, and each device with it.
//!
//! Who wants a device (`attached`) connects, and has it as long as the connection.

use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use ringlet_linux::apart;
use ringlet_linux::meet::{self, Received};
use ringlet_linux::sys;
use ringlet_messages::guarded::Guarded;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};

use crate::counters::{Dropped, Totals};
use crate::device::{self, End, Settings, check_name};
use crate::frame::{MTU_LEAST, MTU_MOST, Mac};
use crate::keeper::may_end;
use crate::links::Identity;
use crate::port::{Holder, Kind, new_bell, ring};
use crate::room::{BRIDGE, PATIENCE, PORTS_MOST, Room, Seat, is_trusted};
use crate::wire::{self, About, Answer, Ask, Hello, State, VERSION, hear, say};

mod kernel;

use kernel::{Drops, Kernel, UPLINK};

/// Who has connected and not yet said what for; one more, and the oldest goes.
const COMERS_MOST: usize = 64;
/// Of users who are neither root nor our own, all together, so many devices.
const STRANGERS_MOST: usize = PORTS_MOST / 2;
/// Whether our socket is still where others find it is looked at so often; missing so often, one after the other, it is gone.
const LOOK_AGAIN: Duration = Duration::from_secs(1);
const LOOKS_MOST: u32 = 3;
/// Other ports hear so often which addresses are here (less than the time in which they forget them), and when one has come, at most so often.
const ANNOUNCE: Duration = Duration::from_secs(60);
const ANNOUNCE_LEAST: Duration = Duration::from_secs(1);
/// What the rules have counted holds for so many times what it took to ask for it, which is long where there are many devices.
const COUNTS_HOLD: u32 = 5;

/// A device on the bridge.
struct Device {
    /// Never used twice; in the order in which they came. Of a bridge that was begun anew they are others: who has asked the one of before for a number
    /// does not end another device by it.
    number: u64,
    /// Its end here.
    end: Identity,
    about: About,
    user: u32,
    socket: Guarded,
    has_carrier: bool,
}

struct Bridge {
    room: Room,
    kernel: Kernel,
    uplink: u32,
    holder: Holder,
    devices: Vec<Device>,
    next: u64,
    /// By which addresses are announced; when that is due, and when it was.
    raw: OwnedFd,
    announce: Instant,
    announced: Instant,
    /// What was counted, and until when that holds.
    drops: (Option<Instant>, HashMap<u64, Drops>),
    /// Who asked us to end, and waits for it.
    ending: Vec<Guarded>,
    asked: Sender<End>,
}

/// Has this network a bridge, of somebody who is trusted with it? (A name of it may be a port's.)
pub fn is_there(room: &Room) -> Result<bool> {
    let until = Instant::now() + PATIENCE;
    if room.bridge(until)?.is_none() {
        return Ok(false);
    }
    let (_, answer) =
        room.ask_until(BRIDGE, Ask::Next(u64::MAX), until).context("the network's bridge")?;
    Ok(answer == Answer::Done)
}

/// Has a bridge until somebody says `End`. It makes this thread's network namespace another one. `tell` hears what an operator may want to know.
pub fn serve(
    room: Room,
    watch_us: u64,
    ends: (Sender<End>, Receiver<End>),
    ready: impl FnOnce(),
    tell: impl Fn(String) + Send + 'static,
) -> Result<()> {
    room.evict();
    ensure!(room.bury(BRIDGE), "network {:?} has a bridge already, of another process", room.name);
    let seat = Seat::take(&room, BRIDGE)?;
    meet::admit_descriptors(seat.socket.as_raw_fd(), true);
    let kernel = Kernel::enter(room.rules.storm)?;
    let mut first = [0; 8];
    ensure!(sys::random(&mut first[..5]), "the kernel has no random bytes yet");
    let first = 1 + u64::from_le_bytes(first);
    let raw = socket_with(AddressFamily::PACKET, SocketType::RAW, SocketFlags::CLOEXEC, None)
        .context("addresses can't be announced without CAP_NET_RAW: run as root")?;
    kernel.admit_ours(&raw)?;
    let bell = Arc::new(new_bell()?);
    let asked = ends.0.clone();
    let (says, is_up) = channel();
    let (theirs, counted) = (room.clone(), Arc::clone(&bell));
    let over = (Arc::clone(&bell), Arc::new(AtomicBool::new(false)));
    let is_over = Arc::clone(&over.1);
    let uplink = thread::Builder::new().name("uplink".into()).spawn(move || {
        let device = UPLINK.into();
        let settings =
            Settings { device, mtu: None, mac: None, queues: 1, persists: false, watch_us };
        let up = |_, port: &crate::Port| _ = says.send(port.holder());
        let ended =
            device::run(&settings, theirs, ends, Kind::Bridge, up, move |_| ring(&counted), tell);
        over.1.store(true, Ordering::Relaxed);
        ring(&over.0);
        ended.map(drop)
    })?;
    let join = |uplink: thread::JoinHandle<Result<()>>| {
        uplink.join().unwrap_or_else(|_| bail!("a thread has panicked"))
    };
    let Ok(holder) = is_up.recv() else {
        return join(uplink);
    };
    let now = Instant::now();
    let index = kernel.uplink();
    let bridge = index.map(|index| Bridge {
        uplink: index,
        room,
        kernel,
        holder,
        devices: Vec::new(),
        next: first,
        raw,
        announce: now,
        announced: now,
        drops: Default::default(),
        ending: Vec::new(),
        asked: asked.clone(),
    });
    let ended = bridge.and_then(|mut bridge| {
        ready();
        let kept = bridge.keep(seat, &bell, || is_over.load(Ordering::Relaxed));
        bridge.end();
        // (Behind its end, of which they hear by that.)
        bridge.ending.clear();
        kept
    });
    let _ = asked.send(End::Asked);
    join(uplink).and(ended)
}

impl Bridge {
    fn keep(&mut self, mut seat: Seat, bell: &OwnedFd, is_over: impl Fn() -> bool) -> Result<()> {
        let watched = self.kernel.watch()?;
        let mut comers: VecDeque<Guarded> = VecDeque::new();
        let (mut looked, mut missing) = (Instant::now(), 0);
        while !is_over() {
            if looked.elapsed() >= LOOK_AGAIN {
                looked = Instant::now();
                missing += 1;
                match self.find_seat(&mut seat) {
                    Ok(()) => missing = 0,
                    Err(why) if missing == LOOKS_MOST => {
                        return Err(
                            why.context(format!("network {:?} was removed", self.room.name))
                        );
                    }
                    Err(_) => {}
                }
            }
            self.announce();
            let own: [&dyn AsFd; 3] = [&*seat.socket, bell, &watched];
            let mut fds: Vec<PollFd> =
                own.iter().map(|fd| PollFd::from_borrowed_fd(fd.as_fd(), PollFlags::IN)).collect();
            let devices = self.devices.iter().map(|device| &device.socket);
            let sockets = comers.iter().chain(devices);
            fds.extend(sockets.map(|socket| PollFd::new(&**socket, PollFlags::IN)));
            let _ = poll(&mut fds, LOOK_AGAIN.try_into().ok().as_ref());
            let [has_come, rang, changed] = [0, 1, 2].map(|at| !fds[at].revents().is_empty());
            let said: Vec<bool> =
                fds[3 + comers.len()..].iter().map(|fd| !fd.revents().is_empty()).collect();
            if rang {
                let _ = rustix::io::read(bell, &mut [0; 8]);
                self.announce_soon();
            }
            if changed {
                self.look(&watched);
            }
            // (Who has a device has nothing to say: whatever it is, that is the end.)
            let gone = |device: &Device| !matches!(hear::<Hello>(&device.socket), Ok(None));
            let said = self.devices.iter().zip(said).filter(|(device, said)| *said && gone(device));
            let numbers: Vec<u64> = said.map(|(device, _)| device.number).collect();
            numbers.into_iter().for_each(|number| _ = self.remove(number));
            let came: Vec<Guarded> =
                std::iter::from_fn(|| seat.accept()).take(COMERS_MOST / 2).collect();
            if has_come && came.is_empty() {
                // (No number is free, it may be: who waits there goes on waiting.)
                thread::sleep(LOOK_AGAIN / 20);
            }
            for comer in came {
                comers.truncate(COMERS_MOST - 1);
                comers.push_front(comer);
            }
            for _ in 0..comers.len() {
                let Some(comer) = comers.pop_back() else { break };
                match hear::<Hello>(&comer) {
                    Ok(None) => comers.push_front(comer),
                    Err(_) => {}
                    Ok(Some((hello, came))) => self.answer(comer, hello, came),
                }
            }
            self.set_carriers();
        }
        Ok(())
    }

    /// A network that was made again has this bridge again, as it has its ports.
    fn find_seat(&self, seat: &mut Seat) -> Result<()> {
        if !seat.is_here() {
            seat.take_again(&self.room, BRIDGE)?;
            meet::admit_descriptors(seat.socket.as_raw_fd(), true);
        }
        Ok(())
    }

    fn answer(&mut self, socket: Guarded, hello: Hello, came: Received) {
        let (user, pid) = meet::credentials(socket.as_raw_fd())
            .map_or((apart::SOMEBODY, 0), |who| (who.uid, who.pid as u32));
        let refused = |why: String| Answer::Refused(why);
        let answer = match hello.ask {
            _ if hello.version != VERSION => refused(format!(
                "it speaks version {VERSION:#x}, and not {:#x}: both need the same ringlet",
                hello.version
            )),
            Ask::Attach(device) => match self.attach(&device, (user, pid), came, &socket) {
                Ok((end, about)) => return self.put(end, about, user, socket),
                Err(error) => refused(format!("{error:#}")),
            },
            Ask::Next(before) => self.next_state(before).map_or(Answer::Done, Answer::State),
            Ask::Detach(number) => {
                let found = self.devices.iter().find(|device| device.number == number);
                match found.map(|device| device.user == user && !meet::is_vague(user)) {
                    None => refused("there is no such device".into()),
                    Some(false) if !may_end(user) => {
                        refused("only its user, the bridge's, or root, ends a device".into())
                    }
                    Some(_) => {
                        if let Some(device) = self.remove(number) {
                            let _ = say(&device.socket, &Answer::Ending, &[]);
                        }
                        Answer::Done
                    }
                }
            }
            // (It is decided here, where devices come: none comes behind it.)
            Ask::End if may_end(user) => {
                match self.room.check_unused(Some(self.holder.id()), self.devices.len()) {
                    Ok(()) => {
                        let _ = say(&socket, &Answer::Ending, &[]);
                        self.ending.push(socket);
                        let _ = self.asked.send(End::Asked);
                        return;
                    }
                    Err(error) => refused(format!("{error:#}")),
                }
            }
            Ask::End => refused("only its user, or root, ends a bridge".into()),
            _ => refused("it is a bridge, and no port".into()),
        };
        let _ = say(&socket, &answer, &[]);
    }

    /// Makes a device for who has come. Nothing is there of one that is refused.
    fn attach(
        &mut self,
        device: &wire::Device,
        (user, pid): (u32, u32),
        mut came: Received,
        socket: &Guarded,
    ) -> Result<(Identity, About)> {
        ensure!(self.ending.is_empty(), "the bridge is about to end");
        check_name(&device.name)?;
        ensure!(device.mac.is_station(), "{} is no device's address", device.mac);
        ensure!((MTU_LEAST..=MTU_MOST).contains(&device.mtu), "an MTU of {}", device.mtu);
        let strangers = self.devices.iter().filter(|device| !is_trusted(device.user)).count();
        ensure!(
            self.devices.len() < PORTS_MOST && (is_trusted(user) || strangers < STRANGERS_MOST),
            "the bridge has {} devices, and takes no more",
            self.devices.len()
        );
        let theirs = came.fds.take(0).context("no socket came")?;
        // SAFETY: taken just now, ours alone.
        #[allow(unsafe_code)]
        let theirs = kernel::admit(unsafe { OwnedFd::from_raw_fd(theirs) }, socket)?;
        let (theirs, namespace) = theirs;
        let number = self.next;
        self.next += 1;
        let known = Some(user).filter(|user| !meet::is_vague(*user));
        ensure!(
            self.holder.hold(number, known, device.mac),
            "{} is another port's address on this network",
            device.mac
        );
        let made = self.kernel.make(&theirs, device, number).and_then(|index| {
            self.kernel.join(index, device.mac, number).inspect_err(|_| {
                self.kernel.remove(index);
                self.kernel.forget(index, device.mac, number);
            })
        });
        let end = made.inspect_err(|_| self.holder.let_go(number))?;
        let about = About {
            id: number,
            name: device.name.clone(),
            mac: device.mac,
            queues: 1,
            pid,
            namespace,
            far: false,
            bridge: false,
        };
        Ok((end, about))
    }

    fn put(&mut self, end: Identity, about: About, user: u32, socket: Guarded) {
        let number = about.id;
        let has_carrier = false;
        let is_told = say(&socket, &Answer::Done, &[]).is_ok();
        self.devices.push(Device { number, end, about, user, socket, has_carrier });
        if !is_told {
            let _ = self.remove(number);
        }
        self.announce_soon();
    }

    fn remove(&mut self, number: u64) -> Option<Device> {
        let at = self.devices.iter().position(|device| device.number == number)?;
        let device = self.devices.remove(at);
        // (What has its number by now has no business here either.)
        self.kernel.remove(device.end.index);
        self.kernel.forget(device.end.index, device.about.mac, number);
        self.holder.let_go(number);
        Some(device)
    }

    /// Devices that their owners have deleted are no more.
    fn look(&mut self, watched: &netlink_sys::Socket) {
        // (What has changed is asked, since some of it may not have been told; and who is told to be gone is, whatever has its number.)
        let told = kernel::gone(watched);
        let is_gone = |device: &&Device| {
            told.contains(&device.end.index) || !self.kernel.is_there(&device.end)
        };
        let gone: Vec<u64> =
            self.devices.iter().filter(is_gone).map(|device| device.number).collect();
        for number in gone {
            if let Some(device) = self.remove(number) {
                let why = format!("the device {} was removed", device.about.name);
                let _ = say(&device.socket, &Answer::Refused(why), &[]);
            }
        }
    }

    /// A device has a carrier while another one, or another port, is there.
    fn set_carriers(&mut self) {
        let on = self.devices.len() + self.holder.others() > 1;
        for device in self.devices.iter_mut().filter(|device| device.has_carrier != on) {
            // (One that has just been deleted is looked for soon.)
            device.has_carrier = on;
            let _ = self.kernel.set_carrier(device.end.index, on);
        }
    }

    fn announce_soon(&mut self) {
        self.announce = self.announce.min(self.announced + ANNOUNCE_LEAST);
    }

    /// Other ports hear of each address that is here, before they forget it and somebody else may have it.
    fn announce(&mut self) {
        let now = Instant::now();
        if now < self.announce {
            return;
        }
        (self.announced, self.announce) = (now, now + ANNOUNCE);
        self.devices.iter().for_each(|device| self.say_where(device.about.mac));
    }

    /// As QEMU says that a guest has moved: by a request of RARP for one's own address.
    fn say_where(&self, mac: Mac) {
        let mut frame = [0; 60];
        frame[..6].fill(0xff);
        frame[6..12].copy_from_slice(&mac.0);
        frame[12..22].copy_from_slice(&[0x80, 0x35, 0, 1, 8, 0, 6, 4, 0, 3]);
        frame[22..28].copy_from_slice(&mac.0);
        frame[32..38].copy_from_slice(&mac.0);
        kernel::send(&self.raw, self.uplink, &frame);
    }

    /// Of the device whose number is the next one. (One of which the kernel knows nothing hides no others. It is looked for soon.)
    fn next_state(&mut self, before: u64) -> Option<State> {
        let first = self.devices.partition_point(|device| device.number <= before);
        (first..self.devices.len()).find_map(|at| self.state(at).ok())
    }

    fn state(&mut self, at: usize) -> Result<State> {
        let now = Instant::now();
        if self.drops.0.is_none_or(|until| now >= until) {
            // (Rules that can't be asked for hide no device: what was counted before stands.)
            let counted = kernel::drops().unwrap_or_else(|_| std::mem::take(&mut self.drops.1));
            self.drops = (Some(Instant::now() + now.elapsed() * COUNTS_HOLD), counted);
        }
        let device = &self.devices[at];
        let drops = self.drops.1.get(&device.number).copied().unwrap_or_default();
        let stats = self.kernel.stats(device.number)?;
        let mut totals = Totals::of([].iter());
        totals.sent = stats.rx_packets.saturating_sub(drops.source + drops.storm);
        totals.sent_bytes = stats.rx_bytes.saturating_sub(drops.bytes);
        totals.received = stats.tx_packets;
        totals.received_bytes = stats.tx_bytes;
        let dropped = [
            (Dropped::Source, drops.source),
            (Dropped::Storm, drops.storm),
            // (What is longer than the device's MTU, for one.)
            (Dropped::Kernel, stats.tx_dropped),
        ];
        for (why, count) in dropped {
            let says = Dropped::ALL.iter().find(|(of, _)| *of == why);
            says.into_iter().for_each(|(_, says)| _ = totals.dropped.insert((*says).into(), count));
        }
        let others = self.devices.len() - 1 + self.holder.others();
        let (about, peers) = (device.about.clone(), Vec::new());
        Ok(State { about, peers, totals, bridged: Some(others) })
    }

    /// No device is there behind it.
    fn end(&mut self) {
        self.devices.iter().for_each(|device| self.kernel.remove(device.end.index));
        self.devices.clear();
        self.kernel.end();
    }
}
