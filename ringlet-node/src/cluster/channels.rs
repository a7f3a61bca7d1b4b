//! A channel for the two ends of a connection between hosts: a plain TCP connection of their own, which both services make at the other node's port and
//! hand over. It outlives them, so that the ends can say to each other where they go on in the kernel (`ringlet`'s `socket::channel`).
//!
//! ```text
//!   connecting end's node                        accepting end's node
//!                       <-- Word::Meet: a token --   (expects it)
//!   dials: CALL, digest of the token  -->
//!                       <-- TAKEN
//! ```
//!
//! The token goes over TLS first, is good once, and for some seconds. What is said on a channel is as open to who sits between the hosts as the
//! connection itself.

use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use rustix::net::{RecvFlags, SendFlags, recv, send, sockopt};

pub const TOKEN_BYTES: usize = 16;
pub type Token = [u8; TOKEN_BYTES];
/// What is said for a token.
pub type Said = [u8; TOKEN_BYTES];

/// WHY not the token itself: the other node chooses it and says where its port is, and would have us say bytes of its choice to any service that we can
/// reach.
pub fn said_for(token: &Token) -> Said {
    let mut text = ring::digest::Context::new(&ring::digest::SHA256);
    text.update(b"ringlet: the token of a channel\n");
    text.update(token);
    let mut said = Said::default();
    said.copy_from_slice(&text.finish().as_ref()[..TOKEN_BYTES]);
    said
}

/// What stands before it. (TLS begins with 22.)
const CALL: [u8; 4] = *b"RLc2";
const CALL_BYTES: usize = CALL.len() + TOKEN_BYTES;
const TAKEN: u8 = b'+';

/// For so long a token is good, and a call may last.
pub const PATIENCE: Duration = Duration::from_secs(10);

/// Who has connected to our port, and not said what for.
pub struct Caller {
    pub stream: TcpStream,
    pub from: SocketAddr,
    pub began: Instant,
    /// Some of it has come, which makes it readable: it is looked at now and then.
    pub is_partial: bool,
}

pub enum Wants {
    NotYet,
    Tls,
    Channel(Said),
    Gone,
}

impl Caller {
    pub fn new(stream: TcpStream, from: SocketAddr) -> Caller {
        Caller { stream, from, began: Instant::now(), is_partial: false }
    }

    pub fn wants(&mut self) -> Wants {
        let mut bytes = [0; CALL_BYTES];
        match recv(&self.stream, &mut bytes, RecvFlags::PEEK | RecvFlags::DONTWAIT) {
            Err(rustix::io::Errno::AGAIN) => Wants::NotYet,
            Err(_) | Ok((0, _)) => Wants::Gone,
            Ok((n, _)) if bytes[..n.min(4)] != CALL[..n.min(4)] => Wants::Tls,
            Ok((CALL_BYTES, _)) => {
                let taken = recv(&self.stream, &mut bytes, RecvFlags::DONTWAIT);
                match (taken, bytes[CALL.len()..].try_into()) {
                    (Ok((CALL_BYTES, _)), Ok(said)) => Wants::Channel(said),
                    _ => Wants::Gone,
                }
            }
            Ok(_) => {
                self.is_partial = true;
                Wants::NotYet
            }
        }
    }

    /// It is what was expected. The stream, if it is told so.
    pub fn take(self) -> Option<TcpStream> {
        let said = send(&self.stream, &[TAKEN], SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
        (said == Ok(1)).then_some(self.stream).filter(keep)
    }
}

/// What we dial.
pub struct Call {
    pub stream: TcpStream,
    pub token: Token,
    began: Instant,
    said: bool,
}

impl Call {
    pub fn new(stream: TcpStream, token: Token) -> Call {
        Call { stream, token, began: Instant::now(), said: false }
    }

    pub fn is_late(&self) -> bool {
        self.began.elapsed() > PATIENCE
    }

    /// It has not said yet what it wants, which takes that it is connected.
    pub fn wants_write(&self) -> bool {
        !self.said
    }

