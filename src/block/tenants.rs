//! Tenants: whose a block is, and how many blocks each tenant holds, may hold, and keeps.
//!
//! A block belongs to the tenant whose sequence allocated it, until it is free again: owned by that
//! sequence or by others, and cached. A block of a lease, a cached block of an import, and one of a
//! sequence without a tenant belongs to none. What a tenant holds is limited by its *quota*; below
//! its *floor*, no eviction for others takes a block of it.
//!
//! # State
//!
//! | where | what | written by |
//! |---|---|---|
//! | the table of blocks | the tenant of a block; none while it is free | the thread that allocated it, or that owns its frame as it is freed |
//! | an account | counts and limits of a tenant | see `account` |
//!
//! # Invariant
//!
//! At every quiescent point, for each tenant: `held == charged ==` the number of blocks that name it
//! in the table, and `cached ==` those of them that are evictable. [Audits](super::Core::audit)
//! recount both.
//!
//! # Protocol
//!
//! ```text
//! allocate   charge, or evict own cached blocks and charge again, or refuse;  allocate;  each block: tenant := t;
//!            held += n.  Failed: the charge is taken back
//! release    tenant: read;  word: last reference.  Cached => cached += 1;  freed => tenant := none, held -= 1, charged -= 1
//! hit        word: evictable -> owned;  cached -= 1
//! evict      tenant: read;  for others: going += 1, unless held - going <= floor => protected;
//!            word: evictable -> free.  Changed => going -= 1;
//!            else tenant := none, cached -= 1, held -= 1 and going -= 1, charged -= 1
//! ```
//!
//! A tenant is read while the reader has a reference on the block, owns its frame, or will compare
//! the word: a block whose word is unchanged names the same tenant. A word recurs after 65,536
//! releases; so the thread that evicted a block reads its tenant once more.
//!
//! A mover that is left a freed block counts it out, since its frame is the mover's.
//!
//! Models: `loom-tests/tests/tenants.rs`.

mod account;

use crate::error::{AllocError, TenantError};
use crate::ids::{BlockId, TenantId};
use crate::sync::{
    AtomicU8, AtomicU64, AtomicUsize, CachePadded, Mutex, MutexGuard, Ordering::*, StatisticU64, yield_now,
};

use super::state::{GrowTable, TablePart, TenantSet};
use account::Account;

/// Maximum number of tenants of a pool.
pub const TENANTS_MAX: usize = if cfg!(kvpool_loom) { 2 } else { 64 };

/// Maximum number of yields to threads of a tenant whose charges may be taken back.
const YIELDS: usize = if cfg!(kvpool_loom) { 1 } else { 4096 };

/// A tenant of one pool, by its account; or none.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Tenant(u8);

impl Tenant {
    /// No tenant.
    pub const NONE: Self = Self(0);

    /// Returns its place in a list of all tenants, in which none is the first.
    pub(crate) fn index(self) -> usize {
        self.0.into()
    }
}

/// For whom blocks are evicted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum EvictedFor {
    /// For an allocation of this tenant: not below the floors of others.
    Tenant(Tenant),
    /// By the order of a caller who named the blocks: regardless of floors.
    Caller,
}

impl EvictedFor {
    /// An allocation without a tenant.
    pub const ANY: Self = Self::Tenant(Tenant::NONE);
}

/// What a tenant holds, in blocks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Holding {
    pub held: u64,
    pub cached: u64,
    /// `None`: without a limit.
    pub quota: Option<u64>,
    pub floor: u64,
    pub lookups: u64,
    pub hits: u64,
    pub evicted: u64,
    pub protected: u64,
    pub refused: u64,
}

struct TenantPart(Box<[AtomicU8]>);

impl TablePart for TenantPart {
    fn new(_base: usize, len: usize) -> Self {
        Self((0..len).map(|_| AtomicU8::new(0)).collect())
    }

    fn len(&self) -> usize {
        self.0.len()
    }
}

/// The tenants of a pool, and whose its blocks are.
pub struct Tenants {
    of: GrowTable<TenantPart>,
    /// By tenant; the first only counts cached blocks without a tenant.
    accounts: Box<[CachePadded<Account>]>,
    ids: Box<[AtomicU64]>,
    known: AtomicUsize,
    changes: Mutex<()>,
}

impl Tenants {
    /// Creates a table for `rows` blocks, without tenants.
    pub fn new(rows: usize) -> Self {
        Self {
            of: GrowTable::new(rows),
            accounts: (0..=TENANTS_MAX).map(|_| CachePadded::default()).collect(),
            ids: (0..TENANTS_MAX).map(|_| AtomicU64::new(0)).collect(),
            known: AtomicUsize::new(0),
            changes: Mutex::new(()),
        }
    }

    pub(crate) fn grow(&self, rows: usize) {
        self.of.grow(rows);
    }

    /// Returns the tenant with this id.
    pub fn find(&self, id: TenantId) -> Option<Tenant> {
        self.all().find(|&tenant| self.id(tenant) == id)
    }

