//! The socket layer inside one process: both ends of a connection, each call by its number (`serve`), one step after another, at random by
//! seed. There is no libc edge here, only system calls; so this is also the agent without one.
//!
//! Every byte tells its place in its direction. So the model is four counts and what has ended, in memory that processes made by fork share:
//! they go on with both ends, and end in order or are killed at any step.

use ringlet::config::Config;
use ringlet::socket::{self, process};
use ringlet_agent::{Edge, serve};
use ringlet_core::view::PATH_RING;
use ringlet_linux::sys::{self, Sys};
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::time::{Duration, Instant};

/// Scripts of each kind, and steps of a script.
const SCRIPTS: u64 = 60;
const STEPS: usize = 400;
/// What may be under way in a direction: the kernel has room for it too.
const UNDER_WAY_MAX: u64 = 40_000;
/// How long something that must come is waited for: as good as for ever.
const PATIENCE: Duration = Duration::from_secs(60);

/// System calls as they are.
struct Bare {
    number: i64,
    args: [usize; 6],
}

impl Edge for Bare {
    fn pass_on(&self) -> Sys<usize> {
        // SAFETY: the test's own call.
        unsafe { sys::call(self.number, self.args) }
    }
    unsafe fn call(number: i64, args: [usize; 6]) -> Sys<usize> {
        // SAFETY: by contract.
        unsafe { sys::call(number, args) }
    }
    fn in_which<T>(_: &dyn Fn(), call: impl FnOnce() -> T) -> T {
        call()
    }
}

fn call(number: i64, given: &[usize]) -> isize {
    let mut args = [0; 6];
    args[..given.len()].copy_from_slice(given);
    // SAFETY: arguments of this call, all in live memory of the caller's.
    unsafe { serve(&Bare { number, args }, number, args) }
}

/// By direction, which is the number of its sender.
#[derive(Default)]
struct Model {
    sent: [AtomicU64; 2],
    got: [AtomicU64; 2],
    shut: [AtomicU64; 2],
    /// Steps in which a direction was in the ring.
    moved: AtomicU64,
}

impl Model {
    fn under_way(&self, from: usize) -> u64 {
        self.sent[from].load(SeqCst) - self.got[from].load(SeqCst)
    }
}

fn byte(from: usize, place: u64) -> u8 {
    (place ^ place >> 8 ^ place >> 16) as u8 ^ if from == 0 { 0x55 } else { 0 }
}

/// splitmix64
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        (x ^ x >> 31) % limit
    }
    /// Mostly short.
    fn len(&mut self) -> u64 {
        let most = [1, 8, 60, 3_000, 20_000][self.below(5) as usize];
        1 + self.below(most)
    }
}

struct Script<'a> {
    random: Random,
    model: &'a Model,
    fds: [i32; 2],
    forked: bool,
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    Tcp,
    Unix,
}

fn ok(done: isize) -> i32 {
    assert!(done >= 0, "error {}", -done);
    done as i32
}

/// A connection through a listener: its connecting and its accepting end.
fn connect(kind: Kind) -> [i32; 2] {
    let domain = match kind {
        Kind::Tcp => libc::AF_INET,
        Kind::Unix => libc::AF_UNIX,
    };
    let stream = [domain as usize, libc::SOCK_STREAM as usize, 0];
    let mut name = [0u8; 64];
    name[..2].copy_from_slice(&(domain as u16).to_ne_bytes());
    let mut len = match kind {
        Kind::Tcp => {
            name[4..8].copy_from_slice(&[127, 0, 0, 1]);
            16u32
        }
        // An abstract name of the kernel's choice.
        Kind::Unix => 2,
    };
    let listener = ok(call(libc::SYS_socket, &stream)) as usize;
    let address = name.as_mut_ptr() as usize;
    ok(call(libc::SYS_bind, &[listener, address, len as usize]));
    ok(call(libc::SYS_listen, &[listener, 1]));
    len = name.len() as u32;
    ok(call(libc::SYS_getsockname, &[listener, address, &raw mut len as usize]));
    let first = ok(call(libc::SYS_socket, &stream));
    ok(call(libc::SYS_connect, &[first as usize, address, len as usize]));
    let second = ok(call(libc::SYS_accept4, &[listener, 0, 0, 0]));
    ok(call(libc::SYS_close, &[listener]));
    [first, second]
}

