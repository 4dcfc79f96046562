//! Pools whose ids are frames: behaviour, bad input, a naive model, and many threads.

mod bad_input;
mod model;
mod moves;
mod resize;
mod stress;
mod waiting;

use kvpool::compact::{GaveWay, Goal};
use kvpool::prefix::{HashKey, KvEvent};
use kvpool::{AllocRequest, FrameGroup, FrameKey, FramePool, Order, Run};

/// A pool of `frames` frames that evicts exactly in order.
fn pool(frames: usize) -> FramePool {
    let builder = FramePool::builder(frames).magazine_frames(0);
    builder.hash_key(HashKey::from_bytes([5; 32])).build().unwrap()
}

fn key(pool: &FramePool, content: u64) -> FrameKey {
    pool.key(FrameGroup(0), &content.to_le_bytes()).unwrap()
}

fn allocate(pool: &FramePool, frames: usize) -> Vec<u32> {
    let mut out = Vec::new();
    pool.allocate(AllocRequest::new(frames), &mut out).unwrap();
    assert_eq!(out.len(), frames);
    out
}

/// Allocates frames, registers them under these contents, and frees them in this order.
fn cache(pool: &FramePool, contents: &[u64]) -> Vec<u32> {
    let frames = allocate(pool, contents.len());
    let named: Vec<_> = frames.iter().copied().zip(contents.iter().map(|&c| key(pool, c))).collect();
    pool.register(&named).unwrap();
    pool.free(&frames).unwrap();
    frames
}

fn references(pool: &FramePool, frames: &[u32]) -> Vec<u32> {
    let mut out = Vec::new();
    pool.references(frames, &mut out).unwrap();
    out
}

#[test]
fn frames_are_evicted_in_the_order_in_which_they_were_freed() {
    let pool = pool(8);
    let cached = cache(&pool, &[10, 11, 12, 13, 14, 15]);
    // The two free frames come first; then eviction follows the order of the list.
    let free = allocate(&pool, 2);
    assert!(free.iter().all(|frame| !cached.contains(frame)));
    assert_eq!(allocate(&pool, 1), cached[..1]);
    // A share and a free make a frame the newest.
    pool.share(&cached[1..2]).unwrap();
    pool.free(&cached[1..2]).unwrap();
    assert_eq!(allocate(&pool, 1), cached[2..3]);
    // The order of the list counts, not that of the frames.
    pool.share(&[cached[5], cached[4]]).unwrap();
    pool.free(&[cached[5], cached[4]]).unwrap();
    let rest: Vec<u32> = (0..4).flat_map(|_| allocate(&pool, 1)).collect();
    assert_eq!(rest, [cached[3], cached[1], cached[5], cached[4]]);
    assert_eq!(pool.cached(key(&pool, 11)).unwrap(), None);
    assert_eq!(pool.audit().unwrap().owned, 8);
}

#[test]
fn frames_freed_first_out_are_evicted_before_all_others() {
    let pool = pool(8);
    let cached = cache(&pool, &[10, 11, 12, 13, 14, 15, 16, 17]);
    // Each has an older entry in the queue of the others.
    pool.share(&[cached[6], cached[3], cached[1], cached[5]]).unwrap();
    pool.free_first_out(&[cached[6], cached[3]]).unwrap();
    pool.free_first_out(&[cached[1], cached[5]]).unwrap();
    assert_eq!(pool.cached(key(&pool, 13)).unwrap(), Some(cached[3]), "found until it is evicted");
    // The last free decides.
    pool.share(&[cached[3], cached[6]]).unwrap();
    pool.free(&cached[3..4]).unwrap();
    pool.free_first_out(&cached[6..7]).unwrap();
    let evicted: Vec<u32> = (0..8).flat_map(|_| allocate(&pool, 1)).collect();
    assert_eq!(evicted, [1, 5, 6, 0, 2, 4, 7, 3].map(|place: usize| cached[place]));
    // A frame without hashes is free at once, and comes before all cached ones.
    pool.register(&[(evicted[0], key(&pool, 1))]).unwrap();
    pool.free_first_out(&evicted[..1]).unwrap();
    pool.free(&evicted[1..2]).unwrap();
    assert_eq!(allocate(&pool, 2), [evicted[1], evicted[0]]);
    pool.audit().unwrap();
}

