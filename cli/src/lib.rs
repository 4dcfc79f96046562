//! The parts of the `kvpool` program, as a library so that tests and fuzzers reach them.
//!
//! | module | what |
//! |---|---|
//! | [`args`] | the command line |
//! | [`commands`] | what each command does |
//! | [`trace`], [`workload`] | requests, from a file or from a seed |
//! | [`home`] | where a pool's memory is |
//! | [`replay`] | the replay itself |
//! | [`report`] | what it came to, as a table and as JSON |
//! | [`map`] | a pool as a picture |
//! | [`policy`] | how well eviction policies do |
//! | [`schedule`] | when in a replay something is to happen |
//!
//! Exit codes: 0 when all is well, 1 when the command ran and found something lost, corrupt or broken, 2 when it was
//! asked for something that cannot be done: bad usage or bad input.

pub mod args;
pub mod commands;
pub mod home;
pub mod map;
pub mod policy;
pub mod replay;
pub mod report;
pub mod schedule;
pub mod trace;
pub mod workload;

use std::fmt;
use std::io::{self, Write};
use std::process::ExitCode;

use args::{Cli, Command};

/// All is well.
pub const EXIT_OK: u8 = 0;
/// Something was lost, corrupt or broken.
pub const EXIT_UNSOUND: u8 = 1;
/// Bad usage or bad input.
pub const EXIT_USAGE: u8 = 2;

/// Runs a command line. What goes wrong is said on the standard error.
pub fn run(cli: Cli) -> ExitCode {
    let result = match &cli.command {
        Command::Replay(args) => commands::replay(args),
        Command::Map(args) => commands::map(args),
        Command::Policy(args) => commands::policy(args),
        Command::Info(args) => commands::info(args),
    };
    match result {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            complain(format_args!("{error}"));
            ExitCode::from(error.exit_code())
        }
    }
}

/// Says something on the standard error. If that is closed or full, the exit code alone must tell.
fn complain(what: fmt::Arguments<'_>) {
    let _ = writeln!(io::stderr(), "kvpool: {what}");
}
