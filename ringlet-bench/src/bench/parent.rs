//! One measurement: fresh processes for server and client, what they say, and their end. Every wait here has a bound.

use std::env;
use std::fs;
use std::io::{BufRead, BufReader, Write, pipe};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use nix::time::{ClockId, clock_gettime};
use nix::unistd::Pid;
use ringlet::reasons::Reason;

use ringlet_programs::{preload, processes};

use super::carried::Ground;
use super::place::{Crowd, Place, Quota};
use super::spec::{Cost, Family, Figure, Pause, Role, Said, Spec, Unit, Work};

/// A measurement that takes longer than this beyond its own budget has hung.
const PATIENCE: Duration = Duration::from_secs(20);
/// What a client may take to exit once it has said everything.
const EXIT_PATIENCE: Duration = Duration::from_secs(5);

/// One way to do the work of a case: which sockets, and which ends are under ringlet.
#[derive(Clone, Debug)]
pub struct Contender {
    pub label: &'static str,
    pub family: Family,
    pub server_wrapped: bool,
    pub client_wrapped: bool,
    pub environment: &'static [(&'static str, &'static str)],
    pub work: Work,
}

impl Contender {
    /// A connection per request ends before a move could pay; and an end that isn't wrapped can't move.
    pub fn expects_ring(&self) -> bool {
        let lives = match self.work {
            Work::Connect | Work::Accept => false,
            Work::Cost { of } => matches!(of, Cost::ForkMoved | Cost::Move | Cost::CloseMoved),
            _ => true,
        };
        self.server_wrapped && self.client_wrapped && lives
    }

    fn needs_no_peer(&self) -> bool {
        use Work::{
            Cost, Ethernet, Ethom, HandOver, Hierarchy, Limits, Mirror, Native, Ports, Reflect, Ucx,
        };
        matches!(
            self.work,
            Limits { .. }
                | Ethernet { .. }
                | Ethom { .. }
                | Hierarchy { .. }
                | Mirror { .. }
                | Native { .. }
                | Ports { .. }
                | Reflect { .. }
                | Ucx
                | HandOver { .. }
                | Cost { .. }
        )
    }
}

/// What all contenders of a case share.
#[derive(Clone, Debug)]
pub struct Setting {
    pub budget: Duration,
    pub pin: Option<(usize, usize)>,
    pub pairs: usize,
    /// How long idle connections are watched.
    pub idle: Duration,
    pub crowd: Crowd,
}

/// What is made for the children of one contender in one round.
#[derive(Default)]
struct Around {
    quota: Option<Quota>,
    ground: Option<Ground>,
}

/// The figures of one contender in one round.
pub fn measure(contender: &Contender, setting: &Setting) -> Result<Vec<Figure>> {
    let crowd = &setting.crowd;
    let around = Around {
        quota: crowd.percent.map(Quota::new).transpose()?,
        ground: match contender.work {
            Work::Carried { by, .. } => Some(Ground::new(by)?),
            _ => None,
        },
    };
    let deadline = Instant::now() + PATIENCE + generous(contender, setting);
    let hogs =
        (0..crowd.hogs).map(|_| Worker::spawn(contender, setting, Role::Hog, &Around::default()));
    // Ended before what is around them.
    let _hogs = hogs.collect::<Result<Vec<Worker>>>()?;
    let mut servers = Vec::new();
    let mut clients = Vec::new();
    for _ in 0..setting.pairs {
        let client_role = if contender.needs_no_peer() {
            Role::Alone
        } else {
            let mut server = Worker::spawn(contender, setting, Role::Server, &around)?;
            let Said::Listening { address } = server.hear(deadline)? else {
                bail!("the server did not say where it listens");
            };
            servers.push(server);
            Role::Client { address }
        };
        clients.push(Worker::spawn(contender, setting, client_role, &around)?);
    }
    let ring_expected = contender.expects_ring();
    converse(&mut servers, &mut clients, setting, ring_expected, deadline).map_err(|error| {
        // If the server said why, that is the cause and the client's word only its effect.
        let cause = servers.iter_mut().find_map(Worker::last_words);
        match cause {
            Some(cause) => anyhow!("{error:#} (server: {cause})"),
            None => error,
        }
    })
}

/// Time enough for the budget's passes on a machine much slower than it should be.
fn generous(contender: &Contender, setting: &Setting) -> Duration {
    let (figures, connections) = match &contender.work {
        Work::Latency { sizes } => (sizes.len() as u32, 0),
        Work::Scale { idle } => (2, *idle as u32),
        // Each lives, by round trips that nobody else makes meanwhile.
        Work::Many { connections, .. } | Work::Idle { connections, .. } => {
            (4, 4 * *connections as u32)
        }
        Work::Messages { peers } => (8, peers.iter().sum::<usize>() as u32),
        Work::Ucx => (300, 0),
        // (Of a machine that is emulated.)
        Work::Ethom { .. } => (600, 0),
        _ => (4, 0),
    };
    setting.budget * 20 * figures + setting.idle + Duration::from_millis(5) * connections
}

