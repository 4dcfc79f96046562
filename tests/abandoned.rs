//! Batches that do not finish: nothing of what was appended under them is found, and the step can
//! be tried again. Sequences that close while a batch writes to them: what it wrote is found later.

use kvpool::prefix::PrefixConfig;
use kvpool::storage::KvLayout;
use kvpool::{Append, BlockTable, Dtype, Pool, Sequence, SequenceId, Tokens};
use kvpool_testkit::steps::{append, begin_with};

/// Numbers of tokens per block that every test runs with.
const SIZES: [usize; 4] = [1, 2, 3, 16];

fn pool(block_tokens: usize, blocks: usize) -> Pool {
    let layout = KvLayout::builder().layers(1).kv_heads(1).head_dim(4).block_tokens(block_tokens);
    let layout = layout.dtype(Dtype::F32).build().unwrap();
    Pool::builder(layout).blocks(blocks).prefix_cache(PrefixConfig::new()).build().unwrap()
}

fn prompt(tokens: usize) -> Vec<u32> {
    (0..tokens as u32).map(|token| token * 7 + 1).collect()
}

/// Opens the prompt, and returns the number of cached tokens.
fn cached(pool: &Pool, id: u64, prompt: &[u32]) -> usize {
    pool.sequence(SequenceId(id)).tokens(prompt).unwrap().len()
}

/// Number of cached tokens of a prompt that was computed as a whole.
fn all_of(prompt: &[u32], block_tokens: usize) -> usize {
    (prompt.len() - 1) / block_tokens * block_tokens
}

/// `batch.append(..)?; launch()?; batch.finish();` with a launch that fails.
#[test]
fn a_failed_launch_leaves_nothing_to_find() {
    for block_tokens in SIZES {
        let pool = pool(block_tokens, 200);
        let prompt = prompt(41);
        let mut sequence = pool.sequence(SequenceId(1)).tokens(&prompt).unwrap();
        let step = |sequence: &mut Sequence, fails: bool| -> Result<(), Box<dyn std::error::Error>> {
            let mut batch = pool.begin_batch();
            batch.append(sequence, Tokens::Announced(41))?;
            if fails {
                return Err("launch failed".into());
            }
            batch.finish();
            Ok(())
        };
        assert!(step(&mut sequence, true).is_err());
        assert_eq!(cached(&pool, 2, &prompt), 0, "{block_tokens} tokens a block");
        assert_eq!((sequence.len(), sequence.committed(), sequence.announced()), (0, 0, 41));
        // The same step again.
        step(&mut sequence, false).unwrap();
        assert_eq!(sequence.len(), 41);
        drop(sequence);
        assert_eq!(cached(&pool, 3, &prompt), all_of(&prompt, block_tokens), "{block_tokens} tokens a block");
        pool.audit().unwrap();
    }
}

/// Later tokens, appended by batches that finish, were computed from tokens that were not.
#[test]
fn nothing_computed_from_them_is_found() {
    for block_tokens in SIZES {
        for (computed, lost) in [(0, 5), (4, 3), (6, 6), (5, 1), (16, 16), (17, 31)] {
            let pool = pool(block_tokens, 200);
            let prompt = prompt(60);
            let mut sequence = pool.sequence(SequenceId(1)).tokens(&prompt).unwrap();
            if computed > 0 {
                append(&pool, &mut sequence, computed);
            }
            let mut first = pool.begin_batch();
            first.append(&mut sequence, lost).unwrap();
            append(&pool, &mut sequence, 60 - computed - lost);
            drop(first);
            let case = format!("{computed} + {lost}, {block_tokens} tokens a block");
            assert!(cached(&pool, 2, &prompt) <= computed, "{case}");
            assert_eq!(sequence.len(), computed, "{case}");
            append(&pool, &mut sequence, 60 - computed);
            drop(sequence);
            assert_eq!(cached(&pool, 3, &prompt), all_of(&prompt, block_tokens), "{case}");
            pool.audit().unwrap();
        }
    }
}

/// In whatever order the batches end, and if the sequence closes first.
#[test]
fn forks_and_closed_sequences_withdraw_too() {
    for block_tokens in SIZES {
        for closes_first in [false, true] {
            let pool = pool(block_tokens, 200);
            let prompt = prompt(33);
            let mut sequence = pool.sequence(SequenceId(1)).reuse_tail().tokens(&prompt).unwrap();
            let mut batch = pool.begin_batch();
            batch.append(&mut sequence, 33).unwrap();
            let mut fork = sequence.fork(SequenceId(2)).unwrap();
            if closes_first {
                drop(sequence);
                drop(batch);
            } else {
                drop(batch);
                drop(sequence);
            }
            assert_eq!((fork.len(), fork.announced()), (0, 33));
            assert_eq!(cached(&pool, 3, &prompt), 0);
            append(&pool, &mut fork, 33);
            assert_eq!(cached(&pool, 3, &prompt), all_of(&prompt, block_tokens));
            drop(fork);
            assert_eq!(cached(&pool, 3, &prompt), all_of(&prompt, block_tokens));
            pool.audit().unwrap();
        }
    }
}

