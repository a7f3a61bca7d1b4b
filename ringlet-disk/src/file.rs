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

static ZEROS: [u8; 64 << 10] = [0; 64 << 10];

/// Of what may be zeros so much is read first, and then at a time.
const ZEROS_FIRST: usize = 512;
const ZEROS_AT_ONCE: usize = 32 << 10;

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

/// Bytes of a disk that are all held, or all zeros that nothing is held for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Extent {
    pub length: u64,
    pub is_hole: bool,
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
        tests::pass(self.id, offset);
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

    /// Is nothing held for any of these bytes? `file` is one of this disk's.
    ///
    /// What a file has lost that was cut off behind its disk's beginning are no zeros, but an error for who reads them.
    pub fn is_hole(&self, file: &File, offset: u64, length: u64) -> bool {
        let end = offset + length;
        match find(file, offset, libc::SEEK_DATA) {
            Ok(data) => data >= end,
            Err(libc::ENXIO) => size(file) >= end,
            Err(_) => false,
        }
    }

    /// Are they all zeros? EAGAIN: it would have to wait for the device. (Most that is none is told by its first bytes.)
    pub fn is_zeros(&self, offset: u64, length: u64) -> Done<bool> {
        let mut bytes = [0_u8; ZEROS_AT_ONCE];
        let (mut at, end) = (offset, offset + length);
        let mut most = ZEROS_FIRST;
        while at < end {
            let part = (end - at).min(most as u64) as usize;
            // SAFETY: no more than there are.
            #[allow(unsafe_code)]
            unsafe {
                self.read(at, part, bytes.as_mut_ptr(), Patience::None)?;
            }
            if bytes[..part] != ZEROS[..part] {
                return Ok(false);
            }
            at += part as u64;
            most = ZEROS_AT_ONCE;
        }
        Ok(true)
    }

    /// What is held of these bytes, from the first one on, in so many extents at most, of two kinds in turn. Whatever the file system does not tell of
    /// is held.
    pub fn extents(&self, file: &File, offset: u64, length: u64, most: usize) -> Vec<Extent> {
        let (mut at, end) = (offset, offset + length);
        let mut found: Vec<Extent> = Vec::new();
        while at < end {
            let data = match find(file, at, libc::SEEK_DATA) {
                Ok(data) => data.clamp(at, end),
                Err(libc::ENXIO) => size(file).clamp(at, end),
                Err(_) => at,
            };
            let is_hole = data > at;
            let to = match is_hole {
                true => data,
                false => find(file, at, libc::SEEK_HOLE).unwrap_or(end).min(end),
            };
            // (It was data, and is none: somebody writes. And behind the end of a file that was cut off there are no holes, but errors.)
            let to = if to > at { to } else { end };
            let is_full = found.len() == most;
            match found.last_mut() {
                Some(last) if last.is_hole == is_hole => last.length += to - at,
                _ if is_full => break,
                _ => found.push(Extent { length: to - at, is_hole }),
            }
            at = to;
        }
        found
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

/// The next data, or hole, from there on. (Where the file stands is nobody's business: all is read and written at places.)
fn find(file: &File, from: u64, what: libc::c_int) -> Done<u64> {
    let from = i64::try_from(from).map_err(|_| libc::EINVAL)?;
    // SAFETY: a call of numbers.
    #[allow(unsafe_code)]
    let found = unsafe { libc::lseek(file.as_raw_fd(), from, what) };
    u64::try_from(found)
        .map_err(|_| std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO))
}

