//! One connection to another node: TLS over a socket that never blocks, and frames in it, each with a head of its length and kind. What comes from the
//! network is bounded in size, what lies here for it too.

use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};

use ipnet::IpNet;
use rustls::pki_types::ServerName;
use rustls::{CertificateError, ClientConnection, Connection, ServerConnection};
use serde::{Deserialize, Serialize};

use super::channels::Token;
use super::identity::{self, Identity};
use super::{PASS_BYTES, QUEUE_BYTES, Session};
use crate::notes::Pair;

/// The length of what follows the length, 32 bits, little endian; and the kind.
pub const HEAD_BYTES: usize = 5;
pub const WORD: u8 = 0;
pub const PASSED: u8 = 1;
pub const WORD_BYTES: usize = 1024;
/// Records that are taken from one node at a time.
const READS_AT_ONCE: usize = 16;
/// Words that wait for who does not read, besides what is passed.
const WORDS_WAIT_BYTES: usize = 64 << 10;

pub const VERSION: u32 = 5;

/// One end of a connection between two hosts, as the service of that host tells the other one.
#[derive(Serialize, Deserialize, Clone, PartialEq, Eq, Debug)]
pub struct End {
    pub pair: Pair,
    pub accepted: bool,
    pub user: Option<u32>,
    pub group: String,
    /// The largest ring that its node carries.
    pub ring_bytes: u64,
}

/// How they are to meet: the accepting end, the number of their lane in this session, the token of their channel, and the size of a ring.
#[derive(Serialize, Deserialize, Clone, PartialEq, Eq, Debug)]
pub struct Meet {
    pub end: End,
    pub lane: u32,
    pub token: Token,
    pub ring_bytes: u64,
}

/// Who calls which service, by which lane.
#[derive(Serialize, Deserialize, Clone, PartialEq, Eq, Debug)]
pub struct Called {
    pub lane: u32,
    pub service: String,
    pub user: Option<u32>,
    pub group: String,
}

/// Who it is, and where it listens (an address that is not specified is the one that it comes from); and whether it only wants to hear of others.
#[derive(Serialize, Deserialize, Clone, PartialEq, Eq, Debug)]
pub struct Hello {
    pub version: u32,
    pub node: String,
    pub incarnation: u64,
    pub listen: SocketAddr,
    pub introduces: bool,
}

/// What services say to each other.
#[derive(Serialize, Deserialize, Clone, PartialEq, Eq, Debug)]
pub enum Word {
    /// The first one, of both.
    Hello(Hello),
    /// In an open cluster: some of the nodes that there are, and where they listen; and whether these are all for now.
    Nodes {
        nodes: Vec<(String, SocketAddr)>,
        last: bool,
    },
    Beat(u64),
    /// The answer to a beat.
    Echo(u64),
    /// This end has come: is its far end there?
    Seek(End),
    /// The far end of one that was sought; and whether the policy there lets the two meet.
    Here(End, bool),
    /// The accepting end's node has decided that the two meet.
    Meet(Meet),
    /// They don't, for this reason (`ringlet::reasons`), that node says of its own end of this pair.
    Apart(Pair, u32),
    /// A program calls a service of the native library's; and the answer: 0, and who offers it, or the reason why not.
    Call(Called),
    Answer {
        lane: u32,
        reason: u32,
        user: Option<u32>,
        group: String,
    },
    /// It ends in order, and will not be missed.
    Leave,
}

#[derive(PartialEq, Eq, Debug)]
pub enum Frame {
    Word(Word),
    Passed(Vec<u8>),
}

/// Why a connection ends: a code to count by, and what is to be read.
#[derive(Debug)]
pub struct Cause {
    pub code: &'static str,
    pub about: String,
}

pub fn cause(code: &'static str, about: impl ToString) -> Cause {
    Cause { code, about: about.to_string() }
}

pub struct Link {
    pub stream: TcpStream,
    tls: Connection,
    input: Vec<u8>,
    output: VecDeque<u8>,
}

impl Link {
    /// To the node of this name, which has to prove it.
    pub fn dial(stream: TcpStream, identity: &Identity, node: &str) -> Result<Link, Cause> {
        let name =
            ServerName::try_from(node.to_owned()).map_err(|error| cause("wrong-name", error))?;
        let tls = ClientConnection::new(identity.dials.clone(), name).map_err(of_tls)?;
        Ok(Link::new(stream, tls.into()))
    }

    pub fn accept(stream: TcpStream, identity: &Identity) -> Result<Link, Cause> {
        Ok(Link::new(
            stream,
            ServerConnection::new(identity.accepts.clone()).map_err(of_tls)?.into(),
        ))
    }

    fn new(stream: TcpStream, mut tls: Connection) -> Link {
        tls.set_buffer_limit(Some(64 << 10));
        Link { stream, tls, input: Vec::new(), output: VecDeque::new() }
    }

