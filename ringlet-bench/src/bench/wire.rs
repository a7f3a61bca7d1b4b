//! Listening and dialling by the standard library; from then on a connection is a descriptor with `read` and `write`,
//! as in any C program. Nothing here knows about ringlet.

use std::fs::File;
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::spec::Family;

/// A connection. The standard library's `File` reads and writes any descriptor, so TCP and Unix run the same code.
pub type Wire = File;

pub enum Listener {
    Tcp(TcpListener),
    Unix(UnixListener),
}

impl Listener {
    /// On a port or an abstract name that nobody else has; returns it in the form that `dial` takes.
    pub fn bind(family: Family) -> io::Result<(Listener, String)> {
        match family {
            Family::Tcp => {
                let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
                let address = listener.local_addr()?.to_string();
                Ok((Listener::Tcp(listener), address))
            }
            Family::Unix => {
                let name = format!("ringlet-bench-{}", std::process::id());
                let listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(&name)?)?;
                Ok((Listener::Unix(listener), name))
            }
            Family::Udp => Err(io::ErrorKind::Unsupported.into()),
        }
    }

    /// On a port that nobody else has, of this address.
    pub fn bind_at(address: &str) -> io::Result<(Listener, String)> {
        let listener = TcpListener::bind((address, 0))?;
        let address = listener.local_addr()?.to_string();
        Ok((Listener::Tcp(listener), address))
    }

    pub fn accept(&self) -> io::Result<Wire> {
        Ok(match self {
            Listener::Tcp(listener) => OwnedFd::from(listener.accept()?.0),
            Listener::Unix(listener) => OwnedFd::from(listener.accept()?.0),
        }
        .into())
    }

    /// Accept a connection for small messages: without Nagle's delay, and non-blocking if asked.
    pub fn accept_for_messages(&self, nonblocking: bool) -> io::Result<Wire> {
        Ok(match self {
            Listener::Tcp(listener) => tuned(listener.accept()?.0, nonblocking)?,
            Listener::Unix(listener) => {
                let stream = listener.accept()?.0;
                stream.set_nonblocking(nonblocking)?;
                OwnedFd::from(stream)
            }
        }
        .into())
    }

    pub fn set_nonblocking(&self) -> io::Result<()> {
        match self {
            Listener::Tcp(listener) => listener.set_nonblocking(true),
            Listener::Unix(listener) => listener.set_nonblocking(true),
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Listener::Tcp(listener) => listener.as_fd(),
            Listener::Unix(listener) => listener.as_fd(),
        }
    }
}

pub fn dial(family: Family, address: &str) -> io::Result<Wire> {
    Ok(match family {
        Family::Tcp => OwnedFd::from(TcpStream::connect(address)?),
        Family::Unix => OwnedFd::from(dial_unix(address)?),
        Family::Udp => return Err(io::ErrorKind::Unsupported.into()),
    }
    .into())
}

pub fn dial_for_messages(family: Family, address: &str, nonblocking: bool) -> io::Result<Wire> {
    Ok(match family {
        Family::Tcp => tuned(TcpStream::connect(address)?, nonblocking)?,
        Family::Unix => {
            let stream = dial_unix(address)?;
            stream.set_nonblocking(nonblocking)?;
            OwnedFd::from(stream)
        }
        Family::Udp => return Err(io::ErrorKind::Unsupported.into()),
    }
    .into())
}

fn dial_unix(name: &str) -> io::Result<UnixStream> {
    UnixStream::connect_addr(&SocketAddr::from_abstract_name(name)?)
}

fn tuned(stream: TcpStream, nonblocking: bool) -> io::Result<OwnedFd> {
    stream.set_nodelay(true)?;
    stream.set_nonblocking(nonblocking)?;
    Ok(stream.into())
}

/// `write_all` for a non-blocking wire: waits for room where there is none.
pub fn write_all_waiting(mut wire: &Wire, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match wire.write(bytes) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(count) => bytes = &bytes[count..],
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                poll(&mut [PollFd::new(wire.as_fd(), PollFlags::POLLOUT)], PollTimeout::NONE)?;
            }
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// What is there now: `Some(0)` is the end, None is nothing yet.
pub fn read_now(mut wire: &Wire, buffer: &mut [u8]) -> io::Result<Option<usize>> {
    match wire.read(buffer) {
        Ok(count) => Ok(Some(count)),
        Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {
            Ok(None)
        }
        Err(e) => Err(e),
    }
}
