//! Pools with layers that keep one state of a sequence: an engine checks each state that it reads.
#![cfg(not(any(kvpool_loom, miri)))]

mod drafts;
pub mod engine;
mod flights;
mod properties;

use std::future::{Future, IntoFuture};
use std::pin::pin;
use std::task::{Context, Poll, Waker};
use std::thread;

use kvpool::prefix::BlockHash;
use kvpool::{
    AdmitRequest, AllocError, AllocRequest, KvLayout, Pool, PoolBuilder, Priority, SequenceError, SequenceId,
    Tokens,
};
use pollster::block_on;

use engine::Engine;

#[test]
fn a_prompt_is_hit_where_its_state_was_kept() {
    let (engine, all) = (Engine::new(400, 4), (0..103).collect::<Vec<u32>>());
    let mut first = engine.admit(1, &all[..63]).unwrap();
    assert_eq!((first.len(), first.next_cut()), (0, Some(60)));
    engine.prefill(&mut first, &all[..63]).unwrap();
    // Not at a boundary: nothing is kept when it is closed.
    drop(first);
    let cached = engine.pool.cached_blocks().len();
    let mut second = engine.admit(2, &all).unwrap();
    assert_eq!(
        (second.len(), second.next_cut()),
        (60, Some(100)),
        "blocks are cached to 60, as is the state"
    );
    engine.check(&second, &all);
    engine.prefill(&mut second, &all).unwrap();
    assert_eq!(second.next_cut(), None);
    let mut batch = engine.pool.begin_batch();
    let longer: Vec<u32> = all.iter().copied().chain([7]).collect();
    engine.step(&mut batch, &mut second, &longer, Tokens::Ids(&[7])).unwrap();
    batch.finish();
    assert_eq!(second.len(), 104);
    // At a boundary: its run is kept without a copy.
    drop(second);
    assert!(engine.pool.cached_blocks().len() > cached);
    let longer: Vec<u32> = longer.into_iter().chain(0..9).collect();
    let mut third = engine.admit(3, &longer).unwrap();
    assert_eq!(third.len(), 104);
    engine.prefill(&mut third, &longer).unwrap();
    // Between two checkpoints, the earlier one counts, however much else is cached.
    let branch: Vec<u32> = all[..90].iter().copied().chain([9; 30]).collect();
    let mut fourth = engine.admit(4, &branch).unwrap();
    assert_eq!(fourth.len(), 60);
    engine.prefill(&mut fourth, &branch).unwrap();
    drop((third, fourth));
    engine.close();
}

/// A request that waits while hashes are uncached finds what is computed afterwards.
#[test]
fn a_waiting_admission_finds_checkpoints_of_later_uncache_calls() {
    let (engine, all) = (Engine::new(100, 4), (0..41).collect::<Vec<u32>>());
    let rest = engine.pool.allocate(AllocRequest::new(60)).unwrap();
    let request = AdmitRequest::new(SequenceId(1), &all);
    let held = engine.pool.allocate(AllocRequest::new(30)).unwrap();
    let mut waiting = pin!(engine.pool.admit_grouped_async(&request).into_future());
    let mut context = Context::from_waker(Waker::noop());
    assert!(waiting.as_mut().poll(&mut context).is_pending());
    engine.pool.uncache(&[BlockHash::new(7, 7)]);
    drop(held);
    // Not in line, so that it passes the waiting one.
    let urgent = AdmitRequest::new(SequenceId(2), &all).priority(Priority::Urgent);
    let mut second = engine.pool.admit_grouped(&urgent).unwrap();
    engine.prefill(&mut second, &all).unwrap();
    drop(second);
    drop(rest);
    let Poll::Ready(admitted) = waiting.as_mut().poll(&mut context) else { panic!("it waits") };
    let sequence = admitted.unwrap();
    assert_eq!(sequence.len(), 40);
    engine.check(&sequence, &all);
    drop(sequence);
    engine.close();
}

