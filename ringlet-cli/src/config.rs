//! `ringlet config`: every value in force, and where it came from.

use std::process::ExitCode;

use ringlet::config::{Config, KEYS, Key};
use serde::Serialize;

use ringlet_programs::processes;
use ringlet_programs::settings::{Flags, Settings, flag_name, or_none};
use ringlet_programs::table;

/// Show each setting, its value, and where that came from
///
/// With flags, shows what `ringlet run` with the same flags would use.
#[derive(clap::Args)]
#[command(after_help = "Exit status: 0, or 1 if a file or a variable has errors.")]
pub struct ConfigArgs {
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    flags: Flags,
}

#[derive(Serialize)]
struct Report {
    file: Option<String>,
    settings: Vec<Setting>,
    problems: Vec<String>,
}

#[derive(Serialize)]
struct Setting {
    name: &'static str,
    value: String,
    origin: &'static str,
    default: String,
    unit: &'static str,
    values: String,
    environment: &'static str,
    flag: String,
    effect: &'static str,
}

pub fn run(args: ConfigArgs) -> anyhow::Result<ExitCode> {
    let report = report(Settings::load(std::env::vars_os().collect(), &args.flags));
    if args.json {
        table::json(&report)?;
    } else {
        print(&report);
    }
    Ok(processes::tell(&report.problems))
}

fn report(settings: Settings) -> Report {
    let setting = |key: &'static Key| Setting {
        name: key.name,
        value: key.value(&settings.config).to_string(),
        origin: settings.config.origin(key).name(),
        default: key.value(&Config::DEFAULT).to_string(),
        unit: key.unit,
        values: key.values().to_string(),
        environment: key.environment,
        flag: format!("--{}", flag_name(key)),
        effect: key.effect,
    };
    Report {
        file: settings.file.as_ref().map(|path| path.display().to_string()),
        settings: KEYS.iter().map(setting).collect(),
        problems: settings.problems.clone(),
    }
}

fn print(report: &Report) {
    let row = |setting: &Setting| {
        let value = or_none(setting.value.clone());
        [setting.name, &value, setting.origin, setting.unit, setting.effect].map(str::to_owned)
    };
    let header = ["Name", "Value", "From", "Unit", "Effect"].map(str::to_owned);
    table::print(header, report.settings.iter().map(row));
    match &report.file {
        Some(file) => println!("\nFile: {file}"),
        None => println!("\nFile: none"),
    }
}
