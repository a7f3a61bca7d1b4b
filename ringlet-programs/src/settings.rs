//! The configuration as the command line sees it: the same table and the same loader as the shim's, fed by `std`, and a
//! flag for every key.

use std::ffi::{CStr, OsStr, OsString};
use std::fmt::Write as _;
use std::fs::File;
use std::io::{ErrorKind, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;

use clap::{Arg, ArgMatches, Command, ValueHint};
use ringlet::config::{Config, FILE_ENVIRONMENT, FILE_MAX_BYTES, KEYS, Key, NotRead, Origin};
use rustix::fs::OFlags;

/// Variables that begin with `RINGLET_` and are no key of the table.
pub const LIBRARY_ENVIRONMENT: &str = "RINGLET_LIBRARY";

/// What is in force, which file it came from, and what was wrong on the way.
pub struct Settings {
    pub config: Config,
    pub file: Option<PathBuf>,
    pub problems: Vec<String>,
}

impl Settings {
    /// What a program with this environment, plus `flags`, would find.
    pub fn load(mut environment: Environment, flags: &Flags) -> Settings {
        flags.apply(&mut environment);
        let get = |name: &str| {
            let found = environment.iter().find(|(each, _)| each == OsStr::new(name));
            found.map(|(_, value)| value.as_bytes())
        };
        let mut file = None;
        let mut read = |path: &CStr, buffer: &mut [u8]| {
            let path = PathBuf::from(OsStr::from_bytes(path.to_bytes()));
            // Whatever it is, it doesn't keep us waiting.
            let flags = (OFlags::NONBLOCK | OFlags::NOCTTY).bits() as i32;
            let opened = File::options().read(true).custom_flags(flags).open(&path);
            let length = opened.and_then(|opened| read_up_to(opened, buffer));
            let length = length.map_err(|error| match error.kind() {
                ErrorKind::NotFound | ErrorKind::NotADirectory => NotRead::Missing,
                _ => NotRead::Unreadable,
            })?;
            file = Some(path);
            Ok(length)
        };
        let mut problems = Vec::new();
        let mut buffer = vec![0; FILE_MAX_BYTES + 1];
        let mut config = Config::load(&get, &mut read, &mut buffer, &mut |place, error| {
            problems.push(format!("{place}: {error}"));
        });
        for (name, _) in &environment {
            if is_slip(name.as_bytes()) {
                problems.push(format!("{}: there is no such variable", name.to_string_lossy()));
            }
        }
        for (key, text) in &flags.values {
            // Known to be right: the parser has checked it.
            let _ = config.set(key.name.as_bytes(), text.as_bytes(), Origin::Flag);
        }
        Settings { config, file, problems }
    }
}

fn read_up_to(file: File, buffer: &mut [u8]) -> std::io::Result<usize> {
    let mut text = Vec::new();
    file.take(buffer.len() as u64).read_to_end(&mut text)?;
    buffer[..text.len()].copy_from_slice(&text);
    Ok(text.len())
}

/// A variable that looks like ours but that nothing reads, most likely misspelt.
fn is_slip(name: &[u8]) -> bool {
    let known = KEYS.iter().map(|key| key.environment);
    let mut known = known.chain([FILE_ENVIRONMENT, LIBRARY_ENVIRONMENT]);
    name.starts_with(b"RINGLET_") && !known.any(|each| each.as_bytes() == name)
}

pub type Environment = Vec<(OsString, OsString)>;

pub fn set_variable(environment: &mut Environment, name: &str, value: OsString) {
    environment.retain(|(each, _)| each != name);
    environment.push((name.into(), value));
}

/// The flags that were given: a flag for each key, `--no-spin`, and the file.
#[derive(Clone, Default)]
pub struct Flags {
    file: Option<PathBuf>,
    values: Vec<(&'static Key, String)>,
}

impl Flags {
    /// Makes them variables, by which they reach a child.
    pub fn apply(&self, environment: &mut Environment) {
        if let Some(file) = &self.file {
            // The program may change its directory before it starts others. Only an empty path has no absolute form.
            let file = std::path::absolute(file).unwrap_or_else(|_| file.clone());
            set_variable(environment, FILE_ENVIRONMENT, file.into());
        }
        for (key, text) in &self.values {
            set_variable(environment, key.environment, text.into());
        }
    }
}

/// `spin_us` as `spin-us`.
pub fn flag_name(key: &Key) -> String {
    key.name.replace('_', "-")
}

impl clap::Args for Flags {
    fn augment_args(command: Command) -> Command {
        let command = KEYS.iter().fold(command, |command, key| {
            let mut help = String::from(key.effect.trim_end_matches('.'));
            let _ = write!(help, " [{}] [default: {}]", key.values(), default(key));
            let name = key.name.trim_end_matches("_bytes").trim_end_matches("_us");
            let parser = |text: &str| match Config::default().set(
                key.name.as_bytes(),
                text.as_bytes(),
                Origin::Flag,
            ) {
                Ok(()) => Ok(text.to_owned()),
                Err(error) => Err(error.problem.to_string()),
            };
            command.arg(
                Arg::new(key.name)
                    .long(flag_name(key))
                    .value_name(name.to_uppercase())
                    .help(help)
                    .help_heading("Configuration")
                    .value_parser(parser),
            )
        });
        let no_spin = Arg::new("no_spin")
            .long("no-spin")
            .help("Never spin, but sleep at once; the same as --spin-us 0")
            .help_heading("Configuration")
            .action(clap::ArgAction::SetTrue)
            .conflicts_with_all(["spin", "spin_us"]);
        let file = Arg::new("config_file")
            .long("config")
            .value_name("FILE")
            .help("Configuration file to use instead of the user's or the machine's")
            .help_heading("Configuration")
            .value_hint(ValueHint::FilePath)
            .value_parser(clap::value_parser!(PathBuf));
        command.args([no_spin, file])
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl clap::FromArgMatches for Flags {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Flags, clap::Error> {
        let given = |key: &'static Key| {
            let text = matches.get_one::<String>(key.name).cloned();
            let no_spin = key.name == "spin_us" && matches.get_flag("no_spin");
            Some((key, if no_spin { "0".to_owned() } else { text? }))
        };
        let file = matches.get_one("config_file").cloned();
        Ok(Flags { file, values: KEYS.iter().filter_map(given).collect() })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

/// The default as people read it; an empty list is none.
pub fn default(key: &'static Key) -> String {
    or_none(key.value(&Config::DEFAULT).to_string())
}

pub fn or_none(value: String) -> String {
    if value.is_empty() { "none".to_owned() } else { value }
}
