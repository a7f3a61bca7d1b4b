/* Collectives of teams and of active sets, against what each should have; those of all types; small, large, in place. */
#include "check.h"
#include <complex.h>

#define MOST 70000

static long sync_words[SHMEM_SYNC_SIZE], work[MOST];
static long source[MOST], dest[8 * MOST];

static long value(int pe, int i) {
    return pe * 100003L + i * 7;
}

static void restored(void) {
    shmem_barrier_all();
    for (int i = 0; i < SHMEM_SYNC_SIZE; i++)
        CHECK(sync_words[i] == SHMEM_SYNC_VALUE);
    memset(dest, 0x55, sizeof dest);
    shmem_barrier_all();
}

static void moves(int count) {
    for (int i = 0; i < count; i++)
        source[i] = value(me, i);
    restored();
    for (int root = 0; root < pes; root++) {
        CHECK(shmem_broadcast(SHMEM_TEAM_WORLD, dest, source, count, root) == 0);
        for (int i = 0; i < count; i++)
            CHECK(dest[i] == value(root, i));
        restored();
        shmem_broadcast64(dest, source, count, root, 0, 0, pes, sync_words);
        for (int i = 0; i < count; i++)
            CHECK(me == root ? dest[i] == 0x5555555555555555 : dest[i] == value(root, i));
        restored();
    }
    for (int old = 0; old < 2; old++) {
        if (old)
            shmem_fcollect64(dest, source, count, 0, 0, pes, sync_words);
        else
            CHECK(shmem_long_fcollect(SHMEM_TEAM_WORLD, dest, source, count) == 0);
        for (int i = 0; i < count * pes; i++)
            CHECK(dest[i] == value(i / count, i % count));
        restored();
        /* Of different lengths, one of which is none. */
        int ours = me == 1 ? 0 : count / (me + 1);
        if (old)
            shmem_collect32(dest, source, ours * 2, 0, 0, pes, sync_words);
        else
            CHECK(shmem_collect(SHMEM_TEAM_WORLD, dest, source, ours) == 0);
        long *at = dest;
        for (int pe = 0; pe < pes; pe++)
            for (int i = 0; i < (pe == 1 ? 0 : count / (pe + 1)); i++)
                CHECK(*at++ == value(pe, i));
        restored();
        int each = count / pes / 3;
        if (old)
            shmem_alltoall64(dest, source, each, 0, 0, pes, sync_words);
        else
            CHECK(shmem_alltoallmem(SHMEM_TEAM_WORLD, dest, source, each * sizeof(long)) == 0);
        for (int i = 0; i < each * pes; i++)
            CHECK(dest[i] == value(i / each, me * each + i % each));
        restored();
        if (old)
            shmem_alltoalls64(dest, source, 2, 3, each, 0, 0, pes, sync_words);
        else
            CHECK(shmem_alltoalls(SHMEM_TEAM_WORLD, dest, source, 2, 3, each) == 0);
        for (int i = 0; i < each * pes; i++)
            CHECK(dest[i * 2] == value(i / each, (me * each + i % each) * 3));
        restored();
    }
}

