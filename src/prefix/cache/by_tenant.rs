//! Eviction queues by tenant, in pools with [tenants](crate::block::Tenants).
//!
//! Each tenant has [queues](super::super::queues) of its own; blocks without a tenant are in those
//! of the cache. So an eviction passes over a tenant at its floor in constant time, however many of
//! its blocks are the oldest, and a tenant at its quota finds its own.
//!
//! # Order
//!
//! ```text
//! useless, demoted     of each tenant that has blocks beyond its floor
//! in order             the entry that was released first; with a policy that does not place by the order of releases:
//!                      the one that the policy chooses of the tenant that has most beyond its floor
//! retained             of each tenant, as before
//! ```
//!
//! A thread holds the first entry of several tenants while it compares them, and puts them back.
//!
//! # Strays
//!
//! A block that was evicted out of order stays in its entry. If it is then allocated for another
//! tenant and released, the flag that says so keeps it from being enqueued again, until the entry
//! is popped: it is a *stray* in the queues of its former tenant, its *home*. If that one is at its
//! floor, nothing pops the entry. So strays are counted, and an eviction that finds nothing else
//! enqueues the blocks of such queues anew. Both are hints: the walk at the end of the allocation
//! ladder finds every block.

use std::cell::RefCell;
use std::sync::OnceLock;

use smallvec::SmallVec;

use crate::block::{Core, Evictable, GrowTable, TENANTS_MAX, TablePart, Tenant, Tenants};
use crate::ids::{BlockId, FrameId, Ticket};
use crate::sync::{Arc, AtomicU8, AtomicUsize, Ordering::Relaxed};

use super::super::policy::Millis;
use super::super::queues::{Enqueueing, Entry, Queues};
use super::eviction::Eviction;
use super::{BlockHash, PolicyInfo, PrefixCache};

/// Share of the pool for which the queues of one tenant are laid out, as a shift.
const TENANT_SHIFT: u32 = 3;

/// Number of strays that are enqueued anew at once.
const BATCH: usize = 64;

struct Homes(Box<[AtomicU8]>);

impl TablePart for Homes {
    fn new(_base: usize, len: usize) -> Self {
        Self((0..len).map(|_| AtomicU8::new(0)).collect())
    }

    fn len(&self) -> usize {
        self.0.len()
    }
}

/// The queues of all tenants.
pub(super) struct ByTenant {
    tenants: Arc<Tenants>,
    /// By tenant; the first is not used. Created when a block of the tenant is first released.
    queues: Box<[OnceLock<Queues>]>,
    /// The tenant in whose queues each block was enqueued last.
    homes: GrowTable<Homes>,
    /// By tenant, with none first.
    strays: Box<[AtomicUsize]>,
    /// Policy queues, and blocks of the largest pool.
    shape: (usize, usize),
    built: Millis,
}

/// One tenant's part of an eviction.
struct Lane<'a> {
    tenant: Tenant,
    eviction: Eviction<'a>,
    /// The first entry, and its rank among those of all tenants.
    first: Option<(u64, Entry)>,
    is_done: bool,
}

impl PrefixCache {
    /// Adds queues for each tenant of a pool of `rows` blocks that may grow to `rows_max`.
    pub(crate) fn with_tenants(mut self, rows: usize, rows_max: usize, tenants: Arc<Tenants>) -> Self {
        self.by_tenant = Some(Box::new(ByTenant {
            tenants,
            queues: (0..=TENANTS_MAX).map(|_| OnceLock::new()).collect(),
            homes: GrowTable::new(rows),
            strays: (0..=TENANTS_MAX).map(|_| AtomicUsize::new(0)).collect(),
            shape: (self.queues.useless(), rows_max),
            built: self.caught_now(),
        }));
        self
    }

    pub(super) fn grow_tenants(&self, rows: usize) {
        if let Some(by_tenant) = &self.by_tenant {
            by_tenant.tenants.grow(rows);
            by_tenant.homes.grow(rows);
        }
    }

    /// Takes a reference on each block of the longest cached prefix, and passes it to `take`.
    /// Returns the next block if it is cached but has the maximum of references.
    #[inline]
    pub(crate) fn take_prefix(
        &self,
        core: &Core,
        hashes: &[BlockHash],
        era: u64,
        take: &mut dyn FnMut(BlockId),
    ) -> Option<BlockId> {
        if self.by_tenant.is_some() {
            self.take_prefix_in::<true>(core, hashes, era, take)
        } else {
            self.take_prefix_in::<false>(core, hashes, era, take)
        }
    }

    /// Enqueues blocks that became evictable, in the queues that the policy chooses.
    pub(crate) fn keep(&self, core: &Core, kept: &[Evictable], tag: Ticket, policy_info: PolicyInfo) {
        match &self.by_tenant {
            None => self.keep_in(&self.queues, core, kept, tag, policy_info),
            Some(by_tenant) => self.keep_by_tenant(by_tenant, kept, |queues, kept| {
                self.keep_in(queues, core, kept, tag, policy_info);
            }),
        }
    }

