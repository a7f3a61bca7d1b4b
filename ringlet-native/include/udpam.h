/* udpam.h: for programs that were written for the Berkeley NOW's Active Messages over UDP, which include it before am.h. Everything is there. */
#ifndef RINGLET_UDPAM
#define RINGLET_UDPAM 1
#ifdef RINGLET_AM_H
#error "udpam.h is to be included before am.h"
#endif
#include "am.h"

/* Its names of limits */
#define AM_MIN_NUMBER_OF_HANDLERS AMUDP_MAX_NUMHANDLERS
#define AM_MIN_NUMBER_OF_TRANSLATIONS AMUDP_INIT_NUMTRANSLATIONS
#define UDPAM_MAX_NUMBER_OF_HANDLERS AMUDP_MAX_NUMHANDLERS
#define UDPAM_MAX_NUMBER_OF_TRANSLATIONS AMUDP_MAX_NUMTRANSLATIONS
#define UDPAM_MAX_SHORT AMUDP_MAX_SHORT
#define UDPAM_MAX_MEDIUM AMUDP_MAX_MEDIUM
#define UDPAM_MAX_LONG AMUDP_MAX_LONG
#define AM_ERR_NOT_TERM 6 /* nothing gives it */

#endif
