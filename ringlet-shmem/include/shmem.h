/* OpenSHMEM 1.5 for C on ringlet's reflective memory: cc program.c -lringlet_shmem; ringlet shmem -n 4 -- ./a.out
 *
 * All PEs of a job are on one host, and map each other's memory: a put is a copy, and complete when it returns. Symmetric are the heap
 * (SHMEM_SYMMETRIC_SIZE bytes for each PE) and the static data of the program itself, not that of its shared libraries. */
#ifndef RINGLET_SHMEM_H
#define RINGLET_SHMEM_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define SHMEM_MAJOR_VERSION 1
#define SHMEM_MINOR_VERSION 5
#define SHMEM_MAX_NAME_LEN 64
#define SHMEM_VENDOR_STRING "ringlet"

#define SHMEM_THREAD_SINGLE 0
#define SHMEM_THREAD_FUNNELED 1
#define SHMEM_THREAD_SERIALIZED 2
#define SHMEM_THREAD_MULTIPLE 3

#define SHMEM_CMP_EQ 0
#define SHMEM_CMP_NE 1
#define SHMEM_CMP_GT 2
#define SHMEM_CMP_LE 3
#define SHMEM_CMP_LT 4
#define SHMEM_CMP_GE 5

#define SHMEM_SIGNAL_SET 0
#define SHMEM_SIGNAL_ADD 1

#define SHMEM_MALLOC_ATOMICS_REMOTE 1L
#define SHMEM_MALLOC_SIGNAL_REMOTE 2L

typedef struct ringlet_shmem_context *shmem_ctx_t;
#define SHMEM_CTX_INVALID ((shmem_ctx_t) 0)
#define SHMEM_CTX_DEFAULT ((shmem_ctx_t) 1)
#define SHMEM_CTX_SERIALIZED 1L
#define SHMEM_CTX_PRIVATE 2L
#define SHMEM_CTX_NOSTORE 4L

typedef struct ringlet_shmem_team *shmem_team_t;
#define SHMEM_TEAM_INVALID ((shmem_team_t) 0)
#define SHMEM_TEAM_WORLD ((shmem_team_t) 1)
#define SHMEM_TEAM_SHARED ((shmem_team_t) 2)
typedef struct {
    int num_contexts;
} shmem_team_config_t;
#define SHMEM_TEAM_NUM_CONTEXTS 1L

/* Of active sets. */
#define SHMEM_SYNC_VALUE 0L
#define SHMEM_SYNC_SIZE 8
#define SHMEM_BARRIER_SYNC_SIZE SHMEM_SYNC_SIZE
#define SHMEM_BCAST_SYNC_SIZE SHMEM_SYNC_SIZE
#define SHMEM_COLLECT_SYNC_SIZE SHMEM_SYNC_SIZE
#define SHMEM_REDUCE_SYNC_SIZE SHMEM_SYNC_SIZE
#define SHMEM_ALLTOALL_SYNC_SIZE SHMEM_SYNC_SIZE
#define SHMEM_ALLTOALLS_SYNC_SIZE SHMEM_SYNC_SIZE
#define SHMEM_REDUCE_MIN_WRKDATA_SIZE 1

/* Setup and queries. */

void shmem_init(void);
int shmem_init_thread(int requested, int *provided);
void shmem_query_thread(int *provided);
void shmem_finalize(void);
#ifdef __GNUC__
__attribute__((noreturn))
#endif
void shmem_global_exit(int status);
int shmem_my_pe(void);
int shmem_n_pes(void);
int shmem_pe_accessible(int pe);
int shmem_addr_accessible(const void *addr, int pe);
void *shmem_ptr(const void *dest, int pe);
void shmem_info_get_version(int *major, int *minor);
void shmem_info_get_name(char *name);
void shmem_pcontrol(int level, ...);

/* Memory. */

void *shmem_malloc(size_t size);
void *shmem_malloc_with_hints(size_t size, long hints);
void *shmem_calloc(size_t count, size_t size);
void *shmem_align(size_t alignment, size_t size);
void *shmem_realloc(void *ptr, size_t size);
void shmem_free(void *ptr);

/* Teams and contexts. */

int shmem_team_my_pe(shmem_team_t team);
int shmem_team_n_pes(shmem_team_t team);
int shmem_team_get_config(shmem_team_t team, long config_mask, shmem_team_config_t *config);
int shmem_team_translate_pe(shmem_team_t src_team, int src_pe, shmem_team_t dest_team);
int shmem_team_split_strided(shmem_team_t parent_team, int start, int stride, int size, const shmem_team_config_t *config,
                             long config_mask, shmem_team_t *new_team);
int shmem_team_split_2d(shmem_team_t parent_team, int xrange, const shmem_team_config_t *xaxis_config, long xaxis_mask,
                        shmem_team_t *xaxis_team, const shmem_team_config_t *yaxis_config, long yaxis_mask,
                        shmem_team_t *yaxis_team);
void shmem_team_destroy(shmem_team_t team);
void *shmem_team_ptr(shmem_team_t team, const void *dest, int pe);
int shmem_team_sync(shmem_team_t team);
int shmem_ctx_create(long options, shmem_ctx_t *ctx);
int shmem_team_create_ctx(shmem_team_t team, long options, shmem_ctx_t *ctx);
void shmem_ctx_destroy(shmem_ctx_t ctx);
int shmem_ctx_get_team(shmem_ctx_t ctx, shmem_team_t *team);

/* Order, barriers, locks. */

