use std::fmt::Display;

use anyhow::{Error, anyhow};
use thiserror::Error;

use crate::{EXIT_UNSOUND, EXIT_USAGE};

/// An error of a command that ran. All others are of bad usage or input.
#[derive(Debug, Error)]
#[error("{0}")]
struct Unsound(String);

pub fn unsound(error: impl Display) -> Error {
    Unsound(error.to_string()).into()
}

pub fn output_failed(error: std::io::Error) -> Error {
    unsound(format_args!("cannot write the report: {error}"))
}

/// Returns a function that makes the error of a file that was not written.
pub fn not_written(path: &std::path::Path) -> impl FnOnce(std::io::Error) -> Error {
    move |error| anyhow!("cannot write {}: {error}", path.display())
}

/// Returns a function that prefixes an error with the name of a flag or file.
pub fn named<E: Display>(name: impl Display) -> impl FnOnce(E) -> Error {
    move |error| anyhow!("{name}: {error}")
}

pub fn exit_code(error: &Error) -> u8 {
    let ran = error.is::<Unsound>();
    #[cfg(feature = "node")]
    let ran = ran || error.is::<kvpool_node::admin::ClientError>();
    if ran { EXIT_UNSOUND } else { EXIT_USAGE }
}
