//! Places [beside](super::super::retention) the policy's order, and those that policies choose.

use std::ops::ControlFlow;

use crate::block::{BlockWord, Core, Tenant};
use crate::ids::BlockId;
use crate::sync::Ordering::Relaxed;

use super::super::policy::{Millis, Place, Released, asked};
use super::super::queues::Queues;
use super::super::retention::{
    BESIDE_BIT, Beside, CLASSES, DEMOTED, PlacedRun, QUEUE, RUN_MAX, Retention, Taken, class_of, priority_of,
    renewed,
};
use super::super::row::Row;
use super::super::user::Users;
use super::{AHEAD, BlockHash, IdRun, PolicyInfo, PrefixCache, bits_of, key_of};

/// Returns the retention for which a request asks, if it has not ended.
#[inline]
pub(super) fn retention_of(info: &PolicyInfo, now: Millis) -> Option<Retention> {
    let until = info.keep_until.filter(|&until| until > now)?;
    Some(Retention { until, priority: info.priority, is_pinned: false })
}

/// Places blocks beside the policy's order. Dropping it pushes the last run.
pub(super) struct Placing<'a> {
    cache: &'a PrefixCache,
    beside: Option<Beside>,
    /// Of its blocks.
    tenant: Tenant,
    run: PlacedRun,
}

impl Placing<'_> {
    #[inline]
    pub(super) fn is_beside(&self) -> bool {
        self.beside.is_some()
    }

    /// Places a block; it was released at `released`.
    pub(super) fn place(&mut self, row: &Row, id: BlockId, order: u64, released: u64) {
        let Some(beside) = self.beside else { return };
        let tenant = self.cache.tenant_of(id);
        if tenant != self.tenant {
            self.push();
            self.tenant = tenant;
        }
        let rank = self.cache.queues.beside.rank(beside, order);
        row.set_place(QUEUE + beside.class(), rank, released);
        self.run.push(rank, id);
        if self.run.rest().len() == RUN_MAX {
            self.push();
        }
    }

    fn push(&mut self) {
        let class = self.beside.map_or(DEMOTED, Beside::class);
        let queues = self.cache.queues_of(self.tenant);
        queues.beside.push(std::mem::replace(&mut self.run, PlacedRun::of(class)));
    }
}

impl Drop for Placing<'_> {
    #[inline]
    fn drop(&mut self) {
        if self.is_beside() {
            self.push();
            self.cache.drop_stale();
        }
    }
}

