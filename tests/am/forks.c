/* A process of a job forks: the child is none of the job's. With "ends" that says otherwise, and is not heard; with "stays" its parent dies,
 * which the others hear of though the child is still there (until its standard input ends). With "again" the child has files of its own in the place of
 * all that it found, and so have its children. */
#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/wait.h>
#include "check.h"

int main(int argc, char **argv)
{
    start(&argc, &argv);
    CHECK(argc == 2);
    OK(AMX_SPMDBarrier());
    if (!strcmp(argv[1], "ends")) {
        pid_t child = rank ? 0 : fork();
        if (rank == 0 && child == 0) {
            CHECK(AMX_SPMDBarrier() == AM_ERR_RESOURCE);
            AMX_SPMDExit(7);
        }
        int status = 7 << 8;
        if (rank == 0)
            CHECK(waitpid(child, &status, 0) == child);
        CHECK(WEXITSTATUS(status) == 7);
        OK(AMX_SPMDBarrier());
        AMX_SPMDExit(5);
    }
    if (!strcmp(argv[1], "again")) {
        enum { FILES = 1000 };
        struct stat own;
        int status = -1;
        pid_t child = fork();
        if (child == 0) {
            for (int fd = 3; fd < FILES; fd++)
                close(fd);
            for (int fd = 3; fd < FILES; fd++)
                CHECK(open("/dev/zero", O_RDONLY) == fd);
            if ((child = fork()) == 0) {
                for (int fd = 3; fd < FILES; fd++)
                    CHECK(!fstat(fd, &own) && own.st_rdev == makedev(1, 5));
                _exit(0);
            }
            CHECK(waitpid(child, &status, 0) == child);
            _exit(status != 0);
        }
        CHECK(waitpid(child, &status, 0) == child && status == 0);
        OK(AMX_SPMDBarrier());
        return 0;
    }
    if (rank == 0) {
        char byte;
        if (fork() == 0)
            _exit(read(0, &byte, 1) != 0);
        raise(SIGKILL);
    }
    CHECK(AMX_SPMDBarrier() == AM_ERR_RESOURCE);
    printf("%d hears of it\n", rank);
    return 0;
}
