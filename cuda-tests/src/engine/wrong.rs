//! Why an engine's lane cannot go on.

use std::fmt;

use cudarc::driver::DriverError;
use kvpool::cuda::TableError;
use kvpool::error::{SequenceError, StorageError};

/// Why a lane cannot go on.
#[derive(Debug)]
pub enum Wrong {
    /// A row was read that is not what was stored.
    Row(String),
    /// The driver said so.
    Driver(DriverError),
    /// The pool said so.
    Storage(StorageError),
    /// The pool said so.
    Sequence(SequenceError),
    /// The table said so.
    Table(TableError),
}

impl fmt::Display for Wrong {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Row(what) => f.write_str(what),
            Self::Driver(code) => write!(f, "the driver says {:?}", code.0),
            Self::Storage(error) => error.fmt(f),
            Self::Sequence(error) => error.fmt(f),
            Self::Table(error) => error.fmt(f),
        }
    }
}

impl From<DriverError> for Wrong {
    fn from(code: DriverError) -> Self {
        Self::Driver(code)
    }
}

impl From<StorageError> for Wrong {
    fn from(error: StorageError) -> Self {
        Self::Storage(error)
    }
}

impl From<SequenceError> for Wrong {
    fn from(error: SequenceError) -> Self {
        Self::Sequence(error)
    }
}

impl From<TableError> for Wrong {
    fn from(error: TableError) -> Self {
        Self::Table(error)
    }
}
