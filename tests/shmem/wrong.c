/* What a program must not do: each is told, by the one that does it, and ends the job, in which the others wait. */
#include "check.h"

static long lock, sync_words[SHMEM_SYNC_SIZE], there;

int main(int count, char **words) {
    int local = 0;
    const char *word = count > 1 ? words[1] : "";
    if (!strcmp(word, "early"))
        return shmem_n_pes();
    begin();
    if (me == pes - 1) {
        if (!strcmp(word, "address"))
            shmem_int_p(&local, 1, 0);
        if (!strcmp(word, "length"))
            shmem_putmem(&there, words, (size_t) 1 << 40, 0);
        if (!strcmp(word, "pe"))
            shmem_long_p(&there, 1, pes);
        if (!strcmp(word, "minus"))
            (void) shmem_long_g(&there, -1);
        if (!strcmp(word, "context"))
            shmem_ctx_long_p(SHMEM_CTX_INVALID, &there, 1, 0);
        if (!strcmp(word, "comparison"))
            shmem_long_wait_until(&there, 17, 1);
        if (!strcmp(word, "signal"))
            shmem_putmem_signal(&there, &there, 1, (uint64_t *) &there, 1, 17, 0);
        if (!strcmp(word, "lock"))
            shmem_clear_lock(&lock);
        if (!strcmp(word, "scribbled")) {
            lock = 77777;
            shmem_putmem(&lock, &lock, sizeof lock, 0);
            shmem_set_lock(&lock);
        }
        if (!strcmp(word, "stride"))
            shmem_long_iput(&there, &there, -1, 1, 2, 0);
        if (!strcmp(word, "set"))
            shmem_barrier(0, 0, pes + 1, sync_words);
        if (!strcmp(word, "alone"))
            shmem_barrier(0, 0, 1, sync_words);
        if (!strcmp(word, "sync"))
            shmem_barrier(0, 0, pes, (long *) words);
        if (!strcmp(word, "root"))
            shmem_broadcastmem(SHMEM_TEAM_WORLD, &there, &there, 1, pes);
        if (!strcmp(word, "many"))
            shmem_long_alltoall(SHMEM_TEAM_WORLD, &there, &there, (size_t) 1 << 61);
        if (!strcmp(word, "unaligned"))
            shmem_long_atomic_inc((long *) ((char *) &there + 4), 0);
    }
    if (!strcmp(word, "free"))
        shmem_free(&lock);
    shmem_barrier_all();
    shmem_finalize();
    if (!strcmp(word, "late") && me == 0)
        shmem_barrier_all();
    return 0;
}
