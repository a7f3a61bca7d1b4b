/* am.h: Active Messages 2.0 over ringlet.
 *
 * Programs written for the Berkeley NOW's am.h (udpam.h first) or for AMUDP compile with this header and are linked with -lringlet. Where the two
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
#include "amudp_const.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Types */
typedef struct ringlet_am_endpoint *ep_t; /* endpoint */
typedef ep_t ea_t;
typedef struct ringlet_am_bundle *eb_t; /* bundle of endpoints */
/* Name of an endpoint: copy it to other processes as you like. No part of it is an address: programs for AMUDP take sin_addr for one, which is the same
 * in all names. */
#ifdef RINGLET_UDPAM
/* Programs for the Berkeley NOW make names of a port and an address (of the network's order), which are for endpoints of AM_AllocateKnownEndpoint. */
typedef struct {
    union {
        uint64_t opaque[3];
        struct {
            unsigned short port;
            unsigned long ip_addr;
        };
    };
    struct { uint32_t s_addr; } sin_addr;
    uint32_t version;
} en_t;
#else
typedef struct { uint64_t opaque[3]; struct { uint32_t s_addr; } sin_addr; uint32_t version; } en_t;
#endif
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

/* Sizes */
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
/* The NOW's later header: the name is made, and is the program's to free. */
int ringlet_am_allocate_named(eb_t eb, ea_t *ea, en_t **name);
#ifdef __cplusplus
extern "C++" {
static inline int ringlet_am_allocate(eb_t eb, ea_t *ea, en_t *name) { return AM_AllocateEndpoint(eb, ea, name); }
static inline int ringlet_am_allocate(eb_t eb, ea_t *ea, en_t **name) { return ringlet_am_allocate_named(eb, ea, name); }
}
#define RINGLET_AM_ALLOCATE ringlet_am_allocate
#elif defined __GNUC__
#define RINGLET_AM_ALLOCATE(eb, ea, name) \
    __builtin_choose_expr(__builtin_types_compatible_p(__typeof__(name), en_t **), ringlet_am_allocate_named, AM_AllocateEndpoint)(eb, ea, (void *)(name))
#else
#define RINGLET_AM_ALLOCATE AM_AllocateEndpoint
#endif
/* The NOW's endpoint that others find by a port: of this host, and where `ringlet node` runs of other hosts that its policy admits. The name is made,
 * as above, and has port and address; null for none. AM_ERR_IN_USE if this user has an endpoint of that port already. */
int ringlet_am_allocate_known(eb_t eb, ea_t *ea, en_t **name, int port);
static inline int ringlet_am_allocate_known_only(eb_t eb, ea_t *ea, int port) { return ringlet_am_allocate_known(eb, ea, NULL, port); }
#define RINGLET_AM_4(a, b, c, d, chosen, ...) chosen
#define AM_AllocateKnownEndpoint(...) \
    RINGLET_AM_4(__VA_ARGS__, ringlet_am_allocate_known, ringlet_am_allocate_known_only, , )(__VA_ARGS__)
#define RINGLET_AM_3(a, b, c, chosen, ...) chosen
#define AM_GetEventMask(...) RINGLET_AM_3(__VA_ARGS__, , AM_GetEventMask, ringlet_am_event_mask, )(__VA_ARGS__)
#define AM_AllocateEndpoint(...) RINGLET_AM_3(__VA_ARGS__, RINGLET_AM_ALLOCATE, ringlet_am_allocate, , )(__VA_ARGS__)

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

/* The NOW's wish for bytes: so many of the peer's segment, from that offset, come to this endpoint's at dest_offset. Then the handler runs here, as
 * that of a bulk reply. */
int ringlet_am_get(ea_t ea, int dest, handler_t handler, uintptr_t source_offset, uintptr_t dest_offset, size_t nbytes, int async, int numargs,
                   const int32_t *args);
