//! What may wait for a guest is done apart: closing what guests have handed over and what they came by, and ringing on their connections. KERNEL:
//! whoever closes a descriptor last waits for what that costs (a socket that lingers, one in an epoll set whose lock its owner holds), as long as its
//! owner likes; and who sends on a TCP socket waits for its lock, which its owner can hold by a call that stands in a page fault. So it is done by
//! threads, as many as hang and one more: while a copy of an honest guest's connection waits here for another's to be closed, its close does not
//! reach the peer.
//!
//! Whose hang can't be known before. So nobody has more threads than it leaves free: a user that has everything hang gets a half of all, and a pod of
//! its half of that; two users a third each. What more there is of theirs waits for their own, and whoever else comes finds a thread.

use std::collections::{HashMap, VecDeque};
use std::hash::Hash;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::policy;
use crate::who::Who;

/// Threads, and what may wait for one; and threads for all pods of a user.
const THREADS: usize = 512;
const WAITING: usize = 4096;
const OF_USER: usize = THREADS / 2;
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
    /// By turns; none is empty.
    waiting: VecDeque<(From, VecDeque<Job>)>,
    /// Under way, by numbers that are not used again; and how many of those are whose.
    under_way: HashMap<u64, (From, Instant)>,
    of_users: HashMap<Option<u32>, usize>,
    of_pods: HashMap<From, usize>,
    next: u64,
    threads: usize,
    idle: usize,
}

impl State {
    /// May one more of its be under way?
    fn may_run(&self, from: &From) -> bool {
        let of_user = self.of_users.get(&from.user).copied().unwrap_or(0);
        of_user < THREADS.saturating_sub(self.under_way.len())
            && self.of_pods.get(from).copied().unwrap_or(0) < OF_USER.saturating_sub(of_user)
    }

    /// What waits only for a thread, and not for others of its own.
    fn due(&self) -> usize {
        let due = self.waiting.iter().filter(|(from, _)| self.may_run(from));
        due.map(|(_, jobs)| jobs.len()).sum()
    }

    fn wait(&mut self, from: From, job: Job) {
        match self.waiting.iter_mut().find(|(other, _)| *other == from) {
            Some((_, jobs)) => jobs.push_back(job),
            None => self.waiting.push_back((from, VecDeque::from([job]))),
        }
    }

    /// The next one that may be under way, and its number.
    fn begin(&mut self) -> Option<(u64, Job)> {
        let at = self.waiting.iter().position(|(from, _)| self.may_run(from))?;
        let (from, mut jobs) = self.waiting.remove(at)?;
        let job = jobs.pop_front()?;
        if !jobs.is_empty() {
            self.waiting.push_back((from.clone(), jobs));
        }
        *self.of_users.entry(from.user).or_default() += 1;
        *self.of_pods.entry(from.clone()).or_default() += 1;
        self.next += 1;
        self.under_way.insert(self.next, (from, Instant::now()));
        Some((self.next, job))
    }

    fn end(&mut self, number: u64) {
        let Some((from, _)) = self.under_way.remove(&number) else { return };
        one_less(&mut self.of_users, &from.user);
        one_less(&mut self.of_pods, &from);
    }
}

fn one_less<K: Hash + Eq>(counts: &mut HashMap<K, usize>, of: &K) {
    if let Some(count) = counts.get_mut(of) {
        *count -= 1;
        if *count == 0 {
            counts.remove(of);
        }
    }
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    more: Condvar,
}

#[derive(Clone)]
pub struct Apart(Arc<Shared>);

/// A descriptor of which somebody else is given a copy: what he, or who has the other end, puts into its queue may be closed with ours, so that is
/// done apart, whatever becomes of it.
pub struct Handed {
    fd: Option<OwnedFd>,
    to: From,
    apart: Apart,
}

impl AsRawFd for Handed {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_ref().map_or(-1, AsRawFd::as_raw_fd)
    }
}

impl Drop for Handed {
    fn drop(&mut self) {
        self.apart.close(self.to.clone(), self.fd.take().into_iter().collect());
    }
}

impl Apart {
    /// With its first thread.
    pub fn new() -> std::io::Result<Apart> {
        let apart = Apart(Arc::default());
        apart.0.start(&mut apart.0.lock())?;
        Ok(apart)
    }

    pub fn handed(&self, fd: OwnedFd, to: &From) -> Handed {
        Handed { fd: Some(fd), to: to.clone(), apart: self.clone() }
    }

    pub fn close(&self, from: From, fds: Vec<OwnedFd>) {
        self.run(from, Box::new(move || drop(fds)));
    }

