//! `Pool` methods for transports and nodes.

use std::sync::{Arc, PoisonError};

use crate::error::{AllocError, Invalid, PrefixError, TransferError};
use crate::migrate::{
    BringBackReport, End, Export, HeadRange, Import, Manifest, MigrateError, MigrationReport, OffloadReport,
    Remote, Remotes, bring_back_from,
};
use crate::prefix::{BlockHash, PrefixKeys};
use crate::sequence::{AnySequence, PromptBlock, PromptBlocks};

use super::Pool;

impl Pool {
    pub(super) fn end(&self) -> Result<End, TransferError> {
        End::new(&self.0.sequences, &self.0.transfers)
    }

    /// Begins to move a sequence to another pool over a [transport](crate::transport).
    ///
    /// # Errors
    /// [`TransferError::ForeignSequence`], [`TransferError::BeingWritten`],
    /// [`TransferError::NoStorage`], [`TransferError::Handle`]. The sequence is returned unchanged.
    pub fn export<S: AnySequence>(&self, sequence: S) -> Result<Export<S>, MigrateError<S>> {
        match self.end() {
            Ok(end) => Export::of(&end, sequence),
            Err(error) => Err(MigrateError { error, sequence: Box::new(sequence) }),
        }
    }

    /// Begins to copy a sequence, which stays open, or fails like [`export`](Self::export).
    pub fn export_copy<S: AnySequence>(&self, sequence: &S) -> Result<Export<S>, TransferError> {
        Export::copy_of(&self.end()?, sequence)
    }

    /// Begins to move up to `blocks_max` evictable blocks, in eviction order, to another pool's
    /// cache. Fails without storage or cache, and if `blocks_max` is zero.
    pub fn export_cached(&self, blocks_max: usize) -> Result<Export, TransferError> {
        if blocks_max == 0 {
            return Err(AllocError::Zero.into());
        }
        Export::coldest(&self.end()?, blocks_max)
    }

    /// Begins to copy the cached blocks with these hashes to another pool's cache, up to the first
    /// one that is not cached: a part of a chain, or of what a [prompt](Self::prompt_blocks) needs
    /// in every group of layers. Fails without storage or cache.
    pub fn export_prefix(&self, hashes: &[BlockHash]) -> Result<Export, TransferError> {
        Export::prefix(&self.end()?, hashes.iter().copied())
    }

    /// Reserves the blocks of a manifest, an untrusted input, and shares those that are cached
    /// here. [Accepts](Import::accepted) as many cached blocks as there is room for.
    ///
    /// # Errors
    /// [`TransferError::Invalid`], [`TransferError::NoStorage`], [`TransferError::Sequence`] if the
    /// id is open here, [`TransferError::Alloc`] if there is no room; nothing was reserved.
    pub fn import(&self, manifest: &Manifest) -> Result<Import, TransferError> {
        let import = Import::new(&self.end()?, manifest)?;
        self.0.migrations().stale_blocks += import.stale_blocks() as u64;
        Ok(import)
    }

    /// Reserves blocks for cached blocks from a store outside any pool, and shares those cached
    /// here.
    ///
    /// The hashes are those of a chain from its block `first` on, which must not repeat; as many
    /// are [accepted](Import::accepted) as there is room for. The caller verifies the bytes of each
    /// missing block, and [confirms](Import::arrived) them. Fails like [`import`](Self::import), or
    /// without a cache, and in a pool with several groups of layers, whose blocks
    /// [`import_needed`](Self::import_needed) takes.
    pub fn import_prefix(&self, first: u32, hashes: &[BlockHash]) -> Result<Import, TransferError> {
        self.0.sequences.check_one_list("hashes of an import")?;
        Import::prefix(&self.end()?, first, hashes)
    }

    /// As [`import_prefix`](Self::import_prefix), for blocks that a hit needs in any group of
    /// layers: only together with the others are they one.
    pub fn import_needed(&self, needed: &[PromptBlock]) -> Result<Import, TransferError> {
        Import::needed(&self.end()?, needed)
    }

