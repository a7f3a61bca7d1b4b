//! What is served: a regular file or a block device.

use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Seek, SeekFrom};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::UNIX_EPOCH;

use anyhow::{Context, bail, ensure};
use rustix::fs::{
    FallocateFlags, FlockOperation, OFlags, fallocate, fcntl_setfl, fdatasync, flock, fstatfs,
};
use rustix::io::Errno;

/// Errors are the kernel's numbers.
pub type Done<T> = Result<T, i32>;

pub struct Disk {
    file: File,
    pub bytes: u64,
    pub read_only: bool,
    pub id: [u64; 2],
    /// Which medium a device has had since its kernel has begun; 0 of a file.
    pub sequence: u64,
    /// It is in memory: nothing waits for a device.
    pub never_waits: bool,
    /// Why something that was written is not on the disk, and never will be; or 0.
    lost: AtomicI32,
}

/// May it wait for the device?
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Patience {
    None,
    AsLong,
}

impl Disk {
    /// Nobody else serves it meanwhile, unless all only read.
    pub fn open(path: &Path, read_only: bool) -> anyhow::Result<Disk> {
        let name = path.display();
        // KERNEL: a device that is opened exclusively is mounted by nobody, nor part of another one. And who opens a pipe does not wait.
        let exclusive = if read_only { 0 } else { libc::O_EXCL };
        let mut how = OpenOptions::new();
        how.read(true).write(!read_only).custom_flags(libc::O_NONBLOCK | exclusive);
        let mut file = match how.open(path) {
            Err(error) if error.kind() == ErrorKind::ResourceBusy => {
                bail!("{name} is mounted, served already, or part of another device")
            }
            file => file.with_context(|| name.to_string())?,
        };
        fcntl_setfl(&file, OFlags::empty())?;
        let about = file.metadata().with_context(|| name.to_string())?;
        let is_device = about.file_type().is_block_device();
        ensure!(is_device || about.is_file(), "{name} is neither a file nor a block device");
        let lock = match read_only {
            true => FlockOperation::NonBlockingLockShared,
            false => FlockOperation::NonBlockingLockExclusive,
        };
        match flock(&file, lock) {
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) => {
                bail!("{name} is served already, or another program has locked it")
            }
            Err(error) => return Err(error).with_context(|| format!("{name} can't be locked")),
        }
        // (Of a device its metadata do not tell.)
        let bytes = file.seek(SeekFrom::End(0)).with_context(|| name.to_string())?;
        ensure!(bytes > 0, "{name} is empty");
        let device = if is_device { about.rdev() } else { about.dev() };
        // (Numbers of files that were removed are given again.)
        let since = about.created().ok().and_then(|born| born.duration_since(UNIX_EPOCH).ok());
        let born = since.map_or(0, |since| since.as_nanos() as u64);
        let id = [device, if is_device { 0 } else { about.ino() ^ born.swap_bytes() }];
        let sequence = if is_device { sequence(about.rdev()) } else { 0 };
        let never_waits =
            fstatfs(&file).is_ok_and(|of| of.f_type == libc::TMPFS_MAGIC) && !is_device;
        let lost = AtomicI32::new(0);
        Ok(Disk { file, bytes, read_only, id, sequence, never_waits, lost })
    }

    /// For who asks for flushes.
    ///
    /// KERNEL: what could not be written is told once to each open file description, and not to the next who asks by the same one.
    pub fn own(&self) -> std::io::Result<File> {
        File::open(format!("/proc/self/fd/{}", self.file.as_raw_fd()))
    }

    /// Reads all of these bytes to where others may look. EAGAIN: it would have to wait, and was not to.
    ///
    /// # Safety
    /// So many bytes may be written there.
    #[allow(unsafe_code)]
    pub unsafe fn read(&self, offset: u64, length: usize, to: *mut u8, wait: Patience) -> Done<()> {
        self.transfer(length, wait, |done, flags| {
            // SAFETY: a part of what the caller vouches for; the kernel writes there.
            unsafe {
                let part = libc::iovec { iov_base: to.add(done).cast(), iov_len: length - done };
                libc::preadv2(
                    self.file.as_raw_fd(),
                    &raw const part,
                    1,
                    (offset + done as u64) as i64,
                    flags,
                )
            }
        })
    }

    /// Writes them from where others may write meanwhile.
    ///
    /// # Safety
    /// So many bytes may be read there.
    #[allow(unsafe_code)]
    pub unsafe fn write(&self, offset: u64, length: usize, from: *const u8) -> Done<()> {
        #[cfg(test)]
        tests::pass(offset);
        self.transfer(length, Patience::AsLong, |done, flags| {
            // SAFETY: a part of what the caller vouches for; the kernel only reads there.
            unsafe {
                let from = from.add(done).cast_mut().cast();
                let part = libc::iovec { iov_base: from, iov_len: length - done };
                libc::pwritev2(
                    self.file.as_raw_fd(),
                    &raw const part,
                    1,
                    (offset + done as u64) as i64,
                    flags,
                )
            }
        })
    }

    fn transfer(
        &self,
        length: usize,
        wait: Patience,
        part: impl Fn(usize, i32) -> isize,
    ) -> Done<()> {
        let may_wait = wait == Patience::AsLong || self.never_waits;
        let flags = if may_wait { 0 } else { libc::RWF_NOWAIT };
        let mut done = 0;
        while done < length {
            match part(done, flags) {
                // (The file is shorter than it was.)
                0 => return Err(libc::EIO),
                n if n > 0 => done += n as usize,
                _ => match std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO) {
                    libc::EINTR => {}
                    // KERNEL: file systems that can't tell say so.
                    libc::EOPNOTSUPP if !may_wait => return Err(libc::EAGAIN),
                    errno => return Err(errno),
                },
            }
        }
        Ok(())
    }

    /// What was written before is on the disk; `own` is the file of who asks. Once something could not be written all are told so, again and again:
    /// it is lost, of which the kernel speaks but once.
    pub fn flush(&self, own: &File) -> Done<()> {
        // ORDER: Relaxed: who asks while it is found out is told by the kernel.
        match self.lost.load(Ordering::Relaxed) {
            0 => fdatasync(own).map_err(|error| {
                self.lost.store(error.raw_os_error(), Ordering::Relaxed);
                error.raw_os_error()
            }),
            errno => Err(errno),
        }
    }

    /// These bytes are not needed any more: what is read there then is zeros, or what was there.
    pub fn trim(&self, offset: u64, length: u64) -> Done<()> {
        self.allocate(FallocateFlags::PUNCH_HOLE, offset, length).map(drop)
    }

    /// With `fast` only if it is faster than to write zeros, or EOPNOTSUPP.
    pub fn zero(&self, offset: u64, length: u64, may_trim: bool, fast: bool) -> Done<()> {
        if may_trim && self.allocate(FallocateFlags::PUNCH_HOLE, offset, length)? {
            return Ok(());
        }
        // KERNEL: of a device it may be as slow as to write them.
        if fast {
            return Err(libc::EOPNOTSUPP);
        }
        if self.allocate(FallocateFlags::ZERO_RANGE, offset, length)? {
            return Ok(());
        }
        static ZEROS: [u8; 64 << 10] = [0; 64 << 10];
        for at in (offset..offset + length).step_by(ZEROS.len()) {
            let part = (offset + length - at).min(ZEROS.len() as u64) as usize;
            // SAFETY: no more than there are.
            #[allow(unsafe_code)]
            unsafe {
                self.write(at, part, ZEROS.as_ptr())?;
            }
        }
        Ok(())
    }

    /// False if this file, or device, can't do that.
    fn allocate(&self, how: FallocateFlags, offset: u64, length: u64) -> Done<bool> {
        loop {
            match fallocate(&self.file, how | FallocateFlags::KEEP_SIZE, offset, length) {
                Ok(()) => return Ok(true),
                Err(Errno::INTR) => {}
                // KERNEL: INVAL is of devices, for what is not whole blocks.
                Err(Errno::OPNOTSUPP | Errno::INVAL) => return Ok(false),
                Err(errno) => return Err(errno.raw_os_error()),
            }
        }
    }
}

