/* A token goes round and grows; a requests's handler may not send requests, so who gets it sends it on afterwards. */
#include "check.h"

static int has, hops;
static char token_bytes[4096];
static size_t token_length;

static void pass(void *token, void *bytes, size_t nbytes, int32_t hop)
{
    CHECK(AM_Request1(ep, (rank + 1) % size, 1, hop) == AM_ERR_RESOURCE);
    for (size_t i = 0; i < nbytes; i++)
        CHECK(((unsigned char *)bytes)[i] == (unsigned char)(hop + i));
    (void)token;
    has = 1;
    hops = hop;
    token_length = nbytes;
}

int main(int argc, char **argv)
{
    start(&argc, &argv);
    AMX_VerboseErrors = 0;
    OK(AM_SetHandler(ep, 1, pass));
    int laps = 200, last = laps * size;
    has = rank == 0; /* before the barrier, which polls */
    OK(AMX_SPMDBarrier());
    for (int done = 0; !done;) {
        if (has) {
            has = 0;
            done = hops + size > last;
            if (hops < last) {
                token_length = (token_length + 37) % sizeof token_bytes;
                for (size_t i = 0; i < token_length; i++)
                    token_bytes[i] = (char)(hops + 1 + i);
                OK(AM_RequestI1(ep, (rank + 1) % size, 1, token_bytes, token_length, hops + 1));
            }
        } else {
            wait_for_event();
        }
    }
    OK(AMX_SPMDBarrier());
    OK(AMX_SPMDExit(0));
}
