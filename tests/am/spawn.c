/* A job whose processes a spawn function has made: each sends to all others, and tells at the end what it has found. With "own" the function is the
 * program's own, with "plain" one that gives its processes nothing for their environment; with "custom" the program says that it is CSPAWN_CMD, and how
 * many there are; with "fails" it fails. "stuck" never polls once the job ends; with "blocked" a process finds no room at one that never polls when the
 * job ends. "leaves" ends its first process early, and badly. */
#include <amudp.h>
#include <amudp_spmd.h>
#include <unistd.h>
#include "check.h"

static int got, answered;
static char memory[4 << 20];

static void request(void *token, void *bytes, size_t nbytes, int32_t from, int32_t offset)
{
    CHECK(nbytes == 60000 && bytes == memory + offset);
    for (size_t at = 0; at < nbytes; at++)
        CHECK(((char *)bytes)[at] == (char)(from + at));
    got++;
    OK(AM_Reply1(token, 2, from));
}

static void reply(void *token, int32_t from)
{
    int index;
    OK(AMUDP_GetSourceId(token, &index));
    CHECK(from == rank && index != rank);
    answered++;
}

/* Two processes each by fork, of which the first forks the second. */
static int own(int nproc, int argc, char **argv, char **extra_env)
{
    /* By a process that was spawned: so would its own be, without end. */
    if (getenv("OWN_NUMBER"))
        return 0;
    for (int at = 0; at < nproc; at += 2) {
        if (fork())
            continue;
        if (at + 1 < nproc && !fork())
            at++;
        for (char **each = extra_env; *each && strcmp(argv[argc - 1], "plain"); each++)
            putenv(*each);
        char number[20];
        sprintf(number, "%d", nproc - 1 - at);
        setenv("OWN_NUMBER", number, 1);
        execv(argv[0], argv);
        _exit(99);
    }
    return 1;
}

static int fails(int nproc, int argc, char **argv, char **extra_env)
{
    (void)nproc, (void)argc, (void)argv, (void)extra_env;
    return 0;
}

static void told(int code)
{
    printf("%d ends with %d\n", rank, code);
}

int main(int argc, char **argv)
{
    uint64_t pid;
    const char *word = argc > 1 ? argv[argc - 1] : "";
    int mine = !strcmp(word, "own") || !strcmp(word, "plain"), custom = !strcmp(word, "custom"), count = mine || custom || !strcmp(word, "fails") ? 4 : 0;
    int (*function)(int, int, char **, char **) = mine ? own : custom ? AMUDP_SPMDCustomSpawn : count ? fails : NULL;
    if (AMUDP_SPMDStartup(&argc, &argv, count, 0, function, &pid, &eb, &ep) != AM_OK)
        return 3;
    rank = AMX_SPMDMyProc();
    size = AMX_SPMDNumProcs();
    CHECK(AMX_SPMDIsWorker(argv) && argc == 2 && !strcmp(argv[1], word) && !argv[2]);
    CHECK(!strcmp(AMX_SPMDgetenvMaster("AMUDP_TEST"), "a=b"));
    if (mine)
        CHECK(rank == atoi(getenv("OWN_NUMBER")));
    amudp_stats_t stats;
    OK(AMUDP_GetEndpointStatistics(ep, &stats));
    CHECK(!memcmp(&stats, &AMUDP_initial_stats, sizeof stats));
    if (!strcmp(word, "leaves") && rank == 0)
        _exit(9);
    OK(AM_SetSeg(ep, memory, sizeof memory));
    OK(AM_SetHandler(ep, 255, request));
    OK(AM_SetHandler(ep, 2, reply));
    OK(AM_SetHandler(ep, 254, reply));
    if (AMX_SPMDBarrier() != AM_OK)
        return 0;
    if (!strcmp(word, "blocked")) {
        OK(AMX_SPMDSetExitCallback(told));
        while (rank == 2 && !answered)
            OK(AM_Poll(eb));
        if (rank == 2)
            AMX_SPMDExit(0);
        if (rank == 1)
            OK(AM_Request1(ep, 2, 254, 2));
        while (rank == 1)
            OK(AM_RequestXfer2(ep, 0, 0, 255, memory, 60000, 0, 0));
        for (;;)
            pause();
    }
    if (!strcmp(word, "stuck") && rank)
        for (;;)
            pause();
    static char bytes[60000];
    for (size_t at = 0; at < sizeof bytes; at++)
        bytes[at] = (char)(rank + at);
    for (int other = 0; other < size && strcmp(word, "stuck"); other++)
        if (other != rank)
            for (int round = 0; round < 20; round++)
                OK(AM_RequestXfer2(ep, other, rank * sizeof bytes, 255, bytes, sizeof bytes, rank, rank * sizeof bytes));
    while (strcmp(word, "stuck") && (got < 20 * (size - 1) || answered < 20 * (size - 1)))
        OK(AM_Poll(eb));
    if (strcmp(word, "stuck"))
        OK(AMX_SPMDBarrier());
    printf("%d of %d\n", rank, size);
    fflush(stdout);
    if (strcmp(word, "stuck"))
        OK(AMX_SPMDBarrier());
    AMX_SPMDExit(5);
}
