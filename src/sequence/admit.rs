//! Admission: a sequence is opened together with all blocks that its prompt will need.
//!
//! ```text
//! open        the id is registered, the prompt is hashed                             once
//! try         references on the cached prefix;  allocate the missing blocks;         at once, or in each turn of the queue
//!             allocated: adopt the prefix, reserve the blocks
//!             refused: the prefix's blocks return to their places in the eviction order
//! ```
//!
//! A block that is cached in part needs another block for its copy. If there is none, the attempt
//! is repeated without the cached block, whose memory may be what was missing.
//!
//! Each attempt looks the prefix up again, since it may change while the admission waits. Attempts
//! in the queue first count the cached blocks: a request that does not fit yet changes nothing.

use std::fmt;

use crate::block::{AllocRequest, Blocks, Priority, Waiting};
use crate::error::{AllocError, SequenceError};
use crate::ids::{SequenceId, SessionId};
use crate::prefix::policy::{CachePriority, Millis};
use crate::prefix::{BlockHash, PrefixCache, PrefixKeys, Weights, WeightsStamp};
use crate::sync::call;

use super::builder::{Options, option_setters};
use super::registry::Sequences;
use super::reserve::Allocate;
use super::sequence::Sequence;
use super::window::{ListKind, Window};

/// A request to open a sequence with blocks for its prompt and for further tokens.
///
/// ```
/// use kvpool::{AdmitRequest, Pool, Priority, SequenceId, Tokens, prefix::PrefixConfig, storage::KvLayout};
///
/// let pool = Pool::builder(KvLayout::named("tiny")?).blocks(100).prefix_cache(PrefixConfig::new()).build()?;
/// let prompt: Vec<u32> = (0..42).collect();
/// let request = AdmitRequest::new(SequenceId(7), &prompt).priority(Priority::High).headroom(100);
/// let mut sequence = pool.admit(&request)?;
/// assert_eq!(sequence.reserved_blocks(), 36, "this layout has blocks of 4 tokens");
/// let mut batch = pool.begin_batch();
/// batch.append(&mut sequence, Tokens::Announced(prompt.len()))?;
/// assert_eq!(sequence.reserved_blocks(), 25);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
#[must_use]
pub struct AdmitRequest<'a> {
    prompt: &'a [u32],
    options: Options<'a>,
    headroom: usize,
    leave: usize,
    chunk: Option<usize>,
    is_contiguous: bool,
}

impl<'a> AdmitRequest<'a> {
    option_setters!();

    /// Creates a request for a prompt, at normal priority and without headroom.
    pub fn new(id: SequenceId, prompt: &'a [u32]) -> Self {
        let options = Options::new(id);
        Self { prompt, options, headroom: 0, leave: 0, chunk: None, is_contiguous: false }
    }

    /// Sets the number of tokens after the prompt for which blocks are reserved too.
    pub fn headroom(mut self, tokens: usize) -> Self {
        self.headroom = tokens;
        self
    }

    /// Admits only if this number of blocks stay available: a watermark, for running sequences.
    ///
    /// Without it, a preempted request that comes back can take the blocks for which it was
    /// preempted, before the sequence that lacked them appends again: it is preempted again, and
    /// neither proceeds. One block for each sequence of the next step lets all requests finish.
    ///
    /// The blocks are allocated and freed in the same call, so that concurrent admissions cannot
    /// count on the same ones. Cached blocks are evicted for them, and a concurrent append may find
    /// no block. They count in errors, statistics, and the run of a [contiguous](Self::contiguous)
    /// request. A request that exceeds the pool with them is refused at once: leave at most what
    /// the pool has beyond the largest request.
    pub fn leave(mut self, blocks: usize) -> Self {
        self.leave = blocks;
        self
    }

    /// Sets the maximum number of tokens that an append adds, in a pool with a
    /// [window](crate::Window): at most the blocks of the window and of one chunk are reserved.
    ///
    /// By default the whole prompt may be appended at once, and all of its blocks are reserved.
    /// With chunks, appends take the reserved blocks first; later ones allocate, while the blocks
    /// that leave the window become available, and may be refused. No effect in a pool without a
    /// window.
    pub fn chunk(mut self, tokens: usize) -> Self {
        self.chunk = Some(tokens);
        self
    }

    /// Requires consecutive frames for the reserved blocks, instead of a few runs.
    pub fn contiguous(mut self) -> Self {
        self.is_contiguous = true;
        self
    }

    /// Returns the id of the sequence.
    pub fn id(&self) -> SequenceId {
        self.options.id
    }

    pub(super) fn session_id(&self) -> Option<SessionId> {
        self.options.session
    }