/// Frames that a batch may see keep their place, and do not disturb the order of the others.
#[test]
fn frames_freed_first_out_under_a_batch_leave_the_order_of_the_others() {
    let pool = pool(80);
    let recent = allocate(&pool, 40);
    let named: Vec<_> = recent.iter().map(|&frame| (frame, key(&pool, frame.into()))).collect();
    pool.register(&named).unwrap();
    let mut cached = cache(&pool, &(100..140).collect::<Vec<_>>());
    pool.share(&cached).unwrap();
    cached.reverse();
    pool.free(&cached).unwrap();
    let batch = pool.begin_batch();
    // One call for each sequence of the step.
    recent.iter().for_each(|&frame| pool.free_first_out(&[frame]).unwrap());
    let evicted: Vec<u32> = (0..3).flat_map(|_| allocate(&pool, 1)).collect();
    assert_eq!(evicted, cached[..3]);
    drop(batch);
    assert_eq!(allocate(&pool, 40), recent);
    pool.audit().unwrap();
}

#[test]
fn several_keys_name_one_frame_and_several_frames_have_one_key() {
    let pool = pool(16);
    let frames = allocate(&pool, 3);
    let (full, part, other) = (key(&pool, 1), key(&pool, 2), key(&pool, 3));
    pool.register(&[(frames[0], full), (frames[0], part), (frames[1], full), (frames[2], other)]).unwrap();
    pool.register(&[(frames[0], part)]).unwrap(); // Again: no effect.
    assert_eq!(pool.hashes(frames[0]).unwrap().len(), 2);
    assert_eq!(pool.cached(part).unwrap(), Some(frames[0]));
    // The same hash in another group is another key.
    let elsewhere = pool.key(FrameGroup(1), &1_u64.to_le_bytes()).unwrap();
    assert_eq!(pool.cached(elsewhere).unwrap(), None);

    assert_eq!(pool.uncache(&frames[..1]).unwrap(), 1);
    assert_eq!((pool.cached(full).unwrap(), pool.cached(part).unwrap()), (Some(frames[1]), None));
    assert_eq!(references(&pool, &frames), [1, 1, 1], "uncached, and still owned");
    assert!(pool.is_writable(frames[0]).unwrap() && !pool.is_writable(frames[1]).unwrap());

    // Its first key is taken away, and comes back.
    pool.register(&[(frames[2], part), (frames[2], full)]).unwrap();
    assert_eq!(pool.unregister(other).unwrap(), 1);
    assert_eq!((pool.cached(other).unwrap(), pool.cached(part).unwrap()), (None, Some(frames[2])));
    pool.register(&[(frames[2], other)]).unwrap();
    assert_eq!(pool.hashes(frames[2]).unwrap().len(), 3);
    assert_eq!(pool.unregister(full).unwrap(), 2, "of two frames");
    assert!(pool.is_writable(frames[1]).unwrap(), "it had no other key");
    pool.free(&frames).unwrap();
    assert_eq!(pool.audit().unwrap().evictable, 1);
    // The eviction takes all keys.
    allocate(&pool, 16);
    assert_eq!((pool.cached(other).unwrap(), pool.cached(part).unwrap()), (None, None));
    pool.audit().unwrap();
}

#[test]
fn keys_move_to_a_copy() {
    let pool = pool(8);
    let frames = allocate(&pool, 2);
    let keys = [key(&pool, 1), key(&pool, 2)];
    pool.register(&[(frames[0], keys[0]), (frames[0], keys[1])]).unwrap();
    assert_eq!(pool.move_keys(frames[0], frames[1]).unwrap(), 2);
    assert_eq!(keys.map(|key| pool.cached(key).unwrap()), [Some(frames[1]); 2]);
    assert_eq!(pool.hashes(frames[0]).unwrap(), []);
    pool.free(&frames).unwrap();
    assert_eq!((pool.counts().evictable, pool.audit().unwrap().owned), (1, 0));
}

#[test]
fn hits_take_references_on_the_leading_known_keys() {
    let pool = pool(8);
    let frames = cache(&pool, &[1, 2, 3]);
    let keys = [1, 2, 9, 3].map(|content| key(&pool, content));
    let mut hits = Vec::new();
    assert_eq!(pool.hit(&keys, &mut hits).unwrap(), 2);
    assert_eq!((&hits[..], references(&pool, &frames)), (&frames[..2], vec![1, 1, 0]));
    let mut info = Vec::new();
    pool.info(&frames, &mut info).unwrap();
    assert_eq!(
        info.iter().map(|info| (info.references, info.hashes)).collect::<Vec<_>>(),
        [(1, 1), (1, 1), (0, 1)]
    );
    assert_eq!(pool.uncache(&frames).unwrap(), 3);
    assert_eq!(pool.counts().free(), 6, "the third one is free");
    pool.free(&hits).unwrap();
    assert_eq!(pool.counts().free(), 8);
    pool.audit().unwrap();
}

