//! Which cases the command line asks for, and who takes part in each.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Result, bail};

use super::args::{BenchArgs, Group, Pin, Sizes, Transport};
use super::parent::{Contender, Setting};
use super::place::{Crowd, Quota};
use super::spec::{Among, Apart, By, Cost, Family, Link, Order, Over, Waiting, Work};
use super::{machine, messages, place, report};

/// Something to measure by several contenders.
pub struct Case {
    pub name: &'static str,
    pub title: String,
    pub rounds: u32,
    pub setting: Setting,
    pub contenders: Vec<Contender>,
}

/// Idleness takes its time however often it is looked at.
const SCALE_ROUNDS_MAX: u32 = 3;
const PAIRS: usize = 8;
const THOUGHT_US: u64 = 500;
const QUOTA_PERCENT: u32 = 20;
/// select has room for 1,024 numbers, of which some are others'.
const SELECTED_MOST: usize = 1000;

/// What can't be done as asked is left out and named in `notes`.
pub fn plan(args: &BenchArgs, notes: &mut Vec<String>) -> Result<Vec<Case>> {
    let quick = args.quick;
    let rounds = args.rounds.unwrap_or(if quick { 1 } else { 5 });
    let two_cores = machine::two_cores();
    let (pin_all, pin_extra) = match (args.pin, &two_cores) {
        (None, Ok(cores)) => (None, Some(*cores)),
        (None, Err(error)) => {
            notes.push(format!("no pinned rows: {error:#}"));
            (None, None)
        }
        (Some(Pin::None), _) => (None, None),
        (Some(Pin::Cores(server, client)), _) => (Some((server, client)), None),
        (Some(Pin::Auto), Ok(cores)) => (Some(*cores), None),
        (Some(Pin::Auto), Err(error)) => bail!("--pin auto: {error:#}"),
    };
    // Milliseconds for one figure.
    let budgets = |normal, quickly| Setting {
        budget: Duration::from_millis(if quick { quickly } else { normal }),
        pin: pin_all,
        pairs: 1,
        idle: Duration::from_millis(if quick { 100 } else { 1000 }),
        crowd: Crowd::default(),
    };
    let latencies = || budgets(50, 8);
    let rates = || budgets(200, 30);

    let everyone = |work: Work| contenders(&args.transport, &work);
    let mut cases = Vec::new();
    let mut add = |group, name, title: &str, setting: Setting, contenders: Vec<Contender>| {
        // Nobody's processors are taken unasked, nor devices made.
        let unasked = args.only.is_empty()
            && !matches!(group, Group::Crowd | Group::Ethernet | Group::Carried);
        let wanted = unasked || args.only.contains(&group);
        if !wanted || contenders.is_empty() {
            return;
        }
        let title = match setting.pin {
            Some((server, client)) => format!("{title}, pinned to cores {server} and {client}"),
            None => title.to_owned(),
        };
        let long = matches!(group, Group::Scale | Group::Idle);
        let rounds = if long { rounds.min(SCALE_ROUNDS_MAX) } else { rounds };
        cases.push(Case { name, title, rounds, setting, contenders });
    };

    let sizes = match (&args.sizes, &args.plot) {
        (Some(sizes), _) => sizes.0.clone(),
        (None, Some(_)) => Sizes::all().0,
        (None, None) => Sizes::usual(quick).0,
    };
    let small = if sizes.contains(&8) { 8 } else { sizes[0] };
    let ping_pong = |sizes: Vec<usize>| {
        let mut all = everyone(Work::Latency { sizes });
        if wants_ringlet(&args.transport) {
            all.push(never_watching(&Work::Latency { sizes: vec![small] }));
        }
        all
    };
    let title = "latency, blocking, half a round trip";
    add(Group::Latency, "latency", title, latencies(), ping_pong(sizes.clone()));
    if let Some(cores) = pin_extra {
        let setting = Setting { pin: Some(cores), ..latencies() };
        add(Group::Latency, "latency-pinned", title, setting, ping_pong(vec![small]));
    }
    let title = "both ends sleep before each message, 8 B, half a round trip";
    add(Group::Asleep, "asleep", title, latencies(), sleepers(&args.transport, pin_all));
    if let Some(cores) = pin_extra {
        let setting = Setting { pin: Some(cores), ..latencies() };
        let sleepers = sleepers(&args.transport, pin_extra);
        add(Group::Asleep, "asleep-pinned", title, setting, sleepers);
    }
    for (by, name, title) in [
        (Waiting::Epoll, "epoll", "latency by epoll, non-blocking, half a round trip"),
        (Waiting::Poll, "poll", "latency by poll, non-blocking, half a round trip"),
    ] {
        add(Group::Epoll, name, title, latencies(), everyone(Work::Events { by }));
    }
    for (size, name, title) in
        [(64 << 10, "stream", "stream, one way"), (8, "small", "small messages, one way")]
    {
        add(Group::Stream, name, title, rates(), everyone(Work::Stream { size }));
    }
    let title = "UDP, blocking, half a round trip; datagrams one way";
    let work = Work::Datagrams { sizes: vec![8, 1 << 10] };
    add(Group::Udp, "udp", title, latencies(), datagrams(&args.transport, &work));
    for (work, name, title) in [
        (Work::Connect, "connect", "a connection per request"),
        (Work::Accept, "accept", "connections accepted"),
    ] {
        add(Group::Connect, name, title, rates(), everyone(work));
    }
    for of in [
        Cost::Start,
        Cost::Fork,
        Cost::ForkMoved,
        Cost::Accept,
        Cost::Short,
        Cost::Move,
        Cost::Close,
        Cost::CloseMoved,
    ] {
        add(
            Group::Costs,
            "costs",
            "in one thread, the time of one",
            rates(),
            costs(&args.transport, of),
        );
    }
    let title = "one busy connection beside idle ones, by epoll";
    let asked = args.idle.unwrap_or(if quick { 64 } else { 1000 }) as usize;
    let idle = asked.min(machine::idle_limit()?);
    add(Group::Scale, "scale", title, latencies(), everyone(Work::Scale { idle }));
    for Lot { group, name, title, budget, contenders } in lots(args, notes) {
        add(group, name, title, Setting { budget, ..rates() }, contenders);
    }
    let title = "8 busy pairs of processes, 8 B";
    let setting = Setting { pairs: PAIRS, pin: None, ..budgets(300, 50) };
    add(Group::Pairs, "pairs", title, setting, everyone(Work::Pair));
    if args.only.contains(&Group::Crowd) {
        for (title, work, crowd) in crowds(&two_cores, notes)? {
            // Many turns of a busy processor, and of a share of it.
            let each = if crowd.percent.is_some() { 1000 } else { 500 };
            let setting = Setting { pin: None, crowd, ..budgets(each, 100) };
            add(Group::Crowd, "crowd", &title, setting, crowded(&args.transport, &work));
        }
    }
    let title = "one side under ringlet, half a round trip";
    add(Group::OneSide, "one-side", title, latencies(), one_side(&args.transport));
    let peers = if quick { vec![1, 300] } else { vec![1, 10, 100, 1000] };
    let mut messengers =
        vec![Contender { label: "ringlet", ..unwrapped(&Work::Messages { peers }) }];
    if messages::find_ucx().is_some() {
        messengers.push(Contender { label: "ucx", ..unwrapped(&Work::Ucx) });
    }
    if !wants_ringlet(&args.transport) {
        messengers.clear();
    }
    add(Group::Messages, "messages", "Active Messages", latencies(), messengers);
    let setting = Setting { pin: None, ..latencies() };
    let cpus = pin_all.or(two_cores.ok());
    let native =
        cpus.map(|cpus| Contender { label: "native", ..unwrapped(&Work::Native { cpus }) });
    let title = "the native library between two cores";
    add(Group::Native, "native", title, setting.clone(), native.into_iter().collect());
    let reflect =
        cpus.map(|cpus| Contender { label: "reflect", ..unwrapped(&Work::Reflect { cpus }) });
    let title = "reflective memory between two cores";
    add(Group::Reflect, "reflect", title, setting.clone(), reflect.into_iter().collect());
    let mirror =
        cpus.map(|cpus| Contender { label: "mirror", ..unwrapped(&Work::Mirror { cpus }) });
    let title = "a ring in one memory, and over a mirror";
    add(Group::Mirror, "mirror", title, setting.clone(), mirror.into_iter().collect());
    let title = "TCP between two network namespaces";
    add(Group::Ethernet, "ethernet", title, rates(), links());
    let ports = cpus.map(|cpus| Contender { label: "ports", ..unwrapped(&Work::Ports { cpus }) });
    let title = "Ethernet frames between two programs' ports";
    add(Group::Ethernet, "ports", title, rates(), ports.into_iter().collect());
    let title = "two programs that share no memory, in two network namespaces";
    add(Group::Carried, "carried", title, budgets(500, 50), carried());
    let limit = Contender { label: "limit", ..unwrapped(&Work::Limits { cpus }) };
    add(Group::Limits, "limits", "what the machine allows", setting, vec![limit]);
    if idle < asked && cases.iter().any(|case| case.name == "scale") {
        notes.push(format!("{idle} idle connections instead of {asked}: RLIMIT_NOFILE"));
    }
    Ok(cases)
}

