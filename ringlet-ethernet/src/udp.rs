//! A way to another host by UDP, for where there is no node service (ETHOS, which ETHOM was compared with): frames as datagrams.
//!
//! Only what comes from the peer's address and port is heard, as far as the network lets nobody else send by it. So each end has a random number, its
//! *cookie*, which only who gets what is sent to it knows: a greeting counts once it repeats the receiver's, and a frame if it has the sum of both
//! (so what an end has sent that was there before, and comes late, is none of this one's). Who can forge an address but does not see the answers is
//! no peer. Who sees what passes can read and forge all of it.
//!
//! ```text
//!   one end                        the other
//!   HELLO a, 0         -->                         (does it hear us?)
//!                      <--  HELLO b, a
//!   HELLO a, b         -->                         from here on pieces, with a + b, and each second a HELLO
//!   PROBE a + b        -->                         each second: one as long as the longest piece, and one of no bytes
//!                      <--  PROBED a + b           each that comes
//!   BYE a + b          -->                         it ends in order
//! ```
//!
//! The kernel knows what the path takes from whoever says that something is too long (ICMP). Some paths say nothing: so where short probes are
//! answered and three long ones are not, pieces become shorter, then as long as halving finds, and all is tried anew after ten minutes (RFC 8899).

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use ringlet_linux::{fd, sys};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SendFlags, SocketFlags, SocketType, bind, connect, send, socket_with, sockopt,
};

use crate::pieces::{HEADER, Joiner, LEAST, PIECE, Piece, VERSION, cut};

/// Where nothing else is said.
pub const PORT: u16 = 7472;
const HELLO: u8 = 2;
const BYE: u8 = 3;
const PROBE: u8 = 4;
const PROBED: u8 = 5;
/// So many long probes are not answered, and short ones are, before one of their length is taken to be too long.
const MISSED_MOST: u32 = 3;
/// What is tried first then: nearly all paths take it.
const BASE: usize = 1200;
/// Lengths that are not worth telling apart.
const NEAR: usize = 16;
/// Beats before what was too long is tried again.
const TRY_AGAIN_BEATS: u32 = 600;
/// A greeting goes so often; who has not been heard of for so many is gone. (They are counted, since who was held up himself has heard nothing
/// either; and none in which not all was looked at that had come, since the only port that could take it had no room.)
pub const BEAT: Duration = Duration::from_secs(1);
const SILENT_BEATS: u32 = 5;
/// What is sent at once: the kernel's limits for a buffer that it cuts itself.
const AT_ONCE_BYTES: usize = 65_000;
const AT_ONCE: usize = 64;
const RECEIVED_AT_ONCE: usize = 64 << 10;
/// Datagrams that are none of a message's, before who called has its turn.
const STRANGE_AT_ONCE: usize = 64;
/// KERNEL: a send that fails may say what an ICMP has said of an earlier one, and anybody can send that: this one did not go. So often that is believed.
const EARLIER_MOST: u32 = 3;
/// For what comes while this thread does something else.
const SOCKET_BYTES: usize = 4 << 20;

struct TooLong;

pub struct Udp {
    socket: OwnedFd,
    peer: SocketAddr,
    ends: [SocketAddr; 2],
    network: String,
    /// Of us, and of the peer (`far::Spans`).
    number: u64,
    their_number: u64,
    cookie: u64,
    /// The peer's, which has shown that it hears us.
    theirs: Option<u64>,
    /// Beats since it was heard; and was all that has come looked at since the last one?
    silent: u32,
    is_heard_out: bool,
    why: &'static str,
    /// Bytes of a piece: as the path takes them, as far as the kernel knows; of ours; and how many datagrams go at once.
    path: usize,
    each: usize,
    /// The probe that was sent; is it not answered, and one of no bytes is; in how many beats it was so; the shortest that was in vain, and beats since.
    probe: usize,
    awaits: bool,
    hears: bool,
    missed: u32,
    too_long: usize,
    age: u32,
    /// What a probe's answer changes, or its time, while a message is sent in part: that goes on as it was cut.
    is_taken: bool,
    is_due: bool,
    at_once: usize,
    can_cut: bool,
    message: u32,
    /// Datagrams of one message, and up to where they have gone.
    out: Vec<u8>,
    gone: usize,
    unsent: u64,
    joiner: Joiner,
    /// What has come, as the kernel has gathered it: datagrams of so many bytes, the last of which may be shorter; and what of it was looked at.
    came: Vec<u8>,
    datagram: usize,
    end: usize,
    at: usize,
}

