/* A process that shares its connection by fork is killed behind a send of what its peer has left unread in the ring, before it can note how
   much that was. Its child goes on: the peer, which has gone back to the kernel, gets each word once. x86-64. */

#define _GNU_SOURCE
#include <assert.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/ptrace.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/user.h>
#include <sys/wait.h>
#include <unistd.h>

enum { TRIPS = 5000, WORDS = 16384, WORDS_AT_ONCE = 1024 };

static int filled[2], left[2], next[2];

static void tell(int pipe[2]) { assert(write(pipe[1], "x", 1) == 1); }

static void hear(int pipe[2])
{
    char byte;
    assert(read(pipe[0], &byte, 1) == 1);
}

static void sender(struct sockaddr_in *address)
{
    static unsigned words[WORDS];
    char message[8] = "";
    int end = socket(AF_INET, SOCK_STREAM, 0);
    assert(connect(end, (void *)address, sizeof *address) == 0);
    for (int i = 0; i < TRIPS; i++) {
        assert(send(end, message, sizeof message, 0) == sizeof message);
        assert(recv(end, message, sizeof message, MSG_WAITALL) == sizeof message);
    }
    for (unsigned i = 0; i < WORDS; i++)
        words[i] = i;
    if (fork() == 0) {
        unsigned last = WORDS;
        hear(next);
        assert(send(end, &last, sizeof last, 0) == sizeof last);
        hear(next);
        _exit(0);
    }
    for (int i = 0; i < WORDS; i += WORDS_AT_ONCE)
        assert(send(end, words + i, WORDS_AT_ONCE * sizeof *words, 0) == WORDS_AT_ONCE * sizeof *words);
    tell(filled);
    hear(left);
    ptrace(PTRACE_TRACEME, 0, 0, 0);
    raise(SIGSTOP);
    send(end, words, 1, 0);
    _exit(0);
}

/* Kills the sender where its first send of more than a doorbell ends. */
static void killer(pid_t sender)
{
    int status, inside = 0, killed = 0;
    while (waitpid(sender, &status, 0) == sender && WIFSTOPPED(status)) {
        struct user_regs_struct now;
        if (WSTOPSIG(status) == SIGTRAP && !(inside = !inside)) {
            ptrace(PTRACE_GETREGS, sender, 0, &now);
            if (!killed && (now.orig_rax == SYS_sendto || now.orig_rax == SYS_sendmsg) && (long)now.rax > 1) {
                killed = 1;
                kill(sender, SIGKILL);
            }
        }
        ptrace(PTRACE_SYSCALL, sender, 0, 0);
    }
    assert(killed);
    tell(next);
    _exit(0);
}

int main(void)
{
    struct sockaddr_in address = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    socklen_t len = sizeof address;
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    char message[8];
    assert(pipe(filled) == 0 && pipe(left) == 0 && pipe(next) == 0);
    assert(bind(listener, (void *)&address, len) == 0 && listen(listener, 1) == 0);
    assert(getsockname(listener, (void *)&address, &len) == 0);
    pid_t child = fork();
    if (child == 0) {
        pid_t traced = fork();
        if (traced == 0)
            sender(&address);
        killer(traced);
    }
    int end = accept(listener, NULL, NULL);
    for (int i = 0; i < TRIPS; i++) {
        assert(recv(end, message, sizeof message, MSG_WAITALL) == sizeof message);
        assert(send(end, message, sizeof message, 0) == sizeof message);
    }
    hear(filled);
    /* stdio reads below ringlet: the connection goes back to the kernel, with all that is unread. */
    assert(fdopen(dup(end), "r+"));
    tell(left);
    for (unsigned i = 0, word; i <= WORDS; i++) {
        ssize_t got = recv(end, &word, sizeof word, MSG_WAITALL);
        if (got != sizeof word || word != i) {
            printf("%zd bytes, word %u in place of %u\n", got, word, i);
            return 1;
        }
    }
    tell(next);
    waitpid(child, NULL, 0);
    return 0;
}