void shmem_fence(void);
void shmem_quiet(void);
void shmem_ctx_fence(shmem_ctx_t ctx);
void shmem_ctx_quiet(shmem_ctx_t ctx);
void shmem_barrier_all(void);
void shmem_sync_all(void);
void shmem_barrier(int PE_start, int logPE_stride, int PE_size, long *pSync);
void shmem_sync(int PE_start, int logPE_stride, int PE_size, long *pSync);
void shmem_set_lock(long *lock);
void shmem_clear_lock(long *lock);
int shmem_test_lock(long *lock);

/* The standard's tables of types: X(A, name in functions, type). Those of C are kept apart for _Generic, to which the others are the same. */

#define RINGLET_SHMEM_REAL(X, A) X(A, float, float) X(A, double, double)
#define RINGLET_SHMEM_SIGNED(X, A) X(A, short, short) X(A, int, int) X(A, long, long) X(A, longlong, long long)
#define RINGLET_SHMEM_UNSIGNED(X, A) X(A, uint, unsigned int) X(A, ulong, unsigned long) X(A, ulonglong, unsigned long long)
#define RINGLET_SHMEM_SMALL(X, A) X(A, char, char) X(A, schar, signed char) X(A, uchar, unsigned char) X(A, ushort, unsigned short)
#define RINGLET_SHMEM_WIDTHS(X, A) X(A, int32, int32_t) X(A, int64, int64_t) X(A, uint32, uint32_t) X(A, uint64, uint64_t)
#define RINGLET_SHMEM_SMALL_WIDTHS(X, A) X(A, int8, int8_t) X(A, int16, int16_t) X(A, uint8, uint8_t) X(A, uint16, uint16_t)
#define RINGLET_SHMEM_SIZES(X, A) X(A, size, size_t) X(A, ptrdiff, ptrdiff_t)

#define RINGLET_SHMEM_C_INTEGERS(X, A) RINGLET_SHMEM_SMALL(X, A) RINGLET_SHMEM_SIGNED(X, A) RINGLET_SHMEM_UNSIGNED(X, A)
#define RINGLET_SHMEM_C_SCALARS(X, A) RINGLET_SHMEM_REAL(X, A) RINGLET_SHMEM_C_INTEGERS(X, A)
#define RINGLET_SHMEM_C_RMA(X, A) RINGLET_SHMEM_C_SCALARS(X, A) X(A, longdouble, long double)
#define RINGLET_SHMEM_C_ATOMIC(X, A) X(A, int, int) X(A, long, long) X(A, longlong, long long) RINGLET_SHMEM_UNSIGNED(X, A)
#define RINGLET_SHMEM_C_EXTENDED(X, A) RINGLET_SHMEM_REAL(X, A) RINGLET_SHMEM_C_ATOMIC(X, A)
/* (int32_t and int64_t are int and long.) */
#define RINGLET_SHMEM_C_BITWISE(X, A) RINGLET_SHMEM_UNSIGNED(X, A) X(A, int32, int) X(A, int64, long)
#define RINGLET_SHMEM_C_WAIT(X, A) X(A, short, short) X(A, ushort, unsigned short) RINGLET_SHMEM_C_ATOMIC(X, A)
#if defined __STDC_NO_COMPLEX__
#define RINGLET_SHMEM_C_SUMS(X, A) RINGLET_SHMEM_C_RMA(X, A)
#else
#define RINGLET_SHMEM_C_SUMS(X, A) RINGLET_SHMEM_C_RMA(X, A) X(A, complexf, float _Complex) X(A, complexd, double _Complex)
#endif
#define RINGLET_SHMEM_C_REDUCE_BITWISE(X, A) X(A, uchar, unsigned char) X(A, ushort, unsigned short) RINGLET_SHMEM_UNSIGNED(X, A) \
    X(A, int8, signed char) X(A, int16, short) X(A, int32, int) X(A, int64, long)

#define RINGLET_SHMEM_ALL_WIDTHS(X, A) RINGLET_SHMEM_SMALL_WIDTHS(X, A) RINGLET_SHMEM_WIDTHS(X, A) RINGLET_SHMEM_SIZES(X, A)
#define RINGLET_SHMEM_SCALARS(X, A) RINGLET_SHMEM_C_SCALARS(X, A) RINGLET_SHMEM_ALL_WIDTHS(X, A)
#define RINGLET_SHMEM_RMA(X, A) RINGLET_SHMEM_C_RMA(X, A) RINGLET_SHMEM_ALL_WIDTHS(X, A)
#define RINGLET_SHMEM_ATOMIC(X, A) RINGLET_SHMEM_C_ATOMIC(X, A) RINGLET_SHMEM_WIDTHS(X, A) RINGLET_SHMEM_SIZES(X, A)
#define RINGLET_SHMEM_EXTENDED(X, A) RINGLET_SHMEM_REAL(X, A) RINGLET_SHMEM_ATOMIC(X, A)
#define RINGLET_SHMEM_BITWISE(X, A) RINGLET_SHMEM_UNSIGNED(X, A) RINGLET_SHMEM_WIDTHS(X, A)
#define RINGLET_SHMEM_WAIT(X, A) X(A, short, short) X(A, ushort, unsigned short) RINGLET_SHMEM_ATOMIC(X, A)
#define RINGLET_SHMEM_REDUCE_BITWISE(X, A) X(A, uchar, unsigned char) X(A, ushort, unsigned short) RINGLET_SHMEM_UNSIGNED(X, A) \
    RINGLET_SHMEM_SMALL_WIDTHS(X, A) RINGLET_SHMEM_WIDTHS(X, A) X(A, size, size_t)

/* Remote memory access, and signals. `c` and `C` are `ctx_` and `shmem_ctx_t ctx,`, or nothing. */

