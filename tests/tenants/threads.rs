//! Real threads against floors and quotas. Each test ends in an audit.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;

use super::*;

#[test]
fn no_moment_below_the_floor_while_two_threads_evict() {
    for round in 0..20 {
        let pool = pool(200, &[(A, limits(None, 37))]);
        run(&pool, 1, 100 + round, A);
        let is_over = AtomicBool::new(false);
        thread::scope(|scope| {
            let watch = scope.spawn(|| {
                while !is_over.load(Relaxed) {
                    assert!(holds(&pool, A).0 >= 37);
                }
            });
            let evictors: Vec<_> = (0..2)
                .map(|_| {
                    scope.spawn(|| {
                        let mut leases = Vec::new();
                        while let Ok(lease) = pool.allocate(AllocRequest::new(1)) {
                            leases.push(lease);
                        }
                        leases
                    })
                })
                .collect();
            let joined: Vec<_> = evictors.into_iter().map(|evictor| evictor.join()).collect();
            // Before a panic of an evictor: the watch would not end.
            is_over.store(true, Relaxed);
            watch.join().unwrap();
            let leases: Vec<_> = joined.into_iter().map(Result::unwrap).collect();
            assert_eq!(leases.iter().map(Vec::len).sum::<usize>(), 200 - 37);
        });
        assert_eq!(holds(&pool, A), (37, 37));
        pool.audit().unwrap();
    }
}

#[test]
fn tenants_run_hit_and_evict_at_once() {
    const FLOOR: u64 = 40;
    let limits = [(A, limits(None, FLOOR as usize)), (B, limits(90, 0))];
    let pool = builder(300, PrefixConfig::new()).threads(3).tenants(limits).build().unwrap();
    let mut refused = [0; 3];
    // A's floor is in the cache before the others begin.
    run(&pool, 500, FLOOR as usize, A);
    thread::scope(|scope| {
        let worker = |at: u32, tenant: Option<TenantId>| {
            let pool = &pool;
            move || {
                let mut refused = 0;
                for step in 0..1_500 {
                    let number = (step * 7 + at * 3) % 40;
                    let tokens = prompt(number, (1 + number as usize % 30) * BLOCK_TOKENS + 1);
                    let id = u64::from(at) << 32 | u64::from(step);
                    let Ok(mut sequence) = pool.admit(&request(id, &tokens, tenant)) else {
                        refused += 1;
                        continue;
                    };
                    let mut batch = pool.begin_batch();
                    let missing = tokens.len() - sequence.len();
                    batch.append(&mut sequence, Tokens::Announced(missing)).unwrap();
                    batch.finish();
                    if step % 50 == 0 {
                        let cache = pool.prefix_cache().unwrap();
                        pool.uncache(
                            &cache.hashes(&PrefixKeys::new(), &tokens[..8.min(tokens.len())]).unwrap(),
                        );
                    }
                    assert!(info(pool, B).held_bytes <= 90 * block_bytes());
                }
                refused
            }
        };
        let threads =
            [scope.spawn(worker(1, Some(A))), scope.spawn(worker(2, Some(B))), scope.spawn(worker(3, None))];
        refused = threads.map(|thread| thread.join().unwrap());
    });
    assert!(refused.iter().all(|&refused| refused < 1_400), "{refused:?}");
    pool.audit().unwrap();
    // Its own requests may have left A less.
    run(&pool, 501, FLOOR as usize + 5, A);
    let before = holds(&pool, A).0;
    assert!(before > FLOOR, "{before}");
    let others = pool.stats().evictable - FLOOR as usize;
    let lease = pool.allocate(AllocRequest::new(pool.free_blocks() + others)).unwrap();
    assert_eq!(holds(&pool, A), (FLOOR, FLOOR));
    assert!(pool.allocate(AllocRequest::new(1)).is_err());
    drop(lease);
    pool.evict_cached(0);
    assert_eq!(holds(&pool, A), (FLOOR, FLOOR), "others evict down to the floor");
    pool.audit().unwrap();
}

#[test]
fn charges_that_are_taken_back_refuse_no_others() {
    let pool = builder(40, PrefixConfig::new()).threads(2).tenants([(A, limits(20, 0))]).build().unwrap();
    let lease = pool.allocate(AllocRequest::new(30)).unwrap();
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Relaxed) {
                assert!(try_open(&pool, 1, 14, A).is_err(), "10 are free");
            }
        });
        let is_refused = |_: &i32| {
            let opened = try_open(&pool, 2, 7, A).map(drop);
            pool.evict_cached(0);
            matches!(opened, Err(SequenceError::Alloc(AllocError::OverQuota { .. })))
        };
        let refused = (0..2_000).filter(is_refused).count();
        is_over.store(true, Relaxed);
        // Each waits for the other's charges, but not forever; without that, most are refused.
        assert!(refused < 100, "{refused}: it holds none");
    });
    drop(lease);
    pool.audit().unwrap();
}

#[test]
fn blocks_that_become_protected_hide_no_others() {
    let tokens = prompt(1, 20 * BLOCK_TOKENS + 1);
    let tenants = [(A, limits(None, 20)), (B, limits(None, 0))];
    // Without magazines, whose frames a request misses while their owner is stopped inside.
    let builder = builder(23, PrefixConfig::new()).threads(2).magazine_blocks(0);
    let pool = builder.tenants(tenants).build().unwrap();
    run(&pool, 1, 20, A);
    let is_over = AtomicBool::new(false);
    let refused = thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Relaxed) {
                let hit = pool.admit(&request(1, &tokens, Some(A))).unwrap();
                assert_eq!(hit.len(), 20 * BLOCK_TOKENS);
            }
        });
        let refused = (2..2_000).find_map(|number| {
            // One of B's is cached, and one is free.
            let opened = try_open(&pool, number, 1, B).map(drop).err().map(|error| error.to_string());
            opened.or_else(|| pool.allocate(AllocRequest::new(2)).err().map(|error| error.to_string()))
        });
        is_over.store(true, Relaxed);
        refused
    });
    assert_eq!(refused, None);
    assert_eq!(holds(&pool, A), (20, 20));
    pool.audit().unwrap();
}

#[test]
fn runs_among_blocks_that_change_their_tenant() {
    const RUNS: usize = 10_000;
    let tenants = [(A, limits(None, 0)), (B, limits(None, 0))];
    let pool = builder(4_000, PrefixConfig::new()).threads(3).tenants(tenants).build().unwrap();
    let is_over = AtomicBool::new(false);
    let found = thread::scope(|scope| {
        scope.spawn(|| {
            let mut number = 0;
            while !is_over.load(Relaxed) {
                number += 1;
                drop(try_open(&pool, number, 100, [A, B][number as usize % 2]));
            }
        });
        scope.spawn(|| {
            while !is_over.load(Relaxed) {
                drop(pool.allocate(AllocRequest::new(100)));
            }
        });
        let runs = (0..RUNS).map(|_| pool.allocate(AllocRequest::new(256).contiguous()).is_ok());
        let found = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| runs.filter(|&is| is).count()));
        is_over.store(true, Relaxed);
        found
    });
    assert!(found.is_ok_and(|found| found > 0));
    pool.audit().unwrap();
}
