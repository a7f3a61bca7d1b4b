/* Who may be stored to by a pointer that another PE has looks again sooner than who may not: counted in sleeps, beside each other. */
#include "check.h"

#define SLEEPS 200
#define FEWER 25

static long sleeps(int pid) {
    char path[64], line[256];
    long count = -1;
    snprintf(path, sizeof path, "/proc/%d/status", pid);
    FILE *file = fopen(path, "r");
    CHECK(file);
    while (fgets(line, sizeof line, file))
        sscanf(line, "voluntary_ctxt_switches: %ld", &count);
    fclose(file);
    CHECK(count >= 0);
    return count;
}

int main(void) {
    static int pid;
    static long flag;
    begin();
    pid = getpid();
    shmem_barrier_all();
    if (me == 0) {
        int pointed = shmem_int_g(&pid, 1), other = shmem_int_g(&pid, 2);
        /* (Whether it can be reached is no pointer.) */
        CHECK(shmem_addr_accessible(&flag, 2));
        long *theirs = shmem_ptr(&flag, 1), before[] = {sleeps(pointed), sleeps(other)}, slept[2];
        do {
            usleep(1000);
            slept[0] = sleeps(pointed) - before[0];
            slept[1] = sleeps(other) - before[1];
        } while (slept[0] < SLEEPS);
        __atomic_store_n(theirs, 1, __ATOMIC_RELEASE);
        shmem_p(&flag, 1, 2);
        if (slept[1] > slept[0] - FEWER)
            fprintf(stderr, "%ld sleeps, and %ld\n", slept[0], slept[1]);
        CHECK(slept[1] <= slept[0] - FEWER);
    } else {
        shmem_wait_until(&flag, SHMEM_CMP_EQ, 1);
    }
    shmem_barrier_all();
    shmem_finalize();
    return 0;
}