/// The ids that came with the append go with it, so that the same call can be made again.
#[test]
fn decoded_tokens_can_be_appended_again() {
    for block_tokens in SIZES {
        let pool = pool(block_tokens, 200);
        let prompt = prompt(7);
        let mut sequence = pool.sequence(SequenceId(1)).tokens(&prompt).unwrap();
        append(&pool, &mut sequence, 7);
        for token in 100..140 {
            for finishes in [false, false, true] {
                let mut batch = pool.begin_batch();
                if token % 2 == 0 {
                    batch.append(&mut sequence, &[token]).unwrap();
                } else {
                    batch.step(&mut [Append::new(&mut sequence, &[token])]).unwrap();
                }
                if finishes {
                    batch.finish();
                }
            }
            assert_eq!(sequence.len(), sequence.announced());
        }
        assert_eq!(sequence.len(), 47);
        drop(sequence);
        let all: Vec<u32> = prompt.into_iter().chain(100..140).collect();
        assert_eq!(cached(&pool, 2, &all), all_of(&all, block_tokens));
        pool.audit().unwrap();
    }
}

/// Blocks of a batch that was abandoned may be in tables of others: they are not reused early.
#[test]
fn a_released_reservation_waits_for_readers() {
    let pool = pool(4, 20);
    let mut sequence = pool.sequence(SequenceId(1)).tokens(&prompt(40)).unwrap();
    let mut batch = pool.begin_batch();
    batch.append(&mut sequence, 40).unwrap();
    let reader = pool.begin_batch();
    let mut table = BlockTable::new();
    reader.block_table([&sequence], &mut table).unwrap();
    drop(batch);
    assert_eq!(sequence.len(), 0);
    sequence.reserve(1).unwrap();
    assert_eq!(sequence.release_reservation(), 10);
    let others = pool.allocate(kvpool::AllocRequest::new(9)).unwrap();
    let frames: Vec<i32> = others.frames().map(|frame| frame.0 as i32).collect();
    assert!(table.entries().iter().all(|frame| !frames.contains(frame)), "{table:?} and {frames:?}");
    drop(others);
    reader.finish();
    drop(sequence);
    pool.audit().unwrap();
}

/// A sequence that closes before the batch finishes is found afterwards, also its unfinished block;
/// its id is free at once.
#[test]
fn what_a_batch_in_flight_wrote_is_found_after_it_finished() {
    for block_tokens in SIZES {
        let pool = pool(block_tokens, 100);
        let prompt = prompt(22);
        for reopens in [false, true] {
            let tokens: Vec<u32> = prompt.iter().map(|token| token + u32::from(reopens)).collect();
            let mut sequence = pool.sequence(SequenceId(1)).reuse_tail().tokens(&tokens).unwrap();
            let mut first = pool.begin_batch();
            first.append(&mut sequence, 9).unwrap();
            let mut second = pool.begin_batch();
            second.append(&mut sequence, 13).unwrap();
            drop(sequence);
            let again = reopens.then(|| pool.sequence(SequenceId(1)).open().unwrap());
            second.finish();
            assert_eq!(cached(&pool, 2, &tokens), 0, "the first batch may fail");
            first.finish();
            assert_eq!(
                cached(&pool, 2, &tokens),
                all_of(&tokens, block_tokens),
                "{block_tokens} tokens a block"
            );
            let longer: Vec<u32> = tokens.iter().copied().chain([1]).collect();
            assert_eq!(pool.sequence(SequenceId(2)).reuse_tail().tokens(&longer).unwrap().len(), 22);
            drop(again);
            pool.audit().unwrap();
        }
    }
}

