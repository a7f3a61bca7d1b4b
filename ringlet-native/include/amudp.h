/* amudp.h: for programs that were written for AMUDP. Everything is in am.h. */
#include <netinet/in.h>
#include "am.h"
