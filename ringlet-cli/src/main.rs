//! The `ringlet` command: one file for each subcommand.
#![cfg_attr(not(test), no_main)]
#![deny(unsafe_code)]

#[macro_use(println, eprintln)]
extern crate ringlet_programs;

mod adapter;
mod am_run;
mod arrivals;
mod capture;
mod config;
mod control;
mod disk;
mod docs;
mod doctor;
mod ethernet;
mod explain;
mod holders;
mod job;
mod node;
mod reflect;
mod run;
mod shmem;
mod sim;
mod ss;
mod targets;

use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};
use ringlet_bench::{bench, compare, papers};

/// Unmodified programs over shared memory
///
/// TCP connections between two programs on one machine that both run under `ringlet run` move into shared memory;
/// whatever cannot move stays with the kernel.
#[derive(Parser)]
#[command(name = "ringlet", version, propagate_version = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Run(run::RunArgs),
    Adapter(adapter::AdapterArgs),
    Node(node::NodeArgs),
    AmRun(am_run::AmRunArgs),
    Shmem(shmem::ShmemArgs),
    Reflect(reflect::ReflectArgs),
    Imc(reflect::ImcArgs),
    Disk(disk::DiskArgs),
    Eth(ethernet::EthArgs),
    Ss(ss::SsArgs),
    Off(control::OffArgs),
    On(control::OnArgs),
    Capture(capture::CaptureArgs),
    Explain(explain::ExplainArgs),
    Doctor(doctor::DoctorArgs),
    Bench(bench::BenchArgs),
    Compare(compare::CompareArgs),
    Sim(sim::SimArgs),
    Config(config::ConfigArgs),
    Completion(docs::CompletionArgs),
    Man(docs::ManArgs),
}

/// WHY not Rust's own entry: it ignores SIGPIPE and opens what is closed of descriptors 0 to 2, before we could see what
/// we inherited; the program that `ringlet run` becomes must find them as if ringlet had never been there.
#[cfg(not(test))]
#[allow(unsafe_code)]
// SAFETY: the C library calls `main` once, with the signature that it expects; std finds the arguments by itself.
#[unsafe(no_mangle)]
extern "C" fn main(_count: core::ffi::c_int, _arguments: *const *const u8) -> core::ffi::c_int {
    let code = dispatch();
    // An ExitCode doesn't tell its number, but can be compared.
    (0..=u8::MAX).find(|number| ExitCode::from(*number) == code).unwrap_or(u8::MAX).into()
}

#[cfg_attr(test, allow(dead_code))]
fn dispatch() -> ExitCode {
    let is_run = std::env::args_os()
        .nth(1)
        .is_some_and(|word| ["run", "am-run", "shmem"].iter().any(|name| word == *name));
    let failure = ExitCode::from(if is_run { run::EXIT_OURS } else { 1 });
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            let _ = error.print();
            return match error.exit_code() {
                0 => ExitCode::SUCCESS,
                _ if is_run => failure,
                _ => ExitCode::from(2),
            };
        }
    };
    let result = match cli.command {
        Command::Run(args) => run::run(args),
        Command::Adapter(args) => adapter::run(args),
        Command::Node(args) => node::run(args),
        Command::AmRun(args) => am_run::run(args),
        Command::Shmem(args) => shmem::run(args),
        Command::Reflect(args) => reflect::run(args),
        Command::Imc(args) => reflect::imc(args),
        Command::Disk(args) => disk::run(args),
        Command::Eth(args) => ethernet::run(args),
        Command::Ss(args) => ss::run(args),
        Command::Off(args) => control::off(args),
        Command::On(args) => control::on(args),
        Command::Capture(args) => capture::run(args),
        Command::Explain(args) => explain::run(args),
        Command::Doctor(args) => doctor::run(args),
        Command::Bench(bench::BenchArgs { part: Some(bench::Part::Papers(args)), .. }) => {
            papers::run(&args)
        }
        Command::Bench(args) => bench::run(args),
        Command::Compare(args) => compare::run(args),
        Command::Sim(args) => sim::run(args),
        Command::Config(args) => config::run(args),
        Command::Completion(args) => docs::completion(args, Cli::command()),
        Command::Man(args) => docs::man(args, Cli::command()),
    };
    result.unwrap_or_else(|error| {
        eprintln!("ringlet: {error:#}");
        failure
    })
}
