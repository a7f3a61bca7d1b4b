//! `ringlet run`: becomes the program, with the library preloaded.

use std::env;
use std::ffi::{CString, NulError, OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::ExitCode;

use nix::errno::Errno;

use crate::adapter;
use ringlet_programs::preload::{library, preload, unload};
use ringlet_programs::program::{self, NotFound, Reach};
use ringlet_programs::settings::{Environment, Flags, Settings, set_variable};

/// As env(1), timeout(1) and their kin have it: what they themselves got wrong, what cannot be run, what is not there.
pub const EXIT_OURS: u8 = 125;
const EXIT_NOT_EXECUTABLE: u8 = 126;
const EXIT_MISSING: u8 = 127;

/// Run a program with its TCP connections to other ringlet programs in shared memory
///
/// The program takes this process's place, so its pid, signals, standard streams and exit status are its own. Whatever it
/// starts is run in the same way. A program that cannot be reached (static, set-user-ID, another architecture) runs
/// as it is, and ringlet says so.
#[derive(clap::Args)]
#[command(
    after_help = "Exit status: the program's own; 125 if ringlet itself fails, 126 if the program cannot \
                        be executed, 127 if it is not found."
)]
pub struct RunArgs {
    /// Don't say that the program cannot be reached or that the configuration has errors
    #[arg(short, long)]
    quiet: bool,
    #[command(flatten)]
    flags: Flags,
    /// Give each end of a connection a segment of its own, kept in step by an adapter process that this starts, by this seed (see `ringlet adapter`):
    /// both programs name the same
    #[arg(long, value_name = "SEED")]
    mirror: Option<u32>,
    /// The same over what carries between two hosts, both in the adapter's process (see its --hosts)
    #[arg(long, value_name = "SEED", conflicts_with = "mirror")]
    hosts: Option<u32>,
    /// The program, looked for in PATH, and its arguments
    #[arg(required = true, trailing_var_arg = true)]
    #[arg(value_names = ["PROGRAM", "ARGS"], value_hint = clap::ValueHint::CommandWithArguments)]
    program: Vec<OsString>,
}

pub fn run(args: RunArgs) -> anyhow::Result<ExitCode> {
    let name = &args.program[0];
    let path = match program::find(name, env::var_os("PATH").as_deref()) {
        Ok(path) => path,
        Err(NotFound::Missing) => {
            eprintln!("ringlet: {}: no such program", name.display());
            return Ok(ExitCode::from(EXIT_MISSING));
        }
        Err(NotFound::NotExecutable) => {
            eprintln!("ringlet: {}: not an executable file", name.display());
            return Ok(ExitCode::from(EXIT_NOT_EXECUTABLE));
        }
    };
    let mut environment: Environment = env::vars_os().collect();
    let rest: Vec<&OsStr> = args.program[1..].iter().map(OsString::as_os_str).collect();
    let reach = program::inspect(&path, &rest);
    if let Reach::Unreached(why) | Reach::ChildrenOnly(why) = &reach
        && !args.quiet
    {
        let name = name.display();
        eprintln!("ringlet: {name} runs on the kernel's TCP, out of ringlet's reach: {why}.");
    }
    if matches!(reach, Reach::Unreached(_)) {
        // A ringlet program may be what starts it.
        unload(&mut environment);
    } else {
        args.flags.apply(&mut environment);
        if let Some(seed) = args.mirror.or(args.hosts) {
            let number = adapter::start_for_program(seed, args.hosts.is_some())?;
            set_variable(&mut environment, adapter::ENVIRONMENT, number.to_string().into());
        }
        preload(&mut environment, &library()?)?;
        if !args.quiet {
            for problem in Settings::load(environment.clone(), &Flags::default()).problems {
                eprintln!("ringlet: {problem}");
            }
        }
    }
    let error = exec(&path, &args.program, &environment)?;
    let found = if error == Errno::ENOENT { "; its interpreter is missing" } else { "" };
    eprintln!("ringlet: {}: {}{found}", name.display(), error.desc());
    Ok(ExitCode::from(if error == Errno::ENOENT { EXIT_MISSING } else { EXIT_NOT_EXECUTABLE }))
}

/// Replaces this process; returns only if it cannot.
fn exec(
    path: &Path,
    arguments: &[OsString],
    environment: &[(OsString, OsString)],
) -> Result<Errno, NulError> {
    let c_string = |text: &OsStr| CString::new(text.as_bytes());
    let c_path = c_string(path.as_os_str())?;
    let arguments: Vec<_> =
        arguments.iter().map(|each| c_string(each)).collect::<Result<_, _>>()?;
    let joined = environment.iter().map(|(name, value)| {
        let mut text = name.clone();
        text.push("=");
        text.push(value);
        c_string(&text)
    });
    let environment = joined.collect::<Result<Vec<_>, _>>()?;
    // WHY not std's Command: it resets the signal mask and the disposition of SIGPIPE, which are the program's own.
    let Err(error) = nix::unistd::execve(&c_path, &arguments, &environment);
    // A script without `#!` is the shell's, as it is for execvp(3).
    if error == Errno::ENOEXEC && !program::is_elf(path) {
        let Err(error) = nix::unistd::execvpe(&c_path, &arguments, &environment);
        return Ok(error);
    }
    Ok(error)
}
