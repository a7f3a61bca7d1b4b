//! Why a connection is on the kernel: a code for programs, a sentence for people.

use ringlet_linux::sys::Errno;

macro_rules! reasons {
    ($($(#[$doc:meta])* $name:ident = $value:literal, $code:literal, $sentence:literal;)*) => {
        /// A reason code. The numbers are part of the view's layout: never reuse one.
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        #[repr(u32)]
        pub enum Reason { $($(#[$doc])* $name = $value,)* }

        impl Reason {
            pub const ALL: &'static [Reason] = &[$(Reason::$name,)*];

            /// From a number found in a view; unknown ones come from a newer ringlet.
            pub fn from_u32(value: u32) -> Option<Reason> {
                match value { $($value => Some(Reason::$name),)* _ => None }
            }
            /// The short code, as `ringlet ss` prints it.
            pub fn code(self) -> &'static str { match self { $(Reason::$name => $code,)* } }
            /// One sentence for people.
            pub fn sentence(self) -> &'static str { match self { $(Reason::$name => $sentence,)* } }
        }
    };
}

// (22 and 24 were codes that nothing came to raise.)
reasons! {
    None = 0, "-", "Nothing to say: the connection is on the ring, or its time has not come.";
    Young = 1, "young", "The connection has not yet exchanged enough messages to be worth moving.";
    NotConnected = 2, "not-connected", "The socket is not connected, or is a listener.";
    NotLocal = 3, "not-local", "The far end is not on this machine (or not in this network namespace).";
    NoPeer = 4, "no-peer", "The far end never came to the rendezvous: it does not run under ringlet, or ringlet is off there.";
    Off = 5, "off", "ringlet is switched off for this address or port by its configuration.";
    NotOwner = 6, "not-owner", "Whoever came to the rendezvous does not own the far end of this connection, and was refused.";
    OtherUser = 7, "other-user", "The far end belongs to another user, and the configuration asks for the same user, or it is a datagram (the port could become somebody else's).";
    NameTaken = 8, "name-taken", "The rendezvous name of this connection is held by someone else.";
    NoDescriptor = 9, "no-descriptor", "The process is out of descriptors (RLIMIT_NOFILE).";
    NoMemory = 10, "no-memory", "The segment could not be made or mapped, a page of it can't be had, or a limit is reached: `memory_limit_bytes`, RLIMIT_FSIZE, or a quarter of RLIMIT_AS.";
    Forbidden = 11, "forbidden", "The kernel or a seccomp filter refuses a system call that the move needs.";
    OldKernel = 12, "old-kernel", "The kernel lacks something that the move needs; ringlet doctor says what.";
    BadPeer = 13, "bad-peer", "The far end said something at the rendezvous, or wrote something to the segment, that no sane peer would.";
    OtherVersion = 52, "other-version", "The far end runs another version of ringlet, whose messages or shared memory differ from ours.";
    Shared = 14, "shared", "Another process holds this connection too (fork or inheritance).";
    Exec = 15, "exec", "The connection was inherited by another program.";
    Passed = 16, "passed", "The descriptor was passed to another process over a Unix socket.";
    Stdio = 17, "stdio", "The descriptor was given to stdio.";
    IoUring = 18, "io-uring", "The process uses io_uring, which reads sockets behind ringlet's back.";
    OwnEpoll = 32, "own-epoll", "The process has an epoll set that was made by system calls around libc, which would hear nothing of the ring.";
    OneShot = 46, "one-shot", "An epoll set that is a parent's too watches the socket by EPOLLONESHOT, and was armed each time the move was tried: only while what it told is being served is it certain that it tells nothing twice. Or a set watches it by a number that was closed, under which nobody can change that.";
    Around = 33, "around", "The process can call libc around ringlet: by a second libc (dlmopen), or from a library that was loaded to prefer it (RTLD_DEEPBIND).";
    Miscounted = 45, "miscounted", "The kernel's counts of this connection's bytes contradict each other: packets could not be sent, or its bytes go past TCP (a BPF sockmap).";
    Urgent = 19, "urgent", "Urgent (out-of-band) data was sent or asked for.";
    Option = 20, "option", "A socket option is set that the ring does not serve.";
    Splice = 21, "splice", "A call moved data between this socket and another descriptor inside the kernel.";
    Closing = 23, "closing", "One direction was shut down, so the rest goes through the kernel.";
    Full = 25, "full", "ringlet's own tables are full.";
    Asked = 26, "asked", "The far end asked for the connection to go back to the kernel.";
    Pair = 29, "pair", "This process holds both ends of the socket pair.";
    Ancillary = 30, "ancillary", "Descriptors or credentials were sent with the data, so that part went through the kernel.";
    Large = 31, "large", "A packet was longer than the ring takes, so it went through the kernel.";
    Stalled = 28, "stalled", "The receiver has not read for a while and the ring is full, so the rest waits in the kernel's buffers.";
    Unforgiving = 40, "unforgiving", "The testing aid of this name has sent it back to the kernel, perhaps only for a while.";
    Paused = 41, "paused", "ringlet off was said: the connection stays on the kernel until ringlet on.";
    Unproven = 42, "unproven", "Nothing here can tell whether who came to the rendezvous holds the far end: /proc can't be read, or shows too little, or (for now) others hold too many file locks.";
    Credentials = 50, "credentials", "A process that shares the connection by fork has changed its user or group.";
    OwnFiles = 51, "own-files", "A thread of the process has a descriptor table of its own, where numbers mean other things.";
    NoAdapter = 53, "no-adapter", "The adapter that the configuration names (`adapter`) was not found, refused, or died; or the far end does not name the same. Or who carried it for the node service has died, or was not there: then it asks again.";
    NoMirror = 54, "no-mirror", "The node service sees no socket of this host whose TCP sequence numbers mirror this one's: the far end is on another host, or something in between ends the connection (a proxy) or rewrites its numbers.";
    NoNote = 55, "no-note", "The node service has not seen how this connection began: it is older than the service, or as many were there already as are remembered.";
    Refused = 56, "refused", "The node service's policy does not let the two ends share memory.";
    NodeFull = 57, "node-full", "The node service has too much to do: for all, or for this user or process.";
    Lease = 58, "lease", "The network between both ends passes no packets any more (a firewall rule, a link that is down), so this connection waits for it as TCP does.";
    Carried = 59, "carried", "The two ends share no memory, since they are on two hosts or the node service's policy keeps them apart: processes of the service copy between a segment of each.";
    NoFabric = 60, "no-fabric", "The far end is on another host, to which no network carries that the node services know: none is there that beats TCP, none is named, or it does not work.";
    Sandbox = 61, "sandbox", "The process has closed itself in (a seccomp filter, Landlock), and makes no system call any more that it would not make without ringlet.";
    AsyncSignal = 27, "sigio", "The program asked for SIGIO on this descriptor.";
}

/// Why a step towards the ring failed.
impl From<Errno> for Reason {
    fn from(error: Errno) -> Reason {
        match error {
            Errno::EMFILE | Errno::ENFILE => Reason::NoDescriptor,
            Errno::ENOMEM => Reason::NoMemory,
            Errno::ENOSYS | Errno::EINVAL => Reason::OldKernel,
            Errno::EADDRINUSE => Reason::NameTaken,
            _ => Reason::Forbidden,
        }
    }
}
