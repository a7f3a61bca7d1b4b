/* am.h: Active Messages 2.0 over ringlet.
 *
 * Programs written for the Berkeley NOW's am.h or for AMUDP compile with this header and are linked with -lringlet. Where the two
 * spell a call differently, the number or the type of the arguments tells which one is meant. SPMD programs are started by
 * `ringlet am-run`. See am(3).
 */
#ifndef RINGLET_AM_H
#define RINGLET_AM_H

#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Types */
typedef struct ringlet_am_endpoint *ep_t; /* endpoint */
typedef ep_t ea_t;
typedef struct ringlet_am_bundle *eb_t; /* bundle of endpoints */
typedef struct { uint64_t opaque[4]; } en_t; /* name of an endpoint: copy it to other processes as you like */
typedef uint64_t tag_t;
typedef uint8_t handler_t;
typedef int op_t;

/* Handlers. The token is good while the handler runs.
 *   short          void f(void *token, int32_t a0, ...)
 *   medium, bulk   void f(void *token, void *bytes, size_t nbytes, int32_t a0, ...)
 *   error, index 0 void f(int status, op_t opcode, void *argblock)    argblock: struct am_argblock */
typedef void (*am_handler_fn_t)(void);

struct am_argblock {
    en_t name;     /* whom the message was for; all zero when its translation was not mapped */
    tag_t tag;
    handler_t handler;
    uint8_t numargs;
    int32_t args[16];
    size_t nbytes;
    uintptr_t dest_offset; /* of a bulk message */
};

#define AM_SEQ 0
#define AM_PAR 1

#define AM_NONE ((tag_t)0)
#define AM_ALL (~(tag_t)0)

/* Events */
#define AM_NOEVENTS 0
#define AM_NOTEMPTY 1
#define AM_EMPTYTONOT AM_NOTEMPTY
#define AM_MSGRECEIVED 2
#define AM_CANSEND 4

/* Results */
#define AM_OK 0
#define AM_ERR_NOT_INIT 1
#define AM_ERR_BAD_ARG 2
#define AM_ERR_RESOURCE 3
#define AM_ERR_NOT_SENT 4
#define AM_ERR_IN_USE 5

/* Status of a message that came back */
#define EBADARGS 1
#define EBADENTRY 2
#define EBADTAG 3
#define EBADHANDLER 4
#define EBADSEGOFF 5
#define EBADLENGTH 6
#define EBADENDPOINT 7
#define ECONGESTION 8
#define EUNREACHABLE 9
#define EREPLYREJECTED 10

/* And what it was */
#define AM_REQUEST_M 1
#define AM_REQUEST_IM 2
#define AM_REQUEST_XFER_M 3
#define AM_REPLY_M 4
#define AM_REPLY_IM 5
#define AM_REPLY_XFER_M 6

/* Sizes */
#define AM_MaxShort() 16
#define AM_MaxMedium() 65536
#define AM_MaxLong() 65536
#define AM_MaxNumHandlers() 256
int AM_MaxNumTranslations(int *n);
int AM_MaxSegLength(uintptr_t *nbytes);

/* Life */
int AM_Init(void);
int AM_Terminate(void);

/* Bundles */
int AM_AllocateBundle(int type, eb_t *eb);
int AM_FreeBundle(eb_t eb);
int AM_GetEventMask(eb_t eb, int *mask);
int AM_SetEventMask(eb_t eb, int mask);
int AM_WaitSema(eb_t eb);
int AM_Poll(eb_t eb);
int AM_MoveEndpoint(ea_t ea, eb_t from, eb_t to);
#define AM_Wait(eb) AM_WaitSema(eb)