    /// Returns the hashes of a prompt's blocks in every group of layers, from which follows what a
    /// hit needs.
    ///
    /// # Errors
    /// [`PrefixError::NoCache`], [`PrefixError::Invalid`].
    pub fn prompt_blocks(&self, keys: &PrefixKeys<'_>, tokens: &[u32]) -> Result<PromptBlocks, PrefixError> {
        let cache = self.0.sequences.cache().ok_or(PrefixError::NoCache)?;
        Ok(self.0.sequences.prompt_blocks(cache, keys, tokens)?)
    }

    /// Returns the blocks of a prompt whose hashes are known, from its first block on, in a pool
    /// with one group of layers.
    ///
    /// # Errors
    /// [`Invalid`] in a pool with several, where blocks follow from
    /// [tokens](Self::prompt_blocks) only.
    pub fn blocks_of_hashes(&self, hashes: &[BlockHash]) -> Result<PromptBlocks, Invalid> {
        self.0.sequences.blocks_of_hashes(hashes)
    }

    /// Returns whether a block is cached for the hash. Changes no recency.
    pub fn is_cached(&self, hash: BlockHash) -> bool {
        self.0.sequences.cache().is_some_and(|cache| cache.has(&self.0.blocks, hash))
    }

    /// Reserves the blocks of a manifest whose source holds other heads of the model.
    ///
    /// This pool holds the heads `own`. Further sources are [added](Import::add_source), and all
    /// bytes [written](Import::write) one block at a time. Fails like [`import`](Self::import), or
    /// if the source shares no head with this pool, or blocks differ in more than heads.
    pub fn import_heads(&self, manifest: &Manifest, own: HeadRange) -> Result<Import, TransferError> {
        self.0.sequences.check_one_list("import of heads")?;
        Import::of_heads(&self.end()?, manifest, own)
    }

    /// Returns whether an export belongs to this pool; the frames of others have no meaning here.
    pub fn has_exported<S: AnySequence>(&self, export: &Export<S>) -> bool {
        export.is_of(&self.0.sequences)
    }

    /// Sets the nodes that the pool can [reach](Self::migrate_to_node). Keeps a weak reference;
    /// fails with [`TransferError::HasNodes`] until the present nodes are dropped.
    pub fn set_remotes(&self, remotes: &Arc<dyn Remotes>) -> Result<(), TransferError> {
        let mut present = self.0.remotes.write().unwrap_or_else(PoisonError::into_inner);
        if present.as_ref().is_some_and(|present| present.strong_count() > 0) {
            return Err(TransferError::HasNodes { pool: self.tag() });
        }
        *present = Some(Arc::downgrade(remotes));
        Ok(())
    }

    /// Returns a node that the pool can [reach](Self::migrate_to_node), for exports and hashes.
    pub fn remote(&self, name: &str) -> Result<Arc<dyn Remote>, TransferError> {
        let remotes = self.0.remotes.read().unwrap_or_else(PoisonError::into_inner).clone();
        let remote = remotes.and_then(|remotes| remotes.upgrade()?.remote(name));
        remote.ok_or_else(|| TransferError::UnknownNode { name: name.into() })
    }

