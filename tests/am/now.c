/* As it was written for the Berkeley NOW: its spellings, lengths that are ints, a fixed number of arguments. */
#include "check.h"

static int count;

static void request(void *token, int arg0, int arg1, int arg2, int arg3)
{
    CHECK(arg0 + arg1 + arg2 + arg3 == 10);
    AM_Reply4(token, 2, arg3, arg2, arg1, arg0);
}

static void reply(void *token, int arg0, int arg1, int arg2, int arg3)
{
    (void)token;
    CHECK(arg0 == 4 && arg1 == 3 && arg2 == 2 && arg3 == 1);
    count++;
}

static void medium(void *token, void *buf, int nbytes, int a0, int a1, int a2, int a3, int a4, int a5, int a6, int a7)
{
    CHECK(nbytes == 6 && !strcmp(buf, "hello") && a0 == 1 && a7 == 8);
    AM_ReplyMedium4(token, 4, buf, nbytes, a1, a2 + a3 + a4, a5, a6);
}

static void answer(void *token, void *buf, int nbytes, int arg0, int arg1, int arg2, int arg3)
{
    (void)token;
    CHECK(nbytes == 6 && !strcmp(buf, "hello") && arg0 == 2 && arg1 == 12 && arg2 == 6 && arg3 == 7);
    count++;
}

int main(void)
{
    ea_t ea;
    en_t name;
    handler_t any;
    int n, length = 0;
    static char seg[64];
    void *address;
    AM_Init();
    CHECK(AM_AllocateBundle(AM_SEQ, &eb) == AM_OK);
    CHECK(AM_AllocateEndpoint(eb, &ea) == AM_OK);
    CHECK(AM_GetEndpointName(ea, &name) == AM_OK);
    CHECK(AM_SetTag(ea, AM_ALL) == AM_OK);
    CHECK(AM_SetExpectedResources(ea, 1, 1) == AM_OK);
    CHECK(AM_MapAny(ea, &n, name, 1234) == AM_OK && n == 0);
    CHECK(AM_SetHandler(ea, 1, request) == AM_OK);
    CHECK(AM_SetHandler(ea, 2, reply) == AM_OK);
    CHECK(AM_SetHandlerAny(ea, &any, medium) == AM_OK && any == 3);
    CHECK(AM_SetHandlerAny(ea, &any, answer) == AM_OK && any == 4);
    CHECK(AM_SetSeg(ea, seg, sizeof seg) == AM_OK);
    CHECK(AM_GetSeg(ea, &address, &length) == AM_OK && length == 64 && address == seg);
    CHECK(AM_MaxSegLength(&length) == AM_OK && length > 0);
    CHECK(AM_MaxNumTranslations(&length) == AM_OK && AM_SetNumTranslations(ea, length) == AM_OK);
    CHECK(AM_SetNumHandlers(ea, AM_MaxNumHandlers()) == AM_OK);
    CHECK(AM_SetEventMask(eb, AM_EMPTYTONOT) == AM_OK && AM_GetEventMask(eb) == AM_EMPTYTONOT);
    CHECK(AM_Request4(ea, n, 1, 1, 2, 3, 4) == AM_OK);
    CHECK(AM_RequestMedium8(ea, n, 3, "hello", 6, 1, 2, 3, 4, 5, 6, 7, 8) == AM_OK);
    while (count < 2)
        AM_Wait(eb);
    CHECK(AM_Unmap(ea, n) == AM_OK);
    CHECK(AM_FreeEndpoint(ea) == AM_OK && AM_FreeBundle(eb) == AM_OK);
    return AM_Terminate();
}
