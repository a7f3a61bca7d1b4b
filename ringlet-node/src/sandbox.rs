//! What the service gives up once all that it needs is made, so that who takes it over has little: its capabilities, what execve would give, all files
//! but those of /proc, and every system call but those that it makes from then on.
//!
//! What is not on the list fails with ENOSYS, as on a kernel without it. WHY: libc then does what it does there (clone for clone3, whose flags a
//! filter can't see), and a library that asks for something new is no end of the service.

use std::collections::BTreeMap;
use std::io::{Error, ErrorKind};
use std::path::{Path, PathBuf};

use anyhow::Context;
use landlock::{
    ABI, Access, AccessFs, Ruleset, RulesetAttr, RulesetCreatedAttr, path_beneath_rules,
};
use libc::{c_int, c_long};
use rustix::process::{DumpableBehavior, set_dumpable_behavior};
use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, clear_ambient_capability_set,
    remove_capability_from_bounding_set, set_capabilities, set_no_new_privs,
};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule,
};

use crate::journal::say;
use crate::notes::MAP_LOOKUP_ELEM;

/// The calling thread, and those that it starts.
///
/// `looks_up`: can notes be looked up? Asked without capabilities.
pub fn enter(looks_up: impl Fn() -> bool) -> anyhow::Result<()> {
    give_up_rights_but(CapabilitySet::empty(), looks_up)?;
    confine(&[Path::new("/proc")], &[ANYHOW, GUESTS, FILES], &[ONLY, ONLY_GUESTS, ONLY_FILES])
}

/// The same of a carrier, which makes memory, and looks at no file.
pub fn enter_as_carrier() -> anyhow::Result<()> {
    give_up_rights()?;
    confine(&[], &[ANYHOW, MEMORY], &[ONLY, ONLY_MEMORY])
}

/// The same of the thread that speaks with other nodes: it looks at no file, and at no guest.
pub fn enter_for_cluster() -> anyhow::Result<()> {
    give_up_rights()?;
    confine(&[], &[ANYHOW, NODES], &[ONLY, ONLY_NODES])
}

/// The same of the thread that asks name servers.
pub fn enter_for_names() -> anyhow::Result<()> {
    give_up_rights()?;
    confine(&[], &[ANYHOW, NODES, SERVERS], &[ONLY, ONLY_NODES])
}

/// The same of what carries to other hosts. WHY not a list of calls: what providers of libfabric do is theirs, and changes.
///
/// `folders`: of rails in memory.
pub fn enter_as_fabric(folders: &[PathBuf]) -> anyhow::Result<()> {
    give_up_rights()?;
    let own = ["/dev", "/proc/self"].map(PathBuf::from);
    let written = own.iter().chain(folders).map(PathBuf::as_path).collect::<Vec<_>>();
    let read = ["/dev", "/etc", "/lib", "/lib64", "/opt", "/proc", "/run", "/sys", "/usr"];
    rule(&read.map(Path::new), &written)?;
    let refused = SeccompAction::Errno(libc::EPERM as u32);
    let calls = NOT_OF_FABRIC.iter().map(|call| (*call, Vec::new())).collect();
    let architecture = std::env::consts::ARCH.try_into()?;
    let filter = SeccompFilter::new(calls, SeccompAction::Allow, refused, architecture)?;
    apply(&filter.try_into()?)
}

/// The same of the thread that looks for new keys in this directory.
pub fn enter_for_renewal(directory: &Path) -> anyhow::Result<()> {
    give_up_rights()?;
    confine(&[directory], &[ANYHOW, FILES], &[ONLY, ONLY_FILES])
}

/// What execve would give, and capabilities (but to exceed limits).
pub fn give_up_rights() -> anyhow::Result<()> {
    give_up_rights_but(CapabilitySet::empty(), || true)
}

/// The same of who starts others, which may be to mark a socket (`ringlet_linux::service`).
pub fn give_up_rights_but_marking(marks: bool) -> anyhow::Result<()> {
    let kept = if marks { CapabilitySet::SYS_ADMIN } else { CapabilitySet::empty() };
    give_up_rights_but(kept, || true)
}

fn give_up_rights_but(kept: CapabilitySet, looks_up: impl Fn() -> bool) -> anyhow::Result<()> {
    // What is handed over to us is nobody's to look at, of whatever user.
    set_dumpable_behavior(DumpableBehavior::NotDumpable).context("not dumpable")?;
    drop_capabilities(kept, looks_up).context("capabilities can't be dropped")?;
    set_no_new_privs(true).context("no_new_privs")
}