    /// Returns the tenant of a block, whose queues it belongs in.
    #[inline]
    pub(super) fn tenant_of(&self, id: BlockId) -> Tenant {
        self.by_tenant.as_ref().map_or(Tenant::NONE, |by_tenant| by_tenant.tenants.of(id))
    }

    /// Returns the queues of a tenant.
    pub(super) fn queues_of(&self, tenant: Tenant) -> &Queues {
        match &self.by_tenant {
            Some(by_tenant) if tenant != Tenant::NONE => by_tenant.queues(tenant),
            _ => &self.queues,
        }
    }

    /// Returns all queues in use, with those of blocks without a tenant first.
    pub(super) fn all_queues(&self) -> impl Iterator<Item = (Tenant, &Queues)> {
        let of_tenants = self.by_tenant.iter().flat_map(|by_tenant| {
            let used = |tenant: Tenant| Some((tenant, by_tenant.queues[tenant.index()].get()?));
            by_tenant.tenants.all().filter_map(used)
        });
        std::iter::once((Tenant::NONE, &self.queues)).chain(of_tenants)
    }

    /// Passes released blocks on by tenant, in their order.
    fn keep_by_tenant(
        &self,
        by_tenant: &ByTenant,
        kept: &[Evictable],
        mut keep: impl FnMut(&Queues, &[Evictable]),
    ) {
        for of_tenant in kept.chunk_by(|a, b| by_tenant.tenants.of(a.id) == by_tenant.tenants.of(b.id)) {
            // A block may have been hit, released, and evicted since: then this is a hint.
            let tenant = by_tenant.tenants.of(of_tenant[0].id);
            of_tenant.iter().for_each(|kept| self.note_home(by_tenant, kept.id, tenant));
            keep(self.queues_of(tenant), of_tenant);
        }
    }

    /// Notes a block that is about to be enqueued.
    fn note_home(&self, by_tenant: &ByTenant, id: BlockId, tenant: Tenant) {
        let (part, at) = by_tenant.homes.locate(id.index());
        if !self.row(id).enqueued.load(Relaxed) {
            part.0[at].store(tenant.index() as u8, Relaxed);
        } else if usize::from(part.0[at].load(Relaxed)) != tenant.index() {
            by_tenant.strays[usize::from(part.0[at].load(Relaxed))].fetch_add(1, Relaxed);
        }
    }

    /// Enqueues blocks by the places in their rows, each in the queues of its tenant.
    pub(super) fn enqueue(&self, ids: impl IntoIterator<Item = BlockId>) {
        let mut filing = self.filing();
        ids.into_iter().for_each(|id| filing.add(id));
    }

