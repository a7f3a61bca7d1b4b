//! How a program for AMUDP that nobody has launched becomes its own launcher: it executes `ringlet am-run`, which starts its processes here. Or a
//! spawn function has started them first, anywhere; then they come to it by themselves (`active_message::invitation`).
#![allow(non_snake_case, non_upper_case_globals)] // the names of the interface

use crate::am;
use core::ffi::{CStr, c_char, c_int, c_void};
use ringlet_messages::active_message::invitation::{self, new_secret, secret_to_text};
use rustix::io::{FdFlags, fcntl_setfd};
use std::ffi::{CString, OsStr};
use std::io::{self, Write};
use std::net::TcpListener;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;
use std::ptr::null;
use std::sync::atomic::{AtomicBool, Ordering};

/// AMUDP's type of what makes the processes: their number, the arguments of each, and more for its environment.
pub type Spawn = extern "C" fn(c_int, c_int, *mut *mut c_char, *mut *mut c_char) -> c_int;

/// `amudp_spawnfn_desc_t`.
#[repr(C)]
pub struct Description {
    letter: c_char,
    text: *const c_char,
    function: Option<Spawn>,
}
// SAFETY: constants.
unsafe impl Sync for Description {}

#[unsafe(no_mangle)]
pub static AMUDP_Spawnfn_Desc: [Description; 4] = [
    Description {
        letter: b'S' as c_char,
        text: c"on the hosts of SSH_SERVERS, by ssh".as_ptr(),
        function: Some(AMUDP_SPMDSshSpawn),
    },
    Description {
        letter: b'L' as c_char,
        text: c"on this host".as_ptr(),
        function: Some(AMUDP_SPMDLocalSpawn),
    },
    Description {
        letter: b'C' as c_char,
        text: c"by the command CSPAWN_CMD".as_ptr(),
        function: Some(AMUDP_SPMDCustomSpawn),
    },
    Description { letter: 0, text: null(), function: None },
];

/// Set for processes whose arguments are the program's own: nothing before them is for the launcher.
const STRIPPED_ENVIRONMENT: &str = "RINGLET_AM_STRIPPED";

/// Where main's arguments are; or nowhere.
#[derive(Clone, Copy)]
pub struct Arguments {
    count: *mut c_int,
    values: *mut *mut *mut c_char,
}

impl Arguments {
    /// # Safety
    /// Null, or a count and as many C strings, which outlive this and are the program's to change.
    pub unsafe fn new(count: *mut c_int, values: *mut *mut *mut c_char) -> Arguments {
        Arguments { count, values }
    }

    fn count(self) -> usize {
        if self.count.is_null() || self.values.is_null() {
            return 0;
        }
        // SAFETY: by contract of `new`.
        if unsafe { *self.values }.is_null() { 0 } else { unsafe { *self.count }.max(0) as usize }
    }

    fn get(self, at: usize) -> Option<&'static CStr> {
        if at >= self.count() {
            return None;
        }
        // SAFETY: by contract of `new`.
        let value = unsafe { *(*self.values).add(at) };
        // SAFETY: by contract of `new`: below the count each is null or a C string.
        (!value.is_null()).then(|| unsafe { CStr::from_ptr(value) })
    }

    /// Those behind the program's name move up by so many.
    fn remove(self, many: usize) {
        let left = self.count() - many;
        if many == 0 {
            return;
        }
        for at in 1..left {
            // SAFETY: by contract of `new`; below the count.
            unsafe { *(*self.values).add(at) = *(*self.values).add(at + many) };
        }
        // SAFETY: by contract of `new`: `left` is at most the count, where the null stands.
        unsafe { *(*self.values).add(left) = std::ptr::null_mut() };
        // SAFETY: by contract of `new`: the program's count, ours to change.
        unsafe { *self.count = left as c_int };
    }
}

fn number(text: Option<&CStr>) -> Option<c_int> {
    text?.to_str().ok()?.parse().ok().filter(|number| *number > 0)
}

fn by_letter(text: Option<&CStr>) -> Option<Spawn> {
    let [letter] = *text?.to_bytes() else { return None };
    of_letter(letter)
}

