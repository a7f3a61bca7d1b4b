/* What programs for AMUDP count on beside Active Messages 2.0: with no argument alone, "job" as one of two processes, "exit" as one of three. */
#include <amudp.h>
#include <amudp_spmd.h>
#include "check.h"

static int requests, replies, before, after, ended = -1;

static void request(void *token, int32_t value)
{
    int index, is_request;
    handler_t handler;
    amudp_category_t category;
    OK(AMUDP_GetSourceId(token, &index));
    CHECK(index == (size == 2 ? 1 - rank : 7));
    OK(AMUDP_GetTokenInfo(token, &handler, &category, &is_request));
    CHECK(handler == 1 && category == amudp_Short && is_request);
    requests++;
    OK(AMUDP_Reply(token, 2, 1, value + 1));
}

static void reply(void *token, int32_t value)
{
    handler_t handler;
    amx_category_t category;
    int is_request;
    OK(AMX_GetTokenInfo(token, &handler, &category, &is_request));
    CHECK(value == 42 && handler == 2 && !is_request);
    replies++;
}

static void bulk(void *token, void *bytes, size_t nbytes, int32_t value)
{
    static char answer[40000];
    CHECK(nbytes == sizeof answer);
    memset(answer, value, sizeof answer);
    /* To where the other's bytes were: both have all of their memory as segment, and the same program. */
    OK(AM_ReplyXfer1(token, (uintptr_t)bytes, 4, answer, sizeof answer, value));
}

static void bulk_reply(void *token, void *bytes, size_t nbytes, int32_t value)
{
    (void)token;
    CHECK(nbytes == 40000 && ((char *)bytes)[0] == value && ((char *)bytes)[nbytes - 1] == value);
    replies++;
}

static void hook_before(amudp_category_t category, int is_request, int handler, void *token, void *bytes, size_t nbytes, int numargs, uint32_t *args)
{
    (void)token;
    CHECK(category == amudp_Short && handler == (is_request ? 1 : 2) && !bytes && !nbytes && numargs == 1);
    CHECK(args[0] == (is_request ? 41 : 42));
    before++;
}

static void hook_after(amudp_category_t category, int is_request)
{
    (void)is_request;
    CHECK(category == amudp_Short && ++after == before);
}

static int send_list(int numargs, ...)
{
    va_list list;
    va_start(list, numargs);
    int result = AMUDP_RequestVA(ep, 7, 1, numargs, list);
    va_end(list);
    return result;
}

static void alone(void)
{
    en_t *named;
    ep_t other;
    amudp_stats_t stats, sum = AMUDP_initial_stats;
    int n;
    size = 1;
    /* Others are started with the program's arguments. */
    CHECK(AMUDP_SPMDStartup(NULL, NULL, 2, 0, AMUDP_SPMDLocalSpawn, NULL, &eb, &ep) == AM_ERR_RESOURCE);
    OK(AM_Init());
    OK(AM_AllocateBundle(AM_PAR, &eb));
    OK(AM_AllocateEndpoint(eb, &ep, &named));
    OK(AM_AllocateEndpoint(eb, &other));
    OK(AM_SetTag(ep, 5));
    OK(AM_SetHandler(ep, 1, request));
    OK(AM_SetHandler(ep, 2, reply));
    OK(AM_Map(ep, 7, *named, 6));

    /* Tables have the sizes that they are given. */
    OK(AM_GetNumTranslations(ep, &n));
    CHECK(n == AMUDP_INIT_NUMTRANSLATIONS);
    CHECK(AM_Map(ep, 300, *named, 5) == AM_ERR_BAD_ARG);
    OK(AM_SetNumTranslations(ep, 301));
    OK(AM_GetNumTranslations(ep, &n));
    CHECK(n == 301);
    OK(AM_Map(ep, 300, *named, 5));
    CHECK(AM_SetNumTranslations(ep, 256) == AM_ERR_RESOURCE);
    OK(AM_UnMap(ep, 300));
    OK(AM_SetNumTranslations(ep, 256));
    CHECK(AM_Map(ep, 300, *named, 5) == AM_ERR_BAD_ARG);
    CHECK(AM_SetNumTranslations(ep, AMUDP_MAX_NUMTRANSLATIONS + 1) == AM_ERR_RESOURCE);
    CHECK(AM_SetNumHandlers(ep, 255) == AM_ERR_RESOURCE && AM_SetNumHandlers(ep, 257) == AM_ERR_RESOURCE);
    OK(AM_SetNumHandlers(ep, 256));

    /* A request to oneself, and its reply, are handled within the call. */
    OK(AMUDP_SetTranslationTag(ep, 7, 5));
    for (int round = 1; round <= 200; round++) {
        OK(AM_Request1(ep, 7, 1, 41));
        CHECK(requests == round && replies == round);
    }
    OK(AMUDP_SetHandlerCallbacks(ep, hook_before, hook_after));
    OK(send_list(1, 41));
    OK(AMUDP_SetHandlerCallbacks(ep, NULL, NULL));
    OK(AMUDP_Request(ep, 7, 1, 1, 41));
    CHECK(AMUDP_Request(ep, 7, 1, 17, 41) == AM_ERR_BAD_ARG);
    CHECK(before == 2 && after == 2 && requests == 202 && replies == 202);

    OK(AMUDP_GetEndpointStatistics(ep, &stats));
    OK(AMUDP_AggregateStatistics(&sum, &stats));
    OK(AMUDP_AggregateStatistics(&sum, &stats));
    CHECK(stats.RequestsSent[amudp_Short] == 202 && stats.RequestsReceived[amudp_Short] == 202);
    CHECK(stats.RepliesSent[amudp_Short] == 202 && stats.RepliesReceived[amudp_Short] == 202);
    CHECK(stats.RequestDataBytesSent[amudp_Short] == 202 * 4 && stats.TotalBytesSent > 2 * 202 * 4);
    CHECK(sum.RequestsSent[amudp_Short] == 404 && sum.RequestMinLatency == (amx_tick_t)-1);
    CHECK(strstr(AMUDP_DumpStatistics(NULL, &stats, 1), "202"));
    OK(AMUDP_ResetEndpointStatistics(ep));
    OK(AMUDP_GetEndpointStatistics(ep, &stats));
    CHECK(!memcmp(&stats, &AMUDP_initial_stats, sizeof stats));
    free(named);
    OK(AM_Terminate());
}