    pub(super) fn filing(&self) -> Filing<'_> {
        Filing { cache: self, tenant: Tenant::NONE, inner: self.queues.filing(&self.rows) }
    }

    /// Evicts for an allocation of a tenant, but not below the floors of others.
    pub(super) fn evict_by(
        &self,
        core: &Core,
        oldest: Ticket,
        (wanted, tenant): (usize, Tenant),
        freed: &mut dyn FnMut(&[FrameId]),
    ) {
        let freed = RefCell::new(freed);
        let freed = |frames: &[FrameId]| (freed.borrow_mut())(frames);
        match &self.by_tenant {
            None => Eviction::new(self, &self.queues, core, oldest, &freed).run(wanted),
            Some(by_tenant) => self.evict_beyond_floors(by_tenant, core, oldest, (wanted, tenant), &freed),
        }
    }

    fn evict_beyond_floors(
        &self,
        by_tenant: &ByTenant,
        core: &Core,
        oldest: Ticket,
        (wanted, tenant): (usize, Tenant),
        freed: &dyn Fn(&[FrameId]),
    ) {
        let lane = |(of, queues)| {
            let eviction = Eviction::new(self, queues, core, oldest, freed).for_tenant(tenant);
            Lane { tenant: of, eviction, first: None, is_done: false }
        };
        let got = {
            let has_room = |&(of, _): &(Tenant, &Queues)| by_tenant.tenants.room(of, tenant) > 0;
            let mut lanes: SmallVec<[Lane<'_>; 8]> = self.all_queues().filter(has_room).map(lane).collect();
            by_tenant.evict(self, &mut lanes, wanted, tenant)
        };
        if got == 0 && self.enqueue_strays(by_tenant, core, tenant) {
            let mut lanes: SmallVec<[Lane<'_>; 8]> = self.all_queues().map(lane).collect();
            by_tenant.evict(self, &mut lanes, wanted, tenant);
        }
    }

    /// Evicts blocks of a tenant, whatever its floor is.
    pub(super) fn evict_of_tenant(
        &self,
        core: &Core,
        oldest: Ticket,
        (wanted, tenant): (usize, Tenant),
        freed: &mut dyn FnMut(&[FrameId]),
    ) {
        let (queues, freed) = (self.queues_of(tenant), RefCell::new(freed));
        let freed = |frames: &[FrameId]| (freed.borrow_mut())(frames);
        Eviction::new(self, queues, core, oldest, &freed).for_tenant(tenant).run(wanted);
    }

    /// Enqueues the blocks anew that are in queues of tenants at their floors, if some of them are
    /// strays. Returns whether there were any.
    #[cold]
    fn enqueue_strays(&self, by_tenant: &ByTenant, core: &Core, tenant: Tenant) -> bool {
        let (mut found, mut left) = (false, core.rows());
        for (of, queues) in self.all_queues() {
            let is_passed_over = by_tenant.tenants.room(of, tenant) == 0;
            if !is_passed_over || left == 0 || by_tenant.strays[of.index()].swap(0, Relaxed) == 0 {
                continue;
            }
            // Strays at once, as they go elsewhere. The others would be popped again.
            let (mut strays, mut others) = (Vec::new(), Vec::new());
            // Other threads may enqueue meanwhile; no more than the pool has are looked at.
            while left > 0
                && let Some(entry) = self.take_next_of(queues, 0)
            {
                let mut next = Some(entry.first);
                while let Some(id) = next {
                    left = left.saturating_sub(1);
                    next = queues.below(&self.rows, entry.queue, id);
                    queues.enqueued(&self.rows, entry.queue, id).dequeue();
                    if core.word(id).is_evictable() {
                        let is_stray = by_tenant.tenants.of(id) != of;
                        if is_stray { strays.push(id) } else { others.push(id) }
                    }
                }
                if strays.len() >= BATCH {
                    self.enqueue(strays.drain(..));
                }
            }
            self.enqueue(strays);
            self.enqueue(others);
            found = true;
        }
        found
    }
}

impl ByTenant {
    fn queues(&self, tenant: Tenant) -> &Queues {
        let (policy_queues, blocks) = self.shape;
        self.queues[tenant.index()]
            .get_or_init(|| Queues::new(policy_queues, (blocks >> TENANT_SHIFT).max(1), self.built))
    }

    /// Evicts up to `wanted` blocks. Returns how many.
    fn evict(&self, cache: &PrefixCache, lanes: &mut [Lane<'_>], wanted: usize, by: Tenant) -> usize {
        let mut got = 0;
        let most = |got: usize, of: Tenant| (wanted - got).min(self.tenants.room(of, by));
        for lane in &mut *lanes {
            got += lane.eviction.begin(most(got, lane.tenant));
        }
        while got < wanted
            && let Some(lane) = self.first(cache, lanes, by)
        {
            let wanted = most(got, lane.tenant);
            let Some((_, entry)) = lane.first.take_if(|_| wanted > 0) else {
                lane.is_done = true;
                continue;
            };
            got += lane.eviction.evict_entry(entry, wanted);
            lane.is_done = lane.eviction.is_over();
        }
        for lane in &mut *lanes {
            if got < wanted {
                got += lane.eviction.evict_retained(most(got, lane.tenant));
            }
        }
        got
    }

    /// Returns the tenant whose first entry is evicted next.
    fn first<'l, 'a>(
        &self,
        cache: &PrefixCache,
        lanes: &'l mut [Lane<'a>],
        by: Tenant,
    ) -> Option<&'l mut Lane<'a>> {
        for lane in lanes.iter_mut().filter(|lane| !lane.is_done && lane.first.is_none()) {
            lane.first = lane.eviction.take_next().map(|entry| (lane.eviction.rank_of(entry), entry));
            lane.is_done = lane.first.is_none();
        }
        let key = |lane: &Lane<'_>| {
            let rank = lane.first.filter(|_| !lane.is_done).map(|(rank, _)| rank)?;
            // Ranks of other policies are not comparable.
            let is_ordered = cache.by_order || rank == 0;
            Some(if is_ordered { rank } else { u64::MAX - self.tenants.room(lane.tenant, by) as u64 })
        };
        let lanes = lanes.iter_mut().filter_map(|lane| Some((key(lane)?, lane)));
        lanes.min_by_key(|&(key, _)| key).map(|(_, lane)| lane)
    }
}

impl Drop for Lane<'_> {
    fn drop(&mut self) {
        if let Some((_, entry)) = self.first {
            self.eviction.put_back(entry);
        }
    }
}

/// Enqueues blocks, those of each tenant in its queues.
pub(super) struct Filing<'a> {
    cache: &'a PrefixCache,
    tenant: Tenant,
    inner: Enqueueing<'a>,
}

impl Filing<'_> {
    #[inline]
    pub(super) fn add(&mut self, id: BlockId) {
        if let Some(by_tenant) = &self.cache.by_tenant {
            let tenant = by_tenant.tenants.of(id);
            if tenant != self.tenant {
                self.tenant = tenant;
                self.inner = self.cache.queues_of(tenant).filing(&self.cache.rows);
            }
            self.cache.note_home(by_tenant, id, tenant);
        }
        self.inner.add(id);
    }
}