impl Udp {
    pub fn open(
        (listen, peer): (Option<SocketAddr>, SocketAddr),
        network: &str,
        number: u64,
    ) -> Result<Udp> {
        let family = if peer.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let any: SocketAddr = if peer.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" }.parse()?;
        let own = listen.unwrap_or(SocketAddr::new(any.ip(), PORT));
        ensure!(
            own.is_ipv4() == peer.is_ipv4(),
            "{own} and {peer} are of two kinds: `--listen` takes an address of the peers' kind"
        );
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(family, SocketType::DGRAM, flags, None)?;
        // One for each peer: the kernel gives each what comes from that one.
        sockopt::set_socket_reuseport(&socket, true)?;
        bind(&socket, &own).with_context(|| format!("nothing can listen at {own}"))?;
        connect(&socket, &peer).with_context(|| format!("{peer} can't be sent to"))?;
        let own = SocketAddr::try_from(rustix::net::getsockname(&socket)?)?;
        // KERNEL: of two sockets with the same addresses one gets all.
        ensure!(
            others(own, peer)? < 2,
            "{peer} is reached from port {} already, for another network: this one needs another port, at both ends (`--listen`, `--peer`)",
            own.port()
        );
        // (As far as the system lets us.)
        let _ = sockopt::set_socket_recv_buffer_size_force(&socket, SOCKET_BYTES)
            .or_else(|_| sockopt::set_socket_recv_buffer_size(&socket, SOCKET_BYTES));
        let _ = sockopt::set_socket_send_buffer_size_force(&socket, SOCKET_BYTES)
            .or_else(|_| sockopt::set_socket_send_buffer_size(&socket, SOCKET_BYTES));
        let mut bits = [0; 8];
        ensure!(sys::random(&mut bits), "the kernel has no random bytes yet");
        let mut udp = Udp {
            socket,
            peer,
            ends: [own.min(peer), own.max(peer)],
            network: network.to_owned(),
            number,
            their_number: 0,
            // (0 says that none is known.)
            cookie: u64::from_ne_bytes(bits).max(1),
            theirs: None,
            silent: 0,
            is_heard_out: false,
            why: "it does not answer",
            path: 0,
            each: LEAST,
            probe: LEAST,
            awaits: false,
            hears: false,
            missed: 0,
            too_long: 0,
            age: 0,
            is_taken: false,
            is_due: false,
            at_once: 1,
            can_cut: true,
            message: 0,
            out: Vec::new(),
            gone: 0,
            unsent: 0,
            joiner: Joiner::default(),
            came: vec![0; RECEIVED_AT_ONCE],
            datagram: 0,
            end: 0,
            at: 0,
        };
        let (level, discover) = match peer {
            SocketAddr::V4(_) => (libc::IPPROTO_IP, libc::IP_MTU_DISCOVER),
            SocketAddr::V6(_) => (libc::IPPROTO_IPV6, libc::IPV6_MTU_DISCOVER),
        };
        // (Both have the same value.)
        udp.set(level, discover, libc::IP_PMTUDISC_DO)?;
        let _ = udp.set(libc::SOL_UDP, libc::UDP_GRO, 1);
        udp.measure();
        Ok(udp)
    }

    fn set(&self, level: i32, name: i32, value: i32) -> Result<()> {
        // SAFETY: an int, and its size.
        #[allow(unsafe_code)]
        let done = unsafe {
            libc::setsockopt(
                self.socket.as_raw_fd(),
                level,
                name,
                (&raw const value).cast(),
                size_of::<i32>() as u32,
            )
        };
        ensure!(done == 0, std::io::Error::last_os_error());
        Ok(())
    }

