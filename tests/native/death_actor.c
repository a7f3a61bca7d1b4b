/* What the ends of channels are told of deaths, and of a want of descriptors: death_actor NAME SCENE. Says "ok", or where it failed. */
#include <errno.h>
#include <poll.h>
#include <ringlet.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define TRUE(what)                                                              \
    do {                                                                        \
        errno = 0;                                                              \
        if (!(what)) {                                                          \
            printf("line %d: not %s: %s\n", __LINE__, #what, strerror(errno));  \
            exit(1);                                                            \
        }                                                                       \
    } while (0)

enum { LONG_MS = 120000, MOST = 40 };

static char name[60];
static int scenes;

/* Tells the other process one thing. */
static int news[2];
static void say(void) { TRUE(write(news[1], "x", 1) == 1); }
static void hear(void) { char c; TRUE(read(news[0], &c, 1) == 1); }

static struct ringlet_options fresh(const char *base, unsigned kind)
{
    struct ringlet_options options = {.kind = kind};
    snprintf(name, sizeof name, "%s-%d", base, scenes++);
    TRUE(pipe(news) == 0);
    return options;
}

static void await_end(pid_t of) { TRUE(waitpid(of, NULL, 0) == of); }

/* A child that has nothing to do with it, but holds all descriptors. */
static pid_t forked(void)
{
    pid_t pid = fork();
    while (pid == 0)
        pause();
    return pid;
}

/* A receiver that sleeps, or that has never slept; with a child or without. Returns when it is so. */
static pid_t receiver(struct ringlet_options *options, int sleeps, int forks)
{
    pid_t pid = fork();
    TRUE(pid >= 0);
    if (pid)
        return pid;
    setpgid(0, 0);
    char b[100];
    if (options->kind == RINGLET_MAILBOX) {
        ringlet_mailbox *box = ringlet_mailbox_open(name, options);
        TRUE(box && ringlet_mailbox_receive(box, b, sizeof b, NULL, LONG_MS) == 1);
        if (forks)
            forked();
        say();
        if (sleeps)
            ringlet_mailbox_receive(box, b, sizeof b, NULL, -1);
        pause();
    }
    ringlet_listener *listener = ringlet_listen(name, options);
    ringlet_channel *channel = listener ? ringlet_accept(listener, LONG_MS) : NULL;
    TRUE(channel);
    if (options->kind == RINGLET_REGION)
        TRUE(ringlet_wait(channel, LONG_MS) == 1);
    else
        TRUE(ringlet_receive(channel, b, sizeof b, LONG_MS) == 1);
    if (forks)
        forked();
    say();
    if (sleeps && options->kind == RINGLET_REGION)
        ringlet_wait(channel, -1);
    else if (sleeps)
        ringlet_receive(channel, b, sizeof b, -1);
    pause();
    exit(0);
}

static int send_one(ringlet_channel *channel, unsigned kind, int in_place)
{
    if (kind == RINGLET_REGION)
        return ringlet_ring(channel);
    if (!in_place)
        return ringlet_send(channel, "x", 1, 0) == 1 ? 0 : -1;
    char *at = ringlet_reserve(channel, 1, 0);
    return at ? (*at = 'x', ringlet_commit(channel, 1)) : -1;
}

/* Does this process sleep? */
static int is_asleep(pid_t pid)
{
    char path[40], line[300];
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    FILE *file = fopen(path, "r");
    TRUE(file && fgets(line, sizeof line, file));
    fclose(file);
    return strrchr(line, ')')[2] == 'S';
}

/* A receiver is killed: its sender is told by the very next message if it slept, and long before a ring is full if not. */
static void senders(const char *base)
{
    static const unsigned kinds[] = {RINGLET_BYTES, RINGLET_MESSAGES, RINGLET_MAILBOX, RINGLET_REGION};
    for (unsigned i = 0; i < 32; i++) {
        unsigned kind = kinds[i % 4];
        int in_place = i >> 2 & 1, sleeps = i >> 3 & 1, forks = i >> 4 & 1;
        struct ringlet_options options = fresh(base, kind);
        pid_t pid = receiver(&options, sleeps, forks);
        ringlet_channel *channel = ringlet_connect(name, &options, LONG_MS);
        TRUE(channel && send_one(channel, kind, in_place) == 0);
        hear();
        for (int n = 0; sleeps && n < 5; n++) {
            usleep(20000);
            n = is_asleep(pid) ? n : 0;
        }
        TRUE(kill(pid, SIGKILL) == 0);
        await_end(pid);
        int sent = 0;
        while (sent < MOST && send_one(channel, kind, in_place) == 0) {
            sent++;
            usleep(30000);
        }
        if (errno != ECONNRESET || sent == MOST || (sleeps && !forks && sent)) {
            printf("kind %u, in place %d, sleeps %d, child %d: %d sent to nobody: %s\n", kind, in_place, sleeps, forks, sent, strerror(errno));
            exit(1);
        }
        ringlet_close(channel);
        kill(-pid, SIGKILL);
    }
}

/* A process is killed whose child lives: who waits for it is told, in a call and by its descriptor; so is a mailbox. */
static void children(const char *base)
{
    char b[100];
    for (unsigned i = 0; i < 8; i++) {
        unsigned kind = (unsigned[]){RINGLET_BYTES, RINGLET_MESSAGES, RINGLET_LOCKED, RINGLET_REGION}[i % 4];
        int serves = i / 4;
        struct ringlet_options options = fresh(base, kind);
        pid_t pid = fork();
        if (pid == 0) {
            setpgid(0, 0);
            ringlet_listener *listener = serves ? ringlet_listen(name, &options) : NULL;
            TRUE(serves ? ringlet_accept(listener, LONG_MS) : ringlet_connect(name, &options, LONG_MS));
            forked();
            say();
            pause();
        }
        ringlet_listener *listener = serves ? NULL : ringlet_listen(name, &options);
        ringlet_channel *channel = serves ? ringlet_connect(name, &options, LONG_MS) : ringlet_accept(listener, LONG_MS);
        TRUE(channel);
        hear();
        if (kind == RINGLET_LOCKED && serves)
            TRUE(ringlet_send(channel, "q", 1, 0) == 1);
        struct pollfd by = {.fd = ringlet_receive_fd(channel), .events = POLLIN};
        TRUE(ringlet_arm_receive(channel) == 1 && poll(&by, 1, 0) == 0);
        TRUE(kill(pid, SIGKILL) == 0);
        await_end(pid);
        TRUE(poll(&by, 1, LONG_MS) == 1 && ringlet_arm_receive(channel) == 0);
        long got = kind == RINGLET_REGION ? (long)ringlet_wait(channel, LONG_MS) : (long)ringlet_receive(channel, b, sizeof b, LONG_MS);
        int why = errno;
        TRUE(got == -1 && why == ECONNRESET);
        if (kind == RINGLET_REGION)
            TRUE(ringlet_check(channel) == -1);
        ringlet_close(channel);
        if (listener)
            ringlet_listener_close(listener);
        kill(-pid, SIGKILL);
    }
    struct ringlet_options options = fresh(base, RINGLET_MAILBOX);
    ringlet_mailbox *box = ringlet_mailbox_open(name, &options);
    TRUE(box);
    /* A child of the mailbox's own, which holds what belongs to its senders. */
    pid_t own = forked(), pid = fork();
    if (pid == 0) {
        setpgid(0, 0);
        ringlet_channel *channel = ringlet_connect(name, &options, LONG_MS);
        TRUE(channel && ringlet_send(channel, "x", 1, 0) == 1);
        forked();
        pause();
    }
    TRUE(ringlet_mailbox_receive(box, b, sizeof b, NULL, LONG_MS) == 1 && ringlet_mailbox_senders(box) == 1);
    struct pollfd by = {.fd = ringlet_mailbox_fd(box), .events = POLLIN};
    TRUE(ringlet_mailbox_arm(box) == 1);
    TRUE(kill(pid, SIGKILL) == 0);
    await_end(pid);
    TRUE(poll(&by, 1, LONG_MS) == 1);
    TRUE(ringlet_mailbox_receive(box, b, sizeof b, NULL, 0) == -1 && ringlet_mailbox_senders(box) == 0);
    TRUE(ringlet_mailbox_arm(box) == 1 && poll(&by, 1, 0) == 0);
    kill(-pid, SIGKILL);
    TRUE(kill(own, SIGKILL) == 0);
    await_end(own);
    ringlet_mailbox_close(box);
}

/* A service without a free descriptor turns nobody away: who has come waits until there is one. */
static void crowded(const char *base)
{
    for (int boxes = 0; boxes < 2; boxes++) {
        struct ringlet_options options = fresh(base, boxes ? RINGLET_MAILBOX : RINGLET_MESSAGES);
        char b[100];
        ringlet_listener *listener = boxes ? NULL : ringlet_listen(name, &options);
        ringlet_mailbox *box = boxes ? ringlet_mailbox_open(name, &options) : NULL;
        TRUE(boxes ? !!box : !!listener);
        pid_t pid = fork();
        if (pid == 0) {
            ringlet_channel *channel = ringlet_connect(name, &options, LONG_MS);
            TRUE(channel && ringlet_send(channel, "x", 1, LONG_MS) == 1);
            if (!boxes)
                TRUE(ringlet_receive(channel, b, sizeof b, LONG_MS) == 1);
            exit(0);
        }
        struct pollfd by = {.fd = boxes ? ringlet_mailbox_fd(box) : ringlet_listener_fd(listener), .events = POLLIN};
        TRUE(poll(&by, 1, LONG_MS) == 1);
        struct rlimit before, none;
        TRUE(getrlimit(RLIMIT_NOFILE, &before) == 0);
        /* From none free to as many as it takes. */
        int accepted = 0;
        for (none = before, none.rlim_cur = by.fd + 1; none.rlim_cur < before.rlim_cur && !accepted; none.rlim_cur++) {
            TRUE(setrlimit(RLIMIT_NOFILE, &none) == 0);
            errno = 0;
            ringlet_channel *channel = NULL;
            if (boxes)
                accepted = ringlet_mailbox_receive(box, b, sizeof b, NULL, 20) == 1;
            else {
                /* Its time is up before it says so. */
                struct timespec began, now;
                clock_gettime(CLOCK_MONOTONIC, &began);
                accepted = !!(channel = ringlet_accept(listener, 20));
                int says = errno;
                clock_gettime(CLOCK_MONOTONIC, &now);
                TRUE(accepted || (now.tv_sec - began.tv_sec) * 1000000000L + now.tv_nsec - began.tv_nsec >= 20000000);
                errno = says;
            }
            int why = errno;
            TRUE(accepted || (boxes ? why == ETIMEDOUT || ringlet_mailbox_senders(box) == 1 : why == EMFILE));
            TRUE(setrlimit(RLIMIT_NOFILE, &before) == 0);
            if (boxes && !accepted && ringlet_mailbox_senders(box) == 1)
                accepted = ringlet_mailbox_receive(box, b, sizeof b, NULL, LONG_MS) == 1;
            if (channel)
                TRUE(ringlet_receive(channel, b, sizeof b, LONG_MS) == 1 && ringlet_send(channel, "y", 1, 0) == 1);
        }
        TRUE(accepted);
        int status = 0;
        TRUE(waitpid(pid, &status, 0) == pid && status == 0);
    }
}

/* The usual daemon: it opens its service, and goes to the background. Who has opened it has ended; who serves lives. */
static void background(const char *base)
{
    struct ringlet_options options = fresh(base, RINGLET_MESSAGES);
    char b[100];
    pid_t pid = fork();
    if (pid == 0) {
        ringlet_listener *listener = ringlet_listen(name, &options);
        TRUE(listener && daemon(1, 1) == 0);
        ringlet_channel *channel = ringlet_accept(listener, LONG_MS);
        TRUE(channel);
        while (ringlet_receive(channel, b, sizeof b, LONG_MS) == 1)
            TRUE(ringlet_send(channel, b, 1, LONG_MS) == 1);
        exit(0);
    }
    await_end(pid);
    ringlet_channel *channel = ringlet_connect(name, &options, LONG_MS);
    TRUE(channel);
    for (int i = 0; i < 100; i++) {
        TRUE(ringlet_send(channel, "x", 1, LONG_MS) == 1 && ringlet_receive(channel, b, sizeof b, LONG_MS) == 1);
        usleep(1000);
    }
    ringlet_close(channel);
}

int main(int count, char **words)
{
    static const struct { const char *name; void (*scene)(const char *); } all[] =
        {{"senders", senders}, {"children", children}, {"crowded", crowded}, {"background", background}};
    for (unsigned i = 0; count == 3 && i < sizeof all / sizeof *all; i++)
        if (!strcmp(words[2], all[i].name)) {
            all[i].scene(words[1]);
            puts("ok");
            return 0;
        }
    return 2;
}