    pub(super) fn prompt(&self) -> &'a [u32] {
        self.prompt
    }

    pub(super) fn urgency(&self) -> Priority {
        self.options.priority
    }

    pub(super) fn options(&self) -> &Options<'a> {
        &self.options
    }

    pub(super) fn is_contiguous(&self) -> bool {
        self.is_contiguous
    }

    pub(super) fn needs(&self, sequences: &Sequences, group: usize) -> Result<Needs, SequenceError> {
        let kind = sequences.kinds()[group];
        let blocks = self.options.check_prompt(sequences, self.prompt, self.headroom, kind)?;
        let block_tokens = kind.block_tokens as usize;
        let at_once = |(window, chunk): (Window, usize)| window.blocks_for(chunk.max(1), block_tokens);
        let most = kind.window.zip(self.chunk).map_or(usize::MAX, at_once);
        // What is left to others is of the pool, not of each group.
        let leave = if group == 0 { self.leave } else { 0 };
        Ok(Needs { blocks, most, leave })
    }
}

impl fmt::Debug for AdmitRequest<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AdmitRequest")
            .field("options", &self.options)
            .field("prompt", &self.prompt.len())
            .field("headroom", &self.headroom)
            .field("leave", &self.leave)
            .field("chunk", &self.chunk)
            .field("is_contiguous", &self.is_contiguous)
            .finish()
    }
}

/// Numbers of blocks that an admission takes.
#[derive(Clone, Copy)]
pub(super) struct Needs {
    /// For the prompt and headroom.
    blocks: usize,
    /// At most this many of them at once.
    most: usize,
    pub(super) leave: usize,
}

impl Needs {
    /// Returns the number of blocks to allocate behind this many cached ones, of which it takes
    /// `held`. Without the subtraction, a pool of `most` blocks could never admit a hit.
    pub(super) fn behind(self, hits: usize, held: usize) -> usize {
        (self.blocks - hits).min(self.most.saturating_sub(held)).saturating_add(self.leave)
    }
}

/// A sequence without blocks. Dropping it closes the sequence.
pub(crate) struct Admission<'a> {
    request: &'a AdmitRequest<'a>,
    sequence: Sequence,
    needs: Needs,
}

impl Sequences {
    /// Opens a sequence without blocks. Fails if no free can satisfy the request.
    pub(crate) fn admission<'a>(
        &self,
        request: &'a AdmitRequest<'a>,
    ) -> Result<Admission<'a>, SequenceError> {
        let _call = call();
        let AdmitRequest { prompt, options, .. } = request;
        let needs = request.needs(self, 0)?;
        let mut sequence = options.open(self)?;
        sequence.announce(prompt)?;
        Ok(Admission { request, sequence, needs })
    }

    /// Returns the number of blocks that an admission would allocate now, and that of the evictable
    /// blocks of its prefix. Takes nothing, and changes no recency. The id may be open.
    pub(crate) fn blocks_needed(&self, request: &AdmitRequest<'_>) -> Result<(usize, usize), SequenceError> {
        let AdmitRequest { prompt, options, .. } = request;
        if !self.has_one_list() {
            return Ok(self.grouped_lookup(request)?.count());
        }
        let (needs, kind) = (request.needs(self, 0)?, self.kinds()[0]);
        let known = options.hashes(self, 0, options.weights_now(self))?;
        let (Some(mut known), Some(cache)) = (known, self.cache()) else {
            return Ok((needs.behind(0, 0), 0));
        };
        known.announce(cache, options.id, prompt)?;
        let hashes = known.usable_hashes(prompt.len(), self.block_tokens());
        let (hits, evictable) = self.count_hits(cache, hashes, known.era(), kind);
        Ok((needs.behind(hits, kind.held_of(hits)), evictable))
    }

    /// Returns the numbers of blocks before the boundary of a hit, and of its evictable blocks.
    pub(super) fn count_hits(
        &self,
        cache: &PrefixCache,
        hashes: &[BlockHash],
        era: u64,
        kind: ListKind,
    ) -> (usize, usize) {
        match kind.needs() {
            None => cache.count_prefix(&self.0.blocks, hashes, era),
            Some(needs) => cache.find_boundary(&self.0.blocks, hashes, era, needs),
        }
    }
}

impl Sequence {
    /// Restarts the hashes of a sequence without blocks.
    pub(super) fn renew(&mut self, request: &AdmitRequest<'_>, now: (Weights, WeightsStamp)) {
        let Some(cache) = self.sequences.cache() else { return };
        // Keys and tokens are valid, but the retention may have ended.
        if let Ok(Some(mut known)) = request.options.hashes(&self.sequences, self.group, now)
            && known.announce(cache, request.options.id, request.prompt).is_ok()
        {
            self.known = Some(known);
        } else if let Some(known) = &mut self.known {
            known.forget();
        }
    }
}

