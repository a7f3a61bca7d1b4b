//! Protocol stacks in the kernel, to compare with: a pipeline of the sender's processor, the link and the receiver's processor.

use crate::profile::Stack;

impl Stack {
    /// Sends messages of `size` bytes one behind the other; microseconds until the last one is received. A receiver that sleeps
    /// is woken for each message.
    fn send(&self, size: usize, messages: usize, sleeping: bool) -> f64 {
        let (mut sender, mut link, mut receiver) = (0.0f64, 0.0f64, 0.0f64);
        let copies = |bytes: usize, count: f64| bytes as f64 * count / self.copy_mb_s;
        for _ in 0..messages {
            let mut rest = size;
            loop {
                let bytes = rest.min(self.mtu_bytes);
                sender += self.send_us + copies(bytes, self.send_copies);
                let on_link = (bytes + self.header_bytes) as f64 / self.link_mb_s;
                link = link.max(sender) + on_link;
                let work = self.receive_us + copies(bytes, self.receive_copies);
                receiver = receiver.max(link + self.latency_us) + work;
                rest -= bytes;
                if rest == 0 {
                    break;
                }
            }
            receiver += if sleeping { self.wake_us } else { 0.0 };
        }
        receiver
    }

    /// Microseconds from `send` to the return of `recv`.
    pub fn transfer_us(&self, size: usize) -> f64 {
        self.send(size, 1, true)
    }

    pub fn throughput_mb_s(&self, size: usize) -> f64 {
        let messages = (1 << 20) / size + 10;
        (size * messages) as f64 / self.send(size, messages, false)
    }
}
