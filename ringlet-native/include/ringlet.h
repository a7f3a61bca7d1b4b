/*
 * ringlet: channels through shared memory between programs of one machine, and by way of `ringlet node` of a cluster. Manual pages: ringlet_connect(3), ringlet_send(3),
 * ringlet_mailbox(3), ringlet_region(3); memory that many programs share by keys: ringlet_reflect(3); Ethernet frames: ringlet_port(3).
 *
 * A service is opened under a name by one program, others connect to it. Calls that return -1 or NULL set errno. A timeout is in
 * milliseconds: -1 waits for ever, 0 not at all (EAGAIN); when it is over: ETIMEDOUT.
 */
#ifndef RINGLET_H
#define RINGLET_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>
#include <sys/uio.h>

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

/* Reflective memory (ringlet_reflect(3)): what one program stores into a region all see that receive it, in one order; locks that all share,
   given back when their holder dies. Calls that fail return -1 or NULL and set errno; ringlet_reflect_error says in words which call it was, of
   what, and why, ringlet_reflect_status as a number of <sys/imc.h> (0 if it has none); both are of this thread's last failure, the text until
   the next one. Any number of threads may use a handle at once, but not while it is closed, or a region attached or detached; a watch is one
   thread's at a time. In a child by fork none of them is of use (ENOTCONN); it opens its own. NULL can be closed. */
typedef struct ringlet_reflect_host ringlet_reflect_host;
typedef struct ringlet_reflect_region ringlet_reflect_region;
typedef struct ringlet_reflect_watch ringlet_reflect_watch;
typedef struct ringlet_reflect_locks ringlet_reflect_locks;

enum { RINGLET_REFLECT_PAGE = 4096 };
enum { RINGLET_REFLECT_INCOHERENT = 1 };                       /* of allocate */
enum { RINGLET_REFLECT_TRANSMIT = 1, RINGLET_REFLECT_RECEIVE = 2 }; /* of detach */
enum { RINGLET_REFLECT_NONSHARED = 1, RINGLET_REFLECT_NO_LOOPBACK = 2 }; /* of transmit and receive */
enum { RINGLET_REFLECT_CREATE = 1 };                           /* of locks_open */

/* path NULL: the keeper that RINGLET_REFLECT names, or that of all users, or this user's, which is started if it is not there. What was made by
   a host stays when that is closed, until it is closed too. await_end returns 0 when the keeper has gone. */
ringlet_reflect_host *ringlet_reflect_open(const char *path);
void ringlet_reflect_close(ringlet_reflect_host *host);
int ringlet_reflect_await_end(const ringlet_reflect_host *host, int timeout_ms);

/* The region of this key; who is first makes it, of so many bytes, of zeros, in whole pages; mode is as a file's (0600). It goes with its last
   user. deallocate detaches it. */
ringlet_reflect_region *ringlet_reflect_allocate(const ringlet_reflect_host *host, uint64_t key, size_t bytes, unsigned mode, unsigned flags);
void ringlet_reflect_deallocate(ringlet_reflect_region *region);
size_t ringlet_reflect_len(const ringlet_reflect_region *region);

/* Attaches it to be written, or read, and returns where it is mapped until it is detached. What is stored there is seen as it is stored; what
   is received can't be stored to (SIGSEGV). All who attach it on a host say alike whether it is shared and has loopback. In a cluster each store
   to what is transmitted is trapped, which costs more than put, and it can't be loaded from. */
void *ringlet_reflect_transmit(ringlet_reflect_region *region, unsigned flags);
const void *ringlet_reflect_receive(ringlet_reflect_region *region, unsigned flags);
/* In a cluster: to be written for one other host alone (ENODEV if there is none of that name). Of the flags: NONSHARED. */
void *ringlet_reflect_transmit_to(ringlet_reflect_region *region, const char *to, unsigned flags);
int ringlet_reflect_detach(ringlet_reflect_region *region, unsigned directions);

