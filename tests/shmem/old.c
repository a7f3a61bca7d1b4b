/* Names of earlier versions, in older C. */
#include <mpp/shmem.h>
#include <stdio.h>
#include <stdlib.h>

#define CHECK(condition) \
    do { \
        if (!(condition)) { \
            fprintf(stderr, "PE %d: %s:%d: %s\n", _my_pe(), __FILE__, __LINE__, #condition); \
            shmem_global_exit(3); \
        } \
    } while (0)

static long token, sync_words[_SHMEM_BARRIER_SYNC_SIZE];
static int number;
static short small;
static long long large;
static double real;

int main(void) {
    int me, pes, major, minor;
    long *heap;
    char name[SHMEM_MAX_NAME_LEN];
    start_pes(0);
    me = _my_pe();
    pes = _num_pes();
    heap = (long *) shmalloc(sizeof *heap);
    *heap = me;
    shmem_barrier_all();
    CHECK(shmem_long_g(heap, (me + 1) % pes) == (me + 1) % pes);
    CHECK(shmem_long_swap(&token, 5, me) == 0 && shmem_long_fadd(&token, 2, me) == 5 && shmem_long_finc(&token, me) == 7);
    CHECK(shmem_long_cswap(&token, 8, 9, me) == 8 && shmem_long_fetch(&token, me) == 9 && shmem_swap(&token, 10, me) == 9);
    shmem_int_add(&number, 3, me);
    shmem_int_inc(&number, me);
    CHECK(shmem_int_fetch(&number, me) == 4);
    shmem_double_set(&real, 2.5, me);
    CHECK(shmem_double_fetch(&real, me) == 2.5);
    shmem_barrier_all();
    shmem_long_p(&token, 11, (me + 1) % pes);
    shmem_wait(&token, 10);
    shmem_wait_until(&token, _SHMEM_CMP_EQ, 11);
    shmem_short_p(&small, 1, me);
    shmem_short_wait(&small, 0);
    shmem_longlong_p(&large, 1, me);
    shmem_longlong_wait_until(&large, SHMEM_CMP_GT, 0);
    shmem_barrier(0, 0, pes, sync_words);
    heap = (long *) shrealloc(heap, 1000);
    CHECK(*heap == me);
    shfree(heap);
    heap = (long *) shmemalign(256, 10);
    CHECK((size_t) heap % 256 == 0);
    shmem_info_get_version(&major, &minor);
    shmem_info_get_name(name);
    CHECK(major == _SHMEM_MAJOR_VERSION && minor == _SHMEM_MINOR_VERSION && name[0] == SHMEM_VENDOR_STRING[0]);
    shmem_udcflush();
    shmem_set_cache_line_inv(heap);
    /* (Without shmem_finalize: so it was.) */
    return 0;
}
