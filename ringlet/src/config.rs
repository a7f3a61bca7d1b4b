//! Configuration, for the command line and for the shim inside other people's programs: each key is declared once, in
//! the table below, and everything else (parsing, flags, `ringlet config`, the manual) is generated from it.
//!
//! WHY core only, fixed sizes, bytes in and no result to unwrap: the shim reads this before `main`, where nothing may
//! be allocated and nothing may panic. A value that is wrong is reported and skipped; the one before it stays.

use core::ffi::CStr;
use core::fmt;
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Names the configuration file, and nothing else is looked for.
pub const FILE_ENVIRONMENT: &str = "RINGLET_CONFIG";
/// The machine's configuration, read when the user has none.
pub const SYSTEM_FILE: &CStr = c"/etc/ringlet.conf";
/// A longer file is refused, so that a caller without a heap knows how large a buffer to bring.
pub const FILE_MAX_BYTES: usize = 16 << 10;
/// Rules in one list.
pub const RULES_MAX_COUNT: usize = 16;
/// Where the node service listens, unless told otherwise.
pub const NODE_SOCKET: &str = "/run/ringlet/node.sock";
/// KERNEL: a Unix socket's path, with the zero that ends it (struct sockaddr_un).
const SOCKET_PATH_MAX_BYTES: usize = 108;
/// The log's path, with the zero that ends it.
pub const LOG_PATH_MAX_BYTES: usize = 256;
/// The kernel's PATH_MAX.
const FILE_PATH_MAX_BYTES: usize = 4096;

macro_rules! config {
    ($($name:ident: $type:ty as $form:ty = $default:expr, $environment:literal, $unit:literal, $effect:literal;)*) => {
        /// How many keys there are.
        pub const KEY_COUNT: usize = [$(stringify!($name)),*].len();

        /// All of ringlet's configuration: plain data without a heap.
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        pub struct Config {
            $(#[doc = $effect] pub $name: $type,)*
            origins: [Origin; KEY_COUNT],
        }

        impl Config {
            pub const DEFAULT: Config = Config {
                $($name: $default,)*
                origins: [Origin::Default; KEY_COUNT],
            };
        }

        /// Every key, in the order in which people should meet them.
        pub static KEYS: [Key; KEY_COUNT] = [$(Key {
            name: stringify!($name),
            environment: $environment,
            unit: $unit,
            effect: $effect,
            describe: <$form as Form>::describe,
            parse: |config, text| {
                config.$name = <$form as Form>::parse(text)?;
                Ok(())
            },
            print: |config, out| <$form as Form>::print(&config.$name, out),
        },)*];
    };
}

config! {
    enabled: bool as Switch = true, "RINGLET_ENABLED", "",
        "Whether connections are moved at all; off leaves everything to the kernel.";
    only: RuleList as Rules = RuleList::EMPTY, "RINGLET_ONLY", "",
        "If not empty, only connections with an end that matches one of these rules are moved.";
    except: RuleList as Rules = RuleList::EMPTY, "RINGLET_EXCEPT", "",
        "Connections with an end that matches one of these rules are never moved.";
    udp: bool as Switch = true, "RINGLET_UDP", "",
        "Whether datagrams between UDP sockets are moved too.";
    spin: SpinPolicy as Spin = SpinPolicy::Balanced, "RINGLET_SPIN", "",
        "What watching shared memory may cost: `balanced` watches no longer than the wake-ups that it saves would cost, or for an answer some times as long; `latency` for anything several times as long; `off` sleeps at once.";
    spin_us: u64 as Number<0, 1000> = 500, "RINGLET_SPIN_US", "microseconds",
        "How long a waiting call may watch shared memory before it sleeps; 0 sleeps at once.";
    move_after: u64 as Number<0, 1_000_000> = 4, "RINGLET_MOVE_AFTER", "messages",
        "How many messages a connection exchanges at least before it is moved; up to 64 where connections lately ended young; 0 moves it as early as possible.";
    ring_bytes: u64 as PowerOfTwo<{ 64 << 10 }, { 64 << 20 }> = 2 << 20, "RINGLET_RING_BYTES", "bytes",
        "Size of the data ring of each direction of a connection.";
    unix: bool as Switch = true, "RINGLET_UNIX", "",
        "Whether connections over Unix sockets (streams and sequenced packets) are moved too, while `only` is empty.";
    memory_limit_bytes: u64 as Bytes<0, { 1 << 40 }> = 64 << 30, "RINGLET_MEMORY_LIMIT_BYTES", "bytes",
        "Address space that one process may map for its connections (they touch little of it); further ones stay on the kernel.";
    peers: PeerPolicy as Peers = PeerPolicy::Any, "RINGLET_PEERS", "",
        "Whose processes may share memory with ours, once they have proven that they own the far end.";
    adapter: u64 as Number<0, { u64::MAX }> = 0, "RINGLET_ADAPTER", "",
        "Unless 0, the number of the adapter (`ringlet adapter`) that gives each end of a connection a segment of its own and keeps them in step; both ends must name the same.";
    node: Option<AbsolutePath> as SocketPath = Some(AbsolutePath::of(NODE_SOCKET)), "RINGLET_NODE", "",
        "Where the node service (`ringlet node`) listens, which introduces processes of this host that are in different network namespaces; off asks nobody.";
    log: LogTarget as Log = LogTarget::Off, "RINGLET_LOG", "",
        "Where a program under ringlet is told of what went wrong at its start; `ringlet ss` tells of the rest.";
    moves: LogTarget as Log = LogTarget::Off, "RINGLET_MOVES", "",
        "Where a line is written for each end of a connection that comes to use the ring: an aid for tests.";
    unforgiving: u64 as Number<0, { u32::MAX as u64 }> = 0, "RINGLET_UNFORGIVING", "",
        "An aid for tests: unless 0, the seed by which connections change between kernel and ring at random bytes; they are moved at once.";
}

/// Where a value came from; a later one overrides an earlier one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Origin {
    Default,
    File,
    Environment,
    Flag,
}