/* Endpoints */
int AM_AllocateEndpoint(eb_t eb, ea_t *ea, en_t *name);
int AM_FreeEndpoint(ea_t ea);
int AM_GetEndpointName(ea_t ea, en_t *name);
int AM_SetExpectedResources(ea_t ea, int n_endpoints, int n_outstanding);
int AM_SetTag(ea_t ea, tag_t tag);
int AM_GetTag(ea_t ea, tag_t *tag);
int AM_SetSeg(ea_t ea, void *addr, uintptr_t nbytes);
int AM_GetSeg(ea_t ea, void **addr, uintptr_t *nbytes);
/* A segment into which peers that know the tag store by themselves, with one copy; theirs to write until another one is set. */
int AMX_AllocateSeg(ea_t ea, uintptr_t nbytes, void **addr);

/* Endpoints of other containers and other hosts, where `ringlet node` runs. One that is offered as ":orders" on the node b is found as
 * "b:orders" (of this host: "localhost:orders"), waiting for it for timeout_ms (negative: for ever; AM_ERR_NOT_SENT after that). Who may find it
 * is for the service's policy to say, and for the tag. The name is good for this endpoint alone, until the two are apart; who is found learns
 * this one's by AM_GetSourceEndpoint. Bulk bytes go in the messages. An offer stands until the endpoint is freed; AM_ERR_IN_USE if this user
 * has one of that name already. Where it is AM_ERR_RESOURCE errno says more: EHOSTUNREACH (no node service, or no such node), EACCES (its
 * policy), EPROTOTYPE (no endpoint). */
int AMX_Offer(ea_t ea, const char *name);
int AMX_Find(ea_t ea, const char *name, en_t *found, int timeout_ms);

/* Translation table */
int AM_Map(ea_t ea, int index, en_t name, tag_t tag);
int AM_MapAny(ea_t ea, int *index, en_t name, tag_t tag);
int AM_UnMap(ea_t ea, int index);
#define AM_Unmap(ea, index) AM_UnMap((ea), (index))
int AM_GetTranslationName(ea_t ea, int index, en_t *name);
int AM_GetTranslationTag(ea_t ea, int index, tag_t *tag);
int AM_GetTranslationInuse(ea_t ea, int index); /* AM_OK or AM_ERR_RESOURCE */
int AM_GetNumTranslations(ea_t ea, int *n);
int AM_SetNumTranslations(ea_t ea, int n);

/* Handler table */
int ringlet_am_set_handler(ea_t ea, handler_t handler, am_handler_fn_t fn);
int ringlet_am_set_handler_any(ea_t ea, handler_t *handler, am_handler_fn_t fn);
#define AM_SetHandler(ea, handler, fn) ringlet_am_set_handler((ea), (handler), (am_handler_fn_t)(fn))
#define AM_SetHandlerAny(ea, handler, fn) ringlet_am_set_handler_any((ea), (handler), (am_handler_fn_t)(fn))
int AM_GetNumHandlers(ea_t ea, int *n);
int AM_SetNumHandlers(ea_t ea, int n);

/* Inside a handler */
int AM_GetSourceEndpoint(void *token, en_t *name);
int AM_GetDestEndpoint(void *token, ea_t *ea);
int AM_GetMsgTag(void *token, tag_t *tag);

/* The Berkeley NOW's spellings: AM_GetEventMask(eb) returns the mask, AM_AllocateEndpoint(eb, &ea) makes no name. */
static inline int ringlet_am_event_mask(eb_t eb)
{
    int mask = 0;
    AM_GetEventMask(eb, &mask);
    return mask;
}
static inline int ringlet_am_allocate(eb_t eb, ea_t *ea)
{
    en_t name;
    return AM_AllocateEndpoint(eb, ea, &name);
}
#define RINGLET_AM_3(a, b, c, chosen, ...) chosen
#define AM_GetEventMask(...) RINGLET_AM_3(__VA_ARGS__, , AM_GetEventMask, ringlet_am_event_mask, )(__VA_ARGS__)
#define AM_AllocateEndpoint(...) RINGLET_AM_3(__VA_ARGS__, AM_AllocateEndpoint, ringlet_am_allocate, , )(__VA_ARGS__)