/// SPAWNFN; where that is not set, by ssh if there are hosts for it.
fn by_setting() -> Option<Spawn> {
    match setting("SPAWNFN") {
        Some(name) => of_letter(*name.as_bytes().first()?),
        None => setting("SSH_SERVERS").map(|_| AMUDP_SPMDSshSpawn as Spawn),
    }
}

fn of_letter(letter: u8) -> Option<Spawn> {
    let found =
        AMUDP_Spawnfn_Desc.iter().find(|each| each.letter as u8 == letter.to_ascii_uppercase())?;
    found.function
}

/// Takes the number of processes and the spawn function from the arguments of a process of a job, if they are there, and are to be (`size`).
pub fn strip(arguments: Arguments, size: Option<usize>) {
    let own = std::env::var_os(STRIPPED_ENVIRONMENT).is_some();
    // SAFETY: what else the program does with its environment it does before or behind its startup.
    unsafe { std::env::remove_var(STRIPPED_ENVIRONMENT) };
    let named = size.is_some_and(|size| number(arguments.get(1)) == Some(size as c_int))
        && by_letter(arguments.get(2)).is_some();
    if named && !own {
        arguments.remove(2);
    }
}

pub enum Master {
    /// Nobody asks for more.
    JobOfOne,
    Failed,
}

/// The spawn functions are called within AMUDP_SPMDStartup only.
static SPAWNING: AtomicBool = AtomicBool::new(false);

/// Does not return if processes were asked for and could be started.
pub fn as_master(arguments: Arguments, processes: c_int, spawn: Option<Spawn>) -> Master {
    let mut taken = 0;
    let processes = if processes > 0 {
        Some(processes)
    } else {
        taken += 1;
        number(arguments.get(taken))
    };
    let named = if spawn.is_none() { by_letter(arguments.get(taken + 1)) } else { None };
    taken += named.is_some() as usize;
    let spawn = spawn.or(named).or_else(by_setting);
    let (Some(processes), Some(spawn)) = (processes, spawn) else { return Master::JobOfOne };
    arguments.remove(taken);
    if arguments.get(0).is_none() {
        am::refused(
            "AMUDP_SPMDStartup",
            "other processes are started by main's arguments, which are not given",
        );
        return Master::Failed;
    }
    // SAFETY: by contract of `Arguments::new`: they are there.
    let (count, values) = unsafe { (*arguments.count, *arguments.values) };
    let mut launcher = Command::new(ringlet());
    launcher.args(["am-run", "-n", &processes.to_string()]);
    let is = |function: Spawn| std::ptr::fn_addr_eq(function, spawn);
    let is_local = is(AMUDP_SPMDLocalSpawn) || is(AMUDP_SPMDSshSpawn) && are_here(processes);
    // (Who becomes the launcher reaps what is started, however the program has done until now.)
    // SAFETY: plain data.
    let mut reaps: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: no handler; and room for what was there.
    unsafe { libc::sigaction(libc::SIGCHLD, &std::mem::zeroed(), &mut reaps) };
    // SAFETY: what was there.
    let reap_as_before = || unsafe { libc::sigaction(libc::SIGCHLD, &reaps, std::ptr::null_mut()) };
    let listener = if is_local {
        launcher.env(STRIPPED_ENVIRONMENT, "1");
        None
    } else {
        match invite(processes, spawn, count, values) {
            Ok((listener, secret)) => {
                launcher.arg("--listener").arg(listener.as_raw_fd().to_string());
                launcher.env("RINGLET_AM_SECRET", secret);
                Some(listener)
            }
            Err(error) => {
                reap_as_before();
                am::refused("AMUDP_SPMDStartup", &error.to_string());
                return Master::Failed;
            }
        }
    };
    // SAFETY: so many C strings, as the program says.
    let text = |at| OsStr::from_bytes(unsafe { CStr::from_ptr(*values.add(at)) }.to_bytes());
    launcher.arg("--").args((0..count as usize).map(text));
    let error = launcher.exec();
    drop(listener);
    reap_as_before();
    am::refused("AMUDP_SPMDStartup", &format!("cannot execute {}: {error}", ringlet().display()));
    Master::Failed
}

