/* The heap and static data: the same object at each PE, and nothing of two in one place. */
#include "check.h"

static int initialised[3000] = {1, 2, 3};
static int zeroed[3000];
long global = 42;

/* All PEs have the same offset from their first allocation. */
static void same(char *base, void *found) {
    static long offset, theirs;
    offset = (char *) found - base;
    shmem_barrier_all();
    shmem_long_get(&theirs, &offset, 1, next);
    CHECK(theirs == offset);
    shmem_barrier_all();
}

int main(void) {
    begin();
    CHECK(initialised[2] == 3 && zeroed[2999] == 0 && global == 42);
    shmem_int_p(&initialised[2999], me + 7, next);
    shmem_int_p(&zeroed[0], me + 9, next);
    shmem_barrier_all();
    CHECK(initialised[2999] == previous + 7 && zeroed[0] == previous + 9);

    char *base = shmem_malloc(100);
    CHECK(base && (uintptr_t) base % 16 == 0);
    int *numbers = shmem_calloc(1000, sizeof(int));
    same(base, numbers);
    for (int i = 0; i < 1000; i++)
        CHECK(numbers[i] == 0);
    for (size_t align = 8; align <= 1 << 24; align *= 2) {
        char *aligned = shmem_align(align, 33);
        CHECK(aligned && (uintptr_t) aligned % align == 0);
        same(base, aligned);
        shmem_free(aligned);
    }
    CHECK(!shmem_align(48, 10) && !shmem_malloc(0) && !shmem_calloc(0, 8) && !shmem_malloc_with_hints(0, 0));
    CHECK(!shmem_malloc((size_t) 1 << 50) && !shmem_calloc((size_t) 1 << 40, (size_t) 1 << 40));
    shmem_free(NULL);
    /* What is freed is there again, and what is not is nobody else's. */
    void *hinted = shmem_malloc_with_hints(1 << 20, SHMEM_MALLOC_ATOMICS_REMOTE | SHMEM_MALLOC_SIGNAL_REMOTE);
    for (int round = 0; round < 1000; round++) {
        void *block = shmem_malloc(200 << 10);
        CHECK(block && block != hinted);
        shmem_free(block);
    }
    char *grown = shmem_malloc(64);
    memset(grown, 'a' + me % 20, 64);
    void *behind = shmem_malloc(64);
    CHECK(shmem_realloc(grown, 10) == grown);
    grown = shmem_realloc(grown, 1 << 20);
    same(base, grown);
    CHECK(grown[0] == 'a' + me % 20 && grown[63] == 'a' + me % 20 && shmem_char_g(grown, next) == 'a' + next % 20);
    CHECK(!shmem_realloc(grown, (size_t) 1 << 50) && grown[5] == 'a' + me % 20);
    CHECK(!shmem_realloc(grown, 0));
    shmem_free(behind);
    CHECK((behind = shmem_realloc(NULL, 64)));

    int local = 0;
    CHECK(!shmem_ptr(&local, me) && !shmem_ptr(base, pes) && !shmem_ptr(base, -1) && !shmem_ptr(NULL, me));
    CHECK(shmem_addr_accessible(&global, next) && shmem_addr_accessible(base + 99, next));
    CHECK(!shmem_addr_accessible(&local, next));
    CHECK(shmem_pe_accessible(pes - 1) && !shmem_pe_accessible(pes) && !shmem_pe_accessible(-1));
    CHECK(shmem_ptr(&global, me) == &global);
    long *theirs = shmem_ptr(&global, next);
    CHECK(theirs);
    *theirs = 100 + me;
    shmem_barrier_all();
    CHECK(global == 100 + previous);
    shmem_finalize();
    return 0;
}
