//! Admission of sequences, and reservations of running ones: at once, or in the line of waiting
//! requests.

use crate::block::{Class, Operation, Waiting};
use crate::error::{AllocError, SequenceError};
use crate::prefix::PrefixKeys;
use crate::sequence::{AdmitRequest, PinnedInfo, PinnedPrefix, Sequence};
use crate::sync::call;

use super::Pool;
use super::wait::{CallUntil, Wait};

impl Pool {
    /// Opens a sequence with its cached prefix, and reserves the blocks for the rest of its prompt
    /// and its headroom. Never waits.
    ///
    /// [`Sequence::len`] then returns the number of cached tokens. Appends take the reserved blocks
    /// first, and cannot fail for lack of blocks while these last: see
    /// [`Sequence::reserved_blocks`]. Opening the sequence with
    /// [`tokens`](crate::SequenceBuilder::tokens) instead shares the same prefix, and reserves
    /// nothing.
    ///
    /// # Errors
    ///
    /// [`SequenceError::Alloc`] with [`AllocError::Behind`] while a request of at least its
    /// priority waits, [`AllocError::Exhausted`], [`AllocError::NoRun`] for a contiguous request,
    /// [`AllocError::TooLarge`]; [`SequenceError::AlreadyOpen`], [`SequenceError::Invalid`] for no
    /// or too many tokens; [`SequenceError::Prefix`] for a key of zero bytes, or a retention time
    /// that has passed. Nothing has changed: neither the id nor a block is taken, and no cached
    /// block was touched.
    pub fn admit(&self, request: &AdmitRequest<'_>) -> Result<Sequence, SequenceError> {
        let _call = call();
        let _timing = self.0.sampler.start(Operation::Admit);
        let mut admission = self.0.sequences.admission(request)?;
        admission.try_now()?;
        Ok(admission.admitted())
    }

    /// Admits a sequence like [`admit`](Self::admit), and waits for blocks if necessary.
    ///
    /// Admissions wait in the line of [`allocate_async`](Self::allocate_async). The id is open from
    /// the first poll on. The prefix is looked up in each turn, so it is the one that is cached
    /// when the sequence is admitted. Dropping the future passes its turn on, and leaves nothing
    /// behind.
    ///
    /// # Errors
    ///
    /// As for [`admit`](Self::admit), except that it waits instead of [`AllocError::Behind`],
    /// [`AllocError::Exhausted`] and [`AllocError::NoRun`]: until the deadline of [`Wait::until`]
    /// at most ([`AllocError::Deadline`]). [`AllocError::TooLarge`] also if the pool shrinks
    /// meanwhile, [`AllocError::FenceRefused`] on a thread that cannot wait.
    ///
    /// # Panics
    ///
    /// If a contiguous request has to wait in a tokio runtime whose timer is disabled, or any
    /// request beside blocks that moves or a resize hold.
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

    /// Returns the number of [available](Self::available_blocks) blocks that an admission of this
    /// request would take now: those of its prompt and headroom, except for the part of its cached
    /// prefix that has other owners. The evictable part counts, because it cannot be evicted for
    /// the rest.
    ///
    /// While no other thread uses the pool, no batch is in flight and no request waits, a request
    /// that is not contiguous, of a priority without access to the reserve, is admitted if and only
    /// if this is at most `available_blocks()`, which it then reduces by as many, except for the
    /// blocks that it [leaves](AdmitRequest::leave). (A block that is cached
    /// [in part](AdmitRequest::reuse_tail) is held in addition if there is room.)
    ///
    /// Takes nothing, and does not count as a use of the cached blocks.
    ///
    /// # Errors
    ///
    /// As for [`admit`](Self::admit), except for a lack of blocks and an open id.
    pub fn blocks_needed(&self, request: &AdmitRequest<'_>) -> Result<usize, SequenceError> {
        let _call = call();
        self.0.sequences.blocks_needed(request).map(|(missing, evictable)| missing.saturating_add(evictable))
    }

    /// Keeps the cached prefix of these tokens from eviction, until the result is dropped; for
    /// example that of a system prompt.
    ///
    /// Pins all full blocks of the tokens up to the first that is not cached:
    /// [`PinnedPrefix::tokens`] returns how many tokens these hold. The blocks need no open
    /// sequence, and stay pinned when a sequence that uses them is closed. They count as
    /// [used](super::Stats::used). [Clearing](Self::clear_prefix_cache) the cache makes them
    /// unfindable, but keeps their memory until they are unpinned.
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
    ///
    /// # Errors
    ///
    /// [`SequenceError::Prefix`] with [`NotCached`](crate::PrefixError::NotCached) if not even the
    /// first block is cached, [`NoCache`](crate::PrefixError::NoCache), or for keys that are
    /// refused when a sequence is opened. [`SequenceError::Handle`] with
    /// [`TooManyReferences`](crate::HandleError::TooManyReferences) if the first block is
    /// cached, but has the maximum of 8,191 references.
    pub fn pin_prefix(&self, keys: &PrefixKeys<'_>, tokens: &[u32]) -> Result<PinnedPrefix, SequenceError> {
        let _call = call();
        self.0.sequences.pin_prefix(keys, tokens)
    }

    /// Returns the pinned prefixes, oldest first.
    pub fn pinned_prefixes(&self) -> Vec<PinnedInfo> {
        self.0.sequences.pinned_prefixes()
    }

    /// Reserves blocks for the next `tokens` tokens of a running sequence, and waits for them if
    /// necessary. See [`Sequence::reserve`](crate::Sequence::reserve).
    ///
    /// Waits in the line of [`allocate_async`](Self::allocate_async), at the sequence's priority,
    /// before leases and admissions of that priority. Dropping the future passes its turn on; the
    /// sequence is then unchanged.
    ///
    /// A request of higher priority comes first even if it lacks more blocks than all owners but
    /// this sequence could release. Both then wait until a sequence is closed or
    /// [preempted](Self::victims), or one of the futures is dropped:
    /// [`Stats::head_of_line`](super::Stats::head_of_line) shows such a request.
    ///
    /// # Errors
    ///
    /// [`SequenceError::Invalid`] for too many tokens, [`SequenceError::ForeignSequence`];
    /// [`AllocError::TooLarge`], [`AllocError::Reserved`] and others that waiting cannot resolve;
    /// [`AllocError::Deadline`] at the deadline of [`Wait::until`]. The sequence is unchanged.
    ///
    /// # Panics
    ///
    /// If it has to wait beside blocks that moves or a resize hold, in a tokio runtime whose timer
    /// is disabled.
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
}
