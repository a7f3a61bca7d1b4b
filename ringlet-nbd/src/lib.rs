//! A plugin of nbdkit's: shows a disk, of this host or another one, to whatever speaks NBD. `ringlet disk attach` starts it.

use std::sync::OnceLock;
use std::time::Duration;

use nbdkit::{Error, Flags, FuaFlags, Result, Server, ThreadModel, plugin};
use ringlet_disk::Reader;

const PATIENCE: u64 = 30;

/// What was said on the command line.
static NAME: OnceLock<String> = OnceLock::new();
static OWNER: OnceLock<u32> = OnceLock::new();
static WAITS: OnceLock<u64> = OnceLock::new();
static READER: OnceLock<Reader> = OnceLock::new();

/// A client's connection: all have the same reader.
struct Disk(&'static Reader);

fn wrong(what: impl Into<String>) -> Error {
    Error::new(libc::EINVAL, what.into())
}

fn set<T>(at: &OnceLock<T>, key: &str, value: Option<T>) -> Result<()> {
    let value = value.ok_or_else(|| wrong(format!("{key} is to be a number")))?;
    at.set(value).map_err(|_| wrong(format!("{key} is there twice")))
}

fn how(flags: Flags) -> ringlet_disk::Flags {
    ringlet_disk::Flags {
        durable: flags.contains(Flags::FUA),
        may_trim: flags.contains(Flags::MAY_TRIM),
        fast: flags.contains(Flags::FAST_ZERO),
    }
}

impl Disk {
    fn told(&self, done: std::result::Result<(), i32>) -> Result<()> {
        done.map_err(|errno| {
            let why = || std::io::Error::from_raw_os_error(errno).to_string();
            Error::new(errno, self.0.why_not().unwrap_or_else(why))
        })
    }
}

impl Server for Disk {
    fn name() -> &'static str {
        "ringlet"
    }

    fn description() -> Option<&'static str> {
        Some("A disk that `ringlet disk serve` serves, by reflective memory")
    }

    fn config_help() -> Option<&'static str> {
        Some(
            "disk=NAME         (required) The disk (`ringlet disk ls`).\n\
             owner=UID         Whose server is believed besides root's and this user's own.\n\
             patience=SECONDS  How long a request waits where the server has gone (30).",
        )
    }

    fn magic_config_key() -> Option<&'static str> {
        Some("disk")
    }

    fn config(key: &str, value: &str) -> Result<()> {
        match key {
            "disk" => set(&NAME, key, Some(value.to_owned())),
            "owner" => set(&OWNER, key, value.parse().ok()),
            "patience" => set(&WAITS, key, value.parse().ok()),
            _ => Err(wrong(format!("there is no parameter {key}"))),
        }
    }

    fn config_complete() -> Result<()> {
        NAME.get().map(drop).ok_or_else(|| wrong("disk=NAME is missing"))
    }

    /// (What is opened before is another process's.)
    fn after_fork() -> Result<()> {
        let name = NAME.get().map_or("", String::as_str);
        let patience = Duration::from_secs(*WAITS.get().unwrap_or(&PATIENCE));
        let reader = Reader::open(name, OWNER.get().copied(), patience);
        let reader = reader.map_err(|error| Error::new(libc::EIO, format!("{error:#}")))?;
        READER.set(reader).map_err(|_| wrong("it is opened already"))
    }

    fn thread_model() -> Result<ThreadModel> {
        Ok(ThreadModel::Parallel)
    }

    fn open(_readonly: bool) -> Result<Box<dyn Server>> {
        let reader = READER.get().ok_or_else(|| wrong("it is not opened yet"))?;
        Ok(Box::new(Disk(reader)))
    }

    fn get_size(&self) -> Result<i64> {
        i64::try_from(self.0.bytes()).map_err(|_| Error::new(libc::EFBIG, "it is too large"))
    }

    fn can_write(&self) -> Result<bool> {
        Ok(!self.0.is_read_only())
    }

    fn can_flush(&self) -> Result<bool> {
        Ok(true)
    }

    fn can_fua(&self) -> Result<FuaFlags> {
        Ok(FuaFlags::Native)
    }

    /// (The server has the disk open once, and nobody else keeps anything.)
    fn can_multi_conn(&self) -> Result<bool> {
        Ok(true)
    }

    fn can_trim(&self) -> Result<bool> {
        Ok(!self.0.is_read_only())
    }

    fn can_zero(&self) -> Result<bool> {
        Ok(!self.0.is_read_only())
    }

    fn can_fast_zero(&self) -> Result<bool> {
        Ok(!self.0.is_read_only())
    }

    fn read_at(&self, to: &mut [u8], offset: u64) -> Result<()> {
        self.told(self.0.read(offset, to))
    }

    fn write_at(&self, from: &[u8], offset: u64, flags: Flags) -> Result<()> {
        self.told(self.0.write(offset, from, how(flags)))
    }

    fn flush(&self) -> Result<()> {
        self.told(self.0.flush())
    }

    fn trim(&self, count: u32, offset: u64, flags: Flags) -> Result<()> {
        self.told(self.0.trim(offset, count.into(), how(flags)))
    }

    fn zero(&self, count: u32, offset: u64, flags: Flags) -> Result<()> {
        self.told(self.0.zero(offset, count.into(), how(flags)))
    }
}

plugin!(Disk {
    after_fork,
    can_fast_zero,
    can_flush,
    can_fua,
    can_multi_conn,
    can_trim,
    can_write,
    can_zero,
    config,
    config_complete,
    config_help,
    flush,
    thread_model,
    trim,
    write_at,
    zero
});
