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

enum { TAG = 1, LARGEST = 64 << 10, SIDE = 256, LOOKS = 3000, LOOK_AGAIN_US = 10000 };

static char data[LARGEST];
static double left[SIDE][SIDE], right[SIDE][SIDE], product[SIDE][SIDE];
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

static double since(struct timespec began) {
    struct timespec ended;
    clock_gettime(CLOCK_MONOTONIC, &ended);
    return ended.tv_sec - began.tv_sec + (ended.tv_nsec - began.tv_nsec) / 1e9;
}

static double rate(int bytes, int rounds) {
    struct timespec began = {0};
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
    return rounds / since(began);
}

/* Messages one way, of which the last is answered. */
static double bulk(int messages) {
    struct timespec began;
    clock_gettime(CLOCK_MONOTONIC, &began);
    for (int message = 0; message < messages; message++) {
        asks ? tell(LARGEST) : hear(LARGEST);
    }
    asks ? hear(1) : tell(1);
    return messages / since(began);
}

static void multiply(int from, int to) {
    for (int row = from; row < to; row++) {
        for (int column = 0; column < SIDE; column++) {
            product[row][column] = 0;
        }
        for (int at = 0; at < SIDE; at++) {
            for (int column = 0; column < SIDE; column++) {
                product[row][column] += left[row][at] * right[at][column];
            }
        }
    }
}

/* A product of two matrices, of which each task has the half. */
static double products(int rounds) {
    enum { HALF = SIDE / 2 };
    struct timespec began;
    clock_gettime(CLOCK_MONOTONIC, &began);
    for (int round = 0; round < rounds; round++) {
        if (asks) {
            check(pvm_initsend(PvmDataRaw), "pvm_initsend");
            check(pvm_pkdouble(left[HALF], HALF * SIDE, 1), "pvm_pkdouble");
            check(pvm_pkdouble(right[0], SIDE * SIDE, 1), "pvm_pkdouble");
            check(pvm_send(other, TAG), "pvm_send");
            multiply(0, HALF);
            check(pvm_recv(other, TAG), "pvm_recv");
            check(pvm_upkdouble(product[HALF], HALF * SIDE, 1), "pvm_upkdouble");
        } else {
            check(pvm_recv(other, TAG), "pvm_recv");
            check(pvm_upkdouble(left[HALF], HALF * SIDE, 1), "pvm_upkdouble");
            check(pvm_upkdouble(right[0], SIDE * SIDE, 1), "pvm_upkdouble");
            multiply(HALF, SIDE);
            check(pvm_initsend(PvmDataRaw), "pvm_initsend");
            check(pvm_pkdouble(product[HALF], HALF * SIDE, 1), "pvm_pkdouble");
            check(pvm_send(other, TAG), "pvm_send");
        }
    }
    return rounds / since(began);
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
    double small = rate(32, 30000), middle = rate(8 << 10, 15000), large = rate(LARGEST, 5000);
    double one_way = bulk(10000), multiplied = products(300);
    if (asks) {
        printf("32 B: %.1f\n8 KiB: %.1f\n64 KiB: %.1f\nbulk: %.1f\nproducts: %.1f\n", small, middle, large, one_way, multiplied);
    }
    pvm_exit();
}