#[test]
fn the_cache_is_cleared_only_while_nothing_is_in_use() {
    let pool = pool(8);
    let frames = cache(&pool, &[1, 2]);
    pool.share(&frames[..1]).unwrap();
    assert_eq!(pool.clear_idle().unwrap_err().to_string(), "1 frames are in use");
    assert_eq!(pool.cached(key(&pool, 2)).unwrap(), Some(frames[1]));
    pool.free(&frames[..1]).unwrap();
    assert_eq!(pool.clear_idle(), Ok(2));
    assert_eq!((pool.cached(key(&pool, 1)).unwrap(), pool.counts().free()), (None, 8));
}

#[test]
fn allocation_prefers_runs_and_reports_them() {
    let pool = pool(255);
    let mut runs = Vec::new();
    pool.allocate_runs(AllocRequest::new(100), &mut runs).unwrap();
    assert_eq!((runs.len(), runs[0].len), (1, 100));
    let taken: Vec<u32> = runs[0].frames().map(|frame| frame.0).collect();
    allocate(&pool, 155);
    // Holes of one frame, and one run of ten.
    let holes: Vec<u32> = taken.iter().copied().step_by(2).collect();
    pool.free(&holes[..20]).unwrap();
    pool.free(&taken[80..90]).unwrap();
    runs.clear();
    pool.allocate_runs(AllocRequest::new(10), &mut runs).unwrap();
    assert_eq!(runs, [Run { start: kvpool::FrameId(taken[80]), len: 10 }]);
    // No run: what there is.
    runs.clear();
    pool.allocate_runs(AllocRequest::new(20), &mut runs).unwrap();
    assert_eq!((runs.len(), runs.iter().map(|run| run.len).sum::<u32>()), (20, 20));
    pool.allocate_runs(AllocRequest::new(1), &mut runs).unwrap_err();
    assert_eq!(runs.len(), 20);
    pool.audit().unwrap();
}

#[test]
fn frames_are_claimed_by_name() {
    let pool = FramePool::builder(300).build().unwrap();
    // Frames in this thread's magazine, cached ones, and free ones.
    let freed = allocate(&pool, 5);
    pool.free(&freed).unwrap();
    let cached = cache(&pool, &[1, 2]);
    let named = [freed[4], cached[0], 299, 77];
    pool.claim(&named).unwrap();
    assert_eq!(references(&pool, &named), [1; 4]);
    let known = [1, 2].map(|content| pool.cached(key(&pool, content)).unwrap());
    assert_eq!(known, [None, Some(cached[1])], "a claimed frame was evicted");
    pool.free(&named).unwrap();
    assert_eq!(pool.audit().unwrap().owned, 0);
}

#[test]
fn only_frames_without_references_move() {
    let pool = pool(128);
    let frames = allocate(&pool, 128);
    let scattered: Vec<u32> = frames.iter().copied().filter(|frame| frame % 4 == 1).collect();
    for &frame in &scattered {
        pool.register(&[(frame, key(&pool, frame.into()))]).unwrap();
    }
    let kept = [scattered[3], scattered[20]];
    pool.share(&kept).unwrap();
    pool.free(&frames).unwrap();
    let moves = pool.propose_moves(Goal::Fragmentation { order: Order(4) }, 1_000);
    let pairs: Vec<_> = moves.pairs().collect();
    assert!(pairs.len() > 10 && pairs.iter().all(|(from, _)| !kept.contains(from)), "{pairs:?}");
    assert_eq!(pool.counts().held, pairs.len(), "the destinations");
    // One is hit during the copy, one is uncached.
    let mut hits = Vec::new();
    let (hit, gone) = (pairs[0], pairs[1]);
    pool.hit(&[key(&pool, hit.0.into())], &mut hits).unwrap();
    assert_eq!(hits, [hit.0]);
    assert_eq!(pool.uncache(&[gone.0]).unwrap(), 1);
    let outcome = moves.commit();
    assert_eq!(outcome.stayed, [(hit.0, GaveWay::Pinned), (gone.0, GaveWay::Released)]);
    assert_eq!(outcome.moved, pairs[2..]);
    for (from, to) in outcome.moved {
        assert_eq!(pool.cached(key(&pool, from.into())).unwrap(), Some(to));
    }
    assert_eq!(pool.cached(key(&pool, hit.0.into())).unwrap(), Some(hit.0));
    assert_eq!(pool.cached(key(&pool, gone.0.into())).unwrap(), None);
    pool.free(&hits).unwrap();
    pool.free(&kept).unwrap();
    // Dropped proposals change nothing.
    let before = pool.counts();
    drop(pool.propose_moves(Goal::Run { len: 64 }, 1_000));
    assert_eq!((pool.counts(), pool.audit().unwrap().held), (before, 0));
}

