//! Admission of sequences, reservations, decode steps and pinned prefixes. Every wait has a time
//! limit, so that no test hangs.
#![cfg(not(kvpool_loom))]

mod faults;
mod order;

use std::future::Future;
use std::pin::pin;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use kvpool::prefix::{BlockHash, PrefixConfig, PrefixKeys};
use kvpool::storage::KvLayout;
use kvpool::{
    AdmitRequest, AllocError, AllocRequest, Append, Batch, Pool, PrefixError, Priority, Sequence,
    SequenceError, SequenceId, StepError, TOKENS_MAX, Tokens,
};
use kvpool_testkit::prompts::{BLOCK_TOKENS, admit as serve, pool as caching, pool_of, prompt};
use kvpool_testkit::steps::append;
use tokio::time::timeout;

/// Longer than any wait in these files, on any machine.
const LIMIT: Duration = Duration::from_secs(30);

pub(crate) async fn soon<T>(future: impl IntoFuture<Output = T>) -> T {
    timeout(LIMIT, future).await.expect("a request waits forever")
}

/// Returns the hashes of the full blocks of a prompt.
fn hashes_of(pool: &Pool, prompt: &[u32]) -> Vec<BlockHash> {
    let mut sequence = pool.sequence(SequenceId(u64::MAX)).open().unwrap();
    sequence.announce(prompt).unwrap();
    sequence.block_hashes().to_vec()
}

fn plain(blocks: usize) -> Pool {
    let layout = KvLayout::named("tiny").unwrap();
    Pool::builder(layout).blocks(blocks).without_storage().threads(2).build().unwrap()
}

fn request(id: u64, prompt: &[u32]) -> AdmitRequest<'_> {
    AdmitRequest::new(SequenceId(id), prompt)
}

fn poll_once<T>(future: std::pin::Pin<&mut (impl Future<Output = T> + ?Sized)>) -> Poll<T> {
    future.poll(&mut Context::from_waker(Waker::noop()))
}

fn quiet(pool: &Pool) {
    let report = pool.audit().unwrap();
    let stats = pool.stats();
    assert_eq!((report.owned, stats.waiting, pool.sequence_count()), (0, 0, 0), "{report:?}");
    assert_eq!(pool.available_blocks(), pool.total_blocks());
}

#[test]
fn appends_within_a_reservation_need_nothing_of_the_pool() {
    let pool = plain(100);
    let prompt = prompt(1, 42);
    let mut sequence = pool.admit(&request(1, &prompt).headroom(30)).unwrap();
    assert_eq!((sequence.len(), sequence.reserved_blocks(), pool.stats().used), (0, 18, 18));
    assert_eq!(pool.victim(SequenceId(1)).unwrap().freed_blocks, 18);
    let owners = pool.owners();
    assert_eq!((owners.sequences[0].reserved.len(), owners.leases.len(), owners.blocks()), (18, 0, 18));
    let rest = pool.allocate(AllocRequest::new(82)).unwrap();
    let mut batch = pool.begin_batch();
    batch.append(&mut sequence, 42).unwrap();
    assert_eq!(sequence.reserved_blocks(), 7);
    for _ in 0..30 {
        batch.append(&mut sequence, 1).unwrap();
    }
    assert_eq!((sequence.len(), sequence.reserved_blocks()), (72, 0));
    let frames: Vec<u32> = sequence.blocks().map(|id| pool.blocks().frame(id).0).collect();
    assert!(frames.windows(2).all(|pair| pair[0] + 1 == pair[1]), "in one run: {frames:?}");
    let full = batch.append(&mut sequence, 1).unwrap_err();
    assert!(matches!(full, SequenceError::Alloc(AllocError::Exhausted { asked: 1, .. })), "{full}");
    drop((rest, batch, sequence));
    quiet(&pool);
}