    /// Does this, which may wait for the one from whom it comes.
    pub fn run(&self, from: From, job: Job) {
        let mut state = self.0.lock();
        state.wait(from, job);
        if state.idle < state.due() && state.threads < THREADS {
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

    /// May no more be taken, from whomever?
    pub fn is_full(&self) -> bool {
        self.0.lock().due() >= WAITING
    }

    /// Does so much of this one's hang that no more should be taken from it?
    pub fn hangs(&self, from: &From) -> bool {
        let state = self.0.lock();
        if state.under_way.len() < HANG_OF_POD {
            return false;
        }
        if state.waiting.iter().any(|(other, _)| other == from) && !state.may_run(from) {
            return true;
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
            if let Some((number, job)) = state.begin() {
                drop(state);
                job();
                state = self.lock();
                state.end(number);
                continue;
            }
            state.idle += 1;
            let (back, waited) =
                self.more.wait_timeout(state, IDLE).unwrap_or_else(PoisonError::into_inner);
            state = back;
            state.idle -= 1;
            if waited.timed_out() && state.due() == 0 && state.threads > 1 {
                state.threads -= 1;
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringlet_linux::{meet, tcp};
    use std::io::Write;
    use std::net::{Shutdown, TcpListener, TcpStream};
    use std::os::fd::FromRawFd;
    use std::sync::mpsc;

    #[test]
    fn who_drops_what_was_handed_over_does_not_wait_for_what_is_in_its_queue() {
        const PATIENCE: Duration = Duration::from_secs(60);
        // SAFETY: made just now, ours alone.
        let own = |fd| unsafe { OwnedFd::from_raw_fd(fd) };
        let [ours, theirs] = meet::pair().unwrap().map(own);
        // A connection that lingers, and has something to linger for.
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let far = listener.accept().unwrap().0;
        near.set_nonblocking(true).unwrap();
        while near.write(&[7; 1 << 16]).is_ok() {}
        tcp::set_linger(near.as_raw_fd(), [1, 3600]);
        meet::send(theirs.as_raw_fd(), b"x", &[near.as_raw_fd()]).unwrap();
        drop((near, theirs));
        let apart = Apart::new().unwrap();
        let handed = apart.handed(ours, &From { user: Some(1), pod: None });
        let (done, told) = mpsc::channel();
        thread::spawn(move || {
            drop(handed);
            let _ = done.send(());
        });
        assert_eq!(told.recv_timeout(PATIENCE), Ok(()), "it waits");
        assert!(!apart.is_idle());
        far.shutdown(Shutdown::Both).unwrap();
        drop(far);
        let until = Instant::now() + PATIENCE;
        while !apart.is_idle() {
            assert!(Instant::now() < until);
            thread::yield_now();
        }
    }

    #[test]
    fn who_hangs_as_often_as_it_can_leaves_threads_to_others() {
        const PATIENCE: Duration = Duration::from_secs(60);
        let apart = Apart::new().unwrap();
        let from = |user, pod: usize| From { user: Some(user), pod: Some(format!("/{pod}")) };
        let (done, told) = mpsc::channel();
        let hang = |from| {
            let (go, wait) = mpsc::channel::<()>();
            let done = done.clone();
            let job = move || {
                let _ = wait.recv();
                done.send("hung").unwrap();
            };
            apart.run(from, Box::new(job));
            go
        };
        let runs = |from, text| {
            let done = done.clone();
            apart.run(from, Box::new(move || done.send(text).unwrap()));
            assert_eq!(told.recv_timeout(PATIENCE), Ok(text), "it waits for what hangs");
        };
        // A pod, more than all threads; then its user, by other pods; then another user.
        let mut hanging: Vec<_> = (0..2 * WAITING).map(|_| hang(from(1, 0))).collect();
        runs(from(1, 1), "another pod of the user");
        hanging.extend((0..2 * THREADS).map(|nth| hang(from(1, nth % 64))));
        runs(from(2, 0), "another user");
        hanging.extend((0..2 * THREADS).map(|_| hang(from(2, 0))));
        runs(from(2, 1), "another pod of the second");
        runs(from(3, 0), "a third user");
        let until = Instant::now() + PATIENCE;
        while !(apart.hangs(&from(1, 0)) && apart.hangs(&from(2, 0))) {
            assert!(Instant::now() < until);
            thread::yield_now();
        }
        assert!(!apart.hangs(&from(3, 0)) && !apart.is_full() && !apart.is_idle());
        // And what waited for its own is done when those are.
        let count = hanging.len();
        drop(hanging);
        for _ in 0..count {
            assert_eq!(told.recv_timeout(PATIENCE), Ok("hung"));
        }
        let until = Instant::now() + PATIENCE;
        while !apart.is_idle() {
            assert!(Instant::now() < until);
            thread::yield_now();
        }
        let state = apart.0.lock();
        assert!(state.of_users.is_empty() && state.of_pods.is_empty());
    }
}
