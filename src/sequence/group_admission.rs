//! Admission to every group of layers at one boundary: see [`grouped`](super::grouped).
//!
//! ```text
//! hit        references at one boundary in every group, and on a checkpoint of each state
//! allocate   one run for all states, and the blocks of all groups
//! refused    the hit is given back; with a checkpoint, once more without: its memory may be missing
//! ```

use smallvec::SmallVec;

use crate::block::{AllocRequest, ListEnd, Tenant, Waiting};
use crate::error::{AllocError, SequenceError};
use crate::ids::{BlockId, Priority, SequenceId, SessionId, TenantId};
use crate::sync::call;

use super::admit::{AdmitRequest, Needs};
use super::grouped::GroupedSequence;
use super::list::ListOwner;
use super::registry::Sequences;
use super::reserve::Allocate;
use super::sequence::Sequence;
use super::sessions::Checkpoint;
use super::state::State;
use super::token_hashes::TokenHashes;
use super::transfer::BlockRefs;

impl Sequence {
    /// Returns the number of blocks to allocate behind a hit of this many tokens.
    fn blocks_behind(&self, needs: Needs, hit: usize) -> usize {
        let hits = hit / self.kind.block_tokens as usize;
        needs.behind(hits, self.kind.held_of(hits))
    }
}

/// An admission to every group. Dropping it closes the sequence.
pub(crate) struct GroupedAdmission<'a> {
    request: &'a AdmitRequest<'a>,
    sequence: GroupedSequence,
    needs: Vec<Needs>,
}

/// The longest hit.
struct Boundary {
    tokens: usize,
    evictable: usize,
    /// Tokens whose blocks all groups have, whether or not states are kept behind them.
    cached: usize,
}

/// References at a boundary.
#[derive(Default)]
struct Hit {
    tokens: usize,
    /// The hashes and blocks of a checkpoint of each state, unless there are no tokens.
    states: Vec<(TokenHashes, Vec<BlockId>)>,
}

impl Sequences {
    /// Opens a sequence in every group, without blocks.
    pub(super) fn open_grouped(
        &self,
        id: SequenceId,
        priority: Priority,
        tenant: (Tenant, Option<TenantId>),
        session: Option<SessionId>,
    ) -> Result<GroupedSequence, SequenceError> {
        let lists = self.register_grouped(id, priority)?;
        let mut sequence = self.grouped_of(lists, (id, priority), session);
        sequence.parts.iter_mut().for_each(|part| (part.tenant, part.tenant_id) = tenant);
        Ok(sequence)
    }

    fn grouped_of(
        &self,
        lists: Vec<ListOwner>,
        (id, priority): (SequenceId, Priority),
        session: Option<SessionId>,
    ) -> GroupedSequence {
        let mut lists = lists.into_iter();
        let mut open = |group| {
            let list = lists.next().expect("each group has a list, and a state two");
            Sequence::new(self.clone(), id, priority, list).in_group(group)
        };
        let parts = (0..self.kinds().len() as u32).map(&mut open).collect();
        let groups = self.kinds().len()..self.kinds().len() + self.states().len();
        let states = groups.map(|group| State::new(group, open(u32::MAX), open(u32::MAX))).collect();
        GroupedSequence::new(parts, states, session)
    }

    /// Opens a sequence in every group, without blocks. Fails if no free can satisfy the request.
    pub(crate) fn grouped_admission<'a>(
        &self,
        request: &'a AdmitRequest<'a>,
    ) -> Result<GroupedAdmission<'a>, SequenceError> {
        self.grouped_admission_of(request, |id, priority| self.register_grouped(id, priority))
    }

    /// Prepares a lookup without an id.
    pub(super) fn grouped_lookup<'a>(
        &self,
        request: &'a AdmitRequest<'a>,
    ) -> Result<GroupedAdmission<'a>, SequenceError> {
        let mut lookup = self.grouped_admission_of(request, |_, _| Ok(self.unregistered()))?;
        lookup.sequence.parts.iter_mut().for_each(|part| part.is_closed = true);
        Ok(lookup)
    }

    fn grouped_admission_of<'a>(
        &self,
        request: &'a AdmitRequest<'a>,
        register: impl FnOnce(SequenceId, Priority) -> Result<Vec<ListOwner>, SequenceError>,
    ) -> Result<GroupedAdmission<'a>, SequenceError> {
        let _call = call();
        let options = request.options();
        for (is_set, what) in [(request.is_contiguous(), "contiguous"), (options.reuses_tail, "reuse_tail")] {
            if is_set {
                let limit = "a sequence admitted to one group";
                return Err(SequenceError::invalid(
                    request.id(),
                    what,
                    "a sequence of several groups",
                    limit,
                ));
            }
        }
        let tenant = options.tenant_in(self)?;
        let groups = 0..self.kinds().len();
        let needs = groups.clone().map(|group| request.needs(self, group)).collect::<Result<_, _>>()?;
        let now = options.weights_now(self);
        let known: Vec<_> =
            groups.map(|group| options.hashes(self, group as u32, now)).collect::<Result<_, _>>()?;
        let (id, priority) = (request.id(), request.urgency());
        let lists = register(id, priority)?;
        let mut sequence = self.grouped_of(lists, (id, priority), request.session_id());
        let parts = sequence.parts.iter_mut().zip(known);
        parts.for_each(|(part, known)| {
            part.known = known;
            (part.tenant, part.tenant_id) = tenant;
        });
        sequence.announce(request.prompt())?;
        let mut admission = GroupedAdmission { request, sequence, needs };
        // The parts may have begun before and after a clear.
        admission.renew();
        Ok(admission)
    }
}