    /// How much the path takes, as far as the kernel knows.
    fn measure(&mut self) {
        let (level, name, heads) = match self.peer {
            SocketAddr::V4(_) => (libc::IPPROTO_IP, libc::IP_MTU, 20 + 8),
            SocketAddr::V6(_) => (libc::IPPROTO_IPV6, libc::IPV6_MTU, 40 + 8),
        };
        let (mut mtu, mut len) = (0i32, size_of::<i32>() as u32);
        // SAFETY: an int, and its size.
        #[allow(unsafe_code)]
        let done = unsafe {
            let (value, len) = ((&raw mut mtu).cast(), &raw mut len);
            libc::getsockopt(self.socket.as_raw_fd(), level, name, value, len)
        };
        let mtu = if done == 0 { mtu.max(0) as usize } else { 0 };
        let path = mtu.min(AT_ONCE_BYTES).saturating_sub(heads + HEADER).max(LEAST);
        if path != self.path {
            // (What was found out holds until longer ones have come through: who says that there is more may not know all of the way.)
            self.each = if self.path == 0 { path } else { self.each.min(path) };
            (self.path, self.too_long) = (path, path + 1);
            (self.probe, self.awaits, self.missed, self.age) = (path, false, 0, 0);
            self.is_taken = false;
        }
        self.go_by(self.each);
    }

    /// Pieces are so long from now on.
    fn go_by(&mut self, each: usize) {
        self.each = each;
        let at_once = AT_ONCE.min(AT_ONCE_BYTES / (HEADER + self.each)).max(1);
        let cuts = self.can_cut && at_once > 1 && self.cut_by_kernel(HEADER + self.each).is_ok();
        if !cuts {
            let _ = self.cut_by_kernel(0);
        }
        self.at_once = if cuts { at_once } else { 1 };
    }

    /// The kernel cuts what is sent into datagrams of so many bytes; 0: it does not.
    fn cut_by_kernel(&self, each: usize) -> Result<()> {
        self.set(libc::SOL_UDP, libc::UDP_SEGMENT, each as i32)
    }

    /// Tries whether the path takes pieces as long as ours, or longer ones.
    fn try_path(&mut self) {
        let Some(both) = self.both() else { return };
        self.missed += u32::from(self.awaits && self.hears);
        self.age += 1;
        // (Where the least is lost it is not for its length.)
        if self.missed >= MISSED_MOST && self.probe > LEAST {
            (self.too_long, self.age, self.missed) = (self.probe, 0, 0);
            if self.each >= self.too_long {
                self.go_by(if self.too_long > BASE { BASE } else { LEAST });
            }
            self.probe = self.each;
        } else if self.age > TRY_AGAIN_BEATS {
            (self.too_long, self.age, self.missed) = (self.path + 1, 0, 0);
            self.probe = self.path;
        }
        self.send_probe(both);
    }

    fn send_probe(&mut self, both: u64) {
        (self.awaits, self.hears) = (true, false);
        // (A long one is a datagram, however long those are that the kernel cuts.)
        let _ = self.cut_by_kernel(0);
        for bytes in [self.probe, 0] {
            self.say(&Piece::whole(PROBE, both, &vec![0; bytes]));
        }
        self.go_by(self.each);
    }

    fn hear_probed(&mut self, bytes: usize) {
        self.hears |= bytes == 0;
        if bytes == self.probe && self.awaits {
            (self.awaits, self.missed, self.is_taken) = (false, 0, true);
            self.tend_path();
        }
    }

    /// Between messages.
    fn tend_path(&mut self) {
        if self.gone < self.out.len() {
            return;
        }
        // The path took that probe; the next one is between it and what it did not take.
        if std::mem::take(&mut self.is_taken) {
            self.go_by(self.each.max(self.probe));
            self.probe = self.each;
            if self.too_long > self.each + NEAR
                && let Some(both) = self.both()
            {
                self.probe = self.each.midpoint(self.too_long);
                self.send_probe(both);
            }
        }
        // (A path may take more than it did.)
        if std::mem::take(&mut self.is_due) {
            self.measure();
            self.try_path();
        }
    }

    /// The addresses of both ends, which both know: in an order that is the same for both.
    pub fn ends(&self) -> [SocketAddr; 2] {
        self.ends
    }

    pub fn peer(&self) -> SocketAddr {
        self.peer
    }

    pub fn is_up(&self) -> bool {
        self.theirs.is_some()
    }

    /// Of the peer, if it is there.
    pub fn span(&self) -> Option<u64> {
        self.theirs.map(|_| self.their_number)
    }

