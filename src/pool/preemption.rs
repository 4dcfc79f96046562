//! Preemption: a sequence gives up its blocks, and continues later in this or another pool.

use std::time::Instant;

use crate::error::TransferError;
use crate::ids::{PoolTag, SequenceId};
use crate::migrate::{Kind, MigrateError, MigrationReport};
use crate::sequence::{AnySequence, Footprint, GroupedSequence, Sequence};
use crate::sync::call;

use super::Pool;
use super::wait::{CallUntil, Wait};

/// How a sequence is preempted.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Preempt<'a> {
    /// Closes it. Its full blocks of known tokens stay in the prefix cache, if any; the rest must
    /// be recomputed. When a sequence is opened with its id again, the blocks that it finds count
    /// as [resumed](crate::prefix::PrefixStats::resumed_lookups), not as hits.
    Recompute,
    /// Moves it with all its bytes to another pool, usually one in host memory.
    Swap(&'a Pool),
}

/// Result of a preemption. `freed_blocks + cached_blocks + shared_blocks` is the number of blocks
/// that the sequence had, unless other threads concurrently share or release these blocks.
#[derive(Debug)]
#[non_exhaustive]
pub struct Preempted<S: AnySequence = Sequence> {
    /// Id of the sequence.
    pub id: SequenceId,
    /// Blocks that became free here, or will when the batches in flight that may read them end.
    pub freed_blocks: usize,
    /// Blocks that became evictable here.
    pub cached_blocks: usize,
    /// Blocks that other owners still reference.
    pub shared_blocks: usize,
    /// Leading tokens whose bytes still exist: all of a swapped sequence; of a closed one those that
    /// cached blocks serve, until these are evicted.
    pub tokens_kept: usize,
    /// Other tokens, which have to be recomputed.
    pub tokens_lost: usize,
    /// The sequence in the other pool; `None` if it was closed.
    pub swapped: Option<Swapped<S>>,
}

/// A sequence that was swapped to another pool.
#[derive(Debug)]
#[non_exhaustive]
pub struct Swapped<S: AnySequence = Sequence> {
    /// The sequence, which belongs to the other pool.
    pub sequence: S,
    /// Tag of the other pool.
    pub pool: PoolTag,
    /// The copied blocks.
    pub report: MigrationReport,
}

impl GroupedSequence {
    /// Takes the blocks of a sequence with several groups of layers away, like
    /// [`Preempt::Recompute`]: it is closed. [Admit](Pool::admit_grouped) it again with its id and
    /// tokens. Returns what was given back in all groups and states.
    ///
    /// Of [`tokens_kept`](Preempted::tokens_kept), an admission may hit fewer: those behind the
    /// window of a group are gone, and it needs a checkpoint of every state. A state that a batch in
    /// flight writes is no checkpoint yet: its blocks count as freed.
    pub fn preempt(self) -> Preempted<Self> {
        let _call = call();
        let (id, tokens) = (self.id(), self.len());
        Preempted::of(id, tokens, self.close_counted(true), None)
    }
}

impl<S: AnySequence> Preempted<S> {
    fn of(id: SequenceId, tokens: usize, closed: Footprint, swapped: Option<Swapped<S>>) -> Self {
        let found = closed.found.min(tokens);
        let tokens_kept = if swapped.is_some() { tokens } else { found };
        Self {
            id,
            freed_blocks: closed.freed,
            cached_blocks: closed.cached,
            shared_blocks: closed.shared,
            tokens_kept,
            tokens_lost: tokens - tokens_kept,
            swapped,
        }
    }
}

impl Pool {
    /// Takes a sequence's blocks away, to make room for others.
    ///
    /// [`Preempt::Swap`] first waits until the batches that write the sequence have
    /// [ended](Self::settled), at most until the deadline of [`Wait::until`], and then copies it.
    /// The calling task must hold no such batch. It does not wait for room in the other pool, so
    /// that the caller can recompute instead; [`resume`](Self::resume) brings the sequence back.
    /// [`Preempt::Recompute`] does not wait: blocks that a batch in flight writes stay in use, and
    /// are cached when it finishes. Dropping the future closes the sequence; at a deadline it is
    /// returned.
    ///
    /// ```
    /// # use kvpool::{SequenceId, Pool, Preempt, ResumeOptions, storage::KvLayout};
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let layout = KvLayout::named("tiny")?;
    /// let pool = Pool::builder(layout.clone()).blocks(100).build()?;
    /// let host = Pool::builder(layout).blocks(1_000).build()?;
    /// let mut sequence = pool.sequence(SequenceId(7)).open()?;
    /// let mut step = pool.begin_batch();
    /// step.append(&mut sequence, 42)?;
    /// step.finish();
    /// let preempted = pool.preempt(sequence, Preempt::Swap(&host)).await?;
    /// // This layout has blocks of 4 tokens.
    /// assert_eq!((preempted.freed_blocks, preempted.tokens_kept), (11, 42));
    /// let swapped = preempted.swapped.expect("it was swapped").sequence;
    /// let (sequence, _) = pool.resume(&swapped, ResumeOptions::new().headroom(20)).await?;
    /// drop(swapped);
    /// assert_eq!((sequence.len(), sequence.reserved_blocks()), (42, 5));
    /// # Ok(())
    /// # }
    /// ```
    /// # Errors
    /// Those of [`migrate`](Self::migrate) for a swap, else [`TransferError::ForeignSequence`]. The
    /// sequence is returned unchanged.
    pub fn preempt<'a, S: AnySequence>(
        &'a self,
        sequence: S,
        how: Preempt<'a>,
    ) -> Wait<impl CallUntil<Output = Result<Preempted<S>, MigrateError<S>>, Future: Send>> {
        Wait::new(move |deadline| self.preempt_by(sequence, how, deadline))
    }

    async fn preempt_by<S: AnySequence>(
        &self,
        sequence: S,
        how: Preempt<'_>,
        deadline: Option<Instant>,
    ) -> Result<Preempted<S>, MigrateError<S>> {
        let swapped = match how {
            _ if !self.owns(sequence.lists().first()) => {
                let error = TransferError::ForeignSequence { id: sequence.id(), pool: self.tag() };
                return Err(MigrateError { error, sequence: Box::new(sequence) });
            }
            Preempt::Recompute => None,
            Preempt::Swap(to) => {
                let kind: Kind = |counts| &mut counts.swapped_out;
                match self.replicate_settled(&sequence, to, deadline, kind).await {
                    Ok((sequence, report)) => Some(Swapped { sequence, pool: to.tag(), report }),
                    Err(error) => return Err(MigrateError { error, sequence: Box::new(sequence) }),
                }
            }
        };
        let (id, tokens) = (sequence.id(), sequence.lists().length());
        let closed = sequence.close(swapped.is_none());
        Ok(Preempted::of(id, tokens, closed, swapped))
    }
}