/// How far it goes now.
fn size(file: &File) -> u64 {
    find(file, 0, libc::SEEK_END).unwrap_or(0)
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

    use std::fs::File;
    use std::os::unix::fs::FileExt;

    use super::{Disk, Extent};

    /// As if the device took its time: a write that begins there waits until it is opened. Then how many have, and how many do at most.
    pub static GATE: Mutex<(Option<u64>, usize, usize)> = Mutex::new((None, 0, 0));
    pub static MOVED: Condvar = Condvar::new();

    static WRITES: Mutex<Vec<([u64; 2], u64)>> = Mutex::new(Vec::new());

    /// How often that disk was written from there on.
    pub fn writes(disk: [u64; 2], offset: u64) -> usize {
        WRITES.lock().unwrap().iter().filter(|write| **write == (disk, offset)).count()
    }

    pub fn pass(disk: [u64; 2], offset: u64) {
        WRITES.lock().unwrap().push((disk, offset));
        let mut gate = GATE.lock().unwrap();
        if gate.0 != Some(offset) || gate.1 == gate.2 {
            return;
        }
        gate.1 += 1;
        MOVED.notify_all();
        // (One offset at a time.)
        drop(MOVED.wait_while(gate, |gate| gate.0 == Some(offset)).unwrap());
    }

    fn extent(length: u64, is_hole: bool) -> Extent {
        Extent { length, is_hole }
    }

    /// Of whole pages of 4 KiB and more, whatever the file system keeps.
    #[test]
    fn holes_are_found_and_what_was_cut_off_is_none() {
        const MB: u64 = 1 << 20;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk");
        let file = File::create(&path).unwrap();
        file.set_len(8 * MB).unwrap();
        for at in [MB, 5 * MB] {
            file.write_all_at(&vec![1; MB as usize], at).unwrap();
        }
        let disk = Disk::open(&path, false).unwrap();
        let own = disk.own().unwrap();
        let found = |offset, length, most| disk.extents(&own, offset, length, most);
        let all = [(MB, true), (MB, false), (3 * MB, true), (MB, false), (2 * MB, true)]
            .map(|(length, is_hole)| extent(length, is_hole));
        assert_eq!(found(0, 8 * MB, 99), all);
        assert_eq!(found(0, 8 * MB, 2), all[..2]);
        assert_eq!(found(MB + 7, 100, 99), [extent(100, false)]);
        assert_eq!(found(3 * MB, 2 * MB + 9, 99), [extent(2 * MB, true), extent(9, false)]);
        assert_eq!(found(6 * MB + 1, 2 * MB - 1, 99), [extent(2 * MB - 1, true)]);
        let is_hole = |offset, length| disk.is_hole(&own, offset, length);
        assert!(is_hole(0, MB) && is_hole(2 * MB, 3 * MB) && is_hole(7 * MB, MB));
        assert!(!is_hole(0, MB + 1) && !is_hole(MB, 1) && !is_hole(6 * MB - 1, MB));
        // What is zeros is so whether it is held or not.
        file.write_all_at(&vec![0; MB as usize / 2], 5 * MB).unwrap();
        // (EAGAIN: not all of it is at hand, or this file system can't tell.)
        let is_zeros = |offset, length, right| {
            let found = disk.is_zeros(offset, length);
            found == Ok(right) || found == Err(libc::EAGAIN)
        };
        assert!(is_zeros(4 * MB, MB + MB / 2, true) && is_zeros(8 * MB - 1, 1, true));
        assert!(is_zeros(4 * MB, MB + MB / 2 + 1, false) && is_zeros(6 * MB - 1, 600, false));
        // Holes are made by zeros that may be some, and by trims.
        disk.zero(MB, MB / 2, true, false).unwrap();
        disk.trim(5 * MB, MB).unwrap();
        let left = [(MB + MB / 2, true), (MB / 2, false), (6 * MB, true)];
        assert_eq!(found(0, 8 * MB, 99), left.map(|(length, is_hole)| extent(length, is_hole)));
        // A file that was made shorter: what is missing are no zeros.
        file.set_len(3 * MB).unwrap();
        assert!(is_hole(2 * MB, MB) && !is_hole(2 * MB, MB + 1) && !is_hole(7 * MB, 1));
        let left = [(MB + MB / 2, true), (MB / 2, false), (MB, true), (5 * MB, false)];
        assert_eq!(found(0, 8 * MB, 99), left.map(|(length, is_hole)| extent(length, is_hole)));
        assert_eq!(disk.is_zeros(7 * MB, 1), Err(libc::EIO));
        assert!(found(7 * MB, MB, 99).iter().all(|extent| !extent.is_hole));
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
