/* Programs of ringlet_reflect: reflect_actor WORD [ARGUMENT]... Each says "ok", or where it failed. */
#include <errno.h>
#include <poll.h>
#include <ringlet.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#define TRUE(what)                                                                                        \
    do {                                                                                                  \
        errno = 0;                                                                                        \
        if (!(what)) {                                                                                    \
            printf("line %d: not %s: %s: %s\n", __LINE__, #what, strerror(errno), ringlet_reflect_error()); \
            exit(1);                                                                                      \
        }                                                                                                 \
    } while (0)
/* It fails, with this number; and says which call it was, and why. */
#define FAILS(number, call, words)                                                                        \
    do {                                                                                                  \
        errno = 0;                                                                                        \
        long long is_ = (long long)(call);                                                                \
        if ((is_ != -1 && is_ != 0) || errno != (number) || !strstr(ringlet_reflect_error(), words)) {    \
            printf("line %d: %s is %lld, %s: %s\n", __LINE__, #call, is_, strerror(errno), ringlet_reflect_error()); \
            exit(1);                                                                                      \
        }                                                                                                 \
    } while (0)
#define NULLS(number, call, words) FAILS(number, (intptr_t)(call), words)

enum { PAGE = RINGLET_REFLECT_PAGE, KEY = 0x7100 };

static ringlet_reflect_host *host, *other;

static void regions(void)
{
    NULLS(EINVAL, ringlet_reflect_allocate(NULL, KEY, PAGE, 0600, 0),
          "ringlet_reflect_allocate of key 0x7100, 4096 bytes, mode 600: the handle is NULL");
    NULLS(EINVAL, ringlet_reflect_allocate(host, KEY, PAGE, 0600, 9), "flags");
    NULLS(EINVAL, ringlet_reflect_allocate(host, KEY, PAGE, 0700, 0), "a parameter makes no sense");
    NULLS(EINVAL, ringlet_reflect_allocate(host, KEY, 0, 0600, 0), "the size is nothing");
    TRUE(ringlet_reflect_status() == -16);
    NULLS(ENOSPC, ringlet_reflect_allocate(host, KEY, 11 << 20, 0600, 0), "no channel space is left");
    ringlet_reflect_region *region = ringlet_reflect_allocate(host, KEY, PAGE + 1, 0600, 0);
    TRUE(region && ringlet_reflect_len(region) == 2 * PAGE && ringlet_reflect_len(NULL) == 0);
    NULLS(EEXIST, ringlet_reflect_allocate(host, KEY, PAGE + 1, 0600, 0), "has allocated it before");
    NULLS(EINVAL, ringlet_reflect_allocate(other, KEY, PAGE, 0600, 0), "not that of the region");
    NULLS(EINVAL, ringlet_reflect_allocate(other, KEY, PAGE + 1, 0600, RINGLET_REFLECT_INCOHERENT), "coherent");
    FAILS(ENOTCONN, ringlet_reflect_put(region, 0, "x", 1), "ringlet_reflect_put of region 0x7100: it is not attached that way");
    FAILS(ENOTCONN, ringlet_reflect_get(region, 0, (char[1]){0}, 1), "not attached");
    FAILS(ENOTCONN, ringlet_reflect_notify(region, 0, 1), "not attached");
    FAILS(ENOTCONN, ringlet_reflect_detach(region, RINGLET_REFLECT_RECEIVE), "not attached");
    FAILS(EINVAL, ringlet_reflect_detach(region, 0), "flags");
    FAILS(EINVAL, ringlet_reflect_detach(region, 4), "flags");
    NULLS(ENOTCONN, ringlet_reflect_watch_open(region, 0), "not attached");
    NULLS(EINVAL, ringlet_reflect_transmit(region, 4), "flags");
    NULLS(EINVAL, ringlet_reflect_receive(region, RINGLET_REFLECT_NO_LOOPBACK), "flags");
    NULLS(EINVAL, ringlet_reflect_transmit_to(region, "elsewhere", RINGLET_REFLECT_NO_LOOPBACK), "flags");
    NULLS(EFAULT, ringlet_reflect_transmit_to(region, NULL, 0), "NULL");
    NULLS(ENODEV, ringlet_reflect_transmit_to(region, "elsewhere", 0), "ringlet_reflect_transmit_to of region 0x7100 to elsewhere: there is no such host");
    char us[256];
    TRUE(!gethostname(us, sizeof us));
    NULLS(EINVAL, ringlet_reflect_transmit_to(region, us, 0), "to its own host alone");
    volatile uint64_t *to = ringlet_reflect_transmit(region, 0);
    const volatile uint64_t *from = ringlet_reflect_receive(region, 0);
    TRUE(to && from && (const volatile uint64_t *)to != from);
    NULLS(EALREADY, ringlet_reflect_transmit(region, 0), "transmits to it already");
    NULLS(EALREADY, ringlet_reflect_receive(region, 0), "receives it already");
    to[511] = 42;
    TRUE(from[511] == 42);
    static unsigned char bytes[2 * PAGE], got[2 * PAGE];
    for (size_t n = 0; n < sizeof bytes; n++)
        bytes[n] = (unsigned char)(n * 31 + 1);
    for (size_t at = 0; at < 20; at++)
        for (size_t length = 0; length < 40; length++) {
            TRUE(!ringlet_reflect_put(region, PAGE - 20 + at, bytes + at, length));
            TRUE(!ringlet_reflect_get(region, PAGE - 20 + at, got, length) && !memcmp(got, bytes + at, length));
        }
    TRUE(!ringlet_reflect_put(region, 2 * PAGE, NULL, 0) && !ringlet_reflect_get(region, 0, NULL, 0));
    FAILS(EFAULT, ringlet_reflect_put(region, 0, NULL, 1), "NULL");
    FAILS(EFAULT, ringlet_reflect_get(region, 0, NULL, 1), "NULL");
    FAILS(EMSGSIZE, ringlet_reflect_put(region, 2 * PAGE, bytes, 1), "not all within");
    FAILS(EMSGSIZE, ringlet_reflect_put(region, SIZE_MAX, bytes, 2), "not all within");
    FAILS(EMSGSIZE, ringlet_reflect_get(region, 2 * PAGE - 1, got, 2), "not all within");
    FAILS(EMSGSIZE, ringlet_reflect_notify(region, 1, 2 * PAGE), "not all within");
    /* Another member, of this process. */
    ringlet_reflect_region *same = ringlet_reflect_allocate(other, KEY, PAGE + 1, 0600, 0);
    NULLS(EBUSY, ringlet_reflect_receive(same, RINGLET_REFLECT_NONSHARED), "shared");
    NULLS(EBUSY, ringlet_reflect_transmit(same, RINGLET_REFLECT_NO_LOOPBACK), "loopback");
    TRUE(ringlet_reflect_receive(same, 0));
    NULLS(EMSGSIZE, ringlet_reflect_watch_open(same, 2 * PAGE), "not all within");
    ringlet_reflect_watch *watch = ringlet_reflect_watch_open(same, PAGE);
    TRUE(watch && ringlet_reflect_watch_changed(watch) == 0);
    FAILS(EAGAIN, ringlet_reflect_watch_wait(watch, 0), "not to wait");
    FAILS(ETIMEDOUT, ringlet_reflect_watch_wait(watch, 1), "in all that time");
    TRUE(!ringlet_reflect_notify(region, PAGE, 8) && !ringlet_reflect_watch_wait(watch, -1));
    struct pollfd bell = {.fd = ringlet_reflect_watch_fd(watch), .events = POLLIN};
    TRUE(bell.fd >= 0 && poll(&bell, 1, 0) == 0);
    TRUE(!ringlet_reflect_notify(region, PAGE, 8) && poll(&bell, 1, 60000) == 1);
    TRUE(ringlet_reflect_watch_changed(watch) == 1 && poll(&bell, 1, 0) == 0);
    struct ringlet_reflect_state state;
    TRUE(!ringlet_reflect_host_state(host, &state) && state.regions == 1 && state.watched_pages == 1 && state.members >= 2);
    TRUE(!strcmp(us, state.host) && state.allocated == 2 * PAGE && !state.is_cut);
    TRUE(state.allocated_most == 10 << 20 && state.received_most == 8 << 20);
    FAILS(EINVAL, ringlet_reflect_host_state(host, NULL), "NULL");
    ringlet_reflect_watch_close(watch);
    TRUE(!ringlet_reflect_detach(same, RINGLET_REFLECT_RECEIVE));
    ringlet_reflect_deallocate(same);
    TRUE(!ringlet_reflect_detach(region, RINGLET_REFLECT_TRANSMIT | RINGLET_REFLECT_RECEIVE));
    NULLS(ENOTCONN, ringlet_reflect_watch_open(region, 0), "not attached");
    /* What this host receives. */
    ringlet_reflect_region *large = ringlet_reflect_allocate(host, KEY + 1, 6 << 20, 0600, 0);
    ringlet_reflect_region *more = ringlet_reflect_allocate(host, KEY + 2, 3 << 20, 0600, 0);
    TRUE(large && more && ringlet_reflect_receive(large, 0));
    NULLS(ENOSPC, ringlet_reflect_receive(more, 0), "receive space is used up");
    ringlet_reflect_deallocate(more);
    ringlet_reflect_deallocate(large);
    ringlet_reflect_deallocate(region);
}

static void locks(void)
{
    NULLS(EINVAL, ringlet_reflect_locks_open(host, KEY, 0, 0600, 0), "ringlet_reflect_locks_open of key 0x7100, 0 locks, mode 600: a parameter");
    NULLS(EINVAL, ringlet_reflect_locks_open(host, KEY, 4097, 0600, 0), "parameter");
    NULLS(EINVAL, ringlet_reflect_locks_open(host, KEY, 1, 0600, 2), "flags");
    ringlet_reflect_locks *ours = ringlet_reflect_locks_open(host, KEY, 3, 0600, RINGLET_REFLECT_CREATE);
    TRUE(ours && ringlet_reflect_locks_count(ours) == 3);
    NULLS(EEXIST, ringlet_reflect_locks_open(other, KEY, 3, 0600, RINGLET_REFLECT_CREATE), "a lock set with that key is there already");
    NULLS(EEXIST, ringlet_reflect_locks_open(host, KEY, 3, 0600, 0), "before");
    ringlet_reflect_locks *theirs = ringlet_reflect_locks_open(other, KEY, 9, 0600, 0);
    TRUE(theirs && ringlet_reflect_locks_count(theirs) == 3);
    FAILS(EDEADLK, ringlet_reflect_acquire(ours, 0, -1), "ringlet_reflect_acquire of lock 0: this process holds the lock");
    FAILS(EAGAIN, ringlet_reflect_acquire(theirs, 0, 0), "not to wait");
    FAILS(ETIMEDOUT, ringlet_reflect_acquire(theirs, 0, 1), "in all that time");
    FAILS(ENOENT, ringlet_reflect_acquire(theirs, 3, 0), "there is no such lock");
    FAILS(EPERM, ringlet_reflect_release(theirs, 0), "does not hold the lock");
    TRUE(!ringlet_reflect_acquire(ours, 2, 0));
    struct ringlet_reflect_state state;
    TRUE(!ringlet_reflect_host_state(host, &state) && state.lock_sets == 1 && state.locks_held == 2);
    TRUE(!ringlet_reflect_release(ours, 0) && !ringlet_reflect_acquire(theirs, 0, -1));
    FAILS(EINVAL, ringlet_reflect_release(NULL, 0), "NULL");
    ringlet_reflect_locks_close(ours);
    TRUE(!ringlet_reflect_acquire(theirs, 2, 0));
    ringlet_reflect_locks_close(theirs);
}

static void hosts(const char *nowhere)
{
    NULLS(ENOTCONN, ringlet_reflect_open("/nowhere"), "ringlet_reflect_open at /nowhere: this host has no keeper");
    NULLS(ENOTCONN, ringlet_reflect_open(nowhere), "no keeper");
    TRUE(ringlet_reflect_errors(host, 0) == 0 && ringlet_reflect_check(host, 0, 0) == 0);
    FAILS(EIO, ringlet_reflect_check(host, 0, 1), "written again");
    FAILS(ENODEV, ringlet_reflect_errors(host, 1), "ringlet_reflect_errors of rail 1: there is no such rail");
    FAILS(ENODEV, ringlet_reflect_check(host, 9, 0), "rail");
    FAILS(EAGAIN, ringlet_reflect_await_end(host, 0), "not to wait");
    /* One host is a cluster of one. */
    static struct ringlet_reflect_cluster cluster;
    char name[256];
    TRUE(!gethostname(name, sizeof name) && !ringlet_reflect_host_cluster(host, &cluster));
    TRUE(cluster.hosts == 1 && !strcmp(cluster.names[0], name) && !*cluster.names[1] && !*cluster.stopped);
    TRUE(cluster.rails == 1 && cluster.active_rails == 1);
    FAILS(EAGAIN, ringlet_reflect_wait_event(host, &cluster, 0), "ringlet_reflect_wait_event: not now");
    FAILS(ETIMEDOUT, ringlet_reflect_wait_event(host, &cluster, 1), "in all that time");
    cluster.event++;
    TRUE(!ringlet_reflect_wait_event(host, &cluster, -1) && cluster.event == 0);
    FAILS(EINVAL, ringlet_reflect_host_cluster(host, NULL), "NULL");
    FAILS(EINVAL, ringlet_reflect_wait_event(NULL, &cluster, 0), "NULL");
    ringlet_reflect_close(NULL);
    ringlet_reflect_deallocate(NULL);
    ringlet_reflect_watch_close(NULL);
    ringlet_reflect_locks_close(NULL);
    /* What was made by a host that is closed is of use still. */
    ringlet_reflect_host *third = ringlet_reflect_open(NULL);
    ringlet_reflect_region *region = ringlet_reflect_allocate(third, KEY, PAGE, 0600, 0);
    ringlet_reflect_close(third);
    TRUE(region && ringlet_reflect_transmit(region, 0) && !ringlet_reflect_put(region, 0, "x", 1));
    /* A child has none of it, and opens its own. */
    pid_t child = fork();
    if (!child) {
        NULLS(ENOTCONN, ringlet_reflect_allocate(host, KEY, PAGE, 0600, 0), "keeper");
        ringlet_reflect_deallocate(region);
        ringlet_reflect_host *own = ringlet_reflect_open(NULL);
        TRUE(own && ringlet_reflect_allocate(own, KEY, PAGE, 0600, 0));
        exit(0);
    }
    int status;
    TRUE(waitpid(child, &status, 0) == child && status == 0);
    TRUE(!ringlet_reflect_put(region, 0, "x", 1));
    ringlet_reflect_deallocate(region);
}

/* Says that it is there, and waits for the keeper to go: then each call says so. */
static void outlives(void)
{
    ringlet_reflect_region *region = ringlet_reflect_allocate(host, KEY, PAGE, 0600, 0);
    ringlet_reflect_locks *locks = ringlet_reflect_locks_open(host, KEY, 1, 0600, RINGLET_REFLECT_CREATE);
    ringlet_reflect_locks *waits = ringlet_reflect_locks_open(other, KEY, 1, 0600, 0);
    TRUE(region && locks && waits && ringlet_reflect_transmit(region, 0));
    puts("ready");
    fflush(stdout);
    FAILS(ENOTCONN, ringlet_reflect_acquire(waits, 0, -1), "keeper");
    TRUE(!ringlet_reflect_await_end(host, -1));
    FAILS(ENOTCONN, ringlet_reflect_wait_event(host, &(struct ringlet_reflect_cluster){0}, -1), "keeper");
    NULLS(ENOTCONN, ringlet_reflect_allocate(host, KEY + 1, PAGE, 0600, 0), "keeper");
    TRUE(!ringlet_reflect_put(region, 0, "x", 1));
    ringlet_reflect_deallocate(region);
}

/* As many as are asked for, one after the other, by as many members as that takes; then what the keeper says of one more. */
static void many(long count, int is_all)
{
    enum { EACH = 1000 };
    ringlet_reflect_host *member = NULL;
    ringlet_reflect_region *one = NULL;
    for (long n = 0; n < count; n++) {
        if (n % EACH == 0)
            TRUE((member = ringlet_reflect_open(NULL)));
        ringlet_reflect_region *region = ringlet_reflect_allocate(member, 1000 + n, PAGE, 0600, 0);
        TRUE(region);
        volatile long *to = ringlet_reflect_transmit(region, 0);
        const volatile long *from = ringlet_reflect_receive(region, 0);
        TRUE(to && from);
        *to = n;
        TRUE(*from == n);
        one = region;
    }
    TRUE(one && !ringlet_reflect_put(one, 0, "x", 1));
    if (is_all)
        NULLS(ENOSPC, ringlet_reflect_allocate(other, 1, PAGE, 0600, 0), "as many regions");
    struct ringlet_reflect_state state;
    TRUE(!ringlet_reflect_host_state(host, &state) && state.is_cut && state.allocated == (uint64_t)count * PAGE);
}

/* A region of so many bytes: is there memory for it? */
static void large(const char *bytes, int fits)
{
    ringlet_reflect_region *region = ringlet_reflect_allocate(host, KEY, strtoull(bytes, NULL, 0), 0600, 0);
    TRUE(region);
    if (fits)
        TRUE(ringlet_reflect_transmit(region, 0) && ringlet_reflect_receive(region, 0));
    else {
        NULLS(ENOMEM, ringlet_reflect_transmit(region, 0), "there is no memory");
        NULLS(ENOMEM, ringlet_reflect_receive(region, 0), "there is no memory");
        NULLS(ENOMEM, ringlet_reflect_receive(region, 0), "there is no memory");
    }
    ringlet_reflect_deallocate(region);
}

/* Takes names that are another user's, and fills its own queues, so that who comes there would wait. */
static void squats(const char *user)
{
    for (int n = 0; n < 2; n++) {
        struct sockaddr_un name = {.sun_family = AF_UNIX};
        int length = snprintf(name.sun_path + 1, sizeof name.sun_path - 1, "ringlet1-service/ringlet-reflect/%s%s", user,
                              n ? "/0123456789abcdef" : "");
        socklen_t bytes = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)length);
        int taken = socket(AF_UNIX, SOCK_SEQPACKET, 0), come = socket(AF_UNIX, SOCK_SEQPACKET, 0);
        TRUE(!bind(taken, (struct sockaddr *)&name, bytes) && !listen(taken, 0) && !connect(come, (struct sockaddr *)&name, bytes));
    }
    puts("ready");
    fflush(stdout);
    pause();
}

