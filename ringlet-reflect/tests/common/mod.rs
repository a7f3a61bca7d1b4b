#![allow(dead_code)]
//! Clusters of keepers in one process, by sockets that may lose, and be cut.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ringlet_reflect::keeper::{Limits, Membership, Options, keep_in};
use ringlet_reflect::network::{Event, FRAME_BYTES, Life, Network, Parcel};
use ringlet_reflect::{Host, Status};

/// Only against hanging.
pub const PATIENCE: Duration = Duration::from_secs(60);
const SILENT: Duration = Duration::from_secs(2);
/// A keeper that has not run for so long is none that a busy machine has held up.
const HELD_UP: Duration = Duration::from_secs(10);
const BEAT: Duration = Duration::from_millis(30);

/// What the sockets do to frames, for all of them.
#[derive(Default)]
pub struct Faults {
    /// Of a thousand, how many are lost.
    pub lost: AtomicU32,
    /// From, to.
    pub cut: Mutex<BTreeSet<(usize, usize)>>,
    /// Contents of regions are lost, and nothing else.
    pub keeps_contents_back: AtomicBool,
    /// The same of what the cluster has.
    pub keeps_state_back: AtomicBool,
    /// What the order says is of another version.
    pub is_of_another_version: AtomicBool,
    rails: AtomicU32,
}

/// How a frame begins that has contents of a region, or what the cluster has (`keeper::transfer`).
const PIECE: [u8; 2] = [0xf5, 4];
const STATE: [u8; 2] = [0xf5, 2];
/// Sender, its run, the run that it is for.
const HEAD: usize = 17;

pub struct Sockets {
    us: usize,
    me: Life,
    names: Vec<String>,
    folder: PathBuf,
    socket: UnixDatagram,
    faults: Arc<Faults>,
    is_dead: Arc<AtomicBool>,
    known: BTreeMap<usize, (Life, Instant)>,
    told: Instant,
    random: u64,
    rails: u32,
}

impl Sockets {
    pub fn new(
        us: usize,
        names: &[String],
        incarnation: u64,
        folder: &Path,
        faults: &Arc<Faults>,
        is_dead: &Arc<AtomicBool>,
    ) -> Sockets {
        let path = folder.join(format!("{}.net", names[us]));
        let _ = std::fs::remove_file(&path);
        let socket = UnixDatagram::bind(path).unwrap();
        socket.set_nonblocking(true).unwrap();
        Sockets {
            us,
            me: Life { node: names[us].clone(), incarnation },
            names: names.to_vec(),
            folder: folder.to_owned(),
            socket,
            faults: faults.clone(),
            is_dead: is_dead.clone(),
            known: BTreeMap::new(),
            told: Instant::now() - PATIENCE,
            random: incarnation << 8 | us as u64 | 1 << 40,
            rails: 1,
        }
    }

    fn kept_path(&self) -> PathBuf {
        self.folder.join(format!("{}.kept", self.me.node))
    }

    fn send_to(&mut self, to: usize, incarnation: u64, frame: &[u8]) -> bool {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        let is_lost = self.random % 1000 < u64::from(self.faults.lost.load(Ordering::Relaxed));
        if is_lost || self.faults.cut.lock().unwrap().contains(&(self.us, to)) {
            return !frame.is_empty();
        }
        let mut bytes = Vec::with_capacity(HEAD + frame.len());
        bytes.push(self.us as u8);
        bytes.extend(self.me.incarnation.to_le_bytes());
        bytes.extend(incarnation.to_le_bytes());
        bytes.extend(frame);
        self.socket.send_to(&bytes, self.folder.join(format!("{}.net", self.names[to]))).is_ok()
    }
}

impl Network for Sockets {
    fn me(&self) -> &Life {
        &self.me
    }

    fn kept(&self) -> Option<Vec<u8>> {
        std::fs::read(self.kept_path()).ok()
    }

    fn keep(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        let path = self.kept_path();
        let next = path.with_extension("next");
        std::fs::File::create(&next)?.write_all(bytes)?;
        std::fs::rename(next, path)
    }

