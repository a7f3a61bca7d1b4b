/* As programs for the Berkeley NOW's library over UDP are: endpoints known by ports, names made of a port and an address, and bytes that are fetched.
 *
 *     udpam [HOST PORT MINE]    two of one process, or one end, at MINE, of which the other is at HOST's PORT */
#include <udpam.h>
#include <am.h>
#include <arpa/inet.h>
#include "check.h"

static int got, answered, refused, status_wanted;
static char memory[4096], other_memory[4096];
static ea_t expects;

static void request(void *token, int32_t a, int32_t b, int32_t c, int32_t d)
{
    CHECK(a + b + c + d == 10);
    answered++;
    OK(AM_Reply4(token, 2, d, c, b, a));
}

static void reply(void *token, int32_t a, int32_t b, int32_t c, int32_t d)
{
    (void)token;
    CHECK(a == 4 && b == 3 && c == 2 && d == 1);
    got++;
}

static void fetched(void *token, void *bytes, int nbytes, int32_t a, int32_t b, int32_t c, int32_t d)
{
    ea_t here;
    OK(AM_GetDestEndpoint(token, &here));
    CHECK(here == expects && a == 1 && b == 2 && c == 3 && d == nbytes);
    CHECK((char *)bytes == memory + 64);
    for (int at = 0; at < nbytes; at++)
        CHECK(((char *)bytes)[at] == (char)(7 * (at + 100)));
    got++;
}

static void fetched_8(void *token, void *bytes, int nbytes, int32_t a, int32_t b, int32_t c, int32_t d, int32_t e, int32_t f, int32_t g, int32_t h)
{
    CHECK(e + f + g + h == 26);
    fetched(token, bytes, nbytes, a, b, c, d);
}

static void came_back(int status, op_t opcode, void *block)
{
    struct am_argblock *what = block;
    CHECK(status == status_wanted && opcode == AM_GET_XFER_M && what->numargs == 4 && what->args[3] == 4);
    refused++;
}

static ea_t known(eb_t bundle, int port, en_t **name)
{
    ea_t ea;
    OK(AM_AllocateKnownEndpoint(bundle, &ea, name, port));
    CHECK((*name)->port == port && (*name)->ip_addr);
    OK(AM_SetTag(ea, 1234));
    OK(AM_SetHandler(ea, 1, request));
    OK(AM_SetHandler(ea, 2, reply));
    OK(AM_SetHandler(ea, 3, fetched));
    OK(AM_SetHandler(ea, 4, fetched_8));
    OK(AM_SetHandler(ea, 0, came_back));
    return ea;
}

static void get(ea_t ea, int source, int dest, int nbytes, int status)
{
    int now = got, before = refused;
    status_wanted = status;
    OK(AM_GetXfer4(ea, 0, source, 3, dest, nbytes, 1, 2, 3, status ? 4 : nbytes));
    while (got == now && refused == before)
        OK(AM_Poll(eb));
    CHECK(refused == before + !!status);
}

