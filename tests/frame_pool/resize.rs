//! Shrinking and growing under a frame pool, and its metrics.

use kvpool::{AllocError, AllocRequest, FrameError, FrameId, FrameShrinkError, GrowError, ShrinkError};

use super::{allocate, cache, key, pool};

#[test]
fn a_shrink_names_the_frames_in_use() {
    let pool = pool(16);
    let all = allocate(&pool, 16);
    pool.register(&[(16, key(&pool, 1))]).unwrap();
    let kept = [3, 12, 14];
    let rest: Vec<u32> = all.iter().copied().filter(|frame| !kept.contains(frame)).collect();
    pool.free(&rest).unwrap();
    let in_use = FrameShrinkError::InUse { frames: vec![FrameId(12), FrameId(14)] };
    assert_eq!(pool.shrink(8), Err(in_use.clone()));
    assert_eq!(in_use.to_string(), "2 frames to be removed are in use, first 12, 14");
    assert_eq!(pool.cached(key(&pool, 1)), Ok(Some(16)), "a refusal evicts nothing");
    assert_eq!((pool.frames(), pool.available()), (17, 13));

    // While a shrink is open, allocations avoid its frames, and lookups find them.
    let shrink = pool.begin_shrink(8).unwrap();
    assert_eq!(pool.begin_shrink(4).unwrap_err(), ShrinkError::Busy);
    assert_eq!(pool.grow(1), Err(GrowError::Busy));
    assert_eq!(shrink.in_use(), [FrameId(12), FrameId(14)]);
    let below = allocate(&pool, 7);
    assert!(below.iter().all(|&frame| frame <= 8));
    let mut hits = Vec::new();
    assert_eq!(pool.hit(&[key(&pool, 1)], &mut hits), Ok(1));
    assert_eq!(shrink.in_use().len(), 3);
    pool.free(&hits).unwrap();
    pool.free(&[12, 14]).unwrap();
    let batch = pool.begin_batch();
    shrink.finish().unwrap();
    drop(batch);
    assert_eq!((pool.frames(), pool.cached(key(&pool, 1))), (9, Ok(None)));

    // The frames are gone.
    let gone = FrameError::OutOfRange { index: 0, frame: FrameId(12), frames: 9 };
    assert_eq!(pool.free(&[12]), Err(gone));
    assert_eq!(pool.claim(&[12]), Err(gone));
    assert_eq!(pool.share(&[12]), Err(gone));
    assert_eq!(pool.register(&[(12, key(&pool, 2))]), Err(gone));
    let mut out = Vec::new();
    assert_eq!(
        pool.allocate(AllocRequest::new(9), &mut out),
        Err(AllocError::TooLarge { asked: 9, total: 8 })
    );
    assert_eq!(pool.audit().unwrap().owned, 8);
    pool.grow(8).unwrap();
    pool.claim(&[12]).unwrap();
    assert_eq!((pool.frames(), pool.audit().unwrap().owned), (17, 9));
    assert_eq!(pool.grow(1), Err(GrowError::TooLarge { asked: 1, total: 16, max: 16 }));
}

#[test]
fn retired_frames_and_open_moves_hold_up_a_shrink() {
    let pool = pool(16);
    let cached = cache(&pool, &(0..16).collect::<Vec<_>>());
    pool.uncache(&cached[..8]).unwrap();
    let shrink = pool.begin_shrink(8).unwrap();
    let region = shrink.region();
    let inside = cached[8..].iter().filter(|&&frame| frame >= region.start.0).count();
    let moves = shrink.propose_moves(16);
    assert_eq!(moves.len(), inside);
    assert_eq!(shrink.finish(), Err(FrameShrinkError::NotFree { frames: inside }));
    assert_eq!(pool.frames(), 17);
    assert_eq!(moves.commit().moved.len(), inside);
    for &content in &[8, 15] {
        assert!(pool.cached(key(&pool, content)).unwrap().is_some_and(|frame| frame < region.start.0));
    }
    let above = allocate(&pool, 8);
    let batch = pool.begin_batch();
    pool.free(&above).unwrap();
    let retired = above.iter().filter(|&&frame| frame >= region.start.0).count();
    assert!(retired > 0);
    assert_eq!(pool.shrink(8), Err(FrameShrinkError::NotFree { frames: retired }));
    drop(batch);
    pool.shrink(8).unwrap();
    assert_eq!(pool.cache_stats().evicted_blocks, 8, "those that were uncached");
    for content in 8..16 {
        assert!(pool.cached(key(&pool, content)).unwrap().is_some());
    }
    pool.audit().unwrap();
    assert_eq!(pool.shrink(8), Err(ShrinkError::NotSmaller { asked: 8, total: 8 }.into()));
    assert_eq!(pool.shrink(0), Err(ShrinkError::TooFew { asked: 0, min: 1 }.into()));
}

