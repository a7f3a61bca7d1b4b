//! The beginning of a connection: fixed newstyle, without structured replies.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use ringlet_disk::{Reader, Source};

use crate::Export;
use crate::connection::REQUEST_MOST;

const MAGIC: u64 = u64::from_be_bytes(*b"NBDMAGIC");
const OPTION: u64 = u64::from_be_bytes(*b"IHAVEOPT");
const REPLY: u64 = 0x0003_e889_0455_65a9;

/// Of the handshake, by both.
const FIXED: u32 = 1;
const NO_ZEROES: u32 = 2;

const EXPORT_NAME: u32 = 1;
const ABORT: u32 = 2;
const LIST: u32 = 3;
const INFO: u32 = 6;
const GO: u32 = 7;

const ACK: u32 = 1;
const SERVER: u32 = 2;
const ABOUT: u32 = 3;
const UNSUPPORTED: u32 = 1 << 31 | 1;
const INVALID: u32 = 1 << 31 | 3;
const UNKNOWN: u32 = 1 << 31 | 6;
const SHUTDOWN: u32 = 1 << 31 | 7;

const ABOUT_EXPORT: u16 = 0;
const ABOUT_BLOCKS: u16 = 3;

/// Of the export.
const HAS_FLAGS: u16 = 1;
const READ_ONLY: u16 = 1 << 1;
const CAN_FLUSH: u16 = 1 << 2;
const CAN_FUA: u16 = 1 << 3;
const CAN_TRIM: u16 = 1 << 5;
const CAN_ZERO: u16 = 1 << 6;
/// The disk's server has it open once, and nobody else keeps anything.
const CAN_MULTI_CONN: u16 = 1 << 8;
const CAN_FAST_ZERO: u16 = 1 << 11;

/// A name has 4 KiB at most; an option's bytes are some more.
const OPTION_MOST: u32 = 8 << 10;
const PREFERRED_BYTES: u32 = 4 << 10;

fn flags(disk: &Source) -> u16 {
    let changes = CAN_TRIM | CAN_ZERO | CAN_FAST_ZERO;
    let more = if disk.is_read_only() { READ_ONLY } else { changes };
    HAS_FLAGS | CAN_FLUSH | CAN_FUA | CAN_MULTI_CONN | more
}

fn word<const BYTES: usize>(from: &mut impl Read) -> io::Result<[u8; BYTES]> {
    let mut bytes = [0; BYTES];
    from.read_exact(&mut bytes)?;
    Ok(bytes)
}

fn reply(mut to: &UnixStream, option: u32, kind: u32, data: &[u8]) -> io::Result<()> {
    let mut bytes = REPLY.to_be_bytes().to_vec();
    for word in [option, kind, data.len() as u32] {
        bytes.extend(word.to_be_bytes());
    }
    bytes.extend(data);
    to.write_all(&bytes)
}

/// Which export is asked for, and of what it is asked: name, kinds.
fn asked(mut data: &[u8]) -> Option<(&[u8], Vec<u16>)> {
    let (length, rest) = data.split_first_chunk::<4>()?;
    let name = rest.get(..u32::from_be_bytes(*length) as usize)?;
    data = &rest[name.len()..];
    let (count, kinds) = data.split_first_chunk::<2>()?;
    let is_whole = kinds.len() == 2 * usize::from(u16::from_be_bytes(*count));
    let kinds = kinds.chunks_exact(2).map(|kind| u16::from_be_bytes([kind[0], kind[1]]));
    is_whole.then(|| (name, kinds.collect()))
}

