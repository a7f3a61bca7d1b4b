/*
 * Questions and answers over ringlet. One program serves, another calls:
 *
 *     cc echo.c -o echo $(pkg-config --cflags --libs ringlet)
 *     ./echo serve NAME bytes|messages|locked &
 *     ./echo call NAME bytes|messages|locked COUNT SIZE
 *
 * The server writes its answers in place: it reads a question where it lies, and puts the answer where the caller will read it.
 * With "awake" after the kind both ends never sleep: they look again and again, and nothing enters the kernel.
 */
#include <errno.h>
#include <ringlet.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int timeout = -1; /* 0: awake */

static void fail(const char *what)
{
    fprintf(stderr, "%s: %s\n", what, strerror(errno));
    exit(1);
}

/* Waiting is ringlet's, or done here by looking again. */
static int again(void)
{
    return timeout == 0 && errno == EAGAIN;
}

static const void *next(ringlet_channel *channel, size_t *len)
{
    const void *at;
    while (!(at = ringlet_peek(channel, len, timeout)) && again())
        ;
    return at;
}

static void *room(ringlet_channel *channel, size_t len)
{
    void *at;
    while (!(at = ringlet_reserve(channel, len, timeout)) && again())
        ;
    return at;
}

/* The answer is the question with each byte turned around. A caller that leaves, dies or misbehaves ends its own connection only. */
static void serve_one(ringlet_channel *channel, int locked)
{
    for (;;) {
        size_t len;
        const volatile unsigned char *question = next(channel, &len);
        if (!question) {
            if (errno != EPIPE)
                perror("connection ended");
            return;
        }
        if (locked) /* to take the turn; the question stays readable until the answer is sent */
            ringlet_release(channel, len);
        volatile unsigned char *answer = room(channel, len);
        if (!answer) {
            perror("connection ended");
            return;
        }
        for (size_t i = 0; i < len; i++)
            answer[i] = ~question[i];
        if (ringlet_commit(channel, len) != 0) {
            perror("connection ended");
            return;
        }
        if (!locked)
            ringlet_release(channel, len);
    }
}

static void serve(const char *name, const struct ringlet_options *options)
{
    ringlet_listener *listener = ringlet_listen(name, options);
    if (!listener)
        fail("listen");
    puts("serving");
    fflush(stdout);
    for (;;) {
        ringlet_channel *channel = ringlet_accept(listener, -1);
        if (!channel) {
            perror("accept");
            continue;
        }
        serve_one(channel, options->kind == RINGLET_LOCKED);
        ringlet_close(channel);
    }
}

static void call(const char *name, const struct ringlet_options *options, long count, size_t size)
{
    ringlet_channel *channel = ringlet_connect(name, options, 10000);
    if (!channel)
        fail("connect");
    unsigned char *question = malloc(size + 1), *answer = malloc(size + 1);
    for (long i = 0; i < count; i++) {
        for (size_t at = 0; at < size; at++)
            question[at] = (unsigned char)(i + at);
        for (size_t sent = 0; sent < size;) {
            ssize_t n = ringlet_send(channel, question + sent, size - sent, timeout);
            if (n < 0 && !again())
                fail("send");
            sent += n > 0 ? (size_t)n : 0;
        }
        for (size_t got = 0; got < size;) {
            ssize_t n = ringlet_receive(channel, answer + got, size - got, timeout);
            if (n < 0 && !again())
                fail("receive");
            got += n > 0 ? (size_t)n : 0;
        }
        for (size_t at = 0; at < size; at++)
            if (answer[at] != (unsigned char)~question[at]) {
                fprintf(stderr, "wrong answer %ld at byte %zu\n", i, at);
                exit(1);
            }
    }
    ringlet_close(channel);
    printf("%ld answers\n", count);
    free(question);
    free(answer);
}

int main(int argc, char **argv)
{
    static const char *const kinds[] = {"", "bytes", "messages", "locked"};
    struct ringlet_options options = {0};
    if (argc >= 5 && strcmp(argv[4], "awake") == 0) {
        timeout = 0;
        memmove(&argv[4], &argv[5], (size_t)(argc-- - 4) * sizeof *argv);
    }
    for (unsigned kind = 1; argc >= 4 && kind < 4; kind++)
        if (strcmp(argv[3], kinds[kind]) == 0)
            options.kind = kind;
    if (options.kind && argc == 4 && strcmp(argv[1], "serve") == 0)
        serve(argv[2], &options);
    else if (options.kind && argc == 6 && strcmp(argv[1], "call") == 0)
        call(argv[2], &options, atol(argv[4]), strtoul(argv[5], NULL, 10));
    else {
        fprintf(stderr, "usage: echo serve NAME KIND [awake] | echo call NAME KIND [awake] COUNT SIZE\n");
        return 2;
    }
    return 0;
}