/// Calls the spawn function. Its processes come to the listener, with the secret.
fn invite(
    processes: c_int,
    spawn: Spawn,
    count: c_int,
    values: *mut *mut c_char,
) -> io::Result<(TcpListener, String)> {
    let master = setting("MASTERIP").filter(|ip| !ip.is_empty());
    let listener = match master.as_deref().map(|ip| TcpListener::bind((ip, 0))) {
        Some(Ok(listener)) => listener,
        // (It may be that of who translates addresses before us.)
        _ => TcpListener::bind("[::]:0").or_else(|_| TcpListener::bind("0.0.0.0:0"))?,
    };
    let host = master.unwrap_or_else(host_name);
    let host = if host.contains(':') { format!("[{host}]") } else { host };
    let (port, secret) = (listener.local_addr()?.port(), secret_to_text(&new_secret()?));
    let given = [
        (invitation::ENVIRONMENT, format!("{host}:{port},{secret}")),
        (STRIPPED_ENVIRONMENT, "1".into()),
    ];
    let text = |(name, value): &(&str, String)| CString::new(format!("{name}={value}"));
    let texts: Result<Vec<CString>, _> = given.iter().map(text).collect();
    let texts = texts.map_err(|_| io::Error::other("MASTERIP is no address"))?;
    let mut environment: Vec<_> = texts.iter().map(|text| text.as_ptr().cast_mut()).collect();
    environment.push(std::ptr::null_mut());
    // WHY in our own environment too: what a spawn function starts without that which it is given would be a launcher again, and so would what that
    // starts, without end.
    for (name, value) in &given {
        // SAFETY: what else the program does with its environment it does before or behind its startup.
        unsafe { std::env::set_var(name, value) };
    }
    SPAWNING.store(true, Ordering::Relaxed);
    let made = spawn(processes, count, values, environment.as_mut_ptr());
    SPAWNING.store(false, Ordering::Relaxed);
    for (name, _) in &given {
        // SAFETY: the program is still in its startup, so nobody else uses the environment.
        unsafe { std::env::remove_var(name) };
    }
    if made == 0 {
        return Err(io::Error::other("the spawn function has failed"));
    }
    // Ours until now, and that of who we become.
    fcntl_setfd(&listener, FdFlags::empty())?;
    Ok((listener, secret))
}

/// A variable of AMUDP's, by any of its names.
pub fn setting(name: &str) -> Option<String> {
    let found = |prefix: &&str| std::env::var_os(format!("{prefix}{name}"));
    let found = ["GASNET_", "AMUDP_", ""].iter().find_map(found);
    found.map(|value| value.to_string_lossy().into_owned())
}

/// The command that belongs to this library: of the same installation or build, else that of PATH.
fn ringlet() -> PathBuf {
    // SAFETY: plain data.
    let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
    // SAFETY: a function of ours (data may have been copied into the program); the name it gives lives as long as the library.
    let known =
        unsafe { libc::dladdr(ringlet as fn() -> PathBuf as *const c_void, &mut info) } != 0;
    let beside = |path: &CStr| {
        let directory = PathBuf::from(OsStr::from_bytes(path.to_bytes())).parent()?.to_path_buf();
        let places = [directory.join("../bin/ringlet"), directory.join("ringlet")];
        places.into_iter().find(|path| path.is_file())
    };
    // SAFETY: a C string, if there is one.
    let path =
        (known && !info.dli_fname.is_null()).then(|| unsafe { CStr::from_ptr(info.dli_fname) });
    path.and_then(beside).unwrap_or_else(|| "ringlet".into())
}

/// What a spawn function is given: the program's arguments, and more for its environment.
struct Given {
    arguments: Vec<String>,
    environment: Vec<String>,
}

/// A list of C strings; `None` if one is not UTF-8.
///
/// # Safety
/// Null, or such a list, which a null ends if `most` does not.
unsafe fn strings(list: *mut *mut c_char, most: usize) -> Option<Vec<String>> {
    let mut found = Vec::new();
    // SAFETY: by contract.
    while !list.is_null() && found.len() < most && unsafe { !(*list.add(found.len())).is_null() } {
        // SAFETY: by contract, one that is not null is a C string.
        let each = unsafe { CStr::from_ptr(*list.add(found.len())) };
        found.push(each.to_str().ok()?.to_owned());
    }
    Some(found)
}

