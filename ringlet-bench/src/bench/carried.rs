//! Two programs that share no memory, in a network namespace each with veth between: by the kernel, carried by a node service that keeps them apart, and
//! as on two hosts, with a node service each and rails in memory. All of it goes with this process, however that ends: namespaces as their descriptors are
//! closed, services by the kernel's word that their parent has died. Of one that is killed empty control groups stay, which the next one removes, and its
//! temporary folder.

use std::fs::{self, File};
use std::io::{Write, pipe};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nix::sched::{CloneFlags, setns, unshare};
use nix::unistd::geteuid;
use serde_json::Value;

use super::ethernet::tool;
use super::many;
use super::orders::obey_orders;
use super::place::Group;
use super::spec::{Among, Apart, Family, Figure, Order, Pause, Role, Said, Spec, Work};
use super::talk::{pause, say};
use super::trips::{Blocking, settle, stream};
use super::wire::{Listener, Wire, dial_for_messages};

const CONNECTIONS: [usize; 2] = [1, 8];
const STREAM_BYTES: usize = 64 << 10;
const DEVICE: &str = "eth0";
const PORT: u16 = 7471;
const HOSTS: [&str; 2] = ["a", "b"];
/// Between two looks whether something is ready; only a fault meets the other one.
const LOOK: Duration = Duration::from_millis(10);
const PATIENCE: Duration = Duration::from_secs(30);
/// For what ends by itself.
const END: Duration = Duration::from_secs(2);

fn address(number: usize) -> String {
    format!("10.7.0.{}", number + 1)
}

/// What a measurement takes place on: of the client, and of the server.
pub struct Ground {
    namespaces: [File; 2],
    groups: [Group; 2],
    /// None for the kernel; the same one twice, or one each.
    services: Vec<Service>,
    // (Removed behind the services' end.)
    _folder: tempfile::TempDir,
}

impl Ground {
    pub fn new(by: Apart) -> Result<Ground> {
        ensure!(geteuid().is_root(), "only root makes network namespaces and runs a node service");
        let namespaces = [namespace()?, namespace()?];
        connect(&namespaces)?;
        let groups = [Group::new(HOSTS[0])?, Group::new(HOSTS[1])?];
        let folder = tempfile::tempdir()?;
        let mut ground = Ground { namespaces, groups, services: Vec::new(), _folder: folder };
        let place = ground._folder.path().to_owned();
        match by {
            Apart::Veth => {}
            Apart::Tenants => ground.isolate(&place)?,
            Apart::Hosts => ground.two_hosts(&place)?,
        }
        Ok(ground)
    }

    /// Begins something in the namespace of that end.
    pub fn within<T>(&self, end: usize, begin: impl FnOnce() -> T) -> Result<T> {
        let ours = File::open("/proc/thread-self/ns/net")?;
        let enter = |to| setns(to, CloneFlags::CLONE_NEWNET).context("setns");
        enter(&self.namespaces[end])?;
        let begun = begin();
        enter(&ours)?;
        Ok(begun)
    }

    /// What an end is told beside its work.
    pub fn work(&self, work: &Work, end: usize) -> Work {
        let Work::Carried { by, .. } = work else { return work.clone() };
        let services = self.services.iter().map(|service| service.child.id()).collect();
        // (A service watches what is below one.)
        let group = if *by == Apart::Hosts { end } else { 0 };
        Work::Carried { by: *by, group: self.groups[group].path().to_owned(), services }
    }

    pub fn socket(&self, end: usize) -> Option<&Path> {
        let service = self.services.get(end).or(self.services.first());
        service.map(|service| service.socket.as_path())
    }

    fn isolate(&mut self, place: &Path) -> Result<()> {
        let policy = "same_pod = false\notherwise = \"isolated\"\n";
        let below = self.groups[0].path().to_owned();
        let service = self.within(0, || Service::start(place, policy, &below))??;
        self.services.push(service);
        Ok(())
    }

