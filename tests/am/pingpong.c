/* Two processes, requests and replies with 0 to 16 arguments: by polling, then by waiting. */
#include "check.h"

static volatile int left;

static void request(void *token)
{
    left--;
    OK(AM_Reply0(token, 2));
}

static void reply(void *token)
{
    (void)token;
    left--;
}

static void request16(void *token, int32_t a0, int32_t a1, int32_t a2, int32_t a3, int32_t a4, int32_t a5,
                      int32_t a6, int32_t a7, int32_t a8, int32_t a9, int32_t a10, int32_t a11, int32_t a12,
                      int32_t a13, int32_t a14, int32_t a15)
{
    CHECK(a0 == -1 && a15 == 16);
    left--;
    OK(AM_Reply16(token, 4, a15, a14, a13, a12, a11, a10, a9, a8, a7, a6, a5, a4, a3, a2, a1, a0));
}

static void reply16(void *token, int32_t a0, int32_t a1, int32_t a2, int32_t a3, int32_t a4, int32_t a5,
                    int32_t a6, int32_t a7, int32_t a8, int32_t a9, int32_t a10, int32_t a11, int32_t a12,
                    int32_t a13, int32_t a14, int32_t a15)
{
    (void)token;
    CHECK(a0 == 16 && a1 == 15 && a2 == 14 && a3 == 13 && a4 == 12 && a5 == 11 && a6 == 10 && a7 == 9);
    CHECK(a8 == 8 && a9 == 7 && a10 == 6 && a11 == 5 && a12 == 4 && a13 == 3 && a14 == 2 && a15 == -1);
    left--;
}

static void rounds(int count, int polling)
{
    left = count;
    OK(AMX_SPMDBarrier());
    for (int round = 0; round < count; round++) {
        if (rank == 1) {
            OK(round % 2 ? AM_Request0(ep, 0, 1)
                         : AM_Request16(ep, 0, 3, -1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16));
        }
        while (left >= count - round) {
            if (polling)
                OK(AM_Poll(eb));
            else
                wait_for_event();
        }
    }
    CHECK(left == 0);
    OK(AMX_SPMDBarrier());
}

int main(int argc, char **argv)
{
    start(&argc, &argv);
    OK(AM_SetHandler(ep, 1, request));
    OK(AM_SetHandler(ep, 2, reply));
    OK(AM_SetHandler(ep, 3, request16));
    OK(AM_SetHandler(ep, 4, reply16));
    int count = argc > 1 ? atoi(argv[1]) : 20000;
    rounds(count, 1);
    if (argc < 3)
        rounds(count / 10, 0);
    OK(AMX_SPMDExit(0));
}
