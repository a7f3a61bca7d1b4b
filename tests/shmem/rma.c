/* Puts and gets of all kinds, and signals. */
#include "check.h"

#define N 40

/* Of a type: by its own names, by generic ones, with and without a context. */
#define TYPE(NAME, T) \
    static void test_##NAME(shmem_ctx_t ctx) { \
        static T there[N], back[N], one; \
        T here[N], fetched[N]; \
        static uint64_t sent; \
        for (int i = 0; i < N; i++) \
            here[i] = (T) (me + i); \
        for (int way = 0; way < 4; way++) { \
            memset(there, 0, sizeof there); \
            shmem_barrier_all(); \
            switch (way) { \
            case 0: shmem_##NAME##_put(there, here, N, next); break; \
            case 1: shmem_put(ctx, there, here, N, next); break; \
            case 2: shmem_put_nbi(there, here, N, next); break; \
            case 3: shmem_ctx_##NAME##_put_nbi(ctx, there, here, N, next); break; \
            } \
            shmem_barrier_all(); \
            for (int i = 0; i < N; i++) \
                CHECK(there[i] == (T) (previous + i)); \
            memset(fetched, 0, sizeof fetched); \
            switch (way) { \
            case 0: shmem_##NAME##_get(fetched, there, N, next); break; \
            case 1: shmem_get(ctx, fetched, there, N, next); break; \
            case 2: shmem_get_nbi(fetched, there, N, next); break; \
            case 3: shmem_ctx_##NAME##_get_nbi(ctx, fetched, there, N, next); break; \
            } \
            shmem_quiet(); \
            for (int i = 0; i < N; i++) \
                CHECK(fetched[i] == (T) (me + i)); \
            shmem_barrier_all(); \
        } \
        shmem_p(&one, (T) (me + 3), next); \
        shmem_barrier_all(); \
        CHECK(one == (T) (previous + 3) && shmem_g(&one, next) == (T) (me + 3)); \
        CHECK(shmem_ctx_##NAME##_g(ctx, (const T *) &one, me) == (T) (previous + 3)); \
        memset(there, 0, sizeof there); \
        memset(back, 0, sizeof back); \
        shmem_barrier_all(); \
        shmem_iput(there, here, 3, 2, 10, next); \
        shmem_ctx_##NAME##_iput(ctx, there + 1, here, 3, 1, 10, next); \
        shmem_barrier_all(); \
        for (int i = 0; i < 30; i++) \
            CHECK(there[i] == (i % 3 == 0 ? (T) (previous + i / 3 * 2) : i % 3 == 1 ? (T) (previous + i / 3) : (T) 0)); \
        shmem_iget(ctx, back, there, 2, 3, 10, next); \
        for (int i = 0; i < 20; i++) \
            CHECK(back[i] == (i % 2 == 0 ? (T) (me + i) : (T) 0)); \
        shmem_barrier_all(); \
        memset(there, 0, sizeof there); \
        sent = 0; \
        shmem_barrier_all(); \
        shmem_put_signal(there, here, N, &sent, 5, SHMEM_SIGNAL_SET, next); \
        CHECK(shmem_signal_wait_until(&sent, SHMEM_CMP_GE, 5) == 5 && there[N - 1] == (T) (previous + N - 1)); \
        shmem_barrier_all(); \
        shmem_ctx_##NAME##_put_signal_nbi(ctx, there, here + 1, 1, &sent, 2, SHMEM_SIGNAL_ADD, next); \
        CHECK(shmem_signal_wait_until(&sent, SHMEM_CMP_EQ, 7) == 7 && there[0] == (T) (previous + 1)); \
        CHECK(shmem_signal_fetch(&sent) == 7); \
        shmem_barrier_all(); \
    }
#define CALL(NAME, T) test_##NAME(ctx);
#define TYPES(X) \
    X(float, float) X(double, double) X(longdouble, long double) X(char, char) X(schar, signed char) X(short, short) X(int, int) \
    X(long, long) X(longlong, long long) X(uchar, unsigned char) X(ushort, unsigned short) X(uint, unsigned) X(ulong, unsigned long) \
    X(ulonglong, unsigned long long) X(int8, int8_t) X(int16, int16_t) X(int32, int32_t) X(int64, int64_t) X(uint8, uint8_t) \
    X(uint16, uint16_t) X(uint32, uint32_t) X(uint64, uint64_t) X(size, size_t) X(ptrdiff, ptrdiff_t)
TYPES(TYPE)

static char block[16 * N], fetched[16 * N];

#define SIZE(bits) \
    do { \
        memset(block, 0, sizeof block); \
        shmem_barrier_all(); \
        shmem_put##bits(block, mine, N, next); \
        shmem_barrier_all(); \
        shmem_ctx_get##bits##_nbi(SHMEM_CTX_DEFAULT, fetched, block, N, next); \
        CHECK(!memcmp(fetched, mine, N * bits / 8) && block[N * bits / 8 - 1] == (char) (previous + N * bits / 8 - 1)); \
        CHECK(N * bits / 8 == sizeof block || block[N * bits / 8] == 0); \
        shmem_barrier_all(); \
        shmem_iput##bits(block, mine, 1, 2, N / 2, next); \
        shmem_barrier_all(); \
        CHECK(!memcmp(shmem_ptr(block, next), mine, bits / 8)); \
        CHECK(block[bits / 8] == (char) (previous + bits / 4)); \
        shmem_barrier_all(); \
    } while (0)

int main(void) {
    begin();
    shmem_ctx_t ctx;
    CHECK(shmem_ctx_create(SHMEM_CTX_PRIVATE, &ctx) == 0);
    TYPES(CALL)
    char mine[16 * N];
    for (size_t i = 0; i < sizeof mine; i++)
        mine[i] = (char) (me + i);
    SIZE(8);
    SIZE(16);
    SIZE(32);
    SIZE(64);
    SIZE(128);
    memset(block, 0, sizeof block);
    shmem_barrier_all();
    shmem_putmem(block + 1, mine, 77, next);
    shmem_putmem(block, mine, 0, next);
    shmem_barrier_all();
    CHECK(block[0] == 0 && block[77] == (char) (previous + 76) && block[78] == 0);
    shmem_ctx_getmem(ctx, fetched, block + 1, 77, next);
    CHECK(!memcmp(fetched, mine, 77));
    /* More than any cache has, to oneself too. */
    size_t large = 20 << 20;
    unsigned *heap = shmem_malloc(large), *from = malloc(large);
    for (size_t i = 0; i < large / sizeof *from; i++)
        from[i] = (unsigned) (i * 2654435761u + me);
    shmem_putmem(heap, from, large, next);
    shmem_barrier_all();
    for (size_t i = 0; i < large / sizeof *from; i++)
        CHECK(heap[i] == (unsigned) (i * 2654435761u + previous));
    shmem_barrier_all();
    shmem_putmem(heap, from, large, me);
    CHECK(!memcmp(heap, from, large));
    shmem_ctx_destroy(ctx);
    free(from);
    shmem_finalize();
    return 0;
}