/* Every PE's number and element, combined in their order. */
#define REDUCE(NAME, T, op, RESULT) \
    { \
        static T in[100], out[100]; \
        for (int count = 0; count <= 100; count += count < 3 ? 1 : 97 / 3 + 1) { \
            for (int i = 0; i < count; i++) \
                in[i] = (T) (me % 3 + i % 5 + 1); \
            shmem_barrier_all(); \
            CHECK(shmem_##op##_reduce(SHMEM_TEAM_WORLD, out, in, count) == 0); \
            for (int way = 0; way < 2; way++) { \
                for (int i = 0; i < count; i++) { \
                    T a = (T) (i % 5 + 1); \
                    for (int pe = 1; pe < pes; pe++) { \
                        T b = (T) (pe % 3 + i % 5 + 1); \
                        a = (T) (RESULT); \
                    } \
                    CHECK(out[i] == a); \
                } \
                memcpy(out, in, sizeof in); \
                CHECK(shmem_##NAME##_##op##_reduce(SHMEM_TEAM_WORLD, out, out, count) == 0); \
            } \
        } \
    }
#define TO_ALL(NAME, T, op, RESULT) \
    { \
        static T in[10], out[10], work[10]; \
        for (int i = 0; i < 10; i++) \
            in[i] = (T) (me % 3 + i + 1); \
        shmem_barrier_all(); \
        shmem_##NAME##_##op##_to_all(out, in, 10, 0, 0, pes, work, sync_words); \
        for (int i = 0; i < 10; i++) { \
            T a = (T) (i + 1); \
            for (int pe = 1; pe < pes; pe++) { \
                T b = (T) (pe % 3 + i + 1); \
                a = (T) (RESULT); \
            } \
            CHECK(out[i] == a); \
        } \
        restored(); \
    }
#define SUMS(R, NAME, T) R(NAME, T, sum, a + b) R(NAME, T, prod, a * b)
#define ORDERED(R, NAME, T) SUMS(R, NAME, T) R(NAME, T, min, b < a ? b : a) R(NAME, T, max, b > a ? b : a)
#define BITWISE(R, NAME, T) R(NAME, T, and, a & b) R(NAME, T, or, a | b) R(NAME, T, xor, a ^ b)

static void reductions(void) {
    ORDERED(REDUCE, char, char)
    ORDERED(REDUCE, schar, signed char)
    ORDERED(REDUCE, short, short)
    ORDERED(REDUCE, int, int)
    ORDERED(REDUCE, long, long)
    ORDERED(REDUCE, longlong, long long)
    ORDERED(REDUCE, ptrdiff, ptrdiff_t)
    ORDERED(REDUCE, uchar, unsigned char)
    ORDERED(REDUCE, ushort, unsigned short)
    ORDERED(REDUCE, uint, unsigned)
    ORDERED(REDUCE, ulong, unsigned long)
    ORDERED(REDUCE, ulonglong, unsigned long long)
    ORDERED(REDUCE, int8, int8_t)
    ORDERED(REDUCE, int16, int16_t)
    ORDERED(REDUCE, int32, int32_t)
    ORDERED(REDUCE, int64, int64_t)
    ORDERED(REDUCE, uint8, uint8_t)
    ORDERED(REDUCE, uint16, uint16_t)
    ORDERED(REDUCE, uint32, uint32_t)
    ORDERED(REDUCE, uint64, uint64_t)
    ORDERED(REDUCE, size, size_t)
    ORDERED(REDUCE, float, float)
    ORDERED(REDUCE, double, double)
    ORDERED(REDUCE, longdouble, long double)
    SUMS(REDUCE, complexf, float _Complex)
    SUMS(REDUCE, complexd, double _Complex)
    BITWISE(REDUCE, uchar, unsigned char)
    BITWISE(REDUCE, ushort, unsigned short)
    BITWISE(REDUCE, uint, unsigned)
    BITWISE(REDUCE, ulong, unsigned long)
    BITWISE(REDUCE, ulonglong, unsigned long long)
    BITWISE(REDUCE, int8, int8_t)
    BITWISE(REDUCE, int16, int16_t)
    BITWISE(REDUCE, int32, int32_t)
    BITWISE(REDUCE, int64, int64_t)
    BITWISE(REDUCE, uint8, uint8_t)
    BITWISE(REDUCE, uint16, uint16_t)
    BITWISE(REDUCE, uint32, uint32_t)
    BITWISE(REDUCE, uint64, uint64_t)
    BITWISE(REDUCE, size, size_t)
    ORDERED(TO_ALL, short, short)
    ORDERED(TO_ALL, int, int)
    ORDERED(TO_ALL, long, long)
    ORDERED(TO_ALL, longlong, long long)
    ORDERED(TO_ALL, float, float)
    ORDERED(TO_ALL, double, double)
    ORDERED(TO_ALL, longdouble, long double)
    SUMS(TO_ALL, complexf, float _Complex)
    SUMS(TO_ALL, complexd, double _Complex)
    BITWISE(TO_ALL, short, short)
    BITWISE(TO_ALL, int, int)
    BITWISE(TO_ALL, long, long)
    BITWISE(TO_ALL, longlong, long long)
    /* A complex product is no product of its parts. */
    static double complex turn, turned;
    turn = I;
    shmem_barrier_all();
    shmem_prod_reduce(SHMEM_TEAM_WORLD, &turned, &turn, 1);
    double complex expected = 1;
    for (int pe = 0; pe < pes; pe++)
        expected *= I;
    CHECK(turned == expected);
}

/* Every second PE, by the logarithm of 2; and each alone. */
static void sets(void) {
    int size = (pes + 1) / 2;
    if (me % 2 == 0)
        for (int round = 0; round < 200; round++) {
            source[0] = me + round;
            shmem_long_sum_to_all(dest, source, 1, 0, 1, size, work, sync_words);
            long sum = 0;
            for (int i = 0; i < size; i++)
                sum += 2 * i + round;
            CHECK(dest[0] == sum);
            shmem_barrier(0, 1, size, sync_words);
            shmem_sync(0, 1, size, sync_words);
        }
    restored();
    source[0] = me;
    shmem_long_max_to_all(dest, source, 1, me, 0, 1, work, sync_words);
    CHECK(dest[0] == me);
    restored();
}

/* Nobody leaves before all have come. */
static void barriers(void) {
    static long arrived;
    for (int round = 1; round <= 2000; round++) {
        shmem_atomic_inc(&arrived, 0);
        switch (round % 3) {
        case 0: shmem_barrier_all(); break;
        case 1: shmem_sync_all(); break;
        case 2: CHECK(shmem_team_sync(SHMEM_TEAM_WORLD) == 0); break;
        }
        CHECK(shmem_atomic_fetch(&arrived, 0) >= (long) round * pes);
    }
    shmem_barrier_all();
}

int main(void) {
    begin();
    CHECK(pes <= 8);
    moves(24);
    moves(3000);
    moves(MOST);
    reductions();
    sets();
    barriers();
    CHECK(shmem_team_sync(SHMEM_TEAM_INVALID) != 0 && shmem_broadcast(SHMEM_TEAM_INVALID, dest, source, 1, 0) != 0);
    shmem_finalize();
    return 0;
}