impl Origin {
    pub fn name(self) -> &'static str {
        match self {
            Origin::Default => "default",
            Origin::File => "file",
            Origin::Environment => "environment",
            Origin::Flag => "flag",
        }
    }
}

/// One line of the table.
pub struct Key {
    /// In the file; the flag is the same with dashes.
    pub name: &'static str,
    pub environment: &'static str,
    /// Empty for values that are no quantity.
    pub unit: &'static str,
    /// One sentence.
    pub effect: &'static str,
    describe: fn(&mut fmt::Formatter) -> fmt::Result,
    parse: fn(&mut Config, &[u8]) -> Result<(), Problem>,
    print: fn(&Config, &mut fmt::Formatter) -> fmt::Result,
}

impl Key {
    pub fn find(name: &[u8]) -> Option<&'static Key> {
        KEYS.iter().find(|key| key.name.as_bytes() == name)
    }

    /// What may be written after the equals sign.
    pub fn values(&'static self) -> impl fmt::Display {
        Printer(|out: &mut fmt::Formatter| (self.describe)(out))
    }

    /// This key's value, as it would be written in the file.
    pub fn value<'c>(&'static self, config: &'c Config) -> impl fmt::Display + use<'c> {
        Printer(move |out: &mut fmt::Formatter| (self.print)(config, out))
    }
}

struct Printer<F>(F);

impl<F: Fn(&mut fmt::Formatter) -> fmt::Result> fmt::Display for Printer<F> {
    fn fmt(&self, out: &mut fmt::Formatter) -> fmt::Result {
        (self.0)(out)
    }
}

/// What is wrong with a value or a line.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Problem {
    NoEquals,
    UnknownKey,
    NotSwitch,
    NotNumber,
    NotBytes,
    OutOfRange { min: u64, max: u64 },
    NotPowerOfTwo,
    NotRule { number: usize },
    TooManyRules,
    NotPeers,
    NotSpin,
    NotLog,
    LogPathTooLong,
    NotSocketPath,
    FileTooLong,
    FileMissing,
    FileUnreadable,
}

impl fmt::Display for Problem {
    fn fmt(&self, out: &mut fmt::Formatter) -> fmt::Result {
        match *self {
            Problem::NoEquals => write!(out, "expected `name = value`"),
            Problem::UnknownKey => write!(out, "there is no such key"),
            Problem::NotSwitch => write!(out, "must be on or off"),
            Problem::NotNumber => write!(out, "must be a whole number"),
            Problem::NotBytes => {
                write!(out, "must be a number of bytes, such as 65536, 64K, 1M or 2G")
            }
            Problem::OutOfRange { min, max } => write!(out, "must lie between {min} and {max}"),
            Problem::NotPowerOfTwo => write!(out, "must be a power of two"),
            Problem::NotRule { number } => write!(
                out,
                "rule {number} is not like 127.0.0.1, 127.0.0.1:6379, [::1]:6379 or :6379"
            ),
            Problem::TooManyRules => write!(out, "holds at most {RULES_MAX_COUNT} rules"),
            Problem::NotPeers => write!(out, "must be any or same-user"),
            Problem::NotSpin => write!(out, "must be latency, balanced or off"),
            Problem::NotLog => write!(out, "must be off, stderr or an absolute path in UTF-8"),
            Problem::LogPathTooLong => {
                write!(out, "the path is longer than {} bytes", LOG_PATH_MAX_BYTES - 1)
            }
            Problem::NotSocketPath => write!(
                out,
                "must be off or an absolute path in UTF-8 of at most {} bytes",
                SOCKET_PATH_MAX_BYTES - 1
            ),
            Problem::FileTooLong => write!(out, "the file is longer than {FILE_MAX_BYTES} bytes"),
            Problem::FileMissing => write!(out, "the file does not exist"),
            Problem::FileUnreadable => write!(out, "the file cannot be read"),
        }
    }
}

/// A problem, and the key that it is about, if it is about one.
#[derive(Clone, Copy)]
pub struct ConfigError {
    pub key: Option<&'static Key>,
    pub problem: Problem,
}

impl fmt::Display for ConfigError {
    fn fmt(&self, out: &mut fmt::Formatter) -> fmt::Result {
        match self.key {
            Some(key) => write!(out, "{}: {}", key.name, self.problem),
            None => write!(out, "{}", self.problem),
        }
    }
}

