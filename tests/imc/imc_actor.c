/* Programs of the Memory Channel API: imc_actor WORD [ARGUMENT]... Each says "ok", or where it failed. */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/imc.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#define IS(expected, call)                                                                       \
    do {                                                                                         \
        long is_ = (call);                                                                       \
        if (is_ != (expected)) {                                                                 \
            printf("line %d: %s is %ld\n", __LINE__, #call, is_);                                \
            exit(1);                                                                             \
        }                                                                                        \
    } while (0)
#define TRUE(what)                                                                               \
    do {                                                                                         \
        if (!(what)) {                                                                           \
            printf("line %d: not %s\n", __LINE__, #what);                                        \
            exit(1);                                                                             \
        }                                                                                        \
    } while (0)

enum { PAGE = 4096, KEY = 0x7100, SLOTS = 64, ROUNDS = 20000 };

static void regions(void) {
    imc_asid_t id, other, more;
    caddr_t to, from;
    IS(IMC_BADPARM, imc_asalloc(KEY, PAGE, IMC_URW, 0, NULL, 0));
    IS(IMC_BADPARM, imc_asalloc(KEY, PAGE, IMC_URW, 2, &id, 0));
    IS(IMC_BADPARM, imc_asalloc(KEY, PAGE, 0, 0, &id, 0));
    IS(IMC_BADRAIL, imc_asalloc(KEY, PAGE, IMC_URW, 0, &id, 1));
    IS(IMC_BADRAIL, imc_asalloc(KEY, PAGE, IMC_URW, 0, &id, -1));
    IS(IMC_BADSIZE, imc_asalloc(KEY, 0, IMC_URW, 0, &id, 0));
    IS(IMC_BADSIZE, imc_asalloc(KEY, ~0UL, IMC_URW, 0, &id, 0));
    IS(IMC_MCFULL, imc_asalloc(KEY, 11 << 20, IMC_URW, 0, &id, 0));
    IS(0, imc_asalloc(KEY, PAGE + 1, IMC_URW, IMC_COHERENT, &id, 0));
    IS(IMC_PRIOR, imc_asalloc(KEY, PAGE + 1, IMC_URW, IMC_COHERENT, &other, 0));
    IS(IMC_BADREGION, imc_asattach(id + 1000, IMC_TRANSMIT, IMC_SHARED, 0, &to));
    IS(IMC_BADPARM, imc_asattach(id, 3, IMC_SHARED, 0, &to));
    IS(IMC_BADPARM, imc_asattach(id, IMC_TRANSMIT, 3, 0, &to));
    IS(IMC_BADPARM, imc_asattach(id, IMC_TRANSMIT, IMC_SHARED, 7, &to));
    IS(IMC_BADPARM, imc_asattach(id, IMC_RECEIVE, IMC_SHARED, IMC_LOOPBACK, &from));
    IS(IMC_BADPARM, imc_asattach(id, IMC_TRANSMIT, IMC_SHARED, 0, NULL));
    IS(IMC_BADREGION, imc_asdetach(id));
    IS(0, imc_asattach(id, IMC_TRANSMIT, IMC_SHARED, IMC_LOOPBACK, &to));
    IS(IMC_XMITMAPPED, imc_asattach(id, IMC_TRANSMIT, IMC_SHARED, IMC_LOOPBACK, &to));
    IS(IMC_SHARERR, imc_asattach(id, IMC_RECEIVE, IMC_NONSHARED, 0, &from));
    IS(0, imc_asattach(id, IMC_RECEIVE, IMC_SHARED, 0, &from));
    IS(IMC_RECMAPPED, imc_asattach(id, IMC_RECEIVE, IMC_SHARED, 0, &from));
    /* Any length and place. */
    static char bytes[2 * PAGE];
    for (size_t n = 0; n < sizeof bytes; n++)
        bytes[n] = (char)(n * 31 + 1);
    for (int at = 0; at < 20; at++)
        for (int length = 0; length < 40; length++) {
            IS(0, imc_bcopy(bytes + at / 2, to + PAGE - 20 + at, length, 1, 0));
            TRUE(!memcmp(from + PAGE - 20 + at, bytes + at / 2, length));
        }
    IS(0, imc_bcopy(bytes, to, sizeof bytes, 1, 0));
    TRUE(!memcmp(from, bytes, sizeof bytes));
    *(volatile int *)(to + 8) = 77;
    TRUE(*(volatile int *)(from + 8) == 77);
    IS(IMC_ATTACHED, imc_asdealloc(id));
    IS(0, imc_asdetach(id));
    IS(IMC_BADREGION, imc_asdetach(id));
    /* Without loopback this host does not see it; what its first user says holds for all of a host. */
    IS(0, imc_asattach(id, IMC_RECEIVE, IMC_SHARED, 0, &from));
    IS(0, imc_asattach(id, IMC_TRANSMIT, IMC_SHARED, 0, &to));
    *(volatile int *)(to + 8) = 78;
    TRUE(*(volatile int *)(from + 8) == 77);
    IS(0, imc_asdetach(id));
    IS(0, imc_asdealloc(id));
    IS(IMC_BADREGION, imc_asdealloc(id));
    /* Space of what is received. */
    IS(0, imc_asalloc(KEY + 1, 6 << 20, IMC_URW, 0, &id, 0));
    IS(0, imc_asalloc(KEY + 2, 3 << 20, IMC_URW, 0, &more, 0));
    IS(0, imc_asattach(id, IMC_RECEIVE, IMC_SHARED, 0, &from));
    IS(IMC_RXFULL, imc_asattach(more, IMC_RECEIVE, IMC_SHARED, 0, &from));
    IS(0, imc_asattach(more, IMC_TRANSMIT, IMC_SHARED, 0, &to));
    IS(0, imc_asdetach(more));
    IS(0, imc_asdealloc(more));
    IS(0, imc_asdetach(id));
    IS(0, imc_asdealloc(id));
}

static void locks(void) {
    imc_lkid_t id, other;
    int count = 3, none = 0, many = IMC_MAXNUMLOCKS + 1;
    IS(IMC_BADPARM, imc_lkalloc(KEY, NULL, IMC_LKU, 0, &id));
    IS(IMC_BADPARM, imc_lkalloc(KEY, &none, IMC_LKU, 0, &id));
    IS(IMC_BADPARM, imc_lkalloc(KEY, &many, IMC_LKU, 0, &id));
    IS(0, imc_lkalloc(KEY, &count, IMC_LKU, IMC_CREATOR, &id));
    TRUE(count == 3);
    IS(IMC_EXISTS, imc_lkalloc(KEY, &count, IMC_LKU, IMC_CREATOR, &other));
    IS(IMC_PRIOR, imc_lkalloc(KEY, &count, IMC_LKU, 0, &other));
    IS(IMC_LOCKPRIOR, imc_lkacquire(id, 0, 0, IMC_LOCKWAIT));
    IS(0, imc_lkacquire(id, 2, 0, IMC_LOCKNOWAIT));
    IS(IMC_BADLOCK, imc_lkacquire(id, 3, 0, IMC_LOCKNOWAIT));
    IS(IMC_BADLOCK, imc_lkacquire(id, -1, 0, IMC_LOCKNOWAIT));
    IS(IMC_BADLOCK, imc_lkacquire(id + 999, 0, 0, IMC_LOCKNOWAIT));
    IS(IMC_BADPARM, imc_lkacquire(id, 1, 1, IMC_LOCKNOWAIT));
    IS(IMC_BADPARM, imc_lkacquire(id, 1, 0, 9));
    IS(IMC_LOCKNOTHELD, imc_lkrelease(id, 1));
    IS(IMC_LOCKACTIVE, imc_lkdealloc(id));
    IS(0, imc_lkrelease(id, 2));
    IS(0, imc_lkrelease(id, 0));
    IS(0, imc_lkdealloc(id));
    IS(IMC_BADLOCK, imc_lkdealloc(id));
    IS(IMC_BADLOCK, imc_lkrelease(id, 0));
}

static void cluster(void) {
    imc_infoType items[] = {IMC_GET_HOSTS, IMC_GET_NRAILS, IMC_GET_ACTIVERAILS, 0};
    imc_infoType wrong[] = {9, 0};
    imc_hostinfo hosts;
    imc_railinfo active;
    unsigned int rails = 99;
    char name[IMC_MAXHOSTNAME];
    gethostname(name, sizeof name);
    IS(0, imc_getclusterinfo(items, 4, &hosts, sizeof hosts, &rails, (int)sizeof rails, active, sizeof active));
    TRUE(hosts.num_hosts == 1 && !strcmp(hosts.hosts[0], name) && rails == 1 && active[0] == 1);
    IS(0, imc_getclusterinfo(NULL, 0));
    IS(IMC_BADPARM, imc_getclusterinfo(NULL, 1));
    IS(IMC_BADPARM, imc_getclusterinfo(wrong, 1, &hosts, sizeof hosts));
    IS(IMC_INSUFFMEM, imc_getclusterinfo(items, 1, &hosts, 8));
    imc_eventType events[] = {IMC_CC_EVENT_HOST, IMC_CC_EVENT_RAIL, 0};
    IS(IMC_BADPARM, imc_wait_cluster_event(NULL, 1UL, 0UL));
    IS(IMC_BADPARM, imc_wait_cluster_event(events, 0UL, 0UL));
    hosts.num_hosts = 7;
    IS(IMC_HOST_CHANGE, imc_wait_cluster_event(events, 2UL, 0UL, &hosts, sizeof hosts, active, sizeof active));
    TRUE(hosts.num_hosts == 1);
    hosts.num_hosts = 7, active[0] = 3;
    IS(IMC_MULTIPLE_CHANGE, imc_wait_cluster_event(events, 2UL, 0UL, &hosts, sizeof hosts, active, sizeof active));
    active[0] = 3;
    IS(IMC_RAIL_CHANGE, imc_wait_cluster_event(events, 2UL, 0UL, &hosts, sizeof hosts, active, sizeof active));
    TRUE(active[0] == 1);
    int count = imc_rderrcnt_mr(0);
    TRUE(count >= 0 && imc_rderrcnt() == count);
    IS(0, imc_ckerrcnt_mr(&count, 0));
    IS(0, imc_ckerrcnt(&count));
    count = 5;
    IS(IMC_MC_ERROR, imc_ckerrcnt_mr(&count, 0));
    IS(0, imc_ckerrcnt_mr(&count, 0));
    IS(IMC_BADRAIL, imc_rderrcnt_mr(1));
    IS(IMC_BADRAIL, imc_ckerrcnt_mr(&count, 4));
    IS(IMC_BADPARM, imc_ckerrcnt_mr(NULL, 0));
    imc_asid_t id;
    caddr_t to;
    IS(0, imc_asalloc(KEY, PAGE, IMC_URW, 0, &id, 0));
    IS(IMC_BADHOST, imc_asattach_ptp(id, IMC_SHARED, 0, "nowhere", &to));
    IS(IMC_PTPERR, imc_asattach_ptp(id, IMC_SHARED, 0, name, &to));
    IS(IMC_BADPARM, imc_asattach_ptp(id, IMC_SHARED, IMC_LOOPBACK, name, &to));
    IS(0, imc_asdealloc(id));
    IS(IMC_BADHOST, imc_kill("nowhere", getpid(), 0));
    IS(IMC_BADPARM, imc_kill(name, 0, 0));
    IS(IMC_EINVAL, imc_kill(name, getpid(), 999));
    IS(IMC_EINVAL, imc_kill(name, 1, SIGKILL));
    IS(geteuid() ? 0 : IMC_NOROOT, imc_kill(name, getpid(), 0));
    imc_perror("message", IMC_MC_ERROR);
    imc_perror(NULL, -999);
    /* A child is no user of what its parent has, until it says who it is. */
    pid_t child = fork();
    if (!child) {
        IS(IMC_NOTINIT, imc_asalloc(KEY, PAGE, IMC_URW, 0, &id, 0));
        IS(0, imc_api_init(NULL));
        IS(0, imc_asalloc(KEY, PAGE, IMC_URW, 0, &id, 0));
        exit(0);
    }
    int status;
    TRUE(waitpid(child, &status, 0) == child && status == 0);
}

/* Messages by words alone, as on the hardware: writers and readers of one region, each slot full when its number says so. */
struct slot {
    uint64_t text[7], number;
};

static void messages(int is_writer, uint64_t rounds) {
    imc_asid_t id;
    caddr_t to, from;
    size_t bytes = sizeof(struct slot) * SLOTS + PAGE;
    IS(0, imc_asalloc(KEY + 9, bytes, IMC_URW, IMC_COHERENT, &id, 0));
    IS(0, imc_asattach(id, IMC_TRANSMIT, IMC_SHARED, IMC_LOOPBACK, &to));
    IS(0, imc_asattach(id, IMC_RECEIVE, IMC_SHARED, 0, &from));
    volatile struct slot *out = (void *)to, *in = (void *)from;
    volatile uint64_t *taken_out = (void *)(to + sizeof(struct slot) * SLOTS), *taken = (void *)(from + sizeof(struct slot) * SLOTS);
    for (uint64_t n = 1; n <= rounds; n++) {
        if (is_writer) {
            while (__atomic_load_n(taken, __ATOMIC_ACQUIRE) + SLOTS < n)
                ;
            int count;
            do {
                while ((count = imc_rderrcnt_mr(0)) < 0)
                    ;
                for (int word = 0; word < 7; word++)
                    out[n % SLOTS].text[word] = n * (word + 1);
                __atomic_store_n(&out[n % SLOTS].number, n, __ATOMIC_RELEASE);
                __sync_synchronize();
            } while (imc_ckerrcnt_mr(&count, 0) == IMC_MC_ERROR);
        } else {
            while (__atomic_load_n(&in[n % SLOTS].number, __ATOMIC_ACQUIRE) != n)
                ;
            for (int word = 0; word < 7; word++)
                TRUE(in[n % SLOTS].text[word] == n * (word + 1));
            __atomic_store_n(taken_out, n, __ATOMIC_RELEASE);
        }
    }
    if (is_writer)
        while (__atomic_load_n(taken, __ATOMIC_ACQUIRE) != rounds)
            ;
}

static volatile int over;

static void *allocates(void *unused) {
    imc_asid_t id;
    while (!over) {
        IS(0, imc_asalloc(KEY, PAGE, IMC_URW, 0, &id, 0));
        IS(0, imc_asdealloc(id));
    }
    return unused;
}

/* A child that is forked while another thread is in a call is none of it, and can begin anew. */
static void forks(void) {
    pthread_t thread;
    TRUE(!pthread_create(&thread, NULL, allocates, NULL));
    for (int n = 0; n < 300; n++) {
        pid_t child = fork();
        if (!child) {
            imc_asid_t id;
            IS(IMC_NOTINIT, imc_asalloc(KEY + n + 1, PAGE, IMC_URW, 0, &id, 0));
            IS(0, imc_api_init(NULL));
            IS(0, imc_asalloc(KEY + n + 1, PAGE, IMC_URW, 0, &id, 0));
            _exit(0);
        }
        int status;
        TRUE(waitpid(child, &status, 0) == child && status == 0);
    }
    over = 1;
    TRUE(!pthread_join(thread, NULL));
}

static void *complains(void *unused) {
    pthread_cancel(pthread_self());
    imc_perror("cancelled", IMC_MC_ERROR);
    imc_asid_t id;
    IS(0, imc_asalloc(KEY, PAGE, IMC_URW, 0, &id, 0));
    IS(0, imc_asdealloc(id));
    over = 1;
    pthread_testcancel();
    return unused;
}

/* A thread that is to end does so at none of these calls, and leaves nothing locked. */
static void cancelled(void) {
    pthread_t thread;
    void *ended;
    TRUE(!pthread_create(&thread, NULL, complains, NULL));
    TRUE(!pthread_join(thread, &ended) && ended == PTHREAD_CANCELED && over);
    imc_perror("message", IMC_MC_ERROR);
}

/* As a database does: the library by its name, its functions by theirs. */
static void by_name(void) {
    void *library = dlopen("libimc.so", RTLD_NOW);
    TRUE(library);
    static const char *names[] = {"imc_api_init", "imc_asalloc", "imc_asattach", "imc_asattach_ptp", "imc_asdetach", "imc_asdealloc",
        "imc_bcopy", "imc_rderrcnt_mr", "imc_ckerrcnt_mr", "imc_rderrcnt", "imc_ckerrcnt", "imc_lkalloc", "imc_lkacquire",
        "imc_lkrelease", "imc_lkdealloc", "imc_getclusterinfo", "imc_wait_cluster_event", "imc_kill", "imc_perror"};
    for (size_t n = 0; n < sizeof names / sizeof *names; n++)
        TRUE(dlsym(library, names[n]));
    int (*init)(unsigned long *) = (int (*)(unsigned long *))dlsym(library, "imc_api_init");
    IS(0, init(NULL));
}

static void permissions(int is_owner) {
    imc_asid_t id;
    imc_lkid_t lock;
    caddr_t at;
    int count = 1;
    if (is_owner) {
        IS(0, imc_asalloc(1, PAGE, IMC_URW, 0, &id, 0));
        IS(0, imc_asalloc(2, PAGE, IMC_URW | IMC_OR, 0, &id, 0));
        IS(0, imc_asalloc(3, PAGE, IMC_URW | IMC_OW, 0, &id, 0));
        IS(0, imc_lkalloc(1, &count, IMC_LKU, 0, &lock));
        IS(0, imc_lkalloc(2, &count, IMC_LKU | IMC_LKO, 0, &lock));
        puts("ready");
        fflush(stdout);
        pause();
    }
    IS(IMC_PERMIT, imc_asalloc(1, PAGE, IMC_URW, 0, &id, 0));
    IS(0, imc_asalloc(2, PAGE, IMC_URW, 0, &id, 0));
    IS(IMC_PERMIT, imc_asattach(id, IMC_TRANSMIT, IMC_SHARED, IMC_LOOPBACK, &at));
    IS(0, imc_asattach(id, IMC_RECEIVE, IMC_SHARED, 0, &at));
    IS(0, imc_asalloc(3, PAGE, IMC_URW, 0, &id, 0));
    IS(IMC_PERMIT, imc_asattach(id, IMC_RECEIVE, IMC_SHARED, 0, &at));
    IS(0, imc_asattach(id, IMC_TRANSMIT, IMC_SHARED, IMC_LOOPBACK, &at));
    IS(IMC_PERMIT, imc_lkalloc(1, &count, IMC_LKU, 0, &lock));
    IS(0, imc_lkalloc(2, &count, IMC_LKU, 0, &lock));
    /* Of one that others have, and of one that nobody has. */
    int found = 0;
    for (imc_lkid_t number = lock - 9; number < lock + 9; number++)
        if (number != lock)
            found += imc_lkdealloc(number) == IMC_NOTALLOC;
    TRUE(found == 1);
    IS(IMC_BADLOCK, imc_lkdealloc(100000000));
}

/* On one of two hosts: whom it knows, what is for the other one alone, a lock that both take; and the first one hears when the other one has gone. */
static void pair(char *own, char *other, int is_first) {
    imc_infoType items[] = {IMC_GET_HOSTS, IMC_GET_NRAILS, IMC_GET_ACTIVERAILS, 0};
    imc_eventType events[] = {IMC_CC_EVENT_HOST, 0};
    imc_hostinfo hosts;
    imc_railinfo active;
    unsigned int rails = 0;
    IS(0, imc_getclusterinfo(items, 4, &hosts, sizeof hosts, &rails, (int)sizeof rails, active, sizeof active));
    TRUE(hosts.num_hosts == 2 && rails == 2 && active[0] == 3);
    for (int n = 0; n < 2; n++)
        TRUE(!strcmp(hosts.hosts[n], own) || !strcmp(hosts.hosts[n], other));
    TRUE(strcmp(hosts.hosts[0], hosts.hosts[1]));
    IS(IMC_NOTSUPPORTED, imc_kill(other, getpid(), 0));
    IS(IMC_BADHOST, imc_kill("nowhere", getpid(), 0));
    imc_asid_t apart, id;
    imc_lkid_t lock;
    caddr_t to, from;
    int count = 1, errors;
    IS(0, imc_asalloc(KEY + 20, PAGE, IMC_URW, 0, &apart, 0));
    IS(0, imc_asalloc(KEY + 21, PAGE, IMC_URW, IMC_COHERENT, &id, 0));
    IS(0, imc_lkalloc(KEY + 20, &count, IMC_LKU, 0, &lock));
    IS(0, imc_asattach(apart, IMC_RECEIVE, IMC_SHARED, 0, &from));
    IS(IMC_PTPERR, imc_asattach_ptp(apart, IMC_SHARED, 0, own, &to));
    IS(0, imc_asattach_ptp(apart, IMC_SHARED, 0, other, &to));
    volatile uint64_t *sent = (void *)to, *came = (void *)from;
    /* (The other one may receive it later: it is not coherent.) */
    while (came[!is_first] != 7)
        sent[is_first] = 7;
    IS(0, imc_asattach(id, IMC_TRANSMIT, IMC_SHARED, IMC_LOOPBACK, &to));
    IS(0, imc_asattach(id, IMC_RECEIVE, IMC_SHARED, 0, &from));
    volatile uint64_t *out = (void *)to, *in = (void *)from;
    for (int n = 0; n < 200; n++) {
        IS(0, imc_lkacquire(lock, 0, 0, IMC_LOCKWAIT));
        *out = *in + 1;
        sent[is_first] = 7;
        IS(0, imc_lkrelease(lock, 0));
    }
    while (*in != 400)
        sent[is_first] = 7;
    TRUE(came[is_first] == 0 && came[!is_first] == 7);
    errors = imc_rderrcnt_mr(1);
    *(volatile uint64_t *)(to + 8 + 8 * is_first) = 1;
    IS(0, imc_ckerrcnt_mr(&errors, 1));
    IS(IMC_BADRAIL, imc_rderrcnt_mr(2));
    puts("ready");
    fflush(stdout);
    if (!is_first)
        pause();
    IS(IMC_HOST_CHANGE, imc_wait_cluster_event(events, 1UL, 0UL, &hosts, sizeof hosts));
    TRUE(hosts.num_hosts == 1 && !strcmp(hosts.hosts[0], own));
}

/* Writes and writes, and says when it has begun. */
static void scribble(void) {
    imc_asid_t id;
    caddr_t to;
    IS(0, imc_asalloc(KEY + 10, 4 * PAGE, IMC_URW, IMC_COHERENT, &id, 0));
    IS(0, imc_asattach(id, IMC_TRANSMIT, IMC_SHARED, IMC_LOOPBACK, &to));
    puts("ready");
    fflush(stdout);
    for (uint64_t n = 0;; n++)
        *(volatile uint64_t *)(to + PAGE * (n % 2)) = n;
}

/* What is received is not to be stored to. */
static void store(void) {
    imc_asid_t id;
    caddr_t from;
    IS(0, imc_asalloc(KEY, PAGE, IMC_URW, 0, &id, 0));
    IS(0, imc_asattach(id, IMC_RECEIVE, IMC_SHARED, 0, &from));
    *(volatile int *)from = 1;
}

static char answer[1 << 18];

static int connected(const char *name) {
    struct sockaddr_un to = {.sun_family = AF_UNIX};
    int end = socket(AF_UNIX, SOCK_SEQPACKET, 0);
    snprintf(to.sun_path, sizeof to.sun_path, "%s", name);
    socklen_t length = offsetof(struct sockaddr_un, sun_path) + strlen(to.sun_path);
    if (*name == '@')
        *to.sun_path = 0;
    IS(0, connect(end, (struct sockaddr *)&to, length));
    return end;
}

/* Asks, and takes the descriptors that come with the answer. */
static int asked(int end, const char *text, int *fds) {
    union {
        struct cmsghdr header;
        char room[CMSG_SPACE(4 * sizeof(int))];
    } control;
    struct iovec piece = {answer, sizeof answer - 1};
    struct msghdr message = {.msg_iov = &piece, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    IS((long)strlen(text), send(end, text, strlen(text), MSG_NOSIGNAL));
    ssize_t length = recvmsg(end, &message, 0);
    TRUE(length > 0);
    answer[length] = 0;
    struct cmsghdr *first = CMSG_FIRSTHDR(&message);
    int count = first ? (int)((first->cmsg_len - CMSG_LEN(0)) / sizeof(int)) : 0;
    if (count)
        memcpy(fds, CMSG_DATA(first), count * sizeof(int));
    return count;
}

/* As a program that means no good: it keeps the descriptors of what it may only read, and would like to write. */
static void reopens(const char *name) {
    int fds[4], end = connected(name);
    unsigned region;
    char text[200];
    IS(1, asked(end, "{\"Hello\":{\"version\":4}}", fds));
    IS(0, asked(end, "{\"Allocate\":{\"key\":2,\"bytes\":4096,\"how\":{\"mode\":384,\"coherent\":false,\"rail\":0}}}", fds));
    IS(1, sscanf(answer, "{\"Region\":{\"id\":%u", &region));
    snprintf(text, sizeof text, "{\"Attach\":{\"id\":%u,\"direction\":\"Receive\",\"how\":{\"shared\":true,\"loopback\":true}}}", region);
    IS(2, asked(end, text, fds));
    for (int n = 0; n < 2; n++) {
        void *at = mmap(NULL, PAGE, PROT_READ, MAP_SHARED, fds[n], 0);
        TRUE(at != MAP_FAILED);
        IS(-1, mprotect(at, PAGE, PROT_READ | PROT_WRITE));
        TRUE(mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fds[n], 0) == MAP_FAILED);
        IS(-1, pwrite(fds[n], "x", 1, 0));
        IS(-1, fchmod(fds[n], 0666));
        IS(-1, ftruncate(fds[n], 0));
        snprintf(text, sizeof text, "/proc/self/fd/%d", fds[n]);
        IS(-1, open(text, O_RDWR));
        IS(-1, open(text, O_WRONLY));
    }
}

enum { LARGE = 512 << 20 };
static imc_lkid_t beside_set;
static volatile int attached, turned;

/* Of the large region, how much this process has by now, in percent. */
static long held(void) {
    FILE *file = fopen("/proc/self/status", "r");
    char line[256];
    long kilobytes = 0;
    TRUE(file);
    while (fgets(line, sizeof line, file))
        sscanf(line, "RssShmem: %ld", &kilobytes);
    fclose(file);
    return kilobytes * 100 / (LARGE >> 10);
}

/* Turns of a lock that begin and end while the region is being attached. */
static void *beside(void *unused) {
    while (!attached) {
        long before = held();
        IS(0, imc_lkacquire(beside_set, 0, 0, IMC_LOCKWAIT));
        IS(0, imc_lkrelease(beside_set, 0));
        turned += before >= 5 && held() <= 95;
    }
    return unused;
}

/* What one thread attaches holds up no call of another one. (It may have been without a processor meanwhile, but not each time.) */
static void attaches(void) {
    int one = 1;
    imc_asid_t id;
    caddr_t from;
    IS(0, imc_lkalloc(KEY, &one, IMC_LKU, 0, &beside_set));
    for (int round = 0; round < 20 && !turned; round++) {
        pthread_t thread;
        attached = 0;
        IS(0, imc_asalloc(KEY, LARGE, IMC_URW, 0, &id, 0));
        TRUE(!pthread_create(&thread, NULL, beside, NULL));
        IS(0, imc_asattach(id, IMC_RECEIVE, IMC_SHARED, 0, &from));
        attached = 1;
        TRUE(!pthread_join(thread, NULL));
        IS(0, imc_asdetach(id));
        IS(0, imc_asdealloc(id));
    }
    TRUE(turned);
}

/* Of a space of 100 MB that other users have taken nothing of: half, and no more. */
static void half(void) {
    imc_asid_t id;
    IS(IMC_MCFULL, imc_asalloc(KEY + 1, 51 << 20, IMC_URW, 0, &id, 0));
    IS(0, imc_asalloc(KEY + 1, 50 << 20, IMC_URW, 0, &id, 0));
    IS(IMC_MCFULL, imc_asalloc(KEY + 2, PAGE, IMC_URW, 0, &id, 0));
    puts("ready");
    fflush(stdout);
    pause();
}

/* The next one has half of what is left; root all of it. */
static void quarter(void) {
    imc_asid_t id;
    IS(IMC_MCFULL, imc_asalloc(KEY + 3, 26 << 20, IMC_URW, 0, &id, 0));
    IS(0, imc_asalloc(KEY + 3, 25 << 20, IMC_URW, 0, &id, 0));
}

enum { MUCH = 400 << 20 };

/* Between hosts: a coherent region with all of it written, at all hosts. */
static void fills(void) {
    static char page[1 << 16];
    imc_asid_t id;
    caddr_t to;
    int errors = imc_rderrcnt_mr(0);
    IS(0, imc_asalloc(KEY, MUCH, IMC_URW, IMC_COHERENT, &id, 0));
    IS(0, imc_asattach(id, IMC_TRANSMIT, IMC_SHARED, IMC_LOOPBACK, &to));
    for (long at = 0; at < MUCH; at += sizeof page) {
        memset(page, 1 + at / (long)sizeof page % 255, sizeof page);
        IS(0, imc_bcopy(page, to + at, sizeof page, 1, 0));
    }
    IS(0, imc_ckerrcnt_mr(&errors, 0));
    puts("ready");
    fflush(stdout);
    pause();
}

/* On a host that has come behind that: all of it. */
static void finds(void) {
    imc_asid_t id;
    caddr_t from;
    IS(0, imc_asalloc(KEY, MUCH, IMC_URW, IMC_COHERENT, &id, 0));
    puts("ready");
    fflush(stdout);
    IS(0, imc_asattach(id, IMC_RECEIVE, IMC_SHARED, 0, &from));
    for (long at = 0; at < MUCH; at += PAGE)
        IS(1 + at / (1 << 16) % 255, (unsigned char)from[at]);
}

/* Says something to a keeper, and shows what it answers. An abstract name begins with @. */
static void says(const char *name, const char *text) {
    int end = connected(name);
    send(end, text, strlen(text), MSG_NOSIGNAL);
    if (recv(end, answer, sizeof answer - 1, 0) < 0)
        *answer = 0;
    printf("answer: %s\n", answer);
}

int main(int count, char **words) {
    const char *word = count > 1 ? words[1] : "";
    if (!strcmp(word, "uninitialised")) {
        imc_asid_t id;
        IS(IMC_NOTINIT, imc_asalloc(KEY, PAGE, IMC_URW, 0, &id, 0));
        IS(IMC_NOTINIT, imc_asdetach(1));
        IS(IMC_NOTINIT, imc_lkrelease(1, 0));
        IS(IMC_NOTINIT, imc_rderrcnt_mr(0));
        IS(IMC_NOTINIT, imc_api_init(NULL));
        puts("ok");
        return 0;
    }
    if (!strcmp(word, "says")) {
        says(words[2], words[3]);
        return 0;
    }
    if (!strcmp(word, "reopens")) {
        reopens(words[2]);
        puts("ok");
        return 0;
    }
    if (!strcmp(word, "errors")) {
        IS(0, imc_api_init(NULL));
        IS(0, imc_rderrcnt_mr(0));
        puts("ok");
        return 0;
    }
    if (!strcmp(word, "by_name")) {
        by_name();
        puts("ok");
        return 0;
    }
    IS(0, imc_api_init(NULL));
    IS(0, imc_api_init(NULL));
    if (!strcmp(word, "regions"))
        regions();
    else if (!strcmp(word, "locks"))
        locks();
    else if (!strcmp(word, "cluster"))
        cluster();
    else if (!strcmp(word, "write") || !strcmp(word, "read"))
        messages(!strcmp(word, "write"), count > 2 ? strtoul(words[2], NULL, 0) : ROUNDS);
    else if (!strcmp(word, "first") || !strcmp(word, "second"))
        pair(words[2], words[3], !strcmp(word, "first"));
    else if (!strcmp(word, "owner") || !strcmp(word, "stranger"))
        permissions(!strcmp(word, "owner"));
    else if (!strcmp(word, "attaches"))
        attaches();
    else if (!strcmp(word, "half"))
        half();
    else if (!strcmp(word, "quarter"))
        quarter();
    else if (!strcmp(word, "fills"))
        fills();
    else if (!strcmp(word, "finds"))
        finds();
    else if (!strcmp(word, "forks"))
        forks();
    else if (!strcmp(word, "cancelled"))
        cancelled();
    else if (!strcmp(word, "store"))
        store();
    else if (!strcmp(word, "scribble"))
        scribble();
    else
        return 2;
    puts("ok");
    return 0;
}