fn links() -> Vec<Contender> {
    let by = |label, by| Contender { label, ..unwrapped(&Work::Ethernet { by }) };
    vec![
        by(report::ETHERNET_BASELINE, Link::Veth),
        by("ringlet eth", Link::Ringlet { queues: 1 }),
        by("ringlet eth, 2 queues", Link::Ringlet { queues: 2 }),
        by("ringlet eth, bridge", Link::Bridge),
        by("frames by UDP", Link::Udp),
        by("ETHOS", Link::Ethos { packet: 1500 }),
        by("ETHOS, packets of 64 KB", Link::Ethos { packet: u16::MAX }),
    ]
}

fn carried() -> Vec<Contender> {
    let work = |by| Work::Carried { by, group: PathBuf::new(), services: Vec::new() };
    vec![
        Contender { label: report::ETHERNET_BASELINE, ..unwrapped(&work(Apart::Veth)) },
        Contender { label: "isolated", ..ringlet(&work(Apart::Tenants)) },
        Contender { label: "two hosts", ..ringlet(&work(Apart::Hosts)) },
    ]
}

/// What ETHOM's paper measured: by the kernel's own Ethernet, by ours, and by frames over UDP.
pub fn ethom(rounds: u32, quick: bool, overs: &[Over]) -> Vec<Case> {
    let setting = Setting {
        budget: Duration::from_millis(if quick { 10 } else { 60 }),
        pin: None,
        pairs: 1,
        idle: Duration::ZERO,
        crowd: Crowd::default(),
    };
    let case = |over: &Over| {
        let (name, title) = match over {
            Over::Tcp => (super::ethom::TCP, "ETHOM's figures by TCP"),
            Over::Tipc => (super::ethom::TIPC, "ETHOM's figures by TIPC"),
        };
        let by = |label, by| Contender { label, ..unwrapped(&Work::Ethom { by, over: *over }) };
        let contenders = vec![
            by(report::ETHERNET_BASELINE, Link::Veth),
            by(super::ethom::OURS, Link::Ringlet { queues: 1 }),
            by(super::ethom::ETHOS, Link::Ethos { packet: u16::MAX }),
        ];
        Case { name, title: title.into(), rounds, setting: setting.clone(), contenders }
    };
    overs.iter().map(case).collect()
}