#[test]
fn every_allocation_and_lookup_counts() {
    let pool = pool(100);
    let (mut requests, mut blocks) = (0, 0);
    let mut expect = |pool: &kvpool::FramePool, count: u64, what: &str| {
        (requests, blocks) = (requests + u64::from(count > 0), blocks + count);
        let metrics = pool.metrics();
        assert_eq!((metrics.allocations.requests, metrics.allocations.blocks), (requests, blocks), "{what}");
    };
    for count in [1, 3, 16, 17, 64] {
        pool.free(&allocate(&pool, count)).unwrap();
        expect(&pool, count as u64, "frames");
        let mut runs = Vec::new();
        pool.allocate_runs(AllocRequest::new(count), &mut runs).unwrap();
        expect(&pool, count as u64, "runs");
        pool.free(&runs.iter().flat_map(|run| run.start.0..run.end()).collect::<Vec<_>>()).unwrap();
    }
    pool.claim(&[7, 9]).unwrap();
    expect(&pool, 2, "a claim");
    pool.claim(&[]).unwrap();
    assert!(pool.claim(&[7]).is_err());
    expect(&pool, 0, "an empty claim, and a refused one");
    let (mut out, mut runs) = (Vec::new(), Vec::new());
    for wrong in [0, 99, 101] {
        assert!(pool.allocate(AllocRequest::new(wrong), &mut out).is_err());
        assert!(pool.allocate_runs(AllocRequest::new(wrong), &mut runs).is_err());
    }
    assert!(pool.allocate(AllocRequest::new(98).contiguous(), &mut out).is_err());
    let refusals = pool.metrics().refusals;
    assert_eq!((refusals.invalid, refusals.exhausted, refusals.too_large, refusals.no_run), (2, 2, 2, 1));
    expect(&pool, 0, "refusals");

    pool.register(&[(7, key(&pool, 1)), (9, key(&pool, 2)), (9, key(&pool, 3))]).unwrap();
    pool.hit(&[key(&pool, 1), key(&pool, 3), key(&pool, 4)], &mut out).unwrap();
    let mut known = Vec::new();
    assert_eq!(pool.cached_prefix(&[key(&pool, 3), key(&pool, 1), key(&pool, 4)], &mut known), Ok(2));
    assert_eq!((known, &out[..]), (vec![9, 7], &[7, 9][..]));
    let metrics = pool.metrics();
    assert_eq!((metrics.query_tokens, metrics.hit_tokens, metrics.prefix.lookups), (3, 2, 1));
    pool.free(&[7, 9, 7]).unwrap();
    // Hashes that are taken from an owned frame are no eviction.
    assert_eq!(pool.uncache(&[9]), Ok(1));
    assert_eq!(pool.metrics().evictions.total(), 0);
    pool.free_evict_first(&[9]).unwrap();
    let all = allocate(&pool, 100);
    expect(&pool, 100, "a full pool");
    let evictions = pool.metrics().evictions;
    assert_eq!((evictions.by_queue, evictions.evict_first, evictions.out_of_order), (vec![1], 0, 0));
    pool.register(&[(all[5], key(&pool, 5))]).unwrap();
    pool.free_evict_first(&all).unwrap();
    allocate(&pool, 100);
    assert_eq!(pool.metrics().evictions.evict_first, 1);
}