    fn two_hosts(&mut self, place: &Path) -> Result<()> {
        // (Rails in memory are files of memory.)
        let identities = HOSTS.map(|name| place.join(format!("identity-{name}")));
        let enrol = |directory: &Path, words: &[&str], told: &[u8]| -> Result<Vec<u8>> {
            let mut command = Command::new(std::env::current_exe()?);
            command.args(["node", "enrol", "--directory"]).arg(directory).args(words);
            let (reader, mut writer) = pipe()?;
            writer.write_all(told)?;
            drop(writer);
            let done = command.stdin(reader).output()?;
            let said = String::from_utf8_lossy(&done.stderr);
            ensure!(done.status.success(), "ringlet node enrol: {}", said.trim());
            Ok(done.stdout)
        };
        enrol(&identities[0], &["--new", HOSTS[0]], b"")?;
        let issued = enrol(&identities[0], &["--issue", HOSTS[1]], b"")?;
        enrol(&identities[1], &["--join", "-"], &issued)?;
        let rails = ["1", "2"].map(|rail| place.join("rails").join(rail));
        for rail in &rails {
            fs::create_dir_all(rail)?;
        }
        let rails = rails.map(|rail| format!("{{provider = \"memory\", folder = {rail:?}}}"));
        let nodes = [0, 1].map(|host| {
            let at = format!("{}:{PORT}", address(host));
            format!("{{name = \"{}\", address = \"{at}\", subnets = []}}", HOSTS[host])
        });
        let groups = [0, 1].map(|host| self.groups[host].name());
        for (host, identity) in identities.iter().enumerate() {
            let (name, other) = (HOSTS[host], 1 - host);
            let policy = format!(
                "[cluster]\nnode = \"{name}\"\nlisten = \"{}:{PORT}\"\ndirectory = {identity:?}\nnodes = [{}]\nrails = [{}]\n\
                 [[allow]]\nbetween = [{:?}, {:?}]\n",
                address(host),
                nodes.join(", "),
                rails.join(", "),
                groups[host],
                format!("{}:{}", HOSTS[other], groups[other]),
            );
            let below = self.groups[host].path().to_owned();
            let directory = place.join(name);
            fs::create_dir(&directory)?;
            let begin = || Service::start(&directory, &policy, &below);
            let service = self.within(host, begin)??;
            self.services.push(service);
        }
        for service in &self.services {
            service.wait_until("rails that carry", |told| told["fabric"]["nodes"] == 1)?;
        }
        Ok(())
    }
}

/// One in which nothing is but `lo`, which is up.
fn namespace() -> Result<File> {
    let made = thread::spawn(|| -> Result<File> {
        unshare(CloneFlags::CLONE_NEWNET).context("a network namespace can't be made")?;
        tool("ip", &["link", "set", "lo", "up"])?;
        Ok(File::open("/proc/thread-self/ns/net")?)
    });
    made.join().expect("it does not panic")
}

/// By veth, with an address each.
fn connect(namespaces: &[File; 2]) -> Result<()> {
    let of =
        |end: usize| format!("/proc/{}/fd/{}", std::process::id(), namespaces[end].as_raw_fd());
    thread::scope(|scope| {
        let made = scope.spawn(|| -> Result<()> {
            for end in [0, 1] {
                setns(&namespaces[end], CloneFlags::CLONE_NEWNET)?;
                if end == 0 {
                    let peer = ["type", "veth", "peer", "name", DEVICE, "netns", &of(1)];
                    tool("ip", &[&["link", "add", DEVICE][..], &peer].concat())?;
                }
                let with = format!("{}/24", address(end));
                tool("ip", &["address", "add", &with, "dev", DEVICE])?;
                tool("ip", &["link", "set", DEVICE, "up"])?;
            }
            Ok(())
        });
        made.join().expect("it does not panic")
    })
}

/// A node service; killed when it is dropped, and what it has started ends with it.
struct Service {
    child: Child,
    socket: PathBuf,
    said: PathBuf,
}

impl Service {
    fn start(place: &Path, policy: &str, below: &Path) -> Result<Service> {
        let (file, run, said) = (place.join("node.toml"), place.join("run"), place.join("said"));
        fs::write(&file, policy)?;
        let mut words = ["node", "run", "--quiet"].map(String::from).to_vec();
        let mut option = |name: &str, path: &Path| -> Result<()> {
            let path = path.to_str().context("a directory whose name is no text")?;
            words.extend([name.to_owned(), path.to_owned()]);
            Ok(())
        };
        option("--directory", &run)?;
        option("--labels", &place.join("labels"))?;
        option("--policy", &file)?;
        option("--cgroup", below)?;
        let spec = Spec {
            role: Role::Becomes { words },
            family: Family::Tcp,
            work: Work::Carried { by: Apart::Veth, group: PathBuf::new(), services: Vec::new() },
            budget_ms: 0,
            parent: std::process::id(),
            wrapped: false,
            ring_expected: false,
        };
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["bench", "--child"]).arg(serde_json::to_string(&spec)?).env("LD_PRELOAD", "");
        command.env_remove("NOTIFY_SOCKET").stdin(Stdio::null());
        let out = File::create(&said)?;
        let child = command.stdout(out.try_clone()?).stderr(out).spawn()?;
        let service = Service { child, socket: run.join("node.sock"), said };
        service.wait_until("the node service to be ready", |_| true)?;
        Ok(service)
    }

    fn wait_until(&self, what: &str, is: impl Fn(&Value) -> bool) -> Result<()> {
        let until = Instant::now() + PATIENCE;
        while !ringlet_node::status(&self.socket).is_ok_and(|told| is(&told)) {
            let ended = !is_alive(self.child.id());
            if ended || Instant::now() > until {
                let said = fs::read_to_string(&self.said).unwrap_or_default();
                let how = if ended { "has ended" } else { "does not come to that" };
                bail!("waiting for {what}: the node service {how}: {}", said.trim());
            }
            thread::sleep(LOOK);
        }
        Ok(())
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let started = with_descendants(self.child.id());
        // (Both fail only for one that has been waited for.)
        let _ = self.child.kill();
        let _ = self.child.wait();
        // What it has started ends by itself, and is not to be at work beside the next one.
        let until = Instant::now() + END;
        while started.iter().any(|&pid| is_alive(pid)) && Instant::now() < until {
            thread::sleep(LOOK);
        }
    }
}