/// What the Memory Channel's paper measured, but for its programs.
pub fn memory_channel(rounds: u32, quick: bool) -> Result<Vec<Case>> {
    let cpus = machine::two_cores()?;
    let setting = Setting {
        budget: Duration::from_millis(if quick { 20 } else { 100 }),
        pin: None,
        pairs: 1,
        idle: Duration::ZERO,
        crowd: Crowd::default(),
    };
    let both = |work: Work| vec![unwrapped(&work), ringlet(&work)];
    let one = |label, work: Work| vec![Contender { label, ..unwrapped(&work) }];
    let case = |name, title: &str, contenders| Case {
        name,
        title: title.into(),
        rounds,
        setting: setting.clone(),
        contenders,
    };
    Ok(vec![
        case("hierarchy", "loads", one("machine", Work::Hierarchy { cpu: cpus.0 })),
        case("latency", "half a round trip", both(Work::Latency { sizes: vec![32] })),
        case("small", "one way, small", both(Work::Stream { size: 32 })),
        case("stream", "one way, large", both(Work::Stream { size: 64 << 10 })),
        case("reflect", "reflective memory", one("reflect", Work::Reflect { cpus })),
    ])
}

fn wants_ringlet(transports: &[Transport]) -> bool {
    transports.is_empty() || transports.contains(&Transport::Ringlet)
}