    fn send(&mut self, to: &Life, frame: &Parcel) -> bool {
        assert!(frame.len() <= FRAME_BYTES && !frame.is_empty());
        let mut frame = frame.to_vec();
        let Faults { keeps_contents_back, keeps_state_back, .. } = &*self.faults;
        for (kind, is_kept_back) in [(PIECE, keeps_contents_back), (STATE, keeps_state_back)] {
            if frame.starts_with(&kind) && is_kept_back.load(Ordering::Relaxed) {
                return true;
            }
        }
        if frame[0] != PIECE[0] && self.faults.is_of_another_version.load(Ordering::Relaxed) {
            frame[0] ^= 0x80;
        }
        let place = self.names.iter().position(|name| *name == to.node).unwrap();
        self.send_to(place, to.incarnation, &frame)
    }

    fn poll(&mut self, tell: &mut dyn FnMut(Event<'_>)) -> bool {
        if self.is_dead.load(Ordering::Relaxed) {
            // (As if it was killed: nothing more is said or done.)
            std::panic::resume_unwind(Box::new("killed"));
        }
        let mut any = false;
        let mut bytes = vec![0; HEAD + FRAME_BYTES];
        for _ in 0..64 {
            let Ok(length) = self.socket.recv(&mut bytes) else { break };
            let (from, word) = (bytes[0] as usize, |at: usize| {
                u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap())
            });
            let (life, to) =
                (Life { node: self.names[from].clone(), incarnation: word(1) }, word(9));
            if self.faults.cut.lock().unwrap().contains(&(from, self.us)) {
                continue;
            }
            any = true;
            let known = self.known.get(&from).map(|known| known.0.incarnation);
            if known.is_some_and(|known| known > life.incarnation) {
                continue;
            }
            let before = self.known.insert(from, (life.clone(), Instant::now()));
            match before {
                Some((before, _)) if before == life => {}
                before => {
                    if let Some((before, _)) = before {
                        tell(Event::Down(before));
                    }
                    tell(Event::Up(life.clone()));
                }
            }
            if length > HEAD && to == self.me.incarnation {
                tell(Event::Frame(&life, bytes[HEAD..length].to_vec().into()));
            }
        }
        let now = Instant::now();
        if now - self.told >= BEAT {
            self.told = now;
            let us = self.us;
            for to in (0..self.names.len()).filter(|to| *to != us) {
                self.send_to(to, 0, &[]);
            }
            let silent: Vec<usize> = self
                .known
                .iter()
                .filter(|(_, (_, seen))| now - *seen > SILENT)
                .map(|(from, _)| *from)
                .collect();
            for from in silent {
                let (life, _) = self.known.remove(&from).unwrap();
                tell(Event::Down(life));
                any = true;
            }
        }
        let rails = self.faults.rails.load(Ordering::Relaxed);
        if rails != 0 && rails != self.rails {
            self.rails = rails;
            tell(Event::Rails { active: rails, number: 2 });
        }
        any
    }

    fn descriptors(&self, tell: &mut dyn FnMut(BorrowedFd<'_>)) {
        tell(self.socket.as_fd());
    }

    fn may_sleep(&mut self) -> bool {
        true
    }
}

struct Running {
    thread: JoinHandle<std::io::Result<()>>,
    leaves: Arc<AtomicBool>,
    is_dead: Arc<AtomicBool>,
}

pub struct Cluster {
    folder: tempfile::TempDir,
    names: Vec<String>,
    pub faults: Arc<Faults>,
    running: Vec<Option<Running>>,
    incarnation: AtomicU64,
    limits: Limits,
    founders: usize,
    /// Of whom nothing is heard for so long is declared dead.
    silent: Duration,
    /// Whoever is declared dead by the others ends by himself, and is not missed.
    pub may_end: bool,
}

impl Cluster {
    /// So many hosts, all of which are there. None is declared dead for its silence, since on a busy machine any may be silent for a while.
    pub fn new(hosts: usize) -> Cluster {
        Cluster::begun(hosts, hosts, HELD_UP)
    }

    /// Of so many hosts the first ones, which are the founders.
    pub fn with_room(hosts: usize, founders: usize) -> Cluster {
        Cluster::begun(hosts, founders, HELD_UP)
    }

    /// One of them that is silent is declared dead before long; also where it is only held up, which who uses this has to bear.
    pub fn of_mortals(hosts: usize, founders: usize) -> Cluster {
        Cluster::begun(hosts, founders, SILENT)
    }

    fn begun(hosts: usize, founders: usize, silent: Duration) -> Cluster {
        let mut cluster = Cluster::empty(hosts, founders, silent);
        (0..founders).for_each(|host| cluster.start(host));
        (0..founders).for_each(|host| cluster.await_hosts(host, founders));
        cluster
    }

