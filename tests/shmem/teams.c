/* Teams, and contexts of theirs. */
#include "check.h"

static long source[16], dest[16];

/* The PEs of a team, in its order. */
static void is_team(shmem_team_t team, int start, int stride, int size) {
    int rank = -1;
    for (int i = 0; i < size; i++) {
        CHECK(shmem_team_translate_pe(team, i, SHMEM_TEAM_WORLD) == start + i * stride);
        CHECK(shmem_team_translate_pe(SHMEM_TEAM_WORLD, start + i * stride, team) == i);
        if (start + i * stride == me)
            rank = i;
    }
    CHECK(shmem_team_n_pes(team) == size && shmem_team_my_pe(team) == rank && rank >= 0);
    CHECK(shmem_team_translate_pe(team, size, SHMEM_TEAM_WORLD) == -1 && shmem_team_translate_pe(team, -1, SHMEM_TEAM_WORLD) == -1);
    for (int round = 0; round < 20; round++) {
        source[0] = me + round;
        CHECK(shmem_sum_reduce(team, dest, source, 1) == 0);
        long sum = 0;
        for (int i = 0; i < size; i++)
            sum += start + i * stride + round;
        CHECK(dest[0] == sum);
    }
    /* By a context PEs are the team's. */
    shmem_ctx_t ctx;
    shmem_team_t of;
    CHECK(shmem_team_create_ctx(team, 0, &ctx) == 0 && shmem_ctx_get_team(ctx, &of) == 0 && of == team);
    static long from;
    shmem_team_sync(team);
    shmem_p(ctx, &from, (long) rank, (rank + 1) % size);
    shmem_ctx_quiet(ctx);
    shmem_team_sync(team);
    CHECK(from == (rank + size - 1) % size && shmem_g(ctx, &from, rank) == from);
    CHECK(*(long *) shmem_team_ptr(team, &from, rank) == from && !shmem_team_ptr(team, &from, size));
    shmem_team_sync(team);
    shmem_ctx_destroy(ctx);
}

int main(void) {
    begin();
    is_team(SHMEM_TEAM_WORLD, 0, 1, pes);
    is_team(SHMEM_TEAM_SHARED, 0, 1, pes);
    shmem_team_t team, part, row, column;
    shmem_team_config_t config = {.num_contexts = 3}, found;

    /* All, backwards; of these all but the first; of these every second one. */
    CHECK(shmem_team_split_strided(SHMEM_TEAM_WORLD, pes - 1, -1, pes, &config, SHMEM_TEAM_NUM_CONTEXTS, &team) == 0);
    is_team(team, pes - 1, -1, pes);
    CHECK(shmem_team_get_config(team, SHMEM_TEAM_NUM_CONTEXTS, &found) == 0 && found.num_contexts == 3);
    CHECK(shmem_team_get_config(SHMEM_TEAM_INVALID, 0, &found) != 0);
    if (pes > 2) {
        CHECK(shmem_team_split_strided(team, 1, 2, pes / 2, NULL, 0, &part) == 0);
        int is_in = (pes - 1 - me) % 2 == 1 && (pes - 1 - me) / 2 < pes / 2;
        CHECK((part != SHMEM_TEAM_INVALID) == is_in);
        if (is_in)
            is_team(part, pes - 2, -2, pes / 2);
        shmem_team_destroy(part);
    }
    shmem_team_destroy(team);

    for (int range = 1; range <= pes + 1; range++) {
        CHECK(shmem_team_split_2d(SHMEM_TEAM_WORLD, range, NULL, 0, &row, NULL, 0, &column) == 0);
        int width = range < pes ? range : pes, x = me % width, y = me / width;
        int length = pes - y * width < width ? pes - y * width : width;
        is_team(row, y * width, 1, length);
        is_team(column, x, width, (pes - x + width - 1) / width);
        shmem_team_destroy(row);
        shmem_team_destroy(column);
    }

    /* What makes no sense is refused by all. */
    int bad[][3] = {{0, 1, pes + 1}, {-1, 1, 1}, {0, 1, 0}, {0, 1, -1}, {pes, 1, 1}, {0, -1, 2}, {0, pes, 2}, {0, 0, 2}, {0, 1 << 30, 4}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        team = SHMEM_TEAM_WORLD;
        CHECK(shmem_team_split_strided(SHMEM_TEAM_WORLD, bad[i][0], bad[i][1], bad[i][2], NULL, 0, &team) != 0);
        CHECK(team == SHMEM_TEAM_INVALID);
    }
    CHECK(shmem_team_split_2d(SHMEM_TEAM_WORLD, 0, NULL, 0, &row, NULL, 0, &column) != 0 && row == SHMEM_TEAM_INVALID);
    CHECK(shmem_team_split_strided(SHMEM_TEAM_INVALID, 0, 1, 1, NULL, 0, &team) != 0 && team == SHMEM_TEAM_INVALID);
    CHECK(shmem_team_my_pe(SHMEM_TEAM_INVALID) == -1 && shmem_team_n_pes(SHMEM_TEAM_INVALID) == -1);
    CHECK(shmem_team_translate_pe(SHMEM_TEAM_INVALID, 0, SHMEM_TEAM_WORLD) == -1);

    /* As many as there are, of which some PEs have more: then all are told that there are no more, and have as many as before. */
    shmem_team_t many[80];
    for (int round = 0; round < 3; round++) {
        int count = 0;
        CHECK(shmem_team_split_strided(SHMEM_TEAM_WORLD, 0, 1, 1, NULL, 0, &part) == 0);
        while (shmem_team_split_strided(SHMEM_TEAM_WORLD, 0, 1, pes, NULL, 0, &many[count]) == 0)
            CHECK(++count < 80);
        CHECK(many[count] == SHMEM_TEAM_INVALID && count >= 32);
        is_team(many[0], 0, 1, pes);
        is_team(many[count - 1], 0, 1, pes);
        while (count > 0)
            shmem_team_destroy(many[--count]);
        shmem_team_destroy(part);
    }
    shmem_team_destroy(SHMEM_TEAM_INVALID);

    shmem_ctx_t ctx = SHMEM_CTX_DEFAULT;
    CHECK(shmem_team_create_ctx(SHMEM_TEAM_INVALID, 0, &ctx) != 0 && ctx == SHMEM_CTX_INVALID);
    CHECK(shmem_ctx_get_team(SHMEM_CTX_INVALID, &team) != 0 && team == SHMEM_TEAM_INVALID);
    CHECK(shmem_ctx_get_team(SHMEM_CTX_DEFAULT, &team) == 0 && team == SHMEM_TEAM_WORLD);
    shmem_ctx_destroy(SHMEM_CTX_INVALID);
    shmem_finalize();
    return 0;
}
