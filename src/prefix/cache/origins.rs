//! Origins of blocks that arrive from or leave for other pools: [`origin`](super::super::origin).

use std::collections::HashSet;

use crate::ids::BlockId;

use super::super::origin::{self, Origin, Provenance};
use super::PrefixCache;

impl PrefixCache {
    /// Returns the origin of blocks that are computed here now.
    pub fn origin(&self) -> Origin {
        self.origin_in(self.era())
    }

    pub(crate) fn origin_in(&self, era: u64) -> Origin {
        Origin { cache: self.number, era }
    }

    /// Returns whether blocks of these origins may be found here: none is unknown, or of an earlier
    /// era of this cache.
    pub fn accepts(&self, origins: &[Origin]) -> bool {
        self.accepts_in(self.era(), origins)
    }

    pub(crate) fn accepts_in(&self, era: u64, origins: &[Origin]) -> bool {
        let is_refused =
            |origin: &Origin| *origin == Origin::UNKNOWN || origin.cache == self.number && origin.era != era;
        !origins.iter().any(is_refused)
    }

    /// Returns the provenance of blocks of these [accepted](Self::accepts_in) origins.
    pub(crate) fn provenance(&self, origins: &[Origin]) -> Provenance {
        let others: Vec<_> = origins.iter().copied().filter(|origin| origin.cache != self.number).collect();
        if others.is_empty() && !origins.is_empty() {
            return Provenance::default();
        }
        let mark = |row: usize| self.row(BlockId(row as u32)).mark();
        let marks = || (0..self.rows.len()).map(mark).collect::<HashSet<u32>>();
        let mut provenance = self.origins.provenance(&others, marks);
        if others.len() < origins.len() {
            provenance.mark = provenance.computing();
        }
        provenance
    }

    pub(crate) fn origins_of(&self, id: BlockId) -> Vec<Origin> {
        let (row, provenance) = (self.row(id), self.origins.of(self.row(id).mark()));
        provenance.origins(provenance.is_own().then(|| self.origin_in(row.era())))
    }

    /// Returns the number of blocks before a cached one in its list or checkpoint, and its group of
    /// layers.
    pub(crate) fn place_of(&self, id: BlockId) -> (u32, u32) {
        (self.row(id).depth(), self.row(id).group())
    }

    #[inline]
    pub(crate) fn has_origins(&self) -> bool {
        self.origins.is_used()
    }

    #[cold]
    pub(crate) fn joined_origins(&self, blocks: &[BlockId]) -> Vec<Origin> {
        let (mut joined, mut marks) = (Vec::new(), HashSet::new());
        for &id in blocks.iter().filter(|&&id| marks.insert(self.row(id).mark())) {
            origin::join(&mut joined, &self.origins_of(id));
        }
        joined
    }
}
