use kvpool::compact::Snapshot;
use kvpool::{AuditError, AuditReport, Fragmentation, FramePool, Metrics, Pool};

use super::problem::AdminError;
use super::views::{OwnerKind, OwnersReport};
use crate::metrics::{self, Scrape};

/// A pool behind an admin interface.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum ServedPool {
    /// A pool with a layout and sequences.
    Pool(Pool),
    /// A pool of frames: bytes, sequences and evictions are its engine's.
    Frames(FramePool),
}

impl From<Pool> for ServedPool {
    fn from(pool: Pool) -> Self {
        Self::Pool(pool)
    }
}

impl From<FramePool> for ServedPool {
    fn from(pool: FramePool) -> Self {
        Self::Frames(pool)
    }
}

/// Calls a method that both kinds of pools have.
macro_rules! either {
    ($self:ident, $pool:ident => $call:expr) => {
        match $self {
            Self::Pool($pool) => $call,
            Self::Frames($pool) => $call,
        }
    };
}

impl ServedPool {
    /// Returns the pool, if it has sequences.
    ///
    /// # Errors
    /// [`AdminError::Unsupported`], which names what was asked for.
    pub(super) fn with_sequences(&self, what: &str) -> Result<&Pool, AdminError> {
        match self {
            Self::Pool(pool) => Ok(pool),
            Self::Frames(_) => Err(AdminError::Unsupported(format!(
                "no {what} for a pool of frames: its engine has the bytes and the sequences"
            ))),
        }
    }

    pub(super) fn is_lost(&self) -> bool {
        matches!(self, Self::Pool(pool) if pool.is_lost())
    }

    pub(super) fn metrics(&self) -> Metrics {
        either!(self, pool => pool.metrics())
    }

    pub(super) fn fragmentation(&self) -> Fragmentation {
        either!(self, pool => pool.fragmentation())
    }

    pub(super) fn available_fragmentation(&self) -> f64 {
        either!(self, pool => pool.available_fragmentation())
    }

    pub(super) fn snapshot(&self) -> Snapshot {
        either!(self, pool => pool.snapshot())
    }

    pub(super) fn trim(&self) {
        either!(self, pool => pool.trim());
    }

    pub(super) fn audit(&self) -> Result<AuditReport, AuditError> {
        either!(self, pool => pool.audit())
    }

    pub(super) fn owners(&self, limit: usize) -> OwnersReport {
        let mut report = OwnersReport::of(&either!(self, pool => pool.owners()), limit);
        if let Self::Frames(_) = self {
            let leases = report.owners.iter_mut().filter(|owner| owner.kind == OwnerKind::Lease);
            leases.for_each(|owner| owner.kind = OwnerKind::Engine);
        }
        report
    }

    pub(super) fn scrape(&self, scrape: &mut Scrape) {
        match self {
            Self::Pool(pool) => metrics::pool(pool, scrape),
            Self::Frames(pool) => metrics::frames(pool, scrape),
        }
    }
}