fn converse(
    servers: &mut [Worker],
    clients: &mut [Worker],
    setting: &Setting,
    ring_expected: bool,
    deadline: Instant,
) -> Result<Vec<Figure>> {
    let mut reason = None;
    for client in clients.iter_mut() {
        match client.hear(deadline)? {
            Said::Paused(Pause::Ready) if ring_expected => reason = reason.or(client.reason()),
            Said::Paused(Pause::Ready) => {}
            other => bail!("the client is not ready, it said {other:?}"),
        }
    }
    for client in clients.iter_mut() {
        client.go_on()?;
    }
    let mut gathered: Vec<Figure> = Vec::new();
    for client in clients.iter_mut() {
        let mut watched = Vec::new();
        let mut few = None;
        let figures = loop {
            match client.hear(deadline)? {
                Said::Done(figures) => break figures,
                Said::Paused(Pause::Few) => few = weigh(client, servers),
                Said::Paused(Pause::Many { idle }) => {
                    watched = watch_idle(client, servers, setting.idle, idle, few)?;
                }
                other => bail!("the client said {other:?} out of turn"),
            }
            client.go_on()?;
        };
        client.await_exit()?;
        add(&mut gathered, figures);
        add(&mut gathered, watched);
    }
    if let Some(reason) = reason {
        for figure in gathered.iter_mut().filter(|figure| figure.path == "kernel") {
            figure.path = format!("kernel: {}", reason.code());
        }
    }
    Ok(gathered)
}

/// Several pairs add up: only rates come from more than one.
fn add(gathered: &mut Vec<Figure>, figures: Vec<Figure>) {
    for figure in figures {
        match gathered.iter_mut().find(|known| known.what == figure.what) {
            Some(known) => {
                known.value += figure.value;
                if known.path != figure.path {
                    known.path = "mixed".into();
                }
            }
            None => gathered.push(figure),
        }
    }
}

/// Memory of both ends in bytes, each page counted once: (all, of it shared memory).
type Weight = (f64, f64);

fn weigh(client: &Worker, servers: &[Worker]) -> Option<Weight> {
    let mut total = (0.0, 0.0);
    for worker in servers.iter().chain([client]) {
        let text = fs::read_to_string(format!("/proc/{}/smaps_rollup", worker.child.id())).ok()?;
        let bytes = |key: &str| -> Option<f64> {
            let line = text.lines().find_map(|line| line.strip_prefix(key))?;
            Some(line.trim().strip_suffix("kB")?.trim().parse::<f64>().ok()? * 1024.0)
        };
        total.0 += bytes("Pss:")?;
        total.1 += bytes("Pss_Shmem:")?;
    }
    Some(total)
}

fn watch_idle(
    client: &Worker,
    servers: &[Worker],
    time: Duration,
    idle: usize,
    few: Option<Weight>,
) -> Result<Vec<Figure>> {
    let cpu = || -> Result<f64> {
        let mut seconds = 0.0;
        for worker in servers.iter().chain([client]) {
            let clock = ClockId::pid_cpu_clock_id(Pid::from_raw(worker.child.id() as i32))?;
            seconds += Duration::from(clock_gettime(clock)?).as_secs_f64();
        }
        Ok(seconds)
    };
    // What a process does to calm down (spinning out, answering us) is not what it does while idle.
    thread::sleep(Duration::from_millis(20));
    let (before, start) = (cpu()?, Instant::now());
    thread::sleep(time);
    let share = (cpu()? - before) / start.elapsed().as_secs_f64();
    let figure = |what: &str, value: f64, unit: Unit| Figure {
        what: what.into(),
        value,
        unit,
        tails: None,
        path: "-".into(),
    };
    let mut figures = vec![figure("CPU in 1 s of idleness", share * 1e9, Unit::Nanoseconds)];
    if let (Some(few), Some(many)) = (few, weigh(client, servers)) {
        let each = |few: f64, many: f64| ((many - few) / idle as f64).max(0.0);
        figures.push(figure("resident each, both ends", each(few.0, many.0), Unit::Bytes));
        figures.push(figure("of it shared memory", each(few.1, many.1), Unit::Bytes));
    }
    Ok(figures)
}

/// A child process; killed, if it still runs, when it is dropped.
struct Worker {
    child: Child,
    lines: Receiver<String>,
    /// What it printed that is not for us: the loader's complaints, a panic.
    noise: Vec<String>,
    name: &'static str,
}

