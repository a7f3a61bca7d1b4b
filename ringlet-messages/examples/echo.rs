//! Questions and answers over ringlet, as ringlet-native/examples/echo.c, with which it talks as well:
//!
//!     cargo run --release -p ringlet --example echo -- serve NAME bytes|messages|locked
//!     cargo run --release -p ringlet --example echo -- call NAME bytes|messages|locked COUNT SIZE

use ringlet_messages::native::*;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let arguments: Vec<_> = arguments.iter().map(String::as_str).collect();
    match arguments[..] {
        ["serve", name, kind] => Ok(serve(name, options(kind)?)?),
        ["call", name, kind, count, size] => {
            Ok(call(name, options(kind)?, count.parse()?, size.parse()?)?)
        }
        _ => Err("usage: echo serve NAME KIND | echo call NAME KIND COUNT SIZE".into()),
    }
}

fn options(kind: &str) -> Result<Options, String> {
    let kind = match kind {
        "bytes" => Kind::Bytes,
        "messages" => Kind::Messages,
        "locked" => Kind::Locked,
        _ => return Err(format!("no kind {kind}")),
    };
    Ok(Options::new(kind))
}

fn serve(name: &str, options: Options) -> Result<(), Error> {
    let listener = Listener::bind(name, options)?;
    println!("serving");
    loop {
        let served = match listener.accept(None)? {
            Connection::Channel(channel) => serve_channel(channel),
            Connection::Locked(locked) => serve_locked(locked),
            _ => unreachable!("no such service was opened"),
        };
        // A caller that leaves, dies or misbehaves ends its own connection only.
        if let Err(error) = served
            && error != Error::Closed
        {
            eprintln!("connection ended: {error}");
        }
    }
}

/// The answer is the question with each byte turned around: read and written in place.
fn serve_channel(mut channel: Channel) -> Result<(), Error> {
    loop {
        let question = channel.receiver.peek(None)?;
        let len = question.len();
        let answer = channel.sender.reserve(len, None)?;
        for (to, from) in answer.bytes().iter().zip(question.bytes()) {
            to.store(!from.load(Relaxed), Relaxed);
        }
        answer.commit(len)?;
        question.release();
    }
}

fn serve_locked(mut locked: Locked) -> Result<(), Error> {
    loop {
        locked.serve(None, |question, answer| {
            for (to, from) in answer.iter().zip(question) {
                to.store(!from.load(Relaxed), Relaxed);
            }
            question.len()
        })?;
    }
}

fn call(name: &str, options: Options, count: usize, size: usize) -> Result<(), Error> {
    let mut connection = connect(name, options, Some(Duration::from_secs(10)))?;
    let mut answer = vec![0; size];
    for i in 0..count {
        let question: Vec<u8> = (0..size).map(|at| (i + at) as u8).collect();
        match &mut connection {
            Connection::Channel(channel) => ask(channel, &question, &mut answer)?,
            Connection::Locked(locked) => {
                locked.call(&question, &mut answer, None)?;
            }
            _ => unreachable!("that is no kind of ours"),
        }
        assert!(answer.iter().zip(&question).all(|(answer, asked)| *answer == !asked));
    }
    println!("{count} answers");
    Ok(())
}

fn ask(channel: &mut Channel, question: &[u8], answer: &mut [u8]) -> Result<(), Error> {
    let (mut sent, mut got) = (0, 0);
    while sent < question.len() {
        sent += channel.sender.send(&question[sent..], None)?;
    }
    while got < answer.len() {
        got += channel.receiver.receive(&mut answer[got..], None)?;
    }
    Ok(())
}