const NOW: usize = libc::MSG_DONTWAIT as usize | libc::MSG_NOSIGNAL as usize;
const AGAIN: isize = -(libc::EAGAIN as isize);

impl Script<'_> {
    fn fd(&self, side: usize) -> usize {
        self.fds[side] as usize
    }

    fn send(&mut self, from: usize) {
        let len = self.random.len();
        let sent = self.model.sent[from].load(SeqCst);
        if self.model.under_way(from) + len > UNDER_WAY_MAX {
            return;
        }
        let bytes: Vec<u8> = (sent..sent + len).map(|place| byte(from, place)).collect();
        let (base, len) = (bytes.as_ptr() as usize, bytes.len());
        let done = match self.random.below(3) {
            0 => {
                let cut = self.random.below(len as u64 + 1) as usize;
                let parts = [(base, cut), (base + cut, len - cut)];
                let mut header: libc::msghdr = zeroed();
                (header.msg_iov, header.msg_iovlen) = (parts.as_ptr() as *mut _, parts.len() as _);
                call(libc::SYS_sendmsg, &[self.fd(from), &raw const header as usize, NOW])
            }
            _ => call(libc::SYS_sendto, &[self.fd(from), base, len, NOW, 0, 0]),
        };
        if self.model.shut[from].load(SeqCst) != 0 {
            assert_eq!(done, -(libc::EPIPE as isize), "a send behind the end");
        } else if done != AGAIN {
            assert!(done > 0 && done as usize <= len, "send: {done}");
            self.model.sent[from].fetch_add(done as u64, SeqCst);
        }
    }

    /// What is there, or what must be there soon.
    fn receive(&mut self, side: usize) {
        let from = 1 - side;
        let mut bytes = vec![0u8; self.random.len() as usize];
        let peeks = self.random.below(4) == 0;
        let flags = NOW | if peeks { libc::MSG_PEEK as usize } else { 0 };
        let begin = Instant::now();
        let done = loop {
            let (base, len) = (bytes.as_mut_ptr() as usize, bytes.len());
            let done = call(libc::SYS_recvfrom, &[self.fd(side), base, len, flags, 0, 0]);
            let due = self.model.under_way(from) > 0 || self.model.shut[from].load(SeqCst) != 0;
            if done != AGAIN || !due {
                break done;
            }
            assert!(begin.elapsed() < PATIENCE, "what was sent does not come");
        };
        match done {
            AGAIN => {}
            0 => {
                assert_eq!(self.model.under_way(from), 0, "the end comes before the bytes");
                assert_ne!(self.model.shut[from].load(SeqCst), 0, "an end that nobody made");
            }
            _ => {
                assert!(done > 0 && done as u64 <= self.model.under_way(from), "receive: {done}");
                let got = self.model.got[from].load(SeqCst);
                for (i, found) in bytes[..done as usize].iter().enumerate() {
                    assert_eq!(
                        *found,
                        byte(from, got + i as u64),
                        "the byte at {}",
                        got + i as u64
                    );
                }
                if !peeks {
                    self.model.got[from].fetch_add(done as u64, SeqCst);
                }
            }
        }
    }

    /// Readiness and counts agree with the model, as soon as all has come.
    fn look(&mut self, side: usize) {
        let from = 1 - side;
        let due = self.model.under_way(from);
        let over = self.model.shut[from].load(SeqCst) != 0;
        let begin = Instant::now();
        loop {
            let mut entry = libc::pollfd { fd: self.fds[side], events: libc::POLLIN, revents: 0 };
            let ready = call(libc::SYS_poll, &[&raw mut entry as usize, 1, 0]);
            let mut count = 0i32;
            ok(call(libc::SYS_ioctl, &[self.fd(side), 0x541b, &raw mut count as usize]));
            let (ready, all) =
                (ready == 1 && entry.revents & libc::POLLIN != 0, count as u64 == due);
            assert!(count as u64 <= due, "{count} bytes wait, {due} are under way");
            assert!(!ready || due > 0 || over, "ready for nothing");
            if ready == (due > 0 || over) && all {
                return;
            }
            assert!(
                begin.elapsed() < PATIENCE,
                "ready {ready}, {count} of {due} bytes, over {over}"
            );
        }
    }

    /// Another name for the same.
    fn rename(&mut self, side: usize) {
        let named = ok(call(libc::SYS_dup, &[self.fd(side)]));
        ok(call(libc::SYS_close, &[self.fd(side)]));
        self.fds[side] = named;
    }

    fn shut(&mut self, from: usize) {
        ok(call(libc::SYS_shutdown, &[self.fd(from), libc::SHUT_WR as usize]));
        self.model.shut[from].store(1, SeqCst);
    }

    /// A child goes on with both ends for a while, and ends; then we go on.
    fn fork(&mut self) {
        let (steps, dies) = (self.random.below(20), self.random.below(2) == 0);
        let random = Random(self.random.below(u64::MAX));
        let child = fork();
        if child == 0 {
            let mut script = Script { random, model: self.model, fds: self.fds, forked: true };
            end_with(|| script.steps(steps as usize), dies);
        }
        assert_eq!(status_of(child), if dies { libc::SIGKILL } else { 0 }, "the child");
    }

    fn step(&mut self) {
        let side = self.random.below(2) as usize;
        match self.random.below(200) {
            0..80 => self.send(side),
            80..160 => self.receive(side),
            160..185 => self.look(side),
            185..192 => self.rename(side),
            192..194 if !self.forked => self.fork(),
            // An option that leaves both directions to the kernel for good.
            197 if self.random.below(4) == 0 => {
                call(
                    libc::SYS_fcntl,
                    &[self.fd(side), libc::F_SETFL as usize, libc::O_ASYNC as usize],
                );
            }
            198 if self.random.below(4) == 0 && self.model.shut[side].load(SeqCst) == 0 => {
                self.shut(side)
            }
            _ => {}
        }
        let moved = self.fds.iter().any(|fd| {
            let path = socket::path_of(*fd);
            path == Some(PATH_RING)
        });
        self.model.moved.fetch_add(moved as u64, SeqCst);
    }

    fn steps(&mut self, count: usize) {
        for _ in 0..count {
            self.step();
        }
    }

    /// All that is under way at `side` is taken.
    fn drain(&mut self, side: usize) {
        let begin = Instant::now();
        while self.model.under_way(1 - side) > 0 {
            self.receive(side);
            assert!(begin.elapsed() < PATIENCE, "never drained");
        }
    }

    /// One end goes: closed, or with the process that alone has it. What it has sent comes, and then the end; unless it goes with bytes
    /// unread, which breaks the connection off.
    fn ends(&mut self) {
        let side = self.random.below(2) as usize;
        let unread = self.random.below(4) == 0;
        if !unread {
            self.drain(side);
        }
        let resets = self.model.under_way(1 - side) > 0;
        match self.random.below(3) {
            0 => ok(call(libc::SYS_close, &[self.fd(side)])),
            how => {
                let (random, mut told) = (Random(self.random.below(u64::MAX)), [0i32; 2]);
                ok(call(libc::SYS_pipe2, &[told.as_mut_ptr() as usize, 0]));
                let child = fork();
                if child == 0 {
                    let mut script =
                        Script { random, model: self.model, fds: self.fds, forked: true };
                    // Until its parent has let go of this end.
                    let mut byte = 0u8;
                    call(libc::SYS_close, &[told[1] as usize]);
                    call(libc::SYS_close, &[self.fd(1 - side)]);
                    call(libc::SYS_read, &[told[0] as usize, &raw mut byte as usize, 1]);
                    end_with(|| script.send(side), how == 1);
                }
                ok(call(libc::SYS_close, &[self.fd(side)]));
                for fd in told {
                    ok(call(libc::SYS_close, &[fd as usize]));
                }
                status_of(child)
            }
        };
        self.model.shut[side].store(1, SeqCst);
        if !resets {
            self.drain(1 - side);
        }
        let begin = Instant::now();
        loop {
            let mut bytes = [0u8; 4096];
            let (base, len) = (bytes.as_mut_ptr() as usize, bytes.len());
            let done = call(libc::SYS_recvfrom, &[self.fd(1 - side), base, len, NOW, 0, 0]);
            match done {
                0 if resets => break,
                0 => {
                    assert_eq!(self.model.under_way(side), 0, "bytes are missing");
                    break;
                }
                AGAIN => assert!(begin.elapsed() < PATIENCE, "no end comes"),
                done if done < 0 => {
                    let reset = done == -(libc::ECONNRESET as isize);
                    assert!(resets && reset, "error {} at an end in order", -done);
                    break;
                }
                done => {
                    self.model.got[side].fetch_add(done as u64, SeqCst);
                    assert!(resets, "more than was sent");
                }
            }
        }
        ok(call(libc::SYS_close, &[self.fd(1 - side)]));
    }
}

