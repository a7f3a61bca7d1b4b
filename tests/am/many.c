/* Everybody sends to process 0, which sleeps in between; sums are gathered at the end. */
#include "check.h"

static long sum;
static int count;

static void add(void *token, int32_t value)
{
    en_t name, expected;
    OK(AM_GetSourceEndpoint(token, &name));
    int from = value % 1000;
    OK(AM_GetTranslationName(ep, from, &expected));
    CHECK(AMX_enEqual(name, expected));
    tag_t tag, ours;
    OK(AM_GetMsgTag(token, &tag));
    OK(AM_GetTag(ep, &ours));
    CHECK(tag == ours);
    ep_t dest;
    OK(AM_GetDestEndpoint(token, &dest));
    CHECK(dest == ep);
    sum += value;
    count++;
}

int main(int argc, char **argv)
{
    start(&argc, &argv);
    OK(AM_SetHandler(ep, 1, add));
    OK(AMX_SPMDBarrier());
    int each = 2000;
    long sent = 0;
    for (int i = 0; i < each; i++) {
        OK(AM_Request1(ep, 0, 1, i * 1000 + rank));
        sent += i * 1000 + rank;
        if (i % 500 == 0)
            usleep(1000);
    }
    while (rank == 0 && count < each * size)
        wait_for_event();
    long *all = malloc(sizeof sent * size), total = 0;
    OK(AMX_SPMDAllGather(&sent, all, sizeof sent));
    for (int i = 0; i < size; i++)
        total += all[i];
    CHECK(rank != 0 || total == sum);
    OK(AMX_SPMDBarrier());
    OK(AMX_SPMDExit(0));
}