#define RINGLET_SHMEM_BLOCKS(before, behind, T, C) \
    void before##put##behind(C T *dest, const T *source, size_t nelems, int pe); \
    void before##get##behind(C T *dest, const T *source, size_t nelems, int pe); \
    void before##put##behind##_nbi(C T *dest, const T *source, size_t nelems, int pe); \
    void before##get##behind##_nbi(C T *dest, const T *source, size_t nelems, int pe); \
    void before##put##behind##_signal(C T *dest, const T *source, size_t nelems, uint64_t *sig_addr, uint64_t signal, int sig_op, \
                                      int pe); \
    void before##put##behind##_signal_nbi(C T *dest, const T *source, size_t nelems, uint64_t *sig_addr, uint64_t signal, int sig_op, \
                                          int pe);
#define RINGLET_SHMEM_STRIDES(before, behind, T, C) \
    void before##iput##behind(C T *dest, const T *source, ptrdiff_t dst, ptrdiff_t sst, size_t nelems, int pe); \
    void before##iget##behind(C T *dest, const T *source, ptrdiff_t dst, ptrdiff_t sst, size_t nelems, int pe);
#define RINGLET_SHMEM_CTX shmem_ctx_t ctx,
#define RINGLET_SHMEM_BOTH(before, behind, T) \
    RINGLET_SHMEM_BLOCKS(shmem_##before, behind, T, ) \
    RINGLET_SHMEM_BLOCKS(shmem_ctx_##before, behind, T, RINGLET_SHMEM_CTX) \
    RINGLET_SHMEM_STRIDES(shmem_##before, behind, T, ) \
    RINGLET_SHMEM_STRIDES(shmem_ctx_##before, behind, T, RINGLET_SHMEM_CTX)
#define RINGLET_SHMEM_TYPED(A, NAME, T) RINGLET_SHMEM_BOTH(NAME##_, , T)
RINGLET_SHMEM_RMA(RINGLET_SHMEM_TYPED, )
#define RINGLET_SHMEM_SIZED(bits) RINGLET_SHMEM_BOTH(, bits, void)
RINGLET_SHMEM_SIZED(8)
RINGLET_SHMEM_SIZED(16)
RINGLET_SHMEM_SIZED(32)
RINGLET_SHMEM_SIZED(64)
RINGLET_SHMEM_SIZED(128)
RINGLET_SHMEM_BLOCKS(shmem_, mem, void, )
RINGLET_SHMEM_BLOCKS(shmem_ctx_, mem, void, RINGLET_SHMEM_CTX)

#define RINGLET_SHMEM_ONE(A, NAME, T) \
    void shmem_##NAME##_p(T *dest, T value, int pe); \
    T shmem_##NAME##_g(const T *source, int pe); \
    void shmem_ctx_##NAME##_p(shmem_ctx_t ctx, T *dest, T value, int pe); \
    T shmem_ctx_##NAME##_g(shmem_ctx_t ctx, const T *source, int pe);
RINGLET_SHMEM_SCALARS(RINGLET_SHMEM_ONE, )
static inline void shmem_ctx_longdouble_p(shmem_ctx_t ctx, long double *dest, long double value, int pe) {
    shmem_ctx_longdouble_put(ctx, dest, &value, 1, pe);
}
static inline long double shmem_ctx_longdouble_g(shmem_ctx_t ctx, const long double *source, int pe) {
    long double value;
    shmem_ctx_longdouble_get(ctx, &value, source, 1, pe);
    return value;
}
static inline void shmem_longdouble_p(long double *dest, long double value, int pe) {
    shmem_longdouble_put(dest, &value, 1, pe);
}
static inline long double shmem_longdouble_g(const long double *source, int pe) {
    return shmem_ctx_longdouble_g(SHMEM_CTX_DEFAULT, source, pe);
}

uint64_t shmem_signal_fetch(const uint64_t *sig_addr);
uint64_t shmem_signal_wait_until(uint64_t *sig_addr, int cmp, uint64_t cmp_value);

/* Atomics. */

#define RINGLET_SHMEM_FETCHING(NAME, T, op, ...) \
    T shmem_##NAME##_atomic_##op(__VA_ARGS__); \
    T shmem_ctx_##NAME##_atomic_##op(shmem_ctx_t ctx, __VA_ARGS__); \
    void shmem_##NAME##_atomic_##op##_nbi(T *fetch, __VA_ARGS__); \
    void shmem_ctx_##NAME##_atomic_##op##_nbi(shmem_ctx_t ctx, T *fetch, __VA_ARGS__);
#define RINGLET_SHMEM_SILENT(NAME, op, ...) \
    void shmem_##NAME##_atomic_##op(__VA_ARGS__); \
    void shmem_ctx_##NAME##_atomic_##op(shmem_ctx_t ctx, __VA_ARGS__);
#define RINGLET_SHMEM_X(A, NAME, T) \
    RINGLET_SHMEM_FETCHING(NAME, T, fetch, const T *source, int pe) \
    RINGLET_SHMEM_FETCHING(NAME, T, swap, T *dest, T value, int pe) \
    RINGLET_SHMEM_SILENT(NAME, set, T *dest, T value, int pe)
RINGLET_SHMEM_EXTENDED(RINGLET_SHMEM_X, )
#undef RINGLET_SHMEM_X
#define RINGLET_SHMEM_X(A, NAME, T) \
    RINGLET_SHMEM_FETCHING(NAME, T, compare_swap, T *dest, T cond, T value, int pe) \
    RINGLET_SHMEM_FETCHING(NAME, T, fetch_add, T *dest, T value, int pe) \
    RINGLET_SHMEM_FETCHING(NAME, T, fetch_inc, T *dest, int pe) \
    RINGLET_SHMEM_SILENT(NAME, add, T *dest, T value, int pe) \
    RINGLET_SHMEM_SILENT(NAME, inc, T *dest, int pe)
RINGLET_SHMEM_ATOMIC(RINGLET_SHMEM_X, )
#undef RINGLET_SHMEM_X
#define RINGLET_SHMEM_X(A, NAME, T) \
    RINGLET_SHMEM_FETCHING(NAME, T, fetch_and, T *dest, T value, int pe) \
    RINGLET_SHMEM_FETCHING(NAME, T, fetch_or, T *dest, T value, int pe) \
    RINGLET_SHMEM_FETCHING(NAME, T, fetch_xor, T *dest, T value, int pe) \
    RINGLET_SHMEM_SILENT(NAME, and, T *dest, T value, int pe) \
    RINGLET_SHMEM_SILENT(NAME, or, T *dest, T value, int pe) \
    RINGLET_SHMEM_SILENT(NAME, xor, T *dest, T value, int pe)
RINGLET_SHMEM_BITWISE(RINGLET_SHMEM_X, )
#undef RINGLET_SHMEM_X

/* Waiting. */

#define RINGLET_SHMEM_SETS(NAME, T, behind, V) \
    void shmem_##NAME##_wait_until_all##behind(T *ivars, size_t nelems, const int *status, int cmp, V); \
    size_t shmem_##NAME##_wait_until_any##behind(T *ivars, size_t nelems, const int *status, int cmp, V); \
    size_t shmem_##NAME##_wait_until_some##behind(T *ivars, size_t nelems, size_t *indices, const int *status, int cmp, V); \
    int shmem_##NAME##_test_all##behind(T *ivars, size_t nelems, const int *status, int cmp, V); \
    size_t shmem_##NAME##_test_any##behind(T *ivars, size_t nelems, const int *status, int cmp, V); \
    size_t shmem_##NAME##_test_some##behind(T *ivars, size_t nelems, size_t *indices, const int *status, int cmp, V);
#define RINGLET_SHMEM_X(A, NAME, T) \
    void shmem_##NAME##_wait_until(volatile T *ivar, int cmp, T cmp_value); \
    int shmem_##NAME##_test(volatile T *ivar, int cmp, T cmp_value); \
    RINGLET_SHMEM_SETS(NAME, volatile T, , T cmp_value) \
    RINGLET_SHMEM_SETS(NAME, volatile T, _vector, T *cmp_values)
RINGLET_SHMEM_WAIT(RINGLET_SHMEM_X, )
#undef RINGLET_SHMEM_X

/* Collectives of teams, and of active sets. */

#define RINGLET_SHMEM_COLLECTIVES(before, behind, T) \
    int before##broadcast##behind(shmem_team_t team, T *dest, const T *source, size_t nelems, int PE_root); \
    int before##collect##behind(shmem_team_t team, T *dest, const T *source, size_t nelems); \
    int before##fcollect##behind(shmem_team_t team, T *dest, const T *source, size_t nelems); \
    int before##alltoall##behind(shmem_team_t team, T *dest, const T *source, size_t nelems); \
    int before##alltoalls##behind(shmem_team_t team, T *dest, const T *source, ptrdiff_t dst, ptrdiff_t sst, size_t nelems);
#define RINGLET_SHMEM_X(A, NAME, T) RINGLET_SHMEM_COLLECTIVES(shmem_##NAME##_, , T)
RINGLET_SHMEM_RMA(RINGLET_SHMEM_X, )
#undef RINGLET_SHMEM_X
RINGLET_SHMEM_COLLECTIVES(shmem_, mem, void)

#define RINGLET_SHMEM_SET int PE_start, int logPE_stride, int PE_size
#define RINGLET_SHMEM_OLD(bits) \
    void shmem_broadcast##bits(void *dest, const void *source, size_t nelems, int PE_root, RINGLET_SHMEM_SET, long *pSync); \
    void shmem_collect##bits(void *dest, const void *source, size_t nelems, RINGLET_SHMEM_SET, long *pSync); \
    void shmem_fcollect##bits(void *dest, const void *source, size_t nelems, RINGLET_SHMEM_SET, long *pSync); \
    void shmem_alltoall##bits(void *dest, const void *source, size_t nelems, RINGLET_SHMEM_SET, long *pSync); \
    void shmem_alltoalls##bits(void *dest, const void *source, ptrdiff_t dst, ptrdiff_t sst, size_t nelems, RINGLET_SHMEM_SET, \
                               long *pSync);
RINGLET_SHMEM_OLD(32)
RINGLET_SHMEM_OLD(64)

#define RINGLET_SHMEM_REDUCTION(NAME, op, T) \
    int shmem_##NAME##_##op##_reduce(shmem_team_t team, T *dest, const T *source, size_t nreduce);
#define RINGLET_SHMEM_TO_ALL(NAME, op, T) \
    void shmem_##NAME##_##op##_to_all(T *dest, const T *source, int nreduce, RINGLET_SHMEM_SET, T *pWrk, long *pSync);
#define RINGLET_SHMEM_SUMS(R, NAME, T) R(NAME, sum, T) R(NAME, prod, T)
#define RINGLET_SHMEM_ORDERED(R, NAME, T) R(NAME, max, T) R(NAME, min, T) RINGLET_SHMEM_SUMS(R, NAME, T)
#define RINGLET_SHMEM_LOGICAL(R, NAME, T) R(NAME, and, T) R(NAME, or, T) R(NAME, xor, T)
#define RINGLET_SHMEM_X(A, NAME, T) RINGLET_SHMEM_ORDERED(RINGLET_SHMEM_REDUCTION, NAME, T)
RINGLET_SHMEM_SCALARS(RINGLET_SHMEM_X, )
#undef RINGLET_SHMEM_X
#define RINGLET_SHMEM_X(A, NAME, T) RINGLET_SHMEM_LOGICAL(RINGLET_SHMEM_REDUCTION, NAME, T)
RINGLET_SHMEM_REDUCE_BITWISE(RINGLET_SHMEM_X, )
#undef RINGLET_SHMEM_X
#define RINGLET_SHMEM_X(A, NAME, T) \
    RINGLET_SHMEM_ORDERED(RINGLET_SHMEM_TO_ALL, NAME, T) \
    RINGLET_SHMEM_LOGICAL(RINGLET_SHMEM_TO_ALL, NAME, T)
RINGLET_SHMEM_SIGNED(RINGLET_SHMEM_X, )
#undef RINGLET_SHMEM_X
RINGLET_SHMEM_ORDERED(RINGLET_SHMEM_TO_ALL, float, float)
RINGLET_SHMEM_ORDERED(RINGLET_SHMEM_TO_ALL, double, double)
#if (defined __STDC_VERSION__ && __STDC_VERSION__ >= 199901L && !defined __STDC_NO_COMPLEX__) || (defined __cplusplus && defined __GNUC__)
RINGLET_SHMEM_SUMS(RINGLET_SHMEM_REDUCTION, complexf, float _Complex)
RINGLET_SHMEM_SUMS(RINGLET_SHMEM_REDUCTION, complexd, double _Complex)
RINGLET_SHMEM_SUMS(RINGLET_SHMEM_TO_ALL, complexf, float _Complex)
RINGLET_SHMEM_SUMS(RINGLET_SHMEM_TO_ALL, complexd, double _Complex)
#endif

/* Of long double, which the library can't calculate with. */
typedef void ringlet_shmem_combine(void *into, const void *from, size_t count);
int ringlet_shmem_reduce(shmem_team_t team, void *dest, const void *source, size_t nreduce, ringlet_shmem_combine *combine);
void ringlet_shmem_to_all(void *dest, const void *source, int nreduce, RINGLET_SHMEM_SET, long *pSync, ringlet_shmem_combine *combine);
#define RINGLET_SHMEM_LONG_DOUBLE(op, RESULT) \
    static inline void ringlet_shmem_longdouble_##op(void *into, const void *from, size_t count) { \
        long double *a = (long double *) into; \
        const long double *b = (const long double *) from; \
        for (; count > 0; a++, b++, count--) \
            *a = RESULT; \
    } \
    static inline int shmem_longdouble_##op##_reduce(shmem_team_t team, long double *dest, const long double *source, size_t nreduce) { \
        return ringlet_shmem_reduce(team, dest, source, nreduce, ringlet_shmem_longdouble_##op); \
    } \
    static inline void shmem_longdouble_##op##_to_all(long double *dest, const long double *source, int nreduce, RINGLET_SHMEM_SET, \
                                                      long double *pWrk, long *pSync) { \
        (void) pWrk; \
        ringlet_shmem_to_all(dest, source, nreduce, PE_start, logPE_stride, PE_size, pSync, ringlet_shmem_longdouble_##op); \
    }
RINGLET_SHMEM_LONG_DOUBLE(sum, *a + *b)
RINGLET_SHMEM_LONG_DOUBLE(prod, *a * *b)
RINGLET_SHMEM_LONG_DOUBLE(max, *b > *a ? *b : *a)
RINGLET_SHMEM_LONG_DOUBLE(min, *b < *a ? *b : *a)

/* Names of earlier versions. */

void start_pes(int npes);
#define _my_pe shmem_my_pe
#define _num_pes shmem_n_pes
#define shmalloc shmem_malloc
#define shfree shmem_free
#define shrealloc shmem_realloc
#define shmemalign shmem_align
#define _SHMEM_MAJOR_VERSION SHMEM_MAJOR_VERSION
#define _SHMEM_MINOR_VERSION SHMEM_MINOR_VERSION
#define _SHMEM_MAX_NAME_LEN SHMEM_MAX_NAME_LEN
#define _SHMEM_VENDOR_STRING SHMEM_VENDOR_STRING
#define _SHMEM_SYNC_VALUE SHMEM_SYNC_VALUE
#define _SHMEM_BARRIER_SYNC_SIZE SHMEM_BARRIER_SYNC_SIZE
#define _SHMEM_BCAST_SYNC_SIZE SHMEM_BCAST_SYNC_SIZE
#define _SHMEM_COLLECT_SYNC_SIZE SHMEM_COLLECT_SYNC_SIZE
#define _SHMEM_REDUCE_SYNC_SIZE SHMEM_REDUCE_SYNC_SIZE
#define _SHMEM_REDUCE_MIN_WRKDATA_SIZE SHMEM_REDUCE_MIN_WRKDATA_SIZE
#define _SHMEM_CMP_EQ SHMEM_CMP_EQ
#define _SHMEM_CMP_NE SHMEM_CMP_NE
#define _SHMEM_CMP_GT SHMEM_CMP_GT
#define _SHMEM_CMP_LE SHMEM_CMP_LE
#define _SHMEM_CMP_LT SHMEM_CMP_LT
#define _SHMEM_CMP_GE SHMEM_CMP_GE

#define RINGLET_SHMEM_X(A, NAME, T) \
    static inline void shmem_##NAME##_set(T *dest, T value, int pe) { \
        shmem_##NAME##_atomic_set(dest, value, pe); \
    } \
    static inline T shmem_##NAME##_fetch(const T *source, int pe) { \
        return shmem_##NAME##_atomic_fetch(source, pe); \
    } \
    static inline T shmem_##NAME##_swap(T *dest, T value, int pe) { \
        return shmem_##NAME##_atomic_swap(dest, value, pe); \
    }