#if !defined __cplusplus && defined __STDC_VERSION__ && __STDC_VERSION__ >= 201112L
/* And lengths that are ints. */
static inline int ringlet_am_seg_int(ea_t ea, void *addr, int *nbytes)
{
    uintptr_t n = 0;
    int result = AM_GetSeg(ea, (void **)addr, &n);
    if (result == AM_OK)
        *nbytes = n > INT32_MAX ? INT32_MAX : (int)n;
    return result;
}
static inline int ringlet_am_max_seg_int(int *nbytes)
{
    uintptr_t n = 0;
    int result = AM_MaxSegLength(&n);
    *nbytes = n > INT32_MAX ? INT32_MAX : (int)n;
    return result;
}
#define AM_GetSeg(ea, addr, nbytes) _Generic((nbytes), int *: ringlet_am_seg_int, default: AM_GetSeg)(ea, (void *)(addr), (void *)(nbytes))
#define AM_MaxSegLength(nbytes) _Generic((nbytes), int *: ringlet_am_max_seg_int, default: AM_MaxSegLength)((void *)(nbytes))
#endif

/* Requests and replies. M is the number of arguments, 0 to 16:
 *   AM_RequestM(ea, dest, handler, a0...)
 *   AM_RequestIM(ea, dest, handler, bytes, nbytes, a0...)
 *   AM_RequestXferM(ea, dest, dest_offset, handler, bytes, nbytes, a0...)
 *   AM_RequestXferAsyncM: the same, AM_ERR_NOT_SENT instead of waiting
 *   AM_ReplyM(token, handler, a0...)
 *   AM_ReplyIM(token, handler, bytes, nbytes, a0...)
 *   AM_ReplyXferM(token, dest_offset, handler, bytes, nbytes, a0...) */
int ringlet_am_request(ea_t ea, int dest, handler_t handler, int numargs, const int32_t *args);
int ringlet_am_request_medium(ea_t ea, int dest, handler_t handler, const void *bytes, size_t nbytes,
                              int numargs, const int32_t *args);
int ringlet_am_request_bulk(ea_t ea, int dest, handler_t handler, const void *bytes, size_t nbytes,
                            uintptr_t dest_offset, int async, int numargs, const int32_t *args);
int ringlet_am_reply(void *token, handler_t handler, int numargs, const int32_t *args);
int ringlet_am_reply_medium(void *token, handler_t handler, const void *bytes, size_t nbytes,
                            int numargs, const int32_t *args);
int ringlet_am_reply_bulk(void *token, handler_t handler, const void *bytes, size_t nbytes,
                          uintptr_t dest_offset, int numargs, const int32_t *args);

#define RINGLET_AM_CALLS(M, PARAMETERS, ...) \
    static inline int AM_Request##M(ea_t ea, int dest, handler_t handler PARAMETERS) \
    { \
        const int32_t args[] = {__VA_ARGS__}; \
        return ringlet_am_request(ea, dest, handler, M, args); \
    } \
    static inline int AM_RequestI##M(ea_t ea, int dest, handler_t handler, const void *bytes, size_t nbytes PARAMETERS) \
    { \
        const int32_t args[] = {__VA_ARGS__}; \
        return ringlet_am_request_medium(ea, dest, handler, bytes, nbytes, M, args); \
    } \
    static inline int AM_RequestXfer##M(ea_t ea, int dest, uintptr_t offset, handler_t handler, \
                                        const void *bytes, size_t nbytes PARAMETERS) \
    { \
        const int32_t args[] = {__VA_ARGS__}; \
        return ringlet_am_request_bulk(ea, dest, handler, bytes, nbytes, offset, 0, M, args); \
    } \
    static inline int AM_RequestXferAsync##M(ea_t ea, int dest, uintptr_t offset, handler_t handler, \
                                             const void *bytes, size_t nbytes PARAMETERS) \
    { \
        const int32_t args[] = {__VA_ARGS__}; \
        return ringlet_am_request_bulk(ea, dest, handler, bytes, nbytes, offset, 1, M, args); \
    } \
    static inline int AM_Reply##M(void *token, handler_t handler PARAMETERS) \
    { \
        const int32_t args[] = {__VA_ARGS__}; \
        return ringlet_am_reply(token, handler, M, args); \
    } \
    static inline int AM_ReplyI##M(void *token, handler_t handler, const void *bytes, size_t nbytes PARAMETERS) \
    { \
        const int32_t args[] = {__VA_ARGS__}; \
        return ringlet_am_reply_medium(token, handler, bytes, nbytes, M, args); \
    } \
    static inline int AM_ReplyXfer##M(void *token, uintptr_t offset, handler_t handler, \
                                      const void *bytes, size_t nbytes PARAMETERS) \
    { \
        const int32_t args[] = {__VA_ARGS__}; \
        return ringlet_am_reply_bulk(token, handler, bytes, nbytes, offset, M, args); \
    }

