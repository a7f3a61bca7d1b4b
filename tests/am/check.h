/* What the programs here have in common. */
#include <am.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define CHECK(condition)                                                             \
    do {                                                                             \
        if (!(condition)) {                                                          \
            fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition);  \
            exit(1);                                                                 \
        }                                                                            \
    } while (0)
#define OK(call) CHECK((call) == AM_OK)

static eb_t eb;
static ep_t ep;
static int rank, size;

static inline void start(int *argc, char ***argv)
{
    uint64_t job;
    AMX_VerboseErrors = 1;
    OK(AMX_SPMDStartup(argc, argv, 0, &job, &eb, &ep));
    rank = AMX_SPMDMyProc();
    size = AMX_SPMDNumProcs();
}

static inline void wait_for_event(void)
{
    OK(AM_SetEventMask(eb, AM_NOTEMPTY));
    OK(AM_WaitSema(eb));
    OK(AM_Poll(eb));
}