RINGLET_SHMEM_EXTENDED(RINGLET_SHMEM_X, )
#undef RINGLET_SHMEM_X
#define RINGLET_SHMEM_X(A, NAME, T) \
    static inline void shmem_##NAME##_add(T *dest, T value, int pe) { \
        shmem_##NAME##_atomic_add(dest, value, pe); \
    } \
    static inline void shmem_##NAME##_inc(T *dest, int pe) { \
        shmem_##NAME##_atomic_inc(dest, pe); \
    } \
    static inline T shmem_##NAME##_fadd(T *dest, T value, int pe) { \
        return shmem_##NAME##_atomic_fetch_add(dest, value, pe); \
    } \
    static inline T shmem_##NAME##_finc(T *dest, int pe) { \
        return shmem_##NAME##_atomic_fetch_inc(dest, pe); \
    } \
    static inline T shmem_##NAME##_cswap(T *dest, T cond, T value, int pe) { \
        return shmem_##NAME##_atomic_compare_swap(dest, cond, value, pe); \
    }
RINGLET_SHMEM_ATOMIC(RINGLET_SHMEM_X, )
#undef RINGLET_SHMEM_X
#define RINGLET_SHMEM_X(A, NAME, T) \
    static inline void shmem_##NAME##_wait(volatile T *ivar, T cmp_value) { \
        shmem_##NAME##_wait_until(ivar, SHMEM_CMP_NE, cmp_value); \
    }
