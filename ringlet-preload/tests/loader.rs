//! The library beside the loader, whose lock is held while constructors run, and beside others that are preloaded with it.

mod library;

use object::{Object, ObjectSymbol};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// A library whose constructor waits for a thread, which makes its process's first calls.
const WAITING: &str = r#"
#define _GNU_SOURCE
#include <poll.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

static void *first_calls(void *nothing)
{
    int pair[2], set = epoll_create1(0);
    char byte = 1;
    struct iovec piece = { &byte, 1 };
    struct msghdr message = { .msg_iov = &piece, .msg_iovlen = 1 };
    struct epoll_event event = { .events = EPOLLIN };
    struct timeval now = { 0, 0 };
    socketpair(AF_UNIX, SOCK_STREAM, 0, pair);
    epoll_ctl(set, EPOLL_CTL_ADD, pair[1], &event);
    write(pair[0], &byte, 1);
    struct pollfd one = { pair[1], POLLIN, 0 };
    fd_set readable;
    FD_ZERO(&readable);
    FD_SET(pair[1], &readable);
    poll(&one, 1, -1);
    ppoll(&one, 1, NULL, NULL);
    select(pair[1] + 1, &readable, NULL, NULL, &now);
    epoll_wait(set, &event, 1, -1);
    read(pair[1], &byte, 1);
    sendmsg(pair[0], &message, 0);
    recvmsg(pair[1], &message, 0);
    writev(pair[0], &piece, 1);
    readv(pair[1], &piece, 1);
    send(pair[0], &byte, 1, 0);
    recv(pair[1], &byte, 1, 0);
    close(dup(pair[0]));
    close(set);
    return nothing;
}

__attribute__((constructor)) static void waits(void)
{
    pthread_t thread;
    pthread_create(&thread, NULL, first_calls, NULL);
    pthread_join(thread, NULL);
}
"#;

/// Loads what it is told to, or nothing if it is linked with it.
const PROGRAM: &str = r#"
#include <dlfcn.h>
#include <stdio.h>

int main(int count, char **words)
{
    if (count > 1 && !dlopen(words[1], RTLD_NOW | (count > 2 ? RTLD_DEEPBIND : 0))) {
        puts(dlerror());
        return 1;
    }
    puts("done");
    return 0;
}
"#;

/// A library in front of libc's clocks, which stand still.
const STOPPED: &str = r#"
#include <sys/time.h>
#include <time.h>

int clock_gettime(clockid_t clock, struct timespec *now)
{
    (void)clock;
    *now = (struct timespec) { 1000000, 0 };
    return 0;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone)
{
    (void)zone;
    *now = (struct timeval) { 1000000, 0 };
    return 0;
}

time_t time(time_t *now)
{
    return now ? *now = 1000000 : 1000000;
}
"#;

/// Waits in vain, in each call that takes a time, for a connection in the ring.
const WAITS: &str = r#"
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <unistd.h>

#define MUST(what) if (!(what)) return __LINE__ % 256