    /// Moves a sequence to a node that the pool [knows](Self::set_remotes) by this name. It
    /// continues there, and is closed here.
    ///
    /// Waits neither for room, nor for the batches that write the sequence: await
    /// [`settled`](Self::settled) first. Dropping the future closes the sequence, whether or not
    /// the transfer completes.
    ///
    /// # Errors
    /// As for [`migrate`](Self::migrate), and [`TransferError::UnknownNode`],
    /// [`TransferError::Transport`], [`TransferError::Node`]; [`TransferError::InDoubt`] if it is
    /// unknown whether the other node has the sequence, which must then not continue here.
    pub async fn migrate_to_node<S: AnySequence>(
        &self,
        sequence: S,
        node: &str,
    ) -> Result<MigrationReport, MigrateError<S>> {
        let moved = async {
            let remote = match self.remote(node) {
                Ok(remote) => remote,
                Err(error) => return Err(MigrateError { error, sequence: Box::new(sequence) }),
            };
            let tokens = sequence.lists().length();
            let sent = remote.send(self.export(sequence)?.into_grouped()).await.map_err(|failed| {
                let sequence = failed.export.cancel();
                let sequence = sequence.unwrap_or_else(|| unreachable!("the export owned it"));
                MigrateError { error: failed.error, sequence: Box::new(S::of_lists(sequence)) }
            })?;
            Ok(sent.report(tokens))
        };
        let moved = traced!("kvpool.migrate", moved).await;
        let outcome = moved.as_ref().map(|report| (&report.carried, 0)).map_err(|failed| &failed.error);
        self.0.migrations().ended(outcome, |counts| &mut counts.migrated);
        moved
    }

    /// Copies a sequence to a node, or fails like [`migrate_to_node`](Self::migrate_to_node).
    pub async fn replicate_to_node<S: AnySequence>(
        &self,
        sequence: &S,
        node: &str,
    ) -> Result<MigrationReport, TransferError> {
        let copied = async {
            let remote = self.remote(node)?;
            let export = self.export_copy(sequence)?.into_grouped();
            let sent = remote.send(export).await.map_err(|failed| failed.error)?;
            Ok(sent.report(sequence.lists().length()))
        };
        let copied = traced!("kvpool.replicate", copied).await;
        let outcome = copied.as_ref().map(|report| (&report.carried, 0));
        self.0.migrations().ended(outcome, |counts| &mut counts.replicated);
        copied
    }

    /// Moves up to `blocks_max` evictable blocks to a node's prefix cache, like
    /// [`offload`](Self::offload), or fails like [`migrate_to_node`](Self::migrate_to_node).
    pub async fn offload_to_node(
        &self,
        node: &str,
        blocks_max: usize,
    ) -> Result<OffloadReport, TransferError> {
        let offload = async {
            let remote = self.remote(node)?;
            let export = self.export_cached(blocks_max)?.into_grouped();
            let sent = remote.send(export).await.map_err(|failed| failed.error)?;
            Ok(OffloadReport::new(sent.carried, sent.shared_blocks, sent.finished))
        };
        self.offloading(offload).await
    }

    /// Copies cached blocks of these tokens from a node into this pool's prefix cache, continuing
    /// the prefix cached here, which stays: what every group of layers needs at the longest
    /// boundary for which there is room. Without room, none come.
    ///
    /// Unless the pool has one group of layers, without a window, the node is asked first which
    /// blocks it has. If it sends fewer, the boundary is an earlier one. Blocks come in parts: if
    /// the future is dropped, or after some came an error ends the operation, these stay.
    ///
    /// # Errors
    /// Only if no block came: [`TransferError::UnknownNode`], [`TransferError::Transport`],
    /// [`TransferError::Node`], [`TransferError::NoStorage`], [`TransferError::NoCache`],
    /// [`TransferError::Invalid`], [`TransferError::Alloc`] for a lost device.
    pub async fn bring_back_from_node(
        &self,
        node: &str,
        keys: &PrefixKeys<'_>,
        tokens: &[u32],
    ) -> Result<BringBackReport, TransferError> {
        let came = async {
            let remote = self.remote(node)?;
            let (end, cache) = (self.end()?, self.prefix_cache());
            let cache = cache.ok_or(TransferError::NoCache { pool: self.tag() })?;
            let blocks = self.0.sequences.prompt_blocks(cache, keys, tokens)?;
            bring_back_from(&end, &*remote, &blocks).await
        };
        self.bringing_back(came).await
    }
}
