//! Many senders, one receiver, as ringlet-native/examples/mailbox.c, with which it talks as well:
//!
//!     cargo run --release -p ringlet --example mailbox -- collect NAME COUNT
//!     cargo run --release -p ringlet --example mailbox -- tell NAME TEXT COUNT

use ringlet_messages::native::*;
use std::time::Duration;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let arguments: Vec<_> = arguments.iter().map(String::as_str).collect();
    let options = Options::new(Kind::Mailbox);
    match arguments[..] {
        ["collect", name, count] => {
            let mut mailbox = Mailbox::bind(name, options)?;
            println!("collecting");
            for _ in 0..count.parse()? {
                let message = mailbox.peek(None)?;
                let text = message.to_vec();
                message.release();
                println!("{} {}", mailbox.last_sender().0, String::from_utf8_lossy(&text));
            }
        }
        ["tell", name, text, count] => {
            let connection = connect(name, options, Some(Duration::from_secs(10)))?;
            let mut sender = connection.sender()?;
            for i in 0..count.parse::<usize>()? {
                sender.send(format!("{text} {i}").as_bytes(), None)?;
            }
        }
        _ => return Err("usage: mailbox collect NAME COUNT | mailbox tell NAME TEXT COUNT".into()),
    }
    Ok(())
}
