//! Blocks that go to another pool, and come back, through the pool's door.

use crate::error::TransferError;
use crate::migrate::{self, BringBackReport, MigrateError, MigrationReport, OffloadReport};
use crate::prefix::PrefixKeys;
use crate::sequence::Sequence;

use super::Pool;

/// Where a sequence migrates to.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Target<'a> {
    /// Another pool of this process: of another device, or of the host.
    Device(&'a Pool),
}

impl Pool {
    /// Moves a sequence to another pool: its blocks' bytes are copied, in as few runs as they lie in, and it goes on there, with
    /// the same id, tokens, committed length and priority. Blocks that are cached there already are shared instead. Then it is closed here. If the
    /// other pool's prefix cache hashes alike, what is known of its tokens goes with it, and is found there; else its new
    /// blocks are not cached there, as those of a sequence whose tokens were never announced.
    ///
    /// On a tokio runtime the bytes are copied by one of its threads for blocking work; elsewhere by whoever polls. A future that is
    /// dropped stops the copying and closes the sequence; use [`replicate`](Self::replicate) to keep it.
    ///
    /// ```
    /// # use kvpool::{ids::SequenceId, pool::{Pool, Target}, storage::KvLayout};
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let layout = KvLayout::named("tiny")?;
    /// let busy = Pool::builder(layout.clone()).blocks(100).build()?;
    /// let idle = Pool::builder(layout).blocks(1_000).build()?;
    /// let mut sequence = busy.sequence(SequenceId(7)).open()?;
    /// let mut batch = busy.begin_batch();
    /// batch.append(&mut sequence, 42)?;
    /// batch.finish();
    /// let (mut sequence, report) = busy.migrate(sequence, Target::Device(&idle)).await?;
    /// assert_eq!((sequence.len(), report.carried.blocks), (42, 11), "this layout has blocks of 4 tokens");
    /// assert_eq!(busy.free_blocks(), 100);
    /// idle.begin_batch().append(&mut sequence, 1)?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`MigrateError`], which has the sequence as it was: [`TransferError::SamePool`], [`TransferError::ForeignSequence`],
    /// [`TransferError::BeingWritten`], [`TransferError::NoStorage`], [`TransferError::Alloc`] for no room,
    /// [`TransferError::Sequence`] for an id that is open there, [`TransferError::Storage`] for blocks of another form or a copy
    /// that failed.
    pub async fn migrate(
        &self,
        sequence: Sequence,
        target: Target<'_>,
    ) -> Result<(Sequence, MigrationReport), MigrateError> {
        let Target::Device(to) = target;
        migrate::migrate(&self.0.sequences, sequence, &to.0.sequences).await
    }

    /// As [`migrate`](Self::migrate), and leaves the sequence open here as well: both go on, each on its own. The future
    /// may be dropped at any time, and nothing has happened then, but that the id stays open there until the piece that is being
    /// copied has ended.
    ///
    /// # Errors
    ///
    /// As for [`migrate`](Self::migrate); nothing has happened.
    pub async fn replicate(
        &self,
        sequence: &Sequence,
        target: Target<'_>,
    ) -> Result<(Sequence, MigrationReport), TransferError> {
        let Target::Device(to) = target;
        migrate::replicate(&self.0.sequences, sequence, &to.0.sequences).await
    }

    /// Copies up to `blocks_max` cached blocks that nobody owns into another pool's prefix cache, and evicts them here, those
    /// first that would be evicted first. What is looked up meanwhile stays. Both caches must hash alike: the same
    /// [hashing and key](crate::prefix::PrefixConfig). If the other pool has less room, fewer go; its own coldest blocks make
    /// room.
    ///
    /// A hash says which tokens a block holds, and not of which model, nor of which tensor-parallel rank: pools that share another one
    /// for what they offload need a [salt](PrefixKeys::salt) each, unless their bytes are the same. While blocks are on their
    /// way they are nobody's to evict: who allocates here meanwhile wants a small `blocks_max`.
    ///
    /// The future may be dropped at any time: then it is done to the end, or all blocks are where they were. Who
    /// [clears](Self::clear_prefix_cache) both caches meanwhile clears this one first: what is on its way is found in
    /// neither then.
    ///
    /// # Errors
    ///
    /// All blocks are where they were: [`TransferError::SamePool`], [`TransferError::NoStorage`], [`TransferError::NoCache`],
    /// [`TransferError::OtherHashing`], [`TransferError::Alloc`] for no room at all or `blocks_max` of zero,
    /// [`TransferError::Storage`].
    pub async fn offload(&self, to: &Pool, blocks_max: usize) -> Result<OffloadReport, TransferError> {
        migrate::offload(&self.0.sequences, &to.0.sequences, blocks_max).await
    }

    /// Copies back what the other pool has cached of these tokens and this pool has not, as far as one block follows another from
    /// the start, so that a [sequence](Self::sequence) that is opened with them finds it here. The other pool's copies stay.
    ///
    /// The future may be dropped at any time: then it is done to the end, or nothing has come.
    ///
    /// # Errors
    ///
    /// Nothing has come: as for [`offload`](Self::offload), and [`TransferError::Prefix`] for a key of no bytes.
    pub async fn bring_back(
        &self,
        from: &Pool,
        keys: &PrefixKeys<'_>,
        tokens: &[u32],
    ) -> Result<BringBackReport, TransferError> {
        migrate::bring_back(&from.0.sequences, &self.0.sequences, keys, tokens).await
    }
}
