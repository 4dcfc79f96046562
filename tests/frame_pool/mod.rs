//! Pools whose ids are frames: behaviour, bad input, a naive model, and many threads.

mod bad_input;
mod groups;
mod model;
mod moves;
mod observed;
mod resize;
mod stress;
mod waiting;

use kvpool::compact::{Goal, MoveCancelled};
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

/// Frames that a batch may see keep their place, and do not disturb the order of the others.
#[test]
fn frames_freed_evict_first_under_a_batch_leave_the_order_of_the_others() {
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
    recent.iter().for_each(|&frame| pool.free_evict_first(&[frame]).unwrap());
    let evicted: Vec<u32> = (0..3).flat_map(|_| allocate(&pool, 1)).collect();
    assert_eq!(evicted, cached[..3]);
    drop(batch);
    assert_eq!(allocate(&pool, 40), recent);
    pool.audit().unwrap();
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
    assert_eq!(outcome.stayed, [(hit.0, MoveCancelled::Pinned), (gone.0, MoveCancelled::Released)]);
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