#[test]
fn what_is_cached_is_shared_and_the_rest_reserved() {
    let pool = caching(100);
    let long = prompt(1, 42);
    drop(serve(&pool, 0, &long));
    assert_eq!(pool.blocks_needed(&request(1, &long).headroom(8)).unwrap(), 13);
    let sequence = pool.admit(&request(1, &long).headroom(8)).unwrap();
    assert_eq!((sequence.len(), sequence.block_count(), sequence.reserved_blocks()), (40, 10, 3));
    assert_eq!(pool.blocks_needed(&request(2, &prompt(2, 42))).unwrap(), 11, "another prompt");
    let salted = PrefixKeys::new().salt(b"other");
    assert_eq!(pool.blocks_needed(&request(2, &long).keys(salted)).unwrap(), 11);
    drop(sequence);
    quiet(&pool);
}

#[test]
fn counting_and_failing_touch_no_cached_block() {
    let pool = caching(64);
    let prompts: Vec<Vec<u32>> = (0..4).map(|number| prompt(number, 64)).collect();
    prompts.iter().for_each(|prompt| drop(serve(&pool, 0, prompt)));
    let before = pool.prefix_cache().unwrap().stats();
    // The oldest one, asked for in vain, stays the oldest.
    let wanted = [&prompts[0][..], &prompt(9, 250)].concat();
    let refused = pool.admit(&request(1, &wanted));
    assert!(matches!(refused, Err(SequenceError::Alloc(AllocError::TooLarge { .. }))), "{refused:?}");
    let held = pool.sequence(SequenceId(7)).tokens(&prompts[3]).unwrap();
    let longer = [&prompts[0][..], &prompt(9, 150)].concat();
    let refused = pool.admit(&request(1, &longer));
    assert!(matches!(refused, Err(SequenceError::Alloc(AllocError::Exhausted { .. }))), "{refused:?}");
    assert_eq!(pool.blocks_needed(&request(1, &longer)).unwrap(), 54);
    drop(held);
    assert_eq!(pool.prefix_cache().unwrap().stats().lookups, before.lookups, "`held` computed nothing");
    assert_eq!((pool.sequence_count(), pool.stats().evictable), (0, 64));
    drop(pool.allocate(AllocRequest::new(8)).unwrap());
    let hashes = [0, 1, 2, 3].map(|at| hashes_of(&pool, &prompts[at]));
    // But for the last block, with the last token.
    let cached = |at: usize| {
        let has = pool.has_cached(&hashes[at][..15]);
        has.iter().take_while(|&&has| has).count()
    };
    assert_eq!(cached(0), 8, "evicted from its end");
    assert_eq!([1, 2, 3].map(cached), [15; 3]);
    quiet(&pool);
}

#[test]
fn bad_requests_change_nothing() {
    let pool = caching(100);
    let tokens = prompt(1, 42);
    let open = pool.admit(&request(1, &tokens)).unwrap();
    let used = pool.stats().used;
    let refusal = |request: AdmitRequest<'_>| pool.admit(&request).unwrap_err();
    assert!(matches!(refusal(request(1, &tokens)), SequenceError::AlreadyOpen { id: SequenceId(1) }));
    assert!(matches!(refusal(request(2, &[])), SequenceError::Invalid { .. }));
    assert!(matches!(
        refusal(request(2, &tokens).headroom(500)),
        SequenceError::Alloc(AllocError::TooLarge { asked: 136, total: 100 })
    ));
    for headroom in [TOKENS_MAX, usize::MAX] {
        let error = refusal(request(2, &tokens).headroom(headroom));
        assert!(matches!(error, SequenceError::Invalid { .. }), "{error}");
    }
    let empty = PrefixKeys::new().salt(b"");
    assert!(matches!(refusal(request(2, &tokens).keys(empty)), SequenceError::Prefix(_)));
    let other = caching(10);
    let mut foreign = other.sequence(SequenceId(5)).open().unwrap();
    let mut batch = pool.begin_batch();
    assert!(matches!(
        batch.append(&mut foreign, Tokens::Announced(1)),
        Err(SequenceError::ForeignSequence { id: SequenceId(5) })
    ));
    assert!(matches!(
        batch.step(&mut [Append::new(&mut foreign, 1)]),
        Err(StepError::Sequence { id: SequenceId(5), error: SequenceError::ForeignSequence { .. } })
    ));
    let mut sequence = open;
    assert!(matches!(
        sequence.reserve(401),
        Err(SequenceError::Alloc(AllocError::TooLarge { asked: 101, total: 100 }))
    ));
    assert!(matches!(sequence.reserve(usize::MAX), Err(SequenceError::Invalid { .. })));
    let foreign_here = poll_once(pin!(other.reserve_async(&mut sequence, 1).into_future()));
    assert!(matches!(foreign_here, Poll::Ready(Err(SequenceError::ForeignSequence { .. }))));
    assert_eq!((pool.stats().used, pool.sequence_count()), (used, 1));
    drop((batch, sequence, foreign));
    quiet(&pool);
}

