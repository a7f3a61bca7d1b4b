/*
 * Ports of an Ethernet, without a device and without AF_PACKET:
 *
 *     cc port.c -o port $(pkg-config --cflags --libs ringlet)
 *     ringlet eth create blue
 *     ./port sink blue COUNT BYTES &        takes so many frames, and says how many that were a second
 *     ./port generate blue COUNT BYTES      sends them, of so many bytes each, each numbered
 *     ./port answer blue 10.7.0.9           a host of its own: answers who asks for its address, and who pings it
 */
#include <arpa/inet.h>
#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <ringlet.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { BATCH = 64, HEAD = 14, ARP_BYTES = 28, SECONDS = 60 };
static const unsigned char SINK[6] = {2, 0, 0, 0, 0x51, 0x4b}, KIND[2] = {0x88, 0xb5};

static void fail(const char *what)
{
    fprintf(stderr, "%s: %s\n", what, ringlet_port_error());
    exit(1);
}

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + time.tv_nsec / 1e9;
}

static ringlet_port *open_port(const char *network, const unsigned char *address)
{
    struct ringlet_port_options options = {.name = "example"};
    if (address)
        memcpy(options.address, address, 6);
    ringlet_port *port = ringlet_port_open(network, &options);
    if (!port)
        fail("open");
    return port;
}

/* Waits for frames or for room by the descriptor, as a program does that has others, too. */
static void sleep_until_something(ringlet_port_queue *queue)
{
    struct pollfd bell = {.fd = ringlet_port_fd(queue), .events = POLLIN};
    int is_quiet = ringlet_port_arm(queue);
    if (is_quiet < 0)
        fail("arm");
    if (is_quiet && poll(&bell, 1, -1) < 0 && errno != EINTR)
        exit(1);
}

static void generate(const char *network, uint64_t count, size_t bytes)
{
    ringlet_port *port = open_port(network, NULL);
    ringlet_port_queue *queue = ringlet_port_queue_of(port, 0);
    unsigned char own[6];
    ringlet_port_address(port, own);
    for (int tries = 0; ringlet_port_others(port) == 0; tries++) {
        if (tries == SECONDS * 100) {
            fprintf(stderr, "no other port comes\n");
            exit(1);
        }
        nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
    }
    for (uint64_t number = 0; number < count;) {
        unsigned char *frame = ringlet_port_reserve(queue, SINK, bytes);
        if (!frame) {
            /* (Who is there, and not met by this queue yet, is so soon.) */
            if (errno != EAGAIN && errno != ENETDOWN)
                fail("reserve");
            if (ringlet_port_wait(queue, 10) < 0 && errno != ETIMEDOUT)
                fail("wait");
            continue;
        }
        memcpy(frame, SINK, 6);
        memcpy(frame + 6, own, 6);
        memcpy(frame + 12, KIND, 2);
        memcpy(frame + HEAD, &number, sizeof number);
        if (ringlet_port_commit(queue, bytes, NULL) < 0)
            fail("commit");
        number++;
    }
    /* What lies in a queue goes with its sender: until the other one has taken all, and goes. */
    while (ringlet_port_others(port) > 0)
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    ringlet_port_close(port);
}

static void sink(const char *network, uint64_t count, size_t bytes)
{
    ringlet_port *port = open_port(network, SINK);
    ringlet_port_queue *queue = ringlet_port_queue_of(port, 0);
    if (ringlet_port_groups(port, &SINK, 1) == 0 || errno != EINVAL)
        fail("its own address is a group's");
    if (ringlet_port_groups(port, &SINK, 0) != 0) /* (None: what is for all groups of others does not wake it.) */
        fail("groups");
    puts("listening");
    fflush(stdout);
    double began = 0;
    for (uint64_t next = 0; next < count;) {
        struct ringlet_port_frame frames[BATCH];
        int came = ringlet_port_receive(queue, frames, BATCH);
        if (came < 0)
            fail("receive");
        if (came == 0 && ringlet_port_wait(queue, -1) < 0)
            fail("wait");
        for (int i = 0; i < came; i++) {
            uint64_t number;
            if (frames[i].len != bytes || memcmp(frames[i].destination, SINK, 6) != 0)
                continue; /* (A device on the network has things to say, too.) */
            memcpy(&number, (const char *)frames[i].data + HEAD, sizeof number);
            if (number != next++) {
                fprintf(stderr, "frame %" PRIu64 " came for %" PRIu64 "\n", number, next - 1);
                exit(1);
            }
            if (next == 1)
                began = now();
        }
    }
    printf("%.0f frames/s\n", count / (now() - began));
    ringlet_port_close(port);
}