fn zeroed<T>() -> T {
    // SAFETY: used for plain structures of the kernel's only.
    unsafe { core::mem::zeroed() }
}

fn fork() -> i32 {
    process::before_fork();
    // SAFETY: the child goes on with copies, and ends in `end_with`.
    let child = unsafe { libc::fork() };
    match child {
        0 => process::after_fork_in_child(),
        _ => process::after_fork_in_parent(),
    }
    assert!(child >= 0, "fork");
    child
}

/// All that a child does; then it ends, in order or not.
fn end_with(act: impl FnOnce(), dies: bool) -> ! {
    let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(act));
    // SAFETY: ends this process.
    unsafe {
        if done.is_ok() && dies {
            libc::kill(libc::getpid(), libc::SIGKILL);
        }
        call(libc::SYS_exit_group, &[done.is_err() as usize]);
        libc::_exit(2)
    }
}

/// The signal by which a child ended, or its status behind 256.
fn status_of(child: i32) -> i32 {
    let mut status = 0;
    // SAFETY: a child of ours.
    let waited = unsafe { libc::waitpid(child, &mut status, 0) };
    assert_eq!(waited, child);
    if libc::WIFSIGNALED(status) { libc::WTERMSIG(status) } else { libc::WEXITSTATUS(status) << 8 }
}

