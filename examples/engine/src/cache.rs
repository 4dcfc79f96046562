//! Where the K and V of sequences lie: [paged](crate::paged) in a pool, or
//! [contiguous](crate::contiguous).
//!
//! The scheduler, the workers and the model are the same for both, so that the two differ in
//! nothing but the cache when logits and speed are compared.
//!
//! A sequence grows in three steps. [`grow`](KvCache::grow) provides room for tokens,
//! [`attend`](KvCache::attend) stores their K and V layer by layer, and [`keep`](KvCache::keep)
//! makes them part of the sequence, except for rejected drafts. A lack of room is not an error: it
//! is a value that the worker answers by preempting a sequence.

use kvpool::SequenceId;

use crate::error::EngineError;

/// K and V of consecutive tokens in one layer, `[tokens][kv heads][head dim]`.
#[derive(Clone, Copy, Debug)]
pub struct Tile<'a> {
    /// K of the tokens.
    pub k: &'a [f32],
    /// V of the tokens.
    pub v: &'a [f32],
}

/// Tokens by which a sequence grows in a step.
pub struct Growth<'a, S> {
    /// The sequence.
    pub sequence: &'a mut S,
    /// Known tokens, of which there is one at least, then drafts.
    pub tokens: &'a mut Vec<u32>,
    /// Number of known tokens.
    pub known: usize,
}

impl<S> Growth<'_, S> {
    /// Returns the number of drafts.
    pub fn drafts(&self) -> usize {
        self.tokens.len() - self.known
    }
}

/// Result of an admission.
pub enum Admission<S, P> {
    /// The sequence, with room for all of the tokens that it was admitted with.
    Granted(S),
    /// There is too little room at the moment; returns what was parked.
    Lacking(Option<P>),
}

/// What is known of a sequence that is to be admitted.
#[derive(Clone, Copy, Debug)]
pub struct Candidate<'a> {
    /// Its id.
    pub id: SequenceId,
    /// Whether it precedes others.
    pub is_urgent: bool,
    /// Its tokens: the prompt, and after a preemption the decoded tokens.
    pub tokens: &'a [u32],
    /// Number of tokens that it may reach.
    pub tokens_max: usize,
}

/// Counts of what happened in a cache.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, serde::Serialize)]
pub struct CacheCounts {
    /// Tokens that were found in the prefix cache at admissions.
    pub prefix_hit_tokens: u64,
    /// Preempted sequences that were moved to the host pool.
    pub swapped: u64,
    /// Preempted sequences that are computed again.
    pub recomputed: u64,
    /// Swap-outs that were refused because a batch in flight wrote the sequence.
    pub swaps_refused: u64,
}

/// The K and V of all sequences of an engine.
pub trait KvCache: Send + Sync {
    /// The K and V of one sequence. Dropping it frees its room.
    type Sequence: Send;
    /// What remains of a preempted sequence, if it is not computed again.
    type Parked: Send;
    /// One step of a worker, in which sequences grow and are read.
    type Step;

    /// Admits a sequence, or a preempted one again.
    ///
    /// # Errors
    ///
    /// Errors other than a lack of room.
    fn admit(
        &self,
        candidate: Candidate<'_>,
        parked: Option<Self::Parked>,
    ) -> Result<Admission<Self::Sequence, Self::Parked>, EngineError>;

    /// Returns the number of tokens whose K and V are computed.
    fn computed(&self, sequence: &Self::Sequence) -> usize;

    /// Begins a step.
    fn begin(&self) -> Self::Step;

    /// Provides room for the next tokens of all of these sequences, or of none.
    ///
    /// Returns the places of the sequences that lack room for their known tokens; empty if none
    /// does. Drafts without room are removed. If the tokens cannot be computed afterwards, drop the
    /// sequences before the step.
    ///
    /// # Errors
    ///
    /// Errors other than a lack of room.
    fn grow(
        &self,
        step: &mut Self::Step,
        growths: &mut [Growth<'_, Self::Sequence>],
    ) -> Result<Vec<usize>, EngineError>;

    /// Stores K and V of new tokens in one layer, the first of them at position `first`, and passes
    /// the K and V of all tokens up to the last of them to `read`, in tiles.
    ///
    /// # Errors
    ///
    /// Errors of the storage.
    #[allow(clippy::too_many_arguments, reason = "a struct of these would be named nowhere else")]
    fn attend(
        &self,
        step: &mut Self::Step,
        sequence: &mut Self::Sequence,
        layer: usize,
        first: usize,
        k: &[f32],
        v: &[f32],
        read: impl FnOnce(&[Tile<'_>]),
    ) -> Result<(), EngineError>;

    /// Ends a step.
    fn finish(&self, step: Self::Step);

    /// Keeps the first `computed` tokens, and forgets the drafts behind them.
    ///
    /// `tokens` are the tokens of the sequence, which may be more. Call it after the step.
    ///
    /// # Errors
    ///
    /// Errors of the pool.
    fn keep(&self, sequence: &mut Self::Sequence, tokens: &[u32], computed: usize)
    -> Result<(), EngineError>;

    /// Creates a sequence with the same computed tokens; none if there is no room.
    ///
    /// # Errors
    ///
    /// Errors other than a lack of room.
    fn fork(
        &self,
        sequence: &mut Self::Sequence,
        id: SequenceId,
    ) -> Result<Option<Self::Sequence>, EngineError>;

    /// Frees the room of a sequence, and returns what is needed to continue it, if that is more
    /// than its tokens.
    ///
    /// # Errors
    ///
    /// Errors of a transfer.
    fn preempt(&self, sequence: Self::Sequence) -> Result<Option<Self::Parked>, EngineError>;

    /// Returns the counts so far.
    fn counts(&self) -> CacheCounts;
}
