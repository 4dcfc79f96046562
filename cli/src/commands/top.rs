//! `kvpool top`.

use super::CommandError;
use super::admin::connect;
use crate::args::TopArgs;
use crate::top;

/// Shows a node on the terminal until a key or a signal, and returns the exit code.
pub fn top(args: &TopArgs) -> Result<u8, CommandError> {
    let (runtime, client) = connect(&args.reach)?;
    Ok(top::run(&runtime, &client)?)
}