int main(void)
{
    int (*path)(int) = (int (*)(int))dlsym(RTLD_DEFAULT, "ringlet_path");
    int listener = socket(AF_INET, SOCK_STREAM, 0), near = socket(AF_INET, SOCK_STREAM, 0);
    struct sockaddr_in address = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    socklen_t length = sizeof address;
    char byte = 1;
    MUST(path);
    MUST(bind(listener, (struct sockaddr *)&address, length) == 0 && listen(listener, 1) == 0);
    MUST(getsockname(listener, (struct sockaddr *)&address, &length) == 0);
    MUST(connect(near, (struct sockaddr *)&address, length) == 0);
    int far = accept(listener, 0, 0);
    for (int trip = 0; trip < 5000 && path(near) != 3; trip++) {
        MUST(send(near, &byte, 1, 0) == 1 && recv(far, &byte, 1, 0) == 1);
        MUST(send(far, &byte, 1, 0) == 1 && recv(near, &byte, 1, 0) == 1);
    }
    MUST(path(near) == 3);
    struct timespec time = { 0, 50000000 };
    struct timeval interval = { 0, 50000 };
    struct pollfd one = { far, POLLIN, 0 };
    fd_set readable;
    FD_ZERO(&readable);
    FD_SET(far, &readable);
    MUST(poll(&one, 1, 50) == 0 && ppoll(&one, 1, &time, 0) == 0);
    MUST(select(far + 1, &readable, 0, 0, &interval) == 0);
    int set = epoll_create1(0);
    struct epoll_event event = { .events = EPOLLIN };
    MUST(epoll_ctl(set, EPOLL_CTL_ADD, far, &event) == 0);
    MUST(epoll_wait(set, &event, 1, 50) == 0 && epoll_pwait2(set, &event, 1, &time, 0) == 0);
    interval = (struct timeval) { 0, 50000 };
    MUST(setsockopt(far, SOL_SOCKET, SO_RCVTIMEO, &interval, sizeof interval) == 0);
    MUST(recv(far, &byte, 1, 0) == -1);
    MUST(setsockopt(near, SOL_SOCKET, SO_SNDTIMEO, &interval, sizeof interval) == 0);
    static char much[1 << 20];
    for (int sent = 0; send(near, much, sizeof much, 0) > 0; sent++)
        MUST(sent < 1000);
    return 0;
}
"#;

/// Its connection moves, of which a line is written: to a file that may not grow, or as standard error to a pipe that nobody reads any
/// more, or that is full. The program has written nothing, and notices nothing.
const NOTED: &str = r#"
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#define MUST(what) if (!(what)) return __LINE__ % 256

int main(int count, char **words)
{
    int (*path)(int) = (int (*)(int))dlsym(RTLD_DEFAULT, "ringlet_path");
    int listener = socket(AF_INET, SOCK_STREAM, 0), near = socket(AF_INET, SOCK_STREAM, 0), pipes[2];
    struct sockaddr_in address = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    socklen_t length = sizeof address;
    struct rlimit small = { 512 << 20, 512 << 20 };
    sigset_t pending;
    char page[4096] = { 1 };
    MUST(count > 1 && path);
    signal(SIGPIPE, SIG_DFL);
    switch (words[1][0]) {
    case 'f':
        MUST(setrlimit(RLIMIT_FSIZE, &small) == 0);
        break;
    case 'n':
        MUST(pipe(pipes) == 0 && dup2(pipes[1], 2) == 2 && close(pipes[0]) == 0);
        break;
    default:
        MUST(pipe2(pipes, O_NONBLOCK) == 0);
        while (write(pipes[1], page, sizeof page) > 0)
            ;
        MUST(fcntl(pipes[1], F_SETFL, 0) == 0 && dup2(pipes[1], 2) == 2);
    }
    MUST(bind(listener, (struct sockaddr *)&address, length) == 0 && listen(listener, 1) == 0);
    MUST(getsockname(listener, (struct sockaddr *)&address, &length) == 0);
    MUST(connect(near, (struct sockaddr *)&address, length) == 0);
    int far = accept(listener, 0, 0);
    for (int trip = 0; trip < 5000 && path(near) != 3; trip++) {
        MUST(send(near, page, 1, 0) == 1 && recv(far, page, 1, 0) == 1);
        MUST(send(far, page, 1, 0) == 1 && recv(near, page, 1, 0) == 1);
    }
    MUST(path(near) == 3);
    MUST(sigpending(&pending) == 0 && !sigismember(&pending, SIGPIPE) && !sigismember(&pending, SIGXFSZ));
    return 0;
}
"#;

/// Limits its address space, as vsftpd does for each session; `now`: as the program that it has become.
const LIMITED: &str = r#"
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <netinet/in.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define MUST(what) if (!(what)) return __LINE__ % 256
#define MB ((size_t)1 << 20)

