//! Growth in line, and preemption, of sequences with several groups of layers.

use std::time::{Duration, Instant};

use kvpool::{AdmitRequest, AllocError, AllocRequest, Pool, Priority, SequenceError, SequenceId, Tokens};
use pollster::block_on;

use super::*;

/// Runs `close` while another thread waits for the blocks of 8 tokens in all groups.
fn grow_beside(pool: &Pool, sequence: &mut GroupedSequence, close: impl FnOnce()) {
    thread::scope(|scope| {
        let waits = scope.spawn(|| block_on(pool.reserve_grouped_async(sequence, 8)));
        while pool.stats().waiting == 0 && !waits.is_finished() {
            thread::yield_now();
        }
        assert_eq!(pool.stats().waiting, 1, "it has not waited");
        close();
        waits.join().unwrap().unwrap();
    });
}

#[test]
fn a_sequence_waits_for_the_blocks_of_all_groups() {
    let pool = pool(30, 4);
    let all: Vec<u32> = (0..100).collect();
    let mut sequence = compute(&pool, 1, &all[..24]);
    // Gives up what is behind the windows.
    sequence.reserve(8).unwrap();
    sequence.release_reservation();
    let free = pool.free_blocks() + pool.stats().evictable;
    // One block less than two for each group.
    let first = pool.allocate(AllocRequest::new(free - 5)).unwrap();
    let other = pool.allocate(AllocRequest::new(1)).unwrap();
    let refused = sequence.reserve(8).unwrap_err();
    assert!(matches!(refused, SequenceError::Alloc(AllocError::Exhausted { asked: 6, .. })), "{refused}");
    let soon = Instant::now() + Duration::from_millis(5);
    let late = block_on(pool.reserve_grouped_async(&mut sequence, 8).until(soon)).unwrap_err();
    assert!(matches!(late, SequenceError::Alloc(AllocError::Deadline { asked: 6, .. })), "{late}");
    let stats = pool.stats();
    assert_eq!((sequence.reserved_blocks(), pool.free_blocks() + stats.evictable, stats.waiting), (0, 4, 0));
    grow_beside(&pool, &mut sequence, || drop((first, other)));
    assert_eq!((sequence.reserved_blocks(), pool.free_blocks() + pool.stats().evictable), (6, free - 6));
    let mut batch = pool.begin_batch();
    let taken = batch.append_grouped(&mut sequence, &all[24..32]).unwrap();
    batch.finish();
    assert_eq!((taken.new_blocks, sequence.reserved_blocks()), (6, 0));
    // What waiting cannot meet is refused at once, and nothing changes.
    let large = block_on(pool.reserve_grouped_async(&mut sequence, 60)).unwrap_err();
    assert!(matches!(large, SequenceError::Alloc(AllocError::TooLarge { total: 30, .. })), "{large}");
    let long = block_on(pool.reserve_grouped_async(&mut sequence, usize::MAX)).unwrap_err();
    assert!(matches!(long, SequenceError::Invalid { .. }), "{long}");
    let foreign = block_on(super::pool(30, 4).reserve_grouped_async(&mut sequence, 4)).unwrap_err();
    assert!(matches!(foreign, SequenceError::ForeignSequence { .. }), "{foreign}");
    block_on(pool.reserve_grouped_async(&mut sequence, 0)).unwrap();
    assert_eq!(sequence.reserved_blocks(), 0);
    drop(sequence);
    pool.audit().unwrap();
}

/// Each sequence must grow to finish; those that cannot are preempted, admitted again, and read what
/// they stored.
#[test]
fn sequences_that_grow_in_line_and_are_preempted_all_finish() {
    const SEQUENCES: u64 = 12;
    let pool = pool(48, 4);
    let preempted = AtomicUsize::new(0);
    thread::scope(|scope| {
        for thread in 0..3 {
            let (pool, preempted) = (&pool, &preempted);
            scope.spawn(move || {
                for id in (0..SEQUENCES).filter(|id| id % 3 == thread) {
                    let all: Vec<u32> = (0..60).map(|token| token * 7 + id as u32 % 2).collect();
                    let mut sequence = admit(pool, id, &all[..20]);
                    while sequence.len() < all.len() {
                        let from = sequence.len();
                        let until = Instant::now() + Duration::from_millis(3);
                        let grown = block_on(pool.reserve_grouped_async(&mut sequence, 8).until(until));
                        if let Err(error) = grown {
                            assert!(matches!(error, SequenceError::Alloc(_)), "{error}");
                            let before = pool.victim(SequenceId(id)).unwrap();
                            let closed = sequence.preempt();
                            assert_eq!(
                                (closed.id, closed.tokens_kept + closed.tokens_lost),
                                (SequenceId(id), from)
                            );
                            let blocks = closed.freed_blocks + closed.cached_blocks + closed.shared_blocks;
                            assert!((1..=before.blocks).contains(&blocks), "{closed:?} {before:?}");
                            preempted.fetch_add(1, Relaxed);
                            sequence = admit(pool, id, &all[..from.max(20)]);
                            continue;
                        }
                        let mut batch = pool.begin_batch();
                        let tokens = 8.min(all.len() - from);
                        let new = &all[from..from + tokens];
                        let new = if sequence.group(0).announced() > from {
                            Tokens::Announced(tokens)
                        } else {
                            Tokens::Ids(new)
                        };
                        append(&mut batch, &mut sequence, &all, new).unwrap();
                        batch.finish();
                        check(pool, &sequence, &all);
                        thread::yield_now();
                    }
                }
            });
        }
    });
    pool.audit().unwrap();
    assert_eq!((pool.stats().used, pool.stats().waiting), (0, 0));
    println!("{preempted:?} preempted, {:?}", pool.prefix_cache().unwrap().stats());
}

/// Admits a prompt, waiting for room, and computes it.
fn admit(pool: &Pool, id: u64, prompt: &[u32]) -> GroupedSequence {
    let request = AdmitRequest::new(SequenceId(id), prompt).priority(Priority::Normal);
    let mut sequence = block_on(pool.admit_grouped_async(&request)).unwrap();
    let mut batch = pool.begin_batch();
    let missing = prompt.len() - sequence.len();
    append(&mut batch, &mut sequence, prompt, Tokens::Announced(missing)).unwrap();
    batch.finish();
    sequence
}

#[test]
fn a_preempted_sequence_comes_back_to_what_all_groups_keep() {
    let pool = pool(100, 4);
    let all: Vec<u32> = (0..100).collect();
    let sequence = compute(&pool, 1, &all[..42]);
    let (victim, used) = (pool.victim(SequenceId(1)).unwrap(), pool.stats().used);
    let closed = sequence.preempt();
    assert_eq!((victim.freed_blocks, victim.cached_blocks), (closed.freed_blocks, closed.cached_blocks));
    assert_eq!(closed.freed_blocks + closed.cached_blocks, used);
    assert_eq!((closed.tokens_kept, closed.tokens_lost, closed.shared_blocks), (40, 2, 0));
    assert!(closed.swapped.is_none());
    assert_eq!((pool.stats().used, pool.sequence_count()), (0, 0));
    let before = pool.prefix_cache().unwrap().stats();
    let again = compute(&pool, 1, &all[..42]);
    let stats = pool.prefix_cache().unwrap().stats();
    assert_eq!(stats.resumed_lookups - before.resumed_lookups, 1, "its hits are not new ones");
    check(&pool, &again, &all);
    drop(again);
    pool.audit().unwrap();
}
