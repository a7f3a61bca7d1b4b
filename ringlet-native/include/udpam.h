/* udpam.h: for programs that were written for the Berkeley NOW's Active Messages over UDP. Everything is in am.h. */
#include "am.h"
