//! `kvpool serve`.

use super::CommandError;
use crate::args::ServeArgs;
use crate::serve;
use crate::{EXIT_OK, EXIT_UNSOUND};

/// Serves until a signal, and returns the exit code.
pub fn serve(args: &ServeArgs) -> Result<u8, CommandError> {
    let is_sound = serve::serve(&args.settings.sources())?;
    Ok(if is_sound { EXIT_OK } else { EXIT_UNSOUND })
}