RINGLET_SHMEM_SIGNED(RINGLET_SHMEM_X, )
#undef RINGLET_SHMEM_X
static inline void shmem_wait(volatile long *ivar, long cmp_value) {
    shmem_long_wait(ivar, cmp_value);
}

/* (Caches are coherent.) */
static inline void shmem_set_cache_inv(void) {}
static inline void shmem_set_cache_line_inv(void *dest) {
    (void) dest;
}
static inline void shmem_clear_cache_inv(void) {}
static inline void shmem_clear_cache_line_inv(void *dest) {
    (void) dest;
}
static inline void shmem_udcflush(void) {}
static inline void shmem_udcflush_line(void *dest) {
    (void) dest;
}

#ifdef __cplusplus
}
#endif

/* By the types of arguments: the context may be given or not. A type that is none of an operation's is an error of the compiler's, which tells that
 * this function is called with too many arguments. */
#if !defined __cplusplus && defined __STDC_VERSION__ && __STDC_VERSION__ >= 201112L

static inline void ringlet_shmem_no_such_type(void) {}

#define RINGLET_SHMEM_SECOND_(a, b, ...) b
#define RINGLET_SHMEM_SECOND(...) RINGLET_SHMEM_SECOND_(__VA_ARGS__, 0, 0)
#define RINGLET_SHMEM_FIRST_(a, ...) a
#define RINGLET_SHMEM_FIRST(...) RINGLET_SHMEM_FIRST_(__VA_ARGS__, 0)