impl Given {
    /// # Safety
    /// As a spawn function is called: so many arguments, and a list that a null ends.
    unsafe fn new(
        name: &str,
        argc: c_int,
        argv: *mut *mut c_char,
        environment: *mut *mut c_char,
    ) -> Option<Given> {
        if !SPAWNING.load(Ordering::Relaxed) {
            am::refused(name, "spawn functions are called by AMUDP_SPMDStartup");
            return None;
        }
        // SAFETY: by contract.
        let lists =
            unsafe { [strings(argv, argc.max(0) as usize), strings(environment, usize::MAX)] };
        match lists {
            [Some(arguments), Some(environment)] if !arguments.is_empty() => {
                Some(Given { arguments, environment })
            }
            _ => {
                am::refused(name, "the program's arguments are to be UTF-8");
                None
            }
        }
    }

    /// For a shell: what each process is to do. `environment` is how it gets its own.
    fn command(&self, environment: &[String]) -> String {
        let env = setting("ENV_CMD").unwrap_or_else(|| "env".into());
        let words =
            |list: &[String]| list.iter().map(|word| quoted(word)).collect::<Vec<_>>().join(" ");
        // (What has an equals sign is a variable to `env`.)
        let has_sign = self.arguments[0].contains('=');
        let by = if has_sign { "sh -c 'exec \"$0\" \"$@\"' " } else { "" };
        format!("exec {env} {} {by}{}", words(environment), words(&self.arguments))
    }

    /// The secret apart from the rest of the environment, if it is there.
    fn secret_apart(&self) -> (Vec<String>, Option<String>) {
        let begins = format!("{}=", invitation::ENVIRONMENT);
        let mut secret = None;
        let apart = |each: &String| match each.strip_prefix(&begins).and_then(invitation::apart) {
            Some((rest, found)) => {
                secret = Some(found.to_owned());
                format!("{begins}{rest}")
            }
            None => each.clone(),
        };
        (self.environment.iter().map(apart).collect(), secret)
    }
}

/// One word to a shell, whatever is in it.
fn quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

/// Hosts, as AMUDP's variables list them.
fn hosts(list: &str) -> Vec<&str> {
    list.split([' ', ',', '/', ';', ':', '\t', '\n']).filter(|name| !name.is_empty()).collect()
}

fn spawned(name: &str, made: io::Result<()>) -> c_int {
    match made {
        Ok(()) => 1,
        Err(error) => {
            am::refused(name, &error.to_string());
            0
        }
    }
}

/// On this host.
#[unsafe(no_mangle)]
pub extern "C" fn AMUDP_SPMDLocalSpawn(
    processes: c_int,
    argc: c_int,
    argv: *mut *mut c_char,
    environment: *mut *mut c_char,
) -> c_int {
    let name = "AMUDP_SPMDLocalSpawn";
    // SAFETY: as a spawn function is called.
    let Some(given) = (unsafe { Given::new(name, argc, argv, environment) }) else { return 0 };
    let start = |_| {
        let mut command = Command::new(&given.arguments[0]);
        command.args(&given.arguments[1..]);
        command.envs(given.environment.iter().filter_map(|each| each.split_once('=')));
        // (The launcher reaps it.)
        command.spawn().map(drop)
    };
    spawned(name, (0..processes).try_for_each(start))
}

/// Are the first so many hosts of SSH_SERVERS this one, which needs no ssh unless the program says which?
fn are_here(processes: c_int) -> bool {
    let servers = setting("SSH_SERVERS").unwrap_or_default();
    let names = hosts(&servers);
    let asked = processes.max(0) as usize;
    setting("SSH_CMD").is_none()
        && names.len() >= asked
        && names[..asked].iter().all(|name| is_here(name))
}

/// One on each of the first hosts of SSH_SERVERS.
#[unsafe(no_mangle)]
pub extern "C" fn AMUDP_SPMDSshSpawn(
    processes: c_int,
    argc: c_int,
    argv: *mut *mut c_char,
    environment: *mut *mut c_char,
) -> c_int {
    let name = "AMUDP_SPMDSshSpawn";
    // SAFETY: as a spawn function is called.
    let Some(given) = (unsafe { Given::new(name, argc, argv, environment) }) else { return 0 };
    spawned(name, by_ssh(&given, processes.max(0) as usize))
}