fn contenders(transports: &[Transport], work: &Work) -> Vec<Contender> {
    // Both kinds of connection use the same ring, so that its times are told once unless more is asked for.
    let usual = |transport: &Transport| {
        *transport != Transport::RingletUnix || matches!(work, Work::Latency { .. })
    };
    [Transport::Tcp, Transport::Unix, Transport::Ringlet, Transport::RingletUnix]
        .into_iter()
        .filter(|transport| match transports {
            [] => usual(transport),
            asked => asked.contains(transport),
        })
        .map(|transport| match transport {
            Transport::Tcp => unwrapped(work),
            Transport::Unix => Contender { label: "unix", family: Family::Unix, ..unwrapped(work) },
            Transport::Ringlet => ringlet(work),
            Transport::RingletUnix => {
                Contender { label: "ringlet unix", family: Family::Unix, ..ringlet(work) }
            }
        })
        .collect()
}

/// Cases of many connections: the first of each group is measured unasked.
const LOTS: [(Kind, Among, &str, &str); 12] = [
    (
        Kind::Many(Order::Random),
        Among::Epoll,
        "many-epoll",
        "one of many connections at random, server by epoll",
    ),
    (
        Kind::Many(Order::Random),
        Among::Edge,
        "many-edge",
        "one of many connections at random, server by epoll's edges",
    ),
    (
        Kind::Many(Order::Random),
        Among::Poll,
        "many-poll",
        "one of many connections at random, server by poll",
    ),
    (
        Kind::Many(Order::Random),
        Among::Select,
        "many-select",
        "one of many connections at random, server by select",
    ),
    (
        Kind::Many(Order::Turns),
        Among::Epoll,
        "many-turns",
        "each of many connections in its turn, server by epoll",
    ),
    (
        Kind::Many(Order::Bursts),
        Among::Epoll,
        "many-bursts",
        "many connections in bursts of up to 64, server by epoll",
    ),
    (
        Kind::Senders(Order::Random),
        Among::Epoll,
        "many-udp",
        "one of many UDP senders at random, server by epoll",
    ),
    (
        Kind::Senders(Order::Turns),
        Among::Epoll,
        "many-udp-turns",
        "each of many UDP senders in its turn, server by epoll",
    ),
    (
        Kind::Senders(Order::Bursts),
        Among::Epoll,
        "many-udp-bursts",
        "many UDP senders in bursts of up to 64, server by epoll",
    ),
    (Kind::Idle, Among::Epoll, "idle-epoll", "waits of 1 ms beside idle connections, by epoll"),
    (Kind::Idle, Among::Poll, "idle-poll", "waits of 1 ms beside idle connections, by poll"),
    (Kind::Idle, Among::Select, "idle-select", "waits of 1 ms beside idle connections, by select"),
];

#[derive(Clone, Copy)]
enum Kind {
    Many(Order),
    Senders(Order),
    Idle,
}

/// One number of connections.
struct Lot {
    group: Group,
    name: &'static str,
    title: &'static str,
    budget: Duration,
    contenders: Vec<Contender>,
}

/// All of those groups that are named; of the others what shows within seconds how they stand.
fn lots(args: &BenchArgs, notes: &mut Vec<String>) -> Vec<Lot> {
    let named = |group| args.only.contains(&group);
    let mut all: Vec<Lot> = Vec::new();
    let mut too_many = false;
    for (kind, by, name, title) in LOTS {
        let group = if matches!(kind, Kind::Idle) { Group::Idle } else { Group::Many };
        if !named(group) && all.iter().any(|lot| lot.group == group) {
            continue;
        }
        // Milliseconds for a figure.
        let (budget, numbers): (u64, &[u32]) = match (group, args.quick, named(group)) {
            (Group::Idle, true, _) => (50, &[100]),
            (Group::Idle, _, true) => (1000, &[100, 500, 2000]),
            (Group::Idle, ..) => (300, &[500]),
            (_, true, _) => (30, &[1, 32, 128]),
            (_, _, true) => (500, &[1, 32, 128, 512, 2000]),
            _ => (200, &[512]),
        };
        let numbers = if args.connections.is_empty() { numbers } else { &args.connections };
        for connections in numbers.iter().map(|&number| number as usize) {
            if by == Among::Select && connections >= SELECTED_MOST {
                too_many = true;
                continue;
            }
            let work = match kind {
                Kind::Idle => Work::Idle { by, connections },
                Kind::Many(order) | Kind::Senders(order) => Work::Many { by, order, connections },
            };
            let mut contenders = match kind {
                Kind::Senders(_) => datagrams(&args.transport, &work),
                _ => contenders(&args.transport, &work),
            };
            // Of Unix sockets if they are asked for.
            contenders.retain(|each| each.family != Family::Unix || !args.transport.is_empty());
            let budget = Duration::from_millis(budget);
            all.push(Lot { group, name, title, budget, contenders });
        }
    }
    if too_many {
        notes.push(format!(
            "select can't wait for {SELECTED_MOST} connections or more: no such row"
        ));
    }
    all
}

