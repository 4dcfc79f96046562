use serde::{Deserialize, Serialize};

use super::message::{Kind, MigrationId, Part};
use super::outcome::{Origin, Side};
use super::request::{LinkId, MachineId};
use super::source::{Source, SourceState};
use super::target::{Target, TargetState};
use super::timing::Millis;

/// State of one side of a migration.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct MigrationStatus {
    /// The machine.
    pub machine: MachineId,
    /// The migration.
    pub id: MigrationId,
    /// The peer.
    pub link: LinkId,
    /// Kind.
    pub kind: Kind,
    /// Part of the copy; `None` for the whole copy.
    pub part: Option<Part>,
    /// Node that requested it.
    pub origin: Origin,
    /// State of this side.
    pub state: SideState,
    /// When it began.
    pub begun: Millis,
    /// When the machine acts next without an event; `None` while the node's own commit is awaited.
    pub deadline: Option<Millis>,
}

/// State of the machine.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub enum SideState {
    /// The copy leaves this node.
    Source(SourceState),
    /// The copy comes to this node.
    Target(TargetState),
}

#[derive(Debug)]
pub(super) enum Machine {
    Source(Source),
    Target(Target),
}

impl Machine {
    pub(super) fn kind(&self) -> Kind {
        match self {
            Self::Source(source) => source.kind(),
            Self::Target(target) => target.kind(),
        }
    }

    pub(super) fn part(&self) -> Option<Part> {
        match self {
            Self::Source(source) => source.part(),
            Self::Target(target) => target.part().map(|of_copy| of_copy.part),
        }
    }

    pub(super) fn side(&self) -> Side {
        match self {
            Self::Source(_) => Side::Source,
            Self::Target(_) => Side::Target,
        }
    }

    pub(super) fn state(&self) -> SideState {
        match self {
            Self::Source(source) => SideState::Source(source.state()),
            Self::Target(target) => SideState::Target(target.state()),
        }
    }

    pub(super) fn begun(&self) -> Millis {
        match self {
            Self::Source(source) => source.begun(),
            Self::Target(target) => target.begun(),
        }
    }

    pub(super) fn deadline(&self) -> Option<Millis> {
        match self {
            Self::Source(source) => source.deadline(),
            Self::Target(target) => target.deadline(),
        }
    }

    pub(super) fn is_undecided(&self) -> bool {
        match self {
            Self::Source(source) => source.is_undecided(),
            Self::Target(target) => target.is_undecided(),
        }
    }

    pub(super) fn is_over(&self) -> bool {
        matches!(self.state(), SideState::Source(SourceState::Over) | SideState::Target(TargetState::Over))
    }
}

#[derive(Debug)]
pub(super) struct Entry {
    pub(super) id: MigrationId,
    pub(super) link: LinkId,
    pub(super) origin: Origin,
    /// For a source: what it exports. For a committed target: what must not move on.
    pub(super) sequence: Option<u64>,
    pub(super) machine: Machine,
}

pub(super) type Key = (LinkId, MigrationId, Side);

impl Entry {
    pub(super) fn source(
        id: MigrationId,
        link: LinkId,
        origin: Origin,
        sequence: Option<u64>,
        source: Source,
    ) -> Self {
        Self { id, link, origin, sequence, machine: Machine::Source(source) }
    }

    pub(super) fn target(id: MigrationId, link: LinkId, origin: Origin, target: Target) -> Self {
        Self { id, link, origin, sequence: None, machine: Machine::Target(target) }
    }

    pub(super) fn key(&self) -> Key {
        (self.link, self.id, self.machine.side())
    }
}