    fn empty(hosts: usize, founders: usize, silent: Duration) -> Cluster {
        Cluster {
            folder: tempfile::tempdir().unwrap(),
            names: (0..hosts).map(|host| format!("host-{host}")).collect(),
            faults: Arc::default(),
            running: (0..hosts).map(|_| None).collect(),
            incarnation: AtomicU64::new(1),
            limits: Limits { all: 64 << 20, received: 32 << 20 },
            founders,
            silent,
            may_end: false,
        }
    }

    pub fn path(&self, host: usize) -> PathBuf {
        self.folder.path().join(format!("{}.sock", self.names[host]))
    }

    pub fn name(&self, host: usize) -> &str {
        &self.names[host]
    }

    pub fn start(&mut self, host: usize) {
        let incarnation = self.incarnation.fetch_add(1, Ordering::Relaxed);
        let (leaves, is_dead) = (Arc::<AtomicBool>::default(), Arc::<AtomicBool>::default());
        let network = Sockets::new(
            host,
            &self.names,
            incarnation,
            self.folder.path(),
            &self.faults,
            &is_dead,
        );
        let (path, to_leave) = (self.path(host), leaves.clone());
        let founders = self.names[..self.founders].to_vec();
        let membership = Membership { founders, silent: self.silent, beat: BEAT };
        let (ready, is_ready) = std::sync::mpsc::channel();
        let limits = self.limits;
        let thread = std::thread::spawn(move || {
            let options = Options {
                path: Some(&path),
                listener: None,
                limits,
                stays: true,
                leaves: Some(&to_leave),
                membership,
            };
            keep_in(&options, Box::new(network), || ready.send(()).unwrap())
        });
        is_ready.recv_timeout(PATIENCE).unwrap();
        self.running[host] = Some(Running { thread, leaves, is_dead });
    }

    pub fn host(&self, host: usize) -> Host {
        Host::at(&self.path(host)).unwrap()
    }

    /// At once, as if it had no power.
    pub fn kill(&mut self, host: usize) {
        let running = self.running[host].take().unwrap();
        running.is_dead.store(true, Ordering::Relaxed);
        assert!(running.thread.join().is_err());
    }

    pub fn leave(&mut self, host: usize) {
        self.begin_to_leave(host);
        self.ended(host).unwrap();
    }

    pub fn begin_to_leave(&self, host: usize) {
        self.running[host].as_ref().unwrap().leaves.store(true, Ordering::Relaxed);
    }

    /// How it has ended by itself.
    pub fn ended(&mut self, host: usize) -> std::io::Result<()> {
        let running = self.running[host].take().unwrap();
        until("its end", || running.thread.is_finished());
        running.thread.join().unwrap()
    }

    /// Nothing passes between these and the others.
    pub fn cut_off(&self, hosts: &[usize]) {
        let mut cut = self.faults.cut.lock().unwrap();
        for from in 0..self.names.len() {
            for to in 0..self.names.len() {
                if hosts.contains(&from) != hosts.contains(&to) {
                    cut.insert((from, to));
                }
            }
        }
    }

    pub fn mend(&self) {
        self.faults.cut.lock().unwrap().clear();
    }

    pub fn rails(&self, active: u32) {
        self.faults.rails.store(active, Ordering::Relaxed);
    }

    pub fn await_hosts(&self, host: usize, count: usize) {
        until("the hosts", || {
            let found = Host::at(&self.path(host)).and_then(|host| host.cluster());
            found.is_ok_and(|cluster| cluster.hosts.len() == count && cluster.stopped.is_none())
        });
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        for running in self.running.iter_mut().filter_map(Option::take) {
            running.is_dead.store(true, Ordering::Relaxed);
            let ended = running.thread.join();
            let may = self.may_end && matches!(ended, Ok(Err(_)));
            assert!(std::thread::panicking() || may || ended.is_err(), "{ended:?}");
        }
    }
}

pub fn until(what: &str, mut is: impl FnMut() -> bool) {
    let began = Instant::now();
    while !is() {
        assert!(began.elapsed() < PATIENCE, "waited for {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Until it is not another host's trouble any more.
pub fn settle(host: &Host) {
    until("all to have it", || match host.check_errors(0, host.errors(0).unwrap()) {
        Ok(_) => true,
        Err(Status::ChannelError) => false,
        Err(status) => panic!("{status:?}"),
    });
}
