//! Theorem: no lookup that begins after a change of the version of the weights has returned finds a
//! block of another version, whichever threads hit, computed or registered meanwhile; and a block
//! that is found after a return to its version was computed with that version alone, as was
//! everything before it. The root that a request copies is whole, and of the version that it looked
//! up. The same of the version of an adapter.
//!
//! An import registers blocks under hashes that it brings, like the end of a batch: it has no model
//! of its own. Not covered: more than two preemptions (one, beside two changes), and groups of
//! layers, whose lists are hashed from one look (tests of the library).
#![cfg(kvpool_loom)]

use kvpool::prefix::{HashKey, PrefixConfig, PrefixKeys, Weights};
use kvpool::storage::KvLayout;
use kvpool::{Pool, Sequence, SequenceId, WeightsVersion};
use kvpool_loom_tests::{check_to, conclude, join_last};
use loom::thread;

/// Tokens per block of the layout.
const BLOCK_TOKENS: usize = 4;

fn open(blocks: usize) -> Pool {
    Pool::builder(KvLayout::named("tiny").unwrap())
        .blocks(blocks)
        .without_null_block()
        .segment_blocks(4)
        .without_storage()
        .magazine_blocks(0)
        .prefix_cache(PrefixConfig::new().key(HashKey::from_bytes([7; 32])))
        .build()
        .unwrap()
}

fn begin(pool: &Pool, version: u64) {
    pool.begin_version(WeightsVersion(version)).unwrap();
}

fn versions(sequence: &Sequence) -> Vec<(usize, u64)> {
    sequence.versions().map(|range| (range.from, range.model.0)).collect()
}

fn hit(pool: &Pool, prompt: &[u32]) -> usize {
    pool.sequence(SequenceId(9)).tokens(prompt).unwrap().len()
}

fn compute(pool: &Pool, sequence: &mut Sequence, tokens: usize) {
    let mut batch = pool.begin_batch();
    batch.append(sequence, tokens).unwrap();
    batch.finish();
}

fn close(pool: &Pool) {
    conclude(pool.blocks());
    let report = pool.audit().unwrap();
    assert_eq!((report.owned, pool.sequence_count()), (0, 0), "{report:?}");
}

/// A batch begins, computes a block of a sequence that was opened before, and registers it.
#[test]
fn a_change_beside_a_batch() {
    check_to(2, "weights::a_change_beside_a_batch", || {
        let prompt = [1; BLOCK_TOKENS + 1];
        let pool = open(2);
        let mut sequence = pool.sequence(SequenceId(1)).tokens(&prompt).unwrap();
        let other = pool.clone();
        let thread = thread::spawn(move || {
            compute(&other, &mut sequence, BLOCK_TOKENS);
            versions(&sequence)
        });
        begin(&pool, 1);
        assert_eq!(hit(&pool, &prompt), 0, "found after the change");
        let computed = join_last(thread);
        assert_eq!(hit(&pool, &prompt), 0, "registered after the change");
        begin(&pool, 0);
        let expected = if computed == [(0, 0)] { BLOCK_TOKENS } else { 0 };
        assert_eq!(hit(&pool, &prompt), expected, "{computed:?}");
        close(&pool);
    });
}

/// As above, of the version of an adapter.
#[test]
fn a_change_of_an_adapter_beside_a_batch() {
    check_to(2, "weights::a_change_of_an_adapter_beside_a_batch", || {
        let (prompt, keys) = ([1; BLOCK_TOKENS + 1], PrefixKeys::new().adapter(b"one"));
        let pool = open(2);
        let begin = |version| pool.begin_adapter_version(b"one", WeightsVersion(version)).unwrap();
        let hit = || pool.sequence(SequenceId(9)).keys(keys).tokens(&prompt).unwrap().len();
        let mut sequence = pool.sequence(SequenceId(1)).keys(keys).tokens(&prompt).unwrap();
        let other = pool.clone();
        let thread = thread::spawn(move || {
            compute(&other, &mut sequence, BLOCK_TOKENS);
            sequence.versions().map(|range| range.adapter).collect::<Vec<_>>()
        });
        begin(1);
        assert_eq!(hit(), 0, "found after the change");
        let computed = join_last(thread);
        assert_eq!(hit(), 0, "registered after the change");
        begin(0);
        // Known, and that of the hashes: only then it is found.
        let expected = if computed == [Some(WeightsVersion(0))] { BLOCK_TOKENS } else { 0 };
        assert_eq!(hit(), expected, "{computed:?}");
        close(&pool);
    });
}

/// A request is looked up, and computes the rest of its prompt.
#[test]
fn a_change_beside_a_request() {
    check_to(2, "weights::a_change_beside_a_request", || {
        let prompt = [1; 2 * BLOCK_TOKENS + 1];
        let pool = open(6);
        let mut first = pool.sequence(SequenceId(1)).tokens(&prompt[..=BLOCK_TOKENS]).unwrap();
        compute(&pool, &mut first, BLOCK_TOKENS);
        drop(first);
        let other = pool.clone();
        let thread = thread::spawn(move || {
            let mut sequence = other.sequence(SequenceId(1)).tokens(&prompt).unwrap();
            let cached = sequence.len();
            compute(&other, &mut sequence, 2 * BLOCK_TOKENS - cached);
            (cached, versions(&sequence))
        });
        begin(&pool, 1);
        let (cached, computed) = join_last(thread);
        let found = [1, 0].map(|version| {
            begin(&pool, version);
            hit(&pool, &prompt)
        });
        let expected = match computed[..] {
            [(0, 0)] => [0, 2 * BLOCK_TOKENS],
            [(0, 1)] => [2 * BLOCK_TOKENS, BLOCK_TOKENS],
            // Hashed before the change, and computed after it.
            _ => [0, BLOCK_TOKENS],
        };
        assert_eq!(found, expected, "{cached} cached, {computed:?}");
        assert_eq!(cached > 0, computed[0] == (0, 0), "{computed:?}");
        close(&pool);
    });
}

/// A request is hashed while the version changes to another one and back.
#[test]
fn a_request_beside_two_changes() {
    check_to(1, "weights::a_request_beside_two_changes", || {
        let tokens = [1; BLOCK_TOKENS];
        let pool = open(1);
        begin(&pool, 1);
        let of = |version| {
            let weights = Weights { model: WeightsVersion(version), ..Weights::default() };
            let hasher = pool.prefix_cache().unwrap().hasher();
            hasher.hashes(&PrefixKeys::new().weights(weights), &tokens).unwrap()
        };
        let known = [of(1), of(2)];
        let other = pool.clone();
        let thread = thread::spawn(move || {
            let mut sequence = other.sequence(SequenceId(1)).open().unwrap();
            sequence.announce(&tokens).unwrap();
            (sequence.weights().unwrap().model.0, sequence.block_hashes().to_vec())
        });
        begin(&pool, 2);
        begin(&pool, 1);
        let (version, hashes) = join_last(thread);
        assert_eq!(hashes, known[version as usize - 1], "not the root of version {version}");
        close(&pool);
    });
}
