//! What a keeper has to know in its next run: a file in the cluster's directory, all of it or what was kept before.

use std::fs::{File, TryLockError};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};

const NAME: &str = "kept";
const RUN: &str = "run";
const LOCK: &str = "lock";
/// One whose service has ended may be there for so long.
const ANOTHER: Duration = Duration::from_secs(5);
const BYTES_MOST: u64 = 16 << 20;

pub struct Kept {
    directory: PathBuf,
    /// Two processes that keep there would each undo what the other one has promised.
    _alone: File,
}

impl Kept {
    /// Makes the directory, if it is not there. An error if another process is there, and does not go.
    pub fn open(directory: &Path) -> anyhow::Result<Kept> {
        let shown = || directory.display().to_string();
        let made = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(directory);
        made.with_context(shown)?;
        let mut options = File::options();
        let path = directory.join(LOCK);
        let alone = options.write(true).create(true).truncate(false).mode(0o600).open(path);
        let alone = alone.with_context(shown)?;
        let began = Instant::now();
        while let Err(error) = alone.try_lock() {
            let is_over = began.elapsed() >= ANOTHER || !matches!(error, TryLockError::WouldBlock);
            ensure!(!is_over, "{}: another process keeps there ({error})", shown());
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(Kept { directory: directory.to_owned(), _alone: alone })
    }

    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// What was kept last.
    pub fn last(&self) -> std::io::Result<Option<Vec<u8>>> {
        self.read(NAME)
    }

    pub fn keep(&self, bytes: &[u8]) -> std::io::Result<()> {
        self.write(NAME, bytes)
    }

    /// The number of this run: greater than each before.
    pub fn next_run(&self) -> std::io::Result<u64> {
        let last = match self.read(RUN)? {
            None => 0,
            Some(bytes) => {
                let text = String::from_utf8_lossy(&bytes);
                let number = text.trim().parse::<u64>();
                number.map_err(|_| {
                    std::io::Error::new(ErrorKind::InvalidData, format!("{RUN}: no number"))
                })?
            }
        };
        // (Where the file was lost the clock is mostly right.)
        let clock = time::OffsetDateTime::now_utc().unix_timestamp().max(1) as u64;
        let next = last.saturating_add(1).max(clock);
        self.write(RUN, format!("{next}\n").as_bytes())?;
        Ok(next)
    }

    fn read(&self, name: &str) -> std::io::Result<Option<Vec<u8>>> {
        let file = match File::open(self.directory.join(name)) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            file => file?,
        };
        let mut bytes = Vec::new();
        file.take(BYTES_MOST).read_to_end(&mut bytes)?;
        Ok(Some(bytes))
    }

    fn write(&self, name: &str, bytes: &[u8]) -> std::io::Result<()> {
        let (path, new) = (self.directory.join(name), self.directory.join(format!(".{name}.new")));
        let mut options = File::options();
        let mut file = options.write(true).create(true).truncate(true).mode(0o600).open(&new)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        std::fs::rename(&new, &path)?;
        File::open(&self.directory)?.sync_all()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_kept_is_there_in_the_next_run_which_has_a_greater_number() {
        let place = std::env::temp_dir().join(format!("ringlet-kept-{}", std::process::id()));
        let mut kept = Kept::open(&place).unwrap();
        assert_eq!(kept.last().unwrap(), None);
        let mut runs = Vec::new();
        for bytes in [&b"first"[..], b"", &[7; 100_000]] {
            kept.keep(bytes).unwrap();
            drop(kept);
            kept = Kept::open(&place).unwrap();
            assert_eq!(kept.last().unwrap().as_deref(), Some(bytes));
            runs.push(kept.next_run().unwrap());
        }
        assert!(runs.is_sorted_by(|one, other| one < other), "{runs:?}");
        // One that can't be read is no first run.
        std::fs::write(place.join(RUN), "x").unwrap();
        assert!(kept.next_run().is_err());
        assert!(Kept::open(&place).is_err(), "two keep there");
        std::fs::remove_dir_all(&place).unwrap();
    }
}