#[test]
fn a_preempted_sequence_comes_back_to_its_checkpoint() {
    let (engine, all) = (Engine::new(400, 4), (0..103).collect::<Vec<u32>>());
    for (tokens, kept) in [(60, 60), (63, 60)] {
        let mut sequence = engine.admit(1, &all[..tokens]).unwrap();
        engine.prefill(&mut sequence, &all[..tokens]).unwrap();
        let (used, held) = (engine.pool.stats().used, sequence.held_blocks());
        let closed = sequence.preempt();
        assert_eq!((closed.tokens_kept, closed.tokens_lost), (kept, tokens - kept));
        assert_eq!((closed.freed_blocks + closed.cached_blocks, held), (used, used));
        let again = engine.admit(1, &all[..tokens + 1]).unwrap();
        assert_eq!(again.len(), kept);
        drop(again);
        engine.pool.evict_cached(0);
    }
    engine.close();
}

/// Two sequences begin with one checkpoint, and neither has appended: what closing one gives back is
/// its run alone.
#[test]
fn a_preempted_sequence_leaves_what_others_share() {
    let (engine, all) = (Engine::new(800, 4), (0..103).collect::<Vec<u32>>());
    let mut first = engine.admit(1, &all[..60]).unwrap();
    engine.prefill(&mut first, &all[..60]).unwrap();
    drop(first);
    let [one, other] = [2, 3].map(|id| engine.admit(id, &all).unwrap());
    assert_eq!([one.len(), other.len()], [60, 60]);
    let victim = engine.pool.victim(SequenceId(2)).unwrap();
    let closed = one.preempt();
    assert_eq!(
        (closed.freed_blocks, closed.cached_blocks, closed.shared_blocks),
        (victim.freed_blocks, victim.cached_blocks, victim.shared_blocks)
    );
    assert!(closed.shared_blocks > 60 / 4, "{closed:?}");
    assert_eq!((closed.cached_blocks, closed.tokens_kept, closed.tokens_lost), (0, 60, 0));
    drop(other);
    engine.close();
}

#[test]
fn checkpoints_need_all_of_their_blocks_and_tokens() {
    let (engine, all) = (Engine::new(400, 4), (0..64).collect::<Vec<u32>>());
    let mut sequence = engine.admit(1, &all).unwrap();
    let mut batch = engine.pool.begin_batch();
    assert!(matches!(batch.checkpoint(&mut sequence), Err(SequenceError::Invalid { .. })), "no tokens");
    engine.step(&mut batch, &mut sequence, &all, Tokens::Announced(30)).unwrap();
    let error = batch.checkpoint(&mut sequence).unwrap_err();
    assert!(error.to_string().contains("a multiple of 4"), "{error}");
    engine.step(&mut batch, &mut sequence, &all, Tokens::Announced(10)).unwrap();
    let copies = batch.checkpoint(&mut sequence).unwrap();
    assert_eq!(
        copies.iter().map(|of| (of.group - sequence.groups(), of.frames.len())).collect::<Vec<_>>(),
        [(0, 5), (1, 2)]
    );
    engine.copies(&copies);
    batch.finish();
    let mut batch = engine.pool.begin_batch();
    assert_eq!(batch.checkpoint(&mut sequence).unwrap(), [], "it is cached");
    batch.finish();
    assert_eq!(engine.admit(2, &all).unwrap().len(), 40);
    // A wrong block of tokens before it: the state is wrong too.
    let wrong = sequence.group(0).block_hashes()[9];
    engine.pool.uncache(&[wrong]);
    assert_eq!(engine.admit(3, &all).unwrap().len(), 0);
    let mut batch = engine.pool.begin_batch();
    engine.step(&mut batch, &mut sequence, &all, Tokens::Announced(8)).unwrap();
    assert_eq!(batch.checkpoint(&mut sequence).unwrap(), [], "computed from a wrong block");
    batch.finish();
    drop(sequence);
    // The same tokens, computed again: the old state is not found behind them.
    let mut again = engine.admit(4, &all[..41]).unwrap();
    let mut batch = engine.pool.begin_batch();
    engine.step(&mut batch, &mut again, &all, Tokens::Announced(41)).unwrap();
    batch.finish();
    assert_eq!(engine.admit(5, &all).unwrap().len(), 0);
    drop(again);
    // Unknown tokens, and a cleared cache.
    let mut unknown = engine.admit(6, &all[..1]).unwrap();
    let mut batch = engine.pool.begin_batch();
    batch.append_grouped(&mut unknown, Tokens::Announced(1)).unwrap();
    batch.append_grouped(&mut unknown, 3).unwrap();
    assert_eq!(batch.checkpoint(&mut unknown).unwrap(), []);
    batch.finish();
    drop(unknown);
    let other = Engine::new(50, 4);
    let mut foreign = other.admit(1, &all[..4]).unwrap();
    let mut batch = engine.pool.begin_batch();
    assert!(matches!(batch.checkpoint(&mut foreign), Err(SequenceError::ForeignSequence { .. })));
    batch.finish();
    engine.close();
}

