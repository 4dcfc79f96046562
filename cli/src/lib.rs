//! The parts of the `kvpool` program, as a library so that tests and fuzzers reach them.
//!
//! | module | what |
//! |---|---|
//! | [`args`] | the command line |
//! | [`commands`] | what each command does |
//! | [`trace`], [`workload`] | requests, from a file or from a seed |
//! | [`backend`] | the memory of a pool |
//! | [`output`] | how text and pictures leave the program |
//! | [`replay`] | the replay itself |
//! | [`report`] | what it came to, as a table and as JSON |
//! | [`map`] | a pool as a picture |
//! | [`policy`] | how well eviction policies do |
//! | [`schedule`] | when in a replay something is to happen |
//!
//! Exit codes: 0 when all is well; 1 when the command ran and found something lost, corrupt or
//! broken, or had nothing to find it in; 2 when it was asked for something that cannot be done: bad
//! usage or bad input; 130 when it was interrupted.

pub mod args;
pub mod backend;
pub mod commands;
pub mod map;
pub mod output;
pub mod policy;
pub mod replay;
pub mod report;
pub mod schedule;
pub mod trace;
pub mod workload;

use std::process::ExitCode;

use args::{Cli, Command};
use output::complain;

/// All is well.
pub const EXIT_OK: u8 = 0;
/// Something was lost, corrupt or broken, or there was nothing to check.
pub const EXIT_UNSOUND: u8 = 1;
/// Bad usage or bad input.
pub const EXIT_USAGE: u8 = 2;
/// Interrupted: 128 and the number of the signal.
pub const EXIT_INTERRUPTED: u8 = 130;

/// Runs a command line. What goes wrong is said on the standard error.
pub fn run(cli: Cli) -> ExitCode {
    let result = match &cli.command {
        Command::Replay(args) => commands::replay(args),
        Command::Map(args) => commands::map(args),
        Command::Policy(args) => commands::policy(args),
        Command::Info(args) => commands::info(args),
        Command::Completions(args) => commands::completions(args),
        Command::Man(args) => commands::man(args),
    };
    match result {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            complain(format_args!("{error}"));
            ExitCode::from(error.exit_code())
        }
    }
}
