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
//!   BYE a + b          -->                         it ends in order
//! ```

use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use ringlet_linux::{fd, sys};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, bind, connect, recv, send,
    socket_with, sockopt,
};

use crate::pieces::{HEADER, Joiner, LEAST, PIECE, Piece, cut};

/// Where nothing else is said.
pub const PORT: u16 = 7472;
const HELLO: u8 = 2;
const BYE: u8 = 3;
/// A greeting goes so often; who has not been heard of for so many is gone. (They are counted, since who was held up himself has heard nothing
/// either.)
pub const BEAT: Duration = Duration::from_secs(1);
const SILENT_BEATS: u32 = 5;
/// What is sent at once: the kernel's limits for a buffer that it cuts itself.
const AT_ONCE_BYTES: usize = 65_000;
const AT_ONCE: usize = 64;
const RECEIVED_AT_ONCE: usize = 64 << 10;
/// Datagrams that are none of a message's, before who called has its turn.
const STRANGE_AT_ONCE: usize = 64;
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
    /// Beats since it was heard.
    silent: u32,
    why: &'static str,
    /// Bytes of a piece, as the path takes them; and how many datagrams go at once.
    each: usize,
    at_once: usize,
    can_cut: bool,
    message: u32,
    /// Datagrams of one message, and up to where they have gone.
    out: Vec<u8>,
    gone: usize,
    unsent: u64,
    joiner: Joiner,
    /// What has come, and what of it was looked at.
    came: Vec<u8>,
    end: usize,
    at: usize,
}

impl Udp {
    pub fn open(
        listen: Option<SocketAddr>,
        peer: SocketAddr,
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
            why: "it does not answer",
            each: LEAST,
            at_once: 1,
            can_cut: true,
            message: 0,
            out: Vec::new(),
            gone: 0,
            unsent: 0,
            joiner: Joiner::default(),
            came: vec![0; RECEIVED_AT_ONCE],
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
        self.each = mtu.min(AT_ONCE_BYTES).saturating_sub(heads + HEADER).max(LEAST);
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
        // KERNEL: the first send hears that an earlier one was refused, and sends nothing.
        for _ in 0..2 {
            match send(&self.socket, &datagram, SendFlags::NOSIGNAL) {
                Err(Errno::CONNREFUSED) => {}
                _ => return,
            }
        }
    }

    /// Once each `BEAT`.
    pub fn beat(&mut self) {
        self.silent += 1;
        if self.is_up() && self.silent > SILENT_BEATS {
            (self.theirs, self.why) = (None, "it is not heard any more");
        }
        self.greet(self.theirs.unwrap_or(0));
        // (A path may take more than it did.)
        if self.gone == self.out.len() {
            self.measure();
        }
    }

    /// Is all sent that was to be? If not, it goes on when the socket is writable.
    pub fn is_free(&mut self) -> bool {
        let went = self.go_on();
        self.unsent += u64::from(went.is_err());
        went.unwrap_or(true)
    }

    /// The same; or that the path takes no such datagrams any more, and how many it takes was measured.
    fn go_on(&mut self) -> Result<bool, TooLong> {
        let step = self.at_once * (HEADER + self.each);
        while self.gone < self.out.len() {
            let end = self.out.len().min(self.gone + step);
            match send(&self.socket, &self.out[self.gone..end], SendFlags::NOSIGNAL) {
                Ok(_) => self.gone = end,
                Err(Errno::AGAIN) => return Ok(false),
                Err(Errno::INTR | Errno::CONNREFUSED) => {}
                // (This device can't cut; or the path takes less than it did, as the next one is told.)
                Err(error @ (Errno::IO | Errno::INVAL)) if self.at_once > 1 => {
                    let _ = self.cut_by_kernel(0);
                    self.at_once = 1;
                    self.can_cut &= error != Errno::IO;
                    return self.go_on();
                }
                Err(Errno::MSGSIZE) => {
                    self.gone = self.out.len();
                    self.measure();
                    return Err(TooLong);
                }
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
            let is_whole = match Piece::read(&came[self.at..self.end]) {
                Some((piece, rest)) => {
                    self.at = self.end - rest.len();
                    self.hear(&piece, to)
                }
                None => {
                    self.at = self.end;
                    false
                }
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
        match recv(&self.socket, &mut self.came[..], RecvFlags::empty()) {
            Ok((_, len)) => self.end = len,
            // (Nobody listens there, the network says.)
            Err(Errno::INTR | Errno::CONNREFUSED) => {}
            Err(_) => return false,
        }
        true
    }

    /// True if it made a message whole.
    fn hear(&mut self, piece: &Piece, to: &mut Vec<u8>) -> bool {
        let is_theirs = self.both() == Some(piece.cookie);
        match piece.kind {
            HELLO => self.hear_hello(piece.bytes, piece.cookie),
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

/// How many sockets of this network namespace, of whomever, have these addresses.
fn others(own: SocketAddr, peer: SocketAddr) -> Result<usize> {
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
    let table = if peer.is_ipv4() { "udp" } else { "udp6" };
    let path = format!("/proc/thread-self/net/{table}");
    let sockets = std::fs::read_to_string(&path).with_context(|| path)?;
    let both = format!(" {} {} ", spelt(own), spelt(peer));
    Ok(sockets.lines().filter(|line| line.contains(&both)).count())
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