    /// What pieces have: the sum of both cookies.
    fn both(&self) -> Option<u64> {
        self.theirs.map(|theirs| theirs.wrapping_add(self.cookie))
    }

    pub fn why(&self) -> Option<String> {
        (!self.is_up()).then(|| self.why.to_owned())
    }

    pub fn lost(&self) -> u64 {
        self.joiner.lost + self.unsent
    }

    fn greet(&mut self, echo: u64) {
        let numbers = [self.cookie, self.number].map(u64::to_le_bytes);
        let says = [numbers.as_flattened(), self.network.as_bytes()].concat();
        self.say(&Piece::whole(HELLO, echo, &says));
    }

    fn say(&self, piece: &Piece) {
        let mut datagram = Vec::new();
        piece.write(&mut datagram);
        for _ in 0..=EARLIER_MOST {
            match send(&self.socket, &datagram, SendFlags::NOSIGNAL) {
                Ok(_) | Err(Errno::AGAIN) => return,
                Err(_) => {}
            }
        }
    }

    /// Once each `BEAT`.
    pub fn beat(&mut self) {
        self.silent += u32::from(std::mem::take(&mut self.is_heard_out));
        if self.is_up() && self.silent > SILENT_BEATS {
            (self.theirs, self.why) = (None, "it is not heard any more");
        }
        self.greet(self.theirs.unwrap_or(0));
        self.is_due = true;
        self.tend_path();
    }

    /// Is all sent that was to be? If not, it goes on when the socket is writable.
    pub fn is_free(&mut self) -> bool {
        let went = self.go_on();
        self.unsent += u64::from(went.is_err());
        went.unwrap_or(true)
    }

    /// The same; or that the path takes no such datagrams any more, and how many it takes was measured.
    fn go_on(&mut self) -> Result<bool, TooLong> {
        let mut earlier = 0;
        while self.gone < self.out.len() {
            let end = self.out.len().min(self.gone + self.at_once * (HEADER + self.each));
            match send(&self.socket, &self.out[self.gone..end], SendFlags::NOSIGNAL) {
                Ok(_) => (self.gone, earlier) = (end, 0),
                Err(Errno::AGAIN) => return Ok(false),
                // (This device can't cut; or the path takes less than it did, as the next one is told.)
                Err(error @ (Errno::IO | Errno::INVAL)) if self.at_once > 1 => {
                    let _ = self.cut_by_kernel(0);
                    self.at_once = 1;
                    self.can_cut &= error != Errno::IO;
                    return self.go_on();
                }
                Err(Errno::MSGSIZE) => {
                    let each = self.each;
                    self.measure();
                    earlier += 1;
                    if self.each < each || earlier > EARLIER_MOST {
                        self.gone = self.out.len();
                        return Err(TooLong);
                    }
                }
                Err(_) if earlier < EARLIER_MOST => earlier += 1,
                Err(_) => {
                    self.gone = self.out.len();
                    self.unsent += 1;
                }
            }
        }
        Ok(true)
    }

    /// Sends a message. (`is_free` was true.)
    pub fn send(&mut self, message: &[u8]) {
        let Some(both) = self.both() else { return };
        self.tend_path();
        for _ in 0..2 {
            self.message = self.message.wrapping_add(1);
            self.out.clear();
            self.gone = 0;
            cut(message, self.message, both, self.each, &mut self.out);
            if self.go_on().is_ok() {
                return;
            }
        }
        self.unsent += 1;
    }

    /// The next message that has come whole. False: there is none yet.
    pub fn receive(&mut self, to: &mut Vec<u8>) -> bool {
        for _ in 0..STRANGE_AT_ONCE {
            if self.at == self.end && !self.fill() {
                return false;
            }
            let came = std::mem::take(&mut self.came);
            // (Each is read by itself: what says that it is longer takes nothing of the next one.)
            let one = self.at..self.end.min(self.at + self.datagram);
            self.at = one.end;
            let is_whole = match (Piece::read(&came[one.clone()]), &came[one]) {
                (Some(piece), _) => self.hear(&piece, to),
                (None, [HELLO, version, ..]) if *version != VERSION => {
                    self.why = "what answers speaks another version";
                    false
                }
                (None, _) => false,
            };
            self.came = came;
            if is_whole {
                return true;
            }
        }
        // (There may be more: who called comes again.)
        to.clear();
        true
    }