#define RINGLET_AM_GETS(M, PARAMETERS, ...) \
    static inline int AM_GetXfer##M(ea_t ea, int dest, uintptr_t source_offset, handler_t handler, uintptr_t dest_offset, \
                                    size_t nbytes PARAMETERS) \
    { \
        const int32_t args[] = {__VA_ARGS__}; \
        return ringlet_am_get(ea, dest, handler, source_offset, dest_offset, nbytes, 0, M, args); \
    } \
    static inline int AM_GetXferAsynch##M(ea_t ea, int dest, uintptr_t source_offset, handler_t handler, uintptr_t dest_offset, \
                                          size_t nbytes PARAMETERS) \
    { \
        const int32_t args[] = {__VA_ARGS__}; \
        return ringlet_am_get(ea, dest, handler, source_offset, dest_offset, nbytes, 1, M, args); \
    }
#define RINGLET_AM_4_PARAMETERS , int32_t a0, int32_t a1, int32_t a2, int32_t a3
#define RINGLET_AM_8_PARAMETERS RINGLET_AM_4_PARAMETERS, int32_t a4, int32_t a5, int32_t a6, int32_t a7
RINGLET_AM_GETS(4, RINGLET_AM_4_PARAMETERS, a0, a1, a2, a3)
RINGLET_AM_GETS(8, RINGLET_AM_8_PARAMETERS, a0, a1, a2, a3, a4, a5, a6, a7)
#undef RINGLET_AM_GETS
#undef RINGLET_AM_4_PARAMETERS
#undef RINGLET_AM_8_PARAMETERS

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

/* AMUDP's calls with the number of arguments as an argument; those that end in VA take a list. */
static inline int ringlet_am_arguments(int numargs, va_list list, int32_t *args)
{
    if (numargs < 0 || numargs > AMUDP_MAX_SHORT)
        return AM_ERR_BAD_ARG;
    for (int at = 0; at < numargs; at++)
        args[at] = va_arg(list, int32_t);
    return AM_OK;
}
#define RINGLET_AM_LIST_CALL(NAME, PARAMETERS, CALL) \
    static inline int NAME##VA(RINGLET_AM_ONLY PARAMETERS, int numargs, va_list list) \
    { \
        int32_t args[AMUDP_MAX_SHORT] = {0}; \
        return ringlet_am_arguments(numargs, list, args) == AM_OK ? CALL : AM_ERR_BAD_ARG; \
    } \
    static inline int NAME(RINGLET_AM_ONLY PARAMETERS, int numargs, ...) \
    { \
        int32_t args[AMUDP_MAX_SHORT] = {0}; \
        va_list list; \
        va_start(list, numargs); \
        int result = ringlet_am_arguments(numargs, list, args); \
        va_end(list); \
        return result == AM_OK ? CALL : result; \
    }
#define RINGLET_AM_ONLY(...) __VA_ARGS__
RINGLET_AM_LIST_CALL(AMUDP_Request, (ea_t ea, uint32_t dest, handler_t handler),
                     ringlet_am_request(ea, (int)dest, handler, numargs, args))
RINGLET_AM_LIST_CALL(AMUDP_RequestI, (ea_t ea, uint32_t dest, handler_t handler, const void *bytes, size_t nbytes),
                     ringlet_am_request_medium(ea, (int)dest, handler, bytes, nbytes, numargs, args))
RINGLET_AM_LIST_CALL(AMUDP_RequestXfer,
                     (ea_t ea, uint32_t dest, handler_t handler, const void *bytes, size_t nbytes, uintptr_t offset, int async),
                     ringlet_am_request_bulk(ea, (int)dest, handler, bytes, nbytes, offset, async, numargs, args))
RINGLET_AM_LIST_CALL(AMUDP_Reply, (void *token, handler_t handler), ringlet_am_reply(token, handler, numargs, args))
RINGLET_AM_LIST_CALL(AMUDP_ReplyI, (void *token, handler_t handler, const void *bytes, size_t nbytes),
                     ringlet_am_reply_medium(token, handler, bytes, nbytes, numargs, args))
RINGLET_AM_LIST_CALL(AMUDP_ReplyXfer, (void *token, handler_t handler, const void *bytes, size_t nbytes, uintptr_t offset),
                     ringlet_am_reply_bulk(token, handler, bytes, nbytes, offset, numargs, args))