#[test]
fn a_running_sequence_reserves_and_gives_back() {
    let pool = plain(20);
    let mut sequence = pool.sequence(SequenceId(1)).open().unwrap();
    sequence.reserve(0).unwrap();
    sequence.reserve(10).unwrap();
    assert_eq!(sequence.reserved_blocks(), 3);
    sequence.reserve(12).unwrap();
    assert_eq!(sequence.reserved_blocks(), 3, "12 tokens fit into three blocks");
    let mut batch = pool.begin_batch();
    batch.append(&mut sequence, 5).unwrap();
    assert_eq!((sequence.block_count(), sequence.reserved_blocks()), (2, 1));
    // A fork shares the last block: its copy comes from the reservation.
    let fork = sequence.fork(SequenceId(2)).unwrap();
    assert_eq!(fork.reserved_blocks(), 0);
    sequence.reserve(4).unwrap();
    assert_eq!(sequence.reserved_blocks(), 2);
    let rest = pool.allocate(AllocRequest::new(16)).unwrap();
    let appended = batch.append(&mut sequence, 4).unwrap();
    assert_eq!((appended.new_blocks, appended.copied.is_some(), sequence.reserved_blocks()), (2, true, 0));
    drop(rest);
    batch.finish();
    sequence.reserve(40).unwrap();
    sequence.truncate(1).unwrap();
    assert_eq!(sequence.reserved_blocks(), 10, "a truncation leaves the reservation");
    let batch = pool.begin_batch();
    let free = pool.free_blocks();
    assert_eq!(sequence.release_reservation(), 10);
    assert_eq!(sequence.release_reservation(), 0);
    assert_eq!(pool.free_blocks(), free + 10, "no batch has seen these blocks");
    drop((batch, fork, sequence));
    quiet(&pool);
}

#[test]
fn a_reservation_that_is_too_small_is_used_and_completed() {
    let pool = plain(10);
    let mut sequence = pool.admit(&request(1, &[1; 8])).unwrap();
    let rest = pool.allocate(AllocRequest::new(7)).unwrap();
    let mut batch = pool.begin_batch();
    let refused = batch.append(&mut sequence, 16).unwrap_err();
    assert!(
        matches!(refused, SequenceError::Alloc(AllocError::Exhausted { asked: 2, free: 1, .. })),
        "{refused}"
    );
    assert_eq!((sequence.len(), sequence.reserved_blocks()), (0, 2), "nothing was drawn");
    assert_eq!(batch.append(&mut sequence, 12).unwrap().new_blocks, 3);
    let unknown = batch.append(&mut sequence, Tokens::Announced(1)).unwrap_err();
    assert_eq!(unknown, SequenceError::TokensUnknown { id: SequenceId(1), known: 0 }, "there is no cache");
    drop((rest, batch, sequence));
    quiet(&pool);
}