    fn fill(&mut self) -> bool {
        (self.at, self.end) = (0, 0);
        match receive_gathered(&self.socket, &mut self.came) {
            Ok((len, datagram)) => (self.end, self.datagram) = (len, datagram),
            // (Nobody listens there, the network says.)
            Err(libc::EINTR | libc::ECONNREFUSED) => {}
            Err(_) => {
                self.is_heard_out = true;
                return false;
            }
        }
        true
    }

    /// True if it made a message whole.
    fn hear(&mut self, piece: &Piece, to: &mut Vec<u8>) -> bool {
        let is_theirs = self.both() == Some(piece.cookie);
        match piece.kind {
            HELLO => self.hear_hello(piece.bytes, piece.cookie),
            PROBE if is_theirs => {
                let came =
                    Piece { all: piece.bytes.len(), ..Piece::whole(PROBED, piece.cookie, &[]) };
                self.say(&came);
            }
            PROBED if is_theirs => self.hear_probed(piece.all),
            BYE if is_theirs => (self.theirs, self.why) = (None, "it has ended"),
            PIECE if is_theirs => {
                if let Some(message) = self.joiner.take(piece) {
                    to.clear();
                    to.extend(message);
                    return true;
                }
            }
            _ => {}
        }
        false
    }

    fn hear_hello(&mut self, says: &[u8], echo: u64) {
        let Some(([cookie, number], network)) =
            says.split_first_chunk::<16>().map(|(two, rest)| {
                let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|nth| two[at + nth]));
                ([word(0), word(8)], rest)
            })
        else {
            return;
        };
        if network != self.network.as_bytes() {
            self.why = "what answers is of another network";
        } else if cookie == self.cookie {
            self.why = "it is this process itself";
        } else if echo != self.cookie {
            // It may be anybody: our answer goes to the peer's address, and what comes back shows whether it was the peer.
            self.greet(cookie);
        } else {
            (self.silent, self.their_number) = (0, number);
            if self.theirs.replace(cookie) != Some(cookie) {
                self.joiner.begin_anew();
                self.greet(cookie);
            }
        }
    }

    pub fn is_readable(&self) -> bool {
        fd::pending(self.socket.as_raw_fd(), libc::POLLIN) != 0
    }
}

/// So many bytes, and of how many each datagram is but the last; or an error's number.
fn receive_gathered(socket: &OwnedFd, to: &mut [u8]) -> Result<(usize, usize), i32> {
    let mut part = libc::iovec { iov_base: to.as_mut_ptr().cast(), iov_len: to.len() };
    let mut control = [0u64; 8];
    // SAFETY: plain data; a buffer and its length, and so of the control messages, which are aligned; one is read if the kernel has put it there.
    #[allow(unsafe_code)]
    unsafe {
        let mut message: libc::msghdr = std::mem::zeroed();
        (message.msg_iov, message.msg_iovlen) = (&raw mut part, 1);
        message.msg_control = control.as_mut_ptr().cast();
        message.msg_controllen = size_of_val(&control) as _;
        let len = libc::recvmsg(socket.as_raw_fd(), &raw mut message, 0);
        let Ok(len) = usize::try_from(len) else {
            return Err(std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO));
        };
        let head = libc::CMSG_FIRSTHDR(&raw const message);
        let is_gathered = !head.is_null()
            && ((*head).cmsg_level, (*head).cmsg_type) == (libc::SOL_UDP, libc::UDP_GRO);
        let each = if is_gathered { *libc::CMSG_DATA(head).cast::<i32>() as usize } else { len };
        Ok((len, each.max(1)))
    }
}

/// How many sockets of this network namespace, of whomever, have these addresses.
fn others(own: SocketAddr, peer: SocketAddr) -> Result<usize> {
    let table = if peer.is_ipv4() { "udp" } else { "udp6" };
    let path = format!("/proc/thread-self/net/{table}");
    let sockets = std::fs::read_to_string(&path).with_context(|| path)?;
    Ok(count_of(&sockets, own, peer))
}

