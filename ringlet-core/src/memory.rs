//! The gate for unsafe: checked offsets into a mapping that a stranger may write to, and buffers of the program.

use core::marker::PhantomData;

/// Types that may lie in memory shared with a process we do not trust.
///
/// # Safety
/// Every bit pattern is a valid value, there is no padding that matters, no pointer, and every field that the other side
/// can change while we look is an atomic.
pub unsafe trait Shared {}

/// A mapping of `len` bytes: shared with a peer, or with our own forks. Copyable; whoever unmaps it must make sure that no
/// copy is used afterwards.
#[derive(Clone, Copy)]
pub struct Area {
    base: *mut u8,
    len: usize,
}

// SAFETY: an `Area` only hands out atomics (`at`) and raw byte copies (`write`, `read`), both legal from any thread.
unsafe impl Send for Area {}
// SAFETY: as for `Send`.
unsafe impl Sync for Area {}

impl Area {
    /// # Safety
    /// `base .. base + len` is mapped readable and writable and stays so as long as any copy of the result is used; `base` is
    /// aligned to 4096.
    pub const unsafe fn new(base: *mut u8, len: usize) -> Area {
        Area { base, len }
    }

    pub fn base(self) -> *mut u8 {
        self.base
    }

    pub fn len(self) -> usize {
        self.len
    }

    pub fn is_empty(self) -> bool {
        self.len == 0
    }

    /// The object at `offset`. Panics when it does not fit: offsets are ours, never a peer's.
    #[inline(always)]
    pub fn at<'a, T: Shared>(self, offset: usize) -> &'a T {
        assert!(
            offset.is_multiple_of(align_of::<T>())
                && offset <= self.len
                && size_of::<T>() <= self.len - offset
        );
        // SAFETY: in bounds and aligned (checked above); mapped (contract of `new`); any bits are a `T`, and what others
        // change meanwhile is atomic (contract of `Shared`).
        unsafe { &*self.base.add(offset).cast::<T>() }
    }

    /// Copies from the program into the mapping; `offset + n` is checked, since it may derive from shared memory.
    ///
    /// # Safety
    /// `from` is valid for reading `n` bytes.
    #[inline(always)]
    pub unsafe fn write(self, offset: usize, from: *const u8, n: usize) -> bool {
        if offset > self.len || n > self.len - offset {
            return false;
        }
        // SAFETY: the target is in bounds and mapped; the source is valid for `n` bytes by our own contract. The peer may
        // scribble over the target meanwhile; bytes are copied raw, never as a reference.
        unsafe { copy(from, self.base.add(offset), n) };
        true
    }

    /// Copies out of the mapping; checked like `write`.
    ///
    /// # Safety
    /// `to` is valid for writing `n` bytes.
    #[inline(always)]
    pub unsafe fn read(self, offset: usize, to: *mut u8, n: usize) -> bool {
        if offset > self.len || n > self.len - offset {
            return false;
        }
        if to.is_null() {
            return true; // the program asked to discard (MSG_TRUNC)
        }
        // SAFETY: as in `write`, the other way round.
        unsafe { copy(self.base.add(offset), to, n) };
        true
    }

    /// Copies to the same or another mapping; checked like `write`.
    #[inline(always)]
    pub fn copy_to(self, offset: usize, to: Area, to_offset: usize, n: usize) -> bool {
        if offset > self.len
            || n > self.len - offset
            || to_offset > to.len
            || n > to.len - to_offset
        {
            return false;
        }
        // SAFETY: in bounds of both mappings (`new`); they may be of the same memory. Bytes are copied raw, as in `write`.
        unsafe { core::ptr::copy(self.base.add(offset), to.base.add(to_offset), n) };
        true
    }
}

/// Pieces so short are copied without `rep movsb` by every C library.
const PIECE_BYTES: usize = 2048;

/// Does a copy end so shortly behind where it begins, in their pages, that `rep movsb` creeps? On AMD's processors (Zen 3 and 4, with C libraries that do not
/// know it) it moves 4 bytes in a nanosecond then, in place of 100. It is no rare case: what is long lies at the beginning of a page in a ring, and 16 bytes
/// behind one in the program, and a short header goes before it.
#[inline(always)]
fn creeps(from: *const u8, to: *mut u8, n: usize) -> bool {
    let distance = (to as usize).wrapping_sub(from as usize) % 4096;
    n > PIECE_BYTES && (1..16).contains(&distance)
}

/// # Safety
/// As `copy_nonoverlapping`.
#[inline(always)]
unsafe fn copy(from: *const u8, to: *mut u8, n: usize) {
    if creeps(from, to, n) {
        // SAFETY: our own contract.
        unsafe { copy_in_pieces(from, to, n) };
        return;
    }
    // SAFETY: our own contract.
    unsafe { core::ptr::copy_nonoverlapping(from, to, n) };
}