/// On many threads: what is found was appended under batches that finished.
#[test]
fn threads_that_abandon_batches() {
    let pool = pool(2, 4_000);
    let seed = std::env::var("KVPOOL_SIM_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(7);
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4u64)
            .map(|thread| {
                let pool = pool.clone();
                scope.spawn(move || {
                    let mut random = fastrand::Rng::with_seed(seed + thread);
                    for round in 0..400 {
                        let id = SequenceId(thread * 1_000_000 + round);
                        // The second token says whether the first batch fails: no prompt with a 1
                        // there is ever computed.
                        let fails = random.bool();
                        let mut tokens: Vec<u32> = vec![random.u32(0..50), u32::from(fails)];
                        tokens.extend(0..random.u32(4..40));
                        let mut sequence = pool.sequence(id).tokens(&tokens).unwrap();
                        assert!(!fails || sequence.len() < 2, "found {} of {tokens:?}", sequence.len());
                        let announced = Tokens::Announced(tokens.len());
                        let (batch, _) = begin_with(&pool, |batch| batch.append(&mut sequence, announced));
                        let ends = scope.spawn(move || if fails { drop(batch) } else { batch.finish() });
                        if random.bool() {
                            let more = random.usize(1..5);
                            let (next, new) = begin_with(&pool, |batch| batch.append(&mut sequence, more));
                            let new = new.tokens;
                            assert!(new.start == tokens.len() || fails);
                            if new.start == tokens.len() {
                                next.finish();
                            }
                        }
                        if random.bool() {
                            drop(sequence);
                            ends.join().unwrap();
                        } else {
                            ends.join().unwrap();
                            assert!(!fails || sequence.len() < tokens.len());
                        }
                    }
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
    pool.audit().unwrap();
    assert_eq!(pool.sequence_count(), 0);
}

/// More batches than the log keeps are abandoned while one that filled blocks is in flight.
#[test]
fn a_batch_in_flight_is_not_taken_for_an_abandoned_one() {
    let pool = pool(4, 200);
    let prompt = prompt(17);
    let mut sequence = pool.sequence(SequenceId(1)).tokens(&prompt).unwrap();
    let mut filled = pool.begin_batch();
    filled.append(&mut sequence, 16).unwrap();
    let mut other = pool.sequence(SequenceId(9)).open().unwrap();
    for _ in 0..65_537 {
        let mut batch = pool.begin_batch();
        batch.append(&mut other, 1).unwrap();
        drop(batch);
    }
    assert_eq!((sequence.len(), other.len()), (16, 0));
    let mut batch = pool.begin_batch();
    assert_eq!(batch.append(&mut sequence, 1).unwrap().tokens, 16..17);
    filled.finish();
    batch.finish();
    // Which batch wrote these tokens cannot be told any more; what was registered is found.
    sequence.commit(0).unwrap();
    assert_eq!(sequence.len(), 0);
    assert_eq!(cached(&pool, 3, &prompt), 16);
    append(&pool, &mut sequence, 17);
    drop((sequence, other));
    pool.audit().unwrap();
}

/// Another batch that wrote to the sequence is in flight: its work may still write to the blocks.
#[test]
fn blocks_that_a_batch_in_flight_writes_are_not_reused() {
    let pool = pool(4, 200);
    let mut sequence = pool.sequence(SequenceId(1)).tokens(&prompt(41)).unwrap();
    let mut first = pool.begin_batch();
    first.append(&mut sequence, 4).unwrap();
    let mut behind = pool.begin_batch();
    behind.append(&mut sequence, 8).unwrap();
    let (mut old, mut new) = (vec![], vec![]);
    behind.slot_mapping(&sequence, 4..12, &mut old).unwrap();
    drop(first);
    let mut again = pool.begin_batch();
    again.append(&mut sequence, 12).unwrap();
    again.slot_mapping(&sequence, 0..12, &mut new).unwrap();
    assert!(old.iter().all(|slot| !new.contains(slot)), "{old:?} and {new:?}");
    again.finish();
    behind.finish();
    drop(sequence);
    assert_eq!(cached(&pool, 2, &prompt(41)), 12);
    pool.audit().unwrap();
}

/// Tokens that were removed in between, and extra keys, are as the sequence says.
#[test]
fn announced_tokens_stay_consistent() {
    let pool = pool(16, 200);
    let mut sequence = pool.sequence(SequenceId(1)).tokens(&prompt(100)).unwrap();
    let mut batch = pool.begin_batch();
    batch.append(&mut sequence, 60).unwrap();
    sequence.truncate(50).unwrap();
    batch.append(&mut sequence, &[5; 10]).unwrap();
    drop(batch);
    assert_eq!((sequence.len(), sequence.announced(), sequence.block_hashes().len()), (0, 50, 3));
    sequence.extra_key(50..60, b"image").unwrap();
    let mut batch = pool.begin_batch();
    batch.append(&mut sequence, Tokens::Announced(usize::MAX)).unwrap();
    batch.append(&mut sequence, &[6; 10]).unwrap();
    batch.finish();
    assert_eq!(sequence.len(), 60);
    drop(sequence);
    pool.audit().unwrap();
}
