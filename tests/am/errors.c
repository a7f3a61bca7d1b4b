/* Whatever can't be delivered comes back to handler 0, with its arguments. */
#include "check.h"

static int returned, last_status, last_opcode, got;
static struct am_argblock last;

static void error(int status, op_t opcode, void *argblock)
{
    returned++;
    last_status = status;
    last_opcode = opcode;
    last = *(struct am_argblock *)argblock;
}

static void request(void *token, int32_t handler)
{
    got++;
    OK(AM_Reply1(token, handler, 7));
    CHECK(AM_Reply0(token, 2) == AM_ERR_RESOURCE);
}

static void reply(void *token, int32_t value)
{
    CHECK(value == 7 && AM_Reply0(token, 2) == AM_ERR_RESOURCE);
    got++;
}

static void expect(int status, op_t opcode, handler_t handler, int32_t argument)
{
    /* It may have come inside of the request, which polls. */
    static int expected;
    expected++;
    while (returned < expected)
        wait_for_event();
    CHECK(last_status == status && last_opcode == opcode && last.handler == handler);
    CHECK(last.numargs == 1 && last.args[0] == argument);
}

int main(int argc, char **argv)
{
    start(&argc, &argv);
    AMX_VerboseErrors = 0;
    OK(AM_SetHandler(ep, 0, error));
    OK(AM_SetHandler(ep, 1, request));
    OK(AM_SetHandler(ep, 2, reply));
    static char memory[100];
    OK(AM_SetSeg(ep, memory, sizeof memory));
    OK(AMX_SPMDBarrier());
    if (rank == 0) {
        en_t name;
        tag_t tag;
        OK(AM_GetTranslationName(ep, 1, &name));
        OK(AM_GetTranslationTag(ep, 1, &tag));
        OK(AM_Map(ep, 100, name, tag + 1));
        CHECK(AM_Map(ep, 100, name, tag) == AM_ERR_IN_USE);
        OK(AM_GetTranslationInuse(ep, 100));
        CHECK(AM_GetTranslationInuse(ep, 101) == AM_ERR_RESOURCE);
        OK(AM_Request1(ep, 1, 1, 2));
        while (got < 1)
            wait_for_event();
        OK(AM_Request1(ep, 100, 1, 11));
        expect(EBADTAG, AM_REQUEST_M, 1, 11);
        CHECK(AMX_enEqual(last.name, name) && last.tag == tag + 1);
        OK(AM_UnMap(ep, 100));
        OK(AM_Request1(ep, 100, 1, 12));
        expect(EBADENTRY, AM_REQUEST_M, 1, 12);
        OK(AM_RequestI1(ep, 1, 77, memory, 5, 13));
        expect(EBADHANDLER, AM_REQUEST_IM, 77, 13);
        CHECK(last.nbytes == 5);
        OK(AM_RequestXfer1(ep, 1, 101, 1, memory, 1, 14));
        expect(EBADSEGOFF, AM_REQUEST_XFER_M, 1, 14);
        CHECK(last.dest_offset == 101);
        OK(AM_RequestXfer1(ep, 1, 50, 1, memory, 51, 15));
        expect(EBADLENGTH, AM_REQUEST_XFER_M, 1, 15);
        OK(AM_RequestXfer1(ep, 1, UINTPTR_MAX, 1, memory, 51, 16));
        expect(EBADSEGOFF, AM_REQUEST_XFER_M, 1, 16);
        CHECK(AM_RequestI0(ep, 1, 1, memory, AM_MaxMedium() + 1) == AM_ERR_BAD_ARG);
        CHECK(AM_SetEventMask(eb, AM_NOEVENTS) == AM_OK && AM_WaitSema(eb) == AM_ERR_BAD_ARG);
        CHECK(AM_GetEventMask(eb) == AM_NOEVENTS);
        en_t nobody;
        memset(&nobody, 0, sizeof nobody);
        CHECK(AM_Map(ep, 5, nobody, 1) == AM_ERR_BAD_ARG);
    }
    OK(AMX_SPMDBarrier());
    /* A reply that is refused goes back to who replied. */
    if (rank == 0)
        OK(AM_Request1(ep, 1, 1, 99));
    else
        expect(EBADHANDLER, AM_REPLY_M, 99, 7);
    OK(AMX_SPMDBarrier());
    /* An endpoint that is freed. */
    if (rank == 1)
        OK(AM_FreeEndpoint(ep));
    OK(AMX_SPMDBarrier());
    if (rank == 0) {
        OK(AM_Request1(ep, 1, 1, 17));
        expect(EBADENDPOINT, AM_REQUEST_M, 1, 17);
    } else {
        CHECK(AM_SetTag(ep, 1) == AM_ERR_BAD_ARG);
    }
    OK(AMX_SPMDBarrier());
    OK(AM_Terminate());
    CHECK(AM_Poll(eb) == AM_ERR_NOT_INIT);
    exit(0);
}