fn confine(readable: &[&Path], calls: &[&[c_long]], only: &[&[Only]]) -> anyhow::Result<()> {
    rule(readable, &[])?;
    apply(&filter(calls, only).context("the filter of system calls can't be made")?)
}

/// No files but these.
fn rule(readable: &[&Path], writable: &[&Path]) -> anyhow::Result<()> {
    let all = AccessFs::from_all(ABI::V5);
    let ruled = Ruleset::default()
        .handle_access(all)
        .and_then(|rules| rules.create())
        .and_then(|rules| {
            rules.add_rules(path_beneath_rules(readable, AccessFs::from_read(ABI::V1)))
        })
        .and_then(|rules| rules.add_rules(path_beneath_rules(writable, all)))
        .and_then(|rules| rules.restrict_self());
    // (A kernel without Landlock is no error; no more than a second wall is missing.)
    ruled.map(drop).context("Landlock refuses what the service gives up")
}

fn apply(filter: &BpfProgram) -> anyhow::Result<()> {
    match seccompiler::apply_filter(filter) {
        Err(seccompiler::Error::Prctl(error) | seccompiler::Error::Seccomp(error))
            if is_lacking(&error) =>
        {
            say(
                "warning: this kernel has no filters of system calls (CONFIG_SECCOMP_FILTER): the service runs without",
            );
            Ok(())
        }
        applied => applied.context("the filter of system calls is refused"),
    }
}

fn is_lacking(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::InvalidInput | ErrorKind::Unsupported)
}

/// KERNEL: who may raise limits (if we might) may also send descriptors while its user has too many on their way, which any other process of root's,
/// as in a container, could keep up. Before Linux 5.19, where BPF is for the privileged only, so is looking into a map of one's own.
///
/// `kept`: by what it starts, too.
fn drop_capabilities(kept: CapabilitySet, looks_up: impl Fn() -> bool) -> rustix::io::Result<()> {
    let before = capabilities(None)?.permitted;
    clear_ambient_capability_set()?;
    // (They are nobody's any more: no_new_privs. It takes one that we may not have.)
    if before.contains(CapabilitySet::SETPCAP) {
        set_to(before)?;
        for (_, capability) in (CapabilitySet::all() - kept).iter_names() {
            remove_capability_from_bounding_set(capability)?;
        }
    }
    set_capabilities(None, sets(CapabilitySet::empty(), before))?;
    let looking = if looks_up() { CapabilitySet::empty() } else { CapabilitySet::BPF };
    set_to(before & (CapabilitySet::SYS_RESOURCE | looking | kept))
}

fn set_to(kept: CapabilitySet) -> rustix::io::Result<()> {
    set_capabilities(None, sets(kept, kept))
}

fn sets(effective: CapabilitySet, permitted: CapabilitySet) -> CapabilitySets {
    CapabilitySets { effective, permitted, inheritable: CapabilitySet::empty() }
}

type Filtered = Result<BpfProgram, seccompiler::BackendError>;

/// A system call, and where these bits of this argument are so.
type Only = (c_long, u8, c_int, c_int);

fn filter(calls: &[&[c_long]], only: &[&[Only]]) -> Filtered {
    let mut calls: BTreeMap<i64, Vec<SeccompRule>> =
        calls.iter().flat_map(|calls| calls.iter()).map(|call| (*call, Vec::new())).collect();
    for (call, argument, mask, value) in only.iter().flat_map(|only| only.iter()) {
        let value = *value as u64;
        let operator = SeccompCmpOp::MaskedEq(*mask as u32 as u64);
        let condition = SeccompCondition::new(*argument, SeccompCmpArgLen::Dword, operator, value)?;
        calls.entry(*call).or_default().push(SeccompRule::new(vec![condition])?);
    }
    let architecture = std::env::consts::ARCH.try_into()?;
    let refused = SeccompAction::Errno(libc::ENOSYS as u32);
    SeccompFilter::new(calls, refused, SeccompAction::Allow, architecture)?.try_into()
}

/// Other programs, and what only root does.
const NOT_OF_FABRIC: &[c_long] = &[
    libc::SYS_acct,
    libc::SYS_add_key,
    libc::SYS_bpf,
    libc::SYS_chroot,
    libc::SYS_delete_module,
    libc::SYS_execve,
    libc::SYS_execveat,
    libc::SYS_finit_module,
    libc::SYS_init_module,
    libc::SYS_io_uring_setup,
    libc::SYS_kexec_load,
    libc::SYS_keyctl,
    libc::SYS_kill,
    libc::SYS_mount,
    libc::SYS_perf_event_open,
    libc::SYS_pivot_root,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_ptrace,
    libc::SYS_reboot,
    libc::SYS_request_key,
    libc::SYS_setns,
    libc::SYS_swapoff,
    libc::SYS_swapon,
    libc::SYS_umount2,
    libc::SYS_unshare,
    libc::SYS_userfaultfd,
];

