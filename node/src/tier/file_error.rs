use std::path::PathBuf;

use thiserror::Error;

/// Why a directory cannot be used as the store of a tier.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum FileError {
    /// Another store, of this process or another one, uses the directory.
    #[error(
        "{} is in use: each directory is for one store; end the process that has it, wait for the last calls of a tier that this process closed, or use another directory",
        path.display()
    )]
    InUse {
        /// The directory.
        path: PathBuf,
    },
    /// The directory has another version of the format.
    #[error(
        "{} has version {got} of the format, and this program reads version {want}: use the program that wrote it, or delete the files `index` and `values` there; only cached blocks are lost",
        path.display()
    )]
    Format {
        /// The directory.
        path: PathBuf,
        /// Version in the directory.
        got: u8,
        /// Version of this program.
        want: u8,
    },
    /// The directory has a file `index` or `values` that is not of this store, and is left as it
    /// is.
    #[error(
        "{} has a file `index` or `values` that is not of a tier: use another directory, or delete the files `index` and `values` there",
        path.display()
    )]
    Foreign {
        /// The directory.
        path: PathBuf,
    },
    /// The system refused an operation.
    #[error("cannot {operation} {}: {reason}", path.display())]
    System {
        /// The operation.
        operation: &'static str,
        /// File or directory.
        path: PathBuf,
        /// The system's error.
        reason: String,
    },
    /// A setting is out of range.
    #[error("{what} is {value}; it is from {min} to {max}")]
    OutOfRange {
        /// Name of the setting.
        what: &'static str,
        /// Its value.
        value: u64,
        /// Smallest value.
        min: u64,
        /// Largest value.
        max: u64,
    },
    /// The address is not valid.
    #[error("`{address}` is not a valid address of a directory: {reason}")]
    Address {
        /// The address.
        address: String,
        /// What is wrong with it.
        reason: String,
    },
}
