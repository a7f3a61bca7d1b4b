/* The Memory Channel API, on ringlet's reflective memory (`ringlet imc init` first; link with -limc).
 *
 * Names and meanings are those that were published; what was not is marked "chosen": the numeric values of flags and enumerators, the fields of
 * imc_hostinfo, the largest set of locks, and what imc_bcopy returns. Programs have to be compiled anew.
 *
 * All functions but imc_bcopy, imc_rderrcnt, imc_rderrcnt_mr and imc_perror return a status: IMC_SUCCESS, or one of the negative ones below.
 * One process is one user of a region or lock, in all its threads. A child by fork has its parent's mappings, and has to call imc_api_init for
 * anything else (chosen).
 */
#ifndef IMC_H_INCLUDED
#define IMC_H_INCLUDED

#include <sys/types.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef unsigned long imc_key_t;
typedef unsigned long imc_size_t;
typedef unsigned int imc_perm_t;
typedef int imc_asid_t;
typedef int imc_lkid_t;

/* Chosen, all of them. Permissions are a file's bits. */
typedef enum { IMC_TRANSMIT = 1, IMC_RECEIVE = 2 } imc_dir_t;
#define IMC_SHARED 1
#define IMC_NONSHARED 2

#define IMC_UR 0400
#define IMC_UW 0200
#define IMC_URW 0600
#define IMC_GR 0040
#define IMC_GW 0020
#define IMC_GRW 0060
#define IMC_OR 0004
#define IMC_OW 0002
#define IMC_ORW 0006
#define IMC_LKU 0600
#define IMC_LKG 0060
#define IMC_LKO 0006

#define IMC_COHERENT 1
#define IMC_LOOPBACK 1
#define IMC_CREATOR 1
#define IMC_LOCKWAIT 1
#define IMC_LOCKNOWAIT 2

/* Lists of these end in 0. */
typedef enum { IMC_GET_HOSTS = 1, IMC_GET_NRAILS = 2, IMC_GET_ACTIVERAILS = 3 } imc_infoType;
typedef enum { IMC_CC_EVENT_HOST = 1, IMC_CC_EVENT_RAIL = 2 } imc_eventType;

#define IMC_MAXRAILS 4
#define IMC_MAXNUMLOCKS 4096 /* chosen */
#define IMC_MAXHOSTS 64      /* chosen */
#define IMC_MAXHOSTNAME 256  /* chosen */

/* Of IMC_GET_HOSTS: so many hosts, and their names. (The names of the fields are chosen.) */
typedef struct {
    int num_hosts;
    char hosts[IMC_MAXHOSTS][IMC_MAXHOSTNAME];
} imc_hostinfo;

/* Of IMC_GET_ACTIVERAILS: bit n is rail n. An array, so that both x and &x are its address. */
typedef unsigned int imc_railinfo[1];

#define IMC_SUCCESS 0
#define IMC_MCFULL (-1)
#define IMC_BADPARM (-2)
#define IMC_EXISTS (-3)
#define IMC_ATTACHED (-4)
#define IMC_NOLOCKGOT (-5)
#define IMC_RXFULL (-6)
#define IMC_BADLOCK (-7)
#define IMC_SHARERR (-8)
#define IMC_NONSHARERR (-9)
#define IMC_PERMIT (-10)
#define IMC_NOTALLOC (-11)
#define IMC_PRIOR (-12)
#define IMC_LOCKACTIVE (-13)
#define IMC_NOTINIT (-14)
#define IMC_NOTSUPER (-15)
#define IMC_BADSIZE (-16)
#define IMC_OPENERR (-17)
#define IMC_WRITEERR (-18)
#define IMC_CLOSERR (-19)
#define IMC_BADREGION (-20)
#define IMC_RECMAPPED (-21)
#define IMC_XMITMAPPED (-22)
#define IMC_LOCKNOTHELD (-23)
#define IMC_MC_ERROR (-24)
#define IMC_TIMEOUT (-25)
#define IMC_NOMCSPACE (-26)
#define IMC_EINVAL (-27)
#define IMC_ESRCH (-28)
#define IMC_BADSERVICE (-29)
#define IMC_NOTREGISTERED (-30)
#define IMC_EPERM (-31)
#define IMC_NOROOT (-32)
#define IMC_COHERENCYERR (-33)
#define IMC_UNDEFINED (-34)
#define IMC_KERN_FAULT (-35)
#define IMC_NORESOURCES (-36)
#define IMC_LATEJOIN (-37)
#define IMC_LOOPBACKERR (-38)
#define IMC_BADHOST (-39)
#define IMC_INITERR (-40)
#define IMC_LOCKPRIOR (-41)
#define IMC_COMPLEMENTERR (-42)
#define IMC_BADMAP (-44)
#define IMC_INTR (-45)
#define IMC_NOMEM (-46)
#define IMC_CORRUPTLOCK (-47)
#define IMC_INSUFFMEM (-48)
#define IMC_PTPERR (-49)
#define IMC_NOTSUPPORTED (-50)
#define IMC_WIRED_LIMIT (-51)
#define IMC_MAPENTRIES (-52)
#define IMC_BADADDR (-53)
#define IMC_RAIL_CHANGE (-54)
#define IMC_HOST_CHANGE (-55)
#define IMC_MULTIPLE_CHANGE (-56)
#define IMC_BADRAIL (-57)
#define IMC_WRONGRAIL (-58)
#define IMC_FAILEDOVER (-59)
#define IMC_NOMAPPER (-60)
#define IMC_INIT_PENDING (-61)

