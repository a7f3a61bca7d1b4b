//! Sums by remote stores, as ringlet-native/examples/region.c, with which it talks as well:
//!
//!     cargo run --release -p ringlet --example region -- serve NAME
//!     cargo run --release -p ringlet --example region -- call NAME COUNT SIZE

use ringlet_messages::native::*;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

/// Where the question's bytes begin, behind its length.
const BYTES_AT: usize = 64;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let arguments: Vec<_> = arguments.iter().map(String::as_str).collect();
    match arguments[..] {
        ["serve", name] => Ok(serve(name)?),
        ["call", name, count, size] => Ok(call(name, count.parse()?, size.parse()?)?),
        _ => Err("usage: region serve NAME | region call NAME COUNT SIZE".into()),
    }
}

fn serve(name: &str) -> Result<(), Error> {
    let listener = Listener::bind(name, Options::new(Kind::Region))?;
    println!("serving");
    loop {
        // A caller that leaves, dies or misbehaves ends its own connection only.
        match serve_one(listener.accept(None)?.region()?) {
            Err(Error::Closed) => {}
            Err(error) => eprintln!("connection ended: {error}"),
            Ok(()) => eprintln!("a question that can't be"),
        }
    }
}

/// The caller may change its question at any time, so each word of it is loaded once and checked.
fn serve_one(mut region: Region) -> Result<(), Error> {
    let mut question = vec![0; region.part_bytes()];
    for number in 1u64.. {
        region.wait(None)?;
        let len = region.local()[0].load(Relaxed);
        if len > (region.part_bytes() - BYTES_AT) as u64 {
            break;
        }
        let question = &mut question[..len as usize];
        region.get(BYTES_AT, question)?;
        let sum = question.iter().map(|byte| u64::from(*byte)).sum();
        region.remote()[0].store(number, Relaxed);
        region.remote()[1].store(sum, Relaxed);
        region.ring()?;
    }
    region.check()
}

fn call(name: &str, count: u64, size: usize) -> Result<(), Error> {
    let ten_seconds = Some(Duration::from_secs(10));
    let mut region = connect(name, Options::new(Kind::Region), ten_seconds)?.region()?;
    for number in 1..=count {
        let bytes: Vec<u8> = (0..size).map(|at| (number as usize + at) as u8).collect();
        region.put(BYTES_AT, &bytes)?;
        region.remote()[0].store(size as u64, Relaxed);
        region.ring()?;
        assert_eq!(region.wait(None)?, 1);
        let answer = [0, 1].map(|word: usize| region.local()[word].load(Relaxed));
        assert_eq!(answer, [number, bytes.iter().map(|byte| u64::from(*byte)).sum()]);
    }
    region.check()?;
    println!("{count} answers");
    Ok(())
}