/// Where a problem was found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Place<'a> {
    Line { path: &'a CStr, number: usize },
    File { path: &'a CStr },
    Environment { name: &'static str },
}

impl fmt::Display for Place<'_> {
    fn fmt(&self, out: &mut fmt::Formatter) -> fmt::Result {
        let mut path_and = |path: &CStr, rest: fmt::Arguments| {
            for chunk in path.to_bytes().utf8_chunks() {
                out.write_str(chunk.valid())?;
                if !chunk.invalid().is_empty() {
                    out.write_str("\u{fffd}")?;
                }
            }
            out.write_fmt(rest)
        };
        match *self {
            Place::Line { path, number } => path_and(path, format_args!(":{number}")),
            Place::File { path } => path_and(path, format_args!("")),
            Place::Environment { name } => out.write_str(name),
        }
    }
}

/// Why a reader brought no text.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NotRead {
    Missing,
    Unreadable,
}

/// Fills a buffer from a file; says how many bytes it put there.
pub type ReadFile<'r> = dyn FnMut(&CStr, &mut [u8]) -> Result<usize, NotRead> + 'r;

impl Default for Config {
    fn default() -> Config {
        Config::DEFAULT
    }
}

impl Config {
    /// How long a wait may watch, in microseconds.
    pub fn watch_us(&self) -> u64 {
        if self.spin == SpinPolicy::Off { 0 } else { self.spin_us }
    }

    /// The configuration in force: the first file that is there, then the environment. `get` looks up an environment
    /// variable; `read` fills the buffer from a file and says how many bytes it put there; the buffer should hold
    /// `FILE_MAX_BYTES` and one more, by which a longer file is known.
    pub fn load<'e>(
        get: &dyn Fn(&str) -> Option<&'e [u8]>,
        read: &mut ReadFile,
        buffer: &mut [u8],
        on_error: &mut dyn FnMut(Place, ConfigError),
    ) -> Config {
        let mut config = Config::DEFAULT;
        for_each_file(get, &mut |path, required| match read(path, buffer) {
            Ok(length) => {
                match buffer.get(..length).filter(|text| text.len() <= FILE_MAX_BYTES) {
                    Some(text) => config.apply_file(text, &mut |number, error| {
                        on_error(Place::Line { path, number }, error);
                    }),
                    None => on_error(Place::File { path }, Problem::FileTooLong.into()),
                }
                true
            }
            Err(NotRead::Missing) => {
                if required {
                    on_error(Place::File { path }, Problem::FileMissing.into());
                }
                false
            }
            Err(NotRead::Unreadable) => {
                on_error(Place::File { path }, Problem::FileUnreadable.into());
                false
            }
        });
        config.apply_env(get, &mut |name, error| on_error(Place::Environment { name }, error));
        config
    }

    /// Applies lines of `name = value`; a `#` at the start of a line or after a blank begins a comment.
    pub fn apply_file(&mut self, text: &[u8], on_error: &mut dyn FnMut(usize, ConfigError)) {
        for (index, line) in text.split(|byte| *byte == b'\n').enumerate() {
            let line = without_comment(line).trim_ascii();
            if line.is_empty() {
                continue;
            }
            let result = match split_once(line, b'=') {
                Some((name, value)) => self.set(name.trim_ascii(), value, Origin::File),
                None => Err(Problem::NoEquals.into()),
            };
            if let Err(error) = result {
                on_error(index + 1, error);
            }
        }
    }

    /// Applies the environment variables of the table.
    pub fn apply_env<'e>(
        &mut self,
        get: &dyn Fn(&str) -> Option<&'e [u8]>,
        on_error: &mut dyn FnMut(&'static str, ConfigError),
    ) {
        for key in &KEYS {
            if let Some(value) = get(key.environment)
                && let Err(error) = self.set(key.name.as_bytes(), value, Origin::Environment)
            {
                on_error(key.environment, error);
            }
        }
    }

    /// Sets one key; on an error it keeps the value that it has.
    pub fn set(&mut self, name: &[u8], value: &[u8], origin: Origin) -> Result<(), ConfigError> {
        for (key, place) in KEYS.iter().zip(0..) {
            if key.name.as_bytes() == name {
                (key.parse)(self, value.trim_ascii())
                    .map_err(|problem| ConfigError { key: Some(key), problem })?;
                if let Some(slot) = self.origins.get_mut::<usize>(place) {
                    *slot = origin;
                }
                return Ok(());
            }
        }
        Err(Problem::UnknownKey.into())
    }

    /// Where the value of `key` came from.
    pub fn origin(&self, key: &Key) -> Origin {
        let mut origins = KEYS.iter().zip(self.origins);
        origins
            .find(|(each, _)| each.name == key.name)
            .map_or(Origin::Default, |(_, origin)| origin)
    }

    /// Whether a connection between these ends may be moved.
    pub fn allows(&self, local: Endpoint, remote: Endpoint) -> bool {
        let listed = |list: &RuleList| list.rules().iter().any(|rule| rule.matches(local, remote));
        self.enabled
            && (self.only.rules().is_empty() || listed(&self.only))
            && !listed(&self.except)
    }

    /// Whether connections over Unix sockets may be moved. Rules name addresses, so that none of them admits one.
    pub fn allows_unix(&self) -> bool {
        self.enabled && self.unix && self.only.rules().is_empty()
    }
}

impl From<Problem> for ConfigError {
    fn from(problem: Problem) -> ConfigError {
        ConfigError { key: None, problem }
    }
}

