/* What OpenSHMEM's calls cost between two PEs, by any library: one figure a line, for speed.py. Asked of PE 0; the other one waits in a barrier. */
#include <shmem.h>
#include <stdio.h>
#include <time.h>

static long flag, counter;
static char small[64];

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1e9 + time.tv_nsec;
}

#define TIMES(name, unit, count, amount, act) \
    do { \
        shmem_barrier_all(); \
        double began = now(); \
        if (shmem_my_pe() == 0) { \
            for (long i = 1; i <= (count); i++) \
                act; \
            shmem_quiet(); \
            printf("%s\t%s\t%g\n", name, unit, (amount) * 1.0 * (count) / (now() - began)); \
        } \
    } while (0)

int main(void) {
    shmem_init();
    int me = shmem_my_pe();
    size_t bytes = 1 << 20;
    char *there = shmem_malloc(bytes), *here = shmem_malloc(bytes);
    for (size_t i = 0; i < bytes; i++)
        there[i] = here[i] = (char) i;
    TIMES("put of 8 B", "M/s", 100000, 1000, shmem_putmem(small, here, 8, 1));
    TIMES("get of 8 B", "M/s", 100000, 1000, shmem_getmem(here, small, 8, 1));
    TIMES("p", "M/s", 100000, 1000, shmem_long_p(&counter, i, 1));
    TIMES("atomic fetch and add", "M/s", 100000, 1000, (void) shmem_long_atomic_fetch_add(&counter, 1, 1));
    TIMES("put of 4 KiB", "GB/s", 20000, 4096, shmem_putmem(there, here, 4096, 1));
    TIMES("put of 1 MiB", "GB/s", 500, bytes, shmem_putmem(there, here, bytes, 1));
    TIMES("get of 1 MiB", "GB/s", 500, bytes, shmem_getmem(here, there, bytes, 1));
    shmem_barrier_all();
    long count = 20000;
    double began = now();
    for (long i = 1; i <= count; i++) {
        if (me == 0)
            shmem_long_p(&flag, i, 1);
        shmem_long_wait_until(&flag, SHMEM_CMP_EQ, i);
        if (me == 1)
            shmem_long_p(&flag, i, 0);
    }
    if (me == 0)
        printf("p and wait, half a round trip\tns\t%g\n", (now() - began) / count / 2);
    shmem_barrier_all();
    began = now();
    for (long i = 0; i < count; i++)
        shmem_barrier_all();
    if (me == 0)
        printf("barrier of two\tns\t%g\n", (now() - began) / count);
    fflush(stdout);
    shmem_finalize();
    return 0;
}
