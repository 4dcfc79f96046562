//! The `kvpool` program, as a library for its tests and fuzz targets.
//!
//! | module | content |
//! |---|---|
//! | `args`, `absent` | the command line, and commands that this build lacks |
//! | `commands` | the commands |
//! | [`trace`] | requests, from a file or from a seed |
//! | [`backend`] | the memory of a pool |
//! | [`replay`] | the replay of a trace |
//! | `schedule` | the schedule of a replay |
//! | `report` | its report, as JSON and as a table |
//! | `serve` | a process around a pool, with the feature `node` |
//! | `signals` | signals to commands that run until one, with the feature `node` |
//! | `top` | a node on the terminal, with the feature `top` |
//! | `figures`, `fit`, `output` | numbers as text, text within a terminal's width, text and files |
//!
//! Exit codes: 0 for success; 1 if the command ran and found something lost, corrupt or broken, had
//! nothing to check, or left a pool more fragmented (`defrag`); 2 for bad usage or bad input; 130
//! when it was interrupted.

// For the JSON of the report, which is one macro call.
#![recursion_limit = "256"]

#[cfg(not(feature = "top"))]
pub mod absent;
pub mod args;
pub mod backend;
mod commands;
mod error;
#[cfg(feature = "node")]
mod figures;
mod fit;
mod output;
pub mod prompts;
pub mod replay;
mod report;
mod schedule;
#[cfg(feature = "node")]
mod serve;
#[cfg(feature = "node")]
mod signals;
#[cfg(feature = "top")]
pub mod top;
pub mod trace;

use std::process::ExitCode;

use args::{Cli, Command};
use output::complain;

const EXIT_OK: u8 = 0;
/// Something was lost, corrupt or broken, or there was nothing to check.
const EXIT_UNSOUND: u8 = 1;
const EXIT_USAGE: u8 = 2;
const EXIT_INTERRUPTED: u8 = 130;

/// Runs a command line. Errors go to the standard error.
pub fn run(cli: Cli) -> ExitCode {
    let result = match &cli.command {
        Command::Replay(args) => commands::replay(args),
        Command::Map(args) => commands::map(args),
        Command::Policy(args) => commands::policy(args),
        Command::Layout(args) => commands::layout(args),
        Command::Info(args) => commands::info(args),
        #[cfg(feature = "node")]
        Command::Serve(args) => serve::serve(&args.settings.sources()),
        #[cfg(feature = "node")]
        Command::Stats(args) => commands::stats(args),
        #[cfg(feature = "node")]
        Command::Defrag(args) => commands::defrag(args),
        #[cfg(feature = "node")]
        Command::Resize(args) => commands::resize(args),
        #[cfg(feature = "node")]
        Command::Migrate(args) => commands::migrate(args),
        #[cfg(feature = "node")]
        Command::MigrationStatus(args) => commands::migration_status(args),
        #[cfg(feature = "node")]
        Command::DeclareEnded(args) => commands::declare_ended(args),
        #[cfg(feature = "node")]
        Command::Owners(args) => commands::owners(args),
        #[cfg(feature = "node")]
        Command::Events(args) => commands::events(args),
        #[cfg(feature = "top")]
        Command::Top(args) => commands::top(args),
        #[cfg(feature = "node")]
        Command::Audit(args) => commands::audit(args),
        #[cfg(feature = "node")]
        Command::Topology(args) => commands::topology(args),
        #[cfg(not(feature = "top"))]
        Command::Absent(absent) => Err(anyhow::anyhow!(
            "this build lacks the command: cargo install --path cli --features {}",
            absent.feature()
        )),
        Command::Completions(args) => commands::completions(args),
        Command::Man(args) => commands::man(args),
    };
    match result {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            complain(format_args!("{error}"));
            ExitCode::from(error::exit_code(&error))
        }
    }
}