int main(int count, char **words)
{
    const char *word = count > 1 ? words[1] : "";
    /* Opens whatever it finds, or starts: "open" with its number of a member, "refused" with why. */
    if (!strcmp(word, "open") || !strcmp(word, "refused")) {
        ringlet_reflect_host *found = ringlet_reflect_open(NULL);
        if (!found) {
            printf("refused: %s\n", ringlet_reflect_error());
            return 0;
        }
        ringlet_reflect_region *region = ringlet_reflect_allocate(found, KEY, PAGE, 0600, 0);
        const volatile int *from = region ? ringlet_reflect_receive(region, 0) : NULL;
        volatile int *to = region ? ringlet_reflect_transmit(region, 0) : NULL;
        TRUE(from && to);
        /* How many have it before. */
        int had = __atomic_fetch_add((int *)to, 1, __ATOMIC_SEQ_CST);
        printf("open %d as user %d\n", had, (int)geteuid());
        fflush(stdout);
        /* As long as somebody listens to it. */
        if (count > 2)
            while (getchar() != EOF)
                ;
        return 0;
    }
    if (!strcmp(word, "squats"))
        squats(words[2]);
    TRUE((host = ringlet_reflect_open(NULL)) && (other = ringlet_reflect_open(NULL)));
    if (!strcmp(word, "api")) {
        regions();
        locks();
        hosts(words[2]);
    } else if (!strcmp(word, "outlives"))
        outlives();
    else if (!strcmp(word, "many"))
        many(atol(words[2]), atoi(words[3]));
    else if (!strcmp(word, "large"))
        large(words[2], !strcmp(words[3], "fits"));
    else
        return 2;
    puts("ok");
    return 0;
}
