//! Which heads of which blocks have arrived from the sources of an import.

use std::collections::{BTreeMap, BTreeSet};

use crate::error::{FormError, ManifestError, TransferError};

use super::checksum::checksum;
use super::form::PackedForm;
use super::heads::{HeadRange, check_split, copy_shared};
use super::manifest::Manifest;

/// The sources of an import that hold other heads than it, and what has arrived from them.
pub(super) struct Gather {
    form: PackedForm,
    own: HeadRange,
    /// The first is the one that the import was prepared with.
    sources: Vec<Manifest>,
    /// Heads of the model that have arrived, by place.
    arrived: BTreeMap<u32, BTreeSet<u32>>,
}

impl Gather {
    pub(super) fn new(form: PackedForm, own: HeadRange) -> Result<Self, ManifestError> {
        own.check(form.heads())?;
        Ok(Self { form, own, sources: Vec::new(), arrived: BTreeMap::new() })
    }

    /// Adds a source. Its heads may overlap those of others.
    pub(super) fn add(&mut self, manifest: &Manifest) -> Result<(), ManifestError> {
        let heads = manifest.heads().ok_or(FormError::HeadsUnknown { end: "source" })?;
        if check_split(manifest.form(), heads, &self.form, self.own)?.is_none() {
            let (first, end, total) = (heads.heads().start, heads.heads().end, heads.total());
            return Err(FormError::HeadRange { first, end, total, heads: self.form.heads() }.into());
        }
        if let Some(first) = self.sources.first() {
            first.check_same_blocks(manifest)?;
        }
        self.sources.push(manifest.clone());
        Ok(())
    }

    /// Checks the bytes of a block from the source with these heads.
    pub(super) fn check(
        &self,
        from: Option<HeadRange>,
        place: u32,
        bytes: &[u8],
    ) -> Result<HeadRange, TransferError> {
        let unknown = || ManifestError::from(FormError::HeadsUnknown { end: "source" });
        let from = from.ok_or_else(unknown)?;
        let source = self.sources.iter().find(|source| source.heads() == Some(from)).ok_or_else(unknown)?;
        if source.checksums().get(place as usize) != Some(&checksum(bytes)) {
            return Err(TransferError::Checksum { place });
        }
        match (bytes.len(), source.form().packed_bytes()) {
            (got, want) if got == want => Ok(from),
            (got, want) => Err(ManifestError::from(FormError::Bytes { got, want }).into()),
        }
    }

    /// Copies the heads that this end holds from a checked block into a packed block of this end.
    pub(super) fn insert(&self, from: HeadRange, bytes: &[u8], packed: &mut [u8]) {
        copy_shared(&self.form, (from, bytes), (self.own, packed));
    }

    /// Records that a block has arrived from a source. Returns whether it is complete.
    pub(super) fn arrived(&mut self, place: u32, from: HeadRange) -> bool {
        let arrived = self.arrived.entry(place).or_default();
        arrived.extend(from.common(&self.own).iter().flat_map(HeadRange::heads));
        arrived.len() == self.own.heads().len()
    }
}
