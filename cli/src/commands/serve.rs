//! `kvpool serve`.

use crate::args::ServeArgs;
use crate::serve::{self, Served};
use crate::{EXIT_OK, EXIT_UNSOUND, EXIT_USAGE};

/// Serves until a signal, and returns the exit code.
pub fn serve(args: &ServeArgs) -> anyhow::Result<u8> {
    Ok(match serve::serve(&args.settings.sources())? {
        Served::Sound => EXIT_OK,
        Served::Unsound => EXIT_UNSOUND,
        Served::NotStarted => EXIT_USAGE,
    })
}