/// A state cannot be taken back: what would need that is refused, or begins again.
#[test]
fn a_state_is_not_taken_back() {
    let (engine, all) = (Engine::new(200, 4), (0..64).collect::<Vec<u32>>());
    let mut sequence = engine.admit(1, &all[..40]).unwrap();
    engine.prefill(&mut sequence, &all[..40]).unwrap();
    let mut batch = engine.pool.begin_batch();
    let fork = sequence.fork(SequenceId(2)).unwrap_err();
    assert!(fork.to_string().contains("fork"), "{fork}");
    let error = sequence.truncate(36).unwrap_err();
    assert!(matches!(error, SequenceError::StateAhead { asked: 36, tokens: 40, .. }), "{error}");
    sequence.truncate(40).unwrap();
    engine.step(&mut batch, &mut sequence, &all, Tokens::Ids(&all[40..44])).unwrap();
    let state = sequence.state(0);
    // The state holds the tokens of a step that failed.
    drop(batch);
    let mut batch = engine.pool.begin_batch();
    engine.step(&mut batch, &mut sequence, &all, Tokens::Announced(16)).unwrap();
    assert_eq!((sequence.len(), sequence.state(0)), (16, state), "it begins again, in the same frames");
    batch.finish();
    sequence.truncate(0).unwrap();
    assert_eq!(sequence.held_blocks(), 7);
    drop(sequence);
    // The prefix is still cached, and was not touched by the failed step.
    let mut again = engine.admit(3, &all).unwrap();
    assert_eq!(again.len(), 36);
    engine.prefill(&mut again, &all).unwrap();
    drop(again);
    engine.close();
}

/// A checkpoint under a batch that fails, or after one that fails later, is not found, even where
/// the tokens before it are.
#[test]
fn a_checkpoint_of_an_abandoned_batch_is_not_found() {
    let (engine, all) = (Engine::new(300, 4), (0..64).collect::<Vec<u32>>());
    for way in 0..5 {
        let mut sequence = engine.admit(way, &all[..41]).unwrap();
        assert_eq!(sequence.len(), 0, "way {way}");
        let mut first = engine.pool.begin_batch();
        engine.step(&mut first, &mut sequence, &all, Tokens::Announced(20)).unwrap();
        let mut second = engine.pool.begin_batch();
        engine.step(&mut second, &mut sequence, &all, Tokens::Announced(20)).unwrap();
        if way != 4 {
            engine.copies(&second.checkpoint(&mut sequence).unwrap());
        }
        match way {
            0 => {
                first.finish();
                drop(second);
                drop(sequence);
            }
            1 => {
                drop(first);
                second.finish();
                drop(sequence);
            }
            2 => {
                second.finish();
                drop(sequence);
                drop(first);
            }
            3 => {
                drop(second);
                drop(sequence);
                first.finish();
            }
            // Its run would become a checkpoint.
            _ => {
                drop(sequence);
                second.finish();
                drop(first);
            }
        }
        let mut again = engine.admit(10, &all[..41]).unwrap();
        let mut batch = engine.pool.begin_batch();
        let missing = 40 - again.len();
        engine.step(&mut batch, &mut again, &all, Tokens::Announced(missing)).unwrap();
        batch.finish();
        again.commit(40).unwrap();
        assert_eq!(again.group(0).settled_blocks(), 10, "way {way}: the tokens are cached");
        assert_eq!(engine.admit(11, &all).unwrap().len(), 0, "way {way}");
        again.truncate(0).unwrap();
        drop(again);
        engine.pool.clear_prefix_cache();
    }
    engine.close();
}

