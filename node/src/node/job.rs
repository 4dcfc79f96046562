use std::time::Instant;

use kvpool::prefix::BlockHash;
use kvpool::transfer::{Fetched, Import, Imported};
use kvpool::transport::Tag;
use kvpool::{Carried, GroupedSequence, SequenceId, TransferError};
use tokio::sync::{mpsc, oneshot};

use super::arrival::Arrival;
use super::message::Way;
use super::parcel::Parcel;
use super::parts::PartImport;
use super::work::{self, Verified};
use crate::admin::MigrationTransport;
use crate::protocol::{Kind, LinkId, MigrationId, Millis, Outcome, Text};

/// A resource that a task borrows and returns.
#[derive(Debug)]
pub(super) enum Slot<T> {
    /// Not made yet, or taken.
    Empty,
    Here(T),
    /// Borrowed by a task.
    Lent,
}

impl<T> Slot<T> {
    /// Lends it to a task.
    pub(super) fn lend(&mut self) -> Option<T> {
        match std::mem::replace(self, Self::Lent) {
            Self::Here(value) => Some(value),
            other => {
                *self = other;
                None
            }
        }
    }

    /// Takes it permanently.
    pub(super) fn take(&mut self) -> Option<T> {
        match std::mem::replace(self, Self::Empty) {
            Self::Here(value) => Some(value),
            other => {
                *self = other;
                None
            }
        }
    }

    pub(super) fn is_lent(&self) -> bool {
        matches!(self, Self::Lent)
    }
}

/// An import of a target.
#[allow(clippy::large_enum_variant, reason = "one exists for each migration")]
pub(super) enum Incoming {
    Whole(Import),
    Part(PartImport),
}

impl Incoming {
    pub(super) fn sequence_id(&self) -> Option<SequenceId> {
        match self {
            Self::Whole(import) => import.sequence_id(),
            Self::Part(part) => part.sequence_id(),
        }
    }

    pub(super) fn verify(&mut self) -> Result<Verified, Text> {
        match self {
            Self::Whole(import) => work::verify(import),
            Self::Part(part) => part.verify(),
        }
    }

    /// Commits it to the pool; for a part, commits the whole copy.
    pub(super) fn commit(self, is_current: bool) -> Result<Imported, Text> {
        match self {
            Self::Whole(import) => work::commit(import, is_current),
            Self::Part(part) => part.commit(is_current),
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Ending {
    Finish,
    Restore,
}

pub(super) struct Job {
    pub(super) id: MigrationId,
    pub(super) link: LinkId,
    pub(super) kind: Kind,
    pub(super) begun: Instant,
    pub(super) sequence: Option<SequenceId>,
    pub(super) blocks: usize,
    /// Those of them that count against the peer's fetch quota.
    pub(super) fetched_blocks: usize,
    pub(super) carried: Carried,
    /// Blocks that the source of a fetch dropped because they were damaged.
    pub(super) damaged: Vec<BlockHash>,
    pub(super) transport: Option<MigrationTransport>,
    /// Blocks that the target has or reserved, once it reported them.
    pub(super) accepted_blocks: Option<usize>,
    pub(super) ending: Option<Ending>,
    /// Why this node gave up, unless the outcome has the reason.
    pub(super) trouble: Option<String>,
    /// Since when the target has been sent `Commit` without an answer, once that is reported.
    pub(super) in_doubt: Option<Millis>,
    /// Since when it has been in doubt without a link to the target.
    pub(super) alone_since: Option<Millis>,
    pub(super) outcome: Option<Outcome>,
    /// The machine knows that the cache was cleared since the export.
    pub(super) is_cleared: bool,
    /// Dropping it stops the running task.
    pub(super) stop: Option<oneshot::Sender<()>>,
    /// Covers this side of the migration from begin to end.
    pub(super) span: tracing::Span,
    pub(super) side: SideJob,
}

#[allow(clippy::large_enum_variant, reason = "one exists for each migration")]
pub(super) enum SideJob {
    Source {
        export: Slot<Parcel>,
    },
    Target {
        import: Slot<Incoming>,
        grant: Option<(Way, Tag)>,
        /// The committed sequence; none of cached blocks.
        arrived: Option<Box<GroupedSequence>>,
        place: Option<mpsc::OwnedPermit<Arrival<GroupedSequence>>>,
        answer: Option<oneshot::Sender<Result<Fetched, TransferError>>>,
    },
}

impl Job {
    pub(super) fn new(id: MigrationId, link: LinkId, kind: Kind, side: SideJob) -> Self {
        Self {
            id,
            link,
            kind,
            begun: Instant::now(),
            sequence: None,
            blocks: 0,
            fetched_blocks: 0,
            carried: Carried::default(),
            damaged: Vec::new(),
            transport: None,
            accepted_blocks: None,
            ending: None,
            trouble: None,
            in_doubt: None,
            alone_since: None,
            outcome: None,
            is_cleared: false,
            stop: None,
            span: span(id),
            side,
        }
    }

    pub(super) fn source(export: Option<Parcel>) -> SideJob {
        SideJob::Source { export: export.map_or(Slot::Empty, Slot::Here) }
    }

    pub(super) fn target(answer: Option<oneshot::Sender<Result<Fetched, TransferError>>>) -> SideJob {
        SideJob::Target { import: Slot::Empty, grant: None, arrived: None, place: None, answer }
    }

    pub(super) fn shared_blocks(&self) -> usize {
        self.accepted_blocks.unwrap_or(self.blocks).saturating_sub(self.carried.blocks)
    }

    pub(super) fn is_lent(&self) -> bool {
        match &self.side {
            SideJob::Source { export } => export.is_lent(),
            SideJob::Target { import, .. } => import.is_lent(),
        }
    }

    pub(super) fn begin_task(&mut self) -> oneshot::Receiver<()> {
        let (stop, stopped) = oneshot::channel();
        self.stop = Some(stop);
        stopped
    }
}

/// Returns the span of one side of a migration. Its fields are recorded at the end.
fn span(id: MigrationId) -> tracing::Span {
    use tracing::field::Empty;
    tracing::info_span!(
        parent: None,
        "kvpool.node.migration",
        migration = %id,
        kind = Empty,
        side = Empty,
        peer = Empty,
        sequence = Empty,
        state = Empty,
        transport = Empty,
        blocks = Empty,
        bytes = Empty,
        runs = Empty,
        reason = Empty,
        otel.status_code = Empty,
    )
}