/// Processors that others want as well, or that there is not enough of.
fn crowds(
    two_cores: &Result<(usize, usize)>,
    notes: &mut Vec<String>,
) -> Result<Vec<(String, Work, Crowd)>> {
    let small = |pause_us| Work::Trips { size: 64, pause_us };
    let large = Work::Trips { size: 16 << 10, pause_us: 0 };
    let mut all = Vec::new();
    let alone = match two_cores {
        Ok((one, other)) => {
            for (hogs, work) in [(8, small(THOUGHT_US)), (8, large.clone()), (2, large)] {
                let crowd = Crowd { hogs, cpus: vec![*one, *other], ..Crowd::default() };
                all.push((format!("{hogs} hogs on 2 processors"), work, crowd));
            }
            *one
        }
        Err(error) => {
            notes.push(format!("no hogs on two processors: {error:#}"));
            machine::first_core()?
        }
    };
    match Quota::new(QUOTA_PERCENT) {
        Ok(_) => {
            let crowd = Crowd { percent: Some(QUOTA_PERCENT), ..Crowd::default() };
            all.push((format!("{QUOTA_PERCENT} % of a processor for both"), small(0), crowd));
        }
        Err(error) => notes.push(format!("no row with a share of a processor: {error:#}")),
    }
    let crowd = Crowd { cpus: vec![alone], ..Crowd::default() };
    all.push(("one processor alone".into(), small(0), crowd.clone()));
    match place::may_be_fifo() {
        Ok(()) => {
            let crowd = Crowd { fifo: true, ..crowd };
            all.push(("one processor alone, SCHED_FIFO".into(), small(0), crowd));
        }
        Err(error) => notes.push(format!("no row by SCHED_FIFO: {error:#}")),
    }
    Ok(all)
}

fn crowded(transports: &[Transport], work: &Work) -> Vec<Contender> {
    let asked = |which| transports.is_empty() || transports.contains(&which);
    let kernel = asked(Transport::Tcp).then(|| unwrapped(work));
    let ours = wants_ringlet(transports).then(|| [ringlet(work), never_watching(work)]);
    kernel.into_iter().chain(ours.into_iter().flatten()).collect()
}

fn one_side(transports: &[Transport]) -> Vec<Contender> {
    if !wants_ringlet(transports) {
        return Vec::new();
    }
    let tcp = unwrapped(&Work::Latency { sizes: vec![8] });
    vec![
        tcp.clone(),
        Contender { label: "ringlet at server", server_wrapped: true, ..tcp.clone() },
        Contender { label: "ringlet at client", client_wrapped: true, ..tcp },
    ]
}

/// Datagrams over the kernel's UDP (which goes with TCP), and over ringlet.
fn datagrams(transports: &[Transport], work: &Work) -> Vec<Contender> {
    let mut all = contenders(transports, work);
    all.retain(|each| each.family == Family::Tcp);
    for each in &mut all {
        each.family = Family::Udp;
        if each.label == report::BASELINE {
            each.label = report::UDP_BASELINE;
        }
    }
    all
}

fn ringlet(work: &Work) -> Contender {
    Contender { label: "ringlet", server_wrapped: true, client_wrapped: true, ..unwrapped(work) }
}

