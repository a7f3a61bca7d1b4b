/* A program of any libc, which knows nothing of ringlet but to ask it where a connection is. Both ends are its own, in two processes. Its last line tells how many trips it took until the connection had moved; -1: it has not. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <dlfcn.h>
static int path(int fd) {
    int (*ask)(int) = (int (*)(int))dlsym(RTLD_DEFAULT, "ringlet_path");
    return ask ? ask(fd) : -1;
}

enum { RING = 3, TRIPS_MOST = 5000, BYTES = 3000 };

#define CHECK(what) \
    do { \
        if (!(what)) { \
            printf("line %d: %s (%s)\n", __LINE__, #what, strerror(errno)); \
            exit(1); \
        } \
    } while (0)

/* The kernel's header is wider than a libc may have it: what lies between must not matter. */
static struct msghdr header_of(struct iovec *pieces, int count) {
    struct msghdr header;
    memset(&header, 0xff, sizeof header);
    header.msg_name = 0, header.msg_namelen = 0;
    header.msg_iov = pieces, header.msg_iovlen = count;
    header.msg_control = 0, header.msg_controllen = 0;
    header.msg_flags = 0;
    return header;
}

static ssize_t receive(int fd, char *to, size_t len, int way) {
    switch (way % 5) {
    case 4: return syscall(SYS_recvfrom, fd, to, len, 0, 0, 0);
    case 0: return recv(fd, to, len, 0);
    case 1: return read(fd, to, len);
    case 2: return recvfrom(fd, to, len, 0, 0, 0);
    default: {
        struct iovec pieces[] = {{to, len / 2}, {to + len / 2, len - len / 2}};
        struct msghdr header = header_of(pieces, 2);
        ssize_t got = recvmsg(fd, &header, 0);
        CHECK(got < 0 || (header.msg_controllen == 0 && header.msg_iovlen == 2));
        return got;
    }
    }
}

static ssize_t transmit(int fd, char *from, size_t len, int way) {
    switch (way % 5) {
    case 4: return syscall(SYS_sendto, fd, from, len, 0, 0, 0);
    case 0: return send(fd, from, len, MSG_NOSIGNAL);
    case 1: return write(fd, from, len);
    case 2: return sendto(fd, from, len, 0, 0, 0);
    default: {
        struct iovec pieces[] = {{from, len / 3}, {from + len / 3, len - len / 3}};
        struct msghdr header = header_of(pieces, 2);
        return sendmsg(fd, &header, 0);
    }
    }
}

static void wait_readable(int fd, int way) {
    if (way % 3 == 0) {
        struct pollfd one = {.fd = fd, .events = POLLIN};
        CHECK(poll(&one, 1, -1) == 1 && one.revents & POLLIN);
    } else if (way % 3 == 1) {
        fd_set set;
        FD_ZERO(&set);
        FD_SET(fd, &set);
        CHECK(select(fd + 1, &set, 0, 0, 0) == 1 && FD_ISSET(fd, &set));
    }
}

static void all(int fd, char *bytes, size_t len, int way, int in) {
    for (size_t done = 0; done < len;) {
        if (in) wait_readable(fd, way);
        ssize_t now = (in ? receive : transmit)(fd, bytes + done, len - done, way);
        CHECK(now > 0);
        done += now;
    }
}

static void serve(int fd) {
    char bytes[BYTES];
    int set = epoll_create1(EPOLL_CLOEXEC);
    struct epoll_event event = {.events = EPOLLIN, .data.fd = fd};
    CHECK(set >= 0 && epoll_ctl(set, EPOLL_CTL_ADD, fd, &event) == 0);
    for (int way = 0;; way++) {
        CHECK(epoll_wait(set, &event, 1, -1) == 1 && event.data.fd == fd);
        ssize_t got = receive(fd, bytes, sizeof bytes, way);
        CHECK(got >= 0);
        if (got == 0) _exit(0);
        all(fd, bytes, got, way, 0);
    }
}

static void trip(int fd, unsigned n) {
    char out[BYTES], in[BYTES];
    size_t len = 1 + n * 37 % BYTES;
    for (size_t i = 0; i < len; i++) out[i] = (char)(n + i);
    all(fd, out, len, n, 0);
    all(fd, in, len, n, 1);
    CHECK(memcmp(in, out, len) == 0);
}

static int waited_for;

static void *wait_for_ever(void *unused) {
    (void)unused;
    char byte;
    recv(waited_for, &byte, 1, 0);
    return 0;
}

int main(void) {
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof at;
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(listener >= 0 && bind(listener, (void *)&at, len) == 0 && listen(listener, 1) == 0);
    CHECK(getsockname(listener, (void *)&at, &len) == 0);
    pid_t server = fork();
    if (server == 0) serve(accept(listener, 0, 0));
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(fd >= 0 && connect(fd, (void *)&at, len) == 0);
    int trips = 0;
    while (trips < TRIPS_MOST && path(fd) != RING) trip(fd, trips++);
    int moved = path(fd) == RING;
    for (unsigned n = 0; n < 500; n++) trip(fd, n);
    /* A thread is cancelled where it waits, and the connection goes on. */
    pthread_t waiter;
    waited_for = fd;
    CHECK(pthread_create(&waiter, 0, wait_for_ever, 0) == 0);
    usleep(20000);
    CHECK(pthread_cancel(waiter) == 0 && pthread_join(waiter, 0) == 0);
    trip(fd, 7);
    /* A child has it too, then its parent again. */
    pid_t child = fork();
    if (child == 0) trip(fd, 8), _exit(0);
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    trip(fd, 9);
    CHECK(shutdown(fd, SHUT_WR) == 0);
    char byte;
    CHECK(recv(fd, &byte, 1, 0) == 0);
    close(fd);
    CHECK(waitpid(server, &status, 0) == server && status == 0);
    printf("%d\n", moved ? trips : -1);
    return 0;
}