/// One poll of an admission returns, also if blocks that a batch sees are what it lacks.
#[test]
fn a_poll_of_a_waiting_admission_returns() {
    let (engine, all) = (Engine::new(60, 4), (0..42).collect::<Vec<u32>>());
    let mut sequence = engine.admit(1, &all).unwrap();
    engine.prefill(&mut sequence, &all).unwrap();
    let batch = engine.pool.begin_batch();
    drop(sequence);
    // Enough for the run of 7 frames, and not for the rest.
    let lease = engine.pool.allocate(kvpool::AllocRequest::new(engine.pool.free_blocks() - 8)).unwrap();
    assert!(engine.pool.available_blocks() > 19);
    let request = AdmitRequest::new(SequenceId(2), &all[3..]);
    let mut waiting = Box::pin(engine.pool.admit_grouped_async(&request).into_future());
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    assert!(waiting.as_mut().poll(&mut context).is_pending());
    assert_eq!(engine.pool.stats().waiting, 1);
    batch.finish();
    drop(block_on(waiting).unwrap());
    drop(lease);
    engine.close();
}

/// Of a request that does not fit, no part evicts anything.
#[test]
fn a_refused_admission_evicts_nothing() {
    let (engine, all) = (Engine::new(40, 4), (0..100).collect::<Vec<u32>>());
    let mut sequence = engine.admit(1, &all[..40]).unwrap();
    engine.prefill(&mut sequence, &all[..40]).unwrap();
    drop(sequence);
    let lease = engine.pool.allocate(kvpool::AllocRequest::new(engine.pool.free_blocks() + 6)).unwrap();
    let before = engine.pool.stats();
    let other: Vec<u32> = (200..260).collect();
    let error = engine.admit(2, &other).unwrap_err();
    assert!(matches!(error, SequenceError::Alloc(AllocError::Exhausted { .. })), "{error}");
    assert_eq!(engine.pool.stats().evictable, before.evictable);
    assert!(before.evictable > 7, "the run would fit");
    drop(lease);
    engine.close();
}

/// Where a prompt leaves what another one had, a state is worth keeping: the next cut is there.
#[test]
fn a_prompt_that_branches_is_cut_there() {
    let (engine, all) = (Engine::new(300, 4), (0..100).collect::<Vec<u32>>());
    let branch = |id: u64| {
        let mut prompt = all[..42].to_vec();
        prompt.extend((0..40).map(|at| 1_000 * id as u32 + at));
        let sequence = engine.admit(id, &prompt).unwrap();
        (sequence, prompt)
    };
    let (mut first, prompt) = branch(1);
    assert_eq!((first.len(), first.cached_prefix(), first.next_cut()), (0, 0, Some(80)));
    engine.prefill(&mut first, &prompt).unwrap();
    let (mut second, prompt) = branch(2);
    // The window of the other group has blocks there because no sequence has slid beyond them.
    assert_eq!((second.len(), second.cached_prefix(), second.next_cut()), (0, 40, Some(40)));
    engine.prefill(&mut second, &prompt).unwrap();
    let (third, _) = branch(3);
    assert_eq!((third.len(), third.cached_prefix(), third.next_cut()), (40, 40, Some(80)));
    drop((first, second, third));
    engine.close();
}

/// While memory is short, a prompt that grows keeps the checkpoint that it was hit at, and its new
/// one: the one before goes first.
#[test]
fn of_a_growing_prompt_two_checkpoints_stay() {
    let (engine, all) = (Engine::new(110, 4), (0..400).collect::<Vec<u32>>());
    let checkpoints = |keep: u64, prompt: &[u32]| {
        let before = engine.pool.metrics().evictions.total();
        let mut sequence = engine.admit(keep, prompt).unwrap();
        let hit = sequence.len();
        engine.prefill(&mut sequence, prompt).unwrap();
        (hit, engine.pool.metrics().evictions.total() - before)
    };
    let lengths = [42, 82, 122, 162, 182];
    let hits: Vec<_> = lengths.iter().map(|&length| checkpoints(length as u64, &all[..length]).0).collect();
    assert_eq!(hits, [0, 40, 80, 120, 160]);
    // The last two are hit, and none before.
    for (length, hit) in [(190, 180), (177, 160), (159, 0)] {
        let sequence = engine.admit(length as u64, &all[..length]).unwrap();
        assert_eq!(sequence.len(), hit, "{length}");
    }
    engine.close();
}

