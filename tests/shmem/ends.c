/* The ways in which a PE ends, while others wait. */
#include "check.h"
#include <signal.h>
#include <sys/wait.h>

static long lock, never;

int main(int count, char **words) {
    const char *way = count > 1 ? words[1] : "", *where = count > 2 ? words[2] : "barrier";
    if (!strcmp(way, "unstarted") && !strcmp(getenv("RINGLET_SHMEM_PE"), "1"))
        return 0;
    begin();
    if (!strcmp(way, "left") && me == 0)
        _exit(0);
    void *heap = shmem_malloc(1 << 20);
    memset(heap, 1, 1 << 20);
    if (!strcmp(where, "lock") && me == 0)
        shmem_set_lock(&lock);
    shmem_barrier_all();
    printf("%d\n", (int) getpid());
    fflush(stdout);
    if (me == 0) {
        if (!strcmp(way, "global"))
            shmem_global_exit(atoi(words[3]));
        if (!strcmp(way, "status"))
            exit(7);
        if (!strcmp(way, "_exit"))
            _exit(0);
        if (!strcmp(way, "kill"))
            kill(getpid(), SIGKILL);
        if (!strcmp(way, "fault"))
            *(volatile int *) (uintptr_t) me = 1;
        if (!strcmp(way, "sleep"))
            pause();
    }
    if (!strcmp(way, "well")) {
        /* A child is no PE: its end is not ours, for which others wait. */
        static volatile long mine = 1;
        if (me == 0 && fork() == 0) {
            int is_as_it_was = mine == 1;
            mine = 2;
            exit(!is_as_it_was || mine != 2);
        }
        int status = 0;
        if (me == 0)
            wait(&status);
        CHECK(status == 0 && mine == 1);
        CHECK(shmem_team_sync(SHMEM_TEAM_WORLD) == 0);
        static long sum, one = 1;
        CHECK(shmem_sum_reduce(SHMEM_TEAM_WORLD, &sum, &one, 1) == 0 && sum == pes);
        return 0;
    }
    if (!strcmp(where, "lock"))
        shmem_set_lock(&lock);
    while (!strcmp(where, "look") && !*(volatile long *) &never)
        ;
    if (!strcmp(where, "wait"))
        shmem_long_wait_until(&never, SHMEM_CMP_NE, 0);
    shmem_barrier_all();
    shmem_finalize();
    return 0;
}
