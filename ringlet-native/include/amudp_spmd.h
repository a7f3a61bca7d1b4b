/* amudp_spmd.h: for programs that were written for AMUDP. Everything is in am.h. */
#include "am.h"
