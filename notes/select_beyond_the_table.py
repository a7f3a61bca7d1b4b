"""select() fails with EBADF for a closed number, but ignores one that lies beyond the process's descriptor table.

The table holds 64 or 256 numbers at first and grows with the highest number in use, so what select says of a number that is
not open depends on numbers that the program never named: a hidden descriptor with a high number turns 0 into EBADF.
"""

import ctypes
import os

libc = ctypes.CDLL(None, use_errno=True)
NUMBER = 900


def select_on(fd):
    words = (ctypes.c_ulong * 16)()
    words[fd // 64] |= 1 << fd % 64
    now = (ctypes.c_long * 2)(0, 0)
    count = libc.select(fd + 1, words, None, None, now)
    return count if count >= 0 else os.strerror(ctypes.get_errno())


small = select_on(NUMBER)
os.dup2(0, NUMBER + 50)
large = select_on(NUMBER)
print(f"select on the closed number {NUMBER}: {small!r} in a small table, {large!r} in a larger one")
assert (small, large) == (0, "Bad file descriptor")
