//! Active Messages, and UCX's, which do the same work: two processes on this machine.

use std::cell::Cell;
use std::hint::black_box;
use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use ringlet_messages::active_message::{
    BUFFER_BYTES, Bundle, Endpoint, NAME_BYTES, Name, Payload, Process, TAG_ALL,
};

use super::limits;
use super::spec::{Figure, Pause, Said, Spec, Unit};
use super::stats::{Recorder, median};
use super::talk::{pause, say};

/// The server's handlers, and the client's for answers.
const ECHO: u8 = 1;
const COUNT: u8 = 2;
const TOTAL: u8 = 3;
const ANSWER: u8 = 4;

const HALF: &str = "8 B, half a round trip";
const RATE: &str = "8 B, one way";
const STORE: &str = "64 KiB stored";
const UCX: &str = "ucx_perftest";
const UCX_PATIENCE: Duration = Duration::from_secs(20);

/// A process of its own, with an endpoint that lets everybody in.
struct Node {
    endpoint: Arc<Endpoint>,
    bundle: Bundle,
    process: Process,
}

impl Node {
    fn new() -> Result<Node> {
        let process = Process::start()?;
        let bundle = process.bundle()?;
        let endpoint = bundle.endpoint()?;
        endpoint.set_tag(TAG_ALL)?;
        endpoint.allocate_segment(BUFFER_BYTES)?;
        Ok(Node { endpoint, bundle, process })
    }
}

pub fn serve() -> Result<()> {
    let node = Node::new()?;
    let count = Arc::new(AtomicU64::new(0));
    let counted = count.clone();
    node.endpoint.set_handler(
        ECHO,
        Arc::new(|message| {
            let _ = message.reply(ANSWER, message.arguments(), Payload::None);
        }),
    )?;
    node.endpoint.set_handler(
        COUNT,
        Arc::new(move |_| {
            counted.fetch_add(1, Ordering::Relaxed);
        }),
    )?;
    node.endpoint.set_handler(
        TOTAL,
        Arc::new(move |message| {
            let total = count.load(Ordering::Relaxed) as u32;
            let _ = message.reply(ANSWER, &[total], Payload::None);
        }),
    )?;
    let address: String =
        node.endpoint.name().to_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
    say(&Said::Listening { address })?;
    // Until the parent ends us.
    loop {
        node.bundle.poll()?;
    }
}

pub fn measure(spec: &Spec, address: &str, peers: &[usize]) -> Result<Vec<Figure>> {
    let budget = Duration::from_millis(spec.budget_ms);
    let node = Node::new()?;
    let answered = Arc::new(AtomicU64::new(0));
    let answers = answered.clone();
    node.endpoint.set_handler(
        ANSWER,
        Arc::new(move |_| {
            answers.fetch_add(1, Ordering::Relaxed);
        }),
    )?;
    node.endpoint.map(0, parse_name(address)?, TAG_ALL)?;
    let asked = Cell::new(0);
    // Sends, then polls until the answer is there.
    let trip = |handler| -> Result<()> {
        node.endpoint.request(0, handler, &[1, 2], Payload::None)?;
        asked.set(asked.get() + 1);
        while answered.load(Ordering::Relaxed) < asked.get() {
            node.bundle.poll()?;
        }
        Ok(())
    };
    trip(ECHO)?;
    pause(Pause::Ready)?;
    let mut figures = Vec::new();
    // The typical trip, as UCX has it.
    let mut trips = Recorder::start();
    let start = Instant::now();
    while start.elapsed() < budget {
        for _ in 0..100 {
            let begin = Instant::now();
            trip(ECHO)?;
            trips.record(begin.elapsed());
        }
    }
    let tails = trips.tails(0.5).context("no trips")?;
    let half = figure(HALF, tails.p50_ns, Unit::Nanoseconds);
    figures.push(Figure { tails: Some(tails), ..half });
    let one = || Ok(node.endpoint.request(0, COUNT, &[1, 2], Payload::None)?);
    let seconds = per_pass(budget, 10_000, one, || trip(TOTAL))?;
    figures.push(figure(RATE, 1.0 / seconds, Unit::PerSecond));
    let bytes = vec![1; BUFFER_BYTES];
    let store = || {
        let payload = Payload::Bulk { offset: 0, bytes: black_box(&bytes) };
        Ok(node.endpoint.request(0, COUNT, &[], payload)?)
    };
    let seconds = per_pass(budget, 500, store, || trip(TOTAL))?;
    figures.push(figure(STORE, BUFFER_BYTES as f64 / seconds, Unit::BytesPerSecond));
    let copies = limits::copy(BUFFER_BYTES, budget);
    let copy = median(copies).context("no batches")?;
    figures.push(figure("memcpy of 64 KiB", copy, Unit::BytesPerSecond));
    for &count in peers {
        let what = match count {
            1 => "empty poll, 1 peer".to_owned(),
            _ => format!("empty poll, {count} peers"),
        };
        figures.push(figure(&what, empty_poll(count, budget)?, Unit::Nanoseconds));
    }
    Ok(figures)
}

