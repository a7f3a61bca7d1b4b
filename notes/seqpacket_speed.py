"""Half a round trip of 8 bytes over a SOCK_SEQPACKET pair: the kernel and ringlet by turns, in one run.

`python3 notes/seqpacket_speed.py [LIBRARY]`: target/release/libringlet_preload.so unless told otherwise. Fails if the pair did not get to the ring.
"""

import os
import statistics
import subprocess
import sys
import tempfile

PROGRAM = r"""
#include <dlfcn.h>
#include <stdio.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>
enum { WARM = 20000, TRIPS = 100000 };
int main(void) {
    int ends[2];
    char data[8] = "ping-pon";
    socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends);
    if (fork() == 0) {
        close(ends[0]);
        while (recv(ends[1], data, 8, 0) == 8) send(ends[1], data, 8, 0);
        _exit(0);
    }
    close(ends[1]);
    struct timespec from, to;
    for (int i = 0; i < WARM + TRIPS; i++) {
        if (i == WARM) clock_gettime(CLOCK_MONOTONIC, &from);
        if (send(ends[0], data, 8, 0) != 8 || recv(ends[0], data, 8, 0) != 8) return 1;
    }
    clock_gettime(CLOCK_MONOTONIC, &to);
    int (*path)(int) = dlsym(RTLD_DEFAULT, "ringlet_path");
    printf("%d %.1f\n", path ? path(ends[0]) : 0, ((to.tv_sec - from.tv_sec) * 1e9 + to.tv_nsec - from.tv_nsec) / TRIPS / 2);
    return 0;
}
"""
RING = 3

root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
library = os.path.abspath(sys.argv[1]) if len(sys.argv) > 1 else root + "/target/release/libringlet_preload.so"
kernel, ring = [], []
with tempfile.TemporaryDirectory() as place:
    program = place + "/ping-pong"
    subprocess.run(["cc", "-O2", "-x", "c", "-", "-o", program, "-ldl"], input=PROGRAM.encode(), check=True)
    for _ in range(5):
        for times, preload in [(kernel, ""), (ring, library)]:
            said = subprocess.run([program], env={**os.environ, "LD_PRELOAD": preload}, capture_output=True, check=True)
            path, ns = said.stdout.split()
            assert int(path) == (RING if preload else 0), "not on the ring"
            times.append(float(ns))
both = [(statistics.median(times), min(times)) for times in (kernel, ring)]
for name, (median, least) in zip(["kernel", "ringlet"], both):
    print(f"{name}: {median:.0f} ns half a round trip (least {least:.0f})")
print(f"{both[0][0] / both[1][0]:.1f}x")