/// Visits the places where a configuration file may be, until one answers that it was there. The second argument tells
/// that the file was asked for by name, so that it ought to be there.
fn for_each_file<'e>(
    get: &dyn Fn(&str) -> Option<&'e [u8]>,
    visit: &mut dyn FnMut(&CStr, bool) -> bool,
) {
    let set = |name: &str| get(name).filter(|value| !value.is_empty());
    // The base directory specification says to ignore what is not absolute.
    let directory = |name: &str| set(name).filter(|value| value.starts_with(b"/"));
    let mut buffer = [0; FILE_PATH_MAX_BYTES];
    if let Some(path) = set(FILE_ENVIRONMENT) {
        if let Some(path) = join(&mut buffer, path, b"") {
            visit(path, true);
        }
        return;
    }
    let user = match directory("XDG_CONFIG_HOME") {
        Some(parent) => join(&mut buffer, parent, b"/ringlet.conf"),
        None => {
            directory("HOME").and_then(|home| join(&mut buffer, home, b"/.config/ringlet.conf"))
        }
    };
    if !user.is_some_and(|path| visit(path, false)) {
        visit(SYSTEM_FILE, false);
    }
}

/// `first` and `second` as a C string in `buffer`; nothing if they don't fit or hold a zero.
fn join<'b>(buffer: &'b mut [u8], first: &[u8], second: &[u8]) -> Option<&'b CStr> {
    let length = first.len().checked_add(second.len())?;
    let path = buffer.get_mut(..length.checked_add(1)?)?;
    let bytes = first.iter().chain(second).chain(&[0]);
    path.iter_mut().zip(bytes).for_each(|(to, from)| *to = *from);
    CStr::from_bytes_with_nul(path).ok()
}

fn split_once(text: &[u8], separator: u8) -> Option<(&[u8], &[u8])> {
    let at = text.iter().position(|byte| *byte == separator)?;
    Some((text.get(..at)?, text.get(at + 1..)?))
}

fn without_comment(line: &[u8]) -> &[u8] {
    let mut after_blank = true;
    for (at, byte) in line.iter().enumerate() {
        if *byte == b'#' && after_blank {
            return line.get(..at).unwrap_or(line);
        }
        after_blank = byte.is_ascii_whitespace();
    }
    line
}

/// One end of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Endpoint {
    /// IPv6, or IPv4 mapped into it, so that `::ffff:127.0.0.1` and `127.0.0.1` are one address.
    pub address: [u8; 16],
    pub port: u16,
}

impl Endpoint {
    pub fn new(address: IpAddr, port: u16) -> Endpoint {
        Endpoint { address: mapped(address), port }
    }
}

fn mapped(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V4(address) => address.to_ipv6_mapped().octets(),
        IpAddr::V6(address) => address.octets(),
    }
}

/// An address, a port, or both; what is missing matches everything.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Rule {
    pub address: Option<[u8; 16]>,
    pub port: Option<u16>,
}

impl Rule {
    const ANY: Rule = Rule { address: None, port: None };

    fn matches(&self, local: Endpoint, remote: Endpoint) -> bool {
        [local, remote].iter().any(|end| {
            self.address.is_none_or(|address| address == end.address)
                && self.port.is_none_or(|port| port == end.port)
        })
    }

    /// `ADDRESS`, `ADDRESS:PORT` or `:PORT`, where IPv6 before a port stands in brackets and `*` is any.
    fn parse(text: &str) -> Option<Rule> {
        let star = |text: &str| text == "*";
        let (address, port) = if let Some(rest) = text.strip_prefix('[') {
            let (address, rest) = rest.split_once(']')?;
            let port = if rest.is_empty() { "*" } else { rest.strip_prefix(':')? };
            return Some(Rule {
                address: Some(address.parse::<Ipv6Addr>().ok()?.octets()),
                port: Rule::parse_port(port)?,
            });
        } else if let Ok(address) = text.parse::<IpAddr>() {
            return Some(Rule { address: Some(mapped(address)), port: None });
        } else {
            text.split_once(':').unwrap_or((text, "*"))
        };
        // `:` alone says nothing, so it is a slip and not "everything".
        if address.is_empty() && port.is_empty() || text.is_empty() {
            return None;
        }
        let address = if address.is_empty() || star(address) {
            None
        } else {
            Some(mapped(IpAddr::V4(address.parse::<Ipv4Addr>().ok()?)))
        };
        Some(Rule { address, port: Rule::parse_port(port)? })
    }

    fn parse_port(text: &str) -> Option<Option<u16>> {
        match text {
            "*" => Some(None),
            _ if text.bytes().all(|byte| byte.is_ascii_digit()) => {
                text.parse().ok().filter(|port| *port != 0).map(Some)
            }
            _ => None,
        }
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, out: &mut fmt::Formatter) -> fmt::Result {
        match self.address.map(Ipv6Addr::from) {
            None => write!(out, "*")?,
            Some(address) => match address.to_ipv4_mapped() {
                Some(address) => write!(out, "{address}")?,
                None => write!(out, "[{address}]")?,
            },
        }
        match self.port {
            None => write!(out, ":*"),
            Some(port) => write!(out, ":{port}"),
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RuleList {
    rules: [Rule; RULES_MAX_COUNT],
    count: usize,
}

impl RuleList {
    pub const EMPTY: RuleList = RuleList { rules: [Rule::ANY; RULES_MAX_COUNT], count: 0 };

    pub fn rules(&self) -> &[Rule] {
        self.rules.get(..self.count).unwrap_or(&self.rules)
    }
}

/// What watching shared memory may cost.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SpinPolicy {
    Latency,
    Balanced,
    Off,
}

/// Which peers are accepted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PeerPolicy {
    Any,
    SameUser,
}

// WHY so large: without a heap the path lies inside.
#[allow(clippy::large_enum_variant)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LogTarget {
    Off,
    Stderr,
    File(AbsolutePath),
}

