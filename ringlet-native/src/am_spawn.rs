//! How a program for AMUDP that nobody has launched becomes its own launcher: it executes `ringlet am-run`.
#![allow(non_snake_case, non_upper_case_globals)] // the names of the interface

use crate::am;
use core::ffi::{CStr, c_char, c_int, c_void};
use std::ffi::{CString, OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;
use std::ptr::null;

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
pub static AMUDP_Spawnfn_Desc: [Description; 3] = [
    Description {
        letter: b'S' as c_char,
        text: c"on the hosts of SSH_SERVERS, of which there may be only this one".as_ptr(),
        function: Some(AMUDP_SPMDSshSpawn),
    },
    Description {
        letter: b'L' as c_char,
        text: c"on this host".as_ptr(),
        function: Some(AMUDP_SPMDLocalSpawn),
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
        // SAFETY: as above.
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
        // SAFETY: as above.
        unsafe { *(*self.values).add(left) = std::ptr::null_mut() };
        // SAFETY: as above.
        unsafe { *self.count = left as c_int };
    }
}

fn number(text: Option<&CStr>) -> Option<c_int> {
    text?.to_str().ok()?.parse().ok().filter(|number| *number > 0)
}

fn by_letter(text: Option<&CStr>) -> Option<Spawn> {
    let [letter] = *text?.to_bytes() else { return None };
    let found =
        AMUDP_Spawnfn_Desc.iter().find(|each| each.letter as u8 == letter.to_ascii_uppercase())?;
    found.function
}

/// Takes the number of processes and the spawn function from the arguments of a process that `ringlet am-run` has started, if they are there, and are
/// to be (`size`).
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

/// Does not return if processes were asked for and could be started.
pub fn as_master(arguments: Arguments, processes: c_int, spawn: Option<Spawn>) -> Master {
    let mut taken = 1;
    let mut next = || {
        taken += 1;
        arguments.get(taken - 1)
    };
    let processes = if processes > 0 { Some(processes) } else { number(next()) };
    let spawn = spawn.or_else(|| by_letter(next()));
    let (Some(processes), Some(spawn)) = (processes, spawn) else { return Master::JobOfOne };
    arguments.remove(taken - 1);
    let ours = AMUDP_Spawnfn_Desc
        .iter()
        .any(|each| each.function.is_some_and(|each| std::ptr::fn_addr_eq(each, spawn)));
    if !ours {
        am::refused(
            "AMUDP_SPMDStartup",
            "a spawn function of the program's own is not called: use those of AMUDP_Spawnfn_Desc",
        );
        return Master::Failed;
    }
    if arguments.get(0).is_none() {
        am::refused(
            "AMUDP_SPMDStartup",
            "other processes are started by main's arguments, which are not given",
        );
        return Master::Failed;
    }
    // SAFETY: by contract of `Arguments::new`: they are there.
    let (count, values) = unsafe { (*arguments.count, *arguments.values) };
    spawn(processes, count, values, std::ptr::null_mut());
    Master::Failed
}

/// A variable of AMUDP's, by any of its names.
fn setting(name: &str) -> Option<OsString> {
    ["GASNET_", "AMUDP_", ""].iter().find_map(|prefix| std::env::var_os(format!("{prefix}{name}")))
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

/// Executes the launcher; returns 0 if that fails.
#[unsafe(no_mangle)]
pub extern "C" fn AMUDP_SPMDLocalSpawn(
    processes: c_int,
    argc: c_int,
    argv: *mut *mut c_char,
    environment: *mut *mut c_char,
) -> c_int {
    if argc < 1 || argv.is_null() {
        return 0;
    }
    // SAFETY: so many C strings, as the program says.
    let text = |at| OsStr::from_bytes(unsafe { CStr::from_ptr(*argv.add(at)) }.to_bytes());
    let mut command = Command::new(ringlet());
    command.args(["am-run", "-n", &processes.to_string(), "--"]).args((0..argc as usize).map(text));
    command.env(STRIPPED_ENVIRONMENT, "1");
    let mut at = 0;
    // SAFETY: a list of C strings that a null ends, as the program says.
    while !environment.is_null() && unsafe { !(*environment.add(at)).is_null() } {
        // SAFETY: as above.
        let each = unsafe { CStr::from_ptr(*environment.add(at)) };
        let mut parts = each.to_bytes().splitn(2, |byte| *byte == b'=').map(OsStr::from_bytes);
        if let (Some(name), Some(value)) = (parts.next(), parts.next()) {
            command.env(name, value);
        }
        at += 1;
    }
    let error = command.exec();
    am::refused(
        "AMUDP_SPMDLocalSpawn",
        &format!("cannot execute {}: {error}", ringlet().display()),
    );
    0
}

/// Every process on the host that SSH_SERVERS names for it. More than this host's own names are refused.
#[unsafe(no_mangle)]
pub extern "C" fn AMUDP_SPMDSshSpawn(
    processes: c_int,
    argc: c_int,
    argv: *mut *mut c_char,
    environment: *mut *mut c_char,
) -> c_int {
    let servers = setting("SSH_SERVERS").unwrap_or_default();
    let servers = servers.to_string_lossy();
    let names: Vec<&str> = servers
        .split([' ', ',', '/', ';', ':', '\t', '\n'])
        .filter(|name| !name.is_empty())
        .collect();
    let asked = processes.max(0) as usize;
    if names.len() < asked {
        let what = format!(
            "SSH_SERVERS names {} hosts for {asked} processes; AMUDP_SPAWNFN=L starts them here",
            names.len()
        );
        am::refused("AMUDP_SPMDSshSpawn", &what);
        return 0;
    }
    if let Some(other) = names[..asked].iter().find(|name| !is_here(name)) {
        let what = format!("{other} is another host: all processes are started on this one");
        am::refused("AMUDP_SPMDSshSpawn", &what);
        return 0;
    }
    AMUDP_SPMDLocalSpawn(processes, argc, argv, environment)
}

fn is_here(name: &str) -> bool {
    let mut own = [0u8; 256];
    // SAFETY: valid for its length, less a zero at the end.
    unsafe { libc::gethostname(own.as_mut_ptr().cast(), own.len() - 1) };
    let own = CString::from(CStr::from_bytes_until_nul(&own).unwrap_or_default());
    let first = |name: &str| name.split('.').next().unwrap_or_default().to_ascii_lowercase();
    name == "localhost"
        || name.starts_with("127.")
        || own.to_str().is_ok_and(|own| {
            own.eq_ignore_ascii_case(name) || first(own) == *name.to_ascii_lowercase()
        })
}