#[test]
fn a_batch_holds_back_what_is_freed_under_it() {
    let pool = pool(4);
    let frames = allocate(&pool, 4);
    pool.register(&[(frames[0], key(&pool, 1))]).unwrap();
    let batch = pool.begin_batch();
    pool.free(&frames).unwrap();
    pool.allocate(AllocRequest::new(1), &mut Vec::new()).unwrap_err();
    pool.uncache(&frames[..1]).unwrap();
    pool.allocate(AllocRequest::new(1), &mut Vec::new()).unwrap_err();
    assert_eq!(
        pool.claim(&frames[..1]).unwrap_err().to_string(),
        format!("entry 0: frame {} has no references and cannot be claimed now", frames[0])
    );
    drop(batch);
    allocate(&pool, 4);
    pool.audit().unwrap();
}

#[test]
fn events_tell_of_each_key() {
    let pool = pool(4);
    let mut events = pool.events().unwrap();
    let frame = allocate(&pool, 1)[0];
    let keys = [key(&pool, 1), key(&pool, 2)];
    pool.register(&[(frame, keys[0]), (frame, keys[1])]).unwrap();
    pool.unregister(keys[0]).unwrap();
    pool.uncache(&[frame]).unwrap();
    let mut told = Vec::new();
    while let Some(event) = events.try_recv() {
        told.push(match event.event {
            KvEvent::Stored { hash, .. } => (true, hash),
            KvEvent::Removed { hash, .. } => (false, hash),
            _ => panic!("{event:?}"),
        });
    }
    let [a, b] = keys.map(FrameKey::hash);
    assert_eq!(told, [(true, a), (true, b), (false, a), (false, b)]);
}

#[test]
fn a_pool_grows_with_its_keys() {
    let pool = FramePool::builder(64).frames_max(4096).segment_frames(64).build().unwrap();
    let first = cache(&pool, &[1, 2, 3]);
    pool.grow(2_000).unwrap();
    let more: Vec<u64> = (10..1_800).collect();
    let frames = cache(&pool, &more);
    assert_eq!(pool.cached(key(&pool, 2)).unwrap(), Some(first[1]));
    for (&content, &frame) in more.iter().zip(&frames) {
        assert_eq!(pool.cached(key(&pool, content)).unwrap(), Some(frame));
    }
    pool.audit().unwrap();
}

/// A frame that is written again while its old contents are being copied keeps the new ones.
#[test]
fn a_frame_that_gets_other_contents_during_a_move_stays() {
    let pool = pool(64);
    let all = allocate(&pool, 64);
    pool.register(&[(all[60], key(&pool, 1))]).unwrap();
    pool.free(&all).unwrap();
    let shrink = pool.begin_shrink(32).unwrap();
    let moves = shrink.propose_moves(1);
    let (from, to) = moves.pairs().next().unwrap();
    assert_eq!(from, all[60]);
    // The engine copies; then another request takes the frame for other contents.
    let mut hits = Vec::new();
    assert_eq!(pool.hit(&[key(&pool, 1)], &mut hits), Ok(1));
    assert_eq!(pool.uncache(&hits), Ok(1));
    assert_eq!(pool.is_writable(from), Ok(true));
    pool.register(&[(from, key(&pool, 2))]).unwrap();
    pool.free(&hits).unwrap();
    let moved = moves.commit();
    assert_eq!(moved.moved, [], "the copy in {to} is that of the old contents");
    assert_eq!(pool.cached(key(&pool, 2)), Ok(Some(from)));
    drop(shrink);
    pool.audit().unwrap();
}