#[tokio::test]
async fn an_admission_waits_and_leaves_nothing_behind_if_dropped() {
    let pool = caching(20);
    let tokens = prompt(1, 40);
    let all = pool.allocate_owned(AllocRequest::new(20)).unwrap();
    let wanted = request(1, &tokens);
    {
        let mut waiting = pin!(pool.admit_async(&wanted).into_future());
        assert!(poll_once(waiting.as_mut()).is_pending());
        assert_eq!((pool.stats().waiting, pool.sequence_count()), (1, 1));
        let refused = pool.admit(&request(2, &tokens)).unwrap_err();
        let behind = AllocError::Behind {
            asked: 10,
            priority: Priority::Normal,
            waiting: Priority::Normal,
            lacking: 10,
        };
        assert_eq!(refused, SequenceError::Alloc(behind));
        assert!(matches!(pool.admit(&wanted), Err(SequenceError::AlreadyOpen { .. })));
    }
    assert_eq!((pool.stats().waiting, pool.sequence_count()), (0, 0));
    let deadline = Instant::now() + Duration::from_millis(20);
    let late = pool.admit_async(&wanted).until(deadline).await.unwrap_err();
    assert!(matches!(late, SequenceError::Alloc(AllocError::Deadline { asked: 10, .. })), "{late}");
    let (admitted, ()) = soon(async { tokio::join!(pool.admit_async(&wanted), async { drop(all) }) }).await;
    let sequence = admitted.unwrap();
    assert_eq!((sequence.len(), sequence.reserved_blocks()), (0, 10));
    drop(sequence);
    quiet(&pool);
}

#[tokio::test]
async fn the_prefix_may_be_evicted_grow_or_be_cleared_while_an_admission_waits() {
    let tokens = prompt(1, 80);
    for (change, cached) in [("evicted", 0), ("grown", 76), ("cleared", 0)] {
        let pool = caching(40);
        drop(serve(&pool, 0, &tokens[..41]));
        let held = pool.allocate_owned(AllocRequest::new(29)).unwrap();
        // 40 blocks, ten of them cached, and one is free.
        let wanted = request(1, &tokens).headroom(80);
        let mut waiting = pin!(pool.admit_async(&wanted).into_future());
        assert!(poll_once(waiting.as_mut()).is_pending());
        match change {
            "evicted" => {
                drop(pool.allocate(AllocRequest::new(11)).unwrap());
                assert!(poll_once(waiting.as_mut()).is_pending());
                drop(held);
            }
            "grown" => {
                drop(held);
                drop(serve(&pool, 9, &tokens));
            }
            _ => {
                pool.clear_prefix_cache();
                assert!(poll_once(waiting.as_mut()).is_pending());
                drop(held);
            }
        }
        let mut sequence = soon(waiting).await.unwrap();
        let blocks = sequence.block_count() + sequence.reserved_blocks();
        assert_eq!((sequence.len(), blocks), (cached, 40), "{change}");
        append(&pool, &mut sequence, Tokens::Announced(80));
        drop(sequence);
        let again = pool.admit(&request(2, &tokens)).unwrap();
        assert_eq!(again.len(), 76, "{change}: what the admitted sequence computed is cached");
        drop(again);
        quiet(&pool);
    }
}

