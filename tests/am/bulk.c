/* Each process stores into its neighbour's segment, which stores something back; every size up to AM_MaxLong. */
#include "check.h"

static uint8_t *segment;
static int stored, replied, per;

static void store(void *token, void *bytes, size_t nbytes, int32_t seed)
{
    uint8_t *at = bytes;
    CHECK(at >= segment && at + nbytes <= segment + 2 * AM_MaxLong());
    for (size_t i = 0; i < nbytes; i++)
        CHECK(at[i] == (uint8_t)(seed * 7 + i));
    stored++;
    size_t back = nbytes / 2;
    /* The other half of its segment. */
    OK(AM_ReplyXfer1(token, AM_MaxLong(), 2, at, back, seed));
}

static void back(void *token, void *bytes, size_t nbytes, int32_t seed)
{
    uint8_t *at = bytes;
    (void)token;
    CHECK(at == segment + AM_MaxLong());
    for (size_t i = 0; i < nbytes; i++)
        CHECK(at[i] == (uint8_t)(seed * 7 + i));
    replied++;
}

int main(int argc, char **argv)
{
    start(&argc, &argv);
    size_t max = AM_MaxLong();
    CHECK(max >= 8192 && AM_MaxMedium() >= 512 && AM_MaxShort() >= 8);
    uint8_t *source = malloc(max);
    /* Any memory; or, with an argument, memory into which peers store by themselves. */
    if (argc == 1)
        OK(AM_SetSeg(ep, segment = malloc(2 * max), 2 * max));
    else
        OK(AMX_AllocateSeg(ep, 2 * max, (void **)&segment));
    void *address;
    uintptr_t length;
    OK(AM_GetSeg(ep, &address, &length));
    CHECK(address == segment && length == 2 * max);
    OK(AM_SetHandler(ep, 1, store));
    OK(AM_SetHandler(ep, 2, back));
    OK(AMX_SPMDBarrier());
    for (int pass = 0; pass < 3; pass++)
        for (size_t n = 0; n <= max; n = n ? n * 2 + (n % 3 == 1) : 1, per++) {
        for (size_t i = 0; i < n; i++)
            source[i] = (uint8_t)(per * 7 + i);
        if (per % 2) {
            OK(AM_RequestXfer1(ep, (rank + 1) % size, max - n, 1, source, n, per));
        } else {
            int result;
            while ((result = AM_RequestXferAsync1(ep, (rank + 1) % size, 0, 1, source, n, per)) == AM_ERR_NOT_SENT) {
                OK(AM_SetEventMask(eb, AM_CANSEND));
                OK(AM_WaitSema(eb));
            }
            OK(result);
        }
        while (replied <= per)
            wait_for_event();
    }
    while (stored < per)
        wait_for_event();
    OK(AMX_SPMDBarrier());
    OK(AMX_SPMDExit(0));
}
