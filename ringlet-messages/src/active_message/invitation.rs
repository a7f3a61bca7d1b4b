//! How processes that a spawn function has started, on this host or another one, come to their launcher: by TCP, with a secret that is their job's.
//!
//! ```text
//!   process                            launcher
//!   secret, rank it wants or -1  -->
//!                                      waits until all have come
//!                                <--   its rank, how many there are, the environment of the launcher
//!   what follows is as by any process of a job (`job`)
//! ```

use ringlet_linux::sys;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// HOST:PORT,SECRET.
pub const ENVIRONMENT: &str = "RINGLET_AM_LAUNCHER";
/// In the place of the secret: it is the first line of the standard input, where nobody sees it in a list of processes.
const AT_INPUT: &str = "-";

pub type Secret = [u8; 16];
const SECRET_TEXT_BYTES: usize = 32;

/// Of the launcher's environment.
const ENVIRONMENT_MAX_BYTES: usize = 16 << 20;
/// Who it is.
pub const GREETING_BYTES: usize = size_of::<Secret>() + size_of::<i32>();
/// How long who comes may take to say who it is, and may take nothing of what it is told.
pub const GREETING_LIMIT: Duration = Duration::from_secs(10);
/// After so long without a word the other host is asked whether it lives.
const SILENCE_SECONDS: i32 = 30;
const ANY_RANK: i32 = -1;

pub struct Invitation {
    /// Of the launcher.
    address: String,
    secret: Secret,
}

/// What a process is told.
pub struct Place {
    pub rank: usize,
    pub size: usize,
    /// "NAME=VALUE", each ended by a zero.
    pub environment: Vec<u8>,
}

