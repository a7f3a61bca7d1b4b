//! What a client asks of a blocking server, and how that obeys.

use std::io::{self, Read, Write};

use anyhow::{Context, Result, bail};

use super::talk::BUFFER_BYTES;
use super::wire::Wire;

/// What a client asks of a blocking server, sent in line before the messages that it speaks of. So both ends know where
/// a message ends, and an echo is sent only after its whole message has come (as NetPIPE does it).
pub struct Order {
    pub kind: OrderKind,
    pub size: u64,
    pub count: u64,
}

#[derive(Clone, Copy, PartialEq, Debug)]
pub enum OrderKind {
    /// Send each message back.
    Echo = 1,
    /// Read all messages as a stream and answer with one byte.
    Sink = 2,
}

impl Order {
    pub const BYTES: usize = 24;

    pub fn encode(&self) -> [u8; Order::BYTES] {
        let mut bytes = [0; Order::BYTES];
        bytes[..8].copy_from_slice(&(self.kind as u64).to_le_bytes());
        bytes[8..16].copy_from_slice(&self.size.to_le_bytes());
        bytes[16..].copy_from_slice(&self.count.to_le_bytes());
        bytes
    }

    pub fn decode(bytes: &[u8; Order::BYTES]) -> Option<Order> {
        let word = |at| u64::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        let kind = match word(0) {
            1 => OrderKind::Echo,
            2 => OrderKind::Sink,
            _ => return None,
        };
        Some(Order { kind, size: word(8), count: word(16) })
    }
}

pub fn obey_orders(mut wire: Wire) -> Result<()> {
    let mut buffer = vec![0; BUFFER_BYTES];
    let mut header = [0; Order::BYTES];
    loop {
        match wire.read_exact(&mut header) {
            Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
            other => other.context("reading an order")?,
        }
        let order = Order::decode(&header).context("bytes arrived out of order")?;
        let size = order.size as usize;
        match order.kind {
            OrderKind::Echo => {
                if buffer.len() < size {
                    buffer.resize(size, 0);
                }
                let message = &mut buffer[..size];
                for _ in 0..order.count {
                    wire.read_exact(message)?;
                    wire.write_all(message)?;
                }
            }
            OrderKind::Sink => {
                let mut left = order.size * order.count;
                while left > 0 {
                    let room = left.min(BUFFER_BYTES as u64) as usize;
                    match wire.read(&mut buffer[..room])? {
                        0 => bail!("the stream ended {left} bytes early"),
                        count => left -= count as u64,
                    }
                }
                wire.write_all(&[1])?;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders_read_back_as_written() {
        for kind in [OrderKind::Echo, OrderKind::Sink] {
            let bytes = Order { kind, size: 1 << 40, count: 7 }.encode();
            let order = Order::decode(&bytes).unwrap();
            assert_eq!((order.kind, order.size, order.count), (kind, 1 << 40, 7));
        }
        assert!(Order::decode(&[0; Order::BYTES]).is_none());
    }
}
