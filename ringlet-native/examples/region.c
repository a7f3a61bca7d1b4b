/*
 * Sums by remote stores. One program serves, another calls:
 *
 *     cc region.c -o region $(pkg-config --cflags --libs ringlet)
 *     ./region serve NAME &
 *     ./region call NAME COUNT SIZE
 *
 * The caller stores bytes into the server's part, how many they are into its first word, and rings; the server stores their sum and the
 * question's number into the caller's part, and rings. The server waits on the doorbell's descriptor, as an event loop would.
 */
#include <errno.h>
#include <poll.h>
#include <ringlet.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Where the question's bytes begin, behind its length. */
enum { BYTES_AT = 64 };

static void fail(const char *what)
{
    fprintf(stderr, "%s: %s\n", what, strerror(errno));
    exit(1);
}

/* What the caller's part holds. */
struct answer {
    uint64_t number, sum;
};

/* Until it is rung; -1 when it never will be again. */
static int await_ring(ringlet_channel *region)
{
    for (;;) {
        if (ringlet_wait(region, 0) >= 0)
            return 0;
        if (errno != EAGAIN && errno != EINTR)
            return -1;
        if (ringlet_arm_receive(region) == 1) {
            struct pollfd bell = {.fd = ringlet_receive_fd(region), .events = POLLIN};
            poll(&bell, 1, -1);
        }
    }
}

/* The caller may change its question at any time, so each word of it is loaded once and checked. */
static void serve_one(ringlet_channel *region)
{
    size_t size;
    const volatile unsigned char *local = ringlet_local(region, &size);
    if (!local)
        fail("local");
    for (struct answer answer = {1, 0}; await_ring(region) == 0; answer.number++) {
        uint64_t len = *(const volatile uint64_t *)local;
        if (len > size - BYTES_AT)
            break;
        answer.sum = 0;
        for (size_t i = 0; i < len; i++)
            answer.sum += local[BYTES_AT + i];
        if (ringlet_put(region, 0, &answer, sizeof answer) != 0 || ringlet_ring(region) != 0)
            break;
    }
    if (ringlet_check(region) == 0)
        fputs("a question that can't be\n", stderr);
    else if (errno != EPIPE)
        perror("connection ended");
}

static void serve(const char *name, const struct ringlet_options *options)
{
    ringlet_listener *listener = ringlet_listen(name, options);
    if (!listener)
        fail("listen");
    puts("serving");
    fflush(stdout);
    for (;;) {
        ringlet_channel *region = ringlet_accept(listener, -1);
        if (!region) {
            perror("accept");
            continue;
        }
        serve_one(region);
        ringlet_close(region);
    }
}

static void call(const char *name, const struct ringlet_options *options, long count, size_t size)
{
    ringlet_channel *region = ringlet_connect(name, options, 10000);
    if (!region)
        fail("connect");
    unsigned char *bytes = malloc(size + 1);
    volatile uint64_t *remote = ringlet_remote(region, NULL);
    const volatile struct answer *answer = ringlet_local(region, NULL);
    for (long i = 1; i <= count; i++) {
        uint64_t sum = 0;
        for (size_t at = 0; at < size; at++)
            sum += bytes[at] = (unsigned char)(i + at);
        if (ringlet_put(region, BYTES_AT, bytes, size) != 0)
            fail("put");
        remote[0] = size; /* a store like any; the ring comes after it */
        if (ringlet_ring(region) != 0)
            fail("ring");
        if (ringlet_wait(region, -1) != 1)
            fail("wait");
        if (answer->number != (uint64_t)i || answer->sum != sum) {
            fprintf(stderr, "answer %ld is wrong\n", i);
            exit(1);
        }
    }
    if (ringlet_check(region) != 0)
        fail("check");
    ringlet_close(region);
    printf("%ld answers\n", count);
    free(bytes);
}

int main(int argc, char **argv)
{
    struct ringlet_options options = {.kind = RINGLET_REGION};
    if (argc == 3 && strcmp(argv[1], "serve") == 0)
        serve(argv[2], &options);
    else if (argc == 5 && strcmp(argv[1], "call") == 0)
        call(argv[2], &options, atol(argv[3]), strtoul(argv[4], NULL, 10));
    else {
        fprintf(stderr, "usage: region serve NAME | region call NAME COUNT SIZE\n");
        return 2;
    }
    return 0;
}
