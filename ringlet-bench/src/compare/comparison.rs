//! What a file, or the command line, says is to be compared.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use regex::Regex;
use ringlet_programs::program;
use serde::{Deserialize, Serialize};

/// Words that stand for a pattern.
pub const TIME: &str = "time";
pub const CPU: &str = "cpu";
pub const SERVER_CPU: &str = "server-cpu";
pub const REQUESTS: &str = "requests";
/// What is compared.
#[derive(Clone, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Comparison {
    pub name: String,
    /// Programs without which it is skipped, and Debian's packages that have them.
    #[serde(default)]
    pub needs: Vec<String>,
    #[serde(default)]
    pub packages: String,
    /// Once, before the first run, on the kernel.
    #[serde(default)]
    pub build: Vec<String>,
    /// Before the server, on the kernel.
    #[serde(default)]
    pub prepare: Vec<String>,
    pub server: Option<String>,
    #[serde(default = "port")]
    pub ready: String,
    /// Between server and client, under ringlet if the client is.
    #[serde(default)]
    pub warm: Vec<String>,
    pub client: String,
    pub requests: Option<Requests>,
    #[serde(default)]
    pub figure: Vec<Figure>,
    /// Whether connections are to come into shared memory.
    #[serde(default = "yes")]
    pub moves: bool,
    /// The directory of the file that it stands in.
    #[serde(skip)]
    pub here: PathBuf,
}

/// How many the client makes.
#[derive(Clone, Deserialize, Serialize)]
#[serde(untagged)]
pub enum Requests {
    Number(f64),
    Pattern(String),
}

/// What it is compared by.
#[derive(Clone, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Figure {
    pub name: String,
    /// Its first group is a number in the client's output; or one of the words.
    pub pattern: String,
    #[serde(default)]
    pub unit: String,
    #[serde(default)]
    pub lower_is_better: bool,
    /// Ratios to the kernel that are wanted.
    pub at_least: Option<f64>,
    pub aim: Option<f64>,
}

pub fn port() -> String {
    "{port}".into()
}

fn yes() -> bool {
    true
}

/// What stands before the first comparison holds for all.
pub fn from_file(text: &str) -> Result<Vec<Comparison>> {
    let mut common: toml::Table = text.parse()?;
    let Some(toml::Value::Array(comparisons)) = common.remove("comparison") else {
        bail!("there is no [[comparison]]");
    };
    let with_common = |comparison: toml::Value| {
        let mut all = common.clone();
        all.extend(comparison.as_table().cloned().unwrap_or_default());
        let name = all.get("name").and_then(toml::Value::as_str).unwrap_or_default().to_owned();
        Comparison::deserialize(all).with_context(|| format!("[[comparison]] {name}"))
    };
    comparisons.into_iter().map(with_common).collect()
}

impl Comparison {
    /// What is missing without which it can't be run.
    pub fn lack(&self) -> Option<String> {
        let missing = self.needs.iter().find(|program| !is_there(program))?;
        let install = if self.packages.is_empty() {
            String::new()
        } else {
            format!(" (Debian: apt-get install {})", self.packages)
        };
        Some(format!("{}: skipped, {missing} is missing{install}", self.name))
    }

    /// Says what follows by itself, and finds what can't be before anything is run.
    pub fn complete(&mut self) -> Result<()> {
        if self.figure.is_empty() {
            let word = if self.requests.is_some() { REQUESTS } else { TIME };
            self.figure.push(Figure {
                name: word.into(),
                pattern: word.into(),
                unit: String::new(),
                lower_is_better: false,
                at_least: None,
                aim: None,
            });
        }
        for figure in &mut self.figure {
            let is_word = match figure.pattern.as_str() {
                TIME | CPU | SERVER_CPU => {
                    (figure.unit, figure.lower_is_better) = ("s".into(), true);
                    true
                }
                REQUESTS => {
                    ensure!(self.requests.is_some(), "how many requests there are is not said");
                    (figure.unit, figure.lower_is_better) = ("1/s".into(), false);
                    true
                }
                pattern => {
                    check(pattern)?;
                    false
                }
            };
            if is_word && figure.name.starts_with("figure") {
                figure.name.clone_from(&figure.pattern);
            }
        }
        match &self.requests {
            Some(Requests::Pattern(pattern)) => check(pattern)?,
            Some(Requests::Number(number)) => {
                ensure!(*number > 0.0, "{number} requests are none");
            }
            None => {}
        }
        if let Some(server) = self.server.as_ref().filter(|_| self.ready == port()) {
            let told = self.prepare.iter().chain([server]).any(|command| command.contains(&port()));
            ensure!(told, "{server} is not told of {{port}}: say otherwise when it is ready");
        }
        let commands = self.build.iter().chain(&self.prepare).chain(&self.server).chain(&self.warm);
        for command in commands.chain([&self.client, &self.ready]) {
            words(command, &Default::default())?;
        }
        Ok(())
    }
}