/// (One that nobody has waited for has ended.)
fn is_alive(pid: u32) -> bool {
    let told = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    told.rsplit_once(") ").is_some_and(|(_, state)| !state.starts_with(['Z', 'X']))
}

fn with_descendants(pid: u32) -> Vec<u32> {
    let mut found = vec![pid];
    let mut next = 0;
    while let Some(&pid) = found.get(next) {
        next += 1;
        for thread in fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten() {
            let told = fs::read_to_string(thread.path().join("children")).unwrap_or_default();
            found.extend(told.split_whitespace().filter_map(|word| word.parse::<u32>().ok()));
        }
    }
    found
}

/// An end is in its control group before it makes a socket.
fn enter(spec: &Spec) -> Result<&[u32]> {
    let Work::Carried { group, services, .. } = &spec.work else {
        bail!("this is not of what is carried")
    };
    let into = group.join("cgroup.procs");
    fs::write(&into, "0").with_context(|| format!("{}", into.display()))?;
    Ok(services)
}

pub fn serve(spec: &Spec) -> Result<()> {
    enter(spec)?;
    let (listener, address) = Listener::bind_at(&address(1)).context("cannot listen")?;
    say(&Said::Listening { address })?;
    let stream = listener.accept_for_messages(false)?;
    thread::spawn(move || obey_orders(stream));
    many::serve_on(&listener, spec, Among::Epoll, CONNECTIONS.iter().sum())
}

pub fn measure(spec: &Spec, address: &str) -> Result<Vec<Figure>> {
    let services = enter(spec)?;
    let budget = Duration::from_millis(spec.budget_ms);
    let one_way = dial_for_messages(Family::Tcp, address, false)?;
    let wires = CONNECTIONS.iter().sum::<usize>();
    let wires =
        (0..wires).map(|_| many::connect(Family::Tcp, address)).collect::<Result<Vec<Wire>>>()?;
    let mut one_way = Blocking::new(one_way);
    settle(&mut one_way, spec.ring_expected)?;
    many::have_lived(&wires, spec.ring_expected).context("warming up")?;
    pause(Pause::Ready)?;
    // (What carries is started when something is to be carried.)
    let services: Vec<u32> = services.iter().flat_map(|&pid| with_descendants(pid)).collect();
    let mut figures = Vec::new();
    let mut wires = &wires[..];
    for number in CONNECTIONS {
        let these;
        (these, wires) = wires.split_at(number);
        figures.extend(many::many(these, Order::Bursts, Family::Tcp, budget, Some(&services))?);
    }
    let mut streamed = stream(one_way.wire, STREAM_BYTES, budget)?;
    streamed.what = "64 KiB writes, one way".into();
    figures.push(streamed);
    Ok(figures)
}

#[cfg(test)]
mod tests {
    use super::super::machine::processor_time_of;
    use super::*;

    #[test]
    fn processes_and_those_that_they_have_started_have_taken_time() {
        let ours = std::process::id();
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        assert!(with_descendants(ours).contains(&child.id()) && is_alive(child.id()));
        assert!(processor_time_of(&[ours]) > 0);
        child.kill().unwrap();
        let until = Instant::now() + PATIENCE;
        while is_alive(child.id()) && Instant::now() < until {
            thread::sleep(LOOK);
        }
        assert!(!is_alive(child.id()));
        child.wait().unwrap();
        assert_eq!(processor_time_of(&[child.id()]), 0);
    }
}