#define RINGLET_SHMEM_SELECT(BY_FIRST, BY_SECOND, ...) \
    _Generic((RINGLET_SHMEM_FIRST(__VA_ARGS__)), \
        shmem_ctx_t: _Generic((RINGLET_SHMEM_SECOND(__VA_ARGS__)), BY_SECOND default: ringlet_shmem_no_such_type), \
        BY_FIRST default: ringlet_shmem_no_such_type)(__VA_ARGS__)

/* The associations of a table's types with the functions whose names end so. */
#define RINGLET_SHMEM_OF(end, NAME, T) T *: shmem_##NAME##end,
#define RINGLET_SHMEM_OF_CTX(end, NAME, T) T *: shmem_ctx_##NAME##end,
#define RINGLET_SHMEM_OF_CONST(end, NAME, T) T *: shmem_##NAME##end, const T *: shmem_##NAME##end,
#define RINGLET_SHMEM_OF_CONST_CTX(end, NAME, T) T *: shmem_ctx_##NAME##end, const T *: shmem_ctx_##NAME##end,
#define RINGLET_SHMEM_OF_VOLATILE(end, NAME, T) T *: shmem_##NAME##end, volatile T *: shmem_##NAME##end,

#define RINGLET_SHMEM_BY(TABLE, end, ...) \
    RINGLET_SHMEM_SELECT(TABLE(RINGLET_SHMEM_OF, end), TABLE(RINGLET_SHMEM_OF_CTX, end), __VA_ARGS__)
#define RINGLET_SHMEM_BY_CONST(TABLE, end, ...) \
    RINGLET_SHMEM_SELECT(TABLE(RINGLET_SHMEM_OF_CONST, end), TABLE(RINGLET_SHMEM_OF_CONST_CTX, end), __VA_ARGS__)
/* Of a team's arguments the second tells. */
#define RINGLET_SHMEM_BY_DEST(TABLE, end, team, dest, ...) \
    _Generic((dest), TABLE(RINGLET_SHMEM_OF, end) default: ringlet_shmem_no_such_type)(team, dest, __VA_ARGS__)
#define RINGLET_SHMEM_BY_VARIABLE(TABLE, end, ivars, ...) \
    _Generic((ivars), TABLE(RINGLET_SHMEM_OF_VOLATILE, end) default: ringlet_shmem_no_such_type)(ivars, __VA_ARGS__)