static void end(int code)
{
    ended = code;
}

static void kill_me(int code)
{
    /* Its own code does not matter. */
    _exit(ended == code ? 77 : 78);
}

static void at_exit(void)
{
    fprintf(stderr, "atexit's handlers are run\n");
}

int main(int argc, char **argv)
{
    if (argc == 1 && !AMX_SPMDIsWorker(argv)) {
        alone();
        return 0;
    }
    start(&argc, &argv);
    CHECK(argc == 2 && !argv[2]);
    CHECK(!strcmp(AMX_SPMDgetenvMaster("AMUDP_TEST"), "a=b") && !AMX_SPMDgetenvMaster("AMUDP_TES"));
    CHECK(!strcmp(AMUDP_check_env_prefix("AMUDP_TES"), "AMUDP_TEST=a=b"));
    OK(AMX_SPMDSetExitCallback(end));
    AMX_SPMDkillmyprocess = kill_me;
    atexit(at_exit);
    if (!strcmp(argv[1], "exit")) {
        CHECK(size == 3);
        OK(AMX_SPMDBarrier());
        if (rank == 1)
            AMX_SPMDExit(5);
        /* One polls, one waits for a message. */
        if (rank == 0)
            for (;;)
                OK(AM_Poll(eb));
        OK(AM_SetEventMask(eb, AM_NOTEMPTY));
        for (;;)
            OK(AM_WaitSema(eb));
    }
    CHECK(size == 2);
    static char sent[40000], here[40000];
    OK(AM_SetSeg(ep, NULL, (uintptr_t)-1));
    void *base;
    uintptr_t nbytes;
    OK(AM_GetSeg(ep, &base, &nbytes));
    CHECK(!base && nbytes == (uintptr_t)-1);
    OK(AM_SetHandler(ep, 1, request));
    OK(AM_SetHandler(ep, 2, reply));
    OK(AM_SetHandler(ep, 3, bulk));
    OK(AM_SetHandler(ep, 4, bulk_reply));
    char *addresses[2], *mine = here;
    OK(AMX_SPMDAllGather(&mine, addresses, sizeof mine));
    OK(AMX_SPMDBarrier());
    OK(AM_Request1(ep, 1 - rank, 1, 41));
    memset(sent, 1, sizeof sent);
    /* The reply's bytes come to where the request's are in the other's memory: that is mapped here as well, or there is nothing to see. */
    if (addresses[0] == addresses[1])
        OK(AM_RequestXfer1(ep, 1 - rank, (uintptr_t)here, 3, sent, sizeof sent, 9));
    else
        replies++;
    while (requests < 1 || replies < 2)
        OK(AM_Poll(eb));
    OK(AMX_SPMDBarrier());
    AMX_SPMDExit(0);
}