/// # Safety
/// As `copy_nonoverlapping`.
#[cold]
unsafe fn copy_in_pieces(from: *const u8, to: *mut u8, n: usize) {
    let mut done = 0;
    while done < n {
        let piece = PIECE_BYTES.min(n - done);
        // SAFETY: within `n` bytes of both, by our own contract.
        unsafe { core::ptr::copy_nonoverlapping(from.add(done), to.add(done), piece) };
        done += piece;
    }
}

/// One buffer of the program: what `iovec` is to the kernel.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Buffer {
    pub base: *mut u8,
    pub len: usize,
}

/// A cursor over the program's buffers, for a send (read from them) or a receive (written to).
///
/// Made by the edge from the program's arguments, whose validity is the program's promise, as it is to the kernel.
#[derive(Clone)]
pub struct Buffers<'a> {
    rest: *const Buffer,
    count: usize,
    /// Bytes of the first buffer that are already used.
    used: usize,
    remaining: usize,
    _program: PhantomData<&'a Buffer>,
}

impl<'a> Buffers<'a> {
    /// # Safety
    /// Each buffer is valid for its length, for reading if sent from, for writing if received into.
    #[inline(always)]
    pub unsafe fn new(list: &'a [Buffer]) -> Buffers<'a> {
        let mut remaining = 0usize;
        for buffer in list {
            remaining = remaining.saturating_add(buffer.len);
        }
        Buffers {
            rest: list.as_ptr(),
            count: list.len(),
            used: 0,
            remaining,
            _program: PhantomData,
        }
    }

    #[inline(always)]
    pub fn remaining(&self) -> usize {
        self.remaining
    }

    /// Lowers what is left (the kernel caps a call at `MAX_RW_COUNT`; a caller may cap it further).
    pub fn limit(&mut self, bytes: usize) {
        self.remaining = self.remaining.min(bytes);
    }

    /// Takes back `bytes` of a limit.
    pub fn allow(&mut self, bytes: usize) {
        self.remaining += bytes;
    }

    /// The next contiguous piece, at most `max` bytes; taken.
    #[inline(always)]
    pub fn take(&mut self, max: usize) -> (*mut u8, usize) {
        loop {
            if self.remaining == 0 || self.count == 0 {
                self.remaining = 0;
                return (core::ptr::null_mut(), 0);
            }
            // SAFETY: `rest .. rest + count` lies in the list given to `new`, which outlives 'a.
            let first = unsafe { *self.rest };
            let left = first.len - self.used;
            if left == 0 {
                // SAFETY: `count` > 0, so one past this buffer is at most one past the list.
                self.rest = unsafe { self.rest.add(1) };
                self.count -= 1;
                self.used = 0;
                continue;
            }
            let n = left.min(max).min(self.remaining);
            let piece = if first.base.is_null() {
                first.base // to nowhere, however much of it went there already
            } else {
                // SAFETY: `used <= len` of this buffer, which is valid for `len` bytes (contract of `new`).
                unsafe { first.base.add(self.used) }
            };
            self.used += n;
            self.remaining -= n;
            return (piece, n);
        }
    }

    /// Takes everything that is left; returns how much that was.
    pub fn take_all(&mut self) -> usize {
        core::mem::take(&mut self.remaining)
    }

    /// May more than so many pieces follow?
    pub fn longer_than(&self, pieces: usize) -> bool {
        self.count > pieces
    }

    /// The next pieces, of at most `max` bytes altogether and as many as the list holds; not taken. Returns how many.
    pub fn show(&self, max: usize, list: &mut [Buffer]) -> usize {
        let mut ahead = Buffers { remaining: self.remaining.min(max), ..*self };
        let mut count = 0;
        while count < list.len() && ahead.remaining > 0 {
            let (base, len) = ahead.take(usize::MAX);
            list[count] = Buffer { base, len };
            count += 1;
        }
        count
    }

    /// Takes the next `n` bytes.
    pub fn pass(&mut self, mut n: usize) {
        while n > 0 && self.remaining > 0 {
            n -= self.take(n).1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_copied_arrives_whatever_the_distance() {
        const LEN: usize = 3 * PIECE_BYTES;
        let from: Vec<u8> = (0..LEN + 4096).map(|nth| (nth % 251) as u8).collect();
        for distance in [0, 1, 8, 15, 16, 17, 64, 4095] {
            for n in [1, PIECE_BYTES, PIECE_BYTES + 1, 2 * PIECE_BYTES, LEN - 1, LEN] {
                let mut to = vec![0u8; LEN + 3 * 4096];
                let at =
                    (from.as_ptr() as usize).wrapping_sub(to.as_ptr() as usize) % 4096 + distance;
                assert_eq!(
                    creeps(from.as_ptr(), to[at..].as_mut_ptr(), n),
                    n > PIECE_BYTES && (1..16).contains(&distance)
                );
                // SAFETY: both are so long, and apart.
                unsafe { copy(from.as_ptr(), to[at..].as_mut_ptr(), n) };
                assert_eq!(to[at..at + n], from[..n]);
                assert!(to[..at].iter().chain(&to[at + n..]).all(|byte| *byte == 0));
            }
        }
    }
}
