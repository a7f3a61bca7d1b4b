/* Two PVM tasks: one asks, one answers. They find each other by a mailbox of the virtual machine's.
 *
 *     pvm ask|answer [direct|daemon [ROUNDS]]          messages on a direct route, or through the daemons; ROUNDS of the smallest, by default 30000,
 *                                                      and fewer of the others; 0: of the smallest only, until the asker's standard input ends
 *     pvm ask|answer|alone molecules [direct|daemon]   the same work by two tasks or by one
 */
#include <math.h>
#include <poll.h>
#include <pvm3.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { TAG = 1, LAST = 2, SMALLEST = 32, LARGEST = 64 << 10, SIDE = 256, LOOKS = 3000, LOOK_AGAIN_US = 10000 };
enum { MOLECULES = 128, STEPS = 20000 };

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

/* Of the smallest, until the asker's standard input ends. */
static void endless(void) {
    for (int round = 0, over = 0; !over; round++) {
        if (asks) {
            struct pollfd input = {.fd = STDIN_FILENO, .events = POLLIN};
            over = round % 64 == 63 && poll(&input, 1, 0) > 0;
            check(pvm_initsend(PvmDataRaw), "pvm_initsend");
            check(pvm_pkbyte(data, SMALLEST, 1), "pvm_pkbyte");
            check(pvm_send(other, over ? LAST : TAG), "pvm_send");
            hear(SMALLEST);
        } else {
            int tag, got = pvm_recv(other, -1);
            check(got, "pvm_recv");
            check(pvm_bufinfo(got, NULL, &tag, NULL), "pvm_bufinfo");
            check(pvm_upkbyte(data, SMALLEST, 1), "pvm_upkbyte");
            tell(SMALLEST);
            over = tag == LAST;
        }
    }
}

static double place[MOLECULES][3], speed[MOLECULES][3];

static void move(int from, int to) {
    double force[MOLECULES][3];
    for (int one = from; one < to; one++) {
        for (int axis = 0; axis < 3; axis++) {
            force[one][axis] = 0;
        }
        for (int two = 0; two < MOLECULES; two++) {
            double apart[3], square = 0;
            for (int axis = 0; axis < 3; axis++) {
                apart[axis] = place[one][axis] - place[two][axis];
                square += apart[axis] * apart[axis];
            }
            double near = one == two ? 0 : 1 / square, sixth = near * near * near;
            for (int axis = 0; axis < 3; axis++) {
                force[one][axis] += (48 * sixth - 24) * sixth * near * apart[axis];
            }
        }
    }
    for (int one = from; one < to; one++) {
        for (int axis = 0; axis < 3; axis++) {
            speed[one][axis] += force[one][axis] * 1e-4;
            place[one][axis] += speed[one][axis] * 1e-4;
        }
    }
}

/* Molecules that attract and repel each other. Each task moves its half of them, and is told of the other half behind each step: the numbers come
 * out the same to the last digit as those of one task. */
static void molecules(int alone) {
    enum { HALF = MOLECULES / 2 };
    int mine = asks || alone ? 0 : HALF, others = HALF - mine;
    for (int one = 0; one < MOLECULES; one++) {
        place[one][0] = one % 5 * 1.2, place[one][1] = one / 5 % 5 * 1.2, place[one][2] = one / 25 * 1.2;
    }
    struct timespec began;
    clock_gettime(CLOCK_MONOTONIC, &began);
    for (int step = 0; step < STEPS; step++) {
        move(mine, alone ? MOLECULES : mine + HALF);
        if (!alone) {
            check(pvm_initsend(PvmDataRaw), "pvm_initsend");
            check(pvm_pkdouble(place[mine], HALF * 3, 1), "pvm_pkdouble");
            check(pvm_send(other, TAG), "pvm_send");
            check(pvm_recv(other, TAG), "pvm_recv");
            check(pvm_upkdouble(place[others], HALF * 3, 1), "pvm_upkdouble");
        }
    }
    double took = since(began), sum = 0;
    for (int one = 0; one < MOLECULES; one++) {
        sum += sqrt(place[one][0] * place[one][0] + place[one][1] * place[one][1] + place[one][2] * place[one][2]);
    }
    if (asks || alone) {
        printf("molecules: %.6f s, %.17g\n", took, sum);
    }
}

static void meet(void) {
    int me = pvm_mytid(), found = -1;
    check(me, "pvm_mytid");
    check(pvm_initsend(PvmDataRaw), "pvm_initsend");
    check(pvm_pkint(&me, 1, 1), "pvm_pkint");
    check(pvm_putinfo(asks ? "asks" : "answers", pvm_getsbuf(), PvmMboxDefault), "pvm_putinfo");
    for (int look = 0; look < LOOKS && found < 0; look++) {
        usleep(LOOK_AGAIN_US);
        found = pvm_recvinfo(asks ? "answers" : "asks", 0, PvmMboxDefault);
    }
    check(found, "pvm_recvinfo");
    check(pvm_upkint(&other, 1, 1), "pvm_upkint");
    /* PVM makes a direct route at the first message. What is sent meanwhile goes by the daemon, and may be overtaken by what is sent next, on the
     * kernel too: so one message at a time until there is a route. */
    for (int trip = 0; trip < 2; trip++) {
        if (asks) {
            tell(1);
            hear(1);
        } else {
            hear(1);
            tell(1);
        }
    }
}

static void messages(int rounds) {
    double small = rate(SMALLEST, rounds), middle = rate(8 << 10, rounds / 2), large = rate(LARGEST, rounds / 6);
    double one_way = bulk(rounds / 3), multiplied = products(rounds / 100);
    if (asks) {
        printf("32 B: %.1f\n8 KiB: %.1f\n64 KiB: %.1f\nbulk: %.1f\nproducts: %.1f\n", small, middle, large, one_way, multiplied);
    }
}

int main(int argc, char **argv) {
    if (argc < 2) {
        fprintf(stderr, "usage: pvm ask|answer|alone [molecules] [direct|daemon [ROUNDS]]\n");
        return 2;
    }
    int alone = strcmp(argv[1], "alone") == 0, moves = argc > 2 && strcmp(argv[2], "molecules") == 0;
    char **more = argv + 2 + moves;
    asks = strcmp(argv[1], "ask") == 0;
    int by_daemon = more[0] && strcmp(more[0], "daemon") == 0, rounds = more[0] && more[1] ? atoi(more[1]) : 30000;
    if (!alone) {
        check(pvm_setopt(PvmRoute, by_daemon ? PvmDontRoute : PvmRouteDirect), "pvm_setopt");
        meet();
    }
    if (moves) {
        molecules(alone);
    } else if (rounds == 0) {
        endless();
    } else {
        messages(rounds);
    }
    pvm_exit();
    return 0;
}
