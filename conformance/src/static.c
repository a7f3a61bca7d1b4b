/* A program that loads no library:
 *   static talk FD     sends back what comes, to the end
 *   static serve FD    accepts one connection, and does so there
 *   static call PORT   connects to the local port, sends lines, and compares what comes back */
#include <arpa/inet.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static int talk(int fd)
{
    char buffer[4096];
    ssize_t n;
    while ((n = read(fd, buffer, sizeof buffer)) > 0)
        for (ssize_t done = 0, m; done < n; done += m)
            if ((m = write(fd, buffer + done, n - done)) <= 0)
                return 2;
    return n == 0 ? 0 : 3;
}

static int call(int port)
{
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(port)};
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (connect(fd, (struct sockaddr *)&to, sizeof to) != 0)
        return 4;
    for (int i = 0; i < 500; i++) {
        char line[16], answer[16];
        int len = snprintf(line, sizeof line, "line %d\n", i);
        if (write(fd, line, len) != len || recv(fd, answer, len, MSG_WAITALL) != len || memcmp(line, answer, len) != 0)
            return 5;
    }
    return 0;
}

int main(int count, char **words)
{
    int number = count == 3 ? atoi(words[2]) : -1;
    if (number < 0)
        return 1;
    if (strcmp(words[1], "serve") == 0)
        return talk(accept(number, 0, 0));
    return strcmp(words[1], "call") == 0 ? call(number) : talk(number);
}
