/* One end of a pair of Active Messages endpoints: both ends send so many requests with bytes, which the other echoes, and so many megabytes
 * in bulk; each checks all.
 *
 *     messages_actor serve|call NAME COUNT MEGABYTES [sleep|slow|wrong|rounds|naps]
 *
 * A line is written when the endpoint is offered, when the two are joined, and at the end, with how it ended. A server serves one caller. One
 * that is slow takes its time in each handler; one that is wrong does not know the tag; `rounds` tells how long a round trip takes, `naps` of
 * two that sleep. */
#include <am.h>
#include <errno.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define TAG 4711
enum { JOIN = 1, JOINED, ECHO, ECHOED, STORED, KEPT, OVER, HEARD };

static ea_t ep;
static eb_t eb;
static int peer = -1, count, bulk_bytes, sleeps, slow, rounds;
static int joined, echoed, kept, over, heard;
static unsigned char *mine, *memory;

static void end(const char *word, const char *more)
{
    printf("%s %s\n", word, more);
    fflush(stdout);
    _exit(0);
}

static void say(const char *word)
{
    puts(word);
    fflush(stdout);
}

#define CHECK(condition)                                                             \
    do {                                                                             \
        if (!(condition)) {                                                          \
            fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition);  \
            end("failed", #condition);                                               \
        }                                                                            \
    } while (0)
#define OK(call) CHECK((call) == AM_OK)

static void fill(unsigned char *bytes, size_t length, unsigned seed)
{
    for (size_t at = 0; at < length; at++)
        bytes[at] = (unsigned char)(seed * 31 + at * 7 + at / 251 + at / 65521);
}

static size_t length_of(int number)
{
    static const size_t some[] = {0, 1, 31, 64, 96, 97, 900, 5000, 65535, 65536};
    return some[number % 10];
}

static void came_back(int status, op_t opcode, void *block)
{
    static const char *const names[] = {"", "", "EBADENTRY", "EBADTAG", "", "", "", "EBADENDPOINT", "ECONGESTION", "EUNREACHABLE"};
    (void)opcode, (void)block;
    end("error", names[status]);
}

static void join(void *token)
{
    en_t name;
    OK(AM_GetSourceEndpoint(token, &name));
    OK(AM_MapAny(ep, &peer, name, TAG));
    joined = 1;
    OK(AM_Reply0(token, JOINED));
}

static void is_joined(void *token)
{
    (void)token;
    joined = 1;
}

static void echo(void *token, void *bytes, size_t length, int32_t number)
{
    if (slow) {
        usleep(10000);
        if (number == 10)
            CHECK(getchar() == '\n');
    }
    OK(AM_ReplyI1(token, ECHOED, bytes, length, number));
}

static void is_echoed(void *token, void *bytes, size_t length, int32_t number)
{
    static unsigned char expected[65536];
    (void)token;
    CHECK(number == echoed && length == length_of(number));
    fill(expected, length, number);
    CHECK(memcmp(bytes, expected, length) == 0);
    echoed++;
}

static void stored(void *token, void *bytes, size_t length, int32_t offset)
{
    CHECK(bytes == memory + offset && length > 0);
    OK(AM_Reply0(token, KEPT));
}

static void is_kept(void *token)
{
    (void)token;
    kept++;
}

static void is_over(void *token)
{
    CHECK(memcmp(memory, mine, bulk_bytes) == 0);
    over = 1;
    OK(AM_Reply0(token, HEARD));
}

static void is_heard(void *token)
{
    (void)token;
    heard = 1;
}

static void look(void)
{
    if (sleeps)
        OK(AM_WaitSema(eb));
    else
        OK(AM_Poll(eb));
}

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1e6 + time.tv_nsec / 1e3;
}

int main(int argc, char **argv)
{
    CHECK(argc > 4);
    const char *mode = argc > 5 ? argv[5] : "";
    int calls = strcmp(argv[1], "call") == 0, wrong = strcmp(mode, "wrong") == 0;
    sleeps = strcmp(mode, "sleep") == 0, slow = strcmp(mode, "slow") == 0, rounds = strcmp(mode, "rounds") == 0 || strcmp(mode, "naps") == 0;
    sleeps |= strcmp(mode, "naps") == 0;
    count = atoi(argv[3]), bulk_bytes = atoi(argv[4]) << 20;
    en_t name;
    OK(AM_Init());
    OK(AM_AllocateBundle(AM_SEQ, &eb));
    OK(AM_AllocateEndpoint(eb, &ep, &name));
    OK(AM_SetTag(ep, TAG));
    OK(AM_SetEventMask(eb, AM_NOTEMPTY));
    OK(AM_SetHandler(ep, 0, came_back));
    OK(AM_SetHandler(ep, JOIN, join));
    OK(AM_SetHandler(ep, JOINED, is_joined));
    OK(AM_SetHandler(ep, ECHO, echo));
    OK(AM_SetHandler(ep, ECHOED, is_echoed));
    OK(AM_SetHandler(ep, STORED, stored));
    OK(AM_SetHandler(ep, KEPT, is_kept));
    OK(AM_SetHandler(ep, OVER, is_over));
    OK(AM_SetHandler(ep, HEARD, is_heard));
    mine = malloc(bulk_bytes + 1), memory = calloc(bulk_bytes + 1, 1);
    fill(mine, bulk_bytes, 9);
    OK(AM_SetSeg(ep, memory, bulk_bytes));
    if (calls) {
        if (AMX_Find(ep, argv[2], &name, 60000) != AM_OK)
            end("error", strerror(errno));
        OK(AM_MapAny(ep, &peer, name, wrong ? TAG + 1 : TAG));
        OK(AM_Request0(ep, peer, JOIN));
    } else {
        if (AMX_Offer(ep, argv[2]) != AM_OK)
            end("error", strerror(errno));
        say("serving");
    }
    while (!joined)
        look();
    say("connected");
    if (rounds) {
        int calm = count / 10;
        double began = now();
        for (int number = 0; calls && number < count + calm; number++) {
            if (number == calm)
                began = now();
            echoed = 0;
            OK(AM_RequestI1(ep, peer, ECHO, "", 0, 0));
            while (!echoed)
                look();
        }
        if (calls)
            fprintf(stderr, "%.2f us\n", (now() - began) / count);
        count = 0, echoed = 0;
    }
    static unsigned char bytes[65536];
    for (int number = 0; number < count; number++) {
        fill(bytes, length_of(number), number);
        OK(AM_RequestI1(ep, peer, ECHO, bytes, length_of(number), number));
    }
    int pieces = 0;
    for (int offset = 0; offset < bulk_bytes; offset += 65536, pieces++)
        OK(AM_RequestXfer1(ep, peer, offset, STORED, mine + offset, 65536, offset));
    while (echoed < count || kept < pieces)
        look();
    OK(AM_Request0(ep, peer, OVER));
    while (!heard || !over)
        look();
    OK(AM_Terminate());
    end("all", "");
}
