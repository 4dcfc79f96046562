use std::collections::BTreeSet;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::job::{Job, SideJob};
use crate::admin::{MigrationKind, MigrationRecord, MigrationSide, MigrationState};
use crate::protocol::{Kind, MigrationStatus, Millis, Outcome, Side, SideState, SourceState, TargetState};

pub(super) const HISTORY: usize = 256;

/// What an operator can do about a sequence in doubt.
pub(super) const REMEDY: &str = "It is held and not run until its target answers, or is declared to have ended: \
    kvpool declare-ended --peer NAME, POST /declare-ended, Node::declare_ended";

#[derive(Clone, PartialEq, Debug)]
pub(super) struct NodeStatus {
    pub(super) migrations: Vec<MigrationRecord>,
    pub(super) peers: Vec<PeerStatus>,
    pub(super) nixl_peers: BTreeSet<String>,
    pub(super) quarantined_grants: usize,
    pub(super) oldest_doubt: Option<u64>,
}

#[derive(Clone, PartialEq, Debug)]
pub(super) struct PeerStatus {
    pub(super) name: String,
    pub(super) is_up: bool,
    /// What impairs its links or transfers.
    pub(super) note: Option<String>,
}

impl NodeStatus {
    pub(super) fn oldest_doubt_s(&self) -> f64 {
        self.oldest_doubt.unwrap_or(0) as f64 / 1e3
    }
}

/// Counters since the node began.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[non_exhaustive]
pub struct NodeCounters {
    /// Migrations sent successfully.
    pub sent: u64,
    /// Migrations received successfully.
    pub received: u64,
    /// Migrations that a target refused.
    pub refused: u64,
    /// Migrations that failed otherwise.
    pub failed: u64,
    /// Blocks that arrived with wrong checksums.
    pub bad_blocks: u64,
    /// Cached blocks that were dropped instead of being sent, because the memory had damaged them.
    pub damaged_blocks: u64,
    /// Number of times a copy was in doubt.
    pub in_doubt: u64,
    /// Bytes that this node wrote to peers.
    pub sent_bytes: u64,
    /// Bytes that peers were permitted to write here.
    pub granted_bytes: u64,
    /// Transfers of this node that were quarantined.
    pub quarantined_transfers: u64,
    /// Messages dropped because the queue of a link was full.
    pub dropped_messages: u64,
}

#[derive(Debug, Default)]
pub(super) struct Counters(Mutex<NodeCounters>);

impl Counters {
    pub(super) fn count<T>(&self, change: impl FnOnce(&mut NodeCounters) -> T) -> T {
        change(&mut self.0.lock())
    }

    pub(super) fn ended(&self, job: &Job, outcome: &Outcome) {
        self.count(|counters| {
            *match (outcome, side_of(job)) {
                (Outcome::Done, Side::Source) => &mut counters.sent,
                (Outcome::Done, Side::Target) => &mut counters.received,
                (Outcome::Refused { .. }, _) => &mut counters.refused,
                _ => &mut counters.failed,
            } += 1;
            if side_of(job) == Side::Source {
                counters.sent_bytes += job.carried.bytes;
            }
        });
    }
}

fn kind_of(kind: Kind) -> MigrationKind {
    match kind {
        Kind::Migrate => MigrationKind::Migrate,
        Kind::Replicate => MigrationKind::Replicate,
        Kind::Cached => MigrationKind::Offload,
        Kind::Fetch => MigrationKind::BringBack,
    }
}

fn state_of(state: SideState) -> MigrationState {
    match state {
        SideState::Source(SourceState::Exporting | SourceState::Preparing) => MigrationState::Preparing,
        SideState::Source(SourceState::Sending(_)) => MigrationState::Transferring,
        SideState::Source(SourceState::Checking(_)) => MigrationState::Verifying,
        SideState::Source(SourceState::Committing) => MigrationState::Committing,
        SideState::Source(SourceState::InDoubt) => MigrationState::InDoubt,
        // It is over, but its task has not returned: the outcome decides.
        SideState::Source(SourceState::Over) => MigrationState::Committing,
        SideState::Target(TargetState::Receiving(_)) => MigrationState::Transferring,
        SideState::Target(TargetState::Verifying(_) | TargetState::Ready(_)) => MigrationState::Verifying,
        SideState::Target(TargetState::Committing) => MigrationState::Committing,
        SideState::Target(TargetState::Committed) => MigrationState::Committed,
        SideState::Target(_) => MigrationState::Preparing,
    }
}

pub(super) fn ended(job: &Job, peer: String, outcome: &Outcome) -> MigrationRecord {
    let side = match side_of(job) {
        Side::Source => MigrationSide::Source,
        Side::Target => MigrationSide::Target,
    };
    MigrationRecord {
        id: job.id.to_string(),
        kind: kind_of(job.kind),
        side,
        peer,
        sequence: job.sequence.map(|id| id.0),
        state: if *outcome == Outcome::Done { MigrationState::Committed } else { MigrationState::Aborted },
        blocks: job.blocks,
        transport: job.transport,
        bytes: job.carried.bytes,
        runs: job.carried.runs,
        time_ms: job.begun.elapsed().as_millis() as u64,
        reason: reason(job, outcome),
    }
}

pub(super) fn trace(job: &Job, record: &MigrationRecord) {
    let span = &job.span;
    if span.is_disabled() {
        return;
    }
    let word = |value: serde_json::Value| value.as_str().unwrap_or_default().to_owned();
    span.record("kind", word(json!(record.kind)));
    span.record("side", word(json!(record.side)));
    span.record("state", word(json!(record.state)));
    span.record("peer", &*record.peer);
    span.record("blocks", record.blocks as u64);
    span.record("bytes", record.bytes);
    span.record("runs", record.runs as u64);
    if let Some(sequence) = record.sequence {
        span.record("sequence", sequence);
    }
    if let Some(transport) = record.transport {
        span.record("transport", word(json!(transport)));
    }
    if let Some(reason) = &record.reason {
        span.record("reason", &**reason);
        span.record("otel.status_code", "ERROR");
    }
}

pub(super) fn reason(job: &Job, outcome: &Outcome) -> Option<String> {
    let failure = failure(outcome)?;
    Some(job.trouble.clone().unwrap_or(failure))
}

/// Describes a migration in progress; `None` for a committed one that is already in the history.
pub(super) fn running(
    status: &MigrationStatus,
    job: Option<&Job>,
    peer: &str,
    now: Millis,
) -> Option<MigrationRecord> {
    let job = job?;
    let doubt = |since| format!("{} s without an answer", now.since(since) / 1000);
    Some(MigrationRecord {
        state: state_of(status.state),
        reason: job.in_doubt.map(doubt),
        ..ended(job, peer.to_owned(), &Outcome::Done)
    })
}

pub(super) fn failure(outcome: &Outcome) -> Option<String> {
    match outcome {
        Outcome::Done => None,
        Outcome::Refused { reason, free } => Some(format!("refused: {reason}; {free} blocks are free there")),
        Outcome::Failed(cause) => Some(cause.to_string()),
        Outcome::Unconfirmed => Some("it did not confirm".into()),
        outcome => Some(format!("{outcome:?}")),
    }
}

fn side_of(job: &Job) -> Side {
    match job.side {
        SideJob::Source { .. } => Side::Source,
        SideJob::Target { .. } => Side::Target,
    }
}
