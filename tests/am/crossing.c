/* Two bundles, each polled by its own thread. The handlers of each ask for the other's endpoint, while a third thread moves an endpoint between
 * the two: nobody waits for ever. What can't be waited for is refused. */
#include "check.h"
#include <pthread.h>
#include <stdatomic.h>

enum { ROUNDS = 20000 };
static eb_t bundles[2];
static ea_t ends[2], moved;
static atomic_int got[2], asked, done;

static void handle(void *token, int32_t from)
{
    (void)token;
    tag_t tag;
    int result = AM_GetTag(ends[!from], &tag);
    CHECK(result == AM_OK ? tag == 5 + !from : result == AM_ERR_RESOURCE);
    asked += result == AM_OK;
    got[from]++;
}

static void *serve(void *which)
{
    int number = which != NULL;
    for (int round = 0; round < ROUNDS; round++)
        OK(AM_Request1(ends[number], 0, 1, number));
    done++;
    return NULL;
}

static void *move(void *unused)
{
    (void)unused;
    for (int round = 0; done < 2; round++)
        OK(AM_MoveEndpoint(moved, bundles[round % 2], bundles[!(round % 2)]));
    return NULL;
}

int main(void)
{
    en_t names[2], name;
    pthread_t threads[3];
    OK(AM_Init());
    for (int number = 0; number < 2; number++) {
        OK(AM_AllocateBundle(AM_PAR, &bundles[number]));
        OK(AM_AllocateEndpoint(bundles[number], &ends[number], &names[number]));
        OK(AM_SetTag(ends[number], 5 + number));
        OK(AM_SetHandler(ends[number], 1, handle));
        OK(AM_Map(ends[number], 0, names[number], 5 + number));
    }
    OK(AM_AllocateEndpoint(bundles[0], &moved, &name));
    for (int number = 0; number < 2; number++)
        CHECK(!pthread_create(&threads[number], NULL, serve, number ? &ends : NULL));
    CHECK(!pthread_create(&threads[2], NULL, move, NULL));
    for (int number = 0; number < 3; number++)
        pthread_join(threads[number], NULL);
    CHECK(got[0] == ROUNDS && got[1] == ROUNDS && asked > 0);
    return AM_Terminate();
}
