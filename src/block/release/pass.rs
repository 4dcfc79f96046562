//! One call that releases references: first all transitions of words, then the remaining work.
//!
//! ```text
//! fast step     the only reference, of a block that is not cached:  one exchange; the frame is freed
//! general step  any other: others keep the block; it is freed; evictable; or the mover's
//! end           further references are counted; the evictor is told; frames are given back
//! ```
//!
//! Keys are ids, or frame numbers ([`in_place`](super::in_place)).

use smallvec::SmallVec;

use crate::frame::RunList;
use crate::ids::{BlockId, FrameId, Run, Ticket};
use crate::sync::AtomicU64;

use super::give_back::Few;
use super::reference::{Outcome, keep_only_in, release_kept, release_only, release_privately};
use crate::block::core::{Blocks, Core, Evictable};
use crate::block::state::BlockWord;

const RELEASED_AHEAD: usize = 8;

/// Whether other threads may change the words of a lease's blocks.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Exposure {
    /// A handle or a second lease of the blocks was given out.
    Shared,
    /// The release may be [private](crate::block).
    Private,
}

pub(super) struct Pass<'a> {
    pub(super) core: &'a Core,
    /// The frames that were freed last; earlier ones are in `runs`.
    few: Few,
    runs: RunList,
    evictable: SmallVec<[Evictable; 64]>,
    /// Number of references whose blocks stay owned or cached.
    kept: usize,
    /// Number of blocks that are counted as evictable but are not yet.
    counted: usize,
}

impl<'a> Pass<'a> {
    pub(super) fn new(core: &'a Core, few: Few) -> Self {
        let (runs, evictable) = (RunList::new(), SmallVec::new());
        Self { core, few, runs, evictable, kept: 0, counted: 0 }
    }

    #[inline]
    fn freed(&mut self, frame: FrameId) {
        if self.few.is_full() {
            self.few.join(&mut self.runs);
        }
        let _ = self.few.fill(&[frame], Some);
    }

    pub(super) fn freed_run(&mut self, run: Run) {
        if run.len > 0 {
            self.few.join(&mut self.runs);
            self.runs.append(run);
        }
    }

    fn all_freed(&mut self) -> &[Run] {
        self.few.join(&mut self.runs);
        &self.runs
    }

    /// Counts blocks as evictable before they are, so that a stopped thread hides none.
    pub(super) fn expect_evictable(&mut self, blocks: usize) {
        self.core.count_evictable(blocks);
        self.counted += blocks;
        self.evictable.reserve(blocks);
    }

    #[inline(always)]
    pub(super) fn release_all<K: Copy>(
        &mut self,
        keys: &[K],
        fast: impl Fn(K) -> Option<FrameId>,
        mut general: impl FnMut(&mut Self, K),
    ) {
        let mut rest = keys;
        loop {
            rest = self.few.fill(rest, &fast);
            let Some((&key, others)) = rest.split_first() else { return };
            // Declined, or without a place.
            if self.few.is_full() {
                self.few.join(&mut self.runs);
            } else {
                general(self, key);
                rest = others;
            }
        }
    }

    /// Makes the caller's uncached block in a frame evictable, if it is expected and has no other
    /// reference. Returns false if that was not done.
    #[inline]
    pub(super) fn keep_only(&mut self, atomic: &AtomicU64, id: BlockId, frame: FrameId) -> bool {
        let Some(word) = keep_only_in(atomic, frame) else { return false };
        self.became_evictable(id, word);
        true
    }

    /// Drops a reference of a block, which must be in `frame` if given; else returns its word.
    #[inline(never)]
    pub(super) fn release(&mut self, id: BlockId, frame: Option<FrameId>) -> Result<(), BlockWord> {
        let (core, counted) = (self.core, &mut self.counted);
        // While this reference keeps the block.
        let tenant = core.tenant_of(id);
        let is_right = |word: BlockWord| frame.is_none_or(|frame| word.frame() == frame);
        let counts = || {
            if *counted == 0 {
                core.count_evictable(1);
                *counted = 1;
            }
        };
        match core.release_if(id, is_right, counts)? {
            Outcome::Left => {}
            Outcome::Shared => self.kept += 1,
            Outcome::Freed(frame) => {
                core.count_freed(id, tenant);
                self.freed(frame);
            }
            Outcome::Evictable(word) => {
                core.count_kept(tenant);
                self.became_evictable(id, word);
            }
        }
        Ok(())
    }