/* First of all; the argument is NULL. IMC_NOTINIT: `ringlet imc init` has not run on this host. */
int imc_api_init(unsigned long *reserved);

/* The region of this key, made by its first user; whole pages (of 4,096 bytes), flag 0 or IMC_COHERENT. Rail 0 is the only one that regions can be on. */
int imc_asalloc(imc_key_t key, imc_size_t bytes, imc_perm_t permission, int flag, imc_asid_t *id, int logical_rail);
/* Attaches it: flag 0, or IMC_LOOPBACK for IMC_TRANSMIT. What is received can't be stored to; what is transmitted is not to be loaded from. Between
 * hosts nothing is mapped where a region is transmitted: what a program stores there arrives, in whatever form (on x86-64), but the kernel can't write
 * there for it: read, recv, getrandom and the like fail with EFAULT, as they succeed on one host. Have them write elsewhere, and imc_bcopy from there.
 * A coherent region's contents may be on their way to this host: it waits for them, as long as any come (otherwise IMC_TIMEOUT after 30 s); other calls of
 * the process do not wait for that. IMC_LATEJOIN: the hosts that had all of them have gone (chosen); once all who use it have given it back it can be
 * allocated anew. */
int imc_asattach(imc_asid_t id, imc_dir_t direction, int mode, int flag, caddr_t *address);
/* To one other host of the cluster alone. IMC_BADHOST: there is none of that name; IMC_PTPERR: it is this one. */
int imc_asattach_ptp(imc_asid_t id, int mode, int flag, char *host, caddr_t *address);
int imc_asdetach(imc_asid_t id);
int imc_asdealloc(imc_asid_t id);
/* Copies, aligned words of 8 bytes whole. The last two arguments are not needed: stores of bytes are what they are. Returns 0, or (in a cluster) a
 * status: IMC_BADSERVICE where this host cannot reach the others, IMC_NOTINIT (chosen). */
long imc_bcopy(void *source, void *destination, long bytes, long dest_write_only, long first_dest_quad);

/* Errors of a rail; negative while they are counted: call again. Or IMC_BADRAIL, IMC_NOTINIT, which are negative too. */
int imc_rderrcnt_mr(int logical_rail);
/* IMC_SUCCESS if none has happened since, and all hosts have all that this process has written (it waits for that); otherwise IMC_MC_ERROR, and the
 * count is the new one. IMC_LATEJOIN as long as the process uses a region whose contents are lost: writing again mends nothing. IMC_NOTINIT: the keeper
 * that this process has joined has gone, and with it its regions and locks. */
int imc_ckerrcnt_mr(int *count, int logical_rail);
int imc_rderrcnt(void);
int imc_ckerrcnt(int *count);

/* A set of locks: *count is how many are wanted, then how many there are. With IMC_CREATOR it is made, and lock 0 taken, or IMC_EXISTS. */
int imc_lkalloc(imc_key_t key, int *count, imc_perm_t permission, int flag, imc_lkid_t *id);
/* The third argument is 0. IMC_LOCKWAIT, IMC_LOCKNOWAIT. */
int imc_lkacquire(imc_lkid_t id, int lock, int reserved, int flag);
int imc_lkrelease(imc_lkid_t id, int lock);
int imc_lkdealloc(imc_lkid_t id);

/* With each item of the list an address and a size (int or size_t): `char *data, int length`. At most six pairs. */
int imc_getclusterinfo(imc_infoType *items, int count, ...);
/* Blocks until the cluster is another than each configuration (address and size) says, which imc_getclusterinfo has told; returns IMC_HOST_CHANGE,
 * IMC_RAIL_CHANGE or IMC_MULTIPLE_CHANGE, and the configurations are new. The third argument is 0. */
int imc_wait_cluster_event(imc_eventType *events, unsigned long count, unsigned long reserved, ...);
/* Sends a signal to one process of this host. Not for root. Of another host of the cluster: IMC_NOTSUPPORTED (chosen). */
int imc_kill(char *host, pid_t process, int signal);
/* Writes the message and what the status means to standard error. */
void imc_perror(const char *message, int status);

#ifdef __cplusplus
}
#endif

#endif
