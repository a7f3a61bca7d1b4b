/* A library that is loaded in ways that lead around one that was preloaded: it prefers the libc that it was linked with, or has
 * one of its own. Each function answers the line that waits on a connection, and returns its length. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/socket.h>

typedef ssize_t receive(int, void *, size_t, int);
typedef ssize_t transmit(int, const void *, size_t, int);

static int answer_with(receive *from, transmit *to, int fd)
{
    char line[100];
    ssize_t length = from(fd, line, sizeof line, MSG_DONTWAIT);
    return length > 0 && to(fd, line, length, 0) == length ? length : -1;
}

int by_call(int fd)
{
    struct pollfd one = { fd, POLLIN, 0 };
    char line[100];
    ssize_t length = poll(&one, 1, 10000) == 1 ? recv(fd, line, sizeof line, MSG_DONTWAIT) : -1;
    return length > 0 && send(fd, line, length, 0) == length ? length : -1;
}

static receive *volatile received = recv;
static transmit *volatile sent = send;

int by_pointer(int fd)
{
    return answer_with(received, sent, fd);
}

int by_name(int fd)
{
    return answer_with(dlsym(RTLD_DEFAULT, "recv"), dlsym(RTLD_DEFAULT, "send"), fd);
}

int by_next(int fd)
{
    return answer_with(dlsym(RTLD_NEXT, "recv"), dlsym(RTLD_NEXT, "send"), fd);
}

int by_handle(int fd)
{
    void *libc = dlopen("libc.so.6", RTLD_LAZY);
    return answer_with(dlsym(libc, "recv"), dlsym(libc, "send"), fd);
}

static int constructed;

__attribute__((constructor)) static void begin(void)
{
    const char *fd = getenv("AROUND_FD");
    constructed = fd ? by_call(atoi(fd)) : 0;
}

int by_constructor(int fd)
{
    (void)fd;
    return constructed;
}

/* By a library of the same directory, which only the search path of this one tells. */
int by_neighbour(int fd)
{
    void *neighbour = dlopen("neighbour.so", RTLD_LAZY | RTLD_DEEPBIND);
    int (*answer)(int) = neighbour ? (int (*)(int))dlsym(neighbour, "by_call") : NULL;
    return answer ? answer(fd) : -1;
}

int loads_neighbour(int fd)
{
    (void)fd;
    return dlopen("neighbour.so", RTLD_LAZY | RTLD_DEEPBIND) ? 1 : -1;
}
