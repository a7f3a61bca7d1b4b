//! Why a call fails: the statuses of the Memory Channel API, of which these can happen.

use std::fmt;

use ringlet_linux::sys::Errno;
use serde::{Deserialize, Serialize};

macro_rules! statuses {
    ($($name:ident = $code:literal, $about:literal;)*) => {
        #[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
        #[non_exhaustive]
        pub enum Status {
            $(#[doc = $about] $name = $code,)*
        }

        impl Status {
            pub const ALL: &'static [Status] = &[$(Status::$name,)*];

            pub fn about(self) -> &'static str {
                match self {
                    $(Status::$name => $about,)*
                }
            }
        }
    };
}

statuses! {
    Full = -1, "no channel space is left (`ringlet imc init -a`), or there are as many regions, locks or wishes as there may be";
    BadParameter = -2, "a parameter makes no sense";
    Exists = -3, "a lock set with that key is there already";
    Attached = -4, "the region is attached still";
    Busy = -5, "somebody else holds the lock";
    ReceiveFull = -6, "this host's receive space is used up (`ringlet imc init -r`)";
    BadLock = -7, "there is no such lock";
    Shared = -8, "the region is shared on this host, and was not to be";
    NonShared = -9, "the region is attached by one process alone";
    Denied = -10, "its permissions do not allow it";
    NotAllocated = -11, "this process has not allocated it";
    Prior = -12, "this process has allocated it before";
    LockActive = -13, "this process holds locks of the set";
    NotInitialised = -14, "this host has no keeper, or it has ended (`ringlet imc init`)";
    BadSize = -16, "the size is nothing, too large, or not that of the region";
    BadRegion = -20, "there is no such region";
    ReceiveAttached = -21, "this process receives it already";
    TransmitAttached = -22, "this process transmits to it already";
    NotHeld = -23, "this process does not hold the lock";
    ChannelError = -24, "an error has happened: what was written since is to be written again";
    Timeout = -25, "the keeper does not answer";
    Stopped = -29, "this host can't reach enough of its cluster: nothing is written, and no lock is had, until it can";
    Incoherent = -33, "it was allocated as coherent, and this call does not say so, or the other way round";
    Incomplete = -37, "the hosts that had all of its contents have gone: once all who use the region have given it back it can be allocated anew";
    OtherLoopback = -38, "who attached it first on this host said otherwise of loopback";
    BadHost = -39, "there is no such host";
    HeldByUs = -41, "this process holds the lock";
    Interrupted = -45, "a signal has come";
    NoMemory = -46, "there is no memory, or no descriptor, left";
    CorruptLock = -47, "the lock holds what nobody writes there";
    ToItself = -49, "a region can't be transmitted to its own host alone";
    NotSupported = -50, "this is not supported";
    BadAddress = -53, "it can't be mapped at that address";
    BadRail = -57, "there is no such rail";
    WrongRail = -58, "the key is in use on another rail";
}

impl Status {
    /// As `<sys/imc.h>` has it.
    pub fn code(self) -> i32 {
        self as i32
    }

    pub fn of_code(code: i32) -> Option<Status> {
        Status::ALL.iter().copied().find(|status| status.code() == code)
    }
}

impl From<Errno> for Status {
    /// (Of memory and descriptors, which are all that the kernel refuses here.)
    fn from(errno: Errno) -> Status {
        match errno {
            Errno::EACCES | Errno::EPERM => Status::Denied,
            _ => Status::NoMemory,
        }
    }
}

impl fmt::Display for Status {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.write_str(self.about())
    }
}

impl std::error::Error for Status {}
