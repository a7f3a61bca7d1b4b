//! What may wait for a guest is done apart: closing what guests have handed over and what they came by, and ringing on their connections. KERNEL:
//! whoever closes a descriptor last waits for what that costs (a socket that lingers, one in an epoll set whose lock its owner holds), as long as its
//! owner likes; and who sends on a TCP socket waits for its lock, which its owner can hold by a call that stands in a page fault. So it is done by
//! threads, as many as hang and one more: while a copy of an honest guest's connection waits here for another's to be closed, its close does not
//! reach the peer.

use std::collections::{HashMap, VecDeque};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::policy;
use crate::who::Who;

/// Threads, and what may wait for one.
const THREADS: usize = 512;
const WAITING: usize = 4096;
/// What takes longer hangs. As many may, of one user and of one user's pod, before no more is taken from them.
const HANGS_AFTER: Duration = Duration::from_secs(1);
const HANG_OF_USER: usize = 128;
const HANG_OF_POD: usize = 16;
/// A thread with nothing to do ends, but for the last.
const IDLE: Duration = Duration::from_secs(10);
const STACK_BYTES: usize = 64 << 10;

/// From whom it came.
#[derive(Serialize, Deserialize, Clone, PartialEq, Eq, Hash, Debug)]
pub struct From {
    pub user: Option<u32>,
    pub pod: Option<String>,
}

impl From {
    pub fn of(who: &Who) -> From {
        From {
            user: who.user,
            pod: who.group.as_deref().map(|group| policy::pod(group).to_owned()),
        }
    }
}

type Job = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct State {
    waiting: VecDeque<(From, Job)>,
    /// Under way, by numbers that are not used again.
    under_way: HashMap<u64, (From, Instant)>,
    next: u64,
    threads: usize,
    idle: usize,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    more: Condvar,
}

pub struct Apart(Arc<Shared>);

impl Apart {
    /// With its first thread.
    pub fn new() -> std::io::Result<Apart> {
        let apart = Apart(Arc::default());
        apart.0.start(&mut apart.0.lock())?;
        Ok(apart)
    }

    pub fn close(&self, from: From, fds: Vec<OwnedFd>) {
        self.run(from, Box::new(move || drop(fds)));
    }

    /// Does this, which may wait for the one from whom it comes.
    pub fn run(&self, from: From, job: Job) {
        let mut state = self.0.lock();
        state.waiting.push_back((from, job));
        if state.idle < state.waiting.len() && state.threads < THREADS {
            // (If none can be started, those that there are do it in time.)
            let _ = self.0.start(&mut state);
        }
        self.0.more.notify_one();
    }

    /// Is nothing done, and nothing to be done?
    pub fn is_idle(&self) -> bool {
        let state = self.0.lock();
        state.waiting.is_empty() && state.under_way.is_empty()
    }

    /// May more be taken, from whomever?
    pub fn is_full(&self) -> bool {
        self.0.lock().waiting.len() >= WAITING
    }

    /// Does so much of this one's hang that no more should be taken from it?
    pub fn hangs(&self, from: &From) -> bool {
        let state = self.0.lock();
        if state.under_way.len() < HANG_OF_POD {
            return false;
        }
        let (mut of_user, mut of_pod) = (0, 0);
        for (other, since) in state.under_way.values() {
            if other.user == from.user && since.elapsed() > HANGS_AFTER {
                of_user += 1;
                of_pod += usize::from(other.pod == from.pod);
            }
        }
        of_user >= HANG_OF_USER || of_pod >= HANG_OF_POD
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn start(self: &Arc<Self>, state: &mut State) -> std::io::Result<()> {
        let shared = self.clone();
        let closer = thread::Builder::new().name("apart".to_owned()).stack_size(STACK_BYTES);
        closer.spawn(move || shared.work())?;
        state.threads += 1;
        Ok(())
    }

    fn work(&self) {
        let mut state = self.lock();
        loop {
            if let Some((from, job)) = state.waiting.pop_front() {
                let number = state.next;
                state.next += 1;
                state.under_way.insert(number, (from, Instant::now()));
                drop(state);
                job();
                state = self.lock();
                state.under_way.remove(&number);
                continue;
            }
            state.idle += 1;
            let (back, waited) =
                self.more.wait_timeout(state, IDLE).unwrap_or_else(PoisonError::into_inner);
            state = back;
            state.idle -= 1;
            if waited.timed_out() && state.waiting.is_empty() && state.threads > 1 {
                state.threads -= 1;
                return;
            }
        }
    }
}
