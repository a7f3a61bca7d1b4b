/* Two processes: ping-pong of three sizes, a stream of 64 KiB messages, a sum over both. One line for each. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int rank;
static char *data;

static double ping_pong(int size, int rounds) {
    double began = 0;
    for (int round = -rounds / 10 - 10; round < rounds; round++) {
        if (round == 0) {
            began = MPI_Wtime();
        }
        for (int turn = 0; turn < 2; turn++) {
            if (rank == turn) {
                MPI_Send(data, size, MPI_CHAR, 1 - rank, 0, MPI_COMM_WORLD);
            } else {
                MPI_Recv(data, size, MPI_CHAR, 1 - rank, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
            }
        }
    }
    return (MPI_Wtime() - began) / rounds / 2 * 1e6;
}

static double stream(int size, int count) {
    double began = MPI_Wtime();
    for (int sent = 0; sent < count; sent++) {
        if (rank == 0) {
            MPI_Send(data, size, MPI_CHAR, 1, 0, MPI_COMM_WORLD);
        } else {
            MPI_Recv(data, size, MPI_CHAR, 0, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        }
    }
    MPI_Barrier(MPI_COMM_WORLD);
    return (double)size * count / (MPI_Wtime() - began);
}

static double all_reduce(int rounds) {
    double mine = rank + 1, sum = 0;
    double began = MPI_Wtime();
    for (int round = 0; round < rounds; round++) {
        MPI_Allreduce(&mine, &sum, 1, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
        if (sum != 3) {
            fprintf(stderr, "1 + 2 is not %g\n", sum);
            MPI_Abort(MPI_COMM_WORLD, 1);
        }
    }
    return (MPI_Wtime() - began) / rounds * 1e6;
}

int main(int argc, char **argv) {
    int size;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    data = calloc(1, 1 << 20);
    if (size != 2 || data == NULL) {
        fprintf(stderr, "two processes, and a megabyte for each\n");
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
    double one = ping_pong(1, 20000), some = ping_pong(16 << 10, 10000), large = ping_pong(1 << 20, 500);
    double rate = stream(64 << 10, 20000), reduce = all_reduce(20000);
    if (rank == 0) {
        printf("1 B: %g us\n16 KiB: %g us\n1 MiB: %g us\n64 KiB: %g B/s\nallreduce: %g us\n", one, some, large, rate, reduce);
    }
    MPI_Finalize();
}
