//! The time of evictions beside protected blocks.

use std::time::{Duration, Instant};

use super::*;

/// Returns the time per block of 64 evictions, the least of some, with `protected` of the oldest
/// 50,000 blocks protected.
fn eviction(protected: usize) -> Duration {
    let pool = pool(60_100, &[(A, limits(None, protected)), (B, limits(None, 0))]);
    run(&pool, 1, 50_000, A);
    let rounds = (0..20).map(|round| {
        run(&pool, 2 + round, 9_000, B);
        drop(evict(&pool, 0));
        let leased = pool.allocate(AllocRequest::new(pool.free_blocks())).unwrap();
        let began = Instant::now();
        let evicted: Vec<_> = (0..64).map(|_| pool.allocate(AllocRequest::new(1)).unwrap()).collect();
        let took = began.elapsed();
        drop((leased, evicted));
        took / 64
    });
    let least = rounds.min().unwrap();
    pool.audit().unwrap();
    least
}

/// Protected blocks are not looked at: a walk over them would take a thousand times as long.
#[test]
fn evictions_beside_protected_blocks_take_no_longer() {
    let (alone, beside) = (eviction(0), eviction(50_000));
    println!("none protected: {alone:?} per block; the oldest 50,000: {beside:?}");
    assert!(beside < alone * 10, "{beside:?} beside protected blocks, {alone:?} without");
}