/// Ends that never watch, and what wakes a process without a connection.
fn sleepers(transports: &[Transport], cpus: Option<(usize, usize)>) -> Vec<Contender> {
    let mut all = contenders(transports, &Work::Asleep);
    for each in &mut all {
        if each.server_wrapped {
            *each = Contender { environment: NEVER_WATCHING, ..each.clone() };
        }
    }
    if wants_ringlet(transports) {
        for (label, by) in [("futex", By::Futex), ("eventfd", By::Eventfd)] {
            all.push(Contender { label, ..unwrapped(&Work::HandOver { by, cpus }) });
        }
    }
    all
}

fn costs(transports: &[Transport], of: Cost) -> Vec<Contender> {
    let work = Work::Cost { of };
    let asked = |which| transports.is_empty() || transports.contains(&which);
    let kernel = Contender { label: report::KERNEL_BASELINE, ..unwrapped(&work) };
    let kernel = asked(Transport::Tcp).then_some(kernel);
    let wanted = wants_ringlet(transports);
    let any = Contender { label: "empty library", environment: EMPTY_LIBRARY, ..unwrapped(&work) };
    let any = (wanted && matches!(of, Cost::Start | Cost::Fork)).then_some(any);
    kernel.into_iter().chain(any).chain(wanted.then(|| ringlet(&work))).collect()
}

/// What any library costs that is loaded like ours. (glibc's libdl is there for older programs, and has nothing in it since 2.34.)
const EMPTY_LIBRARY: &[(&str, &str)] = &[("LD_PRELOAD", "libdl.so.2")];

const NEVER_WATCHING: &[(&str, &str)] = &[("RINGLET_SPIN_US", "0")];

fn never_watching(work: &Work) -> Contender {
    Contender { label: "ringlet, no spin", environment: NEVER_WATCHING, ..ringlet(work) }
}

