//! `kvpool top`.

use super::admin::connect;
use crate::args::TopArgs;
use crate::top;

/// Shows a node on the terminal until a key or a signal, and returns the exit code.
pub fn top(args: &TopArgs) -> anyhow::Result<u8> {
    let (runtime, client) = connect(&args.reach)?;
    top::run(&runtime, &client)
}
