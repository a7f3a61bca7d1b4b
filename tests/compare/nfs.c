/* An NFS 4.0 client by libnfs: a file of the server's, by requests of one kind, so many at a time.
 *
 *     nfs PORT null|read|write AT_A_TIME REQUESTS
 */
#include <sys/time.h>
#include <nfsc/libnfs.h>
#include <nfsc/libnfs-raw.h>
#include <nfsc/libnfs-raw-nfs4.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* (libnfs has room for 4 KiB of a request made by hand.) */
enum { BLOCK = 4096, WRITTEN = 2048, BLOCKS = 256, HANDLE_MAX = 128 };

static struct rpc_context *rpc;
static nfs_fh4 handle;
static char handle_bytes[HANDLE_MAX], written[WRITTEN];
static const char *kind;
static int done, asked, wanted;

static void fail(const char *what) {
    fprintf(stderr, "nfs: %s: %s\n", what, rpc_get_error(rpc));
    exit(1);
}

static void compound(nfs_argop4 *operations, int count, rpc_cb cb) {
    COMPOUND4args arguments = {.argarray = {count, operations}};
    if (rpc_nfs4_compound_async(rpc, cb, &arguments, NULL) != 0) {
        fail("a request");
    }
}

static void answered(struct rpc_context *from, int status, void *data, void *_);

static void ask(void) {
    nfs_argop4 operations[2] = {{.argop = OP_PUTFH}};
    operations[0].nfs_argop4_u.opputfh.object = handle;
    int place = asked++ % BLOCKS * BLOCK;
    if (strcmp(kind, "read") == 0) {
        READ4args *args = &operations[1].nfs_argop4_u.opread;
        operations[1].argop = OP_READ;
        args->offset = place;
        args->count = BLOCK;
    } else if (strcmp(kind, "write") == 0) {
        WRITE4args *args = &operations[1].nfs_argop4_u.opwrite;
        operations[1].argop = OP_WRITE;
        args->offset = place;
        args->stable = UNSTABLE4;
        args->data.data_len = WRITTEN;
        args->data.data_val = written;
    } else {
        if (rpc_nfs4_null_async(rpc, answered, NULL) != 0) {
            fail("a request");
        }
        return;
    }
    compound(operations, 2, answered);
}

static void answered(struct rpc_context *from, int status, void *data, void *_) {
    (void)from, (void)_;
    COMPOUND4res *result = data;
    if (status != RPC_STATUS_SUCCESS || (strcmp(kind, "null") != 0 && result->status != NFS4_OK)) {
        fail(kind);
    }
    if (strcmp(kind, "read") == 0 && result->resarray.resarray_val[1].nfs_resop4_u.opread.READ4res_u.resok4.data.data_len != BLOCK) {
        fail("a short read");
    }
    done++;
    if (asked < wanted) {
        ask();
    }
}

static void found(struct rpc_context *from, int status, void *data, void *_) {
    (void)from, (void)_;
    COMPOUND4res *result = data;
    if (status != RPC_STATUS_SUCCESS || result->status != NFS4_OK) {
        fail("the file");
    }
    nfs_fh4 *object = &result->resarray.resarray_val[3].nfs_resop4_u.opgetfh.GETFH4res_u.resok4.object;
    if (object->nfs_fh4_len > HANDLE_MAX) {
        fail("its handle");
    }
    handle = (nfs_fh4){object->nfs_fh4_len, handle_bytes};
    memcpy(handle_bytes, object->nfs_fh4_val, object->nfs_fh4_len);
    done = 1;
}

static void connected(struct rpc_context *from, int status, void *data, void *_) {
    (void)from, (void)data, (void)_;
    if (status != RPC_STATUS_SUCCESS) {
        fail("the server");
    }
    done = 1;
}

/* Until so many are done. */
static void serve(int count) {
    while (done < count) {
        struct pollfd entry = {.fd = rpc_get_fd(rpc), .events = rpc_which_events(rpc)};
        if (poll(&entry, 1, -1) < 0 || rpc_service(rpc, entry.revents) < 0) {
            fail("the connection");
        }
    }
}

static void run(int count, int at_a_time) {
    done = asked = 0;
    wanted = count;
    while (asked < at_a_time) {
        ask();
    }
    serve(count);
}

int main(int count, char **words) {
    if (count != 5) {
        fprintf(stderr, "nfs PORT null|read|write AT_A_TIME REQUESTS\n");
        return 2;
    }
    kind = words[2];
    int at_a_time = atoi(words[3]), requests = atoi(words[4]);
    rpc = rpc_init_context();
    if (rpc_connect_port_async(rpc, "127.0.0.1", atoi(words[1]), NFS4_PROGRAM, NFS_V4, connected, NULL) != 0) {
        fail("the server");
    }
    serve(1);
    nfs_argop4 path[4] = {{.argop = OP_PUTROOTFH}, {.argop = OP_LOOKUP}, {.argop = OP_LOOKUP}, {.argop = OP_GETFH}};
    path[1].nfs_argop4_u.oplookup.objname = (component4){5, "files"};
    path[2].nfs_argop4_u.oplookup.objname = (component4){4, "file"};
    done = 0;
    compound(path, 4, found);
    serve(1);
    run(requests / 10, at_a_time);
    struct timespec began, ended;
    clock_gettime(CLOCK_MONOTONIC, &began);
    run(requests, at_a_time);
    clock_gettime(CLOCK_MONOTONIC, &ended);
    double seconds = ended.tv_sec - began.tv_sec + (ended.tv_nsec - began.tv_nsec) / 1e9;
    printf("%s: %.1f\n", kind, requests / seconds);
    rpc_destroy_context(rpc);
}
