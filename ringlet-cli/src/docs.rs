//! `ringlet completion` and `ringlet man`: generated from the same declarations that parse the command line and the
//! configuration.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use clap::Command;
use clap_complete::Shell;
use clap_mangen::Man;
use clap_mangen::roff::{Roff, bold, italic, roman};
use ringlet::config::{FILE_ENVIRONMENT, KEYS};

use ringlet_programs::settings::{LIBRARY_ENVIRONMENT, default, flag_name};

/// Print a completion script for a shell
#[derive(clap::Args)]
pub struct CompletionArgs {
    shell: Shell,
}

/// Print the manual page, or write all pages into a directory
#[derive(clap::Args)]
pub struct ManArgs {
    /// Where to write ringlet.1 and a page for each subcommand
    #[arg(value_hint = clap::ValueHint::DirPath)]
    directory: Option<PathBuf>,
}

pub fn completion(args: CompletionArgs, command: Command) -> anyhow::Result<ExitCode> {
    let mut command = visible(&command).version(env!("CARGO_PKG_VERSION")).propagate_version(true);
    clap_complete::generate(args.shell, &mut command, "ringlet", &mut std::io::stdout());
    Ok(ExitCode::SUCCESS)
}

/// The command without its hidden arguments, which the generators would offer.
fn visible(command: &Command) -> Command {
    Command::new(command.get_name().to_owned())
        .about(command.get_about().cloned().unwrap_or_default())
        .args(command.get_arguments().filter(|argument| !argument.is_hide_set()))
        .subcommands(command.get_subcommands().map(visible))
}

pub fn man(args: ManArgs, mut command: Command) -> anyhow::Result<ExitCode> {
    command = command.disable_help_subcommand(true);
    command.build();
    let Some(directory) = args.directory else {
        std::io::stdout().write_all(&main_page(command)?)?;
        return Ok(ExitCode::SUCCESS);
    };
    fs::create_dir_all(&directory)
        .with_context(|| format!("cannot make the directory {}", directory.display()))?;
    for subcommand in command.get_subcommands().filter(|each| !each.is_hide_set()) {
        let name = format!("ringlet-{}", subcommand.get_name());
        let man =
            Man::new(subcommand.clone().name(name.clone()).version(env!("CARGO_PKG_VERSION")));
        let mut page = Vec::new();
        man.render(&mut page)?;
        write(&directory.join(name + ".1"), &page)?;
    }
    write(&directory.join("ringlet.1"), &main_page(command)?)?;
    Ok(ExitCode::SUCCESS)
}

fn write(path: &Path, page: &[u8]) -> anyhow::Result<()> {
    fs::write(path, page).with_context(|| format!("cannot write {}", path.display()))
}

/// clap's page, and what clap cannot know: the configuration.
fn main_page(command: Command) -> std::io::Result<Vec<u8>> {
    let man = Man::new(command);
    let mut page = Vec::new();
    man.render_title(&mut page)?;
    man.render_name_section(&mut page)?;
    man.render_synopsis_section(&mut page)?;
    man.render_description_section(&mut page)?;
    man.render_options_section(&mut page)?;
    man.render_subcommands_section(&mut page)?;
    configuration().to_writer(&mut page)?;
    man.render_version_section(&mut page)?;
    Ok(page)
}

fn configuration() -> Roff {
    let mut roff = Roff::new();
    roff.control("SH", ["CONFIGURATION"]);
    roff.text([
        roman("A file holds lines of "),
        bold("name = value"),
        roman("; a # begins a comment. An environment variable overrides the file, and a flag of "),
        bold("ringlet run"),
        roman(" overrides both. A value that is wrong is skipped; "),
        bold("ringlet config"),
        roman(" tells each value and where it came from."),
    ]);
    for key in &KEYS {
        roff.control("TP", []);
        roff.text([bold(key.name), roman(" = "), italic(key.values().to_string())]);
        let unit = if key.unit.is_empty() { String::new() } else { format!(" {}", key.unit) };
        roff.text([roman(key.effect)]);
        roff.control("br", []);
        roff.text([
            roman(format!("Default: {}{unit}. Variable: ", default(key))),
            bold(key.environment),
            roman(". Flag: "),
            bold(format!("--{}", flag_name(key))),
            roman("."),
        ]);
    }
    roff.control("SH", ["ENVIRONMENT"]);
    roff.control("TP", []);
    roff.text([bold(FILE_ENVIRONMENT)]);
    roff.text([roman("The configuration file, instead of those under FILES.")]);
    roff.control("TP", []);
    roff.text([bold(LIBRARY_ENVIRONMENT)]);
    roff.text([roman("The library that is preloaded, instead of the one beside the command.")]);
    roff.control("SH", ["FILES"]);
    roff.text([
        italic("$XDG_CONFIG_HOME/ringlet.conf"),
        roman(" or "),
        italic("~/.config/ringlet.conf"),
        roman(", else "),
        italic("/etc/ringlet.conf"),
        roman(": only the first that is there is read."),
    ]);
    roff
}