fn check(pattern: &str) -> Result<()> {
    let group = Regex::new(pattern)?.captures_len() > 1;
    ensure!(group, "{pattern} has no group that says where the number is, as in 'rate: ([0-9.]+)'");
    Ok(())
}

pub type Places = HashMap<&'static str, String>;

/// The words of a command, with {port} and the others in their places.
pub fn words(command: &str, places: &Places) -> Result<Vec<String>> {
    let words = shlex::split(command).with_context(|| format!("unbalanced quotes: {command}"))?;
    ensure!(!words.is_empty(), "an empty command");
    let filled = |word: String| {
        places.iter().fold(word, |word, (name, value)| word.replace(&format!("{{{name}}}"), value))
    };
    Ok(words.into_iter().map(filled).collect())
}

/// A program in PATH, or any path, in which * may stand for a directory.
pub fn is_there(needed: &str) -> bool {
    match needed.split_once("*/") {
        Some((before, after)) => {
            let mut entries = fs::read_dir(before).into_iter().flatten().flatten();
            entries.any(|entry| entry.path().join(after).exists())
        }
        None if needed.contains('/') => Path::new(needed).exists(),
        None => find(needed).is_some(),
    }
}

pub fn find(program: &str) -> Option<PathBuf> {
    program::find(program.as_ref(), std::env::var_os("PATH").as_deref()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn completed(text: &str) -> Result<Comparison> {
        let mut one: Comparison = toml::from_str(text)?;
        one.complete().map(|()| one)
    }

    #[test]
    fn what_is_not_said_follows_and_what_cannot_be_is_told() {
        let least = completed("name = 'a'\nclient = 'true'").unwrap();
        assert_eq!((&*least.figure[0].name, &*least.figure[0].unit), ("time", "s"));
        assert!(least.figure[0].lower_is_better && least.moves && least.ready == "{port}");
        let rate = completed("name = 'a'\nclient = 'true'\nrequests = 5").unwrap();
        assert_eq!((&*rate.figure[0].name, &*rate.figure[0].unit), ("requests", "1/s"));
        let wrong = |more: &str| {
            let text = format!("name = 'a'\nclient = 'true'\n{more}");
            format!("{:#}", completed(&text).err().expect(more))
        };
        assert!(wrong("figure = [{name = 'x', pattern = 'rate'}]").contains("no group"));
        assert!(wrong("figure = [{name = 'x', pattern = 'requests'}]").contains("not said"));
        assert!(wrong("figure = [{name = 'x', pattern = '('}]").contains("unclosed group"));
        assert!(wrong("server = \"a 'b {port}\"").contains("unbalanced"));
        assert!(wrong("server = 'sleep 9'").contains("not told of {port}"));
        assert!(wrong("requests = 0").contains("none"));
        assert!(wrong("sever = 'x'").contains("unknown field"));
    }

    #[test]
    fn words_are_filled_after_they_are_split() {
        let places = HashMap::from([("port", "5 6".to_owned())]);
        assert_eq!(words("a 'b c' --port={port}", &places).unwrap(), ["a", "b c", "--port=5 6"]);
        assert!(words("a 'b", &places).is_err() && words("", &places).is_err());
    }

    #[test]
    fn what_is_needed_is_a_program_or_a_path() {
        assert!(is_there("sh") && is_there("/usr/*/env") && is_there("/proc/self/stat"));
        assert!(!is_there("no-such-program") && !is_there("/usr/*/no-such-program"));
    }
}
