/* Waiting, awake and asleep, for one value, for all, any and some of them. */
#include "check.h"

#define N 8

static void rest(void) {
    usleep(30000);
}

#define TYPE(NAME, T) \
    { \
        static T one, many[N]; \
        T values[N]; \
        size_t found[N]; \
        int status[N] = {0, 1, 0, 0, 0, 0, 0, 1}; \
        one = 0; \
        memset(many, 0, sizeof many); \
        shmem_barrier_all(); \
        if (me == 0) \
            rest(); \
        shmem_p(&one, (T) 5, next); \
        shmem_wait_until(&one, SHMEM_CMP_EQ, (T) 5); \
        shmem_##NAME##_wait_until(&one, SHMEM_CMP_NE, (T) 4); \
        shmem_wait_until(&one, SHMEM_CMP_GT, (T) 4); \
        shmem_wait_until(&one, SHMEM_CMP_GE, (T) 5); \
        shmem_wait_until(&one, SHMEM_CMP_LT, (T) 6); \
        shmem_wait_until(&one, SHMEM_CMP_LE, (T) 5); \
        CHECK(shmem_test(&one, SHMEM_CMP_EQ, (T) 5) && !shmem_##NAME##_test(&one, SHMEM_CMP_GT, (T) 5)); \
        CHECK(((T) -1 > 0) == shmem_test(&one, SHMEM_CMP_LT, (T) -1)); \
        CHECK(shmem_test_any(many, N, NULL, SHMEM_CMP_NE, (T) 0) == SIZE_MAX && !shmem_test_all(many, N, NULL, SHMEM_CMP_NE, (T) 0)); \
        CHECK(shmem_test_some(many, N, found, NULL, SHMEM_CMP_NE, (T) 0) == 0); \
        shmem_barrier_all(); \
        for (int i = 0; i < N; i++) \
            if (!status[i]) { \
                shmem_p(&many[i], (T) (i + 1), next); \
                if (i == 4 && me == 0) \
                    rest(); \
            } \
        int taken = 0; \
        while (taken < N - 2) { \
            size_t i = shmem_wait_until_any(many, N, status, SHMEM_CMP_NE, (T) 0); \
            CHECK(i < N && !status[i] && many[i] == (T) (i + 1)); \
            status[i] = 2; \
            taken++; \
        } \
        CHECK(shmem_wait_until_any(many, N, status, SHMEM_CMP_NE, (T) 0) == SIZE_MAX); \
        CHECK(shmem_##NAME##_wait_until_some(many, N, found, status, SHMEM_CMP_NE, (T) 0) == 0); \
        shmem_wait_until_all(many, N, status, SHMEM_CMP_EQ, (T) 77); \
        for (int i = 0; i < N; i++) { \
            status[i] = i == 1 || i == 7; \
            values[i] = (T) (i + 1); \
        } \
        shmem_wait_until_all(many, N, status, SHMEM_CMP_GE, (T) 1); \
        shmem_wait_until_all_vector(many, N, status, SHMEM_CMP_EQ, values); \
        CHECK(shmem_test_all(many, N, status, SHMEM_CMP_GE, (T) 1) && !shmem_test_all(many, N, NULL, SHMEM_CMP_GE, (T) 1)); \
        CHECK(shmem_test_all_vector(many, N, status, SHMEM_CMP_EQ, values) && shmem_test_all(many, 0, NULL, SHMEM_CMP_EQ, (T) 9)); \
        CHECK(shmem_wait_until_some(many, N, found, NULL, SHMEM_CMP_NE, (T) 0) == N - 2 && found[0] == 0 && found[5] == 6); \
        CHECK(shmem_test_some_vector(many, N, found, status, SHMEM_CMP_EQ, values) == N - 2); \
        CHECK(shmem_wait_until_some_vector(many, N, found, NULL, SHMEM_CMP_NE, values) == 2 && found[0] == 1 && found[1] == 7); \
        CHECK(shmem_wait_until_any_vector(many, N, NULL, SHMEM_CMP_NE, values) % 6 == 1); \
        /* Whoever asks again and again has each of them. */ \
        int seen[N] = {0}; \
        for (int i = 0; i < 3 * N; i++) \
            seen[shmem_test_any_vector(many, N, status, SHMEM_CMP_EQ, values)]++; \
        for (int i = 0; i < N; i++) \
            CHECK(!seen[i] == (i == 1 || i == 7)); \
        shmem_barrier_all(); \
    }

int main(void) {
    begin();
    TYPE(short, short)
    TYPE(int, int)
    TYPE(long, long)
    TYPE(longlong, long long)
    TYPE(ushort, unsigned short)
    TYPE(uint, unsigned)
    TYPE(ulong, unsigned long)
    TYPE(ulonglong, unsigned long long)
    TYPE(int32, int32_t)
    TYPE(int64, int64_t)
    TYPE(uint32, uint32_t)
    TYPE(uint64, uint64_t)
    TYPE(size, size_t)
    TYPE(ptrdiff, ptrdiff_t)
    /* A token that goes round, also where nobody rings: a store by shmem_ptr. */
    static long token;
    for (long round = 1; round <= 300; round++) {
        if (me > 0 || round > 1)
            shmem_wait_until(&token, SHMEM_CMP_GE, me == 0 ? round - 1 : round);
        if (round % 50 == 0)
            *(volatile long *) shmem_ptr(&token, next) = round;
        else
            shmem_p(&token, round, next);
    }
    shmem_barrier_all();
    shmem_finalize();
    return 0;
}