impl PrefixCache {
    #[inline]
    pub(super) fn placing(&self, beside: Option<Beside>) -> Placing<'_> {
        let tenant = Tenant::NONE;
        Placing { cache: self, beside, tenant, run: PlacedRun::of(beside.map_or(DEMOTED, Beside::class)) }
    }

    fn drop_stale(&self) {
        for (_, queues) in self.all_queues() {
            queues.beside.tidy(|rank, id| self.row(id).place().1 == rank);
        }
    }

    /// Returns the queue and place that a policy chooses which does not place by order.
    pub(super) fn place(
        &self,
        row: &Row,
        order: u64,
        policy_info: &PolicyInfo,
        now: Millis,
    ) -> (usize, Place) {
        let released = Released {
            order,
            hash: bits_of(row.hash()),
            depth: row.depth(),
            chain: policy_info.chain.max(row.depth() + 1),
            hits: row.hits(),
            context: policy_info.context,
            state: row.policy_state(),
            priority: policy_info.priority,
            session: policy_info.session,
            returns_at: policy_info.returns_at,
        };
        let by_order = Place { queue: 0, rank: order, state: 0 };
        let mut place = asked(|| self.policy.place(&released, now)).unwrap_or(by_order);
        place.rank = place.rank.min(BESIDE_BIT - 1);
        (usize::from(place.queue).min(self.queues.useless() - 1), place)
    }

    /// Gives up to `wanted` blocks whose retention has ended a place of the policy. Returns whether
    /// there were any.
    #[cold]
    pub(super) fn end_retention(&self, queues: &Queues, core: &Core, wanted: usize) -> bool {
        let (now, era) = (self.caught_now(), self.era());
        if queues.beside.enters(era) {
            self.leave_era(queues, core, era);
        }
        let Some(ended) = queues.beside.ended(now) else { return false };
        let (mut left, mut returned) = (wanted, Vec::new());
        for class in DEMOTED + 1..CLASSES {
            while left > 0
                && let Taken::Run(mut run) = queues.beside.take(class, ended)
            {
                let mut ids = Vec::new();
                let mut done = 0;
                for &(rank, id) in run.rest() {
                    if left == 0 {
                        break;
                    }
                    done += 1;
                    // An owned block is placed by its next release.
                    if self.row(id).place().1 == rank && core.word(id).is_evictable() {
                        self.place_again(self.row(id), class, now);
                        ids.push(id);
                        left -= 1;
                    }
                }
                run.skip(done);
                queues.beside.push(run);
                returned.push(ids);
            }
        }
        if left > 0 {
            queues.beside.raise_earliest();
        }
        self.enqueue_old(returned.iter().map(Vec::as_slice));
        left < wanted
    }

    /// Enqueues blocks by ranks that the policy's queue has passed, in the order of their eviction.
    /// The queue gives them from the last entry to the first.
    fn enqueue_old<'a>(&self, entries: impl DoubleEndedIterator<Item = &'a [BlockId]>) {
        for ids in entries.rev() {
            ids.rchunks(RUN_MAX).for_each(|ids| self.enqueue(ids.iter().copied()));
        }
    }

    /// Places retained blocks of earlier eras, which no lookup finds, among the useless ones.
    fn leave_era(&self, queues: &Queues, core: &Core, era: u64) {
        let mut left = Vec::new();
        let mut filing = self.filing();
        for class in DEMOTED + 1..CLASSES {
            while let Taken::Run(run) = queues.beside.take(class, u64::MAX) {
                let mut of_era = PlacedRun::of(class);
                for &(rank, id) in run.rest() {
                    let row = self.row(id);
                    if row.place().1 != rank || !core.word(id).is_evictable() {
                        continue;
                    }
                    if row.is_of(era) {
                        of_era.push(rank, id);
                    } else {
                        row.set_place(self.queues.useless(), row.state.load(Relaxed), 0);
                        filing.add(id);
                    }
                }
                left.push(of_era);
            }
        }
        left.into_iter().for_each(|run| queues.beside.push(run));
    }

    /// Retains the evictable blocks of these hashes, of one chain in its order, until they are hit
    /// and released. `takes` chooses among the cached ones, by the place of the hash, the block and
    /// whether it is evictable. Returns how many of these were evictable, and how many have owners.
    pub(crate) fn retain(
        &self,
        core: &Core,
        hashes: &[BlockHash],
        era: u64,
        retention: Retention,
        takes: impl FnMut(usize, BlockId, bool) -> bool,
    ) -> (usize, usize) {
        // Blocks of an earlier era are useless.
        if era != self.era() {
            return (0, 0);
        }
        self.place_beside(core, hashes, era, Beside::Retained(retention), takes)
    }

    /// Makes the evictable blocks of these hashes evict-first, until they are hit and released.
    /// Those that are `spared`, by their users, only lose their retention. Returns as
    /// [`retain`](Self::retain).
    pub(crate) fn demote(
        &self,
        core: &Core,
        hashes: &[BlockHash],
        era: u64,
        mut spared: impl FnMut(BlockId, Users) -> bool,
    ) -> (usize, usize) {
        let mut others = Vec::new();
        let placed = self.place_beside(core, hashes, era, Beside::Demoted, |_, id, is_evictable| {
            let is_spared = spared(id, self.row(id).users()) && is_evictable;
            others.extend(is_spared.then_some(id));
            !is_spared
        });
        self.end_retention_of(core, &others);
        placed
    }

    /// Notes a user of blocks on which the caller has references.
    pub(crate) fn add_user(&self, ids: impl Iterator<Item = BlockId>, user: Users) {
        ids.for_each(|id| self.row(id).add_user(user));
    }

    /// Returns how many of these hashes are cached.
    pub(crate) fn count_cached(&self, core: &Core, hashes: &[BlockHash], era: u64) -> usize {
        let mut cached = 0;
        if era == self.era() {
            self.each_cached(core, hashes, era, |_, _, _| cached += 1);
        }
        cached
    }

    /// Ends the retention of the blocks of these hashes, and returns them.
    pub(crate) fn end_retention_by(&self, core: &Core, hashes: &[BlockHash], era: u64) -> Vec<BlockId> {
        let mut ids = Vec::new();
        self.each_cached(core, hashes, era, |_, id, _| ids.push(id));
        self.end_retention_of(core, &ids);
        ids
    }

    /// Returns whether a block is pinned, or retained, or has owners, whose release gives it a place.
    pub(crate) fn may_be_kept(&self, core: &Core, id: BlockId, is_pinned: bool) -> bool {
        let (word, pinned) = (core.word(id), QUEUE + CLASSES - 1);
        let first = if is_pinned { pinned } else { QUEUE + DEMOTED + 1 };
        word.is_cached() && (!word.is_evictable() || (first..=pinned).contains(&self.row(id).queue()))
    }

    /// Ends the retention of blocks of one chain, in its order.
    fn end_retention_of(&self, core: &Core, ids: &[BlockId]) {
        let now = self.caught_now();
        let ended = ids.iter().rev().copied().filter(|&id| {
            // Read once: a release may change it.
            let (row, queue) = (self.row(id), self.row(id).queue());
            let is_retained = queue > QUEUE + DEMOTED && core.word(id).is_evictable();
            if is_retained {
                self.place_again(row, queue - QUEUE, now);
            }
            is_retained
        });
        let ended: Vec<BlockId> = ended.collect();
        self.enqueue_old([ended.as_slice()].into_iter());
    }

    /// Gives a retained block a place of the policy, by the order of its release.
    fn place_again(&self, row: &Row, class: usize, now: Millis) {
        let info = PolicyInfo { priority: priority_of(class), ..PolicyInfo::default() };
        let (queue, place) = self.place(row, row.state.load(Relaxed), &info, now);
        row.set_place(queue, place.rank, place.state);
    }

    /// Enqueues blocks that were taken and are not used: in their places. Their runs may have
    /// dropped them meanwhile.
    pub(super) fn enqueue_again(&self, ids: impl Iterator<Item = BlockId>) {
        let mut filing = self.filing();
        let mut run: Option<(Tenant, PlacedRun)> = None;
        let push = |(tenant, run)| self.queues_of(tenant).beside.push(run);
        for id in ids {
            let row = self.row(id);
            let (queue, rank) = row.place();
            if rank & BESIDE_BIT == 0 {
                filing.add(id);
                continue;
            }
            let class = class_of(queue.checked_sub(QUEUE), rank);
            let renewed = renewed(rank, self.order.fetch_add(1, Relaxed));
            // If it fails, another thread has placed it, and enqueues it.
            if row.rank.compare_exchange(rank, renewed, Relaxed, Relaxed).is_err() {
                continue;
            }
            let of = self.tenant_of(id);
            match &mut run {
                Some((tenant, run)) if *tenant == of && run.follows(class, renewed) => run.push(renewed, id),
                _ => {
                    let mut next = PlacedRun::of(class);
                    next.push(renewed, id);
                    run.replace((of, next)).into_iter().for_each(push);
                }
            }
        }
        if let Some(run) = run {
            push(run);
            self.drop_stale();
        }
    }

    /// Places the evictable blocks of these hashes that `takes` chooses, as for
    /// [`retain`](Self::retain).
    fn place_beside(
        &self,
        core: &Core,
        hashes: &[BlockHash],
        era: u64,
        beside: Beside,
        mut takes: impl FnMut(usize, BlockId, bool) -> bool,
    ) -> (usize, usize) {
        let (mut placed, mut owned) = (0, 0);
        // The end of a chain first, as in a release.
        let end = self.orders(hashes.len()).start + hashes.len() as u64;
        let (mut run, mut tenant) = (PlacedRun::with_room(beside.class()), Tenant::NONE);
        self.each_cached(core, hashes, era, |at, id, word| {
            let row = self.row(id);
            if !takes(at, id, word.is_evictable()) {
                return;
            }
            if !word.is_evictable() {
                owned += 1;
                return;
            }
            let order = end - 1 - at as u64;
            let released = match row.place() {
                (0, rank) if self.by_order => rank,
                (QUEUE.., _) => row.state.load(Relaxed),
                _ => order,
            };
            let rank = self.queues.beside.rank(beside, order);
            row.set_place(QUEUE + beside.class(), rank, released);
            let of = self.tenant_of(id);
            if run.rest().len() == RUN_MAX || of != tenant {
                let full = std::mem::replace(&mut run, PlacedRun::with_room(beside.class()));
                self.push_reversed(tenant, full);
                tenant = of;
            }
            run.push(rank, id);
            placed += 1;
        });
        self.push_reversed(tenant, run);
        self.drop_stale();
        (placed, owned)
    }

    fn push_reversed(&self, tenant: Tenant, mut run: PlacedRun) {
        run.reverse();
        self.queues_of(tenant).beside.push(run);
    }

    /// Visits the cached blocks of these hashes, without references on them: they may be others' at
    /// any moment.
    fn each_cached(
        &self,
        core: &Core,
        hashes: &[BlockHash],
        era: u64,
        mut visit: impl FnMut(usize, BlockId, BlockWord),
    ) {
        let mut run = IdRun::new(core);
        let look = |id: BlockId, hash: &BlockHash| {
            let word = core.word(id);
            (word.is_cached() && self.holds(id, *hash, era)).then_some((id, word))
        };
        for (at, hash) in hashes.iter().enumerate() {
            self.prefetch_ahead(core, run, hashes.get(at + AHEAD));
            let near = run.next.and_then(|id| look(id, hash));
            let found = near.or_else(|| {
                self.index.find(key_of(*hash), |id| match look(id, hash) {
                    Some(found) => ControlFlow::Break(found),
                    None => ControlFlow::Continue(()),
                })
            });
            if let Some((id, word)) = found {
                run.found(id);
                visit(at, id, word);
            }
        }
    }
}