fn invalid(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

pub fn new_secret() -> io::Result<Secret> {
    let mut secret = Secret::default();
    let made = sys::random(&mut secret);
    made.then_some(secret).ok_or_else(|| io::Error::other("no random bytes"))
}

pub fn secret_to_text(secret: &Secret) -> String {
    secret.iter().map(|byte| format!("{byte:02x}")).collect()
}

pub fn secret_from_text(text: &str) -> Option<Secret> {
    let digits = text.as_bytes();
    let mut secret = Secret::default();
    if digits.len() != SECRET_TEXT_BYTES || !text.is_ascii() {
        return None;
    }
    for (byte, at) in secret.iter_mut().zip((0..SECRET_TEXT_BYTES).step_by(2)) {
        *byte = u8::from_str_radix(&text[at..at + 2], 16).ok()?;
    }
    Some(secret)
}

/// The invitation without its secret, and the secret: for who has another way for that.
pub fn apart(text: &str) -> Option<(String, &str)> {
    let (address, secret) = text.rsplit_once(',')?;
    (secret != AT_INPUT).then(|| (format!("{address},{AT_INPUT}"), secret))
}

impl Invitation {
    pub fn parse(text: &str) -> io::Result<Invitation> {
        let bad = || invalid("not what a launcher sets");
        let (address, secret) = text.rsplit_once(',').ok_or_else(bad)?;
        let line = (secret == AT_INPUT).then(first_line).transpose()?;
        let secret = secret_from_text(line.as_deref().unwrap_or(secret)).ok_or_else(bad)?;
        Ok(Invitation { address: address.to_owned(), secret })
    }

    /// Comes to the launcher, and waits until all others have.
    pub(super) fn accept(&self, wanted: Option<usize>) -> io::Result<(UnixStream, Place)> {
        let socket = TcpStream::connect(&self.address).map_err(|error| {
            let what = format!("cannot come to the launcher at {}: {error}", self.address);
            io::Error::new(error.kind(), what)
        })?;
        let mut socket = prepare(socket)?;
        let wanted = wanted.map_or(ANY_RANK, |rank| rank as i32);
        socket.write_all(&[&self.secret[..], &wanted.to_le_bytes()].concat())?;
        let sent_away = |error: io::Error| match error.kind() {
            io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset => {
                invalid("the launcher has ended, or has processes enough")
            }
            _ => error,
        };
        let mut words = [0; 3];
        for word in &mut words {
            *word = read_word(&mut socket).map_err(sent_away)? as usize;
        }
        let [rank, size, len] = words;
        if rank >= size || len > ENVIRONMENT_MAX_BYTES {
            return Err(invalid("not what a launcher says"));
        }
        let mut environment = vec![0; len];
        socket.read_exact(&mut environment).map_err(sent_away)?;
        Ok((socket, Place { rank, size, environment }))
    }
}

/// Of the standard input, and no byte more: what follows is the program's.
fn first_line() -> io::Result<String> {
    let mut input = std::fs::File::from(io::stdin().as_fd().try_clone_to_owned()?);
    let mut line = [0; SECRET_TEXT_BYTES + 1];
    let _ = input.read_exact(&mut line);
    let (line, end) = line.split_at(SECRET_TEXT_BYTES);
    let line = str::from_utf8(line).ok().filter(|_| end == b"\n");
    Ok(line.ok_or_else(|| invalid("no secret at the standard input"))?.to_owned())
}

fn read_word(from: &mut impl Read) -> io::Result<u32> {
    let mut word = [0; 4];
    from.read_exact(&mut word)?;
    Ok(u32::from_le_bytes(word))
}

/// All of it by then, however little comes at a time.
fn read_until(from: &mut UnixStream, mut to: &mut [u8], end: Instant) -> io::Result<()> {
    while !to.is_empty() {
        let left = end.checked_duration_since(Instant::now()).filter(|left| !left.is_zero());
        from.set_read_timeout(Some(left.ok_or(io::ErrorKind::TimedOut)?))?;
        match from.read(to) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => to = &mut to[count..],
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// KERNEL: a `UnixStream` reads, writes and shuts down whatever stream socket it has; so all of a job's are of one type.
fn prepare(socket: TcpStream) -> io::Result<UnixStream> {
    socket.set_nodelay(true)?;
    for (level, option, value) in [
        (libc::SOL_SOCKET, libc::SO_KEEPALIVE, 1),
        (libc::IPPROTO_TCP, libc::TCP_KEEPIDLE, SILENCE_SECONDS),
        (libc::IPPROTO_TCP, libc::TCP_KEEPINTVL, SILENCE_SECONDS / 3),
        (libc::IPPROTO_TCP, libc::TCP_KEEPCNT, 3),
    ] {
        #[allow(unsafe_code)]
        // SAFETY: an int, for options that are ints.
        let set = unsafe {
            libc::setsockopt(
                socket.as_raw_fd(),
                level,
                option,
                (&raw const value).cast(),
                size_of::<i32>() as u32,
            )
        };
        if set != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(UnixStream::from(OwnedFd::from(socket)))
}

/// For the launcher: who has come, and which rank it wants. An error for a stranger.
pub fn greet(socket: TcpStream, secret: &Secret) -> io::Result<(UnixStream, Option<usize>)> {
    let mut socket = prepare(socket)?;
    let mut greeting = [0; GREETING_BYTES];
    read_until(&mut socket, &mut greeting, Instant::now() + GREETING_LIMIT)?;
    let (theirs, mut wanted) = greeting.split_at(size_of::<Secret>());
    // (All of it is looked at, so that time does not tell how much is right.)
    if theirs.iter().zip(secret).fold(0, |differs, (one, other)| differs | (one ^ other)) != 0 {
        return Err(invalid("a stranger"));
    }
    let wanted = read_word(&mut wanted)? as i32;
    socket.set_read_timeout(None)?;
    let rank = usize::try_from(wanted).ok();
    if rank.is_none() && wanted != ANY_RANK {
        return Err(invalid("no rank"));
    }
    Ok((socket, rank))
}

/// For the launcher: all have come.
pub fn admit(socket: &mut UnixStream, place: &Place) -> io::Result<()> {
    let words = [place.rank, place.size, place.environment.len()];
    let mut message: Vec<u8> = words.iter().flat_map(|word| (*word as u32).to_le_bytes()).collect();
    message.extend(&place.environment);
    socket.set_write_timeout(Some(GREETING_LIMIT))?;
    socket.write_all(&message)?;
    socket.set_write_timeout(None)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    #[test]
    fn a_secret_is_a_text_and_back() {
        let secret = new_secret().unwrap();
        assert_eq!(secret_from_text(&secret_to_text(&secret)), Some(secret));
        for text in ["", "00", &"0g".repeat(16), &"é".repeat(16)] {
            assert_eq!(secret_from_text(text), None, "{text}");
        }
    }

    #[test]
    fn who_knows_the_secret_is_given_its_place() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let secret = new_secret().unwrap();
        let text = format!("{},{}", listener.local_addr().unwrap(), secret_to_text(&secret));
        let comes = std::thread::spawn(move || {
            let invitation = Invitation::parse(&text).unwrap();
            invitation.accept(Some(1)).map(|(_, place)| (place.rank, place.size, place.environment))
        });
        let (mut socket, wanted) = greet(listener.accept().unwrap().0, &secret).unwrap();
        assert_eq!(wanted, Some(1));
        let place = Place { rank: 1, size: 3, environment: b"A=b\0".to_vec() };
        admit(&mut socket, &place).unwrap();
        assert_eq!(comes.join().unwrap().unwrap(), (1, 3, b"A=b\0".to_vec()));
    }

    #[test]
    fn who_does_not_is_sent_away() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let [ours, other] = [new_secret().unwrap(), new_secret().unwrap()];
        let text = format!("{},{}", listener.local_addr().unwrap(), secret_to_text(&other));
        let comes =
            std::thread::spawn(move || Invitation::parse(&text).unwrap().accept(None).is_err());
        assert!(greet(listener.accept().unwrap().0, &ours).is_err());
        assert!(comes.join().unwrap());
        for text in ["", "localhost:1", "localhost:1,12", "localhost:1,"] {
            assert!(Invitation::parse(text).is_err(), "{text}");
        }
    }
}