#define shmem_put(...) RINGLET_SHMEM_BY(RINGLET_SHMEM_C_RMA, _put, __VA_ARGS__)
#define shmem_get(...) RINGLET_SHMEM_BY(RINGLET_SHMEM_C_RMA, _get, __VA_ARGS__)
#define shmem_iput(...) RINGLET_SHMEM_BY(RINGLET_SHMEM_C_RMA, _iput, __VA_ARGS__)
#define shmem_iget(...) RINGLET_SHMEM_BY(RINGLET_SHMEM_C_RMA, _iget, __VA_ARGS__)
#define shmem_put_nbi(...) RINGLET_SHMEM_BY(RINGLET_SHMEM_C_RMA, _put_nbi, __VA_ARGS__)
#define shmem_get_nbi(...) RINGLET_SHMEM_BY(RINGLET_SHMEM_C_RMA, _get_nbi, __VA_ARGS__)
#define shmem_put_signal(...) RINGLET_SHMEM_BY(RINGLET_SHMEM_C_RMA, _put_signal, __VA_ARGS__)
#define shmem_put_signal_nbi(...) RINGLET_SHMEM_BY(RINGLET_SHMEM_C_RMA, _put_signal_nbi, __VA_ARGS__)
#define shmem_p(...) RINGLET_SHMEM_BY(RINGLET_SHMEM_C_RMA, _p, __VA_ARGS__)
#define shmem_g(...) RINGLET_SHMEM_BY_CONST(RINGLET_SHMEM_C_RMA, _g, __VA_ARGS__)

#define shmem_atomic_fetch(...) RINGLET_SHMEM_BY_CONST(RINGLET_SHMEM_C_EXTENDED, _atomic_fetch, __VA_ARGS__)
#define shmem_atomic_fetch_nbi(...) RINGLET_SHMEM_BY(RINGLET_SHMEM_C_EXTENDED, _atomic_fetch_nbi, __VA_ARGS__)
#define shmem_atomic_swap(...) RINGLET_SHMEM_BY(RINGLET_SHMEM_C_EXTENDED, _atomic_swap, __VA_ARGS__)
#define shmem_atomic_swap_nbi(...) RINGLET_SHMEM_BY(RINGLET_SHMEM_C_EXTENDED, _atomic_swap_nbi, __VA_ARGS__)
#define shmem_atomic_set(...) RINGLET_SHMEM_BY(RINGLET_SHMEM_C_EXTENDED, _atomic_set, __VA_ARGS__)
#define shmem_atomic_compare_swap(...) RINGLET_SHMEM_BY(RINGLET_SHMEM_C_ATOMIC, _atomic_compare_swap, __VA_ARGS__)
#define shmem_atomic_compare_swap_nbi(...) RINGLET_SHMEM_BY(RINGLET_SHMEM_C_ATOMIC, _atomic_compare_swap_nbi, __VA_ARGS__)
#define shmem_atomic_fetch_add(...) RINGLET_SHMEM_BY(RINGLET_SHMEM_C_ATOMIC, _atomic_fetch_add, __VA_ARGS__)
#define shmem_atomic_fetch_add_nbi(...) RINGLET_SHMEM_BY(RINGLET_SHMEM_C_ATOMIC, _atomic_fetch_add_nbi, __VA_ARGS__)
#define shmem_atomic_fetch_inc(...) RINGLET_SHMEM_BY(RINGLET_SHMEM_C_ATOMIC, _atomic_fetch_inc, __VA_ARGS__)
#define shmem_atomic_fetch_inc_nbi(...) RINGLET_SHMEM_BY(RINGLET_SHMEM_C_ATOMIC, _atomic_fetch_inc_nbi, __VA_ARGS__)
#define shmem_atomic_add(...) RINGLET_SHMEM_BY(RINGLET_SHMEM_C_ATOMIC, _atomic_add, __VA_ARGS__)
#define shmem_atomic_inc(...) RINGLET_SHMEM_BY(RINGLET_SHMEM_C_ATOMIC, _atomic_inc, __VA_ARGS__)
#define shmem_atomic_fetch_and(...) RINGLET_SHMEM_BY(RINGLET_SHMEM_C_BITWISE, _atomic_fetch_and, __VA_ARGS__)
#define shmem_atomic_fetch_and_nbi(...) RINGLET_SHMEM_BY(RINGLET_SHMEM_C_BITWISE, _atomic_fetch_and_nbi, __VA_ARGS__)
#define shmem_atomic_and(...) RINGLET_SHMEM_BY(RINGLET_SHMEM_C_BITWISE, _atomic_and, __VA_ARGS__)
#define shmem_atomic_fetch_or(...) RINGLET_SHMEM_BY(RINGLET_SHMEM_C_BITWISE, _atomic_fetch_or, __VA_ARGS__)
#define shmem_atomic_fetch_or_nbi(...) RINGLET_SHMEM_BY(RINGLET_SHMEM_C_BITWISE, _atomic_fetch_or_nbi, __VA_ARGS__)
#define shmem_atomic_or(...) RINGLET_SHMEM_BY(RINGLET_SHMEM_C_BITWISE, _atomic_or, __VA_ARGS__)
#define shmem_atomic_fetch_xor(...) RINGLET_SHMEM_BY(RINGLET_SHMEM_C_BITWISE, _atomic_fetch_xor, __VA_ARGS__)
#define shmem_atomic_fetch_xor_nbi(...) RINGLET_SHMEM_BY(RINGLET_SHMEM_C_BITWISE, _atomic_fetch_xor_nbi, __VA_ARGS__)
#define shmem_atomic_xor(...) RINGLET_SHMEM_BY(RINGLET_SHMEM_C_BITWISE, _atomic_xor, __VA_ARGS__)

