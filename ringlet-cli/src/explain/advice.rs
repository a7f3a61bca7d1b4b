//! What can be done about a reason.

use ringlet::reasons::Reason;

/// None where nothing needs doing, or nothing can be done.
pub fn advice(reason: Reason) -> Option<&'static str> {
    Some(match reason {
        Reason::None | Reason::NotConnected | Reason::Closing => return None,
        Reason::Young => {
            "Nothing to do: it moves after some messages (setting move_after), later where connections to its service mostly ended young."
        }
        Reason::NotLocal => {
            "Between containers of one host, run `ringlet node` there and mount /run/ringlet into both; between hosts nothing can be done."
        }
        Reason::NoMirror => {
            "Nothing can be done where the far end is on another host or a proxy stands between; else look for what rewrites sequence numbers (SYN proxies)."
        }
        Reason::NoFabric => {
            "See `ringlet node status` on both hosts: `rails` in [cluster] of its policy file names what carries; libfabric's tcp provider is used only if it is named."
        }
        Reason::NoNote => "Nothing to do: connections that begin from now on are seen.",
        Reason::Refused => {
            "See the policy of the node service (`ringlet node`): by default both ends must be of the same host user and of the same pod."
        }
        Reason::Carried => {
            "Nothing to do, if the two are to be kept apart; what they share memory by is a rule in the policy of the node service (`ringlet node`)."
        }
        Reason::NodeFull => "See `ringlet node status`: the limits are in its policy file.",
        Reason::Lease => {
            "Look for a packet filter or a link that is down between both ends; once packets pass again it moves again by itself."
        }
        Reason::NoPeer => {
            "Start the other program with `ringlet run` too; if it runs so already, `ringlet on` makes both look again."
        }
        Reason::Off => "See `ringlet config`: the settings enabled, only, except and unix decide.",
        Reason::NotOwner => {
            "Look who listens at the rendezvous in the other program's place; ringlet keeps it out."
        }
        Reason::Unproven => {
            "Mount the whole of /proc in the program's container (`mount -t proc`), /proc/locks among it; across users or containers UDP \
             stays on the kernel."
        }
        Reason::OtherUser => "Set peers = any if programs of different users are to share memory.",
        Reason::NameTaken => {
            "Find the process that holds the name (`ss -xlp`), which is none of this connection's ends."
        }
        Reason::NoDescriptor => {
            "Raise the limit of descriptors (`ulimit -n`, LimitNOFILE= of a service)."
        }
        Reason::NoMemory => {
            "Raise the setting memory_limit_bytes, or the process's memory limit, or lower ring_bytes."
        }
        Reason::NoAdapter => {
            "Where the node service carried it: it asks again by itself, at its next calls, and is carried again once a carrier is there and both ends have asked (`ringlet node status`; `ringlet on` asks at once). If that never succeeds, the service began after the connection did: run it with `--keep-notes`. With `ringlet run --mirror`, start both programs with the same one, or the adapter again."
        }
        Reason::Forbidden => {
            "Allow the system call in the seccomp filter; `ringlet doctor` names what is missing."
        }
        Reason::OldKernel => "Run `ringlet doctor`.",
        Reason::BadPeer => {
            "Both programs need the same ringlet; if they have it, the other one is broken or hostile."
        }
        Reason::OtherVersion => "Restart the older of the two programs, under the newer ringlet.",
        Reason::Shared => {
            "It moves once only one process holds it: the parent or the child closes its copy."
        }
        Reason::Exec | Reason::Passed => {
            "Nothing to do: whoever got the descriptor may know nothing of ringlet."
        }
        Reason::Stdio => "Let the program use recv and send, or read and write, instead of stdio.",
        Reason::IoUring => "Let the program use epoll or blocking calls instead of io_uring.",
        Reason::OneShot => {
            "Let the program make the set after the fork, or read or write between an event and arming it again."
        }
        Reason::OwnEpoll => "Let the program make and use its epoll sets by libc's calls.",
        Reason::Around => "Let the program load its libraries without dlmopen and RTLD_DEEPBIND.",
        Reason::Urgent | Reason::Option | Reason::Splice | Reason::AsyncSignal => {
            "Nothing to do unless the program can do without it."
        }
        Reason::Full => "The process has more sockets than ringlet follows.",
        Reason::Asked => "Ask at the other end: `ringlet explain` of its process says why.",
        Reason::Stalled => {
            "Look why the receiver does not read; a larger ring_bytes helps against bursts only."
        }
        Reason::Pair => "Nothing to do: it moves when its ends are in two processes.",
        Reason::Ancillary | Reason::Large => {
            "Nothing to do: it uses shared memory again once the other end has taken that part."
        }
        Reason::Unforgiving => "Switch the testing aid off (setting unforgiving).",
        Reason::Miscounted => {
            "Look for what drops packets on their way out (`tc`, `nft`, an address that comes and goes) or takes sockets into a sockmap."
        }
        Reason::Credentials => "What is made after the change of user is not shared, and moves.",
        Reason::OwnFiles => {
            "A process whose threads share their descriptors keeps its connections."
        }
        Reason::Sandbox => {
            "Nothing to do: its filter may end it for a call of ringlet's. A filter that is set before the program starts lets its connections move."
        }
        Reason::Paused => "`ringlet on` lets it use shared memory again.",
    })
}