#define RINGLET_AM_P0
#define RINGLET_AM_P1 , int32_t a0
#define RINGLET_AM_P2 RINGLET_AM_P1, int32_t a1
#define RINGLET_AM_P3 RINGLET_AM_P2, int32_t a2
#define RINGLET_AM_P4 RINGLET_AM_P3, int32_t a3
#define RINGLET_AM_P5 RINGLET_AM_P4, int32_t a4
#define RINGLET_AM_P6 RINGLET_AM_P5, int32_t a5
#define RINGLET_AM_P7 RINGLET_AM_P6, int32_t a6
#define RINGLET_AM_P8 RINGLET_AM_P7, int32_t a7
#define RINGLET_AM_P9 RINGLET_AM_P8, int32_t a8
#define RINGLET_AM_P10 RINGLET_AM_P9, int32_t a9
#define RINGLET_AM_P11 RINGLET_AM_P10, int32_t a10
#define RINGLET_AM_P12 RINGLET_AM_P11, int32_t a11
#define RINGLET_AM_P13 RINGLET_AM_P12, int32_t a12
#define RINGLET_AM_P14 RINGLET_AM_P13, int32_t a13
#define RINGLET_AM_P15 RINGLET_AM_P14, int32_t a14
#define RINGLET_AM_P16 RINGLET_AM_P15, int32_t a15
RINGLET_AM_CALLS(0, RINGLET_AM_P0, 0)
RINGLET_AM_CALLS(1, RINGLET_AM_P1, a0)
RINGLET_AM_CALLS(2, RINGLET_AM_P2, a0, a1)
RINGLET_AM_CALLS(3, RINGLET_AM_P3, a0, a1, a2)
RINGLET_AM_CALLS(4, RINGLET_AM_P4, a0, a1, a2, a3)
RINGLET_AM_CALLS(5, RINGLET_AM_P5, a0, a1, a2, a3, a4)
RINGLET_AM_CALLS(6, RINGLET_AM_P6, a0, a1, a2, a3, a4, a5)
RINGLET_AM_CALLS(7, RINGLET_AM_P7, a0, a1, a2, a3, a4, a5, a6)
RINGLET_AM_CALLS(8, RINGLET_AM_P8, a0, a1, a2, a3, a4, a5, a6, a7)
RINGLET_AM_CALLS(9, RINGLET_AM_P9, a0, a1, a2, a3, a4, a5, a6, a7, a8)
RINGLET_AM_CALLS(10, RINGLET_AM_P10, a0, a1, a2, a3, a4, a5, a6, a7, a8, a9)
RINGLET_AM_CALLS(11, RINGLET_AM_P11, a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, a10)
RINGLET_AM_CALLS(12, RINGLET_AM_P12, a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, a10, a11)
RINGLET_AM_CALLS(13, RINGLET_AM_P13, a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, a10, a11, a12)
RINGLET_AM_CALLS(14, RINGLET_AM_P14, a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, a10, a11, a12, a13)
RINGLET_AM_CALLS(15, RINGLET_AM_P15, a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, a10, a11, a12, a13, a14)
RINGLET_AM_CALLS(16, RINGLET_AM_P16, a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, a10, a11, a12, a13, a14, a15)
#undef RINGLET_AM_P0
#undef RINGLET_AM_P1
#undef RINGLET_AM_P2
#undef RINGLET_AM_P3
#undef RINGLET_AM_P4
#undef RINGLET_AM_P5
#undef RINGLET_AM_P6
#undef RINGLET_AM_P7
#undef RINGLET_AM_P8
#undef RINGLET_AM_P9
#undef RINGLET_AM_P10
#undef RINGLET_AM_P11
#undef RINGLET_AM_P12
#undef RINGLET_AM_P13
#undef RINGLET_AM_P14
#undef RINGLET_AM_P15
#undef RINGLET_AM_P16
#undef RINGLET_AM_CALLS