static int moves(int (*path)(int))
{
    int listener = socket(AF_INET, SOCK_STREAM, 0), near = socket(AF_INET, SOCK_STREAM, 0);
    struct sockaddr_in address = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    socklen_t length = sizeof address;
    char byte = 1;
    MUST(bind(listener, (struct sockaddr *)&address, length) == 0 && listen(listener, 1) == 0);
    MUST(getsockname(listener, (struct sockaddr *)&address, &length) == 0);
    MUST(connect(near, (struct sockaddr *)&address, length) == 0);
    int far = accept(listener, 0, 0);
    for (int trip = 0; trip < 5000 && path(near) != 3; trip++) {
        MUST(send(near, &byte, 1, 0) == 1 && recv(far, &byte, 1, 0) == 1);
        MUST(send(far, &byte, 1, 0) == 1 && recv(near, &byte, 1, 0) == 1);
    }
    MUST(path(near) == 3);
    return 0;
}

static int is(size_t soft, size_t hard)
{
    struct rlimit told, too;
    return getrlimit(RLIMIT_AS, &told) == 0 && prlimit(0, RLIMIT_AS, 0, &too) == 0 && !memcmp(&told, &too, sizeof told) && told.rlim_cur == soft
        && told.rlim_max == hard;
}

static void *room(size_t bytes)
{
    return mmap(0, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
}

int main(int count, char **words)
{
    int (*path)(int) = (int (*)(int))dlsym(RTLD_DEFAULT, "ringlet_path");
    struct rlimit limit = { 200 * MB, 200 * MB }, less = { 150 * MB, 200 * MB };
    int status;
    if (count > 1) {
        MUST(getrlimit(RLIMIT_AS, &limit) == 0);
        return limit.rlim_cur != 200 * MB;
    }
    MUST(path && moves(path) == 0);
    MUST(setrlimit(RLIMIT_AS, &limit) == 0 && is(200 * MB, 200 * MB));
    MUST(prlimit(getpid(), RLIMIT_AS, &less, 0) == 0 && is(150 * MB, 200 * MB));
    MUST(setrlimit(RLIMIT_AS, &limit) == 0 && is(200 * MB, 200 * MB));
    MUST(room(150 * MB) != MAP_FAILED && room(1024 * MB) == MAP_FAILED);
    MUST(moves(path) == 0);
    pid_t child = fork();
    if (!child)
        _exit(!is(200 * MB, 200 * MB) || moves(path));
    MUST(waitpid(child, &status, 0) == child && status == 0);
    child = vfork();
    if (!child)
        _exit(setrlimit(RLIMIT_AS, &less));
    MUST(waitpid(child, &status, 0) == child && status == 0 && is(200 * MB, 200 * MB));
    child = vfork();
    if (!child) {
        execl(words[0], words[0], "now", (char *)0);
        _exit(1);
    }
    MUST(waitpid(child, &status, 0) == child && status == 0 && is(200 * MB, 200 * MB));
    MUST(execl("/nowhere", "nowhere", (char *)0) == -1 && is(200 * MB, 200 * MB) && room(10 * MB) != MAP_FAILED);
    execl(words[0], words[0], "now", (char *)0);
    return 1;
}
"#;

/// Exports functions under names of libc's, which go on to the next of their name. None is called before the one that was called has returned.
const IN_FRONT: &str = r#"
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

typedef long call(long, long, long, long, long, long);

static long next(const char *name, long a, long b, long c, long d, long e, long f)
{
    static int inside;
    static const char again[] = "called by what it goes on to: ";
    if (inside) {
        syscall(SYS_write, 2, again, sizeof again - 1);
        for (; *name; name++)
            syscall(SYS_write, 2, name, 1);
        syscall(SYS_exit_group, 1);
    }
    inside = 1;
    long done = ((call *)dlsym(RTLD_NEXT, name))(a, b, c, d, e, f);
    inside = 0;
    return done;
}

#define GOES_ON_AS(name, symbol) \
    long name(long a, long b, long c, long d, long e, long f) __asm__(symbol); \
    long name(long a, long b, long c, long d, long e, long f) \
    { \
        return next(symbol, a, b, c, d, e, f); \
    }
#define GOES_ON(name) GOES_ON_AS(my_##name, #name)

GOES_ON(sigaction) GOES_ON(__sigaction) GOES_ON(signal) GOES_ON(__sysv_signal) GOES_ON(read) GOES_ON(write) GOES_ON(poll)
GOES_ON(ppoll) GOES_ON(ioctl) GOES_ON(recv) GOES_ON(recvfrom) GOES_ON(sendfile) GOES_ON(close_range) GOES_ON(preadv2) GOES_ON(pwritev2)
GOES_ON(execv) GOES_ON(execve) GOES_ON(execvp) GOES_ON(send) GOES_ON(recvmsg) GOES_ON(sendmsg) GOES_ON(close) GOES_ON(socket)
GOES_ON(epoll_ctl) GOES_ON(epoll_wait) GOES_ON(fcntl) GOES_ON(dup2)
"#;

/// Calls what ours serves by another of its functions, with the first or without it.
const CALLS_ALL: &str = r#"
#define _GNU_SOURCE
#include <dlfcn.h>
#include <poll.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

extern void (*sigset(int, void (*)(int)))(int);
extern void (*bsd_signal(int, void (*)(int)))(int);
extern int __sigaction(int, const struct sigaction *, struct sigaction *);
extern ssize_t __read_chk(int, void *, size_t, size_t);
extern ssize_t __recv_chk(int, void *, size_t, size_t, int);
extern ssize_t __recvfrom_chk(int, void *, size_t, size_t, int, void *, void *);
extern int __poll_chk(struct pollfd *, nfds_t, int, size_t);
extern int __ppoll_chk(struct pollfd *, nfds_t, const struct timespec *, const sigset_t *, size_t);
extern ssize_t sendfile64(int, int, off_t *, size_t);
extern ssize_t preadv64v2(int, const struct iovec *, int, off_t, int);
extern ssize_t pwritev64v2(int, const struct iovec *, int, off_t, int);

#define MUST(what) if (!(what)) return __LINE__ % 256

static volatile int hits;

static void hit(int number)
{
    hits += number == SIGUSR1;
}

int main(int count, char **words)
{
    int pair[2], set = epoll_create1(0);
    char bytes[8] = "1234567";
    struct iovec piece = { bytes, sizeof bytes };
    struct sigaction action = { .sa_handler = hit };
    struct epoll_event event = { .events = EPOLLIN };
    if (count > 1)
        return 0;
    MUST(sigaction(SIGUSR1, &action, 0) == 0 && raise(SIGUSR1) == 0);
    MUST(__sigaction(SIGUSR1, &action, 0) == 0 && raise(SIGUSR1) == 0);
    MUST(signal(SIGUSR1, hit) == hit && raise(SIGUSR1) == 0);
    MUST(bsd_signal(SIGUSR1, hit) == hit && raise(SIGUSR1) == 0);
    MUST(sigset(SIGUSR1, hit) == hit && raise(SIGUSR1) == 0);
    MUST(siginterrupt(SIGUSR1, 1) == 0 && raise(SIGUSR1) == 0 && hits == 6);
    MUST(sysv_signal(SIGUSR1, hit) == hit);
    MUST(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
    struct pollfd one = { pair[1], POLLIN, 0 };
    MUST(write(pair[0], bytes, 8) == 8 && __read_chk(pair[1], bytes, 8, 8) == 8);
    MUST(send(pair[0], bytes, 8, 0) == 8 && __poll_chk(&one, 1, -1, sizeof one) == 1);
    MUST(__ppoll_chk(&one, 1, 0, 0, sizeof one) == 1 && __recv_chk(pair[1], bytes, 4, 8, 0) == 4);
    MUST(__recvfrom_chk(pair[1], bytes, 4, 8, 0, 0, 0) == 4 && sockatmark(pair[1]) <= 0);
    MUST(sendfile64(pair[0], 0, 0, 0) <= 0);
    MUST(pwritev64v2(pair[0], &piece, 1, -1, 0) == 8 && epoll_ctl(set, EPOLL_CTL_ADD, pair[1], &event) == 0);
    MUST(epoll_wait(set, &event, 1, -1) == 1 && preadv64v2(pair[1], &piece, 1, -1, 0) == 8);
    closefrom(set);
    execl("/proc/self/exe", words[0], "again", (char *)0);
    return 1;
}
"#;

/// Stands behind ours, and has functions that go on to libc's, which they find by a handle (as Samba's wrappers do).
const BEHIND: &str = r#"
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <sys/syscall.h>
#include <unistd.h>

typedef long call(long, long, long, long, long, long);

static int calls;

int calls_behind(void)
{
    return calls;
}

static long next(const char *name, int deep, long a, long b, long c, long d, long e, long f)
{
    static int inside;
    static void *libc[2];
    if (inside++ > 10)
        syscall(SYS_exit_group, 99);
    if (!libc[deep])
        libc[deep] = dlopen("libc.so.6", RTLD_LAZY | (deep ? RTLD_DEEPBIND : 0));
    long done = ((call *)dlsym(libc[deep], name))(a, b, c, d, e, f);
    inside--;
    calls++;
    return done;
}

#define GOES_ON(name, deep) \
    long my_##name(long a, long b, long c, long d, long e, long f) __asm__(#name); \
    long my_##name(long a, long b, long c, long d, long e, long f) \
    { \
        return next(#name, deep, a, b, c, d, e, f); \
    }

GOES_ON(socket, 0) GOES_ON(connect, 0) GOES_ON(accept, 1) GOES_ON(recv, 0) GOES_ON(send, 1) GOES_ON(recvfrom, 0) GOES_ON(sendto, 0)
GOES_ON(recvmsg, 0) GOES_ON(sendmsg, 0) GOES_ON(read, 0) GOES_ON(write, 0) GOES_ON(close, 0) GOES_ON(dup, 0) GOES_ON(sigaction, 0)
"#;

/// A connection over it.
const OVER_IT: &str = r#"
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#define MUST(what) if (!(what)) return __LINE__ % 256

static void nothing(int number)
{
}

int main(void)
{
    int (*calls)(void) = (int (*)(void))dlsym(RTLD_DEFAULT, "calls_behind");
    MUST(calls);
    int listener = socket(AF_INET, SOCK_STREAM, 0), near = socket(AF_INET, SOCK_STREAM, 0);
    struct sockaddr_in address = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    socklen_t length = sizeof address;
    char byte = 1;
    struct sigaction action = { .sa_handler = nothing };
    MUST(bind(listener, (struct sockaddr *)&address, length) == 0 && listen(listener, 1) == 0);
    MUST(getsockname(listener, (struct sockaddr *)&address, &length) == 0);
    MUST(connect(near, (struct sockaddr *)&address, length) == 0 && calls() >= 3);
    int far = accept(listener, 0, 0);
    for (int trip = 0; trip < 2000; trip++) {
        MUST(send(near, &byte, 1, 0) == 1 && recv(far, &byte, 1, 0) == 1);
        MUST(write(far, &byte, 1) == 1 && read(near, &byte, 1) == 1);
    }
    MUST(sigaction(SIGUSR1, &action, 0) == 0 && close(dup(near)) == 0 && close(near) == 0);
    MUST(recv(far, &byte, 1, 0) == 0 && close(far) == 0 && calls() >= 10);
    return 0;
}
"#;

/// Has connections in the ring, as nobody. What is written to a core dump, and what mlockall locks now and later, is as if there were none.
const ALL_MEMORY: &str = r#"
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define MUST(what) if (!(what)) return __LINE__ % 256
#define LARGE (64 << 10)

static int (*path)(int);

/// In KiB.
static long told(const char *what)
{
    char line[256];
    long found = -1;
    FILE *status = fopen("/proc/self/status", "r");
    while (status && fgets(line, sizeof line, status))
        if (!strncmp(line, what, strlen(what)))
            sscanf(line + strlen(what), ": %ld", &found);
    fclose(status);
    return found;
}

/// A connection of which both ends are here; how many trips it has made until it was in the ring.
static int move(int must)
{
    int listener = socket(AF_INET, SOCK_STREAM, 0), near = socket(AF_INET, SOCK_STREAM, 0), trip = 0;
    struct sockaddr_in address = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    socklen_t length = sizeof address;
    char byte = 1;
    bind(listener, (struct sockaddr *)&address, length);
    listen(listener, 1);
    getsockname(listener, (struct sockaddr *)&address, &length);
    connect(near, (struct sockaddr *)&address, length);
    int far = accept(listener, 0, 0), set = epoll_create1(0);
    struct epoll_event event = { .events = EPOLLIN };
    epoll_ctl(set, EPOLL_CTL_ADD, far, &event);
    for (; trip < (must ? 5000 : 200) && path(near) != 3; trip++)
        if (send(near, &byte, 1, 0) != 1 || recv(far, &byte, 1, 0) != 1 || send(far, &byte, 1, 0) != 1 || recv(near, &byte, 1, 0) != 1)
            return 0;
    epoll_wait(set, &event, 1, 0);
    return path(near) == 3 || !must;
}

/// Nothing that is shared with peers is locked, and there are ready boards.
static int unlocked(void)
{
    char line[512];
    int ours = 0, boards = 0, right = 1;
    unsigned long start, end;
    FILE *maps = fopen("/proc/self/smaps", "r");
    while (maps && fgets(line, sizeof line, maps)) {
        if (sscanf(line, "%lx-%lx", &start, &end) == 2) {
            ours = strstr(line, "/memfd:ringlet-") != 0;
            boards += strstr(line, "ringlet-ready") != 0;
        } else if (!strncmp(line, "VmFlags:", 8) && ours && strstr(line, " lo")) {
            right = 0;
        }
    }
    fclose(maps);
    return right && boards > 0;
}

/// Are there mappings of ours, and is each large one left out of a dump?
static int left_out(void)
{
    char line[512], name[512] = "";
    unsigned long start, end, bytes = 0, seen = 0, right = 1;
    int ours = 0;
    FILE *maps = fopen("/proc/self/smaps", "r");
    while (maps && fgets(line, sizeof line, maps)) {
        if (sscanf(line, "%lx-%lx", &start, &end) == 2) {
            bytes = end - start;
            ours = strstr(line, "ringlet-") || strstr(line, "/dev/zero") || (!strchr(line, '/') && !strchr(line, '['));
            strcpy(name, line);
        } else if (!strncmp(line, "VmFlags:", 8) && ours && bytes >= LARGE) {
            seen++;
            if (!strstr(line, " dd"))
                right = 0, printf("dumped: %s", name);
        }
    }
    fclose(maps);
    return seen >= 4 && right;
}

/// Who has all privileges in a user namespace has no more room than the limit.
static int locks_in_namespace(void)
{
    struct rlimit limit = { 4 << 20, 4 << 20 };
    MUST(move(1) && setrlimit(RLIMIT_MEMLOCK, &limit) == 0);
    MUST(mmap(0, 64 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) != MAP_FAILED);
    if (unshare(CLONE_NEWUSER) != 0) {
        write(1, "skipped: no user namespace can be made\n", 39);
        return 0;
    }
    MUST(mlockall(MCL_CURRENT) == -1 && errno == ENOMEM && told("VmLck") == 0);
    return 0;
}

int main(void)
{
    struct rlimit limit;
    int status;
    long before = told("VmSize");
    path = (int (*)(int))dlsym(RTLD_DEFAULT, "ringlet_path");
    pid_t child = fork();
    if (!child)
        _exit(locks_in_namespace());
    MUST(waitpid(child, &status, 0) == child);
    MUST(status == 0);
    MUST(path && (getuid() != 0 || (setresgid(65534, 65534, 65534) == 0 && setresuid(65534, 65534, 65534) == 0)));
    MUST(move(1) && move(1) && left_out());
    // A filter that the kernel refuses changes nothing.
    struct sock_filter all = { BPF_RET | BPF_K, 0, 0, SECCOMP_RET_ALLOW };
    struct sock_fprog filter = { 1, &all };
    if (prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0) == 0)
        MUST(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == -1 && errno == EACCES && move(1));
    MUST(getrlimit(RLIMIT_MEMLOCK, &limit) == 0);
    if (limit.rlim_cur / 1024 < before + 2048) {
        puts("skipped: RLIMIT_MEMLOCK has no room for a program without ringlet either");
        return 0;
    }
    MUST(told("VmSize") * 1024 > (long)limit.rlim_cur || limit.rlim_cur == RLIM_INFINITY);
    MUST(mlockall(MCL_CURRENT | MCL_FUTURE) == 0);
    MUST(told("VmLck") > 1024 && told("VmLck") < before + 2048 && told("VmRSS") < before + 8192 && unlocked());
    // What is mapped from now on is locked, but for what is ours. (Where there is room for a segment for a moment.)
    MUST(move(0) && move(0) && told("VmLck") < before + 2048 && left_out());
    long locked = told("VmLck");
    MUST(mmap(0, 512 << 10, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) != MAP_FAILED);
    MUST(told("VmLck") == locked + 512);
    MUST(munlockall() == 0 && told("VmLck") == 0);
    // Pages are locked as they come.
    MUST(mlockall(MCL_CURRENT | MCL_ONFAULT) == 0 && told("VmLck") > 1024 && told("VmRSS") < before + 8192);
    MUST(mlockall(8) == -1 && mlockall(0) == -1);
    return 0;
}
"#;

const PATIENCE: Duration = Duration::from_secs(30);

struct Place(PathBuf);

impl Place {
    fn new(name: &str) -> Place {
        let place = std::env::temp_dir().join(format!("ringlet-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&place).unwrap();
        Place(place)
    }

    fn build(&self, name: &str, source: &str, words: &[&str]) -> PathBuf {
        self.try_to_build(name, source, words).unwrap_or_else(|| panic!("{name} is not built"))
    }

    fn try_to_build(&self, name: &str, source: &str, words: &[&str]) -> Option<PathBuf> {
        let (from, to) = (self.0.join(name).with_extension("c"), self.0.join(name));
        std::fs::write(&from, source).unwrap();
        let mut compiler = Command::new("cc");
        let status = compiler.arg("-o").args([&to, &from]).args(words).status().unwrap();
        status.success().then_some(to)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// The program with the library preloaded, and `others`, which is to end by itself.
fn run_with(others: &[&Path], program: &Path, words: &[&Path]) {
    run_noting(others, program, words, "off");
}

/// The same; that a connection has moved is noted there.
fn run_noting(others: &[&Path], program: &Path, words: &[&Path], moves: &str) {
    run_among(&[], others, program, words, moves);
}

/// The same, with libraries in front of ours too.
fn run_among(front: &[&Path], behind: &[&Path], program: &Path, words: &[&Path], moves: &str) {
    let ours = library::build();
    let libraries = front.iter().copied().chain([ours.as_path()]).chain(behind.iter().copied());
    let libraries: Vec<_> = libraries.map(|path| path.to_str().unwrap()).collect();
    let mut child = Command::new(program)
        .args(words)
        .env("LD_PRELOAD", libraries.join(":"))
        // As `ringlet run` does.
        .env("ASAN_OPTIONS", "verify_asan_link_order=0")
        .env_remove("RINGLET_CONFIG")
        .env("RINGLET_MOVES", moves)
        .spawn()
        .unwrap();
    let until = Instant::now() + PATIENCE;
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if Instant::now() > until {
            child.kill().unwrap();
            child.wait().unwrap();
            panic!("{program:?} {words:?} did not end");
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    assert!(status.success(), "{program:?} {words:?}: {status}");
}

fn run(program: &Path, words: &[&Path]) {
    run_with(&[], program, words);
}

#[test]
fn waits_end_though_the_clock_stands_still() {
    let place = Place::new("clock");
    let stopped = place.build("libstopped.so", STOPPED, &["-shared", "-fPIC"]);
    run_with(&[&stopped], &place.build("waits", WAITS, &[]), &[]);
}

#[test]
fn what_is_noted_harms_nobody() {
    let place = Place::new("noted");
    let program = place.build("noted", NOTED, &[]);
    let large = place.0.join("large");
    std::fs::File::create(&large).unwrap().set_len(1 << 30).unwrap();
    run_noting(&[], &program, &[Path::new("file")], large.to_str().unwrap());
    for pipe in ["nobody's", "of one who does not read"] {
        run_noting(&[], &program, &[Path::new(pipe)], "stderr");
    }
}

#[test]
fn sanitizers_run_in_front_of_libc() {
    let place = Place::new("sanitizers");
    for sanitizer in ["address", "leak", "undefined", "thread"] {
        let word = format!("-fsanitize={sanitizer}");
        match place.try_to_build(sanitizer, WAITS, &[&word]) {
            Some(program) => run(&program, &[]),
            None => eprintln!("skipped: cc {word} does not work here"),
        }
    }
}

#[test]
fn a_constructor_may_wait_for_a_thread() {
    let place = Place::new("loader");
    let waiting = place.build("libwaiting.so", WAITING, &["-shared", "-fPIC"]);
    let program = place.build("program", PROGRAM, &[]);
    // Linked with it: its constructor runs before ours.
    let linked = place.build("linked", PROGRAM, &["-Wl,--no-as-needed", waiting.to_str().unwrap()]);
    run(&program, &[&waiting]);
    run(&program, &[&waiting, Path::new("deep")]);
    run(&linked, &[]);
}

/// Erlang exports `sigaction`, libjsig of Java stands in front of us with a lock that it holds while it goes on.
#[test]
fn what_exports_names_of_ours_goes_on_to_ours_and_is_not_called_back() {
    let place = Place::new("front");
    let front = place.build("libfront.so", IN_FRONT, &["-shared", "-fPIC"]);
    run_among(&[&front], &[], &place.build("calls", CALLS_ALL, &["-w"]), &[], "off");
    let object = place.build("front.o", IN_FRONT, &["-c", "-w"]);
    let words = ["-w", "-rdynamic", "-ldl", object.to_str().unwrap()];
    run(&place.build("exports", CALLS_ALL, &words), &[]);
}

#[test]
fn a_library_behind_ours_finds_libc_by_a_handle() {
    let place = Place::new("behind");
    let behind = place.build("libbehind.so", BEHIND, &["-shared", "-fPIC", "-w"]);
    let program = place.build("over", OVER_IT, &["-w"]);
    run_with(&[&behind], &program, &[]);
    // In front of ours it finds ours, which goes on to libc.
    run_among(&[&behind], &[], &program, &[], "off");
}

#[test]
fn what_walks_all_memory_finds_none_of_ours() {
    let place = Place::new("memory");
    run(&place.build("memory", ALL_MEMORY, &["-w"]), &[]);
}

#[test]
fn a_program_that_limits_its_memory_has_what_it_asked_for() {
    let place = Place::new("limited");
    run(&place.build("limited", LIMITED, &["-w"]), &[]);
}

/// Each library that is loaded with every program costs its start. (A build for debugging unwinds, and needs more.)
#[test]
fn nothing_is_loaded_beside_libc() {
    if cfg!(debug_assertions) {
        return;
    }
    let bytes = std::fs::read(library::build()).unwrap();
    let file = object::File::parse(&*bytes).unwrap();
    let unwinds = file.dynamic_symbols().filter_map(|symbol| symbol.name().ok().map(str::to_owned));
    let unwinds: Vec<String> = unwinds.filter(|name| name.starts_with("_Unwind_")).collect();
    assert!(unwinds.is_empty(), "asked of libgcc_s by name, or given to others: {unwinds:?}");
}
