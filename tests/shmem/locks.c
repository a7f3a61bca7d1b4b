/* Locks: one has it, all have it in turn, threads too, and it is 0 again in the end. */
#include "check.h"
#include <pthread.h>

#define ROUNDS 300

static long locks[2], lock;
static long count, holder, turns;

static void *work(void *unused) {
    (void) unused;
    for (int i = 0; i < ROUNDS; i++) {
        shmem_set_lock(&lock);
        CHECK(shmem_atomic_compare_swap(&holder, 0L, 1L, 0) == 0);
        shmem_p(&count, shmem_g(&count, 0) + 1, 0);
        shmem_quiet();
        shmem_atomic_set(&holder, 0L, 0);
        shmem_clear_lock(&lock);
    }
    return NULL;
}

int main(void) {
    int provided;
    CHECK(shmem_init_thread(SHMEM_THREAD_MULTIPLE, &provided) == 0 && provided == SHMEM_THREAD_MULTIPLE);
    begin();
    pthread_t threads[3];
    for (int i = 0; i < 3; i++)
        CHECK(pthread_create(&threads[i], NULL, work, NULL) == 0);
    for (int i = 0; i < 3; i++)
        pthread_join(threads[i], NULL);
    shmem_barrier_all();
    CHECK(shmem_g(&count, 0) == 3L * ROUNDS * pes && lock == 0);

    /* One that is had by another is not had by who only tries; nor by who has it already. */
    if (me == 0) {
        shmem_set_lock(&locks[1]);
        CHECK(shmem_test_lock(&locks[1]) == 1 && shmem_test_lock(&locks[0]) == 0);
    }
    shmem_barrier_all();
    if (me > 0)
        CHECK(shmem_test_lock(&locks[1]) != 0 && shmem_test_lock(&locks[0]) != 0);
    shmem_barrier_all();
    if (me == 0) {
        shmem_clear_lock(&locks[1]);
        shmem_clear_lock(&locks[0]);
    }
    shmem_barrier_all();
    while (shmem_test_lock(&locks[1]))
        usleep(100);
    turns++;
    shmem_clear_lock(&locks[1]);
    shmem_barrier_all();
    CHECK(turns == 1 && locks[0] == 0 && locks[1] == 0);

    /* In the order in which they came: who has come before has it before. */
    static long order, came;
    for (int pe = 0; pe < pes; pe++) {
        if (me == 0 && pe == 0)
            shmem_set_lock(&lock);
        if (me == pe && pe > 0) {
            shmem_wait_until(&came, SHMEM_CMP_EQ, 1L);
            shmem_set_lock(&lock);
            CHECK(shmem_atomic_fetch_inc(&order, 0) == me - 1);
            shmem_clear_lock(&lock);
        }
    }
    if (me == 0) {
        /* (Once it stands in the queue: its number, in the lock's first half.) */
        for (int pe = 1; pe < pes; pe++) {
            shmem_p(&came, 1L, pe);
            while ((shmem_g(&lock, 0) & 0xffffffff) != pe + 1)
                usleep(100);
        }
        shmem_clear_lock(&lock);
    }
    shmem_barrier_all();
    CHECK(lock == 0 && shmem_g(&order, 0) == pes - 1);
    shmem_finalize();
    return 0;
}
