/* Atomics: each does what it says, and none is lost among many. */
#include "check.h"

#define ROUNDS 2000

#define EXTENDED(NAME, T) \
    { \
        static T there; \
        T found; \
        there = (T) me; \
        shmem_barrier_all(); \
        CHECK(shmem_atomic_fetch(&there, next) == (T) next); \
        CHECK(shmem_ctx_##NAME##_atomic_fetch(SHMEM_CTX_DEFAULT, &there, next) == (T) next); \
        CHECK(shmem_atomic_swap(SHMEM_CTX_DEFAULT, &there, (T) 100, next) == (T) next); \
        shmem_##NAME##_atomic_swap_nbi(&found, &there, (T) 200, next); \
        shmem_quiet(); \
        CHECK(found == (T) 100); \
        shmem_atomic_set(&there, (T) 50, next); \
        shmem_atomic_fetch_nbi(&found, &there, next); \
        shmem_quiet(); \
        CHECK(found == (T) 50); \
        shmem_barrier_all(); \
    }

#define STANDARD(NAME, T) \
    EXTENDED(NAME, T) \
    { \
        static T sum, seen, swapped; \
        T found; \
        sum = seen = swapped = 0; \
        shmem_barrier_all(); \
        for (int i = 0; i < ROUNDS; i++) { \
            T before = shmem_atomic_fetch_add(&sum, (T) 2, 0); \
            CHECK(i == 0 || before > seen); \
            seen = before; \
            shmem_atomic_add(&sum, (T) 1, 0); \
            shmem_atomic_inc(&sum, 0); \
            shmem_##NAME##_atomic_fetch_inc_nbi(&found, &sum, 0); \
            shmem_ctx_##NAME##_atomic_fetch_add_nbi(SHMEM_CTX_DEFAULT, &found, &sum, (T) 1, 0); \
            while (shmem_atomic_compare_swap(&swapped, (T) i, (T) (i + 1), me) != (T) i) \
                CHECK(0); \
            shmem_##NAME##_atomic_compare_swap_nbi(&found, &swapped, (T) -1, (T) 0, me); \
            CHECK(found == (T) (i + 1)); \
        } \
        shmem_barrier_all(); \
        CHECK(shmem_g(&sum, 0) == (T) (6 * ROUNDS * pes)); \
        CHECK(shmem_atomic_fetch_inc(&swapped, me) == ROUNDS && shmem_g(&swapped, me) == ROUNDS + 1); \
        shmem_barrier_all(); \
    }

#define BITWISE(NAME, T) \
    { \
        static T bits; \
        T found; \
        bits = 0; \
        shmem_barrier_all(); \
        shmem_atomic_or(&bits, (T) 1 << me, 0); \
        shmem_barrier_all(); \
        CHECK(shmem_g(&bits, 0) == ((T) 1 << pes) - 1); \
        shmem_barrier_all(); \
        CHECK(shmem_atomic_fetch_and(&bits, (T) ~((T) 1 << me), 0) & (T) 1 << me); \
        shmem_barrier_all(); \
        CHECK(shmem_g(&bits, 0) == 0); \
        shmem_barrier_all(); \
        shmem_atomic_xor(SHMEM_CTX_DEFAULT, &bits, (T) 1 << me, 0); \
        CHECK(shmem_atomic_fetch_xor(&bits, (T) 1 << me, 0) & (T) 1 << me); \
        CHECK(!(shmem_##NAME##_atomic_fetch_or(&bits, (T) 1 << me, 0) & (T) 1 << me)); \
        shmem_ctx_##NAME##_atomic_fetch_or_nbi(SHMEM_CTX_DEFAULT, &found, &bits, (T) 1 << me, 0); \
        CHECK(found & (T) 1 << me); \
        shmem_##NAME##_atomic_fetch_and_nbi(&found, &bits, (T) -1, 0); \
        shmem_##NAME##_atomic_fetch_xor_nbi(&found, &bits, (T) 0, 0); \
        CHECK(found & (T) 1 << me); \
        shmem_atomic_and(&bits, (T) ~((T) 1 << me), 0); \
        shmem_barrier_all(); \
        CHECK(shmem_g(&bits, 0) == 0); \
        shmem_barrier_all(); \
    }

int main(void) {
    begin();
    STANDARD(int, int)
    STANDARD(long, long)
    STANDARD(longlong, long long)
    STANDARD(uint, unsigned)
    STANDARD(ulong, unsigned long)
    STANDARD(ulonglong, unsigned long long)
    STANDARD(int32, int32_t)
    STANDARD(int64, int64_t)
    STANDARD(uint32, uint32_t)
    STANDARD(uint64, uint64_t)
    STANDARD(size, size_t)
    STANDARD(ptrdiff, ptrdiff_t)
    EXTENDED(float, float)
    EXTENDED(double, double)
    BITWISE(uint, unsigned)
    BITWISE(ulong, unsigned long)
    BITWISE(ulonglong, unsigned long long)
    BITWISE(int32, int32_t)
    BITWISE(int64, int64_t)
    BITWISE(uint32, uint32_t)
    BITWISE(uint64, uint64_t)
    shmem_finalize();
    return 0;
}
