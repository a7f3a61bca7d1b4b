/* Two bundles, each polled by its own threads, and an endpoint that moves between them while it is sent to. */
#include "check.h"
#include <pthread.h>
#include <stdatomic.h>

static atomic_int got[2], stop;
static eb_t two;
static ea_t ends[2];

static void first(void *token, int32_t value)
{
    (void)value;
    got[0]++;
    OK(AM_Reply0(token, 3));
}

static void second(void *token, int32_t value)
{
    (void)value;
    got[1]++;
    OK(AM_Reply0(token, 3));
}

static void answered(void *token) { (void)token; }

static void *serve(void *bundle)
{
    while (!stop)
        OK(AM_Poll((eb_t)bundle));
    return NULL;
}

static void *send(void *unused)
{
    (void)unused;
    for (int i = 0; i < 5000; i++) {
        OK(AM_Request1(ep, i % 2, 1 + i % 2, i));
    }
    return NULL;
}

int main(void)
{
    AMX_VerboseErrors = 1;
    OK(AM_Init());
    OK(AM_AllocateBundle(AM_PAR, &eb));
    OK(AM_AllocateBundle(AM_PAR, &two));
    en_t names[2], own;
    OK(AM_AllocateEndpoint(eb, &ep, &own));
    OK(AM_SetHandler(ep, 3, answered));
    for (int i = 0; i < 2; i++) {
        OK(AM_AllocateEndpoint(two, &ends[i], &names[i]));
        OK(AM_SetTag(ends[i], 5));
        OK(AM_SetHandler(ends[i], 1, first));
        OK(AM_SetHandler(ends[i], 2, second));
        OK(AM_Map(ep, i, names[i], 5));
    }
    pthread_t threads[5];
    for (int i = 0; i < 2; i++)
        CHECK(!pthread_create(&threads[i], NULL, serve, two));
    for (int i = 2; i < 5; i++)
        CHECK(!pthread_create(&threads[i], NULL, send, NULL));
    for (int i = 0; i < 200; i++) {
        OK(AM_MoveEndpoint(ends[0], i % 2 ? eb : two, i % 2 ? two : eb));
        for (int poll = 0; poll < 20; poll++)
            OK(AM_Poll(eb));
    }
    for (int i = 2; i < 5; i++)
        pthread_join(threads[i], NULL);
    while (got[0] + got[1] < 15000)
        OK(AM_Poll(eb));
    stop = 1;
    pthread_join(threads[0], NULL);
    pthread_join(threads[1], NULL);
    CHECK(got[0] == 7500 && got[1] == 7500);
    CHECK(AM_MoveEndpoint(ends[0], eb, two) == AM_ERR_BAD_ARG);
    OK(AM_FreeBundle(two));
    CHECK(AM_Poll(two) == AM_ERR_BAD_ARG && AM_SetTag(ends[0], 1) == AM_ERR_BAD_ARG);
    OK(AM_Terminate());
    return 0;
}