/// The disk's seat that is for this connection from now on. `None`: its client wants no more.
pub fn handshake(peer: &Arc<UnixStream>, export: &Export) -> io::Result<Option<Reader>> {
    let mut stream: &UnixStream = peer;
    let disk = &export.source;
    let is_ours = |name: &[u8]| name.is_empty() || name == disk.name().as_bytes();
    let mut greeting = [MAGIC.to_be_bytes(), OPTION.to_be_bytes()].concat();
    greeting.extend(((FIXED | NO_ZEROES) as u16).to_be_bytes());
    stream.write_all(&greeting)?;
    let theirs = u32::from_be_bytes(word(&mut stream)?);
    if theirs & !(FIXED | NO_ZEROES) != 0 {
        return Ok(None);
    }
    loop {
        if u64::from_be_bytes(word(&mut stream)?) != OPTION {
            return Ok(None);
        }
        let [option, length] = [word(&mut stream)?, word(&mut stream)?].map(u32::from_be_bytes);
        if length > OPTION_MOST {
            return Ok(None);
        }
        let mut data = vec![0; length as usize];
        stream.read_exact(&mut data)?;
        match option {
            EXPORT_NAME => {
                // (Of what is wrong there is no answer.)
                let Some(Ok(reader)) = is_ours(&data).then(|| export.reader(peer)) else {
                    return Ok(None);
                };
                let mut answer = disk.bytes().to_be_bytes().to_vec();
                answer.extend(flags(disk).to_be_bytes());
                answer.resize(if theirs & NO_ZEROES != 0 { 10 } else { 134 }, 0);
                stream.write_all(&answer)?;
                return Ok(Some(reader));
            }
            ABORT => {
                reply(stream, option, ACK, &[])?;
                return Ok(None);
            }
            LIST if data.is_empty() => {
                let name = disk.name().as_bytes();
                let listed = [&(name.len() as u32).to_be_bytes()[..], name].concat();
                reply(stream, option, SERVER, &listed)?;
                reply(stream, option, ACK, &[])?;
            }
            INFO | GO => match asked(&data) {
                None => reply(stream, option, INVALID, &[])?,
                Some((name, _)) if !is_ours(name) => {
                    reply(stream, option, UNKNOWN, b"another disk is shown here")?;
                }
                Some((_, kinds)) => {
                    let reader = if option == GO { Some(export.reader(peer)) } else { None };
                    let reader = match reader.transpose() {
                        Ok(reader) => reader,
                        Err(error) => {
                            reply(stream, option, SHUTDOWN, format!("{error:#}").as_bytes())?;
                            continue;
                        }
                    };
                    let mut about = ABOUT_EXPORT.to_be_bytes().to_vec();
                    about.extend(disk.bytes().to_be_bytes());
                    about.extend(flags(disk).to_be_bytes());
                    reply(stream, option, ABOUT, &about)?;
                    if kinds.contains(&ABOUT_BLOCKS) {
                        let mut about = ABOUT_BLOCKS.to_be_bytes().to_vec();
                        for size in [1, PREFERRED_BYTES, REQUEST_MOST] {
                            about.extend(size.to_be_bytes());
                        }
                        reply(stream, option, ABOUT, &about)?;
                    }
                    reply(stream, option, ACK, &[])?;
                    if reader.is_some() {
                        return Ok(reader);
                    }
                }
            },
            LIST => reply(stream, option, INVALID, &[])?,
            _ => reply(stream, option, UNSUPPORTED, &[])?,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_asked_is_whole() {
        let words = |name: &[u8], count: u16, kinds: &[u16]| {
            let mut data = (name.len() as u32).to_be_bytes().to_vec();
            data.extend(name);
            data.extend(count.to_be_bytes());
            data.extend(kinds.iter().flat_map(|kind| kind.to_be_bytes()));
            data
        };
        let right = words(b"disk", 2, &[0, 3]);
        assert_eq!(asked(&right), Some((&b"disk"[..], vec![0, 3])));
        for length in 0..right.len() {
            assert_eq!(asked(&right[..length]), None, "{length}");
        }
        assert_eq!(asked(&[&right[..], b"x"].concat()), None);
        assert_eq!(asked(&words(b"", 1, &[])), None);
        assert_eq!(asked(&[255; 12]), None);
    }
}
