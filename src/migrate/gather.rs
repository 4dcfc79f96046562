//! The heads of blocks that have arrived from the sources of an import.

use std::collections::{BTreeMap, BTreeSet};

use crate::error::{Invalid, TransferError};

use crate::storage::backend::check;

use super::checksum::checksum;
use super::form::PackedForm;
use super::heads::{HeadRange, check_split, copy_shared};
use super::manifest::Manifest;

/// The error of a source whose heads are not stated, or are not those of its manifest.
fn unknown_heads() -> Invalid {
    Invalid::new("heads of the source", "none", "those of its manifest")
}

/// The sources of an import with other heads, and what has arrived from them.
pub(super) struct Gather {
    form: PackedForm,
    own: HeadRange,
    /// The first is the one that the import was prepared with.
    sources: Vec<Manifest>,
    /// Heads of the model that have arrived, by place.
    arrived: BTreeMap<u32, BTreeSet<u32>>,
}

impl Gather {
    pub(super) fn new(form: PackedForm, own: HeadRange) -> Result<Self, Invalid> {
        own.check(form.heads())?;
        Ok(Self { form, own, sources: Vec::new(), arrived: BTreeMap::new() })
    }

    /// Adds a source. Its heads may overlap those of others.
    pub(super) fn add(&mut self, manifest: &Manifest) -> Result<(), Invalid> {
        let heads = manifest.heads().ok_or_else(unknown_heads)?;
        if check_split(manifest.form(), heads, &self.form, self.own)?.is_none() {
            return Err(heads.refused(self.form.heads()));
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
        let from = from.ok_or_else(unknown_heads)?;
        let source = self.sources.iter().find(|source| source.heads() == Some(from));
        let source = source.ok_or_else(unknown_heads)?;
        if source.checksums().get(place as usize) != Some(&checksum(bytes)) {
            return Err(TransferError::Checksum { place });
        }
        check::packed_bytes(bytes.len(), source.form().packed_bytes())?;
        Ok(from)
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