    /// Returns all tenants, in the order in which they were added.
    pub(crate) fn all(&self) -> impl DoubleEndedIterator<Item = Tenant> + ExactSizeIterator + use<> {
        // Acquire: pairs with the Release in `set`, for the ids.
        (1..self.known.load(Acquire) as u8 + 1).map(Tenant)
    }

    pub(crate) fn id(&self, tenant: Tenant) -> TenantId {
        TenantId(tenant.index().checked_sub(1).map_or(0, |at| self.ids[at].load(Relaxed)))
    }

    fn lock(&self) -> MutexGuard<'_, ()> {
        self.changes.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Sets the limits of a tenant in blocks, in a pool of `total` beside its reserve; adds it if it
    /// is new. The quota is not below the floor.
    pub fn set(
        &self,
        id: TenantId,
        quota: Option<usize>,
        floor: usize,
        total: usize,
    ) -> Result<Tenant, TenantError> {
        let _changes = self.lock();
        let (found, known) = (self.find(id), self.all().len());
        if found.is_none() && known == TENANTS_MAX {
            return Err(TenantError::TooMany { tenant: id, max: TENANTS_MAX });
        }
        let others = self.floors() - found.map_or(0, |tenant| self.account(tenant).limits().1 as usize);
        // Lowering a floor is never refused, also in a pool that has shrunk.
        let is_raised = found.is_none_or(|tenant| floor as u64 > self.account(tenant).limits().1);
        if is_raised && others.saturating_add(floor) > total {
            return Err(TenantError::Floors { tenant: id, floor, others, total });
        }
        let tenant = found.unwrap_or(Tenant(known as u8 + 1));
        self.account(tenant).set_limits((quota.map_or(u64::MAX, |quota| quota as u64), floor as u64));
        if found.is_none() {
            self.ids[known].store(id.0, Relaxed);
            self.known.store(known + 1, Release);
        }
        Ok(tenant)
    }

    fn account(&self, tenant: Tenant) -> &Account {
        &self.accounts[tenant.index()]
    }

    /// Charges blocks to be allocated for a tenant. The error is by how many they exceed its quota.
    pub(in crate::block) fn charge(&self, tenant: Tenant, blocks: usize) -> Result<(), usize> {
        self.account(tenant).charge(blocks as u64).map_err(|excess| excess as usize)
    }

    /// Like [`charge`](Self::charge); while only charges exceed the quota, not blocks, yields to the
    /// threads that may take them back.
    pub(in crate::block) fn charge_or_yield(&self, tenant: Tenant, blocks: usize) -> Result<(), usize> {
        let account = self.account(tenant);
        for _ in 0..YIELDS {
            let charged = self.charge(tenant, blocks);
            if charged.is_ok() || account.held().saturating_add(blocks as u64) > account.limits().0 {
                return charged;
            }
            yield_now();
        }
        self.charge(tenant, blocks)
    }

    /// Takes back a charge.
    pub(in crate::block) fn uncharge(&self, tenant: Tenant, blocks: usize) {
        self.account(tenant).uncharge(blocks as u64);
    }

    /// Names the tenant of a charged block of the caller.
    pub(in crate::block) fn name(&self, id: BlockId, tenant: Tenant) {
        self.cell(id).store(tenant.0, Relaxed);
    }

    /// Counts charged blocks that name the tenant now.
    pub(in crate::block) fn allocated(&self, tenant: Tenant, blocks: usize) {
        self.account(tenant).allocated(blocks as u64);
    }

    /// Counts a request that exceeds its quota.
    pub(in crate::block) fn refuse(&self, tenant: Tenant, asked: usize) -> AllocError {
        let account = self.account(tenant);
        account.refused.fetch_add(1, Relaxed);
        let (quota, held) = (account.limits().0 as usize, account.charged() as usize);
        AllocError::OverQuota { asked, tenant: self.id(tenant), quota, held }
    }

    /// Returns the sum of all floors in blocks.
    pub(crate) fn floors(&self) -> usize {
        self.all().map(|tenant| self.account(tenant).limits().1 as usize).sum()
    }

    pub(crate) fn holding(&self, tenant: Tenant) -> Holding {
        let account = self.account(tenant);
        let (quota, floor) = account.limits();
        let (held, read) = (account.held(), |counter: &StatisticU64| counter.load(Relaxed));
        Holding {
            held,
            // Read at another moment.
            cached: account.cached().min(held),
            quota: (quota != u64::MAX).then_some(quota),
            floor,
            lookups: read(&account.lookups),
            hits: read(&account.hits),
            evicted: read(&account.evicted),
            protected: read(&account.protected),
            refused: read(&account.refused),
        }
    }

    pub(crate) fn count_lookup(&self, tenant: Tenant, blocks: usize, hits: usize) {
        if tenant != Tenant::NONE {
            self.account(tenant).lookups.fetch_add(blocks as u64, Relaxed);
            self.account(tenant).hits.fetch_add(hits as u64, Relaxed);
        }
    }