int main(int argc, char **argv)
{
    en_t *name, *other_name, global;
    OK(AM_Init());
    OK(AM_AllocateBundle(AM_PAR, &eb));
    OK(AM_SetEventMask(eb, AM_NOTEMPTY));
    for (int at = 0; at < 4096; at++)
        other_memory[at] = (char)(7 * at);
    int alone = argc == 1, port = alone ? 61114 : atoi(argv[2]), mine = alone ? 61115 : atoi(argv[3]);
    expects = known(eb, mine, &name);
    OK(AM_SetSeg(expects, memory, sizeof memory));
    /* Whatever was there before: a program sets no more than these. */
    memset(&global, 0xa5, sizeof global);
    global.ip_addr = inet_addr(alone ? "127.0.0.1" : argv[1]);
    global.port = port;
    OK(AM_Map(expects, 0, global, 1234));
    if (!alone) {
        OK(AM_Request4(expects, 0, 1, 1, 2, 3, 4));
        while (got < 1 || answered < 1)
            OK(AM_Poll(eb));
        OK(AM_Terminate());
        puts("all");
        return 0;
    }
    ea_t other = known(eb, port, &other_name), third;
    OK(AM_SetSeg(other, other_memory, sizeof other_memory));
    CHECK(AM_AllocateKnownEndpoint(eb, &third, port) == AM_ERR_IN_USE);
    CHECK(AM_AllocateKnownEndpoint(eb, &third, 0) == AM_ERR_BAD_ARG && AM_AllocateKnownEndpoint(eb, &third, 65536) == AM_ERR_BAD_ARG);
    OK(AM_Request4(expects, 0, 1, 1, 2, 3, 4));
    while (got < 1)
        OK(AM_Poll(eb));
    /* The name that it was given is as good. */
    OK(AM_Unmap(expects, 0));
    OK(AM_Map(expects, 0, *other_name, 1234));
    OK(AM_Request4(expects, 0, 1, 1, 2, 3, 4));
    while (got < 2)
        OK(AM_Poll(eb));
    get(expects, 100, 64, 0, 0);
    get(expects, 100, 64, 1, 0);
    get(expects, 100, 64, 3000, 0);
    int now = got;
    OK(AM_GetXfer8(expects, 0, 100, 4, 64, 20, 1, 2, 3, 20, 5, 6, 7, 8));
    OK(AM_GetXferAsynch4(expects, 0, 100, 3, 64, 20, 1, 2, 3, 20));
    OK(AM_GetXferAsynch8(expects, 0, 100, 4, 64, 20, 1, 2, 3, 20, 5, 6, 7, 8));
    while (got < now + 3)
        OK(AM_Poll(eb));
    CHECK(AM_GetXfer4(expects, 0, 0, 3, 0, UDPAM_MAX_LONG + 1, 1, 2, 3, 4) == AM_ERR_BAD_ARG);
    /* What is not in the peer's segment comes back. */
    get(expects, 4097, 64, 1, EBADSEGOFF);
    get(expects, 4000, 64, 97, EBADLENGTH);
    OK(AM_SetTag(other, 1235));
    get(expects, 100, 64, 1, EBADTAG);
    OK(AM_SetTag(other, 1234));
    /* A port is free again when its endpoint has gone, and who comes next is found there. */
    for (int turn = 0; turn < 300; turn++) {
        OK(AM_FreeEndpoint(other));
        OK(AM_AllocateKnownEndpoint(eb, &other, port));
    }
    third = other;
    OK(AM_SetTag(third, 1234));
    OK(AM_SetHandler(third, 1, request));
    OK(AM_UnMap(expects, 0));
    OK(AM_Map(expects, 0, global, 1234));
    now = got;
    OK(AM_Request4(expects, 0, 1, 1, 2, 3, 4));
    while (got == now)
        OK(AM_Poll(eb));
    eb_t more[AMUDP_MAX_BUNDLES];
    for (int at = 1; at < AMUDP_MAX_BUNDLES; at++)
        OK(AM_AllocateBundle(AM_SEQ, &more[at]));
    CHECK(AM_AllocateBundle(AM_SEQ, &more[0]) == AM_ERR_RESOURCE);
    ea_t last;
    OK(AM_AllocateKnownEndpoint(more[AMUDP_MAX_BUNDLES - 1], &last, mine + 1));
    OK(AM_SetTag(last, 1234));
    OK(AM_SetHandler(last, 1, request));
    global.port = mine + 1;
    OK(AM_Map(expects, 1, global, 1234));
    now = got;
    OK(AM_Request4(expects, 1, 1, 1, 2, 3, 4));
    while (got == now) {
        OK(AM_Poll(eb));
        OK(AM_Poll(more[AMUDP_MAX_BUNDLES - 1]));
    }
    return AM_Terminate();
}