impl Admission<'_> {
    pub(crate) fn missing(&self) -> AllocRequest {
        self.count().0
    }

    /// Returns the request for the missing blocks, and the number of evictable ones in the prefix.
    fn count(&self) -> (AllocRequest, usize) {
        let (hits, evictable) = match self.sequence.token_hashes() {
            Some((known, cache)) => {
                let sequences = &self.sequence.sequences;
                let hashes = known.usable_hashes(self.request.prompt.len(), sequences.block_tokens());
                sequences.count_hits(cache, hashes, known.era(), self.sequence.kind)
            }
            None => (0, 0),
        };
        let held = self.sequence.kind.held_of(hits);
        (self.allocation(self.needs.behind(hits, held)), evictable)
    }

    fn blocks_of_pool(&self) -> &Blocks {
        &self.sequence.sequences.0.blocks
    }

    fn allocation(&self, blocks: usize) -> AllocRequest {
        let request = AllocRequest::new(blocks).sequence(self.request.options.id);
        let request = request.priority(self.request.options.priority);
        if self.request.is_contiguous { request.contiguous() } else { request }
    }

    /// Tries once, without waiting. On an error the pool is unchanged.
    pub(crate) fn try_now(&mut self) -> Result<(), AllocError> {
        let _call = call();
        self.check_fits()?;
        self.blocks_of_pool().check_is_first(&self.allocation(self.needs.behind(0, 0)))?;
        self.renew();
        let blocks = self.blocks_of_pool().clone();
        self.attempt(false, &mut |request, end, take| blocks.allocate_listed(request, Some(end), take))
    }

    /// Tries once, in the turn of a place in the queue. On an error the pool is unchanged.
    pub(crate) fn try_in_turn(&mut self, place: &mut Waiting<'_>) -> Result<(), AllocError> {
        // Before the counts, which determine whether to wait.
        self.check_fits()?;
        self.renew();
        let (missing, evictable) = self.count();
        place.check_counts(&missing, self.sequence.tenant, evictable)?;
        let outcome = self.attempt(true, &mut |request, end, take| place.allocate(request, Some(end), take));
        if outcome.is_err() {
            // The new head of the queue may have searched while the prefix was held.
            place.kept_no_longer();
        }
        outcome
    }

    /// Returns an error if the whole pool has too few blocks for the sequence.
    fn check_fits(&self) -> Result<(), AllocError> {
        let (blocks, Options { id, priority, .. }) = (self.blocks_of_pool(), &self.request.options);
        let whole = AllocRequest::new(self.needs.behind(0, 0)).sequence(*id).priority(*priority);
        blocks.check_request(&whole).inspect_err(|error| blocks.count_refusal(error))
    }

    /// Restarts the hashes after a clear, or a change of weights: those from before would be of
    /// blocks that must not be found.
    fn renew(&mut self) {
        let (Some(known), Some(cache)) = (&self.sequence.known, self.sequence.sequences.cache()) else {
            return;
        };
        if !known.is_current(cache) {
            let now = self.request.options.weights_now(&self.sequence.sequences);
            self.sequence.renew(self.request, now);
        }
    }

    fn attempt(&mut self, is_in_line: bool, allocate: Allocate<'_>) -> Result<(), AllocError> {
        let (outcome, took_tail) = self.attempt_with(is_in_line, self.sequence.reuses_tail, allocate);
        match outcome {
            // The tail could be evicted: for the copy, for a quota that counts it, or for a run.
            Err(error) if took_tail && error.is_lack() => self.attempt_with(is_in_line, false, allocate).0,
            outcome => outcome,
        }
    }

    /// Tries once; also returns whether the prefix has a block that is cached in part.
    fn attempt_with(
        &mut self,
        is_in_line: bool,
        takes_tail: bool,
        allocate: Allocate<'_>,
    ) -> (Result<(), AllocError>, bool) {
        self.sequence.list.reserve(self.needs.blocks);
        let prefix = self.sequence.find_prefix(self.request.prompt, usize::MAX, takes_tail, is_in_line);
        let taken = prefix.as_ref().map_or(0, |prefix| prefix.blocks);
        let whole = prefix.as_ref().map_or(0, |prefix| prefix.whole);
        let took_tail = taken > whole;
        // A block that is cached in part is copied at the first append.
        let held = self.sequence.kind.held_of(whole);
        let request = self.allocation(self.needs.behind(whole, held));
        let last = taken.checked_sub(1).map(|last| self.sequence.list.staged_at(last));
        let shared = || {
            let mut shared = self.sequence.list.staged(0..taken);
            shared.retain(|&id| !self.sequence.is_null(id));
            shared
        };
        let kept = || (0..taken).map(|place| self.sequence.list.staged_at(place));
        let allocate: Allocate<'_> = &mut |request, end, take| {
            if is_in_line {
                let kept = kept().filter(|&id| !self.sequence.is_null(id));
                self.blocks_of_pool().check_floors(request, end.tenant, kept)?;
            }
            allocate(request, end, take)
        };
        let reserved = match self.sequence.allocate_behind(last, shared, &request, is_in_line, allocate) {
            Ok(reserved) => reserved,
            Err(error) => {
                self.sequence.front = 0;
                return (Err(error), took_tail);
            }
        };
        if let Some(prefix) = prefix {
            self.sequence.adopt(prefix);
        }
        self.sequence.reserve_but(reserved, self.request.leave);
        self.sequence.reserve_end();
        (Ok(()), took_tail)
    }

    pub(crate) fn admitted(self) -> Sequence {
        self.sequence
    }
}
