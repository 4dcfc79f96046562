use std::fs;
use std::path::Path;

use clap::CommandFactory;
use clap_mangen::Man;

use crate::EXIT_OK;
use crate::args::{Cli, CompletionsArgs, ManArgs};
use crate::error::{not_written, output_failed};
use crate::output::print;

pub fn completions(args: &CompletionsArgs) -> anyhow::Result<u8> {
    let mut text = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "kvpool", &mut text);
    print_bytes(&text)
}

/// Prints the man page, or writes all of them.
pub fn man(args: &ManArgs) -> anyhow::Result<u8> {
    if let Some(directory) = &args.directory {
        return pages(directory).map(|()| EXIT_OK).map_err(not_written(directory));
    }
    let mut text = Vec::new();
    Man::new(program()).render(&mut text).map_err(output_failed)?;
    print_bytes(&text)
}

fn pages(directory: &Path) -> std::io::Result<()> {
    fs::create_dir_all(directory)?;
    clap_mangen::generate_to(program(), directory)
}

/// The command line without `help`, which repeats the pages.
fn program() -> clap::Command {
    Cli::command().disable_help_subcommand(true)
}

fn print_bytes(text: &[u8]) -> anyhow::Result<u8> {
    print(String::from_utf8_lossy(text).trim_end()).map_err(output_failed)?;
    Ok(EXIT_OK)
}