    pub fn is_of(&self, node: &str) -> bool {
        let chain = self.tls.peer_certificates();
        chain
            .and_then(|chain| chain.first())
            .is_some_and(|certificate| identity::is_of(certificate, node))
    }

    /// That its certificate has.
    pub fn subnets(&self) -> Vec<IpNet> {
        let chain = self.tls.peer_certificates();
        chain.and_then(|chain| chain.first()).map(identity::subnets_of).unwrap_or_default()
    }

    pub fn session(&self) -> Result<Session, Cause> {
        self.tls
            .export_keying_material(Session::default(), b"EXPORTER-ringlet-session", None)
            .map_err(of_tls)
    }

    /// Bytes that wait for the other node to read.
    pub fn waiting(&self) -> usize {
        self.output.len()
    }

    pub fn wants_write(&self) -> bool {
        !self.output.is_empty() || self.tls.wants_write()
    }

    pub fn say(&mut self, word: &Word) -> Result<(), Cause> {
        let body = serde_json::to_vec(word).map_err(|error| cause("garbage", error))?;
        if self.output.len() + body.len() > QUEUE_BYTES + WORDS_WAIT_BYTES {
            return Err(cause("too-slow", "it does not read what it is told"));
        }
        self.put(WORD, &body);
        Ok(())
    }

    pub fn put(&mut self, kind: u8, body: &[u8]) {
        self.output.extend((body.len() as u32 + 1).to_le_bytes());
        self.output.push_back(kind);
        self.output.extend(body);
    }

    /// Sends what can be sent now.
    pub fn write(&mut self) -> Result<(), Cause> {
        loop {
            // (Before the handshake is done nothing is taken.)
            while !self.tls.is_handshaking() && !self.output.is_empty() {
                let taken = self.tls.writer().write(self.output.as_slices().0).unwrap_or(0);
                self.output.drain(..taken);
                if taken == 0 {
                    break;
                }
            }
            if !self.tls.wants_write() {
                return Ok(());
            }
            match self.tls.write_tls(&mut self.stream) {
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(cause("lost", error)),
            }
        }
    }

    /// Takes what has come: whole frames into `frames`, also those before an end.
    pub fn read(&mut self, frames: &mut Vec<Frame>) -> Result<(), Cause> {
        for _ in 0..READS_AT_ONCE {
            let ended = match self.tls.read_tls(&mut self.stream) {
                Ok(count) => count == 0,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => return Err(cause("lost", error)),
            };
            let state = match self.tls.process_new_packets() {
                Ok(state) => state,
                Err(error) => {
                    // The other is told why, if it hears it.
                    let _ = self.tls.write_tls(&mut self.stream);
                    return Err(of_tls(error));
                }
            };
            let had = self.input.len();
            self.input.resize(had + state.plaintext_bytes_to_read(), 0);
            self.tls
                .reader()
                .read_exact(&mut self.input[had..])
                .map_err(|error| cause("lost", error))?;
            self.take_frames(frames)?;
            if ended || state.peer_has_closed() {
                return Err(cause("lost", "it has closed the connection"));
            }
        }
        Ok(())
    }

    fn take_frames(&mut self, frames: &mut Vec<Frame>) -> Result<(), Cause> {
        let mut rest = &self.input[..];
        while let Some((head, body)) = rest.split_at_checked(HEAD_BYTES) {
            let length = u32::from_le_bytes([head[0], head[1], head[2], head[3]]) as usize;
            let limit = if head[4] == WORD { WORD_BYTES } else { PASS_BYTES };
            if length == 0 || length - 1 > limit {
                return Err(cause("too-large", format!("a frame of {length} bytes")));
            }
            let Some((body, after)) = body.split_at_checked(length - 1) else { break };
            frames.push(match head[4] {
                WORD => Frame::Word(
                    serde_json::from_slice(body).map_err(|error| cause("garbage", error))?,
                ),
                PASSED => Frame::Passed(body.to_vec()),
                kind => return Err(cause("garbage", format!("a frame of kind {kind}"))),
            });
            rest = after;
        }
        let taken = self.input.len() - rest.len();
        self.input.drain(..taken);
        Ok(())
    }
}

fn of_tls(error: rustls::Error) -> Cause {
    use rustls::Error::{
        AlertReceived, InvalidCertificate, InvalidMessage, NoCertificatesPresented,
    };
    let code = match &error {
        InvalidCertificate(CertificateError::Expired | CertificateError::ExpiredContext { .. }) => {
            "expired"
        }
        InvalidCertificate(
            CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
        ) => "wrong-name",
        InvalidCertificate(_) => "wrong-ca",
        NoCertificatesPresented => "no-certificate",
        InvalidMessage(_) => "not-tls",
        AlertReceived(_) => "refused-by-it",
        _ => "tls",
    };
    cause(code, error)
}