#define shmem_wait_until(...) RINGLET_SHMEM_BY_VARIABLE(RINGLET_SHMEM_C_WAIT, _wait_until, __VA_ARGS__)
#define shmem_wait_until_all(...) RINGLET_SHMEM_BY_VARIABLE(RINGLET_SHMEM_C_WAIT, _wait_until_all, __VA_ARGS__)
#define shmem_wait_until_all_vector(...) RINGLET_SHMEM_BY_VARIABLE(RINGLET_SHMEM_C_WAIT, _wait_until_all_vector, __VA_ARGS__)
#define shmem_wait_until_any(...) RINGLET_SHMEM_BY_VARIABLE(RINGLET_SHMEM_C_WAIT, _wait_until_any, __VA_ARGS__)
#define shmem_wait_until_any_vector(...) RINGLET_SHMEM_BY_VARIABLE(RINGLET_SHMEM_C_WAIT, _wait_until_any_vector, __VA_ARGS__)
#define shmem_wait_until_some(...) RINGLET_SHMEM_BY_VARIABLE(RINGLET_SHMEM_C_WAIT, _wait_until_some, __VA_ARGS__)
#define shmem_wait_until_some_vector(...) RINGLET_SHMEM_BY_VARIABLE(RINGLET_SHMEM_C_WAIT, _wait_until_some_vector, __VA_ARGS__)
#define shmem_test(...) RINGLET_SHMEM_BY_VARIABLE(RINGLET_SHMEM_C_WAIT, _test, __VA_ARGS__)
#define shmem_test_all(...) RINGLET_SHMEM_BY_VARIABLE(RINGLET_SHMEM_C_WAIT, _test_all, __VA_ARGS__)
#define shmem_test_all_vector(...) RINGLET_SHMEM_BY_VARIABLE(RINGLET_SHMEM_C_WAIT, _test_all_vector, __VA_ARGS__)
#define shmem_test_any(...) RINGLET_SHMEM_BY_VARIABLE(RINGLET_SHMEM_C_WAIT, _test_any, __VA_ARGS__)
#define shmem_test_any_vector(...) RINGLET_SHMEM_BY_VARIABLE(RINGLET_SHMEM_C_WAIT, _test_any_vector, __VA_ARGS__)
#define shmem_test_some(...) RINGLET_SHMEM_BY_VARIABLE(RINGLET_SHMEM_C_WAIT, _test_some, __VA_ARGS__)
#define shmem_test_some_vector(...) RINGLET_SHMEM_BY_VARIABLE(RINGLET_SHMEM_C_WAIT, _test_some_vector, __VA_ARGS__)

#define shmem_broadcast(...) RINGLET_SHMEM_BY_DEST(RINGLET_SHMEM_C_RMA, _broadcast, __VA_ARGS__)
#define shmem_collect(...) RINGLET_SHMEM_BY_DEST(RINGLET_SHMEM_C_RMA, _collect, __VA_ARGS__)
#define shmem_fcollect(...) RINGLET_SHMEM_BY_DEST(RINGLET_SHMEM_C_RMA, _fcollect, __VA_ARGS__)
#define shmem_alltoall(...) RINGLET_SHMEM_BY_DEST(RINGLET_SHMEM_C_RMA, _alltoall, __VA_ARGS__)
#define shmem_alltoalls(...) RINGLET_SHMEM_BY_DEST(RINGLET_SHMEM_C_RMA, _alltoalls, __VA_ARGS__)
#define shmem_and_reduce(...) RINGLET_SHMEM_BY_DEST(RINGLET_SHMEM_C_REDUCE_BITWISE, _and_reduce, __VA_ARGS__)
#define shmem_or_reduce(...) RINGLET_SHMEM_BY_DEST(RINGLET_SHMEM_C_REDUCE_BITWISE, _or_reduce, __VA_ARGS__)
#define shmem_xor_reduce(...) RINGLET_SHMEM_BY_DEST(RINGLET_SHMEM_C_REDUCE_BITWISE, _xor_reduce, __VA_ARGS__)
#define shmem_max_reduce(...) RINGLET_SHMEM_BY_DEST(RINGLET_SHMEM_C_RMA, _max_reduce, __VA_ARGS__)
#define shmem_min_reduce(...) RINGLET_SHMEM_BY_DEST(RINGLET_SHMEM_C_RMA, _min_reduce, __VA_ARGS__)
#define shmem_sum_reduce(...) RINGLET_SHMEM_BY_DEST(RINGLET_SHMEM_C_SUMS, _sum_reduce, __VA_ARGS__)
#define shmem_prod_reduce(...) RINGLET_SHMEM_BY_DEST(RINGLET_SHMEM_C_SUMS, _prod_reduce, __VA_ARGS__)

/* Of a team, or of an active set. */
#define shmem_sync(...) \
    _Generic((RINGLET_SHMEM_FIRST(__VA_ARGS__)), shmem_team_t: shmem_team_sync, default: shmem_sync)(__VA_ARGS__)

#define shmem_add shmem_atomic_add
#define shmem_inc shmem_atomic_inc
#define shmem_fadd shmem_atomic_fetch_add
#define shmem_finc shmem_atomic_fetch_inc
#define shmem_cswap shmem_atomic_compare_swap
#define shmem_swap shmem_atomic_swap
#define shmem_fetch shmem_atomic_fetch
#define shmem_set shmem_atomic_set

#else

static inline void shmem_wait_until(volatile long *ivar, int cmp, long cmp_value) {
    shmem_long_wait_until(ivar, cmp, cmp_value);
}
static inline long shmem_swap(long *dest, long value, int pe) {
    return shmem_long_atomic_swap(dest, value, pe);
}

#endif

#endif
