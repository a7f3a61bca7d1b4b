//! What a keeper has to know in its next run: a file in the cluster's directory, all of it or what was kept before. What can't be read is for the
//! operator to mend: who does not know what it has promised would break its word.

use std::fs::{File, TryLockError};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, ensure};
use ringlet_reflect::network::kept_by;

const NAME: &str = "kept";
const RUN: &str = "run";
const LOCK: &str = "lock";
/// One whose service has ended may be there for so long.
const ANOTHER: Duration = Duration::from_secs(5);
const BYTES_MOST: u64 = 16 << 20;
const DAMAGED: &str = "this node can't know what it has promised, and reflects nothing until the file is removed. If others reflect \
                       without it (`ringlet reflect ls` there), that can be done at once; if they have stopped, behind \
                       `ringlet reflect bury` of this node there; if none is left, on all nodes";

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

    /// The number of this run, greater than each before, and what was kept last; once both can be read, and be written again.
    pub fn begin(&self) -> anyhow::Result<(u64, Option<Vec<u8>>)> {
        let shown = |name: &str| self.directory.join(name).display().to_string();
        let last = self.read(NAME).with_context(|| shown(NAME))?;
        let by = last.as_deref().map_or(Ok(0), kept_by);
        let by = by.map_err(|why| anyhow!("{}: damaged ({why}): {DAMAGED}", shown(NAME)))?;
        let run = self.next_run(by).with_context(|| shown(RUN))?;
        last.iter().try_for_each(|last| self.keep(last)).with_context(|| shown(NAME))?;
        Ok((run, last))
    }

    pub fn keep(&self, bytes: &[u8]) -> std::io::Result<()> {
        self.write(NAME, bytes)
    }

    fn next_run(&self, by: u64) -> std::io::Result<u64> {
        let last = match self.read(RUN)? {
            None => 0,
            Some(bytes) => {
                let text = String::from_utf8_lossy(&bytes);
                let number = text.trim().parse::<u64>();
                number.map_err(|_| {
                    std::io::Error::new(ErrorKind::InvalidData, "no number: it can be removed")
                })?
            }
        };
        // (Where the file was lost the clock is mostly right.)
        let clock = time::OffsetDateTime::now_utc().unix_timestamp().max(1) as u64;
        let next = last.max(by).saturating_add(1).max(clock);
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
    use ringlet_order::{Order, Output, Settings};
    use ringlet_reflect::network::Life;

    use super::*;

    /// What a run of this number, alone in its cluster, keeps first.
    fn kept_by_run(incarnation: u64) -> Vec<u8> {
        let (silent, beat) = (Duration::from_secs(1), Duration::from_millis(100));
        let (me, founders) = (Life { node: "a".into(), incarnation }, vec!["a".into()]);
        let mut order = Order::new(Settings { me, founders, silent, beat }, None, Duration::ZERO);
        let mut ticks = (0..100).map(|nth| beat * nth);
        let is_kept = |output| match output {
            Output::Keep(bytes) => Some(bytes),
            _ => None,
        };
        let kept = ticks.find_map(|now| {
            order.tick(now);
            std::iter::from_fn(|| order.output()).find_map(is_kept)
        });
        kept.expect("it keeps something")
    }

    #[test]
    fn what_is_kept_is_there_in_the_next_run_which_has_a_greater_number() {
        let place = std::env::temp_dir().join(format!("ringlet-kept-{}", std::process::id()));
        let mut kept = Kept::open(&place).unwrap();
        let (first, none) = kept.begin().unwrap();
        assert_eq!(none, None);
        let mut runs = vec![first];
        // (Of a run that the clock, and the file of runs, know nothing of.)
        for (nth, by) in [1, u64::MAX / 2, 7].into_iter().enumerate() {
            let bytes = kept_by_run(by);
            kept.keep(&bytes).unwrap();
            drop(kept);
            kept = Kept::open(&place).unwrap();
            let (run, last) = kept.begin().unwrap();
            assert_eq!(last, Some(bytes));
            runs.push(run);
            assert!(run > by, "{nth}");
        }
        assert!(runs.is_sorted_by(|one, other| one < other), "{runs:?}");
        // One that can't be read is no first run, and nothing that was kept is nothing that was promised.
        std::fs::write(place.join(RUN), "x").unwrap();
        assert!(format!("{:#}", kept.begin().unwrap_err()).contains("removed"));
        std::fs::remove_file(place.join(RUN)).unwrap();
        kept.begin().unwrap();
        for damaged in [&b""[..], b"nonsense"] {
            kept.keep(damaged).unwrap();
            assert!(format!("{:#}", kept.begin().unwrap_err()).contains("ringlet reflect bury"));
        }
        assert!(Kept::open(&place).is_err(), "two keep there");
        std::fs::remove_dir_all(&place).unwrap();
    }
}