/// After an abandoned batch, a sequence says what its next call will find.
#[test]
fn a_lost_sequence_says_so() {
    let (engine, all) = (Engine::new(100, 4), (0..64).collect::<Vec<u32>>());
    let mut sequence = engine.admit(1, &all).unwrap();
    let mut batch = engine.pool.begin_batch();
    engine.step(&mut batch, &mut sequence, &all, Tokens::Announced(16)).unwrap();
    batch.finish();
    let (state, held) = (sequence.state(0), sequence.held_blocks() + sequence.reserved_blocks());
    let mut batch = engine.pool.begin_batch();
    engine.step(&mut batch, &mut sequence, &all, Tokens::Announced(16)).unwrap();
    drop(batch);
    assert_eq!((sequence.len(), sequence.next_cut()), (0, Some(60)));
    assert_eq!((sequence.state(0), sequence.state(1).len()), (state, 2));
    assert!(sequence.held_blocks() <= held, "{} of {held}", sequence.held_blocks());
    let mut batch = engine.pool.begin_batch();
    engine.step(&mut batch, &mut sequence, &all, Tokens::Announced(16)).unwrap();
    assert_eq!(sequence.len(), 16);
    batch.finish();
    drop(sequence);
    engine.close();
}

/// The run needs consecutive frames: without them an admission is refused, or waits.
#[test]
fn an_admission_waits_for_a_run() {
    let (engine, all) = (Engine::new(40, 4), (0..8).collect::<Vec<u32>>());
    let lease = engine.pool.allocate(kvpool::AllocRequest::new(40)).unwrap();
    let error = engine.admit(1, &all).unwrap_err();
    assert!(matches!(error, SequenceError::Alloc(AllocError::Exhausted { .. })), "{error}");
    drop(lease);
    // Leased blocks are not moved: 20 frames are free, none beside another.
    let mut singles: Vec<_> =
        (0..40).map(|_| engine.pool.allocate_owned(kvpool::AllocRequest::new(1)).unwrap()).collect();
    let frame = |lease: &kvpool::Lease<'_>| engine.pool.info(lease.handles().next().unwrap()).unwrap().frame;
    singles.sort_by_key(frame);
    let mut place = 0;
    singles.retain(|_| {
        place += 1;
        place % 2 == 0
    });
    let error = engine.admit(1, &all).unwrap_err();
    assert!(matches!(error, SequenceError::Alloc(AllocError::NoRun { asked: 7, .. })), "{error}");
    assert_eq!((engine.pool.free_blocks(), engine.pool.sequence_count()), (20, 0));
    let request = AdmitRequest::new(SequenceId(9), &all);
    let waits = engine.pool.admit_grouped_async(&request);
    let sequence = thread::scope(|scope| {
        scope.spawn(move || {
            thread::sleep(std::time::Duration::from_millis(10));
            drop(singles);
        });
        block_on(waits).unwrap()
    });
    assert_eq!(sequence.state(0).len(), 5);
    drop(sequence);
    let huge = Pool::builder(engine.pool.layout().clone()).blocks(8).without_storage().states([9]).build();
    assert!(huge.unwrap_err().to_string().contains("from 1 to 8 frames"));
    engine.close();
}

