//! What a frame pool reports about itself: frames, fragmentation, owners and metrics.

use kvpool::compact::{FrameKind, Goal};
use kvpool::{AllocRequest, BlockId, FramePool, Order, SequenceId};

use super::{allocate, cache, pool, references};

fn for_sequence(pool: &FramePool, sequence: u64, frames: usize) -> Vec<u32> {
    let mut out = Vec::new();
    pool.allocate(AllocRequest::new(frames).sequence(SequenceId(sequence)), &mut out).unwrap();
    out
}

#[test]
fn a_snapshot_has_every_frame_and_agrees_with_the_counts() {
    let pool = pool(64);
    let held = allocate(&pool, 10);
    let cached = cache(&pool, &(0..7).collect::<Vec<_>>());
    let snapshot = pool.snapshot();
    assert_eq!((snapshot.frames().len(), snapshot.sequences().len()), (65, 0));
    let kind = |frame: u32| snapshot.frames()[frame as usize].kind();
    // With the null block.
    assert_eq!(snapshot.count(FrameKind::Fixed), 11);
    assert!(held.iter().all(|&frame| kind(frame) == FrameKind::Fixed));
    assert!(cached.iter().all(|&frame| kind(frame) == FrameKind::Evictable));
    assert_eq!(snapshot.count(FrameKind::Free), pool.counts().free());
    let fragmentation = pool.fragmentation();
    assert_eq!(fragmentation.rate, snapshot.fragmentation(fragmentation.order));
    assert_eq!(pool.available_fragmentation(), snapshot.available_fragmentation(fragmentation.order));
    assert_eq!(Some(fragmentation.longest_run as u32), snapshot.longest_free_run().map(|run| run.len));
    let covered: usize = fragmentation.free_by_order.iter().enumerate().map(|(k, runs)| runs << k).sum();
    assert_eq!(covered, pool.counts().free());
}

#[test]
fn owners_are_the_sequences_that_requests_named() {
    let pool = pool(100);
    let first = for_sequence(&pool, 7, 5);
    let second = for_sequence(&pool, 8, 3);
    let unnamed = allocate(&pool, 2);
    pool.share(&first[..2]).unwrap();
    cache(&pool, &[1, 2, 3]);
    let owners = pool.owners();
    let ids = |frames: &[u32]| frames.iter().map(|&frame| BlockId(frame)).collect::<Vec<_>>();
    let mut found: Vec<_> = owners
        .leases
        .iter()
        .map(|owner| (owner.sequence, owner.blocks.clone(), owner.shared_blocks))
        .collect();
    found.sort();
    assert_eq!(
        found,
        [
            (None, ids(&unnamed), 0),
            (Some(SequenceId(7)), ids(&first), 2),
            (Some(SequenceId(8)), ids(&second), 0)
        ]
    );
    assert_eq!((owners.blocks(), owners.pinned.len()), (10, 0));
    assert!(owners.sequences.is_empty() && owners.transfers.is_empty() && owners.unaccounted.is_none());
}

#[test]
fn owners_name_frames_after_moves() {
    let pool = FramePool::builder(256).magazine_frames(0).build().unwrap();
    let all = allocate(&pool, 256);
    for &frame in all.iter().filter(|&&frame| frame % 4 == 0) {
        pool.register(&[(frame, super::key(&pool, frame.into()))]).unwrap();
    }
    pool.free(&all).unwrap();
    let moved = pool.propose_moves(Goal::Fragmentation { order: Order(4) }, 1_000).commit().moved;
    assert!(!moved.is_empty());
    let targets: Vec<u32> = moved.iter().map(|&(_, target)| target).collect();
    pool.share(&targets).unwrap();
    let mut named: Vec<u32> = targets.clone();
    named.sort_unstable();
    let owners = pool.owners();
    let of: Vec<u32> =
        owners.leases.iter().flat_map(|owner| owner.blocks.iter().map(|block| block.0)).collect();
    assert_eq!(of, named);
    assert!(references(&pool, &of).iter().all(|&references| references == 1));
    let metrics = pool.metrics();
    assert_eq!((metrics.moves.moved_blocks, metrics.migrations), (moved.len() as u64, None));
}