    #[inline]
    fn became_evictable(&mut self, id: BlockId, word: BlockWord) {
        self.kept += 1;
        self.counted -= 1;
        self.evictable.push(Evictable { id, word });
    }

    #[inline]
    fn release_owned(&mut self, id: BlockId) {
        self.release(id, None).unwrap_or_else(|word| not_the_callers(id, word));
    }

    /// Does the remaining work but for freed frames. Returns whether an announcement is due.
    #[inline]
    fn settle(&mut self, listed: usize, tell: impl FnOnce(&[Evictable], Ticket)) -> bool {
        self.core.count_further(listed as isize - self.kept as isize);
        self.core.count_not_evictable(self.counted);
        self.core.tag_evictable(&self.evictable, tell);
        !self.evictable.is_empty()
    }
}

#[cold]
#[inline(never)]
fn not_the_callers(id: BlockId, word: BlockWord) -> ! {
    let whose = if word.is_free() { "free" } else { "evictable" };
    panic!("block {id} released while {whose}: {word:?}")
}

impl Blocks {
    /// Drops one reference of a lease on each block. Panics if a block has no reference.
    pub fn release(&self, ids: &[BlockId]) {
        self.release_exposed(ids, Exposure::Shared);
    }

    pub(crate) fn release_exposed(&self, ids: &[BlockId], exposure: Exposure) {
        let table = self.space.table.view();
        match exposure {
            Exposure::Private => self.release_by(ids, |id| release_privately(table, id)),
            // Blocks of a tenant are counted.
            Exposure::Shared if self.tenants().is_some() => self.release_by(ids, |_| None),
            Exposure::Shared => self.release_by(ids, |id| release_only(table, id)),
        }
    }

    #[inline(always)]
    fn release_by(&self, ids: &[BlockId], fast: impl Fn(BlockId) -> Option<FrameId>) {
        let mut few = Few::new();
        let rest = few.fill(ids, &fast);
        if rest.is_empty() { self.give_back_few(few.frames()) } else { self.release_rest(few, rest, fast) }
    }

    #[inline(never)]
    fn release_rest(&self, few: Few, rest: &[BlockId], fast: impl Fn(BlockId) -> Option<FrameId>) {
        let (mut pass, table) = (Pass::new(self, few), self.space.table.view());
        let release_only = |id| if self.tenants().is_none() { release_only(table, id) } else { None };
        pass.release_all(rest, fast, |pass, id| match release_only(id) {
            Some(frame) => pass.freed(frame),
            None => pass.release_owned(id),
        });
        self.finish(&mut pass, 0, |_, _| ());
    }

    /// Like [`release_exposed`](Self::release_exposed), for one block, in registers.
    #[inline]
    pub(crate) fn release_unseen(&self, id: BlockId) {
        match release_privately(self.space.table.view(), id) {
            Some(frame) => self.give_back_one(frame),
            None => self.release_sealed(id),
        }
    }

    #[cold]
    #[inline(never)]
    fn release_sealed(&self, id: BlockId) {
        self.release(&[id]);
    }

    /// Like [`release`](Self::release), for blocks in a sequence's list. Notifies the evictor.
    pub fn release_listed(&self, ids: &[BlockId]) {
        self.release_cached(ids, |blocks, tag| self.tell_evictor(blocks, tag));
    }

    /// Like [`release_listed`](Self::release_listed); `tell` notifies the evictor.
    pub(crate) fn release_cached(&self, ids: &[BlockId], tell: impl FnOnce(&[Evictable], Ticket)) {
        if self.release_silently(ids, tell) {
            self.announce();
        }
    }

