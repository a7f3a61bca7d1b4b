/* amudp_const.h: the constants of am.h, without its types and functions.
 *
 * GASNet's programs see this one.
 */
#ifndef RINGLET_AMUDP_CONST_H
#define RINGLET_AMUDP_CONST_H

#ifndef AMUDP
#define AMUDP 1
#endif

/* The version of AMUDP whose interface this is */
#define AMUDP_LIBRARY_VERSION_MAJOR 3
#define AMUDP_LIBRARY_VERSION_MINOR 21
#define AMUDP_LIBRARY_VERSION AMUDP_LIBRARY_VERSION_MAJOR.AMUDP_LIBRARY_VERSION_MINOR
#define AMUDP_LIBRARY_VERSION_STR "3.21"

#ifndef AMX_STRINGIFY
#define RINGLET_AMX_STRING(x) #x
#define AMX_STRINGIFY(x) RINGLET_AMX_STRING(x)
#endif
#ifndef AMX_CONCAT
#define RINGLET_AMX_PASTE(a, b) a##b
#define AMX_CONCAT(a, b) RINGLET_AMX_PASTE(a, b)
#endif

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

/* What a message was that came back */
#define AM_REQUEST_M 1
#define AM_REQUEST_IM 2
#define AM_REQUEST_XFER_M 3
#define AM_REPLY_M 4
#define AM_REPLY_IM 5
#define AM_REPLY_XFER_M 6
#define AM_GET_XFER_M 7

/* Sizes */
#define AMUDP_MAX_SHORT 16
#define AMUDP_MAX_MEDIUM 65536
#define AMUDP_MAX_LONG 65536
#define AMUDP_MAX_NUMHANDLERS 256
#define AMUDP_INIT_NUMTRANSLATIONS 256
#define AMUDP_MAX_NUMTRANSLATIONS (1U << 20)
#define AMUDP_MAX_SEGLENGTH ((uintptr_t)-1)
#define AMUDP_MAX_BUNDLES 255
#define AMUDP_MAX_NETWORKDEPTH 64 /* requests to one peer that may be under way: always as many */
#define AMUDP_MAX_RECVDEPTH 65534
#define AMUDP_MAX_SPMDPROCS AMUDP_MAX_NUMTRANSLATIONS
#define AM_MaxShort() AMUDP_MAX_SHORT
#define AM_MaxMedium() AMUDP_MAX_MEDIUM
#define AM_MaxLong() AMUDP_MAX_LONG
#define AM_MaxNumHandlers() AMUDP_MAX_NUMHANDLERS

/* Messages are counted, their times are not taken. */
#define AMUDP_COLLECT_STATS 1
#define AMUDP_COLLECT_LATENCY_STATS 0

#endif
