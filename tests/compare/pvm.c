/* Two PVM tasks on a direct route: one asks, one answers. They find each other by a mailbox of the daemon.
 *
 *     pvm ask | answer
 */
#include <pvm3.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { TAG = 1, LARGEST = 64 << 10, LOOKS = 3000, LOOK_AGAIN_US = 10000 };

static char data[LARGEST];
static int asks, other;

static void check(int result, const char *what) {
    if (result < 0) {
        pvm_perror((char *)what);
        exit(1);
    }
}

static void tell(int bytes) {
    check(pvm_initsend(PvmDataRaw), "pvm_initsend");
    check(pvm_pkbyte(data, bytes, 1), "pvm_pkbyte");
    check(pvm_send(other, TAG), "pvm_send");
}

static void hear(int bytes) {
    check(pvm_recv(other, TAG), "pvm_recv");
    check(pvm_upkbyte(data, bytes, 1), "pvm_upkbyte");
}

static double rate(int bytes, int rounds) {
    struct timespec began = {0}, ended;
    for (int round = -rounds / 10; round < rounds; round++) {
        if (round == 0) {
            clock_gettime(CLOCK_MONOTONIC, &began);
        }
        if (asks) {
            tell(bytes);
            hear(bytes);
        } else {
            hear(bytes);
            tell(bytes);
        }
    }
    clock_gettime(CLOCK_MONOTONIC, &ended);
    return rounds / (ended.tv_sec - began.tv_sec + (ended.tv_nsec - began.tv_nsec) / 1e9);
}

int main(int argc, char **argv) {
    int me = pvm_mytid(), found = -1;
    asks = argc == 2 && strcmp(argv[1], "ask") == 0;
    check(me, "pvm_mytid");
    check(pvm_setopt(PvmRoute, PvmRouteDirect), "pvm_setopt");
    check(pvm_initsend(PvmDataRaw), "pvm_initsend");
    check(pvm_pkint(&me, 1, 1), "pvm_pkint");
    check(pvm_putinfo(asks ? "asks" : "answers", pvm_getsbuf(), PvmMboxDefault), "pvm_putinfo");
    for (int look = 0; look < LOOKS && found < 0; look++) {
        usleep(LOOK_AGAIN_US);
        found = pvm_recvinfo(asks ? "answers" : "asks", 0, PvmMboxDefault);
    }
    check(found, "pvm_recvinfo");
    check(pvm_upkint(&other, 1, 1), "pvm_upkint");
    double small = rate(64, 30000), large = rate(LARGEST, 5000);
    if (asks) {
        printf("64 B: %.1f\n64 KiB: %.1f\n", small, large);
    }
    pvm_exit();
}