/// Guests.
const GUESTS: &[c_long] = &[libc::SYS_accept4, libc::SYS_epoll_create1, libc::SYS_pidfd_open];

/// Files: /proc/PID/cgroup, or keys.
const FILES: &[c_long] = &[libc::SYS_fstat, libc::SYS_lseek, libc::SYS_read, libc::SYS_statx];

/// Segments, and doorbells.
const MEMORY: &[c_long] =
    &[libc::SYS_eventfd2, libc::SYS_ftruncate, libc::SYS_memfd_create, libc::SYS_sendto];

/// Other nodes, by TCP.
const NODES: &[c_long] = &[
    libc::SYS_accept4,
    libc::SYS_connect,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_poll,
    // (It can open nothing.)
    libc::SYS_read,
    libc::SYS_recvfrom,
    libc::SYS_sendto,
    libc::SYS_writev,
];

/// Name servers, by UDP.
const SERVERS: &[c_long] = &[libc::SYS_bind, libc::SYS_getpeername, libc::SYS_getsockname];

/// What the service, or a carrier, and its threads do with what they have, and what libc does for them.
const ANYHOW: &[c_long] = &[
    libc::SYS_close,
    libc::SYS_epoll_ctl,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_epoll_wait,
    libc::SYS_epoll_pwait,
    libc::SYS_getsockopt,
    libc::SYS_ppoll,
    // How many threads want to run.
    libc::SYS_pread64,
    libc::SYS_recvmsg,
    libc::SYS_sendmsg,
    // Threads, memory, time.
    libc::SYS_brk,
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_futex,
    libc::SYS_geteuid,
    libc::SYS_getpid,
    // Who is nice watches no memory.
    libc::SYS_getpriority,
    libc::SYS_getrandom,
    libc::SYS_gettid,
    libc::SYS_madvise,
    libc::SYS_mremap,
    libc::SYS_munmap,
    libc::SYS_restart_syscall,
    libc::SYS_rseq,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_getscheduler,
    libc::SYS_sched_yield,
    libc::SYS_set_robust_list,
    libc::SYS_sigaltstack,
];

/// The same, where these bits of this argument are so.
const ONLY: &[Only] = &[
    // Threads, and no processes.
    (libc::SYS_clone, 0, libc::CLONE_THREAD, libc::CLONE_THREAD),
    (libc::SYS_fcntl, 1, ALL, libc::F_DUPFD_CLOEXEC),
    (libc::SYS_fcntl, 1, ALL, libc::F_GETFD),
    (libc::SYS_mmap, 2, libc::PROT_EXEC, 0),
    (libc::SYS_mprotect, 2, libc::PROT_EXEC, 0),
    (libc::SYS_prctl, 0, ALL, libc::PR_SET_NAME),
    (libc::SYS_setsockopt, 1, ALL, libc::SOL_SOCKET),
    (libc::SYS_write, 0, ALL, libc::STDERR_FILENO),
];

const ONLY_GUESTS: &[Only] =
    &[(libc::SYS_bpf, 0, ALL, MAP_LOOKUP_ELEM), (libc::SYS_socketpair, 0, ALL, libc::AF_UNIX)];

const ONLY_FILES: &[Only] = &[
    // To be read.
    (libc::SYS_openat, 2, libc::O_ACCMODE | libc::O_CREAT | libc::O_TRUNC, libc::O_RDONLY),
    // Eight bytes: an eventfd's. (It has no file to write to.)
    (libc::SYS_write, 2, ALL, 8),
];

const ONLY_MEMORY: &[Only] = &[
    (libc::SYS_fcntl, 1, ALL, libc::F_ADD_SEALS),
    // Eight bytes: an eventfd's. (It has no file to write to.)
    (libc::SYS_write, 2, ALL, 8),
];

const ONLY_NODES: &[Only] = &[
    // Eight bytes: an eventfd's. (It has no file to write to.)
    (libc::SYS_write, 2, ALL, 8),
    // O_NONBLOCK.
    (libc::SYS_ioctl, 1, ALL, libc::FIONBIO as c_int),
    (libc::SYS_setsockopt, 1, ALL, libc::IPPROTO_TCP),
    (libc::SYS_socket, 0, ALL, libc::AF_INET),
    (libc::SYS_socket, 0, ALL, libc::AF_INET6),
];

const ALL: c_int = -1;
