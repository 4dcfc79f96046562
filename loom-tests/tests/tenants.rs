//! Theorems: whatever threads do at once, evictions for others leave a tenant as many blocks as its
//! floor, and an allocation never takes it beyond its quota. An eviction that is cancelled leaves
//! room for the next, and a request that is refused because of a floor is refused no longer than the
//! tenant is at it. At the end each account is that of a recount: the audit in `finish` compares
//! the blocks that name each tenant with what it holds, was charged for, and has cached.
//!
//! Up to 2 preemptions, or 3 where one thread only frees a block; one less with
//! `KVPOOL_LOOM_QUICK`. The accounts use Relaxed operations only, which loom reorders as far as the
//! order of changes of each word allows.
#![cfg(kvpool_loom)]

use kvpool_loom_tests::{CachedBlocks, check_wide, join_last};
use loom::thread;

/// Two evictions against one block beyond the floor.
#[test]
fn two_evictions_against_one_floor() {
    check_wide(2, "tenants::two_evictions_against_one_floor", || {
        let pool = CachedBlocks::with_tenants(2, &[(None, 1)]);
        pool.keep_for(0, 1);
        pool.keep_for(0, 2);
        let other = pool.clone();
        let thread = thread::spawn(move || other.evict());
        let mine = pool.evict();
        assert!(pool.holds(0).0 >= 1, "at no moment");
        let theirs = join_last(thread);
        assert_eq!(pool.holds(0), (1, 1), "{mine} {theirs}");
        pool.finish_tenants(1);
    });
}

/// A hit takes the block that an eviction is about to take: the room is given back.
#[test]
fn a_hit_cancels_an_eviction() {
    check_wide(2, "tenants::a_hit_cancels_an_eviction", || {
        let pool = CachedBlocks::with_tenants(2, &[(None, 1)]);
        pool.keep_for(0, 1);
        pool.keep_for(0, 2);
        let other = pool.clone();
        let thread = thread::spawn(move || other.evict());
        if let Some(found) = pool.hit(1) {
            pool.leave(found);
        }
        let was_evicted = join_last(thread);
        assert_eq!(pool.holds(0).0, 2 - u64::from(was_evicted));
        assert!(was_evicted || pool.evict(), "there is room for one");
        assert!(!pool.evict());
        assert_eq!(pool.holds(0), (1, 1));
        pool.finish_tenants(1);
    });
}

/// The owner frees a block while another thread evicts: the tenant itself may go below its floor.
#[test]
fn an_eviction_against_a_free() {
    check_wide(3, "tenants::an_eviction_against_a_free", || {
        let pool = CachedBlocks::with_tenants(2, &[(None, 1)]);
        let owned = pool.take_for(0).unwrap();
        pool.keep_for(0, 1);
        let other = pool.clone();
        let thread = thread::spawn(move || other.evict());
        pool.leave(owned);
        let was_evicted = u64::from(join_last(thread));
        assert_eq!(pool.holds(0), (1 - was_evicted, 1 - was_evicted));
        pool.finish_tenants(1);
    });
}

/// Two allocations, of which one needs the tenant's cached block.
#[test]
fn two_allocations_against_one_quota() {
    check_wide(2, "tenants::two_allocations_against_one_quota", || {
        let pool = CachedBlocks::with_tenants(4, &[(Some(2), 0)]);
        pool.keep_for(0, 1);
        let other = pool.clone();
        let thread = thread::spawn(move || other.take_for(0));
        let mine = pool.take_for(0);
        assert!(pool.holds(0).0 <= 2);
        let taken = [mine, thread.join().unwrap()];
        assert_eq!(pool.holds(0), (2, 0));
        taken.into_iter().for_each(|id| pool.leave(id.expect("the cached block makes room")));
        assert_eq!(pool.take_for(0).map(|id| pool.leave(id)), Some(()));
        pool.finish_tenants(1);
    });
}

/// One block is protected, and a batch sees the other, while the tenant grows beyond its floor: what a
/// request found before holds no longer.
#[test]
fn a_tenant_grows_beside_a_refusal() {
    check_wide(2, "tenants::a_tenant_grows_beside_a_refusal", || {
        let pool = CachedBlocks::with_tenants(3, &[(None, 1)]);
        pool.keep_for(0, 1);
        let batch = pool.blocks.clock().begin();
        pool.keep(2);
        let other = pool.clone();
        let thread = thread::spawn(move || other.take_for(0));
        let early = pool.take(1).or_else(|| pool.take(1));
        let grown = thread.join().unwrap();
        let taken = early.or_else(|| pool.take(1)).expect("the tenant is beyond its floor");
        pool.blocks.end_batch(batch);
        pool.put(&taken);
        grown.into_iter().for_each(|id| pool.leave(id));
        pool.finish_tenants(1);
    });
}

/// A protected block is released and hit again while another one, of no tenant, is evicted: it seems to
/// be protected, and not to be evictable, and must not hide the other.
#[test]
fn a_release_and_a_hit_hide_no_other_block() {
    check_wide(3, "tenants::a_release_and_a_hit_hide_no_other_block", || {
        let pool = CachedBlocks::with_tenants(2, &[(None, 1)]);
        let owned = pool.take_for(0).unwrap();
        pool.register(owned, 1);
        pool.keep(2);
        let other = pool.clone();
        let thread = thread::spawn(move || {
            other.leave(owned);
            other.hit(1)
        });
        assert!(pool.evict(), "hidden");
        thread.join().unwrap().into_iter().for_each(|id| pool.leave(id));
        assert_eq!(pool.holds(0), (1, 1));
        pool.finish_tenants(1);
    });
}

/// A block goes from one tenant to another while it is looked up.
#[test]
fn a_block_changes_its_tenant() {
    check_wide(2, "tenants::a_block_changes_its_tenant", || {
        let pool = CachedBlocks::with_tenants(1, &[(None, 0), (None, 0)]);
        pool.keep_for(0, 1);
        let other = pool.clone();
        let thread = thread::spawn(move || {
            other.take_for(1).map(|id| {
                other.register(id, 2);
                other.leave(id);
            })
        });
        let found = pool.hit(1);
        let has_changed = u64::from(thread.join().unwrap().is_some());
        if let Some(found) = found {
            assert_eq!((pool.read(found), has_changed), (1, 0));
            pool.leave(found);
        }
        assert_eq!((pool.holds(0).0, pool.holds(1).0), (1 - has_changed, has_changed));
        pool.finish_tenants(2);
    });
}
