/* A peer that is killed at some moment: what it has not taken comes back as EUNREACHABLE, and nobody waits for ever. */
#include "check.h"
#include <signal.h>
#include <sys/wait.h>
#include <time.h>

static long requests, replies, returned;

static void request(void *token, void *bytes, size_t nbytes, int32_t number)
{
    OK(AM_ReplyI1(token, 2, bytes, nbytes, number));
}

static void reply(void *token, void *bytes, size_t nbytes, int32_t number)
{
    (void)token, (void)bytes, (void)nbytes, (void)number;
    replies++;
}

static void error(int status, op_t opcode, void *argblock)
{
    (void)opcode, (void)argblock;
    CHECK(status == EUNREACHABLE);
    returned++;
}

static void make(en_t *name)
{
    OK(AM_Init());
    OK(AM_AllocateBundle(AM_SEQ, &eb));
    OK(AM_AllocateEndpoint(eb, &ep, name));
    OK(AM_SetTag(ep, 1));
    OK(AM_SetHandler(ep, 0, error));
    OK(AM_SetHandler(ep, 1, request));
    OK(AM_SetHandler(ep, 2, reply));
}

int main(int argc, char **argv)
{
    CHECK(argc == 4);
    int delay_us = atoi(argv[1]), nbytes = atoi(argv[2]), sleeps = atoi(argv[3]);
    int channel[2];
    en_t name;
    CHECK(!pipe(channel));
    pid_t victim = fork();
    if (!victim) {
        make(&name);
        CHECK(write(channel[1], &name, sizeof name) == sizeof name);
        for (;;) {
            if (sleeps)
                wait_for_event();
            else
                OK(AM_Poll(eb));
        }
    }
    en_t own;
    make(&own);
    CHECK(read(channel[0], &name, sizeof name) == sizeof name);
    OK(AM_Map(ep, 0, name, 1));
    pid_t killer = fork();
    if (!killer) {
        usleep(delay_us);
        kill(victim, SIGKILL);
        _exit(0);
    }
    static char bytes[8192];
    while (!returned) {
        OK(AM_RequestI1(ep, 0, 1, bytes, nbytes, 5));
        requests++;
        if (requests % 1000 == 0)
            usleep(100);
    }
    while (replies + returned < requests)
        wait_for_event();
    /* And at once from now on. */
    OK(AM_RequestI1(ep, 0, 1, bytes, nbytes, 5));
    CHECK(++requests == replies + returned + 0 || AM_Poll(eb) == AM_OK);
    CHECK(requests == replies + returned);
    OK(AM_Terminate());
    CHECK(waitpid(victim, NULL, 0) == victim && waitpid(killer, NULL, 0) == killer);
    return 0;
}
