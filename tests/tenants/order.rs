//! What is evicted or copied for others: in the order of all, for runs, and before a refusal.

use std::time::Instant;

use kvpool::prefix::HashKey;
use pollster::block_on;

use super::*;

#[test]
fn a_run_evicts_nothing_of_a_tenant_that_could_not_give_all_of_it() {
    let pool = pool(40, &[(A, limits(None, 10)), (B, limits(None, 0))]);
    run(&pool, 1, 16, A);
    let rest = pool.allocate(AllocRequest::new(pool.free_blocks())).unwrap();
    for _ in 0..3 {
        let error = pool.allocate(AllocRequest::new(8).contiguous()).unwrap_err();
        assert_eq!(holds(&pool, A), (16, 16), "{error}");
    }
    // The same tenant may have more.
    let six = pool.allocate(AllocRequest::new(6).contiguous()).unwrap();
    assert_eq!(holds(&pool, A), (10, 10));
    drop((six, rest));
    // Beside others it gives its part.
    let pool = self::pool(40, &[(A, limits(None, 10)), (B, limits(None, 0))]);
    run(&pool, 1, 16, A);
    run(&pool, 2, 8, B);
    let rest = pool.allocate(AllocRequest::new(pool.free_blocks())).unwrap();
    let run = pool.allocate(AllocRequest::new(8).contiguous()).unwrap();
    assert_eq!((holds(&pool, A), holds(&pool, B)), ((16, 16), (0, 0)));
    drop((run, rest));
    pool.audit().unwrap();
}

#[test]
fn an_offload_takes_the_oldest_blocks_of_all() {
    let cache = || PrefixConfig::new().tolerance(0.0).key(HashKey::from_bytes([7; 32]));
    let tenants = [(A, limits(None, 0)), (B, limits(None, 0))];
    let (here, there) = (builder(100, cache()).tenants(tenants), builder(100, cache()));
    let (here, there) = (here.build().unwrap(), there.build().unwrap());
    for (number, tenant) in [(1, Some(B)), (2, Some(A)), (3, None), (4, Some(B)), (5, Some(A))] {
        run(&here, number, 10, tenant);
    }
    for (blocks, left) in
        [(15, [0, 5, 10, 10, 10]), (15, [0, 0, 0, 10, 10]), (15, [0, 0, 0, 0, 5]), (9, [0; 5])]
    {
        block_on(here.offload(&there, blocks)).unwrap();
        let kept: Vec<_> = here.cached_blocks().into_iter().map(|(_, hash)| hash).collect();
        let of = |number| {
            let hashes =
                here.prefix_cache().unwrap().hashes(&PrefixKeys::new(), &prompt(number, 10 * BLOCK_TOKENS));
            hashes.unwrap().iter().filter(|hash| kept.contains(hash)).count()
        };
        assert_eq!([1, 2, 3, 4, 5].map(of), left);
    }
    here.audit().unwrap();
}

/// Half of the pool is protected, and a batch sees the rest.
#[test]
fn refusals_beside_protected_blocks_do_not_walk_again() {
    let full = |blocks: usize| {
        let pool = pool(2 * blocks + 10, &[(A, limits(None, blocks)), (B, limits(None, 0))]);
        run(&pool, 1, blocks, A);
        pool
    };
    let refuse = |pool: &Pool| {
        let began = Instant::now();
        pool.allocate(AllocRequest::new(1)).unwrap_err();
        began.elapsed()
    };
    let pool = full(20_000);
    let batch = pool.begin_batch();
    run(&pool, 2, 20_000, B);
    let rest = pool.allocate(AllocRequest::new(pool.free_blocks())).unwrap();
    let first = refuse(&pool);
    let others = (0..100).map(|_| refuse(&pool)).sum();
    println!("a refusal: {first:?}; 100 more: {others:?}");
    assert!(first * 30 > others, "{first:?}, and {others:?} for 100 more");
    // What was found holds no longer.
    run(&pool, 3, 1, A);
    let more = pool.allocate(AllocRequest::new(pool.free_blocks())).unwrap();
    refuse(&pool);
    pool.set_tenant(A, limits(None, 19_000)).unwrap();
    let one = pool.allocate(AllocRequest::new(1)).unwrap();
    // What was evicted ahead of need.
    let ahead = pool.allocate(AllocRequest::new(pool.free_blocks())).ok();
    pool.set_tenant(A, limits(None, 20_000)).unwrap();
    refuse(&pool);
    batch.finish();
    let other = pool.allocate(AllocRequest::new(1)).unwrap();
    drop((one, ahead, other, more, rest));
    pool.audit().unwrap();
}