    /// Like [`release_cached`](Self::release_cached), but returns whether an announcement is due.
    pub(crate) fn release_silently(&self, ids: &[BlockId], tell: impl FnOnce(&[Evictable], Ticket)) -> bool {
        let (mut pass, table) = (Pass::new(self, Few::new()), self.space.table.view());
        if self.evictor.is_none() {
            pass.release_all(ids, |id| release_only(table, id), Pass::release_owned);
        } else {
            pass.expect_evictable(ids.len());
            // Blocks of a tenant are counted.
            if self.tenants().is_some() {
                ids.iter().for_each(|&id| pass.release_owned(id));
                return self.end_pass(&mut pass, ids.len(), tell);
            }
            for (i, &id) in ids.iter().enumerate() {
                if let Some(&next) = ids.get(i + RELEASED_AHEAD) {
                    self.prefetch_word(next);
                }
                // All have been counted as evictable.
                match release_kept(table, id) {
                    Some(word) => pass.became_evictable(id, word),
                    None => pass.release_owned(id),
                }
            }
        }
        self.end_pass(&mut pass, ids.len(), tell)
    }

    /// Like [`release_listed`](Self::release_listed), for blocks that no batch could see.
    pub(crate) fn release_unpublished(&self, ids: &[BlockId]) {
        if ids.is_empty() {
            return;
        }
        let (mut pass, table) = (Pass::new(self, Few::new()), self.space.table.view());
        match self.tenants() {
            None => pass.release_all(ids, |id| release_only(table, id), Pass::release_owned),
            Some(_) => ids.iter().for_each(|&id| pass.release_owned(id)),
        }
        for &run in pass.all_freed() {
            self.space.free_run(run);
            self.counters.freed(run.len as usize);
        }
        pass.settle(ids.len(), |blocks, tag| self.tell_evictor(blocks, tag));
        self.announce();
    }

    pub(super) fn finish(&self, pass: &mut Pass<'_>, listed: usize, tell: impl FnOnce(&[Evictable], Ticket)) {
        if self.end_pass(pass, listed, tell) {
            self.announce();
        }
    }

    /// Ends a pass. Returns whether blocks became evictable that are not announced.
    #[inline]
    fn end_pass(&self, pass: &mut Pass<'_>, listed: usize, tell: impl FnOnce(&[Evictable], Ticket)) -> bool {
        let is_evictable = pass.settle(listed, tell);
        match (pass.runs.is_empty(), pass.few.frames()) {
            (true, []) => return is_evictable,
            (true, few) => self.give_back_few(few),
            (false, _) => self.give_back_runs(pass.all_freed()),
        }
        // Announced, or no request waited behind the fence of the thread cache, which follows the
        // words and queue entries of what became evictable: a later request finds all of it.
        false
    }
}

impl Core {
    /// Drops references of listed blocks whose owner keeps its own: none is the last.
    #[cold]
    pub(super) fn unshare(&self, ids: &[BlockId]) {
        let mut pass = Pass::new(self, Few::new());
        ids.iter().for_each(|&id| pass.release_owned(id));
        debug_assert!(pass.all_freed().is_empty(), "the owner keeps its reference");
        pass.settle(ids.len(), |_, _| ());
    }

    /// Drops a [hit](super::super::WordCell::hit), before it is counted, whose block proved to have
    /// other contents.
    #[cold]
    pub(crate) fn give_back_hit(&self, id: BlockId, was_evictable: bool) {
        let mut pass = Pass::new(self, Few::new());
        if was_evictable {
            self.took_cached(id);
            pass.counted = 1;
        } else {
            pass.expect_evictable(1);
        }
        pass.release_owned(id);
        pass.settle(1, |blocks, tag| self.tell_evictor(blocks, tag));
        if !pass.all_freed().is_empty() {
            self.give_back(None, &pass.runs);
        }
        self.announce();
    }

    fn tell_evictor(&self, blocks: &[Evictable], tag: Ticket) {
        self.evictor.iter().for_each(|evictor| evictor.became_evictable(self, blocks, tag));
    }
}