impl GroupedAdmission<'_> {
    /// Restarts the hashes of all groups after a clear or a change of weights, like an admission to
    /// one group.
    fn renew(&mut self) {
        let parts = &mut self.sequence.parts;
        let Some(cache) = parts[0].sequences.cache().cloned() else { return };
        let is_current = |part: &Sequence| part.known.as_ref().is_none_or(|known| known.is_current(&cache));
        if !parts.iter().all(is_current) {
            let now = self.request.options().weights_now(&parts[0].sequences);
            parts.iter_mut().for_each(|part| part.renew(self.request, now));
        }
        // Checkpoints are found under the number of the newest uncache call.
        for part in parts {
            part.look_for_uncached(0);
        }
    }

    /// Returns the longest prefix of at most this many tokens that all groups of blocks have, and its
    /// evictable blocks.
    fn prefix_of_blocks(&self, mut tokens: usize) -> (usize, usize) {
        loop {
            let (before, mut evictable) = (tokens, 0);
            for part in &self.sequence.parts {
                let (hit, of) = part.longest_hit(self.request.prompt(), tokens);
                (tokens, evictable) = (hit, evictable + of);
            }
            if tokens == before {
                return (tokens, evictable);
            }
        }
    }

    /// Returns the longest hit of all groups, of at most this many tokens.
    fn boundary(&self, most: usize) -> Boundary {
        let first = &self.sequence.parts[0];
        let block_tokens = first.sequences.block_tokens();
        let (mut tokens, mut evictable) = self.prefix_of_blocks(most);
        let cached = tokens;
        loop {
            let before = tokens;
            for state in 0..self.sequence.states.len() {
                let (behind, of) = first.token_hashes().map_or((0, 0), |(known, _)| {
                    first.sequences.find_checkpoint(known, state, tokens / block_tokens)
                });
                (tokens, evictable) = (behind * block_tokens, evictable + of);
            }
            if tokens == before {
                return Boundary { tokens, evictable, cached };
            }
            (tokens, evictable) = self.prefix_of_blocks(tokens);
        }
    }

    fn allocation(&self, boundary: usize) -> AllocRequest {
        let behind = |(part, needs): (&Sequence, &Needs)| part.blocks_behind(*needs, boundary);
        let states = self.sequence.parts[0].sequences.states().iter().sum();
        let parts = self.sequence.parts.iter().zip(&self.needs);
        let blocks = parts.map(behind).fold(states, usize::saturating_add);
        AllocRequest::new(blocks).sequence(self.request.id()).priority(self.request.urgency())
    }

    pub(crate) fn missing(&self) -> AllocRequest {
        self.allocation(self.boundary(usize::MAX).tokens)
    }

    /// Tries once, without waiting. On an error the pool is unchanged.
    pub(crate) fn try_now(&mut self) -> Result<(), AllocError> {
        let _call = call();
        self.check_fits()?;
        let blocks = self.sequence.parts[0].pool_blocks().clone();
        blocks.check_is_first(&self.allocation(0))?;
        self.renew();
        self.attempt(usize::MAX, false, &mut |request, end, take| {
            blocks.allocate_listed(request, Some(end), take)
        })
    }

    /// Tries once, in the turn of a place in the queue. On an error the pool is unchanged.
    pub(crate) fn try_in_turn(&mut self, place: &mut Waiting<'_>) -> Result<(), AllocError> {
        // Before the counts, which determine whether to wait.
        self.check_fits()?;
        self.renew();
        let Boundary { tokens: boundary, evictable, .. } = self.boundary(usize::MAX);
        let (tenant, mut most) = (self.sequence.parts[0].tenant, usize::MAX);
        if let Err(error) = place.check_counts(&self.allocation(boundary), tenant, evictable) {
            if self.sequence.states.is_empty() || boundary == 0 {
                return Err(error);
            }
            place.check_counts(&self.allocation(0), tenant, 0)?;
            most = 0;
        }
        let outcome =
            self.attempt(most, true, &mut |request, end, take| place.allocate(request, Some(end), take));
        if outcome.is_err() {
            // The new head of the queue may have searched while the prefix was held.
            place.kept_no_longer();
        }
        outcome
    }

    /// Returns an error if the whole pool has too few blocks for the sequence.
    fn check_fits(&self) -> Result<(), AllocError> {
        let blocks = self.sequence.parts[0].pool_blocks();
        blocks.check_request(&self.allocation(0)).inspect_err(|error| blocks.count_refusal(error))
    }

    /// Tries once behind a hit of at most `most` tokens.
    fn attempt(&mut self, most: usize, is_in_line: bool, allocate: Allocate<'_>) -> Result<(), AllocError> {
        let hit = self.take_hit(most, is_in_line);
        let fits = if is_in_line { self.check_floors(&hit) } else { Ok(()) };
        match fits.and_then(|()| self.allocate(hit.tokens, allocate)) {
            Ok(fresh) => self.adopt(hit, fresh),
            Err(error) => {
                let has_checkpoint = !hit.states.is_empty();
                self.give_back(hit, self.sequence.parts.len(), is_in_line);
                // Without the checkpoint its blocks can be evicted, for a quota too.
                if !has_checkpoint || !error.is_lack() {
                    return Err(error);
                }
                let fresh = self.allocate(0, allocate)?;
                self.adopt(Hit::default(), fresh);
            }
        }
        Ok(())
    }

    fn check_floors(&self, hit: &Hit) -> Result<(), AllocError> {
        let first = &self.sequence.parts[0];
        let parts = self.sequence.parts.iter().flat_map(|part| {
            let blocks = hit.tokens / part.kind.block_tokens as usize;
            (0..blocks).map(|place| part.list.staged_at(place)).filter(|&id| !part.sequences.is_null(id))
        });
        let states = hit.states.iter().flat_map(|(_, ids)| ids.iter().copied());
        let request = self.allocation(hit.tokens);
        first.pool_blocks().check_floors(&request, first.tenant, parts.chain(states))
    }

    /// Allocates what is needed behind a boundary: the states' blocks, then the others; or nothing.
    fn allocate(&self, boundary: usize, allocate: Allocate<'_>) -> Result<Vec<BlockId>, AllocError> {
        let request = self.allocation(boundary);
        let mut fresh = Vec::with_capacity(request.blocks);
        if request.blocks > 0 {
            let run = self.sequence.parts[0].sequences.states().iter().sum();
            let end = ListEnd { run, tenant: self.sequence.parts[0].tenant, ..ListEnd::default() };
            allocate(&request, end, &mut |id| fresh.push(id))?;
        }
        Ok(fresh)
    }

    fn adopt(&mut self, hit: Hit, fresh: Vec<BlockId>) {
        let (first, mut fresh) = (self.sequence.parts[0].sequences.clone(), fresh.into_iter());
        for (state, &frames) in self.sequence.states.iter_mut().zip(first.states()) {
            let run: Vec<BlockId> = fresh.by_ref().take(frames).collect();
            state.adopt_run(&run);
        }
        self.sequence.hit = hit.tokens;
        for (part, needs) in self.sequence.parts.iter_mut().zip(&self.needs) {
            let blocks = part.blocks_behind(*needs, hit.tokens);
            let own: Vec<BlockId> = fresh.by_ref().take(blocks).collect();
            part.adopt_hit(hit.tokens, own, needs.leave);
        }
        if let (1.., Some(session), Some((known, _))) =
            (hit.states.len(), self.sequence.session, self.sequence.parts[0].token_hashes())
            && let Some(at) = Checkpoint::new(known, hit.tokens / first.block_tokens(), 0)
        {
            first.0.sessions.hit(session, at);
        }
        for (state, (known, blocks)) in self.sequence.states.iter_mut().zip(hit.states) {
            state.adopt_checkpoint(hit.tokens, known, &blocks);
        }
        // The policy saw the lookup once, and places the blocks of all groups alike.
        let context = self.sequence.parts[0].known.as_ref().map_or(0, |known| known.policy_info.context);
        let known = self.sequence.parts.iter_mut().flat_map(|part| &mut part.known);
        known.for_each(|known| known.policy_info.context = context);
    }

    /// Takes references at one boundary of at most `most` tokens in every group.
    fn take_hit(&mut self, mut most: usize, is_in_line: bool) -> Hit {
        loop {
            let Boundary { tokens: boundary, cached, .. } = self.boundary(most);
            self.sequence.cached = self.sequence.cached.max(cached);
            let mut taken = SmallVec::<[usize; 8]>::new();
            for part in &mut self.sequence.parts {
                taken.push(part.take_hit(self.request.prompt(), boundary, is_in_line));
                if taken.last() != Some(&boundary) {
                    break;
                }
            }
            let mut hit = Hit { tokens: boundary, states: Vec::new() };
            most = *taken.last().expect("a pool has a group");
            if most == boundary && self.take_states(&mut hit, is_in_line) {
                return hit;
            }
            // Blocks were evicted since they were counted. Reached by `groups_are_hit_beside_evictions`.
            most = most.min(boundary.saturating_sub(1));
            let last = taken.pop().expect("a pool has a group");
            self.sequence.parts[taken.len()].give_back_hit(last, is_in_line);
            self.give_back(hit, taken.len(), is_in_line);
        }
    }

    /// Takes a checkpoint of each state behind the tokens of a hit; false: one was evicted.
    fn take_states(&self, hit: &mut Hit, is_in_line: bool) -> bool {
        let first = &self.sequence.parts[0];
        let (Some((known, _)), 1..) = (first.token_hashes(), hit.tokens) else { return true };
        let lists = first.sequences.kinds().len();
        let behind = hit.tokens / first.sequences.block_tokens();
        for (state, &frames) in first.sequences.states().iter().enumerate() {
            let Some(hashes) = known.of_state(lists, behind, state, frames) else { return false };
            let Some(blocks) = first.sequences.take_checkpoint(&hashes, is_in_line) else { return false };
            hit.states.push((hashes, blocks));
        }
        // Blocks may have been uncached, and computed again, between the two lookups.
        first.sequences.cache().is_none_or(|cache| cache.uncached().newest() == known.looked)
    }

    /// Gives back a hit, of which only the first parts have been taken.
    fn give_back(&mut self, hit: Hit, parts: usize, is_in_line: bool) {
        let parts = &mut self.sequence.parts[..parts];
        parts.iter_mut().for_each(|part| part.give_back_hit(hit.tokens, is_in_line));
        let sequences = &self.sequence.parts[0].sequences;
        if let Some(cache) = sequences.cache() {
            hit.states.iter().for_each(|(_, ids)| cache.untake(&sequences.0.blocks, ids, is_in_line));
        }
    }

    /// Returns the number of missing blocks, and of evictable ones in the hit.
    pub(super) fn count(&self) -> (usize, usize) {
        let Boundary { tokens, evictable, .. } = self.boundary(usize::MAX);
        (self.allocation(tokens).blocks, evictable)
    }

    /// Takes references on the blocks of the longest hit, of all groups and states, and returns its
    /// tokens. Without a hit, the error is a first block of a group that has the maximum of them.
    pub(super) fn into_hit(mut self, blocks: &mut Vec<BlockId>) -> Result<usize, Option<BlockId>> {
        let hit = self.take_hit(usize::MAX, false);
        if hit.tokens == 0 {
            return Err(self.sequence.parts.iter().find_map(|part| {
                let ((known, cache), mut held) = (part.token_hashes()?, BlockRefs::new(&part.sequences));
                let first = known.hashes().get(..1)?;
                cache.take_prefix(part.pool_blocks(), first, known.era(), &mut |id| held.blocks.push(id))
            }));
        }
        for part in &mut self.sequence.parts {
            let staged = part.list.staged(0..hit.tokens / part.block_tokens());
            blocks.extend(staged.into_iter().filter(|&id| !part.is_null(id)));
            part.front = 0;
        }
        blocks.extend(hit.states.into_iter().flat_map(|(_, ids)| ids));
        Ok(hit.tokens)
    }

    pub(crate) fn admitted(self) -> GroupedSequence {
        self.sequence
    }
}