#undef RINGLET_AM_LIST_CALL
#undef RINGLET_AM_ONLY

/* Parallel programs, started by `ringlet am-run`. A program that was not, and whose first arguments are no number of processes and no letter of a
 * spawn function (S, L, C), is a job of one; otherwise it becomes the launcher of so many processes, which do not see the two arguments. */
int AMX_SPMDStartup(int *argc, char ***argv, int depth, uint64_t *networkpid, eb_t *eb, ep_t *ep);
int AMX_SPMDIsWorker(char **argv); /* not 0: started by `ringlet am-run` */
int AMX_SPMDMyProc(void);
int AMX_SPMDNumProcs(void);
int AMX_SPMDBarrier(void); /* polls meanwhile */
int AMX_SPMDAllGather(const void *source, void *dest, size_t nbytes); /* so do this */
int AMX_SPMDSetExitCallback(void (*callback)(int exitcode)); /* called where the job ends, in each process */
int AMX_SPMDExit(int exitcode); /* ends the whole job with this code: the others at their next poll or wait */
/* From the environment with which the job was started; null where it is not there, and before AMX_SPMDStartup */
const char *AMX_SPMDgetenvMaster(const char *name);

extern int AMX_VerboseErrors; /* not 0: say on stderr which call failed, and how */
extern int AMX_SilentMode; /* nothing but errors is said anyway */
extern const char *AMX_ProcessLabel; /* for the program's own messages, and AMX_FatalErr's */

#ifdef __GNUC__
__attribute__((__format__(__printf__, 1, 2)))
#endif
static inline void AMX_FatalErr(const char *format, ...)
{
    va_list list;
    va_start(list, format);
    fprintf(stderr, "*** FATAL ERROR%s%s: ", AMX_ProcessLabel ? " of " : "", AMX_ProcessLabel ? AMX_ProcessLabel : "");
    vfprintf(stderr, format, list);
    fputc('\n', stderr);
    va_end(list);
    abort();
}

int AMX_enEqual(en_t one, en_t other);

/* What AMUDP adds */
typedef am_handler_fn_t amudp_handler_fn_t;
typedef am_handler_fn_t amx_handler_fn_t;
typedef uint32_t amudp_node_t;
typedef int amudp_eventmask_t, amudp_bundle_mode_t;
typedef enum { amudp_Short, amudp_Medium, amudp_Long, amudp_NumCategories } amudp_category_t;
typedef amudp_category_t amx_category_t;
#define amx_Short amudp_Short
#define amx_Medium amudp_Medium
#define amx_Long amudp_Long
typedef uint64_t amx_tick_t;

/* What an endpoint has done, by category. Nothing is sent twice or out of order here, and no times are taken: what says so stays as it is at first. */
typedef struct {
    uint64_t RequestsSent[amudp_NumCategories];
    uint64_t RepliesSent[amudp_NumCategories];
    uint64_t RequestsRetransmitted[amudp_NumCategories];
    uint64_t RepliesRetransmitted[amudp_NumCategories];
    uint64_t RepliesSquashed[amudp_NumCategories];
    uint64_t RequestsReceived[amudp_NumCategories];
    uint64_t RepliesReceived[amudp_NumCategories];
    uint64_t ReturnedMessages;
    uint64_t OutOfOrderRequests;
    uint64_t OutOfOrderReplies;
    amx_tick_t RequestMinLatency;
    amx_tick_t RequestMaxLatency;
    amx_tick_t RequestSumLatency;
    uint64_t RequestDataBytesSent[amudp_NumCategories]; /* arguments and payload */
    uint64_t ReplyDataBytesSent[amudp_NumCategories];
    uint64_t RequestTotalBytesSent[amudp_NumCategories]; /* and what goes with them */
    uint64_t ReplyTotalBytesSent[amudp_NumCategories];
    uint64_t TotalBytesSent;
} amudp_stats_t;
typedef amudp_stats_t amx_stats_t;
extern const amudp_stats_t AMUDP_initial_stats;
int AMUDP_GetEndpointStatistics(ep_t ep, amudp_stats_t *stats);
int AMUDP_ResetEndpointStatistics(ep_t ep);
int AMUDP_AggregateStatistics(amudp_stats_t *sum, amudp_stats_t *more);
/* For people: to the FILE (unless null), and returned, good until the next call */
const char *AMUDP_DumpStatistics(void *file, amudp_stats_t *stats, int whole_job);

