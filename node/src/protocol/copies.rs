//! Copies that come in parts: which parts a target has, and when it may commit them.
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
//! forgotten, and each part's machine goes on by itself. Which machine decides for which part, and
//! why that gives no sequence two owners, is in the docs of the [module](super).

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

/// What the other parts of a copy do.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum CopyEvent {
    /// All sources have said their commit.
    Commits {
        /// Whether the machine of this part makes the commit.
        leads: bool,
        /// Whether no source has cleared its cache.
        is_current: bool,
    },
    /// The copy is this node's own.
    Committed,
    /// The copy could not be made this node's own.
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

/// Checks that a part of a copy can exist.
///
/// # Errors
/// [`PartFault::Number`]; [`PartFault::Cached`].
pub(super) fn check(kind: Kind, part: Part) -> Result<(), PartFault> {
    if part.index >= part.of || part.of > PARTS_MAX {
        return Err(PartFault::Number);
    }
    match kind {
        Kind::Migrate | Kind::Replicate => Ok(()),
        Kind::Cached | Kind::Fetch => Err(PartFault::Cached),
    }
}

/// The copies that a node receives in parts, and that are not committed.
#[derive(Debug, Default)]
pub(super) struct Copies(BTreeMap<MigrationId, Copy>);

impl Copies {
    /// Adds a part, whose machine begins.
    ///
    /// # Errors
    /// [`PartFault`]; nothing changes.
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
            // All parts are here and have agreed only while they are being committed.
            return Err(if copy.agreed.len() == copy.parts.len() && copy.is_complete() {
                PartFault::Late
            } else {
                PartFault::Repeated
            });
        }
        copy.parts.insert(part.index, machine);
        Ok(CopyPart { copy: copy.number, part })
    }

    /// Notes that the source of a part has said its commit. Returns the machines of all parts, the
    /// one that commits first, if it was the last source to do so.
    pub(super) fn agree(&mut self, id: MigrationId, machine: MachineId) -> Option<Vec<MachineId>> {
        let copy = self.0.get_mut(&id)?;
        copy.agreed.insert(machine);
        let is_open = copy.is_complete() && copy.parts.values().all(|part| copy.agreed.contains(part));
        is_open.then(|| copy.parts.values().copied().collect())
    }

    /// Forgets the copy of a part that has committed or ended. Returns the machines of its other
    /// parts.
    pub(super) fn forget(&mut self, id: MigrationId, machine: MachineId) -> Vec<MachineId> {
        let others = self.others(id, machine);
        if self.0.get(&id).is_some_and(|copy| copy.parts.values().any(|&part| part == machine)) {
            self.0.remove(&id);
        }
        others
    }

    /// Returns the machines of the other parts of a copy.
    pub(super) fn others(&self, id: MigrationId, machine: MachineId) -> Vec<MachineId> {
        let parts = self.0.get(&id).map(|copy| copy.parts.values().copied().collect::<Vec<_>>());
        // A copy that came later under the same number has nothing to do with this machine.
        let mut parts = parts.filter(|parts| parts.contains(&machine)).unwrap_or_default();
        parts.retain(|&part| part != machine);
        parts
    }

    /// Returns the time by which a part that is absent must have joined.
    pub(super) fn deadline(&self, transfer_deadline_ms: u64) -> Option<Millis> {
        self.0
            .values()
            .filter(|copy| !copy.is_complete())
            .map(|copy| copy.begun.plus(transfer_deadline_ms))
            .min()
    }

    /// Returns one part of each copy of which a part is absent for too long.
    pub(super) fn late(&self, now: Millis, transfer_deadline_ms: u64) -> Vec<MachineId> {
        let is_late = |copy: &&Copy| !copy.is_complete() && now >= copy.begun.plus(transfer_deadline_ms);
        self.0.values().filter(is_late).filter_map(|copy| copy.parts.values().next().copied()).collect()
    }
}