impl Worker {
    fn spawn(
        contender: &Contender,
        setting: &Setting,
        role: Role,
        around: &Around,
    ) -> Result<Worker> {
        let crowd = &setting.crowd;
        let (wrapped, cpu) = match role {
            Role::Server => (contender.server_wrapped, setting.pin.map(|(server, _)| server)),
            Role::Client { .. } => {
                (contender.client_wrapped, setting.pin.map(|(_, client)| client))
            }
            Role::Alone => (contender.client_wrapped, None),
            Role::Hog | Role::Becomes { .. } => (false, None),
        };
        let place = Place {
            cpus: cpu.map_or_else(|| crowd.cpus.clone(), |cpu| vec![cpu]),
            fifo: crowd.fifo && role != Role::Hog,
        };
        let name = match role {
            Role::Server => "server",
            Role::Hog => "hog",
            _ => "client",
        };
        let takes_orders = !matches!(role, Role::Server | Role::Hog);
        let ground = around.ground.as_ref();
        let end = usize::from(role == Role::Server);
        let work = &contender.work;
        let spec = Spec {
            role,
            family: contender.family,
            work: ground.map_or_else(|| work.clone(), |ground| ground.work(work, end)),
            budget_ms: setting.budget.as_millis() as u64,
            parent: std::process::id(),
            wrapped,
            ring_expected: contender.expects_ring(),
        };
        let (reader, writer) = pipe()?;
        let mut command = Command::new(env::current_exe()?);
        command
            .args(["bench", "--child"])
            .arg(serde_json::to_string(&spec)?)
            .stdin(if takes_orders { Stdio::piped() } else { Stdio::null() })
            .stdout(writer.try_clone()?)
            .stderr(writer);
        let preload =
            if wrapped { preload::preload_list(&preload::library()?, None)? } else { "".into() };
        command.env("LD_PRELOAD", preload);
        command.envs(contender.environment.iter().copied());
        if let Some(socket) = ground.and_then(|ground| ground.socket(end)) {
            command.env("RINGLET_NODE", socket);
        }
        let child = place.within(|| match ground {
            Some(ground) => ground.within(end, || command.spawn())?.map_err(Into::into),
            None => command.spawn().map_err(anyhow::Error::from),
        })?;
        let child = child.with_context(|| format!("cannot start the {name}"))?;
        // Our copies of the pipe's writing end go with the command, so the reader sees the child's end.
        drop(command);
        let (sender, lines) = channel();
        thread::spawn(move || {
            for line in BufReader::new(reader).lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    break;
                }
            }
        });
        let worker = Worker { child, lines, noise: Vec::new(), name };
        around.quota.as_ref().map_or(Ok(()), |quota| quota.add(worker.child.id()))?;
        Ok(worker)
    }

    fn hear(&mut self, deadline: Instant) -> Result<Said> {
        loop {
            match self.lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(line) => match serde_json::from_str(&line) {
                    Ok(Said::Failed(error)) => bail!("{}: {error}{}", self.name, self.noise()),
                    Ok(said) => return Ok(said),
                    Err(_) => self.noise.push(line),
                },
                Err(RecvTimeoutError::Timeout) => {
                    bail!("{} hung: no word from it in time{}", self.name, self.noise())
                }
                Err(RecvTimeoutError::Disconnected) => {
                    let status = self.child.wait()?;
                    bail!("{} ended early ({status}){}", self.name, self.noise())
                }
            }
        }
    }

    /// Why ringlet leaves a connection of this worker to the kernel.
    fn reason(&self) -> Option<Reason> {
        let slots = processes::one(self.child.id()).ok()??.slots;
        let mut reasons = slots.iter().filter_map(|slot| Reason::from_u32(slot.reason));
        reasons.find(|&reason| reason != Reason::None)
    }

    fn noise(&self) -> String {
        self.noise.iter().map(|line| format!("; {line}")).collect()
    }

    fn go_on(&mut self) -> Result<()> {
        let stdin = self.child.stdin.as_mut().context("servers take no orders")?;
        stdin.write_all(b"\n").with_context(|| format!("the {} is gone", self.name))
    }

    /// A client that can't leave is a failure, whatever it measured.
    fn await_exit(&mut self) -> Result<()> {
        let deadline = Instant::now() + EXIT_PATIENCE;
        loop {
            match self.lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(line) => self.noise.push(line),
                Err(RecvTimeoutError::Timeout) => bail!("{} did not exit", self.name),
                Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        match self.child.wait()? {
            status if status.success() => Ok(()),
            status => bail!("{} left with {status}{}", self.name, self.noise()),
        }
    }

    /// What a worker has said, unheard so far, about its failure.
    fn last_words(&mut self) -> Option<String> {
        self.lines.try_iter().find_map(|line| match serde_json::from_str(&line) {
            Ok(Said::Failed(error)) => Some(error),
            Ok(_) => None,
            Err(_) => Some(line),
        })
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // Both fail only for a child that has been waited for.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