#[test]
fn a_step_without_enough_blocks_names_the_sequences_and_changes_none() {
    let pool = caching(20);
    let mut sequences: Vec<Sequence> = (0..5)
        .map(|id| {
            let (sequence, _) = serve(&pool, id, &prompt(id as u32, if id == 2 { 7 } else { 8 }));
            sequence
        })
        .collect();
    // Four sequences need a block, one of them has reserved it.
    sequences[3].reserve(1).unwrap();
    let rest = pool.allocate(AllocRequest::new(8)).unwrap();
    assert_eq!(pool.available_blocks(), 1);
    let mut batch = pool.begin_batch();
    let tokens = [1, 2, 3, 4, 5];
    let lengths: Vec<usize> = sequences.iter().map(Sequence::len).collect();
    let refused = { batch.step(&mut with_ids(&mut sequences, &tokens)).unwrap_err() };
    let StepError::Lacking { sequences: lacking, error } = &refused else { panic!("{refused}") };
    assert_eq!(lacking[..], [SequenceId(1), SequenceId(4)]);
    assert!(matches!(error, AllocError::Exhausted { asked: 1, .. }), "{refused}");
    assert_eq!(sequences.iter().map(Sequence::len).collect::<Vec<_>>(), lengths);
    assert_eq!(sequences.iter().map(Sequence::reserved_blocks).collect::<Vec<_>>(), [0, 0, 0, 1, 0]);
    assert_eq!(pool.available_blocks(), 1, "the block of the first was given back");
    drop(rest);
    batch.finish();
    let mut batch = pool.begin_batch();
    let stepped = batch.step(&mut with_ids(&mut sequences, &tokens)).unwrap();
    assert_eq!((stepped.new_blocks, stepped.copied.len()), (4, 0));
    let mut step: Vec<Append> = sequences.iter_mut().map(|sequence| Append::new(sequence, 1)).collect();
    assert_eq!(batch.step(&mut step).unwrap().new_blocks, 1, "the third");
    assert!(sequences.iter().zip(lengths).all(|(sequence, length)| sequence.len() == length + 2));
    let unknown = batch.step(&mut [Append::new(&mut sequences[0], &[1])]).unwrap_err();
    assert!(matches!(
        unknown,
        StepError::Sequence { id: SequenceId(0), error: SequenceError::TokensUnknown { .. } }
    ));
    assert!(unknown.to_string().starts_with("the ids of sequence 0's"), "named once: {unknown}");
    drop((batch, sequences));
    quiet(&pool);
}

fn with_ids<'a>(sequences: &'a mut [Sequence], ids: &'a [u32]) -> Vec<Append<'a>> {
    let pairs = sequences.iter_mut().zip(ids);
    pairs.map(|(sequence, id)| Append::new(sequence, std::slice::from_ref(id))).collect()
}

/// Chunks of prompts, decoded tokens and drafts in one step, which has blocks for all or for none.
#[test]
fn a_step_is_of_chunks_decoded_tokens_and_drafts() {
    let pool = caching(20);
    let (mut decoding, _) = serve(&pool, 1, &prompt(1, 8));
    let (mut drafting, _) = serve(&pool, 2, &prompt(2, 7));
    let mut reading = pool.sequence(SequenceId(3)).tokens(&prompt(3, 30)).unwrap();
    let mut done = pool.sequence(SequenceId(4)).tokens(&prompt(1, 9)).unwrap();
    assert_eq!(done.len(), 8);
    let mut batch = pool.begin_batch();
    let mut step = |batch: &mut Batch, chunk: usize| {
        let mut step = [
            Append::new(&mut decoding, &[7]),
            Append::new(&mut drafting, Tokens::Draft(6)),
            Append::new(&mut reading, Tokens::Announced(chunk)),
            Append::new(&mut done, Tokens::Announced(4)),
        ];
        let outcome = batch.step(&mut step);
        (outcome, [decoding.len(), drafting.len(), reading.len(), done.len()])
    };
    let rest = pool.allocate(AllocRequest::new(pool.available_blocks() - 6)).unwrap();
    // One block for the token, two for the draft, four for the chunk, and one for the last token,
    // for which there would be room.
    let (refused, lengths) = step(&mut batch, 13);
    let StepError::Lacking { sequences, .. } = refused.unwrap_err() else { panic!("it lacks blocks") };
    assert_eq!((sequences, lengths), (vec![SequenceId(3)], [8, 7, 0, 8]));
    assert_eq!(pool.available_blocks(), 6);
    drop(rest);
    batch.finish();
    let mut batch = pool.begin_batch();
    let (stepped, lengths) = step(&mut batch, 13);
    assert_eq!((stepped.unwrap().new_blocks, lengths), (8, [9, 13, 13, 9]));
    // Nothing is left to append to one of them.
    let (stepped, lengths) = step(&mut batch, 100);
    assert_eq!((stepped.unwrap().new_blocks, lengths), (5, [10, 19, 30, 9]));
    batch.finish();
    assert_eq!((decoding.announced(), drafting.committed(), drafting.announced()), (10, 7, 7));
    let zero = pool.begin_batch().step(&mut [Append::new(&mut reading, 0)]).unwrap_err();
    assert!(matches!(zero, StepError::Sequence { error: SequenceError::Invalid { .. }, .. }), "{zero}");
    // Of the draft, two tokens are accepted.
    let beyond = drafting.accept(&[0; 13]).unwrap_err();
    assert!(beyond.to_string().ends_with("tokens to commit: got 20, expected at most its 19 tokens"));
    drafting.accept(&[70, 71]).unwrap();
    assert_eq!((drafting.len(), drafting.committed(), drafting.announced()), (9, 9, 9));
    drafting.announce(&[72]).unwrap();
    let ahead = drafting.accept(&[]).unwrap_err();
    assert!(matches!(ahead, SequenceError::TokensAhead { length: 9, announced: 10, .. }), "{ahead}");
    drop((decoding, drafting, reading, done));
    let mut tokens = prompt(2, 7);
    tokens.extend([70, 71, 5]);
    assert_eq!(pool.sequence(SequenceId(5)).tokens(&tokens).unwrap().len(), 8);
    quiet(&pool);
}