/// An absolute path, in UTF-8 and without a zero inside.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AbsolutePath([u8; LOG_PATH_MAX_BYTES]);

impl AbsolutePath {
    const fn of(text: &str) -> AbsolutePath {
        let (mut path, mut at, text) = ([0; LOG_PATH_MAX_BYTES], 0, text.as_bytes());
        while at < text.len() {
            path[at] = text[at];
            at += 1;
        }
        AbsolutePath(path)
    }

    /// Ends at the first zero, of which `parse` leaves at least one.
    pub fn as_c_str(&self) -> &CStr {
        CStr::from_bytes_until_nul(&self.0).unwrap_or(c"")
    }
}

/// How values of a kind are written.
trait Form {
    type Value;
    fn describe(out: &mut fmt::Formatter) -> fmt::Result;
    fn parse(text: &[u8]) -> Result<Self::Value, Problem>;
    fn print(value: &Self::Value, out: &mut fmt::Formatter) -> fmt::Result;
}

struct Switch;

impl Form for Switch {
    type Value = bool;

    fn describe(out: &mut fmt::Formatter) -> fmt::Result {
        write!(out, "on, off")
    }

    fn parse(text: &[u8]) -> Result<bool, Problem> {
        match text {
            b"on" | b"yes" | b"true" | b"1" => Ok(true),
            b"off" | b"no" | b"false" | b"0" => Ok(false),
            _ => Err(Problem::NotSwitch),
        }
    }

    fn print(value: &bool, out: &mut fmt::Formatter) -> fmt::Result {
        out.write_str(if *value { "on" } else { "off" })
    }
}

struct Number<const MIN: u64, const MAX: u64>;

impl<const MIN: u64, const MAX: u64> Form for Number<MIN, MAX> {
    type Value = u64;

    fn describe(out: &mut fmt::Formatter) -> fmt::Result {
        write!(out, "{MIN} to {MAX}")
    }

    fn parse(text: &[u8]) -> Result<u64, Problem> {
        in_range(digits(text).ok_or(Problem::NotNumber)?, MIN, MAX)
    }

    fn print(value: &u64, out: &mut fmt::Formatter) -> fmt::Result {
        write!(out, "{value}")
    }
}

struct Bytes<const MIN: u64, const MAX: u64>;

impl<const MIN: u64, const MAX: u64> Form for Bytes<MIN, MAX> {
    type Value = u64;

    fn describe(out: &mut fmt::Formatter) -> fmt::Result {
        Self::print(&MIN, out)?;
        write!(out, " to ")?;
        Self::print(&MAX, out)
    }

    fn parse(text: &[u8]) -> Result<u64, Problem> {
        let (number, shift) = match text {
            [number @ .., b'K' | b'k'] => (number, 10),
            [number @ .., b'M' | b'm'] => (number, 20),
            [number @ .., b'G' | b'g'] => (number, 30),
            number => (number, 0),
        };
        let number = digits(number).ok_or(Problem::NotBytes)?;
        in_range(number.saturating_mul(1 << shift), MIN, MAX)
    }

    fn print(value: &u64, out: &mut fmt::Formatter) -> fmt::Result {
        let suffixes = [(30, "G"), (20, "M"), (10, "K")];
        match suffixes.iter().find(|(shift, _)| *value != 0 && value.trailing_zeros() >= *shift) {
            Some((shift, suffix)) => write!(out, "{}{suffix}", value >> shift),
            None => write!(out, "{value}"),
        }
    }
}

struct PowerOfTwo<const MIN: u64, const MAX: u64>;

impl<const MIN: u64, const MAX: u64> Form for PowerOfTwo<MIN, MAX> {
    type Value = u64;

    fn describe(out: &mut fmt::Formatter) -> fmt::Result {
        write!(out, "a power of two, ")?;
        Bytes::<MIN, MAX>::describe(out)
    }

    fn parse(text: &[u8]) -> Result<u64, Problem> {
        match Bytes::<MIN, MAX>::parse(text)? {
            value if value.is_power_of_two() => Ok(value),
            _ => Err(Problem::NotPowerOfTwo),
        }
    }

    fn print(value: &u64, out: &mut fmt::Formatter) -> fmt::Result {
        Bytes::<MIN, MAX>::print(value, out)
    }
}

/// Digits only: no sign, no blank. Saturates, since every key's range ends far below.
fn digits(text: &[u8]) -> Option<u64> {
    if text.is_empty() || !text.iter().all(u8::is_ascii_digit) {
        return None;
    }
    let append = |value: u64, digit: &u8| {
        value.saturating_mul(10).saturating_add(u64::from(digit.saturating_sub(b'0')))
    };
    Some(text.iter().fold(0, append))
}

