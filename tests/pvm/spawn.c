/* Starts so many tasks of a program on a virtual machine, and shows what they print until all have ended.
 *
 *     spawn COUNT PROGRAM [ARGUMENT...]
 */
#include <stdio.h>

/* (Declared by pvm3.h behind <stdio.h> only.) */
#include <pvm3.h>
#include <stdlib.h>

enum { MOST = 64 };

int main(int argc, char **argv) {
    int tids[MOST], count = argc > 2 ? atoi(argv[1]) : 0;
    if (count < 1 || count > MOST) {
        fprintf(stderr, "usage: spawn COUNT PROGRAM [ARGUMENT...]\n");
        return 2;
    }
    pvm_catchout(stdout);
    int started = pvm_spawn(argv[2], argv + 3, PvmTaskDefault, "", count, tids);
    if (started != count) {
        fprintf(stderr, "%d of %d have started\n", started, count);
    }
    /* (It waits for the ends of all whose output it shows.) */
    pvm_exit();
    return started != count;
}
