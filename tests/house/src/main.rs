//! Counts what makes the sources hard to read and change. A count may not be above its ceiling, nor below it: a commit that lowers a count lowers its
//! ceiling (`ceilings.toml`), so none rises again.
//!
//! ```text
//!     cargo run -p house                  the table, and what is above its ceiling
//!     cargo run -p house -- "long files"  all that is counted under that name
//!     cargo run -p house -- --lower       writes ceilings that have fallen
//! ```

mod counts;
mod cycles;
mod sources;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, Result};
use serde::Deserialize;

/// What may be there today, and what is to be there.
#[derive(Deserialize)]
struct Ceiling {
    now: usize,
    goal: usize,
}

/// Of what is above its ceiling.
const SHOWN: usize = 20;

fn main() -> Result<ExitCode> {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let root = here.ancestors().nth(2).context("the workspace")?;
    let path = here.join("ceilings.toml");
    let text = fs::read_to_string(&path)?;
    let ceilings: BTreeMap<String, Ceiling> = toml::from_str(&text)?;
    let counts = counts::all(root, &sources::crates(root)?)?;
    let wanted: Option<String> = std::env::args().nth(1);
    if let Some(count) = counts.iter().find(|count| Some(count.name) == wanted.as_deref()) {
        count.found.iter().for_each(|found| println!("{found}"));
        return Ok(ExitCode::SUCCESS);
    }
    let lowers = wanted.as_deref() == Some("--lower");
    anyhow::ensure!(lowers || wanted.is_none(), "nothing is counted under that name");
    let (mut lowered, mut is_right) = (String::new(), true);
    println!("{:28} {:>6} {:>8} {:>6}", "", "now", "ceiling", "goal");
    for count in &counts {
        let ceiling =
            ceilings.get(count.name).with_context(|| format!("no ceiling of {}", count.name))?;
        let now = count.found.len();
        println!("{:28} {now:6} {:8} {:6}", count.name, ceiling.now, ceiling.goal);
        let least = now.min(ceiling.now);
        lowered += &format!("\"{}\" = {{ now = {least}, goal = {} }}\n", count.name, ceiling.goal);
        if now > ceiling.now {
            count.found.iter().take(SHOWN).for_each(|found| println!("    {found}"));
            println!(
                "    {} more than before (-- \"{}\" lists all): {}",
                now - ceiling.now,
                count.name,
                count.why
            );
            is_right = false;
        } else if now < ceiling.now && !lowers {
            println!("    its ceiling falls to {now}: run `cargo run -p house -- --lower`");
            is_right = false;
        }
    }
    if lowers {
        fs::write(&path, lowered)?;
    }
    Ok(if is_right { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