fn unwrapped(work: &Work) -> Contender {
    Contender {
        label: report::BASELINE,
        family: Family::Tcp,
        server_wrapped: false,
        client_wrapped: false,
        environment: &[],
        work: work.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Command {
        #[command(flatten)]
        args: BenchArgs,
    }

    fn names(arguments: &[&str]) -> Vec<(String, Vec<&'static str>)> {
        let command = Command::parse_from([&["bench"], arguments].concat());
        let cases = plan(&command.args, &mut Vec::new()).unwrap();
        let labels = |case: &Case| case.contenders.iter().map(|each| each.label).collect();
        cases.iter().map(|case| (case.name.to_owned(), labels(case))).collect()
    }

    #[test]
    fn each_group_has_its_cases() {
        let all = names(&["--pin", "none"]);
        let of = |name: &str| all.iter().find(|case| case.0 == name).unwrap().1.clone();
        assert_eq!(of("latency"), ["tcp", "unix", "ringlet", "ringlet unix", "ringlet, no spin"]);
        assert_eq!(of("one-side"), ["tcp", "ringlet at server", "ringlet at client"]);
        assert_eq!(of("limits"), ["limit"]);
        assert_eq!(of("messages")[0], "ringlet");
        assert_eq!(of("udp"), ["udp", "ringlet"]);
        assert_eq!(of("asleep"), ["tcp", "unix", "ringlet", "futex", "eventfd"]);
        assert_eq!(of("costs"), ["kernel", "empty library", "ringlet"]);
        assert_eq!(of("many-epoll"), ["tcp", "ringlet"]);
        assert_eq!(of("idle-epoll"), ["tcp", "ringlet"]);
        let two_cores = machine::two_cores().is_ok();
        assert_eq!(all.len(), if two_cores { 27 } else { 24 });
    }

    /// The name of each case and what is done, in order.
    fn works(arguments: &[&str], notes: &mut Vec<String>) -> Vec<(&'static str, Work)> {
        let command = Command::parse_from([&["bench"], arguments].concat());
        let cases = plan(&command.args, notes).unwrap();
        cases.iter().map(|case| (case.name, case.contenders[0].work.clone())).collect()
    }

    #[test]
    fn many_and_idle_have_all_ways_and_numbers_if_they_are_named() {
        let mut notes = Vec::new();
        let all = works(&["--only", "many,idle"], &mut notes);
        let many = |by, order| move |&connections: &usize| Work::Many { by, order, connections };
        let idle = |by| move |&connections: &usize| Work::Idle { by, connections };
        let numbers = [1, 32, 128, 512, 2000];
        let mut expected = Vec::new();
        let mut expect = |name, works: Vec<Work>| {
            expected.extend(works.into_iter().map(|work| (name, work)));
        };
        expect("many-epoll", numbers.iter().map(many(Among::Epoll, Order::Random)).collect());
        expect("many-edge", numbers.iter().map(many(Among::Edge, Order::Random)).collect());
        expect("many-poll", numbers.iter().map(many(Among::Poll, Order::Random)).collect());
        let selected = numbers[..4].iter().map(many(Among::Select, Order::Random));
        expect("many-select", selected.collect());
        let by_epoll = |order| numbers.iter().map(many(Among::Epoll, order)).collect();
        expect("many-turns", by_epoll(Order::Turns));
        expect("many-bursts", by_epoll(Order::Bursts));
        expect("many-udp", by_epoll(Order::Random));
        expect("many-udp-turns", by_epoll(Order::Turns));
        expect("many-udp-bursts", by_epoll(Order::Bursts));
        expect("idle-epoll", [100, 500, 2000].iter().map(idle(Among::Epoll)).collect());
        expect("idle-poll", [100, 500, 2000].iter().map(idle(Among::Poll)).collect());
        expect("idle-select", [100, 500].iter().map(idle(Among::Select)).collect());
        assert_eq!(all, expected);
        let about_select = |note: &&String| note.contains("select");
        assert_eq!(notes.iter().filter(about_select).count(), 1, "{notes:?}");

        let udp = names(&["--only", "many"]).into_iter().find(|case| case.0 == "many-udp");
        assert_eq!(udp.unwrap().1, ["udp", "ringlet"]);
        let unix = names(&["--only", "idle", "--transport", "unix,ringlet-unix"]);
        assert!(unix.iter().all(|case| case.1 == ["unix", "ringlet unix"]) && unix.len() == 8);
    }

    #[test]
    fn unasked_or_quick_many_and_idle_are_short() {
        let of = |arguments: &[&str]| {
            let mut all = works(arguments, &mut Vec::new());
            all.retain(|(name, _)| name.starts_with("many") || name.starts_with("idle"));
            all
        };
        let (by, order) = (Among::Epoll, Order::Random);
        let many = |connections| ("many-epoll", Work::Many { by, order, connections });
        let idle = |connections| ("idle-epoll", Work::Idle { by, connections });
        assert_eq!(of(&[]), [many(512), idle(500)]);
        assert_eq!(of(&["--quick"]), [many(1), many(32), many(128), idle(100)]);
        assert_eq!(of(&["--connections", "7,9"]), [many(7), many(9), idle(7), idle(9)]);
        let quick = of(&["--quick", "--only", "idle", "--connections", "999,1000"]);
        assert_eq!(quick.len(), 5, "select has no room for 1000: {quick:?}");
    }

    #[test]
    fn only_what_is_asked_for() {
        let asked = ["--pin", "none", "--only", "latency,one-side", "--transport", "tcp,unix"];
        assert_eq!(names(&asked), [("latency".to_owned(), vec!["tcp", "unix"])]);
    }

    #[test]
    fn the_crowd_comes_only_if_it_is_asked_for() {
        assert!(!names(&[]).iter().any(|case| case.0 == "crowd"));
        let asked = names(&["--only", "crowd"]);
        let whole = machine::two_cores().is_ok();
        assert!(asked.len() >= if whole { 4 } else { 1 });
        for (name, labels) in asked {
            let expected = ["tcp", "ringlet", "ringlet, no spin"];
            assert_eq!((&*name, &*labels), ("crowd", &expected[..]));
        }
        let kernel = names(&["--only", "crowd", "--transport", "tcp"]);
        assert!(kernel.iter().all(|case| case.1 == ["tcp"]));
    }

    #[test]
    fn given_cores_pin_everything_but_the_crowd() {
        let command = Command::parse_from(["bench", "--pin", "1,0"]);
        for case in plan(&command.args, &mut Vec::new()).unwrap() {
            let pinned = !matches!(case.name, "pairs" | "native" | "reflect" | "mirror" | "limits");
            assert_eq!(case.setting.pin, pinned.then_some((1, 0)), "{}", case.name);
            assert_eq!(case.title.contains("pinned"), pinned, "{}", case.name);
        }
    }
}
