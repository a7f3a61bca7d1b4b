//! The adapter of a run with `--mirror` or `--hosts`: the process that keeps the two segments of each connection in step.

use std::io::{BufRead, BufReader, Error, Read};
use std::path::Path;
use std::process::{Child, Command, Stdio};

/// Cases that are not run over a mirror, by how their names begin, and why.
const LEFT_OUT: &[(&str, &str)] = &[
    (
        "readiness/in_order_beside_the_kernel",
        "what an adapter delivers is told behind what the kernel had meanwhile, though it was sent before",
    ),
    ("readiness/edges_in_order_beside_the_kernel", "likewise"),
    (
        "paths/urgent_behind_a_doorbell",
        "the place of an urgent byte is told to no adapter, so that one which another takes over may be data",
    ),
];

pub fn left_out(name: &str) -> Option<&'static str> {
    LEFT_OUT.iter().find(|(start, _)| name.starts_with(start)).map(|(_, why)| *why)
}

pub struct Adapter {
    pub number: u64,
    child: Child,
}

impl Adapter {
    /// By the command beside the library.
    pub fn start(library: &Path, seed: u32, hosts: bool) -> Result<Adapter, Error> {
        let number = u64::from(std::process::id()) << 32 | u64::from(seed) << 1 | 1;
        let mut command = Command::new(library.with_file_name("ringlet"));
        command.args(["adapter", "--number", &number.to_string(), "--seed", &seed.to_string()]);
        command.args(hosts.then_some("--hosts")).stderr(Stdio::piped());
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn()?;
        let mut line = String::new();
        let output = child.stdout.take().ok_or_else(|| Error::other("it has no output"))?;
        BufReader::new(output).read_line(&mut line)?;
        let adapter = Adapter { number, child };
        match line.trim() {
            "ready" => Ok(adapter),
            _ => Err(Error::other("it is not ready")),
        }
    }

    /// True if it was alive to the end, and had nothing to say.
    pub fn end(mut self) -> bool {
        let lives = matches!(self.child.try_wait(), Ok(None));
        if !lives {
            println!("the adapter has died");
        }
        let _ = self.child.kill();
        let mut said = String::new();
        let stderr = self.child.stderr.take();
        let heard = stderr.is_some_and(|mut stderr| stderr.read_to_string(&mut said).is_ok());
        print!("{said}");
        lives && heard && said.is_empty()
    }
}

impl Drop for Adapter {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
