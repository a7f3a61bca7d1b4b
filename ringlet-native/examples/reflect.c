/*
 * A board that many programs write, and many read: reflective memory, a lock, and a watch.
 *
 *     cc reflect.c -o reflect $(pkg-config --cflags --libs ringlet)
 *     ./reflect read KEY COUNT &           as many as you like
 *     ./reflect write KEY COUNT            as many as you like
 *
 * Each writer takes the lock, writes the next line with its number, and notifies. A reader sleeps until something was notified, says each number
 * that it sees for the first time as long as none is less than the one before, and ends when COUNT of them were written.
 */
#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <ringlet.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* The region holds one line and, in a page of its own, how many there were: a reader of the number sees the line, or a later one. */
struct line {
    char text[120];
    uint64_t number;
};

static void fail(void)
{
    fprintf(stderr, "%s\n", ringlet_reflect_error());
    exit(1);
}

static ringlet_reflect_region *board(ringlet_reflect_host *host, uint64_t key)
{
    ringlet_reflect_region *region = ringlet_reflect_allocate(host, key, 2 * RINGLET_REFLECT_PAGE, 0600, 0);
    if (!region)
        fail();
    return region;
}

static uint64_t written(const void *base)
{
    return __atomic_load_n((const uint64_t *)((const char *)base + RINGLET_REFLECT_PAGE), __ATOMIC_ACQUIRE);
}

/* The paper's protocol: what was written while an error was counted is written again. (On one host no error can happen.) */
static void publish(ringlet_reflect_host *host, ringlet_reflect_region *region, const struct line *line)
{
    for (;;) {
        int count = ringlet_reflect_errors(host, 0);
        if (count < 0) {
            if (errno != EAGAIN)
                fail();
            continue;
        }
        if (ringlet_reflect_put(region, 0, line, sizeof *line) != 0)
            fail();
        if (ringlet_reflect_put(region, RINGLET_REFLECT_PAGE, &line->number, sizeof line->number) != 0)
            fail();
        if (ringlet_reflect_check(host, 0, count) == 0)
            break;
        if (errno != EIO)
            fail();
    }
    if (ringlet_reflect_notify(region, RINGLET_REFLECT_PAGE, sizeof line->number) != 0)
        fail();
}

static void write_lines(ringlet_reflect_host *host, uint64_t key, uint64_t count)
{
    ringlet_reflect_region *region = board(host, key);
    ringlet_reflect_locks *locks = ringlet_reflect_locks_open(host, key, 1, 0600, 0);
    const void *seen = ringlet_reflect_receive(region, 0);
    if (!locks || !seen || !ringlet_reflect_transmit(region, 0))
        fail();
    for (uint64_t i = 0; i < count; i++) {
        struct line line = {.number = 0};
        if (ringlet_reflect_acquire(locks, 0, -1) != 0)
            fail();
        line.number = written(seen) + 1;
        snprintf(line.text, sizeof line.text, "line %" PRIu64 " by process %d", line.number, (int)getpid());
        publish(host, region, &line);
        if (ringlet_reflect_release(locks, 0) != 0)
            fail();
    }
    ringlet_reflect_locks_close(locks);
    ringlet_reflect_deallocate(region);
    printf("%" PRIu64 " written\n", count);
}

static void read_lines(ringlet_reflect_host *host, uint64_t key, uint64_t count)
{
    ringlet_reflect_region *region = board(host, key);
    const void *base = ringlet_reflect_receive(region, 0);
    ringlet_reflect_watch *watch = base ? ringlet_reflect_watch_open(region, RINGLET_REFLECT_PAGE) : NULL;
    int bell = watch ? ringlet_reflect_watch_fd(watch) : -1;
    if (bell < 0)
        fail();
    puts("reading");
    fflush(stdout);
    uint64_t last = 0;
    while (last < count) {
        uint64_t now = written(base);
        if (now == last) {
            struct pollfd ready = {.fd = bell, .events = POLLIN};
            poll(&ready, 1, -1);
            ringlet_reflect_watch_changed(watch);
            continue;
        }
        struct line line;
        if (ringlet_reflect_get(region, 0, &line, sizeof line) != 0)
            fail();
        /* A writer may be at the next one already, but never behind. */
        if (now < last || line.number < now) {
            fprintf(stderr, "%" PRIu64 " after %" PRIu64 ", with the line of %" PRIu64 "\n", now, last, line.number);
            exit(1);
        }
        last = now;
    }
    ringlet_reflect_watch_close(watch);
    ringlet_reflect_deallocate(region);
    printf("%" PRIu64 " read\n", last);
}

int main(int argc, char **argv)
{
    if (argc != 4 || (strcmp(argv[1], "read") != 0 && strcmp(argv[1], "write") != 0)) {
        fprintf(stderr, "usage: reflect read KEY COUNT | reflect write KEY COUNT\n");
        return 2;
    }
    ringlet_reflect_host *host = ringlet_reflect_open(NULL);
    if (!host)
        fail();
    uint64_t key = strtoull(argv[2], NULL, 0), count = strtoull(argv[3], NULL, 0);
    if (argv[1][0] == 'r')
        read_lines(host, key, count);
    else
        write_lines(host, key, count);
    ringlet_reflect_close(host);
    return 0;
}
