//! Errors of an engine's lane.

use std::fmt;

use cudarc::driver::DriverError;
use kvpool::{SequenceError, StorageError};
use kvpool_cuda::TableError;

/// Why a lane cannot continue.
#[derive(Debug)]
pub enum Wrong {
    /// A loaded row differs from the stored one.
    Row(String),
    /// An error of the driver.
    Driver(DriverError),
    /// An error of the pool's storage.
    Storage(StorageError),
    /// An error of the pool's sequences.
    Sequence(SequenceError),
    /// An error of the device table.
    Table(TableError),
}

impl fmt::Display for Wrong {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Row(what) => f.write_str(what),
            Self::Driver(code) => write!(f, "the driver returned {:?}", code.0),
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
