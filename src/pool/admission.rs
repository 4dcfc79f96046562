//! Admission of sequences, and reservations of running ones.

use crate::block::{Class, Operation, Waiting};
use crate::error::{AllocError, SequenceError};
use crate::prefix::PrefixKeys;
use crate::sequence::{AdmitRequest, GroupedSequence, PinnedInfo, PinnedPrefix, Sequence};
use crate::sync::call;

use super::Pool;
use super::wait::{CallUntil, Wait};

impl Pool {
    /// Opens a sequence with its cached prefix, and reserves the blocks for the rest of its prompt
    /// and its headroom. Never waits.
    ///
    /// [`Sequence::len`] then returns the number of cached tokens. Appends use the [reserved
    /// blocks](Sequence::reserved_blocks) first, and cannot fail for lack of blocks while these
    /// last. Opening the sequence with [`tokens`](crate::SequenceBuilder::tokens) instead reserves
    /// nothing.
    ///
    /// # Errors
    /// [`SequenceError::Alloc`], also while a request of at least its priority waits;
    /// [`SequenceError::AlreadyOpen`], [`SequenceError::Invalid`] for no or too many tokens;
    /// [`SequenceError::Prefix`] for a key of zero bytes, or a retention time that has passed.
    pub fn admit(&self, request: &AdmitRequest<'_>) -> Result<Sequence, SequenceError> {
        let _call = call();
        let _timing = self.0.sampler.start(Operation::Admit);
        let mut admission = self.0.sequences.admission(request)?;
        admission.try_now()?;
        Ok(admission.admitted())
    }