/// Seconds for one `step`: the median of batches, each with `settle` at its end, for about `budget`.
fn per_pass(
    budget: Duration,
    batch: u32,
    step: impl Fn() -> Result<()>,
    settle: impl Fn() -> Result<()>,
) -> Result<f64> {
    let mut batches = Vec::new();
    let start = Instant::now();
    while batches.len() < 3 || start.elapsed() < budget {
        let begin = Instant::now();
        (0..batch).try_for_each(|_| step())?;
        settle()?;
        batches.push(begin.elapsed().as_secs_f64() / f64::from(batch));
    }
    median(batches).context("no batches")
}

/// Nanoseconds of a poll that finds nothing, by an endpoint with so many connections.
fn empty_poll(count: usize, budget: Duration) -> Result<f64> {
    let (node, other) = (Node::new()?, Node::new()?);
    let mut ends = vec![other.endpoint.clone()];
    let mut more = Vec::new();
    while ends.len() < count {
        if ends.len().is_multiple_of(500) {
            more.push(other.process.bundle()?);
        }
        ends.push(more.last().unwrap_or(&other.bundle).endpoint()?);
    }
    node.endpoint.set_handler(COUNT, Arc::new(|_| {}))?;
    node.endpoint.set_translations(count.max(node.endpoint.translations()?))?;
    let start = Instant::now();
    for end in &ends {
        end.set_tag(TAG_ALL)?;
        end.set_handler(COUNT, Arc::new(|_| {}))?;
        let index = node.endpoint.map_any(end.name(), TAG_ALL)?;
        while node.endpoint.try_request(index, COUNT, &[], Payload::None).is_err() {
            ensure!(start.elapsed() < UCX_PATIENCE, "{count} connections took too long");
            other.bundle.poll()?;
        }
    }
    ensure!(node.bundle.connections() == count, "not all connections are there");
    per_pass(budget, 20_000, || Ok(node.bundle.poll().map(drop)?), || Ok(())).map(|s| s * 1e9)
}

fn figure(what: &str, value: f64, unit: Unit) -> Figure {
    Figure { what: what.into(), value, unit, tails: None, path: "-".into() }
}

fn parse_name(address: &str) -> Result<Name> {
    let digits = |at: usize| address.get(2 * at..2 * at + 2);
    let bytes: Option<Vec<u8>> = (0..NAME_BYTES)
        .map(|at| digits(at).and_then(|text| u8::from_str_radix(text, 16).ok()))
        .collect();
    let bytes = bytes.and_then(|bytes| bytes.try_into().ok());
    bytes.and_then(|bytes| Name::from_bytes(&bytes)).context("not an endpoint's name")
}

pub fn find_ucx() -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|each| each.join(UCX)).find(|each| each.is_file())
}

/// The same by UCX's own benchmark, over shared memory.
pub fn measure_ucx() -> Result<Vec<Figure>> {
    Ok(vec![
        ucx("ucp_am_lat", 8, 20_000, |typical| (HALF, typical * 1e3, Unit::Nanoseconds), 2)?,
        ucx("ucp_am_bw", 8, 200_000, |rate| (RATE, rate, Unit::PerSecond), 8)?,
        ucx(
            "ucp_am_bw",
            BUFFER_BYTES,
            10_000,
            |rate| (STORE, rate * 1048576.0, Unit::BytesPerSecond),
            6,
        )?,
    ])
}

/// `column` of the final line: microseconds, MiB or messages a second.
fn ucx(
    test: &str,
    size: usize,
    count: u32,
    make: impl Fn(f64) -> (&'static str, f64, Unit),
    column: usize,
) -> Result<Figure> {
    let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port().to_string();
    let start = |arguments: &[&str], output: Stdio| -> Result<Ended> {
        let mut command = Command::new(UCX);
        command.args(["-p", &port]).args(arguments).env("UCX_TLS", "posix,self");
        command.stdin(Stdio::null()).stdout(output).stderr(Stdio::null());
        Ok(Ended(command.spawn().context(UCX)?))
    };
    let _server = start(&[], Stdio::null())?;
    let began = Instant::now();
    let (size, count) = (size.to_string(), count.to_string());
    // Until the server listens.
    loop {
        let arguments = ["127.0.0.1", "-t", test, "-s", &size, "-n", &count];
        let mut client = start(&arguments, Stdio::piped())?;
        let output = BufReader::new(client.0.stdout.take().context("piped")?);
        let last = output.lines().map_while(Result::ok).find(|line| line.starts_with("Final:"));
        if let Some(line) = last {
            let word = line.split_whitespace().nth(column).and_then(|word| word.parse().ok());
            let (what, value, unit) = make(word.ok_or_else(|| anyhow!("{UCX} said {line:?}"))?);
            return Ok(figure(what, value, unit));
        }
        if began.elapsed() > UCX_PATIENCE {
            bail!("{UCX} -t {test} did not get to its end");
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Ends with its owner.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        // Both fail only for a child that has been waited for.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