/// A waiting request for a run has blocks evicted and moved, if none are free and no window of
/// evictable ones is long enough.
#[test]
fn cached_blocks_are_moved_for_a_run() {
    let engine = Engine::new(96, 4);
    let mut both = [1, 2].map(|id| engine.admit(id, &[id as u32]).unwrap());
    let mut all = [vec![1], vec![2]];
    for round in 0..60 {
        for (sequence, all) in both.iter_mut().zip(&mut all) {
            let mut batch = engine.pool.begin_batch();
            all.extend((round > 0).then_some(round));
            let new = &all[all.len() - 1..];
            let tokens = if round == 0 { Tokens::Announced(1) } else { Tokens::Ids(new) };
            engine.step(&mut batch, sequence, all, tokens).unwrap();
            batch.finish();
        }
    }
    let [kept, gone] = both;
    drop(gone);
    let lease = engine.pool.allocate_owned(kvpool::AllocRequest::new(engine.pool.free_blocks())).unwrap();
    let cached = engine.pool.available_blocks();
    assert!(engine.pool.free_blocks() == 0 && cached > 13, "{cached}");
    let run = |blocks| kvpool::AllocRequest::new(blocks).contiguous();
    let error = engine.pool.allocate(run(cached)).map(drop).unwrap_err();
    let AllocError::NoRun { free: 0, evictable, .. } = error else { panic!("{error}") };
    assert_eq!(evictable, cached, "a refusal evicts nothing");
    assert!(error.to_string().contains("are cached without an owner"), "{error}");
    // A running state and a lease are not moved: they bound the longest run.
    let made = (8..=cached).rev().find(|&blocks| {
        let is_refused = engine.pool.allocate(run(blocks)).is_err();
        let soon = std::time::Instant::now() + std::time::Duration::from_millis(200);
        is_refused && block_on(engine.pool.allocate_async(run(blocks)).until(soon)).is_ok()
    });
    assert!(made.is_some() && engine.pool.metrics().moves.moved_blocks > 0, "{made:?}");
    engine.check(&kept, &all[0]);
    drop((kept, lease));
    engine.close();
}

/// A pool in which a sequence does not fit beside its own hit admits it without.
#[test]
fn a_checkpoint_gives_way_to_its_own_sequence() {
    let (engine, all) = (Engine::new(24, 4), (0..30).collect::<Vec<u32>>());
    let mut sequence = engine.admit(1, &all[..28]).unwrap();
    let mut batch = engine.pool.begin_batch();
    engine.step(&mut batch, &mut sequence, &all, Tokens::Announced(16)).unwrap();
    batch.finish();
    let mut batch = engine.pool.begin_batch();
    engine.step(&mut batch, &mut sequence, &all, Tokens::Announced(12)).unwrap();
    batch.finish();
    drop(sequence);
    let request = AdmitRequest::new(SequenceId(2), &all);
    // 8 blocks of tokens, a window and a run: with the 7 of the checkpoint they do not fit.
    let sequence = engine.pool.admit_grouped(&request).unwrap();
    assert_eq!(sequence.len(), 0);
    drop(sequence);
    let lease = engine.pool.allocate(kvpool::AllocRequest::new(24)).unwrap();
    let waits = engine.pool.admit_grouped_async(&request);
    let sequence = thread::scope(|scope| {
        scope.spawn(move || {
            thread::sleep(std::time::Duration::from_millis(10));
            drop(lease);
        });
        block_on(waits).unwrap()
    });
    assert_eq!(sequence.len(), 0);
    drop(sequence);
    engine.close();
}

/// Threads admit, grow, keep states and close in a pool that is too small for them.
#[test]
fn states_are_hit_beside_evictions() {
    const ROUNDS: u64 = if cfg!(debug_assertions) { 100 } else { 1_000 };
    let engine = Engine::new(220, 4);
    let hits: usize = thread::scope(|scope| {
        let run = |thread: u64| {
            let engine = engine.clone();
            move || {
                let (mut random, mut hits) = (fastrand::Rng::with_seed(thread), 0);
                for round in 0..ROUNDS {
                    let (prompt, tokens) = (random.u32(..3), random.usize(8..70));
                    let all: Vec<u32> = [prompt].into_iter().chain(0..tokens as u32).collect();
                    let Ok(mut sequence) = engine.admit(thread << 32 | round, &all) else { continue };
                    hits += sequence.len();
                    engine.check(&sequence, &all);
                    let _ = engine.prefill(&mut sequence, &all);
                    engine.check(&sequence, &all);
                }
                hits
            }
        };
        let threads: Vec<_> = (0..4).map(|thread| scope.spawn(run(thread))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).sum()
    });
    assert!(hits > 0, "nothing was hit");
    engine.close();
}