    /// Admits a sequence like [`admit`](Self::admit), and waits in the queue of
    /// [`allocate_async`](Self::allocate_async) if necessary. The id is open from the first poll.
    /// Each attempt looks the prefix up again. Dropping the future cancels the admission. Errors
    /// are those of `admit` and `allocate_async`.
    pub fn admit_async<'a>(
        &'a self,
        request: &'a AdmitRequest<'a>,
    ) -> Wait<impl CallUntil<Output = Result<Sequence, SequenceError>, Future: Send>> {
        Wait::new(move |deadline| async move {
            let mut admission = self.0.sequences.admission(request)?;
            match admission.try_now() {
                Err(AllocError::Behind { .. } | AllocError::Exhausted { .. } | AllocError::NoRun { .. }) => {}
                Err(error) => return Err(error.into()),
                Ok(()) => return Ok(admission.admitted()),
            }
            let missing = admission.missing();
            let attempt = |place: &mut Waiting<'_>| admission.try_in_turn(place);
            self.in_turns(&missing, Class::Admission, deadline, attempt).await?;
            Ok(admission.admitted())
        })
    }

    /// Opens a sequence in every [group of layers](super::PoolBuilder::groups): with its longest
    /// cached prefix that all groups have, and the blocks for the rest in all groups, or none. Never
    /// waits.
    ///
    /// # Errors
    /// Those of [`admit`](Self::admit), and [`SequenceError::Invalid`] for a request with
    /// [`contiguous`](AdmitRequest::contiguous) or [`reuse_tail`](AdmitRequest::reuse_tail), also in
    /// a pool with one group.
    pub fn admit_grouped(&self, request: &AdmitRequest<'_>) -> Result<GroupedSequence, SequenceError> {
        let _call = call();
        let _timing = self.0.sampler.start(Operation::Admit);
        let mut admission = self.0.sequences.grouped_admission(request)?;
        admission.try_now()?;
        Ok(admission.admitted())
    }

    /// Admits a sequence like [`admit_grouped`](Self::admit_grouped), and waits like
    /// [`admit_async`](Self::admit_async): in one place of the queue for the blocks of all groups.
    pub fn admit_grouped_async<'a>(
        &'a self,
        request: &'a AdmitRequest<'a>,
    ) -> Wait<impl CallUntil<Output = Result<GroupedSequence, SequenceError>, Future: Send>> {
        Wait::new(move |deadline| async move {
            let mut admission = self.0.sequences.grouped_admission(request)?;
            match admission.try_now() {
                Err(AllocError::Behind { .. } | AllocError::Exhausted { .. } | AllocError::NoRun { .. }) => {}
                Err(error) => return Err(error.into()),
                Ok(()) => return Ok(admission.admitted()),
            }
            let missing = admission.missing();
            let attempt = |place: &mut Waiting<'_>| admission.try_in_turn(place);
            self.in_turns(&missing, Class::Admission, deadline, attempt).await?;
            Ok(admission.admitted())
        })
    }

    /// Returns the number of [available](Self::available_blocks) blocks that admitting this request
    /// would take now: those of its prompt and headroom, minus the part of its cached prefix that
    /// has other owners. The evictable part counts, because the request cannot evict it.
    ///
    /// While no other thread uses the pool, no batch is in flight and no request waits, a request
    /// that is not contiguous and has no access to the reserve is admitted if and only if this is
    /// at most `available_blocks()`, which decreases by this number except for the blocks to
    /// [leave](AdmitRequest::leave). (A block that is cached [in part](AdmitRequest::reuse_tail) is
    /// also held if there is room.) In a pool with states, this is neither: their run must be free
    /// too, and a request that does not fit beside the cached prefix may be admitted without it, by
    /// evicting it.
    ///
    /// Does not count as a use of cached blocks. Errors are those of [`admit`](Self::admit), except
    /// for a lack of blocks and an open id.
    pub fn blocks_needed(&self, request: &AdmitRequest<'_>) -> Result<usize, SequenceError> {
        let _call = call();
        self.0.sequences.blocks_needed(request).map(|(missing, evictable)| missing.saturating_add(evictable))
    }

    /// Keeps the cached prefix of these tokens, for example a system prompt, from eviction until
    /// the result is dropped.
    ///
    /// Pins all full blocks up to the first that is not cached, which hold [`PinnedPrefix::tokens`]
    /// tokens; with several groups of layers, what the longest hit needs in each group and state. They
    /// count as [used](super::Stats::used). [Clearing](Self::clear_prefix_cache) the
    /// cache makes them unfindable, but keeps their memory until they are unpinned.
    ///
    /// ```
    /// # use kvpool::{SequenceId, Pool, Tokens, prefix::{PrefixConfig, PrefixKeys}, storage::KvLayout};
    /// # let pool = Pool::builder(KvLayout::named("tiny")?).blocks(100).prefix_cache(PrefixConfig::new()).build()?;
    /// let system: Vec<u32> = (0..42).collect();
    /// let mut sequence = pool.sequence(SequenceId(1)).tokens(&system)?;
    /// let mut step = pool.begin_batch();
    /// step.append(&mut sequence, Tokens::Announced(system.len()))?;
    /// step.finish();
    /// drop(sequence);
    /// let pinned = pool.pin_prefix(&PrefixKeys::new(), &system)?;
    /// assert_eq!((pinned.tokens(), pool.pinned_prefixes().len()), (40, 1));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    /// # Errors
    /// [`SequenceError::Prefix`] if not even the first block is cached, without a cache, or for
    /// invalid keys; [`SequenceError::Handle`] if the first block has 8,191 references, the
    /// maximum.
    pub fn pin_prefix(&self, keys: &PrefixKeys<'_>, tokens: &[u32]) -> Result<PinnedPrefix, SequenceError> {
        let _call = call();
        self.0.sequences.pin_prefix(keys, tokens)
    }

    /// Returns the pinned prefixes, oldest first.
    pub fn pinned_prefixes(&self) -> Vec<PinnedInfo> {
        self.0.sequences.pinned_prefixes()
    }

    /// [Reserves](crate::Sequence::reserve) blocks for the next `tokens` tokens of a running
    /// sequence, and waits for them if necessary in the queue of
    /// [`allocate_async`](Self::allocate_async), before leases and admissions of the sequence's
    /// priority. Dropping the future changes nothing.
    ///
    /// A request of higher priority comes first even if it lacks more blocks than all owners but
    /// this sequence could release. Both then wait until a sequence is closed or
    /// [preempted](Self::victims), or one of the futures is dropped: see
    /// [`Stats::head_of_line`](super::Stats::head_of_line).
    ///
    /// # Errors
    /// [`SequenceError::Invalid`] for too many tokens, [`SequenceError::ForeignSequence`], and
    /// [`SequenceError::Alloc`] as for [`allocate_async`](Self::allocate_async). The sequence is
    /// unchanged.
    pub fn reserve_async<'a>(
        &'a self,
        sequence: &'a mut Sequence,
        tokens: usize,
    ) -> Wait<impl CallUntil<Output = Result<(), SequenceError>, Future: Send>> {
        Wait::new(move |deadline| async move {
            sequence.check_in(&self.0.sequences)?;
            let Some(request) = sequence.reservation(tokens)? else { return Ok(()) };
            match sequence.reserve(tokens) {
                Err(SequenceError::Alloc(AllocError::Behind { .. } | AllocError::Exhausted { .. })) => {}
                outcome => return outcome,
            }
            let attempt = |place: &mut Waiting<'_>| sequence.reserve_in_turn(&request, place);
            Ok(self.in_turns(&request, Class::Growth, deadline, attempt).await?)
        })
    }

    /// As [`reserve_async`](Self::reserve_async), in every group of layers: in one place of the
    /// queue for the blocks of all, or none. If a batch is abandoned meanwhile, it reserves what was
    /// needed before.
    ///
    /// # Errors
    /// Those of [`reserve_async`](Self::reserve_async). The sequence is unchanged.
    pub fn reserve_grouped_async<'a>(
        &'a self,
        sequence: &'a mut GroupedSequence,
        tokens: usize,
    ) -> Wait<impl CallUntil<Output = Result<(), SequenceError>, Future: Send>> {
        Wait::new(move |deadline| async move {
            sequence.group(0).check_in(&self.0.sequences)?;
            let (request, lacking) = sequence.reservation(tokens)?;
            match sequence.reserve(tokens) {
                Err(SequenceError::Alloc(AllocError::Behind { .. } | AllocError::Exhausted { .. })) => {}
                outcome => return outcome,
            }
            let attempt = |place: &mut Waiting<'_>| sequence.reserve_in_turn(&lacking, place);
            Ok(self.in_turns(&request, Class::Growth, deadline, attempt).await?)
        })
    }
}
