//! What one tenant holds, and its limits: counts of blocks.
//!
//! | word | meaning |
//! |---|---|
//! | `kept`, bits 0..32 | blocks that name the tenant: owned or cached |
//! | `kept`, bits 32..64 | of these, blocks that others are about to evict |
//! | `charged` | `held`, and the blocks of allocations in progress |
//! | `cached` | of `held`, blocks without an owner: an estimate while threads are inside calls |
//!
//! # Theorem
//!
//! `held - going` is the least number of blocks that is left, whatever evictions in progress do. An
//! eviction for others is counted in `going` before it happens, by a read-modify-write that finds
//! `held - going > floor`; blocks are counted in `held` after they name the tenant. So no eviction
//! for others leaves fewer than `floor` blocks, at no moment. Only the tenant's own frees and
//! evictions do.
//!
//! `charged` is raised before blocks are allocated, by a read-modify-write that finds it within the
//! quota, and lowered after they are gone: `held <= charged <= quota`, unless the quota was lowered.
//!
//! Relaxed throughout: each claim is about the order of changes of one word.

use crate::sync::{AtomicU64, Ordering::*, StatisticU64};

const GOING_SHIFT: u32 = 32;
const HELD_MASK: u64 = (1 << GOING_SHIFT) - 1;
const ONE_GOING: u64 = 1 << GOING_SHIFT;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Kept(u64);

impl Kept {
    fn held(self) -> u64 {
        self.0 & HELD_MASK
    }

    /// Returns how many more blocks others may evict.
    fn beyond(self, floor: u64) -> u64 {
        self.held().saturating_sub(self.0 >> GOING_SHIFT).saturating_sub(floor)
    }

    /// Counts an eviction for others that begins; `None` if it could leave less than the floor.
    fn begin_eviction(self, floor: u64) -> Option<Self> {
        (self.beyond(floor) > 0).then_some(Self(self.0 + ONE_GOING))
    }
}

#[derive(Default)]
pub(super) struct Account {
    kept: AtomicU64,
    charged: AtomicU64,
    cached: AtomicU64,
    /// `u64::MAX`: none.
    quota: AtomicU64,
    floor: AtomicU64,
    pub(super) evicted: StatisticU64,
    pub(super) protected: StatisticU64,
    pub(super) refused: StatisticU64,
    pub(super) lookups: StatisticU64,
    pub(super) hits: StatisticU64,
}

impl Account {
    pub(super) fn limits(&self) -> (u64, u64) {
        (self.quota.load(Relaxed), self.floor.load(Relaxed))
    }

    pub(super) fn set_limits(&self, (quota, floor): (u64, u64)) {
        self.quota.store(quota, Relaxed);
        self.floor.store(floor, Relaxed);
    }

    fn kept(&self) -> Kept {
        Kept(self.kept.load(Relaxed))
    }

    pub(super) fn held(&self) -> u64 {
        self.kept().held()
    }

    pub(super) fn is_settled(&self) -> bool {
        self.kept().0 == self.charged()
    }

    pub(super) fn charged(&self) -> u64 {
        self.charged.load(Relaxed)
    }

    pub(super) fn cached(&self) -> u64 {
        // A hit may be counted before the release that made it possible.
        (self.cached.load(Relaxed) as i64).max(0) as u64
    }

    pub(super) fn is_floored(&self) -> bool {
        self.floor.load(Relaxed) > 0
    }

    /// Returns how many blocks others may evict now, if so many are cached.
    pub(super) fn beyond_floor(&self) -> u64 {
        self.kept().beyond(self.floor.load(Relaxed))
    }

    /// Charges blocks to be allocated. The error is by how many they exceed the quota.
    pub(super) fn charge(&self, blocks: u64) -> Result<(), u64> {
        let quota = self.quota.load(Relaxed);
        let within = |charged: u64| (charged + blocks <= quota).then_some(charged + blocks);
        let charged = self.charged.fetch_update(Relaxed, Relaxed, within);
        charged.map(|_| ()).map_err(|charged| charged + blocks - quota)
    }

    pub(super) fn uncharge(&self, blocks: u64) {
        self.charged.fetch_sub(blocks, Relaxed);
    }

    /// Counts charged blocks that name the tenant now.
    pub(super) fn allocated(&self, blocks: u64) {
        self.kept.fetch_add(blocks, Relaxed);
    }

    /// Counts out a block that its owner freed, or that was evicted for the tenant itself.
    pub(super) fn freed(&self) {
        self.kept.fetch_sub(1, Relaxed);
        self.uncharge(1);
    }

    pub(super) fn begin_eviction(&self) -> bool {
        let floor = self.floor.load(Relaxed);
        let begin = |kept| Kept(kept).begin_eviction(floor).map(|kept| kept.0);
        self.kept.fetch_update(Relaxed, Relaxed, begin).is_ok()
    }

    pub(super) fn cancel_eviction(&self) {
        self.kept.fetch_sub(ONE_GOING, Relaxed);
    }

    pub(super) fn end_eviction(&self) {
        self.kept.fetch_sub(ONE_GOING + 1, Relaxed);
        self.uncharge(1);
    }

    pub(super) fn kept_one(&self) {
        self.cached.fetch_add(1, Relaxed);
    }

    pub(super) fn took_cached(&self) {
        self.cached.fetch_sub(1, Relaxed);
    }
}

#[cfg(all(test, not(kvpool_loom)))]
mod tests {
    use super::*;

    fn account(quota: u64, floor: u64) -> Account {
        let account = Account::default();
        account.set_limits((quota, floor));
        account
    }

    #[test]
    fn evictions_for_others_end_at_the_floor() {
        let account = account(u64::MAX, 3);
        account.charge(5).unwrap();
        assert_eq!((account.beyond_floor(), account.begin_eviction()), (0, false), "not allocated yet");
        account.allocated(5);
        assert!(account.begin_eviction() && account.begin_eviction() && !account.begin_eviction());
        account.cancel_eviction();
        assert!(account.begin_eviction() && !account.is_settled());
        account.end_eviction();
        account.end_eviction();
        assert_eq!((account.held(), account.charged(), account.beyond_floor()), (3, 3, 0));
        account.freed();
        assert_eq!((account.held(), account.beyond_floor(), account.is_settled()), (2, 0, true));
    }

    #[test]
    fn a_charge_is_within_the_quota() {
        let account = account(4, 0);
        assert_eq!((account.charge(5), account.charge(3), account.charge(2)), (Err(1), Ok(()), Err(1)));
        account.uncharge(3);
        assert_eq!(account.charge(4), Ok(()));
        account.set_limits((1, 0));
        assert_eq!(account.charge(1), Err(4));
    }
}