/* Checked copies of any length, from byte `at` on (EMSGSIZE beyond the end): aligned words of 8 bytes go whole, and what is put later is not
   seen before. notify tells who watches a page of these bytes. The program's own buffer overlaps no region that it transmits. */
int ringlet_reflect_put(const ringlet_reflect_region *region, size_t at, const void *data, size_t len);
int ringlet_reflect_get(const ringlet_reflect_region *region, size_t at, void *buffer, size_t len);
int ringlet_reflect_notify(const ringlet_reflect_region *region, size_t at, size_t len);

/* A wish to be told of what is stored into the page of byte `at`, and notified. changed: 1 if so since it last said so, else 0. wait returns 0
   then. The descriptor is readable then, until changed is asked; never read it. A watch keeps its region attached. */
ringlet_reflect_watch *ringlet_reflect_watch_open(const ringlet_reflect_region *region, size_t at);
int ringlet_reflect_watch_changed(ringlet_reflect_watch *watch);
int ringlet_reflect_watch_wait(ringlet_reflect_watch *watch, int timeout_ms);
int ringlet_reflect_watch_fd(ringlet_reflect_watch *watch);
void ringlet_reflect_watch_close(ringlet_reflect_watch *watch);

/* The locks of this key; who is first makes so many (1 to 4096). With CREATE it has to be this process (EEXIST), which holds lock 0 then. A
   process holds a lock, in all its threads (EDEADLK). close gives back what is held. */
ringlet_reflect_locks *ringlet_reflect_locks_open(const ringlet_reflect_host *host, uint64_t key, size_t count, unsigned mode, unsigned flags);
size_t ringlet_reflect_locks_count(const ringlet_reflect_locks *locks);
int ringlet_reflect_acquire(const ringlet_reflect_locks *locks, size_t lock, int timeout_ms);
int ringlet_reflect_release(const ringlet_reflect_locks *locks, size_t lock);
void ringlet_reflect_locks_close(ringlet_reflect_locks *locks);

/* The count of a rail's errors (EAGAIN while they are being counted); has everybody what was written since the count was `since`? If not (EIO)
   it is to be written again, with the new count. On one host there is rail 0, and no error; in a cluster check waits for all hosts. */
int ringlet_reflect_errors(const ringlet_reflect_host *host, unsigned rail);
int ringlet_reflect_check(const ringlet_reflect_host *host, unsigned rail, int since);

/* What there is, in bytes and numbers; is_cut: there is more than was counted. */
struct ringlet_reflect_state {
    char host[256];
    uint64_t allocated, allocated_most, received_most;
    uint32_t members, regions, watched_pages, lock_sets, locks_held;
    int is_cut;
};
int ringlet_reflect_host_state(const ringlet_reflect_host *host, struct ringlet_reflect_state *state);

/* The hosts among which memory is reflected (of more than HOSTS only so many have their names here), and the rails: how many, and as bits those
   that carry. stopped: why nothing that is written here is received by anybody, or "". wait_event waits until the cluster is another than
   `known`, and puts it there. */
enum { RINGLET_REFLECT_HOSTS = 100 };
struct ringlet_reflect_cluster {
    uint32_t event, hosts, rails, active_rails;
    char stopped[256];
    char names[RINGLET_REFLECT_HOSTS][256];
};
int ringlet_reflect_host_cluster(const ringlet_reflect_host *host, struct ringlet_reflect_cluster *cluster);
int ringlet_reflect_wait_event(const ringlet_reflect_host *host, struct ringlet_reflect_cluster *known, int timeout_ms);

const char *ringlet_reflect_error(void);
int ringlet_reflect_status(void);

