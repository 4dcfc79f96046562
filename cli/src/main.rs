//! The command `kvpool`.

use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    kvpool_cli::run(kvpool_cli::args::Cli::parse())
}