/// A batch that copied a block of a list is withdrawn from that block's first token on. Where a list
/// of shorter blocks has given up the window of that token, the sequence begins again.
#[test]
fn a_sequence_begins_again_where_a_list_cannot_continue() {
    let lists = [(Some((9, 0)), 4), (None, 16)];
    let (engine, all) = (Engine::with(200, &lists, &[]), (0..40).collect::<Vec<u32>>());
    for (length, expected) in [(30, 0), (40, 0), (34, 32), (32, 32)] {
        let mut sequence = engine.admit(1, &all[..length]).unwrap();
        engine.prefill(&mut sequence, &all[..length]).unwrap();
        let mut fork = sequence.fork(SequenceId(2)).unwrap();
        let longer: Vec<u32> = all[..length].iter().copied().chain([7; 5]).collect();
        let mut batch = engine.pool.begin_batch();
        engine.step(&mut batch, &mut fork, &longer, Tokens::Ids(&[7; 5])).unwrap();
        engine.check(&fork, &longer);
        drop(batch);
        // Before any call that changes it.
        assert_eq!(fork.len(), expected, "{length}");
        let lists = [0, 1].map(|list| fork.group(list));
        assert_eq!(lists.map(|list| list.len()), [expected; 2]);
        let held = lists.map(|list| list.block_count().checked_sub(list.blocks_given_up()).unwrap());
        assert_eq!(fork.held_blocks(), held[0] + held[1]);
        engine.check(&fork, &all);
        engine.check(&sequence, &all);
        let error = fork.truncate(41).unwrap_err();
        assert!(matches!(error, SequenceError::Invalid { .. }), "{error}");
        assert_eq!(fork.len(), expected, "{length}");
        let announced = fork.group(0).announced();
        engine.prefill(&mut fork, &all[..announced]).unwrap();
        engine.check(&fork, &all);
        drop((sequence, fork));
        engine.close();
    }
}

/// A prefix is hit up to a boundary of blocks in every list, and a state is kept there.
#[test]
fn boundaries_are_those_of_all_lists() {
    let lists = [(None, 8), (Some((9, 0)), 4), (None, 12)];
    for states in [&[][..], &[3]] {
        let (engine, all) = (Engine::with(400, &lists, states), (0..103).collect::<Vec<u32>>());
        let mut first = engine.admit(1, &all).unwrap();
        assert_eq!(first.next_cut(), (!states.is_empty()).then_some(96));
        engine.prefill(&mut first, &all).unwrap();
        if states.is_empty() {
            first.truncate(90).unwrap_err();
        }
        drop(first);
        for (length, hit) in [(103, 96), (97, 96), (96, 72), (73, 72), (25, 24), (24, 0)] {
            let hit = if states.is_empty() || hit == 96 { hit } else { 0 };
            let found = engine.admit(2, &all[..length]).unwrap();
            assert_eq!(found.len(), hit, "of {length} tokens, with {states:?}");
            engine.check(&found, &all);
        }
        engine.close();
    }
}

#[test]
fn tokens_of_lists_that_do_not_fit_are_refused() {
    let builder = || Pool::builder(KvLayout::named("tiny").unwrap()).blocks(100);
    let refused = |builder: PoolBuilder| builder.build().map(drop).unwrap_err().to_string();
    for (tokens, why) in [
        (&[4][..], "1, expected 2"),
        (&[4, 0], "0, expected from 1"),
        (&[4, usize::MAX], "expected from 1"),
        (&[65_537, 65_539], "least common multiple 4295229443"),
    ] {
        let error =
            refused(builder().without_storage().groups([None; 2]).list_tokens(tokens.iter().copied()));
        assert!(error.contains("list_tokens") && error.contains(why), "{error}");
    }
    let large = builder().without_storage().list_tokens([1 << 30]).states([4]);
    assert!(refused(large).contains("from 1 to 1 frames"));
    let engine = Engine::with(50, &[(None, 8)], &[]);
    let sequence = engine.admit(1, &[1; 20]).unwrap();
    let batch = engine.pool.begin_batch();
    for ratio in [0, 3, 16] {
        let error = batch.entry_mapping(sequence.group(0), ratio, 0..0, &mut Vec::new()).unwrap_err();
        assert!(error.to_string().contains("a divisor of 8"), "{error}");
    }
}