fn by_ssh(given: &Given, processes: usize) -> io::Result<()> {
    let servers = setting("SSH_SERVERS").unwrap_or_default();
    let names = first_hosts("SSH_SERVERS", &servers, processes)?;
    let directory = match setting("SSH_REMOTE_PATH") {
        Some(path) => path,
        None => std::env::current_dir()?.to_string_lossy().into_owned(),
    };
    let client = setting("SSH_CMD").unwrap_or_else(|| "ssh".into());
    let options = setting("SSH_OPTIONS").unwrap_or_default();
    let (environment, secret) = given.secret_apart();
    let remote = format!("cd {} && {}", quoted(&directory), given.command(&environment));
    for host in names {
        let mut shell = Command::new("/bin/sh");
        shell.args(["-c", &format!("exec {client} {options} \"$0\" \"$1\""), host, &remote]);
        // (A socket: who writes to a pipe that nobody reads any more gets a signal.)
        let (mut input, theirs) = UnixStream::pair()?;
        shell.stdin(OwnedFd::from(theirs)).spawn()?;
        drop(shell);
        if let Some(secret) = &secret {
            // Who does not read it fails by that.
            let _ = writeln!(input, "{secret}");
        }
    }
    Ok(())
}

fn first_hosts<'a>(variable: &str, list: &'a str, processes: usize) -> io::Result<Vec<&'a str>> {
    let mut names = hosts(list);
    if names.len() < processes {
        let what = format!("{variable} names {} hosts for {processes} processes", names.len());
        return Err(io::Error::other(what));
    }
    names.truncate(processes);
    // (To ssh, and others, it would be an option, which may be a command.)
    match names.iter().find(|name| name.starts_with('-')) {
        Some(name) => Err(io::Error::other(format!("{variable}: {name} is no host"))),
        None => Ok(names),
    }
}

/// By the command CSPAWN_CMD, which starts them all.
#[unsafe(no_mangle)]
pub extern "C" fn AMUDP_SPMDCustomSpawn(
    processes: c_int,
    argc: c_int,
    argv: *mut *mut c_char,
    environment: *mut *mut c_char,
) -> c_int {
    let name = "AMUDP_SPMDCustomSpawn";
    // SAFETY: as a spawn function is called.
    let Some(given) = (unsafe { Given::new(name, argc, argv, environment) }) else { return 0 };
    spawned(name, by_command(&given, processes.max(0) as usize))
}

fn by_command(given: &Given, processes: usize) -> io::Result<()> {
    let template = setting("CSPAWN_CMD").filter(|command| !command.is_empty());
    let template = template.ok_or_else(|| io::Error::other("CSPAWN_CMD is not set"))?;
    let servers = setting("CSPAWN_SERVERS").unwrap_or_default();
    let mut command = String::new();
    let mut rest = template.chars();
    while let Some(next) = rest.next() {
        let letter = if next == '%' { rest.next() } else { None };
        match letter.map(|letter| letter.to_ascii_uppercase()) {
            None if next == '%' => {}
            None => command.push(next),
            Some('N') => command += &processes.to_string(),
            Some('C') => {
                command += &format!("/bin/sh -c {}", quoted(&given.command(&given.environment)))
            }
            Some('D') => command += &std::env::current_dir()?.to_string_lossy(),
            Some('M') => command += &first_hosts("CSPAWN_SERVERS", &servers, processes)?.join(" "),
            Some('P') => command += &given.arguments[0],
            Some('%') => command.push('%'),
            Some(_) => {}
        }
    }
    // (What it starts by another way than %C has the arguments that it is given there. The launcher reaps it.)
    Command::new("/bin/sh")
        .args(["-c", &command])
        .env_remove(STRIPPED_ENVIRONMENT)
        .spawn()
        .map(drop)
}

pub fn host_name() -> String {
    let mut own = [0u8; 256];
    // SAFETY: valid for its length, less a zero at the end.
    unsafe { libc::gethostname(own.as_mut_ptr().cast(), own.len() - 1) };
    let own = CStr::from_bytes_until_nul(&own).unwrap_or_default();
    own.to_string_lossy().into_owned()
}

fn is_here(name: &str) -> bool {
    let own = host_name();
    let first = |name: &str| name.split('.').next().unwrap_or_default().to_ascii_lowercase();
    name == "localhost"
        || name.starts_with("127.")
        || own.eq_ignore_ascii_case(name)
        || first(&own) == *name.to_ascii_lowercase()
}
