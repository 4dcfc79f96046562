//! The cache in a pool: blocks, shared prefixes, copy-on-write forks, and swaps to a host pool.
//!
//! Tokens are appended to a sequence in the step that computes them, and are final then; only
//! speculative tokens are *drafted*, and committed once they are accepted. Full blocks are sealed
//! when the step's batch ends: other sequences find them, and compaction moves them. The sequences
//! of a step that failed must therefore close before the step ends.
//!
//! This file is the only one that reads and writes K and V in the pool.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use kvpool::{Append, Batch, Pool, Sequence, SequenceId, StepError, Tokens};

use crate::admission::{self, is_lack};
use crate::cache::{Admission, CacheCounts, Candidate, Growth, KvCache, Tile};
use crate::error::EngineError;
use crate::preempt::{Swap, SwapOut};

/// A cache in a pool.
pub struct Paged {
    pool: Pool,
    swap: Option<Swap>,
    kv_row: usize,
    headroom: usize,
    hit_tokens: AtomicU64,
    swapped: AtomicU64,
    recomputed: AtomicU64,
    swaps_refused: AtomicU64,
}

impl Paged {
    /// Creates a cache in a pool whose layout has `kv_row` elements of K per token and layer.
    ///
    /// An admission reserves blocks for `headroom` tokens to decode. Preempted sequences are
    /// computed again if there is no host pool to swap them to.
    pub fn new(pool: Pool, kv_row: usize, headroom: usize, swap: Option<Swap>) -> Self {
        let zero = || AtomicU64::new(0);
        let (hit_tokens, swapped, recomputed, swaps_refused) = (zero(), zero(), zero(), zero());
        Self { pool, swap, kv_row, headroom, hit_tokens, swapped, recomputed, swaps_refused }
    }

    /// Returns the pool.
    pub fn pool(&self) -> &Pool {
        &self.pool
    }
}

/// Returns whether a sequence grows by a decoded token, whose id the pool does not know yet.
fn is_decode(growth: &Growth<'_, Sequence>) -> bool {
    growth.known == 1 && growth.sequence.announced() <= growth.sequence.len()
}

impl KvCache for Paged {
    type Sequence = Sequence;
    type Parked = Sequence;
    type Step = Batch;

    fn admit(
        &self,
        candidate: Candidate<'_>,
        parked: Option<Sequence>,
    ) -> Result<Admission<Sequence, Sequence>, EngineError> {
        // The last token is chosen, and never computed.
        let headroom = self.headroom.min(candidate.tokens_max - 1 - candidate.tokens.len());
        if let (Some(swap), Some(parked)) = (&self.swap, parked) {
            let behind = candidate.tokens.len() + headroom - parked.len();
            let resumed = swap.swap_in(&self.pool, &parked, behind)?;
            return Ok(resumed.map_or_else(|| Admission::Lacking(Some(parked)), Admission::Granted));
        }
        let admitted = admission::admit(&self.pool, candidate, headroom)?;
        let Some(granted) = admitted else { return Ok(Admission::Lacking(None)) };
        self.hit_tokens.fetch_add(granted.len() as u64, Relaxed);
        Ok(Admission::Granted(granted))
    }

    fn computed(&self, sequence: &Sequence) -> usize {
        sequence.committed()
    }

    fn begin(&self) -> Batch {
        self.pool.begin_batch()
    }

    fn grow(
        &self,
        batch: &mut Batch,
        growths: &mut [Growth<'_, Sequence>],
    ) -> Result<Vec<usize>, EngineError> {
        let appends = growths.iter_mut().map(|growth| match is_decode(growth) {
            true => Append::new(growth.sequence, &growth.tokens[..1]),
            false => Append::new(growth.sequence, growth.known),
        });
        let lacking = match batch.step(&mut appends.collect::<Vec<_>>()) {
            Ok(_) => Vec::new(),
            Err(StepError::Lacking { sequences, .. }) => sequences,
            Err(StepError::Sequence { id, error }) if is_lack(&error) => vec![id],
            Err(error) => return Err(error.into()),
        };
        if !lacking.is_empty() {
            let lacks = |growth: &Growth<'_, Sequence>| lacking.contains(&growth.sequence.id());
            return Ok((0..growths.len()).filter(|&place| lacks(&growths[place])).collect());
        }
        // Drafts get blocks last, and preempt no sequence.
        for Growth { sequence, tokens, known } in growths.iter_mut().filter(|growth| growth.drafts() > 0) {
            match batch.append(sequence, Tokens::Draft(tokens.len() - *known)) {
                Err(error) if is_lack(&error) => tokens.truncate(*known),
                Err(error) => return Err(error.into()),
                Ok(_) => {}
            }
        }
        Ok(Vec::new())
    }

    fn attend(
        &self,
        batch: &mut Batch,
        sequence: &mut Sequence,
        layer: usize,
        first: usize,
        k: &[f32],
        v: &[f32],
        read: impl FnOnce(&[Tile<'_>]),
    ) -> Result<(), EngineError> {
        let end = first + k.len() / self.kv_row;
        batch.store(sequence, layer, first..end, k.into(), v.into())?;
        let tiles = (0..sequence.block_count()).map(|index| batch.tile(sequence, layer, index));
        let tiles = tiles.map(|tile| tile.map(|(k, v)| Tile { k, v })).collect::<Result<Vec<_>, _>>()?;
        read(&tiles);
        Ok(())
    }

    fn finish(&self, batch: Batch) {
        batch.finish();
    }

    fn keep(&self, sequence: &mut Sequence, tokens: &[u32], computed: usize) -> Result<(), EngineError> {
        // The accepted drafts.
        if let Some(new) = tokens[..computed].get(sequence.announced()..) {
            sequence.announce(new)?;
        }
        sequence.commit(computed)?;
        Ok(sequence.truncate(computed)?)
    }

    fn fork(&self, parent: &mut Sequence, id: SequenceId) -> Result<Option<Sequence>, EngineError> {
        // Reserved blocks stay the parent's.
        Ok(Some(parent.fork(id)?))
    }

    fn preempt(&self, sequence: Sequence) -> Result<Option<Sequence>, EngineError> {
        if let Some(swap) = self.swap.as_ref().filter(|swap| sequence.len() >= swap.tokens_min) {
            match swap.swap_out(&self.pool, sequence)? {
                SwapOut::Swapped(parked) => {
                    self.swapped.fetch_add(1, Relaxed);
                    return Ok(Some(*parked));
                }
                SwapOut::Refused => _ = self.swaps_refused.fetch_add(1, Relaxed),
                SwapOut::Full => {}
            }
        }
        // It is closed, and its full blocks are cached until their frames are needed.
        self.recomputed.fetch_add(1, Relaxed);
        Ok(None)
    }

    fn counts(&self) -> CacheCounts {
        CacheCounts {
            prefix_hit_tokens: self.hit_tokens.load(Relaxed),
            swapped: self.swapped.load(Relaxed),
            recomputed: self.recomputed.load(Relaxed),
            swaps_refused: self.swaps_refused.load(Relaxed),
        }
    }
}
