//! Admission to every group of layers at one boundary: see [`grouped`](super::grouped).

use smallvec::SmallVec;

use crate::block::{AllocRequest, ListEnd, Waiting};
use crate::error::{AllocError, SequenceError};
use crate::ids::BlockId;
use crate::sync::call;

use super::admit::{AdmitRequest, Needs};
use super::grouped::GroupedSequence;
use super::registry::Sequences;
use super::reserve::Allocate;
use super::sequence::Sequence;

impl Sequence {
    /// Returns the number of blocks to allocate behind a hit of this many tokens.
    fn blocks_behind(&self, needs: Needs, hit: usize) -> usize {
        let hits = hit / self.sequences.block_tokens();
        needs.behind(hits, self.sequences.held_of(hits, self.window))
    }
}

/// An admission to every group. Dropping it closes the sequence.
pub(crate) struct GroupedAdmission<'a> {
    request: &'a AdmitRequest<'a>,
    sequence: GroupedSequence,
    needs: Vec<Needs>,
}

impl Sequences {
    /// Opens a sequence in every group, without blocks. Fails if no free can satisfy the request.
    pub(crate) fn grouped_admission<'a>(
        &self,
        request: &'a AdmitRequest<'a>,
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
        let groups = 0..self.windows().len();
        let needs = groups.clone().map(|group| request.needs(self, group)).collect::<Result<_, _>>()?;
        let known: Vec<_> =
            groups.map(|group| options.hashes(self, group as u32)).collect::<Result<_, _>>()?;
        let lists = self.register_grouped(request.id(), request.urgency())?;
        let part = |((group, list), known)| {
            let part = Sequence::new(self.clone(), request.id(), request.urgency(), list);
            part.in_group(group).with(known, options.reuses_tail)
        };
        let parts = (0..).zip(lists).zip(known).map(part).collect();
        let mut sequence = GroupedSequence { parts };
        sequence.announce(request.prompt())?;
        let mut admission = GroupedAdmission { request, sequence, needs };
        // The parts may have begun before and after a clear.
        admission.renew();
        Ok(admission)
    }
}

impl GroupedAdmission<'_> {
    /// Restarts the hashes of all groups after a clear, like an admission to one group.
    fn renew(&mut self) {
        let parts = &mut self.sequence.parts;
        let Some(cache) = parts[0].sequences.cache().cloned() else { return };
        let is_current = |part: &Sequence| part.known.as_ref().is_none_or(|known| known.era() == cache.era());
        if !parts.iter().all(is_current) {
            parts.iter_mut().for_each(|part| part.renew(self.request));
        }
    }

    /// Returns the longest hit of all groups, of at most this many tokens, and its evictable blocks.
    fn boundary(&self, mut tokens: usize) -> (usize, usize) {
        let mut evictable;
        loop {
            let before = tokens;
            evictable = 0;
            for part in &self.sequence.parts {
                let (hit, of) = part.longest_hit(self.request.prompt(), tokens);
                (tokens, evictable) = (hit, evictable + of);
            }
            if tokens == before {
                return (tokens, evictable);
            }
        }
    }

    fn allocation(&self, boundary: usize) -> AllocRequest {
        let behind = |(part, needs): (&Sequence, &Needs)| part.blocks_behind(*needs, boundary);
        let blocks = self.sequence.parts.iter().zip(&self.needs).map(behind).fold(0, usize::saturating_add);
        AllocRequest::new(blocks).sequence(self.request.id()).priority(self.request.urgency())
    }

    pub(crate) fn missing(&self) -> AllocRequest {
        self.allocation(self.boundary(usize::MAX).0)
    }

    /// Tries once, without waiting. On an error the pool is unchanged.
    pub(crate) fn try_now(&mut self) -> Result<(), AllocError> {
        let _call = call();
        self.check_fits()?;
        let blocks = self.sequence.parts[0].pool_blocks().clone();
        blocks.check_is_first(&self.allocation(0))?;
        self.attempt(false, &mut |request, end, take| blocks.allocate_listed(request, Some(end), take))
    }

    /// Tries once, in the turn of a place in the queue. On an error the pool is unchanged.
    pub(crate) fn try_in_turn(&mut self, place: &mut Waiting<'_>) -> Result<(), AllocError> {
        // Before the counts, which determine whether to wait.
        self.check_fits()?;
        self.renew();
        let (boundary, evictable) = self.boundary(usize::MAX);
        place.check_counts(&self.allocation(boundary), evictable)?;
        let outcome = self.attempt(true, &mut |request, end, take| place.allocate(request, Some(end), take));
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

    fn attempt(&mut self, is_in_line: bool, allocate: Allocate<'_>) -> Result<(), AllocError> {
        let boundary = self.take_hit(is_in_line);
        let request = self.allocation(boundary);
        let mut fresh = Vec::with_capacity(request.blocks);
        if request.blocks > 0
            && let Err(error) = allocate(&request, ListEnd::default(), &mut |id| fresh.push(id))
        {
            self.sequence.parts.iter_mut().for_each(|part| part.give_back_hit(boundary, is_in_line));
            return Err(error);
        }
        let mut rest = fresh.into_iter();
        for (part, needs) in self.sequence.parts.iter_mut().zip(&self.needs) {
            let blocks = part.blocks_behind(*needs, boundary);
            let own: Vec<BlockId> = rest.by_ref().take(blocks).collect();
            part.adopt_hit(boundary, own, needs.leave);
        }
        // The policy saw the lookup once, and places the blocks of all groups alike.
        let context = self.sequence.parts[0].known.as_ref().map_or(0, |known| known.policy_info.context);
        let known = self.sequence.parts.iter_mut().flat_map(|part| &mut part.known);
        known.for_each(|known| known.policy_info.context = context);
        Ok(())
    }

    /// Takes references at one boundary in every group, and returns it in tokens.
    fn take_hit(&mut self, is_in_line: bool) -> usize {
        let mut most = usize::MAX;
        loop {
            let boundary = self.boundary(most).0;
            let mut taken = SmallVec::<[usize; 8]>::new();
            for part in &mut self.sequence.parts {
                taken.push(part.take_hit(self.request.prompt(), boundary, is_in_line));
                if taken.last() != Some(&boundary) {
                    break;
                }
            }
            most = *taken.last().expect("a pool has a group");
            if most == boundary {
                return boundary;
            }
            // Blocks were evicted since they were counted. Reached by `groups_are_hit_beside_evictions`.
            let taken = self.sequence.parts.iter_mut().zip(taken);
            taken.for_each(|(part, hit)| part.give_back_hit(hit, is_in_line));
        }
    }

    pub(crate) fn admitted(self) -> GroupedSequence {
        self.sequence
    }
}