/* An Ethernet (ringlet_port(3)): a program is a port of a network of `ringlet eth`, as its devices are, without one. A frame is what a network card
   takes and gives: from the destination's address on, 14 bytes at least, without a checksum at its end. Calls that fail return -1 or NULL and set
   errno; ringlet_port_error says in words what was wrong with this thread's last call (but for EAGAIN), until its next one fails. A queue is one
   thread's at a time; of a port's calls any number of threads may use all but close. In a child by fork none is of use
   (ENOTCONN), and close does nothing. NULL can be closed. */
typedef struct ringlet_port ringlet_port;
typedef struct ringlet_port_queue ringlet_port_queue;

enum { RINGLET_PORT_OFFLOADS = 1 }; /* frames that a card would still cut, or write checksums of, come as they are: look at `offload` */

struct ringlet_port_options {
    const char *name;         /* as `ringlet eth ls` shows it; NULL: the program's */
    unsigned char address[6]; /* the port's; all 0: a random one */
    unsigned short queues;    /* 1 to 16; 0: 1 */
    unsigned flags;
    int spin_us;              /* how long wait watches memory before it sleeps; 0: 50; -1: it sleeps at once */
};

/* As struct virtio_net_hdr of <linux/virtio_net.h>, of the little end first; all 0: a plain frame. */
struct ringlet_port_offload {
    uint8_t flags, gso_type;
    uint16_t hdr_len, gso_size, csum_start, csum_offset;
};

/* One that came. `data` is where it lies, and its sender may change it at any time; the rest is copied, and checked. */
struct ringlet_port_frame {
    const void *data;
    size_t len;
    unsigned char destination[6], source[6];
    struct ringlet_port_offload offload;
};

/* Joins a network; options NULL: the defaults. others: how many other ports are there now (0: no carrier). news: 1 and the oldest text that was not
   taken, of why another port does not want this one; 0 if there is none. groups: from when it returns others send broadcast and these multicast
   addresses here, and few others (NULL, as at first: all); where there is one other port it sends all. */
ringlet_port *ringlet_port_open(const char *network, const struct ringlet_port_options *options);
void ringlet_port_close(ringlet_port *port);
void ringlet_port_address(const ringlet_port *port, unsigned char address[6]);
int ringlet_port_others(const ringlet_port *port);
int ringlet_port_groups(const ringlet_port *port, const unsigned char (*groups)[6], size_t count);
int ringlet_port_news(const ringlet_port *port, char *buffer, size_t size);
ringlet_port_queue *ringlet_port_queue_of(const ringlet_port *port, unsigned number);

/* In place. reserve gives room for a frame of len bytes to this address: where its receiver will read it, or, if there are several, where it is
   copied from. commit sends the first len of them (offload NULL: a plain frame). The place is lost with the next call that reserves, sends, receives,
   waits or arms. EAGAIN: the receiver's queue is full; ENETDOWN: no port is there; EMSGSIZE: shorter or longer than can be; ESHUTDOWN: `ringlet eth down`
   has ended the port. */
void *ringlet_port_reserve(ringlet_port_queue *queue, const unsigned char to[6], size_t len);
int ringlet_port_commit(ringlet_port_queue *queue, size_t len, const struct ringlet_port_offload *offload);
/* Copies plain frames, until there is no room for one; how many that were. */
int ringlet_port_send(ringlet_port_queue *queue, const struct iovec *frames, unsigned count);

/* Frames that are there, so many at most; 0 if there are none. They stay until the next call that receives, waits or arms. */
int ringlet_port_receive(ringlet_port_queue *queue, struct ringlet_port_frame *frames, unsigned count);

/* Driven by a descriptor: arm returns 0 when there is something now (or room, if there was none), 1 when there is not: then the descriptor becomes
   readable as soon as there is. Only ever wait on it. wait returns 0 when there may be something. */
int ringlet_port_fd(const ringlet_port_queue *queue);
int ringlet_port_arm(ringlet_port_queue *queue);
int ringlet_port_wait(ringlet_port_queue *queue, int timeout_ms);

const char *ringlet_port_error(void);

#ifdef __cplusplus
}
#endif
#endif