/// KERNEL: Linux 5.15 counts media; a partition's disk has the number.
fn sequence(device: u64) -> u64 {
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    let read = |name| {
        let path = format!("/sys/dev/block/{major}:{minor}/{name}");
        std::fs::read_to_string(path).ok()?.trim().parse().ok()
    };
    ["diskseq", "../diskseq"].into_iter().find_map(read).unwrap_or(0)
}

#[cfg(test)]
pub mod tests {
    use std::sync::{Condvar, Mutex};

    use super::Disk;

    /// As if the device took its time: a write that begins there waits until it is opened. The second word: one waits.
    pub static GATE: Mutex<(Option<u64>, bool)> = Mutex::new((None, false));
    pub static MOVED: Condvar = Condvar::new();

    pub fn pass(offset: u64) {
        let mut gate = GATE.lock().unwrap();
        // (One at a time.)
        while gate.0 == Some(offset) {
            gate.1 = true;
            MOVED.notify_all();
            gate = MOVED.wait(gate).unwrap();
        }
    }
    #[test]
    fn a_file_that_took_another_one_s_place_is_another_one() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk");
        let ids = [(); 3].map(|()| {
            std::fs::write(&path, "x").unwrap();
            let id = [(); 2].map(|()| Disk::open(&path, false).unwrap().id);
            std::fs::remove_file(&path).unwrap();
            assert_eq!(id[0], id[1]);
            id[0]
        });
        assert!(ids[0] != ids[1] && ids[1] != ids[2] && ids[0] != ids[2], "{ids:?}");
    }
}
