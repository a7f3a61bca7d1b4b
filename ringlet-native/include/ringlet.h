/*
 * ringlet: channels through shared memory between programs of one machine, and by way of `ringlet node` of a cluster. Manual pages: ringlet_connect(3), ringlet_send(3),
 * ringlet_mailbox(3), ringlet_region(3).
 *
 * A service is opened under a name by one program, others connect to it. Calls that return -1 or NULL set errno. A timeout is in
 * milliseconds: -1 waits for ever, 0 not at all (EAGAIN); when it is over: ETIMEDOUT.
 */
#ifndef RINGLET_H
#define RINGLET_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#ifdef __cplusplus
extern "C" {
#endif

enum ringlet_kind {
    RINGLET_BYTES = 1,    /* a stream of bytes each way */
    RINGLET_MESSAGES = 2, /* a queue of messages each way */
    RINGLET_LOCKED = 3,   /* a buffer each way, for ends that take turns; the connecting end begins */
    RINGLET_MAILBOX = 4,  /* messages of many senders to one receiver */
    RINGLET_REGION = 5    /* memory into which each end stores for the other, with doorbells */
};

enum ringlet_peers {
    RINGLET_SAME_USER = 0, /* processes of our own user, and root's */
    RINGLET_ANY_USER = 1
};

/* Zero stands for the default. The sizes are the service's; kind must agree; the rest is each end's own. */
struct ringlet_options {
    unsigned kind;       /* enum ringlet_kind */
    unsigned peers;      /* enum ringlet_peers */
    size_t slot_count;   /* most messages one way: a power of two from 16 to 65536; default 1024 */
    size_t ring_bytes;   /* bytes one way: a power of two from 4 KiB to 64 MiB; default 1 MiB */
    int spin_us;         /* how long a waiting call watches memory before it sleeps; default 50; -1: it sleeps at once */
};

typedef struct ringlet_listener ringlet_listener;
typedef struct ringlet_channel ringlet_channel;
typedef struct ringlet_mailbox ringlet_mailbox;

/* Opens a service of any kind but a mailbox; takes the next connection to it. */
ringlet_listener *ringlet_listen(const char *name, const struct ringlet_options *options);
ringlet_channel *ringlet_accept(ringlet_listener *listener, int timeout_ms);
int ringlet_listener_fd(const ringlet_listener *listener);
void ringlet_listener_close(ringlet_listener *listener);

/* Connects to a service of any kind, waiting for it to be opened if need be. A mailbox's channel only sends. */
ringlet_channel *ringlet_connect(const char *name, const struct ringlet_options *options, int timeout_ms);
void ringlet_close(ringlet_channel *channel);
/* No more will be sent; what is sent is still received. */
int ringlet_finish(ringlet_channel *channel);

/* Copying. send returns how much was sent: a message as a whole, of a stream what goes at once. receive returns a message's length
   (ENOBUFS and the message stays when the buffer is shorter), or as many bytes of a stream as are there and fit. */
ssize_t ringlet_send(ringlet_channel *channel, const void *data, size_t len, int timeout_ms);
ssize_t ringlet_receive(ringlet_channel *channel, void *buffer, size_t size, int timeout_ms);

/* In place. reserve gives room for len bytes; commit sends the first len of them. peek shows what is next and where; release is
   done with the first len bytes of a stream, or with the message. The other end may change what is peeked at, at any time. */
size_t ringlet_max_bytes(const ringlet_channel *channel);
void *ringlet_reserve(ringlet_channel *channel, size_t len, int timeout_ms);
int ringlet_commit(ringlet_channel *channel, size_t len);
const void *ringlet_peek(ringlet_channel *channel, size_t *len, int timeout_ms);
int ringlet_release(ringlet_channel *channel, size_t len);

/* Driven by descriptors. arm returns 0 when there is something (or room) now, 1 when there is not: then the descriptor becomes
   readable as soon as there is. Only ever wait on the descriptors. */
int ringlet_receive_fd(const ringlet_channel *channel);
int ringlet_send_fd(const ringlet_channel *channel);
int ringlet_arm_receive(ringlet_channel *channel);
int ringlet_arm_send(ringlet_channel *channel);

/* A region: each end stores into the other's part and reads its own, where the other may change anything at any time. put is a checked
   copy (EMSGSIZE beyond the end). Whoever hears a ring sees what was stored before it; stores that are watched for in memory, and the
   loads there, are kept in order by fence. wait returns how often the other end has rung since the last time. check asks whether all
   that was stored reached an end that is there: EPIPE if it has closed, ECONNRESET if it died, EPROTO if it writes nonsense. The
   doorbell's descriptor is ringlet_receive_fd, armed by ringlet_arm_receive. */
void *ringlet_remote(const ringlet_channel *channel, size_t *len);
const void *ringlet_local(const ringlet_channel *channel, size_t *len);
int ringlet_put(const ringlet_channel *channel, size_t at, const void *data, size_t len);
void ringlet_fence(void);
int ringlet_ring(ringlet_channel *channel);
int64_t ringlet_wait(ringlet_channel *channel, int timeout_ms);
int ringlet_check(const ringlet_channel *channel);

/* The receiver of a mailbox. A sender's number is never used for another. */
ringlet_mailbox *ringlet_mailbox_open(const char *name, const struct ringlet_options *options);
ssize_t ringlet_mailbox_receive(ringlet_mailbox *mailbox, void *buffer, size_t size, uint64_t *sender, int timeout_ms);
const void *ringlet_mailbox_peek(ringlet_mailbox *mailbox, size_t *len, uint64_t *sender, int timeout_ms);
int ringlet_mailbox_release(ringlet_mailbox *mailbox);
int ringlet_mailbox_fd(const ringlet_mailbox *mailbox);
int ringlet_mailbox_arm(ringlet_mailbox *mailbox);
size_t ringlet_mailbox_senders(const ringlet_mailbox *mailbox);
void ringlet_mailbox_close(ringlet_mailbox *mailbox);

#ifdef __cplusplus
}
#endif
#endif