fn count_of(sockets: &str, own: SocketAddr, peer: SocketAddr) -> usize {
    // (Words as they lie in memory.)
    let spelt = |address: SocketAddr| {
        let bytes = match address.ip() {
            IpAddr::V4(ip) => ip.octets().to_vec(),
            IpAddr::V6(ip) => ip.octets().to_vec(),
        };
        let words = bytes.as_chunks().0.iter().map(|word| u32::from_ne_bytes(*word));
        let words: String = words.map(|word| format!("{word:08X}")).collect();
        format!("{words}:{:04X}", address.port())
    };
    let both = format!(" {} {} ", spelt(own), spelt(peer));
    let ours = sockets.lines().filter(|line| line.contains(&both));
    // KERNEL: while others come and go it may list one twice. Its inode is its own.
    ours.filter_map(|line| line.split_whitespace().nth(9)).collect::<BTreeSet<_>>().len()
}

impl AsFd for Udp {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Drop for Udp {
    fn drop(&mut self) {
        if let Some(both) = self.both() {
            self.say(&Piece::whole(BYE, both, &[]));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(last: u8) -> SocketAddr {
        // (The process's number: another test's process has another.)
        let [high, low, ..] = std::process::id().to_be_bytes()[2..] else { unreachable!() };
        SocketAddr::from(([127, high, low, last], PORT))
    }

    fn take(udp: &mut Udp) -> usize {
        let mut bytes = Vec::new();
        (0..1000).take_while(|_| udp.receive(&mut bytes)).count()
    }

    /// Two ends that have met.
    fn pair(last: u8) -> [Udp; 2] {
        let open =
            |own, peer, number| Udp::open((Some(address(own)), address(peer)), "net", number);
        let mut ends = [open(last, last + 1, 1).unwrap(), open(last + 1, last, 2).unwrap()];
        // (What the kernel cuts comes here in one, and is one for `lose_longer_than`.)
        ends.iter_mut().for_each(|end| end.can_cut = false);
        beats(&mut ends, 3);
        assert!(ends.iter().all(Udp::is_up));
        ends
    }

    /// What comes and is longer is lost, and nobody says so.
    fn lose_longer_than(udp: &Udp, bytes: u32) {
        let step = |code: u32, jf, k| libc::sock_filter { code: code as u16, jt: 0, jf, k };
        let mut program = [
            step(libc::BPF_LD | libc::BPF_W | libc::BPF_LEN, 0, 0),
            step(libc::BPF_JMP | libc::BPF_JGT | libc::BPF_K, 1, bytes),
            step(libc::BPF_RET | libc::BPF_K, 0, 0),
            step(libc::BPF_RET | libc::BPF_K, 0, u32::MAX),
        ];
        let filter = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
        // SAFETY: a program, and its length; the kernel copies it.
        #[allow(unsafe_code)]
        let done = unsafe {
            let (fd, size) = (udp.socket.as_raw_fd(), size_of_val(&filter) as u32);
            let filter = (&raw const filter).cast();
            libc::setsockopt(fd, libc::SOL_SOCKET, libc::SO_ATTACH_FILTER, filter, size)
        };
        assert_eq!(done, 0);
    }

    fn beats([one, other]: &mut [Udp; 2], count: u32) {
        for _ in 0..count {
            one.beat();
            other.beat();
            // (So often that neither has an answer any more.)
            (0..32).for_each(|_| _ = take(one) + take(other));
        }
    }

    /// A path that takes less without a word is found out, and used as far as it goes; and so is one that takes more again.
    #[test]
    fn what_a_path_takes_is_found_out() {
        let (message, mut came) = (vec![7; 60_000], Vec::new());
        let mut both = pair(3);
        let path = both[0].each;
        assert!(path > 30_000);
        lose_longer_than(&both[1], 8 + 9_000);
        beats(&mut both, MISSED_MOST + 1);
        assert!((BASE..=9_000).contains(&both[0].each), "{}", both[0].each);
        beats(&mut both, 20 * (MISSED_MOST + 1));
        assert!((9_000 - HEADER - 2 * NEAR..=9_000 - HEADER).contains(&both[0].each));
        both[0].send(&message);
        assert!(both[1].receive(&mut came) && came == message);
        assert_eq!(both[1].each, path);
        // (And one that is held up answers no probe, long or short.)
        lose_longer_than(&both[1], 8 + 600);
        (0..4 * MISSED_MOST).for_each(|_| both[0].beat());
        assert!(both[0].each > BASE);
        beats(&mut both, 4 * (MISSED_MOST + 1));
        assert!((LEAST..=600 - HEADER).contains(&both[0].each), "{}", both[0].each);
        // Where nothing goes but what is very short, the least goes once it can, and more.
        lose_longer_than(&both[1], 8 + 100);
        beats(&mut both, 20 * (MISSED_MOST + 1));
        lose_longer_than(&both[1], 8 + 600);
        beats(&mut both, 20 * (MISSED_MOST + 1));
        assert!((600 - HEADER - 2 * NEAR..=600 - HEADER).contains(&both[0].each));
        lose_longer_than(&both[1], u32::MAX);
        beats(&mut both, TRY_AGAIN_BEATS + 20 * (MISSED_MOST + 1));
        assert!(both[0].each > path - 2 * NEAR);
    }

    /// What has come and has no room yet says that the peer is there; what was looked at does not.
    #[test]
    fn who_is_not_looked_at_is_not_gone() {
        let [mut one, mut other] = pair(1);
        other.send(&[7; 100]);
        (0..3 * SILENT_BEATS).for_each(|_| one.beat());
        assert!(one.is_up());
        assert!(take(&mut one) > 0);
        assert!(take(&mut one) == 0 && one.is_up());
        // (What anybody sends by its address is no word of it, though there be some at each beat.)
        let mut beats = |count| {
            for _ in 0..count {
                other.say(&Piece::whole(PIECE, 0, &[7; 100]));
                one.beat();
                take(&mut one);
            }
            one.is_up()
        };
        assert!(beats(SILENT_BEATS - 1) && !beats(2));
    }

    /// A message that is sent in part holds back what a probe's answer changes, and its time; the path is not taken for a shorter one.
    #[test]
    fn a_path_is_as_long_while_it_is_full() {
        let mut both = pair(5);
        let path = both[0].each;
        lose_longer_than(&both[1], 8 + 9_000);
        beats(&mut both, 20 * (MISSED_MOST + 1));
        let found = both[0].each;
        assert!((BASE..=9_000).contains(&found));
        lose_longer_than(&both[1], u32::MAX);
        // Free as a beat comes, and full again before the answer does.
        for _ in 0..4 * MISSED_MOST {
            both[0].beat();
            (both[0].out, both[0].gone) = (vec![0; 1], 0);
            (0..32).for_each(|_| both.iter_mut().for_each(|end| _ = take(end)));
            both[0].out.clear();
        }
        assert_eq!(both[0].each, found);
        // What has its time while it is full has it behind that.
        both[0].age = TRY_AGAIN_BEATS;
        both[0].out = vec![0; 1];
        both[0].beat();
        both[0].out.clear();
        for _ in 0..32 {
            both[0].send(&[7; 100]);
            both.iter_mut().for_each(|end| _ = take(end));
        }
        assert!(both[0].each > path - 2 * NEAR);
    }

    /// A path of which is said that it takes more is used so once it has taken that.
    #[test]
    fn what_a_path_is_said_to_take_is_tried_first() {
        let mut both = pair(7);
        let path = both[0].each;
        lose_longer_than(&both[1], 8 + 9_000);
        beats(&mut both, 20 * (MISSED_MOST + 1));
        let found = both[0].each;
        // (As if it had been said to take less.)
        both[0].path -= 1;
        both[0].beat();
        assert_eq!((both[0].path, both[0].each), (path, found));
        lose_longer_than(&both[1], u32::MAX);
        beats(&mut both, 2);
        assert_eq!(both[0].each, path);
    }

    /// What anybody sends by the peer's address, among its datagrams, is alone not heard.
    #[test]
    fn what_is_gathered_is_read_one_by_one() {
        let open = |own, peer, number| {
            Udp::open((Some(address(own)), address(peer)), "net", number).unwrap()
        };
        let mut ends = [open(11, 12, 1), open(12, 11, 2)];
        beats(&mut ends, 3);
        let [one, other] = &mut ends;
        let (message, mut came, each) = (vec![7; 3 * 4000], Vec::new(), 4000);
        let mut out = Vec::new();
        cut(&message, 1, one.both().unwrap(), each, &mut out);
        let mut lies = out[..HEADER + each].to_vec();
        lies[2..4].copy_from_slice(&u16::MAX.to_le_bytes());
        out.splice(HEADER + each..HEADER + each, lies);
        one.cut_by_kernel(HEADER + each).unwrap();
        send(&one.socket, &out, SendFlags::NOSIGNAL).unwrap();
        assert!(other.receive(&mut came) && came == message);
    }

    /// What the network says of an earlier datagram, or anybody in its name, takes nothing of what is sent then.
    #[test]
    fn what_is_said_of_earlier_ones_takes_nothing() {
        let Ok(raw) = socket_with(
            AddressFamily::INET,
            SocketType::RAW,
            SocketFlags::CLOEXEC,
            Some(rustix::net::ipproto::ICMP),
        ) else {
            return eprintln!("skipped: only root sends ICMP");
        };
        let mut both = pair(13);
        let [own, peer] = [&both[0].socket, &both[1].socket]
            .map(|end| SocketAddr::try_from(rustix::net::getsockname(end).unwrap()).unwrap());
        // A parameter problem; the protocol is not known there; something is too long, says who says of which length.
        let says = |kind: u8, code: u8| {
            let ip = |address: SocketAddr| match address.ip() {
                IpAddr::V4(ip) => ip.octets(),
                IpAddr::V6(_) => unreachable!(),
            };
            let mut icmp = vec![kind, code, 0, 0, 0, 0, 0xff, 0xff];
            icmp.extend([0x45, 0, 0, 36, 0, 0, 0x40, 0, 64, 17, 0, 0]);
            icmp.extend([ip(own), ip(peer)].concat());
            icmp.extend([own.port(), peer.port(), 16, 0].map(u16::to_be_bytes).as_flattened());
            icmp.extend([0; 8]);
            let words = icmp.chunks(2).map(|two| u32::from(two[0]) << 8 | u32::from(two[1]));
            let sum: u32 = words.sum();
            let sum = !((sum & 0xffff) + (sum >> 16)) as u16;
            icmp[2..4].copy_from_slice(&sum.to_be_bytes());
            rustix::net::sendto(&raw, &icmp, SendFlags::empty(), &own).unwrap();
        };
        for (kind, code) in [(12, 0), (3, 2), (3, 4)] {
            let (message, mut came) = (vec![7; 100], Vec::new());
            says(kind, code);
            let pending = fd::pending(both[0].socket.as_raw_fd(), libc::POLLIN);
            assert!(pending & libc::POLLERR != 0, "{kind} {code} is not heard of");
            both[0].send(&message);
            assert!(both[1].receive(&mut came) && came == message, "{kind} {code}");
            both[1].silent = 1;
            says(kind, code);
            both[0].beat();
            take(&mut both[1]);
            assert_eq!(both[1].silent, 0, "{kind} {code}");
            assert_eq!(both[0].lost(), 0);
        }
    }

    #[test]
    fn a_socket_that_is_listed_twice_is_one() {
        let line = |inode: &u32| {
            format!(
                " 1: 0100007F:1D30 0200007F:1D30 01 00000000:00000000 00:00000000 00000000 0 0 {inode} 2 0 0\n"
            )
        };
        let [own, peer] = [1, 2].map(|last| SocketAddr::from(([127, 0, 0, last], PORT)));
        let head = "  sl local_address rem_address st tx_queue rx_queue tr tm->when retrnsmt uid timeout inode ref pointer drops\n";
        let of = |inodes: &[u32]| inodes.iter().map(line).collect::<String>();
        let count = |inodes| count_of(&format!("{head}{}", of(inodes)), own, peer);
        assert_eq!((count(&[]), count(&[7, 7]), count(&[7, 8, 7])), (0, 1, 2));
        assert_eq!(count_of(&of(&[7, 8]), peer, own), 0);
    }

    #[test]
    fn who_speaks_another_version_is_told_of() {
        let open = |own, peer| Udp::open((Some(address(own)), address(peer)), "net", 1);
        let [mut one, other] = [open(9, 10).unwrap(), open(10, 9).unwrap()];
        let mut hello = Vec::new();
        Piece::whole(HELLO, 0, &[7; 19]).write(&mut hello);
        hello[1] += 1;
        send(&other.socket, &hello, SendFlags::NOSIGNAL).unwrap();
        take(&mut one);
        assert!(one.why().unwrap().contains("another version"));
    }
}