    fn cell(&self, id: BlockId) -> &AtomicU8 {
        let (part, at) = self.of.locate(id.index());
        &part.0[at]
    }

    /// Returns the tenant of a block.
    #[inline]
    pub(crate) fn of(&self, id: BlockId) -> Tenant {
        // Relaxed: the word publishes it.
        Tenant(self.cell(id).load(Relaxed))
    }

    /// Returns how many blocks of a tenant may be evicted now for another, if so many are cached.
    pub(crate) fn room(&self, of: Tenant, by: Tenant) -> usize {
        if of == by || of == Tenant::NONE {
            return usize::MAX;
        }
        self.account(of).beyond_floor() as usize
    }

    /// Returns whether all of these tenants are at their floors, and none of them is the one that asks.
    pub(in crate::block) fn protects(&self, of: TenantSet, by: Tenant) -> bool {
        self.all().filter(|tenant| of.has(tenant.index())).all(|of| of != by && self.room(of, by) == 0)
    }

    /// Returns how many cached blocks an eviction for a tenant must leave, and how many it may take.
    pub(crate) fn protected(&self, by: Tenant) -> (usize, usize) {
        let (mut protected, mut others) = (0, self.account(Tenant::NONE).cached() as usize);
        for of in self.all() {
            let (cached, room) = (self.account(of).cached() as usize, self.room(of, by));
            others += cached.min(room);
            // Without a floor, the counts may be of two moments.
            if self.account(of).is_floored() {
                protected += cached.saturating_sub(room);
            }
        }
        (protected, others)
    }

    /// Returns how many blocks a request of a tenant cannot get while it keeps `kept`: these, and those
    /// of other tenants that their floors protect, cached or owned.
    pub(in crate::block) fn kept_from(&self, by: Tenant, kept: impl IntoIterator<Item = BlockId>) -> usize {
        let mut least = [0; TENANTS_MAX + 1];
        kept.into_iter().for_each(|id| least[self.of(id).index()] += 1);
        for of in self.all().filter(|&of| of != by) {
            let account = self.account(of);
            let least = &mut least[of.index()];
            *least = account.held().min(account.limits().1).max(*least);
        }
        least.iter().sum::<u64>() as usize
    }

    /// Counts an eviction for a tenant for those whose floors it respects.
    pub(in crate::block) fn count_passed_over(&self, by: Tenant) {
        for of in self.all().filter(|&of| of != by) {
            let account = self.account(of);
            if account.is_floored() && account.cached() > 0 && account.beyond_floor() == 0 {
                account.protected.fetch_add(1, Relaxed);
            }
        }
    }

    /// Runs `exchange`, which evicts a block if its word has not changed. Returns whether it did;
    /// `None` if the block is protected.
    pub(in crate::block) fn evict(
        &self,
        id: BlockId,
        by: EvictedFor,
        exchange: impl FnOnce() -> bool,
    ) -> Option<bool> {
        let of = self.of(id);
        let by_others = match by {
            EvictedFor::Tenant(tenant) => of != tenant && of != Tenant::NONE,
            EvictedFor::Caller => false,
        };
        if by_others && !self.account(of).begin_eviction() {
            return None;
        }
        let is_evicted = exchange();
        // Ours until its frame is freed.
        let now = if is_evicted { Tenant(self.cell(id).swap(0, Relaxed)) } else { Tenant::NONE };
        if by_others && now == of {
            self.account(of).end_eviction();
        } else {
            if by_others {
                self.account(of).cancel_eviction();
            }
            if now != Tenant::NONE {
                self.account(now).freed();
            }
        }
        if is_evicted {
            self.account(now).took_cached();
            self.account(now).evicted.fetch_add(1, Relaxed);
        }
        Some(is_evicted)
    }

    /// Counts a freed block out, whose frame is the caller's.
    #[cold]
    pub(in crate::block) fn freed(&self, id: BlockId) {
        let tenant = Tenant(self.cell(id).swap(0, Relaxed));
        if tenant != Tenant::NONE {
            self.account(tenant).freed();
        }
    }

    /// Counts a block that became evictable; `tenant` was its tenant before.
    pub(in crate::block) fn kept(&self, tenant: Tenant) {
        self.account(tenant).kept_one();
    }

    /// Counts a hit of an evictable block, on which the caller has a reference now.
    pub(in crate::block) fn took_cached(&self, id: BlockId) {
        self.account(self.of(id)).took_cached();
    }

    /// Compares the accounts with the blocks that name each tenant: all, and evictable ones. Returns
    /// the first tenant that differs, and what it holds, was charged for and has cached.
    pub(in crate::block) fn audit(&self, found: &[(u64, u64)]) -> Option<(Tenant, [u64; 3])> {
        self.all().find_map(|tenant| {
            let (account, (held, cached)) = (self.account(tenant), found[tenant.index()]);
            let is_right = account.is_settled() && account.held() == held && account.cached() == cached;
            (!is_right).then(|| (tenant, [account.held(), account.charged(), account.cached()]))
        })
    }
}
