//! A child's line to its parent: what it says, and the word that it waits for.

use std::io::{self, BufRead, Write};

use anyhow::{Context, Result, bail};

use super::spec::{Pause, Said};

/// What an ordinary program reads at once.
pub const BUFFER_BYTES: usize = 64 << 10;

pub fn say(said: &Said) -> Result<()> {
    let mut line = serde_json::to_vec(said)?;
    line.push(b'\n');
    let mut out = io::stdout().lock();
    out.write_all(&line).and_then(|()| out.flush()).context("the parent is gone")
}

/// Tells the parent where we are and waits for its word. It bounds the wait: it kills whoever is late.
pub fn pause(at: Pause) -> Result<()> {
    say(&Said::Paused(at))?;
    let mut word = String::new();
    if io::stdin().lock().read_line(&mut word).context("waiting for the parent")? == 0 {
        bail!("the parent is gone");
    }
    Ok(())
}
