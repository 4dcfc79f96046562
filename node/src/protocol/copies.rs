//! Copies in parts: which parts a target has, and when it may commit them.
//!
//! ```text
//! gathering    parts join, each with a machine and a reservation of its own
//!     |        a part ends, or one is absent for the transfer deadline           -> all parts end
//! agreed       each part is here, and its source has said its commit
//!     |        the one commit, by the machine of the first part
//! committed    each source is told so      failed    each source is told that there was no commit
//! ```
//!
//! A copy is known from its first part to its commit, or to the end of any part. Then it is
//! forgotten, and each part's machine continues alone. The docs of the [module](super) explain
//! which machine decides for which part, and why no sequence gets two owners.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::bounded::Text;
use super::message::{Kind, MigrationId, PARTS_MAX, Part, PartFault};
use super::request::MachineId;
use super::timing::Millis;

/// Number of a copy in parts at its target; never used twice in a process.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub struct CopyNumber(pub u64);

/// Part of a copy at its target.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct CopyPart {
    /// The copy.
    pub copy: CopyNumber,
    /// The part.
    pub part: Part,
}

/// An event of the other parts of a copy.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum CopyEvent {
    /// All sources have sent their commit.
    Commits {
        /// Whether the machine of this part commits.
        leads: bool,
        /// Whether no source has cleared its cache.
        is_current: bool,
    },
    /// The copy is committed.
    Committed,
    /// The commit failed.
    Failed(Text),
    /// Another part has ended, or is absent.
    Ended(Text),
}

#[derive(Debug)]
struct Copy {
    number: CopyNumber,
    kind: Kind,
    of: u16,
    begun: Millis,
    parts: BTreeMap<u16, MachineId>,
    agreed: BTreeSet<MachineId>,
}

impl Copy {
    fn is_complete(&self) -> bool {
        self.parts.len() == usize::from(self.of)
    }
}

pub(super) fn check(kind: Kind, part: Part) -> Result<(), PartFault> {
    if part.index >= part.of || part.of > PARTS_MAX {
        return Err(PartFault::Number);
    }
    match kind {
        Kind::Migrate | Kind::Replicate => Ok(()),
        Kind::Cached | Kind::Fetch => Err(PartFault::Cached),
    }
}

/// The uncommitted copies that a node receives in parts.
#[derive(Debug, Default)]
pub(super) struct Copies(BTreeMap<MigrationId, Copy>);

impl Copies {
    /// Adds a part, whose machine begins. An error changes nothing.
    pub(super) fn join(
        &mut self,
        now: Millis,
        id: MigrationId,
        (kind, part): (Kind, Part),
        machine: MachineId,
    ) -> Result<CopyPart, PartFault> {
        check(kind, part)?;
        let copy = self.0.entry(id).or_insert_with(|| Copy {
            number: CopyNumber(machine.0),
            kind,
            of: part.of,
            begun: now,
            parts: BTreeMap::new(),
            agreed: BTreeSet::new(),
        });
        if (copy.kind, copy.of) != (kind, part.of) {
            return Err(PartFault::Disagrees);
        }
        if copy.parts.contains_key(&part.index) {
            // A copy is complete and agreed only during its commit.
            return Err(if copy.agreed.len() == copy.parts.len() && copy.is_complete() {
                PartFault::Late
            } else {
                PartFault::Repeated
            });
        }
        copy.parts.insert(part.index, machine);
        Ok(CopyPart { copy: copy.number, part })
    }

    /// Notes a source's commit. For the last one, returns all machines, the committing one first.
    pub(super) fn agree(&mut self, id: MigrationId, machine: MachineId) -> Option<Vec<MachineId>> {
        let copy = self.0.get_mut(&id)?;
        copy.agreed.insert(machine);
        let is_open = copy.is_complete() && copy.parts.values().all(|part| copy.agreed.contains(part));
        is_open.then(|| copy.parts.values().copied().collect())
    }

    /// Forgets a copy that has committed or ended. Returns the machines of its other parts.
    pub(super) fn forget(&mut self, id: MigrationId, machine: MachineId) -> Vec<MachineId> {
        let others = self.others(id, machine);
        if self.0.get(&id).is_some_and(|copy| copy.parts.values().any(|&part| part == machine)) {
            self.0.remove(&id);
        }
        others
    }

    pub(super) fn others(&self, id: MigrationId, machine: MachineId) -> Vec<MachineId> {
        let parts = self.0.get(&id).map(|copy| copy.parts.values().copied().collect::<Vec<_>>());
        // A later copy under the same number is unrelated to this machine.
        let mut parts = parts.filter(|parts| parts.contains(&machine)).unwrap_or_default();
        parts.retain(|&part| part != machine);
        parts
    }

    pub(super) fn deadline(&self, transfer_deadline_ms: u64) -> Option<Millis> {
        self.0
            .values()
            .filter(|copy| !copy.is_complete())
            .map(|copy| copy.begun.plus(transfer_deadline_ms))
            .min()
    }

    /// Returns one part of each copy that lacks a part past its deadline.
    pub(super) fn late(&self, now: Millis, transfer_deadline_ms: u64) -> Vec<MachineId> {
        let is_late = |copy: &&Copy| !copy.is_complete() && now >= copy.begun.plus(transfer_deadline_ms);
        self.0.values().filter(is_late).filter_map(|copy| copy.parts.values().next().copied()).collect()
    }
}