fn in_range(value: u64, min: u64, max: u64) -> Result<u64, Problem> {
    if value < min || value > max { Err(Problem::OutOfRange { min, max }) } else { Ok(value) }
}

struct Rules;

impl Form for Rules {
    type Value = RuleList;

    fn describe(out: &mut fmt::Formatter) -> fmt::Result {
        write!(out, "a list such as 127.0.0.1:6379, [::1]:*, 10.0.0.5, :5432")
    }

    fn parse(text: &[u8]) -> Result<RuleList, Problem> {
        let mut list = RuleList::EMPTY;
        if text.is_empty() {
            return Ok(list);
        }
        for (text, number) in text.split(|byte| *byte == b',').zip(1..) {
            let text = core::str::from_utf8(text.trim_ascii()).ok();
            let rule = text.and_then(Rule::parse).ok_or(Problem::NotRule { number })?;
            *list.rules.get_mut(list.count).ok_or(Problem::TooManyRules)? = rule;
            list.count += 1;
        }
        Ok(list)
    }

    fn print(value: &RuleList, out: &mut fmt::Formatter) -> fmt::Result {
        for (index, rule) in value.rules().iter().enumerate() {
            write!(out, "{}{rule}", if index == 0 { "" } else { ", " })?;
        }
        Ok(())
    }
}

struct Spin;

impl Form for Spin {
    type Value = SpinPolicy;

    fn describe(out: &mut fmt::Formatter) -> fmt::Result {
        write!(out, "latency, balanced, off")
    }

    fn parse(text: &[u8]) -> Result<SpinPolicy, Problem> {
        match text {
            b"latency" => Ok(SpinPolicy::Latency),
            b"balanced" => Ok(SpinPolicy::Balanced),
            b"off" => Ok(SpinPolicy::Off),
            _ => Err(Problem::NotSpin),
        }
    }

    fn print(value: &SpinPolicy, out: &mut fmt::Formatter) -> fmt::Result {
        out.write_str(match value {
            SpinPolicy::Latency => "latency",
            SpinPolicy::Balanced => "balanced",
            SpinPolicy::Off => "off",
        })
    }
}

struct Peers;

impl Form for Peers {
    type Value = PeerPolicy;

    fn describe(out: &mut fmt::Formatter) -> fmt::Result {
        write!(out, "any, same-user")
    }

    fn parse(text: &[u8]) -> Result<PeerPolicy, Problem> {
        match text {
            b"any" => Ok(PeerPolicy::Any),
            b"same-user" => Ok(PeerPolicy::SameUser),
            _ => Err(Problem::NotPeers),
        }
    }

    fn print(value: &PeerPolicy, out: &mut fmt::Formatter) -> fmt::Result {
        out.write_str(match value {
            PeerPolicy::Any => "any",
            PeerPolicy::SameUser => "same-user",
        })
    }
}

fn is_absolute(text: &[u8]) -> bool {
    text.starts_with(b"/") && core::str::from_utf8(text).is_ok() && !text.contains(&0)
}

struct SocketPath;

impl Form for SocketPath {
    type Value = Option<AbsolutePath>;

    fn describe(out: &mut fmt::Formatter) -> fmt::Result {
        write!(out, "off, or an absolute path")
    }

    fn parse(text: &[u8]) -> Result<Option<AbsolutePath>, Problem> {
        if text == b"off" {
            return Ok(None);
        }
        let mut path = [0; LOG_PATH_MAX_BYTES];
        let fits = is_absolute(text) && text.len() < SOCKET_PATH_MAX_BYTES;
        fits.then(|| join(&mut path, text, b"")).flatten().ok_or(Problem::NotSocketPath)?;
        Ok(Some(AbsolutePath(path)))
    }

    fn print(value: &Option<AbsolutePath>, out: &mut fmt::Formatter) -> fmt::Result {
        let path = value.as_ref().map(|path| path.as_c_str().to_str().unwrap_or_default());
        out.write_str(path.unwrap_or("off"))
    }
}

struct Log;

impl Form for Log {
    type Value = LogTarget;

    fn describe(out: &mut fmt::Formatter) -> fmt::Result {
        write!(out, "off, stderr, or an absolute path")
    }

    fn parse(text: &[u8]) -> Result<LogTarget, Problem> {
        match text {
            b"off" => Ok(LogTarget::Off),
            b"stderr" => Ok(LogTarget::Stderr),
            _ if is_absolute(text) => {
                let mut path = [0; LOG_PATH_MAX_BYTES];
                join(&mut path, text, b"").ok_or(Problem::LogPathTooLong)?;
                Ok(LogTarget::File(AbsolutePath(path)))
            }
            _ => Err(Problem::NotLog),
        }
    }