    /// Goes on. `Some` when it is over: is it taken?
    pub fn go_on(&mut self) -> Option<bool> {
        if !self.said {
            let mut bytes = [0; CALL_BYTES];
            bytes[..CALL.len()].copy_from_slice(&CALL);
            bytes[CALL.len()..].copy_from_slice(&said_for(&self.token));
            // KERNEL: what could not be connected to tells why here.
            match send(&self.stream, &bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
                Ok(CALL_BYTES) => self.said = true,
                Err(rustix::io::Errno::AGAIN | rustix::io::Errno::NOTCONN) => return None,
                _ => return Some(false),
            }
        }
        let mut answer = [0];
        match recv(&self.stream, &mut answer, RecvFlags::DONTWAIT) {
            Err(rustix::io::Errno::AGAIN) => None,
            Ok((1, _)) => Some(answer[0] == TAKEN && keep(&self.stream)),
            _ => Some(false),
        }
    }
}

/// It says nothing for as long as all is well: what lies between the hosts is not to forget it.
fn keep(stream: &TcpStream) -> bool {
    const IDLE: Duration = Duration::from_secs(30);
    sockopt::set_socket_keepalive(stream, true).is_ok()
        && sockopt::set_tcp_keepidle(stream, IDLE).is_ok()
        && sockopt::set_tcp_keepintvl(stream, IDLE).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::net::TcpListener;

    fn pair() -> (TcpStream, Caller) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let dialled = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (stream, from) = listener.accept().unwrap();
        (dialled, Caller::new(stream, from))
    }

    fn wants(caller: &mut Caller) -> Wants {
        for _ in 0..10_000 {
            match caller.wants() {
                Wants::NotYet => std::thread::sleep(Duration::from_millis(1)),
                wants => return wants,
            }
        }
        Wants::NotYet
    }

    #[test]
    fn a_token_comes_and_is_taken_and_all_else_is_tls() {
        let (dialled, mut caller) = pair();
        let mut call = Call::new(dialled, [7; TOKEN_BYTES]);
        assert!(call.wants_write() && call.go_on().is_none() && !call.wants_write());
        let Wants::Channel(said) = wants(&mut caller) else { panic!("it calls") };
        assert_eq!(said, said_for(&[7; TOKEN_BYTES]));
        // (Nobody has us say what he chooses.)
        assert!(said != [7; TOKEN_BYTES] && said != said_for(&[8; TOKEN_BYTES]));
        let stream = caller.take().unwrap();
        let taken = (0..10_000).find_map(|_| {
            std::thread::sleep(Duration::from_millis(1));
            call.go_on()
        });
        assert_eq!(taken, Some(true));
        drop(stream);
        for (words, is_tls) in [(&b"\x16\x03\x01"[..], true), (b"GET /", true), (b"RLx", true)] {
            let (mut dialled, mut caller) = pair();
            dialled.write_all(words).unwrap();
            assert_eq!(matches!(wants(&mut caller), Wants::Tls), is_tls, "{words:?}");
        }
        let (mut dialled, mut caller) = pair();
        dialled.write_all(b"RLc2 and no more").unwrap();
        std::thread::sleep(Duration::from_millis(20));
        assert!(matches!(caller.wants(), Wants::NotYet));
        drop(dialled);
        // (What has come of it stays until it is read; the engine gives it up in time.)
        let (dialled, mut caller) = pair();
        drop(dialled);
        assert!(matches!(wants(&mut caller), Wants::Gone));
    }

    #[test]
    fn one_who_is_not_expected_is_not_taken() {
        let (dialled, caller) = pair();
        let mut call = Call::new(dialled, [8; TOKEN_BYTES]);
        assert!(call.go_on().is_none());
        drop(caller);
        let over = (0..10_000).find_map(|_| {
            std::thread::sleep(Duration::from_millis(1));
            call.go_on()
        });
        assert_eq!(over, Some(false));
    }
}
