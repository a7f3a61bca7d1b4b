//! The beginning of a connection: fixed newstyle, with structured replies, extended headers and base:allocation for who asks for them.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;

use ringlet_disk::{Reader, Source};

use crate::wire::{ALLOCATION, Agreed, REQUEST_MOST};

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
const STRUCTURED: u32 = 8;
const LIST_CONTEXTS: u32 = 9;
const SET_CONTEXTS: u32 = 10;
const EXTENDED: u32 = 11;

const ACK: u32 = 1;
const SERVER: u32 = 2;
const ABOUT: u32 = 3;
const CONTEXT: u32 = 4;
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
const CAN_READ_WHOLE: u16 = 1 << 7;
/// The disk's server has it open once, and nobody else keeps anything.
const CAN_MULTI_CONN: u16 = 1 << 8;
const CAN_FAST_ZERO: u16 = 1 << 11;

/// A name has 4 KiB at most, and so has what is asked of it; an option's bytes are some more.
const OPTION_MOST: u32 = 16 << 10;

const CONTEXT_NAME: &[u8] = b"base:allocation";
/// All of its namespace, where contexts are listed.
const NAMESPACE: &[u8] = b"base:";
const PREFERRED_BYTES: u32 = 4 << 10;

fn flags(disk: &Source, agreed: Agreed) -> u16 {
    let changes = CAN_TRIM | CAN_ZERO | CAN_FAST_ZERO;
    let more = if disk.is_read_only() { READ_ONLY } else { changes };
    let whole = if agreed.has_chunks() { CAN_READ_WHOLE } else { 0 };
    HAS_FLAGS | CAN_FLUSH | CAN_FUA | CAN_MULTI_CONN | more | whole
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

/// A string behind its length, and what follows it.
fn text(data: &[u8]) -> Option<(&[u8], &[u8])> {
    let (length, rest) = data.split_first_chunk::<4>()?;
    rest.split_at_checked(u32::from_be_bytes(*length) as usize)
}

/// Of which export contexts are asked for, and which: name, queries.
fn queried(data: &[u8]) -> Option<(&[u8], Vec<&[u8]>)> {
    let (name, data) = text(data)?;
    let (count, mut rest) = data.split_first_chunk::<4>()?;
    let mut queries = Vec::new();
    // (As many as are said, which may be more than there are.)
    for _ in 0..u32::from_be_bytes(*count) {
        let (query, behind) = text(rest)?;
        queries.push(query);
        rest = behind;
    }
    rest.is_empty().then_some((name, queries))
}

/// The disk's seat that is for this connection from now on, and how it is spoken there. `None`: its client wants no more.
pub fn handshake(
    mut stream: &UnixStream,
    disk: &Source,
    seat: impl Fn() -> anyhow::Result<Reader>,
) -> io::Result<Option<(Reader, Agreed)>> {
    let is_ours = |name: &[u8]| name.is_empty() || name == disk.name().as_bytes();
    let mut greeting = [MAGIC.to_be_bytes(), OPTION.to_be_bytes()].concat();
    greeting.extend(((FIXED | NO_ZEROES) as u16).to_be_bytes());
    stream.write_all(&greeting)?;
    let theirs = u32::from_be_bytes(word(&mut stream)?);
    if theirs & !(FIXED | NO_ZEROES) != 0 {
        return Ok(None);
    }
    let mut agreed = Agreed::default();
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
            // (Who has asked for extended headers may not begin so.)
            EXPORT_NAME if agreed.extended => return Ok(None),
            EXPORT_NAME => {
                // (Of what is wrong there is no answer.)
                let Some(Ok(reader)) = is_ours(&data).then(&seat) else {
                    return Ok(None);
                };
                let mut answer = disk.bytes().to_be_bytes().to_vec();
                answer.extend(flags(disk, agreed).to_be_bytes());
                answer.resize(if theirs & NO_ZEROES != 0 { 10 } else { 134 }, 0);
                stream.write_all(&answer)?;
                return Ok(Some((reader, agreed)));
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
                    let reader = if option == GO { Some(seat()) } else { None };
                    let reader = match reader.transpose() {
                        Ok(reader) => reader,
                        Err(error) => {
                            reply(stream, option, SHUTDOWN, format!("{error:#}").as_bytes())?;
                            continue;
                        }
                    };
                    let mut about = ABOUT_EXPORT.to_be_bytes().to_vec();
                    about.extend(disk.bytes().to_be_bytes());
                    about.extend(flags(disk, agreed).to_be_bytes());
                    reply(stream, option, ABOUT, &about)?;
                    if kinds.contains(&ABOUT_BLOCKS) {
                        let mut about = ABOUT_BLOCKS.to_be_bytes().to_vec();
                        for size in [1, PREFERRED_BYTES, REQUEST_MOST] {
                            about.extend(size.to_be_bytes());
                        }
                        reply(stream, option, ABOUT, &about)?;
                    }
                    reply(stream, option, ACK, &[])?;
                    if let Some(reader) = reader {
                        return Ok(Some((reader, agreed)));
                    }
                }
            },
            STRUCTURED if data.is_empty() => {
                agreed.structured = true;
                reply(stream, option, ACK, &[])?;
            }
            EXTENDED if data.is_empty() => {
                agreed.extended = true;
                reply(stream, option, ACK, &[])?;
            }
            LIST_CONTEXTS | SET_CONTEXTS => {
                let sets = option == SET_CONTEXTS;
                // (What was set before is not set any more, whatever comes of this.)
                agreed.allocation &= !sets;
                match queried(&data).filter(|_| agreed.has_chunks()) {
                    None => reply(stream, option, INVALID, &[])?,
                    Some((name, _)) if !is_ours(name) => {
                        reply(stream, option, UNKNOWN, b"another disk is shown here")?;
                    }
                    Some((_, queries)) => {
                        let lists_all = !sets && queries.is_empty();
                        let is_meant =
                            |query: &&[u8]| *query == CONTEXT_NAME || !sets && *query == NAMESPACE;
                        if lists_all || queries.iter().any(is_meant) {
                            agreed.allocation |= sets;
                            let number = if sets { ALLOCATION } else { 0 };
                            let context = [&number.to_be_bytes()[..], CONTEXT_NAME].concat();
                            reply(stream, option, CONTEXT, &context)?;
                        }
                        reply(stream, option, ACK, &[])?;
                    }
                }
            }
            LIST | STRUCTURED | EXTENDED => reply(stream, option, INVALID, &[])?,
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

    #[test]
    fn what_contexts_are_asked_for_is_whole() {
        let text = |text: &[u8]| [&(text.len() as u32).to_be_bytes()[..], text].concat();
        let words = |count: u32, queries: &[&[u8]]| {
            let mut data = [text(b"disk"), count.to_be_bytes().to_vec()].concat();
            data.extend(queries.iter().flat_map(|query| text(query)));
            data
        };
        let queries = [CONTEXT_NAME, b"", b"other:x"];
        let right = words(3, &queries);
        assert_eq!(queried(&right), Some((&b"disk"[..], queries.to_vec())));
        assert_eq!(queried(&words(0, &[])), Some((&b"disk"[..], vec![])));
        for length in 0..right.len() {
            assert_eq!(queried(&right[..length]), None, "{length}");
        }
        assert_eq!(queried(&[&right[..], b"x"].concat()), None);
        assert_eq!(queried(&words(2, &queries)), None);
        assert_eq!(queried(&words(u32::MAX, &queries)), None);
        assert_eq!(queried(&[255; 12]), None);
    }
}