    fn print(value: &LogTarget, out: &mut fmt::Formatter) -> fmt::Result {
        out.write_str(match value {
            LogTarget::Off => "off",
            LogTarget::Stderr => "stderr",
            LogTarget::File(path) => path.as_c_str().to_str().unwrap_or_default(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn value(config: &Config, name: &str) -> String {
        Key::find(name.as_bytes()).unwrap().value(config).to_string()
    }

    fn with(name: &str, text: &str) -> Config {
        let mut config = Config::DEFAULT;
        config
            .set(name.as_bytes(), text.as_bytes(), Origin::Flag)
            .map_err(|e| e.to_string())
            .unwrap();
        config
    }

    fn problem(name: &str, text: &str) -> Problem {
        let mut config = Config::DEFAULT;
        let error = config.set(name.as_bytes(), text.as_bytes(), Origin::Flag).err().unwrap();
        assert_eq!(config, Config::DEFAULT, "an error changes nothing");
        error.problem
    }

    fn end(text: &str) -> Endpoint {
        let end: std::net::SocketAddr = text.parse().unwrap();
        Endpoint::new(end.ip(), end.port())
    }

    #[test]
    fn environment_names_follow_from_the_names() {
        for key in &KEYS {
            assert_eq!(key.environment, format!("RINGLET_{}", key.name.to_uppercase()));
            assert!(key.effect.ends_with('.') && !key.values().to_string().is_empty());
        }
    }

    #[test]
    fn defaults_are_values_that_could_be_written() {
        for key in &KEYS {
            let text = key.value(&Config::DEFAULT).to_string();
            let mut config = Config::DEFAULT;
            assert!(config.set(key.name.as_bytes(), text.as_bytes(), Origin::File).is_ok());
            assert_eq!(key.value(&config).to_string(), text);
            assert_eq!(config.origin(key), Origin::File);
        }
    }

    #[test]
    fn file_sets_values_and_reports_lines() {
        let text = b"# comment\nspin_us = 7 # rest\r\n\n  log=/tmp/a#b\nring_bytes = 3M\nno equals\nnope = 1\n\
            only = 127.0.0.1:1, :2";
        let mut config = Config::DEFAULT;
        let mut errors = Vec::new();
        config.apply_file(text, &mut |line, error| errors.push((line, error.problem)));
        assert_eq!(config.spin_us, 7);
        assert_eq!(value(&config, "log"), "/tmp/a#b");
        assert_eq!(config.ring_bytes, Config::DEFAULT.ring_bytes, "the wrong value is skipped");
        assert_eq!(value(&config, "only"), "127.0.0.1:1, *:2");
        assert_eq!(
            errors,
            [(5, Problem::NotPowerOfTwo), (6, Problem::NoEquals), (7, Problem::UnknownKey)]
        );
    }

    #[test]
    fn values_have_limits() {
        assert_eq!(with("memory_limit_bytes", "2G").memory_limit_bytes, 2 << 30);
        assert_eq!(with("ring_bytes", "64k").ring_bytes, 64 << 10);
        assert!(!with("enabled", " off ").enabled);
        assert_eq!(
            problem("ring_bytes", "32K"),
            Problem::OutOfRange { min: 64 << 10, max: 64 << 20 }
        );
        assert_eq!(problem("spin_us", "1001"), Problem::OutOfRange { min: 0, max: 1000 });
        assert_eq!(problem("spin_us", "+1"), Problem::NotNumber);
        assert_eq!(problem("spin_us", ""), Problem::NotNumber);
        assert_eq!(
            problem("memory_limit_bytes", "99999999999999999999G"),
            Problem::OutOfRange { min: 0, max: 1 << 40 }
        );
        assert_eq!(problem("memory_limit_bytes", "G"), Problem::NotBytes);
        assert_eq!(problem("enabled", "maybe"), Problem::NotSwitch);
        assert_eq!(problem("peers", "friends"), Problem::NotPeers);
        assert_eq!(problem("spin", "on"), Problem::NotSpin);
        assert_eq!(problem("node", "relative"), Problem::NotSocketPath);
        assert_eq!(problem("node", &format!("/{}", "x".repeat(107))), Problem::NotSocketPath);
        assert_eq!(value(&with("node", &format!("/{}", "x".repeat(106))), "node").len(), 107);
        assert_eq!(value(&with("node", "off"), "node"), "off");
        assert_eq!(value(&Config::DEFAULT, "node"), NODE_SOCKET);
        assert_eq!(problem("log", "relative"), Problem::NotLog);
        assert_eq!(problem("log", &format!("/{}", "x".repeat(255))), Problem::LogPathTooLong);
        assert_eq!(value(&with("log", &format!("/{}", "x".repeat(254))), "log").len(), 255);
    }

    #[test]
    fn rules_read_and_match() {
        for (text, printed) in [
            ("127.0.0.1", "127.0.0.1:*"),
            (":5432", "*:5432"),
            ("*", "*:*"),
            ("::1", "[::1]:*"),
            ("[::1]:*", "[::1]:*"),
            ("[fe80::1]:80", "[fe80::1]:80"),
            ("[::ffff:10.0.0.5]:1", "10.0.0.5:1"),
        ] {
            assert_eq!(value(&with("only", text), "only"), printed);
        }
        for text in [
            ":",
            "x",
            "1.2.3",
            ":0",
            ":65536",
            "[::1",
            "[1.2.3.4]:5",
            "[::1]5",
            "a:1",
            ":+1",
            "1.2.3.4:",
        ] {
            assert_eq!(problem("only", text), Problem::NotRule { number: 1 }, "{text}");
        }
        assert_eq!(problem("only", ":1,,:2"), Problem::NotRule { number: 2 });
        assert_eq!(problem("only", &vec![":1"; 17].join(",")), Problem::TooManyRules);
    }

    #[test]
    fn only_admits_and_except_forbids() {
        let (client, server) = (end("127.0.0.1:40000"), end("[::ffff:127.0.0.1]:6379"));
        assert!(Config::DEFAULT.allows(client, server));
        assert!(!with("enabled", "off").allows(client, server));
        for (only, allowed) in
            [("127.0.0.1:6379", true), (":40000", true), ("127.0.0.2:*", false), (":1", false)]
        {
            assert_eq!(with("only", only).allows(client, server), allowed, "only {only}");
            assert_eq!(with("except", only).allows(client, server), !allowed, "except {only}");
        }
        // Address and port must match at the same end.
        let other = end("127.0.0.2:6379");
        assert!(!with("only", "127.0.0.1:6379").allows(client, other));
    }

    /// Loads with these variables and files, and tells what was asked for.
    fn load(
        variables: &[(&str, &str)],
        files: &[(&str, &str)],
    ) -> (Config, Vec<String>, Vec<String>) {
        let mut asked = Vec::new();
        let mut errors = Vec::new();
        let get = |name: &str| {
            variables.iter().find(|(each, _)| *each == name).map(|(_, value)| value.as_bytes())
        };
        let mut read = |path: &CStr, buffer: &mut [u8]| {
            let path = path.to_str().unwrap();
            asked.push(path.to_owned());
            let (_, text) = files.iter().find(|(each, _)| *each == path).ok_or(NotRead::Missing)?;
            let length = text.len().min(buffer.len());
            buffer[..length].copy_from_slice(&text.as_bytes()[..length]);
            Ok(length)
        };
        let mut buffer = vec![0; FILE_MAX_BYTES + 1];
        let config = Config::load(&get, &mut read, &mut buffer, &mut |place, error| {
            errors.push(format!("{place}: {error}"));
        });
        (config, asked, errors)
    }

    #[test]
    fn the_first_file_counts_and_the_environment_overrides_it() {
        let home = ("HOME", "/home/ada");
        let user = ("/home/ada/.config/ringlet.conf", "spin_us = 1\nmove_after = 9\n");
        let system = ("/etc/ringlet.conf", "spin_us = 2");
        let (config, asked, errors) = load(&[home, ("RINGLET_SPIN_US", "3")], &[user, system]);
        assert_eq!((config.spin_us, config.move_after, errors.len()), (3, 9, 0));
        assert_eq!(asked, ["/home/ada/.config/ringlet.conf"]);
        let origin = |name: &str| config.origin(Key::find(name.as_bytes()).unwrap());
        assert_eq!(origin("spin_us"), Origin::Environment);
        assert_eq!(origin("move_after"), Origin::File);
        assert_eq!(origin("log"), Origin::Default);

        let (config, asked, _) = load(&[home, ("XDG_CONFIG_HOME", "/x")], &[user, system]);
        assert_eq!(config.spin_us, 2);
        assert_eq!(asked, ["/x/ringlet.conf", "/etc/ringlet.conf"]);

        let (config, _, errors) = load(&[home, ("RINGLET_CONFIG", "/gone")], &[user, system]);
        assert_eq!(config, Config::DEFAULT);
        assert_eq!(errors, ["/gone: the file does not exist"]);

        let long = "#".repeat(FILE_MAX_BYTES + 1);
        let (_, _, errors) = load(&[], &[("/etc/ringlet.conf", &long)]);
        assert_eq!(errors, ["/etc/ringlet.conf: the file is longer than 16384 bytes"]);

        let (_, _, errors) =
            load(&[("RINGLET_PEERS", "x")], &[("/etc/ringlet.conf", "\nspin_us=-1")]);
        assert_eq!(
            errors,
            [
                "/etc/ringlet.conf:2: spin_us: must be a whole number",
                "RINGLET_PEERS: peers: must be any or same-user",
            ]
        );
    }

    proptest! {
        /// Any bytes as a file: no panic, and each line yields at most one error.
        #[test]
        fn any_file_is_survived(text in proptest::collection::vec(any::<u8>(), 0..600)) {
            let lines = text.split(|byte| *byte == b'\n').count();
            let mut errors = 0;
            Config::default().apply_file(&text, &mut |line, _| {
                assert!((1..=lines).contains(&line));
                errors += 1;
            });
            prop_assert!(errors <= lines);
        }

        /// Nearly right values for every key: no panic, and what is accepted prints as something that reads the same.
        #[test]
        fn accepted_values_round_trip(
            key in 0..KEY_COUNT,
            text in prop_oneof![
                "[0-9.:*,\\[\\] KMG]{0,40}",
                "(on|off|any|same-user|stderr|/[a-z/# é]{0,300})",
                "((127\\.0\\.0\\.[0-9]{1,3}|\\[::[0-9a-f]{1,4}\\])?:([0-9]{1,5}|\\*),? ?){1,18}",
                "\\PC{0,30}",
            ],
        ) {
            let key = &KEYS[key];
            let mut first = Config::DEFAULT;
            if first.set(key.name.as_bytes(), text.as_bytes(), Origin::Flag).is_ok() {
                let printed = key.value(&first).to_string();
                let mut second = Config::DEFAULT;
                let result = second.set(key.name.as_bytes(), printed.as_bytes(), Origin::Flag);
                prop_assert!(result.is_ok(), "{printed}");
                prop_assert_eq!(first, second);
            } else {
                prop_assert_eq!(first, Config::DEFAULT);
            }
        }
    }
}