/* Older names of the medium and bulk calls */
#define AM_RequestMedium4 AM_RequestI4
#define AM_RequestMedium8 AM_RequestI8
#define AM_RequestLong4 AM_RequestXfer4
#define AM_RequestLong8 AM_RequestXfer8
#define AM_RequestLongAsync4 AM_RequestXferAsync4
#define AM_RequestLongAsync8 AM_RequestXferAsync8
#define AM_ReplyMedium4 AM_ReplyI4
#define AM_ReplyMedium8 AM_ReplyI8
#define AM_ReplyLong4 AM_ReplyXfer4
#define AM_ReplyLong8 AM_ReplyXfer8

/* Parallel programs, started by `ringlet am-run`; a program that was not is a job of one. */
int AMX_SPMDStartup(int *argc, char ***argv, int depth, uint64_t *networkpid, eb_t *eb, ep_t *ep);
int AMX_SPMDMyProc(void);
int AMX_SPMDNumProcs(void);
int AMX_SPMDBarrier(void); /* polls meanwhile */
int AMX_SPMDAllGather(const void *source, void *dest, size_t nbytes); /* so do this */
int AMX_SPMDSetExitCallback(void (*callback)(int exitcode));
int AMX_SPMDExit(int exitcode); /* ends the whole job unless the code is 0 */
#define AMX_SPMDIsWorker(argv) ((void)(argv), 1)
#define AMX_SPMDgetenvMaster(name) getenv(name)

extern int AMX_VerboseErrors; /* not 0: say on stderr which call failed, and how */

static inline void AMX_FatalErr(const char *format, ...)
{
    va_list list;
    va_start(list, format);
    fputs("*** FATAL ERROR: ", stderr);
    vfprintf(stderr, format, list);
    fputc('\n', stderr);
    va_end(list);
    abort();
}

int AMX_enEqual(en_t one, en_t other);

/* AMUDP's names */
typedef am_handler_fn_t amudp_handler_fn_t;
typedef am_handler_fn_t amx_handler_fn_t;
#define AMUDP_SPMDStartup(argc, argv, nproc, depth, spawn, networkpid, eb, ep) \
    ((void)(nproc), (void)(spawn), AMX_SPMDStartup((argc), (argv), (depth), (networkpid), (eb), (ep)))
#define AMUDP_SPMDMyProc AMX_SPMDMyProc
#define AMUDP_SPMDNumProcs AMX_SPMDNumProcs
#define AMUDP_SPMDBarrier AMX_SPMDBarrier
#define AMUDP_SPMDAllGather AMX_SPMDAllGather
#define AMUDP_SPMDSetExitCallback AMX_SPMDSetExitCallback
#define AMUDP_SPMDExit AMX_SPMDExit
#define AMUDP_SPMDIsWorker AMX_SPMDIsWorker
#define AMUDP_SPMDgetenvMaster AMX_SPMDgetenvMaster
#define AMUDP_VerboseErrors AMX_VerboseErrors
#define AMUDP_FatalErr AMX_FatalErr
#define AMUDP_enEqual AMX_enEqual

#ifdef __cplusplus
}
#endif
#endif
