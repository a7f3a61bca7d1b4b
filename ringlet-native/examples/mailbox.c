/*
 * Many senders, one receiver that is driven by descriptors:
 *
 *     cc mailbox.c -o mailbox $(pkg-config --cflags --libs ringlet)
 *     ./mailbox collect NAME COUNT &         until so many messages have come
 *     ./mailbox tell NAME TEXT COUNT         as often as you like, also at once
 */
#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <ringlet.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void fail(const char *what)
{
    fprintf(stderr, "%s: %s\n", what, strerror(errno));
    exit(1);
}

static void collect(const char *name, const struct ringlet_options *options, long count)
{
    ringlet_mailbox *mailbox = ringlet_mailbox_open(name, options);
    if (!mailbox)
        fail("open");
    puts("collecting");
    fflush(stdout);
    while (count > 0) {
        size_t len;
        uint64_t sender;
        const char *text = ringlet_mailbox_peek(mailbox, &len, &sender, 0);
        if (text) {
            printf("%" PRIu64 " %.*s\n", sender, (int)len, text);
            ringlet_mailbox_release(mailbox);
            count--;
            continue;
        }
        if (errno != EAGAIN)
            fail("peek");
        /* Nothing there: ask to be told, and sleep only if there is still nothing. */
        fflush(stdout);
        struct pollfd bell = {.fd = ringlet_mailbox_fd(mailbox), .events = POLLIN};
        if (ringlet_mailbox_arm(mailbox) == 1 && poll(&bell, 1, -1) < 0)
            fail("poll");
    }
    ringlet_mailbox_close(mailbox);
}

static void tell(const char *name, const struct ringlet_options *options, const char *text, long count)
{
    ringlet_channel *lane = ringlet_connect(name, options, 10000);
    if (!lane)
        fail("connect");
    for (long i = 0; i < count; i++) {
        char line[200];
        int len = snprintf(line, sizeof line, "%s %ld", text, i);
        if (len < 0 || (size_t)len >= sizeof line || ringlet_send(lane, line, (size_t)len, -1) < 0)
            fail("send");
    }
    ringlet_close(lane);
}

int main(int argc, char **argv)
{
    struct ringlet_options options = {.kind = RINGLET_MAILBOX};
    if (argc == 4 && strcmp(argv[1], "collect") == 0)
        collect(argv[2], &options, atol(argv[3]));
    else if (argc == 5 && strcmp(argv[1], "tell") == 0)
        tell(argv[2], &options, argv[3], atol(argv[4]));
    else {
        fprintf(stderr, "usage: mailbox collect NAME COUNT | mailbox tell NAME TEXT COUNT\n");
        return 2;
    }
    return 0;
}