/* Called before and after each handler of the endpoint; they may not send */
typedef void (*AMUDP_preHandlerCallback_t)(amudp_category_t category, int is_request, int handler, void *token, void *bytes, size_t nbytes,
                                           int numargs, uint32_t *args);
typedef void (*AMUDP_postHandlerCallback_t)(amudp_category_t category, int is_request);
int AMUDP_SetHandlerCallbacks(ep_t ep, AMUDP_preHandlerCallback_t before, AMUDP_postHandlerCallback_t after);

/* Inside a handler: the sender's number in the receiver's translation table (AM_ERR_RESOURCE if it is not there), and what the message is */
int AMUDP_GetSourceId(void *token, int *index);
int AMUDP_GetTokenInfo(void *token, handler_t *handler, amudp_category_t *category, int *is_request);

int AMUDP_SetTranslationTag(ep_t ep, int index, tag_t tag);
extern int AMUDP_PoliteSync; /* waits are polite anyway */
int AMUDP_SetUDPInterface(uint32_t address); /* none is used */

#define AMX_initial_stats AMUDP_initial_stats
#define AMX_GetEndpointStatistics AMUDP_GetEndpointStatistics
#define AMX_ResetEndpointStatistics AMUDP_ResetEndpointStatistics
#define AMX_AggregateStatistics AMUDP_AggregateStatistics
#define AMX_DumpStatistics AMUDP_DumpStatistics
#define AMX_GetSourceId AMUDP_GetSourceId
#define AMX_GetTokenInfo AMUDP_GetTokenInfo
#define AMX_SetTranslationTag AMUDP_SetTranslationTag

/* A spawn function makes the processes of a job from a program that starts as its launcher: it sees to it that somewhere nproc processes execute argv
 * with the variables of extra_env, and returns; 0 if that fails. What it starts here is the launcher's child. A program may have one of its own. */
typedef int (*amudp_spawnfn_t)(int nproc, int argc, char **argv, char **extra_env);
typedef struct {
    char abbrev;
    const char *desc;
    amudp_spawnfn_t fnptr;
} amudp_spawnfn_desc_t;
extern amudp_spawnfn_desc_t const AMUDP_Spawnfn_Desc[]; /* the last one's abbrev is 0 */
int AMUDP_SPMDLocalSpawn(int nproc, int argc, char **argv, char **extra_env);
int AMUDP_SPMDSshSpawn(int nproc, int argc, char **argv, char **extra_env); /* SSH_SERVERS, SSH_CMD, SSH_OPTIONS, SSH_REMOTE_PATH */
int AMUDP_SPMDCustomSpawn(int nproc, int argc, char **argv, char **extra_env); /* CSPAWN_CMD, CSPAWN_SERVERS */

typedef void (*amudp_exitcallback_t)(int exitcode);
/* As AMX_SPMDStartup. nproc 0 and spawnfn null: from the arguments */
int AMUDP_SPMDStartup(int *argc, char ***argv, int nproc, int depth, amudp_spawnfn_t spawnfn, uint64_t *networkpid, eb_t *eb, ep_t *ep);
void AMUDP_SPMDSetProc(int rank); /* AMUDP_SPMDStartup fails if the launcher gives another one */
int AMUDP_SPMDHandleControlTraffic(int *served); /* ends this process if the job has ended, as AM_Poll does */
const char *AMUDP_check_env_prefix(const char *prefix); /* "NAME=VALUE", where AMX_SPMDgetenvMaster looks */
extern void (*AMUDP_SPMDkillmyprocess)(int exitcode); /* what ends this process at last: _exit, or what the program puts there */

/* And its names of the rest */
#define AMX_SPMDkillmyprocess AMUDP_SPMDkillmyprocess
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