#[test]
fn a_pinned_prefix_is_not_evicted_and_outlives_its_sequence() {
    let pool = pool_of(40, PrefixConfig::new());
    let keys = PrefixKeys::new();
    let system = prompt(1, 42);
    let none = pool.pin_prefix(&keys, &system).unwrap_err();
    assert!(matches!(none, SequenceError::Prefix(PrefixError::NotCached { tokens: 42 })), "{none}");
    assert!(matches!(plain(10).pin_prefix(&keys, &system), Err(SequenceError::Prefix(PrefixError::NoCache))));
    let (sequence, _) = serve(&pool, 1, &system);
    let pinned = pool.pin_prefix(&keys, &system).unwrap();
    drop(sequence);
    let longer = [&system[..40], &[7; 20]].concat();
    let same = pool.pin_prefix(&keys, &longer).unwrap();
    let listed = pool.pinned_prefixes();
    assert_eq!(listed.iter().map(|info| (info.tokens, info.blocks)).collect::<Vec<_>>(), [(40, 10); 2]);
    assert_eq!([listed[0].number, listed[1].number], [pinned.number(), same.number()]);
    drop(pool.allocate(AllocRequest::new(30)).unwrap());
    assert!(pool.allocate(AllocRequest::new(31)).is_err(), "ten blocks are pinned");
    assert_eq!(pool.blocks_needed(&request(2, &longer)).unwrap(), 5);
    pool.clear_prefix_cache();
    assert_eq!(pool.blocks_needed(&request(2, &longer)).unwrap(), 15, "not found any more");
    drop(pinned);
    assert_eq!((pool.pinned_prefixes().len(), pool.stats().used), (1, 10));
    drop(same);
    assert!(pool.pinned_prefixes().is_empty());
    assert_eq!(pool.allocate(AllocRequest::new(40)).unwrap().blocks().len(), 40);
    quiet(&pool);
}

#[test]
fn a_contiguous_admission_lies_in_one_run() {
    let pool = plain(64);
    // Every second block is owned.
    let mut leases: Vec<_> = (0..64).map(|_| pool.allocate(AllocRequest::new(1)).unwrap()).collect();
    let mut place = 0;
    leases.retain(|_| {
        place += 1;
        place % 2 == 0
    });
    let refused = pool.admit(&request(1, &[1; 12]).contiguous()).unwrap_err();
    assert!(matches!(refused, SequenceError::Alloc(AllocError::NoRun { asked: 3, .. })), "{refused}");
    drop(leases);
    let sequence = pool.admit(&request(1, &[1; 12]).headroom(20).contiguous()).unwrap();
    assert_eq!(sequence.reserved_blocks() * BLOCK_TOKENS, 32);
    drop(sequence);
    quiet(&pool);
}