fn shared() -> &'static Model {
    let (read_write, shared) =
        (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_ANONYMOUS);
    // SAFETY: a fresh mapping, never unmapped, of zeros, which are a `Model`.
    unsafe {
        let page = libc::mmap(core::ptr::null_mut(), size_of::<Model>(), read_write, shared, -1, 0);
        assert_ne!(page, libc::MAP_FAILED);
        &*page.cast::<Model>()
    }
}

/// Each script has a process, and so tables of its own.
fn script(kind: Kind, seed: u64) -> u64 {
    let model = shared();
    // SAFETY: as in `fork`; ringlet has not started here.
    let child = unsafe { libc::fork() };
    if child == 0 {
        end_with(
            || {
                let mut config = Config::default();
                // Moved at once, by paths that change at random bytes; or moved after some messages, and staying.
                config.unforgiving = if seed.is_multiple_of(2) { seed + 1 } else { 0 };
                config.move_after = seed % 5;
                socket::start(config).expect("memory for tables");
                let fds = connect(kind);
                let mut script = Script { random: Random(seed), model, fds, forked: false };
                script.steps(STEPS);
                script.ends();
            },
            false,
        );
    }
    assert_eq!(status_of(child), 0, "{kind:?} by seed {seed}");
    model.moved.load(SeqCst)
}

fn scripts(kind: Kind) {
    let seeds = match std::env::var("SEED") {
        Ok(seed) => seed.parse().map(|seed: u64| seed..seed + 1).expect("a number"),
        Err(_) => 0..SCRIPTS,
    };
    let count = seeds.end - seeds.start;
    let moved: u64 = seeds.map(|seed| script(kind, seed)).sum();
    // (Some go back early, and those of processes that were killed stay where they were. It is more than half without.)
    assert!(moved > count * STEPS as u64 / 10, "{moved} steps of {count} scripts in the ring");
}

/// (Not by the tests' harness: a thread of its own may hold a lock of Rust's library at any moment, and a child by fork would wait for it.)
fn main() {
    for kind in [Kind::Tcp, Kind::Unix] {
        scripts(kind);
        println!("test {kind:?} ... ok");
    }
    println!("\ntest result: ok. 2 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out");
}
