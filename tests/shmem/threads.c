/* Threads of each PE that make teams at the same time, each of another team. */
#include "check.h"
#include <pthread.h>

enum { ROUNDS = 300, PARENTS = 3 };

static shmem_team_t parents[PARENTS] = {SHMEM_TEAM_WORLD, SHMEM_TEAM_SHARED};
static long source[PARENTS], dest[PARENTS];

static void *splits(void *parent) {
    long number = (shmem_team_t *) parent - parents;
    for (long round = 0; round < ROUNDS; round++) {
        shmem_team_t team;
        CHECK(shmem_team_split_strided(parents[number], 0, 1, pes, NULL, 0, &team) == 0);
        source[number] = me + 1000 * number + round;
        CHECK(shmem_sum_reduce(team, &dest[number], &source[number], 1) == 0);
        CHECK(dest[number] == pes * (1000 * number + round) + pes * (pes - 1) / 2);
        shmem_team_destroy(team);
    }
    return NULL;
}

static void *splits_once(void *parent) {
    shmem_team_t team;
    CHECK(shmem_team_split_strided(*(shmem_team_t *) parent, 0, 1, pes, NULL, 0, &team) == 0);
    CHECK(shmem_team_sync(team) == 0);
    shmem_team_destroy(team);
    return NULL;
}

int main(void) {
    int provided;
    CHECK(shmem_init_thread(SHMEM_THREAD_MULTIPLE, &provided) == 0 && provided == SHMEM_THREAD_MULTIPLE);
    begin();
    /* (Its PEs are not in the order of the others'.) */
    CHECK(shmem_team_split_strided(SHMEM_TEAM_WORLD, pes - 1, -1, pes, NULL, 0, &parents[2]) == 0);
    pthread_t threads[PARENTS];
    /* Not in the same order on all PEs. */
    for (int number = 0; number < PARENTS; number++)
        CHECK(pthread_create(&threads[number], NULL, splits, &parents[(number + me) % PARENTS]) == 0);
    for (int number = 0; number < PARENTS; number++)
        CHECK(pthread_join(threads[number], NULL) == 0);
    shmem_team_destroy(parents[2]);
    /* At once on one PE, and one after the other on the others. */
    for (int round = 0; round < ROUNDS; round++) {
        if (me) {
            splits_once(&parents[round % 2]);
            splits_once(&parents[(round + 1) % 2]);
            continue;
        }
        CHECK(pthread_create(&threads[0], NULL, splits_once, &parents[0]) == 0);
        splits_once(&parents[1]);
        CHECK(pthread_join(threads[0], NULL) == 0);
    }
    /* None of their slots is lost. */
    shmem_team_t teams[40];
    for (int number = 0; number < 40; number++)
        CHECK(shmem_team_split_strided(SHMEM_TEAM_WORLD, 0, 1, pes, NULL, 0, &teams[number]) == 0);
    for (int number = 0; number < 40; number++)
        shmem_team_destroy(teams[number]);
    shmem_finalize();
    return 0;
}