/* The Internet's checksum, of an even number of bytes. */
static uint16_t checksum(const unsigned char *bytes, size_t len)
{
    uint32_t sum = 0;
    for (size_t i = 0; i + 1 < len; i += 2)
        sum += bytes[i] << 8 | bytes[i + 1];
    if (len & 1)
        sum += bytes[len - 1] << 8;
    while (sum >> 16)
        sum = (sum & 0xffff) + (sum >> 16);
    return htons((uint16_t)~sum);
}

/* Turns a question into its answer; 0 if it is none. */
static size_t turn_round(unsigned char *frame, size_t len, const unsigned char own[6], in_addr_t ip)
{
    unsigned char *body = frame + HEAD;
    if (frame[12] == 8 && frame[13] == 6 && len >= HEAD + ARP_BYTES) {
        if (body[7] != 1 || memcmp(body + 24, &ip, 4) != 0)
            return 0;
        body[7] = 2;
        memcpy(body + 18, body + 8, 10);
        memcpy(body + 8, own, 6);
        memcpy(body + 14, &ip, 4);
    } else if (frame[12] == 8 && frame[13] == 0 && len >= HEAD + 28) {
        size_t head = (body[0] & 15) * 4, whole = body[2] << 8 | body[3];
        if (head < 20 || whole < head + 8 || HEAD + whole > len)
            return 0;
        if (body[9] != 1 || memcmp(body + 16, &ip, 4) != 0 || body[head] != 8)
            return 0;
        memcpy(body + 16, body + 12, 4);
        memcpy(body + 12, &ip, 4);
        body[head] = 0;
        memset(body + head + 2, 0, 2);
        uint16_t sum = checksum(body + head, whole - head);
        memcpy(body + head + 2, &sum, 2);
    } else {
        return 0;
    }
    memcpy(frame, frame + 6, 6);
    memcpy(frame + 6, own, 6);
    return len;
}

static void answer(const char *network, const char *address)
{
    ringlet_port *port = open_port(network, NULL);
    ringlet_port_queue *queue = ringlet_port_queue_of(port, 0);
    unsigned char own[6];
    ringlet_port_address(port, own);
    in_addr_t ip = inet_addr(address);
    puts("answering");
    fflush(stdout);
    static unsigned char copy[65536 + HEAD];
    for (;;) {
        struct ringlet_port_frame frames[BATCH];
        int came = ringlet_port_receive(queue, frames, BATCH);
        if (came < 0 && errno == ESHUTDOWN)
            break;
        if (came < 0)
            fail("receive");
        if (came == 0)
            sleep_until_something(queue);
        for (int i = 0; i < came; i++) {
            /* A copy: what is judged must not change meanwhile. */
            size_t len = frames[i].len < sizeof copy ? frames[i].len : sizeof copy;
            memcpy(copy, frames[i].data, len);
            size_t back = turn_round(copy, len, own, ip);
            void *place = back ? ringlet_port_reserve(queue, copy, back) : NULL;
            if (place) {
                memcpy(place, copy, back);
                ringlet_port_commit(queue, back, NULL);
            }
        }
    }
    ringlet_port_close(port);
}

int main(int argc, char **argv)
{
    size_t bytes = argc == 5 ? strtoul(argv[4], NULL, 0) : 0;
    int is_counted = bytes >= HEAD + sizeof(uint64_t);
    if (is_counted && strcmp(argv[1], "generate") == 0)
        generate(argv[2], strtoull(argv[3], NULL, 0), bytes);
    else if (is_counted && strcmp(argv[1], "sink") == 0)
        sink(argv[2], strtoull(argv[3], NULL, 0), bytes);
    else if (argc == 4 && strcmp(argv[1], "answer") == 0)
        answer(argv[2], argv[3]);
    else {
        fprintf(stderr, "usage: port sink|generate NETWORK COUNT BYTES (22 or more) | port answer NETWORK ADDRESS\n");
        return 2;
    }
    return 0;
}
